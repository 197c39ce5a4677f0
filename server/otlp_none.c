/* Takes the place of otlp.c in a build without libcurl's header: no span is ever sent. */
#include <stddef.h>

#include "server/otlp.h"

int otlp_open(const char *endpoint, struct otlp **out, struct fault *fault) {
    (void)endpoint;
    *out = NULL;
    return fault_set(fault, ERR_UNSUPPORTED, "otlp-endpoint",
                     "this keepd was built without libcurl and sends no spans; build it where "
                     "libcurl's headers are installed");
}

void otlp_close(struct otlp *otlp) {
    (void)otlp;
}

void otlp_add(struct otlp *otlp, const struct buf *spans) {
    (void)otlp, (void)spans;
}

struct otlp_counts otlp_counts_of(struct otlp *otlp) {
    (void)otlp;
    return (struct otlp_counts){0};
}
