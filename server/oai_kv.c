/* The kv object: how much of a conversation is kept, and which of it. */
#include <math.h>
#include <string.h>

#include "base/json.h"
#include "server/oai_fields.h"

static int read_horizon(struct oai_reader *r, const cJSON *kv) {
    const cJSON *node = json_get(kv, "horizon");
    float *horizon = &r->out->sampling.kv.horizon;
    if (!node) return 0;
    if (cJSON_IsString(node) && strcmp(node->valuestring, "inf") == 0) {
        *horizon = INFINITY;
        return 0;
    }
    if (!cJSON_IsNumber(node) || !(node->valuedouble >= 1 && node->valuedouble <= 1e9))
        return oai_invalid(r, "kv.horizon", "expected a number from 1 to 1e9 or \"inf\"");
    *horizon = (float)node->valuedouble;
    return 0;
}

static int read_report(struct oai_reader *r, const cJSON *kv) {
    static const char *const names[] = {[ENGINE_REPORT_NONE] = "none",
                                        [ENGINE_REPORT_LENGTHS] = "lengths",
                                        [ENGINE_REPORT_POSITIONS] = "positions"};
    const char *report = names[ENGINE_REPORT_NONE];
    if (oai_get_str(r, "kv", kv, "report", &report)) return -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(report, names[i])) continue;
        r->out->sampling.kv.report = (enum engine_report)i;
        return 0;
    }
    return oai_invalid(r, "kv.report", "expected \"none\", \"lengths\" or \"positions\"");
}

/* The kv object is ours alone, so a misspelt member is an error even where unknown fields of the
 * body are forgiven: it would silently change what is kept. */
static int check_names(struct oai_reader *r, const cJSON *kv) {
    static const char *const names[] = {"policy", "budget",  "buffer", "chunk",  "sinks",
                                        "recent", "horizon", "reuse",  "retain", "report"};
    const cJSON *node;
    cJSON_ArrayForEach(node, kv) {
        bool known = false;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            known |= strcmp(node->string, names[i]) == 0;
        if (!known) {
            char field[OAI_PATH];
            oai_path(field, "kv.%.64s", node->string);
            return oai_refuse(r->error, 400, "unknown_parameter", field, "Unknown parameter: '%s'.",
                              field);
        }
    }
    return 0;
}

int oai_read_kv(struct oai_reader *r) {
    struct engine_kv *kv = &r->out->sampling.kv;
    const cJSON *object;
    if (oai_get_object(r, "kv", &object)) return -1;
    if (!object) return 0;
    if (check_names(r, object) || oai_get_str(r, "kv", object, "policy", &kv->policy) ||
        oai_get_int(r, "kv", object, "budget", 1, INT32_MAX, &kv->budget) ||
        oai_get_int(r, "kv", object, "buffer", 0, INT32_MAX, &kv->buffer) ||
        oai_get_int(r, "kv", object, "chunk", 1, INT32_MAX, &kv->chunk) ||
        oai_get_int(r, "kv", object, "sinks", 0, INT32_MAX, &kv->sinks) ||
        oai_get_int(r, "kv", object, "recent", 0, INT32_MAX, &kv->recent) ||
        oai_get_bool(r, "kv", object, "reuse", &kv->reuse) ||
        oai_get_bool(r, "kv", object, "retain", &kv->retain) || read_horizon(r, object) ||
        read_report(r, object))
        return -1;
    if (kv->policy) kv->policy = arena_strndup(r->arena, kv->policy, strlen(kv->policy));
    return kv->policy || !json_get(object, "policy") ? 0 : oai_no_memory(r);
}
