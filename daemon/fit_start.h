/* Fits gates before the daemon serves, if a start asks for a bounded cache and the model has no
 * gates. This happens once: the gates are kept in a folder where the next start finds them.
 *
 * The fit runs in a child process. So it can be ended at once, even within a text that takes
 * minutes; its memory is free before the model is loaded again; and if the system kills it for lack
 * of memory, the daemon starts without gates. The child dies with its parent.
 *
 *   On a terminal   progress with the time left; Ctrl-C skips the fit, a second one ends keepd
 *   As a service    STATUS= and EXTEND_TIMEOUT_USEC= to the manager with every step
 *   SIGTERM         ends keepd
 *
 * Thread: the one that opens the engine, while it is the only one. */
#ifndef KEEPD_DAEMON_FIT_START_H
#define KEEPD_DAEMON_FIT_START_H

#include "engine/engine_options.h"

/* The most minutes that a fit at a start may take. Measuring ends after three quarters of them,
 * with the texts that have been measured. */
#define FIT_START_MINUTES 30

enum fit_start_end {
    FIT_START_NONE,    /* there was nothing to do, or the fit failed, which the log explains */
    FIT_START_FITTED,  /* the next engine has gates */
    FIT_START_STOPPED, /* a signal ends the daemon */
};

struct fit_start {
    char folder[4096]; /* folder of a temporary file of gates; "" = none */
    char gates[4096];
};

/* Fits gates if `options` need some and none are found, and sets *options to them. *fit must
 * outlive the options; fit_start_close removes a temporary file, once the engine is open. */
enum fit_start_end fit_at_start(struct engine_options *options, struct fit_start *fit);
void fit_start_close(struct fit_start *fit);

/* Writes the folder of fitted gates: `given`, or one that the environment names. false: there is
 * none. */
bool fit_cache_folder(const char *given, char *out, size_t size);
/* Makes the folder of `file`, and the folders above it. false: this failed, and errno says why. */
bool fit_make_folder(const char *file);
/* Writes the name of the work file (struct engine_fit) that belongs to a file of gates. */
void fit_work_file(const char *gates, char *out, size_t size);

#endif
