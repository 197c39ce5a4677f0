/* Fits retention gates to what cache entries were measured to be worth (model/worth.h), without
 * gradients of the model: small networks (fit/net.h), the loss of soft evictions (fit/rank.h),
 * Adam, and early stopping on texts that are held out.
 *
 * Every FIT_HELD_OUT-th text, the first included, is only evaluated. A step draws FIT_ROWS texts
 * and for each a budget, log-evenly between 1/32 and 0.4 of the text, and up to FIT_EVICTIONS of
 * its windows before which this budget evicts. The result is the state with the lowest held-out
 * loss.
 *
 * Thread: the caller's, which owns everything here; the team computes layers and windows of a step
 * in parallel, each into its own part of the arrays. The same bits for any number of threads. */
#ifndef KEEPD_FIT_FIT_H
#define KEEPD_FIT_FIT_H

#include <stdbool.h>

#include "fit/net.h"
#include "kernels/cpu/team.h"
#include "model/worth.h"

#define FIT_HELD_OUT  8
#define FIT_ROWS      2
#define FIT_EVICTIONS 6
#define FIT_STEPS     600
#define FIT_EVERY     20  /* steps between two evaluations */
#define FIT_PATIENCE  200 /* steps without a lower held-out loss, after which the fit ends */

struct fit_options {
    int steps; /* at most; 0: FIT_STEPS */
    uint64_t seed;
    /* Called before the first step, with 0, and after every step, with the held-out loss so far;
     * false ends the fit after a step. May be NULL. */
    bool (*progress)(void *arg, int step, int steps, double lost);
    /* Makes the arrays of texts[i] (`at`, `x`, `worths`) valid until the next call; false: they
     * cannot be read. NULL: those of all texts are valid. Sizes and heads always are. */
    bool (*load)(void *arg, int i);
    void *arg;
};

struct fit_result {
    int steps;           /* number of steps taken */
    int best;            /* the step after which the held-out loss was lowest */
    double before, lost; /* part of the held-out worth that soft evictions lose; `before`: with the
                            newest entries kept */
};

/* `texts`: `count` >= 2 measurements of one model. *net is closed by the caller after success only.
 * ERR_INVALID: too few texts, or no state of the networks whose held-out loss is a number.
 * ERR_IO: a text could not be loaded. ERR_NOMEM. */
int fit_gates(const struct fit_options *options, const struct worth_text *texts, int count,
              struct cpu_team *team, struct fit_net *net, struct fit_result *result,
              struct fault *fault);

#endif
