/* Parser: tokens to a tree. parse.c has the statements, expr.c the expressions.
 *
 * Pure. ERR_MALFORMED names the line; ERR_UNSUPPORTED the tag that is not supported. */
#ifndef KEEPD_TEXT_JINJA_PARSE_H
#define KEEPD_TEXT_JINJA_PARSE_H

#include "text/jinja/ast.h"
#include "text/jinja/lex.h"

/* The template owns its arena, open before the call and closed by the caller in any case. */
int jinja_parse(const char *source, size_t size, struct jinja_template *template,
                struct fault *fault);

/* The rest is shared by the two files of the parser. */

struct jinja_parser {
    struct jinja_template *template;
    struct fault *fault;
    struct jinja_tokens tokens;
    uint32_t at;
    int depth;
    int loops; /* enclosing `for` bodies, within the innermost macro */
    struct jinja_name **names;
    uint32_t name_count, name_capacity;
    uint32_t *index; /* by name, open addressing, position + 1 */
    uint32_t index_size;
    struct jinja_parser_macro *macro; /* the innermost macro or call block */
};

struct jinja_parser_macro {
    struct jinja_macro_def *def;
    struct jinja_parser_macro *outer;
};

struct jinja_node_list {
    struct jinja_node **items;
    uint32_t count, capacity;
};

static inline const struct jinja_token *jinja_peek(const struct jinja_parser *p) {
    return &p->tokens.items[p->at];
}
static inline bool jinja_peek_kind(const struct jinja_parser *p, enum jinja_token_kind kind) {
    return jinja_peek(p)->kind == kind;
}
bool jinja_peek_word(const struct jinja_parser *p, uint32_t ahead, const char *word);
const struct jinja_token *jinja_next(struct jinja_parser *p); /* stays at EOF */
bool jinja_skip_kind(struct jinja_parser *p, enum jinja_token_kind kind);
bool jinja_skip_word(struct jinja_parser *p, const char *word);
int jinja_expect(struct jinja_parser *p, enum jinja_token_kind kind);

int jinja_parse_fail(struct jinja_parser *p, int rc, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int jinja_parse_memory(struct jinja_parser *p); /* after jinja_parse_alloc gave NULL */
int jinja_parse_unexpected(struct jinja_parser *p, const char *wanted);
int jinja_parse_enter(struct jinja_parser *p); /* one bracket or block deeper */
void jinja_parse_leave(struct jinja_parser *p);

void *jinja_parse_alloc(struct jinja_parser *p, size_t count, size_t size);
int jinja_new_node(struct jinja_parser *p, enum jinja_node_kind kind, struct jinja_node **out);
int jinja_push_node(struct jinja_parser *p, struct jinja_node_list *list, struct jinja_node *node);
int jinja_constant(struct jinja_parser *p, const char *data, uint32_t size,
                   struct jinja_value *out);
int jinja_intern(struct jinja_parser *p, const char *data, uint32_t size,
                 const struct jinja_name **out);
int jinja_expect_name(struct jinja_parser *p, const struct jinja_name **out);

int jinja_parse_expression(struct jinja_parser *p, bool conditional, struct jinja_node **out);
/* One expression, or several with commas between them: a tuple. It may end before `end_word`. */
int jinja_parse_tuple(struct jinja_parser *p, bool conditional, const char *end_word,
                      struct jinja_node **out);
/* Targets of `set` and `for`: names, tuples of them, and ns.name where allowed. */
int jinja_parse_target(struct jinja_parser *p, const char *end_word, bool namespaces,
                       struct jinja_node **out);
/* "| name(...) | ..." around `node` (NULL: a block's body); `inline_start`: the first has no pipe.
 */
int jinja_parse_filters(struct jinja_parser *p, struct jinja_node *node, bool inline_start,
                        struct jinja_node **out);

#endif
