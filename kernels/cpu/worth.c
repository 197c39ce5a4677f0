/* Measures the worth of entries to the queries of a step (kernels/worth.h).
 *
 * First G and what of the formula depends on entries alone are computed, for all heads; then each
 * item, a KV head and a window, adds up its queries in order, so that results do not depend on the
 * number of workers. Vectors of a head are padded with zeros to a multiple of 16. Memory, beside
 * scratch for one block of queries: [heads_q][D][D] of G, WEIGHT_ROWS rows of the output
 * projection, and the values of the measured entries; with gates those twice. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/internal.h"
#include "kernels/product.h"
#include "kernels/worth.h"

#define WEIGHT_ROWS 64 /* rows of the output projection that are converted together */
#define LANES_MOST  16 /* query heads that read a key together, unless a group has more */
#define MOVED       32 /* entries whose differences are multiplied together */

struct worth_job {
    struct cpu *cpu;
    const struct cpu_cache *cache;
    const struct kern_worth *worth;
    const struct cpu_row *span_rows; /* the step's */
    const struct kern_span *span;
    const struct kern_attend_options *options;
    const float *heads, *qkv;
    size_t qkv_width;
    int layer, heads_q, heads_kv, group;
    int dim;           /* numbers of a query and of a key */
    int dim_v;         /* numbers of a value and of an output */
    int padded;        /* dim_v, rounded up to a multiple of 16 */
    int columns;       /* measured entries, rounded up to a multiple of MOVED */
    int value_group;   /* query heads that share values */
    int queries;       /* in a block */
    int known;         /* measured entries that are in the cache */
    int32_t stride;    /* floats of a row of logits: entries of the stream */
    float *weights;    /* [WEIGHT_ROWS][heads_q][padded] */
    float *grams;      /* [heads_q][padded][padded] G; with gates folded, see fold_gram */
    float *values;     /* [heads_q / value_group][count][padded] of the measured entries */
    float *cached;     /* [count][rank] of what latent attention caches */
    float *across;     /* [heads_q / value_group][columns / MOVED][padded][MOVED] the values again;
                          with gates */
    float *squares;    /* [heads_q][count] v'Gv; without gates */
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
                memcpy(to + (int64_t)h * job->padded, whole + (int64_t)h * job->dim_v,
                       (size_t)job->dim_v * sizeof *to);
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

/* Folds four rows of G, which is symmetric: what is left of the diagonal goes, and what is right of
 * it counts twice, so that u'Gu is the sum over i of u_i times a product of the first i numbers of
 * u. The rows become columns: number r of row k lies at [r][k]. `rows`: room for a copy. */
static void fold_gram(float *gram, int64_t first, int64_t padded, float *rows) {
    memcpy(rows, gram, (size_t)(4 * padded) * sizeof *rows);
    for (int64_t r = 0; r < padded; r++)
        for (int64_t k = 0; k < 4; k++)
            gram[4 * r + k] =
                r > first + k ? 0 : rows[k * padded + r] * (r < first + k ? 2.0f : 1.0f);
}

/* An item is four rows of a head's G. */
static void fold_grams(void *arg, int worker) {
    struct worth_job *job = arg;
    float *rows = job->cpu->scratch[worker].mem;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;)
        fold_gram(job->grams + 4 * i * job->padded, 4 * i % job->padded, job->padded, rows);
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
    cpu_tickets_set(&job->tickets, width / 4);
    if (job->worth->gates) cpu_run(job->cpu, width * job->padded, fold_grams, job);
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

/* Reads a measured entry's value, or what latent attention makes values of. */
static void worth_read_value(const struct worth_job *job, int head, int i) {
    const struct cpu_cache *cache = job->cache;
    struct cpu_stream stream = cpu_cache_stream(cache, job->span->slot, job->layer, head);
    const struct kern_latent *latent = job->worth->latent;
    const int32_t at = job->worth->entries[i], slots = stream.layer->page_slots;
    const size_t row = (size_t)head * (size_t)job->worth->count + (size_t)i;
    float *to =
        latent ? job->cached + row * (size_t)latent->rank : job->values + row * (size_t)job->padded;
    cpu_cache_wide_row(cache, stream.layer, stream.pages[at / slots], true, at % slots, to);
    if (!latent) cpu_cache_rotate(cache, to, job->dim_v);
}

static void worth_read_values(void *arg, int worker) {
    (void)worker;
    struct worth_job *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; i < end; i++) worth_read_value(job, (int)(i / job->known), (int)(i % job->known));
}

/* v'Gv. */
static void worth_square_values(void *arg, int worker) {
    struct worth_job *job = arg;
    float *turned = job->cpu->scratch[worker].mem;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; i < end; i++) {
            const int64_t head = i / job->known, entry = i % job->known;
            const int64_t row = head / job->value_group * job->worth->count + entry;
            const float *value = job->values + row * job->padded;
            job->cache->math->dots(turned, (size_t)job->padded, value, 1,
                                   float_rows(gram_of(job, (int)head), job->padded), job->padded);
            job->squares[head * job->worth->count + entry] = worth_dot(turned, value, job->padded);
        }
}

/* An item is MOVED values of a head. */
static void worth_turn_values(void *arg, int worker) {
    (void)worker;
    struct worth_job *job = arg;
    const int64_t padded = job->padded, blocks = job->columns / MOVED;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;) {
        const int64_t head = i / blocks, first = i % blocks * MOVED;
        const float *from = job->values + (head * job->worth->count + first) * padded;
        float *to = job->across + i * padded * MOVED;
        for (int64_t d = 0; d < padded; d++)
            for (int64_t k = 0; k < MOVED; k++)
                to[d * MOVED + k] = first + k < job->known ? from[k * padded + d] : 0;
    }
}

static void compute_values(struct worth_job *job) {
    const struct kern_latent *latent = job->worth->latent;
    const int64_t heads = job->heads_q / job->value_group, padded = job->padded;
    memset(job->values, 0, (size_t)(heads * job->worth->count * padded) * sizeof *job->values);
    cpu_tickets_set(&job->tickets, (int64_t)job->known * job->heads_kv);
    cpu_team_run(job->cpu->team, worth_read_values, job);
    if (latent && job->known) {
        const struct cpu_heads products = {.weights = latent->up_v,
                                           .count = latent->heads,
                                           .rows = job->known,
                                           .x = job->cached,
                                           .x_row = latent->rank,
                                           .y = job->values,
                                           .y_row = padded,
                                           .y_head = job->worth->count * padded};
        cpu_matmul_heads(job->cpu, &products);
    }
    cpu_tickets_set(&job->tickets, job->worth->gates ? heads * (job->columns / MOVED)
                                                     : (int64_t)job->known * job->heads_q);
    cpu_team_run(job->cpu->team, job->worth->gates ? worth_turn_values : worth_square_values, job);
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
    float *changes; /* [columns] |W_h g (o - v)|^2 for one query head at one query */
    float *gates;   /* [padded] g */
    float *moved;   /* [padded][MOVED] g (o - v), with gates */
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
    l.changes = l.logits + lanes * (size_t)job->stride;
    l.gates = l.changes + job->columns;
    l.moved = l.gates + job->padded;
    return l;
}

/* Reads `count` queries from row `row` on, with their outputs. */
static void worth_read_lanes(const struct worth_job *job, const struct worth_lanes *l, int row,
                             int count) {
    const size_t dim = (size_t)job->dim, dim_v = (size_t)job->dim_v, padded = (size_t)job->padded;
    const size_t heads = (size_t)job->heads_q;
    for (int lane = 0; lane < count * job->group; lane++) {
        const size_t at = (size_t)row + (size_t)(lane % count);
        const size_t head = (size_t)l->head * (size_t)job->group + (size_t)(lane / count);
        const float *q = job->qkv + at * job->qkv_width + head * dim;
        float *query = l->queries + (size_t)lane * dim;
        float *output = l->outputs + (size_t)lane * padded;
        for (size_t d = 0; d < dim; d++) query[d] = q[d] * job->options->scale;
        cpu_cache_rotate(job->cache, query, job->dim);
        memset(output, 0, padded * sizeof *output);
        memcpy(output, job->heads + (at * heads + head) * dim_v, dim_v * sizeof *output);
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

/* |W_h (o - v)|^2 for a lane's query. */
static void worth_find_changes(const struct worth_job *job, const struct worth_lanes *l, int lane,
                               int query_head) {
    const float *along = l->along + (size_t)lane * (size_t)job->worth->count;
    const float *squares = job->squares + (size_t)query_head * (size_t)job->worth->count;
    const size_t place = (size_t)lane * (size_t)job->padded;
    const float own = worth_dot(l->turned + place, l->outputs + place, job->padded);
    for (int i = 0; i < l->entries; i++) l->changes[i] = fmaxf(own - 2 * along[i] + squares[i], 0);
}

/* u'Gu for MOVED differences u; `gram`: folded. */
static void worth_square_moved(const struct worth_job *job, const float *gram, const float *moved,
                               float *squares) {
    const int64_t padded = job->padded;
    memset(squares, 0, MOVED * sizeof *squares);
    for (int64_t d = 0; d < padded; d += 4) {
        float sums[4][MOVED] = {{0}};
        const struct product product = {.to = sums[0],
                                        .a = gram + d * padded,
                                        .b = moved,
                                        .to_stride = MOVED,
                                        .a_stride = 4,
                                        .b_stride = MOVED};
        product_add(&product, 4, MOVED, d + 4);
        for (int64_t k = 0; k < 4; k++)
            for (int i = 0; i < MOVED; i++) squares[i] += sums[k][i] * moved[(d + k) * MOVED + i];
    }
    for (int i = 0; i < MOVED; i++) squares[i] = fmaxf(squares[i], 0);
}

/* |W_h g (o - v)|^2 for a lane's query, with the gates of row `row`. */
static void worth_find_gated(const struct worth_job *job, const struct worth_lanes *l, int lane,
                             int row, int query_head) {
    const int64_t padded = job->padded;
    const float *output = l->outputs + (int64_t)lane * padded;
    const float *gates =
        job->worth->gates + ((int64_t)row * job->heads_q + query_head) * job->dim_v;
    const float *values =
        job->across + (int64_t)(query_head / job->value_group) * padded * job->columns;
    for (int64_t d = 0; d < padded; d++)
        l->gates[d] = d < job->dim_v ? 1 / (1 + expf(-gates[d])) : 0;
    for (int first = 0; first < l->entries; first += MOVED, values += padded * MOVED) {
        for (int64_t d = 0; d < padded; d++)
            for (int64_t i = 0; i < MOVED; i++)
                l->moved[d * MOVED + i] = output[d] - l->gates[d] * values[d * MOVED + i];
        worth_square_moved(job, gram_of(job, query_head), l->moved, l->changes + first);
    }
}

/* Adds what the entries are worth to one query head at one query: lane `lane`, row `row`. */
static void worth_add_query(const struct worth_job *job, const struct worth_lanes *l, int lane,
                            int row, int query_head) {
    const int32_t pos = job->span->pos + row - job->span->row, from = first_seen(job, pos);
    const float sink = job->options->sinks ? job->options->sinks[query_head] : -INFINITY;
    const float factor = job->worth->factors[row];
    float *attention = l->logits + (size_t)lane * (size_t)job->stride;
    if (job->worth->gates)
        worth_find_gated(job, l, lane, row, query_head);
    else
        worth_find_changes(job, l, lane, query_head);
    job->cache->math->softmax(attention + from, pos + 1 + job->span_rows[row].ahead - from, sink);
    for (int i = 0; i < l->entries; i++) {
        const int32_t entry = job->worth->entries[i];
        if (entry < from) continue;
        const float a = attention[entry], r = a / fmaxf(1 - a, KERN_WORTH_REST);
        l->out[i] += r * r * l->changes[i] * factor;
    }
}

/* G o and v'Go for the lanes of one query head, without gates. */
static void worth_turn_lanes(const struct worth_job *job, const struct worth_lanes *l, int lane,
                             int count, int query_head) {
    const struct cpu_math *math = job->cache->math;
    const size_t padded = (size_t)job->padded, entries = (size_t)job->worth->count;
    const float *values = job->values + (size_t)(query_head / job->value_group) * entries * padded;
    math->dots(l->turned + (size_t)lane * padded, padded, l->outputs + (size_t)lane * padded, count,
               float_rows(gram_of(job, query_head), job->padded), job->padded);
    math->dots(l->along + (size_t)lane * entries, entries, l->turned + (size_t)lane * padded, count,
               float_rows(values, job->padded), l->entries);
}

/* Adds what the entries are worth to `count` queries from row `row` on. */
static void worth_add_block(const struct worth_job *job, const struct worth_lanes *l, int row,
                            int count) {
    const int32_t pos = job->span->pos + row - job->span->row;
    int32_t end = pos + count;
    for (int t = 0; t < count; t++)
        if (pos + t + 1 + job->span_rows[row + t].ahead > end)
            end = pos + t + 1 + job->span_rows[row + t].ahead;
    worth_read_lanes(job, l, row, count);
    worth_read_logits(job, l, count * job->group, first_seen(job, pos), end);
    for (int g = 0; g < job->group && !job->worth->gates; g++)
        worth_turn_lanes(job, l, g * count, count, l->head * job->group + g);
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
    const size_t kinds = heads / (size_t)job->value_group;
    const size_t weights = WEIGHT_ROWS * heads * padded, grams = heads * padded * padded;
    const size_t values = kinds * entries * padded;
    const size_t cached = job->worth->latent ? entries * (size_t)job->worth->latent->rank : 0;
    const size_t across = job->worth->gates ? kinds * padded * (size_t)job->columns : 0;
    size_t scratch = (size_t)worth_lanes_most(job) * lane_floats(job) + (size_t)job->columns +
                     (1 + MOVED) * padded;
    if (scratch < (size_t)job->worth->o->cols) scratch = (size_t)job->worth->o->cols;
    job->weights =
        cpu_alloc((weights + grams + values + cached + across + heads * entries) * sizeof(float));
    if (!job->weights) return ERR_NOMEM;
    job->grams = job->weights + weights;
    job->values = job->grams + grams;
    job->cached = job->values + values;
    job->across = job->cached + cached;
    job->squares = job->across + across;
    return cpu_scratch_grow(job->cpu, scratch * sizeof(float));
}

/* The sizes of a layer. */
static void worth_set_sizes(struct worth_job *job, const struct cpu_layer *l) {
    const struct kern_worth *worth = job->worth;
    const int others = job->options->queries ? 0 : worth->latent ? 1 : 2;
    job->heads_q = l->heads_q;
    job->heads_kv = l->heads_kv;
    job->group = l->group;
    job->dim = l->head_dim;
    job->dim_v = worth->latent ? worth->latent->dim_v : l->head_dim;
    job->padded = (job->dim_v + 15) / 16 * 16;
    job->columns = (worth->count + MOVED - 1) / MOVED * MOVED;
    job->value_group = worth->latent ? 1 : l->group;
    job->qkv_width = (size_t)(l->heads_q + others * l->heads_kv) * (size_t)l->head_dim;
    job->stride = job->span->pos + job->span->count;
    job->queries = job->group < LANES_MOST ? LANES_MOST / job->group : 1;
    while (job->known < worth->count && worth->entries[job->known] < job->stride) job->known++;
    CHECK(!worth->latent == !l->latent && worth->o->cols == (int64_t)job->heads_q * job->dim_v);
    CHECK(*cpu_cache_length(&job->cpu->cache, job->span->slot, l->first) == job->stride);
}

int cpu_worth(struct kern *kern, int layer, const struct kern_worth *worth, const float *heads,
              const float *qkv, const struct kern_batch *batch,
              const struct kern_attend_options *options) {
    struct cpu *cpu = cpu_of(kern);
    const struct kern_span *span = batch->spans;
    CHECK(cpu->has_cache && cpu->comm->ranks == 1 && batch->span_count == 1);
    CHECK(worth->count > 0 && worth->window > 0 && span->count % worth->window == 0);
    struct worth_job job = {.cpu = cpu,
                            .cache = &cpu->cache,
                            .worth = worth,
                            .span_rows = cpu_rows(cpu, batch),
                            .span = span,
                            .options = options,
                            .heads = heads,
                            .qkv = qkv,
                            .layer = layer};
    worth_set_sizes(&job, &cpu->cache.layers[layer]);
    int rc = worth_reserve(&job);
    if (rc) goto out;
    compute_grams(&job);
    compute_values(&job);
    cpu_tickets_set(&job.tickets, (int64_t)span->count / worth->window * job.heads_kv);
    cpu_team_run(cpu->team, worth_measure_windows, &job);
out:
    cpu_free(job.weights);
    return rc;
}
