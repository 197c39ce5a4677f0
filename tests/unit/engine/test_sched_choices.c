/* Several choices of one request in engine/steps/sched.c. */
#include <criterion/criterion.h>

#include "tests/unit/engine/requests.h"

/* ---- Choices ---- */

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
        cr_assert_geq(jobs[i].cached_tokens, history); /* or the checkpoint of one before it */
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

Test(choices, each_choice_equals_its_own_request) {
    static const int rows[] = {7, 64, 200};
    for (int i = 0; i < 3; i++) {
        try_choices(full(), rows[i], 0);
        try_choices(global(16, 4, 8), rows[i], 0);
        try_choices(global(16, 4, 8), rows[i], 30);
        try_choices(global(60, 0, 64), rows[i], 25);
    }
}

Test(choices, all_choices_run_or_none) {
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
        bool others =
            finish_of(&jobs[2]) != ENGINE_RUNNING; /* job 2 passed the head, and has ended */
        cr_assert_eq(w.sched.running, !jobs[0].admitted ? 0 : others ? 2 : 3);
        cr_assert_eq(atomic_load(&jobs[1].admitted), 0, "three places for two free ones");
        cr_assert_not(world_step(&w));
    }
    cr_assert_not(world_step(&w));
    cr_assert(jobs[1].admitted == 1 && finish_of(&jobs[2]) == ENGINE_FINISH_LENGTH);
    cr_assert_eq(w.sched.running, 3);
    run_until_idle(&w);
    cr_assert_eq(w.sched.keeper.table.count, 3, "a choice other than the first left its state");
    for (int i = 0; i < 3; i++) engine_job_close(&jobs[i]);
    struct engine_job many = job_of(1, 10, 3, full());
    many.request.choices = 5; /* a caller that did not check: only this job is rejected */
    submit(&w, &many);
    run_until_idle(&w);
    cr_assert_eq(atomic_load(&many.choice[4].finish), ENGINE_FINISH_ERROR);
    cr_assert_eq(many.fault.code, ERR_LIMIT);
    engine_job_close(&many);
    world_close(&w);
}

Test(choices, choices_reserve_as_if_nothing_was_shared) {
    struct world w;
    int page = slots_per_page();
    struct engine_job job = job_of(1, page, 3, full()); /* two pages a stream */
    struct fault fault = {0};
    job.request.choices = 3;
    world_open(&w, &(struct world_options){
                       .pages = 6 * WORLD_STREAMS, .sequences = 4, .conversations = 0, .rows = 64});
    cr_assert_eq(sched_resolve_job(&w.sched.options.kv, &job, &fault), 0);
    cr_assert_eq(sched_check(&w.sched.options, &job, &fault), 0);
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    cr_assert_eq(w.sched.keeper.pages_reserved, 6 * WORLD_STREAMS);
    cr_assert_eq(pages_used(&w), WORLD_STREAMS, "the prompt was not shared");
    run_until_idle(&w);
    cr_assert_eq(atomic_load(&job.choice[2].finish), ENGINE_FINISH_LENGTH);
    engine_job_close(&job);
    job = job_of(1, page, 3, full());
    job.request.choices = 4;
    cr_assert_eq(sched_resolve_job(&w.sched.options.kv, &job, &fault), 0);
    cr_assert_eq(sched_check(&w.sched.options, &job, &fault), ERR_LIMIT);
    cr_assert_str_eq(fault.field, "n");
    engine_job_close(&job);
    world_close(&w);
}

/* A choice that ends early is published at once; the job is handed back with the last one. */
Test(choices, choices_end_one_by_one) {
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
Test(choices, cancelling_ends_every_choice) {
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
        cr_assert(w.sched.keeper.pages_reserved == 0 && pages_used(&w) == 0 &&
                  sched_idle(&w.sched));
        cr_assert_eq(w.sched.keeper.table.count, 0);
        engine_job_close(&job);
        world_close(&w);
    }
}

/* Echo for several choices scores the prompt once. */
/* One choice's logits are no numbers in the step in which the others would end: the whole job ends
 * with the error. */
Test(choices, an_error_of_one_choice_is_the_end_of_all) {
    struct world w;
    struct engine_job job = job_of(0, 20, 2, full());
    job.request.choices = 3;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 4, .conversations = 3, .rows = 40});
    submit(&w, &job);
    world_fail(WORLD_LOGITS, 1, ERR_INTERNAL);
    run_until_idle(&w);
    cr_assert_not(world_fail_pending());
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(atomic_load(&job.choice[i].finish), ENGINE_FINISH_ERROR, "choice %d", i);
        cr_assert_eq(atomic_load(&job.choice[i].token_count), 1);
    }
    engine_job_close(&job);
    world_close(&w);
}

Test(choices, scores_with_several_choices) {
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
    cr_assert_eq(w.sched.counters.computed_tokens, 40);
    engine_job_close(&job);
    world_close(&w);
}

/* ---- First tokens ---- */

struct first {
    const struct engine_job *job;
    const struct sched *sched;
    int calls, published, evictions;
};

static void note_first(void *arg) {
    struct first *first = arg;
    first->calls++;
    for (int i = 0; i < first->job->choice_count; i++)
        first->published += atomic_load(&first->job->choice[i].token_count) == 1;
    first->evictions = (int)first->sched->counters.evictions;
}

/* The first tokens are published before the eviction that ends the prompt, also for choices that
 * are forked after it and for choices that end with their first token. */
Test(choices, first_tokens_come_before_the_eviction_that_ends_the_prompt) {
    enum { CHOICES = 3 };
    for (int max_tokens = 1; max_tokens <= 9; max_tokens += 8) {
        struct world w;
        struct engine_job job = job_of(1, 60, max_tokens, global(16, 4, 64));
        struct first first = {.job = &job, .sched = &w.sched};
        job.request.choices = CHOICES;
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 4, .conversations = 4, .rows = 64});
        w.sched.options.answered = note_first;
        w.sched.options.answered_arg = &first;
        submit(&w, &job);
        cr_assert_not(world_step(&w));
        cr_assert_eq(first.calls, 1);
        cr_assert_eq(first.published, CHOICES);
        cr_assert_eq(first.evictions, 0);
        cr_assert_eq(w.sched.counters.evictions, 1);
        run_until_idle(&w);
        cr_assert_eq(first.calls, 1);
        for (int i = 0; i < CHOICES; i++)
            cr_assert_eq(atomic_load(&job.choice[i].token_count), (unsigned)max_tokens);
        engine_job_close(&job);
        world_close(&w);
    }
}
