/* Loads weights: converts the file's row-major matrix to the layout that the path's kernels stream.
 * Only the rank's own part is converted. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/alloc.h"
#include "kernels/cpu/block.h"
#include "kernels/cpu/internal.h"

/* ---- Packing ---- */

#define GRAIN_MOST 32 /* panels that a thread takes at once */

struct packing {
    struct kern_weight *weight;
    const struct kern_matrix *parts;
    int part_count;
    struct cpu_tickets panels;
    int64_t grain;
    struct cpu_needs *needs; /* [threads], of weights in blocks */
    struct block *made; /* [threads][made_blocks] rows that readers make; NULL: no part has a reader
                           that makes rows */
    size_t made_blocks;
};

/* A row in the file's format. */
struct source {
    const char *data;
    enum kern_dtype dtype;
    const float *scale; /* as kern_matrix.scale, or NULL */
};

/* Finds the part that contains row *row of all parts, and replaces *row by the row's number in it.
 */
static const struct kern_matrix *part_with_row(const struct kern_matrix *parts, int64_t *row) {
    while (*row >= parts->rows) *row -= (parts++)->rows;
    return parts;
}

static struct source source_row(const struct kern_matrix *parts, int64_t row) {
    const struct kern_matrix *part = part_with_row(parts, &row);
    const size_t at = (size_t)(row * part->stride) * kern_dtype_bytes(part->dtype);
    return (struct source){.data = (const char *)part->data + at,
                           .dtype = part->dtype,
                           .scale = part->scale ? part->scale + row * kern_row_scales(part) : NULL};
}

static const struct block *source_blocks(const struct packing *job, int worker, int64_t row) {
    const struct kern_matrix *part = part_with_row(job->parts, &row);
    return blocks_of_row(part, row,
                         job->made ? job->made + (size_t)worker * job->made_blocks : NULL);
}

/* Tells the readers of rows [first, end) that these are packed, so that they may give up memory. */
static void rows_done(const struct packing *job, int64_t first, int64_t end) {
    for (int i = 0; i < job->part_count && end > 0; i++) {
        const struct kern_matrix *part = &job->parts[i];
        const int64_t from = first > 0 ? first : 0, to = end < part->rows ? end : part->rows;
        if (part->reader && from < to)
            part->reader->done(part->reader, part->first_row + from, to - from);
        first -= part->rows;
        end -= part->rows;
    }
}

/* Lets all threads pack panels. A thread takes so many at a time that a reader can give up whole
 * pages of memory. */
static int run_packing(struct cpu *cpu, struct packing *job, int64_t cost,
                       void (*run)(void *job, int worker)) {
    for (int i = 0; i < job->part_count; i++) {
        const struct kern_reader *reader = job->parts[i].reader;
        if (reader && (size_t)reader->row_blocks > job->made_blocks)
            job->made_blocks = (size_t)reader->row_blocks;
    }
    if (job->made_blocks) {
        job->made = mem_try_alloc((size_t)cpu->threads * job->made_blocks, sizeof *job->made);
        if (!job->made) return ERR_NOMEM;
    }
    job->grain = job->weight->panels / (8 * (int64_t)cpu->threads);
    job->grain = job->grain < 1 ? 1 : job->grain > GRAIN_MOST ? GRAIN_MOST : job->grain;
    cpu_tickets_set(&job->panels, job->weight->panels);
    cpu_run(cpu, cost, run, job);
    mem_free(job->made);
    return 0;
}

static void pack_floats(float *to, int64_t step, const struct source *from, int64_t count) {
    size_t size = kern_dtype_bytes(from->dtype);
    for (int64_t i = 0; i < count; i++)
        to[i * step] = (from->scale ? *from->scale : 1) *
                       number_element(from->data + (size_t)i * size, from->dtype);
}

/* Packs a row whose numbers have `size` bytes. */
static void pack_pairs(struct kern_weight *w, int64_t row, int lane, const char *from,
                       size_t size) {
    char *panel = w->data + (size_t)(row / PANEL) * w->panel_bytes + 2 * (size_t)lane * size;
    for (int l = 0; l < w->leaves; l++) {
        struct cpu_leaf leaf = cpu_leaf_of(w, l);
        for (int64_t i = 0; i < leaf.count; i += 2)
            memcpy(panel + (size_t)((leaf.place + i) * PANEL) * size,
                   from + (size_t)(leaf.first + i) * size, i + 1 < leaf.count ? 2 * size : size);
    }
}

/* Returns whether the numbers are E4M3 with one factor for each row. */
static bool has_row_scales(const struct kern_weight *w) {
    return w->dtype == KERN_E4M3 && !w->group;
}

static float row_scale(const struct kern_weight *w, const struct kern_matrix *parts, int64_t row) {
    const struct kern_matrix *part = part_with_row(parts, &row);
    return (has_row_scales(w) ? part->scale[row] : 1) * (part->factor > 0 ? part->factor : 1);
}

/* Returns how many group factors a row has. */
static int64_t group_count(const struct kern_weight *w) {
    return w->group ? (w->skipped + w->cols + w->group - 1) / w->group : 0;
}

static void weight_pack_row(struct kern_weight *w, const struct kern_matrix *parts, int64_t row) {
    struct source from = source_row(parts, row);
    int lane = (int)(row % PANEL);
    size_t size = kern_dtype_bytes(from.dtype);
    for (int64_t g = 0; g < group_count(w); g++)
        w->group_scale[g * w->panels * PANEL + row] = from.scale[g];
    if (w->layout >= CPU_PANEL_PAIRS)
        pack_pairs(w, row, lane, from.data, size);
    else if (w->layout == CPU_ROWS && from.dtype == w->dtype)
        memcpy(w->data + (size_t)(row * w->cols) * size, from.data, (size_t)w->cols * size);
    else if (w->layout == CPU_ROWS)
        pack_floats((float *)w->data + row * w->cols, 1, &from, w->cols);
    else
        pack_floats((float *)(w->data + (size_t)(row / PANEL) * w->panel_bytes) + lane, PANEL,
                    &from, w->cols);
}

static void pack_panels(void *arg, int worker) {
    struct packing *job = arg;
    struct kern_weight *w = job->weight;
    int64_t end;
    for (int64_t p; (p = cpu_tickets_take(&job->panels, job->grain, &end)) >= 0;) {
        const int64_t last = end * PANEL < w->rows ? end * PANEL : w->rows;
        for (int64_t row = p * PANEL; row < last; row++) {
            if (w->scale) w->scale[row] = row_scale(w, job->parts, row);
            if (w->layout == CPU_BLOCKS)
                cpu_block_pack(w, row, source_blocks(job, worker, row));
            else
                weight_pack_row(w, job->parts, row);
        }
        rows_done(job, p * PANEL, last);
    }
}

static void look_at_blocks(void *arg, int worker) {
    struct packing *job = arg;
    const struct kern_weight *w = job->weight;
    int64_t end;
    for (int64_t p; (p = cpu_tickets_take(&job->panels, job->grain, &end)) >= 0;) {
        const int64_t last = end * PANEL < w->rows ? end * PANEL : w->rows;
        for (int64_t row = p * PANEL; row < last; row++)
            cpu_block_look(&job->needs[worker], w, source_blocks(job, worker, row));
    }
}

/* Chooses the form of a weight in blocks. */
static int choose_form(struct cpu *cpu, struct kern_weight *w, const struct kern_matrix *part) {
    struct packing job = {.weight = w, .parts = part, .part_count = 1};
    job.needs = mem_try_alloc((size_t)cpu->threads, sizeof *job.needs);
    if (!job.needs) return ERR_NOMEM;
    const int rc = run_packing(cpu, &job, w->rows * w->cols / 8, look_at_blocks);
    for (int i = 1; i < cpu->threads; i++) cpu_needs_add(&job.needs[0], &job.needs[i]);
    if (!rc) cpu_block_choose(w, &job.needs[0]);
    mem_free(job.needs);
    return rc;
}

/* ---- Loading ---- */

/* The file states the size of a matrix: all products are checked for overflow. */
static int weight_check_parts(const struct cpu *cpu, const struct kern_matrix *parts,
                              int part_count, enum kern_shard shard, struct fault *fault) {
    int64_t rows = 0;
    for (int i = 0; i < part_count; i++) {
        if (parts[i].rows < 1 || parts[i].cols < 1 || parts[i].cols != parts[0].cols ||
            parts[i].rows > INT32_MAX || parts[i].cols > INT32_MAX)
            return fault_set(fault, ERR_UNSUPPORTED, "", "a matrix of %lld x %lld",
                             (long long)parts[i].rows, (long long)parts[i].cols);
        CHECK((parts[i].dtype == KERN_E4M3) == (parts[i].scale != NULL));
        CHECK(kern_dtype_blocks(parts[i].dtype) == kern_dtype_blocks(parts[0].dtype));
        CHECK(parts[i].group % KERN_BLOCK == 0 && (!parts[i].group || parts[i].scale));
        rows += parts[i].rows;
    }
    if (rows > INT32_MAX) return fault_set(fault, ERR_UNSUPPORTED, "", "too many rows");
    if ((kern_dtype_blocks(parts[0].dtype) || parts[0].group) && shard == KERN_SHARD_COLS &&
        cpu->comm->ranks > 1 && parts[0].cols % ((int64_t)cpu->comm->ranks * KERN_BLOCK))
        return fault_set(fault, ERR_UNSUPPORTED, "tensor-parallel-size",
                         "%lld inputs cannot be split over %d ranks in whole blocks of %d",
                         (long long)parts[0].cols, cpu->comm->ranks, KERN_BLOCK);
    return 0;
}

/* Selects this rank's share of each part. */
static void weight_take_parts(const struct cpu *cpu, struct kern_weight *w,
                              const struct kern_matrix *parts, int count, struct kern_matrix *own) {
    w->parts = count;
    for (int i = 0; i < count; i++) {
        own[i] = shard_matrix(cpu->comm, &parts[i], w->shard, &w->part[i]);
        w->part[i].first += w->rows_model;
        w->rows_model += parts[i].rows;
        w->width += own[i].rows;
    }
}

/* Adds the rows of a part that has the layout of those before it. If types differ, all numbers
 * become float32. */
static void weight_add_part(struct kern_weight *w, const struct kern_matrix *part) {
    if (w->rows == 0) w->dtype = part->dtype;
    if (w->dtype != part->dtype) w->dtype = KERN_F32;
    w->cols = part->cols;
    w->factored = w->factored || part->factor > 0;
    w->group = part->group;
    w->skipped = part->skipped;
    w->rows += part->rows;
    w->panels = (w->rows + PANEL - 1) / PANEL;
    if (kern_dtype_blocks(part->dtype)) w->blocks = blocks_of(w->cols);
}

static size_t place(struct kern_weight *w, const struct cpu_kernels *kernels) {
    w->layout = kern_dtype_blocks(w->dtype) ? CPU_BLOCKS
                : w->dtype == KERN_BF16     ? kernels->layout_bf16
                : w->dtype == KERN_E4M3     ? kernels->layout_e4m3
                                            : kernels->layout_other;
    const int64_t unit = cpu_leaf_unit(w), units = (w->cols + unit - 1) / unit;
    w->leaf_depth = (units + w->leaves - 1) / w->leaves * unit;
    w->depth = w->cols;
    if (w->layout == CPU_ROWS)
        return (size_t)w->rows * (size_t)w->cols * kern_dtype_bytes(w->dtype);
    if (w->layout == CPU_BLOCKS) {
        w->depth = w->blocks * KERN_BLOCK;
        w->panel_bytes = cpu_block_panel_bytes(w);
        return (size_t)w->panels * w->panel_bytes;
    }
    if (w->layout >= CPU_PANEL_PAIRS) {
        w->leaf_depth = (w->leaf_depth + 31) / 32 * 32;
        w->depth = w->leaves * w->leaf_depth;
    }
    w->panel_bytes =
        (size_t)w->depth * PANEL * (w->layout == CPU_PANEL_F32 ? 4 : kern_dtype_bytes(w->dtype));
    return (size_t)w->panels * w->panel_bytes; /* < 2^31 * 2^31 * 4: fits */
}

/* Chooses for each part how its blocks lie in memory: forms[i].form and forms[i].halves. */
static int choose_forms(struct cpu *cpu, const struct kern_weight *w, const struct kern_matrix *own,
                        struct kern_weight *forms) {
    int rc = 0;
    for (int i = 0; i < w->parts && !rc; i++) {
        forms[i] = (struct kern_weight){.leaves = w->leaves};
        weight_add_part(&forms[i], &own[i]);
        if (kern_dtype_blocks(own[i].dtype)) rc = choose_form(cpu, &forms[i], &own[i]);
    }
    return rc;
}

static bool is_alike(const struct kern_weight *a, const struct kern_weight *b) {
    if (a->group != b->group) return false;
    return a->form == b->form && a->halves == b->halves && (!a->form || a->dtype == b->dtype);
}

static bool reserve_scales(struct kern_weight *w) {
    if (w->factored || has_row_scales(w)) {
        w->scale = cpu_alloc((size_t)w->rows * sizeof *w->scale);
        if (!w->scale) return false;
    }
    if (!w->group) return true;
    const size_t count = (size_t)(group_count(w) * w->panels * PANEL);
    return (w->group_scale = cpu_alloc(count * sizeof *w->group_scale)) != NULL;
}

/* Loads into one weight the first part and those after it that have the same layout. Returns how
 * many parts these are, or an error. */
static int load_parts(struct cpu *cpu, struct kern_weight *w, const struct kern_matrix *own,
                      const struct kern_weight *forms, int count) {
    struct packing job = {.weight = w, .parts = own};
    int taken = 0;
    w->form = forms->form;
    w->halves = forms->halves;
    while (taken < count && is_alike(forms, &forms[taken])) weight_add_part(w, &own[taken++]);
    w->data = cpu_arena_alloc(&cpu->weights, place(w, cpu->kernels));
    const bool room = w->data && reserve_scales(w);
    int rc = room ? cpu_matmul_reserve(cpu, w) : ERR_NOMEM;
    job.part_count = taken;
    if (!rc) rc = run_packing(cpu, &job, w->rows * w->cols, pack_panels);
    return rc ? rc : taken;
}

/* Returns a new weight for the rows behind those of `w`; NULL: no memory. */
static struct kern_weight *weight_follow(struct kern_weight *w) {
    w->next = mem_try_alloc(1, sizeof *w->next);
    if (w->next)
        *w->next = (struct kern_weight){.shard = w->shard,
                                        .leaves = w->leaves,
                                        .first = w->first + w->rows,
                                        .width = w->width,
                                        .rows_model = w->rows_model};
    return w->next;
}

static int load_joined(struct cpu *cpu, struct kern_weight *first, const struct kern_matrix *own) {
    struct kern_weight forms[CPU_PARTS_MAX], *w = first;
    int rc = choose_forms(cpu, first, own, forms);
    for (int i = 0; i < first->parts && !rc;) {
        if (i > 0) w = weight_follow(w);
        if (!w) return ERR_NOMEM;
        const int taken = load_parts(cpu, w, own + i, forms + i, first->parts - i);
        if (taken < 0) rc = taken;
        i += taken;
    }
    return rc;
}

int cpu_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                    enum kern_shard shard, struct kern_weight **out, struct fault *fault) {
    struct cpu *cpu = cpu_of(kern);
    struct kern_matrix own[CPU_PARTS_MAX];
    CHECK(part_count >= 1 && part_count <= CPU_PARTS_MAX);
    int rc = weight_check_parts(cpu, parts, part_count, shard, fault);
    if (rc) return rc;
    struct kern_weight *w = mem_try_alloc(1, sizeof *w);
    if (!w) return fault_set(fault, ERR_NOMEM, "", "no memory for a weight");
    w->shard = shard;
    w->leaves = shard == KERN_SHARD_COLS ? cpu->leaves : 1;
    weight_take_parts(cpu, w, parts, part_count, own);
    rc = load_joined(cpu, w, own);
    if (!rc) {
        *out = w;
        return 0;
    }
    fault_set(fault, rc, "", "no memory for a weight of %lld x %lld", (long long)w->width,
              (long long)parts[0].cols);
    cpu_weight_free(kern, w);
    return rc;
}

void cpu_weight_free(struct kern *kern, struct kern_weight *weight) {
    for (struct kern_weight *w = weight, *next; w; w = next) {
        next = w->next;
        cpu_arena_free(&cpu_of(kern)->weights, w->data);
        cpu_free(w->scale);
        cpu_free(w->group_scale);
        mem_free(w);
    }
}

/* ---- One row back ---- */

static void weight_block_numbers(const struct kern_weight *w, int64_t row, float *out) {
    for (int64_t i = 0; i < w->cols; i += KERN_BLOCK) {
        struct block block = cpu_block_at(w, row, i / KERN_BLOCK);
        for (int k = 0; k < KERN_BLOCK && i + k < w->cols; k++)
            out[i + k] = block_number(&block, k);
    }
}

/* Finds which weight of a joined one contains row *row, and replaces *row by the row's number in
 * it. */
static const struct kern_weight *weight_with_row(const struct kern_weight *w, int64_t *row) {
    for (; w && *row >= w->rows; w = w->next) *row -= w->rows;
    CHECK(w && *row >= 0);
    return w;
}

void cpu_weight_numbers(const struct kern_weight *w, int64_t row, float *out) {
    w = weight_with_row(w, &row);
    if (w->layout == CPU_BLOCKS) {
        weight_block_numbers(w, row, out);
        return;
    }
    const char *panel = w->data + (size_t)(row / PANEL) * w->panel_bytes;
    int lane = (int)(row % PANEL);
    if (w->layout == CPU_ROWS) {
        size_t size = kern_dtype_bytes(w->dtype);
        const char *from = w->data + (size_t)(row * w->cols) * size;
        for (int64_t i = 0; i < w->cols; i++)
            out[i] = number_element(from + (size_t)i * size, w->dtype);
    } else if (w->layout == CPU_PANEL_F32) {
        const float *from = (const float *)panel + lane;
        for (int64_t i = 0; i < w->cols; i++) out[i] = from[i * PANEL];
    } else {
        for (int l = 0; l < w->leaves; l++) {
            struct cpu_leaf leaf = cpu_leaf_of(w, l);
            size_t size = kern_dtype_bytes(w->dtype);
            const char *from = panel + (size_t)(leaf.place * PANEL + (ptrdiff_t)2 * lane) * size;
            for (int64_t i = 0; i < leaf.count; i++)
                out[leaf.first + i] =
                    number_element(from + (size_t)(i / 2 * 2 * PANEL + (i & 1)) * size, w->dtype);
        }
    }
    for (int64_t i = 0; w->group && i < w->cols; i++)
        out[i] *= w->group_scale[(w->skipped + i) / w->group * w->panels * PANEL + row];
}

void cpu_weight_row(const struct kern_weight *w, int64_t row, float *out) {
    w = weight_with_row(w, &row);
    cpu_weight_numbers(w, row, out);
    for (int64_t i = 0; w->scale && i < w->cols; i++) out[i] *= w->scale[row];
}
