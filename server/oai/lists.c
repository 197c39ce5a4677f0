/* The answers that are not generated text. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "server/oai/oai.h"

static void write_str(struct buf *out, const char *s) {
    json_write_str(out, s, strlen(s));
}

/* --- models --- */

void oai_write_time(struct buf *out, int64_t seconds) {
    char text[32];
    struct tm utc;
    time_t time = (time_t)seconds;
    if (!gmtime_r(&time, &utc) || !strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc))
        text[0] = '\0';
    buf_fmt(out, "\"%s\"", text);
}

/* Members that Anthropic's clients read, for whom there is no route of their own. */
static void write_anthropic(struct buf *out, int max_model_len, const char *id, int64_t created) {
    buf_str(out, ",\"type\":\"model\",\"display_name\":");
    write_str(out, id);
    buf_str(out, ",\"created_at\":");
    oai_write_time(out, created);
    buf_fmt(out, ",\"lifecycle\":\"active\",\"max_input_tokens\":%d", max_model_len);
}

/* Writes the state, in the form of llama.cpp's router. */
static void write_status(struct buf *out, const struct oai_listed *model) {
    buf_fmt(out, ",\"status\":{\"value\":\"%s\"", model->state);
    if (model->loading) buf_fmt(out, ",\"progress\":%.3f", model->progress);
    if (model->fault) {
        buf_str(out, ",\"failed\":true,\"error\":");
        write_str(out, model->fault->text);
    }
    buf_fmt(out, "},\"requests_waiting\":%d,\"pinned\":%s", model->waiting,
            model->pinned ? "true" : "false");
    if (model->memory_bytes) buf_fmt(out, ",\"memory_bytes\":%" PRId64, model->memory_bytes);
}

/* `adapter`: `id` is that of one of the model's adapters, whose parent it is. */
static void write_model(struct buf *out, const struct oai_listed *model, const char *id,
                        bool adapter, int64_t created) {
    buf_str(out, "{\"id\":");
    write_str(out, id);
    buf_fmt(out, ",\"object\":\"model\",\"created\":%" PRId64 ",\"owned_by\":\"keepd\",\"root\":",
            created);
    write_str(out, adapter ? id : model->names[0]);
    buf_str(out, ",\"parent\":");
    if (adapter)
        write_str(out, model->names[0]);
    else
        buf_str(out, "null");
    buf_fmt(out, ",\"max_model_len\":%d", model->max_model_len);
    write_anthropic(out, model->max_model_len, id, created);
    write_status(out, model);
    buf_char(out, '}');
}

void oai_render_models(struct buf *out, const struct oai_listed *models, int count,
                       int64_t created) {
    const struct oai_listed *last = &models[count - 1];
    buf_str(out, "{\"object\":\"list\",\"data\":[");
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < models[i].name_count; k++) {
            if (i + k) buf_char(out, ',');
            write_model(out, &models[i], models[i].names[k], false, created);
        }
        for (int k = 0; k < models[i].adapter_count; k++) {
            buf_char(out, ',');
            write_model(out, &models[i], models[i].adapters[k].name, true, created);
        }
    }
    buf_str(out, "],\"has_more\":false,\"first_id\":");
    write_str(out, models[0].names[0]);
    buf_str(out, ",\"last_id\":");
    write_str(out, last->adapter_count ? last->adapters[last->adapter_count - 1].name
                                       : last->names[last->name_count - 1]);
    buf_char(out, '}');
}

bool oai_render_model(struct buf *out, const struct oai_listed *models, int count, const char *id,
                      int64_t created) {
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < models[i].name_count; k++) {
            if (strcmp(models[i].names[k], id)) continue;
            write_model(out, &models[i], id, false, created);
            return true;
        }
        for (int k = 0; k < models[i].adapter_count; k++) {
            const char *name = models[i].adapters[k].name;
            const char *part = oai_adapter_part(models[i].names, models[i].name_count, id);
            if (strcmp(name, id) && (!part || strcmp(name, part))) continue;
            write_model(out, &models[i], name, true, created);
            return true;
        }
    }
    return false;
}

/* --- the server --- */

static void write_policies(struct buf *out, const struct engine *engine) {
    const char *name;
    buf_str(out, ",\"kv_policies\":[");
    for (int i = 0; (name = engine_policy_at(engine, i)); i++) {
        if (i) buf_char(out, ',');
        write_str(out, name);
    }
    buf_char(out, ']');
}

static void write_nullable(struct buf *out, const char *text) {
    if (text && *text)
        write_str(out, text);
    else
        buf_str(out, "null");
}

/* Writes a model's path without its folders, which clients need not know. A directory in the hub's
 * cache, .../models--OWNER--NAME/snapshots/COMMIT, is written as OWNER/NAME. */
static void write_path_name(struct buf *out, const char *path) {
    static const char front[] = "/models--", end[] = "/snapshots/";
    const char *last = strrchr(path, '/'), *owner = strstr(path, front);
    const char *name = owner ? strstr(owner + strlen(front), "--") : NULL;
    const char *after = name ? strstr(name, end) : NULL;
    char text[256];
    if (after && after + strlen(end) == last + 1) {
        owner += strlen(front);
        snprintf(text, sizeof text, "%.*s/%.*s", (int)(name - owner), owner,
                 (int)(after - name - 2), name + 2);
        write_str(out, text);
    } else {
        write_str(out, last && last[1] ? last + 1 : path);
    }
}

static const char *pooling_name(enum engine_pooling pooling) {
    static const char *const names[] = {
        [ENGINE_POOL_NONE] = "none", [ENGINE_POOL_LAST] = "last", [ENGINE_POOL_MEAN] = "mean",
        [ENGINE_POOL_CLS] = "cls",   [ENGINE_POOL_NEXT] = "next", [ENGINE_POOL_LABELS] = "labels"};
    return names[pooling];
}

static void write_adapters(struct buf *out, struct engine *engine, int most) {
    struct engine_adapter_row rows[ENGINE_ADAPTERS_MAX];
    const int count = engine_adapters(engine, rows, ENGINE_ADAPTERS_MAX);
    buf_fmt(out, ",\"max_loras\":%d,\"lora_adapters\":[", most);
    for (int i = 0; i < count; i++) {
        buf_str(out, i ? ",{\"name\":" : "{\"name\":");
        write_str(out, rows[i].name);
        buf_fmt(out, ",\"rank\":%d,\"bytes\":%" PRId64 ",\"requests_active\":%d,\"digest\":\"",
                rows[i].rank, rows[i].bytes, rows[i].users);
        for (size_t k = 0; k < sizeof rows[i].digest; k++) buf_fmt(out, "%02x", rows[i].digest[k]);
        buf_str(out, "\"}");
    }
    buf_char(out, ']');
}

void oai_render_server_info(struct buf *out, const struct oai_rules *rules) {
    const struct engine_info *info = rules->info;
    buf_str(out, "{\"served_model_name\":");
    write_str(out, rules->names[0]);
    buf_fmt(out, ",\"version\":\"" KEEPD_VERSION "\",\"max_model_len\":%d,\"max_num_seqs\":%d",
            info->max_model_len, info->max_num_seqs);
    buf_fmt(out,
            ",\"max_queue\":%d,\"max_choices\":%d,\"max_logprobs\":%d,\"threads\":%d,\"data_"
            "parallel_size\":%d,"
            "\"backend\":",
            info->max_queue, info->max_choices, info->max_logprobs, info->threads, info->replicas);
    write_str(out, info->backend);
    buf_str(out, ",\"activations\":");
    write_nullable(out, info->activations);
    buf_str(out, ",\"model_family\":");
    write_str(out, info->family);
    buf_str(out, ",\"kv_policy\":");
    write_str(out, info->kv_policy);
    write_policies(out, rules->engine);
    buf_fmt(out, ",\"embedding_width\":%d,\"pooling\":\"%s\"", info->width,
            pooling_name(info->pooling));
    buf_fmt(out, ",\"kv_budget\":%d,\"kv_budget_max\":%d,\"kv_dtype\":", info->kv_budget,
            info->kv_budget_max);
    write_str(out, info->kv_dtype);
    buf_fmt(out, ",\"speculate\":%d,\"draft_model\":", info->speculate);
    if (info->draft_model)
        write_path_name(out, info->draft_model);
    else
        buf_str(out, "null");
    write_adapters(out, rules->engine, info->max_adapters);
    buf_fmt(out,
            ",\"draft_bytes\":%" PRId64 ",\"draft_tokens\":%d"
            ",\"has_gates\":%s,\"gates_from\":\"%s\",\"sees_pictures\":%s"
            ",\"has_chat_template\":%s,\"splits_reasoning\":%s"
            ",\"tool_call_parser\":\"%s\"}",
            info->draft_bytes, info->draft_tokens, info->has_gates ? "true" : "false",
            info->gates_from, info->pictures ? "true" : "false",
            info->has_chat_template ? "true" : "false",
            rules->think.begin >= 0 || rules->channels.split ? "true" : "false",
            oai_tool_style_name(&rules->tools));
}

void oai_render_tokenizer_info(struct buf *out, const struct engine *engine) {
    const struct engine_info *info = engine_info(engine);
    buf_str(out, "{\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"bos_token\":");
    write_nullable(out, info->bos_token);
    buf_str(out, ",\"eos_token\":");
    write_nullable(out, info->eos_token);
    buf_str(out, ",\"pad_token\":null,\"chat_template\":");
    write_nullable(out, info->chat_template);
    buf_fmt(out, ",\"vocab_size\":%d,\"model_max_length\":%d}", info->vocab, info->max_model_len);
}

/* The defaults of requests, by llama.cpp's names. */
static void write_defaults(struct buf *out, const struct oai_rules *rules) {
    const struct engine_info *info = rules->info;
    const struct engine_sampling sampling = oai_default_sampling(info);
    buf_fmt(out,
            "{\"n_ctx\":%d,\"params\":{\"n_predict\":-1,\"seed\":%" PRId64
            ",\"temperature\":%.9g,\"top_k\":%d"
            ",\"top_p\":%.9g,\"min_p\":%.9g,\"repeat_penalty\":%.9g,\"presence_penalty\":0"
            ",\"frequency_penalty\":0,\"stream\":false}}",
            info->max_model_len, rules->seed, (double)sampling.temperature, sampling.top_k,
            (double)sampling.top_p, (double)sampling.min_p, (double)sampling.repetition);
}

void oai_render_props(struct buf *out, const struct oai_rules *rules, bool sleeps) {
    const struct engine_info *info = rules->info;
    buf_str(out, "{\"default_generation_settings\":");
    write_defaults(out, rules);
    buf_fmt(out, ",\"total_slots\":%d,\"model_alias\":", info->max_num_seqs * info->replicas);
    write_str(out, rules->names[0]);
    buf_str(out, ",\"model_path\":");
    write_path_name(out, info->model_dir);
    buf_fmt(out, ",\"modalities\":{\"vision\":%s,\"audio\":false},\"chat_template\":",
            info->pictures ? "true" : "false");
    write_str(out, info->chat_template ? info->chat_template : "");
    buf_str(out, ",\"bos_token\":");
    write_str(out, info->bos_token ? info->bos_token : "");
    buf_str(out, ",\"eos_token\":");
    write_str(out, info->eos_token ? info->eos_token : "");
    buf_fmt(out,
            ",\"endpoint_slots\":true,\"endpoint_props\":false,\"endpoint_metrics\":true"
            ",\"endpoint_infill\":%s,\"is_sleeping\":%s,\"build_info\":\"keepd-" KEEPD_VERSION
            "\"}",
            rules->fim.known ? "true" : "false", sleeps ? "true" : "false");
}

/* The first places are taken by the running sequences. */
void oai_render_slots(struct buf *out, const struct engine_info *info,
                      const struct engine_sequence_row *rows, int row_count) {
    buf_char(out, '[');
    for (int i = 0; i < info->max_num_seqs * info->replicas; i++) {
        const struct engine_sequence_row *row = i < row_count ? &rows[i] : NULL;
        buf_fmt(out,
                "%s{\"id\":%d,\"n_ctx\":%d,\"speculative\":false,\"is_processing\":%s"
                ",\"n_prompt_tokens\":%" PRId32 ",\"n_decoded\":%" PRId32 "}",
                i ? "," : "", i, info->max_model_len, row ? "true" : "false",
                row ? row->prompt_count : 0, row ? row->output_count : 0);
    }
    buf_char(out, ']');
}

/* Entries that all streams hold for one token count as one token. */
static void write_load(struct buf *out, const struct engine_info *info, int replica,
                       const struct engine_status *s) {
    const int64_t each = info->token_entries;
    int64_t total = each > 0 ? s->pages_total * info->page_slots / each : 0;
    int64_t used = each > 0 ? s->pages_reserved * info->page_slots / each : 0;
    buf_fmt(out,
            "{\"dp_rank\":%d,\"num_running_reqs\":%d,\"num_waiting_reqs\":%d,\"num_total_reqs\":%d",
            replica, s->running, s->waiting, s->running + s->waiting);
    buf_fmt(out,
            ",\"num_used_tokens\":%" PRId64 ",\"max_total_num_tokens\":%" PRId64
            ",\"token_usage\":%.6g,\"max_running_requests\":%d}",
            used, total,
            s->pages_total > 0 ? (double)s->pages_reserved / (double)s->pages_total : 0.0,
            info->max_num_seqs);
}

void oai_render_loads(struct buf *out, const struct oai_load *load) {
    buf_fmt(out, "{\"timestamp\":%" PRId64 ",\"version\":\"" KEEPD_VERSION "\",\"loads\":[",
            load->now);
    for (int i = 0; i < load->info->replicas; i++) {
        if (i) buf_char(out, ',');
        write_load(out, load->info, i, &load->statuses[i]);
    }
    buf_str(out, "]}");
}

/* --- conversations --- */

bool oai_conversation_id(const char *text, uint64_t *id) {
    static const char digits[] = "0123456789abcdef";
    *id = 0;
    for (int i = 0; i < 16; i++) {
        const char *digit = text[i] ? strchr(digits, text[i]) : NULL;
        if (!digit) return false;
        *id = *id << 4 | (uint64_t)(digit - digits);
    }
    return text[16] == '\0';
}

void oai_render_deleted(struct buf *out, uint64_t conversation) {
    buf_fmt(out, "{\"id\":\"%016" PRIx64 "\",\"object\":\"conversation.deleted\",\"deleted\":true}",
            conversation);
}

void oai_render_uploaded(struct buf *out, const struct engine_conversation_row *row) {
    buf_fmt(out,
            "{\"id\":\"%016" PRIx64 "\",\"object\":\"conversation\",\"tokens\":%" PRId32
            ",\"disk_bytes\":%" PRId64 "}",
            row->id, row->tokens, row->disk_bytes);
}

/* --- GET /kv --- */

static void write_policy(struct buf *out, const char *policy, int32_t budget) {
    buf_str(out, ",\"policy\":");
    write_str(out, policy);
    if (budget >= 0)
        buf_fmt(out, ",\"budget\":%" PRId32, budget);
    else
        buf_str(out, ",\"budget\":null");
}

static void write_pool(struct buf *out, const struct engine_info *info,
                       const struct engine_status *s) {
    buf_fmt(out,
            "\"pool\":{\"pages_total\":%" PRId64 ",\"pages_used\":%" PRId64
            ",\"pages_reserved\":%" PRId64 ",\"pages_retained\":%" PRId64 ",\"page_bytes\":%" PRId64
            ",\"page_slots\":%d}",
            s->pages_total, s->pages_used, s->pages_reserved, s->pages_retained, info->page_bytes,
            info->page_slots);
}

static void write_sequence(struct buf *out, const struct engine_sequence_row *row) {
    buf_fmt(out,
            "{\"engine\":%d,\"state\":\"%s\",\"tokens\":%" PRId32 ",\"held\":%" PRId32
            ",\"prompt_tokens\":%" PRId32 ",\"completion_tokens\":%" PRId32
            ",\"pages_reserved\":%" PRId64,
            row->replica, row->prefilling ? "prefill" : "decode", row->tokens, row->held,
            row->prompt_count, row->output_count, row->pages_reserved);
    write_policy(out, row->policy, row->budget);
    buf_char(out, '}');
}

/* Ids are text: 64 bits do not survive JavaScript's numbers. */
static void write_conversation(struct buf *out, const struct engine_conversation_row *row) {
    buf_fmt(out,
            "{\"id\":\"%016" PRIx64 "\",\"object\":\"conversation\",\"tokens\":%" PRId32
            ",\"held\":%" PRId32 ",\"pages\":%" PRId64 ",\"disk_bytes\":%" PRId64
            ",\"idle_seconds\":%.3f,\"superseded\":%s,\"pinned\":%s,\"ttl\":",
            row->id, row->tokens, row->held, row->pages, row->disk_bytes,
            (double)row->idle_ns / 1e9, row->superseded ? "true" : "false",
            row->pinned ? "true" : "false");
    if (row->ttl > 0)
        buf_fmt(out, "%.3f", fmax(0, row->ttl - (double)row->idle_ns / 1e9));
    else
        buf_str(out, "null");
    if (row->replica >= 0)
        buf_fmt(out, ",\"engine\":%d", row->replica);
    else
        buf_str(out, ",\"engine\":null");
    write_policy(out, row->policy, row->budget);
    buf_char(out, '}');
}

void oai_render_conversations(struct buf *out, const struct engine_conversation_row *rows,
                              int count) {
    buf_str(out, "{\"object\":\"list\",\"data\":[");
    for (int i = 0; i < count; i++) {
        if (i > 0) buf_char(out, ',');
        write_conversation(out, &rows[i]);
    }
    buf_str(out, "]}");
}

void oai_render_kv(struct buf *out, const struct engine_info *info,
                   const struct engine_status *status, const struct engine_sequence_row *rows,
                   int row_count, const struct engine_conversation_row *conversations,
                   int conversation_count) {
    buf_char(out, '{');
    write_pool(out, info, status);
    write_policy(out, info->kv_policy, info->kv_budget);
    buf_fmt(out,
            ",\"layers\":%d,\"heads_kv\":%d,\"running_count\":%d,\"waiting_count\":%d"
            ",\"conversation_count\":%d,\"preemptions\":%" PRIu64 ",\"running\":[",
            info->layers, info->heads_kv, status->running, status->waiting, status->conversations,
            status->counters.preemptions);
    for (int i = 0; i < row_count; i++) {
        if (i) buf_char(out, ',');
        write_sequence(out, &rows[i]);
    }
    buf_str(out, "],\"conversations\":[");
    for (int i = 0; i < conversation_count; i++) {
        if (i) buf_char(out, ',');
        write_conversation(out, &conversations[i]);
    }
    buf_str(out, "]}");
}
