#include "constrain/schema_refs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

#define RESOLVE_MAX 16 /* references followed to compare two branches */

/* ---- Pointers ---- */

static int refs_hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = (char)(c | 32);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Reads the first part of a JSON pointer, up to '/' or the end, and undoes its escapes. Returns the
 * rest of the pointer. */
static const char *refs_read_part(const char *text, char *part, size_t size) {
    size_t used = 0;
    while (*text != '\0' && *text != '/') {
        char c = *text++;
        if (c == '%' && refs_hex_value(text[0]) >= 0 && refs_hex_value(text[1]) >= 0) {
            c = (char)(refs_hex_value(text[0]) << 4 | refs_hex_value(text[1]));
            text += 2;
        }
        if (c == '~' && (*text == '0' || *text == '1')) c = *text++ == '0' ? '~' : '/';
        if (used + 1 < size) part[used++] = c;
    }
    part[used] = '\0';
    return text;
}

static const cJSON *refs_step(struct schema *s, const cJSON *node, const char *name) {
    if (!cJSON_IsArray(node)) return schema_member(s, node, name);
    char *end;
    unsigned long index = strtoul(name, &end, 10);
    const cJSON *child = *name != '\0' && *end == '\0' ? node->child : NULL;
    (void)node_work(s->pool, index < 1u << 20 ? index / 8 : 0);
    while (child != NULL && index-- > 0) child = child->next;
    return child;
}

static const cJSON *follow_pointer(struct schema *s, const cJSON *root, const char *pointer) {
    char part[512];
    while (root != NULL && *pointer == '/') {
        pointer = refs_read_part(pointer + 1, part, sizeof part);
        root = refs_step(s, root, part);
    }
    return *pointer == '\0' ? root : NULL;
}

/* Finds a schema inside a resource, which is a schema with $id or the document. */
static const cJSON *find_fragment(struct schema *s, const cJSON *resource, const char *fragment) {
    if (*fragment == '\0' || *fragment == '/') return follow_pointer(s, resource, fragment);
    const cJSON *found = schema_find_named(s, resource, "$anchor", fragment);
    if (found == NULL) found = schema_find_named(s, resource, "$id", fragment - 1);    /* "#name" */
    return found != NULL ? found : schema_find_named(s, resource, "id", fragment - 1); /* draft 4 */
}

static bool has_scheme(const char *uri) {
    size_t size = strcspn(uri, ":/?#");
    return size > 0 && uri[size] == ':';
}

/* Finds the schema that a $ref names. Names are compared as they are written, which is exact where
 * both are whole URIs or relative to the same resource. */
static const cJSON *find_target(struct schema *s, const cJSON *at, const char *ref) {
    char base[512];
    size_t size = strcspn(ref, "#");
    const cJSON *resource = schema_resource(s, at);
    if (size == 0) return *ref == '#' ? find_fragment(s, resource, ref + 1) : NULL;
    if (size >= sizeof base) return NULL;
    memcpy(base, ref, size);
    base[size] = '\0';
    const cJSON *found = schema_find_named(s, has_scheme(base) ? NULL : resource, "$id", base);
    if (found == NULL) found = schema_find_named(s, NULL, "id", base);
    return found != NULL && ref[size] == '#' ? find_fragment(s, found, ref + size + 1) : found;
}

const cJSON *schema_resolve(struct schema *s, const cJSON *at, const cJSON *ref) {
    if (!cJSON_IsString(ref)) {
        schema_refuse(s, ERR_INVALID, at, "$ref", "expected a string");
        return NULL;
    }
    const cJSON *found = find_target(s, at, ref->valuestring);
    if (found == NULL && ref->valuestring[0] == '#')
        schema_refuse(s, ERR_INVALID, at, "$ref", "the schema has no part '%.100s'",
                      ref->valuestring);
    else if (found == NULL)
        schema_refuse(s, ERR_UNSUPPORTED, at, "$ref",
                      "'%.100s' is not in this document, and other documents are not read",
                      ref->valuestring);
    return found;
}

/* ---- Branches that exclude each other ---- */

/* Follows a chain of references. Keywords beside a $ref are left out, which is safe here: they can
 * only exclude more instances. */
static const cJSON *resolved(struct schema *s, const cJSON *schema) {
    for (int i = 0; i < RESOLVE_MAX && schema != NULL; i++) {
        const cJSON *ref = json_get(schema, "$ref");
        if (!cJSON_IsString(ref)) break;
        const cJSON *target = find_target(s, schema, ref->valuestring);
        if (target == NULL) break;
        schema = target;
    }
    return schema;
}

static unsigned bit_of_type(const char *name) {
    static const char *const names[] = {"null", "boolean", "integer", "string", "array", "object"};
    if (strcmp(name, "number") == 0) return 4;
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i], name) == 0) return 1u << i;
    return 0;
}

static unsigned bit_of_value(const cJSON *value) {
    return bit_of_type(json_type_name(value));
}

/* Returns the types that a schema's own keywords allow. Integers count as numbers here. */
static unsigned types_left(const cJSON *schema) {
    const cJSON *type = json_get(schema, "type"), *values = json_get(schema, "enum"), *child;
    const cJSON *only = json_get(schema, "const");
    unsigned types = ~0u, some = 0;
    if (cJSON_IsFalse(schema)) return 0;
    if (cJSON_IsString(type)) types = bit_of_type(type->valuestring);
    if (cJSON_IsArray(type)) {
        cJSON_ArrayForEach(child, type) some |=
            cJSON_IsString(child) ? bit_of_type(child->valuestring) : ~0u;
        types = some;
    }
    if (only != NULL) types &= bit_of_value(only);
    if (cJSON_IsArray(values)) {
        some = 0;
        cJSON_ArrayForEach(child, values) some |= bit_of_value(child);
        types &= some;
    }
    return types;
}

static const struct value_set *values_of(struct schema *s, const cJSON *schema) {
    const cJSON *only = json_get(schema, "const"), *values = json_get(schema, "enum");
    if (only != NULL) return schema_values(s, only, false);
    return cJSON_IsArray(values) ? schema_values(s, values, true) : NULL;
}

static bool values_apart(struct schema *s, const cJSON *a, const cJSON *b) {
    const struct value_set *x = values_of(s, a), *y = x != NULL ? values_of(s, b) : NULL;
    if (y == NULL || !node_work(s->pool, (x->count + y->count) / 4)) return false;
    return value_sets_apart(x, y);
}

/* Returns whether the list of a keyword `required` has the name. */
static bool requires(struct schema *s, const cJSON *list, const char *name) {
    const cJSON *child;
    (void)node_work(s->pool, 1);
    cJSON_ArrayForEach(child, list) {
        if (!node_work(s->pool, 1)) return false;
        if (cJSON_IsString(child) && strcmp(child->valuestring, name) == 0) return true;
    }
    return false;
}

static bool are_apart(struct schema *s, const cJSON *a, const cJSON *b, int depth);

/* Returns whether two schemas exclude each other. If a branch of `a` is itself an alternative, each
 * of its branches must exclude `b`. */
static bool alternatives_apart(struct schema *s, const cJSON *a, const cJSON *b, int depth) {
    static const char *const keywords[] = {"anyOf", "oneOf"};
    for (size_t i = 0; i < 2; i++) {
        const cJSON *list = json_get(a, keywords[i]), *child;
        bool apart = cJSON_IsArray(list) && list->child != NULL;
        if (!apart) continue;
        cJSON_ArrayForEach(child, list) apart = apart && are_apart(s, child, b, depth + 1);
        if (apart) return true;
    }
    return false;
}

/* Counts, as work, the members and values of a schema that a comparison visits several times each.
 */
static void count_looks(struct schema *s, const cJSON *schema) {
    int members = cJSON_GetArraySize(schema);
    int values = cJSON_GetArraySize(json_get(schema, "enum"));
    (void)node_work(s->pool, (uint64_t)members / 4 + (uint64_t)values / 4);
}

static bool are_apart(struct schema *s, const cJSON *a, const cJSON *b, int depth) {
    const cJSON *property;
    (void)node_work(s->pool, 16); /* more, because alternatives and common members multiply */
    if (depth > RESOLVE_MAX || s->pool->rc) return false;
    a = resolved(s, a);
    b = resolved(s, b);
    count_looks(s, a);
    count_looks(s, b);
    if (s->pool->rc != 0) return false;
    if ((types_left(a) & types_left(b)) == 0 || values_apart(s, a, b)) return true;
    if (alternatives_apart(s, a, b, depth) || alternatives_apart(s, b, a, depth)) return true;
    if ((types_left(a) & types_left(b)) != bit_of_type("object")) return false;
    const cJSON *own = json_get(a, "properties"), *others = json_get(b, "properties");
    const cJSON *own_required = json_get(a, "required"), *required = json_get(b, "required");
    if (!cJSON_IsObject(own)) return false;
    cJSON_ArrayForEach(property, own) {
        const cJSON *other = schema_member(s, others, property->string);
        if (other == NULL || !requires(s, own_required, property->string) ||
            !requires(s, required, property->string))
            continue;
        if (are_apart(s, property, other, depth + 1)) return true;
    }
    return false;
}

bool schema_are_apart(struct schema *s, const cJSON *a, const cJSON *b) {
    return are_apart(s, a, b, 0);
}

/* ---- Members that tell branches apart ---- */

/* Returns the anyOf or oneOf of a schema; NULL: none. */
static const cJSON *alternatives_of(const cJSON *schema) {
    const cJSON *list = json_get(schema, "anyOf");
    if (!cJSON_IsArray(list)) list = json_get(schema, "oneOf");
    return cJSON_IsArray(list) && list->child != NULL ? list : NULL;
}

/* Returns whether a schema's own additionalProperties forbids the member. */
static bool forbids(struct schema *s, const cJSON *schema, const char *name) {
    return cJSON_IsFalse(json_get(schema, "additionalProperties")) &&
           json_get(schema, "patternProperties") == NULL &&
           schema_member(s, json_get(schema, "properties"), name) == NULL;
}

static bool rejects_member(struct schema *s, const cJSON *a, const cJSON *b, const char *name,
                           int depth) {
    const cJSON *child;
    if (depth > RESOLVE_MAX || !node_work(s->pool, 16)) return false;
    a = resolved(s, a);
    b = resolved(s, b);
    const cJSON *own = schema_member(s, json_get(a, "properties"), name);
    const cJSON *other = schema_member(s, json_get(b, "properties"), name);
    if (own != NULL && other != NULL && are_apart(s, own, other, depth + 1)) return true;
    if (own != NULL && forbids(s, b, name)) return true;
    const cJSON *list = alternatives_of(a);
    bool all = list != NULL;
    cJSON_ArrayForEach(child, list) all = all && rejects_member(s, child, b, name, depth + 1);
    if (all) return true;
    list = alternatives_of(b);
    all = list != NULL;
    cJSON_ArrayForEach(child, list) all = all && rejects_member(s, a, child, name, depth + 1);
    return all;
}

bool schema_member_decides(struct schema *s, const cJSON *a, const cJSON *b, const char *name) {
    return rejects_member(s, a, b, name, 0);
}

const char *schema_deciding_member(struct schema *s, const cJSON *a, const cJSON *b, bool given) {
    const cJSON *first = resolved(s, a), *child;
    for (int i = 0; i < RESOLVE_MAX && alternatives_of(first) != NULL; i++) {
        if (json_get(first, "properties") != NULL) break;
        first = resolved(s, alternatives_of(first)->child);
    }
    const cJSON *properties = json_get(first, "properties");
    if (!cJSON_IsObject(properties)) return NULL;
    cJSON_ArrayForEach(child, properties) {
        const cJSON *value = resolved(s, child);
        bool is_given = json_get(value, "const") != NULL || json_get(value, "enum") != NULL;
        bool counts = given ? is_given : requires(s, json_get(first, "required"), child->string);
        if (counts && rejects_member(s, a, b, child->string, 0)) return child->string;
    }
    return NULL;
}

/* Returns the last part of a reference, by which OpenAPI names a schema. */
static const char *name_of_ref(const char *ref) {
    const char *slash = strrchr(ref, '/');
    return slash != NULL ? slash + 1 : ref;
}

bool schema_is_branch(struct schema *s, const cJSON *at, const cJSON *branch, const char *name) {
    const cJSON *ref = json_get(branch, "$ref");
    if (!cJSON_IsString(ref)) return false;
    if (strcmp(ref->valuestring, name) == 0 || strcmp(name_of_ref(ref->valuestring), name) == 0)
        return true;
    const cJSON *target = find_target(s, branch, ref->valuestring);
    return target != NULL && find_target(s, at, name) == target;
}
