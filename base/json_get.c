#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

const char *json_type_name(const cJSON *node) {
    if (!node) return "nothing";
    switch (node->type & 0xFF) {
    case cJSON_False:
    case cJSON_True:
        return "boolean";
    case cJSON_NULL:
        return "null";
    case cJSON_Number:
        return "number";
    case cJSON_String:
        return "string";
    case cJSON_Array:
        return "array";
    case cJSON_Object:
        return "object";
    default:
        return "unknown";
    }
}

void json_text(const char *from, char *to, size_t *size) {
    const char *nul;
    char *at = to;
    while ((nul = strstr(from, JSON_NUL))) {
        memmove(at, from, (size_t)(nul - from));
        at += nul - from;
        *at++ = '\0';
        from = nul + sizeof JSON_NUL - 1;
    }
    size_t rest = strlen(from);
    memmove(at, from, rest);
    *size = (size_t)(at - to) + rest;
}

const char *json_arena_text(struct arena *arena, const char *from, size_t *size) {
    *size = strlen(from);
    if (!strstr(from, JSON_NUL)) return from;
    char *to = arena_alloc(arena, *size, 1);
    if (to) json_text(from, to, size);
    return to;
}

const cJSON *json_get(const cJSON *object, const char *key) {
    const cJSON *member, *last = NULL;
    if (!cJSON_IsObject(object)) return NULL;
    cJSON_ArrayForEach(member, object) if (strcmp(member->string, key) == 0) last = member;
    return cJSON_IsNull(last) ? NULL : last;
}

static const cJSON *equal_member(const cJSON *object, const char *name) {
    const cJSON *child;
    cJSON_ArrayForEach(child, object) if (strcmp(child->string, name) == 0) return child;
    return NULL;
}

bool json_equal(const cJSON *a, const cJSON *b) {
    const cJSON *x, *y;
    bool object = cJSON_IsObject(a);
    if (a == b) return true;
    if (!object && !cJSON_IsArray(a)) return cJSON_Compare(a, b, true);
    if (object ? !cJSON_IsObject(b) : !cJSON_IsArray(b)) return false;
    if (cJSON_GetArraySize(a) != cJSON_GetArraySize(b)) return false;
    y = b->child;
    cJSON_ArrayForEach(x, a) {
        if (object) y = equal_member(b, x->string);
        if (!y || !json_equal(x, y)) return false;
        y = y->next;
    }
    return true;
}

/* Reads an integer from its digits where they are known, because doubles above 2^53 lose some. */
int json_node_int(const cJSON *node, int64_t min, int64_t max, int64_t *value) {
    if (!cJSON_IsNumber(node)) return ERR_INVALID;
    const char *text = node->valuestring;
    double number = node->valuedouble;
    int64_t result;
    if (text && text[strcspn(text, ".eE")] == '\0') {
        errno = 0;
        result = strtoll(text, NULL, 10);
        if (errno) return ERR_INVALID;
    } else {
        if (!(fabs(number) <= 0x1p53) || number != trunc(number)) return ERR_INVALID;
        result = (int64_t)number;
    }
    if (result < min || result > max) return ERR_INVALID;
    *value = result;
    return 0;
}

__attribute__((format(printf, 4, 5))) static int refuse_member_type(struct fault *fault,
                                                                    const char *path,
                                                                    const char *key,
                                                                    const char *format, ...) {
    struct fault inner;
    char field[sizeof inner.field];
    va_list args;
    snprintf(field, sizeof field, "%s%s%s", path ? path : "", path && *path ? "." : "", key);
    va_start(args, format);
    vsnprintf(inner.text, sizeof inner.text, format, args);
    va_end(args);
    return fault_set(fault, ERR_INVALID, field, "%s", inner.text);
}

int json_int(const cJSON *object, const char *path, const char *key, int64_t min, int64_t max,
             int64_t *value, struct fault *fault) {
    const cJSON *node = json_get(object, key);
    if (!node) return 0;
    if (!cJSON_IsNumber(node))
        return refuse_member_type(fault, path, key, "expected an integer, found %s",
                                  json_type_name(node));
    if (json_node_int(node, min, max, value) == 0) return 0;
    if (node->valuestring)
        return refuse_member_type(
            fault, path, key, "expected an integer from %" PRId64 " to %" PRId64 ", found %.64s",
            min, max, node->valuestring);
    return refuse_member_type(fault, path, key,
                              "expected an integer from %" PRId64 " to %" PRId64 ", found %g", min,
                              max, node->valuedouble);
}

int json_num(const cJSON *object, const char *path, const char *key, double min, double max,
             double *value, struct fault *fault) {
    const cJSON *node = json_get(object, key);
    if (!node) return 0;
    if (!cJSON_IsNumber(node))
        return refuse_member_type(fault, path, key, "expected a number, found %s",
                                  json_type_name(node));
    if (!(node->valuedouble >= min && node->valuedouble <= max))
        return refuse_member_type(fault, path, key, "expected a number from %g to %g, found %.9g",
                                  min, max, node->valuedouble);
    *value = node->valuedouble;
    return 0;
}

int json_bool(const cJSON *object, const char *path, const char *key, bool *value,
              struct fault *fault) {
    const cJSON *node = json_get(object, key);
    if (!node) return 0;
    if (!cJSON_IsBool(node))
        return refuse_member_type(fault, path, key, "expected a boolean, found %s",
                                  json_type_name(node));
    *value = cJSON_IsTrue(node);
    return 0;
}

int json_str(const cJSON *object, const char *path, const char *key, const char **value,
             struct fault *fault) {
    const cJSON *node = json_get(object, key);
    if (!node) return 0;
    if (!cJSON_IsString(node))
        return refuse_member_type(fault, path, key, "expected a string, found %s",
                                  json_type_name(node));
    *value = node->valuestring;
    return 0;
}
