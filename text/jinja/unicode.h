/* Characters as Python's str classifies and changes them. */
#ifndef KEEPD_TEXT_JINJA_UNICODE_H
#define KEEPD_TEXT_JINJA_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

uint32_t jinja_utf8_decode(const char *s, size_t size, uint32_t *length); /* size > 0 */

bool jinja_is_space(uint32_t code);
bool jinja_is_alpha(uint32_t code);
bool jinja_is_decimal(uint32_t code);
bool jinja_is_digit(uint32_t code);
bool jinja_is_upper(uint32_t code);
bool jinja_is_lower(uint32_t code);
bool jinja_is_cased(uint32_t code);
bool jinja_is_word(uint32_t code); /* \w */
bool jinja_is_printable(uint32_t code);
bool jinja_is_line_end(uint32_t code); /* where splitlines() cuts */

/* Full case mapping: up to 3 code points; returns how many. */
int jinja_to_upper(uint32_t code, uint32_t out[3]);
int jinja_to_title(uint32_t code, uint32_t out[3]);
int jinja_to_lower(uint32_t code, uint32_t out[3]);
int jinja_to_fold(uint32_t code, uint32_t out[3]); /* casefold() */

#endif
