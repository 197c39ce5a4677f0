/* Retained conversations: lists, orders, and files that come and leave.
 *
 * Conversations. A request that extends a conversation continues a copy-on-write fork of it. The
 * conversation itself stays, so that a retry, another last turn or several questions on one history
 * each compute only their new tokens. Once the new turn is kept, the conversation that it continued
 * is `superseded`: it is removed first when room is needed. A dialogue keeps at most one superseded
 * conversation. A conversation that several turns continued is not superseded. With `state_dir`
 * conversations outlive the process, see engine/disk/store.h. */
#ifndef KEEPD_ENGINE_ENGINE_CONVERSATIONS_H
#define KEEPD_ENGINE_ENGINE_CONVERSATIONS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/err.h"

struct engine;
struct engine_upload;

struct engine_conversation_row {
    uint64_t id;
    int replica; /* replica that holds it in memory; -1 = only on disk */
    int32_t tokens, held;
    char policy[32];
    int32_t budget;
    int64_t pages;   /* in memory; 0 = only on disk */
    int64_t idle_ns; /* time since its last use, in this process or an earlier one */
    uint8_t space[16];
    uint64_t hint;
    bool superseded;    /* a later turn continued it */
    bool pinned;        /* makes no room for others */
    int32_t ttl;        /* seconds of idle time after which it is deleted; 0 = none */
    int64_t disk_bytes; /* size of its file in the state directory; 0 = none */
};

/* Selects conversations by space and by id; NULL and 0 select all. */
struct engine_conversation_filter {
    const uint8_t *space; /* [16] */
    uint64_t id;
};
static inline bool engine_conversation_is(const struct engine_conversation_filter *filter,
                                          const uint8_t space[16], uint64_t id) {
    return (filter->id == 0 || filter->id == id) &&
           (!filter->space || memcmp(filter->space, space, 16) == 0);
}
int engine_conversations(struct engine *engine, const struct engine_conversation_filter *filter,
                         struct engine_conversation_row *rows, int max);

/* ---- Orders about conversations (loop thread) ---- */

enum engine_order_kind {
    ENGINE_ORDER_DELETE, /* forget it, in memory and on disk */
    ENGINE_ORDER_WRITE   /* write it to the state directory now */
};

/* An order about one conversation; the caller must keep it until `done`. */
struct engine_order {
    enum engine_order_kind kind;
    uint64_t id;
    int result;      /* 0, or ERR_NOTFOUND; WRITE also ERR_UNSUPPORTED (such conversations are never
                        written), ERR_LIMIT (too large), ERR_IO, ERR_STOPPED; valid once done */
    atomic_int done; /* release-stored last; `wake` is called after it */
    /* Used by the engine only. */
    atomic_int replicas_left; /* replicas that have not answered yet */
    atomic_int
        code; /* the answer of a replica that has it, 0 before errors; ERR_NOTFOUND: none yet */
};

#define ENGINE_ORDERS_MAX 64

/* DELETE: deletes the conversation and the superseded one that it continued before the next step;
 * requests that already continue it keep their fork. WRITE: is done when the file is there. Errors
 * that do not take the order: ERR_FULL: too many orders wait; ERR_STOPPED: the engine has not
 * started or has ended. */
int engine_conversation_order(struct engine *engine, struct engine_order *order);

/* ---- Moving conversations (any thread; these calls wait for the disk) ---- */

/* A conversation leaves as its state file, and comes as one: signed, and checked before it is used.
 * All calls need a state directory: ERR_UNSUPPORTED. */

/* Opens the file of a conversation that was written; the caller closes *fd. ERR_NOTFOUND, ERR_IO.
 */
int engine_state_open(struct engine *engine, uint64_t id, int *fd, uint64_t *bytes,
                      struct fault *fault);

/* Returns the most bytes that a file may have that comes; -1: there is no state directory. */
int64_t engine_upload_max(const struct engine *engine);

/* Begins to take a file. Only one of this space is accepted. ERR_NOMEM. */
int engine_upload_open(struct engine *engine, const uint8_t space[16], struct engine_upload **out,
                       struct fault *fault);
/* ERR_MALFORMED, ERR_INVALID, ERR_UNSUPPORTED, ERR_LIMIT, ERR_FULL, ERR_IO: see
 * engine/disk/store_move.h. After an error the upload can only be closed. */
int engine_upload_add(struct engine_upload *upload, const char *data, size_t size,
                      struct fault *fault);
/* The next request that repeats the conversation continues it. */
int engine_upload_end(struct engine_upload *upload, struct engine_conversation_row *row,
                      struct fault *fault);
void engine_upload_close(struct engine_upload *upload); /* NULL is allowed */

#endif
