/* POST /v1/completions: prompts in, texts out. */
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

/* --- the request --- */

static const struct oai_field fields[] = {
    {"best_of", OAI_ANY},         {"echo", OAI_ANY},
    {"suffix", OAI_ANY},          {"top_logprobs", OAI_ZERO},
    {"prompt_embeds", OAI_NEVER}, {NULL, OAI_ANY},
};

/* Checks best_of. Every choice is returned, so it cannot differ from n. */
static int check_best_of(struct oai_reader *r) {
    int32_t best_of = -1;
    if (oai_get_int(r, NULL, r->body, "best_of", 1, OAI_N_MAX, &best_of)) return -1;
    if (best_of < 0 || best_of == r->out->n) return 0;
    return oai_refuse(r->error, 400, "unsupported_parameter", "best_of",
                      "Unsupported value for 'best_of': every choice is returned, so it must equal "
                      "'n' (%d), found %d.",
                      r->out->n, best_of);
}

/* Reads `suffix`: the answer fills the gap between prompt and suffix, if the model was trained for
 * that. */
int oai_read_suffix(struct oai_reader *r) {
    struct oai_request *out = r->out;
    const char *suffix = NULL;
    if (oai_get_str(r, NULL, r->body, "suffix", &suffix)) return -1;
    if (!suffix || !*suffix) return 0;
    if (!r->rules->fim.known)
        return oai_refuse(
            r->error, 400, "unsupported_parameter", "suffix",
            "Unsupported value for 'suffix': this model's tokenizer has no tokens for "
            "filling a gap.");
    if (out->echo || out->truncate)
        return oai_invalid(r, "suffix", "not together with 'echo' or 'truncate_prompt_tokens'");
    for (int i = 0; i < out->prompt_count; i++)
        if (!out->prompts[i].text)
            return oai_invalid(r, "suffix", "every prompt must be text, not token ids");
    out->suffix = suffix;
    return 0;
}

static int completion_parse(struct oai_reader *r) {
    r->out->parse_special = true;
    return oai_read_prompts(r) || oai_get_bool(r, NULL, r->body, "echo", &r->out->echo) ||
                   oai_get_alternatives(r, r->body, "logprobs", &r->out->logprobs) ||
                   oai_read_generation(r) || check_best_of(r) || oai_read_suffix(r)
               ? -1
               : 0;
}

/* --- whole answers --- */

static void completion_write_text(struct buf *out, const struct oai_answer *answer, int index) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    size_t safe = oai_shown_size(answer, index);
    struct buf text;
    buf_open(&text, out->limit);
    if (answer->request->echo) oai_render_prompt_text(&text, answer, index);
    buf_add(&text, choice->text ? choice->text : "", safe);
    buf_inherit(out, &text);
    buf_str(out, "\"text\":");
    json_write_str(out, text.data ? text.data : "", text.size);
    buf_close(&text);
}

/* Writes a choice. Members of vLLM's answers that were not asked for are null. */
static void completion_write_choice(struct buf *out, const struct oai_answer *answer, int index) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    const struct oai_request *request = answer->request;
    struct oai_offset offset = {0};
    buf_fmt(out, "{\"index\":%d,", index);
    completion_write_text(out, answer, index);
    buf_str(out, ",\"logprobs\":");
    oai_render_text_logprobs(out, answer, index, 0, oai_shown_count(answer, index), request->echo,
                             &offset);
    oai_render_finish(out, answer, index, false);
    buf_str(out, ",\"prompt_logprobs\":");
    oai_render_prompt_logprobs(out, answer, index);
    if (request->return_token_ids) {
        oai_render_answer_ids(out, choice, 0, oai_token_count(choice));
        oai_render_prompt_ids(out, answer, index);
    } else {
        buf_str(out, ",\"token_ids\":null,\"prompt_token_ids\":null");
    }
    buf_char(out, '}');
}

static void completion_write_answer(struct buf *out, const struct oai_answer *answer) {
    oai_render_answer_head(out, answer, "text_completion");
    buf_str(out, ",\"choices\":[");
    for (int i = 0; i < oai_choice_count(answer); i++) {
        if (i) buf_char(out, ',');
        completion_write_choice(out, answer, i);
    }
    buf_str(out, "],\"usage\":");
    oai_render_usage(out, answer, oai_tokens_total(answer), true);
    oai_render_timings(out, answer);
    oai_render_verbose(out, answer);
    buf_str(out, ",\"system_fingerprint\":\"keepd-" KEEPD_VERSION "\"}");
}

/* --- streams --- */

static void completion_open_stream(struct oai_events *events) {
    oai_chunk_open(events, "text_completion");
}

/* Writes an event. `ended`: the choice ends with it. */
static void completion_write_event(struct oai_events *events, const struct oai_delta *delta,
                                   bool ended) {
    struct buf *out = &events->out;
    bool scored = delta->echo || delta->end > delta->begin || !ended;
    oai_chunk_begin(events);
    buf_fmt(out, "{\"index\":%d,\"text\":", delta->index);
    json_write_str(out, delta->text, delta->size);
    buf_str(out, ",\"logprobs\":");
    if (scored)
        oai_render_text_logprobs(out, events->answer, delta->index, delta->begin, delta->end,
                                 delta->echo, delta->offset);
    else
        buf_str(out, "null");
    if (ended)
        oai_render_finish(out, events->answer, delta->index, false);
    else
        buf_str(out, ",\"finish_reason\":null");
    if (events->answer->request->return_token_ids) {
        oai_render_answer_ids(out, oai_choice_of(events->answer, delta->index), delta->ids_begin,
                              delta->ids_end);
        if (!delta->ids_begin) oai_render_prompt_ids(out, events->answer, delta->index);
    }
    buf_char(out, '}');
    oai_chunk_end(events);
}

static void completion_write_delta(struct oai_events *events, const struct oai_delta *delta) {
    completion_write_event(events, delta, false);
}

/* Sends the echoed prompt, with its scores. */
static void completion_begin_choice(struct oai_events *events, int index,
                                    struct oai_offset *offset) {
    struct buf text;
    if (!events->answer->request->echo) return;
    buf_open(&text, events->out.limit);
    oai_render_prompt_text(&text, events->answer, index);
    completion_write_delta(events, &(struct oai_delta){.index = index,
                                                       .kind = TOOL_TEXT,
                                                       .echo = true,
                                                       .text = text.data ? text.data : "",
                                                       .size = text.size,
                                                       .offset = offset});
    buf_inherit(&events->out, &text);
    buf_close(&text);
}

static void completion_finish_choice(struct oai_events *events, const struct oai_delta *rest,
                                     bool called) {
    (void)called;
    completion_write_event(events, rest, true);
}

/* Returns whether the last token and the reason of the end are one event. Clients of this route
 * come from servers that send one event for each token and no other, and some count tokens by
 * events. OpenAI's own examples read an event's text before its reason; not all clients of chats
 * do. */
static bool completion_joins_end(const struct oai_request *request) {
    (void)request;
    return true;
}

/* --- the row --- */

static const struct oai_form form = {
    .id_prefix = "cmpl-",
    .preset_tokens = OAI_COMPLETION_TOKENS,
    .answer = completion_write_answer,
    .open = completion_open_stream,
    .progress = oai_chunk_progress,
    .begin = completion_begin_choice,
    .delta = completion_write_delta,
    .finish = completion_finish_choice,
    .joins_end = completion_joins_end,
    .end = oai_chunks_end,
};

const struct oai_kind oai_completion = {
    .path = "/v1/completions",
    .schema = "CompletionRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION | OAI_FIELDS_COMPLETION | OAI_FIELDS_PROMPT,
    .fields = fields,
    .parse = completion_parse,
    .form = &form,
};
