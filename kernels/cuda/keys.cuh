/* Products of vectors with the keys of a stream, shared by the observation of attention, redundancy
 * and merging. A block of PRODUCT_THREADS processes PRODUCT_KEYS keys of one stream and up to
 * product_shape's ROWS vectors at a time, bf16 in, float32 sums (mma.m16n8k16), and leaves all
 * products in shared memory for further arithmetic.
 *
 * Only the key half of each page is read, in the page's layout; numbers of one byte are converted
 * to bf16 in shared memory, in the layout of bf16 pages. The codes of KERN_ROW8 are whole numbers,
 * which bf16 represents; their factors stay beside them, and the caller of product_all says whether
 * products are of keys or of codes. Vectors lie in rows of 2 D + 16 bytes, so
 * that both are free of bank conflicts. A product depends on its vector and its key alone. Products
 * with keys at or after the stream's end, and rows without a vector, are undefined: readers mask
 * them. */
#ifndef KEEPD_KERNELS_CUDA_KEYS_CUH
#define KEEPD_KERNELS_CUDA_KEYS_CUH

#include "kernels/cuda/fetch.cuh"

#define PRODUCT_THREADS 128
#define PRODUCT_WARPS   (PRODUCT_THREADS / 32)
#define PRODUCT_KEYS    128
#define PRODUCT_ROWS    (16 * PRODUCT_WARPS) /* the most vectors */
#define PRODUCT_STRIDE                                                                             \
    (PRODUCT_KEYS + 8) /* stride of a row of products: free of bank conflicts                      \
                        */

template <int D> struct product_shape {
    static const int P = PAGE_BYTES / (4 * D);
    static const int CHUNKS = D / CHUNK_DIMS;
    static const int ROW_BYTES = 2 * D + 16;
    /* Beside keys of 512 numbers shared memory has room for half as many vectors. */
    static const int ROWS = D > 256 ? PRODUCT_ROWS / 2 : PRODUCT_ROWS;
    static const int KEY_BYTES = PRODUCT_KEYS * 2 * D;
    static const int SHARED = KEY_BYTES + ROWS * ROW_BYTES +
                              ROWS * PRODUCT_STRIDE * (int)sizeof(float) +
                              PRODUCT_KEYS * (int)sizeof(float) + 16;
};

/* The block's part of shared memory. */
struct product {
    char *keys;
    char *rows;
    float *out;     /* [ROWS][PRODUCT_STRIDE] */
    float *factors; /* [PRODUCT_KEYS], where rows are codes */
    uint64_t *barrier;
    uint32_t uses; /* phases of the barrier so far */
};

/* Called by every thread of the block; memory behind SHARED bytes belongs to the caller. */
template <int D> static __device__ struct product product_open(char *shared) {
    typedef product_shape<D> S;
    struct product p;
    p.keys = shared;
    p.rows = shared + S::KEY_BYTES;
    p.out = (float *)(p.rows + S::ROWS * S::ROW_BYTES);
    p.factors = p.out + S::ROWS * PRODUCT_STRIDE;
    p.barrier = (uint64_t *)(p.factors + PRODUCT_KEYS);
    p.uses = 0;
    if (threadIdx.x == 0) fetch_open(p.barrier, 1, PRODUCT_THREADS);
    __syncthreads();
    return p;
}

/* The pages as they are for heads of D numbers. */
template <int D>
static __device__ __forceinline__ struct pages product_pages(const struct pages &pages) {
    return pages_with(pages, PAGE_SIDE / (pages.narrow ? D : 2 * D));
}

/* The factor of this thread's key; 0 behind the last one, where memory is stale. `pages`: as they
 * are for the stream. */
static __device__ __forceinline__ void product_factor(const struct product &p,
                                                      const struct pages &pages,
                                                      const int32_t *table, int first, int count,
                                                      int side) {
    int at = threadIdx.x, entry = first + at, slots = pages.page_slots;
    p.factors[at] = at < count ? pages_scale(pages, table[entry / slots], side, entry % slots) : 0;
}

/* Starts reading the keys (side 1: the values, to the same places) of entries [first, first +
 * count), count <= PRODUCT_KEYS, first at the beginning of a page. Called by every thread; the
 * previous keys must no longer be in use by any. */
template <int D>
static __device__ __forceinline__ void
product_fetch(const struct product &p, const struct pages &pages, const int32_t *table, int first,
              int count, int side = 0) {
    typedef product_shape<D> S;
    bool narrow = pages.narrow;
    int slots = narrow ? PAGE_SIDE / D : S::P, many = (count + slots - 1) / slots;
    char *to = p.keys + (narrow ? S::KEY_BYTES / 2 : 0);
    if (pages.scaled) product_factor(p, product_pages<D>(pages), table, first, count, side);
    fetch_pages({(int)threadIdx.x, PRODUCT_THREADS}, pages, table + first / slots, many,
                {side * PAGE_SIDE, PAGE_SIDE, PAGE_SIDE}, to, p.barrier);
}

/* Chunk `chunk` of the key at place `at`. */
template <int D>
static __device__ __forceinline__ const char *product_key(const struct product &p, int at,
                                                          int chunk) {
    typedef product_shape<D> S;
    return p.keys + at / S::P * PAGE_SIDE + page_offset(D, 0, at % S::P, chunk);
}

/* Converts the numbers of one byte in the second half of the keys' memory to bf16 in all of it, one
 * key per thread, including places without a key. */
template <int D> static __device__ void product_widen(const struct product &p, bool codes) {
    const int P = PAGE_SIDE / D;
    int key = threadIdx.x;
    const char *page = p.keys + product_shape<D>::KEY_BYTES / 2 + key / P * PAGE_SIDE;
    uint4 row[D / 16];
    static_assert(PRODUCT_THREADS == PRODUCT_KEYS, "a thread for every key");
#pragma unroll
    for (int i = 0; i < D / 16; i++) row[i] = *(const uint4 *)(page + page_chunk(D, 0, key % P, i));
    __syncthreads();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint2 a = bf16_of_bytes(row[i].x, codes), b = bf16_of_bytes(row[i].y, codes);
        uint2 c = bf16_of_bytes(row[i].z, codes), d = bf16_of_bytes(row[i].w, codes);
        uint4 low = {a.x, a.y, b.x, b.y}, high = {c.x, c.y, d.x, d.y};
        *(uint4 *)product_key<D>(p, key, 2 * i) = low;
        *(uint4 *)product_key<D>(p, key, 2 * i + 1) = high;
    }
    ptx_shared_fence();
    __syncthreads();
}

/* Waits until the keys have arrived. Called by every thread. */
template <int D>
static __device__ __forceinline__ void product_wait(struct product &p, const struct pages &pages) {
    ptx_barrier_wait(p.barrier, p.uses++ & 1);
    if (pages.narrow) product_widen<D>(p, pages.scaled);
}

template <int D>
static __device__ __forceinline__ char *product_row(const struct product &p, int row, int chunk) {
    return p.rows + row * product_shape<D>::ROW_BYTES + chunk * 16;
}

/* Multiplies sixteen keys from place `key` on with the warp's sixteen rows. */
template <int D>
static __device__ __forceinline__ void product_tile(const struct product &p,
                                                    const uint32_t a[D / 16][4], int key, int row,
                                                    bool factors, int lane) {
    float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t b[4];
        ptx_load_matrix(
            b, product_key<D>(p, key + (lane & 7) + 8 * (lane >> 4), 2 * k + (lane >> 3 & 1)));
        ptx_mma(c[0], a[k], b[0], b[1]);
        ptx_mma(c[1], a[k], b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        int at = key + 8 * n + 2 * (lane & 3);
        float2 by = {1, 1};
        if (factors) by = *(const float2 *)(p.factors + at);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float2 pair = {c[n][2 * i], c[n][2 * i + 1]};
            if (factors) pair = {__fmul_rn(pair.x, by.x), __fmul_rn(pair.y, by.y)};
            *(float2 *)(p.out + (row + (lane >> 2) + 8 * i) * PRODUCT_STRIDE + at) = pair;
        }
    }
}

/* out[r][j] = row r . key j, for `rows` rows and `count` keys, times the factor of key j if
 * `factors`. The caller synchronises the block before (rows and keys are complete) and after. */
template <int D>
static __device__ __forceinline__ void product_all(const struct product &p, int rows, int count,
                                                   bool factors = false) {
    int row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    if (row >= rows) return;
    uint32_t a[D / 16][4];
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        ptx_load_matrix(
            a[k], product_row<D>(p, row + (lane & 7) + 8 * (lane >> 3 & 1), 2 * k + (lane >> 4)));
    for (int key = 0; key < count; key += 16) product_tile<D>(p, a, key, row, factors, lane);
}

/* Reads a row from a page, codes without their factor: 16-byte pieces, one per thread. */
template <int D>
static __device__ __forceinline__ void
product_take_key(const struct product &p, int row, const struct pages &pages, const int32_t *table,
                 int entry, int chunk) {
    const struct pages own = product_pages<D>(pages);
    *(uint4 *)product_row<D>(p, row, chunk) =
        pages_read_piece(own, table[entry / own.page_slots], 0, entry % own.page_slots, chunk);
}

#endif
