/* Sampling on the device gives the CPU's token, rank and alternatives for every setting. */
#include <criterion/criterion.h>

#include "both.h"
#include "kernels/cpu/sample.h"

#define VOCAB_MAX 5003
#define ROWS      8

static float unit(uint32_t stream, int i) {
    return (float)(cpu_philox(99, stream, (uint32_t)i) >> 8) * 0x1p-24f;
}

/* Fills logits of a given shape: flat, peaked, many equal, huge, with impossible tokens, with NaN.
 */
static void fill_logits(float *logits, int vocab, int shape, uint32_t stream) {
    for (int i = 0; i < vocab; i++) {
        float u = unit(stream, i);
        logits[i] = shape == 0   ? u
                    : shape == 1 ? 30 * u * u * u - 5
                    : shape == 2 ? floorf(4 * u)
                    : shape == 3 ? 2e4f * u
                    : shape == 4 ? (u < 0.5f ? -INFINITY : 8 * u)
                                 : (u < 0.3f ? NAN : 4 * u);
    }
}

struct lists {
    struct kern_logit_bias bias[4];
    int32_t banned[3];
    struct kern_seen seen[6];
    uint32_t allowed[(VOCAB_MAX + 31) / 32]; /* every fifth token, the first one too */
};

static struct kern_sample random_setting(uint32_t trial, int row, int vocab,
                                         const struct lists *l) {
    static const float temperatures[] = {0, 1, 0.3f, 1.7f, 1e-3f, 1e-42f};
    static const float top_ps[] = {1, 0.95f, 0.5f, 0.999999f, 0};
    static const int top_ks[] = {0, 1, 3, 20, 4000};
    static const float min_ps[] = {0, 0.05f, 1};
    static const float xtc_probabilities[] = {0, 1, 0.5f};
    static const float xtc_thresholds[] = {0.1f, 0, 0.02f, 0.6f};
    uint32_t x = cpu_philox(6, trial, (uint32_t)row);
    uint32_t h = cpu_philox(5, trial, (uint32_t)row);
    struct kern_sample p = {.repetition = 1, .forced = -1};
    p.temperature = temperatures[h % 6];
    p.top_p = top_ps[h / 6 % 5];
    p.top_k = top_ks[h / 30 % 5];
    p.min_p = min_ps[h / 150 % 3];
    p.xtc_probability = xtc_probabilities[x % 3];
    p.xtc_threshold = xtc_thresholds[x / 3 % 4];
    p.seed = trial * 0x123456789ull + (uint64_t)row;
    p.position = (int32_t)trial;
    p.top_count = (int32_t)(h / 450 % 4 == 0 ? KERN_TOP_MAX : (int)(h / 450 % 4) - 2);
    if (h / 1800 % 2) p.bias = l->bias, p.bias_count = 4;
    if (h / 3600 % 2 && vocab > 10) p.banned = l->banned, p.banned_count = 3;
    if (h / 7200 % 2) {
        p.seen = l->seen;
        p.seen_count = 6;
        p.repetition = 1.3f;
        p.presence = 0.2f;
        p.frequency = h / 14400 % 2 ? -0.1f : 0.7f;
    }
    if (h / 57600 % 3 == 0) p.allowed = l->allowed;
    if (h / 28800 % 5 == 0) p.forced = (int32_t)(h % (uint32_t)vocab);
    return p;
}

static void same_answer(const struct kern_sampled *want, const struct kern_sampled *got,
                        const struct kern_sample *p, uint32_t trial, int row) {
    cr_assert_eq(got->token, want->token,
                 "trial %u row %d: token %d, not %d (T %g k %d p %g min_p %g)", trial, row,
                 got->token, want->token, (double)p->temperature, p->top_k, (double)p->top_p,
                 (double)p->min_p);
    cr_assert_eq(got->rank, want->rank, "trial %u row %d: rank %d, not %d", trial, row, got->rank,
                 want->rank);
    for (int i = 0; i < p->top_count; i++)
        cr_assert_eq(got->top_token[i], want->top_token[i], "trial %u row %d: alternative %d",
                     trial, row, i);
    if (p->top_count < 0 || isnan(want->logprob)) {
        cr_assert(isnan(got->logprob));
        return;
    }
    cr_assert(fabsf(got->logprob - want->logprob) <= 1e-5f * (1 + fabsf(want->logprob)) ||
                  got->logprob == want->logprob,
              "trial %u row %d: %g, not %g", trial, row, (double)got->logprob,
              (double)want->logprob);
}

/* top_p over a row with NaN is nobody's: the mass is not a number. */
static bool undefined(int shape, const struct kern_sample *p) {
    return shape == 5 && p->top_p < 1 && p->temperature > 0;
}

Test(emu_sample, every_setting_equals_the_cpu) {
    static const int vocabs[] = {1, 2, 20, 511, 1000, VOCAB_MAX};
    static float logits[ROWS * VOCAB_MAX];
    struct lists lists = {.bias = {{0, 3}, {7, -2.5f}, {7, 0.25f}, {-4, 1}},
                          .banned = {1, 5, 100000},
                          .seen = {{0, 1}, {3, 2}, {9999999, 0}, {2, 0}, {-1, 1}, {6, 1}}};
    struct kern *kern[BACKENDS];
    for (int i = 0; i < VOCAB_MAX; i += 5) lists.allowed[i / 32] |= 1u << (i % 32);
    both_open(kern);
    for (uint32_t trial = 0; trial < 120; trial++) {
        int vocab = vocabs[trial % 6], shape = (int)(trial / 6 % 6);
        struct kern_sample params[ROWS];
        struct kern_sampled out[BACKENDS][ROWS];
        emu_set_seed(trial);
        for (int r = 0; r < ROWS; r++) {
            fill_logits(logits + r * vocab, vocab, shape, trial * ROWS + (uint32_t)r);
            params[r] = random_setting(trial, r, vocab, &lists);
            if (undefined(shape, &params[r])) params[r].top_p = 1;
        }
        for (int b = 0; b < BACKENDS; b++) {
            float *there = put(kern[b], logits, (size_t)(ROWS * vocab));
            memset(out[b], 0xff, sizeof out[b]);
            MUST(kern[b]->ops->sample(kern[b], there, ROWS, vocab, params, out[b]));
            MUST(kern[b]->ops->sync(kern[b]));
            kern[b]->ops->mem_free(kern[b], there);
        }
        for (int r = 0; r < ROWS; r++)
            same_answer(&out[ORACLE][r], &out[EMULATED][r], &params[r], trial, r);
    }
    both_close(kern);
}

/* A GPU copies each list in a microsecond or two, while nothing else runs: all go in one copy. With
 * the launch and the read of the answers these are three operations. */
Test(emu_sample, all_lists_are_one_copy) {
    enum { VOCAB = 100 };
    static float logits[2 * VOCAB];
    struct lists lists = {.bias = {{0, 3}}, .banned = {1}, .seen = {{3, 2}}, .allowed = {~0u}};
    struct kern_sample params[2] = {{.repetition = 1, .forced = -1, .top_count = -1},
                                    {.repetition = 1.5f,
                                     .forced = -1,
                                     .top_count = -1,
                                     .bias = lists.bias,
                                     .bias_count = 1,
                                     .banned = lists.banned,
                                     .banned_count = 1,
                                     .seen = lists.seen,
                                     .seen_count = 1,
                                     .allowed = lists.allowed}};
    struct kern_sampled out[2];
    struct kern *kern[BACKENDS];
    both_open(kern);
    float *there = put(kern[EMULATED], logits, 2 * VOCAB);
    for (int rows = 1; rows <= 2; rows++) { /* the first time memory is taken, too */
        MUST(kern[EMULATED]->ops->sample(kern[EMULATED], there, rows, VOCAB, params, out));
        uint64_t before = cuda_queued(kern[EMULATED]);
        MUST(kern[EMULATED]->ops->sample(kern[EMULATED], there, rows, VOCAB, params, out));
        cr_assert_eq(cuda_queued(kern[EMULATED]) - before, 3);
    }
    kern[EMULATED]->ops->mem_free(kern[EMULATED], there);
    both_close(kern);
}

/* A row's token does not depend on its neighbours or on the order of threads. */
Test(emu_sample, company_changes_nothing) {
    enum { VOCAB = 1500 };
    static float logits[ROWS * VOCAB];
    struct kern *kern[BACKENDS];
    struct kern_sample params[ROWS];
    struct kern_sampled together[ROWS], alone;
    both_open(kern);
    struct kern *emulated = kern[EMULATED];
    for (int r = 0; r < ROWS; r++) {
        fill_logits(logits + r * VOCAB, VOCAB, r % 3, (uint32_t)r);
        params[r] = (struct kern_sample){.temperature = 1,
                                         .top_p = 0.9f,
                                         .repetition = 1,
                                         .top_k = 50,
                                         .forced = -1,
                                         .top_count = 5,
                                         .seed = 3,
                                         .position = r};
    }
    float *there = put(emulated, logits, ROWS * VOCAB);
    MUST(emulated->ops->sample(emulated, there, ROWS, VOCAB, params, together));
    for (int r = 0; r < ROWS; r++) {
        emu_set_seed((uint64_t)r + 5);
        MUST(emulated->ops->sample(emulated, there + r * VOCAB, 1, VOCAB, &params[r], &alone));
        cr_assert_eq(alone.token, together[r].token);
        cr_assert(!memcmp(&alone.logprob, &together[r].logprob, sizeof alone.logprob));
        cr_assert(!memcmp(alone.top_logprob, together[r].top_logprob, 5 * sizeof(float)));
    }
    emulated->ops->mem_free(emulated, there);
    both_close(kern);
}

/* A step that the device refused says so with its samples, once. */
Test(emu_sample, errors_of_the_step_come_with_its_samples) {
    static float logits[VOCAB_MAX];
    const struct kern_cache_options options = {.layers = 1,
                                               .heads_q = 1,
                                               .heads_kv = 1,
                                               .head_dim = 64,
                                               .dtype = KERN_BF16,
                                               .pages = 1,
                                               .slots = 2,
                                               .max_positions = 400};
    const struct kern_sample params = {.repetition = 1, .top_p = 1, .top_count = -1, .forced = -1};
    const struct cuda_options cuda = {.device = 0};
    struct kern_sampled out;
    struct kern *kern;
    MUST(cuda_open(&cuda, &kern, NULL));
    MUST(kern->ops->cache_open(kern, &options, NULL));
    fill_logits(logits, VOCAB_MAX, 0, 1);
    float *there = put(kern, logits, VOCAB_MAX);
    for (int count = 1; count <= 100; count += 99) { /* fits its page; does not */
        const struct kern_span span = {.slot = count > 1, .count = count};
        const struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
        uint64_t before = cuda_waits(kern);
        MUST(kern->ops->begin_step(kern, &batch));
        int rc = kern->ops->sample(kern, there, 1, VOCAB_MAX, &params, &out);
        cr_assert_eq(rc, count > 1 ? ERR_FULL : 0, "%d tokens: %d", count, rc);
        cr_assert_eq(cuda_waits(kern), before + 1);
        MUST(kern->ops->sync(kern));
        kern->ops->release(kern, span.slot);
    }
    MUST(kern->ops->sample(kern, there, 1, VOCAB_MAX, &params, &out));
    kern->ops->mem_free(kern, there);
    expect_sound(kern);
    kern->ops->close(kern);
}
