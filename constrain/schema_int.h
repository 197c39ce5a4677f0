/* Declarations shared by the files that compile schemas; for no others. */
#ifndef KEEPD_CONSTRAIN_SCHEMA_INT_H
#define KEEPD_CONSTRAIN_SCHEMA_INT_H

#include "base/arena.h"
#include "constrain/schema.h"

enum schema_type {
    SCHEMA_NULL = 1,
    SCHEMA_BOOLEAN = 2,
    SCHEMA_INTEGER = 4,
    SCHEMA_FRACTION = 8, /* a number that is not an integer; "number" has both bits */
    SCHEMA_STRING = 16,
    SCHEMA_ARRAY = 32,
    SCHEMA_OBJECT = 64,
    SCHEMA_TYPES = 127
};

/* Keywords of a schema that were already taken into account, so that they are skipped. */
enum { SKIP_REF = 1, SKIP_ALL = 2, SKIP_ANY = 4, SKIP_ONE = 8, SKIP_ENUM = 16 };

/* The instance must satisfy several schemas at the same time; this is one of them. */
struct conjunct {
    const cJSON *schema; /* an object */
    unsigned skip;
};

/* Schemas that an instance has to satisfy at the same time; an empty list allows anything. It lies
 * in the arena. */
struct conjunction {
    const struct conjunct *list;
    int count;
    bool never; /* `false` is among the schemas */
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
    enum schema_form form;             /* how the instances being built are written */
    const struct constrain_tags *tags; /* as in struct schema_options */
    bool closed;                       /* as in struct schema_options */
    unsigned types;                    /* SCHEMA_TEXT: the constrain_types of the parameter */
    uint32_t texts[64]; /* [types] the strings that may be a SCHEMA_TEXT; 0: not built yet */
    int depth, branches;
    int rc; /* the first error; it stays */
    struct fault *fault;
};

/* Notes a fault at `keyword` (NULL: none) of the schema `at`; returns NODE_NONE. */
uint32_t schema_refuse(struct schema *s, int rc, const cJSON *at, const char *keyword,
                       const char *format, ...) __attribute__((format(printf, 5, 6)));
void *schema_alloc(struct schema *s, size_t count, size_t size); /* NULL: a fault was noted */

/* Returns a string of the document as text, in the arena; it may hold U+0000. NULL: a fault was
 * noted. */
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
const char *schema_canonical(struct schema *s, const cJSON *value); /* NULL: a fault was noted */
/* Returns the set of values: those of an enum if `list` is true, otherwise the one value of a
 * const. NULL: a fault was noted, or the pool has an error. */
const struct value_set *schema_values(struct schema *s, const cJSON *node, bool list);
bool value_set_has(const struct value_set *set, const char *text);
bool value_sets_apart(const struct value_set *a, const struct value_set *b);

/* ---- Conjunctions ---- */

/* Opens a conjunction with room for `count` schemas, which schema_add adds. */
struct conjunction schema_open(struct schema *s, int count);
/* Adds a schema: an object, true or false. NULL adds nothing. `at` is its parent, for faults. */
void schema_add(struct schema *s, struct conjunction *conjunction, const cJSON *schema);

/* Adds the schemas that the conjuncts refer to by $ref and allOf, until no such keyword is left. */
struct conjunction schema_flatten(struct schema *s, const struct conjunction *c);
/* Returns the expression of a conjunction. */
uint32_t schema_node(struct schema *s, struct conjunction conjunction);

/* Returns a schema equivalent to the keywords if, not and dependencies of a schema. NULL: it has
 * none of them to rewrite, or they were refused. Calls for the same schema return the same pointer.
 */
const cJSON *schema_rewritten(struct schema *s, const cJSON *schema);
bool schema_is_rewritten(struct schema *s, const cJSON *schema);
/* Returns a schema of the instances that a schema rejects, the same pointer for the same schema.
 * NULL: no exact one can be written. */
const cJSON *schema_opposite(struct schema *s, const cJSON *schema);
/* Returns {"const": value}. */
const cJSON *schema_const(struct schema *s, const cJSON *value);
/* Returns whether a value of `not` is enforced without being rewritten: types, strings, or a
 * pattern. */
bool schema_not_is_plain(const cJSON * not );
/* Returns a schema of the instances that only this branch of the oneOf of `at` has. */
const cJSON *schema_only(struct schema *s, const cJSON *at, const cJSON *branch,
                         const cJSON *branches);

/* Each function builds the instances of one type. The conjuncts are resolved: they hold no $ref,
 * allOf, anyOf, oneOf, enum or const. */
uint32_t schema_string(struct schema *s, const struct conjunction *c);
uint32_t schema_array(struct schema *s, const struct conjunction *c);

/* The elements of an array, where they depend on each other (schema_list.c). */
struct element_list {
    const struct conjunction *elements; /* [size] conditions on the first elements */
    uint32_t size;
    const struct conjunction *rest; /* conditions on the elements after them; NULL: none */
    uint32_t min, max;              /* number of elements */
    const cJSON *at;                /* the schema with the keyword */
};
/* Returns whether the document's draft has the keywords minContains and maxContains. Drafts up to 7
 * do not. */
bool schema_counts_contains(const struct schema *s);
/* Builds the elements between the brackets, at least one, of which as many satisfy `contains` as
 * the keywords of `at` demand. *may_be_empty: an empty array satisfies them, too. */
uint32_t schema_contains(struct schema *s, const struct element_list *list, bool *may_be_empty);
/* Builds in *node the elements between the brackets: at least one, and all different. false: an
 * expression cannot compare them, because their values are not given by enum, const or the types
 * boolean and null, or are too many. */
bool schema_unique(struct schema *s, const struct element_list *list, uint32_t *node);
uint32_t schema_object(struct schema *s, const struct conjunction *c, enum schema_form form);

/* Returns those strings of `content`, an expression over characters, that may stand unquoted in the
 * form s->form. */
uint32_t schema_tag_text(struct schema *s, uint32_t content);
/* Returns the text in a name because of which it cannot stand in a tag; NULL: it can. */
const char *schema_tag_fault(const struct constrain_tags *tags, const char *name);
/* Returns a member as a tag. `mark`: tags->value or one of tags->typed. */
uint32_t schema_tag(struct schema *s, const char *name, const char *mark, uint32_t value);
/* Returns whether arrays and objects are tags in the form s->form. */
static inline bool schema_nests(const struct schema *s) {
    return s->form == SCHEMA_TEXT && s->tags->item != NULL;
}
/* [i] the schema of the type 1 << i (enum constrain_type) */
extern const cJSON schema_of_type[CONSTRAIN_TYPE_COUNT];

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
