/* Where a value of JSON ends, byte by byte (RFC 8259; at most 64 containers inside each other). */
#ifndef KEEPD_SERVER_TOOL_JSON_H
#define KEEPD_SERVER_TOOL_JSON_H

#include "server/tool_calls.h"

enum tool_json_step {
    TOOL_JSON_MORE, /* the byte belongs to the value, which goes on */
    TOOL_JSON_DONE, /* the byte ends it */
    TOOL_JSON_BAD   /* the byte cannot follow; the state is of no use any more */
};

/* The value is an object or an array: only their ends can be seen. */
enum tool_json_step tool_json_step(struct tool_json *json, char byte);

#endif
