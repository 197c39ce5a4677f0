/* Measures the worth of entries to the queries of a step (kernels/worth.h).
 *
 * First G and what of the formula depends on entries alone are computed, for all heads; then each
 * item, a KV head and a window, adds up its queries in order, so that results do not depend on the
 * number of workers. Vectors of a head are padded with zeros to a multiple of 16. Memory, beside
 * scratch for one block of queries: [heads_q][D][D] of G, WEIGHT_ROWS rows of the output
 * projection, and the values of the measured entries. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/internal.h"
#include "kernels/product.h"
#include "kernels/worth.h"

#define WEIGHT_ROWS 64 /* rows of the output projection that are converted together */
#define LANES_MOST  16 /* query heads that read a key together, unless a group has more */

struct worth_job {
    struct cpu *cpu;
    const struct cpu_cache *cache;
    const struct kern_worth *worth;
    const struct kern_span *span;
    const struct kern_attend_options *options;
    const float *heads, *qkv;
    int layer, heads_q, heads_kv, group, dim;
    int padded;        /* dim, rounded up to a multiple of 16 */
    int queries;       /* in a block */
    int32_t stride;    /* floats of a row of logits: entries of the stream */
    float *weights;    /* [WEIGHT_ROWS][heads_q][padded] */
    float *grams;      /* [heads_q][padded][padded] G */
    float *values;     /* [heads_kv][count][padded] of the measured entries */
    float *squares;    /* [heads_q][count] v'Gv */
    int64_t row, rows; /* rows of the projection in `weights` */
    struct cpu_tickets tickets;
};

/* ---- G and the entries ---- */

static void convert_weights(void *arg, int worker) {
    struct worth_job *job = arg;
    float *whole = job->cpu->scratch[worker].mem;
    int64_t end;
    for (int64_t r; (r = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; r < end; r++) {
            float *to = job->weights + r * job->heads_q * job->padded;
            cpu_weight_row(job->worth->o, job->row + r, whole);
            for (int h = 0; h < job->heads_q; h++)
                memcpy(to + (int64_t)h * job->padded, whole + (int64_t)h * job->dim,
                       (size_t)job->dim * sizeof *to);
        }
}

/* An item is four rows of a head's G. */
static void add_grams(void *arg, int worker) {
    (void)worker;
    struct worth_job *job = arg;
    const int64_t parts = job->padded / 4, stride = (int64_t)job->heads_q * job->padded;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;) {
        const int64_t head = i / parts, first = i % parts * 4;
        const float *weights = job->weights + head * job->padded;
        const struct product product = {.to =
                                            job->grams + (head * job->padded + first) * job->padded,
                                        .a = weights + first,
                                        .b = weights,
                                        .to_stride = job->padded,
                                        .a_stride = stride,
                                        .b_stride = stride};
        product_add(&product, 4, job->padded, job->rows);
    }
}

static void compute_grams(struct worth_job *job) {
    const int64_t width = (int64_t)job->heads_q * job->padded, all = job->worth->o->rows;
    memset(job->grams, 0, (size_t)(width * job->padded) * sizeof *job->grams);
    memset(job->weights, 0, (size_t)(WEIGHT_ROWS * width) * sizeof *job->weights);
    for (job->row = 0; job->row < all; job->row += WEIGHT_ROWS) {
        job->rows = all - job->row < WEIGHT_ROWS ? all - job->row : WEIGHT_ROWS;
        cpu_tickets_set(&job->tickets, job->rows);
        cpu_run(job->cpu, job->rows * width * 4, convert_weights, job);
        cpu_tickets_set(&job->tickets, width / 4);
        cpu_run(job->cpu, job->rows * width * job->padded, add_grams, job);
    }
}

static struct cpu_rows float_rows(const float *at, int dim) {
    return (struct cpu_rows){.at = at, .dim = dim, .dtype = KERN_F32};
}

static float worth_dot(const float *a, const float *b, int count) {
    float sum[16] = {0}, all = 0;
    for (int i = 0; i < count; i += 16)
        for (int k = 0; k < 16; k++) sum[k] += a[i + k] * b[i + k];
    for (int k = 0; k < 16; k++) all += sum[k];
    return all;
}

static const float *gram_of(const struct worth_job *job, int head) {
    return job->grams + (int64_t)head * job->padded * job->padded;
}

/* The value of a measured entry, and v'Gv for each query head of its group. */
static void worth_read_value(const struct worth_job *job, int head, int i, float *turned) {
    const struct cpu_cache *cache = job->cache;
    struct cpu_stream stream = cpu_cache_stream(cache, job->span->slot, job->layer, head);
    const int32_t at = job->worth->entries[i], slots = stream.layer->page_slots;
    float *value = job->values + ((int64_t)head * job->worth->count + i) * job->padded;
    memset(value, 0, (size_t)job->padded * sizeof *value);
    cpu_cache_wide_row(cache, stream.layer, stream.pages[at / slots], true, at % slots, value);
    cpu_cache_rotate(cache, value, job->dim);
    for (int q = head * job->group; q < (head + 1) * job->group; q++) {
        cache->math->dots(turned, (size_t)job->padded, value, 1,
                          float_rows(gram_of(job, q), job->padded), job->padded);
        job->squares[(int64_t)q * job->worth->count + i] = worth_dot(turned, value, job->padded);
    }
}

static void worth_read_values(void *arg, int worker) {
    struct worth_job *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; i < end; i++) {
            const int head = (int)(i / job->worth->count), entry = (int)(i % job->worth->count);
            if (job->worth->entries[entry] < job->span->pos + job->span->count)
                worth_read_value(job, head, entry, job->cpu->scratch[worker].mem);
        }
}

/* ---- Queries ---- */

/* Scratch of a worker, and what an item measures. Lanes are query heads, each with its queries one
 * after the other. */
struct worth_lanes {
    float *queries; /* [lanes][dim] scaled */
    float *outputs; /* [lanes][padded] o */
    float *turned;  /* [lanes][padded] G o */
    float *along;   /* [lanes][count] v'Go */
    float *logits;  /* [lanes][stride] */
    int head;       /* KV head */
    int entries;    /* measured entries older than the window */
    float *out;     /* [count] */
};

static int worth_lanes_most(const struct worth_job *job) {
    return job->queries * job->group;
}

static size_t lane_floats(const struct worth_job *job) {
    return (size_t)(job->dim + 2 * job->padded + job->worth->count) + (size_t)job->stride;
}

static struct worth_lanes worth_lanes_of(const struct worth_job *job, int worker) {
    const size_t lanes = (size_t)worth_lanes_most(job);
    struct worth_lanes l = {.queries = job->cpu->scratch[worker].mem};
    l.outputs = l.queries + lanes * (size_t)job->dim;
    l.turned = l.outputs + lanes * (size_t)job->padded;
    l.along = l.turned + lanes * (size_t)job->padded;
    l.logits = l.along + lanes * (size_t)job->worth->count;
    return l;
}

/* Reads `count` queries from row `row` on, with their outputs. */
static void worth_read_lanes(const struct worth_job *job, const struct worth_lanes *l, int row,
                             int count) {
    const size_t dim = (size_t)job->dim, padded = (size_t)job->padded;
    const size_t width = (size_t)job->heads_q * dim;
    const size_t qkv_width = width + 2 * (size_t)job->heads_kv * dim;
    for (int lane = 0; lane < count * job->group; lane++) {
        const size_t at = (size_t)row + (size_t)(lane % count);
        const size_t head = (size_t)(l->head * job->group + lane / count) * dim;
        const float *q = job->qkv + at * qkv_width + head;
        float *query = l->queries + (size_t)lane * dim;
        float *output = l->outputs + (size_t)lane * padded;
        for (size_t d = 0; d < dim; d++) query[d] = q[d] * job->options->scale;
        cpu_cache_rotate(job->cache, query, job->dim);
        memset(output, 0, padded * sizeof *output);
        memcpy(output, job->heads + at * width + head, dim * sizeof *output);
    }
}

/* Logits of the lanes for entries from the page of `from` on, below `to`. */
static void worth_read_logits(const struct worth_job *job, const struct worth_lanes *l, int lanes,
                              int32_t from, int32_t to) {
    const struct cpu_cache *cache = job->cache;
    struct cpu_stream stream = cpu_cache_stream(cache, job->span->slot, job->layer, l->head);
    const int32_t slots = stream.layer->page_slots;
    for (int32_t i = from / slots * slots; i < to; i += slots)
        cache->math->dots(l->logits + i, (size_t)job->stride, l->queries, lanes,
                          cpu_cache_rows(cache, stream.layer, stream.pages[i / slots], false, 0),
                          to - i < slots ? to - i : slots);
    for (int lane = 0; lane < lanes && job->options->cap > 0; lane++)
        cache->math->soft_cap(l->logits + (size_t)lane * (size_t)job->stride + from, to - from,
                              job->options->cap);
}

/* The first entry that the query at `pos` sees. */
static int32_t first_seen(const struct worth_job *job, int32_t pos) {
    const int32_t window = job->options->sliding_window;
    return window && pos >= window ? pos - window + 1 : 0;
}

/* Adds what the entries are worth to one query head at one query: lane `lane`, row `row`. */
static void worth_add_query(const struct worth_job *job, const struct worth_lanes *l, int lane,
                            int row, int query_head) {
    const int32_t pos = job->span->pos + row - job->span->row, from = first_seen(job, pos);
    const float sink = job->options->sinks ? job->options->sinks[query_head] : -INFINITY;
    const float *along = l->along + (size_t)lane * (size_t)job->worth->count;
    const float *squares = job->squares + (size_t)query_head * (size_t)job->worth->count;
    const float factor = job->worth->factors[row];
    float *attention = l->logits + (size_t)lane * (size_t)job->stride;
    const size_t place = (size_t)lane * (size_t)job->padded;
    const float own = worth_dot(l->turned + place, l->outputs + place, job->padded);
    job->cache->math->softmax(attention + from, pos + 1 - from, sink);
    for (int i = 0; i < l->entries; i++) {
        const int32_t entry = job->worth->entries[i];
        if (entry < from) continue;
        const float a = attention[entry], r = a / fmaxf(1 - a, KERN_WORTH_REST);
        l->out[i] += r * r * fmaxf(own - 2 * along[i] + squares[i], 0) * factor;
    }
}

/* Adds what the entries are worth to `count` queries from row `row` on. */
static void worth_add_block(const struct worth_job *job, const struct worth_lanes *l, int row,
                            int count) {
    const struct cpu_math *math = job->cache->math;
    const int32_t pos = job->span->pos + row - job->span->row;
    const size_t padded = (size_t)job->padded, entries = (size_t)job->worth->count;
    const float *values = job->values + (size_t)l->head * entries * padded;
    worth_read_lanes(job, l, row, count);
    worth_read_logits(job, l, count * job->group, first_seen(job, pos), pos + count);
    for (int g = 0; g < job->group; g++) {
        const int head = l->head * job->group + g, lane = g * count;
        math->dots(l->turned + (size_t)lane * padded, padded, l->outputs + (size_t)lane * padded,
                   count, float_rows(gram_of(job, head), job->padded), job->padded);
        math->dots(l->along + (size_t)lane * entries, entries, l->turned + (size_t)lane * padded,
                   count, float_rows(values, job->padded), l->entries);
    }
    for (int t = 0; t < count; t++)
        for (int g = 0; g < job->group; g++)
            worth_add_query(job, l, g * count + t, row + t, l->head * job->group + g);
}

static void worth_measure_window(const struct worth_job *job, int window, struct worth_lanes *l) {
    const struct kern_worth *worth = job->worth;
    const int first = job->span->row + window * worth->window;
    const int32_t pos = job->span->pos + window * worth->window;
    l->out = worth->out +
             ((size_t)window * (size_t)job->heads_kv + (size_t)l->head) * (size_t)worth->count;
    memset(l->out, 0, (size_t)worth->count * sizeof *l->out);
    for (l->entries = 0; l->entries < worth->count; l->entries++)
        if (worth->entries[l->entries] >= pos) break;
    for (int t = 0; t < worth->window && l->entries; t += job->queries) {
        const int left = worth->window - t;
        worth_add_block(job, l, first + t, left < job->queries ? left : job->queries);
    }
}

static void worth_measure_windows(void *arg, int worker) {
    struct worth_job *job = arg;
    struct worth_lanes lanes = worth_lanes_of(job, worker);
    const int windows = job->span->count / job->worth->window;
    int64_t end;
    /* The last windows have the most entries before them. */
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;) {
        lanes.head = (int)(i % job->heads_kv);
        worth_measure_window(job, windows - 1 - (int)(i / job->heads_kv), &lanes);
    }
}

/* ---- The whole ---- */

static int worth_reserve(struct worth_job *job) {
    const size_t heads = (size_t)job->heads_q, padded = (size_t)job->padded;
    const size_t entries = (size_t)job->worth->count;
    const size_t weights = WEIGHT_ROWS * heads * padded, grams = heads * padded * padded;
    const size_t values = (size_t)job->heads_kv * entries * padded;
    size_t scratch = (size_t)worth_lanes_most(job) * lane_floats(job);
    if (scratch < (size_t)job->worth->o->cols) scratch = (size_t)job->worth->o->cols;
    job->weights = cpu_alloc((weights + grams + values + heads * entries) * sizeof(float));
    if (!job->weights) return ERR_NOMEM;
    job->grams = job->weights + weights;
    job->values = job->grams + grams;
    job->squares = job->values + values;
    return cpu_scratch_grow(job->cpu, scratch * sizeof(float));
}

int cpu_worth(struct kern *kern, int layer, const struct kern_worth *worth, const float *heads,
              const float *qkv, const struct kern_batch *batch,
              const struct kern_attend_options *options) {
    struct cpu *cpu = cpu_of(kern);
    const struct cpu_layer *l = &cpu->cache.layers[layer];
    const struct kern_span *span = batch->spans;
    CHECK(cpu->has_cache && cpu->comm->ranks == 1 && batch->span_count == 1);
    CHECK(worth->count > 0 && worth->window > 0 && span->count % worth->window == 0);
    struct worth_job job = {.cpu = cpu,
                            .cache = &cpu->cache,
                            .worth = worth,
                            .span = span,
                            .options = options,
                            .heads = heads,
                            .qkv = qkv,
                            .layer = layer,
                            .heads_q = l->heads_q,
                            .heads_kv = l->heads_kv,
                            .group = l->group,
                            .dim = l->head_dim,
                            .padded = (l->head_dim + 15) / 16 * 16,
                            .stride = span->pos + span->count};
    job.queries = job.group < LANES_MOST ? LANES_MOST / job.group : 1;
    CHECK(*cpu_cache_length(&cpu->cache, span->slot, l->first) == job.stride);
    int rc = worth_reserve(&job);
    if (rc) goto out;
    compute_grams(&job);
    cpu_tickets_set(&job.tickets, (int64_t)worth->count * l->heads_kv);
    cpu_team_run(cpu->team, worth_read_values, &job);
    cpu_tickets_set(&job.tickets, (int64_t)span->count / worth->window * l->heads_kv);
    cpu_team_run(cpu->team, worth_measure_windows, &job);
out:
    cpu_free(job.weights);
    return rc;
}
