/* Aligned, zeroed memory for arrays: 64 bytes, and whole 2 MiB pages (which the system is asked to
 * back with huge pages) when large. A try allocation: NULL when there is none. */
#ifndef KEEPD_KERNELS_CPU_ALLOC_H
#define KEEPD_KERNELS_CPU_ALLOC_H

#include <stddef.h>

void *cpu_alloc(size_t bytes);
void cpu_free(void *mem); /* NULL allowed */

#endif
