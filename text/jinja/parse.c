/* The parser's statements, names and lists of nodes. The tree lies in the template's arena, whose
 * ceiling bounds what a file can make of a small source; names are interned, so that a render
 * compares numbers. */
#include "text/jinja/parse.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "text/jinja/text.h"

bool jinja_peek_word(const struct jinja_parser *p, uint32_t ahead, const char *word) {
    if (p->at + ahead >= p->tokens.count) return false;
    const struct jinja_token *token = &p->tokens.items[p->at + ahead];
    return token->kind == JINJA_TOKEN_NAME && token->size == strlen(word) &&
           memcmp(token->text, word, token->size) == 0;
}

const struct jinja_token *jinja_next(struct jinja_parser *p) {
    const struct jinja_token *token = jinja_peek(p);
    if (token->kind != JINJA_TOKEN_EOF) p->at++;
    return token;
}

bool jinja_skip_kind(struct jinja_parser *p, enum jinja_token_kind kind) {
    if (!jinja_peek_kind(p, kind)) return false;
    jinja_next(p);
    return true;
}

bool jinja_skip_word(struct jinja_parser *p, const char *word) {
    if (!jinja_peek_word(p, 0, word)) return false;
    jinja_next(p);
    return true;
}

int jinja_expect(struct jinja_parser *p, enum jinja_token_kind kind) {
    return jinja_skip_kind(p, kind) ? 0 : jinja_parse_unexpected(p, jinja_token_name(kind));
}

int jinja_parse_fail(struct jinja_parser *p, int rc, const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return fault_set(p->fault, rc, "chat template", "line %d: %.*s", jinja_peek(p)->line,
                     (int)utf8_complete(text, strlen(text)), text);
}

int jinja_parse_unexpected(struct jinja_parser *p, const char *wanted) {
    const struct jinja_token *token = jinja_peek(p);
    if (token->kind != JINJA_TOKEN_NAME)
        return jinja_parse_fail(p, ERR_MALFORMED, "expected %s, found %s", wanted,
                                jinja_token_name(token->kind));
    return jinja_parse_fail(p, ERR_MALFORMED, "expected %s, found '%.*s'", wanted,
                            token->size < 64 ? (int)token->size : 64, token->text);
}

int jinja_parse_enter(struct jinja_parser *p) {
    if (p->depth >= JINJA_PARSE_DEPTH * 2)
        return jinja_parse_fail(p, ERR_LIMIT, "nested too deeply");
    p->depth++;
    return 0;
}

void jinja_parse_leave(struct jinja_parser *p) {
    p->depth--;
}

void *jinja_parse_alloc(struct jinja_parser *p, size_t count, size_t size) {
    return arena_alloc(&p->template->arena, count, size);
}

int jinja_parse_memory(struct jinja_parser *p) {
    return jinja_compile_memory(&p->template->arena, p->fault);
}

/* A larger array of pointers with the old ones in it; NULL: out of memory. */
static void *more_pointers(struct jinja_parser *p, const void *old, uint32_t count,
                           size_t capacity) {
    void *grown = jinja_parse_alloc(p, capacity, sizeof(void *));
    if (grown && count) memcpy(grown, old, count * sizeof(void *));
    return grown;
}

int jinja_new_node(struct jinja_parser *p, enum jinja_node_kind kind, struct jinja_node **out) {
    struct jinja_node *node = jinja_parse_alloc(p, 1, sizeof *node);
    if (!node) return jinja_parse_memory(p);
    node->kind = (uint8_t)kind;
    node->line = jinja_peek(p)->line;
    *out = node;
    return 0;
}

int jinja_push_node(struct jinja_parser *p, struct jinja_node_list *list, struct jinja_node *node) {
    if (list->count == list->capacity) {
        uint32_t capacity = list->capacity * 2 + 4;
        struct jinja_node **items = more_pointers(p, list->items, list->count, capacity);
        if (!items) return jinja_parse_memory(p);
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = node;
    return 0;
}

int jinja_constant(struct jinja_parser *p, const char *data, uint32_t size,
                   struct jinja_value *out) {
    *out = (struct jinja_value){.kind = JINJA_STR, .size = size};
    out->text = jinja_constant_text(&p->template->arena, data, size);
    return out->text ? 0 : jinja_parse_memory(p);
}

static uint32_t hash_name(const char *data, uint32_t size) {
    uint32_t hash = 0x811c9dc5u;
    for (uint32_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)data[i]) * 0x01000193u;
    return hash;
}

static uint32_t *find_slot(struct jinja_parser *p, const char *data, uint32_t size) {
    uint32_t slot = hash_name(data, size) & (p->index_size - 1);
    for (; p->index[slot]; slot = (slot + 1) & (p->index_size - 1)) {
        const struct jinja_name *name = p->names[p->index[slot] - 1];
        if (name->size == size && memcmp(name->text, data, size) == 0) break;
    }
    return &p->index[slot];
}

static int grow_names(struct jinja_parser *p) {
    uint32_t capacity = p->name_capacity ? p->name_capacity * 2 : 64;
    struct jinja_name **names = more_pointers(p, p->names, p->name_count, capacity);
    uint32_t *index = jinja_parse_alloc(p, capacity * 2ul, sizeof *index);
    if (!names || !index) return jinja_parse_memory(p);
    p->names = names;
    p->name_capacity = capacity;
    p->index = index;
    p->index_size = capacity * 2;
    for (uint32_t i = 0; i < p->name_count; i++)
        *find_slot(p, names[i]->text, names[i]->size) = i + 1;
    return 0;
}

int jinja_intern(struct jinja_parser *p, const char *data, uint32_t size,
                 const struct jinja_name **out) {
    if (p->name_count == p->name_capacity) {
        int rc = grow_names(p);
        if (rc) return rc;
    }
    uint32_t *slot = find_slot(p, data, size);
    if (!*slot) {
        struct jinja_name *name = jinja_parse_alloc(p, 1, sizeof *name);
        char *text = arena_strndup(&p->template->arena, data, size);
        if (!name || !text) return jinja_parse_memory(p);
        *name = (struct jinja_name){.text = text, .size = size, .id = p->name_count};
        int rc = jinja_constant(p, text, size, &name->string);
        if (rc) return rc;
        p->names[p->name_count++] = name;
        *slot = p->name_count;
    }
    *out = p->names[*slot - 1];
    return 0;
}

int jinja_expect_name(struct jinja_parser *p, const struct jinja_name **out) {
    if (!jinja_peek_kind(p, JINJA_TOKEN_NAME)) return jinja_parse_unexpected(p, "a name");
    const struct jinja_token *token = jinja_next(p);
    return jinja_intern(p, token->text, token->size, out);
}

/* Statements. `ends`: the words that close the block we are in, NULL-terminated; NULL outside. */

static int parse_body(struct jinja_parser *p, const char *const *ends, struct jinja_node **out);

static bool at_end_word(const struct jinja_parser *p, const char *const *ends) {
    for (; ends && *ends; ends++)
        if (jinja_peek_word(p, 0, *ends)) return true;
    return false;
}

/* From the end of an opening tag to the closing word, which stays the current token. */
static int parse_block(struct jinja_parser *p, const char *const *ends, struct jinja_node **out) {
    int rc = jinja_parse_enter(p);
    if (rc) return rc;
    jinja_skip_kind(p, JINJA_TOKEN_COLON);
    rc = jinja_expect(p, JINJA_TOKEN_BLOCK_END);
    if (!rc) rc = parse_body(p, ends, out);
    jinja_parse_leave(p);
    return rc;
}

static int parse_block_to(struct jinja_parser *p, const char *end, struct jinja_node **out) {
    const char *const ends[] = {end, NULL};
    int rc = parse_block(p, ends, out);
    jinja_next(p);
    return rc;
}

static int parse_if(struct jinja_parser *p, struct jinja_node *node) {
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct jinja_node_list list = {0};
    struct jinja_node *test, *body;
    int rc = 0;
    do {
        rc = jinja_parse_tuple(p, false, NULL, &test);
        if (!rc) rc = parse_block(p, ends, &body);
        if (!rc) rc = jinja_push_node(p, &list, test);
        if (!rc) rc = jinja_push_node(p, &list, body);
    } while (!rc && jinja_skip_word(p, "elif"));
    if (!rc && jinja_skip_word(p, "else")) {
        rc = parse_block_to(p, "endif", &body);
        if (!rc) rc = jinja_push_node(p, &list, body);
    } else {
        jinja_next(p); /* endif */
    }
    node->items = list.items;
    node->count = list.count;
    return rc;
}

static int parse_for(struct jinja_parser *p, struct jinja_node *node) {
    static const char *const ends[] = {"else", "endfor", NULL};
    struct jinja_node_list otherwise = {0};
    struct jinja_node *body = NULL;
    int rc = jinja_parse_target(p, "in", false, &node->a);
    if (!rc && !jinja_skip_word(p, "in")) rc = jinja_parse_unexpected(p, "'in'");
    if (!rc) rc = jinja_parse_tuple(p, false, "recursive", &node->b);
    if (!rc && jinja_skip_word(p, "if")) rc = jinja_parse_expression(p, true, &node->c);
    node->recursive = !rc && jinja_skip_word(p, "recursive");
    p->loops++;
    if (!rc) rc = parse_block(p, ends, &node->body);
    p->loops--;
    if (!rc && jinja_skip_word(p, "else"))
        rc = parse_block_to(p, "endfor", &body);
    else
        jinja_next(p); /* endfor */
    if (!rc) rc = jinja_push_node(p, &otherwise, body);
    node->items = otherwise.items;
    node->count = 1;
    return rc;
}

static int parse_set(struct jinja_parser *p, struct jinja_node *node) {
    int rc = jinja_parse_target(p, NULL, true, &node->a);
    if (rc) return rc;
    if (jinja_skip_kind(p, JINJA_TOKEN_ASSIGN)) return jinja_parse_tuple(p, true, NULL, &node->b);
    node->kind = JINJA_NODE_SET_BLOCK;
    rc = jinja_parse_filters(p, NULL, false, &node->b);
    return rc ? rc : parse_block_to(p, "endset", &node->body);
}

static int parse_with(struct jinja_parser *p, struct jinja_node *node) {
    struct jinja_node_list list = {0};
    int rc = 0;
    while (!rc && !jinja_peek_kind(p, JINJA_TOKEN_BLOCK_END)) {
        struct jinja_node *target, *value;
        if (list.count) rc = jinja_expect(p, JINJA_TOKEN_COMMA);
        if (!rc) rc = jinja_new_node(p, JINJA_NODE_NAME, &target);
        if (!rc) rc = jinja_expect_name(p, &target->name);
        if (!rc) rc = jinja_expect(p, JINJA_TOKEN_ASSIGN);
        if (!rc) rc = jinja_parse_expression(p, true, &value);
        if (!rc) rc = jinja_push_node(p, &list, target);
        if (!rc) rc = jinja_push_node(p, &list, value);
    }
    node->items = list.items;
    node->count = list.count;
    return rc ? rc : parse_block_to(p, "endwith", &node->body);
}

static int grow_params(struct jinja_parser *p, struct jinja_macro_def *def) {
    if (def->count % 8) return 0;
    size_t capacity = def->count + 8ul;
    const struct jinja_name **params = more_pointers(p, def->params, def->count, capacity);
    struct jinja_node **defaults = more_pointers(p, def->defaults, def->count, capacity);
    if (!params || !defaults) return jinja_parse_memory(p);
    def->params = params;
    def->defaults = defaults;
    return 0;
}

/* At "(": names, the last of them with defaults. */
static int parse_signature(struct jinja_parser *p, struct jinja_macro_def *def) {
    int rc = jinja_expect(p, JINJA_TOKEN_LPAREN);
    while (!rc && !jinja_peek_kind(p, JINJA_TOKEN_RPAREN)) {
        if (def->count) rc = jinja_expect(p, JINJA_TOKEN_COMMA);
        if (!rc) rc = grow_params(p, def);
        if (!rc) rc = jinja_expect_name(p, &def->params[def->count]);
        if (rc) return rc;
        if (jinja_skip_kind(p, JINJA_TOKEN_ASSIGN))
            rc = jinja_parse_expression(p, true, &def->defaults[def->count]);
        else if (def->count && def->defaults[def->count - 1])
            rc = jinja_parse_fail(p, ERR_MALFORMED, "a parameter without default follows one with");
        def->count++;
    }
    return rc ? rc : jinja_expect(p, JINJA_TOKEN_RPAREN);
}

static int parse_macro_body(struct jinja_parser *p, struct jinja_macro_def *def, const char *end) {
    struct jinja_parser_macro frame = {def, p->macro};
    int loops = p->loops; /* break does not reach out of a macro */
    p->macro = &frame;
    p->loops = 0;
    int rc = parse_block_to(p, end, &def->body);
    p->loops = loops;
    p->macro = frame.outer;
    return rc;
}

static int parse_macro(struct jinja_parser *p, struct jinja_node *node) {
    struct jinja_macro_def *def = jinja_parse_alloc(p, 1, sizeof *def);
    if (!def) return jinja_parse_memory(p);
    node->macro = def;
    int rc = jinja_expect_name(p, &def->name);
    if (!rc) rc = parse_signature(p, def);
    return rc ? rc : parse_macro_body(p, def, "endmacro");
}

static int parse_call_block(struct jinja_parser *p, struct jinja_node *node) {
    struct jinja_macro_def *def = jinja_parse_alloc(p, 1, sizeof *def);
    if (!def) return jinja_parse_memory(p);
    node->macro = def;
    int rc = jinja_peek_kind(p, JINJA_TOKEN_LPAREN) ? parse_signature(p, def) : 0;
    if (!rc) rc = jinja_parse_expression(p, true, &node->a);
    if (!rc && node->a->kind != JINJA_NODE_CALL)
        rc = jinja_parse_fail(p, ERR_MALFORMED, "expected a call");
    return rc ? rc : parse_macro_body(p, def, "endcall");
}

static int parse_filter_block(struct jinja_parser *p, struct jinja_node *node) {
    int rc = jinja_parse_filters(p, NULL, true, &node->a);
    return rc ? rc : parse_block_to(p, "endfilter", &node->body);
}

/* {% generation %} marks what the model wrote, for training; when serving it is only a scope. */
static int parse_generation(struct jinja_parser *p, struct jinja_node *node) {
    struct jinja_node *body;
    int loops = p->loops;
    p->loops = 0;
    int rc = parse_block_to(p, "endgeneration", &body);
    p->loops = loops;
    if (rc) return rc;
    node->items = body->items;
    node->count = body->count;
    return 0;
}

static int parse_loop_control(struct jinja_parser *p, struct jinja_node *node) {
    (void)node;
    return p->loops ? 0 : jinja_parse_fail(p, ERR_MALFORMED, "outside a loop");
}

static int parse_print(struct jinja_parser *p, struct jinja_node *node) {
    struct jinja_node_list list = {0};
    int rc = 0;
    while (!rc && !jinja_peek_kind(p, JINJA_TOKEN_BLOCK_END)) {
        struct jinja_node *print;
        if (list.count) rc = jinja_expect(p, JINJA_TOKEN_COMMA);
        if (!rc) rc = jinja_new_node(p, JINJA_NODE_PRINT, &print);
        if (!rc) rc = jinja_parse_expression(p, true, &print->a);
        if (!rc) rc = jinja_push_node(p, &list, print);
    }
    node->items = list.items;
    node->count = list.count;
    return rc;
}

static const struct {
    const char *word;
    enum jinja_node_kind kind;
    int (*parse)(struct jinja_parser *p, struct jinja_node *node);
} statements[] = {
    {"if", JINJA_NODE_IF, parse_if},
    {"for", JINJA_NODE_FOR, parse_for},
    {"set", JINJA_NODE_SET, parse_set},
    {"macro", JINJA_NODE_MACRO, parse_macro},
    {"call", JINJA_NODE_CALL_BLOCK, parse_call_block},
    {"filter", JINJA_NODE_FILTER_BLOCK, parse_filter_block},
    {"with", JINJA_NODE_WITH, parse_with},
    {"generation", JINJA_NODE_SCOPE, parse_generation},
    {"break", JINJA_NODE_BREAK, parse_loop_control},
    {"continue", JINJA_NODE_CONTINUE, parse_loop_control},
    {"print", JINJA_NODE_BLOCK, parse_print},
};

static int parse_unknown_tag(struct jinja_parser *p) {
    static const char *const refused[] = {"include", "import", "from",       "extends",
                                          "block",   "do",     "autoescape", "trans"};
    if (!jinja_peek_kind(p, JINJA_TOKEN_NAME)) return jinja_parse_unexpected(p, "a tag name");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (jinja_peek_word(p, 0, refused[i]))
            return jinja_parse_fail(p, ERR_UNSUPPORTED, "the tag '%s' is not supported",
                                    refused[i]);
    return jinja_parse_unexpected(p, "a tag that belongs here");
}

static int parse_statement(struct jinja_parser *p, struct jinja_node **out) {
    for (size_t i = 0; i < sizeof statements / sizeof *statements; i++) {
        if (!jinja_peek_word(p, 0, statements[i].word)) continue;
        int rc = jinja_new_node(p, statements[i].kind, out);
        if (rc) return rc;
        jinja_next(p);
        rc = statements[i].parse(p, *out);
        return rc ? rc : jinja_expect(p, JINJA_TOKEN_BLOCK_END);
    }
    return parse_unknown_tag(p);
}

static int parse_data(struct jinja_parser *p, struct jinja_node **out) {
    int rc = jinja_new_node(p, JINJA_NODE_TEXT, out);
    if (rc) return rc;
    const struct jinja_token *token = jinja_next(p);
    return jinja_constant(p, token->text, token->size, &(*out)->value);
}

static int parse_output(struct jinja_parser *p, struct jinja_node **out) {
    jinja_next(p);
    int rc = jinja_new_node(p, JINJA_NODE_PRINT, out);
    if (!rc) rc = jinja_parse_tuple(p, true, NULL, &(*out)->a);
    return rc ? rc : jinja_expect(p, JINJA_TOKEN_VARIABLE_END);
}

static int parse_body(struct jinja_parser *p, const char *const *ends, struct jinja_node **out) {
    struct jinja_node_list list = {0};
    int rc = jinja_new_node(p, JINJA_NODE_BLOCK, out);
    while (!rc) {
        struct jinja_node *node;
        if (jinja_peek_kind(p, JINJA_TOKEN_DATA)) {
            rc = parse_data(p, &node);
        } else if (jinja_peek_kind(p, JINJA_TOKEN_VARIABLE_BEGIN)) {
            rc = parse_output(p, &node);
        } else if (jinja_skip_kind(p, JINJA_TOKEN_BLOCK_BEGIN)) {
            if (at_end_word(p, ends)) break;
            rc = parse_statement(p, &node);
        } else if (ends) {
            rc = jinja_parse_fail(p, ERR_MALFORMED, "the template ends before '%s'", *ends);
        } else {
            break;
        }
        if (!rc) rc = jinja_push_node(p, &list, node);
    }
    if (rc) return rc;
    (*out)->items = list.items;
    (*out)->count = list.count;
    return 0;
}

int jinja_parse(const char *source, size_t size, struct jinja_template *template,
                struct fault *fault) {
    struct jinja_parser p = {.template = template, .fault = fault};
    if (size > JINJA_SOURCE_MAX)
        return fault_set(fault, ERR_LIMIT, "chat template", "longer than %u bytes",
                         JINJA_SOURCE_MAX);
    if (!utf8_valid(source, size))
        return fault_set(fault, ERR_MALFORMED, "chat template", "not UTF-8");
    int rc = jinja_lex(source, size, &template->arena, &p.tokens, fault);
    if (!rc) rc = jinja_intern(&p, "loop", 4, &template->loop);
    if (!rc) rc = jinja_intern(&p, "caller", 6, &template->caller);
    if (!rc) rc = jinja_intern(&p, "varargs", 7, &template->varargs);
    if (!rc) rc = jinja_intern(&p, "kwargs", 6, &template->kwargs);
    if (!rc) rc = parse_body(&p, NULL, &template->body);
    template->names = p.names;
    template->name_count = p.name_count;
    return rc;
}
