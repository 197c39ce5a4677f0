/* Protects a server on the user's machine from requests that pages of other sites send.
 * Pure functions over header values. */
#ifndef KEEPD_SERVER_ORIGIN_H
#define KEEPD_SERVER_ORIGIN_H

#include <stdbool.h>
#include <stddef.h>

/* True if a server bound to loopback accepts this Host header. Against DNS rebinding it accepts
 * only localhost, loopback addresses, `own` (the configured bind name, may be NULL) and the names
 * in `allowed`; and, of requests without an `origin` (the header of that name), the names by which
 * containers reach their host, such as host.docker.internal. No public name ends in .internal, so a
 * page of the Internet cannot have one; a network that answers for it could, and browsers send an
 * Origin with all that such a page posts. The port is ignored. NULL is accepted: a browser always
 * sends the header. */
bool origin_host_allowed(const char *host, const char *origin, const char *own,
                         char *const *allowed, size_t count);

/* The value for Access-Control-Allow-Origin, or NULL: `origin` is not in the list ("*" = all,
 * "localhost" = pages of this machine, whatever their port). Points into the list or to `origin`.
 */
const char *origin_allow(const char *origin, char *const *allowed, size_t count);

#endif
