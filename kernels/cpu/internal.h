/* Internal types of the CPU backend; only its files include them.
 *
 * An operation has two parts: its driver (ops.c, matmul.c, gate.c, attend.c: threads, shapes,
 * distribution of work, the same for every path) and its kernels (one table of functions per path,
 * single-threaded, compiled for that path's instructions). A kernel's result for a row must not
 * depend on the worker that runs it or on the number of rows, so drivers may split work freely.
 *
 * All buffers that grow are sized by configuration (largest weight, cache options, largest step)
 * and never exceed that; after the first largest step nothing allocates. */
#ifndef KEEPD_KERNELS_CPU_INTERNAL_H
#define KEEPD_KERNELS_CPU_INTERNAL_H

#include <math.h>
#include <stdint.h>

#include "kernels/cpu/alloc.h"
#include "kernels/cpu/cache.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/team.h"
#include "kernels/number.h"

/* ---- Weights ---- */

#define PANEL         16 /* outputs per panel */
#define CPU_PARTS_MAX 4  /* parts of a joined weight */

/* Layouts of weights in memory. Outputs are padded to whole panels, and the inputs of a leaf of
 * pairs to a multiple of 32, with zeros. Leaves of blocks consist of whole blocks. */
enum cpu_layout {
    CPU_ROWS,        /* [rows][cols] in `dtype`: the reference path */
    CPU_PANEL_F32,   /* [panels][cols][16] float: the 16 outputs of a panel for each input */
    CPU_BLOCKS,      /* [panels] of block.h, on every path */
    CPU_PANEL_PAIRS, /* [panels][depth / 2][16][2] bf16: 16 pairs are one 1 KiB AMX tile */
    CPU_PANEL_E4M3   /* [panels][depth / 2][16][2] e4m3 */
};

struct kern_weight {
    enum cpu_layout layout;
    enum kern_dtype dtype;
    enum kern_shard shard;
    int64_t rows, cols;
    int leaves;         /* number of parts of a sum over inputs, see below; a power of two */
    int64_t leaf_depth; /* inputs of the longest leaf, padded */
    int64_t depth;      /* padded inputs of all leaves */
    int64_t panels;     /* panels of 16 rows, the last perhaps padded */
    int64_t blocks;     /* CPU_BLOCKS: blocks of a row */
    const struct cpu_form *form; /* CPU_BLOCKS: the layout of its blocks (block.h) */
    bool halves;                 /* CPU_BLOCKS: factors of kind CPU_FLOATS are float16 */
    size_t panel_bytes;
    char *data;
    bool factored; /* some parts have a factor */
    float *scale;  /* [rows]: E4M3 with one factor for a row, or factored; otherwise NULL */
    /* E4M3 with factors of `group` inputs: [groups][panels of 16], otherwise NULL and 0. The first
       input is number `skipped` of its group. Leaves begin at multiples of KERN_BLOCK. */
    float *group_scale;
    int64_t group, skipped;
    /* If the blocks of a joined weight's parts have different layouts, the weight is a list: each
     * member has `rows` of the `width` outputs, from `first` on. The fields below `next` are set in
     * the list's first member. */
    int64_t first, width;
    struct kern_weight *next; /* NULL: the last */

    int64_t rows_model; /* rows of all ranks */
    int parts;
    struct shard_range part[CPU_PARTS_MAX]; /* outputs of each part that are on this rank, numbered
                                               as in the model */
};

/* Sums over inputs that tensor parallelism splits are made in leaves, which are added like a binary
 * tree, so that any number of ranks adds the same numbers in the same order (kernels/comm.h). While
 * leaves are computed in order, complete partial sums lie on a stack: leaf i is stored at level
 * popcount(i), and for every trailing 1 bit of i the top two levels are added. The last leaf leaves
 * the sum at level 0. */
#define CPU_LEAVES      COMM_RANKS_MAX
#define CPU_LEAF_LEVELS 4

struct cpu_leaf {
    int64_t first, count; /* inputs */
    int64_t place;        /* first input of the leaf within a panel */
};

/* Returns the number of inputs of which the starts of leaves are multiples. */
static inline int64_t cpu_leaf_unit(const struct kern_weight *w) {
    return w->layout == CPU_BLOCKS || w->group ? KERN_BLOCK : 1;
}

static inline struct cpu_leaf cpu_leaf_of(const struct kern_weight *w, int leaf) {
    int64_t unit = cpu_leaf_unit(w), units = (w->cols + unit - 1) / unit;
    int64_t first = units * leaf / w->leaves * unit, end = units * (leaf + 1) / w->leaves * unit;
    return (struct cpu_leaf){.first = first,
                             .count = (end < w->cols ? end : w->cols) - first,
                             .place = w->layout >= CPU_PANEL_PAIRS ? leaf * w->leaf_depth : first};
}

static inline int cpu_leaf_level(int leaf) {
    return __builtin_popcount((unsigned)leaf);
}

/* ---- Kernels of one path ---- */

/* Rows of one pass over a weight: that many rows of activations fit a core's second-level cache,
 * and they bound the packing buffer. */
#define MATMUL_ROWS 256

struct cpu_matmul_job {
    const struct kern_weight *weight;
    const float *x;     /* [rows][cols] */
    const char *packed; /* x packed by the path's pack_x, or NULL */
    /* x in int8 or, if `wide`, int16 (block.h), [rows][depth] and [rows][blocks]; or NULL */
    const char *codes;
    const struct cpu_x_block *x_blocks;
    bool wide;
    const float *scale; /* [weight->rows] scales of the sums, or NULL */
    const float *bias;  /* [weight->rows] or NULL */
    float *y;           /* [rows][width], the weight's first output in each row */
    int64_t width;
    int rows; /* <= MATMUL_ROWS */
    enum kern_matmul_mode mode;
};

/* Attention of one layer of one step. A "lane" is one query vector: lane = token of the span *
 * group + query head within the group, so that all lanes of an item read the same keys. */
struct cpu_attend_job {
    const struct cpu_cache *cache;
    const struct kern_batch *batch;
    int layer, heads_kv, head_dim, value_dim;
    const struct cpu_layer *shape; /* the layer's heads and pages */
    int group;                     /* query heads per KV head that attend */
    int query, heads;              /* the first of these heads, and how many a row of qkv has */
    const struct cpu_row *rows;    /* the batch's */
    const float *qkv;              /* [rows][qkv_stride] */
    size_t qkv_stride;
    float *out;         /* [rows][heads_kv * group * value_dim] */
    float scale, cap;   /* as in kern_attend_options */
    const float *sinks; /* one for each query head of this rank, or NULL */
    int sliding_window;
    bool both_ways; /* as in kern_attend_options */
};

struct cpu_attend_item {
    int32_t span, head; /* KV head */
    int32_t lane, lanes;
    int64_t cost; /* entries to visit, for balance only */
};

/* Return the query, and the result, of a lane of an item. */
static inline const float *cpu_attend_query(const struct cpu_attend_job *job,
                                            const struct cpu_attend_item *item, int lane) {
    int token = (item->lane + lane) / job->group, j = (item->lane + lane) % job->group;
    size_t row = (size_t)job->batch->spans[item->span].row + (size_t)token;
    return job->qkv + row * job->qkv_stride +
           (size_t)(item->head * job->heads + job->query + j) * (size_t)job->head_dim;
}

static inline float *cpu_attend_out(const struct cpu_attend_job *job,
                                    const struct cpu_attend_item *item, int lane) {
    int token = (item->lane + lane) / job->group, j = (item->lane + lane) % job->group;
    size_t row = (size_t)job->batch->spans[item->span].row + (size_t)token;
    return job->out +
           ((row * (size_t)job->heads_kv + (size_t)item->head) * (size_t)job->group + (size_t)j) *
               (size_t)job->value_dim;
}

/* Sets the largest logit, and the sum of weights relative to it, of a lane that has read no entry:
 * they are those of its head's sink. */
static inline void cpu_attend_begin(const struct cpu_attend_job *job,
                                    const struct cpu_attend_item *item, int lane, float *most,
                                    float *sum) {
    int head = item->head * job->heads + job->query + (item->lane + lane) % job->group;
    *most = job->sinks ? job->sinks[head] : -INFINITY;
    *sum = job->sinks ? 1 : 0;
}

/* A token in 16 columns of a recurrent state. */
struct cpu_delta_token {
    const float *q, *k; /* [dim] */
    const float *v;     /* [16] */
    float decay, rate;
    bool corrects; /* gated delta rule; false: Mamba-2, where q is C, k is B and v is x */
};

struct cpu_kernels {
    const char *name;
    enum cpu_layout layout_bf16, layout_e4m3,
        layout_other; /* layouts of weights, by the weight's dtype */

    void (*rms_norm)(float *y, const float *x, const float *weight, int dim, float eps);
    void (*glu)(float *y, const float *gate, const float *up, int count,
                enum kern_activation activation);
    /* Rotates a head's vector x of 2 * half numbers, after an RMSNorm by `norm` [2 * half] unless
     * it is NULL. */
    void (*rope)(float *x, int half, const float *cosine, const float *sine, const float *norm,
                 float eps);
    /* Writes a key or value in the cache's format: number_write_row. */
    void (*write_row)(void *row, const float *from, int count, enum kern_dtype dtype);
    /* state [dim][16] <- decay state + k (x) rate (v - decay k state), in which the last product is
     * 0 unless the token corrects; out [16] = q state; dim is a multiple of 4. */
    void (*delta)(float *state, int dim, const struct cpu_delta_token *token, float *out);

    /* Computes the outputs of panels [first, first + count). `next`: the panel that this worker
     * processes next, for prefetching; < 0: none. */
    void (*matmul)(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                   void *scratch);
    size_t (*matmul_scratch)(const struct kern_weight *weight); /* NULL: none */
    /* For weights in pairs, if the path wants bf16 activations (in pairs or alone): bytes for
     * MATMUL_ROWS rows, and packing of rows [row, row + 16) clipped to the job. NULL: the path
     * reads x itself. */
    size_t (*packed_bytes)(int64_t depth);
    void (*pack_x)(const struct cpu_matmul_job *job, int row, char *packed);
    bool packs_blocks; /* x is also packed for weights in blocks; struct cpu_block_kernels is then
                          unused */
    bool packs_groups; /* x is also packed for weights with factors of groups */

    const struct cpu_math *math; /* observing attention, comparing keys */
    size_t (*attend_scratch)(const struct kern_cache_options *options);
    int (*attend_lanes)(const struct kern_cache_options *options); /* most lanes per item */
    void (*attend)(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                   void *scratch);
    const char *attention; /* text: how attention rounds queries and weights; NULL: it does not */
    const char *stored;    /* text: type of activations for weights in bf16 and fp8; NULL: f32 */
};

extern const struct cpu_kernels cpu_kernels_reference;
extern const struct cpu_kernels cpu_kernels_portable;
/* built.h says which of these a build contains. */
extern const struct cpu_kernels cpu_kernels_avx2;
extern const struct cpu_kernels cpu_kernels_neon;
extern const struct cpu_kernels cpu_kernels_avx512;
extern const struct cpu_kernels cpu_kernels_bf16; /* avx512 that rounds to bf16 */
extern const struct cpu_kernels cpu_kernels_amx;
extern const struct cpu_kernels cpu_kernels_amx_bf16; /* amx with activations in bf16 */

/* ---- The instance ---- */

/* A buffer that only grows. When it grows, its contents are lost. */
struct cpu_room {
    void *mem;
    size_t bytes;
};

struct cpu {
    struct kern base; /* first: a struct kern * is a struct cpu * */
    struct kern_ops ops;
    const struct cpu_kernels *kernels;
    const struct cpu_block_kernels *block_kernels; /* NULL: activations stay float32 */
    enum cpu_activations activations;
    char said[160];          /* the text of kern_ops.activations */
    const struct comm *comm; /* comm_none with one rank */
    int leaves;              /* leaves of this rank's part of a sum that ranks split */
    struct cpu_team *team;
    int threads;

    struct cpu_arena weights;
    struct cpu_room *scratch;  /* [threads] */
    struct cpu_room packed;    /* activations of one pass, packed by pack_x or rounded */
    struct cpu_room partial;   /* several ranks: partial products of one pass */
    struct cpu_room bias;      /* a rank's part of a bias */
    int failed;                /* the communicator's first error, kept for good */
    struct cpu_room routes;    /* experts of the step's rows, see cpu_experts_reserve */
    struct cpu_room routed;    /* activations of MATMUL_ROWS rows of one expert */
    int experts, experts_used; /* the largest numbers of a layer */
    struct cpu_room hidden;    /* gate: [MATMUL_ROWS][first layer], then the second */
    struct cpu_room rows;      /* struct cpu_row per row of the step */
    struct cpu_room items;     /* struct cpu_attend_item */

    struct cpu_room angles; /* per row: cos and sin [head_dim] of the places in angle_places */
    struct cpu_room angle_places;
    struct cpu_room squares; /* per row: sums of squares of the model's query heads, then key heads;
                                or decays, then sums of squares, of a Mamba-2 layer's heads */
    const float *angle_freq; /* the frequencies and the scale from which `angles` was computed */
    float angle_scale;
    int angle_half;

    struct cpu_cache cache;
    bool has_cache;
};

static inline struct cpu *cpu_of(struct kern *kern) {
    return (struct cpu *)kern;
}

/* Remembers a communicator's error until `sync` reports it. */
static inline void cpu_note(struct cpu *cpu, int rc) {
    if (cpu->failed == 0) cpu->failed = rc;
}

/* Returns 0 or ERR_NOMEM, which leaves the buffer as it was. */
int cpu_room_grow(struct cpu_room *room, size_t bytes);
void cpu_room_must(struct cpu_room *room, size_t bytes);
int cpu_scratch_grow(struct cpu *cpu, size_t bytes); /* the scratch of every worker */
int cpu_step_reserve(struct cpu *cpu, int row_count, int span_count); /* 0 or ERR_NOMEM */
const struct cpu_row *cpu_rows(struct cpu *cpu, const struct kern_batch *batch);

/* Runs work(arg, worker) on all workers, or on the caller alone if `cost` (about one per float
 * touched) is too small to pay for a barrier. */
void cpu_run(struct cpu *cpu, int64_t cost, cpu_work *work, void *arg);
/* Does the same by calling one(job, item) for each of `items` items. */
void cpu_run_items(struct cpu *cpu, int64_t cost, void (*one)(const void *job, int item),
                   const void *job, int items);

/* weight.c */
int cpu_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                    enum kern_shard shard, struct kern_weight **out, struct fault *fault);
void cpu_weight_free(struct kern *kern, struct kern_weight *weight);
void cpu_weight_row(const struct kern_weight *weight, int64_t row, float *out /* [cols] */);
void cpu_weight_numbers(const struct kern_weight *weight, int64_t row, float *out); /* unscaled */

/* matmul.c */
void cpu_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
                const float *bias, int rows, enum kern_matmul_mode mode);
int cpu_matmul_reserve(struct cpu *cpu, const struct kern_weight *weight);
/* Computes y[r, h] = W[h] x[r, h]; all matrices have the same shape and KERN_SHARD_NONE. */
struct cpu_heads {
    struct kern_weight *const *weights; /* [count] */
    int count, rows;
    const float *x;
    float *y;
    int64_t x_row, x_head, y_row, y_head; /* numbers from one row, and from one head, to the next */
};
/* cpu_heads_reserve must have allocated the memory. */
void cpu_matmul_heads(struct cpu *cpu, const struct cpu_heads *heads);
int cpu_heads_reserve(struct cpu *cpu, struct kern_weight *const *weights, int count);

/* gate.c */
int cpu_gate_load(struct kern *kern, const struct kern_gate_spec *spec, struct kern_gate **out,
                  struct fault *fault);
void cpu_gate_free(struct kern *kern, struct kern_gate *gate);
void cpu_gate(struct kern *kern, float *log_beta, const float *x, const struct kern_gate *gate,
              int rows);

/* experts.c */
int cpu_experts_load(struct kern *kern, const struct kern_experts_spec *spec,
                     struct kern_experts **out, struct fault *fault);
void cpu_experts_free(struct kern *kern, struct kern_experts *experts);
void cpu_experts(struct kern *kern, float *y, const float *x, const float *logits,
                 const struct kern_experts *experts, int rows);
int cpu_experts_reserve(struct cpu *cpu, int rows); /* for steps of `rows`: 0 or ERR_NOMEM */

/* ops.c */
void cpu_embed(struct kern *kern, float *x, const struct kern_weight *table, float scale,
               const int32_t *tokens, int rows);
void cpu_rms_norm(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                  int dim, float eps);
void cpu_layer_norm(struct kern *kern, float *y, const float *x, const float *weight,
                    const float *bias, int rows, int dim, float eps);
void cpu_add(struct kern *kern, float *y, const float *x, int rows, int dim);
void cpu_soft_cap(struct kern *kern, float *x, int rows, int dim, float cap);
void cpu_qk_norm(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                 const struct kern_batch *batch);
void cpu_add_norm(struct kern *kern, float *y, float *x, const float *weight, int rows, int dim,
                  float eps);
void cpu_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff,
             enum kern_activation activation);
void cpu_glu_apart(struct kern *kern, float *y, const float *gate, const float *up,
                   int64_t up_stride, int rows, int dim, enum kern_activation activation);
void cpu_scale(struct kern *kern, float *x, const float *factor, int rows, int dim);
void cpu_open_gates(struct kern *kern, float *x, const float *gates, int rows, int dim, bool one);
void cpu_gather_rows(struct kern *kern, float *y, const float *x, const int32_t *index, int count,
                     int dim);
void cpu_low_rank(struct kern *kern, float *y, const float *x, const struct kern_low_rank *products,
                  const int32_t *rows, int count);
int cpu_sample(struct kern *kern, const float *logits, int rows, int vocab,
               const struct kern_sample *params, struct kern_sampled *out);

/* attend.c */
void cpu_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                 const struct kern_rope *rope, const struct kern_batch *batch);
void cpu_write_kv(struct kern *kern, int layer, const float *qkv, const float *log_beta,
                  const struct kern_batch *batch);
void cpu_attend(struct kern *kern, int layer, float *out, const float *qkv,
                const struct kern_batch *batch, const struct kern_attend_options *options);
float cpu_squares_of(const float *x, int dim); /* returns the sum of the squares */
/* Finds the entries [*lo, *hi) of the stream that are visible to the span's token; positions ascend
 * in a stream. */
void cpu_attend_range(const struct cpu_attend_job *job, const struct cpu_stream *stream,
                      const struct kern_span *span, int token, int32_t *lo, int32_t *hi);

/* conv.c */
/* Channels computed together: one vector of AVX-512, several of other paths. */
#define CPU_CONV_CHANNELS 16

/* Up to CPU_CONV_CHANNELS channels side by side of the rows of a step. Pointers are to the first
 * channel in row 0; y may be x. */
struct cpu_conv {
    const struct cpu *cpu;
    const float *x, *before, *behind; /* factors of x, and of the sum; both NULL: the sum goes
                                         through SiLU */
    float *y;
    size_t stride, y_stride; /* numbers from one row to the next: of inputs, of y */
    const float *taps;       /* [count][width] */
    const float *bias;       /* [count], added to the sum; NULL: none */
    int count, width;
    int state, at; /* the channels are numbers `at` and following of the recurrent state */
};
void cpu_conv_channels(const struct cpu_conv *conv, const struct kern_batch *batch);
void cpu_short_conv(struct kern *kern, int state, float *y, const float *bcx, const float *taps,
                    int channels, int width, const struct kern_batch *batch);

/* delta.c */
void cpu_delta(struct kern *kern, int state, float *y, float *in, float *rates,
               const struct kern_delta *delta, const struct kern_batch *batch);

/* mamba.c */
void cpu_mamba(struct kern *kern, int state, float *y, float *in, float *shared,
               const struct kern_mamba *mamba, const struct kern_batch *batch);

/* Copies the first `count` columns of `from`, and fills the others of `to` with zeros. */
static inline void cpu_copy_columns(float *to, const float *from, int count) {
    for (int i = 0; i < KERN_STATE_COLUMNS; i++) to[i] = i < count ? from[i] : 0;
}

static inline float cpu_softplus(float x) {
    return x > 20 ? x : log1pf(expf(x));
}

/* latent.c */
int cpu_latent_reserve(struct kern *kern, struct kern_weight *const *weights, int heads);
void cpu_latent_in(struct kern *kern, float *qkv, const float *q, const float *entries,
                   const struct kern_latent *latent, int rows);
void cpu_latent_out(struct kern *kern, float *y, const float *x, const struct kern_latent *latent,
                    int rows);

/* worth.c: kern_ops.worth, of an instance that is its model's only rank. */
int cpu_worth(struct kern *kern, int layer, const struct kern_worth *worth, const float *heads,
              const float *qkv, const struct kern_batch *batch,
              const struct kern_attend_options *options);

#endif
