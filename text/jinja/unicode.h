/* Characters as Python's str classifies them, where it differs from Unicode's own properties. */
#ifndef KEEPD_TEXT_JINJA_UNICODE_H
#define KEEPD_TEXT_JINJA_UNICODE_H

#include <stdbool.h>
#include <stdint.h>

bool jinja_is_space(uint32_t code); /* str.isspace() */
bool jinja_is_decimal(uint32_t code);
bool jinja_is_word(uint32_t code); /* \w */
bool jinja_is_printable(uint32_t code);
bool jinja_is_line_end(uint32_t code); /* where splitlines() cuts */

#endif
