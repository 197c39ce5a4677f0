/* Sets of Unicode characters (scalar values), and expressions for their UTF-8 bytes. No expression
 * contains surrogates. Errors (no memory) stick in `failed`. */
#ifndef KEEPD_CONSTRAIN_UNICODE_H
#define KEEPD_CONSTRAIN_UNICODE_H

#include "constrain/node.h"

#define POINT_MAX 0x10FFFFu

struct point_range {
    uint32_t first, last;
};

struct point_set {
    struct point_range *ranges;
    uint32_t count, capacity;
    bool failed;
};

void point_set_close(struct point_set *set);
void point_set_add(struct point_set *set, uint32_t first, uint32_t last);
void point_set_join(struct point_set *set, const struct point_set *other);
void point_set_negate(struct point_set *set);
void point_set_fold(struct point_set *set); /* adds the other case of ASCII letters */
uint32_t point_set_node(struct node_pool *pool, struct point_set *set);

/* Returns the expression of any single character, and that of any text, in valid UTF-8. */
uint32_t node_character(struct node_pool *pool);
uint32_t node_any_text(struct node_pool *pool);

/* Reads one character of valid UTF-8 and moves *at past it. */
uint32_t point_read(const char *text, size_t size, size_t *at);

#endif
