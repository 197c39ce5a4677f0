/* The paged cache of the CPU backend: pages, page tables, lengths, eviction.
 *
 * A page holds P entries of one stream (slot, layer, KV head): keys [P][D], then values [P][D], in
 * the cache's dtype, 8 KiB together; in a dtype with factors (kernels/row.h) then the keys' factors
 * [P] and the values' [P]. Beside it, indexed by the same page number, lie pos[P] and log_beta[P].
 * Entries of a stream are dense (entry i sits in page i / P, slot i % P) and ascending in pos. D,
 * and with it P, are those of the layer (struct cpu_layer); all pages have the same size, and the
 * side records beside each have room for the largest P.
 * Contents at or after a stream's length are stale and must not be read.
 *
 * All memory is one zeroed mapping made at open, touched only as far as used; after open nothing
 * allocates, so nothing here can run out of memory later. Free pages are a stack, not a ring: the
 * page freed last is used next. So resident memory stays at its high-water mark, and the page is
 * likely still in the CPU's caches.
 *
 * A slot has two tables of pages per stream, its rows: the entries, and the members of their
 * classes (kern_rule.h), records that fill the same pages. A third kind of row is a recurrent
 * state, of which every page is one record: it has all its pages or, before the first step, none.
 * All kinds of rows are shared, copied and freed in the same way.
 *
 * One step: begin_step takes the pages, writes pos and raises the lengths by the span's count; then
 * the kernels write rows into entries [length - count, length) of every stream, log_beta included.
 * With a rule that adds up attention they also write the score of every entry, so begin_step makes
 * all pages of such a sequence its own.
 *
 * Forks share pages by reference count; a slot copies a shared page before it writes to it. The
 * copy always finds a free page while every slot's table fits its reservation: a shared page counts
 * once in each reservation but only once in the pool.
 *
 * With several ranks (kernels/comm.h) a cache holds the streams of its rank's heads and `options`
 * counts those heads; streams are numbered within the rank unless "of the model" is stated. All
 * ranks accept or refuse a step, eviction or fork together.
 *
 * Threads: one thread, the engine's or the rank's, calls everything; `parallel`, when set, spreads
 * streams over workers. Wrong slot numbers and the like are programmer errors and abort. */
#ifndef KEEPD_KERNELS_CPU_CACHE_H
#define KEEPD_KERNELS_CPU_CACHE_H

#include <string.h>

#include "kernels/kern.h"
#include "kernels/row.h"
#include "kernels/rule.h"
#include "kernels/shard.h"
#include "kernels/snapshot.h"

#define CPU_PAGE_BYTES 8192 /* numbers or codes of one page, unless one row is larger */

/* Runs fn(arg, 0 .. items - 1, worker), each item exactly once, in any order on any thread.
 * `worker` is below the number given at open and runs one item at a time. Returns when all items
 * are done. */
typedef void cpu_item(void *arg, int item, int worker);
typedef void cpu_parallel(void *ctx, int items, cpu_item *fn, void *arg);

/* Consecutive rows of a page, or of an array of floats. */
struct cpu_rows {
    const void *at;          /* [rows][row_code_bytes] */
    const uint16_t *factors; /* [rows], in a dtype with factors */
    int dim;
    enum kern_dtype dtype;
    int stride; /* numbers from one row to the next; 0: dim */
};

static inline int cpu_rows_stride(const struct cpu_rows *rows) {
    return rows->stride ? rows->stride : rows->dim;
}

/* The arithmetic of observing attention, comparing keys and converting rows: one table per path of
 * the CPU backend; cpu_math_plain (double sums in ascending order) otherwise. */
struct cpu_math {
    /* out[l * stride + j] = q[l] . row[j] for `lanes` vectors of `dim` floats, one after the other,
     * and `count` rows. A product depends on its two vectors alone. */
    void (*dots)(float *out, size_t stride, const float *q, int lanes, struct cpu_rows rows,
                 int count);
    /* x <- softmax(x), with one more term exp(sink) in the sum; -INFINITY: none. Depends on x and
     * sink alone. */
    void (*softmax)(float *x, int count, float sink);
    /* x <- cap tanh(x / cap) */
    void (*soft_cap)(float *x, int count, float cap);
    /* out[l * stride + d] += p[l * p_stride + j] row[j][d] for j = 0 .. count - 1, in this order.
     */
    void (*weigh)(float *out, size_t stride, const float *p, size_t p_stride, int lanes,
                  struct cpu_rows rows, int count);
    /* row_rotate and row_write of kernels/row.h: the same bits on every path. */
    void (*row_rotate)(float *x, int dim);
    void (*row_write)(void *codes, uint16_t *factor, const float *from, int dim,
                      enum kern_dtype dtype);
};
extern const struct cpu_math cpu_math_plain;

/* A member of a class. Members of a row ascend by centre, then by position. */
struct cpu_member {
    int32_t centre; /* position of the class's centre, an entry */
    int32_t pos;    /* the member's position, different from those of all entries and members of the
                       stream */
    float gain;
};

struct cpu_cache_slot {
    bool in_use;
    int32_t next_pos; /* all held positions are lower; the next span starts here or later */
    int32_t peeked;   /* so many tokens of the last span have not changed the states */
    int32_t window;   /* number of queries in the slot's ring, 0 = no ring in use */
    bool measured;    /* `weights` holds the slot's layer weights */
};

/* A layer's heads on this rank, and how pages hold its entries. */
struct cpu_layer {
    int first;       /* the first stream; the heads follow each other */
    int first_model; /* the number of that stream in the model */
    int heads_kv;    /* KV heads of this rank */
    int heads_model; /* KV heads of the model */
    int heads_q, group;
    struct shard_heads shard;
    int head_dim;
    int latent;      /* kern_cache_options */
    int page_slots;  /* P */
    size_t row_size; /* bytes of one key or value, without its factor */
    size_t query;    /* how many numbers a slot's ring has before those of the layer */
};

struct cpu_cache {
    struct kern_cache_options
        options;             /* heads_q, heads_kv: the most that this rank has in a layer */
    const struct comm *comm; /* ranks that hold the other heads */
    int streams;             /* streams of all layers */
    int streams_model;       /* streams of all ranks */
    int lanes;               /* the largest result of cpu_cache_lanes */
    int rows; /* row `stream` is its entries, `streams + stream` its members; the states follow */
    int state_pages;        /* pages of a state */
    int page_slots;         /* the largest P */
    int member_slots;       /* members per page */
    size_t page_size;       /* bytes of one page's keys, values and factors, a multiple of 64 */
    cpu_parallel *parallel; /* optional, set after open; NULL = serial */
    void *parallel_ctx;
    const struct cpu_math *math; /* set after open; cpu_math_plain */
    int workers;

    struct cpu_layer *layers;      /* [layers] */
    struct snapshot_layer *shapes; /* [layers] */
    int *layer_of;                 /* [streams] */

    char *pool;      /* [pages] of page_size bytes, 64-byte aligned */
    int32_t *pos;    /* [pages][page_slots] */
    float *log_beta; /* [pages][page_slots] */
    float *score; /* [pages][page_slots] what the rule remembers of an entry: mass or last score */

    /* The last queries of sequences whose rule has a window: the scaled query of position p lies at
     * p % window, if ring_pos has p there. Other sequences never touch this memory. */
    float *ring;       /* [slots][ring_slot floats], within it [layers][WINDOW_MAX][heads_q * D] */
    int32_t *ring_pos; /* [slots][KERN_WINDOW_MAX]; -1: none */
    struct kern_attend_options *attended; /* [layers] the options of the layer's last attention */
    size_t ring_slot;

    uint16_t *refs;       /* [pages] tables that refer to the page; 0 = free */
    uint32_t *free_pages; /* stack */
    int64_t free_count;

    struct cpu_cache_slot *slots; /* [slots] */
    int32_t *lengths;             /* [slots][rows] */
    uint32_t *tables;             /* [slots][slot_pages], within it [streams][stream_pages], then
                                     [streams][member_pages], then [states][state_pages] */
    size_t stream_pages;          /* ceil(max_positions / P), of the smallest P */
    size_t member_pages;          /* ceil(max_positions / member_slots) */
    size_t slot_pages;            /* all kinds together, rounded up to whole memory pages */

    float *angles;       /* [max_positions][head_dim]: cos of position * inv_freq, then sin */
    int32_t angles_made; /* rows of `angles` computed so far */

    float *weights; /* [slots][layers] measured weights of KERN_LAYERS_PREFERENCE and _DENSITY */
    float *tau;     /* [slots][streams] merge thresholds; NAN: none yet */

    /* Scratch memory of eviction: one value per entry of the largest possible sequence. */
    uint32_t *keys;
    float *fresh; /* scores to be stored with the entries */
    float *alike; /* similarities, for merging */
    int32_t *links;
    struct allot_part *parts;       /* [layers + the most heads of the model in a layer] */
    struct cpu_evict_stream *evict; /* [streams + 1] */
    struct cpu_evict_fact *facts;   /* [ranks][streams] */
    struct cpu_evict_scope *scopes; /* [layers] */
    uint32_t *bins;                 /* [layers][CPU_EVICT_BINS] */
    float *work;                    /* [workers][work_size]: see cpu_cache_work */
    size_t work_size;
    uint64_t entries_evicted;
    uint64_t rank_cap_hits;

    void *map; /* the mapping that holds all arrays above */
    size_t map_size;
};

/* The side arrays: records of an entry that are moved, forked and saved with it. A new one is a
 * line here, in map_arrays, in cpu_cache_move_entry and in kernels/snapshot.c. */
struct cpu_cache_side {
    size_t array; /* offset of the array's pointer in struct cpu_cache */
    size_t bytes; /* per entry */
};

static const struct cpu_cache_side cpu_cache_sides[] = {
    {offsetof(struct cpu_cache, pos), sizeof(int32_t)},
    {offsetof(struct cpu_cache, log_beta), sizeof(float)},
    {offsetof(struct cpu_cache, score), sizeof(float)},
};
enum { CPU_CACHE_SIDES = sizeof cpu_cache_sides / sizeof *cpu_cache_sides };

/* Describes the cache that these options give. page_bytes counts keys, values and side records;
 * page_slots is at least 1 even if a row is very long. */
void cpu_cache_info(const struct kern_cache_options *options, struct kern_cache_info *info);
/* dtype f32, bf16, e4m3, row8 or row4; `workers` is the number of workers of `parallel`. On failure
 * nothing is held and *cache is zeroed. */
int cpu_cache_open(struct cpu_cache *cache, const struct kern_cache_options *options, int workers,
                   struct fault *fault);
/* Opens the cache of one of several ranks: `options` counts the model's heads, `pages` the rank's
 * pages. `comm` must outlive the cache. */
int cpu_cache_open_rank(struct cpu_cache *cache, const struct kern_cache_options *options,
                        const struct comm *comm, int workers, struct fault *fault);
void cpu_cache_close(struct cpu_cache *cache); /* idempotent; a zeroed struct is allowed */

/* Appends span->count entries to every stream of each span's slot. ERR_FULL when the free pages do
 * not suffice for the whole batch, ERR_LIMIT where places reach max_positions; neither changes
 * anything. */
int cpu_cache_begin_step(struct cpu_cache *cache, const struct kern_batch *batch);
/* Evicts one sequence after the other. ERR_FULL (no free pages for copies of shared pages) leaves
 * the failing sequence and later ones unchanged. */
int cpu_cache_evict(struct cpu_cache *cache, const struct kern_evict *due, int count);
/* Keeps the `most` best entries of every stream by the rule's retention scores; the rule's budget
 * and threshold are not used. ERR_FULL as above. */
int cpu_cache_keep_best(struct cpu_cache *cache, const struct kern_evict *due, int32_t most);
/* ERR_FULL (no free pages for copies of shared pages, needed to drop members of classes) and
 * ERR_UNSUPPORTED (as in kern.h) change nothing. */
int cpu_cache_truncate(struct cpu_cache *cache, int slot, int32_t pos);
/* ERR_FULL (no free pages for copies of shared pages) changes nothing. The model has at least
 * PLACES_LEAST positions (kernels/places.h). */
int cpu_cache_shift(struct cpu_cache *cache, const struct kern_shift *shift);
/* ERR_LIMIT (a page's reference count would overflow) changes nothing. */
int cpu_cache_fork(struct cpu_cache *cache, int from, int to);
void cpu_cache_release(struct cpu_cache *cache, int slot); /* a slot not in use is allowed */
/* ERR_LIMIT: the buffers for positions or log_beta are too small; all else is filled. */
int cpu_cache_report(const struct cpu_cache *cache, int slot, struct kern_report *report);
void cpu_cache_stats(const struct cpu_cache *cache, struct kern_cache_stats *stats);
/* Checks that every page is in exactly one place, that counts and lengths agree and that positions
 * ascend. Slow: for tests. */
int cpu_cache_check(const struct cpu_cache *cache, struct fault *fault);

/* See kern.h. */
size_t cpu_cache_snapshot_size(const struct cpu_cache *cache, int slot, int block);
void cpu_cache_snapshot_export(const struct cpu_cache *cache, int slot, int block, void *to);
int cpu_cache_snapshot_check(const struct cpu_cache *cache, const struct kern_block *blocks,
                             int count, int32_t tokens, struct kern_report *report,
                             struct fault *fault);
int cpu_cache_snapshot_import(struct cpu_cache *cache, int slot, int block,
                              const struct kern_block *from);

/* Copies numbers [first, first + count) of a state of the slot out of its pages, or into them. The
 * slot must have the state; before writing, a step must have begun. */
void cpu_cache_state_read(const struct cpu_cache *cache, int slot, int state, int first, int count,
                          float *to);
void cpu_cache_state_write(const struct cpu_cache *cache, int slot, int state, int first, int count,
                           const float *from);

/* ---- For snapshot.c ---- */

uint32_t cpu_cache_take_page(struct cpu_cache *cache); /* a free page must be there */

/* Returns the first record of side array `side` in a page. */
static inline char *cpu_cache_side(const struct cpu_cache *cache, int side, uint32_t page) {
    char *array;
    memcpy(&array, (const char *)cache + cpu_cache_sides[side].array, sizeof array);
    return array + (size_t)page * (size_t)cache->page_slots * cpu_cache_sides[side].bytes;
}

/* ---- For eviction ---- */

/* The lowest-ranking entry that is kept. Entries rank by key, then newer pos, then lower stream. */
struct cpu_evict_cutoff {
    uint32_t key;
    int32_t pos, stream; /* `stream`: the stream's number in the model */
};

/* A scope: the streams whose entries compete in one ranking, and the search for its cutoff. */
struct cpu_evict_scope {
    int from, to; /* streams of this rank, [from, to) */
    int first_layer, layers;
    int64_t total;                  /* the scope's allotment, of all ranks together (evict_allot) */
    int64_t held, allotment;        /* entries and allotment of the ranks that are not capped */
    int64_t limit;                  /* allotment of a capped rank */
    uint32_t capped;                /* bit r: rank r has reached the cap */
    struct cpu_evict_cutoff cutoff; /* out */
    bool open;                      /* this and the following belong to the search in cutoff.c */
    uint32_t value;                 /* bits of the cutoff found so far */
    uint32_t wanted;                /* number of entries with these bits that are kept */
    uint32_t equal;                 /* number of entries with these bits */
};

#define CPU_EVICT_BINS 2048

/* Results of the stages of an eviction for one stream. */
struct cpu_evict_stream {
    size_t first; /* index of the stream's first key; in the row past the last stream: the total */
    struct cpu_evict_cutoff cutoff; /* equal for all streams of a scope */
    int32_t lead;                   /* entries before the first evicted one; they do not move */
    int32_t kept;
    int32_t candidates;             /* entries before the recent ones */
    int32_t members;                /* members of classes: before the eviction, then after */
    struct cpu_evict_cutoff merged; /* classes: the lowest-ranking entry that may join one */
    int32_t fixed;                  /* protected entries */
    int64_t allotment;              /* with STREAM scopes and with floors: of this stream alone */
    int64_t best;                   /* entries of this stream among the best of its scope */
    double measured[2];             /* measurements for the layer weights */
};

/* Facts about a stream that all ranks exchange. */
struct cpu_evict_fact {
    int64_t length, fixed;
    int64_t best;       /* entries of this stream among the best of its scope */
    double measured[2]; /* measurements for the layer weights */
};

#define CPU_SCORE_NONE (-1.0f) /* no score yet; scores of attention are never negative */
#define CPU_ROWS_BLOCK 16      /* keys compared with a stream's keys at a time */

/* Scratch memory of one worker. `stride` covers the longest stream. */
struct cpu_work {
    size_t stride;
    float *logits;              /* [cpu_cache_lanes][stride] */
    float *sum, *squares;       /* [stride] each */
    float *smooth, *norm, *rho; /* [stride] each */
    int32_t *centres;           /* [stride] */
    float *rows;                /* [lanes + 1][head_dim] */
    float *turned;              /* [2 * lanes][head_dim] */
};
struct cpu_work cpu_cache_work(const struct cpu_cache *cache, int worker);

/* Returns how many numbers a value has. If keys hold the values, so many numbers at the front of a
 * key do not rotate. */
static inline int cpu_value_dim(const struct cpu_layer *layer) {
    return layer->latent ? layer->latent : layer->head_dim;
}

static inline const struct cpu_layer *cpu_cache_layer(const struct cpu_cache *cache, int stream) {
    return &cache->layers[cache->layer_of[stream]];
}

/* Converts row `at` of a page's keys or values to floats, and back, rounded to nearest. In a dtype
 * with factors the floats are rotated (kernels/row.h). */
void cpu_cache_wide_row(const struct cpu_cache *cache, const struct cpu_layer *layer, uint32_t page,
                        bool values, int at, float *to);
void cpu_cache_store_row(const struct cpu_cache *cache, const struct cpu_layer *layer,
                         uint32_t page, bool values, int at, const float *from);
/* Rotates a vector of `dim` floats as the cache's rows are rotated; the same function rotates it
 * back. In a dtype without factors nothing changes. */
static inline void cpu_cache_rotate(const struct cpu_cache *cache, float *x, int dim) {
    if (row_scaled(cache->options.dtype)) cache->math->row_rotate(x, dim);
}
/* Returns how many queries are processed together: whole groups of `group` heads, and at least 16
 * heads. */
int cpu_cache_lanes(int group);

static inline int32_t cpu_cache_pages_for(const struct cpu_layer *layer, int32_t length) {
    return (length + layer->page_slots - 1) / layer->page_slots;
}

/* Returns the first row that is a state. */
static inline int cpu_cache_states(const struct cpu_cache *cache) {
    return 2 * cache->streams;
}

static inline int32_t cpu_cache_row_pages(const struct cpu_cache *cache, int row, int32_t length) {
    if (row >= cpu_cache_states(cache)) return length;
    if (row < cache->streams) return cpu_cache_pages_for(cpu_cache_layer(cache, row), length);
    return (length + cache->member_slots - 1) / cache->member_slots;
}

/* Replaces *page by a private copy if it is shared; a free page must exist. */
void cpu_cache_own_page(struct cpu_cache *cache, uint32_t *page);
/* Truncates a row to its first `length` records and frees the pages behind them. */
void cpu_cache_shorten(struct cpu_cache *cache, int slot, int row, int32_t length);
/* Makes a row's pages private, adds pages for `length` records and sets the row's length to it;
 * `length` must not be below the present one. cpu_cache_lacks: number of free pages needed. */
void cpu_cache_extend(struct cpu_cache *cache, int slot, int row, int32_t length);
int64_t cpu_cache_lacks(const struct cpu_cache *cache, int slot, int row, int32_t length);

/* ---- For the kernels ---- */

/* Returns the query at place `at` of the ring, [heads_q * head_dim]. */
static inline float *cpu_cache_query(const struct cpu_cache *cache, int slot, int layer, int at) {
    const struct cpu_layer *l = &cache->layers[layer];
    return cache->ring + (size_t)slot * cache->ring_slot + l->query +
           (size_t)at * (size_t)l->heads_q * (size_t)l->head_dim;
}

/* Returns the bytes of a query of all heads in the ring. */
static inline size_t cpu_cache_query_bytes(const struct cpu_cache *cache, int layer) {
    const struct cpu_layer *l = &cache->layers[layer];
    return (size_t)l->heads_q * (size_t)l->head_dim * sizeof(float);
}

static inline float *cpu_cache_weights(const struct cpu_cache *cache, int slot) {
    return cache->weights + (size_t)slot * (size_t)cache->options.layers;
}

static inline float *cpu_cache_tau(const struct cpu_cache *cache, int slot) {
    return cache->tau + (size_t)slot * (size_t)cache->streams;
}

static inline uint32_t *cpu_cache_table(const struct cpu_cache *cache, int slot, int stream) {
    return cache->tables + (size_t)slot * cache->slot_pages + (size_t)stream * cache->stream_pages;
}

/* Returns the page table of a row of any kind. */
static inline uint32_t *cpu_cache_row(const struct cpu_cache *cache, int slot, int row) {
    const int states = cpu_cache_states(cache);
    const int members = row < states ? row - cache->streams : cache->streams;
    if (row < cache->streams) return cpu_cache_table(cache, slot, row);
    return cpu_cache_table(cache, slot, cache->streams) + (size_t)members * cache->member_pages +
           (row < states ? 0 : (size_t)(row - states) * (size_t)cache->state_pages);
}

static inline int32_t *cpu_cache_length(const struct cpu_cache *cache, int slot, int row) {
    return &cache->lengths[(size_t)slot * (size_t)cache->rows + (size_t)row];
}

/* Returns the sinks of the query heads that belong to this rank's KV head `head`; NULL: none. */
static inline const float *cpu_cache_sinks(const struct cpu_cache *cache,
                                           const struct kern_attend_options *options, int layer,
                                           int head) {
    const struct cpu_layer *l = &cache->layers[layer];
    return options->sinks ? options->sinks + (size_t)((l->shard.first + head) * l->group) : NULL;
}

/* Returns the number that a stream of this rank has in the model. */
static inline int cpu_cache_model_stream(const struct cpu_cache *cache, int stream) {
    const struct cpu_layer *layer = cpu_cache_layer(cache, stream);
    return layer->first_model + layer->shard.first + stream - layer->first;
}

/* A stream as a kernel sees it: entry i is slot i % P of page pages[i / P]. */
struct cpu_stream {
    const uint32_t *pages;
    int32_t length;
    const struct cpu_layer *layer;
};

static inline struct cpu_stream cpu_cache_stream_at(const struct cpu_cache *cache, int slot,
                                                    int stream) {
    return (struct cpu_stream){
        .pages = cpu_cache_table(cache, slot, stream),
        .length = *cpu_cache_length(cache, slot, stream),
        .layer = cpu_cache_layer(cache, stream),
    };
}

static inline struct cpu_stream cpu_cache_stream(const struct cpu_cache *cache, int slot, int layer,
                                                 int head) {
    return cpu_cache_stream_at(cache, slot, cache->layers[layer].first + head);
}

/* Returns a stream's members; without members it has no pages. */
static inline struct cpu_stream cpu_cache_members(const struct cpu_cache *cache, int slot,
                                                  int stream) {
    int row = cache->streams + stream;
    return (struct cpu_stream){.pages = cpu_cache_row(cache, slot, row),
                               .length = *cpu_cache_length(cache, slot, row)};
}

/* A row of a step. */
struct cpu_row {
    int32_t span, place;
    int32_t ahead; /* so many rows behind it its query sees, too (kern_given.together) */
};

/* Adds the attention of a span's `count` queries, the last entries of the stream, to the scores of
 * the entries they see, query by query, so that the result does not depend on how a prompt is
 * split. Runs after write_kv; streams may run in parallel. Where entries have classes, this also
 * computes attention: the results go to `out`. */
struct cpu_mass {
    struct cpu_stream stream;
    const struct cpu_row *rows; /* the span's; NULL: no query sees beyond its own entry */
    const float *q; /* the group's first head in the span's first row; rotated, not scaled */
    size_t q_stride;
    int count;
    float scale;
    enum kern_group group;

    struct cpu_stream members; /* members of classes */
    bool positions;            /* kern_classes */
    int32_t pos;               /* position of the first query */
    int sliding_window; /* entries this far before a query, or farther, are masked; 0: none */
    float cap;          /* as in kern_attend_options */
    const float *sinks; /* one for each query head of the group, or NULL */
    float *out;         /* result of the span's first row; NULL: not wanted */
    size_t out_stride;
    int out_first, out_count; /* the group's heads whose results are wanted, consecutive */
};
void cpu_observe_mass(const struct cpu_cache *cache, const struct cpu_mass *mass, int worker);

/* Return where a page's keys and values begin, [P][D] each. If keys hold the values, both are the
 * same. */
static inline void *cpu_cache_k(const struct cpu_cache *cache, uint32_t page) {
    return cache->pool + page * cache->page_size;
}

static inline void *cpu_cache_v(const struct cpu_cache *cache, const struct cpu_layer *layer,
                                uint32_t page) {
    const size_t keys = layer->latent ? 0 : (size_t)layer->page_slots * layer->row_size;
    return cache->pool + page * cache->page_size + keys;
}

/* Returns where the factors of a page's keys or values begin; meaningless in a dtype without
 * factors. */
static inline uint16_t *cpu_cache_factors(const struct cpu_cache *cache,
                                          const struct cpu_layer *layer, uint32_t page,
                                          bool values) {
    size_t slots = (size_t)layer->page_slots;
    char *keys = cache->pool + page * cache->page_size + 2 * slots * layer->row_size;
    return (uint16_t *)keys + (values ? slots : 0);
}

/* Returns a page's keys or values from entry `first` on. */
static inline struct cpu_rows cpu_cache_rows(const struct cpu_cache *cache,
                                             const struct cpu_layer *layer, uint32_t page,
                                             bool values, int first) {
    const char *rows = values ? cpu_cache_v(cache, layer, page) : cpu_cache_k(cache, page);
    return (struct cpu_rows){.at = rows + (size_t)first * layer->row_size,
                             .factors = cpu_cache_factors(cache, layer, page, values) + first,
                             .stride = layer->head_dim,
                             .dim = values ? cpu_value_dim(layer) : layer->head_dim,
                             .dtype = cache->options.dtype};
}

static inline int32_t *cpu_cache_pos(const struct cpu_cache *cache, uint32_t page) {
    return cache->pos + (size_t)page * (size_t)cache->page_slots;
}

static inline float *cpu_cache_log_beta(const struct cpu_cache *cache, uint32_t page) {
    return cache->log_beta + (size_t)page * (size_t)cache->page_slots;
}

static inline float *cpu_cache_score(const struct cpu_cache *cache, uint32_t page) {
    return cache->score + (size_t)page * (size_t)cache->page_slots;
}

static inline int32_t cpu_cache_entry_pos(const struct cpu_cache *cache,
                                          const struct cpu_stream *stream, int32_t index) {
    const int32_t slots = stream->layer->page_slots;
    return cpu_cache_pos(cache, stream->pages[index / slots])[index % slots];
}

/* Returns how many entries of the stream have a position up to `pos`; positions ascend. */
static inline int32_t cpu_cache_entries_up_to(const struct cpu_cache *cache,
                                              const struct cpu_stream *stream, int32_t pos) {
    int32_t lo = 0, hi = stream->length;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (cpu_cache_entry_pos(cache, stream, mid) <= pos)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static inline struct cpu_member *cpu_cache_member(const struct cpu_cache *cache,
                                                  const uint32_t *table, int32_t index) {
    struct cpu_member *page = cpu_cache_k(cache, table[index / cache->member_slots]);
    return page + index % cache->member_slots;
}

/* Returns the index of the entry at a position; the number of entries if there is none. */
int32_t cpu_cache_find(const struct cpu_cache *cache, const struct cpu_stream *entries,
                       int32_t pos);

/* Moves an entry with its side records. Apart from the kernels, only this function knows how an
 * entry lies in its page. */
static inline void cpu_cache_move_entry(struct cpu_cache *cache, const struct cpu_layer *layer,
                                        uint32_t to_page, int to_slot, uint32_t from_page,
                                        int from_slot) {
    const size_t row = layer->row_size, to = (size_t)to_slot * row, from = (size_t)from_slot * row;
    memcpy((char *)cpu_cache_k(cache, to_page) + to, (char *)cpu_cache_k(cache, from_page) + from,
           row);
    if (!layer->latent)
        memcpy((char *)cpu_cache_v(cache, layer, to_page) + to,
               (char *)cpu_cache_v(cache, layer, from_page) + from, row);
    for (int values = 0; values < 2 && row_scaled(cache->options.dtype); values++)
        cpu_cache_factors(cache, layer, to_page, values)[to_slot] =
            cpu_cache_factors(cache, layer, from_page, values)[from_slot];
    cpu_cache_pos(cache, to_page)[to_slot] = cpu_cache_pos(cache, from_page)[from_slot];
    cpu_cache_log_beta(cache, to_page)[to_slot] = cpu_cache_log_beta(cache, from_page)[from_slot];
    cpu_cache_score(cache, to_page)[to_slot] = cpu_cache_score(cache, from_page)[from_slot];
}

#endif
