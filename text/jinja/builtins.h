/* The functions templates call, by name: one table per file. */
#ifndef KEEPD_TEXT_JINJA_BUILTINS_H
#define KEEPD_TEXT_JINJA_BUILTINS_H

#include "text/jinja/text.h"
#include "text/jinja/value.h"

/* NULL: no such name. */
const struct jinja_builtin *jinja_find_filter(const struct jinja_value *name);
const struct jinja_builtin *jinja_find_test(const struct jinja_value *name);
const struct jinja_builtin *jinja_find_global(const struct jinja_value *name);
/* A method of the object's kind. */
const struct jinja_builtin *jinja_find_method(const struct jinja_value *object,
                                              const struct jinja_value *name);
/* A method that would change the object: the sandbox refuses it. */
bool jinja_is_mutator(const struct jinja_value *object, const struct jinja_value *name);
/* An attribute of a function that cycler() made; *out MISSING where there is none. */
int jinja_cycler_attribute(struct jinja_run *run, const struct jinja_value *object,
                           const struct jinja_value *name, struct jinja_value *out);
const struct jinja_builtin *jinja_search(const struct jinja_builtin *table, size_t count,
                                         const struct jinja_value *name);

/* The parts of the filter table. */
extern const struct jinja_builtin jinja_text_filters[], jinja_sequence_filters[];
extern const size_t jinja_text_filter_count, jinja_sequence_filter_count;
extern const struct jinja_builtin jinja_str_methods[];
extern const size_t jinja_str_method_count;

/* Calls any value that can be called; macros and loops are the evaluator's. */
int jinja_call_value(struct jinja_run *run, const struct jinja_value *callee,
                     const struct jinja_args *args, struct jinja_value *out);

int jinja_macro_name(struct jinja_run *run, const struct jinja_value *macro,
                     struct jinja_value *out); /* a string, or None */

/* Shared by filters and methods. `s` is a string. */
enum jinja_case {
    JINJA_UPPER,
    JINJA_LOWER,
    JINJA_CAPITALIZE,
    JINJA_TITLE,
    JINJA_SWAPCASE,
    JINJA_CASEFOLD
};
int jinja_change_case(struct jinja_run *run, const struct jinja_value *s, enum jinja_case how,
                      struct jinja_value *out);
/* Python's str(): strings stay what they are. */
int jinja_to_str(struct jinja_run *run, const struct jinja_value *v, struct jinja_value *out);
int jinja_center(struct jinja_run *run, const struct jinja_value *s, int64_t width, int where,
                 const struct jinja_value *fill, struct jinja_value *out); /* -1 left, 0, 1 right */
int jinja_split_lines(struct jinja_run *run, const struct jinja_value *s, bool keep_ends,
                      struct jinja_value *out);
int jinja_join(struct jinja_run *run, const struct jinja_value *separator,
               const struct jinja_list *list, bool strict, struct jinja_value *out);
/* sorted(): stable; `keys` has one key per item. Reorders both. */
int jinja_sort(struct jinja_run *run, struct jinja_list *items, struct jinja_list *keys,
               bool reverse);
/* An argument that must be an integer; MISSING and None give `absent`. */
int jinja_arg_int(struct jinja_run *run, const struct jinja_value *v, int64_t absent, int64_t *out);

#endif
