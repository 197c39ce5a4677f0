/* Limits that look at more than one request: prompt tokens that wait, and the time one may take.
 * What a single request may be is checked where it is read (http.c, oai_parse.c); what the engine
 * can hold, by the engine. docs/OPERATIONS.md lists them all. Loop thread only. */
#ifndef KEEPD_SERVER_QUOTA_H
#define KEEPD_SERVER_QUOTA_H

#include <stdbool.h>
#include <stdint.h>

struct exchange;

/* Reserves room for the prompt in the queue before it is tokenised: a token has at least a byte,
 * and a prompt longer than the context is refused anyway. false: no room; with an empty queue there
 * is always room. */
bool quota_reserve(struct exchange *exchange);
/* Once tokenised: the reservation becomes the tokens of all prompts, of which a request may have
 * many. false: no room for them. */
bool quota_confirm(struct exchange *exchange);
/* At every look: the reservation shrinks to the prompts that still wait, and ends when the engine
 * has admitted all of them. */
void quota_settle(struct exchange *exchange);
void quota_release(struct exchange *exchange);

/* The client's X-Request-Timeout (seconds, "2.5"), capped by the server's; *deadline_ns 0 = none.
 * false: the header is no time. */
bool quota_deadline(const char *header, int64_t cap_seconds, int64_t now_ns, int64_t *deadline_ns);

#endif
