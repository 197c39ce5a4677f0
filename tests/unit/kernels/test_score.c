#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/score.h"

/* The published score (arXiv 2605.09649) is log of sum_{h=0..n-1} beta^(exponent + h); ours is the
 * same at age = exponent, minus log n. */
static double published(double beta, int exponent, double n) {
    double sum = 0;
    for (int h = 0; h < (int)n; h++) sum += pow(beta, exponent + h);
    return log(sum);
}

/* In double, without the division that would cancel near lb = 0. */
static double reference(double lb, double age, double n) {
    if (isinf(n)) return age * lb - log(-expm1(lb));
    if (lb == 0) return 0;
    if (n * -lb < 1e-4) return age * lb + (n - 1) * lb / 2 + (n * n - 1) * lb * lb / 24;
    return age * lb + log(expm1(n * lb) / (n * expm1(lb)));
}

Test(score, golden_vectors) {
    static const int horizons[] = {1, 2, 16, 128};
    static const struct {
        double beta, log_g[4];
    } golden[] = {
        {0.9, {-1.158966, -0.517112, 0.938682, 1.143618}},
        {0.99, {-0.110554, 0.577581, 2.587731, 4.171305}},
        {0.9999, {-0.001100, 0.691997, 2.770739, 4.844587}},
    };
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 4; k++) {
            double score =
                (double)score_retention((float)log(golden[i].beta), 11, (float)horizons[k]);
            cr_assert_float_eq(score + log(horizons[k]), golden[i].log_g[k], 2e-6);
            cr_assert_float_eq(published(golden[i].beta, 11, horizons[k]), golden[i].log_g[k],
                               1e-6);
        }
}

Test(score, a_horizon_favours_old_persistent_entries) {
    float old = (float)log(0.999), young = (float)log(0.96);
    cr_assert_float_eq(score_retention(old, 81, 1), -0.0810, 1e-4);
    cr_assert_float_eq(score_retention(young, 3, 1), -0.1225, 1e-4);
    cr_assert_float_eq((double)score_retention(old, 81, 128) + log(128), 4.7081, 1e-4);
    cr_assert_float_eq((double)score_retention(young, 3, 128) + log(128), 3.0910, 1e-4);
}

Test(score, near_the_double_precision_value_everywhere) {
    static const float horizons[] = {1, 2, 3.5f, 16, 128, 100000, 1e30f, INFINITY};
    for (int i = 0; i < 8; i++)
        for (double z = -20; z < 40; z += 0.01) {
            float lb = (float)-log1p(exp(-z));
            double exact = reference((double)lb, 1, (double)horizons[i]);
            double score = (double)score_retention(lb, 1, horizons[i]);
            double tolerance = 1e-6 + 2e-7 * fabs(exact);
            /* Where the series holds, the precision is relative: tiny scores stay apart. */
            if (-(double)lb * (double)horizons[i] < 0.009) tolerance = 1e-6 * fabs(exact);
            cr_assert_float_eq(score, exact, tolerance, "n %g lb %g: %.9g, exact %.9g",
                               (double)horizons[i], (double)lb, score, exact);
        }
}

Test(score, extremes_have_an_order) {
    static const float horizons[] = {1, 2, 128, 3e38f, INFINITY};
    for (int i = 0; i < 5; i++) {
        float n = horizons[i];
        cr_assert(isnan(score_retention(NAN, 5, n)));
        cr_assert_eq(score_retention(-INFINITY, 5, n), -INFINITY);
        cr_assert_eq(score_retention(-3e38f, 1 << 30, n), -INFINITY);
        float forever = score_retention(0, 5, n);
        cr_assert_eq(forever, isinf(n) ? INFINITY : 0);
        cr_assert_eq(score_retention(1, 5, n), forever); /* a log_beta above 0 counts as 0 */
        cr_assert_geq(forever, score_retention(-1e-30f, 1, n));
        cr_assert_gt(score_retention(-1e-7f, 10, n), score_retention(-1e-3f, 10, n));
    }
}

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static int distinct(float *scores, int count) {
    int groups = 1;
    qsort(scores, (size_t)count, sizeof *scores, compare_floats);
    for (int i = 1; i < count; i++) groups += scores[i] != scores[i - 1];
    return groups;
}

/* Why the score is divided by n: gates that forget nothing yet must still rank their entries. */
Test(score, entries_near_beta_one_stay_distinct) {
    enum { COUNT = 9216 };
    static float ours[COUNT], plain[COUNT];
    for (int i = 0; i < COUNT; i++) {
        double z = 8 + 10 * (double)i / COUNT;
        float lb = (float)-log1p(exp(-z));
        ours[i] = score_retention(lb, 100, 128);
        plain[i] = 101 * lb + (float)log(expm1(128 * (double)lb) / expm1((double)lb));
    }
    cr_assert_eq(distinct(ours, COUNT), COUNT);
    cr_assert_lt(distinct(plain, COUNT), COUNT);
}

/* The published form and its own offsets: the table of log G, which counts t + 1 - i steps for
 * every horizon, so that the published n = 1, which counts one less, stands apart. */
Test(score, published_form) {
    static const struct {
        float beta, horizon, want;
    } cases[] = {{.9f, 2, -.517112f},   {.9f, 16, .938682f},     {.9f, 128, 1.143618f},
                 {.99f, 2, .577581f},   {.99f, 16, 2.587731f},   {.99f, 128, 4.171305f},
                 {.9999f, 2, .691997f}, {.9999f, 16, 2.770739f}, {.9999f, 128, 4.844587f}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float lb = logf(cases[i].beta); /* t = 100 = T + 1, i = 90: age T - i = 9 */
        cr_expect_float_eq(score_published(lb, 9, cases[i].horizon), cases[i].want, 3e-4,
                           "case %zu: %g", i, (double)score_published(lb, 9, cases[i].horizon));
    }
    cr_expect_float_eq(score_published(logf(.9f), 9, 1), -1.0536f, 1e-4);
    cr_expect_float_eq(score_published(0, 5, 128), logf(128), 1e-6);
    cr_expect_float_eq(score_published(1, 5, 128), logf(128), 1e-6); /* only a broken gate is > 0 */
    cr_expect_float_eq(score_published(-1, 5, INFINITY), -7 + .458675f, 1e-4);
}
