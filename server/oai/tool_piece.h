/* Pieces of an answer that may contain calls of tools, as tool_calls.h finds them. */
#ifndef KEEPD_SERVER_OAI_TOOL_PIECE_H
#define KEEPD_SERVER_OAI_TOOL_PIECE_H

#include <stddef.h>
#include <stdint.h>

enum tool_piece_kind {
    TOOL_MORE,      /* no further piece in this text */
    TOOL_TEXT,      /* text of the answer */
    TOOL_CALL,      /* a call begins; the piece is its name */
    TOOL_ARGUMENTS, /* arguments of the last call, to be appended */
    TOOL_BARE       /* the last call has no arguments, so they are {}; the piece is empty */
};

struct tool_piece {
    enum tool_piece_kind kind;
    size_t begin, end;
    char decoded[8];      /* the meaning of arguments that are written in another way */
    uint8_t decoded_size; /* 0 = the text itself */
};

static inline const char *tool_piece_text(const struct tool_piece *piece, const char *text,
                                          size_t *size) {
    *size = piece->decoded_size ? piece->decoded_size : piece->end - piece->begin;
    return piece->decoded_size ? piece->decoded : text + piece->begin;
}

static inline struct tool_piece tool_piece(enum tool_piece_kind kind, size_t begin, size_t end) {
    return (struct tool_piece){.kind = kind, .begin = begin, .end = end};
}

#endif
