/* Where a value of JSON ends, byte by byte (RFC 8259; at most 64 containers inside each other). */
#ifndef KEEPD_SERVER_OAI_TOOL_JSON_H
#define KEEPD_SERVER_OAI_TOOL_JSON_H

#include <stdbool.h>
#include <stdint.h>

/* How far a value has been read; all zero before its first byte. */
struct tool_json {
    uint64_t arrays; /* bit d: the container at depth d is an array */
    uint8_t depth, state, left;
    bool key;
    const char *literal;
};

enum tool_json_step {
    TOOL_JSON_MORE, /* the byte belongs to the value, which goes on */
    TOOL_JSON_DONE, /* the byte ends it */
    TOOL_JSON_BAD   /* the byte cannot follow; the state is of no use any more */
};

/* Reads one byte of a value that is an object or an array; other values show no end of their own.
 */
enum tool_json_step tool_json_step(struct tool_json *json, char byte);

/* Returns the state behind a member's value in an object that has no other open container. */
struct tool_json tool_json_behind_member(void);

/* Returns whether the byte is white space between the parts of a value. */
static inline bool tool_json_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

#endif
