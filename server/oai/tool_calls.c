#include "server/oai/tool_calls.h"

#include <string.h>

#define CALL_OPENS  "<tool_call>"
#define CALL_CLOSES "</tool_call>"
#define PYTHON_TAG  "<|python_tag|>"

/* --- formats --- */

const char *tool_format_name(enum tool_format format) {
    static const char *const names[TOOL_FORMATS] = {"none", "hermes", "llama3"};
    return names[format];
}

/* {"name behind the tag. In a template's source a quote may be written \", a line break \n, and the
 * text may go on in another expression: " }} {{- '. */
static bool is_object_with_name(const char *at) {
    for (;; at++) {
        if (at[0] == '{' && strncmp(at + (at[1] == '\\' ? 2 : 1), "\"name", 5) == 0) return true;
        if (strncmp(at, "\\n", 2) == 0)
            at++;
        else if (!*at || !strchr(" \t\r\n\"'{}-", *at))
            return false;
    }
}

static bool is_hermes(const char *source) {
    for (const char *at = source; (at = strstr(at, CALL_OPENS)) != NULL;) {
        at += sizeof CALL_OPENS - 1;
        if (is_object_with_name(at)) return true;
    }
    return false;
}

static bool is_llama3(const char *source) {
    return strstr(source, "{\"name\": function name, \"parameters\": ") ||
           strstr(source, "{\\\"name\\\": function name, \\\"parameters\\\": ");
}

enum tool_format tool_format_of(const char *chat_template) {
    if (!chat_template) return TOOL_FORMAT_NONE;
    if (is_hermes(chat_template)) return TOOL_FORMAT_HERMES;
    return is_llama3(chat_template) ? TOOL_FORMAT_LLAMA3 : TOOL_FORMAT_NONE;
}

/* --- the beginning of a call: tried again with every byte, so it is short --- */

enum match { MATCH_NO, MATCH_MORE, MATCH_YES };

struct cursor {
    const char *text;
    size_t at, end;
};

struct span {
    size_t begin, end;
};

static void skip_blank(struct cursor *c) {
    while (c->at < c->end && tool_json_blank(c->text[c->at])) c->at++;
}

static enum match match_word(struct cursor *c, const char *word) {
    size_t size = strlen(word), left = c->end - c->at;
    size_t most = size < left ? size : left;
    if (memcmp(c->text + c->at, word, most) != 0) return MATCH_NO;
    if (most < size) return MATCH_MORE;
    c->at += size;
    return MATCH_YES;
}

/* White space and one character. */
static enum match match_mark(struct cursor *c, const char *mark) {
    skip_blank(c);
    return match_word(c, mark);
}

/* A string without escapes: names have none. */
static enum match match_string(struct cursor *c, struct span *out) {
    enum match match = match_mark(c, "\"");
    if (match != MATCH_YES) return match;
    for (out->begin = c->at; c->at < c->end; c->at++) {
        char byte = c->text[c->at];
        if (byte == '\\' || (unsigned char)byte < 0x20) return MATCH_NO;
        if (byte != '"') continue;
        out->end = c->at++;
        return MATCH_YES;
    }
    return MATCH_MORE;
}

static bool is_word(const struct cursor *c, const struct span *span, const char *word) {
    size_t size = span->end - span->begin;
    return strlen(word) == size && memcmp(c->text + span->begin, word, size) == 0;
}

static bool is_tool(const struct tool_set *tools, const struct cursor *c, const struct span *name) {
    for (int i = 0; i < tools->count; i++)
        if (is_word(c, name, tools->names[i])) return true;
    return false;
}

/* The beginning of a call as far as it is read. */
struct head {
    struct span name;
    bool whole; /* what follows is the arguments' brace or, of a bare one, the object's own end */
    bool bare;  /* without arguments */
};

/* The object ends where its arguments should be. */
static enum match match_bare(struct cursor *c, struct head *head) {
    enum match match = match_mark(c, "}");
    c->at -= match == MATCH_YES;
    head->whole = head->bare = match == MATCH_YES;
    return match;
}

/* { with the cursor at the brace, or null. */
static enum match match_arguments(struct cursor *c, struct head *head) {
    enum match match = match_mark(c, "{");
    if (match == MATCH_YES) {
        c->at--;
        head->whole = true;
    }
    if (match != MATCH_NO) return match;
    match = match_word(c, "null");
    return match == MATCH_YES ? match_bare(c, head) : match;
}

/* "key": "value" or "arguments": ... */
static enum match match_member(const struct tool_set *tools, struct cursor *c, struct head *head) {
    struct span key, value;
    enum match match = match_string(c, &key);
    if (match == MATCH_YES) match = match_mark(c, ":");
    if (match != MATCH_YES) return match;
    if (is_word(c, &key, "arguments") || is_word(c, &key, "parameters"))
        return head->name.end ? match_arguments(c, head) : MATCH_NO;
    match = match_string(c, &value);
    if (match != MATCH_YES || !is_word(c, &key, "name")) return match;
    head->name = value;
    return is_tool(tools, c, &value) ? MATCH_YES : MATCH_NO;
}

/* {"name": "f", "arguments": { with whatever other strings before: Llama likes "type": "function".
 */
static enum match match_head(const struct tool_set *tools, struct cursor *c, struct head *head) {
    enum match match = match_mark(c, "{");
    while (match == MATCH_YES) {
        match = match_member(tools, c, head);
        if (match != MATCH_YES || head->whole) return match;
        match = match_mark(c, ",");
        if (match == MATCH_NO && head->name.end) return match_bare(c, head);
    }
    return match;
}

/* What stands between a call and the text before it: one line break; with nothing before it, any
 * white space. */
static enum match match_hermes(struct cursor *c, bool first) {
    if (first)
        skip_blank(c);
    else if (c->at < c->end && c->text[c->at] == '\n')
        c->at++;
    return match_word(c, CALL_OPENS);
}

/* A tag that is one special token leaves no text, so it may be missing. */
static enum match match_llama3(const struct tool_reader *r, struct cursor *c) {
    if (r->calls) {
        enum match match = match_mark(c, ";");
        if (match == MATCH_MORE) return match;
    }
    enum match tag = match_mark(c, PYTHON_TAG);
    return tag == MATCH_NO ? MATCH_YES : tag;
}

static enum match match_opening(const struct tool_reader *r, struct cursor *c, bool first,
                                struct head *head) {
    size_t begin = c->at;
    bool cut = c->end - begin >= TOOL_HELD_MAX;
    if (cut) c->end = begin + TOOL_HELD_MAX;
    enum match match =
        r->tools->format == TOOL_FORMAT_HERMES ? match_hermes(c, first) : match_llama3(r, c);
    if (match == MATCH_YES) match = match_head(r->tools, c, head);
    return match == MATCH_MORE && cut ? MATCH_NO : match;
}

static bool may_open(const struct tool_reader *r, char byte, bool first) {
    return first || (r->tools->format == TOOL_FORMAT_HERMES && (byte == '<' || byte == '\n'));
}

/* --- phases --- */

static struct tool_piece piece(enum tool_piece_kind kind, size_t begin, size_t end) {
    return (struct tool_piece){kind, begin, end};
}

static struct tool_piece more(void) {
    return piece(TOOL_MORE, 0, 0);
}

static struct tool_piece give(struct tool_reader *r, enum tool_piece_kind kind, size_t end) {
    struct tool_piece out = piece(kind, r->at, end);
    r->spoken |= kind == TOOL_TEXT;
    r->at = end;
    return out;
}

static struct tool_piece begin_call(struct tool_reader *r, const struct cursor *c,
                                    const struct head *head) {
    r->at = c->at;
    r->calls++;
    r->json = (struct tool_json){0};
    r->phase = head->bare ? TOOL_IN_BARE : TOOL_IN_ARGUMENTS;
    return piece(TOOL_CALL, head->name.begin, head->name.end);
}

static void end_call(struct tool_reader *r, size_t at) {
    r->at = at;
    r->spoken = false;
    r->phase = TOOL_IN_TEXT;
}

/* What separates calls is no text when no call follows, if it is all that is held back. */
static bool is_separator(const struct tool_reader *r, const char *text, size_t end) {
    for (size_t i = r->at; i < end; i++)
        if (!tool_json_blank(text[i]) && (text[i] != ';' || r->tools->format != TOOL_FORMAT_LLAMA3))
            return false;
    return r->calls > 0;
}

static struct tool_piece next_in_text(struct tool_reader *r, const char *text, size_t end,
                                      bool last) {
    size_t at = r->at;
    for (; at < end; at++) {
        struct cursor c = {text, at, end};
        struct head head = {0};
        bool first = !r->spoken && at == r->at;
        if (!may_open(r, text[at], first)) continue;
        enum match match = match_opening(r, &c, first, &head);
        if (match == MATCH_MORE && last && first && is_separator(r, text, end)) {
            r->at = end;
            return more();
        }
        if (match == MATCH_NO || (match == MATCH_MORE && last)) continue;
        if (match == MATCH_YES && at == r->at) return begin_call(r, &c, &head);
        break;
    }
    return at > r->at ? give(r, TOOL_TEXT, at) : more();
}

static struct tool_piece next_in_arguments(struct tool_reader *r, const char *text, size_t end) {
    for (size_t at = r->at; at < end; at++) {
        enum tool_json_step step = tool_json_step(&r->json, text[at]);
        if (step == TOOL_JSON_MORE) continue;
        r->phase = step == TOOL_JSON_DONE ? TOOL_IN_TAIL : TOOL_IN_REST;
        end = step == TOOL_JSON_DONE ? at + 1 : at;
        break;
    }
    return end > r->at ? give(r, TOOL_ARGUMENTS, end) : more();
}

/* Arguments that are no JSON: to the tag that ends the call, or to the end. */
static struct tool_piece next_in_rest(struct tool_reader *r, const char *text, size_t end,
                                      bool last) {
    size_t at = r->at;
    for (; r->tools->format == TOOL_FORMAT_HERMES && at < end; at++) {
        struct cursor c = {text, at, end};
        enum match match = match_word(&c, CALL_CLOSES);
        if (match == MATCH_NO || (match == MATCH_MORE && last)) continue;
        if (match == MATCH_MORE || at > r->at) break;
        end_call(r, c.at);
        return next_in_text(r, text, end, last);
    }
    if (r->tools->format != TOOL_FORMAT_HERMES) at = end;
    return at > r->at ? give(r, TOOL_ARGUMENTS, at) : more();
}

/* Behind whole arguments: }\n</tool_call>, or what the model made of it. */
static struct tool_piece next_in_tail(struct tool_reader *r, const char *text, size_t end,
                                      bool last) {
    struct cursor c = {text, r->at, end};
    bool hermes = r->tools->format == TOOL_FORMAT_HERMES;
    while (c.at < end && (tool_json_blank(text[c.at]) || (hermes && text[c.at] == '}'))) c.at++;
    r->at = c.at;
    enum match match = match_word(&c, hermes ? CALL_CLOSES : "}");
    if (match == MATCH_MORE) {
        if (last) r->at = end;
        return more();
    }
    end_call(r, c.at);
    return next_in_text(r, text, end, last);
}

static struct tool_piece next_piece(struct tool_reader *r, const char *text, size_t end,
                                    bool last) {
    struct tool_piece out;
    switch (r->phase) {
    case TOOL_IN_ARGUMENTS:
        out = next_in_arguments(r, text, end);
        if (out.kind != TOOL_MORE || r->phase != TOOL_IN_REST) return out;
        return next_in_rest(r, text, end, last);
    case TOOL_IN_REST:
        return next_in_rest(r, text, end, last);
    case TOOL_IN_BARE:
        r->phase = TOOL_IN_TAIL;
        return piece(TOOL_BARE, r->at, r->at);
    case TOOL_IN_TAIL:
        return next_in_tail(r, text, end, last);
    case TOOL_IN_TEXT:
        break;
    }
    return next_in_text(r, text, end, last);
}

struct tool_piece tool_reader_next(struct tool_reader *r, const char *text, size_t end, bool last) {
    for (;;) {
        struct tool_piece out = next_piece(r, text, end, last);
        bool left_out = !r->tools->parallel && r->calls > 1;
        if (!left_out || out.kind == TOOL_MORE || out.kind == TOOL_TEXT) return out;
    }
}

void tool_reader_resume(struct tool_reader *r, size_t at) {
    end_call(r, at);
}

bool tool_reader_called(const struct tool_reader *r) {
    if (r->calls > 1 && !r->tools->parallel) return true;
    return r->calls > 0 && (r->phase == TOOL_IN_TEXT || r->phase == TOOL_IN_TAIL);
}
