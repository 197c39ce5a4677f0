/* Aligned, zeroed memory for arrays: aligned to 64 bytes, and to whole 2 MiB pages (backed by huge
 * pages where the system grants them) when large. Returns NULL when memory is exhausted. */
#ifndef KEEPD_KERNELS_CPU_ALLOC_H
#define KEEPD_KERNELS_CPU_ALLOC_H

#include <stddef.h>

void *cpu_alloc(size_t bytes);
void cpu_free(void *mem); /* NULL allowed */

#endif
