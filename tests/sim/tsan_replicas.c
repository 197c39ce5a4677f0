/* Several replicas behind one engine: where jobs go, that answers do not depend on it, and that
 * drain, close, deleting, failing and the state directory reach all of them. For ThreadSanitizer,
 * too: every replica has its thread, and one more reads what they publish. Only the
 * last replica can be made to fail or wait. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "engine/engine_conversations.h"
#include "engine/engine_stats.h"
#include "tests/sim/engines.h"

enum { DIALOGUES = 6, PROMPT = 40, ANSWER = 6, MORE = 7, TOKENS_MAX = 256, CONVERSATIONS = 8 };

static const struct engine_conversation_filter everyone;

/* ---- Engines ---- */

/* One compute thread for each replica. */
static struct engine_options options_of(int replicas) {
    return (struct engine_options){.model_dir = KEEPD_SOURCE_DIR "/bundled/keepd-nano",
                                   .kv_budget = 24,
                                   .kv_buffer = 8,
                                   .kv_chunk = 16,
                                   .max_num_seqs = 4,
                                   .max_num_batched_tokens = 64,
                                   .max_model_len = TOKENS_MAX,
                                   .max_queue = 2 * DIALOGUES,
                                   .max_conversations = CONVERSATIONS,
                                   .data_parallel_size = replicas,
                                   .threads = replicas,
                                   .wake = engines_wake};
}

static struct engine *open_with(const struct engine_options *options) {
    struct engine *engine = NULL;
    struct fault fault = {0};
    engines_spare(options->data_parallel_size - 1);
    CHECK_MSG(engine_open(options, &engine, &fault) == 0, "%s: %s", fault.field, fault.text);
    CHECK(engine_info(engine)->replicas == options->data_parallel_size);
    return engine;
}

static struct engine *open_started(int replicas) {
    struct engine_options options = options_of(replicas);
    struct engine *engine = open_with(&options);
    CHECK(engine_start(engine) == 0);
    return engine;
}

static void expect_refused(int replicas, int threads) {
    struct engine_options options = options_of(replicas);
    struct engine *engine = NULL;
    struct fault fault = {0};
    options.threads = threads;
    for (int check = 0; check < 2; check++) {
        options.check_only = check != 0;
        CHECK(engine_open(&options, &engine, &fault) == ERR_INVALID && !engine);
        CHECK_MSG(strcmp(fault.field, "data-parallel-size") == 0, "%s", fault.field);
    }
}

static void try_refusals(void) {
    expect_refused(-1, 0);
    expect_refused(ENGINE_REPLICAS_MAX + 1, ENGINE_REPLICAS_MAX + 1);
    expect_refused(3, 2); /* a replica without a thread */
}

/* ---- Dialogues ---- */

/* One job at a time, each continuing from the previous answer. */
struct dialogue {
    struct engine_job job;
    int32_t tokens[TOKENS_MAX];
    int32_t count;
    int home; /* the replica of its first job */
};

static struct dialogue dialogues[DIALOGUES];
static const char *policy; /* every job has it; NULL: the default */

static void say_more(struct dialogue *dialogue, int index, int count) {
    for (int i = 0; i < count; i++, dialogue->count++)
        dialogue->tokens[dialogue->count] = 1 + (index * 131 + dialogue->count * 7) % 900;
}

static void begin(void) {
    memset(dialogues, 0, sizeof dialogues);
    for (int i = 0; i < DIALOGUES; i++) say_more(&dialogues[i], i, PROMPT);
}

static void submit(struct engine *engine, int index) {
    struct dialogue *dialogue = &dialogues[index];
    memset(&dialogue->job, 0, sizeof dialogue->job);
    dialogue->job.request = (struct engine_request){.prompt = dialogue->tokens,
                                                    .prompt_count = dialogue->count,
                                                    .max_tokens = ANSWER,
                                                    .temperature = 1,
                                                    .top_p = 0.9f,
                                                    .repetition = 1,
                                                    .seed = (uint64_t)index,
                                                    .top_logprobs = 0,
                                                    .choices = 1 + index % 2,
                                                    .ignore_eos = true,
                                                    .kv = {.policy = policy,
                                                           .budget = -1,
                                                           .buffer = -1,
                                                           .chunk = -1,
                                                           .sinks = -1,
                                                           .recent = -1,
                                                           .reuse = true,
                                                           .retain = true}};
    CHECK(engine_queue_enter(engine, 1));
    CHECK(engines_submit(engine, &dialogue->job) == 0);
}

static void wait_for(const struct engine_job *job) {
    while (atomic_load_explicit(&job->finished, memory_order_acquire) == 0) usleep(500);
}

/* The answer's tokens join the dialogue, but for the last, which was never appended, and the user
 * says more. A checksum of all that the job put out. */
static double answer(int index) {
    struct dialogue *dialogue = &dialogues[index];
    struct engine_job *job = &dialogue->job;
    double sum = 0;
    wait_for(job);
    for (int k = 0; k < job->choice_count; k++) {
        const struct engine_choice *choice = &job->choice[k];
        CHECK(atomic_load(&choice->finish) == ENGINE_FINISH_LENGTH);
        CHECK(atomic_load(&choice->token_count) == ANSWER);
        for (int i = 0; i < ANSWER; i++)
            sum = sum * 1.01 + choice->tokens[i].token + (double)choice->tokens[i].logprob;
    }
    for (int i = 0; i < ANSWER - 1; i++)
        dialogue->tokens[dialogue->count++] = job->choice[0].tokens[i].token;
    engine_job_close(job);
    say_more(dialogue, index, MORE);
    return sum;
}

/* ---- Where jobs go ---- */

/* Waiting jobs go to the replica with less work. */
static void try_balance(void) {
    struct engine_options options = options_of(2);
    struct engine_status status;
    struct engine *engine = open_with(&options);
    static const int expected[] = {0, 1, 1, 0};
    begin();
    say_more(&dialogues[0], 0, 50); /* as long as two of the others */
    for (int i = 0; i < 4; i++) {
        submit(engine, i);
        CHECK(dialogues[i].job.replica == expected[i]);
    }
    engine_status(engine, &status);
    CHECK(status.jobs == 4);
    engine_close(engine); /* with work that it has not seen yet */
    for (int i = 0; i < 4; i++) {
        CHECK(atomic_load(&dialogues[i].job.choice[0].finish) == ENGINE_FINISH_ABORT);
        engine_job_close(&dialogues[i].job);
    }
}

/* The first jobs of `count` dialogues, submitted before anybody runs: where they go depends on
 * nothing else. */
static struct engine *open_with_jobs(int replicas, int count) {
    struct engine_options options = options_of(replicas);
    struct engine *engine = open_with(&options);
    begin();
    int on[ENGINE_REPLICAS_MAX] = {0};
    for (int i = 0; i < count; i++) {
        submit(engine, i);
        dialogues[i].home = dialogues[i].job.replica;
        on[dialogues[i].home]++;
    }
    for (int i = 0; i < replicas; i++) CHECK(on[i] == count / replicas);
    CHECK(engine_start(engine) == 0);
    return engine;
}

static void check_hits(struct engine *engine, int replicas) {
    struct engine_status all, one;
    uint64_t hits = 0;
    engine_status(engine, &all);
    CHECK(all.counters.conversation_hits == (uint64_t)2 * DIALOGUES && all.jobs == 0);
    for (int i = 0; i < replicas; i++) {
        engine_replica_status(engine, i, &one);
        CHECK(one.counters.conversation_hits > 0);
        hits += one.counters.conversation_hits;
    }
    CHECK(hits == all.counters.conversation_hits);
    CHECK(hist_count(&all.counters.iteration_tokens) == all.counters.steps);
}

/* Turns go to the replica of their dialogue, however busy it is. */
static void run_dialogues(int replicas, double sums[3][DIALOGUES]) {
    struct engine *engine = open_with_jobs(replicas, DIALOGUES);
    for (int i = 0; i < DIALOGUES; i++) sums[0][i] = answer(i);
    for (int turn = 1; turn < 3; turn++) {
        int32_t before[DIALOGUES];
        for (int k = 0; k < DIALOGUES; k++) {
            int i = turn == 1 ? DIALOGUES - 1 - k : (k * 5) % DIALOGUES;
            before[i] = dialogues[i].count - MORE;
            submit(engine, i);
            CHECK(dialogues[i].job.replica == dialogues[i].home);
        }
        for (int i = 0; i < DIALOGUES; i++) {
            wait_for(&dialogues[i].job);
            CHECK(dialogues[i].job.cached_tokens == before[i]);
            sums[turn][i] = answer(i);
        }
    }
    check_hits(engine, replicas);
    engine_close(engine);
}

static void try_answers(void) {
    double alone[3][DIALOGUES], shared[3][DIALOGUES];
    run_dialogues(1, alone);
    for (int replicas = 2; replicas <= 3; replicas++) {
        run_dialogues(replicas, shared);
        for (int turn = 0; turn < 3; turn++)
            for (int i = 0; i < DIALOGUES; i++)
                CHECK_MSG(alone[turn][i] == shared[turn][i], "turn %d of dialogue %d", turn, i);
    }
}

/* A full queue sends nobody away while there is room in another: who has a conversation there
 * starts from nothing. */
static void try_full_queue(void) {
    struct engine_options options = options_of(2);
    options.max_queue = 1;
    options.max_num_seqs = 2; /* the choices of one odd dialogue */
    struct engine *engine = open_with(&options);
    begin();
    for (int i = 0; i < 2; i++) submit(engine, i);
    CHECK(!engine_queue_enter(engine, 1));
    CHECK(engine_start(engine) == 0);
    for (int i = 0; i < 2; i++) (void)answer(i);
    dialogues[5] = dialogues[3] = dialogues[1];
    atomic_store(&engines_holding, true);
    submit(engine, 1);
    while (!atomic_load(&dialogues[1].job.admitted)) usleep(500);
    submit(engine, 3);
    submit(engine, 5);
    CHECK(dialogues[1].job.replica == 1 && dialogues[3].job.replica == 1);
    CHECK(dialogues[5].job.replica == 0);
    (void)answer(5);
    CHECK(dialogues[5].job.cached_tokens == 0 && !atomic_load(&dialogues[3].job.admitted));
    atomic_store(&engines_holding, false);
    (void)answer(1);
    (void)answer(3);
    CHECK(dialogues[3].job.cached_tokens > 0);
    engine_close(engine);
}

/* A prompt that only begins like a conversation goes to the replica that has it, too: there the
 * conversation is cut. Nothing else speaks for that replica. */
static void try_cut(void) {
    struct engine_options options = options_of(2);
    struct engine *engine = open_with(&options);
    begin();
    policy = "full";
    for (int i = 0; i < 2; i++) {
        say_more(&dialogues[i], i, 60);
        submit(engine, i);
        CHECK(dialogues[i].job.replica == i);
    }
    CHECK(engine_start(engine) == 0);
    for (int i = 0; i < 2; i++) (void)answer(i);
    memcpy(dialogues[2].tokens, dialogues[1].tokens, 70 * sizeof *dialogues[2].tokens);
    dialogues[2].count = 70;
    say_more(&dialogues[2], 2, 20);
    CHECK(dialogues[2].tokens[70] != dialogues[1].tokens[70]);
    submit(engine, 2);
    CHECK(dialogues[2].job.replica == 1);
    wait_for(&dialogues[2].job);
    CHECK(dialogues[2].job.cached_tokens == 70);
    (void)answer(2);
    say_more(&dialogues[3], 3, 60); /* begins like none */
    submit(engine, 3);
    CHECK(dialogues[3].job.replica == 0);
    (void)answer(3);
    policy = NULL;
    engine_close(engine);
}

/* If two replicas have the same state, the client's hint decides. */
static void try_hint(void) {
    struct engine_options options = options_of(2);
    struct engine *engine = open_with(&options);
    begin();
    dialogues[1] = dialogues[0];
    for (int i = 0; i < 2; i++) {
        submit(engine, i);
        dialogues[i].job.request.hint = 77 + (uint64_t)i;
        dialogues[i].job.request.seed = 5;
    }
    CHECK(engine_start(engine) == 0);
    for (int i = 0; i < 2; i++) (void)answer(i);
    for (int i = 1; i >= 0; i--) {
        struct engine_job *job = &dialogues[i].job;
        *job = (struct engine_job){.request = job->request};
        job->request.prompt_count = dialogues[i].count;
        CHECK(engine_queue_enter(engine, 1) && engines_submit(engine, job) == 0);
        CHECK(job->replica == i);
        (void)answer(i);
    }
    engine_close(engine);
}

/* ---- Operations on all replicas ---- */

static int delete_one(struct engine *engine, uint64_t id) {
    static struct engine_order order;
    order = (struct engine_order){.id = id};
    CHECK(engine_conversation_order(engine, &order) == 0);
    while (atomic_load_explicit(&order.done, memory_order_acquire) == 0) usleep(200);
    return order.result;
}

static int list(struct engine *engine, struct engine_conversation_row *rows) {
    return engine_conversations(engine, &everyone, rows, 4 * CONVERSATIONS);
}

static void try_deletes(void) {
    struct engine_conversation_row rows[4 * CONVERSATIONS];
    struct engine *engine = open_with_jobs(2, 4);
    int on[2] = {0}, kept = 0;
    for (int i = 0; i < 4; i++) (void)answer(i);
    int count = list(engine, rows);
    CHECK(delete_one(engine, 1) == ERR_NOTFOUND);
    for (int i = 0; i < count; i++) {
        if (rows[i].superseded) continue; /* a checkpoint: deleted with its conversation */
        kept++;
        on[rows[i].replica]++;
        CHECK(delete_one(engine, rows[i].id) == 0);
        CHECK(delete_one(engine, rows[i].id) == ERR_NOTFOUND);
    }
    CHECK(kept == 4 && on[0] == 2 && on[1] == 2);
    CHECK(list(engine, rows) == 0);
    engine_close(engine);
}

static atomic_bool looking;

static void *look(void *arg) {
    struct engine *engine = arg;
    struct engine_status status;
    struct engine_sequence_row sequences[16];
    struct engine_conversation_row rows[4 * CONVERSATIONS];
    while (atomic_load(&looking)) {
        engine_status(engine, &status);
        CHECK(status.counters.preemptions == 0 && status.pages_used <= status.pages_total);
        int count = engine_sequences(engine, sequences, 16);
        CHECK(count <= 8);
        for (int i = 0; i < count; i++)
            CHECK(sequences[i].replica >= 0 && sequences[i].replica < 2);
        (void)list(engine, rows);
        usleep(300);
    }
    return NULL;
}

/* Draining finishes the jobs of every replica; none accepts more. */
static void try_drain(void) {
    struct engine *engine = open_started(2);
    pthread_t looker;
    atomic_store(&looking, true);
    CHECK(pthread_create(&looker, NULL, look, engine) == 0);
    begin();
    for (int i = 0; i < DIALOGUES; i++) submit(engine, i);
    engine_drain(engine);
    struct engine_job late = {.request = dialogues[0].job.request};
    CHECK(engine_queue_enter(engine, 1));
    CHECK(engines_submit(engine, &late) == ERR_STOPPED);
    engine_job_close(&late);
    engine_queue_leave(engine, 1);
    for (int i = 0; i < DIALOGUES; i++) (void)answer(i);
    CHECK(engine_idle(engine));
    atomic_store(&looking, false);
    CHECK(pthread_join(looker, NULL) == 0);
    engine_close(engine);
}

static void try_close(void) {
    struct engine *engine = open_started(2);
    begin();
    for (int i = 0; i < DIALOGUES; i++) submit(engine, i);
    engine_close(engine);
    for (int i = 0; i < DIALOGUES; i++) {
        CHECK(atomic_load(&dialogues[i].job.finished) == 1);
        engine_job_close(&dialogues[i].job);
    }
}

/* One replica's device fails: its jobs end with an error, the others' do not, and the whole says
 * that it must be started again. */
static void try_failure(void) {
    struct engine_status status;
    atomic_store(&engines_failing, true);
    struct engine *engine = open_with_jobs(2, 4);
    for (int i = 0; i < 4; i++) {
        struct engine_job *job = &dialogues[i].job;
        wait_for(job);
        bool failed = atomic_load(&job->choice[0].finish) == ENGINE_FINISH_ERROR;
        CHECK(failed == (job->replica == 1));
        CHECK(!failed || job->fault.code == ERR_DEVICE);
        engine_job_close(job);
    }
    atomic_store(&engines_failing, false);
    engine_status(engine, &status);
    CHECK(status.stopped && status.jobs == 0 && status.pages_reserved == 0);
    engine_replica_status(engine, 0, &status);
    CHECK(!status.stopped);
    struct engine_order order = {.id = 1};
    CHECK(engine_conversation_order(engine, &order) == ERR_STOPPED);
    CHECK(engine_queue_enter(engine, 2 * options_of(2).max_queue));
    CHECK(!engine_queue_enter(engine, 1)); /* no place of the two queues was lost */
    engine_queue_leave(engine, 2 * options_of(2).max_queue);
    engine_close(engine);
}

/* ---- One state directory ---- */

static struct engine *open_with_state(const char *dir, int replicas) {
    struct engine_options options = options_of(replicas);
    options.state_dir = dir;
    options.state_bytes = 1 << 28;
    options.state_idle_seconds = 0;
    options.kv_pool_bytes =
        2200 << 10; /* two or three stay in memory beside running ones, the others on disk */
    struct engine *engine = open_with(&options);
    CHECK(engine_start(engine) == 0);
    return engine;
}

/* A turn of every dialogue, two at a time; each goes on with what is in memory or on disk. */
static void run_turn(struct engine *engine, double *sums, bool restored) {
    for (int i = 0; i < DIALOGUES; i += 2) {
        int32_t before[2] = {dialogues[i].count - MORE, dialogues[i + 1].count - MORE};
        submit(engine, i);
        submit(engine, i + 1);
        for (int n = 0; n < 2; n++) {
            wait_for(&dialogues[i + n].job);
            CHECK(!restored || dialogues[i + n].job.cached_tokens == before[n]);
            sums[i + n] = answer(i + n);
        }
    }
}

static void drain(struct engine *engine) {
    engine_drain(engine);
    while (!engine_idle(engine)) usleep(500);
}

static void remove_dir(const char *dir) {
    char command[128];
    CHECK(snprintf(command, sizeof command, "rm -r %s", dir) > 0 && system(command) == 0);
}

static void run_state(int replicas, double sums[4][DIALOGUES]) {
    char dir[] = "/tmp/keepd-replicas-XXXXXX";
    struct engine_conversation_row rows[4 * CONVERSATIONS];
    struct engine_status status;
    CHECK(mkdtemp(dir));
    struct engine *engine = open_with_state(dir, replicas);
    begin();
    run_turn(engine, sums[0], false);
    run_turn(engine, sums[1], true);
    drain(engine);
    engine_status(engine, &status);
    CHECK(status.counters.state_failed == 0 && status.state_refused == 0);
    CHECK(status.conversations_on_disk >= DIALOGUES);
    engine_close(engine);
    engine = open_with_state(
        dir, replicas); /* belongs to no replica now: the one that gets the turn reads it */
    run_turn(engine, sums[2], true);
    run_turn(engine, sums[3], true);
    engine_status(engine, &status);
    CHECK(status.counters.state_restored >= DIALOGUES && status.state_refused == 0);
    for (int count; (count = list(engine, rows)) > 0;)
        for (int i = 0; i < count; i++) (void)delete_one(engine, rows[i].id);
    engine_status(engine, &status);
    CHECK(status.conversations == 0 && status.conversations_on_disk == 0);
    engine_close(engine);
    remove_dir(dir);
}

static void try_state(void) {
    double alone[4][DIALOGUES], shared[4][DIALOGUES];
    run_state(1, alone);
    run_state(2, shared);
    CHECK(memcmp(alone, shared, sizeof alone) == 0);
}

int main(void) {
    try_refusals();
    try_balance();
    try_full_queue();
    try_answers();
    try_hint();
    try_cut();
    try_deletes();
    try_drain();
    try_close();
    try_failure();
    try_state();
    printf("%d wakes\n", atomic_load(&engines_wakes));
    return 0;
}
