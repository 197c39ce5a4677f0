/* Spans of requests that generate, in OpenTelemetry's JSON (opentelemetry-proto, trace.proto), with
 * the attributes that its conventions for generative models name. A request is one span with three
 * children for each of its first SPANS_JOBS prompts: queue, prompt, generation.
 *
 * W3C Trace Context, level 1: a valid traceparent gives the trace and the parent, and decides
 * whether the request is recorded. Anything else begins a trace of its own. */
#ifndef KEEPD_SERVER_SPANS_H
#define KEEPD_SERVER_SPANS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"

#define SPANS_JOBS 8

struct exchange;

struct spans_context {
    uint8_t trace[16], parent[8]; /* parent: all 0 = none */
    bool sampled;
};

/* False: not a traceparent, as section 3.2 defines it; *out is unchanged. */
bool spans_parse(const char *traceparent, struct spans_context *out);
/* Begins a trace that is recorded. */
void spans_begin(struct spans_context *out);

/* Gives the spans of a request that has ended, with its jobs, to the server's exporter. */
void spans_send(const struct exchange *exchange);

#endif
