/* Characters as Python's str classifies them, from the Unicode tables. */
#include "text/jinja/unicode.h"

#include "text/unicode/unicode.h"

bool jinja_is_space(uint32_t code) {
    return unicode_is_space(code) || (code >= 28 && code <= 31);
}

bool jinja_is_line_end(uint32_t code) {
    return (code >= 10 && code <= 13) || (code >= 28 && code <= 30) || code == 0x85 ||
           code == 0x2028 || code == 0x2029;
}

bool jinja_is_decimal(uint32_t code) {
    return unicode_category(code) == UNICODE_ND;
}

bool jinja_is_word(uint32_t code) {
    return code == '_' || unicode_is_letter(code) || unicode_is_number(code);
}

bool jinja_is_printable(uint32_t code) {
    if (code < 0x80) return code >= 32 && code < 127;
    enum unicode_category c = unicode_category(code);
    return c != UNICODE_CN && c < UNICODE_ZS;
}
