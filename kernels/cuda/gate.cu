/* Retention gates, computed in float32 because scores decide what is kept: an entry's rank must not
 * depend on the rounding of its inputs. */
#include <string.h>

#include "kernels/cuda/internal.h"

#define THREADS 256

struct kern_gate {
    int width, heads_kv, embeddings;
    struct kern_weight *w1, *w2; /* w2: rg10, otherwise NULL */
    float *b1, *b2;              /* device */
    float *last;                 /* device, [heads_kv][width]: the row of each head */
    float *bias;                 /* device, [heads_kv] */
};

/* ---- Loading --------------------------------------------------------------------------------- */

static float *copy_floats(struct cuda *cuda, const float *from, size_t count) {
    float *to = static_cast<float *>(device_alloc(cuda->device, count * sizeof *to));
    if (to) device_upload(cuda->device, to, from, count * sizeof *to);
    return to;
}

static int load_layer(struct kern *kern, const float *w, int64_t rows, int64_t cols,
                      struct kern_weight **out, struct fault *fault) {
    struct kern_matrix matrix = {w, KERN_F32, rows, cols, 0, 0, NULL};
    return op_weight_load(kern, &matrix, 1, KERN_SHARD_NONE, out, fault);
}

static int load_heads(struct cuda *cuda, struct kern_gate *gate,
                      const struct kern_gate_spec *spec) {
    size_t width = (size_t)gate->width, heads = (size_t)gate->heads_kv;
    float *last = static_cast<float *>(mem_try_alloc(heads * (width + 1), sizeof *last));
    if (!last) return ERR_NOMEM;
    float *bias = last + heads * width;
    for (size_t head = 0; head < heads; head++) {
        CHECK(spec->row[head] >= 0 && spec->row[head] < spec->row_count);
        size_t row = (size_t)spec->row[head];
        memcpy(last + head * width, spec->last + row * width, width * sizeof *last);
        bias[head] = spec->bias[row];
    }
    gate->last = copy_floats(cuda, last, heads * width);
    gate->bias = copy_floats(cuda, bias, heads);
    mem_free(last);
    return gate->last && gate->bias ? 0 : ERR_NOMEM;
}

int op_gate_load(struct kern *kern, const struct kern_gate_spec *whole, struct kern_gate **out,
                 struct fault *fault) {
    struct cuda *cuda = cuda_of(kern);
    struct kern_gate_spec own = *whole;
    const struct kern_gate_spec *spec = &own;
    CHECK(spec->width > 0 && spec->d_model > 0 && spec->heads_kv > 0);
    CHECK(spec->embeddings == 1 || spec->embeddings == spec->heads_kv);
    CHECK(!spec->w2 || spec->embeddings == 1);
    shard_gate(cuda->comm, &own);
    struct kern_gate *gate = static_cast<struct kern_gate *>(mem_try_alloc(1, sizeof *gate));
    if (!gate) return fault_set(fault, ERR_NOMEM, "", "no memory for a gate");
    gate->width = spec->width;
    gate->heads_kv = spec->heads_kv;
    gate->embeddings = spec->embeddings;
    int64_t first = (int64_t)spec->embeddings * spec->width;
    size_t row = (size_t)first * (spec->w2 ? 2 : 1) * sizeof(float);
    if (row > cuda->hidden_row) cuda->hidden_row = row;
    int rc = load_layer(kern, spec->w1, first, spec->d_model, &gate->w1, fault);
    if (!rc && spec->w2)
        rc = load_layer(kern, spec->w2, spec->width, spec->width, &gate->w2, fault);
    if (!rc) {
        gate->b1 = copy_floats(cuda, spec->b1, (size_t)first);
        if (spec->w2) gate->b2 = copy_floats(cuda, spec->b2, (size_t)spec->width);
        rc = load_heads(cuda, gate, spec);
        if (!gate->b1 || (spec->w2 && !gate->b2)) rc = ERR_NOMEM;
        if (!rc) rc = device_sync(cuda->device);
        if (rc) fault_set(fault, rc, "", "no device memory for a gate, or %s", err_text(rc));
    }
    if (rc)
        op_gate_free(kern, gate);
    else
        *out = gate;
    return rc;
}

void op_gate_free(struct kern *kern, struct kern_gate *gate) {
    if (!gate) return;
    struct device *device = cuda_of(kern)->device;
    op_weight_free(kern, gate->w1);
    op_weight_free(kern, gate->w2);
    float *arrays[] = {gate->b1, gate->b2, gate->last, gate->bias};
    for (float *array : arrays) device_free(device, array);
    mem_free(gate);
}

/* ---- Applying -------------------------------------------------------------------------------- */

static __global__ void k_silu(float *h, int64_t count) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) h[i] = h[i] / (1.0f + expf(-h[i]));
}

static __device__ float log_sigmoid(float z) {
    return fminf(z, 0.0f) - log1pf(expf(-fabsf(z)));
}

struct last_args {
    const float *h, *last, *bias;
    float *out;
    int rows, heads, width, embeddings;
};

/* A warp per (row, head). */
static __global__ void k_gate_last(const struct last_args a) {
    ptx_overlap_grids();
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (i >= (int64_t)a.rows * a.heads) return;
    int64_t row = i / a.heads;
    int head = (int)(i % a.heads);
    const float *mine = a.h + row * a.embeddings * a.width;
    if (a.embeddings > 1) mine += (int64_t)head * a.width;
    const float *last = a.last + (int64_t)head * a.width;
    float z = 0;
    for (int j = lane; j < a.width; j += 32) z += last[j] * mine[j];
    for (int by = 16; by > 0; by /= 2) z += __shfl_xor_sync(WARP_ALL, z, by);
    if (lane == 0) a.out[i] = log_sigmoid(z + a.bias[head]);
}

static void silu(struct cuda *cuda, float *h, int64_t count) {
    LAUNCH_OVERLAPPED(cuda->device, k_silu, blocks_for(count, THREADS), THREADS, 0, h, count);
}

void op_gate(struct kern *kern, float *log_beta, const float *x, const struct kern_gate *gate,
             int rows) {
    struct cuda *cuda = cuda_of(kern);
    if (rows == 0) return;
    const int64_t step = DEVICE_MATMUL_ALIGN / sizeof(float);
    int64_t first = rows * gate->w1->rows, second = gate->w2 ? first : 0;
    int64_t apart = (first + step - 1) / step * step;
    float *h1 =
        static_cast<float *>(room_take(cuda, &cuda->hidden, (size_t)(apart + second) * sizeof *h1));
    if (!h1) return;
    float *h = h1;
    op_matmul(kern, h1, x, gate->w1, gate->b1, rows, KERN_SET);
    silu(cuda, h1, first);
    if (gate->w2) {
        h = h1 + apart;
        op_matmul(kern, h, h1, gate->w2, gate->b2, rows, KERN_SET);
        silu(cuda, h, second);
    }
    struct last_args args = {h,    gate->last,     gate->bias,  log_beta,
                             rows, gate->heads_kv, gate->width, gate->embeddings};
    LAUNCH_OVERLAPPED(cuda->device, k_gate_last,
                      blocks_for((int64_t)rows * gate->heads_kv, THREADS / 32), THREADS, 0, args);
}
