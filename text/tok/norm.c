/* The normalizer: a chain of steps, each of which makes the next text of the one before.
 *
 * Untrusted spans follow the text through every step. A step that changes a part of the text makes
 * all of the new part untrusted where the old part touched an untrusted span: special tokens that
 * are matched after normalising must not be assembled from a request's bytes. */
#include <string.h>

#include "text/tok/internal.h"

/* ---- The text in the making ---------------------------------------------------------------- */

bool tok_writer_reserve(struct tok_writer *w, size_t more) {
    if (more <= w->capacity - w->size) return true;
    size_t capacity = w->capacity * 2 + more;
    char *data = arena_alloc(w->arena, capacity, 1);
    if (!data) return false;
    if (w->size) memcpy(data, w->data, w->size);
    w->data = data;
    w->capacity = capacity;
    return true;
}

bool tok_writer_add(struct tok_writer *w, const char *s, size_t size) {
    if (!tok_writer_reserve(w, size)) return false;
    if (size) memcpy(w->data + w->size, s, size);
    w->size += size;
    return true;
}

/* ---- Spans --------------------------------------------------------------------------------- */

/* Parts are mapped in order, and parts of one span that touch are joined again, so there are never
 * more spans after a step than before it. */
bool tok_span_map_open(struct tok_span_map *map, struct arena *arena, const struct tok_text *in) {
    *map = (struct tok_span_map){.in = in->spans, .in_count = in->span_count};
    if (in->span_count) map->out = arena_alloc(arena, in->span_count, sizeof *map->out);
    return in->span_count == 0 || map->out;
}

/* Maps the part of the spans inside in[begin, end), which became out[at, at + size). */
void tok_span_map_add(struct tok_span_map *map, size_t begin, size_t end, size_t at, size_t size,
                      bool changed) {
    while (map->next < map->in_count && map->in[map->next].end <= begin) map->next++;
    for (size_t i = map->next; i < map->in_count && map->in[i].begin < end; i++) {
        size_t from = map->in[i].begin > begin ? map->in[i].begin - begin : 0;
        size_t to = map->in[i].end < end ? map->in[i].end - begin : end - begin;
        if (from >= to) continue;
        struct tok_span span = {at + (changed ? 0 : from), at + (changed ? size : to)};
        struct tok_span *last = map->out_count ? &map->out[map->out_count - 1] : NULL;
        if (last && last->end >= span.begin)
            last->end = span.end > last->end ? span.end : last->end;
        else
            map->out[map->out_count++] = span;
    }
}

/* ---- Prepend, Replace ---------------------------------------------------------------------- */

static int prepend(struct arena *arena, const struct tok *tok, const struct tok_step *step,
                   const struct tok_text *in, struct tok_text *out) {
    struct tok_writer w = {.arena = arena};
    struct tok_span_map map;
    *out = *in;
    if (in->size == 0) return 0;
    if (!tok_span_map_open(&map, arena, in) ||
        !tok_writer_reserve(&w, step->content_size + in->size))
        return ERR_NOMEM;
    tok_writer_add(&w, tok->text + step->content, step->content_size);
    tok_writer_add(&w, in->s, in->size);
    tok_span_map_add(&map, 0, in->size, step->content_size, in->size, false);
    *out = (struct tok_text){w.data, w.size, map.out, map.out_count};
    return 0;
}

/* The next match at or after `from`: 1 found, 0 none, negative enum err. */
static int find(const struct tok_step *step, const struct tok *tok, struct tok_scratch *scratch,
                const struct tok_text *in, size_t from, size_t *begin, size_t *end) {
    if (step->regex) return tok_regex_find(step->regex, scratch, in->s, in->size, from, begin, end);
    const char *found =
        memmem(in->s + from, in->size - from, tok->text + step->find, step->find_size);
    if (!found) return 0;
    *begin = (size_t)(found - in->s);
    *end = *begin + step->find_size;
    return 1;
}

struct replacer {
    struct tok_writer w;
    struct tok_span_map map;
    size_t taken; /* bytes of the old text */
};

/* Writes `s` for the old text up to `end`. */
static bool put(struct replacer *r, size_t end, const char *s, size_t size, bool changed) {
    size_t at = r->w.size;
    if (!tok_writer_add(&r->w, s, size)) return false;
    tok_span_map_add(&r->map, r->taken, end, at, size, changed);
    r->taken = end;
    return r->w.size <= TOK_TEXT_MAX;
}

/* An empty match right behind a match does not count: the search goes on one character later. */
static int replace(struct arena *arena, const struct tok *tok, struct tok_scratch *scratch,
                   const struct tok_step *step, const struct tok_text *in, struct tok_text *out) {
    struct replacer r = {.w = {.arena = arena}};
    size_t from = 0, begin, end, last = SIZE_MAX;
    int rc;
    *out = *in;
    while (from <= in->size) {
        rc = find(step, tok, scratch, in, from, &begin, &end);
        if (rc < 0) return rc;
        if (rc == 0) break;
        if (begin == end && end == last) {
            do from++;
            while (from < in->size && ((unsigned char)in->s[from] & 0xC0) == 0x80);
            continue;
        }
        if (!r.w.data && (!tok_span_map_open(&r.map, arena, in) ||
                          !tok_writer_reserve(&r.w, in->size + in->size / 2 + 16)))
            return ERR_NOMEM;
        if (!put(&r, begin, in->s + r.taken, begin - r.taken, false) ||
            !put(&r, end, tok->text + step->content, step->content_size, true))
            return ERR_NOMEM;
        from = last = end;
    }
    if (!r.w.data) return 0;
    if (!put(&r, in->size, in->s + r.taken, in->size - r.taken, false)) return ERR_NOMEM;
    *out = (struct tok_text){r.w.data, r.w.size, r.map.out, r.map.out_count};
    return 0;
}

int tok_normalize(const struct tok *tok, struct arena *arena, struct tok_scratch *scratch,
                  const struct tok_text *in, struct tok_text *out) {
    struct tok_text text = *in;
    int rc = 0;
    for (int i = 0; i < tok->step_count && !rc; i++) {
        const struct tok_step *step = &tok->steps[i];
        struct tok_text next = text;
        switch (step->kind) {
        case TOK_STEP_FORM:
            rc = tok_form(arena, step->form, &text, &next);
            break;
        case TOK_STEP_PREPEND:
            rc = prepend(arena, tok, step, &text, &next);
            break;
        case TOK_STEP_REPLACE:
            rc = replace(arena, tok, scratch, step, &text, &next);
            break;
        }
        text = next;
    }
    *out = text;
    return rc;
}
