/* Server-sent events from the arrays of jobs. They are rendered when libmicrohttpd asks for bytes
 * (stream_reader.c).
 *
 * No output is queued per client: tokens lie in the job's arrays, and the reader renders the tokens
 * not yet sent when the socket accepts more. So a slow client costs a few
 * kilobytes here and nothing in the engine. One event per token (a token that ends inside a
 * character joins the next), so the bytes of a stream do not depend on timing. Streams of the same
 * response are therefore equal: each renders the job's arrays for itself, from any event on. */
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "server/loop.h"

#define OUT_BYTES_SOFT ((size_t)16 << 10) /* stop rendering more tokens */
#define TURN_TOKENS    1024               /* the same, where their events are left out */
#define HEAD_BYTES_MAX 4096

void stream_close(struct stream *stream) {
    buf_close(&stream->events.head);
    buf_close(&stream->events.out);
    buf_close(&stream->events.note);
    oai_items_close(&stream->events.items);
    mem_free(stream->choices);
}

/* --- from the jobs to events --- */

static bool is_failure(int finish) {
    return finish == ENGINE_FINISH_ABORT || finish == ENGINE_FINISH_ERROR;
}

static bool delta_joins_end(const struct stream_choice *c) {
    const struct oai_form *form = stream_form(c->stream);
    return form->joins_end && form->joins_end(&c->stream->owner->request);
}

/* Returns whether a delta is sent with the end of its choice: the token at which the length ends
 * the choice, or the scores of a token without text. Both are known only together with the end, so
 * the content of an event does not depend on timing. */
static bool goes_with_end(const struct stream_choice *c, const struct oai_delta *delta) {
    if (!c->finish || is_failure(c->finish) || delta->kind != TOOL_TEXT || !delta_joins_end(c))
        return false;
    if (c->tokens_seen < oai_token_count(c->source)) return false;
    return c->finish == ENGINE_FINISH_LENGTH || !delta->size;
}

static void emit_delta(struct stream_choice *c, const struct oai_delta *delta) {
    struct oai_events *events = &c->stream->events;
    if (c->holds) stream_form(c->stream)->delta(events, &c->held);
    c->holds = goes_with_end(c, delta);
    c->held = *delta;
    if (!c->holds) stream_form(c->stream)->delta(events, delta);
}

/* Sends a delta with the scores of all tokens up to tokens_seen that were not sent yet. */
static void send_delta(struct stream_choice *c, enum tool_piece_kind kind, const char *text,
                       size_t size) {
    const struct exchange *owner = c->stream->owner;
    uint32_t end = c->tokens_seen;
    if (c->voice.thinking && owner->request.hide_reasoning) return;
    if (c->finish && end > oai_shown_count(&owner->facts, c->index))
        end = oai_shown_count(&owner->facts, c->index);
    struct oai_delta delta = {
        .index = c->index,
        .kind = kind,
        .thinking = c->voice.thinking,
        .call = c->calls.calls - 1,
        .text = text,
        .size = size,
        .begin = c->tokens_shown,
        .end = end,
        .ids_begin = c->tokens_sent,
        .ids_end = c->tokens_seen,
        .offset = &c->offset,
    };
    emit_delta(c, &delta);
    c->tokens_shown = end;
    c->tokens_sent = c->tokens_seen;
}

/* Sends the text [begin, end) as deltas of its kind, reasoning or answer. `last`: no more text
 * follows before the other kind or the end. Text that may begin a tool call is held back. */
static void send_text(struct stream_choice *c, size_t begin, size_t end, bool last) {
    const char *text = c->source->text;
    struct tool_piece piece;
    if (c->voice.hidden) return;
    if (c->voice.thinking || !oai_reads_calls(&c->stream->owner->facts)) {
        if (end > begin) send_delta(c, TOOL_TEXT, text + begin, end - begin);
        return;
    }
    if (!c->reading) tool_reader_resume(&c->calls, begin);
    c->reading = !last;
    while ((piece = tool_reader_next(&c->calls, text, end, last)).kind != TOOL_MORE) {
        size_t size;
        const char *at = tool_piece_text(&piece, text, &size);
        send_delta(c, piece.kind, at, size);
    }
}

/* Sends the whole characters of [text_shown, end). */
static void send_characters(struct stream_choice *c, size_t end) {
    const char *text = c->source->text + c->text_shown;
    size_t size = end > c->text_shown ? utf8_complete(text, end - c->text_shown) : 0;
    size_t skip = oai_voice_skip(&c->voice, text, size);
    c->text_shown += size;
    if (size > skip) send_text(c, c->text_shown - size + skip, c->text_shown, false);
}

/* Ends the text of a voice: an incomplete character stays incomplete, and what could have begun a
 * tool call is text. */
static void end_voice(struct stream_choice *c, size_t end) {
    send_characters(c, end);
    send_text(c, c->text_shown < end ? c->text_shown : end, end, true);
    c->text_shown = end;
}

/* Changes the voice. The tokens say the name and the end of a call: it ends here, or begins after
 * the text up to `end`. */
static void change_voice(struct stream_choice *c, const struct oai_voice *next, size_t end) {
    const struct tool_set *tools = &c->stream->owner->request.tools;
    if (c->voice.calling) {
        if (c->voice.bare && (tools->parallel || c->calls.calls == 1))
            send_delta(c, TOOL_BARE, "", 0);
        tool_reader_resume(&c->calls, end);
        c->reading = false;
    }
    c->voice = *next;
    if (!next->calling) return;
    c->reading = true;
    if (tool_reader_call(&c->calls, end))
        send_delta(c, TOOL_CALL, tools->names[next->tool], strlen(tools->names[next->tool]));
}

/* Returns whether the next token waits for the end of the choice, with which it will be one event.
 */
static bool waits_for_end(const struct stream_choice *c, const struct engine_seen *p) {
    const struct oai_answer *facts = &c->stream->owner->facts;
    const struct engine_request *request = &oai_job_of(facts, c->index)->request;
    return !p->finish && c->tokens_seen + 1 == (uint32_t)request->max_tokens && delta_joins_end(c);
}

/* Sends tokens whose text is final: it ends neither inside a character nor inside what may become a
 * stop string. */
static void send_tokens(struct stream_choice *c, const struct engine_seen *p) {
    struct stream *stream = c->stream;
    struct oai_events *events = &stream->events;
    while (c->tokens_seen < p->tokens && events->out.size < stream->out_most &&
           events->tokens < stream->turn_end) {
        const struct engine_token *token = &c->source->tokens[c->tokens_seen];
        size_t begin = c->tokens_seen ? token[-1].text_end : 0, end = token->text_end;
        struct oai_voice next = c->voice;
        if ((end > p->text && !p->finish) || waits_for_end(c, p)) return;
        if (end > p->text) end = p->text;
        bool tag = oai_voice_step(&next, &stream->owner->facts, token->token);
        if (tag) {
            end_voice(c, begin < end ? begin : end);
            c->text_shown = end;
            change_voice(c, &next, end);
        }
        c->voice = next;
        c->tokens_seen++;
        events->tokens++;
        send_characters(c, end);
    }
}

/* Returns whether progress is due. The first event waits until all prompts have begun, and says how
 * much was found in conversations. The last one says that everything is read; so do the tokens
 * after it. */
static bool next_progress(const struct stream *stream, uint64_t *read) {
    const struct exchange *owner = stream->owner;
    uint64_t sent = stream->progress_sent;
    if (!owner->request.include_progress || owner->error.status) return false;
    *read = sent == UINT64_MAX ? oai_prompt_cached(&owner->facts) : oai_prompt_read(&owner->facts);
    if (sent != UINT64_MAX) return *read > sent;
    for (int i = 0; i < owner->job_count; i++)
        if (!atomic_load_explicit(&owner->jobs[i].admitted, memory_order_acquire)) return false;
    return true;
}

static void send_note(struct stream *stream) {
    struct oai_events *events = &stream->events;
    stream_form(stream)->progress(events);
    buf_inherit(&events->out, &events->note);
    buf_clear(&events->note);
}

static void send_progress(struct stream *stream) {
    uint64_t read;
    while (next_progress(stream, &read)) {
        oai_render_progress(&stream->events.note, &stream->owner->facts, read);
        send_note(stream);
        stream->progress_sent = read;
    }
}

static bool held_has_news(const struct exchange *owner) {
    return !owner->error.status && engine_held_is_new(&owner->jobs[0]);
}

static void send_held(struct stream *stream) {
    struct exchange *owner = stream->owner;
    const struct engine_held *held = held_has_news(owner) ? engine_see_held(&owner->jobs[0]) : NULL;
    if (!held) return;
    oai_render_held(&stream->events.note, &owner->facts, held);
    send_note(stream);
}

static void begin_stream_choice(struct stream_choice *c) {
    struct stream *stream = c->stream;
    c->begun = true;
    send_progress(stream);
    c->calls.tools = &stream->owner->request.tools;
    c->voice = oai_voice_open(&stream->owner->facts, c->index);
    if (stream_form(stream)->begin)
        stream_form(stream)->begin(&stream->events, c->index, &c->offset);
}

static void end_stream_choice(struct stream_choice *c, const struct engine_seen *p) {
    struct stream *stream = c->stream;
    const struct exchange *owner = stream->owner;
    end_voice(c, p->text);
    c->voice.thinking = false;
    if (owner->request.logprobs >= 0 && c->tokens_shown < oai_shown_count(&owner->facts, c->index))
        send_delta(c, TOOL_TEXT, "", 0);
    const struct oai_delta nothing = {.index = c->index,
                                      .text = "",
                                      .ids_begin = c->tokens_sent,
                                      .ids_end = c->tokens_seen,
                                      .offset = &c->offset};
    if (stream_form(stream)->finish && !is_failure(p->finish))
        stream_form(stream)->finish(&stream->events, c->holds ? &c->held : &nothing,
                                    tool_reader_called(&c->calls));
    c->ended = true;
}

/* Renders a choice. The end of the last choice waits for the end of the request, so that finish,
 * usage and [DONE] are one write. */
static void render_choice(struct stream_choice *c, bool last) {
    const struct exchange *owner = c->stream->owner;
    struct engine_seen p = engine_see_choice(c->source);
    if (last && !exchange_has_finished(owner)) p.finish = ENGINE_RUNNING;
    if (p.finish) p.text = oai_shown_size(&owner->facts, c->index);
    if (c->ended || (!p.tokens && !p.finish)) return;
    c->finish = p.finish;
    if (!c->begun && (p.tokens || !is_failure(p.finish))) begin_stream_choice(c);
    send_tokens(c, &p);
    if (p.finish && c->tokens_seen == p.tokens) end_stream_choice(c, &p);
}

/* Ends the events. A response in the background is stored by background_end. */
static void end_events(struct stream *stream) {
    const struct exchange *owner = stream->owner;
    const struct oai_error *error = owner->error.status ? &owner->error : NULL;
    const struct oai_form *form = stream_form(stream);
    if (form->keep && !error && !owner->request.background)
        (void)form->keep(&owner->facts, NULL, NULL);
    form->end(&stream->events, error);
    stream->ended = true;
}

void stream_append(struct stream *stream, size_t most) {
    int count = oai_choice_count(&stream->owner->facts);
    stream->out_most = most;
    stream->turn_end = stream->events.tokens + TURN_TOKENS;
    send_progress(stream);
    send_held(stream);
    for (int i = 0; i < count; i++) {
        struct stream_choice *c = &stream->choices[(stream->next + i) % count];
        if (c->ended) continue;
        render_choice(c, stream->left == 1);
        stream->left -= c->ended;
    }
    stream->next = (stream->next + 1) % count;
    if (!stream->left) end_events(stream);
}

void stream_render(struct stream *stream) {
    buf_clear(&stream->events.out);
    stream->out_at = 0;
    stream_append(stream, OUT_BYTES_SOFT);
}

static bool choice_has_news(const struct stream_choice *c) {
    struct engine_seen p = engine_see_choice(c->source);
    if (c->ended) return false;
    return p.finish ||
           (c->tokens_seen < p.tokens && c->source->tokens[c->tokens_seen].text_end <= p.text &&
            !waits_for_end(c, &p));
}

static bool has_news(const struct stream *stream) {
    const struct exchange *owner = stream->owner;
    uint64_t read;
    if (exchange_has_finished(owner) || next_progress(stream, &read) || held_has_news(owner))
        return true;
    for (int i = 0; i < oai_choice_count(&owner->facts); i++)
        if (choice_has_news(&stream->choices[i])) return true;
    return false;
}

bool stream_is_due(struct exchange *ex, int64_t now_ns) {
    struct stream *stream = &ex->stream;
    if (has_news(stream)) return true;
    stream->ping =
        now_ns - stream->last_output_ns > (int64_t)ex->server->options.timeouts.ping * 1000000;
    return stream->ping;
}

int stream_open(struct stream *stream, struct exchange *owner) {
    stream->owner = owner;
    stream->left = oai_choice_count(&owner->facts);
    stream->choices = mem_try_alloc((size_t)stream->left, sizeof *stream->choices);
    if (!stream->choices) return ERR_NOMEM;
    for (int i = 0; i < stream->left; i++)
        stream->choices[i] = (struct stream_choice){
            .stream = stream, .source = oai_choice_of(&owner->facts, i), .index = i};
    stream->events.answer = &owner->facts;
    stream->progress_sent = UINT64_MAX;
    stream->ping = true; /* the stream begins with a comment, unless there are tokens */
    buf_open(&stream->events.head, HEAD_BYTES_MAX);
    buf_open(&stream->events.out, STREAM_BYTES_MAX);
    buf_open(&stream->events.note, STREAM_BYTES_MAX);
    stream_form(stream)->open(&stream->events);
    return stream->events.head.failed ? ERR_NOMEM : 0;
}

void stream_write(struct buf *out, struct exchange *owner) {
    struct stream stream = {0};
    CHECK(exchange_has_finished(owner));
    if (stream_open(&stream, owner)) stream.events.out.failed = true;
    for (;;) {
        buf_inherit(out, &stream.events.out);
        buf_add(out, stream.events.out.data, stream.events.out.size);
        if (stream.ended || out->failed) break;
        stream_render(&stream);
    }
    stream_close(&stream);
}
