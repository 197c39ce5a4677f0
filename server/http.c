/* libmicrohttpd's callbacks: checks a request's headers before its body is read, collects the body
 * within its limits, starts the exchange and queues the answer. Responses are queued and
 * connections suspended only here and in the stream's reader. */
#include "server/loop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/move.h"
#include "server/origin.h"
#include "server/quota.h"
#include "server/sip.h"

/* Bytes of a body, so that a refusal reaches the client */
#define DISCARD_BYTES_MAX ((size_t)16 << 20)

/* --- request headers --- */

static const char *request_header(struct exchange *ex, const char *name) {
    return MHD_lookup_connection_value(ex->connection, MHD_HEADER_KIND, name);
}

/* Sets the client's identity for fair queueing: the API key; without keys the network address or,
 * for clients on this machine, which all have the same address, the connection. */
static void set_client(struct exchange *ex) {
    const struct server *server = ex->server;
    struct {
        uint8_t key[16], network[16];
        uint64_t connection;
    } who = {0};
    memcpy(who.key, ex->client.key_id, sizeof who.key);
    bool local = !server->keys.count && !sock_peer_network(&ex->conn->peer, who.network);
    sip_hash128(server->secret, &who, sizeof who, ex->client.owner);
    if (local) who.connection = ex->conn->number;
    sip_hash128(server->secret, &who, sizeof who, ex->client.id);
}

/* Returns the request's key. NULL: it has no accepted key. */
static struct key *find_key(struct exchange *ex) {
    struct server *server = ex->server;
    const char *value = request_header(ex, "Authorization");
    const char *text = "";
    if (value && strncasecmp(value, "Bearer ", 7) == 0) {
        text = value + 7;
        text += strspn(text, " ");
    } else if (!value && request_header(ex, "x-api-key")) {
        text = request_header(ex, "x-api-key"); /* Anthropic's and llama.cpp's header */
    }
    if (!server->keys.count) text = ""; /* without keys all clients share one identity */
    sip_hash128(server->secret, text, strlen(text), ex->client.key_id);
    set_client(ex);
    return keys_find(&server->keys, text);
}

/* Returns whether it is this media type, perhaps with parameters. */
static bool is_type(const char *type, const char *name) {
    const size_t size = strlen(name);
    if (strncasecmp(type, name, size) != 0) return false;
    return strchr("; \t", type[size]) != NULL; /* the NUL counts as found, too */
}

/* Returns whether a browser sends the request for a page. Browsers add Origin to everything that a
 * page posts (Fetch Standard, 3.2), and a page cannot prevent it. The other headers are checked in
 * case a browser does not add it. */
static bool comes_from_page(struct exchange *ex) {
    static const char *const headers[] = {"Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Mode"};
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
        if (request_header(ex, headers[i])) return true;
    return false;
}

/* Refuses a body that is not said to be JSON. Pages of other sites can post forms and texts without
 * asking the server, but JSON only after a preflight request, so the type shows that none of them
 * has sent it. Ollama reads bodies without a type, and its users send them by `curl -d`, which says
 * that they are forms: those are read unless a page sends them. */
static int refuse_body_type(struct exchange *ex) {
    const char *type = request_header(ex, "Content-Type");
    const bool untyped = !type || is_type(type, "application/x-www-form-urlencoded");
    if (!ex->route->kind || (type && is_type(type, "application/json"))) return 0;
    if (ex->route->kind->untyped && untyped && !comes_from_page(ex)) return 0;
    oai_refuse(&ex->error, 415, "unsupported_media_type", NULL,
               "Unsupported media type: only 'application/json' is allowed. Send the header "
               "Content-Type: application/json (curl -H 'Content-Type: application/json').");
    return exchange_refuse(ex);
}

/* Sets the id of the request from the client's header. It is only echoed, and never a key of
 * anything; characters that a header may not have are replaced. */
static void set_request_id(struct exchange *ex) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                  "-_.:/+=";
    const char *id = request_header(ex, "X-Request-Id");
    if (id && *id && strlen(id) <= 128 && id[strspn(id, allowed)] == '\0')
        snprintf(ex->request_id, sizeof ex->request_id, "%s", id);
    else
        exchange_make_id(ex->request_id, sizeof ex->request_id, "req_");
}

/* Counts the traceparent headers: one that is sent twice is ignored, as the standard demands. */
static enum MHD_Result count_traceparent(void *cls, enum MHD_ValueKind kind, const char *name,
                                         const char *value) {
    int *count = cls;
    (void)kind, (void)value;
    *count += strcasecmp(name, "traceparent") == 0;
    return MHD_YES;
}

static void set_trace(struct exchange *ex) {
    const char *parent = request_header(ex, "traceparent");
    int count = 0;
    MHD_get_connection_values(ex->connection, MHD_HEADER_KIND, count_traceparent, &count);
    if (count != 1 || !parent || !spans_parse(parent, &ex->trace)) spans_begin(&ex->trace);
}

static size_t declared_size(struct exchange *ex) {
    const char *value = request_header(ex, "Content-Length");
    return value ? (size_t)strtoull(value, NULL, 10) : 0;
}

static void http_refuse_size(struct exchange *ex) {
    oai_refuse(&ex->error, 413, "request_too_large", NULL,
               "The body is larger than %zu bytes, the limit of --max-body-bytes.",
               ex->server->options.max_body_bytes);
    exchange_refuse(ex);
}

/* Refuses a compressed body, which would otherwise be refused as malformed JSON and mislead the
 * client (RFC 9110, 8.4). */
static int refuse_coding(struct exchange *ex) {
    const char *content = request_header(ex, "Content-Encoding");
    if (!content || !*content || strcasecmp(content, "identity") == 0) return 0;
    oai_refuse(&ex->error, 415, "unsupported_content_encoding", NULL,
               "A body must come as it is, not with Content-Encoding '%.64s'.", content);
    return exchange_refuse(ex);
}

static int refuse_host(struct exchange *ex) {
    const struct server_options *o = &ex->server->options;
    const char *host = request_header(ex, "Host");
    if (!ex->server->loopback && !o->allowed_hosts.count) return 0;
    if (origin_host_allowed(host, request_header(ex, "Origin"), o->host, o->allowed_hosts.items,
                            o->allowed_hosts.count))
        return 0;
    oai_refuse(&ex->error, 403, "forbidden_host", NULL,
               "This server answers to localhost, not to '%.64s' (--allowed-host).", host);
    return exchange_refuse(ex);
}

/* --- requests that server/framing.h rejects: one answer each, then the connection ends --- */

static bool is_rejected(const struct exchange *ex) {
    const struct framing *framing = &ex->conn->framing;
    return framing->refusal.status && framing->requests == ex->conn->begun;
}

static void refuse_framing(struct exchange *ex) {
    const struct head_refusal *refusal = &ex->conn->framing.refusal;
    ex->answer.close = true;
    if (ex->state != EXCHANGE_RECEIVING) return;
    if (refusal->status == 413) {
        http_refuse_size(ex);
        return;
    }
    oai_refuse(&ex->error, refusal->status, refusal->code, NULL, "%s", refusal->text);
    exchange_refuse(ex);
}

/* Answers a browser's preflight request, sent before a page's request to another origin and without
 * its key. An answer without headers that allow the origin is a refusal. */
static int answer_preflight(struct exchange *ex, const char *method) {
    if (strcmp(method, "OPTIONS") != 0 || !request_header(ex, "Origin") ||
        !request_header(ex, "Access-Control-Request-Method"))
        return 0;
    ex->answer.preflight = true;
    ex->answer.status = 200;
    exchange_ready(ex);
    return -1;
}

static int refuse_key(struct exchange *ex, struct key **key) {
    *key = find_key(ex);
    if (*key) {
        memcpy(ex->client.key_digest, (*key)->digest, sizeof ex->client.key_digest);
        ex->client.settings = (*key)->settings;
        ex->client.other_keys = ex->server->keys.count > 1;
    }
    if (*key || (ex->route && ex->route->open)) return 0;
    const char *value = request_header(ex, "Authorization");
    if (value && strncasecmp(value, "Bearer ", 7) != 0)
        oai_refuse(&ex->error, 401, "invalid_api_key", NULL,
                   "The Authorization header must be 'Bearer' and the API key: Authorization: "
                   "Bearer YOUR_KEY");
    else if (value || request_header(ex, "x-api-key"))
        oai_refuse(&ex->error, 401, "invalid_api_key", NULL, "Incorrect API key provided.");
    else
        oai_refuse(&ex->error, 401, "invalid_api_key", NULL,
                   "You didn't provide an API key. You need to provide your API key in an "
                   "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY).");
    return exchange_refuse(ex);
}

static void refuse_url(struct oai_error *error, const char *path, const char *method) {
    const char *near = route_near(path);
    if (near)
        oai_refuse(error, 404, "unknown_url", NULL, "Invalid URL (%.16s %.200s). Did you mean %s?",
                   method, path, near);
    else
        oai_refuse(error, 404, "unknown_url", NULL,
                   "Invalid URL (%.16s %.200s). This server has /v1/chat/completions, "
                   "/v1/responses, /v1/messages, /v1/completions, /v1/models and those of "
                   "/openapi.json.",
                   method, path);
}

static int refuse_route(struct exchange *ex, const char *path, const char *method,
                        const char *allow) {
    if (!ex->route && allow)
        oai_refuse(&ex->error, 405, "method_not_allowed", NULL,
                   "Not allowed: %.16s %.200s; use %s.", method, path, allow);
    else if (!ex->route)
        refuse_url(&ex->error, path, method);
    else
        return refuse_body_type(ex);
    ex->answer.allow = allow;
    return exchange_refuse(ex);
}

static int refuse_rate(struct exchange *ex, struct key *key) {
    struct server *server = ex->server;
    int limit = server->options.now.rate_limit;
    int64_t wait_ms = ex->route->act ? 0 : key_spend(key, limit, ex->received_ns);
    if (!wait_ms) return 0;
    oai_refuse(&ex->error, 429, "rate_limit_exceeded", NULL,
               "Rate limit reached: %d requests per minute with this key.", limit);
    ex->reject = STATS_REJECT_RATE;
    exchange_refuse(ex);
    ex->answer.retry_ms = (int)wait_ms;
    key->rejected++;
    return -1;
}

/* Takes the request's place in the ledger and among its key's requests, before any of its body is
 * kept. */
static int refuse_quota(struct exchange *ex) {
    if (!ledger_enter(&ex->server->ledger, &ex->entry, ex->client.id)) {
        exchange_refuse_memory(ex);
    } else if (!ex->route->act && !quota_enter(ex)) {
        ex->reject = STATS_REJECT_REQUESTS;
        oai_refuse(&ex->error, 429, "too_many_requests", NULL,
                   "This key may have %lld requests at once.",
                   (long long)ex->client.settings.requests_max);
    } else {
        return 0;
    }
    return exchange_refuse(ex);
}

static int refuse_timeout(struct exchange *ex) {
    const char *value = request_header(ex, "X-Request-Timeout");
    if (quota_deadline(value, ex->server->options.now.request_timeout, ex->received_ns,
                       &ex->deadline_ns))
        return 0;
    oai_refuse(&ex->error, 400, "invalid_value", "X-Request-Timeout",
               "X-Request-Timeout must be seconds above 0 and at most 86400, not '%.32s'.", value);
    return exchange_refuse(ex);
}

static void begin_upload(struct exchange *ex) {
    uint8_t space[16];
    if (models_take(ex) && exchange_space(ex, space) == 0)
        (void)move_begin(ex, declared_size(ex), space);
}

/* Refuses what can be refused before the body is read. */
static void check_headers(struct exchange *ex, const char *path, const char *method) {
    const struct server_options *o = &ex->server->options;
    const char *allow = NULL;
    struct key *key;
    ex->answer.origin =
        origin_allow(request_header(ex, "Origin"), o->cors_origins.items, o->cors_origins.count);
    ex->route = route_find(path, method, &ex->found, &allow);
    if (refuse_host(ex) || answer_preflight(ex, method) || refuse_key(ex, &key) ||
        refuse_route(ex, path, method, allow) || refuse_coding(ex) || refuse_timeout(ex) ||
        refuse_rate(ex, key) || refuse_quota(ex))
        return;
    if (!ex->route->act && !ex->route->kind)
        begin_upload(ex);
    else if (declared_size(ex) > o->max_body_bytes)
        http_refuse_size(ex);
}

/* --- responses --- */

static void add_number_header(struct MHD_Response *response, const char *name, int number) {
    char value[16];
    snprintf(value, sizeof value, "%d", number);
    MHD_add_response_header(response, name, value);
}

static void add_common_headers(struct exchange *ex, struct MHD_Response *response) {
    const char *session = request_header(ex, "X-Session-ID");
    MHD_add_response_header(response, "x-request-id", ex->request_id);
    if (session && *session && strlen(session) <= OAI_KEY_BYTES)
        MHD_add_response_header(response, "X-Session-ID", session);
    if (ex->answer.origin) {
        MHD_add_response_header(response, "Access-Control-Allow-Origin", ex->answer.origin);
        MHD_add_response_header(response, "Access-Control-Expose-Headers",
                                "x-request-id, X-Session-ID, retry-after, retry-after-ms, "
                                "x-should-retry");
        MHD_add_response_header(response, "Vary", "Origin");
    }
    load_add_header(ex, response);
    if (ex->server->draining || ex->answer.close)
        MHD_add_response_header(response, "Connection", "close");
}

/* All header names are allowed: no request is trusted because of a header that a page may set. */
static void add_preflight_headers(struct exchange *ex, struct MHD_Response *response) {
    const char *asked = request_header(ex, "Access-Control-Request-Headers");
    MHD_add_response_header(response, "Access-Control-Allow-Methods", "GET, POST, PUT, DELETE");
    MHD_add_response_header(response, "Access-Control-Max-Age", "600");
    if (asked) MHD_add_response_header(response, "Access-Control-Allow-Headers", asked);
}

static void add_page_headers(const struct answer *answer, struct MHD_Response *response) {
    MHD_add_response_header(response, "Content-Security-Policy", answer->policy);
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "Referrer-Policy", "no-referrer");
    MHD_add_response_header(response, "Cache-Control", "no-cache");
}

static void add_answer_headers(struct exchange *ex, struct MHD_Response *response) {
    const struct answer *answer = &ex->answer;
    if (answer->preflight) {
        if (answer->origin) add_preflight_headers(ex, response);
        add_common_headers(ex, response);
        return;
    }
    MHD_add_response_header(response, "Content-Type",
                            answer->content_type ? answer->content_type : "application/json");
    if (answer->allow) MHD_add_response_header(response, "Allow", answer->allow);
    if (answer->policy) add_page_headers(answer, response);
    if (answer->status == 401) MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (answer->status == 500 || answer->status == 501 || answer->status == 408)
        MHD_add_response_header(response, "x-should-retry", "false");
    if (answer->retry_ms) {
        add_number_header(response, "Retry-After", (answer->retry_ms + 999) / 1000);
        add_number_header(response, "retry-after-ms", answer->retry_ms);
    }
    add_common_headers(ex, response);
}

/* Queues the answer. The response owns the text from here on. */
static enum MHD_Result queue_answer(struct exchange *ex) {
    struct buf *body = &ex->answer.body;
    struct MHD_Response *response;
    if (body->failed) exchange_refuse_text(ex);
    exchange_queued(ex);
    if (ex->answer.preflight) {
        response = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    } else if (move_sends(ex)) {
        response = move_response(ex);
    } else {
        if (body->failed || !body->data) return MHD_NO; /* out of memory */
        response =
            MHD_create_response_from_buffer_with_free_callback(body->size, body->data, mem_free);
    }
    if (!response) return MHD_NO;
    *body = (struct buf){.limit = body->limit};
    add_answer_headers(ex, response);
    enum MHD_Result rc = MHD_queue_response(ex->connection, (unsigned)ex->answer.status, response);
    MHD_destroy_response(response);
    exchange_rendered(ex);
    return rc;
}

static enum MHD_Result queue_stream(struct exchange *ex) {
    struct MHD_Response *response = stream_begin(ex);
    if (!response) return MHD_NO;
    add_common_headers(ex, response);
    enum MHD_Result rc = MHD_queue_response(ex->connection, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    return rc;
}

/* --- the access handler --- */

static enum MHD_Result begin_exchange(struct server *server, struct conn *conn,
                                      struct MHD_Connection *connection, const char *path,
                                      const char *method, void **con_cls) {
    struct exchange *ex = exchange_open(server, conn, connection);
    if (!ex) return MHD_NO;
    *con_cls = ex;
    snprintf(ex->path, sizeof ex->path, "%s", path);
    ex->is_head = strcmp(method, "HEAD") == 0;
    set_request_id(ex);
    if (server->otlp) set_trace(ex);
    conn_set_state(conn, CONN_BODY);
    conn->begun++;
    if (is_rejected(ex))
        refuse_framing(ex);
    else
        check_headers(ex, path, method);
    if (ex->state == EXCHANGE_RECEIVING || declared_size(ex) <= DISCARD_BYTES_MAX) return MHD_YES;
    ex->answer.close = true; /* the body is too long to be discarded */
    return queue_answer(ex);
}

/* Returns an upper bound on the values of a JSON text: each one follows a comma or an opening
 * bracket, or is the first. */
static size_t count_values(const char *data, size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < size; i++) count += data[i] == ',' || data[i] == '[' || data[i] == '{';
    return count;
}

/* Returns how many bytes were used; libmicrohttpd offers the rest again. Chunks that it had read
 * before the connection was suspended are offered, too: none of their bytes are used. */
static size_t receive_body(struct exchange *ex, const char *data, size_t size) {
    struct server *server = ex->server;
    if (ex->suspended) return 0;
    bool wanted = ex->state == EXCHANGE_RECEIVING;
    if (wanted && ex->move) size = move_receive(ex, data, size);
    ex->body_seen += size;
    if (!wanted || ex->move) return size;
    if (ex->body_seen > server->options.max_body_bytes) {
        exchange_drop_body(ex);
        http_refuse_size(ex);
        return size;
    }
    buf_add(&ex->body, data, size);
    ex->values += count_values(data, size);
    if (ex->body.failed) exchange_refuse_memory(ex);
    if (ex->body.failed || !exchange_hold(ex, size)) {
        exchange_drop_body(ex);
        exchange_refuse(ex);
    }
    return size;
}

static enum MHD_Result continue_request(struct exchange *ex, int64_t now_ns) {
    if (is_rejected(ex)) refuse_framing(ex);
    if (ex->state == EXCHANGE_RECEIVING) {
        conn_set_state(ex->conn, CONN_BUSY);
        exchange_dispatch(ex);
        if (ex->stream.owner || (ex->suspended && !ex->move)) conn_watch(ex->conn);
        if (ex->state != EXCHANGE_READY) return MHD_YES;
    }
    bool has_jobs = ex->state == EXCHANGE_RUNNING || ex->state == EXCHANGE_FINISHED;
    bool in_background = has_jobs && ex->request.background;
    if (has_jobs && exchange_stream_ready(ex, now_ns)) return queue_stream(ex);
    if (in_background)
        background_answer(ex);
    else if (ex->state == EXCHANGE_FINISHED)
        exchange_answer_wait(ex);
    if (ex->suspended) return MHD_YES; /* the answer must first read the disk */
    if (ex->state == EXCHANGE_READY || in_background) {
        conn_set_state(ex->conn, CONN_BUSY);
        return ex->stream.owner ? queue_stream(ex) : queue_answer(ex);
    }
    exchange_suspend(ex); /* woken too early */
    return MHD_YES;
}

enum MHD_Result http_access(void *cls, struct MHD_Connection *connection, const char *url,
                            const char *method, const char *version, const char *upload_data,
                            size_t *upload_data_size, void **con_cls) {
    struct exchange *ex = *con_cls;
    struct conn *conn =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
    (void)version;
    if (conn->fd < 0 || conn->server->closing) return MHD_NO;
    if (!ex) return begin_exchange(cls, conn, connection, url, method, con_cls);
    if (exchange_is_gone(ex)) return MHD_NO;
    if (*upload_data_size) {
        *upload_data_size -= receive_body(ex, upload_data, *upload_data_size);
        return MHD_YES;
    }
    return continue_request(ex, clock_ns());
}

/* Returns the status for the log; 499: the client left before its answer was written. */
static int final_status(struct exchange *ex, enum MHD_RequestTerminationCode code) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(ex->connection, MHD_CONNECTION_INFO_HTTP_STATUS);
    if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK || !info) return 499;
    return (int)info->http_status;
}

/* Logs a request in one line: requests that work or change something at info, questions (health,
 * metrics) at debug. */
static void log_request(struct exchange *ex) {
    int64_t prompt = 0, answer = 0;
    for (int i = 0; i < ex->jobs_submitted; i++) {
        const struct engine_job *job = &ex->jobs[i];
        prompt += job->request.prompt_count;
        for (int k = 0; k < job->choice_count; k++)
            answer +=
                (int64_t)atomic_load_explicit(&job->choice[k].token_count, memory_order_relaxed);
    }
    const struct log_field fields[] = {
        {"request_id", ex->request_id, 0},
        {"id", ex->id, 0},
        {"path", ex->path, 0},
        {"status", NULL, ex->status},
        {"ms", NULL, (ex->ended_ns - ex->received_ns) / 1000000},
        {"prompt_tokens", NULL, prompt},
        {"completion_tokens", NULL, answer},
    };
    bool work = ex->route && (ex->route->kind || strcmp(ex->route->method, "GET") != 0);
    log_event(work ? LOG_LEVEL_INFO : LOG_LEVEL_DEBUG, "request", fields,
              sizeof fields / sizeof *fields);
}

void http_completed(void *cls, struct MHD_Connection *connection, void **con_cls,
                    enum MHD_RequestTerminationCode code) {
    struct exchange *ex = *con_cls;
    (void)cls, (void)connection;
    if (!ex) return;
    ex->ended_ns = clock_ns();
    ex->status = final_status(ex, code);
    log_request(ex);
    *con_cls = NULL;
    relay_soon(ex->conn);
    ledger_detach(&ex->server->ledger, &ex->entry);
    if (ex->conn->state != CONN_CLOSING) conn_set_state(ex->conn, CONN_IDLE);
    ex->conn->exchange = NULL;
    ex->conn = NULL;
    ex->connection = NULL;
    ex->suspended = false;
    if (code == MHD_REQUEST_TERMINATED_COMPLETED_OK && background_stays(ex, true))
        exchange_set_state(ex, EXCHANGE_BACKGROUND);
    else
        exchange_gone(ex);
    background_release(ex);
    exchange_unref(ex);
}
