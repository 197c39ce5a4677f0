#include "constrain/tokens.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#define DEPTH_MAX 65534

/* Longest tokens of each tier: the first holds about three quarters of a large vocabulary, the
 * second nearly all others. */
static const uint32_t tier_bytes[TOKENS_TIERS] = {8, 16, DEPTH_MAX};

const struct utf8_row tokens_plain_rows[TOKENS_UTF8_ROWS] = {
    {1, {0x20}, {0x21}},
    {1, {0x23}, {0x5B}},
    {1, {0x5D}, {0x7E}},
    {2, {0xC2, 0x80}, {0xDF, 0xBF}},
    {3, {0xE0, 0xA0, 0x80}, {0xE0, 0xBF, 0xBF}},
    {3, {0xE1, 0x80, 0x80}, {0xEC, 0xBF, 0xBF}},
    {3, {0xED, 0x80, 0x80}, {0xED, 0x9F, 0xBF}},
    {3, {0xEE, 0x80, 0x80}, {0xEF, 0xBF, 0xBF}},
    {4, {0xF0, 0x90, 0x80, 0x80}, {0xF0, 0xBF, 0xBF, 0xBF}},
    {4, {0xF1, 0x80, 0x80, 0x80}, {0xF3, 0xBF, 0xBF, 0xBF}},
    {4, {0xF4, 0x80, 0x80, 0x80}, {0xF4, 0x8F, 0xBF, 0xBF}},
};

struct token {
    const char *bytes;
    size_t size;
    int32_t id;
};

static int compare_tokens(const void *a, const void *b) {
    const struct token *x = a, *y = b;
    int order = memcmp(x->bytes, y->bytes, x->size < y->size ? x->size : y->size);
    if (order != 0) return order;
    if (x->size != y->size) return x->size < y->size ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* ---- Plain tokens ---- */

/* Returns the bytes of the plain character at the beginning of the text, 0 = there is none. */
static size_t plain_step(const unsigned char *text, size_t size) {
    for (int i = 0; i < TOKENS_UTF8_ROWS; i++) {
        const struct utf8_row *row = &tokens_plain_rows[i];
        size_t at = 0;
        while (at < row->bytes && at < size && text[at] >= row->first[at] &&
               text[at] <= row->last[at])
            at++;
        if (at == row->bytes) return at;
    }
    return 0;
}

/* Returns the number of characters of a plain token; 0 = the token is not plain. */
static int plain_count(const struct token *token) {
    int count = 0;
    for (size_t at = 0; at < token->size; count++) {
        size_t step = plain_step((const unsigned char *)token->bytes + at, token->size - at);
        if (step == 0 || count == TOKENS_PLAIN_MAX) return 0;
        at += step;
    }
    return count;
}

static bool tokens_add_plain(struct token_tier *tier, const struct token *token) {
    int count = plain_count(token);
    for (int i = count; count > 0 && i <= TOKENS_PLAIN_MAX; i++)
        tier->plain_masks[i][token->id / 32] |= 1u << (token->id % 32);
    if (count > tier->characters) tier->characters = count;
    return count > 0;
}

/* ---- Tries ---- */

static size_t tokens_shared_size(const struct token *x, const struct token *y) {
    size_t at = 0;
    while (at < x->size && at < y->size && x->bytes[at] == y->bytes[at]) at++;
    return at;
}

static uint64_t count_nodes(const struct token *list, size_t count) {
    uint64_t nodes = 0;
    for (size_t i = 0; i < count; i++)
        nodes += list[i].size - (i > 0 ? tokens_shared_size(&list[i - 1], &list[i]) : 0);
    return nodes;
}

/* Ends the nodes that are deeper than `depth`: their subtrees end where the next node begins. */
static void close_nodes(struct trie *trie, uint32_t *path, size_t *open, size_t depth) {
    while (*open > depth) trie->nodes[path[--*open]].end = trie->count;
}

/* Fills a trie from a sorted list. `path` has room for the longest token. */
static void fill_trie(struct constrain_tokens *tokens, struct trie *trie, const struct token *list,
                      size_t count, uint32_t *path) {
    size_t open = 0;
    for (size_t i = 0; i < count; i++) {
        const struct token *token = &list[i];
        size_t shared = i > 0 ? tokens_shared_size(&list[i - 1], token) : 0;
        close_nodes(trie, path, &open, shared);
        while (open < token->size) {
            path[open] = trie->count;
            trie->nodes[trie->count++] = (struct trie_node){.token = -1,
                                                            .first = (uint32_t)i,
                                                            .depth = (uint16_t)(open + 1),
                                                            .byte = (uint8_t)token->bytes[open]};
            open++;
        }
        struct trie_node *last = &trie->nodes[path[token->size - 1]];
        tokens->same[token->id] = last->token;
        last->twins = last->token >= 0;
        last->token = token->id;
        trie->order[i] = token->id;
    }
    close_nodes(trie, path, &open, 0);
    trie->nodes[trie->count].first = (uint32_t)count;
}

static int build_trie(struct constrain_tokens *tokens, struct trie *trie, struct token *list,
                      size_t count) {
    qsort(list, count, sizeof *list, compare_tokens);
    uint64_t nodes = count_nodes(list, count);
    uint32_t *path = mem_try_alloc((size_t)tokens->depth + 1, sizeof *path);
    if (nodes < UINT32_MAX) trie->nodes = mem_try_alloc((size_t)nodes + 1, sizeof *trie->nodes);
    trie->order = mem_try_alloc(count + 1, sizeof *trie->order);
    int rc = path != NULL && trie->nodes != NULL && trie->order != NULL ? 0 : ERR_NOMEM;
    if (rc == 0) fill_trie(tokens, trie, list, count, path);
    mem_free(path);
    return rc;
}

/* ---- Opening ---- */

/* Collects the tokens of a tier: those that are longer than `above` and have at most tier->bytes.
 */
static int collect(const struct constrain_vocabulary *vocabulary, struct constrain_tokens *tokens,
                   struct token_tier *tier, uint32_t above, struct token *plain,
                   struct token *rest) {
    size_t plains = 0, others = 0;
    uint32_t longest = 0;
    for (int32_t id = 0; id < vocabulary->size; id++) {
        struct token token = {.id = id};
        token.size = vocabulary->token_bytes(vocabulary->arg, id, &token.bytes);
        if (token.size > DEPTH_MAX) return ERR_LIMIT;
        if (token.size <= above || token.size > tier->bytes) continue;
        if (token.size > longest) longest = (uint32_t)token.size;
        if (tokens_add_plain(tier, &token))
            plain[plains++] = token;
        else
            rest[others++] = token;
    }
    tier->bytes = longest;
    if (longest > tokens->depth) tokens->depth = (uint16_t)longest;
    int rc = build_trie(tokens, &tier->plain, plain, plains);
    return rc != 0 ? rc : build_trie(tokens, &tier->rest, rest, others);
}

static bool alloc_masks(struct constrain_tokens *tokens, struct token_tier *tier) {
    for (int i = 1; i <= TOKENS_PLAIN_MAX; i++) {
        tier->plain_masks[i] = mem_try_alloc(tokens->words + 1, sizeof **tier->plain_masks);
        if (tier->plain_masks[i] == NULL) return false;
    }
    return true;
}

static int open_tiers(const struct constrain_vocabulary *vocabulary,
                      struct constrain_tokens *tokens, struct token *plain, struct token *rest) {
    int rc = 0;
    for (int i = 0; i < TOKENS_TIERS && rc == 0; i++) {
        struct token_tier *tier = &tokens->tiers[i];
        tier->bytes = tier_bytes[i];
        rc = alloc_masks(tokens, tier)
                 ? collect(vocabulary, tokens, tier, i > 0 ? tier_bytes[i - 1] : 0, plain, rest)
                 : ERR_NOMEM;
    }
    return rc;
}

int constrain_tokens_open(const struct constrain_vocabulary *vocabulary,
                          struct constrain_tokens **out) {
    struct constrain_tokens *tokens = mem_try_alloc(1, sizeof *tokens);
    size_t size = (size_t)vocabulary->size;
    struct token *plain = mem_try_alloc(size + 1, sizeof *plain);
    struct token *rest = mem_try_alloc(size + 1, sizeof *rest);
    int rc = ERR_NOMEM;
    *out = NULL;
    if (tokens != NULL && plain != NULL && rest != NULL) {
        tokens->size = vocabulary->size;
        tokens->words = constrain_mask_words(vocabulary->size);
        tokens->same = mem_try_alloc(size + 1, sizeof *tokens->same);
        if (tokens->same != NULL) rc = open_tiers(vocabulary, tokens, plain, rest);
    }
    mem_free(plain);
    mem_free(rest);
    if (rc == 0)
        *out = tokens;
    else
        constrain_tokens_close(tokens);
    return rc;
}

static void close_tier(struct token_tier *tier) {
    for (int i = 1; i <= TOKENS_PLAIN_MAX; i++) mem_free(tier->plain_masks[i]);
    mem_free(tier->plain.order);
    mem_free(tier->rest.order);
    mem_free(tier->plain.nodes);
    mem_free(tier->rest.nodes);
}

void constrain_tokens_close(struct constrain_tokens *tokens) {
    if (tokens == NULL) return;
    for (int i = 0; i < TOKENS_TIERS; i++) close_tier(&tokens->tiers[i]);
    mem_free(tokens->same);
    mem_free(tokens);
}
