/* Products over simd.h: a block of rows times a few panels of 16 outputs, sums in registers, over
 * all inputs of a leaf in ascending order. The order of additions into one output is the same in
 * every block shape, so a row's result does not depend on the rows beside it. */
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

#if defined(__AVX512F__)
#define ROWS           8 /* x 2 panels: 16 of 32 registers hold sums */
#define PANELS         2
#define PANELS_ONE_ROW 4
#elif defined(__AVX2__)
#define ROWS           4 /* x 1 panel of two registers: 8 of 16 */
#define PANELS         1
#define PANELS_ONE_ROW 2
#else
#define ROWS           2
#define PANELS         1
#define PANELS_ONE_ROW 2
#endif

#define AHEAD 2048 /* bytes: covers the latency of memory at one core's share of its bandwidth */

/* One k-step of every row and panel of the block. */
#define STEP(sum, rows, panels, x, stride, w)                                                      \
    _Pragma("GCC unroll 8") for (int r_ = 0; r_ < (rows); r_++) {                                  \
        v16 x_ = v16_set((x)[(r_) * (stride)]);                                                    \
        _Pragma("GCC unroll 8") for (int p_ = 0; p_ < (panels); p_++) sum[r_][p_] =                \
            v16_fma(x_, w[p_], sum[r_][p_]);                                                       \
    }

/* Numbers of `size` bytes: bf16, or E4M3. */
SIMD void sum_pairs(v16 (*sum)[4], const float *x, int64_t stride, int64_t count, const char *panel,
                    size_t next, const int size, const int rows, const int panels) {
    for (int64_t k = 0; k < count; k += 2) {
        v16 first[4], second[4];
        const char *at = panel + k * PANEL * size;
        _Pragma("GCC unroll 8") for (int p = 0; p < panels; p++) {
            __builtin_prefetch(at + (size_t)p * next + AHEAD);
            if (size == 2)
                v16_load_pairs(at + (size_t)p * next, &first[p], &second[p]);
            else
                v16_load_e4m3_pairs(at + (size_t)p * next, &first[p], &second[p]);
        }
        STEP(sum, rows, panels, x + k, stride, first);
        if (k + 1 < count) STEP(sum, rows, panels, x + k + 1, stride, second);
    }
    if (size == 2) return;
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
        _Pragma("GCC unroll 8") for (int p = 0; p < panels; p++) sum[r][p] =
            v16_mul(sum[r][p], v16_set(1 / E4M3_UNIT));
}

SIMD void sum_floats(v16 (*sum)[4], const float *x, int64_t stride, int64_t count,
                     const char *panel, size_t next, const int rows, const int panels) {
    for (int64_t k = 0; k < count; k++) {
        v16 w[4];
        const char *at = panel + k * PANEL * 4;
        _Pragma("GCC unroll 8") for (int p = 0; p < panels; p++) {
            __builtin_prefetch(at + (size_t)p * next + AHEAD);
            w[p] = v16_load((const float *)(at + (size_t)p * next));
        }
        STEP(sum, rows, panels, x + k, stride, w);
    }
}

static void put(const struct cpu_matmul_job *job, int64_t row, int64_t output, v16 sum) {
    int64_t left = job->weight->rows - output;
    int n = left < 16 ? (int)left : 16;
    float *y = job->y + row * job->weight->rows + output;
    if (job->scale) sum = v16_mul(sum, v16_load_n(job->scale + output, n));
    if (job->bias) sum = v16_add(sum, v16_load_n(job->bias + output, n));
    if (job->mode == KERN_ADD) sum = v16_add(v16_load_n(y, n), sum);
    v16_store_n(y, sum, n);
}

/* One leaf's inputs. */
SIMD void sum_leaf(v16 (*sum)[4], const struct kern_weight *w, const float *x, const char *data,
                   struct cpu_leaf leaf, const int rows, const int panels) {
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
        _Pragma("GCC unroll 8") for (int p = 0; p < panels; p++) sum[r][p] = v16_set(0);
    if (w->layout == CPU_PANEL_PAIRS)
        sum_pairs(sum, x + leaf.first, w->cols, leaf.count, data + leaf.place * PANEL * 2,
                  w->panel_bytes, 2, rows, panels);
    else if (w->layout == CPU_PANEL_E4M3)
        sum_pairs(sum, x + leaf.first, w->cols, leaf.count, data + leaf.place * PANEL,
                  w->panel_bytes, 1, rows, panels);
    else
        sum_floats(sum, x + leaf.first, w->cols, leaf.count, data + leaf.place * PANEL * 4,
                   w->panel_bytes, rows, panels);
}

SIMD void block(const struct cpu_matmul_job *job, int64_t row, int64_t panel, const int rows,
                const int panels) {
    const struct kern_weight *w = job->weight;
    const float *x = job->x + row * w->cols;
    const char *data = w->data + (size_t)panel * w->panel_bytes;
    v16 sum[8][4], level[CPU_LEAF_LEVELS - 1][8][4];
    for (int l = 0;; l++) { /* at least one */
        int top = cpu_leaf_level(l);
        sum_leaf(sum, w, x, data, cpu_leaf_of(w, l), rows, panels);
        for (int n = l; n & 1; n >>= 1) {
            top--;
            _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
                _Pragma("GCC unroll 8") for (int p = 0; p < panels; p++) sum[r][p] =
                    v16_add(level[top][r][p], sum[r][p]);
        }
        if (l + 1 >= w->leaves) break;
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
            _Pragma("GCC unroll 8") for (int p = 0; p < panels; p++) level[top][r][p] = sum[r][p];
    }
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
        _Pragma("GCC unroll 8") for (int p = 0; p < panels; p++)
            put(job, row + r, (panel + p) * PANEL, sum[r][p]);
}

static void one_row(const struct cpu_matmul_job *job, int64_t row, int64_t panel, int64_t count) {
    for (; count >= PANELS_ONE_ROW; count -= PANELS_ONE_ROW, panel += PANELS_ONE_ROW)
        block(job, row, panel, 1, PANELS_ONE_ROW);
    for (; count; count--, panel++) block(job, row, panel, 1, 1);
}

static void many_rows(const struct cpu_matmul_job *job, int64_t panel, const int panels) {
    int row = 0;
    for (; row + ROWS <= job->rows; row += ROWS) {
        if (panels == PANELS)
            block(job, row, panel, ROWS, PANELS);
        else
            block(job, row, panel, ROWS, 1);
    }
    for (; row + 2 <= job->rows; row += 2) {
        if (panels == PANELS)
            block(job, row, panel, 2, PANELS);
        else
            block(job, row, panel, 2, 1);
    }
    if (row < job->rows) one_row(job, row, panel, panels);
}

void VEC(matmul)(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                 void *scratch) {
    (void)next;
    (void)scratch;
    if (job->rows == 1) {
        one_row(job, 0, first, count);
        return;
    }
    for (; count >= PANELS; count -= PANELS, first += PANELS) many_rows(job, first, PANELS);
    for (; count; count--, first++) many_rows(job, first, 1);
}
