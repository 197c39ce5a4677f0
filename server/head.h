/* The head of an HTTP/1 request, read strictly (RFC 9112): from the request line to the empty line.
 * Pure functions; they allocate only in the caller's buffer. */
#ifndef KEEPD_SERVER_HEAD_H
#define KEEPD_SERVER_HEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

#define HEAD_FIELDS_MAX     128 /* header fields of one request */
#define HEAD_PARAMETERS_MAX 64  /* query parameters of one request */

/* Why a request is rejected. `text` and `code` are constants; code may be NULL. */
struct head_refusal {
    int status; /* HTTP status; 0 = not rejected */
    const char *code, *text;
};

/* How the body is framed, or why the request is rejected. */
struct head {
    bool is_head; /* the method is HEAD: the answer has no body */
    bool chunked;
    uint64_t length; /* Content-Length; 0 if absent */
    struct head_refusal refusal;
};

/* `data` holds complete lines that end in CRLF, the last of them empty. Writes the same head in
 * normal form to `out`, unless it is rejected: the target in origin form, exactly one Host field
 * (none in an HTTP/1.0 request that has none), no Cookie. */
void head_read(const char *data, size_t size, struct head *head, struct buf *out);

/* Reads one line "size[;extensions]" without its CRLF. false: malformed, or above 2^62. */
bool head_read_chunk_size(const char *line, size_t size, uint64_t *chunk);

#endif
