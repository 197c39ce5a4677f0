/* The routing table, and the handlers of routes that need no work by the engine. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "picture/picture.h"
#include "server/loop.h"
#include "server/oai/openapi.h"
#include "server/oai/stored.h"

#define ROWS_MAX 1024

/* Returns what follows the route's own path; NULL: it is another path. */
static const char *path_behind(const struct route *route, const char *path) {
    static const char version[] = "/v1";
    const char *own = route->path;
    size_t size = strlen(own);
    if (strncmp(path, own, size) == 0) return path + size;
    if (strncmp(own, version, sizeof version - 1) != 0) return NULL;
    own += sizeof version - 1; /* for clients whose base URL lacks /v1 */
    size -= sizeof version - 1;
    return strncmp(path, own, size) == 0 ? path + size : NULL;
}

/* Says what is wrong with an engine; NULL: nothing. */
static const char *engine_trouble(const struct server *server, struct engine *engine) {
    struct engine_status status;
    engine_status(engine, &status);
    bool busy = status.running > 0 || status.waiting > 0;
    int64_t silence_ms = (clock_ns() - status.progress_ns) / 1000000;
    if (status.stopped) return "The engine has stopped.";
    if (busy && silence_ms > server->options.timeouts.health)
        return "The engine has work but makes no progress.";
    return NULL;
}

static void get_health(struct exchange *ex) {
    const struct server *server = ex->server;
    const char *trouble = server->draining ? "The server is shutting down." : NULL;
    for (int i = 0; i < server->models.count && !trouble; i++)
        if (server->models.items[i].engine)
            trouble = engine_trouble(server, server->models.items[i].engine);
    if (trouble) {
        oai_refuse(&ex->error, 503, "unhealthy", NULL, "%s", trouble);
        exchange_fail(ex);
        return;
    }
    buf_str(&ex->answer.body, "{\"status\":\"ok\"}");
}

static void refuse_memory(struct exchange *ex) {
    exchange_refuse_memory(ex);
    exchange_refuse(ex);
}

/* Reads a status of each replica. NULL: no memory, and the request is answered. */
static struct engine_status *read_statuses(struct exchange *ex) {
    int count = ex->model->rules.info->replicas;
    struct engine_status *statuses = mem_try_alloc((size_t)count, sizeof *statuses);
    if (!statuses) refuse_memory(ex);
    for (int i = 0; statuses && i < count; i++)
        engine_replica_status(ex->model->engine, i, &statuses[i]);
    return statuses;
}

static int64_t resident_bytes(void) {
    long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (!file) return 0;
    if (fscanf(file, "%*d %lld", &pages) != 1) pages = 0;
    fclose(file);
    return (int64_t)pages * sysconf(_SC_PAGESIZE);
}

/* Returns a model's part of the metrics, with its statuses [replica_count] and its adapters
 * [ENGINE_ADAPTERS_MAX]. */
static struct stats_model metrics_of(struct served_model *model, struct engine_status *statuses,
                                     struct engine_adapter_row *adapters) {
    const int adapter_count = model->state == SERVED_LOADED
                                  ? engine_adapters(model->engine, adapters, ENGINE_ADAPTERS_MAX)
                                  : 0;
    for (int i = 0; i < model->stats.replica_count; i++) served_status(model, i, &statuses[i]);
    return (struct stats_model){.name = model->rules.names[0],
                                .stats = &model->stats,
                                .info = model->rules.info,
                                .statuses = statuses,
                                .waiting = model->waiting_count,
                                .memory_bytes = model->memory_bytes,
                                .loads = model->loads,
                                .unloads = model->unloads,
                                .failures = model->failures,
                                .adapters = adapters,
                                .adapter_count = adapter_count};
}

static void get_metrics(struct exchange *ex) {
    struct server *server = ex->server;
    struct served_model *served = server->models.items;
    const int count = server->models.count;
    int replicas = 0;
    for (int i = 0; i < count; i++) replicas += served[i].stats.replica_count;
    struct stats_model *models = mem_try_alloc((size_t)count, sizeof *models);
    struct engine_status *statuses = mem_try_alloc((size_t)replicas, sizeof *statuses);
    struct stats_input input = {.models = models,
                                .model_count = count,
                                .rejected = server->rejected,
                                .keys = &server->keys,
                                .spans = otlp_counts_of(server->otlp),
                                .queue_tokens = server->ledger.stock[LEDGER_TOKENS].held,
                                .connections = server->conn_count,
                                .connections_total = server->conn_total,
                                .picture_bytes = picture_bytes_held(),
                                .start_seconds = server->start_seconds,
                                .resident_bytes = resident_bytes()};
    if (models && statuses) {
        replicas = 0;
        for (int i = 0; i < count; replicas += served[i++].stats.replica_count)
            models[i] = metrics_of(&served[i], statuses + replicas,
                                   server->models.adapters + (size_t)i * ENGINE_ADAPTERS_MAX);
        stats_render(&ex->answer.body, &input);
        ex->answer.content_type = "text/plain; version=0.0.4; charset=utf-8";
    } else {
        refuse_memory(ex);
    }
    mem_free(models);
    mem_free(statuses);
}

static void get_version(struct exchange *ex) {
    buf_str(&ex->answer.body, "{\"version\":\"" KEEPD_VERSION "\"}");
}

static void get_models(struct exchange *ex) {
    models_render(&ex->answer.body, ex->server, oai_render_models);
}

static void get_model(struct exchange *ex) {
    const char *id = path_behind(ex->route, ex->path);
    if (models_render_one(&ex->answer.body, ex->server, id)) return;
    oai_refuse(&ex->error, 404, "model_not_found", "model",
               "The model `%.128s` does not exist or you do not have access to it.", id);
    exchange_refuse(ex);
}

static void get_ollama_tags(struct exchange *ex) {
    models_render(&ex->answer.body, ex->server, oai_render_tags);
}

static void get_ollama_loaded(struct exchange *ex) {
    models_render(&ex->answer.body, ex->server, oai_render_loaded);
}

static void get_kv(struct exchange *ex) {
    if (!models_take(ex)) return;
    struct engine *engine = ex->model->engine;
    struct engine_sequence_row *rows = mem_try_alloc(ROWS_MAX, sizeof *rows);
    struct engine_conversation_row *conversations = mem_try_alloc(ROWS_MAX, sizeof *conversations);
    struct engine_status status;
    if (rows && conversations) {
        engine_status(engine, &status);
        int row_count = engine_sequences(engine, rows, ROWS_MAX);
        int conversation_count = engine_conversations(
            engine, &(struct engine_conversation_filter){0}, conversations, ROWS_MAX);
        oai_render_kv(&ex->answer.body, ex->model->rules.info, &status, rows, row_count,
                      conversations, conversation_count);
    } else {
        refuse_memory(ex);
    }
    mem_free(rows);
    mem_free(conversations);
}

static void get_server_info(struct exchange *ex) {
    if (models_take(ex)) oai_render_server_info(&ex->answer.body, &ex->model->rules);
}

static void get_tokenizer_info(struct exchange *ex) {
    if (models_take(ex)) oai_render_tokenizer_info(&ex->answer.body, ex->model->engine);
}

static void get_loads(struct exchange *ex) {
    if (!models_take(ex)) return;
    struct engine_status *statuses = read_statuses(ex);
    if (!statuses) return;
    struct oai_load load = {ex->model->rules.info, statuses, clock_unix_seconds()};
    oai_render_loads(&ex->answer.body, &load);
    mem_free(statuses);
}

/* Answers with what was kept of a model that sleeps (`kept`: of the one that is asked for). false:
 * nothing was, or it does not sleep. */
static bool answer_asleep(struct exchange *ex, const struct buf *kept) {
    const enum served_state state = ex->model->state;
    const bool asleep =
        (state == SERVED_UNLOADED || state == SERVED_UNLOADING) && kept->size && !kept->failed;
    if (asleep) buf_add(&ex->answer.body, kept->data, kept->size);
    return asleep;
}

static void get_props(struct exchange *ex) {
    const struct served_model *model = models_ask(ex);
    if (!model || answer_asleep(ex, &model->props)) return;
    if (models_take(ex)) oai_render_props(&ex->answer.body, &model->rules, false);
}

static void get_slots(struct exchange *ex) {
    const struct served_model *model = models_ask(ex);
    if (!model || answer_asleep(ex, &model->slots) || !models_take(ex)) return;
    struct engine_sequence_row *rows = mem_try_alloc(ROWS_MAX, sizeof *rows);
    if (rows) {
        int count = engine_sequences(ex->model->engine, rows, ROWS_MAX);
        oai_render_slots(&ex->answer.body, ex->model->rules.info, rows, count);
    } else {
        refuse_memory(ex);
    }
    mem_free(rows);
}

/* Answers vLLM's /load: the number of requests that run or wait. */
static void get_load(struct exchange *ex) {
    const struct models *models = &ex->server->models;
    struct engine_status status;
    int jobs = 0;
    for (int i = 0; i < models->count; i++) {
        jobs += models->items[i].waiting_count;
        if (!models->items[i].engine) continue;
        engine_status(models->items[i].engine, &status);
        jobs += status.jobs;
    }
    buf_fmt(&ex->answer.body, "{\"server_load\":%d}", jobs);
}

static void get_is_sleeping(struct exchange *ex) {
    const struct models *models = &ex->server->models;
    bool sleeps = true;
    for (int i = 0; i < models->count; i++) sleeps = sleeps && !models->items[i].engine;
    buf_fmt(&ex->answer.body, "{\"is_sleeping\":%s}", sleeps ? "true" : "false");
}

static void get_page(struct exchange *ex) {
    if (ex->server->options.no_ui) {
        oai_refuse(&ex->error, 404, "unknown_url", NULL, "The page is turned off (--no-ui).");
        exchange_refuse(ex);
        return;
    }
    buf_add(&ex->answer.body, page_text, page_size);
    ex->answer.content_type = "text/html; charset=utf-8";
    ex->answer.policy = ex->server->page_policy;
}

static void get_openapi(struct exchange *ex) {
    buf_add(&ex->answer.body, openapi_text, openapi_size);
}

/* --- conversations --- */

/* Finds the salt that the client names (?cache_salt=), in the form that a body's strings have. */
static int find_salt(struct exchange *ex, struct buf *text) {
    static const char name[] = "cache_salt";
    const char *salt = NULL;
    size_t size = 0;
    MHD_lookup_connection_value_n(ex->connection, MHD_GET_ARGUMENT_KIND, name, sizeof name - 1,
                                  &salt, &size);
    if (size > OAI_KEY_BYTES) {
        oai_refuse(&ex->error, 400, "invalid_value", name,
                   "Invalid value for '%s': expected at most %d bytes, found %zu.", name,
                   OAI_KEY_BYTES, size);
        return exchange_refuse(ex);
    }
    for (size_t i = 0; salt && i < size; i++)
        buf_add(text, salt[i] ? &salt[i] : JSON_NUL, salt[i] ? 1 : sizeof JSON_NUL - 1);
    if (text->failed) refuse_memory(ex);
    return text->failed ? -1 : 0;
}

/* Computes the space of the client's key and salt: a client sees and deletes only conversations in
 * it. */
int exchange_space(struct exchange *ex, uint8_t space[16]) {
    struct buf salt;
    buf_open(&salt, 2 * OAI_KEY_BYTES + 1);
    int rc = find_salt(ex, &salt);
    if (!rc && prepare_space(ex, salt.data ? salt.data : "", space)) {
        refuse_memory(ex);
        rc = -1;
    }
    buf_close(&salt);
    return rc;
}

static void get_conversations(struct exchange *ex) {
    uint8_t space[16];
    if (!models_take(ex) || exchange_space(ex, space)) return;
    struct engine_conversation_row *rows = mem_try_alloc(ROWS_MAX, sizeof *rows);
    if (rows) {
        const struct engine_conversation_filter own = {.space = space};
        int count = engine_conversations(ex->model->engine, &own, rows, ROWS_MAX);
        oai_render_conversations(&ex->answer.body, rows, count);
    } else {
        refuse_memory(ex);
    }
    mem_free(rows);
}

static bool owns_conversation(struct exchange *ex, const uint8_t space[16], uint64_t id) {
    const struct engine_conversation_filter own = {.space = space, .id = id};
    struct engine_conversation_row row;
    return engine_conversations(ex->model->engine, &own, &row, 1) > 0;
}

static void refuse_conversation(struct exchange *ex, const char *name) {
    oai_refuse(&ex->error, 404, "conversation_not_found", "id", "There is no conversation '%.64s'.",
               name);
    exchange_refuse(ex);
}

static void delete_conversation(struct exchange *ex) {
    const char *name = path_behind(ex->route, ex->path);
    uint8_t space[16];
    uint64_t id;
    if (!models_take(ex) || exchange_space(ex, space)) return;
    if (oai_conversation_id(name, &id) && owns_conversation(ex, space, id))
        exchange_order(ex, ENGINE_ORDER_DELETE, id);
    else
        refuse_conversation(ex, name);
}

static void get_state(struct exchange *ex) {
    char name[ID_BYTES];
    const char *rest = path_behind(ex->route, ex->path);
    uint8_t space[16];
    uint64_t id;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(rest, "/"), rest);
    if (!models_take(ex) || exchange_space(ex, space)) return;
    if (oai_conversation_id(name, &id) && owns_conversation(ex, space, id))
        exchange_order(ex, ENGINE_ORDER_WRITE, id);
    else
        refuse_conversation(ex, name);
}

/* --- stored responses --- */

static void refuse_response(struct exchange *ex, int rc, const char *id) {
    if (rc != ERR_NOTFOUND) {
        refuse_memory(ex);
        return;
    }
    oai_refuse(&ex->error, 404, "response_not_found", "response_id",
               "Response with id '%.64s' not found.", id);
    exchange_refuse(ex);
}

/* Returns an argument's value, "" for a name without one; NULL: there is no such argument. */
static const char *find_argument(struct exchange *ex, const char *name) {
    const char *value = NULL;
    bool found = MHD_lookup_connection_value_n(ex->connection, MHD_GET_ARGUMENT_KIND, name,
                                               strlen(name), &value, NULL) == MHD_YES;
    return found && !value ? "" : value;
}

/* Reads ?stream= and ?starting_after=. `from`: the number of the first event; -1: no stream. */
static int find_stream(struct exchange *ex, int64_t *from) {
    const char *wish = find_argument(ex, "stream"), *after = find_argument(ex, "starting_after");
    const bool stream = wish && strcasecmp(wish, "true") == 0;
    const bool number =
        after && *after && strlen(after) <= 18 && strspn(after, "0123456789") == strlen(after);
    *from = !stream ? -1 : number ? strtoll(after, NULL, 10) + 1 : 0;
    if (wish && !stream && strcasecmp(wish, "false") != 0)
        oai_refuse(&ex->error, 400, "invalid_value", "stream",
                   "Invalid value for 'stream': expected true or false.");
    else if (after && !stream)
        oai_refuse(&ex->error, 400, "invalid_value", "starting_after",
                   "Invalid value for 'starting_after': only allowed with stream=true.");
    else if (after && !number)
        oai_refuse(&ex->error, 400, "invalid_value", "starting_after",
                   "Invalid value for 'starting_after': expected the sequence_number of an event, "
                   "an integer of at least 0.");
    else
        return 0;
    return exchange_refuse(ex);
}

/* Says why a response has no events; the first two reasons are in OpenAI's words. */
static void refuse_stream(struct exchange *ex, bool background, bool streamed) {
    oai_refuse(&ex->error, 400, "invalid_request_error", "stream",
               !background ? "This response cannot be streamed because it was not created with "
                             "background=true."
               : !streamed ? "This response cannot be streamed because it was not created with "
                             "stream=true."
                           : "The events of this response were too long to be kept after its end. "
                             "Ask for it without 'stream'.");
    exchange_refuse(ex);
}

/* Streams a response from an event on: what is left of it if it has ended, else as it comes. */
static int render_stream(struct exchange *ex, const struct oai_owner *owner, const char *id,
                         uint64_t from) {
    struct exchange *running = background_find(ex->server, owner, id);
    static const char event_stream[] = "text/event-stream; charset=utf-8";
    struct buf events, *body = &ex->answer.body;
    bool background = true, streamed = false;
    int rc = 0;
    /* libmicrohttpd ends a chunked answer to HEAD with an empty chunk, which would be read as the
     * beginning of the next answer. */
    if (running && running->request.stream && ex->is_head) {
        ex->answer.content_type = event_stream;
        buf_str(body, ": keepd\n\n");
        return 0;
    }
    if (running && running->request.stream) {
        background_follow(ex, running, from);
        return 0;
    }
    buf_open(&events, OAI_RECORD_BYTES);
    if (!running)
        rc = oai_records_find(ex->server->records, owner, id,
                              (struct oai_record_parts){.events = &events,
                                                        .background = &background,
                                                        .streamed = &streamed});
    if (rc == 0 && !events.size) {
        refuse_stream(ex, background, streamed);
    } else if (rc == 0) {
        size_t at = oai_skip_stored_events(events.data, events.size, from);
        buf_add(body, events.data + at, events.size - at);
        if (at == events.size) buf_str(body, ": keepd\n\n");
        ex->answer.content_type = event_stream;
    }
    buf_close(&events);
    return rc;
}

static int render_response(struct exchange *ex, const struct oai_owner *owner, const char *id) {
    int64_t from;
    if (find_stream(ex, &from)) return 0;
    if (from >= 0) return render_stream(ex, owner, id, (uint64_t)from);
    const struct exchange *running = background_find(ex->server, owner, id);
    if (running) {
        background_render(&ex->answer.body, running);
        return 0;
    }
    return oai_records_find(ex->server->records, owner, id,
                            (struct oai_record_parts){.answer = &ex->answer.body});
}

/* Reads ?limit=, ?order= and ?after=. */
static int find_page(struct exchange *ex, struct oai_page *page) {
    const char *limit = find_argument(ex, "limit"), *order = find_argument(ex, "order");
    *page = (struct oai_page){.after = find_argument(ex, "after")};
    page->descending = order && strcmp(order, "desc") == 0;
    page->limit = limit && strlen(limit) <= 3 && strspn(limit, "0123456789") == strlen(limit)
                      ? atoi(limit)
                      : 0;
    if (order && !page->descending && strcmp(order, "asc") != 0)
        oai_refuse(&ex->error, 400, "invalid_value", "order",
                   "Invalid value for 'order': expected \"asc\" or \"desc\".");
    else if (limit && (page->limit < 1 || page->limit > OAI_PAGE_MAX))
        oai_refuse(&ex->error, 400, "invalid_value", "limit",
                   "Invalid value for 'limit': expected an integer from 1 to %d.", OAI_PAGE_MAX);
    else
        return 0;
    return exchange_refuse(ex);
}

static int render_items(struct exchange *ex, const struct oai_owner *owner, const char *id) {
    const struct exchange *running = background_find(ex->server, owner, id);
    struct oai_page page;
    struct buf items;
    int rc = 0;
    if (find_page(ex, &page)) return 0;
    buf_open(&items, OAI_RECORD_BYTES);
    if (running)
        buf_str(&items, running->request.own_items);
    else
        rc = oai_records_find(ex->server->records, owner, id,
                              (struct oai_record_parts){.input = &items});
    if (rc == 0)
        rc = items.failed ? ERR_NOMEM
                          : oai_write_page(&ex->answer.body, items.size ? items.data : "",
                                           items.size, &page);
    if (rc == ERR_NOTFOUND && items.size) {
        oai_refuse(&ex->error, 400, "invalid_value", "after",
                   "Invalid value for 'after': the response has no such item.");
        exchange_refuse(ex);
        rc = 0;
    }
    buf_close(&items);
    return rc;
}

static int render_deleted(struct exchange *ex, const struct oai_owner *owner, const char *id) {
    struct exchange *running = background_find(ex->server, owner, id);
    buf_fmt(&ex->answer.body, "{\"id\":\"%s\",\"object\":\"response\",\"deleted\":true}", id);
    if (!running) return oai_records_delete(ex->server->records, owner, id);
    background_cancel(running);
    running->cut = EXCHANGE_CUT_DELETED;
    return 0;
}

/* Renders a cancelled response. Cancelling one that has ended changes nothing; one that was not in
 * the background cannot be cancelled (in OpenAI's words). */
static int render_cancelled(struct exchange *ex, const struct oai_owner *owner, const char *id) {
    struct exchange *running = background_find(ex->server, owner, id);
    bool background = false;
    if (running) {
        background_cancel(running);
        background_render(&ex->answer.body, running);
        return 0;
    }
    int rc = oai_records_find(
        ex->server->records, owner, id,
        (struct oai_record_parts){.answer = &ex->answer.body, .background = &background});
    if (rc || background) return rc;
    oai_refuse(&ex->error, 400, "invalid_value", "response_id",
               "Cannot cancel a synchronous response.");
    exchange_refuse(ex);
    return 0;
}

static void get_stored_response(struct exchange *ex) {
    const char *rest = path_behind(ex->route, ex->path);
    struct oai_owner owner;
    struct buf salt;
    char id[ID_BYTES];
    snprintf(id, sizeof id, "%.*s", (int)strcspn(rest, "/"), rest);
    buf_open(&salt, 2 * OAI_KEY_BYTES + 1);
    if (!find_salt(ex, &salt)) {
        memcpy(owner.key, ex->client.key_id, sizeof owner.key);
        owner.salt = salt.data ? salt.data : "";
        int rc = ex->route->end == ROUTE_ITEMS              ? render_items(ex, &owner, id)
                 : ex->route->end == ROUTE_CANCEL           ? render_cancelled(ex, &owner, id)
                 : strcmp(ex->route->method, "DELETE") == 0 ? render_deleted(ex, &owner, id)
                                                            : render_response(ex, &owner, id);
        if (rc)
            refuse_response(ex, rc, id);
        else if (ex->state == EXCHANGE_RECEIVING && !ex->stream.owner)
            exchange_hold_text(ex);
    }
    buf_close(&salt);
}

/* --- the table --- */

static const struct route routes[] = {
    {"/", ROUTE_WHOLE, "GET", get_page, NULL, true}, /* asks for a key itself */
    {"/v1/models", ROUTE_WHOLE, "GET", get_models, NULL, false},
    {"/v1/models/", ROUTE_NAME, "GET", get_model, NULL, false},
    {"/v1/conversations", ROUTE_WHOLE, "GET", get_conversations, NULL, false},
    {"/v1/conversations", ROUTE_WHOLE, "PUT", NULL, NULL, false},
    {"/v1/conversations/", ROUTE_ID, "DELETE", delete_conversation, NULL, false},
    {"/v1/conversations/", ROUTE_STATE, "GET", get_state, NULL, false},
    {"/v1/responses/", ROUTE_ID, "GET", get_stored_response, NULL, false},
    {"/v1/responses/", ROUTE_ID, "DELETE", get_stored_response, NULL, false},
    {"/v1/responses/", ROUTE_ITEMS, "GET", get_stored_response, NULL, false},
    {"/v1/responses/", ROUTE_CANCEL, "POST", get_stored_response, NULL, false},
    {"/load", ROUTE_WHOLE, "GET", get_load, NULL, false},
    {"/v1/loads", ROUTE_WHOLE, "GET", get_loads, NULL, false},
    {"/tokenizer_info", ROUTE_WHOLE, "GET", get_tokenizer_info, NULL, false},
    {"/props", ROUTE_WHOLE, "GET", get_props, NULL, false},
    {"/slots", ROUTE_WHOLE, "GET", get_slots, NULL, false},
    {"/server_info", ROUTE_WHOLE, "GET", get_server_info, NULL, false},
    {"/is_sleeping", ROUTE_WHOLE, "GET", get_is_sleeping, NULL, false},
    {"/openapi.json", ROUTE_WHOLE, "GET", get_openapi, NULL, false},
    {"/health", ROUTE_WHOLE, "GET", get_health, NULL, true},
    {"/ping", ROUTE_WHOLE, "GET", get_health, NULL, true}, /* SageMaker's name */
    {"/metrics", ROUTE_WHOLE, "GET", get_metrics, NULL, false},
    {"/version", ROUTE_WHOLE, "GET", get_version, NULL, false},
    {"/api/version", ROUTE_WHOLE, "GET", get_version, NULL, false},
    {"/api/tags", ROUTE_WHOLE, "GET", get_ollama_tags, NULL, false},
    {"/api/ps", ROUTE_WHOLE, "GET", get_ollama_loaded, NULL, false},
    {"/kv", ROUTE_WHOLE, "GET", get_kv, NULL, false},
};

/* The ends of paths that follow an id. */
static const char *const tails[] = {[ROUTE_ID] = "",
                                    [ROUTE_ITEMS] = "/input_items",
                                    [ROUTE_CANCEL] = "/cancel",
                                    [ROUTE_STATE] = "/state"};

/* Returns the size of the id before what follows it. */
static size_t id_size(const char *rest) {
    return strcspn(rest, "/");
}

static bool path_matches(const struct route *route, const char *path) {
    const char *rest = path_behind(route, path);
    if (!rest) return false;
    switch (route->end) {
    case ROUTE_NAME:
        return *rest != '\0';
    case ROUTE_ID:
    case ROUTE_ITEMS:
    case ROUTE_CANCEL:
    case ROUTE_STATE:
        return id_size(rest) && strcmp(rest + id_size(rest), tails[route->end]) == 0;
    case ROUTE_WHOLE:
        break;
    }
    return *rest == '\0';
}

/* Returns a route of the table above or, after these, one of a kind of request. */
static bool route_at(int index, struct route *route) {
    int count = (int)(sizeof routes / sizeof *routes);
    const struct oai_kind *kind = oai_kind_at(index - count);
    if (index < count)
        *route = routes[index];
    else if (kind)
        *route = (struct route){.path = kind->path, .method = "POST", .kind = kind};
    return index < count || kind;
}

/* Returns how many bytes both end with. */
static size_t common_end(const char *a, const char *b) {
    size_t count = 0, a_size = strlen(a), b_size = strlen(b);
    while (count < a_size && count < b_size &&
           tolower((unsigned char)a[a_size - 1 - count]) == b[b_size - 1 - count])
        count++;
    return count;
}

static size_t common_begin(const char *a, const char *b) {
    size_t count = 0;
    while (a[count] && tolower((unsigned char)a[count]) == b[count]) count++;
    return count;
}

/* Finds a similar path. Clients leave out /v1 or have it twice, end a path with a slash, or
 * misspell a letter: a similar path has the same beginning or end except for a few bytes. */
const char *route_near(const char *path) {
    enum { FEW = 3 };
    const char *near = NULL;
    size_t size = strlen(path), most = 0;
    struct route route;
    for (int i = 0; route_at(i, &route); i++) {
        size_t whole = strlen(route.path), end = common_end(path, route.path);
        size_t begin = common_begin(path, route.path), same = begin + end;
        if (route.end != ROUTE_WHOLE || whole == 1) continue;
        bool is_end = end + FEW >= whole && end > FEW;
        bool is_like = same + FEW >= whole && same + FEW >= size && same > FEW;
        if ((is_end || is_like) && same > most) most = same, near = route.path;
    }
    return near;
}

/* Adds a method to the header of a 405: a path has at most two, and the first is GET. */
static const char *allow_also(const char *allow, const char *method) {
    if (allow) return strcmp(method, "PUT") == 0 ? "GET, HEAD, PUT" : "GET, HEAD, DELETE";
    return strcmp(method, "GET") == 0 ? "GET, HEAD" : method;
}

/* Returns whether a route has this very path: it goes before those that end with an id. */
static bool is_route(const char *path, struct route *route) {
    int i = 0;
    while (route_at(i, route) && (route->end != ROUTE_WHOLE || !path_matches(route, path))) i++;
    return route_at(i, route);
}

const struct route *route_find(const char *path, const char *method, struct route *route,
                               const char **allow) {
    *allow = NULL;
    const bool whole = is_route(path, route);
    if (strcmp(method, "HEAD") == 0) method = "GET"; /* libmicrohttpd omits the body */
    for (int i = 0; route_at(i, route); i++) {
        if (!path_matches(route, path) || (whole && route->end != ROUTE_WHOLE)) continue;
        if (strcmp(route->method, method) == 0) return route;
        *allow = allow_also(*allow, route->method);
    }
    return NULL;
}
