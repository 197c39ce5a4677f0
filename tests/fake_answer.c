/* Answers of the fake engine: their text, tokens and scores, and where they end. */
#include "tests/fake_answer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "engine/engine_text.h"
#include "engine/steps/publish.h"
#include "tests/fake_engine.h"

enum { TOKEN_BYTES_MAX = 16 };
enum { REPLY_MAX = 4096, REPLY_ROOM = REPLY_MAX + 16 };
enum { SCRIPT_MAX = 1 << 20 };

int fake_choices(const struct engine_request *r) {
    return r->choices > 0 ? r->choices : 1;
}

/* --- text --- */

uint32_t fake_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)(x ^ (x >> 31));
}

/* Tokens of the last user message, or of everything. */
static void find_reply(const struct engine_request *r, int32_t *begin, int32_t *end) {
    *begin = 0;
    *end = r->prompt_count;
    for (int32_t i = 0; i + 6 < r->prompt_count; i++) {
        static const int32_t mark[] = {IM_START, 'u', 's', 'e', 'r', '\n'};
        if (memcmp(r->prompt + i, mark, sizeof mark)) continue;
        *begin = *end = i + 6;
        while (*end < r->prompt_count && r->prompt[*end] != IM_END) (*end)++;
    }
}

/* The answer of the first pair of the script whose text the prompt contains; NULL: no pair. */
static const char *find_line(const cJSON *script, const struct engine_request *r) {
    if (!script) return NULL;
    char *text = mem_must_alloc((size_t)r->prompt_count + 1, 1);
    const cJSON *pair, *found = NULL;
    int32_t size = 0;
    for (int32_t i = 0; i < r->prompt_count; i++)
        if (r->prompt[i] < IM_START && r->prompt[i]) text[size++] = (char)r->prompt[i];
    cJSON_ArrayForEach(pair, script) {
        if (!found && strstr(text, cJSON_GetArrayItem(pair, 0)->valuestring)) found = pair;
    }
    mem_free(text);
    return found ? cJSON_GetArrayItem(found, 1)->valuestring : NULL;
}

cJSON *fake_script_open(void) {
    const char *path = getenv("KEEPD_FAKE_SCRIPT");
    struct json_limits limits = {.bytes = SCRIPT_MAX, .depth = 4};
    struct fault fault;
    cJSON *script = NULL;
    char *data = NULL;
    size_t size;
    if (!path) return NULL;
    CHECK(file_read(path, SCRIPT_MAX, &data, &size, &fault) == 0);
    CHECK(json_parse(data, size, &limits, &script, &fault) == 0);
    mem_free(data);
    return script;
}

static void add_seeds(struct fake_answer *a, const struct engine_request *r) {
    size_t size = a->reply_size;
    for (int i = fake_choices(r) - 1; i >= 0; i--) {
        char *reply = a->reply + (size_t)i * REPLY_ROOM;
        memcpy(reply, a->reply, size);
        if (r->temperature > 0 && !a->scripted)
            a->reply_size = size + (size_t)snprintf(reply + size, REPLY_ROOM - size, " #%08" PRIx32,
                                                    fake_mix(r->seed + (uint64_t)i));
    }
}

bool fake_answer_open(struct fake_answer *a, const struct engine_request *r) {
    int32_t begin, end;
    a->reply_size = 0;
    a->reply = mem_try_alloc((size_t)fake_choices(r), REPLY_ROOM);
    if (!a->reply) return false;
    find_reply(r, &begin, &end);
    const char *line = find_line(a->script, r);
    if (line) a->reply_size = strnlen(line, REPLY_MAX);
    if (line) memcpy(a->reply, line, a->reply_size);
    a->scripted = line != NULL;
    for (int32_t i = begin; !line && i < end && a->reply_size < REPLY_MAX; i++)
        if (r->prompt[i] < IM_START) a->reply[a->reply_size++] = (char)r->prompt[i];
    a->stamps = strstr(a->reply, "stamp") != NULL;
    a->fail_at = strstr(a->reply, "fail now") ? 0 : strstr(a->reply, "fail later") ? 3 : -1;
    a->kill = strstr(a->reply, "engine dies") != NULL;
    add_seeds(a, r);
    return true;
}

void fake_answer_close(struct fake_answer *a) {
    mem_free(a->reply);
}

/* --- outputs of a job --- */

static float score(int32_t token, int rank) {
    return -0.125f * (float)(1 + token % 8) - 0.5f * (float)rank;
}

static void score_token(struct engine_token *out, struct engine_top *top, int top_count,
                        int32_t token) {
    *out = (struct engine_token){.token = token, .logprob = score(token, 0), .rank = 1};
    for (int k = 0; k < top_count; k++)
        top[k] = (struct engine_top){(token + k) % VOCAB, score(token, k)};
}

static bool open_choice(struct engine_choice *choice, const struct engine_request *r) {
    size_t tokens = (size_t)r->max_tokens, top = r->top_logprobs > 0 ? (size_t)r->top_logprobs : 0;
    choice->stop_index = choice->stop_token = -1;
    choice->tokens = mem_try_alloc(tokens + 1, sizeof *choice->tokens);
    choice->top = mem_try_alloc(tokens * top + 1, sizeof *choice->top);
    choice->text = mem_try_alloc(tokens + 1, TOKEN_BYTES_MAX);
    return choice->tokens && choice->top && choice->text;
}

/* The hidden state of a token is made of its id; a vector of those, as the request pools them. */
static float hidden_of(int32_t token, int i) {
    return (float)(fake_mix((uint64_t)token * FAKE_WIDTH + (uint64_t)i) & 0xffff) / 65536.0f - 0.5f;
}

/* A text is liked as the number of its bytes after "<Document>: " says: the longer the more. */
static bool judge_prompt(struct engine_job *job) {
    const struct engine_request *r = &job->request;
    int32_t colon = 0;
    for (int32_t i = 1; i < r->prompt_count; i++)
        if (r->prompt[i - 1] == '>' && r->prompt[i] == ':') colon = i;
    job->pooled = mem_try_alloc((size_t)r->judged_count, sizeof *job->pooled);
    for (int32_t i = 0; job->pooled && i < r->judged_count; i++)
        job->pooled[i] = (float)(i == 0 ? r->prompt_count - colon : 20) / 8.0f - 8.0f;
    return job->pooled != NULL;
}

static bool pool_prompt(struct engine_job *job) {
    const struct engine_request *r = &job->request;
    if (r->pooling == ENGINE_POOL_NEXT) return judge_prompt(job);
    const int32_t first = r->pooling == ENGINE_POOL_LAST ? r->prompt_count - 1 : 0;
    const int32_t count = r->pooling == ENGINE_POOL_MEAN ? r->prompt_count : 1;
    job->pooled = mem_try_alloc(FAKE_WIDTH, sizeof *job->pooled);
    for (int i = 0; job->pooled && i < FAKE_WIDTH; i++) {
        double sum = 0;
        for (int32_t k = 0; k < count; k++) sum += (double)hidden_of(r->prompt[first + k], i);
        job->pooled[i] = (float)(sum / count);
    }
    return job->pooled != NULL;
}

bool fake_outputs_open(struct engine_job *job) {
    const struct engine_request *r = &job->request;
    size_t top = (size_t)r->prompt_top_logprobs;
    size_t prompt = r->prompt_logprobs ? (size_t)r->prompt_count : 0;
    job->choice = mem_try_alloc((size_t)fake_choices(r), sizeof *job->choice);
    if (!job->choice) return false;
    job->choice_count = fake_choices(r);
    for (int i = 0; i < job->choice_count; i++)
        if (!open_choice(&job->choice[i], r)) return false;
    job->prompt_tokens = prompt ? mem_try_alloc(prompt, sizeof *job->prompt_tokens) : NULL;
    job->prompt_top = prompt && top ? mem_try_alloc(prompt * top, sizeof *job->prompt_top) : NULL;
    if (prompt && (!job->prompt_tokens || (top && !job->prompt_top))) return false;
    for (size_t i = 0; i < prompt; i++)
        score_token(&job->prompt_tokens[i], top ? &job->prompt_top[i * top] : NULL, (int)top,
                    r->prompt[i]);
    if (r->pooling && !pool_prompt(job)) return false;
    return !r->kv.live || publish_live_open(job, FAKE_LAYERS * FAKE_HEADS) == 0;
}

void engine_job_close(struct engine_job *job) {
    for (int i = 0; i < job->choice_count; i++) {
        mem_free(job->choice[i].tokens);
        mem_free(job->choice[i].top);
        mem_free(job->choice[i].text);
    }
    mem_free(job->choice);
    mem_free(job->pooled);
    job->pooled = NULL;
    mem_free(job->prompt_tokens);
    mem_free(job->prompt_top);
    mem_free(job->live);
    mem_free(job->kv.lengths);
    mem_free(job->kv.positions);
    for (struct engine_eviction *next; job->kv.evictions; job->kv.evictions = next) {
        next = job->kv.evictions->next;
        mem_free(job->kv.evictions->positions);
        mem_free(job->kv.evictions);
    }
    job->choice = NULL;
    job->choice_count = 0;
    job->prompt_tokens = NULL;
    job->prompt_top = NULL;
    job->kv.lengths = job->kv.positions = NULL;
}

/* --- tokens --- */

/* Bytes that no stop string in the making and no half character can take back. */
static size_t safe_size(const struct engine_request *r, const char *text, size_t size) {
    size_t held = 0;
    for (int32_t i = 0; i < r->stop_count; i++) {
        size_t n = r->stops[i].size - 1 < size ? r->stops[i].size - 1 : size;
        while (n > held && memcmp(text + size - n, r->stops[i].text, n)) n--;
        if (n > held) held = n;
    }
    return utf8_complete(text, size - held);
}

/* The length of the text before a stop string that has just become complete, or -1. */
static ssize_t cut_at_stop(const struct engine_request *r, const char *text, size_t size,
                           int32_t *index) {
    for (int32_t i = 0; i < r->stop_count; i++) {
        size_t n = r->stops[i].size;
        if (n > size || memcmp(text + size - n, r->stops[i].text, n)) continue;
        *index = i;
        return (ssize_t)(size - n);
    }
    return -1;
}

static int32_t next_token(const struct fake_answer *a, const struct engine_request *r, int index,
                          uint32_t at) {
    const char *reply = a->reply + (size_t)index * REPLY_ROOM;
    bool may_end = !r->ignore_eos && at >= (uint32_t)r->min_tokens;
    if (at < a->reply_size && a->channels && reply[at] >= 1 && reply[at] <= 7)
        return START + reply[at] - 1;
    if (at < a->reply_size && a->thinks && (reply[at] == 1 || reply[at] == 2))
        return THINK + reply[at] - 1;
    if (at < a->reply_size) return (unsigned char)reply[at];
    if (may_end) return IM_END;
    return a->reply_size && at % (a->reply_size + 1) < a->reply_size
               ? (unsigned char)reply[at % (a->reply_size + 1)]
               : ' ';
}

/* Is the answer to end its reasoning with token `at`, by the request's budget? */
static bool has_thought_enough(const struct engine_request *r, const struct engine_choice *choice,
                               uint32_t at) {
    int32_t last = r->prompt[r->prompt_count - 1], thought = 0;
    bool thinks = last == r->think_begin;
    if (!r->think_bounded || r->think_begin < 0) return false;
    if (last == '\n' && r->prompt_count > 1)
        thinks = r->prompt[r->prompt_count - 2] == r->think_begin;
    for (uint32_t i = 0; i < at; i++) {
        thought = thinks ? thought + 1 : 0;
        thinks = choice->tokens[i].token != r->think_end &&
                 (thinks || choice->tokens[i].token == r->think_begin);
    }
    return thinks && thought >= r->think_budget;
}

static bool is_stop_token(const struct engine_request *r, int32_t token) {
    for (int32_t i = 0; i < r->stop_id_count; i++)
        if (r->stop_ids[i] == token) return true;
    return (token == IM_END || token == CALL || token == RETURN) && !r->ignore_eos;
}

enum engine_finish fake_answer_append(const struct fake_answer *a, struct engine *e,
                                      struct engine_job *job, int index) {
    const struct engine_request *r = &job->request;
    struct engine_choice *choice = &job->choice[index];
    uint32_t at = (uint32_t)atomic_load(&choice->token_count);
    size_t size = at ? choice->tokens[at - 1].text_end : 0;
    int32_t token = has_thought_enough(r, choice, at) ? r->think_end : next_token(a, r, index, at);
    int top = r->top_logprobs > 0 ? r->top_logprobs : 0;
    bool stop = is_stop_token(r, token);
    score_token(&choice->tokens[at], &choice->top[(size_t)at * (size_t)top], top, token);
    const char *bytes = NULL;
    size_t more =
        stop || engine_token_is_special(e, token) ? 0 : engine_token_bytes(e, token, &bytes);
    char stamp[TOKEN_BYTES_MAX + 1];
    if (more && a->stamps) {
        more = (size_t)snprintf(stamp, sizeof stamp, "%016" PRIx64, (uint64_t)clock_ns());
        bytes = stamp;
    }
    if (more) memcpy(choice->text + size, bytes, more);
    size += more;
    choice->tokens[at].text_end = (uint32_t)size;
    ssize_t cut = cut_at_stop(r, choice->text, size, &choice->stop_index);
    bool last = stop || cut >= 0 || at + 1 == (uint32_t)r->max_tokens;
    if (stop) choice->stop_token = token;
    if (cut >= 0) size = (size_t)cut;
    atomic_store_explicit(&choice->text_safe, last ? size : safe_size(r, choice->text, size),
                          memory_order_release);
    if (!job->first_token_ns) job->first_token_ns = clock_ns(); /* announced by the count */
    atomic_store_explicit(&choice->token_count, at + 1, memory_order_release);
    if (stop || cut >= 0) return ENGINE_FINISH_STOP;
    return last ? ENGINE_FINISH_LENGTH : ENGINE_RUNNING;
}
