/* The generated tables (tables.c). Arrays are sorted by code point; `starts` hold the code points
 * where a value changes: code << 8 | value. Only this folder reads them. */
#ifndef KEEPD_TEXT_UNICODE_TABLES_H
#define KEEPD_TEXT_UNICODE_TABLES_H

#include "text/unicode/unicode.h"

extern const uint32_t unicode_category_starts[], unicode_class_starts[], unicode_script_starts[],
    unicode_break_starts[];
extern const size_t unicode_category_starts_count, unicode_class_starts_count,
    unicode_script_starts_count, unicode_break_starts_count;

/* The index of the last entry of such a table whose code point is at most `code`. */
size_t unicode_last_start(const uint32_t *starts, size_t count, uint32_t code);

/* Code points with a digit's value; second parts of compositions; code points that decompose or
 * have a combining class. */
extern const struct unicode_range unicode_digits[], unicode_seconds[], unicode_active[];
extern const size_t unicode_digits_count, unicode_seconds_count, unicode_active_count;

/* A decomposition of a character by one step: code << 8 | 128 for a compatible one | its length,
 * and where its code points begin in the pool. */
extern const uint32_t unicode_decompositions[], unicode_decomposition_pool[];
extern const uint16_t unicode_decomposition_at[];
extern const size_t unicode_decompositions_count;

extern const struct unicode_composition { uint32_t first, second, result; } unicode_compositions[];
extern const size_t unicode_compositions_count;

/* Every `stride`th code point from `first` to `last` maps to itself plus `delta`. */
extern const struct unicode_case_run {
    uint32_t first, last;
    int32_t stride, delta;
} unicode_upper_runs[], unicode_lower_runs[], unicode_title_runs[], unicode_fold_runs[];
extern const size_t unicode_upper_runs_count, unicode_lower_runs_count, unicode_title_runs_count,
    unicode_fold_runs_count;

/* Characters of which one case is more than one character. */
extern const struct unicode_special {
    uint32_t code, upper[3], lower[3], title[3], fold[3];
} unicode_specials[];
extern const size_t unicode_specials_count;

/* The code points of some categories, and unicode_set_more[more, more + count). */
extern const struct unicode_set {
    const char *name, *alias;
    uint32_t categories; /* bits */
    uint32_t more, count;
} unicode_sets[];
extern const size_t unicode_sets_count;
extern const struct unicode_range unicode_set_more[];

extern const struct unicode_name {
    const char *name, *alias;
} unicode_scripts[]; /* by the value in unicode_script_starts */
extern const size_t unicode_scripts_count;

#endif
