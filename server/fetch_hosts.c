/* The hosts and the addresses that pictures are fetched from. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server/fetch.h"

#define HOST_BYTES 256

/* Special ranges of IPv4 (RFC 6890 and its registry, multicast and reserved ones). */
static const struct {
    uint32_t base;
    int bits;
} special_ranges[] = {
    {0x00000000, 8},  {0x0a000000, 8},  {0x64400000, 10}, {0x7f000000, 8},  {0xa9fe0000, 16},
    {0xac100000, 12}, {0xc0000000, 24}, {0xc0000200, 24}, {0xc0586300, 24}, {0xc0a80000, 16},
    {0xc6120000, 15}, {0xc6336400, 24}, {0xcb007100, 24}, {0xe0000000, 3},
};

static bool is_public_v4(uint32_t address) {
    for (size_t i = 0; i < sizeof special_ranges / sizeof *special_ranges; i++)
        if (((address ^ special_ranges[i].base) >> (32 - special_ranges[i].bits)) == 0)
            return false;
    return true;
}

/* Global unicast addresses are 2000::/3. Those that hold an address of IPv4 are left out (Teredo,
 * 6to4), and so are those of protocols and of documents. */
static bool is_public_v6(const uint8_t a[16]) {
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (memcmp(a, mapped, sizeof mapped) == 0)
        return is_public_v4((uint32_t)a[12] << 24 | (uint32_t)a[13] << 16 | (uint32_t)a[14] << 8 |
                            a[15]);
    if (a[0] >> 5 != 1) return false;
    if (a[0] == 0x20 && a[1] == 0x01) return a[2] > 0x01 && !(a[2] == 0x0d && a[3] == 0xb8);
    return !(a[0] == 0x20 && a[1] == 0x02) && !(a[0] == 0x3f && a[1] == 0xff);
}

bool fetch_is_public(const struct sockaddr *address) {
    if (address->sa_family == AF_INET)
        return is_public_v4(
            ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr));
    if (address->sa_family != AF_INET6) return false;
    return is_public_v6(((const struct sockaddr_in6 *)(const void *)address)->sin6_addr.s6_addr);
}

/* --- the list --- */

/* Divides an entry into the host, an address of IPv6 with its brackets, and the port; -1: none. */
static bool split_entry(const char *entry, char host[HOST_BYTES], int *port) {
    const char *end = entry[0] == '[' ? strchr(entry, ']') : NULL;
    const char *colon = strchr(end ? end : entry, ':');
    const size_t size = colon ? (size_t)(colon - entry) : strlen(entry);
    char *rest = NULL;
    *port = -1;
    if (!size || size >= HOST_BYTES || (entry[0] == '[' && (!end || end + 1 != entry + size)))
        return false;
    memcpy(host, entry, size);
    host[size] = '\0';
    if (!colon) return true;
    const long number = colon[1] >= '0' && colon[1] <= '9' ? strtol(colon + 1, &rest, 10) : 0;
    *port = (int)number;
    return number >= 1 && number <= 65535 && !*rest;
}

bool fetch_is_entry(const char *text) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._";
    char host[HOST_BYTES];
    int port;
    if (!split_entry(text, host, &port)) return false;
    if (host[0] == '[') return strspn(host + 1, "0123456789abcdefABCDEF:.") == strlen(host) - 2;
    const char *name = strncmp(host, "*.", 2) == 0 ? host + 2 : host;
    return *name && *name != '.' && strspn(name, plain) == strlen(name);
}

static bool is_host_of(const char *entry, const char *host) {
    const size_t size = strlen(host), end = strlen(entry);
    if (entry[0] != '*') return strcasecmp(entry, host) == 0;
    return size > end - 1 && strcasecmp(host + size - (end - 1), entry + 1) == 0;
}

bool fetch_lists(const struct server_list *hosts, const char *host, int port, bool own) {
    char entry[HOST_BYTES];
    for (size_t i = 0; i < hosts->count; i++) {
        int listed;
        if (!split_entry(hosts->items[i], entry, &listed) || !is_host_of(entry, host)) continue;
        if (listed == port || (listed < 0 && own)) return true;
    }
    return false;
}

bool fetch_lists_address(const struct server_list *hosts, const struct sockaddr *address) {
    char text[INET6_ADDRSTRLEN], host[INET6_ADDRSTRLEN + 2];
    const bool six = address->sa_family == AF_INET6;
    const struct sockaddr_in *v4 = (const void *)address;
    const struct sockaddr_in6 *v6 = (const void *)address;
    const void *bytes = six ? (const void *)&v6->sin6_addr : (const void *)&v4->sin_addr;
    if (!inet_ntop(address->sa_family, bytes, text, sizeof text)) return false;
    snprintf(host, sizeof host, six ? "[%s]" : "%s", text);
    return fetch_lists(hosts, host, ntohs(six ? v6->sin6_port : v4->sin_port), false);
}
