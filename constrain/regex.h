/* Regular expressions of ECMAScript, as JSON Schema uses them, over Unicode characters.
 *
 * Read: characters and escapes, classes, '.', groups (named ones, too), alternatives, quantifiers
 * (lazy ones mean the same), '^' and '$' at the ends of a text, look-ahead, \d \w \s (ASCII; \s
 * with Unicode's spaces) and their complements, \xHH, \uHHHH, \u{...}, \cX, the flag groups
 * (?i:...) and a leading (?i), for ASCII letters. Refused by name (ERR_UNSUPPORTED): look-behind,
 * back references, \b and \B, \p and \P, possessive and atomic groups.
 *
 * '^' and '$' are assertions about the text's ends; inside a repetition they are refused. */
#ifndef KEEPD_CONSTRAIN_REGEX_H
#define KEEPD_CONSTRAIN_REGEX_H

#include "constrain/node.h"

enum regex_match {
    REGEX_WHOLE, /* the expression describes the whole text */
    REGEX_WITHIN /* the text contains a match, as `pattern` of JSON Schema means it */
};

/* A result of 0 with NODE_NONE: no text matches. On failure the fault has a text and no field.
 * Errors of the pool are returned, too, without a text. */
int regex_compile(struct node_pool *pool, const char *text, size_t size, enum regex_match match,
                  uint32_t *out, struct fault *fault);

/* Compiles the expression between '/' and '/' in a grammar; `fold`: case does not count. */
int regex_compile_part(struct node_pool *pool, const char *text, size_t size, bool fold,
                       uint32_t *out, struct fault *fault);

#endif
