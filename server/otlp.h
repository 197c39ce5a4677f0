/* Sends spans to an OpenTelemetry collector: OTLP over HTTP, in JSON, off unless an endpoint is
 * given. A thread of its own sends them with libcurl, which is loaded only then. Nothing here makes
 * the loop wait: the queue of spans has a bound, and spans beyond it are dropped and counted.
 * A batch that the collector could not take (429, 502, 503, 504, or no answer) is sent again, later
 * and later; one that it refused is dropped. */
#ifndef KEEPD_SERVER_OTLP_H
#define KEEPD_SERVER_OTLP_H

#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"

#define OTLP_REQUESTS_MAX 2048               /* requests whose spans wait */
#define OTLP_BYTES_MAX    ((size_t)8 << 20)  /* and their size */
#define OTLP_REQUEST_MAX  ((size_t)64 << 10) /* the spans of one request */

struct otlp;

/* Counts of requests, not of single spans. */
struct otlp_counts {
    uint64_t exported;
    uint64_t full;    /* dropped: the queue was full, or they were too large for it */
    uint64_t refused; /* dropped: the collector refused them, or the daemon ended before it took
                         them */
};

/* `endpoint`: http://HOST:PORT or https://..., to which /v1/traces is added. fault->field is
 * "otlp-endpoint": ERR_INVALID, or ERR_UNSUPPORTED (no libcurl). */
int otlp_open(const char *endpoint, struct otlp **out, struct fault *fault);
/* Sends the waiting spans, for two seconds at most. NULL is allowed. */
void otlp_close(struct otlp *otlp);
/* Takes the spans of one request: JSON objects, separated by commas; copies them. Loop thread. */
void otlp_add(struct otlp *otlp, const struct buf *spans);
/* Returns the counts; all 0 for NULL. */
struct otlp_counts otlp_counts_of(struct otlp *otlp);

#endif
