/* Moves bytes between a client's socket and keepd's end of the pair, encrypted or not.
 *
 * Each direction reads RELAY_BYTES at most and offers them to the other side at once. Bytes that
 * the other side does not accept are kept, and nothing more is read in this direction until it has
 * accepted them. So back pressure reaches the sender, and a connection's buffers are bounded. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/loop.h"

#define ROUNDS_MAX        4  /* reads of one connection and direction in one turn of the loop */
#define HANDSHAKE_STEPS   16 /* steps of all handshakes in one turn */
#define DISCARD_BYTES_MAX ((size_t)16 << 20) /* discarded after the answer, so that it arrives */

/* --- bytes not yet accepted --- */

static bool rest_is_empty(const struct relay_rest *rest) {
    return rest->at == rest->size;
}

static bool rest_store(struct relay_rest *rest, const char *data, size_t size) {
    if (!size) return true;
    CHECK(!rest->data); /* nothing is read in a direction whose bytes wait */
    rest->data = mem_try_alloc(size, 1);
    if (!rest->data) return false;
    memcpy(rest->data, data, size);
    rest->at = 0;
    rest->size = size;
    return true;
}

static void rest_free(struct relay_rest *rest) {
    mem_free(rest->data);
    *rest = (struct relay_rest){0};
}

static void rest_advance(struct relay_rest *rest, size_t size) {
    rest->at += size;
    if (rest_is_empty(rest)) rest_free(rest);
}

/* --- the two sockets; results as those of tls_read and tls_write --- */

static ssize_t socket_failure(void) {
    return errno == EAGAIN || errno == EINTR ? TLS_AGAIN : TLS_FAILED;
}

static ssize_t read_client(struct conn *conn, char *to) {
    if (conn->tls) return tls_read(conn->tls, to, RELAY_BYTES);
    ssize_t got = recv(conn->fd, to, RELAY_BYTES, 0);
    return got < 0 ? socket_failure() : got;
}

static ssize_t write_client(struct conn *conn, const char *from, size_t size) {
    ssize_t sent =
        conn->tls ? tls_write(conn->tls, from, size) : send(conn->fd, from, size, MSG_NOSIGNAL);
    if (sent > 0) conn->written += (uint64_t)sent;
    return sent < 0 && !conn->tls ? socket_failure() : sent;
}

static ssize_t write_inner(struct conn *conn, const char *from, size_t size) {
    ssize_t sent = send(conn->inner, from, size, MSG_NOSIGNAL);
    return sent < 0 ? socket_failure() : sent;
}

/* --- closing --- */

static void on_closed(uv_handle_t *handle) {
    struct conn *conn = handle->data;
    conn->handles--;
    conn_release(conn);
}

void relay_close_client(struct conn *conn) {
    if (conn->fd < 0) return;
    uv_close((uv_handle_t *)&conn->poll, on_closed);
    tls_close(conn->tls);
    close(conn->fd);
    ledger_leave(&conn->server->ledger, &conn->entry);
    conn->fd = -1;
    conn->tls = NULL;
    rest_free(&conn->out);
}

void relay_close_inner(struct conn *conn) {
    if (conn->inner < 0) return;
    uv_close((uv_handle_t *)&conn->inner_poll, on_closed);
    close(conn->inner);
    conn->inner = -1;
    rest_free(&conn->in);
}

/* Finishes the output after libmicrohttpd has ended the connection and the client has the whole
 * answer. A close with unread input would be a reset, which can destroy the end of the answer. So
 * the input is discarded until the client closes, too, within bounds (conn.c limits the time). */
static void finish_output(struct conn *conn) {
    relay_close_inner(conn);
    conn_set_state(conn, CONN_CLOSING);
    if (conn->tls) tls_bye(conn->tls);
    shutdown(conn->fd, SHUT_WR);
    conn->end_sent = true;
    if (conn->end_read) relay_close_client(conn);
}

/* --- one direction, one round: true = more may be there --- */

static bool discard_round(struct conn *conn) {
    ssize_t got = read_client(conn, conn->server->scratch);
    if (got == TLS_AGAIN) return false;
    if (got > 0) conn->discarded += (size_t)got;
    if (got > 0 && conn->discarded <= DISCARD_BYTES_MAX) return true;
    relay_close_client(conn);
    return false;
}

/* Offers bytes to libmicrohttpd. If its side has ended, that shows when it is read; bytes written
 * after the end are lost. */
static bool offer_inner(struct conn *conn, const char *data, size_t size) {
    if (!size) return true;
    ssize_t sent = write_inner(conn, data, size);
    if (sent == TLS_FAILED) return true;
    if (sent < 0) sent = 0;
    if ((size_t)sent == size) return true;
    if (!rest_store(&conn->in, data + sent, size - (size_t)sent)) conn_kill(conn);
    return false;
}

static bool flush_in(struct conn *conn) {
    struct relay_rest *in = &conn->in;
    if (rest_is_empty(in)) return true;
    ssize_t sent = write_inner(conn, in->data + in->at, in->size - in->at);
    if (sent == TLS_FAILED) sent = (ssize_t)(in->size - in->at);
    if (sent > 0) rest_advance(in, (size_t)sent);
    return rest_is_empty(in);
}

/* Returns whether input is discarded: after a rejected request, up to a limit, so that the answer
 * arrives. */
static bool ignores_input(const struct conn *conn) {
    return conn->framing.state == FRAMING_OVER && conn->discarded > DISCARD_BYTES_MAX;
}

static bool check_input(struct conn *conn, size_t size) {
    struct server *server = conn->server;
    const struct framing_limits limits = {.head_bytes = server->options.max_header_bytes,
                                          .body_bytes = server->options.max_body_bytes};
    if (framing_passes(&conn->framing, size)) return offer_inner(conn, server->scratch, size);
    if (conn->framing.state == FRAMING_OVER) conn->discarded += size;
    buf_clear(&server->framed);
    if (framing_feed(&conn->framing, &limits, server->scratch, size, &server->framed)) {
        conn_kill(conn);
        return false;
    }
    return offer_inner(conn, server->framed.data, server->framed.size);
}

static bool read_round(struct conn *conn) {
    char *scratch = conn->server->scratch;
    if (conn->end_sent) return !conn->end_read && discard_round(conn);
    if (conn->inner < 0 || !flush_in(conn)) return false;
    if (conn->end_read) {
        shutdown(conn->inner, SHUT_WR);
        return false;
    }
    if (ignores_input(conn)) return false;
    ssize_t got = read_client(conn, scratch);
    if (got > 0) return check_input(conn, (size_t)got);
    if (got == TLS_FAILED) conn_kill(conn);
    if (got == 0) {
        conn->end_read = true;
        conn_left(conn);
        if (conn->fd >= 0 && conn->end_sent) relay_close_client(conn);
    }
    return got == 0;
}

static bool offer_client(struct conn *conn, const char *data, size_t size) {
    ssize_t sent = write_client(conn, data, size);
    if (sent == TLS_FAILED) {
        conn_kill(conn);
        return false;
    }
    if (sent < 0) sent = 0;
    if ((size_t)sent == size) return true;
    if (!rest_store(&conn->out, data + sent, size - (size_t)sent)) conn_kill(conn);
    return false;
}

static bool flush_out(struct conn *conn) {
    struct relay_rest *out = &conn->out;
    if (rest_is_empty(out)) return true;
    ssize_t sent = write_client(conn, out->data + out->at, out->size - out->at);
    if (sent > 0) rest_advance(out, (size_t)sent);
    if (sent == TLS_FAILED) conn_kill(conn);
    return conn->fd >= 0 && rest_is_empty(out);
}

static bool write_round(struct conn *conn) {
    char *scratch = conn->server->scratch;
    if (conn->inner < 0 || !flush_out(conn)) return false;
    if (conn->inner_end) {
        finish_output(conn);
        return false;
    }
    ssize_t got = recv(conn->inner, scratch, RELAY_BYTES, 0);
    if (got > 0) return offer_client(conn, scratch, (size_t)got) && got == RELAY_BYTES;
    if (got < 0 && socket_failure() == TLS_AGAIN) return false;
    conn->inner_end = true; /* libmicrohttpd has closed it or, if it left bytes unread, reset it */
    finish_output(conn);    /* now, because no further event reports this end */
    return false;
}

static void run_in(struct conn *conn) {
    for (int i = 0; i < ROUNDS_MAX && conn->fd >= 0 && read_round(conn); i++) continue;
}

static void run_out(struct conn *conn) {
    for (int i = 0; i < ROUNDS_MAX && conn->fd >= 0 && write_round(conn); i++) continue;
}

/* --- events --- */

static int client_events(const struct conn *conn) {
    int events = conn->watching ? UV_DISCONNECT : 0;
    if (conn->state == CONN_HANDSHAKE)
        return tls_wants_write(conn->tls) ? UV_WRITABLE : UV_READABLE;
    if (!conn->end_read && !ignores_input(conn) && rest_is_empty(&conn->in)) events |= UV_READABLE;
    if (!rest_is_empty(&conn->out)) events |= UV_WRITABLE;
    return events;
}

static int inner_events(const struct conn *conn) {
    return (!conn->inner_end && rest_is_empty(&conn->out) ? UV_READABLE : 0) |
           (rest_is_empty(&conn->in) ? 0 : UV_WRITABLE);
}

/* Starts a poll if its events have changed: libuv makes a system call even for the same events. */
static int update_poll(uv_poll_t *poll, int before, int events, uv_poll_cb callback) {
    if (events == before) return before;
    if (!events)
        uv_poll_stop(poll);
    else if (uv_poll_start(poll, events, callback))
        return 0;
    return events;
}

void relay_update(struct conn *conn) {
    if (conn->fd >= 0)
        conn->events = update_poll(&conn->poll, conn->events, client_events(conn), relay_on_client);
    if (conn->inner >= 0)
        conn->inner_events =
            update_poll(&conn->inner_poll, conn->inner_events, inner_events(conn), relay_on_inner);
}

bool relay_holds_output(const struct conn *conn) {
    if (conn->fd < 0 || conn->inner < 0) return false;
    return !rest_is_empty(&conn->out) || (!conn->attached && !conn->inner_end);
}

bool relay_has_output(const struct conn *conn) {
    return relay_holds_output(conn) ||
           (conn->fd >= 0 && conn->inner >= 0 && sock_unread(conn->inner));
}

static void send_now(struct conn *conn) {
    run_out(conn);
    relay_update(conn);
    conn_release(conn);
}

/* Notes the connection that libmicrohttpd is about to write for. libmicrohttpd serves one
 * connection after another; so the output of the one before is complete, and its client need not
 * wait for the whole round. */
void relay_soon(struct conn *conn) {
    struct server *server = conn->server;
    struct conn *before = server->soon;
    if (before == conn) return;
    server->soon = conn;
    if (before) send_now(before);
}

void relay_sent(struct server *server) {
    struct conn *last = server->soon;
    server->soon = NULL;
    if (last) send_now(last);
}

/* --- callbacks --- */

/* Refuses plain HTTP on a TLS connection: a TLS record begins with 22, a request with a letter. The
 * bytes are read first, because a close with unread input could discard the answer. */
static bool refuse_plain(struct conn *conn) {
    static const char text[] =
        "{\"error\":{\"message\":\"This port speaks HTTPS: the URL must begin "
        "with https://.\",\"type\":\"invalid_request_error\",\"param\":null,"
        "\"code\":\"https_required\"}}";
    char head[200], first;
    if (tls_has_answered(conn->tls) || recv(conn->fd, &first, 1, MSG_PEEK) != 1) return false;
    if (first < 'A' || first > 'Z') return false;
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
                        "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                        sizeof text - 1);
    (void)recv(conn->fd, conn->server->scratch, RELAY_BYTES, 0);
    (void)send(conn->fd, head, (size_t)size, MSG_NOSIGNAL | MSG_MORE);
    (void)send(conn->fd, text, sizeof text - 1, MSG_NOSIGNAL);
    log_info("a client sent plain HTTP to this port, which speaks HTTPS");
    conn_kill(conn);
    return true;
}

static void step_handshake(struct conn *conn) {
    struct server *server = conn->server;
    if (server->handshake_steps++ >= HANDSHAKE_STEPS) return; /* libuv calls in the next turn */
    if (refuse_plain(conn)) return;
    int rc = tls_handshake(conn->tls);
    if (rc == TLS_FAILED) {
        log_debug("connection closed: its handshake failed");
        conn_kill(conn);
    } else if (rc == 0) {
        conn_attach(conn);
        run_in(conn); /* data may have arrived with the last handshake message */
    }
}

/* Handles events of the client's socket. If the descriptor has an error, libuv stops the handle;
 * the next read or write shows the error. */
void relay_on_client(uv_poll_t *poll, int status, int events) {
    struct conn *conn = poll->data;
    struct server *server = conn->server;
    if (status) conn->events = 0;
    if (conn->state == CONN_HANDSHAKE) {
        step_handshake(conn);
    } else {
        if (status || events & UV_WRITABLE) run_out(conn);
        if (status || events & UV_READABLE) run_in(conn);
        if (status && conn->fd >= 0) conn_kill(conn);
        if (conn->fd >= 0 && events & UV_DISCONNECT) conn_left(conn);
    }
    relay_update(conn);
    server_may_end(server);
}

void relay_on_inner(uv_poll_t *poll, int status, int events) {
    struct conn *conn = poll->data;
    struct server *server = conn->server;
    if (status) {
        conn->inner_events = 0;
        sock_clear_error(conn->inner); /* data before the error can still be read */
    }
    if (status || events & UV_READABLE) run_out(conn);
    if (conn->fd >= 0 && conn->inner >= 0 && events & UV_WRITABLE) run_in(conn);
    relay_update(conn);
    server_may_end(server);
}
