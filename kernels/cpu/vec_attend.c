/* Attention over simd.h: softmax on the run, in chunks of at most 16 entries that lie at fixed
 * places (entries 0-15, 16-31, ... of each page), so the arithmetic for a query depends only on
 * which entries it sees. An entry it does not see has weight exactly 0 and adds exactly nothing. */
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

#define LANES 32
#define CHUNK 16

/* Per worker. Vectors are padded with zeros to `width` floats, a multiple of 16. */
struct room {
    float most[LANES], sum[LANES];
    int32_t lo[LANES], hi[LANES]; /* entries the lane sees */
    int width;
    float *q;     /* [LANES][width], scaled */
    float *acc;   /* [LANES][width] */
    float *k, *v; /* [CHUNK][width] */
};

static int padded(int head_dim) {
    return (head_dim + 15) / 16 * 16;
}

size_t VEC(attend_scratch)(const struct kern_cache_options *options) {
    size_t vectors = 2 * LANES + 2 * CHUNK;
    return sizeof(struct room) + 64 + vectors * (size_t)padded(options->head_dim) * sizeof(float);
}

int VEC(attend_lanes)(const struct kern_cache_options *options) {
    (void)options;
    return LANES;
}

static struct room *room_of(const struct cpu_attend_job *job, void *scratch) {
    struct room *room = scratch;
    size_t width = (size_t)padded(job->head_dim);
    room->width = (int)width;
    room->q = (float *)((char *)scratch + (sizeof *room + 63) / 64 * 64);
    room->acc = room->q + LANES * width;
    room->k = room->acc + LANES * width;
    room->v = room->k + CHUNK * width;
    return room;
}

static void begin(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                  const struct cpu_stream *stream, struct room *room) {
    const struct kern_span *span = &job->batch->spans[item->span];
    int32_t known = -1, lo = 0, hi = 0;
    for (int l = 0; l < item->lanes; l++) {
        int token = (item->lane + l) / job->group;
        if (token != known) cpu_attend_range(job, stream, span, token, &lo, &hi);
        known = token;
        room->lo[l] = lo;
        room->hi[l] = hi;
        room->most[l] = -INFINITY;
        room->sum[l] = 0;
        const float *q = cpu_attend_query(job, item, l);
        int64_t at = (int64_t)l * room->width;
        float *to = room->q + at, *acc = room->acc + at;
        for (int i = 0; i < room->width; i++) {
            to[i] = i < job->head_dim ? q[i] * job->scale : 0.0f;
            acc[i] = 0;
        }
    }
}

/* `count` vectors as padded floats: where they lie if they are that already, else a copy. */
static const float *widen(const struct cpu_attend_job *job, const void *from, int count,
                          float *copy, int width) {
    int dim = job->head_dim;
    enum kern_dtype dtype = job->cache->options.dtype;
    if (dtype == KERN_F32 && dim == width) return from;
    for (int64_t j = 0; j < count; j++)
        for (int i = 0; i < dim; i += 16)
            v16_store(copy + j * width + i, v16_load_row(from, j * dim + i, dim - i, dtype));
    return copy;
}

/* Four dot products at a time: enough chains to hide the latency of an addition. */
SIMD void dots(const float *q, const float *k, int width, const int count, float *out) {
    v16 sum[4];
    _Pragma("GCC unroll 4") for (int j = 0; j < count; j++) sum[j] = v16_set(0);
    for (int i = 0; i < width; i += 16) {
        v16 a = v16_load(q + i);
        _Pragma("GCC unroll 4") for (int j = 0; j < count; j++) sum[j] =
            v16_fma(a, v16_load(k + (int64_t)j * width + i), sum[j]);
    }
    _Pragma("GCC unroll 4") for (int j = 0; j < count; j++) out[j] = v16_sum(sum[j]);
}

/* Only entries [lo, hi): what lies in a page beside them may be stale, and 0 * NaN is not 0. */
static void weigh_values(float *acc, const float *v, int width, int lo, int hi, const float *p,
                         float keep) {
    for (int i = 0; i < width; i += 16) {
        v16 sum = v16_mul(v16_load(acc + i), v16_set(keep));
        for (int j = lo; j < hi; j++)
            sum = v16_fma(v16_set(p[j]), v16_load(v + (int64_t)j * width + i), sum);
        v16_store(acc + i, sum);
    }
}

/* Lane l meets `count` entries, of which it sees [lo, hi). */
static void meet(struct room *room, int l, const float *k, const float *v, int count, int lo,
                 int hi) {
    float score[CHUNK] = {0}, p[CHUNK];
    const int64_t width = room->width;
    const float *q = room->q + l * width;
    int j = 0;
    for (; j + 4 <= count; j += 4) dots(q, k + j * width, room->width, 4, score + j);
    for (; j < count; j++) dots(q, k + j * width, room->width, 1, score + j);
    v16 s = v16_keep(v16_load(score), lo, hi, -INFINITY);
    float most = fmaxf(room->most[l], v16_most(s));
    v16 weights = v16_exp(v16_sub(s, v16_set(most)));
    float keep = 1;
    if (most > room->most[l]) { /* exp(-inf - most) is 0: the first chunk starts from nothing */
        v16_store(p, v16_exp(v16_set(room->most[l] - most)));
        keep = p[0];
    }
    v16_store(p, weights);
    room->sum[l] = room->sum[l] * keep + v16_sum(weights);
    room->most[l] = most;
    weigh_values(room->acc + l * width, v, room->width, lo, hi, p, keep);
}

static void chunk(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                  struct room *room, uint32_t page, int slot, int count, int32_t entry) {
    const struct cpu_cache *cache = job->cache;
    size_t offset = (size_t)slot * cache->row_size;
    const float *k =
        widen(job, (const char *)cpu_cache_k(cache, page) + offset, count, room->k, room->width);
    const float *v =
        widen(job, (const char *)cpu_cache_v(cache, page) + offset, count, room->v, room->width);
    for (int l = 0; l < item->lanes; l++) {
        int lo = room->lo[l] - entry, hi = room->hi[l] - entry;
        if (hi <= 0 || lo >= count) continue;
        meet(room, l, k, v, count, lo < 0 ? 0 : lo, hi > count ? count : hi);
    }
}

static void finish(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                   const struct room *room) {
    for (int l = 0; l < item->lanes; l++) {
        float *out = cpu_attend_out(job, item, l);
        float scale = 1.0f / room->sum[l];
        for (int i = 0; i < job->head_dim; i++) out[i] = room->acc[l * room->width + i] * scale;
    }
}

void VEC(attend)(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                 void *scratch) {
    struct room *room = room_of(job, scratch);
    const struct kern_span *span = &job->batch->spans[item->span];
    struct cpu_stream stream = cpu_cache_stream(job->cache, span->slot, job->layer, item->head);
    begin(job, item, &stream, room);
    int slots = job->cache->page_slots;
    int32_t last = room->hi[item->lanes - 1];
    for (int32_t page = room->lo[0] / slots; page * slots < last; page++) {
        for (int slot = 0; slot < slots && page * slots + slot < last; slot += CHUNK) {
            int count = slots - slot < CHUNK ? slots - slot : CHUNK;
            chunk(job, item, room, stream.pages[page], slot, count, page * slots + slot);
        }
    }
    finish(job, item, room);
}
