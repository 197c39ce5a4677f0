/* libmicrohttpd inside the libuv loop: its epoll is one descriptor of ours, its timeout one timer.
 *
 * The engine's thread wakes the loop once per step; the loop then looks at every job and resumes
 * the connections that have something to write. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/http.h"
#include "server/sock.h"

#define CONN_MEMORY    ((size_t)64 << 10)
#define DRAIN_ABORT_NS 2000000000ll /* for aborted requests to be answered */
#define SECOND_NS      1000000000ll

/* --- libmicrohttpd in the loop --- */

static void on_timer(uv_timer_t *timer);

static void pump(struct server *server) {
    MHD_UNSIGNED_LONG_LONG ms;
    MHD_run(server->daemon);
    if (MHD_get_timeout(server->daemon, &ms) == MHD_YES)
        uv_timer_start(&server->timer, on_timer, ms, 0);
    else
        uv_timer_stop(&server->timer);
}

static void on_timer(uv_timer_t *timer) {
    pump(timer->data);
}

/* Resuming a connection does not show on libmicrohttpd's epoll when it has no thread of its own. */
void server_pump_soon(struct server *server) {
    uv_timer_start(&server->timer, on_timer, 0, 0);
}

static void on_sockets(uv_poll_t *poll, int status, int events) {
    (void)status, (void)events;
    pump(poll->data);
}

static void poll_jobs(struct server *server, int64_t now_ns) {
    for (struct exchange *ex = server->jobs, *next; ex; ex = next) {
        next = ex->next;
        exchange_poll(ex, now_ns);
    }
}

static void on_wake(uv_async_t *async) {
    struct server *server = async->data;
    if (!server->daemon) return;
    poll_jobs(server, clock_ns());
    pump(server);
}

void server_wake(void *arg) {
    struct server *server = arg;
    uv_async_send(&server->wake);
}

/* --- draining --- */

static void abort_jobs(struct server *server) {
    server->aborting = true;
    for (struct exchange *ex = server->jobs; ex; ex = ex->next) exchange_cancel(ex);
}

static void check_drain(struct server *server, int64_t now_ns) {
    if (!server->draining) return;
    if (server->exchanges == 0) {
        uv_stop(&server->loop);
    } else if (now_ns >= server->drain_deadline_ns) {
        if (server->aborting) {
            uv_stop(&server->loop);
            return;
        }
        log_warn("drain time is over, giving up %d requests", server->exchanges);
        server->drain_deadline_ns = now_ns + DRAIN_ABORT_NS;
        abort_jobs(server);
    }
}

void server_exchange_freed(struct server *server) {
    if (server->draining && server->exchanges == 0) uv_stop(&server->loop);
}

/* The first signal lets accepted requests finish, a second one cuts them off. */
static void on_signal(uv_signal_t *handle, int number) {
    struct server *server = handle->data;
    int64_t now_ns = clock_ns();
    log_info("signal %d: %s", number, server->draining ? "stopping now" : "draining");
    if (server->draining) {
        server->drain_deadline_ns = now_ns;
    } else {
        server->draining = true;
        server->drain_deadline_ns = now_ns + server->options.drain_seconds * SECOND_NS;
        engine_drain(server->engine);
    }
    check_drain(server, now_ns);
}

static void on_hangup(uv_signal_t *handle, int number) {
    const struct server *server = handle->data;
    (void)number;
    server->options.reload(server->options.arg);
}

static void on_tick(uv_timer_t *tick) {
    struct server *server = tick->data;
    int64_t now_ns = clock_ns();
    poll_jobs(server, now_ns); /* comments on silent streams */
    conn_tick(server, now_ns);
    pump(server);
    check_drain(server, now_ns);
}

/* --- opening --- */

static void set_default(int *ms, int preset) {
    if (*ms <= 0) *ms = preset;
}

static void set_timeouts(struct server_timeouts *t) {
    set_default(&t->header, 30000);
    set_default(&t->idle, 75000);
    set_default(&t->body, 30000);
    set_default(&t->stall, 60000);
    set_default(&t->ping, 15000);
    set_default(&t->health, 60000);
}

/* "name, alias": at least one, or a fault. */
static int set_names(struct server *server, const char *names, struct fault *fault) {
    char *save = NULL;
    server->names = mem_must_strdup(names);
    for (char *name = strtok_r(server->names, ",", &save); name;
         name = strtok_r(NULL, ",", &save)) {
        name += strspn(name, " ");
        if (!*name) continue;
        if (server->rules.name_count == OAI_NAMES_MAX || strlen(name) > 256)
            return fault_set(fault, ERR_LIMIT, "served-model-name",
                             "at most %d names of at most 256 bytes", OAI_NAMES_MAX);
        server->rules.names[server->rules.name_count++] = name;
    }
    if (server->rules.name_count) return 0;
    return fault_set(fault, ERR_INVALID, "served-model-name", "the name is empty");
}

static void raise_file_limit(int connections) {
    struct rlimit limit;
    rlim_t wanted = (rlim_t)connections + 256;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= wanted) return;
    limit.rlim_cur = limit.rlim_max < wanted ? limit.rlim_max : wanted;
    if (setrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur < wanted)
        log_warn("only %llu file descriptors for %d connections",
                 (unsigned long long)limit.rlim_cur, connections);
}

int server_open(const struct server_options *options, struct server **out, struct fault *fault) {
    struct server *server = mem_must_alloc(1, sizeof *server);
    server->options = *options;
    server->listen_fd = -1;
    server->start_seconds = clock_unix_seconds();
    signal(SIGPIPE, SIG_IGN);
    set_timeouts(&server->options.timeouts);
    raise_file_limit(options->max_connections);
    CHECK(uv_loop_init(&server->loop) == 0);
    CHECK(uv_async_init(&server->loop, &server->wake, on_wake) == 0);
    server->wake.data = server;
    int rc = set_names(server, options->names, fault);
    if (!rc) rc = sock_bind(options->host, options->port, &server->listen_fd, fault);
    if (rc) {
        server_close(server);
        server = NULL;
    }
    *out = server;
    return rc;
}

/* --- starting --- */

__attribute__((format(printf, 2, 0))) static void log_daemon(void *cls, const char *format,
                                                             va_list args) {
    char line[512];
    (void)cls;
    vsnprintf(line, sizeof line, format, args);
    line[strcspn(line, "\n")] = '\0';
    log_debug("libmicrohttpd: %s", line);
}

static int start_daemon(struct server *server, struct fault *fault) {
    server->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL, NULL, http_access,
        server, MHD_OPTION_EXTERNAL_LOGGER, log_daemon, NULL, MHD_OPTION_LISTEN_SOCKET,
        server->listen_fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)server->options.max_connections,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, CONN_MEMORY, MHD_OPTION_CONNECTION_TIMEOUT, 0u,
        MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_NOTIFY_CONNECTION, conn_notify, server,
        MHD_OPTION_NOTIFY_COMPLETED, http_completed, server, MHD_OPTION_END);
    if (!server->daemon) return fault_set(fault, ERR_IO, "host", "cannot start the HTTP server");
    server->listen_fd = -1; /* libmicrohttpd closes it */
    return 0;
}

static uint64_t tick_ms(const struct server_timeouts *t) {
    int least = 4000;
    const int all[] = {t->header, t->idle, t->body, t->stall, t->ping};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] < least) least = all[i];
    return least < 80 ? 20 : (uint64_t)least / 4;
}

static void start_handles(struct server *server) {
    uint64_t tick = tick_ms(&server->options.timeouts);
    int fd = MHD_get_daemon_info(server->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    server->handles_open = true;
    CHECK(uv_poll_init(&server->loop, &server->poll, fd) == 0);
    CHECK(uv_timer_init(&server->loop, &server->timer) == 0);
    CHECK(uv_timer_init(&server->loop, &server->tick) == 0);
    CHECK(uv_signal_init(&server->loop, &server->sigterm) == 0);
    CHECK(uv_signal_init(&server->loop, &server->sigint) == 0);
    CHECK(uv_signal_init(&server->loop, &server->sighup) == 0);
    server->poll.data = server->timer.data = server->tick.data = server;
    server->sigterm.data = server->sigint.data = server->sighup.data = server;
    CHECK(uv_poll_start(&server->poll, UV_READABLE, on_sockets) == 0);
    CHECK(uv_timer_start(&server->tick, on_tick, tick, tick) == 0);
    CHECK(uv_signal_start(&server->sigterm, on_signal, SIGTERM) == 0);
    CHECK(uv_signal_start(&server->sigint, on_signal, SIGINT) == 0);
    if (server->options.reload) CHECK(uv_signal_start(&server->sighup, on_hangup, SIGHUP) == 0);
}

int server_start(struct server *server, struct engine *engine, struct fault *fault) {
    server->engine = engine;
    server->rules.info = engine_info(engine);
    server->rules.default_max_tokens = server->options.default_max_tokens;
    server->rules.strict = server->options.strict_params;
    server->rules.body_bytes = server->options.max_body_bytes;
    server->rules.think =
        server->options.split_reasoning ? oai_find_think(engine) : (struct oai_think){-1, -1};
    stats_open(&server->stats, server->rules.info->max_model_len);
    int rc = sock_listen(server->listen_fd, server->options.host, server->url, sizeof server->url,
                         fault);
    if (!rc) rc = start_daemon(server, fault);
    if (!rc) start_handles(server);
    return rc;
}

const char *server_url(const struct server *server) {
    return server->url;
}

const char *server_model(const struct server *server) {
    return server->rules.names[0];
}

/* --- running and closing --- */

void server_run(struct server *server) {
    pump(server);
    uv_run(&server->loop, UV_RUN_DEFAULT);
    while (server->works) uv_run(&server->loop, UV_RUN_ONCE); /* they use the engine */
}

/* No connection may be suspended when libmicrohttpd stops. */
static void stop_daemon(struct server *server) {
    for (struct conn *conn = server->conns; conn; conn = conn->next)
        if (conn->exchange) exchange_gone(conn->exchange);
    MHD_run(server->daemon);
    poll_jobs(server, clock_ns());
    MHD_stop_daemon(server->daemon);
    server->daemon = NULL;
    CHECK(!server->jobs && server->exchanges == 0);
}

void server_close(struct server *server) {
    if (!server) return;
    if (server->handles_open) {
        uv_close((uv_handle_t *)&server->poll, NULL);
        uv_close((uv_handle_t *)&server->timer, NULL);
        uv_close((uv_handle_t *)&server->tick, NULL);
        uv_close((uv_handle_t *)&server->sigterm, NULL);
        uv_close((uv_handle_t *)&server->sigint, NULL);
        uv_close((uv_handle_t *)&server->sighup, NULL);
    }
    if (server->daemon) stop_daemon(server);
    if (server->listen_fd >= 0) close(server->listen_fd);
    uv_close((uv_handle_t *)&server->wake, NULL);
    uv_run(&server->loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&server->loop) == 0);
    mem_free(server->names);
    mem_free(server);
}
