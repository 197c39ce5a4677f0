/* The parts of answers that several kinds share: choices and their ends, usage, ids. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/oai.h"

static void render_write_str(struct buf *out, const char *s) {
    json_write_str(out, s, strlen(s));
}

/* --- choices --- */

const struct engine_job *oai_job_of(const struct oai_answer *answer, int index) {
    return &answer->jobs[index / answer->request->n];
}

const struct engine_choice *oai_choice_of(const struct oai_answer *answer, int index) {
    return &oai_job_of(answer, index)->choice[index % answer->request->n];
}

int oai_choice_count(const struct oai_answer *answer) {
    return answer->job_count * answer->request->n;
}

uint32_t oai_token_count(const struct engine_choice *choice) {
    return (uint32_t)atomic_load_explicit(&choice->token_count, memory_order_acquire);
}

/* Returns how many tokens are shown: those that begin before the stop string. A stop token keeps
 * its score. */
uint32_t oai_shown_count(const struct oai_answer *answer, int index) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    uint32_t count = oai_token_count(choice);
    size_t shown = oai_shown_size(answer, index);
    if (choice->stop_index < 0) return count;
    while (count && (count > 1 ? choice->tokens[count - 2].text_end : 0) >= shown) count--;
    return count;
}

size_t oai_shown_size(const struct oai_answer *answer, int index) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    const struct engine_request *request = &oai_job_of(answer, index)->request;
    size_t safe = atomic_load_explicit(&choice->text_safe, memory_order_acquire);
    if (!answer->request->include_stop || choice->stop_index < 0) return safe;
    return safe + request->stops[choice->stop_index].size;
}

/* --- usage --- */

/* Writes values[] as nested arrays; the innermost are `lengths[stream]` long, or one number each.
 */
static void write_nested(struct buf *out, const struct engine_info *info, const int32_t *lengths,
                         const int32_t *positions) {
    size_t at = 0;
    buf_char(out, '[');
    for (int layer = 0; layer < info->layers; layer++) {
        const int heads = info->layer_heads ? info->layer_heads[layer] : info->heads_kv;
        buf_str(out, layer ? ",[" : "[");
        for (int head = 0; head < heads; head++) {
            int32_t length = *lengths++;
            if (head) buf_char(out, ',');
            if (!positions) {
                buf_int(out, length);
                continue;
            }
            buf_char(out, '[');
            for (int32_t i = 0; i < length; i++) {
                if (i) buf_char(out, ',');
                buf_int(out, positions[at++]);
            }
            buf_char(out, ']');
        }
        buf_char(out, ']');
    }
    buf_char(out, ']');
}

/* Sums the details of all prompts of a request; policy and budget are the same for all. */
static struct engine_kv_details sum_details(const struct oai_answer *answer) {
    struct engine_kv_details sum = answer->jobs[0].kv;
    for (int i = 1; i < answer->job_count; i++) {
        const struct engine_kv_details *kv = &answer->jobs[i].kv;
        sum.seen_tokens += kv->seen_tokens;
        sum.kept_entries += kv->kept_entries;
        sum.evicted_entries += kv->evicted_entries;
        sum.dropped_tokens += kv->dropped_tokens;
        sum.shifts += kv->shifts;
        sum.pinned = sum.pinned && kv->pinned;
        sum.bytes += kv->bytes;
        sum.state_bytes += kv->state_bytes;
    }
    return sum;
}

/* Writes [{"tokens": T, "evicted": [layer][head][positions]}, ...] in the order of time. */
static void write_trace(struct buf *out, const struct engine_info *info,
                        const struct engine_kv_details *kv) {
    buf_str(out, ",\"trace\":[");
    for (const struct engine_eviction *e = kv->evictions; e; e = e->next) {
        buf_fmt(out, "%s{\"tokens\":%" PRId32 ",\"evicted\":", e == kv->evictions ? "" : ",",
                e->tokens);
        write_nested(out, info, e->lengths, e->positions);
        buf_char(out, '}');
    }
    buf_char(out, ']');
    if (kv->evictions_lost) buf_fmt(out, ",\"trace_lost\":%" PRId32, kv->evictions_lost);
}

/* Warns if the request has a budget and its policy has none. */
static void write_budget_warning(struct buf *out, const struct oai_answer *answer) {
    bool gates = answer->rules->info->has_gates;
    buf_str(out, ",\"warning\":");
    render_write_str(
        out, gates ? "kv.budget changes nothing: policy 'full' keeps everything. Choose "
                     "another kv.policy, such as 'global'."
                   : "kv.budget changes nothing: this model has no retention gates, so its "
                     "policy is 'full', which keeps everything. Choose a kv.policy without "
                     "gates, such as 'snapkv' or 'streaming' (docs/CHOOSING.md), or let keepd "
                     "fit gates to the model: start it with --kv-budget.");
}

void oai_render_kv_details(struct buf *out, const struct oai_answer *answer) {
    struct engine_kv_details kv = sum_details(answer);
    buf_str(out, ",\"kv_details\":{\"policy\":");
    render_write_str(out, kv.policy);
    if (kv.budget >= 0)
        buf_fmt(out, ",\"budget\":%" PRId32, kv.budget);
    else
        buf_str(out, ",\"budget\":null");
    buf_fmt(out,
            ",\"seen_tokens\":%" PRId32 ",\"kept_entries\":%" PRId64 ",\"evicted_entries\":%" PRId64
            ",\"dropped_tokens\":%" PRId32 ",\"shifts\":%" PRId32 ",\"bytes\":%" PRId64,
            kv.seen_tokens, kv.kept_entries, kv.evicted_entries, kv.dropped_tokens, kv.shifts,
            kv.bytes);
    if (kv.state_bytes > 0) buf_fmt(out, ",\"state_bytes\":%" PRId64, kv.state_bytes);
    if (answer->jobs[0].request.kv.budget >= 0 && kv.budget < 0) write_budget_warning(out, answer);
    if (answer->jobs[0].request.kv.pin)
        buf_fmt(out, ",\"pinned\":%s", kv.pinned ? "true" : "false");
    if (kv.lengths) {
        buf_str(out, ",\"lengths\":");
        write_nested(out, answer->rules->info, kv.lengths, NULL);
    }
    if (kv.lengths && kv.positions) {
        buf_str(out, ",\"positions\":");
        write_nested(out, answer->rules->info, kv.lengths, kv.positions);
    }
    if (answer->jobs[0].request.kv.report == ENGINE_REPORT_TRACE)
        write_trace(out, answer->rules->info, &kv);
    buf_char(out, '}');
}

uint64_t oai_reasoning_total(const struct oai_answer *answer) {
    uint64_t sum = 0;
    for (int i = 0; oai_splits_reasoning(answer) && i < oai_choice_count(answer); i++) {
        const struct engine_choice *choice = oai_choice_of(answer, i);
        struct oai_voice voice = oai_voice_open(answer, i);
        uint32_t count = oai_token_count(choice);
        for (uint32_t k = 0; k < count && oai_voice_may_think(&voice); k++)
            oai_voice_step(&voice, answer, choice->tokens[k].token);
        sum += voice.reasoning_tokens;
    }
    return sum;
}

/* Writes the object with the parts of an answer's tokens, in OpenAI's form for chats and
 * completions. */
static void write_token_details(struct buf *out, const struct oai_answer *answer) {
    int64_t accepted = 0, rejected = 0;
    const char *refused = NULL;
    for (int i = 0; i < oai_choice_count(answer); i++) {
        const struct engine_choice *choice = oai_choice_of(answer, i);
        if (engine_see_choice(choice).finish == ENGINE_RUNNING) continue;
        accepted += choice->drafts_confirmed;
        rejected += choice->drafts_rejected;
        if (!refused) refused = engine_undrafted_name(choice->undrafted);
    }
    buf_fmt(out,
            "{\"reasoning_tokens\":%" PRIu64 ",\"accepted_prediction_tokens\":%" PRId64
            ",\"rejected_prediction_tokens\":%" PRId64,
            oai_reasoning_total(answer), accepted, rejected);
    if (refused) buf_fmt(out, ",\"prediction_refused\":\"%s\"", refused);
    buf_str(out, "}");
}

uint64_t oai_prompt_read(const struct oai_answer *answer) {
    uint64_t sum = 0;
    for (int i = 0; i < answer->job_count; i++)
        sum += atomic_load_explicit(&answer->jobs[i].prompt_read, memory_order_relaxed);
    return sum;
}

uint64_t oai_prompt_cached(const struct oai_answer *answer) {
    uint64_t sum = 0;
    for (int i = 0; i < answer->job_count; i++)
        if (atomic_load_explicit(&answer->jobs[i].admitted, memory_order_acquire))
            sum += (uint64_t)answer->jobs[i].cached_tokens;
    return sum;
}

uint64_t oai_prompt_total(const struct oai_answer *answer) {
    uint64_t sum = 0;
    for (int i = 0; i < answer->job_count; i++)
        sum += (uint64_t)answer->jobs[i].request.prompt_count;
    return sum;
}

void oai_render_progress(struct buf *out, const struct oai_answer *answer, uint64_t read) {
    buf_fmt(out,
            "\"prompt_progress\":{\"total\":%" PRIu64 ",\"cache\":%" PRIu64
            ",\"processed\":%" PRIu64 "}",
            oai_prompt_total(answer), oai_prompt_cached(answer), read);
}

void oai_render_held(struct buf *out, const struct oai_answer *answer,
                     const struct engine_held *held) {
    buf_fmt(out, "\"kv_progress\":{\"seen_tokens\":%" PRId32 ",\"lengths\":", held->tokens);
    write_nested(out, answer->rules->info, held->lengths, NULL);
    buf_char(out, '}');
}

void oai_render_usage(struct buf *out, const struct oai_answer *answer, uint64_t completion,
                      bool finished) {
    uint64_t prompt = oai_prompt_total(answer);
    buf_fmt(out,
            "{\"prompt_tokens\":%" PRIu64 ",\"completion_tokens\":%" PRIu64
            ",\"total_tokens\":%" PRIu64,
            prompt, completion, prompt + completion);
    if (finished) {
        buf_fmt(out,
                ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRIu64
                "},\"completion_tokens_details\":",
                oai_prompt_cached(answer));
        write_token_details(out, answer);
        oai_render_kv_details(out, answer);
    }
    buf_char(out, '}');
}

/* --- prompts, ends, ids --- */

size_t oai_echo_bytes(const struct oai_answer *answer, int index, uint32_t i, const char **bytes) {
    const int32_t *added = answer->request->added;
    int32_t token = oai_job_of(answer, index)->request.prompt[i];
    uint32_t first = added ? (uint32_t)added[index / answer->request->n] : 0;
    if (i < first) return 0;
    return i == first ? engine_first_bytes(answer->engine, token, bytes)
                      : engine_token_bytes(answer->engine, token, bytes);
}

void oai_render_prompt_text(struct buf *out, const struct oai_answer *answer, int index) {
    const struct engine_request *request = &oai_job_of(answer, index)->request;
    for (uint32_t i = 0; i < (uint32_t)request->prompt_count; i++) {
        const char *bytes = "";
        size_t size = oai_echo_bytes(answer, index, i, &bytes);
        buf_add(out, bytes, size);
    }
}

const char *oai_finish_name(int finish, bool called) {
    if (finish == ENGINE_FINISH_LENGTH) return "length";
    if (finish == ENGINE_FINISH_REPETITION) return "repetition"; /* vLLM's name */
    return called ? "tool_calls" : "stop";
}

/* Writes the stop string, the id of a stop token that the client named, or null for the model's own
 * end. */
static void write_stop_reason(struct buf *out, const struct engine_request *request,
                              const struct engine_choice *choice) {
    if (choice->stop_index >= 0 && choice->stop_index < request->stop_count) {
        const struct engine_stop *stop = &request->stops[choice->stop_index];
        json_write_str(out, stop->text, stop->size);
        return;
    }
    for (int32_t i = 0; i < request->stop_id_count; i++) {
        if (request->stop_ids[i] != choice->stop_token) continue;
        buf_int(out, choice->stop_token);
        return;
    }
    buf_str(out, "null");
}

void oai_render_finish(struct buf *out, const struct oai_answer *answer, int index, bool called) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    buf_fmt(out, ",\"finish_reason\":\"%s\",\"stop_reason\":", oai_finish_name(finish, called));
    write_stop_reason(out, &oai_job_of(answer, index)->request, choice);
}

void oai_render_prompt_ids(struct buf *out, const struct oai_answer *answer, int index) {
    const struct engine_request *request = &oai_job_of(answer, index)->request;
    buf_str(out, ",\"prompt_token_ids\":[");
    for (int32_t i = 0; i < request->prompt_count; i++) {
        if (i) buf_char(out, ',');
        buf_int(out, request->prompt[i]);
    }
    buf_char(out, ']');
}

void oai_render_ids(struct buf *out, const struct engine_choice *choice, uint32_t begin,
                    uint32_t end) {
    buf_char(out, '[');
    for (uint32_t i = begin; i < end; i++) {
        if (i > begin) buf_char(out, ',');
        buf_int(out, choice->tokens[i].token);
    }
    buf_char(out, ']');
}

void oai_render_answer_ids(struct buf *out, const struct engine_choice *choice, uint32_t begin,
                           uint32_t end) {
    buf_str(out, ",\"token_ids\":");
    oai_render_ids(out, choice, begin, end);
}

void oai_render_token_texts(struct buf *out, const struct engine *engine, const int32_t *ids,
                            size_t count) {
    for (size_t i = 0; i < count; i++) {
        const char *bytes = "";
        size_t size = i ? engine_token_bytes(engine, ids[i], &bytes)
                        : engine_first_bytes(engine, ids[i], &bytes);
        buf_add(out, bytes, size);
    }
}

uint64_t oai_tokens_total(const struct oai_answer *answer) {
    uint64_t sum = 0;
    for (int i = 0; i < oai_choice_count(answer); i++)
        sum += oai_token_count(oai_choice_of(answer, i));
    return sum;
}

void oai_render_answer_head(struct buf *out, const struct oai_answer *answer, const char *object) {
    buf_str(out, "{\"id\":");
    render_write_str(out, answer->id);
    buf_fmt(out, ",\"object\":\"%s\",\"created\":%" PRId64 ",\"model\":", object, answer->created);
    render_write_str(out, answer->model);
}

static double milliseconds(int64_t begin_ns, int64_t end_ns) {
    return begin_ns && end_ns > begin_ns ? (double)(end_ns - begin_ns) / 1e6 : 0;
}

/* Writes a rate in the form of llama.cpp's server. */
static void write_rate(struct buf *out, const char *name, uint64_t tokens, double ms) {
    buf_fmt(out, "\"%s_n\":%" PRIu64 ",\"%s_ms\":%.3f,\"%s_per_second\":%.3f", name, tokens, name,
            ms, name, ms > 0 ? (double)tokens * 1000 / ms : 0);
}

/* Writes the times. Several prompts run side by side, so their times are added up as their tokens
 * are. */
void oai_render_timings(struct buf *out, const struct oai_answer *answer) {
    uint64_t cached = 0, prompt = 0;
    double queued = 0, reading = 0, writing = 0;
    if (!answer->request->timings) return;
    for (int i = 0; i < answer->job_count; i++) {
        const struct engine_job *job = &answer->jobs[i];
        int64_t read_ns = job->first_token_ns ? job->first_token_ns : job->finished_ns;
        cached += (uint64_t)job->cached_tokens;
        prompt += (uint64_t)(job->request.prompt_count - job->cached_tokens);
        queued += milliseconds(job->queued_ns, job->admitted_ns);
        reading += milliseconds(job->admitted_ns, read_ns);
        writing += milliseconds(read_ns, job->finished_ns);
    }
    buf_fmt(out, ",\"timings\":{\"cache_n\":%" PRIu64 ",\"queued_ms\":%.3f,", cached, queued);
    write_rate(out, "prompt", prompt, reading);
    buf_char(out, ',');
    write_rate(out, "predicted", oai_tokens_total(answer), writing);
    buf_char(out, '}');
}
