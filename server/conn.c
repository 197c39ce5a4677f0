/* Connections: who is there, who left, who takes too long.
 *
 * libmicrohttpd does not look at a suspended connection's socket, so libuv does: UV_DISCONNECT on
 * the same descriptor in another epoll. It fires for half-closed clients too; they count as gone.
 * libmicrohttpd closes the descriptor itself, after telling conn_notify: the watch ends there. */
#include <sys/socket.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/http.h"
#include "server/sock.h"

#define MS      1000000ll
#define LEFT_MS 500

/* libmicrohttpd notices the end of the socket and lets go of the connection by itself. */
static void kill_conn(struct conn *conn) {
    if (conn->exchange) exchange_gone(conn->exchange);
    shutdown(conn->fd, SHUT_RDWR);
}

/* A request being worked on has lost its client. Between requests the bytes of one may still be
 * unread, so libmicrohttpd gets a moment; it can miss an end that arrives together with data. */
static void on_disconnect(uv_poll_t *poll, int status, int events) {
    struct conn *conn = poll->data;
    if (status == 0 && !(events & UV_DISCONNECT)) return;
    uv_poll_stop(&conn->poll);
    conn->watching = false;
    conn->left_ns = clock_ns();
    if (conn->state == CONN_BUSY) kill_conn(conn);
}

void conn_watch(struct conn *conn) {
    if (!conn->watching)
        conn->watching = uv_poll_start(&conn->poll, UV_DISCONNECT, on_disconnect) == 0;
}

void conn_set_state(struct conn *conn, enum conn_state state) {
    conn->state = state;
    conn->since_ns = conn->progress_ns = clock_ns();
}

/* --- opening and closing --- */

static void on_poll_closed(uv_handle_t *handle) {
    mem_free(handle->data);
}

static void open_conn(struct server *server, struct MHD_Connection *connection,
                      void **socket_context) {
    int fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    struct conn *conn = mem_try_alloc(1, sizeof *conn);
    *socket_context = conn;
    if (!conn || uv_poll_init(&server->loop, &conn->poll, fd)) {
        mem_free(conn);
        *socket_context = NULL; /* http_access closes it */
        return;
    }
    conn->server = server;
    conn->poll.data = conn;
    conn->fd = fd;
    conn->next = server->conns;
    if (conn->next) conn->next->prev = conn;
    server->conns = conn;
    server->conn_count++;
    server->conn_total++;
    conn_set_state(conn, CONN_FRESH);
    conn_watch(conn);
}

static void close_conn(struct server *server, struct conn *conn) {
    if (conn->prev)
        conn->prev->next = conn->next;
    else
        server->conns = conn->next;
    if (conn->next) conn->next->prev = conn->prev;
    server->conn_count--;
    uv_close((uv_handle_t *)&conn->poll, on_poll_closed);
}

void conn_notify(void *cls, struct MHD_Connection *connection, void **socket_context,
                 enum MHD_ConnectionNotificationCode code) {
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        open_conn(cls, connection, socket_context);
    else if (*socket_context)
        close_conn(cls, *socket_context);
}

/* --- deadlines --- */

/* Has the client taken anything since the last tick, or is there nothing to take? */
static bool has_progress(struct conn *conn) {
    uint64_t acked = conn->acked;
    if (!sock_pending(conn->fd, &acked)) return true;
    bool moved = acked != conn->acked;
    conn->acked = acked;
    return moved;
}

static bool is_late(struct conn *conn, int64_t now_ns) {
    const struct server_timeouts *t = &conn->server->options.timeouts;
    int64_t elapsed_ms = (now_ns - conn->since_ns) / MS;
    if (conn->left_ns && conn->state != CONN_BUSY)
        return now_ns - conn->left_ns > LEFT_MS * MS && elapsed_ms > LEFT_MS;
    switch (conn->state) {
    case CONN_FRESH:
        return elapsed_ms > t->header;
    case CONN_IDLE:
        return elapsed_ms > t->idle;
    case CONN_BODY:
        return elapsed_ms >
               t->body + (int64_t)(conn->exchange ? conn->exchange->body_seen / 16 : 0);
    case CONN_BUSY:
        if (has_progress(conn)) conn->progress_ns = now_ns;
        return (now_ns - conn->progress_ns) / MS > t->stall;
    }
    return false;
}

void conn_tick(struct server *server, int64_t now_ns) {
    for (struct conn *conn = server->conns, *next; conn; conn = next) {
        next = conn->next;
        if (!is_late(conn, now_ns)) continue;
        log_debug("connection closed: too slow, state %d", (int)conn->state);
        conn->since_ns = conn->progress_ns = now_ns; /* once, not at every tick until it is gone */
        kill_conn(conn);
    }
}
