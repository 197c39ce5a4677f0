/* The backend: a vtable of operations on arrays. One static table per backend; the CPU's reference
 * path is the standard that all others are compared with.
 *
 * A backend owns its weights, its activations and the whole paged key/value cache: page tables,
 * lengths, free pages, reference counts and side arrays. Callers pass numbers and arrays, never
 * engine types, and learn the length of a stream only through `report`.
 *
 * Threads: one engine thread calls everything here; the backend may use workers inside a call.
 * Operations may be queued; `sync` waits and returns the first error since the last `sync`.
 * `sample` includes a `sync`: a step that samples waits once, there. Activations are backend memory
 * that the host does not read, except through `download`.
 *
 * Shapes: row-major; "rows" are the tokens of one step. T = number of tokens a sequence has seen.
 *
 * Every backend promises: the result for one row depends only on that row's sequence, never on the
 * other rows of the step, on how a prompt is split over steps, or on the thread schedule. This
 * holds bitwise, for one backend on one kind of machine and one thread count. */
#ifndef KEEPD_KERNELS_KERN_H
#define KEEPD_KERNELS_KERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* E4M3: one byte, sign, 4 bits of exponent (bias 7), 3 bits of mantissa, no infinities, NaN is 0x7f
 * and 0xff, largest 448 (OCP 8-bit floating point, "FP8 E4M3"). Q8 to Q8SM: blocks of whole numbers
 * with common factors (kernels/blocks.h), for weights only. ROW8 and ROW4: rows of codes with one
 * factor each (kernels/row.h), for caches only. State files contain these enum values. */
enum kern_dtype {
    KERN_F32,
    KERN_F16,
    KERN_BF16,
    KERN_E4M3,
    KERN_Q8,
    KERN_Q8M,
    KERN_Q4,
    KERN_Q4M,
    KERN_Q8S,
    KERN_Q8SM,
    KERN_ROW8,
    KERN_ROW4
};

#define KERN_BLOCK 32 /* numbers in a block */

static inline bool kern_dtype_blocks(enum kern_dtype dtype) {
    return dtype >= KERN_Q8 && dtype <= KERN_Q8SM;
}

/* Bytes of a number stored by itself (F32, BF16, F16, E4M3). Blocks and rows hold many numbers and
 * their factors together: their sizes are in kernels/blocks.h and kernels/row.h. */
static inline size_t kern_dtype_bytes(enum kern_dtype dtype) {
    return dtype == KERN_F32 ? 4 : dtype == KERN_E4M3 ? 1 : 2;
}

struct kern;        /* a backend instance: begins with `const struct kern_ops *ops` */
struct kern_weight; /* a matrix in the backend's own layout */

/* ---- Weights ---- */

/* How tensor parallelism splits a matrix over ranks (kernels/ranks.h). Callers describe matrices,
 * gates and the cache as a whole; each rank's backend takes its part (kernels/shard.h). */
enum kern_shard {
    KERN_SHARD_NONE,
    KERN_SHARD_ROWS, /* split outputs; results stay split */
    KERN_SHARD_COLS, /* split inputs; the input rows are split, too. Results are summed over ranks
                        before bias and KERN_ADD and are whole */
    KERN_SHARD_VOCAB /* split outputs; looked-up rows are whole. Products (KERN_SET, no bias) are
                        whole on rank 0, where they are sampled */
};

struct block; /* kernels/blocks.h */

/* Makes rows of a matrix in blocks when a backend wants them, so that a large matrix does not lie
 * in memory a second time on its way there. Any thread may call it. A row is made more than once: a
 * backend first looks at all of them. */
struct kern_reader {
    void (*read)(struct kern_reader *reader, int64_t row, struct block *to /* [row_blocks] */);
    /* Rows [first, first + count) will hardly be wanted again: their memory may go. */
    void (*done)(struct kern_reader *reader, int64_t first, int64_t count);
    int64_t row_blocks;
};

/* One matrix in the file's layout: [rows = outputs, cols = inputs], row-major. `data` may be
 * unaligned and is read only during weight_load, as is `reader`. */
struct kern_matrix {
    const void *data;
    struct kern_reader *reader;     /* not NULL: makes the rows, and data is NULL */
    int64_t first_row, first_block; /* with a reader: where the matrix begins in what it makes */
    enum kern_dtype dtype;
    int64_t rows, cols;
    int64_t groups; /* KERN_SHARD_ROWS: number of groups of rows that stay together, such as the
                       rows of a KV head; fewer groups than ranks are shared by ranks. 0: every row
                       is a group */
    int64_t stride; /* elements from one row to the next; 0: cols, in blocks whole ones */
    /* E4M3: [rows][scales] factors, each of `group` inputs of a row; otherwise NULL. The first
       input is number `skipped` of its group. group 0: one factor for a whole row. */
    const float *scale;
    int64_t scales, group, skipped;
    /* Above 0: products with these rows are multiplied by it, before bias and KERN_ADD. A device
       may multiply it into the numbers instead, which it then rounds once more. */
    float factor;
};

/* Factors from one row of an E4M3 matrix to the next. */
static inline int64_t kern_row_scales(const struct kern_matrix *matrix) {
    return matrix->group ? matrix->scales : 1;
}

/* Facts about a model that a backend gets before anything is loaded. */
struct kern_shape {
    int layers, d_model, d_ff, heads_q, heads_kv, head_dim, vocab;
    int heads_kv_least;     /* where layers have different numbers of KV heads: the least; else 0 */
    int experts, expert_ff; /* 0: no layer is a mixture of experts; d_ff 0: every layer is */
    int shared_ff;          /* width of the network that every token uses beside experts; 0: none */
    int conv_channels;      /* channels of layers with a short convolution; 0: there is none */
    int delta_heads;        /* key heads of layers with a gated delta rule; 0: there is none */
    int mamba_heads;        /* heads of Mamba-2 layers; 0: there is none */
};

/* ---- How a sequence evicts ---- */

/* An eviction method, resolved for one request and constant for its sequence's life. It is one
 * pipeline with parameters; a parameter that is zero turns its stage off:
 *
 *   observe -> normalise -> history -> smooth -> redundancy -> split the total -> select -> merge
 *
 * Notation: A[r, t, i] is the attention of query head r of the KV head's group at query t to entry
 * i, softmax(q . k / sqrt(D)) over the entries with pos <= the query's pos; where every query is
 * observed (window 0), over all that it sees (kern_given.together). Candidates are the entries with
 * pos < T - recent, sinks included; they take part in every formula, and sinks are protected only
 * in the selection. Scores are float32; higher scores are kept. Sources are named with the rows of
 * paging/policy.c. */

#define KERN_WINDOW_MAX       64   /* queries that a backend remembers per sequence and layer */
#define KERN_SMOOTH_WIDTH_MAX 31   /* widest smoothing, odd */
#define KERN_GAMMA_MAX        16   /* largest kern_classes.gamma */
#define KERN_LAG_MAX          1024 /* largest kern_redundancy.lag */
#define KERN_TAPS_MAX         16   /* largest width of a short convolution, from 2 */
#define KERN_STATE_ROWS_MAX   256  /* largest kern_delta.dim_k and kern_mamba.dim_state */
#define KERN_STATE_COLUMNS    16   /* columns of a state's matrix that lie side by side */

/* The score of an entry. One list makes the enum and, for tests, the names. */
#define KERN_SCORE_MAP(X)                                                                          \
    X(RECENCY, "recency")     /* newest first */                                                   \
    X(RETENTION, "retention") /* age * log_beta + w_n(log_beta), see kernels/score.h */            \
    X(ATTENTION, "attention") /* the result of `observe` */

enum kern_score {
#define X(name, text) KERN_SCORE_##name,
    KERN_SCORE_MAP(X)
#undef X
};

/* The streams whose entries compete in one ranking. */
enum kern_scope {
    KERN_SCOPE_STREAM,  /* one stream, a (layer, head) */
    KERN_SCOPE_LAYER,   /* all heads of a layer (Ada-KV) */
    KERN_SCOPE_SEQUENCE /* the whole sequence */
};

/* How a total of entries is split into allotments, which are whole numbers. Part i of weight w_i
 * gets floor(total * w_i / W); the remaining entries go, one each, to the largest remainders (ties:
 * the lower index), in double. A weight that is not finite and positive counts as 0; if all do,
 * parts are even. Then bounds apply: of the parts above their upper bound and the parts below their
 * lower bound, the side with the larger excess in sum (ties: above) is set to its bound and
 * settled, and the others split the rest by weight, until no bound is violated. A total outside the
 * sums of the bounds is clamped to them. Three steps split this way:
 *
 *   layers  (LAYER and STREAM scopes, unless UNIFORM): the sequence's layers * heads_kv * budget
 *           less all protected entries, by weight; a layer gets at most its number of unprotected
 *           entries, and its own protected entries on top
 *   heads   (STREAM scopes of such layers): the layer's allotment evenly; a head gets at most the
 *           number of its entries and at least the number of its protected ones
 *   floor   (LAYER scopes): see kern_rule.floor; a head gets at most the number of its entries
 *
 * UNIFORM splits nothing: the allotment of every stream is the budget, that of every layer
 * heads_kv * budget, and what a stream cannot fill stays empty. A SEQUENCE scope has the whole
 * total and no layers.
 *
 * Weights are measured at the sequence's first eviction, while all streams are equally long, and
 * kept: measured again they would feed back on themselves. */
enum kern_layers {
    KERN_LAYERS_UNIFORM,
    KERN_LAYERS_PYRAMID,    /* linear from the first layer to the last: pyramid_beta */
    KERN_LAYERS_PREFERENCE, /* CAKE: entropy^(1/tau1) * variance^(1/tau2) of the window's attention
                             */
    KERN_LAYERS_DENSITY /* D2O's code: softmax over layers of minus mean_h (v_h - min) / (max - min
                           + 1e-6), v_h the unbiased variance over the entries of head h of
                           their accumulated mass, min and max over the layer's heads */
};

/* Entries over which the softmax runs. */
enum kern_support {
    KERN_SUPPORT_ALL,       /* every entry the query sees */
    KERN_SUPPORT_CANDIDATES /* only the candidates */
};

/* How the attention of a KV head's query heads becomes one vector p[t, i]. */
enum kern_group {
    KERN_GROUP_MEAN,      /* mean_r A */
    KERN_GROUP_MAX,       /* max_r A */
    KERN_GROUP_SUM,       /* sum_r A */
    KERN_GROUP_SQUARES,   /* sum_r A^2 */
    KERN_GROUP_MAX_LOGIT, /* softmax of max_r of the logits */
    KERN_GROUP_SUM_LOGIT, /* softmax of sum_r of the logits */
    KERN_GROUP_EACH       /* each query head is reduced over the window separately, then averaged */
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
    KERN_SMOOTH_AVERAGE, /* counts zeros beyond both ends */
    KERN_SMOOTH_MAX
};

/* How an entry's last score S changes its stored score F: F = S at its first eviction (SUM: as if F
 * was 0 before), then max(decay F, S), decay F + (1 - decay) S, or decay F + S. */
enum kern_history { KERN_HISTORY_NONE, KERN_HISTORY_MAX, KERN_HISTORY_MEAN, KERN_HISTORY_SUM };

struct kern_observe {
    int32_t
        window; /* The last `window` queries are observed when the sequence evicts. If there are
                   fewer, or some were dropped, the existing ones count: means divide by their
                   number, and a variance of less than two is 0. Window 0: every query is observed
                   when it is computed, and its attention is added up in the entry (accumulated
                   mass: support ALL, group MEAN, MAX, SUM or SQUARES, reduce SUM, no history) */
    enum kern_support support;
    enum kern_group group;
    enum kern_reduce reduce;
    float gamma;
    bool normalise; /* divide by the largest value of a candidate */
    enum kern_history history;
    float decay;
    enum kern_smooth smooth; /* over the candidates of a stream, in order; not stored */
    int32_t smooth_width;
    bool smooth_first; /* smooth each query's p, before `reduce` */
    /* Expected Attention; 0: off, otherwise with a window. The window's queries stand for those of
     * the next `expect` positions: each is rotated from its own position to the mean of the
     * rotations by T .. T + expect - 1. With m[r] and v[r] the mean and the variance over t
     * (divided by w) of the logits of these queries, S[i] = |v_i| sum_r softmax(m[r] + v[r] /
     * 2)[i], the softmax over the candidates without sinks. The logarithm of S is the score; caps
     * and sinks of the attention do not enter, and only `window` of the other members has a
     * meaning. */
    int32_t expect;
    bool global; /* with a window and no history: every query's attention is also added up, as with
                    window 0, into G, with the same kinds of group; then S <- max(G sum(S) / sum(G),
                    S), with sums over the candidates (EMS) */
};

/* Measures, R, of how dispensable an entry is. */
enum kern_measure {
    KERN_MEASURE_LIKENESS, /* how much it resembles the others; see struct kern_redundancy */
    KERN_MEASURE_LENGTH,   /* |k_j| (knorm); the other members of the struct have no meaning */
    KERN_MEASURE_LAG       /* minus the mean of the key's and the value's scores (LagKV, see lag) */
};

/* Key redundancy (R-KV, G-KV). khat_i = k_i / (|k_i| + eps), C[i,j] = khat_i . khat_j, C[i,i] = 0;
 * l(i) = the newest j with C[i,j] > threshold, and C[i,l(i)] = 0: the newest of look-alikes is
 * forgiven. rho[j] = sum_i C[i,j] / n, R = softmax(rho). score = lambda S - (1 - lambda) R. With
 * lambda 0 and no window no attention is observed or added up: keys and values alone decide.
 *
 * LAG: the candidates without sinks are divided, oldest first, into parts of `lag` entries; what is
 * left over has the smallest R. A row x of a part becomes (x - min) / (max - min) per dimension,
 * with min and max over the next part (the last whole part and the rest have none: they, too, have
 * the smallest R); where max = min the quotient counts as 0. The standard deviation over the
 * dimensions (unbiased), softmax over the part: the score of the key, and likewise of the value. An
 * entry's rank by their mean within its part, divided by lag, is -R (ties: the newer ranks higher).
 */
struct kern_redundancy {
    bool on;
    enum kern_measure measure;
    int32_t lag; /* LAG: entries of a part, 2 to KERN_LAG_MAX */
    float lambda, threshold, eps;
    bool normalise;       /* divide R by the largest value of a candidate */
    bool candidates_only; /* i and j run over candidates, not over all entries of the stream */
    bool own; /* the likeness l(i) forgives is taken from rho[i], not from rho[l(i)]: an entry with
                 a look-alike is forgiven itself (R-KV's equations 5 and 6) */
    bool index_zero; /* parity: a row i without any j above the threshold has C[i,0] = 0 instead */
};

/* Evicted entries are merged into the kept entry of the same stream with the most similar key: u_ij
 * = cos(k_i, k_j), keys after RoPE; ties: the newer j. An entry with u below the stream's threshold
 * tau is dropped. tau = mean_i u_ij at the stream's first merge, afterwards beta mean_i u_ij + (1 -
 * beta) tau, which includes the present eviction. Position and score of j do not change. */
enum kern_merge {
    KERN_MERGE_NONE,
    KERN_MERGE_PAPER,  /* D2O: weights e for j and exp(u_ij) for each i, divided by their sum */
    KERN_MERGE_CODE,   /* D2O: j <- (j + sum_i u_ij i) / (1 + number of i) */
    KERN_MERGE_CLASSES /* see struct kern_classes */
};

/* Classes (EMS). An entry is the centre of a class. The other tokens of its class, the members, are
 * stored only as a record: position and gain, the ratio of the key's length to the centre's. A
 * member's key is gain times the centre's key, rotated from the centre's position to the member's
 * (RoPE); its value is the centre's value. The softmax runs over entries and members, and the
 * attention of an entry always means the sum over its class. A query sees a member by the member's
 * own position: it must not be older than the member, and within the sliding window. The rule
 * adds up attention (window 0 or observe.global); the mass of a class is that sum.
 *
 * Of the evicted entries, each with its members, the best (gamma - 1) budget of a stream by rank
 * look for the kept candidate j (ties: the newer) with the largest
 *
 * R = cos(k_i, k_j) cos(v_i, v_j), keys rotated back to position 0, 0 for a vector of zeros.
 *
 * If R exceeds tau they join its class; the others are dropped. The direction of the centre's key
 * becomes that of the sum of mass times unit key (at position 0) over the centre and the joining
 * entries; its value becomes the mean weighted by mass; length and position of its key do not
 * change, and masses add up. A sum of zero changes nothing. The newest kern_members_max members of
 * a stream are kept. */
struct kern_classes {
    float gamma;    /* at least 1: tokens that a stream remembers, as a multiple of the budget */
    float tau;      /* 0..1 */
    bool positions; /* false: a member's key is not rotated, as if it were at the centre's position
                     */
};

struct kern_rule {
    enum kern_score score;
    enum kern_scope scope;
    enum kern_layers layers;
    enum kern_merge merge;
    int32_t sinks;  /* entries with pos < sinks are kept first */
    int32_t recent; /* entries with pos >= T - recent are kept, too; both kinds count as kept */
    float horizon;  /* RETENTION: n >= 1, INFINITY allowed */
    bool published; /* RETENTION, parity: the published offsets (score.h) */
    float retain;   /* RETENTION: an entry whose score is below log(retain) is evicted even if there
                       is room; 0 = off */
    float floor;    /* part of a scope's allotment that streams get without competition, 0..1, in
                       whole ten-thousandths (rule_floor), so that no rounding decides ties. All
                       entries compete, protected ones first. LAYER (Ada-KV): a stream's weight is
                       1 - floor times the number of its entries among the scope's best, plus floor
                       times an even part. SEQUENCE (global gates): a stream's allotment is
                       trunc(floor * budget), plus the number of its entries among the best of the
                       rest of the total; what a short stream cannot fill stays empty */
    float merge_beta;
    struct kern_classes classes;
    float pyramid_beta; /* the last layer gets 1 / pyramid_beta of the mean number of candidates */
    float tau1, tau2;   /* PREFERENCE */
    struct kern_observe observe;
    struct kern_redundancy redundancy;
};

/* The most members that a stream keeps. */
static inline int32_t kern_members_max(const struct kern_rule *rule, int32_t budget) {
    if (rule->merge != KERN_MERGE_CLASSES) return 0;
    double most = ((double)rule->classes.gamma - 1) * (double)budget;
    return most < 0 ? 0 : most > INT32_MAX ? INT32_MAX : (int32_t)most;
}

/* ---- Adapters ---- */

/* A product of small rank that is added to one of the model's (LoRA, arXiv 2106.09685). `down` is
 * [rank, inputs] and `up` [outputs, rank], loaded so that `up` gives what the model's own product
 * gives: NONE and SHARD_ROWS beside a matrix with SHARD_ROWS, SHARD_COLS and NONE beside one with
 * SHARD_COLS. Callers give backend memory for `count` rows of inputs, of the rank, of outputs. */
struct kern_low_rank {
    const struct kern_weight *down, *up;
    float *in, *low, *out;
};

/* ---- A step ---- */

/* `count` new tokens of the sequence in cache slot `slot`: rows [row, row + count) of the step's
 * activations, at positions [pos, pos + count). A slot occurs at most once in a batch. */
struct kern_span {
    int32_t slot;
    int32_t row;
    int32_t count;
    int32_t pos;
    int32_t behind; /* how far the tokens' places lie behind their positions (kernels/places.h) */
    bool peeks;     /* the slot's recurrent states stay those before these tokens, until truncate */
    int32_t second; /* for models that tell two texts apart: the position at which the second one
                       begins; 0: there is one text */
    int32_t adapter;              /* for the model: number of the adapter of these rows; 0: none */
    const struct kern_rule *rule; /* records needed for evictions; NULL: none. Constant during a
                                     sequence's life; read only during the step's calls */
};

/* Rows whose embeddings are not looked up but given; their tokens are 0. */
struct kern_given {
    int32_t row, count; /* in one span */
    bool together;      /* queries see the entries of all these rows, also those behind them: a
                           sliding window bounds only what lies in front */
    int deep; /* further vectors of each row, which are added to its hidden state behind layers 0 to
                 deep - 1 (DeepStack, arXiv 2406.04334); below the number of layers */
    const float *rows; /* [count, 1 + deep, d_model] host memory, valid until the step's end */
};

/* Places of a token in three dimensions: time, height, width (M-RoPE, arXiv 2409.12191). In text
 * the three are equal. */
enum { KERN_AXES = 3 };
struct kern_place {
    int32_t axis[KERN_AXES];
};

struct kern_batch {
    const int32_t *tokens; /* [rows] */
    const struct kern_span *spans;
    int rows;
    int span_count;
    const struct kern_given *given; /* [given_count]; of them backends read `together` alone */
    int given_count;
    /* [rows] where a row's three places differ. NULL: a row's places are its position less what its
     * span is behind. */
    const struct kern_place *places;
};

/* Activation of gated products. GELU in its tanh form: g * sigmoid(1.5957691 (g + 0.044715 g^3)).
 * SWIGLU_CLAMPED (gpt-oss, arXiv 2508.10925): g sigmoid(1.702 g) (u + 1), g at most 7, u within
 * -7..7. SIGMOID: sigmoid(g) u. RELU: max(g, 0) u. NORMAL: u times the standard normal
 * distribution's function at g, which of one product for both is GELU in its exact form
 * (arXiv 1606.08415). GELU: that form of g, times u. The last two are only for backends with
 * kern_ops.layer_norm. */
enum kern_activation {
    KERN_SILU,
    KERN_GELU_TANH,
    KERN_SWIGLU_CLAMPED,
    KERN_SIGMOID,
    KERN_RELU,
    KERN_NORMAL,
    KERN_GELU
};

/* Mixture of experts: a layer's feed-forward network as `count` gated networks, of which each row
 * uses `used`: those with the largest router logits (ties: the lower expert).
 *
 *   y += sum over the chosen e, ascending, of s[e] down_e(glu(gate_up_e(x)))
 *
 * s is the softmax of the logits of all experts, or with `sigmoid` the sigmoid of each, times
 * `scale`; with `normalise` the chosen ones are first divided by their sum. With `select_bias`
 * (DeepSeek-V3, arXiv 2412.19437) those with the largest s + bias are chosen, s being what it is
 * without the two factors. With groups, experts of groups_used groups alone may be chosen: of
 * `groups` equal parts, those whose two largest s + bias have the largest sum (ties: the lower
 * group); with `group_best` (DeepSeek-V2, arXiv 2405.04434) those with the largest. Biases are
 * added to each product; `factors` multiply s[e] behind all else. With `sets` there is nothing in y
 * that the sum is added to. Experts that are `ungated` have one product in front, which is its own
 * gate: glu(x, x). Tensor parallelism splits every expert like a dense network, by d_ff, and every
 * rank chooses for itself. */
#define KERN_EXPERTS_MAX       1024
#define KERN_EXPERT_GROUPS_MAX 32
struct kern_experts_spec {
    int count, used; /* 1 <= used <= count <= KERN_EXPERTS_MAX */
    int d_model, d_ff;
    bool normalise, sigmoid;
    float scale;              /* 0 is 1 */
    int groups, groups_used;  /* groups 0 or 1: no groups; else count / groups >= 2, and the used
                                 groups have `used` experts or more */
    bool group_best;          /* a group counts as much as its best expert */
    const float *select_bias; /* [count] backend memory, or NULL */
    enum kern_activation activation;
    bool ungated, sets;
    const float *factors;               /* [count] backend memory, or NULL */
    struct kern_weight *const *gate_up; /* [count] [gate; up], or [up], KERN_SHARD_ROWS */
    struct kern_weight *const *down;    /* [count] KERN_SHARD_COLS */
    const float *gate_up_bias;          /* [count, 2 d_ff] backend memory, or NULL */
    const float *down_bias;             /* [count, d_model] backend memory, or NULL */
};
struct kern_experts;

enum kern_matmul_mode { KERN_SET, KERN_ADD }; /* y = x W^T (+ bias), or y += x W^T (+ bias) */

/* A factor on queries after their rotation: 1 + beta log(1 + floor(place / period)). beta 0: 1. */
struct kern_query_scale {
    float beta;
    int32_t period;
};

/* Rotary embedding, rotate-half pairs (j, j + D/2) of the numbers that rotate (all of a head,
 * unless kern_cache_options.latent says otherwise); cos and sin of place * inv_freq[j], both times
 * `scale` (1 unless the model says so). The place of a token is its position until the sequence is
 * shifted (struct kern_shift), and less behind pictures that have fewer places than rows (struct
 * kern_place). RoFormer, arXiv 2104.09864. */
struct kern_rope {
    const float *inv_freq; /* a number for each pair, host memory, valid as long as the model; a
                              pair with frequency 0 is not changed, not even by `scale` */
    const uint8_t *axes;   /* the place, of a row's three, by which each pair rotates; memory
                              of the host, as long; NULL: all by the first */
    float scale;
    struct kern_query_scale query_scale;
    int layer;           /* the cache's number of the layer whose heads the rows have */
    bool queries;        /* rows have queries alone */
    const float *v_norm; /* [head_dim] weights of an RMSNorm of each value, backend memory; NULL:
                            none */
};

/* Latent attention (DeepSeek-V2, arXiv 2405.04434). A token's key and value of every head are
 * products of one vector c of `rank` numbers, beside `turned` numbers that rotate and that all
 * heads share: k[h] = up_k[h]^T c | r, v[h] = up_v[h] c. The products are left to queries and to
 * results: q . k[h] = (up_k[h] q) . c + ..., so that the cache has c | r alone, one KV head whose
 * values are the first `rank` numbers of its keys (kern_cache_options.latent). */
#define KERN_LATENT_HEADS_MAX 256
struct kern_latent {
    int heads;                       /* at most KERN_LATENT_HEADS_MAX */
    int rank;                        /* numbers of c */
    int still;                       /* numbers of a head's query that do not rotate */
    int turned;                      /* and those behind them that do, even */
    int dim_v;                       /* numbers of a head's result */
    bool neighbours;                 /* the files rotate the numbers 2 i and 2 i + 1 together */
    float eps;                       /* added in the norm of c */
    const float *norm;               /* [rank] backend memory */
    struct kern_weight *const *up_k; /* [heads] of [rank, still], KERN_SHARD_NONE */
    struct kern_weight *const *up_v; /* [heads] of [dim_v, rank], the same */
};

/* Retention gate of one layer (TRIM-KV, arXiv 2512.03324; global gates, arXiv 2605.09649):
 *   h = silu(w1 x + b1);  rg10 only: h = silu(w2 h + b2)
 *   log_beta[head] = logsigmoid(last[row[head]] . h + bias[row[head]])       (<= 0)
 * With per-head embeddings (paper tying) w1 is [H * width, d] and head j reads its own slice of h.
 * All float32 on the host, copied by the backend at gate_load. */
struct kern_gate_spec {
    const float *w1, *b1;     /* [embeddings * width, d_model], [embeddings * width] */
    const float *w2, *b2;     /* rg10: [width, width], [width]; otherwise NULL */
    const float *last, *bias; /* [rows, width], [rows] */
    const int32_t *row;       /* [heads_kv]: row of `last` for each head of this layer */
    int width, d_model, heads_kv, row_count;
    int embeddings; /* 1, or heads_kv with paper tying */
};
struct kern_gate;

/* ---- The paged cache ---- */

/* The KV heads of a layer with attention, and the numbers of each of their keys and values. */
struct kern_heads {
    int kv, dim;
};

/* A recurrent state is all that a layer without attention remembers of a sequence: state_floats
 * float32 numbers, zeros before its first token. It lies in pages of the pool, so that it is shared
 * by forks, copied before it is written, counted and freed as entries are. Its numbers belong to
 * units (channels, heads), one unit's numbers after another's; with several ranks each has an equal
 * number of consecutive units, and all have the numbers before the first unit (state_shared).
 * Evictions, budgets and shifts concern entries alone. A state cannot go back, but it can be left
 * where it is (kern_span.peeks): otherwise `truncate` refuses slots that have one.
 *
 * With latent attention (struct kern_latent) an entry has no row of its own for the value.
 *
 * A page holds `page_slots` entries of ONE (layer, KV head) of one sequence: keys after RoPE at
 * the place of their token, values, and side records that move with the entry: pos int32, log_beta
 * float32, score float32 (stored by the rule). All pages have the same size; where heads differ in
 * their numbers, pages of the larger ones hold fewer entries. page_bytes counts K, V and side
 * records. A query ring of [layers][KERN_WINDOW_MAX][heads_q * head_dim] float32 per slot is not
 * included; its memory is resident only as far as rules with a window use it. */
struct kern_cache_options {
    int layers; /* with attention and entries of their own: the cache numbers them alone */
    int heads_q, heads_kv, head_dim;
    /* The heads of each layer, [layers], where they differ; heads_kv and head_dim are then the
     * largest numbers. Valid as long as the cache. NULL: they are equal. */
    const struct kern_heads *heads;
    enum kern_dtype dtype;
    /* Above 0: the first `latent` numbers of a key are its value, too, and do not rotate. Entries
     * have no other value; rules that merge entries cannot run. */
    int latent;
    /* Layers with a recurrent state, which the cache numbers by themselves, and the numbers of each
     * state. */
    int states, state_floats;
    int state_shared;  /* numbers of a state in front of its units */
    int state_heads;   /* heads of which a step keeps a number for each row (kern_ops.mamba); 0 */
    int64_t pages;     /* pages of each rank's pool (kernels/ranks.h); zeroed once */
    int slots;         /* sequences plus retained conversations */
    int max_positions; /* places of the model: upper bound of a stream's length and, in sequences
                          that are not shifted, of positions */
    float rank_cap;    /* where the streams of a scope are on several ranks, one rank gets at most
                          rank_cap (>= 1) times an even part of the allotment, rounded down, or its
                          protected entries; the others get the rest. 0: no cap, so that results do
                          not depend on the number of ranks */
    /* The rotation of the keys, [(head_dim - latent) / 2], for rules with classes; valid as long as
     * the cache. NULL: keys are not rotated. */
    const float *inv_freq;
    /* The rotation of the keys in every layer, [layers] of as many numbers, for shifts and
     * observe.expect; valid as long as the cache. NULL, or NULL for a layer: keys are not rotated.
     */
    const float *const *rotations;
    /* The largest step: its rows, how many of them are sampled, and the vocabulary. Opening
     * allocates everything such steps need in addition to pages, so that none runs out of memory.
     * 0: unknown; allocated by the step. `qk_norm_wide`: steps contain qk_norm. */
    int rows_max, logits_max, vocab;
    bool qk_norm_wide;
};

/* The numbers of a state on each of `ranks` ranks. */
static inline int kern_state_part(const struct kern_cache_options *options, int ranks) {
    return options->state_shared + (options->state_floats - options->state_shared) / ranks;
}

struct kern_cache_info {
    int page_slots;       /* entries per page; where heads differ, the most */
    int page_slots_least; /* where they differ, the least */
    int member_slots;     /* members of classes per page; 0 if no rule of the backend has classes */
    int state_slots;      /* numbers of a recurrent state per page; 0 if the backend has none */
    int64_t page_bytes;   /* memory per page, side records included */
};

/* Entries that one eviction removed. The caller provides the arrays. */
struct kern_trace {
    int32_t *lengths;   /* [streams]: entries removed from each stream */
    int32_t *positions; /* consecutive streams, ascending within each */
    size_t
        entries_max; /* size of positions; the number of entries of the sequence always suffices */
    size_t entries;  /* out: sum of lengths; if above entries_max, positions are incomplete */
    bool lost;       /* out: the trace was lost for lack of memory; the eviction took place */
};

/* Describes one sequence to evict from. Afterwards the sequence holds at most streams * budget
 * entries, and exactly min(held, that) unless the rule drops more by itself (retain; floors and
 * caps that leave a part of an allotment empty) or entries have expired. Expired is an entry that
 * no later query can see: in a layer with a sliding window (kern_attend_options), pos <= T -
 * sliding_window. It is evicted in any case, protected or not, and ranks below all others; only a
 * rule that merges keeps such entries as any others. Sinks and recent entries are kept first and
 * count. Ties: newer pos, then lower layer, then lower head. Stable: order inside a stream is kept.
 */
struct kern_evict {
    int32_t slot;
    int32_t tokens; /* T: tokens appended so far; age = T - pos */
    int32_t budget; /* M: entries per stream on average */
    const struct kern_rule *rule;
    struct kern_trace *trace; /* NULL: none */
};

/* Moves a slot's tokens from their places after `from` shifts to those after `to` shifts
 * (kernels/places.h): rotates the stored keys, and the remembered queries, by the difference, in
 * float32 and rounded once to the stored form. A token whose place stays keeps its bits. With more
 * shifts, a stream longer than places_kept drops entries behind the sinks: with retention scores
 * those that rank lowest, as in an eviction, otherwise the oldest. Positions, ages and scores do
 * not change. Not for slots with classes. */
struct kern_shift {
    int32_t slot;
    int32_t tokens; /* kern_evict.tokens */
    int32_t from, to;
    const struct kern_rule *rule;
};

/* Contents of a sequence. The caller provides the arrays; any may be NULL. */
struct kern_report {
    int32_t *lengths;    /* [streams] */
    int32_t *positions;  /* consecutive streams, the entries of each in physical order */
    float *log_beta;     /* same order */
    size_t entries_max;  /* size of positions and log_beta */
    size_t entries;      /* out: sum of lengths */
    int64_t pages;       /* out: pages the slot refers to */
    int32_t members;     /* out, snapshot_check only: the largest number of members in a stream */
    int64_t rank_pages;  /* out: pages on the rank that has most; with one rank equal to `pages` */
    size_t rank_entries; /* out: entries on the rank that has most */
    size_t state_bytes;  /* out: numbers of all recurrent states, those of all ranks together */
};

/* The heads of a layer, and the streams of a model. */
static inline struct kern_heads kern_heads_of(const struct kern_cache_options *options, int layer) {
    return options->heads ? options->heads[layer]
                          : (struct kern_heads){options->heads_kv, options->head_dim};
}

static inline int64_t kern_streams(const struct kern_cache_options *options) {
    int64_t streams = 0;
    if (!options->heads) return (int64_t)options->layers * options->heads_kv;
    for (int i = 0; i < options->layers; i++) streams += options->heads[i].kv;
    return streams;
}

/* A piece of a snapshot. A slot's content consists of one block for the slot itself and one for
 * each stream, layer by layer, then one for each recurrent state: the same
 * bytes on every backend with equal layers, heads, head_dim, dtype and states, however its pages
 * are arranged. kernels/snapshot.h describes the format. */
struct kern_block {
    const void *data; /* may be unaligned */
    size_t size;
};

struct kern_cache_stats {
    int64_t pages_used; /* pages with a reference count above zero */
    int64_t
        rank_pages_used; /* on the rank that uses most pages; with one rank equal to pages_used */
    uint64_t entries_evicted;
    uint64_t rank_cap_hits; /* scopes of evictions in which rank_cap limited a rank */
};

struct kern_attend_options {
    int sliding_window; /* keys with pos <= query pos - this are masked; 0 = none */
    float scale;        /* 1/sqrt(head_dim) unless the model says otherwise */
    float cap; /* soft cap (Gemma 2, arXiv 2408.00118): a scaled product s becomes cap tanh(s / cap)
                  before the mask and the softmax, also where attention is observed; 0: none */
    /* Learned sinks (gpt-oss, arXiv 2508.10925), [heads_q] of the model, backend memory that lives
     * as long as the cache: the softmax of a head has one more term, exp(sink), which has no entry;
     * also where attention is observed. Logits that are joined before a softmax
     * (KERN_GROUP_*_LOGIT) join their sinks, too. NULL: none, as always in a backend without
     * experts. */
    const float *sinks;
    /* Rows have queries alone: the layer has no entries of its own and reads those of another one,
     * after that one's write_kv. Policies do not observe these queries. */
    bool queries;
    /* A query also sees the entries behind it that the step has appended, with a sliding window the
     * next sliding_window - 1 of them. Only for backends with kern_ops.both_ways. */
    bool both_ways;
};

/* ---- Recurrent layers ---- */

/* A gated delta rule (arXiv 2412.06464). Every key head has queries and keys for heads_v / heads_k
 * value heads, which follow each other. */
struct kern_delta {
    int heads_k, heads_v; /* heads of the model */
    int dim_k, dim_v;     /* dim_k: a multiple of 4 */
    int width;            /* tokens that a convolution sees */
    /* Backend memory, of the model. Channels: queries, keys, values of all heads. */
    const float *taps;  /* [channels, width] */
    const float *decay; /* [heads_v], negative */
    const float *bias;  /* [heads_v] */
    const float *norm;  /* [dim_v] */
    float eps;          /* the norm's */
};

/* Mamba-2 (arXiv 2405.21060). Heads of a group, which follow each other, have B and C together. */
struct kern_mamba {
    int heads, groups; /* the whole model has, on all ranks together */
    int dim;           /* numbers of a head */
    int dim_state;     /* numbers of B and of C; a multiple of 4 */
    int width;         /* tokens that a convolution sees */
    /* Backend memory, of the model. Channels: x of all heads, then B, then C of all groups. */
    const float *taps;      /* [channels, width] */
    const float *conv_bias; /* [channels], or NULL */
    const float *decay;     /* [heads], negative */
    const float *bias;      /* [heads] */
    const float *skip;      /* [heads] */
    const float *norm;      /* [heads * dim], or NULL: there is none */
    float eps;              /* the norm's */
};

/* Blocks of columns of a state's matrix that has `columns` of them, the last one padded. */
static inline int kern_state_blocks(int columns) {
    return (columns + KERN_STATE_COLUMNS - 1) / KERN_STATE_COLUMNS;
}

/* The numbers of a state that belong to a key head: its channels of width - 1 numbers, the oldest
 * first, then its value heads' matrices. */
static inline int kern_delta_head_floats(const struct kern_delta *delta) {
    const int shared = delta->heads_v / delta->heads_k;
    return (delta->width - 1) * (2 * delta->dim_k + shared * delta->dim_v) +
           shared * kern_state_blocks(delta->dim_v) * KERN_STATE_COLUMNS * delta->dim_k;
}

/* The numbers of a state that belong to B's and C's channels, width - 1 for each, the oldest first,
 * and to a head: those of its channels, then its matrix. */
static inline int kern_mamba_shared_floats(const struct kern_mamba *mamba) {
    return 2 * mamba->groups * mamba->dim_state * (mamba->width - 1);
}
static inline int kern_mamba_head_floats(const struct kern_mamba *mamba) {
    return (mamba->width - 1) * mamba->dim +
           kern_state_blocks(mamba->dim) * KERN_STATE_COLUMNS * mamba->dim_state;
}

/* ---- Sampling ---- */

struct kern_logit_bias {
    int32_t token;
    float bias;
};

/* A token of a sequence, with the number of its occurrences in the answer. */
struct kern_seen {
    int32_t token, outputs;
};

/* One row to sample. Order: penalties (repetition over prompt and output; presence and frequency
 * over output only) -> logit_bias -> banned, allowed -> temperature -> top_k -> top_p -> min_p ->
 * xtc; then argmax(logit + Gumbel(Philox4x32-10(seed; position, token id))), ties to the lowest id.
 * temperature 0 is the plain argmax after penalties and bias. */
struct kern_sample {
    const struct kern_seen *seen; /* prompt and output, each token once; read for penalties */
    int32_t seen_count;
    const struct kern_logit_bias *bias;
    int32_t bias_count;
    const int32_t
        *banned; /* tokens that must not be chosen (min_tokens, ignore_eos); may be NULL */
    int32_t banned_count;
    /* Tokens that may be chosen: bit t % 32 of word t / 32, (vocab + 31) / 32 words, at least one
     * bit of a token in the vocabulary. NULL: all. */
    const uint32_t *allowed;
    float temperature, top_p, min_p;
    float repetition, presence, frequency; /* 1, 0, 0 = off */
    int32_t top_k;                         /* 0 = off */
    /* XTC ("exclude top choices", github.com/oobabooga/text-generation-webui, pull request 6335):
     * with this probability all tokens are left out, except the last in order, that have at least
     * the threshold as their part of what the cuts before have left. The draw is the noise of token
     * KERN_XTC_NOISE at the position. */
    float xtc_probability, xtc_threshold; /* 0 = off; above 0.5 no two tokens reach it */
    uint64_t seed;
    int32_t position;  /* position of the token being sampled */
    int32_t top_count; /* number of alternatives to report, <= KERN_TOP_MAX; -1 = no log-probability
                          at all */
    int32_t forced;    /* >= 0: report this token's log-probability instead of sampling (echo) */
};

#define KERN_TOP_MAX   20
#define KERN_XTC_NOISE UINT32_MAX /* no vocabulary has this id */

struct kern_sampled {
    int32_t token;
    float logprob; /* log softmax of the raw logits */
    int32_t rank;  /* 1 = most likely by the raw logits; without a logprob 0, or -1
                      where the token's logit is not a finite number */
    int32_t top_token[KERN_TOP_MAX]; /* by raw logit, highest first, ties to the lowest id */
    float top_logprob[KERN_TOP_MAX];
};

/* ---- The vtable ---- */

struct kern_worth; /* kernels/worth.h */

struct kern_ops {
    const char *name; /* "cpu-reference", "cpu-amx", ... */
    /* How products round activations, for people; lives as long as the instance. NULL: in one way
     * for all weights. */
    const char *activations;
    bool blocks;       /* weight_load takes matrices in blocks */
    bool scale_groups; /* and E4M3 matrices with several factors for a row, of groups of a multiple
                          of KERN_BLOCK inputs */
    bool peeks;        /* recurrent states can stay what they are before a step's tokens */
    bool both_ways;    /* attend has kern_attend_options.both_ways */
    bool reads_latent; /* rules that read keys (rule_reads_keys) run where keys hold the values */
    void (*close)(struct kern *kern);
    /* From now on the calling thread uses the instance; opening binds, too. A thread that uses
     * several instances binds each before using it. NULL: any thread may use any instance. */
    void (*bind)(struct kern *kern);

    /* Zeroed memory; NULL when the device's memory is exhausted. */
    void *(*mem_alloc)(struct kern *kern, size_t bytes);
    void (*mem_free)(struct kern *kern, void *mem);
    int (*upload)(struct kern *kern, void *to, const void *from, size_t bytes);
    int (*download)(struct kern *kern, void *to, const void *from, size_t bytes);

    /* Can the backend compute such a model? ERR_UNSUPPORTED names the obstacle. NULL: any model. */
    int (*shape_check)(struct kern *kern, const struct kern_shape *shape, struct fault *fault);

    /* Weights. Several parts with equal `cols` are joined by rows ([q; k; v], [gate; up]); either
     * all of them are in blocks or none. ERR_UNSUPPORTED: also when a rank's part of the inputs
     * would cut blocks. On ERR_UNSUPPORTED or ERR_NOMEM nothing is left behind. */
    int (*weight_load)(struct kern *kern, const struct kern_matrix *parts, int part_count,
                       enum kern_shard shard, struct kern_weight **out, struct fault *fault);
    void (*weight_free)(struct kern *kern, struct kern_weight *weight);
    int (*gate_load)(struct kern *kern, const struct kern_gate_spec *spec, struct kern_gate **out,
                     struct fault *fault);
    void (*gate_free)(struct kern *kern, struct kern_gate *gate);
    /* Makes one stage of loaded matrices and biases, which outlive it. The arrays of the spec are
     * read only during the call. ERR_NOMEM leaves nothing behind. */
    int (*experts_load)(struct kern *kern, const struct kern_experts_spec *spec,
                        struct kern_experts **out, struct fault *fault);
    void (*experts_free)(struct kern *kern, struct kern_experts *experts);
    /* From now on the instance may use everything that `owner`, of the same kind, has loaded so
     * far: weights, gates, experts and read-only memory. The owner keeps them and outlives this
     * instance. ERR_NOMEM. NULL: every instance loads its own. */
    int (*borrow)(struct kern *kern, const struct kern *owner);

    /* Layer operations; all activations are float32. */
    void (*embed)(struct kern *kern, float *x, const struct kern_weight *table, float scale,
                  const int32_t *tokens, int rows); /* x = scale * table[token]; the engine has
                                                       checked the range of the ids */
    void (*rms_norm)(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                     int dim, float eps);
    /* y = (x - mean) / sqrt(variance + eps) * weight + bias, of each row (arXiv 1607.06450); the
     * variance is divided by dim. bias NULL: none. NULL: this backend has none. */
    void (*layer_norm)(struct kern *kern, float *y, const float *x, const float *weight,
                       const float *bias, int rows, int dim, float eps);
    /* y[r, j] += x[r, j]. NULL: this backend has none. */
    void (*add)(struct kern *kern, float *y, const float *x, int rows, int dim);
    void (*matmul)(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
                   const float *bias /* [outputs] or NULL */, int rows, enum kern_matmul_mode mode);
    /* y[r] += up down x[r] for the rows r = rows[0..count), no row twice. NULL: this backend has
     * none. */
    void (*low_rank)(struct kern *kern, float *y, const float *x,
                     const struct kern_low_rank *products, const int32_t *rows, int count);
    /* y += rms_norm(x) * weight, of each row; x is left as what was added. */
    void (*add_norm)(struct kern *kern, float *y, float *x, const float *weight, int rows, int dim,
                     float eps);
    void (*glu)(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff,
                enum kern_activation activation); /* y[r, j] = activation(gate_up[r, j]) *
                                                     gate_up[r, d_ff + j] */
    /* y[r, j] = activation(gate[r, j]) * up[r, j]; rows of `up` begin up_stride numbers after one
     * another. NULL: this backend has none. */
    void (*glu_apart)(struct kern *kern, float *y, const float *gate, const float *up,
                      int64_t up_stride, int rows, int dim, enum kern_activation activation);
    /* x[r, j] *= *factor, backend memory. NULL: this backend has none. */
    void (*scale)(struct kern *kern, float *x, const float *factor, int rows, int dim);
    /* x[r, j] *= sigmoid(gates[r, j]), or sigmoid(gates[r]) with one gate for each row. */
    void (*open_gates)(struct kern *kern, float *x, const float *gates, int rows, int dim,
                       bool one);
    /* See struct kern_experts_spec. `logits`: [rows, count] of the router, whole on every rank. */
    void (*experts)(struct kern *kern, float *y /* [rows, d_model] */, const float *x,
                    const float *logits, const struct kern_experts *experts, int rows);
    /* x = cap tanh(x / cap), of logits: memory that a product with KERN_SHARD_VOCAB has filled. */
    void (*soft_cap)(struct kern *kern, float *x, int rows, int dim, float cap);
    void (*gather_rows)(struct kern *kern, float *y, const float *x, const int32_t *index,
                        int count, int dim);
    void (*gate)(struct kern *kern, float *log_beta /* [rows, heads_kv] */, const float *x,
                 const struct kern_gate *gate, int rows);

    /* Cache. qkv rows are [q (heads_q * D) | k (heads_kv * D) | v (heads_kv * D)], with the numbers
     * of the layer; without v where keys hold the values (kern_cache_options.latent). */
    int (*cache_open)(struct kern *kern, const struct kern_cache_options *options,
                      struct fault *fault);
    /* Describes a cache of these layers, heads and dtype. */
    void (*cache_info)(const struct kern_cache_options *options, struct kern_cache_info *info);
    /* The largest number of pages that a cache of this shape could have in addition to present
     * allocations, on a device without other users; options->pages is ignored. ERR_NOMEM: no page
     * fits; the fault says why. NULL: the cache is in host memory. */
    int (*cache_fit)(struct kern *kern, const struct kern_cache_options *options, int64_t *pages,
                     struct fault *fault);
    /* Can this backend run the rule? ERR_UNSUPPORTED names the unsupported member of kern_rule.
     * begin_step and evict answer the same, but without reads_latent they also refuse rules that
     * read keys in a cache of latent vectors. Pure, any thread. */
    int (*rule_check)(const struct kern_rule *rule, struct fault *fault);
    /* Allocates what the rule needs for the slot in addition to its `pages` pages, the most that it
     * will have (on a device: its query ring, and the rooms of its evictions and of attention that
     * is added up), before the slot's first step with the rule; release gives it back. ERR_NOMEM
     * concerns this sequence alone, whereas a step that has to allocate it fails as a whole. A fork
     * allocates its own ring unless its slot was prepared. NULL: nothing is needed. */
    int (*prepare)(struct kern *kern, int slot, const struct kern_rule *rule, int64_t pages);
    int (*begin_step)(
        struct kern *kern,
        const struct kern_batch *batch); /* takes the pages for all layers; ERR_FULL takes none (a
                                            broken reservation: the caller logs it) */
    void (*qk_rope)(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                    float eps, const struct kern_rope *rope,
                    const struct kern_batch *batch); /* optional per-head RMSNorm, then rotation */
    /* RMSNorm over the queries of all heads together, and over the keys of all heads, in place:
     * q_norm [heads_q * D], k_norm [heads_kv * D] of the model. Squares are added per head, then in
     * the order of the heads, so that the result does not depend on the number of ranks. */
    void (*qk_norm)(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                    float eps, const struct kern_batch *batch);
    void (*write_kv)(struct kern *kern, int layer, const float *qkv,
                     const float *log_beta /* [rows, heads_kv] or NULL = 0 */,
                     const struct kern_batch *batch);
    void (*attend)(struct kern *kern, int layer,
                   float *out /* [rows, heads_q * numbers of a value] */, const float *qkv,
                   const struct kern_batch *batch,
                   const struct kern_attend_options *options); /* after write_kv of the layer */
    /* Makes room for products of loaded matrices, one for each head (latent_in, latent_out).
     * ERR_NOMEM. NULL: this backend has neither. */
    int (*latent_reserve)(struct kern *kern, struct kern_weight *const *weights /* [heads] */,
                          int heads);
    /* Makes rows of qkv for latent attention, before rotation: of rows of q, [still | turned] of
     * each head, and of rows of `entries`, c before its norm and what rotates. NULL: this backend
     * has none. */
    void (*latent_in)(struct kern *kern, float *qkv, const float *q, const float *entries,
                      const struct kern_latent *latent, int rows);
    /* y[r, h] = up_v[h] x[r, h], of the results of attention, [rows, heads * rank]. NULL: this
     * backend has none. */
    void (*latent_out)(struct kern *kern, float *y /* [rows, heads * dim_v] */, const float *x,
                       const struct kern_latent *latent, int rows);
    /* A short convolution (LFM2, arXiv 2511.23404) of each channel c by itself:
     *   u[t] = B[t] x[t],  y[t] = C[t] (taps[c][0] u[t - width + 1] + ... + taps[c][width - 1]
     * u[t]) in ascending order of the tokens. u of tokens before the step is in the recurrent state
     * `state` of each span's slot, whose units are channels of width - 1 numbers, the oldest first;
     * the state is brought forward by the step. Rows of bcx are [B | C | x]. NULL: this backend
     * has none. */
    void (*short_conv)(struct kern *kern, int state, float *y /* [rows, channels] */,
                       const float *bcx, const float *taps /* [channels, width] */, int channels,
                       int width, const struct kern_batch *batch);
    /* A gated delta rule. Rows of `in` are [q | k | v | z] of all heads, rows of `rates` [b | a],
     * [2 heads_v], whole on every rank; both are used up. q, k and v become SiLU of their short
     * convolutions, q and k are divided by their lengths, q by sqrt(dim_k). For each token,
     *   S <- exp(decay softplus(a + bias)) S,  S <- S + k (x) sigmoid(b) (v - S k),  y = S q,
     * then y <- norm rms(y) SiLU(z) of each head. States as for short_conv; their units are key
     * heads (kern_delta_head_floats). NULL: this backend has none. */
    void (*delta)(struct kern *kern, int state, float *y /* [rows, heads_v * dim_v] */, float *in,
                  float *rates, const struct kern_delta *delta, const struct kern_batch *batch);
    /* Mamba-2. Rows of `in` are [z | x] of all heads; rows of `shared`, whole on every rank, are
     * [B | C] of all groups, then [dt] of all heads; both are used up. x, B and C become SiLU of
     * their short convolutions. For each token and head, with r = softplus(dt + bias),
     *   S <- exp(decay r) S + B (x) r x,  y = C S + skip x,
     * then y <- y SiLU(z) and, with a norm, y <- norm rms(y) over the heads of a group together.
     * States as for short_conv; their units are heads (kern_mamba_head_floats), in front of which
     * are the numbers of B's and C's channels. NULL: this backend has none. */
    void (*mamba)(struct kern *kern, int state, float *y /* [rows, heads * dim] */, float *in,
                  float *shared, const struct kern_mamba *mamba, const struct kern_batch *batch);
    /* Measures what the layer's entries are worth to the step's queries: kernels/worth.h. NULL:
     * this backend cannot. */
    int (*worth)(struct kern *kern, int layer, const struct kern_worth *worth, const float *heads,
                 const float *qkv, const struct kern_batch *batch,
                 const struct kern_attend_options *options);
    int (*evict)(struct kern *kern, const struct kern_evict *due, int count);
    /* Drops entries at or after pos. ERR_UNSUPPORTED: the slot has recurrent states that such
     * tokens have brought forward. After a step that peeks it must come before the slot's next
     * step, and the caller then calls short_conv, delta and mamba again for the tokens that are
     * left. */
    int (*truncate)(struct kern *kern, int slot, int32_t pos);
    /* NULL: this backend cannot shift. ERR_FULL (no free pages for copies of shared pages) changes
     * nothing. */
    int (*shift)(struct kern *kern, const struct kern_shift *shift);
    int (*fork)(struct kern *kern, int from,
                int to);                          /* shares all pages, copy on write; `to` empty */
    void (*release)(struct kern *kern, int slot); /* frees all pages of the slot */
    int (*report)(struct kern *kern, int slot, struct kern_report *report);
    /* Snapshots, block by block, so that a large one can be copied over many steps: a slot that no
     * batch names does not change, not even through its forks. */
    size_t (*snapshot_size)(struct kern *kern, int slot, int block); /* 0: the device failed */
    int (*snapshot_export)(struct kern *kern, int slot, int block, void *to);
    /* Are these the blocks of a slot that has seen `tokens` tokens? Reads nothing beyond them,
     * whatever they hold. ERR_MALFORMED, ERR_UNSUPPORTED, ERR_LIMIT (more positions than this cache
     * has) or ERR_NOMEM say why they cannot be imported; otherwise *report holds entries, pages and
     * members. Any thread, once the cache is open. */
    int (*snapshot_check)(struct kern *kern, const struct kern_block *blocks, int count,
                          int32_t tokens, struct kern_report *report, struct fault *fault);
    /* Imports one of the checked blocks, so that a large snapshot can be imported over many steps:
     * block 0 first, into an unused slot, then every other block once; the slot is usable when it
     * has all. After ERR_FULL, ERR_NOMEM or ERR_DEVICE, release frees what was imported. */
    int (*snapshot_import)(struct kern *kern, int slot, int block, const struct kern_block *from);
    void (*cache_stats)(struct kern *kern, struct kern_cache_stats *stats);
    int (*cache_check)(struct kern *kern,
                       struct fault *fault); /* every page is in exactly one place; for tests */

    /* Samples tokens and returns the result of `sync`: if there was no error, `out` is filled. */
    int (*sample)(struct kern *kern, const float *logits /* [rows, vocab] */, int rows, int vocab,
                  const struct kern_sample *params, struct kern_sampled *out);
    int (*sync)(struct kern *kern);
};

struct kern {
    const struct kern_ops *ops;
};

#endif
