/* The table of eviction policies and the parameters of requests: their names, ranges and checks. A
 * method is a row of the table; the comment below says where a row departs from its paper or from
 * the published code. */
#include "paging/policy.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "kernels/places.h"
#include "kernels/score.h"

/* clang-format off */
/* Where a paper and its code disagree, and where they differ from what is done here:
 *
 * All     When a sequence evicts is paging/due.h's rule for every method (after each chunk of the
 *         prompt, then every `buffer` tokens), where papers say after the prompt, every step, or
 *         every interval. One decision per KV head, where some published code selects per query
 *         head and so multiplies the cache by the group. Four sinks by default, where most papers
 *         protect none: losing the first tokens has turned other engines' output to garbage.
 *         A budget counts protected entries. Keys stay at their true positions as long as nothing
 *         is shifted.
 * streaming   StreamingLLM (arXiv 2309.17453) re-rotates entries to their place in the cache; here
 *         only a sequence that is shifted does so, when the model's positions are used up.
 * trimkv, global   arXiv 2512.03324 and 2605.09649. `parity` takes the published offsets of age.
 *         Floor and threshold are the published code's; a threshold never lifts the budget, and is
 *         one of the mean retention over the horizon (with `parity`, of the published sum).
 *         global keeps the last 16 tokens, which the paper does not: an eviction in the middle of a
 *         sentence otherwise takes entries that the next tokens need, before the gates' soft decay
 *         of training would have (bench/results/nano/QUALITY.md, ablations). trimkv does not gain by it.
 * gkv     arXiv 2512.00504. Code: the budget includes the window (the paper's b does not); window
 *         16 and lambda 0.5 are the scripts' and the paper's, not the class's defaults. Attention
 *         is divided by its largest also with `history` none (code: only with a history).
 * rkv     arXiv 2505.24133. `variant` code: averages over the window, then smooths by maxima;
 *         redundancy over all entries. paper: smooths each query, redundancy over the candidates.
 *         Equations 5 and 6 (`variant` paper) forgive an entry that has a look-alike; the code
 *         forgives the newest look-alike. Lambda 0.1 is the paper's (code: 0.07); one look-alike
 *         counts, as in the code (paper: beta of them). `parity`: rows without look-alike lose the
 *         element of entry 0.
 * snapkv  arXiv 2404.14469, repeated at every eviction as later papers do for generation; mean over
 *         the group; smoothing by averages over 5.
 * pyramidkv   arXiv 2406.02069. The published integer step overshoots the total by up to
 *         L (L - 1) / 2 entries; here the same line in real numbers, rounded to the exact total.
 *         Where the first layers do not hold as much yet, the others get the rest by their weights
 *         (code: a flatter line, and an even split of short prompts).
 * adakv   arXiv 2407.11550: floor 0.2 of the layer's allotment, the rest to the best of all its
 *         heads. The published rounding loses entries; this one does not.
 * morphkv arXiv 2503.00979, sum-fused. The published code keeps a log of logits that comes apart
 *         under GQA; here the window's queries are asked again.
 * cake    arXiv 2503.12491. Every eviction uses mean + 200 variance over the window; the published
 *         code does so for the prompt and asks only the last query while generating. Layers'
 *         allotments are measured at the first eviction. The paper chooses tau1 and tau2 for each
 *         model; the defaults of 1 are the code's.
 * tova    arXiv 2401.06104: attention of the last query. Every KV head averages over the query
 *         heads of its own group and decides for itself.
 * expected_attention   arXiv 2510.00636. Mean and covariance are those of the last 64 queries (the
 *         paper: of all queries of the prompt but the first), which are what a sequence
 *         remembers. The next 512 positions, and no constant added to the attention, are the
 *         published code's defaults.
 * keydiff arXiv 2504.15364: entries whose keys resemble the mean of all unit keys go first. That
 *         is redundancy without forgiveness; a softmax does not change the order.
 * knorm   arXiv 2406.11430: entries with the shortest keys stay, in every layer.
 * lagkv   arXiv 2504.04704. Parts are formed anew at every eviction, from what is held; one budget
 *         takes the place of a share of each part. The last whole part and what follows it are
 *         kept first, newest first.
 * h2o     arXiv 2306.14048: attention of all queries added up, half of the budget recent.
 * kvcompress   arXiv 2410.00161: squared attention of all queries, all heads compete (code: of a
 *         prompt's queries the last 32 by default, and none closer to the key than a buffer).
 *         Evicts entries, not whole pages: compaction frees pages in any case.
 * d2o     arXiv 2406.13035. Layers' allotments as in the code; the paper's own density, the plain
 *         variance of the sums, underflows the softmax on long prompts. No layer is exempt: the
 *         code leaves 0, 1 and the last uncompressed, which no budget bounds. One in four kept
 *         entries is recent (paper's 3:1; README 1:1). Every stream has its own threshold and each
 *         evicted entry is judged by itself (code: one decision for all heads).
 * ems     arXiv 2412.08521, which has no public code: these are our readings. The window's queries
 *         are asked again at each eviction, which is the paper's s_loc; its past and current sums
 *         come near that while generating. Every query of a long prompt is added up (paper: half of
 *         them), also over the group's heads; means are over candidates. A class is scored by the
 *         attention it gets as a whole, and that added up is its weight in a merge (the paper:
 *         attention scores). The centre's direction is brought back to the length of its own key
 *         (not stated). A class that joins another takes its members along; one in the zero class
 *         loses them. Of too many members the oldest go (the paper drops one, and does not say
 *         which). Sinks may be centres, recent entries never are (paper: no sinks). gamma 4, tau
 *         0.6, with positions; `positions` false is the paper's more aggressive form. What dropped
 *         tokens gave to a class stays in it, as with d2o. */
/* clang-format on */
/* For methods without a window of queries to protect, which their papers leave without recent
 * tokens, too. Measured on two real models with budgets of 256 (docs/POLICIES.md); small budgets
 * protect a quarter of theirs. */
#define RECENT_OWN    32
#define WINDOW(count) .score = KERN_SCORE_ATTENTION, .sinks = 4, .recent = (count)

static const struct policy policies[] = {
    {
        .name = "full",
        .summary = "keeps every entry that a later token can see; memory grows with the text",
    },
    {
        .name = "streaming",
        .summary = "keeps the first and the most recent tokens",
        .bounded = true,
        .rule = {.score = KERN_SCORE_RECENCY, .sinks = 4},
    },
    {
        .name = "trimkv",
        .summary = "retention gates; every head keeps its own best entries",
        .needs = POLICY_NEEDS_GATES,
        .fields = POLICY_THRESHOLD | POLICY_PARITY,
        .bounded = true,
        .rule = {.score = KERN_SCORE_RETENTION, .sinks = 4, .horizon = 1},
    },
    {
        .name = "global",
        .summary = "retention gates; one ranking across all layers and heads",
        .needs = POLICY_NEEDS_GATES,
        .fields = POLICY_HORIZON | POLICY_FLOOR | POLICY_THRESHOLD | POLICY_PARITY,
        .bounded = true,
        .rule = {.score = KERN_SCORE_RETENTION,
                 .scope = KERN_SCOPE_SEQUENCE,
                 .sinks = 4,
                 .recent = 16,
                 .horizon = 128},
    },
    {
        .name = "gkv",
        .summary = "attention of the last 16 queries with a decayed history, less key redundancy",
        .fields = POLICY_WINDOW | POLICY_DECAY | POLICY_HISTORY | POLICY_LAMBDA,
        .bounded = true,
        .rule = {WINDOW(16),
                 .observe = {.window = 16,
                             .group = KERN_GROUP_MAX,
                             .normalise = true,
                             .history = KERN_HISTORY_MAX,
                             .decay = 0.8f},
                 .redundancy = {.on = true,
                                .lambda = 0.5f,
                                .threshold = 0.5f,
                                .eps = 1e-6f,
                                .normalise = true}},
    },
    {
        .name = "rkv",
        .summary = "attention of the last 8 queries, less key redundancy",
        .fields = POLICY_WINDOW | POLICY_LAMBDA | POLICY_VARIANT | POLICY_PARITY,
        .bounded = true,
        .rule = {WINDOW(8),
                 .observe = {.window = 8,
                             .support = KERN_SUPPORT_CANDIDATES,
                             .group = KERN_GROUP_MAX_LOGIT,
                             .smooth = KERN_SMOOTH_MAX,
                             .smooth_width = 7},
                 .redundancy = {.on = true, .lambda = 0.1f, .threshold = 0.5f, .eps = 1e-8f}},
    },
    {
        .name = "snapkv",
        .summary = "attention of the last 32 queries, smoothed by averages; mean over the group",
        .fields = POLICY_WINDOW,
        .bounded = true,
        .rule = {WINDOW(32), .observe = {.window = 32,
                                         .reduce = KERN_REDUCE_SUM,
                                         .smooth = KERN_SMOOTH_AVERAGE,
                                         .smooth_width = 5}},
    },
    {
        .name = "pyramidkv",
        .summary = "attention of the last 8 queries; lower layers keep more",
        .fields = POLICY_WINDOW,
        .bounded = true,
        .rule = {WINDOW(8), .layers = KERN_LAYERS_PYRAMID, .pyramid_beta = 20,
                 .observe = {.window = 8, .smooth = KERN_SMOOTH_MAX, .smooth_width = 7}},
    },
    {
        .name = "adakv",
        .summary = "attention of the last 32 queries; the heads of a layer compete",
        .fields = POLICY_WINDOW | POLICY_FLOOR,
        .bounded = true,
        .rule = {WINDOW(32), .scope = KERN_SCOPE_LAYER, .floor = 0.2f,
                 .observe = {.window = 32, .smooth = KERN_SMOOTH_MAX, .smooth_width = 7}},
    },
    {
        .name = "morphkv",
        .summary = "what the last 32 queries attend to together (sum-fused)",
        .fields = POLICY_WINDOW,
        .bounded = true,
        .rule = {WINDOW(33), .observe = {.window = 32,
                                         .support = KERN_SUPPORT_CANDIDATES,
                                         .group = KERN_GROUP_SUM_LOGIT,
                                         .reduce = KERN_REDUCE_SUM}},
    },
    {
        .name = "cake",
        .summary = "mean and variance of the last 32 queries' attention; layers by preference",
        .fields = POLICY_WINDOW | POLICY_TAU1 | POLICY_TAU2,
        .bounded = true,
        .rule = {WINDOW(32), .layers = KERN_LAYERS_PREFERENCE, .tau1 = 1, .tau2 = 1,
                 .observe = {.window = 32,
                             .group = KERN_GROUP_EACH,
                             .reduce = KERN_REDUCE_MEAN_VAR,
                             .gamma = 200,
                             .smooth = KERN_SMOOTH_AVERAGE,
                             .smooth_width = 5}},
    },
    {
        .name = "h2o",
        .summary = "attention of all queries added up; half of the budget is recent",
        .bounded = true,
        .recent_part = 0.5f,
        .rule = {WINDOW(0), .observe = {.group = KERN_GROUP_SUM, .reduce = KERN_REDUCE_SUM}},
    },
    {
        .name = "kvcompress",
        .summary = "squared attention of all queries added up; one ranking across all heads",
        .bounded = true,
        .rule = {WINDOW(64), .scope = KERN_SCOPE_SEQUENCE,
                 .observe = {.group = KERN_GROUP_SQUARES, .reduce = KERN_REDUCE_SUM}},
    },
    {
        .name = "d2o",
        .summary = "attention of all queries added up; layers by density; evicted entries merge",
        .fields = POLICY_MERGE,
        .bounded = true,
        .recent_part = 0.25f,
        .rule = {WINDOW(0), .layers = KERN_LAYERS_DENSITY, .merge = KERN_MERGE_PAPER,
                 .merge_beta = 0.7f,
                 .observe = {.group = KERN_GROUP_SUM, .reduce = KERN_REDUCE_SUM}},
    },
    {
        .name = "ems",
        .summary = "attention of all and of the last 32 queries; similar entries share one",
        .fields = POLICY_WINDOW | POLICY_GAMMA | POLICY_TAU | POLICY_POSITIONS,
        .bounded = true,
        .rule = {WINDOW(32), .merge = KERN_MERGE_CLASSES,
                 .classes = {.gamma = 4, .tau = 0.6f, .positions = true},
                 .observe = {.window = 32,
                             .group = KERN_GROUP_SUM,
                             .reduce = KERN_REDUCE_SUM,
                             .global = true,
                             .smooth = KERN_SMOOTH_AVERAGE,
                             .smooth_width = 7}},
    },
    {
        .name = "tova",
        .summary = "attention of the last query; mean over the group",
        .fields = POLICY_WINDOW,
        .bounded = true,
        .rule = {WINDOW(1), .observe = {.window = 1}},
    },
    {
        .name = "expected_attention",
        .summary = "attention that the next queries, if they are like the last, will give",
        .bounded = true,
        .recent_part = 0.25f,
        .rule = {WINDOW(RECENT_OWN), .observe = {.window = 64, .expect = 512}},
    },
    {
        .name = "keydiff",
        .summary = "keys that differ from the mean of all keys",
        .bounded = true,
        .recent_part = 0.25f,
        .rule = {WINDOW(RECENT_OWN), .redundancy = {.on = true, .threshold = 1}},
    },
    {
        .name = "knorm",
        .summary = "the shortest keys",
        .bounded = true,
        .recent_part = 0.25f,
        .rule = {WINDOW(RECENT_OWN), .redundancy = {.on = true, .measure = KERN_MEASURE_LENGTH}},
    },
    {
        .name = "lagkv",
        .summary = "keys and values that the entries after them do not explain",
        .fields = POLICY_LAG,
        .bounded = true,
        .rule = {WINDOW(0), .redundancy = {.on = true, .measure = KERN_MEASURE_LAG, .lag = 128}},
    },
};

#define POLICY_COUNT ((int)(sizeof policies / sizeof *policies))

const struct policy *policy_at(int index) {
    return index >= 0 && index < POLICY_COUNT ? &policies[index] : NULL;
}

const struct policy *policy_find(const char *name) {
    for (int i = 0; i < POLICY_COUNT; i++)
        if (strcmp(policies[i].name, name) == 0) return &policies[i];
    return NULL;
}

void kv_params_set_policy(struct kv_params *params, const struct policy *policy) {
    params->policy = policy;
    params->rule = policy->rule;
}

void kv_params_set_trained(struct kv_params *params, const struct kv_trained *trained) {
    struct kern_rule *rule = &params->rule;
    if ((params->policy->fields & POLICY_HORIZON) == 0) return;
    if (trained->named & POLICY_HORIZON) rule->horizon = trained->horizon;
    if (trained->named & POLICY_SINKS) rule->sinks = trained->sinks;
    if (trained->named & POLICY_RECENT) rule->recent = trained->recent;
    if (trained->named & POLICY_PARITY) rule->published = trained->parity;
}

/* ---- Parameters of a method ---- */

/* Most parameters are one member of the rule. */
#define MEMBER(name, type, place)                                                                  \
    static void set_##name(struct kern_rule *rule, double x) {                                     \
        rule->place = (type)x;                                                                     \
    }                                                                                              \
    static double get_##name(const struct kern_rule *rule) {                                       \
        return (double)rule->place;                                                                \
    }

MEMBER(horizon, float, horizon)
MEMBER(window, int32_t, observe.window)
MEMBER(decay, float, observe.decay)
MEMBER(history, enum kern_history, observe.history)
MEMBER(lambda, float, redundancy.lambda)
MEMBER(floor, float, floor)
MEMBER(threshold, float, retain)
MEMBER(gamma, float, classes.gamma)
MEMBER(tau, float, classes.tau)
MEMBER(positions, bool, classes.positions)
MEMBER(tau1, float, tau1)
MEMBER(tau2, float, tau2)
MEMBER(lag, int32_t, redundancy.lag)

static double get_merge(const struct kern_rule *rule) {
    return (double)rule->merge;
}

/* In the published code the threshold is a running mean that weighs old and new values equally; in
 * the paper the new value counts more. */
static void set_merge(struct kern_rule *rule, double x) {
    rule->merge = (enum kern_merge)(int)x;
    rule->merge_beta = rule->merge == KERN_MERGE_CODE ? 0.5f : 0.7f;
}

static double get_variant(const struct kern_rule *rule) {
    return rule->redundancy.candidates_only;
}

static void set_variant(struct kern_rule *rule, double x) {
    rule->observe.smooth_first = rule->redundancy.candidates_only = rule->redundancy.own = x != 0;
}

static double get_parity(const struct kern_rule *rule) {
    return rule->published || rule->redundancy.index_zero;
}

static void set_parity(struct kern_rule *rule, double x) {
    rule->published = rule->score == KERN_SCORE_RETENTION && x != 0;
    rule->redundancy.index_zero = rule->redundancy.on && x != 0;
}

/* The number that stands for a word is the word's place in the list. */
static const char *const histories[] = {"none", "max", "mean", "sum", NULL};
static const char *const merges[] = {"none", "paper", "code", NULL};
static const char *const variants[] = {"code", "paper", NULL};

enum parameter_kind { REAL, REAL_OR_INF, WHOLE };

static const struct parameter {
    const char *name;
    unsigned field;
    double least, most;
    enum parameter_kind kind;
    const char *const *words;
    void (*set)(struct kern_rule *rule, double x);
    double (*get)(const struct kern_rule *rule);
} parameters[] = {
    {"horizon", POLICY_HORIZON, 1, SCORE_HORIZON_MAX, REAL_OR_INF, NULL, set_horizon, get_horizon},
    {"window", POLICY_WINDOW, 1, KERN_WINDOW_MAX, WHOLE, NULL, set_window, get_window},
    {"decay", POLICY_DECAY, 0, 1, REAL, NULL, set_decay, get_decay},
    {"history", POLICY_HISTORY, 0, 0, REAL, histories, set_history, get_history},
    {"lambda", POLICY_LAMBDA, 0, 1, REAL, NULL, set_lambda, get_lambda},
    {"floor", POLICY_FLOOR, 0, 1, REAL, NULL, set_floor, get_floor},
    {"threshold", POLICY_THRESHOLD, 0, 1, REAL, NULL, set_threshold, get_threshold},
    {"merge", POLICY_MERGE, 0, 0, REAL, merges, set_merge, get_merge},
    {"variant", POLICY_VARIANT, 0, 0, REAL, variants, set_variant, get_variant},
    {"parity", POLICY_PARITY, 0, 1, WHOLE, NULL, set_parity, get_parity},
    {"gamma", POLICY_GAMMA, 1, KERN_GAMMA_MAX, REAL, NULL, set_gamma, get_gamma},
    {"tau", POLICY_TAU, 0, 1, REAL, NULL, set_tau, get_tau},
    {"positions", POLICY_POSITIONS, 0, 1, WHOLE, NULL, set_positions, get_positions},
    {"tau1", POLICY_TAU1, 0.01, 100, REAL, NULL, set_tau1, get_tau1},
    {"tau2", POLICY_TAU2, 0.01, 100, REAL, NULL, set_tau2, get_tau2},
    {"lag", POLICY_LAG, 2, KERN_LAG_MAX, WHOLE, NULL, set_lag, get_lag},
};
#define PARAMETER_COUNT (sizeof parameters / sizeof *parameters)

static int refuse_parameter(struct fault *fault, const char *name, const char *what) {
    char field[48];
    snprintf(field, sizeof field, "kv.%.40s", name);
    return fault_set(fault, ERR_INVALID, field, "%s", what);
}

static int find_word(const char *const *words, const char *text) {
    for (int i = 0; words[i] && text; i++)
        if (strcmp(words[i], text) == 0) return i;
    return -1;
}

static int refuse_word(const struct parameter *p, struct fault *fault) {
    char what[96] = "must be";
    for (int i = 0; p->words[i]; i++) {
        size_t used = strlen(what);
        const char *before = i == 0 ? " " : p->words[i + 1] ? ", " : " or ";
        snprintf(what + used, sizeof what - used, "%s'%s'", before, p->words[i]);
    }
    return refuse_parameter(fault, p->name, what);
}

static int check_parameter(const struct parameter *p, double *number, const char *text,
                           struct fault *fault) {
    char what[96];
    if (p->words) {
        int at = find_word(p->words, text);
        *number = at;
        if (at < 0) return refuse_word(p, fault);
        return 0;
    }
    bool in_range = *number >= p->least && *number <= p->most; /* NaN is not */
    in_range = in_range || (p->kind == REAL_OR_INF && *number == INFINITY);
    if (!text && in_range && (p->kind != WHOLE || *number == floor(*number))) return 0;
    snprintf(what, sizeof what, "must be a%s number from %g to %g%s",
             p->kind == WHOLE ? " whole" : "", p->least, p->most,
             p->kind == REAL_OR_INF ? " or \"inf\"" : "");
    return refuse_parameter(fault, p->name, what);
}

static int set_parameter(struct kv_params *params, const struct parameter *p, double number,
                         const char *text, struct fault *fault) {
    char what[96];
    snprintf(what, sizeof what, "policy '%s' has no such parameter", params->policy->name);
    if ((params->policy->fields & p->field) == 0) return refuse_parameter(fault, p->name, what);
    int rc = check_parameter(p, &number, text, fault);
    if (rc == 0) p->set(&params->rule, number);
    return rc;
}

int kv_params_choose(struct kv_params *params, const char *name, double number, const char *text,
                     struct fault *fault) {
    for (size_t i = 0; i < PARAMETER_COUNT; i++)
        if (strcmp(parameters[i].name, name) == 0)
            return set_parameter(params, &parameters[i], number, text, fault);
    return refuse_parameter(fault, name, "no policy has such a parameter");
}

/* ---- Parameters as numbers ---- */

void kv_params_write(const struct kv_params *params, struct kv_choices *out) {
    int count = 0;
    *out = (struct kv_choices){0};
    for (size_t i = 0; i < PARAMETER_COUNT; i++) {
        const struct parameter *p = &parameters[i];
        double value = p->get(&params->rule);
        bool chosen = (params->policy->fields & p->field) && value != p->get(&params->policy->rule);
        if (!chosen) continue;
        CHECK(count < KV_CHOICES_MAX); /* no policy has as many */
        out->fields |= p->field;
        out->values[count++] = (float)value;
    }
}

/* Returns the word that a number stands for; NULL: the parameter is a number, or no word has this
 * number. */
static const char *choice_word(const struct parameter *p, float value) {
    int count = 0;
    while (p->words && p->words[count]) count++;
    bool is_one = value >= 0 && value < (float)count && value == floorf(value);
    return is_one ? p->words[(int)value] : NULL;
}

int kv_params_read(struct kv_params *params, const struct kv_choices *choices,
                   struct fault *fault) {
    unsigned left = choices->fields;
    int at = 0;
    for (size_t i = 0; i < PARAMETER_COUNT; i++) {
        const struct parameter *p = &parameters[i];
        if ((left & p->field) == 0) continue;
        if (at == KV_CHOICES_MAX) break;
        float value = choices->values[at++];
        int rc = set_parameter(params, p, (double)value, choice_word(p, value), fault);
        if (rc) return rc;
        left &= ~(unsigned)p->field;
    }
    for (; at < KV_CHOICES_MAX; at++)
        if (choices->values[at] != 0)
            return refuse_parameter(fault, "parameters", "more than are named");
    return left ? refuse_parameter(fault, "parameters", "unknown or too many") : 0;
}

/* Reduces a value to what is left. Negative values stay: kv_params_check refuses them. */
static int32_t at_most(int32_t value, int32_t left) {
    return value <= left ? value : left > 0 ? left : 0;
}

void kv_params_fit(struct kv_params *params, unsigned named) {
    const struct policy *policy = params->policy;
    struct kern_rule *rule = &params->rule;
    bool recent_named = (named & POLICY_RECENT) != 0;
    int32_t claimed = recent_named && rule->recent > 0 ? rule->recent : 0;
    if (params->budget < 0) return;
    if (!recent_named && policy->recent_part > 0) {
        const int32_t part = (int32_t)(policy->recent_part * (float)params->budget);
        rule->recent = policy->rule.recent > 0 ? at_most(policy->rule.recent, part) : part;
    } else if (!recent_named && policy->rule.observe.window > 0)
        rule->recent = policy->rule.recent - policy->rule.observe.window + rule->observe.window;
    if ((named & POLICY_SINKS) == 0) rule->sinks = at_most(rule->sinks, params->budget - claimed);
    if (!recent_named) rule->recent = at_most(rule->recent, params->budget - rule->sinks);
}

/* ---- Checks ---- */

static int check_ranges(const struct kv_params *params, struct fault *fault) {
    const struct {
        const char *field;
        int32_t value, least;
    } fields[] = {{"kv.buffer", params->buffer, 0},
                  {"kv.chunk", params->chunk, 1},
                  {"kv.sinks", params->rule.sinks, 0},
                  {"kv.recent", params->rule.recent, 0}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < fields[i].least)
            return fault_set(fault, ERR_INVALID, fields[i].field, "must be at least %d, not %d",
                             fields[i].least, fields[i].value);
    return 0;
}

static int check_budget(const struct kv_params *params, struct fault *fault) {
    const struct kern_rule *rule = &params->rule;
    if (params->budget < 1)
        return fault_set(fault, ERR_INVALID, "kv.budget", "must be at least 1, not %d",
                         params->budget);
    if (rule->sinks > params->budget)
        return fault_set(fault, ERR_INVALID, "kv.sinks",
                         "must be at most the budget, which is %d, not %d", params->budget,
                         rule->sinks);
    if (rule->recent > params->budget - rule->sinks)
        return fault_set(fault, ERR_INVALID, "kv.recent",
                         "must be at most %d (a budget of %d less %d sinks), not %d",
                         params->budget - rule->sinks, params->budget, rule->sinks, rule->recent);
    return 0;
}

/* Returns twice the rows. In the worst case likeness compares an entry with every
 * other; with a lag, keys and values are each compared with a whole part. */
static int64_t redundancy_halves(const struct kern_redundancy *redundancy, int64_t held) {
    if (redundancy->measure == KERN_MEASURE_LAG) return 4;
    return redundancy->measure == KERN_MEASURE_LIKENESS && redundancy->threshold < 1 ? held : 1;
}

/* Returns the rows that do not depend on the number of entries. */
static int64_t query_rows(const struct kern_observe *observe, int64_t entries) {
    int64_t work = observe->expect > 0 ? (int64_t)observe->window * KV_EXPECT_ENTRIES : 0;
    return (work + entries - 1) / entries;
}

int64_t kv_eviction_rows(const struct kv_params *params, int64_t held, int64_t row_entries) {
    const struct kern_rule *rule = &params->rule;
    if ((!params->policy->bounded && !kv_params_expires(params)) || held <= 0) return 0;
    if (held > INT32_MAX) held = INT32_MAX;
    bool classes = rule->merge == KERN_MERGE_CLASSES;
    int64_t goes = held > params->budget ? held - params->budget : 0;
    int64_t halves = 2;
    halves += (int64_t)((double)rule->observe.window * (classes ? (double)rule->classes.gamma : 1));
    if (rule->redundancy.on) halves += redundancy_halves(&rule->redundancy, held);
    if (classes)
        halves += 2 * goes;
    else if (rule->merge != KERN_MERGE_NONE)
        halves += goes;
    if (held >= row_entries) /* halves * held might not fit */
        return (halves + 1) / 2 + query_rows(&rule->observe, held);
    return (halves * held + 2 * row_entries - 1) / (2 * row_entries) +
           query_rows(&rule->observe, row_entries);
}

/* A shift takes 4 rows: it converts, rotates and rounds each number that attention only multiplies
 * and adds. */
int64_t kv_shift_rows(int64_t held, int64_t row_entries) {
    if (held < 1) held = 1;
    return held >= row_entries ? 4 : (4 * held + row_entries - 1) / row_entries;
}

int kv_params_check_shift(const struct kv_params *params, int32_t positions, struct fault *fault) {
    const char *name = params->policy->name;
    int64_t between = params->chunk > params->buffer ? params->chunk : params->buffer;
    if (!params->policy->bounded)
        return fault_set(fault, ERR_INVALID, "kv.overflow",
                         "\"shift\" needs a policy that evicts: '%s' keeps every entry", name);
    if (params->rule.merge == KERN_MERGE_CLASSES)
        return fault_set(fault, ERR_UNSUPPORTED, "kv.overflow",
                         "policy '%s' remembers tokens by their positions and cannot be shifted",
                         name);
    if (positions < PLACES_LEAST)
        return fault_set(fault, ERR_UNSUPPORTED, "kv.overflow",
                         "a shift needs at least %d positions and the model has %d", PLACES_LEAST,
                         positions);
    if (params->rule.sinks > places_sinks_max(positions))
        return fault_set(
            fault, ERR_INVALID, "kv.sinks",
            "with kv.overflow \"shift\" at most %d of the model's %d positions, not %d",
            places_sinks_max(positions), positions, params->rule.sinks);
    long long most = params->budget + between;
    if (most > places_kept(positions))
        return fault_set(fault, ERR_INVALID, "kv.budget",
                         "with kv.overflow \"shift\" budget and chunk, and budget and buffer, may "
                         "together be at most %d of the model's %d positions, not %lld",
                         places_kept(positions), positions, most);
    return 0;
}

/* A sequence evicts after every `between` tokens beyond the budget. Checks that this is rarely
 * enough for what an eviction costs. */
static int check_cost(const struct kv_params *params, const char *field, int32_t between,
                      struct fault *fault) {
    int64_t tokens = between > 0 ? between : 1;
    int64_t rows = kv_eviction_rows(params, params->budget + tokens, KV_ROW_ENTRIES);
    if (rows <= KV_EVICTION_ROWS_MAX * tokens) return 0;
    return fault_set(fault, ERR_INVALID, field,
                     "is %d: with policy '%s' and a budget of %d an eviction costs up to %lld rows "
                     "and comes after every %lld tokens; it may cost at most %d rows for each of "
                     "them, so name a larger %s or a smaller kv.budget",
                     between, params->policy->name, params->budget, (long long)rows,
                     (long long)tokens, KV_EVICTION_ROWS_MAX, field);
}

int kv_params_check(const struct kv_params *params, struct fault *fault) {
    const struct kern_rule *rule = &params->rule;
    int rc = check_ranges(params, fault);
    if (rc == 0 && rule->score == KERN_SCORE_RETENTION && !(rule->horizon >= 1)) /* NaN fails too */
        rc = fault_set(fault, ERR_INVALID, "kv.horizon", "must be at least 1, not %g",
                       (double)rule->horizon);
    if (rc != 0 || !params->policy->bounded) return rc;
    rc = check_budget(params, fault);
    if (rc == 0) rc = check_cost(params, "kv.buffer", params->buffer, fault);
    return rc == 0 ? check_cost(params, "kv.chunk", params->chunk, fault) : rc;
}

/* Compares rules of the same policy: only what requests may choose can differ. */
static bool rule_equal(const struct kern_rule *x, const struct kern_rule *y) {
    bool equal = x->sinks == y->sinks && x->recent == y->recent;
    for (size_t i = 0; i < PARAMETER_COUNT; i++)
        equal = equal && parameters[i].get(x) == parameters[i].get(y);
    return equal;
}

bool kv_params_equal(const struct kv_params *a, const struct kv_params *b) {
    if (a->policy != b->policy) return false;
    bool same_points = a->buffer == b->buffer && a->chunk == b->chunk;
    if (!a->policy->bounded)
        return a->sliding_window == b->sliding_window && (!kv_params_expires(a) || same_points);
    return a->budget == b->budget && same_points && rule_equal(&a->rule, &b->rule);
}
