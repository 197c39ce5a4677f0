/* Quantizes whole matrices: rows are handed to workers, each converted by the processor's fastest
 * code. */
#include "kernels/quantize.h"

#include <math.h>
#include <stdatomic.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/team.h"
#include "kernels/cpu/vec.h"

#define ROWS_TAKEN 4 /* rows per claim: about 100 KiB of a large model */

typedef float quantize_row(uint8_t *codes, const void *row, int64_t cols, enum kern_dtype dtype);

/* All variants compute the same numbers. */
static quantize_row *fastest(void) {
#if defined(__x86_64__)
    struct cpu_isa isa = cpu_isa_detect();
    if (isa.avx512) return cpu_quantize_row_avx512;
    if (isa.avx2) return cpu_quantize_row_avx2;
#endif
    return cpu_quantize_row_portable;
}

struct quantizing {
    const struct kern_matrix *from;
    quantize_row *row;
    uint8_t *codes;
    float *scales;
    struct cpu_tickets rows;
    _Atomic int64_t bad; /* lowest row found so far that has no scale; past the last: none */
};

/* Rows below it are still checked, so that the lowest one is found whatever the schedule. */
static void note_bad(struct quantizing *job, int64_t row) {
    int64_t lowest = atomic_load(&job->bad);
    while (row < lowest && !atomic_compare_exchange_weak(&job->bad, &lowest, row)) continue;
}

static void quantize_one(struct quantizing *job, int64_t r) {
    const struct kern_matrix *m = job->from;
    int64_t stride = m->stride > 0 ? m->stride : m->cols;
    const char *row = (const char *)m->data + (size_t)(r * stride) * kern_dtype_bytes(m->dtype);
    job->scales[r] = job->row(job->codes + r * m->cols, row, m->cols, m->dtype);
    if (!isfinite(job->scales[r])) note_bad(job, r);
}

static void quantize_some(void *arg, int worker) {
    (void)worker;
    struct quantizing *job = arg;
    int64_t end;
    for (int64_t r; (r = cpu_tickets_take(&job->rows, ROWS_TAKEN, &end)) >= 0;)
        for (; r < end && r < atomic_load(&job->bad); r++) quantize_one(job, r);
}

int quantize_rows(const struct kern_matrix *from, uint8_t *codes, float *scales,
                  struct cpu_team *team, struct fault *fault) {
    struct quantizing job = {
        .from = from, .row = fastest(), .codes = codes, .scales = scales, .bad = from->rows};
    cpu_tickets_set(&job.rows, from->rows);
    if (team)
        cpu_team_run(team, quantize_some, &job);
    else
        quantize_some(&job, 0);
    if (job.bad == from->rows) return 0;
    return fault_set(fault, ERR_INVALID, "",
                     "row %lld has a number that is not finite, which has no E4M3 scale",
                     (long long)job.bad);
}
