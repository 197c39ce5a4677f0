/* Shared by the files of the CUDA backend. C++; nobody else includes it. */
#ifndef KEEPD_KERNELS_CUDA_INTERNAL_H
#define KEEPD_KERNELS_CUDA_INTERNAL_H

#include "kernels/cuda/device.h"
#include "kernels/cuda/pages.cuh"
#include "kernels/row.h"
#include "kernels/rule.h"
#include "kernels/shard.h"
#include "kernels/snapshot.h"

#define GROUP_MAX    16  /* query heads per KV head: rows of one mma tile */
#define RING_SIZES   4   /* rings hold 8, 16, 32 or 64 queries */
#define RINGS_SPARE  16  /* spare rings kept of each size */
#define PREFILL_ROWS 128 /* packed rows (token, query head of the group) of a prefill tile */
#define PARTS_MAX    4   /* parts of a joined weight */
#define KINDS_MAX    4   /* kinds of heads in a model */

struct matrix; /* matrix.cuh */

/* Row-major [rows][cols], the layout of the file; each of several ranks has its part. */
struct kern_weight {
    void *data;
    float *scale;          /* device: E4M3: [rows]; in blocks: factors; otherwise NULL */
    enum kern_dtype dtype; /* F16, BF16, E4M3, in blocks (packed.cuh), or F32 */
    int64_t rows, cols;
    int cut; /* products.h: parts of the inputs, multiplied apart; 1: they are not cut */

    enum kern_shard shard;
    int64_t rows_model; /* rows of all ranks */
    int parts;
    struct shard_range
        part[PARTS_MAX]; /* outputs of each part that are on this rank, numbered as in the model */
    float *bias; /* scratch for this rank's part of a bias; NULL: the rank has all outputs */

    /* The place in a table of the matrices of all heads, which the first of them owns: latent.cu.
     * NULL: it is in none. */
    struct matrix *head;
    bool owns_heads;
};

/* Device memory that only grows; growing discards the contents. */
struct room {
    void *mem;
    size_t bytes;
};

/* Activations in the number format of a product: bf16, f16 (at most 65504 in magnitude), or E4M3
 * with a scale for each row (kernels/quantize.h). Passed to kernels by value. */
struct rounded {
    void *x;      /* [rows][cols]; NULL: none */
    float *scale; /* [rows]: E4M3; otherwise NULL */
    enum kern_dtype dtype;
};

struct slot {
    bool in_use;
    bool shared;   /* has been forked: pages may be shared, so writers check */
    bool measured; /* has evicted: the layers' weights are measured */
    bool adds;     /* prepared for a rule that adds up attention */
    int64_t pages; /* the most that its streams will have, as prepare was told */
    int32_t next_pos;
    int64_t entries_most; /* upper bound of its entries, counted from appends and evictions */
    int64_t forked;       /* entries that it shared with its source when it was forked */

    /* The last queries, if the rule has a window: the query at position p is at p % window of the
     * ring if ring_pos says so. Device, [layers][window][heads_q * head_dim] bf16 with each layer's
     * head_dim, rotated, not scaled: exactly the numbers that attention used. */
    int32_t window; /* 0: no ring */
    uint16_t *ring;
    int32_t ring_pos[KERN_WINDOW_MAX]; /* -1: none */
};

/* One array of the cache on the device. */
struct region {
    void **array;
    size_t count, size; /* elements, and bytes of each */
    bool zero;          /* initialised to zeros */
};
#define REGIONS_MAX 24

/* A span on the device. */
struct span {
    int32_t slot, row, count, pos;
    int32_t place;  /* the first row's, by which it is rotated */
    int32_t window; /* window of the ring */
    uint16_t *ring; /* NULL: the span's queries are not stored */
    float score;    /* score of the new entries */
    bool adds,
        begins; /* adds: attention is added up in the entries; begins: the slot was not in use */
};

/* Heads of layers that have equally many and equally wide ones. */
struct heads_kind {
    int heads_model, head_dim; /* KV heads of the model */
    int group;                 /* query heads for each of them */
    struct shard_heads shard;  /* this rank's */
    int row_bytes, page_slots;
    int layers; /* layers with such heads */
};

/* One decoding row: its stream of every (layer, head) is an item's source. */
struct plan_stream {
    int32_t full, tail; /* item of its first whole chunk; item of the rest, or -1 */
};

struct plan_item {
    int32_t stream; /* decoding row * heads_kv + head */
    int32_t chunk;
};

/* Tile of PREFILL_ROWS packed rows of one span. */
struct prefill_tile {
    int32_t span, first;
};

/* Tiles of one kind of heads; device. */
struct prefill_tiles {
    const struct prefill_tile *list;
    int count;
};

/* The options of a layer's last attention, which also apply to queries that are observed later. */
struct attended {
    const float *sinks; /* kern_attend_options: of this rank's heads, device; NULL: none */
    int32_t sliding_window;
};

#define CUDA_ROPES 2 /* different rotations of one model's layers */

/* A rotation: the frequencies and scale that `angles` was made with. */
struct cuda_rope {
    const float *inv_freq; /* host, to recognise the frequencies; NULL: unused */
    float scale;
    float *freq;        /* device, [head_dim / 2] */
    uint8_t *axes;      /* device, [head_dim / 2] kern_rope.axes; NULL: there was no need of them */
    struct room angles; /* [rows][head_dim]: cosines, then sines */
};

/* Results of begin_step for the layer operations of the same batch. */
struct step {
    struct kern_span *host; /* the batch's spans, to recognise the batch; grows */
    int host_room, span_count, rows;
    const struct span *spans;              /* device, [span_count] */
    const int32_t *row_span;               /* device, [rows] */
    const int32_t *decode;                 /* device, [decode_count]: spans with one row */
    const struct kern_place *batch_places; /* host, to recognise the batch */
    const struct kern_place *places;       /* the same on the device, [rows], or NULL */
    const struct kern_given *batch_given;  /* host, to recognise the batch */
    const int32_t *ahead; /* device, [rows]: so many rows behind it a row sees, too; NULL: none */
    struct prefill_tiles tiles[KINDS_MAX];
    int decode_count;
    bool has_angles[CUDA_ROPES]; /* the angles of these rows are computed, for each rotation */
    bool keeps;                  /* some rule stores or adds up queries */
};

struct cuda {
    struct kern base; /* first: a struct kern * is a struct cuda * */
    struct kern_ops ops;
    struct device *device;
    const struct comm *comm;           /* comm_none for a single rank */
    struct shard_heads shard;          /* this rank's heads, once the cache is open; where layers
                                          differ, in those with the most */
    struct kern_cache_options options; /* counts this rank's heads */
    struct heads_kind kinds[KINDS_MAX];
    int kind_count, group_most;    /* group_most: the largest group */
    int64_t queries;               /* numbers of a token's queries in all layers */
    struct layer_place *layers;    /* host, [layers]: a copy of pages.layer_places */
    struct snapshot_layer *shapes; /* host, [layers] */
    bool has_cache;
    bool eager; /* no graphs; with several ranks there are none either, see README.md */
    int64_t summed,
        gathered;    /* largest number of outputs of a weight whose products ranks sum, or gather */
    size_t sums_row; /* largest number of bytes of the sums of a row's blocks */
    size_t narrow_row, hidden_row; /* largest number of bytes of a row in a weight's number format;
                                      of a gate's layers, or of an expert's */
    size_t parts_row, parts_row_many; /* bytes of the parts' sums of a product: of a row; of a row
                                         where many rows need them, too (products.h) */
    size_t gate_parts_row, gate_parts_most; /* bytes of the parts' sums of a gate: of a row; of few
                                               rows at most, see gate.cu */
    struct pages pages;
    struct slot *slots;
    struct step step;
    int32_t *lengths;         /* host, [streams]: lengths of slot lengths_slot; see snapshot.cu */
    int lengths_slot;         /* -1: none */
    struct pages_state state; /* as read by the last sync, valid while nothing has changed */
    bool state_known;

    /* Attention's plan, computed by begin_step for all layers, and its partial results. */
    struct plan_item *items;           /* [layers][items_max] */
    struct plan_stream *streams;       /* [layers][slots * heads_kv] */
    int32_t *item_counts;              /* [layers] */
    int64_t items_max, forked_entries; /* the latter: sum over slots */
    float *partials; /* [items_max][group]: o, then m, l; see PARTIAL_ROW; room for every kind */

    struct cuda_rope ropes[CUDA_ROPES];

    struct room narrow;  /* activations of a product, in its weight's number format */
    struct room partial; /* partial products, to be summed with other ranks' parts */
    /* Rounded output of the last norm or activation, from the same launch, so that a product that
     * follows directly need not round: valid if nothing was queued since `at`. */
    struct {
        struct room room;
        struct rounded made;
        const float *of;
        int64_t rows, cols;
        uint64_t at;
    } rounded;
    enum kern_dtype layers_dtype; /* BF16, or F16 or E4M3 if products of layers are: activations are
                                     rounded to it */
    struct room hidden;           /* layers of gates and of experts */
    struct room parts;            /* sums of the parts of a product, see products.h */
    struct room sums;             /* sums of the activations of blocks, see packed.cu */
    struct room squares;          /* sums of squares of heads, see rope.cu and mamba.cu */
    struct room rotated;          /* queries of a step, where the cache's rows are rotated */
    struct room select;           /* all stages of evict */
    struct room look;             /* attention added up in one step */
    struct mass *mass;            /* lists for the same, see observe.cu */
    struct attended *attended;    /* host, [layers] */
    float scale, cap;             /* kern_attend_options of attention's last call */
    struct room sample;           /* see sample.cu */
    struct room gather;           /* reports, snapshots */
    uint16_t *rings[RING_SIZES][RINGS_SPARE]; /* unused rings, see observe.cu */
    int ring_count[RING_SIZES];
};

static inline struct cuda *cuda_of(struct kern *kern) {
    return reinterpret_cast<struct cuda *>(kern);
}

/* The kind of a layer's heads, once the cache is open. */
static inline const struct heads_kind *kind_of_layer(const struct cuda *cuda, int layer) {
    return &cuda->kinds[cuda->layers[layer].kind];
}

/* Numbers of a row of queries. */
static inline int64_t kind_query_width(const struct heads_kind *kind) {
    return (int64_t)kind->shard.heads_q * kind->head_dim;
}

/* Numbers of a row of queries and, unless it has queries alone, of keys and of values that no key
 * holds. */
static inline int64_t kind_row_width(const struct cuda *cuda, const struct heads_kind *kind,
                                     bool queries) {
    const int sides = queries ? 0 : cuda->options.latent ? 1 : 2;
    return kind_query_width(kind) + (int64_t)sides * kind->shard.heads_kv * kind->head_dim;
}

/* The pages as they are for a layer. */
static inline struct pages layer_pages(const struct cuda *cuda, int layer) {
    struct pages own = pages_with(cuda->pages, cuda->layers[layer].slots);
    own.heads_kv = cuda->layers[layer].heads;
    return own;
}

/* Returns the room's memory, at least `bytes`; NULL if there is none (the device keeps the
 * failure). Previous contents are lost. */
void *room_take(struct cuda *cuda, struct room *room, size_t bytes);
/* Makes the room at least so large, for later steps; ERR_NOMEM leaves it as it was. */
int room_reserve(struct cuda *cuda, struct room *room, size_t bytes);

/* cuda.cu: collectives of the ranks; no effect for a single rank. All ranks make the same calls,
 * whatever has failed before, so that none waits: a rank that cannot continue loses its device, and
 * the others lose theirs. */
void join_reduce(struct cuda *cuda, void *x, size_t count, enum comm_type type, enum comm_op op);
void join_gather(struct cuda *cuda, void *x, size_t bytes);
/* Returns the lowest code of all ranks, at once: before anything is allocated that only some ranks
 * may get. */
int join_agree(struct cuda *cuda, int rc);

/* cache_open.cu */
int op_cache_open(struct kern *kern, const struct kern_cache_options *options, struct fault *fault);
void op_cache_info(const struct kern_cache_options *options, struct kern_cache_info *info);
int op_cache_fit(struct kern *kern, const struct kern_cache_options *options, int64_t *pages,
                 struct fault *fault);
void cache_close(struct cuda *cuda);

/* cache.cu */
int op_begin_step(struct kern *kern, const struct kern_batch *batch);
int op_truncate(struct kern *kern, int slot, int32_t pos);
int op_fork(struct kern *kern, int from, int to);
void op_release(struct kern *kern, int slot);
int op_report(struct kern *kern, int slot, struct kern_report *report);
void op_cache_stats(struct kern *kern, struct kern_cache_stats *stats);
int op_cache_check(struct kern *kern, struct fault *fault);
/* Called before anything that changes a slot's contents. */
static inline void cache_changes(struct cuda *cuda) {
    cuda->lengths_slot = -1;
    cuda->state_known = false;
}
/* Waits for the kernels, then reads and clears their error. */
int cache_sync(struct cuda *cuda);
/* The batch on the device: begin_step's result if the batch is the same. */
const struct step *step_of(struct cuda *cuda, const struct kern_batch *batch);

/* Records ERR_FULL if state->need exceeds the number of free pages on any rank; need is 0
 * afterwards. */
void cache_decide(struct cuda *cuda);

/* snapshot.cu */
size_t op_snapshot_size(struct kern *kern, int slot, int block);
int op_snapshot_export(struct kern *kern, int slot, int block, void *to);
int op_snapshot_check(struct kern *kern, const struct kern_block *blocks, int count, int32_t tokens,
                      struct kern_report *report, struct fault *fault);
int op_snapshot_import(struct kern *kern, int slot, int block, const struct kern_block *from);

/* observe.cu */
/* Gives the slot a zeroed ring for `window` queries, or ERR_NOMEM. Keeps the slot's ring if it has
 * that size and returns it otherwise; no query is stored in it yet. */
int ring_take(struct cuda *cuda, struct slot *slot, int32_t window);
void ring_give(struct cuda *cuda, struct slot *slot); /* allowed without a ring */
size_t ring_bytes(const struct cuda *cuda, int32_t window);
bool rings_close(struct cuda *cuda); /* frees unused rings; returns false if there were none */
int op_prepare(struct kern *kern, int slot, const struct kern_rule *rule, int64_t pages);
/* Serves the rules of the step: stages lists once per step; stores the queries of a layer before
 * its attention; adds up their attention after it. Returns false if there is no memory for the
 * lists. */
bool mass_stage(struct cuda *cuda, const struct kern_batch *batch);
void keep_queries(struct cuda *cuda, int layer, const float *queries, int64_t stride);
void add_mass(struct cuda *cuda, int layer);
void mass_close(struct cuda *cuda);

/* attend.cu */
/* Adds the arrays of attention's plan; returns their number. */
int attend_regions(struct cuda *cuda, struct region *regions);
/* Enlarges the plan for slots that together have `forked_entries` more entries than the pool,
 * because forks share pages. ERR_NOMEM leaves the plan as it is. */
int attend_grow(struct cuda *cuda, int64_t forked_entries);
size_t attend_shared(const struct cuda *cuda); /* bytes of shared memory that a block needs */
void attend_plan(struct cuda *cuda);
void op_attend(struct kern *kern, int layer, float *out, const float *qkv,
               const struct kern_batch *batch, const struct kern_attend_options *options);

/* compact.cu */
size_t compact_shared(const struct cuda *cuda); /* bytes of shared memory that a block needs */

/* evict.cu */
int op_rule_check(const struct kern_rule *rule, struct fault *fault);
/* Can this cache's sequences have the rule? A rule that multiplies keys cannot run where keys are
 * latent vectors: shared memory has no room for PRODUCT_KEYS of them beside queries of all heads.
 */
bool rule_fits(const struct cuda *cuda, const struct kern_rule *rule);
int op_evict(struct kern *kern, const struct kern_evict *due, int count);
/* Makes room for evictions of the slot alone with all its pages; ERR_NOMEM. */
int evict_reserve(struct cuda *cuda, int slot, const struct kern_rule *rule);

/* rope.cu */
void op_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                const struct kern_rope *rope, const struct kern_batch *batch);
/* Rotates the rows of heads as the cache's rows are (kernels/row.h), from one array to another or
 * in place; strides are floats from one row to the next. */
struct heads_array {
    float *at;
    int64_t stride;
};
void rotate_heads(struct cuda *cuda, struct heads_array to, struct heads_array from, int rows,
                  int heads, int head_dim);
void op_write_kv(struct kern *kern, int layer, const float *qkv, const float *log_beta,
                 const struct kern_batch *batch);

/* rows.cu */
void op_embed(struct kern *kern, float *x, const struct kern_weight *table, float scale,
              const int32_t *tokens, int rows);
void op_rms_norm(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                 int dim, float eps);
void op_soft_cap(struct kern *kern, float *x, int rows, int dim, float cap);
void op_qk_norm(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                const struct kern_batch *batch);
void op_add_norm(struct kern *kern, float *y, float *x, const float *weight, int rows, int dim,
                 float eps);
void op_open_gates(struct kern *kern, float *x, const float *gates, int rows, int dim, bool one);
void op_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff,
            enum kern_activation activation);
void op_glu_apart(struct kern *kern, float *y, const float *gate, const float *up,
                  int64_t up_stride, int rows, int dim, enum kern_activation activation);
void op_add(struct kern *kern, float *y, const float *x, int rows, int dim);
void op_scale(struct kern *kern, float *x, const float *factor, int rows, int dim);
void op_gather_rows(struct kern *kern, float *y, const float *x, const int32_t *index, int count,
                    int dim);
/* rounded_take: memory for the rounded output of the launch about to be queued, or none.
 * rounded_put: the launch has been queued and wrote y. rounded_find: x in rounded form, or none.
 * E4M3 needs columns in multiples of DEVICE_E4M3_STEP; other shapes get none. */
struct rounded rounded_take(struct cuda *cuda, int rows, int64_t cols);
void rounded_put(struct cuda *cuda, struct rounded made, const float *y, int rows, int64_t cols);
struct rounded rounded_find(const struct cuda *cuda, const float *x, int rows, int64_t cols,
                            enum kern_dtype dtype);

/* Rounds x[rows][cols] in a separate launch; E4M3: cols a multiple of 4. */
void narrow(struct cuda *cuda, struct rounded to, const float *x, int rows, int64_t cols);
/* y[rows][cols] += bias[cols]. */
void add_bias(struct cuda *cuda, float *y, const float *bias, int rows, int64_t cols);

/* weight.cu */
int op_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                   enum kern_shard shard, struct kern_weight **out, struct fault *fault);
void op_weight_free(struct kern *kern, struct kern_weight *weight);
void op_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
               const float *bias, int rows, enum kern_matmul_mode mode);
/* Allocates scratch for other ranks' parts of products with `rows` rows; ERR_NOMEM. */
int matmul_reserve(struct cuda *cuda, int rows);
/* Allocates the scratch of the largest step, as stated by the cache's options; ERR_NOMEM.
 * rooms_bytes: its size, once the weights are loaded. */
int rooms_reserve(struct cuda *cuda);
size_t rooms_bytes(const struct cuda *cuda, const struct kern_cache_options *options);
size_t sample_bytes(int rows, int vocab);

/* delta.cu, mamba.cu, conv.cu */
void op_short_conv(struct kern *kern, int state, float *y, const float *bcx, const float *taps,
                   int channels, int width, const struct kern_batch *batch);
void op_delta(struct kern *kern, int state, float *y, float *in, float *rates,
              const struct kern_delta *delta, const struct kern_batch *batch);
void op_mamba(struct kern *kern, int state, float *y, float *in, float *shared,
              const struct kern_mamba *mamba, const struct kern_batch *batch);

/* latent.cu */
int op_latent_reserve(struct kern *kern, struct kern_weight *const *weights, int heads);
void op_latent_in(struct kern *kern, float *qkv, const float *q, const float *entries,
                  const struct kern_latent *latent, int rows);
void op_latent_out(struct kern *kern, float *y, const float *x, const struct kern_latent *latent,
                   int rows);

/* gate.cu */
int op_gate_load(struct kern *kern, const struct kern_gate_spec *spec, struct kern_gate **out,
                 struct fault *fault);
void op_gate_free(struct kern *kern, struct kern_gate *gate);
/* Bytes of cuda->hidden for so many rows of gates and experts. */
size_t gate_bytes(const struct cuda *cuda, int rows);
void op_gate(struct kern *kern, float *log_beta, const float *x, const struct kern_gate *gate,
             int rows);

/* sample.cu */
int op_sample(struct kern *kern, const float *logits, int rows, int vocab,
              const struct kern_sample *params, struct kern_sampled *out);

#endif
