/* Arena: everything a request or a load allocates, freed at once.
 *
 * Owner: whoever called arena_open; one thread at a time. Memory is zeroed, aligned to 16 bytes,
 * and valid until arena_close or arena_reset. With KEEPD_DEBUG_ARENA (dev and sanitizer builds)
 * every allocation is its own malloc so that AddressSanitizer sees overruns. */
#ifndef KEEPD_BASE_ARENA_H
#define KEEPD_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>

struct arena {
    struct arena_block *blocks; /* newest first */
    size_t used;                /* bytes handed out since open or reset */
    size_t limit;               /* ceiling for `used` */
    bool full;                  /* the last failure was at the ceiling, not for lack of memory */
};

void arena_open(struct arena *arena, size_t limit);
void arena_reset(struct arena *arena);
void arena_close(struct arena *arena); /* idempotent */

/* NULL when the ceiling or the machine's memory is reached, or count * size overflows. */
void *arena_alloc(struct arena *arena, size_t count, size_t size);
char *arena_strndup(struct arena *arena, const char *s, size_t n); /* NUL-terminated copy */

#endif
