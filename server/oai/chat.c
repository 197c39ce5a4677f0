/* POST /v1/chat/completions: messages in, a message out, in one piece or as deltas. */
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

/* --- the request --- */

static const struct oai_field fields[] = {
    {"audio", OAI_NEVER},
    {"echo", OAI_ANY},
    {"function_call", OAI_TOOLS},
    {"functions", OAI_TOOLS},
    {"modalities", OAI_ONLYTEXT},
    {"moderation", OAI_NEVER},
    {"parallel_tool_calls", OAI_ANY},
    {"prediction", OAI_ANY},
    {"tool_choice", OAI_ANY},
    {"top_logprobs", OAI_ANY},
    {"verbosity", OAI_ANY},
    {"web_search_options", OAI_NEVER},
    {"add_special_tokens", OAI_FALSE},
    {"documents", OAI_NOLIST},
    {"include_reasoning", OAI_ANY},
    {"separate_reasoning", OAI_ANY},
    {NULL, OAI_ANY},
};

/* Reads logprobs and top_logprobs: chats use a flag and a number, completions one number. */
int oai_read_chat_scores(struct oai_reader *r) {
    bool wanted = false;
    int32_t top = 0;
    const cJSON *flag = json_get(r->body, "logprobs");
    if (cJSON_IsString(flag) && strcmp(flag->valuestring, "true") == 0)
        wanted = true; /* as vLLM reads it, whose clients send it */
    else if (oai_get_bool(r, NULL, r->body, "logprobs", &wanted))
        return -1;
    if (oai_get_alternatives(r, r->body, "top_logprobs", &top)) return -1;
    if (top > 0 && !wanted)
        return oai_invalid(r, "top_logprobs",
                           "'logprobs' must be true when 'top_logprobs' is used");
    r->out->logprobs = wanted ? top : -1;
    return 0;
}

static int read_reasoning(struct oai_reader *r) {
    bool include = true;
    r->out->split_reasoning = true;
    if (oai_get_bool(r, NULL, r->body, "separate_reasoning", &r->out->split_reasoning) ||
        oai_get_bool(r, NULL, r->body, "include_reasoning", &include))
        return -1;
    r->out->hide_reasoning = !include;
    return 0;
}

/* Reads `echo` as vLLM does: the last message precedes the answer if both have the same role. The
 * messages are still those of the client. */
static int read_echo(struct oai_reader *r) {
    const cJSON *context = r->out->context, *last = NULL;
    bool echo = false;
    if (oai_get_bool(r, NULL, r->body, "echo", &echo)) return -1;
    if (!echo) return 0;
    cJSON_ArrayForEach(last, json_get(context, "messages")) {
        if (!last->next) break;
    }
    const char *role = json_get(last, "role")->valuestring;
    bool opens = cJSON_IsTrue(json_get(context, "add_generation_prompt"));
    if (opens && strcmp(role, "assistant") != 0) return 0;
    const char *content = json_get(last, "content")->valuestring;
    content = arena_strndup(r->arena, content, strlen(content)); /* a copy that lives longer */
    if (content) content = json_arena_text(r->arena, content, &r->out->echo_size);
    r->out->echo_text = content;
    return content ? 0 : oai_no_memory(r);
}

/* Appends the texts of a prediction, one after another. Parts of other types change nothing and are
 * left out. */
static int add_predicted(struct oai_reader *r, const cJSON *content, struct buf *text) {
    const cJSON *part;
    if (cJSON_IsString(content)) {
        size_t size;
        const char *bytes = json_arena_text(r->arena, content->valuestring, &size);
        if (!bytes) return oai_no_memory(r);
        buf_add(text, bytes, size);
    }
    if (!cJSON_IsArray(content)) return 0;
    cJSON_ArrayForEach(part, content) {
        const cJSON *inner = json_get(part, "text");
        if (cJSON_IsString(inner) && add_predicted(r, inner, text)) return -1;
    }
    return 0;
}

/* Only so many bytes of a prediction are read. */
#define PREDICTED_BYTES_MAX ((size_t)4 << 20)

/* Reads `prediction`: a text that the answer probably resembles (OpenAI's predicted outputs). */
static int read_prediction(struct oai_reader *r) {
    const cJSON *node = json_get(r->body, "prediction");
    const cJSON *content = cJSON_IsObject(node) ? json_get(node, "content") : NULL;
    struct engine_ids ids = {0};
    struct fault fault = {0};
    struct buf text;
    int rc = 0;
    if (!content || r->out->sampling.drafts == 0) return 0;
    buf_open(&text, SIZE_MAX);
    if (add_predicted(r, content, &text)) rc = -1;
    if (!rc && text.failed) rc = oai_no_memory(r);
    if (text.size > PREDICTED_BYTES_MAX) text.size = utf8_complete(text.data, PREDICTED_BYTES_MAX);
    if (!rc && text.size &&
        engine_tokenize(r->rules->engine, text.data, text.size, false, false, r->arena, &ids,
                        &fault))
        rc = oai_refuse_fault(r->error, &fault);
    buf_close(&text);
    size_t most = (size_t)r->rules->info->max_model_len; /* no answer is longer */
    r->out->sampling.predicted = ids.ids;
    r->out->sampling.predicted_count = (int32_t)(ids.count < most ? ids.count : most);
    return rc;
}

static int parse(struct oai_reader *r) {
    return oai_open_messages(r) || read_echo(r) || oai_adapt_messages(r) || oai_read_tools(r) ||
                   read_reasoning(r) || oai_read_chat_scores(r) || oai_read_generation(r) ||
                   read_prediction(r)
               ? -1
               : 0;
}

/* --- whole answers --- */

struct message {
    struct buf reasoning;
    struct oai_calls calls; /* the calls and the text beside them */
};

static void take_part(void *to, const struct oai_delta *delta) {
    struct message *message = to;
    if (delta->thinking)
        buf_add(&message->reasoning, delta->text, delta->size);
    else
        oai_calls_take(&message->calls, delta);
}

/* Writes the reasoning under vLLM's older and newer name, because clients read one or the other. */
static void write_reasoning(struct buf *out, const char *text, size_t size) {
    buf_str(out, "\"reasoning_content\":");
    json_write_str(out, text, size);
    buf_str(out, ",\"reasoning\":");
    json_write_str(out, text, size);
}

/* Writes the message of a choice. Returns true if it ends with a call. */
static bool write_message(struct buf *out, const struct oai_answer *answer, int index) {
    struct message message;
    const struct buf *content = &message.calls.content, *calls = &message.calls.list;
    const struct buf *reasoning = &message.reasoning;
    buf_open(&message.reasoning, out->limit);
    oai_calls_open(&message.calls, answer, index, out->limit);
    if (answer->request->echo_size)
        buf_add(&message.calls.content, answer->request->echo_text, answer->request->echo_size);
    bool called = oai_divide(answer, index, (struct oai_sink){take_part, &message});
    oai_calls_end(&message.calls);
    if (reasoning->failed || oai_calls_failed(&message.calls)) out->failed = true;
    buf_str(out, "\"message\":{\"role\":\"assistant\",\"content\":");
    bool thought = reasoning->size || oai_has_thought(answer, index);
    if (content->size || (!thought && !calls->size))
        json_write_str(out, content->data ? content->data : "", content->size);
    else
        buf_str(out, "null");
    buf_str(out, ",\"refusal\":null");
    if (thought && !answer->request->hide_reasoning) {
        buf_char(out, ',');
        write_reasoning(out, reasoning->data ? reasoning->data : "", reasoning->size);
    }
    if (calls->size) {
        buf_str(out, ",\"tool_calls\":[");
        buf_add(out, calls->data, calls->size);
        buf_char(out, ']');
    }
    buf_char(out, '}');
    buf_close(&message.reasoning);
    oai_calls_close(&message.calls);
    return called;
}

static void write_choice(struct buf *out, const struct oai_answer *answer, int index) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    buf_fmt(out, "{\"index\":%d,", index);
    bool called = write_message(out, answer, index);
    buf_str(out, ",\"logprobs\":");
    oai_render_chat_logprobs(out, answer, index, 0, oai_shown_count(answer, index));
    oai_render_finish(out, answer, index, called);
    if (answer->request->return_token_ids)
        oai_render_answer_ids(out, choice, 0, oai_token_count(choice));
    else
        buf_str(out, ",\"token_ids\":null");
    buf_char(out, '}');
}

/* Writes the answer. Members of vLLM's answers that were not asked for are null. */
static void write_answer(struct buf *out, const struct oai_answer *answer) {
    oai_render_answer_head(out, answer, "chat.completion");
    buf_str(out, ",\"choices\":[");
    for (int i = 0; i < oai_choice_count(answer); i++) {
        if (i) buf_char(out, ',');
        write_choice(out, answer, i);
    }
    /* OpenAI's name for the only service tier that keepd has. */
    buf_str(out, "],\"service_tier\":\"default\",\"usage\":");
    oai_render_usage(out, answer, oai_tokens_total(answer), true);
    buf_str(out, ",\"prompt_logprobs\":");
    oai_render_prompt_logprobs(out, answer, 0);
    if (answer->request->return_token_ids)
        oai_render_prompt_ids(out, answer, 0);
    else
        buf_str(out, ",\"prompt_token_ids\":null");
    oai_render_timings(out, answer);
    oai_render_verbose(out, answer);
    buf_str(out, ",\"system_fingerprint\":\"keepd-" KEEPD_VERSION "\"}");
}

/* --- streams --- */

/* How a choice ended. */
struct end {
    bool called; /* with a call of a tool */
};

static void open_stream(struct oai_events *events) {
    oai_chunk_open(events, "chat.completion.chunk");
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

/* Writes an event. `end`: the choice ends with it; NULL: it goes on. */
static void write_event(struct oai_events *events, const struct oai_delta *delta,
                        const struct end *end) {
    struct buf *out = &events->out;
    oai_chunk_begin(events);
    buf_fmt(out, "{\"index\":%d,\"delta\":{", delta->index);
    if (!end || delta->size) write_piece(events, delta);
    buf_str(out, "},\"logprobs\":");
    if (!end || delta->end > delta->begin)
        oai_render_chat_logprobs(out, events->answer, delta->index, delta->begin, delta->end);
    else
        buf_str(out, "null");
    if (end)
        oai_render_finish(out, events->answer, delta->index, end->called);
    else
        buf_str(out, ",\"finish_reason\":null");
    if (events->answer->request->return_token_ids)
        oai_render_answer_ids(out, oai_choice_of(events->answer, delta->index), delta->ids_begin,
                              delta->ids_end);
    buf_char(out, '}');
    oai_chunk_end(events);
}

static void write_delta(struct oai_events *events, const struct oai_delta *delta) {
    write_event(events, delta, NULL);
}

static void begin_choice(struct oai_events *events, int index, struct oai_offset *offset) {
    const struct oai_request *request = events->answer->request;
    oai_chunk_begin(events);
    buf_fmt(&events->out,
            "{\"index\":%d,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
            "\"logprobs\":null,\"finish_reason\":null}]",
            index);
    if (request->return_token_ids) oai_render_prompt_ids(&events->out, events->answer, 0);
    oai_chunk_close(events);
    if (!request->echo_size) return;
    write_delta(events, &(struct oai_delta){.index = index,
                                            .kind = TOOL_TEXT,
                                            .text = request->echo_text,
                                            .size = request->echo_size,
                                            .offset = offset});
}

static void finish_choice(struct oai_events *events, const struct oai_delta *rest, bool called) {
    write_event(events, rest, &(struct end){called});
}

/* Returns whether the last token and the reason of the end are one event: for clients that ask for
 * the usage of each event, which count tokens by events. */
static bool joins_end(const struct oai_request *request) {
    return request->include_usage && request->continuous_usage;
}

/* --- the row --- */

static const struct oai_form form = {
    .id_prefix = "chatcmpl-",
    .answer = write_answer,
    .open = open_stream,
    .progress = oai_chunk_progress,
    .begin = begin_choice,
    .delta = write_delta,
    .finish = finish_choice,
    .joins_end = joins_end,
    .end = oai_chunks_end,
};

const struct oai_kind oai_chat = {
    .path = "/v1/chat/completions",
    .schema = "ChatRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION | OAI_FIELDS_COMPLETION | OAI_FIELDS_MESSAGES,
    .fields = fields,
    .parse = parse,
    .form = &form,
};

const struct oai_kind oai_chat_count = {
    .path = "/v1/chat/completions/input_tokens",
    .schema = "ChatRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION | OAI_FIELDS_COMPLETION | OAI_FIELDS_MESSAGES,
    .fields = fields,
    .parse = oai_read_messages,
    .answer = oai_count_answer,
};

/* Chooses the kind for SageMaker's route by what the body has, as vLLM does; otherwise a chat. */
static const struct oai_kind *choose(const cJSON *body) {
    if (json_get(body, "prompt")) return &oai_completion;
    if (json_get(body, "messages")) return &oai_chat;
    if (json_get(body, "input")) return &oai_embeddings;
    if (json_get(body, "documents")) return &oai_rerank;
    return json_get(body, "text_1") ? &oai_score : &oai_chat;
}

const struct oai_kind oai_invocation = {
    .path = "/invocations",
    .schema = "ChatRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION | OAI_FIELDS_COMPLETION | OAI_FIELDS_MESSAGES,
    .fields = fields,
    .parse = parse,
    .form = &form,
    .choose = choose,
};
