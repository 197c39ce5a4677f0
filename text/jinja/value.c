/* Values: failing, charging steps, truth, equality, order, hashing, lists and dicts.
 *
 * Dicts keep the order of insertion as Python's do; small ones are searched, larger ones get an
 * index. Comparing and printing count their depth: containers may hold each other. */
#include "text/jinja/value.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "text/jinja/text.h"

#define SMALL_DICT 8u /* without an index up to here */

int jinja_fail(struct jinja_run *run, int rc, const char *format, ...) {
    char text[sizeof run->fault->text];
    char field[64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t whole = utf8_complete(text, strlen(text)); /* vsnprintf may cut a character */
    snprintf(field, sizeof field, "chat template line %d", run->line);
    return fault_set(run->fault, rc, field, "%.*s", (int)whole, text);
}

int jinja_fail_undefined(struct jinja_run *run, const struct jinja_value *undefined) {
    int size = undefined->text ? (int)undefined->size : 0;
    const char *name = size ? jinja_str_data(undefined) : "";
    if (size > 200) size = (int)utf8_complete(name, 200);
    if (undefined->flags & JINJA_HINT) return jinja_fail(run, ERR_INVALID, "%.*s", size, name);
    if (undefined->owner == JINJA_MISSING)
        return jinja_fail(run, ERR_INVALID, "'%.*s' is undefined", size, name);
    struct jinja_value owner = {.kind = undefined->owner};
    const char *object = owner.kind == JINJA_NONE ? "" : " object";
    const char *type = owner.kind == JINJA_NONE ? "None" : jinja_type_name(&owner);
    if (undefined->flags & JINJA_ELEMENT)
        return jinja_fail(run, ERR_INVALID, "%s%s has no element %.*s", type, object, size, name);
    return jinja_fail(run, ERR_INVALID, "'%s%s' has no attribute '%.*s'", type, object, size, name);
}

int jinja_fail_memory(struct jinja_run *run) {
    if (run->arena->full)
        return jinja_fail(run, ERR_LIMIT, "the template needs more memory than a request may use");
    return jinja_fail(run, ERR_NOMEM, "%s", err_text(ERR_NOMEM));
}

void *jinja_alloc(struct jinja_run *run, size_t count, size_t size) {
    return arena_alloc(run->arena, count, size);
}

int jinja_charge(struct jinja_run *run, size_t steps) {
    if ((int64_t)steps <= run->steps) {
        run->steps -= (int64_t)steps;
        return 0;
    }
    run->steps = 0;
    return jinja_fail(run, ERR_LIMIT, "the template takes more than %d steps", JINJA_STEPS_MAX);
}

int jinja_charge_bytes(struct jinja_run *run, size_t bytes) {
    size_t total = run->bytes + bytes;
    run->bytes = total % 64;
    return jinja_charge(run, total / 64);
}

int jinja_charge_chars(struct jinja_run *run, size_t bytes) {
    return jinja_charge_bytes(run, bytes * 8);
}

int jinja_enter(struct jinja_run *run) {
    if (run->depth >= JINJA_DEPTH_MAX)
        return jinja_fail(run, ERR_LIMIT, "nested more than %d deep", JINJA_DEPTH_MAX);
    run->depth++;
    return jinja_charge(run, 1) ? (run->depth--, ERR_LIMIT) : 0;
}

void jinja_leave(struct jinja_run *run) {
    run->depth--;
}

struct jinja_value jinja_undefined(void) {
    struct jinja_value v = jinja_str_empty();
    v.kind = JINJA_UNDEFINED;
    return v;
}

int jinja_undefined_hint(struct jinja_run *run, const char *message, struct jinja_value *out) {
    int rc = jinja_str_c(run, message, out);
    out->kind = JINJA_UNDEFINED;
    out->flags = JINJA_HINT;
    return rc;
}

double jinja_real_of(const struct jinja_value *number) {
    if (number->kind == JINJA_FLOAT) return number->real;
    if (number->kind != JINJA_BIG) return (double)jinja_int_of(number);
    char digits[400]; /* more digits than a double's range needs: infinite */
    if (number->size >= sizeof digits)
        return jinja_str_data(number)[0] == '-' ? -INFINITY : INFINITY;
    memcpy(digits, jinja_str_data(number), number->size);
    digits[number->size] = 0;
    return strtod(digits, NULL);
}

const char *jinja_type_name(const struct jinja_value *v) {
    static const char *const names[] = {
        [JINJA_MISSING] = "Undefined",
        [JINJA_UNDEFINED] = "Undefined",
        [JINJA_NONE] = "NoneType",
        [JINJA_BOOL] = "bool",
        [JINJA_INT] = "int",
        [JINJA_BIG] = "int",
        [JINJA_FLOAT] = "float",
        [JINJA_STR] = "str",
        [JINJA_LIST] = "list",
        [JINJA_TUPLE] = "tuple",
        [JINJA_RANGE] = "range",
        [JINJA_VIEW] = "dict_items",
        [JINJA_GENERATOR] = "generator",
        [JINJA_DICT] = "dict",
        [JINJA_NAMESPACE] = "Namespace",
        [JINJA_MACRO] = "Macro",
        [JINJA_FUNCTION] = "builtin_function_or_method",
        [JINJA_LOOP] = "LoopContext",
    };
    if (v->kind == JINJA_VIEW && v->list) return v->list->label;
    return names[v->kind];
}

bool jinja_truth(const struct jinja_value *v) {
    switch (v->kind) {
    case JINJA_MISSING:
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        return false;
    case JINJA_BOOL:
        return v->boolean;
    case JINJA_INT:
        return v->integer != 0;
    case JINJA_FLOAT:
        return v->real != 0; /* NaN is true */
    case JINJA_STR:
        return v->size > 0;
    case JINJA_LIST:
    case JINJA_TUPLE:
    case JINJA_RANGE:
    case JINJA_VIEW:
        return v->list->count > 0;
    case JINJA_DICT:
        return v->dict->count > 0;
    default:
        return true;
    }
}

bool jinja_same(const struct jinja_value *a, const struct jinja_value *b) {
    if (a->kind != b->kind) return false;
    switch (a->kind) {
    case JINJA_NONE:
        return true;
    case JINJA_BOOL:
        return a->boolean == b->boolean;
    case JINJA_INT:
        return a->integer == b->integer;
    case JINJA_FLOAT:
        return a->real == b->real;
    case JINJA_STR:
    case JINJA_BIG:
        return jinja_str_equal(a, b);
    case JINJA_UNDEFINED:
        return false;
    default:
        return a->list == b->list;
    }
}

/* Exact: a double holds no 64-bit integer above 2^53. 2: unordered. */
static int order_int_real(int64_t i, double f) {
    if (isnan(f)) return 2;
    if (f >= 9223372036854775808.0) return -1;
    if (f < -9223372036854775808.0) return 1;
    int64_t whole = (int64_t)f;
    if (i != whole) return i < whole ? -1 : 1;
    double rest = f - (double)whole;
    return rest > 0 ? -1 : rest < 0;
}

static int order_reals(double a, double b) {
    if (isnan(a) || isnan(b)) return 2;
    return a < b ? -1 : a > b;
}

/* Digits without leading zeros: longer is larger. */
static int order_bigs(const struct jinja_value *a, const struct jinja_value *b) {
    bool minus = jinja_str_data(a)[0] == '-';
    if (minus != (jinja_str_data(b)[0] == '-')) return minus ? -1 : 1;
    int order = a->size != b->size ? (a->size < b->size ? -1 : 1) : jinja_str_order(a, b);
    return minus ? -order : order;
}

static int order_numbers(const struct jinja_value *a, const struct jinja_value *b) {
    if (a->kind == JINJA_BIG && b->kind == JINJA_BIG) return order_bigs(a, b);
    if (a->kind == JINJA_BIG || b->kind == JINJA_BIG)
        return order_reals(jinja_real_of(a), jinja_real_of(b));
    if (a->kind == JINJA_FLOAT && b->kind == JINJA_FLOAT) return order_reals(a->real, b->real);
    if (b->kind == JINJA_FLOAT) return order_int_real(jinja_int_of(a), b->real);
    if (a->kind == JINJA_FLOAT) {
        int order = order_int_real(jinja_int_of(b), a->real);
        return order == 2 ? 2 : -order;
    }
    int64_t x = jinja_int_of(a), y = jinja_int_of(b);
    return x < y ? -1 : x > y;
}

static int equal_lists(struct jinja_run *run, const struct jinja_list *a,
                       const struct jinja_list *b, bool *out) {
    *out = a->count == b->count;
    int rc = 0;
    for (uint32_t i = 0; i < a->count && i < b->count && *out && !rc; i++)
        rc = jinja_equal(run, &a->items[i], &b->items[i], out);
    return rc;
}

static int equal_dicts(struct jinja_run *run, const struct jinja_dict *a,
                       const struct jinja_dict *b, bool *out) {
    *out = a->count == b->count;
    int rc = 0;
    for (uint32_t i = 0; i < a->count && *out && !rc; i++) {
        struct jinja_pair *other;
        rc = jinja_dict_find(run, b, &a->pairs[i].key, &other);
        *out = !rc && other;
        if (*out) rc = jinja_equal(run, &a->pairs[i].value, &other->value, out);
    }
    return rc;
}

static int equal_deep(struct jinja_run *run, const struct jinja_value *a,
                      const struct jinja_value *b, bool *out) {
    if (a->list == b->list) {
        *out = true;
        return 0;
    }
    int rc = jinja_enter(run);
    if (rc) return rc;
    if (a->kind == JINJA_DICT)
        rc = equal_dicts(run, a->dict, b->dict, out);
    else
        rc = equal_lists(run, a->list, b->list, out);
    jinja_leave(run);
    return rc;
}

int jinja_equal(struct jinja_run *run, const struct jinja_value *a, const struct jinja_value *b,
                bool *out) {
    if (jinja_is_number(a) && jinja_is_number(b)) {
        *out = order_numbers(a, b) == 0;
        return jinja_charge(run, 1);
    }
    *out = a->kind == b->kind;
    if (!*out) return jinja_charge(run, 1);
    switch (a->kind) {
    case JINJA_STR:
        *out = jinja_str_equal(a, b);
        return jinja_charge_bytes(run, a->size == b->size ? a->size + 64ul : 64);
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        return 0;
    case JINJA_LIST:
    case JINJA_TUPLE:
    case JINJA_RANGE:
    case JINJA_DICT:
        return equal_deep(run, a, b, out);
    default:
        *out = a->list == b->list;
        return 0;
    }
}

static int order_lists(struct jinja_run *run, const char *op, const struct jinja_list *a,
                       const struct jinja_list *b, int *order) {
    int rc = jinja_enter(run);
    if (rc) return rc;
    for (uint32_t i = 0; i < a->count && i < b->count && !rc; i++) {
        bool equal;
        rc = jinja_equal(run, &a->items[i], &b->items[i], &equal);
        if (rc || equal) continue;
        rc = jinja_order(run, op, &a->items[i], &b->items[i], order);
        goto out;
    }
    *order = a->count < b->count ? -1 : a->count > b->count;
out:
    jinja_leave(run);
    return rc;
}

int jinja_order(struct jinja_run *run, const char *op, const struct jinja_value *a,
                const struct jinja_value *b, int *order) {
    *order = 0;
    if (a->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, a);
    if (b->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, b);
    if (jinja_is_number(a) && jinja_is_number(b)) {
        *order = order_numbers(a, b);
        return jinja_charge(run, 1);
    }
    if (jinja_is_str(a) && jinja_is_str(b)) {
        *order = jinja_str_order(a, b);
        return jinja_charge_bytes(run, 64ul + (a->size < b->size ? a->size : b->size));
    }
    if (a->kind == b->kind && (a->kind == JINJA_LIST || a->kind == JINJA_TUPLE))
        return order_lists(run, op, a->list, b->list, order);
    return jinja_fail(run, ERR_INVALID, "'%s' not supported between instances of '%s' and '%s'", op,
                      jinja_type_name(a), jinja_type_name(b));
}

int jinja_list_open(struct jinja_run *run, enum jinja_kind kind, size_t capacity,
                    struct jinja_value *out) {
    if (capacity > JINJA_ITEMS_MAX)
        return jinja_fail(run, ERR_LIMIT, "a list grows past %u items", JINJA_ITEMS_MAX);
    struct jinja_list *list = jinja_alloc(run, 1, sizeof *list);
    if (!list) return jinja_fail_memory(run);
    if (capacity) {
        list->items = jinja_alloc(run, capacity, sizeof *list->items);
        if (!list->items) return jinja_fail_memory(run);
        list->capacity = (uint32_t)capacity;
    }
    *out = (struct jinja_value){.kind = (uint8_t)kind, .list = list};
    return 0;
}

static int grow_list(struct jinja_run *run, struct jinja_list *list) {
    if (list->count >= JINJA_ITEMS_MAX)
        return jinja_fail(run, ERR_LIMIT, "a list grows past %u items", JINJA_ITEMS_MAX);
    uint32_t capacity = list->capacity * 2 + 4;
    struct jinja_value *items = jinja_alloc(run, capacity, sizeof *items);
    if (!items) return jinja_fail_memory(run);
    if (list->count) memcpy(items, list->items, list->count * sizeof *items);
    list->items = items;
    list->capacity = capacity;
    return 0;
}

int jinja_list_add(struct jinja_run *run, struct jinja_list *list, const struct jinja_value *item) {
    struct jinja_value copy = *item; /* the item may lie in the list that grows */
    int rc = jinja_charge(run, 1);
    if (!rc && list->count == list->capacity) rc = grow_list(run, list);
    if (!rc) list->items[list->count++] = copy;
    return rc;
}

static int list_of_chars(struct jinja_run *run, const struct jinja_value *s,
                         struct jinja_list *list) {
    struct jinja_cursor cursor;
    jinja_cursor_open(&cursor, s);
    int rc = 0;
    while (!rc && jinja_cursor_step(&cursor)) {
        struct jinja_value c = *s;
        c.begin = cursor.at;
        c.size = cursor.length;
        c.flags = 0;
        rc = jinja_list_add(run, list, &c);
    }
    return rc;
}

/* Appends what iterating over `v` gives. */
static int add_all(struct jinja_run *run, const struct jinja_value *v, struct jinja_list *list) {
    int rc = 0;
    if (v->kind == JINJA_UNDEFINED) return 0;
    if (v->kind == JINJA_STR) return list_of_chars(run, v, list);
    if (v->kind == JINJA_DICT) {
        for (uint32_t i = 0; i < v->dict->count && !rc; i++)
            rc = jinja_list_add(run, list, &v->dict->pairs[i].key);
        return rc;
    }
    if (!jinja_is_listlike(v))
        return jinja_fail(run, ERR_INVALID, "'%s' object is not iterable", jinja_type_name(v));
    uint32_t count = v->list->count;
    for (uint32_t i = v->list->used; i < count && !rc; i++)
        rc = jinja_list_add(run, list, &v->list->items[i]);
    if (v->kind == JINJA_GENERATOR) v->list->used = count;
    return rc;
}

int jinja_to_list(struct jinja_run *run, const struct jinja_value *v, enum jinja_kind kind,
                  struct jinja_value *out) {
    struct jinja_value source = *v; /* `out` may be `v` */
    struct jinja_value made;
    uint32_t count = jinja_is_listlike(v)    ? v->list->count
                     : v->kind == JINJA_DICT ? v->dict->count
                                             : 0;
    int rc = jinja_list_open(run, kind, count, &made);
    if (!rc) rc = add_all(run, &source, made.list);
    if (!rc) *out = made;
    return rc;
}

int jinja_iterate(struct jinja_run *run, const struct jinja_value *v, struct jinja_list **out) {
    if (jinja_is_listlike(v) && v->kind != JINJA_GENERATOR) {
        *out = v->list;
        return 0;
    }
    struct jinja_value made;
    int rc = jinja_to_list(run, v, JINJA_LIST, &made);
    if (!rc) *out = made.list;
    return rc;
}

int jinja_tuple2(struct jinja_run *run, const struct jinja_value *a, const struct jinja_value *b,
                 struct jinja_value *out) {
    struct jinja_value made;
    int rc = jinja_list_open(run, JINJA_TUPLE, 2, &made);
    if (!rc) rc = jinja_list_add(run, made.list, a);
    if (!rc) rc = jinja_list_add(run, made.list, b);
    if (!rc) *out = made;
    return rc;
}

int jinja_dict_open(struct jinja_run *run, enum jinja_kind kind, struct jinja_value *out) {
    struct jinja_dict *dict = jinja_alloc(run, 1, sizeof *dict);
    if (!dict) return jinja_fail_memory(run);
    *out = (struct jinja_value){.kind = (uint8_t)kind, .dict = dict};
    return 0;
}

static bool hashable(const struct jinja_value *key, int depth) {
    if (key->kind == JINJA_LIST || key->kind == JINJA_DICT || depth == 0) return false;
    if (key->kind != JINJA_TUPLE) return true;
    for (uint32_t i = 0; i < key->list->count; i++)
        if (!hashable(&key->list->items[i], depth - 1)) return false;
    return true;
}

bool jinja_hashable(const struct jinja_value *key) {
    return hashable(key, 8); /* tuples inside tuples: nobody needs them deeper */
}

static uint64_t hash_bytes(const void *data, size_t size, uint64_t hash) {
    const unsigned char *p = data;
    for (size_t i = 0; i < size; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

/* Equal numbers hash alike, whatever their kind. */
static uint64_t hash_number(const struct jinja_value *v) {
    double f = jinja_real_of(v);
    int64_t i = jinja_is_int(v) ? jinja_int_of(v) : 0;
    bool whole = jinja_is_int(v);
    if (!whole && f >= -9223372036854775808.0 && f < 9223372036854775808.0) {
        i = (int64_t)f;
        whole = (double)i == f;
    }
    uint64_t bits;
    if (whole)
        bits = (uint64_t)i;
    else
        memcpy(&bits, &f, sizeof bits);
    return hash_bytes(&bits, sizeof bits, 0xcbf29ce484222325u);
}

static uint64_t hash_value(const struct jinja_value *v) {
    uint64_t hash = 0xcbf29ce484222325u;
    if (jinja_is_number(v)) return hash_number(v);
    if (v->kind == JINJA_STR) return hash_bytes(jinja_str_data(v), v->size, hash);
    if (v->kind != JINJA_TUPLE) return hash ^ v->kind;
    for (uint32_t i = 0; i < v->list->count; i++)
        hash = (hash ^ hash_value(&v->list->items[i])) * 0x100000001b3u;
    return hash;
}

static int hash_key(struct jinja_run *run, const struct jinja_value *key, uint64_t *hash) {
    if (!jinja_hashable(key))
        return jinja_fail(run, ERR_INVALID, "unhashable type: '%s'", jinja_type_name(key));
    int rc = jinja_charge_bytes(run, 64ul + (key->kind == JINJA_STR ? key->size : 0));
    if (!rc && key->kind == JINJA_TUPLE) rc = jinja_charge(run, key->list->count);
    *hash = rc ? 0 : hash_value(key);
    return rc;
}

static int pair_is(struct jinja_run *run, const struct jinja_pair *pair, uint64_t hash,
                   const struct jinja_value *key, bool *same) {
    *same = false;
    if (pair->hash != hash) return jinja_charge_bytes(run, 8); /* probes are work too */
    return jinja_equal(run, &pair->key, key, same);
}

static int find_hashed(struct jinja_run *run, const struct jinja_dict *dict, uint64_t hash,
                       const struct jinja_value *key, struct jinja_pair **out) {
    bool same = false;
    int rc = 0;
    *out = NULL;
    if (!dict->index) {
        for (uint32_t i = 0; i < dict->count && !same && !rc; i++) {
            rc = pair_is(run, &dict->pairs[i], hash, key, &same);
            if (same) *out = &dict->pairs[i];
        }
        return rc;
    }
    uint32_t mask = dict->index_size - 1;
    for (uint32_t slot = (uint32_t)hash & mask; dict->index[slot] && !same && !rc;
         slot = (slot + 1) & mask) {
        struct jinja_pair *pair = &dict->pairs[dict->index[slot] - 1];
        rc = pair_is(run, pair, hash, key, &same);
        if (same) *out = pair;
    }
    return rc;
}

int jinja_dict_find(struct jinja_run *run, const struct jinja_dict *dict,
                    const struct jinja_value *key, struct jinja_pair **out) {
    uint64_t hash = 0;
    int rc = hash_key(run, key, &hash);
    *out = NULL;
    return rc ? rc : find_hashed(run, dict, hash, key, out);
}

static void index_pairs(struct jinja_dict *dict) {
    memset(dict->index, 0, dict->index_size * sizeof *dict->index);
    uint32_t mask = dict->index_size - 1;
    for (uint32_t i = 0; i < dict->count; i++) {
        uint32_t slot = (uint32_t)dict->pairs[i].hash & mask;
        while (dict->index[slot]) slot = (slot + 1) & mask;
        dict->index[slot] = i + 1;
    }
}

static int grow_dict(struct jinja_run *run, struct jinja_dict *dict) {
    if (dict->count >= JINJA_ITEMS_MAX)
        return jinja_fail(run, ERR_LIMIT, "a dict grows past %u entries", JINJA_ITEMS_MAX);
    uint32_t capacity = dict->capacity ? dict->capacity * 2 : 4;
    struct jinja_pair *pairs = jinja_alloc(run, capacity, sizeof *pairs);
    if (!pairs) return jinja_fail_memory(run);
    if (dict->count) memcpy(pairs, dict->pairs, dict->count * sizeof *pairs);
    dict->pairs = pairs;
    dict->capacity = capacity;
    if (capacity <= SMALL_DICT) return 0;
    uint32_t *index = jinja_alloc(run, (size_t)capacity * 2, sizeof *index);
    if (!index) { /* stay small: no index without memory for one */
        dict->capacity = dict->count;
        return jinja_fail_memory(run);
    }
    dict->index = index;
    dict->index_size = capacity * 2;
    index_pairs(dict);
    return 0;
}

int jinja_dict_set(struct jinja_run *run, struct jinja_dict *dict, const struct jinja_value *key,
                   const struct jinja_value *value) {
    struct jinja_value new_key = *key, new_value = *value;
    struct jinja_pair *pair;
    uint64_t hash = 0;
    int rc = hash_key(run, &new_key, &hash);
    if (!rc) rc = find_hashed(run, dict, hash, &new_key, &pair);
    if (rc) return rc;
    if (pair) {
        pair->value = new_value; /* the first key stays, as in Python */
        return 0;
    }
    if (dict->count == dict->capacity) rc = grow_dict(run, dict);
    if (rc) return rc;
    dict->pairs[dict->count++] = (struct jinja_pair){new_key, new_value, hash};
    if (!dict->index) return 0;
    uint32_t mask = dict->index_size - 1, slot = (uint32_t)hash & mask;
    while (dict->index[slot]) {
        slot = (slot + 1) & mask;
        rc = jinja_charge_bytes(run, 8);
        if (rc) return dict->count--, rc;
    }
    dict->index[slot] = dict->count;
    return 0;
}

/* A callee's parameter list in Python: position by position, then by name. */
int jinja_bind(struct jinja_run *run, const char *callee, const struct jinja_args *args,
               const char *const *names, uint32_t count, uint32_t required,
               struct jinja_value *values) {
    if (args->count > count)
        return jinja_fail(run, ERR_INVALID, "%s() takes at most %u arguments (%u given)", callee,
                          count, args->count);
    for (uint32_t i = 0; i < count; i++)
        values[i] = i < args->count ? args->items[i] : (struct jinja_value){.kind = JINJA_MISSING};
    for (uint32_t k = 0; k < args->keyword_count; k++) {
        const struct jinja_value *name = &args->keywords[k].name;
        uint32_t i = 0;
        while (i < count && !jinja_str_is(name, names[i])) i++;
        if (i == count)
            return jinja_fail(run, ERR_INVALID, "%s() got an unexpected keyword argument '%.*s'",
                              callee, name->size < 64 ? (int)name->size : 64, jinja_str_data(name));
        if (values[i].kind != JINJA_MISSING)
            return jinja_fail(run, ERR_INVALID, "%s() got multiple values for argument '%s'",
                              callee, names[i]);
        values[i] = args->keywords[k].value;
    }
    for (uint32_t i = 0; i < required; i++)
        if (values[i].kind == JINJA_MISSING)
            return jinja_fail(run, ERR_INVALID, "%s() missing required argument: '%s'", callee,
                              names[i]);
    return 0;
}
