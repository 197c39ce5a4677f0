/* Operators, attributes, items and slices.
 *
 * `a.b` asks for an attribute first and then for an item, `a['b']` the other way; both give an
 * undefined value where there is neither, which fails only when it is used. Integers are 64 bits
 * here and refuse to overflow, where Python's grow. */
#include "text/jinja/ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/eval.h"
#include "text/jinja/format.h"
#include "text/jinja/print.h"
#include "text/jinja/text.h"

static const char *const symbols[] = {
    [JINJA_OP_ADD] = "+",           [JINJA_OP_SUB] = "-",
    [JINJA_OP_MUL] = "*",           [JINJA_OP_DIV] = "/",
    [JINJA_OP_FLOORDIV] = "//",     [JINJA_OP_MOD] = "%",
    [JINJA_OP_POW] = "** or pow()", [JINJA_OP_LT] = "<",
    [JINJA_OP_LE] = "<=",           [JINJA_OP_GT] = ">",
    [JINJA_OP_GE] = ">=",           [JINJA_OP_EQ] = "==",
    [JINJA_OP_NE] = "!=",           [JINJA_OP_IN] = "in",
    [JINJA_OP_NOT_IN] = "not in",
};

static int overflow(struct jinja_run *run) {
    return jinja_fail(run, ERR_LIMIT, "integer arithmetic beyond 64 bits");
}

static int fail_operands(struct jinja_run *run, enum jinja_op op, const struct jinja_value *a,
                         const struct jinja_value *b) {
    return jinja_fail(run, ERR_INVALID, "unsupported operand type(s) for %s: '%s' and '%s'",
                      symbols[op], jinja_type_name(a), jinja_type_name(b));
}

int jinja_escape(struct jinja_run *run, const struct jinja_value *s, struct jinja_value *out) {
    static const struct {
        char from, *to;
    } entities[] = {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&#34;"}, {'\'', "&#39;"}};
    struct jinja_text *text;
    struct jinja_cursor c;
    int rc = jinja_text_open(run, s->size, &text);
    if (!rc) rc = jinja_charge_chars(run, s->size);
    jinja_cursor_open(&c, s);
    while (!rc && jinja_cursor_step(&c)) {
        const char *to = NULL;
        for (size_t i = 0; i < sizeof entities / sizeof *entities; i++)
            if (c.code == (unsigned char)entities[i].from) to = entities[i].to;
        if (to)
            rc = jinja_text_add(run, text, to, strlen(to), c.marked);
        else
            rc = jinja_text_add(run, text, s->text->data + c.at, c.length, c.marked);
    }
    if (rc) return rc;
    *out = jinja_text_value(text);
    out->flags |= JINJA_SAFE;
    return 0;
}

/* A safe string escapes what it is added to, as markupsafe does, autoescape or not. */
static int add_strings(struct jinja_run *run, const struct jinja_value *a,
                       const struct jinja_value *b, struct jinja_value *out) {
    uint8_t safe = (a->flags | b->flags) & JINJA_SAFE;
    struct jinja_value left = *a, right = *b;
    int rc = 0;
    if (safe && !(a->flags & JINJA_SAFE)) rc = jinja_escape(run, a, &left);
    if (safe && !(b->flags & JINJA_SAFE)) rc = jinja_escape(run, b, &right);
    if (!rc) rc = jinja_str_concat(run, &left, &right, out);
    out->flags = safe;
    return rc;
}

static int add_lists(struct jinja_run *run, const struct jinja_value *a,
                     const struct jinja_value *b, struct jinja_value *out) {
    const struct jinja_list *left = a->list, *right = b->list;
    struct jinja_value sum;
    int rc = jinja_list_open(run, a->kind, (size_t)left->count + right->count, &sum);
    for (uint32_t i = 0; i < left->count && !rc; i++)
        rc = jinja_list_add(run, sum.list, &left->items[i]);
    for (uint32_t i = 0; i < right->count && !rc; i++)
        rc = jinja_list_add(run, sum.list, &right->items[i]);
    if (!rc) *out = sum;
    return rc;
}

static int ops_repeat(struct jinja_run *run, const struct jinja_value *v, int64_t count,
                      struct jinja_value *out) {
    if (v->kind == JINJA_STR) return jinja_str_repeat(run, v, count, out);
    const struct jinja_list *list = v->list;
    if (count < 0 || !list->count) count = 0;
    if (count > JINJA_ITEMS_MAX)
        return jinja_fail(run, ERR_LIMIT, "a list grows past %u items", JINJA_ITEMS_MAX);
    struct jinja_value made;
    int rc = jinja_list_open(run, v->kind, (size_t)count * list->count, &made);
    for (int64_t i = 0; i < count && !rc; i++)
        for (uint32_t k = 0; k < list->count && !rc; k++)
            rc = jinja_list_add(run, made.list, &list->items[k]);
    if (!rc) *out = made;
    return rc;
}

static bool is_sequence(const struct jinja_value *v) {
    return v->kind == JINJA_STR || v->kind == JINJA_LIST || v->kind == JINJA_TUPLE;
}

static int binary_sequences(struct jinja_run *run, enum jinja_op op, const struct jinja_value *a,
                            const struct jinja_value *b, struct jinja_value *out) {
    if (op == JINJA_OP_MUL) {
        if (is_sequence(a) && jinja_is_int(b)) return ops_repeat(run, a, jinja_int_of(b), out);
        if (is_sequence(b) && jinja_is_int(a)) return ops_repeat(run, b, jinja_int_of(a), out);
        return jinja_fail(run, ERR_INVALID, "can't multiply sequence by non-int of type '%s'",
                          jinja_type_name(is_sequence(a) ? b : a));
    }
    if (op != JINJA_OP_ADD || !is_sequence(a)) return fail_operands(run, op, a, b);
    if (a->kind != b->kind)
        return jinja_fail(run, ERR_INVALID, "can only concatenate %s (not \"%s\") to %s",
                          jinja_type_name(a), jinja_type_name(b), jinja_type_name(a));
    return a->kind == JINJA_STR ? add_strings(run, a, b, out) : add_lists(run, a, b, out);
}

static double floor_divide(double a, double b) {
    double mod = fmod(a, b), div = (a - mod) / b;
    if (mod != 0 && (b < 0) != (mod < 0)) div -= 1;
    if (div == 0) return copysign(0, a / b);
    double whole = floor(div);
    return div - whole > 0.5 ? whole + 1 : whole;
}

static double floor_mod(double a, double b) {
    double mod = fmod(a, b);
    if (mod == 0) return copysign(0, b);
    return (b < 0) != (mod < 0) ? mod + b : mod;
}

static int power_reals(struct jinja_run *run, double a, double b, struct jinja_value *out) {
    if (a == 0 && b < 0)
        return jinja_fail(run, ERR_INVALID, "0.0 cannot be raised to a negative power");
    double f = pow(a, b);
    if (isnan(f) && !isnan(a) && !isnan(b))
        return jinja_fail(run, ERR_UNSUPPORTED, "a complex number");
    if (isinf(f) && isfinite(a) && isfinite(b))
        return jinja_fail(run, ERR_INVALID, "(34, 'Numerical result out of range')");
    *out = jinja_float(f);
    return 0;
}

static int binary_reals(struct jinja_run *run, enum jinja_op op, double a, double b,
                        struct jinja_value *out) {
    bool divides = op == JINJA_OP_DIV || op == JINJA_OP_FLOORDIV || op == JINJA_OP_MOD;
    if (divides && b == 0)
        return jinja_fail(run, ERR_INVALID,
                          op == JINJA_OP_DIV        ? "float division by zero"
                          : op == JINJA_OP_FLOORDIV ? "float floor division by zero"
                                                    : "float modulo");
    switch (op) {
    case JINJA_OP_ADD:
        *out = jinja_float(a + b);
        return 0;
    case JINJA_OP_SUB:
        *out = jinja_float(a - b);
        return 0;
    case JINJA_OP_MUL:
        *out = jinja_float(a * b);
        return 0;
    case JINJA_OP_DIV:
        *out = jinja_float(a / b);
        return 0;
    case JINJA_OP_FLOORDIV:
        *out = jinja_float(floor_divide(a, b));
        return 0;
    case JINJA_OP_MOD:
        *out = jinja_float(floor_mod(a, b));
        return 0;
    default:
        return power_reals(run, a, b, out);
    }
}

static int power_ints(struct jinja_run *run, int64_t a, int64_t b, struct jinja_value *out) {
    if (b < 0) return power_reals(run, (double)a, (double)b, out);
    int64_t result = 1;
    for (; b; b >>= 1) {
        if ((b & 1) && __builtin_mul_overflow(result, a, &result)) return overflow(run);
        if (b > 1 && __builtin_mul_overflow(a, a, &a)) return overflow(run);
    }
    *out = jinja_int(result);
    return 0;
}

static int binary_ints(struct jinja_run *run, enum jinja_op op, int64_t a, int64_t b,
                       struct jinja_value *out) {
    int64_t result = 0;
    bool bad = false, divides = op == JINJA_OP_FLOORDIV || op == JINJA_OP_MOD;
    if (op == JINJA_OP_POW) return power_ints(run, a, b, out);
    if ((divides || op == JINJA_OP_DIV) && b == 0)
        return jinja_fail(run, ERR_INVALID,
                          op == JINJA_OP_DIV        ? "division by zero"
                          : op == JINJA_OP_FLOORDIV ? "integer division or modulo by zero"
                                                    : "integer modulo by zero");
    if (divides && b == -1) { /* INT64_MIN // -1 traps */
        bad = op == JINJA_OP_FLOORDIV && __builtin_sub_overflow((int64_t)0, a, &result);
        divides = false;
    }
    switch (op) {
    case JINJA_OP_ADD:
        bad = __builtin_add_overflow(a, b, &result);
        break;
    case JINJA_OP_SUB:
        bad = __builtin_sub_overflow(a, b, &result);
        break;
    case JINJA_OP_MUL:
        bad = __builtin_mul_overflow(a, b, &result);
        break;
    case JINJA_OP_DIV:
        *out = jinja_float((double)a / (double)b);
        return 0;
    case JINJA_OP_FLOORDIV:
        if (divides) result = a / b - (a % b != 0 && (a % b < 0) != (b < 0));
        break;
    default:
        if (divides) result = a % b + (a % b != 0 && (a % b < 0) != (b < 0) ? b : 0);
        break;
    }
    if (bad) return overflow(run);
    *out = jinja_int(result);
    return 0;
}

int jinja_binary(struct jinja_run *run, enum jinja_op op, const struct jinja_value *a,
                 const struct jinja_value *b, struct jinja_value *out) {
    struct jinja_value x = *a, y = *b; /* `out` may be one of them */
    if (op == JINJA_OP_MOD && x.kind == JINJA_STR) return jinja_format_percent(run, &x, &y, out);
    if (x.kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, &x);
    if (y.kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, &y);
    if (jinja_is_int(&x) && jinja_is_int(&y))
        return binary_ints(run, op, jinja_int_of(&x), jinja_int_of(&y), out);
    if (!jinja_is_number(&x) || !jinja_is_number(&y)) {
        if (is_sequence(&x) || is_sequence(&y)) return binary_sequences(run, op, &x, &y, out);
        return fail_operands(run, op, &x, &y);
    }
    bool real = x.kind == JINJA_FLOAT || y.kind == JINJA_FLOAT || op == JINJA_OP_DIV;
    if (!real) return overflow(run);
    return binary_reals(run, op, jinja_real_of(&x), jinja_real_of(&y), out);
}

static int negate_big(struct jinja_run *run, const struct jinja_value *v, struct jinja_value *out) {
    struct jinja_text *text;
    bool minus = jinja_str_data(v)[0] == '-';
    struct jinja_value digits = jinja_str_view(v, minus ? 1 : 0, v->size);
    int rc = jinja_text_open(run, v->size + 1ul, &text);
    if (!rc && !minus) rc = jinja_text_puts(run, text, "-");
    if (!rc) rc = jinja_text_add_str(run, text, &digits);
    return rc ? rc : jinja_int_from_digits(run, text->data, text->used, out);
}

int jinja_negate(struct jinja_run *run, const struct jinja_value *v, bool minus,
                 struct jinja_value *out) {
    if (v->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, v);
    if (!jinja_is_number(v))
        return jinja_fail(run, ERR_INVALID, "bad operand type for unary %c: '%s'",
                          minus ? '-' : '+', jinja_type_name(v));
    if (v->kind == JINJA_BIG && minus) return negate_big(run, v, out);
    if (v->kind == JINJA_FLOAT || v->kind == JINJA_BIG) {
        *out = *v;
        if (minus) out->real = -v->real;
        return 0;
    }
    int64_t i = jinja_int_of(v);
    if (minus && i == INT64_MIN) return overflow(run);
    *out = jinja_int(minus ? -i : i);
    return 0;
}

int jinja_int_from_digits(struct jinja_run *run, const char *digits, size_t size,
                          struct jinja_value *out) {
    bool minus = size && digits[0] == '-';
    int64_t value = 0;
    bool big = false;
    for (size_t i = minus ? 1 : 0; i < size && !big; i++)
        big = __builtin_mul_overflow(value, (int64_t)10, &value) ||
              __builtin_add_overflow(value, (int64_t)(minus ? '0' - digits[i] : digits[i] - '0'),
                                     &value);
    if (!big) {
        *out = jinja_int(value);
        return 0;
    }
    int rc = jinja_str(run, digits, size, false, out);
    out->kind = JINJA_BIG;
    return rc;
}

static int contains_item(struct jinja_run *run, struct jinja_list *list, bool generator,
                         const struct jinja_value *item, bool *out) {
    int rc = 0;
    for (uint32_t i = list->used; i < list->count && !*out && !rc; i++) {
        rc = jinja_equal(run, &list->items[i], item, out);
        if (generator) list->used = i + 1;
    }
    return rc;
}

int jinja_contains(struct jinja_run *run, const struct jinja_value *container,
                   const struct jinja_value *item, bool *out) {
    *out = false;
    if (container->kind == JINJA_UNDEFINED) return 0;
    if (container->kind == JINJA_STR) {
        if (item->kind != JINJA_STR)
            return jinja_fail(run, ERR_INVALID,
                              "'in <string>' requires string as left operand, not %s",
                              jinja_type_name(item));
        *out = jinja_str_find(container, item, 0, container->size) >= 0;
        return jinja_charge_bytes(run, 64ul + container->size + item->size);
    }
    if (container->kind == JINJA_DICT) {
        struct jinja_pair *pair;
        int rc = jinja_dict_find(run, container->dict, item, &pair);
        *out = !rc && pair;
        return rc;
    }
    if (!jinja_is_listlike(container))
        return jinja_fail(run, ERR_INVALID, "argument of type '%s' is not iterable",
                          jinja_type_name(container));
    return contains_item(run, container->list, container->kind == JINJA_GENERATOR, item, out);
}

int jinja_compare(struct jinja_run *run, enum jinja_op op, const struct jinja_value *a,
                  const struct jinja_value *b, bool *out) {
    int rc, order;
    switch (op) {
    case JINJA_OP_EQ:
    case JINJA_OP_NE:
        rc = jinja_equal(run, a, b, out);
        if (op == JINJA_OP_NE) *out = !*out;
        return rc;
    case JINJA_OP_IN:
    case JINJA_OP_NOT_IN:
        rc = jinja_contains(run, b, a, out);
        if (op == JINJA_OP_NOT_IN) *out = !*out;
        return rc;
    default:
        break;
    }
    rc = jinja_order(run, symbols[op], a, b, &order);
    *out = op == JINJA_OP_LT   ? order < 0
           : op == JINJA_OP_LE ? order <= 0
           : op == JINJA_OP_GT ? order == 1
                               : order == 0 || order == 1; /* 2: unordered, all false */
    return rc;
}

int jinja_length(struct jinja_run *run, const struct jinja_value *v, int64_t *out) {
    *out = 0;
    if (v->kind == JINJA_UNDEFINED) return 0;
    if (v->kind == JINJA_STR) {
        *out = (int64_t)jinja_str_length(v);
        return jinja_charge_walk(run, v);
    }
    if (v->kind == JINJA_LOOP) return jinja_loop_length(run, v->loop, out);
    if (v->kind != JINJA_DICT && (!jinja_is_listlike(v) || v->kind == JINJA_GENERATOR))
        return jinja_fail(run, ERR_INVALID, "object of type '%s' has no len()", jinja_type_name(v));
    *out = v->kind == JINJA_DICT ? v->dict->count : v->list->count;
    return 0;
}

static void set_undefined(const struct jinja_value *object, const struct jinja_value *name,
                          struct jinja_value *out) {
    uint8_t owner = object->kind;
    *out = *name;
    out->kind = JINJA_UNDEFINED;
    out->flags = 0;
    out->owner = owner;
}

/* The undefined remembers how the key was written; only misses pay for it. */
static int set_undefined_element(struct jinja_run *run, const struct jinja_value *object,
                                 const struct jinja_value *key, struct jinja_value *out) {
    struct jinja_value owner = *object;
    struct jinja_text *text;
    int rc = jinja_text_open(run, 24, &text);
    if (!rc) rc = jinja_print_repr(run, text, key);
    if (rc) return rc;
    struct jinja_value name = jinja_text_value(text);
    set_undefined(&owner, &name, out);
    out->flags = JINJA_ELEMENT;
    return 0;
}

static int bind_method(struct jinja_run *run, const struct jinja_builtin *method,
                       const struct jinja_value *object, struct jinja_value *out) {
    struct jinja_function *function = jinja_alloc(run, 1, sizeof *function);
    if (!function) return jinja_fail_memory(run);
    *function = (struct jinja_function){method, *object};
    *out = (struct jinja_value){.kind = JINJA_FUNCTION, .function = function};
    return 0;
}

static int refuse_mutator(struct jinja_run *run, const struct jinja_value *object,
                          const struct jinja_value *name, struct jinja_value *out) {
    char text[96];
    snprintf(text, sizeof text, "access to attribute '%.*s' of '%s' object is unsafe.",
             (int)name->size, jinja_str_data(name), jinja_type_name(object));
    int rc = jinja_str(run, text, strlen(text), false, out);
    out->kind = JINJA_UNDEFINED;
    out->flags = JINJA_HINT;
    return rc;
}

int jinja_attribute(struct jinja_run *run, const struct jinja_value *object,
                    const struct jinja_value *name, struct jinja_value *out) {
    const struct jinja_builtin *method = jinja_find_method(object, name);
    if (method) return bind_method(run, method, object, out);
    if (jinja_is_mutator(object, name)) return refuse_mutator(run, object, name, out);
    if (object->kind == JINJA_FUNCTION) return jinja_cycler_attribute(run, object, name, out);
    if (object->kind == JINJA_LOOP) return jinja_loop_attribute(run, object->loop, name, out);
    if (object->kind == JINJA_MACRO && jinja_str_is(name, "name"))
        return jinja_macro_name(run, object, out);
    if (object->kind == JINJA_NAMESPACE) {
        struct jinja_pair *pair;
        int rc = jinja_dict_find(run, object->dict, name, &pair);
        *out = !rc && pair ? pair->value : (struct jinja_value){.kind = JINJA_MISSING};
        return rc;
    }
    *out = (struct jinja_value){.kind = JINJA_MISSING};
    return 0;
}

/* *out MISSING when there is no such item. */
static int ops_find_item(struct jinja_run *run, const struct jinja_value *object,
                         const struct jinja_value *key, struct jinja_value *out) {
    *out = (struct jinja_value){.kind = JINJA_MISSING};
    if (object->kind == JINJA_DICT) {
        struct jinja_pair *pair;
        if (!jinja_hashable(key)) return 0;
        int rc = jinja_dict_find(run, object->dict, key, &pair);
        if (!rc && pair) *out = pair->value;
        return rc;
    }
    if (!jinja_is_int(key)) return 0;
    int64_t index = jinja_int_of(key), length;
    if (object->kind == JINJA_STR) {
        int rc = jinja_charge_walk(run, object);
        length = (int64_t)jinja_str_length(object);
        if (index < 0) index += length;
        if (!rc && index >= 0 && index < length) *out = jinja_str_slice(object, index, index + 1);
        return rc;
    }
    if (object->kind < JINJA_LIST || object->kind > JINJA_RANGE) return 0;
    length = object->list->count;
    if (index < 0) index += length;
    if (index >= 0 && index < length) *out = object->list->items[index];
    return 0;
}

int jinja_getattr(struct jinja_run *run, const struct jinja_value *object,
                  const struct jinja_value *name, struct jinja_value *out) {
    struct jinja_value source = *object, found; /* `out` may be `object` */
    if (source.kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, &source);
    int rc = jinja_attribute(run, &source, name, &found);
    if (!rc && found.kind == JINJA_MISSING) rc = ops_find_item(run, &source, name, &found);
    if (!rc && found.kind == JINJA_MISSING) set_undefined(&source, name, &found);
    if (!rc) *out = found;
    return rc;
}

int jinja_getitem(struct jinja_run *run, const struct jinja_value *object,
                  const struct jinja_value *key, struct jinja_value *out) {
    struct jinja_value source = *object, found;
    if (source.kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, &source);
    int rc = ops_find_item(run, &source, key, &found);
    if (!rc && found.kind == JINJA_MISSING && jinja_is_str(key))
        rc = jinja_attribute(run, &source, key, &found);
    if (!rc && found.kind == JINJA_MISSING) {
        if (jinja_is_str(key))
            set_undefined(&source, key, &found);
        else
            rc = set_undefined_element(run, &source, key, &found);
    }
    if (!rc) *out = found;
    return rc;
}

/* One bound of a slice as Python clips it. */
static int slice_bound(struct jinja_run *run, const struct jinja_value *part, int64_t length,
                       int64_t step, bool is_end, int64_t *out) {
    int64_t low = step < 0 ? -1 : 0, high = step < 0 ? length - 1 : length;
    if (part->kind == JINJA_MISSING || part->kind == JINJA_NONE) {
        *out = (step < 0) == is_end ? low : high;
        return 0;
    }
    if (!jinja_is_int(part))
        return jinja_fail(run, ERR_INVALID,
                          "slice indices must be integers or None or have an __index__ method");
    int64_t i = jinja_int_of(part);
    if (i < 0) i = i < -length ? low : i + length;
    *out = i < low ? low : i > high ? high : i;
    return 0;
}

static int slice_str(struct jinja_run *run, const struct jinja_value *s, int64_t begin, int64_t end,
                     int64_t step, struct jinja_value *out) {
    if (step == 1) {
        *out = begin < end ? jinja_str_slice(s, begin, end) : jinja_str_view(s, 0, 0);
        return 0;
    }
    struct jinja_value chars, picked;
    struct jinja_text *text;
    int rc = jinja_to_list(run, s, JINJA_LIST, &chars);
    if (!rc) rc = jinja_text_open(run, 0, &text);
    for (int64_t i = begin; !rc && (step > 0 ? i < end : i > end); i += step) {
        picked = chars.list->items[i];
        rc = jinja_text_add_str(run, text, &picked);
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

int jinja_slice(struct jinja_run *run, const struct jinja_value *object,
                const struct jinja_value parts[3], struct jinja_value *out) {
    struct jinja_value source = *object, made;
    int64_t length, begin = 0, end = 0, step = 1;
    if (source.kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, &source);
    if (source.kind == JINJA_DICT) return jinja_fail(run, ERR_INVALID, "unhashable type: 'slice'");
    if (source.kind != JINJA_STR && (source.kind < JINJA_LIST || source.kind > JINJA_RANGE))
        return jinja_fail(run, ERR_INVALID, "'%s' object is not subscriptable",
                          jinja_type_name(&source));
    int rc = jinja_arg_int(run, &parts[2], 1, &step);
    if (!rc && step == 0) rc = jinja_fail(run, ERR_INVALID, "slice step cannot be zero");
    if (!rc) rc = jinja_length(run, &source, &length);
    if (!rc) rc = slice_bound(run, &parts[0], length, step, false, &begin);
    if (!rc) rc = slice_bound(run, &parts[1], length, step, true, &end);
    if (rc) return rc;
    if (step > length + 1) step = length + 1; /* no overflow in begin + step */
    if (step < -length - 1) step = -length - 1;
    if (source.kind == JINJA_STR) return slice_str(run, &source, begin, end, step, out);
    rc = jinja_list_open(run, source.kind == JINJA_TUPLE ? JINJA_TUPLE : JINJA_LIST, 0, &made);
    for (int64_t i = begin; !rc && (step > 0 ? i < end : i > end); i += step)
        rc = jinja_list_add(run, made.list, &source.list->items[i]);
    if (!rc) *out = made;
    return rc;
}

static bool all_digits(const struct jinja_value *s) {
    for (uint32_t i = 0; i < s->size; i++)
        if (jinja_str_data(s)[i] < '0' || jinja_str_data(s)[i] > '9') return false;
    return s->size > 0;
}

int jinja_path(struct jinja_run *run, const struct jinja_value *object,
               const struct jinja_value *path, struct jinja_value *out) {
    struct jinja_value v = *object;
    int rc = 0;
    if (path->kind == JINJA_STR) {
        uint32_t at = 0;
        bool more = true;
        while (more && !rc) {
            uint32_t end = at;
            while (end < path->size && jinja_str_data(path)[end] != '.') end++;
            struct jinja_value part = jinja_str_view(path, at, end), key = part;
            if (all_digits(&part))
                rc = jinja_int_from_digits(run, jinja_str_data(&part), part.size, &key);
            if (!rc) rc = jinja_getitem(run, &v, &key, &v);
            more = end < path->size;
            at = end + 1;
        }
    } else if (path->kind != JINJA_NONE && path->kind != JINJA_MISSING) {
        rc = jinja_getitem(run, &v, path, &v);
    }
    if (!rc) *out = v;
    return rc;
}

int jinja_range(struct jinja_run *run, int64_t first, int64_t end, int64_t step,
                struct jinja_value *out) {
    if (step == 0) return jinja_fail(run, ERR_INVALID, "range() arg 3 must not be zero");
    uint64_t distance = 0, stride = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
    if (step > 0 && first < end) distance = (uint64_t)end - (uint64_t)first;
    if (step < 0 && first > end) distance = (uint64_t)first - (uint64_t)end;
    uint64_t count = distance / stride + (distance % stride != 0);
    if (count > JINJA_RANGE_MAX)
        return jinja_fail(run, ERR_LIMIT,
                          "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).",
                          JINJA_RANGE_MAX);
    struct jinja_value made;
    int rc = jinja_list_open(run, JINJA_RANGE, count, &made);
    for (uint64_t i = 0; i < count && !rc; i++) {
        struct jinja_value item = jinja_int((int64_t)((uint64_t)first + i * (uint64_t)step));
        rc = jinja_list_add(run, made.list, &item);
    }
    if (rc) return rc;
    made.list->first = first;
    made.list->end = end;
    made.list->step = step;
    *out = made;
    return 0;
}
