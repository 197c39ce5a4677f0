/* For the tests of eviction's stages: a small float32 cache with given keys, values, queries and
 * positions, and double arithmetic to judge by. */
#ifndef KEEPD_TESTS_EVICTION_H
#define KEEPD_TESTS_EVICTION_H

#include <math.h>
#include <stdlib.h>

#include "kernels/cpu/evict.h"
#include "tests/unit/kernels/cache_content.h"

struct bed {
    struct cpu_cache cache;
    struct kern_rule rule;
    struct kern_evict due; /* the eviction of slot 0 */
    int group, dim, heads;
    int32_t tokens;
    const float *sinks; /* [heads * group] or NULL */
};

static inline struct bed bed_open(int layers, int heads_q, int heads_kv, int dim,
                                  const struct kern_rule *rule) {
    struct bed bed = {.rule = *rule, .group = heads_q / heads_kv, .dim = dim, .heads = heads_kv};
    struct kern_cache_options options = {.layers = layers,
                                         .heads_q = heads_q,
                                         .heads_kv = heads_kv,
                                         .head_dim = dim,
                                         .dtype = KERN_F32,
                                         .pages = 4000,
                                         .slots = 3,
                                         .max_positions = 2000};
    if (cpu_cache_open(&bed.cache, &options, 1, NULL) != 0) abort();
    return bed;
}

/* In (-1, 1), the same everywhere. */
static inline float bed_noise(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t h = content_mix(content_mix(content_mix(a * 0x9e3779b9u + 1) ^ b) ^ c);
    return (float)((double)h / 2147483648.0 - 1);
}

static inline float *bed_row(const struct bed *bed, int slot, int stream, int32_t i, bool values) {
    uint32_t page = cpu_cache_table(&bed->cache, slot, stream)[i / bed->cache.page_slots];
    const struct cpu_layer *layer = cpu_cache_layer(&bed->cache, stream);
    float *rows = values ? cpu_cache_v(&bed->cache, layer, page) : cpu_cache_k(&bed->cache, page);
    return rows + i % bed->cache.page_slots * bed->dim;
}

/* Keys and values of a position; some keys are near copies of others. */
static inline void bed_fill(const struct bed *bed, int slot, int stream, int32_t i, int32_t pos) {
    uint32_t topic = content_mix((uint32_t)pos / 3 + (uint32_t)stream) % 5;
    for (int d = 0; d < bed->dim; d++) {
        uint32_t at = (uint32_t)(stream * 4096 + d);
        bed_row(bed, slot, stream, i, false)[d] =
            bed_noise(7, topic, at) + 0.5f * bed_noise(1, (uint32_t)pos, at);
        bed_row(bed, slot, stream, i, true)[d] = bed_noise(2, (uint32_t)pos, at);
    }
}

static inline float bed_query(int layer, int32_t pos, int at) {
    return 0.5f * bed_noise(3, (uint32_t)pos, (uint32_t)(layer * 65536 + at));
}

/* Appends `count` tokens to a slot as a step does, queries and accumulated mass included. */
static inline void bed_append(struct bed *bed, int slot, int32_t count) {
    struct kern_span span = {.slot = slot, .count = count, .pos = bed->tokens, .rule = &bed->rule};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    const struct kern_cache_options *o = &bed->cache.options;
    int width = o->heads_q * bed->dim;
    float *q = calloc((size_t)count * (size_t)width, sizeof *q);
    if (!q || cpu_cache_begin_step(&bed->cache, &batch) != 0) abort();
    for (int layer = 0; layer < o->layers; layer++) {
        for (int32_t t = 0; t < count; t++)
            for (int d = 0; d < width; d++) q[t * width + d] = bed_query(layer, bed->tokens + t, d);
        for (int head = 0; head < bed->heads; head++) {
            int stream = layer * bed->heads + head;
            struct cpu_stream view = cpu_cache_stream(&bed->cache, slot, layer, head);
            for (int32_t t = 0; t < count; t++)
                bed_fill(bed, slot, stream, view.length - count + t, bed->tokens + t);
            struct cpu_mass mass = {.stream = view,
                                    .q = q + head * bed->group * bed->dim,
                                    .q_stride = (size_t)width,
                                    .count = count,
                                    .scale = 1,
                                    .sinks = bed->sinks ? bed->sinks + head * bed->group : NULL,
                                    .group = bed->rule.observe.group};
            if (rule_adds(&bed->rule)) cpu_observe_mass(&bed->cache, &mass, 0);
        }
        int window = rule_window(&bed->rule);
        for (int32_t t = 0; window && t < count; t++)
            memcpy(cpu_cache_query(&bed->cache, slot, layer, (bed->tokens + t) % window),
                   q + t * width, (size_t)width * sizeof *q);
    }
    free(q);
}

static inline int bed_evict(struct bed *bed, int slot, int32_t keep) {
    bed->due = (struct kern_evict){
        .slot = slot, .tokens = bed->tokens, .budget = keep, .rule = &bed->rule};
    return cpu_cache_evict(&bed->cache, &bed->due, 1);
}

/* A job for a stage alone, the stages before it done. */
static inline struct evict_job bed_job(struct bed *bed, int32_t keep) {
    bed->due = (struct kern_evict){.tokens = bed->tokens, .budget = keep, .rule = &bed->rule};
    struct evict_job job = {.cache = &bed->cache, .due = &bed->due};
    size_t first = 0;
    for (int stream = 0; stream < bed->cache.streams; stream++) {
        bed->cache.evict[stream].first = first;
        first += (size_t)*cpu_cache_length(&bed->cache, 0, stream);
        evict_count_stream(&job, stream, 0);
    }
    bed->cache.evict[bed->cache.streams].first = first;
    return job;
}

#endif
