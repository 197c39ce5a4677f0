/* Models with recurrent states: what is continued and what is read again, that answers are those of
 * a prompt read alone, and that states are counted and come back from disk. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/unit/engine/requests.h"

enum { STATES = 2, ANSWER = 3, SYSTEM = 150 };
enum { STATE_BYTES = STATES * WORLD_CHANNELS * (WORLD_WIDTH - 1) * (int)sizeof(float) };

static void open_world(struct world *w, const char *state_dir) {
    world_open(w, &(struct world_options){.pages = 900,
                                          .sequences = 4,
                                          .conversations = 12,
                                          .rows = 64,
                                          .states = STATES,
                                          .state_dir = state_dir});
}

/* Runs a prompt of `count` tokens: the first `shared` are prompt 0's, the others those of prompt
 * `number`. With `before`, the answer of that job follows the shared ones. */
static struct engine_job run(struct world *w, int number, int shared, int count,
                             const struct engine_job *before, struct engine_kv kv) {
    struct engine_job job = job_of(number, count, ANSWER, kv);
    int32_t *prompt = prompt_of(number, shared);
    for (int i = 0; before && i < ANSWER - 1; i++) /* the last one was never appended */
        prompt[shared + i] = before->choice[0].tokens[i].token;
    job.request.prompt = prompt;
    submit(w, &job);
    run_until_idle(w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    return job;
}

/* The same prompt in a world of its own, read from its beginning, gives the same answer. No other
 * world is open meanwhile. */
static void expect_alone(const struct engine_job *job) {
    struct world w;
    struct engine_job alone = {.request = job->request};
    open_world(&w, NULL);
    alone.request.kv.reuse = false;
    submit(&w, &alone);
    run_until_idle(&w);
    cr_assert_eq(alone.cached_tokens, 0);
    expect_same_answer(job, &alone);
    engine_job_close(&alone);
    world_close(&w);
}

/* The tokens that each kind of request reads again: nothing but its last token for a retry, the
 * answer where another one follows, the turn where the turn is edited. */
static void check_reading(struct engine_kv kv) {
    struct world w;
    open_world(&w, NULL);
    struct engine_job first = run(&w, 0, 0, 200, NULL, kv), retry = run(&w, 0, 0, 200, NULL, kv);
    cr_assert_eq(first.cached_tokens, 0);
    cr_assert_eq(retry.cached_tokens, 199, "a retry found %d tokens", retry.cached_tokens);
    expect_same_answer(&first, &retry);
    cr_assert_eq(first.kv.state_bytes, STATE_BYTES);
    /* The next turn goes on from the end of the answer. */
    struct engine_job next = run(&w, 1, 200, 300, &first, kv);
    cr_assert_eq(next.cached_tokens, 200 + ANSWER - 1);
    /* Another text in the place of the answer: from the last border before it. */
    struct engine_job other = run(&w, 2, 200, 300, NULL, kv);
    cr_assert_eq(other.cached_tokens, 199);
    /* The last turn edited: from the end of the one before. */
    struct engine_job edited = run(&w, 3, 200, 280, &first, kv);
    cr_assert_eq(edited.cached_tokens, 200 + ANSWER - 1);
    world_close(&w);
    expect_alone(&next);
    expect_alone(&other);
    expect_alone(&edited);
    engine_job_close(&first);
    engine_job_close(&retry);
    engine_job_close(&next);
    engine_job_close(&other);
    engine_job_close(&edited);
}

Test(states, what_is_read_again) {
    check_reading(full());
    check_reading(global(400, 8, 32)); /* nothing is evicted */
}

/* With evictions in an answer the turn after it is another than read from its beginning. */
Test(states, evictions_concern_entries_alone) {
    struct world w;
    struct engine_kv kv = global(24, 8, 32);
    open_world(&w, NULL);
    struct engine_job first = run(&w, 0, 0, 200, NULL, kv), retry = run(&w, 0, 0, 200, NULL, kv);
    cr_assert_gt(first.kv.evicted_entries, 0);
    cr_assert_eq(first.kv.state_bytes, STATE_BYTES);
    cr_assert_gt(retry.cached_tokens, 0);
    expect_same_answer(&first, &retry);
    struct engine_job next = run(&w, 1, 200, 300, &first, kv);
    cr_assert_eq(next.cached_tokens, 200 + ANSWER - 1);
    world_close(&w);
    expect_alone(&retry);
    engine_job_close(&first);
    engine_job_close(&retry);
    engine_job_close(&next);
}

/* Prompts that begin with the same system prompt read it once; every policy. */
Test(states, a_system_prompt_is_read_once) {
    const struct policy *policy;
    for (int p = 0; (policy = policy_at(p)); p++) {
        struct world w;
        struct engine_job jobs[3];
        struct engine_kv kv = global(40, 8, 32);
        kv.policy = policy->name;
        open_world(&w, NULL);
        for (int i = 0; i < 3; i++) {
            jobs[i] = job_of(i + 1, SYSTEM + 20, ANSWER, kv);
            int32_t *prompt = prompt_of(i + 1, SYSTEM);
            prompt[SYSTEM] = 1 + i;
            jobs[i].request.prompt = prompt;
            jobs[i].request.border = SYSTEM;
            submit(&w, &jobs[i]);
            run_until_idle(&w);
            cr_assert_eq(jobs[i].cached_tokens, i ? SYSTEM : 0, "%s", policy->name);
        }
        world_close(&w);
        for (int i = 0; i < 3; i++) {
            expect_alone(&jobs[i]);
            engine_job_close(&jobs[i]);
        }
    }
}

/* A conversation comes back from disk with its states. */
Test(states, files_hold_them) {
    char dir[64];
    struct world w;
    struct engine_kv kv = global(24, 8, 32); /* only bounded policies are written */
    world_make_dir(dir);
    open_world(&w, dir);
    struct engine_job first = run(&w, 0, 0, 200, NULL, kv);
    struct engine_job next = run(&w, 1, 200, 300, &first, kv);
    engine_job_close(&first);
    world_close(&w);

    world_remove_dir(dir);
    world_make_dir(dir);
    open_world(&w, dir);
    first = run(&w, 0, 0, 200, NULL, kv);
    world_save_all(&w);
    world_close(&w);
    open_world(&w, dir);
    struct engine_job restored = run(&w, 1, 200, 300, &first, kv);
    cr_assert_eq(restored.cached_tokens, 200 + ANSWER - 1);
    cr_assert_eq(w.sched.counters.state_restored, 1);
    expect_same_answer(&next, &restored);
    world_close(&w);
    open_world(&w,
               dir); /* a prompt that begins alike, but goes on otherwise, cannot use the file */
    struct engine_job other = run(&w, 2, 200, 300, NULL, kv);
    cr_assert_eq(w.sched.counters.state_restored, 0);
    cr_assert_eq(other.cached_tokens, 0);
    engine_job_close(&first);
    engine_job_close(&next);
    engine_job_close(&restored);
    engine_job_close(&other);
    world_close(&w);
    world_remove_dir(dir);
}

/* All choices go on from the state at the prompt's end, and change no other's. */
Test(states, choices_fork_them) {
    struct world w;
    struct engine_job job = job_of(0, 100, 20, full()), one = job_of(0, 100, 20, full());
    job.request.choices = 3;
    open_world(&w, NULL);
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    submit(&w, &one);
    run_until_idle(&w);
    for (int c = 0; c < 3; c++) cr_assert_eq(atomic_load(&job.choice[c].token_count), 20);
    expect_same_answer(&job, &one);
    world_close(&w);
    expect_alone(&one);
    engine_job_close(&job);
    engine_job_close(&one);
}
