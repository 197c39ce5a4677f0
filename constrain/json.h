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
#include "constrain/constrain.h"
#include "constrain/node.h"

/* Expressions that schemas are made of, built once for each language. */
struct json_nodes {
    struct node_pool *pool;
    const struct constrain_notation *notation; /* NULL: JSON */
    uint32_t space;
    uint32_t character; /* any character or escape inside a string; it counts as one character */
    uint32_t any_text;  /* characters of strings, not quoted: valid UTF-8 */
    uint32_t string, number, integer, boolean, null;
    uint32_t value, object, array; /* any value (a rule), any object, any array */
    uint32_t arguments;            /* any outermost object; NODE_NONE in JSON */
    uint32_t comma, colon;         /* with the white space after them */
    uint32_t *quoted;              /* [quoted_capacity] results of json_quote by node, plus 1 */
    uint32_t quoted_capacity;
    uint32_t quoted_any; /* any text, as a JSON string holds it */
};

/* `one_spacing`: there is one space after ',' and ':', and no other white space. `notation`: how
 * values are written if not as JSON; then its own spaces are the only ones. */
void json_nodes_open(struct json_nodes *nodes, struct node_pool *pool, bool one_spacing,
                     const struct constrain_notation *notation);
void json_nodes_close(struct json_nodes *nodes);

/* Returns the quoted form of a regular expression over characters, without the quotes. */
uint32_t json_quote(struct json_nodes *nodes, uint32_t content);
uint32_t json_string(struct json_nodes *nodes, uint32_t content); /* with the quotes */
/* Returns the texts of one JSON value, in any spacing. Strings may hold U+0000 (base/json.h). */
uint32_t json_literal(struct json_nodes *nodes, const cJSON *value);
void json_add_quoted(struct buf *out,
                     const char *string); /* appends the text that json_name describes */
/* Returns the one form of the name of a member, with quotes if it has any. `outermost`: in the
 * outermost object of a notation. NODE_NONE: it cannot be written. */
uint32_t json_name(struct json_nodes *nodes, const char *name, bool outermost);
/* Returns the names of members whose characters are of `content`. */
uint32_t json_names(struct json_nodes *nodes, uint32_t content, bool outermost);

/* "{" members "}" and "[" elements "]" with space inside; `members` and `elements` are not empty,
 * `may_be_empty` allows {} and [] beside them. */
uint32_t json_braces(struct json_nodes *nodes, uint32_t members, bool may_be_empty);
uint32_t json_brackets(struct json_nodes *nodes, uint32_t elements, bool may_be_empty);
uint32_t json_member(struct json_nodes *nodes, uint32_t name, uint32_t value);
/* The same for the outermost object of a notation. */
uint32_t json_arguments(struct json_nodes *nodes, uint32_t members, bool may_be_empty);
uint32_t json_argument(struct json_nodes *nodes, uint32_t name, uint32_t value);

#endif
