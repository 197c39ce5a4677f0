/* Python's two ways to format: "%s" % x with |format, and str.format; also strftime.
 *
 * Both parse a specification (fill, alignment, sign, width, precision, type) into one struct and
 * share the code that writes a value by it. Widths are bounded, since the template or the request
 * gives them. */
#include "text/jinja/format.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "base/utf8.h"
#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/jinja/print.h"
#include "text/unicode/unicode.h"

#define WIDTH_MAX     100000
#define PRECISION_MAX 400
#define NUMBER_BYTES  1024 /* a double's 309 digits and PRECISION_MAX more, grouped */

/* One field, whichever syntax it came from. */
struct spec {
    struct jinja_value fill; /* one character */
    char align;              /* '<' '>' '^' '=' or 0 */
    char sign;               /* '+' ' ' or 0 */
    bool alternate, zero;
    char group; /* ',' '_' or 0 */
    int width;
    int precision; /* -1: none */
    char type;     /* 0: none */
};

static struct spec no_spec(struct jinja_run *run, int *rc) {
    struct spec spec = {.precision = -1};
    *rc = jinja_str_c(run, " ", &spec.fill);
    return spec;
}

static int check_number(struct jinja_run *run, int64_t value, int64_t max, int *out) {
    if (value < 0 || value > max)
        return jinja_fail(run, ERR_LIMIT, "a format is wider than %" PRId64, max);
    *out = (int)value;
    return 0;
}

/* Digits at s[*at]; false when there are none. Too many saturate, check_number refuses them. */
static bool format_read_number(const char *s, size_t size, size_t *at, int64_t *out) {
    size_t begin = *at;
    *out = 0;
    for (; *at < size && s[*at] >= '0' && s[*at] <= '9'; (*at)++)
        if (*out < 1000000000) *out = *out * 10 + (s[*at] - '0');
    return *at > begin;
}

/* Text with padding to spec->width characters. */
static int add_padded(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *s,
                      const struct spec *spec, char align) {
    int rc = jinja_charge_walk(run, s);
    int64_t missing = spec->width - (int64_t)jinja_str_length(s);
    int64_t left = align == '>' ? missing : align == '^' ? missing / 2 : 0;
    if (missing < 0) missing = left = 0;
    if (!rc) rc = jinja_text_pad(run, text, &spec->fill, left);
    if (!rc) rc = jinja_text_add_str(run, text, s);
    return rc ? rc : jinja_text_pad(run, text, &spec->fill, missing - left);
}

static int add_text_field(struct jinja_run *run, struct jinja_text *text,
                          const struct jinja_value *s, const struct spec *spec, char align) {
    struct jinja_value cut = *s;
    int rc = jinja_charge_walk(run, s);
    if (rc) return rc;
    if (spec->precision >= 0) cut = jinja_str_slice(s, 0, spec->precision);
    return add_padded(run, text, &cut, spec, spec->align ? spec->align : align);
}

static void integer_digits(uint64_t value, int base, bool upper, char *out) {
    char reversed[72];
    int n = 0;
    do {
        reversed[n++] = (upper ? "0123456789ABCDEF" : "0123456789abcdef")[value % (unsigned)base];
        value /= (unsigned)base;
    } while (value);
    for (int i = 0; i < n; i++) out[i] = reversed[n - 1 - i];
    out[n] = 0;
}

/* The digits of a float without sign; `type` as in C, or 0 for Python's repr. */
static void real_digits(double f, const struct spec *spec, char *out) {
    char format[8], type = spec->type;
    f = fabs(f);
    if (type == '%') f *= 100;
    if (!isfinite(f)) {
        bool upper = type == 'E' || type == 'F' || type == 'G';
        snprintf(out, NUMBER_BYTES, "%s",
                 isnan(f) ? (upper ? "NAN" : "nan")
                 : upper  ? "INF"
                          : "inf");
    } else if (!type && spec->precision < 0) {
        char repr[JINJA_FLOAT_BYTES];
        jinja_float_repr(f, repr);
        snprintf(out, NUMBER_BYTES, "%s", repr);
    } else {
        char c = !type || type == 'n' ? 'g' : type == '%' ? 'f' : type;
        snprintf(format, sizeof format, spec->alternate ? "%%#.*%c" : "%%.*%c", c);
        int precision = spec->precision < 0 ? 6 : spec->precision;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(out, NUMBER_BYTES, format, precision, f);
#pragma GCC diagnostic pop
    }
    if (!type && isfinite(f) && !strpbrk(out, ".e")) strcat(out, ".0");
    if (type == '%') strcat(out, "%");
}

/* Thousands separators into the leading run of digits. */
static void group_digits(char *digits, char separator) {
    char grouped[NUMBER_BYTES];
    size_t whole = strspn(digits, "0123456789"), n = 0;
    for (size_t i = 0; i < whole; i++) {
        if (i && (whole - i) % 3 == 0) grouped[n++] = separator;
        grouped[n++] = digits[i];
    }
    snprintf(grouped + n, sizeof grouped - n, "%s", digits + whole);
    snprintf(digits, NUMBER_BYTES, "%s", grouped);
}

/* sign + prefix + digits with zeros or fill between or around them. */
static int format_add_number(struct jinja_run *run, struct jinja_text *text, const char *prefix,
                             const char *digits, const struct spec *spec) {
    int rc = 0;
    int64_t size = (int64_t)(strlen(prefix) + strlen(digits));
    bool inside = spec->align == '=' || (spec->zero && !spec->align);
    if (!inside) {
        struct jinja_value joined;
        struct jinja_text *whole;
        rc = jinja_text_open(run, (size_t)size, &whole);
        if (!rc) rc = jinja_text_puts(run, whole, prefix);
        if (!rc) rc = jinja_text_puts(run, whole, digits);
        if (rc) return rc;
        joined = jinja_text_value(whole);
        return add_padded(run, text, &joined, spec, spec->align ? spec->align : '>');
    }
    struct jinja_value fill = spec->fill;
    if (spec->zero) rc = jinja_str_c(run, "0", &fill);
    if (!rc) rc = jinja_text_puts(run, text, prefix);
    if (!rc) rc = jinja_text_pad(run, text, &fill, spec->width - size);
    return rc ? rc : jinja_text_puts(run, text, digits);
}

static int integer_base(char type) {
    return type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
}

static int add_integer(struct jinja_run *run, struct jinja_text *text, int64_t value,
                       const struct spec *spec) {
    char digits[NUMBER_BYTES], plain[72], prefix[8] = "";
    int base = integer_base(spec->type);
    uint64_t magnitude = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    integer_digits(magnitude, base, spec->type == 'X', plain);
    int zeros = spec->precision - (int)strlen(plain); /* %.3d */
    snprintf(digits, sizeof digits, "%0*d%s", zeros > 0 ? zeros : 1, 0, plain);
    if (zeros <= 0) memmove(digits, digits + 1, strlen(digits));
    if (spec->group) group_digits(digits, spec->group);
    snprintf(prefix, sizeof prefix, "%s",
             value < 0           ? "-"
             : spec->sign == '+' ? "+"
             : spec->sign == ' ' ? " "
                                 : "");
    if (spec->alternate && base != 10) strncat(prefix, (char[]){'0', spec->type, 0}, 3);
    return format_add_number(run, text, prefix, digits, spec);
}

static int add_real(struct jinja_run *run, struct jinja_text *text, double value,
                    const struct spec *spec) {
    char digits[NUMBER_BYTES];
    real_digits(value, spec, digits);
    if (spec->group) group_digits(digits, spec->group);
    bool minus = signbit(value) && !isnan(value);
    return format_add_number(run, text,
                             minus               ? "-"
                             : spec->sign == '+' ? "+"
                             : spec->sign == ' ' ? " "
                                                 : "",
                             digits, spec);
}

static int add_code(struct jinja_run *run, struct jinja_text *text, int64_t code,
                    const struct spec *spec) {
    char bytes[4];
    struct jinja_value c;
    if (code < 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return jinja_fail(run, ERR_INVALID, "%%c arg not in range(0x110000)");
    int rc = jinja_str(run, bytes, utf8_encode((uint32_t)code, bytes), false, &c);
    return rc ? rc : add_text_field(run, text, &c, spec, '>');
}

static bool is_real_type(char type) {
    return type && strchr("eEfFgG%", type);
}

/* A number in either syntax. */
static int add_numeric(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v,
                       const struct spec *spec) {
    if (v->kind == JINJA_FLOAT || is_real_type(spec->type))
        return add_real(run, text, jinja_real_of(v), spec);
    if (v->kind != JINJA_BIG && spec->type == 'c')
        return add_code(run, text, jinja_int_of(v), spec);
    if (v->kind != JINJA_BIG) return add_integer(run, text, jinja_int_of(v), spec);
    if (integer_base(spec->type) != 10 || spec->group)
        return jinja_fail(run, ERR_LIMIT,
                          "an integer beyond 64 bits cannot be formatted like this");
    return add_padded(run, text, v, spec, spec->align ? spec->align : '>');
}

/* Percent formatting: what remains of the values. */
struct percent {
    const struct jinja_value *values;
    uint32_t next;
    bool named; /* some field was %(name)s */
};

static int percent_next(struct jinja_run *run, struct percent *p, struct jinja_value *out) {
    bool tuple = p->values->kind == JINJA_TUPLE;
    if (p->next >= (tuple ? p->values->list->count : 1))
        return jinja_fail(run, ERR_INVALID, "not enough arguments for format string");
    *out = tuple ? p->values->list->items[p->next] : *p->values;
    p->next++;
    return 0;
}

static int percent_name(struct jinja_run *run, struct percent *p, const struct jinja_value *format,
                        size_t *at, struct jinja_value *out) {
    const char *s = jinja_str_data(format);
    size_t begin = ++*at;
    int depth = 1;
    for (; *at < format->size; (*at)++) {
        depth += s[*at] == '(' ? 1 : s[*at] == ')' ? -1 : 0;
        if (!depth) break;
    }
    if (depth) return jinja_fail(run, ERR_INVALID, "incomplete format key");
    if (p->values->kind != JINJA_DICT)
        return jinja_fail(run, ERR_INVALID, "format requires a mapping");
    struct jinja_value name = jinja_str_view(format, (uint32_t)begin, (uint32_t)*at);
    struct jinja_pair *pair;
    ++*at;
    p->named = true;
    int rc = jinja_dict_find(run, p->values->dict, &name, &pair);
    if (!rc && !pair) rc = jinja_fail(run, ERR_INVALID, "a key of the format is missing");
    if (!rc) *out = pair->value;
    return rc;
}

static int percent_size(struct jinja_run *run, struct percent *p, const char *s, size_t size,
                        size_t *at, int64_t max, int *out, bool *minus) {
    int64_t n;
    if (*at < size && s[*at] == '*') {
        struct jinja_value v = jinja_none();
        int rc = percent_next(run, p, &v);
        if (rc) return rc;
        if (!jinja_is_int(&v)) return jinja_fail(run, ERR_INVALID, "* wants int");
        ++*at;
        n = jinja_int_of(&v);
        if (n < 0 && minus) *minus = true;
        if (n < 0) n = minus && n > -WIDTH_MAX ? -n : 0;
    } else if (!format_read_number(s, size, at, &n)) {
        return 0;
    }
    return check_number(run, n, max, out);
}

static int percent_spec(struct jinja_run *run, struct percent *p, const struct jinja_value *format,
                        size_t *at, struct spec *spec) {
    const char *s = jinja_str_data(format);
    size_t size = format->size;
    bool minus = false;
    for (; *at < size && s[*at] && strchr("#0- +", s[*at]); ++*at) {
        if (s[*at] == '#') spec->alternate = true;
        if (s[*at] == '0') spec->zero = true;
        if (s[*at] == '-') minus = true;
        if (s[*at] == '+' || (s[*at] == ' ' && !spec->sign)) spec->sign = s[*at];
    }
    int rc = percent_size(run, p, s, size, at, WIDTH_MAX, &spec->width, &minus);
    if (!rc && *at < size && s[*at] == '.') {
        spec->precision = 0;
        ++*at;
        rc = percent_size(run, p, s, size, at, PRECISION_MAX, &spec->precision, NULL);
    }
    while (*at < size && (s[*at] == 'h' || s[*at] == 'l' || s[*at] == 'L')) ++*at;
    if (minus) spec->align = '<';
    if (rc) return rc;
    if (*at >= size) return jinja_fail(run, ERR_INVALID, "incomplete format");
    spec->type = s[(*at)++];
    return 0;
}

static int percent_value(struct jinja_run *run, struct jinja_text *text,
                         const struct jinja_value *v, struct spec *spec) {
    struct jinja_value s;
    struct jinja_text *repr;
    int rc;
    switch (spec->type) {
    case 's':
        rc = jinja_to_str(run, v, &s);
        return rc ? rc : add_text_field(run, text, &s, spec, '>');
    case 'r':
    case 'a':
        rc = jinja_text_open(run, 0, &repr);
        if (!rc) rc = jinja_print_repr(run, repr, v);
        if (rc) return rc;
        s = jinja_text_value(repr);
        return add_text_field(run, text, &s, spec, '>');
    case 'c':
        if (jinja_is_str(v) && jinja_str_offset(v, 1) == v->size && v->size)
            return add_text_field(run, text, v, spec, '>');
        break;
    case 'i':
    case 'u':
        spec->type = 'd';
        break;
    default:
        break;
    }
    if (!strchr("diucxXoeEfFgG", spec->type) || !spec->type)
        return jinja_fail(run, ERR_INVALID, "unsupported format character");
    if (v->kind == JINJA_UNDEFINED) return jinja_fail_undefined(run, v);
    if (!jinja_is_number(v))
        return jinja_fail(run, ERR_INVALID, "%%%c format: a real number is required, not %s",
                          spec->type, jinja_type_name(v));
    if (v->kind == JINJA_FLOAT && !is_real_type(spec->type)) {
        if (spec->type != 'd')
            return jinja_fail(run, ERR_INVALID, "%%%c format: an integer is required, not float",
                              spec->type);
        if (!(fabs(v->real) < 9e18))
            return jinja_fail(run, ERR_LIMIT, "cannot convert this float to an integer");
        return add_integer(run, text, (int64_t)v->real, spec);
    }
    return add_numeric(run, text, v, spec);
}

static int percent_field(struct jinja_run *run, struct percent *p, const struct jinja_value *format,
                         size_t *at, struct jinja_text *text) {
    struct jinja_value v = {.kind = JINJA_MISSING};
    int rc;
    struct spec spec = no_spec(run, &rc);
    if (!rc && *at < format->size && jinja_str_data(format)[*at] == '(')
        rc = percent_name(run, p, format, at, &v);
    if (!rc) rc = percent_spec(run, p, format, at, &spec);
    if (rc) return rc;
    if (spec.type == '%') return jinja_text_puts(run, text, "%");
    if (v.kind == JINJA_MISSING) rc = percent_next(run, p, &v);
    return rc ? rc : percent_value(run, text, &v, &spec);
}

int jinja_format_percent(struct jinja_run *run, const struct jinja_value *format,
                         const struct jinja_value *values, struct jinja_value *out) {
    struct percent p = {.values = values};
    struct jinja_text *text;
    int rc = jinja_text_open(run, format->size, &text);
    for (size_t at = 0; !rc && at < format->size;) {
        const char *s = jinja_str_data(format);
        const char *mark = memchr(s + at, '%', format->size - at);
        size_t end = mark ? (size_t)(mark - s) : format->size;
        struct jinja_value literal = jinja_str_view(format, (uint32_t)at, (uint32_t)end);
        rc = jinja_text_add_str(run, text, &literal);
        at = end + 1;
        if (!rc && mark) rc = percent_field(run, &p, format, &at, text);
    }
    if (rc) return rc;
    uint32_t given = values->kind == JINJA_TUPLE ? values->list->count : 1;
    bool mapping = values->kind == JINJA_DICT || values->kind == JINJA_LIST ||
                   values->kind == JINJA_RANGE ||
                   values->kind == JINJA_UNDEFINED; /* kinds with [ ] in Python */
    if (p.next < given && !p.named && !mapping)
        return jinja_fail(run, ERR_INVALID, "not all arguments converted during string formatting");
    *out = jinja_text_value(text);
    return 0;
}

/* "{}".format */
struct braces {
    const struct jinja_value *format;
    const struct jinja_args *args;
    uint32_t automatic;
};

static bool is_align(char c) {
    return c && strchr("<>=^", c);
}

static int brace_spec(struct jinja_run *run, const struct jinja_value *source, struct spec *spec) {
    const char *s = jinja_str_data(source);
    size_t size = source->size, at = 0;
    uint32_t first = 0;
    int64_t n;
    if (size) unicode_decode(s, size, &first);
    if (first && first < size && is_align(s[first])) {
        spec->fill = jinja_str_view(source, 0, first);
        spec->align = s[first];
        at = first + 1;
    } else if (size && is_align(s[0])) {
        spec->align = s[at++];
    }
    if (at < size && s[at] && strchr("+- ", s[at])) spec->sign = s[at++];
    if (at < size && s[at] == '#') spec->alternate = s[at++];
    if (at < size && s[at] == '0') spec->zero = s[at++];
    int rc = 0;
    if (format_read_number(s, size, &at, &n)) rc = check_number(run, n, WIDTH_MAX, &spec->width);
    if (at < size && (s[at] == ',' || s[at] == '_')) spec->group = s[at++];
    if (!rc && at < size && s[at] == '.') {
        at++;
        if (!format_read_number(s, size, &at, &n))
            return jinja_fail(run, ERR_INVALID, "Format specifier missing precision");
        rc = check_number(run, n, PRECISION_MAX, &spec->precision);
    }
    if (at < size) spec->type = s[at++];
    if (!rc && at < size) rc = jinja_fail(run, ERR_INVALID, "Invalid format specifier");
    return rc;
}

static int brace_value(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v,
                       const struct jinja_value *source) {
    struct jinja_value s;
    int rc;
    struct spec spec = no_spec(run, &rc);
    if (!rc) rc = brace_spec(run, source, &spec);
    if (rc) return rc;
    bool number = jinja_is_number(v) && !(v->kind == JINJA_BOOL && !source->size);
    const char *types = v->kind == JINJA_FLOAT ? "eEfFgGn%" : number ? "bcdoxXneEfFgG%" : "s";
    if (spec.type && !strchr(types, spec.type))
        return jinja_fail(run, ERR_INVALID, "Unknown format code for object of type '%s'",
                          jinja_type_name(v));
    if (number && spec.precision >= 0 && v->kind != JINJA_FLOAT && !is_real_type(spec.type))
        return jinja_fail(run, ERR_INVALID, "Precision not allowed in integer format specifier");
    if (number) return add_numeric(run, text, v, &spec);
    if (source->size && !jinja_is_str(v) && v->kind != JINJA_BOOL)
        return jinja_fail(run, ERR_INVALID, "unsupported format string passed to %s.__format__",
                          jinja_type_name(v));
    if (spec.group || spec.sign || spec.align == '=')
        return jinja_fail(run, ERR_INVALID, "Cannot use this format specifier with 's'.");
    rc = jinja_to_str(run, v, &s);
    return rc ? rc : add_text_field(run, text, &s, &spec, '<');
}

static int brace_argument(struct jinja_run *run, struct braces *b, const struct jinja_value *name,
                          struct jinja_value *out) {
    const char *s = jinja_str_data(name);
    size_t at = 0;
    int64_t index = b->automatic;
    if (!name->size || (format_read_number(s, name->size, &at, &index) && at == name->size)) {
        if (!name->size) b->automatic++;
        if (index >= b->args->count)
            return jinja_fail(
                run, ERR_INVALID,
                "Replacement index %" PRId64 " out of range for positional args tuple", index);
        *out = b->args->items[index];
        return 0;
    }
    for (uint32_t i = 0; i < b->args->keyword_count; i++) {
        if (!jinja_str_equal(&b->args->keywords[i].name, name)) continue;
        *out = b->args->keywords[i].value;
        return 0;
    }
    return jinja_fail(run, ERR_INVALID, "a name of the format is missing");
}

/* name, then .attribute and [key] parts. */
static int brace_lookup(struct jinja_run *run, struct braces *b, const struct jinja_value *field,
                        struct jinja_value *out) {
    const char *s = jinja_str_data(field);
    uint32_t at = 0;
    while (at < field->size && s[at] != '.' && s[at] != '[') at++;
    struct jinja_value part = jinja_str_view(field, 0, at), key;
    int rc = brace_argument(run, b, &part, out);
    while (!rc && at < field->size) {
        bool item = s[at] == '[';
        uint32_t begin = ++at;
        while (at < field->size && (item ? s[at] != ']' : s[at] != '.' && s[at] != '[')) at++;
        part = jinja_str_view(field, begin, at);
        if (item && at++ == field->size)
            return jinja_fail(run, ERR_INVALID, "expected ']' before end of string");
        size_t digits = 0;
        int64_t index;
        key = part;
        if (item && format_read_number(jinja_str_data(&part), part.size, &digits, &index) &&
            digits == part.size)
            key = jinja_int(index);
        struct jinja_value object = *out;
        rc = item ? jinja_getitem(run, &object, &key, out) : jinja_getattr(run, &object, &key, out);
    }
    return rc;
}

/* Inside the braces: field [! conversion] [: spec]. */
static int brace_field(struct jinja_run *run, struct braces *b, uint32_t begin, uint32_t end,
                       struct jinja_text *text) {
    const char *s = jinja_str_data(b->format);
    uint32_t name = begin, spec;
    while (name < end && s[name] != '!' && s[name] != ':') name++;
    char conversion = 0;
    spec = name;
    if (name < end && s[name] == '!') {
        if (name + 1 >= end || (name + 2 < end && s[name + 2] != ':'))
            return jinja_fail(run, ERR_INVALID, "expected ':' after conversion specifier");
        conversion = s[name + 1];
        spec = name + 2;
    }
    struct jinja_value field = jinja_str_view(b->format, begin, name), v;
    struct jinja_value source = jinja_str_view(b->format, spec < end ? spec + 1 : end, end);
    int rc = brace_lookup(run, b, &field, &v);
    if (rc || !conversion) return rc ? rc : brace_value(run, text, &v, &source);
    struct jinja_text *converted;
    rc = jinja_text_open(run, 0, &converted);
    if (!rc)
        rc = conversion == 's' ? jinja_print(run, converted, &v)
                               : jinja_print_repr(run, converted, &v);
    if (rc) return rc;
    v = jinja_text_value(converted);
    return brace_value(run, text, &v, &source);
}

int jinja_format_braces(struct jinja_run *run, const struct jinja_value *format,
                        const struct jinja_args *args, struct jinja_value *out) {
    struct braces b = {format, args, 0};
    const char *s = jinja_str_data(format);
    struct jinja_text *text;
    int rc = jinja_text_open(run, format->size, &text);
    for (uint32_t at = 0; !rc && at < format->size;) {
        uint32_t end = at;
        while (end < format->size && s[end] != '{' && s[end] != '}') end++;
        bool twice = end + 1 < format->size && s[end + 1] == s[end];
        struct jinja_value literal = jinja_str_view(format, at, end + (twice ? 1 : 0));
        rc = jinja_text_add_str(run, text, &literal);
        at = end + (twice ? 2 : 0);
        if (rc || twice || end == format->size) continue;
        uint32_t close = end + 1;
        while (close < format->size && s[close] != '}' && s[close] != '{') close++;
        if (s[end] == '}' || close >= format->size || s[close] == '{')
            return jinja_fail(run, ERR_INVALID, "the braces of a format do not match");
        rc = brace_field(run, &b, end + 1, close, text);
        at = close + 1;
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

/* A naive datetime's %z and %Z are empty; %f has no C counterpart; a trailing % stays. */
static void c_time_format(const char *from, size_t size, char *to) {
    for (size_t i = 0; i < size; i++) {
        char next = i + 1 < size ? from[i + 1] : 0;
        if (from[i] == '%' && (next == 'z' || next == 'Z')) {
            i++;
        } else if (from[i] == '%' && next == 'f') {
            memcpy(to, "000000", 6);
            to += 6;
            i++;
        } else if (from[i] == '%') {
            *to++ = '%';
            *to++ = next ? next : '%';
            i++;
        } else {
            *to++ = from[i];
        }
    }
    *to = 0;
}

int jinja_format_time(struct jinja_run *run, const struct jinja_value *format, int64_t now,
                      struct jinja_value *out) {
    char plain[256 * 3 + 2], text[4096];
    struct tm tm;
    time_t seconds = (time_t)now;
    if (format->size > 256)
        return jinja_fail(run, ERR_LIMIT, "a time format is longer than 256 bytes");
    if (format->size && memchr(jinja_str_data(format), 0, format->size))
        return jinja_fail(run, ERR_INVALID, "embedded null character");
    if (!gmtime_r(&seconds, &tm)) return jinja_fail(run, ERR_INVALID, "the time is out of range");
    plain[0] = '.'; /* never empty: strftime's 0 means the buffer is too small */
    c_time_format(jinja_str_data(format), format->size, plain + 1);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t size = strftime(text, sizeof text, plain, &tm);
#pragma GCC diagnostic pop
    if (!size) return jinja_fail(run, ERR_LIMIT, "a time is longer than %zu bytes", sizeof text);
    if (!utf8_valid(text, size)) return jinja_fail(run, ERR_INVALID, "a time is not UTF-8");
    return jinja_str(run, text + 1, size - 1, jinja_str_marked(format), out);
}
