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
#include "base/mem.h"
#include "server/http.h"
#include "server/sock.h"

#define OUT_BYTES_SOFT ((size_t)16 << 10)  /* stop rendering more tokens */
#define OUT_BYTES_MAX  ((size_t)256 << 20) /* one event with every kept position */
#define HEAD_BYTES_MAX 4096
#define BLOCK_BYTES    ((size_t)8 << 10) /* of HTTP/1.0; cleared at the start of every stream */

void stream_close(struct stream *stream) {
    buf_close(&stream->head);
    buf_close(&stream->out);
    mem_free(stream->choices);
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

/* Tokens looked at, not those that are there: so events do not depend on timing. */
static uint64_t tokens_seen(const struct exchange *ex) {
    struct oai_answer facts = exchange_answer_facts(ex);
    uint64_t sum = 0;
    for (int i = 0; i < oai_choice_count(&facts); i++) sum += ex->stream.choices[i].tokens_seen;
    return sum;
}

static void end_event(struct exchange *ex) {
    struct buf *out = &ex->stream.out;
    buf_char(out, ']');
    if (ex->request.include_usage && ex->request.continuous_usage) {
        struct oai_answer facts = exchange_answer_facts(ex);
        buf_str(out, ",\"usage\":");
        oai_render_usage(out, &facts, tokens_seen(ex), false);
    } else if (ex->request.include_usage) {
        buf_str(out, ",\"usage\":null");
    }
    buf_str(out, "}\n\n");
}

static void add_role(struct exchange *ex, int index) {
    if (ex->request.kind != OAI_CHAT) return;
    begin_event(ex);
    buf_fmt(&ex->stream.out,
            "{\"index\":%d,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
            "\"logprobs\":null,\"finish_reason\":null}",
            index);
    end_event(ex);
}

/* What was thought goes by vLLM's older and newer name; clients read one or the other. */
static void add_text(struct exchange *ex, const char *text, size_t size, bool thinking) {
    struct buf *out = &ex->stream.out;
    bool chat = ex->request.kind == OAI_CHAT;
    if (chat) buf_str(out, "\"delta\":{");
    buf_str(out, thinking ? "\"reasoning_content\":" : chat ? "\"content\":" : "\"text\":");
    json_write_str(out, text, size);
    if (thinking) {
        buf_str(out, ",\"reasoning\":");
        json_write_str(out, text, size);
    }
    if (chat) buf_char(out, '}');
}

/* What a delta says. */
struct said {
    enum tool_piece_kind kind;
    const char *text;
    size_t size;
};

static void add_said(struct exchange *ex, int index, const struct said *said) {
    struct stream_choice *c = &ex->stream.choices[index];
    struct buf *out = &ex->stream.out;
    struct oai_answer facts = exchange_answer_facts(ex);
    if (said->kind == TOOL_TEXT) {
        add_text(ex, said->text, said->size, c->voice.thinking);
        return;
    }
    uint32_t call = c->calls.calls - 1;
    buf_str(out, "\"delta\":{");
    if (said->kind == TOOL_CALL)
        oai_render_call_begin(out, &facts, index, call, said->text, said->size);
    else if (said->kind == TOOL_BARE)
        oai_render_call_arguments(out, call, "{}", 2);
    else
        oai_render_call_arguments(out, call, said->text, said->size);
    buf_char(out, '}');
}

/* One delta with the scores of the tokens not shown yet, up to tokens_seen. */
static void add_delta(struct exchange *ex, int index, struct said said, bool echo) {
    struct stream_choice *c = &ex->stream.choices[index];
    struct buf *out = &ex->stream.out;
    struct oai_answer facts = exchange_answer_facts(ex);
    uint32_t end = c->tokens_seen;
    if (c->finished && end > oai_shown_count(oai_choice_of(&facts, index)))
        end = oai_shown_count(oai_choice_of(&facts, index));
    begin_event(ex);
    buf_fmt(out, "{\"index\":%d,", index);
    add_said(ex, index, &said);
    buf_str(out, ",\"logprobs\":");
    oai_render_logprobs(out, &facts, index, c->tokens_shown, end, echo, &c->offset);
    buf_str(out, ",\"finish_reason\":null}");
    c->tokens_shown = end;
    end_event(ex);
}

static void add_content(struct exchange *ex, int index, const char *text, size_t size, bool echo) {
    add_delta(ex, index, (struct said){TOOL_TEXT, text, size}, echo);
}

static void add_echo(struct exchange *ex, int index) {
    struct oai_answer facts = exchange_answer_facts(ex);
    struct buf text;
    if (!ex->request.echo) return;
    buf_open(&text, OUT_BYTES_MAX);
    oai_render_prompt_text(&text, &facts, index);
    add_content(ex, index, text.data ? text.data : "", text.size, true);
    if (text.failed) ex->stream.out.failed = true;
    buf_close(&text);
}

static void add_finish(struct exchange *ex, int index) {
    struct buf *out = &ex->stream.out;
    struct oai_answer facts = exchange_answer_facts(ex);
    begin_event(ex);
    buf_fmt(out, "{\"index\":%d,%s,\"logprobs\":null", index,
            ex->request.kind == OAI_CHAT ? "\"delta\":{}" : "\"text\":\"\"");
    oai_render_finish(out, &facts, index, tool_reader_called(&ex->stream.choices[index].calls));
    buf_char(out, '}');
    end_event(ex);
}

static void add_usage(struct exchange *ex) {
    struct buf *out = &ex->stream.out;
    struct oai_answer facts = exchange_answer_facts(ex);
    if (!ex->request.include_usage) return;
    begin_event(ex);
    buf_str(out, "],\"usage\":");
    oai_render_usage(out, &facts, tokens_seen(ex), true);
    buf_str(out, "}\n\n");
}

static void add_error(struct exchange *ex) {
    buf_str(&ex->stream.out, "data: ");
    oai_render_error(&ex->stream.out, &ex->error);
    buf_str(&ex->stream.out, "\n\n");
}

/* --- from the jobs to events --- */

/* What the engine has published of a choice. `finish` is loaded first: the other order loses
 * tokens. */
struct published {
    int finish;
    uint32_t count;
    size_t safe;
};

static struct published look_at(const struct engine_choice *choice) {
    struct published p;
    p.finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    p.count = oai_token_count(choice);
    p.safe = atomic_load_explicit(&choice->text_safe, memory_order_acquire);
    return p;
}

/* The text [begin, end) to who says it. `last`: nothing more follows before the other voice or the
 * end. Of an answer that may have calls, only what can be no call's beginning is shown. */
static void give_text(struct exchange *ex, int index, const char *text, size_t begin, size_t end,
                      bool last) {
    struct stream_choice *c = &ex->stream.choices[index];
    struct oai_answer facts = exchange_answer_facts(ex);
    struct tool_piece piece;
    if (c->voice.thinking || !oai_reads_calls(&facts)) {
        if (end > begin) add_content(ex, index, text + begin, end - begin, false);
        return;
    }
    if (!c->reading) tool_reader_resume(&c->calls, begin);
    c->reading = !last;
    while ((piece = tool_reader_next(&c->calls, text, end, last)).kind != TOOL_MORE)
        add_delta(ex, index, (struct said){piece.kind, text + piece.begin, piece.end - piece.begin},
                  false);
}

/* Shows [text_shown, end) as far as its characters are whole. */
static void show_text(struct exchange *ex, int index, const struct engine_choice *choice,
                      size_t end) {
    struct stream_choice *c = &ex->stream.choices[index];
    const char *text = choice->text + c->text_shown;
    size_t size = utf8_complete(text, end - c->text_shown);
    size_t skip = oai_voice_skip(&c->voice, text, size);
    c->text_shown += size;
    if (size > skip)
        give_text(ex, index, choice->text, c->text_shown - size + skip, c->text_shown, false);
}

/* The end of a voice's text: half a character cannot be completed any more, half a call's beginning
 * is none. */
static void show_rest(struct exchange *ex, int index, const struct engine_choice *choice,
                      size_t end) {
    struct stream_choice *c = &ex->stream.choices[index];
    if (end > c->text_shown) show_text(ex, index, choice, end);
    size_t begin = c->text_shown < end ? c->text_shown : end;
    give_text(ex, index, choice->text, begin, end, true);
    c->text_shown = end;
}

/* Shows tokens while their text is safe: no character and no stop string in the making. */
static void add_tokens(struct exchange *ex, int index, const struct engine_choice *choice,
                       const struct published *p) {
    struct stream_choice *c = &ex->stream.choices[index];
    struct oai_answer facts = exchange_answer_facts(ex);
    while (c->tokens_seen < p->count && ex->stream.out.size < OUT_BYTES_SOFT) {
        const struct engine_token *token = &choice->tokens[c->tokens_seen];
        size_t end = token->text_end;
        struct oai_voice before = c->voice;
        if (end > p->safe && !p->finish) return;
        if (end > p->safe) end = p->safe;
        if (oai_voice_step(&c->voice, &facts, token->token)) {
            struct oai_voice after = c->voice;
            size_t begin = c->tokens_seen ? token[-1].text_end : 0;
            c->voice = before;
            show_rest(ex, index, choice, begin < end ? begin : end);
            c->voice = after;
            c->text_shown = end;
        }
        c->tokens_seen++;
        if (end > c->text_shown) show_text(ex, index, choice, end);
    }
}

static bool is_failure(int finish) {
    return finish == ENGINE_FINISH_ABORT || finish == ENGINE_FINISH_ERROR;
}

static void end_choice(struct exchange *ex, int index, const struct engine_choice *choice,
                       const struct published *p) {
    struct stream_choice *c = &ex->stream.choices[index];
    show_rest(ex, index, choice, p->safe);
    if (ex->request.logprobs >= 0 && c->tokens_shown < oai_shown_count(choice))
        add_content(ex, index, "", 0, false);
    if (!is_failure(p->finish)) add_finish(ex, index);
    c->ended = true;
}

/* The end of the last choice waits for the end of the request, so that finish, usage and [DONE] are
 * one write. */
static void render_choice(struct exchange *ex, int index, bool last) {
    struct stream_choice *c = &ex->stream.choices[index];
    struct oai_answer facts = exchange_answer_facts(ex);
    const struct engine_choice *choice = oai_choice_of(&facts, index);
    struct published p = look_at(choice);
    if (last && !ex->finished) p.finish = ENGINE_RUNNING;
    if (c->ended || (!p.count && !p.finish)) return;
    c->finished = p.finish != ENGINE_RUNNING;
    if (!c->begun && (p.count || !is_failure(p.finish))) {
        c->begun = true;
        c->calls.tools = &ex->request.tools;
        c->voice = oai_voice_open(&facts, index);
        add_role(ex, index);
        add_echo(ex, index);
    }
    add_tokens(ex, index, choice, &p);
    if (p.finish && c->tokens_seen == p.count) end_choice(ex, index, choice, &p);
}

/* Everything but a failure of the whole request ends with usage; both end with [DONE]. The details
 * are there once the jobs are finished, a moment after their last choice. */
static void render(struct exchange *ex) {
    struct stream *stream = &ex->stream;
    struct oai_answer facts = exchange_answer_facts(ex);
    int count = oai_choice_count(&facts);
    buf_clear(&stream->out);
    stream->out_at = 0;
    for (int i = 0; i < count; i++) {
        struct stream_choice *c = &stream->choices[(stream->next + i) % count];
        if (c->ended) continue;
        render_choice(ex, (stream->next + i) % count, stream->left == 1);
        stream->left -= c->ended;
    }
    stream->next = (stream->next + 1) % count;
    if (stream->left) return;
    if (ex->error.status)
        add_error(ex);
    else
        add_usage(ex);
    buf_str(&stream->out, "data: [DONE]\n\n");
    stream->ended = true;
}

static bool choice_has_news(const struct stream_choice *c, const struct engine_choice *choice) {
    struct published p = look_at(choice);
    if (c->ended) return false;
    return p.finish ||
           (c->tokens_seen < p.count && choice->tokens[c->tokens_seen].text_end <= p.safe);
}

bool stream_has_news(const struct exchange *ex) {
    struct oai_answer facts = exchange_answer_facts(ex);
    if (ex->finished) return true;
    for (int i = 0; i < oai_choice_count(&facts); i++)
        if (choice_has_news(&ex->stream.choices[i], oai_choice_of(&facts, i))) return true;
    return false;
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
    struct oai_answer facts = exchange_answer_facts(ex);
    struct MHD_Response *response =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES, read_stream, ex, NULL);
    if (!response) return MHD_NO;
    ex->stream.left = oai_choice_count(&facts);
    ex->stream.choices = mem_try_alloc((size_t)ex->stream.left, sizeof *ex->stream.choices);
    buf_open(&ex->stream.out, OUT_BYTES_MAX);
    open_head(ex);
    ex->phase = PHASE_SENT;
    ex->last_output_ns = clock_ns();
    MHD_add_response_header(response, "Content-Type", "text/event-stream; charset=utf-8");
    MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Accel-Buffering", "no");
    http_add_common_headers(ex, response);
    enum MHD_Result rc = ex->stream.head.failed || !ex->stream.choices
                             ? MHD_NO
                             : MHD_queue_response(ex->connection, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    return rc;
}
