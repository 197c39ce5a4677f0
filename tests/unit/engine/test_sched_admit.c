/* Tests engine/steps/sched_admit.c on the real cache with the fake model of tests/sim/world.h:
 * which job is admitted next, what fits, and the kv parameters of a request. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/unit/engine/requests.h"

/* ---- The head of the queue ---- */

/* Room for four pages a stream: job 0 takes two and generates `tokens`, job 1 needs all four, jobs
 * 2 and 3 one each. */
static void submit_around_a_large_one(struct world *w, struct engine_job jobs[4], int tokens) {
    int page = slots_per_page();
    int prompt[4] = {page - tokens / 2, 3 * page + 1, 4, 4};
    world_open(
        w, &(struct world_options){
               .pages = 4 * WORLD_STREAMS, .sequences = 4, .conversations = 0, .rows = 4 * page});
    for (int i = 0; i < 4; i++) {
        jobs[i] = job_of(i, prompt[i], i == 0 ? tokens : 5, full());
        jobs[i].request.client[0] = (uint8_t)i;
        if (i < 3) submit(w, &jobs[i]); /* the last one when the test says so */
    }
}

Test(sched_admit, a_small_one_passes_a_waiting_large_one) {
    struct world w;
    struct engine_job jobs[4];
    submit_around_a_large_one(&w, jobs, 20);
    cr_assert_not(world_step(&w));
    cr_assert(atomic_load(&jobs[0].admitted) == 1 && atomic_load(&jobs[1].admitted) == 0);
    cr_assert_eq(atomic_load(&jobs[2].admitted), 1, "places and pages stay empty beside it");
    while (finish_of(&jobs[0]) == ENGINE_RUNNING) cr_assert_not(world_step(&w));
    cr_assert_eq(w.sched.queue.waiting, 1);
    cr_assert_not(world_step(&w));
    cr_assert_eq(atomic_load(&jobs[1].admitted), 1);
    cr_assert_eq(w.sched.keeper.pages_reserved, 4 * WORLD_STREAMS);
    submit(&w, &jobs[3]);
    run_until_idle(&w);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(finish_of(&jobs[i]), ENGINE_FINISH_LENGTH);
        engine_job_close(&jobs[i]);
    }
    world_close(&w);
}

/* Ends what has ended and submits it anew, so that one of two small jobs always runs. */
static int renew(struct world *w, struct engine_job *job, int number,
                 const struct engine_job *other) {
    if (job->choice && !atomic_load(&job->finished)) return 0;
    bool other_ends = other->choice && count_of(other) < 2;
    int ended = job->choice != NULL;
    if (ended) engine_job_close(job);
    if (other_ends) return ended;
    *job = job_of(number, 4, 5, full());
    job->request.client[0] = (uint8_t)number;
    submit(w, job);
    return ended;
}

/* Small ones that come again and again do not keep the large one waiting: after SCHED_PASS_STEPS
 * nobody passes it, and who asked for the empty places pays for them. */
Test(sched_admit, passing_ends) {
    struct world w;
    struct engine_job jobs[4];
    int passed = 0;
    submit_around_a_large_one(&w, jobs, 2);
    do {
        cr_assert_not(world_step(&w));
        cr_assert_leq(w.sched.counters.steps, SCHED_PASS_STEPS + 8, "it starves");
        passed += renew(&w, &jobs[2], 2, &jobs[3]) + renew(&w, &jobs[3], 3, &jobs[2]);
    } while (atomic_load(&jobs[1].admitted) == 0);
    cr_assert_geq(w.sched.counters.steps, SCHED_PASS_STEPS, "it did not wait: nothing was tested");
    cr_assert_gt(passed, 20);
    int64_t own = jobs[1].request.prompt_count + 1;
    cr_assert_gt(queue_client_of(&w.sched.queue, &jobs[1])->served, own, "empty places were free");
    run_until_idle(&w);
    for (int i = 0; i < 4; i++)
        if (jobs[i].choice) engine_job_close(&jobs[i]);
    world_close(&w);
}

/* A job that is expected to end before the head can start passes it, but not for ever: how long a
 * job takes is an estimate, and one after the other could keep the head waiting. */
Test(sched_admit, in_the_end_no_job_passes_the_head) {
    for (uint64_t intervals = 1; intervals <= 2; intervals++) {
        struct world w;
        struct engine_job jobs[3];
        int page = slots_per_page();
        const int prompt[3] = {page + 1, 3 * page + 1, 4}, answer[3] = {20, 20, 1};
        world_open(&w, &(struct world_options){.pages = 4 * WORLD_STREAMS,
                                               .sequences = 4,
                                               .conversations = 0,
                                               .rows = 4 * page});
        for (int i = 0; i < 3; i++) {
            jobs[i] = job_of(i, prompt[i], answer[i], full());
            if (i < 2) submit(&w, &jobs[i]);
        }
        cr_assert_not(world_step(&w));
        w.sched.admission.head_step -= intervals * SCHED_PASS_STEPS;
        submit(&w, &jobs[2]);
        for (int i = 0; i < 3; i++) cr_assert_not(world_step(&w));
        cr_assert_eq(count_of(&jobs[2]), intervals == 1 ? 1 : 0);
        run_until_idle(&w);
        for (int i = 0; i < 3; i++) engine_job_close(&jobs[i]);
        world_close(&w);
    }
}

/* Two requests with many choices, one after the other, leave two places all the time: others may
 * have these at any time, and no more. */
Test(sched_admit, what_the_head_leaves_is_for_others) {
    enum { WIDE = 2, SMALL = 3, ANSWER = 40 };
    struct world w;
    struct engine_job jobs[WIDE + SMALL];
    world_open(&w,
               &(struct world_options){
                   .pages = 1000 * WORLD_STREAMS, .sequences = 8, .conversations = 0, .rows = 64});
    for (int i = 0; i < WIDE + SMALL; i++) {
        jobs[i] = job_of(i, 4, i < WIDE ? ANSWER : 4 * ANSWER, full());
        jobs[i].request.choices = i < WIDE ? 6 : 1;
        jobs[i].request.client[0] = (uint8_t)(i < WIDE ? 0 : i);
        if (i < WIDE) submit(&w, &jobs[i]);
    }
    cr_assert_not(world_step(&w));
    w.sched.admission.head_step -= 2ull * SCHED_PASS_STEPS;
    for (int i = WIDE; i < WIDE + SMALL; i++) submit(&w, &jobs[i]);
    for (int i = 0; i < 2; i++) cr_assert_not(world_step(&w));
    for (int i = 0; i < WIDE + SMALL; i++)
        cr_assert_eq(atomic_load(&jobs[i].admitted), i == 0 || i == 2 || i == 3, "job %d", i);
    run_until_idle(&w);
    for (int i = 0; i < WIDE + SMALL; i++) engine_job_close(&jobs[i]);
    world_close(&w);
}

/* ---- Clients that come after a long time ---- */

enum { HOG = 1, GUEST, STRANGER };

static struct engine_job job_by(uint8_t client, int number, int prompt, int tokens) {
    struct engine_job job = job_of(number, prompt, tokens, full());
    job.request.client[0] = client;
    return job;
}

static void admit_at_once(struct world *w, struct engine_job *job) {
    submit(w, job);
    cr_assert_not(world_step(w));
    cr_assert_eq(atomic_load(&job->admitted), 1, "it waits for an answer of another client");
}

/* A client asks once and leaves; then another one takes all it can get, with answers that outlast
 * QUEUE_KEEP_STEPS. Whether places or pages run out first: the client that comes back, and one that
 * was never seen, start in the next step. */
Test(sched_admit, a_client_that_was_away_waits_for_no_answer) {
    enum { PLACES = 8, HOGS = 12, ANSWER = 500 };
    int page = slots_per_page(), job_pages = (4 + ANSWER + page - 2) / page;
    for (int scarce = 0; scarce < 2; scarce++) {
        struct world w;
        struct engine_job hogs[HOGS], first, again, never;
        world_open(&w, &(struct world_options){.pages = (scarce ? 5 * job_pages : 100 * job_pages) *
                                                        WORLD_STREAMS,
                                               .sequences = PLACES,
                                               .conversations = 0,
                                               .rows = 64});
        first = job_by(GUEST, 0, 4, 3);
        submit(&w, &first);
        run_until_idle(&w);
        for (int i = 0; i < HOGS; i++) {
            hogs[i] = job_by(HOG, i % 16, 4, ANSWER);
            submit(&w, &hogs[i]);
        }
        for (int i = 0; i < QUEUE_KEEP_STEPS + 2; i++) cr_assert_not(world_step(&w));
        cr_assert_eq(w.sched.running, scarce ? 4 : PLACES - 1, "what is left is for others");
        again = job_by(GUEST, 13, 4, 3);
        admit_at_once(&w, &again);
        while (finish_of(&again) == ENGINE_RUNNING) cr_assert_not(world_step(&w));
        cr_assert_eq(w.sched.running, scarce ? 4 : PLACES - 1, "and is left again");
        never = job_by(STRANGER, 14, 4, 3);
        admit_at_once(&w, &never);
        run_until_idle(&w);
        for (int i = 0; i < HOGS; i++) engine_job_close(&hogs[i]);
        engine_job_close(&first);
        engine_job_close(&again);
        engine_job_close(&never);
        world_close(&w);
    }
}

/* The only client there is takes every place; one of several keys does not. */
Test(sched_admit, nothing_is_left_for_nobody) {
    for (int others = 0; others < 2; others++) {
        struct world w;
        struct engine_job jobs[4];
        world_open(
            &w, &(struct world_options){
                    .pages = 1000 * WORLD_STREAMS, .sequences = 4, .conversations = 0, .rows = 64});
        for (int i = 0; i < 4; i++) {
            jobs[i] = job_by(HOG, i, 4, 20);
            jobs[i].request.others = others;
            submit(&w, &jobs[i]);
        }
        cr_assert_not(world_step(&w));
        cr_assert_eq(w.sched.running, others ? 3 : 4);
        run_until_idle(&w);
        for (int i = 0; i < 4; i++) engine_job_close(&jobs[i]);
        world_close(&w);
    }
}

/* The fourth request of a client fits the pool and leaves no page. New clients with one small
 * request each come all the time, so that one of them always runs: the fourth waits for as many as
 * take what it would leave, and not for the end of the first three. */
Test(sched_admit, guests_do_not_keep_the_head_waiting) {
    enum { HOGS = 4, GUESTS = 60, ANSWER = 500, SHORT = 20 };
    struct world w;
    struct engine_job hogs[HOGS], guests[GUESTS];
    int page = slots_per_page(), job_pages = (4 + ANSWER + page - 2) / page, guest = 0;
    world_open(&w, &(struct world_options){.pages = (int64_t)HOGS * job_pages * WORLD_STREAMS,
                                           .sequences = 16,
                                           .conversations = 0,
                                           .rows = 64});
    for (int i = 0; i < HOGS; i++) {
        hogs[i] = job_by(HOG, i, 4, ANSWER);
        hogs[i].request.others = true;
        submit(&w, &hogs[i]);
    }
    cr_assert_not(world_step(&w));
    cr_assert_eq(w.sched.running, HOGS - 1);
    while (atomic_load(&hogs[HOGS - 1].admitted) == 0) {
        cr_assert_eq(finish_of(&hogs[0]), ENGINE_RUNNING, "it starves");
        if (guest == 0 || count_of(&guests[guest - 1]) == SHORT / 2) {
            guests[guest] = job_by((uint8_t)(GUEST + guest), guest % 16, 4, SHORT);
            submit(&w, &guests[guest++]);
        }
        cr_assert_not(world_step(&w));
    }
    cr_assert_gt(guest, 2);
    cr_assert_eq(finish_of(&guests[guest - 2]), ENGINE_FINISH_LENGTH);
    run_until_idle(&w);
    for (int i = 0; i < HOGS; i++) engine_job_close(&hogs[i]);
    while (guest > 0) engine_job_close(&guests[--guest]);
    world_close(&w);
}

/* After the queue's head is cancelled, the next job must not wait for another sequence to end. */
Test(sched_admit, the_next_is_tried_when_the_waiting_head_is_cancelled) {
    struct world w;
    struct engine_job jobs[3];
    int page = slots_per_page();
    int prompt[3] = {page + 1, 3 * page + 1, 4};
    world_open(
        &w, &(struct world_options){
                .pages = 4 * WORLD_STREAMS, .sequences = 4, .conversations = 0, .rows = 4 * page});
    for (int i = 0; i < 3; i++) {
        jobs[i] = job_of(i, prompt[i], 20, full());
        if (i < 2) submit(&w, &jobs[i]);
    }
    cr_assert_not(world_step(&w));
    w.sched.admission.head_step -= SCHED_PASS_STEPS; /* no job passes it any more */
    submit(&w, &jobs[2]);
    for (int i = 0; i < 2; i++) cr_assert_not(world_step(&w));
    cr_assert_eq(w.sched.running, 1);
    atomic_store(&jobs[1].cancel, 1);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&jobs[1]), ENGINE_FINISH_ABORT);
    cr_assert(w.sched.running == 2 && count_of(&jobs[2]) == 1);
    run_until_idle(&w);
    for (int i = 0; i < 3; i++) engine_job_close(&jobs[i]);
    world_close(&w);
}

Test(sched_admit, an_exact_fit_is_admitted_and_runs) {
    int page = slots_per_page();
    /* The last token of an answer is never appended: prompt + max - 1 entries fill two pages. */
    struct engine_job job = job_of(1, 2 * page - 9, 10, full());
    struct world w;
    struct fault fault = {0};
    world_open(&w, &(struct world_options){
                       .pages = 2 * WORLD_STREAMS, .sequences = 1, .conversations = 0, .rows = 50});
    cr_assert_eq(sched_resolve_job(&w.sched.options.kv, &job, &fault), 0);
    const struct kv_params *params = job.params;
    cr_assert_eq(sched_check(&w.sched.options, &job, &fault), 0);
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert_eq(job.params, params); /* resolved once */
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    cr_assert_eq(job.kv.seen_tokens, 2 * page);
    engine_job_close(&job);
    job = job_of(1, 2 * page - 8, 10, full());
    cr_assert_eq(sched_resolve_job(&w.sched.options.kv, &job, &fault), 0);
    cr_assert_eq(sched_check(&w.sched.options, &job, &fault), ERR_LIMIT);
    submit(&w, &job); /* a caller that did not check: only this job is rejected */
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_ERROR);
    cr_assert_eq(job.fault.code, ERR_LIMIT);
    engine_job_close(&job);
    world_close(&w);
}

/* ---- kv parameters ---- */

/* A backend that does not observe attention. */
static int without_attention(const struct kern_rule *rule, struct fault *fault) {
    if (rule->score != KERN_SCORE_ATTENTION) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "observe", "no 'observe' in this backend");
}

static int any_rule(const struct kern_rule *rule, struct fault *fault) {
    (void)rule, (void)fault;
    return 0;
}

Test(sched_admit, a_rule_the_backend_cannot_run_ends_only_its_request) {
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
    cr_assert_eq(world_submit(&w, &refused), ERR_UNSUPPORTED);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&runs), ENGINE_RUNNING);
    cr_assert(!refused.params && !refused.choice && refused.fault.code == ERR_UNSUPPORTED);
    cr_assert_str_eq(refused.fault.field, "kv.policy");
    cr_assert_str_eq(refused.fault.text,
                     "policy 'h2o' cannot run on the backend 'cpu-reference': no 'observe' in this "
                     "backend; choose one of full, streaming, trimkv, global");
    run_until_idle(&w);
    expect_same_answer(&alone, &runs);
    world_close(&w);
    engine_job_close(&alone);
    engine_job_close(&runs);
    engine_job_close(&refused);
}

/* A device without memory for remembered queries. */
static int no_memory_to_remember(struct kern *kern, int slot, const struct kern_rule *rule,
                                 int64_t pages) {
    (void)kern, (void)slot;
    cr_assert_gt(pages, 0);
    return rule->observe.window > 0 ? ERR_NOMEM : 0;
}

Test(sched_admit, a_rule_without_memory_ends_only_its_request) {
    struct engine_job alone = job_of(1, 40, 60, global(16, 8, 32));
    struct engine_job runs = alone, refused = job_of(2, 40, 60, global(16, 8, 32));
    struct world w;
    refused.request.kv.policy = "snapkv";
    refused.request.kv.recent = 4;
    run_alone(&alone);
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 2, .rows = 50});
    w.ops.prepare = no_memory_to_remember;
    submit(&w, &runs);
    for (int step = 0; step < 5; step++) cr_assert_not(world_step(&w));
    submit(&w, &refused);
    cr_assert_not(world_step(&w));
    cr_assert_eq(finish_of(&runs), ENGINE_RUNNING);
    cr_assert_eq(finish_of(&refused), ENGINE_FINISH_ERROR);
    cr_assert_eq(refused.fault.code, ERR_NOMEM, "%s", refused.fault.text);
    run_until_idle(&w);
    expect_same_answer(&alone, &runs);
    world_close(&w);
    engine_job_close(&alone);
    engine_job_close(&runs);
    engine_job_close(&refused);
}

static int no_device_for_windows(struct kern *kern, int slot, const struct kern_rule *rule,
                                 int64_t pages) {
    (void)kern, (void)slot, (void)pages;
    return rule->observe.window > 0 ? ERR_UNSUPPORTED : 0;
}

Test(sched_admit, a_rule_that_the_device_refuses_names_the_policy) {
    struct engine_job refused = job_of(2, 40, 60, global(16, 8, 32));
    struct world w;
    refused.request.kv.policy = "snapkv";
    refused.request.kv.recent = 4;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 2, .rows = 50});
    w.ops.prepare = no_device_for_windows;
    submit(&w, &refused);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&refused), ENGINE_FINISH_ERROR);
    cr_assert_eq(refused.fault.code, ERR_UNSUPPORTED);
    cr_assert_str_eq(refused.fault.field, "kv.policy");
    cr_assert_not_null(strstr(refused.fault.text, "snapkv"), "%s", refused.fault.text);
    world_close(&w);
    engine_job_close(&refused);
}

Test(sched_admit, kv_parameters_name_the_field_at_fault) {
    struct sched_kv rules = {.defaults = {.budget = 32, .buffer = 8, .chunk = 32},
                             .budget_max = 64,
                             .has_gates = true,
                             .backend = "any",
                             .rule_check = any_rule};
    kv_params_set_policy(&rules.defaults, policy_find("global"));
    const double none = 0;
    const struct {
        const char *policy;
        int32_t budget, buffer, chunk, sinks, recent;
        double horizon;
        int rc;
        const char *field;
    } cases[] = {
        {"global", 64, -1, -1, -1, -1, none, 0, ""},
        {NULL, 65, -1, -1, -1, -1, none, ERR_LIMIT, "kv.budget"},
        {"full", -1, -1, -1, -1, -1, none, ERR_LIMIT, "kv.policy"},
        {NULL, 64, 8, 32, -1, -1, none, 0, ""},
        {NULL, 64, 9, -1, -1, -1, none, ERR_LIMIT, "kv.buffer"}, /* the cap is strict */
        {NULL, 1, 0, 33, -1, -1, none, ERR_LIMIT, "kv.chunk"},
        {"fifo", -1, -1, -1, -1, -1, none, ERR_INVALID, "kv.policy"},
        {NULL, 0, -1, -1, -1, -1, none, ERR_INVALID, "kv.budget"},
        {NULL, -7, -1, -1, -1, -1, none, ERR_INVALID, "kv.budget"},
        {NULL, INT32_MIN, -1, -1, -1, -1, none, ERR_INVALID, "kv.budget"},
        {NULL, 3, -1, -1, -1, -1, none, 0, ""}, /* default sinks give way */
        {NULL, 3, -1, -1, 4, -1, none, ERR_INVALID, "kv.sinks"},
        {NULL, 8, -1, -1, -1, 8, none, 0, ""}, /* to recent entries that are named, too */
        {NULL, 8, -1, -1, -1, 9, none, ERR_INVALID, "kv.recent"},
        {NULL, 8, -1, -1, 4, 5, none, ERR_INVALID, "kv.recent"},
        {NULL, 8, -1, -1, 4, INT32_MAX, none, ERR_INVALID, "kv.recent"},
        {NULL, -1, -2, -1, -1, -1, none, ERR_INVALID, "kv.buffer"},
        {NULL, -1, -1, 0, -1, -1, none, ERR_INVALID, "kv.chunk"},
        {"trimkv", -1, -1, -1, -1, -1, 2, ERR_INVALID, "kv.horizon"},
        {"trimkv", -1, -1, -1, -1, -1, none, 0, ""},
        {"global", -1, -1, -1, -1, -1, 0.5, ERR_INVALID, "kv.horizon"},
        {"global", -1, -1, -1, -1, -1, 1e9, 0, ""},
        {"global", -1, -1, -1, -1, -1, 1.1e9, ERR_INVALID, "kv.horizon"},
        {"global", -1, -1, -1, -1, -1, (double)INFINITY, 0, ""},
        {"gkv", 3, -1, -1, 1, -1, none, 0, ""}, /* default recent entries give way */
        {"gkv", 64, -1, -1, -1, -1, 2, ERR_INVALID, "kv.horizon"},
        {"h2o", 64, -1, -1, -1, 60, none, 0, ""},
        {"h2o", 64, -1, -1, -1, 61, none, 0, ""},
        {"h2o", 64, -1, -1, -1, 65, none, ERR_INVALID, "kv.recent"},
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
        int rc = sched_resolve_kv(&wanted, &rules, &kv, &fault);
        cr_expect_eq(rc, cases[i].rc, "case %zu: %d %s", i, rc, fault.text);
        cr_expect_str_eq(fault.field, cases[i].field, "case %zu", i);
    }
    rules.has_gates = false;
    struct engine_kv wanted = global(32, 8, 32);
    struct kv_params kv;
    struct fault fault = {0};
    cr_assert_eq(sched_resolve_kv(&wanted, &rules, &kv, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "kv.policy");
}

/* A device that does not read latent vectors has the policies that need not. */
Test(sched_admit, policies_that_read_latent_vectors_are_refused_by_name) {
    struct sched_kv rules = {.defaults = {.budget = 32, .buffer = 8, .chunk = 32},
                             .has_gates = true,
                             .latent = true,
                             .backend = "a device",
                             .rule_check = any_rule};
    static const char *const names[] = {"snapkv", "h2o", "knorm"};
    kv_params_set_policy(&rules.defaults, policy_find("full"));
    for (int unread = 0; unread < 2; unread++) {
        rules.latent_unread = unread;
        for (int i = 0; i < 3; i++) {
            const struct engine_kv wanted = {.policy = names[i],
                                             .budget = 64,
                                             .buffer = -1,
                                             .chunk = -1,
                                             .sinks = -1,
                                             .recent = -1};
            struct kv_params kv;
            struct fault fault = {0};
            cr_assert_eq(sched_resolve_kv(&wanted, &rules, &kv, &fault),
                         unread ? ERR_UNSUPPORTED : 0, "%s: %s", names[i], fault.text);
            cr_assert(!unread || strstr(fault.text, "latent vectors is not observed"), "%s",
                      fault.text);
        }
    }
    static const char *const left[] = {"full", "streaming", "trimkv", "global"};
    for (int i = 0; i < 4; i++) cr_assert_str_eq(sched_policy_at(&rules, i)->name, left[i]);
    cr_assert_null(sched_policy_at(&rules, 4));
}

/* A request that names another policy gets that policy's defaults, and `global` those of the gates.
 */
Test(sched_admit, the_defaults_of_the_gates_come_with_the_policy) {
    struct sched_kv rules = {.defaults = {.budget = 32, .buffer = 8, .chunk = 32},
                             .has_gates = true,
                             .trained = {.named = POLICY_HORIZON, .horizon = 1},
                             .backend = "any",
                             .rule_check = any_rule};
    struct engine_kv wanted = global(32, 8, 32);
    struct kv_params kv;
    struct fault fault = {0};
    kv_params_set_policy(&rules.defaults, policy_find("streaming"));
    cr_assert_eq(sched_resolve_kv(&wanted, &rules, &kv, &fault), 0, "%s", fault.text);
    cr_assert_eq(kv.rule.horizon, 1.0f);
    wanted.options[0] = (struct engine_kv_option){"horizon", 7, NULL};
    wanted.option_count = 1;
    cr_assert_eq(sched_resolve_kv(&wanted, &rules, &kv, &fault), 0, "%s", fault.text);
    cr_assert_eq(kv.rule.horizon, 7.0f);
}

/* Numbers near the limit of 32 bits are rejected by the size of the pool. */
Test(sched_admit, the_largest_numbers_do_not_overflow) {
    struct sched_options options = {.shape = {64, 64, 16}, .pages_total = INT32_MAX};
    struct kv_params unbounded = {.policy = policy_find("full")};
    struct kv_params bounded = {.policy = policy_find("global"),
                                .budget = INT32_MAX,
                                .buffer = INT32_MAX,
                                .chunk = INT32_MAX};
    struct engine_job job = {.request = {.prompt_count = INT32_MAX, .max_tokens = INT32_MAX},
                             .params = &unbounded};
    struct fault fault = {0};
    cr_assert_eq(sched_check(&options, &job, &fault), ERR_LIMIT);
    cr_assert_str_eq(fault.field, "max_tokens");
    job.params = &bounded;
    cr_assert_eq(sched_check(&options, &job, &fault), ERR_LIMIT);
    bounded.budget = bounded.chunk = 1;
    bounded.buffer = 0;
    cr_assert_eq(sched_check(&options, &job, &fault), 0);
}
