/* Added tokens: cut out of the text before anything else, leftmost first and longest first.
 *
 * Their patterns lie sorted, so that a match narrows a range of them byte by byte; a table of first
 * bytes skips the places where none begins. Flags (single_word, lstrip, rstrip) and their oddities
 * are those of huggingface/tokenizers. Special tokens are recognised only outside of the untrusted
 * spans: a request's text must not end a turn or begin one. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "text/tok/internal.h"
#include "text/unicode/unicode.h"

int tok_added_reserve(struct tok *tok, size_t count, struct fault *fault) {
    tok->raw.tokens = mem_try_alloc(count, sizeof *tok->raw.tokens);
    tok->normal.tokens = mem_try_alloc(count, sizeof *tok->normal.tokens);
    if (!tok->raw.tokens || !tok->normal.tokens)
        return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for %zu added tokens", count);
    return 0;
}

void tok_added_put(struct tok *tok, const struct tok_added *added) {
    struct tok_matcher *matcher = added->normalized ? &tok->normal : &tok->raw;
    matcher->tokens[matcher->count++] = *added;
}

static int added_compare(const char *a, size_t a_size, const char *b, size_t b_size) {
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order ? order : (a_size > b_size) - (a_size < b_size);
}

static int compare_added(const void *a, const void *b, void *text) {
    const struct tok_added *x = a, *y = b;
    return added_compare((char *)text + x->pattern, x->pattern_size, (char *)text + y->pattern,
                         y->pattern_size);
}

/* Patterns of the second matcher are normalised like the text they are looked for in. */
static int normalize_patterns(struct tok *tok, struct arena *arena, struct tok_scratch *scratch,
                              struct fault *fault) {
    for (size_t i = 0; i < tok->normal.count; i++) {
        struct tok_added *added = &tok->normal.tokens[i];
        struct tok_text in = {.s = tok->text + added->pattern, .size = added->pattern_size}, out;
        int rc = tok_normalize(tok, arena, scratch, &in, &out);
        if (rc) return fault_set(fault, rc, "normalizer", "cannot normalise the added tokens");
        if (out.s == in.s) continue;
        rc = tok_text_add(tok, out.s, out.size, &added->pattern, fault);
        if (rc) return rc;
        added->pattern_size = (uint32_t)out.size;
    }
    return 0;
}

static void finish_matcher(struct tok *tok, struct tok_matcher *matcher) {
    if (matcher->count)
        qsort_r(matcher->tokens, matcher->count, sizeof *matcher->tokens, compare_added, tok->text);
    for (size_t i = 0; i < matcher->count; i++)
        if (matcher->tokens[i].pattern_size) /* the normalizer may have left nothing */
            matcher->starts[(unsigned char)tok->text[matcher->tokens[i].pattern]] = true;
}

int tok_added_finish(struct tok *tok, struct fault *fault) {
    struct arena arena;
    struct tok_scratch *scratch = tok_scratch_open();
    arena_open(&arena, SIZE_MAX);
    int rc = scratch ? normalize_patterns(tok, &arena, scratch, fault)
                     : fault_set(fault, ERR_NOMEM, NULL, "not enough memory for added tokens");
    arena_close(&arena);
    tok_scratch_close(scratch);
    finish_matcher(tok, &tok->raw);
    finish_matcher(tok, &tok->normal);
    for (size_t i = 0; i < tok->normal.count; i++)
        if (tok->normal.tokens[i].special) tok->normal_specials = true;
    return rc;
}

/* --- matching --- */

/* Narrows [*low, *high), whose patterns share `depth` bytes, to those that continue with `byte`.
 * Patterns that end at `depth` sort first. */
static void added_narrow(const struct tok *tok, const struct tok_matcher *matcher, size_t depth,
                         unsigned char byte, size_t *low, size_t *high) {
    size_t bounds[2];
    for (int side = 0; side < 2; side++) {
        size_t a = *low, b = *high;
        while (a < b) {
            const struct tok_added *t = &matcher->tokens[a + (b - a) / 2];
            int value = depth < t->pattern_size ? (unsigned char)tok->text[t->pattern + depth] : -1;
            if (value < byte + side)
                a += (b - a) / 2 + 1;
            else
                b = a + (b - a) / 2;
        }
        bounds[side] = a;
    }
    *low = bounds[0];
    *high = bounds[1];
}

enum trust { TRUSTED, MIXED, UNTRUSTED };

/* Trust in text[at, end); spans before `span` end before it. Empty spans do not count. */
static enum trust trust_of(const struct tok_text *text, size_t span, size_t at, size_t end) {
    size_t covered = at;
    bool touched = false;
    for (; span < text->span_count && text->spans[span].begin < end; span++) {
        const struct tok_span *s = &text->spans[span];
        if (s->begin >= s->end) continue;
        touched = true;
        if (s->begin <= covered && s->end > covered) covered = s->end;
    }
    return covered >= end ? UNTRUSTED : touched ? MIXED : TRUSTED;
}

/* The longest token at `at`. `span` is the first that ends after it. *plain: it is a special token
 * that may not be recognised here, so its text is text. Where a request's bytes would only lengthen
 * what the template wrote, the longest token that they do not touch counts. */
static const struct tok_added *added_longest_at(const struct tok *tok,
                                                const struct tok_matcher *matcher, bool specials,
                                                const struct tok_text *text, size_t span, size_t at,
                                                bool *plain) {
    const struct tok_added *best = NULL;
    size_t low = 0, high = matcher->count;
    for (size_t depth = 0; at + depth < text->size; depth++) {
        added_narrow(tok, matcher, depth, (unsigned char)text->s[at + depth], &low, &high);
        if (low == high) break;
        const struct tok_added *t = &matcher->tokens[low];
        if (t->pattern_size != depth + 1) continue;
        enum trust trust =
            t->special && specials ? trust_of(text, span, at, at + t->pattern_size) : TRUSTED;
        if (trust == MIXED) continue;
        *plain = t->special && (!specials || trust == UNTRUSTED);
        best = t;
    }
    return best;
}

static uint32_t char_before(const struct tok_text *text, size_t at, size_t *begin) {
    uint32_t unused;
    do at--;
    while (at > 0 && ((unsigned char)text->s[at] & 0xC0) == 0x80);
    *begin = at;
    return unicode_decode(text->s + at, text->size - at, &unused);
}

static uint32_t char_after(const struct tok_text *text, size_t at, size_t *end) {
    uint32_t length, code = unicode_decode(text->s + at, text->size - at, &length);
    *end = at + length;
    return code;
}

/* \w of UTS 18: alphabetic, mark, decimal digit, connector, joiner. */
static bool added_is_word(uint32_t c) {
    enum unicode_category category = unicode_category(c);
    return category == UNICODE_ND || category == UNICODE_PC || unicode_is_mark(c) || c == 0x200C ||
           c == 0x200D || unicode_has(unicode_alphabetic, c);
}

static bool stands_alone(const struct tok_text *text, size_t begin, size_t end) {
    size_t unused;
    return (begin == 0 || !added_is_word(char_before(text, begin, &unused))) &&
           (end == text->size || !added_is_word(char_after(text, end, &unused)));
}

static void swallow_spaces(const struct tok_text *text, const struct tok_added *token, size_t taken,
                           struct tok_match *match) {
    size_t next;
    while (token->lstrip && match->begin > taken &&
           unicode_is_space(char_before(text, match->begin, &next)))
        match->begin = next;
    if (token->lstrip && match->begin < taken) match->begin = taken;
    while (token->rstrip && match->end < text->size &&
           unicode_is_space(char_after(text, match->end, &next)))
        match->end = next;
}

/* A token that single_word forbids, and a special one that is not to be recognised, still uses up
 * its text: no other token is found inside. The search goes on behind a match, not behind the white
 * space it swallowed. All of this is as in huggingface/tokenizers. */
bool tok_added_find(const struct tok *tok, const struct tok_matcher *matcher, bool specials,
                    const struct tok_text *text, size_t taken, struct tok_match *match) {
    size_t at = match->scan;
    if (!matcher->count) return false;
    while (at < text->size) {
        if (!matcher->starts[(unsigned char)text->s[at]]) {
            at++;
            continue;
        }
        while (match->span < text->span_count && text->spans[match->span].end <= at) match->span++;
        bool plain = false;
        const struct tok_added *token =
            added_longest_at(tok, matcher, specials, text, match->span, at, &plain);
        if (!token) {
            at++;
            continue;
        }
        match->begin = at;
        match->end = match->scan = at += token->pattern_size;
        match->id = token->id;
        if (plain || (token->single_word && !stands_alone(text, match->begin, match->end)))
            continue;
        swallow_spaces(text, token, taken, match);
        return true;
    }
    return false;
}
