/* The listening socket: accepts clients and limits connections per address. Beyond
 * --max-connections clients wait in the kernel's backlog. TLS handshakes have their own limit,
 * because an incomplete handshake costs an attacker nothing: a new handshake replaces a slow one.
 */
#include <errno.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "server/http.h"

#define ACCEPTS_MAX    16           /* in one turn of the loop */
#define HANDSHAKES_MAX 512          /* in progress */
#define HELLO_NS       1000000000ll /* a client without a hello must give way after it */
#define ANSWER_NS      5000000000ll /* and one that does not answer ours */

/* --- room --- */

/* Whether the handshake waits for its client, and for long. Unread bytes wait for us. */
static bool is_slow(const struct conn *conn, int64_t now_ns) {
    if (conn->state != CONN_HANDSHAKE) return false;
    int64_t limit_ns = tls_has_answered(conn->tls) ? ANSWER_NS : HELLO_NS;
    return now_ns - conn->since_ns > limit_ns && !sock_unread(conn->fd);
}

static bool has_handshake_place(const struct server *server) {
    return !server->tls || server->handshakes < HANDSHAKES_MAX;
}

/* The oldest slow handshake, or NULL. */
static struct conn *find_slow(const struct server *server) {
    struct conn *oldest = NULL;
    int64_t now_ns = clock_ns();
    for (struct conn *conn = server->conns; conn; conn = conn->next)
        if (is_slow(conn, now_ns)) oldest = conn;
    return oldest;
}

static bool has_room(const struct server *server) {
    return server->conn_count < server->options.max_connections &&
           (has_handshake_place(server) || find_slow(server));
}

/* A new client takes the place of the oldest slow handshake if no other is free. */
static void make_handshake_place(struct server *server) {
    struct conn *slow = has_handshake_place(server) ? NULL : find_slow(server);
    if (!slow) return;
    log_debug("connection closed: too many handshakes in progress");
    conn_kill(slow);
}

static bool is_one_too_many(const struct server *server, const struct sock_peer *peer) {
    int limit = server->options.max_connections_per_client, count = 0;
    if (!limit || !sock_peer_known(peer)) return false;
    for (const struct conn *conn = server->conns; conn && count < limit; conn = conn->next)
        count += conn->fd >= 0 && sock_peer_equal(&conn->peer, peer);
    return count >= limit;
}

/* --- accepting --- */

static void on_connection(uv_poll_t *poll, int status, int events) {
    struct server *server = poll->data;
    (void)status, (void)events;
    for (int i = 0; i < ACCEPTS_MAX && has_room(server); i++) {
        struct sock_peer peer;
        int fd = sock_accept(server->listen_fd, &peer);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0 && errno != EAGAIN) {
            log_debug("no connection can be accepted: error %d", errno);
            uv_poll_stop(&server->listener); /* until the next tick */
            server->listener_waits = false;
        }
        if (fd < 0) return;
        if (is_one_too_many(server, &peer)) {
            close(fd);
            continue;
        }
        make_handshake_place(server);
        conn_open(server, fd, &peer);
    }
    listener_update(server);
}

void listener_update(struct server *server) {
    bool wanted = !server->listener_shut && has_room(server);
    if (!server->handles_open || wanted == server->listener_waits) return;
    server->listener_waits = wanted;
    if (wanted)
        CHECK(uv_poll_start(&server->listener, UV_READABLE, on_connection) == 0);
    else
        uv_poll_stop(&server->listener);
}

/* Handshakes compute, so a turn of the loop has a share of them and everybody else theirs. */
static void on_turn(uv_prepare_t *turn) {
    ((struct server *)turn->data)->handshake_steps = 0;
}

void listener_open(struct server *server) {
    CHECK(uv_poll_init(&server->loop, &server->listener, server->listen_fd) == 0);
    CHECK(uv_prepare_init(&server->loop, &server->turn) == 0);
    server->listener.data = server->turn.data = server;
    if (server->tls) CHECK(uv_prepare_start(&server->turn, on_turn) == 0);
    listener_update(server);
}

void listener_shut(struct server *server) {
    server->listener_shut = true;
    listener_update(server);
}
