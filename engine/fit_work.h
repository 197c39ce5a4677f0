/* The work file of a fit: the texts that were measured, so that one at a time needs memory and a
 * fit that was interrupted goes on from there, and a lock, so that one process at a time fits a
 * model. It exists from fit_work_open to fit_work_close, or from an interruption to the next fit of
 * the model.
 *
 * Records in the order of measuring: a head with the measurement's key and sizes, its arrays as
 * struct worth_text has them, and the SHA-256 of both. Numbers are those of this machine. The first
 * record that is torn, damaged or of another key ends the file.
 *
 * Thread: the one that fits. */
#ifndef KEEPD_ENGINE_FIT_WORK_H
#define KEEPD_ENGINE_FIT_WORK_H

#include <stdbool.h>

#include "base/err.h"
#include "base/sha256.h"
#include "model/worth.h"

struct fit_work {
    char path[4096];
    int fd;       /* -1: no file */
    int64_t end;  /* where the next record begins that is taken or kept */
    bool reading; /* there may be records that were not taken yet */
    bool full;    /* a record could not be written */
};

/* Opens or creates the file and locks it. Where another process has locked it: calls `waiting`,
 * which may be NULL, and waits; with `wait` false, returns ERR_BUSY. ERR_IO. After a failure
 * nothing is kept, and the other calls do nothing. */
int fit_work_open(struct fit_work *work, const char *path, bool wait, void (*waiting)(void *arg),
                  void *arg, struct fault *fault);

/* Takes the next record, if it has this key and at most these sizes, which also say the KV heads of
 * the layers: *text is closed by the caller.
 * False: the text must be measured, and fit_work_keep comes next. */
bool fit_work_take(struct fit_work *work, const uint8_t key[SHA256_BYTES],
                   const struct worth_text *most, struct worth_text *text);
/* Is the text in the file now? Without room on the disk nothing more is kept, with a warning. */
bool fit_work_keep(struct fit_work *work, const uint8_t key[SHA256_BYTES],
                   const struct worth_text *text);
/* Bytes that the records may have: FIT_WORK_BYTES, but not more than half of what the disk would
 * have free without them. */
#define FIT_WORK_BYTES ((size_t)4 << 30)
size_t fit_work_room(const struct fit_work *work);

/* Reads again the arrays of a text that was taken or kept when `end` was `record`. *text has its
 * sizes, and arrays for them. The digest is not compared again. False, with a warning: the file
 * cannot be read. */
bool fit_work_load(const struct fit_work *work, int64_t record, struct worth_text *text);

/* Unlocks the file; `done`: removes it. */
void fit_work_close(struct fit_work *work, bool done);

#endif
