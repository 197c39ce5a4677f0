/* The lexer: text, tags and the tokens inside tags.
 *
 * transformers sets trim_blocks and lstrip_blocks, so a block tag takes the newline behind it and
 * the blanks before it on its line; the lexer cuts those off the text here, and the parser never
 * sees them. Strings are unescaped as Python does it. */
#include "text/jinja/lex.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja/text.h"
#include "text/jinja/unicode.h"
#include "text/unicode/unicode.h"

#define BRACKETS_MAX 1024

struct lexer {
    const char *s; /* newlines are \n, one trailing newline dropped */
    uint32_t size, at;
    int line;
    bool line_starting; /* the last thing consumed ended a line */
    struct arena *arena;
    struct fault *fault;
    struct jinja_token *items;
    uint32_t count, capacity;
    char brackets[BRACKETS_MAX]; /* the closing ones we wait for */
    uint32_t bracket_count;
};

static const struct {
    char text[3];
    enum jinja_token_kind kind;
} operators[] = {
    /* the longer first */
    {"//", JINJA_TOKEN_FLOORDIV}, {"**", JINJA_TOKEN_POW},      {"==", JINJA_TOKEN_EQ},
    {"!=", JINJA_TOKEN_NE},       {">=", JINJA_TOKEN_GE},       {"<=", JINJA_TOKEN_LE},
    {"+", JINJA_TOKEN_ADD},       {"-", JINJA_TOKEN_SUB},       {"*", JINJA_TOKEN_MUL},
    {"/", JINJA_TOKEN_DIV},       {"%", JINJA_TOKEN_MOD},       {"~", JINJA_TOKEN_TILDE},
    {">", JINJA_TOKEN_GT},        {"<", JINJA_TOKEN_LT},        {"=", JINJA_TOKEN_ASSIGN},
    {".", JINJA_TOKEN_DOT},       {":", JINJA_TOKEN_COLON},     {"|", JINJA_TOKEN_PIPE},
    {",", JINJA_TOKEN_COMMA},     {";", JINJA_TOKEN_SEMICOLON}, {"(", JINJA_TOKEN_LPAREN},
    {")", JINJA_TOKEN_RPAREN},    {"[", JINJA_TOKEN_LBRACKET},  {"]", JINJA_TOKEN_RBRACKET},
    {"{", JINJA_TOKEN_LBRACE},    {"}", JINJA_TOKEN_RBRACE},
};

const char *jinja_token_name(enum jinja_token_kind kind) {
    switch (kind) {
    case JINJA_TOKEN_DATA:
        return "template text";
    case JINJA_TOKEN_VARIABLE_BEGIN:
        return "{{";
    case JINJA_TOKEN_VARIABLE_END:
        return "}}";
    case JINJA_TOKEN_BLOCK_BEGIN:
        return "{%";
    case JINJA_TOKEN_BLOCK_END:
        return "%}";
    case JINJA_TOKEN_NAME:
        return "a name";
    case JINJA_TOKEN_STRING:
        return "a string";
    case JINJA_TOKEN_NUMBER:
        return "a number";
    case JINJA_TOKEN_EOF:
        return "end of template";
    default:
        for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
            if (operators[i].kind == kind) return operators[i].text;
        return "?";
    }
}

struct jinja_text *jinja_constant_text(struct arena *arena, const char *data, uint32_t size) {
    struct jinja_text *text = arena_alloc(arena, 1, sizeof *text);
    if (!text) return NULL;
    *text =
        (struct jinja_text){.data = (char *)data, .used = size, .capacity = size, .ascii = true};
    for (uint32_t i = 0; i < size; i++) text->ascii &= (unsigned char)data[i] < 0x80;
    return text;
}

int jinja_compile_memory(const struct arena *arena, struct fault *fault) {
    if (arena->full)
        return fault_set(fault, ERR_LIMIT, "chat template", "takes more than %zu MiB when compiled",
                         arena->limit >> 20);
    return fault_set(fault, ERR_NOMEM, "chat template", "%s", err_text(ERR_NOMEM));
}

static int lex_no_memory(struct lexer *lexer) {
    return jinja_compile_memory(lexer->arena, lexer->fault);
}

#define MALFORMED(lexer, ...)                                                                      \
    fault_set((lexer)->fault, ERR_MALFORMED, "chat template", "line %d: " __VA_ARGS__)

static int push(struct lexer *lexer, struct jinja_token token) {
    if (lexer->count == lexer->capacity) {
        uint32_t capacity = lexer->capacity * 2 + 64;
        struct jinja_token *items = arena_alloc(lexer->arena, capacity, sizeof *items);
        if (!items) return lex_no_memory(lexer);
        if (lexer->count) memcpy(items, lexer->items, lexer->count * sizeof *items);
        lexer->items = items;
        lexer->capacity = capacity;
    }
    lexer->items[lexer->count++] = token;
    return 0;
}

static int push_kind(struct lexer *lexer, enum jinja_token_kind kind) {
    return push(lexer, (struct jinja_token){.kind = kind, .line = lexer->line});
}

static int push_data(struct lexer *lexer, uint32_t begin, uint32_t end) {
    if (begin >= end) return 0;
    return push(lexer, (struct jinja_token){.kind = JINJA_TOKEN_DATA,
                                            .line = lexer->line,
                                            .text = lexer->s + begin,
                                            .size = end - begin});
}

static bool looking_at(const struct lexer *lexer, uint32_t at, const char *text) {
    size_t size = strlen(text);
    return lexer->size - at >= size && memcmp(lexer->s + at, text, size) == 0;
}

static void advance(struct lexer *lexer, uint32_t to) {
    for (uint32_t i = lexer->at; i < to; i++) lexer->line += lexer->s[i] == '\n';
    if (to > lexer->at) lexer->line_starting = lexer->s[to - 1] == '\n';
    lexer->at = to;
}

static uint32_t lex_skip_space(const struct lexer *lexer, uint32_t at) {
    uint32_t length;
    while (at < lexer->size &&
           jinja_is_space(unicode_decode(lexer->s + at, lexer->size - at, &length)))
        at += length;
    return at;
}

static uint32_t strip_space(const struct lexer *lexer, uint32_t begin, uint32_t end) {
    while (end > begin) {
        uint32_t last = end - 1, length;
        while (last > begin && ((unsigned char)lexer->s[last] & 0xc0) == 0x80) last--;
        if (!jinja_is_space(unicode_decode(lexer->s + last, end - last, &length))) break;
        end = last;
    }
    return end;
}

/* After "%}", "#}" or "-%}" ...: the white space that goes with the tag. `at` is behind the tag. */
static uint32_t after_tag(const struct lexer *lexer, uint32_t at, char sign, bool trims) {
    if (sign == '-') return lex_skip_space(lexer, at);
    if (trims && sign != '+' && at < lexer->size && lexer->s[at] == '\n') return at + 1;
    return at;
}

/* Where the text before a tag ends, given the tag's sign and kind. */
static uint32_t text_end(const struct lexer *lexer, uint32_t begin, uint32_t tag, char sign,
                         bool is_variable) {
    if (sign == '-') return strip_space(lexer, begin, tag);
    if (sign == '+' || is_variable) return tag;
    uint32_t line = tag;
    while (line > begin && lexer->s[line - 1] != '\n') line--;
    if (line == begin && !lexer->line_starting) return tag;
    return lex_skip_space(lexer, line) >= tag ? line : tag;
}

static char sign_at(const struct lexer *lexer, uint32_t at) {
    char c = at < lexer->size ? lexer->s[at] : 0;
    return c == '-' || c == '+' ? c : 0;
}

static int lex_comment(struct lexer *lexer) {
    uint32_t at = lexer->at;
    while (at + 1 < lexer->size && !looking_at(lexer, at, "#}")) at++;
    if (at + 1 >= lexer->size) return MALFORMED(lexer, "a comment has no end", lexer->line);
    char sign = at > lexer->at ? lexer->s[at - 1] : 0;
    advance(lexer, after_tag(lexer, at + 2, sign, true));
    return 0;
}

/* `at` behind "{%": does the tag say `word` and close? Then *end is behind it. */
static bool is_word_tag(const struct lexer *lexer, uint32_t at, const char *word, bool trims,
                        uint32_t *end) {
    at = lex_skip_space(lexer, at + (sign_at(lexer, at) ? 1 : 0));
    if (!looking_at(lexer, at, word)) return false;
    at = lex_skip_space(lexer, at + (uint32_t)strlen(word));
    char sign = sign_at(lexer, at);
    if (sign == '+' && !trims) return false;
    at += sign ? 1 : 0;
    if (!looking_at(lexer, at, "%}")) return false;
    *end = after_tag(lexer, at + 2, sign, trims);
    return true;
}

static int lex_raw(struct lexer *lexer, uint32_t body) {
    int line = lexer->line;
    advance(lexer, body);
    for (uint32_t at = body; at + 1 < lexer->size; at++) {
        uint32_t end;
        if (!looking_at(lexer, at, "{%") || !is_word_tag(lexer, at + 2, "endraw", true, &end))
            continue;
        uint32_t text = text_end(lexer, body, at, sign_at(lexer, at + 2), false);
        int rc = push_data(lexer, body, text);
        advance(lexer, end);
        return rc;
    }
    return MALFORMED(lexer, "raw has no end", line);
}

static bool is_name_start(uint32_t code) {
    return code < 0x80 ? (code | 32) - 'a' < 26u || code == '_' : unicode_is_letter(code);
}

static int lex_name(struct lexer *lexer) {
    uint32_t at = lexer->at, length;
    while (at < lexer->size &&
           jinja_is_word(unicode_decode(lexer->s + at, lexer->size - at, &length)))
        at += length;
    int rc = push(lexer, (struct jinja_token){.kind = JINJA_TOKEN_NAME,
                                              .line = lexer->line,
                                              .text = lexer->s + lexer->at,
                                              .size = at - lexer->at});
    advance(lexer, at);
    return rc;
}

static int lex_hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : 99;
}

/* Digits of `base` with single underscores between them; returns where they end. */
static uint32_t scan_digits(const struct lexer *lexer, uint32_t at, int base) {
    uint32_t end = at;
    while (at < lexer->size) {
        if (lex_hex_value(lexer->s[at]) < base)
            end = ++at;
        else if (lexer->s[at] == '_' && at == end)
            at++;
        else
            break;
    }
    return end;
}

static uint32_t scan_exponent(const struct lexer *lexer, uint32_t at) {
    if (at >= lexer->size || (lexer->s[at] | 32) != 'e') return at;
    uint32_t digits = at + 1 + (sign_at(lexer, at + 1) ? 1 : 0);
    uint32_t end =
        digits < lexer->size && lexer->s[digits] != '_' ? scan_digits(lexer, digits, 10) : digits;
    return end > digits ? end : at;
}

/* The token's characters without underscores, NUL-terminated. */
static char *plain_digits(struct lexer *lexer, uint32_t begin, uint32_t end, uint32_t *size) {
    char *digits = arena_strndup(lexer->arena, lexer->s + begin, end - begin);
    if (!digits) return NULL;
    uint32_t n = 0;
    for (uint32_t i = 0; i < end - begin; i++)
        if (digits[i] != '_') digits[n++] = digits[i];
    digits[n] = 0;
    *size = n;
    return digits;
}

static int big_number(struct lexer *lexer, const char *digits, uint32_t size,
                      struct jinja_value *out) {
    *out = (struct jinja_value){.kind = JINJA_BIG, .size = size};
    out->text = jinja_constant_text(lexer->arena, digits, size);
    return out->text ? 0 : lex_no_memory(lexer);
}

static int int_value(struct lexer *lexer, const char *digits, uint32_t size, int base,
                     struct jinja_value *out) {
    int64_t value = 0;
    for (uint32_t i = base == 10 ? 0 : 2; i < size; i++) {
        if (__builtin_mul_overflow(value, (int64_t)base, &value) ||
            __builtin_add_overflow(value, (int64_t)lex_hex_value(digits[i]), &value)) {
            if (base == 10) return big_number(lexer, digits, size, out);
            return MALFORMED(lexer, "the integer is beyond 64 bits", lexer->line);
        }
    }
    *out = jinja_int(value);
    return 0;
}

static int number_base(const struct lexer *lexer) {
    const char *s = lexer->s + lexer->at;
    if (lexer->size - lexer->at < 3 || s[0] != '0') return 10;
    int base = (s[1] | 32) == 'x' ? 16 : (s[1] | 32) == 'o' ? 8 : (s[1] | 32) == 'b' ? 2 : 10;
    uint32_t first = lexer->at + 2 + (s[2] == '_' ? 1u : 0u);
    return first < lexer->size && lex_hex_value(lexer->s[first]) < base ? base : 10;
}

static int lex_number(struct lexer *lexer) {
    struct jinja_token token = {.kind = JINJA_TOKEN_NUMBER, .line = lexer->line};
    int base = number_base(lexer);
    uint32_t end, whole, size;
    bool real = false;
    if (base != 10) {
        uint32_t first = lexer->at + 2 + (lexer->s[lexer->at + 2] == '_' ? 1u : 0u);
        end = scan_digits(lexer, first, base);
    } else {
        end = whole = scan_digits(lexer, lexer->at, 10);
        bool after_dot = lexer->at > 0 && lexer->s[lexer->at - 1] == '.'; /* x.0.1: two indices */
        if (!after_dot) {
            if (end + 1 < lexer->size && lexer->s[end] == '.' &&
                lex_hex_value(lexer->s[end + 1]) < 10)
                end = scan_digits(lexer, end + 1, 10);
            end = scan_exponent(lexer, end);
        }
        real = end > whole;
        if (!real && lexer->s[lexer->at] == '0') /* 007 is three numbers: Python has no such */
            for (end = lexer->at; end < whole && strchr("0_", lexer->s[end]);) end++;
        while (!real && lexer->s[end - 1] == '_') end--;
    }
    char *digits = plain_digits(lexer, lexer->at, end, &size);
    if (!digits) return lex_no_memory(lexer);
    int rc = 0;
    if (real)
        token.number = jinja_float(strtod(digits, NULL));
    else
        rc = int_value(lexer, digits, size, base, &token.number);
    if (!rc) rc = push(lexer, token);
    advance(lexer, end);
    return rc;
}

/* \x \u \U: `digits` hex digits at s[*at]. */
static int lex_hex_escape(struct lexer *lexer, const char *s, uint32_t size, uint32_t *at,
                          int digits, char **out) {
    uint32_t code = 0;
    for (int i = 0; i < digits; i++, (*at)++) {
        int value = *at < size ? lex_hex_value(s[*at]) : 99;
        if (value > 15) return MALFORMED(lexer, "an escape has too few digits", lexer->line);
        code = code << 4 | (uint32_t)value;
    }
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return MALFORMED(lexer, "an escape is no character", lexer->line);
    *out += utf8_encode(code, *out);
    return 0;
}

static void octal_escape(const char *s, uint32_t size, uint32_t *at, char **out) {
    uint32_t code = 0;
    for (int i = 0; i < 3 && *at < size && s[*at] >= '0' && s[*at] <= '7'; i++, (*at)++)
        code = code * 8 + (uint32_t)(s[*at] - '0');
    *out += utf8_encode(code, *out);
}

/* One escape of a Python string; `*at` is behind the backslash. No escape grows. */
static int unescape_one(struct lexer *lexer, const char *s, uint32_t size, uint32_t *at,
                        char **out) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = s[(*at)++];
    if (c == '\n') return 0;
    if (c == 'x') return lex_hex_escape(lexer, s, size, at, 2, out);
    if (c == 'u') return lex_hex_escape(lexer, s, size, at, 4, out);
    if (c == 'U') return lex_hex_escape(lexer, s, size, at, 8, out);
    if (c == 'N') return MALFORMED(lexer, "\\N escapes are not supported", lexer->line);
    if (c >= '0' && c <= '7') {
        (*at)--;
        octal_escape(s, size, at, out);
        return 0;
    }
    const char *known = c ? strchr(from, c) : NULL;
    if (!known) *(*out)++ = '\\'; /* Python keeps unknown escapes as they are */
    *(*out)++ = known ? to[known - from] : c;
    return 0;
}

static int lex_string(struct lexer *lexer) {
    char quote = lexer->s[lexer->at];
    uint32_t begin = lexer->at + 1, end = begin;
    while (end < lexer->size && lexer->s[end] != quote) end += lexer->s[end] == '\\' ? 2 : 1;
    if (end >= lexer->size) return MALFORMED(lexer, "a string has no end", lexer->line);
    char *text = arena_alloc(lexer->arena, end - begin + 1, 1), *out = text;
    if (!text) return lex_no_memory(lexer);
    for (uint32_t at = begin; at < end;) {
        if (lexer->s[at] != '\\') {
            *out++ = lexer->s[at++];
            continue;
        }
        uint32_t behind = at + 1 - begin;
        int rc = unescape_one(lexer, lexer->s + begin, end - begin, &behind, &out);
        if (rc) return rc;
        at = begin + behind;
    }
    int rc = push(lexer, (struct jinja_token){.kind = JINJA_TOKEN_STRING,
                                              .line = lexer->line,
                                              .text = text,
                                              .size = (uint32_t)(out - text)});
    advance(lexer, end + 1);
    return rc;
}

static int track_bracket(struct lexer *lexer, char c) {
    static const char opening[] = "([{", closing[] = ")]}";
    const char *open = strchr(opening, c);
    if (open) {
        if (lexer->bracket_count == BRACKETS_MAX)
            return MALFORMED(lexer, "brackets nest too deeply", lexer->line);
        lexer->brackets[lexer->bracket_count++] = closing[open - opening];
    } else if (strchr(closing, c)) {
        if (!lexer->bracket_count) return MALFORMED(lexer, "unexpected '%c'", lexer->line, c);
        char expected = lexer->brackets[--lexer->bracket_count];
        if (expected != c)
            return MALFORMED(lexer, "unexpected '%c', expected '%c'", lexer->line, c, expected);
    }
    return 0;
}

static int lex_operator(struct lexer *lexer) {
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        if (!looking_at(lexer, lexer->at, operators[i].text)) continue;
        int rc = track_bracket(lexer, operators[i].text[0]);
        if (!rc) rc = push_kind(lexer, operators[i].kind);
        advance(lexer, lexer->at + (uint32_t)strlen(operators[i].text));
        return rc;
    }
    uint32_t length;
    uint32_t code = unicode_decode(lexer->s + lexer->at, lexer->size - lexer->at, &length);
    if (jinja_is_printable(code))
        return MALFORMED(lexer, "unexpected character '%.*s'", lexer->line, (int)length,
                         lexer->s + lexer->at);
    return MALFORMED(lexer, "unexpected character U+%04X", lexer->line, (unsigned)code);
}

static int lex_token(struct lexer *lexer) {
    char c = lexer->s[lexer->at];
    uint32_t length;
    if (c >= '0' && c <= '9') return lex_number(lexer);
    if (c == '\'' || c == '"') return lex_string(lexer);
    if (is_name_start(unicode_decode(lexer->s + lexer->at, lexer->size - lexer->at, &length)))
        return lex_name(lexer);
    return lex_operator(lexer);
}

/* Does the tag end here? Inside brackets "}}" is two brackets. */
static bool tag_ends(struct lexer *lexer, bool is_variable, uint32_t *end) {
    if (lexer->bracket_count) return false;
    const char *close = is_variable ? "}}" : "%}";
    char sign = sign_at(lexer, lexer->at);
    if (sign == '+' && is_variable) return false;
    uint32_t at = lexer->at + (sign ? 1 : 0);
    if (!looking_at(lexer, at, close)) return false;
    *end = after_tag(lexer, at + 2, sign, !is_variable);
    return true;
}

static int lex_tag(struct lexer *lexer, bool is_variable) {
    int rc = push_kind(lexer, is_variable ? JINJA_TOKEN_VARIABLE_BEGIN : JINJA_TOKEN_BLOCK_BEGIN);
    while (!rc) {
        advance(lexer, lex_skip_space(lexer, lexer->at));
        if (lexer->at >= lexer->size) return 0; /* the parser finds the end of the template */
        uint32_t end;
        if (tag_ends(lexer, is_variable, &end)) {
            rc = push_kind(lexer, is_variable ? JINJA_TOKEN_VARIABLE_END : JINJA_TOKEN_BLOCK_END);
            advance(lexer, end);
            return rc;
        }
        rc = lex_token(lexer);
    }
    return rc;
}

static uint32_t find_tag(const struct lexer *lexer) {
    uint32_t at = lexer->at;
    for (; at + 1 < lexer->size; at++)
        if (lexer->s[at] == '{' && strchr("{%#", lexer->s[at + 1]) && lexer->s[at + 1]) return at;
    return lexer->size;
}

/* Text up to the next tag, then the tag. */
static int lex_step(struct lexer *lexer) {
    uint32_t begin = lexer->at, tag = find_tag(lexer);
    if (tag == lexer->size) {
        int rc = push_data(lexer, begin, tag);
        advance(lexer, tag);
        return rc;
    }
    char kind = lexer->s[tag + 1], sign = sign_at(lexer, tag + 2);
    int rc = push_data(lexer, begin, text_end(lexer, begin, tag, sign, kind == '{'));
    if (rc) return rc;
    uint32_t end;
    advance(lexer, tag);
    if (kind == '%' && is_word_tag(lexer, tag + 2, "raw", false, &end)) return lex_raw(lexer, end);
    advance(lexer, tag + 2 + (sign ? 1 : 0));
    lexer->bracket_count = 0;
    return kind == '#' ? lex_comment(lexer) : lex_tag(lexer, kind == '{');
}

/* \r\n and \r become \n; one newline at the end goes. */
static int lex_normalize(struct lexer *lexer, const char *source, size_t size) {
    char *s = arena_alloc(lexer->arena, size + 1, 1);
    if (!s) return lex_no_memory(lexer);
    uint32_t n = 0;
    for (size_t i = 0; i < size; i++) {
        if (source[i] == '\r' && i + 1 < size && source[i + 1] == '\n') continue;
        s[n++] = source[i] == '\r' ? '\n' : source[i];
    }
    if (n && s[n - 1] == '\n') n--;
    lexer->s = s;
    lexer->size = n;
    return 0;
}

int jinja_lex(const char *source, size_t size, struct arena *arena, struct jinja_tokens *out,
              struct fault *fault) {
    struct lexer lexer = {.line = 1, .line_starting = true, .arena = arena, .fault = fault};
    int rc = lex_normalize(&lexer, source, size);
    while (!rc && lexer.at < lexer.size) rc = lex_step(&lexer);
    if (!rc) rc = push_kind(&lexer, JINJA_TOKEN_EOF);
    *out = (struct jinja_tokens){lexer.items, lexer.count};
    return rc;
}
