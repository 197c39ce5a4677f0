/* A compiled template: the syntax tree that the parser builds and the evaluator walks. Immutable
 * once built. */
#ifndef KEEPD_TEXT_JINJA_AST_H
#define KEEPD_TEXT_JINJA_AST_H

#include "text/jinja/value.h"

/* An identifier; one per spelling, so names are compared by address. */
struct jinja_name {
    const char *text; /* NUL-terminated */
    uint32_t size;
    uint32_t id; /* 0, 1, 2, ... in order of first use: index of its global variable */
    struct jinja_value string;
};

enum jinja_node_kind {
    /* expressions */
    JINJA_NODE_CONST,   /* value */
    JINJA_NODE_NAME,    /* name */
    JINJA_NODE_LIST,    /* items */
    JINJA_NODE_TUPLE,   /* items */
    JINJA_NODE_DICT,    /* items: key, value, key, value, ... */
    JINJA_NODE_COND,    /* a if b else c (c may be NULL) */
    JINJA_NODE_OR,      /* a, b */
    JINJA_NODE_AND,     /* a, b */
    JINJA_NODE_NOT,     /* a */
    JINJA_NODE_COMPARE, /* a, then items[i] compared by ops[i] */
    JINJA_NODE_BINARY,  /* a op b */
    JINJA_NODE_CONCAT,  /* items */
    JINJA_NODE_NEGATE,  /* a */
    JINJA_NODE_PLUS,    /* a */
    JINJA_NODE_GETATTR, /* a . name */
    JINJA_NODE_GETITEM, /* a [ b ] */
    JINJA_NODE_SLICE,   /* a [ items[0] : items[1] : items[2] ], each may be NULL */
    JINJA_NODE_CALL,    /* a ( call ) */
    JINJA_NODE_FILTER,  /* a | builtin ( call ); a NULL: the body of a filter block */
    JINJA_NODE_TEST,    /* a is builtin ( call ) */
    JINJA_NODE_NSREF,   /* name . b's constant: target of an assignment only */
    /* statements */
    JINJA_NODE_TEXT,         /* value */
    JINJA_NODE_PRINT,        /* a */
    JINJA_NODE_BLOCK,        /* items */
    JINJA_NODE_SCOPE,        /* items, variables set inside stay inside (generation) */
    JINJA_NODE_IF,           /* items: test, body, test, body, ..., [else body] */
    JINJA_NODE_FOR,          /* for a in b if c: body, items[0]: else body or NULL */
    JINJA_NODE_SET,          /* a = b */
    JINJA_NODE_SET_BLOCK,    /* a = body, through filter b or NULL */
    JINJA_NODE_WITH,         /* items: target, value, ...; body */
    JINJA_NODE_MACRO,        /* macro */
    JINJA_NODE_CALL_BLOCK,   /* macro is the caller of call node a */
    JINJA_NODE_FILTER_BLOCK, /* a is the filter, body */
    JINJA_NODE_BREAK,
    JINJA_NODE_CONTINUE,
};

enum jinja_op {
    JINJA_OP_ADD,
    JINJA_OP_SUB,
    JINJA_OP_MUL,
    JINJA_OP_DIV,
    JINJA_OP_FLOORDIV,
    JINJA_OP_MOD,
    JINJA_OP_POW,
    JINJA_OP_EQ,
    JINJA_OP_NE,
    JINJA_OP_LT,
    JINJA_OP_LE,
    JINJA_OP_GT,
    JINJA_OP_GE,
    JINJA_OP_IN,
    JINJA_OP_NOT_IN,
};

struct jinja_node;

struct jinja_call_keyword {
    struct jinja_value name;
    struct jinja_node *value;
};

struct jinja_call {
    struct jinja_node **items;
    struct jinja_call_keyword *keywords;
    uint32_t count, keyword_count;
    struct jinja_node *star, *star_star; /* *args, **kwargs; may be NULL */
};

struct jinja_macro_def {
    const struct jinja_name *name; /* NULL: the body of a call block */
    const struct jinja_name **params;
    struct jinja_node **defaults; /* [count], NULL where there is none */
    uint32_t count;
    struct jinja_node *body;
    bool uses_caller, uses_varargs, uses_kwargs; /* named in its body */
};

struct jinja_node {
    uint8_t kind;   /* enum jinja_node_kind */
    uint8_t op;     /* enum jinja_op of BINARY */
    bool recursive; /* FOR */
    int line;
    uint32_t count; /* items */
    struct jinja_node **items;
    struct jinja_node *a, *b, *c, *body;
    uint8_t *ops; /* enum jinja_op of COMPARE */
    const struct jinja_name *name;
    const struct jinja_builtin *builtin; /* NULL: unknown, an error when it is reached */
    struct jinja_call *call;
    struct jinja_macro_def *macro;
    struct jinja_value value;
};

struct jinja_template {
    struct arena arena;
    struct jinja_node *body;
    struct jinja_name **names; /* by id */
    uint32_t name_count;
    /* names the evaluator itself binds */
    const struct jinja_name *loop, *caller, *varargs, *kwargs;
};

#endif
