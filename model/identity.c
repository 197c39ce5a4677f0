#include "model/identity.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "model/weights.h"

enum { CHUNK = 1 << 20, NAMES_MAX = 4096 };

/* Adds a file's content and its size. */
static int add_content(struct sha256_ctx *sum, const char *path, struct fault *fault) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fault_set(fault, ERR_IO, path, "cannot be opened: %s", strerror(errno));
    uint8_t *chunk = mem_must_alloc(CHUNK, 1);
    uint64_t size = 0;
    ssize_t got;
    while ((got = read(fd, chunk, CHUNK)) > 0) {
        sha256_update(sum, (size_t)got, chunk);
        size += (uint64_t)got;
    }
    sha256_update(sum, sizeof size, (const uint8_t *)&size);
    mem_free(chunk);
    close(fd);
    return got == 0 ? 0 : fault_set(fault, ERR_IO, path, "cannot be read: %s", strerror(errno));
}

/* Adds a file with its name, so that no two sets of files give the same digest. */
static int add_file(struct sha256_ctx *sum, const char *dir, const char *name,
                    struct fault *fault) {
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof path)
        return fault_set(fault, ERR_INVALID, "model", "a file's name is too long");
    sha256_update(sum, strlen(name) + 1, (const uint8_t *)name);
    return add_content(sum, path, fault);
}

static bool is_weights(const char *name) {
    size_t size = strlen(name);
    static const char suffix[] = ".safetensors";
    return size >= sizeof suffix && strcmp(name + size - (sizeof suffix - 1), suffix) == 0 &&
           strcmp(name, "gates.safetensors") != 0;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Lists the names of the weight files in order, at most NAMES_MAX. */
static int list_weights(const char *path, char **names, int *count, struct fault *fault) {
    DIR *dir = opendir(path);
    const struct dirent *entry;
    if (!dir) return fault_set(fault, ERR_IO, "model", "cannot be listed: %s", strerror(errno));
    while (*count < NAMES_MAX && (entry = readdir(dir)) != NULL)
        if (is_weights(entry->d_name)) names[(*count)++] = mem_must_strdup(entry->d_name);
    closedir(dir);
    qsort(names, (size_t)*count, sizeof *names, by_name);
    return 0;
}

static int add_directory(struct sha256_ctx *sum, const char *dir, bool random,
                         struct fault *fault) {
    char **names = mem_must_alloc(NAMES_MAX, sizeof *names);
    int count = 0;
    int rc = add_file(sum, dir, "config.json", fault);
    if (rc == 0 && !random) rc = list_weights(dir, names, &count, fault);
    for (int i = 0; i < count; i++) {
        if (rc == 0) rc = add_file(sum, dir, names[i], fault);
        mem_free(names[i]);
    }
    mem_free(names);
    return rc;
}

/* Adds the files of a GGUF model, whatever their names: the order tells the files of a split model
 * apart. */
static int add_gguf(struct sha256_ctx *sum, const char *first, struct fault *fault) {
    int rc = 0;
    for (size_t i = 0; i < weights_gguf_count(first) && rc == 0; i++) {
        char path[PATH_MAX];
        if (!weights_gguf_path(first, i, path, sizeof path))
            return fault_set(fault, ERR_INVALID, "model", "a file's name is too long");
        rc = add_content(sum, path, fault);
    }
    return rc;
}

int identity_model(const char *dir, bool random, enum quantization quantization,
                   uint8_t out[SHA256_BYTES], struct fault *fault) {
    struct sha256_ctx sum;
    sha256_init(&sum);
    int rc =
        gguf_is_path(dir) ? add_gguf(&sum, dir, fault) : add_directory(&sum, dir, random, fault);
    const char *const formats[] = {
        [QUANTIZE_FP8] = "fp8", [QUANTIZE_Q8] = "q8", [QUANTIZE_Q4] = "q4"};
    if (quantization != QUANTIZE_NONE)
        sha256_update(&sum, strlen(formats[quantization]) + 1,
                      (const uint8_t *)formats[quantization]);
    sha256_digest(&sum, SHA256_BYTES, out);
    return rc;
}

int identity_gates(const char *path, uint8_t out[SHA256_BYTES], struct fault *fault) {
    struct sha256_ctx sum;
    memset(out, 0, SHA256_BYTES);
    if (!path[0]) return 0;
    sha256_init(&sum); /* without the name: equal gates have the same identity in any file */
    int rc = add_content(&sum, path, fault);
    if (rc == 0) sha256_digest(&sum, SHA256_BYTES, out);
    return rc;
}
