/* Growable byte buffer with a ceiling. Errors stick: append freely, test `failed` once at the end.
 * After a failure appends do nothing and `size` stays at the last complete append.
 * `data` is NUL-terminated after every append (the NUL is not counted); NULL while empty. */
#ifndef KEEPD_BASE_BUF_H
#define KEEPD_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buf {
    char *data;
    size_t size;
    size_t capacity;
    size_t limit; /* ceiling for size */
    bool failed;
    bool full; /* the first failure was at the limit, not for lack of memory */
};

void buf_open(struct buf *buf, size_t limit);
void buf_close(struct buf *buf);
void buf_clear(struct buf *buf); /* keeps the memory, clears `failed` */
/* Marks `buf` as failed if `part`, whose text was to be appended, has failed. */
void buf_inherit(struct buf *buf, const struct buf *part);
void buf_add(struct buf *buf, const void *data, size_t size);
void buf_str(struct buf *buf, const char *s);
void buf_char(struct buf *buf, char c);
void buf_fmt(struct buf *buf, const char *format, ...) __attribute__((format(printf, 2, 3)));
void buf_int(struct buf *buf, int64_t value);

#endif
