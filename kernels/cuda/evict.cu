/* Eviction: score every entry, find the lowest-ranking entry that is kept, and run all stages in
 * order.
 *
 * An entry's rank is (key, pos, ~stream), compared in this order, higher is kept: the score as an
 * order-preserving integer, then the newer position, then the lower layer and head. Entries compete
 * in scopes: a stream, the heads of a layer, or the whole sequence. The cutoff of every scope is
 * found by radix select, eleven bits at a time: a histogram of the entries that agree with the
 * known bits, then the bin that contains the wanted rank. Three passes decide the key; the passes
 * over positions and streams have work only where a tie crosses the cutoff.
 *
 * No list of kept entries is stored: each stage that needs to know repeats the comparison. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/evict.cuh"
#include "kernels/cuda/score.cuh"

#define THREADS      256
#define BINS         2048
#define SCOPE_BLOCKS 32 /* blocks of a select, for scopes of many streams */

/* ---- Keys ---- */

static __device__ __forceinline__ bool is_protected(const struct due &d, int32_t pos) {
    return pos < d.rule.sinks || pos >= d.tokens - d.rule.recent;
}

static __device__ __forceinline__ uint32_t entry_key(const struct due &d, int32_t pos,
                                                     float log_beta) {
    if (is_protected(d, pos)) return KEY_PROTECTED;
    if (d.rule.score == KERN_SCORE_RECENCY) return KEY_LEAST + (uint32_t)pos;
    int32_t age = d.tokens - pos;
    return float_key(d.rule.published ? cuda_score_published(log_beta, age, d.rule.horizon)
                                      : cuda_score_retention(log_beta, age, d.rule.horizon));
}

/* F of kern_rule.h, enum kern_history. */
static __device__ __forceinline__ float remembered(const struct kern_observe &observe, float past,
                                                   float now) {
    float fresh = observe.history == KERN_HISTORY_SUM ? 0 : now, decay = observe.decay;
    float old = __fmul_rn(decay, past < 0 ? fresh : past);
    if (observe.history == KERN_HISTORY_NONE) return now;
    if (observe.history == KERN_HISTORY_MAX) return old > now ? old : now;
    if (observe.history == KERN_HISTORY_MEAN)
        return __fadd_rn(old, __fmul_rn(__fadd_rn(1, -decay), now));
    return __fadd_rn(old, now);
}

/* The scores that candidates will store: x, divided by the largest, combined with the stored score.
 * fresh[i] belongs to thread i % blockDim.x until the next barrier. */
static __device__ void refresh(const struct evict_args &a, const struct due &d,
                               const struct stream_state &state, const struct pages &p,
                               const int32_t *table, double *room) {
    const struct kern_observe &observe = d.rule.observe;
    float *fresh = a.fresh + state.first, most = 0;
    int threads = (int)blockDim.x;
    for (int i = threadIdx.x; i < state.candidates; i += threads) {
        if (observe.window == 0) fresh[i] = p.score[pages_side(p, table, i)];
        most = fmaxf(most, fresh[i]);
    }
    most = observe.normalise ? block_most(most, (float *)room) : 0;
    for (int i = threadIdx.x; i < state.candidates; i += threads) {
        float now = most > 0 ? __fdiv_rn(fresh[i], most) : fresh[i];
        fresh[i] = remembered(observe, p.score[pages_side(p, table, i)], now);
    }
}

static __device__ float smoothed(const struct kern_observe &observe, const float *x, int i,
                                 int count) {
    int side = observe.smooth_width / 2, from = i < side ? 0 : i - side;
    int to = count - i <= side ? count : i + side + 1;
    if (observe.smooth == KERN_SMOOTH_NONE || observe.smooth_first) return x[i];
    float most = x[from], sum = 0;
    for (int j = from; j < to; j++) {
        sum = __fadd_rn(sum, x[j]);
        most = fmaxf(most, x[j]);
    }
    return observe.smooth == KERN_SMOOTH_MAX ? most : __fdiv_rn(sum, (float)observe.smooth_width);
}

/* A candidate's score from attention and redundancy. */
static __device__ float judge(const struct evict_args &a, const struct due &d,
                              const struct stream_state &state, int i) {
    float x = smoothed(d.rule.observe, a.fresh + state.first, i, state.candidates);
    if (!d.rule.redundancy.on) return x;
    float lambda = d.rule.redundancy.lambda, alike = a.alike[state.first + i];
    return __fadd_rn(__fmul_rn(lambda, x), -__fmul_rn(__fadd_rn(1, -lambda), alike));
}

/* Entries of the stream up to this position have expired (struct kern_evict); -1: none. */
static __device__ __forceinline__ int32_t expired_up_to(const struct evict_args &a,
                                                        const struct due &d, int layer) {
    int32_t visible = a.attended[layer].sliding_window;
    return visible > 0 && d.tokens >= visible ? d.tokens - visible : -1;
}

/* Block (state). */
static __global__ void k_score(const struct evict_args a) {
    SHARED_MEMORY(shared);
    if (pages_failed(a.streams.pages)) return;
    const struct stream_state &state = a.streams.states[blockIdx.x];
    const struct pages p = pages_with(a.streams.pages, state.place.slots);
    const struct due &d = a.due[state.subject];
    const int32_t *table = pages_table(p, d.slot, state.stream);
    bool attention = d.rule.score == KERN_SCORE_ATTENTION;
    const int32_t expired = expired_up_to(a, d, state.place.layer);
    if (attention) refresh(a, d, state, p, table, (double *)shared);
    __syncthreads();
    for (int i = threadIdx.x; i < state.length; i += (int)blockDim.x) {
        int64_t side = pages_side(p, table, i);
        if (p.pos[side] <= expired)
            p.keys[side] = KEY_EXPIRED;
        else if (!attention)
            p.keys[side] = entry_key(d, p.pos[side], p.log_beta[side]);
        else if (is_protected(d, p.pos[side]) || i >= state.candidates)
            p.keys[side] = KEY_PROTECTED;
        else
            p.keys[side] = float_key(judge(a, d, state, i));
    }
}

/* ---- The cutoff ---- */

struct pass {
    int field, shift, bits;
};

/* Adds the stream's entries that agree with the known bits of the cutoff to the block's histogram.
 */
static __device__ void count_stream(const struct pages &all, int slot, int stream,
                                    const struct cutoff &cutoff, struct pass pass, uint32_t *bins) {
    const struct pages p = pages_of_stream(all, stream);
    uint32_t mask = (1u << pass.bits) - 1, decided = ~((2u << (pass.shift + pass.bits - 1)) - 1);
    int length = *pages_length(p, slot, stream);
    const int32_t *table = pages_table(p, slot, stream);
    for (int i = threadIdx.x; i < length; i += (int)blockDim.x) {
        int64_t side = pages_side(p, table, i);
        if (compare_rank(p, side, stream, cutoff, pass.field) != 0) continue;
        uint32_t value = rank_field(p, side, stream, pass.field);
        if ((value & decided) == (cutoff.value[pass.field] & decided))
            atomicAdd(&bins[value >> pass.shift & mask], 1u);
    }
}

/* Keeps nothing: a cutoff above everything. */
static __device__ void keep_nothing(struct cutoff *cutoff) {
    for (int f = 0; f < FIELDS; f++) cutoff->value[f] = 0xffffffffu;
    cutoff->done = 1;
}

/* Where other ranks' entries compete, too, only the rank that speaks for a head counts its entries,
 * until it is capped. */
static __device__ __forceinline__ bool competes(const struct evict_args &a, const struct contest &c,
                                                const struct cutoff &cutoff) {
    return !c.joint || (a.speaks && !(cutoff.capped & a.own));
}

/* Narrows the cutoff to one bin. The first pass sees every entry of the scope, so it also finds out
 * whether any entry must be evicted. */
static __device__ void pick_bin(struct cutoff *cutoff, uint32_t *bins, struct pass pass, bool first,
                                uint32_t *room, int *found) {
    uint32_t mine = 0, all, before;
    if (first) {
        for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x) mine += bins[i];
        block_scan(mine, room, &all);
        bool none = cutoff->wanted == 0;
        if (all <= cutoff->wanted || none) {
            __syncthreads();
            if (threadIdx.x == 0 && none) keep_nothing(cutoff);
            if (threadIdx.x == 0) cutoff->done = 1; /* value 0: below everything */
            return;
        }
    }
    uint32_t wanted = cutoff->wanted;
    int bin = block_pick<BINS>(bins, wanted, room, found, &before);
    if (threadIdx.x != 0) return;
    cutoff->value[pass.field] |= (uint32_t)bin << pass.shift;
    cutoff->wanted = wanted - before;
    if (bins[bin] == wanted - before)
        cutoff->done = 1; /* later fields: 0, all entries that agree are kept */
}

static __device__ void add_bins(const uint32_t *mine, uint32_t *all) {
    for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x)
        if (mine[i]) atomicAdd(&all[i], mine[i]);
}

/* Adds the histograms of a scope's blocks; the last block to arrive has the total. */
static __device__ bool gather_bins(struct cutoff *cutoff, uint32_t *mine, uint32_t *all, int blocks,
                                   int *found) {
    add_bins(mine, all);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *found = (int)atomicAdd(&cutoff->blocks, 1u);
    __syncthreads();
    bool last = *found == blocks - 1;
    __syncthreads();
    if (!last) return false;
    for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x) {
        mine[i] = *(volatile uint32_t *)&all[i];
        all[i] = 0;
    }
    if (threadIdx.x == 0) cutoff->blocks = 0;
    __syncthreads();
    return true;
}

/* Streams that follow each other. */
struct stream_range {
    int first, count;
};

/* The streams of a scope. */
static __device__ __forceinline__ struct stream_range
streams_of_scope(const struct pages &p, const struct contest &c, int scope) {
    if (c.scope == KERN_SCOPE_STREAM) return {scope, 1};
    if (c.scope == KERN_SCOPE_SEQUENCE) return {0, p.streams};
    return {p.layer_places[scope].first, p.layer_places[scope].heads};
}

enum which { WHICH_FIRST, WHICH_SECOND, WHICH_OWN, WHICH_COUNT };

static __device__ __forceinline__ const struct contest &contest_of(const struct due &d, int which) {
    const struct contest *all[WHICH_COUNT] = {&d.first, &d.second, &d.own};
    return *all[which];
}

/* Block (scope * scope_blocks + part, due). The last block of a scope to arrive picks the bin,
 * unless other ranks' entries compete, too. */
static __global__ void k_select(const struct evict_args a, struct pass pass, bool first,
                                int which) {
    SHARED_MEMORY(shared);
    uint32_t *mine = (uint32_t *)shared, *room = mine + BINS;
    int *found = (int *)(room + THREADS / 32);
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    const struct due &d = a.due[blockIdx.y];
    const struct contest c = contest_of(d, which);
    if ((int)blockIdx.x >= c.scopes * c.scope_blocks) return;
    int scope = (int)blockIdx.x / c.scope_blocks, part = (int)blockIdx.x % c.scope_blocks;
    struct cutoff *cutoff = &a.cutoffs[c.first_cutoff + scope];
    if (cutoff->done || !competes(a, c, *cutoff)) return;
    for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x) mine[i] = 0;
    __syncthreads();
    const struct stream_range streams = streams_of_scope(p, c, scope);
    for (int s = part; s < streams.count; s += c.scope_blocks)
        count_stream(p, d.slot, streams.first + s, *cutoff, pass, mine);
    __syncthreads();
    if (c.joint) {
        add_bins(mine, a.joint_bins + (c.first_bins + scope) * BINS);
        return;
    }
    if (c.scope_blocks > 1 &&
        !gather_bins(cutoff, mine, a.bins + (c.first_bins + scope) * BINS, c.scope_blocks, found))
        return;
    pick_bin(cutoff, mine, pass, first, room, found);
}

/* Block (scope, due): the histograms of all ranks have been added up. */
static __global__ void k_pick(const struct evict_args a, struct pass pass, bool first) {
    SHARED_MEMORY(shared);
    uint32_t *mine = (uint32_t *)shared, *room = mine + BINS;
    int *found = (int *)(room + THREADS / 32);
    if (pages_failed(a.streams.pages)) return;
    const struct contest c = a.due[blockIdx.y].first;
    if (!c.joint || (int)blockIdx.x >= c.scopes) return;
    struct cutoff *cutoff = &a.cutoffs[c.first_cutoff + blockIdx.x];
    uint32_t *all = a.joint_bins + (c.first_bins + blockIdx.x) * BINS;
    if (cutoff->done) return;
    for (int i = threadIdx.x; i < BINS; i += (int)blockDim.x) {
        mine[i] = all[i];
        all[i] = 0;
    }
    __syncthreads();
    pick_bin(cutoff, mine, pass, first, room, found);
}

/* ---- The cap of a rank ---- */

/* Each rank's entries of a scope. */
struct rank_part {
    int64_t kept, fixed;
};

static __device__ void rank_parts(const struct evict_args &a, const struct due &d, int index,
                                  int scope, struct rank_part parts[COMM_RANKS_MAX]) {
    const struct pages &p = a.streams.pages;
    const bool one = d.first.scope == KERN_SCOPE_LAYER;
    int first = a.streams.subjects[index].state_first, end = one ? scope + 1 : p.layers;
    for (int r = 0; r < COMM_RANKS_MAX; r++) parts[r] = {0, 0};
    for (int layer = one ? scope : 0; layer < end; layer++)
        for (int head = 0; head < p.layer_places[layer].heads_model; head++) {
            const struct stream_state &state = model_state(a.streams, first, layer, head);
            struct rank_part &part =
                parts[shard_owner(a.streams.ranks, p.layer_places[layer].heads_model, head)];
            part.kept += state.best;
            part.fixed += state.fixed;
        }
}

/* A thread per (scope, due), in blocks of one: ranks above the scope's limit keep `limit` of their
 * own entries; the others compete for the rest of the allotment. */
static __global__ void k_cap(const struct evict_args a) {
    const struct pages &p = a.streams.pages;
    const struct due &d = a.due[blockIdx.y];
    if (pages_failed(p) || !d.first.joint || (int)blockIdx.x >= d.first.scopes) return;
    struct cutoff *cutoff = &a.cutoffs[d.first.first_cutoff + blockIdx.x];
    struct rank_part parts[COMM_RANKS_MAX];
    rank_parts(a, d, blockIdx.y, blockIdx.x, parts);
    int ranks = a.streams.ranks, sharing = ranks < p.heads_model ? ranks : p.heads_model;
    uint32_t before = cutoff->capped;
    int64_t limit = (int64_t)((double)a.cap * (double)cutoff->room / sharing);
    for (int r = 0; r < ranks; r++)
        if (parts[r].fixed > limit) limit = parts[r].fixed;
    cutoff->limit = (uint32_t)limit;
    for (int r = 0; r < ranks; r++) {
        if (cutoff->capped >> r & 1 || parts[r].kept <= limit) continue;
        cutoff->capped |= 1u << r;
        cutoff->open -= (uint32_t)limit;
    }
    if (before == 0 && cutoff->capped != 0) atomicAdd(&p.state->hits, 1ull);
    if (before != cutoff->capped) *a.changed = 1;
}

/* The same threads: scopes start again, or, where this rank has been capped, the rank by itself. */
static __global__ void k_reopen(const struct evict_args a, bool own) {
    const struct due &d = a.due[blockIdx.y];
    if (!d.first.joint || (int)blockIdx.x >= d.first.scopes) return;
    struct cutoff *cutoff = &a.cutoffs[d.first.first_cutoff + blockIdx.x];
    struct cutoff *to = own ? &a.cutoffs[d.own.first_cutoff + blockIdx.x] : cutoff;
    uint32_t allotment = own ? cutoff->limit : cutoff->open;
    for (int f = 0; f < FIELDS; f++) to->value[f] = 0;
    to->done = 0;
    to->wanted = allotment;
}

/* ---- The host's side ---- */

int op_rule_check(const struct kern_rule *rule, struct fault *fault) {
    if (rule->merge != KERN_MERGE_NONE)
        return fault_set(fault, ERR_UNSUPPORTED, "merge",
                         "evicted entries are not merged on this device");
    if (rule->layers == KERN_LAYERS_DENSITY)
        return fault_set(fault, ERR_UNSUPPORTED, "layers",
                         "layers do not share by density on this device");
    if (rule->observe.global)
        return fault_set(fault, ERR_UNSUPPORTED, "observe.global",
                         "the attention of all queries and of a window are not combined on this "
                         "device");
    if (rule->redundancy.on && rule->redundancy.measure == KERN_MEASURE_LAG)
        return fault_set(fault, ERR_UNSUPPORTED, "redundancy.measure",
                         "entries are not compared with later ones on this device");
    if (rule->observe.expect > 0)
        return fault_set(fault, ERR_UNSUPPORTED, "observe.expect",
                         "the queries to come are not estimated on this device");
    return 0;
}

bool rule_fits(const struct cuda *cuda, const struct kern_rule *rule) {
    if (op_rule_check(rule, NULL)) return false;
    return !cuda->pages.latent || !rule_reads_keys(rule);
}

/* Requirements of the rules of the current sequences. */
struct wants {
    bool attention, window, preference, layers, redundancy, floor, joint, cap;
};

/* The host's lists of an eviction, and the addresses of their copies. */
struct lists {
    struct due *dues;
    struct subject *subjects;
    struct look *looks, *measures; /* [count] each: looks, and CAKE's */
    int32_t *positions;            /* [count][KERN_WINDOW_MAX] */
    struct cutoff *cutoffs;
    size_t cutoff_count, bin_scopes, joint_scopes;
    unsigned blocks[WHICH_COUNT]; /* blocks of a select */
};

static float least_score(const struct kern_rule *rule) {
    return rule->score == KERN_SCORE_RETENTION && rule->retain > 0 ? logf(rule->retain) : -INFINITY;
}

/* Does the rule observe the window's queries? */
static bool asks_window(const struct kern_rule *rule) {
    return rule->score == KERN_SCORE_ATTENTION && rule->observe.window > 0;
}

/* A contest whose scopes have an allotment for each of their streams in the model, and `more`. */
static struct contest make_contest(const struct cuda *cuda, struct lists *l, enum which which,
                                   enum kern_scope scope, int64_t each, int64_t more) {
    const struct pages *p = &cuda->pages;
    const bool one = scope == KERN_SCOPE_STREAM, layer = scope == KERN_SCOPE_LAYER;
    const int most = one ? 1 : layer ? p->heads_kv : p->streams; /* streams of a scope */
    struct contest c = {};
    c.scope = scope;
    c.scopes = one ? p->streams : layer ? p->layers : 1;
    c.scope_blocks = most < SCOPE_BLOCKS ? most : SCOPE_BLOCKS;
    c.joint = which == WHICH_FIRST && cuda->comm->ranks > 1 && !one;
    c.first_cutoff = (int64_t)l->cutoff_count;
    size_t *bins = c.joint ? &l->joint_scopes : &l->bin_scopes;
    c.first_bins = (int64_t)*bins;
    if (c.joint || c.scope_blocks > 1) *bins += (size_t)c.scopes;
    for (int g = 0; g < c.scopes; g++) {
        struct cutoff *cutoff = &l->cutoffs[l->cutoff_count++];
        const int streams = one ? 1 : layer ? cuda->layers[g].heads_model : p->model_streams;
        *cutoff = {};
        cutoff->wanted = cutoff->room = cutoff->open = (uint32_t)(streams * each + more);
    }
    unsigned blocks = (unsigned)(c.scopes * c.scope_blocks);
    if (blocks > l->blocks[which]) l->blocks[which] = blocks;
    return c;
}

/* The contests of a sequence: one, and with a floor a second one, each stream by itself. Allotments
 * are those of the model's streams, on all ranks. */
static void make_contests(const struct cuda *cuda, struct lists *l, struct due *d) {
    const struct kern_rule *rule = &d->rule;
    const int64_t streams = cuda->pages.model_streams, all = streams * d->budget;
    const bool floors = rule->floor > 0 && rule->scope != KERN_SCOPE_STREAM;
    int64_t more = 0;
    if (floors && rule->scope == KERN_SCOPE_SEQUENCE)
        more = -(rule_floor(rule) * all / (RULE_FLOOR_PARTS * streams) * streams);
    d->first = make_contest(cuda, l, WHICH_FIRST, rule->scope, d->budget, more);
    if (floors) d->second = make_contest(cuda, l, WHICH_SECOND, KERN_SCOPE_STREAM, 0, 0);
    if (d->first.joint && cuda->options.rank_cap > 0)
        d->own = make_contest(cuda, l, WHICH_OWN, rule->scope, 0, 0);
}

static struct due make_due(const struct cuda *cuda, const struct kern_evict *from, int index) {
    struct due d = {};
    d.rule = *from->rule;
    d.rule.redundancy.on = d.rule.redundancy.on && d.rule.score == KERN_SCORE_ATTENTION;
    d.floor = rule_floor(from->rule);
    d.slot = from->slot;
    d.tokens = from->tokens;
    d.budget = from->budget;
    float least = least_score(from->rule);
    d.least = least == -INFINITY ? KEY_LEAST : float_key(least);
    d.remembers = asks_window(from->rule) && from->rule->observe.history != KERN_HISTORY_NONE;
    d.measures = !cuda->slots[from->slot].measured;
    d.first_part = (int64_t)index * (cuda->options.layers + cuda->pages.model_streams);
    return d;
}

/* The observations of one sequence: for its scores, and for its layers' weights. */
static void make_looks(const struct cuda *cuda, struct lists *l, const struct due *d, int index) {
    int32_t *positions = l->positions + index * KERN_WINDOW_MAX;
    struct look *look = &l->looks[index], *measure = &l->measures[index];
    look_at_window(&cuda->slots[d->slot], d->tokens, look, positions);
    look->layer_stride = look->modulus;
    *measure = *look;
    look->observe = d->rule.observe;
    look->kind = asks_window(&d->rule) ? LOOK_WINDOW : LOOK_NONE;
    measure->observe.group = KERN_GROUP_EACH;
    measure->observe.reduce = KERN_REDUCE_MEAN_VAR;
    measure->kind =
        d->measures && d->rule.layers == KERN_LAYERS_PREFERENCE ? LOOK_PREFERENCE : LOOK_NONE;
}

static void note_wants(struct wants *w, const struct due *d) {
    const struct kern_rule *rule = &d->rule;
    w->attention |= rule->score == KERN_SCORE_ATTENTION;
    w->window |= asks_window(rule);
    w->preference |= d->measures && rule->layers == KERN_LAYERS_PREFERENCE;
    w->layers |= rule->layers != KERN_LAYERS_UNIFORM;
    w->redundancy |= rule->redundancy.on;
    w->floor |= d->second.scopes > 0;
    w->joint |= d->first.joint;
    w->cap |= d->own.scopes > 0;
}

static void *list(size_t count, size_t size) {
    return mem_must_alloc(count, size);
}

static struct lists make_lists(const struct cuda *cuda, const struct kern_evict *due, int count,
                               struct wants *wants) {
    size_t n = (size_t)count, streams = (size_t)cuda->pages.streams;
    struct lists l = {};
    l.dues = static_cast<struct due *>(list(n, sizeof *l.dues));
    l.subjects = static_cast<struct subject *>(list(n, sizeof *l.subjects));
    l.looks = static_cast<struct look *>(list(n, sizeof *l.looks));
    l.measures = static_cast<struct look *>(list(n, sizeof *l.measures));
    l.positions = static_cast<int32_t *>(list(n * KERN_WINDOW_MAX, sizeof *l.positions));
    l.cutoffs = static_cast<struct cutoff *>(list(WHICH_COUNT * n * streams, sizeof *l.cutoffs));
    for (int i = 0; i < count; i++) {
        struct due *d = &l.dues[i];
        *d = make_due(cuda, &due[i], i);
        make_contests(cuda, &l, d);
        make_looks(cuda, &l, d, i);
        note_wants(wants, d);
        l.subjects[i] = {d->slot, d->rule.sinks,       d->tokens - d->rule.recent,
                         0,       cuda->pages.streams, i * cuda->pages.streams};
    }
    return l;
}

static void close_lists(struct lists *l) {
    void *lists[] = {l->dues, l->subjects, l->looks, l->measures, l->positions, l->cutoffs};
    for (void *list : lists) mem_free(list);
}

/* ---- Rooms ---- */

/* Everything that an eviction needs while it runs. */
struct stages {
    struct evict_args args;
    struct look_args look;       /* .looks: observations for scores */
    const struct look *measures; /* observations for layer weights */
    struct look_sizes sizes;
    struct wants wants;
    size_t joint_bins; /* elements */
    unsigned blocks[WHICH_COUNT];
    int count;
};

/* Upper bounds of what a slot has when it evicts. */
struct holding {
    int64_t entries;
    int queries;
};

static struct holding holding_now(const struct cuda *cuda, const struct lists *l, int index) {
    int slot = l->dues[index].slot;
    return {cuda->slots[slot].entries_most, l->looks[index].query_count};
}

/* With all pages that the slot will have. */
static struct holding holding_most(const struct cuda *cuda, int slot,
                                   const struct kern_rule *rule) {
    return {cuda->slots[slot].pages * cuda->pages.page_slots, rule_window(rule)};
}

/* Computes the sizes that do not depend on memory, and the looks' parts of arrays. `most`: what the
 * only sequence may have later; NULL: what all have now. */
static void measure_stages(const struct cuda *cuda, struct lists *l, struct stages *s,
                           const struct holding *most) {
    struct streams_args *streams = &s->args.streams;
    streams->pages = cuda->pages;
    streams->state_count = s->count * cuda->pages.streams;
    streams->ranks = cuda->comm->ranks;
    streams->rank = cuda->comm->rank;
    s->args.own = 1u << shard_owner(streams->ranks, cuda->pages.heads_model, cuda->shard.first);
    s->args.speaks = cuda->shard.speaks;
    s->args.cap = cuda->options.rank_cap;
    for (int i = 0; i < s->count; i++) {
        const struct holding held = most ? *most : holding_now(cuda, l, i);
        struct look *look = &l->looks[i], *measure = &l->measures[i];
        int64_t items =
            streams_items_max(cuda->pages.streams, held.entries, cuda->options.max_positions);
        streams->entries_max += held.entries;
        streams->items_max += items;
        look->query_count = measure->query_count = held.queries;
        look_place(look, cuda->pages.streams, items, cuda->group_most, &s->sizes);
        measure->partial_first = look->partial_first;
        measure->stats_first = look->stats_first;
        measure->sees_first = look->sees_first;
        if (held.queries > s->look.queries_max) s->look.queries_max = held.queries;
    }
    s->look.group = cuda->group_most;
    s->look.heads_q = cuda->options.heads_q;
    s->look.parts_max = s->look.group;
    if (s->look.queries_max < 1) s->look.queries_max = 1;
    s->look.vectors_max = s->look.queries_max * s->look.group;
    s->look.scale = cuda->scale * LOG2_E;
    s->look.cap = cuda->cap * LOG2_E;
}

static void place_stages(const struct cuda *cuda, const struct lists *l, struct pieces *room,
                         struct stages *s) {
    struct evict_args *a = &s->args;
    const struct wants *w = &s->wants;
    size_t entries = (size_t)a->streams.entries_max, items = (size_t)a->streams.items_max;
    size_t parts = (size_t)(cuda->options.layers + cuda->pages.model_streams) * (size_t)s->count;
    streams_room(room, &a->streams);
    compact_room(room, a);
    a->cutoffs = piece<struct cutoff>(room, l->cutoff_count);
    a->bins = piece<uint32_t>(room, l->bin_scopes * BINS);
    a->joint_bins = piece<uint32_t>(room, l->joint_scopes * BINS);
    a->changed = piece<uint32_t>(room, 1);
    a->parts = piece<struct allot_part>(room, w->layers || w->floor ? parts : 0);
    a->fresh = piece<float>(room, w->attention ? entries : 0);
    a->sums = piece<double>(room, w->preference ? 2 * items : 0);
    a->norm = piece<float>(room, w->redundancy ? entries : 0);
    a->alike = piece<float>(room, w->redundancy ? entries : 0);
    a->forgiven = piece<unsigned long long>(room, w->redundancy ? entries : 0);
    a->totals = piece<float>(room, w->redundancy ? items * (size_t)cuda->options.head_dim : 0);
    s->look.streams = a->streams;
    s->look.fresh = a->fresh;
    s->look.sums = a->sums;
    if (w->window || w->preference) look_room(room, &s->look, &s->sizes);
}

template <class T> static const T *stage(struct cuda *cuda, const T *from, size_t count) {
    return static_cast<const T *>(device_stage(cuda->device, from, count * sizeof *from));
}

/* Copies the lists to the device; false if there is no memory. */
static bool stage_lists(struct cuda *cuda, struct lists *l, struct stages *s) {
    size_t n = (size_t)s->count;
    const int32_t *positions = stage(cuda, l->positions, n * KERN_WINDOW_MAX);
    for (int i = 0; i < s->count; i++)
        l->looks[i].query_pos = l->measures[i].query_pos = positions + i * KERN_WINDOW_MAX;
    s->args.due = stage(cuda, l->dues, n);
    s->args.streams.subjects = s->look.streams.subjects = stage(cuda, l->subjects, n);
    s->look.looks = stage(cuda, l->looks, n);
    s->measures = stage(cuda, l->measures, n);
    s->args.attended = s->look.attended = stage(cuda, cuda->attended, (size_t)cuda->options.layers);
    const struct cutoff *cutoffs = stage(cuda, l->cutoffs, l->cutoff_count);
    if (!positions || !s->args.due || !s->look.looks || !s->measures || !cutoffs ||
        !s->args.attended || !s->args.streams.subjects)
        return false;
    device_copy(cuda->device, s->args.cutoffs, cutoffs, l->cutoff_count * sizeof *cutoffs);
    if (l->bin_scopes)
        device_zero(cuda->device, s->args.bins, l->bin_scopes * BINS * sizeof *s->args.bins);
    s->joint_bins = l->joint_scopes * BINS;
    if (s->joint_bins)
        device_zero(cuda->device, s->args.joint_bins, s->joint_bins * sizeof(uint32_t));
    return true;
}

/* Bytes of the room. */
static size_t size_stages(struct cuda *cuda, struct lists *l, struct stages *s,
                          const struct holding *most) {
    struct pieces room = {};
    measure_stages(cuda, l, s, most);
    place_stages(cuda, l, &room, s);
    return room.used;
}

/* ERR_NOMEM, on all ranks, if there is no memory. */
static int open_stages(struct cuda *cuda, const struct kern_evict *due, int count,
                       struct stages *s) {
    s->count = count;
    struct lists l = make_lists(cuda, due, count, &s->wants);
    memcpy(s->blocks, l.blocks, sizeof s->blocks);
    size_t bytes = size_stages(cuda, &l, s, NULL);
    int rc = join_agree(cuda, room_reserve(cuda, &cuda->select, bytes));
    if (!rc) {
        struct pieces room = {static_cast<char *>(room_take(cuda, &cuda->select, bytes)), 0};
        place_stages(cuda, &l, &room, s);
        rc = join_agree(cuda, stage_lists(cuda, &l, s) ? 0 : ERR_NOMEM);
    }
    close_lists(&l);
    return rc;
}

int evict_reserve(struct cuda *cuda, int slot, const struct kern_rule *rule) {
    const struct kern_evict due = {.slot = slot,
                                   .tokens = cuda->options.max_positions,
                                   .budget = 1,
                                   .rule = rule,
                                   .trace = NULL};
    const struct holding most = holding_most(cuda, slot, rule);
    struct stages s = {};
    s.count = 1;
    struct lists l = make_lists(cuda, &due, 1, &s.wants);
    size_t bytes = size_stages(cuda, &l, &s, &most);
    close_lists(&l);
    return room_reserve(cuda, &cuda->select, bytes);
}

/* ---- The stages ---- */

static void select(struct cuda *cuda, const struct stages &s, enum which which) {
    static const struct pass passes[] = {
        {FIELD_KEY, 21, 11}, {FIELD_KEY, 10, 11}, {FIELD_KEY, 0, 10},    {FIELD_POS, 20, 11},
        {FIELD_POS, 9, 11},  {FIELD_POS, 0, 9},   {FIELD_STREAM, 9, 11}, {FIELD_STREAM, 0, 9}};
    const size_t shared = (BINS + THREADS / 32 + 1) * sizeof(uint32_t);
    dim3 grid(s.blocks[which], (unsigned)s.count);
    for (const struct pass &pass : passes) {
        LAUNCH(cuda->device, k_select, grid, THREADS, shared, s.args, pass, &pass == passes, which);
        if (which != WHICH_FIRST || !s.wants.joint) continue;
        join_reduce(cuda, s.args.joint_bins, s.joint_bins, COMM_U32, COMM_SUM);
        LAUNCH(cuda->device, k_pick, grid, THREADS, shared, s.args, pass, &pass == passes);
    }
}

/* With a cap, repeats the search without the ranks that have reached it, until no rank exceeds it;
 * at most as many rounds as ranks. The host waits; all ranks read the same flags. */
static void cap_scopes(struct cuda *cuda, const struct stages &s) {
    dim3 grid(s.blocks[WHICH_FIRST], (unsigned)s.count);
    uint32_t changed = 1;
    for (int turn = 0; turn < cuda->comm->ranks && changed; turn++) {
        device_zero(cuda->device, s.args.changed, sizeof changed);
        allot_count(cuda, s.args);
        LAUNCH(cuda->device, k_cap, grid, 1, 0, s.args);
        join_reduce(cuda, s.args.changed, 1, COMM_U32, COMM_MAX);
        (void)device_download(cuda->device, &changed, s.args.changed, sizeof changed);
        if (!changed) break;
        LAUNCH(cuda->device, k_reopen, grid, 1, 0, s.args, false);
        select(cuda, s, WHICH_FIRST);
    }
    LAUNCH(cuda->device, k_reopen, grid, 1, 0, s.args, true);
    select(cuda, s, WHICH_OWN);
}

/* Scores all entries. */
static void score(struct cuda *cuda, struct stages *s) {
    const struct wants *w = &s->wants;
    streams_find(cuda, s->args.streams, s->count, cuda->pages.streams);
    streams_plan(cuda, s->args.streams);
    if (w->window) look_all(cuda, s->look);
    if (w->preference) {
        s->look.looks = s->measures;
        look_all(cuda, s->look);
    }
    if (w->redundancy) redundancy_find(cuda, s->args);
    LAUNCH(cuda->device, k_score, (unsigned)s->args.streams.state_count, THREADS,
           THREADS / 32 * sizeof(double), s->args);
}

/* Finds the kept entries. */
static void choose(struct cuda *cuda, const struct stages &s) {
    const struct wants *w = &s.wants;
    if (w->layers) allot_layers(cuda, s.args, s.count, w->preference);
    select(cuda, s, WHICH_FIRST);
    if (w->cap) cap_scopes(cuda, s);
    if (!w->floor) return;
    allot_count(cuda, s.args);
    allot_floor(cuda, s.args, s.count);
    select(cuda, s, WHICH_SECOND);
}

/* Evicts several sequences at once, or one that may share pages. */
static int evict(struct cuda *cuda, const struct kern_evict *due, int count, bool shared) {
    struct stages s = {};
    int rc = open_stages(cuda, due, count, &s);
    if (rc) return rc;
    score(cuda, &s);
    choose(cuda, s);
    compact_count(cuda, s.args);
    if (shared) cache_decide(cuda);
    if (shared) compact_own(cuda, s.args);
    compact_all(cuda, s.args);
    for (int i = 0; i < count; i++) {
        struct slot *slot = &cuda->slots[due[i].slot];
        int64_t most = (int64_t)cuda->pages.model_streams *
                       due[i].budget; /* all kept entries may be on this rank */
        slot->measured = true;
        if (slot->entries_most > most) slot->entries_most = most;
    }
    return 0;
}

/* Sequences without shared pages are evicted together, in runs: shorter ones where
 * there is no memory for all, because the room of one is there (op_prepare). */
static int evict_all(struct cuda *cuda, const struct kern_evict *due, int count) {
    int rc = 0;
    for (int i = 0, n; i < count && !rc; i += n) {
        bool shared = cuda->slots[due[i].slot].shared;
        for (n = 1; !shared && i + n < count && !cuda->slots[due[i + n].slot].shared;) n++;
        do rc = evict(cuda, &due[i], n, shared);
        while (rc == ERR_NOMEM && n > 1 && (n = n / 2));
    }
    return rc;
}

/* ---- Traces: for tests and reports of what went, not for speed ---- */

struct held {
    int32_t *lengths, *positions;
    size_t entries;
};

static void close_held(struct held *h) {
    mem_free(h->lengths);
    mem_free(h->positions);
}

static int read_held(struct cuda *cuda, int slot, struct held *h) {
    struct kern_report report = {};
    h->lengths =
        static_cast<int32_t *>(mem_try_alloc((size_t)cuda->pages.streams, sizeof *h->lengths));
    if (!h->lengths) return ERR_NOMEM;
    report.lengths = h->lengths;
    int rc = op_report(&cuda->base, slot, &report);
    if (rc) return rc;
    h->entries = report.entries_max = report.entries;
    h->positions = static_cast<int32_t *>(mem_try_alloc(report.entries + 1, sizeof *h->positions));
    if (!h->positions) return ERR_NOMEM;
    report.positions = h->positions;
    return op_report(&cuda->base, slot, &report);
}

/* Both lists ascend within a stream, and the remaining entries are a part of the previous ones. */
static void subtract(const struct held *was, const struct held *is, int streams,
                     struct kern_trace *trace) {
    const int32_t *a = was->positions, *b = is->positions;
    trace->entries = 0;
    for (int s = 0; s < streams; s++) {
        const int32_t *b_end = b + is->lengths[s];
        for (const int32_t *a_end = a + was->lengths[s]; a < a_end; a++) {
            if (b < b_end && *b == *a) {
                b++;
                continue;
            }
            if (trace->entries < trace->entries_max) trace->positions[trace->entries] = *a;
            trace->entries++;
        }
        trace->lengths[s] = was->lengths[s] - is->lengths[s];
    }
}

/* Without memory the trace is lost, not the step. */
static int evict_traced(struct cuda *cuda, const struct kern_evict *due) {
    struct held was = {}, is = {};
    int held = read_held(cuda, due->slot, &was);
    int rc = join_agree(cuda, held == ERR_NOMEM ? 0 : held);
    if (!rc) rc = evict_all(cuda, due, 1);
    if (!rc) rc = cache_sync(cuda);
    if (!rc && !held) held = read_held(cuda, due->slot, &is);
    due->trace->lost = held == ERR_NOMEM;
    if (!rc && !due->trace->lost) rc = held;
    if (!rc && !held) subtract(&was, &is, cuda->pages.streams, due->trace);
    close_held(&was);
    close_held(&is);
    return rc;
}

int op_evict(struct kern *kern, const struct kern_evict *due, int count) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache);
    for (int i = 0; i < count; i++) {
        CHECK(due[i].slot >= 0 && due[i].slot < cuda->options.slots && due[i].budget > 0);
        if (!rule_fits(cuda, due[i].rule)) return ERR_UNSUPPORTED;
    }
    int rc = 0;
    cache_changes(cuda);
    for (int i = 0, n; i < count && !rc; i += n) {
        for (n = 0; i + n < count && !due[i + n].trace;) n++;
        rc = n ? evict_all(cuda, &due[i], n) : evict_traced(cuda, &due[i]);
        if (n == 0) n = 1;
    }
    if (rc) (void)cache_sync(cuda); /* reported here and not again */
    return rc;
}
