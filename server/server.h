/* The daemon's edge: one loop thread that owns every socket, with libmicrohttpd inside libuv.
 *
 * Life: server_open (binds the address, so that a port in use shows before a model is loaded) ->
 * engine_open with wake = server_wake -> server_start (listens) -> server_run (until a signal has
 * been answered by draining) -> engine_close -> server_close. All functions belong to the thread
 * that calls server_run, except server_wake. */
#ifndef KEEPD_SERVER_SERVER_H
#define KEEPD_SERVER_SERVER_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "engine/engine.h"

struct server;

/* Milliseconds; 0 takes the default. */
struct server_timeouts {
    int header; /* 30,000: a new connection's first request line and headers */
    int idle;   /* 75,000: a kept-alive connection's next ones */
    int body;   /* 30,000 and 1 ms per 16 bytes received */
    int stall;  /* 60,000: data is pending and the client takes none */
    int ping;   /* 15,000: comment on a stream without news */
    int health; /* 60,000: work, but no step */
};

struct server_options {
    const char *host;
    int port;            /* 0 = any free one */
    const char *names;   /* served model names, separated by commas; the first is the real one */
    const char *api_key; /* NULL or "" = open */
    int default_max_tokens;
    size_t max_body_bytes;
    int max_connections;
    int drain_seconds;
    bool strict_params;
    bool split_reasoning; /* what models think between <think> tags is shown apart */
    struct server_timeouts timeouts;
    void (*reload)(void *arg); /* on SIGHUP, by server_run; NULL: the signal ends the process */
    void *arg;
};

int server_open(const struct server_options *options, struct server **out, struct fault *fault);
void server_wake(void *server); /* any thread: some job changed */
int server_start(struct server *server, struct engine *engine, struct fault *fault);
const char *server_url(const struct server *server); /* after server_start */
const char *server_model(const struct server *server);
void server_run(struct server *server);
void server_close(struct server *server); /* NULL allowed */

#endif
