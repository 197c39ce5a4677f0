/* Pictures of http(s) addresses, from the hosts that --allow-image-urls names and from no other.
 *
 * Each host in the list is NAME, *.NAME (any name that ends so) or either with :PORT; without one
 * the scheme's own port is meant. Redirects lead to such hosts, too. Whatever a name resolves to,
 * no connection is made to an address that is not public (loopback, private, link-local and other
 * special ones), unless the list has that address itself with its port. The check is made on the
 * address of the socket, so that a name that resolves differently a second time changes nothing.
 *
 * The caller's thread waits. Any thread. */
#ifndef KEEPD_SERVER_FETCH_H
#define KEEPD_SERVER_FETCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/err.h"
#include "server/server.h"

#define FETCH_MS         10000 /* one address, with its redirects */
#define FETCH_CONNECT_MS 4000  /* to look up the host's name and connect */
#define FETCH_REDIRECTS  3

struct fetch;

/* `hosts` stays until fetch_close. ERR_UNSUPPORTED: no libcurl; ERR_INVALID: an entry that is none;
 * fault->field is "allow-image-urls". */
int fetch_open(const struct server_list *hosts, struct fetch **out, struct fault *fault);
void fetch_close(struct fetch *fetch); /* NULL allowed */

struct fetch_limits {
    size_t bytes;
    int64_t deadline;        /* a time of clock_ns */
    const atomic_bool *left; /* nobody waits for the body any longer */
};

/* Reads the body of an address into *bytes (mem_free). Errors have no field: ERR_INVALID (an
 * address or host that is not permitted, or one that does not answer with 200), ERR_LIMIT (too
 * large, too slow, too many redirects), ERR_NOMEM. Ends within about a second once `left` is true.
 */
int fetch_read(const struct fetch *fetch, const char *url, const struct fetch_limits *limits,
               uint8_t **bytes, size_t *size, struct fault *fault);

/* Returns whether anybody on the Internet may have this address (fetch_hosts.c). */
bool fetch_is_public(const struct sockaddr *address);
/* Returns whether a host is in the list with this port; `own`: the scheme's. */
bool fetch_lists(const struct server_list *hosts, const char *host, int port, bool own);
/* Returns whether the list has this address itself, with its port. */
bool fetch_lists_address(const struct server_list *hosts, const struct sockaddr *address);
bool fetch_is_entry(const char *text);

#endif
