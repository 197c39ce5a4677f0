/* A bound on reasoning: engine/steps/seq.c. */
#include <criterion/criterion.h>

#include "tests/unit/engine/requests.h"

enum { BEGIN = 7, END = 9, ANSWER = 200 };

static struct engine_job thinking_job(int number, int budget) {
    struct engine_job job = job_of(number, 40, ANSWER, full());
    job.request.think_begin = BEGIN;
    job.request.think_end = END;
    job.request.think_bounded = budget >= 0;
    job.request.think_budget = budget;
    return job;
}

/* Returns the longest reasoning of an answer. */
static int longest_thought(const struct engine_job *job, bool thinks) {
    int longest = 0, length = 0;
    for (int i = 0; i < count_of(job); i++) {
        int32_t token = job->choice[0].tokens[i].token;
        if (thinks && token != END) length++;
        if (length > longest) longest = length;
        if (token == BEGIN && !thinks) thinks = true, length = 0;
        if (token == END) thinks = false;
    }
    return longest;
}

Test(thinking, ends_after_its_budget) {
    static const int budgets[] = {0, 1, 5, 30};
    struct engine_job free_job = thinking_job(1, -1);
    prompt_of(1, 0)[39] = BEGIN;
    run_alone(&free_job);
    int without = longest_thought(&free_job, true);
    cr_assert_gt(without, 30, "the answer ends its reasoning early by itself");
    for (int i = 0; i < 4; i++) {
        struct engine_job job = thinking_job(1, budgets[i]);
        prompt_of(1, 0)[39] = BEGIN;
        run_alone(&job);
        cr_assert_eq(longest_thought(&job, true), budgets[i]);
        for (int k = 0; k < budgets[i]; k++) /* until then the answer is the same */
            cr_assert_eq(job.choice[0].tokens[k].token, free_job.choice[0].tokens[k].token);
        cr_assert_eq(job.choice[0].tokens[budgets[i]].token, END);
        cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
        engine_job_close(&job);
    }
    engine_job_close(&free_job);
}

/* A model may open the tag itself, at any place. */
Test(thinking, begins_in_the_answer) {
    int thoughts = 0;
    for (int number = 2; number < 8; number++) {
        struct engine_job job = thinking_job(number, 3);
        job.request.ignore_eos = true;
        run_alone(&job);
        thoughts += longest_thought(&job, false) > 0;
        cr_assert_leq(longest_thought(&job, false), 3);
        engine_job_close(&job);
    }
    cr_assert_gt(thoughts, 0);
}

/* Penalties, a bias against the tag and a cold choice do not keep it open. */
Test(thinking, is_certain_to_end) {
    const struct engine_bias never = {END, -100};
    struct engine_job job = thinking_job(1, 4);
    prompt_of(1, 0)[39] = BEGIN;
    job.request.bias = &never;
    job.request.bias_count = 1;
    job.request.temperature = 0;
    job.request.repetition = 2;
    job.request.top_logprobs = 0;
    run_alone(&job);
    cr_assert_eq(job.choice[0].tokens[4].token, END);
    cr_assert_lt(job.choice[0].tokens[4].logprob, 0, "scores are those of the model");
    engine_job_close(&job);
}

/* A vocabulary without tags has nothing to bound. */
Test(thinking, without_tags_nothing_is_bounded) {
    struct engine_job job = thinking_job(1, 0), same = thinking_job(1, -1);
    job.request.think_begin = job.request.think_end = -1;
    run_alone(&job);
    run_alone(&same);
    expect_same_answer(&job, &same);
    engine_job_close(&job);
    engine_job_close(&same);
}
