#include "constrain/unicode.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"

void point_set_close(struct point_set *set) {
    mem_free(set->ranges);
    *set = (struct point_set){0};
}

void point_set_add(struct point_set *set, uint32_t first, uint32_t last) {
    if (set->failed || first > last) return;
    if (set->count == set->capacity) {
        uint32_t capacity = set->capacity > 0 ? set->capacity * 2 : 16;
        struct point_range *grown =
            mem_try_realloc(set->ranges, set->capacity * sizeof *grown, capacity * sizeof *grown);
        if (grown == NULL) {
            set->failed = true;
            return;
        }
        set->ranges = grown;
        set->capacity = capacity;
    }
    set->ranges[set->count++] = (struct point_range){first, last};
}

void point_set_join(struct point_set *set, const struct point_set *other) {
    for (uint32_t i = 0; i < other->count; i++)
        point_set_add(set, other->ranges[i].first, other->ranges[i].last);
    set->failed = set->failed || other->failed;
}

static int compare_ranges(const void *a, const void *b) {
    const struct point_range *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

/* Sorts the ranges and joins those that touch. */
static void normalise(struct point_set *set) {
    uint32_t kept = 0;
    if (set->count == 0) return;
    qsort(set->ranges, set->count, sizeof *set->ranges, compare_ranges);
    for (uint32_t i = 1; i < set->count; i++) {
        struct point_range *last = &set->ranges[kept];
        if (set->ranges[i].first > last->last + 1)
            set->ranges[++kept] = set->ranges[i];
        else if (set->ranges[i].last > last->last)
            last->last = set->ranges[i].last;
    }
    set->count = kept + 1;
}

void point_set_negate(struct point_set *set) {
    uint32_t next = 0;
    normalise(set);
    struct point_set rest = {.failed = set->failed};
    for (uint32_t i = 0; i < set->count; i++) {
        if (set->ranges[i].first > next) point_set_add(&rest, next, set->ranges[i].first - 1);
        next = set->ranges[i].last + 1;
    }
    if (next <= POINT_MAX) point_set_add(&rest, next, POINT_MAX);
    point_set_close(set);
    *set = rest;
}

void point_set_fold(struct point_set *set) {
    for (uint32_t i = 0, count = set->count; i < count; i++) {
        struct point_range range = set->ranges[i];
        for (uint32_t c = 'A'; c <= 'Z'; c++) {
            if (range.first <= c && c <= range.last) point_set_add(set, c + 32, c + 32);
            if (range.first <= c + 32 && c + 32 <= range.last) point_set_add(set, c, c);
        }
    }
}

/* ---- Expressions ---- */

/* The byte sequences of a set of characters, as ranges for each byte: alternatives. */
struct sequences {
    struct node_pool *pool;
    uint32_t *list;
    uint32_t count, capacity;
};

static void add_sequence(struct sequences *s, uint32_t first, uint32_t last) {
    char low[4], high[4];
    uint32_t node = NODE_EMPTY;
    size_t size = utf8_encode(first, low);
    (void)utf8_encode(last, high);
    for (size_t i = size; i-- > 0;)
        node = node_seq(s->pool, node_range(s->pool, (unsigned char)low[i], (unsigned char)high[i]),
                        node);
    if (s->count == s->capacity) {
        uint32_t capacity = s->capacity > 0 ? s->capacity * 2 : 16;
        uint32_t *grown =
            mem_try_realloc(s->list, s->capacity * sizeof *grown, capacity * sizeof *grown);
        if (grown == NULL) {
            s->pool->rc = ERR_NOMEM;
            return;
        }
        s->list = grown;
        s->capacity = capacity;
    }
    s->list[s->count++] = node;
}

/* Splits a range until all continuation bytes of its sequences are independent (as in R. Cox,
 * "Regular expression matching in the wild", 2010). */
static void unicode_split(struct sequences *s, uint32_t first, uint32_t last) {
    static const uint32_t ends[] = {0x7F, 0x7FF, 0xD7FF, 0xDFFF, 0xFFFF};
    if (first > last || s->pool->rc != 0) return;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (first <= ends[i] && ends[i] < last) {
            unicode_split(s, first, ends[i]);
            unicode_split(s, ends[i] + 1, last);
            return;
        }
    if (first >= 0xD800 && last <= 0xDFFF) return;
    int continuations = last <= 0x7F ? 0 : last <= 0x7FF ? 1 : last <= 0xFFFF ? 2 : 3;
    for (int i = 1; i <= continuations; i++) {
        uint32_t low = (1u << 6 * i) - 1;
        if ((first & ~low) == (last & ~low)) continue;
        uint32_t border = (first & low) != 0 ? (first | low) + 1 : last & ~low;
        if ((first & low) == 0 && (last & low) == low) continue;
        unicode_split(s, first, border - 1);
        unicode_split(s, border, last);
        return;
    }
    add_sequence(s, first, last);
}

uint32_t point_set_node(struct node_pool *pool, struct point_set *set) {
    struct sequences s = {.pool = pool};
    if (set->failed) pool->rc = ERR_NOMEM;
    normalise(set);
    for (uint32_t i = 0; i < set->count; i++)
        unicode_split(&s, set->ranges[i].first, set->ranges[i].last);
    uint32_t node = node_alt(pool, s.list, s.count);
    mem_free(s.list);
    return node;
}

uint32_t node_character(struct node_pool *pool) {
    struct point_set set = {0};
    point_set_add(&set, 0, POINT_MAX);
    uint32_t node = point_set_node(pool, &set);
    point_set_close(&set);
    return node;
}

uint32_t node_any_text(struct node_pool *pool) {
    return node_repeat(pool, node_character(pool), 0, NODE_ENDLESS);
}

uint32_t point_read(const char *text, size_t size, size_t *at) {
    const unsigned char *s = (const unsigned char *)text + *at;
    size_t length = 1;
    if (utf8_step(text + *at, size - *at, &length) != UTF8_CHAR) length = 1;
    *at += length;
    if (length == 1) return s[0];
    uint32_t point = s[0] & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) point = point << 6 | (s[i] & 0x3F);
    return point;
}
