/* Strings that remember which of their bytes came from the request.
 *
 * A string value is a view [begin, begin + size) into a struct jinja_text: bytes plus the ascending
 * ranges of them that are marked. Slices, strip and split share the bytes. A text only grows at its
 * end, and only by what fits its capacity, so a view never changes; `a + b` appends in place when a
 * is the end of its text, which makes building a long string out of pieces linear. Texts with
 * capacity == used (constants, request strings) are never written. All bytes are valid UTF-8. */
#ifndef KEEPD_TEXT_JINJA_TEXT_H
#define KEEPD_TEXT_JINJA_TEXT_H

#include "text/jinja/value.h"

struct jinja_span {
    uint32_t begin, end;
};

struct jinja_text {
    char *data;
    uint32_t used, capacity;
    bool ascii; /* one byte per character */
    uint32_t mark_count, mark_capacity;
    struct jinja_span *marks; /* ascending, disjoint, never touching */
};

static inline const char *jinja_str_data(const struct jinja_value *s) {
    return s->text->data + s->begin;
}

int jinja_text_open(struct jinja_run *run, size_t capacity, struct jinja_text **out);
int jinja_text_add(struct jinja_run *run, struct jinja_text *text, const char *data, size_t size,
                   bool marked);
int jinja_text_puts(struct jinja_run *run, struct jinja_text *text, const char *s); /* unmarked */
int jinja_text_add_code(struct jinja_run *run, struct jinja_text *text, uint32_t code, bool marked);
int jinja_text_add_str(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *s);
int jinja_text_pad(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *fill,
                   int64_t count); /* `fill` count times; nothing when count <= 0 */
struct jinja_value jinja_text_value(struct jinja_text *text); /* the whole text */

/* Copies. */
int jinja_str(struct jinja_run *run, const char *data, size_t size, bool marked,
              struct jinja_value *out);
int jinja_str_c(struct jinja_run *run, const char *s, struct jinja_value *out);
/* A view of bytes that outlive the render and are already valid UTF-8. */
int jinja_str_borrow(struct jinja_run *run, const char *data, size_t size, bool marked,
                     struct jinja_value *out);
struct jinja_value jinja_str_empty(void);

bool jinja_str_marked(const struct jinja_value *s); /* any byte of it */
bool jinja_str_is(const struct jinja_value *s, const char *literal);
bool jinja_str_equal(const struct jinja_value *a, const struct jinja_value *b);
int jinja_str_order(const struct jinja_value *a, const struct jinja_value *b); /* by code point */
/* Length, offset and slice walk the string unless it is ASCII: callers charge for it first. */
static inline int jinja_charge_walk(struct jinja_run *run, const struct jinja_value *s) {
    return s->text->ascii ? 0 : jinja_charge_bytes(run, s->size);
}
size_t jinja_str_length(const struct jinja_value *s); /* code points */
/* Byte offset of code point `index`; the size when there are fewer. */
uint32_t jinja_str_offset(const struct jinja_value *s, size_t index);
struct jinja_value jinja_str_view(const struct jinja_value *s, uint32_t begin, uint32_t end);
/* Python's s[i:j] by code point, with negative and overlong indices. */
struct jinja_value jinja_str_slice(const struct jinja_value *s, int64_t begin, int64_t end);
int jinja_str_concat(struct jinja_run *run, const struct jinja_value *a,
                     const struct jinja_value *b, struct jinja_value *out);
int jinja_str_repeat(struct jinja_run *run, const struct jinja_value *s, int64_t count,
                     struct jinja_value *out);
/* Byte offset of the first (last) `needle` inside [from, to) of `s`, or -1. Callers of find charge
 * for the bytes of `s`. */
int64_t jinja_str_find(const struct jinja_value *s, const struct jinja_value *needle, uint32_t from,
                       uint32_t to);
int jinja_str_rfind(struct jinja_run *run, const struct jinja_value *s,
                    const struct jinja_value *needle, uint32_t from, uint32_t to, int64_t *out);
/* chars NULL: white space. */
int jinja_str_strip(struct jinja_run *run, const struct jinja_value *s,
                    const struct jinja_value *chars, bool left, bool right,
                    struct jinja_value *out);
/* count < 0: all. */
int jinja_str_replace(struct jinja_run *run, const struct jinja_value *s,
                      const struct jinja_value *old, const struct jinja_value *new, int64_t count,
                      struct jinja_value *out);

/* Walks a string's characters; `marked` tells where each came from. */
struct jinja_cursor {
    const struct jinja_text *text;
    uint32_t next, end;  /* byte positions in the text */
    uint32_t mark;       /* the first mark that can still matter */
    uint32_t at, length; /* the current character */
    uint32_t code;
    bool marked;
};

void jinja_cursor_open(struct jinja_cursor *cursor, const struct jinja_value *s);
bool jinja_cursor_step(struct jinja_cursor *cursor);

#endif
