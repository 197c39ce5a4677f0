/* A draft model beside the scheduler: engine/steps/sched_drafter.c. Answers are the same as without
 * it. The world's draft model is the model itself over a cache of its own. */
#include <criterion/criterion.h>
#include <string.h>

#include "engine/steps/constraint.h"
#include "tests/unit/engine/requests.h"

enum { PROMPT = 30, ANSWER = 60 };

static struct world_options options_of(int texts) {
    return (struct world_options){.pages = 1600,
                                  .sequences = 8,
                                  .conversations = 4,
                                  .rows = 128,
                                  .logits = 64,
                                  .drafts = DRAFT_MAX,
                                  .draft_texts = texts};
}

/* Runs the request alone; returns the scheduler's counters. */
static struct engine_counters run(const struct world_options *options, struct engine_job *job) {
    struct world w;
    world_open(&w, options);
    submit(&w, job);
    run_until_idle(&w);
    struct engine_counters counters = w.sched.counters;
    world_close(&w);
    return counters;
}

/* A request that may have drafts, and its answer without any. */
static struct engine_job know(struct engine_job *asked) {
    struct world_options options = options_of(0);
    struct engine_job job = *asked;
    asked->request.drafts = -1;
    job.request.drafts = 0;
    run(&options, &job);
    return job;
}

Test(drafter, its_guesses_save_steps) {
    for (int temperature = 0; temperature < 2; temperature++) {
        struct world_options options = options_of(2);
        struct engine_job job = job_of(1, PROMPT, ANSWER, full());
        job.request.temperature = (float)temperature;
        struct engine_job known = know(&job);
        struct engine_counters counters = run(&options, &job);
        expect_same_answer(&known, &job);
        cr_assert_gt(counters.model_confirmed_tokens, ANSWER / 3);
        cr_assert_eq(counters.model_confirmed_tokens, counters.model_drafted_tokens,
                     "%lu of %lu: the same model draws alike", counters.model_confirmed_tokens,
                     counters.model_drafted_tokens);
        cr_assert_lt(counters.steps, ANSWER * 2 / 3);
        engine_job_close(&known);
        engine_job_close(&job);
    }
}

/* A block of the model's files reads the hidden state of the token before each token, which the
 * world checks: in long answers too, whose texts begin anew; beside choices and recurrent states;
 * and where texts are rare. */
Test(drafter, a_block_gets_the_hidden_states_of_its_tokens) {
    for (int i = 0; i < 4; i++) {
        struct world_options options = options_of(i == 2 ? 1 : 4);
        struct engine_job job = job_of(1 + i, PROMPT, 200, full());
        options.draft_block = true;
        options.draft_places = DRAFTER_PLACES_LEAST;
        options.draft_wrong = 10 * i;
        options.states = i == 1;
        job.request.temperature = (float)(i % 2);
        job.request.choices = i == 2 ? 3 : 1;
        struct engine_job alone = job;
        alone.request.drafts = 0;
        job.request.drafts = -1;
        run(&options, &alone);
        struct engine_counters counters = run(&options, &job);
        expect_same_answer(&alone, &job);
        cr_assert_gt(counters.model_drafted_tokens, 0);
        cr_assert_eq(counters.drafter_failures, 0);
        engine_job_close(&alone);
        engine_job_close(&job);
    }
}

/* Some vocabularies are filled up to a round size, the draft model's to a larger one. Masks and
 * biases have only the answer's tokens: with the sanitisers, a look beyond a mask ends the test. */
Test(drafter, guesses_are_tokens_of_the_answer) {
    const struct constrain_vocabulary v = {WORLD_VOCAB, world_token_bytes, NULL};
    const struct constrain_part part = {
        .kind = CONSTRAIN_REGEX, .field = "f", .text = "[a-zA-L]*", .size = strlen("[a-zA-L]*")};
    struct constraint_table table;
    struct engine_constraint *constraint;
    struct fault fault = {0};
    constraint_table_open(&table, &v);
    cr_assert_eq(constraint_open(&table, &part, &constraint, &fault), 0, "%s", fault.text);
    for (int i = 0; i < 4; i++) {
        struct world_options options = options_of(4);
        struct engine_job job = job_of(1, PROMPT, ANSWER, full());
        job.request.choices = 1 + i % 2;
        if (i >= 2) job.request.constraint = constraint;
        if (i >= 2) job.request.think_begin = job.request.think_end = -1;
        struct engine_job known = know(&job), same = job;
        struct engine_counters counters = run(&options, &same);
        options.draft_extra = 1000;
        struct engine_counters more = run(&options, &job);
        expect_same_answer(&known, &job);
        cr_expect_gt(more.model_confirmed_tokens, ANSWER / 3);
        cr_expect_eq(more.model_confirmed_tokens, counters.model_confirmed_tokens);
        engine_job_close(&known);
        engine_job_close(&same);
        engine_job_close(&job);
    }
    constraint_close(&table, constraint);
    constraint_table_close(&table);
}

/* Where what the text tells is confirmed, the draft model is asked less. */
Test(drafter, rests_where_the_text_tells_enough) {
    struct world_options options = options_of(2);
    struct engine_job job = job_of(1, PROMPT, ANSWER, full()), known = know(&job);
    int32_t tokens[ANSWER];
    for (int i = 0; i < ANSWER; i++) tokens[i] = known.choice[0].tokens[i].token;
    struct engine_job plain = job;
    uint64_t steps = run(&options, &plain).drafter_steps;
    job.request.predicted = tokens;
    job.request.predicted_count = ANSWER;
    struct engine_counters counters = run(&options, &job);
    expect_same_answer(&known, &job);
    cr_assert_lt(counters.drafter_steps, steps / 2);
    cr_assert_gt(counters.confirmed_tokens, counters.model_confirmed_tokens);
    engine_job_close(&known);
    engine_job_close(&plain);
    engine_job_close(&job);
}

/* Texts are read again from their last tokens; without a free one a sequence has none. */
Test(drafter, many_long_answers_in_little_memory) {
    enum { JOBS = 6, LONG = 300 };
    struct world w;
    struct world_options options = options_of(3);
    options.draft_places = DRAFTER_PLACES_LEAST;
    struct engine_job jobs[JOBS], known[JOBS];
    struct kern_cache_stats stats;
    int64_t most = 0;
    for (int i = 0; i < JOBS; i++) {
        jobs[i] = job_of(i, PROMPT + 20 * i, LONG, global(40, 16, 16));
        known[i] = know(&jobs[i]);
        jobs[i].request.drafts = -1;
    }
    world_open(&w, &options);
    for (int i = 0; i < JOBS; i++) submit(&w, &jobs[i]);
    while (!sched_idle(&w.sched)) {
        cr_assert_not(world_step(&w));
        w.draft->ops->cache_stats(w.draft, &stats);
        if (stats.pages_used > most) most = stats.pages_used;
    }
    int slots = slots_per_page();
    cr_assert_leq(most, 3 * WORLD_STREAMS * ((DRAFTER_PLACES_LEAST + slots - 1) / slots));
    cr_assert_gt(w.sched.counters.model_drafted_tokens, 0);
    cr_assert_eq(w.sched.counters.drafter_failures, 0);
    cr_assert_eq(w.sched.counters.preemptions, 0);
    for (int i = 0; i < JOBS; i++) {
        expect_same_answer(&known[i], &jobs[i]);
        engine_job_close(&known[i]);
        engine_job_close(&jobs[i]);
    }
    world_close(&w);
}

/* Wrong guesses, steps and cuts that fail, at any time. */
Test(drafter, its_failures_are_no_answers) {
    long failures = 0, rejected = 0;
    for (int fails = 0; fails <= 100; fails += 20) {
        struct world_options options = options_of(4);
        options.draft_fails = fails;
        options.draft_wrong = 30;
        for (int number = 0; number < 5; number++) {
            struct engine_job job = job_of(number, PROMPT, ANSWER, global(24, 12, 16));
            job.request.choices = 3;
            struct engine_job known = know(&job);
            struct engine_counters counters = run(&options, &job);
            expect_same_answer(&known, &job);
            failures += (long)counters.drafter_failures;
            rejected += (long)(counters.model_drafted_tokens - counters.model_confirmed_tokens);
            if (fails == 100) cr_assert_eq(counters.model_drafted_tokens, 0);
            engine_job_close(&known);
            engine_job_close(&job);
        }
    }
    cr_assert_gt(failures, 20);
    cr_assert_gt(rejected, 20);
}

/* A model whose guesses are never right is hardly asked. */
Test(drafter, what_is_never_confirmed_is_hardly_asked) {
    struct world_options options = options_of(1);
    options.draft_wrong = 100;
    struct engine_job job = job_of(2, PROMPT, 400, full()), known = know(&job);
    struct engine_counters counters = run(&options, &job);
    expect_same_answer(&known, &job);
    cr_assert_lt(counters.drafter_steps, 200);
    cr_assert_gt(counters.drafter_steps, 0);
    engine_job_close(&known);
    engine_job_close(&job);
}

/* A model that is slow and often wrong costs an answer little more than it gains, for whatever
 * reason it was expected to gain, however long the answer is. A step of it counts draft_weight, a
 * guess PACE_ROW_PART. */
Test(drafter, what_it_costs_is_bounded) {
    static const int wrong[] = {40, 60, 80, 100, 60};
    for (int i = 0; i < 5; i++) {
        const int32_t length = i < 4 ? 400 : 1600;
        struct world_options options = options_of(1);
        options.positions = options.draft_places = PROMPT + length + DRAFT_MAX;
        options.draft_wrong = wrong[i];
        options.draft_weight = 0.4;
        options.check_each = 100;
        struct engine_job job = job_of(2, PROMPT, length, full()), known = job;
        job.request.drafts = -1;
        run(&options, &known);
        struct engine_counters counters = run(&options, &job);
        expect_same_answer(&known, &job);
        const double lost = options.draft_weight * (double)counters.drafter_steps +
                            PACE_ROW_PART * (double)counters.model_drafted_tokens -
                            (double)counters.model_confirmed_tokens;
        cr_assert_gt(counters.drafter_steps, 0);
        cr_expect_lt(lost, 2 + 0.01 * length, "%.1f of %d steps", lost, length);
        engine_job_close(&known);
        engine_job_close(&job);
    }
}

Test(drafter, rests_beside_other_clients_answers) {
    for (int others = 0; others < 2; others++) {
        struct world w;
        struct world_options options = options_of(4);
        struct engine_job jobs[2] = {job_of(1, PROMPT, ANSWER, full()),
                                     job_of(3, PROMPT, ANSWER, full())};
        world_open(&w, &options);
        for (int i = 0; i < 2; i++) {
            jobs[i].request.drafts = -1;
            jobs[i].request.client[0] = (uint8_t)(i * others);
            submit(&w, &jobs[i]);
        }
        run_until_idle(&w);
        cr_assert_eq(w.sched.counters.drafter_steps == 0, others == 1);
        for (int i = 0; i < 2; i++) engine_job_close(&jobs[i]);
        world_close(&w);
    }
}

/* Why no tokens are guessed is told. */
Test(drafter, who_cannot_be_guessed_for_says_so) {
    static const char *const names[] = {"streaming", "snapkv", "h2o", "d2o"};
    for (int i = 0; i < 4; i++) {
        struct world_options options = options_of(2);
        struct engine_kv kv = global(16, 16, 16);
        kv.policy = names[i];
        struct engine_job job = job_of(3, PROMPT, ANSWER, kv);
        job.request.drafts = -1;
        struct engine_counters counters = run(&options, &job);
        cr_assert_eq(counters.drafter_steps > 0, i == 0);
        cr_assert_eq(job.choice[0].undrafted,
                     i == 0 ? ENGINE_UNDRAFTED_NOT : ENGINE_UNDRAFTED_POLICY);
        engine_job_close(&job);
    }
    struct world_options options = options_of(2);
    options.states = 1;
    struct engine_job job = job_of(3, PROMPT, ANSWER, full());
    job.request.drafts = -1;
    cr_assert_gt(run(&options, &job).drafter_steps, 0);
    cr_assert_eq(job.choice[0].undrafted, ENGINE_UNDRAFTED_NOT);
    engine_job_close(&job);
}

/* Times that were measured in a bad moment are forgotten. */
Test(drafter, one_slow_step_does_not_decide_for_ever) {
    for (int steps = DRAFTER_SKIPPED - 60; steps < 600; steps += 380) {
        struct world w;
        struct world_options options = options_of(1);
        options.step_stretch = 200;
        struct engine_job job = job_of(2, PROMPT, steps, full()), known = know(&job);
        world_open(&w, &options);
        w.sched.drafter.steps = DRAFTER_COLD;
        pace_note_drafts(&w.sched.drafter.pace, 1, INT64_MAX / 2);
        pace_note_drafts(&w.sched.pace, 1, world_step_ns(1, 0));
        submit(&w, &job);
        run_until_idle(&w);
        cr_assert_eq(w.sched.counters.drafter_steps > 0, steps > DRAFTER_SKIPPED);
        expect_same_answer(&known, &job);
        world_close(&w);
        engine_job_close(&known);
        engine_job_close(&job);
    }
}
