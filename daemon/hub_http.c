#include "daemon/hub_http.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "base/mem.h"
#include "server/libcurl.h"

#define REDIRECTS_MAX 8
#define CONNECT_MS    15000L
#define SMALL_MS      60000L
#define STALL_SECONDS 30L /* without a byte */
#define WAIT_MAX      300 /* seconds that a hub may ask to wait */
#define URL_MAX       8192

/* The part of an address that decides where a request may go and what it carries. */
struct origin {
    char scheme[8], host[256], port[8];
    bool here; /* this machine */
};

struct hub_http {
    struct libcurl curl;
    CURL *easy;
    char *endpoint, *token;
    struct origin hub;
};

/* A request that is under way. */
struct get {
    struct hub_http *http;
    struct hub_answer *answer;
    hub_sink sink;
    void *arg;
    bool stopped;
};

/* ---- Addresses ---- */

static bool hub_is_loopback(const char *host) {
    const size_t size = strlen(host);
    return strcmp(host, "localhost") == 0 || strcmp(host, "[::1]") == 0 ||
           (strncmp(host, "127.", 4) == 0 && strspn(host, "0123456789.") == size);
}

static bool copy_url_part(const struct libcurl *curl, CURLU *url, CURLUPart part, char *out,
                          size_t size) {
    char *text = NULL;
    const bool there = curl->url_get(url, part, &text, CURLU_DEFAULT_PORT) == CURLUE_OK;
    const bool fits = there && strlen(text) < size;
    if (fits) strcpy(out, text);
    if (there) curl->free(text);
    return fits;
}

static bool has_url_part(const struct libcurl *curl, CURLU *url, CURLUPart part) {
    char *text = NULL;
    const bool there = curl->url_get(url, part, &text, 0) == CURLUE_OK;
    if (there) curl->free(text);
    return there;
}

/* Reads scheme, host and port of an address; false: it has none, or a user or a password. */
static bool origin_of(const struct libcurl *curl, const char *address, struct origin *out) {
    CURLU *url = curl->url();
    *out = (struct origin){0};
    const bool good = url && curl->url_set(url, CURLUPART_URL, address, 0) == CURLUE_OK &&
                      copy_url_part(curl, url, CURLUPART_SCHEME, out->scheme, sizeof out->scheme) &&
                      copy_url_part(curl, url, CURLUPART_HOST, out->host, sizeof out->host) &&
                      copy_url_part(curl, url, CURLUPART_PORT, out->port, sizeof out->port) &&
                      !has_url_part(curl, url, CURLUPART_USER) &&
                      !has_url_part(curl, url, CURLUPART_PASSWORD);
    if (url) curl->url_cleanup(url);
    out->here = hub_is_loopback(out->host);
    return good;
}

static bool same_origin(const struct origin *a, const struct origin *b) {
    return strcmp(a->scheme, b->scheme) == 0 && strcasecmp(a->host, b->host) == 0 &&
           strcmp(a->port, b->port) == 0;
}

/* Plain http is for this machine, and only where the hub itself is one of this machine. */
static bool may_ask(const struct hub_http *http, const struct origin *to) {
    if (strcmp(to->scheme, "https") == 0) return true;
    return strcmp(to->scheme, "http") == 0 && to->here && http->hub.here;
}

/* ---- Answers ---- */

/* Copies the value of a header line if it has this name; line ends and blanks around it go. */
static bool copy_header(const char *line, size_t size, const char *name, char *out, size_t room) {
    const size_t n = strlen(name);
    if (size <= n || line[n] != ':' || strncasecmp(line, name, n) != 0) return false;
    const char *from = line + n + 1, *end = line + size;
    while (from < end && (*from == ' ' || *from == '\t')) from++;
    while (end > from && (unsigned char)end[-1] <= ' ') end--;
    snprintf(out, room, "%.*s", (int)(end - from), from);
    for (char *at = out; *at; at++)
        if ((unsigned char)*at < ' ') *at = '?';
    return true;
}

/* Link: <address>; rel="next" */
static void copy_next_page(const char *value, char out[1024]) {
    const char *end = value[0] == '<' ? strchr(value, '>') : NULL;
    if (end && strstr(end, "rel=\"next\"") && end - value - 1 < 1024)
        snprintf(out, 1024, "%.*s", (int)(end - value - 1), value + 1);
}

static void read_wait(struct hub_answer *answer, const char *seconds) {
    const int wait_s = atoi(seconds);
    if (wait_s > 0) answer->wait_s = wait_s < WAIT_MAX ? wait_s : WAIT_MAX;
}

/* The first line of each answer begins a new one, so that a redirect's headers do not count. */
static size_t on_hub_header(char *data, size_t size, size_t count, void *arg) {
    struct hub_answer *answer = ((struct get *)arg)->answer;
    const size_t all = size * count;
    char value[1200];
    if (all > 5 && memcmp(data, "HTTP/", 5) == 0) *answer = (struct hub_answer){0};
    (void)copy_header(data, all, "X-Error-Code", answer->code, sizeof answer->code);
    (void)copy_header(data, all, "X-Error-Message", answer->message, sizeof answer->message);
    if (copy_header(data, all, "Link", value, sizeof value)) copy_next_page(value, answer->next);
    if (copy_header(data, all, "Retry-After", value, sizeof value)) read_wait(answer, value);
    /* RateLimit: "api";r=0;t=55 */
    if (copy_header(data, all, "RateLimit", value, sizeof value) && strstr(value, ";r=0;t="))
        read_wait(answer, strstr(value, ";r=0;t=") + 7);
    if (copy_header(data, all, "Content-Range", value, sizeof value) &&
        strncasecmp(value, "bytes ", 6) == 0)
        answer->from = strtoll(value + 6, NULL, 10);
    return all;
}

static size_t on_hub_body(char *data, size_t size, size_t count, void *arg) {
    struct get *get = arg;
    const size_t all = size * count;
    get->http->curl.easy_getinfo(get->http->easy, CURLINFO_RESPONSE_CODE, &get->answer->status);
    if (get->answer->status != 200 && get->answer->status != 206) return all;
    if (get->answer->status == 200) get->answer->from = 0;
    get->stopped = !get->sink(get->arg, get->answer, data, all);
    return get->stopped ? 0 : all;
}

/* ---- One request ---- */

static struct curl_slist *hub_headers(const struct hub_http *http, const struct origin *to) {
    const struct libcurl *curl = &http->curl;
    struct curl_slist *list = curl->slist_append(NULL, "Accept: */*");
    char line[700];
    if (http->token[0] && same_origin(to, &http->hub)) {
        snprintf(line, sizeof line, "Authorization: Bearer %s", http->token);
        list = curl->slist_append(list, line);
    }
    return list;
}

/* Asks one address, without following where it points. The range goes to every host on the way. */
static CURLcode request_once(struct get *get, const char *url, const struct origin *to,
                             int64_t from, bool large, char why[CURL_ERROR_SIZE]) {
    const struct libcurl *curl = &get->http->curl;
    CURL *easy = get->http->easy;
    struct curl_slist *headers = hub_headers(get->http, to);
    char range[32];
    why[0] = '\0';
    curl->easy_reset(easy);
    curl->easy_setopt(easy, CURLOPT_URL, url);
    curl->easy_setopt(easy, CURLOPT_PROTOCOLS_STR, get->http->hub.here ? "http,https" : "https");
    curl->easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl->easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    curl->easy_setopt(easy, CURLOPT_USERAGENT, "keepd/" KEEPD_VERSION);
    curl->easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_hub_header);
    curl->easy_setopt(easy, CURLOPT_HEADERDATA, get);
    curl->easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_hub_body);
    curl->easy_setopt(easy, CURLOPT_WRITEDATA, get);
    curl->easy_setopt(easy, CURLOPT_ERRORBUFFER, why);
    curl->easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_MS);
    curl->easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl->easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, STALL_SECONDS);
    if (!large) curl->easy_setopt(easy, CURLOPT_TIMEOUT_MS, SMALL_MS);
    if (from > 0) {
        snprintf(range, sizeof range, "%lld-", (long long)from);
        curl->easy_setopt(easy, CURLOPT_RANGE, range);
    }
    CURLcode code = curl->easy_perform(easy);
    curl->easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &get->answer->status);
    curl->slist_free_all(headers);
    return code;
}

static bool is_redirect_status(long status) {
    return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

/* Refuses an address that names a user or is not https, and shows nothing that may be a password.
 */
static int refuse_address(const char *url, struct fault *fault) {
    const char *host = strstr(url, "://") ? strstr(url, "://") + 3 : url;
    if (memchr(host, '@', strcspn(host, "/?#")))
        return fault_set(fault, ERR_INVALID, "model",
                         "the hub points to an address with a user or a password: nothing is "
                         "fetched from there");
    return fault_set(fault, ERR_INVALID, "model",
                     "the hub points to %.*s, which is not https: nothing is fetched from there",
                     (int)strcspn(url, "?#") > 200 ? 200 : (int)strcspn(url, "?#"), url);
}

static int hub_fault(const struct hub_http *http, struct hub_answer *answer, CURLcode code,
                     const char *why, struct fault *fault) {
    const char *host = http->hub.host;
    if (code != CURLE_OK) {
        answer->unreachable = code == CURLE_COULDNT_RESOLVE_HOST || code == CURLE_COULDNT_CONNECT ||
                              code == CURLE_COULDNT_RESOLVE_PROXY;
        answer->again = code != CURLE_PEER_FAILED_VERIFICATION &&
                        code != CURLE_SSL_CACERT_BADFILE && code != CURLE_UNSUPPORTED_PROTOCOL &&
                        code != CURLE_URL_MALFORMAT;
        return fault_set(fault, ERR_IO, "model", "%s: %.200s", host,
                         why[0] ? why : http->curl.easy_strerror(code));
    }
    answer->again = answer->status == 408 || answer->status == 429 || answer->status >= 500;
    return fault_set(fault, answer->again ? ERR_IO : ERR_NOTFOUND, "model",
                     "%s answers with status %ld%s%.150s", host, answer->status,
                     answer->message[0] ? ": " : "", answer->message);
}

int hub_http_get(struct hub_http *http, const char *path, int64_t from, bool large, hub_sink sink,
                 void *arg, struct hub_answer *answer, struct fault *fault) {
    struct get get = {.http = http, .answer = answer, .sink = sink, .arg = arg};
    char url[URL_MAX], why[CURL_ERROR_SIZE];
    const char *next;
    *answer = (struct hub_answer){0};
    int n = snprintf(url, sizeof url, "%s%s", path[0] == '/' ? http->endpoint : "", path);
    for (int hop = 0; n > 0 && (size_t)n < sizeof url && hop <= REDIRECTS_MAX; hop++) {
        struct origin to;
        if (!origin_of(&http->curl, url, &to) || !may_ask(http, &to))
            return refuse_address(url, fault);
        CURLcode code = request_once(&get, url, &to, from, large, why);
        if (get.stopped) return ERR_STOPPED;
        if (code != CURLE_OK) return hub_fault(http, answer, code, why, fault);
        if (answer->status == 200 || answer->status == 206) return 0;
        next = NULL;
        http->curl.easy_getinfo(http->easy, CURLINFO_REDIRECT_URL, &next);
        if (!is_redirect_status(answer->status) || !next)
            return hub_fault(http, answer, CURLE_OK, "", fault);
        n = snprintf(url, sizeof url, "%s", next);
    }
    return fault_set(fault, ERR_IO, "model", "%s: too many redirects, or an address too long",
                     http->hub.host);
}

/* ---- Life ---- */

static int set_hub_endpoint(struct hub_http *http, const char *endpoint, struct fault *fault) {
    size_t size = strlen(endpoint);
    while (size > 0 && endpoint[size - 1] == '/') size--;
    if (size > 1024 || !origin_of(&http->curl, endpoint, &http->hub))
        return fault_set(fault, ERR_INVALID, "HF_ENDPOINT", "expected https://HOST");
    if (strcmp(http->hub.scheme, "https") != 0 && !may_ask(http, &http->hub))
        return fault_set(
            fault, ERR_INVALID, "HF_ENDPOINT",
            "%.200s: http is accepted for this machine alone; name an https:// address", endpoint);
    http->endpoint = mem_must_alloc(size + 1, 1);
    memcpy(http->endpoint, endpoint, size);
    return 0;
}

int hub_http_open(const char *endpoint, const char *token, struct hub_http **out,
                  struct fault *fault) {
    struct hub_http *http = mem_must_alloc(1, sizeof *http);
    *out = NULL;
    http->token = mem_must_strdup(token);
    int rc = libcurl_load(&http->curl, "model", fault);
    if (!rc) rc = set_hub_endpoint(http, endpoint, fault);
    if (!rc && !(http->easy = http->curl.easy_init()))
        rc = fault_set(fault, ERR_NOMEM, "model", "no memory");
    if (rc)
        hub_http_close(http);
    else
        *out = http;
    return rc;
}

void hub_http_close(struct hub_http *http) {
    if (!http) return;
    if (http->easy) http->curl.easy_cleanup(http->easy);
    mem_free(http->endpoint);
    mem_free(http->token);
    mem_free(http);
}
