/* The server's state, which loop.c opens, runs and closes. It owns the sockets, libmicrohttpd's
 * daemon, the libuv loop and its handles, the keys, the models with their engines, and the lists of
 * connections and exchanges.
 *
 * Thread: the loop, except `wake` (any thread). Workers read `records` and what server/models.h
 * names. */
#ifndef KEEPD_SERVER_LOOP_H
#define KEEPD_SERVER_LOOP_H

#include "server/conn.h"
#include "server/exchange.h"
#include "server/models.h"
#include "server/otlp.h"
#include "server/page/page.h"
#include "server/server.h"
#include "server/systemd.h"

struct server {
    struct server_options options;
    struct models models;
    uint8_t secret[16];          /* key of the hashes by which clients are told apart */
    struct oai_records *records; /* stored responses */
    struct otlp *otlp;           /* NULL: no spans */
    struct fetch *fetch;         /* NULL: no pictures of addresses */
    char url[256];
    char last_complaint[256]; /* the last complaint of libmicrohttpd */
    char page_policy[PAGE_POLICY_BYTES];
    uv_loop_t loop;
    uv_async_t wake;
    uv_poll_t poll; /* libmicrohttpd's epoll descriptor */
    uv_timer_t timer, tick;
    uv_timer_cb on_timer; /* runs libmicrohttpd */
    uv_signal_t sigterm, sigint, sighup;
    bool handles_open; /* poll, timers and signals exist */
    struct MHD_Daemon *daemon;
    int listen_fd;
    bool loopback;          /* bound to loopback: Host headers are checked */
    bool unlink_path;       /* the Unix socket's path was made by this process */
    struct tls_config *tls; /* NULL = plain */
    struct keys keys;
    struct watchdog watchdog;       /* each model has one for its replicas */
    struct systemd_queue announced; /* loop thread */
    uv_poll_t listener;             /* waits on listen_fd */
    bool listener_waits;            /* accepts clients at present */
    bool listener_shut;             /* accepts no clients any more */
    uv_prepare_t turn;              /* before each turn of the loop */
    int handshakes;                 /* in progress */
    int handshake_steps;            /* taken in this turn */
    struct conn *conns;             /* list, the newest first */
    struct conn *attaching;         /* between MHD_add_connection and its notification */
    struct conn *soon;              /* the connection that libmicrohttpd writes for; NULL = none */
    int conn_count;
    struct buf framed;         /* bytes being relayed, checked and rewritten for libmicrohttpd */
    char scratch[RELAY_BYTES]; /* bytes being relayed; empty between callbacks */
    uint64_t conn_total;       /* accepted since the start */
    struct exchange *jobs;     /* exchanges with jobs in the engine */
    int exchanges, works;      /* exchanges that exist; of these, read by worker threads */
    int accepted; /* `works` that have a place in the queue, and requests that wait for a model */
    struct exchange *moves_waiting;                /* `works` of move.c that wait for a thread */
    int moves_working;                             /* moves that have a thread */
    struct work_queue works_large, works_fetching; /* parts of `works` */
    struct exchange *loads_waiting; /* `works` that load an adapter, until none is at work */
    bool load_works;
    uv_work_t works_first; /* starts the threads */
    struct ledger ledger;  /* holdings of clients */
    uint64_t rejected[STATS_REJECTS];
    bool draining, aborting;
    bool failed;  /* the engine failed, so the server drains */
    bool closing; /* the engines are closed soon: no request may begin */
    int64_t drain_deadline_ns;
    const char *drain_end; /* why it ends before all requests are answered */
    int64_t start_seconds;
};

/* Runs libmicrohttpd soon: resuming a connection does not show on its epoll descriptor when it has
 * no thread of its own. */
static inline void server_pump_soon(struct server *server) {
    uv_timer_start(&server->timer, server->on_timer, 0, 0);
}

/* Looks soon whether nothing is left to do and a drain ends. */
static inline void server_may_end(struct server *server) {
    if (server->draining && !server->closing) server_pump_soon(server);
}

#endif
