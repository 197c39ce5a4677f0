/* Grammars in Lark's form; see constrain/grammar.h. */
#include <string.h>

#include "constrain/grammar_int.h"
#include "constrain/regex.h"
#include "constrain/unicode.h"

/* Reads a grammar in Lark's form. The expressions that %ignore names lie on the pool's stack until
 * the end. */
struct lark {
    struct grammar *g;
    uint32_t ignored; /* node of the rule that stands before each terminal; NODE_EMPTY: none */
    bool in_terminal; /* the definition of a terminal is being read: nothing is ignored inside it */
};

/* The terminals that Lark's library `common` documents. */
static const struct {
    const char *name, *pattern;
} common[] = {
    {"DIGIT", "[0-9]"},
    {"HEXDIGIT", "[0-9A-Fa-f]"},
    {"INT", "[0-9]+"},
    {"SIGNED_INT", "[+-]?[0-9]+"},
    {"DECIMAL", "[0-9]+\\.[0-9]*|\\.[0-9]+"},
    {"FLOAT", "[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\\.[0-9]*|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?"},
    {"SIGNED_FLOAT",
     "[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\\.[0-9]*|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"},
    {"NUMBER", "(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?"},
    {"SIGNED_NUMBER", "[+-]?(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?"},
    {"ESCAPED_STRING", "\"(?:[^\"\\\\\\n]|\\\\[^\\n])*\""},
    {"LCASE_LETTER", "[a-z]"},
    {"UCASE_LETTER", "[A-Z]"},
    {"LETTER", "[A-Za-z]"},
    {"WORD", "[A-Za-z]+"},
    {"CNAME", "[A-Za-z_][A-Za-z0-9_]*"},
    {"WS_INLINE", "[ \\t]+"},
    {"WS", "[ \\t\\f\\r\\n]+"},
    {"CR", "\\r"},
    {"LF", "\\n"},
    {"NEWLINE", "(?:\\r?\\n)+"},
    {"SH_COMMENT", "#[^\\n]*"},
    {"CPP_COMMENT", "//[^\\n]*"},
    {"C_COMMENT", "/\\*[^*]*\\*+(?:[^/*][^*]*\\*+)*/"},
    {"SQL_COMMENT", "--[^\\n]*"},
};

static uint32_t lark_read_alternatives(struct lark *l);

/* ---- Characters ---- */

static bool lark_is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static void lark_skip_blank(struct grammar *g) {
    while (g->at < g->size) {
        char c = g->text[g->at];
        if (c == '#' || grammar_is(g, g->at, "//"))
            while (g->at < g->size && g->text[g->at] != '\n') g->at++;
        else if (c == ' ' || c == '\t' || c == '\r')
            g->at++;
        else
            return;
    }
}

static void skip_lines(struct grammar *g) {
    for (lark_skip_blank(g); grammar_peek(g) == '\n' && g->at < g->size; lark_skip_blank(g))
        g->at++;
}

/* Skips space. A line may end inside a group, elsewhere only if the next line begins with '|'. */
static void lark_skip_space(struct lark *l) {
    struct grammar *g = l->g;
    lark_skip_blank(g);
    if (grammar_peek(g) != '\n') return;
    size_t back = g->at;
    skip_lines(g);
    if (g->depth == 0 && grammar_peek(g) != '|') g->at = back;
}

static size_t take_name(struct grammar *g) {
    size_t begin = g->at;
    while (g->at < g->size && lark_is_name(g->text[g->at])) g->at++;
    return g->at - begin;
}

static bool is_terminal(const char *name, size_t size) {
    size_t at = 0;
    while (at < size && name[at] == '_') at++;
    return at < size && name[at] >= 'A' && name[at] <= 'Z';
}

/* Returns a terminal as rules use it: after what is ignored. */
static uint32_t terminal(struct lark *l, uint32_t node) {
    if (l->in_terminal || l->ignored == NODE_EMPTY) return node;
    return node_seq(l->g->pool, l->ignored, node);
}

/* ---- Symbols ---- */

/* Reads an expression whose first '/' has been read. */
static uint32_t read_regex(struct lark *l) {
    struct grammar *g = l->g;
    struct fault fault = {0};
    size_t begin = g->at;
    uint32_t node = NODE_NONE;
    bool fold = false;
    while (!grammar_ended(g) && grammar_peek(g) != '/' && grammar_peek(g) != '\n')
        g->at += grammar_peek(g) == '\\' && g->at + 1 < g->size ? 2 : 1;
    size_t end = g->at;
    if (!grammar_take(g, "/"))
        return grammar_refuse(g, ERR_INVALID, begin - 1, "an expression without its closing '/'");
    for (char c = grammar_peek(g); c >= 'a' && c <= 'z'; c = grammar_peek(g)) {
        if (c != 'i' && c != 'u')
            return grammar_refuse(g, ERR_UNSUPPORTED, g->at,
                                  "the flag '%c' of an expression is not supported", c);
        fold = fold || c == 'i';
        g->at++;
    }
    int rc = regex_compile_part(g->pool, g->text + begin, end - begin, fold, &node, &fault);
    if (rc != 0 && g->pool->rc == 0)
        return grammar_refuse(g, rc, begin, "%s", fault.code != 0 ? fault.text : err_text(rc));
    return node;
}

/* Returns the only character of a text; -1: it has none or several. */
static int64_t single(const struct grammar *g, size_t begin, size_t end) {
    struct grammar one = *g;
    one.size = end;
    one.at = begin;
    if (begin >= end) return -1;
    int64_t point = grammar_take(&one, "\\") ? grammar_escape(&one)
                                             : (int64_t)point_read(one.text, end, &one.at);
    return one.rc == 0 && one.at == end ? point : -1;
}

/* Reads "a".."z" or a text. */
static uint32_t lark_read_text(struct lark *l) {
    struct grammar *g = l->g;
    size_t begin = ++g->at;
    uint32_t node = grammar_quoted(g, false);
    if (g->rc != 0 || !grammar_is(g, g->at, "..")) return node;
    int64_t first = single(g, begin, g->at - 1), last = -1;
    g->at += 2;
    size_t second = g->at + 1;
    if (grammar_take(g, "\"")) {
        (void)grammar_quoted(g, false);
        if (g->rc == 0) last = single(g, second, g->at - 1);
    }
    if (first < 0 || last < first)
        return grammar_refuse(g, ERR_INVALID, begin - 1,
                              "expected a range of two characters such as \"a\"..\"z\"");
    struct point_set set = {0};
    point_set_add(&set, (uint32_t)first, (uint32_t)last);
    node = point_set_node(g->pool, &set);
    point_set_close(&set);
    return node;
}

static uint32_t read_name(struct lark *l) {
    struct grammar *g = l->g;
    size_t begin = g->at, size = take_name(g);
    if (size == 0) {
        const char *what = grammar_peek(g) == '%'   ? "a directive (%%) inside of a rule"
                           : grammar_peek(g) == '<' ? "a token (<...>)"
                           : grammar_peek(g) == '@' ? "a reference to another grammar (@)"
                                                    : NULL;
        if (what != NULL)
            return grammar_refuse(g, ERR_UNSUPPORTED, begin, "%s is not supported", what);
        return grammar_refuse(g, ERR_INVALID, begin,
                              "expected a text, an expression, a group or a name");
    }
    if (grammar_peek(g) == '{')
        return grammar_refuse(g, ERR_UNSUPPORTED, begin, "a template is not supported");
    /* The ignored text stands before each terminal of a rule, so the rule would ignore itself. */
    if (l->in_terminal && l->ignored != NODE_EMPTY && !is_terminal(g->text + begin, size))
        return grammar_refuse(g, ERR_UNSUPPORTED, begin,
                              "the rule '%.*s' in a terminal or in %%ignore is not supported: "
                              "expected terminals",
                              (int)size, g->text + begin);
    uint32_t node = grammar_mention(g, g->text + begin, size, begin);
    return is_terminal(g->text + begin, size) ? terminal(l, node) : node;
}

static uint32_t lark_read_group(struct lark *l, const char *close) {
    struct grammar *g = l->g;
    size_t begin = g->at - 1;
    if (!grammar_enter(g)) return NODE_NONE;
    uint32_t node = lark_read_alternatives(l);
    g->depth--;
    if (!grammar_take(g, close))
        return grammar_refuse(g, ERR_INVALID, begin, "a group without its '%s'", close);
    return *close == ']' ? node_option(g->pool, node) : node;
}

static uint32_t lark_read_atom(struct lark *l) {
    struct grammar *g = l->g;
    if (grammar_take(g, "(")) return lark_read_group(l, ")");
    if (grammar_take(g, "[")) return lark_read_group(l, "]");
    if (grammar_peek(g) == '"') return terminal(l, lark_read_text(l));
    if (grammar_take(g, "/")) return terminal(l, read_regex(l));
    return read_name(l);
}

static uint32_t lark_read_repeated(struct lark *l) {
    struct grammar *g = l->g;
    uint32_t node = lark_read_atom(l);
    int64_t min = 0, max = -1;
    lark_skip_blank(g);
    size_t begin = g->at;
    if (grammar_take(g, "~")) {
        lark_skip_blank(g);
        min = max = grammar_number(g);
        lark_skip_blank(g);
        if (grammar_take(g, "..")) {
            lark_skip_blank(g);
            max = grammar_number(g);
        }
        if (g->rc == 0 && (min < 0 || max < min))
            return grammar_refuse(g, ERR_INVALID, begin, "expected a count such as ~2 or ~2..5");
    } else if (grammar_take(g, "+")) {
        min = 1;
    } else if (grammar_take(g, "?")) {
        max = 1;
    } else if (!grammar_take(g, "*")) {
        return node;
    }
    if (g->rc != 0) return NODE_NONE;
    return node_repeat(g->pool, node, (uint32_t)min, max < 0 ? NODE_ENDLESS : (uint32_t)max);
}

static bool ends_sequence(const struct grammar *g) {
    char c = grammar_peek(g);
    return grammar_ended(g) || c == '|' || c == ')' || c == ']' || c == '\n' ||
           grammar_is(g, g->at, "->");
}

static uint32_t lark_read_sequence(struct lark *l) {
    struct grammar *g = l->g;
    uint32_t mark = g->pool->scratch_count, node = NODE_EMPTY;
    for (lark_skip_space(l); !ends_sequence(g); lark_skip_space(l))
        node_push(g->pool, lark_read_repeated(l));
    while (g->pool->scratch_count > mark) node = node_seq(g->pool, node_pop(g->pool), node);
    if (grammar_take(g, "->")) {
        lark_skip_blank(g);
        if (take_name(g) == 0) grammar_refuse(g, ERR_INVALID, g->at, "expected a name behind '->'");
        lark_skip_space(l);
    }
    return node;
}

static uint32_t lark_read_alternatives(struct lark *l) {
    uint32_t list = node_list_open(l->g->pool);
    do node_list_add(l->g->pool, lark_read_sequence(l));
    while (grammar_take(l->g, "|"));
    return node_list_alt(l->g->pool, list);
}

/* ---- Statements ---- */

static void import_one(struct lark *l, size_t begin, size_t size, size_t alias, size_t alias_size) {
    struct grammar *g = l->g;
    for (size_t i = 0; i < sizeof common / sizeof *common; i++) {
        const char *name = common[i].name;
        uint32_t node = NODE_NONE;
        if (strlen(name) != size || memcmp(name, g->text + begin, size) != 0) continue;
        (void)regex_compile_part(g->pool, common[i].pattern, strlen(common[i].pattern), false,
                                 &node, NULL);
        grammar_define(g, g->text + alias, alias_size, alias, node);
        return;
    }
    grammar_refuse(g, ERR_UNSUPPORTED, begin, "the import of '%.*s' is not supported", (int)size,
                   g->text + begin);
}

/* Reads %import common.NAME, with "-> ALIAS", or %import common (NAME, ...). */
static void read_import(struct lark *l) {
    struct grammar *g = l->g;
    size_t begin = g->at, size = take_name(g);
    if (size != 6 || memcmp(g->text + begin, "common", 6) != 0) {
        grammar_refuse(g, ERR_UNSUPPORTED, begin, "only imports of 'common' are supported");
        return;
    }
    lark_skip_blank(g);
    if (grammar_take(g, ".")) {
        size_t name = g->at, name_size = take_name(g), alias = name, alias_size = name_size;
        lark_skip_blank(g);
        if (grammar_take(g, "->")) {
            lark_skip_blank(g);
            alias = g->at;
            alias_size = take_name(g);
        }
        import_one(l, name, name_size, alias, alias_size);
        return;
    }
    if (!grammar_take(g, "("))
        grammar_refuse(g, ERR_INVALID, g->at, "expected '.' or '(' behind 'common'");
    do {
        skip_lines(g);
        size_t name = g->at, name_size = take_name(g);
        import_one(l, name, name_size, name, name_size);
        skip_lines(g);
    } while (grammar_take(g, ","));
    if (!grammar_take(g, ")")) grammar_refuse(g, ERR_INVALID, g->at, "expected ')'");
}

static void read_directive(struct lark *l) {
    struct grammar *g = l->g;
    size_t begin = g->at++, name = g->at, size = take_name(g);
    lark_skip_blank(g);
    if (size == 6 && memcmp(g->text + name, "ignore", 6) == 0) {
        l->in_terminal = true;
        node_push(g->pool, lark_read_alternatives(l));
        l->in_terminal = false;
    } else if (size == 6 && memcmp(g->text + name, "import", 6) == 0) {
        read_import(l);
    } else {
        grammar_refuse(g, ERR_UNSUPPORTED, begin, "'%%%.*s' is not supported", (int)size,
                       g->text + name);
    }
}

static void lark_read_rule(struct lark *l) {
    struct grammar *g = l->g;
    while (grammar_take(g, "?") || grammar_take(g, "!")) {
    }
    size_t begin = g->at, size = take_name(g);
    if (size == 0) {
        grammar_refuse(g, ERR_INVALID, begin, "expected a rule, 'name: ...'");
        return;
    }
    if (grammar_peek(g) == '{')
        grammar_refuse(g, ERR_UNSUPPORTED, begin, "a template is not supported");
    if (grammar_peek(g) == '[')
        grammar_refuse(g, ERR_UNSUPPORTED, g->at, "attributes of a rule are not supported");
    if (grammar_take(g, ".")) {
        (void)grammar_take(g, "-");
        (void)grammar_number(g);
    }
    lark_skip_blank(g);
    if (!grammar_take(g, ":"))
        grammar_refuse(g, ERR_INVALID, g->at, "expected ':' behind the name of a rule");
    l->in_terminal = is_terminal(g->text + begin, size);
    uint32_t body = lark_read_alternatives(l);
    l->in_terminal = false;
    if (g->rc == 0 && g->pool->rc == 0) grammar_define(g, g->text + begin, size, begin, body);
}

static void read_statement(struct lark *l) {
    struct grammar *g = l->g;
    if (grammar_peek(g) == '%')
        read_directive(l);
    else
        lark_read_rule(l);
    lark_skip_blank(g);
    if (!grammar_ended(g) && grammar_peek(g) != '\n')
        grammar_refuse(g, ERR_INVALID, g->at, "expected the end of the line");
}

/* Returns whether a line begins with %ignore. */
static bool ignores(const struct grammar *g) {
    bool fresh = true;
    for (size_t at = 0; at < g->size; at++) {
        if (fresh && grammar_is(g, at, "%ignore")) return true;
        fresh = g->text[at] == '\n' || (fresh && (g->text[at] == ' ' || g->text[at] == '\t'));
    }
    return false;
}

void lark_read(struct grammar *g) {
    struct lark l = {.g = g, .ignored = NODE_EMPTY};
    uint32_t rule = UINT32_MAX, mark = g->pool->scratch_count;
    if (ignores(g)) {
        rule = node_rule_open(g->pool);
        l.ignored = node_rule(g->pool, rule);
    }
    for (skip_lines(g); !grammar_ended(g); skip_lines(g)) read_statement(&l);
    if (rule == UINT32_MAX || g->rc != 0 || g->pool->rc != 0) return;
    uint32_t list = node_list_open(g->pool);
    for (uint32_t i = mark; i < list; i++) node_list_add(g->pool, g->pool->scratch[i]);
    uint32_t any = node_list_alt(g->pool, list);
    g->pool->scratch_count = mark;
    any = node_repeat(g->pool, any, 0, NODE_ENDLESS);
    if (g->pool->rc == 0) g->pool->rules[rule] = any;
    g->behind = l.ignored;
}
