/* Connections. The loop owns the client's socket and one end of a socket pair, of which
 * libmicrohttpd has the other end; the relay copies bytes between the two. So the loop handles TLS,
 * clients that do not read and the end of a connection, and libmicrohttpd sees only plain text.
 *
 * A connection belongs to server->conns. It is freed when the client's socket is closed, libuv has
 * closed the handles and libmicrohttpd has released it (conn_release). A function may end a
 * connection, so a pointer to it is valid only until such a function returns. `exchange` belongs to
 * itself (server/exchange.h).
 *
 * Thread: the loop. */
#ifndef KEEPD_SERVER_CONN_H
#define KEEPD_SERVER_CONN_H

#include <microhttpd.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "server/framing.h"
#include "server/ledger.h"
#include "server/sock.h"
#include "server/tls.h"

struct exchange;
struct server;

#define CONNS_CLOSING_MAX 64 /* connections in libmicrohttpd whose clients' sockets are closed */
#define RELAY_BYTES       (16 << 10) /* bytes per read: at most one TLS record */

enum conn_state {
    CONN_FRESH,     /* nothing received yet */
    CONN_HANDSHAKE, /* TLS handshake; not yet passed to libmicrohttpd */
    CONN_IDLE,      /* between requests */
    CONN_BODY,      /* the headers are complete; the body is not */
    CONN_BUSY,      /* being answered */
    CONN_CLOSING    /* libmicrohttpd has ended it; the rest of the output and the close remain */
};

/* The bytes that a socket has not accepted yet; allocated only while there are some. */
struct relay_rest {
    char *data;
    size_t at, size;
};

struct conn {
    struct server *server;
    struct conn *next, *prev;
    struct exchange *exchange; /* NULL between requests */
    enum conn_state state;
    int64_t since_ns; /* when `state` began */
    int64_t left_ns;  /* when the client closed its side; 0 = has not */
    /* the client's side */
    int fd;          /* -1 = closed */
    struct tls *tls; /* NULL = plain */
    uv_poll_t poll;
    int events;          /* the events `poll` waits for */
    bool watching;       /* `events` includes a disconnect of the client */
    bool end_read;       /* the client sends no more */
    bool end_sent;       /* keepd sends no more */
    uint64_t written;    /* bytes that the client's socket has accepted */
    uint64_t received;   /* the part of them that the client had received at the last tick */
    int64_t progress_ns; /* start of the client's time limit; received bytes move it on */
    size_t discarded;    /* bytes that were read and thrown away */
    struct framing framing;
    unsigned long long begun; /* requests that libmicrohttpd has begun */
    struct sock_peer peer;
    struct ledger_entry entry; /* in the account of its address, see listener.c */
    uint64_t number;           /* this connection's number since the start */
    /* The side of libmicrohttpd. */
    int inner; /* keepd's end of the pair; -1 = none */
    uv_poll_t inner_poll;
    int inner_events;
    bool attached;         /* libmicrohttpd has its end of the pair */
    bool inner_end;        /* libmicrohttpd sends no more */
    struct relay_rest in;  /* bytes for libmicrohttpd that it has not accepted */
    struct relay_rest out; /* bytes for the client that it has not accepted */
    int handles;           /* libuv handles not yet closed */
};

/* conn.c: states and deadlines */
void conn_notify(void *cls, struct MHD_Connection *connection, void **socket_context,
                 enum MHD_ConnectionNotificationCode code); /* MHD_NotifyConnectionCallback */
/* Takes over the fd and the holdings of `entry`. */
void conn_open(struct server *server, int fd, const struct sock_peer *peer,
               const struct ledger_entry *entry);
void conn_attach(struct conn *conn); /* gives it to libmicrohttpd; on failure the connection ends */
void conn_set_state(struct conn *conn, enum conn_state state);
void conn_watch(struct conn *conn);   /* reports a disconnect, also an earlier one */
void conn_left(struct conn *conn);    /* the client has closed its side */
void conn_kill(struct conn *conn);    /* ends the connection and its request now */
void conn_release(struct conn *conn); /* frees the connection once neither side uses it any more */
void conn_tick(struct server *server, int64_t now_ns); /* deadlines of all connections */
/* Returns whether another client may have its place, judged without a system call. It may then be
 * closed if conn_is_silent is true as well: the kernel has no bytes in either direction. */
bool conn_gives_way(const struct conn *conn, int64_t now_ns);
bool conn_is_silent(const struct conn *conn);
bool conn_all_sent(const struct server *server); /* no answer waits for its client's socket */

/* relay.c: the bytes */
void relay_on_client(uv_poll_t *poll, int status, int events);
void relay_on_inner(uv_poll_t *poll, int status, int events);
void relay_update(struct conn *conn);   /* polls for the events that can happen next */
void relay_soon(struct conn *conn);     /* tells that libmicrohttpd is about to write something */
void relay_sent(struct server *server); /* forwards that output as far as clients accept it */
bool relay_has_output(const struct conn *conn);   /* in memory or in the pair */
bool relay_holds_output(const struct conn *conn); /* output for the client waits in memory */
void relay_close_client(struct conn *conn);
void relay_close_inner(struct conn *conn);

/* listener.c: the listening socket */
void listener_open(struct server *server);
void listener_update(struct server *server); /* accepts clients while there are free places */
void listener_shut(struct server *server);

#endif
