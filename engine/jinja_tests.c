/* `is` tests, the global functions, and look-up by name in all the tables. */
#include <string.h>

#include "engine/jinja_builtins.h"
#include "engine/jinja_eval.h"
#include "engine/jinja_format.h"
#include "engine/jinja_ops.h"
#include "engine/jinja_unicode.h"

#define TEST(name)                                                                                 \
    static int test_##name(struct jinja_run *run, const struct jinja_value *self,                  \
                           const struct jinja_args *args, struct jinja_value *out)

static int bind_one(struct jinja_run *run, const char *name, const struct jinja_args *args,
                    struct jinja_value *value) {
    static const char *const names[] = {"other"};
    return jinja_bind(run, name, args, names, 1, 1, value);
}

/* Tests of the kind alone. (`true` and `false` are macros of C.) */
#define KIND_TEST(name, condition)                                                                 \
    TEST(name) {                                                                                   \
        int rc = jinja_bind(run, #name, args, NULL, 0, 0, NULL);                                   \
        *out = jinja_bool(condition);                                                              \
        return rc;                                                                                 \
    }

KIND_TEST(defined, self->kind != JINJA_UNDEFINED)
KIND_TEST(undefined, self->kind == JINJA_UNDEFINED)
KIND_TEST(none, self->kind == JINJA_NONE)
KIND_TEST(boolean, self->kind == JINJA_BOOL)
KIND_TEST(is_true, self->kind == JINJA_BOOL && self->boolean)
KIND_TEST(is_false, self->kind == JINJA_BOOL && !self->boolean)
KIND_TEST(integer, self->kind == JINJA_INT || self->kind == JINJA_BIG)
KIND_TEST(float, self->kind == JINJA_FLOAT)
KIND_TEST(number, jinja_is_number(self))
KIND_TEST(string, self->kind == JINJA_STR)
KIND_TEST(mapping, self->kind == JINJA_DICT)
/* undefined has a length and looks up attributes, so it passes for one */
KIND_TEST(sequence, self->kind == JINJA_STR || self->kind == JINJA_DICT ||
                        self->kind == JINJA_UNDEFINED ||
                        (self->kind >= JINJA_LIST && self->kind <= JINJA_RANGE))
KIND_TEST(iterable, self->kind == JINJA_STR || self->kind == JINJA_DICT ||
                        self->kind == JINJA_UNDEFINED || self->kind == JINJA_LOOP ||
                        jinja_is_listlike(self))
KIND_TEST(callable, self->kind == JINJA_MACRO || self->kind == JINJA_FUNCTION ||
                        self->kind == JINJA_LOOP || self->kind == JINJA_UNDEFINED)
KIND_TEST(escaped, self->kind == JINJA_STR && (self->flags & JINJA_SAFE))
KIND_TEST(filter, jinja_is_str(self) && jinja_find_filter(self))
KIND_TEST(test, jinja_is_str(self) && jinja_find_test(self))

static int remainder_is(struct jinja_run *run, const struct jinja_value *self,
                        const struct jinja_value *divisor, int64_t wanted,
                        struct jinja_value *out) {
    struct jinja_value rest, number = jinja_int(wanted);
    bool equal = false;
    int rc = jinja_binary(run, JINJA_OP_MOD, self, divisor, &rest);
    if (!rc) rc = jinja_equal(run, &rest, &number, &equal);
    *out = jinja_bool(equal);
    return rc;
}

static int parity(struct jinja_run *run, const char *name, const struct jinja_value *self,
                  const struct jinja_args *args, int64_t wanted, struct jinja_value *out) {
    struct jinja_value two = jinja_int(2);
    int rc = jinja_bind(run, name, args, NULL, 0, 0, NULL);
    return rc ? rc : remainder_is(run, self, &two, wanted, out);
}

TEST(odd) {
    return parity(run, "odd", self, args, 1, out);
}

TEST(even) {
    return parity(run, "even", self, args, 0, out);
}

TEST(divisibleby) {
    static const char *const names[] = {"num"};
    struct jinja_value divisor;
    int rc = jinja_bind(run, "divisibleby", args, names, 1, 1, &divisor);
    return rc ? rc : remainder_is(run, self, &divisor, 0, out);
}

/* str.islower() and isupper(): no character of the other case, and at least one of this. */
static int case_is(struct jinja_run *run, const struct jinja_value *self, bool upper,
                   struct jinja_value *out) {
    struct jinja_value s;
    struct jinja_cursor c;
    bool seen = false, other = false;
    int rc = jinja_to_str(run, self, &s);
    if (!rc) rc = jinja_charge_bytes(run, s.size);
    if (rc) return rc;
    jinja_cursor_open(&c, &s);
    while (!other && jinja_cursor_step(&c)) {
        bool is = upper ? jinja_is_upper(c.code) : jinja_is_lower(c.code);
        seen |= is;
        other = jinja_is_cased(c.code) && !is;
    }
    *out = jinja_bool(seen && !other);
    return 0;
}

TEST(lower) {
    int rc = jinja_bind(run, "lower", args, NULL, 0, 0, NULL);
    return rc ? rc : case_is(run, self, false, out);
}

TEST(upper) {
    int rc = jinja_bind(run, "upper", args, NULL, 0, 0, NULL);
    return rc ? rc : case_is(run, self, true, out);
}

TEST(sameas) {
    struct jinja_value other;
    int rc = bind_one(run, "sameas", args, &other);
    if (!rc) *out = jinja_bool(jinja_same(self, &other));
    return rc;
}

static int compare_test(struct jinja_run *run, const char *name, enum jinja_op op,
                        const struct jinja_value *self, const struct jinja_args *args,
                        struct jinja_value *out) {
    struct jinja_value other;
    bool holds = false;
    int rc = bind_one(run, name, args, &other);
    if (!rc) rc = jinja_compare(run, op, self, &other, &holds);
    *out = jinja_bool(holds);
    return rc;
}

#define COMPARE_TEST(name, op)                                                                     \
    TEST(name) {                                                                                   \
        return compare_test(run, #name, op, self, args, out);                                      \
    }

COMPARE_TEST(eq, JINJA_OP_EQ)
COMPARE_TEST(ne, JINJA_OP_NE)
COMPARE_TEST(lt, JINJA_OP_LT)
COMPARE_TEST(le, JINJA_OP_LE)
COMPARE_TEST(gt, JINJA_OP_GT)
COMPARE_TEST(ge, JINJA_OP_GE)
COMPARE_TEST(in, JINJA_OP_IN)

static const struct jinja_builtin tests[] = {
    {"!=", test_ne},
    {"<", test_lt},
    {"<=", test_le},
    {"==", test_eq},
    {">", test_gt},
    {">=", test_ge},
    {"boolean", test_boolean},
    {"callable", test_callable},
    {"defined", test_defined},
    {"divisibleby", test_divisibleby},
    {"eq", test_eq},
    {"equalto", test_eq},
    {"escaped", test_escaped},
    {"even", test_even},
    {"false", test_is_false},
    {"filter", test_filter},
    {"float", test_float},
    {"ge", test_ge},
    {"greaterthan", test_gt},
    {"gt", test_gt},
    {"in", test_in},
    {"integer", test_integer},
    {"iterable", test_iterable},
    {"le", test_le},
    {"lessthan", test_lt},
    {"lower", test_lower},
    {"lt", test_lt},
    {"mapping", test_mapping},
    {"ne", test_ne},
    {"none", test_none},
    {"number", test_number},
    {"odd", test_odd},
    {"sameas", test_sameas},
    {"sequence", test_sequence},
    {"string", test_string},
    {"test", test_test},
    {"true", test_is_true},
    {"undefined", test_undefined},
    {"upper", test_upper},
};

/* Globals: `self` is None, or what a made function closed over. */

static int global_range(struct jinja_run *run, const struct jinja_value *self,
                        const struct jinja_args *args, struct jinja_value *out) {
    (void)self;
    int64_t v[3] = {0, 0, 1};
    if (args->count < 1 || args->count > 3 || args->keyword_count)
        return jinja_fail(run, ERR_INVALID, "range expected 1 to 3 arguments, got %u", args->count);
    for (uint32_t i = 0; i < args->count; i++) {
        const struct jinja_value *arg = &args->items[i];
        if (!jinja_is_int(arg))
            return jinja_fail(run, ERR_INVALID, "'%s' object cannot be interpreted as an integer",
                              jinja_type_name(arg));
        v[i] = jinja_int_of(arg);
    }
    if (args->count == 1) return jinja_range(run, 0, v[0], 1, out);
    return jinja_range(run, v[0], v[1], v[2], out);
}

/* dict(pairs or mapping, name=value...) and namespace(...) alike. */
static int make_dict(struct jinja_run *run, enum jinja_kind kind, const struct jinja_args *args,
                     struct jinja_value *out) {
    struct jinja_value made;
    struct jinja_list *pairs, *pair;
    int rc = jinja_dict_open(run, kind, &made);
    if (!rc && args->count > 1)
        rc = jinja_fail(run, ERR_INVALID, "dict expected at most 1 argument, got %u", args->count);
    if (rc) return rc;
    if (args->count && args->items[0].kind == JINJA_DICT) {
        const struct jinja_dict *from = args->items[0].dict;
        for (uint32_t i = 0; i < from->count && !rc; i++)
            rc = jinja_dict_set(run, made.dict, &from->pairs[i].key, &from->pairs[i].value);
    } else if (args->count) {
        rc = jinja_iterate(run, &args->items[0], &pairs);
        for (uint32_t i = 0; !rc && i < pairs->count; i++) {
            rc = jinja_iterate(run, &pairs->items[i], &pair);
            if (!rc && pair->count != 2)
                rc = jinja_fail(run, ERR_INVALID, "a dict is made of pairs");
            if (!rc) rc = jinja_dict_set(run, made.dict, &pair->items[0], &pair->items[1]);
        }
    }
    for (uint32_t i = 0; i < args->keyword_count && !rc; i++)
        rc = jinja_dict_set(run, made.dict, &args->keywords[i].name, &args->keywords[i].value);
    if (!rc) *out = made;
    return rc;
}

static int global_dict(struct jinja_run *run, const struct jinja_value *self,
                       const struct jinja_args *args, struct jinja_value *out) {
    (void)self;
    return make_dict(run, JINJA_DICT, args, out);
}

static int global_namespace(struct jinja_run *run, const struct jinja_value *self,
                            const struct jinja_args *args, struct jinja_value *out) {
    (void)self;
    return make_dict(run, JINJA_NAMESPACE, args, out);
}

static int global_raise_exception(struct jinja_run *run, const struct jinja_value *self,
                                  const struct jinja_args *args, struct jinja_value *out) {
    static const char *const names[] = {"message"};
    struct jinja_value message;
    (void)self;
    (void)out;
    int rc = jinja_bind(run, "raise_exception", args, names, 1, 1, &message);
    if (!rc) rc = jinja_to_str(run, &message, &message);
    if (rc) return rc;
    rc = jinja_fail(run, ERR_INVALID, "%.*s", (int)message.size, jinja_str_data(&message));
    /* The template's verdict on the request, not a fault of the template. */
    if (run->fault) strcpy(run->fault->field, "messages");
    return rc;
}

static int global_strftime_now(struct jinja_run *run, const struct jinja_value *self,
                               const struct jinja_args *args, struct jinja_value *out) {
    static const char *const names[] = {"format"};
    struct jinja_value format;
    (void)self;
    int rc = jinja_bind(run, "strftime_now", args, names, 1, 1, &format);
    if (!rc && !jinja_is_str(&format))
        rc = jinja_fail(run, ERR_INVALID, "strftime() argument 1 must be str, not %s",
                        jinja_type_name(&format));
    return rc ? rc : jinja_format_time(run, &format, run->now, out);
}

/* joiner(sep): nothing the first time, then the separator. */
static int call_joiner(struct jinja_run *run, const struct jinja_value *self,
                       const struct jinja_args *args, struct jinja_value *out) {
    int rc = jinja_bind(run, "joiner", args, NULL, 0, 0, NULL);
    if (rc) return rc;
    bool used = self->list->used;
    self->list->used = 1;
    *out = used ? self->list->items[0] : jinja_str_empty();
    return 0;
}

static int global_joiner(struct jinja_run *run, const struct jinja_value *self,
                         const struct jinja_args *args, struct jinja_value *out) {
    static const char *const names[] = {"sep"};
    static const struct jinja_builtin joiner = {"joiner", call_joiner};
    struct jinja_value separator, state;
    (void)self;
    int rc = jinja_bind(run, "joiner", args, names, 1, 0, &separator);
    if (!rc && separator.kind == JINJA_MISSING) rc = jinja_str_c(run, ", ", &separator);
    if (!rc) rc = jinja_list_open(run, JINJA_LIST, 1, &state);
    if (!rc) rc = jinja_list_add(run, state.list, &separator);
    if (rc) return rc;
    struct jinja_function *function = jinja_alloc(run, 1, sizeof *function);
    if (!function) return jinja_fail_memory(run);
    *function = (struct jinja_function){&joiner, state};
    *out = (struct jinja_value){.kind = JINJA_FUNCTION, .function = function};
    return 0;
}

static const struct jinja_builtin globals[] = {
    {"dict", global_dict},           {"joiner", global_joiner},
    {"namespace", global_namespace}, {"raise_exception", global_raise_exception},
    {"range", global_range},         {"strftime_now", global_strftime_now},
};

const struct jinja_builtin *jinja_search(const struct jinja_builtin *table, size_t count,
                                         const struct jinja_value *name) {
    for (size_t i = 0; i < count; i++)
        if (jinja_str_is(name, table[i].name)) return &table[i];
    return NULL;
}

const struct jinja_builtin *jinja_find_test(const struct jinja_value *name) {
    return jinja_search(tests, sizeof tests / sizeof *tests, name);
}

const struct jinja_builtin *jinja_find_global(const struct jinja_value *name) {
    return jinja_search(globals, sizeof globals / sizeof *globals, name);
}

const struct jinja_builtin *jinja_find_filter(const struct jinja_value *name) {
    const struct jinja_builtin *found =
        jinja_search(jinja_text_filters, jinja_text_filter_count, name);
    return found ? found : jinja_search(jinja_sequence_filters, jinja_sequence_filter_count, name);
}
