/* Short convolutions. The arithmetic is the same on every path but for SiLU, and its order does not
 * depend on how the rows of a sequence are split over steps. */
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/internal.h"

#define CHANNELS CPU_CONV_CHANNELS

/* Computes the rows of a span. u[j] is the product of the token that is width - 1 - j before the
 * row's. */
static void conv_span(const struct cpu_conv *conv, const struct kern_span *span,
                      float (*taps)[CHANNELS]) {
    const struct cpu_cache *cache = &conv->cpu->cache;
    const int past = conv->width - 1, count = conv->count;
    float held[CHANNELS * (KERN_TAPS_MAX - 1)], u[KERN_TAPS_MAX][CHANNELS] = {0}, one[CHANNELS];
    for (int c = 0; c < CHANNELS; c++) one[c] = 1;
    cpu_cache_state_read(cache, span->slot, conv->state, conv->at, count * past, held);
    for (int c = 0; c < count; c++)
        for (int j = 0; j < past; j++) u[j][c] = held[c * past + j];
    for (int i = 0; i < span->count; i++) {
        const size_t row = (size_t)span->row + (size_t)i, at = row * conv->stride;
        const float *x = conv->x + at;
        float *y = conv->y + row * conv->y_stride;
        for (int c = 0; c < count; c++)
            u[past][c] = conv->before ? conv->before[at + c] * x[c] : x[c];
        for (int c = 0; c < count; c++) {
            float sum = taps[0][c] * u[0][c];
            for (int j = 1; j <= past; j++) sum += taps[j][c] * u[j][c];
            if (conv->bias) sum += conv->bias[c];
            y[c] = conv->behind ? conv->behind[at + c] * sum : sum;
        }
        if (!conv->behind) conv->cpu->kernels->glu(y, y, one, count, KERN_SILU);
        memmove(u[0], u[1], (size_t)past * sizeof u[0]);
    }
    if (span->peeks) return;
    for (int c = 0; c < count; c++)
        for (int j = 0; j < past; j++) held[c * past + j] = u[j][c];
    cpu_cache_state_write(cache, span->slot, conv->state, conv->at, count * past, held);
}

void cpu_conv_channels(const struct cpu_conv *conv, const struct kern_batch *batch) {
    float taps[KERN_TAPS_MAX][CHANNELS];
    CHECK(conv->width >= 2 && conv->width <= KERN_TAPS_MAX && conv->count <= CHANNELS);
    for (int c = 0; c < conv->count; c++)
        for (int j = 0; j < conv->width; j++)
            taps[j][c] = conv->taps[(size_t)c * (size_t)conv->width + (size_t)j];
    for (int i = 0; i < batch->span_count; i++) conv_span(conv, &batch->spans[i], taps);
}

struct conv_job {
    struct cpu *cpu;
    struct cpu_tickets blocks; /* CHANNELS channels each, the last one perhaps fewer */
    const struct kern_batch *batch;
    const float *bcx, *taps; /* taps: those of this rank's channels */
    float *y;
    int state, channels, width;
};

static void conv_blocks(void *arg, int worker) {
    (void)worker;
    struct conv_job *job = arg;
    int64_t end;
    for (int64_t block; (block = cpu_tickets_take(&job->blocks, 1, &end)) >= 0;) {
        const int first = (int)block * CHANNELS;
        const float *b = job->bcx + first;
        const struct cpu_conv conv = {
            .cpu = job->cpu,
            .before = b,
            .behind = b + job->channels,
            .x = b + 2 * (size_t)job->channels,
            .y = job->y + first,
            .stride = 3 * (size_t)job->channels,
            .y_stride = (size_t)job->channels,
            .taps = job->taps + (size_t)first * (size_t)job->width,
            .count = job->channels - first < CHANNELS ? job->channels - first : CHANNELS,
            .width = job->width,
            .state = job->state,
            .at = first * (job->width - 1)};
        cpu_conv_channels(&conv, job->batch);
    }
}

void cpu_short_conv(struct kern *kern, int state, float *y, const float *bcx, const float *taps,
                    int channels, int width, const struct kern_batch *batch) {
    struct cpu *cpu = cpu_of(kern);
    const struct kern_cache_options *o = &cpu->cache.options;
    CHECK(state >= 0 && state < o->states && o->state_floats == channels * (width - 1));
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
