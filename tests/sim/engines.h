/* What the tests of whole engines share: a CPU backend that can misbehave. cpu_open is wrapped
 * (sched.cmake), so whatever engine_open opens is one. */
#ifndef KEEPD_TESTS_ENGINES_H
#define KEEPD_TESTS_ENGINES_H

#include <stdatomic.h>
#include <stdbool.h>

/* Of instances that are open; any thread. */
extern atomic_bool engines_failing; /* sampling reports a device failure */
extern atomic_bool engines_holding; /* sampling waits until this is over */
extern atomic_int engines_turns;    /* of engine threads: each reads the counts */

/* Of instances that will be opened: those before the n-th are as they always are. */
void engines_spare(int n);
/* They neither observe attention nor take snapshots. */
void engines_lesser(bool lesser);

extern atomic_int engines_wakes;
void engines_wake(void *arg); /* engine_options.wake: counts */

#endif
