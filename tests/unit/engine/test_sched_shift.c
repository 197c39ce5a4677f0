/* Texts with more tokens than the model has positions: when they are shifted, what their requests
 * are told and charged, and what a failing shift ends. */
#include <criterion/criterion.h>

#include "kernels/places.h"
#include "tests/unit/engine/requests.h"

enum { POSITIONS = 160 };
static const struct world_options few = {
    .pages = 800, .positions = POSITIONS, .sequences = 3, .conversations = 4, .rows = 50};

static struct engine_kv shifted(const char *policy) {
    struct engine_kv kv = global(20, 6, 16);
    kv.policy = policy;
    kv.overflow = ENGINE_OVERFLOW_SHIFT;
    return kv;
}

/* Runs one request on a world; its output stays in `job`. */
static void run(struct world *w, struct engine_job *job) {
    submit(w, job);
    run_until_idle(w);
}

Test(sched_shift, comes_when_places_are_used_up) {
    static const int32_t tokens[] = {150, 160, 161, 192, 193, 400};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        struct world w;
        world_open(&w, &few);
        struct engine_job job = job_of(1, tokens[i] - 30, 31, shifted("global"));
        run(&w, &job); /* the last token of an answer is not appended */
        int32_t expected = places_shifts(POSITIONS, tokens[i]);
        cr_assert_eq(job.kv.seen_tokens, tokens[i]);
        cr_assert_eq(job.kv.shifts, expected, "%d tokens: %d", tokens[i], job.kv.shifts);
        cr_assert_eq(w.sched.counters.shifts, (uint64_t)expected);
        cr_assert_leq(job.kv.kept_entries, (20 + 6) * WORLD_STREAMS);
        engine_job_close(&job);
        world_close(&w);
    }
}

/* A turn goes on at the places of its own number of tokens, also where the answer before it is
 * dropped, which needed more shifts. With room for one conversation there is no checkpoint in front
 * of the answer, and the conversation itself is cut. */
Test(sched_shift, dropped_tokens_give_their_places_back) {
    static const struct { int conversations, dropped; } cases[] = {{1, 99}, {4, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct world w;
        struct world_options options = few;
        options.conversations = cases[i].conversations;
        world_open(&w, &options);
        struct engine_job first = job_of(1, 150, 100, shifted("streaming"));
        run(&w, &first);
        cr_assert_eq(first.kv.shifts, places_shifts(POSITIONS, 249));
        struct engine_job second = job_of(1, 155, 2, shifted("streaming"));
        run(&w, &second);
        cr_assert_eq(second.cached_tokens, 150);
        cr_assert_eq(second.kv.shifts, 0);
        cr_assert_eq(second.kv.dropped_tokens, cases[i].dropped);
        struct engine_job third = job_of(1, 300, 2, shifted("streaming"));
        run(&w, &third);
        cr_assert_eq(third.kv.shifts, places_shifts(POSITIONS, 301));
        engine_job_close(&first), engine_job_close(&second), engine_job_close(&third);
        world_close(&w);
    }
}

Test(sched_shift, a_failing_shift_ends_only_who_ran) {
    static const int codes[] = {ERR_DEVICE, ERR_FULL, ERR_NOMEM};
    for (int c = 0; c < 3; c++)
        for (long n = 0; n < 4; n++) {
            struct world w;
            world_open(&w, &few);
            struct engine_job jobs[4], later = job_of(5, 200, 5, shifted("global"));
            for (int i = 0; i < 4; i++) {
                jobs[i] = job_of(i, 170 + i, 6, shifted("global"));
                submit(&w, &jobs[i]);
            }
            world_fail(WORLD_SHIFT, n, codes[c]);
            while (!sched_idle(&w.sched)) (void)world_step(&w); /* true: the device failed */
            cr_assert_not(world_fail_pending());
            int errors = 0;
            for (int i = 0; i < 4; i++) {
                errors += finish_of(&jobs[i]) == ENGINE_FINISH_ERROR;
                if (finish_of(&jobs[i]) == ENGINE_FINISH_ERROR)
                    cr_assert_eq(jobs[i].fault.code, codes[c]);
                engine_job_close(&jobs[i]);
            }
            cr_assert(errors >= 1 && errors <= 3);
            world_fail_never();
            run(&w, &later);
            cr_assert_eq(finish_of(&later), ENGINE_FINISH_LENGTH);
            cr_assert_eq(w.sched.keeper.pages_reserved, 0);
            engine_job_close(&later);
            world_close(&w);
        }
}
