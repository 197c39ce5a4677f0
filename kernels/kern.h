/* The backend: a vtable of operations on arrays. One static table per backend; the CPU's is the
 * oracle for every other one.
 *
 * A backend owns its weights, its activations and the whole paged key/value cache: page tables,
 * lengths, free pages, reference counts and side arrays. Callers pass numbers and arrays, never
 * engine types, and never learn a stream's length except through `report`.
 *
 * Threads: one engine thread calls everything here; the backend may use workers inside a call.
 * Operations may be queued; `sync` waits and returns the first error since it last did. `sample`
 * is a sync, too: a step that samples waits once, there.
 * Activations are backend memory the host does not read, except what `download` copies.
 *
 * Shapes: row-major; "rows" are the tokens of one step. T = tokens a sequence has seen.
 *
 * The promise every backend keeps: the result for one row depends only on that row's sequence,
 * never on which other rows share the step, on how a prompt is split over steps, or on the thread
 * schedule: bitwise, for one backend on one kind of machine and one thread count.
 */
#ifndef KEEPD_KERNELS_KERN_H
#define KEEPD_KERNELS_KERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* E4M3: one byte, sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities, NaN is 0x7f and
 * 0xff, largest 448 (OCP 8-bit floating point, "FP8 E4M3"). State files hold these numbers. */
enum kern_dtype { KERN_F32, KERN_F16, KERN_BF16, KERN_E4M3 };

static inline size_t kern_dtype_bytes(enum kern_dtype dtype) {
    return dtype == KERN_F32 ? 4 : dtype == KERN_E4M3 ? 1 : 2;
}

struct kern;        /* a backend instance: begins with `const struct kern_ops *ops` */
struct kern_weight; /* a matrix in the backend's own layout */

/* ---- Weights ------------------------------------------------------------------------------- */

/* What tensor parallelism splits over ranks (kernels/ranks.h). Matrices, gates and the cache are
 * described whole; each rank's backend takes its part (kernels/shard.h). */
enum kern_shard {
    KERN_SHARD_NONE,
    KERN_SHARD_ROWS, /* outputs; results stay split */
    KERN_SHARD_COLS, /* inputs, which come split; results are summed over ranks before bias and
                        KERN_ADD, and whole */
    KERN_SHARD_VOCAB /* outputs; rows looked up are whole, and so are products (KERN_SET, no bias),
                        on rank 0, where they are sampled */
};

/* One matrix as the file has it: [rows = outputs, cols = inputs], row-major. `data` may be
 * unaligned and is only read during weight_load. */
struct kern_matrix {
    const void *data;
    enum kern_dtype dtype;
    int64_t rows, cols;
    int64_t groups; /* KERN_SHARD_ROWS: of rows that stay together, as those of a KV head do; when
                       there are fewer than ranks, ranks share them. 0: every row by itself */
    int64_t stride; /* elements from one row to the next; 0: cols */
    const float *scale; /* E4M3: [rows], what a row's numbers are multiplied by; else NULL */
};

/* What a backend is told of a model before anything is loaded. */
struct kern_shape {
    int layers, d_model, d_ff, heads_q, heads_kv, head_dim, vocab;
};

/* ---- How a sequence evicts ------------------------------------------------------------------ */

/* A method of eviction, resolved for one request and constant for its sequence's life. It is one
 * pipeline with parameters; what is zero is off:
 *
 *   observe -> normalise -> history -> smooth -> redundancy -> share the total -> select -> merge
 *
 * Notation: A[r, t, i] is the attention of query head r of the KV head's group at query t to entry
 * i, softmax(q . k / sqrt(D)) over the entries with pos <= the query's pos. Candidates are the
 * entries with pos < T - recent, sinks included; they take part in every formula, and sinks are
 * protected only when it comes to selecting. Scores are float32, higher is kept. Sources are named
 * with the rows of paging/policy.c. */

#define KERN_WINDOW_MAX       64 /* queries that a backend remembers per sequence and layer */
#define KERN_SMOOTH_WIDTH_MAX 31 /* widest smoothing, odd */
#define KERN_GAMMA_MAX        16 /* of kern_classes */

enum kern_score {
    KERN_SCORE_RECENCY,   /* newest first */
    KERN_SCORE_RETENTION, /* age * log_beta + w_n(log_beta), see kernels/score.h */
    KERN_SCORE_ATTENTION  /* what `observe` saw */
};

/* Entries compete within... */
enum kern_pool {
    KERN_POOL_STREAM,  /* their own (layer, head) */
    KERN_POOL_LAYER,   /* all heads of a layer (Ada-KV) */
    KERN_POOL_SEQUENCE /* the whole sequence */
};

/* How a total becomes whole places. Part i of weight w_i gets floor(total * w_i / W); the places
 * left over go, one each, to the largest remainders (ties: the lower index), in double. A weight
 * that is not finite and positive is 0; when all are, parts are even. Then bounds: of the parts
 * above what they may have and those below, the side that is out by more in sum (ties: above) is
 * set to its bound and leaves, and the others share what remains by weight, until none is out. A
 * total beyond the sums of the bounds is brought to them. Three steps share this way:
 *
 *   layers  (LAYER and STREAM pools, unless UNIFORM): the sequence's layers * heads_kv * keep less
 *           what is protected, by weight; a layer gets at most what it holds unprotected, and its
 *           own protected entries on top
 *   heads   (STREAM pools of such layers): the layer's places evenly; a head gets no more than it
 *           holds and no less than it protects
 *   floor   (LAYER pools): see kern_rule.floor; a head gets no more than it holds
 *
 * UNIFORM needs no sharing: every stream has keep places, every layer heads_kv * keep, and what
 * one cannot fill stays empty. A SEQUENCE pool has the whole total and no layers.
 *
 * Measured weights are taken when the sequence evicts for the first time, while all streams are
 * equally long, and stay: measured again they would feed back on themselves. */
enum kern_layers {
    KERN_LAYERS_UNIFORM,
    KERN_LAYERS_PYRAMID,    /* linear from the first layer to the last: pyramid_beta */
    KERN_LAYERS_PREFERENCE, /* CAKE: entropy^(1/tau1) * variance^(1/tau2) of the window's attention
                             */
    KERN_LAYERS_DENSITY /* D2O's code: softmax over layers of minus mean_h (v_h - min) / (max - min
                           + 1e-6), v_h the unbiased variance over the entries of head h of
                           their accumulated mass, min and max over the layer's heads */
};

/* Entries that the softmax runs over. */
enum kern_support {
    KERN_SUPPORT_ALL,       /* every entry the query sees */
    KERN_SUPPORT_CANDIDATES /* candidates only */
};

/* How the query heads of a KV head become one vector p[t, i]. */
enum kern_group {
    KERN_GROUP_MEAN,      /* mean_r A */
    KERN_GROUP_MAX,       /* max_r A */
    KERN_GROUP_SUM,       /* sum_r A */
    KERN_GROUP_SQUARES,   /* sum_r A^2 */
    KERN_GROUP_MAX_LOGIT, /* softmax of max_r of the logits */
    KERN_GROUP_SUM_LOGIT, /* softmax of sum_r of the logits */
    KERN_GROUP_EACH       /* each query head is reduced over the window by itself, then the mean */
};

/* How the queries of the window become one number per entry. */
enum kern_reduce {
    KERN_REDUCE_MEAN,
    KERN_REDUCE_SUM,
    KERN_REDUCE_MAX,
    KERN_REDUCE_MEAN_VAR, /* mean + gamma * variance, unbiased (divided by w - 1) */
    KERN_REDUCE_MEAN_STD  /* mean + gamma * standard deviation, unbiased */
};

enum kern_smooth {
    KERN_SMOOTH_NONE,
    KERN_SMOOTH_AVERAGE, /* zeros beyond both ends are counted */
    KERN_SMOOTH_MAX
};

/* What an entry remembers of its last score S: F = S at its first eviction (SUM: as if 0 before),
 * then max(decay F, S), decay F + (1 - decay) S, or decay F + S. */
enum kern_history { KERN_HISTORY_NONE, KERN_HISTORY_MAX, KERN_HISTORY_MEAN, KERN_HISTORY_SUM };

struct kern_observe {
    int32_t window; /* the last `window` queries, looked at when the sequence evicts. With fewer so
                       far, or some dropped, those there are: means divide by their number, and a
                       variance of less than two is 0. Window 0: every query when it comes, added up
                       in the entry (accumulated mass: support ALL, group MEAN, MAX, SUM or SQUARES,
                       reduce SUM, no history) */
    enum kern_support support;
    enum kern_group group;
    enum kern_reduce reduce;
    float gamma;
    bool normalise; /* divide by the largest candidate's */
    enum kern_history history;
    float decay;
    enum kern_smooth smooth; /* over the candidates of a stream, in order; not remembered */
    int32_t smooth_width;
    bool smooth_first; /* each query's p is smoothed, before `reduce` */
    bool global;       /* with a window, no history: every query's attention is added up besides, as
                          with window 0, to G, with such a group; and S <- max(G sum(S) / sum(G), S), the
                          sums over the candidates (EMS) */
};

/* Key redundancy (R-KV, G-KV). khat_i = k_i / (|k_i| + eps), C[i,j] = khat_i . khat_j, C[i,i] = 0;
 * l(i) = the newest j with C[i,j] > threshold, and C[i,l(i)] = 0: the newest of look-alikes is
 * forgiven. rho[j] = sum_i C[i,j] / n, R = softmax(rho). score = lambda S - (1 - lambda) R. */
struct kern_redundancy {
    bool on;
    float lambda, threshold, eps;
    bool normalise;       /* R divided by the largest candidate's */
    bool candidates_only; /* i and j run over candidates, not over all entries of the stream */
    bool index_zero;      /* parity: a row i without any j > threshold has C[i,0] = 0 instead */
};

/* Evicted entries give what they held to the kept entry of the same stream whose key is most like
 * theirs: u_ij = cos(k_i, k_j), keys after RoPE; ties to the newer j. An entry with u below the
 * stream's threshold tau is dropped. tau = mean_i u_ij at the stream's first merge, afterwards
 * beta mean_i u_ij + (1 - beta) tau; it includes the present eviction. Position and score of j stay
 * what they were. */
enum kern_merge {
    KERN_MERGE_NONE,
    KERN_MERGE_PAPER,  /* D2O: weights e for j and exp(u_ij) for each i, divided by their sum */
    KERN_MERGE_CODE,   /* D2O: j <- (j + sum_i u_ij i) / (1 + number of i) */
    KERN_MERGE_CLASSES /* see struct kern_classes */
};

/* Classes (EMS): an entry is the centre of a class. Of other tokens in its class, the members, only
 * a record stays: position and gain, its key's length over the centre's. A member's key is gain
 * times the centre's, turned from the centre's position to its own (RoPE); its value is the
 * centre's. The softmax runs over entries and members, and whatever is said of an entry's attention
 * is the sum over its class. A query sees a member by the member's own position: it is not older
 * than the member, and in a window's reach of it. The rule adds up attention (window 0 or
 * observe.global); a class's mass is that sum.
 *
 * Of the entries that go, each with its members, the best (gamma - 1) keep of a stream by rank look
 * for the candidate j that stays (ties: the newer) with the largest
 *     R = cos(k_i, k_j) cos(v_i, v_j), keys turned back to position 0, 0 for a vector of zeros.
 * Above tau they join its class; the others are gone. The centre's key then points where the sum of
 * mass times unit key (at position 0) points, of itself and those that join, and its value is the
 * mean weighted by mass; length and position of its key stay, and masses add up. A sum of zero
 * changes nothing. Of the members of a stream the newest kern_members_max stay. */
struct kern_classes {
    float gamma; /* at least 1: tokens a stream remembers, in parts of `keep` */
    float tau;   /* 0..1 */
    bool
        positions; /* false: a member's key is not turned, as if it were at the centre's position */
};

struct kern_rule {
    enum kern_score score;
    enum kern_pool pool;
    enum kern_layers layers;
    enum kern_merge merge;
    int32_t sinks;  /* entries with pos < sinks are kept first */
    int32_t recent; /* and those with pos >= T - recent; both count */
    float horizon;  /* RETENTION: n >= 1, INFINITY allowed */
    bool published; /* RETENTION, parity: the published offsets (score.h) */
    float retain;   /* RETENTION: an entry whose score is below log(retain) goes even when there is
                       room; 0 = off */
    float floor;    /* part of a pool's places that streams have without competing, 0..1. All
                       entries compete, protected ones first. LAYER (Ada-KV): weights are
                       1 - floor times the number of the stream's entries among the pool's best,
                       plus floor times an even part. SEQUENCE (global gates): trunc(floor * keep)
                       places each, and as many more as the stream has entries among the best of
                       the rest of the total; what a stream is too short for stays empty */
    float merge_beta;
    struct kern_classes classes;
    float pyramid_beta; /* the last layer's candidates are 1 / pyramid_beta of the mean */
    float tau1, tau2;   /* PREFERENCE */
    struct kern_observe observe;
    struct kern_redundancy redundancy;
};

/* Members a stream keeps at most when `keep` entries are. */
static inline int32_t kern_members_max(const struct kern_rule *rule, int32_t keep) {
    if (rule->merge != KERN_MERGE_CLASSES) return 0;
    double most = ((double)rule->classes.gamma - 1) * (double)keep;
    return most < 0 ? 0 : most > INT32_MAX ? INT32_MAX : (int32_t)most;
}

/* ---- A step -------------------------------------------------------------------------------- */

/* `count` new tokens of the sequence in cache slot `slot`: rows [row, row + count) of the step's
 * activations, at positions [pos, pos + count). A slot appears at most once in a batch. */
struct kern_span {
    int32_t slot;
    int32_t row;
    int32_t count;
    int32_t pos;
    const struct kern_rule *rule; /* what to record for evictions; NULL: nothing. The same for a
                                     sequence's life, read during the step's calls only */
};

struct kern_batch {
    const int32_t *tokens; /* [rows] */
    const struct kern_span *spans;
    int rows;
    int span_count;
};

enum kern_matmul_mode { KERN_SET, KERN_ADD }; /* y = x W^T (+ bias), or y += x W^T (+ bias) */

/* Rotary embedding, rotate-half pairs (j, j + D/2); cos and sin of pos * inv_freq[j], both times
 * `scale` (1 unless the model says so). RoFormer, arXiv 2104.09864. */
struct kern_rope {
    const float *inv_freq; /* [head_dim / 2], host memory, lives as long as the model; a pair with 0
                              stays as it is, without `scale` */
    float scale;
};

/* Retention gate of one layer (TRIM-KV, arXiv 2512.03324; global gates, arXiv 2605.09649):
 *   h = silu(w1 x + b1);  rg10 only: h = silu(w2 h + b2)
 *   log_beta[head] = logsigmoid(last[row[head]] . h + bias[row[head]])       (<= 0)
 * With per-head embeddings (paper tying) w1 is [H * width, d] and head j reads its own slice of h.
 * All float32 on the host, copied by the backend at gate_load. */
struct kern_gate_spec {
    const float *w1, *b1;     /* [embeddings * width, d_model], [embeddings * width] */
    const float *w2, *b2;     /* rg10: [width, width], [width]; else NULL */
    const float *last, *bias; /* [rows, width], [rows] */
    const int32_t *row;       /* [heads_kv]: which row of `last` each head of this layer uses */
    int width, d_model, heads_kv, row_count;
    int embeddings; /* 1, or heads_kv for paper tying */
};
struct kern_gate;

/* ---- The paged cache ----------------------------------------------------------------------- */

/* A page holds `page_slots` entries of ONE (layer, KV head) of one sequence: keys after RoPE at
 * their true position, values, and side records moved along with the entry: pos int32, log_beta
 * float32, score float32 (what the rule remembers of it). page_bytes counts K, V and side records;
 * a query ring of [layers][KERN_WINDOW_MAX][heads_q * head_dim] float32 per slot, resident only as
 * far as rules with a window use it, comes on top. */
struct kern_cache_options {
    int layers, heads_q, heads_kv, head_dim;
    enum kern_dtype dtype;
    int64_t pages;     /* size of the pool, of each rank's (kernels/ranks.h); zeroed once */
    int slots;         /* sequences plus retained conversations */
    int max_positions; /* no stream can be longer than this */
    float rank_cap;    /* of the places that streams of several ranks compete for, one rank gets at
                          most so many times an even share, rounded down, >= 1, or what it protects;
                          the others get the rest. 0: no cap, so that the number of ranks does not
                          matter */
    /* The rotation of the keys, [head_dim / 2], for rules with classes; lives as long as the cache.
     * NULL: keys are not rotated. */
    const float *inv_freq;
    /* The largest step that comes: its rows, how many of them are sampled, from how many tokens.
     * Opening takes what such steps need beside pages, so that none runs out of memory. 0: not
     * known, and taken when it comes. */
    int rows_max, logits_max, vocab;
};

struct kern_cache_info {
    int page_slots;     /* entries per page */
    int member_slots;   /* members of classes per page; 0 without rules that have them */
    int64_t page_bytes; /* memory per page, side records included */
};

/* What one eviction removed. Arrays are the caller's. */
struct kern_trace {
    int32_t *lengths;   /* [layers * heads_kv]: entries removed from each stream */
    int32_t *positions; /* streams one after the other, ascending within each */
    size_t entries_max; /* room in positions; what the sequence holds always suffices */
    size_t entries;     /* out: sum of lengths; above entries_max positions are incomplete */
    bool lost;          /* out: no memory to take it; the eviction happened all the same */
};

/* One sequence that is due. After it the sequence holds at most layers * heads_kv * keep entries,
 * and exactly min(held, that) unless the rule drops more by itself (retain; floors and caps that
 * leave places empty). Sinks and recent entries are kept first and count. Ties: newer pos, then
 * lower layer, then lower head. Stable: order inside a stream is kept. */
struct kern_evict {
    int32_t slot;
    int32_t tokens; /* T: tokens appended so far; age = T - pos */
    int32_t keep;   /* M: entries per stream on average */
    const struct kern_rule *rule;
    struct kern_trace *trace; /* NULL: none */
};

/* What a sequence holds. Arrays are the caller's; any may be NULL. */
struct kern_report {
    int32_t *lengths;    /* [layers * heads_kv] */
    int32_t *positions;  /* streams one after the other, each `length` entries in physical order */
    float *log_beta;     /* same order */
    size_t entries_max;  /* room in positions and log_beta */
    size_t entries;      /* out: sum of lengths */
    int64_t pages;       /* out: pages the slot refers to */
    int32_t members;     /* out, of snapshot_check: most of one stream */
    int64_t rank_pages;  /* out: of the rank that has most pages; without ranks all, as the next */
    size_t rank_entries; /* out: of the rank that has most entries */
};

/* A piece of a snapshot. A slot's content in bytes is one block for the slot itself, then one for
 * each stream, in the order layer * heads_kv + head: the same bytes on every backend with equal
 * layers, heads, head_dim and dtype, however its pages lie. The layout is described in
 * kernels/snapshot.h. */
struct kern_block {
    const void *data; /* aligned to nothing */
    size_t size;
};

struct kern_cache_stats {
    int64_t pages_used;      /* pages with a reference count above zero */
    int64_t rank_pages_used; /* of the rank that has most of them; without ranks the same */
    uint64_t entries_evicted;
    uint64_t rank_cap_hits; /* pools of an eviction in which some rank was held to rank_cap */
};

struct kern_attend_options {
    int window;  /* keys with pos <= query pos - window are masked; 0 = no window */
    float scale; /* 1/sqrt(head_dim) unless the model says otherwise */
};

/* ---- Sampling ------------------------------------------------------------------------------ */

struct kern_logit_bias {
    int32_t token;
    float bias;
};

/* One row to sample. Order: penalties (repetition over prompt and output; presence and frequency
 * over output only) -> logit_bias -> temperature -> top_k -> top_p -> min_p; then
 * argmax(logit + Gumbel(Philox4x32-10(seed; position, token id))), ties to the lowest id.
 * temperature 0 is the plain argmax after penalties and bias. */
struct kern_sample {
    const int32_t *history; /* prompt then output token ids; may be NULL when no penalty is set */
    int32_t prompt_count, output_count;
    const struct kern_logit_bias *bias;
    int32_t bias_count;
    const int32_t *banned; /* tokens that cannot be chosen (min_tokens, ignore_eos); may be NULL */
    int32_t banned_count;
    float temperature, top_p, min_p;
    float repetition, presence, frequency; /* 1, 0, 0 = off */
    int32_t top_k;                         /* 0 = off */
    uint64_t seed;
    int32_t position;  /* of the token being sampled */
    int32_t top_count; /* alternatives to report, <= KERN_TOP_MAX; -1 = no logprob at all either */
    int32_t forced;    /* >= 0: report the logprob of this token instead of sampling (echo) */
};

#define KERN_TOP_MAX 20

struct kern_sampled {
    int32_t token;
    float logprob;                   /* log softmax of the raw logits */
    int32_t rank;                    /* 1 = most likely by the raw logits */
    int32_t top_token[KERN_TOP_MAX]; /* by raw logit, highest first, ties to the lowest id */
    float top_logprob[KERN_TOP_MAX];
};

/* ---- The vtable ---------------------------------------------------------------------------- */

struct kern_ops {
    const char *name; /* "cpu-reference", "cpu-amx", ... */
    void (*close)(struct kern *kern);
    /* The calling thread uses the instance from now on; opening binds, too. A thread that uses
     * several binds each before it goes on with it. NULL: any thread may use any instance. */
    void (*bind)(struct kern *kern);

    /* Memory: zeroed; NULL when the device is out of it. */
    void *(*mem_alloc)(struct kern *kern, size_t bytes);
    void (*mem_free)(struct kern *kern, void *mem);
    int (*upload)(struct kern *kern, void *to, const void *from, size_t bytes);
    int (*download)(struct kern *kern, void *to, const void *from, size_t bytes);

    /* Can it compute such a model? ERR_UNSUPPORTED names what it cannot. NULL: any. */
    int (*shape_check)(struct kern *kern, const struct kern_shape *shape, struct fault *fault);

    /* Weights. Several parts with equal `cols` are joined by rows ([q; k; v], [gate; up]).
     * ERR_UNSUPPORTED or ERR_NOMEM leave nothing behind. */
    int (*weight_load)(struct kern *kern, const struct kern_matrix *parts, int part_count,
                       enum kern_shard shard, struct kern_weight **out, struct fault *fault);
    void (*weight_free)(struct kern *kern, struct kern_weight *weight);
    int (*gate_load)(struct kern *kern, const struct kern_gate_spec *spec, struct kern_gate **out,
                     struct fault *fault);
    void (*gate_free)(struct kern *kern, struct kern_gate *gate);
    /* From now on the instance may use what `owner`, of the same kind, has loaded so far: weights,
     * gates and memory that nobody writes. The owner keeps them and outlives this one. ERR_NOMEM.
     * NULL: every instance loads its own. */
    int (*share)(struct kern *kern, const struct kern *owner);

    /* Layer operations; all float32 activations. */
    void (*embed)(struct kern *kern, float *x, const struct kern_weight *table, float scale,
                  const int32_t *tokens, int rows); /* x = scale * table[token]; ids are in range:
                                                       the engine checked */
    void (*rms_norm)(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                     int dim, float eps);
    void (*matmul)(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
                   const float *bias /* [outputs] or NULL */, int rows, enum kern_matmul_mode mode);
    void (*glu)(struct kern *kern, float *y, const float *gate_up, int rows,
                int d_ff); /* y[r, j] = silu(gate_up[r, j]) * gate_up[r, d_ff + j] */
    void (*gather_rows)(struct kern *kern, float *y, const float *x, const int32_t *index,
                        int count, int dim);
    void (*gate)(struct kern *kern, float *log_beta /* [rows, heads_kv] */, const float *x,
                 const struct kern_gate *gate, int rows);

    /* Cache. qkv rows are [q (heads_q * D) | k (heads_kv * D) | v (heads_kv * D)]. */
    int (*cache_open)(struct kern *kern, const struct kern_cache_options *options,
                      struct fault *fault);
    void (*cache_info)(enum kern_dtype dtype, int head_dim, struct kern_cache_info *info);
    /* The most pages that a cache of this shape could have beside what is allocated now, on a
     * device that serves nobody else; the options' own number is not read. ERR_NOMEM: none for a
     * token, and why. NULL: the cache lies in the host's memory. */
    int (*cache_fit)(struct kern *kern, const struct kern_cache_options *options, int64_t *pages,
                     struct fault *fault);
    /* Can this backend run the rule? ERR_UNSUPPORTED names the member of kern_rule that it cannot,
     * and begin_step and evict answer the same. Pure, any thread. */
    int (*rule_check)(const struct kern_rule *rule, struct fault *fault);
    /* Takes what the rule needs for the slot beside pages (its remembered queries, on a device),
     * before the slot's first step with the rule; release gives it back. ERR_NOMEM concerns this
     * sequence alone: a step that has to take it itself fails as a whole. A fork takes its own
     * unless its slot was prepared. NULL: nothing is needed. */
    int (*prepare)(struct kern *kern, int slot, const struct kern_rule *rule);
    int (*begin_step)(struct kern *kern, const struct kern_batch *batch); /* takes the pages for all
                      layers; ERR_FULL takes none (a broken reservation: the caller logs it) */
    void (*qk_rope)(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                    float eps, const struct kern_rope *rope,
                    const struct kern_batch *batch); /* optional per-head RMSNorm, then rotation */
    void (*write_kv)(struct kern *kern, int layer, const float *qkv,
                     const float *log_beta /* [rows, heads_kv] or NULL = 0 */,
                     const struct kern_batch *batch);
    void (*attend)(struct kern *kern, int layer, float *out /* [rows, heads_q * D] */,
                   const float *qkv, const struct kern_batch *batch,
                   const struct kern_attend_options *options); /* after write_kv of the layer */
    int (*evict)(struct kern *kern, const struct kern_evict *due, int count);
    int (*truncate)(struct kern *kern, int slot, int32_t pos); /* drops entries at or after pos */
    int (*fork)(struct kern *kern, int from,
                int to);                          /* shares all pages, copy on write; `to` empty */
    void (*release)(struct kern *kern, int slot); /* all pages of the slot go back */
    int (*report)(struct kern *kern, int slot, struct kern_report *report);
    /* Snapshots, block by block, so that a large one may be taken over many steps: nobody changes
     * a slot that no batch names, not even through its forks. All four are NULL in a backend that
     * takes none. */
    size_t (*snapshot_size)(struct kern *kern, int slot, int block); /* 0: the device failed */
    int (*snapshot_export)(struct kern *kern, int slot, int block, void *to);
    /* Are these the blocks of a slot that has seen `tokens` tokens? Reads nothing beyond them,
     * whatever they hold: ERR_MALFORMED, ERR_UNSUPPORTED, ERR_LIMIT (more positions than this
     * cache has) or ERR_NOMEM say why they cannot be imported; else entries, pages and
     * members are in *report. Any thread, once the cache is open. */
    int (*snapshot_check)(struct kern *kern, const struct kern_block *blocks, int count,
                          int32_t tokens, struct kern_report *report, struct fault *fault);
    /* One of the blocks that were checked, so that a large snapshot may be taken in over many
     * steps: block 0 first, into a slot that is not in use, then each other once; the slot serves
     * when it has all. ERR_FULL, ERR_NOMEM, ERR_DEVICE: what it has goes with release. */
    int (*snapshot_import)(struct kern *kern, int slot, int block, const struct kern_block *from);
    void (*cache_stats)(struct kern *kern, struct kern_cache_stats *stats);
    int (*cache_check)(struct kern *kern, struct fault *fault); /* every page in one place; tests */

    /* Tokens, and what `sync` returns: without an error of it, or of its own, `out` is filled. */
    int (*sample)(struct kern *kern, const float *logits /* [rows, vocab] */, int rows, int vocab,
                  const struct kern_sample *params, struct kern_sampled *out);
    int (*sync)(struct kern *kern);
};

struct kern {
    const struct kern_ops *ops;
};

#endif
