/* Opening the CUDA backend's cache with every allocation failing in turn, device memory included:
 * the emulated device takes part in mem_fail_after, a real one cannot. */
#include <criterion/criterion.h>

#include "both.h"

static const struct kern_cache_options small = {.layers = 1,
                                                .heads_q = 2,
                                                .heads_kv = 1,
                                                .head_dim = 64,
                                                .dtype = KERN_BF16,
                                                .pages = 20,
                                                .slots = 2,
                                                .max_positions = 100};

/* Every allocation of opening may fail; nothing stays behind (the leak checker looks). */
Test(emu_alloc, opening_survives_every_failed_allocation) {
    int failures = 0;
    for (int n = 0; n < 40; n++) {
        struct kern *kern;
        struct fault fault = {0};
        struct cuda_options cuda = {.device = 0};
        MUST(cuda_open(&cuda, &kern, &fault));
        mem_fail_after(n);
        int rc = kern->ops->cache_open(kern, &small, &fault);
        bool pending = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert_eq(rc, pending ? 0 : ERR_NOMEM, "allocation %d", n);
        failures += rc != 0;
        kern->ops->close(kern);
    }
    cr_assert(failures > 5);
}

/* Memory for remembered queries that cannot be had is one sequence's trouble: who runs goes on, and
 * it can be had later. */
Test(emu_alloc, a_ring_that_cannot_be_had_is_one_sequences_trouble) {
    const struct kern_rule rule = {.score = KERN_SCORE_ATTENTION, .observe = {.window = 8}};
    struct kern *kern;
    struct cuda_options cuda = {.device = 0};
    MUST(cuda_open(&cuda, &kern, NULL));
    MUST(kern->ops->cache_open(kern, &small, NULL));
    for (int step = 0; step < 3; step++) {
        struct kern_span spans[] = {{.slot = 0, .count = 1, .pos = step, .rule = &rule},
                                    {.slot = 1, .row = 1, .count = 1, .rule = &rule}};
        struct kern_batch batch = {.spans = spans, .span_count = 1, .rows = 1};
        int slot = step == 0 ? 0 : 1;
        mem_fail_after(step == 1 ? 0 : -1);
        int rc = kern->ops->prepare(kern, slot, &rule, 10);
        cr_assert_eq(rc, step == 1 ? ERR_NOMEM : 0, "step %d: %d", step, rc);
        batch.span_count = batch.rows = step == 2 ? 2 : 1;
        mem_fail_after(-1);
        if (rc) kern->ops->release(kern, slot); /* fine: it never began */
        MUST(kern->ops->begin_step(kern, &batch));
        expect_sound(kern);
    }
    kern->ops->close(kern);
}

/* The same for several ranks: one rank's failure is everybody's. */
Test(emu_alloc, ranks_open_or_leave_nothing) {
    const struct cuda_options cuda = {0};
    const int one_device[2] = {0};
    int failures = 0;
    for (bool passed = false; !passed; failures += !passed) {
        struct kern *kern = NULL;
        struct fault fault = {0};
        mem_fail_after(failures);
        int rc = cuda_open_ranks(&cuda, one_device, 2, &kern, &fault);
        passed = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert_eq(rc, passed ? 0 : ERR_NOMEM, "allocation %d: %d", failures, rc);
        if (rc == 0) kern->ops->close(kern);
    }
    cr_assert(failures > 6, "%d failures", failures);
}

/* A step of rules that look at attention, with every allocation failing in turn: it works without,
 * or says so; the slot can be released and the pool is whole. */
Test(emu_alloc, observing_steps_survive_every_failed_allocation) {
    static const struct kern_rule rules[] = {
        {.score = KERN_SCORE_ATTENTION, .observe = {.window = 8}},
        {.score = KERN_SCORE_ATTENTION, .observe = {.reduce = KERN_REDUCE_SUM}}};
    int failures = 0, passes = 0;
    for (int n = 0; n < 12; n++) {
        struct kern *kern;
        struct kern_cache_stats stats;
        struct cuda_options cuda = {.device = 0};
        struct kern_span spans[] = {{.slot = 0, .count = 3, .rule = &rules[0]},
                                    {.slot = 1, .row = 3, .count = 2, .rule = &rules[1]}};
        struct kern_batch batch = {.spans = spans, .span_count = 2, .rows = 5};
        MUST(cuda_open(&cuda, &kern, NULL));
        MUST(kern->ops->cache_open(kern, &small, NULL));
        mem_fail_after(n);
        int rc = kern->ops->begin_step(kern, &batch), later = kern->ops->sync(kern);
        mem_fail_after(-1);
        if (!rc) rc = later;
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %d: %d", n, rc);
        failures += rc != 0;
        passes += rc == 0;
        for (int slot = 0; slot < 2; slot++) kern->ops->release(kern, slot);
        expect_sound(kern);
        kern->ops->cache_stats(kern, &stats);
        cr_assert_eq((int)stats.pages_used, 0, "allocation %d", n);
        kern->ops->close(kern);
    }
    cr_assert(failures > 2 && passes > 2, "%d failures", failures);
}

/* A report, or the record of an eviction, that has no memory is one sequence's trouble: nothing of
 * it is left for the next step to fail with. */
Test(emu_alloc, reports_and_traces_without_memory_fail_alone) {
    enum { TOKENS = 20, KEEP = 8 };
    const struct kern_rule rule = {.sinks = 1};
    const struct kern_span span = {.count = TOKENS, .rule = &rule};
    const struct kern_batch batch = {.spans = &span, .rows = TOKENS, .span_count = 1};
    int32_t lengths[1], positions[TOKENS];
    int lost = 0, failed = 0;
    for (int n = 0; n < 12; n++) {
        struct kern *kern;
        struct cuda_options cuda = {.device = 0};
        struct kern_trace trace = {
            .lengths = lengths, .positions = positions, .entries_max = TOKENS};
        const struct kern_evict due = {
            .tokens = TOKENS, .budget = KEEP, .rule = &rule, .trace = &trace};
        struct kern_report report = {
            .lengths = lengths, .positions = positions, .entries_max = TOKENS};
        MUST(cuda_open(&cuda, &kern, NULL));
        MUST(kern->ops->cache_open(kern, &small, NULL));
        MUST(kern->ops->begin_step(kern, &batch));
        MUST(kern->ops->sync(kern));
        mem_fail_after(n);
        int rc = kern->ops->report(kern, 0, &report);
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %d: %d", n, rc);
        MUST(kern->ops->sync(kern));
        failed += rc != 0;
        MUST(kern->ops->report(kern, 0, &report));
        MUST(kern->ops->evict(
            kern, &(struct kern_evict){.tokens = TOKENS, .budget = TOKENS - 4, .rule = &rule}, 1));
        MUST(kern->ops->sync(kern)); /* the rooms of evictions are there */
        mem_fail_after(n);
        rc = kern->ops->evict(kern, &due, 1);
        mem_fail_after(-1);
        int later = kern->ops->sync(kern);
        if (trace.lost) cr_assert(rc == 0 && later == 0, "allocation %d: %d, %d", n, rc, later);
        lost += trace.lost;
        if (rc == 0) {
            MUST(kern->ops->report(kern, 0, &report));
            cr_assert_eq((int)report.entries, KEEP);
        }
        kern->ops->close(kern);
    }
    cr_assert(failed >= 3 && lost >= 4, "%d, %d", failed, lost);
}

/* How many allocations a first step of five rows and its samples can fail at. */
static int failures_of_a_step(const struct kern_cache_options *options) {
    enum { ROWS = 5, VOCAB = 40 };
    static const float inv_freq[32] = {1};
    const struct kern_rope rope = {.inv_freq = inv_freq, .scale = 1};
    const struct kern_span span = {.count = ROWS};
    const struct kern_batch batch = {.spans = &span, .rows = ROWS, .span_count = 1};
    const struct kern_seen seen[] = {{1, 0}, {2, 0}, {3, 0}};
    const struct kern_sample sample = {.seen = seen,
                                       .seen_count = 3,
                                       .repetition = 1.5f,
                                       .temperature = 1,
                                       .top_p = 1,
                                       .top_count = -1,
                                       .forced = -1};
    int failures = 0;
    for (int n = 0; n < 60; n++) {
        struct kern *kern;
        struct kern_sampled out;
        struct cuda_options cuda = {.device = 0, .eager = true};
        MUST(cuda_open(&cuda, &kern, NULL));
        MUST(kern->ops->cache_open(kern, options, NULL));
        float *qkv = kern->ops->mem_alloc(kern, ROWS * 4 * 64 * sizeof *qkv);
        float *logits = kern->ops->mem_alloc(kern, VOCAB * sizeof *logits);
        mem_fail_after(n);
        int rc = kern->ops->begin_step(kern, &batch);
        if (!rc) kern->ops->qk_rope(kern, qkv, NULL, NULL, 1e-6f, &rope, &batch);
        if (!rc) rc = kern->ops->sync(kern);
        if (!rc) rc = kern->ops->sample(kern, logits, 1, VOCAB, &sample, &out);
        bool passed = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %d: %d", n, rc);
        MUST(kern->ops->sync(kern)); /* nothing is left of it for the next step */
        failures += rc != 0;
        cr_assert(!passed || rc == 0);
        kern->ops->mem_free(kern, qkv);
        kern->ops->mem_free(kern, logits);
        kern->ops->close(kern);
    }
    return failures;
}

/* Frequencies, angles and the room of sampling are there since the cache was opened; what is left
 * are lists on their way. */
Test(emu_alloc, the_rooms_of_the_largest_step_are_taken_with_the_cache) {
    struct kern_cache_options bounded = small;
    bounded.rows_max = 5;
    bounded.logits_max = 1;
    bounded.vocab = 40;
    int before = failures_of_a_step(&small), after = failures_of_a_step(&bounded);
    cr_assert_eq(before - after, 3, "%d, %d", before, after);
}

/* ---- Memory of a rule is taken at admission ---- */

enum { HELD = 600, KEPT = 100, STEP = 60 };

static const struct kern_cache_options rooms = {.layers = 2,
                                                .heads_q = 4,
                                                .heads_kv = 2,
                                                .head_dim = 64,
                                                .dtype = KERN_BF16,
                                                .pages = 200,
                                                .slots = 2,
                                                .max_positions = 1000,
                                                .rows_max = STEP + 1,
                                                .logits_max = 1,
                                                .vocab = 10};

static const struct kern_rule observing[] = {
    {.score = KERN_SCORE_ATTENTION, .observe = {.reduce = KERN_REDUCE_SUM}},
    {.score = KERN_SCORE_ATTENTION, .observe = {.window = 32}},
    {.score = KERN_SCORE_ATTENTION,
     .layers = KERN_LAYERS_PREFERENCE,
     .tau1 = 1,
     .tau2 = 1,
     .observe = {.window = 32, .reduce = KERN_REDUCE_MEAN_VAR}},
    {.score = KERN_SCORE_ATTENTION,
     .redundancy = {.on = true, .lambda = 0.1f, .threshold = 0.5f},
     .observe = {.window = 8}}};

/* Pages that still fit the device. */
static int64_t fit(struct kern *kern) {
    int64_t pages;
    MUST(kern->ops->cache_fit(kern, &rooms, &pages, NULL));
    return pages;
}

/* Reads a text into slot 0, while slot 1 answers with a token in each step. */
static void read_texts(struct kern *kern, const struct kern_rule *rule) {
    for (int step = 0; step < HELD / STEP; step++) {
        const struct kern_span spans[] = {
            {.slot = 0, .count = STEP, .pos = step * STEP, .rule = rule},
            {.slot = 1, .row = STEP, .count = 1, .pos = step, .rule = rule}};
        const struct kern_batch batch = {.spans = spans, .span_count = 2, .rows = STEP + 1};
        MUST(kern->ops->begin_step(kern, &batch));
        MUST(kern->ops->sync(kern));
    }
}

static struct kern *open_prepared(const struct kern_rule *rule, bool prepared) {
    const struct cuda_options cuda = {.eager = true};
    struct kern *kern;
    struct kern_cache_info info;
    MUST(cuda_open(&cuda, &kern, NULL));
    MUST(kern->ops->cache_open(kern, &rooms, NULL));
    kern->ops->cache_info(&rooms, &info);
    int streams = rooms.layers * rooms.heads_kv;
    int64_t pages = (int64_t)streams * (HELD + info.page_slots - 1) / info.page_slots;
    for (int slot = 0; slot < 2 && prepared; slot++)
        MUST(kern->ops->prepare(kern, slot, rule, pages));
    return kern;
}

static void expect_entries(struct kern *kern, int slot, int entries) {
    struct kern_report report = {0};
    MUST(kern->ops->report(kern, slot, &report));
    cr_assert_eq((int)report.entries, entries);
}

Test(emu_alloc, no_step_of_an_admitted_sequence_takes_memory_for_its_rule) {
    for (size_t i = 0; i < sizeof observing / sizeof *observing; i++)
        for (int prepared = 0; prepared < 2; prepared++) {
            const struct kern_rule *rule = &observing[i];
            struct kern *kern = open_prepared(rule, prepared);
            const struct kern_evict due = {.tokens = HELD, .budget = KEPT, .rule = rule};
            int64_t before = fit(kern);
            read_texts(kern, rule);
            MUST(kern->ops->evict(kern, &due, 1));
            MUST(kern->ops->sync(kern));
            expect_entries(kern, 0, KEPT * rooms.layers * rooms.heads_kv);
            if (prepared)
                cr_assert_eq(fit(kern), before, "rule %zu", i);
            else
                cr_assert_lt(fit(kern), before, "rule %zu", i);
            kern->ops->close(kern);
        }
}

/* Without memory to evict from several sequences at once, they evict one after the other. */
Test(emu_alloc, sequences_evict_alone_where_memory_is_short) {
    const struct kern_rule *rule = &observing[1];
    const struct kern_evict due[] = {{.slot = 0, .tokens = HELD, .budget = KEPT, .rule = rule},
                                     {.slot = 1, .tokens = HELD, .budget = KEPT, .rule = rule}};
    struct kern *kern = open_prepared(rule, true);
    for (int pos = 0; pos < HELD; pos += STEP) {
        for (int slot = 0; slot < 2; slot++) {
            const struct kern_span span = {.slot = slot, .count = STEP, .pos = pos, .rule = rule};
            const struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = STEP};
            MUST(kern->ops->begin_step(kern, &batch));
            MUST(kern->ops->sync(kern));
        }
    }
    mem_fail_after(0);
    int rc = kern->ops->evict(kern, due, 2);
    bool failed = !mem_fail_pending();
    mem_fail_after(-1);
    MUST(rc);
    MUST(kern->ops->sync(kern));
    cr_assert(failed);
    for (int slot = 0; slot < 2; slot++)
        expect_entries(kern, slot, KEPT * rooms.layers * rooms.heads_kv);
    expect_sound(kern);
    kern->ops->close(kern);
}

/* ---- Recurrent states ---- */

enum { STATE_HEADS = 2, STATE_ROWS = 4, STATE_DIM = 16 };

static const struct kern_mamba small_mamba = {
    .heads = STATE_HEADS, .groups = 1, .dim = STATE_DIM, .dim_state = 8, .width = 4, .eps = 1e-5f};

/* *behind: the product that reads the layer's results; its inputs set the size of a room. */
static struct kern *open_small_states(struct kern_weight **behind) {
    static const uint16_t zeros[8 * STATE_HEADS * STATE_DIM] = {0};
    const struct kern_matrix matrix = {
        .data = zeros, .dtype = KERN_BF16, .rows = 8, .cols = STATE_HEADS * STATE_DIM};
    const struct cuda_options cuda = {.eager = true}; /* lists of graphs are memory, too */
    struct kern_cache_options options = small;
    struct kern *kern;
    options.states = 1;
    options.state_floats =
        kern_mamba_shared_floats(&small_mamba) + STATE_HEADS * kern_mamba_head_floats(&small_mamba);
    options.state_heads = STATE_HEADS;
    options.rows_max = STATE_ROWS;
    MUST(cuda_open(&cuda, &kern, NULL));
    MUST(kern->ops->weight_load(kern, &matrix, 1, KERN_SHARD_COLS, behind, NULL));
    MUST(kern->ops->cache_open(kern, &options, NULL));
    return kern;
}

/* A layer's scratch memory, that of the norm over heads, is there when the cache is open. */
Test(emu_alloc, a_recurrent_layer_needs_no_memory) {
    enum { IN = 2 * STATE_HEADS * STATE_DIM, SHARED = 2 * 8 + STATE_HEADS };
    const struct kern_span span = {.count = STATE_ROWS};
    const struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = STATE_ROWS};
    struct kern_weight *behind;
    struct kern *kern = open_small_states(&behind);
    struct kern_mamba mamba = small_mamba;
    float *host = fresh(1024, 1);
    float *arrays = put(kern, host, 1024), *in = put(kern, host, STATE_ROWS * IN);
    float *shared = put(kern, host, STATE_ROWS * SHARED);
    float *y = put(kern, NULL, STATE_ROWS * STATE_HEADS * STATE_DIM);
    mamba.taps = mamba.decay = mamba.bias = mamba.skip = mamba.norm = arrays;
    MUST(kern->ops->begin_step(kern, &batch));
    mem_fail_after(0);
    kern->ops->mamba(kern, 0, y, in, shared, &mamba, &batch);
    const bool pending = mem_fail_pending();
    mem_fail_after(-1);
    cr_assert(pending, "the layer has allocated");
    free(take(kern, y, STATE_ROWS * STATE_HEADS * STATE_DIM));
    kern->ops->mem_free(kern, arrays);
    kern->ops->mem_free(kern, in);
    kern->ops->mem_free(kern, shared);
    kern->ops->weight_free(kern, behind);
    free(host);
    kern->ops->close(kern);
}

/* An import that has no memory says so, and its pages can be given back. */
Test(emu_alloc, a_state_is_imported_or_leaves_nothing) {
    enum { BLOCKS = 3 };
    const struct kern_span span = {.count = STATE_ROWS};
    const struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = STATE_ROWS};
    int failures = 0, passes = 0;
    for (int n = 0; n < 8; n++) {
        struct kern_weight *behind;
        struct kern *kern = open_small_states(&behind);
        struct kern_block blocks[BLOCKS];
        struct kern_cache_stats stats;
        int rc = 0;
        MUST(kern->ops->begin_step(kern, &batch));
        for (int b = 0; b < BLOCKS; b++) {
            blocks[b].size = kern->ops->snapshot_size(kern, 0, b);
            void *data = malloc(blocks[b].size);
            MUST(kern->ops->snapshot_export(kern, 0, b, data));
            blocks[b].data = data;
        }
        kern->ops->weight_free(kern, behind);
        kern->ops->close(kern); /* with its rooms */
        kern = open_small_states(&behind);
        mem_fail_after(n);
        for (int b = 0; b < BLOCKS && !rc; b++)
            rc = kern->ops->snapshot_import(kern, 1, b, &blocks[b]);
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %d: %d", n, rc);
        failures += rc != 0;
        passes += rc == 0;
        expect_sound(kern);
        kern->ops->release(kern, 1);
        expect_sound(kern);
        kern->ops->cache_stats(kern, &stats);
        cr_assert_eq((int)stats.pages_used, 0, "allocation %d", n);
        for (int b = 0; b < BLOCKS; b++) free((void *)(uintptr_t)blocks[b].data);
        kern->ops->weight_free(kern, behind);
        kern->ops->close(kern);
    }
    cr_assert(failures > 0 && passes > 0, "%d failures", failures);
}
