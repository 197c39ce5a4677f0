/* Attention as policies observe it: the attention of the window's queries when a sequence evicts,
 * and of every query as it arrives for rules that add up attention. Queries are processed in blocks
 * of whole groups so that a key is read once for all of them; a query's result does not depend on
 * the other queries of its block. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/evict.h"

/* A stream with its classes, and the query heads that read it. A query's vector over the stream
 * begins with the members, usually none; the entries follow. */
struct view {
    const struct cpu_cache *cache;
    struct cpu_stream stream;
    struct cpu_classes classes;
    int32_t members;
    int group, dim;
    int sliding_window; /* entries that far behind a query are masked; 0: none */
    float cap;          /* kern_attend_options */
    const float *sinks; /* [group] or NULL */
};

static struct view view_of(const struct cpu_cache *cache, struct cpu_stream stream,
                           struct cpu_stream members, bool positions, struct cpu_work *work) {
    return (struct view){.cache = cache,
                         .stream = stream,
                         .classes = cpu_classes_open(cache, stream, members, positions, work),
                         .members = members.length,
                         .group = stream.layer->group,
                         .dim = stream.layer->head_dim};
}

/* Computes the products of `lanes` queries with all members and the first `count` entries. */
static void products(const struct view *view, const float *q, int lanes, int32_t count,
                     struct cpu_work *work) {
    const struct cpu_cache *cache = view->cache;
    const struct cpu_layer *layer = view->stream.layer;
    int32_t slots = layer->page_slots;
    for (int32_t i = 0; i < count; i += slots)
        cache->math->dots(work->logits + view->members + i, work->stride, q, lanes,
                          cpu_cache_rows(cache, layer, view->stream.pages[i / slots], false, 0),
                          count - i < slots ? count - i : slots);
    if (view->members > 0) cpu_classes_logits(cache, &view->classes, q, lanes, work);
    for (int l = 0; l < lanes && view->cap > 0; l++)
        cache->math->soft_cap(work->logits + (size_t)l * work->stride, view->members + count,
                              view->cap);
}

/* ---- One query ---- */

static void observe_fold(enum kern_group group, float *to, const float *x, int32_t count) {
    switch (group) {
    case KERN_GROUP_MAX:
    case KERN_GROUP_MAX_LOGIT:
        for (int32_t i = 0; i < count; i++) to[i] = x[i] > to[i] ? x[i] : to[i];
        break;
    case KERN_GROUP_SQUARES:
        for (int32_t i = 0; i < count; i++) to[i] += x[i] * x[i];
        break;
    default:
        for (int32_t i = 0; i < count; i++) to[i] += x[i];
    }
}

/* One query: its position, and the number of entries it sees. */
struct query {
    int32_t pos, sees;
};

/* Masks the logits of entries that the query does not see. */
static void mask(const struct view *view, struct query query, float *z) {
    cpu_classes_mask(view->cache, &view->classes, query.pos, view->sliding_window, query.sees, z);
    if (view->sliding_window == 0) return;
    int32_t masked =
        cpu_cache_entries_up_to(view->cache, &view->stream, query.pos - view->sliding_window);
    for (int32_t i = 0; i < masked && i < query.sees; i++) z[view->members + i] = -INFINITY;
}

/* Returns whether the query's sliding window leaves any logits. The newest ones are last. */
static bool sees_any(const float *z, int32_t count) {
    for (int32_t i = count - 1; i >= 0; i--)
        if (z[i] > -INFINITY) return true;
    return false;
}

/* Turns masked logits into attention, summed per class where there are classes; all zeros where a
 * query sees none of the requested entries. */
static void attention(const struct view *view, struct query query, float *z, float sink) {
    int32_t count = view->members + query.sees;
    if (view->sliding_window == 0 || sees_any(z, count))
        view->cache->math->softmax(z, count, sink);
    else
        memset(z, 0, (size_t)count * sizeof *z);
    cpu_classes_fold(&view->classes, z);
}

/* Joins the vectors of a query's `lanes` heads, rows of `stride`, into the first row. */
static void join_heads(enum kern_group group, float *p, size_t stride, int lanes, int32_t count) {
    if (group == KERN_GROUP_SQUARES)
        for (int32_t i = 0; i < count; i++) p[i] *= p[i];
    for (int l = 1; l < lanes; l++) observe_fold(group, p, p + (size_t)l * stride, count);
    if (group == KERN_GROUP_MEAN && lanes > 1)
        for (int32_t i = 0; i < count; i++) p[i] /= (float)lanes;
}

/* Returns the sink of head `head` of the group. */
static float sink_of(const struct view *view, int head) {
    return view->sinks ? view->sinks[head] : -INFINITY;
}

/* Returns the sink of `lanes` heads whose logits are joined. */
static float join_sinks(const struct view *view, enum kern_group group, int head, int lanes) {
    float sink = sink_of(view, head);
    for (int l = 1; l < lanes; l++) {
        const float other = sink_of(view, head + l);
        sink = group == KERN_GROUP_MAX_LOGIT ? fmaxf(sink, other) : sink + other;
    }
    return sink;
}

/* Joins the logits of a query's heads [head, head + lanes), rows of `stride`, into one vector over
 * the entries it sees; returns it, in the first row. */
static float *combine(const struct view *view, enum kern_group group, float *z, size_t stride,
                      int head, int lanes, struct query query) {
    bool of_logits = group == KERN_GROUP_MAX_LOGIT || group == KERN_GROUP_SUM_LOGIT;
    float *p = z + view->members;
    for (int l = 0; l < lanes; l++) {
        mask(view, query, z + (size_t)l * stride);
        if (!of_logits) attention(view, query, z + (size_t)l * stride, sink_of(view, head + l));
    }
    if (!of_logits) {
        join_heads(group, p, stride, lanes, query.sees);
        return p;
    }
    join_heads(group, z, stride, lanes, view->members + query.sees);
    attention(view, query, z, join_sinks(view, group, head, lanes));
    return p;
}

/* ---- Smoothing ---- */

void evict_smooth(const struct kern_observe *observe, const float *x, int32_t count, float *out) {
    int32_t side = observe->smooth_width / 2;
    for (int32_t i = 0; i < count; i++) {
        int32_t from = i < side ? 0 : i - side, to = count - i <= side ? count : i + side + 1;
        float most = x[from], sum = 0;
        for (int32_t j = from; j < to; j++) {
            sum += x[j];
            most = x[j] > most ? x[j] : most;
        }
        out[i] = observe->smooth == KERN_SMOOTH_MAX ? most : sum / (float)observe->smooth_width;
    }
}

/* ---- A window of queries ---- */

struct window {
    struct view view;
    const struct kern_observe *observe;
    enum kern_support support;
    enum kern_group group;
    enum kern_reduce reduce;
    bool smooth;                           /* smooth each query's vector */
    const float *queries[KERN_WINDOW_MAX]; /* the KV head's first query head, oldest query first */
    struct query seen[KERN_WINDOW_MAX];    /* entries over which the query's softmax runs */
    int count;
    int32_t candidates;
    struct cpu_work *work;
    float *sum; /* [candidates]: sum, maximum or running mean over the queries */
    int added;  /* vectors added so far */
};

/* The ring does not hold queries of dropped tokens or tokens that the sequence never computed. */
static void find_queries(struct window *w, const struct evict_job *job, int stream) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_layer *l = w->view.stream.layer;
    int slot = job->due->slot, layer = cache->layer_of[stream], head = stream - l->first;
    int32_t window = cache->slots[slot].window;
    const int32_t *pos = cache->ring_pos + (size_t)slot * KERN_WINDOW_MAX;
    bool all = w->support == KERN_SUPPORT_ALL;
    for (int32_t p = job->due->tokens - window; p < job->due->tokens; p++) {
        if (p < 0 || pos[p % window] != p) continue;
        const float *row = cpu_cache_query(cache, slot, layer, p % window);
        int32_t sees = cpu_cache_entries_up_to(w->view.cache, &w->view.stream, p);
        w->queries[w->count] = row + (size_t)(head * l->group) * (size_t)l->head_dim;
        w->seen[w->count++] = (struct query){p, all || sees < w->candidates ? sees : w->candidates};
    }
}

/* Welford's running mean and sum of squared deviations. */
static void add_moments(struct window *w, const float *p) {
    float *mean = w->sum, *squares = w->work->squares, n = (float)w->added;
    for (int32_t i = 0; i < w->candidates; i++) {
        float delta = p[i] - mean[i];
        mean[i] += delta / n;
        squares[i] += delta * (p[i] - mean[i]);
    }
}

/* Adds a query's vector over the candidates. */
static void add_query(struct window *w, const float *p) {
    w->added++;
    if (w->reduce == KERN_REDUCE_MAX)
        for (int32_t i = 0; i < w->candidates; i++) w->sum[i] = p[i] > w->sum[i] ? p[i] : w->sum[i];
    else if (w->reduce == KERN_REDUCE_MEAN_VAR || w->reduce == KERN_REDUCE_MEAN_STD)
        add_moments(w, p);
    else
        for (int32_t i = 0; i < w->candidates; i++) w->sum[i] += p[i];
}

/* Adds queries [first, first + count), heads [head, head + lanes) of the group. Returns the last
 * query's vector over the candidates. */
static const float *observe_add_block(struct window *w, int first, int count, int head, int lanes) {
    int dim = w->view.dim;
    size_t row = (size_t)lanes * (size_t)dim;
    for (int t = 0; t < count; t++)
        memcpy(w->work->rows + (size_t)t * row, w->queries[first + t] + (size_t)head * (size_t)dim,
               row * sizeof(float));
    products(&w->view, w->work->rows, count * lanes, w->seen[first + count - 1].sees, w->work);
    float *p = NULL;
    for (int t = 0; t < count; t++) {
        float *z = w->work->logits + (size_t)(t * lanes) * w->work->stride;
        p = combine(&w->view, w->group, z, w->work->stride, head, lanes, w->seen[first + t]);
        for (int32_t i = w->seen[first + t].sees; i < w->candidates; i++) p[i] = 0;
        if (w->smooth) {
            evict_smooth(w->observe, p, w->candidates, w->work->smooth);
            p = w->work->smooth;
        }
        add_query(w, p);
    }
    return p;
}

/* Adds the variance's part of the score, 0 for less than two queries. */
static void add_spread(const struct window *w) {
    float n = (float)(w->added - 1);
    if (w->added < 2) return;
    for (int32_t i = 0; i < w->candidates; i++) {
        float variance = w->work->squares[i] / n;
        w->sum[i] +=
            w->observe->gamma * (w->reduce == KERN_REDUCE_MEAN_VAR ? variance : sqrtf(variance));
    }
}

/* Reduces the queries of `lanes` heads to one vector, in `sum`. */
static void reduce_heads(struct window *w, int head, int lanes) {
    int block = cpu_cache_lanes(w->view.group) / lanes;
    memset(w->sum, 0, (size_t)w->candidates * sizeof *w->sum);
    memset(w->work->squares, 0, (size_t)w->candidates * sizeof *w->work->squares);
    w->added = 0;
    for (int t = 0; t < w->count; t += block)
        observe_add_block(w, t, w->count - t < block ? w->count - t : block, head, lanes);
    if (w->reduce == KERN_REDUCE_MEAN && w->count > 0)
        for (int32_t i = 0; i < w->candidates; i++) w->sum[i] /= (float)w->count;
    if (w->reduce == KERN_REDUCE_MEAN_VAR || w->reduce == KERN_REDUCE_MEAN_STD) add_spread(w);
}

static struct window open_window(const struct evict_job *job, int stream, int32_t candidates,
                                 enum kern_support support, struct cpu_work *work) {
    const struct cpu_cache *cache = job->cache;
    struct cpu_stream members = cpu_cache_members(cache, job->due->slot, stream);
    struct window w = {.view = view_of(cache, evict_stream(job, stream), members,
                                       job->due->rule->classes.positions, work),
                       .observe = &job->due->rule->observe,
                       .support = support,
                       .candidates = candidates,
                       .work = work,
                       .sum = work->sum};
    const int layer = cache->layer_of[stream];
    w.view.sliding_window = cache->attended[layer].sliding_window;
    w.view.cap = cache->attended[layer].cap;
    w.view.sinks =
        cpu_cache_sinks(cache, &cache->attended[layer], layer, stream - cache->layers[layer].first);
    w.group = w.observe->group;
    w.reduce = w.observe->reduce;
    w.smooth = w.observe->smooth_first && w.observe->smooth != KERN_SMOOTH_NONE;
    find_queries(&w, job, stream);
    return w;
}

void evict_observe(const struct evict_job *job, int stream, int32_t candidates,
                   struct cpu_work *work, float *out) {
    enum kern_support support = job->due->rule->observe.support;
    struct window w = open_window(job, stream, candidates, support, work);
    int group = w.view.group;
    if (w.group != KERN_GROUP_EACH) {
        reduce_heads(&w, 0, group);
        memcpy(out, w.sum, (size_t)candidates * sizeof *out);
        return;
    }
    memset(out, 0, (size_t)candidates * sizeof *out);
    for (int head = 0; head < group; head++) {
        reduce_heads(&w, head, 1);
        for (int32_t i = 0; i < candidates; i++) out[i] += w.sum[i] / (float)group;
    }
}

/* ---- Queries to come ---- */

/* Rotates a query of `age` tokens ago to the mean of the next `expect` positions: the sum of
 * exp(i w f) over f = 0 .. n - 1 is exp(i w (n - 1) / 2) sin(n w / 2) / sin(w / 2). */
static void turn_ahead(const struct cpu_cache *cache, const float *inv_freq, int32_t age,
                       int32_t expect, float *query, int dim, int still) {
    int half = (dim - still) / 2;
    double n = expect;
    float *x = query + still;
    cpu_cache_rotate(cache, query, dim);
    for (int j = 0; j < half && inv_freq; j++) {
        double w = (double)inv_freq[j];
        if (w == 0) continue;
        double size = sin(n * w / 2) / (n * sin(w / 2)), angle = w * (age + (n - 1) / 2);
        float cosine = (float)(size * cos(angle)), sine = (float)(size * sin(angle));
        float a = x[j], b = x[half + j];
        x[j] = a * cosine - b * sine;
        x[half + j] = b * cosine + a * sine;
    }
    cpu_cache_rotate(cache, query, dim);
}

/* Writes mean and squared deviations of the logits of one head's queries to `sum` and `squares`. */
static void expect_head(struct window *w, const float *inv_freq, int32_t tokens, int head) {
    int block = cpu_cache_lanes(w->view.group), dim = w->view.dim;
    memset(w->sum, 0, (size_t)w->candidates * sizeof *w->sum);
    memset(w->work->squares, 0, (size_t)w->candidates * sizeof *w->work->squares);
    w->added = 0;
    for (int first = 0; first < w->count; first += block) {
        int lanes = w->count - first < block ? w->count - first : block;
        for (int l = 0; l < lanes; l++) {
            float *row = w->work->rows + (size_t)l * (size_t)dim;
            memcpy(row, w->queries[first + l] + (size_t)head * (size_t)dim,
                   (size_t)dim * sizeof *row);
            turn_ahead(w->view.cache, inv_freq, tokens - w->seen[first + l].pos, w->observe->expect,
                       row, dim, w->view.stream.layer->latent);
        }
        products(&w->view, w->work->rows, lanes, w->candidates, w->work);
        for (int l = 0; l < lanes; l++) add_query(w, w->work->logits + (size_t)l * w->work->stride);
    }
}

/* Returns log(e^a + e^b). */
static float observe_log_sum(float a, float b) {
    float most = a > b ? a : b;
    return most + log1pf(expf(-fabsf(a - b)));
}

/* Adds the head's share, a softmax of mean + variance / 2, to the logarithms in out. */
static void add_expected(const struct window *w, int32_t sinks, bool first, float *out) {
    float *z = w->sum, most = -INFINITY;
    double sum = 0;
    for (int32_t i = sinks; i < w->candidates; i++) {
        if (w->added > 0) z[i] += w->work->squares[i] / (2 * (float)w->added);
        most = z[i] > most ? z[i] : most;
    }
    for (int32_t i = sinks; i < w->candidates; i++) sum += exp((double)z[i] - (double)most);
    float whole = most + (float)log(sum);
    for (int32_t i = sinks; i < w->candidates; i++)
        out[i] = first ? z[i] - whole : observe_log_sum(out[i], z[i] - whole);
}

static float value_length(const struct window *w, int32_t index) {
    const struct cpu_layer *layer = w->view.stream.layer;
    int32_t slots = layer->page_slots;
    float *row = w->work->rows;
    double squares = 0;
    cpu_cache_wide_row(w->view.cache, layer, w->view.stream.pages[index / slots], true,
                       index % slots, row);
    for (int d = 0; d < cpu_value_dim(layer); d++) squares += (double)row[d] * (double)row[d];
    return (float)sqrt(squares);
}

void evict_expect(const struct evict_job *job, int stream, int32_t sinks, int32_t candidates,
                  struct cpu_work *work, float *out) {
    const struct kern_cache_options *o = &job->cache->options;
    const float *inv_freq = o->rotations ? o->rotations[job->cache->layer_of[stream]] : NULL;
    struct window w = open_window(job, stream, candidates, KERN_SUPPORT_ALL, work);
    w.reduce = KERN_REDUCE_MEAN_VAR;
    w.view.cap = 0;
    for (int32_t i = 0; i < sinks; i++) out[i] = 0; /* protected */
    for (int head = 0; head < w.view.group; head++) {
        expect_head(&w, inv_freq, job->due->tokens, head);
        add_expected(&w, sinks, head == 0, out);
    }
    for (int32_t i = sinks; i < candidates; i++) out[i] += logf(value_length(&w, i));
}

/* ---- Preference of layers ---- */

/* Returns -sum A log(A + 1e-10) over the candidates, for one query of one head. */
static double entropy(const float *p, int32_t count) {
    double sum = 0;
    for (int32_t i = 0; i < count; i++) sum -= (double)p[i] * log((double)p[i] + 1e-10);
    return sum;
}

struct evict_preference evict_preference(const struct evict_job *job, int stream,
                                         int32_t candidates, struct cpu_work *work) {
    struct evict_preference out = {0};
    struct window w = open_window(job, stream, candidates, KERN_SUPPORT_ALL, work);
    w.group = KERN_GROUP_EACH;
    w.reduce = KERN_REDUCE_MEAN_VAR;
    w.smooth = false;
    for (int head = 0; head < w.view.group; head++) {
        w.added = 0;
        memset(w.sum, 0, (size_t)candidates * sizeof *w.sum);
        memset(work->squares, 0, (size_t)candidates * sizeof *work->squares);
        for (int t = 0; t < w.count; t++) {
            const float *p = observe_add_block(&w, t, 1, head, 1);
            out.entropy += entropy(p, candidates);
        }
        for (int32_t i = 0; i < candidates && w.count > 1; i++)
            out.variance += (double)work->squares[i] / (w.count - 1);
    }
    return out;
}

/* ---- Every query as it comes ---- */

static void observe_add_mass(const struct view *view, const float *p, int32_t count) {
    int32_t slots = view->stream.layer->page_slots;
    for (int32_t i = 0; i < count; i += slots) {
        float *score = cpu_cache_score(view->cache, view->stream.pages[i / slots]);
        int32_t n = count - i < slots ? count - i : slots;
        for (int32_t j = 0; j < n; j++) score[j] += p[i + j];
    }
}

/* Multiplies the attention of `lanes` heads, rows of `stride`, to entries [from, to) with their
 * values. */
static void observe_weigh(const struct view *view, float *out, const float *p, size_t stride,
                          int lanes, int32_t from, int32_t to) {
    const struct cpu_cache *cache = view->cache;
    const struct cpu_layer *layer = view->stream.layer;
    int32_t slots = layer->page_slots;
    for (int32_t i = from, n; i < to; i += n) {
        n = slots - i % slots < to - i ? slots - i % slots : to - i;
        cache->math->weigh(
            out, (size_t)view->dim, p + i, stride, lanes,
            cpu_cache_rows(cache, layer, view->stream.pages[i / slots], true, i % slots), n);
    }
}

static struct query query_at(const struct cpu_mass *mass, int t) {
    const int32_t later = mass->count - 1 - t - (mass->rows ? mass->rows[t].ahead : 0);
    return (struct query){mass->pos + t, mass->stream.length - later};
}

/* Computes the output of attention for `count` tokens of the span. Their weights are in rows of
 * work->logits from row `row` on. Each value is read once for all of them: none of them sees fewer
 * entries than the first one. */
static void answer(const struct view *view, const struct cpu_mass *mass, int first, int count,
                   int row, const struct cpu_work *work) {
    size_t size = (size_t)mass->out_count * (size_t)view->dim;
    const float *p = work->logits + (size_t)row * work->stride + view->members;
    const int32_t sees = query_at(mass, first).sees;
    memset(work->turned, 0, (size_t)count * size * sizeof(float));
    observe_weigh(view, work->turned, p, work->stride, count * mass->out_count, 0, sees);
    for (int t = 0; t < count; t++) {
        float *sum = work->turned + (size_t)t * size;
        observe_weigh(view, sum, p + (size_t)(t * mass->out_count) * work->stride, work->stride,
                      mass->out_count, sees, query_at(mass, first + t).sees);
        for (int l = 0; l < mass->out_count; l++)
            cpu_cache_rotate(view->cache, sum + (size_t)(l * view->dim), view->dim);
        memcpy(mass->out + (size_t)(first + t) * mass->out_stride, sum, size * sizeof *sum);
    }
}

/* Computes all wanted heads of a block's tokens at once if they are consecutive. */
static void answer_block(const struct view *view, const struct cpu_mass *mass, int first, int count,
                         const struct cpu_work *work) {
    int each = mass->out_count == view->group ? count : 1;
    for (int t = 0; t < count; t += each)
        answer(view, mass, first + t, each, t * view->group + mass->out_first, work);
}

/* Processes `count` queries of the span from `first` on, whose heads' logits are in
 * work->logits. */
static void observe_meet(const struct view *view, const struct cpu_mass *mass, int first, int count,
                         const struct cpu_work *work) {
    int group = view->group;
    for (int l = 0; l < count * group; l++) {
        float *head = work->logits + (size_t)l * work->stride;
        mask(view, query_at(mass, first + l / group), head);
        attention(view, query_at(mass, first + l / group), head, sink_of(view, l % group));
    }
    if (mass->out) answer_block(view, mass, first, count, work);
    for (int t = 0; t < count; t++) {
        float *p = work->logits + (size_t)(t * group) * work->stride + view->members;
        int32_t sees = query_at(mass, first + t).sees;
        join_heads(mass->group, p, work->stride, group, sees);
        observe_add_mass(view, p, sees);
    }
}

void cpu_observe_mass(const struct cpu_cache *cache, const struct cpu_mass *mass, int worker) {
    struct cpu_work work = cpu_cache_work(cache, worker);
    struct view view = view_of(cache, mass->stream, mass->members, mass->positions, &work);
    view.sliding_window = mass->sliding_window;
    view.cap = mass->cap;
    view.sinks = mass->sinks;
    int group = view.group, block = cpu_cache_lanes(group) / group;
    size_t row = (size_t)group * (size_t)view.dim;
    for (int first = 0; first < mass->count; first += block) {
        int count = mass->count - first < block ? mass->count - first : block;
        for (int t = 0; t < count; t++)
            for (size_t d = 0; d < row; d++)
                work.rows[(size_t)t * row + d] =
                    mass->q[(size_t)(first + t) * mass->q_stride + d] * mass->scale;
        for (int l = 0; l < count * group; l++)
            cpu_cache_rotate(cache, work.rows + (size_t)(l * view.dim), view.dim);
        products(&view, work.rows, count * group, query_at(mass, first + count - 1).sees, &work);
        observe_meet(&view, mass, first, count, &work);
    }
}
