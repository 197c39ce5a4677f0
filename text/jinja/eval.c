/* The evaluator: expressions, statements and calls of a template's tree.
 *
 * It recurses over the tree; depth, steps and memory of a render are bounded (value.h), because the
 * template is a model's file and its data are a request's. Scopes follow Jinja: `set` inside a loop
 * or a macro does not reach out, a namespace does, and a macro sees only what was global. */
#include "text/jinja/eval.h"

#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/jinja/print.h"

struct jinja_macro {
    const struct jinja_macro_def *def;
    struct jinja_scope *scope;
};

/* Scopes */

int jinja_open_scope(struct jinja_run *run, struct jinja_scope *outer, struct jinja_scope **out) {
    *out = jinja_alloc(run, 1, sizeof **out);
    if (!*out) return jinja_fail_memory(run);
    (*out)->outer = outer;
    return 0;
}

static struct jinja_variable *find_variable(struct jinja_scope *scope,
                                            const struct jinja_name *name) {
    for (uint32_t i = 0; i < scope->count; i++)
        if (scope->items[i].name == name) return &scope->items[i];
    return NULL;
}

int jinja_set_variable(struct jinja_run *run, struct jinja_scope *scope,
                       const struct jinja_name *name, const struct jinja_value *value) {
    if (!scope->outer) {
        run->globals[name->id] = *value;
        return 0;
    }
    struct jinja_variable *variable = find_variable(scope, name);
    if (!variable && scope->count == scope->capacity) {
        uint32_t capacity = scope->capacity * 2 + 4;
        struct jinja_variable *items = jinja_alloc(run, capacity, sizeof *items);
        if (!items) return jinja_fail_memory(run);
        if (scope->count) memcpy(items, scope->items, scope->count * sizeof *items);
        scope->items = items;
        scope->capacity = capacity;
    }
    if (!variable) {
        variable = &scope->items[scope->count++];
        variable->name = name;
    }
    variable->value = *value;
    return 0;
}

static int eval_name(struct jinja_run *run, const struct jinja_name *name,
                     struct jinja_value *out) {
    for (struct jinja_scope *scope = run->scope; scope->outer; scope = scope->outer) {
        const struct jinja_variable *variable = find_variable(scope, name);
        if (variable) {
            *out = variable->value;
            return jinja_charge_bytes(run, scope->count);
        }
        int rc = jinja_charge_bytes(run, scope->count);
        if (rc) return rc;
    }
    *out = run->globals[name->id];
    if (out->kind == JINJA_MISSING) {
        *out = name->string;
        out->kind = JINJA_UNDEFINED;
    }
    return 0;
}

static int assign_attribute(struct jinja_run *run, const struct jinja_node *target,
                            const struct jinja_value *value) {
    struct jinja_value space;
    int rc = eval_name(run, target->name, &space);
    if (rc) return rc;
    if (space.kind != JINJA_NAMESPACE)
        return jinja_fail(run, ERR_INVALID, "cannot assign attribute on non-namespace object");
    return jinja_dict_set(run, space.dict, &target->value, value);
}

int jinja_assign(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *target,
                 const struct jinja_value *value) {
    if (target->kind == JINJA_NODE_NAME) return jinja_set_variable(run, scope, target->name, value);
    if (target->kind == JINJA_NODE_NSREF) return assign_attribute(run, target, value);
    struct jinja_list *list;
    if (value->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, value);
    if (!jinja_is_listlike(value) && value->kind != JINJA_STR && value->kind != JINJA_DICT)
        return jinja_fail(run, ERR_INVALID, "cannot unpack non-iterable %s object",
                          jinja_type_name(value));
    int rc = jinja_iterate(run, value, &list);
    if (rc) return rc;
    if (list->count < target->count)
        return jinja_fail(run, ERR_INVALID, "not enough values to unpack (expected %u, got %u)",
                          target->count, list->count);
    if (list->count > target->count)
        return jinja_fail(run, ERR_INVALID, "too many values to unpack (expected %u)",
                          target->count);
    for (uint32_t i = 0; i < target->count && !rc; i++)
        rc = jinja_assign(run, scope, target->items[i], &list->items[i]);
    return rc;
}

/* Output of a body as a string. */
static int capture(struct jinja_run *run, const struct jinja_node *body, struct jinja_value *out) {
    struct jinja_text *outside = run->out;
    int rc = jinja_text_open(run, 0, &run->out);
    if (!rc) rc = jinja_exec(run, body);
    if (!rc) *out = jinja_text_value(run->out);
    run->out = outside;
    return rc;
}

int jinja_exec_scoped(struct jinja_run *run, const struct jinja_node *body) {
    struct jinja_scope *outer = run->scope;
    int rc = jinja_open_scope(run, outer, &run->scope);
    if (!rc) rc = jinja_exec(run, body);
    run->scope = outer;
    return rc;
}

static int capture_scoped(struct jinja_run *run, const struct jinja_node *body,
                          struct jinja_value *out) {
    struct jinja_scope *outer = run->scope;
    int rc = jinja_open_scope(run, outer, &run->scope);
    if (!rc) rc = capture(run, body, out);
    run->scope = outer;
    return rc;
}

/* Macros and calls */

static int macro_extra_keyword(struct jinja_run *run, const struct jinja_macro_def *def,
                               const struct jinja_keyword *keyword, struct jinja_value *kwargs) {
    const struct jinja_value *name = &keyword->name;
    if (jinja_str_is(name, "caller") && def->uses_caller)
        return jinja_set_variable(run, run->scope, run->template->caller, &keyword->value);
    if (def->uses_kwargs) return jinja_dict_set(run, kwargs->dict, name, &keyword->value);
    return jinja_fail(run, ERR_INVALID, "macro '%s' takes no keyword argument '%.*s'",
                      def->name ? def->name->text : "caller",
                      name->size < 64 ? (int)name->size : 64, jinja_str_data(name));
}

/* caller, varargs, kwargs: only for macros that name them. */
static int macro_extras(struct jinja_run *run, const struct jinja_macro_def *def,
                        const struct jinja_args *args) {
    struct jinja_value varargs, kwargs, nobody;
    int rc = jinja_list_open(run, JINJA_TUPLE, 0, &varargs);
    if (!rc) rc = jinja_dict_open(run, JINJA_DICT, &kwargs);
    if (!rc) rc = jinja_undefined_hint(run, "No caller defined", &nobody);
    if (!rc && def->uses_caller)
        rc = jinja_set_variable(run, run->scope, run->template->caller, &nobody);
    if (!rc && args->count > def->count && !def->uses_varargs)
        rc = jinja_fail(run, ERR_INVALID, "macro '%s' takes not more than %u argument(s)",
                        def->name ? def->name->text : "caller", def->count);
    for (uint32_t i = def->count; i < args->count && !rc; i++)
        rc = jinja_list_add(run, varargs.list, &args->items[i]);
    for (uint32_t k = 0; k < args->keyword_count && !rc; k++) {
        bool known = false;
        for (uint32_t i = args->count; i < def->count; i++)
            known |= jinja_str_equal(&def->params[i]->string, &args->keywords[k].name);
        if (!known) rc = macro_extra_keyword(run, def, &args->keywords[k], &kwargs);
    }
    if (!rc && def->uses_varargs)
        rc = jinja_set_variable(run, run->scope, run->template->varargs, &varargs);
    if (!rc && def->uses_kwargs)
        rc = jinja_set_variable(run, run->scope, run->template->kwargs, &kwargs);
    return rc;
}

static int macro_param(struct jinja_run *run, const struct jinja_macro_def *def, uint32_t i,
                       const struct jinja_args *args, struct jinja_value *out) {
    if (i < args->count) {
        *out = args->items[i];
        return 0;
    }
    for (uint32_t k = 0; k < args->keyword_count; k++) {
        if (!jinja_str_equal(&def->params[i]->string, &args->keywords[k].name)) continue;
        *out = args->keywords[k].value;
        return 0;
    }
    if (def->defaults[i]) return jinja_eval(run, def->defaults[i], out);
    *out = def->params[i]->string;
    out->kind = JINJA_UNDEFINED;
    return 0;
}

static int call_macro(struct jinja_run *run, const struct jinja_macro *macro,
                      const struct jinja_args *args, struct jinja_value *out) {
    const struct jinja_macro_def *def = macro->def;
    struct jinja_scope *caller = run->scope;
    int rc = jinja_open_scope(run, macro->scope, &run->scope);
    if (!rc) rc = macro_extras(run, def, args);
    for (uint32_t i = 0; i < def->count && !rc; i++) {
        struct jinja_value value;
        rc = macro_param(run, def, i, args, &value);
        if (!rc) rc = jinja_set_variable(run, run->scope, def->params[i], &value);
    }
    if (!rc) rc = capture(run, def->body, out);
    run->scope = caller;
    return rc;
}

int jinja_macro_name(struct jinja_run *run, const struct jinja_value *macro,
                     struct jinja_value *out) {
    (void)run;
    const struct jinja_name *name = macro->macro->def->name;
    *out = name ? name->string : jinja_none();
    return 0;
}

int jinja_call_value(struct jinja_run *run, const struct jinja_value *callee,
                     const struct jinja_args *args, struct jinja_value *out) {
    if (callee->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, callee);
    int rc = jinja_enter(run);
    if (rc) return rc;
    struct jinja_value made = jinja_none();
    switch (callee->kind) {
    case JINJA_FUNCTION:
        rc = callee->function->builtin->call(run, &callee->function->self, args, &made);
        break;
    case JINJA_MACRO:
        rc = call_macro(run, callee->macro, args, &made);
        break;
    case JINJA_LOOP:
        rc = jinja_call_loop(run, callee->loop, args, &made);
        break;
    default:
        rc = jinja_fail(run, ERR_INVALID, "'%s' object is not callable", jinja_type_name(callee));
    }
    jinja_leave(run);
    if (!rc) *out = made;
    return rc;
}

static int eval_star(struct jinja_run *run, const struct jinja_node *node,
                     struct jinja_list *list) {
    struct jinja_value values;
    struct jinja_list *more;
    int rc = jinja_eval(run, node, &values);
    if (!rc) rc = jinja_iterate(run, &values, &more);
    for (uint32_t i = 0; !rc && i < more->count; i++)
        rc = jinja_list_add(run, list, &more->items[i]);
    return rc;
}

static int eval_keywords(struct jinja_run *run, const struct jinja_call *call, uint32_t spare,
                         struct jinja_args *args) {
    struct jinja_value extra = jinja_none();
    uint32_t extra_count = 0;
    int rc = call->star_star ? jinja_eval(run, call->star_star, &extra) : 0;
    if (rc) return rc;
    if (call->star_star && extra.kind != JINJA_DICT)
        return jinja_fail(run, ERR_INVALID, "argument after ** must be a mapping, not %s",
                          jinja_type_name(&extra));
    if (call->star_star) extra_count = extra.dict->count;
    size_t count = (size_t)call->keyword_count + extra_count + spare;
    args->keywords = count ? jinja_alloc(run, count, sizeof *args->keywords) : NULL;
    if (count && !args->keywords) return jinja_fail_memory(run);
    for (uint32_t i = 0; i < call->keyword_count && !rc; i++) {
        args->keywords[i].name = call->keywords[i].name;
        rc = jinja_eval(run, call->keywords[i].value, &args->keywords[i].value);
    }
    args->keyword_count = call->keyword_count;
    for (uint32_t i = 0; i < extra_count && !rc; i++) {
        const struct jinja_pair *pair = &extra.dict->pairs[i];
        if (!jinja_is_str(&pair->key))
            return jinja_fail(run, ERR_INVALID, "keywords must be strings");
        args->keywords[args->keyword_count++] = (struct jinja_keyword){pair->key, pair->value};
        rc = jinja_charge(run, 1);
    }
    return rc;
}

/* `spare`: room for keywords the caller adds. */
static int eval_args(struct jinja_run *run, const struct jinja_call *call, uint32_t spare,
                     struct jinja_args *args) {
    static const struct jinja_call nothing;
    struct jinja_value list;
    if (!call) call = &nothing;
    *args = (struct jinja_args){0};
    int rc = jinja_list_open(run, JINJA_LIST, call->count, &list);
    for (uint32_t i = 0; i < call->count && !rc; i++) {
        struct jinja_value value;
        rc = jinja_eval(run, call->items[i], &value);
        if (!rc) rc = jinja_list_add(run, list.list, &value);
    }
    if (!rc && call->star) rc = eval_star(run, call->star, list.list);
    if (!rc) rc = eval_keywords(run, call, spare, args);
    if (rc) return rc;
    args->items = list.list->items;
    args->count = list.list->count;
    return 0;
}

static int eval_call(struct jinja_run *run, const struct jinja_node *node,
                     const struct jinja_value *caller, struct jinja_value *out) {
    struct jinja_value callee;
    struct jinja_args args;
    int rc = jinja_eval(run, node->a, &callee);
    if (!rc) rc = eval_args(run, node->call, caller ? 1 : 0, &args);
    if (rc) return rc;
    if (caller)
        args.keywords[args.keyword_count++] =
            (struct jinja_keyword){run->template->caller->string, *caller};
    run->line = node->line;
    return jinja_call_value(run, &callee, &args, out);
}

static int eval_builtin(struct jinja_run *run, const struct jinja_node *node,
                        struct jinja_value *out) {
    struct jinja_value self;
    struct jinja_args args = {0};
    int rc = 0;
    if (node->a)
        rc = jinja_eval(run, node->a, &self);
    else
        self = *run->piped;
    if (!rc && node->call) rc = eval_args(run, node->call, 0, &args);
    if (rc) return rc;
    run->line = node->line;
    if (!node->builtin)
        return jinja_fail(run, ERR_INVALID, "No %s named '%s'.",
                          node->kind == JINJA_NODE_FILTER ? "filter" : "test", node->name->text);
    struct jinja_value made = jinja_none();
    rc = node->builtin->call(run, &self, &args, &made);
    if (!rc) *out = made;
    return rc;
}

/* Expressions */

static int eval_items(struct jinja_run *run, const struct jinja_node *node, enum jinja_kind kind,
                      struct jinja_value *out) {
    struct jinja_value list;
    int rc = jinja_list_open(run, kind, node->count, &list);
    for (uint32_t i = 0; i < node->count && !rc; i++) {
        struct jinja_value item;
        rc = jinja_eval(run, node->items[i], &item);
        if (!rc) rc = jinja_list_add(run, list.list, &item);
    }
    if (!rc) *out = list;
    return rc;
}

static int eval_dict(struct jinja_run *run, const struct jinja_node *node,
                     struct jinja_value *out) {
    struct jinja_value dict;
    int rc = jinja_dict_open(run, JINJA_DICT, &dict);
    for (uint32_t i = 0; i + 1 < node->count && !rc; i += 2) {
        struct jinja_value key, value;
        rc = jinja_eval(run, node->items[i], &key);
        if (!rc) rc = jinja_eval(run, node->items[i + 1], &value);
        if (!rc) rc = jinja_dict_set(run, dict.dict, &key, &value);
    }
    if (!rc) *out = dict;
    return rc;
}

static int eval_cond(struct jinja_run *run, const struct jinja_node *node,
                     struct jinja_value *out) {
    struct jinja_value test;
    int rc = jinja_eval(run, node->b, &test);
    if (rc) return rc;
    if (jinja_truth(&test)) return jinja_eval(run, node->a, out);
    if (node->c) return jinja_eval(run, node->c, out);
    return jinja_undefined_hint(run,
                                "the inline if-expression evaluated to false and no else section "
                                "was defined.",
                                out);
}

static int eval_logic(struct jinja_run *run, const struct jinja_node *node,
                      struct jinja_value *out) {
    int rc = jinja_eval(run, node->a, out);
    if (rc || jinja_truth(out) == (node->kind == JINJA_NODE_OR)) return rc;
    return jinja_eval(run, node->b, out);
}

static int eval_compare(struct jinja_run *run, const struct jinja_node *node,
                        struct jinja_value *out) {
    struct jinja_value left, right;
    bool holds = true;
    int rc = jinja_eval(run, node->a, &left);
    for (uint32_t i = 0; i < node->count && holds && !rc; i++) {
        rc = jinja_eval(run, node->items[i], &right);
        if (!rc) rc = jinja_compare(run, node->ops[i], &left, &right, &holds);
        left = right;
    }
    *out = jinja_bool(holds);
    return rc;
}

static int eval_binary(struct jinja_run *run, const struct jinja_node *node,
                       struct jinja_value *out) {
    struct jinja_value left, right;
    int rc = jinja_eval(run, node->a, &left);
    if (!rc) rc = jinja_eval(run, node->b, &right);
    return rc ? rc : jinja_binary(run, node->op, &left, &right, out);
}

static int eval_concat(struct jinja_run *run, const struct jinja_node *node,
                       struct jinja_value *out) {
    struct jinja_value whole = jinja_str_empty(), item;
    int rc = 0;
    for (uint32_t i = 0; i < node->count && !rc; i++) {
        rc = jinja_eval(run, node->items[i], &item);
        if (!rc) rc = jinja_to_str(run, &item, &item);
        if (!rc) rc = jinja_str_concat(run, &whole, &item, &whole);
    }
    whole.flags = 0;
    *out = whole;
    return rc;
}

static int eval_unary(struct jinja_run *run, const struct jinja_node *node,
                      struct jinja_value *out) {
    struct jinja_value operand;
    int rc = jinja_eval(run, node->a, &operand);
    if (rc) return rc;
    if (node->kind == JINJA_NODE_NOT) {
        *out = jinja_bool(!jinja_truth(&operand));
        return 0;
    }
    return jinja_negate(run, &operand, node->kind == JINJA_NODE_NEGATE, out);
}

static int eval_access(struct jinja_run *run, const struct jinja_node *node,
                       struct jinja_value *out) {
    struct jinja_value object, key;
    int rc = jinja_eval(run, node->a, &object);
    if (rc) return rc;
    if (node->kind == JINJA_NODE_GETATTR) {
        run->line = node->line;
        return jinja_getattr(run, &object, &node->name->string, out);
    }
    rc = jinja_eval(run, node->b, &key);
    run->line = node->line;
    return rc ? rc : jinja_getitem(run, &object, &key, out);
}

static int eval_slice(struct jinja_run *run, const struct jinja_node *node,
                      struct jinja_value *out) {
    struct jinja_value object, parts[3] = {0};
    int rc = jinja_eval(run, node->a, &object);
    for (int i = 0; i < 3 && !rc; i++)
        if (node->items[i]) rc = jinja_eval(run, node->items[i], &parts[i]);
    return rc ? rc : jinja_slice(run, &object, parts, out);
}

static int eval_node(struct jinja_run *run, const struct jinja_node *node,
                     struct jinja_value *out) {
    switch ((enum jinja_node_kind)node->kind) {
    case JINJA_NODE_CONST:
        *out = node->value;
        return 0;
    case JINJA_NODE_NAME:
        return eval_name(run, node->name, out);
    case JINJA_NODE_LIST:
        return eval_items(run, node, JINJA_LIST, out);
    case JINJA_NODE_TUPLE:
        return eval_items(run, node, JINJA_TUPLE, out);
    case JINJA_NODE_DICT:
        return eval_dict(run, node, out);
    case JINJA_NODE_COND:
        return eval_cond(run, node, out);
    case JINJA_NODE_OR:
    case JINJA_NODE_AND:
        return eval_logic(run, node, out);
    case JINJA_NODE_COMPARE:
        return eval_compare(run, node, out);
    case JINJA_NODE_BINARY:
        return eval_binary(run, node, out);
    case JINJA_NODE_CONCAT:
        return eval_concat(run, node, out);
    case JINJA_NODE_NOT:
    case JINJA_NODE_NEGATE:
    case JINJA_NODE_PLUS:
        return eval_unary(run, node, out);
    case JINJA_NODE_GETATTR:
    case JINJA_NODE_GETITEM:
        return eval_access(run, node, out);
    case JINJA_NODE_SLICE:
        return eval_slice(run, node, out);
    case JINJA_NODE_CALL:
        return eval_call(run, node, NULL, out);
    case JINJA_NODE_FILTER:
    case JINJA_NODE_TEST:
        return eval_builtin(run, node, out);
    default:
        return jinja_fail(run, ERR_INTERNAL, "not an expression");
    }
}

int jinja_eval(struct jinja_run *run, const struct jinja_node *node, struct jinja_value *out) {
    int rc = jinja_enter(run);
    if (rc) return rc;
    run->line = node->line;
    rc = eval_node(run, node, out);
    jinja_leave(run);
    return rc;
}

/* Statements */

static int exec_block(struct jinja_run *run, const struct jinja_node *node) {
    int rc = 0;
    for (uint32_t i = 0; i < node->count && !rc; i++) rc = jinja_exec(run, node->items[i]);
    return rc;
}

static int exec_print(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value value;
    int rc = jinja_eval(run, node->a, &value);
    return rc ? rc : jinja_print(run, run->out, &value);
}

static int exec_if(struct jinja_run *run, const struct jinja_node *node) {
    uint32_t i = 0;
    for (; i + 1 < node->count; i += 2) {
        struct jinja_value test;
        int rc = jinja_eval(run, node->items[i], &test);
        if (rc) return rc;
        if (jinja_truth(&test)) return jinja_exec(run, node->items[i + 1]);
    }
    return i < node->count ? jinja_exec(run, node->items[i]) : 0;
}

static int exec_set(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value value;
    int rc = jinja_eval(run, node->b, &value);
    return rc ? rc : jinja_assign(run, run->scope, node->a, &value);
}

/* A captured body through the filters that were written around it. */
static int apply_filters(struct jinja_run *run, const struct jinja_node *filter,
                         struct jinja_value *value) {
    const struct jinja_value *outside = run->piped;
    struct jinja_value body = *value;
    if (!filter) return 0;
    run->piped = &body;
    int rc = jinja_eval(run, filter, value);
    run->piped = outside;
    return rc;
}

static int exec_set_block(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value value;
    int rc = capture_scoped(run, node->body, &value);
    if (!rc) rc = apply_filters(run, node->b, &value);
    return rc ? rc : jinja_assign(run, run->scope, node->a, &value);
}

static int exec_filter_block(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value value;
    int rc = capture_scoped(run, node->body, &value);
    if (!rc) rc = apply_filters(run, node->a, &value);
    return rc ? rc : jinja_print(run, run->out, &value);
}

static int exec_with(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_scope *outer = run->scope, *inner;
    int rc = jinja_open_scope(run, outer, &inner);
    for (uint32_t i = 0; i + 1 < node->count && !rc; i += 2) {
        struct jinja_value value;
        rc = jinja_eval(run, node->items[i + 1], &value);
        if (!rc) rc = jinja_assign(run, inner, node->items[i], &value);
    }
    if (rc) return rc;
    run->scope = inner;
    rc = jinja_exec(run, node->body);
    run->scope = outer;
    return rc;
}

static int make_macro(struct jinja_run *run, const struct jinja_macro_def *def,
                      struct jinja_value *out) {
    struct jinja_macro *macro = jinja_alloc(run, 1, sizeof *macro);
    if (!macro) return jinja_fail_memory(run);
    *macro = (struct jinja_macro){def, run->scope};
    *out = (struct jinja_value){.kind = JINJA_MACRO, .macro = macro};
    return 0;
}

static int exec_macro(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value macro;
    int rc = make_macro(run, node->macro, &macro);
    return rc ? rc : jinja_set_variable(run, run->scope, node->macro->name, &macro);
}

static int exec_call_block(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value caller, value;
    int rc = make_macro(run, node->macro, &caller);
    if (!rc) rc = eval_call(run, node->a, &caller, &value);
    return rc ? rc : jinja_print(run, run->out, &value);
}

static int exec_generation(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_scope *outer = run->scope;
    int rc = jinja_open_scope(run, outer, &run->scope);
    if (!rc) rc = exec_block(run, node);
    run->scope = outer;
    return rc;
}

static int exec_node(struct jinja_run *run, const struct jinja_node *node) {
    switch ((enum jinja_node_kind)node->kind) {
    case JINJA_NODE_TEXT:
        return jinja_text_add_str(run, run->out, &node->value);
    case JINJA_NODE_PRINT:
        return exec_print(run, node);
    case JINJA_NODE_BLOCK:
        return exec_block(run, node);
    case JINJA_NODE_SCOPE:
        return exec_generation(run, node);
    case JINJA_NODE_IF:
        return exec_if(run, node);
    case JINJA_NODE_FOR:
        return jinja_exec_for(run, node);
    case JINJA_NODE_SET:
        return exec_set(run, node);
    case JINJA_NODE_SET_BLOCK:
        return exec_set_block(run, node);
    case JINJA_NODE_WITH:
        return exec_with(run, node);
    case JINJA_NODE_MACRO:
        return exec_macro(run, node);
    case JINJA_NODE_CALL_BLOCK:
        return exec_call_block(run, node);
    case JINJA_NODE_FILTER_BLOCK:
        return exec_filter_block(run, node);
    case JINJA_NODE_BREAK:
        return JINJA_FLOW_BREAK;
    case JINJA_NODE_CONTINUE:
        return JINJA_FLOW_CONTINUE;
    default:
        return jinja_fail(run, ERR_INTERNAL, "not a statement");
    }
}

int jinja_exec(struct jinja_run *run, const struct jinja_node *node) {
    int rc = jinja_enter(run);
    if (rc) return rc;
    run->line = node->line;
    rc = exec_node(run, node);
    jinja_leave(run);
    return rc;
}

int jinja_execute(struct jinja_run *run) {
    struct jinja_scope top = {0};
    run->scope = &top;
    int rc = jinja_exec(run, run->template->body);
    run->scope = NULL;
    return rc;
}
