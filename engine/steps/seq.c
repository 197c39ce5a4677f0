/* The data of a sequence and the output of its job: allocation, sampling parameters, answer tokens
 * and text, prompt scores, and the end of a choice. Output arrays are allocated whole at submit, so
 * that writing an answer cannot fail. */
#include "engine/steps/seq.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/json.h"
#include "base/mem.h"
#include "engine/engine_pictures.h"
#include "engine/steps/publish.h"
#include "engine/steps/trace.h"

/* ---- Memory ---- */

void engine_job_close(struct engine_job *job) {
    for (int i = 0; i < job->choice_count; i++) {
        struct engine_choice *choice = &job->choice[i];
        mem_free(choice->tokens);
        mem_free(choice->top);
        mem_free(choice->text);
    }
    mem_free(job->choice);
    mem_free(job->params);
    mem_free(job->pooled);
    mem_free(job->pooled_sum);
    job->pooled = NULL;
    job->pooled_sum = NULL;
    job->choice = NULL;
    job->choice_count = 0;
    job->params = NULL;
    mem_free(job->prompt_tokens);
    mem_free(job->prompt_top);
    mem_free(job->live);
    mem_free(job->kv.lengths);
    mem_free(job->kv.positions);
    trace_close(&job->kv);
    job->prompt_tokens = NULL;
    job->prompt_top = NULL;
    job->live = NULL;
    job->kv.lengths = NULL;
    job->kv.positions = NULL;
}

static size_t at_least_one(size_t n) {
    return n > 0 ? n : 1;
}

static int alloc_top(struct engine_top **top, size_t tokens, int32_t per_token) {
    if (per_token <= 0) return 0;
    *top = mem_try_alloc(at_least_one(tokens) * (size_t)per_token, sizeof **top);
    return *top ? 0 : ERR_NOMEM;
}

static int alloc_choice(struct engine_choice *choice, const struct engine_request *request,
                        size_t token_bytes_max) {
    size_t answers = (size_t)request->max_tokens;
    choice->stop_index = -1;
    choice->stop_token = -1;
    choice->tokens = mem_try_alloc(at_least_one(answers), sizeof *choice->tokens);
    if (answers <= UINT32_MAX / at_least_one(token_bytes_max)) /* text_end counts in 32 bits */
        choice->text = mem_try_alloc(at_least_one(answers), at_least_one(token_bytes_max));
    if (!choice->tokens || !choice->text) return ERR_NOMEM;
    return alloc_top(&choice->top, answers, request->top_logprobs);
}

static int alloc_prompt(struct engine_job *job) {
    const struct engine_request *request = &job->request;
    size_t prompt = (size_t)request->prompt_count;
    job->prompt_tokens = mem_try_alloc(prompt, sizeof *job->prompt_tokens);
    if (!job->prompt_tokens) return ERR_NOMEM;
    /* Nothing precedes the first token, and rows of pictures have no probabilities. */
    for (size_t i = 0; i < prompt; i++)
        if (i == 0 || engine_is_picture_id(request->prompt[i]))
            job->prompt_tokens[i] =
                (struct engine_token){.token = request->prompt[i], .logprob = NAN};
    return alloc_top(&job->prompt_top, prompt, request->prompt_top_logprobs);
}

int seq_pooled_count(const struct engine_request *request, int width) {
    if (request->pooling == ENGINE_POOL_NEXT) return request->judged_count;
    return request->dimensions > 0 ? request->dimensions : width;
}

static int alloc_pooled(struct engine_job *job, int width, int summed) {
    const size_t count = (size_t)seq_pooled_count(&job->request, width);
    job->pooled = mem_try_alloc(count, sizeof *job->pooled);
    if (job->pooled && job->request.pooling == ENGINE_POOL_MEAN)
        job->pooled_sum =
            mem_try_alloc(summed > 0 ? (size_t)summed : count, sizeof *job->pooled_sum);
    return !job->pooled || (job->request.pooling == ENGINE_POOL_MEAN && !job->pooled_sum)
               ? ERR_NOMEM
               : 0;
}

int seq_job_choices(const struct engine_request *request) {
    return request->choices > 0 ? request->choices : 1;
}

int seq_job_alloc(struct engine_job *job, size_t token_bytes_max, int64_t streams, int width,
                  int summed) {
    const struct engine_request *request = &job->request;
    int count = seq_job_choices(request), rc = 0;
    if (request->prompt_count < 1 || request->max_tokens < 0) return ERR_INVALID;
    if (request->pooling && (request->max_tokens > 0 || count > 1 || width < 1)) return ERR_INVALID;
    if (request->dimensions < 0 || request->dimensions > width) return ERR_INVALID;
    if (request->pooling == ENGINE_POOL_NEXT &&
        (request->judged_count < 1 || request->judged_count > ENGINE_JUDGED_MAX))
        return ERR_INVALID;
    job->choice = mem_try_alloc((size_t)count, sizeof *job->choice);
    if (!job->choice) return ERR_NOMEM;
    job->choice_count = job->choices_left = count;
    for (int i = 0; i < count && rc == 0; i++)
        rc = alloc_choice(&job->choice[i], request, token_bytes_max);
    if (rc == 0 && request->prompt_logprobs) rc = alloc_prompt(job);
    if (rc == 0 && request->pooling) rc = alloc_pooled(job, width, summed);
    if (rc == 0 && request->kv.live) rc = publish_live_open(job, (size_t)streams);
    if (rc != 0) engine_job_close(job);
    return rc;
}

/* Collects the tokens that end the answer, where min_tokens or a constraint needs them. */
static int alloc_ends(struct sequence *seq, const struct seq_text *text) {
    const struct engine_request *request = &seq->job->request;
    if (request->min_tokens <= 0 && !request->constraint) return 0;
    int32_t eos = request->ignore_eos ? 0 : text->eos_count;
    int32_t count = eos + request->stop_id_count;
    if (count == 0) return 0;
    seq->ends = mem_try_alloc((size_t)count, sizeof *seq->ends);
    if (!seq->ends) return ERR_NOMEM;
    if (eos > 0) memcpy(seq->ends, text->eos, (size_t)eos * sizeof *seq->ends);
    if (request->stop_id_count > 0)
        memcpy(seq->ends + eos, request->stop_ids,
               (size_t)request->stop_id_count * sizeof *seq->ends);
    seq->end_count = count;
    return 0;
}

static bool is_bounded(const struct engine_request *request) {
    return request->think_bounded && request->think_begin >= 0 && request->think_end >= 0;
}

static void note_thought(struct sequence *seq, int32_t token) {
    const struct engine_request *request = &seq->job->request;
    seq->thought = seq->thinks ? seq->thought + 1 : 0;
    seq->thinks = is_bounded(request) && token != request->think_end &&
                  (seq->thinks || token == request->think_begin);
}

int seq_open(struct sequence *seq, struct engine_job *job, int index, const struct kv_params *kv,
             const struct seq_text *text) {
    const struct engine_request *request = &job->request;
    CHECK(index < job->choice_count && kv->policy);
    *seq = (struct sequence){.job = job,
                             .index = index,
                             .choice = &job->choice[index],
                             .slot = -1,
                             .kv = *kv,
                             .exact = true,
                             .changed = true};
    size_t room = (size_t)request->prompt_count + (size_t)request->max_tokens;
    seq->tokens = mem_try_alloc(room, sizeof *seq->tokens);
    bool is_penalised =
        request->repetition != 1 || request->presence != 0 || request->frequency != 0;
    if (!seq->tokens || alloc_ends(seq, text) != 0 ||
        (is_penalised && tally_open(&seq->tally, (int32_t)room) != 0) ||
        dry_open(&seq->dry, request, text->token_bytes, text->arg, (int32_t)room) != 0 ||
        loops_open(&seq->loops, &request->loops, request->max_tokens) != 0 ||
        constraint_run_open(&seq->constraint, request) != 0) {
        seq_close(seq);
        return ERR_NOMEM;
    }
    memcpy(seq->tokens, request->prompt, (size_t)request->prompt_count * sizeof *seq->tokens);
    seq->token_count = seq->prompt_count = request->prompt_count;
    seq->due.prompt_new = request->prompt_count;
    seq->thinks = is_bounded(request) && constraint_last_word(request, text->token_bytes,
                                                              text->arg) == request->think_begin;
    return 0;
}

void seq_close(struct sequence *seq) {
    trace_drop(seq);
    if (seq->job) constraint_run_close(&seq->constraint, &seq->job->request);
    mem_free(seq->tokens);
    mem_free(seq->ends);
    tally_close(&seq->tally);
    dry_close(&seq->dry);
    loops_close(&seq->loops);
    draft_close(&seq->draft);
    *seq = (struct sequence){.slot = -1};
}

/* At the end of a chunk every prompt with these tokens evicts; at the end of its prompt and in its
 * answer, only this sequence does. */
void seq_evicted(struct sequence *seq) {
    const struct due_state *due = &seq->due;
    if (!due_ends_chunk(&seq->kv, due)) seq->exact = false;
    seq->evicted_at = due->tokens;
    seq->changed = true;
    due_evicted(&seq->kv, &seq->due);
}

int32_t seq_output_count(const struct sequence *seq) {
    return seq->token_count - seq->prompt_count;
}

/* ---- Sampling ---- */

/* Chooses a token, whatever its logit is. Added to logits, so it is far above any of them. */
#define CERTAIN 1e9f

/* A character may take this many tokens after its first one. */
#define CHARACTER_TOKENS 3

/* Returns whether the answer ends inside a character, which more tokens complete. */
static bool in_character(const struct sequence *seq) {
    return utf8_complete(seq->choice->text, seq->text_size) < seq->text_size;
}

/* Returns the bias that ends reasoning of which there is enough; NULL: it may go on. The last
 * character is completed first. */
static const struct kern_logit_bias *end_of_thought(struct sequence *seq) {
    const struct engine_request *request = &seq->job->request;
    if (!seq->thinks || seq->thought < request->think_budget) return NULL;
    if (seq->thought < request->think_budget + CHARACTER_TOKENS && in_character(seq)) return NULL;
    seq->think_ends = (struct kern_logit_bias){request->think_end, CERTAIN};
    return &seq->think_ends;
}

/* Before min_tokens an answer ends only where its constraint leaves nothing else. */
static bool holds(const struct sequence *seq) {
    return seq_output_count(seq) < seq->job->request.min_tokens;
}

/* The backend reports up to KERN_TOP_MAX; more are taken from the row of logits. */
static int32_t reported_top(int32_t wanted) {
    return wanted < KERN_TOP_MAX ? wanted : KERN_TOP_MAX;
}

void seq_sample_params(struct sequence *seq, struct kern_sample *params) {
    const struct engine_request *request = &seq->job->request;
    bool masks = constraint_masks(&seq->constraint); /* the mask says whether the answer may end */
    bool hold = !masks && (holds(seq) || seq->constraint.phase == CONSTRAINT_THINKING);
    const struct kern_logit_bias *end = end_of_thought(seq);
    const struct kern_logit_bias *bias = (const struct kern_logit_bias *)request->bias;
    int32_t bias_count = request->bias_count;
    if (seq->dry.request && !end)
        bias = dry_biases(&seq->dry, seq->tokens, seq->token_count, &bias_count);
    if (seq->tally.list) tally_add(&seq->tally, seq->tokens, seq->prompt_count, seq->token_count);
    *params = (struct kern_sample){
        .seen = seq->tally.list,
        .seen_count = seq->tally.count,
        .bias = end ? end : bias,
        .bias_count = end ? 1 : bias_count,
        .banned = hold ? seq->ends : NULL,
        .banned_count = hold ? seq->end_count : 0,
        .allowed = masks ? seq->constraint.mask : NULL,
        .temperature = request->temperature,
        .top_p = request->top_p,
        .min_p = request->min_p,
        .repetition = request->repetition,
        .presence = request->presence,
        .frequency = request->frequency,
        .top_k = request->top_k,
        .xtc_probability = request->xtc_probability,
        .xtc_threshold = request->xtc_threshold,
        .seed = request->seed + (uint64_t)seq->index,
        .position = seq->token_count,
        .top_count = reported_top(request->top_logprobs),
        .forced = -1,
    };
}

void seq_score_params(const struct sequence *seq, int32_t index, struct kern_sample *params) {
    int32_t top = seq->job->request.prompt_top_logprobs;
    *params = (struct kern_sample){.top_count = reported_top(top), .forced = seq->tokens[index]};
}

void seq_judge_params(const struct sequence *seq, int32_t index, struct kern_sample *params) {
    *params = (struct kern_sample){.top_count = 0, .forced = seq->job->request.judged[index]};
}

struct engine_top *seq_wide_top(const struct sequence *seq, int32_t scored, int32_t *count) {
    const struct engine_request *request = &seq->job->request;
    bool prompt = scored >= 0;
    int32_t at = prompt ? scored : seq_output_count(seq);
    *count = prompt ? request->prompt_top_logprobs : request->top_logprobs;
    if (*count <= KERN_TOP_MAX) return NULL;
    return (prompt ? seq->job->prompt_top : seq->choice->top) + (size_t)at * (size_t)*count;
}

_Static_assert(sizeof(struct engine_bias) == sizeof(struct kern_logit_bias) &&
                   offsetof(struct engine_bias, bias) == offsetof(struct kern_logit_bias, bias),
               "the engine's bias list is handed to the backend as it is");

/* ---- Stop conditions ---- */

static bool contains(const int32_t *ids, int count, int32_t id) {
    for (int i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

/* Finds the first stop string that ends in the text, looking back no further than a match could
 * begin. The earliest beginning wins, then the order in the request. */
static bool find_stop(const struct engine_request *request, const char *text, size_t old_size,
                      size_t size, int32_t *index, size_t *begin) {
    bool found = false;
    for (int32_t i = 0; i < request->stop_count; i++) {
        const struct engine_stop *stop = &request->stops[i];
        if (stop->size == 0 || stop->size > size) continue;
        size_t from = old_size + 1 > stop->size ? old_size + 1 - stop->size : 0;
        const char *first = memchr(text + from, stop->text[0], size - from - stop->size + 1);
        if (!first) continue; /* the usual case; memmem takes several times as long to find it */
        const char *hit = memmem(first, (size_t)(text + size - first), stop->text, stop->size);
        if (!hit || (found && (size_t)(hit - text) >= *begin)) continue;
        found = true;
        *begin = (size_t)(hit - text);
        *index = i;
    }
    return found;
}

size_t seq_stop_tail(const struct engine_stop *stops, int32_t count, const char *text,
                     size_t size) {
    size_t tail = 0;
    for (int32_t i = 0; i < count; i++) {
        size_t n = stops[i].size > 0 ? stops[i].size - 1 : 0;
        if (n > size) n = size;
        for (; n > tail; n--)
            if (text[size - n] == stops[i].text[0] &&
                memcmp(text + size - n, stops[i].text, n) == 0)
                tail = n;
    }
    return tail;
}

/* Returns the bytes of text that may be shown. */
static size_t update_finish(struct sequence *seq, const struct seq_text *text, int32_t token,
                            size_t old_size) {
    const struct engine_request *request = &seq->job->request;
    struct engine_choice *choice = seq->choice;
    int32_t outputs = seq_output_count(seq);
    size_t safe = seq->text_size, begin = 0;
    bool may_stop = outputs >= request->min_tokens;
    loops_note(&seq->loops, &request->loops, seq->tokens + seq->prompt_count, outputs);
    bool is_stop_token = (!request->ignore_eos && contains(text->eos, text->eos_count, token)) ||
                         contains(request->stop_ids, request->stop_id_count, token);
    int32_t index = -1;
    if (!is_stop_token)
        constraint_note(&seq->constraint, request, token, choice->text, old_size, seq->text_size);
    if (is_stop_token) {
        seq->finish = ENGINE_FINISH_STOP;
        choice->stop_token = token;
        seq->text_size = (uint32_t)old_size; /* a stop token's own text is not part of the answer */
        safe = old_size;
    } else if (may_stop &&
               find_stop(request, choice->text, old_size, seq->text_size, &index, &begin)) {
        seq->finish = ENGINE_FINISH_STOP;
        choice->stop_index = index;
        safe = begin;
    } else if (outputs >= request->max_tokens && !seq_waits(seq)) {
        seq->finish = ENGINE_FINISH_LENGTH;
    } else if (may_stop && seq->loops.found && !seq_waits(seq)) {
        seq->finish = ENGINE_FINISH_REPETITION;
    } else {
        safe -= seq_stop_tail(request->stops, request->stop_count, choice->text, safe);
        safe = utf8_complete(choice->text, safe);
    }
    return safe;
}

/* ---- Output ---- */

/* Lists of more than KERN_TOP_MAX were filled in already (seq_wide_top). */
static void record_top(struct engine_top *top, int32_t count, const struct kern_sampled *sampled) {
    if (count > KERN_TOP_MAX) return;
    for (int32_t i = 0; i < count; i++)
        top[i] = (struct engine_top){sampled->top_token[i], sampled->top_logprob[i]};
}

void seq_add_token(struct sequence *seq, const struct seq_text *text,
                   const struct kern_sampled *sampled) {
    struct engine_choice *choice = seq->choice;
    const struct engine_request *request = &seq->job->request;
    int32_t at = seq_output_count(seq);
    CHECK(at < request->max_tokens);
    size_t old_size = seq->text_size;
    const char *bytes = NULL;
    size_t size = text->token_bytes(text->arg, sampled->token, &bytes);
    CHECK(size <= text->token_bytes_max);
    if (size > 0) memcpy(choice->text + old_size, bytes, size);
    seq->text_size += (uint32_t)size;
    seq->tokens[seq->token_count++] = sampled->token;
    note_thought(seq, sampled->token);
    size_t safe = update_finish(seq, text, sampled->token, old_size);
    choice->tokens[at] = (struct engine_token){.token = sampled->token,
                                               .logprob = sampled->logprob,
                                               .rank = sampled->rank,
                                               .text_end = seq->text_size};
    if (request->top_logprobs > 0)
        record_top(choice->top + (size_t)at * (size_t)request->top_logprobs, request->top_logprobs,
                   sampled);
    publish_token(choice, (uint32_t)at + 1, safe);
}

int seq_settle(struct sequence *seq, struct constraint_work *work, struct mask_wake wake) {
    const struct engine_request *request = &seq->job->request;
    int32_t outputs = seq_output_count(seq);
    bool full = outputs >= request->max_tokens;
    bool loops = seq->loops.found && outputs >= request->min_tokens;
    const struct constraint_text text = {.text = seq->choice->text,
                                         .size = seq->text_size,
                                         .last = full || loops,
                                         .ends = seq->ends,
                                         .end_count = seq->end_count,
                                         .hold = holds(seq),
                                         .wake = wake};
    bool whole;
    int rc = constraint_fill(&seq->constraint, request, &text, work, &whole);
    if (rc != 0 || (!whole && !text.last)) return rc;
    seq->finish = whole  ? ENGINE_FINISH_STOP
                  : full ? ENGINE_FINISH_LENGTH
                         : ENGINE_FINISH_REPETITION;
    publish_token(seq->choice, (uint32_t)outputs, seq->text_size);
    return 0;
}

void seq_add_prompt_score(struct sequence *seq, int32_t index, const struct kern_sampled *sampled) {
    struct engine_job *job = seq->job;
    int32_t per_token = job->request.prompt_top_logprobs;
    job->prompt_tokens[index] = (struct engine_token){
        .token = sampled->token, .logprob = sampled->logprob, .rank = sampled->rank};
    if (per_token > 0)
        record_top(job->prompt_top + (size_t)index * (size_t)per_token, per_token, sampled);
}
