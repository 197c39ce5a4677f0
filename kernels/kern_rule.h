/* How a sequence evicts: the eviction methods as parameters of one pipeline. paging/policy.c has a
 * rule for every published method; kernels/rule.h answers questions about rules. */
#ifndef KEEPD_KERNELS_KERN_RULE_H
#define KEEPD_KERNELS_KERN_RULE_H

#include <stdbool.h>
#include <stdint.h>

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

#endif
