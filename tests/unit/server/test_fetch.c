#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <netinet/in.h>
#include <string.h>

#include "server/fetch.h"

static struct sockaddr_storage make_address(const char *text, int port) {
    struct sockaddr_storage storage = {0};
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1)
        memcpy(&storage, &v4, sizeof v4);
    else if (inet_pton(AF_INET6, text, &v6.sin6_addr) == 1)
        memcpy(&storage, &v6, sizeof v6);
    return storage;
}

static void expect_public(const char *const *texts, bool public) {
    for (; *texts; texts++) {
        const struct sockaddr_storage address = make_address(*texts, 80);
        cr_expect_neq(address.ss_family, 0, "%s", *texts);
        cr_expect_eq(fetch_is_public((const void *)&address), public, "%s", *texts);
    }
}

Test(fetch, only_public_addresses) {
    static const char *const closed[] = {
        "0.0.0.0",         "10.1.2.3",       "100.64.0.1",      "127.0.0.1",    "127.255.0.1",
        "169.254.169.254", "172.16.0.1",     "172.31.255.255",  "192.0.0.1",    "192.0.2.1",
        "192.168.0.1",     "198.18.0.1",     "198.19.255.1",    "198.51.100.1", "203.0.113.1",
        "224.0.0.1",       "240.0.0.1",      "255.255.255.255", "::",           "::1",
        "fe80::1",         "fc00::1",        "fd12::1",         "ff02::1",      "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "::127.0.0.1",    "64:ff9b::7f00:1", "2001:db8::1",  "2001::1",
        "2001:10::1",      "2002:7f00:1::1", "3fff::1",         "100::1",       NULL};
    static const char *const open[] = {
        "1.1.1.1",         "9.255.255.255", "11.0.0.0",        "100.63.0.1",
        "100.128.0.1",     "172.15.0.1",    "172.32.0.1",      "192.167.0.1",
        "198.17.0.1",      "198.20.0.1",    "223.255.255.255", "::ffff:8.8.8.8",
        "2606:4700::1111", "2a00:1450::1",  "2001:4860::8888", NULL};
    expect_public(closed, false);
    expect_public(open, true);
    const struct sockaddr other = {.sa_family = AF_UNIX};
    cr_expect_not(fetch_is_public(&other));
}

Test(fetch, hosts_of_a_list) {
    char *items[] = {"example.com", "*.wide.org", "127.0.0.1:8000",
                     "[::1]:8000",  "10.0.0.1",   "port.net:81"};
    const struct server_list hosts = {items, sizeof items / sizeof *items};
    static const struct {
        const char *host;
        int port;
        bool own, listed;
    } rows[] = {{"example.com", 80, true, true},       {"EXAMPLE.com", 443, true, true},
                {"example.com", 8080, false, false},   {"a.example.com", 80, true, false},
                {"a.wide.org", 80, true, true},        {"a.b.wide.org", 80, true, true},
                {"wide.org", 80, true, false},         {".wide.org", 80, true, false},
                {"awide.org", 80, true, false},        {"127.0.0.1", 8000, false, true},
                {"127.0.0.1", 80, true, false},        {"[::1]", 8000, false, true},
                {"port.net", 81, false, true},         {"port.net", 80, true, false},
                {"example.com.evil", 80, true, false}, {"", 80, true, false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        cr_expect_eq(fetch_lists(&hosts, rows[i].host, rows[i].port, rows[i].own), rows[i].listed,
                     "%s:%d", rows[i].host, rows[i].port);
    /* An address is used although it is not public only where it is listed with the port. */
    static const struct {
        const char *text;
        int port;
        bool listed;
    } addresses[] = {{"127.0.0.1", 8000, true},  {"127.0.0.1", 80, false},
                     {"127.0.0.2", 8000, false}, {"::1", 8000, true},
                     {"::1", 80, false},         {"10.0.0.1", 80, false}};
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) {
        const struct sockaddr_storage address = make_address(addresses[i].text, addresses[i].port);
        cr_expect_eq(fetch_lists_address(&hosts, (const void *)&address), addresses[i].listed, "%s",
                     addresses[i].text);
    }
}

Test(fetch, entries) {
    static const char *const good[] = {"a",           "example.com", "*.example.com",   "a-b.c:80",
                                       "127.0.0.1:1", "[::1]",       "[fe80::1]:65535", NULL};
    static const char *const bad[] = {"",     "*",   "*.",       "a:",   "a:0",  "a:65536",
                                      "a:8x", "a b", "http://a", "a/b",  "[::1", "[::1]x",
                                      "[x]",  ":80", "..a",      "a:-1", NULL};
    for (size_t i = 0; good[i]; i++) cr_expect(fetch_is_entry(good[i]), "%s", good[i]);
    for (size_t i = 0; bad[i]; i++) cr_expect_not(fetch_is_entry(bad[i]), "%s", bad[i]);
}
