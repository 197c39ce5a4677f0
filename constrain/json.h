/* JSON texts as expressions: values of each type, strings with conditions on their characters, and
 * the white space between the parts.
 *
 * White space may stand behind '{', '[', ',' and ':', and before '}' and ']': none, one space, or a
 * line break and at most CONSTRAIN_SPACE_MAX spaces and tabs (as llama.cpp's grammars for JSON).
 * With more freedom, models tend to write white space without end.
 *
 * A condition on a string's characters is an expression over their UTF-8; json_quote turns it into
 * one over the JSON text between the quotes, where characters that cannot stand for themselves are
 * escaped, in one way each: \" \\ \b \f \n \r \t, \u00XX. Strings without a condition may escape
 * any character. */
#ifndef KEEPD_CONSTRAIN_JSON_H
#define KEEPD_CONSTRAIN_JSON_H

#include <cjson/cJSON.h>

#include "base/buf.h"
#include "constrain/node.h"

/* Expressions that schemas are made of, built once for each language. */
struct json_nodes {
    struct node_pool *pool;
    uint32_t space;
    uint32_t character; /* any character or escape inside a string; it counts as one character */
    uint32_t any_text;  /* characters of strings, not quoted: valid UTF-8 */
    uint32_t string, number, integer, boolean, null;
    uint32_t value, object, array; /* any value (a rule), any object, any array */
    uint32_t comma, colon;         /* with the white space after them */
    uint32_t *quoted;              /* [quoted_capacity] results of json_quote by node, plus 1 */
    uint32_t quoted_capacity;
    uint32_t quoted_any; /* any text, as a JSON string holds it */
};

/* `one_spacing`: there is one space after ',' and ':', and no other white space. */
void json_nodes_open(struct json_nodes *nodes, struct node_pool *pool, bool one_spacing);
void json_nodes_close(struct json_nodes *nodes);

/* Returns the quoted form of a regular expression over characters, without the quotes. */
uint32_t json_quote(struct json_nodes *nodes, uint32_t content);
uint32_t json_string(struct json_nodes *nodes, uint32_t content); /* with the quotes */
/* Returns the texts of one JSON value, in any spacing. Strings may hold U+0000 (base/json.h). */
uint32_t json_literal(struct json_nodes *nodes, const cJSON *value);
void json_add_quoted(struct buf *out,
                     const char *string); /* appends the text that json_name describes */
/* Returns the one quoted form of a string, with the quotes. */
uint32_t json_name(struct json_nodes *nodes, const char *name);

/* "{" members "}" and "[" elements "]" with space inside; `members` and `elements` are not empty,
 * `may_be_empty` allows {} and [] beside them. */
uint32_t json_braces(struct json_nodes *nodes, uint32_t members, bool may_be_empty);
uint32_t json_brackets(struct json_nodes *nodes, uint32_t elements, bool may_be_empty);
uint32_t json_member(struct json_nodes *nodes, uint32_t name, uint32_t value);

#endif
