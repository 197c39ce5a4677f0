/* Conversations that move between machines: a state file is read as it lies in the directory, or
 * comes in pieces and is checked before it gets a name. Any thread; one upload has one thread at a
 * time. The stores of the directory stay open meanwhile. */
#ifndef KEEPD_ENGINE_DISK_STORE_MOVE_H
#define KEEPD_ENGINE_DISK_STORE_MOVE_H

#include "engine/disk/store.h"

#define STORE_UPLOADS_SHARE 4 /* all uploads together have this part of the directory's bytes */

struct store_upload;

/* Opens a conversation's file for reading; the caller closes *fd. ERR_NOTFOUND, ERR_IO. */
int store_open_file(struct store *store, uint64_t id, int *fd, uint64_t *bytes,
                    struct fault *fault);

/* Returns the most bytes that an upload may have. */
int64_t store_upload_max(const struct store *store);

/* Begins an upload of a conversation of this space. ERR_NOMEM. */
int store_upload_open(struct store *store, const uint8_t space[16], struct store_upload **out,
                      struct fault *fault);
/* Takes the next bytes. The head is checked as soon as it is there, so that no byte of a file that
 * cannot be used is written. ERR_MALFORMED (torn, damaged), ERR_INVALID (another model, gates or
 * space), ERR_UNSUPPORTED (another version), ERR_LIMIT (too long), ERR_FULL (too many uploads),
 * ERR_IO. After an error the upload can only be closed. */
int store_upload_add(struct store_upload *upload, const char *data, size_t size,
                     struct fault *fault);
/* Checks the seal and gives the file its name, so that the next request finds it. Errors as of
 * store_upload_add; ERR_INVALID also if it is signed with another key. */
int store_upload_end(struct store_upload *upload, struct store_row *row, struct fault *fault);
/* Deletes the unfinished file of an upload. NULL is allowed. */
void store_upload_close(struct store_upload *upload);

#endif
