/* Drivers of rotation, of writes into the cache, and of attention. A driver divides the rows of a
 * step into items, hands the items to workers and calls the path's kernels; results do not depend
 * on the division. Attention items are whole groups of query heads over one KV head, so that a key
 * is read once for all of them. */
#include "kernels/cpu/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#define LANES_MIN 16 /* least number of lanes per item, except a span's last */

/* ---- Rows of a step ---- */

/* Query and key heads of the model: of all ranks. Layers that have norms over all of them have
 * equal heads. */
static size_t model_heads(const struct cpu_cache *cache) {
    const struct cpu_layer *layer = &cache->layers[0];
    return (size_t)layer->heads_model * (size_t)(layer->group + 1);
}

/* Opening the cache allocates scratch for the largest step. begin_step grows it for a larger one,
 * so that the operations of a step cannot run out of memory. Callers that run single operations
 * without begin_step, such as tests, allocate here. */
int cpu_step_reserve(struct cpu *cpu, int row_count, int span_count) {
    const struct kern_cache_options *o = &cpu->cache.options;
    size_t rows = (size_t)row_count, items = 0;
    for (int i = 0; i < o->layers; i++) {
        const struct cpu_layer *l = &cpu->cache.layers[i];
        size_t each = rows * (size_t)l->group / LANES_MIN + (size_t)span_count;
        if (each * (size_t)l->heads_kv > items) items = each * (size_t)l->heads_kv;
    }
    size_t angles = cpu->angle_places.bytes;
    int rc = cpu_room_grow(&cpu->rows, rows * sizeof(struct cpu_row));
    if (!rc) rc = cpu_room_grow(&cpu->items, items * sizeof(struct cpu_attend_item));
    if (!rc) rc = cpu_room_grow(&cpu->angles, rows * (size_t)o->head_dim * sizeof(float));
    if (!rc) rc = cpu_room_grow(&cpu->angle_places, rows * sizeof(struct kern_place));
    if (!rc) rc = cpu_experts_reserve(cpu, row_count);
    size_t kept = o->qk_norm_wide ? model_heads(&cpu->cache) : 0;
    if ((size_t)o->state_heads > kept) kept = (size_t)o->state_heads;
    if (!rc && kept) rc = cpu_room_grow(&cpu->squares, rows * kept * sizeof(float));
    if (cpu->angle_places.bytes != angles) cpu->angle_freq = NULL; /* growing discards angles */
    return rc;
}

/* Rows that see each other see up to the last one of them. */
static void set_ahead(const struct kern_batch *batch, struct cpu_row *rows) {
    for (int g = 0; g < batch->given_count; g++) {
        const struct kern_given *given = &batch->given[g];
        if (!given->together) continue;
        CHECK(given->row >= 0 && given->count > 0 && given->row <= batch->rows - given->count);
        const struct kern_span *span = &batch->spans[rows[given->row].span];
        CHECK(given->row + given->count <= span->row + span->count);
        for (int i = 0; i < given->count; i++) rows[given->row + i].ahead = given->count - 1 - i;
    }
}

/* Finds the place and span of every row, so that workers need not search the spans. */
const struct cpu_row *cpu_rows(struct cpu *cpu, const struct kern_batch *batch) {
    cpu_room_must(&cpu->rows, (size_t)batch->rows * sizeof(struct cpu_row));
    struct cpu_row *rows = cpu->rows.mem;
    for (int s = 0; s < batch->span_count; s++) {
        const struct kern_span *span = &batch->spans[s];
        CHECK(span->row >= 0 && span->count >= 0 && span->row <= batch->rows - span->count);
        for (int i = 0; i < span->count; i++)
            rows[span->row + i] =
                (struct cpu_row){.span = s, .place = span->pos + i - span->behind};
    }
    set_ahead(batch, rows);
    return rows;
}

struct step_job {
    struct cpu *cpu;
    const struct kern_batch *batch;
    const struct cpu_row *rows;
    struct cpu_tickets tickets;
    int layer;
    const struct cpu_layer *shape; /* the same layer */
    size_t stride;
    float *qkv;
    const float *log_beta, *q_norm, *k_norm;
    float eps;
    const struct kern_rope *rope;
};

/* `queries`: of rows that have no others. */
static size_t qkv_stride(const struct cpu_layer *layer, bool queries) {
    const int each = queries ? 0 : layer->latent ? 1 : 2;
    return (size_t)(layer->heads_q + each * layer->heads_kv) * (size_t)layer->head_dim;
}

/* ---- Rotation ---- */

/* Sines cost as much as a layer's norms, and every layer of a step needs the same ones: they are
 * kept per row and recomputed only where the row's places have changed. */
static void reserve_angles(struct cpu *cpu, int rows, int dim, const struct kern_rope *rope) {
    size_t had = cpu->angle_places.bytes;
    cpu_room_must(&cpu->angles, (size_t)rows * (size_t)dim * sizeof(float));
    cpu_room_must(&cpu->angle_places, (size_t)rows * sizeof(struct kern_place));
    if (cpu->angle_places.bytes == had && cpu->angle_freq == rope->inv_freq &&
        cpu->angle_scale == rope->scale && cpu->angle_half == dim / 2)
        return;
    memset(cpu->angle_places.mem, 0xff, cpu->angle_places.bytes); /* -1: no place */
    cpu->angle_freq = rope->inv_freq;
    cpu->angle_scale = rope->scale;
    cpu->angle_half = dim / 2;
}

static struct kern_place place_of_row(const struct step_job *job, int64_t row) {
    const int32_t place = job->rows[row].place;
    if (job->batch->places) return job->batch->places[row];
    return (struct kern_place){{place, place, place}};
}

static const float *row_angles(const struct step_job *job, int64_t row, int half) {
    float *cosine = (float *)job->cpu->angles.mem + row * 2 * half, *sine = cosine + half;
    struct kern_place *made = (struct kern_place *)job->cpu->angle_places.mem + row;
    const struct kern_place place = place_of_row(job, row);
    const uint8_t *axes = job->rope->axes;
    if (memcmp(made, &place, sizeof place) == 0) return cosine;
    *made = place;
    for (int j = 0; j < half; j++) {
        float angle = (float)place.axis[axes ? axes[j] : 0] * job->rope->inv_freq[j];
        float scale = job->rope->inv_freq[j] > 0 ? job->rope->scale : 1;
        cosine[j] = cosf(angle) * scale;
        sine[j] = sinf(angle) * scale;
    }
    return cosine;
}

static void rotate_row(const struct step_job *job, int64_t row) {
    const struct cpu_layer *l = job->shape;
    const struct cpu_kernels *kernels = job->cpu->kernels;
    const int half = (l->head_dim - l->latent) / 2, keys = job->rope->queries ? 0 : l->heads_kv;
    const float *cosine = row_angles(job, row, half);
    float *x = job->qkv + (size_t)row * job->stride;
    const struct kern_query_scale *by = &job->rope->query_scale;
    for (int head = 0; head < l->heads_q + keys; head++, x += l->head_dim)
        kernels->rope(x + l->latent, half, cosine, cosine + half,
                      head < l->heads_q ? job->q_norm : job->k_norm, job->eps);
    for (int head = 0; head < keys && job->rope->v_norm; head++, x += l->head_dim)
        kernels->rms_norm(x, x, job->rope->v_norm, l->head_dim, job->eps);
    if (by->beta == 0) return;
    const int32_t periods = job->rows[row].place / by->period;
    const float scale = 1 + by->beta * logf((float)(1 + periods));
    x = job->qkv + (size_t)row * job->stride;
    for (int i = 0; i < l->heads_q * l->head_dim; i++) x[i] *= scale;
}

static void rotate_rows(void *arg, int worker) {
    (void)worker;
    struct step_job *job = arg;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; row < end; row++) rotate_row(job, row);
}

void cpu_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                 const struct kern_rope *rope, const struct kern_batch *batch) {
    struct cpu *cpu = cpu_of(kern);
    CHECK(cpu->has_cache);
    const struct cpu_layer *layer = &cpu->cache.layers[rope->layer];
    const size_t stride = qkv_stride(layer, rope->queries);
    CHECK(!layer->latent || (!q_norm && !k_norm && !rope->v_norm));
    reserve_angles(cpu, batch->rows, layer->head_dim - layer->latent, rope);
    struct step_job job = {.cpu = cpu,
                           .batch = batch,
                           .rows = cpu_rows(cpu, batch),
                           .shape = layer,
                           .stride = stride,
                           .qkv = qkv,
                           .q_norm = q_norm,
                           .k_norm = k_norm,
                           .eps = eps,
                           .rope = rope};
    cpu_tickets_set(&job.tickets, batch->rows);
    cpu_run(cpu, (int64_t)2 * batch->rows * (int64_t)stride, rotate_rows, &job);
}

/* ---- Norms of all heads together ---- */

struct norm_job {
    struct cpu *cpu;
    struct cpu_tickets tickets;
    float *qkv;
    const float *norm[2]; /* all queries, and all keys, of the model */
    float eps;
};

/* This rank's heads of one kind: [first, first + count) of the model's `all`. */
struct attend_own_heads {
    int first, count, all;
};

static struct attend_own_heads attend_own_heads(const struct cpu_cache *cache, bool keys) {
    const struct cpu_layer *layer = &cache->layers[0];
    int each = keys ? 1 : layer->group;
    return (struct attend_own_heads){layer->shard.first * each, layer->heads_kv * each,
                                     layer->heads_model * each};
}

float cpu_squares_of(const float *x, int dim) {
    float sum[16] = {0}, all = 0;
    for (int i = 0; i < dim; i++) sum[i % 16] += x[i] * x[i];
    for (int i = 0; i < 16; i++) all += sum[i];
    return all;
}

/* Heads that another rank contributes to the sum are zeros here. */
static void square_rows(void *arg, int worker) {
    (void)worker;
    struct norm_job *job = arg;
    const struct cpu_cache *cache = &job->cpu->cache;
    const struct cpu_layer *layer = &cache->layers[0];
    size_t heads = model_heads(cache);
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; row < end; row++) {
            const float *x = job->qkv + (size_t)row * qkv_stride(layer, false);
            float *sums = (float *)job->cpu->squares.mem + (size_t)row * heads;
            memset(sums, 0, heads * sizeof *sums);
            for (int keys = 0; keys < 2; keys++) {
                struct attend_own_heads own = attend_own_heads(cache, keys);
                for (int h = 0; h < own.count; h++, x += layer->head_dim)
                    if (layer->shard.speaks)
                        sums[own.first + h] = cpu_squares_of(x, layer->head_dim);
                sums += own.all;
            }
        }
}

static void attend_norm_rows(void *arg, int worker) {
    (void)worker;
    struct norm_job *job = arg;
    const struct cpu_cache *cache = &job->cpu->cache;
    const struct cpu_layer *layer = &cache->layers[0];
    const int dim = layer->head_dim;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; row < end; row++) {
            float *x = job->qkv + (size_t)row * qkv_stride(layer, false);
            const float *sums = (float *)job->cpu->squares.mem + (size_t)row * model_heads(cache);
            for (int keys = 0; keys < 2; keys++) {
                struct attend_own_heads own = attend_own_heads(cache, keys);
                const float *weight = job->norm[keys] + (size_t)(own.first * dim);
                float sum = 0;
                for (int h = 0; h < own.all; h++) sum += *sums++;
                float by = 1 / sqrtf(sum / (float)(own.all * dim) + job->eps);
                for (int i = 0; i < own.count * dim; i++) x[i] = x[i] * by * weight[i];
                x += (size_t)(own.count * dim);
            }
        }
}

void cpu_qk_norm(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                 const struct kern_batch *batch) {
    struct cpu *cpu = cpu_of(kern);
    CHECK(cpu->has_cache);
    size_t count = (size_t)batch->rows * model_heads(&cpu->cache);
    int64_t cost = (int64_t)batch->rows * (int64_t)qkv_stride(&cpu->cache.layers[0], false);
    cpu_room_must(&cpu->squares, count * sizeof(float));
    struct norm_job job = {.cpu = cpu, .qkv = qkv, .norm = {q_norm, k_norm}, .eps = eps};
    cpu_tickets_set(&job.tickets, batch->rows);
    cpu_run(cpu, cost, square_rows, &job);
    cpu_note(cpu,
             cpu->comm->ops->all_reduce(cpu->comm, cpu->squares.mem, count, COMM_F32, COMM_SUM));
    cpu_tickets_set(&job.tickets, batch->rows);
    cpu_run(cpu, cost, attend_norm_rows, &job);
}

/* ---- Writing ---- */

/* Writes a key or a value of the model. */
static void write_entry(const struct cpu *cpu, const struct cpu_layer *layer, uint32_t page,
                        bool values, int slot, const float *from) {
    const struct cpu_cache *cache = &cpu->cache;
    const enum kern_dtype dtype = cache->options.dtype;
    float rotated[ROW_DIM_MAX];
    if (!row_scaled(dtype)) {
        char *rows = values ? cpu_cache_v(cache, layer, page) : cpu_cache_k(cache, page);
        cpu->kernels->write_row(rows + (size_t)slot * layer->row_size, from, layer->head_dim,
                                dtype);
        return;
    }
    memcpy(rotated, from, (size_t)layer->head_dim * sizeof *from);
    cpu_cache_rotate(cache, rotated, layer->head_dim);
    cpu_cache_store_row(cache, layer, page, values, slot, rotated);
}

static void write_row(const struct step_job *job, int64_t row) {
    const struct cpu_cache *cache = &job->cpu->cache;
    const struct cpu_layer *l = job->shape;
    const struct kern_span *span = &job->batch->spans[job->rows[row].span];
    const int dim = l->head_dim;
    const float *k = job->qkv + (size_t)row * job->stride + (size_t)l->heads_q * (size_t)dim;
    const float *v = k + (size_t)l->heads_kv * (size_t)dim;
    for (int head = 0; head < l->heads_kv; head++, k += dim, v += dim) {
        struct cpu_stream stream = cpu_cache_stream(cache, span->slot, job->layer, head);
        int entry = stream.length - span->count + (int)row - span->row;
        uint32_t page = stream.pages[entry / l->page_slots];
        int slot = entry % l->page_slots;
        write_entry(job->cpu, l, page, false, slot, k);
        if (!l->latent) write_entry(job->cpu, l, page, true, slot, v);
        cpu_cache_log_beta(cache, page)[slot] =
            job->log_beta ? job->log_beta[row * l->heads_kv + head] : 0.0f;
    }
}

static void write_rows(void *arg, int worker) {
    (void)worker;
    struct step_job *job = arg;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; row < end; row++) write_row(job, row);
}

void cpu_write_kv(struct kern *kern, int layer, const float *qkv, const float *log_beta,
                  const struct kern_batch *batch) {
    struct cpu *cpu = cpu_of(kern);
    CHECK(cpu->has_cache && layer >= 0 && layer < cpu->cache.options.layers);
    const struct cpu_layer *shape = &cpu->cache.layers[layer];
    struct step_job job = {.cpu = cpu,
                           .batch = batch,
                           .rows = cpu_rows(cpu, batch),
                           .layer = layer,
                           .shape = shape,
                           .stride = qkv_stride(shape, false),
                           .qkv = (float *)qkv,
                           .log_beta = log_beta};
    cpu_tickets_set(&job.tickets, batch->rows);
    cpu_run(cpu, (int64_t)2 * batch->rows * shape->heads_kv * shape->head_dim, write_rows, &job);
}

/* ---- Attention ---- */

void cpu_attend_range(const struct cpu_attend_job *job, const struct cpu_stream *stream,
                      const struct kern_span *span, int token, int32_t *lo, int32_t *hi) {
    /* Only entries appended in this step can be later than the token. */
    const int32_t later = span->count - token - 1, window = job->sliding_window;
    const int32_t seen = window && window - 1 < later ? window - 1 : later;
    *hi = stream->length - later + (job->both_ways ? seen : job->rows[span->row + token].ahead);
    *lo = job->sliding_window
              ? cpu_cache_entries_up_to(job->cache, stream, span->pos + token - job->sliding_window)
              : 0;
}

struct attend_work {
    struct cpu *cpu;
    const struct cpu_attend_job *job;
    const struct cpu_attend_item *items;
    struct cpu_tickets tickets;
};

static void attend_items(void *arg, int worker) {
    struct attend_work *work = arg;
    void *scratch = work->cpu->scratch[worker].mem;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&work->tickets, 1, &end)) >= 0;)
        work->cpu->kernels->attend(work->job, &work->items[i], scratch);
}

/* Items are sorted only if the longest is more than 1/SHARES of a worker's part: otherwise sorting
 * takes longer than the wait for the last item. */
#define SHARES 32

/* Sorts the longest items first, so that those claimed last are short. */
static int by_cost(const void *a, const void *b) {
    const struct cpu_attend_item *x = a, *y = b;
    return (x->cost < y->cost) - (x->cost > y->cost);
}

static int64_t class_cost(const struct cpu_attend_job *job, const struct kern_span *span) {
    int64_t seen = 0;
    for (int head = 0; head < job->heads_kv; head++) {
        int stream = job->shape->first + head;
        seen += *cpu_cache_length(job->cache, span->slot, stream);
        seen += cpu_cache_members(job->cache, span->slot, stream).length;
    }
    return seen * job->group * span->count;
}

/* Returns the lanes per item: as many as the kernel prefers, fewer if some workers would otherwise
 * stay idle. */
static int lanes_per_item(const struct cpu *cpu, const struct cpu_attend_job *job) {
    const struct kern_cache_options *o = &cpu->cache.options;
    int most = cpu->kernels->attend_lanes(o);
    int64_t all = (int64_t)job->batch->rows * job->group * job->heads_kv;
    while (most > LANES_MIN && all / most < (int64_t)8 * cpu->threads) most /= 2;
    return most;
}

/* Spans whose entries have classes get no items: observe_mass computes their attention. */
static bool has_items(const struct kern_span *span) {
    return !rule_classes(span->rule);
}

static int64_t plan(struct cpu *cpu, const struct cpu_attend_job *job, int64_t *cost) {
    int most = lanes_per_item(cpu, job);
    int64_t count = 0, largest = 0;
    for (int s = 0; s < job->batch->span_count; s++) {
        int lanes = job->batch->spans[s].count * job->group;
        if (has_items(&job->batch->spans[s]))
            count += (int64_t)(lanes + most - 1) / most * job->heads_kv;
    }
    cpu_room_must(&cpu->items, (size_t)count * sizeof(struct cpu_attend_item));
    struct cpu_attend_item *item = cpu->items.mem;
    *cost = 0;
    for (int s = 0; s < job->batch->span_count; s++) {
        const struct kern_span *span = &job->batch->spans[s];
        int all = span->count * job->group;
        if (!has_items(span)) *cost += class_cost(job, span);
        for (int head = 0; head < job->heads_kv && has_items(span); head++) {
            struct cpu_stream stream = cpu_cache_stream(job->cache, span->slot, job->layer, head);
            for (int lane = 0; lane < all; lane += most, item++) {
                int lanes = all - lane < most ? all - lane : most;
                int last = (lane + lanes - 1) / job->group;
                *item =
                    (struct cpu_attend_item){.span = s, .head = head, .lane = lane, .lanes = lanes};
                item->cost = (int64_t)(stream.length - span->count + last + 1) * (16 + lanes);
                *cost += item->cost;
                largest = item->cost > largest ? item->cost : largest;
            }
        }
    }
    CHECK(item - (struct cpu_attend_item *)cpu->items.mem == count);
    if (largest > *cost / ((int64_t)SHARES * cpu->threads))
        qsort(cpu->items.mem, (size_t)count, sizeof(struct cpu_attend_item), by_cost);
    return count;
}

/* Stores the last queries, scaled, of sequences whose rule observes a window. */
static void keep_queries(struct cpu_cache *cache, const struct cpu_attend_job *job) {
    size_t size = (size_t)(job->heads_kv * job->heads) * (size_t)job->head_dim;
    for (int s = 0; s < job->batch->span_count; s++) {
        const struct kern_span *span = &job->batch->spans[s];
        int window = rule_window(span->rule);
        for (int i = span->count > window ? span->count - window : 0; i < span->count; i++) {
            const float *q = job->qkv + (size_t)(span->row + i) * job->qkv_stride;
            float *to = cpu_cache_query(cache, span->slot, job->layer, (span->pos + i) % window);
            for (size_t d = 0; d < size; d++) to[d] = q[d] * job->scale;
            for (size_t d = 0; d < size; d += (size_t)job->head_dim)
                cpu_cache_rotate(cache, to + d, job->head_dim);
        }
    }
}

/* ---- Accumulated mass ---- */

struct mass_work {
    struct cpu *cpu;
    const struct cpu_attend_job *job;
    struct cpu_tickets tickets; /* spans * heads_kv items */
};

static void attend_add_mass(const struct mass_work *work, int item, int worker) {
    const struct cpu_attend_job *job = work->job;
    const struct kern_span *span = &job->batch->spans[item / job->heads_kv];
    int head = item % job->heads_kv;
    if (!rule_adds(span->rule)) return;
    struct cpu_mass mass = {.stream = cpu_cache_stream(job->cache, span->slot, job->layer, head),
                            .rows = job->rows + span->row,
                            .q = job->qkv + (size_t)span->row * job->qkv_stride +
                                 (size_t)(head * job->heads) * (size_t)job->head_dim,
                            .q_stride = job->qkv_stride,
                            .count = span->count,
                            .scale = job->scale,
                            .cap = job->cap,
                            .sinks = job->sinks ? job->sinks + (size_t)(head * job->heads) : NULL,
                            .group = span->rule->observe.group,
                            .pos = span->pos,
                            .sliding_window = job->sliding_window};
    if (rule_classes(span->rule)) {
        size_t width = (size_t)job->group * (size_t)job->value_dim;
        mass.members = cpu_cache_members(job->cache, span->slot, job->shape->first + head);
        mass.positions = span->rule->classes.positions;
        mass.out_stride = (size_t)job->heads_kv * width;
        mass.out = job->out + (size_t)span->row * mass.out_stride + (size_t)head * width;
        mass.out_first = job->query;
        mass.out_count = job->group;
    }
    cpu_observe_mass(job->cache, &mass, worker);
}

static void attend_mass_items(void *arg, int worker) {
    struct mass_work *work = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&work->tickets, 1, &end)) >= 0;)
        attend_add_mass(work, (int)i, worker);
}

/* Passes over the keys a second time, for sequences whose rule adds up attention; the attention
 * kernels do not know about it. For sequences with classes this pass computes attention itself, one
 * head per worker. */
static void observe_mass(struct cpu *cpu, const struct cpu_attend_job *job, int64_t cost) {
    bool any = false;
    for (int s = 0; s < job->batch->span_count; s++)
        any = any || rule_adds(job->batch->spans[s].rule);
    if (!any) return;
    struct mass_work work = {.cpu = cpu, .job = job};
    cpu_tickets_set(&work.tickets, (int64_t)job->batch->span_count * job->heads_kv);
    cpu_run(cpu, cost, attend_mass_items, &work);
}

void cpu_attend(struct kern *kern, int layer, float *out, const float *qkv,
                const struct kern_batch *batch, const struct kern_attend_options *options) {
    struct cpu *cpu = cpu_of(kern);
    CHECK(cpu->has_cache && layer >= 0 && layer < cpu->cache.options.layers);
    const struct cpu_layer *shape = &cpu->cache.layers[layer];
    struct cpu_attend_job job = {.cache = &cpu->cache,
                                 .batch = batch,
                                 .layer = layer,
                                 .shape = shape,
                                 .heads_kv = shape->heads_kv,
                                 .head_dim = shape->head_dim,
                                 .value_dim = cpu_value_dim(shape),
                                 .group = shape->shard.queries,
                                 .query = shape->shard.query_first,
                                 .heads = shape->group,
                                 .rows = cpu_rows(cpu, batch),
                                 .qkv = qkv,
                                 .qkv_stride = qkv_stride(shape, options->queries),
                                 .out = out,
                                 .scale = options->scale,
                                 .cap = options->cap,
                                 .sinks = cpu_cache_sinks(&cpu->cache, options, layer, 0),
                                 .sliding_window = options->sliding_window,
                                 .both_ways = options->both_ways};
    if (!options->queries) {
        cpu->cache.attended[layer] = *options; /* the stored queries attend in the same way */
        keep_queries(&cpu->cache, &job);
    }
    int64_t cost;
    int64_t count = plan(cpu, &job, &cost);
    struct attend_work work = {.cpu = cpu, .job = &job, .items = cpu->items.mem};
    cpu_tickets_set(&work.tickets, count);
    cpu_run(cpu, cost * job.head_dim, attend_items, &work);
    if (!options->queries) observe_mass(cpu, &job, cost * job.head_dim);
}
