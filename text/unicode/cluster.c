/* Extended grapheme clusters, by the rules GB3 to GB999 of UAX 29. */
#include "text/unicode/tables.h"
#include "text/unicode/unicode.h"

/* Values of unicode_break_starts: the break property in the lower four bits, Indic_Conjunct_Break
 * above them. */
enum {
    GB_OTHER,
    GB_CR,
    GB_LF,
    GB_CONTROL,
    GB_EXTEND,
    GB_ZWJ,
    GB_REGIONAL,
    GB_PREPEND,
    GB_SPACING,
    GB_L,
    GB_V,
    GB_T,
    GB_LV,
    GB_LVT,
    GB_PICTURE
};
enum { CONJUNCT_NONE, CONJUNCT_CONSONANT, CONJUNCT_EXTEND, CONJUNCT_LINKER };

/* The cluster up to the current character. */
struct state {
    uint32_t last;     /* break property */
    bool odd_regional; /* an odd number of regional indicators comes last */
    bool picture;      /* a picture comes last, with extending characters after it */
    bool joined;       /* the same, and then a joiner */
    bool consonant;    /* a consonant comes last, with extending characters and linkers after it */
    bool linked;       /* at least one of them is a linker */
};

static void cluster_step(struct state *s, uint32_t value) {
    uint32_t gb = value & 15, conjunct = value >> 4;
    s->joined = s->picture && gb == GB_ZWJ;
    s->picture = gb == GB_PICTURE || (s->picture && gb == GB_EXTEND);
    s->odd_regional = gb == GB_REGIONAL && !s->odd_regional;
    s->linked =
        s->consonant && (conjunct == CONJUNCT_LINKER || (s->linked && conjunct == CONJUNCT_EXTEND));
    s->consonant = conjunct == CONJUNCT_CONSONANT || (s->consonant && conjunct != CONJUNCT_NONE);
    s->last = gb;
}

static bool is_control(uint32_t gb) {
    return gb >= GB_CR && gb <= GB_CONTROL;
}

static bool joins_hangul(uint32_t last, uint32_t next) {
    if (last == GB_L) return next == GB_L || next == GB_V || next == GB_LV || next == GB_LVT;
    if (last == GB_LV || last == GB_V) return next == GB_V || next == GB_T;
    return (last == GB_LVT || last == GB_T) && next == GB_T;
}

static bool cluster_goes_on(const struct state *s, uint32_t value) {
    uint32_t gb = value & 15;
    if (s->last == GB_CR) return gb == GB_LF;
    if (is_control(s->last) || is_control(gb)) return false;
    if (joins_hangul(s->last, gb) || gb == GB_EXTEND || gb == GB_ZWJ || gb == GB_SPACING)
        return true;
    if (s->last == GB_PREPEND || (s->joined && gb == GB_PICTURE)) return true;
    if (s->linked && value >> 4 == CONJUNCT_CONSONANT) return true;
    return s->odd_regional && gb == GB_REGIONAL;
}

static uint32_t cluster_value_of(uint32_t code) {
    uint32_t value = unicode_break_starts[unicode_last_start(unicode_break_starts,
                                                             unicode_break_starts_count, code)] &
                     0xFF;
    return value == GB_LV && (code - 0xAC00) % 28 ? GB_LVT : value;
}

size_t unicode_cluster(const char *s, size_t size) {
    struct state state = {0};
    uint32_t length;
    size_t at = 0;
    do {
        cluster_step(&state, cluster_value_of(unicode_decode(s + at, size - at, &length)));
        at += length;
        if (at >= size) return size;
    } while (cluster_goes_on(&state, cluster_value_of(unicode_decode(s + at, size - at, &length))));
    return at;
}
