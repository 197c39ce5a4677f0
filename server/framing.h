/* Message framing of HTTP/1: finds where the requests of one connection begin and end.
 * libmicrohttpd receives only complete, well-formed heads, and bodies that end.
 *
 * A rejected request is replaced by a harmless valid one; `requests` is then its number and
 * `refusal` its answer. A rejected body is ended. So responses keep their order and are made in one
 * place. After a rejection nothing more is passed on.
 *
 * Loop thread. Holds at most one head, or one line of a chunked body. */
#ifndef KEEPD_SERVER_FRAMING_H
#define KEEPD_SERVER_FRAMING_H

#include "server/head.h"

enum framing_state {
    FRAMING_HEAD,
    FRAMING_BODY,       /* `left` bytes */
    FRAMING_CHUNK_SIZE, /* a line */
    FRAMING_CHUNK,      /* `left` bytes */
    FRAMING_CHUNK_END,  /* an empty line */
    FRAMING_TRAILER,    /* lines, until an empty one */
    FRAMING_OVER        /* rejected: the rest is ignored */
};

struct framing {
    enum framing_state state;
    uint64_t left;
    uint64_t body; /* bytes of a chunked body so far */
    size_t blank;  /* bytes of empty lines before a head, or of trailers */
    char *held;    /* an incomplete head or line; allocated while there is one */
    size_t held_size, held_capacity;
    unsigned long long requests;
    struct head_refusal refusal; /* to request number `requests`; status 0 = none */
};

struct framing_limits {
    size_t head_bytes;   /* largest request head */
    uint64_t body_bytes; /* largest chunked body; http.c checks Content-Length */
};

/* Reads all of `data` and appends the bytes for libmicrohttpd to `out`. -1: no memory. */
int framing_feed(struct framing *framing, const struct framing_limits *limits, const char *data,
                 size_t size, struct buf *out);
/* True if all of these bytes belong to a body and need no change; they then count as read. */
bool framing_passes(struct framing *framing, size_t size);
void framing_close(struct framing *framing);

#endif
