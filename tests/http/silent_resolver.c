/* A resolver that never answers for names that begin with "silent", for tests: it is
 * loaded before the C library (LD_PRELOAD). Other names are looked up as always. */
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **out) {
    __typeof__(getaddrinfo) *real = (__typeof__(real))dlsym(RTLD_NEXT, "getaddrinfo");
    while (name && strncmp(name, "silent", 6) == 0) pause();
    return real ? real(name, service, hints, out) : EAI_SYSTEM;
}
