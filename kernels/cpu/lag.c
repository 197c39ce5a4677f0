/* LagKV (arXiv 2504.04704), kern_rule.h, KERN_MEASURE_LAG: an entry counts as much as its key and
 * its value differ from what the entries after it would lead one to expect. All arithmetic is in
 * double, because entries are ranked within their part. */
#include <math.h>

#include "kernels/cpu/evict.h"
#include "kernels/cpu/internal.h"

struct part {
    const struct cpu_cache *cache;
    const struct cpu_stream *stream;
    int32_t first, count; /* entries; the next part has as many */
    int dim;
    float *row, *low, *high; /* [dim] */
};

static const float *lag_wide(const struct part *p, bool values, int32_t index) {
    const struct cpu_layer *layer = p->stream->layer;
    const int32_t slots = layer->page_slots;
    cpu_cache_wide_row(p->cache, layer, p->stream->pages[index / slots], values, index % slots,
                       p->row);
    cpu_cache_rotate(p->cache, p->row, p->dim); /* dimensions are compared one by one */
    return p->row;
}

/* The least and the largest number of each dimension in the next part. */
static void find_bounds(const struct part *p, bool values, int dim) {
    for (int32_t i = p->first + p->count; i < p->first + 2 * p->count; i++) {
        const float *row = lag_wide(p, values, i);
        bool is_first = i == p->first + p->count;
        for (int d = 0; d < dim; d++) {
            if (is_first || row[d] < p->low[d]) p->low[d] = row[d];
            if (is_first || row[d] > p->high[d]) p->high[d] = row[d];
        }
    }
}

/* The unbiased standard deviation, over the dimensions, of the row within the bounds. */
static double deviation(const struct part *p, const float *row, int dim) {
    double sum = 0, squares = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int d = 0; d < dim; d++) {
            double range = (double)p->high[d] - (double)p->low[d];
            double x = range > 0 ? ((double)row[d] - (double)p->low[d]) / range : 0;
            if (pass == 0)
                sum += x / dim;
            else
                squares += (x - sum) * (x - sum);
        }
    return dim > 1 ? sqrt(squares / (dim - 1)) : 0;
}

/* Adds the part's scores of keys or values: a softmax of the deviations. */
static void add_scores(const struct part *p, bool values, double *deviations, double *scores) {
    const int dim = values ? cpu_value_dim(p->stream->layer) : p->dim;
    double most = -INFINITY, sum = 0;
    find_bounds(p, values, dim);
    for (int32_t i = 0; i < p->count; i++) {
        deviations[i] = deviation(p, lag_wide(p, values, p->first + i), dim);
        most = fmax(most, deviations[i]);
    }
    for (int32_t i = 0; i < p->count; i++) sum += exp(deviations[i] - most);
    for (int32_t i = 0; i < p->count; i++) scores[i] += exp(deviations[i] - most) / sum;
}

static void rank_part(const struct part *p, float *out) {
    double deviations[KERN_LAG_MAX], scores[KERN_LAG_MAX] = {0};
    add_scores(p, false, deviations, scores);
    add_scores(p, true, deviations, scores);
    for (int32_t i = 0; i < p->count; i++) {
        int32_t below = 0;
        for (int32_t j = 0; j < p->count; j++)
            below += scores[j] < scores[i] || (scores[j] == scores[i] && j < i);
        out[p->first + i] = -(float)below / (float)p->count;
    }
}

void evict_lag(const struct cpu_cache *cache, int32_t lag, const struct cpu_stream *stream,
               int32_t sinks, int32_t candidates, struct cpu_work *work, float *out) {
    int dim = stream->layer->head_dim;
    struct part part = {.cache = cache,
                        .stream = stream,
                        .first = sinks,
                        .count = lag,
                        .dim = dim,
                        .row = work->rows,
                        .low = work->rows + dim,
                        .high = work->rows + 2 * (size_t)dim};
    for (int32_t i = 0; i < candidates; i++) out[i] = -1;
    for (; part.first + 2 * lag <= candidates; part.first += lag) rank_part(&part, out);
}
