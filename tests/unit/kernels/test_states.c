/* Recurrent states: short convolutions, gated delta rules and Mamba-2 on every path against double
 * arithmetic, the same bits for every split of a text and beside other texts, and states in the
 * cache's pages: forks, copies, counts, and what is refused. */
#include <criterion/criterion.h>
#include <math.h>

#include "paths.h"

enum { CHANNELS = 37, WIDTH = 4, STATES = 2, TOKENS = 40, SLOTS = 4 };
/* Another shape, whose states have several pages. */
enum { WIDE = 3000, WIDE_WIDTH = 3 };

struct shape {
    int channels, width;
};

static struct kern *open_states(int path, struct shape shape, int64_t pages) {
    struct kern *kern = path_open(path, 2);
    struct fault fault = {0};
    const struct kern_cache_options options = {.layers = 1,
                                               .heads_q = 1,
                                               .heads_kv = 1,
                                               .head_dim = 16,
                                               .dtype = KERN_F32,
                                               .states = STATES,
                                               .state_floats = shape.channels * (shape.width - 1),
                                               .pages = pages,
                                               .slots = SLOTS,
                                               .max_positions = 4 * TOKENS};
    if (!kern) return NULL;
    cr_assert_eq(kern->ops->cache_open(kern, &options, &fault), 0, "%s", fault.text);
    return kern;
}

static const struct shape small = {CHANNELS, WIDTH}, wide = {WIDE, WIDE_WIDTH};

/* The inputs of a text's token: [B | C | x] by its number and the text's. */
static void inputs_of(struct shape shape, int text, int token, float *to) {
    fill(to, 3 * (size_t)shape.channels, (uint64_t)(1000 * text + token + 1));
}

/* The result for a token of a text, in double. */
static double exact(struct shape shape, const float *taps, int text, int token, int channel) {
    float *in = malloc(3 * (size_t)shape.channels * sizeof *in);
    double sum = 0, gate = 0;
    for (int j = 0; j < shape.width; j++) {
        const int from = token - shape.width + 1 + j;
        if (from < 0) continue;
        inputs_of(shape, text, from, in);
        sum += (double)taps[channel * shape.width + j] * (double)in[channel] *
               (double)in[2 * shape.channels + channel];
        gate = (double)in[shape.channels + channel];
    }
    free(in);
    return gate * sum;
}

struct part {
    int slot, text, pos, count;
};

/* Runs one step of some texts; the rows of their results follow each other in y. */
static int step_some(struct kern *kern, struct shape shape, const float *taps,
                     const struct part *parts, int count, bool peeks, float *y) {
    struct kern_span spans[SLOTS];
    int rows = 0;
    for (int i = 0; i < count; i++) {
        spans[i] = (struct kern_span){.slot = parts[i].slot,
                                      .row = rows,
                                      .count = parts[i].count,
                                      .pos = parts[i].pos,
                                      .peeks = peeks};
        rows += parts[i].count;
    }
    const size_t width = (size_t)shape.channels;
    float *bcx = malloc((size_t)rows * 3 * width * sizeof *bcx);
    for (int i = 0; i < count; i++)
        for (int t = 0; t < parts[i].count; t++)
            inputs_of(shape, parts[i].text, parts[i].pos + t,
                      bcx + (size_t)(spans[i].row + t) * 3 * width);
    const struct kern_batch batch = {.spans = spans, .rows = rows, .span_count = count};
    int rc = kern->ops->begin_step(kern, &batch);
    for (int state = 0; state < STATES && !rc; state++)
        kern->ops->short_conv(kern, state, y, bcx, taps, shape.channels, shape.width, &batch);
    free(bcx);
    struct fault fault = {0};
    cr_assert_eq(kern->ops->cache_check(kern, &fault), 0, "%s", fault.text);
    return rc;
}

static int step(struct kern *kern, struct shape shape, const float *taps, const struct part *parts,
                int count, float *y) {
    return step_some(kern, shape, taps, parts, count, false, y);
}

static float *new_taps(struct shape shape) {
    return fresh((size_t)shape.channels * (size_t)shape.width, 5);
}

/* A text in steps of `most` tokens. */
static void run(struct kern *kern, struct shape shape, const float *taps, int slot, int text,
                int most, float *y) {
    for (int pos = 0, n; pos < TOKENS; pos += n) {
        n = TOKENS - pos < most ? TOKENS - pos : most;
        const struct part part = {slot, text, pos, n};
        cr_assert_eq(step(kern, shape, taps, &part, 1, y + (size_t)pos * (size_t)shape.channels),
                     0);
    }
}

Test(states, convolutions_are_exact_and_splits_change_no_bit) {
    static float whole[TOKENS * CHANNELS], split[TOKENS * CHANNELS];
    float *taps = new_taps(small);
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = open_states(path, small, 64);
        if (!kern) continue;
        run(kern, small, taps, 0, 1, TOKENS, whole);
        for (int t = 0; t < TOKENS; t++)
            for (int c = 0; c < CHANNELS; c++)
                cr_assert_float_eq(whole[t * CHANNELS + c], exact(small, taps, 1, t, c), 2e-6);
        for (int most = 1; most < TOKENS; most += most < 6 ? 1 : 7) {
            kern->ops->release(kern, 1);
            run(kern, small, taps, 1, 1, most, split);
            cr_assert_eq(memcmp(whole, split, sizeof whole), 0, "%s: steps of %d", kern->ops->name,
                         most);
        }
        kern->ops->close(kern);
    }
    free(taps);
}

Test(states, texts_do_not_change_each_other) {
    static float alone[2][TOKENS * CHANNELS], both[2 * TOKENS * CHANNELS];
    float *taps = new_taps(small);
    struct kern *kern = open_states(0, small, 64);
    for (int i = 0; i < 2; i++) run(kern, small, taps, i, i + 1, 9, alone[i]);
    for (int i = 0; i < 2; i++) kern->ops->release(kern, i);
    for (int pos = 0; pos < TOKENS; pos += 10) {
        const struct part parts[] = {{1, 2, pos, 10}, {0, 1, pos, 10}};
        cr_assert_eq(step(kern, small, taps, parts, 2, both), 0);
        for (int i = 0; i < 2; i++)
            cr_assert_eq(memcmp(both + i * 10 * CHANNELS, alone[1 - i] + pos * CHANNELS,
                                10 * CHANNELS * sizeof *both),
                         0);
    }
    kern->ops->close(kern);
    free(taps);
}

/* ---- Gated delta rules ---- */

enum { HEADS_K = 2, HEADS_V = 6, DIM_K = 8, DIM_V = 20 };
enum { KEYS = HEADS_K * DIM_K, VALUES = HEADS_V * DIM_V };
enum { IN = 2 * KEYS + 2 * VALUES };

static struct kern_delta new_delta(void) {
    static float taps[(2 * KEYS + VALUES) * WIDTH], decay[HEADS_V], bias[HEADS_V], norm[DIM_V];
    fill(taps, sizeof taps / sizeof *taps, 71);
    fill(bias, HEADS_V, 72);
    fill(norm, DIM_V, 73);
    for (int h = 0; h < HEADS_V; h++) decay[h] = -0.05f * (float)(1 << h); /* slow to fast */
    return (struct kern_delta){HEADS_K, HEADS_V, DIM_K, DIM_V, WIDTH,
                               taps,    decay,   bias,  norm,  1e-6f};
}

static struct kern *open_delta(int path, const struct kern_delta *delta) {
    const int floats = HEADS_K * kern_delta_head_floats(delta);
    return open_states(path, (struct shape){floats, 2}, 64);
}

/* Rows of a text's tokens: [q | k | v | z] and [b | a]. */
static void delta_inputs(int text, int token, float *in, float *rates) {
    fill(in, IN, (uint64_t)(5000 * text + token + 1));
    fill(rates, 2 * HEADS_V, (uint64_t)(7000 * text + token + 1));
}

/* The results of a value head for a text, in double, by the formulas of kern_ops.delta. */
static void exact_delta(const struct kern_delta *d, int text, int head,
                        double (*out)[DIM_V] /* [TOKENS] */) {
    static double state[DIM_K][DIM_V];
    const int key = head / (HEADS_V / HEADS_K);
    static float in[TOKENS][IN], rates[TOKENS][2 * HEADS_V];
    memset(state, 0, sizeof state);
    for (int t = 0; t < TOKENS; t++) {
        double row[2 * KEYS + VALUES], q[DIM_K], k[DIM_K], qq = 1e-6, kk = 1e-6, yy = 0;
        delta_inputs(text, t, in[t], rates[t]);
        for (int c = 0; c < 2 * KEYS + VALUES; c++) {
            double sum = 0;
            for (int j = 0; j < WIDTH; j++)
                if (t - WIDTH + 1 + j >= 0)
                    sum += (double)d->taps[c * WIDTH + j] * (double)in[t - WIDTH + 1 + j][c];
            row[c] = sum / (1 + exp(-sum));
        }
        for (int i = 0; i < DIM_K; i++) {
            q[i] = row[key * DIM_K + i];
            k[i] = row[KEYS + key * DIM_K + i];
            qq += q[i] * q[i];
            kk += k[i] * k[i];
        }
        const double a = (double)rates[t][HEADS_V + head] + (double)d->bias[head];
        const double decay = exp((double)d->decay[head] * log1p(exp(a)));
        const double rate = 1 / (1 + exp(-(double)rates[t][head]));
        for (int c = 0; c < DIM_V; c++) {
            double known = 0;
            out[t][c] = 0;
            for (int i = 0; i < DIM_K; i++) known += decay * state[i][c] * k[i] / sqrt(kk);
            for (int i = 0; i < DIM_K; i++) {
                const double change = rate * (row[2 * KEYS + head * DIM_V + c] - known);
                state[i][c] = decay * state[i][c] + k[i] / sqrt(kk) * change;
                out[t][c] += state[i][c] * q[i] / sqrt(qq * DIM_K);
            }
            yy += out[t][c] * out[t][c] / DIM_V;
        }
        for (int c = 0; c < DIM_V; c++) {
            const double z = (double)in[t][2 * KEYS + VALUES + head * DIM_V + c];
            out[t][c] *= (double)d->norm[c] / sqrt(yy + 1e-6) * z / (1 + exp(-z));
        }
    }
}

static void delta_step(struct kern *kern, const struct kern_delta *delta, const struct part *parts,
                       int count, float *y) {
    static float in[2 * TOKENS * IN], rates[2 * TOKENS * 2 * HEADS_V];
    struct kern_span spans[SLOTS];
    int rows = 0;
    for (int i = 0; i < count; i++) {
        spans[i] = (struct kern_span){
            .slot = parts[i].slot, .row = rows, .count = parts[i].count, .pos = parts[i].pos};
        for (int t = 0; t < parts[i].count; t++, rows++)
            delta_inputs(parts[i].text, parts[i].pos + t, in + (size_t)rows * IN,
                         rates + (size_t)rows * 2 * HEADS_V);
    }
    const struct kern_batch batch = {.spans = spans, .rows = rows, .span_count = count};
    cr_assert_eq(kern->ops->begin_step(kern, &batch), 0);
    kern->ops->delta(kern, 1, y, in, rates, delta, &batch);
}

static void run_delta(struct kern *kern, const struct kern_delta *delta, int slot, int text,
                      int most, float *y) {
    for (int pos = 0, n; pos < TOKENS; pos += n) {
        n = TOKENS - pos < most ? TOKENS - pos : most;
        const struct part part = {slot, text, pos, n};
        delta_step(kern, delta, &part, 1, y + (size_t)pos * VALUES);
    }
}

Test(states, delta_rules_are_exact_and_splits_change_no_bit) {
    static float whole[TOKENS * VALUES], split[TOKENS * VALUES];
    static double exact[TOKENS][DIM_V];
    const struct kern_delta delta = new_delta();
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = open_delta(path, &delta);
        if (!kern) continue;
        run_delta(kern, &delta, 0, 1, TOKENS, whole);
        for (int head = 0; head < HEADS_V; head++) {
            exact_delta(&delta, 1, head, exact);
            for (int t = 0; t < TOKENS; t++)
                for (int c = 0; c < DIM_V; c++)
                    cr_assert_float_eq(whole[t * VALUES + head * DIM_V + c], exact[t][c], 1e-4,
                                       "%s: token %d of head %d: %g instead of %g", kern->ops->name,
                                       t, head, (double)whole[t * VALUES + head * DIM_V + c],
                                       exact[t][c]);
        }
        for (int most = 1; most < TOKENS; most += most < 6 ? 1 : 7) {
            kern->ops->release(kern, 1);
            run_delta(kern, &delta, 1, 1, most, split);
            cr_assert_eq(memcmp(whole, split, sizeof whole), 0, "%s: steps of %d", kern->ops->name,
                         most);
        }
        kern->ops->close(kern);
    }
}

Test(states, delta_rules_of_texts_do_not_change_each_other) {
    static float alone[2][TOKENS * VALUES], both[2 * 10 * VALUES];
    const struct kern_delta delta = new_delta();
    struct kern *kern = open_delta(1, &delta);
    for (int i = 0; i < 2; i++) run_delta(kern, &delta, i, i + 1, 9, alone[i]);
    for (int i = 0; i < 2; i++) kern->ops->release(kern, i);
    for (int pos = 0; pos < TOKENS; pos += 10) {
        const struct part parts[] = {{1, 2, pos, 10}, {0, 1, pos, 10}};
        delta_step(kern, &delta, parts, 2, both);
        for (int i = 0; i < 2; i++)
            cr_assert_eq(memcmp(both + i * 10 * VALUES, alone[1 - i] + pos * VALUES,
                                10 * VALUES * sizeof *both),
                         0);
    }
    kern->ops->close(kern);
}

/* ---- Mamba-2 ---- */

enum { HEADS = 6, GROUPS = 2, DIM = 20, STATE = 12, INNER = HEADS * DIM, BC = 2 * GROUPS * STATE };

static struct kern_mamba new_mamba(bool whole) {
    static float taps[(INNER + BC) * WIDTH], conv_bias[INNER + BC], decay[HEADS], bias[HEADS],
        skip[HEADS], norm[INNER];
    fill(taps, sizeof taps / sizeof *taps, 81);
    fill(conv_bias, INNER + BC, 82);
    fill(bias, HEADS, 83);
    fill(skip, HEADS, 84);
    fill(norm, INNER, 85);
    for (int h = 0; h < HEADS; h++) decay[h] = -0.05f * (float)(1 << h); /* slow to fast */
    return (struct kern_mamba){.heads = HEADS,
                               .groups = GROUPS,
                               .dim = DIM,
                               .dim_state = STATE,
                               .width = WIDTH,
                               .taps = taps,
                               .conv_bias = whole ? conv_bias : NULL,
                               .decay = decay,
                               .bias = bias,
                               .skip = skip,
                               .norm = whole ? norm : NULL,
                               .eps = 1e-5f};
}

static struct kern *open_mamba(int path, const struct kern_mamba *mamba) {
    const int floats = kern_mamba_shared_floats(mamba) + HEADS * kern_mamba_head_floats(mamba);
    return open_states(path, (struct shape){floats, 2}, 64);
}

/* Rows of a text's tokens: [z | x] and [B | C | dt]. */
static void mamba_inputs(int text, int token, float *in, float *shared) {
    fill(in, 2 * INNER, (uint64_t)(9000 * text + token + 1));
    fill(shared, BC + HEADS, (uint64_t)(11000 * text + token + 1));
}

static double silu(double x) {
    return x / (1 + exp(-x));
}

/* A channel of a text's token behind its convolution: x, then B and C. */
static double exact_channel(const struct kern_mamba *m, int text, int token, int channel) {
    float in[2 * INNER], shared[BC + HEADS];
    double sum = m->conv_bias ? (double)m->conv_bias[channel] : 0;
    for (int j = 0; j < WIDTH; j++) {
        if (token - WIDTH + 1 + j < 0) continue;
        mamba_inputs(text, token - WIDTH + 1 + j, in, shared);
        const float at = channel < INNER ? in[INNER + channel] : shared[channel - INNER];
        sum += (double)m->taps[channel * WIDTH + j] * (double)at;
    }
    return silu(sum);
}

/* The results of a text, in double, by the formulas of kern_ops.mamba. */
static void exact_mamba(const struct kern_mamba *m, int text, double (*out)[INNER]) {
    static double state[HEADS][STATE][DIM];
    memset(state, 0, sizeof state);
    for (int t = 0; t < TOKENS; t++) {
        float in[2 * INNER], shared[BC + HEADS];
        double bc[BC], squares[GROUPS] = {0};
        mamba_inputs(text, t, in, shared);
        for (int i = 0; i < BC; i++) bc[i] = exact_channel(m, text, t, INNER + i);
        for (int at = 0; at < INNER; at++) {
            const int head = at / DIM, c = at % DIM, group = head / (HEADS / GROUPS);
            const double rate = log1p(exp((double)shared[BC + head] + (double)m->bias[head]));
            const double x = exact_channel(m, text, t, at);
            double y = (double)m->skip[head] * x;
            for (int i = 0; i < STATE; i++) {
                double *s = &state[head][i][c];
                *s = exp((double)m->decay[head] * rate) * *s + bc[group * STATE + i] * rate * x;
                y += bc[(GROUPS + group) * STATE + i] * *s;
            }
            out[t][at] = y * silu((double)in[at]);
            squares[group] += out[t][at] * out[t][at] / (INNER / GROUPS);
        }
        for (int at = 0; at < INNER && m->norm; at++)
            out[t][at] *= (double)m->norm[at] / sqrt(squares[at / (INNER / GROUPS)] + 1e-5);
    }
}

static void mamba_step(struct kern *kern, const struct kern_mamba *mamba, const struct part *parts,
                       int count, float *y) {
    static float in[2 * TOKENS * 2 * INNER], shared[2 * TOKENS * (BC + HEADS)];
    struct kern_span spans[SLOTS];
    int rows = 0;
    for (int i = 0; i < count; i++) {
        spans[i] = (struct kern_span){
            .slot = parts[i].slot, .row = rows, .count = parts[i].count, .pos = parts[i].pos};
        for (int t = 0; t < parts[i].count; t++, rows++)
            mamba_inputs(parts[i].text, parts[i].pos + t, in + (size_t)rows * 2 * INNER,
                         shared + (size_t)rows * (BC + HEADS));
    }
    const struct kern_batch batch = {.spans = spans, .rows = rows, .span_count = count};
    cr_assert_eq(kern->ops->begin_step(kern, &batch), 0);
    kern->ops->mamba(kern, 1, y, in, shared, mamba, &batch);
}

static void run_mamba(struct kern *kern, const struct kern_mamba *mamba, int slot, int text,
                      int most, float *y) {
    for (int pos = 0, n; pos < TOKENS; pos += n) {
        n = TOKENS - pos < most ? TOKENS - pos : most;
        const struct part part = {slot, text, pos, n};
        mamba_step(kern, mamba, &part, 1, y + (size_t)pos * INNER);
    }
}

static void check_mamba(int path, const struct kern_mamba *mamba) {
    static float whole[TOKENS * INNER], split[TOKENS * INNER];
    static double exact[TOKENS][INNER];
    struct kern *kern = open_mamba(path, mamba);
    if (!kern) return;
    run_mamba(kern, mamba, 0, 1, TOKENS, whole);
    exact_mamba(mamba, 1, exact);
    for (int i = 0; i < TOKENS * INNER; i++)
        cr_assert_float_eq(whole[i], exact[i / INNER][i % INNER], 1e-4,
                           "%s: token %d: %g instead of %g", kern->ops->name, i / INNER,
                           (double)whole[i], exact[i / INNER][i % INNER]);
    for (int most = 1; most < TOKENS; most += most < 6 ? 1 : 7) {
        kern->ops->release(kern, 1);
        run_mamba(kern, mamba, 1, 1, most, split);
        cr_assert_eq(memcmp(whole, split, sizeof whole), 0, "%s: steps of %d", kern->ops->name,
                     most);
    }
    kern->ops->close(kern);
}

Test(states, mamba_is_exact_and_splits_change_no_bit) {
    for (int whole = 0; whole < 2; whole++) {
        const struct kern_mamba mamba = new_mamba(whole);
        for (int path = 0; path < PATH_COUNT; path++) check_mamba(path, &mamba);
    }
}

Test(states, mamba_of_texts_do_not_change_each_other) {
    static float alone[2][TOKENS * INNER], both[2 * 10 * INNER];
    const struct kern_mamba mamba = new_mamba(true);
    struct kern *kern = open_mamba(1, &mamba);
    for (int i = 0; i < 2; i++) run_mamba(kern, &mamba, i, i + 1, 9, alone[i]);
    for (int i = 0; i < 2; i++) kern->ops->release(kern, i);
    for (int pos = 0; pos < TOKENS; pos += 10) {
        const struct part parts[] = {{1, 2, pos, 10}, {0, 1, pos, 10}};
        mamba_step(kern, &mamba, parts, 2, both);
        for (int i = 0; i < 2; i++)
            cr_assert_eq(memcmp(both + i * 10 * INNER, alone[1 - i] + pos * INNER,
                                10 * INNER * sizeof *both),
                         0);
    }
    kern->ops->close(kern);
}

static int64_t pages_used(struct kern *kern) {
    struct kern_cache_stats stats;
    kern->ops->cache_stats(kern, &stats);
    return stats.pages_used;
}

Test(states, forks_share_pages_until_they_write) {
    enum { STATE_PAGES = 3 }; /* 6000 numbers, 2048 to a page */
    static float first[TOKENS * WIDE], again[TOKENS * WIDE], other[WIDE];
    float *taps = new_taps(wide);
    struct kern *kern = open_states(1, wide, 64);
    struct kern_report report = {0};
    run(kern, wide, taps, 0, 1, TOKENS, first);
    cr_assert_eq(pages_used(kern), 1 + STATES * STATE_PAGES);
    cr_assert_eq(kern->ops->fork(kern, 0, 1), 0);
    cr_assert_eq(kern->ops->fork(kern, 0, 2), 0);
    cr_assert_eq(pages_used(kern), 1 + STATES * STATE_PAGES);
    cr_assert_eq(kern->ops->report(kern, 1, &report), 0);
    cr_assert_eq(report.pages, 1 + STATES * STATE_PAGES);
    cr_assert_eq(report.state_bytes, STATES * WIDE * (WIDE_WIDTH - 1) * sizeof(float));
    /* Both forks write in one step: each needs pages of its own, as slot 0 keeps the shared. */
    const struct part parts[] = {{1, 1, TOKENS, 1}, {2, 3, TOKENS, 1}};
    static float rows[2 * WIDE];
    cr_assert_eq(step(kern, wide, taps, parts, 2, rows), 0);
    cr_assert_eq(pages_used(kern), 3 * (1 + STATES * STATE_PAGES));
    for (int c = 0; c < WIDE; c += 97)
        cr_assert_float_eq(rows[c], exact(wide, taps, 1, TOKENS, c), 2e-6);
    cr_assert_neq(memcmp(rows, rows + WIDE, sizeof other), 0);
    /* Slot 0 did not change: what it gives next is what the fork of the same text gave. */
    const struct part next = {0, 1, TOKENS, 1};
    cr_assert_eq(step(kern, wide, taps, &next, 1, other), 0);
    cr_assert_eq(memcmp(rows, other, sizeof other), 0);
    for (int slot = 0; slot < 3; slot++) kern->ops->release(kern, slot);
    cr_assert_eq(pages_used(kern), 0);
    run(kern, wide, taps, 3, 1, TOKENS, again); /* pages of zeros, whatever was in them */
    cr_assert_eq(memcmp(first, again, sizeof first), 0);
    kern->ops->close(kern);
    free(taps);
}

Test(states, a_pool_without_pages_refuses_the_step) {
    static float y[TOKENS * WIDE];
    float *taps = new_taps(wide);
    struct kern *kern = open_states(0, wide, 8);
    const struct part parts[] = {{0, 1, 0, 5}, {1, 2, 0, 5}}, next = {1, 1, 5, 1};
    cr_assert_eq(step(kern, wide, taps, parts, 1, y), 0);
    cr_assert_eq(pages_used(kern), 7);
    cr_assert_eq(step(kern, wide, taps, parts + 1, 1, y), ERR_FULL);
    cr_assert_eq(kern->ops->fork(kern, 0, 1), 0);
    cr_assert_eq(step(kern, wide, taps, &next, 1, y),
                 ERR_FULL); /* copies of 7 pages, one is free */
    cr_assert_eq(pages_used(kern), 7);
    kern->ops->release(kern, 0);
    cr_assert_eq(step(kern, wide, taps, &next, 1, y), 0); /* nobody shares them now */
    kern->ops->close(kern);
    free(taps);
}

Test(states, a_state_cannot_go_back) {
    static float y[TOKENS * CHANNELS];
    float *taps = new_taps(small);
    struct kern *kern = open_states(0, small, 64);
    run(kern, small, taps, 0, 1, TOKENS, y);
    cr_assert_eq(kern->ops->truncate(kern, 0, TOKENS - 1), ERR_UNSUPPORTED);
    cr_assert_eq(kern->ops->truncate(kern, 0, TOKENS), 0);
    const struct part next = {0, 1, TOKENS, 1};
    cr_assert_eq(step(kern, small, taps, &next, 1, y), 0);
    cr_assert_float_eq(y[3], exact(small, taps, 1, TOKENS, 3), 2e-6);
    kern->ops->close(kern);
    free(taps);
}

/* Some of the tokens that a step has peeked at are left: the states go on from these. */
Test(states, a_peek_changes_nothing) {
    enum { PEEKED = 5, LEFT = 2, FIRST = 7 };
    static float whole[TOKENS * CHANNELS], y[TOKENS * CHANNELS];
    float *taps = new_taps(small), bcx[LEFT * 3 * CHANNELS];
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = open_states(path, small, 64);
        if (!kern) continue;
        run(kern, small, taps, 0, 1, TOKENS, whole);
        const struct part begin = {1, 1, 0, FIRST}, peek = {1, 1, FIRST, PEEKED};
        const struct part rest = {1, 1, FIRST + LEFT, TOKENS - FIRST - LEFT};
        cr_assert_eq(step(kern, small, taps, &begin, 1, y), 0);
        cr_assert_eq(step_some(kern, small, taps, &peek, 1, true, y), 0);
        cr_assert_eq(memcmp(y, whole + FIRST * CHANNELS, PEEKED * CHANNELS * sizeof *y), 0);
        cr_assert_eq(kern->ops->truncate(kern, 1, FIRST - 1), ERR_UNSUPPORTED);
        cr_assert_eq(kern->ops->truncate(kern, 1, FIRST + LEFT), 0);
        const struct kern_span left = {.slot = 1, .count = LEFT, .pos = FIRST};
        const struct kern_batch batch = {.spans = &left, .rows = LEFT, .span_count = 1};
        for (int t = 0; t < LEFT; t++)
            inputs_of(small, 1, FIRST + t, bcx + (ptrdiff_t)t * 3 * CHANNELS);
        for (int state = 0; state < STATES; state++)
            kern->ops->short_conv(kern, state, y, bcx, taps, CHANNELS, WIDTH, &batch);
        cr_assert_eq(kern->ops->truncate(kern, 1, FIRST), ERR_UNSUPPORTED);
        cr_assert_eq(step(kern, small, taps, &rest, 1, y), 0);
        cr_assert_eq(memcmp(y, whole + (ptrdiff_t)(FIRST + LEFT) * CHANNELS,
                            (size_t)rest.count * CHANNELS * sizeof *y),
                     0, "%s", kern->ops->name);
        kern->ops->close(kern);
    }
    free(taps);
}

Test(states, snapshots_hold_them) {
    enum { BLOCKS = 2 + STATES };
    static float y[TOKENS * WIDE], one[WIDE], two[WIDE];
    float *taps = new_taps(wide);
    struct kern *kern = open_states(0, wide, 64);
    struct kern_block blocks[BLOCKS];
    struct kern_report report = {0};
    struct fault fault = {0};
    run(kern, wide, taps, 0, 1, TOKENS, y);
    for (int b = 0; b < BLOCKS; b++) {
        const size_t size = kern->ops->snapshot_size(kern, 0, b);
        void *data = malloc(size);
        cr_assert_eq(kern->ops->snapshot_export(kern, 0, b, data), 0);
        blocks[b] = (struct kern_block){data, size};
    }
    cr_assert_eq(kern->ops->snapshot_check(kern, blocks, BLOCKS, TOKENS, &report, &fault), 0, "%s",
                 fault.text);
    cr_assert_eq(report.pages, pages_used(kern));
    cr_assert_eq(report.state_bytes, STATES * WIDE * (WIDE_WIDTH - 1) * sizeof(float));
    for (int b = 0; b < BLOCKS; b++)
        cr_assert_eq(kern->ops->snapshot_import(kern, 1, b, &blocks[b]), 0);
    const struct part a = {0, 1, TOKENS, 1}, b = {1, 1, TOKENS, 1};
    cr_assert_eq(step(kern, wide, taps, &a, 1, one), 0);
    cr_assert_eq(step(kern, wide, taps, &b, 1, two), 0);
    cr_assert_eq(memcmp(one, two, sizeof one), 0);
    blocks[BLOCKS - 1].size--;
    cr_assert_eq(kern->ops->snapshot_check(kern, blocks, BLOCKS, TOKENS, &report, &fault),
                 ERR_MALFORMED);
    cr_assert_eq(kern->ops->snapshot_check(kern, blocks, BLOCKS - 1, TOKENS, &report, &fault),
                 ERR_MALFORMED);
    for (int i = 0; i < BLOCKS; i++) free((void *)(uintptr_t)blocks[i].data);
    kern->ops->close(kern);
    free(taps);
}
