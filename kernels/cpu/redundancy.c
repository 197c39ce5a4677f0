/* Key redundancy, R-KV (arXiv 2505.24133) and G-KV (arXiv 2512.00504).
 *
 *   rho[j] = (sum_i C[i,j] - sum_{i: l(i) = j} C[i,j]) / n
 *
 * The first sum needs no pairs: it is khat_j . (sum_i khat_i) - khat_j . khat_j. Pairs are compared
 * only to find l(i), newest first, sixteen i at a time, until all of them have found theirs; keys
 * that have a recent look-alike, which is most, cost a page or two. The published code compares all
 * pairs. */
#include <math.h>

#include "kernels/cpu/evict.h"
#include "kernels/cpu/internal.h"

struct rows {
    const struct cpu_cache *cache;
    const struct kern_redundancy *rule;
    const struct cpu_stream *stream;
    int32_t count;
    int dim;
    struct cpu_work *work;
    float *norm; /* [count] 1 / (|k| + eps) */
    float *rho;  /* [count] */
};

static void wide_key(const struct rows *rows, int32_t index, float *to) {
    cpu_cache_wide_row(
        rows->cache, cpu_cache_k(rows->cache, rows->stream->pages[index / rows->cache->page_slots]),
        index % rows->cache->page_slots, to);
}

/* khat_i of `count` rows from `first` -> work->rows, one after the other. */
static void wide_block(const struct rows *rows, int32_t first, int count) {
    for (int i = 0; i < count; i++) {
        float *to = rows->work->rows + (size_t)i * (size_t)rows->dim;
        wide_key(rows, first + i, to);
        for (int d = 0; d < rows->dim; d++) to[d] *= rows->norm[first + i];
    }
}

/* norm, and in rho minus what an entry has with itself. */
static void measure(const struct rows *rows) {
    float *key = rows->work->rows;
    for (int32_t i = 0; i < rows->count; i++) {
        double squares = 0;
        wide_key(rows, i, key);
        for (int d = 0; d < rows->dim; d++) squares += (double)key[d] * (double)key[d];
        double norm = 1 / (sqrt(squares) + (double)rows->rule->eps);
        rows->norm[i] = squares > 0 ? (float)norm : 0;
        rows->rho[i] = squares > 0 ? (float)(-squares * norm * norm) : 0;
    }
}

/* Adds khat_j . sum_i khat_i. */
static void add_sums(const struct rows *rows) {
    float *total = rows->work->rows + (size_t)CPU_ROWS_BLOCK * (size_t)rows->dim;
    float *key = rows->work->rows, *dot = rows->work->logits;
    int32_t slots = rows->cache->page_slots;
    memset(total, 0, (size_t)rows->dim * sizeof *total);
    for (int32_t i = 0; i < rows->count; i++) {
        wide_key(rows, i, key);
        for (int d = 0; d < rows->dim; d++) total[d] += key[d] * rows->norm[i];
    }
    for (int32_t i = 0; i < rows->count; i += slots) {
        int32_t n = rows->count - i < slots ? rows->count - i : slots;
        rows->cache->math->dots(dot, rows->work->stride, total, 1,
                                cpu_cache_k(rows->cache, rows->stream->pages[i / slots]), n,
                                rows->dim, rows->cache->options.dtype);
        for (int32_t j = 0; j < n; j++) rows->rho[i + j] += dot[j] * rows->norm[i + j];
    }
}

/* Of `lanes` rows from `first`, those that have not found their look-alike look for it in one page,
 * entries [at, at + count). Returns how many are still looking. */
static int forgive_page(const struct rows *rows, int32_t first, int lanes, int32_t at,
                        int32_t count, bool *found) {
    int32_t slots = rows->cache->page_slots;
    int looking = 0;
    rows->cache->math->dots(rows->work->logits, (size_t)slots, rows->work->rows, lanes,
                            cpu_cache_k(rows->cache, rows->stream->pages[at / slots]), count,
                            rows->dim, rows->cache->options.dtype);
    for (int l = 0; l < lanes; l++) {
        const float *dot = rows->work->logits + (size_t)l * (size_t)slots;
        for (int32_t j = count - 1; j >= 0 && !found[l]; j--) {
            float alike = dot[j] * rows->norm[at + j];
            if (alike <= rows->rule->threshold || at + j == first + l || isnan(alike)) continue;
            rows->rho[at + j] -= alike;
            found[l] = true;
        }
        if (at == 0 && !found[l] && rows->rule->index_zero && first + l > 0)
            rows->rho[0] -= dot[0] * rows->norm[0];
        looking += !found[l];
    }
    return looking;
}

static void forgive(const struct rows *rows) {
    int32_t slots = rows->cache->page_slots;
    for (int32_t first = 0; first < rows->count; first += CPU_ROWS_BLOCK) {
        bool found[CPU_ROWS_BLOCK] = {false};
        int lanes = rows->count - first < CPU_ROWS_BLOCK ? rows->count - first : CPU_ROWS_BLOCK;
        wide_block(rows, first, lanes);
        int32_t at = (rows->count - 1) / slots * slots;
        while (at >= 0) {
            int32_t count = rows->count - at < slots ? rows->count - at : slots;
            if (forgive_page(rows, first, lanes, at, count, found) == 0) break;
            at -= slots;
        }
    }
}

void evict_redundancy(const struct cpu_cache *cache, const struct kern_redundancy *rule,
                      const struct cpu_stream *stream, int32_t candidates, struct cpu_work *work,
                      float *out) {
    struct rows rows = {.cache = cache,
                        .rule = rule,
                        .stream = stream,
                        .count = rule->candidates_only ? candidates : stream->length,
                        .dim = cache->options.head_dim,
                        .work = work,
                        .norm = work->norm,
                        .rho = work->redundant};
    measure(&rows);
    add_sums(&rows);
    forgive(&rows);
    float most = -INFINITY;
    double sum = 0;
    for (int32_t i = 0; i < rows.count; i++) rows.rho[i] /= (float)rows.count;
    int32_t among = rule->normalise ? candidates : rows.count;
    for (int32_t i = 0; i < among; i++) most = rows.rho[i] > most ? rows.rho[i] : most;
    for (int32_t i = 0; i < rows.count; i++) sum += exp((double)rows.rho[i] - (double)most);
    for (int32_t i = 0; i < candidates; i++)
        out[i] = (float)(exp((double)rows.rho[i] - (double)most) / (rule->normalise ? 1 : sum));
}
