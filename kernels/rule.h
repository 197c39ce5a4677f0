/* Questions about rules that every backend asks. NULL is the rule of a sequence that never evicts.
 */
#ifndef KEEPD_KERNELS_RULE_H
#define KEEPD_KERNELS_RULE_H

#include "kernels/kern_rule.h"

/* Number of queries that the rule observes. */
static inline int32_t rule_window(const struct kern_rule *rule) {
    return rule && rule->score == KERN_SCORE_ATTENTION ? rule->observe.window : 0;
}

/* Does the rule add up the attention of every query? */
static inline bool rule_adds(const struct kern_rule *rule) {
    if (!rule || rule->score != KERN_SCORE_ATTENTION) return false;
    bool unused = rule->redundancy.on && !(rule->redundancy.lambda > 0);
    return rule->observe.global || (rule->observe.window == 0 && !unused);
}

/* Does the rule observe attention, or compare keys? */
static inline bool rule_reads_keys(const struct kern_rule *rule) {
    return rule_window(rule) > 0 || rule_adds(rule) || (rule && rule->redundancy.on);
}

/* kern_rule.floor in whole parts of RULE_FLOOR_PARTS: a float32 of 0.2 is slightly more. */
#define RULE_FLOOR_PARTS 10000
static inline int64_t rule_floor(const struct kern_rule *rule) {
    return (int64_t)((double)rule->floor * RULE_FLOOR_PARTS + 0.5);
}

static inline bool rule_classes(const struct kern_rule *rule) {
    return rule && rule->merge == KERN_MERGE_CLASSES;
}

#endif
