#include "constrain/mask.h"

#include <string.h>

#include "base/mem.h"

/* automaton_state.plain: unknown, no common next state, or that state. */
enum { PLAIN_UNKNOWN = 0, PLAIN_NONE = AUTOMATON_DEAD };
/* automaton_state.free */
enum { FREE_UNKNOWN, FREE, FREE_NOT };
#define FREE_TOKENS    32u /* below this, walking is cheaper than asking */
#define NODES_PER_WORK 64u /* nodes of a trie, on known ways, that one unit of work pays for */

int mask_maker_open(struct mask_maker *maker, const struct constrain_tokens *tokens) {
    *maker = (struct mask_maker){.tokens = tokens};
    maker->capacity =
        (uint32_t)(CONSTRAIN_MASK_BYTES / ((tokens->words + 1) * sizeof **maker->kept)) + 1;
    if (maker->capacity > CONSTRAIN_STATES_MAX) maker->capacity = CONSTRAIN_STATES_MAX;
    maker->path = mem_try_alloc((size_t)tokens->depth + 1, sizeof *maker->path);
    maker->kept = mem_try_alloc(maker->capacity, sizeof *maker->kept);
    maker->owner = mem_try_alloc(maker->capacity, sizeof *maker->owner);
    if (maker->path != NULL && maker->kept != NULL && maker->owner != NULL) return 0;
    mask_maker_close(maker);
    return ERR_NOMEM;
}

void mask_maker_close(struct mask_maker *maker) {
    if (maker->kept != NULL) mask_maker_shrink(maker);
    mem_free(maker->path);
    mem_free(maker->kept);
    mem_free(maker->owner);
    *maker = (struct mask_maker){0};
}

void mask_maker_forget(struct mask_maker *maker) {
    maker->next = maker->count = 0;
}

void mask_maker_shrink(struct mask_maker *maker) {
    mask_maker_forget(maker);
    for (uint32_t i = 0; i < maker->made; i++) {
        mem_free(maker->kept[i]);
        maker->kept[i] = NULL;
    }
    maker->made = 0;
}

size_t mask_maker_bytes(const struct mask_maker *maker) {
    return (size_t)maker->made * maker->tokens->words * sizeof **maker->kept +
           maker->capacity * (sizeof *maker->kept + sizeof *maker->owner);
}

/* ---- Walking --------------------------------------------------------------------------------- */

/* Allows the tokens that end at a node. */
static void allow(const struct constrain_tokens *tokens, const struct trie_node *node,
                  uint32_t *mask) {
    int32_t token = node->token;
    if (token >= 0) mask[token / 32] |= 1u << (token % 32);
    if (!node->twins) return; /* reading `same` would miss the cache */
    while ((token = tokens->same[token]) >= 0) mask[token / 32] |= 1u << (token % 32);
}

/* Counts the nodes of a walk as work. */
static bool pays(struct automaton *a, uint32_t visited) {
    return visited % NODES_PER_WORK != 0 || node_work(&a->pool, 1);
}

static bool walk(const struct mask_maker *maker, struct automaton *a, const struct trie *trie,
                 uint32_t start, uint32_t *mask) {
    const struct trie_node *nodes = trie->nodes;
    uint32_t *path = maker->path;
    path[0] = start;
    for (uint32_t i = 0, visited = 1; i < trie->count; visited++) {
        uint32_t state = automaton_move(a, path[nodes[i].depth - 1], nodes[i].byte);
        if (state == AUTOMATON_UNKNOWN || !pays(a, visited)) return false;
        if (state == AUTOMATON_DEAD) {
            i = nodes[i].end;
            continue;
        }
        path[nodes[i].depth] = state;
        allow(maker->tokens, &nodes[i], mask);
        i++;
    }
    return true;
}

/* ---- Plain characters ------------------------------------------------------------------------ */

/* Finds the state to which all characters of a row lead. `*common`: PLAIN_UNKNOWN before the first
 * one. */
static bool common_next(struct automaton *a, uint32_t state, const struct utf8_row *row, int at,
                        uint32_t *common) {
    int last_class = -1;
    for (unsigned byte = row->first[at]; byte <= row->last[at]; byte++) {
        if (a->pool.class_of[byte] == last_class) continue;
        last_class = a->pool.class_of[byte];
        uint32_t next = automaton_move(a, state, byte);
        if (next == AUTOMATON_UNKNOWN || next == AUTOMATON_DEAD) return false;
        if (at < 3 && at + 1 < row->bytes) {
            if (!common_next(a, next, row, at + 1, common)) return false;
        } else if (*common == PLAIN_UNKNOWN) {
            *common = next;
        } else if (*common != next) {
            return false;
        }
    }
    return true;
}

/* Returns the next state after any plain character, or PLAIN_NONE. */
static uint32_t plain_next(struct automaton *a, uint32_t state) {
    uint32_t common = PLAIN_UNKNOWN;
    if (a->states[state].plain != PLAIN_UNKNOWN) return a->states[state].plain;
    bool has = true;
    for (int i = 0; i < TOKENS_UTF8_ROWS && has; i++)
        has = common_next(a, state, &tokens_plain_rows[i], 0, &common);
    if (a->pool.rc == 0) a->states[state].plain = has ? common : PLAIN_NONE;
    return has ? common : PLAIN_NONE;
}

static bool leads_on(struct automaton *a, uint32_t state) {
    for (int i = 0; i < TOKENS_UTF8_ROWS; i++)
        for (unsigned byte = tokens_plain_rows[i].first[0]; byte <= tokens_plain_rows[i].last[0];
             byte++)
            if (automaton_move(a, state, byte) != AUTOMATON_DEAD) return true;
    return false;
}

/* May every plain token be read from the state, up to the longest? */
static bool is_free(struct automaton *a, uint32_t state) {
    uint32_t at = state, next = state;
    if (a->states[state].free != FREE_UNKNOWN) return a->states[state].free == FREE;
    for (int i = 0; i < TOKENS_PLAIN_MAX && next != PLAIN_NONE; i++) {
        next = plain_next(a, at);
        if (next == at) break;
        at = next;
    }
    if (a->pool.rc != 0) return false;
    a->states[state].free = next != PLAIN_NONE ? FREE : FREE_NOT;
    return next != PLAIN_NONE;
}

static uint32_t tokens_below(const struct trie *trie, uint32_t i) {
    return trie->nodes[trie->nodes[i].end].first - trie->nodes[i].first;
}

static bool is_free_below(struct automaton *a, const struct trie *trie, uint32_t i,
                          uint32_t state) {
    return state > AUTOMATON_DEAD && tokens_below(trie, i) >= FREE_TOKENS && is_free(a, state);
}

/* Returns whether most tokens lie in subtrees of the first level that are allowed as a whole. */
static bool most_are_free(struct automaton *a, const struct trie *trie, uint32_t start) {
    uint64_t free = 0;
    for (uint32_t i = 0; i < trie->count; i = trie->nodes[i].end)
        if (is_free_below(a, trie, i, automaton_move(a, start, trie->nodes[i].byte)))
            free += tokens_below(trie, i);
    return 2 * free > trie->nodes[trie->count].first;
}

/* Walks through the plain tokens, but skips subtrees that are allowed as a whole. If these are most
 * of the trie, the mask begins with all tokens and loses the others. */
static bool walk_plain(const struct mask_maker *maker, struct automaton *a, uint32_t start,
                       uint32_t *mask) {
    const struct trie *trie = &maker->tokens->plain;
    const struct trie_node *nodes = trie->nodes;
    bool all = most_are_free(a, trie, start);
    for (size_t i = 0; all && i < maker->tokens->words; i++)
        mask[i] |= maker->tokens->plain_masks[TOKENS_PLAIN_MAX][i];
    maker->path[0] = start;
    for (uint32_t i = 0, visited = 1; i < trie->count && a->pool.rc == 0; visited++) {
        const struct trie_node *node = &nodes[i];
        uint32_t state = automaton_move(a, maker->path[node->depth - 1], node->byte);
        bool dead = state == AUTOMATON_DEAD;
        if (state == AUTOMATON_UNKNOWN || !pays(a, visited)) return false;
        if (!dead && !is_free_below(a, trie, i, state)) {
            maker->path[node->depth] = state;
            if (!all) allow(maker->tokens, node, mask);
            i++;
            continue;
        }
        for (uint32_t k = node->first; dead == all && k < nodes[node->end].first; k++) {
            int32_t token = trie->order[k];
            if (dead)
                mask[token / 32] &= ~(1u << (token % 32));
            else
                mask[token / 32] |= 1u << (token % 32);
        }
        i = node->end;
    }
    return a->pool.rc == 0;
}

/* Adds the plain tokens: those of at most `count` characters by their mask, others by a walk. */
static bool add_plain(const struct mask_maker *maker, struct automaton *a, uint32_t state,
                      uint32_t *mask) {
    const struct constrain_tokens *tokens = maker->tokens;
    uint32_t at = state, next;
    int count = 0;
    while (count < TOKENS_PLAIN_MAX && (next = plain_next(a, at)) != PLAIN_NONE) {
        count = next == at ? TOKENS_PLAIN_MAX : count + 1;
        at = next;
    }
    if (a->pool.rc != 0) return false;
    for (size_t i = 0; count > 0 && i < tokens->words; i++)
        mask[i] |= tokens->plain_masks[count][i];
    if (count == TOKENS_PLAIN_MAX || (count > 0 && !leads_on(a, at))) return a->pool.rc == 0;
    return walk_plain(maker, a, state, mask);
}

/* ---- Masks ----------------------------------------------------------------------------------- */

/* Empties the next place of the ring and returns it. NULL: no memory. */
static uint32_t *next_mask(struct mask_maker *maker, struct automaton *a) {
    uint32_t slot = maker->next;
    size_t words = maker->tokens->words;
    if (slot == maker->made) {
        maker->kept[slot] = mem_try_alloc(words + 1, sizeof **maker->kept);
        if (maker->kept[slot] == NULL) {
            a->pool.rc = ERR_NOMEM;
            return NULL;
        }
        maker->made++;
    }
    if (slot < maker->count) a->states[maker->owner[slot]].mask = 0;
    memset(maker->kept[slot], 0, words * sizeof **maker->kept);
    return maker->kept[slot];
}

const uint32_t *mask_make(struct mask_maker *maker, struct automaton *a, uint32_t state) {
    if (a->states[state].mask != 0) return maker->kept[a->states[state].mask - 1];
    uint32_t slot = maker->next, *mask = next_mask(maker, a);
    if (mask == NULL) return NULL;
    maker->owner[slot] = state;
    bool made =
        add_plain(maker, a, state, mask) && walk(maker, a, &maker->tokens->rest, state, mask);
    if (slot == maker->count) maker->count++;
    if (!made) return NULL;
    a->states[state].mask = slot + 1;
    maker->next = (slot + 1) % maker->capacity;
    return mask;
}
