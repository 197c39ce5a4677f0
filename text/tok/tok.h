/* Tokenizer: BPE, Unigram and WordPiece as published in tokenizer.json. Immutable after loading;
 * every function may be called from any thread.
 *
 * It executes the file as huggingface/tokenizers does: added tokens are cut out first; the
 * normalizer (NFC, NFD, NFKC, NFKD, Prepend, Replace, Precompiled, Lowercase, Strip, StripAccents,
 * Nmt, BertNormalizer); the pre-tokenizer (Split, ByteLevel, Digits, Punctuation, Whitespace,
 * WhitespaceSplit, Metaspace, BertPreTokenizer); the model (byte-level BPE, BPE over characters
 * with byte fallback, Unigram, WordPiece); the post-processor (TemplateProcessing,
 * RobertaProcessing) for plain completions; the decoder (ByteLevel, Replace, ByteFallback, Fuse,
 * Strip, Metaspace, WordPiece). Every other component is refused at load by name.
 *
 * Characters have the properties of Unicode 16 (text/unicode), as in the expressions of tokenizers
 * 0.22. Its normal forms, StripAccents, BertNormalizer and Punctuation still know Unicode 8 or 9
 * alone, and its Lowercase and Digits Unicode 17: there the two differ on characters of other
 * versions. */
#ifndef KEEPD_TEXT_TOK_TOK_H
#define KEEPD_TEXT_TOK_TOK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/err.h"

struct tok;

/* Pure: parses `data` (the bytes of tokenizer.json). ERR_UNSUPPORTED names the component.
 * The caller owns *out and frees it with tok_close. */
int tok_open(const char *data, size_t size, struct tok **out, struct fault *fault);
void tok_close(struct tok *tok);

/* The older form, pure too: vocab.json, merges.txt and tokenizer_config.json of a Qwen2 or GPT-2
 * tokenizer. tok_open_dir reads tokenizer.json, or these three where it is absent. */
struct tok_parts {
    const char *vocab, *merges, *config;
    size_t vocab_size, merges_size, config_size;
};
int tok_open_parts(const struct tok_parts *parts, struct tok **out, struct fault *fault);
int tok_open_dir(const char *dir, struct tok **out, struct fault *fault);

/* The tokenizer of a GGUF file: `tokenizer.ggml.model` gpt2 or llama. Nothing of `gguf` is kept. */
struct gguf;
int tok_open_gguf(const struct gguf *gguf, struct tok **out, struct fault *fault);

int32_t tok_vocab_size(const struct tok *tok); /* highest id + 1, added tokens included */

/* A byte range of the text that came from a request: no special token is recognised inside it. */
struct tok_span {
    size_t begin, end;
};

struct tok_ids {
    int32_t *ids; /* in the arena */
    size_t count;
};

#define TOK_SPECIALS 1u /* recognise special tokens written in the text (outside `untrusted`) */
#define TOK_TEMPLATE 2u /* run the post-processor (adds BOS where the model wants it) */

/* Text must be valid UTF-8 (ERR_INVALID otherwise). `untrusted`: ascending, disjoint; may be NULL.
 * Non-special added tokens are matched everywhere. Memory and result live in `arena`;
 * ERR_LIMIT without a field when the result would exceed `max_ids`, with one when the arena's
 * ceiling is reached. */
int tok_encode(const struct tok *tok, const char *text, size_t size, unsigned flags,
               const struct tok_span *untrusted, size_t untrusted_count, size_t max_ids,
               struct arena *arena, struct tok_ids *out, struct fault *fault);

/* The tokens of two texts as the post-processor joins them, such as "[CLS] a [SEP] b [SEP]"; no
 * special token is recognised in them. *second: the place of the first token that belongs to the
 * second one. ERR_UNSUPPORTED: the tokenizer joins none. */
struct tok_pair {
    const char *text[2];
    size_t size[2];
};
int tok_encode_pair(const struct tok *tok, const struct tok_pair *pair, size_t max_ids,
                    struct arena *arena, struct tok_ids *out, size_t *second, struct fault *fault);

/* The raw bytes of one token (may be part of a UTF-8 character). Unknown ids give 0 bytes. */
size_t tok_bytes(const struct tok *tok, int32_t id, const char **bytes);
/* The same where the token begins a text: SentencePiece's decoders drop its first space. */
size_t tok_bytes_first(const struct tok *tok, int32_t id, const char **bytes);
size_t tok_bytes_max(const struct tok *tok); /* the longest token's bytes */
/* The vocabulary's own spelling of a token, such as "\u0120the" or "<0x0A>"; valid UTF-8. Unknown
 * ids give 0 bytes. */
size_t tok_name(const struct tok *tok, int32_t id, const char **name);
int tok_added_before(const struct tok *tok); /* tokens that TOK_TEMPLATE puts in front of a text */
int tok_added_after(const struct tok *tok);  /* and behind it */
bool tok_is_special(const struct tok *tok, int32_t id);
/* Makes tok_is_special say no for a token from now on; texts from requests still do not become it.
 * Not beside other threads that use the tokenizer. */
void tok_show(struct tok *tok, int32_t id);
bool tok_is_added(const struct tok *tok, int32_t id); /* cut out of texts first, special or not */

#endif
