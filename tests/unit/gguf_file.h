/* Writes GGUF files for tests, piece by piece into a buffer. Counts are the caller's to say. */
#ifndef KEEPD_TESTS_GGUF_FILE_H
#define KEEPD_TESTS_GGUF_FILE_H

#include <string.h>

#include "base/buf.h"
#include "base/gguf.h"

static inline void put(struct buf *file, uint64_t value, size_t bytes) {
    char out[8];
    for (size_t i = 0; i < bytes; i++) out[i] = (char)(value >> 8 * i);
    buf_add(file, out, bytes);
}

static inline void put_string(struct buf *file, const char *text) {
    put(file, strlen(text), 8);
    buf_add(file, text, strlen(text));
}

static inline void put_head(struct buf *file, uint32_t version, uint64_t tensors, uint64_t values) {
    buf_add(file, "GGUF", 4);
    put(file, version, 4);
    put(file, tensors, 8);
    put(file, values, 8);
}

static inline void put_key(struct buf *file, const char *key, enum gguf_type type) {
    put_string(file, key);
    put(file, type, 4);
}

static inline void put_int(struct buf *file, const char *key, enum gguf_type type, size_t bytes,
                           int64_t value) {
    put_key(file, key, type);
    put(file, (uint64_t)value, bytes);
}

static inline void put_u32(struct buf *file, const char *key, uint32_t value) {
    put_int(file, key, GGUF_U32, 4, value);
}

static inline void put_f32(struct buf *file, const char *key, float value) {
    put_key(file, key, GGUF_F32);
    buf_add(file, (const char *)&value, sizeof value);
}

static inline void put_text(struct buf *file, const char *key, const char *text) {
    put_key(file, key, GGUF_STRING);
    put_string(file, text);
}

static inline void put_array(struct buf *file, const char *key, enum gguf_type type,
                             uint64_t count) {
    put_key(file, key, GGUF_ARRAY);
    put(file, type, 4);
    put(file, count, 8);
}

/* `shape` has the size that varies fastest first. */
static inline void put_tensor(struct buf *file, const char *name, int dims, const int64_t *shape,
                              uint32_t format, uint64_t offset) {
    put_string(file, name);
    put(file, (uint64_t)dims, 4);
    for (int i = 0; i < dims; i++) put(file, (uint64_t)shape[i], 8);
    put(file, format, 4);
    put(file, offset, 8);
}

static inline void put_padding(struct buf *file, size_t alignment) {
    while (file->size % alignment) put(file, 0, 1);
}

#endif
