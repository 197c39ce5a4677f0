/* The answers that are not generated text. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "server/oai.h"

static void write_str(struct buf *out, const char *s) {
    json_write_str(out, s, strlen(s));
}

/* --- models --- */

static void write_model(struct buf *out, const struct oai_rules *rules, const char *id,
                        int64_t created) {
    buf_str(out, "{\"id\":");
    write_str(out, id);
    buf_fmt(out, ",\"object\":\"model\",\"created\":%" PRId64 ",\"owned_by\":\"keepd\",\"root\":",
            created);
    write_str(out, rules->names[0]);
    buf_fmt(out, ",\"parent\":null,\"max_model_len\":%d}", rules->info->max_model_len);
}

void oai_render_models(struct buf *out, const struct oai_rules *rules, int64_t created) {
    buf_str(out, "{\"object\":\"list\",\"data\":[");
    for (int i = 0; i < rules->name_count; i++) {
        if (i) buf_char(out, ',');
        write_model(out, rules, rules->names[i], created);
    }
    buf_str(out, "]}");
}

bool oai_render_model(struct buf *out, const struct oai_rules *rules, const char *id,
                      int64_t created) {
    for (int i = 0; i < rules->name_count; i++) {
        if (strcmp(rules->names[i], id)) continue;
        write_model(out, rules, id, created);
        return true;
    }
    return false;
}

/* --- tokens --- */

void oai_render_tokens(struct buf *out, const struct engine *engine, const struct engine_ids *ids,
                       bool strings) {
    buf_fmt(out, "{\"count\":%zu,\"max_model_len\":%d,\"tokens\":[", ids->count,
            engine_info(engine)->max_model_len);
    for (size_t i = 0; i < ids->count; i++) {
        if (i) buf_char(out, ',');
        buf_int(out, ids->ids[i]);
    }
    buf_str(out, "],\"token_strs\":");
    buf_str(out, strings ? "[" : "null}");
    if (!strings) return;
    for (size_t i = 0; i < ids->count; i++) {
        const char *bytes = "";
        size_t size = engine_token_bytes(engine, ids->ids[i], &bytes);
        if (i) buf_char(out, ',');
        json_write_str(out, bytes, size);
    }
    buf_str(out, "]}");
}

void oai_render_text(struct buf *out, const struct engine *engine, const int32_t *ids,
                     size_t count) {
    struct buf text;
    buf_open(&text, out->limit);
    for (size_t i = 0; i < count; i++) {
        const char *bytes = "";
        size_t size = engine_token_bytes(engine, ids[i], &bytes);
        buf_add(&text, bytes, size);
    }
    if (text.failed) out->failed = true;
    buf_str(out, "{\"prompt\":");
    json_write_str(out, text.data ? text.data : "", text.size);
    buf_char(out, '}');
    buf_close(&text);
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
                       const struct engine_snapshot *s) {
    buf_fmt(out,
            "\"pool\":{\"pages_total\":%" PRId64 ",\"pages_used\":%" PRId64
            ",\"pages_reserved\":%" PRId64 ",\"pages_retained\":%" PRId64 ",\"page_bytes\":%" PRId64
            ",\"page_slots\":%d}",
            s->pages_total, s->pages_used, s->pages_reserved, s->pages_retained, info->page_bytes,
            info->page_slots);
}

static void write_sequence(struct buf *out, const struct engine_sequence_row *row) {
    buf_fmt(out,
            "{\"state\":\"%s\",\"tokens\":%" PRId32 ",\"held\":%" PRId32
            ",\"prompt_tokens\":%" PRId32 ",\"completion_tokens\":%" PRId32
            ",\"pages_reserved\":%" PRId64,
            row->prefilling ? "prefill" : "decode", row->tokens, row->held, row->prompt_count,
            row->output_count, row->pages_reserved);
    write_policy(out, row->policy, row->budget);
    buf_char(out, '}');
}

/* Ids are text: 64 bits do not survive JavaScript's numbers. */
static void write_conversation(struct buf *out, const struct engine_conversation_row *row) {
    buf_fmt(out,
            "{\"id\":\"%016" PRIx64 "\",\"tokens\":%" PRId32 ",\"held\":%" PRId32
            ",\"pages\":%" PRId64 ",\"idle_seconds\":%.3f",
            row->id, row->tokens, row->held, row->pages, (double)row->idle_ns / 1e9);
    write_policy(out, row->policy, row->budget);
    buf_char(out, '}');
}

void oai_render_kv(struct buf *out, const struct engine_info *info,
                   const struct engine_snapshot *snapshot, const struct engine_sequence_row *rows,
                   int row_count, const struct engine_conversation_row *conversations,
                   int conversation_count) {
    buf_char(out, '{');
    write_pool(out, info, snapshot);
    write_policy(out, info->kv_policy, info->kv_budget);
    buf_fmt(out,
            ",\"layers\":%d,\"heads_kv\":%d,\"running_count\":%d,\"waiting_count\":%d"
            ",\"conversation_count\":%d,\"preemptions\":%" PRIu64 ",\"running\":[",
            info->layers, info->heads_kv, snapshot->running, snapshot->waiting,
            snapshot->conversations, snapshot->preemptions);
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
