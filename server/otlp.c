#include "server/otlp.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/libcurl.h"

#define SECOND_NS    INT64_C(1000000000)
#define LAST_NS      (2 * SECOND_NS) /* for what waits at the end */
#define BACKOFF_NS   (SECOND_NS / 5) /* first pause after a failure; then twice as long */
#define BACKOFF_MOST (10 * SECOND_NS)
#define ATTEMPT_MS   10000L
#define CONNECT_MS   3000L
#define WARN_NS      (60 * SECOND_NS) /* between warnings while no spans are taken */
#define BATCH_MAX    256              /* requests sent at once */
#define BODY_BYTES   (OTLP_BYTES_MAX + 4096)

/* The spans of one request, as text. */
struct item {
    size_t size;
    char text[];
};

struct otlp {
    struct libcurl curl;
    char *url, *shown; /* without the name and password */
    CURL *easy;
    struct curl_slist *headers;
    bool failing; /* the thread's: the last attempt failed */
    int64_t warned_ns;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t work;
    bool stop;
    int64_t stop_ns; /* clock_ns: no attempt goes on after it */
    struct item *items[OTLP_REQUESTS_MAX];
    int first, count; /* a ring */
    size_t bytes;
    struct otlp_counts counts;
};

/* ---- The sending thread ---- */

enum sent { SENT, AGAIN, REFUSED };

/* Returns whether the time for what waits at the end is over. */
static bool is_past_close(struct otlp *otlp) {
    pthread_mutex_lock(&otlp->lock);
    bool late = otlp->stop && clock_ns() >= otlp->stop_ns;
    pthread_mutex_unlock(&otlp->lock);
    return late;
}

/* Called by libcurl about once a second, and while data moves: nonzero ends the transfer. */
static int on_span_transfer(void *arg, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d) {
    (void)a, (void)b, (void)c, (void)d;
    return is_past_close(arg);
}

static size_t discard_response(char *data, size_t size, size_t count, void *arg) {
    (void)data, (void)arg;
    return size * count;
}

/* Warns of the first of several failures, and then once a minute. */
static void warn_of_collector(struct otlp *otlp, CURLcode code, long status) {
    int64_t now = clock_ns();
    if (otlp->failing && now < otlp->warned_ns + WARN_NS) return;
    otlp->failing = true;
    otlp->warned_ns = now;
    uint64_t dropped = otlp_counts_of(otlp).refused;
    if (code != CURLE_OK)
        log_warn("spans were not taken by %s: %s (spans of %" PRIu64 " requests are lost so far)",
                 otlp->shown, otlp->curl.easy_strerror(code), dropped);
    else
        log_warn("spans were not taken by %s: status %ld (spans of %" PRIu64
                 " requests are lost so far)",
                 otlp->shown, status, dropped);
}

static void note_success(struct otlp *otlp) {
    if (otlp->failing) log_info("spans are taken by %s again", otlp->shown);
    otlp->failing = false;
}

static enum sent send_body(struct otlp *otlp, const struct buf *body) {
    const struct libcurl *curl = &otlp->curl;
    long status = 0;
    curl->easy_setopt(otlp->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)body->size);
    curl->easy_setopt(otlp->easy, CURLOPT_POSTFIELDS, body->data);
    CURLcode code = curl->easy_perform(otlp->easy);
    if (code == CURLE_OK) curl->easy_getinfo(otlp->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status >= 200 && status < 300) {
        note_success(otlp);
        return SENT;
    }
    warn_of_collector(otlp, code, status);
    bool again = code != CURLE_OK || status == 429 || (status >= 502 && status <= 504);
    return again ? AGAIN : REFUSED;
}

/* Waits before the next attempt; false: there is none, because the daemon ends. */
static bool pause_for(struct otlp *otlp, int64_t ns) {
    int64_t at = clock_ns() + ns;
    const struct timespec until = {at / SECOND_NS, at % SECOND_NS};
    pthread_mutex_lock(&otlp->lock);
    while (!otlp->stop && clock_ns() < at)
        (void)pthread_cond_timedwait(&otlp->work, &otlp->lock, &until);
    bool ends = otlp->stop;
    pthread_mutex_unlock(&otlp->lock);
    return !ends;
}

static int take_batch(struct otlp *otlp, struct item **batch) {
    int count = 0;
    pthread_mutex_lock(&otlp->lock);
    while (!otlp->stop && otlp->count == 0) pthread_cond_wait(&otlp->work, &otlp->lock);
    while (otlp->count > 0 && count < BATCH_MAX) {
        batch[count] = otlp->items[otlp->first];
        otlp->first = (otlp->first + 1) % OTLP_REQUESTS_MAX;
        otlp->count--;
        otlp->bytes -= batch[count++]->size;
    }
    pthread_mutex_unlock(&otlp->lock);
    return count;
}

static void write_body(struct buf *body, struct item *const *batch, int count) {
    buf_str(body, "{\"resourceSpans\":[{\"resource\":{\"attributes\":[{\"key\":\"service.name\","
                  "\"value\":{\"stringValue\":\"keepd\"}},{\"key\":\"service.version\",\"value\":{"
                  "\"stringValue\":\"" KEEPD_VERSION "\"}}]},\"scopeSpans\":[{\"scope\":{\"name\":"
                  "\"keepd\",\"version\":\"" KEEPD_VERSION "\"},\"spans\":[");
    for (int i = 0; i < count; i++) {
        if (i) buf_char(body, ',');
        buf_add(body, batch[i]->text, batch[i]->size);
    }
    buf_str(body, "]}]}]}");
}

/* Sends until the collector has taken or refused it. The last attempt is made at the end. */
static bool deliver_batch(struct otlp *otlp, const struct buf *body) {
    int64_t pause_ns = BACKOFF_NS;
    enum sent sent = body->failed ? REFUSED : AGAIN;
    for (bool more = true; sent == AGAIN && more && !is_past_close(otlp);) {
        sent = send_body(otlp, body);
        if (sent == AGAIN) more = pause_for(otlp, pause_ns);
        pause_ns = pause_ns * 2 > BACKOFF_MOST ? BACKOFF_MOST : pause_ns * 2;
    }
    return sent == SENT;
}

static void *otlp_main(void *arg) {
    struct otlp *otlp = arg;
    struct item *batch[BATCH_MAX];
    struct buf body;
    int count;
    buf_open(&body, BODY_BYTES);
    while ((count = take_batch(otlp, batch)) > 0) {
        buf_clear(&body);
        write_body(&body, batch, count);
        bool sent = deliver_batch(otlp, &body);
        for (int i = 0; i < count; i++) mem_free(batch[i]);
        pthread_mutex_lock(&otlp->lock);
        *(sent ? &otlp->counts.exported : &otlp->counts.refused) += (uint64_t)count;
        pthread_mutex_unlock(&otlp->lock);
    }
    buf_close(&body);
    return NULL;
}

/* ---- Life ---- */

/* The URL for messages: what stands before the last @ of its authority is left out. */
static void set_shown(struct otlp *otlp) {
    size_t size = strlen(otlp->url) + 1;
    const char *authority = strstr(otlp->url, "://") + 3, *host = authority;
    for (const char *at = authority; *at && *at != '/'; at++)
        if (*at == '@') host = at + 1;
    otlp->shown = mem_must_alloc(size, 1);
    snprintf(otlp->shown, size, "%.*s%s", (int)(authority - otlp->url), otlp->url, host);
}

static int set_url(struct otlp *otlp, const char *endpoint, struct fault *fault) {
    static const char path[] = "/v1/traces";
    size_t size = strlen(endpoint);
    const char *host = strncmp(endpoint, "http://", 7) == 0    ? endpoint + 7
                       : strncmp(endpoint, "https://", 8) == 0 ? endpoint + 8
                                                               : "";
    if (!*host || *host == '/' || size > 1024 || endpoint[strcspn(endpoint, "?# \t")])
        return fault_set(fault, ERR_INVALID, "otlp-endpoint",
                         "expected http://HOST:PORT or https://HOST:PORT");
    while (endpoint[size - 1] == '/') size--;
    bool whole = size >= sizeof path - 1 &&
                 strncmp(endpoint + size - (sizeof path - 1), path, sizeof path - 1) == 0;
    otlp->url = mem_must_alloc(size + sizeof path, 1);
    snprintf(otlp->url, size + sizeof path, "%.*s%s", (int)size, endpoint, whole ? "" : path);
    set_shown(otlp);
    return 0;
}

static int set_span_options(struct otlp *otlp, struct fault *fault) {
    const struct libcurl *curl = &otlp->curl;
    otlp->easy = curl->easy_init();
    if (!otlp->easy) return fault_set(fault, ERR_NOMEM, "otlp-endpoint", "no memory");
    otlp->headers = curl->slist_append(NULL, "Content-Type: application/json");
    curl->slist_append(otlp->headers, "Expect:");
    curl->easy_setopt(otlp->easy, CURLOPT_URL, otlp->url);
    curl->easy_setopt(otlp->easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl->easy_setopt(otlp->easy, CURLOPT_NOSIGNAL, 1L);
    curl->easy_setopt(otlp->easy, CURLOPT_HTTPHEADER, otlp->headers);
    curl->easy_setopt(otlp->easy, CURLOPT_USERAGENT, "keepd/" KEEPD_VERSION);
    curl->easy_setopt(otlp->easy, CURLOPT_WRITEFUNCTION, discard_response);
    curl->easy_setopt(otlp->easy, CURLOPT_TIMEOUT_MS, ATTEMPT_MS);
    curl->easy_setopt(otlp->easy, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_MS);
    curl->easy_setopt(otlp->easy, CURLOPT_NOPROGRESS, 0L);
    /* A look-up that does not end is left behind, on its own thread, where an attempt ends. */
    curl->easy_setopt(otlp->easy, CURLOPT_QUICK_EXIT, 1L);
    curl->easy_setopt(otlp->easy, CURLOPT_XFERINFOFUNCTION, on_span_transfer);
    curl->easy_setopt(otlp->easy, CURLOPT_XFERINFODATA, otlp);
    return 0;
}

/* Signals are for the loop. */
static int start_thread(struct otlp *otlp, struct fault *fault) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    otlp->started = pthread_create(&otlp->thread, NULL, otlp_main, otlp) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (otlp->started) return 0;
    return fault_set(fault, ERR_NOMEM, "otlp-endpoint", "its thread cannot be started");
}

int otlp_open(const char *endpoint, struct otlp **out, struct fault *fault) {
    struct otlp *otlp = mem_must_alloc(1, sizeof *otlp);
    pthread_condattr_t monotonic;
    *out = NULL;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&otlp->lock, NULL);
    pthread_cond_init(&otlp->work, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int rc = set_url(otlp, endpoint, fault);
    if (rc == 0) rc = libcurl_load(&otlp->curl, "otlp-endpoint", fault);
    if (rc == 0) rc = set_span_options(otlp, fault);
    if (rc == 0) rc = start_thread(otlp, fault);
    if (rc != 0)
        otlp_close(otlp);
    else
        *out = otlp;
    return rc;
}

void otlp_close(struct otlp *otlp) {
    if (!otlp) return;
    pthread_mutex_lock(&otlp->lock);
    otlp->stop = true;
    otlp->stop_ns = clock_ns() + LAST_NS;
    pthread_cond_signal(&otlp->work);
    pthread_mutex_unlock(&otlp->lock);
    if (otlp->started) pthread_join(otlp->thread, NULL);
    if (otlp->headers) otlp->curl.slist_free_all(otlp->headers);
    if (otlp->easy) otlp->curl.easy_cleanup(otlp->easy);
    pthread_mutex_destroy(&otlp->lock);
    pthread_cond_destroy(&otlp->work);
    mem_free(otlp->url);
    mem_free(otlp->shown);
    mem_free(otlp);
}

/* ---- The loop's side ---- */

void otlp_add(struct otlp *otlp, const struct buf *spans) {
    struct item *item = spans->failed ? NULL : mem_try_alloc(1, sizeof *item + spans->size);
    if (item) {
        item->size = spans->size;
        memcpy(item->text, spans->data, spans->size);
    }
    pthread_mutex_lock(&otlp->lock);
    bool fits = item && otlp->count < OTLP_REQUESTS_MAX &&
                otlp->bytes + item->size <= OTLP_BYTES_MAX && !otlp->stop;
    if (fits) {
        otlp->items[(otlp->first + otlp->count++) % OTLP_REQUESTS_MAX] = item;
        otlp->bytes += item->size;
        pthread_cond_signal(&otlp->work);
    } else {
        otlp->counts.full++;
    }
    pthread_mutex_unlock(&otlp->lock);
    if (!fits) mem_free(item);
}

struct otlp_counts otlp_counts_of(struct otlp *otlp) {
    struct otlp_counts counts = {0};
    if (!otlp) return counts;
    pthread_mutex_lock(&otlp->lock);
    counts = otlp->counts;
    pthread_mutex_unlock(&otlp->lock);
    return counts;
}
