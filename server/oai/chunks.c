/* Events in the form that OpenAI gives its streams of chats and completions: chunks, then one chunk
 * with the usage where it is asked for, then [DONE]. */
#include <string.h>

#include "base/json.h"
#include "server/oai/kind.h"

void oai_chunk_open(struct oai_events *events, const char *object) {
    buf_str(&events->head, "data: ");
    oai_render_answer_head(&events->head, events->answer, object);
    buf_str(&events->head, ",\"system_fingerprint\":\"keepd-" KEEPD_VERSION "\",\"choices\":[");
}

void oai_chunk_begin(struct oai_events *events) {
    buf_add(&events->out, events->head.data, events->head.size);
}

void oai_chunk_end(struct oai_events *events) {
    buf_char(&events->out, ']');
    oai_chunk_close(events);
}

void oai_chunk_close(struct oai_events *events) {
    const struct oai_request *request = events->answer->request;
    struct buf *out = &events->out;
    if (request->include_usage && request->continuous_usage) {
        buf_str(out, ",\"usage\":");
        oai_render_usage(out, events->answer, events->tokens, false);
    } else if (request->include_usage) {
        buf_str(out, ",\"usage\":null");
    }
    buf_str(out, "}\n\n");
}

void oai_chunk_progress(struct oai_events *events) {
    oai_chunk_begin(events);
    buf_str(&events->out, "],");
    buf_add(&events->out, events->note.data, events->note.size);
    oai_chunk_close(events);
}

/* Writes the usage. Its details are known once the jobs are finished, shortly after their last
 * choice. */
static void write_last(struct oai_events *events) {
    const struct oai_request *request = events->answer->request;
    struct buf *out = &events->out;
    if (!request->include_usage && !request->timings && !request->verbose) return;
    oai_chunk_begin(events);
    buf_char(out, ']');
    if (request->include_usage) {
        buf_str(out, ",\"usage\":");
        oai_render_usage(out, events->answer, events->tokens, true);
    }
    oai_render_timings(out, events->answer);
    oai_render_verbose(out, events->answer);
    buf_str(out, "}\n\n");
}

void oai_chunks_end(struct oai_events *events, const struct oai_error *error) {
    struct buf *out = &events->out;
    if (error) {
        buf_str(out, "data: ");
        oai_render_error(out, error);
        buf_str(out, "\n\n");
    } else {
        write_last(events);
    }
    buf_str(out, "data: [DONE]\n\n");
}
