/* Every policy over a whole life, prompt and answer, on the CPU backend: bounds, and that neither
 * neighbours nor splits nor forks change what is kept. */
#include <criterion/criterion.h>

#include "paging/due.h"
#include "tests/unit/kernels/paths.h"

enum { LAYERS = 3, HEADS_Q = 4, HEADS = 2, DIM = 16, STREAMS = LAYERS * HEADS, SLOTS = 3 };
enum { WIDTH = (HEADS_Q + 2 * HEADS) * DIM, OUT = HEADS_Q * DIM, POSITIONS = 1200, BUDGET = 48 };
enum { CHUNK = 64, BUFFER = 8 };

/* One sequence, wherever it runs. */
struct life {
    struct kv_params kv;
    struct due_state due;
    uint32_t salt;
    uint64_t trace;      /* a hash of all outputs so far */
    int64_t most, limit; /* entries held at most, and allowed */
};

struct bed {
    struct kern *kern;
    struct kern_batch batch;
    struct kern_span spans[SLOTS];
    float *qkv, *out, *log_beta;
};

static struct kern_cache_options shape_of(enum kern_dtype dtype, int64_t pages) {
    return (struct kern_cache_options){.layers = LAYERS,
                                       .heads_q = HEADS_Q,
                                       .heads_kv = HEADS,
                                       .head_dim = DIM,
                                       .dtype = dtype,
                                       .pages = pages,
                                       .slots = SLOTS,
                                       .max_positions = POSITIONS};
}

static bool open_bed(struct bed *bed, int path, int threads, enum kern_dtype dtype, int64_t pages) {
    *bed = (struct bed){.kern = path_open(path, threads)};
    if (!bed->kern) return false;
    struct kern_cache_options options = shape_of(dtype, pages);
    cr_assert_eq(bed->kern->ops->cache_open(bed->kern, &options, NULL), 0);
    bed->qkv = fresh((size_t)POSITIONS * WIDTH, 0);
    bed->out = fresh((size_t)POSITIONS * OUT, 0);
    bed->log_beta = fresh((size_t)POSITIONS * HEADS, 0);
    return true;
}

static void close_bed(struct bed *bed) {
    struct fault fault = {0};
    cr_assert_eq(bed->kern->ops->cache_check(bed->kern, &fault), 0, "%s", fault.text);
    bed->kern->ops->close(bed->kern);
    free(bed->qkv), free(bed->out), free(bed->log_beta);
}

static struct life born(const struct policy *policy, uint32_t salt, int prompt) {
    struct life life = {.salt = salt, .due = {.prompt_new = prompt}};
    life.kv = (struct kv_params){.budget = BUDGET, .buffer = BUFFER, .chunk = CHUNK};
    kv_params_set_policy(&life.kv, policy);
    kv_params_fit(&life.kv, 0);
    life.limit = policy->bounded ? (int64_t)STREAMS * (BUDGET + BUFFER + CHUNK) : INT64_MAX;
    return life;
}

/* ---- A step ---- */

/* Keys come in clusters and queries follow them, so that there is something to find. */
static void fill_row(const struct life *life, int layer, int32_t pos, float *row, float *beta) {
    uint64_t topic = mix(life->salt + (uint64_t)pos / 5) % 7;
    for (int d = 0; d < WIDTH; d++) {
        uint64_t place = (uint64_t)layer * 4096 + (uint64_t)d;
        row[d] = noise(life->salt + (uint64_t)pos, place);
        if (d < (HEADS_Q + HEADS) * DIM) row[d] += noise(topic, place % (uint64_t)(3 * DIM));
    }
    for (int h = 0; h < HEADS; h++)
        beta[h] = -0.05f * (1 + noise(life->salt + 99, (uint64_t)(pos * 8 + layer * 2 + h)));
}

static uint64_t hash(uint64_t h, const void *data, size_t size) {
    for (size_t i = 0; i < size; i++) h = (h ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    return h;
}

static void run_layers(struct bed *bed, struct life **lives) {
    const struct kern_ops *ops = bed->kern->ops;
    struct kern_attend_options attend = {.scale = 0.5f};
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int s = 0; s < bed->batch.span_count; s++)
            for (int i = 0; i < bed->spans[s].count; i++) {
                int row = bed->spans[s].row + i;
                fill_row(lives[s], layer, bed->spans[s].pos + i, bed->qkv + row * WIDTH,
                         bed->log_beta + row * HEADS);
            }
        ops->write_kv(bed->kern, layer, bed->qkv, bed->log_beta, &bed->batch);
        ops->attend(bed->kern, layer, bed->out, bed->qkv, &bed->batch, &attend);
        for (int s = 0; s < bed->batch.span_count; s++)
            for (int i = 0; i < bed->spans[s].count; i++)
                lives[s]->trace ^= hash((uint64_t)layer, bed->out + (bed->spans[s].row + i) * OUT,
                                        OUT * sizeof(float)) *
                                   (uint64_t)(2 * (bed->spans[s].pos + i) + 1);
    }
}

/* Appends counts[i] tokens to lives[i] in slot i; 0: it rests. */
static void step(struct bed *bed, struct life **lives, const int *counts, int count) {
    struct life *who[SLOTS];
    bed->batch = (struct kern_batch){.spans = bed->spans};
    for (int i = 0; i < count; i++) {
        if (counts[i] == 0) continue;
        who[bed->batch.span_count] = lives[i];
        bed->spans[bed->batch.span_count++] = (struct kern_span){.slot = i,
                                                                 .row = bed->batch.rows,
                                                                 .count = counts[i],
                                                                 .pos = lives[i]->due.tokens,
                                                                 .rule = &lives[i]->kv.rule};
        bed->batch.rows += counts[i];
    }
    cr_assert_eq(bed->kern->ops->begin_step(bed->kern, &bed->batch), 0);
    run_layers(bed, who);
    for (int i = 0; i < count; i++)
        if (counts[i] > 0) due_append(&lives[i]->due, counts[i]);
}

static size_t entries(struct bed *bed, int slot) {
    struct kern_report report = {0};
    cr_assert_eq(bed->kern->ops->report(bed->kern, slot, &report), 0);
    return report.entries;
}

static void evict(struct bed *bed, struct life *life, int slot) {
    struct kern_evict due = {.slot = slot,
                             .tokens = life->due.tokens,
                             .budget = life->kv.budget,
                             .rule = &life->kv.rule};
    size_t before = entries(bed, slot), most = (size_t)life->kv.budget * STREAMS;
    cr_assert_eq(bed->kern->ops->evict(bed->kern, &due, 1), 0);
    size_t after = entries(bed, slot);
    cr_assert(after <= most, "%s: %zu of %zu", life->kv.policy->name, after, most);
    if (life->kv.rule.floor == 0 && life->kv.rule.retain == 0)
        cr_assert_eq(after, before < most ? before : most, "%s", life->kv.policy->name);
    due_evicted(&life->kv, &life->due);
}

/* Lets all live on side by side until each has `answer` tokens after its prompt; prompts are cut
 * into pieces of at most `piece`. */
static void live(struct bed *bed, struct life **lives, int count, int answer, int piece) {
    for (bool busy = true; busy;) {
        int counts[SLOTS] = {0};
        busy = false;
        for (int i = 0; i < count; i++) {
            struct life *life = lives[i];
            counts[i] = due_prompt_limit(&life->kv, &life->due);
            if (counts[i] > piece) counts[i] = piece;
            if (counts[i] == 0 && life->due.prompt_done < life->due.prompt_new + answer) {
                if (due_before_generate(&life->kv, &life->due)) evict(bed, life, i);
                counts[i] = 1;
            }
            busy = busy || counts[i] > 0;
        }
        if (!busy) return;
        step(bed, lives, counts, count);
        for (int i = 0; i < count; i++) {
            int64_t held = (int64_t)entries(bed, i);
            if (held > lives[i]->most) lives[i]->most = held;
            if (counts[i] > 0 && due_after_append(&lives[i]->kv, &lives[i]->due))
                evict(bed, lives[i], i);
        }
    }
}

static uint64_t kept(struct bed *bed, int slot) {
    static int32_t lengths[STREAMS], positions[STREAMS * POSITIONS];
    struct kern_report report = {
        .lengths = lengths, .positions = positions, .entries_max = STREAMS * POSITIONS};
    cr_assert_eq(bed->kern->ops->report(bed->kern, slot, &report), 0);
    return hash(hash(0, lengths, sizeof lengths), positions, report.entries * sizeof *positions);
}

/* ---- Tests ---- */

static int64_t ample(void) {
    return (int64_t)SLOTS * STREAMS * (POSITIONS / 16);
}

/* A prompt of sixteen times the budget never holds more than the bound, alone in one piece. */
Test(methods, a_long_prompt_stays_within_its_bound) {
    for (int index = 0; policy_at(index); index++) {
        struct bed bed;
        struct life life = born(policy_at(index), 5, 16 * BUDGET);
        struct life *lives[] = {&life};
        cr_assert(open_bed(&bed, 1, 1, KERN_F32, ample()));
        live(&bed, lives, 1, 40, POSITIONS);
        cr_assert(life.most <= life.limit, "%s: %lld", life.kv.policy->name, (long long)life.most);
        close_bed(&bed);
    }
}

/* Every policy beside two others, prompts cut differently, more threads: bitwise as alone. */
static void check_neighbours(int path, enum kern_dtype dtype) {
    int bounded = 0;
    while (policy_at(1 + bounded)) bounded++;
    for (int index = 1; policy_at(index); index++) {
        struct bed alone, together;
        const struct policy *others[] = {policy_at(index), policy_at(1 + index % bounded),
                                         policy_at(1 + (index + 5) % bounded)};
        struct life one = born(others[0], 5, 300), all[SLOTS];
        struct life *lives[] = {&one}, *side_by_side[SLOTS];
        if (!open_bed(&alone, path, 1, dtype, ample())) return;
        cr_assert(open_bed(&together, path, 3, dtype, ample()));
        for (int i = 0; i < SLOTS; i++) {
            all[i] = born(others[i], i == 0 ? 5 : 70 + (uint32_t)i, 300 - 60 * i);
            side_by_side[i] = &all[i];
        }
        live(&alone, lives, 1, 60, POSITIONS);
        live(&together, side_by_side, SLOTS, 60, 23);
        cr_assert_eq(kept(&alone, 0), kept(&together, 0), "%s", others[0]->name);
        cr_assert_eq(one.trace, all[0].trace, "%s", others[0]->name);
        close_bed(&alone);
        close_bed(&together);
    }
}

Test(methods, neighbours_and_splits_change_nothing) {
    for (int path = 0; path < PATH_COUNT; path++) check_neighbours(path, KERN_BF16);
    check_neighbours(1, KERN_F32);
}

/* After a fork each goes its own way, and both end as if they had been alone from the start. */
Test(methods, forks_live_their_own_lives) {
    for (int index = 1; policy_at(index); index++) {
        struct bed bed;
        struct life one = born(policy_at(index), 5, 200), two, alone = one;
        struct life *first[] = {&one}, *both[] = {&one, &two}, *lone[] = {&alone};
        cr_assert(open_bed(&bed, 1, 1, KERN_F32, ample()));
        live(&bed, first, 1, 3, POSITIONS);
        two = one;
        cr_assert_eq(bed.kern->ops->fork(bed.kern, 0, 1), 0);
        live(&bed, both, 2, 90, POSITIONS);
        cr_assert_eq(kept(&bed, 0), kept(&bed, 1), "%s", one.kv.policy->name);
        cr_assert_eq(one.trace, two.trace);
        bed.kern->ops->release(bed.kern, 0);
        live(&bed, lone, 1, 90, POSITIONS);
        cr_assert_eq(kept(&bed, 0), kept(&bed, 1), "%s", one.kv.policy->name);
        cr_assert_eq(one.trace, alone.trace, "%s", one.kv.policy->name);
        close_bed(&bed);
    }
}

/* With too few pages for the copies that writing takes, an eviction or a step fails whole and
 * leaves both forks as they were. */
Test(methods, a_full_pool_changes_nothing) {
    int failures = 0;
    for (int index = 1; policy_at(index); index++)
        for (int64_t spare = 0; spare < 24; spare += 3) {
            struct bed bed;
            struct life life = born(policy_at(index), 5, 100);
            struct life *lives[] = {&life};
            struct kern_report report = {0};
            struct kern_cache_info info;
            life.kv.chunk = 100;
            life.due.prompt_new = 99; /* not due yet */
            life.kv.buffer = 80;
            bed.kern = NULL;
            cr_assert(open_bed(&bed, 1, 1, KERN_F32, 1));
            const struct kern_cache_options shape = {.dtype = KERN_F32, .head_dim = DIM};
            bed.kern->ops->cache_info(&shape, &info);
            int64_t pages = (99 + info.page_slots - 1) / info.page_slots * STREAMS + spare;
            close_bed(&bed);
            cr_assert(open_bed(&bed, 1, 1, KERN_F32, pages));
            live(&bed, lives, 1, 0, POSITIONS);
            cr_assert_eq(bed.kern->ops->fork(bed.kern, 0, 1), 0);
            uint64_t before = kept(&bed, 0);
            struct kern_evict due = {
                .slot = 0, .tokens = life.due.tokens, .budget = 40, .rule = &life.kv.rule};
            int rc = bed.kern->ops->evict(bed.kern, &due, 1);
            cr_assert(rc == 0 || rc == ERR_FULL);
            cr_assert_eq(kept(&bed, 1), before);
            cr_assert_eq(bed.kern->ops->report(bed.kern, 0, &report), 0);
            if (rc == ERR_FULL) {
                cr_assert_eq(kept(&bed, 0), before);
                failures++;
            }
            close_bed(&bed);
        }
    cr_assert(failures > 10, "%d", failures);
}

/* The trace of a life names every entry that is gone, once. */
Test(methods, a_trace_names_what_is_gone) {
    static int32_t lengths[STREAMS], positions[STREAMS * POSITIONS], held[STREAMS * POSITIONS];
    for (int index = 1; policy_at(index); index++) {
        struct bed bed;
        struct life life = born(policy_at(index), 5, 99);
        struct life *lives[] = {&life};
        int32_t left[STREAMS];
        life.kv.chunk = 100;
        life.kv.buffer = 80;
        cr_assert(open_bed(&bed, 1, 1, KERN_F32, ample()));
        live(&bed, lives, 1, 0, POSITIONS);
        struct kern_trace trace = {
            .lengths = lengths, .positions = positions, .entries_max = STREAMS * POSITIONS};
        struct kern_evict due = {.slot = 0,
                                 .tokens = life.due.tokens,
                                 .budget = 40,
                                 .rule = &life.kv.rule,
                                 .trace = &trace};
        cr_assert_eq(bed.kern->ops->evict(bed.kern, &due, 1), 0);
        struct kern_report report = {
            .lengths = left, .positions = held, .entries_max = STREAMS * POSITIONS};
        cr_assert_eq(bed.kern->ops->report(bed.kern, 0, &report), 0);
        cr_assert_eq(trace.entries + report.entries, (size_t)99 * STREAMS);
        for (int stream = 0, gone = 0, at = 0; stream < STREAMS; stream++) {
            int seen[99] = {0};
            for (int i = 0; i < lengths[stream]; i++) seen[positions[gone++]]++;
            for (int i = 0; i < left[stream]; i++) seen[held[at++]]++;
            for (int pos = 0; pos < 99; pos++) cr_assert_eq(seen[pos], 1);
        }
        close_bed(&bed);
    }
}
