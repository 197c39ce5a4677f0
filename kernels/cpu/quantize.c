/* Quantizes whole matrices: rows are handed to workers, each converted by the processor's fastest
 * code. */
#include "kernels/quantize.h"

#include <math.h>
#include <stdatomic.h>

#include "kernels/cpu/built.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/search.h"
#include "kernels/cpu/team.h"
#include "kernels/cpu/vec.h"
#include "kernels/number.h"

#define ROWS_TAKEN 4 /* rows per claim: about 100 KiB of a large model */

typedef float quantize_row(uint8_t *codes, const void *row, int64_t cols, enum kern_dtype dtype);

/* Returns the fastest variant; all of them compute the same numbers. */
static quantize_row *fastest(void) {
    const struct cpu_isa isa = cpu_isa_detect();
    if (CPU_HAS_AVX512 && isa.avx512) return cpu_quantize_row_avx512;
    if (CPU_HAS_AVX2 && isa.avx2) return cpu_quantize_row_avx2;
    if (CPU_HAS_NEON && isa.neon) return cpu_quantize_row_neon;
    return cpu_quantize_row_portable;
}

struct quantizing {
    const struct kern_matrix *from;
    quantize_row *row;
    uint8_t *codes;
    float *scales;
    struct cpu_tickets rows;
    _Atomic int64_t bad; /* lowest row found so far that has no scale; past the last: none */
};

/* Records a row without a scale. Lower rows are still checked, so the lowest such row is found
 * whatever the schedule is. */
static void note_bad(struct quantizing *job, int64_t row) {
    int64_t lowest = atomic_load(&job->bad);
    while (row < lowest && !atomic_compare_exchange_weak(&job->bad, &lowest, row)) continue;
}

static void quantize_one(struct quantizing *job, int64_t r) {
    const struct kern_matrix *m = job->from;
    int64_t stride = m->stride > 0 ? m->stride : m->cols;
    const char *row = (const char *)m->data + (size_t)(r * stride) * kern_dtype_bytes(m->dtype);
    job->scales[r] = job->row(job->codes + r * m->cols, row, m->cols, m->dtype);
    if (!isfinite(job->scales[r])) note_bad(job, r);
}

static void quantize_some(void *arg, int worker) {
    (void)worker;
    struct quantizing *job = arg;
    int64_t end;
    for (int64_t r; (r = cpu_tickets_take(&job->rows, ROWS_TAKEN, &end)) >= 0;)
        for (; r < end && r < atomic_load(&job->bad); r++) quantize_one(job, r);
}

int quantize_rows(const struct kern_matrix *from, uint8_t *codes, float *scales,
                  struct cpu_team *team, struct fault *fault) {
    struct quantizing job = {
        .from = from, .row = fastest(), .codes = codes, .scales = scales, .bad = from->rows};
    cpu_tickets_set(&job.rows, from->rows);
    if (team)
        cpu_team_run(team, quantize_some, &job);
    else
        quantize_some(&job, 0);
    if (job.bad == from->rows) return 0;
    return fault_set(fault, ERR_INVALID, "",
                     "row %lld has a number that is not finite, which has no E4M3 scale",
                     (long long)job.bad);
}

/* ---- Blocks ---- */

#define SHRINK_STEPS 4     /* how many ends of ranges are tried on either side */
#define SHRINK       0.03f /* fraction of the range */

/* Rounds to nearest even, for magnitudes below 2^22. */
static inline float quantize_nearest(float x) {
    return x + 0x1.8p23f - 0x1.8p23f;
}

static float as_half(float x) {
    return number_from_f16(number_to_f16(x));
}

static void quantize_q8(const float *x, struct block *to) {
    float most = 0;
    for (int i = 0; i < KERN_BLOCK; i++) most = fmaxf(most, fabsf(x[i]));
    const float scale = as_half(most / 127), by = scale > 0 ? 1 / scale : 0;
    block_set_factors(to, scale, BLOCK_NO_LEAST);
    for (int i = 0; i < KERN_BLOCK; i++)
        to->n[i] = (int8_t)fmaxf(-127, fminf(127, quantize_nearest(x[i] * by)));
}

/* Finds the nearest numbers n of 0..15 for the factors. */
static void nearest_q4(const float *x, float scale, float least, float *n) {
    float by = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < KERN_BLOCK; i++) {
        float at = quantize_nearest((x[i] - least) * by);
        at = at > 0 ? at : 0;
        n[i] = at < 15 ? at : 15;
    }
}

/* Finds the factors with the least sum of w (x - scale n - least)^2; leaves them unchanged if all n
 * are equal. */
static void fit_q4(const float *x, const float *w, const float *n, float *scale, float *least) {
    float sum = 0, sum_n = 0, sum_nn = 0, sum_x = 0, sum_xn = 0;
    for (int i = 0; i < KERN_BLOCK; i++) {
        const float wn = w[i] * n[i];
        sum += w[i], sum_n += wn, sum_nn += wn * n[i];
        sum_x += w[i] * x[i], sum_xn += wn * x[i];
    }
    float spread = sum * sum_nn - sum_n * sum_n;
    float slope = (sum * sum_xn - sum_x * sum_n) / (spread > 0 ? spread : 1);
    if (!(spread > 0) || !(slope > 0)) return;
    *scale = slope;
    *least = (sum_x - slope * sum_n) / sum;
}

static float error_q4(const float *x, const float *w, const float *n, float scale, float least) {
    float sum = 0;
    for (int i = 0; i < KERN_BLOCK; i++) {
        float off = x[i] - (scale * n[i] + least);
        sum += w[i] * (off * off);
    }
    return sum;
}

void cpu_search_q4(const float *x, const float *w, struct block *to) {
    float low = x[0], high = x[0], best = INFINITY, n[KERN_BLOCK];
    for (int i = 0; i < KERN_BLOCK; i++) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
    for (int at = 0; at < SHRINK_STEPS * SHRINK_STEPS; at++) {
        const int low_step = at % SHRINK_STEPS, high_step = at / SHRINK_STEPS;
        float below = SHRINK * (float)low_step * (high - low);
        float above = SHRINK * (float)high_step * (high - low);
        float least = low + below, scale = (high - above - least) / 15;
        nearest_q4(x, scale, least, n);
        fit_q4(x, w, n, &scale, &least);
        scale = as_half(scale), least = as_half(least);
        nearest_q4(x, scale, least, n);
        float error = error_q4(x, w, n, scale, least);
        if (!(error < best)) continue;
        best = error;
        block_set_factors(to, scale, least);
        for (int i = 0; i < KERN_BLOCK; i++) to->n[i] = (int8_t)n[i];
    }
}

struct blocking {
    const struct kern_matrix *from;
    enum kern_dtype dtype;
    const float *inputs; /* or NULL */
    struct block *to;
    struct cpu_tickets rows;
    _Atomic int64_t bad; /* as in struct quantizing */
};

/* Converts a row. Returns false if a number is not finite or too large. */
static bool block_row(const struct blocking *job, int64_t r) {
    const struct kern_matrix *m = job->from;
    const size_t size = kern_dtype_bytes(m->dtype);
    const int64_t stride = m->stride > 0 ? m->stride : m->cols, count = blocks_of(m->cols);
    const char *row = (const char *)m->data + (size_t)(r * stride) * size;
    for (int64_t b = 0; b < count; b++) {
        float x[KERN_BLOCK] = {0}, w[KERN_BLOCK];
        int64_t left = m->cols - b * KERN_BLOCK;
        for (int64_t i = 0; i < KERN_BLOCK; i++)
            w[i] = !job->inputs ? 1 : i < left ? job->inputs[b * KERN_BLOCK + i] : 0;
        for (int64_t i = 0; i < KERN_BLOCK && i < left; i++) {
            x[i] = number_element(row + (size_t)(b * KERN_BLOCK + i) * size, m->dtype);
            if (m->scale) x[i] *= m->scale[r];
            if (!(fabsf(x[i]) <= 65504)) return false;
        }
        struct block *to = &job->to[r * count + b];
        *to = (struct block){0};
        if (job->dtype == KERN_Q8)
            quantize_q8(x, to);
        else
            cpu_search_q4(x, w, to);
        for (int64_t i = left; i < KERN_BLOCK; i++) to->n[i] = 0;
    }
    return true;
}

static void block_some(void *arg, int worker) {
    (void)worker;
    struct blocking *job = arg;
    int64_t end;
    for (int64_t r; (r = cpu_tickets_take(&job->rows, ROWS_TAKEN, &end)) >= 0;) {
        for (; r < end && r < atomic_load(&job->bad); r++) {
            int64_t lowest = atomic_load(&job->bad);
            if (block_row(job, r)) continue;
            while (r < lowest && !atomic_compare_exchange_weak(&job->bad, &lowest, r)) continue;
        }
    }
}

int quantize_blocks(const struct kern_matrix *from, enum kern_dtype dtype, const float *inputs,
                    struct block *to, struct cpu_team *team, struct fault *fault) {
    struct blocking job = {
        .from = from, .dtype = dtype, .inputs = inputs, .to = to, .bad = from->rows};
    cpu_tickets_set(&job.rows, from->rows);
    if (team)
        cpu_team_run(team, block_some, &job);
    else
        block_some(&job, 0);
    if (job.bad == from->rows) return 0;
    return fault_set(fault, ERR_INVALID, "",
                     "row %lld has a number that is not finite or beyond 65504, which has no scale",
                     (long long)job.bad);
}
