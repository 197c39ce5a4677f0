/* Aligned, zeroed memory for arrays: aligned to 64 bytes, and to whole 2 MiB pages (backed by huge
 * pages where the system grants them) when large. Returns NULL when memory is exhausted. */
#ifndef KEEPD_KERNELS_CPU_ALLOC_H
#define KEEPD_KERNELS_CPU_ALLOC_H

#include <stddef.h>

void *cpu_alloc(size_t bytes);
void cpu_free(void *mem); /* NULL allowed */

/* Blocks of such memory that share chunks. A block of its own would use its last 2 MiB page in
 * part: for the hundred weights of a model, 1 MiB each. A chunk is freed with its last block. One
 * thread at a time uses an arena. */
struct cpu_chunk;
struct cpu_arena {
    struct cpu_chunk *chunk; /* the one with room; NULL: none */
};

void *cpu_arena_alloc(struct cpu_arena *arena, size_t bytes);
void cpu_arena_free(struct cpu_arena *arena, void *mem); /* NULL allowed */

#endif
