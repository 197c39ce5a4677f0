/* Protects a server on the user's machine from requests that pages of other sites send.
 * Pure functions over header values. */
#ifndef KEEPD_SERVER_ORIGIN_H
#define KEEPD_SERVER_ORIGIN_H

#include <stdbool.h>
#include <stddef.h>

/* Returns whether a server bound to loopback accepts this Host header. As protection against DNS
 * rebinding it accepts only localhost, loopback addresses, `own` (the configured bind name, may be
 * NULL) and the names in `allowed`. It also accepts names by which containers reach their host,
 * such as host.docker.internal, in requests without an Origin header (`origin`): no public name
 * ends in .internal, so a page of the Internet cannot have one; a network that answers for such a
 * name could, but browsers send Origin with all that its page posts. The port is ignored. NULL is
 * accepted, because a browser always sends the header. */
bool origin_host_allowed(const char *host, const char *origin, const char *own,
                         char *const *allowed, size_t count);

/* Returns the value for Access-Control-Allow-Origin; NULL: `origin` is not in the list ("*" = all,
 * "localhost" = pages of this machine, whatever their port). Points into the list or to `origin`.
 */
const char *origin_allow(const char *origin, char *const *allowed, size_t count);

#endif
