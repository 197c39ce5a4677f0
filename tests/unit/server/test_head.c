#include <criterion/criterion.h>
#include <string.h>

#include "server/framing.h"

#define ROOM 8192

/* Appends what libmicrohttpd gets for `data`, fed in pieces of `step` bytes. */
static void feed(struct framing *f, const char *data, size_t size, size_t step, struct buf *out) {
    const struct framing_limits limits = {.head_bytes = 512, .body_bytes = 64};
    for (size_t at = 0; at < size; at += step) {
        size_t part = size - at < step ? size - at : step;
        struct buf piece;
        buf_open(&piece, ROOM);
        cr_assert_eq(framing_feed(f, &limits, data + at, part, &piece), 0);
        if (piece.size) buf_add(out, piece.data, piece.size);
        buf_close(&piece);
    }
}

static void expect(const char *data, const char *wanted, int status) {
    size_t size = strlen(data);
    for (size_t step = 1; step <= size; step = step < 4 ? step + 1 : step * 2) {
        struct framing f = {0};
        struct buf out;
        buf_open(&out, ROOM);
        feed(&f, data, size, step, &out);
        cr_assert_str_eq(out.data ? out.data : "", wanted, "'%s' by %zu: '%s'", data, step,
                         out.data ? out.data : "");
        cr_assert_eq(f.refusal.status, status, "'%s' by %zu: %d", data, step, f.refusal.status);
        cr_assert_eq(f.state == FRAMING_OVER, status != 0);
        framing_close(&f);
        buf_close(&out);
    }
}

#define INNOCENT "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

static void refused(const char *data, int status) {
    expect(data, INNOCENT, status);
}

Test(framing, heads_have_one_form) {
    expect("GET /a?b=c&d HTTP/1.1\r\nHost: x\r\n\r\n", "GET /a?b=c&d HTTP/1.1\r\nHost: x\r\n\r\n",
           0);
    expect("GET / HTTP/1.1\r\nHOST:\t x \t\r\nA:\r\n\r\n",
           "GET / HTTP/1.1\r\nHOST: x\r\nA: \r\n\r\n", 0);
    expect("\r\n\r\nGET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.0\r\n\r\n", 0);
    expect("GET / HTTP/1.1\r\nHost: x\r\nCookie: a=b\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
           0);
    expect("GET /?a=%00 HTTP/1.0\r\n\r\n", "GET /?a=%00 HTTP/1.0\r\n\r\n", 0);
    expect("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 0);
}

Test(framing, absolute_targets) {
    expect("GET HTTP://a:1/b?c HTTP/1.1\r\nHost: x\r\nA: b\r\n\r\n",
           "GET /b?c HTTP/1.1\r\nHost: a:1\r\nA: b\r\n\r\n", 0);
    expect("GET http://a HTTP/1.1\r\nHost: x\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\n\r\n", 0);
    expect("GET https://a?b/c HTTP/1.1\r\nHost: x\r\n\r\n", "GET /?b/c HTTP/1.1\r\nHost: a\r\n\r\n",
           0);
    refused("GET http:///b HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET http://a@b/ HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET http://a\xff/b HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET ftp://a/b HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET http://a/ HTTP/1.1\r\n\r\n", 400);
}

Test(framing, heads_that_are_refused) {
    refused("GET / HTTP/1.1\r\n\r\n", 400);
    refused("GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400);
    refused("GET / HTTP/1.1\r\nHost: x\r\n A: b\r\n\r\n", 400);
    refused("GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n", 400);
    refused("GET / HTTP/1.1\r\nHost: x\r\nA\x01: b\r\n\r\n", 400);
    refused("GET / HTTP/1.1\r\nHost: x,y\r\n\r\n", 400);
    refused("GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505);
    refused("GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET /%0 HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET /# HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET / a HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    refused("GET / HTTP/1.1 \r\nHost: x\r\n\r\n", 400);
    refused("GET / HTTP/1.1\nHost: x\n\n", 400);
    refused("GET / HTTP/1.1\r\nHost: x\r\nA: \rb\r\n\r\n", 400);
    refused("\r\n\r\n\r\n\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", 400);
    expect("HEAD /%00 HTTP/1.1\r\nHost: x\r\n\r\n",
           "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 400);
}

Test(framing, heads_have_a_size) {
    char data[1024];
    for (int size = 512; size <= 513; size++) {
        memset(data, 'b', sizeof data);
        memcpy(data, "GET / HTTP/1.1\r\nHost: x\r\nA: ", 28);
        memcpy(data + size - 4, "\r\n\r\n", 5);
        struct framing f = {0};
        struct buf out;
        buf_open(&out, ROOM);
        feed(&f, data, (size_t)size, 100, &out);
        cr_assert_eq(f.refusal.status, size == 512 ? 0 : 431);
        framing_close(&f);
        buf_close(&out);
    }
}

#define POST(fields, body) "POST / HTTP/1.1\r\nHost: x\r\n" fields "\r\n\r\n" body

Test(framing, lengths) {
    expect(POST("Content-Length: 2", "{}GET / HTTP/1.0\r\n\r\n"),
           POST("Content-Length: 2", "{}GET / HTTP/1.0\r\n\r\n"), 0);
    expect(POST("Content-Length: 0002", "{}"), POST("Content-Length: 0002", "{}"), 0);
    expect(POST("Content-Length: 2", "{}x\n"), POST("Content-Length: 2", "{}" INNOCENT), 400);
    refused(POST("Content-Length: abc", ""), 400);
    refused(POST("Content-Length: -1", ""), 400);
    refused(POST("Content-Length: 0x2", ""), 400);
    refused(POST("Content-Length: ", ""), 400);
    refused(POST("Content-Length: 2\r\nContent-Length: 2", "{}"), 400);
    refused(POST("Content-Length: 2\r\nTransfer-Encoding: chunked", "{}"), 400);
    refused(POST("Content-Length: 18446744073709551618", ""), 413);
    refused(POST("Transfer-Encoding: gzip, chunked", ""), 501);
    refused("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400);
}

#define CHUNKS(body) POST("Transfer-Encoding: chunked", body)

Test(framing, chunks) {
    expect(CHUNKS("2\r\n{}\r\n0\r\n\r\n"), CHUNKS("2\r\n{}\r\n0\r\n\r\n"), 0);
    expect(CHUNKS("002 ; a=\"b\"\r\n{}\r\n0;x\r\nA: b\r\n\r\nGET / HTTP/1.0\r\n\r\n"),
           CHUNKS("2\r\n{}\r\n0\r\n\r\nGET / HTTP/1.0\r\n\r\n"), 0);
    expect(CHUNKS("2\r\n\r\n\r\n0\r\n\r\n"), CHUNKS("2\r\n\r\n\r\n0\r\n\r\n"), 0);
    expect(CHUNKS("x\r\n"), CHUNKS("0\r\n\r\n"), 400);
    expect(CHUNKS("\r\n"), CHUNKS("0\r\n\r\n"), 400);
    expect(CHUNKS("2 2\r\n"), CHUNKS("0\r\n\r\n"), 400);
    expect(CHUNKS("2\n"), CHUNKS("0\r\n\r\n"), 400);
    expect(CHUNKS("2\r\n{}x"), CHUNKS("2\r\n{}\r\n0\r\n\r\n"), 400);
    expect(CHUNKS("2\r\n{}\r\r"), CHUNKS("2\r\n{}\r\n0\r\n\r\n"), 400);
    expect(CHUNKS("10000000000000000\r\n"), CHUNKS("0\r\n\r\n"), 400);
    expect(CHUNKS("41\r\n"), CHUNKS("0\r\n\r\n"), 413);
    expect(CHUNKS("1\r\na\r\n40\r\n"), CHUNKS("1\r\na\r\n0\r\n\r\n"), 413);
    expect(CHUNKS("1\r\na\r\n3fffffffffffffff\r\n"), CHUNKS("1\r\na\r\n0\r\n\r\n"), 413);
}

Test(framing, trailers_have_a_size) {
    char data[2048] = CHUNKS("0\r\n");
    for (int i = 0; i < 100; i++) strcat(data, "Ab: c\r\n");
    struct framing f = {0};
    struct buf out;
    buf_open(&out, ROOM);
    feed(&f, data, strlen(data), 100, &out);
    cr_assert_eq(f.refusal.status, 400);
    framing_close(&f);
    buf_close(&out);
}

/* The bytes of a body need not be copied. */
Test(framing, bodies_pass) {
    struct framing f = {0};
    struct buf out;
    const char *head = POST("Content-Length: 10", "12");
    buf_open(&out, ROOM);
    cr_assert_not(framing_passes(&f, 1));
    feed(&f, head, strlen(head), 1000, &out);
    cr_assert(!framing_passes(&f, 9) && framing_passes(&f, 3) && framing_passes(&f, 5));
    cr_assert(!framing_passes(&f, 1) && f.state == FRAMING_HEAD);
    buf_close(&out);
    framing_close(&f);
}
