#include "base/arena.h"

#include <stdint.h>
#include <string.h>

#include "base/mem.h"

#define ALIGN       16
#define BLOCK_BYTES ((size_t)16 * 1024)

struct arena_block {
    struct arena_block *next; /* older */
    size_t size, used;        /* bytes in data */
    _Alignas(ALIGN) char data[];
};

void arena_open(struct arena *arena, size_t limit) {
    *arena = (struct arena){.limit = limit};
}

void arena_reset(struct arena *arena) {
    while (arena->blocks) {
        struct arena_block *block = arena->blocks;
        arena->blocks = block->next;
        mem_free(block);
    }
    arena->used = 0;
}

void arena_close(struct arena *arena) {
    arena_reset(arena);
}

static size_t new_block_size(size_t bytes) {
#ifdef KEEPD_DEBUG_ARENA
    return bytes;
#else
    return bytes > BLOCK_BYTES / 4 ? bytes : BLOCK_BYTES;
#endif
}

/* A large piece gets its own block behind the newest one, so that the newest block is filled
 * further. */
static struct arena_block *add_arena_block(struct arena *arena, size_t bytes) {
    size_t size = new_block_size(bytes);
    if (size > SIZE_MAX - sizeof(struct arena_block)) return NULL;
    struct arena_block *block = mem_try_alloc(1, sizeof *block + size);
    if (!block) return NULL;
    block->size = size;
    struct arena_block **place = &arena->blocks;
    if (size == bytes && arena->blocks) place = &arena->blocks->next;
    block->next = *place;
    *place = block;
    return block;
}

void *arena_alloc(struct arena *arena, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - ALIGN) return NULL;
    size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    arena->full = rounded > arena->limit - arena->used;
    if (arena->full) return NULL;
#ifdef KEEPD_DEBUG_ARENA
    struct arena_block *block =
        add_arena_block(arena, bytes); /* exact size, so that AddressSanitizer sees overruns */
#else
    struct arena_block *block = arena->blocks;
    if (!block || rounded > block->size - block->used) block = add_arena_block(arena, rounded);
#endif
    if (!block) return NULL;
    void *p = block->data + block->used;
    block->used += block->size - block->used < rounded ? block->size - block->used : rounded;
    arena->used += rounded;
    return p;
}

char *arena_strndup(struct arena *arena, const char *s, size_t n) {
    if (n == SIZE_MAX) return NULL;
    char *copy = arena_alloc(arena, n + 1, 1);
    if (copy && n) memcpy(copy, s, n);
    return copy;
}
