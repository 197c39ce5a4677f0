#include "server/spans.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "server/loop.h"
#include "server/oai/kind.h"
#include "server/otlp.h"

enum { SPAN_ID_BYTES = 8, TRACEPARENT_SIZE = 55 };
enum { KIND_INTERNAL = 1, KIND_SERVER = 2, STATUS_ERROR = 2 };

/* ---- Trace context ---- */

static int hex_digit_of(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Reads bytes from hexadecimal digits, of which only lower-case ones are allowed. */
static bool parse_bytes(const char *text, uint8_t *out, size_t count) {
    for (size_t i = 0; i < count; i++) {
        int high = hex_digit_of(text[2 * i]), low = high < 0 ? -1 : hex_digit_of(text[2 * i + 1]);
        if (low < 0) return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool is_all_zero(const uint8_t *bytes, size_t count) {
    uint8_t any = 0;
    for (size_t i = 0; i < count; i++) any |= bytes[i];
    return any == 0;
}

/* Reads a traceparent. Later versions may append fields, which begin with another dash. */
bool spans_parse(const char *text, struct spans_context *out) {
    struct spans_context found = {0};
    uint8_t version, flags;
    size_t size = strlen(text);
    if (size < TRACEPARENT_SIZE || !parse_bytes(text, &version, 1) || version == 0xff) return false;
    if (size > TRACEPARENT_SIZE && (version == 0 || text[TRACEPARENT_SIZE] != '-')) return false;
    if (text[2] != '-' || text[35] != '-' || text[52] != '-') return false;
    if (!parse_bytes(text + 3, found.trace, sizeof found.trace) ||
        !parse_bytes(text + 36, found.parent, sizeof found.parent) ||
        !parse_bytes(text + 53, &flags, 1))
        return false;
    if (is_all_zero(found.trace, sizeof found.trace) ||
        is_all_zero(found.parent, sizeof found.parent))
        return false;
    found.sampled = (flags & 1) != 0;
    *out = found;
    return true;
}

static void make_span_id(uint8_t *id, size_t size) {
    do CHECK(getrandom(id, size, 0) == (ssize_t)size);
    while (is_all_zero(id, size));
}

void spans_begin(struct spans_context *out) {
    *out = (struct spans_context){.sampled = true};
    make_span_id(out->trace, sizeof out->trace);
}

/* ---- Spans ---- */

struct writer {
    struct buf *out;
    const struct exchange *exchange;
    int64_t offset_ns; /* from clock_ns to the time since 1970 */
    uint8_t root[SPAN_ID_BYTES];
    bool any; /* an attribute has been written */
};

static void write_span_id(struct buf *out, const char *name, const uint8_t *id, size_t size) {
    buf_fmt(out, "\"%s\":\"", name);
    for (size_t i = 0; i < size; i++) buf_fmt(out, "%02x", id[i]);
    buf_char(out, '"');
}

/* Writes the beginning of a span, up to its attributes. */
static void begin_span(struct writer *w, const uint8_t *id, const uint8_t *parent, const char *name,
                       int kind, int64_t begin_ns, int64_t end_ns) {
    struct buf *out = w->out;
    if (end_ns < begin_ns) end_ns = begin_ns;
    buf_char(out, '{');
    write_span_id(out, "traceId", w->exchange->trace.trace, sizeof w->exchange->trace.trace);
    buf_char(out, ',');
    write_span_id(out, "spanId", id, SPAN_ID_BYTES);
    if (!is_all_zero(parent, SPAN_ID_BYTES)) {
        buf_char(out, ',');
        write_span_id(out, "parentSpanId", parent, SPAN_ID_BYTES);
    }
    buf_str(out, ",\"name\":");
    json_write_str(out, name, strlen(name));
    buf_fmt(out,
            ",\"kind\":%d,\"startTimeUnixNano\":\"%" PRId64 "\",\"endTimeUnixNano\":\"%" PRId64
            "\",\"attributes\":[",
            kind, begin_ns + w->offset_ns, end_ns + w->offset_ns);
    w->any = false;
}

static void begin_attribute(struct writer *w, const char *key) {
    buf_fmt(w->out, "%s{\"key\":\"%s\",\"value\":", w->any ? "," : "", key);
    w->any = true;
}

static void write_text_attribute(struct writer *w, const char *key, const char *value) {
    begin_attribute(w, key);
    buf_str(w->out, "{\"stringValue\":");
    json_write_str(w->out, value, strlen(value));
    buf_str(w->out, "}}");
}

/* Writes a number. In this JSON, integers of 64 bits are strings. */
static void write_number_attribute(struct writer *w, const char *key, int64_t value) {
    begin_attribute(w, key);
    buf_fmt(w->out, "{\"intValue\":\"%" PRId64 "\"}}", value);
}

static const char *finish_name(const struct engine_choice *choice) {
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    if (finish == ENGINE_FINISH_ABORT) return "abort";
    return finish == ENGINE_FINISH_ERROR ? "error" : oai_finish_name(finish, false);
}

static void write_finishes(struct writer *w) {
    const struct exchange *ex = w->exchange;
    begin_attribute(w, "gen_ai.response.finish_reasons");
    buf_str(w->out, "{\"arrayValue\":{\"values\":[");
    for (int i = 0, written = 0; i < ex->jobs_submitted; i++)
        for (int k = 0; k < ex->jobs[i].choice_count; k++)
            buf_fmt(w->out, "%s{\"stringValue\":\"%s\"}", written++ ? "," : "",
                    finish_name(&ex->jobs[i].choice[k]));
    buf_str(w->out, "]}}}");
}

static void write_usage_attributes(struct writer *w) {
    const struct exchange *ex = w->exchange;
    int64_t prompt = 0, cached = 0, answer = 0;
    for (int i = 0; i < ex->jobs_submitted; i++) {
        prompt += ex->jobs[i].request.prompt_count;
        cached += ex->jobs[i].cached_tokens;
        answer += ex->progress[i].tokens_counted;
    }
    write_number_attribute(w, "gen_ai.usage.input_tokens", prompt);
    write_number_attribute(w, "gen_ai.usage.output_tokens", answer);
    write_number_attribute(w, "gen_ai.usage.cache_read.input_tokens", cached);
}

static void write_request(struct writer *w, int64_t now_ns) {
    const struct exchange *ex = w->exchange;
    const char *model = ex->model->rules.names[0];
    const struct oai_kind *kind = ex->route->kind;
    bool chat = kind != &oai_completion && kind != &oai_native && kind != &oai_infill;
    const char *operation = kind == &oai_embeddings                         ? "embeddings"
                            : kind == &oai_rerank || kind == &oai_rerank_v2 ? "rerank"
                            : kind == &oai_score                            ? "score"
                            : chat                                          ? "chat"
                                                                            : "text_completion";
    char name[512];
    snprintf(name, sizeof name, "%s %.400s", operation, model);
    begin_span(w, w->root, ex->trace.parent, name, KIND_SERVER, ex->received_ns,
               ex->ended_ns && !ex->request.background ? ex->ended_ns : now_ns);
    write_text_attribute(w, "gen_ai.operation.name", operation);
    write_text_attribute(w, "gen_ai.provider.name", "keepd");
    write_text_attribute(w, "gen_ai.request.model", model);
    write_text_attribute(w, "http.request.method", "POST");
    write_text_attribute(w, "http.route", ex->route->path);
    write_number_attribute(w, "http.response.status_code", ex->status);
    write_text_attribute(w, "keepd.request_id", ex->request_id);
    if (ex->client.settings.name[0])
        write_text_attribute(w, "keepd.tenant", ex->client.settings.name);
    if (ex->jobs_submitted) {
        write_text_attribute(w, "gen_ai.response.model", model);
        write_text_attribute(w, "gen_ai.response.id", ex->id);
        write_number_attribute(w, "gen_ai.request.max_tokens", ex->jobs[0].request.max_tokens);
        write_usage_attributes(w);
        write_finishes(w);
    }
    bool failed = ex->status >= 500 || ex->error.status >= 500;
    if (failed) write_text_attribute(w, "error.type", ex->error.code ? ex->error.code : "500");
    buf_str(w->out, "]");
    if (failed) buf_fmt(w->out, ",\"status\":{\"code\":%d}", STATUS_ERROR);
    buf_char(w->out, '}');
}

/* Writes the span of a part. A part that did not begin has none; one that did not end ends with its
 * job. */
static void write_child_span(struct writer *w, const char *name, int job, int64_t begin_ns,
                             int64_t end_ns) {
    uint8_t id[SPAN_ID_BYTES];
    if (begin_ns == 0) return;
    make_span_id(id, sizeof id);
    buf_char(w->out, ',');
    begin_span(w, id, w->root, name, KIND_INTERNAL, begin_ns,
               end_ns ? end_ns : w->exchange->jobs[job].finished_ns);
    if (w->exchange->job_count > 1) write_number_attribute(w, "keepd.prompt", job);
    buf_str(w->out, "]}");
}

static void write_request_spans(struct buf *out, const struct exchange *ex) {
    struct timespec now;
    int64_t now_ns = clock_ns();
    clock_gettime(CLOCK_REALTIME, &now);
    struct writer w = {.out = out, .exchange = ex};
    w.offset_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec - now_ns;
    make_span_id(w.root, sizeof w.root);
    write_request(&w, now_ns);
    for (int i = 0; i < ex->jobs_submitted && i < SPANS_JOBS; i++) {
        const struct engine_job *job = &ex->jobs[i];
        write_child_span(&w, "queue", i, job->queued_ns, job->admitted_ns);
        write_child_span(&w, "prompt", i, job->admitted_ns, job->first_token_ns);
        write_child_span(&w, "generation", i, job->first_token_ns, job->finished_ns);
    }
}

void spans_send(const struct exchange *ex) {
    const struct oai_kind *kind = ex->route ? ex->route->kind : NULL;
    struct buf spans;
    if (!ex->trace.sampled || !kind || !kind->form) return;
    buf_open(&spans, OTLP_REQUEST_MAX);
    write_request_spans(&spans, ex);
    otlp_add(ex->server->otlp, &spans);
    buf_close(&spans);
}
