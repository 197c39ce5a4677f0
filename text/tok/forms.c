/* The Unicode normalisation forms NFC, NFD, NFKC and NFKD (UAX 15).
 *
 * The text is normalised run by run. A run is one character and the marks and conjoining jamo after
 * it: no other character combines or changes places with the characters before it. Runs that the
 * form leaves as they are get copied. A normaliser that worked on the whole text would need four
 * bytes per character of memory and could not map the untrusted spans, which need the borders of
 * runs. utf8proc gives the data: decompositions, compositions, combining classes. */
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "text/tok/internal.h"

struct normalizer {
    enum tok_form form;
    struct tok_writer *out;
    utf8proc_int32_t *points, *sorted;
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
    utf8proc_option_t options = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE;
    size_t count = 0;
    if (is_compatible(n->form)) options |= UTF8PROC_COMPAT;
    for (size_t i = 0; i < size;) {
        utf8proc_int32_t scalar = 0;
        utf8proc_ssize_t step = utf8proc_iterate((const utf8proc_uint8_t *)s + i,
                                                 (utf8proc_ssize_t)(size - i), &scalar);
        utf8proc_ssize_t got =
            utf8proc_decompose_char(scalar, n->points + count,
                                    (utf8proc_ssize_t)(n->point_capacity - count), options, NULL);
        i += step > 0 ? (size_t)step : 1;
        count += got > 0 ? (size_t)got : 0;
    }
    return count;
}

/* U+FDFA, three bytes, has the longest compatibility decomposition: 18 characters. */
#define POINTS_PER_BYTE 6

static bool normalize_run(struct normalizer *n, const char *s, size_t size, bool *changed) {
    if (!reserve_points(n, POINTS_PER_BYTE * size)) return false;
    size_t count = decompose(n, s, size), start = n->out->size;
    order_points(n, count);
    if (is_composed(n->form))
        count = (size_t)utf8proc_normalize_utf32(n->points, (utf8proc_ssize_t)count,
                                                 UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (!tok_writer_reserve(n->out, 4 * count)) return false;
    for (size_t i = 0; i < count; i++)
        n->out->size += utf8_encode((uint32_t)n->points[i], n->out->data + n->out->size);
    *changed = n->out->size - start != size || memcmp(n->out->data + start, s, size) != 0;
    return true;
}

/* --- where runs end --- */

static size_t ascii_run(const char *s, size_t from, size_t size) {
    while (from < size && (unsigned char)s[from] < 0x80) from++;
    return from;
}

static bool combines(utf8proc_int32_t c) {
    utf8proc_category_t category = utf8proc_category(c);
    return (category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME) ||
           (c >= 0x1100 && c <= 0x11FF) || (c >= 0xA960 && c <= 0xA97F) ||
           (c >= 0xD7B0 && c <= 0xD7FF);
}

/* Every second half of a composition is a mark or a conjoining jamo. The compatibility forms also
 * make such characters of halfwidth ones (U+FF9E, U+FFC2). */
static bool may_combine(const struct normalizer *n, utf8proc_int32_t c) {
    utf8proc_int32_t first[32];
    if (c < 0x300) return false;
    if (combines(c)) return true;
    if (!is_compatible(n->form) || c < 0xFF00 || c > 0xFFEF) return false;
    return utf8proc_decompose_char(c, first, 32, UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT, NULL) > 0 &&
           combines(first[0]);
}

/* The form leaves this character as it is where it stands alone. Hangul syllables have no entry in
 * the table of decompositions. */
static bool is_plain(const struct normalizer *n, utf8proc_int32_t c) {
    const utf8proc_property_t *property = utf8proc_get_property(c);
    bool decomposes = property->decomp_seqindex != UINT16_MAX &&
                      (property->decomp_type == 0 || is_compatible(n->form));
    return !decomposes && (is_composed(n->form) || c < 0xAC00 || c > 0xD7A3);
}

/* *plain: the run is one character that stays as it is. */
static size_t run_end(const struct normalizer *n, const char *s, size_t from, size_t size,
                      bool *plain) {
    utf8proc_int32_t c = 0;
    size_t at = from;
    for (;;) {
        utf8proc_ssize_t step =
            utf8proc_iterate((const utf8proc_uint8_t *)s + at, (utf8proc_ssize_t)(size - at), &c);
        if (at == from)
            *plain = c < 0x80 || is_plain(n, c);
        else if (!may_combine(n, c))
            return at;
        else
            *plain = false;
        at += step > 0 ? (size_t)step : 1;
        if (at >= size) return size;
    }
}

static int normalize(struct normalizer *n, const struct tok_text *in, struct tok_span_map *map) {
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
        normalize(&n, in, &map))
        return ERR_NOMEM;
    if (n.changed) *out = (struct tok_text){writer.data, writer.size, map.out, map.out_count};
    return 0;
}
