/* POST /completion and /infill: the forms of llama.cpp's server. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

/* --- requests --- */

static int read_members(struct oai_reader *r) {
    const cJSON *list = json_get(r->body, "response_fields"), *node;
    char field[OAI_PATH];
    int count = cJSON_GetArraySize(list);
    if (!list) return 0;
    if (!cJSON_IsArray(list) || count > OAI_MEMBERS_MAX)
        return oai_invalid(r, "response_fields", "expected an array of at most %d strings",
                           OAI_MEMBERS_MAX);
    const char **members = arena_alloc(r->arena, (size_t)count + 1, sizeof *members);
    if (!members) return oai_no_memory(r);
    r->out->members = members;
    cJSON_ArrayForEach(node, list) {
        oai_path(field, "response_fields[%d]", r->out->member_count);
        if (!cJSON_IsString(node))
            return oai_invalid(r, field, "expected a string, found %s", json_type_name(node));
        *members = arena_strndup(r->arena, node->valuestring, strlen(node->valuestring));
        if (!*members++) return oai_no_memory(r);
        r->out->member_count++;
    }
    return 0;
}

/* Reads everything but the prompt. */
static int read_native(struct oai_reader *r) {
    struct oai_request *out = r->out;
    int32_t alternatives = 0;
    bool cache = true;
    out->timings = true;
    if (oai_get_alternatives(r, r->body, "logprobs", &alternatives) ||
        oai_get_alternatives(r, r->body, "n_probs", &alternatives))
        return -1;
    out->logprobs = alternatives > 0 ? alternatives : -1;
    if (oai_read_generation(r) || read_members(r) ||
        oai_get_bool(r, NULL, r->body, "cache_prompt", &cache) ||
        oai_get_bool(r, NULL, r->body, "return_tokens", &out->return_token_ids))
        return -1;
    if (!cache) out->sampling.kv.reuse = false;
    return 0;
}

static int parse_completion(struct oai_reader *r) {
    r->out->parse_special = true;
    return oai_read_prompts(r) || read_native(r) ? -1 : 0;
}

/* Reads the i-th file, `object`. */
static int read_file(struct oai_reader *r, const cJSON *object, int i, struct oai_file *file) {
    char path[OAI_PATH];
    oai_path(path, "input_extra[%d]", i);
    if (!cJSON_IsObject(object))
        return oai_invalid(r, path, "expected an object, found %s", json_type_name(object));
    file->name = "";
    if (oai_get_str(r, path, object, "filename", &file->name) ||
        oai_get_str(r, path, object, "text", &file->text))
        return -1;
    if (file->text) return 0;
    oai_path(path, "input_extra[%d].text", i);
    return oai_missing(r, path);
}

static int read_files(struct oai_reader *r) {
    const cJSON *list = json_get(r->body, "input_extra"), *node;
    int count = cJSON_GetArraySize(list);
    if (!list) return 0;
    if (!cJSON_IsArray(list) || count > OAI_FILES_MAX)
        return oai_invalid(r, "input_extra", "expected an array of at most %d objects",
                           OAI_FILES_MAX);
    struct oai_file *files = arena_alloc(r->arena, (size_t)count + 1, sizeof *files);
    if (!files) return oai_no_memory(r);
    r->out->files = files;
    cJSON_ArrayForEach(node, list) {
        if (read_file(r, node, r->out->file_count, &files[r->out->file_count])) return -1;
        r->out->file_count++;
    }
    return 0;
}

/* Joins the text before the gap: the lines before, and the line typed so far. */
static int join_prefix(struct oai_reader *r, const char *prefix, const char *typed) {
    struct oai_prompt *prompt = arena_alloc(r->arena, 1, sizeof *prompt);
    size_t before = strlen(prefix), behind = strlen(typed);
    char *text = arena_alloc(r->arena, before + behind + 1, 1);
    if (!prompt || !text) return oai_no_memory(r);
    memcpy(text, prefix, before);
    memcpy(text + before, typed, behind);
    text[before + behind] = '\0';
    prompt->text = text;
    r->out->prompts = prompt;
    r->out->prompt_count = 1;
    r->out->prompt_field = "input_prefix";
    return 0;
}

static int parse_infill(struct oai_reader *r) {
    const char *prefix = NULL, *suffix = NULL, *typed = "";
    if (!r->rules->fim.known)
        return oai_refuse(r->error, 400, "unsupported_model", NULL,
                          "This model's tokenizer has no tokens for filling a gap "
                          "(<|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>).");
    if (oai_get_str(r, NULL, r->body, "input_prefix", &prefix) ||
        oai_get_str(r, NULL, r->body, "input_suffix", &suffix) ||
        oai_get_str(r, NULL, r->body, "prompt", &typed))
        return -1;
    if (!prefix) return oai_missing(r, "input_prefix");
    if (!suffix) return oai_missing(r, "input_suffix");
    r->out->suffix = suffix;
    if (join_prefix(r, prefix, typed) || read_files(r) || read_native(r)) return -1;
    if (r->out->truncate)
        return oai_invalid(r, "truncate_prompt_tokens", "it would cut the text before the gap");
    return 0;
}

/* --- answers --- */

/* Writes biases in llama.cpp's form, where null is minus infinity. */
static void write_biases(struct buf *out, const struct engine_request *s,
                         const struct engine_info *info) {
    const char *comma = "";
    for (int i = 0; s->ignore_eos && i < info->eos_count; i++, comma = ",")
        buf_fmt(out, "%s{\"token\":%" PRId32 ",\"bias\":null}", comma, info->eos[i]);
    for (int32_t i = 0; i < s->bias_count; i++, comma = ",")
        buf_fmt(out, "%s{\"token\":%" PRId32 ",\"bias\":%.9g}", comma, s->bias[i].token,
                (double)s->bias[i].bias);
}

static void write_settings(struct buf *out, const struct oai_answer *answer,
                           const struct engine_request *s, int choice) {
    buf_fmt(out,
            "{\"n_predict\":%" PRId32 ",\"max_tokens\":%" PRId32 ",\"seed\":%" PRIu64
            ",\"temperature\":%.9g,\"top_k\":%" PRId32 ",\"top_p\":%.9g,\"min_p\":%.9g",
            s->max_tokens, s->max_tokens, s->seed + (uint64_t)choice, (double)s->temperature,
            s->top_k, (double)s->top_p, (double)s->min_p);
    buf_fmt(out,
            ",\"repeat_penalty\":%.9g,\"presence_penalty\":%.9g,\"frequency_penalty\":%.9g"
            ",\"ignore_eos\":%s,\"stream\":%s,\"n_probs\":%" PRId32 ",\"stop\":[",
            (double)s->repetition, (double)s->presence, (double)s->frequency,
            s->ignore_eos ? "true" : "false", answer->request->stream ? "true" : "false",
            answer->request->logprobs > 0 ? answer->request->logprobs : 0);
    for (int32_t i = 0; i < s->stop_count; i++) {
        if (i) buf_char(out, ',');
        json_write_str(out, s->stops[i].text, s->stops[i].size);
    }
    buf_str(out, "],\"logit_bias\":[");
    write_biases(out, s, answer->rules->info);
    buf_str(out, "]}");
}

/* The text is truncated, in llama.cpp's words, where the context ended it or was shifted for it. */
static void native_write_end(struct buf *out, const struct engine_request *s,
                             const struct engine_choice *choice, uint32_t tokens, int32_t context) {
    const int64_t whole = (int64_t)s->prompt_count + tokens;
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    bool length = finish == ENGINE_FINISH_LENGTH,
         limit = length || finish == ENGINE_FINISH_REPETITION;
    const struct engine_stop *stop = choice->stop_index >= 0 ? &s->stops[choice->stop_index] : NULL;
    buf_fmt(out, ",\"truncated\":%s,\"stop_type\":\"%s\",\"stopping_word\":",
            whole > context || (length && whole == context) ? "true" : "false",
            limit  ? "limit"
            : stop ? "word"
                   : "eos");
    json_write_str(out, stop ? stop->text : "", stop ? stop->size : 0);
}

static void write_prompt(struct buf *out, const struct oai_answer *one) {
    const struct engine_request *s = &one->jobs->request;
    struct buf text;
    buf_open(&text, out->limit);
    oai_render_token_texts(&text, one->engine, s->prompt, (size_t)s->prompt_count);
    buf_inherit(out, &text);
    buf_str(out, ",\"prompt\":");
    json_write_str(out, text.data ? text.data : "", text.size);
    buf_close(&text);
}

/* Writes the whole answer of a choice. `one` is the answer of its prompt alone, in which it has the
 * number `choice`. The last event of a stream has no text, because the text was sent before. */
static void native_write_whole(struct buf *out, const struct oai_answer *one, int index,
                               int choice_no) {
    const struct oai_request *request = one->request;
    const struct engine_job *job = one->jobs;
    const struct engine_choice *choice = &job->choice[choice_no];
    uint32_t tokens = oai_token_count(choice);
    size_t size = oai_shown_size(one, choice_no);
    bool text = !request->stream, ids = text && request->return_token_ids;
    buf_fmt(out, "{\"index\":%d,\"content\":", index);
    json_write_str(out, text && choice->text ? choice->text : "", text ? size : 0);
    buf_str(out, ",\"tokens\":");
    oai_render_ids(out, choice, 0, ids ? tokens : 0);
    buf_str(out, ",\"stop\":true,\"model\":");
    json_write_str(out, one->model, strlen(one->model));
    buf_fmt(out,
            ",\"tokens_predicted\":%" PRIu32 ",\"tokens_evaluated\":%" PRId32
            ",\"tokens_cached\":%" PRId32 ",\"generation_settings\":",
            tokens, job->request.prompt_count, job->cached_tokens);
    write_settings(out, one, &job->request, choice_no);
    write_prompt(out, one);
    buf_fmt(out, ",\"has_new_line\":%s",
            choice->text && memchr(choice->text, '\n', size) ? "true" : "false");
    native_write_end(out, &job->request, choice, tokens, one->rules->info->max_model_len);
    if (text && request->logprobs >= 0) {
        buf_str(out, ",\"completion_probabilities\":");
        oai_render_native_logprobs(out, one, choice_no, 0, oai_shown_count(one, choice_no));
    }
    if (request->prompt_logprobs >= 0) {
        buf_str(out, ",\"prompt_logprobs\":");
        oai_render_prompt_logprobs(out, one, choice_no);
    }
    oai_render_timings(out, one);
    buf_str(out, ",\"usage\":");
    oai_render_usage(out, one, oai_tokens_total(one), true);
    buf_char(out, '}');
}

/* Finds the member of `tree` at a path of names with slashes; NULL: there is none. */
static const cJSON *find_member(const cJSON *tree, const char *path) {
    while (tree) {
        size_t size = strcspn(path, "/");
        const cJSON *child = NULL;
        if (cJSON_IsObject(tree)) cJSON_ArrayForEach(child, tree) {
                if (strlen(child->string) == size && strncmp(child->string, path, size) == 0) break;
            }
        tree = child;
        if (!path[size]) break;
        path += size + 1;
    }
    return tree;
}

static bool is_named_before(const struct oai_request *request, int i) {
    for (int k = 0; k < i; k++)
        if (strcmp(request->members[k], request->members[i]) == 0) return true;
    return false;
}

/* Writes {"path": member, ...} for the wanted members that exist. */
static void write_members(struct buf *out, const struct oai_request *request,
                          const struct buf *whole) {
    const struct json_limits limits = {.bytes = whole->size, .depth = OAI_JSON_DEPTH, .nuls = true};
    struct fault fault;
    cJSON *tree = NULL;
    bool comma = false;
    if (json_parse(whole->data, whole->size, &limits, &tree, &fault)) {
        out->failed = true;
        return;
    }
    buf_char(out, '{');
    for (int i = 0; i < request->member_count; i++) {
        const char *path = request->members[i];
        const cJSON *member = find_member(tree, path);
        if (!member || is_named_before(request, i)) continue;
        if (comma) buf_char(out, ',');
        comma = true;
        json_write_str(out, path, strlen(path));
        buf_char(out, ':');
        json_write_node(out, member);
    }
    buf_char(out, '}');
    json_free(tree);
}

static void native_write_result(struct buf *out, const struct oai_answer *answer, int index) {
    struct oai_answer one = *answer;
    int choice = index % answer->request->n;
    struct buf whole;
    one.jobs = oai_job_of(answer, index);
    one.job_count = 1;
    if (!answer->request->member_count) {
        native_write_whole(out, &one, index, choice);
        return;
    }
    buf_open(&whole, out->limit);
    native_write_whole(&whole, &one, index, choice);
    buf_inherit(out, &whole);
    if (!whole.failed) write_members(out, answer->request, &whole);
    buf_close(&whole);
}

/* Writes an object, or an array if there are several choices. */
static void native_write_answer(struct buf *out, const struct oai_answer *answer) {
    int count = oai_choice_count(answer);
    if (count > 1) buf_char(out, '[');
    for (int i = 0; i < count; i++) {
        if (i) buf_char(out, ',');
        native_write_result(out, answer, i);
    }
    if (count > 1) buf_char(out, ']');
}

void oai_render_verbose(struct buf *out, const struct oai_answer *answer) {
    if (!answer->request->verbose) return;
    buf_str(out, ",\"__verbose\":");
    native_write_answer(out, answer);
}

/* --- streams --- */

static void native_open_stream(struct oai_events *events) {
    buf_str(&events->head, "data: {\"index\":");
}

static void begin_native_event(struct oai_events *events, int index, const char *text,
                               size_t size) {
    buf_add(&events->out, events->head.data, events->head.size);
    buf_fmt(&events->out, "%d,\"content\":", index);
    json_write_str(&events->out, text, size);
    buf_str(&events->out, ",\"stop\":false,\"tokens\":");
}

static void native_write_progress(struct oai_events *events) {
    begin_native_event(events, 0, "", 0);
    buf_str(&events->out, "[],");
    buf_add(&events->out, events->note.data, events->note.size);
    buf_str(&events->out, "}\n\n");
}

static void native_write_delta(struct oai_events *events, const struct oai_delta *delta) {
    const struct oai_answer *answer = events->answer;
    struct buf *out = &events->out;
    begin_native_event(events, delta->index, delta->text, delta->size);
    oai_render_ids(out, oai_choice_of(answer, delta->index), delta->ids_begin, delta->ids_end);
    buf_fmt(out, ",\"tokens_predicted\":%" PRIu32 ",\"tokens_evaluated\":%" PRId32, delta->ids_end,
            oai_job_of(answer, delta->index)->request.prompt_count);
    if (answer->request->logprobs >= 0) {
        buf_str(out, ",\"completion_probabilities\":");
        oai_render_native_logprobs(out, answer, delta->index, delta->begin, delta->end);
    }
    buf_str(out, "}\n\n");
}

/* Ends the stream. The last events have numbers of the whole prompt, so they come when all jobs
 * have finished. */
static void native_end_stream(struct oai_events *events, const struct oai_error *error) {
    struct buf *out = &events->out;
    for (int i = 0; !error && i < oai_choice_count(events->answer); i++) {
        buf_str(out, "data: ");
        native_write_result(out, events->answer, i);
        buf_str(out, "\n\n");
    }
    if (!error) return;
    buf_str(out, "data: ");
    oai_render_error(out, error);
    buf_str(out, "\n\n");
}

/* --- the rows --- */

static const struct oai_form form = {
    .id_prefix = "cmpl-",
    .may_be_empty = true,
    .answer = native_write_answer,
    .open = native_open_stream,
    .progress = native_write_progress,
    .delta = native_write_delta,
    .end = native_end_stream,
};

const struct oai_kind oai_native = {
    .path = "/completion",
    .schema = "NativeRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION | OAI_FIELDS_COMPLETION | OAI_FIELDS_PROMPT |
              OAI_FIELDS_NATIVE,
    .parse = parse_completion,
    .form = &form,
};

static const struct oai_field infill_fields[] = {
    {"input_prefix", OAI_ANY}, {"input_suffix", OAI_ANY}, {"input_extra", OAI_ANY},
    {"prompt", OAI_ANY},       {NULL, OAI_ANY},
};

const struct oai_kind oai_infill = {
    .path = "/infill",
    .schema = "InfillRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION | OAI_FIELDS_COMPLETION | OAI_FIELDS_NATIVE,
    .fields = infill_fields,
    .parse = parse_infill,
    .form = &form,
};
