/* Filters that lay text out: wordwrap as Python's textwrap breaks lines, pprint as its module of
 * that name, striptags as markupsafe. */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/jinja/print.h"
#include "text/jinja/unicode.h"
#include "text/unicode/unicode.h"

#define FILTER(name)                                                                               \
    static int filter_##name(struct jinja_run *run, const struct jinja_value *self,                \
                             const struct jinja_args *args, struct jinja_value *out)

/* ---- wordwrap ------------------------------------------------------------------------------- */

/* The characters of one line, and where they begin in it; at[count] is its end. */
struct line {
    const struct jinja_value *text;
    uint32_t *codes, *at;
    uint32_t count;
};

struct chunk {
    uint32_t begin, end; /* in characters */
};

struct wrapping {
    struct jinja_run *run;
    struct jinja_text *out;
    const struct jinja_value *separator;
    int64_t width;
    bool cut_words, at_hyphens;
    bool written; /* a line is there, and the next needs a separator */
};

static int open_line(struct jinja_run *run, const struct jinja_value *text, struct line *line) {
    struct jinja_cursor c;
    int rc = jinja_charge_chars(run, text->size);
    *line = (struct line){.text = text};
    if (rc) return rc;
    line->codes = jinja_alloc(run, (size_t)text->size + 1, sizeof *line->codes);
    line->at = jinja_alloc(run, (size_t)text->size + 1, sizeof *line->at);
    if (!line->codes || !line->at) return jinja_fail_memory(run);
    jinja_cursor_open(&c, text);
    while (jinja_cursor_step(&c)) {
        line->codes[line->count] = c.code;
        line->at[line->count++] = c.at - text->begin;
    }
    line->at[line->count] = text->size;
    return 0;
}

/* White space of textwrap, which is less than that of str. */
static bool is_gap(uint32_t code) {
    return (code >= 9 && code <= 13) || code == ' ';
}

static bool is_punctuated(uint32_t code) {
    return jinja_is_word(code) || (code < 0x80 && code && strchr("!\"'&.,?", (int)code));
}

static bool is_letter(uint32_t code) {
    return jinja_is_word(code) && !jinja_is_decimal(code);
}

static bool letter_at(const struct line *line, uint32_t i) {
    return i < line->count && is_letter(line->codes[i]);
}

/* The end of two or more hyphens at `i` in front of a word; 0: there are none. */
static uint32_t dash_end(const struct line *line, uint32_t i) {
    uint32_t end = i;
    if (i == 0 || !is_punctuated(line->codes[i - 1])) return 0;
    while (end < line->count && line->codes[end] == '-') end++;
    return end - i >= 2 && end < line->count && jinja_is_word(line->codes[end]) ? end : 0;
}

/* A word may break behind the hyphen at `i`: two letters before it, or a letter, a hyphen and a
 * character; two letters behind it, which a hyphen may part. */
static bool is_hyphenated(const struct line *line, uint32_t i) {
    const uint32_t *codes = line->codes;
    bool before =
        (i >= 2 && is_letter(codes[i - 1]) && is_letter(codes[i - 2])) ||
        (i >= 3 && is_letter(codes[i - 3]) && codes[i - 2] == '-' && is_punctuated(codes[i - 1]));
    uint32_t next = i + 2 < line->count && codes[i + 2] == '-' ? i + 3 : i + 2;
    return codes[i] == '-' && before && letter_at(line, i + 1) && letter_at(line, next);
}

static uint32_t chunk_end(const struct line *line, uint32_t begin, bool at_hyphens) {
    uint32_t end = begin;
    bool gap = is_gap(line->codes[begin]);
    if (gap || !at_hyphens) {
        while (end < line->count && is_gap(line->codes[end]) == gap) end++;
        return end;
    }
    if ((end = dash_end(line, begin)) != 0) return end;
    for (end = begin + 1; end < line->count; end++) {
        if (is_hyphenated(line, end)) return end + 1;
        if (is_gap(line->codes[end]) || dash_end(line, end)) return end;
    }
    return end;
}

static bool is_blank(const struct line *line, uint32_t begin, uint32_t end) {
    while (begin < end && jinja_is_space(line->codes[begin])) begin++;
    return begin == end;
}

static int write_line(struct wrapping *w, const struct line *line, uint32_t begin, uint32_t end) {
    struct jinja_value part = jinja_str_view(line->text, line->at[begin], line->at[end]);
    int rc = w->written ? jinja_text_add_str(w->run, w->out, w->separator) : 0;
    w->written = true;
    return rc ? rc : jinja_text_add_str(w->run, w->out, &part);
}

/* How much of a chunk that is too long goes into what is left of a line. */
static uint32_t cut_chunk(const struct wrapping *w, const struct line *line, struct chunk chunk,
                          uint32_t space) {
    uint32_t hyphen = chunk.begin + space;
    bool found = false;
    if (!w->at_hyphens) return hyphen;
    while (hyphen > chunk.begin && line->codes[hyphen - 1] != '-') hyphen--;
    for (uint32_t i = chunk.begin; hyphen > chunk.begin && i + 1 < hyphen; i++)
        found |= line->codes[i] != '-';
    return found ? hyphen : chunk.begin + space;
}

/* A line of the input. Chunks follow each other, so an output line is a range of characters;
 * blank chunks are dropped at its end, and at its beginning unless it is the first. */
static int wrap_line(struct wrapping *w, const struct line *line) {
    uint32_t at = 0, stop = 0; /* the end of the chunk that `at` is in */
    uint32_t width = (uint32_t)(w->width < line->count ? w->width : line->count);
    bool any = false;
    int rc = 0;
    if (line->count == 0) return write_line(w, line, 0, 0);
    while (at < line->count && !rc) {
        uint32_t begin, last, parts = 0;
        if (at == stop) stop = chunk_end(line, at, w->at_hyphens);
        if (any && is_blank(line, at, stop)) at = stop;
        begin = last = at;
        for (; at < line->count; at = stop, parts++) {
            if (at == stop) stop = chunk_end(line, at, w->at_hyphens);
            if (stop - begin > width) break;
            last = at;
        }
        bool long_chunk = at < line->count && stop - at > width;
        if (long_chunk && (w->cut_words || parts == 0)) {
            last = at;
            at = w->cut_words ? cut_chunk(w, line, (struct chunk){at, stop}, width - (at - begin))
                              : stop;
            parts++;
        }
        rc = jinja_charge(w->run, 1);
        if (parts && is_blank(line, last, at))
            parts--;
        else
            last = at;
        if (!rc && parts) rc = write_line(w, line, begin, last);
        any |= parts > 0;
    }
    return rc;
}

FILTER(wordwrap) {
    static const char *const names[] = {"width", "break_long_words", "wrapstring",
                                        "break_on_hyphens"};
    struct jinja_value v[4], lines, separator;
    struct wrapping w = {.run = run, .cut_words = true, .at_hyphens = true};
    int rc = jinja_bind(run, "wordwrap", args, names, 4, 0, v);
    if (!rc) rc = jinja_arg_int(run, &v[0], 79, &w.width);
    if (!rc && w.width <= 0)
        rc = jinja_fail(run, ERR_INVALID, "invalid width %lld (must be > 0)", (long long)w.width);
    if (!rc && !jinja_is_str(self))
        rc = jinja_fail(run, ERR_INVALID, "'%s' object has no attribute 'splitlines'",
                        jinja_type_name(self));
    if (rc) return rc;
    if (v[1].kind != JINJA_MISSING) w.cut_words = jinja_truth(&v[1]);
    if (v[3].kind != JINJA_MISSING) w.at_hyphens = jinja_truth(&v[3]);
    rc = v[2].kind == JINJA_MISSING || v[2].kind == JINJA_NONE
             ? jinja_str_c(run, "\n", &separator)
             : jinja_to_str(run, &v[2], &separator);
    w.separator = &separator;
    if (!rc) rc = jinja_text_open(run, self->size, &w.out);
    if (!rc) rc = jinja_split_lines(run, self, false, &lines);
    for (uint32_t i = 0; !rc && i < lines.list->count; i++) {
        struct line line;
        rc = open_line(run, &lines.list->items[i], &line);
        uint32_t before = w.out->used;
        bool written = w.written;
        if (!rc) rc = wrap_line(&w, &line);
        /* A line of which nothing is left is an empty one. */
        if (!rc && w.out->used == before && w.written == written) rc = write_line(&w, &line, 0, 0);
    }
    if (!rc) *out = jinja_text_value(w.out);
    return rc;
}

/* ---- striptags ------------------------------------------------------------------------------ */

/* Tags and comments go, up to the first that is not closed. */
static int remove_tags(struct jinja_run *run, struct jinja_value *s) {
    static const char *const marks[] = {"<", ">", "-->"};
    struct jinja_value mark[3];
    struct jinja_text *text;
    uint32_t at = 0;
    int rc = jinja_charge_bytes(run, s->size);
    for (int i = 0; i < 3 && !rc; i++) rc = jinja_str_c(run, marks[i], &mark[i]);
    if (!rc) rc = jinja_text_open(run, s->size, &text);
    while (!rc) {
        int64_t begin = jinja_str_find(s, &mark[0], at, s->size), end = -1;
        if (begin < 0) break;
        uint32_t from = (uint32_t)begin;
        bool comment = s->size - from >= 4 && memcmp(jinja_str_data(s) + from, "<!--", 4) == 0;
        end = jinja_str_find(s, &mark[comment ? 2 : 1], from + (comment ? 4 : 0), s->size);
        if (end < 0) break;
        struct jinja_value part = jinja_str_view(s, at, from);
        rc = jinja_text_add_str(run, text, &part);
        at = (uint32_t)end + (comment ? 3 : 1);
    }
    struct jinja_value rest = jinja_str_view(s, at, s->size);
    if (!rc) rc = jinja_text_add_str(run, text, &rest);
    if (!rc) *s = jinja_text_value(text);
    return rc;
}

/* Runs of white space become one space. */
static int collapse(struct jinja_run *run, struct jinja_value *s) {
    struct jinja_cursor c;
    struct jinja_text *text;
    bool gap = false, any = false;
    int rc = jinja_charge_chars(run, s->size);
    if (!rc) rc = jinja_text_open(run, s->size, &text);
    if (rc) return rc;
    jinja_cursor_open(&c, s);
    while (!rc && jinja_cursor_step(&c)) {
        if (jinja_is_space(c.code)) {
            gap = any;
            continue;
        }
        if (gap) rc = jinja_text_puts(run, text, " ");
        if (!rc) rc = jinja_text_add_code(run, text, c.code, c.marked);
        gap = false;
        any = true;
    }
    if (!rc) *s = jinja_text_value(text);
    return rc;
}

/* The character that s[0, size), which begins with &, refers to, and its length; 0: it is text;
 * UINT32_MAX: perhaps one of HTML's 2,231 others. */
static uint32_t reference(const char *s, size_t size, size_t *length) {
    static const struct {
        const char *name;
        uint32_t code;
    } names[] = {{"amp;", '&'},  {"lt;", '<'},    {"gt;", '>'},
                 {"quot;", '"'}, {"apos;", '\''}, {"nbsp;", 0xA0}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t n = strlen(names[i].name);
        if (size <= n || memcmp(s + 1, names[i].name, n) != 0) continue;
        *length = n + 1;
        return names[i].code;
    }
    size_t n = 1;
    if (size > 2 && s[1] == '#') {
        uint32_t code = 0;
        for (n = 2; n < size && n < 9 && s[n] >= '0' && s[n] <= '9'; n++)
            code = 10 * code + (uint32_t)(s[n] - '0');
        bool plain = (code >= 0x20 && code < 0x7F) || (code >= 0xA0 && code < 0xD800);
        *length = n + (n < size && s[n] == ';');
        if (n > 2) return plain ? code : UINT32_MAX;
        return s[2] == 'x' || s[2] == 'X' ? UINT32_MAX : 0;
    }
    while (n < size && ((s[n] | 0x20) >= 'a' && (s[n] | 0x20) <= 'z')) n++;
    return n > 2 ? UINT32_MAX : 0; /* no reference has a name of one letter */
}

static int unescape(struct jinja_run *run, struct jinja_value *s) {
    struct jinja_cursor c;
    struct jinja_text *text;
    size_t skip = 0;
    int rc = jinja_charge_chars(run, s->size);
    if (!rc) rc = jinja_text_open(run, s->size, &text);
    if (rc) return rc;
    jinja_cursor_open(&c, s);
    while (!rc && jinja_cursor_step(&c)) {
        uint32_t code = c.code;
        if (skip > 0) {
            skip--;
            continue;
        }
        if (code == '&') {
            size_t length = 1;
            uint32_t meant = reference(c.text->data + c.at, c.end - c.at, &length);
            if (meant == UINT32_MAX)
                return jinja_fail(run, ERR_UNSUPPORTED,
                                  "striptags knows the references amp, lt, gt, quot, apos, nbsp "
                                  "and numbers of printable characters alone");
            if (meant) {
                code = meant;
                skip = length - 1; /* references are ASCII */
            }
        }
        rc = jinja_text_add_code(run, text, code, c.marked);
    }
    if (!rc) *s = jinja_text_value(text);
    return rc;
}

FILTER(striptags) {
    struct jinja_value s;
    int rc = jinja_no_args(run, "striptags", args);
    if (!rc) rc = jinja_to_str(run, self, &s);
    if (!rc) rc = remove_tags(run, &s);
    if (!rc) rc = collapse(run, &s);
    if (!rc) rc = unescape(run, &s);
    if (!rc) *out = s;
    return rc;
}

/* ---- pprint --------------------------------------------------------------------------------- */

#define PPRINT_WIDTH 80

struct printer {
    struct jinja_run *run;
    struct jinja_text *out;
};

/* `allowance`: columns behind the value that brackets and commas need. */
static int print_value(struct printer *p, const struct jinja_value *v, int64_t indent,
                       int64_t allowance, int level);

static int print_repr(struct jinja_run *run, const struct jinja_value *v, struct jinja_value *out) {
    struct jinja_text *text;
    int rc = jinja_text_open(run, 64, &text);
    if (!rc) rc = jinja_print_repr(run, text, v);
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

static int64_t columns(struct jinja_run *run, const struct jinja_value *s, int *rc) {
    if (!*rc) *rc = jinja_charge_walk(run, s);
    return *rc ? 0 : (int64_t)jinja_str_length(s);
}

static int put_indent(struct printer *p, const char *before, int64_t indent) {
    struct jinja_value space;
    int rc = jinja_text_puts(p->run, p->out, before);
    if (!rc) rc = jinja_str_c(p->run, " ", &space);
    return rc ? rc : jinja_text_pad(p->run, p->out, &space, indent);
}

/* Dicts in the order of their keys, at every depth. */
static int sort_dicts(struct jinja_run *run, const struct jinja_value *v, struct jinja_value *out) {
    struct jinja_value keys, pairs, inner;
    int rc = 0;
    *out = *v;
    if (v->kind != JINJA_DICT && v->kind != JINJA_LIST && v->kind != JINJA_TUPLE) return 0;
    if ((rc = jinja_enter(run))) return rc;
    if (v->kind != JINJA_DICT) {
        rc = jinja_list_open(run, v->kind, v->list->count, out);
        for (uint32_t i = 0; !rc && i < v->list->count; i++) {
            rc = sort_dicts(run, &v->list->items[i], &inner);
            if (!rc) rc = jinja_list_add(run, out->list, &inner);
        }
    } else {
        rc = jinja_list_open(run, JINJA_LIST, v->dict->count, &keys);
        if (!rc) rc = jinja_list_open(run, JINJA_LIST, v->dict->count, &pairs);
        for (uint32_t i = 0; !rc && i < v->dict->count; i++) {
            rc = sort_dicts(run, &v->dict->pairs[i].value, &inner);
            if (!rc) rc = jinja_list_add(run, keys.list, &v->dict->pairs[i].key);
            if (!rc) rc = jinja_list_add(run, pairs.list, &inner);
        }
        if (!rc) rc = jinja_dict_open(run, JINJA_DICT, out);
        if (!rc) rc = jinja_sort(run, pairs.list, keys.list, false);
        for (uint32_t i = 0; !rc && i < keys.list->count; i++)
            rc = jinja_dict_set(run, out->dict, &keys.list->items[i], &pairs.list->items[i]);
    }
    jinja_leave(run);
    return rc;
}

static int print_items(struct printer *p, const struct jinja_list *items, int64_t indent,
                       int64_t allowance, int level) {
    int rc = 0;
    for (uint32_t i = 0; !rc && i < items->count; i++) {
        if (i) rc = put_indent(p, ",\n", indent + 1);
        if (!rc)
            rc = print_value(p, &items->items[i], indent + 1, i + 1 == items->count ? allowance : 1,
                             level);
    }
    return rc;
}

static int print_pairs(struct printer *p, const struct jinja_dict *dict, int64_t indent,
                       int64_t allowance, int level) {
    struct jinja_value key;
    int rc = 0;
    for (uint32_t i = 0; !rc && i < dict->count; i++) {
        if (i) rc = put_indent(p, ",\n", indent + 1);
        if (!rc) rc = print_repr(p->run, &dict->pairs[i].key, &key);
        int64_t width = columns(p->run, &key, &rc);
        if (!rc) rc = jinja_text_add_str(p->run, p->out, &key);
        if (!rc) rc = jinja_text_puts(p->run, p->out, ": ");
        if (!rc)
            rc = print_value(p, &dict->pairs[i].value, indent + 1 + width + 2,
                             i + 1 == dict->count ? allowance : 1, level);
    }
    return rc;
}

/* The pieces of a long string, each on a line. */
struct pieces {
    struct jinja_value list; /* representations */
    int64_t width, allowance;
};

/* Adds a line that is too long, word by word. */
static int add_words(struct jinja_run *run, struct pieces *pieces, const struct jinja_value *line,
                     bool last_line) {
    struct line chars;
    struct jinja_value shown;
    int64_t width = pieces->width;
    int rc = open_line(run, line, &chars);
    uint32_t begin = 0, end = 0, next = 0;
    while (!rc && end < chars.count) {
        while (next < chars.count && !jinja_is_space(chars.codes[next])) next++;
        while (next < chars.count && jinja_is_space(chars.codes[next])) next++;
        if (last_line && next == chars.count) width -= pieces->allowance;
        struct jinja_value part = jinja_str_view(line, chars.at[begin], chars.at[next]);
        rc = print_repr(run, &part, &shown);
        if (columns(run, &shown, &rc) > width && end > begin) {
            part = jinja_str_view(line, chars.at[begin], chars.at[end]);
            if (!rc) rc = print_repr(run, &part, &shown);
            if (!rc) rc = jinja_list_add(run, pieces->list.list, &shown);
            begin = end;
        }
        end = next;
    }
    struct jinja_value rest = jinja_str_view(line, chars.at[begin], chars.at[end]);
    if (!rc && end > begin) rc = print_repr(run, &rest, &shown);
    if (!rc && end > begin) rc = jinja_list_add(run, pieces->list.list, &shown);
    return rc;
}

static int print_string(struct printer *p, const struct jinja_value *s, int64_t indent,
                        int64_t allowance, int level) {
    struct jinja_value lines, shown = jinja_str_empty();
    bool top = level == 0;
    if (top) indent++, allowance++;
    struct pieces pieces = {.width = PPRINT_WIDTH - indent, .allowance = allowance};
    int rc = jinja_split_lines(p->run, s, true, &lines);
    if (!rc) rc = jinja_list_open(p->run, JINJA_LIST, 4, &pieces.list);
    for (uint32_t i = 0; !rc && i < lines.list->count; i++) {
        const struct jinja_value *line = &lines.list->items[i];
        bool last = i + 1 == lines.list->count;
        rc = print_repr(p->run, line, &shown);
        if (columns(p->run, &shown, &rc) <= pieces.width - (last ? allowance : 0))
            rc = rc ? rc : jinja_list_add(p->run, pieces.list.list, &shown);
        else if (!rc)
            rc = add_words(p->run, &pieces, line, last);
    }
    if (rc) return rc;
    uint32_t count = pieces.list.list->count;
    if (count == 1) return jinja_text_add_str(p->run, p->out, &shown);
    if (top) rc = jinja_text_puts(p->run, p->out, "(");
    for (uint32_t i = 0; !rc && i < count; i++) {
        if (i) rc = put_indent(p, "\n", indent);
        if (!rc) rc = jinja_text_add_str(p->run, p->out, &pieces.list.list->items[i]);
    }
    return rc || !top ? rc : jinja_text_puts(p->run, p->out, ")");
}

static int print_nested(struct printer *p, const struct jinja_value *v, int64_t indent,
                        int64_t allowance, int level) {
    bool list = v->kind == JINJA_LIST, dict = v->kind == JINJA_DICT;
    const char *end = list ? "]" : dict ? "}" : v->list->count == 1 ? ",)" : ")";
    int64_t more = allowance + (int64_t)strlen(end);
    int rc = jinja_text_puts(p->run, p->out, list ? "[" : dict ? "{" : "(");
    if (!rc)
        rc = dict ? print_pairs(p, v->dict, indent, more, level)
                  : print_items(p, v->list, indent, more, level);
    return rc ? rc : jinja_text_puts(p->run, p->out, end);
}

static int print_value(struct printer *p, const struct jinja_value *v, int64_t indent,
                       int64_t allowance, int level) {
    struct jinja_value shown;
    int rc = print_repr(p->run, v, &shown);
    int64_t width = columns(p->run, &shown, &rc);
    bool nested = v->kind == JINJA_DICT || v->kind == JINJA_LIST || v->kind == JINJA_TUPLE;
    if (rc) return rc;
    if (width <= PPRINT_WIDTH - indent - allowance || (!nested && v->kind != JINJA_STR))
        return jinja_text_add_str(p->run, p->out, &shown);
    if ((rc = jinja_enter(p->run))) return rc;
    rc = nested ? print_nested(p, v, indent, allowance, level + 1)
                : print_string(p, v, indent, allowance, level);
    jinja_leave(p->run);
    return rc;
}

FILTER(pprint) {
    struct printer p = {.run = run};
    struct jinja_value sorted;
    int rc = jinja_no_args(run, "pprint", args);
    if (!rc) rc = jinja_text_open(run, 64, &p.out);
    if (!rc) rc = sort_dicts(run, self, &sorted);
    if (!rc) rc = print_value(&p, &sorted, 0, 0, 0);
    if (!rc) *out = jinja_text_value(p.out);
    return rc;
}

const struct jinja_builtin jinja_layout_filters[] = {{"pprint", filter_pprint},
                                                     {"striptags", filter_striptags},
                                                     {"urlize", jinja_filter_urlize},
                                                     {"wordwrap", filter_wordwrap}};
const size_t jinja_layout_filter_count = sizeof jinja_layout_filters / sizeof *jinja_layout_filters;
