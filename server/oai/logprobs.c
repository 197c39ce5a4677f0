/* Log-probabilities: of answers in OpenAI's two forms, of prompts in vLLM's. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "server/oai/oai.h"

/* One token of prompt or answer with its scores. */
struct scored {
    const struct engine_token *token;
    const struct engine_top *top;
    int top_count;
    bool has_score; /* false only for the first token of a prompt */
};

/* Returns a token with `wanted` of the alternatives that the engine kept; -1 counts as none. */
static struct scored scored_at(const struct oai_answer *answer, int index, bool prompt, uint32_t i,
                               int wanted) {
    const struct engine_job *job = oai_job_of(answer, index);
    const struct engine_choice *choice = oai_choice_of(answer, index);
    const struct engine_token *tokens = prompt ? job->prompt_tokens : choice->tokens;
    const struct engine_top *top = prompt ? job->prompt_top : choice->top;
    int most = prompt ? job->request.prompt_top_logprobs : job->request.top_logprobs;
    int kept = top && most > 0 ? most : 0;
    int count = wanted < kept ? wanted : kept;
    return (struct scored){&tokens[i], count > 0 ? &top[(size_t)i * (size_t)kept] : NULL,
                           count > 0 ? count : 0, !prompt || i > 0};
}

/* Writes a log-probability. JSON has no infinity; other servers send -9999 for "impossible". */
static void write_logprob(struct buf *out, float logprob) {
    if (isfinite(logprob))
        buf_fmt(out, "%.9g", (double)logprob);
    else
        buf_str(out, "-9999.0");
}

/* Writes a token's text. A part of a character cannot be JSON text: its bytes are written in
 * hexadecimal, as OpenAI does, after `mark`. */
static void write_token_text(struct buf *out, const struct oai_answer *answer, int32_t id,
                             const char *mark) {
    const char *bytes = "";
    if (answer->request->tokens_as_ids) {
        buf_fmt(out, "\"token_id:%" PRId32 "\"", id);
        return;
    }
    size_t size = engine_token_bytes(answer->engine, id, &bytes);
    if (utf8_valid(bytes, size)) {
        json_write_str(out, bytes, size);
        return;
    }
    buf_fmt(out, "\"%s", mark);
    for (size_t i = 0; i < size; i++) buf_fmt(out, "\\\\x%02x", (unsigned char)bytes[i]);
    buf_char(out, '"');
}

/* --- chat --- */

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

/* Writes the members of a token, without the closing brace. */
static void write_chat_token(struct buf *out, const struct oai_answer *answer, int32_t id,
                             float logprob, bool with_id) {
    buf_char(out, '{');
    if (with_id) buf_fmt(out, "\"id\":%" PRId32 ",", id);
    buf_str(out, "\"token\":");
    write_token_text(out, answer, id, "");
    buf_str(out, ",\"logprob\":");
    write_logprob(out, logprob);
    buf_str(out, ",\"bytes\":");
    write_token_bytes(out, answer->engine, id);
}

static void write_chat_tokens(struct buf *out, const struct oai_answer *answer, int index,
                              uint32_t begin, uint32_t end, bool with_ids) {
    buf_char(out, '[');
    for (uint32_t i = begin; i < end; i++) {
        struct scored s = scored_at(answer, index, false, i, answer->request->logprobs);
        if (i > begin) buf_char(out, ',');
        write_chat_token(out, answer, s.token->token, s.token->logprob, with_ids);
        buf_str(out, ",\"top_logprobs\":[");
        for (int k = 0; k < s.top_count; k++) {
            if (k) buf_char(out, ',');
            write_chat_token(out, answer, s.top[k].token, s.top[k].logprob, with_ids);
            buf_char(out, '}');
        }
        buf_str(out, "]}");
    }
    buf_char(out, ']');
}

void oai_render_chat_logprobs(struct buf *out, const struct oai_answer *answer, int index,
                              uint32_t begin, uint32_t end) {
    if (answer->request->logprobs < 0) {
        buf_str(out, "null");
        return;
    }
    buf_str(out, "{\"content\":");
    write_chat_tokens(out, answer, index, begin, end, false);
    buf_str(out, ",\"refusal\":null}");
}

void oai_render_token_logprobs(struct buf *out, const struct oai_answer *answer, int index,
                               uint32_t begin, uint32_t end) {
    bool wanted = answer->request->logprobs >= 0;
    write_chat_tokens(out, answer, index, begin, wanted ? end : begin, false);
}

void oai_render_native_logprobs(struct buf *out, const struct oai_answer *answer, int index,
                                uint32_t begin, uint32_t end) {
    write_chat_tokens(out, answer, index, begin, end, true);
}

/* --- completions --- */

/* Returns whether two tokens are the same key of an object. */
static bool same_key(const struct oai_answer *answer, int32_t a, int32_t b) {
    const char *x = "", *y = "";
    if (a == b || answer->request->tokens_as_ids) return a == b;
    size_t nx = engine_token_bytes(answer->engine, a, &x);
    size_t ny = engine_token_bytes(answer->engine, b, &y);
    return nx == ny && memcmp(x, y, nx) == 0;
}

/* Keys of an object must be unique, so an alternative is left out if it has the key of the token
 * itself or of a better alternative. There may be as many as the vocabulary has tokens, so earlier
 * keys are found by their hash. */
enum { KEYS_SMALL = 64 };
struct keys {
    int32_t *id; /* [size] a token that has the key, -1 none */
    size_t size; /* a power of two, at least twice the number of keys */
    int32_t small[KEYS_SMALL];
};

static bool logprobs_keys_open(struct keys *keys, int count) {
    keys->size = KEYS_SMALL;
    while (keys->size < 2 * ((size_t)count + 1)) keys->size *= 2;
    keys->id = keys->size > KEYS_SMALL ? mem_try_alloc(keys->size, sizeof *keys->id) : keys->small;
    for (size_t i = 0; keys->id && i < keys->size; i++) keys->id[i] = -1;
    return keys->id;
}

static void logprobs_keys_close(struct keys *keys) {
    if (keys->id != keys->small) mem_free(keys->id);
}

/* Returns whether the token's key is a new one. */
static bool keys_add(struct keys *keys, const struct oai_answer *answer, int32_t id) {
    const char *bytes = (const char *)&id;
    size_t size = sizeof id;
    if (!answer->request->tokens_as_ids) size = engine_token_bytes(answer->engine, id, &bytes);
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)bytes[i]) * 1099511628211u;
    size_t at = hash & (keys->size - 1);
    for (; keys->id[at] >= 0; at = (at + 1) & (keys->size - 1))
        if (same_key(answer, keys->id[at], id)) return false;
    keys->id[at] = id;
    return true;
}

/* Writes the token itself, then the best alternatives, in vLLM's order. */
static void write_top_object(struct buf *out, const struct oai_answer *answer,
                             const struct scored *s) {
    struct keys keys;
    if (!logprobs_keys_open(&keys, s->top_count)) {
        out->failed = true;
        return;
    }
    buf_char(out, '{');
    for (int k = -1; k < s->top_count; k++) {
        int32_t id = k < 0 ? s->token->token : s->top[k].token;
        if (!keys_add(&keys, answer, id)) continue;
        if (k >= 0) buf_char(out, ',');
        write_token_text(out, answer, id, "bytes:");
        buf_char(out, ':');
        write_logprob(out, k < 0 ? s->token->logprob : s->top[k].logprob);
    }
    buf_char(out, '}');
    logprobs_keys_close(&keys);
}

/* Counts characters as json_write_str writes them: one for each faulty part. */
static void offset_add_byte(struct oai_offset *offset, char byte) {
    size_t length;
    offset->part[offset->part_size++] = byte;
    while (offset->part_size) {
        if (utf8_step(offset->part, offset->part_size, &length) == UTF8_SHORT) return;
        offset->characters++;
        offset->part_size -= (uint8_t)length;
        memmove(offset->part, offset->part + length, offset->part_size);
    }
}

/* Returns where a token begins: after the unfinished character before it, unless its first byte
 * continues that character. */
static uint64_t offset_of_token(const struct oai_offset *offset, const char *bytes, size_t size) {
    char part[sizeof offset->part + 1];
    size_t length;
    if (!offset->part_size || !size) return offset->characters;
    memcpy(part, offset->part, offset->part_size);
    part[offset->part_size] = bytes[0];
    bool broken = utf8_step(part, offset->part_size + 1u, &length) == UTF8_BAD;
    return offset->characters + broken;
}

static void write_offset(struct buf *out, struct oai_offset *offset, const char *bytes,
                         size_t size) {
    buf_fmt(out, "%" PRIu64, offset_of_token(offset, bytes, size));
    for (size_t i = 0; i < size; i++) offset_add_byte(offset, bytes[i]);
}

/* Returns the bytes of an answer's token in its text, which has no special tokens. */
static size_t shown_bytes(const struct engine *engine, int32_t id, const char **bytes) {
    return engine_token_is_special(engine, id) ? 0 : engine_token_bytes(engine, id, bytes);
}

enum column { COLUMN_TOKEN, COLUMN_LOGPROB, COLUMN_TOP, COLUMN_OFFSET };

static void write_cell(struct buf *out, const struct oai_answer *answer, const struct scored *s,
                       enum column column) {
    switch (column) {
    case COLUMN_TOKEN:
        write_token_text(out, answer, s->token->token, "bytes:");
        break;
    case COLUMN_LOGPROB:
        if (s->has_score)
            write_logprob(out, s->token->logprob);
        else
            buf_str(out, "null");
        break;
    case COLUMN_TOP:
        if (s->has_score)
            write_top_object(out, answer, s);
        else
            buf_str(out, "null");
        break;
    case COLUMN_OFFSET:
        break;
    }
}

/* A range of tokens of one answer. With `echo` the prompt's tokens come first. */
struct range {
    int index;
    uint32_t prompt, begin, end;
};

static void write_column(struct buf *out, const struct oai_answer *answer,
                         const struct range *range, enum column column, struct oai_offset *offset) {
    int wanted = answer->request->logprobs;
    uint32_t count = range->prompt + (range->end - range->begin);
    buf_char(out, '[');
    for (uint32_t i = 0; i < count; i++) {
        bool prompt = i < range->prompt;
        uint32_t at = prompt ? i : range->begin + i - range->prompt;
        struct scored s = scored_at(answer, range->index, prompt, at, wanted);
        if (i) buf_char(out, ',');
        if (column != COLUMN_OFFSET) {
            write_cell(out, answer, &s, column);
            continue;
        }
        const char *bytes = "";
        size_t size = prompt ? oai_echo_bytes(answer, range->index, at, &bytes)
                             : shown_bytes(answer->engine, s.token->token, &bytes);
        write_offset(out, offset, bytes, size);
    }
    buf_char(out, ']');
}

void oai_render_text_logprobs(struct buf *out, const struct oai_answer *answer, int index,
                              uint32_t begin, uint32_t end, bool echo, struct oai_offset *offset) {
    static const char *const names[] = {
        "{\"tokens\":", ",\"token_logprobs\":", ",\"top_logprobs\":", ",\"text_offset\":"};
    const struct engine_job *job = oai_job_of(answer, index);
    uint32_t prompt = echo && job->prompt_tokens ? (uint32_t)job->request.prompt_count : 0;
    struct range range = {index, prompt, begin, end};
    if (answer->request->logprobs < 0) {
        buf_str(out, "null");
        return;
    }
    for (int column = COLUMN_TOKEN; column <= COLUMN_OFFSET; column++) {
        buf_str(out, names[column]);
        write_column(out, answer, &range, (enum column)column, offset);
    }
    buf_char(out, '}');
}

/* --- prompts --- */

static void write_prompt_token(struct buf *out, const struct engine *engine, int32_t id,
                               float logprob, int rank) {
    const char *bytes = "";
    size_t size = engine_token_bytes(engine, id, &bytes);
    buf_fmt(out, "\"%" PRId32 "\":{\"logprob\":", id);
    write_logprob(out, logprob);
    buf_fmt(out, ",\"rank\":%d,\"decoded_token\":", rank);
    json_write_str(out, bytes, size);
    buf_char(out, '}');
}

/* Writes the prompt's token first, then the other alternatives. */
static void write_prompt_entry(struct buf *out, const struct engine *engine,
                               const struct scored *s) {
    buf_char(out, '{');
    write_prompt_token(out, engine, s->token->token, s->token->logprob, s->token->rank);
    for (int k = 0; k < s->top_count; k++) {
        if (s->top[k].token == s->token->token) continue;
        buf_char(out, ',');
        write_prompt_token(out, engine, s->top[k].token, s->top[k].logprob, k + 1);
    }
    buf_char(out, '}');
}

void oai_render_prompt_logprobs(struct buf *out, const struct oai_answer *answer, int index) {
    const struct engine_job *job = oai_job_of(answer, index);
    uint32_t count = job->prompt_tokens ? (uint32_t)job->request.prompt_count : 0;
    if (answer->request->prompt_logprobs < 0) {
        buf_str(out, "null");
        return;
    }
    buf_char(out, '[');
    for (uint32_t i = 0; i < count; i++) {
        struct scored s = scored_at(answer, index, true, i, answer->request->prompt_logprobs);
        if (i) buf_char(out, ',');
        if (s.has_score)
            write_prompt_entry(out, answer->engine, &s);
        else
            buf_str(out, "null");
    }
    buf_char(out, ']');
}
