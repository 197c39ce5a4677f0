/* Tests engine/sched.c on the real cache with the fake model of tests/sim/world.h: order,
 * admission, cancelling, conversations, scores, and every failure of backend and memory. The storms
 * are tests/sim/sim_sched.c. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tests/sim/world.h"

/* ---- Requests -------------------------------------------------------------------------------- */

static int32_t prompts[16][WORLD_POSITIONS];

/* A prompt of its own for each number; `first` tokens of prompt 0 in front of it. */
static const int32_t *prompt_of(int number, int shared) {
    int32_t *prompt = prompts[number];
    for (int i = 0; i < WORLD_POSITIONS; i++) {
        uint64_t key = (uint64_t)(i < shared ? 0 : number) * 1000 + (uint64_t)i;
        prompt[i] = 1 + (int32_t)(world_mix(key) % (WORLD_VOCAB - 1));
    }
    return prompt;
}

static struct engine_kv full(void) {
    return (struct engine_kv){.policy = "full",
                              .budget = -1,
                              .buffer = -1,
                              .chunk = -1,
                              .sinks = -1,
                              .recent = -1,
                              .reuse = true,
                              .retain = true};
}

static struct engine_kv global(int budget, int buffer, int chunk) {
    struct engine_kv kv = full();
    kv.policy = "global";
    kv.budget = budget;
    kv.buffer = buffer;
    kv.chunk = chunk;
    return kv;
}

static struct engine_job job_of(int number, int prompt_count, int max_tokens, struct engine_kv kv) {
    return (struct engine_job){.request = {.prompt = prompt_of(number, 0),
                                           .prompt_count = prompt_count,
                                           .max_tokens = max_tokens,
                                           .temperature = 1,
                                           .top_p = 1,
                                           .repetition = 1,
                                           .seed = (uint64_t)number,
                                           .top_logprobs = -1,
                                           .ignore_eos = true,
                                           .kv = kv}};
}

static int finish_of(const struct engine_job *job) {
    return atomic_load(&job->choice[0].finish);
}

static int count_of(const struct engine_job *job) {
    return (int)atomic_load(&job->choice[0].token_count);
}

static void submit(struct world *w, struct engine_job *job) {
    cr_assert_eq(world_submit(w, job), 0);
}

static void run_until_idle(struct world *w) {
    for (int step = 0; !sched_idle(&w->sched); step++) {
        cr_assert_lt(step, 5000, "does not end");
        cr_assert_not(world_step(w));
    }
}

/* Runs one job alone in a world of its own; the caller closes the job. */
static void run_alone(struct engine_job *job) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 1, .conversations = 1, .rows = 50});
    submit(&w, job);
    run_until_idle(&w);
    world_close(&w);
}

static void expect_same_answer(const struct engine_job *a, const struct engine_job *b) {
    cr_assert_eq(finish_of(a), finish_of(b));
    cr_assert_eq(count_of(a), count_of(b));
    for (int i = 0; i < count_of(a); i++)
        cr_assert_eq(a->choice[0].tokens[i].token, b->choice[0].tokens[i].token, "token %d", i);
}

static int64_t pages_used(const struct world *w) {
    struct kern_cache_stats stats;
    w->ops.cache_stats(w->kern, &stats);
    return stats.pages_used;
}

static int slots_per_page(void) {
    struct kern_cache_info info;
    struct world w;
    world_open(&w,
               &(struct world_options){.pages = 4, .sequences = 1, .conversations = 0, .rows = 2});
    w.ops.cache_info(KERN_F32, WORLD_DIM, &info);
    world_close(&w);
    return info.page_slots;
}

/* ---- Order ----------------------------------------------------------------------------------- */

Test(sched, decode_first_then_prompts_oldest_first) {
    struct world w;
    struct engine_job jobs[4];
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 4, .conversations = 4, .rows = 10});
    for (int i = 0; i < 4; i++) {
        jobs[i] = job_of(i, i < 2 ? 3 : 40, i < 2 ? 60 : 3, full());
        submit(&w, &jobs[i]);
        if (i == 1) cr_assert_not(world_step(&w)); /* 0 and 1 generate from here on */
    }
    for (int step = 1; finish_of(&jobs[2]) == ENGINE_RUNNING; step++) {
        cr_assert_not(world_step(&w));
        /* Every generating sequence has a token in every step, whatever prompts wait. */
        cr_assert(count_of(&jobs[0]) == step + 1 && count_of(&jobs[1]) == step + 1);
        cr_assert(w.spans[0].count == 1 && w.spans[1].count == 1);
        cr_assert_leq(w.rows, 10);
        if (step <= 4) { /* the older prompt takes all that is left */
            cr_assert_eq(w.span_count, 3);
            cr_assert_eq(w.spans[2].count, 8);
            cr_assert_eq(w.rows, 10);
        }
        if (step == 6) { /* it generates now, and the next prompt has its turn */
            cr_assert_eq(count_of(&jobs[2]), 2);
            cr_assert(w.span_count == 4 && w.spans[2].count == 1 && w.spans[3].count == 7);
        }
    }
    run_until_idle(&w);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(finish_of(&jobs[i]), ENGINE_FINISH_LENGTH);
        engine_job_close(&jobs[i]);
    }
    world_close(&w);
}

Test(sched, first_come_first_served_and_nobody_passes) {
    struct world w;
    struct engine_job jobs[3];
    int page = slots_per_page();
    /* Room for four pages a stream: the first takes two, the second needs four, the third one. */
    int prompt[3] = {page + 1, 3 * page + 1, 4};
    world_open(
        &w, &(struct world_options){
                .pages = 4 * WORLD_STREAMS, .sequences = 4, .conversations = 0, .rows = 4 * page});
    for (int i = 0; i < 3; i++) {
        jobs[i] = job_of(i, prompt[i], 5, full());
        submit(&w, &jobs[i]);
    }
    while (finish_of(&jobs[0]) == ENGINE_RUNNING) {
        cr_assert_not(world_step(&w));
        cr_assert_eq(atomic_load(&jobs[0].admitted), 1);
        cr_assert_eq(atomic_load(&jobs[1].admitted), 0);
        cr_assert_eq(atomic_load(&jobs[2].admitted), 0, "the small one passed the big one");
    }
    cr_assert_eq(w.sched.waiting, 2);
    cr_assert_not(world_step(&w));
    cr_assert_eq(atomic_load(&jobs[1].admitted), 1);
    cr_assert_eq(atomic_load(&jobs[2].admitted), 0);
    cr_assert_eq(w.sched.pages_reserved, 4 * WORLD_STREAMS);
    run_until_idle(&w);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(finish_of(&jobs[i]), ENGINE_FINISH_LENGTH);
        engine_job_close(&jobs[i]);
    }
    world_close(&w);
}

/* A cancelled head must not leave the next one waiting for somebody to leave. */
Test(sched, the_next_is_tried_when_the_waiting_head_is_cancelled) {
    struct world w;
    struct engine_job jobs[3];
    int page = slots_per_page();
    int prompt[3] = {page + 1, 3 * page + 1, 4};
    world_open(
        &w, &(struct world_options){
                .pages = 4 * WORLD_STREAMS, .sequences = 4, .conversations = 0, .rows = 4 * page});
    for (int i = 0; i < 3; i++) {
        jobs[i] = job_of(i, prompt[i], 20, full());
        submit(&w, &jobs[i]);
    }
    for (int i = 0; i < 3; i++) cr_assert_not(world_step(&w));
    cr_assert_eq(w.sched.running, 1);
    atomic_store(&jobs[1].cancel, 1);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&jobs[1]), ENGINE_FINISH_ABORT);
    cr_assert(w.sched.running == 2 && count_of(&jobs[2]) == 1);
    run_until_idle(&w);
    for (int i = 0; i < 3; i++) engine_job_close(&jobs[i]);
    world_close(&w);
}

Test(sched, an_exact_fit_is_admitted_and_runs) {
    int page = slots_per_page();
    /* The last token of an answer is never appended: prompt + max - 1 entries fill two pages. */
    struct engine_job job = job_of(1, 2 * page - 9, 10, full());
    struct world w;
    struct kv_params kv;
    struct fault fault = {0};
    world_open(&w, &(struct world_options){
                       .pages = 2 * WORLD_STREAMS, .sequences = 1, .conversations = 0, .rows = 50});
    cr_assert_eq(sched_resolve_kv(&job.request.kv, &w.sched.options.kv, &kv, &fault), 0);
    cr_assert_eq(sched_check(&w.sched.options, &job.request, &kv, &fault), 0);
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    cr_assert_eq(job.kv.seen_tokens, 2 * page);
    engine_job_close(&job);
    job = job_of(1, 2 * page - 8, 10, full());
    cr_assert_eq(sched_check(&w.sched.options, &job.request, &kv, &fault), ERR_LIMIT);
    submit(&w, &job); /* a caller that did not check: refused alone */
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_ERROR);
    cr_assert_eq(job.fault.code, ERR_LIMIT);
    engine_job_close(&job);
    world_close(&w);
}

/* ---- Small numbers --------------------------------------------------------------------------- */

static void expect_finish(int prompt_count, int max_tokens, struct engine_kv kv, bool echo) {
    struct engine_job job = job_of(2, prompt_count, max_tokens, kv);
    job.request.prompt_logprobs = echo;
    job.request.top_logprobs = echo ? 2 : -1;
    run_alone(&job);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    cr_assert_eq(count_of(&job), max_tokens);
    cr_assert_eq(job.kv.seen_tokens, prompt_count + (max_tokens > 0 ? max_tokens - 1 : 0));
    cr_assert_eq(job.kv.kept_entries + job.kv.evicted_entries,
                 (int64_t)WORLD_STREAMS * job.kv.seen_tokens);
    engine_job_close(&job);
}

Test(sched, the_smallest_requests) {
    struct engine_kv tight = global(1, 0, 1);
    tight.sinks = 0;
    for (int echo = 0; echo < 2; echo++) {
        expect_finish(1, 0, full(), echo);
        expect_finish(1, 1, full(), echo);
        expect_finish(2, 0, full(), echo);
        expect_finish(1, 3, tight, echo);
        expect_finish(7, 5, tight, echo);
        expect_finish(7, 0, tight, echo);
        expect_finish(70, 30, global(8, 0, 64), echo);
        expect_finish(64, 1, global(8, 0, 64), echo);
    }
}

Test(sched, budgets_hold_after_every_step) {
    struct engine_job job = job_of(3, 100, 60, global(20, 6, 16));
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 1, .conversations = 1, .rows = 7});
    submit(&w, &job);
    while (!sched_idle(&w.sched)) {
        cr_assert_not(world_step(&w));
        if (w.sched.running == 0) break;
        const struct sequence *seq = &w.sched.sequences[w.sched.order[0]];
        struct kern_report held = {0};
        cr_assert_eq(w.real->report(w.kern, seq->slot, &held), 0);
        cr_assert_eq(held.entries, (size_t)seq->due.held * WORLD_STREAMS);
        cr_assert_leq(seq->due.held, seq_prefilling(seq) ? 20 + 16 : 20 + 6);
    }
    cr_assert_eq(job.kv.seen_tokens, 159);
    cr_assert_leq(job.kv.kept_entries, (20 + 6) * WORLD_STREAMS);
    engine_job_close(&job);
    world_close(&w);
}

/* Every policy: what the trace says is gone and what is held make up all that was appended. */
static void expect_whole(const struct engine_job *job) {
    static uint8_t seen[WORLD_STREAMS][WORLD_POSITIONS];
    int64_t evicted = 0;
    int32_t last = 0;
    memset(seen, 0, sizeof seen);
    for (const struct engine_eviction *e = job->kv.evictions; e; e = e->next) {
        const int32_t *pos = e->positions;
        for (int stream = 0; stream < WORLD_STREAMS; stream++)
            for (int i = 0; i < e->lengths[stream]; i++, evicted++) seen[stream][*pos++]++;
        cr_assert_gt(e->tokens, last);
        last = e->tokens;
    }
    cr_assert_eq(evicted, job->kv.evicted_entries);
    const int32_t *pos = job->kv.positions;
    for (int stream = 0; stream < WORLD_STREAMS; stream++)
        for (int i = 0; i < job->kv.lengths[stream]; i++) seen[stream][*pos++]++;
    for (int stream = 0; stream < WORLD_STREAMS; stream++)
        for (int i = 0; i < job->kv.seen_tokens; i++)
            cr_assert_eq(seen[stream][i], 1, "stream %d position %d", stream, i);
}

Test(sched, a_trace_tells_what_was_evicted_when) {
    for (int index = 1; policy_at(index); index++) {
        struct engine_job job = job_of(3, 100, 60, global(20, 6, 16));
        struct world w;
        job.request.kv.policy = policy_at(index)->name;
        job.request.kv.report = ENGINE_REPORT_TRACE;
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 1, .conversations = 1, .rows = 7});
        submit(&w, &job);
        run_until_idle(&w);
        cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH, "%s", job.request.kv.policy);
        cr_assert_eq(job.kv.evictions_lost, 0);
        expect_whole(&job);
        engine_job_close(&job);
        world_close(&w);
    }
}

/* Without memory for a record the eviction happens all the same. */
Test(sched, a_lost_trace_is_counted) {
    struct engine_job job = job_of(3, 16, 30, global(10, 3, 16));
    struct world w;
    job.request.kv.report = ENGINE_REPORT_TRACE;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 1, .conversations = 1, .rows = 50});
    submit(&w, &job);
    cr_assert_not(world_step(&w)); /* the prompt, and its eviction */
    cr_assert_not_null(job.kv.evictions);
    while (count_of(&job) < 8) cr_assert_not(world_step(&w)); /* the backend has all its rooms */
    while (job.kv.evictions_lost == 0) {
        bool failed;
        mem_fail_after(0);
        sched_step(&w.sched, &failed);
        mem_fail_after(-1);
        cr_assert_not(failed);
    }
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    cr_assert_eq(job.kv.evictions_lost, 1);
    cr_assert_not_null(job.kv.evictions->next);
    engine_job_close(&job);
    world_close(&w);
}

Test(sched, min_tokens_keeps_eos_away) {
    struct engine_job job = job_of(4, 5, 30, full());
    struct engine_bias bias[] = {{0, 100}}; /* EOS, always */
    job.request.ignore_eos = false;
    job.request.bias = bias;
    job.request.bias_count = 1;
    job.request.min_tokens = 11;
    run_alone(&job);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_STOP);
    cr_assert_eq(count_of(&job), 12);
    cr_assert_eq(job.choice[0].stop_token, 0);
    engine_job_close(&job);
}

/* ---- Cancelling ------------------------------------------------------------------------------ */

Test(sched, cancel_while_waiting_gives_the_place_back) {
    struct world w;
    struct engine_job jobs[4];
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 1, .conversations = 1, .rows = 8});
    for (int i = 0; i < 4; i++) {
        jobs[i] = job_of(i, 6, 4, full());
        submit(&w, &jobs[i]);
    }
    cr_assert_not(world_step(&w));
    cr_assert_eq(atomic_load(&w.places), 3);
    atomic_store(&jobs[2].cancel, 1); /* in the middle */
    atomic_store(&jobs[3].cancel, 1); /* the last */
    cr_assert_not(world_step(&w));
    cr_assert_eq(atomic_load(&w.places), 1);
    cr_assert(finish_of(&jobs[2]) == ENGINE_FINISH_ABORT &&
              finish_of(&jobs[3]) == ENGINE_FINISH_ABORT);
    engine_job_close(&jobs[3]);
    jobs[3] = job_of(3, 6, 4, full()); /* the list's end is where it should be */
    submit(&w, &jobs[3]);
    run_until_idle(&w);
    cr_assert(finish_of(&jobs[1]) == ENGINE_FINISH_LENGTH &&
              finish_of(&jobs[3]) == ENGINE_FINISH_LENGTH);
    for (int i = 0; i < 4; i++) engine_job_close(&jobs[i]);
    world_close(&w);
}

/* Cancelled after `steps` steps: one step later it is gone with its pages, and others go on. */
static void cancel_after(int steps) {
    struct world w;
    struct engine_job other = job_of(1, 5, 40, global(8, 4, 8));
    struct engine_job job = job_of(2, 60, 10, global(8, 4, 8)), same = other;
    run_alone(&same);
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 8});
    submit(&w, &other);
    submit(&w, &job);
    for (int i = 0; i < steps; i++) cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&job), ENGINE_RUNNING);
    atomic_store(&job.cancel, 1);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_ABORT);
    cr_assert(w.span_count == 1 && w.rows == 1, "a step still contained it");
    cr_assert_eq(w.sched.pages_reserved, w.sched.sequences[w.sched.order[0]].pages_reserved);
    cr_assert_eq(w.sched.conversations.count, 0, "an aborted request left a state");
    run_until_idle(&w);
    expect_same_answer(&other, &same);
    engine_job_close(&other);
    engine_job_close(&job);
    engine_job_close(&same);
    world_close(&w);
}

Test(sched, cancel_in_each_phase_frees_its_pages_within_one_step) {
    cancel_after(1);  /* prefilling, the first chunk */
    cancel_after(4);  /* prefilling, evicted already */
    cancel_after(20); /* generating */
}

/* Cancel that comes while the last token is made: the answer was complete, and stays. */
Test(sched, cancel_after_the_end_changes_nothing) {
    struct world w;
    struct engine_job job = job_of(1, 5, 2, full());
    bool failed;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 8});
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    sched_step(&w.sched, &failed); /* ended, not handed back yet */
    atomic_store(&job.cancel, 1);
    cr_assert_eq(finish_of(&job), ENGINE_RUNNING);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    cr_assert_eq(w.sched.conversations.count, 1);
    engine_job_close(&job);
    world_close(&w);
}

Test(sched, cancel_before_the_first_step) {
    struct world w;
    struct engine_job job = job_of(1, 5, 2, full());
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 8});
    submit(&w, &job);
    atomic_store(&job.cancel, 1);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_ABORT);
    cr_assert(atomic_load(&job.admitted) == 0 && w.span_count == 0);
    engine_job_close(&job);
    world_close(&w);
}

Test(sched, abandon_ends_everybody) {
    static const enum engine_finish finishes[] = {ENGINE_FINISH_ABORT, ENGINE_FINISH_ERROR};
    for (int f = 0; f < 2; f++) {
        struct world w;
        struct engine_job jobs[5];
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 2, .conversations = 4, .rows = 8});
        for (int i = 0; i < 5; i++) {
            jobs[i] = job_of(i, 12, 9, full());
            submit(&w, &jobs[i]);
        }
        for (int i = 0; i < 3; i++) cr_assert_not(world_step(&w));
        sched_abandon(&w.sched, finishes[f], ERR_DEVICE);
        cr_assert(sched_idle(&w.sched));
        cr_assert_eq(finish_of(&jobs[0]), ENGINE_RUNNING, "not before it is published");
        sched_publish_finished(&w.sched);
        world_check(&w);
        cr_assert(atomic_load(&w.places) == 0 && atomic_load(&w.pending) == 0);
        cr_assert(w.sched.conversations.count == 0 && pages_used(&w) == 0);
        for (int i = 0; i < 5; i++) {
            cr_assert_eq(finish_of(&jobs[i]), (int)finishes[f]);
            cr_assert_eq(jobs[i].fault.code, f == 1 ? ERR_DEVICE : 0);
            engine_job_close(&jobs[i]);
        }
        world_close(&w);
    }
}

Test(sched, close_with_everything_in_flight) {
    struct world w;
    struct engine_job jobs[6];
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 8});
    for (int i = 0; i < 6; i++) {
        jobs[i] = job_of(i, i == 0 ? 3 : 30, i == 0 ? 1 : 9, full());
        submit(&w, &jobs[i]);
    }
    for (int i = 0; i < 4; i++) cr_assert_not(world_step(&w));
    world_close(&w);
    cr_assert_eq(finish_of(&jobs[0]), ENGINE_FINISH_LENGTH);
    for (int i = 1; i < 6; i++) cr_assert_eq(finish_of(&jobs[i]), ENGINE_FINISH_ABORT);
    for (int i = 0; i < 6; i++) engine_job_close(&jobs[i]);
}

/* ---- Conversations --------------------------------------------------------------------------- */

/* Runs a turn that goes on after the first `shared` tokens of prompt 0; returns its cached tokens.
 */
static int turn(struct world *w, int number, int shared, int prompt_count, struct engine_kv kv) {
    struct engine_job job = job_of(number, prompt_count, 3, kv);
    job.request.prompt = prompt_of(number, shared);
    submit(w, &job);
    run_until_idle(w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    int cached = job.cached_tokens;
    engine_job_close(&job);
    return cached;
}

Test(sched, a_turn_continues_where_the_last_one_ended) {
    struct world w;
    struct engine_kv kv = global(16, 4, 8);
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 64});
    cr_assert_eq(turn(&w, 0, 0, 30, kv), 0);
    cr_assert_eq(w.sched.conversations.count, 1);
    cr_assert_eq(turn(&w, 1, 30, 50, kv), 30);
    cr_assert_eq(w.sched.conversations.count, 2); /* the one it came from, superseded, and itself */
    cr_assert(w.sched.counters.conversation_hits == 1 && w.sched.counters.cached_tokens == 30);
    cr_assert_eq(w.sched.counters.prompt_tokens, 50);
    world_close(&w);
}

Test(sched, reuse_and_retain_can_be_refused) {
    struct world w;
    struct engine_kv kv = full(), fresh = full(), forgetful = full();
    fresh.reuse = false;
    forgetful.retain = false;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 64});
    cr_assert_eq(turn(&w, 0, 0, 30, forgetful), 0);
    cr_assert(w.sched.conversations.count == 0 && pages_used(&w) == 0);
    cr_assert_eq(turn(&w, 0, 0, 30, kv), 0);
    cr_assert_eq(turn(&w, 1, 30, 50, fresh), 0);
    cr_assert_eq(w.sched.conversations.count, 2);
    world_close(&w);
}

Test(sched, scoring_neither_reuses_nor_retains) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 64});
    cr_assert_eq(turn(&w, 0, 0, 30, full()), 0);
    struct engine_job job = job_of(1, 50, 3, full());
    job.request.prompt = prompt_of(1, 30);
    job.request.prompt_logprobs = true;
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert(finish_of(&job) == ENGINE_FINISH_LENGTH && job.cached_tokens == 0);
    cr_assert_eq(w.sched.conversations.count, 1);
    cr_assert_eq(turn(&w, 2, 30, 50, full()), 30); /* it is still there */
    engine_job_close(&job);
    world_close(&w);
}

/* Three rest; the fourth needs pages: the one used longest ago goes, no other. */
Test(sched, the_oldest_conversation_makes_room) {
    struct world w;
    int page = slots_per_page();
    world_open(&w, &(struct world_options){
                       .pages = 5 * WORLD_STREAMS, .sequences = 2, .conversations = 8, .rows = 64});
    for (int i = 0; i < 3; i++) turn(&w, i, 0, page - 8, full());    /* a page each per stream */
    cr_assert_eq(turn(&w, 4, page - 8, page - 4, full()), page - 8); /* uses 0 again */
    cr_assert_eq(w.sched.conversations.count, 4);
    struct engine_job big = job_of(5, 2 * page + 1, 3, full());
    submit(&w, &big);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&big), ENGINE_FINISH_LENGTH);
    engine_job_close(&big);
    cr_assert_eq(w.sched.conversations.count, 3); /* 2, 4 and the big one */
    struct engine_job again = job_of(2, page - 2, 2, full());
    submit(&w, &again);
    run_until_idle(&w);
    cr_assert_eq(again.cached_tokens, page - 8);
    engine_job_close(&again);
    again = job_of(1, page - 2, 2, full());
    submit(&w, &again);
    run_until_idle(&w);
    cr_assert_eq(again.cached_tokens, 0);
    engine_job_close(&again);
    world_close(&w);
}

/* Pages that forgetting cannot free are no reason to forget. */
Test(sched, waiting_forgets_nothing) {
    struct world w;
    int page = slots_per_page();
    struct engine_job runs = job_of(1, page + 1, 20, full());
    struct engine_job waits = job_of(2, 2 * page + 1, 2, full());
    world_open(
        &w, &(struct world_options){
                .pages = 4 * WORLD_STREAMS, .sequences = 2, .conversations = 8, .rows = 2 * page});
    turn(&w, 0, 0, 10, full());
    submit(&w, &runs);
    submit(&w, &waits);
    for (int i = 0; i < 3; i++) {
        cr_assert_not(world_step(&w));
        cr_assert(atomic_load(&waits.admitted) == 0 && w.sched.conversations.count == 1);
    }
    run_until_idle(&w);
    cr_assert_eq(finish_of(&waits), ENGINE_FINISH_LENGTH);
    engine_job_close(&runs);
    engine_job_close(&waits);
    world_close(&w);
}

Test(sched, no_more_conversations_than_the_table_holds) {
    for (int most = 0; most < 3; most++) {
        struct world w;
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 2, .conversations = most, .rows = 64});
        for (int i = 0; i < 5; i++) turn(&w, i, 0, 10, full());
        cr_assert_eq(w.sched.conversations.count, most);
        world_close(&w);
    }
}

/* A conversation that could only go on with more pages than there are starts afresh: with chunk and
 * buffer of a page, two pages at its end and a chunk on top are one more than a fresh start needs.
 */
Test(sched, a_conversation_too_large_to_go_on_starts_afresh) {
    struct world w;
    int page = slots_per_page();
    struct engine_job job = job_of(0, page, page + 1, global(page, page, page)), next;
    int32_t *prompt = prompts[1];
    world_open(&w, &(struct world_options){
                       .pages = 3 * WORLD_STREAMS, .sequences = 1, .conversations = 2, .rows = 64});
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert(finish_of(&job) == ENGINE_FINISH_LENGTH && w.sched.conversations.count == 1);
    next = job_of(1, 3 * page, 2, global(page, page, page));
    for (int i = 0; i < 2 * page; i++)
        prompt[i] = i < page ? prompts[0][i] : job.choice[0].tokens[i - page].token;
    submit(&w, &next);
    run_until_idle(&w);
    cr_assert(finish_of(&next) == ENGINE_FINISH_LENGTH && next.cached_tokens == 0);
    engine_job_close(&job);
    engine_job_close(&next);
    world_close(&w);
}

/* A dropped answer needs no pages: of a conversation no more can stay than the tokens both share.
 */
Test(sched, what_a_prompt_drops_is_not_reserved) {
    struct world w;
    int page = slots_per_page();
    struct engine_job job = job_of(0, page / 2, 2 * page, full());
    world_open(&w, &(struct world_options){
                       .pages = 3 * WORLD_STREAMS, .sequences = 1, .conversations = 2, .rows = 64});
    submit(&w, &job);
    run_until_idle(&w);
    engine_job_close(&job);
    job = job_of(1, 2 * page, 1, full());
    job.request.prompt = prompt_of(1, page / 2);
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    cr_assert_eq(job.cached_tokens, page / 2);
    cr_assert_eq(w.sched.pages_reserved, 2 * WORLD_STREAMS);
    run_until_idle(&w);
    engine_job_close(&job);
    world_close(&w);
}

/* ---- Forks of conversations ------------------------------------------------------------------ */

/* An answered turn whose prompt is the first `shared` tokens of prompt 0 and goes on with those of
 * prompt `number`; the caller closes it. */
static struct engine_job ask(struct world *w, int number, int shared, int prompt_count,
                             struct engine_kv kv) {
    struct engine_job job = job_of(number, prompt_count, 12, kv);
    job.request.prompt = prompt_of(number, shared);
    job.request.seed = 5;
    submit(w, &job);
    run_until_idle(w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    return job;
}

/* A history, a turn on it, the same turn again, another last turn, and one more: each reads only
 * what is new, and the same turn from the same state gives the same answer. */
Test(sched, retries_edits_and_questions_go_on_from_one_history) {
    struct world w;
    struct engine_kv kv = global(16, 4, 8);
    world_open(
        &w, &(struct world_options){.pages = 900, .sequences = 2, .conversations = 9, .rows = 64});
    cr_assert_eq(turn(&w, 0, 0, 30, kv), 0);
    struct engine_job first = ask(&w, 1, 30, 50, kv), again = ask(&w, 1, 30, 50, kv);
    cr_assert(first.cached_tokens == 30 && again.cached_tokens == 30);
    expect_same_answer(&first, &again);
    cr_assert_eq(w.sched.conversations.count, 2, "the retry's equal answer replaced the first");
    struct engine_job edited = ask(&w, 2, 30, 45, kv), third = ask(&w, 3, 30, 31, kv);
    cr_assert(edited.cached_tokens == 30 && third.cached_tokens == 30);
    cr_assert_eq(w.sched.conversations.count, 4);
    cr_assert_eq(w.sched.counters.conversation_hits, 4);
    engine_job_close(&first);
    engine_job_close(&again);
    engine_job_close(&edited);
    engine_job_close(&third);
    world_close(&w);
}

/* However long a dialogue runs, its last state stays and the one before it. */
Test(sched, a_linear_dialogue_keeps_two_states) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 900, .sequences = 2, .conversations = 9, .rows = 64});
    const struct conversation *rows = w.sched.conversations.rows;
    for (int i = 0; i < 8; i++) {
        /* Each prompt is 30 tokens longer and drops the answer before it, but for tokens that
         * happen to be the same. */
        struct engine_job job = job_of(0, (i + 1) * 30, 3, global(16, 4, 8));
        submit(&w, &job);
        run_until_idle(&w);
        cr_assert(job.cached_tokens >= i * 30 && job.cached_tokens <= i * 30 + 2);
        engine_job_close(&job);
        int superseded = 0, count = w.sched.conversations.count;
        for (int r = 0; r < 9; r++)
            superseded += rows[r].id != 0 && conversation_superseded(&rows[r]);
        cr_assert(count == (i == 0 ? 1 : 2) && superseded == count - 1);
    }
    world_close(&w);
}

/* What a dialogue superseded makes room before anybody's last state does. */
Test(sched, superseded_states_make_room_first) {
    struct world w;
    int page = slots_per_page();
    world_open(&w, &(struct world_options){
                       .pages = 5 * WORLD_STREAMS, .sequences = 2, .conversations = 8, .rows = 64});
    turn(&w, 1, 0, page - 8, full());
    turn(&w, 0, 0, page - 12, full());
    cr_assert_eq(turn(&w, 2, page - 12, page - 8, full()), page - 12); /* 0 is superseded now */
    turn(&w, 3, 0, 2 * page - 8, full());
    cr_assert_eq(w.sched.conversations.count, 4);
    turn(&w, 4, 0, page - 8, full());
    cr_assert_eq(w.sched.conversations.count, 4);
    struct engine_job one = job_of(1, page - 2, 2, full());
    submit(&w, &one);
    run_until_idle(&w);
    cr_assert_eq(one.cached_tokens, page - 8, "the oldest last state went before a superseded one");
    engine_job_close(&one);
    world_close(&w);
}

/* No room for a conversation and its next turn beside each other: the turn takes it over. */
Test(sched, a_conversation_is_used_up_when_both_do_not_fit) {
    struct world w;
    int page = slots_per_page();
    world_open(&w, &(struct world_options){
                       .pages = 3 * WORLD_STREAMS, .sequences = 1, .conversations = 2, .rows = 64});
    turn(&w, 0, 0, 2 * page - 8, full());
    cr_assert_eq(turn(&w, 1, 2 * page - 8, 2 * page - 4, full()), 2 * page - 8);
    cr_assert_eq(w.sched.conversations.count, 1);
    cr_assert_eq(w.sched.conversations.pages, 2 * WORLD_STREAMS);
    world_close(&w);
}

Test(sched, why_a_prefix_was_lost_is_counted) {
    struct world w;
    const uint64_t *lost = w.sched.counters.conversation_lost;
    struct engine_kv fresh = full();
    fresh.reuse = false;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 1, .rows = 64});
    turn(&w, 0, 0, 30, full());
    cr_assert_eq(lost[ENGINE_MISS_NEW], 1);
    turn(&w, 1, 20, 40, full());
    cr_assert_eq(lost[ENGINE_MISS_DIVERGED], 1); /* and took the only place */
    turn(&w, 0, 0, 50, full());
    cr_assert_eq(lost[ENGINE_MISS_FORGOTTEN], 1);
    turn(&w, 0, 0, 50, full());
    cr_assert_eq(lost[ENGINE_MISS_WHOLE], 1);
    turn(&w, 0, 0, 60, global(16, 4, 8));
    cr_assert_eq(lost[ENGINE_MISS_SETTINGS], 1);
    turn(&w, 4, 0, 10, fresh);
    cr_assert_eq(lost[ENGINE_MISS_NEW], 1, "who wants none has lost none");
    world_close(&w);
}

Test(sched, deleting) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 64});
    struct conversation_table *table = &w.sched.conversations;
    turn(&w, 0, 0, 30, full());
    turn(&w, 1, 30, 50, full());
    turn(&w, 2, 0, 20, full());
    uint64_t last = 0, other = 0;
    for (int i = 0; i < 4; i++) {
        const struct conversation *row = &table->rows[i];
        if (row->id != 0 && row->origin != 0) last = row->id;
        if (row->id != 0 && row->token_count == 22) other = row->id;
    }
    cr_assert_eq(sched_delete(&w.sched, last + 1), ERR_NOTFOUND);
    cr_assert_eq(sched_delete(&w.sched, last), 0); /* with the one it came from */
    world_check(&w);
    cr_assert(table->count == 1 && conversation_by_id(table, other) != NULL);
    cr_assert_eq(sched_delete(&w.sched, last), ERR_NOTFOUND);
    cr_assert_eq(turn(&w, 1, 30, 50, full()), 0);
    /* Whoever goes on from it already keeps what it has. */
    struct engine_job job = job_of(3, 40, 9, full());
    memcpy(prompts[3], prompts[2], 20 * sizeof **prompts);
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    cr_assert_eq(job.cached_tokens, 20);
    cr_assert_eq(sched_delete(&w.sched, other), 0);
    world_check(&w);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    engine_job_close(&job);
    world_close(&w);
}

/* ---- State on disk --------------------------------------------------------------------------- */

static struct world_options with_state(const char *dir, int conversations, bool eager) {
    return (struct world_options){.pages = 900,
                                  .sequences = 3,
                                  .conversations = conversations,
                                  .rows = 64,
                                  .state_dir = dir,
                                  .state_eager = eager};
}

static struct store_stats stats_of(struct world *w) {
    struct store_stats stats;
    store_stats(w->store, &stats);
    return stats;
}

/* A turn after a restart equals the turn that needed none, bit for bit. */
Test(sched, a_conversation_outlives_the_process) {
    char dir[64];
    struct world w;
    struct engine_kv kv = global(16, 4, 8);
    struct world_options options = with_state(dir, 9, true);
    world_make_dir(dir);
    world_open(&w, &options);
    cr_assert_eq(turn(&w, 0, 0, 60, kv), 0);
    cr_assert_not(world_step(&w)); /* nothing else to do: it is written */
    cr_assert_eq(stats_of(&w).files, 1);
    struct engine_job before = ask(&w, 1, 60, 90, kv);
    world_close(&w);
    world_open(&w, &options);
    struct engine_job after = ask(&w, 1, 60, 90, kv);
    cr_assert(before.cached_tokens == 60 && after.cached_tokens == 60);
    expect_same_answer(&before, &after);
    cr_assert_eq(after.kv.kept_entries, before.kv.kept_entries);
    cr_assert_eq(w.sched.counters.state_restored, 1);
    engine_job_close(&before);
    engine_job_close(&after);
    world_save_all(&w);
    cr_assert_eq(stats_of(&w).files, 1, "the file of what was superseded stayed");
    world_close(&w);
    world_remove_dir(dir);
}

/* With one place and pages for hardly more, each of five conversations is there when asked. */
Test(sched, what_makes_room_comes_back) {
    char dir[64];
    struct world w;
    int page = slots_per_page();
    struct world_options options = with_state(dir, 2, false);
    struct engine_kv kv = global(16, 4, 8);
    options.pages = 6 * WORLD_STREAMS;
    world_make_dir(dir);
    world_open(&w, &options);
    for (int i = 1; i <= 5; i++) cr_assert_eq(turn(&w, i, 0, page + i, kv), 0);
    cr_assert_geq(stats_of(&w).files, 3);
    for (int i = 1; i <= 5; i++) {
        struct engine_job job = job_of(i, page + i + 10, 2, kv);
        submit(&w, &job);
        run_until_idle(&w);
        cr_assert_geq(job.cached_tokens, page + i, "conversation %d was lost", i);
        engine_job_close(&job);
    }
    cr_assert_eq(w.sched.counters.conversation_lost[ENGINE_MISS_FORGOTTEN], 0);
    cr_assert_eq(w.sched.counters.preemptions, 0);
    world_close(&w);
    world_remove_dir(dir);
}

Test(sched, unbounded_states_are_not_written) {
    char dir[64];
    struct world w;
    struct world_options options = with_state(dir, 9, true);
    world_make_dir(dir);
    world_open(&w, &options);
    turn(&w, 0, 0, 60, full());
    world_save_all(&w);
    cr_assert_eq(stats_of(&w).files, 0);
    world_close(&w);
    world_remove_dir(dir);
}

Test(sched, deleting_reaches_the_disk) {
    char dir[64];
    struct world w;
    struct world_options options = with_state(dir, 9, true);
    world_make_dir(dir);
    world_open(&w, &options);
    turn(&w, 0, 0, 60, global(16, 4, 8));
    world_save_all(&w);
    turn(&w, 1, 60, 80, global(16, 4, 8));
    uint64_t last = 0, only_on_disk;
    for (int i = 0; i < 9; i++)
        if (w.sched.conversations.rows[i].token_count == 82)
            last = w.sched.conversations.rows[i].id;
    cr_assert_eq(sched_delete(&w.sched, last), 0);
    cr_assert(w.sched.conversations.count == 0 && stats_of(&w).files == 0);
    turn(&w, 2, 0, 60, global(16, 4, 8));
    world_save_all(&w);
    only_on_disk = w.sched.conversations.rows[0].id;
    world_close(&w);
    world_open(&w, &options);
    cr_assert_eq(sched_delete(&w.sched, only_on_disk), 0);
    cr_assert_eq(sched_delete(&w.sched, only_on_disk), ERR_NOTFOUND);
    cr_assert_eq(stats_of(&w).files, 0);
    world_close(&w);
    world_remove_dir(dir);
}

/* An export or an import fails: a conversation is read again, and nobody else notices. */
Test(sched, failing_exports_and_imports_cost_only_the_state) {
    static const enum world_op ops[] = {WORLD_EXPORT, WORLD_IMPORT};
    for (int o = 0; o < 2; o++)
        for (long n = 0; n < (o == 0 ? 1 + WORLD_STREAMS : 1); n++) {
            char dir[64];
            struct world w;
            struct engine_kv kv = global(16, 4, 8);
            struct world_options options = with_state(dir, 9, true);
            world_make_dir(dir);
            world_open(&w, &options);
            if (o == 0) world_fail(ops[o], n, ERR_DEVICE);
            turn(&w, 0, 0, 60, kv);
            world_save_all(&w);
            world_close(&w);
            world_open(&w, &options);
            if (o == 1) world_fail(ops[o], n, ERR_FULL);
            cr_assert_eq(turn(&w, 1, 60, 90, kv), 0);
            cr_assert_not(world_fail_pending());
            const uint64_t *lost = w.sched.counters.conversation_lost;
            cr_assert_eq(lost[o == 0 ? ENGINE_MISS_NEW : ENGINE_MISS_DAMAGED], 1);
            world_fail_never();
            world_close(&w);
            world_remove_dir(dir);
        }
}

/* The n-th allocation while a conversation goes out and comes back fails: the request is answered
 * all the same, from its state or from nothing. */
Test(sched, saving_and_restoring_survive_missing_memory) {
    for (long n = 0, pending = 0; pending == 0; n++) {
        char dir[64];
        struct world w;
        struct engine_kv kv = global(16, 4, 8);
        struct world_options options = with_state(dir, 9, true);
        world_make_dir(dir);
        world_open(&w, &options);
        turn(&w, 0, 0, 60, kv);
        mem_fail_after(n);
        world_save_all(&w);
        mem_fail_after(-1);
        world_save_all(&w);
        world_close(&w);
        world_open(&w, &options);
        /* The backend's step state grows to its size: that is configuration, not requests. */
        struct engine_job job = job_of(2, 90, 3, kv);
        job.request.kv.retain = false;
        submit(&w, &job);
        run_until_idle(&w);
        engine_job_close(&job);
        job = job_of(1, 90, 3, kv);
        job.request.prompt = prompt_of(1, 60);
        submit(&w, &job);
        bool failed;
        mem_fail_after(n);
        sched_step(&w.sched, &failed);
        pending = mem_fail_pending();
        mem_fail_after(-1);
        sched_publish_finished(&w.sched);
        world_check(&w);
        run_until_idle(&w);
        cr_assert(job.cached_tokens == 60 || job.cached_tokens == 0 || job.fault.code == ERR_NOMEM);
        engine_job_close(&job);
        world_close(&w);
        world_remove_dir(dir);
        cr_assert_lt(n, 60);
    }
}

/* A turn takes over a conversation of which a part has been copied out already. */
Test(sched, using_up_a_conversation_ends_its_export) {
    char dir[64];
    struct world w;
    struct engine_kv kv = global(60, 4, 64);
    struct world_options options = with_state(dir, 2, true);
    options.pages = 10; /* the conversation has 4 of them, its next turn may need 7 */
    options.export_bytes = 1;
    world_make_dir(dir);
    world_open(&w, &options);
    int cached = turn(&w, 0, 0, 50, kv);
    cr_assert(cached == 0 && w.sched.conversations.count == 1);
    sched_save(&w.sched, clock_ns(), true);
    cr_assert(sched_exporting(&w.sched));
    cr_assert_eq(turn(&w, 1, 50, 54, kv), 50);
    cr_assert_eq(w.sched.conversations.count, 1, "both fit: the test tests nothing");
    world_save_all(&w);
    cr_assert(stats_of(&w).files == 1 && w.sched.counters.state_failed == 0);
    world_close(&w);
    world_remove_dir(dir);
}

/* What left memory while it was being written still replaces the file of what it superseded. */
Test(sched, a_replaced_file_goes_though_its_successor_left_memory) {
    char dir[64];
    struct world w;
    struct engine_kv kv = global(16, 4, 8);
    struct world_options options = with_state(dir, 2, false);
    world_make_dir(dir);
    world_open(&w, &options);
    turn(&w, 0, 0, 60, kv);
    world_save_all(&w);
    turn(&w, 1, 60, 80, kv);
    cr_assert(w.sched.conversations.count == 2 && stats_of(&w).files == 1);
    turn(&w, 2, 0, 40, kv); /* takes the place of the superseded one */
    turn(&w, 3, 0, 40, kv); /* and now of the one that went on from it */
    world_save_all(&w);
    cr_assert_eq(stats_of(&w).files, 3, "the superseded file stayed");
    world_close(&w);
    world_remove_dir(dir);
}

/* A conversation that cannot be written hands on whose file its successor replaces. */
Test(sched, a_replaced_file_goes_though_one_between_was_never_written) {
    char dir[64];
    struct world w;
    struct engine_kv kv = global(16, 4, 8);
    struct world_options options = with_state(dir, 9, false);
    world_make_dir(dir);
    world_open(&w, &options);
    turn(&w, 0, 0, 60, kv);
    world_save_all(&w);
    turn(&w, 1, 60, 80, kv);
    world_fail(WORLD_EXPORT, 0, ERR_DEVICE);
    world_save_all(&w);
    cr_assert(!world_fail_pending() && stats_of(&w).files == 1);
    int32_t longer[90];
    memcpy(longer, prompts[1], sizeof longer);
    struct engine_job job = job_of(2, 90, 3, kv);
    job.request.prompt = longer;
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert_eq(job.cached_tokens, 80);
    engine_job_close(&job);
    world_save_all(&w);
    cr_assert_eq(stats_of(&w).files, 1, "the file of the one before stayed");
    world_close(&w);
    world_remove_dir(dir);
}

/* ---- Choices --------------------------------------------------------------------------------- */

static void expect_same_choice(const struct engine_job *a, int index, const struct engine_job *b) {
    const struct engine_choice *x = &a->choice[index], *y = &b->choice[0];
    int count = (int)atomic_load(&x->token_count);
    cr_assert_eq(atomic_load(&x->finish), atomic_load(&y->finish));
    cr_assert_eq(count, count_of(b), "choice %d", index);
    cr_assert_eq(atomic_load(&x->text_safe), atomic_load(&y->text_safe));
    cr_assert_eq(memcmp(x->tokens, y->tokens, (size_t)count * sizeof *x->tokens), 0, "choice %d",
                 index);
    cr_assert_eq(memcmp(x->top, y->top, (size_t)count * 2 * sizeof *x->top), 0);
}

/* Choice i is what the request with one choice and seed + i answers, bit for bit. */
static void try_choices(struct engine_kv kv, int rows, int history) {
    enum { CHOICES = 5 };
    struct engine_stop stops[] = {{"e", 1}, {"k", 1}};
    struct world w;
    struct engine_job jobs[CHOICES + 1];
    world_open(&w, &(struct world_options){
                       .pages = 2000, .sequences = 6, .conversations = 20, .rows = rows});
    if (history > 0) turn(&w, 0, 0, history, kv);
    for (int i = 0; i <= CHOICES; i++) {
        jobs[i] = job_of(1, 70, 40, kv);
        jobs[i].request.prompt = prompt_of(1, history);
        jobs[i].request.top_logprobs = 2;
        jobs[i].request.stops = stops;
        jobs[i].request.stop_count = 2;
        jobs[i].request.choices = i == CHOICES ? CHOICES : 1;
        jobs[i].request.seed = i == CHOICES ? 100 : 100 + (uint64_t)i;
        submit(&w, &jobs[i]);
        run_until_idle(&w);
        cr_assert_eq(jobs[i].cached_tokens, history);
    }
    int different = 0;
    for (int i = 0; i < CHOICES; i++) {
        expect_same_choice(&jobs[CHOICES], i, &jobs[i]);
        different += count_of(&jobs[i]) != count_of(&jobs[0]) ||
                     jobs[i].choice[0].tokens[0].token != jobs[0].choice[0].tokens[0].token;
    }
    cr_assert_gt(different, 0, "the seeds made no difference");
    cr_assert_eq(jobs[CHOICES].kv.kept_entries, jobs[0].kv.kept_entries);
    for (int i = 0; i <= CHOICES; i++) engine_job_close(&jobs[i]);
    world_close(&w);
}

Test(sched, each_choice_equals_its_own_request) {
    static const int rows[] = {7, 64, 200};
    for (int i = 0; i < 3; i++) {
        try_choices(full(), rows[i], 0);
        try_choices(global(16, 4, 8), rows[i], 0);
        try_choices(global(16, 4, 8), rows[i], 30);
        try_choices(global(60, 0, 64), rows[i], 25);
    }
}

Test(sched, all_choices_run_or_none) {
    struct world w;
    struct engine_job jobs[3];
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 4, .conversations = 4, .rows = 30});
    for (int i = 0; i < 3; i++) {
        jobs[i] = job_of(i, 10, i == 0 ? 6 : 3, full());
        jobs[i].request.choices = i == 0 ? 2 : i == 1 ? 3 : 1;
        submit(&w, &jobs[i]);
    }
    while (atomic_load(&jobs[0].finished) == 0) {
        cr_assert_eq(w.sched.running, jobs[0].admitted ? 2 : 0);
        cr_assert_eq(atomic_load(&jobs[1].admitted), 0, "three places for two free ones");
        cr_assert_eq(atomic_load(&jobs[2].admitted), 0, "the small one passed the big one");
        cr_assert_not(world_step(&w));
    }
    cr_assert_not(world_step(&w));
    cr_assert(jobs[1].admitted == 1 && jobs[2].admitted == 1 && w.sched.running == 4);
    run_until_idle(&w);
    cr_assert_eq(w.sched.conversations.count, 3, "a choice other than the first left its state");
    for (int i = 0; i < 3; i++) engine_job_close(&jobs[i]);
    struct engine_job many = job_of(1, 10, 3, full());
    many.request.choices = 5; /* a caller that did not check: refused alone */
    submit(&w, &many);
    run_until_idle(&w);
    cr_assert_eq(atomic_load(&many.choice[4].finish), ENGINE_FINISH_ERROR);
    cr_assert_eq(many.fault.code, ERR_LIMIT);
    engine_job_close(&many);
    world_close(&w);
}

Test(sched, choices_reserve_as_if_nothing_was_shared) {
    struct world w;
    int page = slots_per_page();
    struct engine_job job = job_of(1, page, 3, full()); /* two pages a stream */
    struct kv_params kv;
    struct fault fault = {0};
    job.request.choices = 3;
    world_open(&w, &(struct world_options){
                       .pages = 6 * WORLD_STREAMS, .sequences = 4, .conversations = 0, .rows = 64});
    cr_assert_eq(sched_resolve_kv(&job.request.kv, &w.sched.options.kv, &kv, &fault), 0);
    cr_assert_eq(sched_check(&w.sched.options, &job.request, &kv, &fault), 0);
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    cr_assert_eq(w.sched.pages_reserved, 6 * WORLD_STREAMS);
    cr_assert_eq(pages_used(&w), WORLD_STREAMS, "the prompt was not shared");
    run_until_idle(&w);
    cr_assert_eq(atomic_load(&job.choice[2].finish), ENGINE_FINISH_LENGTH);
    engine_job_close(&job);
    job = job_of(1, page, 3, full());
    job.request.choices = 4;
    cr_assert_eq(sched_check(&w.sched.options, &job.request, &kv, &fault), ERR_LIMIT);
    cr_assert_str_eq(fault.field, "n");
    world_close(&w);
}

/* A choice that ends early says so at once; the job is handed back with the last one. */
Test(sched, choices_end_one_by_one) {
    struct world w;
    struct engine_stop stops[] = {{"e", 1}, {"k", 1}, {"q", 1}};
    struct engine_job job = job_of(1, 20, 60, full());
    job.request.choices = 8;
    job.request.stops = stops;
    job.request.stop_count = 3;
    world_open(
        &w, &(struct world_options){.pages = 900, .sequences = 8, .conversations = 1, .rows = 40});
    submit(&w, &job);
    int early = 0, running_before = 8;
    while (atomic_load(&job.finished) == 0) {
        cr_assert_not(world_step(&w));
        int running = 0;
        for (int i = 0; i < 8; i++) running += atomic_load(&job.choice[i].finish) == ENGINE_RUNNING;
        cr_assert_eq(atomic_load(&job.finished), running == 0);
        cr_assert_eq(w.sched.running, running);
        early += running < running_before && running > 0;
        running_before = running;
    }
    cr_assert_gt(early, 1);
    engine_job_close(&job);
    world_close(&w);
}

/* Cancelled after `steps`: every choice is gone one step later, with its pages. */
Test(sched, cancelling_ends_every_choice) {
    static const int after[] = {0, 1, 3, 9, 20};
    for (int i = 0; i < 5; i++) {
        struct world w;
        struct engine_job job = job_of(2, 60, 40, global(8, 4, 8));
        job.request.choices = 3;
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 4, .conversations = 4, .rows = 8});
        submit(&w, &job);
        for (int k = 0; k < after[i]; k++) cr_assert_not(world_step(&w));
        atomic_store(&job.cancel, 1);
        cr_assert_not(world_step(&w));
        cr_assert_eq(atomic_load(&job.finished), 1);
        for (int k = 0; k < 3; k++)
            cr_assert_eq(atomic_load(&job.choice[k].finish), ENGINE_FINISH_ABORT);
        cr_assert(w.sched.pages_reserved == 0 && pages_used(&w) == 0 && sched_idle(&w.sched));
        cr_assert_eq(w.sched.conversations.count, 0);
        engine_job_close(&job);
        world_close(&w);
    }
}

/* Echo for several choices scores the prompt once. */
Test(sched, scores_with_several_choices) {
    struct world w;
    struct engine_job job = job_of(3, 40, 0, global(8, 4, 8));
    job.request.choices = 3;
    job.request.prompt_logprobs = true;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 4, .conversations = 4, .rows = 64});
    submit(&w, &job);
    run_until_idle(&w);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(atomic_load(&job.choice[i].finish), ENGINE_FINISH_LENGTH);
    for (int t = 1; t < 40; t++) cr_assert_leq(job.prompt_tokens[t].logprob, 0);
    cr_assert_eq(w.sched.counters.prompt_tokens, 40);
    engine_job_close(&job);
    world_close(&w);
}

/* ---- Scores ---------------------------------------------------------------------------------- */

Test(sched, scores_do_not_depend_on_the_steps) {
    static const int rows[] = {2, 3, 7, 33, 200}, logits[] = {2, 3, 5, 64, 300};
    static const struct {
        int budget, buffer, chunk;
    } bounds[] = {{600, 0, 32}, {12, 4, 10}, {1, 0, 1}};
    for (size_t b = 0; b < 3; b++) {
        struct engine_kv kv = global(bounds[b].budget, bounds[b].buffer, bounds[b].chunk);
        struct engine_job whole = job_of(3, 90, 4, kv);
        whole.request.prompt_logprobs = true;
        whole.request.top_logprobs = 3;
        struct engine_job first = whole;
        run_alone(&whole);
        cr_assert_eq(whole.prompt_tokens[0].token, whole.request.prompt[0]);
        cr_assert(isnan(whole.prompt_tokens[0].logprob));
        for (int i = 0; i < 5; i++) {
            struct world w;
            struct engine_job job = first;
            world_open(&w, &(struct world_options){.pages = 400,
                                                   .sequences = 1,
                                                   .conversations = 1,
                                                   .rows = rows[i],
                                                   .logits = logits[i]});
            submit(&w, &job);
            run_until_idle(&w);
            expect_same_answer(&job, &whole);
            for (int t = 1; t < 90; t++) {
                const struct engine_token *x = &job.prompt_tokens[t], *y = &whole.prompt_tokens[t];
                cr_assert(x->token == job.request.prompt[t] && x->logprob == y->logprob &&
                              x->rank == y->rank && x->logprob <= 0,
                          "rows %d logits %d: token %d scores %f, in one piece %f", rows[i],
                          logits[i], t, (double)x->logprob, (double)y->logprob);
                cr_assert_eq(memcmp(&job.prompt_top[3 * t], &whole.prompt_top[3 * t],
                                    3 * sizeof *job.prompt_top),
                             0);
            }
            engine_job_close(&job);
            world_close(&w);
        }
        engine_job_close(&whole);
    }
}

/* Scores without a wish for alternatives: top_logprobs says how many, not whether. */
Test(sched, scores_without_alternatives) {
    struct engine_job job = job_of(3, 20, 0, full());
    job.request.prompt_logprobs = true;
    run_alone(&job);
    for (int t = 1; t < 20; t++)
        cr_assert(job.prompt_tokens[t].logprob <= 0 && job.prompt_tokens[t].rank >= 1);
    engine_job_close(&job);
}

/* A long prompt that is scored has few logits to share; whoever comes after it does not wait. */
Test(sched, scoring_holds_nobody_up) {
    struct world w;
    struct engine_job scored = job_of(1, 200, 1, full()), plain = job_of(2, 10, 3, full());
    scored.request.prompt_logprobs = true;
    world_open(&w, &(struct world_options){
                       .pages = 400, .sequences = 2, .conversations = 0, .rows = 64, .logits = 6});
    submit(&w, &scored);
    submit(&w, &plain);
    cr_assert_not(world_step(&w));
    cr_assert_eq(count_of(&plain), 1);
    for (int i = 0; i < 2; i++) cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&plain), ENGINE_FINISH_LENGTH);
    cr_assert_eq(finish_of(&scored), ENGINE_RUNNING);
    run_until_idle(&w);
    engine_job_close(&scored);
    engine_job_close(&plain);
    world_close(&w);
}

/* ---- Failures of the backend ----------------------------------------------------------------- */

/* Three run (one of them continues a conversation, one has two choices), two wait; one operation
 * fails once. Only those
 * who ran may end with the error; everything returns to the pool, and later requests work. */
static bool fail_once(enum world_op op, long n, int code) {
    enum { JOBS = 5 };
    struct world w;
    struct engine_job jobs[JOBS], same[JOBS];
    struct engine_kv kv = global(10, 3, 8);
    int failed_steps = 0, errors = 0;
    bool ends_step = op != WORLD_REPORT && op != WORLD_TRUNCATE && op != WORLD_FORK;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 4, .conversations = 3, .rows = 12});
    turn(&w, 0, 0, 20, kv);
    for (int i = 0; i < JOBS; i++) {
        jobs[i] = job_of(i, 40 + i, 6 + i, kv);
        if (i == 1) jobs[i].request.prompt = prompt_of(1, 22);
        if (i == 2) jobs[i].request.choices = 2;
        same[i] = jobs[i];
        submit(&w, &jobs[i]);
    }
    world_fail(op, n, code);
    for (int step = 0; !sched_idle(&w.sched); step++) {
        bool pending = world_fail_pending();
        cr_assert_lt(step, 2000);
        failed_steps += world_step(&w);
        if (!pending || world_fail_pending()) continue;
        for (int i = 0; i < JOBS; i++) {
            if (finish_of(&jobs[i]) != ENGINE_FINISH_ERROR) continue;
            errors++;
            cr_assert_eq(atomic_load(&jobs[i].finished), 1);
            if (op != WORLD_REPORT) /* which only the first choice needs */
                cr_assert_eq(atomic_load(&jobs[i].choice[jobs[i].choice_count - 1].finish),
                             ENGINE_FINISH_ERROR);
            cr_assert_eq(jobs[i].fault.code, code);
            cr_assert_gt(strlen(jobs[i].fault.text), 0);
        }
        cr_assert(ends_step ? errors > 0 && w.sched.running == 0 : errors == 1);
    }
    bool happened = !world_fail_pending();
    world_fail_never();
    cr_assert_eq(w.sched.pages_reserved, 0);
    cr_assert_eq(w.sched.counters.preemptions,
                 (uint64_t)(happened && ends_step && code == ERR_FULL));
    cr_assert_eq(failed_steps, happened && ends_step && code == ERR_DEVICE);
    for (int i = 0; i < JOBS; i++) {
        if (finish_of(&jobs[i]) == ENGINE_FINISH_ERROR) errors--;
        engine_job_close(&jobs[i]);
    }
    cr_assert_eq(errors, 0, "somebody failed in another step");
    /* Later requests work, from nothing, as if alone. */
    struct engine_job later = same[3];
    later.request.kv.reuse = same[3].request.kv.reuse = false;
    submit(&w, &later);
    run_until_idle(&w);
    run_alone(&same[3]);
    expect_same_answer(&later, &same[3]);
    engine_job_close(&later);
    engine_job_close(&same[3]);
    world_close(&w);
    return happened;
}

Test(sched, every_failing_operation_ends_only_who_ran) {
    static const int codes[] = {ERR_DEVICE, ERR_FULL, ERR_NOMEM};
    for (int op = 0; op < WORLD_EXPORT; op++) /* the others: see "State on disk" */
        for (int c = 0; c < 3; c++) {
            long n = 0;
            while (fail_once((enum world_op)op, n, codes[c])) n++;
            cr_assert(n > 0 && n < 400, "operation %d was called %ld times", op, n);
        }
}

/* ---- Failing memory -------------------------------------------------------------------------- */

/* The n-th allocation of a request's life fails: it ends with an error, or without its long report;
 * the other one never notices, and nothing leaks. */
static bool fail_allocation(long n) {
    struct world w;
    struct engine_job other = job_of(1, 30, 40, global(8, 4, 8)), same = other, warm[2];
    struct engine_job job = job_of(2, 30, 6, global(8, 4, 8));
    int32_t stop_ids[] = {7};
    job.request.min_tokens = 2;
    job.request.stop_ids = stop_ids;
    job.request.stop_id_count = 1;
    job.request.choices = 2;
    job.request.kv.report = ENGINE_REPORT_POSITIONS;
    job.request.top_logprobs = 2;
    run_alone(&same);
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 3, .conversations = 2, .rows = 24});
    /* The backend's step state has grown to its size before: that is configuration, not requests.
     */
    for (int i = 0; i < 2; i++) {
        warm[i] = i == 0 ? other : job;
        warm[i].request.kv.retain = false;
        submit(&w, &warm[i]);
    }
    run_until_idle(&w);
    for (int i = 0; i < 2; i++) engine_job_close(&warm[i]);
    submit(&w, &other);
    while (count_of(&other) == 0) cr_assert_not(world_step(&w));
    mem_fail_after(n);
    int code = world_submit(&w, &job);
    bool pending = mem_fail_pending(), failed = false;
    while (code == 0 && atomic_load(&job.finished) == 0) {
        sched_step(&w.sched, &failed);
        cr_assert_not(failed);
        pending = mem_fail_pending();
        if (!pending) mem_fail_after(-1);
        sched_publish_finished(&w.sched);
    }
    mem_fail_after(-1);
    world_check(&w);
    cr_assert_eq(w.sched.counters.preemptions, 0);
    cr_assert(code == 0 || code == ERR_NOMEM);
    if (code == 0 && finish_of(&job) == ENGINE_FINISH_ERROR)
        cr_assert_eq(job.fault.code, ERR_NOMEM);
    else if (code == 0)
        cr_assert(finish_of(&job) == ENGINE_FINISH_LENGTH || finish_of(&job) == ENGINE_FINISH_STOP);
    if (pending) cr_assert(job.kv.lengths != NULL && job.kv.positions != NULL);
    run_until_idle(&w);
    expect_same_answer(&other, &same);
    engine_job_close(&other);
    engine_job_close(&job);
    engine_job_close(&same);
    world_close(&w);
    return !pending;
}

Test(sched, every_failing_allocation_ends_only_its_request) {
    long n = 0;
    while (fail_allocation(n)) n++;
    cr_assert(n >= 12 && n < 60, "%ld allocations", n);
}

/* ---- Parameters ------------------------------------------------------------------------------ */

/* A backend that does not observe attention. */
static int without_attention(const struct kern_rule *rule, struct fault *fault) {
    if (rule->score != KERN_SCORE_ATTENTION) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "observe", "no 'observe' in this backend");
}

static int any_rule(const struct kern_rule *rule, struct fault *fault) {
    (void)rule, (void)fault;
    return 0;
}

Test(sched, a_rule_the_backend_cannot_run_ends_only_its_request) {
    struct engine_job alone = job_of(1, 40, 60, global(16, 8, 32));
    struct engine_job runs = alone, refused = job_of(2, 40, 60, global(16, 8, 32));
    struct world w;
    refused.request.kv.policy = "h2o";
    run_alone(&alone);
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 2, .rows = 50});
    w.sched.options.kv.rule_check = without_attention;
    submit(&w, &runs);
    for (int step = 0; step < 5; step++) cr_assert_not(world_step(&w));
    submit(&w, &refused);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&runs), ENGINE_RUNNING);
    cr_assert_eq(finish_of(&refused), ENGINE_FINISH_ERROR);
    cr_assert_eq(refused.fault.code, ERR_UNSUPPORTED);
    cr_assert_str_eq(refused.fault.field, "kv.policy");
    cr_assert_not_null(strstr(refused.fault.text, "h2o"));
    cr_assert_not_null(strstr(refused.fault.text, "observe"));
    run_until_idle(&w);
    expect_same_answer(&alone, &runs);
    world_close(&w);
    engine_job_close(&alone);
    engine_job_close(&runs);
    engine_job_close(&refused);
}

Test(sched, kv_parameters_name_the_field_at_fault) {
    struct sched_kv rules = {.defaults = {.budget = 32, .buffer = 8, .chunk = 32},
                             .budget_max = 64,
                             .has_gates = true,
                             .rule_check = any_rule};
    kv_params_set_policy(&rules.defaults, policy_find("global"));
    const double none = 0;
    const struct {
        const char *policy;
        int32_t budget, buffer, chunk, sinks, recent;
        double horizon;
        int code;
        const char *field;
    } cases[] = {
        {"global", 64, -1, -1, -1, -1, none, 0, ""},
        {NULL, 65, -1, -1, -1, -1, none, ERR_LIMIT, "kv.budget"},
        {"full", -1, -1, -1, -1, -1, none, ERR_LIMIT, "kv.policy"},
        {NULL, 64, 8, 32, -1, -1, none, 0, ""},
        {NULL, 64, 9, -1, -1, -1, none, ERR_LIMIT, "kv.buffer"}, /* a cap has no way round */
        {NULL, 1, 0, 33, -1, -1, none, ERR_LIMIT, "kv.chunk"},
        {"fifo", -1, -1, -1, -1, -1, none, ERR_INVALID, "kv.policy"},
        {NULL, 0, -1, -1, -1, -1, none, ERR_INVALID, "kv.budget"},
        {NULL, -7, -1, -1, -1, -1, none, ERR_INVALID, "kv.budget"},
        {NULL, INT32_MIN, -1, -1, -1, -1, none, ERR_INVALID, "kv.budget"},
        {NULL, 3, -1, -1, -1, -1, none, 0, ""}, /* default sinks give way */
        {NULL, 3, -1, -1, 4, -1, none, ERR_INVALID, "kv.sinks"},
        {NULL, 8, -1, -1, -1, 5, none, ERR_INVALID, "kv.recent"},
        {NULL, 8, -1, -1, 4, INT32_MAX, none, ERR_INVALID, "kv.recent"},
        {NULL, -1, -2, -1, -1, -1, none, ERR_INVALID, "kv.buffer"},
        {NULL, -1, -1, 0, -1, -1, none, ERR_INVALID, "kv.chunk"},
        {"trimkv", -1, -1, -1, -1, -1, 2, ERR_INVALID, "kv.horizon"},
        {"trimkv", -1, -1, -1, -1, -1, none, 0, ""},
        {"global", -1, -1, -1, -1, -1, 0.5, ERR_INVALID, "kv.horizon"},
        {"gkv", 3, -1, -1, 1, -1, none, 0, ""}, /* default recent entries give way */
        {"gkv", 64, -1, -1, -1, -1, 2, ERR_INVALID, "kv.horizon"},
        {"h2o", 64, -1, -1, -1, 60, none, 0, ""},
        {"h2o", 64, -1, -1, -1, 61, none, ERR_INVALID, "kv.recent"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kv_params kv;
        struct fault fault = {0};
        struct engine_kv wanted = {.policy = cases[i].policy,
                                   .budget = cases[i].budget,
                                   .buffer = cases[i].buffer,
                                   .chunk = cases[i].chunk,
                                   .sinks = cases[i].sinks,
                                   .recent = cases[i].recent,
                                   .options = {{"horizon", cases[i].horizon, NULL}},
                                   .option_count = cases[i].horizon > 0};
        int code = sched_resolve_kv(&wanted, &rules, &kv, &fault);
        cr_expect_eq(code, cases[i].code, "case %zu: %d %s", i, code, fault.text);
        cr_expect_str_eq(fault.field, cases[i].field, "case %zu", i);
    }
    rules.has_gates = false;
    struct engine_kv wanted = global(32, 8, 32);
    struct kv_params kv;
    struct fault fault = {0};
    cr_assert_eq(sched_resolve_kv(&wanted, &rules, &kv, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "kv.policy");
}

/* Numbers near the end of 32 bits are refused by the pool's size, not by luck. */
Test(sched, the_largest_numbers_do_not_overflow) {
    struct sched_options options = {.shape = {64, 64, 16}, .pages_total = INT32_MAX};
    struct kv_params unbounded = {.policy = policy_find("full")};
    struct kv_params bounded = {.policy = policy_find("global"),
                                .budget = INT32_MAX,
                                .buffer = INT32_MAX,
                                .chunk = INT32_MAX};
    struct engine_request request = {.prompt_count = INT32_MAX, .max_tokens = INT32_MAX};
    struct fault fault = {0};
    cr_assert_eq(sched_check(&options, &request, &unbounded, &fault), ERR_LIMIT);
    cr_assert_str_eq(fault.field, "max_tokens");
    cr_assert_eq(sched_check(&options, &request, &bounded, &fault), ERR_LIMIT);
    bounded.budget = bounded.chunk = 1;
    bounded.buffer = 0;
    cr_assert_eq(sched_check(&options, &request, &bounded, &fault), 0);
}
