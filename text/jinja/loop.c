/* `for` loops and the `loop` variable.
 *
 * A loop with a test, or one whose `loop.nextitem`, `loop.last` or `loop.length` is read, has to
 * look ahead. Only as much is fetched as is asked for, because the test may fail on a later item
 * and Python's generator would not have reached it. */
#include "text/jinja/builtins.h"
#include "text/jinja/eval.h"
#include "text/jinja/ops.h"

struct jinja_loop {
    const struct jinja_node *node;
    struct jinja_scope *outer; /* the scope around the loop */
    struct jinja_list *source;
    uint32_t next; /* in source */
    bool filtered; /* items from `next` on have still to pass the loop's test */
    bool has_ahead;
    struct jinja_value before, current, ahead;
    struct jinja_value changed;
    int64_t index; /* position of `current`, from 0 */
    int64_t depth;
};

static int passes(struct jinja_run *run, struct jinja_loop *loop, const struct jinja_value *item,
                  bool *out) {
    struct jinja_scope *inside = run->scope;
    struct jinja_value verdict;
    *out = true;
    if (!loop->filtered) return 0;
    /* A scope of its own: looking ahead must not change the body's variables. */
    int rc = jinja_open_scope(run, loop->outer, &run->scope);
    if (!rc) rc = jinja_assign(run, run->scope, loop->node->a, item);
    if (!rc) rc = jinja_eval(run, loop->node->c, &verdict);
    run->scope = inside;
    if (!rc) *out = jinja_truth(&verdict);
    return rc;
}

/* *out MISSING at the end. */
static int loop_fetch(struct jinja_run *run, struct jinja_loop *loop, struct jinja_value *out) {
    *out = (struct jinja_value){.kind = JINJA_MISSING};
    while (loop->next < loop->source->count) {
        struct jinja_value item = loop->source->items[loop->next++];
        bool good;
        int rc = jinja_charge(run, 1);
        if (!rc) rc = passes(run, loop, &item, &good);
        if (rc) return rc;
        if (!good) continue;
        *out = item;
        return 0;
    }
    return 0;
}

static int look_ahead(struct jinja_run *run, struct jinja_loop *loop) {
    if (loop->has_ahead) return 0;
    int rc = loop_fetch(run, loop, &loop->ahead);
    loop->has_ahead = !rc;
    return rc;
}

static int step_loop(struct jinja_run *run, struct jinja_loop *loop, bool *more) {
    struct jinja_value item;
    int rc = look_ahead(run, loop);
    if (rc) return rc;
    item = loop->ahead;
    loop->has_ahead = item.kind == JINJA_MISSING; /* the end stays the end */
    *more = !loop->has_ahead;
    if (!*more) return 0;
    loop->before = loop->current;
    loop->current = item;
    loop->index++;
    return 0;
}

/* Items still to come that pass the test are collected, as Python does for a generator. */
static int settle_filter(struct jinja_run *run, struct jinja_loop *loop) {
    if (!loop->filtered) return 0;
    struct jinja_value rest, item;
    int rc = jinja_list_open(run, JINJA_LIST, 0, &rest);
    while (!rc) {
        rc = loop_fetch(run, loop, &item);
        if (rc || item.kind == JINJA_MISSING) break;
        rc = jinja_list_add(run, rest.list, &item);
    }
    if (rc) return rc;
    loop->source = rest.list;
    loop->next = 0;
    loop->filtered = false;
    return 0;
}

int jinja_loop_length(struct jinja_run *run, struct jinja_loop *loop, int64_t *out) {
    int rc = settle_filter(run, loop);
    if (rc) return rc;
    bool ahead = loop->has_ahead && loop->ahead.kind != JINJA_MISSING;
    *out = loop->index + 1 + ahead + (loop->source->count - loop->next);
    return 0;
}

static int loop_neighbour(struct jinja_run *run, struct jinja_loop *loop, bool next,
                          struct jinja_value *out) {
    int rc = next ? look_ahead(run, loop) : 0;
    if (rc) return rc;
    *out = next ? loop->ahead : loop->before;
    if (out->kind != JINJA_MISSING) return 0;
    return jinja_undefined_hint(run, next ? "there is no next item" : "there is no previous item",
                                out);
}

static int call_cycle(struct jinja_run *run, const struct jinja_value *self,
                      const struct jinja_args *args, struct jinja_value *out) {
    if (!args->count) return jinja_fail(run, ERR_INVALID, "no items for cycling given");
    *out = args->items[(uint64_t)self->loop->index % args->count];
    return 0;
}

static int call_changed(struct jinja_run *run, const struct jinja_value *self,
                        const struct jinja_args *args, struct jinja_value *out) {
    struct jinja_value now;
    bool same = false;
    int rc = jinja_list_open(run, JINJA_TUPLE, args->count, &now);
    for (uint32_t i = 0; i < args->count && !rc; i++)
        rc = jinja_list_add(run, now.list, &args->items[i]);
    if (!rc) rc = jinja_equal(run, &self->loop->changed, &now, &same);
    if (rc) return rc;
    self->loop->changed = now;
    *out = jinja_bool(!same);
    return 0;
}

static int bind_loop_method(struct jinja_run *run, struct jinja_loop *loop,
                            const struct jinja_builtin *method, struct jinja_value *out) {
    struct jinja_function *function = jinja_alloc(run, 1, sizeof *function);
    if (!function) return jinja_fail_memory(run);
    function->builtin = method;
    function->self = (struct jinja_value){.kind = JINJA_LOOP, .loop = loop};
    *out = (struct jinja_value){.kind = JINJA_FUNCTION, .function = function};
    return 0;
}

int jinja_loop_attribute(struct jinja_run *run, struct jinja_loop *loop,
                         const struct jinja_value *name, struct jinja_value *out) {
    static const struct jinja_builtin cycle = {"cycle", call_cycle};
    static const struct jinja_builtin changed = {"changed", call_changed};
    int64_t length = 0;
    int rc = 0;
    *out = (struct jinja_value){.kind = JINJA_MISSING};
    if (jinja_str_is(name, "index"))
        *out = jinja_int(loop->index + 1);
    else if (jinja_str_is(name, "index0"))
        *out = jinja_int(loop->index);
    else if (jinja_str_is(name, "first"))
        *out = jinja_bool(loop->index == 0);
    else if (jinja_str_is(name, "depth"))
        *out = jinja_int(loop->depth + 1);
    else if (jinja_str_is(name, "depth0"))
        *out = jinja_int(loop->depth);
    else if (jinja_str_is(name, "previtem"))
        return loop_neighbour(run, loop, false, out);
    else if (jinja_str_is(name, "nextitem"))
        return loop_neighbour(run, loop, true, out);
    else if (jinja_str_is(name, "cycle"))
        return bind_loop_method(run, loop, &cycle, out);
    else if (jinja_str_is(name, "changed"))
        return bind_loop_method(run, loop, &changed, out);
    else if (jinja_str_is(name, "last")) {
        rc = look_ahead(run, loop);
        *out = jinja_bool(loop->ahead.kind == JINJA_MISSING);
    } else if (jinja_str_is(name, "length") || jinja_str_is(name, "revindex") ||
               jinja_str_is(name, "revindex0")) {
        rc = jinja_loop_length(run, loop, &length);
        int64_t passed = jinja_str_is(name, "length")     ? 0
                         : jinja_str_is(name, "revindex") ? loop->index
                                                          : loop->index + 1;
        *out = jinja_int(length - passed);
    }
    return rc;
}

static int exec_iteration(struct jinja_run *run, const struct jinja_node *node,
                          struct jinja_loop *loop) {
    struct jinja_value handle = {.kind = JINJA_LOOP, .loop = loop};
    run->scope->count = 0; /* variables of the last iteration do not leak into this one */
    int rc = jinja_set_variable(run, run->scope, run->template->loop, &handle);
    if (!rc) rc = jinja_assign(run, run->scope, node->a, &loop->current);
    return rc ? rc : jinja_exec(run, node->body);
}

/* As Jinja's compiled loops, the else part runs when no iteration came to its end: also when each
 * of them ended by break or continue. A break in that part is one of the loop around. */
static int run_loop(struct jinja_run *run, const struct jinja_node *node,
                    const struct jinja_value *iterable, struct jinja_scope *outer, int64_t depth) {
    struct jinja_scope *caller = run->scope;
    struct jinja_loop *loop = jinja_alloc(run, 1, sizeof *loop);
    if (!loop) return jinja_fail_memory(run);
    *loop = (struct jinja_loop){
        .node = node, .outer = outer, .filtered = node->c, .index = -1, .depth = depth};
    bool more = true, completed = false;
    int rc = jinja_iterate(run, iterable, &loop->source);
    if (!rc) rc = jinja_open_scope(run, outer, &run->scope);
    while (!rc) {
        rc = step_loop(run, loop, &more);
        if (rc || !more) break;
        rc = exec_iteration(run, node, loop);
        completed |= rc == 0;
        if (rc == JINJA_FLOW_CONTINUE) rc = 0;
    }
    if (rc == JINJA_FLOW_BREAK) rc = 0;
    run->scope = outer;
    if (!rc && !completed && node->items[0]) rc = jinja_exec_scoped(run, node->items[0]);
    run->scope = caller;
    return rc;
}

int jinja_exec_for(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value iterable;
    int rc = jinja_eval(run, node->b, &iterable);
    return rc ? rc : run_loop(run, node, &iterable, run->scope, 0);
}

/* loop(items) inside a recursive loop. */
int jinja_call_loop(struct jinja_run *run, struct jinja_loop *loop, const struct jinja_args *args,
                    struct jinja_value *out) {
    if (!loop->node->recursive)
        return jinja_fail(run, ERR_INVALID,
                          "The loop must have the 'recursive' marker to be called recursively.");
    if (args->count != 1 || args->keyword_count)
        return jinja_fail(run, ERR_INVALID, "loop() takes one argument");
    struct jinja_text *outside = run->out;
    int rc = jinja_text_open(run, 0, &run->out);
    if (!rc) rc = run_loop(run, loop->node, &args->items[0], loop->outer, loop->depth + 1);
    if (!rc) *out = jinja_text_value(run->out);
    run->out = outside;
    return rc;
}
