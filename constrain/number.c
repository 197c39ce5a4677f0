#include "constrain/number.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* ---- Decimals ---- */

static void number_strip(struct decimal *d) {
    int zeros = 0;
    while (d->fraction > 0 && d->digits[d->whole + d->fraction - 1] == '0') d->fraction--;
    while (zeros < d->whole - 1 && d->digits[zeros] == '0') zeros++;
    memmove(d->digits, d->digits + zeros, sizeof d->digits - (size_t)zeros);
    d->whole -= zeros;
    if (d->whole == 1 && d->fraction == 0 && d->digits[0] == '0') d->negative = false;
}

long decimal_exponent(const char *text) {
    const long most = LONG_MAX / 2;
    long exponent = strtol(text, NULL, 10);
    if (exponent > most) return most;
    return exponent < -most ? -most : exponent;
}

/* Collects the digits of a text in `digits`. *point: how many of them stand before the point once
 * the exponent is applied. */
static int collect_digits(const char *text, char *digits, int room, int *count, long *point) {
    bool seen_point = false;
    *count = 0;
    *point = 0;
    for (; *text != '\0' && *text != 'e' && *text != 'E'; text++) {
        if (*text == '.') {
            seen_point = true;
            continue;
        }
        if (*count == room) return ERR_LIMIT;
        digits[(*count)++] = *text;
        if (!seen_point) ++*point;
    }
    if (*text != '\0') *point += decimal_exponent(text + 1);
    return 0;
}

int decimal_read(const char *text, struct decimal *out) {
    char digits[CONSTRAIN_DIGITS_MAX];
    int count;
    long point;
    *out = (struct decimal){.negative = *text == '-'};
    if (collect_digits(text + (*text == '-'), digits, CONSTRAIN_DIGITS_MAX, &count, &point) != 0 ||
        point > CONSTRAIN_DIGITS_MAX || count - point > CONSTRAIN_DIGITS_MAX)
        return ERR_LIMIT;
    long first = point < 1 ? point : 1; /* a number has at least one digit before the point */
    first = first < 1 ? first - 1 : 0;
    int used = 0;
    for (long i = first; i < count || i < point; i++) {
        if (used == (int)sizeof out->digits) return ERR_LIMIT;
        out->digits[used++] = i >= 0 && i < count ? digits[i] : '0';
        if (i < point || (i == first && point < 1)) out->whole++;
    }
    out->fraction = used - out->whole;
    number_strip(out);
    return 0;
}

size_t decimal_write(const struct decimal *d, char *text) {
    size_t size = 0;
    if (d->negative) text[size++] = '-';
    for (int i = 0; i < d->whole + d->fraction; i++) {
        if (i == d->whole) text[size++] = '.';
        text[size++] = d->digits[i];
    }
    return size;
}

static int compare_size(const struct decimal *a, const struct decimal *b) {
    if (a->whole != b->whole) return a->whole < b->whole ? -1 : 1;
    int shared = a->fraction < b->fraction ? a->fraction : b->fraction;
    int order = memcmp(a->digits, b->digits, (size_t)a->whole + (size_t)shared);
    if (order != 0) return order < 0 ? -1 : 1;
    return (a->fraction > b->fraction) - (a->fraction < b->fraction);
}

int decimal_compare(const struct decimal *a, const struct decimal *b) {
    if (a->negative != b->negative) return a->negative ? -1 : 1;
    return a->negative ? -compare_size(a, b) : compare_size(a, b);
}

static bool is_zero(const struct decimal *d) {
    return d->whole == 1 && d->fraction == 0 && d->digits[0] == '0';
}

/* ---- Below a bound ---- */

static uint32_t digit_range(struct node_pool *pool, int first, int last) {
    return first > last ? NODE_NONE : node_range(pool, (unsigned)first, (unsigned)last);
}

static uint32_t any_digits(struct node_pool *pool, uint32_t min, uint32_t max) {
    return node_repeat(pool, node_range(pool, '0', '9'), min, max);
}

static uint32_t point_node(struct node_pool *pool) {
    return node_range(pool, '.', '.');
}

static uint32_t any_fraction(struct node_pool *pool) {
    return node_option(pool, node_seq(pool, point_node(pool), any_digits(pool, 1, NODE_ENDLESS)));
}

/* Builds the fractions, with the point, of numbers whose whole part is that of the bound. */
static uint32_t fraction_below(struct node_pool *pool, const struct decimal *d, bool inclusive) {
    const char *digits = d->digits + d->whole;
    uint32_t zeros = node_repeat(pool, node_range(pool, '0', '0'), 0, NODE_ENDLESS), rest, some;
    rest = inclusive ? zeros : NODE_NONE;
    some = inclusive ? node_repeat(pool, node_range(pool, '0', '0'), 1, NODE_ENDLESS) : NODE_NONE;
    for (int i = d->fraction - 1; i >= 0; i--) {
        const uint32_t list[] = {node_seq(pool, digit_range(pool, '0', digits[i] - 1),
                                          any_digits(pool, 0, NODE_ENDLESS)),
                                 node_seq(pool, digit_range(pool, digits[i], digits[i]), rest)};
        some = node_alt(pool, list, 2);
        /* A shorter fraction stands for zeros and is below the bound, whose last digit is not 0. */
        rest = node_option(pool, some);
    }
    uint32_t written = node_seq(pool, point_node(pool), some);
    return d->fraction > 0 || inclusive ? node_option(pool, written) : written;
}

/* Builds the unsigned decimals below |d|, or not above it. */
static uint32_t below(struct node_pool *pool, const struct decimal *d, bool inclusive) {
    uint32_t list = node_list_open(pool), count = (uint32_t)d->whole;
    uint32_t fraction = any_fraction(pool), prefix = NODE_EMPTY;
    if (count > 1) {
        const uint32_t shorter[] = {
            digit_range(pool, '0', '0'),
            node_seq(pool, digit_range(pool, '1', '9'), any_digits(pool, 0, count - 2))};
        node_list_add(pool, node_seq(pool, node_alt(pool, shorter, 2), fraction));
    }
    for (uint32_t i = 0; i < count; i++) {
        int first = i == 0 && count > 1 ? '1' : '0', own = (unsigned char)d->digits[i];
        uint32_t less = node_seq3(pool, digit_range(pool, first, own - 1),
                                  any_digits(pool, count - 1 - i, count - 1 - i), fraction);
        node_list_add(pool, node_seq(pool, prefix, less));
        prefix = node_seq(pool, prefix, digit_range(pool, own, own));
    }
    node_list_add(pool, node_seq(pool, prefix, fraction_below(pool, d, inclusive)));
    return node_list_alt(pool, list);
}

/* ---- Ranges ---- */

static uint32_t unsigned_shape(struct node_pool *pool, bool integer) {
    uint32_t more = any_digits(pool, 0, NODE_ENDLESS);
    uint32_t whole = node_alt2(pool, digit_range(pool, '0', '0'),
                               node_seq(pool, digit_range(pool, '1', '9'), more));
    return integer ? whole : node_seq(pool, whole, any_fraction(pool));
}

/* Builds numbers of one sign, without it: at least |low| and at most |high| (NULL: no bound). */
static uint32_t sizes(struct node_pool *pool, bool integer, const struct decimal *low,
                      bool low_open, const struct decimal *high, bool high_open) {
    uint32_t node = unsigned_shape(pool, integer);
    if (low != NULL && (low_open || !is_zero(low)))
        node = node_and2(pool, node, node_not(pool, below(pool, low, low_open)));
    if (high != NULL) node = node_and2(pool, node, below(pool, high, !high_open));
    return node_live(pool, node);
}

static uint32_t range_node(struct node_pool *pool, const struct number_rules *r) {
    const struct decimal *min = r->has_min ? &r->min : NULL, *max = r->has_max ? &r->max : NULL;
    uint32_t plus = NODE_NONE, minus = NODE_NONE;
    if (max == NULL || !max->negative)
        plus = sizes(pool, r->integer, min != NULL && !min->negative ? min : NULL, r->above_min,
                     max, r->below_max);
    if (min == NULL || min->negative)
        minus = sizes(pool, r->integer, max != NULL && (max->negative || is_zero(max)) ? max : NULL,
                      r->below_max, min, r->above_min);
    return node_alt2(pool, plus, node_seq(pool, node_range(pool, '-', '-'), minus));
}

/* ---- Divisors ---- */

static uint64_t common_divisor(uint64_t a, uint64_t b) {
    while (b != 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Builds the multiples of d. A divisor with the digits M, s of them after the point, divides a
 * number with the digits V, f of them after the point, if M divides V * 10^(s - f); that is, if M /
 * gcd(M, 10^(s - f)) divides V. */
static int multiples(struct node_pool *pool, const struct decimal *d, bool integer, uint32_t *out) {
    uint64_t value = 0;
    for (int i = 0; i < d->whole + d->fraction && value <= CONSTRAIN_DIVISOR_MAX; i++)
        value = value * 10 + (uint64_t)(d->digits[i] - '0');
    if (value > CONSTRAIN_DIVISOR_MAX) return ERR_LIMIT;
    if (value == 0 || d->negative) return ERR_INVALID;
    uint32_t list = node_list_open(pool), minus = node_option(pool, node_range(pool, '-', '-'));
    for (int f = 0; f <= (integer ? 0 : d->fraction); f++) {
        uint64_t power = 1;
        for (int i = f; i < d->fraction && i - f < 18; i++) power *= 10;
        uint32_t shape = node_seq(pool, minus, unsigned_shape(pool, true));
        if (f > 0)
            shape = node_seq3(pool, shape, point_node(pool),
                              any_digits(pool, (uint32_t)f, (uint32_t)f));
        uint64_t modulus = value / common_divisor(value, power);
        node_list_add(pool, node_and2(pool, shape, node_mod(pool, (uint32_t)modulus, 0)));
    }
    *out = node_list_alt(pool, list);
    return 0;
}

int number_node(struct json_nodes *nodes, const struct number_rules *rules, uint32_t *out) {
    struct node_pool *pool = nodes->pool;
    uint32_t factor;
    *out = rules->integer ? nodes->integer : nodes->number;
    if (rules->has_min || rules->has_max || rules->divisor_count > 0)
        *out = range_node(pool, rules);
    for (int i = 0; i < rules->divisor_count; i++) {
        int rc = multiples(pool, &rules->divisors[i], rules->integer, &factor);
        if (rc != 0) return rc;
        *out = node_live(pool, node_and2(pool, *out, factor));
    }
    return pool->rc;
}
