/* The order in which bodies are prepared, and the threads for it; see server/exchange.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "server/loop.h"

/* --- the threads --- */

#define STACK_BYTES ((size_t)8 << 20) /* as libuv's workers have */

static void wait_for_all(void *barrier) {
    uv_sem_wait(barrier);
}

/* Creates as many threads as libuv will, all at once, and ends them: libuv ends the process without
 * a message if it cannot create its workers. */
static int try_threads(void) {
    const uv_thread_options_t options = {.flags = UV_THREAD_HAS_STACK_SIZE,
                                         .stack_size = STACK_BYTES};
    uv_thread_t threads[WORKERS];
    uv_sem_t barrier;
    int count = 0, rc = uv_sem_init(&barrier, 0);
    if (rc) return rc;
    while (!rc && count < WORKERS) {
        rc = uv_thread_create_ex(&threads[count], &options, wait_for_all, &barrier);
        count += !rc;
    }
    for (int i = 0; i < count; i++) uv_sem_post(&barrier);
    while (count > 0) uv_thread_join(&threads[--count]);
    uv_sem_destroy(&barrier);
    return rc;
}

static void do_nothing(uv_work_t *work) {
    (void)work;
}

static void after_nothing(uv_work_t *work, int status) {
    (void)work, (void)status;
}

int works_open(struct server *server, struct fault *fault) {
    char number[16];
    snprintf(number, sizeof number, "%d", (int)WORKERS);
    CHECK(setenv("UV_THREADPOOL_SIZE", number, 1) == 0);
    int rc = try_threads();
    if (rc)
        return fault_set(fault, ERR_IO, "workers",
                         "cannot start %d worker threads of %zu MiB of stack: %s. A limit on tasks "
                         "or on memory is too low: ulimit -u, ulimit -v, or the service's TasksMax "
                         "and MemoryMax",
                         (int)WORKERS, STACK_BYTES >> 20, uv_strerror(rc));
    CHECK(uv_queue_work(&server->loop, &server->works_first, do_nothing, after_nothing) == 0);
    return 0;
}

/* --- the bodies --- */

static void after_prepare(uv_work_t *work, int status);

/* Runs the work of a request, unless its client is gone and nobody waits for the result. */
static void works_run(struct exchange *ex) {
    CHECK(ex->state == EXCHANGE_PREPARING || exchange_is_gone(ex));
    uv_work_cb work = exchange_is_gone(ex) ? do_nothing : prepare_run;
    ex->work.data = ex;
    CHECK(uv_queue_work(&ex->server->loop, &ex->work, work, after_prepare) == 0);
}

static bool is_load(const struct exchange *ex) {
    return ex->request.kind == &oai_load_adapter;
}

/* Returns the queue of a body; NULL: small ones have none. */
static struct work_queue *find_work_queue(struct exchange *ex) {
    if (ex->fetches) return &ex->server->works_fetching;
    return ex->large ? &ex->server->works_large : NULL;
}

static bool has_work_place(const struct work_queue *queue, const struct exchange *ex) {
    for (int i = 0; i < LARGE_AT_ONCE; i++)
        if (queue->at_work[i] == ex) return true;
    return false;
}

static bool client_works(const struct work_queue *queue, const struct exchange *ex) {
    for (int i = 0; i < LARGE_AT_ONCE; i++) {
        const struct exchange *other = queue->at_work[i];
        if (other && memcmp(other->client.id, ex->client.id, sizeof ex->client.id) == 0)
            return true;
    }
    return false;
}

/* Removes the next body: of those whose clients have no body at work, or else of all, the one that
 * has waited longest. */
static struct exchange *remove_next_waiting(struct work_queue *queue) {
    struct exchange **link = &queue->waiting;
    while (*link && client_works(queue, *link)) link = &(*link)->work_next;
    if (!*link) link = &queue->waiting;
    struct exchange *ex = *link;
    if (ex) *link = ex->work_next;
    return ex;
}

/* Starts the queue's next bodies if places are free. */
static void start_queued(struct work_queue *queue) {
    for (int i = 0; i < LARGE_AT_ONCE; i++) {
        if (queue->at_work[i]) continue;
        struct exchange *ex = remove_next_waiting(queue);
        if (!ex) return;
        queue->at_work[i] = ex;
        works_run(ex);
    }
}

static void leave_place(struct work_queue *queue, const struct exchange *ex) {
    for (int i = 0; i < LARGE_AT_ONCE; i++)
        if (queue->at_work[i] == ex) queue->at_work[i] = NULL;
    start_queued(queue);
}

/* Starts the next load of an adapter if none is at work. It takes until the next step of every
 * replica, and the engine reads one adapter at a time. */
static void start_load(struct server *server) {
    struct exchange *ex = server->loads_waiting;
    if (server->load_works || !ex) return;
    server->loads_waiting = ex->work_next;
    server->load_works = true;
    works_run(ex);
}

static void append_work(struct exchange **end, struct exchange *ex) {
    while (*end) end = &(*end)->work_next;
    *end = ex;
}

void works_add(struct exchange *ex) {
    if (is_load(ex)) {
        append_work(&ex->server->loads_waiting, ex);
        start_load(ex->server);
        return;
    }
    if (ex->body.size > WORK_LARGE_BYTES) ex->large = true;
    struct work_queue *queue = find_work_queue(ex);
    if (!queue || has_work_place(queue, ex)) {
        works_run(ex);
        return;
    }
    append_work(&queue->waiting, ex);
    start_queued(queue);
}

static void after_prepare(uv_work_t *work, int status) {
    struct exchange *ex = work->data;
    if (ex->again && !status && !exchange_is_gone(ex)) {
        if (ex->fetches) leave_place(&ex->server->works_large, ex);
        works_add(ex);
        return;
    }
    if (ex->again) prepare_end(ex);
    if (status) exchange_refuse_draining(ex);
    if (is_load(ex)) {
        ex->server->load_works = false;
        start_load(ex->server);
    } else {
        leave_place(&ex->server->works_large, ex);
        leave_place(&ex->server->works_fetching, ex);
    }
    exchange_prepared(ex);
}
