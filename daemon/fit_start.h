/* Gates for a start that asks for a bounded cache with a model that has none: they are fitted
 * before the daemon serves, once, and kept in a folder where the next start finds them.
 *
 * The fit runs in a child process. So it ends at once when it is to end, also within a text that
 * takes minutes; its memory is free before the model is loaded to be served; and where the system
 * kills it for memory, the daemon starts without gates. The child dies with its parent.
 *
 *   On a terminal   progress with the time left; Ctrl-C skips the fit, a second one ends keepd
 *   As a service    STATUS= and EXTEND_TIMEOUT_USEC= to the manager with every step
 *   SIGTERM         ends keepd
 *
 * Thread: the one that opens the engine, while it is the only one. */
#ifndef KEEPD_DAEMON_FIT_START_H
#define KEEPD_DAEMON_FIT_START_H

#include "engine/engine.h"

/* Most minutes of a fit at a start; measuring ends after three quarters of them, with the texts
 * that it has. */
#define FIT_START_MINUTES 30

enum fit_start_end {
    FIT_START_NONE,    /* nothing to do, or no success, which the log explains */
    FIT_START_FITTED,  /* the next engine has gates */
    FIT_START_STOPPED, /* a signal ends the daemon */
};

struct fit_start {
    char folder[4096]; /* folder of a file that cannot be kept; "" = none */
    char gates[4096];
};

/* Fits gates where `options` want some that are not found, and sets *options to them. *fit must
 * outlive the options; fit_start_close removes a temporary file, once the engine is open. */
enum fit_start_end fit_at_start(struct engine_options *options, struct fit_start *fit);
void fit_start_close(struct fit_start *fit);

/* The folder of fitted gates: `given`, or one by the environment. False: there is none. */
bool fit_cache_folder(const char *given, char *out, size_t size);
/* Makes the folder of `file`, with those above it. False, and errno: it cannot be written. */
bool fit_make_folder(const char *file);
/* Names the work file (struct engine_fit) of a file of gates. */
void fit_work_file(const char *gates, char *out, size_t size);

#endif
