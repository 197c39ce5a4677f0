/* A state machine that reads parts of a literal and returns their meaning. Whether a text is a
 * literal is found by reading it to the end. */
#include "server/oai/tool_python.h"

#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "server/oai/tool_json.h"

#define DEPTH_MAX 64 /* bits of `dicts` */
#define KEY_MAX   6  /* bytes of a key that is not a string: with quotes it fits into a piece */

enum state { VALUE, VALUE_OR_END, KEY, KEY_OR_END, COLON, AFTER, IN_STRING, DONE };

/* The next part of a literal: it ends at `end`; its meaning, or size 0 if the text means itself. */
struct part {
    size_t end;
    char meaning[8];
    uint8_t size;
    bool dropped; /* JSON has no equivalent, so it is left out */
};

static bool mean(struct part *out, size_t end, const char *text) {
    out->end = end;
    out->size = (uint8_t)strlen(text);
    memcpy(out->meaning, text, out->size);
    return true;
}

static bool keep(struct part *out, size_t end) {
    out->end = end;
    return true;
}

static bool drop(struct part *out, size_t end) {
    out->end = end;
    out->dropped = true;
    return true;
}

static bool has_bit(uint64_t bits, const struct tool_python *p) {
    return p->depth > 0 && bits >> (p->depth - 1) & 1;
}

/* ---- Containers ---- */

static bool open_container(struct tool_python *p, char c, size_t at, struct part *out) {
    if (p->depth == DEPTH_MAX) return false;
    uint64_t bit = (uint64_t)1 << p->depth++;
    p->dicts = c == '{' ? p->dicts | bit : p->dicts & ~bit;
    p->tuples = c == '(' ? p->tuples | bit : p->tuples & ~bit;
    p->commas &= ~bit;
    p->state = c == '{' ? KEY_OR_END : VALUE_OR_END;
    return mean(out, at + 1, c == '{' ? "{" : "[");
}

/* Closes a container. `empty`: it has no elements. (1) is 1 and not a tuple. */
static bool close_container(struct tool_python *p, char c, size_t at, bool empty,
                            struct part *out) {
    bool dict = has_bit(p->dicts, p), tuple = has_bit(p->tuples, p);
    if (p->depth == 0 || c != (dict ? '}' : tuple ? ')' : ']')) return false;
    if (tuple && !empty && !has_bit(p->commas, p)) return false;
    p->depth--;
    p->state = p->depth > 0 ? AFTER : DONE;
    return mean(out, at + 1, dict ? "}" : "]");
}

static bool is_close(char c) {
    return c == ')' || c == ']' || c == '}';
}

/* Reads a comma. Python allows one before the end of a container; JSON does not. */
static bool read_comma(struct tool_python *p, const char *text, size_t at, size_t end,
                       struct part *out) {
    size_t next = at + 1;
    p->commas |= (uint64_t)1 << (p->depth - 1);
    while (next < end && tool_json_blank(text[next])) next++;
    if (next == end) return false;
    if (is_close(text[next])) return drop(out, next);
    p->state = has_bit(p->dicts, p) ? KEY : VALUE;
    return keep(out, at + 1);
}

/* ---- Scalars ---- */

static bool end_scalar(struct tool_python *p) {
    p->state = p->key ? COLON : AFTER;
    return p->depth > 0;
}

/* Reads True, False, None or a number, which ends where no byte of one can follow. */
static bool read_scalar(struct tool_python *p, const char *text, size_t at, size_t end,
                        struct part *out) {
    static const char *const words[][3] = {{"True", "true", "\"true\""},
                                           {"False", "false", "\"false\""},
                                           {"None", "null", "\"null\""}};
    char quoted[KEY_MAX + 3];
    size_t to = at;
    while (to < end && !tool_json_blank(text[to]) && !strchr(",:)]}", text[to])) to++;
    size_t size = to - at;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strlen(words[i][0]) == size && memcmp(text + at, words[i][0], size) == 0)
            return end_scalar(p) && mean(out, to, words[i][p->key ? 2 : 1]);
    if (!tool_json_is_number(text + at, size)) return false;
    if (!p->key) return end_scalar(p) && keep(out, to);
    if (size > KEY_MAX) return false;
    snprintf(quoted, sizeof quoted, "\"%.*s\"", (int)size, text + at);
    return end_scalar(p) && mean(out, to, quoted);
}

/* ---- Strings ---- */

/* Writes a character in the form that a JSON string has. */
static bool mean_character(struct part *out, size_t end, uint32_t scalar) {
    char text[9] = "";
    if (scalar > 0x10FFFF) return false;
    if (scalar == '"' || scalar == '\\')
        snprintf(text, sizeof text, "\\%c", (char)scalar);
    else if (scalar < 0x20 || (scalar >= 0xD800 && scalar < 0xE000))
        snprintf(text, sizeof text, "\\u%04x", scalar);
    else
        text[utf8_encode(scalar, text)] = '\0';
    return mean(out, end, text);
}

static int32_t digit_value(char c, unsigned base) {
    int32_t value = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : 16;
    return value < (int32_t)base ? value : -1;
}

/* Reads `least` to `most` digits. */
static bool read_digits(const char *text, size_t at, size_t end, unsigned base, size_t least,
                        size_t most, struct part *out) {
    uint32_t value = 0;
    size_t count = 0;
    while (count < most && at + count < end && digit_value(text[at + count], base) >= 0)
        value = value * base + (uint32_t)digit_value(text[at + count++], base);
    return count >= least && mean_character(out, at + count, value);
}

/* Reads an escape. An unknown one is a backslash and the character after it. */
static bool read_escape(const char *text, size_t at, size_t end, struct part *out) {
    static const char letters[] = "\\'\"abfnrtv", values[] = "\\'\"\a\b\f\n\r\t\v";
    if (at + 1 == end) return false;
    char letter = text[at + 1];
    const char *found = letter != '\0' ? strchr(letters, letter) : NULL;
    if (found != NULL) return mean_character(out, at + 2, (unsigned char)values[found - letters]);
    if (letter == '\n') return drop(out, at + 2);
    if (letter == 'x') return read_digits(text, at + 2, end, 16, 2, 2, out);
    if (letter == 'u') return read_digits(text, at + 2, end, 16, 4, 4, out);
    if (letter == 'U') return read_digits(text, at + 2, end, 16, 8, 8, out);
    if (letter >= '0' && letter <= '7') return read_digits(text, at + 1, end, 8, 1, 3, out);
    return letter != 'N' && mean(out, at + 1, "\\\\");
}

static bool read_in_string(struct tool_python *p, const char *text, size_t at, size_t end,
                           struct part *out) {
    size_t to = at;
    while (to < end && text[to] != p->quote && text[to] != '"' && text[to] != '\\' &&
           (unsigned char)text[to] >= 0x20)
        to++;
    if (to > at) return keep(out, to);
    if (text[at] == p->quote) {
        p->state = p->depth == 0 ? DONE : p->key ? COLON : AFTER;
        return mean(out, at + 1, "\"");
    }
    if (text[at] == '\\') return read_escape(text, at, end, out);
    if (text[at] == '\n' || text[at] == '\r' || text[at] == '\0') return false;
    return mean_character(out, at + 1, (unsigned char)text[at]);
}

/* ---- Parts ---- */

static bool begin_value(struct tool_python *p, const char *text, size_t at, size_t end,
                        struct part *out) {
    bool may_end = p->state == VALUE_OR_END || p->state == KEY_OR_END;
    char c = text[at];
    p->key = p->state == KEY || p->state == KEY_OR_END;
    if (may_end && is_close(c)) return close_container(p, c, at, true, out);
    if (c == '"' || c == '\'') {
        p->quote = c;
        p->state = IN_STRING;
        return mean(out, at + 1, "\"");
    }
    if (!p->key && (c == '(' || c == '[' || c == '{')) return open_container(p, c, at, out);
    return read_scalar(p, text, at, end, out);
}

/* Reads the part that begins at `at`, before `end`. false: the text is not a literal. */
static bool read_part(struct tool_python *p, const char *text, size_t at, size_t end,
                      struct part *out) {
    *out = (struct part){0};
    if (p->state == IN_STRING) return read_in_string(p, text, at, end, out);
    if (p->depth > 0 && tool_json_blank(text[at])) {
        while (at < end && tool_json_blank(text[at])) at++;
        return keep(out, at);
    }
    switch (p->state) {
    case COLON:
        p->state = VALUE;
        return text[at] == ':' && keep(out, at + 1);
    case AFTER:
        if (text[at] == ',') return read_comma(p, text, at, end, out);
        return close_container(p, text[at], at, false, out);
    case DONE:
        return false;
    default:
        return begin_value(p, text, at, end, out);
    }
}

bool tool_python_is(const char *text, size_t size) {
    struct tool_python p = {0};
    struct part part;
    for (size_t at = 0; at < size; at = part.end)
        if (!read_part(&p, text, at, size, &part)) return false;
    return p.state == DONE;
}

struct tool_piece tool_python_next(struct tool_python *p, const char *text, size_t *at,
                                   size_t end) {
    struct part part;
    while (*at < end && read_part(p, text, *at, end, &part)) {
        struct tool_piece piece = tool_piece(TOOL_ARGUMENTS, *at, part.end);
        *at = part.end;
        if (part.dropped) continue;
        piece.decoded_size = part.size;
        memcpy(piece.decoded, part.meaning, part.size);
        return piece;
    }
    return tool_piece(TOOL_MORE, 0, 0);
}
