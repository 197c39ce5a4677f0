#include "client/http.h"

#include <curl/curl.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"

#define ANSWER_BYTES_MAX ((size_t)16 << 20)
#define SLOW_NS          2000000000ll
#define WAIT_MS          200

struct http {
    struct http_options options;
    CURLM *multi;
    CURL *easy;
};

/* A request in progress. */
struct transfer {
    struct http *http;
    struct http_answer *answer;
    http_receive receive;
    void *arg;
    bool began; /* something was received */
    bool stop;  /* `receive` wanted no more */
};

struct http *http_open(const struct http_options *options) {
    struct http *http = mem_must_alloc(1, sizeof *http);
    http->options = *options;
    CHECK(curl_global_init(CURL_GLOBAL_DEFAULT) == 0);
    http->multi = curl_multi_init();
    http->easy = curl_easy_init();
    if (http->multi && http->easy) return http;
    http_close(http);
    return NULL;
}

void http_close(struct http *http) {
    if (http->easy) curl_easy_cleanup(http->easy);
    if (http->multi) curl_multi_cleanup(http->multi);
    curl_global_cleanup();
    mem_free(http);
}

static size_t on_body(char *data, size_t size, size_t count, void *arg) {
    struct transfer *transfer = arg;
    long status = 0;
    transfer->began = true;
    curl_easy_getinfo(transfer->http->easy, CURLINFO_RESPONSE_CODE, &status);
    if (!transfer->receive || status != 200) {
        buf_add(&transfer->answer->body, data, size * count);
        return transfer->answer->body.failed ? 0 : size * count;
    }
    transfer->stop = !transfer->receive(transfer->arg, data, size * count);
    return transfer->stop ? 0 : size * count;
}

static struct curl_slist *make_headers(const struct http *http, const char *session, bool post) {
    struct curl_slist *list = NULL;
    struct buf line;
    buf_open(&line, 8192);
    if (post) list = curl_slist_append(list, "Content-Type: application/json");
    list = curl_slist_append(list, "Expect:");
    if (session) {
        buf_fmt(&line, "X-Session-ID: %s", session);
        if (!line.failed) list = curl_slist_append(list, line.data);
    }
    if (http->options.key) {
        buf_clear(&line);
        buf_fmt(&line, "Authorization: Bearer %s", http->options.key);
        if (!line.failed) list = curl_slist_append(list, line.data);
    }
    buf_close(&line);
    return list;
}

static void set_transfer_options(struct transfer *transfer, const char *path,
                                 struct curl_slist *headers, const struct buf *body, char *why) {
    const struct http_options *options = &transfer->http->options;
    CURL *easy = transfer->http->easy;
    bool is_path = strncmp(options->url, "unix:", 5) == 0;
    char url[2048];
    snprintf(url, sizeof url, "%s%s", is_path ? "http://localhost" : options->url, path);
    curl_easy_reset(easy);
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, transfer);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, why);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "keepd-chat/" KEEPD_VERSION);
    if (is_path) curl_easy_setopt(easy, CURLOPT_UNIX_SOCKET_PATH, options->url + 5);
    if (options->cacert) curl_easy_setopt(easy, CURLOPT_CAINFO, options->cacert);
    if (!body) return;
    curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)body->size);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body->data);
}

static bool receive_bytes(int fd) {
    struct signalfd_siginfo info;
    return fd >= 0 && read(fd, &info, sizeof info) == sizeof info;
}

/* Runs the transfer until it ends or SIGINT arrives; returns whether it ended. The signal is
 * blocked here and read from a descriptor, so that none is lost between two waits. An answer that
 * arrived before the signal is read to its end; a signal that arrives together with the end counts
 * for this answer, so it does not end the program. */
static bool run_transfer(struct transfer *transfer, void (*slow)(void *arg), CURLcode *code) {
    struct http *http = transfer->http;
    int64_t begin_ns = clock_ns();
    sigset_t interrupt, before;
    bool interrupted = false;
    int running = 1;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt, &before);
    int fd = signalfd(-1, &interrupt, SFD_CLOEXEC | SFD_NONBLOCK);
    struct curl_waitfd wait = {.fd = fd, .events = CURL_WAIT_POLLIN};
    while (running > 0 && !interrupted) {
        if (curl_multi_perform(http->multi, &running) != CURLM_OK) break;
        if (running > 0) curl_multi_poll(http->multi, &wait, fd >= 0 ? 1 : 0, WAIT_MS, NULL);
        interrupted = receive_bytes(fd);
        if (slow && !transfer->began && clock_ns() - begin_ns > SLOW_NS) {
            slow(transfer->arg);
            slow = NULL;
        }
    }
    if (interrupted && running > 0) (void)curl_multi_perform(http->multi, &running);
    (void)receive_bytes(fd);
    if (fd >= 0) close(fd);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    *code = CURLE_FAILED_INIT;
    int left;
    for (CURLMsg *message; (message = curl_multi_info_read(http->multi, &left));)
        if (message->msg == CURLMSG_DONE) *code = message->data.result;
    return !interrupted || running == 0;
}

static void take_end(struct transfer *transfer, CURLcode code, const char *why) {
    struct http_answer *answer = transfer->answer;
    CURL *easy = transfer->http->easy;
    curl_off_t retry = 0;
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &answer->status);
    if (curl_easy_getinfo(easy, CURLINFO_RETRY_AFTER, &retry) == CURLE_OK)
        answer->retry_seconds = (long)retry;
    if (code == CURLE_OK) {
        answer->end = HTTP_ANSWERED;
        return;
    }
    answer->end = HTTP_FAILED;
    answer->refused = code == CURLE_COULDNT_CONNECT;
    if (transfer->stop) why = "the answer is no stream that this client can read";
    snprintf(answer->why, sizeof answer->why, "%s", *why ? why : curl_easy_strerror(code));
}

void http_ask(struct http *http, const char *path, const char *session, const struct buf *body,
              http_receive receive, void (*slow)(void *arg), void *arg,
              struct http_answer *answer) {
    struct transfer transfer = {.http = http, .answer = answer, .receive = receive, .arg = arg};
    char why[CURL_ERROR_SIZE] = "";
    CURLcode code;
    *answer = (struct http_answer){.end = HTTP_FAILED};
    buf_open(&answer->body, ANSWER_BYTES_MAX);
    struct curl_slist *headers = make_headers(http, session, body != NULL);
    set_transfer_options(&transfer, path, headers, body, why);
    if (curl_multi_add_handle(http->multi, http->easy) != CURLM_OK) {
        snprintf(answer->why, sizeof answer->why, "out of memory");
    } else {
        bool ended = run_transfer(&transfer, slow, &code);
        if (ended)
            take_end(&transfer, code, why);
        else
            answer->end = HTTP_INTERRUPTED;
        curl_multi_remove_handle(http->multi, http->easy);
    }
    curl_easy_setopt(http->easy, CURLOPT_ERRORBUFFER, NULL);
    curl_easy_setopt(http->easy, CURLOPT_HTTPHEADER, NULL);
    curl_slist_free_all(headers);
}
