/* Gated delta rules: convolutions, the scan, and the norm of each head's results with its gate. */
#include "kernels/cuda/state.cuh"

struct finish_args {
    float *y;          /* [rows, heads, dim] */
    const float *z;    /* the first row's gates */
    const float *norm; /* [dim] */
    int64_t rows, z_stride;
    int32_t heads, dim;
    float eps;
    struct rounded round; /* y for the next product, or none */
};

/* A warp for each (row, head): the RMS norm, times SiLU of the gates. */
static __global__ void k_delta_finish(const struct finish_args a) {
    ptx_overlap_grids();
    const struct state_item item = state_item_of(a.heads);
    if (item.row >= a.rows) return;
    const int64_t first = (item.row * a.heads + item.head) * a.dim;
    float *y = a.y + first, sum = 0;
    const float *z = a.z + item.row * a.z_stride + (int64_t)item.head * a.dim;
    for (int i = item.lane; i < a.dim; i += 32) sum = fmaf(y[i], y[i], sum);
    const float by = 1 / sqrtf(state_warp_sum(sum) / (float)a.dim + a.eps);
    for (int i = item.lane; i < a.dim; i += 32)
        state_write(a.y, a.round, first + i, y[i] * by * a.norm[i] * silu(z[i]));
}

/* Sets a part of the convolutions; returns where the next one begins in a row. */
static float *set_part(struct conv_part *part, float *x, int stride, int units, int unit) {
    part->x = x;
    part->stride = stride;
    part->channels = units * unit;
    part->unit = unit;
    return x + part->channels;
}

void op_delta(struct kern *kern, int state, float *y, float *in, float *rates,
              const struct kern_delta *delta, const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    const int keys = delta->heads_k / cuda->comm->ranks, shared = delta->heads_v / delta->heads_k;
    const int values = shared * delta->dim_v, first = cuda->comm->rank * keys;
    const int past = delta->width - 1, width = 2 * keys * (delta->dim_k + values);
    const int heads = keys * shared;
    CHECK(cuda->options.state_floats == keys * kern_delta_head_floats(delta));
    struct conv_args conv = {};
    conv.count = 3;
    conv.width = delta->width;
    conv.taps = delta->taps;
    float *k = set_part(&conv.parts[0], in, width, keys, delta->dim_k);
    float *v = set_part(&conv.parts[1], k, width, keys, delta->dim_k);
    float *z = set_part(&conv.parts[2], v, width, keys, values);
    int of_model = 0, at = 0; /* channels of the model, and numbers of a unit, before the part's */
    for (struct conv_part &part : conv.parts) {
        part.tap = of_model + first * part.unit;
        part.at = at;
        part.unit_floats = kern_delta_head_floats(delta);
        of_model += delta->heads_k * part.unit;
        at += part.unit * past;
    }
    conv_channels(cuda, state, &conv, batch);
    struct scan_args scan = {};
    scan.heads = heads;
    scan.first = first * shared;
    scan.dim = delta->dim_k;
    scan.columns = delta->dim_v;
    scan.q = in;
    scan.k = k;
    scan.v = v;
    scan.vectors_stride = scan.v_stride = width;
    scan.heads_vector = shared;
    scan.y = y;
    scan.at = at;
    scan.unit_floats = kern_delta_head_floats(delta);
    scan.unit_heads = shared;
    scan.rates = rates;
    scan.decays = rates + delta->heads_v;
    scan.rates_stride = 2 * (int64_t)delta->heads_v;
    scan.decay = delta->decay;
    scan.bias = delta->bias;
    scan_heads(cuda, state, &scan, true, batch);
    const int64_t cols = (int64_t)heads * delta->dim_v;
    const struct finish_args finish = {y,
                                       z,
                                       delta->norm,
                                       batch->rows,
                                       width,
                                       heads,
                                       delta->dim_v,
                                       delta->eps,
                                       state_rounded(cuda, batch->rows, cols)};
    LAUNCH_OVERLAPPED(cuda->device, k_delta_finish, state_item_blocks(batch->rows, heads),
                      STATE_THREADS, 0, finish);
    rounded_put(cuda, finish.round, y, batch->rows, cols);
}
