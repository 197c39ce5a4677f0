/* Global functions, and look-up by name.
 *
 * joiner and cycler make objects with state: a function value whose `self` is a list, which the
 * template itself cannot reach. */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/format.h"
#include "text/jinja/ops.h"

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

static int make_function(struct jinja_run *run, const struct jinja_builtin *builtin,
                         const struct jinja_value *self, struct jinja_value *out) {
    struct jinja_function *function = jinja_alloc(run, 1, sizeof *function);
    if (!function) return jinja_fail_memory(run);
    *function = (struct jinja_function){builtin, *self};
    *out = (struct jinja_value){.kind = JINJA_FUNCTION, .function = function};
    return 0;
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
    return rc ? rc : make_function(run, &joiner, &state, out);
}

/* cycler(items...): `self` is their list, whose `used` is the position. */
static int call_next(struct jinja_run *run, const struct jinja_value *self,
                     const struct jinja_args *args, struct jinja_value *out) {
    struct jinja_list *items = self->list;
    int rc = jinja_bind(run, "next", args, NULL, 0, 0, NULL);
    if (rc) return rc;
    *out = items->items[items->used];
    items->used = (items->used + 1) % items->count;
    return 0;
}

static int call_reset(struct jinja_run *run, const struct jinja_value *self,
                      const struct jinja_args *args, struct jinja_value *out) {
    int rc = jinja_bind(run, "reset", args, NULL, 0, 0, NULL);
    if (!rc) self->list->used = 0;
    *out = jinja_none();
    return rc;
}

static int call_cycler(struct jinja_run *run, const struct jinja_value *self,
                       const struct jinja_args *args, struct jinja_value *out) {
    (void)self;
    (void)args;
    (void)out;
    return jinja_fail(run, ERR_INVALID, "'Cycler' object is not callable");
}

static const struct jinja_builtin cycler = {"cycler", call_cycler};

int jinja_cycler_attribute(struct jinja_run *run, const struct jinja_value *object,
                           const struct jinja_value *name, struct jinja_value *out) {
    static const struct jinja_builtin next = {"next", call_next}, reset = {"reset", call_reset};
    *out = (struct jinja_value){.kind = JINJA_MISSING};
    if (object->function->builtin != &cycler) return 0;
    const struct jinja_value *self = &object->function->self;
    if (jinja_str_is(name, "next")) return make_function(run, &next, self, out);
    if (jinja_str_is(name, "reset")) return make_function(run, &reset, self, out);
    if (jinja_str_is(name, "current")) *out = self->list->items[self->list->used];
    if (jinja_str_is(name, "pos")) *out = jinja_int(self->list->used);
    return 0;
}

static int global_cycler(struct jinja_run *run, const struct jinja_value *self,
                         const struct jinja_args *args, struct jinja_value *out) {
    struct jinja_value items;
    (void)self;
    if (args->keyword_count)
        return jinja_fail(run, ERR_INVALID, "cycler() takes no named arguments");
    if (!args->count) return jinja_fail(run, ERR_INVALID, "at least one item has to be provided");
    int rc = jinja_list_open(run, JINJA_LIST, args->count, &items);
    for (uint32_t i = 0; i < args->count && !rc; i++)
        rc = jinja_list_add(run, items.list, &args->items[i]);
    return rc ? rc : make_function(run, &cycler, &items, out);
}

static const struct jinja_builtin globals[] = {
    {"cycler", global_cycler},
    {"dict", global_dict},
    {"joiner", global_joiner},
    {"namespace", global_namespace},
    {"raise_exception", global_raise_exception},
    {"range", global_range},
    {"strftime_now", global_strftime_now},
};

const struct jinja_builtin *jinja_search(const struct jinja_builtin *table, size_t count,
                                         const struct jinja_value *name) {
    for (size_t i = 0; i < count; i++)
        if (jinja_str_is(name, table[i].name)) return &table[i];
    return NULL;
}

const struct jinja_builtin *jinja_find_global(const struct jinja_value *name) {
    return jinja_search(globals, sizeof globals / sizeof *globals, name);
}

const struct jinja_builtin *jinja_find_filter(const struct jinja_value *name) {
    const struct jinja_builtin *found =
        jinja_search(jinja_text_filters, jinja_text_filter_count, name);
    return found ? found : jinja_search(jinja_sequence_filters, jinja_sequence_filter_count, name);
}
