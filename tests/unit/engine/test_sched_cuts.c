/* Conversations that are cut, and the checkpoints that make it possible: a prompt that begins like
 * another one reads the rest alone, and its answer is bitwise the one without reuse. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/sample.h"
#include "tests/unit/engine/requests.h"

static const char *const policies[] = {"full", "streaming", "trimkv",     "global",  "gkv",
                                       "rkv",  "adakv",     "snapkv",     "cake",    "pyramidkv",
                                       "h2o",  "d2o",       "kvcompress", "morphkv", "ems"};
enum { POLICIES = sizeof policies / sizeof *policies };

static uint64_t state;

static int below(int n) {
    state = world_mix(state);
    return (int)(state % (uint64_t)n);
}

static struct engine_kv kv_of(const char *policy, int budget, int buffer, int chunk) {
    struct engine_kv kv = global(budget, buffer, chunk);
    kv.policy = policy;
    kv.report = ENGINE_REPORT_POSITIONS;
    return kv;
}

static void expect_same_cache(const struct engine_job *a, const struct engine_job *b) {
    cr_assert_eq(a->kv.kept_entries, b->kv.kept_entries);
    cr_assert_eq(memcmp(a->kv.lengths, b->kv.lengths, WORLD_STREAMS * sizeof *a->kv.lengths), 0);
    cr_assert_eq(memcmp(a->kv.positions, b->kv.positions,
                        (size_t)a->kv.kept_entries * sizeof *a->kv.positions),
                 0);
}

/* The same request without reuse, in a world of its own with other steps. */
static void expect_as_alone(struct engine_job *job, int rows, int sliding_window) {
    struct world w;
    struct engine_job alone = {.request = job->request};
    alone.request.kv.reuse = false;
    world_open(&w, &(struct world_options){.pages = 600,
                                           .sequences = 1,
                                           .conversations = 0,
                                           .rows = rows,
                                           .sliding_window = sliding_window});
    submit(&w, &alone);
    run_until_idle(&w);
    expect_same_answer(job, &alone);
    expect_same_cache(job, &alone);
    engine_job_close(&alone);
    world_close(&w);
}

/* Runs prompt `number`, of which the first `shared` tokens are prompt 0's and the next is not. */
static struct engine_job run(struct world *w, int number, int shared, int count, int max_tokens,
                             const struct engine_kv *kv) {
    struct engine_job job = job_of(number, count, max_tokens, *kv);
    int32_t *prompt = prompt_of(number, shared);
    prompt[shared] = 1 + number;
    job.request.prompt = prompt;
    submit(w, &job);
    run_until_idle(w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    return job;
}

/* Reuse of the first prompt changes no bit of the others' answers, whatever was evicted: by a
 * budget or, last, without one but with sliding windows. */
Test(cuts, an_answer_is_the_one_without_reuse) {
    for (int p = 0; p <= POLICIES; p++) {
        const char *policy = policies[p % POLICIES];
        long saved = 0, evicted = 0;
        for (int round = 0; round < 10; round++) {
            struct world w;
            if (test_leaves_out((size_t)round, 2)) continue;
            state = (uint64_t)(p * 1000 + round + 1);
            int budget = 8 + below(60), buffer = below(20), chunk = 1 + below(64);
            int sliding_window = p == POLICIES ? budget : 0;
            struct engine_kv kv = kv_of(policy, budget, buffer, chunk);
            int first = 20 + below(160), shared = 1 + below(first - 2);
            world_open(&w, &(struct world_options){.pages = 600,
                                                   .sequences = 2,
                                                   .conversations = 8,
                                                   .rows = 70,
                                                   .sliding_window = sliding_window});
            struct engine_job jobs[3] = {run(&w, 0, shared, first, 1 + below(40), &kv)};
            for (int i = 1; i < 3; i++) {
                jobs[i] = run(&w, i, shared, shared + 1 + below(100), 1 + below(30), &kv);
                saved += jobs[i].cached_tokens;
            }
            world_close(&w);
            for (int i = 0; i < 3; i++) {
                expect_as_alone(&jobs[i], 10 + below(80), sliding_window);
                evicted += jobs[i].kv.evicted_entries;
                engine_job_close(&jobs[i]);
            }
        }
        cr_assert_gt(saved, test_sample() ? 0 : 20, "%s: %ld", policy, saved);
        cr_assert_eq(evicted > 0, p > 0, "%s", policy);
    }
}

/* Runs a prompt as it is given, in the space of the others. */
static struct engine_job run_prompt(struct world *w, const int32_t *prompt, int count,
                                    int max_tokens, const struct engine_kv *kv) {
    struct engine_job job = job_of(0, count, max_tokens, *kv);
    job.request.prompt = prompt;
    submit(w, &job);
    run_until_idle(w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    return job;
}

/* A template leaves reasoning out of the next prompt, and the answer behind it is read again. With
 * a budget the reasoning had taken the place of entries of the prompt; they are back. */
Test(cuts, an_answer_that_is_dropped_leaves_no_gaps) {
    static const char *const some[] = {"streaming", "global", "trimkv"};
    static int32_t next[140];
    for (size_t p = 0; p < sizeof some / sizeof *some; p++) {
        struct engine_kv kv = kv_of(some[p], 20, 8, 128);
        struct world w;
        world_open(&w, &(struct world_options){
                           .pages = 600, .sequences = 1, .conversations = 8, .rows = 70});
        struct engine_job first = run(&w, 0, 99, 100, 60, &kv);
        memcpy(next, first.request.prompt, 100 * sizeof *next);
        for (int i = 0; i < 40; i++) next[100 + i] = 1 + i % 7;
        next[100] = first.choice[0].tokens[0].token == 1 ? 2 : 1;
        struct engine_job second = run_prompt(&w, next, 140, 30, &kv);
        cr_assert_eq(second.cached_tokens, 100, "%s", some[p]);
        world_close(&w);
        expect_as_alone(&second, 70, 0);
        engine_job_close(&first);
        engine_job_close(&second);
    }
}

/* A turn that drops the end of an answer drops the evictions of that end: a later cut of the turn
 * reserves and evicts as the turn itself did. */
Test(cuts, an_eviction_of_dropped_tokens_is_none_of_the_new_turn) {
    static int32_t second[180], third[172];
    struct engine_kv kv = kv_of("streaming", 20, 64, 128);
    struct engine_job thirds[2];
    for (int with_second = 0; with_second < 2; with_second++) {
        struct world w;
        world_open(&w, &(struct world_options){
                           .pages = 600, .sequences = 1, .conversations = 8, .rows = 70});
        struct engine_job first = run(&w, 0, 99, 100, 67, &kv);
        memcpy(second, first.request.prompt, 100 * sizeof *second);
        for (int i = 0; i < 80; i++)
            second[100 + i] = i < 20 ? first.choice[0].tokens[i].token : 1 + i % 7;
        memcpy(third, second, 170 * sizeof *third);
        third[170] = second[170] + 1;
        third[171] = 2;
        if (with_second) {
            struct engine_job job = run_prompt(&w, second, 180, 10, &kv);
            cr_assert_eq(job.cached_tokens, 120);
            engine_job_close(&job);
        }
        thirds[with_second] = run_prompt(&w, third, 172, 50, &kv);
        cr_assert_geq(thirds[with_second].cached_tokens, 120);
        engine_job_close(&first);
        world_close(&w);
    }
    cr_assert_gt(thirds[1].cached_tokens, 120, "it was not cut: nothing was tested");
    expect_same_answer(&thirds[0], &thirds[1]);
    expect_same_cache(&thirds[0], &thirds[1]);
    for (int i = 0; i < 2; i++) engine_job_close(&thirds[i]);
}

/* An eviction at the end of a prompt, between two chunks, is none that another prompt with these
 * tokens would make there; one at the end of a chunk is. */
Test(cuts, an_eviction_at_the_end_of_its_prompt_is_its_own) {
    for (int extra = 0; extra < 2; extra++) {
        struct world w;
        struct engine_kv kv = kv_of("global", 20, 8, 16);
        world_open(&w, &(struct world_options){
                           .pages = 600, .sequences = 1, .conversations = 8, .rows = 70});
        int count = 48 + 10 * extra;
        struct engine_job job = run(&w, 0, count - 1, count, 1, &kv);
        const struct conversation *conv = w.sched.keeper.table.all;
        while (conv->id == 0 || conv->checkpoint) conv++;
        cr_assert_eq(conv->evicted_at, count, "nothing was tested");
        cr_assert_eq(conv->exact, extra == 0);
        engine_job_close(&job);
        world_close(&w);
    }
}

/* The turn before evicted in its answer; the next one drops that answer. With two ranks all that
 * stays may lie on the fuller one, and the reservation has to cover that. */
Test(cuts, a_cut_reserves_for_the_fuller_rank) {
    static int32_t prompt[300];
    struct world w;
    struct engine_kv kv = kv_of("global", 64, 16, 64);
    world_open(
        &w, &(struct world_options){.pages = 600, .sequences = 1, .conversations = 2, .rows = 4});
    struct engine_job first = run(&w, 0, 127, 128, 40, &kv);
    memcpy(prompt, first.request.prompt, 128 * sizeof *prompt);
    struct engine_job next = job_of(1, 300, 1, kv);
    for (int i = 128; i < 300; i++) prompt[i] = first.choice[0].tokens[0].token == 1 ? 2 : 1;
    next.request.prompt = prompt;
    struct reserve_shape *shape = &w.sched.options.shape;
    shape->ranks = 2;
    shape->rank_cap = 1.25f;
    const struct conversation *before = w.sched.keeper.table.all;
    while (!before->id || before->checkpoint) before++;
    struct reserve_turn turn = {.held = before->held,
                                .fullest = before->fullest,
                                .drops = true,
                                .tokens = 128,
                                .added = 172};
    submit(&w, &next);
    world_step(&w);
    cr_assert_eq(next.cached_tokens, 128);
    struct sequence *seq = &w.sched.sequences[w.sched.order[0]];
    int64_t peak = reserve_peak(&seq->kv, turn.held, turn.added, 0);
    cr_assert_eq(seq->pages_reserved, reserve_turn_pages(shape, &seq->kv, &turn, peak));
    turn.drops = false;
    cr_assert_gt(seq->pages_reserved, reserve_turn_pages(shape, &seq->kv, &turn, peak));
    atomic_store(&next.cancel, 1); /* the world has one rank, which needs more */
    run_until_idle(&w);
    engine_job_close(&first);
    engine_job_close(&next);
    world_close(&w);
}
