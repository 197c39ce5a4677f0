/* Literals of Python and of similar notations as JSON: dicts, lists, tuples, strings, numbers,
 * True, False and None, nested, as models write them when they were asked for JSON, or because
 * their form of calls has them (struct constrain_notation).
 *
 * A literal is read here if Python reads it (ast.literal_eval) and JSON has the value: no sets, no
 * prefixes of strings, no names of characters (\N{...}), no numbers that JSON writes differently,
 * and at most 64 nested containers. Tuples become arrays. Keys that are short numbers, True, False
 * or None become strings, as Python's own JSON writer makes them.
 *
 * In the arguments of a call the outermost object has the notation's brackets, and its names have
 * no quotes; nor have those of inner objects, if strings stand between marks. There true, false and
 * null are read, too, and strings may hold line breaks.
 *
 * The text may grow: what a literal means does not depend on how it was cut. Numbers, words, blanks
 * behind a comma and blanks in a name are held back until it is known what follows, at most
 * TOOL_LITERAL_HELD_MAX bytes. Pure; any thread. */
#ifndef KEEPD_SERVER_OAI_TOOL_LITERAL_H
#define KEEPD_SERVER_OAI_TOOL_LITERAL_H

#include <stdbool.h>

#include "engine/engine_text.h"
#include "server/oai/tool_piece.h"

#define TOOL_LITERAL_HELD_MAX 512

/* The state of reading a literal; all zero except `notation` before its first byte. */
struct tool_literal {
    const struct constrain_notation *notation; /* notation of a call's arguments; NULL: any literal
                                                  of Python */
    uint64_t dicts, tuples, commas; /* bit d: of the container at depth d; it has a comma */
    uint8_t depth, state;
    bool key;   /* the string is a key */
    char quote; /* the quote of the open string */
};

enum tool_literal_step {
    TOOL_LITERAL_PIECE,
    TOOL_LITERAL_MORE, /* the literal goes on after the text */
    TOOL_LITERAL_DONE, /* the literal has ended */
    TOOL_LITERAL_BAD   /* the text is no literal; the state is of no use any more */
};

/* Returns whether text[0, size) is one literal of Python, a container or a string, without white
 * space around it. */
bool tool_literal_is(const char *text, size_t size);

/* Reads the next piece of the literal text[*at, end), with the JSON that it means, and moves *at.
 */
enum tool_literal_step tool_literal_next(struct tool_literal *literal, const char *text, size_t *at,
                                         size_t end, struct tool_piece *piece);

#endif
