/* A table of clients, searched from one end to the other. Each row links the waiting jobs of its
 * client in the order of arrival. The places of each client are planned once in a step
 * (queue_plan_places), so that all decisions of the step agree. */
#include "engine/queue.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

void queue_open(struct queue *queue, int rows_max, int places) {
    CHECK(rows_max > 0 && places > 0);
    *queue = (struct queue){.rows_max = rows_max, .places = places, .share = places};
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

/* ---- Shares of places ------------------------------------------------------------------------ */

static int most_kept(const struct queue *queue) {
    return queue->places / 4;
}

/* The places that a job counts for: of a job that no kept place can serve, none. */
static int places_of(const struct queue *queue, const struct engine_job *job) {
    return job->choice_count <= most_kept(queue) ? job->choice_count : 0;
}

static bool is_recent(const struct queue *queue, const struct queue_client *row) {
    return row->jobs > 0 || (row->peak > 0 && queue->step - row->peak_step < QUEUE_KEEP_STEPS);
}

static void note_peak(const struct queue *queue, struct queue_client *row) {
    bool old = queue->step - row->peak_step >= QUEUE_KEEP_STEPS;
    if (row->places < row->peak && !old) return;
    row->peak = row->places;
    row->peak_step = queue->step;
}

/* The places that the client lacks of its share and wanted lately. */
static int lacks(const struct queue *queue, const struct queue_client *row) {
    bool old = queue->step - row->peak_step >= QUEUE_KEEP_STEPS;
    int wanted = old ? row->places : row->peak;
    if (wanted > queue->share) wanted = queue->share;
    return is_recent(queue, row) && wanted > row->running ? wanted - row->running : 0;
}

bool queue_plan_places(struct queue *queue, uint64_t step) {
    int share = queue->share, kept = queue->kept, clients = 0;
    queue->step = step;
    for (int i = 0; i < queue->row_count; i++) clients += is_recent(queue, &queue->rows[i]);
    queue->share = clients > 1 ? queue->places / clients : queue->places;
    if (queue->share < 1) queue->share = 1;
    queue->kept = 0;
    for (int i = 0; i < queue->row_count; i++) queue->kept += lacks(queue, &queue->rows[i]);
    return queue->share != share || queue->kept != kept;
}

bool queue_may_start(const struct queue *queue, const struct engine_job *job, int free, bool turn) {
    const struct queue_client *row = queue_client_of(queue, job);
    int kept = queue->kept - lacks(queue, row), most = most_kept(queue);
    if (row->running + job->choice_count <= queue->share) return true;
    /* A job that fits neither the share nor what is kept would wait for ever: by service alone. */
    if (turn && (job->choice_count > most || row->running == 0)) return true;
    return job->choice_count <= free - (kept < most ? kept : most);
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
    row->places += places_of(queue, job);
    note_peak(queue, row);
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
    note_peak(queue, row);
    row->places -= places_of(queue, job);
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
