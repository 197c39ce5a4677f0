/* Mamba-2: convolutions, the scan with skip and gate, and the norm over the heads of a group, which
 * may lie on several ranks. B and C belong to all heads of a group: every rank computes those of
 * all groups. */
#include "kernels/cuda/state.cuh"

struct group_norm_args {
    float *y;          /* [rows, heads, dim] */
    float *squares;    /* [rows][heads of the model]: sums; 0 in those of other ranks */
    const float *norm; /* [heads of the model, dim] */
    int64_t rows;
    int32_t heads, first, all; /* the rank's; number of the first in the model; the model's */
    int32_t dim, each;         /* each: heads of a group */
    float eps;
    struct rounded round; /* y for the next product, or none */
};

/* A warp for each (row, head of the model). */
static __global__ void k_group_squares(const struct group_norm_args a) {
    ptx_overlap_grids();
    const struct state_item item = state_item_of(a.all);
    if (item.row >= a.rows) return;
    const int own = item.head - a.first;
    float sum = 0;
    if (own >= 0 && own < a.heads) {
        const float *y = a.y + (item.row * a.heads + own) * a.dim;
        for (int i = item.lane; i < a.dim; i += 32) sum = fmaf(y[i], y[i], sum);
        sum = state_warp_sum(sum);
    }
    if (item.lane == 0) a.squares[item.row * a.all + item.head] = sum;
}

/* A warp for each (row, head of this rank); squares are added in the order of the heads, so that
 * the sum does not depend on the number of ranks. */
static __global__ void k_group_norm(const struct group_norm_args a) {
    ptx_overlap_grids();
    const struct state_item item = state_item_of(a.heads);
    if (item.row >= a.rows) return;
    const int of_model = a.first + item.head;
    const float *squares = a.squares + item.row * a.all + of_model / a.each * a.each;
    const float *norm = a.norm + (int64_t)of_model * a.dim;
    const int64_t at = (item.row * a.heads + item.head) * a.dim;
    float *y = a.y + at, sum = 0;
    for (int h = 0; h < a.each; h++) sum += squares[h];
    const float by = 1 / sqrtf(sum / (float)(a.each * a.dim) + a.eps);
    for (int i = item.lane; i < a.dim; i += 32)
        state_write(a.y, a.round, at + i, y[i] * by * norm[i]);
}

static void norm_groups(struct cuda *cuda, const struct kern_mamba *mamba, float *y, int rows) {
    const int heads = mamba->heads / cuda->comm->ranks;
    const size_t count = (size_t)rows * (size_t)mamba->heads;
    const int64_t cols = (int64_t)heads * mamba->dim;
    struct group_norm_args args = {};
    args.y = y;
    args.squares = static_cast<float *>(room_take(cuda, &cuda->squares, count * sizeof(float)));
    args.norm = mamba->norm;
    args.rows = rows;
    args.heads = heads;
    args.first = cuda->comm->rank * heads;
    args.all = mamba->heads;
    args.dim = mamba->dim;
    args.each = mamba->heads / mamba->groups;
    args.eps = mamba->eps;
    if (args.squares)
        LAUNCH_OVERLAPPED(cuda->device, k_group_squares, state_item_blocks(rows, args.all),
                          STATE_THREADS, 0, args);
    join_reduce(cuda, args.squares, count, COMM_F32, COMM_SUM);
    if (!args.squares) return;
    args.round = state_rounded(cuda, rows, cols);
    LAUNCH_OVERLAPPED(cuda->device, k_group_norm, state_item_blocks(rows, heads), STATE_THREADS, 0,
                      args);
    rounded_put(cuda, args.round, y, rows, cols);
}

void op_mamba(struct kern *kern, int state, float *y, float *in, float *shared,
              const struct kern_mamba *mamba, const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    const int heads = mamba->heads / cuda->comm->ranks, first = cuda->comm->rank * heads;
    const int width = 2 * heads * mamba->dim, past = mamba->width - 1;
    const int vectors = mamba->groups * mamba->dim_state, shared_width = 2 * vectors + mamba->heads;
    const int shared_floats = kern_mamba_shared_floats(mamba);
    CHECK(cuda->options.state_floats == shared_floats + heads * kern_mamba_head_floats(mamba));
    struct conv_args conv = {};
    conv.count = 2;
    conv.width = mamba->width;
    conv.taps = mamba->taps;
    conv.bias = mamba->conv_bias;
    conv.parts[0] = {in + (int64_t)heads * mamba->dim,
                     width,
                     heads * mamba->dim,
                     first * mamba->dim,
                     mamba->dim,
                     shared_floats,
                     kern_mamba_head_floats(mamba)};
    conv.parts[1] = {shared, shared_width, 2 * vectors, mamba->heads * mamba->dim, 2 * vectors, 0,
                     0};
    conv_channels(cuda, state, &conv, batch);
    struct scan_args scan = {};
    scan.heads = heads;
    scan.first = scan.vectors_first = first;
    scan.dim = mamba->dim_state;
    scan.columns = mamba->dim;
    scan.k = shared;
    scan.q = shared + vectors;
    scan.vectors_stride = scan.rates_stride = shared_width;
    scan.heads_vector = mamba->heads / mamba->groups;
    scan.v = conv.parts[0].x;
    scan.gates = in;
    scan.v_stride = width;
    scan.y = y;
    scan.at = shared_floats + past * mamba->dim;
    scan.unit_floats = kern_mamba_head_floats(mamba);
    scan.unit_heads = 1;
    scan.rates = shared + 2 * (int64_t)vectors;
    scan.decay = mamba->decay;
    scan.bias = mamba->bias;
    scan.skip = mamba->skip;
    const int64_t cols = (int64_t)heads * mamba->dim;
    if (!mamba->norm) scan.round = state_rounded(cuda, batch->rows, cols);
    scan_heads(cuda, state, &scan, false, batch);
    if (mamba->norm)
        norm_groups(cuda, mamba, y, batch->rows);
    else
        rounded_put(cuda, scan.round, y, batch->rows, cols);
}
