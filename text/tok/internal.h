/* Internal types of the tokenizer; only text/tok/ includes them.
 *
 * Loading (load.c, pipe.c, decode.c, dir.c, gguf.c) fills `struct tok`; afterwards nothing writes
 * to it. Encoding streams: the text between added tokens is normalised (norm.c, forms.c,
 * charsmap.c), each
 * stage splits the pieces of the previous one (split.c, regex.c), and the final pieces go to the
 * model (bpe.c, unigram.c, wordpiece.c) one by one, so no list of pieces is kept. `struct
 * tok_encoder` is the state of one call. */
#ifndef KEEPD_TEXT_TOK_INTERNAL_H
#define KEEPD_TEXT_TOK_INTERNAL_H

#include <cjson/cJSON.h>

#include "text/tok/tok.h"

/* Limits of a tokenizer file; the largest published vocabularies have about 300,000 ids. */
#define TOK_FILE_MAX     ((size_t)128 << 20)
#define TOK_NODES_MAX    ((size_t)8 << 20) /* JSON values of a file */
#define TOK_ID_MAX       (1 << 20)
#define TOK_STAGES_MAX   16
#define TOK_STEPS_MAX    16   /* steps of the normalizer, steps of the decoder */
#define TOK_ADDED_BYTES  1024 /* longest added token */
#define TOK_REGEX_BYTES  65536
#define TOK_TEMPLATE_MAX 16 /* ids before or after the text */
#define TOK_TEXT_MAX     ((size_t)1 << 30)

/* ---- Vocabulary (vocab.c) ---- */

/* TOK_OUTSIDE: an added token that the model does not know, so no piece becomes it. TOK_SHOWN: a
 * special token that answers show; in other respects it is a special token, also when texts are
 * tokenised. */
enum {
    TOK_PRESENT = 1,
    TOK_ADDED = 2,
    TOK_SPECIAL = 4,
    TOK_LITERAL = 8,
    TOK_OUTSIDE = 16,
    TOK_SHOWN = 32
};

/* Offsets into tok->text. `name` is the string of the file, `bytes` what the token stands for,
 * `first` what it stands for at the beginning of a text, where some decoders drop a space.
 * TOK_LITERAL: a byte-level decoder leaves the name as it is, because it is not in the byte
 * alphabet or the token was added. */
struct tok_token {
    uint32_t name, name_size;
    uint32_t bytes, bytes_size;
    uint32_t first, first_size;
    uint32_t flags;
};

/* A hash table with open addressing, whose slots hold id + 1; 0: free. Names or bytes are compared.
 */
struct tok_table {
    uint32_t *slots;
    uint32_t mask;
    bool by_bytes;
};

/* Pairs of equal rank (a GGUF file's scores may be equal) merge from the left. */
struct tok_merge {
    uint64_t pair; /* left << 32 | right, plus 1; 0 = free */
    uint32_t rank;
    int32_t id;
};

struct tok_merges {
    struct tok_merge *slots;
    uint32_t mask;
};

/* ---- Added tokens (added.c) ---- */

struct tok_added {
    int32_t id;
    uint32_t pattern, pattern_size; /* the text to match, in tok->text */
    bool special, single_word, lstrip, rstrip, normalized;
};

/* Sorted by pattern: a search narrows a range of patterns byte by byte. */
struct tok_matcher {
    struct tok_added *tokens;
    size_t count;
    bool starts[256]; /* some pattern begins with this byte */
};

/* ---- Pre-tokenizer (split.c, regex.c) ---- */

enum tok_behavior {
    TOK_REMOVED,
    TOK_ISOLATED,
    TOK_MERGED_WITH_PREVIOUS,
    TOK_MERGED_WITH_NEXT,
    TOK_CONTIGUOUS
};

enum tok_stage_kind {
    TOK_STAGE_SPLIT,
    TOK_STAGE_DIGITS,
    TOK_STAGE_PREFIX_SPACE,
    TOK_STAGE_METASPACE, /* spaces become the mark, which may be put in front */
    TOK_STAGE_ALPHABET   /* every byte becomes its character of the byte alphabet */
};

enum tok_prepend { TOK_PREPEND_ALWAYS, TOK_PREPEND_FIRST, TOK_PREPEND_NEVER };

struct tok_regex;

struct tok_stage {
    enum tok_stage_kind kind;
    enum tok_behavior behavior;
    bool invert;
    enum tok_prepend prepend; /* TOK_STAGE_METASPACE, like the mark */
    char mark[4];
    uint32_t mark_size;
    struct tok_regex *regex; /* TOK_STAGE_SPLIT */
};

/* ---- Normalizer (norm.c, forms.c), decoder (decode.c) ---- */

enum tok_form { TOK_NFC, TOK_NFD, TOK_NFKC, TOK_NFKD };
enum tok_step_kind {
    TOK_STEP_FORM,
    TOK_STEP_PREPEND,
    TOK_STEP_REPLACE,
    TOK_STEP_LOWERCASE,
    TOK_STEP_STRIP,         /* white space at one end, or both */
    TOK_STEP_STRIP_ACCENTS, /* all marks */
    TOK_STEP_STRIP_MARKS,   /* marks without width */
    TOK_STEP_CLEAN,         /* controls, and white space of every kind */
    TOK_STEP_CHINESE,       /* a space on both sides of each Chinese character */
    TOK_STEP_NMT,           /* some control and white space characters */
    TOK_STEP_CHARSMAP       /* `find` is the trie, `content` the texts (charsmap.c) */
};

/* `find` and `content` are in tok->text; a step with a regex does not use `find`. */
struct tok_step {
    enum tok_step_kind kind;
    enum tok_form form;
    bool left, right; /* TOK_STEP_STRIP */
    struct tok_regex *regex;
    uint32_t find, find_size, content, content_size;
};

/* How a token's name becomes its bytes. */
struct tok_decoder {
    struct tok_step replaces[TOK_STEPS_MAX];
    int replace_count;
    size_t text_most;   /* while loading: the largest size of tok->text with decoded names */
    bool byte_level;    /* names are written in the byte alphabet */
    bool byte_fallback; /* "<0x0A>" is the byte 10 */
    bool fused;         /* while loading: the steps that follow see the whole text */
    bool words;         /* WordPiece: a space is put in front of each word */
    /* In tok->text: a token whose name begins with it goes on with a word. */
    uint32_t prefix, prefix_size;
    char strip[4];       /* one such character is dropped at the beginning of a text */
    uint32_t strip_size; /* 0: nothing is dropped */
    char mark[4];        /* this mark is dropped everywhere in the first token of a text */
    uint32_t mark_size;  /* 0: no mark is dropped */
};

/* ---- The tokenizer ---- */

enum tok_model {
    TOK_MODEL_BYTES,   /* BPE whose pieces are bytes: byte_ids are the first symbols */
    TOK_MODEL_CHARS,   /* BPE whose first symbols are the names of characters */
    TOK_MODEL_UNIGRAM, /* the best sum of scores */
    TOK_MODEL_WORDS    /* WordPiece: the longest tokens from the left */
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
    enum tok_model model;
    bool ignore_merges;
    int32_t byte_ids[256]; /* -1: the vocabulary lacks this byte; of the byte alphabet */
    bool all_bytes;
    int32_t unknown;           /* -1: unknown characters give no token */
    bool fuse_unknown;         /* adjacent unknown characters become one token */
    bool byte_fallback;        /* unknown characters become the tokens of their bytes */
    int32_t fallback_ids[256]; /* "<0x00>".."<0xFF>"; -1: the vocabulary lacks it */
    bool all_fallback;
    size_t names_max;  /* the longest token's name */
    bool cut_at_marks; /* no merge crosses the beginning of a word (bpe.c) */

    /* WordPiece: in front of the names of tokens that go on with a word, in `text`; a word with
     * more characters is unknown. */
    uint32_t word_prefix, word_prefix_size;
    int32_t word_chars_max;

    double *scores;       /* [vocab_size], Unigram alone */
    double unknown_score; /* cost of one unknown character */
    int32_t *sorted;      /* ids by name, for prefixes */
    int32_t sorted_count;
    int32_t by_byte[257]; /* index in `sorted` of the first name that begins with this byte */

    struct tok_matcher raw, normal; /* matched before and after normalising */
    bool normal_specials;           /* `normal` holds special tokens */
    struct tok_step steps[TOK_STEPS_MAX];
    int step_count;
    struct tok_stage stages[TOK_STAGES_MAX + 1]; /* room for TOK_STAGE_ALPHABET */
    int stage_count;
    int bytes_at; /* the stage before which ByteLevel maps text to bytes; -1: never */
    struct tok_decoder decoder;

    int32_t template_before[TOK_TEMPLATE_MAX], template_after[TOK_TEMPLATE_MAX];
    int before_count, after_count;
    int32_t template_between[TOK_TEMPLATE_MAX]; /* between two texts */
    int between_count;
    bool joins; /* the post-processor joins two texts, with the same tokens around them */
};

/* Appends to tok->text; ERR_NOMEM or ERR_LIMIT. */
/* Makes room for `size` more bytes in tok->text, which moves. */
int tok_text_reserve(struct tok *tok, size_t size, struct fault *fault);
int tok_text_add(struct tok *tok, const char *s, size_t size, uint32_t *at, struct fault *fault);
int tok_vocab_reserve(struct tok *tok, int32_t ids, struct fault *fault);
int tok_vocab_put(struct tok *tok, int32_t id, const char *name, size_t size, uint32_t flags,
                  struct fault *fault);
int tok_vocab_index(struct tok *tok, struct fault *fault); /* the name table, byte ids */
int tok_vocab_index_whole(struct tok *tok, struct fault *fault);
int32_t tok_vocab_find(const struct tok *tok, const char *name, size_t size);
int32_t tok_vocab_find_pair(const struct tok *tok, const char *a, size_t a_size, const char *b,
                            size_t b_size);
int32_t tok_vocab_find_whole(const struct tok *tok, const char *bytes, size_t size);
/* Finds a name that the model may produce for a piece: never a special token, except the unknown
 * token. */
int32_t tok_vocab_find_plain(const struct tok *tok, const char *name, size_t size);
int tok_byte_of(uint32_t scalar);                   /* in the byte alphabet; -1 outside */
uint32_t tok_char_of(uint32_t byte);                /* does the reverse */
int tok_fallback_of(const char *name, size_t size); /* the byte of "<0x0A>"; -1 otherwise */

int tok_merges_reserve(struct tok *tok, size_t count, struct fault *fault);
int tok_merges_add(struct tok *tok, const char *left, size_t left_size, const char *right,
                   size_t right_size, uint32_t rank, struct fault *fault);
const struct tok_merge *tok_merges_find(const struct tok *tok, int32_t left, int32_t right);

/* ---- Loading ---- */

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
int tok_load_decoder(struct tok *tok, const cJSON *node, const char *type, const char *path,
                     struct fault *fault);
/* {"pattern": {"Regex": "..."} or {"String": "..."}} */
int tok_load_pattern(const cJSON *node, const char *path, const char **text, bool *literal,
                     struct fault *fault);
int tok_add_step(struct tok *tok, const struct tok_step *step, const char *find, bool literal,
                 const char *content, const char *field, struct fault *fault);
int tok_decode_names(struct tok *tok, struct fault *fault); /* names to bytes, by the decoder */
int tok_add_stage(struct tok *tok, const struct tok_stage *stage, const char *pattern, bool literal,
                  const char *field, struct fault *fault);
struct tok *tok_make(void);                           /* NULL: no memory */
int tok_finish(struct tok *tok, struct fault *fault); /* once everything else is known */
int tok_unigram_index(struct tok *tok, struct fault *fault);
void tok_bpe_find_marks(struct tok *tok);

int tok_added_reserve(struct tok *tok, size_t count, struct fault *fault);
void tok_added_put(struct tok *tok, const struct tok_added *added);
int tok_added_finish(struct tok *tok, struct fault *fault);

extern const char tok_regex_gpt2[], tok_regex_qwen2[];

/* ---- Regular expressions ---- */

struct tok_scratch; /* match data of one call */

/* Appends what PCRE2 must read for \p{name} or, if `negated`, for \P{name}. The property then has
 * the members that the tables of text/unicode give it, whatever PCRE2's own tables say. Returns 0,
 * ERR_NOMEM, or ERR_UNSUPPORTED: there is no such property. */
struct buf;
int tok_property_write(struct buf *out, const char *name, size_t size, bool negated, bool in_class);

int tok_regex_open(const char *pattern, bool literal, const char *field, struct tok_regex **out,
                   struct fault *fault);
void tok_regex_close(struct tok_regex *regex);
struct tok_scratch *tok_scratch_open(void); /* NULL: no memory */
void tok_scratch_close(struct tok_scratch *scratch);

/* First match at or after `from` in valid UTF-8. 1 found, 0 none, negative: enum err. */
int tok_regex_find(const struct tok_regex *regex, struct tok_scratch *scratch, const char *text,
                   size_t size, size_t from, size_t *begin, size_t *end);

/* ---- One call ---- */

struct tok_symbol {
    int32_t id;
    int32_t previous, next; /* -1: none */
};

struct tok_candidate {
    uint32_t rank, at;
    int32_t id; /* the merged token */
};

struct tok_node { /* Viterbi: the best segmentation up to one place of a piece */
    double score;
    int32_t id; /* -1: none yet */
    uint32_t from;
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
    const char *first; /* a piece that begins here begins the text */
    size_t next_span;  /* index; all untrusted spans before it end before the current part */

    int32_t *ids;
    size_t count, capacity, max;

    struct tok_symbol *symbols;
    struct tok_candidate *heap;
    size_t work_capacity; /* symbols; the heap has twice as many */
    struct tok_node *nodes;
    size_t node_capacity;
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
    size_t begin, end; /* the match, whitespace swallowed by lstrip and rstrip included */
    int32_t id;
};

/* The next added token at or after match->scan; `taken` is the end of the one before. */
bool tok_added_find(const struct tok *tok, const struct tok_matcher *matcher, bool specials,
                    const struct tok_text *text, size_t taken, struct tok_match *match);

/* Text that a step of the normalizer writes. */
struct tok_writer {
    struct arena *arena;
    char *data;
    size_t size, capacity;
};

bool tok_writer_reserve(struct tok_writer *w, size_t more); /* false: no memory */
bool tok_writer_add(struct tok_writer *w, const char *s, size_t size);

struct tok_span_map {
    const struct tok_span *in;
    size_t in_count, next;
    struct tok_span *out;
    size_t out_count;
};

bool tok_span_map_open(struct tok_span_map *map, struct arena *arena, const struct tok_text *in);
void tok_span_map_add(struct tok_span_map *map, size_t begin, size_t end, size_t at, size_t size,
                      bool changed);

/* Text with parts replaced, in order. */
struct tok_edit {
    struct tok_writer w;
    struct tok_span_map map;
    const struct tok_text *in;
    size_t taken; /* bytes of the old text */
};

void tok_edit_open(struct tok_edit *edit, struct arena *arena, const struct tok_text *in);
/* Puts `s` in the place of in[begin, end), which begins where the last part ended or later. Returns
 * false if there is no memory, or if the text becomes too long. */
bool tok_edit(struct tok_edit *edit, size_t begin, size_t end, const char *s, size_t size);
/* Sets *out to the edited text, or to the text itself if nothing was replaced. ERR_NOMEM. */
int tok_edit_close(struct tok_edit *edit, struct tok_text *out);

/* `text` is base64. Fills step->find and step->content. */
int tok_charsmap_load(struct tok *tok, const char *text, struct tok_step *step, const char *field,
                      struct fault *fault);
int tok_charsmap(struct arena *arena, const struct tok *tok, const struct tok_step *step,
                 const struct tok_text *in, struct tok_text *out); /* ERR_NOMEM */

/* Unicode normalization of `in`; returns `in` itself if it is already normalized. ERR_NOMEM. */
int tok_form(struct arena *arena, enum tok_form form, const struct tok_text *in,
             struct tok_text *out);

/* Runs the whole normalizer. ERR_NOMEM; ERR_LIMIT if a regex needs too many steps. `scratch` may be
 * NULL if no step has a regex. */
int tok_normalize(const struct tok *tok, struct arena *arena, struct tok_scratch *scratch,
                  const struct tok_text *in, struct tok_text *out);

int tok_split(struct tok_encoder *e, int stage, const char *text, size_t size);
int tok_piece(struct tok_encoder *e, const char *piece, size_t size); /* one piece by the model */
int tok_bpe(struct tok_encoder *e, const char *piece, size_t size);
int tok_unigram(struct tok_encoder *e, const char *piece, size_t size);
int tok_wordpiece(struct tok_encoder *e, const char *piece, size_t size);

#endif
