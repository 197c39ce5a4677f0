/* Checks the invariants of the pages on the device (kern.h, cache_check) on a copy on the host. For
 * tests and diagnosis; slow. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/internal.h"

/* A host copy of everything that says where pages are. */
struct dump {
    struct pages_state state;
    int32_t *tables, *member_tables, *lengths, *ring, *pos;
    uint32_t *refs, *seen;
    struct member *members; /* members of one stream */
    uint64_t *holders; /* [max_positions]: last known holder of the position; see entry_holder */
};

static void close_dump(struct dump *d) {
    void *arrays[] = {d->tables, d->member_tables, d->lengths, d->ring,   d->pos,
                      d->refs,   d->seen,          d->members, d->holders};
    for (void *array : arrays) mem_free(array);
}

static int dump_array(struct cuda *cuda, void **to, const void *from, size_t count) {
    *to = mem_try_alloc(count, 4);
    return *to ? device_download(cuda->device, *to, from, 4 * count) : ERR_NOMEM;
}

static int open_dump(struct cuda *cuda, struct dump *d) {
    const struct pages *p = &cuda->pages;
    size_t count = (size_t)p->count, streams = (size_t)p->streams * (size_t)cuda->options.slots;
    memset(d, 0, sizeof *d);
    int rc = device_download(cuda->device, &d->state, p->state, sizeof d->state);
    if (!rc)
        rc = dump_array(cuda, (void **)&d->tables, p->tables, streams * (size_t)p->stream_pages);
    if (!rc)
        rc = dump_array(cuda, (void **)&d->member_tables, p->member_tables,
                        streams * (size_t)p->member_pages);
    if (!rc) rc = dump_array(cuda, (void **)&d->lengths, p->lengths, 2 * streams);
    if (!rc) rc = dump_array(cuda, (void **)&d->ring, p->ring, count);
    if (!rc) rc = dump_array(cuda, (void **)&d->refs, p->refs, count);
    if (!rc) rc = dump_array(cuda, (void **)&d->pos, p->pos, count * (size_t)p->page_slots);
    d->seen = static_cast<uint32_t *>(mem_try_alloc(count, sizeof *d->seen));
    size_t most = (size_t)p->member_pages * PAGE_MEMBERS;
    d->members = static_cast<struct member *>(mem_try_alloc(most, sizeof *d->members));
    d->holders = static_cast<uint64_t *>(
        mem_try_alloc((size_t)cuda->options.max_positions, sizeof *d->holders));
    return rc ? rc : d->seen && d->members && d->holders ? 0 : ERR_NOMEM;
}

/* The holder number of positions held by a stream's entries; members have the next number. Every
 * stream has other numbers, and none has 0, so that no stream needs to clear the array. */
static uint64_t entry_holder(const struct cuda *cuda, int slot, int stream) {
    return 2 + 2 * ((uint64_t)slot * (uint64_t)cuda->pages.streams + (uint64_t)stream);
}

/* The length of a row: a stream's entries, or, after those of all streams, its members. */
static const int32_t *length_in(const struct cuda *cuda, const struct dump *d, int slot, int row) {
    return &d->lengths[(size_t)slot * 2 * (size_t)cuda->pages.streams + (size_t)row];
}

static int check_stream(const struct cuda *cuda, struct dump *d, int slot, int stream,
                        struct fault *fault) {
    const struct pages *p = &cuda->pages;
    size_t index = (size_t)slot * (size_t)p->streams + (size_t)stream;
    const int32_t *table = d->tables + index * (size_t)p->stream_pages;
    int32_t length = *length_in(cuda, d, slot, stream), last = -1;
    const struct slot *state = &cuda->slots[slot];
    if (length < 0 || length > cuda->options.max_positions || (length > 0 && !state->in_use))
        return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d has length %d", slot,
                         stream, length);
    for (int32_t i = 0; i < length; i++) {
        int32_t page = table[i / p->page_slots];
        if (page < 0 || page >= p->count)
            return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d names page %d", slot,
                             stream, page);
        if (i % p->page_slots == 0) d->seen[page]++;
        int32_t pos = d->pos[(size_t)page * (size_t)p->page_slots + (size_t)(i % p->page_slots)];
        if (pos <= last || pos >= state->next_pos)
            return fault_set(fault, ERR_INTERNAL, "cache",
                             "slot %d stream %d entry %d: position %d after %d", slot, stream, i,
                             pos, last);
        d->holders[pos] = entry_holder(cuda, slot, stream);
        last = pos;
    }
    return 0;
}

/* Copies the stream's members to the host; every page they name must be a page. */
static int read_members(struct cuda *cuda, struct dump *d, int slot, int stream, int32_t count,
                        struct fault *fault) {
    const struct pages *p = &cuda->pages;
    size_t index = (size_t)slot * (size_t)p->streams + (size_t)stream;
    const int32_t *table = d->member_tables + index * (size_t)p->member_pages;
    int pages = members_pages_for(count), rc = 0;
    if (count < 0 || pages > p->member_pages || (count > 0 && !cuda->slots[slot].classes))
        return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d has %d members", slot,
                         stream, count);
    for (int page = 0; page < pages && !rc; page++) {
        if (table[page] < 0 || table[page] >= p->count)
            return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d names page %d", slot,
                             stream, table[page]);
        d->seen[table[page]]++;
        rc = device_download(cuda->device, d->members + (size_t)page * PAGE_MEMBERS,
                             p->pool + (int64_t)table[page] * p->page_bytes,
                             PAGE_MEMBERS * sizeof *d->members);
    }
    return rc;
}

/* Takes the position for the holder; false if an entry or member already has it. */
static bool takes_place(const struct cuda *cuda, struct dump *d, int slot, int stream,
                        const struct member *m) {
    uint64_t entry = entry_holder(cuda, slot, stream);
    int32_t end = cuda->slots[slot].next_pos;
    if (m->centre < 0 || m->centre >= end || d->holders[m->centre] != entry) return false;
    if (m->pos < 0 || m->pos >= end || d->holders[m->pos] == entry) return false;
    if (d->holders[m->pos] == entry + 1) return false;
    d->holders[m->pos] = entry + 1;
    return true;
}

/* Members ascend, their centres are entries, and each has a position of its own. Called after
 * check_stream. */
static int check_members(struct cuda *cuda, struct dump *d, int slot, int stream,
                         struct fault *fault) {
    int32_t count = *length_in(cuda, d, slot, cuda->pages.streams + stream);
    int rc = read_members(cuda, d, slot, stream, count, fault);
    for (int32_t i = 0; i < count && !rc; i++) {
        const struct member *m = &d->members[i], *last = i > 0 ? m - 1 : NULL;
        bool ascends =
            !last || m->centre > last->centre || (m->centre == last->centre && m->pos > last->pos);
        if (ascends && m->gain >= 0 && isfinite(m->gain) && takes_place(cuda, d, slot, stream, m))
            continue;
        rc = fault_set(fault, ERR_INTERNAL, "cache",
                       "slot %d stream %d member %d: position %d in the class of %d, gain %g", slot,
                       stream, i, m->pos, m->centre, (double)m->gain);
    }
    return rc;
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
    for (int slot = 0; slot < cuda->options.slots && rc == 0; slot++)
        for (int stream = 0; stream < cuda->pages.streams && rc == 0; stream++) {
            rc = check_stream(cuda, &d, slot, stream, fault);
            if (rc == 0) rc = check_members(cuda, &d, slot, stream, fault);
        }
    if (rc == 0) rc = check_free(cuda, &d, fault);
    close_dump(&d);
    return rc;
}
