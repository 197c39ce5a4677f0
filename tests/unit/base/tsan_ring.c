/* Two threads, one ring: every item arrives once, in order, with what was written to it before. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

#include "base/ring.h"

#define ITEMS 20000

struct item {
    int value; /* plain, so that ThreadSanitizer sees whether the ring orders it */
};

static struct item items[ITEMS];
static struct ring ring;

static void *produce(void *arg) {
    (void)arg;
    for (int i = 0; i < ITEMS; i++) {
        items[i].value = i + 1;
        while (!ring_push(&ring, &items[i])) sched_yield();
    }
    return NULL;
}

int main(void) {
    pthread_t thread;
    int wrong = 0;
    ring_open(&ring, 64);
    if (pthread_create(&thread, NULL, produce, NULL) != 0) return 1;
    for (int i = 0; i < ITEMS; i++) {
        struct item *item;
        while (!(item = ring_pop(&ring))) sched_yield();
        wrong += item != &items[i] || item->value != i + 1;
    }
    pthread_join(thread, NULL);
    wrong += ring_pop(&ring) != NULL;
    ring_close(&ring);
    printf("%d items, %d wrong\n", ITEMS, wrong);
    return wrong != 0;
}
