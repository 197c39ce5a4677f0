/* Questions about rules that every backend asks. NULL is the rule of a sequence that never evicts.
 */
#ifndef KEEPD_KERNELS_RULE_H
#define KEEPD_KERNELS_RULE_H

#include "kernels/kern.h"

/* Number of queries that the rule observes. */
static inline int32_t rule_window(const struct kern_rule *rule) {
    return rule && rule->score == KERN_SCORE_ATTENTION ? rule->observe.window : 0;
}

/* Does the rule add up the attention of every query? */
static inline bool rule_adds(const struct kern_rule *rule) {
    return rule && rule->score == KERN_SCORE_ATTENTION &&
           (rule->observe.window == 0 || rule->observe.global);
}

static inline bool rule_classes(const struct kern_rule *rule) {
    return rule && rule->merge == KERN_MERGE_CLASSES;
}

#endif
