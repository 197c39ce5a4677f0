/* Lookups in the generated tables, by binary search. */
#include "text/unicode/unicode.h"

#include "text/unicode/tables.h"

#define HANGUL_FIRST  0xAC00u
#define HANGUL_LAST   0xD7A3u
#define LEADING_FIRST 0x1100u
#define VOWEL_FIRST   0x1161u
#define TRAIL_BEFORE  0x11A7u /* one before the first */
#define LEADINGS      19u
#define VOWELS        21u
#define TRAILS        28u /* with none */

size_t unicode_last_start(const uint32_t *starts, size_t count, uint32_t code) {
    size_t low = 0, high = count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (starts[middle] >> 8 <= code)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static uint32_t unicode_value_of(const uint32_t *starts, size_t count, uint32_t code) {
    return starts[unicode_last_start(starts, count, code)] & 0xFF;
}

/* Where the value may change next. */
static uint32_t next_start(const uint32_t *starts, size_t count, uint32_t code) {
    size_t next = unicode_last_start(starts, count, code) + 1;
    return next < count ? starts[next] >> 8 : UNICODE_POINTS;
}

/* The first range that ends at or after `code`, or the end. */
static const struct unicode_range *range_at(const struct unicode_range *ranges, size_t count,
                                            uint32_t code) {
    while (count > 0) {
        size_t half = count / 2;
        if (ranges[half].last < code) {
            ranges += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return ranges;
}

static bool in_ranges(const struct unicode_range *ranges, size_t count, uint32_t code) {
    const struct unicode_range *range = range_at(ranges, count, code);
    return range < ranges + count && range->first <= code;
}

uint32_t unicode_decode(const char *s, size_t size, uint32_t *length) {
    const unsigned char *p = (const unsigned char *)s;
    uint32_t n = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (n > size) n = 1; /* cannot happen in valid text; nothing is read past its end */
    *length = n;
    if (n == 1) return p[0];
    if (n == 2) return (p[0] & 0x1fu) << 6 | (p[1] & 0x3fu);
    if (n == 3) return (p[0] & 0xfu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
    return (p[0] & 7u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
}

/* ---- Properties ---- */

enum unicode_category unicode_category(uint32_t code) {
    if (code >= UNICODE_POINTS) return UNICODE_CN;
    return (enum unicode_category)unicode_value_of(unicode_category_starts,
                                                   unicode_category_starts_count, code);
}

bool unicode_is_letter(uint32_t code) {
    if (code < 0x80) return (code | 0x20) >= 'a' && (code | 0x20) <= 'z';
    enum unicode_category c = unicode_category(code);
    return c >= UNICODE_LU && c <= UNICODE_LO;
}

bool unicode_is_mark(uint32_t code) {
    if (code < 0x300) return false;
    enum unicode_category c = unicode_category(code);
    return c >= UNICODE_MN && c <= UNICODE_ME;
}

bool unicode_is_number(uint32_t code) {
    if (code < 0x80) return code >= '0' && code <= '9';
    enum unicode_category c = unicode_category(code);
    return c >= UNICODE_ND && c <= UNICODE_NO;
}

bool unicode_is_space(uint32_t code) {
    return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 ||
           code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 ||
           code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

bool unicode_is_digit(uint32_t code) {
    return in_ranges(unicode_digits, unicode_digits_count, code);
}

/* A name as its letters and digits in lower case compare. */
static bool is_named(const char *name, const char *asked, size_t size) {
    size_t at = 0;
    for (;; at++, name++) {
        while (*name == '_') name++;
        while (at < size && (asked[at] == '_' || asked[at] == '-' || asked[at] == ' ')) at++;
        if (at == size || !*name) return at == size && !*name;
        char a = *name, b = asked[at];
        if (a >= 'A' && a <= 'Z') a = (char)(a | 0x20);
        if (b >= 'A' && b <= 'Z') b = (char)(b | 0x20);
        if (a != b) return false;
    }
}

bool unicode_property_find(const char *name, size_t size, struct unicode_property *out) {
    for (size_t i = 0; i < unicode_sets_count; i++) {
        const struct unicode_set *set = &unicode_sets[i];
        if (!is_named(set->name, name, size) && !is_named(set->alias, name, size)) continue;
        *out = (struct unicode_property){(int)i, -1};
        return true;
    }
    for (size_t i = 0; i < unicode_scripts_count; i++) {
        const struct unicode_name *script = &unicode_scripts[i];
        if (!is_named(script->name, name, size) && !is_named(script->alias, name, size)) continue;
        *out = (struct unicode_property){-1, (int)i};
        return true;
    }
    return false;
}

const char *unicode_property_name(struct unicode_property property) {
    return property.set < 0 ? unicode_scripts[property.script].name
                            : unicode_sets[property.set].name;
}

bool unicode_has(struct unicode_property property, uint32_t code) {
    if (code >= UNICODE_POINTS) return false;
    if (property.set < 0)
        return (int)unicode_value_of(unicode_script_starts, unicode_script_starts_count, code) ==
               property.script;
    const struct unicode_set *set = &unicode_sets[property.set];
    return (set->categories >> unicode_category(code) & 1) ||
           in_ranges(unicode_set_more + set->more, set->count, code);
}

/* Returns the next code point after `code` for which unicode_has may return another value. */
static uint32_t next_border(struct unicode_property property, uint32_t code) {
    if (property.set < 0)
        return next_start(unicode_script_starts, unicode_script_starts_count, code);
    const struct unicode_set *set = &unicode_sets[property.set];
    const struct unicode_range *more = unicode_set_more + set->more;
    const struct unicode_range *range = range_at(more, set->count, code);
    uint32_t next = next_start(unicode_category_starts, unicode_category_starts_count, code);
    if (range < more + set->count && range->first > code && range->first < next)
        return range->first;
    if (range < more + set->count && range->first <= code && range->last < next)
        return range->last + 1;
    return next;
}

bool unicode_property_range(struct unicode_property property, uint32_t from,
                            struct unicode_range *out) {
    uint32_t code = from;
    while (code < UNICODE_POINTS && !unicode_has(property, code))
        code = next_border(property, code);
    if (code >= UNICODE_POINTS) return false;
    out->first = code;
    while (code < UNICODE_POINTS && unicode_has(property, code)) code = next_border(property, code);
    out->last = code - 1;
    return true;
}

/* ---- Case ---- */

static const struct unicode_special *special_of(uint32_t code) {
    size_t low = 0, high = unicode_specials_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (unicode_specials[middle].code == code) return &unicode_specials[middle];
        if (unicode_specials[middle].code < code)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static uint32_t map_case(const struct unicode_case_run *runs, size_t count, uint32_t code) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const struct unicode_case_run *run = &runs[middle];
        if (run->last < code)
            low = middle + 1;
        else if (run->first > code)
            high = middle;
        else if ((code - run->first) % (uint32_t)run->stride)
            return code;
        else
            return (uint32_t)((int32_t)code + run->delta);
    }
    return code;
}

static int copy_special(const uint32_t from[3], uint32_t out[3]) {
    int n = 0;
    while (n < 3 && from[n]) {
        out[n] = from[n];
        n++;
    }
    return n;
}

int unicode_to_upper(uint32_t code, uint32_t out[3]) {
    const struct unicode_special *special = code < 0x80 ? NULL : special_of(code);
    if (special) return copy_special(special->upper, out);
    out[0] = map_case(unicode_upper_runs, unicode_upper_runs_count, code);
    return 1;
}

int unicode_to_lower(uint32_t code, uint32_t out[3]) {
    const struct unicode_special *special = code < 0x80 ? NULL : special_of(code);
    if (special) return copy_special(special->lower, out);
    out[0] = map_case(unicode_lower_runs, unicode_lower_runs_count, code);
    return 1;
}

int unicode_to_title(uint32_t code, uint32_t out[3]) {
    const struct unicode_special *special = code < 0x80 ? NULL : special_of(code);
    if (special) return copy_special(special->title, out);
    out[0] = map_case(unicode_title_runs, unicode_title_runs_count, code);
    return 1;
}

int unicode_to_fold(uint32_t code, uint32_t out[3]) {
    const struct unicode_special *special = code < 0x80 ? NULL : special_of(code);
    if (special) return copy_special(special->fold, out);
    out[0] = map_case(unicode_fold_runs, unicode_fold_runs_count, code);
    return 1;
}

/* ---- Normalisation ---- */

int unicode_class(uint32_t code) {
    if (code < 0x300 || code >= UNICODE_POINTS) return 0;
    return (int)unicode_value_of(unicode_class_starts, unicode_class_starts_count, code);
}

static size_t decompose_hangul(uint32_t code, uint32_t *out) {
    uint32_t index = code - HANGUL_FIRST, trail = index % TRAILS;
    out[0] = LEADING_FIRST + index / (VOWELS * TRAILS);
    out[1] = VOWEL_FIRST + index / TRAILS % VOWELS;
    if (trail) out[2] = TRAIL_BEFORE + trail;
    return trail ? 3 : 2;
}

/* Finds the decomposition of a character by one step; NULL: it has none. */
static const uint32_t *decomposition_of(uint32_t code, bool compatible, size_t *size) {
    if (code < 0xA0 || code >= UNICODE_POINTS) return NULL;
    size_t index = unicode_last_start(unicode_decompositions, unicode_decompositions_count, code);
    uint32_t key = unicode_decompositions[index];
    if (key >> 8 != code || ((key & 0x80) && !compatible)) return NULL;
    *size = key & 0x7F;
    return unicode_decomposition_pool + unicode_decomposition_at[index];
}

/* Parts that decompose again take the place of what they came from, in front of the rest. */
size_t unicode_decompose(uint32_t code, bool compatible, uint32_t out[UNICODE_DECOMPOSED_MAX]) {
    uint32_t rest[2 * UNICODE_DECOMPOSED_MAX] = {code};
    size_t left = 1, count = 0;
    while (left > 0 && count < UNICODE_DECOMPOSED_MAX) {
        uint32_t next = rest[--left];
        size_t size = 0;
        const uint32_t *parts = decomposition_of(next, compatible, &size);
        if (parts && left + size <= sizeof rest / sizeof *rest)
            while (size > 0) rest[left++] = parts[--size];
        else if (next >= HANGUL_FIRST && next <= HANGUL_LAST)
            count += decompose_hangul(next, out + count);
        else
            out[count++] = next;
    }
    return count;
}

static uint32_t compose_hangul(uint32_t first, uint32_t second) {
    uint32_t leading = first - LEADING_FIRST, vowel = second - VOWEL_FIRST;
    uint32_t syllable = first - HANGUL_FIRST, trail = second - TRAIL_BEFORE;
    if (leading < LEADINGS && vowel < VOWELS)
        return HANGUL_FIRST + (leading * VOWELS + vowel) * TRAILS;
    if (syllable < LEADINGS * VOWELS * TRAILS && syllable % TRAILS == 0 && trail - 1 < TRAILS - 1)
        return first + trail;
    return 0;
}

uint32_t unicode_compose(uint32_t first, uint32_t second) {
    size_t low = 0, high = unicode_compositions_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const struct unicode_composition *pair = &unicode_compositions[middle];
        if (pair->first == first && pair->second == second) return pair->result;
        if (pair->first < first || (pair->first == first && pair->second < second))
            low = middle + 1;
        else
            high = middle;
    }
    return compose_hangul(first, second);
}

static bool is_second(uint32_t code) {
    return code - VOWEL_FIRST < VOWELS || code - TRAIL_BEFORE - 1 < TRAILS - 1 ||
           in_ranges(unicode_seconds, unicode_seconds_count, code);
}

bool unicode_is_inert(uint32_t code) {
    return code < 0xA0 ||
           (!in_ranges(unicode_active, unicode_active_count, code) && !is_second(code));
}

bool unicode_joins_previous(uint32_t code) {
    if (code < 0x300) return false;
    return unicode_class(code) != 0 || is_second(code);
}
