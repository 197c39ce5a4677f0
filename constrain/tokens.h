/* The vocabulary as flat tries, for constrain/mask.c. The nodes of a trie are in the order of a
 * depth-first walk; `end` is the node after a node's subtree, so a subtree is skipped by a jump. */
#ifndef KEEPD_CONSTRAIN_TOKENS_H
#define KEEPD_CONSTRAIN_TOKENS_H

#include "constrain/constrain.h"

struct trie_node {
    uint32_t end;
    uint32_t first; /* index in trie.order of the subtree's first token; those after the subtree
                       begin at nodes[end].first */
    int32_t token;  /* the token that ends here; -1 = none */
    uint16_t depth; /* bytes from the root to this node, at least 1 */
    uint8_t byte;
    bool twins; /* other tokens have the same bytes: see constrain_tokens.same */
};

struct trie {
    struct trie_node *nodes; /* [count + 1]; the last one only marks the end */
    int32_t *order;          /* all tokens, in the order of the walk */
    uint32_t count;
};

/* A plain character is one that stands for itself in a JSON string: U+0020 and more, but not '"',
 * '\' and U+007F. Plain tokens consist of 1 to TOKENS_PLAIN_MAX whole plain characters. */
#define TOKENS_PLAIN_MAX 16

/* Tokens are divided by length: places of a language that agree over the length of a token have the
 * same mask of tokens of that length. */
#define TOKENS_TIERS 3
struct token_tier {
    uint32_t bytes; /* length of the longest token */
    int characters; /* the most characters of a plain token */
    struct trie plain, rest;
    uint32_t *plain_masks[TOKENS_PLAIN_MAX + 1]; /* [n]: plain tokens of at most n characters */
};

struct constrain_tokens {
    int32_t size;
    size_t words; /* words of a mask */
    uint16_t depth;
    int32_t *same; /* [size] the next token with the same bytes, -1 = none */
    struct token_tier tiers[TOKENS_TIERS];
};

/* All sequences of UTF-8 that plain characters have: the ranges of their bytes, from Unicode 15,
 * table 3-7. Characters of one byte come first. */
#define TOKENS_UTF8_ROWS 11
struct utf8_row {
    uint8_t bytes;
    uint8_t first[4], last[4];
};
extern const struct utf8_row tokens_plain_rows[TOKENS_UTF8_ROWS];

#endif
