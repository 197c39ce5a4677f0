/* Prefixes: prompts that begin alike are read once, whether they come one after the other or at
 * once; who may share them; and how they leave. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/unit/engine/requests.h"

/* Rules that can be cut, that observe windows, and that add attention up. */
static const char *const policies[] = {"full", "streaming", "global", "snapkv",
                                       "rkv",  "h2o",       "d2o",    "ems"};
enum { POLICIES = sizeof policies / sizeof *policies };
enum { BEGIN = 150 }; /* tokens that the prompts have in common */

static struct engine_kv kv_of(const char *policy) {
    struct engine_kv kv = global(40, 8, 32);
    kv.policy = policy;
    return kv;
}

static void open_world(struct world *w, int sequences, int conversations) {
    world_open(
        w, &(struct world_options){
               .pages = 900, .sequences = sequences, .conversations = conversations, .rows = 70});
}

/* A job with prompt 0's first BEGIN tokens, which its border tells. */
static struct engine_job job_after(int number, int max_tokens, struct engine_kv kv) {
    struct engine_job job = job_of(number, BEGIN + 20, max_tokens, kv);
    int32_t *prompt = prompt_of(number, BEGIN);
    prompt[BEGIN] = 1 + number; /* the prompts differ from here on */
    job.request.prompt = prompt;
    job.request.border = BEGIN;
    return job;
}

static void end_as_alone(struct engine_job *job) {
    struct engine_job alone = {.request = job->request};
    alone.request.kv.reuse = false;
    run_alone(&alone);
    cr_assert_eq(finish_of(job), ENGINE_FINISH_LENGTH);
    expect_same_answer(job, &alone);
    cr_assert_eq(job->kv.kept_entries, alone.kv.kept_entries);
    engine_job_close(&alone);
    engine_job_close(job);
}

static void step_until_read(struct world *w, const struct engine_job *job, uint32_t tokens) {
    for (int i = 0; i < 1000 && atomic_load(&job->prompt_read) < tokens; i++) world_step(w);
}

static const struct conversation *find_prefix(const struct world *w) {
    const struct conversation_table *table = &w->sched.keeper.table;
    for (int i = 0; i < table->capacity; i++)
        if (table->all[i].id != 0 && table->all[i].prefix) return &table->all[i];
    return NULL;
}

/* The first still answers when the second comes; every rule finds all tokens up to the border. */
Test(prefixes, a_second_prompt_reads_only_what_is_its_own) {
    for (int p = 0; p < POLICIES; p++) {
        struct world w;
        struct engine_job first = job_after(0, 40, kv_of(policies[p]));
        struct engine_job second = job_after(1, 9, kv_of(policies[p]));
        open_world(&w, 2, 6);
        submit(&w, &first);
        step_until_read(&w, &first, BEGIN + 20);
        submit(&w, &second);
        run_until_idle(&w);
        cr_assert_eq(first.cached_tokens, 0);
        cr_assert_eq(second.cached_tokens, BEGIN, "%s: %d", policies[p], second.cached_tokens);
        cr_assert_eq(w.sched.counters.prefixes, 1);
        cr_assert_eq(w.sched.counters.prefix_hits, 1);
        cr_assert_eq(w.sched.counters.prefix_waits, 0);
        world_close(&w);
        end_as_alone(&first);
        end_as_alone(&second);
    }
}

Test(prefixes, prompts_that_come_at_once_are_read_once) {
    enum { JOBS = 7 };
    for (int p = 0; p < POLICIES; p++) {
        struct world w;
        struct engine_job jobs[JOBS];
        open_world(&w, JOBS, 12);
        for (int i = 0; i < JOBS; i++) {
            jobs[i] = job_after(i, 5 + i, kv_of(policies[p]));
            jobs[i].request.border = 0; /* the waiting jobs show where prompts part */
            submit(&w, &jobs[i]);
        }
        run_until_idle(&w);
        cr_assert_eq(w.sched.counters.computed_tokens, BEGIN + JOBS * 20, "%s", policies[p]);
        cr_assert_eq(w.sched.counters.prefix_waits, JOBS - 1);
        cr_assert_eq(w.sched.counters.prefix_hits, JOBS - 1);
        world_close(&w);
        for (int i = 0; i < JOBS; i++) end_as_alone(&jobs[i]);
    }
}

/* Other spaces (keys, salts) and other settings share nothing and wait for nobody. */
Test(prefixes, walls_hold) {
    for (int other = 0; other < 2; other++) {
        struct world w;
        struct engine_job first = job_after(0, 5, kv_of("global"));
        struct engine_job jobs[2] = {job_after(1, 5, kv_of("global")),
                                     job_after(2, 5, kv_of("global"))};
        open_world(&w, 2, 6);
        for (int i = 0; i < 2; i++) {
            if (other == 0) jobs[i].request.space[3] = (uint8_t)(1 + i);
            if (other == 1) jobs[i].request.kv.budget += 1 + i;
        }
        submit(&w, &first);
        submit(&w, &jobs[0]);
        run_until_idle(&w);
        submit(&w, &jobs[1]);
        run_until_idle(&w);
        cr_assert_eq(w.sched.counters.prefix_waits, 0);
        cr_assert_eq(w.sched.counters.prefix_hits, 0);
        cr_assert(jobs[0].cached_tokens == 0 && jobs[1].cached_tokens == 0);
        world_close(&w);
        engine_job_close(&first);
        for (int i = 0; i < 2; i++) end_as_alone(&jobs[i]);
    }
}

Test(prefixes, a_request_that_keeps_nothing_leaves_none) {
    struct world w;
    struct engine_job first = job_after(0, 5, kv_of("global"));
    struct engine_job second = job_after(1, 5, kv_of("global"));
    first.request.kv.retain = false;
    open_world(&w, 2, 6);
    submit(&w, &first);
    submit(&w, &second);
    run_until_idle(&w);
    cr_assert_eq(w.sched.counters.prefix_waits, 0);
    cr_assert(second.cached_tokens == 0 && w.sched.counters.prefixes == 1);
    world_close(&w);
    end_as_alone(&first);
    end_as_alone(&second);
}

/* Where no eviction-free state is left to cut, the second prompt shows the place and the third one
 * finds it read. */
Test(prefixes, a_place_where_two_prompts_parted_is_kept_for_a_third) {
    struct world w;
    struct engine_job jobs[3];
    open_world(&w, 2, 6);
    for (int i = 0; i < 3; i++) {
        jobs[i] = job_after(i, 5, kv_of("h2o"));
        jobs[i].request.border = 0;
        submit(&w, &jobs[i]);
        run_until_idle(&w);
        cr_assert_eq(jobs[i].cached_tokens, i < 2 ? 0 : BEGIN);
    }
    world_close(&w);
    for (int i = 0; i < 3; i++) end_as_alone(&jobs[i]);
}

/* The one that reads vanishes: those that waited go on by themselves, the next one reading. */
Test(prefixes, a_reader_that_vanishes_is_replaced) {
    struct world w;
    struct engine_job jobs[3];
    open_world(&w, 3, 6);
    for (int i = 0; i < 3; i++) {
        jobs[i] = job_after(i, 5, kv_of("global"));
        submit(&w, &jobs[i]);
    }
    world_step(&w);
    cr_assert_eq(w.sched.running, 1);
    atomic_store(&jobs[0].cancel, 1);
    world_step(&w);
    cr_assert_eq(w.sched.running, 1);
    run_until_idle(&w);
    cr_assert(finish_of(&jobs[0]) == ENGINE_FINISH_ABORT && jobs[1].cached_tokens == 0);
    cr_assert_eq(jobs[2].cached_tokens, BEGIN);
    world_close(&w);
    engine_job_close(&jobs[0]);
    for (int i = 1; i < 3; i++) end_as_alone(&jobs[i]);
}

/* A reader that is slow is waited for no longer than a head is passed. */
Test(prefixes, a_wait_is_bounded) {
    struct world w;
    struct engine_job first = job_of(0, 600, 2, full()), second = job_of(1, 500, 2, full());
    second.request.prompt = prompt_of(1, 450);
    world_open(
        &w, &(struct world_options){.pages = 900, .sequences = 2, .conversations = 4, .rows = 3});
    submit(&w, &first);
    submit(&w, &second);
    for (int i = 0; i <= SCHED_PASS_STEPS; i++) {
        cr_assert_eq(atomic_load(&second.admitted), 0, "step %d", i);
        world_step(&w);
    }
    cr_assert_eq(atomic_load(&second.admitted), 1);
    cr_assert_lt(atomic_load(&first.prompt_read), 450, "the reader was not slow");
    run_until_idle(&w);
    engine_job_close(&first);
    engine_job_close(&second);
    world_close(&w);
}

/* While a prompt is read, streams end beside it, each of which might make room for a waiting job.
 * Jobs that wait for the prompt's beginning are not searched for each time. */
Test(prefixes, jobs_that_wait_are_not_searched_for_again) {
    enum { WAITERS = 10, STREAMS = 14 };
    struct world w;
    struct engine_job streams[STREAMS], jobs[1 + WAITERS];
    open_world(&w, STREAMS + 1 + WAITERS, 4);
    w.sched.options.rows_max = STREAMS + WAITERS + 4; /* a slow reader */
    for (int i = 0; i < STREAMS; i++) {
        streams[i] = job_of(15, 1, 3 + i, full());
        streams[i].request.kv.reuse = streams[i].request.kv.retain = false;
        submit(&w, &streams[i]);
    }
    for (int i = 0; i <= WAITERS; i++) {
        jobs[i] = job_of(i, 600, 2, kv_of("global"));
        jobs[i].request.prompt = prompt_of(i, 450);
        submit(&w, &jobs[i]);
    }
    uint64_t round = w.sched.keeper.changes;
    step_until_read(&w, &jobs[0], 440);
    cr_assert_geq(w.sched.keeper.changes - round, STREAMS, "nothing changed meanwhile");
    cr_assert_eq(w.sched.counters.prefix_waits, WAITERS);
    cr_assert_leq(w.sched.counters.searches, 1 + 2 * WAITERS);
    run_until_idle(&w);
    cr_assert_eq(w.sched.counters.prefix_hits, WAITERS);
    cr_assert_leq(w.sched.counters.searches, 1 + 4 * WAITERS);
    world_close(&w);
    for (int i = 0; i < STREAMS; i++) engine_job_close(&streams[i]);
    for (int i = 0; i <= WAITERS; i++) end_as_alone(&jobs[i]);
}

/* The wait of a job that passes the head ends by itself, although nothing changes then. Two long
 * prompts keep the awaited one from being read; the head has no room. */
Test(prefixes, a_passing_job_ends_its_wait_itself) {
    struct world w;
    struct engine_job jobs[] = {job_of(5, 580, 60, full()), job_of(6, 580, 50, full()),
                                job_of(0, 291, 2, full()), job_of(2, 580, 50, full()),
                                job_of(1, 72, 1, full())};
    struct engine_job *head = &jobs[3], *passing = &jobs[4];
    head->request.choices = 2;
    passing->request.prompt = prompt_of(1, 66);
    world_open(
        &w, &(struct world_options){.pages = 114, .sequences = 4, .conversations = 4, .rows = 7});
    for (int i = 0; i < 5; i++) submit(&w, &jobs[i]);
    for (int i = 0; i <= SCHED_PASS_STEPS; i++) {
        cr_assert_eq(atomic_load(&passing->admitted), 0, "step %d", i);
        world_step(&w);
        cr_assert(w.sched.head == head && atomic_load(&jobs[2].prompt_read) == 0);
    }
    cr_assert_eq(atomic_load(&passing->admitted), 1);
    run_until_idle(&w);
    for (int i = 0; i < 5; i++) engine_job_close(&jobs[i]);
    world_close(&w);
}

/* A prefix that nobody used goes before any conversation; one that was used stays with them. */
Test(prefixes, unused_ones_make_room_first) {
    for (int used = 0; used < 2; used++) {
        struct world w;
        open_world(&w, 1, 4);
        turn(&w, 7, 0, 30, full());
        for (int i = 0; i <= used; i++) {
            struct engine_job job = job_after(i, 2, kv_of("h2o"));
            submit(&w, &job);
            run_until_idle(&w);
            engine_job_close(&job);
        }
        cr_assert(find_prefix(&w));
        for (int i = 3; i < 5 - used; i++) turn(&w, i, 0, 30, full());
        cr_assert_eq(turns_kept(&w), used ? 3 : 4);
        cr_assert_eq(find_prefix(&w) != NULL, used);
        cr_assert_eq(w.sched.counters.prefixes_dropped, 1 - used);
        struct engine_job oldest = job_of(7, 60, 2, full());
        submit(&w, &oldest);
        run_until_idle(&w);
        cr_assert_eq(oldest.cached_tokens >= 30, used == 0, "the least recently used one goes");
        engine_job_close(&oldest);
        world_close(&w);
    }
}

static uint64_t a_conversation(const struct world *w) {
    const struct conversation_table *table = &w->sched.keeper.table;
    for (int i = 0; i < table->capacity; i++)
        if (table->all[i].id != 0 && !table->all[i].checkpoint) return table->all[i].id;
    return 0;
}

/* A prefix goes with the last conversation that begins with it, also where the same prompt came
 * again and used it. */
Test(prefixes, deleting_a_conversation_deletes_its_prefix) {
    const struct { int numbers[2], count; } cases[] = {{{0}, 1}, {{0, 1}, 2}, {{0, 0}, 2}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct world w;
        open_world(&w, 1, 6);
        for (int i = 0; i < cases[c].count; i++) {
            struct engine_job job = job_after(cases[c].numbers[i], 2 + i, kv_of("h2o"));
            submit(&w, &job);
            run_until_idle(&w);
            cr_assert_eq(job.cached_tokens, i > 0 ? BEGIN : 0);
            engine_job_close(&job);
        }
        cr_assert_eq(turns_kept(&w), cases[c].count);
        for (int i = 0; i < cases[c].count; i++) {
            cr_assert(find_prefix(&w), "case %zu, %d deleted", c, i);
            cr_assert_eq(keeper_delete(&w.sched.keeper, a_conversation(&w)), 0);
            world_check(&w);
        }
        cr_assert_not(find_prefix(&w), "case %zu", c);
        world_close(&w);
    }
}
