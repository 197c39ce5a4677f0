/* Declarations shared by the files that read grammars; for no others. */
#ifndef KEEPD_CONSTRAIN_GRAMMAR_INT_H
#define KEEPD_CONSTRAIN_GRAMMAR_INT_H

#include "constrain/grammar.h"

#define GRAMMAR_CHAINS 1024u

/* A rule by its name, which lies in the grammar's text. */
struct grammar_rule {
    const char *name;
    size_t size;
    size_t place;  /* offset of its first mention */
    uint32_t rule; /* number in the pool */
    uint32_t next; /* 1 + the next one with the same hash */
    bool defined;
};

struct grammar {
    struct node_pool *pool;
    const char *text;
    size_t size, at;
    struct grammar_rule *rules;
    uint32_t count, capacity;
    uint32_t heads[GRAMMAR_CHAINS];
    int depth;       /* groups inside each other */
    uint32_t behind; /* node that follows the root: what %ignore names, or NODE_EMPTY */
    struct fault *fault;
    int rc; /* the first error; it stays */
};

/* Notes a fault at an offset of the text, with its line and column; returns NODE_NONE. */
uint32_t grammar_refuse(struct grammar *g, int rc, size_t at, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static inline bool grammar_ended(const struct grammar *g) {
    return g->at >= g->size || g->rc != 0 || g->pool->rc != 0;
}
static inline char grammar_peek(const struct grammar *g) {
    return g->at < g->size ? g->text[g->at] : '\0';
}
/* Returns whether names of GBNF's rules may have this character. */
static inline bool grammar_is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
}
/* Returns whether the grammar's text at `at` is this one. */
bool grammar_is(const struct grammar *g, size_t at, const char *text);
bool grammar_take(struct grammar *g, const char *text);

/* Returns the rule with this name; its first mention creates it. NULL: no memory, or too many
 * rules. The pointer is valid until the next call. */
struct grammar_rule *grammar_find(struct grammar *g, const char *name, size_t size, size_t place);
uint32_t grammar_mention(struct grammar *g, const char *name, size_t size, size_t place);
void grammar_define(struct grammar *g, const char *name, size_t size, size_t place, uint32_t body);

/* Reads the character of an escape; `at` is after the backslash. -1: refused. */
int64_t grammar_escape(struct grammar *g);
/* Reads a text in double quotes, whose first quote has been read; `fold`: case does not count. */
uint32_t grammar_quoted(struct grammar *g, bool fold);
/* Reads a number of digits. -1: there are none. */
int64_t grammar_number(struct grammar *g);
bool grammar_enter(struct grammar *g); /* enters a group; false: the groups are nested too deep,
                                          which is refused */

/* Read all rules of the text. */
void gbnf_read(struct grammar *g);
void lark_read(struct grammar *g);

#endif
