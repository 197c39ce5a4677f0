/* Checks the invariants of the pages on the device (kern.h, cache_check) on a copy on the host. For
 * tests and diagnosis; slow. */
#include <string.h>

#include "kernels/cuda/internal.h"

/* A host copy of everything that says where pages are. */
struct dump {
    struct pages_state state;
    int32_t *tables, *lengths, *ring, *pos;
    uint32_t *refs, *seen;
};

static void close_dump(struct dump *d) {
    void *arrays[] = {d->tables, d->lengths, d->ring, d->pos, d->refs, d->seen};
    for (void *array : arrays) mem_free(array);
}

static int dump_array(struct cuda *cuda, void **to, const void *from, size_t count) {
    *to = mem_try_alloc(count, 4);
    return *to ? device_download(cuda->device, *to, from, 4 * count) : ERR_NOMEM;
}

static int open_dump(struct cuda *cuda, struct dump *d) {
    const struct pages *p = &cuda->pages;
    size_t count = (size_t)p->count, slots = (size_t)cuda->options.slots;
    memset(d, 0, sizeof *d);
    int rc = device_download(cuda->device, &d->state, p->state, sizeof d->state);
    if (!rc) rc = dump_array(cuda, (void **)&d->tables, p->tables, slots * (size_t)p->slot_pages);
    if (!rc) rc = dump_array(cuda, (void **)&d->lengths, p->lengths, slots * (size_t)p->rows);
    if (!rc) rc = dump_array(cuda, (void **)&d->ring, p->ring, count);
    if (!rc) rc = dump_array(cuda, (void **)&d->refs, p->refs, count);
    if (!rc) rc = dump_array(cuda, (void **)&d->pos, p->pos, count * (size_t)p->side_slots);
    d->seen = static_cast<uint32_t *>(mem_try_alloc(count, sizeof *d->seen));
    return rc ? rc : d->seen ? 0 : ERR_NOMEM;
}

/* `slots`: entries of a page of the stream. */
static int check_stream(const struct cuda *cuda, struct dump *d, int slot, int stream, int slots,
                        struct fault *fault) {
    const struct pages *p = &cuda->pages;
    const int32_t *table = d->tables + slot * p->slot_pages + (int64_t)stream * p->stream_pages;
    int32_t length = d->lengths[(int64_t)slot * p->rows + stream], last = -1;
    const struct slot *state = &cuda->slots[slot];
    if (length < 0 || length > cuda->options.max_positions || (length > 0 && !state->in_use))
        return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d has length %d", slot,
                         stream, length);
    for (int32_t i = 0; i < length; i++) {
        int32_t page = table[i / slots];
        if (page < 0 || page >= p->count)
            return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d names page %d", slot,
                             stream, page);
        if (i % slots == 0) d->seen[page]++;
        int32_t pos = d->pos[(size_t)page * (size_t)p->side_slots + (size_t)(i % slots)];
        if (pos <= last || pos >= state->next_pos)
            return fault_set(fault, ERR_INTERNAL, "cache",
                             "slot %d stream %d entry %d: position %d after %d", slot, stream, i,
                             pos, last);
        last = pos;
    }
    return 0;
}

static int check_state(const struct cuda *cuda, struct dump *d, int slot, int state,
                       struct fault *fault) {
    const struct pages *p = &cuda->pages;
    const int32_t *table = d->tables + slot * p->slot_pages +
                           (int64_t)p->streams * p->stream_pages + (int64_t)state * p->state_pages;
    int32_t length = d->lengths[(int64_t)slot * p->rows + p->streams + state];
    if (length != 0 && (length != p->state_pages || !cuda->slots[slot].in_use))
        return fault_set(fault, ERR_INTERNAL, "cache", "slot %d state %d has %d pages", slot, state,
                         length);
    for (int32_t i = 0; i < length; i++) {
        if (table[i] < 0 || table[i] >= p->count)
            return fault_set(fault, ERR_INTERNAL, "cache", "slot %d state %d names page %d", slot,
                             state, table[i]);
        d->seen[table[i]]++;
    }
    return 0;
}

static int check_free(const struct cuda *cuda, struct dump *d, struct fault *fault) {
    int64_t count = cuda->pages.count;
    if (d->state.error || d->state.tail - d->state.head > (unsigned long long)count)
        return fault_set(fault, ERR_INTERNAL, "cache", "error %d, ring %llu..%llu", d->state.error,
                         d->state.head, d->state.tail);
    for (unsigned long long i = d->state.head; i < d->state.tail; i++) {
        int32_t page = d->ring[i % (unsigned long long)count];
        if (page < 0 || page >= count || d->seen[page]++ > 0 || d->refs[page] > 0)
            return fault_set(fault, ERR_INTERNAL, "cache", "page %d is free and used", page);
    }
    for (int64_t page = 0; page < count; page++)
        if (d->seen[page] != (d->refs[page] > 0 ? d->refs[page] : 1))
            return fault_set(fault, ERR_INTERNAL, "cache", "page %lld: %u references, %u seen",
                             (long long)page, d->refs[page], d->seen[page]);
    return 0;
}

int op_cache_check(struct kern *kern, struct fault *fault) {
    struct cuda *cuda = cuda_of(kern);
    struct dump d;
    int rc = open_dump(cuda, &d);
    if (rc) fault_set(fault, rc, "cache", "%s while copying the tables", err_text(rc));
    for (int slot = 0; slot < cuda->options.slots && rc == 0; slot++) {
        for (int layer = 0; layer < cuda->options.layers && rc == 0; layer++) {
            const struct layer_place *place = &cuda->layers[layer];
            for (int head = 0; head < place->heads && rc == 0; head++)
                rc = check_stream(cuda, &d, slot, place->first + head, place->slots, fault);
        }
        for (int state = 0; state < cuda->options.states && rc == 0; state++)
            rc = check_state(cuda, &d, slot, state, fault);
    }
    if (rc == 0) rc = check_free(cuda, &d, fault);
    close_dump(&d);
    return rc;
}
