/* Model files on disk: mapped, parsed, and put into one table sorted by name. */
#include "model/weights.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "kernels/number.h"

#define INDEX_MAX   ((size_t)64 << 20)
#define INDEX_NODES ((size_t)1 << 20)
#define SHARDS_MAX  4096

struct shard {
    char *name; /* in the directory; NULL for a file opened alone */
    const void *map;
    size_t size;
    struct tensor_file table;
};

struct weights {
    struct shard *shards;
    size_t shard_count;
    struct tensor *tensors; /* of all shards, sorted by name */
    size_t count;
    size_t bytes;
};

static int no_memory(struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tensor table");
}

/* ---- Files --------------------------------------------------------------------------------- */

/* Weights are read once, front to back, while they are laid out for the backend. */
static int map_shard(const char *path, struct shard *shard, struct fault *fault) {
    int rc = file_map(path, &shard->map, &shard->size, fault);
    if (rc) return rc;
    (void)madvise((void *)(uintptr_t)shard->map, shard->size, MADV_SEQUENTIAL);
    (void)madvise((void *)(uintptr_t)shard->map, shard->size, MADV_WILLNEED);
    return 0;
}

/* ---- The table ----------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b) {
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

static int build_table(struct weights *w, struct fault *fault) {
    size_t total = 0;
    for (size_t i = 0; i < w->shard_count; i++) total += w->shards[i].table.count;
    w->tensors = mem_try_alloc(total, sizeof *w->tensors);
    if (!w->tensors) return no_memory(fault);
    for (size_t i = 0; i < w->shard_count; i++) {
        const struct tensor_file *table = &w->shards[i].table;
        if (table->count)
            memcpy(w->tensors + w->count, table->tensors, table->count * sizeof *w->tensors);
        w->count += table->count;
    }
    if (w->count) qsort(w->tensors, w->count, sizeof *w->tensors, compare_names);
    for (size_t i = 0; i < w->count; i++) {
        w->bytes += w->tensors[i].bytes;
        if (i && strcmp(w->tensors[i - 1].name, w->tensors[i].name) == 0)
            return fault_set(fault, ERR_MALFORMED, w->tensors[i].name, "is in two files");
    }
    return 0;
}

static int open_shard(const char *path, struct shard *shard, struct fault *fault) {
    int rc = map_shard(path, shard, fault);
    if (rc) return rc;
    struct fault inner = {0};
    rc = safetensors_parse(shard->map, shard->size, &shard->table, &inner);
    return rc ? fault_set(fault, rc, inner.field, "%.200s: %.150s", path, inner.text) : 0;
}

static struct weights *new_weights(size_t shards) {
    struct weights *w = mem_try_alloc(1, sizeof *w);
    if (!w) return NULL;
    w->shards = mem_try_alloc(shards, sizeof *w->shards);
    if (!w->shards) {
        mem_free(w);
        return NULL;
    }
    return w;
}

int weights_open_file(const char *path, struct weights **out, struct fault *fault) {
    *out = NULL;
    struct weights *w = new_weights(1);
    if (!w) return no_memory(fault);
    w->shard_count = 1;
    int rc = open_shard(path, &w->shards[0], fault);
    if (!rc) rc = build_table(w, fault);
    if (rc)
        weights_close(w);
    else
        *out = w;
    return rc;
}

void weights_close(struct weights *w) {
    if (!w) return;
    for (size_t i = 0; i < w->shard_count; i++) {
        struct shard *shard = &w->shards[i];
        tensor_file_close(&shard->table);
        file_unmap(shard->map, shard->size);
        mem_free(shard->name);
    }
    mem_free(w->shards);
    mem_free(w->tensors);
    mem_free(w);
}

const struct tensor *weights_find(const struct weights *w, const char *name) {
    struct tensor key = {.name = name};
    if (w->count == 0) return NULL;
    return bsearch(&key, w->tensors, w->count, sizeof key, compare_names);
}

const char *weights_metadata_keepd(const struct weights *w) {
    for (size_t i = 0; i < w->shard_count; i++)
        if (w->shards[i].table.metadata_keepd) return w->shards[i].table.metadata_keepd;
    return NULL;
}

size_t weights_bytes(const struct weights *w) {
    return w->bytes;
}

/* ---- Sharded directories ------------------------------------------------------------------- */

/* The index comes from outside: its names may only mean files of this directory. */
static bool is_plain_name(const char *name) {
    return *name && *name != '.' && !strchr(name, '/') && !strstr(name, "..") &&
           strlen(name) <= NAME_MAX;
}

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The file names of weight_map, each once, into `names`; returns how many, or an error. */
static int list_shards(const cJSON *map, const char **names, struct fault *fault) {
    const cJSON *entry;
    size_t n = 0, unique = 0;
    cJSON_ArrayForEach(entry, map) {
        if (!cJSON_IsString(entry) || !is_plain_name(entry->valuestring))
            return fault_set(fault, ERR_MALFORMED, entry->string,
                             "weight_map: expected the name of a file in the model directory");
        names[n++] = entry->valuestring;
    }
    if (n == 0) return fault_set(fault, ERR_MALFORMED, "weight_map", "is empty");
    qsort(names, n, sizeof *names, compare_strings);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || strcmp(names[i], names[unique - 1]) != 0) names[unique++] = names[i];
    if (unique > SHARDS_MAX)
        return fault_set(fault, ERR_LIMIT, "weight_map", "more than %d files", SHARDS_MAX);
    return (int)unique;
}

static int join_path(char *path, size_t size, const char *dir, const char *name,
                     struct fault *fault) {
    int n = snprintf(path, size, "%s/%s", dir, name);
    if (n >= 0 && (size_t)n < size) return 0;
    return fault_set(fault, ERR_LIMIT, name, "the path of the model directory is too long");
}

static int open_shards(const char *dir, const char *const *names, size_t count, struct weights *w,
                       struct fault *fault) {
    for (size_t i = 0; i < count; i++) {
        char path[PATH_MAX];
        struct shard *shard = &w->shards[w->shard_count++];
        int rc = join_path(path, sizeof path, dir, names[i], fault);
        if (!rc && !(shard->name = mem_try_alloc(strlen(names[i]) + 1, 1))) rc = no_memory(fault);
        if (rc) return rc;
        memcpy(shard->name, names[i], strlen(names[i]));
        if ((rc = open_shard(path, shard, fault))) return rc;
    }
    return 0;
}

static const struct shard *find_shard(const struct weights *w, const char *name) {
    size_t low = 0, high = w->shard_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(w->shards[middle].name, name);
        if (order == 0) return &w->shards[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* Every tensor the index promises is in the file it names. */
static int check_map(const struct weights *w, const cJSON *map, struct fault *fault) {
    const cJSON *entry;
    cJSON_ArrayForEach(entry, map) {
        const struct shard *shard = find_shard(w, entry->valuestring);
        struct tensor key = {.name = entry->string};
        if (!shard || !shard->table.count ||
            !bsearch(&key, shard->table.tensors, shard->table.count, sizeof key, compare_names))
            return fault_set(fault, ERR_MALFORMED, entry->string, "is not in %.200s",
                             entry->valuestring);
    }
    return 0;
}

static int open_map(const char *dir, const cJSON *map, struct weights **out, struct fault *fault) {
    struct weights *w = NULL;
    if (!cJSON_IsObject(map))
        return fault_set(fault, ERR_MALFORMED, "weight_map", "expected an object");
    const char **names = mem_try_alloc((size_t)cJSON_GetArraySize(map), sizeof *names);
    if (!names) return no_memory(fault);
    int rc = list_shards(map, names, fault);
    if (rc < 0) goto out;
    size_t count = (size_t)rc;
    w = new_weights(count);
    rc = w ? open_shards(dir, names, count, w, fault) : no_memory(fault);
    if (!rc) rc = check_map(w, map, fault);
    if (!rc) rc = build_table(w, fault);
out:
    mem_free(names);
    if (rc)
        weights_close(w);
    else
        *out = w;
    return rc;
}

static int open_index(const char *dir, struct weights **out, struct fault *fault) {
    static const struct json_limits limits = {.bytes = INDEX_MAX, .depth = 8, .nodes = INDEX_NODES};
    char path[PATH_MAX], *data = NULL;
    size_t size;
    cJSON *index = NULL;
    int rc = join_path(path, sizeof path, dir, "model.safetensors.index.json", fault);
    if (!rc) rc = file_read(path, INDEX_MAX, &data, &size, fault);
    if (rc == ERR_NOTFOUND)
        rc = fault_set(fault, ERR_NOTFOUND, "model.safetensors",
                       "neither it nor model.safetensors.index.json is in %.200s", dir);
    if (!rc) rc = json_parse(data, size, &limits, &index, fault);
    if (!rc) rc = open_map(dir, json_get(index, "weight_map"), out, fault);
    json_free(index);
    mem_free(data);
    return rc;
}

int weights_open_dir(const char *dir, struct weights **out, struct fault *fault) {
    char path[PATH_MAX];
    struct fault first = {0};
    *out = NULL;
    int rc = join_path(path, sizeof path, dir, "model.safetensors", &first);
    if (!rc) rc = weights_open_file(path, out, &first);
    if (rc == ERR_NOTFOUND) return open_index(dir, out, fault);
    if (rc && fault) *fault = first;
    return rc;
}

/* ---- Elements ------------------------------------------------------------------------------ */

bool tensor_is_float(enum tensor_dtype dtype) {
    return dtype == TENSOR_F32 || dtype == TENSOR_F16 || dtype == TENSOR_BF16;
}

bool tensor_read_floats(const struct tensor *tensor, size_t first, size_t count, float *out) {
    size_t size = tensor->dtype == TENSOR_F32 ? 4 : 2, total = tensor->bytes / size;
    if (!tensor_is_float(tensor->dtype) || first > total || count > total - first) return false;
    const char *data = (const char *)tensor->data + first * size;
    if (tensor->dtype == TENSOR_F32) {
        memcpy(out, data, count * sizeof *out);
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t bits; /* the data is aligned to nothing */
        memcpy(&bits, data + i * sizeof bits, sizeof bits);
        out[i] = tensor->dtype == TENSOR_F16 ? number_from_f16(bits) : number_from_bf16(bits);
    }
    return true;
}
