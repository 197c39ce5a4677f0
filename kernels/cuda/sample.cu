/* Sampling, a block per row: the definition of struct kern_sample, like kernels/cpu/sample.c.
 *
 * No sort and no rejection: a token's place is a 64-bit number (logit, then lower id), and the
 * place where top-k or top-p cuts is found by radix select with histograms of counts and of masses.
 * As soon as few tokens are left, they are listed, and later passes read no others.
 * Masses are added as integers (2^-40 of the most likely token's), so that their sum does not
 * depend on the order in which threads arrive. Noise is Philox4x32-10 with the request's seed and
 * the counter (token, position): the same as on the CPU, for any batch. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/score.cuh"

#define THREADS    512
#define BINS       2048
#define DIGIT      11              /* bits of a pass */
#define FEW        2048            /* tokens that are listed */
#define BATCH      8               /* tokens that a thread reads at a time */
#define GUMBEL_MAX 22.9            /* -log(-log(1 - 2^-33)), rounded up */
#define MASS_ONE   1099511627776.0 /* 2^40; times 2^18 tokens fits 63 bits */
#define MASS_NONE  -28.5           /* negligible so far below the best: exp(-28.5) < 2^-41 */
#define EXP_NONE   -60.0 /* a whole vocabulary so far below is less than a double's last bit */

#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

typedef unsigned long long place_t; /* order of tokens: larger is better */

/* One row's parameters; lists are ranges of the arrays below. */
struct sample_row {
    float temperature, top_p, min_p, repetition, presence, frequency;
    float xtc_probability, xtc_threshold;
    int32_t top_k, position, top_count, forced;
    int32_t seen_first, seen_count, bias_first, bias_count, banned_first, banned_count;
    int32_t allowed_first; /* word of sample_args.allowed; -1 = all tokens are allowed */
    uint64_t seed;
};

struct sample_args {
    const float *logits;
    float *work; /* [rows][vocab]: logits of rows that are adjusted */
    const struct sample_row *rows;
    const struct kern_seen *seen;
    const struct kern_logit_bias *biases;
    const int32_t *banned;
    const uint32_t *allowed; /* masks, one after the other */
    struct kern_sampled *out;
    int vocab;
};

/* A sum in two halves: shared memory has no 64-bit addition, only a compare-and-swap loop, and most
 * of a vocabulary falls into a few bins. */
struct halves {
    uint32_t low, high;
};

struct masses {
    struct halves bin[BINS];
    __device__ place_t operator[](int i) const { return (place_t)bin[i].high << 32 | bin[i].low; }
};

struct sample_shared {
    struct masses mass;
    uint32_t count[BINS];
    place_t room[THREADS / 32];
    double values[THREADS / 32];
    int32_t tokens[THREADS / 32];
    uint32_t sums[THREADS / 32];
    place_t listed[KERN_TOP_MAX];
    uint32_t listed_count;
    int32_t few[FEW];
    uint32_t few_count;
    int found;
};

/* ---- Noise and order ---- */

static __device__ uint32_t philox(uint64_t seed, uint32_t position, uint32_t token) {
    uint32_t c0 = token, c1 = position, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint32_t n0 = __umulhi(PHILOX_M1, c2) ^ c1 ^ k0, n2 = __umulhi(PHILOX_M0, c0) ^ c3 ^ k1;
        c1 = PHILOX_M1 * c2;
        c3 = PHILOX_M0 * c0;
        c0 = n0;
        c2 = n2;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return c0;
}

static __device__ double gumbel(uint32_t bits) {
    return -log(-log(((double)bits + 0.5) * 2.3283064365386963e-10));
}

/* Can noise with these bits make up for `lead`? A false is certain, and cheap: noise of at least
 * `lead` has 1 - u <= 1 - exp(-exp(-lead)) <= exp(-lead), with u the number of the bits. */
static __device__ __forceinline__ bool can_lift(uint32_t bits, double lead) {
    return !((float)~bits * 0x1p-32f > 1.001f * expf(-(float)lead));
}

/* A row's logits after adjustment, divided by the temperature. */
struct view {
    const float *logit;
    int count;                 /* tokens: all, or those of `few` */
    float temperature;         /* 1: unchanged */
    const int32_t *few = NULL; /* tokens that later passes need, in shared memory; NULL: all */
};

static __device__ __forceinline__ float scaled(const struct view &v, float logit) {
    return v.temperature == 1 ? logit : __fdiv_rn(logit, v.temperature);
}

static __device__ __forceinline__ float view_at(const struct view &v, int i) {
    return scaled(v, v.logit[i]);
}

static __device__ __forceinline__ int token_at(const struct view &v, int i) {
    return v.few ? v.few[i] : i;
}

/* Calls work(token, logit) for every token of the view, divided among the threads. A row has one
 * block, whose speed depends on the number of reads in progress. */
template <class Work>
static __device__ __forceinline__ void each_token(const struct view &v, Work work) {
    for (int first = threadIdx.x; first < v.count; first += BATCH * THREADS) {
        float x[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            x[k] = first + k * THREADS < v.count ? v.logit[token_at(v, first + k * THREADS)] : 0;
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (first + k * THREADS < v.count)
                work(token_at(v, first + k * THREADS), scaled(v, x[k]));
    }
}

/* NaN is last, equal logits are ordered by id; -0 is 0. */
static __device__ __forceinline__ place_t place_of(float x, int id) {
    return (place_t)float_key(x + 0.0f) << 32 | (uint32_t)~id;
}

static __device__ __forceinline__ int place_token(place_t place) {
    return (int)~(uint32_t)place;
}

static __device__ place_t best_place(const struct view &v, struct sample_shared *s) {
    place_t best = 0;
    each_token(v, [&](int i, float x) {
        place_t place = place_of(x, i);
        if (place > best) best = place;
    });
    return block_most(best, s->room);
}

/* ---- Adjustments ---- */

/* Several biases on one token apply in their order: the thread of the first one applies all. */
static __device__ void apply_bias(const struct kern_logit_bias *list, int count, int at,
                                  float *work, int vocab) {
    int32_t token = list[at].token;
    if (token < 0 || token >= vocab) return;
    for (int i = 0; i < at; i++)
        if (list[i].token == token) return;
    for (int i = at; i < count; i++)
        if (list[i].token == token) work[token] += list[i].bias;
}

static __device__ void apply_penalty(const struct sample_row &r, struct kern_seen seen, float *work,
                                     int vocab) {
    if (seen.token < 0 || seen.token >= vocab) return;
    float x = work[seen.token];
    x = x > 0 ? __fdiv_rn(x, r.repetition) : __fmul_rn(x, r.repetition);
    if (seen.outputs > 0)
        x = __fadd_rn(x, -__fadd_rn(r.presence, __fmul_rn(r.frequency, (float)seen.outputs)));
    work[seen.token] = x;
}

static __device__ const float *adjust(const struct sample_args &a, const struct sample_row &r,
                                      const float *raw, float *work) {
    if (r.seen_count + r.bias_count + r.banned_count == 0 && r.allowed_first < 0) return raw;
    for (int i = threadIdx.x; i < a.vocab; i += THREADS) work[i] = raw[i];
    __syncthreads();
    for (int i = threadIdx.x; i < r.seen_count; i += THREADS)
        apply_penalty(r, a.seen[r.seen_first + i], work, a.vocab);
    __syncthreads();
    for (int i = threadIdx.x; i < r.bias_count; i += THREADS)
        apply_bias(a.biases + r.bias_first, r.bias_count, i, work, a.vocab);
    __syncthreads();
    for (int i = threadIdx.x; i < r.banned_count; i += THREADS) {
        int32_t token = a.banned[r.banned_first + i];
        if (token >= 0 && token < a.vocab) work[token] = -INFINITY;
    }
    __syncthreads();
    for (int i = threadIdx.x; r.allowed_first >= 0 && i < a.vocab; i += THREADS)
        if (!(a.allowed[r.allowed_first + i / 32] >> (i % 32) & 1)) work[i] = -INFINITY;
    __syncthreads();
    return work;
}

/* ---- Cuts ---- */

/* NaN: no mass. */
static __device__ __forceinline__ place_t mass_of(float x, float top) {
    double behind = (double)x - (double)top;
    if (!(behind > MASS_NONE)) return 0;
    return (place_t)(exp(behind) * MASS_ONE + 0.5);
}

static __device__ __forceinline__ void add_mass(struct halves *sum, place_t mass) {
    uint32_t low = (uint32_t)mass, high = (uint32_t)(mass >> 32);
    if (low && atomicAdd(&sum->low, low) > ~low) high++; /* carry */
    if (high) atomicAdd(&sum->high, high);
}

/* A pass finds the bits of a place from `shift` on, those from `known` on being known. The first
 * one tells powers of two and their quarters apart, the last one may find fewer than DIGIT bits. */
struct pass {
    int shift, known;
};

static __device__ __forceinline__ struct pass first_pass() {
    return {64 - DIGIT, 64};
}

static __device__ __forceinline__ struct pass next_pass(struct pass pass) {
    return {pass.shift > DIGIT ? pass.shift - DIGIT : 0, pass.shift};
}

/* Histogram of the tokens at or above `least` that agree with `cut` in the bits that are known. */
static __device__ void count_places(const struct view &v, place_t least, place_t cut,
                                    struct pass pass, float top, bool masses,
                                    struct sample_shared *s) {
    __syncthreads(); /* the previous histogram has been read */
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        s->count[i] = 0;
        if (masses) s->mass.bin[i] = {0, 0};
    }
    __syncthreads();
    const place_t known = pass.known == 64 ? 0 : ~(place_t)0 << pass.known;
    each_token(v, [&](int i, float x) {
        place_t place = place_of(x, i);
        if (place < least || (place & known) != cut) return;
        int bin = (int)(place >> pass.shift & (BINS - 1));
        atomicAdd(&s->count[bin], 1u);
        if (masses) add_mass(&s->mass.bin[bin], mass_of(x, top));
    });
    __syncthreads();
}

/* Lists the `count` tokens from `least` on, if they are few, for all later passes. */
static __device__ void list_few(struct view &v, place_t least, uint32_t count,
                                struct sample_shared *s) {
    if (v.few || count > FEW) return;
    if (threadIdx.x == 0) s->few_count = 0;
    __syncthreads();
    each_token(v, [&](int i, float x) {
        if (place_of(x, i) >= least) s->few[atomicAdd(&s->few_count, 1u)] = i;
    });
    __syncthreads();
    v.few = s->few;
    v.count = (int)count;
}

/* The place of the `rank`-th best token; at least `rank` tokens must exist. Later passes may see no
 * token behind it. */
static __device__ place_t select_rank(struct view &v, uint32_t rank, struct sample_shared *s) {
    place_t cut = 0;
    uint32_t wanted = rank, before;
    for (struct pass pass = first_pass(); pass.known > 0; pass = next_pass(pass)) {
        count_places(v, 0, cut, pass, 0, false, s);
        int bin = block_pick<BINS>(s->count, wanted, s->sums, &s->found, &before);
        cut |= (place_t)bin << pass.shift;
        wanted -= before;
        list_few(v, cut, rank - wanted + s->count[bin], s);
        if (s->count[bin] == wanted) break; /* all tokens of the bin: lower bits stay 0 */
    }
    return cut;
}

/* The part `top_p` of the counted mass, at least 1. */
static __device__ place_t mass_wanted(float top_p, struct sample_shared *s) {
    place_t mine = 0;
    for (int i = threadIdx.x; i < BINS; i += THREADS) mine += s->mass[i];
    place_t total = block_total(mine, s->room),
            wanted = (place_t)ceil((double)top_p * (double)total);
    return wanted == 0 ? 1 : wanted < total ? wanted : total;
}

/* The counted tokens in bins from `bin` on. */
static __device__ uint32_t count_from(int bin, struct sample_shared *s) {
    uint32_t mine = 0;
    for (int i = bin + (int)threadIdx.x; i < BINS; i += THREADS) mine += s->count[i];
    return block_total(mine, s->sums);
}

/* The place of the last of the fewest best tokens, at or above `least`, whose mass reaches top_p of
 * the mass of all. The best token has mass. Later passes may see no token behind it. */
static __device__ place_t select_mass(struct view &v, place_t least, float top, float top_p,
                                      struct sample_shared *s) {
    place_t cut = 0, wanted = 0, before;
    uint32_t above = 0; /* tokens in bins above those of all passes */
    for (struct pass pass = first_pass(); pass.known > 0; pass = next_pass(pass)) {
        count_places(v, least, cut, pass, top, true, s);
        if (wanted == 0) wanted = mass_wanted(top_p, s);
        int bin = block_pick<BINS>(s->mass, wanted, s->room, &s->found, &before);
        cut |= (place_t)bin << pass.shift;
        wanted -= before;
        above += count_from(bin, s);
        list_few(v, cut > least ? cut : least, above, s);
        above -= s->count[bin];
        if (s->count[bin] == 1) break;
    }
    return cut > least ? cut : least; /* undetermined low bits are 0 */
}

/* ---- Choice ---- */

static __device__ __forceinline__ void contend(double value, int token, double &best, int &winner) {
    if (value < best || (value == best && token >= winner)) return;
    best = value;
    winner = token;
}

/* The tokens that the cuts have left: those from one place to another that reach a logit. */
struct remaining {
    place_t least, most;
    float floor_logit;
    __device__ __forceinline__ bool has(float x, place_t place) const {
        return x >= floor_logit && place >= least && place <= most;
    }
};

/* Leaves out the top choices, if XTC draws that: `most` becomes the place of the last token that
 * reaches the threshold. Impossible tokens do not count, whatever the threshold. */
static __device__ void apply_xtc(const struct view &v, const struct sample_row &r, float top,
                                 struct remaining &left, struct sample_shared *s) {
    if (!(r.xtc_probability > 0)) return;
    double drawn = ((double)philox(r.seed, (uint32_t)r.position, KERN_XTC_NOISE) + 0.5) *
                   2.3283064365386963e-10;
    if (!(drawn < (double)r.xtc_probability)) return;
    place_t mine = 0, first = 0; /* first: the complement of a place, so that the least wins */
    each_token(v, [&](int i, float x) {
        if (left.has(x, place_of(x, i))) mine += mass_of(x, top);
    });
    place_t total = block_total(mine, s->room);
    double limit = (double)r.xtc_threshold * (double)total;
    each_token(v, [&](int i, float x) {
        place_t place = place_of(x, i);
        if (!(x > -INFINITY) || !left.has(x, place) || !((double)mass_of(x, top) >= limit)) return;
        if (~place > first) first = ~place;
    });
    first = block_most(first, s->room);
    if (first) left.most = ~first;
}

/* argmax of logit + Gumbel over the remaining tokens; `top`, the most likely of them, always. */
static __device__ int choose(const struct view &v, const struct sample_row &r, int top,
                             const struct remaining &left, struct sample_shared *s) {
    double lead =
        (double)view_at(v, top) + gumbel(philox(r.seed, (uint32_t)r.position, (uint32_t)top));
    double best = lead;
    int winner = top;
    each_token(v, [&](int i, float x) {
        if (!(x >= left.floor_logit) || !((double)x + GUMBEL_MAX >= lead)) return;
        uint32_t bits = philox(r.seed, (uint32_t)r.position, (uint32_t)i);
        if (!can_lift(bits, best - (double)x) || !left.has(x, place_of(x, i))) return;
        contend((double)x + gumbel(bits), i, best, winner);
    });
    for (int by = 16; by > 0; by /= 2) {
        double value = __shfl_xor_sync(WARP_ALL, best, by);
        int token = __shfl_xor_sync(WARP_ALL, winner, by);
        contend(value, token, best, winner);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        s->values[threadIdx.x / 32] = best;
        s->tokens[threadIdx.x / 32] = winner;
    }
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) contend(s->values[w], s->tokens[w], best, winner);
    return winner;
}

static __device__ int pick_token(struct view &v, const struct sample_row &r,
                                 struct sample_shared *s) {
    struct view unscaled = {v.logit, v.count, 1};
    int top = place_token(best_place(unscaled, s));
    if (!(r.temperature > 0)) return top;
    float top_logit = view_at(v, top);
    /* Sampling is impossible: no logit is a number, or the temperature is so low that quotients
     * overflow. */
    if (!isfinite(top_logit)) return top;
    struct remaining left = {0, ~(place_t)0, r.min_p > 0 ? top_logit + logf(r.min_p) : -INFINITY};
    if (r.top_k > 0 && r.top_k < v.count) left.least = select_rank(v, (uint32_t)r.top_k, s);
    if (r.top_p < 1) left.least = select_mass(v, left.least, top_logit, r.top_p, s);
    apply_xtc(v, r, top_logit, left, s);
    if (left.most != ~(place_t)0) top = place_token(left.most);
    return choose(v, r, top, left, s);
}

/* ---- Log-probabilities ---- */

/* The `most` best tokens, best first, into out. */
static __device__ void list_top(struct view &raw, int most, double norm, struct kern_sampled *out,
                                struct sample_shared *s) {
    int count = most < raw.count ? most : raw.count;
    place_t least = count > 0 ? select_rank(raw, (uint32_t)count, s) : 0;
    if (threadIdx.x == 0) s->listed_count = 0;
    __syncthreads();
    each_token(raw, [&](int i, float x) {
        place_t place = place_of(x, i);
        if (count > 0 && place >= least) s->listed[atomicAdd(&s->listed_count, 1u)] = place;
    });
    __syncthreads();
    if (threadIdx.x >= KERN_TOP_MAX) return;
    int mine = threadIdx.x, at = 0;
    if (mine >= count) {
        out->top_token[mine] = -1;
        out->top_logprob[mine] = -INFINITY;
        return;
    }
    for (int i = 0; i < count; i++) at += s->listed[i] > s->listed[mine];
    int token = place_token(s->listed[mine]);
    out->top_token[at] = token;
    out->top_logprob[at] = (float)((double)raw.logit[token] - norm);
}

/* Log-probability of the raw model: before any penalty, bias or temperature. */
static __device__ void score_token(struct view &raw, int token, int most, struct kern_sampled *out,
                                   struct sample_shared *s) {
    float top = raw.logit[place_token(best_place(raw, s))];
    place_t mine = place_of(raw.logit[token], token);
    double sum = 0, before = 0;
    each_token(raw, [&](int i, float x) {
        double behind = (double)x - (double)top;
        if (!(behind < EXP_NONE)) sum += exp(behind);
        before += place_of(x, i) > mine;
    });
    double norm = (double)top + log(block_total(sum, s->values));
    before = block_total(before, s->values);
    if (threadIdx.x == 0) {
        out->logprob = (float)((double)raw.logit[token] - norm);
        out->rank = 1 + (int)before;
    }
    list_top(raw, most, norm, out, s);
}

static __device__ void no_scores(const struct view &raw, int token, struct kern_sampled *out) {
    if (threadIdx.x == 0) {
        out->logprob = __uint_as_float(0x7fc00000u);
        out->rank = fabsf(raw.logit[token]) < INFINITY ? 0 : -1;
    }
    if (threadIdx.x >= KERN_TOP_MAX) return;
    out->top_token[threadIdx.x] = -1;
    out->top_logprob[threadIdx.x] = -INFINITY;
}

static __global__ void __launch_bounds__(THREADS) k_sample(const struct sample_args a) {
    SHARED_MEMORY(shared);
    struct sample_shared *s = (struct sample_shared *)shared;
    const struct sample_row r = a.rows[blockIdx.x];
    const float *raw = a.logits + (int64_t)blockIdx.x * a.vocab;
    struct kern_sampled *out = &a.out[blockIdx.x];
    int token = r.forced;
    if (token < 0) {
        struct view v = {adjust(a, r, raw, a.work + (int64_t)blockIdx.x * a.vocab), a.vocab,
                         r.temperature > 0 ? r.temperature : 1};
        token = pick_token(v, r, s);
    }
    if (threadIdx.x == 0) out->token = token;
    __syncthreads();
    struct view plain = {raw, a.vocab, 1};
    if (r.top_count >= 0)
        score_token(plain, token, r.top_count, out, s);
    else
        no_scores(plain, token, out);
}

/* ---- The host's side ---- */

/* Lists of all rows, each kind concatenated; one allocation, so that one copy brings all of them to
 * the device. */
struct lists {
    char *mem;
    size_t bytes;
    struct sample_row *rows;
    struct kern_seen *seen;
    struct kern_logit_bias *biases;
    int32_t *banned;
    uint32_t *allowed;
    size_t seen_count, bias_count, banned_count, allowed_count; /* added so far */
};

static size_t mask_words(int vocab) {
    return ((size_t)vocab + 31) / 32;
}

static bool has_penalties(const struct kern_sample *p) {
    bool neutral = p->repetition == 1.0f && p->presence == 0.0f && p->frequency == 0.0f;
    return !neutral && p->seen_count > 0;
}

static bool open_lists(struct lists *l, const struct kern_sample *params, int rows, int vocab) {
    size_t seen = 0, biases = 0, banned = 0, masks = 0;
    for (int i = 0; i < rows; i++) {
        const struct kern_sample *p = &params[i];
        if (has_penalties(p)) seen += (size_t)p->seen_count;
        biases += (size_t)p->bias_count;
        banned += (size_t)p->banned_count;
        masks += p->allowed ? mask_words(vocab) : 0;
    }
    *l = {};
    l->bytes = (size_t)rows * sizeof *l->rows + seen * sizeof *l->seen +
               biases * sizeof *l->biases + (banned + masks) * sizeof *l->banned;
    l->mem = static_cast<char *>(mem_try_alloc(l->bytes, 1));
    if (!l->mem) return false;
    l->rows = reinterpret_cast<struct sample_row *>(l->mem);
    l->seen = reinterpret_cast<struct kern_seen *>(l->rows + rows);
    l->biases = reinterpret_cast<struct kern_logit_bias *>(l->seen + seen);
    l->banned = reinterpret_cast<int32_t *>(l->biases + biases);
    l->allowed = reinterpret_cast<uint32_t *>(l->banned + banned);
    return true;
}

static void add_row(struct lists *l, struct sample_row *r, const struct kern_sample *p, int vocab) {
    *r = {p->temperature,
          p->top_p,
          p->min_p,
          p->repetition,
          p->presence,
          p->frequency,
          p->xtc_probability,
          p->xtc_threshold,
          p->top_k,
          p->position,
          p->top_count,
          p->forced,
          0,
          0,
          0,
          0,
          0,
          0,
          -1,
          p->seed};
    r->seen_first = (int32_t)l->seen_count;
    r->bias_first = (int32_t)l->bias_count;
    r->banned_first = (int32_t)l->banned_count;
    r->seen_count = has_penalties(p) ? p->seen_count : 0;
    r->bias_count = p->bias_count;
    r->banned_count = p->banned_count;
    if (r->seen_count)
        memcpy(l->seen + l->seen_count, p->seen, (size_t)p->seen_count * sizeof *p->seen);
    if (p->bias_count)
        memcpy(l->biases + l->bias_count, p->bias, (size_t)p->bias_count * sizeof *p->bias);
    if (p->banned_count)
        memcpy(l->banned + l->banned_count, p->banned, (size_t)p->banned_count * sizeof *p->banned);
    if (p->allowed) {
        r->allowed_first = (int32_t)l->allowed_count;
        memcpy(l->allowed + l->allowed_count, p->allowed, mask_words(vocab) * sizeof *p->allowed);
        l->allowed_count += mask_words(vocab);
    }
    l->seen_count += (size_t)r->seen_count;
    l->bias_count += (size_t)p->bias_count;
    l->banned_count += (size_t)p->banned_count;
}

static bool stage_lists(struct cuda *cuda, const struct lists *l, struct sample_args *args) {
    const char *mem = static_cast<const char *>(device_stage(cuda->device, l->mem, l->bytes));
    auto place = [&](const void *host) { return mem + (static_cast<const char *>(host) - l->mem); };
    if (!mem) return false;
    args->rows = reinterpret_cast<const struct sample_row *>(place(l->rows));
    args->seen = reinterpret_cast<const struct kern_seen *>(place(l->seen));
    args->biases = reinterpret_cast<const struct kern_logit_bias *>(place(l->biases));
    args->banned = reinterpret_cast<const int32_t *>(place(l->banned));
    args->allowed = reinterpret_cast<const uint32_t *>(place(l->allowed));
    return true;
}

static size_t answer_bytes(int rows) {
    return ((size_t)rows * sizeof(struct kern_sampled) + 15) / 16 * 16;
}

size_t sample_bytes(int rows, int vocab) {
    return answer_bytes(rows) + (size_t)rows * (size_t)vocab * sizeof(float);
}

int op_sample(struct kern *kern, const float *logits, int rows, int vocab,
              const struct kern_sample *params, struct kern_sampled *out) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(vocab > 0);
    if (rows == 0) return cache_sync(cuda);
    /* Ends the step's graph, without the parts that differ each time: the device computes while the
     * host prepares lists. */
    graph_end(device_graphs(cuda->device), cuda->device);
    struct lists lists;
    struct sample_args args = {};
    bool ok = open_lists(&lists, params, rows, vocab);
    bool work = false;
    for (int i = 0; ok && i < rows; i++) {
        CHECK(params[i].top_count <= KERN_TOP_MAX && params[i].forced < vocab);
        add_row(&lists, &lists.rows[i], &params[i], vocab);
        work |= lists.rows[i].seen_count + params[i].bias_count + params[i].banned_count > 0;
        work |= params[i].allowed != nullptr;
    }
    ok = ok && stage_lists(cuda, &lists, &args);
    mem_free(lists.mem);
    size_t answers = answer_bytes(rows);
    char *room = static_cast<char *>(
        room_take(cuda, &cuda->sample, work ? sample_bytes(rows, vocab) : answers));
    if (!ok || !room) { /* reported here and not to later steps */
        int rc = cache_sync(cuda);
        return rc ? rc : ERR_NOMEM;
    }
    args.logits = logits;
    args.out = reinterpret_cast<struct kern_sampled *>(room);
    args.work = reinterpret_cast<float *>(room + answers);
    args.vocab = vocab;
    LAUNCH(cuda->device, k_sample, (unsigned)rows, THREADS, sizeof(struct sample_shared), args);
    device_fetch(cuda->device, out, room, (size_t)rows * sizeof *out);
    return cache_sync(cuda);
}
