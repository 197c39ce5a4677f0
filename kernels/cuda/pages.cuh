/* The paged cache as kernels see it. All of it is on the device: pool, tables, lengths, free pages,
 * reference counts, side arrays, the first error. The host knows only which slots are in use, up to
 * which position, and whether one may share pages (kernels/cuda/cache.cu).
 *
 * A page is 8 KiB of one head, K then V, P = 4096 / row_bytes entries of each; a row, one key or
 * value, is head_dim numbers: bf16, e4m3 (no scale: 1 for every layer and head) or the codes of
 * KERN_ROW8 (kernels/row.h). The factors of such rows follow the 8 KiB: those of the keys [P], then
 * those of the values [P], in bf16. A side is cut into panels of 128 bytes of each row; the 16-byte
 * chunk c of row r is at c ^ (r & 7) of its panel, or, where a whole row has only 64 bytes, at c ^
 * (r / 2 & 3). So one bulk copy puts a page into shared memory free of bank conflicts for ldmatrix,
 * and 8 rows x 128 bytes are the 128-byte-swizzled atom of wgmma.
 *
 * With latent attention (struct kern_latent) a page holds keys alone, whose first numbers are the
 * values. A row is head_dim numbers of bf16 and zeros up to a whole panel; P, a power of two from 8
 * on, makes the page as large as it can be with LATENT_PAGE_MOST bytes. DeepSeek's rows of 576
 * numbers: nine panels, 8 entries, 9,216 bytes.
 *
 * Where layers differ in heads, so do head_dim and P, and all pages have the same size: a stream's
 * place in a table says what its pages hold (pages_with). A row of 1,024 bytes has panels of four
 * rows.
 *
 * Entries of a stream (slot, layer, KV head) are dense and ascend in pos: entry i is row i % P of
 * page table[i / P]. Memory at or after a stream's length is stale, and may be NaN if another
 * sequence left it: kernels mask it as keys and as values.
 *
 * A slot has a row of pages for each stream and, behind them, for each recurrent state, which has
 * all its pages or, before its first step, none. A page of a state is 2,048 float32 numbers, one
 * after the other.
 *
 * Free pages are a ring with 64-bit counters: head = pages taken since start, tail = pages freed;
 * tail - head are free. Kernels of one launch either take or free, never both.
 *
 * The first error of a kernel is kept in `state->error`; from then on every kernel that changes the
 * cache or depends on the step's lengths does nothing, until the host has read and cleared it. */
#ifndef KEEPD_KERNELS_CUDA_PAGES_CUH
#define KEEPD_KERNELS_CUDA_PAGES_CUH

#include "kernels/cuda/ptx.cuh"

#define PAGE_BYTES  8192
#define PAGE_SIDE   (PAGE_BYTES / 2)
#define PANEL_BYTES 128
#define CHUNK_DIMS                                                                                 \
    8 /* dimensions per piece, the part of a row that one thread processes: 16 bytes of bf16, 8 of \
         e4m3 */

#define LATENT_PAGE_MOST  10240
#define LATENT_SLOTS      8   /* the least P */
#define LATENT_VALUES_MAX 512 /* numbers of a value that attention has registers for */
#define LATENT_DIM_MAX    640 /* numbers of a key that evictions have shared memory for on 9.0 */

#define WIDE_DIM 512 /* heads of so many numbers are wider than others: attend_wide.cu */

#define STATE_NUMBERS (PAGE_BYTES / 4) /* in a page of a recurrent state */

#define SCORE_NONE (-1.0f) /* no score yet; scores of attention are never negative */

struct pages_state {
    unsigned long long head, tail; /* counters of the free ring */
    unsigned long long evicted;    /* entries */
    unsigned long long need;       /* pages needed by the step about to be appended */
    int32_t error;                 /* enum err; 0 = none */
    int32_t pad;
    long long verdict; /* the lowest error of all ranks, when they agree before they take pages */
    unsigned long long hits; /* groups of evictions in which rank_cap limited a rank */
};

/* A stream of this rank. */
struct alignas(16) stream_place {
    int32_t layer, head; /* head: among the layer's on this rank */
    int32_t slots, kind; /* P; kind: the number of the layer's kind of heads (internal.h) */
};

/* A layer's streams, on this rank and in the model. */
struct alignas(16) layer_place {
    int32_t first, heads;             /* on this rank: the first stream, and how many there are */
    int32_t model_first, heads_model; /* the same in the model */
    int32_t head_first; /* the number, among the model's heads in the layer, of the first one on
                           this rank */
    int32_t query;      /* how many numbers a token's queries have in earlier layers */
    int32_t kind, slots;
};

/* Passed to every kernel by value. Where layers differ, page_slots, row_bytes, head_dim and
 * heads_kv are the largest, and of one layer or stream in what pages_with and layer_pages return.
 */
struct pages {
    char *pool;       /* [count] of page_bytes */
    int32_t *pos;     /* [count][P] */
    float *log_beta;  /* [count][P] */
    float *score;     /* [count][P]: stored by the rule, mass or last score */
    uint32_t *keys;   /* [count][P]: keys of the current eviction */
    uint32_t *refs;   /* [count]: number of tables that refer to the page; 0 = free */
    int32_t *ring;    /* [count] */
    int32_t *tables;  /* [slots][slot_pages]: [streams][stream_pages], [states][state_pages] */
    int32_t *lengths; /* [slots][rows]: entries of a stream, pages of a state */
    float *weights;   /* [slots][layers]: measured layer weights */
    struct pages_state *state;
    const struct stream_place *stream_places; /* [streams] */
    const struct layer_place *layer_places;   /* [layers] */
    int64_t count;
    int layers, heads_kv, head_dim;
    int streams, model_streams; /* streams of all layers: of this rank, of the model */
    int row_bytes;              /* bytes of one key or value, without its factor */
    int page_bytes;             /* PAGE_BYTES, and the factors */
    int heads_model;            /* KV heads of all ranks */
    int page_slots, side_slots; /* P; records of a page in the side arrays, the largest P */
    int stream_pages;           /* ceil(max_positions / P), of the smallest P */
    int rows, state_pages;      /* streams and states; pages of a state */
    bool scaled;                /* rows are codes with a factor, rotated */
    bool latent;                /* keys hold the values; rows are padded */
    bool narrow;                /* numbers and codes of one byte */
    bool unused;                /* instead of padding: graphs compare the bytes (graph.h) */
    int64_t slot_pages;         /* entries of a slot's tables */
};

/* The pages as they are for streams whose pages hold `slots` entries. */
static __host__ __device__ __forceinline__ struct pages pages_with(const struct pages &p,
                                                                   int slots) {
    struct pages own = p;
    if (p.latent) return own;
    own.page_slots = slots;
    own.row_bytes = PAGE_SIDE / slots;
    own.head_dim = own.row_bytes / (p.narrow ? 1 : 2);
    return own;
}

/* The pages as they are for a stream. */
static __device__ __forceinline__ struct pages pages_of_stream(const struct pages &p, int stream) {
    return pages_with(p, p.stream_places[stream].slots);
}

static __host__ __device__ __forceinline__ int page_slots_of(int row_bytes) {
    return PAGE_SIDE / row_bytes;
}

/* Byte offset of the 16-byte chunk `chunk` of row `row`, where `rows` rows are cut into panels. */
static __host__ __device__ __forceinline__ int panel_chunk(int rows, int row, int chunk) {
    int panel = chunk >> 3, in_panel = (chunk & 7) ^ (row & 7);
    return (panel * rows + row) * PANEL_BYTES + (in_panel << 4);
}

/* The same in a page of keys and values; side 0 is K, 1 is V. */
static __host__ __device__ __forceinline__ int page_chunk(int row_bytes, int side, int row,
                                                          int chunk) {
    if (row_bytes < PANEL_BYTES)
        return side * PAGE_SIDE + row * row_bytes + ((chunk ^ (row >> 1 & 3)) << 4);
    return side * PAGE_SIDE + panel_chunk(PAGE_SIDE / row_bytes, row, chunk);
}

/* Byte offset of bf16 dims 8 chunk..: the layout of keys in shared memory for every page format. */
static __host__ __device__ __forceinline__ int page_offset(int head_dim, int side, int row,
                                                           int chunk) {
    return page_chunk(2 * head_dim, side, row, chunk);
}

/* The same in any page; pages of latent vectors have no side 1. */
static __device__ __forceinline__ int pages_chunk(const struct pages &p, int side, int row,
                                                  int chunk) {
    return p.latent ? panel_chunk(p.page_slots, row, chunk)
                    : page_chunk(p.row_bytes, side, row, chunk);
}

static __device__ __forceinline__ int32_t *pages_table(const struct pages &p, int slot,
                                                       int stream) {
    return p.tables + slot * p.slot_pages + (int64_t)stream * p.stream_pages;
}

/* The same of a stream or, numbered behind the streams, a state. */
static __device__ __forceinline__ int32_t *pages_row(const struct pages &p, int slot, int row) {
    if (row < p.streams) return pages_table(p, slot, row);
    return pages_table(p, slot, p.streams) + (int64_t)(row - p.streams) * p.state_pages;
}

static __device__ __forceinline__ int32_t *pages_length(const struct pages &p, int slot,
                                                        int stream) {
    return p.lengths + (int64_t)slot * p.rows + stream;
}

/* A stream's number in the model. */
static __device__ __forceinline__ int pages_model_stream(const struct pages &p, int stream) {
    const struct stream_place place = p.stream_places[stream];
    const struct layer_place &layer = p.layer_places[place.layer];
    return layer.model_first + layer.head_first + place.head;
}

static __device__ __forceinline__ char *pages_at(const struct pages &p, int32_t page) {
    return p.pool + (int64_t)page * p.page_bytes;
}

/* The factor of a row, a bf16 number, where rows are codes. */
static __device__ __forceinline__ uint16_t *pages_factor(const struct pages &p, int32_t page,
                                                         int side, int row) {
    return (uint16_t *)(pages_at(p, page) + PAGE_BYTES) + side * p.page_slots + row;
}

static __device__ __forceinline__ float bf16_float(uint16_t x) {
    return __uint_as_float((uint32_t)x << 16);
}

/* The factor of the numbers that pages_read_piece returns of a row; products are exact in float32.
 */
static __device__ __forceinline__ float pages_scale(const struct pages &p, int32_t page, int side,
                                                    int row) {
    return p.scaled ? bf16_float(*pages_factor(p, page, side, row)) : 1;
}

static __device__ __forceinline__ int pages_for(const struct pages &p, int length) {
    return (length + p.page_slots - 1) / p.page_slots;
}

/* The same for a row: a state's length is its number of pages. */
static __device__ __forceinline__ int pages_of_row(const struct pages &p, int row, int length) {
    return row < p.streams ? pages_for(pages_of_stream(p, row), length) : length;
}

/* Number `at` of a state. */
static __device__ __forceinline__ float *pages_number(const struct pages &p, const int32_t *table,
                                                      int at) {
    return (float *)pages_at(p, table[at / STATE_NUMBERS]) + at % STATE_NUMBERS;
}

/* Index of an entry in the side arrays. */
static __device__ __forceinline__ int64_t pages_side(const struct pages &p, const int32_t *table,
                                                     int entry) {
    return (int64_t)table[entry / p.page_slots] * p.side_slots + entry % p.page_slots;
}

/* The same where the page and the entry's row in it are known. */
static __device__ __forceinline__ int64_t pages_side_at(const struct pages &p, int32_t page,
                                                        int row) {
    return (int64_t)page * p.side_slots + row;
}

static __device__ __forceinline__ void pages_fail(const struct pages &p, int rc) {
    atomicCAS(&p.state->error, 0, rc);
}

static __device__ __forceinline__ bool pages_failed(const struct pages &p) {
    return *(volatile const int32_t *)&p.state->error != 0;
}

/* Takes `count` pages from the ring and returns their place; the caller has counted that enough are
 * free. */
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

/* Copies a whole page with its side records, by `threads` threads. */
static __device__ __forceinline__ void pages_copy(const struct pages &p, int32_t to, int32_t from,
                                                  int thread, int threads) {
    const uint4 *source = (const uint4 *)pages_at(p, from);
    uint4 *target = (uint4 *)pages_at(p, to);
    for (int i = thread; i < p.page_bytes / 16; i += threads) target[i] = source[i];
    for (int i = thread; i < p.side_slots; i += threads) {
        int64_t a = pages_side_at(p, to, i), b = pages_side_at(p, from, i);
        p.pos[a] = p.pos[b];
        p.log_beta[a] = p.log_beta[b];
        p.score[a] = p.score[b];
        p.keys[a] = p.keys[b];
    }
}

/* Returns the address of the eight numbers of a row that begin with number 8 * piece: 16 bytes of
 * bf16, or 8 bytes of e4m3 or of codes. */
static __device__ __forceinline__ char *pages_piece(const struct pages &p, int32_t page, int side,
                                                    int row, int piece) {
    return pages_at(p, page) + pages_chunk(p, side, row, p.narrow ? piece >> 1 : piece) +
           (p.narrow ? 8 * (piece & 1) : 0);
}

/* Four e4m3 numbers as bf16, which is exact. */
static __device__ __forceinline__ uint2 bf16_of_e4m3(uint32_t four) {
    float2 low = ptx_unpack_f16(ptx_f16_of_e4m3(four & 0xffff));
    float2 high = ptx_unpack_f16(ptx_f16_of_e4m3(four >> 16));
    uint2 wide = {ptx_pack_bf16(low.x, low.y), ptx_pack_bf16(high.x, high.y)};
    return wide;
}

/* Bytes 0 and 2, signed whole numbers, as bf16, which is exact: with 0x43 before its low seven bits
 * a byte is 128 more than they are, and its sign says what to take off, 128 or 256. */
static __device__ __forceinline__ uint32_t bf16_of_codes(uint32_t four) {
    return ptx_sub_bf16((four & 0x007f007fu) | 0x43004300u, (four & 0x00800080u) | 0x43004300u);
}

/* Four numbers of one byte as bf16, which is exact: whole numbers, or e4m3. */
static __device__ __forceinline__ uint2 bf16_of_bytes(uint32_t four, bool codes) {
    if (!codes) return bf16_of_e4m3(four);
    uint32_t even = bf16_of_codes(four), odd = bf16_of_codes(four >> 8);
    uint2 wide = {(even & 0xffffu) | odd << 16, even >> 16 | (odd & 0xffff0000u)};
    return wide;
}

/* Reads eight numbers of a row as bf16, where rows are codes without their factor (pages_scale);
 * and writes them, rounded to the page's format, where rows are not codes (row8_write). */
static __device__ __forceinline__ uint4 pages_read_piece(const struct pages &p, int32_t page,
                                                         int side, int row, int piece) {
    const char *at = pages_piece(p, page, side, row, piece);
    if (!p.narrow) return *(const uint4 *)at;
    uint2 bytes = *(const uint2 *)at;
    uint2 low = bf16_of_bytes(bytes.x, p.scaled), high = bf16_of_bytes(bytes.y, p.scaled);
    uint4 wide = {low.x, low.y, high.x, high.y};
    return wide;
}

static __device__ __forceinline__ void pages_write_piece(const struct pages &p, int32_t page,
                                                         int side, int row, int piece,
                                                         const float x[CHUNK_DIMS]) {
    char *at = pages_piece(p, page, side, row, piece);
    if (!p.narrow) {
        uint4 pairs = {ptx_pack_bf16(x[0], x[1]), ptx_pack_bf16(x[2], x[3]),
                       ptx_pack_bf16(x[4], x[5]), ptx_pack_bf16(x[6], x[7])};
        *(uint4 *)at = pairs;
    } else {
        uint2 fours = {ptx_pack_e4m3(x[0], x[1]) | ptx_pack_e4m3(x[2], x[3]) << 16,
                       ptx_pack_e4m3(x[4], x[5]) | ptx_pack_e4m3(x[6], x[7]) << 16};
        *(uint2 *)at = fours;
    }
}

/* Number of entries of a stream with pos below `pos`; positions ascend. */
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

/* The same for a stream whose last entry is at position `last`. Positions ascend, so at most last -
 * pos + 1 entries are not before `pos`; without evictions they are so many, and one is read. */
static __device__ __forceinline__ int pages_before_last(const struct pages &p, const int32_t *table,
                                                        int length, int pos, int last) {
    const int least = length - (last - pos + 1);
    if (least <= 0) return pages_before(p, table, length, pos);
    if (p.pos[pages_side(p, table, least)] >= pos) return least;
    return pages_before(p, table, length, pos);
}

/* Makes pages [from, to) of a row its own, by a whole block; enough are free. `room`: shared. */
static __device__ __forceinline__ void pages_own(const struct pages &p, int32_t *table, int from,
                                                 int to, int32_t *room) {
    for (int page = from; page < to; page++) {
        if (threadIdx.x == 0) {
            *room = -1;
            if (p.refs[table[page]] > 1) *room = pages_taken(p, pages_take(p, 1));
        }
        __syncthreads();
        int32_t mine = *room;
        if (mine >= 0) pages_copy(p, mine, table[page], (int)threadIdx.x, (int)blockDim.x);
        __syncthreads();
        if (mine >= 0 && threadIdx.x == 0) {
            atomicSub(&p.refs[table[page]], 1u);
            table[page] = mine;
        }
        __syncthreads();
    }
}

#endif
