/* Models of the Hugging Face Hub: found in its cache, fetched into it.
 *
 * A file is fetched into blobs/OID.incomplete, goes on where it was when a connection breaks or the
 * program is started again, and gets its name only when its sum is the one that the hub gave:
 * SHA-256 of large files, git's SHA-1 of small ones. Other programs with the same cache
 * (transformers, llama.cpp) find what is fetched here, and the reverse.
 *
 * Order of writes: the list of the commit's files (of a directory), the files, and last the commit
 * of the branch or tag, so that its name finds the files of before until all new ones are here. A
 * commit that is named itself is found at once; so a directory is served from the cache only if all
 * that it needs of the list is here. Without a list (other programs write none) the hub is asked
 * once about the commit that the cache has; with HF_HUB_OFFLINE, and where nothing may be fetched,
 * such a directory is taken with a warning. A GGUF file needs no list: it has its name only when it
 * is whole, and its parts name one another.
 *
 * Thread: the one that opens the engine. All of it waits. */
#ifndef KEEPD_DAEMON_HUB_H
#define KEEPD_DAEMON_HUB_H

#include <stdio.h>

#include "daemon/hub_name.h"

enum hub_use {
    HUB_PULL,   /* asks the hub for the newest commit and fetches what is not here */
    HUB_SERVE,  /* takes what the cache has; fetches where it has not all files */
    HUB_CACHED, /* takes what the cache has */
};

/* Finds the path of the model that `text` names (hub_name.h): of a GGUF file, or of a folder.
 * ERR_IO: the network or the disk fails, another try may succeed. ERR_NOTFOUND, ERR_INVALID,
 * ERR_UNSUPPORTED, ERR_MALFORMED, ERR_LIMIT: it will not. */
int hub_find(const char *text, enum hub_use use, char *path, size_t size, struct fault *fault);

/* Writes which models a repository has, and which of them this machine's memory holds. */
int hub_list(const char *text, FILE *out, struct fault *fault);

/* `keepd pull`: returns the exit status. */
int hub_command(int argc, char **argv);

#endif
