/* Objects of a schema: named members in the schema's order, then all others. */
#include <string.h>

#include "base/json.h"
#include "constrain/constrain.h"
#include "constrain/schema_int.h"

#define NAMES_MAX 8192

/* A member that the schema names. */
struct named {
    const char *name;
    uint32_t node; /* "name": value; NODE_NONE: the member may not be present */
    bool required;
    uint32_t next; /* 1 + the next name with the same hash */
};

/* One entry of patternProperties: a pattern, and the schema for members with such names. */
struct pattern {
    int conjunct;
    uint32_t content; /* expression over the characters of a name */
    const cJSON *schema;
};

/* The keywords of one conjunct that are needed for each name. */
struct members {
    const cJSON *own, *others; /* properties and additionalProperties; NULL: absent */
    const cJSON *listed;       /* the enum of propertyNames; NULL: absent */
};

struct object {
    struct schema *s;
    const struct conjunction *c;
    struct members *members; /* [c->count] */
    struct named *names;
    int name_count;
    uint32_t *heads; /* [heads_size] hash chains of `names`: 1 + index of the first; 0: empty */
    uint32_t heads_size;
    struct pattern patterns[CONSTRAIN_PATTERNS_MAX];
    int pattern_count;
    uint32_t allowed; /* names that propertyNames allows */
    uint32_t own;     /* all names that the schema gives */
    uint32_t others;  /* a member whose name the schema does not give; NODE_NONE: not allowed */
    uint32_t min, max;
    bool closed;           /* only declared members are allowed (struct schema_options) */
    enum schema_form form; /* TAGGED, TEXT: tags in tags; ARGUMENTS; others: JSON, or the notation's
                              inner objects */
    uint32_t comma;        /* stands between members */
};

/* Returns whether members are tags (constrain/schema.h). */
static bool is_tagged(const struct object *o) {
    return o->form == SCHEMA_TAGGED || (o->form == SCHEMA_TEXT && o->s->tags->item != NULL);
}

/* ---- Reading ---- */

static struct named *find_name(struct object *o, const char *name) {
    uint32_t *head = &o->heads[schema_hash(name) & (o->heads_size - 1)];
    for (uint32_t i = *head; i != 0; i = o->names[i - 1].next) {
        (void)node_work(o->s->pool, 1);
        if (strcmp(o->names[i - 1].name, name) == 0) return &o->names[i - 1];
    }
    o->names[o->name_count] = (struct named){.name = name, .node = NODE_NONE, .next = *head};
    *head = (uint32_t)o->name_count + 1;
    return &o->names[o->name_count++];
}

/* Returns the enum that the value of propertyNames has or refers to, with at most as many names as
 * an object may have; NULL: there is none. These names are written like those of `properties`: each
 * once, and in the order of the list. */
static const cJSON *listed_names(struct schema *s, const cJSON *names) {
    struct conjunction one = schema_open(s, 1);
    if (!cJSON_IsObject(names) || s->rc != 0) return NULL;
    schema_add(s, &one, names);
    struct conjunction all = schema_flatten(s, &one);
    for (int i = 0; i < all.count && s->rc == 0; i++) {
        const cJSON *list = json_get(all.list[i].schema, "enum");
        if (cJSON_IsArray(list) && cJSON_GetArraySize(list) <= NAMES_MAX / 2) return list;
    }
    return NULL;
}

static void collect_names(struct object *o) {
    struct schema *s = o->s;
    const cJSON *child;
    int room = 0;
    o->members = schema_alloc(s, (size_t)o->c->count, sizeof *o->members);
    if (o->members == NULL) return;
    for (int i = 0; i < o->c->count; i++) {
        const cJSON *schema = o->c->list[i].schema;
        o->members[i] = (struct members){.own = json_get(schema, "properties"),
                                         .others = json_get(schema, "additionalProperties")};
        o->members[i].listed = listed_names(s, json_get(schema, "propertyNames"));
        room += cJSON_GetArraySize(o->members[i].own) + cJSON_GetArraySize(o->members[i].listed) +
                cJSON_GetArraySize(json_get(schema, "required"));
    }
    if (room > NAMES_MAX)
        schema_refuse(s, ERR_LIMIT, NULL, NULL, "an object with more than %d names", NAMES_MAX);
    o->names = schema_alloc(s, (size_t)room, sizeof *o->names);
    for (o->heads_size = 16; o->heads_size < (uint32_t)room;) o->heads_size *= 2;
    o->heads = schema_alloc(s, o->heads_size, sizeof *o->heads);
    for (int i = 0; i < o->c->count && s->rc == 0; i++) {
        const cJSON *properties = o->members[i].own;
        if (properties && !cJSON_IsObject(properties)) {
            schema_refuse(s, ERR_INVALID, o->c->list[i].schema, "properties", "expected an object");
            return;
        }
        cJSON_ArrayForEach(child, properties) find_name(o, child->string);
    }
    for (int i = 0; i < o->c->count && s->rc == 0; i++)
        cJSON_ArrayForEach(child, o->members[i].listed) {
            if (cJSON_IsString(child)) find_name(o, child->valuestring);
        }
    for (int i = 0; i < o->c->count && s->rc == 0; i++) {
        const cJSON *required = json_get(o->c->list[i].schema, "required");
        if (cJSON_IsBool(required)) continue; /* in draft 3 `required` is a boolean */
        cJSON_ArrayForEach(child, required) {
            if (cJSON_IsString(child))
                find_name(o, child->valuestring)->required = true;
            else
                schema_refuse(s, ERR_INVALID, o->c->list[i].schema, "required",
                              "expected an array of names");
        }
    }
}

static void collect_patterns(struct object *o) {
    struct schema *s = o->s;
    for (int i = 0; i < o->c->count && s->rc == 0; i++) {
        const cJSON *schema = o->c->list[i].schema, *child;
        const cJSON *patterns = json_get(schema, "patternProperties");
        if (patterns && !cJSON_IsObject(patterns)) {
            schema_refuse(s, ERR_INVALID, schema, "patternProperties", "expected an object");
            return;
        }
        cJSON_ArrayForEach(child, patterns) {
            if (o->pattern_count == CONSTRAIN_PATTERNS_MAX) {
                schema_refuse(s, ERR_LIMIT, schema, "patternProperties",
                              "more than %d patterns meet in one object", CONSTRAIN_PATTERNS_MAX);
                return;
            }
            o->patterns[o->pattern_count++] = (struct pattern){
                i, schema_pattern(s, schema, "patternProperties", child->string), child};
        }
    }
}

/* Returns the names that a value of propertyNames allows, as an expression over their characters.
 * It is regular: strings hold no schemas, so a schema of names cannot be found inside itself. */
static uint32_t names_node(struct object *o, const cJSON *names) {
    struct schema *s = o->s;
    enum schema_form form = s->form;
    struct conjunction one = schema_open(s, 1);
    if (s->rc != 0) return NODE_NONE;
    schema_add(s, &one, names);
    s->form = SCHEMA_PLAIN;
    uint32_t node = schema_node(s, one);
    s->form = form;
    return node;
}

static void collect_allowed(struct object *o) {
    struct schema *s = o->s;
    o->allowed = s->nodes->any_text;
    for (int i = 0; i < o->c->count && s->rc == 0; i++) {
        const cJSON *schema = o->c->list[i].schema, *names = json_get(schema, "propertyNames");
        if (names == NULL || cJSON_IsTrue(names)) continue;
        if (!cJSON_IsObject(names) && !cJSON_IsFalse(names)) {
            schema_refuse(s, ERR_INVALID, schema, "propertyNames", "expected a schema");
            return;
        }
        o->allowed = node_and2(s->pool, o->allowed, names_node(o, names));
    }
}

/* Returns whether the schema declares members. A schema that a rewritten keyword makes, such as
 * "without the member a", declares none. */
static bool declares_members(const cJSON *properties) {
    const cJSON *child;
    if (!cJSON_IsObject(properties)) return false;
    cJSON_ArrayForEach(child, properties) {
        if (!cJSON_IsFalse(child)) return true;
    }
    return properties->child == NULL;
}

/* Returns whether the object may have only the declared members, as struct schema_options says. */
static bool is_closed(const struct object *o) {
    bool declares = false;
    if (!o->s->closed || o->min > (uint32_t)o->name_count) return false;
    for (int i = 0; i < o->c->count; i++) {
        const cJSON *others = o->members[i].others;
        const cJSON *left = json_get(o->c->list[i].schema, "unevaluatedProperties");
        declares = declares || declares_members(o->members[i].own);
        if ((others != NULL && !cJSON_IsFalse(others)) || (left != NULL && !cJSON_IsFalse(left)))
            return false;
    }
    return declares;
}

/* ---- Values ---- */

/* Builds the value of a member. `matched`: a bit for each pattern that its name matches. `name`:
 * NULL if the schema does not give the name. `also`: another schema that the value satisfies, or
 * NULL. */
static uint32_t value_node(struct object *o, const char *name, unsigned matched,
                           const cJSON *also) {
    struct schema *s = o->s;
    struct conjunction all = schema_open(s, o->c->count + o->pattern_count + 1);
    if (s->rc != 0) return NODE_NONE;
    schema_add(s, &all, also);
    for (int i = 0; i < o->c->count; i++) {
        const cJSON *own = name != NULL ? schema_member(s, o->members[i].own, name) : NULL;
        bool found = own != NULL;
        schema_add(s, &all, own);
        for (int k = 0; k < o->pattern_count; k++) {
            if (o->patterns[k].conjunct != i || !(matched >> k & 1)) continue;
            schema_add(s, &all, o->patterns[k].schema);
            found = true;
        }
        if (!found) schema_add(s, &all, o->members[i].others);
    }
    return schema_node(s, all);
}

static unsigned patterns_of(struct object *o, const char *text, size_t size) {
    unsigned matched = 0;
    for (int k = 0; k < o->pattern_count; k++)
        if (node_matches(o->s->pool, o->patterns[k].content, text, size)) matched |= 1u << k;
    return matched;
}

/* Builds the values of the types before which the tags have the same mark as before `type`, the
 * first of them. */
static uint32_t typed_values(struct object *o, const char *name, unsigned matched, int type) {
    struct schema *s = o->s;
    const char *const *typed = s->tags->typed;
    uint32_t list = node_list_open(s->pool);
    for (int i = type; i < CONSTRAIN_TYPE_COUNT; i++) {
        if (strcmp(typed[i], typed[type]) != 0) continue;
        const bool string = 1u << i == CONSTRAIN_TYPE_STRING;
        s->form = string ? SCHEMA_TEXT : SCHEMA_JSON;
        s->types = CONSTRAIN_TYPE_STRING;
        node_list_add(s->pool, value_node(o, name, matched, &schema_of_type[i]));
    }
    return node_list_alt(s->pool, list);
}

/* Builds a member as a tag. If the tags say the type of the value, it has a form for each. */
static uint32_t tag_node(struct object *o, const char *name, unsigned matched) {
    struct schema *s = o->s;
    const struct constrain_tags *tags = s->tags;
    s->form = SCHEMA_TEXT;
    if (tags->typed[0] == NULL) {
        s->types =
            o->form == SCHEMA_TEXT
                ? CONSTRAIN_TYPES_ALL
                : constrain_types(s->root, schema_member(s, json_get(s->root, "properties"), name));
        return schema_tag(s, name, tags->value, value_node(o, name, matched, NULL));
    }
    uint32_t list = node_list_open(s->pool);
    for (int i = 0; i < CONSTRAIN_TYPE_COUNT; i++) {
        bool seen = false;
        for (int k = 0; k < i; k++) seen = seen || strcmp(tags->typed[k], tags->typed[i]) == 0;
        if (seen) continue;
        uint32_t values = typed_values(o, name, matched, i);
        node_list_add(s->pool, schema_tag(s, name, tags->typed[i], values));
    }
    return node_list_alt(s->pool, list);
}

/* Builds a member between a name and its value. */
static uint32_t join_member(struct object *o, uint32_t name, uint32_t value) {
    return o->form == SCHEMA_ARGUMENTS ? json_argument(o->s->nodes, name, value)
                                       : json_member(o->s->nodes, name, value);
}

static uint32_t member_node(struct object *o, const char *name, unsigned matched) {
    struct schema *s = o->s;
    uint32_t written = json_name(s->nodes, name, o->form == SCHEMA_ARGUMENTS);
    if (written == NODE_NONE && s->pool->rc == 0)
        return schema_refuse(s, ERR_UNSUPPORTED, NULL, NULL,
                             "the name '%.64s' cannot be written in the model's notation", name);
    return join_member(o, written, value_node(o, name, matched, NULL));
}

static void build_names(struct object *o) {
    struct schema *s = o->s;
    for (int i = 0; i < o->name_count && s->rc == 0; i++) {
        struct named *named = &o->names[i];
        size_t size;
        const char *text = schema_text(s, named->name, &size);
        if (text == NULL) return;
        bool allowed =
            o->allowed == s->nodes->any_text || node_matches(s->pool, o->allowed, text, size);
        unsigned matched = patterns_of(o, text, size);
        named->node = !allowed       ? NODE_NONE
                      : is_tagged(o) ? tag_node(o, named->name, matched)
                                     : member_node(o, named->name, matched);
    }
}

/* Builds the quoted names that the schema does not give and that match exactly these patterns. */
static uint32_t key_node(struct object *o, unsigned matched) {
    struct schema *s = o->s;
    struct node_pool *pool = s->pool;
    uint32_t content = o->allowed, own = o->own;
    if (own != NODE_NONE) content = node_and2(pool, content, node_not(pool, own));
    for (int k = 0; k < o->pattern_count; k++) {
        uint32_t pattern = o->patterns[k].content;
        content = node_and2(pool, content, matched >> k & 1 ? pattern : node_not(pool, pattern));
    }
    const bool outermost = o->form == SCHEMA_ARGUMENTS;
    if (content == s->nodes->any_text) return json_names(s->nodes, content, outermost);
    content = node_live(pool, content);
    return content == NODE_NONE ? NODE_NONE : json_names(s->nodes, content, outermost);
}

static void collect_own(struct object *o) {
    struct schema *s = o->s;
    struct node_word *words = schema_alloc(s, (size_t)o->name_count, sizeof *words);
    for (int i = 0; i < o->name_count && s->rc == 0; i++)
        words[i].text = schema_text(s, o->names[i].name, &words[i].size);
    if (s->rc == 0) o->own = node_words(s->pool, words, (size_t)o->name_count);
}

static void build_others(struct object *o) {
    struct schema *s = o->s;
    if (is_tagged(o)) return;
    collect_own(o);
    uint32_t list = node_list_open(s->pool);
    for (unsigned matched = o->closed ? 1 : 0; matched < 1u << o->pattern_count && s->rc == 0;
         matched++) {
        uint32_t value = value_node(o, NULL, matched, NULL);
        if (value == NODE_NONE) continue;
        node_list_add(s->pool, join_member(o, key_node(o, matched), value));
    }
    o->others = node_list_alt(s->pool, list);
}

/* ---- Members ---- */

/* Builds the members whose names the schema does not give, after `count` other members. */
static uint32_t others_node(struct object *o, uint32_t count) {
    struct node_pool *pool = o->s->pool;
    uint32_t min = o->min > count ? o->min - count : 0;
    uint32_t max = o->max == NODE_ENDLESS ? NODE_ENDLESS : o->max - count;
    if (o->others == NODE_NONE) return min == 0 ? NODE_EMPTY : NODE_NONE;
    uint32_t next = node_seq(pool, o->comma, o->others);
    if (count > 0) return node_repeat(pool, next, min, max);
    if (max == 0) return NODE_NONE;
    return node_seq(
        pool, o->others,
        node_repeat(pool, next, min > 0 ? min - 1 : 0, max == NODE_ENDLESS ? max : max - 1));
}

/* Fills row `i` of the table from row i + 1. An entry is the text that may follow when the first i
 * names have been dealt with and `count` members were written (counted up to `most`). The empty
 * object is not included. */
static void object_fill_row(struct object *o, int i, uint32_t most, const uint32_t *below,
                            uint32_t *row) {
    struct node_pool *pool = o->s->pool;
    const struct named *named = &o->names[i];
    for (uint32_t count = 0; count <= most; count++) {
        uint32_t next = count < most ? count + 1 : count;
        bool may = o->max == NODE_ENDLESS || count < o->max;
        uint32_t member = may ? named->node : NODE_NONE;
        uint32_t tail = next == 0 ? NODE_NONE : below[next];
        if (count > 0) member = node_seq(pool, o->comma, member);
        if (next == count && !named->required && count > 0)
            row[count] = node_seq(pool, node_option(pool, member), tail);
        else
            row[count] = node_seq(pool, member, tail);
        if (next != count && !named->required)
            row[count] = node_alt2(pool, row[count], below[count]);
    }
}

static bool is_optional(const struct object *o) {
    for (int i = 0; i < o->name_count; i++)
        if (o->names[i].required) return false;
    return o->min == 0;
}

/* Builds the members by a table over the names. It has a column for each number of written members
 * that matters; without bounds there are two. */
static uint32_t members_node(struct object *o) {
    struct schema *s = o->s;
    uint32_t most = o->max != NODE_ENDLESS ? o->max : o->min > 1 ? o->min : 1;
    if (o->others == NODE_NONE && o->max != NODE_ENDLESS && o->max > (uint32_t)o->name_count) {
        o->max = NODE_ENDLESS; /* the names are fewer than the bound */
        most = o->min > 1 ? o->min : 1;
    }
    if (((uint64_t)most + 1) * ((uint64_t)o->name_count + 1) > 65536)
        return schema_refuse(s, ERR_LIMIT, o->c->list[0].schema, NULL,
                             "minProperties or maxProperties is too large for so many names");
    uint32_t *below = schema_alloc(s, most + 1, sizeof *below);
    uint32_t *row = schema_alloc(s, most + 1, sizeof *row);
    if (below == NULL || row == NULL) return NODE_NONE;
    for (uint32_t count = 0; count <= most; count++) below[count] = others_node(o, count);
    if (o->others == NODE_NONE) below[0] = NODE_NONE; /* schema_object adds the empty object */
    for (int i = o->name_count; i-- > 0;) {
        object_fill_row(o, i, most, below, row);
        uint32_t *swap = below;
        below = row;
        row = swap;
    }
    return below[0];
}

/* Refuses a minProperties that cannot be enforced. A reader drops members with the same name, so an
 * object may turn out to have fewer members than were written. */
static void check_min(struct object *o) {
    uint32_t required = 0;
    for (int i = 0; i < o->name_count; i++) required += o->names[i].required;
    if (o->others == NODE_NONE || o->min <= 1 || o->min <= required) return;
    schema_refuse(
        o->s, ERR_UNSUPPORTED, o->c->list[0].schema, "minProperties",
        "minProperties above 1 is supported where the names are given by 'properties', or "
        "'required' has as many");
}

/* Returns whether the members of an inner object can be tags. A tag's end repeats its name, which
 * an expression can do only for names that the schema gives. */
static bool has_tag_names(const struct object *o) {
    for (int i = 0; i < o->name_count; i++)
        if (strcmp(o->names[i].name, o->s->tags->item) == 0 ||
            schema_tag_fault(o->s->tags, o->names[i].name) != NULL)
            return false;
    return o->name_count > 0;
}

uint32_t schema_object(struct schema *s, const struct conjunction *c, enum schema_form form) {
    struct object o = {.s = s, .c = c, .max = NODE_ENDLESS, .form = form};
    collect_names(&o);
    if (schema_nests(s) && s->rc == 0 && !has_tag_names(&o)) s->form = o.form = SCHEMA_JSON;
    o.comma = is_tagged(&o) ? NODE_EMPTY : s->nodes->comma;
    collect_patterns(&o);
    collect_allowed(&o);
    schema_count(s, c, "minProperties", false, &o.min);
    schema_count(s, c, "maxProperties", true, &o.max);
    if (s->rc != 0 || o.min > o.max) return NODE_NONE;
    o.closed = is_closed(&o);
    build_names(&o);
    build_others(&o);
    if (s->rc == 0) check_min(&o);
    if (s->rc != 0 || s->pool->rc != 0) return NODE_NONE;
    bool may_be_empty = is_optional(&o);
    uint32_t members = o.max == 0 ? NODE_NONE : members_node(&o);
    if (is_tagged(&o) && form == SCHEMA_TEXT)
        return may_be_empty ? node_alt2(s->pool, members, node_text(s->pool, "{}", 2)) : members;
    if (form == SCHEMA_TAGGED) return may_be_empty ? node_option(s->pool, members) : members;
    if (members == NODE_NONE && may_be_empty) {
        members = NODE_EMPTY;
        may_be_empty = false;
    }
    return form == SCHEMA_ARGUMENTS ? json_arguments(s->nodes, members, may_be_empty)
                                    : json_braces(s->nodes, members, may_be_empty);
}
