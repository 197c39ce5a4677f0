/* The engine with its thread and its readers, for ThreadSanitizer and for leaks: the bundled model,
 * jobs submitted and cancelled by one thread that polls their counters, rows and statuses read by
 * another; drain, close with work in hand, and a backend that fails. Plain main, because Criterion
 * does not start under ThreadSanitizer. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "engine/engine_conversations.h"
#include "engine/engine_stats.h"
#include "tests/sim/engines.h"

enum { JOBS = 24, PROMPT = 48, SEQUENCES = 4, CONVERSATIONS = 3 };

static struct engine_job jobs[JOBS];
static int32_t prompts[JOBS][PROMPT];

static const struct engine_conversation_filter everyone;

/* ---- Engine and jobs ---- */

static struct engine_options default_options(void) {
    return (struct engine_options){.model_dir = KEEPD_SOURCE_DIR "/bundled/keepd-nano",
                                   .kv_budget = 64,
                                   .kv_buffer = 16,
                                   .kv_chunk = 32,
                                   .max_num_seqs = SEQUENCES,
                                   .max_num_batched_tokens = 64,
                                   .max_model_len = 256,
                                   .max_queue = JOBS,
                                   .max_conversations = CONVERSATIONS,
                                   .threads = 2,
                                   .wake = engines_wake};
}

static struct engine *open_engine(void) {
    struct engine_options options = default_options();
    struct engine *engine = NULL;
    struct fault fault = {0};
    CHECK_MSG(engine_open(&options, &engine, &fault) == 0, "%s: %s", fault.field, fault.text);
    CHECK(engine_start(engine) == 0);
    return engine;
}

static void expect_no_engine(struct engine_options options, const char *field) {
    struct engine *engine = NULL;
    struct fault fault = {0};
    int rc = engine_open(&options, &engine, &fault);
    CHECK_MSG(rc != 0 && fault.code == rc && !engine, "%s is accepted", field);
    CHECK_MSG(strstr(fault.field, field), "%s, not %s", fault.field, field);
    CHECK(fault.text[0] != '\0');
}

/* Invalid options are rejected at startup, by name, and leave nothing behind. */
static void try_bad_options(void) {
    struct engine_options o[12];
    for (int i = 0; i < 12; i++) o[i] = default_options();
    o[0].max_num_seqs = 0;
    expect_no_engine(o[0], "max-num-seqs");
    o[1].max_num_batched_tokens = SEQUENCES;
    expect_no_engine(o[1], "max-num-batched-tokens");
    o[2].max_queue = 0;
    expect_no_engine(o[2], "max-queue");
    o[3].max_conversations = -1;
    expect_no_engine(o[3], "max-conversations");
    o[4].model_dir = KEEPD_SOURCE_DIR "/nowhere";
    expect_no_engine(o[4], "tokenizer.json");
    o[5].max_model_len = 1 << 30;
    expect_no_engine(o[5], "max-model-len");
    o[6].kv_policy = "fifo"; /* rejected before anything is read */
    o[6].model_dir = KEEPD_SOURCE_DIR "/nowhere";
    expect_no_engine(o[6], "kv-policy");
    o[7].gates = "";
    o[7].kv_policy = "global";
    expect_no_engine(o[7], "kv-policy");
    o[8].gates = "";
    o[8].kv_budget_max = 64; /* without gates the policy would be full */
    expect_no_engine(o[8], "kv-budget-max");
    o[9].kv_dtype = "f8";
    expect_no_engine(o[9], "kv-dtype");
    o[10].kv_pool_bytes = 1;
    expect_no_engine(o[10], "kv-pool-bytes");
    o[11].kv_budget = 65;
    o[11].kv_budget_max = 64;
    expect_no_engine(o[11], "kv-budget");
}

static struct engine_job *fill(const struct engine *engine, int index) {
    struct engine_job *job = &jobs[index];
    int vocab = engine_info(engine)->vocab;
    for (int i = 0; i < PROMPT; i++) prompts[index][i] = 1 + (index * 131 + i * 7) % (vocab - 1);
    memset(job, 0, sizeof *job);
    job->request = (struct engine_request){.prompt = prompts[index],
                                           .prompt_count = PROMPT,
                                           .max_tokens = 12,
                                           .temperature = 1,
                                           .top_p = 0.9f,
                                           .repetition = 1,
                                           .seed = (uint64_t)index,
                                           .top_logprobs = index % 3 - 1,
                                           .prompt_logprobs = index % 7 == 3,
                                           .prompt_top_logprobs = index % 3,
                                           .ignore_eos = true,
                                           .kv = {.budget = 16,
                                                  .buffer = 8,
                                                  .chunk = 16,
                                                  .sinks = -1,
                                                  .recent = -1,
                                                  .reuse = true,
                                                  .retain = true}};
    return job;
}

static void submit(struct engine *engine, int index) {
    CHECK(engine_queue_enter(engine, 1));
    CHECK(engines_submit(engine, fill(engine, index)) == 0);
}

/* Reads a job as the loop does after a wake-up: finish first, counts second. Returns whether the
 * job has finished. */
static bool watch(struct engine_job *job, uint64_t *sum) {
    int finish = atomic_load_explicit(&job->finished, memory_order_acquire);
    uint_fast32_t count = atomic_load_explicit(&job->choice[0].token_count, memory_order_acquire);
    uint_fast32_t safe = atomic_load_explicit(&job->choice[0].text_safe, memory_order_acquire);
    for (uint_fast32_t i = 0; i < count; i++) *sum += (uint64_t)job->choice[0].tokens[i].token;
    for (uint_fast32_t i = 0; i < safe; i++) *sum += (uint64_t)job->choice[0].text[i];
    return finish != ENGINE_RUNNING;
}

static void wait_for(struct engine_job *job) {
    uint64_t sum = 0;
    while (!watch(job, &sum)) usleep(500);
}

/* Any thread may look, at any time. */
static atomic_bool looking;

static void *look(void *arg) {
    struct engine *engine = arg;
    struct engine_status status;
    struct engine_sequence_row sequences[SEQUENCES + 1];
    struct engine_conversation_row conversations[CONVERSATIONS + 1];
    while (atomic_load(&looking)) {
        engine_status(engine, &status);
        CHECK(status.counters.preemptions == 0 && status.pages_used <= status.pages_total);
        CHECK(status.pages_used <= status.pages_reserved + status.pages_retained);
        int count = engine_sequences(engine, sequences, SEQUENCES + 1);
        CHECK(count <= SEQUENCES);
        for (int i = 0; i < count; i++)
            CHECK(sequences[i].prompt_count == PROMPT && sequences[i].pages_reserved > 0 &&
                  strcmp(sequences[i].policy, "global") == 0);
        count = engine_conversations(engine, &everyone, conversations, CONVERSATIONS + 1);
        CHECK(count <= CONVERSATIONS);
        for (int i = 0; i < count; i++)
            CHECK(conversations[i].id > 0 && conversations[i].idle_ns >= 0 &&
                  conversations[i].pages > 0 && conversations[i].tokens >= PROMPT);
        usleep(300);
    }
    return NULL;
}

/* ---- Cases ---- */

/* More jobs than sequences; every fifth is cancelled at some moment. */
static uint64_t try_many(struct engine *engine) {
    pthread_t looker;
    uint64_t sum = 0;
    atomic_store(&looking, true);
    CHECK(pthread_create(&looker, NULL, look, engine) == 0);
    for (int i = 0; i < JOBS; i++) submit(engine, i);
    for (int over = 0; over < JOBS;) {
        over = 0;
        for (int i = 0; i < JOBS; i++) {
            over += watch(&jobs[i], &sum);
            if (i % 5 == 2) atomic_store(&jobs[i].cancel, 1);
        }
        usleep(2000);
    }
    /* After the last answer its pages are free and the engine is idle. */
    struct engine_status status;
    engine_status(engine, &status);
    CHECK(status.running == 0 && status.waiting == 0 && status.pages_reserved == 0);
    CHECK(status.pages_used == status.pages_retained);
    CHECK(status.conversations <= CONVERSATIONS && engine_idle(engine));
    atomic_store(&looking, false);
    CHECK(pthread_join(looker, NULL) == 0);
    for (int i = 0; i < JOBS; i++) {
        int finish = atomic_load(&jobs[i].choice[0].finish);
        CHECK(finish == ENGINE_FINISH_LENGTH || (i % 5 == 2 && finish == ENGINE_FINISH_ABORT));
        engine_job_close(&jobs[i]);
    }
    return sum;
}

/* A job is shown as running while its first step runs, which reads this whole prompt, and another
 * that comes meanwhile as waiting. An idle engine's time without progress begins with the job. */
static void try_first_step(struct engine *engine) {
    struct engine_status status;
    struct engine_sequence_row row;
    struct engine_job *job = fill(engine, 0);
    int samples = atomic_load(&engines_samples);
    job->request.prompt_count = 8;
    job->request.prompt_logprobs = 0;
    atomic_store(&engines_holding, true);
    int64_t begun_ns = clock_ns();
    CHECK(engine_queue_enter(engine, 1) && engines_submit(engine, job) == 0);
    engine_status(engine, &status);
    CHECK(status.progress_ns >= begun_ns);
    while (atomic_load(&engines_samples) == samples) usleep(500);
    engine_status(engine, &status);
    CHECK_MSG(status.running == 1 && status.waiting == 0 && status.pages_reserved > 0,
              "%d running and %d waiting", status.running, status.waiting);
    CHECK(engine_sequences(engine, &row, 1) == 1 && row.prefilling && row.tokens == 0);
    submit(engine, 1);
    engine_status(engine, &status);
    CHECK_MSG(status.running == 1 && status.waiting == 1, "%d running and %d waiting",
              status.running, status.waiting);
    atomic_store(&engines_holding, false);
    wait_for(job);
    wait_for(&jobs[1]);
    engine_job_close(job);
    engine_job_close(&jobs[1]);
}

/* A conversation's idle time goes on while the engine sleeps. */
static void try_idle(struct engine *engine) {
    struct engine_conversation_row rows[CONVERSATIONS], later[CONVERSATIONS];
    int count = engine_conversations(engine, &everyone, rows, CONVERSATIONS);
    CHECK(count > 0);
    usleep(2000);
    CHECK(engine_conversations(engine, &everyone, later, CONVERSATIONS) == count);
    for (int i = 0; i < count; i++)
        CHECK(later[i].id == rows[i].id && later[i].idle_ns >= rows[i].idle_ns + 2000000);
}

/* A full queue is reported; places can also be returned without a job. */
static void try_places(struct engine *engine) {
    for (int i = 0; i < JOBS; i++) CHECK(engine_queue_enter(engine, 1));
    CHECK(!engine_queue_enter(engine, 1));
    engine_queue_leave(engine, 1);
    CHECK(!engine_queue_enter(engine, 2)); /* all or none */
    CHECK(engine_queue_enter(engine, 1));
    engine_queue_leave(engine, JOBS);
    CHECK(engine_queue_enter(engine, JOBS) && !engine_queue_enter(engine, 1));
    engine_queue_leave(engine, JOBS);
}

static int check_request(const struct engine *engine, const struct engine_request *request,
                         struct fault *fault) {
    struct engine_job job = {.request = *request};
    int rc = engine_check(engine, &job, fault);
    engine_job_close(&job);
    return rc;
}

static void expect_refused(const struct engine *engine, const struct engine_request *request,
                           int rc, const char *field) {
    struct fault fault = {0};
    CHECK_MSG(check_request(engine, request, &fault) == rc, "%s: %s", field, fault.text);
    CHECK_MSG(strcmp(fault.field, field) == 0, "%s, not %s", fault.field, field);
}

/* n may be as large as the number of sequences, or the option's limit, and no larger. */
static void try_choices(const struct engine *engine) {
    struct engine_options options = default_options();
    struct engine *strict = NULL;
    struct fault fault = {0};
    struct engine_request request = fill(engine, 0)->request;
    CHECK(engine_info(engine)->max_choices == SEQUENCES);
    request.choices = SEQUENCES;
    CHECK(check_request(engine, &request, &fault) == 0);
    request.choices = SEQUENCES + 1;
    expect_refused(engine, &request, ERR_LIMIT, "n");
    request.choices = -1;
    expect_refused(engine, &request, ERR_INVALID, "n");
    options.max_choices = 2;
    CHECK(engine_open(&options, &strict, &fault) == 0);
    request.choices = 2;
    CHECK(check_request(strict, &request, &fault) == 0);
    request.choices = 3;
    expect_refused(strict, &request, ERR_LIMIT, "n");
    engine_close(strict);
}

static void try_checks(const struct engine *engine) {
    const struct engine_request good = fill(engine, 0)->request;
    int32_t outside[] = {engine_info(engine)->vocab};
    struct engine_bias bias[] = {{-1, 1}};
    struct fault fault = {0};
    CHECK(check_request(engine, &good, &fault) == 0);
    CHECK(engine_info(engine)->threads == 2);
    struct engine_request r[10];
    for (int i = 0; i < 10; i++) r[i] = good;
    r[0].prompt_count = 0;
    expect_refused(engine, &r[0], ERR_INVALID, "prompt");
    r[1].prompt_count = INT32_MAX;
    expect_refused(engine, &r[1], ERR_CONTEXT, "prompt");
    r[2].max_tokens = -1;
    expect_refused(engine, &r[2], ERR_INVALID, "max_tokens");
    r[3].max_tokens = INT32_MAX;
    expect_refused(engine, &r[3], ERR_CONTEXT, "prompt");
    r[4].top_logprobs = ENGINE_TOP_MAX + 1;
    expect_refused(engine, &r[4], ERR_INVALID, "top_logprobs");
    r[5].kv.budget = 0;
    expect_refused(engine, &r[5], ERR_INVALID, "kv.budget");
    r[6].kv.policy = "least";
    expect_refused(engine, &r[6], ERR_INVALID, "kv.policy");
    r[7].prompt = outside;
    r[7].prompt_count = 1;
    expect_refused(engine, &r[7], ERR_INVALID, "prompt");
    r[8].stop_ids = outside;
    r[8].stop_id_count = 1;
    expect_refused(engine, &r[8], ERR_INVALID, "stop_token_ids");
    r[9].bias = bias;
    r[9].bias_count = 1;
    expect_refused(engine, &r[9], ERR_INVALID, "logit_bias");
}

/* A draining engine finishes what it has and takes no more. */
static void try_drain(struct engine *engine) {
    for (int i = 0; i < 6; i++) submit(engine, i);
    engine_drain(engine);
    CHECK(engine_queue_enter(engine, 1));
    CHECK(engines_submit(engine, fill(engine, 6)) == ERR_STOPPED);
    engine_job_close(&jobs[6]);
    engine_queue_leave(engine, 1);
    for (int i = 0; i < 6; i++) {
        wait_for(&jobs[i]);
        CHECK(atomic_load(&jobs[i].choice[0].finish) == ENGINE_FINISH_LENGTH);
        engine_job_close(&jobs[i]);
    }
    CHECK(engine_idle(engine));
}

/* The last jobs end as aborted, and nothing leaks. */
static void close_with_work(struct engine *engine) {
    for (int i = 0; i < 9; i++) submit(engine, i);
    engine_close(engine);
    for (int i = 0; i < 9; i++) {
        CHECK(atomic_load(&jobs[i].choice[0].finish) != ENGINE_RUNNING);
        engine_job_close(&jobs[i]);
    }
}

/* After a device error all jobs end with an error: running, waiting and future ones. */
static void try_failing_backend(void) {
    struct engine *engine = open_engine();
    struct engine_status status;
    submit(engine, 0);
    wait_for(&jobs[0]);
    CHECK(atomic_load(&jobs[0].choice[0].finish) == ENGINE_FINISH_LENGTH);
    atomic_store(&engines_failing, true);
    for (int i = 1; i < 10; i++) submit(engine, i);
    for (int i = 1; i < 10; i++) wait_for(&jobs[i]);
    engine_status(engine, &status);
    CHECK(status.stopped && status.running == 0 && status.pages_reserved == 0);
    atomic_store(&engines_failing, false);
    submit(engine, 10); /* a device that has failed is not used again */
    wait_for(&jobs[10]);
    for (int i = 1; i < 11; i++) {
        CHECK(atomic_load(&jobs[i].choice[0].finish) == ENGINE_FINISH_ERROR);
        CHECK(jobs[i].fault.code == ERR_DEVICE);
    }
    CHECK(engine_idle(engine));
    try_places(engine);
    for (int i = 0; i < 11; i++) engine_job_close(&jobs[i]);
    engine_close(engine);
}

static void expect_sleep(void) {
    int before = atomic_load(&engines_turns);
    usleep(20000); /* if it did not sleep, there would be thousands of turns */
    CHECK_MSG(atomic_load(&engines_turns) - before < 20, "%d turns with nothing to do",
              atomic_load(&engines_turns) - before);
}

/* After a device error nothing expires, and the thread sleeps beyond a time to live. */
static void try_failing_backend_with_ttl(void) {
    struct engine *engine = open_engine();
    struct engine_job *job = fill(engine, 0);
    job->request.kv.ttl = 1;
    CHECK(engine_queue_enter(engine, 1) && engines_submit(engine, job) == 0);
    wait_for(job);
    engine_job_close(job);
    atomic_store(&engines_failing, true);
    submit(engine, 1);
    wait_for(&jobs[1]);
    CHECK(jobs[1].fault.code == ERR_DEVICE);
    engine_job_close(&jobs[1]);
    atomic_store(&engines_failing, false);
    usleep(1100000);
    expect_sleep();
    engine_close(engine);
}

/* ---- A state directory, deletes and choices ---- */

static struct engine *open_with_state(const char *dir, int idle_seconds) {
    struct engine_options options = default_options();
    struct engine *engine = NULL;
    struct fault fault = {0};
    options.state_dir = dir;
    options.state_bytes = 1 << 28;
    options.state_idle_seconds = idle_seconds;
    CHECK_MSG(engine_open(&options, &engine, &fault) == 0, "%s: %s", fault.field, fault.text);
    CHECK(engine_start(engine) == 0);
    return engine;
}

/* The first tokens of the job's prompt, in several choices. */
static void submit_some(struct engine *engine, int index, int prompt_count, int choices) {
    struct engine_job *job = fill(engine, index);
    job->request.prompt_count = prompt_count;
    job->request.prompt_logprobs = false;
    job->request.choices = choices;
    CHECK(engine_queue_enter(engine, 1));
    CHECK(engines_submit(engine, job) == 0);
}

/* Continues what submit_some left and retains nothing, so that the conversation it began from stays
 * the current one. */
static void submit_fork(struct engine *engine, int index) {
    struct engine_job *job = fill(engine, index);
    job->request.prompt_logprobs = false;
    job->request.kv.retain = false;
    CHECK(engine_queue_enter(engine, 1));
    CHECK(engines_submit(engine, job) == 0);
}

static void wait_and_close(int count) {
    for (int i = 0; i < count; i++) {
        wait_for(&jobs[i]);
        for (int k = 0; k < jobs[i].choice_count; k++)
            CHECK(atomic_load(&jobs[i].choice[k].finish) == ENGINE_FINISH_LENGTH);
        engine_job_close(&jobs[i]);
    }
}

static int delete_one(struct engine *engine, uint64_t id) {
    static struct engine_order order;
    order = (struct engine_order){.id = id};
    CHECK(engine_conversation_order(engine, &order) == 0);
    while (atomic_load_explicit(&order.done, memory_order_acquire) == 0) usleep(200);
    return order.result;
}

/* Has a conversation written by order, and sends its file to the engine again, in pieces, as
 * threads of the server do. */
struct mover {
    struct engine *engine;
    uint64_t id;
    uint8_t space[16];
};

static void *move_there_and_back(void *arg) {
    const struct mover *mover = arg;
    static _Thread_local char data[1 << 20];
    struct engine_upload *upload;
    struct engine_conversation_row row;
    struct fault fault = {0};
    uint64_t bytes;
    int fd;
    CHECK(engine_state_open(mover->engine, mover->id, &fd, &bytes, &fault) == 0);
    CHECK(bytes <= sizeof data && read(fd, data, bytes) == (ssize_t)bytes);
    close(fd);
    CHECK(engine_upload_open(mover->engine, mover->space, &upload, &fault) == 0);
    for (size_t at = 0; at < bytes; at += 10000) {
        size_t size = bytes - at < 10000 ? bytes - at : 10000;
        CHECK_MSG(engine_upload_add(upload, data + at, size, &fault) == 0, "%s", fault.text);
    }
    CHECK_MSG(engine_upload_end(upload, &row, &fault) == 0 && row.id == mover->id, "%s",
              fault.text);
    engine_upload_close(upload);
    return NULL;
}

static int write_one(struct engine *engine, uint64_t id) {
    static struct engine_order order;
    order = (struct engine_order){.kind = ENGINE_ORDER_WRITE, .id = id};
    CHECK(engine_conversation_order(engine, &order) == 0);
    while (atomic_load_explicit(&order.done, memory_order_acquire) == 0) usleep(200);
    return order.result;
}

static void remove_dir(const char *dir) {
    char command[128];
    CHECK(snprintf(command, sizeof command, "rm -r %s", dir) > 0 && system(command) == 0);
}

/* Conversations in memory at the start of draining are on disk when the engine is idle. A new
 * engine lists, continues and deletes them. */
static void try_state(void) {
    char dir[] = "/tmp/keepd-engine-XXXXXX";
    struct engine_conversation_row rows[CONVERSATIONS + 1];
    struct engine_status status;
    CHECK(mkdtemp(dir));
    struct engine *engine = open_with_state(dir, 0);
    for (int i = 0; i < 3; i++) submit_some(engine, i, PROMPT / 2, 1 + i);
    wait_and_close(3);
    CHECK(delete_one(engine, 1) == ERR_NOTFOUND);
    engine_drain(engine);
    while (!engine_idle(engine)) usleep(500);
    engine_status(engine, &status);
    CHECK(status.conversations_on_disk == 3 && status.counters.state_failed == 0);
    engine_close(engine);
    engine = open_with_state(dir, 0);
    CHECK(engine_conversations(engine, &everyone, rows, CONVERSATIONS + 1) == 3);
    CHECK(rows[0].pages == 0 && rows[0].disk_bytes > 0);
    for (int i = 0; i < 3; i++) submit_some(engine, i, PROMPT, 2);
    wait_and_close(3);
    engine_status(engine, &status);
    CHECK(status.counters.state_restored == 3 && status.counters.cached_tokens == 3 * (PROMPT / 2));
    for (int count; (count = engine_conversations(engine, &everyone, rows, CONVERSATIONS + 1)) > 0;)
        for (int i = 0; i < count; i++) (void)delete_one(engine, rows[i].id);
    engine_close(engine);
    remove_dir(dir);
}

/* Conversations are written by order and come back as uploads, two at a time, while jobs continue
 * and while the engine writes others. */
static void try_moves(void) {
    char dir[] = "/tmp/keepd-engine-XXXXXX";
    struct engine_conversation_row rows[CONVERSATIONS + 1];
    struct mover movers[2];
    pthread_t threads[2];
    CHECK(mkdtemp(dir));
    struct engine *engine = open_with_state(dir, 3600);
    for (int i = 0; i < 2; i++) submit_some(engine, i, PROMPT / 2, 1);
    wait_and_close(2);
    int count = engine_conversations(engine, &everyone, rows, CONVERSATIONS + 1);
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (!rows[i].superseded) rows[kept++] = rows[i];
    CHECK_MSG(kept == 2, "%d of %d", kept, count);
    CHECK(write_one(engine, 1) == ERR_NOTFOUND);
    for (int i = 0; i < 2; i++) submit_fork(engine, i);
    for (int i = 0; i < 2; i++) {
        int rc = write_one(engine, rows[i].id);
        CHECK_MSG(rc == 0, "%d", rc);
        movers[i] = (struct mover){.engine = engine, .id = rows[i].id};
        memcpy(movers[i].space, rows[i].space, sizeof movers[i].space);
        CHECK(pthread_create(&threads[i], NULL, move_there_and_back, &movers[i]) == 0);
    }
    wait_and_close(2);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    engine_close(engine);
    remove_dir(dir);
}

/* A device error while conversations are not written yet: the thread says so, drains, and sleeps.
 */
static void try_failing_backend_with_state(void) {
    char dir[] = "/tmp/keepd-engine-XXXXXX";
    CHECK(mkdtemp(dir));
    struct engine *engine = open_with_state(dir, 3600);
    submit_some(engine, 0, PROMPT / 2, 1);
    wait_and_close(1);
    atomic_store(&engines_failing, true);
    submit_some(engine, 1, PROMPT, 1);
    wait_for(&jobs[1]);
    CHECK(jobs[1].fault.code == ERR_DEVICE);
    engine_job_close(&jobs[1]);
    atomic_store(&engines_failing, false);
    engine_drain(engine);
    while (!engine_idle(engine)) usleep(500);
    expect_sleep();
    engine_close(engine);
    remove_dir(dir);
}

/* A policy that the backend lacks is rejected at startup, also by a check of the options alone. */
static void try_lesser_backend(void) {
    engines_lesser(true);
    for (int check = 0; check < 2; check++) {
        struct engine_options o = default_options();
        o.check_only = check != 0;
        o.kv_policy = "h2o";
        expect_no_engine(o, "kv-policy");
    }
    engine_close(open_engine()); /* without the option it serves */
    engines_lesser(false);
}

int main(void) {
    struct engine *engine = open_engine();
    uint64_t sum = try_many(engine);
    try_first_step(engine);
    try_idle(engine);
    try_places(engine);
    try_checks(engine);
    try_choices(engine);
    close_with_work(engine);
    engine = open_engine();
    try_drain(engine);
    engine_close(engine);
    try_failing_backend();
    try_failing_backend_with_ttl();
    try_bad_options();
    try_lesser_backend();
    try_state();
    try_moves();
    try_failing_backend_with_state();
    printf("%d wakes, checksum %llu\n", atomic_load(&engines_wakes), (unsigned long long)sum);
    return 0;
}
