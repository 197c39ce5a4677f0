/* Shifts: the map of places, and the keys that are rotated to them, against rotations in double. */
#include <criterion/criterion.h>

#include "kernels/places.h"
#include "tests/unit/kernels/cache_content.h"

enum { POSITIONS = 256, DIM = 64, SINKS = 4, STREAMS = 4, FIRST = 100, SECOND = 60 };
enum { LATENT = 48, BLOCKS = 1 + STREAMS };

/* ---- Places ---- */

Test(places, keep_order_and_narrow_distances) {
    static const int32_t positions[] = {128, 200, 256, 640, 8192};
    for (size_t n = 0; n < sizeof positions / sizeof *positions; n++)
        for (int32_t sinks = 0; sinks <= 17; sinks += 17)
            for (int32_t shifts = 1; shifts <= 40; shifts++) {
                int32_t most = positions[n], room = places_room(most);
                int32_t tokens = most + shifts * room; /* as many as this number of shifts has */
                cr_assert_eq(places_shifts(most, tokens), shifts);
                cr_assert_eq(places_shifts(most, places_shifted_at(most, shifts)), shifts);
                cr_assert_eq(places_shifts(most, places_shifted_at(most, shifts) - 1), shifts - 1);
                for (int32_t pos = 0; pos < tokens; pos++) {
                    int32_t at = places_of(most, sinks, shifts, pos);
                    cr_assert(at >= 0 && at < most);
                    int32_t last = places_of(most, sinks, shifts - 1, pos);
                    cr_assert_geq(at, last - room); /* no farther from the newest tokens */
                    if (shifts > 1) cr_assert_leq(at, last);
                    if (pos < sinks) cr_assert_eq(at, pos);
                    if (pos >= tokens - most / 4 - PLACES_BLOCK) /* new, or near after the shift */
                        cr_assert_eq(at, pos - shifts * room);
                    if (pos <= sinks || pos < PLACES_BLOCK) continue;
                    int32_t block = pos - pos % PLACES_BLOCK;
                    int32_t start = places_of(most, 0, shifts, block);
                    if (sinks == 0) cr_assert_eq(at - start, pos - block);
                    int32_t step = at - places_of(most, sinks, shifts, pos - PLACES_BLOCK);
                    if (pos - PLACES_BLOCK >= sinks)
                        cr_assert(step >= 0 && step <= PLACES_BLOCK, "%d of %d: %d", pos, most,
                                  step);
                }
            }
}

Test(places, few_positions_have_none) {
    cr_assert_eq(places_room(PLACES_LEAST - 1), 0);
    cr_assert_eq(places_shifts(PLACES_LEAST - 1, 1000), 0);
    cr_assert_eq(places_of(256, 4, 0, 255), 255);
}

/* ---- The cache ---- */

static float inv_freq[DIM / 2];
static const float *rotations[] = {inv_freq, NULL}; /* the second layer does not rotate */

static struct cpu_cache open_with(enum kern_dtype dtype, int64_t pages, int latent) {
    const struct kern_cache_options options = {.layers = 2,
                                               .heads_q = 2,
                                               .heads_kv = 2,
                                               .head_dim = DIM,
                                               .dtype = dtype,
                                               .latent = latent,
                                               .pages = pages,
                                               .slots = 2,
                                               .max_positions = POSITIONS,
                                               .rotations = rotations};
    struct cpu_cache cache;
    struct fault fault = {0};
    for (int j = 0; j < DIM / 2 - 4; j++) inv_freq[j] = (float)pow(10000, -2.0 * j / DIM);
    cr_assert_eq(cpu_cache_open(&cache, &options, 1, &fault), 0, "%s", fault.text);
    return cache;
}

static struct cpu_cache open_cache(enum kern_dtype dtype, int64_t pages) {
    return open_with(dtype, pages, 0);
}

static void check(const struct cpu_cache *cache) {
    struct fault fault = {0};
    cr_assert_eq(cpu_cache_check(cache, &fault), 0, "%s", fault.text);
}

/* Where entry `index` of a stream lies. */
struct place {
    uint32_t page;
    int at;
    int32_t pos;
};

static struct place find(const struct cpu_cache *cache, int slot, int stream, int32_t index) {
    const uint32_t *table = cpu_cache_table(cache, slot, stream);
    int at = index % cache->page_slots;
    uint32_t page = table[index / cache->page_slots];
    return (struct place){page, at, cpu_cache_pos(cache, page)[at]};
}

static float noise(int stream, int32_t pos, int d) {
    return (float)content_hash(7, stream, pos, (uint32_t)d) / 2147483648.0f - 1;
}

static void append(struct cpu_cache *cache, int slot, int32_t pos, int32_t count) {
    struct kern_span span = {.slot = slot, .count = count, .pos = pos};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    cr_assert_eq(cpu_cache_begin_step(cache, &batch), 0);
    for (int stream = 0; stream < STREAMS; stream++)
        for (int32_t i = 0; i < count; i++) {
            int32_t length = *cpu_cache_length(cache, slot, stream);
            struct place p = find(cache, slot, stream, length - count + i);
            float row[DIM];
            for (int d = 0; d < DIM; d++) row[d] = noise(stream, p.pos, d);
            cpu_cache_store_row(cache, cpu_cache_layer(cache, stream), p.page, false, p.at, row);
        }
    check(cache);
}

static int shift_by(struct cpu_cache *cache, int slot, int32_t from, int32_t to,
                    const struct kern_rule *rule) {
    const struct kern_shift one = {
        .slot = slot, .rule = rule, .tokens = POSITIONS, .from = from, .to = to};
    int rc = cpu_cache_shift(cache, &one);
    check(cache);
    return rc;
}

static int shift(struct cpu_cache *cache, int slot, int32_t from, int32_t to) {
    const struct kern_rule rule = {.score = KERN_SCORE_RECENCY, .sinks = SINKS};
    return shift_by(cache, slot, from, to, &rule);
}

/* All keys of a slot, widened, in the model's basis. */
static float *keys_of(const struct cpu_cache *cache, int slot) {
    static float keys[2][STREAMS * POSITIONS * DIM];
    static int turn;
    float *out = keys[turn++ % 2];
    for (int stream = 0; stream < STREAMS; stream++)
        for (int32_t i = 0; i < *cpu_cache_length(cache, slot, stream); i++) {
            struct place p = find(cache, slot, stream, i);
            float *row = out + (size_t)(stream * POSITIONS + i) * DIM;
            cpu_cache_wide_row(cache, cpu_cache_layer(cache, stream), p.page, false, p.at, row);
            cpu_cache_rotate(cache, row, DIM);
        }
    return out;
}

static void expect_rotated(const float *before, const float *after, int32_t by, bool rotates,
                           double epsilon, double least) {
    if (by == 0 || !rotates) {
        cr_assert_arr_eq(after, before, DIM * sizeof *before);
        return;
    }
    for (int j = 0; j < DIM / 2; j++) {
        double angle = (double)by * (double)inv_freq[j], a = (double)before[j],
               b = (double)before[DIM / 2 + j];
        double x = a * cos(angle) - b * sin(angle), y = b * cos(angle) + a * sin(angle);
        cr_assert_leq(fabs(x - (double)after[j]), epsilon * fabs(x) + least);
        cr_assert_leq(fabs(y - (double)after[DIM / 2 + j]), epsilon * fabs(y) + least);
    }
}

/* Half a unit in the last place of each format; E4M3 is subnormal below 2^-6. Rows of 8 and 4 bits
 * round in a turned basis: the bounds are about four standard deviations, and far below the
 * numbers. */
Test(shift, rotates_stored_keys_by_the_difference_of_places) {
    static const struct {
        enum kern_dtype dtype;
        double epsilon, least;
    } rows[] = {{KERN_F32, 1e-6, 3e-7},
                {KERN_BF16, 0x1.01p-8, 3e-7},
                {KERN_E4M3, 0x1.01p-4, 0x1.01p-10},
                {KERN_ROW8, 0, 0.03},
                {KERN_ROW4, 0, 0.5}};
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct cpu_cache cache = open_cache(rows[r].dtype, 200);
        append(&cache, 0, 0, FIRST);
        append(&cache, 0, POSITIONS - SECOND, SECOND);
        for (int32_t to = 1; to <= 3; to++) {
            const float *before = keys_of(&cache, 0);
            cr_assert_eq(shift(&cache, 0, to - 1, to), 0);
            const float *after = keys_of(&cache, 0);
            for (int stream = 0; stream < STREAMS; stream++) {
                cr_assert_eq(*cpu_cache_length(&cache, 0, stream), FIRST + SECOND);
                for (int32_t i = 0; i < FIRST + SECOND; i++) {
                    int32_t pos = i < FIRST ? i : POSITIONS - SECOND + i - FIRST;
                    cr_assert_eq(find(&cache, 0, stream, i).pos, pos);
                    int32_t by = places_of(POSITIONS, SINKS, to, pos) -
                                 places_of(POSITIONS, SINKS, to - 1, pos);
                    size_t at = (size_t)(stream * POSITIONS + i) * DIM;
                    expect_rotated(before + at, after + at, by, stream < 2, rows[r].epsilon,
                                   rows[r].least);
                }
            }
        }
        cpu_cache_close(&cache);
    }
}

/* The pairs behind a latent vector, which keeps its bits. */
static void expect_turned(const float *before, const float *after, int32_t by, double epsilon,
                          double least) {
    const int half = (DIM - LATENT) / 2;
    cr_assert_arr_eq(after, before, LATENT * sizeof *before);
    for (int j = 0; j < half; j++) {
        const float *from = before + LATENT + j, *to = after + LATENT + j;
        const double angle = (double)by * (double)inv_freq[j], a = (double)from[0],
                     b = (double)from[half];
        const double x = a * cos(angle) - b * sin(angle), y = b * cos(angle) + a * sin(angle);
        cr_assert_leq(fabs(x - (double)to[0]), epsilon * fabs(x) + least);
        cr_assert_leq(fabs(y - (double)to[half]), epsilon * fabs(y) + least);
    }
}

Test(shift, latent_vectors_stay) {
    static const struct {
        enum kern_dtype dtype;
        double epsilon, least;
    } rows[] = {
        {KERN_F32, 1e-6, 3e-7}, {KERN_BF16, 0x1.01p-8, 3e-7}, {KERN_E4M3, 0x1.01p-4, 0x1.01p-10}};
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct cpu_cache cache = open_with(rows[r].dtype, 200, LATENT);
        append(&cache, 0, 0, FIRST);
        append(&cache, 0, POSITIONS - SECOND, SECOND);
        const float *before = keys_of(&cache, 0);
        cr_assert_eq(shift(&cache, 0, 0, 1), 0);
        const float *after = keys_of(&cache, 0);
        for (int stream = 0; stream < STREAMS; stream++)
            for (int32_t i = 0; i < FIRST + SECOND; i++) {
                const struct place p = find(&cache, 0, stream, i);
                const int32_t by = stream < 2 ? places_of(POSITIONS, SINKS, 1, p.pos) - p.pos : 0;
                const size_t at = (size_t)(stream * POSITIONS + i) * DIM;
                expect_turned(before + at, after + at, by, rows[r].epsilon, rows[r].least);
            }
        cpu_cache_close(&cache);
    }
}

/* A latent vector is key and value at once: it lies in its page, and in a snapshot, once. */
Test(shift, latent_vectors_are_held_once) {
    struct cpu_cache cache = open_with(KERN_BF16, 200, LATENT), two = open_cache(KERN_BF16, 200);
    const struct cpu_layer *layer = cpu_cache_layer(&cache, 0);
    struct kern_block blocks[BLOCKS];
    struct kern_report report = {0};
    struct fault fault = {0};
    cr_assert_eq(cache.page_slots, 2 * two.page_slots);
    append(&cache, 0, 0, FIRST);
    const struct place p = find(&cache, 0, 0, 7);
    const struct cpu_rows key = cpu_cache_rows(&cache, layer, p.page, false, p.at);
    const struct cpu_rows value = cpu_cache_rows(&cache, layer, p.page, true, p.at);
    cr_assert(key.at == value.at && key.dim == DIM && value.dim == LATENT);
    for (int i = 0; i < BLOCKS; i++) {
        const size_t size = cpu_cache_snapshot_size(&cache, 0, i);
        void *data = malloc(size);
        cpu_cache_snapshot_export(&cache, 0, i, data);
        blocks[i] = (struct kern_block){data, size};
        if (i > 0) cr_assert_eq(size, 4 + FIRST * (12 + DIM * 2));
    }
    cr_assert_eq(cpu_cache_snapshot_check(&cache, blocks, BLOCKS, FIRST, &report, &fault), 0, "%s",
                 fault.text);
    cr_assert_eq(cpu_cache_snapshot_check(&two, blocks, BLOCKS, FIRST, &report, &fault),
                 ERR_MALFORMED);
    for (int i = 0; i < BLOCKS; i++) {
        cr_assert_eq(cpu_cache_snapshot_import(&cache, 1, i, &blocks[i]), 0);
        free((void *)(uintptr_t)blocks[i].data);
    }
    check(&cache);
    const float *one = keys_of(&cache, 0), *other = keys_of(&cache, 1);
    for (int stream = 0; stream < STREAMS; stream++)
        cr_assert_arr_eq(one + (size_t)stream * POSITIONS * DIM,
                         other + (size_t)stream * POSITIONS * DIM, FIRST * DIM * sizeof *one);
    cpu_cache_close(&cache);
    cpu_cache_close(&two);
}

Test(shift, returns_to_the_places_before) {
    struct cpu_cache cache = open_cache(KERN_F32, 200);
    append(&cache, 0, 0, FIRST);
    const float *before = keys_of(&cache, 0);
    cr_assert_eq(shift(&cache, 0, 0, 5), 0);
    cr_assert_eq(shift(&cache, 0, 5, 0), 0);
    const float *after = keys_of(&cache, 0);
    for (int stream = 0; stream < STREAMS; stream++)
        for (int k = 0; k < FIRST * DIM; k++) {
            size_t at = (size_t)(stream * POSITIONS * DIM + k);
            cr_assert_float_eq(after[at], before[at], 1e-6);
        }
    cpu_cache_close(&cache);
}

Test(shift, long_streams_drop_their_oldest_entries_behind_the_sinks) {
    struct cpu_cache cache = open_cache(KERN_BF16, 200);
    int32_t most = places_kept(POSITIONS), dropped = POSITIONS - most;
    append(&cache, 0, 0, POSITIONS);
    cr_assert_eq(shift(&cache, 0, 0, 1), 0);
    for (int stream = 0; stream < STREAMS; stream++) {
        cr_assert_eq(*cpu_cache_length(&cache, 0, stream), most);
        for (int32_t i = 0; i < most; i++)
            cr_assert_eq(find(&cache, 0, stream, i).pos, i < SINKS ? i : i + dropped);
    }
    cr_assert_eq(cache.entries_evicted, (uint64_t)(STREAMS * dropped));
    cpu_cache_close(&cache);
}

/* Long streams are the heads that remember longest: their oldest entries may be their most
 * important. */
Test(shift, long_streams_with_gates_drop_their_lowest_entries) {
    const struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .sinks = SINKS, .recent = 16, .horizon = 1};
    struct cpu_cache cache = open_cache(KERN_BF16, 200);
    int32_t most = places_kept(POSITIONS);
    append(&cache, 0, 0, POSITIONS);
    for (int stream = 0; stream < STREAMS; stream++)
        for (int32_t i = 0; i < POSITIONS; i++) {
            struct place p = find(&cache, 0, stream, i);
            cpu_cache_log_beta(&cache, p.page)[p.at] = i % 5 == 0 ? -1e-6f : -1e-2f;
        }
    cr_assert_eq(shift_by(&cache, 0, 0, 1, &rule), 0);
    for (int stream = 0; stream < STREAMS; stream++) {
        cr_assert_eq(*cpu_cache_length(&cache, 0, stream), most);
        int32_t lasting = 0, last = -1;
        for (int32_t i = 0; i < most; i++) {
            int32_t pos = find(&cache, 0, stream, i).pos;
            cr_assert_gt(pos, last);
            if (i < SINKS) cr_assert_eq(pos, i);
            lasting += pos % 5 == 0;
            last = pos;
        }
        cr_assert_eq(lasting, (POSITIONS + 4) / 5);
    }
    cpu_cache_close(&cache);
}

/* A shift of a fork that finds too few free pages for its copies drops nothing, either. */
Test(shift, without_pages_nothing_is_dropped) {
    const struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .sinks = SINKS, .recent = 16, .horizon = 1};
    const int pages = STREAMS * ((POSITIONS + 31) / 32);
    int failed = 0, done = 0;
    for (int spare = 0; spare <= pages; spare++) {
        struct cpu_cache cache = open_cache(KERN_BF16, pages + spare);
        append(&cache, 0, 0, POSITIONS);
        for (int stream = 0; stream < STREAMS; stream++)
            for (int32_t i = 0; i < POSITIONS; i++) {
                struct place p = find(&cache, 0, stream, i);
                cpu_cache_log_beta(&cache, p.page)[p.at] = i > POSITIONS / 2 ? -1e-1f : -1e-6f;
            }
        cr_assert_eq(cpu_cache_fork(&cache, 0, 1), 0);
        const int rc = shift_by(&cache, 1, 0, 1, &rule);
        cr_assert(rc == 0 || rc == ERR_FULL);
        for (int stream = 0; stream < STREAMS; stream++) {
            cr_assert_eq(*cpu_cache_length(&cache, 0, stream), POSITIONS);
            cr_assert_eq(*cpu_cache_length(&cache, 1, stream),
                         rc ? POSITIONS : places_kept(POSITIONS));
        }
        failed += rc != 0, done += rc == 0;
        cpu_cache_close(&cache);
    }
    cr_assert(failed > 0 && done > 0);
}

/* A slot copies shared pages before it writes to them; without free pages nothing changes. */
Test(shift, forks_keep_their_places) {
    const int pages = STREAMS * 4; /* 32 entries a page: 100 entries need 4 */
    for (int spare = 0; spare < 2; spare++) {
        struct cpu_cache cache = open_cache(KERN_BF16, pages + spare * pages);
        append(&cache, 0, 0, FIRST);
        cr_assert_eq(cpu_cache_fork(&cache, 0, 1), 0);
        const float *before = keys_of(&cache, 0);
        cr_assert_eq(shift(&cache, 1, 0, 1), spare ? 0 : ERR_FULL);
        const float *after = keys_of(&cache, 0);
        for (int stream = 0; stream < STREAMS; stream++)
            cr_assert_arr_eq(after + stream * POSITIONS * DIM, before + stream * POSITIONS * DIM,
                             FIRST * DIM * sizeof *after);
        /* The second layer does not rotate, so it is still shared. */
        struct kern_cache_stats stats;
        cpu_cache_stats(&cache, &stats);
        cr_assert_eq(stats.pages_used, pages + (spare ? pages / 2 : 0), "%d",
                     (int)stats.pages_used);
        cpu_cache_close(&cache);
    }
}
