/* libcurl, loaded when it is first needed: a daemon that sends no spans and fetches no models never
 * loads it. Once loaded it stays, because it may have threads and handlers of its own. */
#ifndef KEEPD_SERVER_LIBCURL_H
#define KEEPD_SERVER_LIBCURL_H

#include <curl/curl.h>

#include "base/err.h"

/* The functions that are used; the names are libcurl's without `curl_`. */
#define LIBCURL_MAP(X)                                                                             \
    X(global_init)                                                                                 \
    X(easy_init)                                                                                   \
    X(easy_reset)                                                                                  \
    X(easy_setopt)                                                                                 \
    X(easy_perform)                                                                                \
    X(easy_getinfo)                                                                                \
    X(easy_cleanup)                                                                                \
    X(easy_strerror)                                                                               \
    X(slist_append)                                                                                \
    X(slist_free_all)                                                                              \
    X(url)                                                                                         \
    X(url_set)                                                                                     \
    X(url_get)                                                                                     \
    X(url_cleanup)                                                                                 \
    X(free)

struct libcurl {
#define X(name) __typeof__(curl_##name) *(name);
    LIBCURL_MAP(X)
#undef X
};

/* Loads and initialises libcurl. ERR_UNSUPPORTED, with `field`: it is not installed. */
int libcurl_load(struct libcurl *curl, const char *field, struct fault *fault);

#endif
