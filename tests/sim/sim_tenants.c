/* Tenants: clients with weights and quotas of pages. All is counted in steps and tokens, or in the
 * time that steps of so many rows take by definition (world_step_ns), so that a run can be repeated
 * exactly.
 *
 *   flood  a hundred requests at a time, most of them waiting
 *   guest  a request at a time, alone first, then beside the flood
 *
 * Shown: the guest's p99 time to its first token beside the flood is at most twice the one alone,
 * in steps and, where steps with many answers are longer than its whole prompt, in time; answers of
 * a third client wait no longer than --step-stretch allows; clients that flood alike are served in
 * proportion to their weights; in every step the pages that a client's running requests have
 * reserved and its conversations hold are within its quota, while it goes on, and its turns are
 * found again; a quota delays nobody else.
 *
 * Usage: sim_tenants [first_seed] [seeds] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "tests/sim/world.h"

enum {
    PLACES = 8,
    PLACES_MANY = 48,
    ROWS = 64,
    ROWS_MANY = 640,
    JOBS_MAX = 100,
    PROMPT_MAX = 500,
    WAITS_MAX = 4096,
    CHECK_EACH = 16 /* sim_fair and sim_sched check the cache after each step */
};

/* The questions of a client. */
struct tenant {
    const char *name;
    int jobs, prompt, tokens; /* requests at a time; the longest prompt; tokens of an answer */
    int pause;                /* the most steps between an answer and the next question */
    int32_t weight;
    int64_t pages_max;
    bool retain; /* each question goes on with the conversation of the one before */
};

struct client {
    struct tenant tenant;
    struct engine_job jobs[JOBS_MAX];
    uint64_t since[JOBS_MAX], again[JOBS_MAX];
    bool waits[JOBS_MAX];
    int32_t prompts[JOBS_MAX][PROMPT_MAX + 200];
    int32_t said[JOBS_MAX]; /* tokens of the dialogue so far */
    uint32_t waits_of[WAITS_MAX];
    int64_t since_ns[JOBS_MAX];
    int64_t times[WAITS_MAX]; /* to first tokens */
    int64_t last_ns, gap_ns;  /* first job: when its latest token came; its longest wait */
    uint_fast32_t tokens_seen;
    uint64_t answers, found, begun;
};

static struct client clients[3];
static int client_count;
static int64_t last_step_ns;
static uint64_t seed, now; /* now: the number of rounds, also of those without a step */

static int below(int n) {
    seed = world_mix(seed);
    return (int)(seed % (uint64_t)n);
}

/* ---- Clients ---- */

/* A new dialogue, or, with `retain`, its next turn while it is short. */
static void ask(struct world *w, struct client *c, int i) {
    const struct tenant *tenant = &c->tenant;
    struct engine_job *job = &c->jobs[i];
    int32_t index = (int32_t)(c - clients), kept = c->said[i];
    if (!tenant->retain || kept > tenant->prompt) kept = 0;
    int32_t count = kept + 1 + tenant->prompt / 2 + below(tenant->prompt / 2);
    for (int32_t k = kept; k < count; k++) c->prompts[i][k] = 1 + below(WORLD_VOCAB - 1);
    *job = (struct engine_job){.request = {.prompt = c->prompts[i],
                                           .prompt_count = count,
                                           .max_tokens = tenant->tokens,
                                           .top_p = 1,
                                           .repetition = 1,
                                           .seed = seed,
                                           .choices = 1,
                                           .top_logprobs = -1,
                                           .ignore_eos = true,
                                           .weight = tenant->weight,
                                           .pages_max = tenant->pages_max,
                                           .kv = {.policy = tenant->retain ? "global" : "full",
                                                  .budget = tenant->retain ? 32 : -1,
                                                  .buffer = tenant->retain ? 16 : -1,
                                                  .chunk = tenant->retain ? 32 : -1,
                                                  .sinks = -1,
                                                  .recent = -1,
                                                  .reuse = tenant->retain,
                                                  .retain = tenant->retain}}};
    memcpy(job->request.client, &index, sizeof index);
    memcpy(job->request.owner, &index, sizeof index);
    memcpy(job->request.space, &index, sizeof index);
    CHECK(world_submit(w, job) == 0);
    c->since[i] = now;
    /* The question came at some moment of the step that has just ended. */
    c->since_ns[i] = w->spent_ns - last_step_ns * below(100) / 100;
    c->waits[i] = true;
    if (i == 0) c->tokens_seen = 0;
}

/* The answer's tokens become part of the dialogue. */
static void finish(struct client *c, int i) {
    struct engine_job *job = &c->jobs[i];
    const struct engine_choice *choice = &job->choice[0];
    CHECK(atomic_load(&choice->finish) == ENGINE_FINISH_LENGTH);
    int32_t at = job->request.prompt_count;
    for (int32_t k = 0; k < c->tenant.tokens; k++) c->prompts[i][at + k] = choice->tokens[k].token;
    c->said[i] = at + c->tenant.tokens;
    c->answers++;
    c->found += job->cached_tokens > 0;
    engine_job_close(job);
}

static void look_at_gaps(const struct world *w, struct client *c) {
    uint_fast32_t tokens = atomic_load(&c->jobs[0].choice[0].token_count);
    if (tokens == c->tokens_seen) return;
    if (c->tokens_seen > 0 && w->spent_ns - c->last_ns > c->gap_ns)
        c->gap_ns = w->spent_ns - c->last_ns;
    c->tokens_seen = tokens;
    c->last_ns = w->spent_ns;
}

static void look(struct world *w, struct client *c, int i) {
    struct engine_job *job = &c->jobs[i];
    if (job->choice && c->waits[i] && atomic_load(&job->choice[0].token_count) > 0) {
        uint64_t waited = now - c->since[i];
        CHECK(waited < WAITS_MAX);
        c->waits[i] = false;
        c->waits_of[waited]++;
        c->times[c->begun++ % WAITS_MAX] = w->spent_ns - c->since_ns[i];
    }
    if (job->choice && i == 0) look_at_gaps(w, c);
    if (job->choice && atomic_load(&job->finished) == 0) return;
    if (job->choice) {
        finish(c, i);
        c->again[i] = now + (uint64_t)(c->tenant.pause > 0 ? below(c->tenant.pause) : 0);
    }
    if (now >= c->again[i]) ask(w, c, i);
}

/* ---- Checks ---- */

static void check_quota(const struct world *w, const struct client *c) {
    const struct sched *s = &w->sched;
    int32_t index = (int32_t)(c - clients);
    uint8_t key[16] = {0};
    int64_t pages = 0;
    memcpy(key, &index, sizeof index);
    for (int i = 0; i < s->running; i++) {
        const struct sequence *seq = &s->sequences[s->order[i]];
        if (memcmp(seq->job->request.client, key, sizeof key) == 0) pages += seq->pages_reserved;
    }
    pages += conversation_pages_of(&s->keeper.table, key);
    CHECK_MSG(c->tenant.pages_max == 0 || pages <= c->tenant.pages_max, "%s has %lld of %lld pages",
              c->tenant.name, (long long)pages, (long long)c->tenant.pages_max);
}

/* The wait that 99 of 100 requests did not exceed. */
static int p99(const struct client *c) {
    uint64_t count = 0, seen = 0;
    int at = 0;
    for (int i = 0; i < WAITS_MAX; i++) count += c->waits_of[i];
    CHECK(count >= 100);
    for (; at < WAITS_MAX; at++)
        if ((seen += c->waits_of[at]) * 100 >= count * 99) break;
    return at;
}

static int compare_times(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static double p99_ms(struct client *c) {
    size_t count = c->begun < WAITS_MAX ? (size_t)c->begun : WAITS_MAX;
    CHECK(count >= 100);
    qsort(c->times, count, sizeof *c->times, compare_times);
    size_t at = count * 99 / 100;
    return (double)c->times[at] * 1e-6;
}

static int64_t served(const struct world *w, const struct client *c) {
    const struct queue_client *record = queue_client_of(&w->sched.queue, &c->jobs[0]);
    return record->served * record->weight;
}

/* ---- Runs ---- */

static void end(struct world *w) {
    for (int c = 0; c < client_count; c++)
        for (int i = 0; i < clients[c].tenant.jobs; i++)
            atomic_store(&clients[c].jobs[i].cancel, 1);
    while (!sched_idle(&w->sched)) CHECK(!world_step(w));
    world_check(w); /* the last steps have not been checked yet */
    for (int c = 0; c < client_count; c++)
        for (int i = 0; i < clients[c].tenant.jobs; i++) engine_job_close(&clients[c].jobs[i]);
}

/* Runs these tenants together; `work`: tokens that each of them was served, not divided. */
static void run_with(const struct world_options *options, const struct tenant *tenants, int count,
                     uint64_t steps, uint64_t with_seed, int64_t work[]) {
    struct world w;
    seed = with_seed;
    now = 0;
    last_step_ns = 0;
    memset(clients, 0, sizeof clients);
    client_count = count;
    for (int c = 0; c < count; c++) clients[c].tenant = tenants[c];
    world_open(&w, options);
    for (; now < steps; now++) {
        for (int c = 0; c < count; c++)
            for (int i = 0; i < clients[c].tenant.jobs; i++) look(&w, &clients[c], i);
        last_step_ns = -w.spent_ns;
        CHECK(!world_step(&w));
        last_step_ns += w.spent_ns;
        for (int c = 0; c < count; c++) check_quota(&w, &clients[c]);
    }
    for (int c = 0; c < count; c++) {
        work[c] = served(&w, &clients[c]);
        printf("  %-6s %5llu answers, %5llu continued, served %7lld\n", clients[c].tenant.name,
               (unsigned long long)clients[c].answers, (unsigned long long)clients[c].found,
               (long long)work[c]);
    }
    end(&w);
    world_close(&w);
}

static void run(const struct tenant *tenants, int count, uint64_t steps, uint64_t with_seed,
                int64_t work[]) {
    const struct world_options options = {.path = "auto",
                                          .pages = (int64_t)WORLD_STREAMS * 40 * PLACES,
                                          .sequences = PLACES,
                                          .conversations = 24,
                                          .rows = ROWS,
                                          .check_each = CHECK_EACH};
    run_with(&options, tenants, count, steps, with_seed, work);
}

/* The flood is of short questions, of long answers, or of long prompts. */
static void expect_guest_undisturbed(uint64_t with_seed) {
    static const struct tenant floods[] = {{"short", JOBS_MAX, 40, 12, 0, 1, 0, false},
                                           {"long", JOBS_MAX, 40, 100, 0, 1, 0, false},
                                           {"reads", JOBS_MAX, PROMPT_MAX, 12, 0, 1, 0, false}};
    const struct tenant guest = {"guest", 1, 160, 8, 6, 1, 0, false};
    int64_t work[2];
    run(&guest, 1, 2000, with_seed, work);
    int alone = p99(&clients[0]);
    for (size_t f = 0; f < sizeof floods / sizeof *floods; f++) {
        const struct tenant both[] = {guest, floods[f]};
        run(both, 2, 4000, with_seed, work);
        int beside = p99(&clients[0]);
        printf("  guest: first token after %d steps at p99 alone, %d beside %s\n", alone, beside,
               floods[f].name);
        CHECK_MSG(beside <= 2 * alone, "%d steps, alone %d", beside, alone);
        CHECK(clients[1].answers > 0);
    }
}

/* A step with all answers takes longer than the guest's whole prompt, or than a part of it. The
 * third client has one answer at a time, so it does not crowd. */
static void expect_first_tokens_soon(uint64_t with_seed) {
    static const struct tenant guests[] = {{"guest", 1, 40, 4, 24, 1, 0, false},
                                           {"reads", 1, 400, 4, 24, 1, 0, false}};
    static const struct tenant floods[] = {{"flood", JOBS_MAX, 40, 100, 0, 1, 0, false},
                                           {"floods", JOBS_MAX, PROMPT_MAX, 20, 0, 1, 0, false}};
    static const struct tenant third = {"third", 1, 20, 200, 0, 1, 0, false};
    const struct world_options options = {.path = "auto",
                                          .pages = (int64_t)WORLD_STREAMS * 40 * PLACES_MANY,
                                          .sequences = PLACES_MANY,
                                          .rows = ROWS_MANY,
                                          .check_each = CHECK_EACH,
                                          .step_stretch = 200};
    int64_t work[3];
    for (int g = 0; g < 2; g++) {
        run_with(&options, &guests[g], 1, 2400, with_seed, work);
        double alone = p99_ms(&clients[0]);
        for (int f = 0; f < 2; f++) {
            const struct tenant all[] = {guests[g], floods[f], third};
            run_with(&options, all, 3, 3600, with_seed, work);
            double beside = p99_ms(&clients[0]), gap = (double)clients[2].gap_ns * 1e-6;
            double whole = (double)world_step_ns(PLACES_MANY, 0) * 1e-6;
            printf(
                "  %s: first token after %.1f ms at p99 alone, %.1f beside %s; gap %.1f of %.1f\n",
                guests[g].name, alone, beside, floods[f].name, gap, whole);
            CHECK_MSG(beside <= 2 * alone, "%.1f ms, alone %.1f", beside, alone);
            CHECK_MSG(gap <= 2.5 * whole, "another client's answer waited %.1f ms", gap);
            CHECK(clients[1].answers > 0);
        }
    }
}

static void expect_weights(uint64_t with_seed) {
    static const struct tenant tenants[] = {{"three", 40, 60, 20, 0, 3, 0, false},
                                            {"one", 40, 60, 20, 0, 1, 0, false},
                                            {"two", 40, 60, 20, 0, 2, 0, false}};
    int64_t work[3];
    run(tenants, 3, 3000, with_seed, work);
    for (int c = 0; c < 3; c++) {
        double share = (double)work[c] / (double)(work[0] + work[1] + work[2]);
        double wanted = tenants[c].weight / 6.0;
        CHECK_MSG(share > wanted * 0.9 && share < wanted * 1.1,
                  "%s has %.3f of all instead of %.3f", tenants[c].name, share, wanted);
    }
}

/* Dialogues of at most 32 entries a head take few pages; the quota has room for three at a time. */
static void expect_quota(uint64_t with_seed) {
    const int64_t quota = (int64_t)WORLD_STREAMS * 24;
    const struct tenant tenants[] = {{"bound", 6, 60, 12, 4, 1, quota, true},
                                     {"free", 3, 60, 12, 4, 1, 0, true}};
    int64_t work[2];
    run(tenants, 2, 3000, with_seed, work);
    CHECK(clients[0].answers > 100 && clients[1].answers > 100);
    CHECK_MSG(clients[0].found * 4 > clients[0].answers, "its conversations are found again");
    CHECK_MSG(clients[1].found * 3 > clients[1].answers, "the other's quota costs it nothing");
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : 2;
    for (uint64_t s = first; s < first + seeds; s++) {
        printf("seed %llu:\n", (unsigned long long)s);
        expect_guest_undisturbed(s);
        if (s == first) expect_first_tokens_soon(s);
        expect_weights(s);
        expect_quota(s);
    }
    return 0;
}
