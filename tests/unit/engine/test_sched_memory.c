/* A crowd of requests of every kind shares steps while one allocation after the other fails:
 * whoever runs has what it needs since it was admitted, so its answer is the one it would have had.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tests/unit/engine/requests.h"

enum { CROWD = 6 };

static const struct engine_bias bias[] = {{3, 2.5f}, {9, -1}};
static const int32_t stop_ids[] = {5};
static const struct engine_stop stops[] = {{"zz", 2}, {"qx", 2}};

static struct engine_kv kv_of(const char *policy, enum engine_report report) {
    struct engine_kv kv = global(10, 4, 12);
    kv.policy = policy;
    kv.report = report;
    return kv;
}

/* Traces and reports, a window of remembered queries, accumulated attention, classes, scores of the
 * prompt; several choices, penalties, banned tokens, alternatives. */
static void fill_crowd(struct engine_job *jobs) {
    jobs[0] = job_of(1, 30, 24, kv_of("global", ENGINE_REPORT_TRACE));
    jobs[1] = job_of(2, 26, 20, kv_of("gkv", ENGINE_REPORT_LENGTHS));
    jobs[1].request.choices = 2;
    jobs[2] = job_of(3, 28, 18, kv_of("h2o", ENGINE_REPORT_NONE));
    jobs[2].request.repetition = 1.3f;
    jobs[2].request.bias = bias;
    jobs[2].request.bias_count = 2;
    jobs[3] = job_of(4, 22, 16, full());
    jobs[3].request.prompt_logprobs = true;
    jobs[3].request.prompt_top_logprobs = jobs[3].request.top_logprobs = 3;
    jobs[4] = job_of(5, 31, 22, kv_of("ems", ENGINE_REPORT_POSITIONS));
    jobs[4].request.min_tokens = 9;
    jobs[4].request.stop_ids = stop_ids;
    jobs[4].request.stop_id_count = 1;
    jobs[5] = job_of(6, 24, 20, kv_of("cake", ENGINE_REPORT_NONE));
    jobs[5].request.stops = stops;
    jobs[5].request.stop_count = 2;
}

static void open_crowd(struct world *w, const char *path, const char *dir) {
    struct world_options options = {.path = path,
                                    .pages = 2000,
                                    .sequences = 8,
                                    .conversations = 2,
                                    .rows = 40,
                                    .state_dir = dir,
                                    .state_eager = dir != NULL};
    world_open(w, &options);
}

static void expect_same(const struct engine_job *job, const struct engine_job *same, long n) {
    for (int c = 0; c < job->choice_count; c++) {
        const struct engine_choice *a = &job->choice[c], *b = &same->choice[c];
        size_t count = atomic_load(&a->token_count);
        cr_assert_eq(atomic_load(&a->finish), atomic_load(&b->finish), "allocation %ld", n);
        cr_assert_eq(count, atomic_load(&b->token_count), "allocation %ld", n);
        cr_assert_eq(memcmp(a->tokens, b->tokens, count * sizeof *a->tokens), 0,
                     "allocation %ld changed an answer", n);
    }
    cr_assert_eq(job->kv.kept_entries, same->kv.kept_entries);
}

/* Runs to the failure and the end of its step, or to the end. The checks of the world also
 * allocate. */
static void run_unchecked(struct world *w) {
    for (int step = 0; !sched_idle(&w->sched) && mem_fail_pending(); step++) {
        bool failed = false;
        cr_assert_lt(step, 500);
        keeper_save(&w->sched.keeper, clock_ns(), false);
        sched_step(&w->sched, &failed);
        sched_publish_finished(&w->sched);
        cr_assert_not(failed);
    }
}

/* The n-th allocation after all were submitted fails. Returns whether there was one. */
static bool walk(const char *path, const char *dir, const struct engine_job *same, long n) {
    struct world w;
    struct engine_job jobs[CROWD];
    int errors = 0, lost = 0;
    open_crowd(&w, path, dir);
    fill_crowd(jobs);
    for (int i = 0; i < CROWD; i++) submit(&w, &jobs[i]);
    mem_fail_after(n);
    run_unchecked(&w);
    bool pending = mem_fail_pending();
    mem_fail_after(-1);
    run_until_idle(&w);
    world_check(&w);
    for (int i = 0; i < CROWD; i++) {
        bool failed = finish_of(&jobs[i]) == ENGINE_FINISH_ERROR;
        errors += failed;
        lost += jobs[i].kv.evictions_lost;
        if (failed)
            cr_assert(atomic_load(&jobs[i].admitted) == 0 && jobs[i].fault.code == ERR_NOMEM,
                      "%s: allocation %ld fails a running request: %s", path, n,
                      jobs[i].fault.text);
        else
            expect_same(&jobs[i], &same[i], n);
    }
    cr_assert_leq(errors + lost, 1, "%s: allocation %ld fails %d requests", path, n, errors);
    for (int i = 0; i < CROWD; i++) engine_job_close(&jobs[i]);
    world_close(&w);
    return !pending;
}

static void walk_all(const char *path, const char *dir) {
    struct world w;
    struct engine_job same[CROWD];
    long n = 0;
    open_crowd(&w, path, NULL);
    fill_crowd(same);
    for (int i = 0; i < CROWD; i++) submit(&w, &same[i]);
    run_until_idle(&w);
    while (walk(path, dir, same, n)) n++;
    cr_assert(n >= 20 && n < 600, "%s: %ld allocations", path, n);
    for (int i = 0; i < CROWD; i++) engine_job_close(&same[i]);
    world_close(&w);
}

Test(sched_memory, who_runs_needs_no_more_memory) {
    static const char *const paths[] = {"reference", "portable", "auto"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) walk_all(paths[i], NULL);
}

/* Conversations that cannot be copied out stay in memory or are lost; no answer changes. */
Test(sched_memory, nor_do_those_whose_conversations_are_written) {
    char dir[64];
    world_make_dir(dir);
    walk_all("portable", dir);
    world_remove_dir(dir);
}

/* The first call counts, the second lists; without memory for its report the answer still succeeds.
 */
Test(sched_memory, an_answer_goes_out_without_the_report_that_has_no_room) {
    struct world w;
    struct engine_job job = job_of(1, 30, 6, kv_of("h2o", ENGINE_REPORT_POSITIONS));
    open_crowd(&w, "portable", NULL);
    submit(&w, &job);
    world_fail(WORLD_REPORT, 1, ERR_NOMEM);
    run_until_idle(&w);
    cr_assert_not(world_fail_pending());
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    cr_assert(job.kv.lengths && !job.kv.positions && job.kv.kept_entries > 0);
    cr_assert_eq(w.sched.keeper.table.count, 1);
    engine_job_close(&job);
    world_close(&w);
}
