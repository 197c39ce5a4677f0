/* The paged cache as kernels see it. All of it lives on the device: pool, tables, lengths, free
 * pages, reference counts, side arrays, the sticky error. The host knows only which slots are in
 * use, up to which position, and whether one may share pages (kernels/cuda/cache.cu).
 *
 * A page is 8 KiB of one head, K then V, bf16, P = 2048 / head_dim entries of each. A side is cut
 * into panels of 64 dimensions; a panel is P rows of 128 bytes; the 16-byte chunk c of row r lies
 * at c ^ (r & 7). So one bulk copy of a page lands in shared memory free of bank conflicts for
 * ldmatrix, and 8 rows x 128 bytes are the 128-byte-swizzled atom of wgmma.
 *
 * Entries of a stream (slot, layer, KV head) are dense and ascend in pos: entry i is row i % P of
 * page table[i / P]. What lies at or after a stream's length is stale, and may be NaN when another
 * sequence left it: kernels mask it as keys and as values.
 *
 * Free pages are a ring with 64-bit counters: head = pages taken since start, tail = pages given
 * back; tail - head are free. Kernels of one launch either take or give, never both.
 *
 * The first error of a kernel sticks in `state->error`; from then on every kernel that changes the
 * cache or depends on the step's lengths does nothing, until the host has read and cleared it. */
#ifndef KEEPD_KERNELS_CUDA_PAGES_CUH
#define KEEPD_KERNELS_CUDA_PAGES_CUH

#include "kernels/cuda/ptx.cuh"

#define PAGE_BYTES 8192
#define PAGE_SIDE  (PAGE_BYTES / 2)
#define PANEL_DIMS 64
#define CHUNK_DIMS 8 /* of 16 bytes */

#define SCORE_NONE (-1.0f) /* no score yet; scores of attention are never negative */

struct pages_state {
    unsigned long long head, tail; /* of the free ring */
    unsigned long long evicted;    /* entries */
    unsigned long long need;       /* pages that the step about to be appended wants */
    int32_t error;                 /* enum err; 0 = none */
    int32_t pad;
};

/* By value to every kernel. */
struct pages {
    char *pool;       /* [count] of PAGE_BYTES */
    int32_t *pos;     /* [count][P] */
    float *log_beta;  /* [count][P] */
    float *score;     /* [count][P]: what the rule remembers of an entry, mass or last score */
    uint32_t *keys;   /* [count][P]: ranks of the eviction under way */
    uint32_t *refs;   /* [count]: tables that name the page; 0 = free */
    int32_t *ring;    /* [count] */
    int32_t *tables;  /* [slots][streams][stream_pages] */
    int32_t *lengths; /* [slots][streams] */
    float *weights;   /* [slots][layers]: of the layers, once measured */
    float *tau;       /* [slots][streams]: thresholds of merging; NaN: none yet */
    struct pages_state *state;
    int64_t count;
    int layers, heads_kv, head_dim, streams; /* streams = layers * heads_kv */
    int page_slots;                          /* P */
    int stream_pages;                        /* ceil(max_positions / P) */
};

static __host__ __device__ __forceinline__ int page_slots_of(int head_dim) {
    return PAGE_BYTES / (4 * head_dim);
}

/* Byte of chunk `chunk` (dims 8 chunk..) of row `row`; side 0 is K, 1 is V. */
static __host__ __device__ __forceinline__ int page_offset(int head_dim, int side, int row,
                                                           int chunk) {
    int panel = chunk >> 3, in_panel = (chunk & 7) ^ (row & 7);
    return side * PAGE_SIDE + panel * page_slots_of(head_dim) * 128 + row * 128 + (in_panel << 4);
}

static __device__ __forceinline__ int32_t *pages_table(const struct pages &p, int slot,
                                                       int stream) {
    return p.tables + ((int64_t)slot * p.streams + stream) * p.stream_pages;
}

static __device__ __forceinline__ int32_t *pages_length(const struct pages &p, int slot,
                                                        int stream) {
    return p.lengths + (int64_t)slot * p.streams + stream;
}

static __device__ __forceinline__ char *pages_at(const struct pages &p, int32_t page) {
    return p.pool + (int64_t)page * PAGE_BYTES;
}

static __device__ __forceinline__ int pages_for(const struct pages &p, int length) {
    return (length + p.page_slots - 1) / p.page_slots;
}

/* Index of an entry in the side arrays. */
static __device__ __forceinline__ int64_t pages_side(const struct pages &p, const int32_t *table,
                                                     int entry) {
    return (int64_t)table[entry / p.page_slots] * p.page_slots + entry % p.page_slots;
}

static __device__ __forceinline__ void pages_fail(const struct pages &p, int code) {
    atomicCAS(&p.state->error, 0, code);
}

static __device__ __forceinline__ bool pages_failed(const struct pages &p) {
    return *(volatile const int32_t *)&p.state->error != 0;
}

/* The place in the ring of `count` pages that are taken; enough are free: someone counted. */
static __device__ __forceinline__ unsigned long long pages_take(const struct pages &p, int count) {
    return atomicAdd(&p.state->head, (unsigned long long)count);
}

static __device__ __forceinline__ int32_t pages_taken(const struct pages &p,
                                                      unsigned long long place) {
    int32_t page = p.ring[place % (unsigned long long)p.count];
    p.refs[page] = 1;
    return page;
}

static __device__ __forceinline__ void pages_drop(const struct pages &p, int32_t page) {
    if (atomicSub(&p.refs[page], 1u) != 1u) return;
    unsigned long long place = atomicAdd(&p.state->tail, 1ull);
    p.ring[place % (unsigned long long)p.count] = page;
}

/* A whole page with its side records, by `threads` threads. */
static __device__ __forceinline__ void pages_copy(const struct pages &p, int32_t to, int32_t from,
                                                  int thread, int threads) {
    const uint4 *source = (const uint4 *)pages_at(p, from);
    uint4 *target = (uint4 *)pages_at(p, to);
    for (int i = thread; i < PAGE_BYTES / 16; i += threads) target[i] = source[i];
    for (int i = thread; i < p.page_slots; i += threads) {
        int64_t a = (int64_t)to * p.page_slots + i, b = (int64_t)from * p.page_slots + i;
        p.pos[a] = p.pos[b];
        p.log_beta[a] = p.log_beta[b];
        p.score[a] = p.score[b];
        p.keys[a] = p.keys[b];
    }
}

/* Entries of a stream with pos below `pos`: they ascend. */
static __device__ __forceinline__ int pages_before(const struct pages &p, const int32_t *table,
                                                   int length, int pos) {
    int low = 0, high = length;
    while (low < high) {
        int middle = (low + high) / 2;
        if (p.pos[pages_side(p, table, middle)] < pos)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

#endif
