/* Members of a body with their types, and the refusals that name them. */
#include <stdarg.h>
#include <stdio.h>

#include "base/json.h"
#include "server/oai/fields.h"

int oai_no_memory(const struct oai_reader *r) {
    struct fault fault;
    fault_set(&fault, ERR_NOMEM, NULL, "the request needs too much memory");
    return oai_refuse_fault(r->error, &fault);
}

int oai_missing(const struct oai_reader *r, const char *field) {
    return oai_refuse(r->error, 400, "missing_required_parameter", field,
                      "Missing required parameter: '%s'.", field);
}

int oai_missing_here(const struct oai_reader *r, const char *field) {
    static const struct {
        const char *field, *path;
    } others[] = {{"messages", "/v1/chat/completions"},
                  {"input", "/v1/responses"},
                  {"prompt", "/v1/completions"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (json_get(r->body, others[i].field))
            return oai_refuse(r->error, 400, "missing_required_parameter", field,
                              "Missing required parameter: '%s'. A request with '%s' is for "
                              "POST %s.",
                              field, others[i].field, others[i].path);
    return oai_missing(r, field);
}

int oai_invalid(const struct oai_reader *r, const char *field, const char *format, ...) {
    struct fault fault;
    char text[sizeof fault.text];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fault_set(&fault, ERR_INVALID, field, "%s", text);
    return oai_refuse_fault(r->error, &fault);
}

int oai_get_float(const struct oai_reader *r, const char *path, const cJSON *object,
                  const char *key, double min, double max, float *value) {
    struct fault fault;
    double number = *value;
    if (json_num(object, path, key, min, max, &number, &fault))
        return oai_refuse_fault(r->error, &fault);
    *value = (float)number;
    return 0;
}

int oai_get_int(const struct oai_reader *r, const char *path, const cJSON *object, const char *key,
                int64_t min, int32_t max, int32_t *value) {
    struct fault fault;
    int64_t number = *value;
    if (json_int(object, path, key, min, max, &number, &fault))
        return oai_refuse_fault(r->error, &fault);
    *value = (int32_t)number;
    return 0;
}

int oai_get_alternatives(const struct oai_reader *r, const cJSON *object, const char *key,
                         int32_t *value) {
    const struct engine_info *info = r->rules->info;
    bool whole = info->max_logprobs >= info->vocab;
    int32_t count = *value < 0 ? 0 : *value;
    const cJSON *node = json_get(object, key);
    if (!node) return 0;
    if (oai_get_int(r, NULL, object, key, whole ? -1 : 0, info->max_logprobs, &count)) return -1;
    *value = count < 0 ? info->vocab : count;
    return 0;
}

int oai_get_bool(const struct oai_reader *r, const char *path, const cJSON *object, const char *key,
                 bool *value) {
    struct fault fault;
    if (json_bool(object, path, key, value, &fault)) return oai_refuse_fault(r->error, &fault);
    return 0;
}

int oai_get_str(const struct oai_reader *r, const char *path, const cJSON *object, const char *key,
                const char **value) {
    struct fault fault;
    if (json_str(object, path, key, value, &fault)) return oai_refuse_fault(r->error, &fault);
    return 0;
}

int oai_get_object(const struct oai_reader *r, const char *key, const cJSON **value) {
    *value = json_get(r->body, key);
    if (!*value || cJSON_IsObject(*value)) return 0;
    return oai_invalid(r, key, "expected an object, found %s", json_type_name(*value));
}

int oai_get_ids(const struct oai_reader *r, const cJSON *node, const char *field,
                const int32_t **ids, size_t *count) {
    int size = cJSON_GetArraySize(node);
    int32_t *out = arena_alloc(r->arena, size > 0 ? (size_t)size : 1, sizeof *out);
    const cJSON *item;
    char path[OAI_PATH];
    size_t i = 0;
    if (!out) return oai_no_memory(r);
    cJSON_ArrayForEach(item, node) {
        int64_t id;
        if (json_node_int(item, 0, r->rules->info->vocab - 1, &id)) {
            oai_path(path, "%s[%zu]", field, i);
            return oai_invalid(r, path,
                               "expected a token id from 0 to %d, others are out of vocabulary",
                               r->rules->info->vocab - 1);
        }
        out[i++] = (int32_t)id;
    }
    *ids = out;
    *count = i;
    return 0;
}
