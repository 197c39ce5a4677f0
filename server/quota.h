/* A client's part of the queue, in places and prompt tokens, and of the background, a key's limit
 * on requests at once, and the time limit of a request. http.c and the parser in oai/ check the
 * limits of a single request; the engine checks its capacity. docs/OPERATIONS.md lists them all.
 * Loop thread only. */
#ifndef KEEPD_SERVER_QUOTA_H
#define KEEPD_SERVER_QUOTA_H

#include <stdbool.h>
#include <stdint.h>

struct exchange;

/* quota_reserve and quota_confirm set exchange->error and return false if the queue, or the
 * client's share of it (server/ledger.h), is full.
 *
 * quota_reserve reserves a place, and tokens for the prompt before it is tokenised: a token has at
 * least one byte, and a prompt longer than the context is refused anyway. An empty queue accepts
 * any request. */
bool quota_reserve(struct exchange *exchange);
/* The same for a request whose model is not loaded yet: without a place in the engine's queue,
 * which quota_reserve takes when the model is there. */
bool quota_wait(struct exchange *exchange);
/* Called once the request is tokenised: sets the reservation to the prompts that are submitted
 * together (jobs_at_once) and their tokens, and takes a place in the background for a response that
 * asks for one. */
bool quota_confirm(struct exchange *exchange);
/* Called on every poll: reduces the reservation to the prompts that still wait. */
void quota_settle(struct exchange *exchange);
void quota_release(struct exchange *exchange);

/* Counts the request as active for its key until quota_leave. false: the key has as many active
 * requests as it may. */
bool quota_enter(struct exchange *exchange);
/* Ends what quota_enter began and counts the request's tokens for its key. */
void quota_leave(struct exchange *exchange);

/* Reads the client's X-Request-Timeout (seconds, "2.5"), limited by the server's; *deadline_ns 0 =
 * none. false: the header is not a valid time. */
bool quota_deadline(const char *header, int64_t cap_seconds, int64_t now_ns, int64_t *deadline_ns);

#endif
