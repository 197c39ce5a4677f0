/* Attention on AMX tiles, for caches in 16, 8 and 4 bits whose pages hold whole tiles of keys: head
 * sizes 64 and 128, and 32 in bf16 and e4m3. Other shapes always use the AVX-512 kernel; the choice
 * depends on the shape alone.
 *
 * Sixteen query vectors ("lanes") are multiplied with 128 entries at a time, at entries 0-127,
 * 128-255, ... of the stream, so the arithmetic of a lane depends only on the entries it sees.
 * Three stages:
 *
 * Scores, S^T[entry][lane] = K Q^T: the page's keys are A tiles as stored; Q is packed once.
 *
 * Weights, P = 2^(S - max), in log2 units: lanes lie across a vector, so no sum crosses lanes.
 *
 * Values, O[lane][d] += P V: P is transposed to [lane][entry]; pairs of V rows are interleaved once
 * per block for all lanes of the item.
 *
 * Queries and weights are rounded to bf16, sums are float32. An entry that a lane does not see has
 * weight exactly 0 and leaves sums and maximum unchanged, bit by bit.
 *
 * Keys and values of 8 and 4 bits become bf16, which represents all numbers of e4m3 and all levels
 * of kernels/row.h. Factors of rows multiply scores and weights. */
#include "kernels/cpu/amx.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

#define BLOCK   128 /* entries */
#define GROUPS  8   /* groups of sixteen lanes per item */
#define DIM_MAX 128
#define CHUNKS  (BLOCK / TILE_DEPTH)

/* Scratch memory of one worker, 64-byte aligned. */
struct room {
    float most[GROUPS][16], sum[GROUPS][16];
    int32_t lo[GROUPS][16], hi[GROUPS][16]; /* entries the lane sees */
    char q[GROUPS][DIM_MAX / TILE_DEPTH][TILE_BYTES];
    float acc[GROUPS][DIM_MAX / 16][16][16]; /* [group][d / 16][lane][d % 16] */
    float score[BLOCK][16];
    char p[CHUNKS][TILE_BYTES];
    char v[CHUNKS][DIM_MAX / 16][TILE_BYTES];
    char wide[BLOCK * DIM_MAX * 2]; /* not in bf16: the block's keys in it */
    float factor[2][BLOCK];         /* factors of the block's keys, and of its values */
    float rotated[16][DIM_MAX];     /* queries of a cache whose rows are rotated */
};

static bool amx_attend_fits(const struct kern_cache_options *o) {
    if (o->heads || o->latent) return false; /* known ones are larger, too */
    if (row_scaled(o->dtype)) return o->head_dim == 64 || o->head_dim == 128;
    return (o->dtype == KERN_BF16 || o->dtype == KERN_E4M3) &&
           (o->head_dim == 32 || o->head_dim == 64 || o->head_dim == 128);
}

size_t cpu_attend_scratch_amx(const struct kern_cache_options *options) {
    size_t other = cpu_attend_scratch_avx512(options);
    return sizeof(struct room) > other ? sizeof(struct room) : other;
}

int cpu_attend_lanes_amx(const struct kern_cache_options *options) {
    return amx_attend_fits(options) ? GROUPS * 16 : cpu_attend_lanes_avx512(options);
}

/* ---- Lanes ---- */

/* Transposes sixteen rows of sixteen dwords (pairs of bf16). */
static void transpose(const __m512i *in, char *tile) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int64_t i = 0; i < 4; i++) {
        _mm512_store_si512(tile + 64 * i, _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88));
        _mm512_store_si512(tile + 64 * (i + 4), _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88));
        _mm512_store_si512(tile + 64 * (i + 8), _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd));
        _mm512_store_si512(tile + 64 * (i + 12), _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd));
    }
}

/* The number at which a tile of keys and queries begins, and how far behind it its second half is:
 * the tiles of keys in 4 bits are pairs of halves of 64 numbers (load_numbers). */
struct place {
    int low, apart;
};

static struct place amx_attend_place_of(enum kern_dtype dtype, int tile) {
    if (dtype != KERN_ROW4) return (struct place){tile * TILE_DEPTH, 16};
    return (struct place){tile / 2 * 2 * TILE_DEPTH + tile % 2 * 16, TILE_DEPTH};
}

/* Packs queries as B tiles, in log2 units: row = pair of numbers, column = lane. */
static void pack_queries(const float *const *q, const struct cpu_attend_job *job,
                         char (*tiles)[TILE_BYTES]) {
    __m512 by = v16_set(job->scale * LOG2_E);
    for (int tile = 0; tile < job->head_dim / TILE_DEPTH; tile++) {
        const struct place at = amx_attend_place_of(job->cache->options.dtype, tile);
        __m512i lanes[16];
        for (int l = 0; l < 16; l++) {
            __m512 low = q[l] ? v16_mul(v16_load(q[l] + at.low), by) : v16_set(0);
            __m512 high = q[l] ? v16_mul(v16_load(q[l] + at.low + at.apart), by) : v16_set(0);
            lanes[l] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
        transpose(lanes, tiles[tile]);
    }
}

/* A lane's query, rotated as the cache's rows are. */
static const float *query_of(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                             int lane, float *rotated) {
    const float *q = cpu_attend_query(job, item, lane);
    if (!row_scaled(job->cache->options.dtype)) return q;
    memcpy(rotated, q, (size_t)job->head_dim * sizeof *q);
    cpu_cache_rotate(job->cache, rotated, job->head_dim);
    return rotated;
}

/* Fills a partial last group with zero queries that see the entries of its last lane. */
static void amx_attend_begin(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                             const struct cpu_stream *stream, struct room *room) {
    const struct kern_span *span = &job->batch->spans[item->span];
    int groups = (item->lanes + 15) / 16, known = -1;
    int32_t lo = 0, hi = 0;
    for (int g = 0; g < groups; g++) {
        const float *q[16] = {NULL};
        for (int l = 0; l < 16; l++) {
            int lane = 16 * g + l, token = (item->lane + lane) / job->group;
            room->most[g][l] = -INFINITY;
            room->sum[g][l] = 0;
            if (lane < item->lanes) {
                cpu_attend_begin(job, item, lane, &room->most[g][l], &room->sum[g][l]);
                room->most[g][l] *= LOG2_E;
                if (token != known) cpu_attend_range(job, stream, span, token, &lo, &hi);
                known = token;
                q[l] = query_of(job, item, lane, room->rotated[l]);
            }
            room->lo[g][l] = lo;
            room->hi[g][l] = hi;
        }
        pack_queries(q, job, room->q[g]);
    }
    memset(room->acc, 0, (size_t)groups * sizeof room->acc[0]);
}

static void amx_attend_finish(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                              const struct room *room) {
    for (int l = 0; l < item->lanes; l++) {
        float *out = cpu_attend_out(job, item, l);
        __m512 scale = v16_set(1.0f / room->sum[l / 16][l % 16]);
        for (int i = 0; i < job->head_dim; i += 16)
            v16_store(out + i, v16_mul(v16_load(room->acc[l / 16][i / 16][l % 16]), scale));
        cpu_cache_rotate(job->cache, out, job->head_dim);
    }
}

/* ---- Entries ---- */

/* Location of a block's entries. Sixteen entries from a multiple of sixteen share a page. */
struct view {
    const struct cpu_cache *cache;
    const struct cpu_layer *layer;
    const uint32_t *pages;
    int32_t start, count; /* the block's entries that any lane sees, at most BLOCK */
    int32_t end;          /* first entry that no lane of the item sees */
    int dim;
    enum kern_dtype dtype;
    float cap;  /* kern_attend_options, in log2 units */
    char *wide; /* in struct room; NULL: pages are bf16 */
    struct {
        const char *at, *end; /* the page of the next block that is being fetched */
        int32_t entry, stop;  /* entries of the pages after it */
    } ahead;
};

static void start_ahead(struct view *view) {
    const int32_t next = view->start + BLOCK, left = view->end - next;
    view->ahead.at = view->ahead.end = NULL;
    view->ahead.entry = next;
    view->ahead.stop = next + (left < BLOCK ? left : BLOCK);
}

/* Fetches, into the second-level cache, as much of the next block's pages as two entries' rows of
 * `numbers` numbers take. Steps of the arithmetic do this in turn with their own work: a core has
 * few misses in flight, so the requests of a whole block at once would wait for each other. */
SIMD void fetch_ahead(struct view *view, int numbers) {
    const size_t bytes = 2 * (size_t)numbers * view->layer->row_size / (size_t)view->dim;
    if (view->ahead.at >= view->ahead.end) {
        if (view->ahead.entry >= view->ahead.stop) return;
        const int slots = view->layer->page_slots;
        view->ahead.at = cpu_cache_k(view->cache, view->pages[view->ahead.entry / slots]);
        view->ahead.end = view->ahead.at + view->cache->page_size;
        view->ahead.entry += slots;
    }
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(view->ahead.at + i, _MM_HINT_T1);
    view->ahead.at += bytes;
}

/* Sixteen rows from a multiple of sixteen on, as stored in the cache. */
static const char *page_rows(const struct view *view, bool values, int32_t entry) {
    int slots = view->layer->page_slots;
    uint32_t page = view->pages[entry / slots];
    const char *rows =
        values ? cpu_cache_v(view->cache, view->layer, page) : cpu_cache_k(view->cache, page);
    return rows + (size_t)(entry % slots) * view->layer->row_size;
}

/* Sixteen rows of keys as bf16. */
static const char *keys_at(const struct view *view, int32_t entry) {
    if (!view->wide) return page_rows(view, false, entry);
    return view->wide + (size_t)(entry - view->start) * (size_t)view->dim * 2;
}

/* Loads numbers of a row from `i` on as bf16: 32, or 64 into two vectors of a dtype whose rows have
 * levels. Of 4 bits, the first vector has numbers 0-15 and 32-47, the second one the others. */
SIMD void load_numbers(__m512i to[2], const char *row, int64_t i, const enum kern_dtype dtype) {
    if (dtype == KERN_BF16)
        to[0] = _mm512_loadu_si512(row + 2 * i);
    else if (dtype == KERN_E4M3)
        to[0] = (__m512i)_mm512_cvtne2ps_pbh(v16_load_e4m3((const uint8_t *)row + i + 16),
                                             v16_load_e4m3((const uint8_t *)row + i));
    else if (dtype == KERN_ROW8)
        for (int64_t half = 0; half < 2; half++) {
            const int8_t *from = (const int8_t *)row + i + 32 * half;
            to[half] = (__m512i)_mm512_cvtne2ps_pbh(v16_load_row8(from + 16), v16_load_row8(from));
        }
    else {
        const __m512 levels =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)row_levels)));
        const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(levels, levels);
        const __m512i pairs =
            _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(row + i / 2)));
        to[0] = _mm512_permutexvar_epi16(pairs, table); /* by the low five bits */
        to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), table);
    }
}

/* Numbers in the vectors of load_numbers. */
SIMD int load_count(const enum kern_dtype dtype) {
    return dtype == KERN_ROW8 || dtype == KERN_ROW4 ? 64 : 32;
}

/* Converts the keys of whole groups of sixteen; entries past the end are masked later. */
SIMD void widen_typed(const struct view *view, const enum kern_dtype dtype) {
    const size_t size = view->layer->row_size;
    char *to = view->wide;
    for (int first = 0; first < view->count; first += 16) {
        const char *row = page_rows(view, false, view->start + first);
        for (int j = 0; j < 16; j++, row += size)
            for (int i = 0; i < view->dim; i += load_count(dtype)) {
                __m512i numbers[2];
                load_numbers(numbers, row, i, dtype);
                for (int half = 0; half < load_count(dtype) / 32; half++, to += 64)
                    _mm512_storeu_si512(to, numbers[half]);
            }
    }
}

static void widen_keys(const struct view *view) {
    if (view->dtype == KERN_E4M3)
        widen_typed(view, KERN_E4M3);
    else if (view->dtype == KERN_ROW8)
        widen_typed(view, KERN_ROW8);
    else
        widen_typed(view, KERN_ROW4);
}

/* Factors of the block's rows. Those past the end are zeros, because their memory is undefined. */
static void load_factors(const struct view *view, struct room *room) {
    for (int first = 0; first < BLOCK; first += 16)
        for (int values = 0; values < 2; values++) {
            const int32_t left = view->count - first, slots = view->layer->page_slots;
            __m512 factors = v16_set(0);
            if (left > 0) {
                const int32_t entry = view->start + first;
                const uint16_t *from =
                    cpu_cache_factors(view->cache, view->layer, view->pages[entry / slots], values);
                factors =
                    v16_keep(v16_load_bf16(from + entry % slots), 0, left < 16 ? left : 16, 0);
            }
            v16_store(room->factor[values] + first, factors);
        }
}

/* Interleaves rows 2j and 2j + 1 of sixteen entries' values into rows of B tiles, one tile per 16
 * numbers from `dim` on. Entries past the end become zeros, because their memory is undefined and
 * 0 * NaN is not 0; levels are finite. */
SIMD void interleave_typed(struct view *view, int32_t first, int dim, int count,
                           char (*tiles)[TILE_BYTES], const enum kern_dtype dtype) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int32_t at = view->start + first;
    const size_t size = view->layer->row_size;
    const char *row = page_rows(view, true, at);
    for (int j = 0; j < 16; j += 2, row += 2 * size) {
        __mmask32 even = at + j < view->end ? ~0u : 0, odd = at + j + 1 < view->end ? ~0u : 0;
        char *to = tiles[0] + (size_t)(first % TILE_DEPTH + j) / 2 * 64;
        fetch_ahead(view, count);
        for (int i = 0; i < count; i += load_count(dtype)) {
            __m512i a[2], b[2];
            load_numbers(a, row, dim + i, dtype);
            load_numbers(b, row + size, dim + i, dtype);
            for (int half = 0; half < load_count(dtype) / 32; half++) {
                const struct place place = amx_attend_place_of(dtype, i / TILE_DEPTH + half);
                if (load_count(dtype) == 32) {
                    a[half] = _mm512_maskz_mov_epi16(even, a[half]);
                    b[half] = _mm512_maskz_mov_epi16(odd, b[half]);
                }
                char *tile = to + (size_t)place.low / 16 * TILE_BYTES;
                _mm512_store_si512(tile, _mm512_permutex2var_epi16(a[half], low, b[half]));
                _mm512_store_si512(tile + (size_t)place.apart / 16 * TILE_BYTES,
                                   _mm512_permutex2var_epi16(a[half], high, b[half]));
            }
        }
    }
}

static void interleave(struct view *view, int32_t first, int dim, int count,
                       char (*tiles)[TILE_BYTES]) {
    if (view->dtype == KERN_BF16)
        interleave_typed(view, first, dim, count, tiles, KERN_BF16);
    else if (view->dtype == KERN_E4M3)
        interleave_typed(view, first, dim, count, tiles, KERN_E4M3);
    else if (view->dtype == KERN_ROW8)
        interleave_typed(view, first, dim, count, tiles, KERN_ROW8);
    else
        interleave_typed(view, first, dim, count, tiles, KERN_ROW4);
}

/* Loads 32 entries from `first`; the second sixteen may lie past the end of the stream. */
static void load_chunk(struct view *view, int32_t first, int dim, int count,
                       char (*tiles)[TILE_BYTES]) {
    interleave(view, first, dim, count, tiles);
    if (first + 16 < view->count)
        interleave(view, first + 16, dim, count, tiles);
    else
        for (int i = 0; i < count / 16; i++) memset(tiles[i] + TILE_BYTES / 2, 0, TILE_BYTES / 2);
}

/* ---- Scores ---- */

/* Two tiles of sixteen entries at a time; Q stays in tiles 4 to 7. */
#define SCORE_STEP(chunk, query)                                                                   \
    if (chunks > (chunk)) {                                                                        \
        _tile_loadd(2, a + (size_t)64 * (chunk), size);                                            \
        _tile_dpbf16ps(0, 2, query);                                                               \
        _tile_loadd(3, b + (size_t)64 * (chunk), size);                                            \
        _tile_dpbf16ps(1, 3, query);                                                               \
    }

static void compute_scores(const struct view *view, struct room *room, int group) {
    int chunks = view->dim / TILE_DEPTH;
    size_t size = (size_t)view->dim * 2;
    _tile_loadd(4, room->q[group][0], 64);
    if (chunks > 1) _tile_loadd(5, room->q[group][1], 64);
    if (chunks > 2) {
        _tile_loadd(6, room->q[group][2], 64);
        _tile_loadd(7, room->q[group][3], 64);
    }
    for (int first = 0; first < view->count; first += 32) {
        const char *a = keys_at(view, view->start + first);
        /* The second tile may lie past the end: it is then computed from the first one and
         * masked. */
        const char *b = first + 16 < view->count ? keys_at(view, view->start + first + 16) : a;
        _tile_zero(0);
        _tile_zero(1);
        SCORE_STEP(0, 4)
        SCORE_STEP(1, 5)
        SCORE_STEP(2, 6)
        SCORE_STEP(3, 7)
        _tile_stored(0, room->score[first], 64);
        _tile_stored(1, room->score[first + 16], 64);
    }
}

/* ---- Weights ---- */

static void multiply_scores(struct room *room, int rows) {
    for (int i = 0; i < rows; i++)
        v16_store(room->score[i], v16_mul(v16_load(room->score[i]), v16_set(room->factor[0][i])));
}

static void cap_scores(struct room *room, int rows, float cap) {
    for (int i = 0; i < rows; i++)
        v16_store(room->score[i], v16_soft_cap(v16_load(room->score[i]), cap));
}

static void mask_scores(const struct view *view, struct room *room, int group, int rows) {
    __m512i lo = _mm512_loadu_si512(room->lo[group]), hi = _mm512_loadu_si512(room->hi[group]);
    for (int i = 0; i < rows; i++) {
        __m512i entry = _mm512_set1_epi32(view->start + i);
        __mmask16 seen = _mm512_cmp_epi32_mask(lo, entry, _MM_CMPINT_LE) &
                         _mm512_cmp_epi32_mask(entry, hi, _MM_CMPINT_LT);
        __m512 s = _mm512_mask_loadu_ps(v16_set(-INFINITY), seen, room->score[i]);
        v16_store(room->score[i], s);
    }
}

/* Do all lanes see the whole block, so that nothing needs a mask? */
static bool all_seen(const struct view *view, const struct room *room, int group) {
    __m512i lo = _mm512_loadu_si512(room->lo[group]), hi = _mm512_loadu_si512(room->hi[group]);
    __m512i start = _mm512_set1_epi32(view->start), end = _mm512_set1_epi32(view->start + BLOCK);
    return (_mm512_cmp_epi32_mask(lo, start, _MM_CMPINT_NLE) |
            _mm512_cmp_epi32_mask(hi, end, _MM_CMPINT_LT)) == 0;
}

static bool any_seen(const struct view *view, const struct room *room, int group) {
    __m512i lo = _mm512_loadu_si512(room->lo[group]), hi = _mm512_loadu_si512(room->hi[group]);
    __m512i start = _mm512_set1_epi32(view->start), end = _mm512_set1_epi32(view->start + BLOCK);
    return (_mm512_cmp_epi32_mask(lo, end, _MM_CMPINT_LT) &
            _mm512_cmp_epi32_mask(start, hi, _MM_CMPINT_LT)) != 0;
}

static __m512 block_most(const struct room *room, int rows) {
    __m512 a = v16_load(room->score[0]), b = v16_load(room->score[1]);
    for (int i = 2; i < rows; i += 2) {
        a = v16_max(a, v16_load(room->score[i]));
        b = v16_max(b, v16_load(room->score[i + 1]));
    }
    return v16_max(a, b);
}

/* Weights of `rows` entries (a multiple of 32) as A tiles, multiplied by the values' factors if
 * `scaled`; returns their sums. Even and odd entries are added separately, then together, so
 * entries after the last visible one only add zeros. */
SIMD __m512 compute_weights(struct view *view, struct room *room, int rows, __m512 most,
                            const bool scaled) {
    __m512 even = v16_set(0), odd = v16_set(0);
    for (int first = 0; first < rows; first += TILE_DEPTH) {
        __m512i pairs[16];
        for (int j = 0; j < 16; j++) {
            int i = first + 2 * j;
            fetch_ahead(view, view->dim);
            __m512 a = v16_exp2(v16_sub(v16_load(room->score[i]), most));
            __m512 b = v16_exp2(v16_sub(v16_load(room->score[i + 1]), most));
            even = v16_add(even, a);
            odd = v16_add(odd, b);
            if (scaled) {
                a = v16_mul(a, v16_set(room->factor[1][i]));
                b = v16_mul(b, v16_set(room->factor[1][i + 1]));
            }
            pairs[j] = (__m512i)v16_pair(a, b);
        }
        transpose(pairs, room->p[first / TILE_DEPTH]);
    }
    return v16_add(even, odd);
}

/* ---- Values ---- */

static void rescale(struct room *room, int group, int dim, __m512 keep) {
    float by[16];
    v16_store(by, keep);
    for (int i = 0; i < dim / 16; i++)
        for (int l = 0; l < 16; l++) {
            float *row = room->acc[group][i][l];
            v16_store(row, v16_mul(v16_load(row), v16_set(by[l])));
        }
}

/* Adds sixty-four numbers of the sums at a time (or the remaining 32). Items of a single group
 * convert values into tiles on the fly, in a buffer that stays in the first-level cache; items of
 * several groups find them ready in `v`. */
static void add_values_four(struct view *view, struct room *room, int group, int chunks, bool ready,
                            int i) {
    float(*acc)[16][16] = room->acc[group] + i;
    _tile_loadd(0, acc[0], 64);
    _tile_loadd(1, acc[1], 64);
    _tile_loadd(2, acc[2], 64);
    _tile_loadd(3, acc[3], 64);
    for (int c = 0; c < chunks; c++) {
        char(*v)[TILE_BYTES] = ready ? room->v[c] + i : room->v[c & 1];
        if (!ready) load_chunk(view, c * TILE_DEPTH, 16 * i, 64, v);
        _tile_loadd(4, room->p[c], 64);
        _tile_loadd(6, v[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, v[1], 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, v[2], 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, v[3], 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, acc[0], 64);
    _tile_stored(1, acc[1], 64);
    _tile_stored(2, acc[2], 64);
    _tile_stored(3, acc[3], 64);
}

static void add_values_two(struct view *view, struct room *room, int group, int chunks,
                           bool ready) {
    float(*acc)[16][16] = room->acc[group];
    _tile_loadd(0, acc[0], 64);
    _tile_loadd(1, acc[1], 64);
    for (int c = 0; c < chunks; c++) {
        char(*v)[TILE_BYTES] = room->v[c];
        if (!ready) load_chunk(view, c * TILE_DEPTH, 0, 32, v);
        _tile_loadd(4, room->p[c], 64);
        _tile_loadd(6, v[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, v[1], 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, acc[0], 64);
    _tile_stored(1, acc[1], 64);
}

/* ---- A block against sixteen lanes ---- */

static void amx_attend_meet(struct view *view, struct room *room, int group, bool ready) {
    int chunks = (view->count + TILE_DEPTH - 1) / TILE_DEPTH, rows = chunks * TILE_DEPTH;
    const bool scaled = row_scaled(view->dtype);
    compute_scores(view, room, group);
    if (scaled) multiply_scores(room, rows);
    if (view->cap > 0) cap_scores(room, rows, view->cap);
    if (!all_seen(view, room, group)) mask_scores(view, room, group, rows);
    __m512 before = v16_load(room->most[group]);
    __m512 most = v16_max(before, block_most(room, rows));
    v16_store(room->most[group], most);
    /* A lane that has seen nothing yet: -inf - (-inf) would be NaN; -inf - 0 gives zeros. */
    __mmask16 nothing = _mm512_cmp_ps_mask(most, v16_set(-INFINITY), _CMP_EQ_OQ);
    __mmask16 changed = _mm512_cmp_ps_mask(most, before, _CMP_NEQ_UQ) & (__mmask16)~nothing;
    most = _mm512_mask_mov_ps(most, nothing, v16_set(0));
    __m512 keep = v16_exp2(v16_sub(before, most));
    __m512 sum = v16_mul(v16_load(room->sum[group]), keep);
    sum = v16_add(sum, scaled ? compute_weights(view, room, rows, most, true)
                              : compute_weights(view, room, rows, most, false));
    v16_store(room->sum[group], sum);
    if (changed) rescale(room, group, view->dim, keep); /* a factor of 1 changes nothing */
    if (view->dim == 32) add_values_two(view, room, group, chunks, ready);
    for (int i = 0; i + 4 <= view->dim / 16; i += 4)
        add_values_four(view, room, group, chunks, ready, i);
}

void cpu_attend_amx(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                    void *scratch) {
    if (!amx_attend_fits(&job->cache->options)) {
        cpu_attend_avx512(job, item, scratch);
        return;
    }
    struct room *room = scratch;
    const enum kern_dtype dtype = job->cache->options.dtype;
    const struct kern_span *span = &job->batch->spans[item->span];
    struct cpu_stream stream = cpu_cache_stream(job->cache, span->slot, job->layer, item->head);
    amx_attend_begin(job, item, &stream, room);
    int groups = (item->lanes + 15) / 16, last = item->lanes - 1;
    struct view view = {.cache = job->cache,
                        .layer = job->shape,
                        .pages = stream.pages,
                        .dim = job->head_dim,
                        .cap = job->cap * LOG2_E,
                        .dtype = dtype,
                        .wide = dtype == KERN_BF16 ? NULL : room->wide,
                        .end = room->hi[last / 16][last % 16]};
    amx_configure(16, 8);
    for (view.start = room->lo[0][0] / BLOCK * BLOCK; view.start < view.end; view.start += BLOCK) {
        view.count = view.end - view.start < BLOCK ? view.end - view.start : BLOCK;
        if (groups == 1) start_ahead(&view); /* otherwise arithmetic takes longer than reading */
        if (view.wide) widen_keys(&view);
        if (row_scaled(dtype)) load_factors(&view, room);
        for (int c = 0; groups > 1 && c * TILE_DEPTH < view.count; c++)
            load_chunk(&view, c * TILE_DEPTH, 0, view.dim, room->v[c]);
        for (int g = 0; g < groups; g++)
            if (any_seen(&view, room, g)) amx_attend_meet(&view, room, g, groups > 1);
    }
    _tile_release();
    amx_attend_finish(job, item, room);
}
