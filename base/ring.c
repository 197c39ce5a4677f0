#include "base/ring.h"

#include <stdint.h>

#include "base/check.h"
#include "base/mem.h"

/* `head` and `tail` only grow (they may wrap around size_t); a slot's index is the count modulo the
 * capacity. */

void ring_open(struct ring *ring, size_t capacity) {
    CHECK(capacity > 0 && capacity <= SIZE_MAX / 4 / sizeof(void *));
    size_t rounded = 1;
    while (rounded < capacity) rounded *= 2;
    ring->slots = mem_must_alloc(rounded, sizeof *ring->slots);
    ring->capacity = rounded;
    atomic_init(&ring->head, 0);
    atomic_init(&ring->tail, 0);
}

void ring_close(struct ring *ring) {
    mem_free(ring->slots);
    ring->slots = NULL;
    ring->capacity = 0;
}

bool ring_push(struct ring *ring, void *item) {
    size_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    /* acquire: the consumer has finished reading a slot before this side sees it free and
     * overwrites it */
    size_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    if (tail - head == ring->capacity) return false;
    ring->slots[tail & (ring->capacity - 1)] = item;
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
    return true;
}

bool ring_empty(struct ring *ring) {
    return atomic_load_explicit(&ring->head, memory_order_relaxed) ==
           atomic_load_explicit(&ring->tail, memory_order_acquire);
}

void *ring_pop(struct ring *ring) {
    size_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    size_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    if (head == tail) return NULL;
    void *item = ring->slots[head & (ring->capacity - 1)];
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
    return item;
}
