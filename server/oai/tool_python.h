/* Literals of Python as JSON: dicts, lists, tuples, strings, numbers, True, False and None, nested,
 * as models write them when they were asked for JSON.
 *
 * A literal is read here if Python reads it (ast.literal_eval) and JSON has the value: no sets, no
 * prefixes of strings, no names of characters (\N{...}), no numbers that JSON writes differently,
 * and at most 64 nested containers. Tuples become arrays. Keys that are short numbers, True, False
 * or None become strings, as Python's own JSON writer makes them. */
#ifndef KEEPD_SERVER_OAI_TOOL_PYTHON_H
#define KEEPD_SERVER_OAI_TOOL_PYTHON_H

#include <stdbool.h>

#include "server/oai/tool_piece.h"

/* The state of reading a literal; all zero before its first byte. */
struct tool_python {
    uint64_t dicts, tuples, commas; /* bit d: of the container at depth d; it has a comma */
    uint8_t depth, state;
    bool key;   /* the string is a key */
    char quote; /* the quote of the open string */
};

/* Returns whether text[0, size) is one literal, a container or a string, without white space around
 * it. */
bool tool_python_is(const char *text, size_t size);

/* Returns the next piece of the literal text[*at, end), with the JSON that it means, and moves *at.
 * The text must be a literal. TOOL_MORE: it has ended. */
struct tool_piece tool_python_next(struct tool_python *python, const char *text, size_t *at,
                                   size_t end);

#endif
