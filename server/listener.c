/* The listening socket: accepts clients and divides connections between their addresses. At
 * --max-connections a new client takes the place of a connection that waits for its client, of the
 * address that has most connections; where every connection works, it waits in the kernel's
 * backlog. An address has a share (server/ledger.h), so that others find places even then. TLS
 * handshakes have their own limit, because an incomplete handshake costs an attacker nothing: a new
 * handshake replaces a slow one.
 */
#include <errno.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "server/loop.h"
#include "server/sip.h"

#define ACCEPTS_MAX    16  /* in one turn of the loop */
#define HANDSHAKES_MAX 512 /* in progress */

/* --- free places --- */

static bool has_handshake_place(const struct server *server) {
    return !server->tls || server->handshakes < HANDSHAKES_MAX;
}

static bool has_place(const struct server *server) {
    return server->ledger.stock[LEDGER_CONNECTIONS].held < server->options.max_connections;
}

static int64_t address_has(const struct conn *conn) {
    return ledger_of_client(&conn->entry, LEDGER_CONNECTIONS);
}

static bool gives_way_before(const struct conn *a, const struct conn *b) {
    int64_t of_a = address_has(a), of_b = address_has(b);
    return of_a != of_b ? of_a > of_b : a->since_ns <= b->since_ns;
}

/* Returns the connection whose place is given to another client; NULL: none. `handshake`: one that
 * is in a handshake. `address`: one of this address; NULL: of any. If the chosen one has sent bytes
 * that were not read yet, or has not been sent its whole answer, no connection gives way for now.
 * The kernel is asked about this one only: asking about thousands would take longer than an answer.
 */
static struct conn *find_slow(const struct server *server, bool handshake,
                              const struct ledger_account *address) {
    struct conn *first = NULL;
    int64_t now_ns = clock_ns();
    for (struct conn *conn = server->conns; conn; conn = conn->next) {
        if (conn->fd < 0 || (address && conn->entry.account != address)) continue;
        if (handshake && conn->state != CONN_HANDSHAKE) continue;
        if ((!first || gives_way_before(conn, first)) && conn_gives_way(conn, now_ns)) first = conn;
    }
    return first && conn_is_silent(first) ? first : NULL;
}

static bool may_accept(const struct server *server) {
    return server->conn_count < server->options.max_connections + CONNS_CLOSING_MAX / 2 &&
           (has_place(server) || find_slow(server, false, NULL)) &&
           (has_handshake_place(server) || find_slow(server, true, NULL));
}

static bool replace_slow(struct conn *slow, const char *why) {
    if (!slow) return false;
    log_debug("connection closed: %s", why);
    conn_kill(slow);
    return true;
}

static bool is_one_too_many(const struct server *server, const struct sock_peer *peer,
                            const struct ledger_entry *entry) {
    int limit = server->options.max_connections_per_client;
    return limit && sock_peer_known(peer) && ledger_of_client(entry, LEDGER_CONNECTIONS) >= limit;
}

/* Closes a connection to make a place. The new one never replaces one of an address that has fewer
 * connections. */
static bool make_place(struct server *server, const struct ledger_entry *entry) {
    if (has_place(server)) return true;
    struct conn *slow = find_slow(server, false, NULL);
    if (slow && address_has(slow) < ledger_of_client(entry, LEDGER_CONNECTIONS)) return false;
    return replace_slow(slow, "another client needs its place");
}

/* Gives the client a place. false: it gets none. */
static bool take_place(struct server *server, const struct sock_peer *peer,
                       struct ledger_entry *entry) {
    uint8_t network[16], address[16];
    (void)sock_peer_network(peer, network);
    sip_hash128(server->secret, network, sizeof network, address);
    if (!ledger_enter(&server->ledger, entry, address)) return false;
    if (is_one_too_many(server, peer, entry) || !make_place(server, entry)) return false;
    if (ledger_set(&server->ledger, entry, LEDGER_CONNECTIONS, 1) == LEDGER_HELD) return true;
    return replace_slow(find_slow(server, false, entry->account), "its address has its share") &&
           ledger_set(&server->ledger, entry, LEDGER_CONNECTIONS, 1) == LEDGER_HELD;
}

/* --- accepting --- */

static void on_connection(uv_poll_t *poll, int status, int events) {
    struct server *server = poll->data;
    (void)status, (void)events;
    for (int i = 0; i < ACCEPTS_MAX && may_accept(server); i++) {
        struct sock_peer peer;
        int fd = sock_accept(server->listen_fd, &peer);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0 && errno != EAGAIN) {
            log_debug("no connection can be accepted: error %d", errno);
            uv_poll_stop(&server->listener); /* until the next tick */
            server->listener_waits = false;
        }
        if (fd < 0) return;
        struct ledger_entry entry = {0};
        if (!take_place(server, &peer, &entry)) {
            ledger_leave(&server->ledger, &entry);
            close(fd);
            continue;
        }
        if (!has_handshake_place(server))
            (void)replace_slow(find_slow(server, true, NULL), "too many handshakes in progress");
        conn_open(server, fd, &peer, &entry);
    }
    listener_update(server);
}

void listener_update(struct server *server) {
    bool wanted = !server->listener_shut && may_accept(server);
    if (!server->handles_open || wanted == server->listener_waits) return;
    server->listener_waits = wanted;
    if (wanted)
        CHECK(uv_poll_start(&server->listener, UV_READABLE, on_connection) == 0);
    else
        uv_poll_stop(&server->listener);
}

/* Limits the computing of handshakes in each turn of the loop, so that other work gets its share.
 */
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
