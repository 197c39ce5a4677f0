/* The driver of matrix products: passes of MATMUL_ROWS rows, panels shared out to workers. */
#include "base/check.h"
#include "kernels/cpu/internal.h"

int cpu_matmul_reserve(struct cpu *cpu, const struct kern_weight *weight) {
    const struct cpu_kernels *k = cpu->kernels;
    int rc = 0;
    if (k->matmul_scratch) rc = cpu_scratch_grow(cpu, k->matmul_scratch(weight));
    if (!rc && k->packed_bytes && weight->layout == CPU_PANEL_PAIRS)
        rc = cpu_room_grow(&cpu->packed, k->packed_bytes(weight->depth));
    return rc;
}

struct pass {
    struct cpu *cpu;
    struct cpu_matmul_job job;
    struct cpu_share blocks; /* of 16 rows to pack */
    struct cpu_share panels;
    int64_t grain;
};

static void pack_rows(void *arg, int worker) {
    (void)worker;
    struct pass *pass = arg;
    int64_t end;
    for (int64_t b; (b = cpu_share_take(&pass->blocks, 1, &end)) >= 0;)
        pass->cpu->kernels->pack_x(&pass->job, (int)b * 16, pass->cpu->packed.mem);
}

/* Each worker claims one portion ahead of the one it works on, to know what to fetch. */
static void multiply(void *arg, int worker) {
    struct pass *pass = arg;
    void *scratch = pass->cpu->scratch[worker].mem;
    int64_t end, next_end = 0;
    int64_t p = cpu_share_take(&pass->panels, pass->grain, &end);
    while (p >= 0) {
        int64_t next = cpu_share_take(&pass->panels, pass->grain, &next_end);
        pass->cpu->kernels->matmul(&pass->job, p, end - p, next, scratch);
        p = next;
        end = next_end;
    }
}

/* Panels claimed together: whole groups of what kernels do at a time (four), 128 KiB or more so
 * that they stream, yet small enough that no worker waits long for the last one. */
static int64_t portion(const struct cpu *cpu, const struct kern_weight *w) {
    int64_t most = w->panels / ((int64_t)8 * cpu->threads);
    int64_t want = w->panel_bytes ? (int64_t)((128u << 10) / w->panel_bytes) : 1;
    if (want > most) want = most;
    return want < 4 ? 4 : want & ~(int64_t)3;
}

/* Rows of one pass: packed activations (4 bytes each) take about one MiB, half of a core's
 * second-level cache, and stay there while the weights stream by. More rows per pass would read
 * weights less often but activations from further away: measured slower. */
static int pass_rows(const struct kern_weight *w) {
    int64_t rows = (256 << 10) / w->depth / 32 * 32;
    return rows < 64 ? 64 : rows > MATMUL_ROWS ? MATMUL_ROWS : (int)rows;
}

void cpu_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
                const float *bias, int rows, enum kern_matmul_mode mode) {
    struct cpu *cpu = cpu_of(kern);
    CHECK(rows >= 0);
    bool pack = cpu->kernels->pack_x && weight->layout == CPU_PANEL_PAIRS;
    struct pass pass = {.cpu = cpu, .grain = portion(cpu, weight)};
    int most = pack ? pass_rows(weight) : MATMUL_ROWS;
    for (int row = 0; row < rows; row += most) {
        int count = rows - row < most ? rows - row : most;
        pass.job = (struct cpu_matmul_job){.weight = weight,
                                           .x = x + (int64_t)row * weight->cols,
                                           .packed = pack ? cpu->packed.mem : NULL,
                                           .bias = bias,
                                           .y = y + (int64_t)row * weight->rows,
                                           .rows = count,
                                           .mode = mode};
        cpu_share_set(&pass.blocks, (count + 15) / 16);
        cpu_share_set(&pass.panels, weight->panels);
        if (pack) cpu_run(cpu, count * weight->cols / 4, pack_rows, &pass);
        cpu_run(cpu, count * weight->rows * weight->cols, multiply, &pass);
    }
}
