/* Key redundancy, R-KV (arXiv 2505.24133) and G-KV (arXiv 2512.00504).
 *
 * rho[j] = (sum_i C[i,j] - sum_{i: l(i) = j} C[i,j]) / n
 *
 * The first sum needs no pairs: it is khat_j . (sum_i khat_i) - khat_j . khat_j. Pairs are compared
 * only to find l(i), newest first, sixteen i at a time, until l(i) of every i is known. Most
 * keys have a recent similar key, so the search reads one or two pages. The published code compares
 * all pairs. */
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
    const struct cpu_layer *layer = rows->stream->layer;
    const int32_t slots = layer->page_slots;
    cpu_cache_wide_row(rows->cache, layer, rows->stream->pages[index / slots], false, index % slots,
                       to);
}

/* Writes khat_i of `count` rows from `first` on to work->rows, without gaps. */
static void wide_block(const struct rows *rows, int32_t first, int count) {
    for (int i = 0; i < count; i++) {
        float *to = rows->work->rows + (size_t)i * (size_t)rows->dim;
        wide_key(rows, first + i, to);
        for (int d = 0; d < rows->dim; d++) to[d] *= rows->norm[first + i];
    }
}

/* Writes |k| of each entry to out. */
static void measure_lengths(const struct rows *rows, int32_t candidates, float *out) {
    float *key = rows->work->rows;
    for (int32_t i = 0; i < candidates; i++) {
        double squares = 0;
        wide_key(rows, i, key);
        for (int d = 0; d < rows->dim; d++) squares += (double)key[d] * (double)key[d];
        out[i] = (float)sqrt(squares);
    }
}

/* Computes `norm`, and sets rho of each entry to minus its similarity with itself. */
static void redundancy_measure(const struct rows *rows) {
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
static void redundancy_add_sums(const struct rows *rows) {
    float *total = rows->work->rows + (size_t)CPU_ROWS_BLOCK * (size_t)rows->dim;
    float *key = rows->work->rows, *dot = rows->work->logits;
    const struct cpu_layer *layer = rows->stream->layer;
    const int32_t slots = layer->page_slots;
    memset(total, 0, (size_t)rows->dim * sizeof *total);
    for (int32_t i = 0; i < rows->count; i++) {
        wide_key(rows, i, key);
        for (int d = 0; d < rows->dim; d++) total[d] += key[d] * rows->norm[i];
    }
    for (int32_t i = 0; i < rows->count; i += slots) {
        int32_t n = rows->count - i < slots ? rows->count - i : slots;
        rows->cache->math->dots(
            dot, rows->work->stride, total, 1,
            cpu_cache_rows(rows->cache, layer, rows->stream->pages[i / slots], false, 0), n);
        for (int32_t j = 0; j < n; j++) rows->rho[i + j] += dot[j] * rows->norm[i + j];
    }
}

/* Returns whether row i is similar to one of a page's entries [at, at + count), whose products with
 * it are in `dot`. The similarity with the newest such entry does not count: it is subtracted from
 * rho. */
static bool forgive_row(const struct rows *rows, int32_t i, const float *dot, int32_t at,
                        int32_t count) {
    for (int32_t j = count - 1; j >= 0; j--) {
        float alike = dot[j] * rows->norm[at + j];
        if (alike <= rows->rule->threshold || at + j == i || isnan(alike)) continue;
        rows->rho[rows->rule->own ? i : at + j] -= alike;
        return true;
    }
    if (at == 0 && rows->rule->index_zero && i > 0)
        rows->rho[rows->rule->own ? i : 0] -= dot[0] * rows->norm[0];
    return false;
}

/* Searches a page for entries similar to the rows who[0 .. lanes). Moves the rows that found none
 * to the front of work->rows and `who`, and returns how many they are. */
static int forgive_page(const struct rows *rows, int32_t *who, int lanes, int32_t at,
                        int32_t count) {
    const struct cpu_layer *layer = rows->stream->layer;
    size_t slots = (size_t)layer->page_slots, dim = (size_t)rows->dim;
    int looking = 0;
    rows->cache->math->dots(
        rows->work->logits, slots, rows->work->rows, lanes,
        cpu_cache_rows(rows->cache, layer, rows->stream->pages[at / (int32_t)slots], false, 0),
        count);
    for (int l = 0; l < lanes; l++) {
        const float *dot = rows->work->logits + (size_t)l * slots;
        if (forgive_row(rows, who[l], dot, at, count)) continue;
        if (looking != l)
            memcpy(rows->work->rows + (size_t)looking * dim, rows->work->rows + (size_t)l * dim,
                   dim * sizeof(float));
        who[looking++] = who[l];
    }
    return looking;
}

static void forgive(const struct rows *rows) {
    int32_t slots = rows->stream->layer->page_slots;
    for (int32_t first = 0; first < rows->count; first += CPU_ROWS_BLOCK) {
        int32_t who[CPU_ROWS_BLOCK];
        int lanes = rows->count - first < CPU_ROWS_BLOCK ? rows->count - first : CPU_ROWS_BLOCK;
        for (int l = 0; l < lanes; l++) who[l] = first + l;
        wide_block(rows, first, lanes);
        for (int32_t at = (rows->count - 1) / slots * slots; at >= 0 && lanes > 0; at -= slots) {
            int32_t count = rows->count - at < slots ? rows->count - at : slots;
            lanes = forgive_page(rows, who, lanes, at, count);
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
                        .dim = stream->layer->head_dim,
                        .work = work,
                        .norm = work->norm,
                        .rho = work->rho};
    if (rule->measure == KERN_MEASURE_LENGTH) {
        measure_lengths(&rows, candidates, out);
        return;
    }
    redundancy_measure(&rows);
    redundancy_add_sums(&rows);
    if (rule->threshold < 1) forgive(&rows);
    float most = -INFINITY;
    double sum = 0;
    for (int32_t i = 0; i < rows.count; i++) rows.rho[i] /= (float)rows.count;
    int32_t among = rule->normalise ? candidates : rows.count;
    for (int32_t i = 0; i < among; i++) most = rows.rho[i] > most ? rows.rho[i] : most;
    for (int32_t i = 0; i < rows.count; i++) sum += exp((double)rows.rho[i] - (double)most);
    for (int32_t i = 0; i < candidates; i++)
        out[i] = (float)(exp((double)rows.rho[i] - (double)most) / (rule->normalise ? 1 : sum));
}
