/* How a sequence's total is split over layers and streams (kernels/cpu/share.c is the oracle, and
 * kernels/kern.h, enum kern_layers and kern_rule.floor, says what is split and how). Whole places
 * come out as on the CPU: kernels/share.h. A block per sequence; the loop over layers runs in one
 * thread: it is short, and its order matters. */
#include <math.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/evict.cuh"

#define THREADS 256

/* ---- Weights of layers ------------------------------------------------------------------------
 */

/* A block per state: the unbiased variance of the entries' accumulated mass, for DENSITY. */
static __global__ void k_density(const struct evict_args a) {
    SHARED_MEMORY(shared);
    double *room = (double *)shared;
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    struct stream_state &state = a.streams.states[blockIdx.x];
    const struct due &d = a.due[state.subject];
    if (!d.measures || d.rule.layers != KERN_LAYERS_DENSITY) return;
    const int32_t *table = pages_table(p, d.slot, state.stream);
    double sum = 0, squares = 0;
    for (int i = threadIdx.x; i < state.length; i += (int)blockDim.x)
        sum += (double)p.score[pages_side(p, table, i)];
    double mean = block_total(sum, room) / (state.length > 0 ? state.length : 1);
    for (int i = threadIdx.x; i < state.length; i += (int)blockDim.x) {
        double delta = (double)p.score[pages_side(p, table, i)] - mean;
        squares += delta * delta;
    }
    squares = block_total(squares, room);
    if (threadIdx.x == 0) state.measured[0] = state.length > 1 ? squares / (state.length - 1) : 0;
}

/* What k_look_add left of the stream's chunks. */
static __device__ void fold_preference(const struct evict_args &a, struct stream_state &state) {
    double entropy = 0, variance = 0;
    for (int chunk = 0; chunk < state.work; chunk++) {
        entropy += a.sums[2 * (int64_t)(state.item + chunk)];
        variance += a.sums[2 * (int64_t)(state.item + chunk) + 1];
    }
    state.measured[0] = entropy;
    state.measured[1] = variance;
}

static __device__ double preference(const struct kern_rule &rule, const struct stream_state *states,
                                    int heads) {
    double entropy = 0, variance = 0;
    for (int i = 0; i < heads; i++) {
        entropy += states[i].measured[0];
        variance += states[i].measured[1];
    }
    return pow(entropy, 1 / (double)rule.tau1) * pow(variance, 1 / (double)rule.tau2);
}

static __device__ double density(const struct stream_state *states, int heads) {
    double low = states[0].measured[0], high = low, sum = 0;
    for (int i = 0; i < heads; i++) {
        low = fmin(low, states[i].measured[0]);
        high = fmax(high, states[i].measured[0]);
    }
    for (int i = 0; i < heads; i++) sum += (states[i].measured[0] - low) / (high - low + 1e-6);
    return exp(-sum / heads); /* divided by their sum when it is shared */
}

/* Linear, mean 1, the last layer's 1 / beta. */
static __device__ double pyramid(const struct kern_rule &rule, int layer, int last) {
    double low = 1 / (double)rule.pyramid_beta;
    if (last <= 0) return 1;
    double step = __ddiv_rn(__dmul_rn(__dadd_rn(2, -__dmul_rn(2, low)), layer), last);
    return __dadd_rn(__dadd_rn(2, -low), -step);
}

static __device__ float layer_weight(const struct kern_rule &rule,
                                     const struct stream_state *states, const struct pages &p,
                                     int layer) {
    if (rule.layers == KERN_LAYERS_PREFERENCE) return (float)preference(rule, states, p.heads_kv);
    if (rule.layers == KERN_LAYERS_DENSITY) return (float)density(states, p.heads_kv);
    return rule.layers == KERN_LAYERS_PYRAMID ? (float)pyramid(rule, layer, p.layers - 1) : 1;
}

/* ---- Places of layers and streams -------------------------------------------------------------
 */

static __device__ void set_places(struct cut *cut, int64_t places) {
    cut->wanted = cut->room = (uint32_t)places;
}

/* A layer's places over its heads, evenly; a thread per layer. */
static __device__ void split_heads(const struct stream_state *states, int heads, int64_t room,
                                   struct share_part *parts, struct cut *cuts) {
    for (int i = 0; i < heads; i++) {
        parts[i] = {};
        parts[i].weight = 1;
        parts[i].most = states[i].length;
        parts[i].least = states[i].fixed;
    }
    share_split(parts, heads, room);
    for (int i = 0; i < heads; i++) set_places(&cuts[i], parts[i].part);
}

/* A layer as a part of what is not protected. Returns what is. */
static __device__ int64_t layer_part(const struct stream_state *states, int heads, float weight,
                                     struct share_part *part) {
    int64_t fixed = 0, held = 0;
    for (int i = 0; i < heads; i++) {
        fixed += states[i].fixed;
        held += states[i].length;
    }
    *part = {};
    part->weight = (double)weight;
    part->most = held - fixed;
    return fixed;
}

/* Block (due): weights, unless the sequence has them, then places. */
static __global__ void k_share_layers(const struct evict_args a) {
    SHARED_MEMORY(shared);
    int64_t *room = (int64_t *)shared;
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    const struct due &d = a.due[blockIdx.x];
    if (d.rule.layers == KERN_LAYERS_UNIFORM) return;
    struct stream_state *states = a.streams.states + a.streams.subjects[blockIdx.x].state_first;
    struct share_part *layers = a.parts + d.first_part, *heads = layers + p.layers;
    float *weights = p.weights + (int64_t)d.slot * p.layers;
    if (d.measures && d.rule.layers == KERN_LAYERS_PREFERENCE)
        for (int i = threadIdx.x; i < p.streams; i += (int)blockDim.x)
            fold_preference(a, states[i]);
    __syncthreads();
    int64_t fixed = 0;
    for (int i = threadIdx.x; i < p.layers; i += (int)blockDim.x) {
        if (d.measures) weights[i] = layer_weight(d.rule, states + i * p.heads_kv, p, i);
        fixed += layer_part(states + i * p.heads_kv, p.heads_kv, weights[i], &layers[i]);
    }
    fixed = block_total(fixed, room);
    if (d.rule.pool == KERN_POOL_SEQUENCE) return;
    __syncthreads();
    if (threadIdx.x == 0) share_split(layers, p.layers, (int64_t)p.streams * d.keep - fixed);
    __syncthreads();
    for (int i = threadIdx.x; i < p.layers; i += (int)blockDim.x) {
        int64_t places = layers[i].part;
        const struct stream_state *mine = states + i * p.heads_kv;
        for (int head = 0; head < p.heads_kv; head++) places += mine[head].fixed;
        if (d.rule.pool == KERN_POOL_LAYER)
            set_places(&a.cuts[d.first.first_cut + i], places);
        else
            split_heads(mine, p.heads_kv, places, heads + i * p.heads_kv,
                        &a.cuts[d.first.first_cut + i * p.heads_kv]);
    }
}

/* ---- Floors -----------------------------------------------------------------------------------
 */

/* Block (state): its entries among the best of its pool. */
static __global__ void k_count_best(const struct evict_args a) {
    SHARED_MEMORY(shared);
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    struct stream_state &state = a.streams.states[blockIdx.x];
    const struct due &d = a.due[state.subject];
    if (d.second.groups == 0) return;
    const int32_t *table = pages_table(p, d.slot, state.stream);
    const struct cut cut = a.cuts[d.first.first_cut + state.stream / d.first.group_streams];
    int mine = 0;
    for (int i = threadIdx.x; i < state.length; i += (int)blockDim.x)
        mine += compare_rank(p, pages_side(p, table, i), state.stream, cut, FIELDS) >= 0;
    mine = block_total(mine, (int *)shared);
    if (threadIdx.x == 0) state.best = mine;
}

/* Ada-KV, one layer: see kern_rule.floor. */
static __device__ void floor_by_count(const struct stream_state *states, int heads, double floor,
                                      int64_t room, struct share_part *parts, struct cut *cuts) {
    double even = __ddiv_rn((double)room, heads);
    for (int i = 0; i < heads; i++) {
        parts[i] = {};
        parts[i].weight =
            __dadd_rn(__dmul_rn(__dadd_rn(1, -floor), states[i].best), __dmul_rn(floor, even));
        parts[i].most = states[i].length;
    }
    share_split(parts, heads, room);
    for (int i = 0; i < heads; i++) set_places(&cuts[i], parts[i].part);
}

/* Block (due): the places of every stream by itself. */
static __global__ void k_share_floor(const struct evict_args a) {
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    const struct due &d = a.due[blockIdx.x];
    if (d.second.groups == 0) return;
    const struct stream_state *states =
        a.streams.states + a.streams.subjects[blockIdx.x].state_first;
    struct share_part *parts = a.parts + d.first_part + p.layers;
    struct cut *cuts = a.cuts + d.second.first_cut;
    if (d.rule.pool == KERN_POOL_LAYER) {
        for (int i = threadIdx.x; i < p.layers; i += (int)blockDim.x) {
            int at = i * p.heads_kv;
            floor_by_count(states + at, p.heads_kv, (double)d.rule.floor,
                           a.cuts[d.first.first_cut + i].room, parts + at, cuts + at);
        }
        return;
    }
    int64_t all = (int64_t)p.streams * d.keep;
    int64_t least = (all - a.cuts[d.first.first_cut].room) / p.streams;
    for (int i = threadIdx.x; i < p.streams; i += (int)blockDim.x) {
        int64_t places = states[i].best + least;
        set_places(&cuts[i], places < states[i].length ? places : states[i].length);
    }
}

/* ---- The host's side --------------------------------------------------------------------------
 */

void share_layers(struct cuda *cuda, const struct evict_args &args, int count, bool density) {
    const size_t room = THREADS / 32 * sizeof(double);
    if (density)
        LAUNCH(cuda->device, k_density, (unsigned)args.streams.state_count, THREADS, room, args);
    LAUNCH(cuda->device, k_share_layers, (unsigned)count, THREADS, room, args);
}

void share_floor(struct cuda *cuda, const struct evict_args &args, int count) {
    LAUNCH(cuda->device, k_count_best, (unsigned)args.streams.state_count, THREADS,
           THREADS / 32 * sizeof(int), args);
    LAUNCH(cuda->device, k_share_floor, (unsigned)count, THREADS, 0, args);
}
