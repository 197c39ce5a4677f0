/* Short convolutions: a thread for each channel of a span, which walks through the span's rows. It
 * reads rows ahead, because a row's channels are far apart in time, not in memory. */
#include "kernels/cuda/state.cuh"

#define CONV_THREADS 128
#define CONV_AHEAD   8

/* WIDTH is at least the number of taps; those behind it are zeros. u[j] is the product of the token
 * that is width - 1 - j before the row's. */
template <int WIDTH> static __global__ void k_conv(const struct conv_args a) {
    ptx_overlap_grids();
    const struct pages &p = a.pages;
    int channel = (int)(blockIdx.x * blockDim.x + threadIdx.x), which = 0;
    while (which < a.count && channel >= a.parts[which].channels)
        channel -= a.parts[which++].channels;
    if (which == a.count || pages_failed(p)) return;
    const struct conv_part part = a.parts[which];
    const struct span s = a.spans[blockIdx.y];
    const int32_t *table = pages_row(p, s.slot, a.row);
    const int past = a.width - 1;
    const int at = part.at + channel / part.unit * part.unit_floats + channel % part.unit * past;
    const float *own = a.taps + (int64_t)(part.tap + channel) * a.width;
    const float bias = a.bias ? a.bias[part.tap + channel] : 0;
    float taps[WIDTH], u[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        taps[j] = j < a.width ? own[j] : 0;
        u[j] = j < past ? *pages_number(p, table, at + j) : 0;
    }
    const int64_t stride = part.stride;
    int64_t row = s.row;
    for (int first = 0; first < s.count; first += CONV_AHEAD) {
        float x[CONV_AHEAD];
#pragma unroll
        for (int i = 0; i < CONV_AHEAD; i++) {
            x[i] = 0;
            if (first + i >= s.count) continue;
            const int64_t from = (row + i) * stride + channel;
            x[i] = a.before ? a.before[from] * part.x[from] : part.x[from];
        }
#pragma unroll
        for (int i = 0; i < CONV_AHEAD; i++) {
            if (first + i >= s.count) continue;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                if (j == past) u[j] = x[i];
                sum = fmaf(taps[j], u[j], sum);
            }
            sum += bias;
            const int64_t from = (row + i) * stride + channel;
            if (a.y)
                state_write(a.y, a.round, (row + i) * a.y_stride + channel, a.behind[from] * sum);
            else
                part.x[from] = silu(sum);
#pragma unroll
            for (int j = 0; j + 1 < WIDTH; j++) u[j] = u[j + 1];
        }
        row += CONV_AHEAD;
    }
#pragma unroll
    for (int j = 0; j < WIDTH; j++)
        if (j < past) *pages_number(p, table, at + j) = u[j];
}

void conv_channels(struct cuda *cuda, int state, struct conv_args *args,
                   const struct kern_batch *batch) {
    const struct step *step = step_of(cuda, batch);
    if (!step->spans) return;
    CHECK(cuda->has_cache && state >= 0 && state < cuda->options.states);
    CHECK(args->width >= 2 && args->width <= KERN_TAPS_MAX);
    args->pages = cuda->pages;
    args->spans = step->spans;
    args->row = cuda->pages.streams + state;
    int channels = 0;
    for (int i = 0; i < args->count; i++) channels += args->parts[i].channels;
    const dim3 grid(blocks_for(channels, CONV_THREADS), (unsigned)step->span_count);
    if (args->width <= 4)
        LAUNCH_OVERLAPPED(cuda->device, k_conv<4>, grid, CONV_THREADS, 0, *args);
    else
        LAUNCH_OVERLAPPED(cuda->device, k_conv<KERN_TAPS_MAX>, grid, CONV_THREADS, 0, *args);
}

void op_short_conv(struct kern *kern, int state, float *y, const float *bcx, const float *taps,
                   int channels, int width, const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->options.state_floats == channels * (width - 1));
    struct conv_args args = {};
    args.count = 1;
    args.parts[0].x = const_cast<float *>(bcx) + 2 * (int64_t)channels;
    args.parts[0].stride = 3 * channels;
    args.parts[0].channels = args.parts[0].unit = channels;
    args.parts[0].tap = cuda->comm->rank * channels;
    args.width = width;
    args.taps = taps;
    args.before = bcx;
    args.behind = bcx + channels;
    args.y = y;
    args.y_stride = channels;
    args.round = state_rounded(cuda, batch->rows, channels);
    conv_channels(cuda, state, &args, batch);
    rounded_put(cuda, args.round, y, batch->rows, channels);
}
