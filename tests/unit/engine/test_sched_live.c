/* Live reports: what a reader sees while a job runs leads, token by token, to what the job's end
 * reports. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/unit/engine/requests.h"

static const struct world_options options = {
    .pages = 800, .positions = 160, .sequences = 3, .conversations = 4, .rows = 50};

static struct engine_kv live(const char *policy) {
    struct engine_kv kv = global(20, 6, 16);
    kv.policy = policy;
    if (strcmp(policy, "streaming") == 0) kv.overflow = ENGINE_OVERFLOW_SHIFT;
    kv.report = ENGINE_REPORT_LENGTHS;
    kv.live = true;
    return kv;
}

static struct engine_job live_job(int number, int prompt, int answer, const char *policy) {
    return job_of(number, prompt, answer, live(policy));
}

/* The newest report, copied: NULL as `lengths` before the first. */
struct seen {
    int32_t tokens, lengths[WORLD_STREAMS];
    int reports;
};

static void look(struct engine_job *job, struct seen *seen) {
    const struct engine_held *held = engine_see_held(job);
    if (!held) return;
    cr_assert_gt(held->tokens, seen->tokens);
    seen->tokens = held->tokens;
    seen->reports++;
    memcpy(seen->lengths, held->lengths, sizeof seen->lengths);
}

static void expect_leads_to_end(const struct engine_job *job, const struct seen *seen) {
    for (int i = 0; i < WORLD_STREAMS; i++)
        cr_assert_eq(seen->lengths[i] + job->kv.seen_tokens - seen->tokens, job->kv.lengths[i]);
}

Test(sched_live, reports_lead_to_the_end) {
    static const char *const policies[] = {"global", "streaming", "snapkv", "full", "h2o"};
    for (size_t p = 0; p < sizeof policies / sizeof *policies; p++) {
        struct world w;
        world_open(&w, &options);
        struct engine_job job = live_job(1, 70, 40, policies[p]);
        struct engine_job other = job_of(2, 90, 40, global(20, 6, 16)); /* asks for none */
        struct seen seen = {0};
        submit(&w, &job);
        submit(&w, &other);
        while (!sched_idle(&w.sched)) {
            cr_assert_not(world_step(&w));
            look(&job, &seen);
        }
        expect_leads_to_end(&job, &seen);
        cr_assert_null(other.live);
        bool evicts = strcmp(policies[p], "full") != 0;
        cr_assert(evicts ? seen.reports > 5 : seen.reports == 1, "%s: %d", policies[p],
                  seen.reports);
        engine_job_close(&job);
        engine_job_close(&other);
        world_close(&w);
    }
}

/* Shifts change the lengths, too; so does a new turn, which begins with what was kept. */
Test(sched_live, shifts_and_turns_are_reported) {
    struct world w;
    world_open(&w, &options);
    struct engine_job first = live_job(1, 100, 90, "streaming");
    submit(&w, &first);
    run_until_idle(&w);
    struct seen seen = {0};
    look(&first, &seen);
    cr_assert_gt(first.kv.shifts, 0);
    expect_leads_to_end(&first, &seen);
    struct engine_job next = live_job(1, 120, 2, "streaming");
    submit(&w, &next);
    cr_assert_not(world_step(&w));
    struct seen begun = {0};
    look(&next, &begun);
    cr_assert_gt(next.cached_tokens, 0);
    cr_assert_gt(begun.tokens, next.cached_tokens);
    run_until_idle(&w);
    engine_job_close(&first);
    engine_job_close(&next);
    world_close(&w);
}

/* A reader that does not look finds only the newest, once; and keeps what it reads. */
Test(sched_live, the_newest_report_replaces_older_ones) {
    struct world w;
    world_open(&w, &options);
    struct engine_job job = live_job(1, 20, 60, "global");
    submit(&w, &job);
    const struct engine_held *held = NULL;
    while (!held) {
        cr_assert_not(world_step(&w));
        held = engine_see_held(&job);
    }
    int32_t tokens = held->tokens, length = held->lengths[0];
    cr_assert_null(engine_see_held(&job));
    run_until_idle(&w);
    cr_assert_eq(held->tokens, tokens);
    cr_assert_eq(held->lengths[0], length);
    struct seen seen = {0};
    look(&job, &seen);
    expect_leads_to_end(&job, &seen);
    cr_assert_null(engine_see_held(&job));
    engine_job_close(&job);
    world_close(&w);
}

/* The answer goes on without its live report, and is the same. */
Test(sched_live, a_failing_report_is_left_out) {
    struct engine_job jobs[2];
    for (int i = 0; i < 2; i++) {
        struct world w;
        world_open(&w, &options);
        jobs[i] = live_job(1, 30, 40, "global");
        submit(&w, &jobs[i]);
        if (i == 1) world_fail(WORLD_REPORT, 0, ERR_NOMEM);
        run_until_idle(&w);
        cr_assert_not(world_fail_pending());
        struct seen seen = {0};
        look(&jobs[i], &seen);
        expect_leads_to_end(&jobs[i], &seen);
        world_close(&w);
    }
    expect_same_answer(&jobs[0], &jobs[1]);
    engine_job_close(&jobs[0]);
    engine_job_close(&jobs[1]);
}
