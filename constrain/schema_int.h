/* Declarations shared by the files that compile schemas; for no others. */
#ifndef KEEPD_CONSTRAIN_SCHEMA_INT_H
#define KEEPD_CONSTRAIN_SCHEMA_INT_H

#include "base/arena.h"
#include "constrain/schema.h"

enum schema_type {
    SCHEMA_NULL = 1,
    SCHEMA_BOOLEAN = 2,
    SCHEMA_INTEGER = 4,
    SCHEMA_FRACTION = 8, /* a number that is not an integer; "number" is both */
    SCHEMA_STRING = 16,
    SCHEMA_ARRAY = 32,
    SCHEMA_OBJECT = 64,
    SCHEMA_TYPES = 127
};

/* Keywords of a schema that were already taken into account. */
enum { SKIP_REF = 1, SKIP_ALL = 2, SKIP_ANY = 4, SKIP_ONE = 8, SKIP_ENUM = 16 };

/* A conjunct: one of the schemas that an instance has to satisfy at once. */
struct conjunct {
    const cJSON *schema; /* an object */
    unsigned skip;
};

/* The conjunction of schemas; empty: anything. In the arena. */
struct conjunction {
    const struct conjunct *list;
    int count;
    bool never; /* a schema among them is `false` */
};

struct schema_memo;     /* schema.c */
struct schema_index;    /* schema_index.c */
struct schema_rewrites; /* schema_rewrite.c */
struct rewrite_row;

struct schema {
    struct json_nodes *nodes;
    struct node_pool *pool;
    const cJSON *root;
    const char *field;
    struct arena arena;
    struct schema_memo *memo;
    struct schema_index *index;        /* NULL until needed */
    struct schema_rewrites *rewrites;  /* NULL until needed */
    struct rewrite_row *rewriting;     /* schemas being rewritten, the innermost first */
    enum schema_form form;             /* the present form of instances */
    const struct constrain_tags *tags; /* struct schema_options */
    bool closed;                       /* struct schema_options */
    unsigned types;                    /* SCHEMA_TEXT: constrain_types of the parameter */
    uint32_t texts[64];                /* by `types`: strings that may be TEXT; 0: not built */
    int depth, branches;
    int rc; /* sticks */
    struct fault *fault;
};

/* Notes a fault at `keyword` (NULL: none) of the schema `at`; returns NODE_NONE. */
uint32_t schema_refuse(struct schema *s, int rc, const cJSON *at, const char *keyword,
                       const char *format, ...) __attribute__((format(printf, 5, 6)));
void *schema_alloc(struct schema *s, size_t count, size_t size); /* NULL: noted */

/* Returns a string of the document as text, which may hold U+0000; in the arena. NULL: noted. */
const char *schema_text(struct schema *s, const char *string, size_t *size);

/* ---- Tables of the document (schema_index.c) ---- */

static inline uint32_t schema_hash(const char *text) {
    uint32_t hash = 2166136261u;
    for (; *text != '\0'; text++) hash = (hash ^ (unsigned char)*text) * 16777619u;
    return hash ^ hash >> 15;
}

/* Does what json_get does, for objects that may be large. */
const cJSON *schema_member(struct schema *s, const cJSON *object, const char *name);

/* A schema with a name. `resource`: the schema around it that has an $id, or the document. */
struct schema_named {
    const char *value, *keyword; /* "$id", "id", "$anchor" */
    const cJSON *node, *resource;
};
/* Returns the resource that contains the schema `at`, which has a $ref. */
const cJSON *schema_resource(struct schema *s, const cJSON *at);
/* Makes a copy of a schema resolve its $ref as the original does. */
void schema_note_copy(struct schema *s, const cJSON *copy, const cJSON *original);
/* Returns the schema with this keyword and value, in a resource (NULL: in any). NULL: there is
 * none, or more than one. */
const cJSON *schema_find_named(struct schema *s, const cJSON *resource, const char *keyword,
                               const char *value);

/* Values as canonical texts, sorted: two values have the same text exactly if they are equal. */
struct value_set {
    const char **texts;
    size_t count;
};
const char *schema_canonical(struct schema *s, const cJSON *value); /* NULL: noted */
/* Returns the values of an enum (`list`), or the one of a const. NULL: noted, or the pool's error.
 */
const struct value_set *schema_values(struct schema *s, const cJSON *node, bool list);
bool value_set_has(const struct value_set *set, const char *text);
bool value_sets_apart(const struct value_set *a, const struct value_set *b);

/* ---- Conjunctions ---- */

/* Room for `count` schemas, to be filled with schema_add. */
struct conjunction schema_open(struct schema *s, int count);
/* Adds a schema: an object, true or false. NULL: nothing. `at` is its parent, for faults. */
void schema_add(struct schema *s, struct conjunction *conjunction, const cJSON *schema);

/* Adds what the schemas refer to, and their allOf, until nothing of the kind is left. */
struct conjunction schema_flatten(struct schema *s, const struct conjunction *c);
/* Returns the expression of a conjunction. */
uint32_t schema_node(struct schema *s, struct conjunction conjunction);

/* Returns a schema equivalent to the keywords if, not and dependencies of a schema. NULL: it has
 * none of them to rewrite, or they were refused. Calls for the same schema return the same pointer.
 */
const cJSON *schema_rewritten(struct schema *s, const cJSON *schema);
bool schema_is_rewritten(struct schema *s, const cJSON *schema);
/* Returns a schema of the instances that a schema rejects, the same pointer for the same schema.
 * NULL: none is exact. */
const cJSON *schema_opposite(struct schema *s, const cJSON *schema);
/* Returns {"const": value}. */
const cJSON *schema_const(struct schema *s, const cJSON *value);
/* Is it a value of `not` that is enforced as it is: types, strings, a pattern? */
bool schema_not_is_plain(const cJSON * not );
/* The instances of one branch of the oneOf of `at` that no other branch has. */
const cJSON *schema_only(struct schema *s, const cJSON *at, const cJSON *branch,
                         const cJSON *branches);

/* Each function builds the instances of one type. The conjuncts are resolved: they hold no $ref,
 * allOf, anyOf, oneOf, enum or const. */
uint32_t schema_string(struct schema *s, const struct conjunction *c);
uint32_t schema_array(struct schema *s, const struct conjunction *c);

/* Elements that depend on each other (schema_list.c). */
struct element_list {
    const struct conjunction *elements; /* [size] the first ones */
    uint32_t size;
    const struct conjunction *rest; /* the others; NULL: there are none */
    uint32_t min, max;              /* number of elements */
    const cJSON *at;                /* the schema with the keyword */
};
/* Are minContains and maxContains keywords of the document's draft? Drafts up to 7 have neither. */
bool schema_counts_contains(const struct schema *s);
/* Elements between the brackets, at least one of them, of which as many as the keywords of `at` say
 * satisfy its `contains`. *may_be_empty: or none. */
uint32_t schema_contains(struct schema *s, const struct element_list *list, bool *may_be_empty);
/* Builds in *node different elements between the brackets, at least one. false: their values are
 * not given by enum, const or the types boolean and null, or are too many, so that an expression
 * cannot compare them. */
bool schema_unique(struct schema *s, const struct element_list *list, uint32_t *node);
uint32_t schema_object(struct schema *s, const struct conjunction *c, bool tagged);

/* Returns the strings of an expression over characters that may stand as they are, by s->form. */
uint32_t schema_tag_text(struct schema *s, uint32_t content);
/* Returns a member as a tag. `mark`: tags->value or tags->other. */
uint32_t schema_tag(struct schema *s, const char *name, const char *mark, uint32_t value);
/* Schemas of strings, and of all that is none. */
extern const cJSON schema_of_strings, schema_of_others;

/* Reads a count such as minItems from all conjuncts. *value becomes the largest or the smallest of
 * these counts and of itself. */
void schema_count(struct schema *s, const struct conjunction *c, const char *keyword, bool smallest,
                  uint32_t *value);
/* Returns `pattern` of the schema `at` as an expression over characters. */
uint32_t schema_pattern(struct schema *s, const cJSON *at, const char *keyword,
                        const char *pattern);
/* Returns the strings, not quoted, that a conjunction of schemas of strings allows, such as one of
 * propertyNames. */
uint32_t schema_content(struct schema *s, const struct conjunction *c);

#endif
