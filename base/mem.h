/* Host memory: two ways to ask for it, one for each meaning of failure.
 *
 * mem_must_*: sizes fixed by configuration or code; failure aborts and reports the size.
 * mem_try_*:  sizes that a client or file can influence; failure returns NULL.
 * All return zeroed memory, freed by mem_free (NULL allowed). Thread-safe.
 * Tests let the n-th mem_try_* call fail with mem_fail_after(n) (n < 0: never). */
#ifndef KEEPD_BASE_MEM_H
#define KEEPD_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>

void *mem_must_alloc(size_t count, size_t size);
char *mem_must_strdup(const char *s);
void *mem_try_alloc(size_t count, size_t size); /* NULL also when count * size overflows */
/* Zeroes the added bytes. NULL: no memory, and `old` is still valid. */
void *mem_try_realloc(void *old, size_t old_bytes, size_t new_bytes);
void mem_free(void *p);

void mem_fail_after(long n); /* the n-th next try call (0 = the very next) and no other fails */
bool mem_fail_pending(void); /* true while the planned failure has not happened yet */

#endif
