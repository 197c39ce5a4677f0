#include "engine/queue.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

void queue_open(struct queue *queue, int rows_max) {
    CHECK(rows_max > 0);
    *queue = (struct queue){.rows_max = rows_max};
    queue->rows = mem_must_alloc((size_t)rows_max, sizeof *queue->rows);
}

void queue_close(struct queue *queue) {
    CHECK(queue->waiting == 0 && queue->clients == 0);
    mem_free(queue->rows);
    *queue = (struct queue){0};
}

/* ---- Rows ------------------------------------------------------------------------------------ */

static struct queue_client *find_row(const struct queue *queue, const uint8_t key[16]) {
    for (int i = 0; i < queue->row_count; i++)
        if (memcmp(queue->rows[i].key, key, sizeof queue->rows[i].key) == 0) return &queue->rows[i];
    return NULL;
}

/* A row for a new client: an unused one, then that of an idle client with the least to remember. */
static struct queue_client *free_row(struct queue *queue) {
    struct queue_client *best = NULL;
    if (queue->row_count < queue->rows_max) return &queue->rows[queue->row_count++];
    for (int i = 0; i < queue->row_count; i++) {
        struct queue_client *row = &queue->rows[i];
        if (row->jobs == 0 && (!best || row->served < best->served)) best = row;
    }
    return best;
}

static struct queue_client *shared_row(const struct queue *queue, const uint8_t key[16]) {
    uint64_t number;
    memcpy(&number, key, sizeof number);
    return &queue->rows[number % (uint64_t)queue->rows_max];
}

static struct queue_client *row_for(struct queue *queue, const uint8_t key[16]) {
    struct queue_client *row = find_row(queue, key);
    if (row) return row;
    row = free_row(queue);
    if (!row) return shared_row(queue, key);
    *row = (struct queue_client){0};
    memcpy(row->key, key, sizeof row->key);
    return row;
}

/* Raises `least` to what the active client served least has had. */
static void update_least(struct queue *queue) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < queue->row_count; i++)
        if (queue->rows[i].jobs > 0 && queue->rows[i].served < least) least = queue->rows[i].served;
    if (queue->clients > 0 && least > queue->least) queue->least = least;
}

/* ---- Jobs ------------------------------------------------------------------------------------ */

void queue_join(struct queue *queue, struct engine_job *job) {
    struct queue_client *row = row_for(queue, job->request.client);
    if (row->jobs == 0) {
        update_least(queue);
        if (row->served < queue->least) row->served = queue->least;
        queue->clients++;
    }
    job->client = (int)(row - queue->rows);
    job->arrival = queue->arrived++;
    job->next = NULL;
    if (row->last)
        row->last->next = job;
    else
        row->first = job;
    row->last = job;
    row->jobs++;
    row->waiting++;
    queue->waiting++;
}

void queue_take(struct queue *queue, struct engine_job *job) {
    struct queue_client *row = queue_client_of(queue, job);
    struct engine_job **link = &row->first, *before = NULL;
    while (*link != job) {
        before = *link;
        CHECK(before); /* the job waits */
        link = &before->next;
    }
    *link = job->next;
    if (row->last == job) row->last = before;
    row->waiting--;
    queue->waiting--;
}

void queue_end(struct queue *queue, struct engine_job *job) {
    struct queue_client *row = queue_client_of(queue, job);
    CHECK(row->jobs > row->waiting);
    if (--row->jobs > 0) return;
    /* The last active client: the next one starts with this service. */
    if (queue->clients == 1 && row->served > queue->least) queue->least = row->served;
    queue->clients--;
}

static bool is_before(const struct queue *queue, const struct engine_job *a,
                      const struct engine_job *b) {
    int64_t had_a = queue_client_of(queue, a)->served, had_b = queue_client_of(queue, b)->served;
    return had_a != had_b ? had_a < had_b : a->arrival < b->arrival;
}

static struct engine_job *first_of(const struct queue_client *row,
                                   bool (*suits)(const void *arg, const struct engine_job *job),
                                   const void *arg) {
    struct engine_job *job = row->first;
    while (job && suits && !suits(arg, job)) job = job->next;
    return job;
}

struct engine_job *queue_next(const struct queue *queue,
                              bool (*suits)(const void *arg, const struct engine_job *job),
                              const void *arg) {
    struct engine_job *best = NULL;
    for (int i = 0; i < queue->row_count && queue->waiting > 0; i++) {
        struct engine_job *job = first_of(&queue->rows[i], suits, arg);
        if (job && (!best || is_before(queue, job, best))) best = job;
    }
    return best;
}

int queue_others(const struct queue *queue, const struct engine_job *job) {
    return queue->waiting - queue_client_of(queue, job)->waiting;
}

static bool is_cancelled(const void *arg, const struct engine_job *job) {
    (void)arg;
    return atomic_load_explicit(&job->cancel, memory_order_relaxed) != 0;
}

struct engine_job *queue_cancelled(const struct queue *queue) {
    return queue_next(queue, is_cancelled, NULL);
}
