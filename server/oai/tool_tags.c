/* Reads parameters in tags as members of a JSON object. Each step returns one piece; a piece that
 * is not text of the answer itself says what the text means. */
#include "server/oai/tool_tags.h"

#include <stdio.h>

#include "server/oai/tool_match.h"

#define PARAMETER_OPENS  "<parameter="
#define PARAMETER_CLOSES "</parameter>"
#define FUNCTION_CLOSES  "</function>"
#define CALL_CLOSES      "</tool_call>"

static struct tool_piece more(void) {
    return tool_piece(TOOL_MORE, 0, 0);
}

/* Takes the text up to `end` as it is. */
static struct tool_piece take(size_t *at, size_t end) {
    struct tool_piece piece = tool_piece(TOOL_ARGUMENTS, *at, end);
    *at = end;
    return piece;
}

/* Takes the text up to `end`, which means other text of at most 8 bytes. */
static struct tool_piece take_as(size_t *at, size_t end, const char *meaning) {
    struct tool_piece piece = take(at, end);
    piece.decoded_size = (uint8_t)strlen(meaning);
    memcpy(piece.decoded, meaning, piece.decoded_size);
    return piece;
}

/* ---- Between parameters ---- */

/* Text that is no tag is left out. */
static struct tool_piece next_between(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                      bool last) {
    for (; *at < end; ++*at) {
        struct cursor parameter = {text, *at, end}, function = parameter, call = parameter;
        enum match opens = match_word(&parameter, PARAMETER_OPENS);
        enum match closes = match_word(&function, FUNCTION_CLOSES);
        if (opens == MATCH_YES) {
            bool first = !t->any;
            t->any = true;
            t->place = TOOL_TAGS_NAME;
            t->name_begin = parameter.at;
            return take_as(at, parameter.at, first ? "{\"" : ", \"");
        }
        if (closes == MATCH_NO) { /* a function may lack its end */
            function = call;
            closes = match_word(&function, CALL_CLOSES);
        }
        if (closes == MATCH_YES) {
            t->place = TOOL_TAGS_OVER;
            if (t->any) return take_as(at, function.at, "}");
            *at = function.at;
            return tool_piece(TOOL_BARE, function.at, function.at);
        }
        if (!last && (opens == MATCH_MORE || closes == MATCH_MORE)) return more();
    }
    return more();
}

/* ---- Text as a JSON string ---- */

static bool is_plain(char byte) {
    return (unsigned char)byte >= 0x20 && byte != '"' && byte != '\\' && byte != 0x7F;
}

static struct tool_piece take_escaped(const char *text, size_t *at) {
    static const char named[] = "\b\f\n\r\t\"\\", letters[] = "bfnrt\"\\";
    char meaning[8], byte = text[*at];
    const char *name = byte != '\0' ? strchr(named, byte) : NULL;
    if (name != NULL)
        snprintf(meaning, sizeof meaning, "\\%c", letters[name - named]);
    else
        snprintf(meaning, sizeof meaning, "\\u%04x", (unsigned char)byte);
    return take_as(at, *at + 1, meaning);
}

static struct tool_piece next_in_name(struct tool_tags *t, const char *text, size_t *at,
                                      size_t end) {
    size_t to = *at;
    while (to < end && text[to] != '>' && is_plain(text[to])) to++;
    if (to > *at) return take(at, to);
    if (to == end) return more();
    if (text[to] != '>') return take_escaped(text, at);
    t->name_end = to;
    t->place = TOOL_TAGS_OPEN;
    return more();
}

/* Matches the end of a value, with the line break before it. */
static enum match match_close(struct cursor *c) {
    struct cursor begin = *c;
    if (c->at < c->end && c->text[c->at] == '\n') c->at++;
    enum match match = match_word(c, PARAMETER_CLOSES);
    if (match != MATCH_YES) *c = begin;
    return match;
}

static struct tool_piece next_in_string(struct tool_tags *t, const char *text, size_t *at,
                                        size_t end, bool last) {
    size_t to = *at;
    for (; to < end && is_plain(text[to]); to++) {
        struct cursor c = {text, to, end};
        enum match match = text[to] == '<' ? match_close(&c) : MATCH_NO;
        if (match == MATCH_YES || (match == MATCH_MORE && !last)) break;
    }
    if (to > *at) return take(at, to);
    if (to == end) return more();
    struct cursor c = {text, to, end};
    enum match match = match_close(&c);
    if (match == MATCH_MORE && !last) return more();
    if (match != MATCH_YES) return take_escaped(text, at);
    t->place = TOOL_TAGS_BETWEEN;
    return take_as(at, c.at, "\"");
}

/* ---- Values ---- */

static bool is_text(const struct tool_tags *t, const char *text) {
    size_t size = t->name_end - t->name_begin;
    for (const char *const *name = t->texts; name != NULL && *name != NULL; name++)
        if (strlen(*name) == size && memcmp(*name, text + t->name_begin, size) == 0) return true;
    return false;
}

/* Is the text a number of JSON? */
static bool is_number(const char *text, size_t size) {
    struct tool_json json = {0};
    if (size == 0 || size >= TOOL_TAGS_HELD_MAX || strchr("-0123456789", text[0]) == NULL ||
        text[0] == '\0' || tool_json_step(&json, '[') != TOOL_JSON_MORE)
        return false;
    for (size_t i = 0; i < size; i++)
        if (tool_json_blank(text[i]) || text[i] == ',' || text[i] == ']' ||
            tool_json_step(&json, text[i]) != TOOL_JSON_MORE)
            return false;
    return tool_json_step(&json, ']') == TOOL_JSON_DONE;
}

/* Returns the JSON of true, false and null, also of Python's; NULL: it is none of them. */
static const char *word_of(const char *text, size_t size) {
    static const char *const words[][2] = {{"true", "true"},   {"True", "true"}, {"false", "false"},
                                           {"False", "false"}, {"null", "null"}, {"None", "null"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strlen(words[i][0]) == size && memcmp(words[i][0], text, size) == 0) return words[i][1];
    return NULL;
}

static struct tool_piece open_string(struct tool_tags *t, size_t *at, size_t value) {
    t->place = TOOL_TAGS_STRING;
    return take_as(at, value, "\": \"");
}

/* Decides about a value that begins at `value` and may be a number or a word, at its end. */
static struct tool_piece open_scalar(struct tool_tags *t, const char *text, size_t *at,
                                     size_t value, size_t end, bool last) {
    struct cursor c = {text, value, end};
    size_t most = value + TOOL_TAGS_HELD_MAX;
    enum match match = MATCH_NO;
    while (c.at < end && c.at < most && (match = match_word(&c, PARAMETER_CLOSES)) == MATCH_NO)
        c.at++;
    if (match != MATCH_YES && c.at < most && !last) return more();
    if (match != MATCH_YES) return open_string(t, at, value);
    size_t begin = value, to = c.at - strlen(PARAMETER_CLOSES);
    while (begin < to && tool_json_blank(text[begin])) begin++;
    while (begin < to && tool_json_blank(text[to - 1])) to--;
    if (!is_number(text + begin, to - begin) && word_of(text + begin, to - begin) == NULL)
        return open_string(t, at, value);
    t->place = TOOL_TAGS_SCALAR;
    t->scalar_end = to;
    return take_as(at, begin, "\": ");
}

static struct tool_piece next_open(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                   bool last) {
    size_t value = *at + 1;
    if (value == end && !last) return more();
    if (value < end && text[value] == '\n') value++;
    if (is_text(t, text)) return open_string(t, at, value);
    struct cursor c = {text, value, end};
    skip_blank(&c);
    if (c.at - value >= TOOL_TAGS_HELD_MAX) return open_string(t, at, value);
    if (c.at == end) return last ? open_string(t, at, value) : more();
    if (text[c.at] != '{' && text[c.at] != '[') return open_scalar(t, text, at, value, end, last);
    t->place = TOOL_TAGS_JSON;
    t->json = (struct tool_json){0};
    return take_as(at, c.at, "\": ");
}

static struct tool_piece next_in_scalar(struct tool_tags *t, const char *text, size_t *at) {
    const char *word = word_of(text + *at, t->scalar_end - *at);
    t->place = TOOL_TAGS_CLOSE;
    return word != NULL ? take_as(at, t->scalar_end, word) : take(at, t->scalar_end);
}

static struct tool_piece next_in_json(struct tool_tags *t, const char *text, size_t *at,
                                      size_t end) {
    size_t to = *at;
    for (; to < end; to++) {
        enum tool_json_step step = tool_json_step(&t->json, text[to]);
        if (step == TOOL_JSON_MORE) continue;
        t->place = step == TOOL_JSON_DONE ? TOOL_TAGS_CLOSE : TOOL_TAGS_REST;
        to += step == TOOL_JSON_DONE;
        break;
    }
    return to > *at ? take(at, to) : more();
}

/* Reads up to the end of a value, whose text is kept or left out. */
static struct tool_piece next_to_close(struct tool_tags *t, const char *text, size_t *at,
                                       size_t end, bool last) {
    bool kept = t->place == TOOL_TAGS_REST;
    for (size_t to = *at; to < end; to++) {
        struct cursor c = {text, to, end};
        enum match match = match_close(&c);
        if (match == MATCH_NO || (match == MATCH_MORE && last)) continue;
        if (kept && to > *at) return take(at, to);
        if (match == MATCH_YES) t->place = TOOL_TAGS_BETWEEN;
        *at = match == MATCH_YES ? c.at : to;
        return more();
    }
    if (kept && end > *at) return take(at, end);
    *at = end;
    return more();
}

static struct tool_piece next_piece(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                    bool last) {
    switch (t->place) {
    case TOOL_TAGS_BETWEEN:
        return next_between(t, text, at, end, last);
    case TOOL_TAGS_NAME:
        return next_in_name(t, text, at, end);
    case TOOL_TAGS_OPEN:
        return next_open(t, text, at, end, last);
    case TOOL_TAGS_STRING:
        return next_in_string(t, text, at, end, last);
    case TOOL_TAGS_SCALAR:
        return next_in_scalar(t, text, at);
    case TOOL_TAGS_JSON:
        return next_in_json(t, text, at, end);
    case TOOL_TAGS_REST:
    case TOOL_TAGS_CLOSE:
        return next_to_close(t, text, at, end, last);
    case TOOL_TAGS_OVER:
        break;
    }
    return more();
}

struct tool_piece tool_tags_next(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                 bool last) {
    for (;;) {
        int place = (int)t->place;
        struct tool_piece piece = next_piece(t, text, at, end, last);
        if (piece.kind != TOOL_MORE || place == (int)t->place) return piece;
    }
}
