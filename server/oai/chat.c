/* POST /v1/chat/completions: messages in, a message out, in one piece or as deltas. */
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

/* --- the request --- */

static const struct oai_field fields[] = {
    {"audio", OAI_NEVER},
    {"echo", OAI_FALSE},
    {"function_call", OAI_NONE},
    {"functions", OAI_NOLIST},
    {"modalities", OAI_ONLYTEXT},
    {"moderation", OAI_NEVER},
    {"parallel_tool_calls", OAI_ANY},
    {"prediction", OAI_ANY},
    {"tool_choice", OAI_ANY},
    {"top_logprobs", OAI_ANY},
    {"verbosity", OAI_MEDIUM},
    {"web_search_options", OAI_NEVER},
    {"add_special_tokens", OAI_FALSE},
    {"documents", OAI_NOLIST},
    {"include_reasoning", OAI_TRUE},
    {"separate_reasoning", OAI_ANY},
    {"thinking", OAI_NEVER},
    {NULL, OAI_ANY},
};

/* Chats say it with a flag and a number, completions with one number. */
static int read_logprobs(struct oai_reader *r) {
    bool wanted = false;
    int32_t top = 0;
    if (oai_get_bool(r, NULL, r->body, "logprobs", &wanted) ||
        oai_get_int(r, NULL, r->body, "top_logprobs", 0, OAI_LOGPROBS_MAX, &top))
        return -1;
    if (top > 0 && !wanted)
        return oai_invalid(r, "top_logprobs",
                           "'logprobs' must be true when 'top_logprobs' is used");
    r->out->logprobs = wanted ? top : -1;
    return 0;
}

static int parse(struct oai_reader *r) {
    r->out->split_reasoning = true;
    return oai_read_messages(r) || oai_read_tools(r) ||
                   oai_get_bool(r, NULL, r->body, "separate_reasoning", &r->out->split_reasoning) ||
                   read_logprobs(r) || oai_read_generation(r)
               ? -1
               : 0;
}

/* --- whole answers --- */

struct message {
    struct buf reasoning;
    struct oai_calls calls; /* and the text beside them */
};

static void share_out(struct message *message, bool thinking, const char *text, size_t begin,
                      size_t end) {
    if (begin == end) return;
    if (thinking)
        buf_add(&message->reasoning, text + begin, end - begin);
    else
        oai_calls_add(&message->calls, text, begin, end);
}

/* Shares the text of a finished choice out between the two voices. */
static void divide_text(const struct oai_answer *answer, int index, struct message *message) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    size_t safe = atomic_load_explicit(&choice->text_safe, memory_order_acquire);
    size_t at = 0, said = 0; /* what the voice has said: [said, at) */
    struct oai_voice voice = oai_voice_open(answer, index);
    uint32_t count = oai_token_count(choice);
    for (uint32_t i = 0; i < count; i++) {
        size_t end = choice->tokens[i].text_end < safe ? choice->tokens[i].text_end : safe;
        bool thought = voice.thinking;
        if (oai_voice_step(&voice, answer, choice->tokens[i].token)) {
            share_out(message, thought, choice->text, said, at);
            said = end;
        } else {
            said += oai_voice_skip(&voice, choice->text + at, end - at);
        }
        at = end;
    }
    share_out(message, voice.thinking, choice->text, said, at);
    oai_calls_end(&message->calls);
}

/* vLLM's older and newer name; clients read one or the other. */
static void write_reasoning(struct buf *out, const char *text, size_t size) {
    buf_str(out, "\"reasoning_content\":");
    json_write_str(out, text, size);
    buf_str(out, ",\"reasoning\":");
    json_write_str(out, text, size);
}

/* true: the answer ends with a call. */
static bool write_message(struct buf *out, const struct oai_answer *answer, int index) {
    struct message message;
    const struct buf *content = &message.calls.content, *calls = &message.calls.list;
    const struct buf *reasoning = &message.reasoning;
    buf_open(&message.reasoning, out->limit);
    oai_calls_open(&message.calls, answer, index, out->limit);
    divide_text(answer, index, &message);
    if (reasoning->failed || oai_calls_failed(&message.calls)) out->failed = true;
    buf_str(out, "\"message\":{\"role\":\"assistant\",\"content\":");
    if (content->size || (!reasoning->size && !calls->size))
        json_write_str(out, content->data ? content->data : "", content->size);
    else
        buf_str(out, "null");
    buf_str(out, ",\"refusal\":null");
    if (reasoning->size) {
        buf_char(out, ',');
        write_reasoning(out, reasoning->data, reasoning->size);
    }
    if (calls->size) {
        buf_str(out, ",\"tool_calls\":[");
        buf_add(out, calls->data, calls->size);
        buf_char(out, ']');
    }
    buf_char(out, '}');
    buf_close(&message.reasoning);
    bool called = tool_reader_called(&message.calls.reader);
    oai_calls_close(&message.calls);
    return called;
}

static void write_choice(struct buf *out, const struct oai_answer *answer, int index) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    buf_fmt(out, "{\"index\":%d,", index);
    bool called = write_message(out, answer, index);
    buf_str(out, ",\"logprobs\":");
    oai_render_chat_logprobs(out, answer, index, 0, oai_shown_count(choice));
    oai_render_finish(out, answer, index, called);
    if (answer->request->return_token_ids) oai_render_answer_ids(out, choice);
    buf_char(out, '}');
}

static void write_answer(struct buf *out, const struct oai_answer *answer) {
    oai_render_answer_head(out, answer, "chat.completion");
    buf_str(out, ",\"choices\":[");
    for (int i = 0; i < oai_choice_count(answer); i++) {
        if (i) buf_char(out, ',');
        write_choice(out, answer, i);
    }
    buf_str(out, "],\"usage\":");
    oai_render_usage(out, answer, oai_tokens_total(answer), true);
    if (answer->request->prompt_logprobs >= 0) {
        buf_str(out, ",\"prompt_logprobs\":");
        oai_render_prompt_logprobs(out, answer, 0);
    }
    if (answer->request->return_token_ids) oai_render_prompt_ids(out, answer, 0);
    buf_str(out, ",\"system_fingerprint\":\"keepd-" KEEPD_VERSION "\"}");
}

/* --- streams --- */

static void open_stream(struct oai_events *events) {
    oai_chunk_open(events, "chat.completion.chunk");
}

static void begin_choice(struct oai_events *events, int index, struct oai_offset *offset) {
    (void)offset;
    oai_chunk_begin(events);
    buf_fmt(&events->out,
            "{\"index\":%d,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
            "\"logprobs\":null,\"finish_reason\":null}",
            index);
    oai_chunk_end(events);
}

static void write_piece(struct oai_events *events, const struct oai_delta *delta) {
    struct buf *out = &events->out;
    switch (delta->kind) {
    case TOOL_CALL:
        oai_render_call_begin(out, events->answer, delta->index, delta->call, delta->text,
                              delta->size);
        break;
    case TOOL_BARE:
        oai_render_call_arguments(out, delta->call, "{}", 2);
        break;
    case TOOL_ARGUMENTS:
        oai_render_call_arguments(out, delta->call, delta->text, delta->size);
        break;
    default:
        if (delta->thinking) {
            write_reasoning(out, delta->text, delta->size);
            break;
        }
        buf_str(out, "\"content\":");
        json_write_str(out, delta->text, delta->size);
    }
}

static void write_delta(struct oai_events *events, const struct oai_delta *delta) {
    struct buf *out = &events->out;
    oai_chunk_begin(events);
    buf_fmt(out, "{\"index\":%d,\"delta\":{", delta->index);
    write_piece(events, delta);
    buf_str(out, "},\"logprobs\":");
    oai_render_chat_logprobs(out, events->answer, delta->index, delta->begin, delta->end);
    buf_str(out, ",\"finish_reason\":null}");
    oai_chunk_end(events);
}

static void finish_choice(struct oai_events *events, int index, bool called) {
    oai_chunk_begin(events);
    buf_fmt(&events->out, "{\"index\":%d,\"delta\":{},\"logprobs\":null", index);
    oai_render_finish(&events->out, events->answer, index, called);
    buf_char(&events->out, '}');
    oai_chunk_end(events);
}

/* --- the row --- */

static const struct oai_form form = {
    .id_prefix = "chatcmpl-",
    .answer = write_answer,
    .open = open_stream,
    .begin = begin_choice,
    .delta = write_delta,
    .finish = finish_choice,
    .end = oai_chunks_end,
};

const struct oai_kind oai_chat = {
    .path = "/v1/chat/completions",
    .schema = "ChatRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION | OAI_FIELDS_MESSAGES,
    .fields = fields,
    .parse = parse,
    .form = &form,
};
