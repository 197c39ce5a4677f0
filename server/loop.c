/* Runs libmicrohttpd in the libuv loop, which polls its epoll descriptor and has a timer for its
 * timeout.
 *
 * The engine's thread wakes the loop once per step; the loop then polls every job and resumes
 * the connections that have something to write. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/fetch.h"
#include "server/loop.h"
#include "server/quota.h"
#include "server/sock.h"
#include "server/systemd.h"

#define FILE_BYTES_MAX      (1 << 20)          /* certificates */
#define CONN_MEMORY_EXTRA   ((size_t)32 << 10) /* beside the headers: body and answer pieces */
#define CONN_DESCRIPTORS    3                  /* the client's socket and a pair */
#define DESCRIPTORS_MIN     64
#define FRAMED_BYTES_EXTRA  ((size_t)4 * RELAY_BYTES) /* beside two heads */
#define DRAIN_ABORT_NS      2000000000ll              /* for aborted requests to be answered */
#define DRAIN_EXTRA_SECONDS 10 /* from the end of the drain to the end of the process */
#define SECOND_NS           1000000000ll
#define HELD_BYTES_MIN      ((size_t)256 << 20) /* for all requests together */
#define HELD_BODIES         4                   /* or so many of the largest bodies */
#define MS                  1000000ll
#define WATCHDOG_SHARE      3 /* notifications in the time after which systemd restarts */

/* --- libmicrohttpd in the loop --- */

static void on_timer(uv_timer_t *timer);
static void check_drain(struct server *server, int64_t now_ns);

static void run_http(struct server *server) {
    MHD_UNSIGNED_LONG_LONG ms;
    models_look(server);
    MHD_run(server->daemon);
    relay_sent(server);
    check_drain(server, clock_ns());
    if (server->models.changed)
        server_pump_soon(server);
    else if (MHD_get_timeout(server->daemon, &ms) == MHD_YES)
        uv_timer_start(&server->timer, on_timer, ms, 0);
    else
        uv_timer_stop(&server->timer);
}

static void on_timer(uv_timer_t *timer) {
    run_http(timer->data);
}

static void on_sockets(uv_poll_t *poll, int status, int events) {
    (void)status, (void)events;
    run_http(poll->data);
}

static void poll_jobs(struct server *server, int64_t now_ns) {
    for (struct exchange *ex = server->jobs, *next; ex; ex = next) {
        next = ex->next;
        quota_settle(ex);
        if (!ex->cut && ex->deadline_ns && now_ns >= ex->deadline_ns) {
            ex->cut = EXCHANGE_CUT_TIME;
            exchange_cancel(ex);
        }
        exchange_poll(ex, now_ns);
    }
}

static void on_loop_wake(uv_async_t *async) {
    struct server *server = async->data;
    if (!server->daemon) return;
    poll_jobs(server, clock_ns());
    run_http(server);
}

/* --- draining --- */

/* Returns whether every request has ended and the engine has written what outlives it. */
static bool is_drained(const struct server *server) {
    return server->exchanges == 0 && conn_all_sent(server) && models_idle(server);
}

static void check_drain(struct server *server, int64_t now_ns) {
    if (!server->draining) return;
    if (is_drained(server)) {
        uv_stop(&server->loop);
    } else if (now_ns >= server->drain_deadline_ns) {
        if (server->exchanges == 0)
            log_warn("%s: not every conversation is saved", server->drain_end);
        if (server->aborting || server->exchanges == 0) {
            uv_stop(&server->loop);
            return;
        }
        log_warn("%s: giving up %d requests", server->drain_end, server->exchanges);
        server->drain_deadline_ns = now_ns + DRAIN_ABORT_NS;
        /* The engine accepts no more, and jobs that are still in the loop are cancelled. */
        server->aborting = true;
        models_drain(server);
        models_abort(server);
        for (struct exchange *ex = server->jobs; ex; ex = ex->next) exchange_cancel(ex);
    }
}

static void begin_drain(struct server *server, int64_t now_ns) {
    server->draining = true;
    server->drain_deadline_ns = now_ns + server->options.now.drain_seconds * SECOND_NS;
    server->drain_end = "the drain time is over";
    /* Requests that workers still parse are accepted before. */
    if (server->accepted == 0) models_drain(server);
    /* The manager's time limit may be shorter than the drain. */
    systemd_announce(
        &server->announced, "STOPPING=1\nSTATUS=Draining %d requests\nEXTEND_TIMEOUT_USEC=%lld",
        server->exchanges, (server->options.now.drain_seconds + DRAIN_EXTRA_SECONDS) * 1000000LL);
}

/* Handles a signal: the first one lets accepted requests finish, a second one cuts them off. */
static void on_signal(uv_signal_t *handle, int number) {
    struct server *server = handle->data;
    int64_t now_ns = clock_ns();
    log_info("signal %d: %s", number, server->draining ? "stopping now" : "draining");
    if (server->draining) {
        server->drain_deadline_ns = now_ns;
        server->drain_end = "a second signal";
    } else {
        begin_drain(server, now_ns);
    }
    check_drain(server, now_ns);
}

/* Begins to drain if the device has failed, because it works again only in a new process. */
static void check_engine(struct server *server, int64_t now_ns) {
    for (int i = 0; i < server->models.count && !server->failed; i++) {
        struct engine_status status = {0};
        if (server->models.items[i].engine) engine_status(server->models.items[i].engine, &status);
        server->failed = status.stopped;
    }
    if (server->failed && !server->draining) begin_drain(server, now_ns);
}

static void on_hangup(uv_signal_t *handle, int number) {
    struct server *server = handle->data;
    (void)number;
    systemd_announce(&server->announced, "RELOADING=1\nMONOTONIC_USEC=%lld",
                     (long long)(clock_ns() / 1000));
    server->options.reload(server->options.arg);
    systemd_announce(&server->announced, "READY=1");
}

/* Returns whether every replica makes progress; otherwise the watchdog gets no notification. */
static bool all_replicas_work(struct server *server) {
    struct engine_status status;
    bool works = true;
    for (int i = 0; i < server->models.count; i++) {
        struct served_model *model = &server->models.items[i];
        for (int k = 0; model->engine && k < model->rules.info->replicas; k++) {
            engine_replica_status(model->engine, k, &status);
            works &= watchdog_check(&model->watchdog, k, &status);
        }
    }
    return works;
}

static void feed_watchdog(struct server *server, int64_t now_ns) {
    struct engine_status status, sum = {0};
    if (!watchdog_due(&server->watchdog, now_ns) || !all_replicas_work(server)) return;
    watchdog_fed(&server->watchdog, now_ns);
    for (int i = 0; i < server->models.count; i++) {
        watchdog_fed(&server->models.items[i].watchdog, now_ns);
        if (!server->models.items[i].engine) continue;
        engine_status(server->models.items[i].engine, &status);
        sum.running += status.running;
        sum.waiting += status.waiting;
        sum.conversations += status.conversations;
    }
    systemd_notify("WATCHDOG=1\nSTATUS=Serving: %d running, %d waiting, %d conversations",
                   sum.running, sum.waiting, sum.conversations);
}

static void on_tick(uv_timer_t *tick) {
    struct server *server = tick->data;
    int64_t now_ns = clock_ns();
    poll_jobs(server, now_ns); /* sends comments on silent streams, too */
    models_tick(server, now_ns);
    conn_tick(server, now_ns);
    run_http(server);
    systemd_repeat(&server->announced);
    feed_watchdog(server, now_ns);
    check_engine(server, now_ns);
    check_drain(server, now_ns);
}

/* --- opening --- */

#define ANSWER_BYTES_MAX ((size_t)1 << 30)

static void set_default(int *ms, int preset) {
    if (*ms <= 0) *ms = preset;
}

static void set_timeouts(struct server_timeouts *t) {
    set_default(&t->handshake, 10000);
    set_default(&t->header, 30000);
    set_default(&t->idle, 75000);
    set_default(&t->body, 30000);
    set_default(&t->stall, 60000);
    set_default(&t->first, 1000);
    set_default(&t->ping, 15000);
    set_default(&t->health, 60000);
}

/* Refuses a limit on descriptors so low that the event loop, the workers or the first connections
 * could not open theirs. */
static int check_file_limit(struct fault *fault) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_max >= DESCRIPTORS_MIN) return 0;
    return fault_set(fault, ERR_LIMIT, "max-connections",
                     "this process may open %llu files at most, and needs %d for a few "
                     "connections: raise the limit (ulimit -n, or LimitNOFILE of systemd)",
                     (unsigned long long)limit.rlim_max, DESCRIPTORS_MIN);
}

static void raise_file_limit(int connections) {
    struct rlimit limit;
    rlim_t wanted = (rlim_t)connections * CONN_DESCRIPTORS + 256;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= wanted) return;
    limit.rlim_cur = limit.rlim_max < wanted ? limit.rlim_max : wanted;
    if (setrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur < wanted)
        log_warn("only %llu file descriptors for %d connections",
                 (unsigned long long)limit.rlim_cur, connections);
}

/* Reads a certificate or key and checks its PEM frame; GnuTLS checks the rest. */
static int read_pem(const char *option, const char *path, const char *frame, char **out,
                    struct fault *fault) {
    char *text = mem_must_alloc(FILE_BYTES_MAX + 1, 1);
    int rc = 0;
    FILE *file = fopen(path, "re");
    if (!file) {
        mem_free(text);
        return fault_set(fault, ERR_IO, option, "cannot open %.200s: %s", path, strerror(errno));
    }
    size_t size = fread(text, 1, FILE_BYTES_MAX + 1, file);
    if (size > FILE_BYTES_MAX)
        rc = fault_set(fault, ERR_LIMIT, option, "%.200s is larger than %d bytes", path,
                       FILE_BYTES_MAX);
    else if (ferror(file))
        rc = fault_set(fault, ERR_IO, option, "cannot read %.200s", path);
    else if (text[size] = '\0', !strstr(text, frame))
        rc =
            fault_set(fault, ERR_INVALID, option, "%.200s is not PEM: it has no '%s'", path, frame);
    fclose(file);
    *out = rc ? NULL : mem_must_strdup(text);
    explicit_bzero(text, FILE_BYTES_MAX + 1);
    mem_free(text);
    return rc;
}

/* Reads certificate and key into *out; NULL without a certificate. */
static int read_tls(const struct server_reloadable *o, struct tls_config **out,
                    struct fault *fault) {
    *out = NULL;
    if (!o->tls_cert && !o->tls_key) return 0;
    if (!o->tls_cert || !o->tls_key)
        return fault_set(fault, ERR_INVALID, o->tls_cert ? "tls-key" : "tls-cert",
                         "a certificate and its key are needed: --tls-cert and --tls-key");
    char *cert = NULL, *key = NULL;
    int rc = read_pem("tls-cert", o->tls_cert, "-----BEGIN CERTIFICATE", &cert, fault);
    if (!rc) rc = read_pem("tls-key", o->tls_key, "PRIVATE KEY-----", &key, fault);
    if (!rc) rc = tls_config_open(cert, key, out, fault);
    if (key) explicit_bzero(key, strlen(key));
    mem_free(cert);
    mem_free(key);
    return rc;
}

static int open_keys(struct keys *keys, const struct server_reloadable *now,
                     const struct keys *before, struct fault *fault) {
    return keys_open(keys, now->api_keys.items, now->api_keys.count, now->api_key_file, before,
                     fault);
}

static int check_socket_mode(const char *text, struct fault *fault) {
    char *end;
    if (!text) return 0;
    unsigned long mode = strtoul(text, &end, 8);
    if (end != text && !*end && mode <= 0777) return 0;
    return fault_set(fault, ERR_INVALID, "unix-socket-mode",
                     "must be octal permissions like 0660, not '%.32s'", text);
}

static struct sock_address address_of(const struct server_options *o) {
    return (struct sock_address){
        .host = o->host,
        .port = o->port,
        .path = o->unix_socket,
        .mode = o->unix_socket_mode ? (unsigned)strtoul(o->unix_socket_mode, NULL, 8) : 0600,
    };
}

/* Returns whether systemd passed a socket. Faults of it are ignored here; server_bind reports them.
 */
static bool socket_is_passed(void) {
    struct fault ignored = {0};
    int fd = -1;
    return systemd_listen_fd(&fd, &ignored) == 0 && fd >= 0;
}

int server_open(const struct server_options *options, struct server **out, struct fault *fault) {
    int rc = check_file_limit(fault);
    if (rc) return rc;
    struct server *server = mem_must_alloc(1, sizeof *server);
    const struct sock_address address = address_of(options);
    size_t memory = HELD_BODIES * options->max_body_bytes;
    server->options = *options;
    server->listen_fd = -1;
    server->start_seconds = clock_unix_seconds();
    buf_open(&server->framed, 2 * options->max_header_bytes + FRAMED_BYTES_EXTRA);
    signal(SIGPIPE, SIG_IGN);
    set_timeouts(&server->options.timeouts);
    ledger_open(&server->ledger, memory < HELD_BYTES_MIN ? HELD_BYTES_MIN : memory,
                options->max_connections);
    if (!server->options.max_answer_bytes) server->options.max_answer_bytes = ANSWER_BYTES_MAX;
    CHECK(uv_loop_init(&server->loop) == 0);
    CHECK(uv_async_init(&server->loop, &server->wake, on_loop_wake) == 0);
    server->wake.data = server;
    rc = models_open(server, fault);
    if (!rc) rc = check_socket_mode(options->unix_socket_mode, fault);
    if (!rc && !socket_is_passed()) rc = sock_check(&address, fault);
    if (!rc && options->otlp_endpoint) rc = otlp_open(options->otlp_endpoint, &server->otlp, fault);
    if (!rc && options->image_hosts.count)
        rc = fetch_open(&server->options.image_hosts, &server->fetch, fault);
    if (!rc) rc = open_keys(&server->keys, &options->now, NULL, fault);
    if (!rc) rc = read_tls(&options->now, &server->tls, fault);
    if (rc) {
        server_close(server);
        server = NULL;
    }
    *out = server;
    return rc;
}

int server_bind(struct server *server, struct fault *fault) {
    const struct server_options *o = &server->options;
    const struct sock_address address = address_of(o);
    raise_file_limit(o->max_connections);
    int rc = systemd_listen_fd(&server->listen_fd, fault);
    bool passed = server->listen_fd >= 0;
    if (!rc && !passed) rc = sock_bind(&address, &server->listen_fd, fault);
    if (rc) return rc;
    server->unlink_path = !passed;
    server->loopback = sock_is_loopback(server->listen_fd);
    sock_url(server->listen_fd, passed ? NULL : o->host, server->tls != NULL, server->url,
             sizeof server->url);
    return 0;
}

/* --- starting --- */

/* Logs a complaint of libmicrohttpd at debug level. With every write it complains about each TCP
 * option that a socket pair lacks, so nothing is formatted unless it is shown. */
__attribute__((format(printf, 2, 0))) static void log_daemon(void *cls, const char *format,
                                                             va_list args) {
    struct server *server = cls;
    char *line = server->last_complaint;
    if (server->daemon && !log_shows(LOG_LEVEL_DEBUG)) return;
    vsnprintf(line, sizeof server->last_complaint, format, args);
    line[strcspn(line, "\n")] = '\0';
    log_debug("libmicrohttpd: %s", line);
}

static int start_daemon(struct server *server, struct fault *fault) {
    const struct server_options *o = &server->options;
    unsigned flags =
        MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    server->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, http_access, server, MHD_OPTION_EXTERNAL_LOGGER, log_daemon, server,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)o->max_connections + CONNS_CLOSING_MAX,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, 2 * o->max_header_bytes + CONN_MEMORY_EXTRA,
        MHD_OPTION_CONNECTION_TIMEOUT, 0u, MHD_OPTION_STRICT_FOR_CLIENT, 1,
        MHD_OPTION_NOTIFY_CONNECTION, conn_notify, server, MHD_OPTION_NOTIFY_COMPLETED,
        http_completed, server, MHD_OPTION_END);
    if (server->daemon) return 0;
    return fault_set(fault, ERR_IO, "host", "cannot start the HTTP server: %s",
                     server->last_complaint);
}

static uint64_t tick_ms(const struct server_timeouts *t, int64_t watchdog_ns) {
    int least = 4000;
    if (watchdog_ns && watchdog_ns / MS < least) least = (int)(watchdog_ns / MS);
    const int all[] = {t->handshake, t->header, t->idle, t->body, t->stall, t->first, t->ping};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] < least) least = all[i];
    return least < 80 ? 20 : (uint64_t)least / 4;
}

/* Returns whether SIGHUP is ignored, as in a process that nohup has started. */
static bool ignores_hangups(void) {
    struct sigaction action;
    return sigaction(SIGHUP, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
}

static void start_handles(struct server *server) {
    uint64_t tick = tick_ms(&server->options.timeouts, server->watchdog.every_ns);
    int fd = MHD_get_daemon_info(server->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    server->handles_open = true;
    server->on_timer = on_timer;
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
    if (server->options.reload || !ignores_hangups())
        CHECK(uv_signal_start(&server->sighup, server->options.reload ? on_hangup : on_signal,
                              SIGHUP) == 0);
    listener_open(server);
}

/* Responses in the background hold at most this part of the queue's places, because no connection
 * bounds their number. */
enum { BACKGROUND_PART = 4 };

/* Sets the shares. An address may be that of a proxy with many users, so it may have nearly all
 * connections, and a few are left for other addresses. If all clients are on this machine, they
 * have one address, so there is no share. */
static void set_shares(struct server *server) {
    const struct server_options *o = &server->options;
    int64_t places = 0, background = 0;
    struct ledger_stock *stock = server->ledger.stock;
    for (int i = 0; i < server->models.count; i++) {
        const struct served_model *model = &server->models.items[i];
        const int queue = model->engine_options.max_queue;
        places += (int64_t)queue * model->stats.replica_count;
        background += (queue + BACKGROUND_PART - 1) / BACKGROUND_PART;
    }
    stock[LEDGER_PLACES] = (struct ledger_stock){.total = places, .times = 2};
    stock[LEDGER_BACKGROUND] = (struct ledger_stock){.total = background, .times = 2};
    stock[LEDGER_TOKENS] = (struct ledger_stock){.total = o->max_queue_tokens, .times = 2};
    stock[LEDGER_CONNECTIONS] = (struct ledger_stock){
        .total = o->max_connections, .times = sock_has_networks(server->listen_fd) ? 15 : 0};
}

int server_start(struct server *server, struct engine *engine, struct fault *fault) {
    server->records = oai_records_open(OAI_RECORD_BYTES, OAI_RECORDS_MAX);
    if (!server->records) {
        engine_close(engine);
        return fault_set(fault, ERR_NOMEM, NULL, "no memory");
    }
    int rc = models_start(server, engine, fault);
    if (rc) return rc;
    set_shares(server);
    page_policy(server->page_policy);
    server->watchdog.every_ns = systemd_watchdog_ns() / WATCHDOG_SHARE;
    rc = works_open(server, fault);
    if (!rc) rc = sock_listen(server->listen_fd, fault);
    if (!rc) rc = start_daemon(server, fault);
    if (rc) return rc;
    start_handles(server);
    systemd_announce(&server->announced, "READY=1\nSTATUS=Serving %s at %s",
                     server->models.items[0].rules.names[0], server->url);
    return 0;
}

const char *server_url(const struct server *server) {
    return server->url;
}

const char *server_model(const struct server *server) {
    return server->models.items[0].rules.names[0];
}

bool server_needs_key(const struct server *server) {
    return server->keys.count > 0;
}

bool server_is_open(const struct server *server) {
    return !server->options.unix_socket && !sock_is_loopback(server->listen_fd) &&
           !server_needs_key(server);
}

static int reload_keys(struct server *server, const struct server_reloadable *fresh,
                       struct keys *keys, struct fault *fault) {
    int rc = open_keys(keys, fresh, &server->keys, fault);
    if (rc || keys->count || !server->keys.count) return rc;
    keys_close(keys);
    return fault_set(fault, ERR_INVALID, "api-key",
                     "no key is left, which would open the server to everybody; that takes a "
                     "restart");
}

/* Reloads the certificate. Whether the server speaks TLS cannot change, because its address says
 * it. */
static int reload_tls(const struct server *server, const struct server_reloadable *fresh,
                      struct tls_config **tls, struct fault *fault) {
    int rc = read_tls(fresh, tls, fault);
    if (rc || !*tls == !server->tls) return rc;
    tls_config_close(*tls);
    return fault_set(fault, ERR_INVALID, "tls-cert", "TLS is turned on or off by a restart only");
}

int server_reload(struct server *server, const struct server_reloadable *fresh,
                  struct fault *fault) {
    struct keys keys;
    struct tls_config *tls;
    int rc = reload_tls(server, fresh, &tls, fault);
    if (rc) return rc;
    rc = reload_keys(server, fresh, &keys, fault);
    if (rc) {
        tls_config_close(tls);
        return rc;
    }
    tls_config_close(server->tls);
    server->tls = tls;
    keys_close(&server->keys);
    server->keys = keys;
    server->options.now = *fresh;
    return 0;
}

/* --- running and closing --- */

/* Ends all exchanges, so that nothing refers to the engine any more: requests without an answer
 * end, and their jobs with them. The engine's thread still runs and wakes the loop when it has
 * finished a job. */
static void end_exchanges(struct server *server) {
    server->closing = true;
    listener_shut(server);
    while (server->works || server->exchanges || models_busy(server)) {
        for (struct conn *conn = server->conns; conn; conn = conn->next)
            if (conn->exchange) conn_kill(conn);
        MHD_run(server->daemon);
        relay_sent(server);
        poll_jobs(server, clock_ns());
        if (server->works || server->exchanges || models_busy(server))
            uv_run(&server->loop, UV_RUN_ONCE);
    }
}

bool server_run(struct server *server) {
    run_http(server);
    uv_run(&server->loop, UV_RUN_DEFAULT);
    end_exchanges(server);
    return !server->failed;
}

static void close_handles(struct server *server) {
    uv_handle_t *const handles[] = {
        (uv_handle_t *)&server->poll,     (uv_handle_t *)&server->timer,
        (uv_handle_t *)&server->tick,     (uv_handle_t *)&server->sigterm,
        (uv_handle_t *)&server->sigint,   (uv_handle_t *)&server->sighup,
        (uv_handle_t *)&server->listener, (uv_handle_t *)&server->turn,
    };
    if (!server->handles_open) return;
    server->handles_open = false;
    for (size_t i = 0; i < sizeof handles / sizeof *handles; i++) uv_close(handles[i], NULL);
}

void server_close(struct server *server) {
    if (!server) return;
    models_close(server);
    close_handles(server);
    if (server->unlink_path) sock_unlink(server->listen_fd);
    for (struct conn *conn = server->conns; conn; conn = conn->next) conn_kill(conn);
    if (server->daemon) MHD_stop_daemon(server->daemon);
    server->daemon = NULL;
    relay_sent(server);
    uv_close((uv_handle_t *)&server->wake, NULL);
    uv_run(&server->loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&server->loop) == 0);
    CHECK(!server->conns && !server->jobs && server->exchanges == 0);
    ledger_close(&server->ledger);
    if (server->listen_fd >= 0) close(server->listen_fd);
    otlp_close(server->otlp);
    fetch_close(server->fetch);
    tls_config_close(server->tls);
    buf_close(&server->framed);
    keys_close(&server->keys);
    oai_records_close(server->records);
    mem_free(server);
}
