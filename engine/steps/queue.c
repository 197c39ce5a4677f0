/* A table of clients, searched from one end to the other. Each record links the waiting jobs of its
 * client in the order of arrival. The places of each client are planned once in a step
 * (queue_plan_places), so that all decisions of the step agree. */
#include "engine/steps/queue.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

void queue_open(struct queue *queue, int records_max, int places) {
    CHECK(records_max > 0 && places > 0);
    *queue = (struct queue){.records_max = records_max, .places = places};
    queue->records = mem_must_alloc((size_t)records_max, sizeof *queue->records);
}

void queue_close(struct queue *queue) {
    CHECK(queue->waiting == 0 && queue->clients == 0);
    mem_free(queue->records);
    *queue = (struct queue){0};
}

/* ---- Records ---- */

/* Returns a record for a new client: an unused one, else that of the idle client with the least
 * `served`; NULL: all clients are active. */
static struct queue_client *free_client(struct queue *queue) {
    struct queue_client *best = NULL;
    if (queue->record_count < queue->records_max) return &queue->records[queue->record_count++];
    for (int i = 0; i < queue->record_count; i++) {
        struct queue_client *client = &queue->records[i];
        if (client->jobs == 0 && (!best || client->served < best->served)) best = client;
    }
    return best;
}

static struct queue_client *client_for(struct queue *queue, const uint8_t key[16]) {
    for (int i = 0; i < queue->record_count; i++)
        if (memcmp(queue->records[i].key, key, sizeof queue->records[i].key) == 0)
            return &queue->records[i];
    struct queue_client *client = free_client(queue);
    if (!client) { /* all records are taken: clients share one */
        uint64_t number;
        memcpy(&number, key, sizeof number);
        return &queue->records[number % (uint64_t)queue->records_max];
    }
    *client = (struct queue_client){0};
    memcpy(client->key, key, sizeof client->key);
    return client;
}

/* ---- Shares of places ---- */

static int most_kept(const struct queue *queue) {
    return queue->places / 4;
}

static bool is_wide_job(const struct queue *queue, const struct engine_job *job) {
    return job->choice_count > most_kept(queue);
}

/* Returns the places that a job counts for: none if it needs more than can be kept. */
static int counted_places(const struct queue *queue, const struct engine_job *job) {
    return is_wide_job(queue, job) ? 0 : job->choice_count;
}

/* Returns the client's part of the places; until the first plan that is all of them. */
static int client_share(const struct queue *queue, const struct queue_client *client) {
    int64_t weights = queue->weights > client->weight ? queue->weights : client->weight;
    int64_t share = queue->places * (int64_t)client->weight / weights;
    return share > 1 ? (int)share : 1;
}

static bool is_recent(const struct queue *queue, const struct queue_client *client) {
    return client->jobs > 0 ||
           (client->peak > 0 && queue->step - client->peak_step < QUEUE_KEEP_STEPS);
}

static void note_peak(const struct queue *queue, struct queue_client *client) {
    bool old = queue->step - client->peak_step >= QUEUE_KEEP_STEPS;
    if (client->places < client->peak && !old) return;
    client->peak = client->places;
    client->peak_step = queue->step;
}

/* Returns the places between those that the client uses and its share, at most as many as it wanted
 * lately. */
static int lacks(const struct queue *queue, const struct queue_client *client) {
    bool old = queue->step - client->peak_step >= QUEUE_KEEP_STEPS;
    int wanted = old ? client->places : client->peak;
    int share = client_share(queue, client);
    if (wanted > share) wanted = share;
    return is_recent(queue, client) && wanted > client->running ? wanted - client->running : 0;
}

static int first_places(const struct queue *queue, const struct queue_client *client) {
    return client->first_border == queue->border ? client->first_places : 0;
}

/* Returns whether the client's oldest job that is not wide came before the border, fits the
 * client's share, and nothing but places is in its way. */
static bool has_first_turn(const struct queue *queue, const struct queue_client *client) {
    const struct engine_job *job = client->first;
    while (job && job->arrival < queue->border && is_wide_job(queue, job)) job = job->next;
    if (!job || job->arrival >= queue->border) return false;
    int share = client_share(queue, client);
    return client->running + job->choice_count <= share &&
           first_places(queue, client) + job->choice_count <= share &&
           job->pages * job->choice_count <= queue_pages_left(queue, job);
}

bool queue_plan_places(struct queue *queue, uint64_t step) {
    int64_t weights = queue->weights;
    int kept = queue->kept, first = queue->first;
    struct queue_capacity guest = queue->guest;
    queue->step = step;
    queue->weights = queue->kept = 0;
    for (int i = 0; i < queue->record_count; i++)
        if (is_recent(queue, &queue->records[i])) queue->weights += queue->records[i].weight;
    for (int i = 0; i < queue->record_count; i++) queue->kept += lacks(queue, &queue->records[i]);
    queue->first = 0;
    for (int i = 0; i < queue->record_count; i++) {
        struct queue_client *client = &queue->records[i];
        client->goes_first = has_first_turn(queue, client);
        queue->first += client->goes_first;
    }
    bool left = queue->several && most_kept(queue) > 0;
    queue->guest = (struct queue_capacity){.places = left};
    for (int i = 0; left && i < queue->record_count; i++) {
        const struct queue_client *client = &queue->records[i];
        if (client->running == 0 && client->wants_pages > queue->guest.pages)
            queue->guest.pages = client->wants_pages;
    }
    return queue->weights != weights || queue->kept != kept || queue->first != first ||
           queue->guest.places != guest.places || queue->guest.pages != guest.pages;
}

int queue_share(const struct queue *queue, const struct engine_job *job) {
    return client_share(queue, queue_client_of(queue, job));
}

bool queue_may_start(const struct queue *queue, const struct engine_job *job, int free, bool turn) {
    const struct queue_client *client = queue_client_of(queue, job);
    int kept = queue->kept - lacks(queue, client), most = most_kept(queue);
    if (is_wide_job(queue, job) && queue->first > client->goes_first) return false;
    if (client->running + job->choice_count <= client_share(queue, client)) return true;
    /* A job that fits neither the share nor what is kept would wait for ever: by service alone. */
    if (turn && (job->choice_count > most || client->running == 0)) return true;
    return job->choice_count <= free - (kept < most ? kept : most);
}

/* ---- Crowding ---- */

static bool was_seen(const struct queue *queue, const struct queue_client *client) {
    return client->jobs > 0 ||
           (client->reads > 0 && queue->step - client->seen_step < QUEUE_CROWD_STEPS);
}

int32_t queue_find_crowd(struct queue *queue) {
    int64_t weights = 0, running = 0;
    int32_t reads = 0;
    bool crowded = false;
    for (int i = 0; i < queue->record_count; i++) {
        running += queue->records[i].running;
        if (was_seen(queue, &queue->records[i])) weights += queue->records[i].weight;
    }
    for (int i = 0; i < queue->record_count; i++) {
        struct queue_client *client = &queue->records[i];
        client->crowds =
            client->running > 1 && client->running * weights > running * client->weight;
        crowded = crowded || client->crowds;
        if (client->crowds || client->waiting > 0 || client->reads == 0) continue;
        if (!was_seen(queue, client)) continue;
        if (reads == 0 || client->reads < reads) reads = client->reads;
    }
    return crowded ? reads : 0;
}

void queue_note_prompt(struct queue *queue, const struct engine_job *job, int32_t tokens) {
    struct queue_client *client = queue_client_of(queue, job);
    int64_t sum = client->reads > 0 ? 3 * (int64_t)client->reads + tokens : 4 * (int64_t)tokens;
    client->reads = sum > 4 ? (int32_t)(sum / 4) : 1;
}

/* ---- Jobs ---- */

void queue_join(struct queue *queue, struct engine_job *job) {
    struct queue_client *client = client_for(queue, job->request.client);
    if (client->jobs == 0) {
        int64_t least = INT64_MAX; /* the service of the active client that had least */
        for (int i = 0; i < queue->record_count; i++)
            if (queue->records[i].jobs > 0 && queue->records[i].served < least)
                least = queue->records[i].served;
        if (queue->clients > 0 && least > queue->least) queue->least = least;
        if (client->served < queue->least) client->served = queue->least;
        queue->clients++;
    }
    client->weight = job->request.weight > 0 ? job->request.weight : 1;
    client->pages_max = job->request.pages_max;
    queue->several |= job->request.others || queue->record_count > 1;
    client->wants_pages = job->pages * job->choice_count;
    job->client = (int)(client - queue->records);
    job->arrival = queue->arrived++;
    job->next = NULL;
    if (client->last)
        client->last->next = job;
    else
        client->first = job;
    client->last = job;
    client->jobs++;
    client->seen_step = queue->step;
    client->places += counted_places(queue, job);
    note_peak(queue, client);
    client->waiting++;
    client->prompts_waiting += job->request.prompt_count;
    queue->waiting++;
}

void queue_remove(struct queue *queue, struct engine_job *job) {
    struct queue_client *client = queue_client_of(queue, job);
    struct engine_job **link = &client->first, *before = NULL;
    while (*link != job) {
        before = *link;
        CHECK(before); /* the job waits */
        link = &before->next;
    }
    *link = job->next;
    if (client->last == job) client->last = before;
    if (job->arrival < queue->border &&
        !is_wide_job(queue, job)) { /* counts among those that went first */
        client->first_places = first_places(queue, client) + job->choice_count;
        client->first_border = queue->border;
    }
    client->waiting--;
    client->prompts_waiting -= job->request.prompt_count;
    queue->waiting--;
}

void queue_end(struct queue *queue, struct engine_job *job) {
    struct queue_client *client = queue_client_of(queue, job);
    CHECK(client->jobs > client->waiting);
    if (is_wide_job(queue, job) && atomic_load_explicit(&job->admitted, memory_order_relaxed))
        queue->border = queue->arrived;
    client->seen_step = queue->step;
    note_peak(queue, client);
    client->places -= counted_places(queue, job);
    if (--client->jobs > 0) return;
    /* The last active client: the next one starts with this service. */
    if (queue->clients == 1 && client->served > queue->least) queue->least = client->served;
    queue->clients--;
}

static bool is_served_before(const struct queue *queue, const struct engine_job *a,
                             const struct engine_job *b) {
    int64_t had_a = queue_client_of(queue, a)->served, had_b = queue_client_of(queue, b)->served;
    return had_a != had_b ? had_a < had_b : a->arrival < b->arrival;
}

struct engine_job *queue_next(const struct queue *queue,
                              bool (*suits)(const void *arg, const struct engine_job *job),
                              const void *arg) {
    struct engine_job *best = NULL;
    for (int i = 0; i < queue->record_count && queue->waiting > 0; i++) {
        struct engine_job *job = queue->records[i].first;
        while (job && suits && !suits(arg, job)) job = job->next;
        if (job && (!best || is_served_before(queue, job, best))) best = job;
    }
    return best;
}

int queue_others(const struct queue *queue, const struct engine_job *job) {
    return queue->waiting - queue_client_of(queue, job)->waiting;
}

static bool is_job_cancelled(const void *arg, const struct engine_job *job) {
    (void)arg;
    return atomic_load_explicit(&job->cancel, memory_order_relaxed) != 0;
}

struct engine_job *queue_cancelled(const struct queue *queue) {
    return queue_next(queue, is_job_cancelled, NULL);
}
