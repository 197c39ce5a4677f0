/* Puts the rules of a language in order before an automaton runs them. */
#ifndef KEEPD_CONSTRAIN_RULES_H
#define KEEPD_CONSTRAIN_RULES_H

#include "constrain/node.h"

/* Replaces the names of short regular rules by their bodies, drops what can never end (a rule
 * that always needs itself again), and turns direct left recursion (expr: expr "+" term | term)
 * into repetition. The result stands for `root`; NODE_NONE: no string. ERR_UNSUPPORTED: a
 * rule begins with itself by way of other rules; *rule is one of these rules. Errors of the pool.
 */
int rules_prepare(struct node_pool *pool, uint32_t root, uint32_t *out, uint32_t *rule);

#endif
