/* The kv object: how much of a conversation is kept, and which of it. */
#include <math.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

/* The types of parameters that only some policies have. The engine knows which policies, and the
 * range of each parameter. */
enum kv_kind { KV_NUMBER, KV_NUMBER_OR_INF, KV_WORD, KV_TRUTH };
static const struct {
    const char *name, *expected;
    enum kv_kind kind;
} kv_options[] = {
    {"horizon", "expected a number or \"inf\"", KV_NUMBER_OR_INF},
    {"window", "expected a number", KV_NUMBER},
    {"decay", "expected a number", KV_NUMBER},
    {"lambda", "expected a number", KV_NUMBER},
    {"floor", "expected a number", KV_NUMBER},
    {"threshold", "expected a number", KV_NUMBER},
    {"history", "expected a word", KV_WORD},
    {"merge", "expected a word", KV_WORD},
    {"variant", "expected a word", KV_WORD},
    {"parity", "expected true or false", KV_TRUTH},
    {"gamma", "expected a number", KV_NUMBER},
    {"tau", "expected a number", KV_NUMBER},
    {"positions", "expected true or false", KV_TRUTH},
    {"tau1", "expected a number", KV_NUMBER},
    {"tau2", "expected a number", KV_NUMBER},
    {"lag", "expected a number", KV_NUMBER},
};
#define KV_OPTIONS (sizeof kv_options / sizeof *kv_options)
_Static_assert(KV_OPTIONS <= ENGINE_KV_OPTIONS, "each may be given once");

static bool fill_option(const cJSON *node, size_t i, struct engine_kv_option *out) {
    switch (kv_options[i].kind) {
    case KV_WORD:
        out->text = cJSON_IsString(node) ? node->valuestring : NULL;
        return out->text != NULL;
    case KV_TRUTH:
        out->number = cJSON_IsTrue(node);
        return cJSON_IsBool(node);
    case KV_NUMBER_OR_INF:
        out->number = INFINITY;
        if (cJSON_IsString(node) && strcmp(node->valuestring, "inf") == 0) return true;
        out->number = node->valuedouble;
        return cJSON_IsNumber(node);
    case KV_NUMBER:
        break;
    }
    out->number = node->valuedouble;
    return cJSON_IsNumber(node);
}

static int read_one(struct oai_reader *r, const cJSON *kv, size_t i) {
    const cJSON *node = json_get(kv, kv_options[i].name);
    struct engine_kv *to = &r->out->sampling.kv;
    struct engine_kv_option option = {.name = kv_options[i].name};
    char field[OAI_PATH];
    if (!node) return 0;
    if (!fill_option(node, i, &option)) {
        oai_path(field, "kv.%.64s", option.name);
        return oai_invalid(r, field, "%s", kv_options[i].expected);
    }
    if (option.text) option.text = arena_strndup(r->arena, option.text, strlen(option.text));
    if (kv_options[i].kind == KV_WORD && !option.text) return oai_no_memory(r);
    to->options[to->option_count++] = option;
    return 0;
}

static int kv_read_options(struct oai_reader *r, const cJSON *kv) {
    for (size_t i = 0; i < KV_OPTIONS; i++)
        if (read_one(r, kv, i)) return -1;
    return 0;
}

static int read_report(struct oai_reader *r, const cJSON *kv) {
    static const char *const names[] = {[ENGINE_REPORT_NONE] = "none",
                                        [ENGINE_REPORT_LENGTHS] = "lengths",
                                        [ENGINE_REPORT_POSITIONS] = "positions",
                                        [ENGINE_REPORT_TRACE] = "trace"};
    const char *report = names[ENGINE_REPORT_NONE];
    if (oai_get_str(r, "kv", kv, "report", &report)) return -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(report, names[i])) continue;
        r->out->sampling.kv.report = (enum engine_report)i;
        return 0;
    }
    return oai_invalid(r, "kv.report",
                       "expected \"none\", \"lengths\", \"positions\" or \"trace\"");
}

static int read_overflow(struct oai_reader *r, const cJSON *kv) {
    struct engine_kv *to = &r->out->sampling.kv;
    const char *overflow = "";
    if (oai_get_str(r, "kv", kv, "overflow", &overflow)) return -1;
    if (strcmp(overflow, "error") == 0)
        to->overflow = ENGINE_OVERFLOW_ERROR;
    else if (strcmp(overflow, "shift") == 0)
        to->overflow = ENGINE_OVERFLOW_SHIFT;
    else if (json_get(kv, "overflow"))
        return oai_invalid(r, "kv.overflow", "expected \"error\" or \"shift\"");
    return 0;
}

/* Refuses unknown members of a kv object, even if unknown fields of the body are accepted: only
 * keepd has a kv object, and a misspelt member would silently change what is kept. */
static int kv_check_names(struct oai_reader *r, const cJSON *kv) {
    static const char *const names[] = {"policy", "budget",   "buffer", "chunk",  "sinks",
                                        "recent", "overflow", "reuse",  "retain", "report"};
    const cJSON *node;
    cJSON_ArrayForEach(node, kv) {
        bool known = false;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            known |= strcmp(node->string, names[i]) == 0;
        for (size_t i = 0; i < KV_OPTIONS; i++)
            known |= strcmp(node->string, kv_options[i].name) == 0;
        if (!known) {
            char field[OAI_PATH];
            oai_path(field, "kv.%.64s", node->string);
            return oai_refuse(r->error, 400, "unknown_parameter", field, "Unknown parameter: '%s'.",
                              field);
        }
    }
    return 0;
}

/* Reads `retain`: whether the turn is kept or, as an object, for how long and whether it is pinned.
 */
static int read_retain(struct oai_reader *r, const cJSON *kv) {
    struct engine_kv *to = &r->out->sampling.kv;
    const cJSON *retain = json_get(kv, "retain"), *node;
    if (!cJSON_IsObject(retain)) {
        if (!retain || cJSON_IsNull(retain) || cJSON_IsBool(retain))
            return oai_get_bool(r, "kv", kv, "retain", &to->retain);
        return oai_invalid(r, "kv.retain", "expected true, false or an object");
    }
    cJSON_ArrayForEach(node, retain) {
        char field[OAI_PATH];
        if (strcmp(node->string, "ttl") == 0 || strcmp(node->string, "pin") == 0) continue;
        oai_path(field, "kv.retain.%.64s", node->string);
        return oai_refuse(r->error, 400, "unknown_parameter", field, "Unknown parameter: '%s'.",
                          field);
    }
    to->retain = true;
    return oai_get_int(r, "kv.retain", retain, "ttl", 1, INT32_MAX, &to->ttl) ||
                   oai_get_bool(r, "kv.retain", retain, "pin", &to->pin)
               ? -1
               : 0;
}

int oai_read_kv(struct oai_reader *r) {
    struct engine_kv *kv = &r->out->sampling.kv;
    const cJSON *object;
    if (oai_get_object(r, "kv", &object)) return -1;
    if (!object) return 0;
    if (kv_check_names(r, object) || oai_get_str(r, "kv", object, "policy", &kv->policy) ||
        oai_get_int(r, "kv", object, "budget", 1, INT32_MAX, &kv->budget) ||
        oai_get_int(r, "kv", object, "buffer", 0, INT32_MAX, &kv->buffer) ||
        oai_get_int(r, "kv", object, "chunk", 1, INT32_MAX, &kv->chunk) ||
        oai_get_int(r, "kv", object, "sinks", 0, INT32_MAX, &kv->sinks) ||
        oai_get_int(r, "kv", object, "recent", 0, INT32_MAX, &kv->recent) ||
        oai_get_bool(r, "kv", object, "reuse", &kv->reuse) || read_retain(r, object) ||
        kv_read_options(r, object) || read_overflow(r, object) || read_report(r, object))
        return -1;
    if (kv->policy) kv->policy = arena_strndup(r->arena, kv->policy, strlen(kv->policy));
    return kv->policy || !json_get(object, "policy") ? 0 : oai_no_memory(r);
}
