/* The files of a saved model or of its gates, which appear whole or not at all, and copies of those
 * beside the weights. */
#ifndef KEEPD_MODEL_SAVE_FILES_H
#define KEEPD_MODEL_SAVE_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"

/* A new file, or a new directory of files, under the name TO.partial. */
struct save_files {
    const char *option; /* fault->field of errors; static */
    char to[4096], partial[4096];
    bool directory;
    bool replace; /* `to` may exist */
};

/* ERR_INVALID: `to` or TO.partial exists. */
int save_files_open(struct save_files *files, const char *option, const char *to, bool directory,
                    struct fault *fault);
/* A new file that takes the place of `to`, and of a TO.partial that was left behind: the caller
 * holds a lock against others that write it. */
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
/* Copies everything of a model's directory that is not weights, gates, config.json or a sum of
 * files. What cannot be read is left out with a warning: loading reads what a model needs. */
int save_files_copy_others(const struct save_files *files, const char *from, struct fault *fault);
/* Gives it its name where `rc` is 0; otherwise removes what was written and returns `rc`. */
int save_files_close(const struct save_files *files, int rc, struct fault *fault);

#endif
