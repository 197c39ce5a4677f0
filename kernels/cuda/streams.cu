/* Lists the streams of all subjects, and the chunks of these streams. */
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/evict.cuh"
#include "kernels/cuda/keys.cuh"

#define THREADS      256
#define PLAN_THREADS 1024

/* A thread per stream; blocks (part, subject). */
static __global__ void k_streams(const struct streams_args a) {
    const struct pages &all = a.pages;
    if (pages_failed(all)) return;
    const struct subject s = a.subjects[blockIdx.y];
    int index = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= s.stream_count) return;
    struct stream_state state = {};
    state.subject = (int32_t)blockIdx.y;
    const bool empty = a.stream_most && index >= a.stream_most;
    state.stream = s.stream_first + a.stream_offset + (empty ? 0 : index);
    state.place = all.stream_places[state.stream];
    const struct pages p = pages_with(all, state.place.slots);
    const int32_t *table = pages_table(p, s.slot, state.stream);
    state.length = empty ? 0 : *pages_length(p, s.slot, state.stream);
    state.candidates = pages_before(p, table, state.length, s.limit);
    int sinks = pages_before(p, table, state.candidates, s.sinks);
    state.fixed = sinks + state.length - state.candidates;
    state.lead = state.length;
    a.states[s.state_first + index] = state;
}

/* Launched with one block of threads. */
static __global__ void k_plan(const struct streams_args a) {
    SHARED_MEMORY(shared);
    int64_t *room = (int64_t *)shared;
    if (pages_failed(a.pages)) return;
    int64_t items = 0, entries = 0, more;
    for (int first = 0; first < a.state_count; first += (int)blockDim.x) {
        int i = first + (int)threadIdx.x;
        struct stream_state *state = &a.states[i < a.state_count ? i : 0];
        int64_t held = i < a.state_count ? state->length : 0;
        int64_t work = (held + PRODUCT_KEYS - 1) / PRODUCT_KEYS;
        int64_t item = items + block_scan(work, room, &more);
        items += more;
        int64_t entry = entries + block_scan(held, room, &more);
        entries += more;
        if (i >= a.state_count) continue;
        if (item + work > a.items_max || entry + held > a.entries_max) {
            pages_fail(a.pages, ERR_INTERNAL);
            continue;
        }
        state->work = (int32_t)work;
        state->item = (int32_t)item;
        state->first = entry;
        for (int chunk = 0; chunk < work; chunk++) a.items[item + chunk] = {i, chunk};
    }
    if (threadIdx.x == 0) *a.item_count = (int32_t)items;
}

void streams_find(struct cuda *cuda, const struct streams_args &args, int subjects, int most) {
    LAUNCH(cuda->device, k_streams, dim3(blocks_for(most, THREADS), (unsigned)subjects), THREADS, 0,
           args);
}

void streams_tell(struct cuda *cuda, const struct streams_args &args) {
    join_gather(cuda, args.all, (size_t)args.state_count * sizeof *args.all);
}

void streams_plan(struct cuda *cuda, const struct streams_args &args) {
    LAUNCH(cuda->device, k_plan, 1, PLAN_THREADS, PLAN_THREADS / 32 * sizeof(int64_t), args);
}

int64_t streams_items_max(int64_t streams, int64_t entries, int64_t longest) {
    int64_t by_length = streams * ((longest + PRODUCT_KEYS - 1) / PRODUCT_KEYS);
    int64_t by_entries = streams + entries / PRODUCT_KEYS;
    return by_length < by_entries ? by_length : by_entries;
}

void streams_room(struct pieces *room, struct streams_args *args) {
    size_t count = (size_t)args->state_count;
    if (args->ranks < 1) args->ranks = 1;
    args->all = piece<struct stream_state>(room, (size_t)args->ranks * count);
    args->states = args->all ? args->all + (size_t)args->rank * count : NULL;
    args->items = piece<struct item>(room, (size_t)args->items_max);
    args->item_count = piece<int32_t>(room, 1);
}
