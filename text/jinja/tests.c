/* `is` tests: each is a filter that gives a bool. Names that are operators (`is eq`, `is in`) call
 * the operators. */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/unicode/unicode.h"

#define TEST(name)                                                                                 \
    static int test_##name(struct jinja_run *run, const struct jinja_value *self,                  \
                           const struct jinja_args *args, struct jinja_value *out)

static int tests_bind_one(struct jinja_run *run, const char *name, const struct jinja_args *args,
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
    if (!rc) rc = jinja_charge_chars(run, s.size);
    if (rc) return rc;
    jinja_cursor_open(&c, &s);
    while (!other && jinja_cursor_step(&c)) {
        bool is =
            upper ? unicode_has(unicode_uppercase, c.code) : unicode_has(unicode_lowercase, c.code);
        seen |= is;
        other = unicode_has(unicode_cased, c.code) && !is;
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
    int rc = tests_bind_one(run, "sameas", args, &other);
    if (!rc) *out = jinja_bool(jinja_same(self, &other));
    return rc;
}

static int compare_test(struct jinja_run *run, const char *name, enum jinja_op op,
                        const struct jinja_value *self, const struct jinja_args *args,
                        struct jinja_value *out) {
    struct jinja_value other;
    bool holds = false;
    int rc = tests_bind_one(run, name, args, &other);
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

const struct jinja_builtin *jinja_find_test(const struct jinja_value *name) {
    return jinja_search(tests, sizeof tests / sizeof *tests, name);
}
