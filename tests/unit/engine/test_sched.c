/* Tests engine/steps/sched.c on the real cache with the fake model of tests/sim/world.h: order,
 * cancelling, scores, and every failure of backend and memory. Admission, conversations, their
 * files and several choices have tests of their own beside this one; the storms are
 * tests/sim/sim_sched.c. */
#include <criterion/criterion.h>
#include <malloc.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tests/sample.h"
#include "tests/unit/engine/requests.h"

/* ---- Order ---- */

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
        /* Every generating sequence gets a token in every step, regardless of waiting prompts. */
        cr_assert(count_of(&jobs[0]) == step + 1 && count_of(&jobs[1]) == step + 1);
        cr_assert(w.spans[0].count == 1 && w.spans[1].count == 1);
        cr_assert_leq(w.rows, 10);
        if (step <= 4) { /* the older prompt takes the remaining rows */
            cr_assert_eq(w.span_count, 3);
            cr_assert_eq(w.spans[2].count, 8);
            cr_assert_eq(w.rows, 10);
        }
        if (step == 6) { /* the job generates now; the next prompt runs */
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

/* The rows of two prompts that are read go to the client that was served a whole interval less,
 * whichever came first; within an interval the older prompt goes first. */
Test(sched, prompt_rows_go_to_the_client_served_least) {
    for (int turns = 0; turns < 2; turns++) {
        struct world w;
        struct engine_job jobs[2];
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 4, .conversations = 0, .rows = 10});
        for (int i = 0; i < 2; i++) {
            jobs[i] = job_of(i, 40, 3, full());
            jobs[i].request.client[0] = (uint8_t)i;
            submit(&w, &jobs[i]);
        }
        cr_assert_not(world_step(&w));
        queue_charge(&w.sched.queue, &jobs[0], turns * SCHED_PROMPT_TURN);
        for (int i = 0; i < 2; i++) cr_assert_not(world_step(&w));
        cr_assert_eq(atomic_load(&jobs[0].prompt_read), turns == 0 ? 30 : 10);
        cr_assert_eq(atomic_load(&jobs[1].prompt_read), turns == 0 ? 0 : 20);
        run_until_idle(&w);
        for (int i = 0; i < 2; i++) engine_job_close(&jobs[i]);
        world_close(&w);
    }
}

/* A short prompt does not wait until a long one of its own client is read: they share the rows. Of
 * prompts that are about equally long the older one goes first. */
Test(sched, a_short_prompt_is_read_beside_a_long_one) {
    for (int longer = 0; longer < 2; longer++) {
        struct world w;
        struct engine_job jobs[2];
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 4, .conversations = 0, .rows = 10});
        for (int i = 0; i < 2; i++) {
            jobs[i] = job_of(i, i == 0 ? 60 : longer ? 40 : 20, 3, full());
            submit(&w, &jobs[i]);
        }
        for (int i = 0; i < 2; i++) cr_assert_not(world_step(&w));
        cr_assert_eq(atomic_load(&jobs[0].prompt_read), longer ? 20 : 10);
        cr_assert_eq(atomic_load(&jobs[1].prompt_read), longer ? 0 : 10);
        run_until_idle(&w);
        for (int i = 0; i < 2; i++) engine_job_close(&jobs[i]);
        world_close(&w);
    }
}

/* The tokens of a step are those read and those generated: the last token of an answer counts,
 * although no step reads it. */
Test(sched, counts_the_tokens_of_each_step) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 4, .conversations = 0, .rows = 10});
    struct engine_job job = job_of(0, 25, 4, full());
    submit(&w, &job);
    run_until_idle(&w);
    const struct hist *tokens = &w.sched.counters.iteration_tokens;
    cr_assert_eq(hist_count(tokens), w.sched.counters.steps);
    cr_assert_eq(tokens->sum, 25 + 4);
    engine_job_close(&job);
    world_close(&w);
}

/* ---- Evictions of others ---- */

/* Three sequences of one client whose every token evicts, at more rows than a step has, beside one
 * of another client: it has a token in every step; no step has two such evictions; what they cost
 * is spread as stated; and all answers are those they give alone. For every policy. */
static void spread_evictions(const char *policy, const struct engine_job *full_alone) {
    struct world w;
    struct engine_job jobs[4] = {{.request = full_alone->request}}, alone[4];
    for (int i = 1; i < 4; i++) {
        struct engine_kv kv = global(80, 0, 4);
        kv.policy = policy;
        alone[i] = jobs[i] = job_of(i, 100, 20, kv);
        run_alone(&alone[i]);
    }
    world_open(
        &w, &(struct world_options){
                .pages = 4000, .sequences = 4, .conversations = 0, .rows = 20, .row_entries = 1});
    for (int i = 0; i < 4; i++) {
        jobs[i].request.client[0] = i == 0;
        submit(&w, &jobs[i]);
        if (i == 0) cr_assert_not(world_step(&w));
    }
    const struct queue_client *client = NULL;
    int64_t spent = 0, before = 0;
    uint64_t first = w.sched.counters.steps, evictions = 0, steps = 0;
    while (atomic_load(&jobs[0].finished) == 0 && w.sched.running > 0) {
        evictions = w.sched.counters.evictions;
        int sequences = client ? client->running : 0;
        cr_assert_not(world_step(&w));
        if (!client) client = queue_client_of(&w.sched.queue, &jobs[1]);
        int64_t paid = before < (int64_t)SCHED_EVICT_ROWS * sequences
                           ? before
                           : (int64_t)SCHED_EVICT_ROWS * sequences;
        int64_t rows = client->evict_rows - before + paid;
        uint64_t more = w.sched.counters.evictions - evictions;
        steps = w.sched.counters.steps - first;
        cr_assert_eq(count_of(&jobs[0]), (int)steps + 1, "%s: it waited for others", policy);
        cr_assert(more <= 1 || rows <= w.options.rows, "%s: %d rows", policy, (int)rows);
        spent += rows;
        before = client->evict_rows;
        cr_assert_leq(spent, (int64_t)SCHED_EVICT_ROWS * 3 * (int64_t)(steps + 1) + 60);
    }
    run_until_idle(&w);
    cr_assert_geq(w.sched.counters.evictions, 3 * 12, "%s", policy);
    for (int i = 0; i < 4; i++) {
        expect_same_answer(&jobs[i], i == 0 ? full_alone : &alone[i]);
        engine_job_close(&jobs[i]);
        if (i > 0) engine_job_close(&alone[i]);
    }
    world_close(&w);
}

Test(sched, evictions_of_others_cost_a_bounded_part_of_each_step) {
    struct engine_job full_alone = job_of(0, 4, 500, full());
    run_alone(&full_alone);
    for (int index = 1; policy_at(index); index++)
        if (!test_leaves_out((size_t)index, 4))
            spread_evictions(policy_at(index)->name, &full_alone);
    engine_job_close(&full_alone);
}

/* Due sequences of one client that the step has no room for: the one that waits longest is first.
 */
Test(sched, the_eviction_that_waits_longest_goes_first) {
    struct world w;
    struct engine_job jobs[4];
    int ordered = 0;
    world_open(
        &w, &(struct world_options){
                .pages = 4000, .sequences = 4, .conversations = 0, .rows = 20, .row_entries = 1});
    for (int i = 0; i < 4; i++) {
        struct engine_kv kv = global(80, 3 - i, 4);
        kv.policy = "rkv";
        jobs[i] = job_of(i, 100, 30, kv);
        submit(&w, &jobs[i]);
    }
    while (!sched_idle(&w.sched)) {
        uint64_t since[4];
        for (int i = 0; i < 4; i++) since[i] = w.sched.sequences[i].due_since;
        cr_assert_not(world_step(&w));
        for (int a = 0; a < 4; a++)
            for (int b = 0; b < 4; b++) {
                const struct sequence *first = &w.sched.sequences[a];
                const struct sequence *second = &w.sched.sequences[b];
                bool later = since[b] == 0 || since[b] > since[a];
                if (since[a] == 0 || !later || !first->job || !second->job) continue;
                cr_assert(first->may_evict || !second->may_evict, "it waits since step %llu",
                          (unsigned long long)since[a]);
                ordered += first->may_evict && second->due_since > since[a];
            }
    }
    cr_assert_gt(ordered, 10, "none waited behind another: nothing was tested");
    for (int i = 0; i < 4; i++) engine_job_close(&jobs[i]);
    world_close(&w);
}

/* ---- Small numbers ---- */

static void expect_finish(int prompt_count, int max_tokens, struct engine_kv kv, bool echo) {
    struct engine_job job = job_of(2, prompt_count, max_tokens, kv);
    job.request.prompt_logprobs = echo;
    job.request.prompt_top_logprobs = echo ? 2 : 0;
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

/* ---- Vectors of texts ---- */

static struct engine_job text_of(int number, int count, enum engine_pooling pooling) {
    struct engine_job job = job_of(number, count, 0, global(8, 0, 8));
    job.request.pooling = pooling;
    job.request.kv.reuse = job.request.kv.retain = false;
    return job;
}

/* Every row's hidden state is a function of what its sequence holds, so a vector with other bits
 * would show a text that was read with a budget, or rows of another sequence. */
Test(sched, vectors_are_the_same_alone_and_in_any_batch) {
    enum { TEXTS = 9 };
    for (int rows = 5; rows <= 160; rows *= 5) {
        struct engine_job alone[TEXTS], jobs[TEXTS], chat = job_of(15, 60, 30, global(8, 0, 8));
        struct world w;
        for (int i = 0; i < TEXTS; i++) {
            alone[i] = text_of(i, 1 + 17 * i, (enum engine_pooling)(1 + i % 3));
            jobs[i] = text_of(i, 1 + 17 * i, (enum engine_pooling)(1 + i % 3));
            run_alone(&alone[i]);
        }
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 4, .conversations = 1, .rows = rows});
        submit(&w, &chat);
        for (int i = 0; i < TEXTS; i++) submit(&w, &jobs[i]);
        run_until_idle(&w);
        cr_assert_eq(finish_of(&chat), ENGINE_FINISH_LENGTH);
        for (int i = 0; i < TEXTS; i++) {
            cr_assert_eq(finish_of(&jobs[i]), ENGINE_FINISH_STOP);
            cr_assert_eq(count_of(&jobs[i]), 0);
            cr_assert_eq(jobs[i].kv.evicted_entries, 0);
            cr_assert_arr_eq(jobs[i].pooled, alone[i].pooled, WORLD_HIDDEN * sizeof(float));
            engine_job_close(&jobs[i]);
            engine_job_close(&alone[i]);
        }
        cr_assert_leq(turns_kept(&w), 1, "only the chat is kept");
        engine_job_close(&chat);
        world_close(&w);
    }
}

/* A vector's numbers depend on no others, so the rest of them takes no memory. A mean's sums are
 * twice as large as it, and a request has many texts. */
Test(sched, a_text_keeps_the_numbers_that_are_asked_for) {
    enum { FEW = 5 };
    for (int pooling = ENGINE_POOL_LAST; pooling <= ENGINE_POOL_CLS; pooling++) {
        struct engine_job all = text_of(2, 90, (enum engine_pooling)pooling), few = all;
        few.request.dimensions = FEW;
        run_alone(&all);
        run_alone(&few);
        cr_assert_eq(finish_of(&few), ENGINE_FINISH_STOP);
        cr_assert_arr_eq(few.pooled, all.pooled, FEW * sizeof(float));
        cr_expect_lt(malloc_usable_size(few.pooled), WORLD_HIDDEN * sizeof(float));
        cr_expect_null(few.pooled_sum);
        cr_expect_null(all.pooled_sum);
        engine_job_close(&few);
        engine_job_close(&all);
    }
    struct engine_job job = text_of(2, 90, ENGINE_POOL_MEAN);
    job.request.dimensions = WORLD_HIDDEN + 1;
    cr_expect_eq(seq_job_alloc(&job, 1, WORLD_STREAMS, WORLD_HIDDEN, 0), ERR_INVALID);
}

static void one_vector(int count, enum engine_pooling pooling, float *out) {
    struct engine_job job = text_of(3, count, pooling);
    run_alone(&job);
    memcpy(out, job.pooled, WORLD_HIDDEN * sizeof *out);
    engine_job_close(&job);
}

/* The vector of a text's last token, for all its beginnings, has in it what the others are made of.
 */
Test(sched, a_mean_is_the_mean_of_all_rows) {
    enum { COUNT = 40 };
    float last[WORLD_HIDDEN], mean[WORLD_HIDDEN], first[WORLD_HIDDEN];
    double sum[WORLD_HIDDEN] = {0};
    for (int count = 1; count <= COUNT; count++) {
        one_vector(count, ENGINE_POOL_LAST, last);
        one_vector(count, ENGINE_POOL_MEAN, mean);
        one_vector(count, ENGINE_POOL_CLS, first);
        for (int i = 0; i < WORLD_HIDDEN; i++) {
            sum[i] += (double)last[i];
            cr_assert_float_eq(mean[i], (float)(sum[i] / count), 1e-6);
            if (count == 1) cr_assert_eq(first[i], last[i]);
        }
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

/* For every policy, traced evictions and held entries together are all appended entries. */
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

/* Without memory for a trace record, the eviction still happens. */
Test(sched, a_lost_trace_is_counted) {
    struct engine_job job = job_of(3, 16, 30, global(10, 3, 16));
    struct world w;
    job.request.kv.report = ENGINE_REPORT_TRACE;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 1, .conversations = 1, .rows = 50});
    submit(&w, &job);
    cr_assert_not(world_step(&w)); /* the prompt, and its eviction */
    cr_assert_not_null(job.kv.evictions);
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

/* ---- Cancelling ---- */

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
    jobs[3] = job_of(3, 6, 4, full()); /* the end of the list is correct */
    submit(&w, &jobs[3]);
    run_until_idle(&w);
    cr_assert(finish_of(&jobs[1]) == ENGINE_FINISH_LENGTH &&
              finish_of(&jobs[3]) == ENGINE_FINISH_LENGTH);
    for (int i = 0; i < 4; i++) engine_job_close(&jobs[i]);
    world_close(&w);
}

/* Cancels after `steps` steps: one step later the job and its pages are gone; others continue. */
static void cancel_after(int steps) {
    struct world w;
    struct engine_job other = job_of(1, 5, 40, global(8, 4, 8));
    struct engine_job job = job_of(2, 60, 10, global(8, 4, 8)), same = other;
    run_alone(&same);
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 8});
    other.request.kv.retain = false; /* the kept conversation is the other job's */
    submit(&w, &other);
    submit(&w, &job);
    for (int i = 0; i < steps; i++) cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&job), ENGINE_RUNNING);
    atomic_store(&job.cancel, 1);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_ABORT);
    cr_assert(w.span_count == 1 && w.rows == 1, "a step still contained it");
    cr_assert_eq(w.sched.keeper.pages_reserved, w.sched.sequences[w.sched.order[0]].pages_reserved);
    cr_assert_eq(w.sched.keeper.table.count, 0, "an aborted request left a state");
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

/* A cancel during the computation of the last token: the answer was complete and stays so. */
Test(sched, cancel_after_the_end_changes_nothing) {
    struct world w;
    struct engine_job job = job_of(1, 5, 2, full());
    bool failed;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 8});
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    sched_step(&w.sched, &failed); /* ended, but not handed back yet */
    atomic_store(&job.cancel, 1);
    cr_assert_eq(finish_of(&job), ENGINE_RUNNING);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    cr_assert_eq(w.sched.keeper.table.count, 1);
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
        cr_assert(w.sched.keeper.table.count == 0 && pages_used(&w) == 0);
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

/* ---- Scores ---- */

Test(sched, scores_do_not_depend_on_the_steps) {
    static const int rows[] = {2, 3, 7, 33, 200}, logits[] = {2, 3, 5, 64, 300};
    static const struct {
        int budget, buffer, chunk;
    } bounds[] = {{600, 0, 32}, {12, 4, 10}, {1, 0, 1}};
    for (size_t b = 0; b < 3; b++) {
        struct engine_kv kv = global(bounds[b].budget, bounds[b].buffer, bounds[b].chunk);
        struct engine_job whole = job_of(3, 90, 4, kv);
        whole.request.prompt_logprobs = true;
        whole.request.prompt_top_logprobs = whole.request.top_logprobs = 3;
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

static void expect_beginning(const struct engine_top *whole, const struct engine_top *few) {
    double sum = 0;
    for (int k = 0; k < WORLD_VOCAB; k++) {
        sum += exp((double)whole[k].logprob);
        for (int other = 0; other < k; other++) cr_assert_neq(whole[other].token, whole[k].token);
        if (k > 0) cr_assert_leq(whole[k].logprob, whole[k - 1].logprob);
    }
    cr_assert_float_eq(sum, 1, 1e-5);
    for (int k = 0; k < 3; k++) {
        cr_assert_eq(whole[k].token, few[k].token);
        cr_assert_float_eq(whole[k].logprob, few[k].logprob, 1e-6);
    }
}

/* More alternatives than the backend reports come from the row of logits: every token once, in the
 * backend's order, for prompts and for all choices of an answer. */
Test(sched, alternatives_of_the_whole_vocabulary) {
    struct engine_job few = job_of(3, 30, 5, global(12, 4, 10)), whole;
    struct world w;
    few.request.prompt_logprobs = true;
    few.request.choices = 2;
    few.request.prompt_top_logprobs = few.request.top_logprobs = 3;
    whole = few;
    whole.request.prompt_top_logprobs = whole.request.top_logprobs = WORLD_VOCAB;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 4, .conversations = 1, .rows = 50});
    submit(&w, &few);
    submit(&w, &whole);
    run_until_idle(&w);
    world_close(&w);
    expect_same_answer(&whole, &few);
    cr_assert_gt(count_of(&few), 0);
    for (int t = 1; t < 30; t++)
        expect_beginning(&whole.prompt_top[WORLD_VOCAB * t], &few.prompt_top[3 * t]);
    for (int i = 0; i < 2; i++)
        for (uint32_t t = 0; t < atomic_load(&few.choice[i].token_count); t++)
            expect_beginning(&whole.choice[i].top[WORLD_VOCAB * t], &few.choice[i].top[3 * t]);
    engine_job_close(&few);
    engine_job_close(&whole);
}

/* Scores without alternatives: top_logprobs is their number and does not turn scores on. */
Test(sched, scores_without_alternatives) {
    struct engine_job job = job_of(3, 20, 0, full());
    job.request.prompt_logprobs = true;
    run_alone(&job);
    for (int t = 1; t < 20; t++)
        cr_assert(job.prompt_tokens[t].logprob <= 0 && job.prompt_tokens[t].rank >= 1);
    engine_job_close(&job);
}

/* A long scored prompt leaves few logits for others; later requests still do not wait. */
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

/* ---- Failures of the backend ---- */

/* Three run (one of them continues a conversation, one has two choices), two wait; one operation
 * fails once. Only those
 * who ran may end with the error; everything returns to the pool, and later requests work. */
static bool fail_once(enum world_op op, long n, int rc) {
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
    world_fail(op, n, rc);
    for (int step = 0; !sched_idle(&w.sched); step++) {
        bool pending = world_fail_pending();
        cr_assert_lt(step, 2000);
        failed_steps += world_step(&w);
        if (!pending || world_fail_pending()) continue;
        for (int i = 0; i < JOBS; i++) {
            if (finish_of(&jobs[i]) != ENGINE_FINISH_ERROR) continue;
            errors++;
            cr_assert_eq(atomic_load(&jobs[i].finished), 1);
            if (op != WORLD_REPORT) /* only the first choice needs a report */
                cr_assert_eq(atomic_load(&jobs[i].choice[jobs[i].choice_count - 1].finish),
                             ENGINE_FINISH_ERROR);
            cr_assert_eq(jobs[i].fault.code, rc);
            cr_assert_gt(strlen(jobs[i].fault.text), 0);
        }
        /* A checkpoint that cannot be taken is left out, and nobody fails. */
        bool nobody = errors == 0 && (op == WORLD_REPORT || op == WORLD_FORK);
        cr_assert(ends_step ? errors > 0 && w.sched.running == 0 : errors == 1 || nobody);
    }
    bool happened = !world_fail_pending();
    world_fail_never();
    cr_assert_eq(w.sched.keeper.pages_reserved, 0);
    cr_assert_eq(w.sched.counters.preemptions, (uint64_t)(happened && ends_step && rc == ERR_FULL));
    cr_assert_eq(failed_steps, happened && ends_step && rc == ERR_DEVICE);
    for (int i = 0; i < JOBS; i++) {
        if (finish_of(&jobs[i]) == ENGINE_FINISH_ERROR) errors--;
        engine_job_close(&jobs[i]);
    }
    cr_assert_eq(errors, 0, "somebody failed in another step");
    /* Later requests work as if alone. */
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

/* Logits that are no numbers end the request that they are for, with log-probabilities and without,
 * and nobody else. */
Test(sched, logits_that_are_no_numbers_end_one_request) {
    for (int32_t top = -1; top <= 1; top++) {
        struct world w;
        struct engine_job broken = job_of(0, 20, 8, global(10, 3, 8)),
                          other = job_of(1, 20, 8, global(10, 3, 8));
        struct engine_job alone = other;
        broken.request.top_logprobs = other.request.top_logprobs = alone.request.top_logprobs = top;
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 4, .conversations = 3, .rows = 40});
        submit(&w, &broken);
        submit(&w, &other);
        world_fail(WORLD_LOGITS, 3, ERR_INTERNAL);
        run_until_idle(&w);
        cr_expect_not(world_fail_pending());
        cr_expect_eq(finish_of(&broken), ENGINE_FINISH_ERROR);
        cr_expect_eq(broken.fault.code, ERR_INTERNAL);
        cr_expect_str_eq(broken.fault.text,
                         "the engine failed: the model's logits are not numbers");
        cr_expect_eq(finish_of(&other), ENGINE_FINISH_LENGTH);
        run_alone(&alone);
        expect_same_answer(&other, &alone);
        cr_expect_eq(w.sched.keeper.pages_reserved, 0);
        engine_job_close(&broken), engine_job_close(&other), engine_job_close(&alone);
        world_close(&w);
    }
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

/* ---- Failing memory ---- */

/* The n-th allocation of a request's life fails: it ends with an error, or without its long report;
 * the other one never notices, and nothing leaks. */
static bool fail_allocation(long n) {
    struct world w;
    struct engine_job other = job_of(1, 30, 40, global(8, 4, 8)), same = other;
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
    submit(&w, &other);
    while (count_of(&other) == 0) cr_assert_not(world_step(&w));
    mem_fail_after(n);
    int rc = world_submit(&w, &job);
    bool pending = mem_fail_pending(), failed = false;
    while (rc == 0 && atomic_load(&job.finished) == 0) {
        sched_step(&w.sched, &failed);
        cr_assert_not(failed);
        pending = mem_fail_pending();
        if (!pending) mem_fail_after(-1);
        sched_publish_finished(&w.sched);
    }
    mem_fail_after(-1);
    world_check(&w);
    cr_assert_eq(w.sched.counters.preemptions, 0);
    cr_assert(rc == 0 || rc == ERR_NOMEM);
    if (rc == 0 && finish_of(&job) == ENGINE_FINISH_ERROR)
        cr_assert_eq(job.fault.code, ERR_NOMEM);
    else if (rc == 0)
        cr_assert(finish_of(&job) == ENGINE_FINISH_LENGTH || finish_of(&job) == ENGINE_FINISH_STOP);
    if (pending) cr_assert(job.kv.lengths && job.kv.positions);
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
