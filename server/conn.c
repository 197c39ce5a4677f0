/* The life of a connection: opening, closing, deadlines.
 *
 * A connection has two sides (server/conn.h) and is freed when the client's socket is closed and
 * libmicrohttpd has told conn_notify that it is done. A client that closes only its sending half
 * counts as disconnected. */
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/loop.h"
#include "server/move.h"
#include "server/sock.h"

#define MS                1000000ll
#define LEFT_MS           500 /* time to read what a client sent before it closed its side */
#define BODY_BYTES_PER_MS 16
#define READ_BYTES_PER_MS 1    /* the slowest reading of a stream by its client that is accepted */
#define HELD_BYTES_PER_MS 16   /* the same for an answer that waits in memory */
#define HELLO_MS          1000 /* a client that has sent nothing may lose its place after this time */
#define ANSWER_MS         5000 /* a client in a handshake or a body may lose its place after this time */
#define LINGER_MS         2000 /* time for the client to close, after the end of the output */

void conn_set_state(struct conn *conn, enum conn_state state) {
    conn->server->handshakes += (state == CONN_HANDSHAKE) - (conn->state == CONN_HANDSHAKE);
    CHECK(conn->server->handshakes >= 0);
    conn->state = state;
    conn->since_ns = conn->progress_ns = clock_ns();
}

/* --- the client leaves --- */

/* Ends the request and closes both sockets; libmicrohttpd releases the connection when it sees the
 * end of its socket. */
void conn_kill(struct conn *conn) {
    if (conn->exchange) exchange_gone(conn->exchange);
    if (conn->fd >= 0) shutdown(conn->fd, SHUT_RDWR);
    relay_close_client(conn);
    relay_close_inner(conn);
    if (conn->state != CONN_CLOSING) conn_set_state(conn, CONN_CLOSING);
}

/* Handles a client that has closed its side. During an answer the connection ends at once.
 * Otherwise bytes of a request may still be unread, so libmicrohttpd gets LEFT_MS to read them. */
void conn_left(struct conn *conn) {
    conn->watching = false;
    conn->left_ns = clock_ns();
    if (conn->state == CONN_BUSY) conn_kill(conn);
}

void conn_watch(struct conn *conn) {
    conn->watching = true;
    relay_update(conn);
}

/* --- opening and closing --- */

void conn_open(struct server *server, int fd, const struct sock_peer *peer,
               const struct ledger_entry *entry) {
    struct conn *conn = mem_try_alloc(1, sizeof *conn);
    if (!conn || uv_poll_init(&server->loop, &conn->poll, fd)) {
        struct ledger_entry unused = *entry;
        ledger_leave(&server->ledger, &unused);
        mem_free(conn);
        close(fd);
        return;
    }
    conn->server = server;
    conn->poll.data = conn->inner_poll.data = conn;
    conn->fd = fd;
    conn->inner = -1;
    conn->peer = *peer;
    conn->entry = *entry;
    conn->next = server->conns;
    if (conn->next) conn->next->prev = conn;
    server->conns = conn;
    server->conn_count++;
    conn->number = ++server->conn_total;
    conn->handles = 1;
    if (!server->tls) {
        conn_attach(conn);
        return;
    }
    conn_set_state(conn, CONN_HANDSHAKE);
    conn->tls = tls_open(server->tls, fd);
    if (!conn->tls) conn_kill(conn);
    relay_update(conn);
}

void conn_attach(struct conn *conn) {
    struct server *server = conn->server;
    int pair[2];
    if (sock_pair(pair)) {
        conn_kill(conn);
        return;
    }
    if (uv_poll_init(&server->loop, &conn->inner_poll, pair[0])) {
        close(pair[0]);
        close(pair[1]);
        conn_kill(conn);
        return;
    }
    conn->handles++;
    conn->inner = pair[0];
    conn_set_state(conn, CONN_FRESH);
    server->attaching = conn;
    if (MHD_add_connection(server->daemon, pair[1], &conn->peer.any, conn->peer.size) != MHD_YES)
        conn_kill(conn); /* pair[1] is closed */
    server->attaching = NULL;
    conn_watch(conn);
}

void conn_release(struct conn *conn) {
    struct server *server = conn->server;
    if (conn->attached || conn->handles || conn == server->soon) return;
    CHECK(conn->fd < 0 && conn->inner < 0 && !conn->exchange);
    if (conn->prev)
        conn->prev->next = conn->next;
    else
        server->conns = conn->next;
    if (conn->next) conn->next->prev = conn->prev;
    server->conn_count--;
    framing_close(&conn->framing);
    mem_free(conn);
    listener_update(server);
}

void conn_notify(void *cls, struct MHD_Connection *connection, void **socket_context,
                 enum MHD_ConnectionNotificationCode code) {
    struct server *server = cls;
    struct conn *conn = *socket_context;
    (void)connection;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        CHECK(server->attaching && !server->attaching->attached);
        *socket_context = server->attaching;
        server->attaching->attached = true;
        return;
    }
    conn->attached = false;
    if (conn->state != CONN_CLOSING) conn_set_state(conn, CONN_CLOSING);
    conn_release(conn);
}

bool conn_all_sent(const struct server *server) {
    for (const struct conn *conn = server->conns; conn; conn = conn->next)
        if (relay_has_output(conn)) return false;
    return true;
}

/* --- deadlines --- */

/* Prolongs the client's time limit for each byte that the client has received: its start moves
 * forward, but not beyond the present. So a client that reads slower than this rate loses the
 * answer. */
static void note_received(struct conn *conn, int64_t now_ns) {
    const struct exchange *ex = conn->exchange;
    int64_t rate = ex && ex->entry.held > 0 ? HELD_BYTES_PER_MS : READ_BYTES_PER_MS;
    uint64_t received = conn->received;
    int64_t earned_ns = INT64_MAX;
    if (sock_pending(conn->fd, conn->written, &received)) {
        int64_t fresh = received > conn->received ? (int64_t)(received - conn->received) : 0;
        if (fresh < INT64_MAX / MS) earned_ns = fresh * MS / rate;
        if (fresh > 0) conn->received = received;
    }
    conn->progress_ns =
        earned_ns < now_ns - conn->progress_ns ? conn->progress_ns + earned_ns : now_ns;
}

static bool is_stalled(struct conn *conn, int64_t now_ns) {
    note_received(conn, now_ns);
    return (now_ns - conn->progress_ns) / MS > conn->server->options.timeouts.stall;
}

/* Returns by how much the received bytes of a body extend its time limit. An upload may have
 * gigabytes while other uploads wait, so it must come faster than other bodies. */
static int64_t allowed_ms(const struct exchange *ex) {
    if (!ex) return 0;
    return (int64_t)(ex->body_seen / (ex->move ? MOVE_BYTES_PER_MS : BODY_BYTES_PER_MS));
}

bool conn_gives_way(const struct conn *conn, int64_t now_ns) {
    int64_t elapsed_ms = (now_ns - conn->since_ns) / MS;
    switch (conn->state) {
    case CONN_HANDSHAKE: /* conn_is_silent forbids the close while sent bytes are unread */
        return elapsed_ms > (tls_has_answered(conn->tls) ? ANSWER_MS : HELLO_MS);
    case CONN_FRESH:
    case CONN_IDLE:
        return elapsed_ms > HELLO_MS && !relay_holds_output(conn);
    case CONN_BODY:
        return elapsed_ms > ANSWER_MS + allowed_ms(conn->exchange) && !relay_holds_output(conn);
    case CONN_BUSY:
    case CONN_CLOSING:
        break;
    }
    return false;
}

bool conn_is_silent(const struct conn *conn) {
    return !sock_unread(conn->fd) && !relay_has_output(conn);
}

static bool conn_is_late(struct conn *conn, int64_t now_ns) {
    const struct server_timeouts *t = &conn->server->options.timeouts;
    /* An answer that is still on its way counts as one that is being written. */
    if (conn->state == CONN_IDLE && relay_has_output(conn)) {
        conn->since_ns = now_ns;
        return is_stalled(conn, now_ns);
    }
    int64_t elapsed_ms = (now_ns - conn->since_ns) / MS;
    if (conn->left_ns && conn->state != CONN_BUSY && conn->state != CONN_CLOSING)
        return now_ns - conn->left_ns > LEFT_MS * MS && elapsed_ms > LEFT_MS;
    switch (conn->state) {
    case CONN_HANDSHAKE:
        return elapsed_ms > t->handshake;
    case CONN_FRESH:
        return elapsed_ms > t->header;
    case CONN_IDLE:
        return elapsed_ms > t->idle;
    case CONN_BODY:
        return elapsed_ms > t->body + allowed_ms(conn->exchange);
    case CONN_BUSY:
        return is_stalled(conn, now_ns);
    case CONN_CLOSING:
        if (!conn->end_sent) return is_stalled(conn, now_ns);
        return elapsed_ms > (conn->discarded > 0 ? t->body : LINGER_MS);
    }
    return false;
}

void conn_tick(struct server *server, int64_t now_ns) {
    for (struct conn *conn = server->conns, *next; conn; conn = next) {
        next = conn->next;
        if (conn->fd < 0 || !conn_is_late(conn, now_ns)) continue;
        log_debug("connection closed: too slow, state %d", (int)conn->state);
        conn_kill(conn);
    }
    listener_update(server);
}
