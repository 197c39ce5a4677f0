/* Unicode NFC, run by run: one character and the marks and conjoining jamo after it. Nothing else
 * ever combines with what stands before it. Runs that cannot change are only copied. */
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "text/tok/internal.h"

struct normalizer {
    struct arena *arena;
    char *out;
    size_t size, capacity;
    utf8proc_int32_t *points, *sorted;
    size_t point_capacity;
    bool changed;
};

static bool reserve_out(struct normalizer *n, size_t more) {
    if (more <= n->capacity - n->size) return true;
    size_t capacity = n->capacity * 2 + more;
    char *out = arena_alloc(n->arena, capacity, 1);
    if (!out) return false;
    if (n->size) memcpy(out, n->out, n->size);
    n->out = out;
    n->capacity = capacity;
    return true;
}

static bool add(struct normalizer *n, const char *s, size_t size) {
    if (!reserve_out(n, size)) return false;
    memcpy(n->out + n->size, s, size);
    n->size += size;
    return true;
}

static bool reserve_points(struct normalizer *n, size_t count) {
    if (count <= n->point_capacity) return true;
    size_t capacity = n->point_capacity * 2 + count;
    n->points = arena_alloc(n->arena, capacity, sizeof *n->points);
    n->sorted = arena_alloc(n->arena, capacity, sizeof *n->sorted);
    n->point_capacity = capacity;
    return n->points && n->sorted;
}

static int combining_class(utf8proc_int32_t c) {
    return c < 0x300 ? 0 : (int)utf8proc_get_property(c)->combining_class;
}

/* Canonical order of one run of combining marks, by counting: utf8proc's own ordering swaps
 * neighbours, which a client can make quadratic. */
static void order_marks(utf8proc_int32_t *points, size_t count, utf8proc_int32_t *sorted) {
    size_t place[257] = {0};
    for (size_t i = 0; i < count; i++) place[combining_class(points[i]) + 1]++;
    for (int c = 1; c < 257; c++) place[c] += place[c - 1];
    for (size_t i = 0; i < count; i++) sorted[place[combining_class(points[i])]++] = points[i];
    memcpy(points, sorted, count * sizeof *points);
}

static void order_points(struct normalizer *n, size_t count) {
    for (size_t i = 0, end; i < count; i = end) {
        int last = combining_class(n->points[i]);
        bool ordered = true;
        end = i + 1;
        if (last == 0) continue;
        for (int c; end < count && (c = combining_class(n->points[end])) != 0; end++) {
            ordered &= c >= last;
            last = c;
        }
        if (!ordered) order_marks(n->points + i, end - i, n->sorted);
    }
}

/* The text is valid UTF-8, so utf8proc has nothing to refuse. */
static size_t decompose(struct normalizer *n, const char *s, size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < size;) {
        utf8proc_int32_t scalar = 0;
        utf8proc_ssize_t step = utf8proc_iterate((const utf8proc_uint8_t *)s + i,
                                                 (utf8proc_ssize_t)(size - i), &scalar);
        utf8proc_ssize_t got = utf8proc_decompose_char(
            scalar, n->points + count, (utf8proc_ssize_t)(n->point_capacity - count),
            UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, NULL);
        i += step > 0 ? (size_t)step : 1;
        count += got > 0 ? (size_t)got : 0;
    }
    return count;
}

static bool normalize_run(struct normalizer *n, const char *s, size_t size, bool *changed) {
    /* Two bytes give at most three characters, three or four bytes at most four. */
    if (!reserve_points(n, size + size / 2 + 4)) return false;
    size_t count = decompose(n, s, size), start = n->size;
    order_points(n, count);
    utf8proc_ssize_t composed = utf8proc_normalize_utf32(n->points, (utf8proc_ssize_t)count,
                                                         UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (!reserve_out(n, 4 * (size_t)composed)) return false;
    for (utf8proc_ssize_t i = 0; i < composed; i++)
        n->size += utf8_encode((uint32_t)n->points[i], n->out + n->size);
    *changed = n->size - start != size || memcmp(n->out + start, s, size) != 0;
    return true;
}

/* --- where runs end --- */

static size_t ascii_run(const char *s, size_t from, size_t size) {
    while (from < size && (unsigned char)s[from] < 0x80) from++;
    return from;
}

/* Every second half of a canonical composition is a mark or a conjoining jamo. */
static bool may_combine(utf8proc_int32_t c) {
    if (c < 0x300) return false;
    utf8proc_category_t category = utf8proc_category(c);
    return (category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME) ||
           (c >= 0x1100 && c <= 0x11FF) || (c >= 0xA960 && c <= 0xA97F) ||
           (c >= 0xD7B0 && c <= 0xD7FF);
}

/* Alone it is its own NFC: nothing to decompose, or a Hangul syllable. */
static bool is_plain(utf8proc_int32_t c) {
    const utf8proc_property_t *property = utf8proc_get_property(c);
    return property->decomp_seqindex == UINT16_MAX || property->decomp_type != 0;
}

/* *plain: the run is one character that stays as it is. */
static size_t run_end(const char *s, size_t from, size_t size, bool *plain) {
    utf8proc_int32_t c = 0;
    size_t at = from;
    for (;;) {
        utf8proc_ssize_t step =
            utf8proc_iterate((const utf8proc_uint8_t *)s + at, (utf8proc_ssize_t)(size - at), &c);
        if (at == from)
            *plain = c < 0x80 || is_plain(c);
        else if (!may_combine(c))
            return at;
        else
            *plain = false;
        at += step > 0 ? (size_t)step : 1;
        if (at >= size) return size;
    }
}

/* --- spans: a run that changed is untrusted as a whole where it touches an untrusted span --- */

struct span_map {
    const struct tok_span *in;
    size_t in_count, next;
    struct tok_span *out;
    size_t out_count;
};

/* Maps the part of the spans inside in[begin, end), which became out[at, at + size). */
static void map_spans(struct span_map *map, size_t begin, size_t end, size_t at, size_t size,
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

static bool normalize_next(struct normalizer *n, const char *s, size_t size, bool plain,
                           bool *changed) {
    *changed = false;
    return plain ? add(n, s, size) : normalize_run(n, s, size, changed);
}

static int normalize(struct normalizer *n, const struct tok_text *in, struct span_map *map) {
    for (size_t at = 0, end; at < in->size; at = end) {
        bool plain = true, changed;
        end = ascii_run(in->s, at, in->size);
        /* The last ASCII character may combine with what follows. */
        if (end < in->size && end > at) end--;
        if (end == at) end = run_end(in->s, at, in->size, &plain);
        size_t out = n->size;
        if (!normalize_next(n, in->s + at, end - at, plain, &changed)) return ERR_NOMEM;
        map_spans(map, at, end, out, n->size - out, changed);
        n->changed |= changed;
    }
    return 0;
}

int tok_normalize(struct arena *arena, const struct tok_text *in, struct tok_text *out) {
    struct normalizer n = {.arena = arena};
    struct span_map map = {.in = in->spans, .in_count = in->span_count};
    *out = *in;
    if (ascii_run(in->s, 0, in->size) == in->size) return 0;
    if (in->span_count) {
        /* A span is cut at most where runs meet, and pieces that touch are joined again. */
        map.out = arena_alloc(arena, in->span_count, sizeof *map.out);
        if (!map.out) return ERR_NOMEM;
    }
    if (!reserve_out(&n, in->size + 16) || normalize(&n, in, &map)) return ERR_NOMEM;
    if (!n.changed) return 0;
    *out = (struct tok_text){n.out, n.size, map.out, map.out_count};
    return 0;
}
