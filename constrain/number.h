/* Numbers of JSON schemas as expressions: bounds and divisors, exactly, on the decimal digits. A
 * number with a bound or a divisor is written without an exponent. */
#ifndef KEEPD_CONSTRAIN_NUMBER_H
#define KEEPD_CONSTRAIN_NUMBER_H

#include "constrain/json.h"

/* A decimal number: its digits before and after the point, without needless zeros. */
struct decimal {
    bool negative; /* false for 0 */
    int whole, fraction;
    char digits[2 * CONSTRAIN_DIGITS_MAX]; /* both parts, '0' .. '9' */
};

/* Returns the exponent after 'e', limited to half of the range of a long, so that counts of digits
 * may be added. */
long decimal_exponent(const char *text);
/* Reads the text of a JSON number. ERR_LIMIT: too many digits. */
int decimal_read(const char *text, struct decimal *out);
size_t decimal_write(const struct decimal *d, char *text); /* without exponent and final NUL */
int decimal_compare(const struct decimal *a, const struct decimal *b); /* -1, 0, 1 */

struct number_rules {
    bool integer;
    bool has_min, has_max, above_min, below_max; /* above, below: the bound itself is excluded */
    struct decimal min, max;
    const struct decimal *divisors;
    int divisor_count;
};

/* NODE_NONE: no number satisfies them. ERR_LIMIT, ERR_INVALID: a divisor is too long or 0. */
int number_node(struct json_nodes *nodes, const struct number_rules *rules, uint32_t *out);

#endif
