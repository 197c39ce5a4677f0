#include "constrain/foresee.h"

#define LOOK_BACK 1024 /* bytes before the place that are searched for the usual white space */

/* The text, and the bytes that were foreseen after it. */
struct view {
    const char *text, *more;
    size_t size, more_size;
};

static unsigned char byte_at(const struct view *view, size_t i) {
    return (unsigned char)(i < view->size ? view->text[i] : view->more[i - view->size]);
}

static bool is_white_space(int byte) {
    return byte == ' ' || byte == '\n' || byte == '\t' || byte == '\r';
}

static bool is_opening(int byte) {
    return byte == '{' || byte == '[';
}

static bool is_closing(int byte) {
    return byte == '}' || byte == ']';
}

/* Returns the place after the last line break before `end`; 0: there is none. */
static size_t line_begin(const struct view *view, size_t end) {
    const size_t stop = end > LOOK_BACK ? end - LOOK_BACK : 0;
    while (end > stop && byte_at(view, end - 1) != '\n') end--;
    return end > stop ? end : 0;
}

/* Returns how many blanks follow from a place on, at most LOOK_BACK. */
static size_t blanks_from(const struct view *view, size_t begin) {
    size_t end = view->size + view->more_size, i = begin;
    if (end - begin > LOOK_BACK) end = begin + LOOK_BACK;
    while (i < end && is_white_space(byte_at(view, i))) i++;
    return i - begin;
}

/* Returns the n-th byte of the white space that begins a new line, between the byte at `last` and
 * `next`: a line break, then the indentation of the line above, with one step more or less. A step
 * is the first indentation of the text. */
static int indent(const struct view *view, size_t last, int next, size_t n) {
    const size_t line = line_begin(view, last);
    size_t first = 0, width = line > 0 ? blanks_from(view, line) : 0;
    if (n == 0) return '\n';
    while (first < last && first < LOOK_BACK && byte_at(view, first) != '\n') first++;
    size_t step = byte_at(view, first) == '\n' ? blanks_from(view, first + 1) : 0;
    const int blank = step > 0 ? byte_at(view, first + 1) : ' ';
    if (step == 0) step = 2;
    if (is_opening(byte_at(view, last))) width += step;
    if (is_closing(next)) width -= width < step ? width : step;
    return n <= width ? blank : -1;
}

/* Returns the newest place, before `last`, of the same byte that is followed by white space and
 * then by `next` (negative: by anything); `last` if there is none. */
static size_t earlier_place(const struct view *view, size_t last, int next) {
    const size_t stop = last > LOOK_BACK ? last - LOOK_BACK : 0;
    for (size_t i = last; i-- > stop;) {
        if (byte_at(view, i) != byte_at(view, last)) continue;
        const size_t behind = i + 1 + blanks_from(view, i + 1);
        if (behind <= last && (next < 0 || byte_at(view, behind) == next)) return i;
    }
    return last;
}

/* Returns the n-th byte of the white space that is usual between the byte at `last` and `next`
 * (negative: any): what stood between the same two bytes before, else a line break in a text of
 * several lines, else a space after ',' and ':'. -1: there are fewer bytes. */
static int usual_blank(const struct view *view, size_t last, int next, size_t n) {
    const int byte = byte_at(view, last);
    size_t place = earlier_place(view, last, next);
    if (place == last && !is_closing(next)) place = earlier_place(view, last, -1);
    if (place == last) {
        const bool breaks = byte == ',' || is_opening(byte) || is_closing(next);
        if (breaks && line_begin(view, view->size + view->more_size) > 0)
            return indent(view, last, next, n);
        return n == 0 && (byte == ',' || byte == ':') ? ' ' : -1;
    }
    const size_t count = blanks_from(view, place + 1);
    for (size_t i = 0; i < count; i++)
        if (byte_at(view, place + 1 + i) == '\n') return indent(view, last, next, n);
    return n < count ? byte_at(view, place + 1 + n) : -1;
}

/* Returns the next byte of the white space that is usual before `next`; -1: none is usual. */
static int next_blank(const struct view *view, int next) {
    size_t end = view->size + view->more_size, blanks = 0;
    while (blanks < end && blanks < LOOK_BACK && is_white_space(byte_at(view, end - 1 - blanks)))
        blanks++;
    return blanks == end || blanks == LOOK_BACK ? -1
                                                : usual_blank(view, end - 1 - blanks, next, blanks);
}

static bool may_follow(struct automaton *a, uint32_t state, int byte) {
    return byte >= 0 && automaton_move(a, state, (unsigned)byte) > AUTOMATON_DEAD;
}

enum { NONE = -1, SEVERAL = -2 };

/* Returns the only byte, white space aside, that may follow; NONE; SEVERAL. */
static int only_byte(struct automaton *a, uint32_t state) {
    int only = NONE;
    for (int byte = 0; byte < 256 && a->pool.rc == 0; byte++) {
        if (is_white_space(byte) || !may_follow(a, state, byte)) continue;
        if (only >= 0) return SEVERAL;
        only = byte;
    }
    return only;
}

/* Returns the byte that probably follows; negative: none, or the language leaves it open. */
static int next_byte(struct automaton *a, uint32_t state, const struct view *view) {
    static const int blanks[] = {' ', '\n', '\t', '\r'};
    int blank = -1, count = 0;
    if (a->states[state].accepts) return -1;
    for (int i = 0; i < 4; i++) {
        if (!may_follow(a, state, blanks[i])) continue;
        blank = blanks[i];
        count++;
    }
    const int only = only_byte(a, state), usual = count > 0 ? next_blank(view, only) : -1;
    if (may_follow(a, state, usual)) return usual;
    return only == NONE && count == 1 ? blank : only;
}

size_t foresee_write(struct automaton *a, uint32_t state, const char *text, size_t size, char *out,
                     size_t most) {
    struct view view = {.text = text, .more = out, .size = size};
    while (view.more_size < most) {
        int byte = next_byte(a, state, &view);
        if (byte < 0 || a->pool.rc != 0) break;
        state = automaton_move(a, state, (unsigned)byte);
        if (a->pool.rc != 0) break;
        out[view.more_size++] = (char)byte;
    }
    return view.more_size;
}
