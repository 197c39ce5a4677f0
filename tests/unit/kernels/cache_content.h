/* Content that tells where it belongs: every key, value and log_beta is a hash of (salt, stream,
 * pos), so that a test can recognise each entry wherever eviction and sharing have put it. */
#ifndef KEEPD_TESTS_CACHE_CONTENT_H
#define KEEPD_TESTS_CACHE_CONTENT_H

#include <math.h>
#include <string.h>

#include "kernels/cpu/cache.h"

/* The low bits of a salt say how its log_betas look. */
enum content_style { CONTENT_SMOOTH, CONTENT_TIED, CONTENT_EQUAL, CONTENT_BROKEN };

static inline uint32_t content_mix(uint32_t h) {
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    return h ^ h >> 16;
}

static inline uint32_t content_hash(uint32_t salt, int stream, int32_t pos, uint32_t part) {
    uint32_t h = content_mix(salt ^ 0x9e3779b9u);
    h = content_mix(h ^ (uint32_t)stream * 0x85ebca6bu);
    return content_mix(h ^ (uint32_t)pos * 4u ^ part);
}

static inline float content_log_beta(uint32_t salt, int stream, int32_t pos) {
    static const float broken[] = {NAN, -INFINITY, 0.0f, -0.0f, 1.0f, -1e-30f, -3e38f, INFINITY};
    uint32_t h = content_hash(salt, stream, pos, 2);
    double z = (double)h / 4294967296.0 * 24 - 4; /* logits of a trained gate */
    switch ((enum content_style)(salt & 3)) {
    case CONTENT_SMOOTH:
        return (float)-log1p(exp(-z));
    case CONTENT_TIED:
        return -(float)(h % 3) / 64;
    case CONTENT_EQUAL:
        return 0;
    case CONTENT_BROKEN:
        break;
    }
    return h % 4 == 0 ? broken[h / 4 % 8] : (float)-log1p(exp(-z));
}

/* A row begins and ends with its hash; rows are at least 4 bytes and multiples of 4. */
static inline void content_write_row(const struct cpu_layer *layer, char *row, uint32_t hash) {
    memcpy(row, &hash, sizeof hash);
    memcpy(row + layer->row_size - sizeof hash, &hash, sizeof hash);
}

static inline bool content_row_is(const struct cpu_layer *layer, const char *row, uint32_t hash) {
    return memcmp(row, &hash, sizeof hash) == 0 &&
           memcmp(row + layer->row_size - sizeof hash, &hash, sizeof hash) == 0;
}

/* The factor of a row with this hash, in a dtype with factors. */
static inline uint16_t content_factor(uint32_t hash) {
    return (uint16_t)(hash >> 8);
}

static inline bool content_factor_is(const struct cpu_cache *cache, const struct cpu_layer *layer,
                                     uint32_t page, bool values, int at, uint32_t hash) {
    return !row_scaled(cache->options.dtype) ||
           cpu_cache_factors(cache, layer, page, values)[at] == content_factor(hash);
}

/* Fills the last `count` entries of every stream, as the kernels do after begin_step. */
static inline void content_write(struct cpu_cache *cache, int slot, uint32_t salt, int32_t count) {
    for (int stream = 0; stream < cache->streams; stream++) {
        const struct cpu_layer *layer = cpu_cache_layer(cache, stream);
        const uint32_t *table = cpu_cache_table(cache, slot, stream);
        int32_t length = *cpu_cache_length(cache, slot, stream), slots = layer->page_slots;
        for (int32_t i = length - count; i < length; i++) {
            uint32_t page = table[i / slots];
            size_t row = (size_t)(i % slots) * layer->row_size;
            int32_t pos = cpu_cache_pos(cache, page)[i % slots];
            content_write_row(layer, (char *)cpu_cache_k(cache, page) + row,
                              content_hash(salt, stream, pos, 0));
            content_write_row(layer, (char *)cpu_cache_v(cache, layer, page) + row,
                              content_hash(salt, stream, pos, 1));
            for (uint32_t values = 0; values < 2 && row_scaled(cache->options.dtype); values++)
                cpu_cache_factors(cache, layer, page, values)[i % slots] =
                    content_factor(content_hash(salt, stream, pos, values));
            cpu_cache_log_beta(cache, page)[i % slots] = content_log_beta(salt, stream, pos);
        }
    }
}

/* Is entry `index` of a stream what was written with this salt at its position? */
static inline bool content_holds(const struct cpu_cache *cache, int slot, int stream, int32_t index,
                                 uint32_t salt) {
    const struct cpu_layer *layer = cpu_cache_layer(cache, stream);
    uint32_t page = cpu_cache_table(cache, slot, stream)[index / layer->page_slots];
    int at = index % layer->page_slots;
    size_t row = (size_t)at * layer->row_size;
    int32_t pos = cpu_cache_pos(cache, page)[at];
    float log_beta = content_log_beta(salt, stream, pos);
    return content_row_is(layer, (char *)cpu_cache_k(cache, page) + row,
                          content_hash(salt, stream, pos, 0)) &&
           content_row_is(layer, (char *)cpu_cache_v(cache, layer, page) + row,
                          content_hash(salt, stream, pos, 1)) &&
           content_factor_is(cache, layer, page, false, at, content_hash(salt, stream, pos, 0)) &&
           content_factor_is(cache, layer, page, true, at, content_hash(salt, stream, pos, 1)) &&
           memcmp(&cpu_cache_log_beta(cache, page)[at], &log_beta, sizeof log_beta) == 0;
}

/* A small generator for tests: the same numbers everywhere. */
static inline uint32_t content_random(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % below);
}

#endif
