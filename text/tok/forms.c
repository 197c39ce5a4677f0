/* The Unicode normalisation forms NFC, NFD, NFKC and NFKD (UAX 15).
 *
 * The text is normalised run by run. A run is one character and the characters after it that may
 * compose or change places with the one before them. Runs that the form leaves as they are get
 * copied. A normaliser that worked on the whole text would need four bytes per character of memory
 * and could not map the untrusted spans, which need the borders of runs. */
#include <string.h>

#include "base/utf8.h"
#include "text/tok/internal.h"
#include "text/unicode/unicode.h"

struct normalizer {
    enum tok_form form;
    struct tok_writer *out;
    uint32_t *points, *sorted;
    size_t point_capacity;
    bool changed;
};

static bool is_compatible(enum tok_form form) {
    return form == TOK_NFKC || form == TOK_NFKD;
}

static bool is_composed(enum tok_form form) {
    return form == TOK_NFC || form == TOK_NFKC;
}

static bool reserve_points(struct normalizer *n, size_t count) {
    if (count <= n->point_capacity) return true;
    size_t capacity = n->point_capacity * 2 + count;
    n->points = arena_alloc(n->out->arena, capacity, sizeof *n->points);
    n->sorted = arena_alloc(n->out->arena, capacity, sizeof *n->sorted);
    n->point_capacity = capacity;
    return n->points && n->sorted;
}

/* Sorts a run of combining marks into canonical order, by counting; swapping neighbours would take
 * quadratic time, and the text comes from a client. */
static void order_marks(uint32_t *points, size_t count, uint32_t *sorted) {
    size_t place[257] = {0};
    for (size_t i = 0; i < count; i++) place[unicode_class(points[i]) + 1]++;
    for (int c = 1; c < 257; c++) place[c] += place[c - 1];
    for (size_t i = 0; i < count; i++) sorted[place[unicode_class(points[i])]++] = points[i];
    memcpy(points, sorted, count * sizeof *points);
}

static void order_points(struct normalizer *n, size_t count) {
    for (size_t i = 0, end; i < count; i = end) {
        int last = unicode_class(n->points[i]);
        bool ordered = true;
        end = i + 1;
        if (last == 0) continue;
        for (int c; end < count && (c = unicode_class(n->points[end])) != 0; end++) {
            ordered &= c >= last;
            last = c;
        }
        if (!ordered) order_marks(n->points + i, end - i, n->sorted);
    }
}

/* U+FDFA, three bytes, has the longest compatibility decomposition: 18 characters. */
#define POINTS_PER_BYTE 6

static size_t decompose(struct normalizer *n, const char *s, size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < size;) {
        uint32_t parts[UNICODE_DECOMPOSED_MAX], length;
        uint32_t code = unicode_decode(s + i, size - i, &length);
        size_t got = unicode_decompose(code, is_compatible(n->form), parts);
        i += length;
        for (size_t k = 0; k < got && count < n->point_capacity; k++) n->points[count++] = parts[k];
    }
    return count;
}

/* A character composes with the last starter unless a character between them has its class or a
 * higher one. */
static size_t compose(uint32_t *points, size_t count) {
    size_t kept = 0, starter = SIZE_MAX;
    int last = 0; /* the class of the character that was kept last */
    for (size_t i = 0; i < count; i++) {
        uint32_t code = points[i];
        int class = unicode_class(code);
        bool free = starter != SIZE_MAX && (kept == starter + 1 || last < class);
        uint32_t whole = free ? unicode_compose(points[starter], code) : 0;
        if (whole) {
            points[starter] = whole;
            continue;
        }
        if (class == 0) starter = kept;
        last = class;
        points[kept++] = code;
    }
    return kept;
}

static bool normalize_run(struct normalizer *n, const char *s, size_t size, bool *changed) {
    if (!reserve_points(n, POINTS_PER_BYTE * size)) return false;
    size_t count = decompose(n, s, size), start = n->out->size;
    order_points(n, count);
    if (is_composed(n->form)) count = compose(n->points, count);
    if (!tok_writer_reserve(n->out, 4 * count)) return false;
    for (size_t i = 0; i < count; i++)
        n->out->size += utf8_encode(n->points[i], n->out->data + n->out->size);
    *changed = n->out->size - start != size || memcmp(n->out->data + start, s, size) != 0;
    return true;
}

/* --- where runs end --- */

static size_t ascii_run(const char *s, size_t from, size_t size) {
    while (from < size && (unsigned char)s[from] < 0x80) from++;
    return from;
}

/* Finds two properties of a character. *joins: it may join the character before it, or the first
 * part of its decomposition may. *plain: the form does not change it if it stands alone. */
static void inspect(const struct normalizer *n, uint32_t code, bool *joins, bool *plain) {
    uint32_t parts[UNICODE_DECOMPOSED_MAX];
    *joins = false;
    *plain = is_composed(n->form) || code < 0xAC00 || code > 0xD7A3;
    if (unicode_is_inert(code)) return;
    size_t count = unicode_decompose(code, is_compatible(n->form), parts);
    *joins = unicode_joins_previous(code) || unicode_joins_previous(parts[0]);
    *plain = count == 1 && parts[0] == code;
}

/* Returns where the run that begins at `from` ends. *plain: the run is one character that the form
 * does not change. */
static size_t run_end(const struct normalizer *n, const char *s, size_t from, size_t size,
                      bool *plain) {
    bool joins, stays;
    for (size_t at = from; at < size;) {
        uint32_t length, code = unicode_decode(s + at, size - at, &length);
        inspect(n, code, &joins, &stays);
        if (at > from && !joins) return at;
        *plain = at == from && stays;
        at += length;
    }
    return size;
}

static int forms_normalize(struct normalizer *n, const struct tok_text *in,
                           struct tok_span_map *map) {
    for (size_t at = 0, end; at < in->size; at = end) {
        bool plain = true, changed = false;
        end = ascii_run(in->s, at, in->size);
        /* The last ASCII character may combine with the next one. */
        if (end < in->size && end > at) end--;
        if (end == at) end = run_end(n, in->s, at, in->size, &plain);
        size_t out = n->out->size;
        if (!(plain ? tok_writer_add(n->out, in->s + at, end - at)
                    : normalize_run(n, in->s + at, end - at, &changed)))
            return ERR_NOMEM;
        tok_span_map_add(map, at, end, out, n->out->size - out, changed);
        n->changed |= changed;
    }
    return 0;
}

int tok_form(struct arena *arena, enum tok_form form, const struct tok_text *in,
             struct tok_text *out) {
    struct tok_writer writer = {.arena = arena};
    struct normalizer n = {.form = form, .out = &writer};
    struct tok_span_map map;
    *out = *in;
    if (ascii_run(in->s, 0, in->size) == in->size) return 0;
    if (!tok_span_map_open(&map, arena, in) || !tok_writer_reserve(&writer, in->size + 16) ||
        forms_normalize(&n, in, &map))
        return ERR_NOMEM;
    if (n.changed) *out = (struct tok_text){writer.data, writer.size, map.out, map.out_count};
    return 0;
}
