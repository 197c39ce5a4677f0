#include "server/libcurl.h"

#include <dlfcn.h>

static const char *const libcurl_names[] = {
#define X(name) "curl_" #name,
    LIBCURL_MAP(X)
#undef X
};

/* Debian has the library in two builds. The second is the one that keepd-chat depends on, so that
 * it is there where the package is. */
static const char *const libcurl_files[] = {"libcurl.so.4", "libcurl-gnutls.so.4"};

_Static_assert(sizeof(struct libcurl) == sizeof libcurl_names, "only pointers to functions");

int libcurl_load(struct libcurl *curl, const char *field, struct fault *fault) {
    void **functions = (void **)curl;
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof libcurl_files / sizeof *libcurl_files; i++)
        library = dlopen(libcurl_files[i], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fault_set(fault, ERR_UNSUPPORTED, field, "needs libcurl: %.200s", dlerror());
    for (size_t i = 0; i < sizeof libcurl_names / sizeof *libcurl_names; i++)
        if (!(functions[i] = dlsym(library, libcurl_names[i])))
            return fault_set(fault, ERR_UNSUPPORTED, field, "libcurl has no %s", libcurl_names[i]);
    if (curl->global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        return fault_set(fault, ERR_NOMEM, field, "no memory");
    return 0;
}
