/* Turns a body into a checked request with one job, with tokens, for each prompt. Runs in the
 * libuv worker and uses only its exchange and immutable data; the loop meanwhile changes nothing of
 * the exchange but `state`. */
#include <inttypes.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/check.h"
#include "base/json.h"
#include "base/mem.h"
#include "server/loop.h"
#include "server/sip.h"

#define ARENA_BYTES    ((size_t)64 << 20)
#define ARENA_PER_BYTE 32
#define AGAIN_US       1000 /* a worker waits so long before it asks for a language again */

/* Computes the space of a client's conversations: they are found only by the same key with the same
 * salt on the same model with the same adapter, by its numbers. The hash has a secret of the engine
 * as its key, so nobody can aim at another client's space. */
int prepare_space(const struct exchange *ex, const char *salt, uint8_t space[16]) {
    const struct oai_rules *rules = &ex->model->rules;
    const char *parts[] = {salt, rules->names[0]};
    struct buf text;
    buf_open(&text, 1 << 20);
    buf_add(&text, ex->client.key_id, sizeof ex->client.key_id);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint64_t size = strlen(parts[i]); /* the size stands before each part, so that different
                                             parts never join to the same text */
        buf_add(&text, &size, sizeof size);
        buf_str(&text, parts[i]);
    }
    if (ex->adapter.number) buf_add(&text, ex->adapter.digest, sizeof ex->adapter.digest);
    bool failed = text.failed;
    if (!failed) sip_hash128(rules->info->space_key, text.data, text.size, space);
    buf_close(&text);
    return failed ? ERR_NOMEM : 0;
}

static void set_hint(struct exchange *ex) {
    const char *session = ex->session[0] ? ex->session : ex->request.session;
    uint8_t hash[16];
    if (!session[0]) return;
    sip_hash128(ex->model->rules.info->space_key, session, strlen(session), hash);
    memcpy(&ex->request.sampling.hint, hash, sizeof ex->request.sampling.hint);
}

/* --- prompts --- */

/* Replaces the field of a fault by the request's field, because a client does not know the names
 * that templates and tokenizers use. A path below that field, such as messages[2].role, is more
 * exact and stays. */
static void replace_fault_field(struct fault *fault, const char *field) {
    size_t size = strlen(field);
    bool inside = strncmp(fault->field, field, size) == 0 && strchr("[.", fault->field[size]);
    if (fault->code == ERR_NOMEM || inside) return;
    struct fault own = *fault;
    fault_set(fault, own.code, field, "%s%s%s", own.field, own.field[0] ? ": " : "", own.text);
}

static int refuse_prompt(struct exchange *ex, const char *field, struct fault *fault) {
    const struct oai_request *request = &ex->request;
    int longest = request->longest;
    if (fault->code == ERR_LIMIT && !fault->field[0] && request->kind->form) {
        oai_refuse(&ex->error, 400, "context_length_exceeded", field,
                   "This model's maximum context length is %d tokens. However, your %s resulted "
                   "in %s, which exceeds the available context size. Please reduce the length of "
                   "the %s.%s",
                   longest, request->prompt_field, fault->text, request->prompt_field,
                   oai_overflow_hint(request, &ex->model->rules));
        return oai_refuse_context(&ex->error, (size_t)longest + 1, (size_t)longest);
    }
    replace_fault_field(fault, field);
    return oai_refuse_fault(&ex->error, fault);
}

/* How a text of the request becomes tokens. */
struct reading {
    bool add_special, parse_special;
};

static int tokenize_text(struct exchange *ex, const char *from, struct reading how,
                         struct engine_ids *ids, struct fault *fault) {
    size_t size;
    const char *text = json_arena_text(&ex->arena, from, &size);
    if (!text) return ERR_NOMEM;
    return engine_tokenize(ex->model->engine, text, size, how.add_special, how.parse_special,
                           &ex->arena, ids, fault);
}

/* The parts of a prompt with a gap, in order. */
struct parts {
    struct exchange *ex;
    struct engine_ids *at;
    int count;
};

static void add_token(struct parts *parts, const int32_t *id) {
    if (*id < 0) return;
    parts->at[parts->count++] = (struct engine_ids){.ids = (int32_t *)(uintptr_t)id, .count = 1};
}

/* Adds text only: a special token in it would move the gap. */
static int add_text_part(struct parts *parts, const char *text, struct fault *fault) {
    const struct reading plain = {false, false};
    return tokenize_text(parts->ex, text, plain, &parts->at[parts->count++], fault);
}

/* Adds a file: its name, a line break, its text. */
static int add_file_part(struct parts *parts, const struct oai_file *file, struct fault *fault) {
    size_t name = strlen(file->name), size = strlen(file->text);
    char *text = arena_alloc(&parts->ex->arena, name + size + 3, 1);
    if (!text) return ERR_NOMEM;
    memcpy(text, file->name, name);
    text[name] = '\n';
    memcpy(text + name + 1, file->text, size);
    text[name + 1 + size] = '\n';
    add_token(parts, &parts->ex->model->rules.fim.file);
    return add_text_part(parts, text, fault);
}

static int join_token_parts(const struct parts *parts, struct engine_ids *ids) {
    ids->count = 0;
    for (int i = 0; i < parts->count; i++) ids->count += parts->at[i].count;
    ids->ids = arena_alloc(&parts->ex->arena, ids->count, sizeof *ids->ids);
    if (!ids->ids) return ERR_NOMEM;
    int32_t *to = ids->ids;
    for (int i = 0; i < parts->count; i++) {
        const struct engine_ids *part = &parts->at[i];
        if (part->count) memcpy(to, part->ids, part->count * sizeof *to);
        to += part->count;
    }
    return 0;
}

/* Tokenises a text with a gap: the files, then the text before the gap and the text after it. */
static int tokenize_gap(struct exchange *ex, const char *prefix, struct engine_ids *ids,
                        struct fault *fault) {
    const struct oai_request *request = &ex->request;
    const struct oai_fim *fim = &ex->model->rules.fim;
    struct parts parts = {
        ex, arena_alloc(&ex->arena, 2 * (size_t)request->file_count + 6, sizeof *parts.at), 0};
    if (!parts.at) return ERR_NOMEM;
    int rc = 0;
    for (int i = 0; !rc && i < request->file_count; i++)
        rc = add_file_part(&parts, &request->files[i], fault);
    if (rc) return rc;
    if (request->file_count) add_token(&parts, &fim->file);
    add_token(&parts, &fim->prefix);
    rc = add_text_part(&parts, prefix, fault);
    if (rc) return rc;
    add_token(&parts, &fim->suffix);
    rc = add_text_part(&parts, request->suffix, fault);
    add_token(&parts, &fim->middle);
    return rc ? rc : join_token_parts(&parts, ids);
}

/* Tokenises a list of ids and texts, in its order. Only a text at the beginning gets the
 * tokenizer's special tokens. */
static int tokenize_mixed(struct exchange *ex, const cJSON *list, struct engine_ids *ids,
                          struct fault *fault) {
    const struct oai_request *request = &ex->request;
    size_t count = (size_t)cJSON_GetArraySize(list);
    struct parts parts = {ex, arena_alloc(&ex->arena, count, sizeof *parts.at), 0};
    int32_t *id = arena_alloc(&ex->arena, count, sizeof *id);
    const cJSON *node;
    int rc = 0;
    if (!parts.at || !id) return ERR_NOMEM;
    cJSON_ArrayForEach(node, list) {
        struct reading how = {request->add_special && !parts.count, request->parse_special};
        if (cJSON_IsString(node)) {
            rc = tokenize_text(ex, node->valuestring, how, &parts.at[parts.count++], fault);
            if (rc) return rc;
        } else {
            *id = (int32_t)node->valuedouble;
            add_token(&parts, id++);
        }
    }
    return join_token_parts(&parts, ids);
}

/* Puts the request's ids in front of a rendered chat. */
static int join_front(struct exchange *ex, struct engine_ids *ids) {
    const struct oai_request *request = &ex->request;
    const struct engine_ids front = {.ids = (int32_t *)(uintptr_t)request->front,
                                     .count = request->front_count};
    struct engine_ids at[] = {front, *ids};
    for (int i = 0; i < ids->picture_row_count; i++) ids->picture_rows[i].at += front.count;
    return join_token_parts(&(struct parts){ex, at, 2}, ids);
}

static int render_chat(struct exchange *ex, struct engine_ids *ids, struct fault *fault) {
    const struct engine *engine = ex->model->engine;
    const struct oai_request *request = &ex->request;
    const struct engine_chat chat = {request->context, (const struct picture *const *)ex->pictures,
                                     ex->picture_count, request->longest};
    int rc = engine_render_chat(engine, &chat, &ex->arena, ids, fault);
    if (!rc && request->front_count) return join_front(ex, ids);
    if (rc || !request->earlier || ids->picture_row_count) return rc;
    return oai_continue_ids(engine, request->earlier, request->earlier_count, &ex->arena, ids);
}

static int render_pair(struct exchange *ex, const struct oai_pair *pair, struct engine_ids *ids,
                       struct fault *fault) {
    const struct oai_request *request = &ex->request;
    const int most = request->truncate < 0 || request->truncate > request->longest
                         ? request->longest
                         : request->truncate;
    if (ex->model->rules.info->labels)
        return engine_tokenize_pair(ex->model->engine, pair->query, pair->document, (size_t)most,
                                    &ex->arena, ids, fault);
    cJSON *context = oai_pair_context(pair);
    const struct engine_chat chat = {.context = context, .longest = request->longest};
    int rc =
        context ? engine_render_chat(ex->model->engine, &chat, &ex->arena, ids, fault) : ERR_NOMEM;
    cJSON_Delete(context);
    return rc;
}

/* The i-th prompt as tokens. */
static int find_prompt(struct exchange *ex, int i, struct engine_ids *ids) {
    const struct oai_request *request = &ex->request;
    const struct oai_prompt *prompt = request->context ? NULL : &request->prompts[i];
    struct fault fault = {0};
    char field[OAI_PATH];
    int rc = 0;
    *ids = (struct engine_ids){0};
    if (!prompt && prepare_pictures(ex)) return -1;
    if (!prompt)
        rc = render_chat(ex, ids, &fault);
    else if (prompt->pair)
        rc = render_pair(ex, prompt->pair, ids, &fault);
    else if (prompt->text && request->suffix)
        rc = tokenize_gap(ex, prompt->text, ids, &fault);
    else if (prompt->text)
        rc = tokenize_text(ex, prompt->text,
                           (struct reading){request->add_special, request->parse_special}, ids,
                           &fault);
    else if (prompt->mixed)
        rc = tokenize_mixed(ex, prompt->mixed, ids, &fault);
    else
        *ids = (struct engine_ids){.ids = (int32_t *)(uintptr_t)prompt->ids,
                                   .count = prompt->id_count};
    if (!rc) return 0;
    if (!fault.code) fault_set(&fault, rc, NULL, "%s", err_text(rc));
    oai_prompt_path(request, i, field);
    return refuse_prompt(ex, field, &fault);
}

/* --- generation --- */

static uint64_t make_seed(const struct oai_rules *rules) {
    uint64_t seed;
    if (rules->seed >= 0) return (uint64_t)rules->seed;
    CHECK(getrandom(&seed, sizeof seed, 0) == (ssize_t)sizeof seed);
    return seed;
}

/* Checks the job. The engine's errors name the prompt as if there was only one. */
static int check_job(struct exchange *ex, int i) {
    struct fault fault = {0};
    char field[OAI_PATH];
    if (!engine_check(ex->model->engine, &ex->jobs[i], &fault)) return 0;
    oai_prompt_path(&ex->request, i, field);
    if (strcmp(fault.field, "prompt") == 0) replace_fault_field(&fault, field);
    return oai_refuse_fault(&ex->error, &fault);
}

/* Scores of one job: of its answer, and of its prompt where the prompt is echoed or listed. */
struct scores {
    int64_t token; /* one token of the answer in all choices */
    int64_t answer, echo, prompt;
    bool at_once;
};

/* Scores of all jobs of a request up to the present one. */
struct score_sums {
    int64_t all, at_once; /* at_once: those that the loop writes in one turn */
};

/* Counts the scores of a job. An echoed prompt is part of every choice, and so is a prompt's list
 * of scores, except in chats. A stream sends its scores as they come, except those of its prompt.
 */
static struct scores count_scores(const struct oai_request *of,
                                  const struct engine_request *request) {
    int64_t each = 1 + (of->logprobs > 0 ? of->logprobs : 0), choices = request->choices;
    int64_t lists = of->context ? 1 : choices;
    struct scores scores = {.token = each * choices, .at_once = !of->stream && of->logprobs >= 0};
    scores.answer = request->max_tokens * scores.token;
    if (of->echo) scores.echo = request->prompt_count * scores.token;
    if (of->prompt_logprobs >= 0)
        scores.prompt = request->prompt_count * (int64_t)(1 + of->prompt_logprobs) * lists;
    return scores;
}

/* Limits the length of an answer for which the client named none, to an equal part of the scores
 * that the limits leave for this job and the `later` ones. */
static void fit_scores(const struct exchange *ex, struct engine_request *request,
                       const struct score_sums *sums, int later) {
    const struct scores scores = count_scores(&ex->request, request);
    int64_t of_prompt = scores.echo + scores.prompt;
    int64_t most = OAI_SCORES_MAX - sums->all - of_prompt;
    int64_t at_once = OAI_SCORES_AT_ONCE - sums->at_once - of_prompt;
    int64_t least = request->min_tokens > 1 ? request->min_tokens : 1;
    if (ex->request.max_tokens >= 0) return;
    if (scores.at_once && at_once < most) most = at_once;
    most /= scores.token * (1 + later);
    if (most < least) most = least;
    if (request->max_tokens > most) request->max_tokens = (int32_t)most;
}

static int refuse_scores(struct exchange *ex, int i, const struct scores *scores,
                         const struct score_sums *sums, bool at_once) {
    int most = at_once ? OAI_SCORES_AT_ONCE : OAI_SCORES_MAX;
    int64_t found = at_once ? sums->at_once : sums->all;
    int64_t of_prompt = scores->echo + scores->prompt;
    char field[OAI_PATH] = "max_tokens";
    if (scores->prompt > scores->answer + scores->echo ||
        (of_prompt > most && scores->prompt > scores->echo))
        snprintf(field, sizeof field, "prompt_logprobs");
    else if (of_prompt > most)
        oai_prompt_path(&ex->request, i, field);
    return oai_refuse(&ex->error, 400, "invalid_value", field,
                      "Invalid value for '%s': choices x tokens x (1 + logprobs) of an answer may "
                      "be at most %d%s, and this request could come to %" PRId64
                      ". Ask for fewer choices, tokens or logprobs.",
                      field, most, at_once ? " where they are sent at once" : "", found);
}

/* Checks the number of scores. Output arrays and the answer grow with choices, tokens and
 * alternatives; each of these has a limit, and their product needs one, too. The loop writes a
 * whole answer in one turn and serves nobody else meanwhile: a score takes some 50 bytes and 0.4
 * us. */
static int check_scores(struct exchange *ex, int i, struct score_sums *sums) {
    const struct scores scores = count_scores(&ex->request, &ex->jobs[i].request);
    int64_t of_prompt = scores.echo + scores.prompt;
    sums->all += scores.answer + of_prompt;
    sums->at_once += (scores.at_once ? scores.answer : 0) + of_prompt;
    if (sums->all > OAI_SCORES_MAX) return refuse_scores(ex, i, &scores, sums, false);
    if (sums->at_once > OAI_SCORES_AT_ONCE) return refuse_scores(ex, i, &scores, sums, true);
    return 0;
}

/* Notes how many of the prompt's first tokens the tokenizer added. `cut`: tokens that were removed
 * from the beginning. */
static void note_added(struct exchange *ex, int i, size_t cut) {
    const struct oai_request *request = &ex->request;
    const struct oai_prompt *prompt = &request->prompts[i];
    bool text = prompt->text || (prompt->mixed && cJSON_IsString(prompt->mixed->child));
    size_t added = (size_t)engine_added_before(ex->model->engine);
    request->added[i] = text && request->add_special && added > cut ? (int32_t)(added - cut) : 0;
}

static int make_job(struct exchange *ex, int i, struct score_sums *sums) {
    struct engine_request *request = &ex->jobs[i].request;
    struct engine_ids ids;
    char field[OAI_PATH];
    if (find_prompt(ex, i, &ids)) return -1;
    size_t whole = ids.count;
    if (!ids.second) oai_truncate(&ex->request, &ex->model->rules, i, &ids);
    if (ex->request.added) note_added(ex, i, whole - ids.count);
    oai_prompt_path(&ex->request, i, field);
    *request = ex->request.sampling;
    if (oai_fit(&ex->request, field, ids.count, &ex->model->rules, &request->max_tokens,
                &ex->error))
        return -1;
    oai_bound_thought(&ex->request, request);
    request->prompt = ids.ids;
    request->prompt_count = (int32_t)ids.count;
    request->pictures = (const struct picture *const *)ex->pictures;
    request->picture_count = ex->picture_count;
    request->picture_rows = ids.picture_rows;
    request->picture_row_count = ids.picture_row_count;
    request->second = (int32_t)ids.second;
    request->choices = ex->request.n;
    if (ex->request.context && request->kv.retain && !ex->request.front_count)
        request->border = engine_chat_border(ex->model->engine, ex->request.context, &ids);
    if (!ex->request.seed_given) request->seed = make_seed(&ex->model->rules);
    fit_scores(ex, request, sums, ex->job_count - i - 1);
    return check_scores(ex, i, sums) || check_job(ex, i) ? -1 : 0;
}

/* Compiles one language for all prompts here, neither on the loop nor on the engine's thread.
 * ERR_BUSY: not yet. */
static int open_constraint(struct exchange *ex) {
    struct engine_request *sampling = &ex->request.sampling;
    struct fault fault = {0};
    int rc;
    if (!ex->request.constraint || ex->constraint) return 0;
    rc = engine_constraint_open(ex->model->engine, ex->request.constraint, &ex->constraint, &fault);
    ex->again = rc == ERR_BUSY;
    if (rc) return ex->again ? rc : oai_refuse_fault(&ex->error, &fault);
    sampling->constraint = ex->constraint;
    sampling->constraint_field = ex->request.constraint_field;
    return 0;
}

static int make_jobs(struct exchange *ex) {
    int count = ex->request.prompt_count, most = ex->model->rules.info->max_queue;
    struct score_sums sums = {0};
    if (count > most && !ex->request.sampling.pooling)
        return oai_refuse(
            &ex->error, 400, "invalid_value", "prompt",
            "Invalid value for 'prompt': this server queues at most %d prompts, found "
            "%d.",
            most, count);
    if (ex->request.adapter && !exchange_take_adapter(ex, ex->request.adapter))
        return oai_refuse(&ex->error, 404, "model_not_found", "model",
                          "The adapter `%.128s` has been unloaded.", ex->request.adapter);
    ex->request.sampling.adapter = ex->adapter.number;
    ex->jobs = mem_try_alloc((size_t)count, sizeof *ex->jobs);
    ex->progress = mem_try_alloc((size_t)count, sizeof *ex->progress);
    if (!ex->jobs || !ex->progress ||
        prepare_space(ex, ex->request.salt, ex->request.sampling.space)) {
        exchange_refuse_memory(ex);
        return -1;
    }
    set_hint(ex);
    ex->request.sampling.think_begin = ex->model->rules.think.begin;
    ex->request.sampling.think_end = ex->model->rules.think.end;
    memcpy(ex->request.sampling.client, ex->client.id, sizeof ex->client.id);
    memcpy(ex->request.sampling.owner, ex->client.owner, sizeof ex->client.owner);
    ex->request.sampling.others = ex->client.other_keys;
    ex->request.sampling.weight = ex->client.settings.weight;
    ex->request.sampling.pages_max = ex->client.settings.pages_max;
    ex->request.sampling.pins_max = ex->client.settings.pins_max;
    if (ex->request.sampling.kv.pin && ex->client.settings.pins_max == 0)
        return oai_refuse(&ex->error, 400, "invalid_value", "kv.retain.pin",
                          "Invalid value for 'kv.retain.pin': only a key that has pins=N in "
                          "--api-key-file may pin.");
    ex->job_count = count;
    if (ex->request.echo && !ex->request.context) {
        ex->request.added = arena_alloc(&ex->arena, (size_t)count, sizeof *ex->request.added);
        if (!ex->request.added) {
            exchange_refuse_memory(ex);
            return -1;
        }
    }
    for (int i = 0; i < count; i++)
        if (make_job(ex, i, &sums)) return -1;
    return 0;
}

/* --- texts --- */

static int parse_request_body(struct exchange *ex) {
    const struct oai_kind *kind = ex->request.kind;
    const struct oai_rules *rules = &ex->model->rules;
    if (oai_parse_json(ex->body.data ? ex->body.data : "", ex->body.size, rules, &ex->tree,
                       &ex->error) ||
        oai_parse(kind, ex->tree, rules, ex->client.key_id, &ex->arena, &ex->request, &ex->error))
        return -1;
    ex->request.longest = engine_longest(ex->model->engine, &ex->request.sampling.kv);
    return 0;
}

/* Changes the engine as the request asks. The names of all models stay theirs: an adapter with one
 * of them would not be found. */
static int run_engine_work(struct exchange *ex) {
    const struct oai_request *request = &ex->request;
    if (request->adapter_path && models_named(ex->server, request->adapter))
        return oai_refuse(&ex->error, 400, "invalid_value", "lora_name",
                          "Invalid value for 'lora_name': a model has this name.");
    return request->kind->work(ex->model->engine, request, &ex->error);
}

/* Queues the request anew where its pictures turn out to need another queue. ERR_BUSY: so it is. */
static int change_queue(struct exchange *ex) {
    bool fetches = false;
    for (int i = 0; i < ex->request.picture_count; i++) fetches |= ex->request.pictures[i].remote;
    if (fetches == ex->fetches && (ex->large || !ex->request.picture_count)) return 0;
    ex->fetches = fetches;
    ex->large = ex->again = true;
    return ERR_BUSY;
}

static int make_result(struct exchange *ex) {
    struct engine_ids ids;
    if (change_queue(ex)) return ERR_BUSY;
    if (ex->request.kind->form) {
        int rc = open_constraint(ex);
        return rc ? rc : make_jobs(ex);
    }
    if (ex->request.kind->work) {
        ids = (struct engine_ids){0};
        if (run_engine_work(ex)) return -1;
    } else if (find_prompt(ex, 0, &ids)) {
        return -1;
    }
    ex->request.kind->answer(&ex->answer.body, &ex->model->rules, &ex->request, &ids);
    ex->answer.status = 200;
    return 0;
}

/* Frees what the work needed: the jobs have their data in the arena, and the tree is many times the
 * size of the body. */
void prepare_end(struct exchange *ex) {
    ex->again = false;
    oai_request_close(&ex->request);
    json_free(ex->tree);
    ex->tree = NULL;
    ex->request.prompts = NULL;
    ex->request.constraint = NULL;
    ex->request.salt = ex->request.session = ex->request.suffix = NULL;
    ex->request.files = NULL;
    ex->request.pictures = NULL;
    ex->request.adapter = ex->request.adapter_path = NULL;
    if (!ex->job_count) arena_close(&ex->arena); /* a text answer is complete */
}

/* Prepares a request. If its language cannot be compiled yet, or it turns out to be large, the
 * request leaves the worker, so that others in the queue get their turns, and is queued again. It
 * keeps its thread for a moment, so that the queue is not polled without rest. */
void prepare_run(uv_work_t *work) {
    struct exchange *ex = work->data;
    bool ready = true;
    if (!ex->again) {
        arena_open(&ex->arena, ARENA_BYTES + ARENA_PER_BYTE * ex->body.size);
        ready = parse_request_body(ex) == 0;
    }
    ex->again = false;
    if (ready && make_result(ex) && !ex->again) oai_rename_field(&ex->request, &ex->error);
    if (ex->again)
        usleep(AGAIN_US);
    else
        prepare_end(ex);
}
