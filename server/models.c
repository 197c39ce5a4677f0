#include "server/models.h"

#include <string.h>

#include "base/mem.h"

/* Splits "name, alias". An empty list is a fault. */
static int set_names(struct served_model *model, const char *names, struct fault *fault) {
    char *save = NULL;
    model->names = mem_must_strdup(names);
    for (char *name = strtok_r(model->names, ",", &save); name; name = strtok_r(NULL, ",", &save)) {
        name += strspn(name, " ");
        if (!*name) continue;
        if (model->rules.name_count == OAI_NAMES_MAX || strlen(name) > 256)
            return fault_set(fault, ERR_LIMIT, "served-model-name",
                             "at most %d names of at most 256 bytes", OAI_NAMES_MAX);
        model->rules.names[model->rules.name_count++] = name;
    }
    if (model->rules.name_count) return 0;
    return fault_set(fault, ERR_INVALID, "served-model-name", "the name is empty");
}

int served_open(struct served_model *model, const struct server_model *options,
                struct fault *fault) {
    model->options = *options;
    return set_names(model, options->names, fault);
}

int served_use(struct served_model *model, const struct server_options *server,
               struct engine *engine, struct fault *fault) {
    const struct server_model *options = &model->options;
    struct oai_rules *rules = &model->rules;
    int rc = oai_check_parser(engine_info(engine)->tool_template, options->tool_call_parser, fault);
    if (rc) return rc;
    model->engine = engine;
    rules->engine = engine;
    rules->info = engine_info(engine);
    rules->default_max_tokens = options->default_max_tokens;
    rules->seed = options->seed;
    rules->strict = server->strict_params;
    rules->body_bytes = server->max_body_bytes;
    rules->think = options->split_reasoning ? oai_find_think(engine) : (struct oai_think){-1, -1};
    rules->channels = oai_find_channels(engine);
    rules->channels.split = rules->channels.known && options->split_reasoning;
    rules->fim = oai_find_fim(engine);
    rules->verdict = oai_find_verdict(engine);
    rules->tools = oai_find_tools(engine, options->tool_call_parser);
    stats_open(&model->stats, rules->info->max_model_len);
    return 0;
}

void served_close(struct served_model *model) {
    oai_close_tools(&model->rules.tools);
    mem_free(model->names);
}
