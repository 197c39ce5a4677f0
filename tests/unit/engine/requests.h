/* Shared by the tests of engine/steps/sched.c: small requests, and running them in a world
 * (tests/sim/world.h). One test at a time; a failure ends the test. */
#ifndef KEEPD_TESTS_UNIT_ENGINE_REQUESTS_H
#define KEEPD_TESTS_UNIT_ENGINE_REQUESTS_H

#include "tests/sim/world.h"

/* A prompt of its own for each number (0..15), WORLD_POSITIONS long; the first `shared` tokens are
 * prompt 0's. One array per number, made anew by each call, also by those in job_of, turn and ask.
 */
int32_t *prompt_of(int number, int shared);
struct engine_kv full(void);
struct engine_kv global(int budget, int buffer, int chunk);
struct engine_job job_of(int number, int prompt_count, int max_tokens, struct engine_kv kv);
/* Conversations in memory that are no checkpoints. */
int turns_kept(const struct world *w);
int finish_of(const struct engine_job *job);
int count_of(const struct engine_job *job);
void submit(struct world *w, struct engine_job *job);
void run_until_idle(struct world *w);
/* Runs one job alone in a separate world; the caller closes the job. */
void run_alone(struct engine_job *job);
void expect_same_answer(const struct engine_job *a, const struct engine_job *b);
int64_t pages_used(const struct world *w);
int slots_per_page(void);
/* Runs a turn that goes on after the first `shared` tokens of prompt 0; returns its cached tokens.
 */
int turn(struct world *w, int number, int shared, int prompt_count, struct engine_kv kv);
/* An answered turn whose prompt is the first `shared` tokens of prompt 0 and goes on with those of
 * prompt `number`; the caller closes it. */
struct engine_job ask(struct world *w, int number, int shared, int prompt_count,
                      struct engine_kv kv);

#endif
