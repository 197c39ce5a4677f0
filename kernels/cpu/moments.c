#include "kernels/moments.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cpu/built.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/search.h"
#include "kernels/cpu/team.h"
#include "kernels/cpu/vec.h"
#include "kernels/number.h"

#define TOGETHER 4 /* columns of a tile, and rows of weights that are rounded together */

typedef void add_tile(float *to, int64_t to_stride, const float *x, const float *of, int64_t stride,
                      int rows);
typedef void multiply(const float *u, const float *e, int64_t stride, int64_t count, float *to);
typedef void subtract(float *to, const float *from, float times, int64_t count);

struct sums {
    add_tile *tile;
    multiply *dots;
    subtract *subtract;
};

#define SUMS(path)                                                                                 \
    ((struct sums){cpu_moments_tile_##path, cpu_moments_dots_##path, cpu_moments_subtract_##path})

static struct sums fastest_sums(void) {
    const struct cpu_isa isa = cpu_isa_detect();
    if (CPU_HAS_AVX512 && isa.avx512) return SUMS(avx512);
    if (CPU_HAS_AVX2 && isa.avx2) return SUMS(avx2);
    if (CPU_HAS_NEON && isa.neon) return SUMS(neon);
    return SUMS(portable);
}

/* ---- Sums ---- */

struct adding {
    struct sums sums;
    float *moments;
    const float *x;
    int64_t cols;
    int rows;
    struct cpu_tickets tickets; /* each is TOGETHER columns */
};

static void moments_add_some(void *arg, int worker) {
    (void)worker;
    struct adding *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;) {
        const int64_t c = i * TOGETHER, place = moments_place(c), window = c - place;
        for (int64_t at = 0; at < place + TOGETHER; at += 16)
            job->sums.tile(job->moments + c * MOMENTS_WINDOW + at, MOMENTS_WINDOW,
                           job->x + window + at, job->x + c, job->cols, job->rows);
    }
}

void moments_add(float *moments, int64_t cols, const float *x, int rows, struct cpu_team *team) {
    struct adding job = {
        .sums = fastest_sums(), .moments = moments, .x = x, .cols = cols, .rows = rows};
    cpu_tickets_set(&job.tickets, cols / TOGETHER);
    cpu_team_run(team, moments_add_some, &job);
}

/* ---- Factors ---- */

struct factoring {
    struct sums sums;
    float *moments;
    int64_t cols;
    float damp;
    struct cpu_tickets windows;
};

/* The last column first: what it shares with the columns before it is taken out of their moments.
 * No D is below the damping but for rounding errors. */
static void factor_window(const struct factoring *job, float *rows, int64_t count) {
    for (int64_t c = 0; c < count; c++) rows[c * MOMENTS_WINDOW + c] += job->damp;
    for (int64_t c = count - 1; c >= 0; c--) {
        float *row = rows + c * MOMENTS_WINDOW;
        row[c] = fmaxf(row[c], job->damp);
        for (int64_t d = 0; d < c; d++) row[d] /= row[c];
        for (int64_t d = 0; d < c; d++)
            job->sums.subtract(rows + d * MOMENTS_WINDOW, row, row[d] * row[c], d + 1);
    }
}

static void factor_some(void *arg, int worker) {
    (void)worker;
    struct factoring *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->windows, 1, &end)) >= 0;) {
        const int64_t first = i * MOMENTS_WINDOW, left = job->cols - first;
        factor_window(job, job->moments + first * MOMENTS_WINDOW,
                      left < MOMENTS_WINDOW ? left : MOMENTS_WINDOW);
    }
}

void moments_factor(float *moments, int64_t cols, struct cpu_team *team) {
    struct factoring job = {.sums = fastest_sums(), .moments = moments, .cols = cols};
    double sum = 0;
    for (int64_t c = 0; c < cols; c++)
        sum += (double)moments[c * MOMENTS_WINDOW + moments_place(c)];
    job.damp = sum > 0 ? MOMENTS_DAMP * (float)(sum / (double)cols) : 1;
    cpu_tickets_set(&job.windows, (cols + MOMENTS_WINDOW - 1) / MOMENTS_WINDOW);
    cpu_team_run(team, factor_some, &job);
}

/* ---- Rounding ---- */

struct compensating {
    struct sums sums;
    const struct kern_matrix *from;
    const float *factors;
    struct block *to;
    float *room; /* [threads][2][TOGETHER][cols]: weights, then their errors */
    struct cpu_tickets tickets;
    _Atomic int64_t bad; /* lowest row found with a number that has no scale */
};

static bool read_row(const struct kern_matrix *m, int64_t r, float *out) {
    const size_t size = kern_dtype_bytes(m->dtype);
    const int64_t stride = m->stride > 0 ? m->stride : m->cols;
    const char *row = (const char *)m->data + (size_t)(r * stride) * size;
    for (int64_t c = 0; c < m->cols; c++) {
        out[c] = number_element(row + (size_t)c * size, m->dtype);
        if (m->scale) out[c] *= m->scale[r];
        if (!(fabsf(out[c]) <= 65504)) return false;
    }
    return true;
}

/* Rounds a block of one row. x: the numbers; wanted: the numbers with the errors of earlier blocks
 * added; factors: [KERN_BLOCK][MOMENTS_WINDOW] of the block's columns, from the place of the
 * block's first column on. */
static void round_block(const float *x, const float *wanted, const float *factors, float *errors,
                        struct block *to) {
    float w[KERN_BLOCK];
    for (int i = 0; i < KERN_BLOCK; i++) w[i] = factors[i * MOMENTS_WINDOW + i];
    cpu_search_q4(wanted, w, to);
    const float scale = to->scale[0], by = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < KERN_BLOCK; i++) {
        float at = wanted[i];
        for (int j = 0; j < i; j++) at += errors[j] * factors[i * MOMENTS_WINDOW + j];
        to->n[i] = (int8_t)fmaxf(0, fminf(15, rintf((at - to->least[0]) * by)));
        errors[i] = x[i] - block_number(to, i);
    }
}

/* Rounds rows [first, first + TOGETHER); those past `count` are zeros, which nobody keeps. */
static void moments_round_rows(const struct compensating *job, float *x, float *errors,
                               int64_t first, int64_t count) {
    const int64_t cols = job->from->cols, blocks = cols / KERN_BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t c = b * KERN_BLOCK, place = moments_place(c);
        const float *factors = job->factors + c * MOMENTS_WINDOW;
        float wanted[TOGETHER][KERN_BLOCK], more[TOGETHER];
        for (int64_t i = 0; i < KERN_BLOCK; i++) {
            job->sums.dots(factors + i * MOMENTS_WINDOW, errors + c - place, cols, place, more);
            for (int r = 0; r < TOGETHER; r++) wanted[r][i] = x[r * cols + c + i] + more[r];
        }
        for (int64_t r = 0; r < count; r++)
            round_block(x + r * cols + c, wanted[r], factors + place, errors + r * cols + c,
                        &job->to[(first + r) * blocks + b]);
    }
}

static void round_some(void *arg, int worker) {
    struct compensating *job = arg;
    const int64_t cols = job->from->cols;
    float *x = job->room + 2 * cols * TOGETHER * worker, *errors = x + TOGETHER * cols;
    int64_t end;
    for (int64_t r; (r = cpu_tickets_take(&job->tickets, TOGETHER, &end)) >= 0;) {
        int64_t lowest = atomic_load(&job->bad), good = r;
        while (good < end && read_row(job->from, good, x + (good - r) * cols)) good++;
        if (good == end)
            moments_round_rows(job, x, errors, r, end - r);
        else
            while (good < lowest && !atomic_compare_exchange_weak(&job->bad, &lowest, good))
                continue;
    }
}

int moments_quantize(const struct kern_matrix *from, const float *factors, struct block *to,
                     struct cpu_team *team, struct fault *fault) {
    struct compensating job = {
        .sums = fastest_sums(), .from = from, .factors = factors, .to = to, .bad = from->rows};
    const size_t threads = (size_t)cpu_team_threads(team);
    job.room = mem_try_alloc(threads * 2 * TOGETHER * (size_t)from->cols, sizeof *job.room);
    if (!job.room) return fault_set(fault, ERR_NOMEM, "", "no memory for rows to be rounded");
    cpu_tickets_set(&job.tickets, from->rows);
    cpu_team_run(team, round_some, &job);
    mem_free(job.room);
    if (job.bad == from->rows) return 0;
    return fault_set(fault, ERR_INVALID, "",
                     "row %lld has a number that is not finite or beyond 65504, which has no scale",
                     (long long)job.bad);
}
