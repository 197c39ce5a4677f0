/* Fair shares under load: five kinds of clients, each asking again as soon as it has its answers,
 * for more than the scheduler can do at once. Everything is counted in steps, so that a run can be
 * repeated exactly.
 *
 *   one    a small request at a time
 *   flood  many small requests at a time
 *   wide   requests that need every place, for one token each
 *   large  requests that need nearly the whole pool
 *   long   long answers
 *   all    four clients with long answers, each of which takes every place
 *
 * In every step: while passing is allowed, no place is empty for which a waiting job fits. At the
 * end: nobody waited longer than stated, nobody was served much less than others that asked for as
 * much, and all kinds got on. First each kind runs alone, so that the figures can be compared.
 *
 * Usage: sim_fair [first_seed] [seeds] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "tests/sim/world.h"

enum { PLACES = 8, ROWS = 64, STEPS = 2000, JOBS_MAX = 16, PROMPT_MAX = 500 };

static const struct kind {
    const char *name;
    int jobs, prompt, tokens, choices;
    int pause; /* steps between an answer and the next question */
} kinds[] = {{"one", 1, 20, 12, 1, 0},
             {"flood", 16, 20, 12, 1, 0},
             {"wide", 1, 8, 1, PLACES, 0},
             {"large", 1, PROMPT_MAX, 8, 1, 0},
             {"long", 4, 30, 80, 1, 0},
             {"chat", 8, 20, 32, 1, 2},
             {"reader", 8, PROMPT_MAX, 64, 1, 2},
             {"all 1", 1, 8, 80, PLACES, 0},
             {"all 2", 1, 8, 80, PLACES, 0},
             {"all 3", 1, 8, 80, PLACES, 0},
             {"all 4", 1, 8, 80, PLACES, 0}};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* The longest job, in steps: the prompt at the least rows that a step has for it, then tokens. */
enum { LONGEST = PROMPT_MAX / (ROWS - PLACES) + 2 + 80 };

struct client {
    const struct kind *kind;
    struct engine_job jobs[JOBS_MAX];
    uint64_t since[JOBS_MAX]; /* the step in which it was submitted */
    uint64_t again[JOBS_MAX]; /* and the one before which it does not ask */
    bool waits[JOBS_MAX];     /* for its first token */
    int32_t prompts[JOBS_MAX][PROMPT_MAX];
    uint64_t answers, waited, longest;
    int64_t served;               /* tokens, as the queue counts them */
    uint32_t waits_of[STEPS * 2]; /* how many jobs waited so many steps for their first token */
};

static struct client clients[KINDS];
static sched_model_step real_step;
static uint64_t seed;

static int below(int n) {
    seed = world_mix(seed);
    return (int)(seed % (uint64_t)n);
}

/* ---- Checks in every step ---- */

/* Pages that are certainly enough: of a stream that keeps everything. */
static int64_t pages_enough(const struct world *w, const struct engine_job *job) {
    int64_t entries = job->request.prompt_count + job->request.max_tokens;
    int slots = w->sched.options.shape.page_slots;
    return WORLD_STREAMS * ((entries + slots - 1) / slots) * job->choice_count;
}

static int running_of(const struct client *client) {
    int count = 0;
    for (int i = 0; i < client->kind->jobs; i++) {
        const struct engine_job *job = &client->jobs[i];
        if (job->choice && atomic_load(&job->admitted) != 0 && atomic_load(&job->finished) == 0)
            count += job->choice_count;
    }
    return count;
}

/* After admission, before the model runs. */
static int checked_step(void *model, const struct kern_batch *batch, const int32_t *want,
                        int want_count, const float **logits, const float **hidden) {
    struct world *w = model;
    const struct sched *s = &w->sched;
    int places = PLACES - s->running;
    int64_t pages = s->options.pages_total - s->keeper.pages_reserved;
    int count = 0;
    for (int c = 0; c < KINDS; c++) count += clients[c].kind != NULL;
    int share = PLACES / count;
    bool open = !s->head || s->counters.steps - s->admission.head_step < SCHED_PASS_STEPS;
    for (int c = 0; c < KINDS; c++)
        for (int i = 0; clients[c].kind && i < clients[c].kind->jobs; i++) {
            const struct engine_job *job = &clients[c].jobs[i];
            if (!job->choice || atomic_load(&job->admitted) != 0) continue;
            bool fits = job->choice_count <= places && pages_enough(w, job) <= pages;
            bool kept = places <= PLACES / 4 && running_of(&clients[c]) >= share;
            /* the most that is left for a client that runs nothing */
            kept = kept || (running_of(&clients[c]) > 0 &&
                            (job->choice_count == places ||
                             pages - pages_enough(w, job) < s->options.pages_total / 4));
            CHECK_MSG(!fits || kept || (!open && job != s->head),
                      "%s waits beside %d places and %lld pages", clients[c].kind->name, places,
                      (long long)pages);
        }
    return real_step(model, batch, want, want_count, logits, hidden);
}

/* ---- Clients ---- */

static void ask(struct world *w, struct client *c, int i) {
    const struct kind *kind = c->kind;
    struct engine_job *job = &c->jobs[i];
    int32_t *prompt = c->prompts[i], index = (int32_t)(c - clients);
    int count = kind->prompt - below(kind->prompt / 4 + 1);
    for (int k = 0; k < count; k++) prompt[k] = 1 + below(WORLD_VOCAB - 1);
    *job = (struct engine_job){.request = {.prompt = prompt,
                                           .prompt_count = count,
                                           .max_tokens = kind->tokens,
                                           .temperature = 1,
                                           .top_p = 1,
                                           .repetition = 1,
                                           .seed = seed,
                                           .choices = kind->choices,
                                           .top_logprobs = -1,
                                           .ignore_eos = true,
                                           .kv = {.policy = "full",
                                                  .budget = -1,
                                                  .buffer = -1,
                                                  .chunk = -1,
                                                  .sinks = -1,
                                                  .recent = -1}}};
    memcpy(job->request.client, &index, sizeof index);
    CHECK(world_submit(w, job) == 0);
    c->since[i] = w->sched.counters.steps;
    c->waits[i] = true;
}

static void note_wait(struct client *c, uint64_t waited) {
    CHECK(waited < sizeof c->waits_of / sizeof *c->waits_of);
    c->waits_of[waited]++;
    c->waited += waited;
    if (waited > c->longest) c->longest = waited;
}

static void look(struct world *w, struct client *c, int i) {
    struct engine_job *job = &c->jobs[i];
    uint64_t now = w->sched.counters.steps;
    if (job->choice && c->waits[i] && atomic_load(&job->choice[0].token_count) > 0) {
        c->waits[i] = false;
        note_wait(c, now - c->since[i]);
    }
    if (job->choice && atomic_load(&job->finished) == 0) return;
    if (job->choice) {
        CHECK(atomic_load(&job->choice[0].finish) == ENGINE_FINISH_LENGTH);
        c->answers++;
        engine_job_close(job);
        c->again[i] = now + (uint64_t)c->kind->pause;
    }
    if (now >= c->again[i]) ask(w, c, i);
}

static void end(struct world *w) {
    for (int c = 0; c < KINDS; c++)
        for (int i = 0; i < JOBS_MAX; i++) atomic_store(&clients[c].jobs[i].cancel, 1);
    while (!sched_idle(&w->sched)) CHECK(!world_step(w));
    for (int c = 0; c < KINDS; c++)
        for (int i = 0; i < JOBS_MAX; i++) engine_job_close(&clients[c].jobs[i]);
}

/* ---- Runs ---- */

/* The wait that `part` of 100 jobs did not exceed. */
static uint64_t percentile(const struct client *client, uint64_t part) {
    uint64_t count = 0, seen = 0, at = 0;
    for (uint64_t i = 0; i <= client->longest; i++) count += client->waits_of[i];
    for (; at < client->longest; at++)
        if ((seen += client->waits_of[at]) * 100 >= count * part) break;
    return at;
}

static void report(const struct world *w, struct client *client) {
    for (int i = 0; i < client->kind->jobs; i++)
        if (client->jobs[i].choice)
            client->served = queue_client_of(&w->sched.queue, &client->jobs[i])->served;
    printf("  %-6s %6llu answers, first token after %4llu steps in the median, p99 %4llu, %4llu at "
           "most, served %lld\n",
           client->kind->name, (unsigned long long)client->answers,
           (unsigned long long)percentile(client, 50), (unsigned long long)percentile(client, 99),
           (unsigned long long)client->longest, (long long)client->served);
}

/* The kinds of `which`, a bit each, together, with so many pages for each stream. */
static void run(unsigned which, int pages, uint64_t with_seed) {
    struct world w;
    seed = with_seed;
    memset(clients, 0, sizeof clients);
    world_open(&w, &(struct world_options){.path = "auto",
                                           .pages = (int64_t)WORLD_STREAMS * pages,
                                           .sequences = PLACES,
                                           .conversations = 0,
                                           .rows = ROWS});
    real_step = w.sched.options.model_step;
    w.sched.options.model_step = checked_step;
    for (int c = 0; c < KINDS; c++)
        if (which >> c & 1) clients[c].kind = &kinds[c];
    while (w.sched.counters.steps < STEPS) {
        for (int c = 0; c < KINDS; c++)
            for (int i = 0; clients[c].kind && i < clients[c].kind->jobs; i++)
                look(&w, &clients[c], i);
        CHECK(!world_step(&w));
    }
    for (int c = 0; c < KINDS; c++)
        if (clients[c].kind) report(&w, &clients[c]);
    end(&w);
    world_close(&w);
}

enum { ONE, FLOOD, WIDE, LARGE, LONG, CHAT, READER, ALL };
/* One large job and little beside it; all that can run. */
enum { FEW_PAGES = 9, MANY_PAGES = 40 * PLACES };
#define BIT(kind) (1u << (kind))
static const unsigned mixed = BIT(ONE) | BIT(FLOOD) | BIT(WIDE) | BIT(LARGE) | BIT(LONG);
static const unsigned rush = BIT(CHAT) | BIT(WIDE) | BIT(READER);
static const unsigned crowd = BIT(ONE) | BIT(FLOOD) | 15u * BIT(ALL);

/* A head lets others pass for SCHED_PASS_STEPS, then waits for the longest job that runs: so long
 * does a large job wait once it has its turn, and as long for the turn. A small one passes before,
 * and after it until the head is about to fit; it waits for that and for the head itself. */
static void expect_fair(void) {
    const uint64_t turn = SCHED_PASS_STEPS + LONGEST;
    CHECK(clients[ONE].longest <= LONGEST / 2);
    CHECK(clients[WIDE].longest <= 2 * turn && clients[LARGE].longest <= 2 * turn);
    CHECK(clients[LONG].longest <= 2 * turn);
    CHECK(clients[FLOOD].longest <= 4 * turn); /* behind fifteen of its own */
    int64_t most = 0, least = INT64_MAX;
    for (int c = 0; c < KINDS; c++) {
        if (!clients[c].kind) continue;
        CHECK(clients[c].answers > 0);
        if (c == ONE || c == WIDE) continue; /* such clients never request their whole share */
        if (clients[c].served > most) most = clients[c].served;
        if (clients[c].served < least) least = clients[c].served;
    }
    CHECK_MSG(least * 10 >= most * 8, "shares of %lld and %lld", (long long)least, (long long)most);
    CHECK(clients[WIDE].served * 10 >= most * 4);
}

/* Places are kept, so a question waits for the answers before it of its own client, not for the
 * first of eight long jobs to end, and the others wait no longer than before. */
static void expect_short_waits(void) {
    const uint64_t turn = SCHED_PASS_STEPS + LONGEST;
    CHECK_MSG(clients[CHAT].longest < LONGEST, "%llu steps",
              (unsigned long long)clients[CHAT].longest);
    CHECK(clients[WIDE].longest <= 2 * turn && clients[READER].longest <= 2 * turn);
    for (int c = 0; c < KINDS; c++) CHECK(!clients[c].kind || clients[c].answers > 0);
}

/* A client that asks for less than its share waits for one job that takes every place, not for
 * those that were there before; and those get on, too. */
static void expect_one_at_a_time(void) {
    const uint64_t turn = SCHED_PASS_STEPS + LONGEST;
    CHECK_MSG(clients[ONE].longest <= LONGEST, "%llu steps",
              (unsigned long long)clients[ONE].longest);
    for (int c = ALL; c < ALL + 4; c++)
        CHECK_MSG(clients[c].answers > 0 && clients[c].longest <= 8 * turn, "%llu steps",
                  (unsigned long long)clients[c].longest);
}

static void run_alone(unsigned which, int pages, uint64_t with_seed) {
    for (int c = 0; c < KINDS; c++) {
        if ((which >> c & 1) == 0) continue;
        run(BIT(c), pages, with_seed);
        CHECK(clients[c].answers > 0);
    }
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : 3;
    printf("alone:\n");
    run_alone(mixed, FEW_PAGES, first);
    for (uint64_t s = first; s < first + seeds; s++) {
        printf("together, seed %llu:\n", (unsigned long long)s);
        run(mixed, FEW_PAGES, s);
        expect_fair();
    }
    printf("three times as many jobs as places, each kind alone:\n");
    run_alone(rush, MANY_PAGES, first);
    for (uint64_t s = first; s < first + seeds; s++) {
        printf("together, seed %llu:\n", (unsigned long long)s);
        run(rush, MANY_PAGES, s);
        expect_short_waits();
    }
    printf("four clients that want every place, beside a small one and a flood:\n");
    for (uint64_t s = first; s < first + seeds; s++) {
        printf("together, seed %llu:\n", (unsigned long long)s);
        run(crowd, MANY_PAGES, s);
        expect_one_at_a_time();
    }
    return 0;
}
