#include "constrain/mask.h"

#include <assert.h>
#include <string.h>

#include "base/mem.h"

static_assert(TOKENS_TIERS == AUTOMATON_DISTANCES, "each tier has its near states");
#define FREE_TOKENS    32u /* a subtree with fewer tokens is walked: that is cheaper than asking */
#define NEAR_BYTES     32u /* a near state for longer tokens costs more than it saves */
#define MASKS_PREPARED (CONSTRAIN_PREPARED / 64u)
#define NODES_PER_WORK 64u /* nodes of a trie, with known moves, that one unit of work pays for */

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

static bool add_room(struct mask_maker *maker) {
    uint32_t *mask = mem_try_alloc(maker->tokens->words + 1, sizeof *mask);
    if (mask != NULL) maker->kept[maker->made++] = mask;
    return mask != NULL;
}

int mask_maker_prepare(struct mask_maker *maker) {
    size_t bytes = maker->tokens->words * sizeof **maker->kept;
    while (maker->made < MASKS_PREPARED && maker->made < maker->capacity) {
        if (!add_room(maker)) return ERR_NOMEM;
        memset(maker->kept[maker->made - 1], 0, bytes);
    }
    return 0;
}

size_t mask_maker_bytes(const struct mask_maker *maker) {
    return (size_t)maker->made * maker->tokens->words * sizeof **maker->kept +
           maker->capacity * (sizeof *maker->kept + sizeof *maker->owner);
}

/* Returns the field in a state that says which mask belongs to it. */
static uint32_t *mask_of(const struct mask_maker *maker, struct automaton *a, uint32_t slot) {
    return &a->states[maker->owner[slot].state].mask[maker->owner[slot].tier];
}

/* ---- Walking ---- */

/* Allows the tokens that end at a node. */
static void allow(const struct constrain_tokens *tokens, const struct trie_node *node,
                  uint32_t *mask) {
    int32_t token = node->token;
    if (token >= 0) mask[token / 32] |= 1u << (token % 32);
    if (!node->twins) return; /* reading `same` would miss the cache */
    while ((token = tokens->same[token]) >= 0) mask[token / 32] |= 1u << (token % 32);
}

/* Counts the visited nodes as work. false: the work is spent. */
static bool pays(struct automaton *a, uint32_t visited) {
    return visited % NODES_PER_WORK != 0 || node_work(&a->pool, 1);
}

static bool mask_walk(const struct mask_maker *maker, struct automaton *a, const struct trie *trie,
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

/* ---- Plain characters ---- */

static bool leads_on(struct automaton *a, uint32_t state) {
    for (int i = 0; i < TOKENS_UTF8_ROWS; i++)
        for (unsigned byte = tokens_plain_rows[i].first[0]; byte <= tokens_plain_rows[i].last[0];
             byte++)
            if (automaton_move(a, state, byte) != AUTOMATON_DEAD) return true;
    return false;
}

/* Returns how many plain characters in a row may be chosen freely from the state on, because all
 * plain characters lead to one next state; at most TOKENS_PLAIN_MAX. */
static int free_characters(struct automaton *a, uint32_t state) {
    uint32_t at = state;
    int count = 0;
    if (a->states[state].free != 0) return a->states[state].free - 1;
    while (count < TOKENS_PLAIN_MAX) {
        uint32_t next = automaton_plain(a, at);
        if (next <= AUTOMATON_DEAD || next == AUTOMATON_DIFFERS) break;
        count = next == at ? TOKENS_PLAIN_MAX : count + 1;
        at = next;
    }
    if (a->pool.rc == 0) a->states[state].free = (uint8_t)(1 + count);
    return count;
}

static uint32_t tokens_below(const struct trie *trie, uint32_t i) {
    return trie->nodes[trie->nodes[i].end].first - trie->nodes[i].first;
}

/* Returns whether the state allows all tokens of a subtree, which must be large enough to ask. */
static bool is_free_below(struct automaton *a, const struct token_tier *tier, uint32_t i,
                          uint32_t state) {
    return state > AUTOMATON_DEAD && tokens_below(&tier->plain, i) >= FREE_TOKENS &&
           free_characters(a, state) >= tier->characters;
}

/* Returns whether most tokens lie in subtrees of the first level that are allowed as a whole. */
static bool most_are_free(struct automaton *a, const struct token_tier *tier, uint32_t start) {
    const struct trie *trie = &tier->plain;
    uint64_t free = 0;
    for (uint32_t i = 0; i < trie->count; i = trie->nodes[i].end)
        if (is_free_below(a, tier, i, automaton_move(a, start, trie->nodes[i].byte)))
            free += tokens_below(trie, i);
    return 2 * free > trie->nodes[trie->count].first;
}

/* Adds the plain tokens by a walk, but skips subtrees that are allowed as a whole. If these hold
 * most tokens, the mask begins with all tokens and the walk removes the others. */
static bool walk_plain(const struct mask_maker *maker, struct automaton *a,
                       const struct token_tier *tier, uint32_t start, uint32_t *mask) {
    const struct trie *trie = &tier->plain;
    const struct trie_node *nodes = trie->nodes;
    bool all = most_are_free(a, tier, start);
    for (size_t i = 0; all && i < maker->tokens->words; i++)
        mask[i] |= tier->plain_masks[TOKENS_PLAIN_MAX][i];
    maker->path[0] = start;
    for (uint32_t i = 0, visited = 1; i < trie->count && a->pool.rc == 0; visited++) {
        const struct trie_node *node = &nodes[i];
        uint32_t state = automaton_move(a, maker->path[node->depth - 1], node->byte);
        bool dead = state == AUTOMATON_DEAD;
        if (state == AUTOMATON_UNKNOWN || !pays(a, visited)) return false;
        if (!dead && !is_free_below(a, tier, i, state)) {
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

/* Returns the state after `count` plain characters. */
static uint32_t after_plain(struct automaton *a, uint32_t state, int count) {
    while (count-- > 0) state = automaton_plain(a, state);
    return state;
}

/* Adds the plain tokens. Those with no more characters than may be chosen freely have a ready mask;
 * a walk finds the others. */
static bool mask_add_plain(const struct mask_maker *maker, struct automaton *a,
                           const struct token_tier *tier, uint32_t state, uint32_t *mask) {
    int count = free_characters(a, state);
    if (a->pool.rc != 0) return false;
    for (size_t i = 0; count > 0 && i < maker->tokens->words; i++)
        mask[i] |= tier->plain_masks[count][i];
    if (count >= tier->characters) return true;
    if (count > 0 && !leads_on(a, after_plain(a, state, count))) return a->pool.rc == 0;
    return a->pool.rc == 0 && walk_plain(maker, a, tier, state, mask);
}

/* ---- Masks ---- */

/* Empties the next place of the ring and returns it. NULL: no memory. */
static uint32_t *next_mask(struct mask_maker *maker, struct automaton *a) {
    uint32_t slot = maker->next;
    size_t words = maker->tokens->words;
    if (slot == maker->made && !add_room(maker)) {
        a->pool.rc = ERR_NOMEM;
        return NULL;
    }
    if (slot < maker->count) *mask_of(maker, a, slot) = 0;
    memset(maker->kept[slot], 0, words * sizeof **maker->kept);
    return maker->kept[slot];
}

/* Returns the mask of one tier's tokens in a state that is the near state for the tier. */
static const uint32_t *make_tier(struct mask_maker *maker, struct automaton *a, int i,
                                 uint32_t state) {
    const struct token_tier *tier = &maker->tokens->tiers[i];
    if (a->states[state].mask[i] != 0) return maker->kept[a->states[state].mask[i] - 1];
    uint32_t slot = maker->next, *mask = next_mask(maker, a);
    if (mask == NULL) return NULL;
    maker->owner[slot] = (struct mask_owner){state, i};
    bool made = mask_add_plain(maker, a, tier, state, mask) &&
                mask_walk(maker, a, &tier->rest, state, mask);
    if (slot == maker->count) maker->count++;
    if (!made) return NULL;
    a->states[state].mask[i] = slot + 1;
    maker->next = (slot + 1) % maker->capacity;
    return mask;
}

bool mask_make(struct mask_maker *maker, struct automaton *a, uint32_t state, uint32_t *mask) {
    const struct constrain_tokens *tokens = maker->tokens;
    memset(mask, 0, tokens->words * sizeof *mask);
    for (int i = 0; i < TOKENS_TIERS; i++) {
        if (tokens->tiers[i].bytes == 0) continue; /* no token is so long */
        uint32_t bytes = tokens->tiers[i].bytes;
        uint32_t near = bytes <= NEAR_BYTES ? automaton_near(a, state, i, bytes) : state;
        const uint32_t *part = near != 0 ? make_tier(maker, a, i, near) : NULL;
        if (part == NULL) return false;
        for (size_t k = 0; k < tokens->words; k++) mask[k] |= part[k];
    }
    return true;
}
