/* W3C traceparents, and the queue of spans before a collector that does not answer. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "server/otlp.h"
#include "server/spans.h"

#define TRACE  "4bf92f3577b34da6a3ce929d0e0e4736"
#define PARENT "00f067aa0ba902b7"

Test(spans, a_traceparent_is_taken_over) {
    static const struct {
        const char *text;
        bool sampled;
    } rows[] = {
        {"00-" TRACE "-" PARENT "-01", true},  {"00-" TRACE "-" PARENT "-00", false},
        {"00-" TRACE "-" PARENT "-ff", true},  {"cc-" TRACE "-" PARENT "-01-more", true},
        {"cc-" TRACE "-" PARENT "-02", false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct spans_context context = {0};
        cr_assert(spans_parse(rows[i].text, &context), "%s", rows[i].text);
        cr_assert_eq(context.sampled, rows[i].sampled);
        cr_assert(context.trace[0] == 0x4b && context.trace[15] == 0x36);
        cr_assert(context.parent[0] == 0x00 && context.parent[7] == 0xb7);
    }
}

Test(spans, anything_else_is_none) {
    static const char *const rows[] = {
        "",
        "00",
        "00-" TRACE "-" PARENT,
        "00-" TRACE "-" PARENT "-1",
        "00-" TRACE "-" PARENT "-01-more",
        "00-" TRACE "-" PARENT "-01 ",
        " 00-" TRACE "-" PARENT "-01",
        "cc-" TRACE "-" PARENT "-01more",
        "ff-" TRACE "-" PARENT "-01",
        "0-" TRACE "-" PARENT "-01x",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-" PARENT "-01",
        "00-" TRACE "-00F067AA0BA902B7-01",
        "00-" TRACE "-" PARENT "-0g",
        "00-00000000000000000000000000000000-" PARENT "-01",
        "00-" TRACE "-0000000000000000-01",
        "00_" TRACE "-" PARENT "-01",
        "00-" TRACE "_" PARENT "-01",
        "00-" TRACE "-" PARENT "_01",
        "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b70-01",
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct spans_context context = {.sampled = true};
        cr_assert_not(spans_parse(rows[i], &context), "%s", rows[i]);
        cr_assert(context.sampled && context.trace[0] == 0);
    }
    struct spans_context a, b;
    spans_begin(&a), spans_begin(&b);
    cr_assert(a.sampled && memcmp(a.trace, b.trace, sizeof a.trace) != 0);
}

Test(otlp, endpoints) {
    static const char *const rows[] = {"",        "collector:4318", "http://",      "http:///x",
                                       "ftp://h", "http://h:1/?a",  "https://h #b", "HTTP://h"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct otlp *otlp;
        struct fault fault = {0};
        cr_assert_eq(otlp_open(rows[i], &otlp, &fault), ERR_INVALID, "%s", rows[i]);
        cr_assert_str_eq(fault.field, "otlp-endpoint");
        cr_assert_null(otlp);
    }
}

/* A socket that accepts connections, because its queue does, and never answers. */
static int open_silent(char *endpoint, size_t size) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    cr_assert_eq(listen(fd, 4), 0);
    cr_assert_eq(getsockname(fd, (struct sockaddr *)&address, &length), 0);
    snprintf(endpoint, size, "http://127.0.0.1:%d", ntohs(address.sin_port));
    return fd;
}

/* Spans without room are counted, and those that wait at the end are given up. */
Test(otlp, the_queue_is_bounded) {
    enum { ADDED = 3 * OTLP_REQUESTS_MAX };
    char endpoint[64];
    int fd = open_silent(endpoint, sizeof endpoint);
    struct otlp *otlp;
    struct fault fault = {0};
    struct buf spans;
    cr_assert_eq(otlp_open(endpoint, &otlp, &fault), 0, "%s", fault.text);
    buf_open(&spans, OTLP_REQUEST_MAX);
    buf_str(&spans, "{}");
    for (int i = 0; i < ADDED; i++) otlp_add(otlp, &spans);
    struct otlp_counts counts = otlp_counts_of(otlp);
    cr_assert(counts.exported == 0 && counts.refused == 0);
    cr_assert_geq(counts.full, OTLP_REQUESTS_MAX, "at most a batch and a queue were taken");
    buf_clear(&spans);
    for (size_t i = 0; i <= OTLP_REQUEST_MAX; i++) buf_char(&spans, ' ');
    cr_assert(spans.failed);
    otlp_add(otlp, &spans);
    cr_assert_eq(otlp_counts_of(otlp).full, counts.full + 1);
    otlp_close(otlp);
    buf_close(&spans);
    close(fd);
}
