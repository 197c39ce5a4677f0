#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/json.h"
#include "server/oai.h"

static void write_str(struct buf *out, const char *s) {
    json_write_str(out, s, strlen(s));
}

/* --- usage --- */

/* values[] as nested arrays; the innermost are `lengths[stream]` long, or one number each. */
static void write_nested(struct buf *out, const struct engine_info *info, const int32_t *lengths,
                         const int32_t *positions) {
    size_t at = 0;
    buf_char(out, '[');
    for (int layer = 0; layer < info->layers; layer++) {
        buf_str(out, layer ? ",[" : "[");
        for (int head = 0; head < info->heads_kv; head++) {
            int32_t length = lengths[layer * info->heads_kv + head];
            if (head) buf_char(out, ',');
            if (!positions) {
                buf_int(out, length);
                continue;
            }
            buf_char(out, '[');
            for (int32_t i = 0; i < length; i++) {
                if (i) buf_char(out, ',');
                buf_int(out, positions[at++]);
            }
            buf_char(out, ']');
        }
        buf_char(out, ']');
    }
    buf_char(out, ']');
}

static void write_kv_details(struct buf *out, const struct oai_answer *answer) {
    const struct engine_kv_details *kv = &answer->job->kv;
    buf_str(out, ",\"kv_details\":{\"policy\":");
    write_str(out, kv->policy);
    if (kv->budget >= 0)
        buf_fmt(out, ",\"budget\":%" PRId32, kv->budget);
    else
        buf_str(out, ",\"budget\":null");
    buf_fmt(out,
            ",\"seen_tokens\":%" PRId32 ",\"kept_entries\":%" PRId64 ",\"evicted_entries\":%" PRId64
            ",\"dropped_tokens\":%" PRId32 ",\"bytes\":%" PRId64,
            kv->seen_tokens, kv->kept_entries, kv->evicted_entries, kv->dropped_tokens, kv->bytes);
    if (kv->lengths) {
        buf_str(out, ",\"lengths\":");
        write_nested(out, answer->info, kv->lengths, NULL);
    }
    if (kv->lengths && kv->positions) {
        buf_str(out, ",\"positions\":");
        write_nested(out, answer->info, kv->lengths, kv->positions);
    }
    buf_char(out, '}');
}

void oai_render_usage(struct buf *out, const struct oai_answer *answer, uint32_t completion_tokens,
                      bool finished) {
    int64_t prompt = answer->job->request.prompt_count;
    buf_fmt(out,
            "{\"prompt_tokens\":%" PRId64 ",\"completion_tokens\":%" PRIu32
            ",\"total_tokens\":%" PRId64,
            prompt, completion_tokens, prompt + completion_tokens);
    if (finished) {
        buf_fmt(out,
                ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRId32
                "},\"completion_tokens_details\":{\"reasoning_tokens\":0}",
                answer->job->cached_tokens);
        write_kv_details(out, answer);
    }
    buf_char(out, '}');
}

/* --- log-probabilities --- */

/* One token of prompt or answer with its scores. */
struct scored {
    const struct engine_token *token;
    const struct engine_top *top;
    int top_count;
    bool has_score; /* the first prompt token has none */
};

static struct scored scored_at(const struct oai_answer *answer, bool prompt, uint32_t i) {
    const struct engine_job *job = answer->job;
    const struct engine_token *tokens = prompt ? job->prompt_tokens : job->choice[0].tokens;
    const struct engine_top *top = prompt ? job->prompt_top : job->choice[0].top;
    int count = top && job->request.top_logprobs > 0 ? job->request.top_logprobs : 0;
    return (struct scored){&tokens[i], count ? &top[(size_t)i * (size_t)count] : NULL, count,
                           !prompt || i > 0};
}

/* JSON has no infinity; -9999 is what other servers send for "impossible". */
static void write_logprob(struct buf *out, float logprob) {
    if (isfinite(logprob))
        buf_fmt(out, "%.9g", (double)logprob);
    else
        buf_str(out, "-9999.0");
}

/* A token that is part of a character cannot be JSON text: its bytes are written out, as OpenAI
 * does, with `mark` in front. */
static void write_token_text(struct buf *out, const struct engine *engine, int32_t id,
                             const char *mark) {
    const char *bytes = "";
    size_t size = engine_token_bytes(engine, id, &bytes);
    if (utf8_valid(bytes, size)) {
        json_write_str(out, bytes, size);
        return;
    }
    buf_fmt(out, "\"%s", mark);
    for (size_t i = 0; i < size; i++) buf_fmt(out, "\\\\x%02x", (unsigned char)bytes[i]);
    buf_char(out, '"');
}

static void write_token_bytes(struct buf *out, const struct engine *engine, int32_t id) {
    const char *bytes = "";
    size_t size = engine_token_bytes(engine, id, &bytes);
    buf_char(out, '[');
    for (size_t i = 0; i < size; i++) {
        if (i) buf_char(out, ',');
        buf_int(out, (unsigned char)bytes[i]);
    }
    buf_char(out, ']');
}

static void write_chat_token(struct buf *out, const struct engine *engine, int32_t id,
                             float logprob) {
    buf_str(out, "{\"token\":");
    write_token_text(out, engine, id, "");
    buf_str(out, ",\"logprob\":");
    write_logprob(out, logprob);
    buf_str(out, ",\"bytes\":");
    write_token_bytes(out, engine, id);
}

static void write_chat_logprobs(struct buf *out, const struct oai_answer *answer, uint32_t begin,
                                uint32_t end) {
    buf_str(out, "{\"content\":[");
    for (uint32_t i = begin; i < end; i++) {
        struct scored s = scored_at(answer, false, i);
        if (i > begin) buf_char(out, ',');
        write_chat_token(out, answer->engine, s.token->token, s.token->logprob);
        buf_str(out, ",\"top_logprobs\":[");
        for (int k = 0; k < s.top_count; k++) {
            if (k) buf_char(out, ',');
            write_chat_token(out, answer->engine, s.top[k].token, s.top[k].logprob);
            buf_char(out, '}');
        }
        buf_str(out, "]}");
    }
    buf_str(out, "],\"refusal\":null}");
}

/* Object keys must be unique: an alternative with the text of a better one is left out. */
static bool same_text(const struct engine *engine, int32_t a, int32_t b) {
    const char *x = "", *y = "";
    size_t nx = engine_token_bytes(engine, a, &x), ny = engine_token_bytes(engine, b, &y);
    return nx == ny && memcmp(x, y, nx) == 0;
}

static bool is_repeated(const struct engine *engine, const struct scored *s, int k, int32_t id) {
    for (int i = 0; i < k; i++)
        if (same_text(engine, s->top[i].token, id)) return true;
    return false;
}

/* The best alternatives, and the chosen token if it is none of them. */
static void write_top_object(struct buf *out, const struct engine *engine, const struct scored *s) {
    bool comma = false;
    buf_char(out, '{');
    for (int k = 0; k <= s->top_count; k++) {
        int32_t id = k < s->top_count ? s->top[k].token : s->token->token;
        if (is_repeated(engine, s, k, id)) continue;
        if (comma) buf_char(out, ',');
        comma = true;
        write_token_text(out, engine, id, "bytes:");
        buf_char(out, ':');
        write_logprob(out, k < s->top_count ? s->top[k].logprob : s->token->logprob);
    }
    buf_char(out, '}');
}

/* Characters a token adds to the text; bytes that continue a character add none. */
static uint64_t characters(const struct engine *engine, int32_t id) {
    const char *bytes = "";
    size_t size = engine_token_is_special(engine, id) ? 0 : engine_token_bytes(engine, id, &bytes);
    uint64_t count = 0;
    for (size_t i = 0; i < size; i++) count += ((unsigned char)bytes[i] & 0xC0) != 0x80;
    return count;
}

enum column { COLUMN_TOKEN, COLUMN_LOGPROB, COLUMN_TOP, COLUMN_OFFSET };

static void write_cell(struct buf *out, const struct oai_answer *answer, const struct scored *s,
                       enum column column, uint64_t *offset) {
    switch (column) {
    case COLUMN_TOKEN:
        write_token_text(out, answer->engine, s->token->token, "bytes:");
        break;
    case COLUMN_LOGPROB:
        if (s->has_score)
            write_logprob(out, s->token->logprob);
        else
            buf_str(out, "null");
        break;
    case COLUMN_TOP:
        if (s->has_score)
            write_top_object(out, answer->engine, s);
        else
            buf_str(out, "null");
        break;
    case COLUMN_OFFSET:
        buf_fmt(out, "%" PRIu64, *offset);
        *offset += characters(answer->engine, s->token->token);
        break;
    }
}

static void write_column(struct buf *out, const struct oai_answer *answer, uint32_t begin,
                         uint32_t end, bool echo, enum column column, uint64_t *offset) {
    uint32_t prompt =
        echo && answer->job->prompt_tokens ? (uint32_t)answer->job->request.prompt_count : 0;
    buf_char(out, '[');
    for (uint32_t i = 0; i < prompt + (end - begin); i++) {
        struct scored s =
            i < prompt ? scored_at(answer, true, i) : scored_at(answer, false, begin + i - prompt);
        if (i) buf_char(out, ',');
        write_cell(out, answer, &s, column, offset);
    }
    buf_char(out, ']');
}

static void write_text_logprobs(struct buf *out, const struct oai_answer *answer, uint32_t begin,
                                uint32_t end, bool echo, uint64_t *offset) {
    static const char *const names[] = {
        "{\"tokens\":", ",\"token_logprobs\":", ",\"top_logprobs\":", ",\"text_offset\":"};
    for (int column = COLUMN_TOKEN; column <= COLUMN_OFFSET; column++) {
        buf_str(out, names[column]);
        write_column(out, answer, begin, end, echo, (enum column)column, offset);
    }
    buf_char(out, '}');
}

void oai_render_logprobs(struct buf *out, const struct oai_answer *answer, uint32_t begin,
                         uint32_t end, bool echo, uint64_t *offset) {
    if (answer->job->request.top_logprobs < 0)
        buf_str(out, "null");
    else if (answer->request->kind == OAI_CHAT)
        write_chat_logprobs(out, answer, begin, end);
    else
        write_text_logprobs(out, answer, begin, end, echo, offset);
}

/* --- whole answers --- */

void oai_render_prompt_text(struct buf *out, const struct oai_answer *answer) {
    const struct engine_request *request = &answer->job->request;
    for (int32_t i = 0; i < request->prompt_count; i++) {
        const char *bytes = "";
        if (engine_token_is_special(answer->engine, request->prompt[i])) continue;
        size_t size = engine_token_bytes(answer->engine, request->prompt[i], &bytes);
        buf_add(out, bytes, size);
    }
}

const char *oai_finish_name(int finish) {
    return finish == ENGINE_FINISH_LENGTH ? "length" : "stop";
}

/* The stop string, the id of a stop token the client named, or null for the model's own end. */
static void write_stop_reason(struct buf *out, const struct engine_job *job) {
    const struct engine_choice *choice = &job->choice[0];
    const struct engine_request *request = &job->request;
    if (choice->stop_index >= 0 && choice->stop_index < request->stop_count) {
        const struct engine_stop *stop = &request->stops[choice->stop_index];
        json_write_str(out, stop->text, stop->size);
        return;
    }
    for (int32_t i = 0; i < request->stop_id_count; i++) {
        if (request->stop_ids[i] != choice->stop_token) continue;
        buf_int(out, choice->stop_token);
        return;
    }
    buf_str(out, "null");
}

void oai_render_finish(struct buf *out, const struct oai_answer *answer) {
    const struct engine_choice *choice = &answer->job->choice[0];
    buf_fmt(out, ",\"finish_reason\":\"%s\",\"stop_reason\":",
            oai_finish_name(atomic_load_explicit(&choice->finish, memory_order_acquire)));
    write_stop_reason(out, answer->job);
}

static void write_answer_text(struct buf *out, const struct oai_answer *answer) {
    const struct engine_choice *choice = &answer->job->choice[0];
    size_t safe = atomic_load_explicit(&choice->text_safe, memory_order_acquire);
    if (!answer->request->echo) {
        json_write_str(out, choice->text ? choice->text : "", safe);
        return;
    }
    struct buf text;
    buf_open(&text, out->limit);
    oai_render_prompt_text(&text, answer);
    buf_add(&text, choice->text ? choice->text : "", safe);
    if (text.failed) out->failed = true;
    json_write_str(out, text.data ? text.data : "", text.size);
    buf_close(&text);
}

void oai_render_answer(struct buf *out, const struct oai_answer *answer) {
    bool chat = answer->request->kind == OAI_CHAT;
    const struct engine_choice *choice = &answer->job->choice[0];
    uint32_t count = (uint32_t)atomic_load_explicit(&choice->token_count, memory_order_acquire);
    uint64_t offset = 0;
    buf_str(out, "{\"id\":");
    write_str(out, answer->id);
    buf_fmt(out, ",\"object\":\"%s\",\"created\":%" PRId64 ",\"model\":",
            chat ? "chat.completion" : "text_completion", answer->created);
    write_str(out, answer->model);
    buf_str(out, ",\"choices\":[{\"index\":0,");
    buf_str(out, chat ? "\"message\":{\"role\":\"assistant\",\"content\":" : "\"text\":");
    write_answer_text(out, answer);
    buf_str(out, chat ? ",\"refusal\":null},\"logprobs\":" : ",\"logprobs\":");
    oai_render_logprobs(out, answer, 0, count, answer->request->echo, &offset);
    oai_render_finish(out, answer);
    buf_str(out, "}],\"usage\":");
    oai_render_usage(out, answer, count, true);
    buf_str(out, ",\"system_fingerprint\":\"keepd-" KEEPD_VERSION "\"}");
}
