/* Finds tool calls in growing text. A matcher tries to read the beginning of a call, up to the
 * opening brace of its arguments, and answers yes, no or "more text is needed"; only the last holds
 * text back. Matching starts again from the same place when more text has arrived, so the result
 * does not depend on how the text was cut. Inside arguments, tool_json.c finds the closing brace.
 */
#include "server/oai/tool_calls.h"

#include <string.h>

#include "base/utf8.h"
#include "server/oai/tool_match.h"

#define PYTHON_TAG "<|python_tag|>"
#define CALLS_TAG  "[TOOL_CALLS]"
#define ARGS_TAG   "[ARGS]"
#define FENCE      "```"

/* --- the beginning of a call: tried again with every byte, so it is short --- */

struct span {
    size_t begin, end;
};

/* Matches white space and one character. */
static enum match match_mark(struct cursor *c, const char *mark) {
    skip_blank(c);
    return match_word(c, mark);
}

/* Matches a string without escapes, as names are. */
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

static bool calls_is_word(const struct cursor *c, const struct span *span, const char *word) {
    size_t size = span->end - span->begin;
    return strlen(word) == size && memcmp(c->text + span->begin, word, size) == 0;
}

/* Returns the index of the tool; -1: there is none of this name. */
static int find_tool(const struct tool_set *tools, const struct cursor *c,
                     const struct span *name) {
    for (int i = 0; i < tools->count; i++)
        if (calls_is_word(c, name, tools->names[i])) return i;
    return -1;
}

static bool is_tool(const struct tool_set *tools, const struct cursor *c, const struct span *name) {
    return find_tool(tools, c, name) >= 0;
}

static bool begins_tool(const struct tool_set *tools, const struct cursor *c,
                        const struct span *span) {
    size_t size = span->end - span->begin;
    for (int i = 0; i < tools->count; i++)
        if (strlen(tools->names[i]) >= size &&
            memcmp(tools->names[i], c->text + span->begin, size) == 0)
            return true;
    return false;
}

/* The beginning of a call, as far as it was read. */
struct head {
    struct span name;
    enum { NO_ARGUMENTS, OBJECT, STRING, EMPTY, TAGS, LITERAL } form;
    size_t arguments; /* where they begin: at the brace, after the quote; EMPTY: where they end */
    bool whole;       /* the name was read, and the arguments have begun */
    bool parameters;  /* the arguments are called "parameters" */
    bool fenced, listed; /* hermes: the object stands in a fence, in a list */
};

/* Matches missing arguments: the object ends, or goes on with another member. */
static enum match match_empty(struct cursor *c, struct head *head) {
    enum match match = match_mark(c, "}");
    if (match == MATCH_NO) match = match_word(c, ",");
    c->at -= match == MATCH_YES;
    head->form = EMPTY;
    head->arguments = c->at;
    return match;
}

/* Matches the text after the quote: an object, or nothing. */
static enum match match_string_arguments(struct cursor *c, struct head *head) {
    head->arguments = c->at;
    head->form = STRING;
    enum match match = match_word(c, "\"");
    if (match == MATCH_YES) return match_empty(c, head);
    match = match_mark(c, "{");
    c->at = head->arguments;
    return match;
}

/* Matches arguments. Leaves the cursor at the beginning of the value, or after a value that is
 * empty. */
static enum match match_arguments(struct cursor *c, struct head *head) {
    enum match match = match_mark(c, "{");
    if (match == MATCH_YES) {
        head->form = OBJECT;
        head->arguments = --c->at;
    }
    if (match != MATCH_NO) return match;
    match = match_word(c, "\"");
    if (match == MATCH_YES) return match_string_arguments(c, head);
    if (match == MATCH_NO) match = match_word(c, "null");
    return match == MATCH_YES ? match_empty(c, head) : match;
}

static enum match skip_object(struct cursor *c) {
    struct tool_json json = {0};
    for (; c->at < c->end; c->at++) {
        enum tool_json_step step = tool_json_step(&json, c->text[c->at]);
        if (step == TOOL_JSON_BAD) return MATCH_NO;
        if (step == TOOL_JSON_DONE) return c->at++, MATCH_YES;
    }
    return MATCH_MORE;
}

/* Moves past the closing quote. */
static enum match calls_skip_string(struct cursor *c) {
    for (; c->at < c->end; c->at++) {
        if (c->text[c->at] == '"') return c->at++, MATCH_YES;
        c->at += c->text[c->at] == '\\';
    }
    return MATCH_MORE;
}

/* Skips arguments that stand before the name; they are read when the name is known. */
static enum match skip_arguments(struct cursor *c, const struct head *head) {
    if (head->form == OBJECT) return skip_object(c);
    return head->form == STRING ? calls_skip_string(c) : MATCH_YES;
}

/* Matches one member, "key": "value" or "arguments": ... */
static enum match match_member(const struct tool_set *tools, struct cursor *c, struct head *head) {
    struct span key, value;
    enum match match = match_string(c, &key);
    if (match == MATCH_YES) match = match_mark(c, ":");
    if (match != MATCH_YES) return match;
    if (calls_is_word(c, &key, "arguments") || calls_is_word(c, &key, "parameters")) {
        if (head->form != NO_ARGUMENTS) return MATCH_NO;
        head->parameters = calls_is_word(c, &key, "parameters");
        match = match_arguments(c, head);
        head->whole = match == MATCH_YES && head->name.end;
        return match == MATCH_YES && !head->whole ? skip_arguments(c, head) : match;
    }
    match = match_string(c, &value);
    if (match != MATCH_YES ||
        !(calls_is_word(c, &key, "name") || calls_is_word(c, &key, "tool_name")))
        return match;
    head->name = value;
    head->whole = head->form != NO_ARGUMENTS;
    return is_tool(tools, c, &value) ? MATCH_YES : MATCH_NO;
}

/* Matches {"name": "f", "arguments": {, with other members before it, such as Llama's "type":
 * "function". */
static enum match match_head(const struct tool_set *tools, struct cursor *c, struct head *head) {
    enum match match = match_mark(c, "{");
    while (match == MATCH_YES) {
        match = match_member(tools, c, head);
        if (match != MATCH_YES || head->whole) return match;
        match = match_mark(c, ",");
        if (match == MATCH_NO && head->name.end) {
            head->whole = true;
            return match_empty(c, head);
        }
    }
    return match;
}

/* Moves past the separator in front of a call: one line break after text, otherwise any white
 * space. */
static void skip_separator(struct cursor *c, bool first) {
    if (first)
        skip_blank(c);
    else if (c->at < c->end && c->text[c->at] == '\n')
        c->at++;
}

/* Matches the tags in front of an object. After a call of the same section there are none, but
 * there may be a comma. */
static enum match match_tags(const struct tool_reader *r, struct cursor *c, bool first) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    int count = tool_form_opens(r->tools->form, marks) - 1; /* the last one is the object */
    skip_separator(c, first);
    enum match match = match_mark_of(c, &marks[0]);
    if (match == MATCH_NO && r->inside && first) {
        match = match_word(c, ",");
        return match == MATCH_MORE ? match : MATCH_YES;
    }
    for (int i = 1; i < count && match == MATCH_YES; i++) {
        skip_blank(c);
        if (match_mark_of(c, &marks[i]) == MATCH_MORE) return MATCH_MORE;
    }
    return match;
}

/* Matches the object of a call without tags, at the beginning of a line: alone, in a list, or in a
 * fence. Any object may have a name, so it must also have "arguments"; a description of a tool has
 * "parameters". */
static enum match match_bare(const struct tool_reader *r, struct cursor *c, bool first,
                             struct head *head) {
    if (first)
        skip_blank(c);
    else if (c->text[c->at++] != '\n')
        return MATCH_NO;
    enum match match = match_word(c, FENCE);
    if (match == MATCH_MORE) return match;
    head->fenced = match == MATCH_YES;
    if (head->fenced) {
        while (c->at < c->end && is_word_byte(c->text[c->at])) c->at++;
        if (c->at < c->end && !tool_json_blank(c->text[c->at])) return MATCH_NO;
        skip_blank(c);
    }
    match = match_word(c, "[");
    if (match == MATCH_MORE) return match;
    head->listed = match == MATCH_YES;
    if (!head->listed && c->at < c->end && c->text[c->at] != '{') return MATCH_NO;
    match = match_head(r->tools, c, head);
    return match == MATCH_YES && (head->form == EMPTY || head->parameters) ? MATCH_NO : match;
}

/* Matches a call whose tag may be missing: a tag that is a special token leaves no text. */
static enum match match_llama3(const struct tool_reader *r, struct cursor *c) {
    if (r->calls) {
        enum match match = match_mark(c, ";");
        if (match == MATCH_MORE) return match;
    }
    enum match tag = match_mark(c, PYTHON_TAG);
    return tag == MATCH_NO ? MATCH_YES : tag;
}

/* Matches the name of a tool and the brace of its arguments. Text is held back only while it is the
 * beginning of a name. */
static enum match match_named(const struct tool_set *tools, struct cursor *c, struct head *head) {
    head->name.begin = c->at;
    while (c->at < c->end && c->text[c->at] != '[' && c->text[c->at] != '{') c->at++;
    head->name.end = c->at;
    if (c->at == c->end) return begins_tool(tools, c, &head->name) ? MATCH_MORE : MATCH_NO;
    if (!is_tool(tools, c, &head->name)) return MATCH_NO;
    enum match match = match_word(c, ARGS_TAG);
    if (match == MATCH_MORE) return match;
    match = match_mark(c, "{");
    head->form = OBJECT;
    head->arguments = match == MATCH_YES ? --c->at : 0;
    return match;
}

/* Matches a call with its tag, with the bracket of the list or, if nothing was said before, with
 * neither. */
static enum match match_mistral(const struct tool_reader *r, struct cursor *c, bool first,
                                struct head *head) {
    if (r->calls && first) {
        enum match comma = match_mark(c, ",");
        if (comma == MATCH_MORE) return comma;
    }
    enum match tag = first ? match_mark(c, CALLS_TAG) : match_word(c, CALLS_TAG);
    if (tag == MATCH_MORE) return tag;
    enum match bracket = match_mark(c, "[");
    if (bracket == MATCH_MORE) return bracket;
    if (!first && tag == MATCH_NO && bracket == MATCH_NO) return MATCH_NO;
    if (bracket == MATCH_NO && c->text[c->at] != '{') return match_named(r->tools, c, head);
    return match_head(r->tools, c, head);
}

/* Matches the marks in front of a name. Models sometimes leave out all but the last. `inside`: a
 * call of the same section stands before it. */
static enum match match_opens(const struct tool_form *form, struct cursor *c, bool inside) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    enum match match = MATCH_NO;
    int count = tool_form_opens(form, marks);
    bool opened = inside || tool_mark_is_strong(&marks[count - 1]);
    if (inside) {
        enum match comma = match_word(c, ",");
        if (comma == MATCH_MORE) return comma;
        skip_blank(c);
        if (!*form->before) return comma; /* only the section has marks */
    }
    for (int i = 0; i < count; i++) {
        if (i + 1 == count && !opened) return MATCH_NO;
        match = match_mark_of(c, &marks[i]);
        if (match == MATCH_MORE) return match;
        opened |= match == MATCH_YES && tool_mark_is_strong(&marks[i]);
        bool ends = match == MATCH_YES && c->at > 0 && c->text[c->at - 1] == '>';
        if (ends || (match == MATCH_YES && i + 1 < count)) skip_blank(c);
    }
    return match;
}

/* Matches the marks after a name. If a form has none, something must end the name. */
static enum match match_behind_name(const struct tool_form *form, struct cursor *c) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    enum match match = MATCH_YES;
    int count = tool_form_marks(form->arguments, "", marks);
    if (count == 0 && form->notation == NULL && !tool_json_blank(c->text[c->at]) &&
        c->text[c->at] != '<')
        return MATCH_NO;
    for (int i = 0; i < count && match == MATCH_YES; i++) {
        if (i > 0 || form->arguments[0] == '\n') skip_blank(c);
        match = match_mark_of(c, &marks[i]);
    }
    return match;
}

/* Matches a name between marks, up to its arguments. */
static enum match match_marked(const struct tool_set *tools, struct cursor *c, bool first,
                               bool inside, struct head *head) {
    skip_separator(c, first);
    enum match match = match_opens(tools->form, c, inside);
    if (match != MATCH_YES) return match;
    head->name.begin = c->at;
    while (c->at < c->end && is_word_byte(c->text[c->at])) c->at++;
    head->name.end = c->at;
    if (c->at == c->end) return begins_tool(tools, c, &head->name) ? MATCH_MORE : MATCH_NO;
    if (!is_tool(tools, c, &head->name)) return MATCH_NO;
    match = match_behind_name(tools->form, c);
    head->form = TAGS;
    head->arguments = c->at;
    if (match != MATCH_YES || tools->form->tags) return match;
    const struct constrain_notation *notation = tools->form->notation;
    match = match_mark(c, notation != NULL ? (char[]){notation->brackets[0], '\0'} : "{");
    head->form = notation != NULL ? LITERAL : OBJECT;
    head->arguments = match == MATCH_YES ? --c->at : 0;
    return match;
}

/* Matches a call. `depth`: see may_open. */
static enum match match_call(const struct tool_reader *r, struct cursor *c, bool first,
                             uint32_t depth, struct head *head) {
    if (r->tools->form->shape == TOOL_SHAPE_NAMED)
        return match_marked(r->tools, c, first, r->inside && first, head);
    if (r->tools->form->shape == TOOL_SHAPE_LISTED) return match_mistral(r, c, first, head);
    bool hermes = r->tools->form->shape == TOOL_SHAPE_TAGGED;
    struct cursor begin = *c;
    enum match match = hermes ? match_tags(r, c, first) : match_llama3(r, c);
    if (match == MATCH_YES) match = match_head(r->tools, c, head);
    if (match == MATCH_NO && r->tools->form->bare && !depth) {
        *c = begin;
        *head = (struct head){0};
        return match_bare(r, c, first, head);
    }
    /* An object without a tag, in the middle of a text, is a call only if it has arguments. */
    return match == MATCH_YES && !hermes && !first && head->form == EMPTY ? MATCH_NO : match;
}

static enum match match_opening(const struct tool_reader *r, struct cursor *c, bool first,
                                uint32_t depth, struct head *head) {
    size_t begin = c->at;
    bool cut = c->end - begin >= TOOL_HELD_MAX;
    if (cut) c->end = begin + TOOL_HELD_MAX;
    enum match match = match_call(r, c, first, depth, head);
    return match == MATCH_MORE && cut ? MATCH_NO : match;
}

/* Returns whether a mark in front of a name may begin with this byte. */
static bool begins_mark(const struct tool_form *form, char byte) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    int count = tool_form_opens(form, marks) - (form->shape == TOOL_SHAPE_TAGGED);
    for (int i = 0; i < count; i++)
        if (marks[i].text[0] == byte) return true;
    return false;
}

/* Returns whether a call may begin with this byte. `depth`: brackets that are open in the text. A
 * call of llama3 is an object of its own, not part of another. */
static bool may_open(const struct tool_reader *r, char byte, bool first, uint32_t depth) {
    if (r->tools->form->shape == TOOL_SHAPE_CHANNELS) return false;
    if (r->tools->form->shape == TOOL_SHAPE_BARE) return first || (byte == '{' && !depth);
    if (r->tools->form->shape == TOOL_SHAPE_LISTED) return first || byte == '[';
    if (first || byte == '\n') return true;
    return begins_mark(r->tools->form, byte);
}

/* --- phases --- */

static struct tool_piece calls_more(void) {
    return tool_piece(TOOL_MORE, 0, 0);
}

static struct tool_piece calls_give(struct tool_reader *r, enum tool_piece_kind kind, size_t end) {
    struct tool_piece out = tool_piece(kind, r->at, end);
    r->spoken |= kind == TOOL_TEXT;
    if (kind == TOOL_TEXT) r->fenced = r->listed = r->inside = false;
    r->at = end;
    return out;
}

static struct tool_piece calls_begin_call(struct tool_reader *r, const char *text,
                                          const struct head *head) {
    int tool = find_tool(r->tools, &(struct cursor){.text = text}, &head->name);
    r->tags =
        (struct tool_tags){.form = r->tools->form,
                           .parameters = r->tools->parameters ? r->tools->parameters[tool] : NULL};
    r->closed = 0;
    r->at = head->arguments;
    r->calls++;
    r->fenced |= head->fenced;
    r->listed |= head->listed;
    r->inside = tool_form_is_section(r->tools->form);
    r->json = (struct tool_json){0};
    r->literal = (struct tool_literal){.notation = r->tools->form->notation};
    r->phase = head->form == OBJECT    ? TOOL_IN_ARGUMENTS
               : head->form == STRING  ? TOOL_IN_STRING
               : head->form == TAGS    ? TOOL_IN_TAGS
               : head->form == LITERAL ? TOOL_IN_LITERAL
                                       : TOOL_IN_BARE;
    return tool_piece(TOOL_CALL, head->name.begin, head->name.end);
}

static void calls_end_call(struct tool_reader *r, size_t at) {
    r->at = at;
    r->spoken = false;
    r->depth = 0;
    r->phase = TOOL_IN_TEXT;
}

/* Returns whether the text that was held back is a separator between calls, which is dropped if no
 * call follows. */
static bool is_separator(const struct tool_reader *r, const char *text, size_t end) {
    const enum tool_shape shape = r->tools->form->shape;
    char separator = shape == TOOL_SHAPE_BARE                  ? ';'
                     : shape == TOOL_SHAPE_LISTED || r->inside ? ','
                                                               : ' ';
    for (size_t i = r->at; i < end; i++)
        if (!tool_json_blank(text[i]) && text[i] != separator) return false;
    return r->calls > 0;
}

static uint32_t depth_behind(uint32_t depth, char byte) {
    if (byte == '{' || byte == '[') return depth + 1;
    return (byte == '}' || byte == ']') && depth ? depth - 1 : depth;
}

static struct tool_piece next_in_text(struct tool_reader *r, const char *text, size_t end,
                                      bool last) {
    size_t at = r->at;
    uint32_t depth = r->depth;
    for (; at < end; depth = depth_behind(depth, text[at++])) {
        struct cursor c = {text, at, end};
        struct head head = {0};
        bool first = !r->spoken && at == r->at;
        if (!may_open(r, text[at], first, depth)) continue;
        enum match match = match_opening(r, &c, first, depth, &head);
        if (match == MATCH_MORE && last && first && is_separator(r, text, end)) {
            r->at = end;
            return calls_more();
        }
        if (match == MATCH_NO || (match == MATCH_MORE && last)) continue;
        if (match == MATCH_YES && at == r->at) return calls_begin_call(r, text, &head);
        break;
    }
    r->depth = depth;
    return at > r->at ? calls_give(r, TOOL_TEXT, at) : calls_more();
}

static struct tool_piece next_in_arguments(struct tool_reader *r, const char *text, size_t end) {
    for (size_t at = r->at; at < end; at++) {
        enum tool_json_step step = tool_json_step(&r->json, text[at]);
        if (step == TOOL_JSON_MORE) continue;
        enum tool_shape shape = r->tools->form->shape;
        r->phase = step != TOOL_JSON_DONE      ? TOOL_IN_REST
                   : shape == TOOL_SHAPE_NAMED ? TOOL_IN_TAIL
                                               : TOOL_IN_MEMBERS;
        end = step == TOOL_JSON_DONE ? at + 1 : at;
        break;
    }
    return end > r->at ? calls_give(r, TOOL_ARGUMENTS, end) : calls_more();
}

static struct tool_piece next_in_tail(struct tool_reader *r, const char *text, size_t end,
                                      bool last);

/* Finds the mark that ends a call whose arguments are not JSON: a tag, or the fence around an
 * object without a tag. Returns how many marks it closes; 0: nothing ends the call. */
static int end_of_rest(const struct tool_reader *r, struct tool_mark *mark) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    *mark = (struct tool_mark){FENCE, sizeof FENCE - 1};
    int count = tool_form_is_marked(r->tools->form) ? tool_form_closes(r->tools->form, marks) : 0;
    if (r->fenced) return TOOL_MARKS_MAX;
    for (int i = 0; i < count; i++) {
        if (!tool_mark_is_strong(&marks[i])) continue;
        *mark = marks[i];
        return i + 1;
    }
    return 0;
}

/* Returns arguments that are not JSON, up to the end of the call or of the text. */
static struct tool_piece next_in_rest(struct tool_reader *r, const char *text, size_t end,
                                      bool last) {
    struct tool_mark mark;
    size_t at = r->at;
    int closed = end_of_rest(r, &mark);
    for (; closed && at < end; at++) {
        struct cursor c = {text, at, end};
        enum match match = match_mark_of(&c, &mark);
        if (match == MATCH_NO || (match == MATCH_MORE && last)) continue;
        if (match == MATCH_MORE || at > r->at) break;
        r->fenced = r->listed = false;
        r->closed = closed;
        r->phase = TOOL_IN_TAIL;
        r->at = c.at;
        return next_in_tail(r, text, end, last);
    }
    if (!closed) at = end;
    return at > r->at ? calls_give(r, TOOL_ARGUMENTS, at) : calls_more();
}

/* Reads the end of a list of calls, if it is there. */
static struct tool_piece next_in_list(struct tool_reader *r, const char *text, size_t end,
                                      bool last) {
    while (r->at < end &&
           (tool_json_blank(text[r->at]) || text[r->at] == '}' || text[r->at] == ']'))
        r->at++;
    if (r->at == end) return calls_more();
    calls_end_call(r, r->at);
    return next_in_text(r, text, end, last);
}

/* Reads what follows an object in a list: a comma, or the end of the list. MORE: it has not come
 * yet. */
static enum match leave_list(struct tool_reader *r, const char *text, size_t end) {
    struct cursor c = {text, r->at, end};
    skip_blank(&c);
    if (c.at == end) return MATCH_MORE;
    r->listed = text[c.at] == ',';
    if (text[c.at] == ',' || text[c.at] == ']') r->at = c.at + 1;
    return r->listed ? MATCH_YES : MATCH_NO;
}

/* Reads the end of a fence; another object may stand before it. */
static enum match leave_fence(struct tool_reader *r, const char *text, size_t end) {
    struct cursor c = {text, r->at, end};
    skip_blank(&c);
    enum match match = match_word(&c, FENCE);
    if (match != MATCH_YES) return match;
    r->at = c.at;
    r->fenced = false;
    return match;
}

/* Moves past the marks that end a call, any of which may be missing. NO: all have been tried. */
static enum match skip_closes(struct tool_reader *r, const char *text, size_t end) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    bool object = r->tools->form->shape == TOOL_SHAPE_TAGGED;
    int count = tool_form_closes(r->tools->form, marks);
    /* arguments that are tags, or not JSON, ended at the last mark */
    if (count > 0 && r->closed >= count) r->inside = false;
    for (; r->closed < count; r->closed++) {
        struct cursor c = {text, r->at, end};
        while (c.at < end && (tool_json_blank(text[c.at]) || (object && text[c.at] == '}'))) c.at++;
        r->at = c.at;
        if (object && marks[r->closed].text[0] == '}') continue;
        if (match_mark_of(&c, &marks[r->closed]) == MATCH_MORE) return MATCH_MORE;
        if (c.at > r->at && r->closed + 1 == count) r->inside = false;
        r->at = c.at;
    }
    return MATCH_NO;
}

/* Reads what follows whole arguments: }\n</tool_call>, or the model's variant of it. */
static struct tool_piece next_in_tail(struct tool_reader *r, const char *text, size_t end,
                                      bool last) {
    if (r->tools->form->shape == TOOL_SHAPE_LISTED) return next_in_list(r, text, end, last);
    enum match left = r->listed ? leave_list(r, text, end) : MATCH_NO;
    if (left == MATCH_NO && r->fenced) {
        left = leave_fence(r, text, end);
        if (left == MATCH_NO) left = MATCH_YES;
    }
    if (left == MATCH_MORE) {
        if (last) r->at = end;
        return calls_more();
    }
    if (left == MATCH_YES) {
        calls_end_call(r, r->at);
        return next_in_text(r, text, end, last);
    }
    if (skip_closes(r, text, end) == MATCH_MORE) {
        if (last) r->at = end;
        return calls_more();
    }
    calls_end_call(r, r->at);
    return next_in_text(r, text, end, last);
}

/* Reads the object of a call after its arguments, up to its end. Bytes that are not JSON, or are
 * too many to hold back, belong to the text after the call. */
static struct tool_piece next_in_members(struct tool_reader *r, const char *text, size_t end,
                                         bool last) {
    struct tool_json json = tool_json_behind_member();
    enum tool_json_step step = TOOL_JSON_MORE;
    size_t at = r->at, most = end - at < TOOL_HELD_MAX ? end : at + TOOL_HELD_MAX;
    while (at < most && step == TOOL_JSON_MORE) step = tool_json_step(&json, text[at++]);
    if (step == TOOL_JSON_MORE && at - r->at < TOOL_HELD_MAX) {
        if (last) r->at = end;
        return calls_more();
    }
    r->phase = TOOL_IN_TAIL;
    if (step != TOOL_JSON_DONE) return next_in_tail(r, text, end, last);
    r->at = at;
    if (r->tools->form->shape != TOOL_SHAPE_BARE) return next_in_tail(r, text, end, last);
    calls_end_call(r, at);
    return next_in_text(r, text, end, last);
}

/* Returns the value of the four hexadecimal digits at `at`; -1: some are missing, or are not
 * digits. */
static int32_t hex_at(const char *text, size_t at, size_t end) {
    int32_t value = 0;
    if (end - at < 4) return -1;
    for (size_t i = at; i < at + 4; i++) {
        int32_t digit =
            text[i] >= '0' && text[i] <= '9' ? text[i] - '0' : (text[i] | 0x20) - 'a' + 10;
        if (digit < 0 || digit > 15) return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* Decodes \\uXXXX, or two of them for one character; half of a pair is U+FFFD. MORE: the text may
 * go on. */
static enum match decode_unicode(struct cursor *c, bool last, struct tool_piece *out) {
    if (c->end - c->at < 6 && !last) return MATCH_MORE;
    int32_t high = hex_at(c->text, c->at + 2, c->end), low = -1;
    if (high < 0) return MATCH_NO;
    c->at += 6;
    if (high >= 0xD800 && high < 0xDC00) {
        struct cursor next = *c;
        enum match match = match_word(&next, "\\u");
        if (match == MATCH_YES && next.end - next.at < 4) match = MATCH_MORE;
        if (match == MATCH_MORE && !last) return MATCH_MORE;
        if (match == MATCH_YES) low = hex_at(c->text, next.at, c->end);
    }
    bool pair = low >= 0xDC00 && low < 0xE000;
    if (pair) c->at += 6;
    uint32_t scalar =
        pair ? 0x10000u + (((uint32_t)high - 0xD800u) << 10) + ((uint32_t)low - 0xDC00u)
        : high >= 0xD800 && high < 0xE000 ? 0xFFFDu
                                          : (uint32_t)high;
    out->decoded_size = (uint8_t)utf8_encode(scalar, out->decoded);
    return MATCH_YES;
}

/* Decodes the escape at the cursor. An unknown escape stands for itself. */
static enum match decode_escape(struct cursor *c, bool last, struct tool_piece *out) {
    static const char named[] = "bfnrt", values[] = "\b\f\n\r\t";
    char letter = c->at + 1 < c->end ? c->text[c->at + 1] : '\0';
    const char *at = letter ? strchr(named, letter) : NULL;
    if (c->at + 1 == c->end && !last) return MATCH_MORE;
    if (letter == 'u') {
        enum match match = decode_unicode(c, last, out);
        if (match != MATCH_NO) return match;
    }
    c->at += c->at + 1 < c->end ? 2 : 1;
    if (!at) return MATCH_YES;
    out->decoded[0] = values[at - named];
    out->decoded_size = 1;
    return MATCH_YES;
}

static bool is_plain_escape(const char *text, size_t at, size_t end) {
    return at + 1 < end && text[at] == '\\' && strchr("\"\\/", text[at + 1]) && text[at + 1];
}

/* Returns arguments that are written as a string, decoded. Escaped quotes, which nearly every
 * string has, are returned as parts of the text itself. */
static struct tool_piece calls_next_in_string(struct tool_reader *r, const char *text, size_t end,
                                              bool last) {
    size_t begin = r->at;
    if (begin < end && is_plain_escape(text, begin, end)) begin++;
    size_t at = begin + (begin > r->at);
    while (at < end && text[at] != '"' && text[at] != '\\') at++;
    if (at > begin) {
        r->at = at;
        return tool_piece(TOOL_ARGUMENTS, begin, at);
    }
    if (at == end) return calls_more();
    if (text[at] == '"') {
        r->at = at + 1;
        r->phase = TOOL_IN_MEMBERS;
        return next_in_members(r, text, end, last);
    }
    struct cursor c = {text, at, end};
    struct tool_piece out = tool_piece(TOOL_ARGUMENTS, at, at);
    if (decode_escape(&c, last, &out) == MATCH_MORE) return calls_more();
    r->at = out.end = c.at;
    return out;
}

static struct tool_piece next_in_tags(struct tool_reader *r, const char *text, size_t end,
                                      bool last) {
    struct tool_piece out = tool_tags_next(&r->tags, text, &r->at, end, last);
    if (r->tags.place != TOOL_TAGS_OVER) return out;
    r->phase = TOOL_IN_TAIL;
    r->closed = r->tags.closed;
    return out.kind != TOOL_MORE ? out : next_in_tail(r, text, end, last);
}

/* Returns arguments in another notation as the JSON that they mean. What is incomplete at the end
 * of the text is left out. */
static struct tool_piece next_in_notation(struct tool_reader *r, const char *text, size_t end,
                                          bool last) {
    struct tool_piece piece;
    switch (tool_literal_next(&r->literal, text, &r->at, end, &piece)) {
    case TOOL_LITERAL_PIECE:
        return piece;
    case TOOL_LITERAL_MORE:
        if (last) r->at = end;
        return calls_more();
    case TOOL_LITERAL_BAD:
        r->phase = TOOL_IN_REST;
        return next_in_rest(r, text, end, last);
    case TOOL_LITERAL_DONE:
        break;
    }
    r->phase = TOOL_IN_TAIL;
    return next_in_tail(r, text, end, last);
}

static struct tool_piece calls_next_piece(struct tool_reader *r, const char *text, size_t end,
                                          bool last) {
    struct tool_piece out;
    switch (r->phase) {
    case TOOL_IN_ARGUMENTS:
        out = next_in_arguments(r, text, end);
        if (out.kind != TOOL_MORE || r->phase != TOOL_IN_REST) return out;
        return next_in_rest(r, text, end, last);
    case TOOL_IN_STRING:
        return calls_next_in_string(r, text, end, last);
    case TOOL_IN_REST:
        return next_in_rest(r, text, end, last);
    case TOOL_IN_TAGS:
        return next_in_tags(r, text, end, last);
    case TOOL_IN_LITERAL:
        return next_in_notation(r, text, end, last);
    case TOOL_IN_BARE:
        r->phase = TOOL_IN_MEMBERS;
        return tool_piece(TOOL_BARE, r->at, r->at);
    case TOOL_IN_MEMBERS:
        return next_in_members(r, text, end, last);
    case TOOL_IN_TAIL:
        return next_in_tail(r, text, end, last);
    case TOOL_IN_TEXT:
        break;
    }
    return next_in_text(r, text, end, last);
}

struct tool_piece tool_reader_next(struct tool_reader *r, const char *text, size_t end, bool last) {
    for (;;) {
        struct tool_piece out = calls_next_piece(r, text, end, last);
        bool left_out = !r->tools->parallel && r->calls > 1;
        if (!left_out || out.kind == TOOL_MORE || out.kind == TOOL_TEXT) return out;
    }
}

void tool_reader_resume(struct tool_reader *r, size_t at) {
    calls_end_call(r, at);
}

bool tool_reader_call(struct tool_reader *r, size_t at) {
    r->calls++;
    r->at = at;
    r->phase = TOOL_IN_REST;
    return r->tools->parallel || r->calls == 1;
}

bool tool_reader_called(const struct tool_reader *r) {
    if (r->calls > 1 && !r->tools->parallel) return true;
    return r->calls > 0 && (r->phase == TOOL_IN_TEXT || r->phase >= TOOL_IN_MEMBERS);
}
