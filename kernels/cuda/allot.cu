/* Splits a sequence's total over layers and streams (kernels/cpu/allot.c is the reference;
 * kernels/kern_rule.h, enum kern_layers and kern_rule.floor, defines the split). Whole numbers
 * equal those of the CPU: kernels/allot.h. A block per sequence; the loop over layers runs in one
 * thread, because it is short and its order matters. */
#include <math.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/evict.cuh"

#define THREADS 256

/* ---- Weights of layers ---- */

/* A thread per state: joins the results of k_look_add for the stream's chunks, for PREFERENCE. */
static __global__ void k_fold_preference(const struct evict_args a) {
    int index = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= a.streams.state_count || pages_failed(a.streams.pages)) return;
    struct stream_state &state = a.streams.states[index];
    const struct due &d = a.due[state.subject];
    if (!d.measures || d.rule.layers != KERN_LAYERS_PREFERENCE) return;
    double entropy = 0, variance = 0;
    for (int chunk = 0; chunk < state.work; chunk++) {
        entropy += a.sums[2 * (int64_t)(state.item + chunk)];
        variance += a.sums[2 * (int64_t)(state.item + chunk) + 1];
    }
    state.measured[0] = entropy;
    state.measured[1] = variance;
}

/* A layer of a sequence: the model's streams in it, and those on this rank. */
struct layer {
    const struct streams_args &streams;
    int first, index; /* state of the sequence's first stream; the layer's number */
    struct layer_place place;
};

static __device__ __forceinline__ struct layer layer_at(const struct streams_args &streams,
                                                        int first, int index) {
    return {streams, first, index, streams.pages.layer_places[index]};
}

static __device__ __forceinline__ const struct stream_state &head_of(const struct layer &l,
                                                                     int head) {
    return model_state(l.streams, l.first, l.index, head);
}

static __device__ double preference(const struct kern_rule &rule, const struct layer &l) {
    double entropy = 0, variance = 0;
    for (int i = 0; i < l.place.heads_model; i++) {
        entropy += head_of(l, i).measured[0];
        variance += head_of(l, i).measured[1];
    }
    return pow(entropy, 1 / (double)rule.tau1) * pow(variance, 1 / (double)rule.tau2);
}

/* Linear with mean 1; the last layer's weight is 1 / beta. */
static __device__ double pyramid(const struct kern_rule &rule, int layer, int last) {
    double low = 1 / (double)rule.pyramid_beta;
    if (last <= 0) return 1;
    double step = __ddiv_rn(__dmul_rn(__dadd_rn(2, -__dmul_rn(2, low)), layer), last);
    return __dadd_rn(__dadd_rn(2, -low), -step);
}

static __device__ float layer_weight(const struct kern_rule &rule, const struct layer &l) {
    if (rule.layers == KERN_LAYERS_PREFERENCE) return (float)preference(rule, l);
    if (rule.layers != KERN_LAYERS_PYRAMID) return 1;
    return (float)pyramid(rule, l.index, l.streams.pages.layers - 1);
}

/* ---- Allotments of layers and streams ---- */

static __device__ void set_allotment(struct cutoff *cutoff, int64_t allotment) {
    cutoff->wanted = cutoff->room = cutoff->open = (uint32_t)allotment;
}

/* Stores the allotments of a layer's streams on this rank. */
static __device__ void set_own_allotments(const struct layer_place &place,
                                          const struct allot_part *parts, struct cutoff *cutoffs) {
    for (int i = 0; i < place.heads; i++)
        set_allotment(&cutoffs[i], parts[place.head_first + i].part);
}

/* Splits a layer's allotment over its heads, evenly; a thread per layer. */
static __device__ void split_heads(const struct layer &l, int64_t room, struct allot_part *parts,
                                   struct cutoff *cutoffs) {
    int heads = l.place.heads_model;
    for (int i = 0; i < heads; i++) {
        parts[i] = {};
        parts[i].weight = 1;
        parts[i].most = head_of(l, i).length;
        parts[i].least = head_of(l, i).fixed;
    }
    allot_split(parts, heads, room);
    set_own_allotments(l.place, parts, cutoffs);
}

/* The layer's unprotected entries as a part to split. Returns the number of protected ones. */
static __device__ int64_t layer_part(const struct layer &l, float weight, struct allot_part *part) {
    int64_t fixed = 0, held = 0;
    for (int i = 0; i < l.place.heads_model; i++) {
        fixed += head_of(l, i).fixed;
        held += head_of(l, i).length;
    }
    *part = {};
    part->weight = (double)weight;
    part->most = held - fixed;
    return fixed;
}

/* Block (due): measures weights unless the sequence has them, then computes the allotments. */
static __global__ void k_allot_layers(const struct evict_args a) {
    SHARED_MEMORY(shared);
    int64_t *room = (int64_t *)shared;
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    const struct due &d = a.due[blockIdx.x];
    if (d.rule.layers == KERN_LAYERS_UNIFORM) return;
    int first = a.streams.subjects[blockIdx.x].state_first;
    struct allot_part *layers = a.parts + d.first_part, *heads = layers + p.layers;
    float *weights = p.weights + (int64_t)d.slot * p.layers;
    int64_t fixed = 0, all = (int64_t)p.model_streams * d.budget;
    for (int i = threadIdx.x; i < p.layers; i += (int)blockDim.x) {
        const struct layer layer = layer_at(a.streams, first, i);
        if (d.measures) weights[i] = layer_weight(d.rule, layer);
        fixed += layer_part(layer, weights[i], &layers[i]);
    }
    fixed = block_total(fixed, room);
    if (d.rule.scope == KERN_SCOPE_SEQUENCE) return;
    __syncthreads();
    if (threadIdx.x == 0) allot_split(layers, p.layers, all - fixed);
    __syncthreads();
    for (int i = threadIdx.x; i < p.layers; i += (int)blockDim.x) {
        const struct layer layer = layer_at(a.streams, first, i);
        int64_t allotment = layers[i].part;
        for (int head = 0; head < layer.place.heads_model; head++)
            allotment += head_of(layer, head).fixed;
        if (d.rule.scope == KERN_SCOPE_LAYER)
            set_allotment(&a.cutoffs[d.first.first_cutoff + i], allotment);
        else
            split_heads(layer, allotment, heads + layer.place.model_first,
                        &a.cutoffs[d.first.first_cutoff + layer.place.first]);
    }
}

/* ---- Floors ---- */

/* Block (state): counts the stream's entries among the best of its scope. */
static __global__ void k_count_best(const struct evict_args a) {
    SHARED_MEMORY(shared);
    if (pages_failed(a.streams.pages)) return;
    struct stream_state &state = a.streams.states[blockIdx.x];
    const struct pages p = pages_with(a.streams.pages, state.place.slots);
    const struct due &d = a.due[state.subject];
    const int32_t *table = pages_table(p, d.slot, state.stream);
    const struct cutoff cutoff = first_cutoff(a, d, state);
    int mine = 0;
    for (int i = threadIdx.x; i < state.length; i += (int)blockDim.x)
        mine += compare_rank(p, pages_side(p, table, i), state.stream, cutoff, FIELDS) >= 0;
    mine = block_total(mine, (int *)shared);
    if (threadIdx.x == 0) state.best = mine;
}

/* Ada-KV, one layer: see kern_rule.floor. */
static __device__ void floor_by_count(const struct layer &l, int64_t floor, int64_t room,
                                      struct allot_part *parts, struct cutoff *cutoffs) {
    int heads = l.place.heads_model;
    for (int i = 0; i < heads; i++) {
        const struct stream_state &state = head_of(l, i);
        parts[i] = {};
        parts[i].weight = (double)((RULE_FLOOR_PARTS - floor) * state.best * heads + floor * room);
        parts[i].most = state.length;
    }
    allot_split(parts, heads, room);
    set_own_allotments(l.place, parts, cutoffs);
}

/* Block (due): the allotment of every stream. */
static __global__ void k_allot_floor(const struct evict_args a) {
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    const struct due &d = a.due[blockIdx.x];
    if (d.second.scopes == 0) return;
    int first = a.streams.subjects[blockIdx.x].state_first;
    const struct stream_state *states = a.streams.states + first;
    struct allot_part *parts = a.parts + d.first_part + p.layers;
    struct cutoff *cutoffs = a.cutoffs + d.second.first_cutoff;
    if (d.rule.scope == KERN_SCOPE_LAYER) {
        for (int i = threadIdx.x; i < p.layers; i += (int)blockDim.x) {
            const struct layer layer = layer_at(a.streams, first, i);
            floor_by_count(layer, d.floor, a.cutoffs[d.first.first_cutoff + i].room,
                           parts + layer.place.model_first, cutoffs + layer.place.first);
        }
        return;
    }
    int64_t streams = p.model_streams;
    int64_t least = (streams * d.budget - a.cutoffs[d.first.first_cutoff].room) / streams;
    for (int i = threadIdx.x; i < p.streams; i += (int)blockDim.x) {
        int64_t allotment = states[i].best + least;
        set_allotment(&cutoffs[i], allotment < states[i].length ? allotment : states[i].length);
    }
}

/* ---- The host's side ---- */

void allot_layers(struct cuda *cuda, const struct evict_args &args, int count, bool preference) {
    const size_t room = THREADS / 32 * sizeof(double);
    unsigned states = (unsigned)args.streams.state_count;
    if (preference)
        LAUNCH(cuda->device, k_fold_preference, blocks_for(states, THREADS), THREADS, 0, args);
    streams_tell(cuda, args.streams);
    LAUNCH(cuda->device, k_allot_layers, (unsigned)count, THREADS, room, args);
}

void allot_count(struct cuda *cuda, const struct evict_args &args) {
    LAUNCH(cuda->device, k_count_best, (unsigned)args.streams.state_count, THREADS,
           THREADS / 32 * sizeof(int), args);
    streams_tell(cuda, args.streams);
}

void allot_floor(struct cuda *cuda, const struct evict_args &args, int count) {
    LAUNCH(cuda->device, k_allot_floor, (unsigned)count, THREADS, 0, args);
}
