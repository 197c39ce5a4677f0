/* The reference path: plain C, float32, every sum in one order that is easy to state: sixteen
 * running sums over i mod 16, added from the first to the last. Clarity precedes speed
 * throughout. */
#include <math.h>

#include "kernels/cpu/internal.h"

#define SUMS 16

static float dot(const float *a, const float *b, int64_t count) {
    float sum[SUMS] = {0}, all = 0;
    int64_t i = 0;
    for (; i + SUMS <= count; i += SUMS)
        for (int l = 0; l < SUMS; l++) sum[l] += a[i + l] * b[i + l];
    for (int l = 0; i < count; i++, l++) sum[l] += a[i] * b[i];
    for (int l = 0; l < SUMS; l++) all += sum[l];
    return all;
}

static void reference_rms_norm(float *y, const float *x, const float *weight, int dim, float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, dim) / (float)dim + eps);
    for (int i = 0; i < dim; i++) y[i] = x[i] * scale * weight[i];
}

static void reference_glu(float *y, const float *gate, const float *up, int count,
                          enum kern_activation activation) {
    for (int i = 0; i < count; i++) {
        float g = gate[i], u = up[i], inner = g;
        if (activation == KERN_RELU) {
            y[i] = (g < 0 ? 0 : g) * u; /* a NaN stays one */
            continue;
        }
        if (activation == KERN_NORMAL || activation == KERN_GELU) {
            const float times = activation == KERN_GELU ? g * u : u;
            y[i] = 0.5f * erfcf(g * -0.707106781f) * times;
            continue;
        }
        if (activation == KERN_SWIGLU_CLAMPED) {
            g = g > 7 ? 7 : g; /* a NaN stays one */
            u = (u > 7 ? 7 : u < -7 ? -7 : u) + 1;
            inner = 1.702f * g;
        }
        if (activation == KERN_GELU_TANH) inner = 1.59576912f * (g + 0.044715f * g * g * g);
        if (activation == KERN_SIGMOID) g = 1;
        y[i] = g / (1.0f + expf(-inner)) * u;
    }
}

static void rope(float *x, int half, const float *cosine, const float *sine, const float *norm,
                 float eps) {
    if (norm) reference_rms_norm(x, x, norm, 2 * half, eps);
    for (int j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a * cosine[j] - b * sine[j];
        x[j + half] = b * cosine[j] + a * sine[j];
    }
}

static void delta(float *state, int dim, const struct cpu_delta_token *token, float *out) {
    for (int c = 0; c < 16; c++) {
        float known = 0, sum = 0;
        for (int i = 0; i < dim && token->corrects; i++) known += token->k[i] * state[16 * i + c];
        const float change = (token->v[c] - token->decay * known) * token->rate;
        for (int i = 0; i < dim; i++) {
            float *s = &state[16 * i + c];
            *s = token->decay * *s + token->k[i] * change;
            sum += token->q[i] * *s;
        }
        out[c] = sum;
    }
}

/* ---- Products ---- */

/* The leaves of one output, added like a tree. */
static float sum_leaves(const struct kern_weight *w, const float *x, const float *row) {
    float level[CPU_LEAF_LEVELS] = {0};
    for (int l = 0; l < w->leaves; l++) {
        struct cpu_leaf leaf = cpu_leaf_of(w, l);
        int top = cpu_leaf_level(l);
        level[top] = dot(x + leaf.first, row + leaf.first, leaf.count);
        for (int n = l; n & 1; n >>= 1, top--) level[top - 1] += level[top];
    }
    return level[0];
}

static size_t matmul_scratch(const struct kern_weight *weight) {
    return (size_t)weight->cols * sizeof(float);
}

static void matmul(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                   void *scratch) {
    (void)next;
    const struct kern_weight *w = job->weight;
    int64_t end = (first + count) * PANEL < w->rows ? (first + count) * PANEL : w->rows;
    for (int64_t o = first * PANEL; o < end; o++) {
        cpu_weight_numbers(w, o, scratch);
        for (int r = 0; r < job->rows; r++) {
            float sum = sum_leaves(w, job->x + r * w->cols, scratch);
            if (job->scale) sum *= job->scale[o];
            if (job->bias) sum += job->bias[o];
            float *y = &job->y[r * job->width + o];
            *y = job->mode == KERN_ADD ? *y + sum : sum;
        }
    }
}

/* ---- Attention ---- */

static size_t attend_scratch(const struct kern_cache_options *options) {
    return ((size_t)options->max_positions + 2 * (size_t)options->head_dim) * sizeof(float);
}

static int attend_lanes(const struct kern_cache_options *options) {
    (void)options;
    return 16;
}

static void attend_one(const struct cpu_attend_job *job, const struct cpu_stream *stream,
                       const float *query, float sink, int32_t lo, int32_t hi, float *score,
                       float *vector, float *out) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_layer *layer = stream->layer;
    int slots = layer->page_slots;
    float most = sink, *q = vector + job->head_dim;
    memcpy(q, query, (size_t)job->head_dim * sizeof *q);
    cpu_cache_rotate(cache, q, job->head_dim);
    for (int32_t e = lo; e < hi; e++) {
        cpu_cache_wide_row(cache, layer, stream->pages[e / slots], false, e % slots, vector);
        score[e] = dot(q, vector, job->head_dim) * job->scale;
        if (job->cap > 0) score[e] = job->cap * tanhf(score[e] / job->cap);
        most = fmaxf(most, score[e]);
    }
    float sum = expf(sink - most);
    for (int i = 0; i < job->value_dim; i++) out[i] = 0;
    for (int32_t e = lo; e < hi; e++) {
        float p = expf(score[e] - most);
        sum += p;
        cpu_cache_wide_row(cache, layer, stream->pages[e / slots], true, e % slots, vector);
        for (int i = 0; i < job->value_dim; i++) out[i] += p * vector[i];
    }
    for (int i = 0; i < job->value_dim; i++) out[i] /= sum;
    cpu_cache_rotate(cache, out, job->value_dim);
}

static void attend(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                   void *scratch) {
    const struct kern_span *span = &job->batch->spans[item->span];
    struct cpu_stream stream = cpu_cache_stream(job->cache, span->slot, job->layer, item->head);
    float *vector = scratch, *score = vector + 2 * (size_t)job->head_dim;
    for (int l = 0; l < item->lanes; l++) {
        int32_t lo, hi;
        float sink, sum;
        cpu_attend_begin(job, item, l, &sink, &sum);
        cpu_attend_range(job, &stream, span, (item->lane + l) / job->group, &lo, &hi);
        attend_one(job, &stream, cpu_attend_query(job, item, l), sink, lo, hi, score, vector,
                   cpu_attend_out(job, item, l));
    }
}

const struct cpu_kernels cpu_kernels_reference = {
    .name = "cpu-reference",
    .layout_bf16 = CPU_ROWS,
    .layout_e4m3 = CPU_ROWS,
    .layout_other = CPU_ROWS,
    .rms_norm = reference_rms_norm,
    .glu = reference_glu,
    .rope = rope,
    .write_row = number_write_row,
    .delta = delta,
    .matmul = matmul,
    .matmul_scratch = matmul_scratch,
    .math = &cpu_math_plain,
    .attend_scratch = attend_scratch,
    .attend_lanes = attend_lanes,
    .attend = attend,
};
