/* Pages on the device: a step's append, forks, truncation, reports. cache_open.cu makes them.
 *
 * One launch appends to all streams of all layers, and one gives states their own pages. The host
 * never learns a length: it stores, per slot, whether the slot is in use, the next position, and
 * whether it was ever forked. */
#include <string.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/internal.h"

#define THREADS 256

/* ---- A step ---- */

/* The step writes into pages [from, to) of a row, which must be private. Of a stream these are the
 * partly filled page, or all pages if attention is added up; of a state they are all pages. */
struct written {
    int from, to;
};

static __device__ struct written pages_written(const struct pages &p, const struct span &s,
                                               int row) {
    int length = *pages_length(p, s.slot, row);
    if (row >= p.streams) return {0, length};
    const int slots = p.stream_places[row].slots;
    return {s.adds ? 0 : length / slots, (length + slots - 1) / slots};
}

/* A thread per row: counts the pages that its new entries, or a new state, need. */
static __global__ void k_claim(struct pages p, const struct span *spans, int count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)count * p.rows || pages_failed(p)) return;
    const struct span s = spans[i / p.rows];
    int row = (int)(i % p.rows), length = *pages_length(p, s.slot, row);
    int need = row < p.streams
                   ? pages_of_row(p, row, length + s.count) - pages_of_row(p, row, length)
                   : p.state_pages - length;
    if (need) atomicAdd(&p.state->need, (unsigned long long)need);
}

/* A warp per row: drops references to shared pages that the step writes; the last owner keeps
 * the page. The table then contains ~page; k_copy_shared and k_own_states make private copies. */
static __global__ void k_give_up(struct pages p, const struct span *spans, int count) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (i >= (int64_t)count * p.rows || pages_failed(p)) return;
    const struct span s = spans[i / p.rows];
    int32_t *table = pages_row(p, s.slot, (int)(i % p.rows));
    struct written pages = pages_written(p, s, (int)(i % p.rows));
    for (int page = pages.from + lane; page < pages.to; page += 32) {
        uint32_t *refs = &p.refs[table[page]];
        if (atomicSub(refs, 1u) > 1u) {
            table[page] = ~table[page];
            atomicAdd(&p.state->need, 1ull);
        } else {
            atomicAdd(refs, 1u);
        }
    }
}

/* One thread: are there enough pages on this rank? */
static __global__ void k_judge(struct pages p) {
    bool full = p.state->need > p.state->tail - p.state->head;
    p.state->verdict = pages_failed(p) ? p.state->error : full ? ERR_FULL : 0;
    p.state->need = 0;
}

/* One thread: unless there are enough pages on every rank, no rank changes anything. */
static __global__ void k_decide(struct pages p) {
    if (p.state->verdict) pages_fail(p, (int)p.state->verdict);
}

void cache_decide(struct cuda *cuda) {
    LAUNCH(cuda->device, k_judge, 1, 1, 0, cuda->pages);
    join_reduce(cuda, &cuda->pages.state->verdict, 1, COMM_I64, COMM_MIN);
    LAUNCH(cuda->device, k_decide, 1, 1, 0, cuda->pages);
}

/* A warp per stream: copies the shared pages it gave up, or restores the references. */
static __global__ void k_copy_shared(struct pages p, const struct span *spans, int count) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (i >= (int64_t)count * p.streams) return;
    const struct span s = spans[i / p.streams];
    int32_t *table = pages_table(p, s.slot, (int)(i % p.streams));
    struct written pages = pages_written(p, s, (int)(i % p.streams));
    bool failed = pages_failed(p);
    for (int page = pages.from; page < pages.to; page++) {
        int32_t from = ~table[page], to = 0;
        if (from < 0) continue;
        __syncwarp();
        if (lane == 0 && failed) atomicAdd(&p.refs[from], 1u);
        if (lane == 0) to = failed ? from : pages_taken(p, pages_take(p, 1));
        to = __shfl_sync(WARP_ALL, to, 0);
        if (!failed) pages_copy(p, to, from, lane, 32);
        __syncwarp();
        if (lane == 0) table[page] = to;
    }
}

/* A block per state of a span, a warp per page: copies the pages it gave up, or restores their
 * references; takes the pages of a new state and fills them with zeros. */
static __global__ void k_own_states(struct pages p, const struct span *spans) {
    const struct span s = spans[blockIdx.y];
    const int row = p.streams + (int)blockIdx.x, lane = threadIdx.x % 32;
    int32_t *table = pages_row(p, s.slot, row), *length = pages_length(p, s.slot, row);
    const bool failed = pages_failed(p), fresh = *length == 0;
    const int count = fresh && !failed ? p.state_pages : *length;
    for (int page = (int)threadIdx.x / 32; page < count; page += (int)blockDim.x / 32) {
        const int32_t from = fresh ? 0 : ~table[page];
        int32_t to = from;
        if (from < 0) continue;
        __syncwarp();
        if (lane == 0 && failed) atomicAdd(&p.refs[from], 1u);
        if (lane == 0 && !failed) to = pages_taken(p, pages_take(p, 1));
        to = __shfl_sync(WARP_ALL, to, 0);
        if (!failed && !fresh) pages_copy(p, to, from, lane, 32);
        for (int i = lane; fresh && i < PAGE_BYTES / 16; i += 32)
            ((uint4 *)pages_at(p, to))[i] = {};
        __syncwarp();
        if (lane == 0) table[page] = to;
    }
    __syncthreads();
    if (threadIdx.x == 0) *length = count;
}

/* LANES threads per stream: pages, positions, the new length. With 32, a warp shares the entries of
 * a prompt. */
template <int LANES>
static __global__ void k_append(struct pages all, const struct span *spans, int count) {
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    const int lane = (int)threadIdx.x % LANES;
    if (i >= (int64_t)count * all.streams || pages_failed(all)) return;
    const struct span s = spans[i / all.streams];
    const int stream = (int)(i % all.streams);
    const struct stream_place place = all.stream_places[stream];
    const struct pages p = pages_with(all, place.slots);
    int32_t *table = pages_table(p, s.slot, stream);
    int32_t *length = pages_length(p, s.slot, stream);
    const int old = *length, from = pages_for(p, old), to = pages_for(p, old + s.count);
    unsigned long long taken = 0;
    if (to > from && lane == 0) taken = pages_take(p, to - from);
    if (LANES > 1) taken = __shfl_sync(WARP_ALL, taken, 0);
    for (int page = from + lane; page < to; page += LANES)
        table[page] = pages_taken(p, taken + (unsigned long long)(page - from));
    if (LANES > 1) __syncwarp();
    for (int k = lane; k < s.count; k += LANES) {
        const int64_t side = pages_side(p, table, old + k);
        p.pos[side] = s.pos + k;
        p.score[side] = s.score;
    }
    if (lane > 0) return;
    *length = old + s.count;
    if (s.begins && place.head == 0)
        p.weights[(int64_t)s.slot * p.layers + place.layer] = 0; /* not measured */
}

static bool any_shared(const struct cuda *cuda, const struct kern_batch *batch) {
    for (int i = 0; i < batch->span_count; i++)
        if (cuda->slots[batch->spans[i].slot].shared) return true;
    return false;
}

static void append(struct cuda *cuda, const struct kern_batch *batch) {
    const struct step *step = &cuda->step;
    const struct pages *p = &cuda->pages;
    int64_t streams = (int64_t)step->span_count * p->streams;
    int64_t rows = (int64_t)step->span_count * p->rows;
    bool shared = any_shared(cuda, batch);
    LAUNCH(cuda->device, k_claim, blocks_for(rows, THREADS), THREADS, 0, *p, step->spans,
           step->span_count);
    if (shared)
        LAUNCH(cuda->device, k_give_up, blocks_for(rows, THREADS / 32), THREADS, 0, *p, step->spans,
               step->span_count);
    cache_decide(cuda);
    if (shared)
        LAUNCH(cuda->device, k_copy_shared, blocks_for(streams, THREADS / 32), THREADS, 0, *p,
               step->spans, step->span_count);
    if (cuda->options.states > 0)
        LAUNCH(cuda->device, k_own_states,
               dim3((unsigned)cuda->options.states, (unsigned)step->span_count), THREADS, 0, *p,
               step->spans);
    if (step->decode_count == step->span_count)
        LAUNCH(cuda->device, k_append<1>, blocks_for(streams, THREADS), THREADS, 0, *p, step->spans,
               step->span_count);
    else
        LAUNCH(cuda->device, k_append<32>, blocks_for(streams, THREADS / 32), THREADS, 0, *p,
               step->spans, step->span_count);
}

/* ---- The batch on the device ---- */

static bool same_batch(const struct step *step, const struct kern_batch *batch) {
    if (step->rows != batch->rows || step->span_count != batch->span_count || !step->host ||
        step->batch_places != batch->places || step->batch_given != batch->given)
        return false;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *a = &step->host[i], *b = &batch->spans[i];
        if (a->slot != b->slot || a->row != b->row || a->count != b->count || a->pos != b->pos ||
            a->behind != b->behind)
            return false;
    }
    return true;
}

static void keep_host_spans(struct step *step, const struct kern_batch *batch) {
    if (batch->span_count > step->host_room) {
        mem_free(step->host);
        step->host_room = batch->span_count;
        step->host = static_cast<struct kern_span *>(
            mem_must_alloc((size_t)batch->span_count, sizeof *step->host));
    }
    memcpy(step->host, batch->spans, (size_t)batch->span_count * sizeof *step->host);
    step->rows = batch->rows;
    step->span_count = batch->span_count;
    step->batch_places = batch->places;
    step->batch_given = batch->given;
}

/* Host arrays of one batch, consecutive in one allocation: spans, tiles of each kind of heads, then
 * the int32s, of which places are three for each row. */
struct lists {
    char *mem;
    size_t bytes;
    struct prefill_tile *tiles[KINDS_MAX];
    struct span *spans;
    int32_t *row_span, *decode;
    struct kern_place *places; /* NULL: the batch has none */
    int32_t *ahead;            /* NULL: no rows see each other */
};

static bool any_together(const struct kern_batch *batch) {
    for (int i = 0; i < batch->given_count; i++)
        if (batch->given[i].together) return true;
    return false;
}

/* The most tiles of a kind. */
static size_t tiles_most(const struct heads_kind *kind, const struct kern_batch *batch) {
    return (size_t)batch->rows * (size_t)kind->shard.queries / PREFILL_ROWS +
           (size_t)batch->span_count;
}

static struct lists alloc_lists(const struct cuda *cuda, const struct kern_batch *batch) {
    size_t spans = (size_t)batch->span_count, rows = (size_t)batch->rows;
    size_t tiles = 0;
    struct lists l = {};
    for (int k = 0; k < cuda->kind_count; k++) tiles += tiles_most(&cuda->kinds[k], batch);
    l.bytes =
        tiles * sizeof *l.tiles[0] + spans * sizeof *l.spans + (rows + spans) * sizeof(int32_t);
    if (batch->places) l.bytes += rows * sizeof *l.places;
    const size_t ahead = l.bytes;
    if (any_together(batch)) l.bytes += rows * sizeof *l.ahead;
    l.mem = static_cast<char *>(mem_must_alloc(l.bytes, 1));
    l.spans = reinterpret_cast<struct span *>(l.mem);
    struct prefill_tile *next = reinterpret_cast<struct prefill_tile *>(l.spans + spans);
    for (int k = 0; k < cuda->kind_count; k++) {
        l.tiles[k] = next;
        next += tiles_most(&cuda->kinds[k], batch);
    }
    l.row_span = reinterpret_cast<int32_t *>(next);
    l.decode = l.row_span + rows;
    if (batch->places) {
        l.places = reinterpret_cast<struct kern_place *>(l.decode + spans);
        memcpy(l.places, batch->places, rows * sizeof *l.places);
    }
    if (l.bytes > ahead) l.ahead = reinterpret_cast<int32_t *>(l.mem + ahead);
    return l;
}

/* Rows that see each other see up to the last one of them. */
static void list_ahead(const struct lists *l, const struct kern_batch *batch) {
    if (l->ahead) memset(l->ahead, 0, (size_t)batch->rows * sizeof *l->ahead);
    for (int g = 0; g < batch->given_count; g++) {
        const struct kern_given *given = &batch->given[g];
        if (!given->together) continue;
        CHECK(given->row >= 0 && given->count > 0 && given->row <= batch->rows - given->count);
        const struct kern_span *span = &batch->spans[l->row_span[given->row]];
        CHECK(given->row + given->count <= span->row + span->count);
        for (int i = 0; i < given->count; i++) l->ahead[given->row + i] = given->count - 1 - i;
    }
}

static void stage_lists(struct cuda *cuda, const struct lists *l) {
    struct step *step = &cuda->step;
    const char *mem = static_cast<const char *>(device_stage(cuda->device, l->mem, l->bytes));
    auto place = [&](const void *host) {
        return mem ? mem + (static_cast<const char *>(host) - l->mem) : NULL;
    };
    step->spans = reinterpret_cast<const struct span *>(place(l->spans));
    for (int k = 0; k < cuda->kind_count; k++)
        step->tiles[k].list = reinterpret_cast<const struct prefill_tile *>(place(l->tiles[k]));
    step->row_span = reinterpret_cast<const int32_t *>(place(l->row_span));
    step->decode = reinterpret_cast<const int32_t *>(place(l->decode));
    step->places = l->places ? reinterpret_cast<const struct kern_place *>(place(l->places)) : NULL;
    step->ahead = l->ahead ? reinterpret_cast<const int32_t *>(place(l->ahead)) : NULL;
}

static struct span make_span(const struct cuda *cuda, const struct kern_span *from) {
    const struct slot *slot = &cuda->slots[from->slot];
    struct span s = {};
    s.slot = from->slot;
    s.row = from->row;
    s.count = from->count;
    s.pos = from->pos;
    s.place = from->pos - from->behind;
    s.window = rule_window(from->rule);
    s.ring = s.window > 0 ? slot->ring : NULL;
    s.adds = rule_adds(from->rule);
    bool scored = from->rule && from->rule->score == KERN_SCORE_ATTENTION;
    s.score = scored && !s.adds ? SCORE_NONE : 0;
    s.begins = !slot->in_use;
    return s;
}

/* Cuts the rows of a span into tiles of a kind, late ones first, because they see the most entries.
 */
static void cut_span(struct lists *l, struct prefill_tiles *tiles, int kind, int span, int rows) {
    const int last = (rows - 1) / PREFILL_ROWS * PREFILL_ROWS;
    for (int first = last; first >= 0; first -= PREFILL_ROWS)
        l->tiles[kind][tiles->count++] = {span, first};
}

/* Spans of one row decode; longer spans are cut into tiles. */
static void stage_batch(struct cuda *cuda, const struct kern_batch *batch) {
    struct step *step = &cuda->step;
    struct lists l = alloc_lists(cuda, batch);
    step->decode_count = 0;
    for (struct prefill_tiles &tiles : step->tiles) tiles.count = 0;
    step->keeps = false;
    for (bool &has : step->has_angles) has = false;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *s = &batch->spans[i];
        CHECK(s->row >= 0 && s->count > 0 && s->row <= batch->rows - s->count);
        l.spans[i] = make_span(cuda, s);
        step->keeps = step->keeps || l.spans[i].ring || l.spans[i].adds;
        for (int k = 0; k < s->count; k++) l.row_span[s->row + k] = i;
        if (s->count == 1) {
            l.decode[step->decode_count++] = i;
            continue;
        }
        for (int k = 0; k < cuda->kind_count; k++)
            cut_span(&l, &step->tiles[k], k, i, s->count * cuda->kinds[k].shard.queries);
    }
    list_ahead(&l, batch);
    keep_host_spans(step, batch);
    stage_lists(cuda, &l);
    mem_free(l.mem);
    if (!mass_stage(cuda, batch))
        step->spans = NULL; /* treated like missing memory for its own lists */
}

const struct step *step_of(struct cuda *cuda, const struct kern_batch *batch) {
    if (!same_batch(&cuda->step, batch)) stage_batch(cuda, batch);
    return &cuda->step;
}

/* Updates the host's knowledge of a slot after the step. */
static void note_span(struct cuda *cuda, const struct kern_span *s) {
    struct slot *slot = &cuda->slots[s->slot];
    slot->in_use = true;
    slot->next_pos = s->pos + s->count;
    slot->entries_most += (int64_t)cuda->pages.streams * s->count;
    /* Entries that were taken back may still be counted; a slot never holds more than fits its
     * pages. */
    const int64_t most = slot->pages * cuda->pages.page_slots;
    if (most > 0 && slot->entries_most > most) slot->entries_most = most;
    for (int i = s->count > slot->window ? s->count - slot->window : 0; i < s->count; i++)
        slot->ring_pos[(s->pos + i) % slot->window] = s->pos + i;
}

/* Starts a repeated region: a step that only decodes equals the last one with as many rows, because
 * lengths, tables and tokens are on the device. */
static void repeat_step(struct cuda *cuda, const struct kern_batch *batch) {
    if (batch->rows > GRAPH_ROWS_MAX || batch->rows != batch->span_count) return;
    if (cuda->eager || !device_may_repeat(cuda->device)) return;
    uint64_t key = (uint64_t)batch->rows * 2 + any_shared(cuda, batch);
    graph_begin(device_graphs(cuda->device), cuda->device, key);
}

/* Allocates all host memory and rooms that the step requires. */
static int prepare_step(struct cuda *cuda, const struct kern_batch *batch) {
    for (int i = 0; i < batch->span_count; i++)
        if (ring_take(cuda, &cuda->slots[batch->spans[i].slot], rule_window(batch->spans[i].rule)))
            return ERR_NOMEM;
    if (matmul_reserve(cuda, batch->rows)) return ERR_NOMEM;
    repeat_step(cuda, batch);
    stage_batch(cuda, batch);
    return cuda->step.spans ? 0 : ERR_NOMEM;
}

int op_begin_step(struct kern *kern, const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache);
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *s = &batch->spans[i];
        CHECK(s->slot >= 0 && s->slot < cuda->options.slots);
        CHECK(s->count > 0 && s->pos >= cuda->slots[s->slot].next_pos);
        if (s->pos > cuda->options.max_positions - s->count) return ERR_LIMIT;
        if (s->rule && !rule_fits(cuda, s->rule)) return ERR_UNSUPPORTED;
    }
    cache_changes(cuda);
    int rc = join_agree(cuda, prepare_step(cuda, batch));
    if (rc) {
        (void)cache_sync(cuda); /* reported here and not again */
        return rc;
    }
    append(cuda, batch);
    attend_plan(cuda);
    for (int i = 0; i < batch->span_count; i++) note_span(cuda, &batch->spans[i]);
    return 0;
}

/* The device has rejected a step or an eviction, for which the bounds were already lowered: nothing
 * is known of a slot but its tokens. */
static void forget_bounds(struct cuda *cuda) {
    for (int i = 0; i < cuda->options.slots; i++)
        cuda->slots[i].entries_most = (int64_t)cuda->pages.streams * cuda->slots[i].next_pos;
}

/* Reads the state once per step, together with the tokens if the step samples; later calls without
 * changes need no read. */
int cache_sync(struct cuda *cuda) {
    struct pages_state *state = &cuda->state;
    bool reads = cuda->has_cache && !cuda->state_known;
    cuda->step.rows = -1; /* staged lists are valid until the sync */
    graph_end(device_graphs(cuda->device), cuda->device);
    if (reads) device_fetch(cuda->device, state, cuda->pages.state, sizeof *state);
    int rc = device_sync(cuda->device);
    if (reads) cuda->state_known = rc == 0;
    if (rc || !reads || !state->error) return rc;
    device_zero(cuda->device, &cuda->pages.state->error, sizeof state->error);
    rc = state->error;
    state->error = 0;
    forget_bounds(cuda);
    return rc;
}

/* ---- Slots ---- */

/* A block per row: keeps the entries before `pos`, frees the other pages; a state goes as a whole,
 * with all entries. Also runs after errors: a slot must always be releasable. */
static __global__ void k_truncate(struct pages p, int slot, int32_t pos) {
    const int row = (int)blockIdx.x;
    const int32_t *table = pages_row(p, slot, row);
    int32_t *length = pages_length(p, slot, row);
    int old = *length, left = 0;
    if (pos > 0)
        left = row < p.streams ? pages_before(pages_of_stream(p, row), table, old, pos) : old;
    for (int page = pages_of_row(p, row, left) + (int)threadIdx.x; page < pages_of_row(p, row, old);
         page += (int)blockDim.x)
        pages_drop(p, table[page]);
    __syncthreads();
    if (threadIdx.x == 0) *length = left;
}

static void truncate_slot(struct cuda *cuda, int slot, int32_t pos) {
    cache_changes(cuda);
    LAUNCH(cuda->device, k_truncate, (unsigned)cuda->pages.rows, 64, 0, cuda->pages, slot, pos);
    struct slot *state = &cuda->slots[slot];
    int64_t most = (int64_t)cuda->pages.streams * pos;
    if (state->next_pos > pos) state->next_pos = pos;
    if (state->entries_most > most) state->entries_most = most;
}

int op_truncate(struct kern *kern, int slot, int32_t pos) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && slot >= 0 && slot < cuda->options.slots && pos >= 0);
    if (cuda->options.states > 0 && cuda->slots[slot].next_pos > pos) return ERR_UNSUPPORTED;
    truncate_slot(cuda, slot, pos);
    return 0;
}

void op_release(struct kern *kern, int slot) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && slot >= 0 && slot < cuda->options.slots);
    if (cuda->slots[slot].in_use) truncate_slot(cuda, slot, 0);
    ring_give(cuda, &cuda->slots[slot]);
    cuda->forked_entries -= cuda->slots[slot].forked;
    cuda->slots[slot] = {};
}

static __device__ void share_row(const struct pages &p, int32_t *to, const int32_t *from,
                                 int pages) {
    for (int page = threadIdx.x; page < pages; page += (int)blockDim.x) {
        to[page] = from[page];
        atomicAdd(&p.refs[from[page]], 1u);
    }
}

static __global__ void k_fork(struct pages p, int from, int to) {
    int row = blockIdx.x, length = *pages_length(p, from, row);
    share_row(p, pages_row(p, to, row), pages_row(p, from, row), pages_of_row(p, row, length));
    if (threadIdx.x != 0) return;
    *pages_length(p, to, row) = length;
    if (row >= p.streams || p.stream_places[row].head > 0) return;
    const int layer = p.stream_places[row].layer;
    p.weights[(int64_t)to * p.layers + layer] = p.weights[(int64_t)from * p.layers + layer];
}

int op_fork(struct kern *kern, int from, int to) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && from >= 0 && from < cuda->options.slots);
    CHECK(to >= 0 && to < cuda->options.slots);
    CHECK(cuda->slots[from].in_use && !cuda->slots[to].in_use);
    struct slot *source = &cuda->slots[from], *target = &cuda->slots[to];
    int rc = ring_take(cuda, target, source->window);
    if (!rc) rc = attend_grow(cuda, cuda->forked_entries + source->entries_most);
    rc = join_agree(cuda, rc);
    if (rc) return rc;
    cache_changes(cuda);
    LAUNCH(cuda->device, k_fork, (unsigned)cuda->pages.rows, 64, 0, cuda->pages, from, to);
    if (source->ring)
        device_copy(cuda->device, target->ring, source->ring, ring_bytes(cuda, source->window));
    source->shared = true;
    struct slot own = *target;
    *target = *source;
    target->ring = own.ring;
    target->adds = own.adds;
    target->pages = own.pages;
    target->forked = source->entries_most;
    cuda->forked_entries += target->forked;
    return 0;
}

/* ---- Reports ---- */

/* A block per stream: copies its entries to their place in the list of all. */
static __global__ void k_gather(struct pages all, int slot, const int32_t *first, int32_t *pos,
                                float *log_beta) {
    int stream = blockIdx.x, length = *pages_length(all, slot, stream);
    const struct pages p = pages_of_stream(all, stream);
    const int32_t *table = pages_table(p, slot, stream);
    for (int i = threadIdx.x; i < length; i += (int)blockDim.x) {
        int64_t side = pages_side(p, table, i), to = (int64_t)first[stream] + i;
        pos[to] = p.pos[side];
        log_beta[to] = p.log_beta[side];
    }
}

static int report_entries(struct cuda *cuda, int slot, const int32_t *lengths,
                          struct kern_report *report) {
    const struct pages *p = &cuda->pages;
    size_t count = report->entries, bytes = count * sizeof(int32_t);
    int32_t *first = static_cast<int32_t *>(mem_try_alloc((size_t)p->streams, sizeof *first));
    char *mem = static_cast<char *>(room_take(cuda, &cuda->gather, 2 * bytes));
    const void *staged = NULL;
    for (int s = 1; first && s < p->streams; s++) first[s] = first[s - 1] + lengths[s - 1];
    if (first && mem)
        staged = device_stage(cuda->device, first, (size_t)p->streams * sizeof *first);
    mem_free(first);
    if (!staged) { /* reported here and not to later steps */
        int rc = cache_sync(cuda);
        return rc ? rc : ERR_NOMEM;
    }
    LAUNCH(cuda->device, k_gather, (unsigned)p->streams, THREADS, 0, *p, slot,
           static_cast<const int32_t *>(staged), reinterpret_cast<int32_t *>(mem),
           reinterpret_cast<float *>(mem + bytes));
    int rc = 0;
    if (report->positions) rc = device_download(cuda->device, report->positions, mem, bytes);
    if (!rc && report->log_beta)
        rc = device_download(cuda->device, report->log_beta, mem + bytes, bytes);
    return rc;
}

int op_report(struct kern *kern, int slot, struct kern_report *report) {
    struct cuda *cuda = cuda_of(kern);
    const struct pages *p = &cuda->pages;
    CHECK(cuda->has_cache && slot >= 0 && slot < cuda->options.slots);
    size_t rows = (size_t)p->rows;
    int32_t *lengths = static_cast<int32_t *>(mem_try_alloc(rows, sizeof *lengths));
    if (!lengths) return ERR_NOMEM;
    report->entries = 0;
    report->pages = 0;
    int rc = device_download(cuda->device, lengths, p->lengths + (size_t)slot * rows,
                             rows * sizeof *lengths);
    for (int row = p->streams; row < p->rows && !rc; row++) report->pages += lengths[row];
    for (int layer = 0, s = 0; layer < p->layers && !rc; layer++)
        for (const int end = s + cuda->layers[layer].heads; s < end; s++) {
            const int slots = cuda->layers[layer].slots;
            if (report->lengths) report->lengths[s] = lengths[s];
            report->entries += (size_t)lengths[s];
            report->pages += (lengths[s] + slots - 1) / slots;
        }
    report->rank_entries = report->entries;
    report->rank_pages = report->pages;
    report->state_bytes =
        cuda->slots[slot].in_use
            ? (size_t)cuda->options.states * (size_t)cuda->options.state_floats * sizeof(float)
            : 0;
    if (!rc && report->entries && (report->positions || report->log_beta))
        rc = report->entries > report->entries_max ? ERR_LIMIT
                                                   : report_entries(cuda, slot, lengths, report);
    mem_free(lengths);
    return rc;
}

void op_cache_stats(struct kern *kern, struct kern_cache_stats *stats) {
    struct cuda *cuda = cuda_of(kern);
    struct pages_state state = cuda->state;
    if (!cuda->state_known)
        (void)device_download(cuda->device, &state, cuda->pages.state, sizeof state);
    stats->pages_used = cuda->pages.count - (int64_t)(state.tail - state.head);
    stats->rank_pages_used = stats->pages_used;
    stats->entries_evicted = state.evicted;
    stats->rank_cap_hits = state.hits;
}
