/* Short convolutions. The arithmetic is the same on every path, and its order does not depend on
 * how the rows of a sequence are split over steps. */
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/internal.h"

/* Channels that are computed together: one vector of AVX-512, several of other paths. */
#define CHANNELS 16

struct conv_job {
    struct cpu *cpu;
    struct cpu_tickets blocks; /* CHANNELS channels each, the last one perhaps fewer */
    const struct kern_batch *batch;
    const float *bcx, *taps; /* taps: those of this rank's channels */
    float *y;
    int state, channels, width;
};

/* Computes the rows of a span in the channels [first, first + count). `taps`: [width][CHANNELS].
 * u[j] is B x of the token that is width - 1 - j before the row's. */
static void conv_span(const struct conv_job *job, const struct kern_span *span, int first,
                      int count, float (*taps)[CHANNELS]) {
    const struct cpu_cache *cache = &job->cpu->cache;
    const int past = job->width - 1;
    float held[CHANNELS * (KERN_TAPS_MAX - 1)], u[KERN_TAPS_MAX][CHANNELS] = {0};
    cpu_cache_state_read(cache, span->slot, job->state, first * past, count * past, held);
    for (int c = 0; c < count; c++)
        for (int j = 0; j < past; j++) u[j][c] = held[c * past + j];
    for (int i = 0; i < span->count; i++) {
        const size_t row = (size_t)(span->row + i) * (size_t)job->channels + (size_t)first;
        const float *b = job->bcx + 2 * (row - (size_t)first) + row;
        const float *gate = b + job->channels, *x = gate + job->channels;
        float *y = job->y + row;
        for (int c = 0; c < count; c++) u[past][c] = b[c] * x[c];
        for (int c = 0; c < count; c++) {
            float sum = taps[0][c] * u[0][c];
            for (int j = 1; j <= past; j++) sum += taps[j][c] * u[j][c];
            y[c] = gate[c] * sum;
        }
        memmove(u[0], u[1], (size_t)past * sizeof u[0]);
    }
    for (int c = 0; c < count; c++)
        for (int j = 0; j < past; j++) held[c * past + j] = u[j][c];
    cpu_cache_state_write(cache, span->slot, job->state, first * past, count * past, held);
}

static void conv_blocks(void *arg, int worker) {
    (void)worker;
    struct conv_job *job = arg;
    int64_t end;
    for (int64_t block; (block = cpu_tickets_take(&job->blocks, 1, &end)) >= 0;) {
        const int first = (int)block * CHANNELS;
        const int count = job->channels - first < CHANNELS ? job->channels - first : CHANNELS;
        float taps[KERN_TAPS_MAX][CHANNELS];
        for (int c = 0; c < count; c++)
            for (int j = 0; j < job->width; j++)
                taps[j][c] = job->taps[(size_t)(first + c) * (size_t)job->width + (size_t)j];
        for (int i = 0; i < job->batch->span_count; i++)
            conv_span(job, &job->batch->spans[i], first, count, taps);
    }
}

void cpu_short_conv(struct kern *kern, int state, float *y, const float *bcx, const float *taps,
                    int channels, int width, const struct kern_batch *batch) {
    struct cpu *cpu = cpu_of(kern);
    const struct kern_cache_options *o = &cpu->cache.options;
    CHECK(width >= 2 && width <= KERN_TAPS_MAX && state >= 0 && state < o->states);
    CHECK(o->state_floats == channels * (width - 1));
    struct conv_job job = {.cpu = cpu,
                           .batch = batch,
                           .bcx = bcx,
                           .taps =
                               taps + (size_t)cpu->comm->rank * (size_t)channels * (size_t)width,
                           .y = y,
                           .state = state,
                           .channels = channels,
                           .width = width};
    cpu_tickets_set(&job.blocks, (channels + CHANNELS - 1) / CHANNELS);
    cpu_run(cpu, (int64_t)batch->rows * channels * (width + 3), conv_blocks, &job);
}
