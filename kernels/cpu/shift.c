/* Shifts of the CPU's cache (struct kern_shift): which entries move, and the rotation of their
 * keys. */
#include <math.h>

#include "base/check.h"
#include "kernels/cpu/cache.h"
#include "kernels/places.h"

struct shift_job {
    struct cpu_cache *cache;
    const struct kern_shift *shift;
};

/* Returns by how much the shift changes the place of a token. */
static int32_t moved_by(const struct shift_job *job, int32_t pos) {
    const struct kern_shift *shift = job->shift;
    int32_t positions = job->cache->options.max_positions;
    return places_of(positions, shift->rule->sinks, shift->to, pos) -
           places_of(positions, shift->rule->sinks, shift->from, pos);
}

static const float *rotation_of(const struct cpu_cache *cache, int layer) {
    return cache->options.rotations ? cache->options.rotations[layer] : NULL;
}

/* A stream before the shift. */
struct shift_plan {
    struct cpu_stream view;
    uint32_t *table;
    int32_t length, first; /* entries from `first` on are moved or rotated */
    int32_t dropped;       /* how many entries from `first` on leave the stream */
};

static int32_t dropped_of(const struct shift_job *job, int stream) {
    int32_t most = places_kept(job->cache->options.max_positions);
    int32_t length = *cpu_cache_length(job->cache, job->shift->slot, stream);
    return job->shift->to > job->shift->from && length > most ? length - most : 0;
}

static struct shift_plan plan_stream(const struct shift_job *job, int stream) {
    const struct cpu_cache *cache = job->cache;
    const struct kern_shift *shift = job->shift;
    struct shift_plan plan = {.view = cpu_cache_stream_at(cache, shift->slot, stream),
                              .table = cpu_cache_table(cache, shift->slot, stream),
                              .length = *cpu_cache_length(cache, shift->slot, stream),
                              .dropped = dropped_of(job, stream)};
    bool rotates = rotation_of(cache, cache->layer_of[stream]) != NULL;
    for (; plan.first < plan.length; plan.first++) {
        int32_t pos = cpu_cache_entry_pos(cache, &plan.view, plan.first);
        if (pos < shift->rule->sinks) continue;
        if (plan.dropped > 0 || (rotates && moved_by(job, pos) != 0)) break;
    }
    return plan;
}

/* ---- Rotation ---- */

/* The rotation by one distance; most consecutive entries need the same one. */
struct turn {
    const float *inv_freq;
    int still, half; /* numbers at the front that are not rotated, and pairs behind them */
    int32_t by;
    float *cosine, *sine;
};

static void set_turn(struct turn *turn, int32_t by) {
    if (turn->by == by) return;
    turn->by = by;
    for (int j = 0; j < turn->half; j++) {
        double angle = (double)by * (double)turn->inv_freq[j];
        turn->cosine[j] = (float)cos(angle);
        turn->sine[j] = (float)sin(angle);
    }
}

static void shift_rotate(const struct turn *turn, float *x) {
    for (int j = 0; j < turn->half; j++) {
        float a = x[j], b = x[turn->half + j];
        if (turn->inv_freq[j] == 0) continue;
        x[j] = a * turn->cosine[j] - b * turn->sine[j];
        x[turn->half + j] = b * turn->cosine[j] + a * turn->sine[j];
    }
}

/* Rotates a key or query that is stored as in the cache. */
static void rotate_stored(const struct cpu_cache *cache, const struct turn *turn, float *x) {
    const int dim = turn->still + 2 * turn->half;
    cpu_cache_rotate(cache, x, dim);
    shift_rotate(turn, x + turn->still);
    cpu_cache_rotate(cache, x, dim);
}

static struct turn turn_of(const struct cpu_cache *cache, int layer, struct cpu_work *work) {
    const struct cpu_layer *l = &cache->layers[layer];
    const int half = (l->head_dim - l->latent) / 2;
    return (struct turn){.inv_freq = rotation_of(cache, layer),
                         .still = l->latent,
                         .half = half,
                         .cosine = work->turned,
                         .sine = work->turned + half};
}

static void shift_stream(void *arg, int stream, int worker) {
    const struct shift_job *job = arg;
    struct cpu_cache *cache = job->cache;
    struct shift_plan plan = plan_stream(job, stream);
    struct cpu_work work = cpu_cache_work(cache, worker);
    struct turn turn = turn_of(cache, cache->layer_of[stream], &work);
    const struct cpu_layer *layer = plan.view.layer;
    int32_t slots = layer->page_slots;
    set_turn(&turn, 0);
    for (int32_t i = plan.first; i < plan.length - plan.dropped; i++) {
        uint32_t page = plan.table[i / slots];
        int at = i % slots;
        if (plan.dropped > 0) {
            int32_t from = i + plan.dropped;
            cpu_cache_move_entry(cache, layer, page, at, plan.table[from / slots], from % slots);
        }
        int32_t by = moved_by(job, cpu_cache_pos(cache, page)[at]);
        if (by == 0 || !turn.inv_freq) continue;
        set_turn(&turn, by);
        cpu_cache_wide_row(cache, layer, page, false, at, work.rows);
        rotate_stored(cache, &turn, work.rows);
        cpu_cache_store_row(cache, layer, page, false, at, work.rows);
    }
}

/* Shifts the queries that are kept for a rule with a window. */
static void shift_queries(const struct shift_job *job) {
    struct cpu_cache *cache = job->cache;
    int slot = job->shift->slot, window = cache->slots[slot].window;
    const int32_t *pos = cache->ring_pos + (size_t)slot * KERN_WINDOW_MAX;
    struct cpu_work work = cpu_cache_work(cache, 0);
    for (int layer = 0; layer < cache->options.layers; layer++) {
        const int heads = cache->layers[layer].heads_q;
        struct turn turn = turn_of(cache, layer, &work);
        if (!turn.inv_freq) continue;
        for (int i = 0; i < window; i++) {
            float *query = cpu_cache_query(cache, slot, layer, i);
            if (pos[i] < 0) continue;
            set_turn(&turn, moved_by(job, pos[i]));
            for (int head = 0; head < heads && turn.by != 0; head++)
                rotate_stored(cache, &turn, query + (ptrdiff_t)head * (turn.still + 2 * turn.half));
        }
    }
}

/* ---- The slot ---- */

/* Finds the pages [*from, *to) of a stream that the shift writes to. Returns the stream's table. */
static uint32_t *shift_written_pages(const struct shift_job *job, int stream, int32_t *from,
                                     int32_t *to) {
    struct shift_plan plan = plan_stream(job, stream);
    int32_t length = plan.length - plan.dropped;
    *to = cpu_cache_pages_for(plan.view.layer, length);
    *from = plan.first < length ? plan.first / plan.view.layer->page_slots : *to;
    return plan.table;
}

/* Makes the pages that the shift writes to private. */
static int shift_own_pages(const struct shift_job *job) {
    struct cpu_cache *cache = job->cache;
    int64_t need = 0;
    int32_t from, to;
    for (int stream = 0; stream < cache->streams; stream++) {
        const uint32_t *table = shift_written_pages(job, stream, &from, &to);
        for (int32_t i = from; i < to; i++) need += cache->refs[table[i]] > 1;
    }
    int rc = cache->comm->ops->agree(cache->comm, need > cache->free_count ? ERR_FULL : 0);
    for (int stream = 0; stream < cache->streams && rc == 0; stream++) {
        uint32_t *table = shift_written_pages(job, stream, &from, &to);
        for (int32_t i = from; i < to; i++) cpu_cache_own_page(cache, &table[i]);
    }
    return rc;
}

int cpu_cache_shift(struct cpu_cache *cache, const struct kern_shift *shift) {
    struct shift_job job = {cache, shift};
    CHECK(shift->slot >= 0 && shift->slot < cache->options.slots);
    CHECK(shift->from >= 0 && shift->to >= 0 && cache->options.max_positions >= PLACES_LEAST);
    const struct kern_evict due = {
        .slot = shift->slot, .tokens = shift->tokens, .rule = shift->rule};
    int rc = shift_own_pages(&job); /* cpu_cache_keep_best writes to no other pages */
    if (rc == 0 && shift->to > shift->from && shift->rule->score == KERN_SCORE_RETENTION)
        rc = cpu_cache_keep_best(cache, &due, places_kept(cache->options.max_positions));
    if (rc != 0) return rc;
    if (cache->parallel)
        cache->parallel(cache->parallel_ctx, cache->streams, shift_stream, &job);
    else
        for (int stream = 0; stream < cache->streams; stream++) shift_stream(&job, stream, 0);
    shift_queries(&job);
    for (int stream = 0; stream < cache->streams; stream++) {
        int32_t dropped = dropped_of(&job, stream);
        int32_t length = *cpu_cache_length(cache, shift->slot, stream);
        cpu_cache_shorten(cache, shift->slot, stream, length - dropped);
        cache->entries_evicted += (uint64_t)dropped;
    }
    return 0;
}
