/* The caches of all ranks as one cache. Steps, evictions and forks go to all ranks; lists of
 * entries (reports, traces, snapshots) are merged in the order of the model's streams, in which
 * every rank's streams keep their order. */
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/ranks_int.h"
#include "kernels/snapshot.h"

/* ---- The cache: a step ---- */

struct cache_opening {
    const struct kern_cache_options *options;
    int codes[COMM_RANKS_MAX];
    struct fault faults[COMM_RANKS_MAX];
};

static void open_cache_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct cache_opening *opening = arg;
    opening->codes[rank] = kern->ops->cache_open(kern, opening->options, &opening->faults[rank]);
}

/* A stream of the model: its layer, its head there, and the first stream of the layer on a rank. */
struct place {
    int layer, head, own_first;
};

static struct place stream_place(const struct ranks *ranks, int stream) {
    struct place place = {.head = stream};
    for (; place.head >= ranks->layers[place.layer].heads_kv; place.layer++) {
        place.head -= ranks->layers[place.layer].heads_kv;
        place.own_first += ranks->own_layers[place.layer].heads_kv;
    }
    return place;
}

/* Returns the number of the rank's heads among the parts into which every layer's are cut. */
static int part_of_rank(const struct ranks *ranks, int rank) {
    return ranks->heads[rank].first / ranks->own.heads_kv;
}

static size_t own_streams(const struct ranks *ranks) {
    size_t streams = 0;
    for (int i = 0; i < ranks->own.layers; i++) streams += (size_t)ranks->own_layers[i].heads_kv;
    return streams;
}

/* The layers of the model and of a rank. */
static void fill_layers(struct ranks *ranks, struct kern *kern) {
    const struct comm first = {.rank = 0, .ranks = ranks->count};
    const struct kern_cache_options *whole = &ranks->whole;
    for (int i = 0; i < whole->layers; i++) {
        const struct kern_heads heads = kern_heads_of(whole, i);
        const struct shard_heads own = shard_heads(&first, whole->heads_q, heads.kv);
        const struct kern_cache_options alone = {
            .dtype = whole->dtype, .head_dim = heads.dim, .latent = whole->latent};
        struct kern_cache_info info = {0};
        kern->ops->cache_info(&alone, &info);
        ranks->layers[i] =
            (struct snapshot_layer){whole->heads_q, heads.kv, heads.dim, info.page_slots};
        ranks->own_layers[i] =
            (struct snapshot_layer){own.heads_q, own.heads_kv, heads.dim, info.page_slots};
    }
}

int ranks_cache_open(struct kern *kern, const struct kern_cache_options *options,
                     struct fault *fault) {
    struct ranks *ranks = ranks_of(kern);
    struct cache_opening opening = {.options = options};
    struct kern_cache_info info = {0};
    kern->ops->cache_info(options, &info);
    ranks->whole = ranks->own = *options;
    ranks->member_slots = info.member_slots;
    for (int r = 0; r < ranks->count; r++) {
        const struct comm place = {.rank = r, .ranks = ranks->count};
        ranks->heads[r] = shard_heads(&place, options->heads_q, options->heads_kv);
    }
    ranks->own.heads_q = ranks->heads[0].heads_q;
    ranks->own.heads_kv = ranks->heads[0].heads_kv;
    ranks->own.state_floats = kern_state_part(options, ranks->count);
    if (options->states > 0)
        ranks->state_pages = (ranks->own.state_floats + info.state_slots - 1) / info.state_slots;
    ranks->layers = mem_try_alloc((size_t)options->layers, sizeof *ranks->layers);
    ranks->own_layers = mem_try_alloc((size_t)options->layers, sizeof *ranks->own_layers);
    if (ranks->layers && ranks->own_layers) {
        fill_layers(ranks, kern);
        ranks->lengths = mem_try_alloc((size_t)ranks->count * own_streams(ranks), sizeof(int32_t));
    }
    if (!ranks->lengths) return fault_set(fault, ERR_NOMEM, "", "no memory beside the cache");
    ranks_each(ranks, open_cache_on, &opening);
    return ranks_fault(ranks, opening.codes, opening.faults, fault);
}

struct fitting {
    const struct kern_cache_options *options;
    int64_t pages[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
    struct fault faults[COMM_RANKS_MAX];
};

static void fit_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct fitting *fitting = arg;
    fitting->codes[rank] =
        kern->ops->cache_fit(kern, fitting->options, &fitting->pages[rank], &fitting->faults[rank]);
}

/* Every pool gets the number of pages that fit on the smallest device. */
int ranks_cache_fit(struct kern *kern, const struct kern_cache_options *options, int64_t *pages,
                    struct fault *fault) {
    struct ranks *ranks = ranks_of(kern);
    struct fitting fitting = {.options = options};
    ranks_each(ranks, fit_on, &fitting);
    *pages = fitting.pages[0];
    for (int r = 1; r < ranks->count; r++)
        if (fitting.pages[r] < *pages) *pages = fitting.pages[r];
    return ranks_fault(ranks, fitting.codes, fitting.faults, fault);
}

struct stepping {
    const struct kern_batch *batch;
    int codes[COMM_RANKS_MAX];
};

static void begin_step_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct stepping *stepping = arg;
    stepping->codes[rank] = kern->ops->begin_step(kern, stepping->batch);
}

int ranks_begin_step(struct kern *kern, const struct kern_batch *batch) {
    struct stepping stepping = {.batch = batch};
    ranks_each(ranks_of(kern), begin_step_on, &stepping);
    return ranks_error(ranks_of(kern), stepping.codes);
}

/* ---- The cache: slots ---- */

struct slot_call {
    int slot, other;
    int32_t pos;
    const struct kern_rule *rule;
    int64_t pages;
    int codes[COMM_RANKS_MAX];
};

static void truncate_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct slot_call *call = arg;
    call->codes[rank] = kern->ops->truncate(kern, call->slot, call->pos);
}

int ranks_truncate(struct kern *kern, int slot, int32_t pos) {
    struct slot_call call = {.slot = slot, .pos = pos};
    ranks_each(ranks_of(kern), truncate_on, &call);
    return ranks_error(ranks_of(kern), call.codes);
}

struct shift_call {
    const struct kern_shift *shift;
    int codes[COMM_RANKS_MAX];
};

static void shift_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct shift_call *call = arg;
    call->codes[rank] = kern->ops->shift(kern, call->shift);
}

int ranks_shift(struct kern *kern, const struct kern_shift *shift) {
    struct shift_call call = {.shift = shift};
    ranks_each(ranks_of(kern), shift_on, &call);
    return ranks_error(ranks_of(kern), call.codes);
}

static void prepare_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct slot_call *call = arg;
    call->codes[rank] = kern->ops->prepare(kern, call->slot, call->rule, call->pages);
}

int ranks_prepare(struct kern *kern, int slot, const struct kern_rule *rule, int64_t pages) {
    struct slot_call call = {.slot = slot, .rule = rule, .pages = pages};
    ranks_each(ranks_of(kern), prepare_on, &call);
    return ranks_error(ranks_of(kern), call.codes);
}

static void fork_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct slot_call *call = arg;
    call->codes[rank] = kern->ops->fork(kern, call->slot, call->other);
}

int ranks_fork(struct kern *kern, int from, int to) {
    struct slot_call call = {.slot = from, .other = to};
    ranks_each(ranks_of(kern), fork_on, &call);
    return ranks_error(ranks_of(kern), call.codes);
}

static void release_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks, (void)rank;
    const struct slot_call *call = arg;
    kern->ops->release(kern, call->slot);
}

void ranks_release(struct kern *kern, int slot) {
    struct slot_call call = {.slot = slot};
    ranks_each(ranks_of(kern), release_on, &call);
}

/* ---- Streams of the model and of ranks ---- */

static int owner_of(const struct ranks *ranks, int stream) {
    const struct place place = stream_place(ranks, stream);
    return shard_owner(ranks->count, ranks->layers[place.layer].heads_kv, place.head);
}

/* The stream's number on the rank that speaks for it, and on any rank that shares its head. */
static int own_number(const struct ranks *ranks, int stream) {
    const struct place place = stream_place(ranks, stream);
    return place.own_first + place.head % ranks->own_layers[place.layer].heads_kv;
}

static int ranks_cache_stream_count(const struct ranks *ranks) {
    return (int)kern_streams(&ranks->whole);
}

static int32_t own_length(const struct ranks *ranks, int stream) {
    size_t first = (size_t)owner_of(ranks, stream) * own_streams(ranks);
    return ranks->lengths[first + (size_t)own_number(ranks, stream)];
}

/* Merges the lists that ranks made for their streams, of which [first[r], first[r + 1]) is rank
 * r's, in the order of the model's streams. */
static void merge_lists(const struct ranks *ranks, const size_t *first, const void *lists,
                        size_t size, size_t most, void *out) {
    size_t at[COMM_RANKS_MAX], done = 0;
    memcpy(at, first, sizeof at);
    for (int stream = 0; stream < ranks_cache_stream_count(ranks); stream++) {
        int owner = owner_of(ranks, stream);
        size_t length = (size_t)own_length(ranks, stream);
        size_t count = length < most - done ? length : most - done;
        memcpy((char *)out + done * size, (const char *)lists + at[owner] * size, count * size);
        at[owner] += length;
        done += count;
    }
}

/* Places each rank's list in a common array; returns the number of entries of the model. A rank
 * that does not speak has a place, too, for a list that is not read. */
static size_t place_lists(const struct ranks *ranks, size_t *first, size_t *all) {
    size_t total = 0, counted = 0;
    for (int r = 0; r < ranks->count; r++) {
        const int32_t *lengths = ranks->lengths + (size_t)r * own_streams(ranks);
        first[r] = total;
        for (size_t i = 0; i < own_streams(ranks); i++) total += (size_t)lengths[i];
        if (ranks->heads[r].speaks) counted += total - first[r];
    }
    CHECK(counted <= total);
    *all = total;
    return counted;
}

/* ---- Reports ---- */

struct reporting {
    int slot;
    struct kern_report rank[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
};

static void report_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct reporting *reporting = arg;
    reporting->codes[rank] = kern->ops->report(kern, reporting->slot, &reporting->rank[rank]);
}

/* Gets the lengths of all streams of a slot on every rank. */
static int report_lengths(struct ranks *ranks, struct reporting *reporting) {
    for (int r = 0; r < ranks->count; r++)
        reporting->rank[r] =
            (struct kern_report){.lengths = ranks->lengths + (size_t)r * own_streams(ranks)};
    ranks_each(ranks, report_on, reporting);
    return ranks_error(ranks, reporting->codes);
}

static int ranks_cache_report_entries(struct ranks *ranks, struct reporting *reporting,
                                      struct kern_report *report) {
    size_t first[COMM_RANKS_MAX], all;
    (void)place_lists(ranks, first, &all);
    int32_t *positions = report->positions ? mem_try_alloc(all + 1, sizeof *positions) : NULL;
    float *log_beta = report->log_beta ? mem_try_alloc(all + 1, sizeof *log_beta) : NULL;
    int rc = ERR_NOMEM;
    if ((report->positions && !positions) || (report->log_beta && !log_beta)) goto out;
    for (int r = 0; r < ranks->count; r++) {
        reporting->rank[r].positions = positions ? positions + first[r] : NULL;
        reporting->rank[r].log_beta = log_beta ? log_beta + first[r] : NULL;
        reporting->rank[r].entries_max = reporting->rank[r].entries;
    }
    ranks_each(ranks, report_on, reporting);
    rc = ranks_error(ranks, reporting->codes);
    if (!rc && positions)
        merge_lists(ranks, first, positions, sizeof *positions, report->entries_max,
                    report->positions);
    if (!rc && log_beta)
        merge_lists(ranks, first, log_beta, sizeof *log_beta, report->entries_max,
                    report->log_beta);
out:
    mem_free(positions);
    mem_free(log_beta);
    return rc;
}

int ranks_report(struct kern *kern, int slot, struct kern_report *report) {
    struct ranks *ranks = ranks_of(kern);
    struct reporting reporting = {.slot = slot};
    int rc = report_lengths(ranks, &reporting);
    if (rc) return rc;
    report->entries = report->rank_entries = 0;
    report->pages = report->rank_pages = 0;
    report->state_bytes = 0;
    for (int r = 0; r < ranks->count; r++) {
        const struct kern_report *own = &reporting.rank[r];
        report->state_bytes += own->state_bytes;
        if (!ranks->heads[r].speaks) continue;
        report->entries += own->entries;
        report->pages += own->pages;
        if (own->entries > report->rank_entries) report->rank_entries = own->entries;
        if (own->pages > report->rank_pages) report->rank_pages = own->pages;
    }
    for (int stream = 0; report->lengths && stream < ranks_cache_stream_count(ranks); stream++)
        report->lengths[stream] = own_length(ranks, stream);
    if (!report->positions && !report->log_beta) return 0;
    if (report->entries > report->entries_max) return ERR_LIMIT;
    return ranks_cache_report_entries(ranks, &reporting, report);
}

/* ---- Eviction ---- */

struct evicting {
    const struct kern_evict *due;
    int count;
    bool traced;   /* one sequence, with a separate trace on each rank */
    bool untraced; /* one sequence whose trace has no memory */
    struct kern_trace trace[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
};

static void evict_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct evicting *evicting = arg;
    struct kern_evict own = *evicting->due;
    own.trace = evicting->untraced ? NULL : &evicting->trace[rank];
    evicting->codes[rank] = evicting->traced
                                ? kern->ops->evict(kern, &own, 1)
                                : kern->ops->evict(kern, evicting->due, evicting->count);
}

static int ranks_cache_evict_all(struct ranks *ranks, struct evicting *evicting) {
    ranks_each(ranks, evict_on, evicting);
    return ranks_error(ranks, evicting->codes);
}

/* Evicts without a trace: lack of memory loses the trace, not the step. */
static int evict_untraced(struct ranks *ranks, struct evicting *evicting) {
    evicting->due->trace->lost = evicting->untraced = true;
    return ranks_cache_evict_all(ranks, evicting);
}

/* Evicts with a trace: a rank records the entries it removes, at most those it holds. */
static int ranks_cache_evict_traced(struct ranks *ranks, struct evicting *evicting) {
    struct kern_trace *trace = evicting->due->trace;
    struct reporting reporting = {.slot = evicting->due->slot};
    size_t first[COMM_RANKS_MAX], all;
    int rc = report_lengths(ranks, &reporting);
    if (rc == ERR_NOMEM) return evict_untraced(ranks, evicting);
    if (rc) return rc;
    (void)place_lists(ranks, first, &all);
    int32_t *positions = mem_try_alloc(all + 1, sizeof *positions);
    if (!positions) return evict_untraced(ranks, evicting);
    for (int r = 0; r < ranks->count; r++)
        evicting->trace[r] = (struct kern_trace){.lengths = reporting.rank[r].lengths,
                                                 .positions = positions + first[r],
                                                 .entries_max = reporting.rank[r].entries};
    rc = ranks_cache_evict_all(ranks, evicting);
    for (int r = 0; r < ranks->count; r++) trace->lost = trace->lost || evicting->trace[r].lost;
    if (!rc && !trace->lost) {
        trace->entries = 0;
        for (int stream = 0; stream < ranks_cache_stream_count(ranks); stream++) {
            trace->lengths[stream] = own_length(ranks, stream);
            trace->entries += (size_t)trace->lengths[stream];
        }
        merge_lists(ranks, first, positions, sizeof *positions, trace->entries_max,
                    trace->positions);
    }
    mem_free(positions);
    return rc;
}

int ranks_evict(struct kern *kern, const struct kern_evict *due, int count) {
    struct ranks *ranks = ranks_of(kern);
    int rc = 0;
    for (int i = 0, n; i < count && !rc; i += n) {
        for (n = 0; i + n < count && !due[i + n].trace;) n++;
        struct evicting evicting = {.due = &due[i], .count = n, .traced = n == 0};
        rc = evicting.traced ? ranks_cache_evict_traced(ranks, &evicting)
                             : ranks_cache_evict_all(ranks, &evicting);
        if (n == 0) n = 1;
    }
    return rc;
}

/* ---- Snapshots ---- */

struct copying {
    int slot, block;
    int only; /* only this rank, or -1: all ranks */
    size_t size[COMM_RANKS_MAX];
    void *to[COMM_RANKS_MAX];
    struct kern_block from[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
};

static bool takes_part(const struct copying *copying, int rank) {
    return copying->only < 0 || copying->only == rank;
}

static void size_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct copying *copying = arg;
    if (takes_part(copying, rank))
        copying->size[rank] = kern->ops->snapshot_size(kern, copying->slot, copying->block);
}

static void export_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct copying *copying = arg;
    if (takes_part(copying, rank))
        copying->codes[rank] =
            kern->ops->snapshot_export(kern, copying->slot, copying->block, copying->to[rank]);
}

static void import_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct copying *copying = arg;
    if (takes_part(copying, rank) && copying->from[rank].data)
        copying->codes[rank] =
            kern->ops->snapshot_import(kern, copying->slot, copying->block, &copying->from[rank]);
}

static struct snapshot_shape whole_shape(const struct ranks *ranks) {
    return (struct snapshot_shape){.options = &ranks->whole,
                                   .layers = ranks->layers,
                                   .member_slots = ranks->member_slots,
                                   .state_pages = ranks->state_pages,
                                   .ranks = ranks->whole.heads_kv / ranks->own.heads_kv,
                                   .shifts = ranks->ops.shift != NULL};
}

static struct snapshot_shape own_shape(const struct ranks *ranks) {
    return (struct snapshot_shape){.options = &ranks->own,
                                   .layers = ranks->own_layers,
                                   .member_slots = ranks->member_slots,
                                   .state_pages = ranks->state_pages,
                                   .ranks = 1,
                                   .shifts = ranks->ops.shift != NULL};
}

/* The block of a stream is on its rank. */
static struct copying stream_block(const struct ranks *ranks, int slot, int block) {
    return (struct copying){.slot = slot,
                            .block = 1 + own_number(ranks, block - 1),
                            .only = owner_of(ranks, block - 1)};
}

/* The number of the state that a block holds; negative: it holds none. */
static int state_of(const struct ranks *ranks, int block) {
    return block - 1 - ranks_cache_stream_count(ranks);
}

/* Every rank has a part of the state's block, in the order of the ranks, behind what all have. */
static struct copying state_block(const struct ranks *ranks, int slot, int block) {
    return (struct copying){
        .slot = slot, .block = 1 + (int)own_streams(ranks) + state_of(ranks, block), .only = -1};
}

/* Exports a block of all ranks, `own` bytes each. */
static int export_parts(struct ranks *ranks, struct copying *copying, char **parts, size_t *own) {
    ranks_each(ranks, size_on, copying);
    *own = copying->size[0];
    *parts = mem_try_alloc((size_t)ranks->count, *own);
    if (!*parts) return ERR_NOMEM;
    for (int r = 0; r < ranks->count; r++) copying->to[r] = *parts + (size_t)r * *own;
    ranks_each(ranks, export_on, copying);
    return ranks_error(ranks, copying->codes);
}

/* Size of the whole from that of a part: all parts are equally long, and only the window's queries
 * make them longer than the fixed arrays. */
static size_t size_of_whole(const struct ranks *ranks, size_t own) {
    struct snapshot_shape whole = whole_shape(ranks), part = own_shape(ranks);
    size_t none = snapshot_arrays(&part, 0).size;
    size_t query = snapshot_arrays(&part, 1).size - none;
    CHECK_MSG(own >= none && (own - none) % query == 0, "a block of %zu bytes", own);
    return snapshot_arrays(&whole, (int32_t)((own - none) / query)).size;
}

static int export_state(struct ranks *ranks, int slot, int block, void *to) {
    struct copying copying = state_block(ranks, slot, block);
    const size_t shared = (size_t)ranks->own.state_shared * sizeof(float);
    char *parts = NULL;
    size_t own;
    int rc = export_parts(ranks, &copying, &parts, &own);
    if (!rc) memcpy(to, parts, shared);
    for (int r = 0; r < ranks->count && !rc; r++)
        memcpy((char *)to + shared + (size_t)r * (own - shared), parts + (size_t)r * own + shared,
               own - shared);
    mem_free(parts);
    return rc;
}

static int import_state_parts(struct ranks *ranks, int slot, int block,
                              const struct kern_block *from) {
    struct copying copying = state_block(ranks, slot, block);
    const struct snapshot_shape part = own_shape(ranks);
    const size_t own = snapshot_state_size(&part);
    const size_t shared = (size_t)ranks->own.state_shared * sizeof(float);
    char *parts = mem_try_alloc((size_t)ranks->count, own);
    if (!parts) return ERR_NOMEM;
    for (int r = 0; r < ranks->count; r++) {
        char *to = parts + (size_t)r * own;
        memcpy(to, from->data, shared);
        memcpy(to + shared, (const char *)from->data + shared + (size_t)r * (own - shared),
               own - shared);
        copying.from[r] = (struct kern_block){to, own};
    }
    ranks_each(ranks, import_on, &copying);
    mem_free(parts);
    return ranks_error(ranks, copying.codes);
}

size_t ranks_snapshot_size(struct kern *kern, int slot, int block) {
    struct ranks *ranks = ranks_of(kern);
    struct copying copying = {.slot = slot, .only = 0};
    const struct snapshot_shape shape = whole_shape(ranks);
    if (state_of(ranks, block) >= 0) return snapshot_state_size(&shape);
    if (block > 0) copying = stream_block(ranks, slot, block);
    ranks_each(ranks, size_on, &copying);
    return block > 0 ? copying.size[copying.only] : size_of_whole(ranks, copying.size[0]);
}

int ranks_snapshot_export(struct kern *kern, int slot, int block, void *to) {
    struct ranks *ranks = ranks_of(kern);
    if (state_of(ranks, block) >= 0) return export_state(ranks, slot, block, to);
    if (block > 0) {
        struct copying copying = stream_block(ranks, slot, block);
        copying.to[copying.only] = to;
        ranks_each(ranks, export_on, &copying);
        return copying.codes[copying.only];
    }
    struct copying copying = {.slot = slot, .only = -1};
    struct snapshot_shape whole = whole_shape(ranks), part = own_shape(ranks);
    char *parts = NULL;
    size_t own;
    int rc = export_parts(ranks, &copying, &parts, &own);
    for (int r = 0; r < ranks->count && !rc; r++)
        if (ranks->heads[r].speaks)
            snapshot_join(&whole, &part, part_of_rank(ranks, r), parts + (size_t)r * own, to);
    mem_free(parts);
    return rc;
}

int ranks_snapshot_check(struct kern *kern, const struct kern_block *blocks, int count,
                         int32_t tokens, struct kern_report *report, struct fault *fault) {
    struct snapshot_shape whole = whole_shape(ranks_of(kern));
    struct snapshot_slot slot;
    return snapshot_check(&whole, blocks, count, tokens, &slot, report, fault);
}

/* Every rank that holds the stream's head imports its block. */
static int ranks_cache_import_stream(struct ranks *ranks, int slot, int block,
                                     const struct kern_block *from) {
    struct copying copying = stream_block(ranks, slot, block);
    const struct place place = stream_place(ranks, block - 1);
    const int own = ranks->own_layers[place.layer].heads_kv;
    copying.only = -1;
    for (int r = 0; r < ranks->count; r++)
        if (place.head / own == part_of_rank(ranks, r)) copying.from[r] = *from;
    ranks_each(ranks, import_on, &copying);
    return ranks_error(ranks, copying.codes);
}

int ranks_snapshot_import(struct kern *kern, int slot, int block, const struct kern_block *from) {
    struct ranks *ranks = ranks_of(kern);
    if (state_of(ranks, block) >= 0) return import_state_parts(ranks, slot, block, from);
    if (block > 0) return ranks_cache_import_stream(ranks, slot, block, from);
    struct snapshot_shape whole = whole_shape(ranks), part = own_shape(ranks);
    size_t own = snapshot_arrays(&part, snapshot_read_slot(from).window).size;
    struct copying copying = {.slot = slot, .only = -1};
    char *parts = mem_try_alloc((size_t)ranks->count, own);
    if (!parts) return ERR_NOMEM;
    for (int r = 0; r < ranks->count; r++) {
        copying.from[r] = (struct kern_block){parts + (size_t)r * own, own};
        snapshot_split(&whole, &part, part_of_rank(ranks, r), from->data, parts + (size_t)r * own);
    }
    ranks_each(ranks, import_on, &copying);
    mem_free(parts);
    return ranks_error(ranks, copying.codes);
}

/* ---- Statistics ---- */

struct asking {
    struct kern_cache_stats stats[COMM_RANKS_MAX];
    struct fault faults[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
};

static void stats_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct asking *asking = arg;
    kern->ops->cache_stats(kern, &asking->stats[rank]);
}

void ranks_cache_stats(struct kern *kern, struct kern_cache_stats *stats) {
    struct ranks *ranks = ranks_of(kern);
    struct asking asking = {0};
    ranks_each(ranks, stats_on, &asking);
    *stats = (struct kern_cache_stats){0};
    for (int r = 0; r < ranks->count; r++) {
        if (!ranks->heads[r].speaks) continue;
        int64_t used = asking.stats[r].pages_used;
        stats->pages_used += used;
        if (used > stats->rank_pages_used) stats->rank_pages_used = used;
        stats->entries_evicted += asking.stats[r].entries_evicted;
    }
    stats->rank_cap_hits = asking.stats[0].rank_cap_hits; /* equal on all ranks */
}

static void check_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct asking *asking = arg;
    asking->codes[rank] = kern->ops->cache_check(kern, &asking->faults[rank]);
}

int ranks_cache_check(struct kern *kern, struct fault *fault) {
    struct ranks *ranks = ranks_of(kern);
    struct asking asking = {0};
    ranks_each(ranks, check_on, &asking);
    for (int r = 0; r < ranks->count; r++)
        if (asking.codes[r])
            return fault_set(fault, asking.codes[r], asking.faults[r].field, "rank %d: %s", r,
                             asking.faults[r].text);
    return 0;
}
