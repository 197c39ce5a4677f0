/* Latent attention in front of attention and behind it (struct kern_latent): each head's
 * products, the norm of the vector that is cached, and the order of the numbers that rotate. */
#include <string.h>

#include "kernels/cpu/internal.h"

struct latent_job {
    const struct cpu *cpu;
    const struct kern_latent *latent;
    float *qkv;
    const float *q, *entries;
};

static int key_dim(const struct kern_latent *latent) {
    return latent->rank + latent->turned;
}

static int query_dim(const struct kern_latent *latent) {
    return latent->still + latent->turned;
}

/* Puts the numbers that rotate together half of them apart. */
static void copy_turned(const struct kern_latent *latent, const float *from, float *to) {
    const ptrdiff_t half = latent->turned / 2;
    if (!latent->neighbours) memcpy(to, from, (size_t)latent->turned * sizeof *to);
    for (ptrdiff_t i = 0; i < half && latent->neighbours; i++) {
        to[i] = from[2 * i];
        to[half + i] = from[2 * i + 1];
    }
}

static void latent_row(const void *arg, int row) {
    const struct latent_job *job = arg;
    const struct kern_latent *latent = job->latent;
    const float *q = job->q + (int64_t)row * latent->heads * query_dim(latent);
    const float *entry = job->entries + (int64_t)row * key_dim(latent);
    float *to = job->qkv + (int64_t)row * (latent->heads + 1) * key_dim(latent);
    for (int head = 0; head < latent->heads; head++, q += query_dim(latent), to += key_dim(latent))
        copy_turned(latent, q + latent->still, to + latent->rank);
    job->cpu->kernels->rms_norm(to, entry, latent->norm, latent->rank, latent->eps);
    copy_turned(latent, entry + latent->rank, to + latent->rank);
}

int cpu_latent_reserve(struct kern *kern, struct kern_weight *const *weights, int heads) {
    return cpu_heads_reserve(cpu_of(kern), weights, heads);
}

void cpu_latent_in(struct kern *kern, float *qkv, const float *q, const float *entries,
                   const struct kern_latent *latent, int rows) {
    struct cpu *cpu = cpu_of(kern);
    const struct latent_job job = {cpu, latent, qkv, q, entries};
    const struct cpu_heads heads = {.weights = latent->up_k,
                                    .count = latent->heads,
                                    .rows = rows,
                                    .x = q,
                                    .x_row = (int64_t)latent->heads * query_dim(latent),
                                    .x_head = query_dim(latent),
                                    .y = qkv,
                                    .y_row = (int64_t)(latent->heads + 1) * key_dim(latent),
                                    .y_head = key_dim(latent)};
    cpu_run_items(cpu, rows * heads.y_row, latent_row, &job, rows);
    cpu_matmul_heads(cpu, &heads);
}

void cpu_latent_out(struct kern *kern, float *y, const float *x, const struct kern_latent *latent,
                    int rows) {
    const struct cpu_heads heads = {.weights = latent->up_v,
                                    .count = latent->heads,
                                    .rows = rows,
                                    .x = x,
                                    .x_row = (int64_t)latent->heads * latent->rank,
                                    .x_head = latent->rank,
                                    .y = y,
                                    .y_row = (int64_t)latent->heads * latent->dim_v,
                                    .y_head = latent->dim_v};
    cpu_matmul_heads(cpu_of(kern), &heads);
}
