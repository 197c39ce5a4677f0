/* What the files of the CUDA backend share. C++; not for anybody else. */
#ifndef KEEPD_KERNELS_CUDA_INTERNAL_H
#define KEEPD_KERNELS_CUDA_INTERNAL_H

#include "kernels/cuda/device.h"
#include "kernels/cuda/pages.cuh"
#include "kernels/shard.h"

#define GROUP_MAX    16  /* query heads per KV head: rows of one mma tile */
#define RING_SIZES   4   /* rings hold 8, 16, 32 or 64 queries */
#define RINGS_SPARE  16  /* of a size, kept for the next slot */
#define PREFILL_ROWS 128 /* packed rows (token, query head of the group) of a prompt's tile */
#define PARTS_MAX    4   /* of a joined weight */

/* Row-major [rows][cols], the layout of the file; of several ranks each has its part. */
struct kern_weight {
    void *data;
    float *scale;          /* device, [rows]: E4M3, else NULL */
    enum kern_dtype dtype; /* BF16 or E4M3, or F32 for everything else */
    int64_t rows, cols;

    enum kern_shard shard;
    int64_t rows_model; /* of all ranks */
    int parts;
    struct shard_range part[PARTS_MAX]; /* the outputs of each that are here, in the model's */
    float *bias;                        /* room for theirs, of a bias for all; NULL: it is that */
};

/* Device memory that only grows; contents do not survive. */
struct room {
    void *mem;
    size_t bytes;
};

/* Activations in a product's numbers: bf16, or E4M3 and a scale for each row (kernels/quantize.h).
 * An argument of kernels. */
struct rounded {
    void *x;      /* [rows][cols]; NULL: none */
    float *scale; /* [rows], or NULL: bf16 */
};

struct slot {
    bool in_use;
    bool shared;   /* has been forked, so pages may have other owners: writers look */
    bool measured; /* has evicted: the weights of layers are what they were then */
    int32_t next_pos;
    int64_t entries_most;    /* it holds no more: counted from what was appended and evicted */
    bool classes;            /* its entries may have members */
    int32_t members_each;    /* evictions left no stream more of them */
    int64_t members_brought; /* with a snapshot */

    /* The last queries, when the rule has a window: the query at position p lies at p % window of
     * the ring if ring_pos says so. Device, [layers][window][heads_q * head_dim] bf16, rotated, not
     * scaled: the very numbers that attention used. */
    int32_t window; /* 0: no ring */
    uint16_t *ring;
    int32_t ring_pos[KERN_WINDOW_MAX]; /* -1: none */
};

/* One array of the cache on the device. */
struct region {
    void **array;
    size_t count, size; /* elements, and bytes of each */
    bool zero;          /* at the start */
};
#define REGIONS_MAX 24

/* A span on the device. */
struct span {
    int32_t slot, row, count, pos;
    int32_t window;    /* of the ring */
    uint16_t *ring;    /* NULL: its queries are not remembered */
    float score;       /* of the new entries */
    bool adds, begins; /* attention is added up in the entries; the slot was not in use */
    bool classes;      /* entries have members: its attention is what is added up (classes.cu) */
};

/* One decoding row: its stream of every (layer, head) is an item's source. */
struct plan_stream {
    int32_t full, tail; /* item of its first whole chunk; of the rest, or -1 */
};

struct plan_item {
    int32_t stream; /* decoding row * heads_kv + head */
    int32_t chunk;
};

/* Tile of PREFILL_ROWS packed rows of one span. */
struct prefill_tile {
    int32_t span, first;
};

/* What begin_step leaves for the layer operations of the same batch. */
struct step {
    struct kern_span *host; /* the batch's spans, to recognise it; grows */
    int host_room, span_count, rows;
    const struct span *spans; /* device, [span_count] */
    const int32_t *row_span;  /* device, [rows] */
    const int32_t *decode;    /* device, [decode_count]: spans of one row */
    const struct prefill_tile *tiles;
    int decode_count, tile_count;
    bool has_angles; /* rope's, of these rows */
    bool keeps;      /* a rule remembers or adds up queries */
};

struct cuda {
    struct kern base; /* first: a struct kern * is a struct cuda * */
    struct kern_ops ops;
    struct device *device;
    const struct comm *comm;           /* of one rank: comm_none */
    struct shard_heads shard;          /* this rank's, once the cache is open */
    struct kern_cache_options options; /* with its heads alone */
    bool has_cache;
    bool eager;               /* no graphs: nor are there any with several ranks, see README.md */
    int64_t summed, gathered; /* most outputs of a weight whose products ranks sum, or gather */
    size_t narrow_row, hidden_row; /* most bytes of a row in the numbers of weights; of a gate's
                                      layers */
    struct pages pages;
    struct slot *slots;
    struct step step;
    int32_t *lengths;         /* host, [streams]: of slot lengths_slot; see snapshot.cu */
    int lengths_slot;         /* -1: of none */
    struct pages_state state; /* what the last sync read, if nothing has changed since */
    bool state_known;

    /* Attention's plan, made by begin_step for all layers, and its partial results. */
    struct plan_item *items;     /* [layers][items_max] */
    struct plan_stream *streams; /* [layers][slots * heads_kv] */
    int32_t *item_counts;        /* [layers] */
    int64_t items_max;
    float *partials; /* [items_max][group][head_dim + 2]: o, then m, l */

    /* Rotation: frequencies and scale that `angles` was made with. */
    const float *rope_freq; /* host, to recognise it */
    float rope_scale;
    float *freq;        /* device, [head_dim / 2] */
    struct room angles; /* [rows][head_dim]: cosines, then sines */

    struct room narrow;  /* activations of a product, in its weight's numbers */
    struct room partial; /* products that other ranks have parts of */
    /* What the last norm or activation wrote, rounded by the same launch, so that the product that
     * follows at once need not: nothing was queued since `at`. */
    struct {
        struct room room;
        struct rounded made;
        const float *of;
        int64_t rows, cols;
        uint64_t at;
    } rounded;
    bool has_e4m3;      /* products of layers are E4M3: that is what they are rounded to */
    struct room hidden; /* gates */
    struct room select; /* evict: all of its stages */
    struct room look;   /* attention that is added up, of one step */
    struct mass *mass;  /* the same, see observe.cu */
    float scale;        /* of logits: attention's last */
    struct room sample; /* see sample.cu */
    struct room gather; /* reports, snapshots */
    uint16_t *rings[RING_SIZES][RINGS_SPARE]; /* not in use, see observe.cu */
    int ring_count[RING_SIZES];
};

static inline struct cuda *cuda_of(struct kern *kern) {
    return reinterpret_cast<struct cuda *>(kern);
}

static inline int cuda_group(const struct cuda *cuda) {
    return cuda->options.heads_q / cuda->options.heads_kv;
}

/* The room's memory, `bytes` at least; NULL when there is none (the failure sticks in the device).
 * What it held is gone. */
void *room_take(struct cuda *cuda, struct room *room, size_t bytes);

/* cuda.cu: what ranks do together; of one rank, nothing. All make the same calls, whatever has
 * failed before, so that nobody waits: a rank that cannot go on loses its device, and the others
 * theirs. */
void join_reduce(struct cuda *cuda, void *x, size_t count, enum comm_type type, enum comm_op op);
void join_gather(struct cuda *cuda, void *x, size_t bytes);
/* The lowest code of all ranks, at once: before anything is taken that only some may get. */
int join_agree(struct cuda *cuda, int code);

/* cache.cu */
int op_cache_open(struct kern *kern, const struct kern_cache_options *options, struct fault *fault);
void op_cache_info(enum kern_dtype dtype, int head_dim, struct kern_cache_info *info);
int op_cache_fit(struct kern *kern, const struct kern_cache_options *options, int64_t *pages,
                 struct fault *fault);
void cache_close(struct cuda *cuda);
int op_begin_step(struct kern *kern, const struct kern_batch *batch);
int op_truncate(struct kern *kern, int slot, int32_t pos);
int op_fork(struct kern *kern, int from, int to);
void op_release(struct kern *kern, int slot);
int op_report(struct kern *kern, int slot, struct kern_report *report);
void op_cache_stats(struct kern *kern, struct kern_cache_stats *stats);
int op_cache_check(struct kern *kern, struct fault *fault);
/* Before anything that changes what a slot holds. */
static inline void cache_changes(struct cuda *cuda) {
    cuda->lengths_slot = -1;
    cuda->state_known = false;
}
/* Reads and clears the sticky error of kernels, after waiting for them. */
int cache_sync(struct cuda *cuda);
/* The batch on the device: what begin_step left when it is the same one. */
const struct step *step_of(struct cuda *cuda, const struct kern_batch *batch);

/* Makes ERR_FULL stick if state->need is more than there are free pages, on any rank; need is 0
 * afterwards. */
void cache_decide(struct cuda *cuda);

/* snapshot.cu */
size_t op_snapshot_size(struct kern *kern, int slot, int block);
int op_snapshot_export(struct kern *kern, int slot, int block, void *to);
int op_snapshot_check(struct kern *kern, const struct kern_block *blocks, int count, int32_t tokens,
                      struct kern_report *report, struct fault *fault);
int op_snapshot_import(struct kern *kern, int slot, int block, const struct kern_block *from);

/* observe.cu */
/* A ring for `window` queries, of zeros; ERR_NOMEM. The slot's own, if it has one, is kept when it
 * is as large, and given back otherwise; nothing is remembered yet. */
int ring_take(struct cuda *cuda, struct slot *slot, int32_t window);
void ring_give(struct cuda *cuda, struct slot *slot); /* fine without a ring */
size_t ring_bytes(const struct cuda *cuda, int32_t window);
bool rings_close(struct cuda *cuda); /* those not in use; were there any? */
int op_prepare(struct kern *kern, int slot, const struct kern_rule *rule);
/* What the step's rules want of its queries: lists, once a step; queries of a layer, before its
 * attention; their mass, after it, with the answers where entries have classes. `window` is
 * kern_attend_options'. False: no memory for the lists. */
bool mass_stage(struct cuda *cuda, const struct kern_batch *batch);
void keep_queries(struct cuda *cuda, int layer, const float *qkv, float scale);
void add_mass(struct cuda *cuda, int layer, float *out, int window);
void mass_close(struct cuda *cuda);

/* Queries that a rule wants remembered; 0 without a rule. */
static inline int32_t rule_window(const struct kern_rule *rule) {
    return rule && rule->score == KERN_SCORE_ATTENTION ? rule->observe.window : 0;
}

/* Does it add up every query's attention? */
static inline bool rule_adds(const struct kern_rule *rule) {
    return rule && rule->score == KERN_SCORE_ATTENTION &&
           (rule->observe.window == 0 || rule->observe.global);
}

static inline bool rule_classes(const struct kern_rule *rule) {
    return rule && rule->merge == KERN_MERGE_CLASSES;
}

/* attend.cu */
/* Adds the arrays of attention's plan; returns how many. */
int attend_regions(struct cuda *cuda, struct region *regions);
void attend_plan(struct cuda *cuda);
void op_attend(struct kern *kern, int layer, float *out, const float *qkv,
               const struct kern_batch *batch, const struct kern_attend_options *options);

/* evict.cu */
int op_rule_check(const struct kern_rule *rule, struct fault *fault);
int op_evict(struct kern *kern, const struct kern_evict *due, int count);

/* rope.cu */
void op_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                const struct kern_rope *rope, const struct kern_batch *batch);
void op_write_kv(struct kern *kern, int layer, const float *qkv, const float *log_beta,
                 const struct kern_batch *batch);

/* rows.cu */
void op_embed(struct kern *kern, float *x, const struct kern_weight *table, float scale,
              const int32_t *tokens, int rows);
void op_rms_norm(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                 int dim, float eps);
void op_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff);
void op_gather_rows(struct kern *kern, float *y, const float *x, const int32_t *index, int count,
                    int dim);
/* Room for what the launch about to be queued writes, rounded, or none; that it has been queued and
 * wrote y; and what there is of x in these numbers, or none. E4M3 needs columns in multiples of
 * DEVICE_E4M3_STEP: others have no room. */
struct rounded rounded_take(struct cuda *cuda, int rows, int64_t cols);
void rounded_put(struct cuda *cuda, struct rounded made, const float *y, int rows, int64_t cols);
struct rounded rounded_find(const struct cuda *cuda, const float *x, int rows, int64_t cols,
                            enum kern_dtype dtype);

/* x[rows][cols] rounded by a launch of its own; E4M3: cols a multiple of 4. */
void narrow(struct cuda *cuda, struct rounded to, const float *x, int rows, int64_t cols);
/* y[rows][cols] += bias[cols]. */
void add_bias(struct cuda *cuda, float *y, const float *bias, int rows, int64_t cols);

/* weight.cu */
int op_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                   enum kern_shard shard, struct kern_weight **out, struct fault *fault);
void op_weight_free(struct kern *kern, struct kern_weight *weight);
void op_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
               const float *bias, int rows, enum kern_matmul_mode mode);
/* Takes the room that products of so many rows need of other ranks' parts; ERR_NOMEM. */
int matmul_reserve(struct cuda *cuda, int rows);
/* Takes the rooms of the largest step that the cache's options tell of; ERR_NOMEM. And their size,
 * when the weights are loaded. */
int rooms_reserve(struct cuda *cuda);
size_t rooms_bytes(const struct cuda *cuda, const struct kern_cache_options *options);
size_t sample_bytes(int rows, int vocab);

/* gate.cu */
int op_gate_load(struct kern *kern, const struct kern_gate_spec *spec, struct kern_gate **out,
                 struct fault *fault);
void op_gate_free(struct kern *kern, struct kern_gate *gate);
void op_gate(struct kern *kern, float *log_beta, const float *x, const struct kern_gate *gate,
             int rows);

/* sample.cu */
int op_sample(struct kern *kern, const float *logits, int rows, int vocab,
              const struct kern_sample *params, struct kern_sampled *out);

#endif
