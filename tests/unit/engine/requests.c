#include "tests/unit/engine/requests.h"

#include <criterion/criterion.h>

static int32_t prompts[16][WORLD_POSITIONS];

int32_t *prompt_of(int number, int shared) {
    int32_t *prompt = prompts[number];
    for (int i = 0; i < WORLD_POSITIONS; i++) {
        uint64_t key = (uint64_t)(i < shared ? 0 : number) * 1000 + (uint64_t)i;
        prompt[i] = 1 + (int32_t)(world_mix(key) % (WORLD_VOCAB - 1));
    }
    return prompt;
}

struct engine_kv full(void) {
    return (struct engine_kv){.policy = "full",
                              .budget = -1,
                              .buffer = -1,
                              .chunk = -1,
                              .sinks = -1,
                              .recent = -1,
                              .reuse = true,
                              .retain = true};
}

struct engine_kv global(int budget, int buffer, int chunk) {
    struct engine_kv kv = full();
    kv.policy = "global";
    kv.budget = budget;
    kv.buffer = buffer;
    kv.chunk = chunk;
    return kv;
}

struct engine_job job_of(int number, int prompt_count, int max_tokens, struct engine_kv kv) {
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

int turns_kept(const struct world *w) {
    const struct conversation_table *table = &w->sched.keeper.table;
    int count = 0;
    for (int i = 0; i < table->capacity; i++)
        count += table->all[i].id != 0 && !table->all[i].checkpoint;
    return count;
}

int finish_of(const struct engine_job *job) {
    return atomic_load(&job->choice[0].finish);
}

int count_of(const struct engine_job *job) {
    return (int)atomic_load(&job->choice[0].token_count);
}

void submit(struct world *w, struct engine_job *job) {
    cr_assert_eq(world_submit(w, job), 0);
}

void run_until_idle(struct world *w) {
    for (int step = 0; !sched_idle(&w->sched); step++) {
        cr_assert_lt(step, 5000, "does not end");
        cr_assert_not(world_step(w));
    }
}

void run_alone(struct engine_job *job) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 1, .conversations = 1, .rows = 50});
    submit(&w, job);
    run_until_idle(&w);
    world_close(&w);
}

void expect_same_answer(const struct engine_job *a, const struct engine_job *b) {
    cr_assert_eq(finish_of(a), finish_of(b));
    cr_assert_eq(count_of(a), count_of(b));
    for (int i = 0; i < count_of(a); i++)
        cr_assert_eq(a->choice[0].tokens[i].token, b->choice[0].tokens[i].token, "token %d", i);
}

int64_t pages_used(const struct world *w) {
    struct kern_cache_stats stats;
    w->ops.cache_stats(w->kern, &stats);
    return stats.pages_used;
}

int slots_per_page(void) {
    struct kern_cache_info info;
    struct world w;
    world_open(&w,
               &(struct world_options){.pages = 4, .sequences = 1, .conversations = 0, .rows = 2});
    const struct kern_cache_options shape = {.dtype = KERN_F32, .head_dim = WORLD_DIM};
    w.ops.cache_info(&shape, &info);
    world_close(&w);
    return info.page_slots;
}

int turn(struct world *w, int number, int shared, int prompt_count, struct engine_kv kv) {
    struct engine_job job = job_of(number, prompt_count, 3, kv);
    job.request.prompt = prompt_of(number, shared);
    submit(w, &job);
    run_until_idle(w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    int cached = job.cached_tokens;
    engine_job_close(&job);
    return cached;
}

struct engine_job ask(struct world *w, int number, int shared, int prompt_count,
                      struct engine_kv kv) {
    struct engine_job job = job_of(number, prompt_count, 12, kv);
    job.request.prompt = prompt_of(number, shared);
    job.request.seed = 5;
    submit(w, &job);
    run_until_idle(w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    return job;
}
