/* Prepares the rules of a language before an automaton runs them. */
#ifndef KEEPD_CONSTRAIN_RULES_H
#define KEEPD_CONSTRAIN_RULES_H

#include "constrain/node.h"

/* Replaces the names of short regular rules by their bodies, drops parts that can never end (a rule
 * that always needs itself again), and turns direct left recursion (expr: expr "+" term | term)
 * into repetition. *out replaces `root`; NODE_NONE: the language has no string. ERR_UNSUPPORTED:
 * *rule begins with itself by way of other rules. Errors of the pool are returned, too. */
int rules_prepare(struct node_pool *pool, uint32_t root, uint32_t *out, uint32_t *rule);

#endif
