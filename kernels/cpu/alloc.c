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
