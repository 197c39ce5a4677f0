/* The tokenizer's inside, shared by engine/tok_*.c only.
 *
 * Loading (tok_load.c, tok_pipe.c, tok_dir.c) fills `struct tok`; afterwards nothing writes to
 * it. Encoding streams: the text between added tokens is normalised (tok_norm.c), cut by the stages
 * one inside the other (tok_split.c, tok_regex.c), and every last piece goes through the merges
 * (tok_bpe.c), so no list of pieces is ever kept. What a call needs lives in `struct tok_encoder`.
 */
#ifndef KEEPD_TEXT_TOK_INTERNAL_H
#define KEEPD_TEXT_TOK_INTERNAL_H

#include <cjson/cJSON.h>

#include "text/tok/tok.h"

/* Ceilings for what a file may ask; the largest published vocabularies have about 300,000 ids. */
#define TOK_FILE_MAX     ((size_t)128 << 20)
#define TOK_NODES_MAX    ((size_t)8 << 20) /* JSON values of a file */
#define TOK_ID_MAX       (1 << 20)
#define TOK_STAGES_MAX   16
#define TOK_ADDED_BYTES  1024 /* longest added token */
#define TOK_REGEX_BYTES  65536
#define TOK_TEMPLATE_MAX 16 /* ids before or after the text */
#define TOK_TEXT_MAX     ((size_t)1 << 30)

/* ---- Vocabulary (tok_vocab.c) -------------------------------------------------------------- */

enum { TOK_PRESENT = 1, TOK_ADDED = 2, TOK_SPECIAL = 4, TOK_LITERAL = 8 };

/* Offsets into tok->text. `name` is the string of the file, `bytes` what the token stands for;
 * TOK_LITERAL: the two are the same because the name is not in the byte alphabet. */
struct tok_token {
    uint32_t name, name_size;
    uint32_t bytes, bytes_size;
    uint32_t flags;
};

/* Open addressing over ids; slots hold id + 1, 0 = free. Compared by name or by bytes. */
struct tok_table {
    uint32_t *slots;
    uint32_t mask;
    bool by_bytes;
};

struct tok_merge {
    uint64_t pair; /* left << 32 | right, plus 1; 0 = free */
    uint32_t rank;
    int32_t id;
};

struct tok_merges {
    struct tok_merge *slots;
    uint32_t mask;
};

/* ---- Added tokens (tok_added.c) ------------------------------------------------------------ */

struct tok_added {
    int32_t id;
    uint32_t pattern, pattern_size; /* what is matched, in tok->text */
    bool special, single_word, lstrip, rstrip, normalized;
};

/* Sorted by pattern: a match narrows a range of it byte by byte. */
struct tok_matcher {
    struct tok_added *tokens;
    size_t count;
    bool starts[256]; /* some pattern begins with this byte */
};

/* ---- Pre-tokenizer (tok_split.c, tok_regex.c) ---------------------------------------------- */

enum tok_behavior {
    TOK_REMOVED,
    TOK_ISOLATED,
    TOK_MERGED_WITH_PREVIOUS,
    TOK_MERGED_WITH_NEXT,
    TOK_CONTIGUOUS
};

enum tok_stage_kind { TOK_STAGE_SPLIT, TOK_STAGE_DIGITS, TOK_STAGE_PREFIX_SPACE };

struct tok_regex;

struct tok_stage {
    enum tok_stage_kind kind;
    enum tok_behavior behavior;
    bool invert;
    struct tok_regex *regex; /* of TOK_STAGE_SPLIT */
};

struct tok {
    struct tok_token *tokens; /* [vocab_size] */
    int32_t vocab_size;
    char *text;
    size_t text_size, text_capacity;
    size_t bytes_max;
    struct tok_table names;
    struct tok_table whole; /* by bytes; only where ignore_merges */
    struct tok_merges merges;
    bool ignore_merges;
    int32_t byte_ids[256]; /* -1: the vocabulary lacks this byte */
    bool all_bytes;

    struct tok_matcher raw, normal; /* matched before and after normalising */
    bool normal_specials;           /* `normal` holds special tokens */
    bool nfc;
    struct tok_stage stages[TOK_STAGES_MAX];
    int stage_count;

    int32_t template_before[TOK_TEMPLATE_MAX], template_after[TOK_TEMPLATE_MAX];
    int before_count, after_count;
};

int tok_vocab_reserve(struct tok *tok, int32_t ids, size_t text_bytes, struct fault *fault);
void tok_vocab_put(struct tok *tok, int32_t id, const char *name, size_t size, uint32_t flags);
int tok_vocab_index(struct tok *tok, struct fault *fault); /* the name table, byte ids, maximum */
int tok_vocab_index_whole(struct tok *tok, struct fault *fault);
int32_t tok_vocab_find(const struct tok *tok, const char *name, size_t size);
int32_t tok_vocab_find_pair(const struct tok *tok, const char *a, size_t a_size, const char *b,
                            size_t b_size);
int32_t tok_vocab_find_whole(const struct tok *tok, const char *bytes, size_t size);
int tok_byte_of(uint32_t scalar); /* of the byte alphabet; -1 outside */

int tok_merges_reserve(struct tok *tok, size_t count, struct fault *fault);
int tok_merges_add(struct tok *tok, const char *left, size_t left_size, const char *right,
                   size_t right_size, uint32_t rank, struct fault *fault);
const struct tok_merge *tok_merges_find(const struct tok *tok, int32_t left, int32_t right);

/* ---- Loading ------------------------------------------------------------------------------- */

/* An added token as the file gives it; `content` points into the JSON tree. */
struct tok_entry {
    const char *content;
    struct tok_added flags; /* everything but the pattern */
};

/* `path` names the entry in messages. */
int tok_load_entry(const cJSON *node, const char *path, int32_t id, struct tok_entry *entry,
                   struct fault *fault);
int tok_load_vocab(struct tok *tok, const cJSON *vocab, const struct tok_entry *entries,
                   size_t entry_count, struct fault *fault);
int tok_load_pipeline(struct tok *tok, const cJSON *root, struct fault *fault);
int tok_add_stage(struct tok *tok, const struct tok_stage *stage, const char *pattern, bool literal,
                  const char *field, struct fault *fault);
int tok_finish(struct tok *tok, struct fault *fault); /* once `nfc` and everything else is known */

int tok_added_reserve(struct tok *tok, size_t count, struct fault *fault);
void tok_added_put(struct tok *tok, const struct tok_added *added);
int tok_added_finish(struct tok *tok, struct fault *fault);

extern const char tok_regex_gpt2[], tok_regex_qwen2[];

/* ---- Regular expressions ------------------------------------------------------------------- */

struct tok_scratch; /* match data of one call */

int tok_regex_open(const char *pattern, bool literal, const char *field, struct tok_regex **out,
                   struct fault *fault);
void tok_regex_close(struct tok_regex *regex);
struct tok_scratch *tok_scratch_open(void); /* NULL: no memory */
void tok_scratch_close(struct tok_scratch *scratch);

/* First match at or after `from` in valid UTF-8. 1 found, 0 none, negative: enum err. */
int tok_regex_find(const struct tok_regex *regex, struct tok_scratch *scratch, const char *text,
                   size_t size, size_t from, size_t *begin, size_t *end);

/* ---- One call ------------------------------------------------------------------------------ */

struct tok_symbol {
    int32_t id;
    int32_t previous, next; /* -1: none */
};

struct tok_candidate {
    uint32_t rank, at;
    int32_t id; /* of the merged token */
};

struct tok_cached {
    const char *piece;
    uint32_t size;
    uint32_t count;
    size_t first; /* in ids */
};

struct tok_encoder {
    const struct tok *tok;
    struct arena *arena;
    struct fault *fault;
    struct tok_scratch *scratch;
    bool specials;
    size_t next_span; /* untrusted spans before it end before the part at hand */

    int32_t *ids;
    size_t count, capacity, max;

    struct tok_symbol *symbols;
    struct tok_candidate *heap;
    size_t work_capacity; /* symbols; the heap has twice as many */
    struct tok_cached *cache;
    size_t cache_mask;
};

int tok_emit(struct tok_encoder *e, int32_t id);
int tok_no_memory(struct tok_encoder *e);

/* Text and the parts of it in which special tokens are not recognised. */
struct tok_text {
    const char *s;
    size_t size;
    const struct tok_span *spans;
    size_t span_count;
};

struct tok_match {
    size_t scan;       /* where to look from */
    size_t span;       /* spans before it end before `scan` */
    size_t begin, end; /* of the match, whitespace swallowed by lstrip and rstrip included */
    int32_t id;
};

/* The next added token at or after match->scan; `taken` is the end of the one before. */
bool tok_added_find(const struct tok *tok, const struct tok_matcher *matcher, bool specials,
                    const struct tok_text *text, size_t taken, struct tok_match *match);

/* NFC of `in`, which it returns as it is where that is its NFC already. Spans are carried over,
 * widened to whole changed runs. Negative: no memory. */
int tok_normalize(struct arena *arena, const struct tok_text *in, struct tok_text *out);

int tok_split(struct tok_encoder *e, int stage, const char *text, size_t size);
int tok_bpe(struct tok_encoder *e, const char *piece, size_t size);

#endif
