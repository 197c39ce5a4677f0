/* Arguments of a call that are written as tags, one for each parameter, as Qwen3-Coder does:
 *
 *   <parameter=city>
 *   Paris
 *   </parameter>
 *   <parameter=days>
 *   3
 *   </parameter>
 *   </function>
 *
 * They are given as the JSON text {"city": "Paris", "days": 3}. A line break behind a tag and one
 * before its end are not part of the value. A value is read by the types that its parameter's
 * schema allows (constrain_types). If it allows strings only, the value is a string. Otherwise it
 * is JSON or, if it is none, a literal of Python (tool_literal.h), and if it is neither, a string.
 * Where the schema allows strings, a value of a type that it does not allow is a string, too: 123
 * for a string or null; and only where it allows all types, quotes mean a string. What this makes
 * is always JSON.
 *
 * If the form has marks around raw text (<![CDATA[ and ]]>), a value that begins with the first one
 * is a string up to the second.
 *
 * Where values nest (constrain_tags.item), a value that begins with a tag is an array or an object
 * of tags. The values in them are read as if any type were allowed, because only the types of
 * parameters are known.
 *
 * Objects, arrays and strings in quotes are held back until their end, because only the end shows
 * what they are; longer ones than TOOL_TAGS_LITERAL_MAX are strings.
 *
 * Pure; any thread. As tool_calls.h: what is said does not depend on how the text was cut. */
#ifndef KEEPD_SERVER_OAI_TOOL_TAGS_H
#define KEEPD_SERVER_OAI_TOOL_TAGS_H

#include <stdbool.h>

#include "server/oai/tool_form.h"
#include "server/oai/tool_json.h"
#include "server/oai/tool_literal.h"
#include "server/oai/tool_piece.h"

/* Bytes of a number or a word, including the white space before it, that are held back. */
#define TOOL_TAGS_HELD_MAX    512
#define TOOL_TAGS_LITERAL_MAX ((size_t)1 << 20)

/* The deepest that values nest. */
#define TOOL_TAGS_DEPTH 16

struct tool_parameter {
    const char *name; /* NULL: this row ends the list */
    unsigned types;   /* constrain_types */
};

/* All zero except `form` and `parameters` before the first byte after the marks of the name. */
struct tool_tags {
    const struct tool_form *form;
    const struct tool_parameter *parameters; /* parameters with some types only; NULL: none */
    bool any;       /* a parameter, or a tag of the innermost value, has begun */
    uint8_t depth;  /* values that are open around the present tag */
    uint32_t lists; /* bit d: the value at depth d is an array */
    struct {
        size_t begin, end;
    } outer[TOOL_TAGS_DEPTH]; /* the names of their tags */
    enum {
        TOOL_TAGS_BETWEEN,
        TOOL_TAGS_NAME,
        TOOL_TAGS_OPEN, /* after the name */
        TOOL_TAGS_STRING,
        TOOL_TAGS_LITERAL, /* held back after the name until the value ends */
        TOOL_TAGS_VALUE,   /* JSON or a word, up to value_end */
        TOOL_TAGS_PYTHON,  /* a literal of Python, up to value_end */
        TOOL_TAGS_CLOSE,
        TOOL_TAGS_OVER /* a mark after the arguments was read */
    } place;
    int closed;     /* OVER: how many of the call's end marks were read or skipped */
    unsigned types; /* types of the present parameter */
    size_t name_begin, name_end;
    size_t value, literal,
        value_end;  /* behind the tag and its line break; behind blanks; the end */
    size_t scanned; /* bytes of a literal that were searched */
    bool no_json;   /* `json` cannot read the literal */
    bool raw;       /* STRING: between the marks around raw text */
    struct tool_json json;
    struct tool_literal python;
};

/* Returns the next piece of text[*at, end) and moves *at. TOOL_MORE: there is none, or the
 * arguments are over. */
struct tool_piece tool_tags_next(struct tool_tags *tags, const char *text, size_t *at, size_t end,
                                 bool last);

#endif
