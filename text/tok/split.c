/* The pre-tokenizer: stages, each cutting or rewriting the pieces of the one before. A piece goes
 * straight to the next stage and from the last one to the model. */
#include <string.h>

#include "base/utf8.h"
#include "text/tok/internal.h"
#include "text/unicode/unicode.h"

/* One text under one stage: matches and the gaps between them arrive in order, the behaviour says
 * which of them join into a piece. */
struct splitter {
    struct tok_encoder *e;
    int stage;
    const char *text;
    enum tok_behavior behavior;
    bool invert;
    bool open; /* a piece is being collected */
    bool last_was_match;
    size_t begin, end; /* the piece being collected */
};

static int emit(struct splitter *s, size_t begin, size_t end) {
    return begin < end ? tok_split(s->e, s->stage + 1, s->text + begin, end - begin) : 0;
}

static int flush(struct splitter *s) {
    int rc = s->open ? emit(s, s->begin, s->end) : 0;
    s->open = false;
    return rc;
}

static bool joins(const struct splitter *s, bool match) {
    if (!s->open) return false;
    switch (s->behavior) {
    case TOK_CONTIGUOUS:
        return match == s->last_was_match;
    case TOK_MERGED_WITH_PREVIOUS:
        return match && !s->last_was_match;
    case TOK_MERGED_WITH_NEXT:
        return !match && s->last_was_match;
    default:
        return false;
    }
}

static int feed(struct splitter *s, size_t begin, size_t end, bool match) {
    match ^= s->invert;
    if (s->behavior == TOK_REMOVED && match) return flush(s);
    bool join = joins(s, match);
    s->last_was_match = match;
    if (join) {
        s->end = end;
        return 0;
    }
    int rc = flush(s);
    s->open = true;
    s->begin = begin;
    s->end = end;
    return rc;
}

static int fail_match(struct tok_encoder *e, int rc) {
    if (rc == ERR_NOMEM) return tok_no_memory(e);
    return fault_set(e->fault, rc, NULL, "the text needs too many steps to split into words");
}

/* An empty match right behind a match does not count: the search goes on one character later. */
static int feed_matches(struct splitter *s, const struct tok_regex *regex, size_t size,
                        size_t *taken) {
    size_t from = 0, begin, end, last = SIZE_MAX;
    int rc;
    while (from <= size) {
        rc = tok_regex_find(regex, s->e->scratch, s->text, size, from, &begin, &end);
        if (rc == 0) return 0;
        if (rc < 0) return fail_match(s->e, rc);
        if (begin == end && end == last) {
            do from++;
            while (from < size && ((unsigned char)s->text[from] & 0xC0) == 0x80);
            continue;
        }
        if (begin > *taken && (rc = feed(s, *taken, begin, false))) return rc;
        if ((rc = feed(s, begin, end, true))) return rc;
        *taken = from = last = end;
    }
    return 0;
}

static int split_by_regex(struct splitter *s, const struct tok_regex *regex, size_t size) {
    size_t taken = 0;
    int rc = feed_matches(s, regex, size, &taken);
    if (!rc && taken < size) rc = feed(s, taken, size, false);
    return rc ? rc : flush(s);
}

static int split_digits(struct splitter *s, size_t size) {
    size_t taken = 0;
    int rc = 0;
    for (size_t at = 0, next; at < size && !rc; at = next) {
        uint32_t length, code = unicode_decode(s->text + at, size - at, &length);
        next = at + length;
        if (!unicode_is_number(code)) continue;
        if (taken < at) rc = feed(s, taken, at, false);
        if (!rc) rc = feed(s, at, next, true);
        taken = next;
    }
    if (!rc && taken < size) rc = feed(s, taken, size, false);
    return rc ? rc : flush(s);
}

/* The copy of a piece stands where the piece stood: at the beginning of the text, or not. */
static int split_go_on(struct tok_encoder *e, int stage, const char *old, const char *text,
                       size_t size) {
    if (old == e->first) e->first = text;
    return tok_split(e, stage + 1, text, size);
}

static int prefix_space(struct tok_encoder *e, int stage, const char *text, size_t size) {
    if (*text == ' ') return tok_split(e, stage + 1, text, size);
    char *copy = arena_alloc(e->arena, size + 1, 1);
    if (!copy) return tok_no_memory(e);
    *copy = ' ';
    memcpy(copy + 1, text, size);
    return split_go_on(e, stage, text, copy, size + 1);
}

static int metaspace(struct tok_encoder *e, int stage, const char *text, size_t size) {
    const struct tok_stage *s = &e->tok->stages[stage];
    bool marked = size >= s->mark_size && memcmp(text, s->mark, s->mark_size) == 0;
    bool prepend =
        s->prepend == TOK_PREPEND_ALWAYS || (s->prepend == TOK_PREPEND_FIRST && text == e->first);
    size_t spaces = 0, to = 0;
    for (size_t i = 0; i < size; i++) spaces += text[i] == ' ';
    char *copy = arena_alloc(e->arena, size + (spaces + 1) * s->mark_size, 1);
    if (!copy) return tok_no_memory(e);
    if (prepend && !marked && *text != ' ') {
        memcpy(copy, s->mark, s->mark_size);
        to = s->mark_size;
    }
    for (size_t i = 0; i < size; i++) {
        if (text[i] != ' ') {
            copy[to++] = text[i];
            continue;
        }
        memcpy(copy + to, s->mark, s->mark_size);
        to += s->mark_size;
    }
    return split_go_on(e, stage, text, copy, to);
}

static int to_alphabet(struct tok_encoder *e, int stage, const char *text, size_t size) {
    char *copy = arena_alloc(e->arena, size, 2);
    size_t to = 0;
    if (!copy) return tok_no_memory(e);
    for (size_t i = 0; i < size; i++) {
        char name[4];
        size_t n = utf8_encode(tok_char_of((unsigned char)text[i]), name);
        memcpy(copy + to, name, n);
        to += n;
    }
    return split_go_on(e, stage, text, copy, to);
}

int tok_split(struct tok_encoder *e, int stage, const char *text, size_t size) {
    if (size == 0) return 0;
    if (stage == e->tok->stage_count) return tok_piece(e, text, size);
    const struct tok_stage *s = &e->tok->stages[stage];
    struct splitter splitter = {
        .e = e, .stage = stage, .text = text, .behavior = s->behavior, .invert = s->invert};
    switch (s->kind) {
    case TOK_STAGE_SPLIT:
        return split_by_regex(&splitter, s->regex, size);
    case TOK_STAGE_DIGITS:
        return split_digits(&splitter, size);
    case TOK_STAGE_PREFIX_SPACE:
        return prefix_space(e, stage, text, size);
    case TOK_STAGE_METASPACE:
        return metaspace(e, stage, text, size);
    case TOK_STAGE_ALPHABET:
        return to_alphabet(e, stage, text, size);
    }
    return 0;
}
