/* Where a value of JSON ends, byte by byte (RFC 8259; at most 64 containers inside each other). */
#ifndef KEEPD_SERVER_OAI_TOOL_JSON_H
#define KEEPD_SERVER_OAI_TOOL_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

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

/* Writes the object or array that `text` begins with. What is still open at the end of the text is
 * closed: a string, with the characters that it has; a member or an element of which not all is
 * there is left out, and a number stays as it is. false: the text is no beginning of JSON. */
bool tool_json_close(const char *text, size_t size, struct buf *out);

/* Is text[0, size) one value of JSON, without white space around it; and one that is a number? */
bool tool_json_is_value(const char *text, size_t size);
bool tool_json_is_number(const char *text, size_t size);

/* Returns whether the byte is white space between the parts of a value. */
static inline bool tool_json_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

#endif
