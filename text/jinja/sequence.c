/* Filters on lists, dicts and other iterables. Lazy filters of Jinja (map, select, ...) work at
 * once here; their result is still a generator to a template: true when empty, and used up by one
 * loop. */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"

#define FILTER(name)                                                                               \
    static int filter_##name(struct jinja_run *run, const struct jinja_value *self,                \
                             const struct jinja_args *args, struct jinja_value *out)

static bool sequence_is_given(const struct jinja_value *v) {
    return v->kind != JINJA_MISSING;
}

/* Sorting */

struct sorter {
    struct jinja_run *run;
    struct jinja_value *keys;
    bool reverse;
};

/* Does b have to come before a? Only then do they change places, so equals keep their order. */
static int comes_before(const struct sorter *s, uint32_t b, uint32_t a, bool *out) {
    int order;
    int rc = s->reverse ? jinja_order(s->run, "<", &s->keys[a], &s->keys[b], &order)
                        : jinja_order(s->run, "<", &s->keys[b], &s->keys[a], &order);
    *out = order < 0;
    return rc;
}

static int sequence_merge(const struct sorter *s, const uint32_t *from, uint32_t *to, uint32_t low,
                          uint32_t middle, uint32_t high) {
    uint32_t a = low, b = middle;
    for (uint32_t i = low; i < high; i++) {
        bool second = a == middle;
        if (!second && b < high) {
            int rc = comes_before(s, from[b], from[a], &second);
            if (rc) return rc;
        }
        to[i] = second ? from[b++] : from[a++];
    }
    return 0;
}

/* Bottom-up merge sort of positions; *sorted is `order` or `spare`. */
static int sort_positions(const struct sorter *s, uint32_t *order, uint32_t *spare, uint32_t count,
                          uint32_t **sorted) {
    for (uint32_t width = 1; width < count; width *= 2) {
        for (uint32_t low = 0; low < count; low += 2 * width) {
            uint32_t middle = count - low < width ? count : low + width;
            uint32_t high = count - low < 2 * width ? count : low + 2 * width;
            int rc = sequence_merge(s, order, spare, low, middle, high);
            if (rc) return rc;
        }
        uint32_t *swap = order;
        order = spare;
        spare = swap;
    }
    *sorted = order;
    return 0;
}

int jinja_sort(struct jinja_run *run, struct jinja_list *items, struct jinja_list *keys,
               bool reverse) {
    struct sorter sorter = {run, keys->items, reverse};
    uint32_t count = items->count, *sorted;
    if (count < 2) return 0;
    uint32_t *order = jinja_alloc(run, count, 2 * sizeof *order);
    struct jinja_value *old = jinja_alloc(run, count, 2 * sizeof *old);
    if (!order || !old) return jinja_fail_memory(run);
    for (uint32_t i = 0; i < count; i++) order[i] = i;
    int rc = sort_positions(&sorter, order, order + count, count, &sorted);
    if (rc) return rc;
    memcpy(old, items->items, count * sizeof *old);
    memcpy(old + count, keys->items, count * sizeof *old);
    for (uint32_t i = 0; i < count; i++) {
        items->items[i] = old[sorted[i]];
        keys->items[i] = old[count + sorted[i]];
    }
    return 0;
}

/* Strings in lower case unless case matters. */
static int sequence_fold(struct jinja_run *run, struct jinja_value *key, bool case_sensitive) {
    if (case_sensitive || !jinja_is_str(key)) return 0;
    return jinja_change_case(run, key, JINJA_LOWER, key);
}

/* Keys for sort: "a,b.c" names several, compared as a tuple. */
static int sort_key(struct jinja_run *run, const struct jinja_value *item,
                    const struct jinja_value *attribute, bool case_sensitive,
                    struct jinja_value *out) {
    struct jinja_value key;
    int rc = jinja_list_open(run, JINJA_TUPLE, 1, out);
    if (rc) return rc;
    uint32_t at = 0;
    bool more = true;
    while (more && !rc) {
        struct jinja_value path = *attribute;
        more = false;
        if (jinja_is_str(attribute)) {
            uint32_t end = at;
            while (end < attribute->size && jinja_str_data(attribute)[end] != ',') end++;
            path = jinja_str_view(attribute, at, end);
            more = end < attribute->size;
            at = end + 1;
        }
        rc = jinja_path(run, item, &path, &key);
        if (!rc) rc = sequence_fold(run, &key, case_sensitive);
        if (!rc) rc = jinja_list_add(run, out->list, &key);
    }
    return rc;
}

FILTER(sort) {
    static const char *const names[] = {"reverse", "case_sensitive", "attribute"};
    struct jinja_value v[3], items, keys, key;
    int rc = jinja_bind(run, "sort", args, names, 3, 0, v);
    if (!rc) rc = jinja_to_list(run, self, JINJA_LIST, &items);
    if (!rc) rc = jinja_list_open(run, JINJA_LIST, items.list->count, &keys);
    for (uint32_t i = 0; !rc && i < items.list->count; i++) {
        rc = sort_key(run, &items.list->items[i], &v[2], jinja_truth(&v[1]), &key);
        if (!rc) rc = jinja_list_add(run, keys.list, &key);
    }
    if (!rc) rc = jinja_sort(run, items.list, keys.list, jinja_truth(&v[0]));
    if (!rc) *out = items;
    return rc;
}

static int pairs_of(struct jinja_run *run, const struct jinja_dict *dict, enum jinja_kind kind,
                    struct jinja_value *out) {
    struct jinja_value pair;
    int rc = jinja_list_open(run, kind, dict->count, out);
    for (uint32_t i = 0; i < dict->count && !rc; i++) {
        rc = jinja_tuple2(run, &dict->pairs[i].key, &dict->pairs[i].value, &pair);
        if (!rc) rc = jinja_list_add(run, out->list, &pair);
    }
    return rc;
}

FILTER(dictsort) {
    static const char *const names[] = {"case_sensitive", "by", "reverse"};
    struct jinja_value v[3], items, keys;
    int rc = jinja_bind(run, "dictsort", args, names, 3, 0, v);
    if (rc) return rc;
    bool by_value = jinja_str_is(&v[1], "value");
    if (sequence_is_given(&v[1]) && !by_value && !jinja_str_is(&v[1], "key"))
        return jinja_fail(run, ERR_INVALID, "You can only sort by either \"key\" or \"value\"");
    if (self->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, self);
    if (self->kind != JINJA_DICT)
        return jinja_fail(run, ERR_INVALID, "'%s' object has no attribute 'items'",
                          jinja_type_name(self));
    rc = pairs_of(run, self->dict, JINJA_LIST, &items);
    if (!rc) rc = jinja_list_open(run, JINJA_LIST, items.list->count, &keys);
    for (uint32_t i = 0; !rc && i < items.list->count; i++) {
        struct jinja_value key = items.list->items[i].list->items[by_value ? 1 : 0];
        rc = sequence_fold(run, &key, jinja_truth(&v[0]));
        if (!rc) rc = jinja_list_add(run, keys.list, &key);
    }
    if (!rc) rc = jinja_sort(run, items.list, keys.list, jinja_truth(&v[2]));
    if (!rc) *out = items;
    return rc;
}

FILTER(items) {
    int rc = jinja_no_args(run, "items", args);
    if (rc) return rc;
    if (self->kind == JINJA_UNDEFINED) return jinja_list_open(run, JINJA_GENERATOR, 0, out);
    if (self->kind != JINJA_DICT)
        return jinja_fail(run, ERR_INVALID, "Can only get item pairs from a mapping.");
    return pairs_of(run, self->dict, JINJA_GENERATOR, out);
}

/* Size and ends */

FILTER(length) {
    int64_t length;
    int rc = jinja_no_args(run, "length", args);
    if (!rc) rc = jinja_length(run, self, &length);
    if (!rc) *out = jinja_int(length);
    return rc;
}

FILTER(first) {
    struct jinja_list *list;
    int rc = jinja_no_args(run, "first", args);
    if (rc) return rc;
    if (self->kind == JINJA_GENERATOR && self->list->used < self->list->count) {
        *out = self->list->items[self->list->used++];
        return 0;
    }
    if (self->kind == JINJA_STR && self->size) { /* not every character of a long text */
        *out = jinja_str_slice(self, 0, 1);
        return 0;
    }
    rc = jinja_iterate(run, self, &list);
    if (rc) return rc;
    if (!list->count) return jinja_undefined_hint(run, "No first item, sequence was empty.", out);
    *out = list->items[0];
    return 0;
}

FILTER(last) {
    struct jinja_list *list;
    int rc = jinja_no_args(run, "last", args);
    if (rc) return rc;
    if (self->kind == JINJA_GENERATOR)
        return jinja_fail(run, ERR_INVALID, "'generator' object is not reversible");
    rc = jinja_iterate(run, self, &list);
    if (rc) return rc;
    if (!list->count) return jinja_undefined_hint(run, "No last item, sequence was empty.", out);
    *out = list->items[list->count - 1];
    return 0;
}

FILTER(list) {
    int rc = jinja_no_args(run, "list", args);
    return rc ? rc : jinja_to_list(run, self, JINJA_LIST, out);
}

FILTER(reverse) {
    struct jinja_value list;
    int rc = jinja_no_args(run, "reverse", args);
    if (!rc) rc = jinja_to_list(run, self, JINJA_GENERATOR, &list);
    if (rc) return rc;
    uint32_t count = list.list->count;
    for (uint32_t i = 0; i < count / 2; i++) {
        struct jinja_value swap = list.list->items[i];
        list.list->items[i] = list.list->items[count - 1 - i];
        list.list->items[count - 1 - i] = swap;
    }
    *out = list;
    if (self->kind != JINJA_STR) return 0;
    struct jinja_value nothing = jinja_str_empty();
    return jinja_join(run, &nothing, list.list, false, out);
}

int jinja_join(struct jinja_run *run, const struct jinja_value *separator,
               const struct jinja_list *list, bool strict, struct jinja_value *out) {
    struct jinja_text *text;
    int rc = jinja_text_open(run, 0, &text);
    for (uint32_t i = 0; i < list->count && !rc; i++) {
        struct jinja_value item;
        if (strict && !jinja_is_str(&list->items[i]))
            return jinja_fail(run, ERR_INVALID, "sequence item %u: expected str instance, %s found",
                              i, jinja_type_name(&list->items[i]));
        rc = jinja_to_str(run, &list->items[i], &item);
        if (!rc && i) rc = jinja_text_add_str(run, text, separator);
        if (!rc) rc = jinja_text_add_str(run, text, &item);
        if (!rc) rc = jinja_charge(run, 1);
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

static int map_path(struct jinja_run *run, const struct jinja_list *list,
                    const struct jinja_value *path, const struct jinja_value *fallback,
                    enum jinja_kind kind, struct jinja_value *out) {
    struct jinja_value item, mapped;
    int rc = jinja_list_open(run, kind, list->count, &mapped);
    for (uint32_t i = 0; i < list->count && !rc; i++) {
        rc = jinja_path(run, &list->items[i], path, &item);
        if (!rc && item.kind == JINJA_UNDEFINED && sequence_is_given(fallback) &&
            fallback->kind != JINJA_NONE)
            item = *fallback;
        if (!rc) rc = jinja_list_add(run, mapped.list, &item);
    }
    if (!rc) *out = mapped;
    return rc;
}

FILTER(join) {
    static const char *const names[] = {"d", "attribute"};
    struct jinja_value v[2], separator = jinja_str_empty(), mapped;
    struct jinja_list *list;
    int rc = jinja_bind(run, "join", args, names, 2, 0, v);
    if (!rc) rc = jinja_iterate(run, self, &list);
    if (!rc && sequence_is_given(&v[0])) rc = jinja_to_str(run, &v[0], &separator);
    if (rc) return rc;
    if (sequence_is_given(&v[1]) && v[1].kind != JINJA_NONE) {
        const struct jinja_value none = {.kind = JINJA_MISSING};
        rc = map_path(run, list, &v[1], &none, JINJA_LIST, &mapped);
        if (rc) return rc;
        list = mapped.list;
    }
    return jinja_join(run, &separator, list, false, out);
}

FILTER(default) {
    static const char *const names[] = {"default_value", "boolean"};
    struct jinja_value v[2];
    int rc = jinja_bind(run, "default", args, names, 2, 0, v);
    if (rc) return rc;
    bool replaces = self->kind == JINJA_UNDEFINED || (jinja_truth(&v[1]) && !jinja_truth(self));
    *out = !replaces ? *self : sequence_is_given(&v[0]) ? v[0] : jinja_str_empty();
    return 0;
}

FILTER(attr) {
    static const char *const names[] = {"name"};
    struct jinja_value v[1], found;
    int rc = jinja_bind(run, "attr", args, names, 1, 1, v);
    if (!rc && !jinja_is_str(&v[0]))
        rc = jinja_fail(run, ERR_INVALID, "attribute name must be string");
    if (!rc && self->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, self);
    if (!rc) rc = jinja_attribute(run, self, &v[0], &found);
    if (rc) return rc;
    if (found.kind == JINJA_MISSING) {
        found = v[0];
        found.kind = JINJA_UNDEFINED;
        found.flags = 0;
        found.owner = self->kind;
    }
    *out = found;
    return 0;
}

/* map, select and reject */

/* The arguments after the first `skipped`. */
static struct jinja_args sequence_rest_of(const struct jinja_args *args, uint32_t skipped) {
    struct jinja_args rest = *args;
    rest.items += skipped;
    rest.count -= skipped;
    return rest;
}

static int find_named(struct jinja_run *run, const struct jinja_value *name, bool filter,
                      const struct jinja_builtin **out) {
    if (jinja_is_str(name))
        *out = filter ? jinja_find_filter(name) : jinja_find_test(name);
    else
        *out = NULL;
    if (*out) return 0;
    bool text = jinja_is_str(name);
    return jinja_fail(run, ERR_INVALID, "No %s named '%.*s'.", filter ? "filter" : "test",
                      text && name->size < 64 ? (int)name->size : 0,
                      text ? jinja_str_data(name) : "");
}

static int map_filter(struct jinja_run *run, const struct jinja_list *list,
                      const struct jinja_args *args, struct jinja_value *out) {
    const struct jinja_builtin *filter;
    struct jinja_value mapped, item;
    int rc = jinja_enter(run); /* the filter may be map again */
    if (rc) return rc;
    struct jinja_args rest = sequence_rest_of(args, 1);
    rc = find_named(run, &args->items[0], true, &filter);
    if (!rc) rc = jinja_list_open(run, JINJA_GENERATOR, list->count, &mapped);
    for (uint32_t i = 0; !rc && i < list->count; i++) {
        rc = filter->call(run, &list->items[i], &rest, &item);
        if (!rc) rc = jinja_list_add(run, mapped.list, &item);
    }
    jinja_leave(run);
    if (!rc) *out = mapped;
    return rc;
}

FILTER(map) {
    static const char *const names[] = {"attribute", "default"};
    struct jinja_list *list;
    if (!jinja_truth(self)) return jinja_list_open(run, JINJA_GENERATOR, 0, out);
    int rc = jinja_iterate(run, self, &list);
    if (rc) return rc;
    if (args->count) return map_filter(run, list, args, out);
    struct jinja_value v[2];
    rc = jinja_bind(run, "map", args, names, 2, 0, v);
    if (!rc && !sequence_is_given(&v[0]))
        rc = jinja_fail(run, ERR_INVALID, "map requires a filter argument");
    return rc ? rc : map_path(run, list, &v[0], &v[1], JINJA_GENERATOR, out);
}

/* select, reject, selectattr, rejectattr */
static int pick(struct jinja_run *run, const struct jinja_value *self,
                const struct jinja_args *args, bool by_attribute, bool wanted,
                struct jinja_value *out) {
    struct jinja_list *list;
    struct jinja_value picked, verdict;
    const struct jinja_builtin *test = NULL;
    uint32_t skipped = by_attribute ? 1 : 0;
    if (!jinja_truth(self)) return jinja_list_open(run, JINJA_GENERATOR, 0, out);
    if (args->count < skipped)
        return jinja_fail(run, ERR_INVALID, "Missing parameter for attribute name");
    int rc = jinja_iterate(run, self, &list);
    if (!rc && args->count > skipped) rc = find_named(run, &args->items[skipped], false, &test);
    if (!rc) rc = jinja_list_open(run, JINJA_GENERATOR, 0, &picked);
    for (uint32_t i = 0; !rc && i < list->count; i++) {
        verdict = list->items[i];
        if (by_attribute) rc = jinja_path(run, &list->items[i], &args->items[0], &verdict);
        if (!rc && test) {
            struct jinja_args rest = sequence_rest_of(args, skipped + 1);
            struct jinja_value subject = verdict;
            rc = test->call(run, &subject, &rest, &verdict);
        }
        if (!rc) rc = jinja_charge(run, 1);
        if (!rc && jinja_truth(&verdict) == wanted)
            rc = jinja_list_add(run, picked.list, &list->items[i]);
    }
    if (!rc) *out = picked;
    return rc;
}

FILTER(select) {
    return pick(run, self, args, false, true, out);
}

FILTER(reject) {
    return pick(run, self, args, false, false, out);
}

FILTER(selectattr) {
    return pick(run, self, args, true, true, out);
}

FILTER(rejectattr) {
    return pick(run, self, args, true, false, out);
}

/* Folds */

static int extreme(struct jinja_run *run, const char *name, bool largest,
                   const struct jinja_value *self, const struct jinja_args *args,
                   struct jinja_value *out) {
    static const char *const names[] = {"case_sensitive", "attribute"};
    struct jinja_value v[2], best_key, key;
    struct jinja_list *list;
    int rc = jinja_bind(run, name, args, names, 2, 0, v), order;
    if (!rc) rc = jinja_iterate(run, self, &list);
    if (rc) return rc;
    if (!list->count)
        return jinja_undefined_hint(run, "No aggregated item, sequence was empty.", out);
    for (uint32_t i = 0; i < list->count && !rc; i++) {
        rc = jinja_path(run, &list->items[i], &v[1], &key);
        if (!rc) rc = sequence_fold(run, &key, jinja_truth(&v[0]));
        if (!rc && i) rc = jinja_order(run, largest ? ">" : "<", &key, &best_key, &order);
        if (rc || (i && order != (largest ? 1 : -1))) continue;
        best_key = key;
        *out = list->items[i];
    }
    return rc;
}

FILTER(min) {
    return extreme(run, "min", false, self, args, out);
}

FILTER(max) {
    return extreme(run, "max", true, self, args, out);
}

FILTER(sum) {
    static const char *const names[] = {"attribute", "start"};
    struct jinja_value v[2], item;
    struct jinja_list *list;
    int rc = jinja_bind(run, "sum", args, names, 2, 0, v);
    if (!rc) rc = jinja_iterate(run, self, &list);
    if (rc) return rc;
    struct jinja_value sum = sequence_is_given(&v[1]) ? v[1] : jinja_int(0);
    if (jinja_is_str(&sum))
        return jinja_fail(run, ERR_INVALID, "sum() can't sum strings [use ''.join(seq) instead]");
    for (uint32_t i = 0; i < list->count && !rc; i++) {
        rc = jinja_path(run, &list->items[i], &v[0], &item);
        if (!rc) rc = jinja_binary(run, JINJA_OP_ADD, &sum, &item, &sum);
    }
    if (!rc) *out = sum;
    return rc;
}

FILTER(unique) {
    static const char *const names[] = {"case_sensitive", "attribute"};
    struct jinja_value v[2], seen, picked, key;
    struct jinja_list *list;
    int rc = jinja_bind(run, "unique", args, names, 2, 0, v);
    if (!rc) rc = jinja_iterate(run, self, &list);
    if (!rc) rc = jinja_dict_open(run, JINJA_DICT, &seen);
    if (!rc) rc = jinja_list_open(run, JINJA_GENERATOR, 0, &picked);
    for (uint32_t i = 0; !rc && i < list->count; i++) {
        rc = jinja_path(run, &list->items[i], &v[1], &key);
        if (!rc) rc = sequence_fold(run, &key, jinja_truth(&v[0]));
        uint32_t before = seen.dict->count;
        if (!rc) rc = jinja_dict_set(run, seen.dict, &key, &key);
        if (!rc && seen.dict->count > before)
            rc = jinja_list_add(run, picked.list, &list->items[i]);
    }
    if (!rc) *out = picked;
    return rc;
}

const struct jinja_builtin jinja_sequence_filters[] = {
    {"attr", filter_attr},
    {"count", filter_length},
    {"d", filter_default},
    {"default", filter_default},
    {"dictsort", filter_dictsort},
    {"first", filter_first},
    {"items", filter_items},
    {"join", filter_join},
    {"last", filter_last},
    {"length", filter_length},
    {"list", filter_list},
    {"map", filter_map},
    {"max", filter_max},
    {"min", filter_min},
    {"reject", filter_reject},
    {"rejectattr", filter_rejectattr},
    {"reverse", filter_reverse},
    {"select", filter_select},
    {"selectattr", filter_selectattr},
    {"sort", filter_sort},
    {"sum", filter_sum},
    {"unique", filter_unique},
};
const size_t jinja_sequence_filter_count =
    sizeof jinja_sequence_filters / sizeof *jinja_sequence_filters;
