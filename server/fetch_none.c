/* Takes the place of fetch.c in a build without libcurl's header: no address is ever fetched. */
#include <stddef.h>

#include "base/check.h"
#include "server/fetch.h"

int fetch_open(const struct server_list *hosts, struct fetch **out, struct fault *fault) {
    (void)hosts;
    *out = NULL;
    return fault_set(fault, ERR_UNSUPPORTED, "allow-image-urls",
                     "this keepd was built without libcurl and fetches no pictures; build it where "
                     "libcurl's headers are installed");
}

void fetch_close(struct fetch *fetch) {
    (void)fetch;
}

int fetch_read(const struct fetch *fetch, const char *url, const struct fetch_limits *limits,
               uint8_t **bytes, size_t *size, struct fault *fault) {
    (void)fetch, (void)url, (void)limits, (void)bytes, (void)size, (void)fault;
    CHECK(!"a start with allow-image-urls was refused");
    return ERR_UNSUPPORTED;
}
