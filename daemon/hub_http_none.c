/* The hub in a build without libcurl: models of its cache are served, and nothing is fetched. */
#include "daemon/hub_http.h"

int hub_http_open(const char *endpoint, const char *token, struct hub_http **out,
                  struct fault *fault) {
    (void)endpoint, (void)token;
    *out = NULL;
    return fault_set(fault, ERR_UNSUPPORTED, "model",
                     "this keepd was built without libcurl and fetches nothing");
}

void hub_http_close(struct hub_http *http) {
    (void)http;
}

int hub_http_get(struct hub_http *http, const char *path, int64_t from, bool large, hub_sink sink,
                 void *arg, struct hub_answer *answer, struct fault *fault) {
    (void)http, (void)from, (void)large, (void)sink, (void)arg;
    *answer = (struct hub_answer){0};
    return fault_set(fault, ERR_UNSUPPORTED, "model", "%.100s cannot be fetched", path);
}
