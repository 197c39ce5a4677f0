/* Filters on strings and numbers; the filters on sequences are in sequence.c.
 *
 * Arguments bind by position and name as in Jinja's Python functions, and messages are Python's: a
 * template may be debugged beside the original. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/format.h"
#include "text/jinja/json.h"
#include "text/jinja/ops.h"
#include "text/jinja/print.h"
#include "text/jinja/unicode.h"
#include "text/unicode/unicode.h"

#define FILTER(name)                                                                               \
    static int filter_##name(struct jinja_run *run, const struct jinja_value *self,                \
                             const struct jinja_args *args, struct jinja_value *out)

static bool filters_is_given(const struct jinja_value *v) {
    return v->kind != JINJA_MISSING;
}

int jinja_arg_int(struct jinja_run *run, const struct jinja_value *v, int64_t absent,
                  int64_t *out) {
    *out = absent;
    if (v->kind == JINJA_MISSING || v->kind == JINJA_NONE) return 0;
    if (!jinja_is_int(v))
        return jinja_fail(run, ERR_INVALID, "'%s' object cannot be interpreted as an integer",
                          jinja_type_name(v));
    *out = jinja_int_of(v);
    return 0;
}

/* Case */

static int add_codes(struct jinja_run *run, struct jinja_text *text, const uint32_t *codes, int n,
                     bool marked) {
    int rc = 0;
    for (int i = 0; i < n && !rc; i++) rc = jinja_text_add_code(run, text, codes[i], marked);
    return rc;
}

#define CAPITAL_SIGMA 0x3A3
#define FINAL_SIGMA   0x3C2

/* A letter was last, apart from characters that do not count (apostrophes, marks). */
static void note_cased(bool *cased_before, uint32_t code) {
    if (!unicode_has(unicode_case_ignorable, code))
        *cased_before = unicode_has(unicode_cased, code);
}

static bool ends_word(struct jinja_cursor c) {
    while (jinja_cursor_step(&c))
        if (!unicode_has(unicode_case_ignorable, c.code))
            return !unicode_has(unicode_cased, c.code);
    return true;
}

/* The lower case of the character under the cursor: a sigma that ends a word has its own. */
static int lower_at(const struct jinja_cursor *c, bool cased_before, uint32_t out[3]) {
    int n = unicode_to_lower(c->code, out);
    if (c->code == CAPITAL_SIGMA && cased_before && ends_word(*c)) out[0] = FINAL_SIGMA;
    return n;
}

static int changed_codes(const struct jinja_cursor *c, enum jinja_case how, bool starts_word,
                         bool first, bool cased_before, uint32_t out[3]) {
    uint32_t code = c->code;
    switch (how) {
    case JINJA_UPPER:
        return unicode_to_upper(code, out);
    case JINJA_CASEFOLD:
        return unicode_to_fold(code, out);
    case JINJA_LOWER:
        return lower_at(c, cased_before, out);
    case JINJA_CAPITALIZE:
        return first ? unicode_to_title(code, out) : lower_at(c, cased_before, out);
    case JINJA_TITLE:
        return starts_word ? unicode_to_title(code, out) : lower_at(c, cased_before, out);
    default:
        return unicode_has(unicode_uppercase, code)   ? lower_at(c, cased_before, out)
               : unicode_has(unicode_lowercase, code) ? unicode_to_upper(code, out)
                                                      : (out[0] = code, 1);
    }
}

int jinja_change_case(struct jinja_run *run, const struct jinja_value *s, enum jinja_case how,
                      struct jinja_value *out) {
    struct jinja_cursor c;
    struct jinja_text *text;
    bool starts_word = true, first = true, cased_before = false;
    int rc = jinja_text_open(run, s->size, &text);
    if (!rc) rc = jinja_charge_chars(run, s->size);
    jinja_cursor_open(&c, s);
    while (!rc && jinja_cursor_step(&c)) {
        uint32_t codes[3];
        int n = changed_codes(&c, how, starts_word, first, cased_before, codes);
        rc = add_codes(run, text, codes, n, c.marked);
        starts_word = !unicode_has(unicode_cased, c.code);
        note_cased(&cased_before, c.code);
        first = false;
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

static int case_filter(struct jinja_run *run, const char *name, const struct jinja_value *self,
                       const struct jinja_args *args, enum jinja_case how,
                       struct jinja_value *out) {
    struct jinja_value s;
    int rc = jinja_no_args(run, name, args);
    if (!rc) rc = jinja_to_str(run, self, &s);
    return rc ? rc : jinja_change_case(run, &s, how, out);
}

FILTER(upper) {
    return case_filter(run, "upper", self, args, JINJA_UPPER, out);
}

FILTER(lower) {
    return case_filter(run, "lower", self, args, JINJA_LOWER, out);
}

FILTER(capitalize) {
    return case_filter(run, "capitalize", self, args, JINJA_CAPITALIZE, out);
}

/* Jinja's own title: words begin after white space and some punctuation, not after any
 * uncased character as in str.title(). */
FILTER(title) {
    struct jinja_value s;
    struct jinja_cursor c;
    struct jinja_text *text;
    bool starts_word = true, cased_before = false;
    int rc = jinja_no_args(run, "title", args);
    if (!rc) rc = jinja_to_str(run, self, &s);
    if (!rc) rc = jinja_text_open(run, s.size, &text);
    if (!rc) rc = jinja_charge_chars(run, s.size);
    if (rc) return rc;
    jinja_cursor_open(&c, &s);
    while (!rc && jinja_cursor_step(&c)) {
        uint32_t codes[3];
        int n = starts_word ? unicode_to_upper(c.code, codes) : lower_at(&c, cased_before, codes);
        rc = add_codes(run, text, codes, n, c.marked);
        /* The first letter does not belong to what str.lower() is given. */
        if (starts_word)
            cased_before = false;
        else
            note_cased(&cased_before, c.code);
        starts_word =
            jinja_is_space(c.code) || (c.code && c.code < 0x80 && strchr("-({[<", (int)c.code));
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

/* Strings */

FILTER(string) {
    int rc = jinja_no_args(run, "string", args);
    return rc ? rc : jinja_to_str(run, self, out);
}

FILTER(safe) {
    int rc = jinja_no_args(run, "safe", args);
    if (!rc) rc = jinja_to_str(run, self, out);
    if (!rc) out->flags |= JINJA_SAFE;
    return rc;
}

FILTER(escape) {
    struct jinja_value s;
    int rc = jinja_no_args(run, "escape", args);
    if (!rc) rc = jinja_to_str(run, self, &s);
    if (rc || (s.flags & JINJA_SAFE)) {
        *out = s;
        return rc;
    }
    return jinja_escape(run, &s, out);
}

FILTER(forceescape) {
    struct jinja_value s;
    int rc = jinja_no_args(run, "forceescape", args);
    if (!rc) rc = jinja_to_str(run, self, &s);
    return rc ? rc : jinja_escape(run, &s, out);
}

FILTER(trim) {
    static const char *const names[] = {"chars"};
    struct jinja_value chars, s;
    int rc = jinja_bind(run, "trim", args, names, 1, 0, &chars);
    if (!rc) rc = jinja_to_str(run, self, &s);
    if (rc) return rc;
    bool spaces = !filters_is_given(&chars) || chars.kind == JINJA_NONE;
    if (!spaces && !jinja_is_str(&chars))
        return jinja_fail(run, ERR_INVALID, "strip arg must be None or str");
    return jinja_str_strip(run, &s, spaces ? NULL : &chars, true, true, out);
}

FILTER(replace) {
    static const char *const names[] = {"old", "new", "count"};
    struct jinja_value v[3], s;
    int64_t count;
    int rc = jinja_bind(run, "replace", args, names, 3, 2, v);
    if (!rc) rc = jinja_to_str(run, self, &s);
    if (!rc) rc = jinja_to_str(run, &v[0], &v[0]);
    if (!rc) rc = jinja_to_str(run, &v[1], &v[1]);
    if (!rc) rc = jinja_arg_int(run, &v[2], -1, &count);
    return rc ? rc : jinja_str_replace(run, &s, &v[0], &v[1], count, out);
}

int jinja_split_lines(struct jinja_run *run, const struct jinja_value *s, bool keep_ends,
                      struct jinja_value *out) {
    struct jinja_cursor c;
    struct jinja_value lines;
    int rc = jinja_list_open(run, JINJA_LIST, 0, &lines);
    if (!rc) rc = jinja_charge_chars(run, s->size);
    jinja_cursor_open(&c, s);
    uint32_t begin = c.next;
    bool more = !rc && jinja_cursor_step(&c);
    while (more && !rc) {
        if (!jinja_is_line_end(c.code)) {
            more = jinja_cursor_step(&c);
            continue;
        }
        uint32_t at = c.at;
        bool carriage = c.code == '\r';
        more = jinja_cursor_step(&c);
        if (more && carriage && c.code == '\n') more = jinja_cursor_step(&c);
        uint32_t next = more ? c.at : c.end;
        struct jinja_value line =
            jinja_str_view(s, begin - s->begin, (keep_ends ? next : at) - s->begin);
        rc = jinja_list_add(run, lines.list, &line);
        begin = next;
    }
    if (!rc && begin < c.end) {
        struct jinja_value line = jinja_str_view(s, begin - s->begin, s->size);
        rc = jinja_list_add(run, lines.list, &line);
    }
    if (!rc) *out = lines;
    return rc;
}

static int indent_width(struct jinja_run *run, const struct jinja_value *width,
                        struct jinja_value *out) {
    struct jinja_value space;
    int64_t count;
    if (jinja_is_str(width)) {
        *out = *width;
        return 0;
    }
    int rc = jinja_arg_int(run, width, 4, &count);
    if (!rc) rc = jinja_str_c(run, " ", &space);
    return rc ? rc : jinja_str_repeat(run, &space, count, out);
}

FILTER(indent) {
    static const char *const names[] = {"width", "first", "blank"};
    struct jinja_value v[3], newline, s, lines, indention;
    struct jinja_text *text;
    int rc = jinja_bind(run, "indent", args, names, 3, 0, v);
    if (!rc) rc = indent_width(run, &v[0], &indention);
    if (!rc) rc = jinja_str_c(run, "\n", &newline);
    if (!rc) rc = jinja_binary(run, JINJA_OP_ADD, self, &newline, &s); /* as Jinja: str or fails */
    if (!rc) rc = jinja_split_lines(run, &s, false, &lines);
    if (!rc) rc = jinja_text_open(run, s.size, &text);
    for (uint32_t i = 0; !rc && i < lines.list->count; i++) {
        const struct jinja_value *line = &lines.list->items[i];
        bool indents = i == 0 ? jinja_truth(&v[1]) : line->size || jinja_truth(&v[2]);
        if (i) rc = jinja_text_add_str(run, text, &newline);
        if (!rc && indents) rc = jinja_text_add_str(run, text, &indention);
        if (!rc) rc = jinja_text_add_str(run, text, line);
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

int jinja_center(struct jinja_run *run, const struct jinja_value *s, int64_t width, int where,
                 const struct jinja_value *fill, struct jinja_value *out) {
    struct jinja_text *text;
    int rc = jinja_charge_walk(run, s);
    int64_t missing = width - (int64_t)jinja_str_length(s);
    if (missing < 0) missing = 0;
    /* CPython's rounding: the odd one goes left when the width is odd too */
    int64_t left = where < 0 ? 0 : where > 0 ? missing : missing / 2 + (missing & width & 1);
    if (!rc) rc = jinja_text_open(run, s->size, &text);
    if (!rc) rc = jinja_text_pad(run, text, fill, left);
    if (!rc) rc = jinja_text_add_str(run, text, s);
    if (!rc) rc = jinja_text_pad(run, text, fill, missing - left);
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

/* Up to `keep` characters, back to the last space unless words may be cut, and the end mark. */
static int cut_text(struct jinja_run *run, const struct jinja_value *s, int64_t keep,
                    bool cut_words, const struct jinja_value *end, struct jinja_value *out) {
    struct jinja_value space, head = jinja_str_slice(s, 0, keep);
    int64_t at = -1;
    int rc = jinja_str_c(run, " ", &space);
    if (!rc && !cut_words) rc = jinja_str_rfind(run, &head, &space, 0, head.size, &at);
    if (at >= 0) head = jinja_str_view(&head, 0, (uint32_t)at);
    return rc ? rc : jinja_str_concat(run, &head, end, out);
}

FILTER(truncate) {
    static const char *const names[] = {"length", "killwords", "end", "leeway"};
    struct jinja_value v[4], end;
    int64_t length, leeway, size;
    int rc = jinja_bind(run, "truncate", args, names, 4, 0, v);
    if (!rc) rc = jinja_arg_int(run, &v[0], 255, &length);
    if (!rc) rc = jinja_arg_int(run, &v[3], 5, &leeway);
    if (!rc && !filters_is_given(&v[2]))
        rc = jinja_str_c(run, "...", &end);
    else
        end = v[2];
    if (!rc && !jinja_is_str(&end)) rc = jinja_fail(run, ERR_INVALID, "the end mark must be str");
    if (!rc && (length < 0 || length > UINT32_MAX || leeway < 0 || leeway > UINT32_MAX ||
                length < (int64_t)jinja_str_length(&end)))
        rc = jinja_fail(run, ERR_INVALID, "truncate: the length is out of range");
    if (!rc) rc = jinja_length(run, self, &size);
    if (rc) return rc;
    if (size <= length + leeway) {
        *out = *self;
        return 0;
    }
    if (!jinja_is_str(self)) return jinja_fail(run, ERR_INVALID, "truncate wants a string");
    return cut_text(run, self, length - (int64_t)jinja_str_length(&end), jinja_truth(&v[1]), &end,
                    out);
}

FILTER(format) {
    struct jinja_value s, values;
    int rc = jinja_to_str(run, self, &s);
    if (!rc && args->count && args->keyword_count)
        rc = jinja_fail(run, ERR_INVALID,
                        "can't handle positional and keyword arguments at the same time");
    if (!rc && args->keyword_count)
        rc = jinja_dict_open(run, JINJA_DICT, &values);
    else if (!rc)
        rc = jinja_list_open(run, JINJA_TUPLE, args->count, &values);
    for (uint32_t i = 0; i < args->keyword_count && !rc; i++)
        rc = jinja_dict_set(run, values.dict, &args->keywords[i].name, &args->keywords[i].value);
    for (uint32_t i = 0; i < args->count && !rc; i++)
        rc = jinja_list_add(run, values.list, &args->items[i]);
    return rc ? rc : jinja_format_percent(run, &s, &values, out);
}

FILTER(urlencode) {
    struct jinja_value s;
    struct jinja_text *text;
    struct jinja_cursor c;
    int rc = jinja_no_args(run, "urlencode", args);
    if (!rc && (self->kind == JINJA_DICT || jinja_is_listlike(self)))
        rc = jinja_fail(run, ERR_UNSUPPORTED, "urlencode of a %s", jinja_type_name(self));
    if (!rc) rc = jinja_to_str(run, self, &s);
    if (!rc) rc = jinja_text_open(run, s.size, &text);
    if (!rc) rc = jinja_charge_chars(run, s.size);
    if (rc) return rc;
    jinja_cursor_open(&c, &s);
    while (!rc && jinja_cursor_step(&c)) {
        bool plain =
            c.code < 0x80 && c.code &&
            (unicode_is_letter(c.code) || jinja_is_decimal(c.code) || strchr("_.-~/", (int)c.code));
        for (uint32_t i = 0; i < c.length && !rc; i++) {
            char bytes[4];
            unsigned char byte = (unsigned char)s.text->data[c.at + i];
            snprintf(bytes, sizeof bytes, plain ? "%c" : "%%%02X", byte);
            rc = jinja_text_add(run, text, bytes, strlen(bytes), c.marked);
        }
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

/* Numbers */

/* Python's int(str, base): white space, sign, prefix, digits with single underscores. */
static bool parse_int(struct jinja_run *run, const struct jinja_value *s, int64_t base,
                      struct jinja_value *out, int *rc) {
    struct jinja_value view;
    char digits[128];
    *rc = jinja_str_strip(run, s, NULL, true, true, &view);
    if (*rc || view.size == 0 || view.size >= sizeof digits) return false;
    const char *p = jinja_str_data(&view), *end = p + view.size;
    size_t n = 0;
    bool minus = *p == '-';
    if (*p == '-' || *p == '+') p++;
    if (end - p > 2 && p[0] == '0') {
        int prefix = (p[1] | 32) == 'x' ? 16 : (p[1] | 32) == 'o' ? 8 : (p[1] | 32) == 'b' ? 2 : 0;
        if (prefix && (base == prefix || base == 0)) {
            base = prefix;
            p += 2 + (p[2] == '_');
        }
    }
    if (base == 0) base = 10;
    if (minus) digits[n++] = '-';
    size_t first = n;
    for (bool after_digit = false; p < end; p++) {
        bool underscore = *p == '_';
        if (underscore && (!after_digit || p + 1 == end)) return false;
        after_digit = !underscore;
        if (underscore) continue;
        int value = *p >= '0' && *p <= '9'                 ? *p - '0'
                    : (*p | 32) >= 'a' && (*p | 32) <= 'z' ? (*p | 32) - 'a' + 10
                                                           : 99;
        if (value >= base) return false;
        digits[n++] = *p;
    }
    if (n == first) return false;
    digits[n] = 0;
    if (base == 10) {
        size_t zeros = strspn(digits + first, "0");
        if (zeros == n - first) zeros--;
        memmove(digits + first, digits + first + zeros, n - first - zeros);
        *rc = jinja_int_from_digits(run, digits, n - zeros, out);
        return true;
    }
    errno = 0;
    *out = jinja_int(strtoll(digits, NULL, (int)base));
    if (errno) *rc = jinja_fail(run, ERR_LIMIT, "the integer is beyond 64 bits");
    return true;
}

/* Python's float(str). */
static bool parse_float(struct jinja_run *run, const struct jinja_value *s, double *out, int *rc) {
    struct jinja_value view;
    char digits[512];
    size_t n = 0;
    *rc = jinja_str_strip(run, s, NULL, true, true, &view);
    if (*rc || view.size == 0 || view.size >= sizeof digits) return false;
    const char *p = jinja_str_data(&view);
    for (uint32_t i = 0; i < view.size; i++) {
        bool digit_before = i && p[i - 1] >= '0' && p[i - 1] <= '9';
        bool digit_after = i + 1 < view.size && p[i + 1] >= '0' && p[i + 1] <= '9';
        if (p[i] == '_' && digit_before && digit_after) continue;
        if (!p[i] || p[i] == '_' || (p[i] | 32) == 'x' || p[i] == '(') return false; /* C's only */
        digits[n++] = p[i];
    }
    digits[n] = 0;
    char *stop;
    *out = strtod(digits, &stop);
    return !*stop;
}

static int real_to_int(struct jinja_run *run, double f, struct jinja_value *out) {
    char digits[400];
    if (!isfinite(f))
        return jinja_fail(run, ERR_INVALID, "cannot convert float infinity to integer");
    snprintf(digits, sizeof digits, "%.0f", trunc(f));
    if (strcmp(digits, "-0") == 0) strcpy(digits, "0");
    return jinja_int_from_digits(run, digits, strlen(digits), out);
}

FILTER(int) {
    static const char *const names[] = {"default", "base"};
    struct jinja_value v[2];
    int64_t base;
    double f;
    int rc = jinja_bind(run, "int", args, names, 2, 0, v);
    if (!rc) rc = jinja_arg_int(run, &v[1], 10, &base);
    if (rc) return rc;
    if (base != 0 && (base < 2 || base > 36)) base = 10;
    struct jinja_value absent = filters_is_given(&v[0]) ? v[0] : jinja_int(0);
    switch (self->kind) {
    case JINJA_BOOL:
    case JINJA_INT:
        *out = jinja_int(jinja_int_of(self));
        return 0;
    case JINJA_BIG:
        *out = *self;
        return 0;
    case JINJA_FLOAT:
        if (isnan(self->real)) *out = absent;
        return isnan(self->real) ? 0 : real_to_int(run, self->real, out);
    case JINJA_UNDEFINED:
        return jinja_fail_undefined(run, self);
    case JINJA_STR:
        if (parse_int(run, self, base, out, &rc) || rc) return rc;
        if (parse_float(run, self, &f, &rc) && isfinite(f)) return real_to_int(run, f, out);
        break;
    default:
        break;
    }
    *out = absent;
    return rc;
}

FILTER(float) {
    static const char *const names[] = {"default"};
    struct jinja_value v[1];
    double f = 0;
    int rc = jinja_bind(run, "float", args, names, 1, 0, v);
    if (rc) return rc;
    if (self->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, self);
    if (jinja_is_number(self))
        *out = jinja_float(jinja_real_of(self));
    else if (jinja_is_str(self) && parse_float(run, self, &f, &rc))
        *out = jinja_float(f);
    else
        *out = filters_is_given(&v[0]) ? v[0] : jinja_float(0);
    return rc;
}

FILTER(abs) {
    int rc = jinja_no_args(run, "abs", args);
    if (rc) return rc;
    if (!jinja_is_number(self))
        return jinja_fail(run, ERR_INVALID, "bad operand type for abs(): '%s'",
                          jinja_type_name(self));
    struct jinja_value zero = jinja_int(0);
    int order;
    rc = jinja_order(run, "<", self, &zero, &order);
    if (rc) return rc;
    if (self->kind == JINJA_FLOAT)
        *out = jinja_float(fabs(self->real));
    else
        rc = jinja_negate(run, self, order < 0, out);
    return rc;
}

/* Decimal rounding of the exact binary value, half to even: what printf does. */
static double round_real(double f, int64_t precision) {
    char digits[800];
    if (!isfinite(f) || precision > 330) return f;
    if (precision < -330) return 0;
    if (precision >= 0) {
        snprintf(digits, sizeof digits, "%.*f", (int)precision, f);
        return strtod(digits, NULL);
    }
    double scale = pow(10, (double)-precision);
    return rint(f / scale) * scale;
}

FILTER(round) {
    static const char *const names[] = {"precision", "method"};
    struct jinja_value v[2];
    int64_t precision;
    int rc = jinja_bind(run, "round", args, names, 2, 0, v);
    if (!rc) rc = jinja_arg_int(run, &v[0], 0, &precision);
    if (rc) return rc;
    bool common = !filters_is_given(&v[1]) || jinja_str_is(&v[1], "common");
    bool ceils = jinja_str_is(&v[1], "ceil");
    if (!common && !ceils && !jinja_str_is(&v[1], "floor"))
        return jinja_fail(run, ERR_INVALID, "method must be common, ceil or floor");
    if (self->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, self);
    if (!jinja_is_number(self))
        return jinja_fail(run, ERR_INVALID, "type %s doesn't define __round__ method",
                          jinja_type_name(self));
    if (common && self->kind != JINJA_FLOAT && precision >= 0) {
        *out = self->kind == JINJA_BIG ? *self : jinja_int(jinja_int_of(self));
        return 0;
    }
    double f = jinja_real_of(self), scale = pow(10, (double)precision);
    if (common)
        f = round_real(f, precision);
    else
        f = (ceils ? ceil(f * scale) : floor(f * scale)) / scale;
    if (common && jinja_is_int(self))
        *out = jinja_int((int64_t)f);
    else
        *out = jinja_float(f);
    return 0;
}

/* JSON */

static int json_indent(struct jinja_run *run, const struct jinja_value *v,
                       struct jinja_json *json) {
    struct jinja_value space;
    int64_t count;
    if (!filters_is_given(v) || v->kind == JINJA_NONE) return 0;
    json->indents = true;
    if (jinja_is_str(v)) {
        json->indent = *v;
        return 0;
    }
    int rc = jinja_arg_int(run, v, 0, &count);
    if (!rc) rc = jinja_str_c(run, " ", &space);
    return rc ? rc : jinja_str_repeat(run, &space, count, &json->indent);
}

static int json_separators(struct jinja_run *run, const struct jinja_value *v,
                           struct jinja_json *json) {
    if (!filters_is_given(v) || v->kind == JINJA_NONE) {
        int rc = jinja_str_c(run, json->indents ? "," : ", ", &json->item_separator);
        return rc ? rc : jinja_str_c(run, ": ", &json->key_separator);
    }
    if (!jinja_is_listlike(v) || v->list->count != 2 || !jinja_is_str(&v->list->items[0]) ||
        !jinja_is_str(&v->list->items[1]))
        return jinja_fail(run, ERR_INVALID, "separators must be a pair of strings");
    json->item_separator = v->list->items[0];
    json->key_separator = v->list->items[1];
    return 0;
}

FILTER(tojson) {
    static const char *const names[] = {"ensure_ascii", "indent", "separators", "sort_keys"};
    struct jinja_value v[4];
    struct jinja_text *text;
    struct jinja_json json = {.indent = jinja_str_empty()};
    int rc = jinja_bind(run, "tojson", args, names, 4, 0, v);
    json.ensure_ascii = !rc && jinja_truth(&v[0]);
    json.sort_keys = !rc && jinja_truth(&v[3]);
    if (!rc) rc = json_indent(run, &v[1], &json);
    if (!rc) rc = json_separators(run, &v[2], &json);
    if (!rc) rc = jinja_text_open(run, 0, &text);
    if (!rc) rc = jinja_print_json(run, text, self, &json);
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

FILTER(from_json) {
    struct jinja_value s;
    int rc = jinja_no_args(run, "from_json", args);
    if (!rc && !jinja_is_str(self))
        rc = jinja_fail(run, ERR_INVALID, "the JSON object must be str, not %s",
                        jinja_type_name(self));
    if (rc) return rc;
    s = *self;
    return jinja_json_parse(run, &s, out);
}

const struct jinja_builtin jinja_text_filters[] = {
    {"abs", filter_abs},
    {"capitalize", filter_capitalize},
    {"e", filter_escape},
    {"escape", filter_escape},
    {"float", filter_float},
    {"forceescape", filter_forceescape},
    {"format", filter_format},
    {"from_json", filter_from_json},
    {"indent", filter_indent},
    {"int", filter_int},
    {"lower", filter_lower},
    {"replace", filter_replace},
    {"round", filter_round},
    {"safe", filter_safe},
    {"string", filter_string},
    {"title", filter_title},
    {"tojson", filter_tojson},
    {"trim", filter_trim},
    {"truncate", filter_truncate},
    {"upper", filter_upper},
    {"urlencode", filter_urlencode},
};
const size_t jinja_text_filter_count = sizeof jinja_text_filters / sizeof *jinja_text_filters;
