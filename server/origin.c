#include "server/origin.h"

#include <arpa/inet.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>

/* Finds the name in "name", "name:port", "[v6]" or "[v6]:port". Returns its size; 0: it is none of
 * these. */
static size_t name_size(const char *host, const char **name) {
    size_t size = strcspn(host, ":");
    *name = host;
    if (*host == '[') {
        const char *end = strchr(host, ']');
        if (!end) return 0;
        *name = host + 1;
        size = (size_t)(end - host) - 1;
        host = end + 1;
    } else {
        host += size;
    }
    if (*host == ':') host += 1 + strspn(host + 1, "0123456789");
    return *host ? 0 : size;
}

static bool is_loopback(const char *name) {
    struct in6_addr v6;
    struct in_addr v4;
    if (inet_pton(AF_INET, name, &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
    return inet_pton(AF_INET6, name, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

/* Returns whether it is a name that Docker and Podman give the host inside of containers. */
static bool is_container_name(const char *name) {
    static const char *const names[] = {"host.docker.internal", "gateway.docker.internal",
                                        "host.containers.internal"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcasecmp(name, names[i]) == 0) return true;
    return false;
}

bool origin_host_allowed(const char *host, const char *origin, const char *own,
                         char *const *allowed, size_t count) {
    char name[256];
    const char *at;
    if (!host) return true;
    size_t size = name_size(host, &at);
    if (!size || size >= sizeof name) return false;
    memcpy(name, at, size);
    name[size] = '\0';
    if (name[size - 1] == '.') name[size - 1] = '\0'; /* a name may end in the root's dot */
    if (strcasecmp(name, "localhost") == 0 || is_loopback(name)) return true;
    if (own && strcasecmp(name, own) == 0) return true;
    if (!origin && is_container_name(name)) return true;
    for (size_t i = 0; i < count; i++)
        if (strcasecmp(name, allowed[i]) == 0) return true;
    return false;
}

/* Returns whether the origin is of this machine, such as "http://localhost:3000" or
 * "https://[::1]". */
static bool is_local_origin(const char *origin) {
    static const char *const schemes[] = {"http://", "https://"};
    const char *at;
    char name[256];
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) {
        size_t scheme = strlen(schemes[i]);
        if (strncasecmp(origin, schemes[i], scheme) != 0) continue;
        size_t size = name_size(origin + scheme, &at);
        if (!size || size >= sizeof name) return false;
        memcpy(name, at, size);
        name[size] = '\0';
        return strcasecmp(name, "localhost") == 0 || is_loopback(name);
    }
    return false;
}

const char *origin_allow(const char *origin, char *const *allowed, size_t count) {
    for (size_t i = 0; origin && i < count; i++) {
        if (strcmp(allowed[i], "*") == 0) return "*";
        if (strcmp(allowed[i], "localhost") != 0) {
            if (strcasecmp(allowed[i], origin) == 0) return allowed[i];
        } else if (is_local_origin(origin)) {
            return origin;
        }
    }
    return NULL;
}
