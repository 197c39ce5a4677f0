/* A load client: thousands of clients on one libuv loop, good ones and bad ones, against a running
 * daemon. Prints one JSON object with what it saw; exit 1 when an answer was wrong or lost.
 *
 *   load PORT [connections=256] [ramp=0] [seconds=10] [tokens=64] [prompts=32] [vanish=0] [slow=0]
 *        [loris=0] [stamp=0] [drain=0] [pid=0] [seed=1] [tls=0] [hostile=0]
 *
 * First every prompt is asked alone; what it answers then is what it must answer under load. Then
 * `connections` clients, which begin one after the other within `ramp` seconds, ask without pause
 * for `seconds`, four of five requests streamed, and stop when their answer has ended. Events,
 * bytes, latencies and CPU times are those of the `seconds`, without the beginning and the end.
 *
 * Of 100 requests, `vanish` end by the client's leaving at a random moment: while its request is
 * half sent, after some time, after some bytes of the answer, or with an answer that no buffer
 * holds and of which it has read nothing; by FIN or by RST. `slow` further clients read a few bytes
 * at a time; `loris` ones send a header byte by byte and must be thrown out. A client that is
 * refused asks again; with drain=1 a refusal means that the daemon is ending, and nobody asks
 * again. Requests that were accepted must still be answered.
 *
 * stamp=1 (the fake engine only) asks for streams of tokens that say when they were made: then the
 * time from token to client is measured. pid: the daemon, to report its CPU time.
 *
 * tls=1: over TLS. Of 100 connections `hostile` never finish the handshake: they send one byte,
 * half a hello, garbage, or a hello whose answer they do not read; they stay for a random time.
 *
 * HTTP/1.0, so that an answer is the bytes until the end: a connection per request. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"
#include "tests/load/secure.h"

#define LINE_BYTES    16384 /* an answer that is not streamed is one line */
#define REQUEST_BYTES 1024
#define READ_BYTES    65536
#define PROMPTS_MAX   1024
#define SLOW_BYTES    64 /* bytes that a slow reader reads at a time */
#define SLOW_MS       20
#define LORIS_MS      200
#define LATENCY_US    100000 /* histogram, one bucket per microsecond */
#define WAITING_MS    6000   /* in the queue, in the prompt or in the answer */
#define READING_BYTES 20000
#define HOSTILE_MS    3000 /* longest stay in a handshake */
#define FULL_TIMES    8    /* the tokens of an answer that fills every buffer, with scores */

enum role { GOOD, SLOW, LORIS };
enum hostile { HONEST, ONE_BYTE, HALF_HELLO, GARBAGE, DEAF, HOSTILE_COUNT };
enum leave { STAYS, LEAVES_SENDING, LEAVES_WAITING, LEAVES_READING, LEAVES_FULL, LEAVES_COUNT };

struct settings {
    int port, connections, ramp, seconds, tokens, prompts, vanish, slow, loris, stamp, drain, pid,
        seed;
    int tls, hostile;
};

/* Counts up to a moment. */
struct meter {
    double seconds, own_cpu, daemon_cpu;
    uint64_t events, bytes;
};

struct client {
    uv_tcp_t tcp;
    uv_timer_t timer;
    uv_connect_t connect;
    uv_write_t write;
    struct load *load;
    enum role role;
    enum leave leave;
    enum hostile hostile;
    struct secure *secure; /* NULL = plain */
    bool open, stream, accepted, refused, ended;
    int prompt;
    int64_t leave_after; /* bytes of the answer, or milliseconds */
    uint64_t hash;       /* hash of the answer's text */
    size_t received, line_size, sent;
    char line[LINE_BYTES];
    char request[REQUEST_BYTES];
    size_t request_size;
};

struct load {
    struct settings set;
    uv_loop_t loop;
    uv_timer_t end;
    struct client *clients;
    int client_count, living;
    bool measuring, stopping, draining;
    struct meter from, to;
    int alone; /* prompt being asked alone; -1 = under load */
    uint64_t reference[PROMPTS_MAX];
    uint64_t random;
    char buffer[READ_BYTES];
    uint64_t events, bytes, asked, answered, refused, vanished, lost, wrong, thrown_out, hostile;
    uint64_t latency_count, *latency;
};

static uint64_t next_random(struct load *load) {
    load->random ^= load->random << 13;
    load->random ^= load->random >> 7;
    load->random ^= load->random << 17;
    return load->random;
}

static int chance(struct load *load, int percent) {
    return (int)(next_random(load) % 100) < percent;
}

/* --- responses --- */

static void add_text(struct client *c, const char *text, size_t size) {
    for (size_t i = 0; i < size; i++)
        c->hash = (c->hash ^ (unsigned char)text[i]) * 0x100000001b3u; /* FNV-1a */
}

static void measure(struct load *load, const char *text, size_t size) {
    char digits[17] = "";
    if (size < 16) return;
    memcpy(digits, text, 16);
    int64_t us = (clock_ns() - strtoll(digits, NULL, 16)) / 1000;
    if (us < 0 || !load->measuring) return;
    load->latency[us < LATENCY_US ? us : LATENCY_US]++;
    load->latency_count++;
}

/* The text is hashed as it is escaped in JSON: equal texts have equal escapes. */
static void take_content(struct client *c, const char *line, const char *name) {
    const char *text = strstr(line, name);
    if (!text) return;
    text += strlen(name);
    const char *end = text;
    while (*end && *end != '"') end += *end == '\\' && end[1] ? 2 : 1;
    if (c->load->set.stamp)
        measure(c->load, text, (size_t)(end - text));
    else
        add_text(c, text, (size_t)(end - text));
}

static void take_line(struct client *c) {
    c->line[c->line_size] = '\0';
    if (!c->accepted && !c->refused) {
        c->accepted = strstr(c->line, " 200 ") != NULL;
        c->refused = !c->accepted;
    } else if (strncmp(c->line, "data: [DONE]", 12) == 0) {
        c->ended = true;
    } else if (strncmp(c->line, "data: {\"error", 13) == 0) {
        c->refused = true; /* told so: aborted, or out of time */
    } else if (strncmp(c->line, "data: {", 7) == 0) {
        c->load->events++;
        take_content(c, c->line, "\"content\":\"");
    } else if (c->line[0] == '{') {
        take_content(c, c->line, "\"content\":\"");
        c->ended = true;
    }
    c->line_size = 0;
}

static void take_bytes(struct client *c, const char *data, size_t size) {
    c->received += size;
    c->load->bytes += size;
    for (size_t i = 0; i < size; i++) {
        if (data[i] == '\n')
            take_line(c);
        else
            c->line[c->line_size++] = data[i];
        CHECK_MSG(c->line_size < sizeof c->line, "a line is longer than %zu", sizeof c->line);
    }
}

/* --- the end of a request --- */

static void begin(struct client *c);

static void judge(struct client *c) {
    struct load *load = c->load;
    if (!c->stream && c->line_size) take_line(c);
    if (c->hostile) {
        load->hostile++;
    } else if (c->role == LORIS) {
        load->thrown_out += c->leave == STAYS;
    } else if (c->leave != STAYS && !c->ended) {
        load->vanished++;
    } else if (c->refused || !c->accepted) {
        load->refused++;
        load->draining |= load->set.drain;
    } else if (!c->ended) {
        load->lost++;
    } else if (load->alone >= 0) {
        load->reference[load->alone] = c->hash;
    } else {
        load->answered++;
        load->wrong += !load->set.stamp && c->hash != load->reference[c->prompt];
    }
}

static void on_closed(uv_handle_t *handle) {
    struct client *c = handle->data;
    struct load *load = c->load;
    c->open = false;
    secure_close(c->secure);
    c->secure = NULL;
    judge(c);
    load->living--;
    if (load->alone >= 0) {
        if (++load->alone < load->set.prompts) begin(c);
    } else if (!load->stopping && !load->draining) {
        begin(c);
    }
}

static void leave(struct client *c, bool reset) {
    uv_timer_stop(&c->timer);
    if (uv_is_closing((uv_handle_t *)&c->tcp)) return;
    if (!reset || uv_tcp_close_reset(&c->tcp, on_closed))
        uv_close((uv_handle_t *)&c->tcp, on_closed);
}

/* --- reading --- */

static void on_alloc(uv_handle_t *handle, size_t size, uv_buf_t *buf) {
    struct client *c = handle->data;
    (void)size;
    *buf = uv_buf_init(c->load->buffer, c->role == SLOW ? SLOW_BYTES : READ_BYTES);
}

static void on_slow(uv_timer_t *timer);

static void send_request(struct client *c);

/* False: the connection has ended. */
static bool take_secure(struct client *c, const char *data, size_t size) {
    char plain[READ_BYTES / 4];
    ssize_t got = 0;
    secure_feed(c->secure, data, size);
    if (!secure_is_shaken(c->secure)) {
        int rc = secure_handshake(c->secure);
        if (rc < 0) return false;
        if (rc > 0) return true;
        send_request(c);
    }
    while (c->secure && (got = secure_read(c->secure, plain, sizeof plain)) > 0)
        take_bytes(c, plain, (size_t)got);
    return got == 0;
}

static void on_read(uv_stream_t *tcp, ssize_t size, const uv_buf_t *buf) {
    struct client *c = tcp->data;
    if (size < 0) {
        leave(c, false);
        return;
    }
    if (c->hostile) return;
    if (!c->secure) {
        take_bytes(c, buf->base, (size_t)size);
    } else if (!take_secure(c, buf->base, (size_t)size)) {
        leave(c, false);
        return;
    }
    if (uv_is_closing((uv_handle_t *)tcp)) return;
    if (c->leave == LEAVES_READING && (int64_t)c->received >= c->leave_after)
        leave(c, chance(c->load, 50));
    else if (c->role == SLOW) {
        uv_read_stop(tcp);
        uv_timer_start(&c->timer, on_slow, SLOW_MS, 0);
    }
}

static void start_reading(struct client *c) {
    CHECK(uv_read_start((uv_stream_t *)&c->tcp, on_alloc, on_read) == 0);
}

static void on_slow(uv_timer_t *timer) {
    start_reading(timer->data);
}

/* --- sending --- */

static void on_leave(uv_timer_t *timer) {
    struct client *c = timer->data;
    leave(c, chance(c->load, 50));
}

static void on_trickle(uv_timer_t *timer) {
    struct client *c = timer->data;
    uv_buf_t byte = uv_buf_init(c->request + c->sent % 16, 1);
    if (c->load->stopping) c->leave = LEAVES_SENDING;
    if (c->load->stopping || uv_try_write((uv_stream_t *)&c->tcp, &byte, 1) < 0)
        leave(c, false);
    else
        c->sent++;
}

static void on_written(uv_write_t *write, int status) {
    struct client *c = write->data;
    if (status < 0 || c->leave == LEAVES_SENDING) leave(c, false);
}

static ssize_t send_bytes(void *arg, const void *data, size_t size) {
    struct client *c = arg;
    uv_buf_t buf = uv_buf_init((char *)(uintptr_t)data, (unsigned)size);
    if (c->hostile == HALF_HELLO) buf.len = 1 + next_random(c->load) % (size - 1);
    int sent = uv_try_write((uv_stream_t *)&c->tcp, &buf, 1);
    return c->hostile && sent > 0 ? (ssize_t)size : sent;
}

static void send_request(struct client *c) {
    size_t size = c->request_size;
    if (c->leave == LEAVES_SENDING) size = 1 + next_random(c->load) % (size - 1);
    if (c->leave == LEAVES_WAITING || c->leave == LEAVES_FULL)
        uv_timer_start(&c->timer, on_leave, (uint64_t)c->leave_after, 0);
    if (c->secure) {
        if (!secure_write(c->secure, c->request, size) || c->leave == LEAVES_SENDING)
            leave(c, false);
        if (c->leave == LEAVES_FULL) uv_read_stop((uv_stream_t *)&c->tcp);
        return;
    }
    uv_buf_t buf = uv_buf_init(c->request, (unsigned)size);
    CHECK(uv_write(&c->write, (uv_stream_t *)&c->tcp, &buf, 1, on_written) == 0);
}

static void start_hostile(struct client *c) {
    char bytes[256];
    size_t size = c->hostile == ONE_BYTE ? 1 : sizeof bytes;
    for (size_t i = 0; i < size; i++) bytes[i] = (char)next_random(c->load);
    if (c->hostile == ONE_BYTE) bytes[0] = 22; /* a record of a handshake */
    if (c->hostile == HALF_HELLO || c->hostile == DEAF)
        secure_handshake(c->secure);
    else
        send_bytes(c, bytes, size);
    uv_timer_start(&c->timer, on_leave, next_random(c->load) % HOSTILE_MS, 0);
}

static void start_secure(struct client *c) {
    c->secure = secure_open(send_bytes, c);
    if (c->hostile)
        start_hostile(c);
    else if (secure_handshake(c->secure) < 0)
        leave(c, false);
}

static void on_connected(uv_connect_t *connect, int status) {
    struct client *c = connect->data;
    if (status < 0) {
        c->load->draining |= status == UV_ECONNREFUSED;
        leave(c, false);
        return;
    }
    if (c->load->set.tls ? c->hostile != DEAF : c->leave != LEAVES_FULL) start_reading(c);
    if (c->role == LORIS) {
        uv_timer_start(&c->timer, on_trickle, LORIS_MS, LORIS_MS);
        return;
    }
    if (c->load->set.tls)
        start_secure(c);
    else
        send_request(c);
}

/* --- asking --- */

static int write_body(const struct client *c, char *body, size_t size) {
    const struct settings *set = &c->load->set;
    bool full = c->leave == LEAVES_FULL;
    return snprintf(
        body, size,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"%sMy number is %d. Number %d tells a "
        "story of %d words. What is my number?\"}],\"temperature\":1,\"seed\":%d,\"max_tokens\":%d,"
        "\"ignore_eos\":true,\"stream\":%s,%s\"kv\":{\"reuse\":false,\"retain\":false}}",
        set->stamp ? "stamp " : "", c->prompt, c->prompt * 7, c->prompt * 3, c->prompt,
        full ? set->tokens * FULL_TIMES : set->tokens, c->stream ? "true" : "false",
        full ? "\"logprobs\":true,\"top_logprobs\":20," : "");
}

static void write_request(struct client *c) {
    char body[REQUEST_BYTES];
    int size = write_body(c, body, sizeof body);
    size = snprintf(c->request, sizeof c->request,
                    "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: "
                    "application/json\r\nContent-Length: %d\r\n\r\n%s",
                    size, body);
    CHECK(size > 0 && (size_t)size < sizeof c->request);
    c->request_size = (size_t)size;
}

static void choose(struct client *c) {
    struct load *load = c->load;
    bool alone = load->alone >= 0;
    c->leave = STAYS;
    c->hostile = HONEST;
    if (!alone && c->role == GOOD && chance(load, load->set.hostile))
        c->hostile = (enum hostile)(1 + next_random(load) % (HOSTILE_COUNT - 1));
    c->accepted = c->refused = c->ended = false;
    c->received = c->line_size = c->sent = 0;
    c->hash = 0xcbf29ce484222325u;
    c->prompt = alone ? load->alone : (int)(next_random(load) % (uint64_t)load->set.prompts);
    c->stream = alone || load->set.stamp || c->role == SLOW || chance(load, 80);
    if (!alone && c->role == GOOD && chance(load, load->set.vanish)) {
        c->leave = (enum leave)(1 + next_random(load) % (LEAVES_COUNT - 1));
        c->leave_after = (int64_t)(next_random(load) %
                                   (c->leave == LEAVES_READING ? READING_BYTES : WAITING_MS));
    }
    write_request(c);
}

static void begin(struct client *c) {
    struct sockaddr_in address;
    int window = SLOW_BYTES;
    choose(c);
    CHECK(uv_ip4_addr("127.0.0.1", c->load->set.port, &address) == 0);
    CHECK(uv_tcp_init_ex(&c->load->loop, &c->tcp, AF_INET) == 0);
    if (c->leave == LEAVES_FULL) uv_recv_buffer_size((uv_handle_t *)&c->tcp, &window);
    c->tcp.data = c->timer.data = c->connect.data = c->write.data = c;
    c->open = true;
    c->load->living++;
    c->load->asked++;
    if (uv_tcp_connect(&c->connect, &c->tcp, (struct sockaddr *)&address, on_connected))
        leave(c, false);
}

/* --- the whole --- */

static void parse(struct settings *set, int argc, char **argv) {
    const struct {
        const char *name;
        int *value;
    } rows[] = {{"connections=", &set->connections},
                {"ramp=", &set->ramp},
                {"seconds=", &set->seconds},
                {"tokens=", &set->tokens},
                {"prompts=", &set->prompts},
                {"vanish=", &set->vanish},
                {"slow=", &set->slow},
                {"loris=", &set->loris},
                {"stamp=", &set->stamp},
                {"drain=", &set->drain},
                {"pid=", &set->pid},
                {"seed=", &set->seed},
                {"tls=", &set->tls},
                {"hostile=", &set->hostile}};
    *set = (struct settings){.connections = 256, .seconds = 10, .tokens = 64, .prompts = 32};
    set->seed = 1;
    CHECK_MSG(argc > 1 && (set->port = atoi(argv[1])) > 0, "usage: load PORT [name=value ...]");
    for (int i = 2; i < argc; i++) {
        size_t k = 0, count = sizeof rows / sizeof *rows;
        while (k < count && strncmp(argv[i], rows[k].name, strlen(rows[k].name)) != 0) k++;
        CHECK_MSG(k < count, "unknown setting %s", argv[i]);
        *rows[k].value = atoi(argv[i] + strlen(rows[k].name));
    }
    if (set->prompts > PROMPTS_MAX) set->prompts = PROMPTS_MAX;
}

/* User and system time of the daemon, seconds. */
static double cpu_of(int pid) {
    char path[64];
    unsigned long user = 0, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = pid ? fopen(path, "r") : NULL;
    if (!file) return 0;
    if (fscanf(file, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
               &system) != 2)
        user = system = 0;
    fclose(file);
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

static double own_cpu(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) +
           (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

static struct meter meter(const struct load *load) {
    return (struct meter){.seconds = (double)clock_ns() / 1e9,
                          .own_cpu = own_cpu(),
                          .daemon_cpu = cpu_of(load->set.pid),
                          .events = load->events,
                          .bytes = load->bytes};
}

static void stop_measuring(struct load *load) {
    if (load->stopping) return;
    load->to = meter(load);
    load->measuring = false;
    load->stopping = true;
}

static void on_end(uv_timer_t *timer) {
    stop_measuring(timer->data);
}

static void on_ramped(uv_timer_t *timer) {
    struct load *load = timer->data;
    load->from = meter(load);
    load->measuring = true;
    uv_timer_start(timer, on_end, (uint64_t)load->set.seconds * 1000, 0);
}

static double quantile_ms(const struct load *load, double q) {
    uint64_t wanted = (uint64_t)((double)load->latency_count * q), seen = 0;
    for (int us = 0; us <= LATENCY_US; us++)
        if ((seen += load->latency[us]) > wanted) return us / 1000.0;
    return 0;
}

static void ask_alone(struct load *load) {
    load->alone = 0;
    begin(&load->clients[0]);
    uv_run(&load->loop, UV_RUN_DEFAULT);
    load->alone = -1;
    CHECK_MSG(load->lost + load->refused == 0, "a prompt that is asked alone gets no answer");
    load->events = load->bytes = load->asked = load->answered = 0;
}

static void open_clients(struct load *load) {
    const struct settings *set = &load->set;
    load->client_count = set->connections + set->slow + set->loris;
    load->clients = mem_must_alloc((size_t)load->client_count, sizeof *load->clients);
    for (int i = 0; i < load->client_count; i++) {
        struct client *c = &load->clients[i];
        c->load = load;
        c->role = i < set->connections ? GOOD : i < set->connections + set->slow ? SLOW : LORIS;
        CHECK(uv_timer_init(&load->loop, &c->timer) == 0);
    }
}

static void report(const struct load *load) {
    const struct meter *from = &load->from, *to = &load->to;
    double seconds = to->seconds - from->seconds;
    printf("{\"seconds\": %.2f, \"asked\": %" PRIu64 ", \"answered\": %" PRIu64
           ", \"refused\": %" PRIu64 ", \"vanished\": %" PRIu64 ", \"lost\": %" PRIu64
           ", \"wrong\": %" PRIu64 ", \"thrown_out\": %" PRIu64 ", \"hostile\": %" PRIu64
           ", \"events\": %" PRIu64
           ", \"events_per_second\": %.0f, \"mb_per_second\": %.1f, \"client_cpu\": %.2f, "
           "\"daemon_cpu\": %.2f",
           seconds, load->asked, load->answered, load->refused, load->vanished, load->lost,
           load->wrong, load->thrown_out, load->hostile, to->events - from->events,
           (double)(to->events - from->events) / seconds,
           (double)(to->bytes - from->bytes) / seconds / 1e6,
           (to->own_cpu - from->own_cpu) / seconds, (to->daemon_cpu - from->daemon_cpu) / seconds);
    if (load->latency_count)
        printf(", \"token_to_client_ms\": {\"p50\": %.3f, \"p99\": %.3f, \"p999\": %.3f}",
               quantile_ms(load, .5), quantile_ms(load, .99), quantile_ms(load, .999));
    printf("}\n");
}

static void on_begin(uv_timer_t *timer) {
    begin(timer->data);
}

/* Returns when the last client has its answer. */
static void ask_together(struct load *load) {
    uint64_t ramp_ms = (uint64_t)load->set.ramp * 1000;
    CHECK(uv_timer_init(&load->loop, &load->end) == 0);
    load->end.data = load;
    uv_timer_start(&load->end, on_ramped, ramp_ms, 0);
    uv_unref((uv_handle_t *)&load->end);
    for (int i = 0; i < load->client_count; i++) {
        struct client *c = &load->clients[i];
        c->timer.data = c;
        uv_timer_start(&c->timer, on_begin, ramp_ms * (uint64_t)i / (uint64_t)load->client_count,
                       0);
    }
    uv_run(&load->loop, UV_RUN_DEFAULT);
    stop_measuring(load); /* the daemon may have ended first */
}

int main(int argc, char **argv) {
    struct load *load = mem_must_alloc(1, sizeof *load);
    struct rlimit files;
    parse(&load->set, argc, argv);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    signal(SIGPIPE, SIG_IGN);
    load->random = 0x9e3779b97f4a7c15u * (uint64_t)(load->set.seed + 1);
    load->latency = mem_must_alloc(LATENCY_US + 1, sizeof *load->latency);
    CHECK(uv_loop_init(&load->loop) == 0);
    open_clients(load);
    if (!load->set.stamp) ask_alone(load);
    load->alone = -1;
    ask_together(load);
    report(load);
    return load->lost || load->wrong ? 1 : 0;
}
