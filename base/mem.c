#include "base/mem.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* Calls until the planned failure; below zero: no failure is planned. */
static atomic_long fail_countdown = -1;

void mem_fail_after(long n) {
    atomic_store(&fail_countdown, n < 0 ? -1 : n);
}

bool mem_fail_pending(void) {
    return atomic_load(&fail_countdown) >= 0;
}

static bool fails_now(void) {
    if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) < 0) return false;
    return atomic_fetch_sub(&fail_countdown, 1) == 0;
}

/* Allocates by calloc, realloc and free, so that cJSON_Delete, which calls free, may be given trees
 * with this memory. A request for no bytes also returns a pointer of its own. */
static void *resize_block(void *old, size_t old_bytes, size_t new_bytes) {
    char *p = realloc(old, new_bytes ? new_bytes : 1);
    if (p && new_bytes > old_bytes) memset(p + old_bytes, 0, new_bytes - old_bytes);
    return p;
}

void *mem_must_alloc(size_t count, size_t size) {
    void *p = count && size ? calloc(count, size) : calloc(1, 1);
    CHECK_MSG(p, "cannot allocate %zu * %zu bytes", count, size);
    return p;
}

char *mem_must_strdup(const char *s) {
    size_t n = strlen(s) + 1;
    return memcpy(mem_must_alloc(n, 1), s, n);
}

void *mem_try_alloc(size_t count, size_t size) {
    if (fails_now()) return NULL;
    return count && size ? calloc(count, size) : calloc(1, 1);
}

void *mem_try_realloc(void *old, size_t old_bytes, size_t new_bytes) {
    if (fails_now()) return NULL;
    return resize_block(old, old_bytes, new_bytes);
}

void mem_free(void *p) {
    free(p);
}
