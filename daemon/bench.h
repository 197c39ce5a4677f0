/* `keepd bench MODEL`: how fast this machine reads prompts and generates, measured in the process,
 * through the engine as the daemon opens it: its scheduler, cache, policy and threads.
 *
 * Prompt: `batch` jobs at once, each with `prompt` random tokens; the rate is all their tokens over
 * the time from the first submission to the last first token. Generation: `batch` jobs with a
 * prompt of one token; the rate is the tokens after each job's first over the time from the
 * earliest first token to the last end. Answers do not end before their length. Nothing is reused
 * and nothing is retained. Every test runs once more before, which is not counted.
 *
 * Thread: the caller's, which is the loop thread of the engine's interface. */
#ifndef KEEPD_DAEMON_BENCH_H
#define KEEPD_DAEMON_BENCH_H

#include <stdbool.h>
#include <stdio.h>

#include "base/err.h"
#include "engine/engine_job.h"

#define BENCH_LIST_MAX   16
#define BENCH_REPEAT_MAX 100
#define BENCH_TOKENS_MAX 1048576

struct bench_list {
    int items[BENCH_LIST_MAX];
    int count;
};

struct bench_options {
    struct bench_list prompts, tokens, batches; /* -p, -n, -b; a list that is {0}: no such test */
    int repeats;                                /* -r; 0: as many as fit into a time */
    bool json, help;
};

/* Removes the measurement's own arguments from `argv`, and turns the model into --model, so that
 * the daemon's options are left: `rest`, of at least argc + 2, ends with NULL. argv[0] is the
 * program, argv[1] is "bench". ERR_INVALID names the argument in fault->field. */
int bench_parse(int argc, char **argv, struct bench_options *options, char **rest,
                struct fault *fault);
void bench_help(FILE *out);

/* Returns the largest number of jobs that a test runs at once. */
int bench_widest(const struct bench_options *options);

struct bench;
struct bench *bench_open(void);
void bench_close(struct bench *bench);
/* For engine_options.wake: any thread. */
void bench_wake(struct bench *bench);

/* Runs jobs whose requests are set, all at once, to their end, and returns the first fault. The
 * caller closes the jobs (engine_job_close). */
int bench_run_jobs(struct bench *bench, struct engine *engine, struct engine_job *jobs, int count,
                   struct fault *fault);

/* Runs all tests on a started engine and prints one table, as markdown or JSON. `name`: what the
 * table calls the model. */
int bench_run(struct bench *bench, struct engine *engine, const struct bench_options *options,
              const char *name, FILE *out, struct fault *fault);

#endif
