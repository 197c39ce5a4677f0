/* Operations on rows. Rows are independent and handed to workers. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/sample.h"

#define ROWS_AT_ONCE 4 /* rows claimed together */

struct row_job {
    struct cpu *cpu;
    struct cpu_tickets rows;
    void (*one)(const struct row_job *job, int64_t row);
    float *y, *branch;
    const float *x, *weight, *bias;
    enum kern_activation activation;
    const struct kern_weight *table;
    const int32_t *index;
    int dim;
    int64_t stride;
    float eps, scale;
};

static void do_rows(void *arg, int worker) {
    (void)worker;
    struct row_job *job = arg;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->rows, ROWS_AT_ONCE, &end)) >= 0;)
        for (; row < end; row++) job->one(job, row);
}

static void run_rows(struct row_job *job, int rows, int64_t cost) {
    CHECK(rows >= 0 && job->dim > 0);
    cpu_tickets_set(&job->rows, rows);
    cpu_run(job->cpu, rows * cost, do_rows, job);
}

/* ---- Embedding and gathering ---- */

/* Rows of other ranks are zeros here, so adding all ranks' rows as integers gives the file's bits.
 */
static void embed_row(const struct row_job *job, int64_t row) {
    int64_t at = job->index[row] - job->table->part[0].first;
    float *y = job->y + row * job->dim;
    if (at < 0 || at >= job->table->width) {
        memset(y, 0, (size_t)job->dim * sizeof *y);
        return;
    }
    cpu_weight_row(job->table, at, y);
    if (job->scale != 1)
        for (int i = 0; i < job->dim; i++) y[i] *= job->scale;
}

void cpu_embed(struct kern *kern, float *x, const struct kern_weight *table, float scale,
               const int32_t *tokens, int rows) {
    struct row_job job = {.cpu = cpu_of(kern),
                          .one = embed_row,
                          .y = x,
                          .table = table,
                          .scale = scale,
                          .index = tokens,
                          .dim = (int)table->cols};
    run_rows(&job, rows, 4 * table->cols);
    const struct comm *comm = cpu_of(kern)->comm;
    cpu_note(cpu_of(kern), comm->ops->all_reduce(comm, x, (size_t)rows * (size_t)table->cols,
                                                 COMM_U32, COMM_SUM));
}

static void gather_row(const struct row_job *job, int64_t row) {
    memcpy(job->y + row * job->dim, job->x + (int64_t)job->index[row] * job->dim,
           (size_t)job->dim * sizeof(float));
}

void cpu_gather_rows(struct kern *kern, float *y, const float *x, const int32_t *index, int count,
                     int dim) {
    struct row_job job = {
        .cpu = cpu_of(kern), .one = gather_row, .y = y, .x = x, .index = index, .dim = dim};
    run_rows(&job, count, dim);
}

static void scatter_row(const struct row_job *job, int64_t row) {
    float *y = job->y + (int64_t)job->index[row] * job->dim;
    const float *x = job->x + row * job->dim;
    for (int i = 0; i < job->dim; i++) y[i] += x[i];
}

/* The sum of a row is complete before it is added, so that it has the same bits whichever rows are
 * computed with it. */
void cpu_low_rank(struct kern *kern, float *y, const float *x, const struct kern_low_rank *products,
                  const int32_t *rows, int count) {
    const struct kern_low_rank *p = products;
    cpu_gather_rows(kern, p->in, x, rows, count, (int)p->down->cols);
    cpu_matmul(kern, p->low, p->in, p->down, NULL, count, KERN_SET);
    cpu_matmul(kern, p->out, p->low, p->up, NULL, count, KERN_SET);
    struct row_job job = {.cpu = cpu_of(kern),
                          .one = scatter_row,
                          .y = y,
                          .x = p->out,
                          .index = rows,
                          .dim = (int)p->up->width};
    run_rows(&job, count, job.dim);
}

/* ---- Norm and activation ---- */

static void norm_row(const struct row_job *job, int64_t row) {
    job->cpu->kernels->rms_norm(job->y + row * job->dim, job->x + row * job->dim, job->weight,
                                job->dim, job->eps);
}

void cpu_rms_norm(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                  int dim, float eps) {
    struct row_job job = {.cpu = cpu_of(kern),
                          .one = norm_row,
                          .y = y,
                          .x = x,
                          .weight = weight,
                          .dim = dim,
                          .eps = eps};
    run_rows(&job, rows, dim);
}

/* Numbers are added in sixteen sums, in every path alike. */
static float sum_row(const float *x, int dim, float mean, bool squares) {
    float sum[16] = {0}, all = 0;
    for (int i = 0; i < dim; i++) {
        const float part = x[i] - mean;
        sum[i % 16] += squares ? part * part : part;
    }
    for (int i = 0; i < 16; i++) all += sum[i];
    return all;
}

static void layer_norm_row(const struct row_job *job, int64_t row) {
    const float *x = job->x + row * job->dim;
    float *y = job->y + row * job->dim;
    const float mean = sum_row(x, job->dim, 0, false) / (float)job->dim;
    const float squares = sum_row(x, job->dim, mean, true) / (float)job->dim;
    const float by = 1 / sqrtf(squares + job->eps);
    for (int i = 0; i < job->dim; i++) {
        const float scaled = (x[i] - mean) * by * job->weight[i];
        y[i] = job->bias ? scaled + job->bias[i] : scaled;
    }
}

void cpu_layer_norm(struct kern *kern, float *y, const float *x, const float *weight,
                    const float *bias, int rows, int dim, float eps) {
    struct row_job job = {.cpu = cpu_of(kern),
                          .one = layer_norm_row,
                          .y = y,
                          .x = x,
                          .weight = weight,
                          .bias = bias,
                          .dim = dim,
                          .eps = eps};
    run_rows(&job, rows, 2 * (int64_t)dim);
}

static void ops_add_row(const struct row_job *job, int64_t row) {
    const float *x = job->x + row * job->dim;
    float *y = job->y + row * job->dim;
    for (int i = 0; i < job->dim; i++) y[i] += x[i];
}

void cpu_add(struct kern *kern, float *y, const float *x, int rows, int dim) {
    struct row_job job = {.cpu = cpu_of(kern), .one = ops_add_row, .y = y, .x = x, .dim = dim};
    run_rows(&job, rows, dim);
}

static void add_norm_row(const struct row_job *job, int64_t row) {
    float *y = job->y + row * job->dim, *x = job->branch + row * job->dim;
    job->cpu->kernels->rms_norm(x, x, job->weight, job->dim, job->eps);
    for (int i = 0; i < job->dim; i++) y[i] += x[i];
}

void cpu_add_norm(struct kern *kern, float *y, float *x, const float *weight, int rows, int dim,
                  float eps) {
    struct row_job job = {.cpu = cpu_of(kern),
                          .one = add_norm_row,
                          .y = y,
                          .branch = x,
                          .weight = weight,
                          .dim = dim,
                          .eps = eps};
    run_rows(&job, rows, 2 * (int64_t)dim);
}

static void cap_row(const struct row_job *job, int64_t row) {
    job->cpu->kernels->math->soft_cap(job->y + row * job->dim, job->dim, job->scale);
}

void cpu_soft_cap(struct kern *kern, float *x, int rows, int dim, float cap) {
    struct row_job job = {.cpu = cpu_of(kern), .one = cap_row, .y = x, .dim = dim, .scale = cap};
    run_rows(&job, rows, 8 * (int64_t)dim);
}

static void glu_row(const struct row_job *job, int64_t row) {
    const float *gate = job->x + row * 2 * job->dim;
    job->cpu->kernels->glu(job->y + row * job->dim, gate, gate + job->dim, job->dim,
                           job->activation);
}

void cpu_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff,
             enum kern_activation activation) {
    struct row_job job = {.cpu = cpu_of(kern),
                          .one = glu_row,
                          .y = y,
                          .x = gate_up,
                          .activation = activation,
                          .dim = d_ff};
    run_rows(&job, rows, 4 * (int64_t)d_ff);
}

static void glu_apart_row(const struct row_job *job, int64_t row) {
    job->cpu->kernels->glu(job->y + row * job->dim, job->x + row * job->dim,
                           job->weight + row * job->stride, job->dim, job->activation);
}

void cpu_glu_apart(struct kern *kern, float *y, const float *gate, const float *up,
                   int64_t up_stride, int rows, int dim, enum kern_activation activation) {
    struct row_job job = {.cpu = cpu_of(kern),
                          .one = glu_apart_row,
                          .y = y,
                          .x = gate,
                          .weight = up,
                          .stride = up_stride,
                          .activation = activation,
                          .dim = dim};
    run_rows(&job, rows, 4 * (int64_t)dim);
}

static void scale_row(const struct row_job *job, int64_t row) {
    float *x = job->y + row * job->dim;
    for (int i = 0; i < job->dim; i++) x[i] *= job->scale;
}

void cpu_scale(struct kern *kern, float *x, const float *factor, int rows, int dim) {
    struct row_job job = {
        .cpu = cpu_of(kern), .one = scale_row, .y = x, .dim = dim, .scale = *factor};
    run_rows(&job, rows, dim);
}

static void open_row(const struct row_job *job, int64_t row) {
    float *x = job->y + row * job->dim;
    job->cpu->kernels->glu(x, job->x + row * job->dim, x, job->dim, KERN_SIGMOID);
}

static void open_row_by_one(const struct row_job *job, int64_t row) {
    const float by = 1 / (1 + expf(-job->x[row]));
    for (int i = 0; i < job->dim; i++) job->y[row * job->dim + i] *= by;
}

void cpu_open_gates(struct kern *kern, float *x, const float *gates, int rows, int dim, bool one) {
    struct row_job job = {.cpu = cpu_of(kern),
                          .one = one ? open_row_by_one : open_row,
                          .y = x,
                          .x = gates,
                          .dim = dim};
    run_rows(&job, rows, one ? dim : 4 * (int64_t)dim);
}

/* ---- Sampling ---- */

struct sample_job {
    struct cpu *cpu;
    struct cpu_tickets rows;
    const float *logits;
    int vocab;
    const struct kern_sample *params;
    struct kern_sampled *out;
};

static void sample_rows(void *arg, int worker) {
    struct sample_job *job = arg;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->rows, 1, &end)) >= 0;)
        cpu_sample_row(job->logits + row * job->vocab, job->vocab, &job->params[row],
                       job->cpu->scratch[worker].mem, &job->out[row]);
}

int cpu_sample(struct kern *kern, const float *logits, int rows, int vocab,
               const struct kern_sample *params, struct kern_sampled *out) {
    struct cpu *cpu = cpu_of(kern);
    int rc = cpu_scratch_grow(cpu, cpu_sample_scratch_bytes(vocab));
    if (rc) return rc;
    struct sample_job job = {
        .cpu = cpu, .logits = logits, .vocab = vocab, .params = params, .out = out};
    cpu_tickets_set(&job.rows, rows);
    cpu_run(cpu, rows > 1 ? (int64_t)rows * vocab : 0, sample_rows, &job);
    return cpu->failed; /* the logits of a failed step are invalid */
}
