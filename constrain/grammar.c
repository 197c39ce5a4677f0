#include "constrain/grammar.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "constrain/grammar_int.h"
#include "constrain/rules.h"
#include "constrain/unicode.h"

/* ---- Faults ---- */

static void grammar_place_of(const struct grammar *g, size_t at, size_t *line, size_t *column) {
    *line = *column = 1;
    for (size_t i = 0; i < at && i < g->size; i++) {
        if (g->text[i] == '\n') {
            ++*line;
            *column = 1;
        } else if (((unsigned char)g->text[i] & 0xC0) != 0x80) {
            ++*column;
        }
    }
}

uint32_t grammar_refuse(struct grammar *g, int rc, size_t at, const char *format, ...) {
    char text[320];
    size_t line, column;
    va_list args;
    if (g->rc != 0) return NODE_NONE;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    grammar_place_of(g, at, &line, &column);
    g->rc = fault_set(g->fault, rc, NULL, "line %zu, column %zu: %s", line, column, text);
    return NODE_NONE;
}

/* ---- Characters ---- */

bool grammar_is(const struct grammar *g, size_t at, const char *text) {
    size_t size = strlen(text);
    return at <= g->size && g->size - at >= size && memcmp(g->text + at, text, size) == 0;
}

bool grammar_take(struct grammar *g, const char *text) {
    if (g->rc != 0 || !grammar_is(g, g->at, text)) return false;
    g->at += strlen(text);
    return true;
}

int64_t grammar_number(struct grammar *g) {
    int64_t value = -1;
    size_t begin = g->at;
    for (char c = grammar_peek(g); c >= '0' && c <= '9'; c = grammar_peek(g)) {
        value = (value < 0 ? 0 : value * 10) + (c - '0');
        g->at++;
        if (value <= CONSTRAIN_REPEAT_MAX) continue;
        grammar_refuse(g, ERR_LIMIT, begin, "a repetition of more than %d times",
                       CONSTRAIN_REPEAT_MAX);
        return -1;
    }
    return value;
}

bool grammar_enter(struct grammar *g) {
    if (++g->depth <= CONSTRAIN_DEPTH_MAX) return true;
    grammar_refuse(g, ERR_LIMIT, g->at, "groups more than %d levels deep", CONSTRAIN_DEPTH_MAX);
    return false;
}

static int64_t grammar_hex_escape(struct grammar *g, int digits) {
    int64_t value = 0;
    size_t begin = g->at;
    for (int i = 0; i < digits; i++, g->at++) {
        char c = grammar_peek(g), low = (char)(c | 32);
        int digit = c >= '0' && c <= '9' ? c - '0' : low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
        if (digit < 0) {
            grammar_refuse(g, ERR_INVALID, begin, "expected %d hexadecimal digits", digits);
            return -1;
        }
        value = value << 4 | digit;
    }
    if (value <= POINT_MAX && (value < 0xD800 || value > 0xDFFF)) return value;
    grammar_refuse(g, ERR_INVALID, begin, "expected a Unicode character");
    return -1;
}

int64_t grammar_escape(struct grammar *g) {
    static const char names[] = "nrtbfva0", values[] = "\n\r\t\b\f\v\a";
    char c = grammar_peek(g);
    const char *name = c != '\0' ? strchr(names, c) : NULL;
    if (c != '\0') g->at++;
    if (name != NULL) return values[name - names];
    if (c == 'x') return grammar_hex_escape(g, 2);
    if (c == 'u') return grammar_hex_escape(g, 4);
    if (c == 'U') return grammar_hex_escape(g, 8);
    if (c != '\0' && strchr("\\\"'[]-^/.|(){}*+?$ ", c) != NULL) return c;
    grammar_refuse(g, ERR_INVALID, g->at, "an unknown escape");
    return -1;
}

/* Builds one character; with `fold`, in both cases. */
static uint32_t character(struct grammar *g, uint32_t point, bool fold) {
    struct point_set set = {0};
    point_set_add(&set, point, point);
    if (fold) point_set_fold(&set);
    uint32_t node = point_set_node(g->pool, &set);
    point_set_close(&set);
    return node;
}

/* Builds a text from its end, so that a long one takes linear time. */
uint32_t grammar_quoted(struct grammar *g, bool fold) {
    size_t begin = g->at, count = 0;
    while (!grammar_ended(g) && grammar_peek(g) != '"' && grammar_peek(g) != '\n') {
        if (grammar_peek(g) == '\\') g->at++;
        if (g->at < g->size) (void)point_read(g->text, g->size, &g->at);
        count++;
    }
    size_t end = g->at;
    if (!grammar_take(g, "\""))
        return grammar_refuse(g, ERR_INVALID, begin - 1, "a text without its closing quote");
    if (!fold) fold = grammar_take(g, "i");
    size_t after = g->at;
    uint32_t *points = mem_try_alloc(count + 1, sizeof *points), node = NODE_EMPTY;
    if (points == NULL) {
        g->pool->rc = ERR_NOMEM;
        return NODE_NONE;
    }
    g->at = begin;
    for (count = 0; g->at < end && g->rc == 0; count++) {
        int64_t point = grammar_take(g, "\\") ? grammar_escape(g)
                                              : (int64_t)point_read(g->text, g->size, &g->at);
        points[count] = (uint32_t)point;
    }
    while (count > 0 && g->rc == 0) {
        uint32_t one = character(g, points[--count], fold);
        node = node_seq(g->pool, one, node);
    }
    mem_free(points);
    g->at = after;
    return node;
}

/* ---- Rules ---- */

struct grammar_rule *grammar_find(struct grammar *g, const char *name, size_t size, size_t place) {
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)name[i]) * 16777619u;
    uint32_t *head = &g->heads[(hash ^ hash >> 15) & (GRAMMAR_CHAINS - 1)];
    for (uint32_t i = *head; i != 0; i = g->rules[i - 1].next) {
        struct grammar_rule *rule = &g->rules[i - 1];
        if (!node_work(g->pool, 1)) return NULL;
        if (rule->size == size && memcmp(rule->name, name, size) == 0) return rule;
    }
    uint32_t made = node_rule_open(g->pool);
    if (made == UINT32_MAX ||
        !node_reserve(g->pool, &g->rules, g->count, &g->capacity, sizeof *g->rules, 1))
        return NULL;
    g->rules[g->count] = (struct grammar_rule){
        .name = name, .size = size, .place = place, .rule = made, .next = *head};
    *head = ++g->count;
    return &g->rules[g->count - 1];
}

uint32_t grammar_mention(struct grammar *g, const char *name, size_t size, size_t place) {
    const struct grammar_rule *rule = grammar_find(g, name, size, place);
    return rule != NULL ? node_rule(g->pool, rule->rule) : NODE_NONE;
}

void grammar_define(struct grammar *g, const char *name, size_t size, size_t place, uint32_t body) {
    struct grammar_rule *rule = grammar_find(g, name, size, place);
    if (rule == NULL) return;
    if (rule->defined)
        grammar_refuse(g, ERR_INVALID, place, "the rule '%.*s' is defined twice", (int)size, name);
    rule->defined = true;
    if (g->pool->rc == 0) g->pool->rules[rule->rule] = body;
}

/* ---- The whole ---- */

/* Returns whether a line begins with "name ::=". */
static bool is_gbnf(const struct grammar *g) {
    for (size_t at = 0; at < g->size;) {
        size_t next = at;
        while (next < g->size && (g->text[next] == ' ' || g->text[next] == '\t')) next++;
        size_t name = next;
        while (next < g->size && grammar_is_name(g->text[next])) next++;
        bool named = next > name;
        while (next < g->size && (g->text[next] == ' ' || g->text[next] == '\t')) next++;
        if (named && grammar_is(g, next, "::=")) return true;
        while (next < g->size && g->text[next] != '\n') next++;
        at = next + 1;
    }
    return false;
}

static void check_defined(struct grammar *g) {
    for (uint32_t i = 0; i < g->count && g->rc == 0; i++) {
        const struct grammar_rule *rule = &g->rules[i];
        if (!rule->defined)
            grammar_refuse(g, ERR_INVALID, rule->place, "the rule '%.*s' is not defined",
                           (int)rule->size, rule->name);
    }
}

static uint32_t grammar_prepare(struct grammar *g, uint32_t root) {
    uint32_t rule = 0;
    if (rules_prepare(g->pool, root, &root, &rule) != ERR_UNSUPPORTED || g->pool->rc != 0)
        return root;
    for (uint32_t i = 0; i < g->count; i++)
        if (g->rules[i].rule == rule)
            return grammar_refuse(g, ERR_UNSUPPORTED, g->rules[i].place,
                                  "the rule '%.*s' begins with itself by way of other rules, which "
                                  "is not supported",
                                  (int)g->rules[i].size, g->rules[i].name);
    return NODE_NONE;
}

static uint32_t grammar_read_rules(struct grammar *g) {
    bool gbnf = is_gbnf(g);
    const char *start = gbnf ? "root" : "start";
    if (gbnf)
        gbnf_read(g);
    else
        lark_read(g);
    if (g->rc != 0 || g->pool->rc != 0) return NODE_NONE;
    uint32_t known = g->count, root = grammar_mention(g, start, strlen(start), 0);
    if (g->count > known)
        return grammar_refuse(g, ERR_INVALID, g->size, "there is no rule '%s'", start);
    check_defined(g);
    if (g->rc != 0 || g->pool->rc != 0) return NODE_NONE;
    return grammar_prepare(g, node_seq(g->pool, root, g->behind));
}

int grammar_compile(struct node_pool *pool, const char *text, size_t size, uint32_t *out,
                    struct fault *fault) {
    *out = NODE_NONE;
    if (size > CONSTRAIN_TEXT_BYTES)
        return fault_set(fault, ERR_LIMIT, NULL, "more than %d bytes", CONSTRAIN_TEXT_BYTES);
    if (!utf8_valid(text, size))
        return fault_set(fault, ERR_INVALID, NULL, "bytes that are not UTF-8");
    struct grammar *g = mem_try_alloc(1, sizeof *g);
    if (g == NULL) return pool->rc = ERR_NOMEM;
    *g = (struct grammar){
        .pool = pool, .text = text, .size = size, .behind = NODE_EMPTY, .fault = fault};
    *out = grammar_read_rules(g);
    int rc = g->rc != 0 ? g->rc : pool->rc;
    mem_free(g->rules);
    mem_free(g);
    if (rc != 0) *out = NODE_NONE;
    return rc;
}
