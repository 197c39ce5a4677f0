/* Conversations that leave or come as state files: GET /v1/conversations/{id}/state and PUT
 * /v1/conversations. A file passes through one buffer of MOVE_BYTES. The disk is read and written
 * on libuv's threads, while the connection is suspended; at most two threads do this, so that a
 * slow disk keeps no other request waiting. Loop thread. */
#ifndef KEEPD_SERVER_MOVE_H
#define KEEPD_SERVER_MOVE_H

#include "server/exchange.h"

#define MOVE_BYTES ((size_t)256 << 10)
/* An upload that comes more slowly than this on average, after its first seconds, is closed. */
#define MOVE_BYTES_PER_MS 256

/* Begins an upload into this space of the exchange's model, before its body, of which `size` bytes
 * are announced (0: unknown). Returns true, or refuses the exchange. */
bool move_begin(struct exchange *exchange, uint64_t size, const uint8_t space[16]);
/* Takes bytes of the body and returns how many. libmicrohttpd offers the rest again once the disk
 * has these. */
size_t move_receive(struct exchange *exchange, const char *data, size_t size);
void move_finish(struct exchange *exchange); /* the body is complete */

/* Opens the file of the conversation, which has been written, and answers with it. */
void move_send(struct exchange *exchange, uint64_t id);
bool move_sends(const struct exchange *exchange); /* move_response makes the answer */
struct MHD_Response *move_response(struct exchange *exchange);

void move_close(struct exchange *exchange);

#endif
