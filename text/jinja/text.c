/* Strings: growing, cutting, comparing and searching them, with the marks of request bytes carried
 * along (text.h says how texts are shared). Every walk over bytes is charged as steps, so that a
 * template cannot make a render quadratic. */
#include "text/jinja/text.h"

#include <string.h>

#include "base/utf8.h"
#include "text/jinja/unicode.h"
#include "text/unicode/unicode.h"

static int check_size(struct jinja_run *run, size_t size) {
    if (size <= JINJA_TEXT_MAX) return 0;
    return jinja_fail(run, ERR_LIMIT, "a text grows past %u bytes", JINJA_TEXT_MAX);
}

int jinja_text_open(struct jinja_run *run, size_t capacity, struct jinja_text **out) {
    int rc = check_size(run, capacity);
    if (rc) return rc;
    struct jinja_text *text = jinja_alloc(run, 1, sizeof *text);
    if (!text) return jinja_fail_memory(run);
    text->ascii = true;
    text->data = (char *)""; /* never written at capacity 0 */
    if (capacity) {
        text->data = jinja_alloc(run, capacity + 1, 1); /* room for a NUL */
        if (!text->data) return jinja_fail_memory(run);
        text->capacity = (uint32_t)capacity;
    }
    *out = text;
    return 0;
}

static int text_reserve(struct jinja_run *run, struct jinja_text *text, size_t size) {
    size_t needed = (size_t)text->used + size;
    if (needed <= text->capacity) return 0;
    int rc = check_size(run, needed);
    if (rc) return rc;
    size_t capacity = needed + needed / 2 + 32;
    if (capacity > JINJA_TEXT_MAX) capacity = JINJA_TEXT_MAX;
    char *data = jinja_alloc(run, capacity + 1, 1);
    if (!data) return jinja_fail_memory(run);
    rc = jinja_charge_bytes(run, text->used);
    if (rc) return rc;
    if (text->used) memcpy(data, text->data, text->used);
    text->data = data;
    text->capacity = (uint32_t)capacity;
    return 0;
}

static int add_mark(struct jinja_run *run, struct jinja_text *text, uint32_t begin, uint32_t end) {
    if (text->mark_count && text->marks[text->mark_count - 1].end == begin) {
        text->marks[text->mark_count - 1].end = end;
        return 0;
    }
    if (text->mark_count == text->mark_capacity) {
        uint32_t capacity = text->mark_capacity * 2 + 4;
        struct jinja_span *marks = jinja_alloc(run, capacity, sizeof *marks);
        if (!marks) return jinja_fail_memory(run);
        if (text->mark_count) memcpy(marks, text->marks, text->mark_count * sizeof *marks);
        text->marks = marks;
        text->mark_capacity = capacity;
    }
    text->marks[text->mark_count++] = (struct jinja_span){begin, end};
    return 0;
}

static bool all_ascii(const char *data, size_t size) {
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)data[i] >= 0x80) return false;
    return true;
}

static int text_add_bytes(struct jinja_run *run, struct jinja_text *text, const char *data,
                          size_t size) {
    int rc = jinja_charge_bytes(run, size);
    if (!rc) rc = text_reserve(run, text, size);
    if (rc) return rc;
    if (text->ascii) text->ascii = all_ascii(data, size);
    memcpy(text->data + text->used, data, size);
    text->used += (uint32_t)size;
    return 0;
}

int jinja_text_add(struct jinja_run *run, struct jinja_text *text, const char *data, size_t size,
                   bool marked) {
    if (!size) return 0;
    uint32_t begin = text->used;
    int rc = text_add_bytes(run, text, data, size);
    if (rc || !marked) return rc;
    return add_mark(run, text, begin, text->used);
}

int jinja_text_puts(struct jinja_run *run, struct jinja_text *text, const char *s) {
    return jinja_text_add(run, text, s, strlen(s), false);
}

int jinja_text_add_code(struct jinja_run *run, struct jinja_text *text, uint32_t code,
                        bool marked) {
    char bytes[4];
    return jinja_text_add(run, text, bytes, utf8_encode(code, bytes), marked);
}

/* The first mark that ends after `position`. */
static uint32_t find_mark(const struct jinja_text *text, uint32_t position) {
    uint32_t low = 0, high = text->mark_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (text->marks[middle].end <= position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int jinja_text_add_str(struct jinja_run *run, struct jinja_text *text,
                       const struct jinja_value *s) {
    if (!s->size) return 0;
    uint32_t base = text->used, end = s->begin + s->size;
    int rc = text_add_bytes(run, text, jinja_str_data(s), s->size);
    if (rc || !s->text->mark_count) return rc;
    /* By index: `s` may be a view of `text`, whose marks move when they grow. */
    for (uint32_t i = find_mark(s->text, s->begin);
         i < s->text->mark_count && s->text->marks[i].begin < end; i++) {
        struct jinja_span mark = s->text->marks[i];
        if (mark.begin < s->begin) mark.begin = s->begin;
        if (mark.end > end) mark.end = end;
        rc = jinja_charge(run, 1);
        if (!rc)
            rc = add_mark(run, text, base + (mark.begin - s->begin), base + (mark.end - s->begin));
        if (rc) return rc;
    }
    return 0;
}

int jinja_text_pad(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *fill,
                   int64_t count) {
    if (count <= 0 || !fill->size) return 0;
    if (count > (int64_t)JINJA_TEXT_MAX) return check_size(run, (size_t)count);
    int rc = text_reserve(run, text, fill->size * (size_t)count);
    for (int64_t i = 0; i < count && !rc; i++) rc = jinja_text_add_str(run, text, fill);
    return rc;
}

struct jinja_value jinja_text_value(struct jinja_text *text) {
    return (struct jinja_value){.kind = JINJA_STR, .size = text->used, .text = text};
}

int jinja_str(struct jinja_run *run, const char *data, size_t size, bool marked,
              struct jinja_value *out) {
    struct jinja_text *text;
    int rc = jinja_text_open(run, size, &text);
    if (!rc) rc = jinja_text_add(run, text, data, size, marked);
    if (rc) return rc;
    *out = jinja_text_value(text);
    return 0;
}

int jinja_str_c(struct jinja_run *run, const char *s, struct jinja_value *out) {
    return jinja_str_borrow(run, s, strlen(s), false, out);
}

int jinja_str_borrow(struct jinja_run *run, const char *data, size_t size, bool marked,
                     struct jinja_value *out) {
    int rc = check_size(run, size);
    if (!rc) rc = jinja_charge_bytes(run, size);
    if (rc) return rc;
    struct jinja_text *text = jinja_alloc(run, 1, sizeof *text);
    if (!text) return jinja_fail_memory(run);
    *text = (struct jinja_text){
        .data = (char *)data, /* capacity == used: never written */
        .used = (uint32_t)size,
        .capacity = (uint32_t)size,
        .ascii = all_ascii(data, size),
    };
    *out = jinja_text_value(text);
    return marked && size ? add_mark(run, text, 0, (uint32_t)size) : 0;
}

struct jinja_value jinja_str_empty(void) {
    static struct jinja_text nothing = {.data = (char *)"", .ascii = true};
    return jinja_text_value(&nothing);
}

bool jinja_str_marked(const struct jinja_value *s) {
    uint32_t i = s->text->mark_count ? find_mark(s->text, s->begin) : 0;
    return i < s->text->mark_count && s->text->marks[i].begin < s->begin + s->size;
}

bool jinja_str_is(const struct jinja_value *s, const char *literal) {
    size_t size = strlen(literal);
    return s->kind == JINJA_STR && s->size == size && memcmp(jinja_str_data(s), literal, size) == 0;
}

bool jinja_str_equal(const struct jinja_value *a, const struct jinja_value *b) {
    return a->size == b->size &&
           (!a->size || memcmp(jinja_str_data(a), jinja_str_data(b), a->size) == 0);
}

int jinja_str_order(const struct jinja_value *a, const struct jinja_value *b) {
    uint32_t common = a->size < b->size ? a->size : b->size;
    int order = common ? memcmp(jinja_str_data(a), jinja_str_data(b), common) : 0;
    if (order) return order < 0 ? -1 : 1;
    return a->size < b->size ? -1 : a->size > b->size;
}

static size_t count_codes(const char *data, size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < size; i++) count += ((unsigned char)data[i] & 0xc0) != 0x80;
    return count;
}

size_t jinja_str_length(const struct jinja_value *s) {
    return s->text->ascii ? s->size : count_codes(jinja_str_data(s), s->size);
}

uint32_t jinja_str_offset(const struct jinja_value *s, size_t index) {
    if (s->text->ascii) return index < s->size ? (uint32_t)index : s->size;
    const char *data = jinja_str_data(s);
    uint32_t at = 0;
    for (; at < s->size; at++)
        if (((unsigned char)data[at] & 0xc0) != 0x80 && index-- == 0) break;
    return at;
}

struct jinja_value jinja_str_view(const struct jinja_value *s, uint32_t begin, uint32_t end) {
    struct jinja_value view = *s;
    view.begin = s->begin + begin;
    view.size = end > begin ? end - begin : 0;
    return view;
}

struct jinja_value jinja_str_slice(const struct jinja_value *s, int64_t begin, int64_t end) {
    int64_t length = (int64_t)jinja_str_length(s);
    if (begin < 0) begin = begin + length < 0 ? 0 : begin + length;
    if (end < 0) end += length;
    if (end > length) end = length;
    if (begin >= end) return jinja_str_view(s, 0, 0);
    return jinja_str_view(s, jinja_str_offset(s, (size_t)begin), jinja_str_offset(s, (size_t)end));
}

int jinja_str_concat(struct jinja_run *run, const struct jinja_value *a,
                     const struct jinja_value *b, struct jinja_value *out) {
    if (!b->size || !a->size) {
        *out = a->size ? *a : *b;
        return 0;
    }
    struct jinja_text *text = a->text;
    bool at_end = a->begin + a->size == text->used;
    if (at_end && text->capacity - text->used >= b->size) {
        struct jinja_value joined = *a;
        int rc = jinja_text_add_str(run, text, b);
        joined.size += b->size;
        *out = joined;
        return rc;
    }
    size_t size = (size_t)a->size + b->size;
    int rc = check_size(run, size);
    if (rc) return rc;
    size_t roomy = size + size / 2 + 32;
    rc = jinja_text_open(run, roomy < JINJA_TEXT_MAX ? roomy : JINJA_TEXT_MAX, &text);
    if (!rc) rc = jinja_text_add_str(run, text, a);
    if (!rc) rc = jinja_text_add_str(run, text, b);
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

int jinja_str_repeat(struct jinja_run *run, const struct jinja_value *s, int64_t count,
                     struct jinja_value *out) {
    struct jinja_text *text;
    int rc = jinja_text_open(run, 0, &text);
    if (!rc) rc = jinja_text_pad(run, text, s, count);
    if (!rc) *out = text->used ? jinja_text_value(text) : jinja_str_empty();
    return rc;
}

int64_t jinja_str_find(const struct jinja_value *s, const struct jinja_value *needle, uint32_t from,
                       uint32_t to) {
    if (from > to) return -1;
    if (!needle->size) return from;
    if (to - from < needle->size) return -1;
    const char *data = jinja_str_data(s);
    const char *hit = memmem(data + from, to - from, jinja_str_data(needle), needle->size);
    return hit ? hit - data : -1;
}

int jinja_str_rfind(struct jinja_run *run, const struct jinja_value *s,
                    const struct jinja_value *needle, uint32_t from, uint32_t to, int64_t *out) {
    *out = from <= to && !needle->size ? (int64_t)to : -1;
    if (from > to || !needle->size || to - from < needle->size) return 0;
    const char *data = jinja_str_data(s), *wanted = jinja_str_data(needle);
    uint32_t rest = needle->size - 1, first = from + rest; /* where its last byte can be */
    int rc = 0;
    while (!rc && to > first) {
        const char *hit = memrchr(data + first, wanted[rest], to - first);
        uint32_t at = hit ? (uint32_t)(hit - data) : first;
        rc = jinja_charge_bytes(run, (size_t)(to - at) + rest + 16);
        if (rc || !hit) break;
        if (memcmp(data + at - rest, wanted, rest) == 0) {
            *out = at - rest;
            break;
        }
        to = at;
    }
    return rc;
}

static bool strips(uint32_t code, const struct jinja_value *chars) {
    if (!chars) return jinja_is_space(code);
    struct jinja_cursor cursor;
    jinja_cursor_open(&cursor, chars);
    while (jinja_cursor_step(&cursor))
        if (cursor.code == code) return true;
    return false;
}

int jinja_str_strip(struct jinja_run *run, const struct jinja_value *s,
                    const struct jinja_value *chars, bool left, bool right,
                    struct jinja_value *out) {
    const char *data = jinja_str_data(s);
    size_t cost = chars ? chars->size * 4ul + 4 : 1; /* steps for one character */
    uint32_t begin = 0, end = s->size, length;
    while (left && begin < end &&
           strips(unicode_decode(data + begin, end - begin, &length), chars)) {
        int rc = jinja_charge_bytes(run, cost);
        if (rc) return rc;
        begin += length;
    }
    while (right && end > begin) {
        uint32_t last = end - 1;
        while (last > begin && ((unsigned char)data[last] & 0xc0) == 0x80) last--;
        int rc = jinja_charge_bytes(run, cost);
        if (rc) return rc;
        if (!strips(unicode_decode(data + last, end - last, &length), chars)) break;
        end = last;
    }
    *out = jinja_str_view(s, begin, end);
    return 0;
}

/* An empty `old` stands before every character and at the end. */
static int replace_empty(struct jinja_run *run, const struct jinja_value *s,
                         const struct jinja_value *new, int64_t count, struct jinja_text *text) {
    struct jinja_cursor cursor;
    jinja_cursor_open(&cursor, s);
    int rc = 0;
    while (!rc && jinja_cursor_step(&cursor)) {
        if (count != 0) rc = jinja_text_add_str(run, text, new);
        if (count > 0) count--;
        if (!rc)
            rc = jinja_text_add(run, text, s->text->data + cursor.at, cursor.length, cursor.marked);
    }
    if (!rc && count != 0) rc = jinja_text_add_str(run, text, new);
    return rc;
}

int jinja_str_replace(struct jinja_run *run, const struct jinja_value *s,
                      const struct jinja_value *old, const struct jinja_value *new, int64_t count,
                      struct jinja_value *out) {
    struct jinja_text *text;
    int rc = jinja_charge_bytes(run, s->size);
    if (!rc) rc = jinja_text_open(run, s->size, &text);
    if (rc) return rc;
    if (!old->size) {
        rc = replace_empty(run, s, new, count, text);
    } else {
        uint32_t from = 0;
        int64_t hit;
        for (; !rc && count != 0 && (hit = jinja_str_find(s, old, from, s->size)) >= 0; count--) {
            struct jinja_value before = jinja_str_view(s, from, (uint32_t)hit);
            rc = jinja_text_add_str(run, text, &before);
            if (!rc) rc = jinja_text_add_str(run, text, new);
            if (!rc) rc = jinja_charge(run, 1);
            from = (uint32_t)hit + old->size;
        }
        struct jinja_value rest = jinja_str_view(s, from, s->size);
        if (!rc) rc = jinja_text_add_str(run, text, &rest);
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

void jinja_cursor_open(struct jinja_cursor *cursor, const struct jinja_value *s) {
    *cursor = (struct jinja_cursor){
        .text = s->text,
        .next = s->begin,
        .end = s->begin + s->size,
        .mark = s->text->mark_count ? find_mark(s->text, s->begin) : 0,
    };
}

bool jinja_cursor_step(struct jinja_cursor *cursor) {
    if (cursor->next >= cursor->end) return false;
    const struct jinja_text *text = cursor->text;
    cursor->at = cursor->next;
    cursor->code =
        unicode_decode(text->data + cursor->at, cursor->end - cursor->at, &cursor->length);
    cursor->next += cursor->length;
    while (cursor->mark < text->mark_count && text->marks[cursor->mark].end <= cursor->at)
        cursor->mark++;
    cursor->marked =
        cursor->mark < text->mark_count && text->marks[cursor->mark].begin <= cursor->at;
    return true;
}
