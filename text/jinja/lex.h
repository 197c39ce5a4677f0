/* Lexer: a template's source to tokens, with the white space rules of trim_blocks, lstrip_blocks
 * and keep_trailing_newline=False applied. */
#ifndef KEEPD_TEXT_JINJA_LEX_H
#define KEEPD_TEXT_JINJA_LEX_H

#include "base/arena.h"
#include "base/err.h"
#include "text/jinja/value.h"

enum jinja_token_kind {
    JINJA_TOKEN_DATA,
    JINJA_TOKEN_VARIABLE_BEGIN,
    JINJA_TOKEN_VARIABLE_END,
    JINJA_TOKEN_BLOCK_BEGIN,
    JINJA_TOKEN_BLOCK_END,
    JINJA_TOKEN_NAME,
    JINJA_TOKEN_STRING,
    JINJA_TOKEN_NUMBER,
    JINJA_TOKEN_ADD,
    JINJA_TOKEN_SUB,
    JINJA_TOKEN_MUL,
    JINJA_TOKEN_DIV,
    JINJA_TOKEN_FLOORDIV,
    JINJA_TOKEN_MOD,
    JINJA_TOKEN_POW,
    JINJA_TOKEN_TILDE,
    JINJA_TOKEN_EQ,
    JINJA_TOKEN_NE,
    JINJA_TOKEN_GT,
    JINJA_TOKEN_GE,
    JINJA_TOKEN_LT,
    JINJA_TOKEN_LE,
    JINJA_TOKEN_ASSIGN,
    JINJA_TOKEN_DOT,
    JINJA_TOKEN_COLON,
    JINJA_TOKEN_PIPE,
    JINJA_TOKEN_COMMA,
    JINJA_TOKEN_SEMICOLON,
    JINJA_TOKEN_LPAREN,
    JINJA_TOKEN_RPAREN,
    JINJA_TOKEN_LBRACKET,
    JINJA_TOKEN_RBRACKET,
    JINJA_TOKEN_LBRACE,
    JINJA_TOKEN_RBRACE,
    JINJA_TOKEN_EOF,
};

struct jinja_token {
    enum jinja_token_kind kind;
    int line;
    const char *text; /* DATA, NAME and STRING (unescaped), not NUL-terminated */
    uint32_t size;
    struct jinja_value number; /* INT, BIG or FLOAT */
};

struct jinja_tokens {
    struct jinja_token *items; /* the last is EOF */
    uint32_t count;
};

/* `source`: valid UTF-8 that lives as long as the arena. Everything goes into `arena`. */
int jinja_lex(const char *source, size_t size, struct arena *arena, struct jinja_tokens *out,
              struct fault *fault);
/* After the template's arena gave NULL: ERR_LIMIT where its ceiling was reached, else ERR_NOMEM. */
int jinja_compile_memory(const struct arena *arena, struct fault *fault);
const char *jinja_token_name(enum jinja_token_kind kind); /* for messages */
/* A constant string in the template's memory; NULL: out of memory. */
struct jinja_text *jinja_constant_text(struct arena *arena, const char *data, uint32_t size);

#endif
