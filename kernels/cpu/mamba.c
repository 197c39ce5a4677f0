/* Mamba-2. A head's state is a matrix of dim_state rows, in blocks of COLUMNS columns, which do not
 * depend on each other: as in delta.c a block stays in the first-level cache while all rows of a
 * span go through it, so that a state has the same bits for every split of a text over steps. B and
 * C belong to all heads of a group, which may lie on several ranks: every rank computes those of
 * all groups. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/internal.h"

#define COLUMNS KERN_STATE_COLUMNS

struct mamba_job {
    struct cpu *cpu;
    const struct kern_mamba *mamba;
    const struct kern_batch *batch;
    float *in, *shared, *y;
    float *kept; /* [rows][heads of the model]; 0 in those of other ranks */
    int state;
    int heads, first;        /* heads of this rank, and the first of them in the model */
    int width, shared_width; /* numbers of a row of `in`, of `shared` */
};

/* Returns z of a head of the rank. */
static float *z_of(const struct mamba_job *job, int64_t row, int head) {
    return job->in + row * job->width + (int64_t)head * job->mamba->dim;
}
static float *x_of(const struct mamba_job *job, int64_t row, int head) {
    return z_of(job, row, job->heads + head);
}
static float *y_of(const struct mamba_job *job, int64_t row, int head) {
    return job->y + (row * job->heads + head) * job->mamba->dim;
}

static float *kept_of(const struct mamba_job *job, int64_t row, int head) {
    return job->kept + row * job->mamba->heads + job->first + head;
}

/* Returns a row's B and C of all groups and dt of all heads. */
static float *shared_of(const struct mamba_job *job, int64_t row) {
    return job->shared + row * job->shared_width;
}

static int shared_channels(const struct mamba_job *job) {
    return 2 * job->mamba->groups * job->mamba->dim_state;
}

static float *dt_of(const struct mamba_job *job, int64_t row, int head) {
    return shared_of(job, row) + shared_channels(job) + job->first + head;
}

/* ---- Convolutions ---- */

static int mamba_conv_blocks(int channels) {
    return (channels + CPU_CONV_CHANNELS - 1) / CPU_CONV_CHANNELS;
}

/* Computes the convolution of the item's block of channels, which belong to a head or, behind all
 * heads, to B and C. */
static void mamba_convolve(const void *arg, int item) {
    const struct mamba_job *job = arg;
    const struct kern_mamba *m = job->mamba;
    const int blocks = mamba_conv_blocks(m->dim), past = m->width - 1;
    const bool of_head = item < job->heads * blocks;
    const int head = of_head ? item / blocks : 0;
    const int block = of_head ? item % blocks : item - job->heads * blocks;
    const int first = block * CPU_CONV_CHANNELS;
    const int left = (of_head ? m->dim : shared_channels(job)) - first;
    const int channel = (of_head ? job->first + head : m->heads) * m->dim + first;
    const int at = of_head ? kern_mamba_shared_floats(m) + head * kern_mamba_head_floats(m) : 0;
    float *x = (of_head ? x_of(job, 0, head) : shared_of(job, 0)) + first;
    const size_t stride = (size_t)(of_head ? job->width : job->shared_width);
    const struct cpu_conv conv = {.cpu = job->cpu,
                                  .x = x,
                                  .y = x,
                                  .stride = stride,
                                  .y_stride = stride,
                                  .taps = m->taps + (size_t)channel * (size_t)m->width,
                                  .bias = m->conv_bias ? m->conv_bias + channel : NULL,
                                  .count = left < CPU_CONV_CHANNELS ? left : CPU_CONV_CHANNELS,
                                  .width = m->width,
                                  .state = job->state,
                                  .at = at + first * past};
    cpu_conv_channels(&conv, job->batch);
}

/* ---- The scan ---- */

/* Converts dt of a row to rates and stores the decays. */
static void mamba_prepare(const void *arg, int row) {
    const struct mamba_job *job = arg;
    const struct kern_mamba *m = job->mamba;
    memset(job->kept + (int64_t)row * m->heads, 0, (size_t)m->heads * sizeof *job->kept);
    for (int head = 0; head < job->heads; head++) {
        float *dt = dt_of(job, row, head);
        *dt = cpu_softplus(*dt + m->bias[job->first + head]);
        *kept_of(job, row, head) = expf(m->decay[job->first + head] * *dt);
    }
}

/* Computes all rows of a span in a block of columns of a head. */
static void mamba_scan(const void *arg, int item) {
    const struct mamba_job *job = arg;
    const struct kern_mamba *m = job->mamba;
    const int blocks = kern_state_blocks(m->dim), floats = m->dim_state * COLUMNS;
    const int block = item % blocks, head = item / blocks % job->heads, first = block * COLUMNS;
    const int group = (job->first + head) / (m->heads / m->groups);
    const struct kern_span *span = &job->batch->spans[item / blocks / job->heads];
    const int count = m->dim - first < COLUMNS ? m->dim - first : COLUMNS;
    const int at = kern_mamba_shared_floats(m) + (head + 1) * kern_mamba_head_floats(m) -
                   (blocks - block) * floats;
    float state[KERN_STATE_ROWS_MAX * COLUMNS], x[COLUMNS], out[COLUMNS];
    cpu_cache_state_read(&job->cpu->cache, span->slot, job->state, at, floats, state);
    for (int i = 0; i < span->count; i++) {
        const int64_t row = span->row + i;
        const float *b = shared_of(job, row) + (int64_t)group * m->dim_state;
        cpu_copy_columns(x, x_of(job, row, head) + first, count);
        const struct cpu_delta_token token = {.q = b + (int64_t)m->groups * m->dim_state,
                                              .k = b,
                                              .v = x,
                                              .decay = *kept_of(job, row, head),
                                              .rate = *dt_of(job, row, head)};
        job->cpu->kernels->delta(state, m->dim_state, &token, out);
        memcpy(y_of(job, row, head) + first, out, (size_t)count * sizeof *out);
    }
    if (span->peeks) return;
    cpu_cache_state_write(&job->cpu->cache, span->slot, job->state, at, floats, state);
}

/* ---- Behind the scan ---- */

/* Adds the skip, multiplies by the gate, and stores the sum of squares. */
static void mamba_gate(const void *arg, int item) {
    const struct mamba_job *job = arg;
    const int dim = job->mamba->dim, row = item / job->heads, head = item % job->heads;
    const float skip = job->mamba->skip[job->first + head], *x = x_of(job, row, head);
    float *y = y_of(job, row, head);
    for (int i = 0; i < dim; i++) y[i] += skip * x[i];
    job->cpu->kernels->glu(y, z_of(job, row, head), y, dim, KERN_SILU);
    *kept_of(job, row, head) = cpu_squares_of(y, dim);
}

static void mamba_norm(const void *arg, int item) {
    const struct mamba_job *job = arg;
    const struct kern_mamba *m = job->mamba;
    const int row = item / job->heads, head = item % job->heads, each = m->heads / m->groups;
    const int of_model = job->first + head;
    const float *sums = job->kept + (int64_t)row * m->heads + (int64_t)(of_model / each) * each;
    const float *weight = m->norm + (int64_t)of_model * m->dim;
    float *y = y_of(job, row, head), sum = 0;
    for (int h = 0; h < each; h++) sum += sums[h];
    const float by = 1 / sqrtf(sum / (float)(each * m->dim) + m->eps);
    for (int i = 0; i < m->dim; i++) y[i] = y[i] * by * weight[i];
}

void cpu_mamba(struct kern *kern, int state, float *y, float *in, float *shared,
               const struct kern_mamba *mamba, const struct kern_batch *batch) {
    struct cpu *cpu = cpu_of(kern);
    const struct kern_cache_options *o = &cpu->cache.options;
    struct mamba_job job = {.cpu = cpu,
                            .mamba = mamba,
                            .batch = batch,
                            .in = in,
                            .shared = shared,
                            .y = y,
                            .state = state,
                            .heads = mamba->heads / cpu->comm->ranks};
    const int64_t rows = batch->rows;
    const size_t kept = (size_t)rows * (size_t)mamba->heads;
    job.first = cpu->comm->rank * job.heads;
    job.width = 2 * job.heads * mamba->dim;
    job.shared_width = shared_channels(&job) + mamba->heads;
    CHECK(state >= 0 && state < o->states && mamba->dim_state <= KERN_STATE_ROWS_MAX);
    CHECK(o->state_floats ==
          kern_mamba_shared_floats(mamba) + job.heads * kern_mamba_head_floats(mamba));
    cpu_room_must(&cpu->squares, kept * sizeof(float));
    job.kept = cpu->squares.mem;
    const int64_t cost = rows * job.width;
    cpu_run_items(cpu, (cost + rows * job.shared_width) * (mamba->width + 3), mamba_convolve, &job,
                  job.heads * mamba_conv_blocks(mamba->dim) +
                      mamba_conv_blocks(shared_channels(&job)));
    cpu_run_items(cpu, 16 * rows * job.heads, mamba_prepare, &job, batch->rows);
    cpu_run_items(cpu, cost * mamba->dim_state / 8, mamba_scan, &job,
                  batch->span_count * job.heads * kern_state_blocks(mamba->dim));
    cpu_run_items(cpu, 2 * cost, mamba_gate, &job, batch->rows * job.heads);
    if (!mamba->norm) return;
    cpu_note(cpu, cpu->comm->ops->all_reduce(cpu->comm, job.kept, kept, COMM_F32, COMM_SUM));
    cpu_run_items(cpu, cost, mamba_norm, &job, batch->rows * job.heads);
}
