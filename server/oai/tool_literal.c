/* A state machine that reads parts of a literal and returns their meaning. Whether a text is a
 * literal is found by reading it to the end. */
#include "server/oai/tool_literal.h"

#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "server/oai/tool_json.h"
#include "server/oai/tool_match.h"

#define DEPTH_MAX 64 /* bits of `dicts` */
#define KEY_MAX   6  /* bytes of a key that is not a string: with quotes it fits into a piece */

enum state { VALUE, VALUE_OR_END, KEY, KEY_OR_END, IN_NAME, COLON, AFTER, IN_STRING, DONE };

/* The next part of a literal: it ends at `end`; its meaning, or size 0 if the text means itself. */
struct part {
    size_t end;
    char meaning[8];
    uint8_t size;
    bool dropped; /* JSON has no equivalent, so it is left out */
};

static enum match mean_part(struct part *out, size_t end, const char *text) {
    out->end = end;
    out->size = (uint8_t)strlen(text);
    memcpy(out->meaning, text, out->size);
    return MATCH_YES;
}

static enum match keep_part(struct part *out, size_t end) {
    out->end = end;
    return MATCH_YES;
}

static enum match drop_part(struct part *out, size_t end) {
    out->end = end;
    out->dropped = true;
    return MATCH_YES;
}

static bool has_bit(uint64_t bits, const struct tool_literal *l) {
    return l->depth > 0 && bits >> (l->depth - 1) & 1;
}

/* Returns the text that stands before and after strings; NULL: quotes do. */
static const char *mark_of(const struct tool_literal *l) {
    return l->notation != NULL ? l->notation->mark : NULL;
}

/* Returns the first byte at or after `at` that is not blank, or the place where looking for it ends
 * because too much would be held back. */
static size_t behind_blanks(const char *text, size_t at, size_t end) {
    size_t most = end - at > TOOL_LITERAL_HELD_MAX ? at + TOOL_LITERAL_HELD_MAX : end;
    while (at < most && tool_json_blank(text[at])) at++;
    return at;
}

/* ---- Containers ---- */

static enum match open_literal_container(struct tool_literal *l, char c, size_t at,
                                         struct part *out) {
    if (l->depth == DEPTH_MAX) return MATCH_NO;
    bool dict = c == '{' || (l->depth == 0 && l->notation != NULL);
    uint64_t bit = (uint64_t)1 << l->depth++;
    l->dicts = dict ? l->dicts | bit : l->dicts & ~bit;
    l->tuples = c == '(' && !dict ? l->tuples | bit : l->tuples & ~bit;
    l->commas &= ~bit;
    l->state = dict ? KEY_OR_END : VALUE_OR_END;
    return mean_part(out, at + 1, dict ? "{" : "[");
}

/* Closes a container. `empty`: it has no elements. (1) is 1 and not a tuple. */
static enum match close_literal_container(struct tool_literal *l, char c, size_t at, bool empty,
                                          struct part *out) {
    bool dict = has_bit(l->dicts, l), tuple = has_bit(l->tuples, l);
    char close = l->depth == 1 && l->notation != NULL ? l->notation->brackets[1]
                 : dict                               ? '}'
                 : tuple                              ? ')'
                                                      : ']';
    if (l->depth == 0 || c != close) return MATCH_NO;
    if (tuple && !empty && !has_bit(l->commas, l)) return MATCH_NO;
    l->depth--;
    l->state = l->depth > 0 ? AFTER : DONE;
    return mean_part(out, at + 1, dict ? "}" : "]");
}

static bool is_close(char c) {
    return c == ')' || c == ']' || c == '}';
}

/* Reads a comma. Python allows one before the end of a container; JSON does not. */
static enum match read_comma(struct tool_literal *l, const char *text, size_t at, size_t end,
                             struct part *out) {
    size_t next = behind_blanks(text, at + 1, end);
    l->commas |= (uint64_t)1 << (l->depth - 1);
    if (next == end) return MATCH_MORE;
    if (is_close(text[next])) return drop_part(out, next);
    l->state = has_bit(l->dicts, l) ? KEY : VALUE;
    return keep_part(out, at + 1);
}

/* ---- Scalars ---- */

static enum match end_scalar(struct tool_literal *l) {
    l->state = l->key ? COLON : AFTER;
    return l->depth > 0 ? MATCH_YES : MATCH_NO;
}

/* Reads True, False, None or a number, which ends where no byte of one can follow. */
static enum match read_scalar(struct tool_literal *l, const char *text, size_t at, size_t end,
                              struct part *out) {
    /* the last three are no words of Python */
    static const char *const words[][3] = {
        {"True", "true", "\"true\""}, {"False", "false", "\"false\""}, {"None", "null", "\"null\""},
        {"true", "true", "\"true\""}, {"false", "false", "\"false\""}, {"null", "null", "\"null\""},
    };
    const size_t count = l->notation != NULL ? 6 : 3;
    char quoted[KEY_MAX + 3];
    size_t to = at;
    while (to < end && !tool_json_blank(text[to]) && !strchr(",:)]}", text[to])) {
        if (to - at == TOOL_LITERAL_HELD_MAX) return MATCH_NO;
        to++;
    }
    size_t size = to - at;
    if (to == end) return MATCH_MORE;
    for (size_t i = 0; i < count; i++)
        if (strlen(words[i][0]) == size && memcmp(text + at, words[i][0], size) == 0) {
            mean_part(out, to, words[i][l->key ? 2 : 1]);
            return end_scalar(l);
        }
    if (!tool_json_is_number(text + at, size)) return MATCH_NO;
    if (!l->key) {
        keep_part(out, to);
        return end_scalar(l);
    }
    if (size > KEY_MAX) return MATCH_NO;
    snprintf(quoted, sizeof quoted, "\"%.*s\"", (int)size, text + at);
    mean_part(out, to, quoted);
    return end_scalar(l);
}

/* ---- Strings ---- */

/* Writes a character in the form that a JSON string has. */
static enum match mean_character(struct part *out, size_t end, uint32_t scalar) {
    char text[9] = "";
    if (scalar > 0x10FFFF) return MATCH_NO;
    if (scalar == '"' || scalar == '\\')
        snprintf(text, sizeof text, "\\%c", (char)scalar);
    else if (scalar < 0x20 || (scalar >= 0xD800 && scalar < 0xE000))
        snprintf(text, sizeof text, "\\u%04x", scalar);
    else
        text[utf8_encode(scalar, text)] = '\0';
    return mean_part(out, end, text);
}

static int32_t digit_value(char c, unsigned base) {
    int32_t value = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : 16;
    return value < (int32_t)base ? value : -1;
}

/* Reads `least` to `most` digits. */
static enum match read_digits(const char *text, size_t at, size_t end, unsigned base, size_t least,
                              size_t most, struct part *out) {
    uint32_t value = 0;
    size_t count = 0;
    while (count < most && at + count < end && digit_value(text[at + count], base) >= 0)
        value = value * base + (uint32_t)digit_value(text[at + count++], base);
    if (count < most && at + count == end) return MATCH_MORE;
    return count >= least ? mean_character(out, at + count, value) : MATCH_NO;
}

/* Reads an escape. An unknown one is a backslash and the character after it. */
static enum match read_literal_escape(const char *text, size_t at, size_t end, struct part *out) {
    static const char letters[] = "\\'\"abfnrtv", values[] = "\\'\"\a\b\f\n\r\t\v";
    if (at + 1 == end) return MATCH_MORE;
    char letter = text[at + 1];
    const char *found = letter != '\0' ? strchr(letters, letter) : NULL;
    if (found != NULL) return mean_character(out, at + 2, (unsigned char)values[found - letters]);
    if (letter == '\n') return drop_part(out, at + 2);
    if (letter == 'x') return read_digits(text, at + 2, end, 16, 2, 2, out);
    if (letter == 'u') return read_digits(text, at + 2, end, 16, 4, 4, out);
    if (letter == 'U') return read_digits(text, at + 2, end, 16, 8, 8, out);
    if (letter >= '0' && letter <= '7') return read_digits(text, at + 1, end, 8, 1, 3, out);
    return letter != 'N' ? mean_part(out, at + 1, "\\\\") : MATCH_NO;
}

/* Reads a quote or a mark that begins a string. NO: there is none. */
static enum match begin_literal_string(struct tool_literal *l, const char *text, size_t at,
                                       size_t end, struct part *out) {
    const char *mark = mark_of(l);
    struct cursor c = {text, at, end};
    if (mark == NULL && text[at] != '"' && text[at] != '\'') return MATCH_NO;
    enum match match = mark != NULL ? match_word(&c, mark) : MATCH_YES;
    if (match != MATCH_YES) return match;
    l->quote = text[at];
    l->state = IN_STRING;
    return mean_part(out, mark != NULL ? c.at : at + 1, "\"");
}

static enum match end_string(struct tool_literal *l, size_t end, struct part *out) {
    l->state = l->depth == 0 ? DONE : l->key ? COLON : AFTER;
    return mean_part(out, end, "\"");
}

/* Reads in a string between marks, where the first byte of the mark is l->quote. */
static enum match read_to_mark(struct tool_literal *l, const char *text, size_t at, size_t end,
                               struct part *out) {
    struct cursor c = {text, at, end};
    enum match match = match_word(&c, mark_of(l));
    if (match == MATCH_YES) return end_string(l, c.at, out);
    return match == MATCH_NO ? keep_part(out, at + 1) : match;
}

static enum match read_in_string(struct tool_literal *l, const char *text, size_t at, size_t end,
                                 struct part *out) {
    const bool marked = mark_of(l) != NULL;
    size_t to = at;
    while (to < end && text[to] != l->quote && text[to] != '"' && text[to] != '\\' &&
           (unsigned char)text[to] >= 0x20)
        to++;
    if (to > at) return keep_part(out, to);
    if (text[at] == l->quote) {
        if (marked) return read_to_mark(l, text, at, end, out);
        return end_string(l, at + 1, out);
    }
    if (text[at] == '\\' && !marked) return read_literal_escape(text, at, end, out);
    if (l->notation == NULL && (text[at] == '\n' || text[at] == '\r' || text[at] == '\0'))
        return MATCH_NO;
    return mean_character(out, at + 1, (unsigned char)text[at]);
}

/* ---- Names without quotes ---- */

static bool is_name_byte(char c) {
    return (unsigned char)c > 0x20 && c != 0x7F && !strchr("=:,(){}[]<>\"'\\", c);
}

/* Reads the first character of a name: its meaning is a quote and the character. */
static enum match begin_plain_name(struct tool_literal *l, const char *text, size_t at, size_t end,
                                   struct part *out) {
    const unsigned char first = (unsigned char)text[at];
    const size_t size = first < 0xC0 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    char quoted[6] = "\"";
    if (!is_name_byte(text[at])) return MATCH_NO;
    if (end - at < size) return MATCH_MORE;
    for (size_t i = 1; i < size; i++)
        if (((unsigned char)text[at + i] & 0xC0) != 0x80) return MATCH_NO;
    memcpy(quoted + 1, text + at, size);
    l->state = IN_NAME;
    return mean_part(out, at + size, quoted);
}

/* Reads on in a name, which may hold spaces, and what follows it. */
static enum match read_plain_name(struct tool_literal *l, const char *text, size_t at, size_t end,
                                  struct part *out) {
    size_t to = at, next;
    while (to < end && is_name_byte(text[to])) to++;
    if (to > at) return keep_part(out, to);
    next = behind_blanks(text, at, end);
    if (next == end) return MATCH_MORE;
    if (text[next] == (l->depth == 1 ? l->notation->assign[0] : ':')) {
        l->state = VALUE;
        return mean_part(out, next + 1, "\": ");
    }
    return text[at] == ' ' && is_name_byte(text[next]) ? keep_part(out, at + 1) : MATCH_NO;
}

/* ---- Parts ---- */

static enum match begin_key(struct tool_literal *l, const char *text, size_t at, size_t end,
                            struct part *out) {
    l->key = true;
    if (!constrain_plain_names(l->notation, l->depth == 1)) {
        enum match match = begin_literal_string(l, text, at, end, out);
        return match == MATCH_NO ? read_scalar(l, text, at, end, out) : match;
    }
    enum match match = mark_of(l) != NULL ? begin_literal_string(l, text, at, end, out) : MATCH_NO;
    return match == MATCH_NO ? begin_plain_name(l, text, at, end, out) : match;
}

static enum match begin_literal_value(struct tool_literal *l, const char *text, size_t at,
                                      size_t end, struct part *out) {
    const char c = text[at];
    const bool tuples = mark_of(l) == NULL;
    l->key = false;
    if (l->depth == 0 && l->notation != NULL)
        return c == l->notation->brackets[0] ? open_literal_container(l, c, at, out) : MATCH_NO;
    enum match match = begin_literal_string(l, text, at, end, out);
    if (match != MATCH_NO) return match;
    if (c == '[' || c == '{' || (c == '(' && tuples)) return open_literal_container(l, c, at, out);
    return read_scalar(l, text, at, end, out);
}

/* Reads the part that begins at `at`, before `end`. NO: the text is not a literal. */
static enum match read_literal_part(struct tool_literal *l, const char *text, size_t at, size_t end,
                                    struct part *out) {
    *out = (struct part){0};
    if (l->state == IN_STRING) return read_in_string(l, text, at, end, out);
    if (l->state == IN_NAME) return read_plain_name(l, text, at, end, out);
    if (l->depth > 0 && tool_json_blank(text[at])) {
        while (at < end && tool_json_blank(text[at])) at++;
        return keep_part(out, at);
    }
    switch (l->state) {
    case COLON:
        l->state = VALUE;
        return text[at] == ':' ? keep_part(out, at + 1) : MATCH_NO;
    case AFTER:
        if (text[at] == ',') return read_comma(l, text, at, end, out);
        return close_literal_container(l, text[at], at, false, out);
    case VALUE_OR_END:
    case KEY_OR_END:
        if (is_close(text[at])) return close_literal_container(l, text[at], at, true, out);
        break;
    default:
        break;
    }
    return l->state == KEY || l->state == KEY_OR_END ? begin_key(l, text, at, end, out)
                                                     : begin_literal_value(l, text, at, end, out);
}

enum tool_literal_step tool_literal_next(struct tool_literal *l, const char *text, size_t *at,
                                         size_t end, struct tool_piece *piece) {
    while (l->state != DONE) {
        const struct tool_literal before = *l;
        struct part part;
        if (*at == end) return TOOL_LITERAL_MORE;
        enum match match = read_literal_part(l, text, *at, end, &part);
        if (match == MATCH_NO) return TOOL_LITERAL_BAD;
        if (match == MATCH_MORE) {
            *l = before;
            return TOOL_LITERAL_MORE;
        }
        *piece = tool_piece(TOOL_ARGUMENTS, *at, part.end);
        *at = part.end;
        if (part.dropped) continue;
        piece->decoded_size = part.size;
        memcpy(piece->decoded, part.meaning, part.size);
        return TOOL_LITERAL_PIECE;
    }
    return TOOL_LITERAL_DONE;
}

bool tool_literal_is(const char *text, size_t size) {
    struct tool_literal l = {0};
    struct tool_piece piece;
    enum tool_literal_step step = TOOL_LITERAL_PIECE;
    size_t at = 0;
    while (step == TOOL_LITERAL_PIECE) step = tool_literal_next(&l, text, &at, size, &piece);
    return step == TOOL_LITERAL_DONE && at == size;
}
