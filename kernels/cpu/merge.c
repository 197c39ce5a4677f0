/* Merges evicted entries into kept ones: D2O (arXiv 2406.13035), see enum kern_merge. */
#include <math.h>

#include "base/check.h"
#include "kernels/cpu/evict.h"

#define NOBODY (-1)

struct merge {
    struct cpu_cache *cache;
    const struct evict_job *job;
    struct cpu_stream view;
    int stream, dim;
    struct cpu_work work;
    float *alike;   /* [length] evicted entries: cosine with their target */
    int32_t *links; /* [length] evicted entries: target, then the next one with the same target;
                       kept entries: the first one they absorb */
};

static bool merge_stays(const struct merge *m, int32_t index) {
    return evict_keeps(m->job, m->stream, index);
}

static uint32_t merge_page_of(const struct merge *m, int32_t index) {
    return m->view.pages[index / m->view.layer->page_slots];
}

static void merge_wide(const struct merge *m, bool values, int32_t index, float *to) {
    const struct cpu_layer *layer = m->view.layer;
    cpu_cache_wide_row(m->cache, layer, merge_page_of(m, index), values, index % layer->page_slots,
                       to);
}

/* Computes 1 / |k| of all entries; 0 for a key of zeros. */
static void merge_measure(const struct merge *m) {
    float *key = m->work.rows;
    for (int32_t i = 0; i < m->view.length; i++) {
        double squares = 0;
        merge_wide(m, false, i, key);
        for (int d = 0; d < m->dim; d++) squares += (double)key[d] * (double)key[d];
        m->work.norm[i] = squares > 0 ? (float)(1 / sqrt(squares)) : 0;
    }
}

/* Finds the most similar kept entry for each of `lanes` evicted ones; ties: the newer one. */
static void merge_find_targets(const struct merge *m, const int32_t *gone, int lanes) {
    int32_t slots = m->view.layer->page_slots, length = m->view.length;
    for (int l = 0; l < lanes; l++) {
        float *key = m->work.rows + (size_t)l * (size_t)m->dim;
        merge_wide(m, false, gone[l], key);
        for (int d = 0; d < m->dim; d++) key[d] *= m->work.norm[gone[l]];
        m->links[gone[l]] = NOBODY;
        m->alike[gone[l]] = -INFINITY;
    }
    for (int32_t at = 0; at < length; at += slots) {
        int32_t count = length - at < slots ? length - at : slots;
        m->cache->math->dots(
            m->work.logits, (size_t)slots, m->work.rows, lanes,
            cpu_cache_rows(m->cache, m->view.layer, merge_page_of(m, at), false, 0), count);
        for (int32_t j = 0; j < count; j++) {
            if (!merge_stays(m, at + j)) continue;
            for (int l = 0; l < lanes; l++) {
                float alike = m->work.logits[(size_t)l * (size_t)slots + (size_t)j];
                alike *= m->work.norm[at + j];
                if (!(alike >= m->alike[gone[l]])) continue;
                m->alike[gone[l]] = alike;
                m->links[gone[l]] = at + j;
            }
        }
    }
}

/* Finds the targets of all evicted entries; returns the mean of their similarities, NAN if there
 * are none. */
static double merge_find_all(const struct merge *m) {
    int32_t gone[CPU_ROWS_BLOCK], found = 0;
    int lanes = 0;
    double sum = 0;
    for (int32_t i = 0; i <= m->view.length; i++) {
        bool end = i == m->view.length;
        if (!end && merge_stays(m, i)) continue;
        if (!end) gone[lanes++] = i;
        if (lanes < CPU_ROWS_BLOCK && !(end && lanes > 0)) continue;
        merge_find_targets(m, gone, lanes);
        for (int l = 0; l < lanes; l++) {
            if (m->links[gone[l]] == NOBODY) continue;
            sum += (double)m->alike[gone[l]];
            found++;
        }
        lanes = 0;
    }
    return found > 0 ? sum / found : NAN;
}

/* Turns targets into lists of the entries that are similar enough, oldest first. */
static void link_members(const struct merge *m, float tau) {
    for (int32_t i = 0; i < m->view.length; i++)
        if (merge_stays(m, i)) m->links[i] = NOBODY;
    for (int32_t i = m->view.length - 1; i >= 0; i--) {
        if (merge_stays(m, i)) continue;
        int32_t target = m->links[i];
        if (target == NOBODY || !(m->alike[i] >= tau)) continue;
        m->links[i] = m->links[target];
        m->links[target] = i;
    }
}

static float merge_weight_of(const struct merge *m, int32_t member) {
    return m->job->due->rule->merge == KERN_MERGE_PAPER ? expf(m->alike[member]) : m->alike[member];
}

/* Computes the merged key or value of a target and its members. */
static void merge_row(const struct merge *m, bool values, int32_t target) {
    bool paper = m->job->due->rule->merge == KERN_MERGE_PAPER;
    float *sum = m->work.rows, *row = sum + m->dim, own = paper ? 2.71828183f : 1, total = own;
    merge_wide(m, values, target, sum);
    for (int d = 0; d < m->dim; d++) sum[d] *= own;
    for (int32_t i = m->links[target]; i != NOBODY; i = m->links[i]) {
        float weight = merge_weight_of(m, i);
        merge_wide(m, values, i, row);
        for (int d = 0; d < m->dim; d++) sum[d] += weight * row[d];
        total += paper ? weight : 1;
    }
    CHECK(total > 0);
    for (int d = 0; d < m->dim; d++) sum[d] /= total;
    cpu_cache_store_row(m->cache, m->view.layer, merge_page_of(m, target), values,
                        target % m->view.layer->page_slots, sum);
}

void evict_merge_stream(void *arg, int stream, int worker) {
    const struct evict_job *job = arg;
    struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    struct merge m = {.cache = cache,
                      .job = job,
                      .view = evict_stream(job, stream),
                      .stream = stream,
                      .dim = cpu_cache_layer(cache, stream)->head_dim,
                      .work = cpu_cache_work(cache, worker),
                      .alike = cache->alike + plan->first,
                      .links = cache->links + plan->first};
    if (plan->kept == 0 || plan->kept == m.view.length) return;
    float beta = job->due->rule->merge_beta;
    float *tau = &cpu_cache_tau(cache, job->due->slot)[stream];
    merge_measure(&m);
    double mean = merge_find_all(&m);
    if (isnan(mean)) return;
    *tau = isnan(*tau) ? (float)mean : beta * (float)mean + (1 - beta) * *tau;
    link_members(&m, *tau);
    for (int32_t i = 0; i < m.view.length; i++) {
        if (!merge_stays(&m, i) || m.links[i] == NOBODY) continue;
        merge_row(&m, false, i);
        merge_row(&m, true, i);
    }
}
