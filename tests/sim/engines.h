/* Shared by the tests of whole engines: a CPU backend with injectable faults. cpu_open is wrapped
 * (sched.cmake), so engine_open always opens this backend. */
#ifndef KEEPD_TESTS_ENGINES_H
#define KEEPD_TESTS_ENGINES_H

#include <stdatomic.h>
#include <stdbool.h>

#include "engine/engine_job.h"

/* Faults of all open instances; any thread may set them. */
extern atomic_bool engines_failing; /* sampling reports a device failure */
extern atomic_bool engines_holding; /* sampling waits until this is over */
extern atomic_int engines_samples;  /* calls of sampling that have begun */
extern atomic_int engines_turns;    /* loop turns of engine threads: each reads the counts */

/* Instances opened from now on: those before the n-th have no faults. */
void engines_spare(int n);
/* Instances opened from now on do not observe attention. */
void engines_lesser(bool lesser);

extern atomic_int engines_wakes;
void engines_wake(void *arg); /* engine_options.wake: counts */

/* Checks a job and submits it. */
int engines_submit(struct engine *engine, struct engine_job *job);

#endif
