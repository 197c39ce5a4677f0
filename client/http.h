/* The client's side of HTTP: one request at a time to one daemon, by libcurl. The answer is read as
 * it comes; a wait can be ended by SIGINT.
 *
 * Thread: one. */
#ifndef KEEPD_CLIENT_HTTP_H
#define KEEPD_CLIENT_HTTP_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

struct http;

struct http_options {
    const char *url;    /* http://host:port, https://host, or unix:/path */
    const char *key;    /* sent as a bearer token; NULL = none */
    const char *cacert; /* a file with certificates to trust instead of the system's; NULL */
};

/* How a request ended. */
enum http_end {
    HTTP_ANSWERED,   /* there is an answer: `status`, and the body as far as it was read */
    HTTP_FAILED,     /* there is no answer, or an incomplete one: see `why` */
    HTTP_INTERRUPTED /* SIGINT arrived */
};

struct http_answer {
    enum http_end end;
    long status;
    long retry_seconds; /* the header Retry-After; 0 = none */
    bool refused;       /* nobody listens there */
    char why[256];
    struct buf
        body; /* the body of an answer without `receive`, or of an error; the caller closes it */
};

/* Called with the next bytes of a body of status 200; false ends the request as failed. */
typedef bool (*http_receive)(void *arg, const char *data, size_t size);

/* Opens a client. NULL: no memory. */
struct http *http_open(const struct http_options *options);
void http_close(struct http *http);

/* `body` NULL: GET; otherwise POST of JSON. `session` (may be NULL) is the X-Session-ID. `slow`
 * (may be NULL) is called once if nothing has come for two seconds. */
void http_ask(struct http *http, const char *path, const char *session, const struct buf *body,
              http_receive receive, void (*slow)(void *arg), void *arg, struct http_answer *answer);

#endif
