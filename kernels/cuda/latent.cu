/* Latent attention in front of attention and behind it (struct kern_latent): each head's products,
 * the norm of the vector that is cached, and the order of the numbers that rotate;
 * kernels/cpu/latent.c is the reference. attend_wide.cu is the attention.
 *
 * Products are made number by number, in float32: a warp for each output of a head and MATRIX_ROWS
 * rows. An output's sum has the same order whatever rows are beside it. */
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/matrix.cuh"

#define THREADS 256
#define WARPS   (THREADS / 32)

/* ---- Products of heads ---- */

int op_latent_reserve(struct kern *kern, struct kern_weight *const *weights, int heads) {
    struct cuda *cuda = cuda_of(kern);
    struct matrix *table = matrices_upload(cuda, weights, heads);
    int rc = table ? device_sync(cuda->device) : ERR_NOMEM;
    if (rc) {
        device_free(cuda->device, table);
        return rc;
    }
    for (int head = 0; head < heads; head++) weights[head]->head = table + head;
    weights[0]->owns_heads = true;
    return 0;
}

/* y[row, head] = matrix of the head times x[row, head]. */
struct heads_args {
    const struct matrix *matrices; /* [heads] */
    const float *x;
    float *y;
    int64_t x_row, x_head, y_row, y_head; /* from one row or head to the next */
    int rows, heads, outputs, inputs;
};

/* Blocks (group of rows, outputs). */
static __global__ void k_head_products(const struct heads_args a) {
    ptx_overlap_grids();
    const int lane = threadIdx.x % 32, at = (int)(blockIdx.y * WARPS + threadIdx.x / 32);
    const int head = at / a.outputs, out = at % a.outputs, first = (int)blockIdx.x * MATRIX_ROWS;
    const float *rows[MATRIX_ROWS];
    if (head >= a.heads) return;
#pragma unroll
    for (int u = 0; u < MATRIX_ROWS; u++) { /* places without a row repeat the first */
        const int row = first + u < a.rows ? first + u : first;
        rows[u] = a.x + row * a.x_row + head * a.x_head;
    }
    const float value = matrix_multiply(a.matrices[head], out, rows, a.inputs, lane);
    if (lane < MATRIX_ROWS && first + lane < a.rows)
        a.y[(first + lane) * a.y_row + head * a.y_head + out] = value;
}

static void launch_head_products(struct cuda *cuda, const struct heads_args &args) {
    LAUNCH_OVERLAPPED(cuda->device, k_head_products,
                      dim3(blocks_for(args.rows, MATRIX_ROWS),
                           blocks_for((int64_t)args.heads * args.outputs, WARPS)),
                      THREADS, 0, args);
}

/* ---- Rows of queries and entries ---- */

struct latent_rows_args {
    float *qkv;
    const float *q, *entries, *norm;
    int heads, rank, still, turned;
    bool neighbours;
    float eps;
};

/* A block per row: the numbers that rotate, of every head and of the entry, half of those that
 * rotate together apart from the other half; and the entry's vector after its norm. */
static __global__ void k_latent_rows(const struct latent_rows_args a) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    const int64_t row = blockIdx.x;
    const int query = a.still + a.turned, key = a.rank + a.turned, half = a.turned / 2;
    const float *q = a.q + row * a.heads * query, *entry = a.entries + row * key;
    float *to = a.qkv + row * (a.heads + 1) * key, sum = 0;
    for (int i = threadIdx.x; i < (a.heads + 1) * a.turned; i += THREADS) {
        const int head = i / a.turned, j = i % a.turned;
        const int source = !a.neighbours ? j : j < half ? 2 * j : 2 * (j - half) + 1;
        const float *from = head < a.heads ? q + head * query + a.still : entry + a.rank;
        to[head * key + a.rank + j] = from[source];
    }
    for (int i = threadIdx.x; i < a.rank; i += THREADS) sum = fmaf(entry[i], entry[i], sum);
    const float by = 1 / sqrtf(block_total(sum, (float *)shared) / (float)a.rank + a.eps);
    to += a.heads * key;
    for (int i = threadIdx.x; i < a.rank; i += THREADS) to[i] = entry[i] * by * a.norm[i];
}

void op_latent_in(struct kern *kern, float *qkv, const float *q, const float *entries,
                  const struct kern_latent *latent, int rows) {
    struct cuda *cuda = cuda_of(kern);
    const int query = latent->still + latent->turned, key = latent->rank + latent->turned;
    CHECK(latent->up_k[0]->head);
    if (rows == 0) return;
    const struct latent_rows_args row = {qkv,
                                         q,
                                         entries,
                                         latent->norm,
                                         latent->heads,
                                         latent->rank,
                                         latent->still,
                                         latent->turned,
                                         latent->neighbours,
                                         latent->eps};
    LAUNCH_OVERLAPPED(cuda->device, k_latent_rows, (unsigned)rows, THREADS, WARPS * sizeof(float),
                      row);
    launch_head_products(cuda, {latent->up_k[0]->head, q, qkv, (int64_t)latent->heads * query,
                                query, (int64_t)(latent->heads + 1) * key, key, rows, latent->heads,
                                latent->rank, latent->still});
}

void op_latent_out(struct kern *kern, float *y, const float *x, const struct kern_latent *latent,
                   int rows) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(latent->up_v[0]->head);
    if (rows == 0) return;
    launch_head_products(cuda, {latent->up_v[0]->head, x, y, (int64_t)latent->heads * latent->rank,
                                latent->rank, (int64_t)latent->heads * latent->dim_v, latent->dim_v,
                                rows, latent->heads, latent->dim_v, latent->rank});
}
