/* Mixtures of experts on the emulated device, beside the CPU's reference path; a row alone has the
 * bits that it has in company. */
#include <criterion/criterion.h>

#include "both.h"
#include "tests/unit/kernels/paths.h"

enum { EXPERTS_MAX = 40 };

struct mixture {
    int rows, experts, used, d_model, d_ff;
    bool normalise, bias;
    enum kern_dtype dtype;
    enum kern_activation activation;
    bool sigmoid, selects;
    int groups, groups_used;
    float scale;
    bool ungated, sets, factors, group_best;
};

/* More rows for one expert than a group has; more experts than a warp has lanes; widths that are no
 * multiple of anything; the number formats of weights; more uses than a block of warps sorts. */
static const struct mixture mixtures[] = {
    {1, 4, 1, 16, 8, true, false, KERN_BF16, KERN_SILU, .scale = 0},
    {5, 7, 3, 33, 24, false, false, KERN_BF16, KERN_SILU, .scale = 0},
    {12, 6, 6, 64, 40, true, true, KERN_F32, KERN_GELU_TANH, .scale = 0},
    {70, 2, 2, 20, 16, false, true, KERN_BF16, KERN_GELU_TANH, .scale = 0},
    {9, 40, 8, 32, 16, true, true, KERN_E4M3, KERN_SILU, .scale = 0},
    {21, 40, 3, 48, 32, false, false, KERN_BF16, KERN_SILU, .scale = 0},
    {13, 8, 4, 64, 48, true, true, KERN_BF16, KERN_SWIGLU_CLAMPED, .scale = 0},
    {6, 5, 2, 32, 16, true, false, KERN_F16, KERN_SILU, .scale = 0},
    {430, 5, 3, 16, 8, true, false, KERN_BF16, KERN_SILU, .scale = 0},
    {9, 6, 2, 64, 64, true, true, KERN_Q4M, KERN_SILU, .scale = 0},
    {5, 4, 2, 32, 64, true, false, KERN_Q8S, KERN_SILU, .scale = 0},
    {9, 40, 8, 32, 16, true, false, KERN_BF16, KERN_SILU, .sigmoid = true, .selects = true,
     .scale = 2.5f},
    {9, 40, 8, 32, 16, false, false, KERN_BF16, KERN_SILU, .sigmoid = true, .scale = 0.5f},
    {9, 40, 6, 32, 16, true, true, KERN_BF16, KERN_SILU, .selects = true},
    {17, 40, 6, 32, 16, true, false, KERN_BF16, KERN_SILU, .sigmoid = true, .selects = true,
     .groups = 8, .groups_used = 3},
    {11, 16, 4, 32, 16, false, false, KERN_BF16, KERN_SILU, .groups = 4, .groups_used = 2,
     .group_best = true},
    {9, 6, 2, 48, 24, true, false, KERN_BF16, KERN_RELU, .sigmoid = true, .ungated = true},
    {5, 4, 2, 32, 64, true, false, KERN_Q8, KERN_RELU, .ungated = true},
    {9, 8, 3, 32, 16, true, false, KERN_BF16, KERN_GELU_TANH, .sets = true, .factors = true},
};

struct stage {
    struct kern_weight *gate_up[EXPERTS_MAX], *down[EXPERTS_MAX];
    float *gate_up_bias, *down_bias, *select_bias, *factors;
    struct kern_experts *experts;
};

/* The gate and the up product are parts of one weight, as a model has them. `plain`: blocks become
 * float32. */
static void stage_open(struct stage *stage, struct kern *kern, const struct mixture *m,
                       bool plain) {
    const size_t wide = (size_t)m->experts * 2 * (size_t)m->d_ff;
    const size_t narrow = (size_t)(m->experts * m->d_model);
    struct fault fault = {0};
    const size_t count = (size_t)m->experts;
    float *bias = fresh(wide + narrow + 2 * count, 4);
    *stage = (struct stage){.gate_up_bias = put(kern, bias, wide),
                            .down_bias = put(kern, bias + wide, narrow),
                            .select_bias = put(kern, bias + wide + narrow, count),
                            .factors = put(kern, bias + wide + narrow + count, count)};
    free(bias);
    for (int e = 0; e < m->experts; e++) {
        struct test_matrix gate = matrix_make(m->d_ff, m->d_model, m->dtype, 10 + (uint64_t)e);
        struct test_matrix up = matrix_make(m->d_ff, m->d_model, m->dtype, 100 + (uint64_t)e);
        struct test_matrix down = matrix_make(m->d_model, m->d_ff, m->dtype, 200 + (uint64_t)e);
        struct kern_matrix parts[] = {gate.file, up.file, down.file};
        if (plain && kern_dtype_blocks(m->dtype)) {
            parts[0] = matrix_wide(&gate);
            parts[1] = matrix_wide(&up);
            parts[2] = matrix_wide(&down);
        }
        const int first = m->ungated ? 1 : 0; /* up alone */
        MUST(kern->ops->weight_load(kern, parts + first, 2 - first, KERN_SHARD_ROWS,
                                    &stage->gate_up[e], &fault));
        MUST(kern->ops->weight_load(kern, &parts[2], 1, KERN_SHARD_COLS, &stage->down[e], &fault));
        matrix_close(&gate), matrix_close(&up), matrix_close(&down);
    }
    const struct kern_experts_spec spec = {.count = m->experts,
                                           .used = m->used,
                                           .d_model = m->d_model,
                                           .d_ff = m->d_ff,
                                           .normalise = m->normalise,
                                           .sigmoid = m->sigmoid,
                                           .scale = m->scale,
                                           .groups = m->groups,
                                           .groups_used = m->groups_used,
                                           .group_best = m->group_best,
                                           .ungated = m->ungated,
                                           .sets = m->sets,
                                           .factors = m->factors ? stage->factors : NULL,
                                           .select_bias = m->selects ? stage->select_bias : NULL,
                                           .activation = m->activation,
                                           .gate_up = stage->gate_up,
                                           .down = stage->down,
                                           .gate_up_bias = m->bias ? stage->gate_up_bias : NULL,
                                           .down_bias = m->bias ? stage->down_bias : NULL};
    MUST(kern->ops->experts_load(kern, &spec, &stage->experts, &fault));
}

static void stage_close(struct stage *stage, struct kern *kern, int experts) {
    kern->ops->experts_free(kern, stage->experts);
    for (int e = 0; e < experts; e++) {
        kern->ops->weight_free(kern, stage->gate_up[e]);
        kern->ops->weight_free(kern, stage->down[e]);
    }
    kern->ops->mem_free(kern, stage->gate_up_bias);
    kern->ops->mem_free(kern, stage->down_bias);
    kern->ops->mem_free(kern, stage->select_bias);
    kern->ops->mem_free(kern, stage->factors);
}

/* y + the mixture of rows [first, first + rows); the caller frees it. */
static float *compute(struct kern *kern, const struct stage *stage, const struct mixture *m,
                      const float *x, const float *logits, const float *y, int first, int rows) {
    const size_t width = (size_t)m->d_model, from = (size_t)first * width;
    const size_t count = (size_t)rows * width, choices = (size_t)(rows * m->experts);
    float *in = put(kern, x + from, count), *to = put(kern, y + from, count);
    float *router = put(kern, logits + (size_t)(first * m->experts), choices);
    kern->ops->experts(kern, to, in, router, stage->experts, rows);
    float *found = take(kern, to, count);
    kern->ops->mem_free(kern, in);
    kern->ops->mem_free(kern, router);
    return found;
}

static void check_mixture(struct kern *kern[BACKENDS], const struct mixture *m) {
    const size_t count = (size_t)(m->rows * m->d_model), width = (size_t)m->d_model;
    float *x = fresh(count, 1), *logits = fresh((size_t)(m->rows * m->experts), 2);
    float *y = fresh(count, 3), *found[BACKENDS];
    if (m->experts > 2) logits[0] = logits[2]; /* equal logits: the lower expert */
    for (int b = 0; b < BACKENDS; b++) {
        struct stage stage;
        stage_open(&stage, kern[b], m, b == ORACLE);
        found[b] = compute(kern[b], &stage, m, x, logits, y, 0, m->rows);
        for (int row = 0; b == EMULATED && row < m->rows; row += m->rows / 16 + 4) {
            float *alone = compute(kern[b], &stage, m, x, logits, y, row, 1);
            cr_assert_eq(memcmp(alone, found[b] + (size_t)row * width, width * sizeof *alone), 0,
                         "row %d", row);
            free(alone);
        }
        stage_close(&stage, kern[b], m->experts);
    }
    expect_near(found[ORACLE], found[EMULATED], count, 2e-5, 2e-5, "experts");
    for (int b = 0; b < BACKENDS; b++) free(found[b]);
    free(x), free(logits), free(y);
}

Test(emu_experts, as_the_reference) {
    for (size_t i = 0; i < sizeof mixtures / sizeof *mixtures; i++) {
        struct kern *kern[BACKENDS];
        emu_set_seed(i + 1);
        both_open(kern);
        check_mixture(kern, &mixtures[i]);
        both_close(kern);
    }
}

/* Each of two ranks has half of every expert. */
Test(emu_experts, split_over_ranks) {
    static const int one_device[] = {0, 0};
    const struct cuda_options cuda = {0};
    for (size_t i = 0; i < sizeof mixtures / sizeof *mixtures; i++) {
        struct kern *kern[BACKENDS];
        struct fault fault = {0};
        if (mixtures[i].dtype == KERN_E4M3) continue; /* halves of rows are too short for it */
        emu_set_seed(i + 1);
        both_open(kern);
        kern[EMULATED]->ops->close(kern[EMULATED]);
        int rc = cuda_open_ranks(&cuda, one_device, 2, &kern[EMULATED], &fault);
        cr_assert_eq(rc, 0, "%s", fault.text);
        check_mixture(kern, &mixtures[i]);
        both_close(kern);
    }
}
