/* POST /v1/messages, the answer: a message with its blocks, in one piece or as events, and errors
 * in Anthropic's form. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/anthropic.h"
#include "server/oai/edits.h"

/* --- blocks --- */

static void write_use(struct buf *out, const struct oai_answer *answer,
                      const struct oai_items *items) {
    buf_str(out, "{\"type\":\"tool_use\",\"id\":");
    oai_render_call_id(out, answer, "toolu_", 0, items->call);
    buf_str(out, ",\"name\":");
    oai_write_text(out, &items->name);
    buf_str(out, ",\"input\":");
}

/* Writes a whole block. */
static void write_block(struct buf *out, const struct oai_answer *answer,
                        const struct oai_items *items) {
    if (items->kind == OAI_ITEM_CALL) {
        write_use(out, answer, items);
        oai_write_object(out, &items->text);
    } else if (items->kind == OAI_ITEM_THOUGHT) {
        buf_str(out, "{\"type\":\"thinking\",\"thinking\":");
        oai_write_text(out, &items->text);
        buf_str(out, ",\"signature\":\"\"");
    } else {
        buf_str(out, "{\"type\":\"text\",\"text\":");
        oai_write_text(out, &items->text);
        buf_str(out, ",\"citations\":null");
    }
    buf_char(out, '}');
}

/* --- messages --- */

/* Writes "stop_reason":...,"stop_sequence":... */
static void write_stop(struct buf *out, const struct oai_answer *answer, bool called) {
    const struct engine_choice *choice = oai_choice_of(answer, 0);
    const struct engine_request *request = &oai_job_of(answer, 0)->request;
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    bool named = choice->stop_index >= 0 && choice->stop_index < request->stop_count;
    buf_fmt(out, "\"stop_reason\":\"%s\",\"stop_sequence\":",
            finish == ENGINE_FINISH_LENGTH || finish == ENGINE_FINISH_REPETITION ? "max_tokens"
            : called                                                             ? "tool_use"
            : named                                                              ? "stop_sequence"
                                                                                 : "end_turn");
    if (named && !called)
        json_write_str(out, request->stops[choice->stop_index].text,
                       request->stops[choice->stop_index].size);
    else
        buf_str(out, "null");
}

/* Writes usage. Computed tokens and tokens found in the cache are counted separately. */
static void anthropic_write_usage(struct buf *out, const struct oai_answer *answer, uint64_t tokens,
                                  bool finished) {
    uint64_t cached = oai_prompt_cached(answer);
    buf_fmt(out,
            "\"usage\":{\"input_tokens\":%" PRIu64 ",\"cache_creation_input_tokens\":0"
            ",\"cache_read_input_tokens\":%" PRIu64 ",\"output_tokens\":%" PRIu64,
            oai_prompt_total(answer) - cached, cached, tokens);
    if (finished) {
        buf_fmt(out, ",\"output_tokens_details\":{\"thinking_tokens\":%" PRIu64 "}",
                oai_reasoning_total(answer));
        oai_render_kv_details(out, answer);
    }
    buf_char(out, '}');
}

static void begin_message(struct buf *out, const struct oai_answer *answer) {
    buf_fmt(out,
            "{\"id\":\"%s\",\"type\":\"message\",\"role\":\"assistant\",\"model\":", answer->id);
    json_write_str(out, answer->model, strlen(answer->model));
    buf_str(out, ",\"content\":[");
}

static void anthropic_write_answer(struct buf *out, const struct oai_answer *answer) {
    begin_message(out, answer);
    bool called = oai_items_write(out, answer, write_block);
    buf_str(out, "],");
    write_stop(out, answer, called);
    buf_char(out, ',');
    anthropic_write_usage(out, answer, oai_tokens_total(answer), true);
    oai_edits_write(out, answer->request, 0);
    buf_char(out, '}');
}

/* --- streams --- */

/* Begins an event and ends with the comma before its own members. */
static void begin_message_event(struct oai_events *events, const char *type) {
    buf_fmt(&events->out, "event: %s\ndata: {\"type\":\"%s\",", type, type);
    events->sequence++;
}

static void anthropic_end_event(struct oai_events *events) {
    buf_str(&events->out, "}\n\n");
}

static void begin_block_event(struct oai_events *events, const char *type) {
    begin_message_event(events, type);
    buf_fmt(&events->out, "\"index\":%d", events->items.count - 1);
}

static void begin_block(void *to, const struct oai_items *items) {
    struct oai_events *events = to;
    begin_block_event(events, "content_block_start");
    buf_str(&events->out, ",\"content_block\":");
    if (items->kind == OAI_ITEM_CALL) {
        write_use(&events->out, events->answer, items);
        buf_str(&events->out, "{}}");
    } else {
        write_block(&events->out, events->answer, items); /* a block that is still empty */
    }
    anthropic_end_event(events);
}

static void grow_block(void *to, const struct oai_items *items, const char *text, size_t size,
                       uint32_t begin, uint32_t end) {
    static const char *const types[] = {[OAI_ITEM_THOUGHT] = "\"thinking_delta\",\"thinking\":",
                                        [OAI_ITEM_TEXT] = "\"text_delta\",\"text\":",
                                        [OAI_ITEM_CALL] = "\"input_json_delta\",\"partial_json\":"};
    struct oai_events *events = to;
    (void)begin, (void)end;
    begin_block_event(events, "content_block_delta");
    buf_fmt(&events->out, ",\"delta\":{\"type\":%s", types[items->kind]);
    json_write_str(&events->out, text, size);
    buf_char(&events->out, '}');
    anthropic_end_event(events);
}

static void end_block(void *to, const struct oai_items *items) {
    struct oai_events *events = to;
    if (items->kind == OAI_ITEM_THOUGHT) {
        begin_block_event(events, "content_block_delta");
        buf_str(&events->out, ",\"delta\":{\"type\":\"signature_delta\",\"signature\":\"\"}");
        anthropic_end_event(events);
    }
    begin_block_event(events, "content_block_stop");
    anthropic_end_event(events);
}

static const char ping[] = "event: ping\ndata: {\"type\":\"ping\"}\n\n";

static void anthropic_open_stream(struct oai_events *events) {
    static const struct oai_item_writer writer = {begin_block, grow_block, end_block};
    oai_items_open(&events->items, &writer, events);
}

static void anthropic_announce(struct oai_events *events) {
    if (events->sequence) return;
    begin_message_event(events, "message_start");
    buf_str(&events->out, "\"message\":");
    begin_message(&events->out, events->answer);
    buf_str(&events->out, "],\"stop_reason\":null,\"stop_sequence\":null,");
    anthropic_write_usage(&events->out, events->answer, 0, false);
    buf_char(&events->out, '}');
    anthropic_end_event(events);
    buf_str(&events->out, ping);
}

/* Sends a ping while the prompt is read; this form has no event for the progress. */
static void anthropic_write_progress(struct oai_events *events) {
    buf_str(&events->out, ping);
}

static void anthropic_begin_choice(struct oai_events *events, int index,
                                   struct oai_offset *offset) {
    (void)index, (void)offset;
    anthropic_announce(events);
}

static void anthropic_finish_choice(struct oai_events *events, const struct oai_delta *rest,
                                    bool called) {
    (void)rest;
    oai_items_end(&events->items);
    begin_message_event(events, "message_delta");
    buf_str(&events->out, "\"delta\":{");
    write_stop(&events->out, events->answer, called);
    buf_str(&events->out, "},");
    anthropic_write_usage(&events->out, events->answer, events->tokens, true);
    oai_edits_write(&events->out, events->answer->request, 0);
    anthropic_end_event(events);
}

static void anthropic_end_stream(struct oai_events *events, const struct oai_error *error) {
    if (error) {
        buf_str(&events->out, "event: error\ndata: ");
        oai_message_error(&events->out, error, NULL);
        buf_str(&events->out, "\n\n");
        return;
    }
    buf_str(&events->out, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
}

/* --- errors, counts --- */

static const char *anthropic_error_type(int status) {
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 408:
        return "timeout_error";
    case 413:
        return "request_too_large";
    case 429:
        return "rate_limit_error";
    case 503:
        return "overloaded_error";
    default:
        return status >= 500 ? "api_error" : "invalid_request_error";
    }
}

/* Writes the message of an error. Anthropic's clients recognise a prompt that is too long by these
 * words. */
static void anthropic_write_message(struct buf *out, const struct oai_error *error) {
    char text[96];
    const char *message = error->message;
    if (error->context_tokens) {
        snprintf(text, sizeof text, "prompt is too long: %zu tokens > %zu maximum",
                 error->prompt_tokens, error->context_tokens);
        message = text;
    }
    json_write_str(out, message, strlen(message));
}

/* Writes an error. keepd adds the field and its code, as OpenAI's form has them. */
void oai_message_error(struct buf *out, const struct oai_error *error, const char *request_id) {
    buf_fmt(out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":",
            anthropic_error_type(error->status));
    anthropic_write_message(out, error);
    if (error->param[0]) {
        buf_str(out, ",\"param\":");
        json_write_str(out, error->param, strlen(error->param));
    }
    if (error->code) buf_fmt(out, ",\"code\":\"%s\"", error->code);
    buf_str(out, "},\"request_id\":");
    if (request_id)
        json_write_str(out, request_id, strlen(request_id));
    else
        buf_str(out, "null");
    buf_char(out, '}');
}

const struct oai_form oai_message_form = {
    .id_prefix = "msg_",
    .ping = ping,
    .answer = anthropic_write_answer,
    .open = anthropic_open_stream,
    .progress = anthropic_write_progress,
    .begin = anthropic_begin_choice,
    .delta = oai_items_delta,
    .finish = anthropic_finish_choice,
    .end = anthropic_end_stream,
};
