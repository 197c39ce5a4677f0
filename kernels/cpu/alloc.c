#include "kernels/cpu/alloc.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"

#define LINE      ((size_t)64)
#define HUGE_PAGE ((size_t)2 << 20)

/* Allocates more than `bytes`; the word before the aligned block stores the base address. */
void *cpu_alloc(size_t bytes) {
    size_t align = bytes >= HUGE_PAGE / 2 ? HUGE_PAGE : LINE;
    if (bytes > SIZE_MAX - 2 * align - sizeof(void *)) return NULL;
    bytes = (bytes + align - 1) / align * align;
    char *raw = mem_try_alloc(1, bytes + align + sizeof(void *));
    if (!raw) return NULL;
    uintptr_t at = ((uintptr_t)raw + sizeof(void *) + align - 1) / align * align;
    char *block = raw + (at - (uintptr_t)raw);
    memcpy(block - sizeof raw, &raw, sizeof raw);
    /* Advice only: with 4 KiB pages a weight pass spends a tenth of its time in page walks. */
    if (align == HUGE_PAGE) madvise(block, bytes, MADV_HUGEPAGE);
    return block;
}

void cpu_free(void *mem) {
    if (!mem) return;
    char *raw;
    memcpy(&raw, (char *)mem - sizeof raw, sizeof raw);
    mem_free(raw);
}

/* ---- Arenas ---- */

#define CHUNK ((size_t)64 << 20)

struct cpu_chunk {
    size_t bytes, used; /* the chunk itself included */
    size_t blocks;
};

static struct cpu_chunk *chunk_open(size_t bytes) {
    struct cpu_chunk *chunk = cpu_alloc(bytes);
    if (chunk) *chunk = (struct cpu_chunk){.bytes = bytes, .used = LINE};
    return chunk;
}

/* Returns a chunk with room for `bytes`: the arena's, or a new one. */
static struct cpu_chunk *chunk_with_room(struct cpu_arena *arena, size_t bytes) {
    struct cpu_chunk *chunk = arena->chunk;
    if (chunk && chunk->bytes - chunk->used >= bytes) return chunk;
    if (bytes > CHUNK / 2) return chunk_open(bytes + LINE); /* for one block */
    chunk = chunk_open(CHUNK);
    if (chunk) arena->chunk = chunk;
    return chunk;
}

/* The line before a block has the address of its chunk, or NULL: a small block has memory of its
 * own, which sanitizers watch. Pages of a chunk that no block has reached are not in memory. */
void *cpu_arena_alloc(struct cpu_arena *arena, size_t bytes) {
    if (bytes > SIZE_MAX / 2) return NULL;
    bytes = (bytes + LINE - 1) / LINE * LINE + LINE;
    struct cpu_chunk *chunk = NULL;
    char *block = NULL;
    if (bytes < HUGE_PAGE / 2) {
        block = cpu_alloc(bytes);
    } else {
        chunk = chunk_with_room(arena, bytes);
        if (chunk) block = (char *)chunk + chunk->used;
    }
    if (!block) return NULL;
    if (chunk) chunk->used += bytes, chunk->blocks++;
    memcpy(block, &chunk, sizeof chunk);
    return block + LINE;
}

void cpu_arena_free(struct cpu_arena *arena, void *mem) {
    struct cpu_chunk *chunk;
    if (!mem) return;
    memcpy(&chunk, (char *)mem - LINE, sizeof chunk);
    if (!chunk) cpu_free((char *)mem - LINE);
    if (!chunk || --chunk->blocks) return;
    if (arena->chunk == chunk) arena->chunk = NULL;
    cpu_free(chunk);
}
