/* POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them. */
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

/* Both change what every client gets, so they are there only where the operator has named a folder
 * of adapters. */
static int read_adapter_name(struct oai_reader *r) {
    if (!r->rules->info->loads_adapters)
        return oai_refuse(r->error, 403, "adapters_fixed", NULL,
                          "Adapters of this server do not change while it runs: it has no "
                          "--lora-dir.");
    r->out->adapter = NULL;
    if (oai_get_str(r, NULL, r->body, "lora_name", &r->out->adapter)) return -1;
    return r->out->adapter ? 0 : oai_missing(r, "lora_name");
}

static int parse_load_adapter(struct oai_reader *r) {
    if (read_adapter_name(r) || oai_get_str(r, NULL, r->body, "lora_path", &r->out->adapter_path))
        return -1;
    return r->out->adapter_path ? 0 : oai_missing(r, "lora_path");
}

static int load_adapter(struct engine *engine, const struct oai_request *request,
                        struct oai_error *error) {
    struct fault fault = {0};
    const int rc = engine_adapter_load(engine, request->adapter, request->adapter_path, &fault);
    if (rc == 0) return 0;
    if (rc == ERR_NOMEM || rc == ERR_STOPPED) return oai_refuse_fault(error, &fault);
    /* A file that is missing in an adapter's directory is another fault. */
    const bool absent = rc == ERR_NOTFOUND && strcmp(fault.field, "lora_path") == 0;
    return oai_refuse(error, absent ? 404 : 400, absent ? "adapter_not_found" : "invalid_adapter",
                      strcmp(fault.field, "lora_name") == 0 ? "lora_name" : "lora_path",
                      "The adapter cannot be loaded: %s%s%s.", fault.field,
                      fault.field[0] ? ": " : "", fault.text);
}

static int unload_adapter(struct engine *engine, const struct oai_request *request,
                          struct oai_error *error) {
    if (engine_adapter_unload(engine, request->adapter) == 0) return 0;
    return oai_refuse(error, 404, "adapter_not_found", "lora_name",
                      "The adapter '%.128s' is not loaded.", request->adapter);
}

static void answer_adapter(struct buf *out, const struct oai_rules *rules,
                           const struct oai_request *request, const struct engine_ids *ids) {
    (void)ids;
    buf_str(out, "{\"id\":");
    json_write_str(out, request->adapter, strlen(request->adapter));
    buf_str(out, ",\"object\":\"lora_adapter\",\"parent\":");
    json_write_str(out, rules->names[0], strlen(rules->names[0]));
    buf_fmt(out, ",\"loaded\":%s}", request->kind == &oai_load_adapter ? "true" : "false");
}

static const struct oai_field load_adapter_fields[] = {
    {"lora_name", OAI_ANY},           {"lora_path", OAI_ANY},       {"load_inplace", OAI_FALSE},
    {"is_3d_lora_weight", OAI_FALSE}, {"base_model_name", OAI_ANY}, {NULL, OAI_ANY},
};

const struct oai_kind oai_load_adapter = {
    .path = "/v1/load_lora_adapter",
    .schema = "LoadAdapterRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = load_adapter_fields,
    .parse = parse_load_adapter,
    .work = load_adapter,
    .answer = answer_adapter,
};

static const struct oai_field unload_adapter_fields[] = {
    {"lora_name", OAI_ANY},
    {"lora_int_id", OAI_ANY},
    {NULL, OAI_ANY},
};

const struct oai_kind oai_unload_adapter = {
    .path = "/v1/unload_lora_adapter",
    .schema = "UnloadAdapterRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = unload_adapter_fields,
    .parse = read_adapter_name,
    .work = unload_adapter,
    .answer = answer_adapter,
};
