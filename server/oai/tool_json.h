/* Finds where a JSON value ends, byte by byte (RFC 8259; at most 64 nested containers). */
#ifndef KEEPD_SERVER_OAI_TOOL_JSON_H
#define KEEPD_SERVER_OAI_TOOL_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

/* The state of reading a value; all zero before its first byte. */
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

/* Reads one byte of a value, which must be an object or an array; other values have no visible end.
 */
enum tool_json_step tool_json_step(struct tool_json *json, char byte);

/* Returns the state after a member's value, in an object that is the only open container. */
struct tool_json tool_json_behind_member(void);

/* Writes the object or array that `text` begins with, and closes what is open at the end of the
 * text: a string with the characters that it has. A member or an element that is not complete is
 * left out, and a number stays as it is. false: the text is not the beginning of JSON. */
bool tool_json_close(const char *text, size_t size, struct buf *out);

/* Return whether text[0, size) is one value of JSON without white space around it; and whether that
 * is a number. */
bool tool_json_is_value(const char *text, size_t size);
bool tool_json_is_number(const char *text, size_t size);

/* Returns whether the byte is white space between the parts of a value. */
static inline bool tool_json_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

#endif
