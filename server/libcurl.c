#include "server/libcurl.h"

#include <dlfcn.h>

static const char *const libcurl_names[] = {
#define X(name) "curl_" #name,
    LIBCURL_MAP(X)
#undef X
};

_Static_assert(sizeof(struct libcurl) == sizeof libcurl_names, "only pointers to functions");

int libcurl_load(struct libcurl *curl, const char *field, struct fault *fault) {
    void **functions = (void **)curl;
    void *library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fault_set(fault, ERR_UNSUPPORTED, field, "needs libcurl: %.200s", dlerror());
    for (size_t i = 0; i < sizeof libcurl_names / sizeof *libcurl_names; i++)
        if (!(functions[i] = dlsym(library, libcurl_names[i])))
            return fault_set(fault, ERR_UNSUPPORTED, field, "libcurl has no %s", libcurl_names[i]);
    if (curl->global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        return fault_set(fault, ERR_NOMEM, field, "no memory");
    return 0;
}
