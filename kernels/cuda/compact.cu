/* Closes the gaps that evicted entries leave: in place, in order, and with many blocks at once
 * however long one stream is.
 *
 * k_keep: the kept entries of a chunk of PRODUCT_KEYS entries. k_count: the destination of each
 * chunk; the missing pages. k_own: copies shared pages that will be written. k_compact: the move; a
 * block takes one chunk after the other, of any stream. k_close: the new length; frees the pages
 * behind it.
 *
 * The move needs no second buffer. The survivors of a stream go to places 0, 1, 2, ... in their
 * order, so none moves up: the places that chunk c writes, [before, before + count), end before
 * chunk c + 1 begins, and being no longer than a chunk they lie in at most two chunks, both c or
 * earlier ones. Survivors have distinct places, so blocks never write the same place; the only
 * hazard is a write where another chunk's entries have not been read. So each block takes the next
 * chunk by an atomic ticket, reads its survivors into shared memory, sets chunk.taken, waits until
 * chunk.taken is set for the chunks that it writes into, and writes.
 *
 * The wait ends: tickets ascend along a stream, so an earlier chunk has been taken by a block that
 * already runs, and between its ticket and setting chunk.taken a block does not wait. The number of
 * concurrent blocks does not matter. A writer has seen chunk.taken of the readers (a fence on both
 * sides), so no reader can find later data. Where keys and values are moved by two launches, the
 * second one has its own tickets and waits for later values of chunk.taken. The method, one flag
 * passed between neighbours in the order of tickets, is that of Gomez-Luna, Chang, Sung, Guil and
 * Hwu, "In-Place Data Sliding Algorithms for Many-Core Architectures" (ICPP 2015); there each block
 * waits for its neighbour, and flags pass one after the other along the whole array; here a block
 * waits for the two chunks whose places it takes.
 *
 * The kept entries and their places depend on the cutoff alone. The order in which pages return to
 * the ring depends, as everywhere, on the schedule: no answer depends on a page's number. */
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/evict.cuh"

#define THREADS      128
#define MOVE_THREADS 256
#define MOVE_BLOCKS  3            /* blocks per multiprocessor, if shared memory allows */
#define MOVE_ROOM    (200 * 1024) /* shared memory per multiprocessor */
#define AHEAD        8            /* pieces of 16 bytes that a thread reads ahead */
#define BLOCKS_EACH  8            /* blocks per multiprocessor of kernels that read only numbers */

static_assert(PRODUCT_KEYS == THREADS, "a thread for every entry of a chunk");
static_assert(PRODUCT_KEYS % (PAGE_SIDE / 64) == 0, "chunks are whole pages");

/* ---- Selection ---- */

/* Blocks take chunks by number. The lead of every state is initially its length. */
static __global__ void __launch_bounds__(THREADS) k_keep(const struct evict_args a) {
    if (pages_failed(a.streams.pages)) return;
    int count = *a.streams.item_count, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.x == 0 && threadIdx.x < MOVES_MAX) a.tickets[threadIdx.x] = 0;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        struct stream_state &state = a.streams.states[item.state];
        const struct pages p = pages_with(a.streams.pages, state.place.slots);
        const struct due &d = a.due[state.subject];
        const int32_t *table = pages_table(p, d.slot, state.stream);
        const struct cutoff cutoff = final_cutoff(a, d, state);
        int entry = item.chunk * PRODUCT_KEYS + (int)threadIdx.x;
        bool held = entry < state.length;
        bool stays = held && is_kept(p, pages_side(p, table, entry), state.stream, cutoff, d.least);
        uint32_t kept = __ballot_sync(WARP_ALL, stays),
                 gone = __ballot_sync(WARP_ALL, held) & ~kept;
        if (lane == 0) a.chunks[i].kept[warp] = kept;
        if (lane == 0 && gone) atomicMin(&state.lead, entry + __ffs((int)gone) - 1);
        if (threadIdx.x == 0) a.chunks[i].taken = 0;
    }
}

static __device__ __forceinline__ int chunk_count(const struct chunk &chunk) {
    int count = 0;
    for (int warp = 0; warp < PRODUCT_KEYS / 32; warp++) count += __popc(chunk.kept[warp]);
    return count;
}

/* An eviction writes pages [from, to) of a stream: those behind the first gap, or all kept pages
 * where entries remember their score. */
struct written {
    int from, to;
};

static __device__ struct written pages_written(const struct pages &p, const struct due &d,
                                               const struct stream_state &state) {
    struct written w = {d.remembers ? 0 : state.lead / p.page_slots, 0};
    w.to = state.lead < state.kept || d.remembers ? pages_for(p, state.kept) : w.from;
    return w;
}

/* Block (state). */
static __global__ void __launch_bounds__(THREADS) k_count(const struct evict_args a) {
    SHARED_MEMORY(shared);
    int *room = (int *)shared, kept = 0, need = 0, more;
    if (pages_failed(a.streams.pages)) return;
    struct stream_state &state = a.streams.states[blockIdx.x];
    const struct pages p = pages_with(a.streams.pages, state.place.slots);
    const struct due &d = a.due[state.subject];
    const int32_t *table = pages_table(p, d.slot, state.stream);
    for (int first = 0; first < state.work; first += THREADS) {
        int i = first + (int)threadIdx.x;
        struct chunk *chunk = &a.chunks[state.item + i];
        int before = kept + block_scan(i < state.work ? chunk_count(*chunk) : 0, room, &more);
        if (i < state.work) chunk->before = before;
        kept += more;
    }
    if (threadIdx.x == 0) state.kept = kept;
    __syncthreads();
    struct written w = pages_written(p, d, state);
    for (int page = w.from + (int)threadIdx.x; page < w.to; page += THREADS)
        need += p.refs[table[page]] > 1;
    need = block_total(need, room);
    if (threadIdx.x == 0 && need) atomicAdd(&p.state->need, (unsigned long long)need);
}

/* ---- Pages with other owners ---- */

/* Blocks take chunks by number, and own the written pages of a chunk. One sequence per launch, so
 * no other block drops the same page. */
static __global__ void __launch_bounds__(THREADS) k_own(const struct evict_args a) {
    SHARED_MEMORY(shared);
    if (pages_failed(a.streams.pages)) return;
    int count = *a.streams.item_count;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        const struct stream_state &state = a.streams.states[item.state];
        const struct pages p = pages_with(a.streams.pages, state.place.slots);
        const struct due &d = a.due[state.subject];
        struct written w = pages_written(p, d, state);
        int each = PRODUCT_KEYS / p.page_slots, from = item.chunk * each, to = from + each;
        pages_own(p, pages_table(p, d.slot, state.stream), from > w.from ? from : w.from,
                  to < w.to ? to : w.to, (int32_t *)shared);
    }
}

/* ---- The move ---- */

struct moved {
    int32_t pos;
    float log_beta, score;
    uint16_t factors[2]; /* factors of key and value, where rows are codes */
};

struct place {
    int32_t page, row;
};

/* A chunk being moved: consecutive survivors. All in shared memory. */
struct load {
    uint4 *rows; /* [survivor][pieces of 16 bytes] */
    struct moved *side;
    struct place *at; /* source places; then destinations */
    int *item;
};

/* A launch of k_compact moves the entries of those streams whose pages have `slots` entries: keys,
 * values and side records together. Where heads have WIDE_DIM numbers, a chunk's keys and values do
 * not fit into a block's shared memory together: a first launch moves keys and side records, a
 * second one values. */
struct move {
    int slots;
    int index;  /* the number of its ticket */
    int before; /* launches that have moved other sides of the same entries */
};
#define WIDE_PIECES (2 * WIDE_DIM / (int)sizeof(uint4))

/* Pieces of an entry that are moved together: of K, then of V, PIECES each, or of one of them.
 * PIECES 0: of a latent vector, as many as its row has. */
template <int PIECES>
static __host__ __device__ __forceinline__ int entry_pieces(const struct pages &p) {
    return PIECES == WIDE_PIECES ? PIECES : PIECES ? 2 * PIECES : p.row_bytes / (int)sizeof(uint4);
}

static __host__ __device__ __forceinline__ int load_bytes(int pieces) {
    return PRODUCT_KEYS *
               (int)(pieces * sizeof(uint4) + sizeof(struct moved) + sizeof(struct place)) +
           16;
}

static __device__ __forceinline__ struct load load_open(char *shared, int pieces) {
    struct load load;
    load.rows = (uint4 *)shared;
    load.side = (struct moved *)(load.rows + PRODUCT_KEYS * pieces);
    load.at = (struct place *)(load.side + PRODUCT_KEYS);
    load.item = (int *)(load.at + PRODUCT_KEYS);
    return load;
}

/* The place of an entry: a page has PAGE_SIDE / (16 PIECES) rows of a side. */
template <int PIECES>
static __device__ __forceinline__ struct place place_of(const struct pages &p, const int32_t *table,
                                                        int entry) {
    const int P = PIECES ? PAGE_SIDE / (16 * (PIECES ? PIECES : 1)) : p.page_slots;
    return {table[entry / P], entry % P};
}

/* Piece `piece` of an entry, from side `first` on. */
template <int PIECES>
static __device__ __forceinline__ uint4 *piece_at(const struct pages &p, struct place at, int piece,
                                                  int first) {
    if (PIECES == WIDE_PIECES)
        return (uint4 *)(pages_at(p, at.page) + page_chunk(16 * PIECES, first, at.row, piece));
    const int side = PIECES ? piece / (PIECES ? PIECES : 1) : 0;
    return (uint4 *)(pages_at(p, at.page) +
                     (PIECES ? page_chunk(16 * PIECES, side, at.row, piece - side * PIECES)
                             : panel_chunk(p.page_slots, at.row, piece)));
}

/* Candidates store their new score if the rule has a history; recent entries have none yet. */
static __device__ __forceinline__ float score_of(const struct evict_args &a, const struct due &d,
                                                 const struct stream_state &state, int entry,
                                                 int64_t side) {
    bool fresh = d.remembers && entry < state.candidates;
    return fresh ? a.fresh[state.first + entry] : a.streams.pages.score[side];
}

/* Reads the survivors' side records, if this launch moves them, and source places. */
template <int PIECES>
static __device__ void take_side(const struct evict_args &a, const struct pages &p,
                                 const struct due &d, const struct stream_state &state,
                                 const struct chunk &chunk, const struct load &load, int first,
                                 bool moves) {
    const int32_t *table = pages_table(p, d.slot, state.stream);
    int warp = threadIdx.x / 32, rank = 0;
    if (threadIdx.x >= PRODUCT_KEYS || !(chunk.kept[warp] >> threadIdx.x % 32 & 1)) return;
    for (int w = 0; w < warp; w++) rank += __popc(chunk.kept[w]);
    rank += __popc(chunk.kept[warp] & ((1u << threadIdx.x % 32) - 1));
    int entry = first + (int)threadIdx.x;
    struct place at = place_of<PIECES>(p, table, entry);
    int64_t side = pages_side_at(p, at.page, at.row);
    load.at[rank] = at;
    if (!moves) return;
    load.side[rank] = {p.pos[side], p.log_beta[side], score_of(a, d, state, entry, side), {0, 0}};
    for (int value = 0; value < 2 && p.scaled; value++)
        load.side[rank].factors[value] = *pages_factor(p, at.page, value, at.row);
}

template <int PIECES>
static __device__ void take_rows(const struct pages &p, const struct load &load, int count,
                                 int side) {
    const int each = entry_pieces<PIECES>(p), many = count * each;
    for (int i = threadIdx.x; i < many; i += AHEAD * MOVE_THREADS) {
        uint4 piece[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int at = i + k * MOVE_THREADS;
            if (at < many) piece[k] = *piece_at<PIECES>(p, load.at[at / each], at % each, side);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (i + k * MOVE_THREADS < many) load.rows[i + k * MOVE_THREADS] = piece[k];
    }
}

/* Writes the survivors to the places from `to` on. */
template <int PIECES>
static __device__ void put(const struct pages &p, const int32_t *table, const struct load &load,
                           int to, int count, int first_side) {
    const int each = entry_pieces<PIECES>(p);
    int rank = threadIdx.x;
    if (rank < count) {
        struct place at = place_of<PIECES>(p, table, to + rank);
        int64_t side = pages_side_at(p, at.page, at.row);
        load.at[rank] = at;
        if (first_side == 0) {
            p.pos[side] = load.side[rank].pos;
            p.log_beta[side] = load.side[rank].log_beta;
            p.score[side] = load.side[rank].score;
        }
        for (int value = 0; value < 2 && p.scaled; value++)
            *pages_factor(p, at.page, value, at.row) = load.side[rank].factors[value];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * each; i += MOVE_THREADS)
        *piece_at<PIECES>(p, load.at[i / each], i % each, first_side) = load.rows[i];
}

/* Signals that the chunk's entries have been read, in this launch and in those before. */
static __device__ void say_taken(struct chunk *chunk, int before) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    *(volatile uint32_t *)&chunk->taken = (uint32_t)before + 1;
}

/* Waits until the entries at places [to, to + count) of the stream have been read. */
static __device__ void wait_taken(const struct chunk *stream, int own, int to, int count,
                                  int before) {
    if (threadIdx.x < 2) {
        int chunk = (threadIdx.x == 0 ? to : to + count - 1) / PRODUCT_KEYS;
        while (chunk < own && *(const volatile uint32_t *)&stream[chunk].taken <= (uint32_t)before)
            continue;
        __threadfence();
    }
    __syncthreads();
}

/* The next untaken chunk. */
static __device__ __forceinline__ int next_item(const struct evict_args &a, const struct load &load,
                                                int move) {
    __syncthreads(); /* shared data has been read */
    if (threadIdx.x == 0) *load.item = atomicAdd(a.tickets + move, 1);
    __syncthreads();
    return *load.item;
}

/* A chunk whose entries all stay in place: only their scores are written. */
static __device__ void renew_scores(const struct evict_args &a, const struct pages &p,
                                    const struct due &d, const struct stream_state &state,
                                    int first, int count) {
    int entry = first + (int)threadIdx.x;
    if (!d.remembers || (int)threadIdx.x >= count) return;
    int64_t side = pages_side(p, pages_table(p, d.slot, state.stream), entry);
    p.score[side] = score_of(a, d, state, entry, side);
}

template <int PIECES>
static __global__ void __launch_bounds__(MOVE_THREADS, MOVE_BLOCKS)
    k_compact(const struct evict_args a, const struct move move) {
    SHARED_MEMORY(shared);
    if (pages_failed(a.streams.pages)) return;
    const struct pages p = pages_with(a.streams.pages, move.slots);
    struct load load = load_open(shared, entry_pieces<PIECES>(p));
    int items = *a.streams.item_count;
    for (int i = next_item(a, load, move.index); i < items; i = next_item(a, load, move.index)) {
        const struct item item = a.streams.items[i];
        const struct stream_state &state = a.streams.states[item.state];
        if (state.place.slots != move.slots) continue;
        const struct due &d = a.due[state.subject];
        struct chunk *chunk = &a.chunks[i];
        int first = item.chunk * PRODUCT_KEYS, to = chunk->before, count = chunk_count(*chunk);
        int held = state.length - first < PRODUCT_KEYS ? state.length - first : PRODUCT_KEYS;
        if (to == first && count == held) {
            if (move.before == 0) renew_scores(a, p, d, state, first, count);
            continue; /* no later chunk writes here */
        }
        take_side<PIECES>(a, p, d, state, *chunk, load, first, move.before == 0);
        __syncthreads();
        take_rows<PIECES>(p, load, count, move.before);
        say_taken(chunk, move.before);
        if (count == 0) continue;
        wait_taken(chunk - item.chunk, item.chunk, to, count, move.before);
        put<PIECES>(p, pages_table(p, d.slot, state.stream), load, to, count, move.before);
    }
}

/* Ends the eviction of a stream: drops its emptied pages. Grid: a block of threads for each state.
 */
static __global__ void k_close(const struct evict_args a) {
    if (pages_failed(a.streams.pages)) return;
    const struct stream_state &state = a.streams.states[blockIdx.x];
    const struct pages p = pages_with(a.streams.pages, state.place.slots);
    int slot = a.due[state.subject].slot, gone = state.length - state.kept;
    const int32_t *table = pages_table(p, slot, state.stream);
    for (int page = pages_for(p, state.kept) + (int)threadIdx.x; page < pages_for(p, state.length);
         page += (int)blockDim.x)
        pages_drop(p, table[page]);
    if (threadIdx.x != 0) return;
    *pages_length(p, slot, state.stream) = state.kept;
    if (gone > 0) atomicAdd(&p.state->evicted, (unsigned long long)gone);
}

/* ---- The host's side ---- */

static unsigned blocks_of(const struct cuda *cuda, int each) {
    return (unsigned)(each * device_processors(cuda->device));
}

void compact_room(struct pieces *room, struct evict_args *args) {
    args->chunks = piece<struct chunk>(room, (size_t)args->streams.items_max);
    args->tickets = piece<int32_t>(room, MOVES_MAX);
}

void compact_count(struct cuda *cuda, const struct evict_args &args) {
    LAUNCH(cuda->device, k_keep, blocks_of(cuda, BLOCKS_EACH), THREADS, 0, args);
    LAUNCH(cuda->device, k_count, (unsigned)args.streams.state_count, THREADS,
           THREADS / 32 * sizeof(int), args);
}

void compact_own(struct cuda *cuda, const struct evict_args &args) {
    LAUNCH(cuda->device, k_own, blocks_of(cuda, BLOCKS_EACH), THREADS, sizeof(int32_t), args);
}

template <int PIECES>
static void move_as(struct cuda *cuda, const struct evict_args &args, struct move move) {
    const int shared = load_bytes(entry_pieces<PIECES>(cuda->pages));
    int each = MOVE_ROOM / shared;
    if (each > MOVE_BLOCKS) each = MOVE_BLOCKS;
    LAUNCH(cuda->device, (k_compact<PIECES>), blocks_of(cuda, each), MOVE_THREADS, (size_t)shared,
           args, move);
}

/* Launches what moves the entries of rows of so many bytes. */
static void move_rows(struct cuda *cuda, const struct evict_args &args, struct move move,
                      int row_bytes) {
    if (cuda->pages.latent) {
        move_as<0>(cuda, args, move);
        return;
    }
    if (row_bytes == 64) move_as<4>(cuda, args, move);
    if (row_bytes == 128) move_as<8>(cuda, args, move);
    if (row_bytes == 256) move_as<16>(cuda, args, move);
    if (row_bytes == 512) move_as<32>(cuda, args, move);
    if (row_bytes == 16 * WIDE_PIECES) move_as<WIDE_PIECES>(cuda, args, move);
}

/* Are keys and values moved one after the other? */
static bool moves_sides(const struct cuda *cuda, int row_bytes) {
    return !cuda->pages.latent && row_bytes == 16 * WIDE_PIECES;
}

size_t compact_shared(const struct cuda *cuda) {
    int most = 0;
    for (int k = 0; k < cuda->kind_count; k++) {
        const int row = cuda->kinds[k].row_bytes;
        const int sides = cuda->pages.latent || moves_sides(cuda, row) ? 1 : 2;
        const int bytes = load_bytes(sides * row / (int)sizeof(uint4));
        if (bytes > most) most = bytes;
    }
    return (size_t)most;
}

/* Kinds of heads with equal rows are moved together. */
static bool moved_before(const struct cuda *cuda, int kind) {
    for (int k = 0; k < kind; k++)
        if (cuda->kinds[k].page_slots == cuda->kinds[kind].page_slots) return true;
    return false;
}

void compact_all(struct cuda *cuda, const struct evict_args &args) {
    struct move move = {};
    for (int k = 0; k < cuda->kind_count; k++) {
        const struct heads_kind *kind = &cuda->kinds[k];
        if (moved_before(cuda, k)) continue;
        move.slots = kind->page_slots;
        for (move.before = 0; move.before <= moves_sides(cuda, kind->row_bytes); move.before++) {
            move_rows(cuda, args, move, kind->row_bytes);
            move.index++;
        }
    }
    LAUNCH(cuda->device, k_close, (unsigned)args.streams.state_count, THREADS, 0, args);
}
