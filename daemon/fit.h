/* `keepd fit MODEL`: fits retention gates to a model as it is served, and measures what they are
 * worth. There are three steps: engine_fit_gates; opening a new engine with the new gates; a table
 * of what several policies lose on the texts that were held out. A loss is the mean negative
 * log-likelihood of a text's second half, in nats per token, less that with the full cache. The
 * cache never holds more than the budget and a chunk: for a part 1/n of the tokens, 3/4 of that
 * part are the budget and 1/4 is the chunk.
 *
 * Thread: the caller's, which is the loop thread of the engine's interface. */
#ifndef KEEPD_DAEMON_FIT_H
#define KEEPD_DAEMON_FIT_H

#include <stdbool.h>
#include <stdio.h>

#include "base/err.h"
#include "daemon/bench.h"
#include "engine/engine_fit.h"

#define FIT_FILES_MAX   64
#define FIT_MINUTES_MAX 10080

struct fit_command {
    const char *texts[FIT_FILES_MAX]; /* names of files */
    bool chats[FIT_FILES_MAX];        /* the file has chats (daemon/fit_chats.h) */
    int text_count;                   /* 0: fit_use_calibration chooses the texts */
    const char *out;                  /* NULL: the cache of gates */
    const char *work;                 /* the same as in struct engine_fit; so is the next one */
    enum engine_fit_out how;
    int minutes;
    uint64_t seed;
    bool help;
    void (*note)(void *arg,
                 const char *line); /* gets lines of progress, besides the log; or NULL */
    void *arg;
};

/* Takes the command's own arguments out of `argv`, and turns the model into --model, so that the
 * daemon's options are left: `rest`, of at least argc + 2, ends with NULL. argv[0] is the
 * program, argv[1] is "fit". ERR_INVALID names the argument in fault->field. */
int fit_parse(int argc, char **argv, struct fit_command *command, char **rest, struct fault *fault);
void fit_help(FILE *out);

/* Chooses the texts that come with keepd. ERR_NOTFOUND: they are not there. */
int fit_use_calibration(struct fit_command *command, struct fault *fault);

/* Reads the texts, fits the gates and writes them, and reports progress on `log`. The caller closes
 * *fitted. */
int fit_run(const struct fit_command *command, const struct engine_options *options, FILE *log,
            struct engine_fitted *fitted, struct fault *fault);

/* Measures with a started engine that has the gates, says on `log` how far it is, and prints the
 * table to `out`. */
int fit_measure(struct bench *bench, struct engine *engine, const struct engine_fitted *fitted,
                FILE *log, FILE *out, struct fault *fault);

#endif
