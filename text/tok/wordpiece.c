/* WordPiece: from the left the longest token that the rest of a word begins with; all but the first
 * have the prefix in their names, "##". A word with a rest that no token begins, or of too many
 * characters, is one unknown token, as in huggingface/tokenizers.
 *
 * No token is longer than the longest, so a search begins no further to the right. */
#include "base/utf8.h"
#include "text/tok/internal.h"

static size_t count_chars(const char *s, size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < size; i++) count += ((unsigned char)s[i] & 0xC0) != 0x80;
    return count;
}

static bool begins_char(char c) {
    return ((unsigned char)c & 0xC0) != 0x80;
}

/* The token that piece[at, *end) is, of those that begin at `at` the longest; -1: there is none. */
static int32_t wordpiece_longest_at(const struct tok *tok, const char *piece, size_t size,
                                    size_t at, size_t *end) {
    const char *prefix = tok->text + tok->word_prefix;
    const size_t before = at > 0 ? tok->word_prefix_size : 0;
    size_t most = tok->names_max > before ? tok->names_max - before : 0;
    if (most > size - at) most = size - at;
    for (size_t length = most; length > 0; length--) {
        if (at + length < size && !begins_char(piece[at + length])) continue;
        const int32_t id = tok_vocab_find_pair(tok, prefix, before, piece + at, length);
        if (id < 0 || (tok->tokens[id].flags & (TOK_SPECIAL | TOK_OUTSIDE))) continue;
        *end = at + length;
        return id;
    }
    return -1;
}

int tok_wordpiece(struct tok_encoder *e, const char *piece, size_t size) {
    const struct tok *tok = e->tok;
    const size_t first = e->count;
    if (count_chars(piece, size) > (size_t)tok->word_chars_max) return tok_emit(e, tok->unknown);
    for (size_t at = 0, end = 0; at < size; at = end) {
        const int32_t id = wordpiece_longest_at(tok, piece, size, at, &end);
        if (id < 0) {
            e->count = first; /* the tokens of its beginning do not count */
            return tok_emit(e, tok->unknown);
        }
        int rc = tok_emit(e, id);
        if (rc) return rc;
    }
    return 0;
}
