/* The hub's cache on this machine, in the layout that its own library and others have, so that all
 * find each other's files:
 *
 *   models--OWNER--NAME/blobs/OID              the files, by their sums
 *   models--OWNER--NAME/blobs/OID.incomplete   one that is being fetched
 *   models--OWNER--NAME/snapshots/COMMIT/PATH  relative links to blobs
 *   models--OWNER--NAME/refs/REVISION          the commit of a branch or a tag
 *   models--OWNER--NAME/.keepd/COMMIT          sizes and paths of all files of the commit, as the
 *                                              hub lists them; no other program reads it
 *   .locks/models--OWNER--NAME/OID.lock        locked (flock) by who fetches a blob
 *
 * Environment: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, HF_TOKEN, HF_TOKEN_PATH, HF_ENDPOINT,
 * HF_HUB_OFFLINE as the hub's library has them, with its older names. */
#ifndef KEEPD_DAEMON_HUB_CACHE_H
#define KEEPD_DAEMON_HUB_CACHE_H

#include "daemon/hub_name.h"

#define HUB_FOLDER_MAX 2048

/* The folder of the cache: HF_HUB_CACHE; hub in HF_HOME; huggingface/hub in $CACHE_DIRECTORY
 * (systemd), in $XDG_CACHE_HOME or in ~/.cache. False: there is none. */
bool hub_cache_folder(char *out, size_t size);
bool hub_is_offline(void);
const char *hub_endpoint(void);
/* HF_TOKEN or the token's file; "" = none. ERR_INVALID, field "HF_TOKEN": it has characters that
 * none has. */
int hub_token(char *out, size_t size, struct fault *fault);

/* A repository in the cache. */
struct hub_repo {
    char folder[HUB_FOLDER_MAX]; /* .../models--OWNER--NAME */
    char locks[HUB_FOLDER_MAX];  /* .../.locks/models--OWNER--NAME */
};

/* ERR_NOTFOUND: there is no folder of a cache. Makes nothing. */
int hub_repo_open(const char *repo, struct hub_repo *out, struct fault *fault);

#define HUB_COMMIT_SIZE 41
/* Whether the text is a commit: 40 hexadecimal digits in lower case. */
bool hub_is_commit(const char *text);
/* The commit of a revision as the cache has it; a commit is its own. False: not there. */
bool hub_ref_read(const struct hub_repo *repo, const char *revision, char commit[HUB_COMMIT_SIZE]);
int hub_ref_write(const struct hub_repo *repo, const char *revision, const char *commit,
                  struct fault *fault);

/* Writes the path of a file in a snapshot; "" = the snapshot itself. False: it is too long. */
bool hub_snapshot_path(const struct hub_repo *repo, const char *commit, const char *path, char *out,
                       size_t size);
/* Writes the path of a blob with something at the end. */
bool hub_blob_path(const struct hub_repo *repo, const char *oid, const char *end, char *out,
                   size_t size);
/* Adds the files of a snapshot that are whole. */
int hub_snapshot_scan(const struct hub_repo *repo, const char *commit, struct hub_tree *tree,
                      struct fault *fault);
/* Notes which files a commit has. */
int hub_listing_write(const struct hub_repo *repo, const char *commit, const struct hub_tree *tree,
                      struct fault *fault);
/* Adds the files that were noted. False: there is no note of this commit, or it cannot be read;
 * then the tree may have some of them. */
bool hub_listing_read(const struct hub_repo *repo, const char *commit, struct hub_tree *tree);
/* Links a file of a snapshot to its blob. */
int hub_link(const struct hub_repo *repo, const char *commit, const struct hub_file *file,
             struct fault *fault);
/* Bytes that the user may still write where the cache is; INT64_MAX: unknown. */
int64_t hub_disk_free(const struct hub_repo *repo);
/* Makes the folders above a file, as the umask says. */
int hub_make_folders(const char *file, struct fault *fault);
/* Waits until no other process fetches this blob. *fd is closed to let go; -1 where the file system
 * has no locks. `waits` is called once if there is something to wait for. */
int hub_lock(const struct hub_repo *repo, const char *oid, void (*waits)(const char *oid), int *fd,
             struct fault *fault);

#endif
