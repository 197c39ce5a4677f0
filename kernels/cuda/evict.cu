/* Eviction: score every entry, find the lowest rank that is kept, close the gaps.
 *
 * An entry's rank is (key, pos, ~stream), compared in this order, higher is kept: the score as an
 * order-preserving integer, then the newer position, then the lower layer and head. Entries compete
 * in groups: a stream, the heads of a layer, or the whole sequence. The cut of every group is found
 * by radix select, eleven bits at a time: a histogram of the entries that agree with what is
 * decided so far, then the bin that the wanted rank falls in. Three passes decide the key; the
 * passes over positions and streams do something only where a tie crosses the cut.
 *
 * No list of entries is made: compaction compares again. It is stable and in place: a tile is read
 * before its destination, which lies before it, is written. */
#include <string.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/score.cuh"

#define THREADS         256
#define BINS            2048
#define KEY_PROTECTED   0xffffffffu /* above every score; no float has this key */
#define STREAM_MASK     0xfffffu
#define GROUP_BLOCKS    32 /* of a select, for groups of many streams */
#define TILE            32 /* entries that compaction moves at a time */
#define COMPACT_THREADS 128

enum { FIELD_KEY, FIELD_POS, FIELD_STREAM, FIELDS };

/* The lowest rank that is kept, as far as it is known. */
struct cut {
    uint32_t value[FIELDS];
    uint32_t wanted; /* of the entries that agree with `value` so far, how many are kept */
    uint32_t done;   /* all of them */
    uint32_t blocks; /* that have added to the histogram of this pass */
};

/* One sequence on the device. */
struct due {
    int32_t slot, tokens, sinks, recent;
    int32_t recency; /* rank by position alone */
    float horizon;
    int32_t group_streams, groups, group_blocks; /* how entries compete; blocks per group */
    uint32_t group_keep;
    int64_t first_group, first_bins, first_stream; /* of this sequence, in the arrays below */
};

struct evict_args {
    struct pages pages;
    const struct due *due;
    struct cut *cuts;
    uint32_t *bins;  /* [groups of several blocks][BINS], zero before every pass */
    int32_t *leads;  /* [streams of all]: entries before the first that goes */
    int32_t *counts; /* [streams of all]: entries kept */
};

/* ---- Keys ------------------------------------------------------------------------------------ */

static __device__ __forceinline__ uint32_t entry_key(const struct due &d, int32_t pos,
                                                     float log_beta) {
    if (pos < d.sinks || pos >= d.tokens - d.recent) return KEY_PROTECTED;
    if (d.recency) return (uint32_t)pos;
    return float_key(cuda_score_retention(log_beta, d.tokens - pos, d.horizon));
}

/* Block (stream, due). */
static __global__ void k_score(const struct evict_args a) {
    const struct pages &p = a.pages;
    if (pages_failed(p)) return;
    const struct due d = a.due[blockIdx.y];
    int length = *pages_length(p, d.slot, blockIdx.x);
    const int32_t *table = pages_table(p, d.slot, blockIdx.x);
    for (int i = threadIdx.x; i < length; i += (int)blockDim.x) {
        int64_t side = pages_side(p, table, i);
        p.keys[side] = entry_key(d, p.pos[side], p.log_beta[side]);
    }
}

/* ---- The cut --------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t rank_field(const struct pages &p, int64_t side,
                                                      int stream, int field) {
    if (field == FIELD_KEY) return p.keys[side];
    if (field == FIELD_POS) return (uint32_t)p.pos[side];
    return STREAM_MASK - (uint32_t)stream;
}

/* -1, 0, 1: how the entry's first `fields` fields compare with the cut's. */
static __device__ __forceinline__ int compare_rank(const struct pages &p, int64_t side, int stream,
                                                   const struct cut &cut, int fields) {
    for (int f = 0; f < fields; f++) {
        uint32_t mine = rank_field(p, side, stream, f);
        if (mine != cut.value[f]) return mine > cut.value[f] ? 1 : -1;
    }
    return 0;
}

struct pass {
    int field, shift, bits;
};

/* Adds the entries of a stream that agree with the cut so far to the block's histogram. */
static __device__ void count_stream(const struct pages &p, const struct due &d, int stream,
                                    const struct cut &cut, struct pass pass, uint32_t *bins) {
    uint32_t mask = (1u << pass.bits) - 1, decided = ~((2u << (pass.shift + pass.bits - 1)) - 1);
    int length = *pages_length(p, d.slot, stream);
    const int32_t *table = pages_table(p, d.slot, stream);
    for (int i = threadIdx.x; i < length; i += (int)blockDim.x) {
        int64_t side = pages_side(p, table, i);
        if (compare_rank(p, side, stream, cut, pass.field) != 0) continue;
        uint32_t value = rank_field(p, side, stream, pass.field);
        if ((value & decided) == (cut.value[pass.field] & decided))
            atomicAdd(&bins[value >> pass.shift & mask], 1u);
    }
}

/* Narrows the cut to one bin. The first pass sees every entry of the group, so it also learns
 * whether anything has to go at all. */
static __device__ void pick_bin(struct cut *cut, uint32_t *bins, struct pass pass, bool first,
                                uint32_t *room, int *found) {
    uint32_t mine = 0, all, before;
    if (first) {
        for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x) mine += bins[i];
        block_scan(mine, room, &all);
        if (all <= cut->wanted) {
            __syncthreads();
            if (threadIdx.x == 0) cut->done = 1; /* value 0: below everything */
            return;
        }
    }
    uint32_t wanted = cut->wanted;
    int bin = block_pick<BINS>(bins, wanted, room, found, &before);
    if (threadIdx.x != 0) return;
    cut->value[pass.field] |= (uint32_t)bin << pass.shift;
    cut->wanted = wanted - before;
    if (bins[bin] == wanted - before) cut->done = 1; /* later fields: 0, all who agree stay */
}

/* Block (group * group_blocks + part, due). The last block of a group to arrive picks. */
static __global__ void k_select(const struct evict_args a, struct pass pass, bool first) {
    SHARED_MEMORY(shared);
    uint32_t *mine = (uint32_t *)shared, *room = mine + BINS;
    int *found = (int *)(room + THREADS / 32);
    const struct pages &p = a.pages;
    const struct due d = a.due[blockIdx.y];
    if (pages_failed(p) || (int)blockIdx.x >= d.groups * d.group_blocks) return;
    int group = (int)blockIdx.x / d.group_blocks, part = (int)blockIdx.x % d.group_blocks;
    struct cut *cut = &a.cuts[d.first_group + group];
    if (cut->done) return;
    for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x) mine[i] = 0;
    __syncthreads();
    for (int s = part; s < d.group_streams; s += d.group_blocks)
        count_stream(p, d, group * d.group_streams + s, *cut, pass, mine);
    __syncthreads();
    if (d.group_blocks > 1) {
        uint32_t *all = a.bins + (d.first_bins + group) * BINS;
        for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x)
            if (mine[i]) atomicAdd(&all[i], mine[i]);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) *found = (int)atomicAdd(&cut->blocks, 1u);
        __syncthreads();
        bool last = *found == d.group_blocks - 1;
        __syncthreads();
        if (!last) return;
        for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x) {
            mine[i] = *(volatile uint32_t *)&all[i];
            all[i] = 0;
        }
        if (threadIdx.x == 0) cut->blocks = 0;
        __syncthreads();
    }
    pick_bin(cut, mine, pass, first, room, found);
}

/* ---- Pages with other owners ------------------------------------------------------------------
 */

static __device__ __forceinline__ bool is_kept(const struct pages &p, const int32_t *table,
                                               int entry, int stream, const struct cut &cut) {
    return compare_rank(p, pages_side(p, table, entry), stream, cut, FIELDS) >= 0;
}

/* Block (stream, due): where the first gap is and how many stay. */
static __global__ void k_count(const struct evict_args a) {
    SHARED_MEMORY(shared);
    int *lead = (int *)shared, *kept = lead + 1;
    const struct pages &p = a.pages;
    if (pages_failed(p)) return;
    const struct due d = a.due[blockIdx.y];
    int stream = blockIdx.x, length = *pages_length(p, d.slot, stream);
    const int32_t *table = pages_table(p, d.slot, stream);
    const struct cut cut = a.cuts[d.first_group + stream / d.group_streams];
    if (threadIdx.x == 0) {
        *lead = length;
        *kept = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += (int)blockDim.x) {
        if (is_kept(p, table, i, stream, cut))
            atomicAdd(kept, 1);
        else
            atomicMin(lead, i);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    a.leads[d.first_stream + stream] = *lead;
    a.counts[d.first_stream + stream] = *kept;
    int from = *lead / p.page_slots, to = *lead < *kept ? pages_for(p, *kept) : from;
    unsigned long long need = 0;
    for (int page = from; page < to; page++) need += p.refs[table[page]] > 1;
    if (need) atomicAdd(&p.state->need, need);
}

/* Block (stream, due): closing the gaps writes in place, so the pages it writes become this
 * stream's own first. One sequence per launch. */
static __global__ void k_own(const struct evict_args a) {
    SHARED_MEMORY(shared);
    int32_t *fresh = (int32_t *)shared;
    const struct pages &p = a.pages;
    if (pages_failed(p)) return;
    const struct due d = a.due[blockIdx.y];
    int stream = blockIdx.x;
    int32_t *table = pages_table(p, d.slot, stream);
    int lead = a.leads[d.first_stream + stream], kept = a.counts[d.first_stream + stream];
    int from = lead / p.page_slots, to = lead < kept ? pages_for(p, kept) : from;
    for (int page = from; page < to; page++) {
        if (threadIdx.x == 0) {
            *fresh = -1;
            if (p.refs[table[page]] > 1) *fresh = pages_taken(p, pages_take(p, 1));
        }
        __syncthreads();
        int32_t mine = *fresh;
        if (mine >= 0) pages_copy(p, mine, table[page], threadIdx.x, blockDim.x);
        __syncthreads();
        if (mine >= 0 && threadIdx.x == 0) {
            atomicSub(&p.refs[table[page]], 1u);
            table[page] = mine;
        }
        __syncthreads();
    }
}

/* ---- Compaction -------------------------------------------------------------------------------
 */

struct moved {
    int32_t pos;
    float log_beta;
};

/* Block (stream, due). Shared: TILE rows of K and V, their side records, the tile's kept mask. */
static __global__ void k_compact(const struct evict_args a) {
    SHARED_MEMORY(shared);
    const struct pages &p = a.pages;
    if (pages_failed(p)) return;
    const struct due d = a.due[blockIdx.y];
    int stream = blockIdx.x, thread = threadIdx.x, threads = blockDim.x;
    int chunks = p.head_dim / CHUNK_DIMS; /* of a row */
    uint4 *rows = (uint4 *)shared;        /* [TILE][2][chunks] */
    struct moved *side = (struct moved *)(rows + TILE * 2 * chunks);
    uint32_t *mask = (uint32_t *)(side + TILE);
    int32_t *table = pages_table(p, d.slot, stream);
    int32_t *length = pages_length(p, d.slot, stream);
    const struct cut cut = a.cuts[d.first_group + stream / d.group_streams];
    int old = *length, to = 0;
    for (int first = 0; first < old; first += TILE) {
        if (thread < 32) {
            int entry = first + thread;
            uint32_t kept =
                __ballot_sync(WARP_ALL, entry < old && is_kept(p, table, entry, stream, cut));
            if (thread == 0) *mask = kept;
        }
        __syncthreads();
        uint32_t kept = *mask;
        int count = __popc(kept);
        bool stays = to == first && kept == (count == 32 ? WARP_ALL : (1u << count) - 1);
        for (int i = thread; !stays && i < TILE * 2 * chunks; i += threads) {
            int row = i / (2 * chunks), part = i / chunks % 2, chunk = i % chunks;
            if (!(kept >> row & 1)) continue;
            int entry = first + row, place = __popc(kept & ((1u << row) - 1));
            int at = entry % p.page_slots;
            int32_t page = table[entry / p.page_slots];
            rows[(place * 2 + part) * chunks + chunk] =
                *(const uint4 *)(pages_at(p, page) + page_offset(p.head_dim, part, at, chunk));
            if (part || chunk) continue;
            int64_t from = (int64_t)page * p.page_slots + at;
            side[place] = {p.pos[from], p.log_beta[from]};
        }
        __syncthreads();
        for (int i = thread; !stays && i < count * 2 * chunks; i += threads) {
            int row = i / (2 * chunks), part = i / chunks % 2, chunk = i % chunks;
            int at = (to + row) % p.page_slots;
            int32_t page = table[(to + row) / p.page_slots];
            *(uint4 *)(pages_at(p, page) + page_offset(p.head_dim, part, at, chunk)) =
                rows[(row * 2 + part) * chunks + chunk];
            if (part || chunk) continue;
            int64_t target = (int64_t)page * p.page_slots + at;
            p.pos[target] = side[row].pos;
            p.log_beta[target] = side[row].log_beta;
        }
        __syncthreads();
        to += count;
    }
    for (int page = pages_for(p, to) + thread; page < pages_for(p, old); page += threads)
        pages_drop(p, table[page]);
    if (thread != 0) return;
    *length = to;
    if (old > to) atomicAdd(&p.state->evicted, (unsigned long long)(old - to));
}

/* ---- The host's side ------------------------------------------------------------------------- */

int op_rule_check(const struct kern_rule *rule, struct fault *fault) {
    const struct {
        bool wanted;
        const char *member;
    } missing[] = {
        {rule->score == KERN_SCORE_ATTENTION, "observe"},
        {rule->redundancy.on, "redundancy"},
        {rule->layers != KERN_LAYERS_UNIFORM, "layers"},
        {rule->merge != KERN_MERGE_NONE, "merge"},
        {rule->published, "published"},
        {rule->retain > 0, "retain"},
        {rule->floor > 0, "floor"},
    };
    for (const auto &part : missing)
        if (part.wanted)
            return fault_set(fault, ERR_UNSUPPORTED, part.member,
                             "the CUDA backend does not have '%s'", part.member);
    return 0;
}

static struct due make_due(const struct cuda *cuda, const struct kern_evict *from) {
    const struct kern_rule *rule = from->rule;
    struct due d = {};
    d.slot = from->slot;
    d.tokens = from->tokens;
    d.sinks = rule->sinks;
    d.recent = rule->recent;
    d.recency = rule->score == KERN_SCORE_RECENCY;
    d.horizon = rule->horizon;
    d.group_streams = rule->pool == KERN_POOL_STREAM  ? 1
                      : rule->pool == KERN_POOL_LAYER ? cuda->options.heads_kv
                                                      : cuda->pages.streams;
    d.groups = cuda->pages.streams / d.group_streams;
    d.group_blocks = d.group_streams < GROUP_BLOCKS ? d.group_streams : GROUP_BLOCKS;
    d.group_keep = (uint32_t)d.group_streams * (uint32_t)from->keep;
    return d;
}

static struct cut make_cut(const struct due *d) {
    struct cut cut = {};
    cut.wanted = d->group_keep;
    return cut;
}

/* The dues and empty cuts on the device; room for the rest. */
static bool stage_dues(struct cuda *cuda, const struct kern_evict *due, int count,
                       struct evict_args *args, unsigned *blocks) {
    size_t streams = (size_t)cuda->pages.streams, all = streams * (size_t)count;
    size_t groups = 0, shared_groups = 0;
    struct due *dues = static_cast<struct due *>(mem_must_alloc((size_t)count, sizeof *dues));
    struct cut *cuts = static_cast<struct cut *>(mem_must_alloc(all, sizeof *cuts));
    *blocks = 0;
    for (int i = 0; i < count; i++) {
        struct due *d = &dues[i];
        *d = make_due(cuda, &due[i]);
        d->first_group = (int64_t)groups;
        d->first_bins = (int64_t)shared_groups;
        if (d->group_blocks > 1) shared_groups += (size_t)d->groups;
        d->first_stream = (int64_t)((size_t)i * streams);
        for (int g = 0; g < d->groups; g++) cuts[groups++] = make_cut(d);
        unsigned wanted = (unsigned)(d->groups * d->group_blocks);
        if (wanted > *blocks) *blocks = wanted;
    }
    size_t bins = shared_groups * BINS * sizeof *args->bins;
    char *room = static_cast<char *>(
        room_take(cuda, &cuda->select, bins + 2 * all * sizeof(int32_t) + groups * sizeof *cuts));
    args->pages = cuda->pages;
    args->due = static_cast<const struct due *>(
        device_stage(cuda->device, dues, (size_t)count * sizeof *dues));
    const void *fresh = device_stage(cuda->device, cuts, groups * sizeof *cuts);
    mem_free(dues);
    mem_free(cuts);
    if (!room || !args->due || !fresh) return false;
    args->bins = reinterpret_cast<uint32_t *>(room);
    args->leads = reinterpret_cast<int32_t *>(room + bins);
    args->counts = args->leads + all;
    args->cuts = reinterpret_cast<struct cut *>(args->counts + all);
    if (bins) device_zero(cuda->device, args->bins, bins);
    device_copy(cuda->device, args->cuts, fresh, groups * sizeof *cuts);
    return true;
}

static void select(struct cuda *cuda, const struct evict_args &args, unsigned blocks, int count) {
    static const struct pass passes[] = {
        {FIELD_KEY, 21, 11}, {FIELD_KEY, 10, 11}, {FIELD_KEY, 0, 10},    {FIELD_POS, 20, 11},
        {FIELD_POS, 9, 11},  {FIELD_POS, 0, 9},   {FIELD_STREAM, 9, 11}, {FIELD_STREAM, 0, 9}};
    const size_t shared = (BINS + THREADS / 32 + 1) * sizeof(uint32_t);
    for (const struct pass &pass : passes)
        LAUNCH(cuda->device, k_select, dim3(blocks, (unsigned)count), THREADS, shared, args, pass,
               &pass == passes);
}

static size_t compact_shared(const struct cuda *cuda) {
    size_t row = (size_t)cuda->options.head_dim * 4; /* key and value */
    return TILE * (row + sizeof(struct moved)) + sizeof(uint32_t);
}

/* All at once, or one that may share pages with others. */
static void evict(struct cuda *cuda, const struct kern_evict *due, int count, bool shared) {
    struct evict_args args = {};
    unsigned blocks;
    if (!stage_dues(cuda, due, count, &args, &blocks)) return;
    dim3 grid((unsigned)cuda->pages.streams, (unsigned)count);
    LAUNCH(cuda->device, k_score, grid, THREADS, 0, args);
    select(cuda, args, blocks, count);
    if (shared) {
        LAUNCH(cuda->device, k_count, grid, THREADS, 2 * sizeof(int), args);
        cache_decide(cuda);
        LAUNCH(cuda->device, k_own, grid, THREADS, sizeof(int32_t), args);
    }
    LAUNCH(cuda->device, k_compact, grid, COMPACT_THREADS, compact_shared(cuda), args);
}

/* Runs of sequences whose pages are all their own go together. */
static int evict_all(struct cuda *cuda, const struct kern_evict *due, int count) {
    for (int i = 0, n; i < count; i += n) {
        bool shared = cuda->slots[due[i].slot].shared;
        for (n = 1; !shared && i + n < count && !cuda->slots[due[i + n].slot].shared;) n++;
        evict(cuda, &due[i], n, shared);
    }
    return 0;
}

/* ---- Traces: for tests and reports of what went, not for speed --------------------------------
 */

struct held {
    int32_t *lengths, *positions;
    size_t entries;
};

static void close_held(struct held *h) {
    mem_free(h->lengths);
    mem_free(h->positions);
}

static int read_held(struct cuda *cuda, int slot, struct held *h) {
    struct kern_report report = {};
    h->lengths =
        static_cast<int32_t *>(mem_try_alloc((size_t)cuda->pages.streams, sizeof *h->lengths));
    if (!h->lengths) return ERR_NOMEM;
    report.lengths = h->lengths;
    int rc = op_report(&cuda->base, slot, &report);
    if (rc) return rc;
    h->entries = report.entries_max = report.entries;
    h->positions = static_cast<int32_t *>(mem_try_alloc(report.entries + 1, sizeof *h->positions));
    if (!h->positions) return ERR_NOMEM;
    report.positions = h->positions;
    return op_report(&cuda->base, slot, &report);
}

/* Both sides ascend within a stream, and what is left is part of what was. */
static void subtract(const struct held *was, const struct held *is, int streams,
                     struct kern_trace *trace) {
    const int32_t *a = was->positions, *b = is->positions;
    trace->entries = 0;
    for (int s = 0; s < streams; s++) {
        const int32_t *b_end = b + is->lengths[s];
        for (const int32_t *a_end = a + was->lengths[s]; a < a_end; a++) {
            if (b < b_end && *b == *a) {
                b++;
                continue;
            }
            if (trace->entries < trace->entries_max) trace->positions[trace->entries] = *a;
            trace->entries++;
        }
        trace->lengths[s] = was->lengths[s] - is->lengths[s];
    }
}

static int evict_traced(struct cuda *cuda, const struct kern_evict *due) {
    struct held was = {}, is = {};
    int rc = read_held(cuda, due->slot, &was);
    if (!rc) rc = evict_all(cuda, due, 1);
    if (!rc) rc = cache_sync(cuda);
    if (!rc) rc = read_held(cuda, due->slot, &is);
    if (!rc) subtract(&was, &is, cuda->pages.streams, due->trace);
    close_held(&was);
    close_held(&is);
    return rc;
}

int op_evict(struct kern *kern, const struct kern_evict *due, int count) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache);
    for (int i = 0; i < count; i++) {
        CHECK(due[i].slot >= 0 && due[i].slot < cuda->options.slots && due[i].keep > 0);
        if (op_rule_check(due[i].rule, NULL)) return ERR_UNSUPPORTED;
        cuda->slots[due[i].slot].measured = true;
    }
    int rc = 0;
    cache_changes(cuda);
    for (int i = 0, n; i < count && !rc; i += n) {
        for (n = 0; i + n < count && !due[i + n].trace;) n++;
        rc = n ? evict_all(cuda, &due[i], n) : evict_traced(cuda, &due[i]);
        if (n == 0) n = 1;
    }
    return rc;
}
