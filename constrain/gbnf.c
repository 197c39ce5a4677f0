/* Grammars in GBNF; see constrain/grammar.h. */
#include "constrain/grammar_int.h"
#include "constrain/unicode.h"

static uint32_t gbnf_read_alternatives(struct grammar *g);

/* Skips space, line breaks and comments. */
static void gbnf_skip_space(struct grammar *g) {
    for (; g->at < g->size; g->at++) {
        char c = g->text[g->at];
        if (c == '#')
            while (g->at < g->size && g->text[g->at] != '\n') g->at++;
        else if (c != ' ' && c != '\t' && c != '\r' && c != '\n')
            return;
        if (g->at >= g->size) return;
    }
}

/* Returns the end of the name at `at`; `at` itself if there is none. */
static size_t name_end(const struct grammar *g, size_t at) {
    while (at < g->size && grammar_is_name(g->text[at])) at++;
    return at;
}

/* Returns whether a rule begins here. */
static bool at_rule(const struct grammar *g) {
    size_t end = name_end(g, g->at);
    if (end == g->at) return false;
    while (end < g->size && (g->text[end] == ' ' || g->text[end] == '\t')) end++;
    return grammar_is(g, end, "::=");
}

/* ---- Symbols ---- */

static int64_t gbnf_read_member(struct grammar *g) {
    if (grammar_take(g, "\\")) return grammar_escape(g);
    return point_read(g->text, g->size, &g->at);
}

static uint32_t gbnf_read_class(struct grammar *g) {
    struct point_set set = {0};
    size_t begin = g->at - 1;
    bool negative = grammar_take(g, "^");
    while (!grammar_ended(g) && grammar_peek(g) != ']') {
        int64_t low = gbnf_read_member(g), high = low;
        if (g->rc != 0) break;
        if (grammar_peek(g) == '-' && g->at + 1 < g->size && g->text[g->at + 1] != ']') {
            g->at++;
            high = gbnf_read_member(g);
            if (g->rc == 0 && low > high)
                grammar_refuse(g, ERR_INVALID, begin, "a range whose ends are in the wrong order");
        }
        if (g->rc == 0) point_set_add(&set, (uint32_t)low, (uint32_t)high);
    }
    if (!grammar_take(g, "]")) grammar_refuse(g, ERR_INVALID, begin, "a class without its ']'");
    if (negative) point_set_negate(&set);
    uint32_t node = g->rc == 0 ? point_set_node(g->pool, &set) : NODE_NONE;
    point_set_close(&set);
    return node;
}

static uint32_t gbnf_read_group(struct grammar *g) {
    size_t begin = g->at - 1;
    if (!grammar_enter(g)) return NODE_NONE;
    uint32_t node = gbnf_read_alternatives(g);
    g->depth--;
    if (!grammar_take(g, ")"))
        return grammar_refuse(g, ERR_INVALID, begin, "a group without its ')'");
    return node;
}

static uint32_t read_symbol(struct grammar *g) {
    size_t begin = g->at, end = name_end(g, begin);
    if (grammar_take(g, "\"")) return grammar_quoted(g, false);
    if (grammar_take(g, "[")) return gbnf_read_class(g);
    if (grammar_take(g, "(")) return gbnf_read_group(g);
    if (grammar_take(g, ".")) return node_character(g->pool);
    if (grammar_is(g, begin, "<") || grammar_is(g, begin, "!<"))
        return grammar_refuse(g, ERR_UNSUPPORTED, begin, "a token (<...>), which is not supported");
    if (end == begin)
        return grammar_refuse(g, ERR_INVALID, begin,
                              "expected a text, a class, a group or the name of a rule");
    g->at = end;
    return grammar_mention(g, g->text + begin, end - begin, begin);
}

/* Reads {m}, {m,} or {m,n}; the opening brace has been read. */
static void gbnf_read_bounds(struct grammar *g, int64_t *min, int64_t *max) {
    size_t begin = g->at - 1;
    gbnf_skip_space(g);
    *min = *max = grammar_number(g);
    gbnf_skip_space(g);
    if (grammar_take(g, ",")) {
        gbnf_skip_space(g);
        *max = grammar_number(g);
        gbnf_skip_space(g);
        if (*min < 0 && *max >= 0) *min = 0; /* {,n} */
    }
    if (!grammar_take(g, "}") || *min < 0)
        grammar_refuse(g, ERR_INVALID, begin, "expected bounds such as {2}, {2,} or {2,5}");
    else if (*max >= 0 && *min > *max)
        grammar_refuse(g, ERR_INVALID, begin, "bounds in the wrong order");
}

static uint32_t gbnf_read_repeated(struct grammar *g) {
    uint32_t node = read_symbol(g);
    for (int count = 1; !grammar_ended(g); count++) {
        int64_t min = 0, max = -1;
        size_t begin = g->at;
        if (grammar_take(g, "+"))
            min = 1;
        else if (grammar_take(g, "?"))
            max = 1;
        else if (grammar_take(g, "{"))
            gbnf_read_bounds(g, &min, &max);
        else if (!grammar_take(g, "*"))
            break;
        if (g->rc == 0 && count > CONSTRAIN_QUANTIFIERS)
            return grammar_refuse(g, ERR_LIMIT, begin, "more than %d quantifiers in a row",
                                  CONSTRAIN_QUANTIFIERS);
        if (g->rc != 0) return NODE_NONE;
        node = node_repeat(g->pool, node, (uint32_t)min, max < 0 ? NODE_ENDLESS : (uint32_t)max);
    }
    return node;
}

/* ---- Rules ---- */

static uint32_t gbnf_read_sequence(struct grammar *g) {
    uint32_t mark = g->pool->scratch_count, node = NODE_EMPTY;
    for (gbnf_skip_space(g); !grammar_ended(g) && grammar_peek(g) != '|' &&
                             grammar_peek(g) != ')' && (g->depth > 0 || !at_rule(g));
         gbnf_skip_space(g))
        node_push(g->pool, gbnf_read_repeated(g));
    while (g->pool->scratch_count > mark) node = node_seq(g->pool, node_pop(g->pool), node);
    return node;
}

static uint32_t gbnf_read_alternatives(struct grammar *g) {
    uint32_t list = node_list_open(g->pool);
    do node_list_add(g->pool, gbnf_read_sequence(g));
    while (grammar_take(g, "|"));
    return node_list_alt(g->pool, list);
}

void gbnf_read(struct grammar *g) {
    for (gbnf_skip_space(g); !grammar_ended(g); gbnf_skip_space(g)) {
        size_t begin = g->at, end = name_end(g, begin);
        if (!at_rule(g)) {
            grammar_refuse(g, ERR_INVALID, begin, "expected a rule, 'name ::= ...'");
            return;
        }
        for (g->at = end; !grammar_take(g, "::=");) g->at++;
        uint32_t body = gbnf_read_alternatives(g);
        if (g->rc == 0 && grammar_peek(g) == ')')
            grammar_refuse(g, ERR_INVALID, g->at, "a ')' without its '('");
        if (g->rc == 0 && g->pool->rc == 0)
            grammar_define(g, g->text + begin, end - begin, begin, body);
    }
}
