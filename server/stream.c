/* Server-sent events, rendered when libmicrohttpd asks for bytes.
 *
 * Nothing is queued per client: what the engine produced lies in the job, and the reader turns the
 * tokens not shown yet into events when the socket takes more. So a slow client costs a few
 * kilobytes here and nothing in the engine. One event per token (a token that ends inside a
 * character joins the next), so the bytes of a stream do not depend on timing. */
#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "base/json.h"
#include "server/http.h"
#include "server/sock.h"

#define OUT_BYTES_SOFT ((size_t)16 << 10)  /* stop rendering more tokens */
#define OUT_BYTES_MAX  ((size_t)256 << 20) /* one event with every kept position */
#define HEAD_BYTES_MAX 4096
#define BLOCK_BYTES    ((size_t)32 << 10)

void stream_close(struct stream *stream) {
    buf_close(&stream->head);
    buf_close(&stream->out);
}

/* --- events --- */

static void open_head(struct exchange *ex) {
    struct buf *head = &ex->stream.head;
    bool chat = ex->request.kind == OAI_CHAT;
    const char *model = ex->server->rules.names[0];
    buf_open(head, HEAD_BYTES_MAX);
    buf_fmt(head,
            "data: {\"id\":\"%s\",\"object\":\"%s\",\"created\":%" PRId64 ",\"model\":", ex->id,
            chat ? "chat.completion.chunk" : "text_completion", ex->created);
    json_write_str(head, model, strlen(model));
    buf_str(head, ",\"choices\":[");
}

static void begin_event(struct exchange *ex) {
    buf_add(&ex->stream.out, ex->stream.head.data, ex->stream.head.size);
}

static void end_event(struct exchange *ex) {
    struct buf *out = &ex->stream.out;
    buf_char(out, ']');
    if (ex->request.include_usage && ex->request.continuous_usage) {
        struct oai_answer facts = exchange_answer_facts(ex);
        buf_str(out, ",\"usage\":");
        oai_render_usage(out, &facts, ex->stream.tokens_seen, false);
    } else if (ex->request.include_usage) {
        buf_str(out, ",\"usage\":null");
    }
    buf_str(out, "}\n\n");
}

static void add_role(struct exchange *ex) {
    ex->stream.role_shown = true;
    if (ex->request.kind != OAI_CHAT) return;
    begin_event(ex);
    buf_str(&ex->stream.out, "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
                             "\"logprobs\":null,\"finish_reason\":null}");
    end_event(ex);
}

/* The text [text, text + size) with the scores of the tokens not shown yet, up to tokens_seen. */
static void add_content(struct exchange *ex, const char *text, size_t size, bool echo) {
    struct stream *stream = &ex->stream;
    struct oai_answer facts = exchange_answer_facts(ex);
    bool chat = ex->request.kind == OAI_CHAT;
    begin_event(ex);
    buf_str(&stream->out, chat ? "{\"index\":0,\"delta\":{\"content\":" : "{\"index\":0,\"text\":");
    json_write_str(&stream->out, text, size);
    buf_str(&stream->out, chat ? "},\"logprobs\":" : ",\"logprobs\":");
    oai_render_logprobs(&stream->out, &facts, stream->tokens_shown, stream->tokens_seen, echo,
                        &stream->offset);
    buf_str(&stream->out, ",\"finish_reason\":null}");
    stream->tokens_shown = stream->tokens_seen;
    end_event(ex);
}

static void add_echo(struct exchange *ex) {
    struct oai_answer facts = exchange_answer_facts(ex);
    struct buf text;
    if (!ex->request.echo) return;
    buf_open(&text, OUT_BYTES_MAX);
    oai_render_prompt_text(&text, &facts);
    add_content(ex, text.data ? text.data : "", text.size, true);
    if (text.failed) ex->stream.out.failed = true;
    buf_close(&text);
}

static void add_finish(struct exchange *ex) {
    struct buf *out = &ex->stream.out;
    struct oai_answer facts = exchange_answer_facts(ex);
    begin_event(ex);
    buf_str(out, ex->request.kind == OAI_CHAT ? "{\"index\":0,\"delta\":{},\"logprobs\":null"
                                              : "{\"index\":0,\"text\":\"\",\"logprobs\":null");
    oai_render_finish(out, &facts);
    buf_char(out, '}');
    end_event(ex);
    if (!ex->request.include_usage) return;
    begin_event(ex);
    buf_str(out, "],\"usage\":");
    oai_render_usage(out, &facts, ex->stream.tokens_seen, true);
    buf_str(out, "}\n\n");
}

static void add_error(struct exchange *ex) {
    struct oai_error error;
    exchange_job_error(ex, &error);
    buf_str(&ex->stream.out, "data: ");
    oai_render_error(&ex->stream.out, &error);
    buf_str(&ex->stream.out, "\n\n");
}

/* --- from the job to events --- */

/* Shows tokens up to `count` while their text is safe. */
static void add_tokens(struct exchange *ex, uint32_t count, size_t safe, bool finished) {
    struct stream *stream = &ex->stream;
    const struct engine_choice *choice = &ex->job.choice[0];
    while (stream->tokens_seen < count && stream->out.size < OUT_BYTES_SOFT) {
        size_t end = choice->tokens[stream->tokens_seen].text_end;
        if (end > safe && !finished) return; /* a character or a stop string in the making */
        if (end > safe) end = safe;
        stream->tokens_seen++;
        if (end <= stream->text_shown) continue;
        const char *text = choice->text + stream->text_shown;
        size_t size = utf8_complete(text, end - stream->text_shown);
        if (!size) continue;
        add_content(ex, text, size, false);
        stream->text_shown += size;
    }
}

static void add_end(struct exchange *ex, size_t safe, int finish) {
    struct stream *stream = &ex->stream;
    bool scores = ex->job.request.top_logprobs >= 0 && stream->tokens_shown < stream->tokens_seen;
    size_t rest = safe > stream->text_shown ? safe - stream->text_shown : 0;
    if (rest || scores)
        add_content(ex, rest ? ex->job.choice[0].text + stream->text_shown : "", rest, false);
    if (finish == ENGINE_FINISH_ABORT || finish == ENGINE_FINISH_ERROR)
        add_error(ex);
    else
        add_finish(ex);
    buf_str(&stream->out, "data: [DONE]\n\n");
    stream->ended = true;
}

/* `finish` first, then the counts: the other order loses tokens. */
static void render(struct exchange *ex) {
    struct stream *stream = &ex->stream;
    const struct engine_choice *choice = &ex->job.choice[0];
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    uint32_t count = (uint32_t)atomic_load_explicit(&choice->token_count, memory_order_acquire);
    size_t safe = atomic_load_explicit(&choice->text_safe, memory_order_acquire);
    buf_clear(&stream->out);
    stream->out_at = 0;
    if (!count && !finish) return;
    if (!stream->role_shown) {
        add_role(ex);
        add_echo(ex);
    }
    add_tokens(ex, count, safe, finish != ENGINE_RUNNING);
    if (finish && stream->tokens_seen == count) add_end(ex, safe, finish);
}

bool stream_has_news(const struct exchange *ex) {
    const struct engine_choice *choice = &ex->job.choice[0];
    const struct stream *stream = &ex->stream;
    if (ex->finished) return true;
    uint32_t count = (uint32_t)atomic_load_explicit(&choice->token_count, memory_order_acquire);
    size_t safe = atomic_load_explicit(&choice->text_safe, memory_order_acquire);
    return stream->tokens_seen < count && choice->tokens[stream->tokens_seen].text_end <= safe;
}

/* --- libmicrohttpd's reader --- */

static ssize_t take(struct exchange *ex, char *to, size_t max) {
    struct stream *stream = &ex->stream;
    size_t size = stream->out.size - stream->out_at;
    if (size > max) size = max;
    memcpy(to, stream->out.data + stream->out_at, size);
    stream->out_at += size;
    ex->last_output_ns = clock_ns();
    /* The kernel joins the end with the chunk that closes the stream: a client that stops reading
     * at [DONE] has read it all and keeps the connection. */
    if (stream->ended && stream->out_at == stream->out.size) sock_cork(ex->conn->fd, true);
    return (ssize_t)size;
}

static ssize_t read_stream(void *cls, uint64_t position, char *to, size_t max) {
    struct exchange *ex = cls;
    struct stream *stream = &ex->stream;
    (void)position;
    if (ex->gone) return MHD_CONTENT_READER_END_WITH_ERROR;
    if (stream->out_at < stream->out.size) return take(ex, to, max);
    if (stream->ended) return MHD_CONTENT_READER_END_OF_STREAM;
    render(ex);
    if (!stream->out.size && stream->ping) buf_str(&stream->out, ":\n\n");
    stream->ping = false;
    if (stream->out.failed) {
        exchange_gone(ex); /* out of memory: an incomplete event must not look like a whole one */
        return MHD_CONTENT_READER_END_WITH_ERROR;
    }
    if (stream->out.size) return take(ex, to, max);
    exchange_suspend(ex);
    return 0;
}

int stream_queue(struct exchange *ex) {
    struct MHD_Response *response =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES, read_stream, ex, NULL);
    if (!response) return MHD_NO;
    buf_open(&ex->stream.out, OUT_BYTES_MAX);
    open_head(ex);
    ex->phase = PHASE_SENT;
    ex->last_output_ns = clock_ns();
    MHD_add_response_header(response, "Content-Type", "text/event-stream; charset=utf-8");
    MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Accel-Buffering", "no");
    http_add_common_headers(ex, response);
    enum MHD_Result rc =
        ex->stream.head.failed ? MHD_NO : MHD_queue_response(ex->connection, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    return rc;
}
