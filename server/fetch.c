#include "server/fetch.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "server/libcurl.h"

struct fetch {
    struct libcurl curl;
    const struct server_list *hosts;
};

/* An address being read, with its redirects. */
struct fetching {
    const struct fetch *fetch;
    CURL *easy;
    struct buf body;
    int64_t until;  /* clock_ns */
    bool forbidden; /* the host has an address that is not public */
    const atomic_bool *left;
    struct fault *fault;
};

int fetch_open(const struct server_list *hosts, struct fetch **out, struct fault *fault) {
    *out = NULL;
    for (size_t i = 0; i < hosts->count; i++)
        if (!fetch_is_entry(hosts->items[i]))
            return fault_set(fault, ERR_INVALID, "allow-image-urls",
                             "expected HOST, *.HOST or either with :PORT, found '%.64s'",
                             hosts->items[i]);
    struct fetch *fetch = mem_must_alloc(1, sizeof *fetch);
    fetch->hosts = hosts;
    int rc = libcurl_load(&fetch->curl, "allow-image-urls", fault);
    if (rc)
        mem_free(fetch);
    else
        *out = fetch;
    return rc;
}

void fetch_close(struct fetch *fetch) {
    mem_free(fetch);
}

/* --- one address --- */

static size_t on_picture_bytes(char *data, size_t each, size_t count, void *arg) {
    struct fetching *f = arg;
    buf_add(&f->body, data, each * count);
    return f->body.failed ? 0 : each * count;
}

/* Not 0: the transfer ends. */
static int on_picture_progress(void *arg, curl_off_t total, curl_off_t now, curl_off_t sent_total,
                               curl_off_t sent) {
    const struct fetching *f = arg;
    (void)total, (void)now, (void)sent_total, (void)sent;
    return atomic_load_explicit(f->left, memory_order_relaxed);
}

static curl_socket_t open_public_socket(void *arg, curlsocktype purpose,
                                        struct curl_sockaddr *address) {
    struct fetching *f = arg;
    if (purpose != CURLSOCKTYPE_IPCXN || (!fetch_is_public(&address->addr) &&
                                          !fetch_lists_address(f->fetch->hosts, &address->addr))) {
        f->forbidden = true;
        return CURL_SOCKET_BAD;
    }
    return socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

static char *url_part(const struct fetching *f, CURLU *url, CURLUPart part) {
    char *text = NULL;
    f->fetch->curl.url_get(url, part, &text, part == CURLUPART_PORT ? CURLU_DEFAULT_PORT : 0);
    return text;
}

/* Checks that an address leads to a host in the list, before its name is looked up. */
static int check_picture_url(const struct fetching *f, const char *text) {
    const struct libcurl *curl = &f->fetch->curl;
    CURLU *url = curl->url();
    if (!url) return fault_set(f->fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    const bool read = curl->url_set(url, CURLUPART_URL, text, 0) == CURLUE_OK;
    char *scheme = url_part(f, url, CURLUPART_SCHEME), *host = url_part(f, url, CURLUPART_HOST);
    char *port = url_part(f, url, CURLUPART_PORT), *user = url_part(f, url, CURLUPART_USER);
    const bool secure = scheme && strcmp(scheme, "https") == 0;
    const int number = port ? atoi(port) : 0;
    int rc = 0;
    if (!read || !host || !port || (!secure && strcmp(scheme, "http") != 0))
        rc = fault_set(f->fault, ERR_INVALID, NULL, "this is no http or https address");
    else if (user)
        rc = fault_set(f->fault, ERR_INVALID, NULL, "no address with a user's name is fetched");
    else if (!fetch_lists(f->fetch->hosts, host, number, number == (secure ? 443 : 80)))
        rc = fault_set(f->fault, ERR_INVALID, NULL,
                       "no pictures are fetched from %.100s:%d: --allow-image-urls names the hosts",
                       host, number);
    curl->free(scheme);
    curl->free(host);
    curl->free(port);
    curl->free(user);
    curl->url_cleanup(url);
    return rc;
}

/* Nothing of the environment is used, no proxy and no file with passwords. */
static void set_picture_options(struct fetching *f, const char *url, long ms) {
    const struct libcurl *curl = &f->fetch->curl;
    CURL *easy = f->easy;
    curl->easy_reset(easy);
    curl->easy_setopt(easy, CURLOPT_URL, url);
    curl->easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl->easy_setopt(easy, CURLOPT_PROXY, "");
    curl->easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl->easy_setopt(easy, CURLOPT_FRESH_CONNECT, 1L); /* each connection's address is checked */
    curl->easy_setopt(easy, CURLOPT_FORBID_REUSE, 1L);
    curl->easy_setopt(easy, CURLOPT_TIMEOUT_MS, ms);
    curl->easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)FETCH_CONNECT_MS);
    curl->easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
    curl->easy_setopt(easy, CURLOPT_USERAGENT, "keepd/" KEEPD_VERSION);
    curl->easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_picture_bytes);
    curl->easy_setopt(easy, CURLOPT_WRITEDATA, f);
    curl->easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
    curl->easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, on_picture_progress);
    curl->easy_setopt(easy, CURLOPT_XFERINFODATA, f);
    curl->easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, open_public_socket);
    curl->easy_setopt(easy, CURLOPT_OPENSOCKETDATA, f);
}

static int explain_transfer(const struct fetching *f, CURLcode code, long status) {
    struct fault *fault = f->fault;
    if (f->forbidden && code != CURLE_OK)
        return fault_set(fault, ERR_INVALID, NULL, "the picture's host has no public address");
    if (f->body.failed && f->body.full)
        return fault_set(fault, ERR_LIMIT, NULL, "the picture's file has more than %zu bytes",
                         f->body.limit);
    if (f->body.failed)
        return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    if (code == CURLE_OPERATION_TIMEDOUT)
        return fault_set(fault, ERR_LIMIT, NULL, "fetching the picture takes too long");
    if (code != CURLE_OK)
        return fault_set(fault, ERR_INVALID, NULL, "the picture was not fetched: %s",
                         f->fetch->curl.easy_strerror(code));
    if (status != 200)
        return fault_set(fault, ERR_INVALID, NULL,
                         "the picture was not fetched: its host answered with status %ld", status);
    return 0;
}

/* Reads one address. *next: where it leads, in memory of the handle; NULL: the body is there. */
static int read_one_address(struct fetching *f, const char *url, const char **next) {
    const struct libcurl *curl = &f->fetch->curl;
    const int64_t left = (f->until - clock_ns()) / 1000000;
    long status = 0;
    char *target = NULL;
    int rc = check_picture_url(f, url);
    if (rc) return rc;
    if (left <= 0) return explain_transfer(f, CURLE_OPERATION_TIMEDOUT, 0);
    buf_clear(&f->body);
    set_picture_options(f, url, (long)left);
    CURLcode code = curl->easy_perform(f->easy);
    if (code == CURLE_OK) curl->easy_getinfo(f->easy, CURLINFO_RESPONSE_CODE, &status);
    if (code == CURLE_OK) curl->easy_getinfo(f->easy, CURLINFO_REDIRECT_URL, &target);
    *next = target;
    return target ? 0 : explain_transfer(f, code, status);
}

static int follow_address(struct fetching *f, const char *url) {
    const char *next = NULL;
    char *here = NULL;
    int rc = read_one_address(f, url, &next);
    for (int i = 0; !rc && next; i++) {
        mem_free(here);
        here = i < FETCH_REDIRECTS ? mem_must_strdup(next) : NULL;
        rc = here ? read_one_address(f, here, &next)
                  : fault_set(f->fault, ERR_LIMIT, NULL,
                              "the picture's address leads on more than %d times", FETCH_REDIRECTS);
    }
    mem_free(here);
    return rc;
}

int fetch_read(const struct fetch *fetch, const char *url, const struct fetch_limits *limits,
               uint8_t **bytes, size_t *size, struct fault *fault) {
    const int64_t most = clock_ns() + (int64_t)FETCH_MS * 1000000;
    struct fetching f = {.fetch = fetch,
                         .until = limits->deadline < most ? limits->deadline : most,
                         .left = limits->left,
                         .fault = fault};
    *bytes = NULL;
    *size = 0;
    f.easy = fetch->curl.easy_init();
    if (!f.easy) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    buf_open(&f.body, limits->bytes);
    int rc = follow_address(&f, url);
    fetch->curl.easy_cleanup(f.easy);
    if (rc) {
        buf_close(&f.body);
        return rc;
    }
    *bytes = (uint8_t *)f.body.data;
    *size = f.body.size;
    return 0;
}
