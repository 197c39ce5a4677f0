/* Shared by the files of the pool of expressions: node.c (memory, interning, constructors),
 * node_derive.c (byte classes, derivatives, the search for a string) and node_near.c. Contracts are
 * those of constrain/node.h. */
#ifndef KEEPD_CONSTRAIN_NODE_INT_H
#define KEEPD_CONSTRAIN_NODE_INT_H

#include "constrain/node.h"

#define LIST_PER_WORK 8u /* elements of a list that one unit of work sorts */

/* Adds a child of an ALT or AND to the list in scratch; children of the same kind are taken apart.
 */
void node_push_flat(struct node_pool *pool, enum node_kind kind, uint32_t id);
/* Makes a conjunction of scratch[mark, ...) and drops that part, as node_list_alt does for
 * alternatives. */
uint32_t node_list_and(struct node_pool *pool, uint32_t mark);

/* Returns whether the structure alone shows that the language holds a string. */
bool node_surely_alive(struct node_pool *pool, uint32_t id);

/* Returns a remembered answer to a question about a node. `question`: a number from 0 to 255.
 * Answers lie in the same table as derivatives. */
bool node_recall(const struct node_pool *pool, uint32_t id, uint32_t question, uint32_t *answer);
void node_note(struct node_pool *pool, uint32_t id, uint32_t question, uint32_t answer);

/* Functions about the memory of remembered derivatives. */
void node_derivatives_forget(struct node_pool *pool);
void node_derivatives_free(struct node_pool *pool);
size_t node_derivatives_bytes(const struct node_pool *pool);
void node_derivatives_prepare(struct node_pool *pool);

#endif
