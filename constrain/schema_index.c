/* Tables over a schema document, each built when it is first needed: members of large objects,
 * schemas with a name ($id, $anchor), and the values of enum and const in one canonical form. With
 * them a document of n values is compiled without n * n comparisons. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "constrain/number.h"
#include "constrain/schema_int.h"

#define FEW_MEMBERS 16 /* an object with fewer members is searched without a table */
#define CHAINS      256u

struct member_table {
    const cJSON *object;
    const cJSON **slots;
    uint32_t size; /* a power of two */
    struct member_table *next;
};

struct value_table {
    const cJSON *node;
    struct value_set set;
    struct value_table *next;
};

struct ref_place {
    const cJSON *schema, *resource;
};

/* A schema with $ref that is not part of the document, but a copy of one that is. */
struct ref_copy {
    struct ref_place place;
    struct ref_copy *next;
};

struct schema_index {
    struct member_table *members[CHAINS];
    struct value_table *values[CHAINS];
    struct schema_named *named; /* sorted; NULL = not built */
    size_t named_count, named_room;
    struct ref_place *places; /* sorted */
    size_t place_count, place_room;
    struct ref_copy *copies[CHAINS];
    bool walked;
};

static uint32_t chain_of(const void *pointer) {
    return (uint32_t)((uint64_t)(uintptr_t)pointer * 0x9E3779B97F4A7C15u >> 56) & (CHAINS - 1);
}

static struct schema_index *index_of(struct schema *s) {
    if (s->index == NULL) s->index = schema_alloc(s, 1, sizeof *s->index);
    return s->index;
}

/* ---- Members ---- */

/* Returns the place of a name in the table, or the free place where it would go. Many names with
 * the same hash make the search long, so each comparison counts as work. NULL: too much work. */
static const cJSON **index_slot_of(struct schema *s, const struct member_table *table,
                                   const char *name) {
    uint32_t at = schema_hash(name) & (table->size - 1);
    while (table->slots[at] != NULL && strcmp(table->slots[at]->string, name) != 0) {
        if (!node_work(s->pool, 1)) return NULL;
        at = (at + 1) & (table->size - 1);
    }
    return &table->slots[at];
}

static const struct member_table *table_of(struct schema *s, const cJSON *object) {
    struct schema_index *index = index_of(s);
    if (index == NULL) return NULL;
    struct member_table **chain = &index->members[chain_of(object)], *table = *chain;
    while (table != NULL && table->object != object) table = table->next;
    if (table != NULL) return table;
    uint32_t count = (uint32_t)cJSON_GetArraySize(object), size = 64;
    while (size < 2 * count) size *= 2;
    table = schema_alloc(s, 1, sizeof *table);
    const cJSON **slots = schema_alloc(s, size, sizeof(const cJSON *));
    if (table == NULL || slots == NULL || !node_work(s->pool, count)) return NULL;
    *table = (struct member_table){object, slots, size, *chain};
    *chain = table;
    const cJSON *child, **slot;
    cJSON_ArrayForEach(child, object) {
        if ((slot = index_slot_of(s, table, child->string)) == NULL) return NULL;
        *slot = child;
    }
    return table;
}

const cJSON *schema_member(struct schema *s, const cJSON *object, const char *name) {
    int count = 0;
    if (!cJSON_IsObject(object)) return NULL;
    for (const cJSON *child = object->child; child != NULL && count < FEW_MEMBERS;
         child = child->next)
        count++;
    if (count < FEW_MEMBERS) return json_get(object, name);
    const struct member_table *table = table_of(s, object);
    const cJSON **slot = table != NULL ? index_slot_of(s, table, name) : NULL;
    return slot == NULL || cJSON_IsNull(*slot) ? NULL : *slot;
}

/* ---- Named schemas ---- */

static void index_add_named(struct schema *s, struct schema_index *index, struct schema_named row) {
    if (index->named_count == index->named_room) {
        size_t room = index->named_room > 0 ? index->named_room * 2 : 64;
        struct schema_named *grown = schema_alloc(s, room, sizeof *grown);
        if (grown == NULL) return;
        if (index->named_count > 0) memcpy(grown, index->named, index->named_count * sizeof *grown);
        index->named = grown;
        index->named_room = room;
    }
    index->named[index->named_count++] = row;
}

/* Adds a schema with $ref that lies in a resource other than the document. */
static void add_place(struct schema *s, struct schema_index *index, struct ref_place row) {
    if (index->place_count == index->place_room) {
        size_t room = index->place_room > 0 ? index->place_room * 2 : 64;
        struct ref_place *grown = schema_alloc(s, room, sizeof *grown);
        if (grown == NULL) return;
        if (index->place_count > 0)
            memcpy(grown, index->places, index->place_count * sizeof *grown);
        index->places = grown;
        index->place_room = room;
    }
    index->places[index->place_count++] = row;
}

/* Collects the named schemas below a node. `resource`: the schema with $id around it, or the
 * document. */
static void walk_named(struct schema *s, struct schema_index *index, const cJSON *tree,
                       const cJSON *resource) {
    const cJSON *id = cJSON_IsObject(tree) ? json_get(tree, "$id") : NULL, *child;
    const cJSON *old = cJSON_IsObject(tree) ? json_get(tree, "id") : NULL;
    const cJSON *anchor = cJSON_IsObject(tree) ? json_get(tree, "$anchor") : NULL;
    if (!node_work(s->pool, 1)) return;
    if (cJSON_IsString(id)) {
        index_add_named(s, index, (struct schema_named){id->valuestring, "$id", tree, resource});
        if (id->valuestring[0] != '#') resource = tree;
    }
    if (cJSON_IsString(old))
        index_add_named(s, index, (struct schema_named){old->valuestring, "id", tree, resource});
    if (cJSON_IsString(anchor))
        index_add_named(s, index,
                        (struct schema_named){anchor->valuestring, "$anchor", tree, resource});
    if (resource != s->root && cJSON_IsObject(tree) && json_get(tree, "$ref") != NULL)
        add_place(s, index, (struct ref_place){tree, resource});
    cJSON_ArrayForEach(child, tree) {
        if (cJSON_IsObject(child) || cJSON_IsArray(child)) walk_named(s, index, child, resource);
    }
}

static int compare_named(const void *a, const void *b) {
    const struct schema_named *x = a, *y = b;
    int order = strcmp(x->value, y->value);
    if (order == 0) order = strcmp(x->keyword, y->keyword);
    return order != 0 ? order : (x->resource > y->resource) - (x->resource < y->resource);
}

static int index_compare_places(const void *a, const void *b) {
    const struct ref_place *x = a, *y = b;
    return (x->schema > y->schema) - (x->schema < y->schema);
}

/* Returns the tables of names, which the first call builds; NULL: a fault was noted. */
static struct schema_index *named_index(struct schema *s) {
    struct schema_index *index = index_of(s);
    if (index == NULL || index->walked) return index;
    index->walked = true;
    walk_named(s, index, s->root, s->root);
    if (s->rc != 0) return NULL;
    if (index->named_count > 0)
        qsort(index->named, index->named_count, sizeof *index->named, compare_named);
    if (index->place_count > 0)
        qsort(index->places, index->place_count, sizeof *index->places, index_compare_places);
    return index;
}

const cJSON *schema_resource(struct schema *s, const cJSON *at) {
    const struct schema_index *index = named_index(s);
    const struct ref_place key = {at, NULL};
    if (index == NULL || index->place_count == 0) return s->root;
    const struct ref_place *row =
        bsearch(&key, index->places, index->place_count, sizeof key, index_compare_places);
    if (row != NULL) return row->resource;
    const struct ref_copy *copy = index->copies[chain_of(at)];
    while (copy != NULL && copy->place.schema != at && node_work(s->pool, 1)) copy = copy->next;
    return copy != NULL ? copy->place.resource : s->root;
}

void schema_note_copy(struct schema *s, const cJSON *copy, const cJSON *original) {
    if (schema_member(s, original, "$ref") == NULL) return;
    const cJSON *resource = schema_resource(s, original);
    if (resource == s->root) return;
    struct ref_copy *row = schema_alloc(s, 1, sizeof *row);
    if (row == NULL) return;
    struct ref_copy **chain = &s->index->copies[chain_of(copy)];
    *row = (struct ref_copy){{copy, resource}, *chain};
    *chain = row;
}

const cJSON *schema_find_named(struct schema *s, const cJSON *resource, const char *keyword,
                               const char *value) {
    const struct schema_index *index = named_index(s);
    const struct schema_named key = {value, keyword, NULL, resource};
    if (index == NULL || index->named_count == 0) return NULL;
    size_t low = 0, high = index->named_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compare_named(&index->named[middle], &key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    const struct schema_named *row = &index->named[low], *end = index->named + index->named_count;
    if (row == end || strcmp(row->value, value) != 0 || strcmp(row->keyword, keyword) != 0)
        return NULL;
    if (resource != NULL && row->resource != resource) return NULL;
    bool twice = row + 1 < end && strcmp(row[1].value, value) == 0 &&
                 strcmp(row[1].keyword, keyword) == 0 &&
                 (resource == NULL || row[1].resource == resource);
    return twice ? NULL : row->node;
}

/* ---- Values ---- */

/* Writes a number so that equal values have the same text: its digits, then the power of ten that
 * multiplies them. */
static void write_number(struct buf *out, const char *text) {
    size_t begin = out->size, digits = 0;
    long power = 0;
    bool behind = false;
    const char *at = text + (*text == '-');
    if (*text == '-') buf_char(out, '-');
    for (; *at != '\0' && *at != 'e' && *at != 'E'; at++) {
        if (*at == '.') {
            behind = true;
            continue;
        }
        power -= behind;
        if (digits == 0 && *at == '0') continue;
        buf_char(out, *at);
        digits++;
    }
    if (*at != '\0') power += decimal_exponent(at + 1);
    while (!out->failed && digits > 1 && out->data[out->size - 1] == '0') {
        out->size--;
        digits--;
        power++;
    }
    if (out->failed) return;
    if (digits == 0) {
        out->size = begin;
        buf_char(out, '0');
    } else {
        buf_fmt(out, "e%ld", power);
    }
}

static int compare_members(const void *a, const void *b) {
    return strcmp((*(const cJSON *const *)a)->string, (*(const cJSON *const *)b)->string);
}

static void write_canonical(struct buf *out, const cJSON *value);

static void write_object(struct buf *out, const cJSON *value) {
    size_t count = (size_t)cJSON_GetArraySize(value), i = 0;
    const cJSON *child, **list = mem_try_alloc(count + 1, sizeof(const cJSON *));
    if (list == NULL) {
        out->failed = true;
        return;
    }
    cJSON_ArrayForEach(child, value) list[i++] = child;
    qsort(list, count, sizeof *list, compare_members);
    for (i = 0; i < count; i++) {
        json_write_str(out, list[i]->string, strlen(list[i]->string));
        buf_char(out, ':');
        write_canonical(out, list[i]);
    }
    mem_free(list);
}

static void write_canonical(struct buf *out, const cJSON *value) {
    const cJSON *child;
    if (cJSON_IsNumber(value)) {
        write_number(out, value->valuestring);
    } else if (cJSON_IsObject(value)) {
        buf_char(out, '{');
        write_object(out, value);
        buf_char(out, '}');
    } else if (cJSON_IsArray(value)) {
        buf_char(out, '[');
        cJSON_ArrayForEach(child, value) {
            write_canonical(out, child);
            buf_char(out, ',');
        }
        buf_char(out, ']');
    } else {
        json_write_node(out, value);
    }
}

const char *schema_canonical(struct schema *s, const cJSON *value) {
    struct buf text;
    char *copy = NULL;
    buf_open(&text, (size_t)64 << 20);
    write_canonical(&text, value);
    if (!text.failed && s->rc == 0 && node_work(s->pool, text.size / 8 + 1))
        copy = arena_strndup(&s->arena, text.data, text.size);
    if (copy == NULL && s->pool->rc == 0)
        schema_refuse(s, ERR_LIMIT, NULL, NULL, "the schema needs too much memory");
    buf_close(&text);
    return copy;
}

static int compare_texts(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void fill_values(struct schema *s, struct value_set *set, const cJSON *node, bool list) {
    const cJSON *child = list ? node->child : node;
    size_t count = list ? (size_t)cJSON_GetArraySize(node) : 1;
    const char **texts = schema_alloc(s, count, sizeof(const char *));
    if (texts == NULL) return;
    for (size_t i = 0; i < count; i++, child = child->next)
        if ((texts[i] = schema_canonical(s, child)) == NULL) return;
    qsort(texts, count, sizeof *texts, compare_texts);
    *set = (struct value_set){texts, count};
}

const struct value_set *schema_values(struct schema *s, const cJSON *node, bool list) {
    struct schema_index *index = index_of(s);
    if (index == NULL) return NULL;
    struct value_table **chain = &index->values[chain_of(node)], *table = *chain;
    while (table != NULL && table->node != node) table = table->next;
    if (table != NULL) return &table->set;
    table = schema_alloc(s, 1, sizeof *table);
    if (table == NULL) return NULL;
    *table = (struct value_table){.node = node, .next = *chain};
    *chain = table;
    fill_values(s, &table->set, node, list);
    return s->rc == 0 && s->pool->rc == 0 ? &table->set : NULL;
}

bool value_set_has(const struct value_set *set, const char *text) {
    return set->count > 0 &&
           bsearch(&text, set->texts, set->count, sizeof *set->texts, compare_texts) != NULL;
}

bool value_sets_apart(const struct value_set *a, const struct value_set *b) {
    size_t i = 0, k = 0;
    while (i < a->count && k < b->count) {
        int order = strcmp(a->texts[i], b->texts[k]);
        if (order == 0) return false;
        *(order < 0 ? &i : &k) += 1;
    }
    return true;
}
