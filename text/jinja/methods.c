/* Methods of str, with Python's results: characters are code points, and white space and case are
 * Unicode's. A result keeps the marks of the bytes it was made of (text.h). */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/format.h"
#include "text/jinja/ops.h"
#include "text/jinja/unicode.h"
#include "text/unicode/unicode.h"

#define METHOD(name)                                                                               \
    static int str_##name(struct jinja_run *run, const struct jinja_value *self,                   \
                          const struct jinja_args *args, struct jinja_value *out)

static bool is_absent(const struct jinja_value *v) {
    return v->kind == JINJA_MISSING || v->kind == JINJA_NONE;
}

static int want_str(struct jinja_run *run, const char *callee, const struct jinja_value *v) {
    if (jinja_is_str(v)) return 0;
    if (v->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, v);
    return jinja_fail(run, ERR_INVALID, "%s() argument must be str, not %s", callee,
                      jinja_type_name(v));
}

/* Case */

#define CASE_METHOD(name, how)                                                                     \
    METHOD(name) {                                                                                 \
        int rc = jinja_no_args(run, #name, args);                                                  \
        return rc ? rc : jinja_change_case(run, self, how, out);                                   \
    }

CASE_METHOD(upper, JINJA_UPPER)
CASE_METHOD(lower, JINJA_LOWER)
CASE_METHOD(casefold, JINJA_CASEFOLD)
CASE_METHOD(capitalize, JINJA_CAPITALIZE)
CASE_METHOD(title, JINJA_TITLE)
CASE_METHOD(swapcase, JINJA_SWAPCASE)

/* Strip */

static int methods_strip(struct jinja_run *run, const char *name, const struct jinja_value *self,
                         const struct jinja_args *args, bool left, bool right,
                         struct jinja_value *out) {
    static const char *const names[] = {"chars"};
    struct jinja_value chars;
    int rc = jinja_bind(run, name, args, names, 1, 0, &chars);
    if (!rc && !is_absent(&chars) && !jinja_is_str(&chars))
        rc = jinja_fail(run, ERR_INVALID, "%s arg must be None or str", name);
    if (rc) return rc;
    return jinja_str_strip(run, self, is_absent(&chars) ? NULL : &chars, left, right, out);
}

METHOD(strip) {
    return methods_strip(run, "strip", self, args, true, true, out);
}

METHOD(lstrip) {
    return methods_strip(run, "lstrip", self, args, true, false, out);
}

METHOD(rstrip) {
    return methods_strip(run, "rstrip", self, args, false, true, out);
}

static bool methods_begins_with(const struct jinja_value *s, const struct jinja_value *part) {
    return part->size <= s->size &&
           (!part->size || memcmp(jinja_str_data(s), jinja_str_data(part), part->size) == 0);
}

static bool methods_ends_with(const struct jinja_value *s, const struct jinja_value *part) {
    return part->size <= s->size && (!part->size || memcmp(jinja_str_data(s) + s->size - part->size,
                                                           jinja_str_data(part), part->size) == 0);
}

METHOD(removeprefix) {
    static const char *const names[] = {"prefix"};
    struct jinja_value prefix;
    int rc = jinja_bind(run, "removeprefix", args, names, 1, 1, &prefix);
    if (!rc) rc = want_str(run, "removeprefix", &prefix);
    if (rc) return rc;
    *out = jinja_str_view(self, methods_begins_with(self, &prefix) ? prefix.size : 0, self->size);
    return jinja_charge_bytes(run, prefix.size);
}

METHOD(removesuffix) {
    static const char *const names[] = {"suffix"};
    struct jinja_value suffix;
    int rc = jinja_bind(run, "removesuffix", args, names, 1, 1, &suffix);
    if (!rc) rc = want_str(run, "removesuffix", &suffix);
    if (rc) return rc;
    *out =
        jinja_str_view(self, 0, self->size - (methods_ends_with(self, &suffix) ? suffix.size : 0));
    return jinja_charge_bytes(run, suffix.size);
}

/* Search: what follows the needle are start and end, in code points. */

static int window(struct jinja_run *run, const char *name, const struct jinja_value *self,
                  const struct jinja_args *args, struct jinja_value *needle, uint32_t *from,
                  uint32_t *to) {
    static const char *const names[] = {"sub", "start", "end"};
    struct jinja_value v[3];
    int64_t first, last, length = 0;
    int rc = jinja_bind(run, name, args, names, 3, 1, v);
    if (!rc) rc = jinja_length(run, self, &length);
    if (!rc) rc = jinja_arg_int(run, &v[1], 0, &first);
    if (!rc) rc = jinja_arg_int(run, &v[2], length, &last);
    if (!rc) rc = jinja_charge_bytes(run, self->size + 64ul);
    if (rc) return rc;
    if (first < 0) first = first < -length ? 0 : first + length;
    if (last < 0) last = last < -length ? 0 : last + length;
    *needle = v[0];
    *to = jinja_str_offset(self, (size_t)(last > length ? length : last));
    *from = first > length ? self->size + 1 : jinja_str_offset(self, (size_t)first);
    return 0;
}

static int affix(struct jinja_run *run, const char *name, const struct jinja_value *self,
                 const struct jinja_args *args, bool at_end, struct jinja_value *out) {
    struct jinja_value part;
    uint32_t from, to;
    bool found = false;
    int rc = window(run, name, self, args, &part, &from, &to);
    if (rc) return rc;
    bool several = part.kind == JINJA_TUPLE;
    for (uint32_t i = 0; i < (several ? part.list->count : 1) && !found && !rc; i++) {
        const struct jinja_value *one = several ? &part.list->items[i] : &part;
        if (!jinja_is_str(one))
            return jinja_fail(run, ERR_INVALID,
                              "%s first arg must be str or a tuple of str, not %s", name,
                              jinja_type_name(one));
        struct jinja_value seen = jinja_str_view(self, from > to ? 0 : from, from > to ? 0 : to);
        found = from <= to &&
                (at_end ? methods_ends_with(&seen, one) : methods_begins_with(&seen, one));
        rc = jinja_charge_bytes(run, one->size + 64ul);
    }
    *out = jinja_bool(found);
    return rc;
}

METHOD(startswith) {
    return affix(run, "startswith", self, args, false, out);
}

METHOD(endswith) {
    return affix(run, "endswith", self, args, true, out);
}

static int methods_search(struct jinja_run *run, const char *name, const struct jinja_value *self,
                          const struct jinja_args *args, bool last, bool raises,
                          struct jinja_value *out) {
    struct jinja_value needle;
    uint32_t from, to;
    int64_t at = -1;
    int rc = window(run, name, self, args, &needle, &from, &to);
    if (!rc) rc = want_str(run, name, &needle);
    if (!rc && last)
        rc = jinja_str_rfind(run, self, &needle, from, to, &at);
    else if (!rc)
        at = jinja_str_find(self, &needle, from, to);
    if (rc) return rc;
    if (at < 0 && raises) return jinja_fail(run, ERR_INVALID, "substring not found");
    struct jinja_value before = jinja_str_view(self, 0, at < 0 ? 0 : (uint32_t)at);
    *out = jinja_int(at < 0 ? -1 : (int64_t)jinja_str_length(&before));
    return 0;
}

METHOD(find) {
    return methods_search(run, "find", self, args, false, false, out);
}

METHOD(rfind) {
    return methods_search(run, "rfind", self, args, true, false, out);
}

METHOD(index) {
    return methods_search(run, "index", self, args, false, true, out);
}

METHOD(rindex) {
    return methods_search(run, "rindex", self, args, true, true, out);
}

METHOD(count) {
    struct jinja_value needle;
    uint32_t from, to;
    int64_t found = 0, at;
    int rc = window(run, "count", self, args, &needle, &from, &to);
    if (!rc) rc = want_str(run, "count", &needle);
    if (rc) return rc;
    if (!needle.size) {
        struct jinja_value seen = jinja_str_view(self, from > to ? 0 : from, from > to ? 0 : to);
        *out = jinja_int(from > to ? 0 : (int64_t)jinja_str_length(&seen) + 1);
        return 0;
    }
    while ((at = jinja_str_find(self, &needle, from, to)) >= 0) {
        found++;
        from = (uint32_t)at + needle.size;
    }
    *out = jinja_int(found);
    return 0;
}

METHOD(replace) {
    static const char *const names[] = {"old", "new", "count"};
    struct jinja_value v[3];
    int64_t count;
    int rc = jinja_bind(run, "replace", args, names, 3, 2, v);
    if (!rc) rc = want_str(run, "replace", &v[0]);
    if (!rc) rc = want_str(run, "replace", &v[1]);
    if (!rc) rc = jinja_arg_int(run, &v[2], -1, &count);
    return rc ? rc : jinja_str_replace(run, self, &v[0], &v[1], count, out);
}

/* Split and join */

static int add_view(struct jinja_run *run, struct jinja_list *list, const struct jinja_value *s,
                    uint32_t begin, uint32_t end) {
    struct jinja_value part = jinja_str_view(s, begin, end);
    return jinja_list_add(run, list, &part);
}

static void reverse_items(struct jinja_list *list) {
    for (uint32_t i = 0; i < list->count / 2; i++) {
        struct jinja_value swap = list->items[i];
        list->items[i] = list->items[list->count - 1 - i];
        list->items[list->count - 1 - i] = swap;
    }
}

/* Words between white space; the last (or first) one keeps what is beyond `limit` cuts. */
static int split_words(struct jinja_run *run, const struct jinja_value *s, int64_t limit,
                       struct jinja_list *list) {
    struct jinja_cursor c;
    jinja_cursor_open(&c, s);
    bool inside = false;
    uint32_t begin = 0;
    int rc = jinja_charge_chars(run, s->size);
    while (!rc && jinja_cursor_step(&c)) {
        uint32_t at = c.at - s->begin;
        bool space = jinja_is_space(c.code);
        if (!inside && !space) {
            begin = at;
            inside = true;
            if (limit == 0) return add_view(run, list, s, begin, s->size);
        } else if (inside && space) {
            rc = add_view(run, list, s, begin, at);
            inside = false;
            limit--;
        }
    }
    if (!rc && inside) rc = add_view(run, list, s, begin, s->size);
    return rc;
}

static int split_words_from_right(struct jinja_run *run, const struct jinja_value *s, int64_t limit,
                                  struct jinja_list *list) {
    struct jinja_value words;
    int rc = jinja_list_open(run, JINJA_LIST, 0, &words);
    if (!rc) rc = split_words(run, s, -1, words.list);
    if (rc) return rc;
    uint32_t count = words.list->count, kept = 0;
    if (limit >= 0 && limit < count) kept = count - (uint32_t)limit;
    if (kept) {
        const struct jinja_value *last = &words.list->items[kept - 1];
        rc = add_view(run, list, s, 0, last->begin + last->size - s->begin);
    }
    for (uint32_t i = kept; i < count && !rc; i++)
        rc = jinja_list_add(run, list, &words.list->items[i]);
    return rc;
}

static int split_by(struct jinja_run *run, const struct jinja_value *s,
                    const struct jinja_value *separator, int64_t limit, struct jinja_list *list) {
    uint32_t from = 0;
    int64_t at;
    int rc = 0;
    while (!rc && limit-- != 0 && (at = jinja_str_find(s, separator, from, s->size)) >= 0) {
        rc = add_view(run, list, s, from, (uint32_t)at);
        from = (uint32_t)at + separator->size;
    }
    return rc ? rc : add_view(run, list, s, from, s->size);
}

static int split_by_from_right(struct jinja_run *run, const struct jinja_value *s,
                               const struct jinja_value *separator, int64_t limit,
                               struct jinja_list *list) {
    uint32_t to = s->size;
    int rc = 0;
    while (!rc && limit-- != 0) {
        int64_t at;
        rc = jinja_str_rfind(run, s, separator, 0, to, &at);
        if (rc || at < 0) break;
        rc = add_view(run, list, s, (uint32_t)at + separator->size, to);
        to = (uint32_t)at;
    }
    if (!rc) rc = add_view(run, list, s, 0, to);
    reverse_items(list);
    return rc;
}

static int methods_split(struct jinja_run *run, const char *name, const struct jinja_value *self,
                         const struct jinja_args *args, bool right, struct jinja_value *out) {
    static const char *const names[] = {"sep", "maxsplit"};
    struct jinja_value v[2], list;
    int64_t limit;
    int rc = jinja_bind(run, name, args, names, 2, 0, v);
    bool words = !rc && is_absent(&v[0]);
    if (!rc && !words) rc = want_str(run, name, &v[0]);
    if (!rc && !words && !v[0].size) rc = jinja_fail(run, ERR_INVALID, "empty separator");
    if (!rc) rc = jinja_arg_int(run, &v[1], -1, &limit);
    if (!rc) rc = jinja_charge_bytes(run, self->size);
    if (!rc) rc = jinja_list_open(run, JINJA_LIST, 0, &list);
    if (rc) return rc;
    if (limit < 0) limit = -1;
    if (words)
        rc = right ? split_words_from_right(run, self, limit, list.list)
                   : split_words(run, self, limit, list.list);
    else if (right && limit >= 0)
        rc = split_by_from_right(run, self, &v[0], limit, list.list);
    else
        rc = split_by(run, self, &v[0], limit, list.list);
    if (!rc) *out = list;
    return rc;
}

METHOD(split) {
    return methods_split(run, "split", self, args, false, out);
}

METHOD(rsplit) {
    return methods_split(run, "rsplit", self, args, true, out);
}

METHOD(splitlines) {
    static const char *const names[] = {"keepends"};
    struct jinja_value keep;
    int rc = jinja_bind(run, "splitlines", args, names, 1, 0, &keep);
    return rc ? rc : jinja_split_lines(run, self, jinja_truth(&keep), out);
}

static int partition(struct jinja_run *run, const char *name, const struct jinja_value *self,
                     const struct jinja_args *args, bool right, struct jinja_value *out) {
    static const char *const names[] = {"sep"};
    struct jinja_value separator, parts;
    int64_t at = -1;
    int rc = jinja_bind(run, name, args, names, 1, 1, &separator);
    if (!rc) rc = want_str(run, name, &separator);
    if (!rc && !separator.size) rc = jinja_fail(run, ERR_INVALID, "empty separator");
    if (!rc) rc = jinja_charge_bytes(run, self->size);
    if (!rc && right)
        rc = jinja_str_rfind(run, self, &separator, 0, self->size, &at);
    else if (!rc)
        at = jinja_str_find(self, &separator, 0, self->size);
    if (!rc) rc = jinja_list_open(run, JINJA_TUPLE, 3, &parts);
    if (rc) return rc;
    uint32_t first = at >= 0 ? (uint32_t)at : right ? 0 : self->size;
    uint32_t second = at >= 0 ? first + separator.size : first;
    rc = add_view(run, parts.list, self, 0, first);
    if (!rc) rc = add_view(run, parts.list, self, first, second);
    if (!rc) rc = add_view(run, parts.list, self, second, self->size);
    if (!rc) *out = parts;
    return rc;
}

METHOD(partition) {
    return partition(run, "partition", self, args, false, out);
}

METHOD(rpartition) {
    return partition(run, "rpartition", self, args, true, out);
}

METHOD(join) {
    static const char *const names[] = {"iterable"};
    struct jinja_value iterable;
    struct jinja_list *list;
    int rc = jinja_bind(run, "join", args, names, 1, 1, &iterable);
    if (!rc) rc = jinja_iterate(run, &iterable, &list);
    return rc ? rc : jinja_join(run, self, list, true, out);
}

METHOD(format) {
    return jinja_format_braces(run, self, args, out);
}

/* Padding */

static int justify(struct jinja_run *run, const char *name, const struct jinja_value *self,
                   const struct jinja_args *args, int where, struct jinja_value *out) {
    static const char *const names[] = {"width", "fillchar"};
    struct jinja_value v[2];
    int64_t width;
    int rc = jinja_bind(run, name, args, names, 2, 1, v);
    if (!rc) rc = jinja_arg_int(run, &v[0], 0, &width);
    if (!rc && v[1].kind == JINJA_MISSING) rc = jinja_str_c(run, " ", &v[1]);
    if (!rc) rc = want_str(run, name, &v[1]);
    if (!rc && (!v[1].size || jinja_str_offset(&v[1], 1) != v[1].size))
        rc = jinja_fail(run, ERR_INVALID, "The fill character must be exactly one character long");
    return rc ? rc : jinja_center(run, self, width, where, &v[1], out);
}

METHOD(ljust) {
    return justify(run, "ljust", self, args, -1, out);
}

METHOD(rjust) {
    return justify(run, "rjust", self, args, 1, out);
}

METHOD(center) {
    return justify(run, "center", self, args, 0, out);
}

METHOD(zfill) {
    static const char *const names[] = {"width"};
    struct jinja_value v[1], zero, padded;
    int64_t width;
    int rc = jinja_bind(run, "zfill", args, names, 1, 1, v);
    if (!rc) rc = jinja_arg_int(run, &v[0], 0, &width);
    if (!rc) rc = jinja_str_c(run, "0", &zero);
    if (rc) return rc;
    bool sign = self->size && strchr("+-", jinja_str_data(self)[0]) && jinja_str_data(self)[0];
    if (!sign || width < 1) return jinja_center(run, self, width, 1, &zero, out);
    struct jinja_value digits = jinja_str_view(self, 1, self->size);
    struct jinja_value mark = jinja_str_view(self, 0, 1);
    rc = jinja_center(run, &digits, width - 1, 1, &zero, &padded);
    return rc ? rc : jinja_str_concat(run, &mark, &padded, out);
}

/* Classes of characters */

enum class {
    CLASS_ALPHA,
    CLASS_ALNUM,
    CLASS_DIGIT,
    CLASS_DECIMAL,
    CLASS_SPACE,
    CLASS_ASCII,
    CLASS_PRINTABLE
};

static bool has_class(uint32_t code, enum class class) {
    switch (class) {
    case CLASS_ALPHA:
        return unicode_is_letter(code);
    case CLASS_ALNUM:
        return code != '_' && jinja_is_word(code);
    case CLASS_DIGIT:
        return unicode_is_digit(code);
    case CLASS_DECIMAL:
        return jinja_is_decimal(code);
    case CLASS_SPACE:
        return jinja_is_space(code);
    case CLASS_ASCII:
        return code < 0x80;
    default:
        return jinja_is_printable(code);
    }
}

static int classify(struct jinja_run *run, const char *name, const struct jinja_value *self,
                    const struct jinja_args *args, enum class class, struct jinja_value *out) {
    struct jinja_cursor c;
    bool all = self->size || class == CLASS_ASCII || class == CLASS_PRINTABLE;
    int rc = jinja_no_args(run, name, args);
    if (!rc) rc = jinja_charge_chars(run, self->size);
    if (rc) return rc;
    jinja_cursor_open(&c, self);
    while (all && jinja_cursor_step(&c)) all = has_class(c.code, class);
    *out = jinja_bool(all);
    return 0;
}

#define CLASS_METHOD(name, class)                                                                  \
    METHOD(name) {                                                                                 \
        return classify(run, #name, self, args, class, out);                                       \
    }

CLASS_METHOD(isalpha, CLASS_ALPHA)
CLASS_METHOD(isalnum, CLASS_ALNUM)
CLASS_METHOD(isdigit, CLASS_DIGIT)
CLASS_METHOD(isnumeric, CLASS_DIGIT)
CLASS_METHOD(isdecimal, CLASS_DECIMAL)
CLASS_METHOD(isspace, CLASS_SPACE)
CLASS_METHOD(isascii, CLASS_ASCII)
CLASS_METHOD(isprintable, CLASS_PRINTABLE)

static int case_test(struct jinja_run *run, const char *test, const struct jinja_value *self,
                     const struct jinja_args *args, struct jinja_value *out) {
    struct jinja_value name;
    int rc = jinja_str_c(run, test, &name);
    return rc ? rc : jinja_find_test(&name)->call(run, self, args, out);
}

METHOD(islower) {
    return case_test(run, "lower", self, args, out);
}

METHOD(isupper) {
    return case_test(run, "upper", self, args, out);
}

/* Returns whether every word begins with an upper or title case letter and has no other such
 * letter. */
METHOD(istitle) {
    struct jinja_cursor c;
    bool seen = false, inside = false, holds = true;
    int rc = jinja_no_args(run, "istitle", args);
    if (!rc) rc = jinja_charge_chars(run, self->size);
    if (rc) return rc;
    jinja_cursor_open(&c, self);
    while (holds && jinja_cursor_step(&c)) {
        bool capital =
            unicode_has(unicode_uppercase, c.code) || unicode_category(c.code) == UNICODE_LT;
        bool small = !capital && unicode_has(unicode_lowercase, c.code);
        holds = !(capital && inside) && !(small && !inside);
        inside = capital || small;
        seen |= inside;
    }
    *out = jinja_bool(holds && seen);
    return 0;
}

const struct jinja_builtin jinja_str_methods[] = {
    {"capitalize", str_capitalize},
    {"casefold", str_casefold},
    {"center", str_center},
    {"count", str_count},
    {"endswith", str_endswith},
    {"find", str_find},
    {"format", str_format},
    {"index", str_index},
    {"isalnum", str_isalnum},
    {"isalpha", str_isalpha},
    {"isascii", str_isascii},
    {"isdecimal", str_isdecimal},
    {"isdigit", str_isdigit},
    {"islower", str_islower},
    {"isnumeric", str_isnumeric},
    {"isprintable", str_isprintable},
    {"isspace", str_isspace},
    {"istitle", str_istitle},
    {"isupper", str_isupper},
    {"join", str_join},
    {"ljust", str_ljust},
    {"lower", str_lower},
    {"lstrip", str_lstrip},
    {"partition", str_partition},
    {"removeprefix", str_removeprefix},
    {"removesuffix", str_removesuffix},
    {"replace", str_replace},
    {"rfind", str_rfind},
    {"rindex", str_rindex},
    {"rjust", str_rjust},
    {"rpartition", str_rpartition},
    {"rsplit", str_rsplit},
    {"rstrip", str_rstrip},
    {"split", str_split},
    {"splitlines", str_splitlines},
    {"startswith", str_startswith},
    {"strip", str_strip},
    {"swapcase", str_swapcase},
    {"title", str_title},
    {"upper", str_upper},
    {"zfill", str_zfill},
};
const size_t jinja_str_method_count = sizeof jinja_str_methods / sizeof *jinja_str_methods;
