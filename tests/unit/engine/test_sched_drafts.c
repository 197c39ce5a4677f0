/* Drafted tokens in a step: engine/steps/sched_draft.c. Answers are the same as without them. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/mem.h"
#include "engine/steps/constraint.h"
#include "paging/policy.h"
#include "tests/unit/engine/requests.h"

enum { PROMPT = 30, ANSWER = 60 };

static struct world_options options_of(int drafts) {
    return (struct world_options){.pages = 600,
                                  .sequences = 8,
                                  .conversations = 4,
                                  .rows = 128,
                                  .logits = 64,
                                  .drafts = drafts};
}

/* An answer without drafts, and the steps that it took. */
struct known {
    struct engine_job job;
    int32_t tokens[ANSWER]; /* as many as were asked for count as predicted */
    int steps;
    int states; /* recurrent states of the model */
};

static int run_counted(struct world *w, struct engine_job *job) {
    uint64_t before = w->sched.counters.steps;
    submit(w, job);
    run_until_idle(w);
    return (int)(w->sched.counters.steps - before);
}

static void know_with_states(struct known *known, const struct engine_job *asked, int states) {
    struct world w;
    struct world_options options = options_of(0);
    *known = (struct known){.job = *asked, .states = states};
    options.states = states;
    world_open(&w, &options);
    known->steps = run_counted(&w, &known->job);
    cr_assert_eq(w.sched.counters.drafted_tokens, 0);
    world_close(&w);
    for (int i = 0; i < count_of(&known->job); i++)
        known->tokens[i] = known->job.choice[0].tokens[i].token;
}

static void know(struct known *known, const struct engine_job *asked) {
    know_with_states(known, asked, 0);
}

/* The same request with its answer predicted. Returns the steps that it took. */
static int run_predicted(const struct known *known, const struct engine_job *asked, int drafts,
                         struct engine_job *job) {
    struct world w;
    struct world_options options = options_of(drafts);
    options.states = known->states;
    *job = *asked;
    job->request.drafts = -1;
    job->request.predicted = known->tokens;
    job->request.predicted_count = asked->request.max_tokens;
    world_open(&w, &options);
    int steps = run_counted(&w, job);
    int32_t confirmed = 0, rejected = 0;
    for (int i = 0; i < job->choice_count; i++) {
        confirmed += job->choice[i].drafts_confirmed;
        rejected += job->choice[i].drafts_rejected;
    }
    cr_assert_eq(w.sched.counters.confirmed_tokens, (uint64_t)confirmed);
    cr_assert_eq(w.sched.counters.drafted_tokens, (uint64_t)(confirmed + rejected));
    world_close(&w);
    return steps;
}

/* Changes every fourth token. */
static void spoil(int32_t *tokens, int count) {
    for (int i = 3; i < count; i += 4) tokens[i] = 1 + tokens[i] % (WORLD_VOCAB - 1);
}

static void expect_same(const struct known *known, const struct engine_job *job) {
    expect_same_answer(&known->job, job);
    cr_assert_eq(known->job.kv.kept_entries, job->kv.kept_entries);
    cr_assert_eq(known->job.kv.seen_tokens, job->kv.seen_tokens);
    cr_assert_eq(atomic_load(&known->job.choice[0].text_safe),
                 atomic_load(&job->choice[0].text_safe));
}

static void close_both(struct known *known, struct engine_job *job) {
    engine_job_close(&known->job);
    engine_job_close(job);
}

Test(drafts, a_predicted_answer_takes_a_few_steps) {
    struct known known;
    struct engine_job asked = job_of(1, PROMPT, ANSWER, full()), job;
    know(&known, &asked);
    int steps = run_predicted(&known, &asked, DRAFT_MAX, &job);
    expect_same(&known, &job);
    cr_assert_lt(steps, known.steps / 4, "%d steps instead of %d", steps, known.steps);
    cr_assert_gt(job.choice[0].drafts_confirmed, ANSWER / 2);
    engine_job_close(&job);
    steps = run_predicted(&known, &asked, 1, &job);
    expect_same(&known, &job);
    cr_assert_gt(steps, known.steps / 3, "one drafted token a step at most");
    close_both(&known, &job);
}

/* A state has seen the tokens that were drawn, no others, also where an answer ends in a draft. */
Test(drafts, recurrent_states_wait_for_the_tokens_that_are_drawn) {
    for (int spoilt = 0; spoilt < 2; spoilt++) {
        struct known known;
        struct engine_job asked = job_of(1, PROMPT, ANSWER, full()), job;
        know_with_states(&known, &asked, 2);
        if (spoilt) spoil(known.tokens, ANSWER);
        const int steps = run_predicted(&known, &asked, DRAFT_MAX, &job);
        expect_same(&known, &job);
        cr_assert_lt(steps, known.steps, "%d steps instead of %d", steps, known.steps);
        cr_assert_gt(job.choice[0].drafts_confirmed, 0, "%d of %d tokens, spoilt %d",
                     job.choice[0].drafts_confirmed, count_of(&job), spoilt);
        close_both(&known, &job);
    }
}

/* A state that cannot wait allows no drafts. */
Test(drafts, states_that_cannot_wait_have_none) {
    struct world w;
    struct world_options options = options_of(DRAFT_MAX);
    struct engine_job job = job_of(1, PROMPT, ANSWER, full());
    options.states = 1;
    job.request.drafts = -1;
    world_open(&w, &options);
    w.sched.options.bring_states = NULL;
    run_counted(&w, &job);
    cr_assert_eq(job.choice[0].undrafted, ENGINE_UNDRAFTED_STATES);
    world_close(&w);
    engine_job_close(&job);
}

/* Budgets, buffers and chunks of every policy. */
Test(drafts, no_draft_reaches_beyond_an_eviction) {
    static const int sizes[][3] = {{16, 4, 8}, {16, 0, 64}, {60, 7, 16}, {20, 40, 32}};
    long drafted = 0;
    for (int p = 0; policy_at(p); p++) {
        for (int i = 0; i < 4; i++) {
            struct known known;
            struct engine_kv kv = global(sizes[i][0], sizes[i][1], sizes[i][2]);
            kv.policy = policy_at(p)->name;
            struct engine_job asked = job_of(2, PROMPT, ANSWER, kv), job;
            know(&known, &asked);
            run_predicted(&known, &asked, DRAFT_MAX, &job);
            expect_same(&known, &job);
            drafted += job.choice[0].drafts_confirmed;
            if (sizes[i][1] == 0 && policy_at(p)->bounded)
                cr_assert_eq(job.choice[0].drafts_confirmed, 0);
            close_both(&known, &job);
        }
    }
    cr_assert_gt(drafted, 100);
}

/* Policies that keep records of queries have no drafts. */
Test(drafts, records_of_queries_cannot_be_taken_back) {
    static const char *const names[] = {"snapkv", "h2o", "rkv", "d2o", "ems"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct known known;
        struct engine_kv kv = global(16, 16, 16);
        kv.policy = names[i];
        struct engine_job asked = job_of(3, PROMPT, ANSWER, kv), job;
        know(&known, &asked);
        run_predicted(&known, &asked, DRAFT_MAX, &job);
        cr_assert_eq(job.choice[0].drafts_confirmed + job.choice[0].drafts_rejected, 0, "%s",
                     names[i]);
        close_both(&known, &job);
    }
}

/* An answer in a language that decides most of its letters, which no text before it has. */
Test(drafts, what_the_language_leaves_is_foreseen) {
    static const char pattern[] = "([bc]defghijkl|[mn]opqrstuvw){6}";
    const struct constrain_part part = {
        .kind = CONSTRAIN_REGEX, .field = "f", .text = pattern, .size = sizeof pattern - 1};
    const struct constrain_vocabulary v = {WORLD_VOCAB, world_token_bytes, NULL};
    struct constraint_table table;
    struct engine_constraint *constraint = NULL;
    struct fault fault = {0};
    struct known known;
    constraint_table_open(&table, &v);
    cr_assert_eq(constraint_open(&table, &part, &constraint, &fault), 0);
    struct engine_job asked = job_of(4, PROMPT, ANSWER, full()), job;
    asked.request.constraint = constraint;
    know(&known, &asked);
    for (int drafts = 0; drafts <= DRAFT_MAX; drafts += DRAFT_MAX) {
        struct world w;
        struct world_options options = options_of(drafts);
        job = asked;
        job.request.drafts = -1;
        world_open(&w, &options);
        int steps = run_counted(&w, &job);
        world_close(&w);
        expect_same(&known, &job);
        cr_assert(drafts ? steps < known.steps / 3 : steps == known.steps, "%d of %d", steps,
                  known.steps);
        engine_job_close(&job);
    }
    engine_job_close(&known.job);
    constraint_close(&table, constraint);
    constraint_table_close(&table);
}

/* Stop strings, logprobs with more alternatives than the backend reports, penalties, a bias, the
 * last token before max_tokens. */
Test(drafts, what_follows_from_a_token_follows_before_the_next) {
    struct engine_stop stop;
    char whole[20];
    const struct engine_bias bias = {3, 2};
    for (int i = 0; i < 5; i++) {
        struct known known;
        struct engine_job asked = job_of(4, PROMPT, 23 + i, global(40, 16, 16)), job;
        if (i == 1) asked.request.top_logprobs = WORLD_VOCAB;
        if (i == 2) asked.request.repetition = 1.3f, asked.request.presence = 0.5f;
        if (i == 3) asked.request.bias = &bias, asked.request.bias_count = 1;
        know(&known, &asked);
        if (i == 4) { /* the ninth and tenth letter of the answer end it; the rest is predicted */
            stop = (struct engine_stop){whole + 8, 2};
            memcpy(whole, known.job.choice[0].text, sizeof whole);
            asked.request.stops = &stop;
            asked.request.stop_count = 1;
            engine_job_close(&known.job);
            int32_t tokens[ANSWER];
            memcpy(tokens, known.tokens, sizeof tokens);
            know(&known, &asked);
            cr_assert_eq(finish_of(&known.job), ENGINE_FINISH_STOP);
            memcpy(known.tokens, tokens, sizeof tokens);
        }
        run_predicted(&known, &asked, DRAFT_MAX, &job);
        expect_same(&known, &job);
        cr_assert_gt(job.choice[0].drafts_confirmed, 0, "case %d", i);
        if (i == 1)
            cr_assert_eq(memcmp(known.job.choice[0].top, job.choice[0].top,
                                24 * WORLD_VOCAB * sizeof *job.choice[0].top),
                         0);
        close_both(&known, &job);
    }
}

/* Several choices of a live request, each predicted as if it was the first; an answer of one token;
 * one that is cancelled between two steps. */
Test(drafts, choices_live_reports_and_short_answers) {
    struct known known, other;
    struct engine_job asked = job_of(11, PROMPT, ANSWER, global(24, 12, 16)), job;
    asked.request.kv.live = true;
    know(&known, &asked);
    asked.request.choices = 3;
    run_predicted(&known, &asked, DRAFT_MAX, &job);
    expect_same(&known, &job);
    for (int i = 1; i < 3; i++) { /* choice i is the request's answer with seed + i */
        struct engine_job alone = job_of(11, PROMPT, ANSWER, global(24, 12, 16));
        alone.request.seed += (uint64_t)i;
        know(&other, &alone);
        for (int k = 0; k < ANSWER; k++)
            cr_assert_eq(other.tokens[k], job.choice[i].tokens[k].token, "choice %d", i);
        engine_job_close(&other.job);
    }
    cr_assert_gt(job.choice[0].drafts_confirmed, 0);
    close_both(&known, &job);
    asked = job_of(12, 1, 1, full());
    know(&known, &asked);
    run_predicted(&known, &asked, DRAFT_MAX, &job);
    expect_same(&known, &job);
    close_both(&known, &job);
}

/* The next turn goes on from what was kept, without a trace of rejected tokens. */
Test(drafts, a_next_turn_finds_what_it_would_have_found) {
    struct engine_job last[2];
    int32_t predicted[25];
    for (int drafts = 0; drafts < 2; drafts++) {
        struct world w;
        struct world_options options = options_of(drafts ? DRAFT_MAX : 0);
        world_open(&w, &options);
        struct engine_job first = job_of(5, PROMPT, 25, global(24, 12, 16));
        first.request.drafts = -1;
        first.request.predicted = predicted;
        first.request.predicted_count = drafts ? 25 : 0;
        submit(&w, &first);
        run_until_idle(&w);
        int32_t *prompt = prompt_of(5, 0);
        for (int i = 0; i < 24; i++) prompt[PROMPT + i] = first.choice[0].tokens[i].token;
        last[drafts] = job_of(6, PROMPT + 40, 30, global(24, 12, 16));
        last[drafts].request.prompt = prompt;
        submit(&w, &last[drafts]);
        run_until_idle(&w);
        cr_assert_eq(last[drafts].cached_tokens, PROMPT + 24);
        if (drafts) cr_assert_gt(first.choice[0].drafts_rejected, 0);
        for (int i = 0; i < 25; i++) predicted[i] = first.choice[0].tokens[i].token;
        spoil(predicted, 25);
        engine_job_close(&first);
        world_close(&w);
    }
    expect_same_answer(&last[0], &last[1]);
    cr_assert_eq(last[0].kv.kept_entries, last[1].kv.kept_entries);
    engine_job_close(&last[0]);
    engine_job_close(&last[1]);
}

/* Without memory for the search an answer comes without drafts. */
Test(drafts, no_memory_costs_the_drafts_alone) {
    struct known known;
    struct engine_job asked = job_of(7, PROMPT, ANSWER, full());
    bool without = false;
    know(&known, &asked);
    for (long n = 0; n < 12; n++) {
        struct world w;
        struct world_options options = options_of(DRAFT_MAX);
        struct engine_job job = asked;
        job.request.drafts = -1;
        job.request.predicted = known.tokens;
        job.request.predicted_count = ANSWER;
        world_open(&w, &options);
        bool failed;
        submit(&w, &job);
        mem_fail_after(n);
        sched_step(&w.sched, &failed);
        mem_fail_after(-1);
        sched_publish_finished(&w.sched);
        run_until_idle(&w);
        if (finish_of(&job) == ENGINE_FINISH_LENGTH) {
            expect_same(&known, &job);
            without = without || job.choice[0].drafts_confirmed == 0;
        }
        engine_job_close(&job);
        world_close(&w);
    }
    cr_assert(without);
    engine_job_close(&known.job);
}

/* A failure while entries are taken back fails the running requests and no others. */
Test(drafts, entries_that_cannot_be_taken_back) {
    struct world w;
    struct world_options options = options_of(DRAFT_MAX);
    struct engine_job asked = job_of(8, PROMPT, ANSWER, full()), job = asked;
    struct known known;
    know(&known, &asked);
    spoil(known.tokens, ANSWER);
    job.request.drafts = -1;
    job.request.predicted = known.tokens;
    job.request.predicted_count = ANSWER;
    world_open(&w, &options);
    world_fail(WORLD_TRUNCATE, 0, ERR_INTERNAL);
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert_not(world_fail_pending());
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_ERROR);
    engine_job_close(&job);
    job = job_of(8, PROMPT, 5, full());
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    engine_job_close(&job);
    engine_job_close(&known.job);
    world_close(&w);
}

/* Beside answers of another client a step grows by SCHED_DRAFT_STRETCH percent at most: not at all,
 * as rows cost in the simulation. A client's own answers may be lengthened. */
Test(drafts, other_clients_answers_are_not_delayed) {
    struct known known;
    struct engine_job asked = job_of(9, PROMPT, ANSWER, full());
    know(&known, &asked);
    for (int others = 0; others < 2; others++) {
        struct world w;
        struct world_options options = options_of(DRAFT_MAX);
        struct engine_job jobs[2] = {asked, job_of(10, PROMPT, 2 * ANSWER, full())};
        jobs[0].request.drafts = -1;
        jobs[0].request.predicted = known.tokens;
        jobs[0].request.predicted_count = ANSWER;
        jobs[1].request.client[0] = (uint8_t)others;
        world_open(&w, &options);
        submit(&w, &jobs[1]);
        while (count_of(&jobs[1]) == 0) cr_assert_not(world_step(&w));
        submit(&w, &jobs[0]);
        while (finish_of(&jobs[0]) == ENGINE_RUNNING) cr_assert_not(world_step(&w));
        if (others)
            cr_assert_eq(jobs[0].choice[0].drafts_confirmed, 0);
        else
            cr_assert_gt(jobs[0].choice[0].drafts_confirmed, ANSWER / 2);
        run_until_idle(&w);
        expect_same(&known, &jobs[0]);
        engine_job_close(&jobs[0]);
        engine_job_close(&jobs[1]);
        world_close(&w);
    }
    engine_job_close(&known.job);
}
