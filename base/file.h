/* Whole regular files, read into memory or mapped. Any thread. Faults name the path: ERR_NOTFOUND,
 * ERR_IO (also for pipes and folders), ERR_LIMIT. */
#ifndef KEEPD_BASE_FILE_H
#define KEEPD_BASE_FILE_H

#include <stddef.h>

#include "base/err.h"

/* Reads a file of at most `limit` bytes; *data is NUL-terminated and freed with mem_free. On
 * failure *data is NULL and *size 0. */
int file_read(const char *path, size_t limit, char **data, size_t *size, struct fault *fault);

/* Maps a file for reading; an empty one is ERR_MALFORMED. The caller unmaps it. A file that is
 * truncated while it is mapped kills the process (SIGBUS), as with every mapped file. */
int file_map(const char *path, const void **data, size_t *size, struct fault *fault);
/* Copies a file of at most `limit` bytes into memory of its own, for file_unmap, too: whatever
 * becomes of the file then changes nothing. ERR_MALFORMED: it is empty. */
int file_map_copy(const char *path, size_t limit, const void **data, size_t *size,
                  struct fault *fault);
void file_unmap(const void *data, size_t size); /* NULL allowed */

#endif
