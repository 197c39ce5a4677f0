/* Mixtures of experts, on every path: against double arithmetic, and a row alone against the same
 * row in company, bit by bit. */
#include <criterion/criterion.h>

#include "paths.h"

#define MUST(rc) cr_assert_eq((rc), 0)

enum { EXPERTS_MAX = 12 };

struct mixture {
    int rows, experts, used, d_model, d_ff;
    bool normalise, bias;
    enum kern_dtype dtype;
    bool sigmoid, selects;
    int groups, groups_used;
    float scale;
};

/* 700 rows of two experts: more rows for one expert than a pass has. */
static const struct mixture mixtures[] = {
    {1, 4, 1, 16, 8, true, false, KERN_BF16, .scale = 0},
    {5, 7, 3, 33, 24, false, false, KERN_BF16, .scale = 0},
    {40, 6, 6, 64, 40, true, true, KERN_F32, .scale = 0},
    {700, 2, 2, 20, 16, false, true, KERN_BF16, .scale = 0},
    {300, 5, 2, 48, 32, true, false, KERN_E4M3, .scale = 0},
    {40, 7, 3, 16, 8, true, false, KERN_F32, .sigmoid = true, .selects = true, .scale = 2.5f},
    {40, 7, 3, 16, 8, false, false, KERN_F32, .sigmoid = true, .scale = 0.5f},
    {40, 7, 3, 16, 8, true, true, KERN_F32, .selects = true},
    {60, 12, 3, 16, 8, true, false, KERN_F32, .sigmoid = true, .selects = true, .groups = 4,
     .groups_used = 2},
    {60, 12, 4, 16, 8, false, false, KERN_F32, .selects = true, .groups = 3, .groups_used = 2},
};

struct made {
    const struct mixture *m;
    struct test_matrix gate_up[EXPERTS_MAX], down[EXPERTS_MAX];
    float *x, *logits, *was, *gate_up_bias, *down_bias, *select_bias;
};

static void make(struct made *made, const struct mixture *m) {
    const size_t rows = (size_t)m->rows, e = (size_t)m->experts;
    *made = (struct made){.m = m};
    for (int i = 0; i < m->experts; i++) {
        made->gate_up[i] =
            matrix_make((int64_t)2 * m->d_ff, m->d_model, m->dtype, 10 + (uint64_t)i);
        made->down[i] = matrix_make(m->d_model, m->d_ff, m->dtype, 30 + (uint64_t)i);
    }
    made->x = fresh(rows * (size_t)m->d_model, 1);
    made->logits = fresh(rows * e, 2);
    made->was = fresh(rows * (size_t)m->d_model, 3);
    made->gate_up_bias = fresh(e * 2 * (size_t)m->d_ff, 4);
    made->down_bias = fresh(e * (size_t)m->d_model, 5);
    made->select_bias = fresh(e, 6);
}

static void unmake(struct made *made) {
    for (int i = 0; i < made->m->experts; i++) {
        matrix_close(&made->gate_up[i]);
        matrix_close(&made->down[i]);
    }
    free(made->x), free(made->logits), free(made->was);
    free(made->gate_up_bias), free(made->down_bias), free(made->select_bias);
}

struct stage {
    struct kern *kern;
    int count;
    struct kern_weight *gate_up[EXPERTS_MAX], *down[EXPERTS_MAX];
    struct kern_experts *experts;
};

static void stage_open(struct stage *stage, struct kern *kern, const struct made *made) {
    const struct mixture *m = made->m;
    struct fault fault = {0};
    *stage = (struct stage){.kern = kern, .count = m->experts};
    for (int i = 0; i < m->experts; i++) {
        MUST(kern->ops->weight_load(kern, &made->gate_up[i].file, 1, KERN_SHARD_ROWS,
                                    &stage->gate_up[i], &fault));
        MUST(kern->ops->weight_load(kern, &made->down[i].file, 1, KERN_SHARD_COLS, &stage->down[i],
                                    &fault));
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
                                           .select_bias = m->selects ? made->select_bias : NULL,
                                           .gate_up = stage->gate_up,
                                           .down = stage->down,
                                           .gate_up_bias = m->bias ? made->gate_up_bias : NULL,
                                           .down_bias = m->bias ? made->down_bias : NULL};
    MUST(kern->ops->experts_load(kern, &spec, &stage->experts, &fault));
}

static void stage_close(struct stage *stage) {
    struct kern *kern = stage->kern;
    kern->ops->experts_free(kern, stage->experts);
    for (int i = 0; i < stage->count; i++) {
        kern->ops->weight_free(kern, stage->gate_up[i]);
        kern->ops->weight_free(kern, stage->down[i]);
    }
    kern->ops->close(kern);
}

/* ---- Double arithmetic ---- */

/* How many of by[0..count) come before by[i]. */
static int before(const double *by, int count, int i) {
    int better = 0;
    for (int j = 0; j < count; j++) better += by[j] > by[i] || (by[j] == by[i] && j < i);
    return better;
}

/* Sums of the two largest of each group decide which groups are used. */
static void close_groups(const struct mixture *m, double *by) {
    double sums[EXPERTS_MAX] = {0};
    const int size = m->experts / m->groups;
    for (int e = 0; e < m->experts; e++)
        if (before(by + e / size * size, size, e % size) < 2) sums[e / size] += by[e];
    for (int e = 0; e < m->experts; e++)
        if (before(sums, m->groups, e / size) >= m->groups_used) by[e] = -INFINITY;
}

/* The weight of expert e for a row; 0: not chosen. */
static double weight_of(const struct made *made, const float *logits, int e) {
    const struct mixture *m = made->m;
    double all = 0, chosen = 0, own = 0, score[EXPERTS_MAX], by[EXPERTS_MAX];
    for (int i = 0; i < m->experts; i++) all += exp((double)logits[i]);
    for (int i = 0; i < m->experts; i++) {
        const double power = exp((double)logits[i]);
        score[i] = m->sigmoid ? power / (1 + power) : power / all;
        by[i] = score[i] + (m->selects ? (double)made->select_bias[i] : 0);
    }
    if (m->groups > 1) close_groups(m, by);
    for (int i = 0; i < m->experts; i++) {
        if (before(by, m->experts, i) >= m->used) continue;
        chosen += score[i];
        if (i == e) own = score[i];
    }
    return own / (m->normalise ? chosen : 1) * (m->scale > 0 ? (double)m->scale : 1);
}

static double dot_of(const double *x, const float *row, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += x[i] * (double)row[i];
    return sum;
}

/* x as the sum of `parts` bf16, x = high + low, or x itself. */
static double split(double x, int parts) {
    const double high = (double)number_from_bf16(number_to_bf16((float)x));
    if (parts < 2) return parts ? high : x;
    return high + (double)number_from_bf16(number_to_bf16((float)(x - high)));
}

/* How many bf16 a path makes of an activation that weights in 16 and 8 bits are multiplied with; 0:
 * it takes float32. */
static int parts_of(const struct kern *kern) {
    return !strcmp(kern->ops->name, "cpu-amx") ? 2 : !strcmp(kern->ops->name, "cpu-avx512-bf16");
}

/* `parts`: of each activation in front of a product. */
static void exact_row(const struct made *made, int parts, int row, double *y) {
    const struct mixture *m = made->m;
    double x[64], gate_up[128], ff[64];
    for (int i = 0; i < m->d_model; i++) {
        x[i] = (double)made->x[row * m->d_model + i];
        x[i] = split(x[i], parts);
    }
    for (int i = 0; i < m->d_model; i++) y[i] = (double)made->was[row * m->d_model + i];
    for (int e = 0; e < m->experts; e++) {
        double weight = weight_of(made, made->logits + (ptrdiff_t)row * m->experts, e);
        if (weight == 0) continue;
        for (int j = 0; j < 2 * m->d_ff; j++) {
            gate_up[j] = dot_of(x, made->gate_up[e].value + (ptrdiff_t)j * m->d_model, m->d_model);
            if (m->bias) gate_up[j] += (double)made->gate_up_bias[e * 2 * m->d_ff + j];
        }
        for (int j = 0; j < m->d_ff; j++) {
            ff[j] = gate_up[j] / (1 + exp(-gate_up[j])) * gate_up[m->d_ff + j];
            ff[j] = split(ff[j], parts);
        }
        for (int i = 0; i < m->d_model; i++) {
            double sum = dot_of(ff, made->down[e].value + (ptrdiff_t)i * m->d_ff, m->d_ff);
            y[i] += weight * (sum + (m->bias ? (double)made->down_bias[e * m->d_model + i] : 0));
        }
    }
}

/* ---- Tests ---- */

static void check_mixture(const struct mixture *m, int way) {
    struct made made;
    struct stage stage;
    struct kern *kern = way_open(way, 3);
    if (!kern) return;
    make(&made, m);
    stage_open(&stage, kern, &made);
    const size_t width = (size_t)m->d_model, bytes = (size_t)m->rows * width * sizeof(float);
    float *y = malloc(bytes), *alone = malloc(width * sizeof *alone);
    const int parts = m->dtype == KERN_F32 ? 0 : parts_of(kern);
    /* a number between two bf16 may become either */
    const double most = parts == 1 ? 1e-3 : 1e-4;
    double exact[64];
    cr_assert(y && alone);
    memcpy(y, made.was, bytes);
    kern->ops->experts(kern, y, made.x, made.logits, stage.experts, m->rows);
    for (int r = 0; r < m->rows; r++) {
        const ptrdiff_t at = (ptrdiff_t)r * m->d_model;
        exact_row(&made, parts, r, exact);
        for (int i = 0; i < m->d_model; i++)
            cr_assert(fabs((double)y[at + i] - exact[i]) <= most * (1 + fabs(exact[i])),
                      "%s: %d rows, %d experts: row %d: %g, exact %g", kern->ops->name, m->rows,
                      m->experts, r, (double)y[at + i], exact[i]);
        memcpy(alone, made.was + at, width * sizeof *alone);
        kern->ops->experts(kern, alone, made.x + at, made.logits + (ptrdiff_t)r * m->experts,
                           stage.experts, 1);
        cr_assert_eq(memcmp(alone, y + at, width * sizeof *alone), 0, "%s: row %d alone",
                     kern->ops->name, r);
    }
    free(y), free(alone);
    stage_close(&stage);
    unmake(&made);
}

Test(experts, against_double_and_alone) {
    for (int way = 0; way < WAYS; way++)
        for (size_t i = 0; i < sizeof mixtures / sizeof *mixtures; i++)
            check_mixture(&mixtures[i], way);
}

/* Equal logits: the lower expert. Logits that are no numbers leave a result that is none, for
 * their row alone. */
Test(experts, ties_and_what_is_no_number) {
    static const struct mixture m = {3, 4, 2, 16, 8, true, false, KERN_F32, .scale = 0};
    struct made made;
    struct stage stage;
    double exact[64];
    float y[48];
    make(&made, &m);
    stage_open(&stage, path_open(1, 1), &made);
    const float logits[] = {1, 2, 2, 2, NAN, NAN, NAN, NAN, 0, 0, 0, 0};
    memcpy(made.logits, logits, sizeof logits);
    memcpy(y, made.was, sizeof y);
    stage.kern->ops->experts(stage.kern, y, made.x, made.logits, stage.experts, m.rows);
    for (int r = 0; r < 3; r++) {
        exact_row(&made, false, r, exact);
        for (int i = 0; i < m.d_model; i++)
            cr_assert(r == 1 ? isnan(y[r * 16 + i]) : fabs((double)y[r * 16 + i] - exact[i]) < 1e-4,
                      "row %d: %g, exact %g", r, (double)y[r * 16 + i], exact[i]);
    }
    stage_close(&stage);
    unmake(&made);
}
