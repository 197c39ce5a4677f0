/* Model files on disk: mapped, parsed, and put into one table sorted by name. */
#include "model/weights.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "kernels/number.h"
#include "model/blocks.h"

#define INDEX_MAX   ((size_t)64 << 20)
#define INDEX_NODES ((size_t)1 << 20)
#define SHARDS_MAX  4096

struct shard {
    char *name; /* name in the directory; NULL for a file that was opened alone */
    const void *map;
    size_t size;
    struct gguf gguf; /* owns the names in `table`; empty for safetensors */
    struct tensor_file table;
    char *named; /* names of weights_add_dense; NULL: those of the file */
    bool copied; /* `map` is memory of its own, of at most copy_most bytes */
    size_t copy_most;
};

/* A tensor that the index names, but that its file does not have. */
struct absent {
    char *name;
    const char *file; /* owned by struct shard */
};

struct weights {
    struct shard *shards;
    size_t shard_count;
    struct tensor *tensors; /* tensors of all shards, sorted by name */
    size_t count;
    struct packed_set *packed; /* memory that entries of `tensors` refer to; NULL: none */
    struct absent *absent;     /* [absent_count] tensors of the index that no file has */
    size_t absent_count;
    char *renamed, *whole; /* names that are in no file, see weights_take_block and name_whole;
                              NULL: none */
    size_t bytes;
    bool is_gguf;
};

static int no_memory(struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tensor table");
}

/* ---- Files ---- */

/* Maps a file. Weights are read once, from front to back, while they are converted for the backend.
 */
static int map_shard(const char *path, struct shard *shard, struct fault *fault) {
    if (shard->copied)
        return file_map_copy(path, shard->copy_most, &shard->map, &shard->size, fault);
    int rc = file_map(path, &shard->map, &shard->size, fault);
    if (rc) return rc;
    (void)madvise((void *)(uintptr_t)shard->map, shard->size, MADV_SEQUENTIAL);
    (void)madvise((void *)(uintptr_t)shard->map, shard->size, MADV_WILLNEED);
    return 0;
}

/* ---- The table ---- */

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
    return rc ? fault_set(fault, rc, inner.field, "%.160s: %.220s", path, inner.text) : 0;
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

static int open_one_file(const char *path, struct shard how, struct weights **out,
                         struct fault *fault) {
    *out = NULL;
    struct weights *w = new_weights(1);
    if (!w) return no_memory(fault);
    w->shard_count = 1;
    w->shards[0] = how;
    int rc = open_shard(path, &w->shards[0], fault);
    if (!rc) rc = build_table(w, fault);
    if (rc)
        weights_close(w);
    else
        *out = w;
    return rc;
}

int weights_open_file(const char *path, struct weights **out, struct fault *fault) {
    return open_one_file(path, (struct shard){0}, out, fault);
}

static void close_shard(struct shard *shard) {
    tensor_file_close(&shard->table);
    gguf_close(&shard->gguf);
    file_unmap(shard->map, shard->size);
    mem_free(shard->named);
    mem_free(shard->name);
}

void weights_close(struct weights *w) {
    if (!w) return;
    for (size_t i = 0; i < w->shard_count; i++) close_shard(&w->shards[i]);
    for (size_t i = 0; i < w->absent_count; i++) mem_free(w->absent[i].name);
    mem_free(w->absent);
    mem_free(w->renamed);
    mem_free(w->whole);
    mem_free(w->shards);
    packed_close(w->packed);
    mem_free(w->tensors);
    mem_free(w);
}

int weights_join(struct weights *w, const struct packing *how, struct fault *fault) {
    if (how->kind == PACKING_NONE) return 0;
    return packed_join(how, w->tensors, &w->count, &w->packed, fault);
}

/* ---- The text part of a multimodal checkpoint ---- */

#define INSIDE "language_model."
#define MODEL  "model."

/* Returns the name that a tensor has in a model without other parts: "language_model.model.X" and
 * "model.language_model.X" become "model.X", and so do Idefics3's "model.text_model.X" and
 * Nemotron-H's "backbone.X". Names are shortened in their own memory. */
static const char *text_name(const char *name) {
    static const char model[] = MODEL, *const outer[] = {MODEL INSIDE, MODEL "text_model.",
                                                         "backbone."};
    static const char *const encoders[] = {"bert.", "roberta."};
    if (strncmp(name, INSIDE, strlen(INSIDE)) == 0) return name + strlen(INSIDE);
    for (size_t i = 0; i < sizeof encoders / sizeof *encoders; i++)
        if (strncmp(name, encoders[i], strlen(encoders[i])) == 0) return name + strlen(encoders[i]);
    for (size_t i = 0; i < sizeof outer / sizeof *outer; i++) {
        const size_t size = strlen(outer[i]);
        if (strncmp(name, outer[i], size) != 0) continue;
        char *at = (char *)(uintptr_t)name + size - strlen(model);
        memcpy(at, model, strlen(model));
        return at;
    }
    return name;
}

static int sort_unique(const struct weights *w, struct fault *fault) {
    if (w->count) qsort(w->tensors, w->count, sizeof *w->tensors, compare_names);
    for (size_t i = 1; i < w->count; i++)
        if (strcmp(w->tensors[i - 1].name, w->tensors[i].name) == 0)
            return fault_set(fault, ERR_MALFORMED, w->tensors[i].name,
                             "is twice in the files, by two names");
    return 0;
}

/* The files of a model that was saved without a head name no "model." in front of its parts. */
static bool is_headless(const struct weights *w) {
    static const char *const embeddings[] = {"embed_tokens.weight",
                                             "embeddings.tok_embeddings.weight"};
    for (size_t i = 0; i < sizeof embeddings / sizeof *embeddings; i++)
        if (weights_find(w, embeddings[i]) || weights_absent(w, embeddings[i])) return true;
    return false;
}

/* Puts "model." in front of all names, so that a family has one set of them. */
static int name_whole(struct weights *w, struct fault *fault) {
    size_t bytes = 0;
    for (size_t i = 0; i < w->count; i++) bytes += strlen(w->tensors[i].name) + sizeof MODEL;
    char *to = w->whole = mem_try_alloc(bytes, 1);
    if (!to) return no_memory(fault);
    for (size_t i = 0; i < w->count; i++) {
        const size_t size = strlen(w->tensors[i].name) + sizeof MODEL;
        snprintf(to, size, MODEL "%s", w->tensors[i].name);
        w->tensors[i].name = to;
        to += size;
    }
    for (size_t i = 0; i < w->absent_count; i++) {
        char *name = w->absent[i].name;
        memmove(name + strlen(MODEL), name, strlen(name) + 1);
        memcpy(name, MODEL, sizeof MODEL - 1);
    }
    return 0;
}

int weights_take_text(struct weights *w, struct fault *fault) {
    for (size_t i = 0; i < w->count; i++) w->tensors[i].name = text_name(w->tensors[i].name);
    for (size_t i = 0; i < w->absent_count; i++) {
        char *name = w->absent[i].name;
        const char *text = text_name(name);
        memmove(name, text, strlen(text) + 1);
    }
    int rc = sort_unique(w, fault);
    return !rc && is_headless(w) ? name_whole(w, fault) : rc;
}

int weights_take_text_behind(struct weights *w, const char *front, struct fault *fault) {
    const size_t size = strlen(front);
    for (size_t i = 0; i < w->count; i++) {
        const char *name = w->tensors[i].name;
        if (strncmp(name, front, size) != 0) continue;
        char *at = (char *)(uintptr_t)text_name(name + size) - size;
        for (size_t k = 0; k < size; k++) at[k] = front[k];
        w->tensors[i].name = at;
    }
    return sort_unique(w, fault);
}

/* ---- Dense modules ---- */

static int name_dense(struct shard *shard, int index, struct fault *fault) {
    const size_t room = sizeof "dense.0.";
    size_t bytes = 0;
    for (size_t i = 0; i < shard->table.count; i++)
        bytes += strlen(shard->table.tensors[i].name) + room;
    char *to = shard->named = mem_try_alloc(bytes, 1);
    if (!to) return no_memory(fault);
    for (size_t i = 0; i < shard->table.count; i++) {
        const size_t size = strlen(shard->table.tensors[i].name) + room;
        snprintf(to, size, "dense.%d.%s", index, shard->table.tensors[i].name);
        shard->table.tensors[i].name = to;
        to += size;
    }
    return 0;
}

static int add_tensors(struct weights *w, const struct tensor_file *table, struct fault *fault) {
    const size_t size = sizeof *w->tensors, before = w->count * size;
    struct tensor *tensors = mem_try_realloc(w->tensors, before, before + table->count * size);
    if (!tensors) return no_memory(fault);
    w->tensors = tensors;
    for (size_t i = 0; i < table->count; i++) {
        tensors[w->count++] = table->tensors[i];
        w->bytes += table->tensors[i].bytes;
    }
    return sort_unique(w, fault);
}

int weights_add_dense(struct weights *w, const char *dir, const char *folder, int index,
                      struct fault *fault) {
    char path[PATH_MAX], name[32];
    const size_t size = w->shard_count * sizeof *w->shards;
    snprintf(name, sizeof name, "dense.%d.linear.weight", index);
    if (weights_find(w, name)) return 0;
    const int n = snprintf(path, sizeof path, "%s/%s/model.safetensors", dir, folder);
    if (n < 0 || (size_t)n >= sizeof path)
        return fault_set(fault, ERR_LIMIT, "model", "the path is too long");
    struct shard *shards = mem_try_realloc(w->shards, size, size + sizeof *w->shards);
    if (!shards) return no_memory(fault);
    w->shards = shards;
    struct shard *shard = &shards[w->shard_count++];
    int rc = open_shard(path, shard, fault);
    if (!rc) rc = name_dense(shard, index, fault);
    return rc ? rc : add_tensors(w, &shard->table, fault);
}

int weights_take_block(struct weights *w, int layer, struct fault *fault) {
    enum { ROOM = 128 };
    static const char *const names[][2] = {{"mtp.fc.", "eh_proj."},
                                           {"mtp.pre_fc_norm_embedding.", "enorm."},
                                           {"mtp.pre_fc_norm_hidden.", "hnorm."},
                                           {"mtp.norm.", "shared_head.norm."},
                                           {"mtp.layers.0.", ""}};
    size_t count = 0;
    for (size_t i = 0; i < w->count; i++) count += strncmp(w->tensors[i].name, "mtp.", 4) == 0;
    if (count == 0 || w->renamed) return 0;
    w->renamed = mem_try_alloc(count, ROOM);
    if (!w->renamed) return no_memory(fault);
    char *to = w->renamed;
    for (size_t i = 0; i < w->count; i++) {
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            const char *name = w->tensors[i].name;
            const size_t size = strlen(names[k][0]);
            if (strncmp(name, names[k][0], size) != 0) continue;
            int length =
                snprintf(to, ROOM, "model.layers.%d.%s%s", layer, names[k][1], name + size);
            if (length < 0 || length >= ROOM)
                return fault_set(fault, ERR_MALFORMED, name, "has too long a name");
            w->tensors[i].name = to;
            to += ROOM;
            break;
        }
    }
    return sort_unique(w, fault);
}

void weights_turn(struct weights *w, const char *end, int64_t cols) {
    for (size_t i = 0; i < w->count; i++) {
        struct tensor *tensor = &w->tensors[i];
        const size_t size = strlen(tensor->name), tail = strlen(end);
        if (size < tail || strcmp(tensor->name + size - tail, end) != 0) continue;
        if (!tensor_is_float(tensor->dtype) || tensor->dims < 2) continue;
        const int64_t rows = tensor->shape[tensor->dims - 1];
        if (rows == cols) continue;
        tensor->shape[tensor->dims - 1] = tensor->shape[tensor->dims - 2];
        tensor->shape[tensor->dims - 2] = rows;
        tensor->turned = true;
    }
}

const struct tensor *weights_find(const struct weights *w, const char *name) {
    struct tensor key = {.name = name};
    if (w->count == 0) return NULL;
    return bsearch(&key, w->tensors, w->count, sizeof key, compare_names);
}

/* Releases pages of the files, which count as the process's memory while they are mapped. */
void weights_release(const struct weights *w, const void *from, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)from;
    for (size_t i = 0; i < w->shard_count; i++) {
        const uintptr_t map = (uintptr_t)w->shards[i].map, size = w->shards[i].size;
        if (first < map || first - map > size || bytes > size - (first - map)) continue;
        const uintptr_t begin = (first + page - 1) / page * page,
                        end = (first + bytes) / page * page;
        if (begin < end) (void)madvise((void *)begin, end - begin, MADV_DONTNEED);
    }
}

const struct tensor *weights_at(const struct weights *w, size_t index) {
    return &w->tensors[index];
}

size_t weights_count(const struct weights *w) {
    return w->count;
}

const struct gguf *weights_gguf(const struct weights *w) {
    return w->is_gguf ? &w->shards[0].gguf : NULL;
}

const char *weights_metadata_keepd(const struct weights *w) {
    for (size_t i = 0; i < w->shard_count; i++)
        if (w->shards[i].table.metadata_keepd) return w->shards[i].table.metadata_keepd;
    return NULL;
}

size_t weights_bytes(const struct weights *w) {
    return w->bytes;
}

/* ---- Sharded directories ---- */

/* Returns whether a name can only mean a file of this directory. The index is not trusted. */
static bool is_plain_name(const char *name) {
    return *name && *name != '.' && !strchr(name, '/') && !strstr(name, "..") &&
           strlen(name) <= NAME_MAX;
}

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Collects the file names of weight_map, each once; returns how many, or an error. */
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
        rc = open_shard(path, shard, fault);
        if (rc == ERR_NOTFOUND)
            rc = fault_set(fault, rc, names[i],
                           "is missing: model.safetensors.index.json names it; download it, too");
        if (rc) return rc;
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

static bool shard_has(const struct shard *shard, const char *name) {
    const struct tensor key = {.name = name};
    return shard->table.count &&
           bsearch(&key, shard->table.tensors, shard->table.count, sizeof key, compare_names);
}

/* Finds the tensors of the index that are in no file, such as an LM head tied to the embeddings.
 * They are a fault only if the model needs them. */
static int find_absent(struct weights *w, const cJSON *map, struct fault *fault) {
    const cJSON *entry;
    size_t count = 0;
    cJSON_ArrayForEach(entry, map) count +=
        !shard_has(find_shard(w, entry->valuestring), entry->string);
    w->absent = mem_try_alloc(count, sizeof *w->absent);
    if (!w->absent) return no_memory(fault);
    cJSON_ArrayForEach(entry, map) {
        const struct shard *shard = find_shard(w, entry->valuestring);
        const size_t size = strlen(entry->string) + 1;
        if (shard_has(shard, entry->string)) continue;
        struct absent *absent = &w->absent[w->absent_count];
        if (!(absent->name = mem_try_alloc(size + strlen(MODEL), 1))) return no_memory(fault);
        memcpy(absent->name, entry->string, size); /* name_whole may lengthen it */
        absent->file = shard->name;
        w->absent_count++;
    }
    return 0;
}

const char *weights_absent(const struct weights *w, const char *name) {
    for (size_t i = 0; i < w->absent_count; i++)
        if (strcmp(w->absent[i].name, name) == 0) return w->absent[i].file;
    return NULL;
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
    if (!rc) rc = find_absent(w, map, fault);
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
    static const struct json_limits limits = {
        .bytes = INDEX_MAX, .depth = 8, .nodes = INDEX_NODES, .file = true};
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

static int open_dir(const char *dir, struct weights **out, struct fault *fault) {
    char path[PATH_MAX];
    struct fault first = {0};
    *out = NULL;
    int rc = join_path(path, sizeof path, dir, "model.safetensors", &first);
    if (!rc) rc = weights_open_file(path, out, &first);
    if (rc == ERR_NOTFOUND) return open_index(dir, out, fault);
    if (rc && fault) *fault = first;
    return rc;
}

/* ---- GGUF ---- */

static const struct {
    uint32_t format;
    enum tensor_dtype dtype;
} gguf_floats[] = {
    {GGUF_FORMAT_F32, TENSOR_F32}, {GGUF_FORMAT_F16, TENSOR_F16}, {GGUF_FORMAT_BF16, TENSOR_BF16}};

static enum tensor_dtype dtype_of_format(uint32_t format) {
    for (size_t i = 0; i < sizeof gguf_floats / sizeof gguf_floats[0]; i++)
        if (gguf_floats[i].format == format) return gguf_floats[i].dtype;
    return block_reader_of(format) ? TENSOR_BLOCKS : TENSOR_OTHER;
}

/* Takes over a tensor of a GGUF file. Its sizes are reversed: the file begins with the one that
 * varies fastest. */
static void take_gguf_tensor(const struct gguf_tensor *from, struct tensor *out) {
    *out = (struct tensor){.name = from->name,
                           .type = gguf_format_name(from->format),
                           .dtype = dtype_of_format(from->format),
                           .format = from->format,
                           .dims = from->dims,
                           .data = from->data,
                           .bytes = from->bytes};
    for (int i = 0; i < from->dims; i++) out->shape[i] = from->shape[from->dims - 1 - i];
}

static int open_gguf_shard(const char *path, struct shard *shard, struct fault *fault) {
    struct fault inner = {0};
    int rc = map_shard(path, shard, fault);
    if (rc) return rc;
    rc = gguf_parse(shard->map, shard->size, &shard->gguf, &inner);
    if (rc) return fault_set(fault, rc, inner.field, "%.160s: %.220s", path, inner.text);
    shard->table.tensors = mem_try_alloc(shard->gguf.tensor_count, sizeof *shard->table.tensors);
    if (!shard->table.tensors) return no_memory(fault);
    for (size_t i = 0; i < shard->gguf.tensor_count; i++)
        take_gguf_tensor(&shard->gguf.tensors[i], &shard->table.tensors[shard->table.count++]);
    return 0;
}

#define SPLIT_FIRST "-00001-of-"

/* Finds "-00001-of-00004.gguf" in the file's own name. */
static const char *split_mark(const char *path) {
    const char *name = strrchr(path, '/');
    return strstr(name ? name : path, SPLIT_FIRST);
}

size_t weights_gguf_count(const char *first) {
    const char *mark = split_mark(first);
    unsigned long count = mark ? strtoul(mark + strlen(SPLIT_FIRST), NULL, 10) : 1;
    return count >= 1 && count <= SHARDS_MAX ? count : 1;
}

bool weights_gguf_path(const char *first, size_t index, char *out, size_t size) {
    const char *mark = split_mark(first);
    int n = mark && index > 0 ? snprintf(out, size, "%.*s-%05zu-of-%s", (int)(mark - first), first,
                                         index + 1, mark + strlen(SPLIT_FIRST))
                              : snprintf(out, size, "%s", first);
    return n >= 0 && (size_t)n < size;
}

/* Finds how many files the metadata of the first one promises, and whether this is the first. */
static int count_gguf_shards(const char *path, const struct gguf *gguf, size_t *count,
                             struct fault *fault) {
    int64_t number = 0, total = 1;
    int rc = gguf_int(gguf, "split.no", 0, UINT16_MAX, &number, fault);
    if (!rc) rc = gguf_int(gguf, "split.count", 0, SHARDS_MAX, &total, fault);
    if (rc) return rc;
    *count = total > 1 ? (size_t)total : 1;
    if (number == 0 && *count == (*count > 1 ? weights_gguf_count(path) : 1)) return 0;
    return fault_set(fault, ERR_INVALID, "split.no",
                     "%.200s is file %lld of %lld: name the first, ..." SPLIT_FIRST "%05lld.gguf",
                     path, (long long)number + 1, (long long)total, (long long)total);
}

static int open_gguf_rest(const char *path, struct weights *w, size_t count, struct fault *fault) {
    int64_t promised = -1;
    size_t found = 0;
    for (size_t i = 1; i < count; i++) {
        char next[PATH_MAX];
        int64_t number = -1;
        if (!weights_gguf_path(path, i, next, sizeof next))
            return fault_set(fault, ERR_LIMIT, "model", "the path is too long");
        const struct shard *last = &w->shards[i - 1];
        struct shard *shard = &w->shards[w->shard_count++];
        shard->copied = last->copied;
        shard->copy_most = last->copied ? last->copy_most - last->size : 0;
        int rc = open_gguf_shard(next, shard, fault);
        if (rc == ERR_NOTFOUND)
            rc = fault_set(fault, rc, "model", "file %zu of %zu is missing: download %.250s, too",
                           i + 1, count, next);
        if (!rc) rc = gguf_int(&shard->gguf, "split.no", 0, UINT16_MAX, &number, fault);
        if (rc) return rc;
        if (number != (int64_t)i)
            return fault_set(fault, ERR_MALFORMED, "split.no", "%.200s is not file %zu of %zu",
                             next, i + 1, count);
    }
    int rc = gguf_int(&w->shards[0].gguf, "split.tensors.count", 0, INT32_MAX, &promised, fault);
    for (size_t i = 0; i < w->shard_count; i++) found += w->shards[i].table.count;
    if (rc || promised < 0 || (size_t)promised == found) return rc;
    return fault_set(fault, ERR_MALFORMED, "split.tensors.count", "%lld, but the files have %zu",
                     (long long)promised, found);
}

static int open_gguf(const char *path, struct shard how, struct weights **out,
                     struct fault *fault) {
    struct shard first = how;
    size_t count = 1;
    *out = NULL;
    int rc = open_gguf_shard(path, &first, fault);
    if (!rc) rc = count_gguf_shards(path, &first.gguf, &count, fault);
    struct weights *w = new_weights(count); /* the shard belongs to it, even if it is at fault */
    if (!w) {
        close_shard(&first);
        return no_memory(fault);
    }
    w->is_gguf = true;
    w->shards[w->shard_count++] = first;
    if (!rc) rc = open_gguf_rest(path, w, count, fault);
    if (!rc) rc = build_table(w, fault);
    if (rc)
        weights_close(w);
    else
        *out = w;
    return rc;
}

int weights_open(const char *path, struct weights **out, struct fault *fault) {
    if (!gguf_is_path(path)) return open_dir(path, out, fault);
    return open_gguf(path, (struct shard){0}, out, fault);
}

int weights_copy(const char *path, bool gguf, size_t most, struct weights **out,
                 struct fault *fault) {
    const struct shard how = {.copied = true, .copy_most = most};
    return (gguf ? open_gguf : open_one_file)(path, how, out, fault);
}

/* ---- Elements ---- */

void tensor_shape_text(const int64_t *shape, int dims, char *out, size_t size) {
    size_t used = 0;
    out[0] = '\0';
    for (int i = 0; i < dims && used < size; i++) {
        int n = snprintf(out + used, size - used, "%s%lld", i ? ", " : "", (long long)shape[i]);
        used += n > 0 ? (size_t)n : 0;
    }
}

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
        uint16_t bits; /* the data may not be aligned */
        memcpy(&bits, data + i * sizeof bits, sizeof bits);
        out[i] = tensor->dtype == TENSOR_F16 ? number_from_f16(bits) : number_from_bf16(bits);
    }
    return true;
}
