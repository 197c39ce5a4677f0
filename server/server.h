/* The HTTP server: one event-loop thread that owns every socket and runs libmicrohttpd in libuv.
 *
 * Life: server_open (checks the options) -> server_bind (reports a port in use before the
 * model is loaded) -> engine_open with wake = server_wake -> server_start (listens) -> server_run
 * (until a signal has drained the server) -> server_close, which closes the engines. All functions
 * belong to the thread that calls server_run, except server_wake. Under systemd the server uses a
 * socket that systemd passed, and server_run reports its state (server/systemd.h). */
#ifndef KEEPD_SERVER_SERVER_H
#define KEEPD_SERVER_SERVER_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "engine/engine_options.h"

struct server;

/* Times in milliseconds; 0 means the default, which the comments name first. */
struct server_timeouts {
    int handshake; /* 10,000: TLS, until both sides have finished */
    int header;    /* 30,000: a new connection's first request line and headers */
    int idle;      /* 75,000: the next ones on a kept-alive connection */
    int body;      /* 30,000 and 1 ms per 16 bytes received, 256 of an uploaded conversation */
    int stall;     /* 60,000: output is pending and the client accepts none */
    int first;     /* 1,000: longest wait of a stream's header for the first token */
    int ping;      /* 15,000: a comment is sent on a stream without events */
    int health;    /* 60,000: unhealthy after this time with work and no progress */
};

/* Texts that belong to the caller. */
struct server_list {
    char **items;
    size_t count;
};

/* The options that server_reload may change. */
struct server_reloadable {
    struct server_list api_keys; /* read by server_open and server_reload only */
    const char *api_key_file;
    const char *tls_cert, *tls_key; /* files in PEM; both or neither. Read like the keys */
    int rate_limit;                 /* requests per minute and key; 0 = any */
    int request_timeout;            /* seconds a request may take; 0 = any */
    int drain_seconds;
};

/* A model, and what its requests get where they say nothing. */
struct server_model {
    const char *names; /* separated by commas; the first is the canonical one */
    int default_max_tokens;
    int repetition_count;         /* repetitions of a block that end an answer; 0 = any */
    int64_t seed;                 /* -1 = random */
    bool split_reasoning;         /* text between <think> tags is returned separately */
    const char *tool_call_parser; /* "auto", "none" or a tool_form's name, see oai_find_tools */
    bool pinned;                  /* loaded at the start, and stays */
    struct server_list adapters;  /* for engine_options */
    const struct engine_options *engine; /* all but progress, wake, arg and space_key */
};

struct server_options {
    const char *host;
    int port;                          /* 0 = any free one */
    const char *unix_socket;           /* instead of host and port; NULL = TCP */
    const char *unix_socket_mode;      /* octal: "0660" */
    const struct server_model *models; /* [model_count], the caller's until server_close */
    int model_count;
    int64_t models_memory; /* bytes that all loaded models may take; 0 = any */
    int model_residence;   /* seconds that a model stays at least */
    int model_idle;        /* seconds without a request after which it is unloaded; 0 = never */
    int model_loads;       /* loads in a minute; 0 = any */
    /* Lists belong to the caller and stay until server_close. */
    struct server_list allowed_hosts; /* besides localhost, while bound to loopback */
    struct server_list cors_origins;  /* none = no cross-origin requests */
    struct server_list image_hosts;   /* see server/fetch.h; none = no pictures are fetched */
    struct server_reloadable now;
    size_t max_body_bytes, max_header_bytes;
    int max_connections;
    int max_connections_per_client; /* 0 = any */
    int64_t max_queue_tokens;       /* prompt tokens that may wait; 0 = any */
    bool strict_params;
    bool include_usage;        /* in every stream in OpenAI's form */
    bool no_ui;                /* nothing is served at / */
    const char *otlp_endpoint; /* see server/otlp.h; NULL = no spans */
    struct server_timeouts timeouts;
    size_t max_answer_bytes;   /* longest answer that is not a stream; 0 = 1 GiB */
    void (*reload)(void *arg); /* on SIGHUP, by server_run; NULL: the signal ends the process */
    void *arg;
};

int server_open(const struct server_options *options, struct server **out, struct fault *fault);
int server_bind(struct server *server, struct fault *fault);
void server_wake(void *server); /* any thread: some job changed */
/* `engine` is that of the first model, and the server's from here on, whatever is returned; NULL:
 * models are loaded when they are asked for. */
int server_start(struct server *server, struct engine *engine, struct fault *fault);
const char *server_url(const struct server *server);   /* after server_start */
const char *server_model(const struct server *server); /* the name of the first model */
bool server_needs_key(const struct server *server);
/* Returns whether anybody who can reach this machine may use the server: it needs no key and
 * listens to more than this machine. */
bool server_is_open(const struct server *server);
/* Runs until a signal (true) or a failure of the engine (false); every request is then answered. */
bool server_run(struct server *server);
/* Reads keys and certificate again, also from files that have changed; called from the reload
 * callback. TLS sessions keep the certificate that they began with. A fault leaves everything as it
 * was. */
int server_reload(struct server *server, const struct server_reloadable *fresh,
                  struct fault *fault);
void server_close(struct server *server); /* NULL allowed */

#endif
