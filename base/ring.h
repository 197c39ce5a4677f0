/* Bounded single-producer single-consumer ring of pointers. Full is a result, never a wait.
 * One thread pushes and one thread pops; the owner decides which. */
#ifndef KEEPD_BASE_RING_H
#define KEEPD_BASE_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct ring {
    void **slots;
    size_t capacity; /* a power of two */
    /* The padding gives each side a cache line of its own, also where the struct lies in heap
     * memory. */
    char pad[64];
    atomic_size_t head; /* next to pop; written by the consumer */
    char head_pad[64 - sizeof(atomic_size_t)];
    atomic_size_t tail; /* next to push; written by the producer */
    char tail_pad[64 - sizeof(atomic_size_t)];
};

void ring_open(struct ring *ring, size_t capacity); /* rounded up to a power of two */
void ring_close(struct ring *ring);
bool ring_push(struct ring *ring, void *item); /* false when full */
void *ring_pop(struct ring *ring);             /* NULL when empty */
bool ring_empty(struct ring *ring);            /* for the consumer */

#endif
