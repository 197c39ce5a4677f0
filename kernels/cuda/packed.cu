/* Products of weights in 8 and 4 bits with activations in float16.
 *
 * The numbers of a block go into the matrix units as they are, as whole numbers in float16; their
 * scale, and their term times the sum of the activations, are applied to the block's sum in
 * float32. So a weight is never rounded: only activations are, once.
 *
 * A block of threads computes a tile of outputs and rows. Its WARPS warps take the blocks of inputs
 * in turn, and their sums are added in the order of warps. Every tile size does the same to a sum,
 * so a row's bits do not depend on how many rows are multiplied with it. */
#include <string.h>

#include "kernels/cuda/packed.cuh"

#define WARPS        8
#define THREADS      (WARPS * 32)
#define UPLOAD_TILES ((int64_t)4096) /* packed at a time */

/* ---- Packing, on the host ---- */

struct packed packed_of(const struct kern_weight *w) {
    return {static_cast<const uint8_t *>(w->data), w->scale, (int32_t)w->dtype,
            (int32_t)blocks_of(w->cols), w->rows};
}

enum kern_dtype packed_join(enum kern_dtype a, enum kern_dtype b) {
    static const enum kern_dtype wide[2][2] = {{KERN_Q8, KERN_Q8M}, {KERN_Q8S, KERN_Q8SM}};
    if (a == b) return a;
    return wide[block_is_split(a) || block_is_split(b)][block_has_least(a) || block_has_least(b)];
}

/* Groups of outputs in fours: some tiles of the product have as many. */
static int64_t tiles_of(const struct kern_weight *w) {
    return (w->rows + 4 * PACKED_OUTPUTS - 1) / (4 * PACKED_OUTPUTS) * 4 * blocks_of(w->cols);
}

size_t packed_code_bytes(const struct kern_weight *w) {
    return (size_t)tiles_of(w) * PACKED_WARP * (size_t)packed_lane_bytes(w->dtype);
}

size_t packed_factor_count(const struct kern_weight *w) {
    return (size_t)tiles_of(w) * (size_t)packed_factors(w->dtype);
}

size_t packed_sums(const struct kern_weight *w) {
    if (!packed_least(w->dtype)) return 0;
    return (size_t)blocks_of(w->cols) * (size_t)(1 + packed_split(w->dtype));
}

/* A row of a matrix: its blocks, NULL in padding, and what their factors are multiplied by. */
struct packed_row {
    const struct block *blocks;
    float by;
};

/* Output `out` of all parts. `to`: for what a reader makes. */
static struct packed_row row_at(const struct kern_weight *w, const struct kern_matrix *parts,
                                int64_t out, struct block *to) {
    for (int i = 0; i < w->parts; out -= parts[i++].rows)
        if (out < parts[i].rows)
            return {blocks_of_row(&parts[i], out, to), parts[i].factor > 0 ? parts[i].factor : 1};
    return {NULL, 1};
}

/* Returns the most blocks in which a reader stores a row. */
static size_t made_blocks(const struct kern_weight *w, const struct kern_matrix *parts) {
    size_t most = 1;
    for (int i = 0; i < w->parts; i++)
        if (parts[i].reader && (size_t)parts[i].reader->row_blocks > most)
            most = (size_t)parts[i].reader->row_blocks;
    return most;
}

/* Output `o` of a tile. */
static void pack_block(const struct block *from, float by, int dtype, int o, uint8_t *codes,
                       float *factors) {
    const int bytes = packed_lane_bytes(dtype), narrow = packed_narrow(dtype);
    for (int i = 0; i < KERN_BLOCK; i++) {
        int bit = packed_bit(dtype, packed_place(o, i));
        int code = from->n[i] + packed_middle(dtype);
        codes[packed_lane(o, i) * bytes + bit / 8] |= (uint8_t)(code << (narrow ? bit % 8 : 0));
    }
    for (int half = 0; half <= packed_split(dtype); half++, factors += PACKED_OUTPUTS) {
        *factors = from->scale[half] * by;
        if (packed_least(dtype))
            factors[(1 + packed_split(dtype)) * PACKED_OUTPUTS] = from->least[half] * by;
    }
}

static void pack_tiles(const struct kern_weight *w, const struct kern_matrix *parts, int64_t first,
                       int64_t count, uint8_t *codes, float *factors, struct block *made) {
    struct packed_row rows[PACKED_OUTPUTS];
    const size_t each = made_blocks(w, parts);
    const int64_t blocks = blocks_of(w->cols);
    const size_t code_bytes = (size_t)PACKED_WARP * (size_t)packed_lane_bytes(w->dtype);
    const size_t factor_count = (size_t)packed_factors(w->dtype);
    memset(codes, 0, (size_t)count * code_bytes);
    memset(factors, 0, (size_t)count * factor_count * sizeof *factors);
    for (int64_t tile = first; tile < first + count; tile++)
        for (int o = 0; o < PACKED_OUTPUTS; o++) {
            size_t at = (size_t)(tile - first);
            if (tile == first || tile % blocks == 0)
                rows[o] =
                    row_at(w, parts, tile / blocks * PACKED_OUTPUTS + o, made + (size_t)o * each);
            if (rows[o].blocks)
                pack_block(&rows[o].blocks[tile % blocks], rows[o].by, w->dtype, o,
                           codes + at * code_bytes, factors + at * factor_count + o);
        }
}

int packed_upload(struct cuda *cuda, const struct kern_weight *w, const struct kern_matrix *parts) {
    const size_t code_bytes = (size_t)PACKED_WARP * (size_t)packed_lane_bytes(w->dtype);
    const size_t factor_count = (size_t)packed_factors(w->dtype);
    int64_t all = tiles_of(w), most = all < UPLOAD_TILES ? all : UPLOAD_TILES;
    uint8_t *codes = static_cast<uint8_t *>(mem_try_alloc((size_t)most, code_bytes));
    float *factors =
        static_cast<float *>(mem_try_alloc((size_t)most * factor_count, sizeof *factors));
    struct block *made = static_cast<struct block *>(
        mem_try_alloc(PACKED_OUTPUTS * made_blocks(w, parts), sizeof *made));
    const bool room = codes && factors && made;
    for (int64_t tile = 0, count; room && tile < all; tile += count) {
        count = all - tile < most ? all - tile : most;
        pack_tiles(w, parts, tile, count, codes, factors, made);
        device_upload(cuda->device, static_cast<char *>(w->data) + (size_t)tile * code_bytes, codes,
                      (size_t)count * code_bytes);
        device_upload(cuda->device, w->scale + (size_t)tile * factor_count, factors,
                      (size_t)count * factor_count * sizeof *factors);
    }
    mem_free(codes);
    mem_free(factors);
    mem_free(made);
    return room ? 0 : ERR_NOMEM;
}

/* ---- Products ---- */

struct packed_args {
    struct packed w;
    float *y;
    const uint16_t *x;
    const float *bias, *sums; /* or NULL */
    int64_t cols;
    int32_t rows;
    bool add;
};

/* A warp per (block of inputs, row): the sum of its activations, or of those of each of `parts`. */
static __global__ void k_block_sums(float *sums, const uint16_t *x, int64_t count, int parts) {
    ptx_overlap_grids();
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / KERN_BLOCK;
    const int lane = threadIdx.x % KERN_BLOCK, each = KERN_BLOCK / parts;
    if (i >= count) return;
    float sum = ptx_unpack_f16(x[i * KERN_BLOCK + lane]).x;
    for (int by = each / 2; by > 0; by /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(WARP_ALL, sum, by));
    if (lane % each == 0) sums[i * parts + lane / each] = sum;
}

/* The operands of one mma, whole numbers in float16. */
template <bool NARROW>
static __device__ __forceinline__ void operands(uint32_t a[4], const uint32_t *words, int half,
                                                uint32_t middle) {
    if (NARROW) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = ptx_sub_f16((words[half] >> 4 * j & 0x000f000fu) | 0x64006400u, middle);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = ptx_sub_f16(ptx_f16_of_bytes(words[2 * half + j / 2], j % 2), middle);
    }
}

/* A lane's part of a tile of PACKED_OUTPUTS outputs. */
struct tile {
    uint32_t words[4];
    float scale[2][2], least[2][2]; /* [half], then of rows g and g + 8 */
};

template <bool NARROW, bool SPLIT>
static __device__ __forceinline__ void load_tile(struct tile &t, const struct packed &w, int64_t at,
                                                 int lane, bool least) {
    const uint8_t *codes = w.codes + (at * PACKED_WARP + lane) * (NARROW ? 8 : 16);
    if (NARROW) {
        const uint2 read = *(const uint2 *)codes;
        t.words[0] = read.x, t.words[1] = read.y;
    } else {
        const uint4 read = *(const uint4 *)codes;
        t.words[0] = read.x, t.words[1] = read.y, t.words[2] = read.z, t.words[3] = read.w;
    }
    const float *factors =
        w.factors + at * (PACKED_OUTPUTS * (1 + SPLIT) * (least ? 2 : 1)) + lane / 4;
#pragma unroll
    for (int half = 0; half <= SPLIT; half++, factors += PACKED_OUTPUTS)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            t.scale[half][r] = factors[8 * r];
            t.least[half][r] = least ? factors[(1 + SPLIT) * PACKED_OUTPUTS + 8 * r] : 0;
        }
}

/* acc += scale c. */
static __device__ __forceinline__ void apply(float acc[4], const float c[4], const float scale[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = fmaf(scale[i / 2], c[i], acc[i]);
}

template <bool SPLIT>
static __device__ __forceinline__ void multiply_tile(float acc[4], const struct tile &t,
                                                     const uint32_t a[2][4], const uint2 b[2],
                                                     const float sums[2][2], bool least) {
    float c[4] = {0, 0, 0, 0};
    ptx_mma_f16(c, a[0], b[0].x, b[0].y);
    if (SPLIT) {
        apply(acc, c, t.scale[0]);
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] = 0;
    }
    ptx_mma_f16(c, a[1], b[1].x, b[1].y);
    apply(acc, c, t.scale[SPLIT]);
    if (!least) return;
#pragma unroll
    for (int half = 0; half <= SPLIT; half++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[i] = fmaf(t.least[half][i / 2], sums[half][i % 2], acc[i]);
}

/* Adds the warps' sums in their order and writes them. */
template <int M, int N>
static __device__ void write_tile(const struct packed_args &a, const float acc[M][N][4],
                                  float *shared) {
    constexpr int OUTPUTS = M * PACKED_OUTPUTS, ROWS = 8 * N;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int out = m * PACKED_OUTPUTS + lane / 4 + 8 * (i / 2);
                int row = 8 * n + 2 * (lane % 4) + i % 2;
                shared[(warp * ROWS + row) * OUTPUTS + out] = acc[m][n][i];
            }
    __syncthreads();
    for (int i = threadIdx.x; i < OUTPUTS * ROWS; i += THREADS) {
        int64_t out = (int64_t)blockIdx.x * OUTPUTS + i % OUTPUTS;
        int64_t row = (int64_t)blockIdx.y * ROWS + i / OUTPUTS;
        if (out >= a.w.outputs || row >= a.rows) continue;
        float sum = shared[i];
        for (int w = 1; w < WARPS; w++) sum = __fadd_rn(sum, shared[w * OUTPUTS * ROWS + i]);
        if (a.bias) sum = __fadd_rn(sum, a.bias[out]);
        float *to = &a.y[row * a.w.outputs + out];
        *to = a.add ? __fadd_rn(*to, sum) : sum;
    }
}

/* A lane's part of one block of inputs. */
template <int M, int N> struct part {
    struct tile tiles[M];
    uint2 x[N][2];
    float sums[N][2][2]; /* [half] as in tiles, then of two rows */
};

template <bool NARROW, bool SPLIT, int M, int N>
static __device__ __forceinline__ void load_part(struct part<M, N> &s, const struct packed_args &a,
                                                 const uint16_t *const x[N], int block, int lane,
                                                 bool least) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        int64_t group = (int64_t)blockIdx.x * M + m;
        load_tile<NARROW, SPLIT>(s.tiles[m], a.w, group * a.w.blocks + block, lane, least);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint16_t *at = x[n] + (int64_t)block * KERN_BLOCK;
        s.x[n][0] = *(const uint2 *)at;
        s.x[n][1] = *(const uint2 *)(at + KERN_BLOCK / 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int64_t row = ((int64_t)blockIdx.y * N + n) * 8 + 2 * (lane % 4) + i;
            const int64_t first =
                ((row < a.rows ? row : a.rows - 1) * a.w.blocks + block) * (1 + SPLIT);
#pragma unroll
            for (int half = 0; half <= SPLIT; half++)
                s.sums[n][half][i] = least ? a.sums[first + half] : 0;
        }
    }
}

template <bool NARROW, bool SPLIT, int M, int N>
static __device__ __forceinline__ void multiply_part(float acc[M][N][4], const struct part<M, N> &s,
                                                     uint32_t middle, bool least) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        uint32_t numbers[2][4];
        operands<NARROW>(numbers[0], s.tiles[m].words, 0, middle);
        operands<NARROW>(numbers[1], s.tiles[m].words, 1, middle);
#pragma unroll
        for (int n = 0; n < N; n++)
            multiply_tile<SPLIT>(acc[m][n], s.tiles[m], numbers, s.x[n], s.sums[n], least);
    }
}

/* Blocks (M groups of outputs, 8 N rows). The compiler keeps mma in order and so does not read
 * ahead by itself: a warp reads AHEAD blocks of inputs before it multiplies the first. */
template <bool NARROW, bool SPLIT, int M, int N, int AHEAD>
static __global__ void __launch_bounds__(THREADS) k_packed(const struct packed_args a) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool least = a.sums != NULL;
    const uint32_t middle = 0x64006400u + (uint32_t)packed_middle(a.w.dtype) * 0x00010001u;
    const uint16_t *x[N]; /* this lane's row of each group of eight */
    float acc[M][N][4];
#pragma unroll
    for (int n = 0; n < N; n++) {
        int64_t row = ((int64_t)blockIdx.y * N + n) * 8 + lane / 4;
        x[n] = a.x + (row < a.rows ? row : a.rows - 1) * a.cols + 4 * (lane % 4);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0;
    }
    for (int first = warp; first < a.w.blocks; first += AHEAD * WARPS) {
        struct part<M, N> parts[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * WARPS < a.w.blocks)
                load_part<NARROW, SPLIT, M, N>(parts[i], a, x, first + i * WARPS, lane, least);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * WARPS < a.w.blocks)
                multiply_part<NARROW, SPLIT, M, N>(acc, parts[i], middle, least);
    }
    write_tile<M, N>(a, acc, (float *)shared);
}

template <bool NARROW, bool SPLIT, int M, int N, int AHEAD>
static void launch(struct cuda *cuda, const struct packed_args &args) {
    const size_t shared = (size_t)WARPS * M * PACKED_OUTPUTS * 8 * N * sizeof(float);
    dim3 grid(blocks_for(args.w.outputs, M * PACKED_OUTPUTS), blocks_for(args.rows, 8 * N));
    LAUNCH_OVERLAPPED(cuda->device, (k_packed<NARROW, SPLIT, M, N, AHEAD>), grid, THREADS, shared,
                      args);
}

template <bool NARROW, bool SPLIT>
static void multiply(struct cuda *cuda, const struct packed_args &args) {
    if (args.rows <= 8)
        launch<NARROW, SPLIT, 1, 1, 4>(cuda, args);
    else if (args.rows <= 32)
        launch<NARROW, SPLIT, 1, 4, 2>(cuda, args);
    else if (args.rows <= 64)
        launch<NARROW, SPLIT, 2, 8, 1>(cuda, args);
    else
        launch<NARROW, SPLIT, 4, 6, 1>(cuda, args);
}

void packed_multiply(struct cuda *cuda, float *y, const void *x, const struct kern_weight *w,
                     const float *bias, float *sums, int rows, bool add) {
    const struct packed packed = packed_of(w);
    const uint16_t *half = static_cast<const uint16_t *>(x);
    const bool least = packed_least(w->dtype);
    const struct packed_args args = {packed,  y,    half, bias, least ? sums : NULL,
                                     w->cols, rows, add};
    int64_t count = (int64_t)rows * packed.blocks;
    if (least)
        LAUNCH_OVERLAPPED(cuda->device, k_block_sums, blocks_for(count, THREADS / KERN_BLOCK),
                          THREADS, 0, sums, half, count, 1 + packed_split(w->dtype));
    if (packed_narrow(w->dtype))
        multiply<true, false>(cuda, args);
    else if (packed_split(w->dtype))
        multiply<false, true>(cuda, args);
    else
        multiply<false, false>(cuda, args);
}
