/* The gated delta rule. A value head's state is a matrix of dim_k rows, in blocks of COLUMNS
 * columns, which do not depend on each other: a block stays in the first-level cache while all rows
 * of a span go through it, one after the other. So a state has the same bits for every split of a
 * text over steps. Numbers of a key head lie side by side in the state: those of its convolutions
 * (queries, keys, values), then the matrices of its value heads, block by block. */
#include <math.h>

#include "base/check.h"
#include "kernels/cpu/internal.h"

#define COLUMNS KERN_STATE_COLUMNS

struct delta_job {
    struct cpu *cpu;
    const struct kern_delta *delta;
    const struct kern_batch *batch;
    float *in, *rates, *y;
    int state;
    int heads, first; /* key heads of this rank, and the first of them in the model */
    int shared;       /* value heads of a key head */
    int width;        /* numbers of a row of `in` */
    float q_factors[KERN_STATE_ROWS_MAX], k_factors[KERN_STATE_ROWS_MAX]; /* factors of the norms */
};

/* Numbers of a row of `in` before the queries, keys, values, gates of the rank's key head. */
enum part { PART_Q, PART_K, PART_V, PART_Z };

static int part_width(const struct delta_job *job, enum part part) {
    return part <= PART_K ? job->delta->dim_k : job->shared * job->delta->dim_v;
}

static float *delta_part(const struct delta_job *job, enum part part, int64_t row, int head) {
    int before = 0;
    for (enum part p = PART_Q; p < part; p++) before += part_width(job, p) * job->heads;
    return job->in + row * job->width + before + (int64_t)head * part_width(job, part);
}

/* ---- Convolutions ---- */

static int blocks_of_part(const struct delta_job *job, enum part part) {
    return (part_width(job, part) + CPU_CONV_CHANNELS - 1) / CPU_CONV_CHANNELS;
}

static int conv_items(const struct delta_job *job) {
    return job->heads * (2 * blocks_of_part(job, PART_Q) + blocks_of_part(job, PART_V));
}

/* Computes the convolution of the item's block of channels, which are queries, keys or values of a
 * key head. */
static void convolve(const void *arg, int item) {
    const struct delta_job *job = arg;
    const struct kern_delta *d = job->delta;
    const int head = item % job->heads, past = d->width - 1;
    int block = item / job->heads, at = 0, channel = 0;
    enum part part = PART_Q;
    for (; block >= blocks_of_part(job, part); part++) {
        block -= blocks_of_part(job, part);
        at += part_width(job, part);
        channel += part_width(job, part) * d->heads_k;
    }
    const int first = block * CPU_CONV_CHANNELS, left = part_width(job, part) - first;
    channel += (job->first + head) * part_width(job, part) + first;
    float *x = delta_part(job, part, 0, head) + first;
    const struct cpu_conv conv = {.cpu = job->cpu,
                                  .x = x,
                                  .y = x,
                                  .stride = (size_t)job->width,
                                  .y_stride = (size_t)job->width,
                                  .taps = d->taps + (size_t)channel * (size_t)d->width,
                                  .count = left < CPU_CONV_CHANNELS ? left : CPU_CONV_CHANNELS,
                                  .width = d->width,
                                  .state = job->state,
                                  .at = head * kern_delta_head_floats(d) + (at + first) * past};
    cpu_conv_channels(&conv, job->batch);
}

/* ---- Before and behind the rule ---- */

/* Scales queries and keys to length 1, and divides queries by sqrt(dim_k): an RMS norm with
 * suitable factors and epsilon. */
static void delta_normalise(const struct delta_job *job, int64_t row, int head) {
    const int dim = job->delta->dim_k;
    const float eps = 1e-6f / (float)dim;
    float *q = delta_part(job, PART_Q, row, head), *k = delta_part(job, PART_K, row, head);
    job->cpu->kernels->rms_norm(q, q, job->q_factors, dim, eps);
    job->cpu->kernels->rms_norm(k, k, job->k_factors, dim, eps);
}

/* Converts [b | a] of a row to rates and decays. */
static void open_rates(const struct delta_job *job, int64_t row, int head) {
    const struct kern_delta *d = job->delta;
    float *b = job->rates + 2 * row * d->heads_v, *a = b + d->heads_v;
    for (int i = 0; i < job->shared; i++) {
        const int at = (job->first + head) * job->shared + i;
        b[at] = 1 / (1 + expf(-b[at]));
        a[at] = expf(d->decay[at] * cpu_softplus(a[at] + d->bias[at]));
    }
}

static void delta_prepare(const void *arg, int item) {
    const struct delta_job *job = arg;
    const int64_t row = item / job->heads;
    delta_normalise(job, row, item % job->heads);
    open_rates(job, row, item % job->heads);
}

/* Applies the norm to a head's results, and multiplies them by SiLU of its gates. */
static void delta_finish(const void *arg, int item) {
    const struct delta_job *job = arg;
    const int heads = job->heads * job->shared, head = item % heads, dim = job->delta->dim_v;
    const int64_t row = item / heads;
    float *y = job->y + (row * heads + head) * dim;
    job->cpu->kernels->rms_norm(y, y, job->delta->norm, dim, job->delta->eps);
    job->cpu->kernels->glu(y, delta_part(job, PART_Z, row, 0) + (int64_t)head * dim, y, dim,
                           KERN_SILU);
}

/* ---- The rule ---- */

/* Computes all rows of a span in a block of columns of a value head. */
static void scan(const void *arg, int item) {
    const struct delta_job *job = arg;
    const struct kern_delta *d = job->delta;
    const int blocks = kern_state_blocks(d->dim_v), heads = job->heads * job->shared;
    const int block = item % blocks, head = item / blocks % heads, key = head / job->shared;
    const struct kern_span *span = &job->batch->spans[item / blocks / heads];
    const int count = d->dim_v - block * COLUMNS < COLUMNS ? d->dim_v - block * COLUMNS : COLUMNS;
    const int floats = d->dim_k * COLUMNS;
    const int at = (key + 1) * kern_delta_head_floats(d) -
                   ((job->shared - head % job->shared) * blocks - block) * floats;
    float state[KERN_STATE_ROWS_MAX * COLUMNS], v[COLUMNS], out[COLUMNS];
    cpu_cache_state_read(&job->cpu->cache, span->slot, job->state, at, floats, state);
    for (int i = 0; i < span->count; i++) {
        const int64_t row = span->row + i, column = (int64_t)block * COLUMNS;
        const int64_t first = (int64_t)head * d->dim_v + column;
        const int64_t value = (int64_t)job->first * job->shared + head; /* in the model */
        const float *rate = job->rates + 2 * row * d->heads_v + value;
        cpu_copy_columns(v, delta_part(job, PART_V, row, 0) + first, count);
        const struct cpu_delta_token token = {.q = delta_part(job, PART_Q, row, key),
                                              .k = delta_part(job, PART_K, row, key),
                                              .v = v,
                                              .decay = rate[d->heads_v],
                                              .rate = rate[0],
                                              .corrects = true};
        job->cpu->kernels->delta(state, d->dim_k, &token, out);
        float *y = job->y + row * heads * d->dim_v + first;
        for (int c = 0; c < count; c++) y[c] = out[c];
    }
    if (span->peeks) return;
    cpu_cache_state_write(&job->cpu->cache, span->slot, job->state, at, floats, state);
}

/* ---- The whole ---- */

void cpu_delta(struct kern *kern, int state, float *y, float *in, float *rates,
               const struct kern_delta *delta, const struct kern_batch *batch) {
    struct cpu *cpu = cpu_of(kern);
    const struct kern_cache_options *o = &cpu->cache.options;
    struct delta_job job = {.cpu = cpu,
                            .delta = delta,
                            .batch = batch,
                            .in = in,
                            .rates = rates,
                            .y = y,
                            .state = state,
                            .heads = delta->heads_k / cpu->comm->ranks,
                            .shared = delta->heads_v / delta->heads_k};
    job.first = cpu->comm->rank * job.heads;
    job.width = 2 * job.heads * (delta->dim_k + job.shared * delta->dim_v);
    CHECK(state >= 0 && state < o->states && delta->dim_k <= KERN_STATE_ROWS_MAX);
    CHECK(o->state_floats == job.heads * kern_delta_head_floats(delta));
    for (int i = 0; i < delta->dim_k; i++) {
        job.q_factors[i] = 1 / (float)delta->dim_k;
        job.k_factors[i] = 1 / sqrtf((float)delta->dim_k);
    }
    const int heads = job.heads * job.shared;
    const int64_t cost = (int64_t)batch->rows * job.width;
    cpu_run_items(cpu, cost * (delta->width + 3), convolve, &job, conv_items(&job));
    cpu_run_items(cpu, 2 * cost, delta_prepare, &job, batch->rows * job.heads);
    cpu_run_items(cpu, (int64_t)batch->rows * heads * delta->dim_k * delta->dim_v / 4, scan, &job,
                  batch->span_count * heads * kern_state_blocks(delta->dim_v));
    cpu_run_items(cpu, 2 * cost, delta_finish, &job, batch->rows * heads);
}
