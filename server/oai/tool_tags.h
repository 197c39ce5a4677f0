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
 * before its end are not part of the value. The value of a parameter whose schema allows strings
 * only is a string. Any other value is what it is as JSON: an object or an array if it begins with
 * a brace or a bracket, a number, true, false or null (also as Python writes them); and a string if
 * it is none of these.
 *
 * Pure; any thread. As tool_calls.h: what is said does not depend on how the text was cut. */
#ifndef KEEPD_SERVER_OAI_TOOL_TAGS_H
#define KEEPD_SERVER_OAI_TOOL_TAGS_H

#include <stdbool.h>

#include "server/oai/tool_json.h"
#include "server/oai/tool_piece.h"

/* Bytes of a value that are held back until it shows whether it is a string. */
#define TOOL_TAGS_HELD_MAX 512

/* Zero but for `texts` before the first byte behind the function's tag. */
struct tool_tags {
    const char *const *texts; /* parameters that are strings, NULL at the end; NULL: none */
    bool any;                 /* a parameter has begun */
    enum {
        TOOL_TAGS_BETWEEN,
        TOOL_TAGS_NAME,
        TOOL_TAGS_OPEN, /* at the '>' behind the name */
        TOOL_TAGS_STRING,
        TOOL_TAGS_SCALAR,
        TOOL_TAGS_JSON,
        TOOL_TAGS_REST, /* an object or an array that is no JSON */
        TOOL_TAGS_CLOSE,
        TOOL_TAGS_OVER /* the function's tag is closed */
    } place;
    size_t name_begin, name_end, scalar_end;
    struct tool_json json;
};

/* Returns the next piece of text[*at, end) and moves *at. TOOL_MORE: none, or OVER. */
struct tool_piece tool_tags_next(struct tool_tags *tags, const char *text, size_t *at, size_t end,
                                 bool last);

#endif
