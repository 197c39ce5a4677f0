#include "base/buf.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

void buf_open(struct buf *buf, size_t limit) {
    *buf = (struct buf){.limit = limit};
}

void buf_close(struct buf *buf) {
    mem_free(buf->data);
    *buf = (struct buf){.limit = buf->limit};
}

void buf_clear(struct buf *buf) {
    buf->size = 0;
    buf->failed = buf->full = false;
    if (buf->data) buf->data[0] = '\0';
}

void buf_inherit(struct buf *buf, const struct buf *part) {
    if (buf->failed) return;
    buf->failed = part->failed;
    buf->full = part->full;
}

/* Makes space for `extra` more bytes and the NUL. The size doubles, so that appending takes linear
 * time in all. */
static bool buf_grow(struct buf *buf, size_t extra) {
    if (buf->failed) return false;
    if (extra > buf->limit - buf->size || buf->size + extra == SIZE_MAX) {
        buf->failed = buf->full = true;
        return false;
    }
    size_t needed = buf->size + extra + 1;
    if (needed <= buf->capacity) return true;
    size_t capacity = buf->capacity ? buf->capacity : 64;
    while (capacity < needed) capacity = capacity > SIZE_MAX / 2 ? needed : capacity * 2;
    if (capacity > buf->limit) capacity = needed > buf->limit ? needed : buf->limit;
    char *data = mem_try_realloc(buf->data, buf->capacity, capacity);
    buf->failed = !data;
    if (!data) return false;
    buf->data = data;
    buf->capacity = capacity;
    return true;
}

void buf_add(struct buf *buf, const void *data, size_t size) {
    if (!size || !buf_grow(buf, size)) return;
    memcpy(buf->data + buf->size, data, size);
    buf->size += size;
    buf->data[buf->size] = '\0';
}

void buf_str(struct buf *buf, const char *s) {
    buf_add(buf, s, strlen(s));
}

void buf_char(struct buf *buf, char c) {
    buf_add(buf, &c, 1);
}

void buf_fmt(struct buf *buf, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int size = vsnprintf(NULL, 0, format, args);
    if (size < 0) {
        buf->failed = true;
    } else if (buf_grow(buf, (size_t)size)) {
        vsnprintf(buf->data + buf->size, (size_t)size + 1, format, again);
        buf->size += (size_t)size;
    }
    va_end(again);
    va_end(args);
}

void buf_int(struct buf *buf, int64_t value) {
    buf_fmt(buf, "%" PRId64, value);
}
