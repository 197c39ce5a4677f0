/* Methods of list, tuple and dict. Lists and dicts change in place, as templates that build them
 * expect; they are the render's own copies. */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"

#define METHOD(type, name)                                                                         \
    static int type##_##name(struct jinja_run *run, const struct jinja_value *self,                \
                             const struct jinja_args *args, struct jinja_value *out)

static int no_args(struct jinja_run *run, const char *name, const struct jinja_args *args) {
    return jinja_bind(run, name, args, NULL, 0, 0, NULL);
}

static int bind_one(struct jinja_run *run, const char *name, const struct jinja_args *args,
                    struct jinja_value *value) {
    static const char *const names[] = {"object"};
    return jinja_bind(run, name, args, names, 1, 1, value);
}

METHOD(list, append) {
    struct jinja_value item;
    int rc = bind_one(run, "append", args, &item);
    if (!rc) rc = jinja_list_add(run, self->list, &item);
    *out = jinja_none();
    return rc;
}

METHOD(list, extend) {
    struct jinja_value more, copy;
    int rc = bind_one(run, "extend", args, &more);
    if (!rc) rc = jinja_to_list(run, &more, JINJA_LIST, &copy); /* it may be the list itself */
    for (uint32_t i = 0; !rc && i < copy.list->count; i++)
        rc = jinja_list_add(run, self->list, &copy.list->items[i]);
    *out = jinja_none();
    return rc;
}

METHOD(list, insert) {
    static const char *const names[] = {"index", "object"};
    struct jinja_value v[2];
    struct jinja_list *list = self->list;
    int64_t index = 0, count = list->count;
    int rc = jinja_bind(run, "insert", args, names, 2, 2, v);
    if (!rc) rc = jinja_arg_int(run, &v[0], 0, &index);
    if (!rc) rc = jinja_charge(run, list->count);
    if (!rc) rc = jinja_list_add(run, list, &v[1]);
    if (rc) return rc;
    if (index < 0) index = index < -count ? 0 : index + count;
    if (index > count) index = count;
    memmove(list->items + index + 1, list->items + index,
            (size_t)(count - index) * sizeof *list->items);
    list->items[index] = v[1];
    *out = jinja_none();
    return 0;
}

static int remove_at(struct jinja_run *run, struct jinja_list *list, uint32_t index) {
    memmove(list->items + index, list->items + index + 1,
            (list->count - index - 1) * sizeof *list->items);
    list->count--;
    return jinja_charge(run, list->count - index);
}

METHOD(list, pop) {
    static const char *const names[] = {"index"};
    struct jinja_value v[1];
    int64_t index = 0, count = self->list->count;
    int rc = jinja_bind(run, "pop", args, names, 1, 0, v);
    if (!rc) rc = jinja_arg_int(run, &v[0], -1, &index);
    if (rc) return rc;
    if (!count) return jinja_fail(run, ERR_INVALID, "pop from empty list");
    if (index < -count || index >= count)
        return jinja_fail(run, ERR_INVALID, "pop index out of range");
    if (index < 0) index += count;
    *out = self->list->items[index];
    return remove_at(run, self->list, (uint32_t)index);
}

static int find_item(struct jinja_run *run, const struct jinja_list *list,
                     const struct jinja_value *item, uint32_t from, uint32_t *out) {
    bool found = false;
    int rc = 0;
    for (*out = from; *out < list->count; ++*out) {
        rc = jinja_equal(run, &list->items[*out], item, &found);
        if (rc || found) break;
    }
    return rc;
}

METHOD(list, remove) {
    struct jinja_value item;
    uint32_t at = 0;
    int rc = bind_one(run, "remove", args, &item);
    if (!rc) rc = find_item(run, self->list, &item, 0, &at);
    if (!rc && at == self->list->count)
        rc = jinja_fail(run, ERR_INVALID, "list.remove(x): x not in list");
    *out = jinja_none();
    return rc ? rc : remove_at(run, self->list, at);
}

METHOD(list, clear) {
    int rc = no_args(run, "clear", args);
    if (!rc) self->list->count = 0;
    *out = jinja_none();
    return rc;
}

METHOD(list, copy) {
    int rc = no_args(run, "copy", args);
    return rc ? rc : jinja_to_list(run, self, JINJA_LIST, out);
}

METHOD(list, reverse) {
    struct jinja_list *list = self->list;
    int rc = no_args(run, "reverse", args);
    if (!rc) rc = jinja_charge(run, list->count);
    for (uint32_t i = 0; i < list->count / 2 && !rc; i++) {
        struct jinja_value swap = list->items[i];
        list->items[i] = list->items[list->count - 1 - i];
        list->items[list->count - 1 - i] = swap;
    }
    *out = jinja_none();
    return rc;
}

METHOD(list, sort) {
    static const char *const names[] = {"reverse"};
    struct jinja_value v[1], keys;
    int rc = jinja_bind(run, "sort", args, names, 1, 0, v);
    if (!rc) rc = jinja_to_list(run, self, JINJA_LIST, &keys);
    if (!rc) rc = jinja_sort(run, self->list, keys.list, jinja_truth(&v[0]));
    *out = jinja_none();
    return rc;
}

METHOD(list, index) {
    struct jinja_value item;
    uint32_t at = 0;
    int rc = bind_one(run, "index", args, &item);
    if (!rc) rc = find_item(run, self->list, &item, 0, &at);
    if (!rc && at == self->list->count)
        rc = jinja_fail(run, ERR_INVALID, "the value is not in the %s", jinja_type_name(self));
    *out = jinja_int(at);
    return rc;
}

METHOD(list, count) {
    struct jinja_value item;
    int64_t found = 0;
    uint32_t at = 0;
    int rc = bind_one(run, "count", args, &item);
    while (!rc) {
        rc = find_item(run, self->list, &item, at, &at);
        if (rc || at == self->list->count) break;
        found++;
        at++;
    }
    *out = jinja_int(found);
    return rc;
}

static const struct jinja_builtin list_methods[] = {
    {"append", list_append},   {"clear", list_clear},   {"copy", list_copy},
    {"count", list_count},     {"extend", list_extend}, {"index", list_index},
    {"insert", list_insert},   {"pop", list_pop},       {"remove", list_remove},
    {"reverse", list_reverse}, {"sort", list_sort},
};

static const struct jinja_builtin tuple_methods[] = {
    {"count", list_count},
    {"index", list_index},
};

METHOD(dict, get) {
    static const char *const names[] = {"key", "default"};
    struct jinja_value v[2];
    struct jinja_pair *pair;
    int rc = jinja_bind(run, "get", args, names, 2, 1, v);
    if (!rc) rc = jinja_dict_find(run, self->dict, &v[0], &pair);
    if (rc) return rc;
    *out = pair ? pair->value : v[1].kind == JINJA_MISSING ? jinja_none() : v[1];
    return 0;
}

enum { KEYS = 1, VALUES = 2 };

static int view(struct jinja_run *run, const char *name, const char *label,
                const struct jinja_value *self, const struct jinja_args *args, int what,
                struct jinja_value *out) {
    const struct jinja_dict *dict = self->dict;
    struct jinja_value made, item;
    int rc = no_args(run, name, args);
    if (!rc) rc = jinja_list_open(run, JINJA_VIEW, dict->count, &made);
    for (uint32_t i = 0; i < dict->count && !rc; i++) {
        const struct jinja_pair *pair = &dict->pairs[i];
        item = what == KEYS ? pair->key : pair->value;
        if (what == (KEYS | VALUES)) rc = jinja_tuple2(run, &pair->key, &pair->value, &item);
        if (!rc) rc = jinja_list_add(run, made.list, &item);
    }
    if (rc) return rc;
    made.list->label = label;
    *out = made;
    return 0;
}

METHOD(dict, items) {
    return view(run, "items", "dict_items", self, args, KEYS | VALUES, out);
}

METHOD(dict, keys) {
    return view(run, "keys", "dict_keys", self, args, KEYS, out);
}

METHOD(dict, values) {
    return view(run, "values", "dict_values", self, args, VALUES, out);
}

static int merge(struct jinja_run *run, struct jinja_dict *to, const struct jinja_dict *from) {
    uint32_t count = from->count; /* `from` may be `to` */
    int rc = 0;
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = jinja_dict_set(run, to, &from->pairs[i].key, &from->pairs[i].value);
    return rc;
}

METHOD(dict, update) {
    int rc = 0;
    if (args->count > 1 || (args->count == 1 && args->items[0].kind != JINJA_DICT))
        return jinja_fail(run, ERR_INVALID, "update() takes a dict and named values");
    if (args->count) rc = merge(run, self->dict, args->items[0].dict);
    for (uint32_t i = 0; i < args->keyword_count && !rc; i++)
        rc = jinja_dict_set(run, self->dict, &args->keywords[i].name, &args->keywords[i].value);
    *out = jinja_none();
    return rc;
}

METHOD(dict, copy) {
    struct jinja_value made;
    int rc = no_args(run, "copy", args);
    if (!rc) rc = jinja_dict_open(run, JINJA_DICT, &made);
    if (!rc) rc = merge(run, made.dict, self->dict);
    if (!rc) *out = made;
    return rc;
}

METHOD(dict, pop) {
    static const char *const names[] = {"key", "default"};
    struct jinja_value v[2];
    struct jinja_pair *pair;
    int rc = jinja_bind(run, "pop", args, names, 2, 1, v);
    if (!rc) rc = jinja_dict_find(run, self->dict, &v[0], &pair);
    if (rc) return rc;
    if (!pair && v[1].kind == JINJA_MISSING)
        return jinja_fail(run, ERR_INVALID, "pop: the key is not in the dict");
    *out = pair ? pair->value : v[1];
    return pair ? jinja_dict_remove(run, self->dict, pair) : 0;
}

METHOD(dict, setdefault) {
    static const char *const names[] = {"key", "default"};
    struct jinja_value v[2];
    struct jinja_pair *pair;
    int rc = jinja_bind(run, "setdefault", args, names, 2, 1, v);
    if (!rc) rc = jinja_dict_find(run, self->dict, &v[0], &pair);
    if (rc) return rc;
    *out = pair ? pair->value : v[1].kind == JINJA_MISSING ? jinja_none() : v[1];
    return pair ? 0 : jinja_dict_set(run, self->dict, &v[0], out);
}

static const struct jinja_builtin dict_methods[] = {
    {"copy", dict_copy},     {"get", dict_get},       {"items", dict_items},
    {"keys", dict_keys},     {"pop", dict_pop},       {"setdefault", dict_setdefault},
    {"update", dict_update}, {"values", dict_values},
};

#define SEARCH(table, name) jinja_search(table, sizeof table / sizeof *table, name)

const struct jinja_builtin *jinja_find_method(const struct jinja_value *object,
                                              const struct jinja_value *name) {
    switch (object->kind) {
    case JINJA_STR:
        return jinja_search(jinja_str_methods, jinja_str_method_count, name);
    case JINJA_LIST:
        return SEARCH(list_methods, name);
    case JINJA_TUPLE:
    case JINJA_RANGE:
        return SEARCH(tuple_methods, name);
    case JINJA_DICT:
        return SEARCH(dict_methods, name);
    default:
        return NULL;
    }
}
