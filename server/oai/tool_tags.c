/* Reads parameters in tags as members of a JSON object. Each step returns one piece: text of the
 * answer itself, or a piece with the JSON that the text means. */
#include "server/oai/tool_tags.h"

#include <stdio.h>

#include "engine/engine_text.h"
#include "server/oai/tool_match.h"

static struct tool_piece tags_more(void) {
    return tool_piece(TOOL_MORE, 0, 0);
}

/* Returns the text up to `end` as it is. */
static struct tool_piece tags_take(size_t *at, size_t end) {
    struct tool_piece piece = tool_piece(TOOL_ARGUMENTS, *at, end);
    *at = end;
    return piece;
}

/* Returns the text up to `end` with another meaning of at most 8 bytes. */
static struct tool_piece take_as(size_t *at, size_t end, const char *meaning) {
    struct tool_piece piece = tags_take(at, end);
    piece.decoded_size = (uint8_t)strlen(meaning);
    memcpy(piece.decoded, meaning, piece.decoded_size);
    return piece;
}

/* Matches a tag. An empty tag never matches: it would match again at the same place. */
static enum match match_tag(struct cursor *c, const char *tag) {
    return *tag ? match_word(c, tag) : MATCH_NO;
}

static bool in_list(const struct tool_tags *t) {
    return t->depth > 0 && t->lists >> (t->depth - 1) & 1;
}

/* Matches the tag that closes the one with this name. */
static enum match match_closing(const struct tool_tags *t, struct cursor *c, size_t name_begin,
                                size_t name_end) {
    const struct constrain_tags *tags = t->form->tags;
    const struct cursor begin = *c;
    enum match match = match_tag(c, tags->close);
    if (match != MATCH_YES || tags->behind_close == NULL) return match;
    match = match_bytes(c, c->text + name_begin, name_end - name_begin);
    if (match == MATCH_YES) match = match_word(c, tags->behind_close);
    if (match != MATCH_YES) *c = begin;
    return match;
}

/* Matches the tag that closes the present one. */
static enum match match_own_closing(const struct tool_tags *t, struct cursor *c) {
    return match_closing(t, c, t->name_begin, t->name_end);
}

/* Matches the beginning of a tag, which may also be that of its end. */
static enum match match_opening_tag(const struct tool_tags *t, struct cursor *c) {
    const struct constrain_tags *tags = t->form->tags;
    const struct cursor begin = *c;
    struct cursor close = *c;
    enum match match = match_tag(c, tags->open);
    if (match != MATCH_YES || tags->behind_close == NULL) return match;
    enum match other = match_tag(&close, tags->close);
    if (other != MATCH_NO) *c = begin;
    return other == MATCH_NO ? MATCH_YES : other == MATCH_MORE ? MATCH_MORE : MATCH_NO;
}

/* Moves past a name, to the text behind it. Names that are too long to be held back are none. */
static enum match match_name(const struct tool_tags *t, struct cursor *c) {
    const char *named = t->form->tags->named;
    const size_t begin = c->at;
    for (; c->at < c->end && c->at - begin < TOOL_TAGS_HELD_MAX; c->at++) {
        struct cursor behind = *c;
        enum match match = match_word(&behind, named);
        if (match != MATCH_NO) return match;
    }
    return c->at == c->end ? MATCH_MORE : MATCH_NO;
}

/* ---- Between parameters ---- */

/* Matches a mark after the arguments; a function may lack its own end. YES: *closed counts this
 * mark and those before it. */
static enum match match_end(const struct tool_form *form, struct cursor *c, int *closed) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    enum match out = MATCH_NO;
    int count = tool_form_closes(form, marks);
    for (int i = 0; i < count; i++) {
        enum match match = match_mark_of(c, &marks[i]);
        *closed = i + 1;
        if (match == MATCH_YES) return match;
        if (match == MATCH_MORE) out = match;
    }
    return out;
}

/* Reads text between parameters, which is left out unless it is a tag. */
static struct tool_piece next_between(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                      bool last) {
    for (; *at < end; ++*at) {
        struct cursor parameter = {text, *at, end}, call = parameter;
        enum match opens = match_opening_tag(t, &parameter);
        enum match closes = t->depth == 0 ? match_end(t->form, &call, &t->closed)
                                          : match_closing(t, &call, t->outer[t->depth - 1].begin,
                                                          t->outer[t->depth - 1].end);
        if (opens == MATCH_YES && in_list(t)) {
            struct cursor name = parameter;
            enum match named = match_name(t, &name);
            if (named == MATCH_MORE && !last) return tags_more();
            if (named != MATCH_YES) continue;
            t->name_begin = parameter.at;
            t->name_end = name.at;
            t->place = TOOL_TAGS_OPEN;
            bool first = !t->any;
            t->any = true;
            return take_as(at, name.at, first ? "[" : ", ");
        }
        if (opens == MATCH_YES) {
            bool first = !t->any;
            t->any = true;
            t->place = TOOL_TAGS_NAME;
            t->name_begin = parameter.at;
            return take_as(at, parameter.at, first ? "{\"" : ", \"");
        }
        /* the end of the call may begin as a tag does */
        if (opens == MATCH_MORE && !last) return tags_more();
        if (closes == MATCH_YES && t->depth > 0) {
            struct tool_piece piece = take_as(at, call.at, in_list(t) ? "]" : "}");
            t->depth--;
            t->any = true;
            return piece;
        }
        if (closes == MATCH_YES) {
            t->place = TOOL_TAGS_OVER;
            if (t->any) return take_as(at, call.at, "}");
            *at = call.at;
            return tool_piece(TOOL_BARE, call.at, call.at);
        }
        if (closes == MATCH_MORE && !last) return tags_more();
    }
    return tags_more();
}

/* ---- Text as a JSON string ---- */

static bool tags_is_plain(char byte) {
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

static struct tool_piece next_in_name(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                      bool last) {
    const char *named = t->form->tags->named;
    size_t to = *at;
    enum match match = MATCH_NO;
    for (; to < end && tags_is_plain(text[to]); to++) {
        struct cursor c = {text, to, end};
        match = text[to] == *named ? match_word(&c, named) : MATCH_NO;
        if (match == MATCH_YES || (match == MATCH_MORE && !last)) break;
    }
    if (to > *at) return tags_take(at, to);
    struct cursor c = {text, to, end};
    match = to < end ? match_word(&c, named) : MATCH_MORE;
    if (match == MATCH_MORE && (to == end || !last)) return tags_more();
    if (match != MATCH_YES) return take_escaped(text, at);
    t->name_end = to;
    t->place = TOOL_TAGS_OPEN;
    return tags_more();
}

/* Matches the end of a value, with the line break before it. */
static enum match match_close(const struct tool_tags *t, struct cursor *c) {
    struct cursor begin = *c;
    if (*t->form->tags->line && c->at < c->end && c->text[c->at] == '\n') c->at++;
    enum match match = match_own_closing(t, c);
    if (match != MATCH_YES) *c = begin;
    return match;
}

/* Matches the end of a string. */
static enum match match_string_end(const struct tool_tags *t, struct cursor *c) {
    return t->raw ? match_tag(c, t->form->tags->raw[1]) : match_close(t, c);
}

static struct tool_piece tags_next_in_string(struct tool_tags *t, const char *text, size_t *at,
                                             size_t end, bool last) {
    const char *close = t->raw ? t->form->tags->raw[1] : t->form->tags->close;
    size_t to = *at;
    for (; to < end && tags_is_plain(text[to]); to++) {
        struct cursor c = {text, to, end};
        enum match match = text[to] == *close ? match_string_end(t, &c) : MATCH_NO;
        if (match == MATCH_YES || (match == MATCH_MORE && !last)) break;
    }
    if (to > *at) return tags_take(at, to);
    if (to == end) return tags_more();
    struct cursor c = {text, to, end};
    enum match match = match_string_end(t, &c);
    if (match == MATCH_MORE && !last) return tags_more();
    if (match != MATCH_YES) return take_escaped(text, at);
    t->place = t->raw ? TOOL_TAGS_CLOSE : TOOL_TAGS_BETWEEN;
    return take_as(at, c.at, "\"");
}

/* ---- Values ---- */

/* Returns the types of the parameter whose name was read. */
static unsigned types_of(const struct tool_tags *t, const char *text) {
    size_t size = t->name_end - t->name_begin;
    for (const struct tool_parameter *p = t->parameters; p != NULL && p->name != NULL; p++)
        if (strlen(p->name) == size && memcmp(p->name, text + t->name_begin, size) == 0)
            return p->types;
    return CONSTRAIN_TYPES_ALL;
}

/* Returns whether a value may have this type, which is not that of strings. If the parameter does
 * not allow strings, a value may have any type. */
static bool may_be(const struct tool_tags *t, unsigned type) {
    return (t->types & type) || !(t->types & CONSTRAIN_TYPE_STRING);
}

/* Returns the JSON of true, false or null, also of Python's words, and its type; NULL: it is
 * another text. */
static const char *word_of(const char *text, size_t size, unsigned *type) {
    static const char *const words[][2] = {{"true", "true"},   {"True", "true"}, {"false", "false"},
                                           {"False", "false"}, {"null", "null"}, {"None", "null"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (strlen(words[i][0]) != size || memcmp(words[i][0], text, size) != 0) continue;
        *type = i < 4 ? CONSTRAIN_TYPE_BOOLEAN : CONSTRAIN_TYPE_NULL;
        return words[i][1];
    }
    return NULL;
}

static struct tool_piece open_string(struct tool_tags *t, size_t *at, size_t value) {
    t->place = TOOL_TAGS_STRING;
    return take_as(at, value, in_list(t) ? "\"" : "\": \"");
}

/* Moves to `value`, which is not a string. */
static struct tool_piece open_other(struct tool_tags *t, size_t *at, size_t value) {
    if (!in_list(t)) return take_as(at, value, "\": ");
    *at = value;
    return tags_more();
}

static struct tool_piece open_value(struct tool_tags *t, size_t *at, size_t begin, size_t end) {
    t->place = TOOL_TAGS_VALUE;
    t->value_end = end;
    return open_other(t, at, begin);
}

static bool is_scalar(const struct tool_tags *t, const char *text, size_t size) {
    unsigned type = CONSTRAIN_TYPE_NUMBER;
    return (tool_json_is_number(text, size) || word_of(text, size, &type) != NULL) &&
           may_be(t, type);
}

/* Decides, at its end, what a value is that may be a number or a word. */
static struct tool_piece open_scalar(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                     bool last) {
    struct cursor c = {text, t->value, end};
    size_t most = t->value + TOOL_TAGS_HELD_MAX;
    enum match match = MATCH_NO;
    size_t to = t->value;
    for (; to < end && to < most; to++) {
        c.at = to;
        if ((match = match_own_closing(t, &c)) != MATCH_NO) break;
    }
    if (match != MATCH_YES && to < most && !last) return tags_more();
    if (match != MATCH_YES) return open_string(t, at, t->value);
    size_t begin = t->value;
    while (begin < to && tool_json_blank(text[begin])) begin++;
    while (begin < to && tool_json_blank(text[to - 1])) to--;
    if (begin == to && t->form->tags->item != NULL && !(t->types & CONSTRAIN_TYPE_STRING)) {
        t->place = TOOL_TAGS_CLOSE;
        return take_as(at, to, t->types & CONSTRAIN_TYPE_OBJECT ? "\": {}" : "\": []");
    }
    if (!is_scalar(t, text + begin, to - begin)) return open_string(t, at, t->value);
    return open_value(t, at, begin, to);
}

/* Returns whether a value that begins with this character may be an object, an array or a string in
 * quotes. */
static bool begins_literal(const struct tool_tags *t, char c) {
    if (c == '{') return may_be(t, CONSTRAIN_TYPE_OBJECT);
    if (c == '[' || c == '(') return may_be(t, CONSTRAIN_TYPE_ARRAY);
    return (c == '"' || c == '\'') &&
           (t->types == CONSTRAIN_TYPES_ALL || !(t->types & CONSTRAIN_TYPE_STRING));
}

/* Matches the mark in front of a value. If it depends on the value's type, *types are those that
 * have this mark. */
static enum match match_value_mark(struct cursor *c, const struct constrain_tags *tags,
                                   unsigned *types) {
    const struct cursor begin = *c;
    enum match out = MATCH_NO;
    unsigned said = 0;
    if (tags->typed[0] == NULL) return match_word(c, tags->value);
    for (int i = 0; i < CONSTRAIN_TYPE_COUNT; i++) {
        struct cursor one = begin;
        enum match match = match_word(&one, tags->typed[i]);
        if (match == MATCH_MORE) out = match;
        if (match != MATCH_YES) continue;
        said |= 1u << i;
        *c = one;
    }
    if (said == 0) return out;
    *types = said;
    return MATCH_YES;
}

/* Moves past the text between the name and its value. MORE: it may go on. A mark behind too much
 * white space to be held back is none. */
static enum match match_value(struct tool_tags *t, const char *text, struct cursor *c) {
    const struct constrain_tags *tags = t->form->tags;
    t->types = t->depth > 0 ? (unsigned)CONSTRAIN_TYPES_ALL : types_of(t, text);
    (void)match_word(c, tags->named);
    struct cursor value = *c;
    if (*tags->value || tags->typed[0] != NULL) {
        skip_blank(&value);
        const bool far = value.at - c->at >= TOOL_TAGS_HELD_MAX;
        enum match match = far ? MATCH_NO : match_value_mark(&value, tags, &t->types);
        if (match == MATCH_MORE) return match;
        if (match == MATCH_YES) *c = value;
    }
    if (!*tags->line) return MATCH_YES;
    if (c->at == c->end) return MATCH_MORE;
    c->at += c->text[c->at] == '\n';
    return MATCH_YES;
}

static enum match match_raw(const struct tool_tags *t, struct cursor *c) {
    const char *raw = t->form->tags->raw[0];
    return raw != NULL ? match_tag(c, raw) : MATCH_NO;
}

/* Matches the first tag in a value that is an array or an object, up to its name. */
static enum match match_nested(const struct tool_tags *t, struct cursor *c) {
    if (t->form->tags->item == NULL || t->depth == TOOL_TAGS_DEPTH) return MATCH_NO;
    enum match match = match_opening_tag(t, c);
    struct cursor name = *c;
    return match == MATCH_YES ? match_name(t, &name) : match;
}

/* Begins an array or an object at `value`; its first tag has the name at `name`. */
static struct tool_piece open_nested(struct tool_tags *t, const char *text, size_t *at,
                                     size_t value, size_t name) {
    const struct constrain_tags *tags = t->form->tags;
    const size_t size = strlen(tags->item);
    const bool list = strncmp(text + name, tags->item, size) == 0 &&
                      strncmp(text + name + size, tags->named, strlen(tags->named)) == 0;
    struct tool_piece piece = open_other(t, at, value);
    t->outer[t->depth].begin = t->name_begin;
    t->outer[t->depth].end = t->name_end;
    t->lists &= ~(UINT32_C(1) << t->depth);
    t->lists |= (uint32_t)list << t->depth++;
    t->any = false;
    t->place = TOOL_TAGS_BETWEEN;
    return piece;
}

static struct tool_piece next_open(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                   bool last) {
    struct cursor begin = {text, *at, end};
    if (match_value(t, text, &begin) == MATCH_MORE && !last) return tags_more();
    struct cursor inner = begin;
    enum match nested = match_nested(t, &inner);
    if (nested == MATCH_MORE && !last) return tags_more();
    if (nested == MATCH_YES) return open_nested(t, text, at, begin.at, inner.at);
    enum match raw = match_raw(t, &begin);
    if (raw == MATCH_MORE && !last) return tags_more();
    size_t value = begin.at;
    t->raw = raw == MATCH_YES;
    t->value = value;
    if (t->raw || t->types == CONSTRAIN_TYPE_STRING) return open_string(t, at, value);
    struct cursor c = {text, value, end};
    skip_blank(&c);
    if (c.at - value >= TOOL_TAGS_HELD_MAX) return open_string(t, at, value);
    if (c.at == end) return last ? open_string(t, at, value) : tags_more();
    if (!begins_literal(t, text[c.at])) return open_scalar(t, text, at, end, last);
    t->place = TOOL_TAGS_LITERAL;
    t->literal = t->scanned = c.at;
    t->value_end = 0;
    t->no_json = text[c.at] != '{' && text[c.at] != '[';
    t->json = (struct tool_json){0};
    return tags_more();
}

/* ---- Literals ---- */

/* Matches a literal that is JSON, in whose strings a tag is text, followed by the end of the
 * parameter's tag. YES: it ends at value_end. */
static enum match match_json(struct tool_tags *t, const char *text, size_t end) {
    while (t->value_end == 0 && t->scanned < end) {
        enum tool_json_step step = tool_json_step(&t->json, text[t->scanned++]);
        if (step == TOOL_JSON_BAD) return MATCH_NO;
        if (step == TOOL_JSON_DONE) t->value_end = t->scanned;
    }
    if (t->value_end == 0) return MATCH_MORE;
    struct cursor c = {text, t->scanned, end};
    skip_blank(&c);
    t->scanned = c.at;
    return match_own_closing(t, &c);
}

/* Finds the next end of a parameter's tag. YES: the literal ends at value_end. */
static enum match match_literal(struct tool_tags *t, const char *text, size_t end) {
    for (; t->scanned < end; t->scanned++) {
        struct cursor c = {text, t->scanned, end};
        enum match match = match_own_closing(t, &c);
        if (match == MATCH_NO) continue;
        t->value_end = t->scanned;
        while (t->value_end > t->literal && tool_json_blank(text[t->value_end - 1])) t->value_end--;
        return match;
    }
    return MATCH_MORE;
}

/* Decides about a literal at its end. At the end of the text, a literal that may still become JSON
 * is returned as it is. */
static struct tool_piece next_in_literal(struct tool_tags *t, const char *text, size_t *at,
                                         size_t end, bool last) {
    bool cut = end - t->literal >= TOOL_TAGS_LITERAL_MAX;
    size_t most = cut ? t->literal + TOOL_TAGS_LITERAL_MAX : end;
    if (!t->no_json) {
        enum match json = match_json(t, text, most);
        if (json == MATCH_MORE && !cut && !last) return tags_more();
        if (json == MATCH_YES || (json == MATCH_MORE && !cut))
            return open_value(t, at, t->literal, t->value_end ? t->value_end : end);
        t->no_json = true;
        t->scanned = t->literal;
    }
    enum match match = match_literal(t, text, most);
    if (match == MATCH_MORE && !cut && !last) return tags_more();
    const char *literal = text + t->literal;
    size_t size = t->value_end - t->literal;
    if (match != MATCH_YES) return open_string(t, at, t->value);
    if (tool_json_is_value(literal, size)) return open_value(t, at, t->literal, t->value_end);
    if (!tool_literal_is(literal, size)) return open_string(t, at, t->value);
    t->place = TOOL_TAGS_PYTHON;
    t->python = (struct tool_literal){0};
    return open_other(t, at, t->literal);
}

static struct tool_piece next_in_value(struct tool_tags *t, const char *text, size_t *at) {
    unsigned type;
    const char *word = word_of(text + *at, t->value_end - *at, &type);
    t->place = TOOL_TAGS_CLOSE;
    return word != NULL ? take_as(at, t->value_end, word) : tags_take(at, t->value_end);
}

static struct tool_piece next_in_python(struct tool_tags *t, const char *text, size_t *at) {
    struct tool_piece piece;
    if (tool_literal_next(&t->python, text, at, t->value_end, &piece) == TOOL_LITERAL_PIECE)
        return piece;
    t->place = TOOL_TAGS_CLOSE;
    return tags_more();
}

/* Reads up to the end of a value's tag. */
static struct tool_piece next_to_close(struct tool_tags *t, const char *text, size_t *at,
                                       size_t end, bool last) {
    for (size_t to = *at; to < end; to++) {
        struct cursor c = {text, to, end};
        enum match match = match_close(t, &c);
        if (match == MATCH_NO || (match == MATCH_MORE && last)) continue;
        if (match == MATCH_YES) t->place = TOOL_TAGS_BETWEEN;
        *at = match == MATCH_YES ? c.at : to;
        return tags_more();
    }
    *at = end;
    return tags_more();
}

static struct tool_piece tags_next_piece(struct tool_tags *t, const char *text, size_t *at,
                                         size_t end, bool last) {
    switch (t->place) {
    case TOOL_TAGS_BETWEEN:
        return next_between(t, text, at, end, last);
    case TOOL_TAGS_NAME:
        return next_in_name(t, text, at, end, last);
    case TOOL_TAGS_OPEN:
        return next_open(t, text, at, end, last);
    case TOOL_TAGS_STRING:
        return tags_next_in_string(t, text, at, end, last);
    case TOOL_TAGS_LITERAL:
        return next_in_literal(t, text, at, end, last);
    case TOOL_TAGS_VALUE:
        return next_in_value(t, text, at);
    case TOOL_TAGS_PYTHON:
        return next_in_python(t, text, at);
    case TOOL_TAGS_CLOSE:
        return next_to_close(t, text, at, end, last);
    case TOOL_TAGS_OVER:
        break;
    }
    return tags_more();
}

struct tool_piece tool_tags_next(struct tool_tags *t, const char *text, size_t *at, size_t end,
                                 bool last) {
    for (;;) {
        int place = (int)t->place;
        struct tool_piece piece = tags_next_piece(t, text, at, end, last);
        if (piece.kind != TOOL_MORE || place == (int)t->place) return piece;
    }
}
