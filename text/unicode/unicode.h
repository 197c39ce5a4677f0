/* Properties, case and decompositions of characters, from the Unicode Character Database.
 *
 * The data is in tables.c, which tools/unicode_tables writes, and of one version: tokens and
 * templates must not depend on the libraries of a machine. Pure; any thread. Code points above
 * 0x10FFFF have no property and map to themselves. */
#ifndef KEEPD_TEXT_UNICODE_UNICODE_H
#define KEEPD_TEXT_UNICODE_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UNICODE_POINTS 0x110000u

extern const char unicode_version[]; /* "16.0.0" */

/* General_Category, in the order of the tables. */
enum unicode_category {
    UNICODE_CN,
    UNICODE_LU,
    UNICODE_LL,
    UNICODE_LT,
    UNICODE_LM,
    UNICODE_LO,
    UNICODE_MN,
    UNICODE_MC,
    UNICODE_ME,
    UNICODE_ND,
    UNICODE_NL,
    UNICODE_NO,
    UNICODE_PC,
    UNICODE_PD,
    UNICODE_PS,
    UNICODE_PE,
    UNICODE_PI,
    UNICODE_PF,
    UNICODE_PO,
    UNICODE_SM,
    UNICODE_SC,
    UNICODE_SK,
    UNICODE_SO,
    UNICODE_ZS,
    UNICODE_ZL,
    UNICODE_ZP,
    UNICODE_CC,
    UNICODE_CF,
    UNICODE_CS,
    UNICODE_CO
};
enum unicode_category unicode_category(uint32_t code);

/* size > 0, valid UTF-8. */
uint32_t unicode_decode(const char *s, size_t size, uint32_t *length);

bool unicode_is_letter(uint32_t code);
bool unicode_is_mark(uint32_t code);
bool unicode_is_number(uint32_t code); /* categories Nd, Nl, No */
bool unicode_is_space(uint32_t code);  /* White_Space */
bool unicode_is_digit(uint32_t code);  /* has a digit's value: also superscripts */

/* ---- Properties by name ---- */

struct unicode_range {
    uint32_t first, last;
};

/* A category or a group of them, Alphabetic, Uppercase, Lowercase, Cased, Case_Ignorable,
 * White_Space, or a script. */
struct unicode_property {
    int set; /* -1: a script */
    int script;
};

/* By its short or long name; case, spaces, hyphens and underscores do not count. */
bool unicode_property_find(const char *name, size_t size, struct unicode_property *out);
const char *unicode_property_name(struct unicode_property property);
bool unicode_has(struct unicode_property property, uint32_t code);
/* The first range of a property's code points that ends at or after `from`, less what lies before
 * `from`; false: there is none. */
bool unicode_property_range(struct unicode_property property, uint32_t from,
                            struct unicode_range *out);

extern const struct unicode_property unicode_alphabetic, unicode_uppercase, unicode_lowercase,
    unicode_cased, unicode_case_ignorable;

/* ---- Case ---- */

/* Full case mapping without conditions: returns how many code points, 1 to 3. */
int unicode_to_upper(uint32_t code, uint32_t out[3]);
int unicode_to_lower(uint32_t code, uint32_t out[3]);
int unicode_to_title(uint32_t code, uint32_t out[3]);
int unicode_to_fold(uint32_t code, uint32_t out[3]); /* case folding */

/* ---- Normalisation (UAX 15) ---- */

#define UNICODE_DECOMPOSED_MAX 18 /* U+FDFA has as many */

int unicode_class(uint32_t code); /* Canonical_Combining_Class */
/* The whole canonical or compatibility decomposition; returns how many code points. */
size_t unicode_decompose(uint32_t code, bool compatible, uint32_t out[UNICODE_DECOMPOSED_MAX]);
uint32_t unicode_compose(uint32_t first, uint32_t second); /* 0: they do not compose */
/* Returns whether no normalisation form changes the character alone, and it never joins the
 * character before it. Hangul syllables count as inert, although NFD and NFKD change them. */
bool unicode_is_inert(uint32_t code);
/* Returns whether the character may change places, or compose, with the one before it. */
bool unicode_joins_previous(uint32_t code);

/* ---- Extended grapheme clusters (UAX 29) ---- */

/* The bytes of the first cluster of a text; size > 0, valid UTF-8. */
size_t unicode_cluster(const char *s, size_t size);

#endif
