/* Models of the Hugging Face Hub by name, and which files of a repository a name means. Pure: no
 * file, no network.
 *
 *   hf:OWNER/NAME                 a directory of safetensors; else the GGUF file in 4 bits
 *   hf:OWNER/NAME:Q4_K_M          the GGUF file with this quantisation, with all its parts
 *   hf:OWNER/NAME:FILE.gguf       this file; with a folder in front where several have its name
 *   hf:OWNER/NAME@REVISION:...    of a branch, a tag or a commit; main by default
 *
 * Instead of `hf:` a name may begin with hf://, hf.co/, huggingface.co/ or https:// and one of
 * these hosts; then it may go on as the addresses of the Hub do: /tree/REVISION and
 * /blob/REVISION/FILE. */
#ifndef KEEPD_DAEMON_HUB_NAME_H
#define KEEPD_DAEMON_HUB_NAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"

struct hub_name {
    char repo[200];     /* OWNER/NAME */
    char revision[128]; /* "main" by default */
    char pick[256];     /* quantisation or file; "": none was named */
};

/* Whether a model is to be looked for in the hub: it begins with hf: or hf://. */
bool hub_is_name(const char *text);
/* Reads a name; one without any beginning counts too. ERR_INVALID, field "model". */
int hub_name_parse(const char *text, struct hub_name *name, struct fault *fault);
/* Writes hf:OWNER/NAME... as it would be given. */
void hub_name_write(const struct hub_name *name, char *out, size_t size);

#define HUB_FILES_MAX 20000
#define HUB_PATH_MAX  512
#define HUB_SIZE_MAX  ((int64_t)1 << 44) /* bytes of a file: 16 TiB */

struct hub_file {
    char *path;   /* relative, checked: no `..`, no empty part, no control character */
    int64_t size; /* 0 to HUB_SIZE_MAX */
    char oid[65]; /* the blob's name: SHA-256, or git's SHA-1; "" in a folder of the cache */
    bool wanted;
};

/* The files of a repository at one commit. */
struct hub_tree {
    struct hub_file *files;
    size_t count, capacity;
};

/* Copies the path. ERR_LIMIT, ERR_NOMEM; ERR_MALFORMED: the path, the size or the oid is none. */
int hub_tree_add(struct hub_tree *tree, const char *path, int64_t size, const char *oid,
                 struct fault *fault);
/* Adds a page of /api/models/OWNER/NAME/tree/COMMIT. */
int hub_tree_read(struct hub_tree *tree, const char *json, size_t size, struct fault *fault);
void hub_tree_close(struct hub_tree *tree);
/* Looks in a tree that hub_choose has sorted. */
struct hub_file *hub_tree_find(const struct hub_tree *tree, const char *path);

/* A GGUF model of a repository: one file, or all parts of a split one. */
struct hub_model {
    size_t first;   /* index of the file that is named to open it */
    int parts;      /* number of the model's parts; 1: it is not split */
    int found;      /* parts that the repository has */
    int64_t bytes;  /* sum of the parts that were found */
    char label[64]; /* quantisation as a name says it, or the file's name */
};

#define HUB_MODELS_MAX 256
/* Finds the GGUF models, ordered by size, without those that are no language models of their own
 * (mmproj, imatrix, drafts). Returns their number. */
size_t hub_models(const struct hub_tree *tree, struct hub_model *out);

/* Bytes of memory that a model needs: its weights, one conversation with a budget of 1,024 in the
 * cache (256 MiB hold it for models of up to 60 layers with 8 key/value heads of 128), and the
 * process. */
int64_t hub_need(int64_t bytes);

enum hub_format { HUB_GGUF, HUB_DIRECTORY };

struct hub_choice {
    enum hub_format format;
    bool by_default; /* the name names none, and the repository has several */
    size_t file;     /* GGUF: index of the file to open */
    int64_t bytes;   /* size of the weights */
    char label[64];
};

/* Chooses what `name` means and marks the files as wanted: all parts of a GGUF model, or the small
 * files of a directory. If the directory has an index, hub_want_shards marks the files of weights
 * that it names; otherwise model.safetensors is marked here. ERR_NOTFOUND: there is no such model;
 * hub_describe says which there are. */
int hub_choose(const struct hub_name *name, struct hub_tree *tree, struct hub_choice *choice,
               struct fault *fault);
#define HUB_INDEX "model.safetensors.index.json"
/* Marks the files that the index names, and adds their sizes to *bytes. ERR_NOTFOUND: the
 * repository lacks one. */
int hub_want_shards(struct hub_tree *tree, const char *json, size_t size, int64_t *bytes,
                    struct fault *fault);
/* Whether keepd can read a quantisation of this label: it has no IQ1, IQ2, IQ3 and ternary types.
 */
bool hub_is_read(const char *label);
/* A table of the GGUF models: label, size, memory needed, whether `memory` bytes hold it. `chosen`:
 * the index of the file of the chosen model, or SIZE_MAX. */
void hub_describe(const struct hub_tree *tree, int64_t memory, size_t chosen, struct buf *out);

#endif
