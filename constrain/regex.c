/* Reads an expression into a tree, then builds nodes from the end of the text to its beginning:
 * each term is given what follows it (`rest`), so that '$' and look-ahead, which speak about what
 * follows, become conditions on `rest`. Terms without assertions do not need that. */
#include "constrain/regex.h"

#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "constrain/unicode.h"

enum term_kind { TERM_NODE, TERM_SEQ, TERM_ALT, TERM_REPEAT, TERM_BEGIN, TERM_END, TERM_AHEAD };

/* A term of an expression. Terms lie in an array and refer to each other by index; 0 = none. */
struct term {
    enum term_kind kind;
    bool asserts;          /* this term or one inside is BEGIN, END or AHEAD */
    bool negative;         /* AHEAD */
    bool opens;            /* no term before it in its sequence takes characters */
    uint32_t node;         /* NODE */
    uint32_t last, before; /* last child; the sibling before this one */
    uint32_t min, max;     /* REPEAT */
};

struct reader {
    struct node_pool *pool;
    const char *text;
    size_t size, at;
    struct term *terms;
    uint32_t count, capacity;
    int depth;
    bool fold;
    struct fault *fault;
    int rc;
};

static uint32_t regex_refuse(struct reader *r, int rc, const char *what) {
    if (r->rc == 0)
        r->rc =
            fault_set(r->fault, rc, NULL, "%s at byte %zu of the regular expression", what, r->at);
    return 0;
}

static uint32_t add_term(struct reader *r, const struct term *term) {
    if (r->count == r->capacity) {
        uint32_t capacity = r->capacity > 0 ? r->capacity * 2 : 64;
        struct term *grown =
            mem_try_realloc(r->terms, r->capacity * sizeof *grown, capacity * sizeof *grown);
        if (grown == NULL) {
            r->rc = r->rc != 0 ? r->rc : ERR_NOMEM;
            return 0;
        }
        r->terms = grown;
        r->capacity = capacity;
    }
    if (r->count == 0) r->count = 1;
    r->terms[r->count] = *term;
    return r->count++;
}

static uint32_t regex_add_node(struct reader *r, uint32_t node) {
    return add_term(r, &(struct term){.kind = TERM_NODE, .node = node});
}

/* ---- Characters ---- */

static bool at_end(const struct reader *r) {
    return r->at >= r->size || r->rc != 0;
}

static bool next_is(const struct reader *r, const char *text) {
    size_t size = strlen(text);
    return r->rc == 0 && r->size - r->at >= size && memcmp(r->text + r->at, text, size) == 0;
}

static bool regex_take(struct reader *r, const char *text) {
    if (!next_is(r, text)) return false;
    r->at += strlen(text);
    return true;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Reads `digits` hexadecimal digits. -1: there are fewer, and nothing was read. */
static int64_t take_hex(struct reader *r, size_t digits) {
    int64_t value = 0;
    if (r->size - r->at < digits) return -1;
    for (size_t i = 0; i < digits; i++) {
        int digit = hex_digit(r->text[r->at + i]);
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    r->at += digits;
    return value;
}

static int64_t take_braced(struct reader *r) {
    int64_t value = 0;
    while (!at_end(r) && hex_digit(r->text[r->at]) >= 0 && value <= POINT_MAX)
        value = value << 4 | hex_digit(r->text[r->at++]);
    return regex_take(r, "}") && value <= POINT_MAX ? value : -1;
}

/* Reads what follows \u: four digits, a pair of surrogates, or {digits}. */
static int64_t take_unicode(struct reader *r) {
    if (regex_take(r, "{")) return take_braced(r);
    int64_t value = take_hex(r, 4), low;
    size_t back = r->at;
    if (value < 0xD800 || value > 0xDBFF || !regex_take(r, "\\u")) return value;
    low = take_hex(r, 4);
    if (low >= 0xDC00 && low <= 0xDFFF) return 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00);
    r->at = back;
    return value;
}

/* Returns the character of an escape whose letter was read; -1: refused. */
static int64_t escaped_point(struct reader *r, uint32_t letter) {
    static const char names[] = "tnvfr0", values[] = "\t\n\v\f\r";
    const char *name = letter < 128 && letter != 0 ? strchr(names, (int)letter) : NULL;
    if (name != NULL) return values[name - names];
    int64_t value;
    switch (letter) {
    case 'x':
        value = take_hex(r, 2);
        break;
    case 'u':
        value = take_unicode(r);
        break;
    case 'U':
        value = take_hex(r, 8);
        break;
    case 'c':
        if (at_end(r)) return regex_refuse(r, ERR_INVALID, "an unfinished escape"), -1;
        return r->text[r->at++] & 31;
    case 'a':
        return 7;
    default:
        if (letter >= '1' && letter <= '9')
            return regex_refuse(r, ERR_UNSUPPORTED, "a back reference, which is not supported,"),
                   -1;
        if (letter < 128 && (letter | 32) >= 'a' && (letter | 32) <= 'z')
            return regex_refuse(r, ERR_UNSUPPORTED, "an escape that is not supported"), -1;
        return letter;
    }
    if (value < 0 || value > POINT_MAX)
        return regex_refuse(r, ERR_INVALID, "an escape without its hexadecimal digits"), -1;
    return value;
}

/* Adds \d, \w, \s or a complement of these; false: another letter. */
static bool regex_add_named(struct point_set *set, uint32_t letter) {
    static const struct point_range spaces[] = {
        {9, 13},          {32, 32},         {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
        {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    struct point_set named = {0};
    switch (letter | 32) {
    case 'w':
        point_set_add(&named, 'A', 'Z');
        point_set_add(&named, 'a', 'z');
        point_set_add(&named, '_', '_');
        point_set_add(&named, '0', '9');
        break;
    case 'd':
        point_set_add(&named, '0', '9');
        break;
    case 's':
        for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++)
            point_set_add(&named, spaces[i].first, spaces[i].last);
        break;
    default:
        return false;
    }
    if (letter < 'a') point_set_negate(&named);
    point_set_join(set, &named);
    point_set_close(&named);
    return true;
}

static uint32_t finish_set(struct reader *r, struct point_set *set) {
    if (r->fold) point_set_fold(set);
    uint32_t node = r->rc == 0 ? point_set_node(r->pool, set) : NODE_NONE;
    point_set_close(set);
    return regex_add_node(r, node);
}

static uint32_t read_escape(struct reader *r) {
    struct point_set set = {0};
    if (at_end(r)) return regex_refuse(r, ERR_INVALID, "an unfinished escape");
    uint32_t letter = point_read(r->text, r->size, &r->at);
    if (letter == 'b' || letter == 'B')
        return regex_refuse(r, ERR_UNSUPPORTED, "a word border, which is not supported,");
    if (letter == 'p' || letter == 'P')
        return regex_refuse(r, ERR_UNSUPPORTED, "a Unicode property, which is not supported,");
    if (letter == 'A') return add_term(r, &(struct term){.kind = TERM_BEGIN, .asserts = true});
    if (letter == 'z' || letter == 'Z')
        return add_term(r, &(struct term){.kind = TERM_END, .asserts = true});
    if (!regex_add_named(&set, letter)) {
        int64_t point = escaped_point(r, letter);
        if (point >= 0) point_set_add(&set, (uint32_t)point, (uint32_t)point);
    }
    return finish_set(r, &set);
}

/* Reads a member of a character class. Returns the character; -1: it was a named set, which has
 * been added. */
static int64_t regex_read_member(struct reader *r, struct point_set *set) {
    uint32_t point = point_read(r->text, r->size, &r->at);
    if (point != '\\') return point;
    if (at_end(r)) return regex_refuse(r, ERR_INVALID, "an unfinished escape"), -1;
    point = point_read(r->text, r->size, &r->at);
    if (point == 'b') return 8;
    if (point == 'p' || point == 'P')
        return regex_refuse(r, ERR_UNSUPPORTED, "a Unicode property, which is not supported,"), -1;
    if (regex_add_named(set, point)) return -1;
    return escaped_point(r, point);
}

static uint32_t regex_read_class(struct reader *r) {
    struct point_set set = {0};
    bool negative = regex_take(r, "^");
    while (!at_end(r) && !next_is(r, "]")) {
        int64_t low = regex_read_member(r, &set), high = low;
        if (next_is(r, "-") && r->at + 1 < r->size && r->text[r->at + 1] != ']') {
            r->at++;
            high = regex_read_member(r, &set);
            if (low >= 0 && high >= 0 && low > high)
                regex_refuse(r, ERR_INVALID, "a range whose ends are in the wrong order");
            if (low < 0 || high < 0) { /* in [\w-.] the dash is one of the members */
                point_set_add(&set, '-', '-');
                if (high >= 0) low = high;
                if (low >= 0) high = low;
            }
        }
        if (low >= 0 && high >= 0) point_set_add(&set, (uint32_t)low, (uint32_t)high);
    }
    if (!regex_take(r, "]")) regex_refuse(r, ERR_INVALID, "a class without its ']'");
    if (r->fold) point_set_fold(&set);
    if (negative) point_set_negate(&set);
    uint32_t node = r->rc == 0 ? point_set_node(r->pool, &set) : NODE_NONE;
    point_set_close(&set);
    return regex_add_node(r, node);
}

static uint32_t read_dot(struct reader *r) {
    struct point_set set = {0};
    point_set_add(&set, '\n', '\n');
    point_set_add(&set, '\r', '\r');
    point_set_add(&set, 0x2028, 0x2029);
    point_set_negate(&set);
    return finish_set(r, &set);
}

/* ---- Groups ---- */

static uint32_t regex_read_alternatives(struct reader *r);

static uint32_t read_ahead(struct reader *r, bool negative) {
    uint32_t inner = regex_read_alternatives(r);
    if (!regex_take(r, ")")) regex_refuse(r, ERR_INVALID, "a group without its ')'");
    return add_term(
        r,
        &(struct term){.kind = TERM_AHEAD, .asserts = true, .negative = negative, .last = inner});
}

/* Reads the flags of (?i) or (?i:...); true: a group follows. */
static bool regex_read_flags(struct reader *r) {
    bool on = true;
    for (; !at_end(r) && !next_is(r, ")") && !next_is(r, ":"); r->at++) {
        char flag = r->text[r->at];
        if (flag == '-')
            on = false;
        else if (flag == 'i')
            r->fold = on;
        else if (flag != 'u' && (flag != 's' || on))
            regex_refuse(r, ERR_UNSUPPORTED, "a flag that is not supported");
    }
    return regex_take(r, ":");
}

static uint32_t regex_read_group(struct reader *r) {
    bool fold = r->fold;
    if (++r->depth > CONSTRAIN_DEPTH_MAX)
        return regex_refuse(r, ERR_LIMIT, "groups more than 256 levels deep");
    if (regex_take(r, "?")) {
        if (next_is(r, "<=") || next_is(r, "<!"))
            return regex_refuse(r, ERR_UNSUPPORTED, "a look-behind, which is not supported,");
        bool negative = next_is(r, "!");
        if (regex_take(r, "=") || regex_take(r, "!")) {
            uint32_t ahead = read_ahead(r, negative);
            r->fold = fold;
            r->depth--;
            return ahead;
        }
        if (regex_take(r, ">"))
            return regex_refuse(r, ERR_UNSUPPORTED, "an atomic group, which is not supported,");
        if (regex_take(r, "P<") || regex_take(r, "<")) {
            while (!at_end(r) && !next_is(r, ">")) r->at++;
            if (!regex_take(r, ">")) regex_refuse(r, ERR_INVALID, "a group's name without its '>'");
        } else if (!regex_take(r, ":") && !regex_read_flags(r)) { /* (?i) applies to what follows */
            r->depth--;
            if (!regex_take(r, ")")) return regex_refuse(r, ERR_INVALID, "a group without its ')'");
            return regex_add_node(r, NODE_EMPTY);
        }
    }
    uint32_t term = regex_read_alternatives(r);
    if (!regex_take(r, ")")) regex_refuse(r, ERR_INVALID, "a group without its ')'");
    r->fold = fold;
    r->depth--;
    return term;
}

static uint32_t regex_read_atom(struct reader *r) {
    if (regex_take(r, "(")) return regex_read_group(r);
    if (regex_take(r, "[")) return regex_read_class(r);
    if (regex_take(r, ".")) return read_dot(r);
    if (regex_take(r, "\\")) return read_escape(r);
    if (regex_take(r, "^")) return add_term(r, &(struct term){.kind = TERM_BEGIN, .asserts = true});
    if (regex_take(r, "$")) return add_term(r, &(struct term){.kind = TERM_END, .asserts = true});
    if (next_is(r, "*") || next_is(r, "+") || next_is(r, "?"))
        return regex_refuse(r, ERR_INVALID, "a quantifier with nothing before it");
    struct point_set set = {0};
    uint32_t point = point_read(r->text, r->size, &r->at);
    point_set_add(&set, point, point);
    return finish_set(r, &set);
}

/* Reads a decimal number; UINT32_MAX: there is none. */
static uint32_t regex_read_number(struct reader *r) {
    uint64_t value = 0;
    size_t begin = r->at;
    for (; !at_end(r) && r->text[r->at] >= '0' && r->text[r->at] <= '9'; r->at++)
        if (value <= CONSTRAIN_REPEAT_MAX) value = value * 10 + (uint64_t)(r->text[r->at] - '0');
    if (r->at == begin) return UINT32_MAX;
    if (value > CONSTRAIN_REPEAT_MAX)
        regex_refuse(r, ERR_LIMIT, "a repetition of more than 1000000 times");
    return (uint32_t)value;
}

/* Reads {3}, {3,} or {3,5}. Any other brace is text (false). */
static bool regex_read_bounds(struct reader *r, uint32_t *min, uint32_t *max) {
    size_t back = r->at;
    if (regex_take(r, "{")) {
        *min = *max = regex_read_number(r);
        if (*min != UINT32_MAX && regex_take(r, ",")) {
            *max = regex_read_number(r); /* UINT32_MAX is NODE_ENDLESS */
        }
        if (*min != UINT32_MAX && regex_take(r, "}")) return true;
    }
    r->at = back;
    return false;
}

static bool read_quantifier(struct reader *r, uint32_t *min, uint32_t *max) {
    *min = 0;
    *max = NODE_ENDLESS;
    if (regex_take(r, "+"))
        *min = 1;
    else if (regex_take(r, "?"))
        *max = 1;
    else if (!regex_take(r, "*") && !regex_read_bounds(r, min, max))
        return false;
    if (*min > *max)
        regex_refuse(r, ERR_INVALID, "a repetition whose bounds are in the wrong order");
    regex_take(r, "?"); /* a lazy quantifier describes the same texts */
    if (next_is(r, "+"))
        regex_refuse(r, ERR_UNSUPPORTED, "a possessive quantifier, not supported,");
    return true;
}

static uint32_t read_term(struct reader *r) {
    uint32_t term = regex_read_atom(r), min, max;
    for (int count = 1; r->rc == 0 && read_quantifier(r, &min, &max); count++) {
        if (r->rc == 0 && count > CONSTRAIN_QUANTIFIERS)
            return regex_refuse(r, ERR_LIMIT, "too many quantifiers in a row");
        if (r->terms[term].asserts)
            return regex_refuse(r, ERR_UNSUPPORTED,
                                "an assertion inside a repetition, not supported,");
        term =
            add_term(r, &(struct term){.kind = TERM_REPEAT, .last = term, .min = min, .max = max});
    }
    return term;
}

/* Makes one term of a list of children, given by the last of them. */
static uint32_t regex_add_list(struct reader *r, enum term_kind kind, uint32_t last) {
    bool asserts = false;
    if (r->rc != 0) return 0;
    if (last == 0) return regex_add_node(r, NODE_EMPTY);
    if (r->terms[last].before == 0) return last;
    for (uint32_t i = last; i != 0; i = r->terms[i].before) asserts |= r->terms[i].asserts;
    return add_term(r, &(struct term){.kind = kind, .asserts = asserts, .last = last});
}

static bool takes_characters(const struct term *term) {
    if (term->kind == TERM_NODE) return term->node != NODE_EMPTY;
    return term->kind == TERM_SEQ || term->kind == TERM_ALT || term->kind == TERM_REPEAT;
}

static uint32_t regex_read_sequence(struct reader *r) {
    uint32_t last = 0;
    bool opens = true;
    while (!at_end(r) && !next_is(r, "|") && !next_is(r, ")")) {
        uint32_t term = read_term(r);
        if (r->rc != 0) return 0;
        r->terms[term].before = last;
        r->terms[term].opens = opens;
        opens = opens && !takes_characters(&r->terms[term]);
        last = term;
    }
    return regex_add_list(r, TERM_SEQ, last);
}

static uint32_t regex_read_alternatives(struct reader *r) {
    uint32_t last = 0;
    do {
        uint32_t term = regex_read_sequence(r);
        if (r->rc != 0) return 0;
        r->terms[term].before = last;
        r->terms[term].opens = true;
        last = term;
    } while (regex_take(r, "|"));
    return regex_add_list(r, TERM_ALT, last);
}

/* ---- Nodes ---- */

/* Builds a term without assertions. */
static uint32_t regex_plain_node(struct reader *r, uint32_t id) {
    struct term term = r->terms[id];
    uint32_t node = NODE_EMPTY, mark;
    switch (term.kind) {
    case TERM_NODE:
        return term.node;
    case TERM_REPEAT:
        return node_repeat(r->pool, regex_plain_node(r, term.last), term.min, term.max);
    case TERM_SEQ:
        for (uint32_t i = term.last; i != 0; i = r->terms[i].before)
            node = node_seq(r->pool, regex_plain_node(r, i), node);
        return node;
    case TERM_ALT:
        mark = node_list_open(r->pool);
        for (uint32_t i = term.last; i != 0; i = r->terms[i].before)
            node_list_add(r->pool, regex_plain_node(r, i));
        return node_list_alt(r->pool, mark);
    default:
        return regex_refuse(r, ERR_INTERNAL, "an assertion out of place");
    }
}

/* Builds the term followed by `rest`. `begins`: the term is at the beginning of the text. */
static uint32_t regex_build(struct reader *r, uint32_t id, uint32_t rest, bool begins);

static uint32_t build_ahead(struct reader *r, const struct term *term, uint32_t rest, bool begins) {
    uint32_t all = node_any_text(r->pool);
    uint32_t seen = regex_build(r, term->last, all, begins);
    if (term->negative) seen = node_and2(r->pool, all, node_not(r->pool, seen));
    return node_live(r->pool, node_and2(r->pool, rest, seen));
}

static uint32_t regex_build(struct reader *r, uint32_t id, uint32_t rest, bool begins) {
    struct term term = r->terms[id];
    uint32_t mark;
    if (r->rc != 0 || r->pool->rc != 0) return NODE_NONE;
    if (!term.asserts) return node_seq(r->pool, regex_plain_node(r, id), rest);
    switch (term.kind) {
    case TERM_BEGIN:
        return begins ? rest : NODE_NONE;
    case TERM_END:
        return r->pool->nodes[rest].nullable ? NODE_EMPTY : NODE_NONE;
    case TERM_AHEAD:
        return build_ahead(r, &term, rest, begins);
    case TERM_SEQ:
        for (uint32_t i = term.last; i != 0; i = r->terms[i].before)
            rest = regex_build(r, i, rest, begins && r->terms[i].opens);
        return rest;
    case TERM_ALT:
        mark = node_list_open(r->pool);
        for (uint32_t i = term.last; i != 0; i = r->terms[i].before)
            node_list_add(r->pool, regex_build(r, i, rest, begins));
        return node_list_alt(r->pool, mark);
    default:
        return regex_refuse(r, ERR_INTERNAL, "an assertion out of place");
    }
}

static uint32_t build_whole(struct reader *r, uint32_t id, enum regex_match match) {
    if (match == REGEX_WHOLE) return regex_build(r, id, NODE_EMPTY, true);
    uint32_t any = node_any_text(r->pool),
             some = node_repeat(r->pool, node_character(r->pool), 1, NODE_ENDLESS);
    if (!r->terms[id].asserts) return node_seq(r->pool, any, regex_build(r, id, any, false));
    return node_alt2(r->pool, regex_build(r, id, any, true),
                     node_seq(r->pool, some, regex_build(r, id, any, false)));
}

static int regex_compile_pattern(struct reader *r, enum regex_match match, uint32_t *out) {
    *out = NODE_NONE;
    if (r->size > CONSTRAIN_TEXT_BYTES) regex_refuse(r, ERR_LIMIT, "more than 4194304 bytes");
    if (!utf8_valid(r->text, r->size)) regex_refuse(r, ERR_INVALID, "bytes that are not UTF-8");
    uint32_t root = r->rc == 0 ? regex_read_alternatives(r) : 0;
    if (r->rc == 0 && r->at < r->size) regex_refuse(r, ERR_INVALID, "a ')' without its '('");
    if (r->rc == 0) *out = node_live(r->pool, build_whole(r, root, match));
    mem_free(r->terms);
    return r->rc != 0 ? r->rc : r->pool->rc;
}

int regex_compile(struct node_pool *pool, const char *text, size_t size, enum regex_match match,
                  uint32_t *out, struct fault *fault) {
    struct reader r = {.pool = pool, .text = text, .size = size, .fault = fault};
    return regex_compile_pattern(&r, match, out);
}

int regex_compile_part(struct node_pool *pool, const char *text, size_t size, bool fold,
                       uint32_t *out, struct fault *fault) {
    struct reader r = {.pool = pool, .text = text, .size = size, .fold = fold, .fault = fault};
    return regex_compile_pattern(&r, REGEX_WHOLE, out);
}
