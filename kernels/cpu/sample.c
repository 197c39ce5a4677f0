/* Sampling, CPU. Exact and deterministic: ordering is by (logit, lower id first), noise is counter
 * based, so a token depends on its own logits, seed and position and on nothing else.
 *
 * Work is avoided rather than approximated: Gumbel noise from 32-bit uniforms lies in
 * (-3.14, 22.88), so a token that trails the best noisy value by more than that cannot win and
 * its noise is never computed; top-k and top-p pop a heap only as deep as they need. */
#include "kernels/cpu/sample.h"

#include <math.h>
#include <string.h>

#include "base/check.h"

#define GUMBEL_MAX 22.9 /* -log(-log(1 - 2^-33)), rounded up */

struct scratch {
    float *logit;   /* [vocab] adjusted */
    int32_t *order; /* [vocab] heap, then candidates */
};

size_t cpu_sample_scratch_bytes(int vocab) {
    return (size_t)vocab * (sizeof(float) + sizeof(int32_t)) + 32;
}

/* ---- Noise ---------------------------------------------------------------------------------- */

uint32_t cpu_philox(uint64_t seed, uint32_t position, uint32_t token) {
    uint32_t c0 = token, c1 = position, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0;
        uint64_t b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = (uint32_t)b;
        c2 = n2;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

static double gumbel(uint64_t seed, int32_t position, int32_t token) {
    double u = ((double)cpu_philox(seed, (uint32_t)position, (uint32_t)token) + 0.5) * 0x1p-32;
    return -log(-log(u));
}

/* ---- Order and heap -------------------------------------------------------------------------- */

/* a comes before b: higher logit, then lower id. NaN sorts last. */
static bool before(const float *logit, int32_t a, int32_t b) {
    float x = logit[a], y = logit[b];
    if (x > y) return true;
    if (x < y) return false;
    if (isnan(x) != isnan(y)) return isnan(y);
    return a < b;
}

static void sift_down(int32_t *heap, int count, int at, const float *logit) {
    for (;;) {
        int best = at, left = 2 * at + 1;
        if (left < count && before(logit, heap[left], heap[best])) best = left;
        if (left + 1 < count && before(logit, heap[left + 1], heap[best])) best = left + 1;
        if (best == at) return;
        int32_t swap = heap[at];
        heap[at] = heap[best];
        heap[best] = swap;
        at = best;
    }
}

static void heap_build(int32_t *heap, int count, const float *logit) {
    for (int i = 0; i < count; i++) heap[i] = i;
    for (int i = count / 2 - 1; i >= 0; i--) sift_down(heap, count, i, logit);
}

/* Moves the best remaining element behind the heap: after n pops they lie, best first, at
 * heap[vocab - 1], heap[vocab - 2], ... */
static int32_t heap_pop(int32_t *heap, int *count, const float *logit) {
    int32_t best = heap[0];
    (*count)--;
    heap[0] = heap[*count];
    heap[*count] = best;
    sift_down(heap, *count, 0, logit);
    return best;
}

static int32_t argmax(const float *logit, int vocab) {
    int32_t best = 0;
    for (int32_t i = 1; i < vocab; i++)
        if (before(logit, i, best)) best = i;
    return best;
}

/* ---- Adjustments ----------------------------------------------------------------------------- */

static bool in_range(int32_t token, int vocab) { return token >= 0 && token < vocab; }

/* Repetition once per distinct token of prompt and output; presence once and frequency per
 * occurrence, over the output. `count` is scratch of vocab int32. */
static void apply_penalties(float *logit, int vocab, const struct kern_sample *p, int32_t *count) {
    if (p->repetition == 1.0f && p->presence == 0.0f && p->frequency == 0.0f) return;
    if (p->history == NULL) return;
    int total = p->prompt_count + p->output_count;
    /* count = occurrences in the output; the sign bit marks "seen anywhere and not yet handled" */
    for (int i = 0; i < total; i++)
        if (in_range(p->history[i], vocab)) count[p->history[i]] = 0;
    for (int i = p->prompt_count; i < total; i++)
        if (in_range(p->history[i], vocab)) count[p->history[i]]++;
    for (int i = 0; i < total; i++) {
        int32_t token = p->history[i];
        if (!in_range(token, vocab) || count[token] < 0) continue;
        float *x = &logit[token];
        *x = *x > 0 ? *x / p->repetition : *x * p->repetition;
        if (count[token] > 0) *x -= p->presence + p->frequency * (float)count[token];
        count[token] = -1;
    }
}

static void adjust(const float *logits, int vocab, const struct kern_sample *p, struct scratch *s) {
    memcpy(s->logit, logits, (size_t)vocab * sizeof(float));
    apply_penalties(s->logit, vocab, p, s->order);
    for (int i = 0; i < p->bias_count; i++)
        if (in_range(p->bias[i].token, vocab)) s->logit[p->bias[i].token] += p->bias[i].bias;
    for (int i = 0; i < p->banned_count; i++)
        if (in_range(p->banned[i], vocab)) s->logit[p->banned[i]] = -INFINITY;
}

/* ---- Choice ---------------------------------------------------------------------------------- */

/* The best of `count` candidates (ids in `ids`, or 0..count-1 when NULL) after noise. */
static int32_t choose_noisy(const float *logit, const int32_t *ids, int count, float floor_logit,
                            const struct kern_sample *p) {
    int32_t best = -1;
    double best_value = -INFINITY;
    for (int i = 0; i < count; i++) {
        int32_t token = ids != NULL ? ids[i] : i;
        if (!(logit[token] >= floor_logit) || logit[token] + GUMBEL_MAX < best_value) continue;
        double value = (double)logit[token] + gumbel(p->seed, p->position, token);
        if (value > best_value || (value == best_value && token < best)) {
            best = token;
            best_value = value;
        }
    }
    return best;
}

/* top_k then top_p over the sorted candidates; returns how many remain, best first in *out. */
static int truncate_candidates(struct scratch *s, int vocab, const struct kern_sample *p,
                               const int32_t **out) {
    int left = vocab;
    int limit = p->top_k > 0 && p->top_k < vocab ? p->top_k : vocab;
    heap_build(s->order, vocab, s->logit);
    double top = s->logit[s->order[0]], total = 0, running = 0;
    if (p->top_p < 1.0f && limit == vocab)
        for (int i = 0; i < vocab; i++) total += exp((double)s->logit[i] - top);
    int taken = 0;
    if (p->top_p < 1.0f && limit < vocab) { /* the k best must be known before their mass is */
        for (; taken < limit; taken++)
            total += exp((double)s->logit[heap_pop(s->order, &left, s->logit)] - top);
        for (int i = 0; i < taken; i++) {
            running += exp((double)s->logit[s->order[vocab - 1 - i]] - top);
            if (running >= (double)p->top_p * total) taken = i + 1;
        }
    } else {
        while (taken < limit) {
            int32_t token = heap_pop(s->order, &left, s->logit);
            taken++;
            if (p->top_p >= 1.0f) continue;
            running += exp((double)s->logit[token] - top);
            if (running >= (double)p->top_p * total) break;
        }
    }
    *out = s->order + vocab - taken; /* worst first; order does not matter to the choice */
    return taken;
}

static int32_t choose(struct scratch *s, int vocab, const struct kern_sample *p) {
    int32_t top = argmax(s->logit, vocab);
    if (p->temperature <= 0.0f || isnan(s->logit[top])) return top;
    for (int i = 0; i < vocab; i++) s->logit[i] /= p->temperature;
    /* min_p compares probabilities with the largest one: a bound on the logit. */
    float floor_logit = p->min_p > 0 ? s->logit[top] + logf(p->min_p) : -INFINITY;
    bool truncated = (p->top_k > 0 && p->top_k < vocab) || p->top_p < 1.0f;
    int32_t token;
    if (truncated) {
        const int32_t *ids;
        int count = truncate_candidates(s, vocab, p, &ids);
        token = choose_noisy(s->logit, ids, count, floor_logit, p);
    } else {
        token = choose_noisy(s->logit, NULL, vocab, floor_logit, p);
    }
    return token >= 0 ? token : top;
}

/* ---- Log-probabilities ----------------------------------------------------------------------- */

static double log_sum_exp(const float *logits, int vocab, float top) {
    double sum = 0;
    for (int i = 0; i < vocab; i++) sum += exp((double)logits[i] - (double)top);
    return (double)top + log(sum);
}

/* Raw model: before any penalty, bias or temperature. */
static void raw_logprobs(const float *logits, int vocab, const struct kern_sample *p,
                         struct kern_sampled *out) {
    float top = logits[argmax(logits, vocab)];
    double norm = log_sum_exp(logits, vocab, top);
    out->logprob = (float)((double)logits[out->token] - norm);
    out->rank = 1;
    for (int32_t i = 0; i < vocab; i++)
        if (i != out->token && before(logits, i, out->token)) out->rank++;
    int count = 0;
    for (int32_t i = 0; i < vocab && p->top_count > 0; i++) {
        if (count == p->top_count && !before(logits, i, out->top_token[count - 1])) continue;
        int at = count < p->top_count ? count++ : count - 1;
        while (at > 0 && before(logits, i, out->top_token[at - 1])) {
            out->top_token[at] = out->top_token[at - 1];
            at--;
        }
        out->top_token[at] = i;
    }
    for (int i = 0; i < count; i++)
        out->top_logprob[i] = (float)((double)logits[out->top_token[i]] - norm);
    for (int i = count; i < p->top_count; i++) {
        out->top_token[i] = -1;
        out->top_logprob[i] = -INFINITY;
    }
}

void cpu_sample_row(const float *logits, int vocab, const struct kern_sample *params, void *scratch,
                    struct kern_sampled *out) {
    CHECK(vocab > 0 && params->top_count <= KERN_TOP_MAX);
    struct scratch s = {.logit = scratch};
    s.order = (int32_t *)(s.logit + vocab);
    if (params->forced >= 0) {
        CHECK(params->forced < vocab);
        out->token = params->forced;
    } else {
        adjust(logits, vocab, params, &s);
        out->token = choose(&s, vocab, params);
    }
    out->logprob = NAN;
    out->rank = 0;
    if (params->top_count >= 0) raw_logprobs(logits, vocab, params, out);
}
