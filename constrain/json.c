#include "constrain/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "constrain/unicode.h"

static uint32_t text_node(struct node_pool *pool, const char *text) {
    return node_text(pool, text, strlen(text));
}

static uint32_t one_of(struct node_pool *pool, const char *bytes) {
    struct byte_set set = {0};
    for (; *bytes != '\0'; bytes++) byte_set_add(&set, (unsigned char)*bytes);
    return node_bytes(pool, &set);
}

/* ---- Strings ---- */

static uint32_t hex_node(struct node_pool *pool) {
    return one_of(pool, "0123456789abcdefABCDEF");
}

/* Builds \uXXXX for one UTF-16 unit that is a character, or for a pair of surrogates. */
static uint32_t unicode_escape(struct node_pool *pool) {
    uint32_t hex = hex_node(pool), hex2 = node_repeat(pool, hex, 2, 2);
    uint32_t low = one_of(pool, "01234567"), high = one_of(pool, "89abAB");
    uint32_t d = one_of(pool, "dD"), last = one_of(pool, "cdefCDEF");
    uint32_t start = text_node(pool, "\\u");
    const uint32_t list[] = {
        node_seq3(pool, one_of(pool, "0123456789abcefABCEF"), hex, hex2),
        node_seq3(pool, d, low, hex2),
        node_seq3(pool, node_seq3(pool, d, high, hex2), start, node_seq3(pool, d, last, hex2))};
    return node_seq(pool, start, node_alt(pool, list, 3));
}

/* Builds the characters that stand for themselves; U+007F is escaped, as other generators of JSON
 * do. */
static uint32_t plain_character(struct node_pool *pool) {
    struct point_set set = {0};
    point_set_add(&set, 0x20, 0x21);
    point_set_add(&set, 0x23, 0x5B);
    point_set_add(&set, 0x5D, 0x7E);
    point_set_add(&set, 0x80, POINT_MAX);
    uint32_t node = point_set_node(pool, &set);
    point_set_close(&set);
    return node;
}

static uint32_t make_character(struct node_pool *pool) {
    const uint32_t list[] = {plain_character(pool),
                             node_seq(pool, text_node(pool, "\\"), one_of(pool, "\"\\/bfnrt")),
                             unicode_escape(pool)};
    return node_alt(pool, list, 3);
}

/* Writes the escape of a byte that cannot stand for itself; false: it can. */
static bool escape_of(unsigned byte, char text[8]) {
    static const char letters[] = "\b\f\n\r\t\"\\", names[] = "bfnrt\"\\";
    const char *letter = byte != 0 && byte < 128 ? strchr(letters, (int)byte) : NULL;
    if (letter != NULL)
        snprintf(text, 8, "\\%c", names[letter - letters]);
    else if (byte < 0x20 || byte == 0x7F)
        snprintf(text, 8, "\\u%04x", byte);
    else
        return false;
    return true;
}

static uint32_t quote_bytes(struct json_nodes *nodes, const struct node *node) {
    struct node_pool *pool = nodes->pool;
    struct byte_set set = pool->sets[node->a], plain = {0};
    char text[8];
    uint32_t list = node_list_open(pool);
    for (unsigned byte = 0; byte < 256; byte++) {
        if (!byte_set_has(&set, byte)) continue;
        if (escape_of(byte, text))
            node_list_add(pool, text_node(pool, text));
        else
            byte_set_add(&plain, byte);
    }
    node_list_add(pool, node_bytes(pool, &plain));
    return node_list_alt(pool, list);
}

static uint32_t quote(struct json_nodes *nodes, uint32_t id);

static uint32_t quote_list(struct json_nodes *nodes, const struct node *node) {
    struct node_pool *pool = nodes->pool;
    bool is_alt = node->kind == NODE_KIND_ALT;
    uint32_t list = node_list_open(pool), all = nodes->quoted_any;
    for (uint32_t i = 0; i < node->b; i++) {
        uint32_t child = quote(nodes, pool->children[node->a + i]);
        if (is_alt)
            node_list_add(pool, child);
        else
            all = node_and2(pool, all, child);
    }
    return is_alt ? node_list_alt(pool, list) : all;
}

/* Quotes a sequence from its end, without recursion: it may be as long as a text. */
static uint32_t quote_seq(struct json_nodes *nodes, uint32_t id) {
    struct node_pool *pool = nodes->pool;
    uint32_t count = 0, node;
    for (node = id; pool->nodes[node].kind == NODE_KIND_SEQ; node = pool->nodes[node].b) count++;
    uint32_t *heads = mem_try_alloc(count, sizeof *heads), result = quote(nodes, node);
    if (heads == NULL) {
        pool->rc = ERR_NOMEM;
        return NODE_NONE;
    }
    node = id;
    for (uint32_t i = 0; i < count; i++, node = pool->nodes[node].b) heads[i] = pool->nodes[node].a;
    for (uint32_t i = count; i-- > 0;) result = node_seq(pool, quote(nodes, heads[i]), result);
    mem_free(heads);
    return result;
}

static uint32_t quote_node(struct json_nodes *nodes, uint32_t id) {
    struct node_pool *pool = nodes->pool;
    struct node node = pool->nodes[id];
    switch ((enum node_kind)node.kind) {
    case NODE_KIND_ALL:
        return nodes->quoted_any;
    case NODE_KIND_BYTES:
        return quote_bytes(nodes, &node);
    case NODE_KIND_SEQ:
        return quote_seq(nodes, id);
    case NODE_KIND_ALT:
    case NODE_KIND_AND:
        return quote_list(nodes, &node);
    case NODE_KIND_NOT:
        return node_and2(pool, nodes->quoted_any, node_not(pool, quote(nodes, node.a)));
    case NODE_KIND_REPEAT:
        return node_repeat(pool, quote(nodes, node.a), node.min, node.max);
    default:
        return id;
    }
}

/* Returns the quoted form of a node. It depends on the node alone, so results of earlier calls are
 * kept. */
static uint32_t quote(struct json_nodes *nodes, uint32_t id) {
    struct node_pool *pool = nodes->pool;
    if (pool->rc != 0) return NODE_NONE;
    if (id < nodes->quoted_capacity && nodes->quoted[id] != 0) return nodes->quoted[id] - 1;
    uint32_t result = quote_node(nodes, id);
    if (!node_reserve(pool, &nodes->quoted, 0, &nodes->quoted_capacity, sizeof *nodes->quoted,
                      id + 1))
        return NODE_NONE;
    nodes->quoted[id] = result + 1;
    return result;
}

uint32_t json_quote(struct json_nodes *nodes, uint32_t content) {
    struct node_pool *pool = nodes->pool;
    if (nodes->quoted_any == NODE_NONE) { /* any_text holds neither AND nor NOT, so `quote` does not
                                             need quoted_any for it */
        nodes->quoted_any = quote(nodes, nodes->any_text);
        pool->universe[1] = nodes->quoted_any;
    }
    return node_live(pool, quote(nodes, content));
}

/* Builds strings between the notation's marks, which they do not contain. */
static uint32_t marked_string(struct json_nodes *nodes, uint32_t content) {
    struct node_pool *pool = nodes->pool;
    uint32_t mark = text_node(pool, nodes->notation->mark), any = nodes->any_text;
    uint32_t without = node_not(pool, node_seq3(pool, any, mark, any));
    return node_seq3(pool, mark, node_live(pool, node_and2(pool, content, without)), mark);
}

uint32_t json_string(struct json_nodes *nodes, uint32_t content) {
    if (nodes->notation != NULL && nodes->notation->mark != NULL)
        return marked_string(nodes, content);
    uint32_t quotes = text_node(nodes->pool, "\"");
    return node_seq3(nodes->pool, quotes, json_quote(nodes, content), quotes);
}

/* ---- Literals ---- */

void json_add_quoted(struct buf *out, const char *string) {
    size_t size = strlen(string);
    char *text = mem_try_alloc(size + 1, 1), escape[8];
    if (text == NULL) {
        out->failed = true;
        return;
    }
    json_text(string, text, &size);
    buf_char(out, '"');
    for (size_t i = 0; i < size; i++) {
        if (escape_of((unsigned char)text[i], escape))
            buf_str(out, escape);
        else
            buf_char(out, text[i]);
    }
    buf_char(out, '"');
    mem_free(text);
}

static uint32_t marked_text(struct json_nodes *nodes, const char *string) {
    size_t size = strlen(string);
    char *text = mem_try_alloc(size + 1, 1);
    if (text == NULL) {
        nodes->pool->rc = ERR_NOMEM;
        return NODE_NONE;
    }
    json_text(string, text, &size);
    uint32_t node = marked_string(nodes, node_text(nodes->pool, text, size));
    mem_free(text);
    return node;
}

static uint32_t string_node(struct json_nodes *nodes, const char *string) {
    struct buf text;
    if (nodes->notation != NULL && nodes->notation->mark != NULL) return marked_text(nodes, string);
    buf_open(&text, 8 * strlen(string) + 16);
    json_add_quoted(&text, string);
    if (text.failed) nodes->pool->rc = ERR_NOMEM;
    uint32_t node = text.failed ? NODE_NONE : node_text(nodes->pool, text.data, text.size);
    buf_close(&text);
    return node;
}

/* ---- Names ---- */

/* Returns whether a name may stand without quotes (server/oai/tool_literal.c). */
static bool is_unquoted_name(const char *name) {
    size_t size = strlen(name);
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)name[i] <= 0x20 || strchr("=:,(){}[]<>\"'\\\x7F\xC0", name[i]))
            return false; /* 0xC0 begins U+0000 (base/json.h) */
    return size > 0;
}

/* Builds the plain names that any language of programs has. */
static uint32_t plain_names(struct node_pool *pool) {
    struct byte_set first = {0}, rest;
    byte_set_range(&first, 'A', 'Z');
    byte_set_range(&first, 'a', 'z');
    byte_set_add(&first, '_');
    rest = first;
    byte_set_range(&rest, '0', '9');
    byte_set_add(&rest, '-');
    byte_set_add(&rest, '.');
    return node_seq(pool, node_bytes(pool, &first),
                    node_repeat(pool, node_bytes(pool, &rest), 0, NODE_ENDLESS));
}

uint32_t json_name(struct json_nodes *nodes, const char *name, bool outermost) {
    struct node_pool *pool = nodes->pool;
    if (!constrain_plain_names(nodes->notation, outermost)) return string_node(nodes, name);
    if (is_unquoted_name(name)) return text_node(pool, name);
    return nodes->notation->mark != NULL ? string_node(nodes, name) : NODE_NONE;
}

uint32_t json_names(struct json_nodes *nodes, uint32_t content, bool outermost) {
    if (!constrain_plain_names(nodes->notation, outermost))
        return content == nodes->any_text ? nodes->string : json_string(nodes, content);
    return node_live(nodes->pool, node_and2(nodes->pool, content, plain_names(nodes->pool)));
}

/* Returns null, false or true as they are written. */
static const char *notation_word(const struct json_nodes *nodes, int index) {
    static const char *const words[] = {"null", "false", "true"};
    return nodes->notation != NULL ? nodes->notation->words[index] : words[index];
}

/* Builds all members of an object, or all elements of an array. */
static uint32_t literal_children(struct json_nodes *nodes, const cJSON *value) {
    const cJSON *child;
    uint32_t list = NODE_EMPTY;
    cJSON_ArrayForEach(child, value) {
        uint32_t node = json_literal(nodes, child);
        if (cJSON_IsObject(value))
            node = json_member(nodes, json_name(nodes, child->string, false), node);
        if (list != NODE_EMPTY) node = node_seq(nodes->pool, nodes->comma, node);
        list = node_seq(nodes->pool, list, node);
    }
    return list;
}

uint32_t json_literal(struct json_nodes *nodes, const cJSON *value) {
    if (nodes->pool->rc != 0) return NODE_NONE;
    if (cJSON_IsString(value)) return string_node(nodes, value->valuestring);
    if (cJSON_IsObject(value)) return json_braces(nodes, literal_children(nodes, value), false);
    if (cJSON_IsArray(value)) return json_brackets(nodes, literal_children(nodes, value), false);
    if (cJSON_IsBool(value) || cJSON_IsNull(value))
        return text_node(nodes->pool, notation_word(nodes, cJSON_IsNull(value)   ? 0
                                                           : cJSON_IsTrue(value) ? 2
                                                                                 : 1));
    struct buf text;
    buf_open(&text, 1 << 20);
    json_write_node(&text, value);
    uint32_t node = text.failed ? NODE_NONE : node_text(nodes->pool, text.data, text.size);
    if (text.failed) nodes->pool->rc = ERR_NOMEM;
    buf_close(&text);
    return node;
}

/* ---- Structures ---- */

static uint32_t enclose(struct json_nodes *nodes, const char *begin, uint32_t inner,
                        bool may_be_empty, const char *end) {
    struct node_pool *pool = nodes->pool;
    if (inner != NODE_EMPTY) inner = node_seq(pool, inner, nodes->space);
    if (may_be_empty) inner = node_option(pool, inner);
    uint32_t rest = node_seq(pool, inner, text_node(pool, end));
    return node_seq3(pool, text_node(pool, begin), nodes->space, rest);
}

uint32_t json_braces(struct json_nodes *nodes, uint32_t members, bool may_be_empty) {
    return enclose(nodes, "{", members, may_be_empty, "}");
}

uint32_t json_brackets(struct json_nodes *nodes, uint32_t elements, bool may_be_empty) {
    return enclose(nodes, "[", elements, may_be_empty, "]");
}

uint32_t json_member(struct json_nodes *nodes, uint32_t name, uint32_t value) {
    return node_seq3(nodes->pool, name, nodes->colon, value);
}

uint32_t json_arguments(struct json_nodes *nodes, uint32_t members, bool may_be_empty) {
    const char *brackets = nodes->notation->brackets;
    return enclose(nodes, (char[]){brackets[0], '\0'}, members, may_be_empty, brackets + 1);
}

uint32_t json_argument(struct json_nodes *nodes, uint32_t name, uint32_t value) {
    return node_seq3(nodes->pool, name, text_node(nodes->pool, nodes->notation->assign), value);
}

/* Builds a list: one or more elements, separated by commas. */
static uint32_t any_list(struct json_nodes *nodes, uint32_t element) {
    struct node_pool *pool = nodes->pool;
    uint32_t more = node_repeat(pool, node_seq(pool, nodes->comma, element), 0, NODE_ENDLESS);
    return node_seq(pool, element, more);
}

static uint32_t make_number(struct json_nodes *nodes) {
    struct node_pool *pool = nodes->pool;
    uint32_t digit = node_range(pool, '0', '9');
    uint32_t digits = node_repeat(pool, digit, 1, NODE_ENDLESS);
    uint32_t fraction = node_seq(pool, text_node(pool, "."), digits);
    /* Above 299 a number may be too large for a double, which strict readers refuse. */
    const uint32_t powers[] = {node_repeat(pool, digit, 1, 2),
                               node_seq(pool, one_of(pool, "012"), node_repeat(pool, digit, 2, 2))};
    uint32_t power = node_seq3(pool, one_of(pool, "eE"), node_option(pool, one_of(pool, "+-")),
                               node_alt(pool, powers, 2));
    return node_seq3(pool, nodes->integer, node_option(pool, fraction), node_option(pool, power));
}

static uint32_t make_integer(struct json_nodes *nodes) {
    struct node_pool *pool = nodes->pool;
    uint32_t more = node_repeat(pool, node_range(pool, '0', '9'), 0, NODE_ENDLESS);
    uint32_t whole =
        node_alt2(pool, text_node(pool, "0"), node_seq(pool, node_range(pool, '1', '9'), more));
    return node_seq(pool, node_option(pool, text_node(pool, "-")), whole);
}

static void make_values(struct json_nodes *nodes) {
    struct node_pool *pool = nodes->pool;
    uint32_t rule = node_rule_open(pool);
    nodes->value = node_rule(pool, rule);
    nodes->array = json_brackets(nodes, any_list(nodes, nodes->value), true);
    uint32_t names = json_names(nodes, nodes->any_text, false);
    nodes->object =
        json_braces(nodes, any_list(nodes, json_member(nodes, names, nodes->value)), true);
    const uint32_t list[] = {nodes->string, nodes->number, nodes->boolean,
                             nodes->null,   nodes->array,  nodes->object};
    uint32_t body = node_alt(pool, list, sizeof list / sizeof *list);
    if (pool->rc == 0) pool->rules[rule] = body;
    if (nodes->notation == NULL) return;
    names = json_names(nodes, nodes->any_text, true);
    nodes->arguments =
        json_arguments(nodes, any_list(nodes, json_argument(nodes, names, nodes->value)), true);
}

static uint32_t make_space(struct node_pool *pool) {
    uint32_t indent = node_repeat(pool, one_of(pool, " \t"), 0, CONSTRAIN_SPACE_MAX);
    const uint32_t list[] = {
        NODE_EMPTY, text_node(pool, " "),
        node_seq3(pool, node_option(pool, text_node(pool, "\r")), text_node(pool, "\n"), indent)};
    return node_alt(pool, list, 3);
}

void json_nodes_close(struct json_nodes *nodes) {
    mem_free(nodes->quoted);
    *nodes = (struct json_nodes){0};
}

void json_nodes_open(struct json_nodes *nodes, struct node_pool *pool, bool one_spacing,
                     const struct constrain_notation *notation) {
    *nodes = (struct json_nodes){.pool = pool, .notation = notation};
    uint32_t quotes = text_node(pool, "\"");
    nodes->space = one_spacing || notation != NULL ? NODE_EMPTY : make_space(pool);
    uint32_t behind = notation != NULL ? text_node(pool, notation->space)
                      : one_spacing    ? text_node(pool, " ")
                                       : nodes->space;
    nodes->comma = node_seq(pool, text_node(pool, ","), behind);
    nodes->colon = node_seq(pool, text_node(pool, ":"), behind);
    nodes->character = make_character(pool);
    pool->universe[0] = nodes->any_text = node_any_text(pool);
    /* a notation reads some of JSON's escapes in another way, so its strings have only those that
     * json_quote writes */
    nodes->string =
        notation != NULL
            ? json_string(nodes, nodes->any_text)
            : node_seq3(pool, quotes, node_repeat(pool, nodes->character, 0, NODE_ENDLESS), quotes);
    nodes->boolean = node_alt2(pool, text_node(pool, notation_word(nodes, 2)),
                               text_node(pool, notation_word(nodes, 1)));
    nodes->null = text_node(pool, notation_word(nodes, 0));
    nodes->integer = make_integer(nodes);
    nodes->number = make_number(nodes);
    make_values(nodes);
}
