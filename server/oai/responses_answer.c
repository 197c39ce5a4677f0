/* POST /v1/responses, the answer: a response with its items, in one piece or as events. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/responses.h"

/* --- items --- */

/* How complete an item is. */
enum progress { BEGUN, WHOLE, CUT };

static const char *progress_name(enum progress progress) {
    return progress == BEGUN ? "in_progress" : progress == WHOLE ? "completed" : "incomplete";
}

/* Returns the tool of the open call as the client knows it; NULL: a function without a namespace.
 */
static const struct oai_tool_origin *tool_of(const struct oai_answer *answer,
                                             const struct oai_items *items) {
    if (items->kind != OAI_ITEM_CALL || !items->name.size) return NULL;
    return oai_origin_of(answer->request, items->name.data, items->name.size);
}

static bool is_custom(const struct oai_answer *answer, const struct oai_items *items) {
    const struct oai_tool_origin *tool = tool_of(answer, items);
    return tool && tool->is_text;
}

static void responses_write_id(struct buf *out, const struct oai_answer *answer,
                               const struct oai_items *items) {
    static const char *const prefixes[] = {
        [OAI_ITEM_THOUGHT] = "rs_", [OAI_ITEM_TEXT] = "msg_", [OAI_ITEM_CALL] = "fc_"};
    const char *prefix = is_custom(answer, items) ? "ctc_" : prefixes[items->kind];
    oai_render_part_id(out, answer, prefix, 0, (unsigned)items->count - 1);
}

static void responses_write_scores(struct buf *out, const struct oai_answer *answer, uint32_t begin,
                                   uint32_t end) {
    buf_str(out, ",\"logprobs\":");
    oai_render_token_logprobs(out, answer, 0, begin, end);
}

/* Writes the only part of a thought or a text. `text`: NULL = it is still empty. */
static void responses_write_part(struct buf *out, const struct oai_answer *answer,
                                 const struct oai_items *items, const struct buf *text) {
    static const struct buf nothing = {0};
    bool thought = items->kind == OAI_ITEM_THOUGHT;
    buf_fmt(out, "{\"type\":\"%s\",\"text\":", thought ? "reasoning_text" : "output_text");
    oai_write_text(out, text ? text : &nothing);
    if (!thought && !items->unscored) {
        buf_str(out, ",\"annotations\":[]");
        responses_write_scores(out, answer, items->begin, text ? items->end : items->begin);
    }
    buf_char(out, '}');
}

static cJSON *parse_arguments(const char *text, size_t size) {
    const struct json_limits limits = {.bytes = size, .depth = OAI_JSON_DEPTH, .nuls = true};
    struct fault fault;
    cJSON *tree = NULL;
    return json_parse(text, size, &limits, &tree, &fault) ? NULL : tree;
}

/* Parses the arguments of a call of a custom tool. If they were cut inside the input, they are
 * closed after their last whole character. NULL: they have another form. */
static cJSON *parse_custom(const struct buf *text) {
    enum { CHARACTER_MAX = 12 }; /* bytes of an escaped character */
    cJSON *tree = parse_arguments(text->data, text->size);
    struct buf closed;
    for (size_t cut = 0; !tree && cut < CHARACTER_MAX && cut < text->size; cut++) {
        buf_open(&closed, text->size + 3);
        buf_add(&closed, text->data, text->size - cut);
        buf_str(&closed, "\"}");
        if (!closed.failed) tree = parse_arguments(closed.data, closed.size);
        buf_close(&closed);
    }
    return tree;
}

/* Writes the input of a custom tool: its only argument, or all that the model wrote. */
static void write_input(struct buf *out, const struct buf *text) {
    cJSON *tree = text->size ? parse_custom(text) : NULL;
    const cJSON *input = json_get(tree, OAI_CUSTOM_INPUT);
    if (cJSON_IsString(input))
        json_write_node(out, input);
    else
        oai_write_text(out, text);
    json_free(tree);
}

static void write_name(struct buf *out, const struct oai_answer *answer,
                       const struct oai_items *items) {
    const struct oai_tool_origin *tool = tool_of(answer, items);
    buf_str(out, ",\"name\":");
    if (tool)
        json_write_str(out, tool->name, strlen(tool->name));
    else
        oai_write_text(out, &items->name);
}

static void responses_write_call(struct buf *out, const struct oai_answer *answer,
                                 const struct oai_items *items, enum progress progress) {
    static const struct buf nothing = {0};
    const struct oai_tool_origin *tool = tool_of(answer, items);
    const struct buf *text = progress == BEGUN ? &nothing : &items->text;
    buf_str(out, ",\"call_id\":");
    oai_render_call_id(out, answer, "call_", 0, items->call);
    write_name(out, answer, items);
    if (tool && tool->space) {
        buf_str(out, ",\"namespace\":");
        json_write_str(out, tool->space, strlen(tool->space));
    }
    buf_fmt(out, ",\"%s\":", tool && tool->is_text ? "input" : "arguments");
    if (tool && tool->is_text)
        write_input(out, text);
    else
        oai_write_text(out, text);
}

static void responses_write_item(struct buf *out, const struct oai_answer *answer,
                                 const struct oai_items *items, enum progress progress) {
    static const char *const types[] = {[OAI_ITEM_THOUGHT] = "reasoning",
                                        [OAI_ITEM_TEXT] = "message",
                                        [OAI_ITEM_CALL] = "function_call"};
    buf_str(out, "{\"id\":");
    responses_write_id(out, answer, items);
    bool custom = is_custom(answer, items);
    buf_fmt(out, ",\"type\":\"%s\",\"status\":\"%s\"",
            custom ? "custom_tool_call" : types[items->kind], progress_name(progress));
    if (items->kind == OAI_ITEM_CALL) {
        responses_write_call(out, answer, items, progress);
    } else {
        buf_str(out, items->kind == OAI_ITEM_TEXT ? ",\"role\":\"assistant\",\"content\":["
                                                  : ",\"summary\":[],\"content\":[");
        if (progress != BEGUN) responses_write_part(out, answer, items, &items->text);
        buf_char(out, ']');
    }
    buf_char(out, '}');
}

/* --- responses --- */

/* Returns why the answer was cut; NULL: it was not. */
static const char *cut_reason(const struct oai_answer *answer) {
    int finish = atomic_load_explicit(&oai_choice_of(answer, 0)->finish, memory_order_acquire);
    return finish == ENGINE_FINISH_LENGTH       ? "max_output_tokens"
           : finish == ENGINE_FINISH_REPETITION ? "repetition"
                                                : NULL;
}

static bool is_cut(const struct oai_answer *answer) {
    return cut_reason(answer) != NULL;
}

/* Returns how complete an item is at the end; only the last one can be cut. */
static enum progress end_of(const struct oai_answer *answer, const struct oai_items *items) {
    return items->last && (is_cut(answer) || answer->cancelled) ? CUT : WHOLE;
}

static void responses_write_whole(struct buf *out, const struct oai_answer *answer,
                                  const struct oai_items *items) {
    responses_write_item(out, answer, items, end_of(answer, items));
}

/* Writes an item for a record (stored.h), which has no scores. */
static void write_unscored(struct buf *out, const struct oai_answer *answer,
                           const struct oai_items *items) {
    struct oai_items bare = *items;
    bare.unscored = true;
    responses_write_whole(out, answer, &bare);
}

static void responses_write_usage(struct buf *out, const struct oai_answer *answer) {
    uint64_t prompt = oai_prompt_total(answer), tokens = oai_tokens_total(answer);
    buf_fmt(
        out,
        "{\"input_tokens\":%" PRIu64 ",\"input_tokens_details\":{\"cached_tokens\":%" PRIu64
        ",\"cache_write_tokens\":0},\"output_tokens\":%" PRIu64
        ",\"output_tokens_details\":{\"reasoning_tokens\":%" PRIu64 "},\"total_tokens\":%" PRIu64,
        prompt, oai_prompt_cached(answer), tokens, oai_reasoning_total(answer), prompt + tokens);
    oai_render_kv_details(out, answer);
    buf_char(out, '}');
}

enum status { QUEUED, IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED, CANCELLED };
static const char *const status_names[] = {"queued",     "in_progress", "completed",
                                           "incomplete", "failed",      "cancelled"};

/* Writes a failure; a failed response has only a few codes. */
static void write_failure(struct buf *out, const struct oai_error *error) {
    buf_str(out, ",\"error\":");
    if (error) {
        buf_str(out, "{\"code\":\"server_error\",\"message\":");
        json_write_str(out, error->message, strlen(error->message));
        buf_char(out, '}');
    } else {
        buf_str(out, "null");
    }
}

static void write_response(struct buf *out, const struct oai_answer *answer, enum status status,
                           const struct oai_error *error) {
    bool ended = status == COMPLETED || status == INCOMPLETE;
    buf_fmt(out,
            "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%" PRId64
            ",\"status\":\"%s\",\"background\":%s,\"model\":",
            answer->id, answer->created, status_names[status],
            answer->request->background ? "true" : "false");
    json_write_str(out, answer->model, strlen(answer->model));
    write_failure(out, error);
    buf_str(out, ",\"incomplete_details\":");
    if (status == INCOMPLETE)
        buf_fmt(out, "{\"reason\":\"%s\"}", cut_reason(answer));
    else
        buf_str(out, "null");
    buf_str(out, answer->request->repeated);
    buf_str(out, ",\"output\":[");
    if (ended) oai_items_write(out, answer, responses_write_whole);
    buf_str(out, "],\"usage\":");
    if (ended)
        responses_write_usage(out, answer);
    else
        buf_str(out, "null");
    if (ended) oai_render_timings(out, answer);
    buf_char(out, '}');
}

static void responses_write_answer(struct buf *out, const struct oai_answer *answer) {
    write_response(out, answer, is_cut(answer) ? INCOMPLETE : COMPLETED, NULL);
}

/* Adds the tokens that the model read and wrote. */
static void add_tokens(struct buf *out, const struct oai_answer *answer) {
    const struct engine_request *request = &oai_job_of(answer, 0)->request;
    const struct engine_choice *choice = oai_choice_of(answer, 0);
    uint32_t count = oai_token_count(choice);
    buf_add(out, request->prompt, (size_t)request->prompt_count * sizeof *request->prompt);
    for (uint32_t i = 0; i < count; i++)
        buf_add(out, &choice->tokens[i].token, sizeof choice->tokens[i].token);
}

static void write_unfinished(struct buf *out, const struct oai_answer *answer, bool begun) {
    enum status status = answer->cancelled ? CANCELLED : begun ? IN_PROGRESS : QUEUED;
    write_response(out, answer, status, NULL);
}

/* Stores a record, without its events if they make it too large. */
static bool put_record(const struct oai_answer *answer, struct oai_record *record) {
    struct oai_records *records = answer->rules->records;
    const struct oai_owner *owner = &answer->request->owner;
    int rc = oai_records_put(records, owner, answer->id, record);
    if (rc == ERR_LIMIT && record->events_size) {
        record->events_size = 0;
        rc = oai_records_put(records, owner, answer->id, record);
    }
    return rc == 0;
}

/* Stores the response. If there is no room, it cannot be continued, but its client still gets the
 * answer. A response that failed or was cancelled has no output. */
static bool keep(const struct oai_answer *answer, const struct oai_error *error,
                 const struct buf *events) {
    const struct oai_request *request = answer->request;
    bool ended = !answer->cancelled && !error;
    struct buf items, text, tokens;
    if (!request->own_items) return true;
    buf_open(&items, OAI_RECORD_BYTES);
    buf_open(&text, OAI_RECORD_BYTES);
    buf_open(&tokens, OAI_RECORD_BYTES);
    buf_str(&items, request->own_items);
    if (ended) {
        buf_char(&items, ',');
        oai_items_write(&items, answer, write_unscored);
        responses_write_answer(&text, answer);
        add_tokens(&tokens, answer);
    } else if (answer->cancelled) {
        write_unfinished(&text, answer, true);
    } else {
        write_response(&text, answer, FAILED, error);
    }
    struct oai_record record = {
        .items = items.data,
        .items_size = items.size,
        .input_size = strlen(request->own_items),
        .answer = text.data,
        .answer_size = text.size,
        .tokens = (const int32_t *)(const void *)tokens.data,
        .token_count = tokens.size / sizeof(int32_t),
        .model = answer->model,
        .background = request->background,
        .streamed = request->stream,
        .events = events ? events->data : NULL,
        .events_size = events && !events->failed ? events->size : 0,
    };
    bool kept = !items.failed && !text.failed && !tokens.failed && put_record(answer, &record);
    buf_close(&items);
    buf_close(&text);
    buf_close(&tokens);
    return kept;
}

/* --- streams --- */

/* Begins an event and ends with the comma before its own members. Returns false if the client has
 * the event: it counts, and nothing of it is written. */
static bool begin_response_event(struct oai_events *events, const char *type) {
    if (events->sequence < events->from) {
        events->sequence++;
        return false;
    }
    buf_fmt(&events->out, "event: %s\ndata: {\"type\":\"%s\",\"sequence_number\":%" PRIu64 ",",
            type, type, events->sequence++);
    return true;
}

static void responses_end_event(struct oai_events *events) {
    buf_str(&events->out, "}\n\n");
}

static void write_state(struct oai_events *events, const char *type, enum status status,
                        const struct oai_error *error) {
    if (!begin_response_event(events, type)) return;
    buf_str(&events->out, "\"response\":");
    write_response(&events->out, events->answer, status, error);
    responses_end_event(events);
}

/* Writes "output_index" and, for a part of an item, "item_id" and "content_index". Returns false as
 * begin_response_event does. */
static bool begin_item_event(struct oai_events *events, const char *type, bool part) {
    const struct oai_items *items = &events->items;
    if (!begin_response_event(events, type)) return false;
    buf_fmt(&events->out, "\"output_index\":%d", items->count - 1);
    if (!part) return true;
    buf_str(&events->out, ",\"item_id\":");
    responses_write_id(&events->out, events->answer, items);
    if (items->kind != OAI_ITEM_CALL) buf_str(&events->out, ",\"content_index\":0");
    return true;
}

/* The types of the events of each kind of item. */
static const struct {
    const char *more, *done, *text;
} types[] = {
    [OAI_ITEM_THOUGHT] = {"response.reasoning_text.delta", "response.reasoning_text.done", "text"},
    [OAI_ITEM_TEXT] = {"response.output_text.delta", "response.output_text.done", "text"},
    [OAI_ITEM_CALL] = {"response.function_call_arguments.delta",
                       "response.function_call_arguments.done", "arguments"},
};

static void responses_begin_item(void *to, const struct oai_items *items) {
    struct oai_events *events = to;
    if (begin_item_event(events, "response.output_item.added", false)) {
        buf_str(&events->out, ",\"item\":");
        responses_write_item(&events->out, events->answer, items, BEGUN);
        responses_end_event(events);
    }
    if (items->kind == OAI_ITEM_CALL) return;
    if (!begin_item_event(events, "response.content_part.added", true)) return;
    buf_str(&events->out, ",\"part\":");
    responses_write_part(&events->out, events->answer, items, NULL);
    responses_end_event(events);
}

static void responses_grow_item(void *to, const struct oai_items *items, const char *text,
                                size_t size, uint32_t begin, uint32_t end) {
    struct oai_events *events = to;
    if (is_custom(events->answer, items)) return; /* the input is known when the call is whole */
    if (!begin_item_event(events, types[items->kind].more, true)) return;
    buf_str(&events->out, ",\"delta\":");
    json_write_str(&events->out, text, size);
    if (items->kind == OAI_ITEM_TEXT)
        responses_write_scores(&events->out, events->answer, begin, end);
    responses_end_event(events);
}

/* Writes the whole input of a custom tool: as one piece, then as the end. */
static void end_custom(struct oai_events *events, const struct oai_items *items) {
    static const char *const pieces[][2] = {{"response.custom_tool_call_input.delta", "delta"},
                                            {"response.custom_tool_call_input.done", "input"}};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        if (!begin_item_event(events, pieces[i][0], true)) continue;
        buf_fmt(&events->out, ",\"%s\":", pieces[i][1]);
        write_input(&events->out, &items->text);
        responses_end_event(events);
    }
}

static void end_text(struct oai_events *events, const struct oai_items *items) {
    const struct oai_answer *answer = events->answer;
    struct buf *out = &events->out;
    if (!begin_item_event(events, types[items->kind].done, true)) return;
    buf_fmt(out, ",\"%s\":", types[items->kind].text);
    oai_write_text(out, &items->text);
    if (items->kind == OAI_ITEM_TEXT) responses_write_scores(out, answer, items->begin, items->end);
    if (items->kind == OAI_ITEM_CALL) write_name(out, answer, items);
    responses_end_event(events);
}

static void responses_end_item(void *to, const struct oai_items *items) {
    struct oai_events *events = to;
    const struct oai_answer *answer = events->answer;
    struct buf *out = &events->out;
    if (is_custom(answer, items))
        end_custom(events, items);
    else
        end_text(events, items);
    if (items->kind != OAI_ITEM_CALL &&
        begin_item_event(events, "response.content_part.done", true)) {
        buf_str(out, ",\"part\":");
        responses_write_part(out, answer, items, &items->text);
        responses_end_event(events);
    }
    if (!begin_item_event(events, "response.output_item.done", false)) return;
    buf_str(out, ",\"item\":");
    responses_write_item(out, answer, items, end_of(answer, items));
    responses_end_event(events);
}

/* Begins the stream. In the background its first events come at once, so that the client knows the
 * id, and the third one when the answer begins. */
static void responses_open_stream(struct oai_events *events) {
    static const struct oai_item_writer writer = {responses_begin_item, responses_grow_item,
                                                  responses_end_item};
    oai_items_open(&events->items, &writer, events);
    if (!events->answer->request->background) return;
    write_state(events, "response.created", QUEUED, NULL);
    write_state(events, "response.queued", QUEUED, NULL);
}

/* Writes the events before the answer, unless they are written. */
static void responses_announce(struct oai_events *events) {
    const bool background = events->answer->request->background;
    if (events->sequence > (background ? 2 : 0)) return;
    if (!background) write_state(events, "response.created", IN_PROGRESS, NULL);
    write_state(events, "response.in_progress", IN_PROGRESS, NULL);
}

/* Writes progress in the form of llama.cpp's server. */
static void responses_write_progress(struct oai_events *events) {
    responses_announce(events);
    if (!begin_response_event(events, "response.in_progress")) return;
    buf_str(&events->out, "\"response\":");
    write_response(&events->out, events->answer, IN_PROGRESS, NULL);
    buf_char(&events->out, ',');
    buf_add(&events->out, events->note.data, events->note.size);
    responses_end_event(events);
}

static void responses_begin_choice(struct oai_events *events, int index,
                                   struct oai_offset *offset) {
    (void)index, (void)offset;
    responses_announce(events);
}

static void responses_finish_choice(struct oai_events *events, const struct oai_delta *rest,
                                    bool called) {
    (void)rest, (void)called;
    oai_items_end(&events->items);
}

static void responses_end_stream(struct oai_events *events, const struct oai_error *error) {
    responses_announce(events);
    if (events->answer->cancelled) /* OpenAI's streams have no event of this name */
        write_state(events, "response.failed", CANCELLED, NULL);
    else if (error)
        write_state(events, "response.failed", FAILED, error);
    else if (is_cut(events->answer))
        write_state(events, "response.incomplete", INCOMPLETE, NULL);
    else
        write_state(events, "response.completed", COMPLETED, NULL);
}

const struct oai_form oai_response_form = {
    .id_prefix = "resp_",
    .answer = responses_write_answer,
    .keep = keep,
    .unfinished = write_unfinished,
    .open = responses_open_stream,
    .progress = responses_write_progress,
    .begin = responses_begin_choice,
    .delta = oai_items_delta,
    .finish = responses_finish_choice,
    .end = responses_end_stream,
};
