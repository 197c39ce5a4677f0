/* Answers in Ollama's forms: an object, or a line of JSON for each part of a stream, and errors. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/ollama.h"

/* --- parts of answers --- */

/* A part of an answer, or all of it. Empty members are left out, except the text. */
struct part {
    const char *text, *thought, *calls; /* calls: as JSON, without brackets */
    size_t text_size, thought_size, calls_size;
};

static bool is_chat(const struct oai_answer *answer) {
    return answer->request->kind->form == &oai_ollama_chat_form;
}

static void begin_object(struct buf *out, const struct oai_answer *answer) {
    buf_str(out, "{\"model\":");
    json_write_str(out, answer->model, strlen(answer->model));
    buf_str(out, ",\"created_at\":");
    oai_write_time(out, answer->created);
}

/* A chat's parts are members of a message, those of /api/generate members of the answer. */
static void ollama_write_part(struct buf *out, const struct oai_answer *answer,
                              const struct part *part) {
    const bool chat = is_chat(answer);
    buf_str(out, chat ? ",\"message\":{\"role\":\"assistant\",\"content\":" : ",\"response\":");
    json_write_str(out, part->text ? part->text : "", part->text_size);
    if (part->thought_size) {
        buf_str(out, ",\"thinking\":");
        json_write_str(out, part->thought, part->thought_size);
    }
    if (part->calls_size) {
        buf_str(out, ",\"tool_calls\":[");
        buf_add(out, part->calls, part->calls_size);
        buf_char(out, ']');
    }
    if (chat) buf_char(out, '}');
}

static void ollama_write_call(struct buf *out, const struct oai_answer *answer,
                              const struct oai_items *items) {
    buf_str(out, "{\"id\":");
    oai_render_call_id(out, answer, "call_", 0, items->call);
    buf_fmt(out, ",\"function\":{\"index\":%" PRIu32 ",\"name\":", items->call);
    oai_write_text(out, &items->name);
    buf_str(out, ",\"arguments\":");
    oai_write_object(out, &items->text);
    buf_str(out, "}}");
}

/* Writes the ids of prompt and answer, which a later request may send back. */
static void write_context(struct buf *out, const struct oai_answer *answer) {
    const struct engine_request *request = &oai_job_of(answer, 0)->request;
    const struct engine_choice *choice = oai_choice_of(answer, 0);
    const uint32_t count = oai_token_count(choice);
    if (is_chat(answer) || !answer->request->return_token_ids) return;
    buf_str(out, ",\"context\":[");
    for (int32_t i = 0; i < request->prompt_count; i++) {
        if (i) buf_char(out, ',');
        buf_int(out, request->prompt[i]);
    }
    for (uint32_t i = 0; i < count; i++) {
        buf_char(out, ',');
        buf_int(out, choice->tokens[i].token);
    }
    buf_char(out, ']');
}

/* Writes how long jobs waited and worked, in nanoseconds. The time to load a model is what a
 * request waits for here: its turn. */
static void write_times(struct buf *out, const struct oai_answer *answer) {
    int64_t whole = 0, waited = 0;
    for (int i = 0; i < answer->job_count; i++) {
        const struct engine_job *job = &answer->jobs[i];
        const int64_t took = job->finished_ns - job->queued_ns;
        const int64_t wait = job->admitted_ns - job->queued_ns;
        if (took > whole) whole = took;
        if (job->admitted_ns && wait > waited) waited = wait;
    }
    buf_fmt(out,
            ",\"total_duration\":%" PRId64 ",\"load_duration\":%" PRId64
            ",\"prompt_eval_count\":%" PRIu64,
            whole, waited, oai_prompt_total(answer));
}

/* Writes the members with which a finished answer ends. */
static void ollama_write_end(struct buf *out, const struct oai_answer *answer) {
    const struct engine_choice *choice = oai_choice_of(answer, 0);
    const struct engine_job *job = answer->jobs;
    const int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    const int64_t read_ns = job->first_token_ns ? job->first_token_ns : job->finished_ns;
    buf_fmt(out, ",\"done\":true,\"done_reason\":\"%s\"", oai_finish_name(finish, false));
    write_context(out, answer);
    write_times(out, answer);
    buf_fmt(out,
            ",\"prompt_eval_duration\":%" PRId64 ",\"eval_count\":%" PRIu64
            ",\"eval_duration\":%" PRId64,
            job->admitted_ns ? read_ns - job->admitted_ns : 0, oai_tokens_total(answer),
            job->finished_ns - read_ns);
    oai_render_kv_details(out, answer);
    buf_char(out, '}');
}

/* --- whole answers --- */

struct whole {
    const struct oai_answer *answer;
    struct oai_items items;
    struct buf text, thought, calls;
};

static void ollama_take_part(void *to, const struct oai_delta *delta) {
    struct whole *whole = to;
    oai_items_take(&whole->items, delta);
}

static void ollama_end_item(void *to, const struct oai_items *items) {
    struct whole *whole = to;
    if (items->kind == OAI_ITEM_CALL) {
        if (whole->calls.size) buf_char(&whole->calls, ',');
        ollama_write_call(&whole->calls, whole->answer, items);
        return;
    }
    struct buf *to_text = items->kind == OAI_ITEM_THOUGHT ? &whole->thought : &whole->text;
    buf_add(to_text, items->text.data ? items->text.data : "", items->text.size);
}

static void ollama_write_answer(struct buf *out, const struct oai_answer *answer) {
    static const struct oai_item_writer writer = {.end = ollama_end_item};
    struct whole whole = {.answer = answer};
    buf_open(&whole.text, out->limit);
    buf_open(&whole.thought, out->limit);
    buf_open(&whole.calls, out->limit);
    oai_items_open(&whole.items, &writer, &whole);
    (void)oai_divide(answer, 0, (struct oai_sink){ollama_take_part, &whole});
    oai_items_end(&whole.items);
    const struct part part = {.text = whole.text.data,
                              .text_size = whole.text.size,
                              .thought = whole.thought.data,
                              .thought_size = whole.thought.size,
                              .calls = whole.calls.data,
                              .calls_size = whole.calls.size};
    begin_object(out, answer);
    ollama_write_part(out, answer, &part);
    if (answer->request->logprobs >= 0) {
        buf_str(out, ",\"logprobs\":");
        oai_render_token_logprobs(out, answer, 0, 0, oai_shown_count(answer, 0));
    }
    ollama_write_end(out, answer);
    buf_inherit(out, &whole.items.text);
    buf_inherit(out, &whole.text);
    buf_inherit(out, &whole.thought);
    buf_inherit(out, &whole.calls);
    oai_items_close(&whole.items);
    buf_close(&whole.text);
    buf_close(&whole.thought);
    buf_close(&whole.calls);
}

/* --- streams --- */

static void begin_answer_line(struct oai_events *events) {
    buf_add(&events->out, events->head.data, events->head.size);
}

static void write_line(struct oai_events *events, const struct part *part, uint32_t begin,
                       uint32_t end) {
    begin_answer_line(events);
    ollama_write_part(&events->out, events->answer, part);
    if (events->answer->request->logprobs >= 0 && end > begin) {
        buf_str(&events->out, ",\"logprobs\":");
        oai_render_token_logprobs(&events->out, events->answer, 0, begin, end);
    }
    buf_str(&events->out, ",\"done\":false}\n");
}

static void ollama_grow_item(void *to, const struct oai_items *items, const char *text, size_t size,
                             uint32_t begin, uint32_t end) {
    if (items->kind == OAI_ITEM_CALL) return; /* a call is sent whole */
    const bool thinks = items->kind == OAI_ITEM_THOUGHT;
    const struct part part = {.text = thinks ? NULL : text,
                              .text_size = thinks ? 0 : size,
                              .thought = text,
                              .thought_size = thinks ? size : 0};
    write_line(to, &part, begin, end);
}

static void send_call(void *to, const struct oai_items *items) {
    struct oai_events *events = to;
    struct buf call;
    if (items->kind != OAI_ITEM_CALL) return;
    buf_open(&call, events->out.limit);
    ollama_write_call(&call, events->answer, items);
    buf_inherit(&events->out, &call);
    const struct part part = {.calls = call.data, .calls_size = call.size};
    write_line(events, &part, items->begin, items->end);
    buf_close(&call);
}

static void ollama_open_stream(struct oai_events *events) {
    static const struct oai_item_writer writer = {.more = ollama_grow_item, .end = send_call};
    oai_items_open(&events->items, &writer, events);
    begin_object(&events->head, events->answer);
}

static void ollama_write_progress(struct oai_events *events) {
    begin_answer_line(events);
    ollama_write_part(&events->out, events->answer, &(struct part){0});
    buf_str(&events->out, ",\"done\":false,");
    buf_add(&events->out, events->note.data, events->note.size);
    buf_str(&events->out, "}\n");
}

static void ollama_finish_choice(struct oai_events *events, const struct oai_delta *rest,
                                 bool called) {
    (void)rest, (void)called;
    oai_items_end(&events->items);
    buf_inherit(&events->out, &events->items.text);
}

static void ollama_end_stream(struct oai_events *events, const struct oai_error *error) {
    if (error) {
        oai_ollama_error(&events->out, error, NULL);
    } else {
        begin_answer_line(events);
        ollama_write_part(&events->out, events->answer, &(struct part){0});
        ollama_write_end(&events->out, events->answer);
    }
    buf_char(&events->out, '\n');
}

/* --- vectors --- */

static void write_vectors(struct buf *out, const struct oai_answer *answer) {
    buf_str(out, "{\"model\":");
    json_write_str(out, answer->model, strlen(answer->model));
    buf_str(out, ",\"embeddings\":[");
    for (int i = 0; i < answer->job_count; i++) {
        if (i) buf_char(out, ',');
        oai_write_vector(out, answer->request, answer->jobs[i].pooled);
    }
    buf_char(out, ']');
    write_times(out, answer);
    buf_char(out, '}');
}

static void write_one_vector(struct buf *out, const struct oai_answer *answer) {
    buf_str(out, "{\"embedding\":");
    oai_write_vector(out, answer->request, answer->jobs->pooled);
    buf_char(out, '}');
}

/* --- errors --- */

/* Ollama's errors are a text. The field and its code are keepd's. */
void oai_ollama_error(struct buf *out, const struct oai_error *error, const char *request_id) {
    (void)request_id;
    buf_str(out, "{\"error\":");
    json_write_str(out, error->message, strlen(error->message));
    if (error->param[0]) {
        buf_str(out, ",\"param\":");
        json_write_str(out, error->param, strlen(error->param));
    }
    if (error->code) buf_fmt(out, ",\"code\":\"%s\"", error->code);
    buf_char(out, '}');
}

/* --- the forms --- */

#define LINES                                                                                      \
    .id_prefix = "ollama-", .stream_type = "application/x-ndjson", .ping = " ",                    \
    .answer = ollama_write_answer, .open = ollama_open_stream, .progress = ollama_write_progress,  \
    .delta = oai_items_delta, .finish = ollama_finish_choice, .end = ollama_end_stream

const struct oai_form oai_ollama_chat_form = {LINES};
const struct oai_form oai_ollama_text_form = {LINES};

const struct oai_form oai_ollama_vectors_form = {
    .id_prefix = "ollama-", .may_be_empty = true, .answer = write_vectors};
const struct oai_form oai_ollama_vector_form = {
    .id_prefix = "ollama-", .may_be_empty = true, .answer = write_one_vector};
