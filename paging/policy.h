/* The policy table: one row for each eviction method. A row has the method's name, its
 * requirements, the parameters that a request may set, and its rule (kernels/kern_rule.h): how
 * entries are observed and scored, how the total is split over layers, which entries compete, which
 * are protected and which are merged. The backend carries the rule out. A method that a rule can
 * describe needs only a new row. */
#ifndef KEEPD_PAGING_POLICY_H
#define KEEPD_PAGING_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "kernels/kern_rule.h"

#define POLICY_NEEDS_GATES 1u

/* Parameters that a request may choose, by name (kv_params_choose); the others are part of what the
 * method is. Every bounded policy has budget, buffer, chunk, sinks and recent. */
enum policy_field {
    POLICY_HORIZON = 1u << 0,   /* "horizon" */
    POLICY_WINDOW = 1u << 1,    /* "window": queries observed */
    POLICY_DECAY = 1u << 2,     /* "decay" of the history */
    POLICY_HISTORY = 1u << 3,   /* "history": none, max, mean, sum */
    POLICY_LAMBDA = 1u << 4,    /* "lambda": importance against redundancy */
    POLICY_FLOOR = 1u << 5,     /* "floor": part of the budget that every head keeps for itself */
    POLICY_THRESHOLD = 1u << 6, /* "threshold": entries with less retention are evicted */
    POLICY_MERGE = 1u << 7,     /* "merge": none, paper, code */
    POLICY_VARIANT = 1u << 8,   /* "variant": code, paper */
    POLICY_PARITY = 1u << 9,    /* "parity": published offsets, or the published artefact */
    POLICY_RECENT = 1u << 10,   /* for kv_params_fit alone */
    POLICY_SINKS = 1u << 11,
    POLICY_GAMMA = 1u << 12,     /* "gamma": tokens remembered, as a multiple of the budget */
    POLICY_TAU = 1u << 13,       /* "tau": likeness above which an entry joins a class */
    POLICY_POSITIONS = 1u << 14, /* "positions": members keep their own positions */
    POLICY_TAU1 = 1u << 15,      /* "tau1", "tau2": temperatures of CAKE's layers */
    POLICY_TAU2 = 1u << 16,
    POLICY_LAG = 1u << 17 /* "lag": how many entries a part has */
};

struct policy {
    const char *name; /* as in requests, options and metrics */
    const char *summary;
    unsigned needs, fields;
    bool bounded;      /* false: keeps everything that a later query can see (full) */
    float recent_part; /* recent entries as a fraction of the budget, at most rule.recent if that is
                          not 0; 0: rule.recent entries */
    struct kern_rule rule; /* defaults included */
};

const struct policy *policy_find(const char *name); /* NULL when unknown */
const struct policy *policy_at(int index);          /* NULL past the end: for lists and messages */

/* The kv parameters of one request, after defaults: constant for a sequence's life. */
struct kv_params {
    const struct policy *policy;
    int32_t budget;         /* M: entries per stream that are kept on average; ignored by full */
    int32_t buffer;         /* tokens by which a sequence may exceed M before it evicts */
    int32_t chunk;          /* C: prompt tokens between evictions while prefilling */
    int32_t sliding_window; /* the model's, the longest of its layers; 0: no layer has one */
    int32_t places;         /* the model's positions, if a text that uses them up is shifted
                               (kernels/places.h); 0: it has no more tokens than the model has positions */
    bool whole; /* the model has recurrent states, so what a sequence holds cannot be shortened */
    struct kern_rule rule;
};

/* Returns whether the policy is unbounded but the model has a sliding window: then a sequence
 * evicts, at the same points as under a bounded policy, only the entries that no later query can
 * see. */
static inline bool kv_params_expires(const struct kv_params *params) {
    return !params->policy->bounded && params->sliding_window > 0;
}

/* Replaces the policy and sets its defaults; budget, buffer, chunk and the sliding window stay. */
void kv_params_set_policy(struct kv_params *params, const struct policy *policy);
/* The settings with which retention gates were trained, according to their file. `named` says which
 * of them are known: POLICY_HORIZON, POLICY_SINKS, POLICY_RECENT, POLICY_PARITY. */
struct kv_trained {
    unsigned named;
    float horizon;
    int32_t sinks, recent;
    bool parity;
};
/* Makes these settings the defaults of a policy that ranks by gates and lets requests choose the
 * horizon (`global`). Every other policy keeps its own defaults. */
void kv_params_set_trained(struct kv_params *params, const struct kv_trained *trained);
/* Sets a parameter of the method: `text` if the value is a word, else `number` (0 or 1 for false
 * and true). ERR_INVALID names the field: unknown, not this policy's, or out of range. */
int kv_params_choose(struct kv_params *params, const char *name, double number, const char *text,
                     struct fault *fault);
/* Adapts defaults to the chosen parameters; must be called after the last choice. `named`: which of
 * sinks, recent and the parameters above the request has set; they do not change. The default of
 * recent follows the budget or the window. If protected entries exceed the budget, defaults are
 * reduced: recent first, then sinks. */
void kv_params_fit(struct kv_params *params, unsigned named);

/* The chosen parameters of a method, for a file: those that differ from the policy's own, in
 * the order of their bits. A word is stored as its index in the list of docs/API.md, from 0. */
enum { KV_CHOICES_MAX = 7 };
struct kv_choices {
    uint32_t fields; /* bits of enum policy_field */
    float values[KV_CHOICES_MAX];
};
void kv_params_write(const struct kv_params *params, struct kv_choices *out);
/* Sets the choices in *params, which have the policy's defaults. Every value is checked, because it
 * comes from a file: ERR_INVALID as kv_params_choose. Values set before the refused one stay. */
int kv_params_read(struct kv_params *params, const struct kv_choices *choices, struct fault *fault);

/* ERR_INVALID names the field ("kv.budget", ...): 1 <= budget, sinks + recent <= budget, evictions
 * within KV_EVICTION_ROWS_MAX, ...
 * Only ranges are checked for parameters that the policy does not use. */
int kv_params_check(const struct kv_params *params, struct fault *fault);
/* The cost of an eviction of `held` entries per stream at most, in rows. One row is the attention
 * of one token to as many entries, keys and values, and to no fewer than `row_entries`: a token
 * costs more than its attention, so evictions of short streams count by their length. For each
 * stream
 *
 *   scores, the cutoff and closing the gaps     1
 *   queries asked again (observe.window)        window / 2, for keys only; times gamma with classes
 *   redundancy                                  held / 2: in the worst case each key meets all;
 *                                               1/2 where nothing is forgiven, 2 with a lag
 *   merging (D2O)                               (held - M) / 2: evicted keys meet kept keys
 *   classes (EMS)                               held - M: keys and values
 *
 * times held / max(held, row_entries), rounded up. At least 1; 0 where nothing is evicted. And,
 * however few entries are held
 *
 *   queries rotated ahead (observe.expect)      window times KV_EXPECT_ENTRIES / max(held,
 *                                               row_entries): sines and cosines of every pair of
 *                                               numbers, measured; rounded up, too */
#define KV_ROW_ENTRIES    1024
#define KV_EXPECT_ENTRIES 512
int64_t kv_eviction_rows(const struct kv_params *params, int64_t held, int64_t row_entries);

/* The most rows that an eviction may cost, divided by the number of tokens between two evictions:
 * kv.buffer (at least 1) in an answer, kv.chunk in a prompt, with streams at their longest.
 * kv_params_check refuses more, because such a request would take a multiple of the time that its
 * tokens account for. */
#define KV_EVICTION_ROWS_MAX 64

/* Returns the rows of a shift of at most `held` entries per stream: keys are read, rotated and
 * written once. */
int64_t kv_shift_rows(int64_t held, int64_t row_entries);

/* Checks that a model with `positions` positions can shift sequences with these parameters.
 * ERR_UNSUPPORTED or ERR_INVALID name the obstacle: kv.overflow or kv.budget. */
int kv_params_check_shift(const struct kv_params *params, int32_t positions, struct fault *fault);

/* Returns whether both keep the same entries of the same sequence as long as both may continue it.
 * `places` does not matter: it only decides whether a text may go on. */
bool kv_params_equal(const struct kv_params *a, const struct kv_params *b);

/* The budget as clients see it: -1 = everything is kept. */
static inline int32_t kv_params_shown_budget(const struct kv_params *params) {
    return params->policy->bounded ? params->budget : -1;
}

#endif
