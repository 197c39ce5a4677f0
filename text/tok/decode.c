/* The decoder: what each token stands for as bytes.
 *
 * Published decoders are chains of steps over token strings (Replace, ByteFallback, ByteLevel) and
 * steps over the whole text (Fuse, Strip). The first kind depends on one token alone, so it is done
 * once, while loading, and decoding is a look-up. Of the second kind only the steps are accepted
 * that change the beginning of a text: tok_bytes_first gives a token's bytes there. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"
#include "text/tok/internal.h"

/* ---- Loading ---- */

static int decode_refuse(const char *path, struct fault *fault, const char *what) {
    return fault_set(fault, ERR_UNSUPPORTED, path, "%s", what);
}

static int load_replace(struct tok *tok, const cJSON *node, const char *path, struct fault *fault) {
    struct tok_decoder *d = &tok->decoder;
    const char *find, *content = "";
    bool literal = false;
    int rc = tok_load_pattern(node, path, &find, &literal, fault);
    if (!rc) rc = json_str(node, path, "content", &content, fault);
    if (rc) return rc;
    if (!literal || !*find)
        return decode_refuse(path, fault, "a decoder replaces plain strings only");
    if (d->fused || d->byte_fallback || d->byte_level)
        return decode_refuse(path, fault,
                             "Replace after ByteFallback, ByteLevel or Fuse is not supported");
    if (d->replace_count == TOK_STEPS_MAX)
        return fault_set(fault, ERR_LIMIT, path, "more than %d steps", TOK_STEPS_MAX);
    struct tok_step *step = &d->replaces[d->replace_count++];
    step->find_size = (uint32_t)strlen(find);
    step->content_size = (uint32_t)strlen(content);
    rc = tok_text_add(tok, find, step->find_size, &step->find, fault);
    return rc ? rc : tok_text_add(tok, content, step->content_size, &step->content, fault);
}

static int load_char(const cJSON *node, const char *path, const char *key, char out[4],
                     uint32_t *size, struct fault *fault) {
    const char *text = "";
    size_t length = 0;
    int rc = json_str(node, path, key, &text, fault);
    if (rc) return rc;
    if (!*text || utf8_step(text, strlen(text), &length) != UTF8_CHAR || text[length])
        return fault_set(fault, ERR_MALFORMED, path, "'%s' is not one character", key);
    memcpy(out, text, length);
    *size = (uint32_t)length;
    return 0;
}

static int load_strip(struct tok_decoder *d, const cJSON *node, const char *path,
                      struct fault *fault) {
    int64_t start = 0, stop = 0;
    int rc = json_int(node, path, "start", 0, INT32_MAX, &start, fault);
    if (!rc) rc = json_int(node, path, "stop", 0, INT32_MAX, &stop, fault);
    if (rc) return rc;
    if (start == 0 && stop == 0) return 0;
    if (!d->fused || d->strip_size || start != 1 || stop != 0)
        return decode_refuse(path, fault,
                             "Strip is supported after Fuse, for one character at the beginning");
    return load_char(node, path, "content", d->strip, &d->strip_size, fault);
}

static int decode_load_metaspace(struct tok *tok, const cJSON *node, const char *path,
                                 struct fault *fault) {
    struct tok_decoder *d = &tok->decoder;
    const char *scheme = "always";
    bool prefix = true;
    int rc = load_char(node, path, "replacement", d->mark, &d->mark_size, fault);
    if (!rc) rc = json_str(node, path, "prepend_scheme", &scheme, fault);
    if (!rc) rc = json_bool(node, path, "add_prefix_space", &prefix, fault);
    if (rc) return rc;
    if (d->fused || d->byte_fallback || d->byte_level || d->replace_count)
        return decode_refuse(path, fault, "Metaspace behind other steps is not supported");
    struct tok_step *step = &d->replaces[d->replace_count++];
    step->find_size = d->mark_size;
    step->content_size = 1;
    rc = tok_text_add(tok, d->mark, d->mark_size, &step->find, fault);
    if (!rc) rc = tok_text_add(tok, " ", 1, &step->content, fault);
    if (!prefix || strcmp(scheme, "never") == 0) d->mark_size = 0;
    return rc;
}

/* WordPiece's cleanup: replacements in each token, in this order. */
static const char *const cleanups[][2] = {
    {" .", "."},   {" ?", "?"},     {" !", "!"},     {" ,", ","},
    {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},   {" do not", " don't"},
    {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
};

static int load_words_decoder(struct tok *tok, const cJSON *node, const char *path,
                              struct fault *fault) {
    struct tok_decoder *d = &tok->decoder;
    const char *prefix = "##";
    bool cleanup = true;
    int rc = json_str(node, path, "prefix", &prefix, fault);
    if (!rc) rc = json_bool(node, path, "cleanup", &cleanup, fault);
    if (rc) return rc;
    if (d->fused || d->byte_fallback || d->byte_level || d->replace_count)
        return decode_refuse(path, fault, "WordPiece behind other steps is not supported");
    d->words = true;
    d->prefix_size = (uint32_t)strlen(prefix);
    rc = tok_text_add(tok, prefix, d->prefix_size, &d->prefix, fault);
    for (size_t i = 0; cleanup && !rc && i < sizeof cleanups / sizeof *cleanups; i++) {
        struct tok_step *step = &d->replaces[d->replace_count++];
        step->find_size = (uint32_t)strlen(cleanups[i][0]);
        step->content_size = (uint32_t)strlen(cleanups[i][1]);
        rc = tok_text_add(tok, cleanups[i][0], step->find_size, &step->find, fault);
        if (!rc) rc = tok_text_add(tok, cleanups[i][1], step->content_size, &step->content, fault);
    }
    return rc;
}

int tok_load_decoder(struct tok *tok, const cJSON *node, const char *type, const char *path,
                     struct fault *fault) {
    struct tok_decoder *d = &tok->decoder;
    if (d->words) return decode_refuse(path, fault, "a step behind WordPiece is not supported");
    if (strcmp(type, "Replace") == 0) return load_replace(tok, node, path, fault);
    if (strcmp(type, "Strip") == 0) return load_strip(d, node, path, fault);
    if (strcmp(type, "Metaspace") == 0) return decode_load_metaspace(tok, node, path, fault);
    if (strcmp(type, "WordPiece") == 0) return load_words_decoder(tok, node, path, fault);
    if (strcmp(type, "Fuse") == 0) {
        d->fused = true;
    } else if (strcmp(type, "ByteFallback") == 0 && !d->fused) {
        d->byte_fallback = true;
    } else if (strcmp(type, "ByteLevel") == 0 && !d->fused) {
        d->byte_level = true;
    } else {
        return fault_set(fault, ERR_UNSUPPORTED, path, "'%.64s' is not supported%s", type,
                         d->fused ? " after Fuse" : "");
    }
    return 0;
}

/* ---- Names to bytes ---- */

/* Published decoders copy a name a few times, some bytes longer or shorter. */
#define GROWTH_MAX   24
#define GROWTH_SMALL ((size_t)1 << 20)

/* Adds text that lies in tok->text already. Steps that make each other's texts longer would
 * otherwise take memory without end. */
static int decode_copy_text(struct tok *tok, size_t from, size_t size, struct fault *fault) {
    if (tok->text_size + size > tok->decoder.text_most)
        return fault_set(fault, ERR_LIMIT, "decoder",
                         "makes the texts of the vocabulary more than %d times as long",
                         GROWTH_MAX);
    int rc = tok_text_reserve(tok, size, fault);
    if (rc) return rc;
    if (size) memcpy(tok->text + tok->text_size, tok->text + from, size);
    tok->text_size += size;
    return 0;
}

/* Every place where `find` begins, from the left; the result is tok->text's end. */
static int replace_all(struct tok *tok, const struct tok_step *step, uint32_t *at, uint32_t *size,
                       struct fault *fault) {
    size_t start = tok->text_size, taken = 0;
    int rc = 0;
    for (;;) {
        /* tok->text moves when it grows. */
        const char *s = tok->text + *at;
        const char *found =
            memmem(s + taken, *size - taken, tok->text + step->find, step->find_size);
        size_t end = found ? (size_t)(found - s) : *size;
        if (!found && taken == 0) return 0;
        rc = decode_copy_text(tok, *at + taken, end - taken, fault);
        if (!rc && found) rc = decode_copy_text(tok, step->content, step->content_size, fault);
        if (rc) return rc;
        taken = end + (found ? step->find_size : 0);
        if (!found) break;
    }
    *at = (uint32_t)start;
    *size = (uint32_t)(tok->text_size - start);
    return 0;
}

/* The bytes of a name in the byte alphabet; one that is not in it stays as it is. */
static int from_alphabet(struct tok *tok, struct tok_token *token, struct fault *fault) {
    size_t start = tok->text_size;
    uint32_t unused;
    for (size_t i = 0, length; i < token->bytes_size; i += length) {
        const char *s = tok->text + token->bytes + i;
        bool whole = utf8_step(s, token->bytes_size - i, &length) == UTF8_CHAR && length <= 2;
        uint32_t scalar = (unsigned char)*s;
        if (whole && length == 2) scalar = (scalar & 0x1F) << 6 | ((unsigned char)s[1] & 0x3F);
        int byte = whole ? tok_byte_of(scalar) : -1;
        if (byte < 0) {
            tok->text_size = start;
            token->flags |= TOK_LITERAL;
            return 0;
        }
        char c = (char)byte;
        int rc = tok_text_add(tok, &c, 1, &unused, fault);
        if (rc) return rc;
    }
    token->bytes = (uint32_t)start;
    token->bytes_size = (uint32_t)(tok->text_size - start);
    return 0;
}

static int replace_steps(struct tok *tok, uint32_t *at, uint32_t *size, struct fault *fault) {
    const struct tok_decoder *d = &tok->decoder;
    int rc = 0;
    for (int i = 0; i < d->replace_count && !rc; i++)
        rc = replace_all(tok, &d->replaces[i], at, size, fault);
    return rc;
}

/* A word's beginning gets a space in front, what goes on with it loses the prefix. */
static int space_word(struct tok *tok, struct tok_token *token, struct fault *fault) {
    const struct tok_decoder *d = &tok->decoder;
    const size_t start = tok->text_size;
    uint32_t unused;
    if (token->name_size >= d->prefix_size &&
        memcmp(tok->text + token->name, tok->text + d->prefix, d->prefix_size) == 0) {
        token->bytes += d->prefix_size;
        token->bytes_size -= d->prefix_size;
        return 0;
    }
    int rc = tok_text_add(tok, " ", 1, &unused, fault);
    if (!rc) rc = decode_copy_text(tok, token->name, token->name_size, fault);
    token->bytes = (uint32_t)start;
    token->bytes_size = token->name_size + 1;
    return rc;
}

/* Metaspace drops every mark of the first token, Strip the space at its beginning. */
static int decode_first(struct tok *tok, struct tok_token *token, struct fault *fault) {
    const struct tok_decoder *d = &tok->decoder;
    struct tok_step drop = {.find_size = d->mark_size};
    token->first = token->bytes;
    token->first_size = token->bytes_size;
    if (d->words) {
        token->first = token->name;
        token->first_size = token->name_size;
        return replace_steps(tok, &token->first, &token->first_size, fault);
    }
    if (d->mark_size) {
        drop.find = d->replaces[0].find;
        token->first = token->name;
        token->first_size = token->name_size;
        return replace_all(tok, &drop, &token->first, &token->first_size, fault);
    }
    if (d->strip_size && token->first_size >= d->strip_size &&
        memcmp(tok->text + token->first, d->strip, d->strip_size) == 0) {
        token->first += d->strip_size;
        token->first_size -= d->strip_size;
    }
    return 0;
}

static int decode_name(struct tok *tok, struct tok_token *token, struct fault *fault) {
    const struct tok_decoder *d = &tok->decoder;
    int rc = 0, byte;
    token->bytes = token->name;
    token->bytes_size = token->name_size;
    if (d->words) rc = space_word(tok, token, fault);
    if (!rc) rc = replace_steps(tok, &token->bytes, &token->bytes_size, fault);
    if (!rc && d->byte_fallback &&
        (byte = tok_fallback_of(tok->text + token->bytes, token->bytes_size)) >= 0) {
        char c = (char)byte;
        token->bytes_size = 1;
        rc = tok_text_add(tok, &c, 1, &token->bytes, fault);
    }
    /* Added tokens of a byte-level vocabulary are text as it is, whatever characters they use. */
    if (d->byte_level && (token->flags & TOK_ADDED))
        token->flags |= TOK_LITERAL;
    else if (!rc && d->byte_level)
        rc = from_alphabet(tok, token, fault);
    return rc ? rc : decode_first(tok, token, fault);
}

int tok_decode_names(struct tok *tok, struct fault *fault) {
    const size_t names = tok->text_size;
    tok->decoder.text_most = names + GROWTH_SMALL + names * GROWTH_MAX;
    for (int32_t id = 0; id < tok->vocab_size; id++) {
        struct tok_token *token = &tok->tokens[id];
        if (!(token->flags & TOK_PRESENT)) continue;
        int rc = decode_name(tok, token, fault);
        if (rc) return rc;
        if (token->bytes_size > tok->bytes_max) tok->bytes_max = token->bytes_size;
    }
    return 0;
}
