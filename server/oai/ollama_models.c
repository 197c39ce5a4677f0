/* Facts about models for Ollama's clients: /api/tags, /api/ps, /api/show, and the answers to
 * requests that only load one. */
#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "base/json.h"
#include "server/oai/ollama.h"

static void ollama_models_write_str(struct buf *out, const char *text) {
    json_write_str(out, text, strlen(text));
}

/* Facts that keepd does not know of a model are "". `info` NULL: it is not loaded. */
static void write_details(struct buf *out, const struct engine_info *info) {
    const char *file = info ? info->model_dir : "", *family = info ? info->family : "";
    const size_t size = strlen(file);
    const bool gguf = size > 5 && strcmp(file + size - 5, ".gguf") == 0;
    buf_fmt(out, "\"details\":{\"parent_model\":\"\",\"format\":\"%s\",\"family\":",
            gguf   ? "gguf"
            : info ? "safetensors"
                   : "");
    ollama_models_write_str(out, family);
    buf_str(out, ",\"families\":[");
    ollama_models_write_str(out, family);
    buf_str(out, "],\"parameter_size\":\"\",\"quantization_level\":\"\"}");
}

/* Writes the members that both lists have. */
static void begin_model(struct buf *out, const struct oai_listed *model, const char *name) {
    if (out->data[out->size - 1] != '[') buf_char(out, ',');
    buf_str(out, "{\"name\":");
    ollama_models_write_str(out, name);
    buf_str(out, ",\"model\":");
    ollama_models_write_str(out, name);
    buf_fmt(out, ",\"size\":%" PRId64 ",\"digest\":\"\",",
            model->info ? (int64_t)model->info->weight_bytes : model->memory_bytes);
    write_details(out, model->info);
}

void oai_render_tags(struct buf *out, const struct oai_listed *models, int count, int64_t created) {
    buf_str(out, "{\"models\":[");
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < models[i].name_count && !out->failed; k++) {
            begin_model(out, &models[i], models[i].names[k]);
            buf_str(out, ",\"modified_at\":");
            oai_write_time(out, created);
            buf_char(out, '}');
        }
    }
    buf_str(out, "]}");
}

/* When a model leaves depends on other requests, so its time is far away. */
void oai_render_loaded(struct buf *out, const struct oai_listed *models, int count,
                       int64_t created) {
    (void)created;
    buf_str(out, "{\"models\":[");
    for (int i = 0; i < count; i++) {
        const struct engine_info *info = models[i].info;
        for (int k = 0; info && k < models[i].name_count && !out->failed; k++) {
            begin_model(out, &models[i], models[i].names[k]);
            buf_fmt(out,
                    ",\"expires_at\":\"9999-12-31T00:00:00Z\",\"size_vram\":%zu,"
                    "\"context_length\":%d}",
                    strncmp(info->backend, "cpu", 3) == 0 ? 0 : info->weight_bytes,
                    info->max_model_len);
        }
    }
    buf_str(out, "]}");
}

static void write_capabilities(struct buf *out, const struct oai_rules *rules) {
    const struct engine_info *info = rules->info;
    const struct {
        const char *name;
        bool has;
    } all[] = {{"completion", !info->whole_texts},
               {"tools", rules->tools.form != NULL},
               {"vision", info->pictures != NULL},
               {"thinking", rules->think.begin >= 0 || rules->channels.split},
               {"insert", rules->fim.known},
               {"embedding", info->pooling != ENGINE_POOL_NONE && !info->labels}};
    const char *comma = "";
    buf_str(out, "\"capabilities\":[");
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!all[i].has) continue;
        buf_fmt(out, "%s\"%s\"", comma, all[i].name);
        comma = ",";
    }
    buf_char(out, ']');
}

/* Writes a line of the parameters for each number of the default sampling. */
static void write_parameters(struct buf *out, const struct engine_sampling *s) {
    buf_fmt(out,
            "\"parameters\":\"temperature %.9g\\ntop_p %.9g\\ntop_k %" PRId32
            "\\nmin_p %.9g\\nrepeat_penalty %.9g\"",
            (double)s->temperature, (double)s->top_p, s->top_k, (double)s->min_p,
            (double)s->repetition);
}

void oai_ollama_show(struct buf *out, const struct oai_rules *rules,
                     const struct oai_request *request, const struct engine_ids *ids) {
    const struct engine_info *info = rules->info;
    const struct engine_sampling sampling = oai_default_sampling(info);
    (void)request, (void)ids;
    buf_str(out, "{\"modelfile\":\"\",");
    write_parameters(out, &sampling);
    buf_str(out, ",\"template\":");
    ollama_models_write_str(out, info->chat_template ? info->chat_template : "");
    buf_char(out, ',');
    write_details(out, info);
    buf_str(out, ",\"model_info\":{\"general.architecture\":");
    ollama_models_write_str(out, info->family);
    buf_fmt(out, ",\"%s.context_length\":%d,\"%s.embedding_length\":%d},", info->family,
            info->max_model_len, info->family, info->width);
    write_capabilities(out, rules);
    buf_char(out, '}');
}

void oai_ollama_loaded(struct buf *out, const struct oai_rules *rules,
                       const struct oai_request *request, const struct engine_ids *ids) {
    const bool chat = strcmp(request->kind->path, "/api/chat") == 0;
    (void)ids;
    buf_str(out, "{\"model\":");
    ollama_models_write_str(out, rules->names[0]);
    buf_str(out, ",\"created_at\":");
    oai_write_time(out, clock_unix_seconds());
    buf_str(out,
            chat ? ",\"message\":{\"role\":\"assistant\",\"content\":\"\"}" : ",\"response\":\"\"");
    buf_str(out, ",\"done\":true,\"done_reason\":\"load\"}");
}
