/* Unicode properties in split patterns.
 *
 * PCRE2 has its own tables, of the Unicode version of the machine's library. If PCRE2's table of a
 * property only lacks some code points, the pattern names the property and these code points. If it
 * has others, or if PCRE2 does not know the property, the pattern lists the property's ranges,
 * which is slower to match. Scripts are always listed: PCRE2's \p{Han} may mean Script_Extensions.
 *
 * Comparing a property with PCRE2's takes some milliseconds, so the result is kept for the rest of
 * the process. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "text/pcre.h"
#include "text/tok/internal.h"
#include "text/unicode/unicode.h"

#define SETS_MAX     64
#define RANGES_BYTES 65536 /* the longest list of ranges, as text */

enum known { UNKNOWN, SAME, LACKING, OTHER };

/* Results of comparisons, by property; `lacks` are the missing ranges of LACKING. */
static struct {
    enum known known;
    char *lacks;
} compared[SETS_MAX];
static pthread_mutex_t compared_lock = PTHREAD_MUTEX_INITIALIZER;

/* A pattern in UTF-8 cannot name surrogates. */
static void write_range(struct buf *out, uint32_t first, uint32_t last) {
    if (first >= 0xD800 && first <= 0xDFFF) first = 0xE000;
    if (last >= 0xD800 && last <= 0xDFFF) last = 0xD7FF;
    if (first > last) return;
    buf_fmt(out, first < last ? "\\x{%x}-\\x{%x}" : "\\x{%x}", first, last);
}

static void write_ranges(struct buf *out, struct unicode_property property, bool negated) {
    struct unicode_range range;
    uint32_t from = 0;
    while (unicode_property_range(property, from, &range)) {
        if (!negated)
            write_range(out, range.first, range.last);
        else if (range.first > from)
            write_range(out, from, range.first - 1);
        from = range.last + 1;
    }
    if (negated && from < UNICODE_POINTS) write_range(out, from, UNICODE_POINTS - 1);
}

/* ---- Comparing ---- */

/* Writes every scalar value once, in ascending order. Returns the size. */
static size_t write_scalars(char *text) {
    size_t size = 0;
    for (uint32_t code = 0; code < UNICODE_POINTS; code++)
        if (code < 0xD800 || code > 0xDFFF) size += utf8_encode(code, text + size);
    return size;
}

/* Fills has[code] for each code point with PCRE2's answer. Returns false if PCRE2 does not know the
 * property, or if there is no memory. */
static bool ask(const char *name, const char *text, size_t size, bool *has) {
    char pattern[64];
    int error;
    PCRE2_SIZE offset;
    snprintf(pattern, sizeof pattern, "\\p{%s}++", name);
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP, &error, &offset, NULL);
    pcre2_match_data *data = code ? pcre2_match_data_create(1, NULL) : NULL;
    if (data) {
        (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(data);
        uint32_t length;
        for (PCRE2_SIZE from = 0;
             pcre2_match(code, (PCRE2_SPTR)text, size, from, PCRE2_NO_UTF_CHECK, data, NULL) > 0;
             from = at[1])
            for (PCRE2_SIZE i = at[0]; i < at[1]; i += length)
                has[unicode_decode(text + i, size - i, &length)] = true;
    }
    pcre2_match_data_free(data);
    pcre2_code_free(code);
    return data != NULL;
}

static bool is_surrogate(uint32_t code) {
    return code >= 0xD800 && code <= 0xDFFF;
}

/* Compares code points; the missing ones go to `lacks`. */
static enum known property_compare(struct unicode_property property, const bool *has,
                                   struct buf *lacks) {
    struct unicode_range range;
    enum known known = SAME;
    uint32_t code = 0;
    while (unicode_property_range(property, code, &range)) {
        for (; code < range.first; code++)
            if (has[code]) return OTHER;
        while (code <= range.last) {
            uint32_t first = code;
            while (code <= range.last && !has[code] && !is_surrogate(code)) code++;
            if (code > first) {
                write_range(lacks, first, code - 1);
                known = LACKING;
            } else {
                code++;
            }
        }
    }
    for (; code < UNICODE_POINTS; code++)
        if (has[code]) return OTHER;
    return known;
}

static int learn(struct unicode_property property) {
    struct buf lacks;
    char *text = mem_try_alloc((size_t)4 * UNICODE_POINTS, 1);
    bool *has = mem_try_alloc(UNICODE_POINTS, sizeof *has);
    enum known known = OTHER;
    buf_open(&lacks, RANGES_BYTES);
    if (text && has && ask(unicode_property_name(property), text, write_scalars(text), has))
        known = property_compare(property, has, &lacks);
    bool failed = !text || !has || lacks.failed;
    if (!failed && known == LACKING) {
        compared[property.set].lacks = lacks.data;
        lacks.data = NULL;
    }
    if (!failed) compared[property.set].known = known;
    buf_close(&lacks);
    mem_free(has);
    mem_free(text);
    return failed ? ERR_NOMEM : 0;
}

/* ---- Writing ---- */

static void property_write_set(struct buf *out, struct unicode_property property, bool negated,
                               enum known known, const char *lacks) {
    if (known == SAME) {
        buf_fmt(out, "\\%c{%s}", negated ? 'P' : 'p', unicode_property_name(property));
    } else if (known == LACKING && !negated) {
        buf_fmt(out, "\\p{%s}", unicode_property_name(property));
        buf_str(out, lacks);
    } else {
        write_ranges(out, property, negated);
    }
}

int tok_property_write(struct buf *out, const char *name, size_t size, bool negated,
                       bool in_class) {
    struct unicode_property property;
    enum known known = OTHER;
    const char *lacks = NULL;
    int rc = 0;
    if (!unicode_property_find(name, size, &property)) return ERR_UNSUPPORTED;
    if (property.set >= 0 && property.set < SETS_MAX) {
        pthread_mutex_lock(&compared_lock);
        if (compared[property.set].known == UNKNOWN) rc = learn(property);
        known = compared[property.set].known;
        lacks = compared[property.set].lacks;
        pthread_mutex_unlock(&compared_lock);
    }
    if (rc) return rc;
    bool class = !in_class && known != SAME;
    if (class) buf_str(out, negated ? "[^" : "[");
    property_write_set(out, property, negated && !class, known, lacks);
    if (class) buf_char(out, ']');
    return 0;
}
