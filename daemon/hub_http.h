/* Requests to the hub, by libcurl. One request at a time, on the calling thread, which waits.
 *
 * Redirects are followed here: to https alone, to http only from and to this machine (a test, a
 * mirror beside the daemon). The token goes to the hub itself and to no other host, port or scheme.
 * Nothing is asked again here: the answer says whether that may help. */
#ifndef KEEPD_DAEMON_HUB_HTTP_H
#define KEEPD_DAEMON_HUB_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct hub_http;

/* `endpoint`: https://HOST, or http:// and this machine. `token`: "" = none. ERR_INVALID, field
 * "HF_ENDPOINT"; ERR_UNSUPPORTED: there is no libcurl. */
int hub_http_open(const char *endpoint, const char *token, struct hub_http **out,
                  struct fault *fault);
void hub_http_close(struct hub_http *http); /* NULL is allowed */

struct hub_answer {
    long status;       /* 0: there was no answer */
    bool again;        /* the same request may succeed later: the connection broke, or the hub is
                          busy (429, 5xx) */
    bool unreachable;  /* no connection came about */
    int wait_s;        /* the hub asks to wait so long; 0: it does not say */
    int64_t from;      /* the first byte of the file that is sent, 0 unless it is a part */
    char code[64];     /* X-Error-Code */
    char message[200]; /* X-Error-Message */
    char next[1024];   /* address of the next page; "" = none */
};

/* Takes a part of the body of an answer with status 200 or 206; false ends the request. */
typedef bool (*hub_sink)(void *arg, const struct hub_answer *answer, const char *data, size_t size);

/* Gets a path of the hub ("/api/...") or an address that an answer gave. `from`: the first byte
 * that is wanted. `large`: the request may take as long as bytes arrive. 0: the answer is whole.
 * ERR_STOPPED: the sink wanted no more. ERR_IO, ERR_NOTFOUND, ERR_INVALID, with a fault. */
int hub_http_get(struct hub_http *http, const char *path, int64_t from, bool large, hub_sink sink,
                 void *arg, struct hub_answer *answer, struct fault *fault);

#endif
