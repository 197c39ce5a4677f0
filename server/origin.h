/* Guards against browsers: pages of other sites that send requests to a server on the user's
 * machine. Pure functions over header values. */
#ifndef KEEPD_SERVER_ORIGIN_H
#define KEEPD_SERVER_ORIGIN_H

#include <stdbool.h>
#include <stddef.h>

/* May a request with this Host header ask a server that is bound to loopback? A name that somebody
 * else's DNS points here (DNS rebinding) may not: only localhost, loopback addresses, `own` (the
 * name the server was told to bind, may be NULL) and those in `allowed`. The port does not matter.
 * No header at all (HTTP/1.0) is no browser. */
bool origin_host_allowed(const char *host, const char *own, char *const *allowed, size_t count);

/* The value for Access-Control-Allow-Origin, or NULL: `origin` is not in the list ("*" = all). */
const char *origin_allow(const char *origin, char *const *allowed, size_t count);

#endif
