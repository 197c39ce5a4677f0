/* Finds the texts of a form by comparison: what two calls have in common in front of their names,
 * what follows the first call and the last, and what an answer without calls has, too. */
#include "server/oai/tool_derive.h"

#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "server/oai/tool_calls.h"
#include "server/oai/tool_json.h"

/* Words that no template contains. Ids have 9 characters, as some templates demand. */
#define QUESTION "zqquestion"
#define ANSWER   "zqanswer"
#define FIRST    "zqfirst"
#define SECOND   "zqsecond"
#define KEY      "zqkey"
#define VALUE    "zqvalue"
#define NUMBER   "zqnumber"
#define DIGITS   "7316"
#define ID       "zqid0000"

#define CONTEXT_BYTES_MAX 2048

struct slice {
    const char *text;
    size_t size;
};

static struct slice slice_of(const char *begin, const char *end) {
    return (struct slice){begin, (size_t)(end - begin)};
}

static bool slice_is(struct slice a, struct slice b) {
    return a.size == b.size && memcmp(a.text, b.text, a.size) == 0;
}

static size_t common_prefix(struct slice a, struct slice b) {
    size_t size = 0;
    while (size < a.size && size < b.size && a.text[size] == b.text[size]) size++;
    return size;
}

static size_t common_suffix(struct slice a, struct slice b) {
    size_t size = 0;
    while (size < a.size && size < b.size && a.text[a.size - 1 - size] == b.text[b.size - 1 - size])
        size++;
    return size;
}

static struct slice slice_from(struct slice s, size_t begin) {
    return (struct slice){s.text + begin, s.size - begin};
}

static size_t leading_blanks(struct slice s) {
    size_t size = 0;
    while (size < s.size && tool_json_blank(s.text[size])) size++;
    return size;
}

static size_t trailing_blanks(struct slice s) {
    size_t size = 0;
    while (size < s.size && tool_json_blank(s.text[s.size - 1 - size])) size++;
    return size;
}

/* ---- Probes ---- */

static const char tools_text[] =
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"" FIRST
    "\",\"description\":\"d\",\"parameters\":{\"type\":\"object\",\"properties\":{\"" KEY
    "\":{\"type\":\"string\",\"description\":\"d\"},\"" NUMBER
    "\":{\"type\":\"integer\",\"description\":\"d\"}},\"required\":[\"" KEY
    "\"]}}},{\"type\":\"function\",\"function\":{\"name\":\"" SECOND
    "\",\"description\":\"d\",\"parameters\":{\"type\":\"object\",\"properties\":{\"" KEY
    "\":{\"type\":\"string\",\"description\":\"d\"}},\"required\":[\"" KEY
    "\"]}}}],\"add_generation_prompt\":false,\"bos_token\":\"\",\"eos_token\":\"\"";

/* Renders a question and an answer, which has a text or none, and `calls` calls. `suffix`: what the
 * first string has behind VALUE, as JSON writes it. */
static const char *render_with(tool_render *render, void *arg, const char *answer, int calls,
                               const char *suffix) {
    static const char call[] =
        "{\"id\":\"" ID "%d\",\"type\":\"function\",\"function\":{\"name\":\"%s\","
        "\"arguments\":{\"" KEY "\":\"" VALUE "%s\"%s}}}";
    char text[CONTEXT_BYTES_MAX], list[2][256] = {"", ""};
    if (calls > 0)
        snprintf(list[0], sizeof list[0], call, 1, FIRST, suffix, ",\"" NUMBER "\":" DIGITS);
    if (calls > 1) snprintf(list[1], sizeof list[1], call, 2, SECOND, "", "");
    snprintf(text, sizeof text,
             "{\"messages\":[{\"role\":\"user\",\"content\":\"" QUESTION
             "\"},{\"role\":\"assistant\",\"content\":\"%s\"%s%s%s%s%s}],%s}",
             answer, calls > 0 ? ",\"tool_calls\":[" : "", list[0], calls > 1 ? "," : "", list[1],
             calls > 0 ? "]" : "", tools_text);
    cJSON *context = cJSON_Parse(text);
    const char *rendered = context ? render(arg, context) : NULL;
    cJSON_Delete(context);
    const char *question = rendered ? strstr(rendered, QUESTION) : NULL;
    return question ? question + sizeof QUESTION - 1 : NULL;
}

static const char *render_calls(tool_render *render, void *arg, const char *answer, int calls) {
    return render_with(render, arg, answer, calls, "");
}

/* ---- Texts of the form ---- */

/* Stores a text, with TOOL_ANY in place of ids. NULL: no room. */
static const char *keep_text(struct tool_derived *out, struct slice s) {
    char *begin = out->texts + out->used, *at = begin;
    if (s.size + 1 > sizeof out->texts - out->used) return NULL;
    for (size_t i = 0; i < s.size; i++) {
        if (s.size - i > sizeof ID - 1 && memcmp(s.text + i, ID, sizeof ID - 1) == 0) {
            *at++ = TOOL_ANY;
            i += sizeof ID - 1; /* the digit, too */
        } else {
            *at++ = s.text[i];
        }
    }
    *at = '\0';
    out->used += (size_t)(at - begin) + 1;
    return begin;
}

/* Where the parts of a call are in a rendered text, after the question. */
struct found_call {
    const char *name, *behind_name; /* the first byte, and the one after the last */
    struct slice mark;              /* between the name and the arguments */
    const char *end;                /* the byte after the arguments */
};

/* Finds arguments that are a JSON object. */
static bool find_json(struct found_call *call) {
    const char *key = strstr(call->behind_name, KEY), *at = key;
    struct tool_json json = {0};
    if (!key || key[-1] != '"') return false;
    for (at = key - 1; at > call->behind_name && tool_json_blank(at[-1]); at--) continue;
    if (at == call->behind_name || *--at != '{') return false;
    call->mark = slice_of(call->behind_name, at);
    for (; *at; at++) {
        enum tool_json_step step = tool_json_step(&json, *at);
        if (step == TOOL_JSON_BAD) return false;
        if (step == TOOL_JSON_MORE) continue;
        call->end = at + 1;
        return true;
    }
    return false;
}

static bool slice_begins(struct slice s, const char *word) {
    return s.size >= strlen(word) && memcmp(s.text, word, strlen(word)) == 0;
}

/* Stores marks that say the type of a value, such as string"> and number">, or whether it is a
 * string: true"> and false">. `text`: the mark of a string; `number`: that of a number. */
static bool keep_typed(struct tool_derived *out, struct slice text, struct slice number) {
    static const char *const says[][CONSTRAIN_TYPE_COUNT] = {
        {"false", "false", "false", "true", "false", "false"},
        {"null", "boolean", "number", "string", "array", "object"},
    };
    struct constrain_tags *tags = &out->tags;
    tags->gap = tags->value = tags->line = "";
    for (size_t i = 0; i < sizeof says / sizeof *says; i++) {
        const char *const *words = says[i];
        if (!slice_begins(text, words[3]) || !slice_begins(number, words[2])) continue;
        struct slice rest = slice_from(text, strlen(words[3]));
        if (!slice_is(rest, slice_from(number, strlen(words[2])))) continue;
        for (int k = 0; k < CONSTRAIN_TYPE_COUNT; k++) {
            char mark[64];
            int size = snprintf(mark, sizeof mark, "%s%.*s", words[k], (int)rest.size, rest.text);
            if (size < 0 || size >= (int)sizeof mark) return false;
            tags->typed[k] = keep_text(out, (struct slice){mark, (size_t)size});
            if (!tags->typed[k]) return false;
        }
        return true;
    }
    return false;
}

/* Divides the text between a parameter's name and its value. */
static bool divide_middle(struct tool_derived *out, struct slice text, struct slice number) {
    struct constrain_tags *tags = &out->tags;
    size_t line = trailing_blanks(text), size = common_prefix(text, number);
    struct slice rest = text;
    /* The reader leaves out one line break around a value; other blanks are part of it. */
    if (line > 1 || (line == 1 && text.text[text.size - 1] != '\n')) return false;
    if (!slice_is(text, number)) {
        tags->named = keep_text(out, (struct slice){text.text, size});
        return size > 0 && line == 0 && tags->named &&
               keep_typed(out, slice_from(text, size), slice_from(number, size));
    }
    tags->line = keep_text(out, slice_from(text, text.size - line));
    rest.size -= line;
    for (size = 1; size < rest.size; size++)
        if (rest.text[size - 1] == '>' || tool_json_blank(rest.text[size])) break;
    if (size > rest.size || tool_json_blank(rest.text[0])) return false;
    tags->named = keep_text(out, (struct slice){rest.text, size});
    rest = slice_from(rest, size);
    size_t gap = leading_blanks(rest);
    tags->gap = keep_text(out, (struct slice){rest.text, gap});
    tags->value = keep_text(out, slice_from(rest, gap));
    return tags->line && tags->named && tags->gap && tags->value;
}

/* Finds arguments that are tags, and the tags. */
static bool find_tags(struct tool_derived *out, struct found_call *call) {
    static const char *const words[] = {KEY, VALUE, NUMBER, DIGITS};
    struct constrain_tags *tags = &out->tags;
    const char *begin[4], *end[4], *at = call->behind_name;
    for (int i = 0; i < 4; i++) {
        if (!(begin[i] = strstr(at, words[i]))) return false;
        at = end[i] = begin[i] + strlen(words[i]);
    }
    struct slice head = slice_of(call->behind_name, begin[0]), next = slice_of(end[1], begin[2]);
    size_t open = common_suffix(head, next), tag = 0; /* the tag begins at the last '<' */
    for (size_t i = 1; i <= open && tag == 0; i++)
        if (next.text[next.size - i] == '<') tag = i;
    open = tag;
    if (open == 0 || open == next.size) return false;
    call->mark = (struct slice){head.text, head.size - open};
    tags->open = keep_text(out, slice_from(head, head.size - open));
    if (!tags->open || !divide_middle(out, slice_of(end[0], begin[1]), slice_of(end[2], begin[3])))
        return false;
    struct slice close = {next.text, next.size - open};
    size_t line = strlen(tags->line), after = trailing_blanks(close);
    if (close.size <= line + after || memcmp(close.text, tags->line, line) != 0) return false;
    if (strncmp(end[3], close.text, close.size - after) != 0) return false;
    tags->close = keep_text(out, (struct slice){close.text + line, close.size - line - after});
    tags->after = keep_text(out, slice_from(close, close.size - after));
    call->end = end[3] + close.size - after;
    if (tags->after && strncmp(call->end, tags->after, after) == 0) call->end += after;
    return tags->close && tags->after && tags->close[0] == '<';
}

/* Finds the first call after the question. Results of an earlier search are cleared. */
static bool find_call(struct tool_derived *out, const char *text, struct found_call *call) {
    out->form.tags = NULL;
    out->tags = (struct constrain_tags){0};
    out->used = 0;
    call->name = strstr(text, FIRST);
    if (!call->name) return false;
    call->behind_name = call->name + sizeof FIRST - 1;
    if (find_json(call)) return true;
    out->form.tags = &out->tags;
    return find_tags(out, call);
}

/* Returns whether a mark may begin here. */
static bool may_begin_mark(struct slice s, size_t at) {
    const char c = s.text[at];
    return at == 0 || tool_json_blank(c) || strchr("<[{", c) || strchr(">]};,", s.text[at - 1]);
}

/* Returns the text after the last mark of reasoning, such as </think>: templates may write an empty
 * thought in front of calls. */
static struct slice behind_reasoning(struct slice s) {
    size_t begin = 0;
    for (size_t i = 0; i + 5 < s.size; i++)
        if (strncasecmp(s.text + i, "think", 5) == 0) begin = i;
    const char *end = begin > 0 ? memchr(s.text + begin, '>', s.size - begin) : NULL;
    if (!end) return s;
    s = slice_from(s, (size_t)(end + 1 - s.text));
    return slice_from(s, leading_blanks(s));
}

/* Returns the text in front of the first name that does not stand in front of an answer. */
static struct slice find_lead(const char *text, const char *name, const char *plain) {
    struct slice lead = slice_of(text, name), other = slice_of(plain, strstr(plain, ANSWER));
    size_t same = common_prefix(lead, other);
    if (same < other.size)
        while (!may_begin_mark(lead, same)) same--;
    return behind_reasoning(slice_from(lead, same));
}

/* Returns the text after the last call that does not follow an answer. */
static struct slice find_tail(const char *end, const char *plain) {
    const char *answer = strstr(plain, ANSWER) + sizeof ANSWER - 1;
    struct slice tail = {end, strlen(end)}, turn = {answer, strlen(answer)};
    size_t same = common_suffix(tail, turn);
    if (same == turn.size) tail.size -= same;
    return tail;
}

/* Stores the text between name and arguments. If two calls differ in a digit, it is their number.
 */
static const char *keep_mark(struct tool_derived *out, struct slice mark, const char *second) {
    char text[512];
    if (mark.size >= sizeof text) return NULL;
    for (size_t i = 0; i < mark.size; i++) {
        const char a = mark.text[i], b = second ? second[i] : a;
        if (a != b && (a < '0' || a > '9' || b < '0' || b > '9')) return NULL;
        text[i] = a == b ? a : TOOL_ANY;
    }
    return keep_text(out, (struct slice){text, mark.size});
}

/* Returns whether a mark is an id and nothing else: it would be found where nothing stands. */
static bool is_id_alone(const struct tool_mark *mark) {
    for (size_t i = 0; i < mark->size; i++)
        if (mark->text[i] != TOOL_ANY) return false;
    return true;
}

/* Finds how the form is read; false: it cannot be read. */
static bool find_shape(struct tool_form *form) {
    struct tool_mark marks[TOOL_MARKS_MAX], closes[TOOL_MARKS_MAX];
    const size_t size = strlen(form->before);
    int count = tool_form_opens(form, marks), close_count = tool_form_closes(form, closes);
    const bool object = size > 0 && form->before[size - 1] == '"' && strstr(form->before, "name\"");
    if (count == 0) return false;
    for (int i = 0; i < count; i++)
        if (is_id_alone(&marks[i])) return false;
    for (int i = 0; i < close_count; i++)
        if (is_id_alone(&closes[i])) return false;
    form->shape = object ? TOOL_SHAPE_TAGGED : TOOL_SHAPE_NAMED;
    if (object)
        return !form->tags && count > 1 && tool_mark_is_strong(&marks[0]) &&
               form->arguments[0] == '"';
    return tool_mark_is_strong(&marks[count - 1]) || tool_mark_is_strong(&marks[0]);
}

/* Returns how many of the first `size` bytes end with a whole mark, not inside one. */
static size_t whole_marks(struct slice s, size_t size) {
    for (size_t i = size; i > 0 && s.text[i - 1] != '>'; i--)
        if (s.text[i - 1] == '<') return i - 1;
    return size;
}

static int strong_marks(const char *text, struct tool_mark marks[TOOL_MARKS_MAX]) {
    int strong = 0, count = tool_form_marks(text, "", marks);
    for (int i = 0; i < count; i++)
        if (tool_mark_is_strong(&marks[i])) marks[strong++] = marks[i];
    return strong;
}

/* Leaves out marks that close more than was opened: the end of the turn, if a template writes it
 * differently after calls and after answers. Returns how many bytes. */
static size_t cut_close(struct tool_derived *out, const char *open, const char *close) {
    struct tool_mark opens[TOOL_MARKS_MAX], closes[TOOL_MARKS_MAX];
    int count = strong_marks(open, opens);
    if (strong_marks(close, closes) <= count) return 0;
    const struct tool_mark *last = &closes[count > 0 ? count - 1 : 0];
    size_t end = (size_t)(last->text - out->texts) + (count > 0 ? last->size : 0);
    const size_t cut = strlen(out->texts + end);
    out->texts[end] = '\0';
    return cut;
}

/* Divides the texts in front of the first name, between two calls and after the last one. *cut:
 * bytes at the end of the last text that are left out. */
static bool divide_calls(struct tool_derived *out, struct slice lead, struct slice next,
                         struct slice tail, size_t *cut) {
    struct tool_form *form = &out->form;
    size_t before = common_suffix(lead, next);
    while (before > 0 && !may_begin_mark(lead, lead.size - before)) before--;
    if (before == 0) return false;
    next.size -= before;
    size_t after = whole_marks(next, common_prefix(next, tail));
    form->open = keep_text(out, (struct slice){lead.text, lead.size - before});
    form->before = keep_text(out, slice_from(lead, lead.size - before));
    form->after = keep_text(out, (struct slice){next.text, after});
    form->between = keep_text(out, slice_from(next, after));
    form->close = before < lead.size ? keep_text(out, slice_from(tail, after)) : "";
    *cut = before < lead.size ? 0 : tail.size - after;
    if (!form->open || !form->before || !form->after || !form->between || !form->close)
        return false;
    *cut += cut_close(out, form->open, form->close);
    return true;
}

/* Divides the texts of a template that shows one call only. */
static bool take_call(struct tool_derived *out, struct slice lead, struct slice tail, size_t *cut) {
    struct tool_form *form = &out->form;
    form->open = form->close = "";
    form->between = "\n";
    form->before = keep_text(out, lead);
    form->after = keep_text(out, tail);
    if (!form->before || !form->after || lead.size == 0) return false;
    *cut = cut_close(out, form->before, form->after);
    return true;
}

/* Finds the marks around strings that hold characters of tags, such as <![CDATA[ and ]]>. Most
 * templates write none. */
static bool find_raw(tool_render *render, void *arg, struct tool_derived *out) {
    static const char text[] = VALUE "<&\n";
    struct constrain_tags *tags = &out->tags;
    char begin[256], end[256];
    const char *answer = render_with(render, arg, "", 1, "<&\\n");
    snprintf(begin, sizeof begin, KEY "%s%s%s%s", tags->named, tags->gap,
             tags->typed[0] ? tags->typed[3] : tags->value, tags->line);
    snprintf(end, sizeof end, "%s%s", tags->line, tags->close);
    const char *first = answer ? strstr(answer, FIRST) : NULL;
    const char *open = first ? strstr(first, begin) : NULL;
    const char *value = open ? strstr(open, text) : NULL;
    const char *behind = value ? value + sizeof text - 1 : NULL;
    const char *close = behind ? strstr(behind, end) : NULL;
    if (!close || value == open + strlen(begin) || close == behind) return true;
    tags->raw[0] = keep_text(out, slice_of(open + strlen(begin), value));
    tags->raw[1] = keep_text(out, slice_of(behind, close));
    return tags->raw[0] && tags->raw[1];
}

/* ---- Trial ---- */

/* Returns whether the tags have marks, and the call an end. Texts that are compared byte by byte
 * must not contain ids. */
static bool are_whole_tags(const struct tool_form *form) {
    const struct constrain_tags *tags = form->tags;
    struct tool_mark closes[TOOL_MARKS_MAX];
    const char *const texts[] = {tags->open, tags->named, tags->gap,   tags->value,
                                 tags->line, tags->close, tags->after, tags->typed[0]};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i] && strchr(texts[i], TOOL_ANY)) return false;
    return *tags->open && *tags->named && *tags->close && tool_form_closes(form, closes) > 0 &&
           !memchr(closes[0].text, TOOL_ANY, closes[0].size);
}

/* Reads what a template has rendered in the way an answer is read, and writes the calls as
 * NAME{arguments}NAME{arguments}. false: there is text beside them, or no end. */
static bool read_calls(const struct tool_form *form, struct slice text, struct buf *out) {
    static const char *const names[] = {FIRST, SECOND};
    const struct tool_set tools = {form, names, 2, true, NULL};
    struct tool_reader reader = {.tools = &tools};
    struct tool_piece piece;
    while ((piece = tool_reader_next(&reader, text.text, text.size, true)).kind != TOOL_MORE) {
        struct slice part = {text.text + piece.begin, piece.end - piece.begin};
        if (piece.kind == TOOL_TEXT && leading_blanks(part) < part.size) return false;
        if (piece.kind == TOOL_TEXT) continue;
        part.text = tool_piece_text(&piece, text.text, &part.size);
        buf_add(out, part.text, part.size);
        if (out->failed) return false;
    }
    return tool_reader_called(&reader);
}

/* Compares texts except for white space. */
static bool is_same_text(struct slice a, const char *b) {
    for (size_t i = 0; i < a.size; i++)
        if (!tool_json_blank(a.text[i]) && (!*b || a.text[i] != *b++)) return false;
    return *b == '\0';
}

/* Returns whether the form finds the calls that the template was given, and nothing else, from
 * their first mark to `behind` bytes before the end. */
static bool finds_calls(const struct tool_form *form, const char *text, size_t behind,
                        const char *calls) {
    struct buf out;
    size_t size = strlen(text);
    if (size < behind) return false;
    buf_open(&out, CONTEXT_BYTES_MAX);
    bool found = read_calls(form, (struct slice){text, size - behind}, &out) &&
                 is_same_text((struct slice){out.data, out.size}, calls);
    buf_close(&out);
    return found;
}

#define FIRST_CALL  FIRST "{\"" KEY "\":\"" VALUE "\",\"" NUMBER "\":" DIGITS "}"
#define SECOND_CALL SECOND "{\"" KEY "\":\"" VALUE "\"}"

bool tool_derive(tool_render *render, void *arg, struct tool_derived *out) {
    struct tool_form *form = &out->form;
    struct found_call first = {0}, only;
    *out = (struct tool_derived){.form = {.name = "template"}};
    const char *plain = render_calls(render, arg, ANSWER, 0);
    const char *one = plain ? render_calls(render, arg, "", 1) : NULL;
    const char *two = one ? render_calls(render, arg, "", 2) : NULL;
    if (!one || !strstr(plain, ANSWER) || !find_call(out, one, &only)) return false;
    const bool tagged = form->tags != NULL;
    struct slice lead = find_lead(one, only.name, plain), tail = find_tail(only.end, plain);
    size_t behind = strlen(only.end) - tail.size, cut = 0;
    const char *second = NULL;
    /* a template that writes one call and two in different forms has no form that can be read */
    if (two && (!find_call(out, two, &first) || tagged != (form->tags != NULL))) return false;
    if (two) second = strstr(first.end, SECOND);
    if (!second) {
        if (!find_call(out, one, &only) || !take_call(out, lead, tail, &cut)) return false;
    } else if (!divide_calls(out, lead, slice_of(first.end, second), tail, &cut)) {
        return false;
    }
    const char *called = second ? second + sizeof SECOND - 1 : NULL;
    struct slice mark = second ? first.mark : only.mark;
    if (called && strlen(called) < mark.size) return false;
    if (second && (size_t)(first.name - two) < lead.size) return false;
    form->arguments = keep_mark(out, mark, called);
    form->short_ids = strstr(form->before, "[TOOL_CALLS]") || strstr(form->open, "[TOOL_CALLS]");
    if (!form->arguments || strstr(form->arguments, FIRST) ||
        (form->tags && !are_whole_tags(form)) || !find_shape(form) ||
        (form->tags && !find_raw(render, arg, out)))
        return false;
    return finds_calls(form, lead.text, behind + cut, FIRST_CALL) &&
           (!second ||
            finds_calls(form, first.name - lead.size, behind + cut, FIRST_CALL SECOND_CALL));
}

const struct tool_form *tool_find(const char *source, tool_render *render, void *arg,
                                  struct tool_derived *out) {
    const struct tool_form *known = tool_form_of(source);
    if (known && known->shape != TOOL_SHAPE_LISTED) return known;
    /* A list of objects is better read by the rules that were written for it. */
    bool found = tool_derive(render, arg, out);
    return found && (!known || out->form.shape == TOOL_SHAPE_NAMED) ? &out->form : known;
}

bool tool_hides_calls(tool_render *render, void *arg) {
    const char *both = render_calls(render, arg, ANSWER, 1);
    const char *call = both ? render_calls(render, arg, "", 1) : NULL;
    /* the names may also stand in the list of tools */
    return call && strstr(both, ANSWER) && !strstr(both, VALUE) && !strstr(call, VALUE);
}
