/* The parser's expressions, in Jinja's order of binding.
 *
 * Each level of binding is a function that parses the next tighter level and then its own
 * operators. Depth is counted (jinja_parse_enter), so that nested brackets cannot use up the stack.
 */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/parse.h"

static int parse_unary(struct jinja_parser *p, bool filters, struct jinja_node **out);

static int finish_list(struct jinja_node *node, const struct jinja_node_list *list) {
    node->items = list->items;
    node->count = list->count;
    return 0;
}

/* The special variables of a macro exist when its body, or one inside it, names them. */
static void note_macro_name(struct jinja_parser *p, const struct jinja_name *name) {
    const struct jinja_template *t = p->template;
    for (struct jinja_parser_macro *m = p->macro; m; m = m->outer) {
        m->def->uses_caller |= name == t->caller;
        m->def->uses_varargs |= name == t->varargs;
        m->def->uses_kwargs |= name == t->kwargs;
    }
}

static int parse_constant_word(struct jinja_parser *p, struct jinja_value value,
                               struct jinja_node **out) {
    int rc = jinja_new_node(p, JINJA_NODE_CONST, out);
    if (!rc) (*out)->value = value;
    jinja_next(p);
    return rc;
}

static int parse_name(struct jinja_parser *p, bool namespaces, struct jinja_node **out) {
    if (jinja_peek_word(p, 0, "true") || jinja_peek_word(p, 0, "True"))
        return parse_constant_word(p, jinja_bool(true), out);
    if (jinja_peek_word(p, 0, "false") || jinja_peek_word(p, 0, "False"))
        return parse_constant_word(p, jinja_bool(false), out);
    if (jinja_peek_word(p, 0, "none") || jinja_peek_word(p, 0, "None"))
        return parse_constant_word(p, jinja_none(), out);
    const struct jinja_name *name;
    int rc = jinja_new_node(p, JINJA_NODE_NAME, out);
    if (!rc) rc = jinja_expect_name(p, &name);
    if (rc) return rc;
    (*out)->name = name;
    note_macro_name(p, name);
    if (!namespaces || !jinja_skip_kind(p, JINJA_TOKEN_DOT)) return 0;
    const struct jinja_name *attribute;
    (*out)->kind = JINJA_NODE_NSREF;
    rc = jinja_expect_name(p, &attribute);
    if (!rc) (*out)->value = attribute->string;
    return rc;
}

/* Strings next to each other are one. */
static int parse_string(struct jinja_parser *p, struct jinja_node **out) {
    uint32_t first = p->at, size = 0;
    while (jinja_peek_kind(p, JINJA_TOKEN_STRING)) size += jinja_next(p)->size;
    char *data = jinja_parse_alloc(p, size + 1ul, 1);
    if (!data) return jinja_parse_memory(p);
    uint32_t at = 0;
    for (uint32_t i = first; i < p->at; i++) {
        const struct jinja_token *token = &p->tokens.items[i];
        if (token->size) memcpy(data + at, token->text, token->size);
        at += token->size;
    }
    int rc = jinja_new_node(p, JINJA_NODE_CONST, out);
    return rc ? rc : jinja_constant(p, data, size, &(*out)->value);
}

static int parse_list(struct jinja_parser *p, struct jinja_node **out) {
    struct jinja_node_list list = {0};
    int rc = jinja_new_node(p, JINJA_NODE_LIST, out);
    jinja_next(p);
    while (!rc && !jinja_peek_kind(p, JINJA_TOKEN_RBRACKET)) {
        struct jinja_node *item;
        rc = jinja_parse_expression(p, true, &item);
        if (!rc) rc = jinja_push_node(p, &list, item);
        if (!rc && !jinja_peek_kind(p, JINJA_TOKEN_RBRACKET))
            rc = jinja_expect(p, JINJA_TOKEN_COMMA);
    }
    if (!rc) rc = jinja_expect(p, JINJA_TOKEN_RBRACKET);
    return rc ? rc : finish_list(*out, &list);
}

static int parse_dict(struct jinja_parser *p, struct jinja_node **out) {
    struct jinja_node_list list = {0};
    int rc = jinja_new_node(p, JINJA_NODE_DICT, out);
    jinja_next(p);
    while (!rc && !jinja_peek_kind(p, JINJA_TOKEN_RBRACE)) {
        struct jinja_node *key, *value;
        rc = jinja_parse_expression(p, true, &key);
        if (!rc) rc = jinja_expect(p, JINJA_TOKEN_COLON);
        if (!rc) rc = jinja_parse_expression(p, true, &value);
        if (!rc) rc = jinja_push_node(p, &list, key);
        if (!rc) rc = jinja_push_node(p, &list, value);
        if (!rc && !jinja_peek_kind(p, JINJA_TOKEN_RBRACE)) rc = jinja_expect(p, JINJA_TOKEN_COMMA);
    }
    if (!rc) rc = jinja_expect(p, JINJA_TOKEN_RBRACE);
    return rc ? rc : finish_list(*out, &list);
}

static bool is_tuple_end(const struct jinja_parser *p, const char *end_word) {
    return jinja_peek_kind(p, JINJA_TOKEN_VARIABLE_END) ||
           jinja_peek_kind(p, JINJA_TOKEN_BLOCK_END) || jinja_peek_kind(p, JINJA_TOKEN_RPAREN) ||
           (end_word && jinja_peek_word(p, 0, end_word));
}

static int parse_primary(struct jinja_parser *p, bool namespaces, struct jinja_node **out);

/* `targets`: only what can be assigned to. */
static int parse_items(struct jinja_parser *p, bool targets, bool conditional, bool namespaces,
                       bool parentheses, const char *end_word, struct jinja_node **out) {
    struct jinja_node_list list = {0};
    bool is_tuple = false;
    int rc = 0;
    while (!rc && !is_tuple_end(p, end_word)) {
        struct jinja_node *item;
        rc = targets ? parse_primary(p, namespaces, &item)
                     : jinja_parse_expression(p, conditional, &item);
        if (!rc) rc = jinja_push_node(p, &list, item);
        if (rc || !jinja_skip_kind(p, JINJA_TOKEN_COMMA)) break;
        is_tuple = true;
    }
    if (rc) return rc;
    if (!is_tuple && list.count) {
        *out = list.items[0];
        return 0;
    }
    if (!is_tuple && !parentheses) return jinja_parse_unexpected(p, "an expression");
    rc = jinja_new_node(p, JINJA_NODE_TUPLE, out);
    return rc ? rc : finish_list(*out, &list);
}

int jinja_parse_tuple(struct jinja_parser *p, bool conditional, const char *end_word,
                      struct jinja_node **out) {
    return parse_items(p, false, conditional, false, false, end_word, out);
}

static int check_target(struct jinja_parser *p, const struct jinja_node *node) {
    if (node->kind == JINJA_NODE_NAME || node->kind == JINJA_NODE_NSREF) return 0;
    if (node->kind != JINJA_NODE_TUPLE)
        return jinja_parse_fail(p, ERR_MALFORMED, "cannot assign to this expression");
    int rc = 0;
    for (uint32_t i = 0; i < node->count && !rc; i++) rc = check_target(p, node->items[i]);
    return rc;
}

int jinja_parse_target(struct jinja_parser *p, const char *end_word, bool namespaces,
                       struct jinja_node **out) {
    int rc = parse_items(p, true, false, namespaces, false, end_word, out);
    return rc ? rc : check_target(p, *out);
}

static int parse_primary(struct jinja_parser *p, bool namespaces, struct jinja_node **out) {
    int rc = jinja_parse_enter(p);
    if (rc) return rc;
    switch (jinja_peek(p)->kind) {
    case JINJA_TOKEN_NAME:
        rc = parse_name(p, namespaces, out);
        break;
    case JINJA_TOKEN_STRING:
        rc = parse_string(p, out);
        break;
    case JINJA_TOKEN_NUMBER:
        rc = parse_constant_word(p, jinja_peek(p)->number, out);
        break;
    case JINJA_TOKEN_LPAREN:
        jinja_next(p);
        rc = parse_items(p, false, true, false, true, NULL, out);
        if (!rc) rc = jinja_expect(p, JINJA_TOKEN_RPAREN);
        break;
    case JINJA_TOKEN_LBRACKET:
        rc = parse_list(p, out);
        break;
    case JINJA_TOKEN_LBRACE:
        rc = parse_dict(p, out);
        break;
    default:
        rc = jinja_parse_unexpected(p, "an expression");
    }
    jinja_parse_leave(p);
    return rc;
}

static int push_keyword(struct jinja_parser *p, struct jinja_call *call) {
    if (call->keyword_count % 4 == 0) {
        struct jinja_call_keyword *grown =
            jinja_parse_alloc(p, call->keyword_count + 4ul, sizeof *grown);
        if (!grown) return jinja_parse_memory(p);
        if (call->keyword_count) memcpy(grown, call->keywords, call->keyword_count * sizeof *grown);
        call->keywords = grown;
    }
    const struct jinja_name *name;
    int rc = jinja_expect_name(p, &name);
    jinja_next(p); /* = */
    struct jinja_node *value;
    if (!rc) rc = jinja_parse_expression(p, true, &value);
    if (!rc)
        call->keywords[call->keyword_count++] = (struct jinja_call_keyword){name->string, value};
    return rc;
}

static int parse_argument(struct jinja_parser *p, struct jinja_call *call,
                          struct jinja_node_list *list) {
    struct jinja_node *value;
    if (jinja_peek_kind(p, JINJA_TOKEN_NAME) &&
        p->tokens.items[p->at + 1].kind == JINJA_TOKEN_ASSIGN && !call->star_star)
        return push_keyword(p, call);
    if (jinja_peek_kind(p, JINJA_TOKEN_MUL) && !call->star && !call->star_star) {
        jinja_next(p);
        return jinja_parse_expression(p, true, &call->star);
    }
    if (jinja_peek_kind(p, JINJA_TOKEN_POW) && !call->star_star) {
        jinja_next(p);
        return jinja_parse_expression(p, true, &call->star_star);
    }
    if (call->star || call->star_star || call->keyword_count)
        return jinja_parse_unexpected(p, "a named argument");
    int rc = jinja_parse_expression(p, true, &value);
    return rc ? rc : jinja_push_node(p, list, value);
}

/* At "(". */
static int parse_call_args(struct jinja_parser *p, struct jinja_call **out) {
    struct jinja_call *call = jinja_parse_alloc(p, 1, sizeof *call);
    if (!call) return jinja_parse_memory(p);
    struct jinja_node_list list = {0};
    int rc = jinja_parse_enter(p);
    if (rc) return rc;
    jinja_next(p);
    while (!rc && !jinja_peek_kind(p, JINJA_TOKEN_RPAREN)) {
        rc = parse_argument(p, call, &list);
        if (!rc && !jinja_peek_kind(p, JINJA_TOKEN_RPAREN)) rc = jinja_expect(p, JINJA_TOKEN_COMMA);
    }
    if (!rc) rc = jinja_expect(p, JINJA_TOKEN_RPAREN);
    jinja_parse_leave(p);
    call->items = list.items;
    call->count = list.count;
    *out = call;
    return rc;
}

/* Inside [ ]: an index, or a slice with any of its three parts left out. */
static int parse_subscribed(struct jinja_parser *p, struct jinja_node **out) {
    struct jinja_node *parts[3] = {0};
    int rc = 0;
    if (!jinja_peek_kind(p, JINJA_TOKEN_COLON)) {
        rc = jinja_parse_expression(p, true, &parts[0]);
        if (rc || !jinja_peek_kind(p, JINJA_TOKEN_COLON)) {
            *out = parts[0];
            return rc;
        }
    }
    for (int i = 1; i < 3 && !rc && jinja_skip_kind(p, JINJA_TOKEN_COLON); i++) {
        bool absent = jinja_peek_kind(p, JINJA_TOKEN_COLON) ||
                      jinja_peek_kind(p, JINJA_TOKEN_RBRACKET) ||
                      jinja_peek_kind(p, JINJA_TOKEN_COMMA);
        if (!absent) rc = jinja_parse_expression(p, true, &parts[i]);
    }
    struct jinja_node_list list = {0};
    for (int i = 0; i < 3 && !rc; i++) rc = jinja_push_node(p, &list, parts[i]);
    if (!rc) rc = jinja_new_node(p, JINJA_NODE_SLICE, out);
    return rc ? rc : finish_list(*out, &list);
}

/* A slice that has no object yet, unlike one that is itself the index: x[y[1:]]. */
static bool is_open_slice(const struct jinja_node *node) {
    return node->kind == JINJA_NODE_SLICE && !node->a;
}

static int parse_subscript(struct jinja_parser *p, struct jinja_node *object,
                           struct jinja_node **out) {
    struct jinja_node_list list = {0};
    struct jinja_node *key = NULL;
    int rc = 0;
    jinja_next(p);
    while (!rc && !jinja_peek_kind(p, JINJA_TOKEN_RBRACKET)) {
        if (list.count) rc = jinja_expect(p, JINJA_TOKEN_COMMA);
        if (!rc) rc = parse_subscribed(p, &key);
        if (!rc) rc = jinja_push_node(p, &list, key);
    }
    if (!rc) rc = jinja_expect(p, JINJA_TOKEN_RBRACKET);
    if (rc) return rc;
    for (uint32_t i = 0; i < list.count && list.count > 1; i++)
        if (is_open_slice(list.items[i]))
            return jinja_parse_fail(p, ERR_UNSUPPORTED, "several slices at once");
    if (list.count == 1 && is_open_slice(key)) {
        key->a = object;
        *out = key;
        return 0;
    }
    if (list.count != 1) {
        rc = jinja_new_node(p, JINJA_NODE_TUPLE, &key);
        if (!rc) finish_list(key, &list);
    }
    if (!rc) rc = jinja_new_node(p, JINJA_NODE_GETITEM, out);
    if (rc) return rc;
    (*out)->a = object;
    (*out)->b = key;
    return 0;
}

static int parse_attribute(struct jinja_parser *p, struct jinja_node *object,
                           struct jinja_node **out) {
    jinja_next(p);
    if (jinja_peek_kind(p, JINJA_TOKEN_NUMBER) && jinja_peek(p)->number.kind == JINJA_INT) {
        struct jinja_node *key;
        int rc = parse_constant_word(p, jinja_peek(p)->number, &key);
        if (!rc) rc = jinja_new_node(p, JINJA_NODE_GETITEM, out);
        if (rc) return rc;
        (*out)->a = object;
        (*out)->b = key;
        return 0;
    }
    int rc = jinja_new_node(p, JINJA_NODE_GETATTR, out);
    if (!rc) rc = jinja_expect_name(p, &(*out)->name);
    if (!rc) (*out)->a = object;
    return rc;
}

static int parse_call(struct jinja_parser *p, struct jinja_node *callee, struct jinja_node **out) {
    int rc = jinja_new_node(p, JINJA_NODE_CALL, out);
    if (rc) return rc;
    (*out)->a = callee;
    return parse_call_args(p, &(*out)->call);
}

static int parse_postfix(struct jinja_parser *p, struct jinja_node *node, struct jinja_node **out) {
    int rc = 0;
    *out = node;
    while (!rc) {
        if (jinja_peek_kind(p, JINJA_TOKEN_DOT))
            rc = parse_attribute(p, *out, out);
        else if (jinja_peek_kind(p, JINJA_TOKEN_LBRACKET))
            rc = parse_subscript(p, *out, out);
        else if (jinja_peek_kind(p, JINJA_TOKEN_LPAREN))
            rc = parse_call(p, *out, out);
        else
            return 0;
    }
    return rc;
}

/* name or name.name.name: no builtin of ours has dots, but the message should show them. One that
 * is not known fails when it is reached: a template may name it where no request leads. */
static int parse_builtin(struct jinja_parser *p, bool filter, struct jinja_node *node) {
    const struct jinja_name *name;
    int rc = jinja_expect_name(p, &name);
    if (rc) return rc;
    node->name = name;
    bool dotted = jinja_peek_kind(p, JINJA_TOKEN_DOT);
    if (!dotted)
        node->builtin = filter ? jinja_find_filter(&name->string) : jinja_find_test(&name->string);
    while (!rc && jinja_skip_kind(p, JINJA_TOKEN_DOT)) rc = jinja_expect_name(p, &name);
    return rc;
}

int jinja_parse_filters(struct jinja_parser *p, struct jinja_node *node, bool inline_start,
                        struct jinja_node **out) {
    *out = node;
    while (inline_start || jinja_skip_kind(p, JINJA_TOKEN_PIPE)) {
        inline_start = false;
        struct jinja_node *filter;
        int rc = jinja_new_node(p, JINJA_NODE_FILTER, &filter);
        if (!rc) rc = parse_builtin(p, true, filter);
        if (!rc && jinja_peek_kind(p, JINJA_TOKEN_LPAREN)) rc = parse_call_args(p, &filter->call);
        if (rc) return rc;
        filter->a = *out;
        *out = filter;
    }
    return 0;
}

/* `x is divisibleby 3`: one argument without parentheses. */
static int parse_bare_argument(struct jinja_parser *p, struct jinja_node *test) {
    struct jinja_node *argument;
    int rc = parse_primary(p, false, &argument);
    if (!rc) rc = parse_postfix(p, argument, &argument);
    if (rc) return rc;
    struct jinja_node_list list = {0};
    test->call = jinja_parse_alloc(p, 1, sizeof *test->call);
    if (!test->call) return jinja_parse_memory(p);
    rc = jinja_push_node(p, &list, argument);
    test->call->items = list.items;
    test->call->count = list.count;
    return rc;
}

static bool bare_argument_follows(const struct jinja_parser *p) {
    switch (jinja_peek(p)->kind) {
    case JINJA_TOKEN_NAME:
        return !jinja_peek_word(p, 0, "else") && !jinja_peek_word(p, 0, "or") &&
               !jinja_peek_word(p, 0, "and");
    case JINJA_TOKEN_STRING:
    case JINJA_TOKEN_NUMBER:
    case JINJA_TOKEN_LBRACKET:
    case JINJA_TOKEN_LBRACE:
        return true;
    default:
        return false;
    }
}

static int parse_test(struct jinja_parser *p, struct jinja_node *node, struct jinja_node **out) {
    jinja_next(p);
    bool negated = jinja_skip_word(p, "not");
    struct jinja_node *test;
    int rc = jinja_new_node(p, JINJA_NODE_TEST, &test);
    if (!rc) rc = parse_builtin(p, false, test);
    if (rc) return rc;
    test->a = node;
    if (jinja_peek_kind(p, JINJA_TOKEN_LPAREN))
        rc = parse_call_args(p, &test->call);
    else if (jinja_peek_word(p, 0, "is"))
        rc = jinja_parse_fail(p, ERR_MALFORMED, "chained 'is'");
    else if (bare_argument_follows(p))
        rc = parse_bare_argument(p, test);
    *out = test;
    if (rc || !negated) return rc;
    rc = jinja_new_node(p, JINJA_NODE_NOT, out);
    if (!rc) (*out)->a = test;
    return rc;
}

static int parse_filter_expr(struct jinja_parser *p, struct jinja_node *node,
                             struct jinja_node **out) {
    int rc = 0;
    *out = node;
    while (!rc) {
        if (jinja_peek_kind(p, JINJA_TOKEN_PIPE))
            rc = jinja_parse_filters(p, *out, false, out);
        else if (jinja_peek_word(p, 0, "is"))
            rc = parse_test(p, *out, out);
        else if (jinja_peek_kind(p, JINJA_TOKEN_LPAREN))
            rc = parse_call(p, *out, out);
        else
            return 0;
    }
    return rc;
}

static int parse_sign(struct jinja_parser *p, enum jinja_node_kind kind, struct jinja_node **out) {
    int rc = jinja_parse_enter(p);
    if (rc) return rc;
    struct jinja_node *operand;
    jinja_next(p);
    rc = jinja_new_node(p, kind, out);
    if (!rc) rc = parse_unary(p, false, &operand);
    if (!rc) (*out)->a = operand;
    jinja_parse_leave(p);
    return rc;
}

static int parse_unary(struct jinja_parser *p, bool filters, struct jinja_node **out) {
    int rc;
    if (jinja_peek_kind(p, JINJA_TOKEN_SUB))
        rc = parse_sign(p, JINJA_NODE_NEGATE, out);
    else if (jinja_peek_kind(p, JINJA_TOKEN_ADD))
        rc = parse_sign(p, JINJA_NODE_PLUS, out);
    else
        rc = parse_primary(p, false, out);
    if (!rc) rc = parse_postfix(p, *out, out);
    if (!rc && filters) rc = parse_filter_expr(p, *out, out);
    return rc;
}

/* Arithmetic by precedence climbing; all of it associates to the left, ** too (as in Jinja). */
enum { LEVEL_SUM = 1, LEVEL_CONCAT, LEVEL_PRODUCT, LEVEL_POWER, LEVEL_UNARY };

static int binary_level(enum jinja_token_kind kind, enum jinja_op *op) {
    switch (kind) {
    case JINJA_TOKEN_ADD:
        *op = JINJA_OP_ADD;
        return LEVEL_SUM;
    case JINJA_TOKEN_SUB:
        *op = JINJA_OP_SUB;
        return LEVEL_SUM;
    case JINJA_TOKEN_TILDE:
        return LEVEL_CONCAT;
    case JINJA_TOKEN_MUL:
        *op = JINJA_OP_MUL;
        return LEVEL_PRODUCT;
    case JINJA_TOKEN_DIV:
        *op = JINJA_OP_DIV;
        return LEVEL_PRODUCT;
    case JINJA_TOKEN_FLOORDIV:
        *op = JINJA_OP_FLOORDIV;
        return LEVEL_PRODUCT;
    case JINJA_TOKEN_MOD:
        *op = JINJA_OP_MOD;
        return LEVEL_PRODUCT;
    case JINJA_TOKEN_POW:
        *op = JINJA_OP_POW;
        return LEVEL_POWER;
    default:
        return 0;
    }
}

static int parse_binary(struct jinja_parser *p, int level, struct jinja_node **out);

/* a ~ b ~ c is one node. */
static int parse_concat(struct jinja_parser *p, struct jinja_node *first, struct jinja_node **out) {
    struct jinja_node_list list = {0};
    struct jinja_node *node;
    int rc = jinja_new_node(p, JINJA_NODE_CONCAT, &node);
    if (!rc) rc = jinja_push_node(p, &list, first);
    while (!rc && jinja_skip_kind(p, JINJA_TOKEN_TILDE)) {
        struct jinja_node *item;
        rc = parse_binary(p, LEVEL_PRODUCT, &item);
        if (!rc) rc = jinja_push_node(p, &list, item);
    }
    *out = node;
    return rc ? rc : finish_list(node, &list);
}

static int parse_binary(struct jinja_parser *p, int level, struct jinja_node **out) {
    int rc = parse_unary(p, true, out), found;
    enum jinja_op op = JINJA_OP_ADD;
    while (!rc && (found = binary_level(jinja_peek(p)->kind, &op)) >= level) {
        if (found == LEVEL_CONCAT) {
            rc = parse_concat(p, *out, out);
            continue;
        }
        struct jinja_node *left = *out, *right;
        rc = jinja_new_node(p, JINJA_NODE_BINARY, out);
        jinja_next(p);
        enum jinja_op mine = op;
        if (!rc) rc = parse_binary(p, found + 1, &right);
        if (rc) break;
        (*out)->op = (uint8_t)mine;
        (*out)->a = left;
        (*out)->b = right;
    }
    return rc;
}

static bool skip_compare_op(struct jinja_parser *p, enum jinja_op *op) {
    switch (jinja_peek(p)->kind) {
    case JINJA_TOKEN_EQ:
        *op = JINJA_OP_EQ;
        break;
    case JINJA_TOKEN_NE:
        *op = JINJA_OP_NE;
        break;
    case JINJA_TOKEN_LT:
        *op = JINJA_OP_LT;
        break;
    case JINJA_TOKEN_LE:
        *op = JINJA_OP_LE;
        break;
    case JINJA_TOKEN_GT:
        *op = JINJA_OP_GT;
        break;
    case JINJA_TOKEN_GE:
        *op = JINJA_OP_GE;
        break;
    default:
        if (jinja_peek_word(p, 0, "in")) {
            *op = JINJA_OP_IN;
        } else if (jinja_peek_word(p, 0, "not") && jinja_peek_word(p, 1, "in")) {
            jinja_next(p);
            *op = JINJA_OP_NOT_IN;
        } else {
            return false;
        }
    }
    jinja_next(p);
    return true;
}

/* a < b <= c: one node with all its operands, as in Python. */
static int parse_compare(struct jinja_parser *p, struct jinja_node **out) {
    struct jinja_node_list list = {0};
    struct jinja_node *first, *node = NULL;
    enum jinja_op op;
    int rc = parse_binary(p, LEVEL_SUM, &first);
    if (!rc) *out = first;
    while (!rc && skip_compare_op(p, &op)) {
        struct jinja_node *operand;
        if (!node) rc = jinja_new_node(p, JINJA_NODE_COMPARE, &node);
        if (!rc) rc = parse_binary(p, LEVEL_SUM, &operand);
        if (!rc) rc = jinja_push_node(p, &list, operand);
        uint8_t *ops = rc ? NULL : jinja_parse_alloc(p, list.count, 1);
        if (!rc && !ops) rc = jinja_parse_memory(p);
        if (rc) break;
        if (list.count > 1) memcpy(ops, node->ops, list.count - 1);
        ops[list.count - 1] = (uint8_t)op;
        node->ops = ops;
        node->a = first;
        *out = node;
    }
    return rc || !node ? rc : finish_list(node, &list);
}

static int parse_not(struct jinja_parser *p, struct jinja_node **out) {
    if (!jinja_skip_word(p, "not")) return parse_compare(p, out);
    struct jinja_node *operand;
    int rc = jinja_parse_enter(p);
    if (rc) return rc;
    rc = jinja_new_node(p, JINJA_NODE_NOT, out);
    if (!rc) rc = parse_not(p, &operand);
    if (!rc) (*out)->a = operand;
    jinja_parse_leave(p);
    return rc;
}

static int parse_logic(struct jinja_parser *p, bool is_or, struct jinja_node **out) {
    int rc = is_or ? parse_logic(p, false, out) : parse_not(p, out);
    while (!rc && jinja_skip_word(p, is_or ? "or" : "and")) {
        struct jinja_node *left = *out, *right;
        rc = jinja_new_node(p, is_or ? JINJA_NODE_OR : JINJA_NODE_AND, out);
        if (!rc) rc = is_or ? parse_logic(p, false, &right) : parse_not(p, &right);
        if (rc) break;
        (*out)->a = left;
        (*out)->b = right;
    }
    return rc;
}

int jinja_parse_expression(struct jinja_parser *p, bool conditional, struct jinja_node **out) {
    int rc = jinja_parse_enter(p);
    if (rc) return rc;
    rc = parse_logic(p, true, out);
    while (!rc && conditional && jinja_skip_word(p, "if")) {
        struct jinja_node *value = *out, *test, *other = NULL;
        rc = jinja_new_node(p, JINJA_NODE_COND, out);
        if (!rc) rc = parse_logic(p, true, &test);
        if (!rc && jinja_skip_word(p, "else")) rc = jinja_parse_expression(p, true, &other);
        if (rc) break;
        (*out)->a = value;
        (*out)->b = test;
        (*out)->c = other;
    }
    jinja_parse_leave(p);
    return rc;
}
