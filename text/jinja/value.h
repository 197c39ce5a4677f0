/* Values of the template language. They behave as Python's values do, as far as a template can
 * observe.
 *
 * Values are allocated in the arena of the render (`run->arena`). Exception: a template's constants
 * belong to the template; they are never written, and all its renders share them.
 *
 * Functions return 0, or a negative `enum err` after filling `run->fault`. */
#ifndef KEEPD_TEXT_JINJA_VALUE_H
#define KEEPD_TEXT_JINJA_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/err.h"

#define JINJA_STEPS_MAX    4000000      /* nodes evaluated, items visited, 64-byte blocks copied */
#define JINJA_TEXT_MAX     (8u << 20)   /* bytes of any string, the output included */
#define JINJA_ITEMS_MAX    (1u << 20)   /* entries of any list or dict */
#define JINJA_RANGE_MAX    100000       /* as Jinja's sandbox */
#define JINJA_DEPTH_MAX    500          /* nested calls, expressions and data */
#define JINJA_SOURCE_MAX   (1u << 20)   /* bytes of a template */
#define JINJA_TEMPLATE_MAX (64ul << 20) /* memory of a compiled template */
#define JINJA_PARSE_DEPTH  150          /* nested brackets and blocks */

enum jinja_kind {
    JINJA_MISSING, /* internal: an argument not given, a variable not set */
    JINJA_UNDEFINED,
    JINJA_NONE,
    JINJA_BOOL,
    JINJA_INT,
    JINJA_BIG, /* an integer beyond 64 bits: its decimal digits */
    JINJA_FLOAT,
    JINJA_STR,
    JINJA_LIST, /* LIST .. GENERATOR hold a struct jinja_list */
    JINJA_TUPLE,
    JINJA_RANGE,
    JINJA_VIEW,      /* dict.items(), .keys() or .values() */
    JINJA_GENERATOR, /* as in Python: true even if empty; empty after its first use */
    JINJA_DICT,
    JINJA_NAMESPACE,
    JINJA_MACRO,
    JINJA_FUNCTION,
    JINJA_LOOP,
};

#define JINJA_SAFE    1u /* a string that went through |safe or |escape */
#define JINJA_HINT    2u /* undefined: the name is the whole message */
#define JINJA_ELEMENT 4u /* undefined: the name is the text of a key that is no string */

struct jinja_value {
    uint8_t kind;
    uint8_t flags;
    uint8_t owner;        /* undefined: the kind that lacks the attribute, or JINJA_MISSING */
    uint32_t begin, size; /* the view into `text` of STR, BIG and UNDEFINED (its name) */
    union {
        bool boolean;
        int64_t integer;
        double real;
        struct jinja_text *text;
        struct jinja_list *list;
        struct jinja_dict *dict; /* NAMESPACE too */
        struct jinja_macro *macro;
        struct jinja_function *function;
        struct jinja_loop *loop;
    };
};

struct jinja_list {
    struct jinja_value *items;
    uint32_t count, capacity;
    uint32_t used;            /* a generator's items already taken */
    const char *label;        /* a view's Python type */
    int64_t first, end, step; /* a range's arguments */
};

struct jinja_pair {
    struct jinja_value key, value;
    uint64_t hash;
};

struct jinja_dict {
    struct jinja_pair *pairs; /* in insertion order */
    uint32_t count, capacity;
    uint32_t *index; /* open addressing: position + 1; NULL while the dict is small */
    uint32_t index_size;
};

struct jinja_keyword {
    struct jinja_value name, value;
};

struct jinja_args {
    struct jinja_value *items;
    struct jinja_keyword *keywords;
    uint32_t count, keyword_count;
};

struct jinja_run;

/* Filters, tests, methods and globals: `self` is the piped value, the object, or NULL. */
typedef int jinja_call_fn(struct jinja_run *run, const struct jinja_value *self,
                          const struct jinja_args *args, struct jinja_value *out);

struct jinja_builtin {
    const char *name;
    jinja_call_fn *call;
};

struct jinja_function {
    const struct jinja_builtin *builtin;
    struct jinja_value self;
};

/* One render. */
struct jinja_run {
    struct arena *arena;
    struct fault *fault;
    const struct jinja_template *template;
    struct jinja_value *globals; /* by name id: context, set at top level, functions */
    struct jinja_scope *scope;
    struct jinja_text *out;
    const struct jinja_value *piped; /* the body of the filter block being applied */
    int64_t steps;                   /* how many more may be taken */
    uint32_t bytes;                  /* copied, not yet charged as steps */
    int64_t now;
    int depth;
    int line;
};

int jinja_fail(struct jinja_run *run, int rc, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int jinja_fail_undefined(struct jinja_run *run, const struct jinja_value *undefined);
int jinja_fail_memory(struct jinja_run *run); /* after jinja_alloc gave NULL */
void *jinja_alloc(struct jinja_run *run, size_t count, size_t size);
int jinja_charge(struct jinja_run *run, size_t steps);
int jinja_charge_bytes(struct jinja_run *run, size_t bytes);
/* Charges 8 times as much, for bytes that are read one by one. */
int jinja_charge_chars(struct jinja_run *run, size_t bytes);
int jinja_enter(struct jinja_run *run); /* one level deeper; ERR_LIMIT leaves the depth alone */
void jinja_leave(struct jinja_run *run);

static inline struct jinja_value jinja_none(void) {
    return (struct jinja_value){.kind = JINJA_NONE};
}
static inline struct jinja_value jinja_bool(bool b) {
    return (struct jinja_value){.kind = JINJA_BOOL, .boolean = b};
}
static inline struct jinja_value jinja_int(int64_t i) {
    return (struct jinja_value){.kind = JINJA_INT, .integer = i};
}
static inline struct jinja_value jinja_float(double f) {
    return (struct jinja_value){.kind = JINJA_FLOAT, .real = f};
}
struct jinja_value jinja_undefined(void); /* without a name */
int jinja_undefined_hint(struct jinja_run *run, const char *message, struct jinja_value *out);

static inline bool jinja_is_str(const struct jinja_value *v) {
    return v->kind == JINJA_STR;
}
static inline bool jinja_is_listlike(const struct jinja_value *v) {
    return v->kind >= JINJA_LIST && v->kind <= JINJA_GENERATOR;
}
/* bool counts as an integer, as in Python. */
static inline bool jinja_is_int(const struct jinja_value *v) {
    return v->kind == JINJA_INT || v->kind == JINJA_BOOL;
}
static inline int64_t jinja_int_of(const struct jinja_value *v) {
    return v->kind == JINJA_BOOL ? v->boolean : v->integer;
}
static inline bool jinja_is_number(const struct jinja_value *v) {
    return v->kind >= JINJA_BOOL && v->kind <= JINJA_FLOAT;
}
double jinja_real_of(const struct jinja_value *number); /* BIG: nearest, maybe infinite */

const char *jinja_type_name(const struct jinja_value *v); /* Python's: "str", "NoneType" */
bool jinja_truth(const struct jinja_value *v);
bool jinja_same(const struct jinja_value *a, const struct jinja_value *b); /* Python's `is` */
int jinja_equal(struct jinja_run *run, const struct jinja_value *a, const struct jinja_value *b,
                bool *out);
/* *order < 0, 0 or > 0; `op` names the operator in the error for what has no order. NaN is
 * unordered: *order = 2. */
int jinja_order(struct jinja_run *run, const char *op, const struct jinja_value *a,
                const struct jinja_value *b, int *order);

int jinja_list_open(struct jinja_run *run, enum jinja_kind kind, size_t capacity,
                    struct jinja_value *out);
int jinja_list_add(struct jinja_run *run, struct jinja_list *list, const struct jinja_value *item);
/* Any iterable as a list, Python's iter(): a generator is used up by it. LIST and TUPLE give their
 * own list, not a copy. */
int jinja_iterate(struct jinja_run *run, const struct jinja_value *v, struct jinja_list **out);
/* The same in a new list. */
int jinja_to_list(struct jinja_run *run, const struct jinja_value *v, enum jinja_kind kind,
                  struct jinja_value *out);
int jinja_tuple2(struct jinja_run *run, const struct jinja_value *a, const struct jinja_value *b,
                 struct jinja_value *out);

int jinja_dict_open(struct jinja_run *run, enum jinja_kind kind, struct jinja_value *out);
/* *out = NULL when absent; ERR_INVALID for keys without a hash. */
int jinja_dict_find(struct jinja_run *run, const struct jinja_dict *dict,
                    const struct jinja_value *key, struct jinja_pair **out);
int jinja_dict_set(struct jinja_run *run, struct jinja_dict *dict, const struct jinja_value *key,
                   const struct jinja_value *value);
bool jinja_hashable(const struct jinja_value *key);

/* Arguments by position or name into values[count]; those not given become JINJA_MISSING. The
 * first `required` must be there. */
int jinja_bind(struct jinja_run *run, const char *callee, const struct jinja_args *args,
               const char *const *names, uint32_t count, uint32_t required,
               struct jinja_value *values);
static inline int jinja_no_args(struct jinja_run *run, const char *callee,
                                const struct jinja_args *args) {
    return jinja_bind(run, callee, args, NULL, 0, 0, NULL);
}

#endif
