/* The engine's thread and its readers, for ThreadSanitizer and for leaks: a real engine with the bundled
 * model, jobs submitted and cancelled from this thread while it polls their counters and the snapshot.
 * Plain main, because Criterion does not start under ThreadSanitizer. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "engine/engine.h"

enum { JOBS = 24, PROMPT = 48 };

static atomic_int wakes;

static void wake(void *arg) {
    (void)arg;
    atomic_fetch_add(&wakes, 1);
}

static void fill(struct engine_job *job, int32_t *prompt, int index, int vocab) {
    for (int i = 0; i < PROMPT; i++) prompt[i] = 1 + (index * 131 + i * 7) % (vocab - 1);
    memset(job, 0, sizeof *job);
    job->request = (struct engine_request){.prompt = prompt,
                                           .prompt_count = PROMPT,
                                           .max_tokens = 12,
                                           .temperature = 1,
                                           .top_p = 0.9f,
                                           .repetition = 1,
                                           .seed = (uint64_t)index,
                                           .top_logprobs = index % 3 - 1,
                                           .ignore_eos = true,
                                           .kv = {.budget = 16,
                                                  .buffer = 8,
                                                  .chunk = 16,
                                                  .sinks = -1,
                                                  .recent = -1,
                                                  .horizon = NAN,
                                                  .reuse = true,
                                                  .retain = true}};
}

/* What the loop does after a wake: finish first, counts second. Returns 1 when finished. */
static int watch(struct engine_job *job, uint64_t *sum) {
    int finish = atomic_load_explicit(&job->choice[0].finish, memory_order_acquire);
    uint_fast32_t count = atomic_load_explicit(&job->choice[0].token_count, memory_order_acquire);
    uint_fast32_t safe = atomic_load_explicit(&job->choice[0].text_safe, memory_order_acquire);
    for (uint_fast32_t i = 0; i < count; i++) *sum += (uint64_t)job->choice[0].tokens[i].token;
    for (uint_fast32_t i = 0; i < safe; i++) *sum += (uint64_t)job->choice[0].text[i];
    return finish != ENGINE_RUNNING;
}

int main(void) {
    static struct engine_job jobs[JOBS];
    static int32_t prompts[JOBS][PROMPT];
    struct engine_options options = {.model_dir = KEEPD_SOURCE_DIR "/models/keepd-nano",
                                     .kv_budget = 64,
                                     .kv_buffer = 16,
                                     .kv_chunk = 32,
                                     .max_num_seqs = 4,
                                     .max_num_batched_tokens = 64,
                                     .max_model_len = 256,
                                     .max_queue = JOBS,
                                     .max_conversations = 3,
                                     .threads = 2,
                                     .wake = wake};
    struct engine *engine = NULL;
    struct fault fault = {0};
    int code = engine_open(&options, &engine, &fault);
    if (code != 0) {
        fprintf(stderr, "%s: %s\n", fault.field, fault.text);
        return 1;
    }
    CHECK(engine_start(engine) == 0);
    for (int i = 0; i < JOBS; i++) {
        fill(&jobs[i], prompts[i], i, engine_info(engine)->vocab);
        CHECK_MSG(engine_check(engine, &jobs[i].request, &fault) == 0, "%s", fault.text);
        CHECK(engine_queue_enter(engine));
        CHECK(engine_submit(engine, &jobs[i]) == 0);
    }
    uint64_t sum = 0;
    struct engine_snapshot snapshot;
    for (int over = 0; over < JOBS;) {
        over = 0;
        for (int i = 0; i < JOBS; i++) {
            over += watch(&jobs[i], &sum);
            if (i % 5 == 2) atomic_store(&jobs[i].cancel, 1);
        }
        engine_snapshot(engine, &snapshot);
        CHECK(snapshot.preemptions == 0 && snapshot.pages_used <= snapshot.pages_total);
        usleep(2000);
    }
    engine_snapshot(engine, &snapshot);
    CHECK(snapshot.running == 0 && snapshot.waiting == 0 && snapshot.pages_reserved == 0);
    CHECK(snapshot.pages_used == snapshot.pages_retained && snapshot.conversations <= 3);
    CHECK(engine_idle(engine));
    for (int i = 0; i < JOBS; i++) {
        int finish = atomic_load(&jobs[i].choice[0].finish);
        CHECK(finish == ENGINE_FINISH_LENGTH || (i % 5 == 2 && finish == ENGINE_FINISH_ABORT));
        engine_job_close(&jobs[i]);
    }
    /* Close with work in hand: the last jobs end as aborted, and nothing leaks. */
    for (int i = 0; i < 6; i++) {
        fill(&jobs[i], prompts[i], i, engine_info(engine)->vocab);
        CHECK(engine_queue_enter(engine) && engine_submit(engine, &jobs[i]) == 0);
    }
    engine_close(engine);
    for (int i = 0; i < 6; i++) {
        CHECK(atomic_load(&jobs[i].choice[0].finish) != ENGINE_RUNNING);
        engine_job_close(&jobs[i]);
    }
    printf("%d wakes, checksum %llu\n", atomic_load(&wakes), (unsigned long long)sum);
    return 0;
}
