/* Reads a stream for libmicrohttpd: renders events when the socket accepts more, suspends the
 * connection while there are none, and ends streams that cannot go on. */
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "server/loop.h"

#define OUT_BYTES_REST ((size_t)4 << 20) /* stop rendering what a hurried stream has left */
/* Per read of an HTTP/1.0 stream; cleared at the start of every stream */
#define BLOCK_BYTES ((size_t)8 << 10)

static ssize_t copy_events(struct exchange *ex, char *to, size_t max) {
    struct stream *stream = &ex->stream;
    CHECK(stream->out_at <= stream->events.out.size);
    size_t size = stream->events.out.size - stream->out_at;
    if (size > max) size = max;
    memcpy(to, stream->events.out.data + stream->out_at, size);
    stream->out_at += size;
    ex->stream.last_output_ns = clock_ns();
    /* The end and the chunk that closes the stream are sent together: a client that stops reading
     * at [DONE] has then read it all and keeps the connection. */
    if (!stream->ended || stream->out_at < stream->events.out.size) relay_soon(ex->conn);
    return (ssize_t)size;
}

/* Ends the stream with an error in place of an event that is too long. Nothing that was rendered in
 * this turn has been sent yet. In the background others may read the same events, and the stream
 * breaks off. */
static void end_too_long(struct exchange *ex) {
    struct oai_events *events = &ex->stream.events;
    if (ex->stream.owner->request.background) return;
    oai_refuse(&ex->error, 400, "invalid_value", NULL,
               "The stream ends here: an event of it would be longer than %zu bytes. Please ask "
               "for fewer choices, tokens or logprobs.",
               STREAM_BYTES_MAX);
    exchange_cancel(ex);
    buf_clear(&events->out);
    stream_form(&ex->stream)->end(events, &ex->error);
    ex->stream.ended = true;
}

static ssize_t read_event_stream(void *cls, uint64_t position, char *to, size_t max) {
    struct exchange *ex = cls;
    struct stream *stream = &ex->stream;
    (void)position;
    if (exchange_is_gone(ex) || ex->state == EXCHANGE_BACKGROUND)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (stream->out_at < stream->events.out.size) return copy_events(ex, to, max);
    if (stream->ended) return MHD_CONTENT_READER_END_OF_STREAM;
    stream_render(stream);
    if (!stream->events.out.size && stream->ping)
        buf_str(&stream->events.out,
                stream_form(stream)->ping ? stream_form(stream)->ping : ": keepd\n\n");
    stream->ping = false;
    if (stream->events.out.full) end_too_long(ex);
    if (stream->events.out.failed) {
        exchange_gone(ex); /* out of memory: an incomplete event must not look like a whole one */
        return MHD_CONTENT_READER_END_WITH_ERROR;
    }
    exchange_rendered(ex);
    if (stream->events.out.size) return copy_events(ex, to, max);
    if (stream->ended) return MHD_CONTENT_READER_END_OF_STREAM;
    exchange_suspend(ex);
    if (stream->events.tokens == stream->turn_end) exchange_resume(ex); /* others have their turn */
    return 0;
}

/* A longer rest, or one for which the answers of others leave no memory, is rendered as its client
 * reads, which it must do at the rate of answers that wait in memory. A stream that still leaves
 * events out does so without its client, in turns. */
void stream_hurry(struct exchange *ex) {
    struct stream *stream = &ex->stream;
    const struct buf *out = &stream->events.out;
    const size_t most = out->size + OUT_BYTES_REST;
    if (ex->state != EXCHANGE_SENDING || !exchange_has_finished(stream->owner) || stream->ended ||
        stream->hurried || stream->events.sequence < stream->events.from)
        return;
    if (ledger_hold(&ex->server->ledger, &ex->entry, OUT_BYTES_REST) != LEDGER_HELD) return;
    stream->hurried = true;
    while (!stream->ended && !out->failed && out->size < most) stream_append(stream, most);
    if (out->failed)
        exchange_gone(ex); /* as in the reader: a part of it may be sent */
    else
        exchange_rendered(ex);
}

struct MHD_Response *stream_begin(struct exchange *ex) {
    struct stream *stream = &ex->stream;
    struct MHD_Response *response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES,
                                                                      read_event_stream, ex, NULL);
    if (!response) return NULL;
    exchange_queued(ex);
    stream->last_output_ns = clock_ns();
    int rc = stream_open(stream, stream->owner ? stream->owner : ex);
    const char *type = stream_form(stream)->stream_type;
    MHD_add_response_header(response, "Content-Type",
                            type ? type : "text/event-stream; charset=utf-8");
    MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Accel-Buffering", "no");
    if (rc == 0) return response;
    MHD_destroy_response(response);
    return NULL;
}
