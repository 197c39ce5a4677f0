/* Classes of entries: a case worked out by hand, attention against keys that are really expanded,
 * and members through forks, cuts, full pools and snapshots. */
#include <criterion/criterion.h>

#include "base/mem.h"
#include "tests/unit/kernels/eviction.h"

enum { DIM = 8, HALF = DIM / 2, MOST = 400 };

static const float inv_freq[HALF] = {1, 0.3f, 0.05f, 0.002f};

static struct kern_rule rule_of(float gamma, float tau) {
    return (struct kern_rule){.score = KERN_SCORE_ATTENTION,
                              .merge = KERN_MERGE_CLASSES,
                              .classes = {.gamma = gamma, .tau = tau, .positions = true},
                              .observe = {.group = KERN_GROUP_SUM, .reduce = KERN_REDUCE_SUM}};
}

static struct bed open_bed(int heads_q, int heads, const struct kern_rule *rule) {
    struct bed bed = bed_open(1, heads_q, heads, DIM, rule);
    bed.cache.options.inv_freq = inv_freq;
    return bed;
}

static void turn(const double *x, double positions, double *to) {
    for (int j = 0; j < HALF; j++) {
        double angle = positions * (double)inv_freq[j];
        to[j] = x[j] * cos(angle) - x[HALF + j] * sin(angle);
        to[HALF + j] = x[HALF + j] * cos(angle) + x[j] * sin(angle);
    }
}

static void set_row(const struct bed *bed, int32_t index, bool values, const double *x) {
    for (int d = 0; d < DIM; d++) bed_row(bed, 0, 0, index, values)[d] = (float)x[d];
}

static float *mass_at(const struct bed *bed, int32_t index) {
    uint32_t page = cpu_cache_table(&bed->cache, 0, 0)[index / bed->cache.page_slots];
    return cpu_cache_score(&bed->cache, page) + index % bed->cache.page_slots;
}

static const struct cpu_member *member_at(const struct bed *bed, int slot, int stream, int32_t i) {
    struct cpu_stream members = cpu_cache_members(&bed->cache, slot, stream);
    cr_assert_lt(i, members.length);
    return cpu_cache_member(&bed->cache, members.pages, i);
}

static int32_t member_count(const struct bed *bed, int slot, int stream) {
    return cpu_cache_members(&bed->cache, slot, stream).length;
}

static void expect_sound(const struct bed *bed) {
    struct fault fault = {0};
    cr_assert_eq(cpu_cache_check(&bed->cache, &fault), 0, "%s", fault.text);
}

/* ---- By hand ---- */

/* At position 0: key 0 (2, 0, ...) of mass 3, key 1 (0.8, 0.6, ...) of mass 1, key 2 like neither;
 * values alike but for key 2's. One place: entry 1 joins entry 0, entry 2 is gone. */
static struct bed three_tokens(float gamma, float tau) {
    static const double keys[3][DIM] = {{2}, {.8, 0, .6}, {0, 0, 0, 5}};
    static const double values[3][DIM] = {{1}, {3}, {0, 1}};
    static const float mass[] = {3, 1, 2};
    struct kern_rule rule = rule_of(gamma, tau);
    struct bed bed = open_bed(1, 1, &rule);
    bed_append(&bed, 0, 3);
    bed.tokens = 3;
    for (int i = 0; i < 3; i++) {
        double there[DIM];
        turn(keys[i], i, there);
        set_row(&bed, i, false, there);
        set_row(&bed, i, true, values[i]);
        *mass_at(&bed, i) = mass[i];
    }
    return bed;
}

Test(classes, an_entry_joins_the_class_it_is_like) {
    struct bed bed = three_tokens(4, .6f);
    cr_assert_eq(bed_evict(&bed, 0, 1), 0);
    expect_sound(&bed);
    cr_assert(*cpu_cache_length(&bed.cache, 0, 0) == 1 && member_count(&bed, 0, 0) == 1);
    const struct cpu_member *member = member_at(&bed, 0, 0, 0);
    cr_assert(member->centre == 0 && member->pos == 1);
    cr_assert_float_eq(member->gain, .5f, 1e-6); /* |k| 1 over 2 */
    const float *key = bed_row(&bed, 0, 0, 0, false), *value = bed_row(&bed, 0, 0, 0, true);
    double length = hypot(3.8, .6); /* 3 (1, 0) + (.8, .6), brought back to length 2 */
    cr_assert_float_eq((double)key[0], 2 * 3.8 / length, 1e-6);
    cr_assert_float_eq((double)key[2], 2 * .6 / length, 1e-6);
    cr_assert_float_eq(value[0], 1.5f, 1e-6); /* (3 * 1 + 1 * 3) / 4 */
    cr_assert_eq(*mass_at(&bed, 0), 4);
    cpu_cache_close(&bed.cache);
}

Test(classes, the_zero_class_takes_the_rest) {
    static const struct {
        float gamma, tau;
    } cases[] = {{4, .81f}, {4, 1}, {1, 0}}; /* cos 0.8 of keys, 1 of values; no room at all */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bed bed = three_tokens(cases[i].gamma, cases[i].tau);
        cr_assert_eq(bed_evict(&bed, 0, 1), 0);
        expect_sound(&bed);
        cr_assert_eq(member_count(&bed, 0, 0), 0);
        cr_assert(bed_row(&bed, 0, 0, 0, false)[0] == 2 && bed_row(&bed, 0, 0, 0, true)[0] == 1);
        cr_assert_eq(*mass_at(&bed, 0), 3);
        cpu_cache_close(&bed.cache);
    }
}

/* ---- Attention ---- */

/* A life of several evictions, with classes that join classes. */
static void live(struct bed *bed, int slot, int rounds, int32_t keep) {
    for (int i = 0; i < rounds; i++) {
        bed_append(bed, slot, 40);
        bed->tokens += 40;
        cr_assert_eq(bed_evict(bed, slot, keep), 0);
        expect_sound(bed);
        for (int stream = 0; stream < bed->cache.streams; stream++)
            cr_assert_leq(member_count(bed, slot, stream), kern_members_max(&bed->rule, keep));
    }
}

struct copy {
    double k[MOST][DIM], v[MOST][DIM];
    int32_t pos[MOST], owner[MOST];
    int entries, count;
};

/* Every remembered token with a key of its own. */
static void expand(const struct bed *bed, int stream, struct copy *to) {
    const struct cpu_stream entries = cpu_cache_stream_at(&bed->cache, 0, stream);
    to->entries = entries.length;
    to->count = entries.length + member_count(bed, 0, stream);
    cr_assert_leq(to->count, MOST);
    for (int i = 0; i < to->count; i++) {
        bool own = i < entries.length;
        const struct cpu_member *member =
            own ? NULL : member_at(bed, 0, stream, i - entries.length);
        int32_t owner = own ? i : cpu_cache_find(&bed->cache, &entries, member->centre);
        double gain = own ? 1 : (double)member->gain, key[DIM];
        to->owner[i] = owner;
        to->pos[i] = own ? cpu_cache_entry_pos(&bed->cache, &entries, i) : member->pos;
        for (int d = 0; d < DIM; d++) {
            key[d] = gain * (double)bed_row(bed, 0, stream, owner, false)[d];
            to->v[i][d] = (double)bed_row(bed, 0, stream, owner, true)[d];
        }
        if (own || !bed->rule.classes.positions)
            memcpy(to->k[i], key, sizeof key);
        else
            turn(key, member->pos - member->centre, to->k[i]);
    }
}

static void expect_attention(const struct bed *bed, int stream, const float *q, int window) {
    static struct copy all;
    double p[MOST], mass[MOST] = {0}, out[DIM] = {0}, sum = 0;
    float found[DIM], before[MOST];
    expand(bed, stream, &all);
    int32_t now = all.pos[all.entries - 1];
    for (int i = 0; i < all.count; i++) {
        double z = 0;
        for (int d = 0; d < DIM; d++) z += (double)q[d] * all.k[i][d];
        bool seen = window == 0 || all.pos[i] > now - window;
        p[i] = seen ? exp(z) : 0;
        sum += p[i];
    }
    for (int i = 0; i < all.count; i++) {
        mass[all.owner[i]] += p[i] / sum;
        for (int d = 0; d < DIM; d++) out[d] += p[i] / sum * all.v[i][d];
    }
    for (int i = 0; i < all.entries; i++) before[i] = *mass_at(bed, i);
    struct cpu_mass query = {.stream = cpu_cache_stream(&bed->cache, 0, 0, stream),
                             .q = q,
                             .q_stride = DIM,
                             .count = 1,
                             .scale = 1,
                             .group = KERN_GROUP_SUM,
                             .members = cpu_cache_members(&bed->cache, 0, stream),
                             .positions = bed->rule.classes.positions,
                             .pos = now,
                             .sliding_window = window,
                             .out = found,
                             .out_stride = DIM,
                             .out_count = 1};
    cpu_observe_mass(&bed->cache, &query, 0);
    for (int d = 0; d < DIM; d++)
        cr_assert_float_eq((double)found[d], out[d], 2e-6, "positions %d window %d: %g %g",
                           bed->rule.classes.positions, window, (double)found[d], out[d]);
    for (int i = 0; i < all.entries; i++)
        cr_assert_float_eq((double)(*mass_at(bed, i) - before[i]), mass[i], 2e-6);
}

Test(classes, attention_is_that_of_expanded_keys) {
    for (int positions = 0; positions < 2; positions++) {
        struct kern_rule rule = rule_of(4, .05f);
        rule.classes.positions = positions;
        rule.recent = 5;
        struct bed bed = open_bed(1, 1, &rule);
        live(&bed, 0, 6, 30);
        cr_assert_gt(member_count(&bed, 0, 0), 40);
        float q[DIM];
        for (int d = 0; d < DIM; d++) q[d] = 2 * bed_query(7, 3, d);
        expect_attention(&bed, 0, q, 0);
        expect_attention(&bed, 0, q, 90);
        cpu_cache_close(&bed.cache);
    }
}

/* ---- Pages ---- */

static uint64_t hash_slot(const struct bed *bed, int slot) {
    uint64_t hash = 7;
    for (int stream = 0; stream < bed->cache.streams; stream++) {
        for (int32_t i = 0; i < *cpu_cache_length(&bed->cache, slot, stream); i++)
            for (int d = 0; d < DIM; d++) {
                float sum = bed_row(bed, slot, stream, i, false)[d] * 3 +
                            bed_row(bed, slot, stream, i, true)[d];
                hash = hash * 1000003 + (uint64_t)(int64_t)lrint((double)sum * 1e6);
            }
        for (int32_t i = 0; i < member_count(bed, slot, stream); i++) {
            const struct cpu_member *member = member_at(bed, slot, stream, i);
            hash = hash * 1000003 + (uint64_t)member->centre * 4099 + (uint64_t)member->pos;
        }
    }
    return hash;
}

Test(classes, a_fork_is_left_as_it_was) {
    struct kern_rule rule = rule_of(4, .05f);
    struct bed bed = open_bed(2, 2, &rule);
    struct kern_report report = {0};
    live(&bed, 0, 5, 30);
    uint64_t before = hash_slot(&bed, 0);
    cr_assert_eq(cpu_cache_fork(&bed.cache, 0, 1), 0);
    cr_assert_eq(hash_slot(&bed, 1), before);
    live(&bed, 1, 1, 30);
    cr_assert_eq(hash_slot(&bed, 0), before);
    cr_assert_neq(hash_slot(&bed, 1), before);
    cr_assert_eq(cpu_cache_report(&bed.cache, 0, &report), 0);
    cr_assert_eq(report.entries, 60);
    cr_assert_eq(report.pages,
                 2 * (cpu_cache_pages_for(&bed.cache.layers[0], 30) + 1)); /* members: one */
    cpu_cache_release(&bed.cache, 0);
    cpu_cache_release(&bed.cache, 1);
    expect_sound(&bed);
    cr_assert_eq(bed.cache.free_count, bed.cache.options.pages);
    cpu_cache_close(&bed.cache);
}

/* Members go with their tokens and with their centres, in this slot alone; with too few pages for
 * the copies nothing changes. */
Test(classes, a_cut_drops_members) {
    struct kern_rule rule = rule_of(4, .05f);
    struct bed bed = open_bed(2, 2, &rule);
    live(&bed, 0, 5, 30);
    uint64_t before = hash_slot(&bed, 0);
    int32_t cut = 150, counts[2];
    for (int stream = 0; stream < 2; stream++) {
        counts[stream] = 0;
        for (int32_t i = 0; i < member_count(&bed, 0, stream); i++) {
            const struct cpu_member *member = member_at(&bed, 0, stream, i);
            counts[stream] += member->pos < cut && member->centre < cut;
        }
        cr_assert(counts[stream] > 0 && counts[stream] < member_count(&bed, 0, stream));
    }
    cr_assert_eq(cpu_cache_fork(&bed.cache, 0, 1), 0);
    int64_t free_count = bed.cache.free_count;
    bed.cache.free_count = 1;
    cr_assert_eq(cpu_cache_truncate(&bed.cache, 1, cut), ERR_FULL);
    bed.cache.free_count = free_count;
    cr_assert_eq(hash_slot(&bed, 1), before);
    cr_assert_eq(cpu_cache_truncate(&bed.cache, 1, cut), 0);
    expect_sound(&bed);
    for (int stream = 0; stream < 2; stream++)
        cr_assert_eq(member_count(&bed, 1, stream), counts[stream]);
    cr_assert_eq(hash_slot(&bed, 0), before);
    bed.tokens = cut;
    live(&bed, 1, 2, 30);
    cpu_cache_close(&bed.cache);
}

Test(classes, an_eviction_without_pages_changes_nothing) {
    struct kern_rule rule = rule_of(4, .05f);
    struct bed bed = open_bed(2, 2, &rule);
    live(&bed, 0, 4, 30);
    cr_assert_eq(cpu_cache_fork(&bed.cache, 0, 1), 0);
    bed_append(&bed, 1, 40);
    bed.tokens += 40;
    uint64_t before = hash_slot(&bed, 1), other = hash_slot(&bed, 0);
    int64_t free_count = bed.cache.free_count, needed = 0;
    int rc = ERR_FULL;
    for (; rc == ERR_FULL; needed++) {
        bed.cache.free_count = needed;
        rc = bed_evict(&bed, 1, 30);
        cr_assert(rc == 0 || rc == ERR_FULL);
        if (rc == ERR_FULL)
            cr_assert(bed.cache.free_count == needed && hash_slot(&bed, 1) == before);
        bed.cache.free_count += free_count - needed;
    }
    cr_assert_eq(needed, 3); /* the step made the entries' pages its own: a copy of each table */
    cr_assert_eq(hash_slot(&bed, 0), other);
    cpu_cache_close(&bed.cache);
}

/* ---- Snapshots ---- */

enum { BLOCKS = 3 };

static void export_all(const struct bed *bed, int slot, struct kern_block *blocks) {
    for (int i = 0; i < BLOCKS; i++) {
        size_t size = cpu_cache_snapshot_size(&bed->cache, slot, i);
        char *data = mem_must_alloc(size, 1);
        cpu_cache_snapshot_export(&bed->cache, slot, i, data);
        blocks[i] = (struct kern_block){data, size};
    }
}

static void free_all(struct kern_block *blocks) {
    for (int i = 0; i < BLOCKS; i++) mem_free((void *)(uintptr_t)blocks[i].data);
}

static int import_all(struct bed *bed, int slot, const struct kern_block *blocks) {
    int rc = 0;
    for (int i = 0; i < BLOCKS && rc == 0; i++)
        rc = cpu_cache_snapshot_import(&bed->cache, slot, i, &blocks[i]);
    return rc;
}

Test(classes, a_snapshot_brings_members_back) {
    struct kern_rule rule = rule_of(4, .05f);
    struct bed bed = open_bed(2, 2, &rule), to = open_bed(2, 2, &rule);
    struct kern_block blocks[BLOCKS];
    struct kern_report before = {0}, checked = {0};
    struct fault fault = {0};
    live(&bed, 0, 5, 30);
    export_all(&bed, 0, blocks);
    cpu_cache_report(&bed.cache, 0, &before);
    cr_assert_eq(cpu_cache_snapshot_check(&to.cache, blocks, BLOCKS, bed.tokens, &checked, &fault),
                 0, "%s", fault.text);
    cr_assert(checked.pages == before.pages && checked.entries == before.entries);
    int32_t most = 0;
    for (int stream = 0; stream < BLOCKS - 1; stream++)
        if (member_count(&bed, 0, stream) > most) most = member_count(&bed, 0, stream);
    cr_assert(most > 0 && checked.members == most);
    cr_assert_eq(import_all(&to, 2, blocks), 0);
    expect_sound(&to);
    cr_assert_eq(hash_slot(&to, 2), hash_slot(&bed, 0));
    to.tokens = bed.tokens;
    live(&to, 2, 1, 30);
    live(&bed, 0, 1, 30);
    cr_assert_eq(hash_slot(&to, 2), hash_slot(&bed, 0));
    free_all(blocks);
    cpu_cache_close(&bed.cache);
    cpu_cache_close(&to.cache);
}

/* A flipped bit among the members is refused or does no harm; a cut one is refused, unless it takes
 * all of them. */
Test(classes, damaged_members_are_refused) {
    struct kern_rule rule = rule_of(4, .05f);
    struct bed bed = open_bed(2, 2, &rule), to = open_bed(2, 2, &rule);
    struct kern_block blocks[BLOCKS];
    struct kern_report report = {0};
    struct fault fault = {0};
    int refused = 0;
    live(&bed, 0, 3, 20);
    export_all(&bed, 0, blocks);
    size_t tail = sizeof(int32_t) + (size_t)member_count(&bed, 0, 1) * sizeof(struct cpu_member);
    size_t end = blocks[2].size;
    char *data = (char *)(uintptr_t)blocks[2].data;
    for (size_t at = (end - tail) * 8; at < end * 8; at++) {
        data[at / 8] = (char)(data[at / 8] ^ 1 << at % 8);
        if (cpu_cache_snapshot_check(&to.cache, blocks, BLOCKS, bed.tokens, &report, &fault) != 0) {
            refused++;
        } else {
            cr_assert_eq(import_all(&to, 0, blocks), 0);
            expect_sound(&to);
            cpu_cache_release(&to.cache, 0);
        }
        data[at / 8] = (char)(data[at / 8] ^ 1 << at % 8);
    }
    cr_assert_gt(refused, 500);
    for (size_t size = end - tail + 1; size < end; size++) {
        blocks[2].size = size;
        cr_assert_eq(
            cpu_cache_snapshot_check(&to.cache, blocks, BLOCKS, bed.tokens, &report, &fault),
            ERR_MALFORMED);
    }
    free_all(blocks);
    cpu_cache_close(&bed.cache);
    cpu_cache_close(&to.cache);
}

/* A token that two classes count is refused: rooms for a stream rely on one at each position. */
Test(classes, a_position_is_one_members) {
    struct kern_rule rule = rule_of(4, .05f);
    struct bed bed = open_bed(2, 2, &rule);
    struct kern_block blocks[BLOCKS];
    struct kern_report report = {0};
    struct fault fault = {0};
    int tried = 0;
    live(&bed, 0, 3, 20);
    export_all(&bed, 0, blocks);
    int32_t count = member_count(&bed, 0, 1);
    struct cpu_member *members =
        (struct cpu_member *)((char *)(uintptr_t)blocks[2].data + blocks[2].size) - count;
    for (int32_t i = 1; i < count; i++) {
        struct cpu_member own = members[i];
        bool first = own.centre != members[i - 1].centre;
        bool only = i + 1 == count || own.centre != members[i + 1].centre;
        if (!first || !only) continue;
        members[i].pos = members[0].pos;
        struct cpu_member *held = (struct cpu_member *)(uintptr_t)member_at(&bed, 0, 1, i);
        held->pos = members[0].pos;
        cr_assert_eq(cpu_cache_check(&bed.cache, &fault), ERR_INTERNAL, "member %d", i);
        held->pos = own.pos;
        cr_assert_eq(
            cpu_cache_snapshot_check(&bed.cache, blocks, BLOCKS, bed.tokens, &report, &fault),
            ERR_MALFORMED);
        members[i] = own;
        tried++;
    }
    cr_assert_gt(tried, 0);
    mem_fail_after(0);
    cr_assert_eq(cpu_cache_snapshot_check(&bed.cache, blocks, BLOCKS, bed.tokens, &report, &fault),
                 ERR_NOMEM);
    mem_fail_after(-1);
    free_all(blocks);
    cpu_cache_close(&bed.cache);
}

/* Under a rule without classes, members would outlive their centres. */
Test(classes, another_rule_goes_on_without_members) {
    struct kern_rule rule = rule_of(4, .05f);
    struct bed bed = open_bed(2, 2, &rule);
    live(&bed, 0, 3, 30);
    cr_assert_gt(member_count(&bed, 0, 0), 0);
    cr_assert_eq(cpu_cache_fork(&bed.cache, 0, 1), 0);
    uint64_t before = hash_slot(&bed, 0);
    bed.rule.merge = KERN_MERGE_NONE;
    live(&bed, 1, 1, 10);
    for (int stream = 0; stream < 2; stream++) cr_assert_eq(member_count(&bed, 1, stream), 0);
    cr_assert_eq(hash_slot(&bed, 0), before);
    cpu_cache_close(&bed.cache);
}
