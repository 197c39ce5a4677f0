/* Sampling on the CPU. Exact and deterministic: tokens are ordered by (logit, lower id first) and
 * noise is counter-based, so a token depends on its logits, seed and position alone.
 *
 * A vocabulary has 150,000 tokens and a step has dozens of rows, so the code skips work that cannot
 * change the result. Logits are copied only if a penalty or bias changes them. Exact noise is
 * computed only for tokens that a cheap bound on their noise does not exclude. Top-k keeps a list
 * of k candidates, and top-p sorts only the most likely tokens. Nothing is approximated. */
#include "kernels/cpu/sample.h"

#include <math.h>
#include <string.h>

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BLOCK      16   /* tokens judged together before single ones are examined */
#define GUMBEL_MAX 22.9 /* -log(-log(1 - 2^-33)), rounded up */

/* A block is judged in vector registers that every relevant target has. */
#define LANES (BLOCK / 4)
typedef float float4 __attribute__((vector_size(16)));
typedef int32_t int4 __attribute__((vector_size(16)));

struct scratch {
    float *logit;   /* [vocab] after penalties, bias and division by the temperature */
    int32_t *order; /* [vocab] scratch: heaps, candidates */
};

size_t cpu_sample_scratch_bytes(int vocab) {
    return (size_t)vocab * (sizeof(float) + sizeof(int32_t)) + 32;
}

/* ---- Noise ---- */

#define XOR3      0x96 /* truth table of x ^ y ^ z */
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

uint32_t cpu_philox(uint64_t seed, uint32_t position, uint32_t token) {
    uint32_t c0 = token, c1 = position, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)PHILOX_M0 * c0;
        uint64_t b = (uint64_t)PHILOX_M1 * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = (uint32_t)b;
        c2 = n2;
        c3 = (uint32_t)a;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return c0;
}

/* Computes the noise of tokens [first, first + BLOCK). */
static void philox_block(uint64_t seed, uint32_t position, uint32_t first, uint32_t *out) {
    for (uint32_t i = 0; i < BLOCK; i++) out[i] = cpu_philox(seed, position, first + i);
}

#if defined(__x86_64__)
/* Lanes are 64 bits wide and only their low halves count: a product gives both halves at once. */
__attribute__((target("avx512f"))) static void philox_block_avx512(uint64_t seed, uint32_t position,
                                                                   uint32_t first, uint32_t *out) {
    const __m512i m0 = _mm512_set1_epi64(PHILOX_M0), m1 = _mm512_set1_epi64(PHILOX_M1);
    const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    for (uint32_t at = 0; at < BLOCK; at += 8) {
        __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(first + at), lanes);
        __m512i c1 = _mm512_set1_epi64(position), c2 = _mm512_setzero_si512(), c3 = c2;
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < 10; round++) {
            __m512i a = _mm512_mul_epu32(c0, m0), b = _mm512_mul_epu32(c2, m1);
            c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(b, 32), c1, _mm512_set1_epi64(k0),
                                           XOR3);
            c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(a, 32), c3, _mm512_set1_epi64(k1),
                                           XOR3);
            c1 = b;
            c3 = a;
            k0 += PHILOX_W0;
            k1 += PHILOX_W1;
        }
        _mm256_storeu_si256((__m256i *)(void *)(out + at), _mm512_cvtepi64_epi32(c0));
    }
}
#endif

typedef void philox_fn(uint64_t seed, uint32_t position, uint32_t first, uint32_t *out);

static philox_fn *choose_philox(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return philox_block_avx512;
#endif
    return philox_block;
}

static double gumbel(uint32_t bits) {
    return -log(-log(((double)bits + 0.5) * 0x1p-32));
}

/* ---- Order ---- */

/* Returns whether token a comes before b: its logit is higher or, if they are equal, its id lower.
 * NaN comes last. */
static bool before(const float *logit, int32_t a, int32_t b) {
    float x = logit[a], y = logit[b];
    if (x > y) return true;
    if (x < y) return false;
    if (isnan(x) != isnan(y)) return isnan(y);
    return a < b;
}

/* Returns the tokens from `first` on as one whole block, filled with -inf past the end of the
 * vocabulary. */
static const float *block_at(const float *logit, int32_t first, int vocab, float *room) {
    if (vocab - first >= BLOCK) return logit + first;
    for (int j = 0; j < BLOCK; j++) room[j] = first + j < vocab ? logit[first + j] : -INFINITY;
    return room;
}

static int block_size(int32_t first, int vocab) {
    return vocab - first < BLOCK ? vocab - first : BLOCK;
}

static bool any_bit(const int4 *mask) {
    uint64_t words[2];
    memcpy(words, mask, sizeof words);
    return (words[0] | words[1]) != 0;
}

/* Returns whether any number of the block reaches `limit`. */
static bool block_reaches(const float *x, float limit) {
    float4 in[LANES];
    int4 mask = {0};
    memcpy(in, x, sizeof in);
    for (int j = 0; j < LANES; j++) mask |= in[j] >= limit;
    return any_bit(&mask);
}

/* Returns the largest number; -inf if all are NaN. */
static float maximum(const float *logit, int vocab) {
    float room[BLOCK], best = -INFINITY;
    float4 most[LANES], in[LANES];
    for (int j = 0; j < LANES; j++) most[j] = (float4){0} - INFINITY;
    for (int32_t first = 0; first < vocab; first += BLOCK) {
        memcpy(in, block_at(logit, first, vocab, room), sizeof in);
        for (int j = 0; j < LANES; j++) {
            int4 more = in[j] > most[j];
            most[j] = (float4)(((int4)in[j] & more) | ((int4)most[j] & ~more));
        }
    }
    for (int j = 0; j < BLOCK; j++) best = most[j / 4][j % 4] > best ? most[j / 4][j % 4] : best;
    return best;
}

static int32_t argmax(const float *logit, int vocab) {
    float best = maximum(logit, vocab), room[BLOCK];
    int32_t i = 0;
    while (i < vocab && !block_reaches(block_at(logit, i, vocab, room), best)) i += BLOCK;
    while (i < vocab && !(logit[i] == best)) i++;
    return i < vocab ? i : 0; /* all NaN */
}

/* ---- Heap ---- */

/* Restores the heap, whose top is the worst token. */
static void sift_down(int32_t *heap, int count, int at, const float *logit) {
    for (;;) {
        int top = at, left = 2 * at + 1;
        if (left < count && before(logit, heap[top], heap[left])) top = left;
        if (left + 1 < count && before(logit, heap[top], heap[left + 1])) top = left + 1;
        if (top == at) return;
        int32_t swap = heap[at];
        heap[at] = heap[top];
        heap[top] = swap;
        at = top;
    }
}

/* Selects the `k` best tokens, in no particular order. */
static void take_best(const float *logit, int vocab, int k, int32_t *heap) {
    for (int32_t i = 0; i < k; i++) heap[i] = i;
    for (int i = k / 2 - 1; i >= 0; i--) sift_down(heap, k, i, logit);
    for (int32_t first = k; first < vocab; first += BLOCK) {
        float room[BLOCK], worst = logit[heap[0]]; /* any number replaces NaN */
        if (!isnan(worst) && !block_reaches(block_at(logit, first, vocab, room), worst)) continue;
        for (int32_t i = first; i < first + block_size(first, vocab); i++) {
            if (!before(logit, i, heap[0])) continue;
            heap[0] = i;
            sift_down(heap, k, 0, logit);
        }
    }
}

/* ---- Sums of exponentials ---- */

typedef double double4 __attribute__((vector_size(32)));
typedef int64_t int4x64 __attribute__((vector_size(32)));

/* Adds e^(x - top) for four x, none above top, to four partial sums, within 1e-13: x - top =
 * n log 2 + r, e^r by its series, 2^n by its bits. NaN stays NaN. */
static inline __attribute__((always_inline)) void add_exp4(const float *x, double top,
                                                           double4 *sums) {
    static const double series[] = {
        1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
        1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2,     1,          1};
    const double shift = 0x1.8p52; /* adding it leaves the nearest integer in the low bits */
    const double4 least = {-700, -700, -700, -700}; /* e^-700 is negligible in a sum of floats */
    double4 d = (double4){x[0], x[1], x[2], x[3]} - top;
    int4x64 low = d < least;
    d = (double4)(((int4x64)d & ~low) | ((int4x64)least & low));
    double4 n = d * 1.4426950408889634 + shift;
    int4x64 exponent = (int4x64)n << 52;
    n -= shift;
    double4 r = (d - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double4 y = r * series[0] + series[1];
    for (int k = 2; k < 12; k++) y = y * r + series[k];
    *sums += y * (double4)(exponent + ((int64_t)1023 << 52));
}

/* Sum of e^(x - top). The partial sums are added in a fixed order: the same bits on every
 * processor. */
static inline __attribute__((always_inline)) double exp_sum_body(const float *logit, int vocab,
                                                                 double top) {
    double4 sums[LANES] = {0};
    float room[BLOCK];
    double sum = 0;
    for (int32_t first = 0; first < vocab; first += BLOCK) {
        const float *x = block_at(logit, first, vocab, room);
        for (int64_t j = 0; j < LANES; j++) add_exp4(x + 4 * j, top, &sums[j]);
    }
    for (int j = 0; j < BLOCK; j++) sum += sums[j / 4][j % 4];
    return sum;
}

static double exp_sum_plain(const float *x, int count, double top) {
    return exp_sum_body(x, count, top);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static double exp_sum_avx2(const float *x, int count, double top) {
    return exp_sum_body(x, count, top);
}
#endif

static double exp_sum(const float *x, int count, double top) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return exp_sum_avx2(x, count, top);
#endif
    return exp_sum_plain(x, count, top);
}

/* ---- Adjustments ---- */

static bool in_range(int32_t token, int vocab) {
    return token >= 0 && token < vocab;
}

static bool sample_has_penalties(const struct kern_sample *p) {
    bool neutral = p->repetition == 1.0f && p->presence == 0.0f && p->frequency == 0.0f;
    return !neutral && p->seen_count > 0;
}

/* Repetition once per distinct token of prompt and output; presence once and frequency per
 * occurrence, over the output. */
static void apply_penalties(float *logit, int vocab, const struct kern_sample *p) {
    for (int i = 0; i < p->seen_count; i++) {
        const struct kern_seen *seen = &p->seen[i];
        if (!in_range(seen->token, vocab)) continue;
        float *x = &logit[seen->token];
        *x = *x > 0 ? *x / p->repetition : *x * p->repetition;
        if (seen->outputs > 0) *x -= p->presence + p->frequency * (float)seen->outputs;
    }
}

static void apply_allowed(float *logit, int vocab, const uint32_t *allowed) {
    for (int32_t first = 0; first < vocab; first += 32) {
        uint32_t word = allowed[first / 32];
        int32_t end = vocab - first < 32 ? vocab - first : 32;
        if (word == UINT32_MAX) continue;
        for (int32_t i = 0; i < end; i++)
            if (!(word >> i & 1)) logit[first + i] = -INFINITY;
    }
}

/* Returns the logits after penalties, bias and bans: the raw logits if nothing changes them. */
static const float *adjust(const float *logits, int vocab, const struct kern_sample *p,
                           struct scratch *s) {
    bool penalties = sample_has_penalties(p);
    if (!penalties && p->bias_count == 0 && p->banned_count == 0 && p->allowed == NULL)
        return logits;
    memcpy(s->logit, logits, (size_t)vocab * sizeof(float));
    if (penalties) apply_penalties(s->logit, vocab, p);
    for (int i = 0; i < p->bias_count; i++)
        if (in_range(p->bias[i].token, vocab)) s->logit[p->bias[i].token] += p->bias[i].bias;
    for (int i = 0; i < p->banned_count; i++)
        if (in_range(p->banned[i], vocab)) s->logit[p->banned[i]] = -INFINITY;
    if (p->allowed != NULL) apply_allowed(s->logit, vocab, p->allowed);
    return s->logit;
}

/* ---- Choice ---- */

/* The best token so far after noise. */
struct winner {
    int32_t token;
    double value;
};

static void contend(struct winner *winner, const float *logit, int32_t token, uint32_t noise) {
    double value = (double)logit[token] + gumbel(noise);
    if (value < winner->value || (value == winner->value && token >= winner->token)) return;
    *winner = (struct winner){token, value};
}

/* Returns whether a token of the block could win against `top`, which leads by `lead`. A bound on
 * the noise decides, which needs no logarithm: -log(u) >= 1 - u, so -log(-log(u)) <= -log(1 - u),
 * and the exponent of 1 - u gives that within log(2). The lowest bit of the noise is dropped so
 * that it fits a signed number. Rounding errors are far smaller than the margin, because only small
 * differences matter. */
static bool may_win(const float *x, float top, float lead, const uint32_t *noise) {
    float4 in[LANES];
    int4 bits[LANES], mask = {0};
    memcpy(in, x, sizeof in);
    memcpy(bits, noise, sizeof bits);
    for (int j = 0; j < LANES; j++) {
        float4 rest = __builtin_convertvector((~bits[j] >> 1) & INT32_MAX, float4);
        int4 exponent = (int4)rest >> 23;
        float4 bound = __builtin_convertvector(158 - exponent, float4) * 0.693147182f + 1e-4f;
        mask |= top - in[j] + lead <= bound;
    }
    return any_bit(&mask);
}

/* Chooses among all tokens that reach `floor_logit`, starting with the most likely token as the
 * winner so far, so that nearly all others are rejected by the bound. */
static int32_t choose_from_all(const float *logit, int vocab, int32_t top, float floor_logit,
                               const struct kern_sample *p) {
    philox_fn *philox = choose_philox();
    uint32_t position = (uint32_t)p->position, noise[BLOCK];
    struct winner winner = {.token = vocab, .value = -INFINITY};
    float reach =
        (float)GUMBEL_MAX + fabsf(logit[top]) * 0x1p-22f; /* covers the rounding of `limit` */
    contend(&winner, logit, top, cpu_philox(p->seed, position, (uint32_t)top));
    for (int32_t first = 0; first < vocab; first += BLOCK) {
        float room[BLOCK];
        const float *x = block_at(logit, first, vocab, room);
        float lead = (float)(winner.value - (double)logit[top]);
        float limit = logit[top] - (reach - lead);
        if (!block_reaches(x, limit > floor_logit ? limit : floor_logit)) continue;
        philox(p->seed, position, (uint32_t)first, noise);
        if (!may_win(x, logit[top], lead, noise)) continue;
        for (int j = 0; j < block_size(first, vocab); j++)
            if (x[j] >= floor_logit) contend(&winner, logit, first + j, noise[j]);
    }
    return winner.token;
}

static int32_t choose_from(const float *logit, const int32_t *ids, int count, int32_t top,
                           float floor_logit, const struct kern_sample *p) {
    uint32_t position = (uint32_t)p->position, noise[BLOCK];
    struct winner winner = {.token = INT32_MAX, .value = -INFINITY};
    contend(&winner, logit, top, cpu_philox(p->seed, position, (uint32_t)top));
    for (int first = 0; first < count; first += BLOCK) {
        int size = block_size(first, count);
        float x[BLOCK], lead = (float)(winner.value - (double)logit[top]);
        for (int j = 0; j < BLOCK; j++) {
            int32_t token = ids[first + (j < size ? j : 0)];
            x[j] = logit[token];
            noise[j] = cpu_philox(p->seed, position, (uint32_t)token);
        }
        if (!may_win(x, logit[top], lead, noise)) continue;
        for (int j = 0; j < size; j++)
            if (x[j] >= floor_logit) contend(&winner, logit, ids[first + j], noise[j]);
    }
    return winner.token;
}

/* Selects all tokens that the nucleus of mass p * total may contain: the others together have less
 * than (1 - p) * total. The 1 that is added covers rounding. */
static int take_likely(const float *logit, int vocab, double top, double total, float top_p,
                       int32_t *ids) {
    float limit = (float)(top - log((double)vocab / ((1 - (double)top_p) * total)) - 1);
    int taken = 0;
    for (int32_t first = 0; first < vocab; first += BLOCK) {
        float room[BLOCK];
        if (!block_reaches(block_at(logit, first, vocab, room), limit)) continue;
        for (int32_t i = first; i < first + block_size(first, vocab); i++)
            if (logit[i] >= limit) ids[taken++] = i;
    }
    return taken;
}

/* Returns a key that orders tokens as `before` does: the larger, the better. */
static uint64_t order_key(const float *logit, int32_t id) {
    float x = logit[id] + 0.0f; /* -0 is 0 */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~id;
}

/* Keeps, at the front of `ids`, the fewest best of `count` tokens whose mass reaches `wanted`;
 * returns their number. Finds the key of the last kept token bit by bit from the top: sorting would
 * dominate the cost where the distribution is flat. */
static int nucleus(const float *logit, int32_t *ids, int count, double top, double wanted) {
    enum { BITS = 8, BINS = 1 << BITS };
    uint64_t last = 0, decided = 0;
    double above = 0; /* mass of keys above all that could still be `last` */
    for (int shift = 64 - BITS; shift >= 0; shift -= BITS) {
        double mass[BINS] = {0};
        int members[BINS] = {0};
        for (int i = 0; i < count; i++) {
            uint64_t key = order_key(logit, ids[i]);
            if ((key & decided) != last) continue;
            mass[key >> shift & (BINS - 1)] += exp((double)logit[ids[i]] - top);
            members[key >> shift & (BINS - 1)]++;
        }
        int bin = BINS - 1, lowest = 0;
        while (members[lowest] == 0) lowest++;
        for (; bin > lowest && (members[bin] == 0 || above + mass[bin] < wanted); bin--)
            above += mass[bin];
        last |= (uint64_t)bin << shift;
        decided |= (uint64_t)(BINS - 1) << shift;
        if (members[bin] == 1) break;
    }
    int kept = 0;
    for (int i = 0; i < count; i++)
        if ((order_key(logit, ids[i]) & decided) >= last) ids[kept++] = ids[i];
    return kept;
}

/* Applies top_k, then top_p to the remaining tokens: fills s->order, in no particular order;
 * returns how many remain. */
static int truncate_candidates(struct scratch *s, const float *logit, int vocab, int32_t best,
                               const struct kern_sample *p) {
    double top = logit[best], total = 0;
    int count = vocab;
    bool limited = p->top_k > 0 && p->top_k < vocab;
    if (limited) {
        count = p->top_k;
        take_best(logit, vocab, count, s->order);
        if (p->top_p >= 1.0f) return count;
        for (int i = 0; i < count; i++) total += exp((double)logit[s->order[i]] - top);
    } else {
        total = exp_sum(logit, vocab, top);
        count = take_likely(logit, vocab, top, total, p->top_p, s->order);
    }
    return count > 0 ? nucleus(logit, s->order, count, top, (double)p->top_p * total) : 0;
}

/* ---- XTC ---- */

/* Draws whether XTC leaves tokens out at this position. */
static bool draws_xtc(const struct kern_sample *p) {
    if (!(p->xtc_probability > 0)) return false;
    const uint32_t noise = cpu_philox(p->seed, (uint32_t)p->position, KERN_XTC_NOISE);
    return ((double)noise + 0.5) * 0x1p-32 < (double)p->xtc_probability;
}

/* The tokens that the cuts have left: those of a list (NULL: all) that reach a floor. */
struct remaining {
    const float *logit;
    const int32_t *ids;
    int count;
    float floor_logit;
};

static int32_t remaining_at(const struct remaining *r, int i) {
    return r->ids ? r->ids[i] : i;
}

static double remaining_mass(const struct remaining *r, double top) {
    double sum = 0;
    if (!r->ids && r->floor_logit == -INFINITY) return exp_sum(r->logit, r->count, top);
    for (int i = 0; i < r->count; i++) {
        const float x = r->logit[remaining_at(r, i)];
        if (x >= r->floor_logit) sum += exp((double)x - top);
    }
    return sum;
}

/* Returns the last in order of the tokens that reach the threshold; -1: none does. Impossible
 * tokens do not count, whatever the threshold. */
static int32_t last_choice(const struct remaining *r, double limit) {
    int32_t last = -1;
    for (int i = 0; i < r->count; i++) {
        const int32_t id = remaining_at(r, i);
        const float x = r->logit[id];
        if (!(x > -INFINITY) || !(x >= r->floor_logit) || !((double)x >= limit)) continue;
        if (last < 0 || before(r->logit, last, id)) last = id;
    }
    return last;
}

/* Makes the top choices before the last one impossible. `logit`: the logits of `remaining`, in
 * memory that may change. Returns the token that is now the most likely. */
static int32_t exclude_top(const struct remaining *r, float *logit, int32_t top, float threshold) {
    const double most = logit[top];
    const int32_t last = last_choice(r, most + log((double)threshold * remaining_mass(r, most)));
    if (last < 0) return top;
    for (int i = 0; i < r->count; i++) {
        const int32_t id = remaining_at(r, i);
        if (id != last && before(logit, id, last)) logit[id] = -INFINITY;
    }
    return last;
}

/* Applies XTC to what the cuts have left, `count` tokens of `ids` or all; returns the most likely
 * token of the rest. */
static int32_t apply_xtc(struct scratch *s, const float **logit, int vocab, const int32_t *ids,
                         int count, int32_t top, float floor_logit, const struct kern_sample *p) {
    if (!draws_xtc(p)) return top;
    if (*logit != s->logit) memcpy(s->logit, *logit, (size_t)vocab * sizeof(float));
    *logit = s->logit;
    const struct remaining r = {*logit, ids, count, floor_logit};
    return exclude_top(&r, s->logit, top, p->xtc_threshold);
}

static int32_t sample_choose(const float *adjusted, int vocab, const struct kern_sample *p,
                             struct scratch *s) {
    int32_t top = argmax(adjusted, vocab);
    if (!(p->temperature > 0.0f)) return top;
    const float *logit = adjusted;
    if (p->temperature != 1.0f) {
        for (int i = 0; i < vocab; i++) s->logit[i] = adjusted[i] / p->temperature;
        logit = s->logit;
    }
    /* Sampling is impossible: no logit is a number, or the temperature is so low that quotients
     * overflow. */
    if (!isfinite(logit[top])) return top;
    /* min_p compares probabilities with the largest one: a bound on the logit. */
    float floor_logit = p->min_p > 0 ? logit[top] + logf(p->min_p) : -INFINITY;
    if ((p->top_k <= 0 || p->top_k >= vocab) && p->top_p >= 1.0f) {
        top = apply_xtc(s, &logit, vocab, NULL, vocab, top, floor_logit, p);
        return choose_from_all(logit, vocab, top, floor_logit, p);
    }
    int count = truncate_candidates(s, logit, vocab, top, p);
    top = apply_xtc(s, &logit, vocab, s->order, count, top, floor_logit, p);
    return choose_from(logit, s->order, count, top, floor_logit, p);
}

/* ---- Log-probabilities ---- */

/* Returns 1 + the number of tokens before `token`. */
static int32_t sample_rank_of(const float *logits, int vocab, int32_t token) {
    float x = logits[token];
    int32_t higher = 0, equal = 0;
    if (isnan(x)) { /* behind every number */
        for (int32_t i = 0; i < vocab; i++) higher += !isnan(logits[i]) || i < token;
        return higher + 1;
    }
    for (int32_t i = 0; i < vocab; i++) higher += logits[i] > x;
    for (int32_t i = 0; i < token; i++) equal += logits[i] == x;
    return higher + equal + 1;
}

/* Lists the `most` best tokens, best first, by insertion; returns their number. */
static int list_top(const float *logits, int vocab, int most, int32_t *list) {
    int count = 0;
    for (int32_t first = 0; most > 0 && first < vocab; first += BLOCK) {
        float room[BLOCK], worst = count == most ? logits[list[count - 1]] : NAN;
        if (!isnan(worst) && !block_reaches(block_at(logits, first, vocab, room), worst)) continue;
        for (int32_t i = first; i < first + block_size(first, vocab); i++) {
            if (count == most && !before(logits, i, list[count - 1])) continue;
            int at = count < most ? count++ : count - 1;
            for (; at > 0 && before(logits, i, list[at - 1]); at--) list[at] = list[at - 1];
            list[at] = i;
        }
    }
    return count;
}

/* Writes log-probabilities of the model itself: before any penalty, bias or temperature. */
static void raw_logprobs(const float *logits, int vocab, const struct kern_sample *p,
                         struct kern_sampled *out) {
    double top = maximum(logits, vocab);
    double norm = top + log(exp_sum(logits, vocab, top));
    out->logprob = (float)((double)logits[out->token] - norm);
    out->rank = sample_rank_of(logits, vocab, out->token);
    int count = list_top(logits, vocab, p->top_count, out->top_token);
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
        const float *adjusted = adjust(logits, vocab, params, &s);
        out->token = sample_choose(adjusted, vocab, params, &s);
        CHECK(out->token >= 0 && out->token < vocab);
    }
    out->logprob = NAN;
    out->rank = isfinite(logits[out->token]) ? 0 : -1;
    if (params->top_count >= 0) raw_logprobs(logits, vocab, params, out);
}
