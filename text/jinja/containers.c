/* Methods of list, tuple and dict.
 *
 * transformers renders templates in Jinja's ImmutableSandboxedEnvironment: a method that would
 * change a list or a dict is there by name, but is an undefined value whose use fails. Templates
 * build lists with `+` and keep state in namespaces. */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"

#define METHOD(type, name)                                                                         \
    static int type##_##name(struct jinja_run *run, const struct jinja_value *self,                \
                             const struct jinja_args *args, struct jinja_value *out)

static int containers_bind_one(struct jinja_run *run, const char *name,
                               const struct jinja_args *args, struct jinja_value *value) {
    static const char *const names[] = {"object"};
    return jinja_bind(run, name, args, names, 1, 1, value);
}

static int containers_find_item(struct jinja_run *run, const struct jinja_list *list,
                                const struct jinja_value *item, uint32_t from, uint32_t *out) {
    bool found = false;
    int rc = 0;
    for (*out = from; *out < list->count; ++*out) {
        rc = jinja_equal(run, &list->items[*out], item, &found);
        if (rc || found) break;
    }
    return rc;
}

METHOD(list, copy) {
    int rc = jinja_no_args(run, "copy", args);
    return rc ? rc : jinja_to_list(run, self, JINJA_LIST, out);
}

METHOD(list, index) {
    struct jinja_value item;
    uint32_t at = 0;
    int rc = containers_bind_one(run, "index", args, &item);
    if (!rc) rc = containers_find_item(run, self->list, &item, 0, &at);
    if (!rc && at == self->list->count)
        rc = jinja_fail(run, ERR_INVALID, "the value is not in the %s", jinja_type_name(self));
    *out = jinja_int(at);
    return rc;
}

METHOD(list, count) {
    struct jinja_value item;
    int64_t found = 0;
    uint32_t at = 0;
    int rc = containers_bind_one(run, "count", args, &item);
    while (!rc) {
        rc = containers_find_item(run, self->list, &item, at, &at);
        if (rc || at == self->list->count) break;
        found++;
        at++;
    }
    *out = jinja_int(found);
    return rc;
}

static const struct jinja_builtin list_methods[] = {
    {"copy", list_copy},
    {"count", list_count},
    {"index", list_index},
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
    int rc = jinja_no_args(run, name, args);
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

static int containers_merge(struct jinja_run *run, struct jinja_dict *to,
                            const struct jinja_dict *from) {
    uint32_t count = from->count; /* `from` may be `to` */
    int rc = 0;
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = jinja_dict_set(run, to, &from->pairs[i].key, &from->pairs[i].value);
    return rc;
}

METHOD(dict, copy) {
    struct jinja_value made;
    int rc = jinja_no_args(run, "copy", args);
    if (!rc) rc = jinja_dict_open(run, JINJA_DICT, &made);
    if (!rc) rc = containers_merge(run, made.dict, self->dict);
    if (!rc) *out = made;
    return rc;
}

static const struct jinja_builtin dict_methods[] = {
    {"copy", dict_copy}, {"get", dict_get},       {"items", dict_items},
    {"keys", dict_keys}, {"values", dict_values},
};

bool jinja_is_mutator(const struct jinja_value *object, const struct jinja_value *name) {
    static const char *const lists[] = {"append", "clear",  "extend",  "insert",
                                        "pop",    "remove", "reverse", "sort"};
    static const char *const dicts[] = {"clear", "pop", "popitem", "setdefault", "update"};
    if (object->kind == JINJA_LIST)
        for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
            if (jinja_str_is(name, lists[i])) return true;
    if (object->kind == JINJA_DICT)
        for (size_t i = 0; i < sizeof dicts / sizeof *dicts; i++)
            if (jinja_str_is(name, dicts[i])) return true;
    return false;
}

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
