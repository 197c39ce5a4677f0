/* Attention over simd.h: online softmax in chunks of at most 16 entries at fixed places (entries
 * 0-15, 16-31, ... of each page), so that the arithmetic of a query depends only on the entries it
 * sees. An entry that it does not see has weight exactly 0 and adds exactly nothing.
 *
 * Lanes are processed in sets of sixteen. In a full or nearly full set, each vector holds one value
 * of every lane: scores, maxima and sums of weights need no operation across a vector. In a small
 * set, a chunk's entries fill the vector. Both add in the same order (vec_dots.h).
 *
 * Of a cache in bf16, files compiled for AVX512_BF16 multiply pairs of bf16 (vec_dots.h), and round
 * what amx_attend.c rounds: queries, in log2 units, and weights, 2^(score - largest), but not the
 * weights' sum. Subnormal keys and values count as zeros.
 *
 * For few lanes, the keys of as many chunks of a page as there is room for are read before their
 * values: a processor fetches one long run of memory ahead by itself, but not runs of a chunk's
 * keys and a chunk's values by turns. */
#include <float.h>

#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_rows.h"

#define LANES 64
#define CHUNK 16
#define BLOCK 4 /* chunks whose values are added together where many lanes multiply words */

/* Scratch of one worker. Vectors are padded with zeros to `width` floats, a multiple of 16. */
struct room {
    float most[LANES], sum[LANES];
    int32_t lo[LANES], hi[LANES];        /* entries the lane sees; neither descends */
    float weight[BLOCK * LANES * CHUNK]; /* scores, then weights of the entries of some chunks */
    float keep[BLOCK * LANES]; /* for each chunk, what the lanes' earlier sums are multiplied by */
    float unit;                /* factor of scores: 1, or LOG2_E */
    float cap;                 /* kern_attend_options.cap in this unit */
    int width, q_width, v_width; /* numbers of keys, queries, and values and sums */
    int places;  /* lanes that each chunk has in weight and keep; no fewer than the item has */
    int block;   /* chunks whose values are added at a time */
    bool paired; /* queries, weights and values are words of two bf16 */
    bool scaled; /* rows have factors; then the fields below are used: */
    int words;
    int16_t *whole;      /* [LANES][words] queries in whole numbers; a set side by side: packed */
    float factor[LANES]; /* the queries' factors */
    float of_values[CHUNK]; /* factors of a chunk's values */
    float *q;               /* [LANES][q_width], scaled; a set side by side: [q_width][MANY] */
    float *acc;             /* [LANES][v_width] */
    float *wide; /* [CHUNK][width] keys or values, or words of values [BLOCK][CHUNK / 2][v_width] */
};

size_t VEC(attend_scratch)(const struct kern_cache_options *options) {
    size_t vectors = 2 * LANES + BLOCK * CHUNK / 2;
    size_t words = (LANES + MANY) * (size_t)row_width(options->head_dim);
    return sizeof(struct room) + 64 + vectors * (size_t)padded(options->head_dim) * sizeof(float) +
           words * sizeof(int16_t);
}

int VEC(attend_lanes)(const struct kern_cache_options *options) {
    (void)options;
    return LANES;
}

static struct room *vec_attend_room_of(const struct cpu_attend_job *job,
                                       const struct cpu_attend_item *item, void *scratch) {
    struct room *room = scratch;
    size_t width = (size_t)padded(job->head_dim);
    room->width = (int)width;
    room->v_width = padded(job->value_dim);
    room->places = item->lanes <= TILE ? TILE : (item->lanes + MANY - 1) / MANY * MANY;
    room->paired = paired(job->cache->options.dtype);
    room->block = room->paired && item->lanes > TILE ? BLOCK : 1;
    room->q_width = room->paired ? padded(job->head_dim / 2) : room->width;
    room->unit = room->paired ? LOG2_E : 1;
    room->cap = job->cap * room->unit;
    room->q = (float *)((char *)scratch + (sizeof *room + 63) / 64 * 64);
    room->acc = room->q + LANES * width;
    room->wide = room->acc + LANES * width;
    room->scaled = row_scaled(job->cache->options.dtype);
    room->words = row_width(job->head_dim);
    room->whole = (int16_t *)(room->wide + BLOCK * CHUNK / 2 * width);
    return room;
}

/* Lanes that are processed together: one in each lane of a vector, or one after the other. */
struct set {
    int first, lanes;
};

static struct set set_at(const struct cpu_attend_item *item, int first) {
    return (struct set){first, item->lanes - first < MANY ? item->lanes - first : MANY};
}

static bool vec_attend_side_by_side(struct set set) {
    return set.lanes >= MANY_MIN;
}

/* Packs sixteen queries, one per lane, in place. */
static void pack_set(struct room *room, struct set set) {
    float *q = room->q + (int64_t)set.first * room->q_width,
          *packed = room->wide; /* still unused and as large */
    if (room->scaled) {
        int16_t *whole = room->whole + (int64_t)set.first * room->words,
                *copy = room->whole + (int64_t)LANES * room->words;
        pack_words(copy, whole, set.lanes, room->words);
        memcpy(whole, copy, (size_t)(MANY * room->words) * sizeof *whole);
        return;
    }
    pack_many(packed, &(struct rows){q, room->q_width, room->q_width, KERN_F32, NULL}, set.lanes);
    memcpy(q, packed, (size_t)(MANY * room->q_width) * sizeof *q);
}

/* Lane l's query, times the scale. */
static void load_query(const struct cpu_attend_job *job, struct room *room, int l, const float *q) {
    const v16 by = v16_set(job->scale * room->unit);
    float *to = room->q + (int64_t)l * room->q_width;
    for (int i = 0; i < room->width; i += 16) {
        const v16 x = v16_mul(v16_load_row(q, i, job->head_dim - i, KERN_F32), by);
        if (room->paired)
            v16_store_bf16((uint16_t *)(void *)to + i, x);
        else
            v16_store(to + i, x);
    }
    if (room->paired && room->width / 2 < room->q_width) /* an odd number of sixteens */
        v16_store_n(to + room->width / 2, v16_set(0), 8);
    room->factor[l] = 0;
    if (!room->scaled) return;
    cpu_cache_rotate(job->cache, to, job->head_dim);
    room->factor[l] = pack_query(room->whole + (int64_t)l * room->words, to, job->head_dim,
                                 job->cache->options.dtype);
}

static void vec_attend_begin(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                             const struct cpu_stream *stream, struct room *room) {
    const struct kern_span *span = &job->batch->spans[item->span];
    int32_t known = -1, lo = 0, hi = 0;
    for (int l = 0; l < item->lanes; l++) {
        int token = (item->lane + l) / job->group;
        if (token != known) cpu_attend_range(job, stream, span, token, &lo, &hi);
        known = token;
        room->lo[l] = lo;
        room->hi[l] = hi;
        cpu_attend_begin(job, item, l, &room->most[l], &room->sum[l]);
        room->most[l] *= room->unit;
        load_query(job, room, l, cpu_attend_query(job, item, l));
    }
    memset(room->acc, 0, (size_t)(item->lanes * room->v_width) * sizeof *room->acc);
    for (int l = 0; l < item->lanes; l += MANY)
        if (vec_attend_side_by_side(set_at(item, l))) pack_set(room, set_at(item, l));
}

/* ---- A chunk ---- */

/* `count` entries from `entry` on, which lie at `slot` of a page, and the weights that lanes give
 * them. */
struct chunk {
    uint32_t page;
    int slot, count;
    int32_t entry;
    float *weight, *keep; /* lane 0 first */
};

/* The entries of a chunk that a lane sees, [lo, hi); none if lo == hi. */
struct seen {
    int lo, hi;
};

static struct seen seen_of(const struct room *room, int l, const struct chunk *c) {
    int32_t lo = room->lo[l] - c->entry, hi = room->hi[l] - c->entry;
    lo = lo < 0 ? 0 : lo;
    hi = hi > c->count ? c->count : hi;
    return lo < hi ? (struct seen){lo, hi} : (struct seen){0, 0};
}

/* Returns e^x or, if scores are in log2 units, 2^x; x <= 0. */
SIMD v16 vec_attend_weight_of(const struct room *room, v16 x) {
    return room->paired ? v16_exp2(x) : v16_exp(x);
}

/* Raises a lane's largest score to `most`. Returns the factor by which its earlier sums shrink. */
static float raise_most(struct room *room, int l, float most) {
    float keep[16] = {1};
    if (most > room->most[l]) /* exp(-inf - most) is 0: the first chunk starts from nothing */
        v16_store(keep, vec_attend_weight_of(room, v16_set(room->most[l] - most)));
    room->most[l] = most;
    return keep[0];
}

/* Stores a lane's weights of a chunk, as words of two if `paired`. */
static void store_few(const struct room *room, float *weight, v16 w) {
    if (room->paired)
        v16_store_bf16((uint16_t *)(void *)weight, w);
    else
        v16_store(weight, room->scaled ? v16_mul(w, v16_load(room->of_values)) : w);
}

/* Computes the weights of a chunk for a few lanes, each a row of CHUNK. */
static void meet_few(struct room *room, struct set set, const struct chunk *c,
                     const struct rows *keys) {
    float *weight = c->weight + (int64_t)set.first * CHUNK;
    struct dots dots = {weight, CHUNK, room->q + (int64_t)set.first * room->q_width, room->q_width,
                        keys};
    if (room->scaled)
        row_scores_few(weight, room->whole + (int64_t)set.first * room->words,
                       room->factor + set.first, set.lanes, keys, c->count);
    else
        dots_few(&dots, set.lanes, c->count);
    for (int l = set.first; l < set.first + set.lanes; l++, weight += CHUNK) {
        struct seen seen = seen_of(room, l, c);
        c->keep[l] = 1;
        if (seen.hi == 0) continue;
        v16 s = v16_load_fours(weight);
        if (room->cap > 0) s = v16_soft_cap(s, room->cap);
        s = v16_keep(s, seen.lo, seen.hi, -INFINITY);
        c->keep[l] = raise_most(room, l, fmaxf(room->most[l], v16_most(s)));
        s = vec_attend_weight_of(room, v16_sub(s, v16_set(room->most[l])));
        store_few(room, weight, s);
        room->sum[l] = room->sum[l] * c->keep[l] + v16_sum(s);
    }
}

/* Masks the scores of entries that a lane does not see. */
static void mask_many(const struct room *room, struct set set, const struct chunk *c,
                      float *score) {
    for (int l = 0; l < set.lanes; l++) {
        struct seen seen = seen_of(room, set.first + l, c);
        for (int j = 0; j < seen.lo; j++) score[j * MANY + l] = -INFINITY;
        for (int j = seen.hi; j < c->count; j++) score[j * MANY + l] = -INFINITY;
    }
}

static void cap_many(float *score, int count, float cap) {
    for (int64_t j = 0; j < count; j++)
        v16_store(score + j * MANY, v16_soft_cap(v16_load(score + j * MANY), cap));
}

/* Adds a chunk's vectors in the order in which v16_sum adds the lanes of one. */
static v16 sum_many(const float *weight) {
    v16 sum[CHUNK / 2];
    for (int j = 0; j < 8; j++)
        sum[j] = v16_add(v16_load(weight + (int64_t)j * MANY),
                         v16_load(weight + (int64_t)(j + 8) * MANY));
    for (int half = 4; half > 0; half /= 2)
        for (int j = 0; j < half; j++) sum[j] = v16_add(sum[j], sum[j + half]);
    return sum[0];
}

/* Multiplies weights with the factors of the values, or makes words of two weights each. */
static void change_many(const struct room *room, float *weight, int count) {
    for (int64_t j = 0; j < count && room->scaled; j++) {
        float *to = weight + j * MANY;
        v16_store(to, v16_mul(v16_load(to), v16_set(room->of_values[j])));
    }
    for (int64_t j = 0; j < CHUNK / 2 && room->paired; j++) {
        const float *two = weight + 2 * j * MANY;
        v16_store(weight + j * MANY, v16_pair(v16_load(two), v16_load(two + MANY)));
    }
}

/* Replaces scores by their weights, and fills the rest of the chunk with zeros. */
SIMD void weigh_many(float *weight, int count, v16 top, const bool paired) {
    int64_t j = 0;
    for (; j < count; j++) {
        const v16 x = v16_sub(v16_load(weight + j * MANY), top);
        v16_store(weight + j * MANY, paired ? v16_exp2(x) : v16_exp(x));
    }
    for (; j < CHUNK; j++) v16_store(weight + j * MANY, v16_set(0));
}

/* Computes the weights of a chunk for packed lanes: [CHUNK][MANY] or, of words, [CHUNK / 2][MANY].
 * A lane that has seen nothing yet has the maximum -inf, and -inf - -inf is NaN: the smallest float
 * takes its place. */
static void meet_many(struct room *room, struct set set, const struct chunk *c,
                      const struct rows *keys) {
    float *weight = c->weight + (int64_t)set.first * CHUNK;
    int last = set.first + set.lanes - 1;
    if (room->scaled)
        row_scores_many(weight, room->whole + (int64_t)set.first * room->words,
                        room->factor + set.first, keys, c->count);
    else
        dots_many(weight, room->q + (int64_t)set.first * room->q_width, keys, c->count);
    if (room->cap > 0) cap_many(weight, c->count, room->cap);
    if (room->lo[last] > c->entry || room->hi[set.first] < c->entry + c->count)
        mask_many(room, set, c, weight);
    v16 before = v16_load(room->most + set.first), most = before;
    for (int j = 0; j < c->count; j++) most = v16_max(most, v16_load(weight + (int64_t)j * MANY));
    v16 top = v16_max(most, v16_set(-FLT_MAX));
    if (room->paired)
        weigh_many(weight, c->count, top, true);
    else
        weigh_many(weight, c->count, top, false);
    v16 keep = vec_attend_weight_of(room, v16_sub(before, top));
    v16 sum = v16_mul(v16_load(room->sum + set.first), keep);
    v16_store(room->sum + set.first, v16_add(sum, sum_many(weight)));
    change_many(room, weight, c->count);
    v16_store(room->most + set.first, most);
    v16_store(c->keep + set.first, keep);
}

/* Returns how many lanes from l on see the same entries of the chunk as l. */
static int alike(const struct room *room, int l, int end, const struct chunk *c) {
    struct seen seen = seen_of(room, l, c);
    int n = 1;
    for (; l + n < end; n++) {
        struct seen other = seen_of(room, l + n, c);
        if (other.lo != seen.lo || other.hi != seen.hi) break;
    }
    return n;
}

/* Adds values of `count` chunks that the set's lanes see whole or, if it is 1, in part. Adds only
 * entries that a lane sees: other memory of the page may be stale, and 0 * NaN is not 0. */
static void add_values(struct room *room, struct set set, const struct chunk *c, int count,
                       const struct rows *values) {
    const bool many = vec_attend_side_by_side(set);
    int end = set.first + set.lanes;
    for (int l = set.first, n; l < end; l += n) {
        struct seen seen = seen_of(room, l, c);
        int at = set.first * CHUNK + (l - set.first) * (many ? 1 : CHUNK);
        struct weighing w = {.out = room->acc + (int64_t)l * room->v_width,
                             .out_stride = room->v_width,
                             .keep = c->keep + l,
                             .p = c->weight + at,
                             .p_lane = many ? 1 : CHUNK,
                             .p_row = many ? MANY : 1,
                             .rows = values,
                             .mixed = room->block > 1,
                             .chunks = count,
                             .p_chunk = (int64_t)room->places * CHUNK,
                             .keep_chunk = room->places,
                             .row_chunk = (int64_t)room->v_width * CHUNK / 2};
        n = alike(room, l, end, c);
        if (seen.hi > 0) weigh_rows(&w, n, seen.lo, seen.hi);
    }
}

/* Returns whether no lane of the set sees an entry of the chunk. */
static bool apart(const struct room *room, struct set set, const struct chunk *c) {
    int last = set.first + set.lanes - 1;
    return room->hi[last] <= c->entry || room->lo[set.first] >= c->entry + c->count;
}

/* Prefetches what many lanes read next: the values of the chunk and the keys of the next one. Few
 * lanes need no prefetch: they read in order, which the processor detects by itself. */
static void vec_attend_fetch_next(const struct cpu_attend_job *job, const struct chunk *c) {
    const struct cpu_layer *layer = job->shape;
    const size_t row = layer->row_size;
    const int left = layer->page_slots - c->slot, after = left - CHUNK;
    const char *values = cpu_cache_rows(job->cache, layer, c->page, true, c->slot).at;
    const size_t value_bytes = (size_t)(left < CHUNK ? left : CHUNK) * row;
    for (size_t i = 0; i < value_bytes; i += 64) __builtin_prefetch(values + i);
    if (after <= 0) return;
    const char *keys = cpu_cache_rows(job->cache, layer, c->page, false, c->slot + CHUNK).at;
    const size_t key_bytes = (size_t)(after < CHUNK ? after : CHUNK) * row;
    for (size_t i = 0; i < key_bytes; i += 64) __builtin_prefetch(keys + i);
}

/* Computes the lanes' weights of a chunk. Keys are read as stored or, for more lanes than a tile
 * has, converted to floats; keys with factors and words always as stored. */
static void meet_keys(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                      struct room *room, const struct chunk *c) {
    struct rows keys = rows_of(cpu_cache_rows(job->cache, job->shape, c->page, false, c->slot));
    if (item->lanes > TILE) vec_attend_fetch_next(job, c);
    if (room->scaled) {
        const uint16_t *factors =
            cpu_cache_factors(job->cache, job->shape, c->page, true) + c->slot;
        v16_store(room->of_values, v16_load_row(factors, 0, c->count, KERN_BF16));
    } else if (item->lanes > TILE && !room->paired) {
        const void *wide = widen_rows(&keys, c->count, room->wide);
        keys = (struct rows){wide, room->width, room->width, KERN_F32, NULL};
    }
    for (int l = 0; l < item->lanes; l += MANY) {
        const struct set set = set_at(item, l);
        if (apart(room, set, c)) continue;
        if (vec_attend_side_by_side(set))
            meet_many(room, set, c, &keys);
        else
            meet_few(room, set, c, &keys);
    }
}

/* Returns whether every lane of the set sees all entries of a full chunk. */
static bool whole(const struct room *room, struct set set, const struct chunk *c) {
    int last = set.first + set.lanes - 1;
    return c->count == CHUNK && room->hi[set.first] >= c->entry + CHUNK &&
           room->lo[last] <= c->entry;
}

/* Converts the values of a chunk, the one at `place` of a block, to words or floats. Values with
 * factors become levels without them, because the weights include the factors. */
static const void *widen_values(struct room *room, int place, const struct rows *values,
                                int count) {
    float *wide = room->wide + (int64_t)place * CHUNK / 2 * room->v_width;
    if (room->paired)
        mix_rows(wide, room->v_width, values, count);
    else if (room->scaled)
        widen_levels(values, count, wide);
    else
        return widen_rows(values, count, wide);
    return wide;
}

/* Adds the values of a block of chunks times their weights. Values are converted first if there are
 * more lanes than a tile has. While a set sees consecutive chunks whole, its lanes' sums stay in
 * registers. */
static void meet_values(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                        struct room *room, const struct chunk *chunks, int count) {
    struct rows values[BLOCK];
    for (int i = 0; i < count; i++) {
        const struct chunk *c = &chunks[i];
        values[i] = rows_of(cpu_cache_rows(job->cache, job->shape, c->page, true, c->slot));
        if (item->lanes <= TILE) continue;
        const void *wide = widen_values(room, i, &values[i], c->count);
        values[i] = (struct rows){wide, room->v_width, room->v_width,
                                  room->paired ? KERN_BF16 : KERN_F32, NULL};
    }
    for (int l = 0; l < item->lanes; l += MANY) {
        const struct set set = set_at(item, l);
        for (int i = 0, n; i < count; i += n) {
            for (n = 0; i + n < count && whole(room, set, &chunks[i + n]);) n++;
            n = n > 0 ? n : 1;
            if (!apart(room, set, &chunks[i])) add_values(room, set, &chunks[i], n, &values[i]);
        }
    }
}

/* ---- All chunks ---- */

/* Returns the chunk that begins with entry `at`; its weights are stored at `place`. */
static struct chunk chunk_at(struct room *room, const struct cpu_stream *stream, int slots,
                             int32_t at, int32_t last, int place) {
    const int slot = at % slots, left = last - at < slots - slot ? last - at : slots - slot;
    const int64_t lane = (int64_t)place * room->places;
    return (struct chunk){.page = stream->pages[at / slots],
                          .slot = slot,
                          .count = left < CHUNK ? left : CHUNK,
                          .entry = at,
                          .weight = room->weight + lane * CHUNK,
                          .keep = room->keep + lane};
}

/* Computes the weights of all chunks from their keys, then adds their values. */
static void meet_chunks(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                        struct room *room, const struct chunk *chunks, int count) {
    for (int i = 0; i < count; i++) meet_keys(job, item, room, &chunks[i]);
    for (int i = 0, n; i < count; i += n) {
        n = count - i < room->block ? count - i : room->block;
        meet_values(job, item, room, &chunks[i], n);
    }
}

/* Processes the entries up to `last`: at a time a block of chunks, which may lie in several pages,
 * or as many chunks of one page as weights have room for. */
static void meet_all(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                     const struct cpu_stream *stream, struct room *room, int32_t last) {
    const int slots = job->shape->page_slots;
    const bool blocks = room->block > 1;
    const int most = blocks ? room->block : LANES / room->places;
    struct chunk chunks[LANES / TILE];
    int n = 0;
    for (int32_t at = room->lo[0] / slots * slots; at < last;) {
        chunks[n] = chunk_at(room, stream, slots, at, last, n);
        at += chunks[n++].count;
        if (n < most && at < last && (blocks || at % slots)) continue;
        meet_chunks(job, item, room, chunks, n);
        n = 0;
    }
}

static void vec_attend_finish(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                              const struct room *room) {
    for (int l = 0; l < item->lanes; l++) {
        float *out = cpu_attend_out(job, item, l);
        float scale = 1.0f / room->sum[l];
        for (int i = 0; i < job->value_dim; i++) out[i] = room->acc[l * room->v_width + i] * scale;
        cpu_cache_rotate(job->cache, out, job->value_dim);
    }
}

void VEC(attend)(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                 void *scratch) {
    struct room *room = vec_attend_room_of(job, item, scratch);
    const struct kern_span *span = &job->batch->spans[item->span];
    struct cpu_stream stream = cpu_cache_stream(job->cache, span->slot, job->layer, item->head);
    vec_attend_begin(job, item, &stream, room);
    meet_all(job, item, &stream, room, room->hi[item->lanes - 1]);
    vec_attend_finish(job, item, room);
}
