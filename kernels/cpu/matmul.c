/* The driver of matrix products: passes of MATMUL_ROWS rows, panels handed to workers, and the
 * exchange between ranks that completes a product. */
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/block.h"

/* How many rows a pass over products of a vocabulary has. They are buffered until the other ranks'
 * parts arrive. */
#define GATHER_ROWS 16

/* Returns the largest number of outputs that a rank has. */
static int64_t matmul_gather_stride(const struct cpu *cpu, const struct kern_weight *w) {
    return (w->rows_model + cpu->comm->ranks - 1) / cpu->comm->ranks;
}

static size_t matmul_partial_bytes(const struct cpu *cpu, const struct kern_weight *w) {
    size_t ranks = (size_t)cpu->comm->ranks;
    if (ranks > 1 && w->shard == KERN_SHARD_COLS)
        return MATMUL_ROWS * (size_t)w->rows * sizeof(float);
    if (ranks > 1 && w->shard == KERN_SHARD_VOCAB)
        return ranks * GATHER_ROWS * (size_t)matmul_gather_stride(cpu, w) * sizeof(float);
    return 0;
}

/* Returns whether the weight is multiplied with packed activations. */
static bool is_packed(const struct cpu *cpu, const struct kern_weight *w) {
    const struct cpu_kernels *k = cpu->kernels;
    if (!k->pack_x || (w->group && !k->packs_groups)) return false;
    return w->layout >= CPU_PANEL_PAIRS || (w->layout == CPU_BLOCKS && k->packs_blocks);
}

/* Returns whether it is multiplied with activations rounded in blocks. */
static bool in_codes(const struct cpu *cpu, const struct kern_weight *w) {
    return w->layout == CPU_BLOCKS && cpu->block_kernels;
}

/* Returns whether these are rounded to int16, not to int8. */
static bool matmul_is_wide(const struct cpu *cpu, const struct kern_weight *w) {
    if (cpu->activations == CPU_BY_WEIGHT) return !block_is_narrow(w->dtype);
    return cpu->activations != CPU_INT8;
}

int cpu_matmul_reserve(struct cpu *cpu, const struct kern_weight *weight) {
    const struct cpu_kernels *k = cpu->kernels;
    int rc = 0;
    if (k->matmul_scratch) rc = cpu_scratch_grow(cpu, k->matmul_scratch(weight));
    if (!rc && in_codes(cpu, weight))
        rc = cpu_scratch_grow(cpu, cpu->block_kernels->scratch(weight));
    if (!rc && is_packed(cpu, weight))
        rc = cpu_room_grow(&cpu->packed, k->packed_bytes(weight->depth));
    if (!rc && in_codes(cpu, weight))
        rc = cpu_room_grow(&cpu->packed,
                           cpu_codes_bytes(weight, MATMUL_ROWS, matmul_is_wide(cpu, weight)));
    if (!rc) rc = cpu_room_grow(&cpu->partial, matmul_partial_bytes(cpu, weight));
    if (!rc && weight->width < weight->rows_model)
        rc = cpu_room_grow(&cpu->bias, (size_t)weight->width * sizeof(float));
    return rc;
}

struct pass {
    struct cpu *cpu;
    struct cpu_matmul_job job;
    struct cpu_tickets blocks; /* blocks of 16 rows to pack, or pieces to round */
    struct cpu_tickets panels;
    int64_t grain;
};

static void matmul_pack_rows(void *arg, int worker) {
    (void)worker;
    struct pass *pass = arg;
    int64_t end;
    for (int64_t b; (b = cpu_tickets_take(&pass->blocks, 1, &end)) >= 0;)
        pass->cpu->kernels->pack_x(&pass->job, (int)b * 16, pass->cpu->packed.mem);
}

/* Returns the blocks of the rounded rows of a pass, which lie in cpu->packed behind all codes. */
static struct cpu_x_block *rounded_blocks(const struct cpu *cpu, const struct kern_weight *w) {
    const bool wide = matmul_is_wide(cpu, w);
    const int64_t codes = MATMUL_ROWS * cpu_x_places(w, wide) * KERN_BLOCK * (wide ? 2 : 1);
    return (struct cpu_x_block *)(void *)((char *)cpu->packed.mem + codes);
}

static void round_piece(const struct cpu_block_kernels *k, const struct cpu_matmul_job *job, int i,
                        char *all_codes, struct cpu_x_block *all_blocks) {
    const struct kern_weight *w = job->weight;
    const int64_t places = cpu_x_places(w, job->wide);
    const int64_t bytes = KERN_BLOCK * (int64_t)(job->wide ? 2 : 1);
    const struct cpu_piece piece = cpu_piece_of(job->rows, k->rows, i);
    char *codes = all_codes + bytes * piece.row * places;
    struct cpu_x_block *blocks = all_blocks + piece.row * places;
    for (int r = 0; r < piece.rows; r++)
        k->round_row(w, job->x + (piece.row + r) * w->cols, job->wide, codes + bytes * r,
                     blocks + r, piece.rows);
}

static void round_pieces(void *arg, int worker) {
    (void)worker;
    struct pass *pass = arg;
    struct cpu *cpu = pass->cpu;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&pass->blocks, 1, &end)) >= 0;)
        round_piece(cpu->block_kernels, &pass->job, (int)i, cpu->packed.mem,
                    rounded_blocks(cpu, pass->job.weight));
}

/* Claims panels: `grain` at first and fewer at the end, in whole groups of four, so that no worker
 * waits long for the last portion. */
static int64_t take_panels(struct pass *pass, int64_t *end) {
    const int64_t taken = atomic_load_explicit(&pass->panels.next, memory_order_relaxed);
    const int64_t part = (pass->panels.count - taken) / ((int64_t)4 * pass->cpu->threads);
    const int64_t grain = part < 4 ? 4 : part & ~(int64_t)3;
    return cpu_tickets_take(&pass->panels, grain < pass->grain ? grain : pass->grain, end);
}

/* Each worker claims one portion ahead of the one it computes, to know what to prefetch. */
static void matmul_multiply(void *arg, int worker) {
    struct pass *pass = arg;
    void *scratch = pass->cpu->scratch[worker].mem;
    int64_t end, next_end = 0;
    int64_t p = take_panels(pass, &end);
    while (p >= 0) {
        int64_t next = take_panels(pass, &next_end);
        if (pass->job.codes)
            pass->cpu->block_kernels->multiply(&pass->job, p, end - p, next, scratch);
        else
            pass->cpu->kernels->matmul(&pass->job, p, end - p, next, scratch);
        p = next;
        end = next_end;
    }
}

/* Panels claimed together: whole groups of four, which kernels process at a time, and at least 512
 * KiB for streaming, yet few enough that no worker waits long for the last portion. */
static int64_t portion(const struct cpu *cpu, const struct kern_weight *w) {
    int64_t most = w->panels / ((int64_t)8 * cpu->threads);
    int64_t want = w->panel_bytes ? (int64_t)((512u << 10) / w->panel_bytes) : 1;
    if (want > most) want = most;
    return want < 4 ? 4 : want & ~(int64_t)3;
}

/* Returns how many rows a pass has: as many as take 1.5 MiB when packed, but at least 64. So they
 * stay in a core's second-level cache while the weights stream through. */
static int pass_rows(const struct cpu *cpu, const struct kern_weight *w) {
    if (!is_packed(cpu, w)) return MATMUL_ROWS;
    const size_t row = cpu->kernels->packed_bytes(w->depth) / MATMUL_ROWS;
    const size_t rows = ((size_t)3 << 19) / row / 32 * 32;
    return rows < 64 ? 64 : rows > MATMUL_ROWS ? MATMUL_ROWS : (int)rows;
}

/* Converts the activations to the form in which the weight's products read them: packed, rounded,
 * or unchanged. */
static void matmul_prepare(struct pass *pass) {
    struct cpu *cpu = pass->cpu;
    struct cpu_matmul_job *job = &pass->job;
    const struct kern_weight *w = job->weight;
    if (is_packed(cpu, w)) {
        job->packed = cpu->packed.mem;
        cpu_tickets_set(&pass->blocks, (job->rows + 15) / 16);
        cpu_run(cpu, job->rows * w->cols / 4, matmul_pack_rows, pass);
    } else if (in_codes(cpu, w)) {
        job->codes = cpu->packed.mem;
        job->x_blocks = rounded_blocks(cpu, w);
        job->wide = matmul_is_wide(cpu, w);
        cpu_tickets_set(&pass->blocks, cpu_piece_count(job->rows, cpu->block_kernels->rows));
        cpu_run(cpu, job->rows * w->cols * 4, round_pieces, pass);
    }
}

static void multiply_weight(struct cpu *cpu, float *y, const float *x,
                            const struct kern_weight *weight, const float *scale, const float *bias,
                            int rows, enum kern_matmul_mode mode) {
    struct pass pass = {.cpu = cpu, .grain = portion(cpu, weight)};
    const int most = pass_rows(cpu, weight);
    for (int row = 0; row < rows; row += most) {
        int count = rows - row < most ? rows - row : most;
        pass.job = (struct cpu_matmul_job){.weight = weight,
                                           .x = x + (int64_t)row * weight->cols,
                                           .scale = scale,
                                           .bias = bias,
                                           .y = y + (int64_t)row * weight->width,
                                           .width = weight->width,
                                           .rows = count,
                                           .mode = mode};
        cpu_tickets_set(&pass.panels, weight->panels);
        matmul_prepare(&pass);
        cpu_run(cpu, count * weight->rows * weight->cols, matmul_multiply, &pass);
    }
}

/* Multiplies this rank's inputs and outputs. `whole`: the sums need nothing from other ranks, and
 * get their scales at once. */
static void multiply_own(struct cpu *cpu, float *y, const float *x,
                         const struct kern_weight *weight, bool whole, const float *bias, int rows,
                         enum kern_matmul_mode mode) {
    for (const struct kern_weight *w = weight; w; w = w->next)
        multiply_weight(cpu, y + w->first, x, w, whole ? w->scale : NULL,
                        bias ? bias + w->first : NULL, rows, mode);
}

/* ---- Products of heads ---- */

#define HEAD_ROWS 64 /* rows that a worker multiplies with a head's matrix at a time */

/* Where the parts of a worker's scratch memory begin: that of the kernels at 0, then the rows of a
 * head, then these rows packed or rounded. */
struct heads_room {
    size_t x, packed, blocks, bytes;
};

static size_t whole_lines(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

static struct heads_room heads_room(const struct cpu *cpu, const struct kern_weight *w) {
    const struct cpu_kernels *k = cpu->kernels;
    const bool wide = matmul_is_wide(cpu, w);
    struct heads_room room = {0};
    if (k->matmul_scratch) room.x = k->matmul_scratch(w);
    if (in_codes(cpu, w) && cpu->block_kernels->scratch(w) > room.x)
        room.x = cpu->block_kernels->scratch(w);
    room.x = whole_lines(room.x);
    room.packed = room.x + whole_lines(HEAD_ROWS * (size_t)w->cols * sizeof(float));
    room.blocks = room.bytes = room.packed;
    if (is_packed(cpu, w)) room.bytes += k->packed_bytes(w->depth);
    if (!in_codes(cpu, w)) return room;
    room.blocks += HEAD_ROWS * (size_t)cpu_x_places(w, wide) * KERN_BLOCK * (wide ? 2 : 1);
    room.bytes += cpu_codes_bytes(w, HEAD_ROWS, wide);
    return room;
}

struct heads_job {
    struct cpu *cpu;
    const struct cpu_heads *heads;
    struct cpu_tickets items; /* blocks of rows, of every head */
};

static void multiply_head(const struct heads_job *job, int head, int row, char *scratch) {
    const struct cpu *cpu = job->cpu;
    const struct cpu_heads *h = job->heads;
    const struct kern_weight *w = h->weights[head];
    const struct heads_room room = heads_room(cpu, w);
    CHECK(room.bytes <= cpu->scratch[0].bytes);
    const float *from = h->x + row * h->x_row + head * h->x_head;
    float *x = (float *)(void *)(scratch + room.x);
    struct cpu_matmul_job product = {.weight = w,
                                     .x = x,
                                     .scale = w->scale,
                                     .y = h->y + row * h->y_row + head * h->y_head,
                                     .width = h->y_row,
                                     .rows = h->rows - row < HEAD_ROWS ? h->rows - row : HEAD_ROWS,
                                     .mode = KERN_SET};
    for (int r = 0; r < product.rows; r++)
        memcpy(x + r * w->cols, from + r * h->x_row, (size_t)w->cols * sizeof *x);
    if (is_packed(cpu, w)) {
        product.packed = scratch + room.packed;
        for (int r = 0; r < product.rows; r += 16)
            cpu->kernels->pack_x(&product, r, scratch + room.packed);
    } else if (in_codes(cpu, w)) {
        product.codes = scratch + room.packed;
        product.x_blocks = (struct cpu_x_block *)(void *)(scratch + room.blocks);
        product.wide = matmul_is_wide(cpu, w);
        for (int i = 0; i < cpu_piece_count(product.rows, cpu->block_kernels->rows); i++)
            round_piece(cpu->block_kernels, &product, i, scratch + room.packed,
                        (struct cpu_x_block *)(void *)(scratch + room.blocks));
    }
    if (product.codes)
        cpu->block_kernels->multiply(&product, 0, w->panels, -1, scratch);
    else
        cpu->kernels->matmul(&product, 0, w->panels, -1, scratch);
}

static void multiply_heads(void *arg, int worker) {
    struct heads_job *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->items, 1, &end)) >= 0;)
        multiply_head(job, (int)(i % job->heads->count), (int)(i / job->heads->count) * HEAD_ROWS,
                      job->cpu->scratch[worker].mem);
}

/* All matrices have one shape, but each is stored in the smallest form that holds its numbers, and
 * each form needs its own amount of memory. */
int cpu_heads_reserve(struct cpu *cpu, struct kern_weight *const *weights, int count) {
    int rc = 0;
    for (int i = 0; i < count && !rc; i++) {
        const struct kern_weight *w = weights[i];
        CHECK(w->rows == w->width && !w->next && w->shard == KERN_SHARD_NONE);
        CHECK(w->rows == weights[0]->rows && w->cols == weights[0]->cols);
        rc = cpu_scratch_grow(cpu, heads_room(cpu, w).bytes);
    }
    return rc;
}

void cpu_matmul_heads(struct cpu *cpu, const struct cpu_heads *heads) {
    const struct kern_weight *w = heads->weights[0];
    struct heads_job job = {.cpu = cpu, .heads = heads};
    const int64_t blocks = (heads->rows + HEAD_ROWS - 1) / HEAD_ROWS;
    cpu_tickets_set(&job.items, blocks * heads->count);
    cpu_run(cpu, (int64_t)heads->rows * heads->count * w->rows * w->cols, multiply_heads, &job);
}

/* ---- Several ranks ---- */

/* Returns this rank's part of the bias of a joined weight. */
static const float *matmul_own_bias(struct cpu *cpu, const struct kern_weight *w,
                                    const float *bias) {
    float *to = cpu->bias.mem;
    if (!bias || w->width == w->rows_model) return bias;
    for (int i = 0; i < w->parts; i++) {
        memcpy(to, bias + w->part[i].first, (size_t)w->part[i].count * sizeof *to);
        to += w->part[i].count;
    }
    CHECK(to - (float *)cpu->bias.mem == w->width);
    return cpu->bias.mem;
}

struct finish {
    struct cpu_tickets rows;
    float *y;
    const float *sums, *scale, *bias;
    int64_t width;
    enum kern_matmul_mode mode;
};

/* Completes sums that are whole (scale, bias, addition), in the order of the kernels. */
static void finish_rows(void *arg, int worker) {
    (void)worker;
    struct finish *job = arg;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->rows, 1, &end)) >= 0;) {
        float *y = job->y + row * job->width;
        const float *sums = job->sums + row * job->width;
        for (int64_t i = 0; i < job->width; i++) {
            float sum = job->scale ? sums[i] * job->scale[i] : sums[i];
            if (job->bias) sum += job->bias[i];
            y[i] = job->mode == KERN_ADD ? y[i] + sum : sum;
        }
    }
}

static void matmul_multiply_summed(struct cpu *cpu, float *y, const float *x,
                                   const struct kern_weight *w, const float *bias, int rows,
                                   enum kern_matmul_mode mode) {
    float *sums = cpu->partial.mem;
    for (int row = 0; row < rows; row += MATMUL_ROWS) {
        int count = rows - row < MATMUL_ROWS ? rows - row : MATMUL_ROWS;
        size_t floats = (size_t)count * (size_t)w->rows;
        multiply_own(cpu, sums, x + row * w->cols, w, false, NULL, count, KERN_SET);
        cpu_note(cpu, cpu->comm->ops->all_reduce(cpu->comm, sums, floats, COMM_F32, COMM_SUM));
        struct finish job = {.y = y + row * w->rows,
                             .sums = sums,
                             .scale = w->scale,
                             .bias = bias,
                             .width = w->rows,
                             .mode = mode};
        cpu_tickets_set(&job.rows, count);
        cpu_run(cpu, (int64_t)floats, finish_rows, &job);
    }
}

/* Rank 0 joins the parts of each row. */
static void join_rows(const struct cpu *cpu, float *y, const struct kern_weight *w, int rows) {
    const float *parts = cpu->partial.mem;
    size_t stride = GATHER_ROWS * (size_t)matmul_gather_stride(cpu, w);
    for (int rank = 0; rank < cpu->comm->ranks; rank++, parts += stride) {
        const struct comm other = {.rank = rank, .ranks = cpu->comm->ranks};
        struct shard_range part = shard_range(&other, w->rows_model);
        for (int row = 0; row < rows; row++)
            memcpy(y + row * w->rows_model + part.first, parts + row * part.count,
                   (size_t)part.count * sizeof *y);
    }
}

static void matmul_multiply_gathered(struct cpu *cpu, float *y, const float *x,
                                     const struct kern_weight *w, int rows) {
    size_t stride = GATHER_ROWS * (size_t)matmul_gather_stride(cpu, w);
    float *own = (float *)cpu->partial.mem + (size_t)cpu->comm->rank * stride;
    for (int row = 0; row < rows; row += GATHER_ROWS) {
        int count = rows - row < GATHER_ROWS ? rows - row : GATHER_ROWS;
        multiply_own(cpu, own, x + row * w->cols, w, true, NULL, count, KERN_SET);
        cpu_note(cpu,
                 cpu->comm->ops->all_gather(cpu->comm, cpu->partial.mem, stride * sizeof(float)));
        if (cpu->comm->rank == 0) join_rows(cpu, y + row * w->rows_model, w, count);
    }
}

void cpu_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
                const float *bias, int rows, enum kern_matmul_mode mode) {
    struct cpu *cpu = cpu_of(kern);
    CHECK(rows >= 0);
    if (cpu->comm->ranks > 1 && weight->shard == KERN_SHARD_COLS) {
        matmul_multiply_summed(cpu, y, x, weight, bias, rows, mode);
    } else if (cpu->comm->ranks > 1 && weight->shard == KERN_SHARD_VOCAB) {
        CHECK(!bias && mode == KERN_SET);
        matmul_multiply_gathered(cpu, y, x, weight, rows);
    } else {
        multiply_own(cpu, y, x, weight, true, matmul_own_bias(cpu, weight, bias), rows, mode);
    }
}
