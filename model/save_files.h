/* Files of a saved model, or of its gates, that appear whole or not at all; and copies of the files
 * beside the weights. */
#ifndef KEEPD_MODEL_SAVE_FILES_H
#define KEEPD_MODEL_SAVE_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"

/* A new file, or a new directory of files, which is called TO.partial until it is complete. */
struct save_files {
    const char *option; /* fault->field of errors; static */
    char to[4096], partial[4096];
    bool directory;
    bool replace; /* `to` may exist */
};

/* Begins a new file or directory. ERR_INVALID: `to` or TO.partial exists. */
int save_files_open(struct save_files *files, const char *option, const char *to, bool directory,
                    struct fault *fault);
/* Begins a file that will replace `to`, and an old TO.partial. The caller holds a lock against
 * other processes that write it. */
int save_files_replace(struct save_files *files, const char *option, const char *to,
                       struct fault *fault);

/* A file that is being written. */
struct save_file {
    const char *option;
    FILE *file;
    char path[4096];
};

/* Creates a file for writing; `name` NULL: the new file itself. *out is closed by save_files_end.
 */
int save_files_begin(const struct save_files *files, const char *name, struct save_file *out,
                     struct fault *fault);
int save_files_put(const struct save_file *file, const void *data, size_t bytes,
                   struct fault *fault);
/* Flushes the file to disk and closes it. `rc`: an earlier error, which is returned. */
int save_files_end(const struct save_file *file, int rc, struct fault *fault);
int save_files_write(const struct save_files *files, const char *name, const struct buf *content,
                     struct fault *fault);
int save_files_copy(const struct save_files *files, const char *from, const char *name,
                    struct fault *fault);
/* Copies the files of a model's directory that are not weights, gates, config.json or a checksum of
 * these. A file that cannot be read is left out with a warning: loading reads what a model needs.
 */
int save_files_copy_others(const struct save_files *files, const char *from, struct fault *fault);
/* If `rc` is 0, gives the result its name; otherwise removes everything that was written and
 * returns `rc`. */
int save_files_close(const struct save_files *files, int rc, struct fault *fault);

#endif
