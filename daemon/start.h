/* The start of the daemon and of its commands: reading the options, opening an engine, and
 * reporting what is refused.
 *
 * Functions that return an exit status have printed the reason of a failure. Thread: the first
 * one. */
#ifndef KEEPD_DAEMON_START_H
#define KEEPD_DAEMON_START_H

#include "base/err.h"
#include "config/config.h"
#include "daemon/bench.h"
#include "daemon/progress.h"
#include "engine/engine.h"
#include "server/server.h"

#define EXIT_CONFIG 78 /* sysexits.h: a model or option is refused; a restart will not help */

/* The argument of all callbacks, because engine_open takes only one, and the paths to which the
 * engine's options point. It lives longer than the engine. */
struct start {
    struct progress progress;
    struct server *server;
    struct bench *bench; /* set for `keepd bench` and `keepd fit`, which have no server */
    char gates_cache[4096];
    char model[4096];       /* path of a model that was named by its place in the hub; "" = none */
    char draft_model[4096]; /* the same of the draft model */
};

/* Reads the options. `rc` is the result of the command's own parser, with `fault`. On failure says
 * where to read more, and nothing is left to close. Returns an exit status. */
int start_load_options(int rc, int count, char **args, const char *more, struct config *config,
                       struct fault *fault);
void start_set_log(const struct config *config);
void start_log_notes(const struct config *config);

/* Returns the options of the engine, which point into *start. */
struct engine_options start_engine_options(const struct config *config, struct start *start);

/* Prints a fault, also for systemd, and returns the exit status. `what`: what failed; "": the fault
 * says it. */
int start_report(const char *what, const struct fault *fault);
/* The same; where the fault names an option, only that option is named. */
int start_refuse(const char *what, const struct fault *fault);

/* Refuses several models for a command that takes one: which of them is meant is not guessed.
 * Returns an exit status. */
int start_refuse_several(const struct config *config, const char *command);
/* Leaves the options of the only model in *config, which a section may give. The arguments are
 * those from which *config was loaded. Returns an exit status. */
int start_take_only_model(struct config *config, const char *command, int argc, char **argv);

/* Opens the engine and shows how far loading is. This function and the next one print nothing else:
 * they return an error, with its reason in *fault. */
int start_open_engine(const struct engine_options *options, struct start *start,
                      struct engine **engine, struct fault *fault);
int start_run_engine(struct engine *engine, struct fault *fault);

#endif
