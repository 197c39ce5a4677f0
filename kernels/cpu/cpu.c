/* The CPU backend: choice of the path, opening and closing, memory, and the table of operations.
 * The table is one for all paths; paths differ only in struct cpu_kernels. */
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/alloc.h"
#include "kernels/cpu/block.h"
#include "kernels/cpu/built.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/sample.h"

static void room_close(struct cpu_room *room) {
    cpu_free(room->mem);
}

/* ---- Memory ---- */

static void *op_mem_alloc(struct kern *kern, size_t bytes) {
    (void)kern;
    return cpu_alloc(bytes);
}

static void op_mem_free(struct kern *kern, void *mem) {
    (void)kern;
    cpu_free(mem);
}

static int op_copy(struct kern *kern, void *to, const void *from, size_t bytes) {
    (void)kern;
    memcpy(to, from, bytes);
    return 0;
}

static int op_sync(struct kern *kern) {
    return cpu_of(kern)->failed;
}

/* Shared weights are host memory that is only read; scratch memory of products is private. */
static int op_borrow(struct kern *kern, const struct kern *owner) {
    const struct cpu *from = (const struct cpu *)owner;
    struct cpu *cpu = cpu_of(kern);
    CHECK(cpu->kernels == from->kernels);
    int rc = cpu_scratch_grow(cpu, from->scratch[0].bytes);
    if (!rc) rc = cpu_room_grow(&cpu->packed, from->packed.bytes);
    if (!rc) rc = cpu_room_grow(&cpu->partial, from->partial.bytes);
    if (!rc) rc = cpu_room_grow(&cpu->bias, from->bias.bytes);
    if (!rc) rc = cpu_room_grow(&cpu->routed, from->routed.bytes);
    cpu->experts = from->experts;
    cpu->experts_used = from->experts_used;
    return rc ? rc : cpu_room_grow(&cpu->hidden, from->hidden.bytes);
}

/* ---- Cache ---- */

struct items {
    struct cpu_tickets tickets;
    cpu_item *fn;
    void *arg;
};

static void do_items(void *arg, int worker) {
    struct items *items = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&items->tickets, 1, &end)) >= 0;)
        items->fn(items->arg, (int)i, worker);
}

static void run_items(void *ctx, int count, cpu_item *fn, void *arg) {
    struct cpu *cpu = ctx;
    struct items items = {.fn = fn, .arg = arg};
    cpu_tickets_set(&items.tickets, count);
    cpu_team_run(cpu->team, do_items, &items);
}

/* Allocates what steps up to the largest need apart from pages; rank 0 samples. */
static int reserve_steps(struct cpu *cpu, const struct kern_cache_options *options) {
    int spans = options->rows_max < options->slots ? options->rows_max : options->slots;
    size_t sampling = cpu->comm->rank == 0 ? cpu_sample_scratch_bytes(options->vocab) : 0;
    int rc = cpu_scratch_grow(cpu, cpu->kernels->attend_scratch(&cpu->cache.options));
    if (!rc) rc = cpu_scratch_grow(cpu, sampling);
    return rc ? rc : cpu_step_reserve(cpu, options->rows_max, spans);
}

static int op_cache_open(struct kern *kern, const struct kern_cache_options *options,
                         struct fault *fault) {
    struct cpu *cpu = cpu_of(kern);
    CHECK(!cpu->has_cache);
    if (options->head_dim % 2)
        return fault_set(fault, ERR_UNSUPPORTED, "head_dim", "an odd head size, %d",
                         options->head_dim);
    for (int i = 0; i < options->layers; i++)
        CHECK(options->heads_q % kern_heads_of(options, i).kv == 0);
    int rc = cpu_cache_open_rank(&cpu->cache, options, cpu->comm, cpu->threads, fault);
    if (rc) return rc;
    rc = reserve_steps(cpu, options);
    if (rc) {
        cpu_cache_close(&cpu->cache);
        return fault_set(fault, rc, "", "no memory beside the key/value cache");
    }
    cpu->cache.parallel = run_items;
    cpu->cache.parallel_ctx = cpu;
    cpu->cache.math = cpu->kernels->math;
    cpu->has_cache = true;
    return 0;
}

static int op_begin_step(struct kern *kern, const struct kern_batch *batch) {
    struct cpu *cpu = cpu_of(kern);
    int rc =
        cpu->comm->ops->agree(cpu->comm, cpu_step_reserve(cpu, batch->rows, batch->span_count));
    return rc < 0 ? rc : cpu_cache_begin_step(&cpu->cache, batch);
}

static int op_rule_check(const struct kern_rule *rule, struct fault *fault) {
    /* The reference runs every rule, but classes need the accumulated attention. */
    if (!rule_classes(rule) || rule_adds(rule)) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "merge",
                     "classes need the attention of all queries added up");
}

static int op_evict(struct kern *kern, const struct kern_evict *due, int count) {
    return cpu_cache_evict(&cpu_of(kern)->cache, due, count);
}

static int op_truncate(struct kern *kern, int slot, int32_t pos) {
    return cpu_cache_truncate(&cpu_of(kern)->cache, slot, pos);
}

static int op_shift(struct kern *kern, const struct kern_shift *shift) {
    return cpu_cache_shift(&cpu_of(kern)->cache, shift);
}

static int op_fork(struct kern *kern, int from, int to) {
    return cpu_cache_fork(&cpu_of(kern)->cache, from, to);
}

static void op_release(struct kern *kern, int slot) {
    cpu_cache_release(&cpu_of(kern)->cache, slot);
}

static int op_report(struct kern *kern, int slot, struct kern_report *report) {
    return cpu_cache_report(&cpu_of(kern)->cache, slot, report);
}

static size_t op_snapshot_size(struct kern *kern, int slot, int block) {
    return cpu_cache_snapshot_size(&cpu_of(kern)->cache, slot, block);
}

static int op_snapshot_export(struct kern *kern, int slot, int block, void *to) {
    cpu_cache_snapshot_export(&cpu_of(kern)->cache, slot, block, to);
    return 0;
}

static int op_snapshot_check(struct kern *kern, const struct kern_block *blocks, int count,
                             int32_t tokens, struct kern_report *report, struct fault *fault) {
    return cpu_cache_snapshot_check(&cpu_of(kern)->cache, blocks, count, tokens, report, fault);
}

static int op_snapshot_import(struct kern *kern, int slot, int block,
                              const struct kern_block *from) {
    return cpu_cache_snapshot_import(&cpu_of(kern)->cache, slot, block, from);
}

static void op_cache_stats(struct kern *kern, struct kern_cache_stats *stats) {
    cpu_cache_stats(&cpu_of(kern)->cache, stats);
}

static int op_cache_check(struct kern *kern, struct fault *fault) {
    return cpu_cache_check(&cpu_of(kern)->cache, fault);
}

/* ---- Opening ---- */

static void op_close(struct kern *kern) {
    struct cpu *cpu = cpu_of(kern);
    cpu_team_close(cpu->team);
    if (cpu->has_cache) cpu_cache_close(&cpu->cache);
    for (int i = 0; cpu->scratch && i < cpu->threads; i++) room_close(&cpu->scratch[i]);
    mem_free(cpu->scratch);
    room_close(&cpu->packed);
    room_close(&cpu->partial);
    room_close(&cpu->bias);
    room_close(&cpu->routes);
    room_close(&cpu->routed);
    room_close(&cpu->hidden);
    room_close(&cpu->rows);
    room_close(&cpu->items);
    room_close(&cpu->angles);
    room_close(&cpu->angle_places);
    room_close(&cpu->squares);
    cpu->comm->ops->close(cpu->comm);
    mem_free(cpu);
}

static const struct kern_ops table = {
    .blocks = true,
    .scale_groups = true,
    .peeks = true,
    .both_ways = true,
    .reads_latent = true,
    .close = op_close,
    .mem_alloc = op_mem_alloc,
    .mem_free = op_mem_free,
    .upload = op_copy,
    .download = op_copy,
    .weight_load = cpu_weight_load,
    .weight_free = cpu_weight_free,
    .gate_load = cpu_gate_load,
    .gate_free = cpu_gate_free,
    .experts_load = cpu_experts_load,
    .experts_free = cpu_experts_free,
    .borrow = op_borrow,
    .embed = cpu_embed,
    .rms_norm = cpu_rms_norm,
    .layer_norm = cpu_layer_norm,
    .add = cpu_add,
    .matmul = cpu_matmul,
    .low_rank = cpu_low_rank,
    .add_norm = cpu_add_norm,
    .soft_cap = cpu_soft_cap,
    .qk_norm = cpu_qk_norm,
    .glu = cpu_glu,
    .glu_apart = cpu_glu_apart,
    .scale = cpu_scale,
    .open_gates = cpu_open_gates,
    .experts = cpu_experts,
    .gather_rows = cpu_gather_rows,
    .gate = cpu_gate,
    .cache_open = op_cache_open,
    .cache_info = cpu_cache_info,
    .rule_check = op_rule_check,
    .begin_step = op_begin_step,
    .qk_rope = cpu_qk_rope,
    .write_kv = cpu_write_kv,
    .attend = cpu_attend,
    .short_conv = cpu_short_conv,
    .delta = cpu_delta,
    .mamba = cpu_mamba,
    .latent_reserve = cpu_latent_reserve,
    .latent_in = cpu_latent_in,
    .latent_out = cpu_latent_out,
    .worth = cpu_worth,
    .evict = op_evict,
    .truncate = op_truncate,
    .shift = op_shift,
    .fork = op_fork,
    .release = op_release,
    .report = op_report,
    .snapshot_size = op_snapshot_size,
    .snapshot_export = op_snapshot_export,
    .snapshot_check = op_snapshot_check,
    .snapshot_import = op_snapshot_import,
    .cache_stats = op_cache_stats,
    .cache_check = op_cache_check,
    .sample = cpu_sample,
    .sync = op_sync,
};

struct path {
    const char *name;
    const struct cpu_kernels *kernels; /* NULL: the build does not contain them */
    bool usable;                       /* on this processor */
    const char *needs;
};

#define PATHS_MAX 6

/* Lists the paths, the best first. */
static int list_paths(struct path *paths) {
    const struct cpu_isa isa = cpu_isa_detect();
    const struct path all[PATHS_MAX] = {
        {"amx", CPU_IF_BUILT(CPU_HAS_AMX, &cpu_kernels_amx), isa.amx,
         "AMX bf16 tiles (or the system withholds them)"},
        /* For products of blocks avx512 uses VNNI's kernels or AVX2's. */
        {"avx512",
         CPU_IF_BUILT(CPU_HAS_AVX512 && (isa.vnni ? CPU_HAS_VNNI : CPU_HAS_AVX2),
                      &cpu_kernels_avx512),
         isa.avx512, "AVX-512 (F, BW, DQ, VL)"},
        {"avx2", CPU_IF_BUILT(CPU_HAS_AVX2, &cpu_kernels_avx2), isa.avx2, "AVX2, FMA or F16C"},
        /* For products of blocks neon uses I8MM's kernels or its own. */
        {"neon", CPU_IF_BUILT(CPU_HAS_NEON && (!isa.i8mm || CPU_HAS_I8MM), &cpu_kernels_neon),
         isa.neon, "NEON with dot products"},
        {"portable", CPU_IF_BUILT(CPU_HAS_PORTABLE, &cpu_kernels_portable), true, ""},
        {"reference", &cpu_kernels_reference, true, ""},
    };
    memcpy(paths, all, sizeof all);
    return PATHS_MAX;
}

#define BUILD_ALL "build keepd with -DKEEPD_CPU_PATHS=all (make package does)"

/* Says that the build lacks the path and which ones it contains. */
static void lacks_path(const char *name, const struct path *paths, int count, struct fault *fault) {
    char names[64] = "";
    size_t at = 0;
    for (int i = 0; i < count; i++)
        if (paths[i].kernels)
            at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", at ? ", " : "",
                                   paths[i].name);
    fault_set(fault, ERR_UNSUPPORTED, name,
              "this build contains only the CPU paths %s; for others " BUILD_ALL, names);
}

static const struct cpu_kernels *choose_path(const char *name, const struct path *paths, int count,
                                             struct fault *fault) {
    for (int i = 0; i < count; i++) {
        if (strcmp(name, paths[i].name) != 0) continue;
        if (paths[i].usable && paths[i].kernels) return paths[i].kernels;
        if (paths[i].usable)
            lacks_path(name, paths, count, fault);
        else
            fault_set(fault, ERR_UNSUPPORTED, name, "this processor lacks %s", paths[i].needs);
        return NULL;
    }
    fault_set(fault, ERR_UNSUPPORTED, name, "no such CPU path");
    return NULL;
}

/* Returns the kernels of a path; "auto" is the best path but never "reference". NULL: the processor
 * or the build lacks it. */
static const struct cpu_kernels *cpu_choose(const char *name, struct fault *fault) {
    struct path paths[PATHS_MAX];
    const int count = list_paths(paths);
    if (name && strcmp(name, "auto") != 0) return choose_path(name, paths, count, fault);
    for (int i = 0; i + 1 < count; i++)
        if (paths[i].usable && paths[i].kernels) return paths[i].kernels;
    fault_set(fault, ERR_UNSUPPORTED, "cpu-path",
              "this build is for another processor, which has more instructions; " BUILD_ALL
              " or build it on this machine");
    return NULL;
}

/* Returns the kernels that round activations as the options say; NULL: there are none. */
static const struct cpu_kernels *rounding(const struct cpu_kernels *kernels,
                                          const struct cpu_options *options, struct fault *fault) {
    const enum cpu_activations to = options->activations;
    if (CPU_HAS_AMX && kernels == &cpu_kernels_amx && to == CPU_BF16) return &cpu_kernels_amx_bf16;
    if (CPU_HAS_AVX512 && kernels == &cpu_kernels_avx512 && cpu_isa_detect().bf16) {
        if (to == CPU_INT16 || to == CPU_F32) return kernels;
        if (CPU_HAS_BF16) return &cpu_kernels_bf16;
        fault_set(fault, ERR_UNSUPPORTED, "cpu-activations",
                  "this build contains the path avx512 only with int16; " BUILD_ALL);
        return NULL;
    }
    if (!kernels || to != CPU_BF16) return kernels;
    fault_set(fault, ERR_UNSUPPORTED, "cpu-activations",
              "bf16 needs the path amx, or avx512 on a processor with AVX512_BF16; the path is %s",
              kernels->name);
    return NULL;
}

/* Says how activations are rounded, by the kind of weights, and by attention. */
static void describe_activations(struct cpu *cpu) {
    const struct cpu_kernels *k = cpu->kernels;
    const bool by_weight = cpu->activations == CPU_BY_WEIGHT;
    const char *wide = k->packs_blocks                ? "bf16"
                       : !cpu->block_kernels          ? "f32"
                       : cpu->activations == CPU_INT8 ? "int8"
                                                      : "int16";
    snprintf(
        cpu->said, sizeof cpu->said,
        "%s with 4-bit blocks, %s with 8-bit blocks, %s with bf16 and fp8, f32 with others%s%s",
        by_weight && cpu->block_kernels ? "int8" : wide, wide, k->stored ? k->stored : "f32",
        k->attention ? ", " : "", k->attention ? k->attention : "");
    cpu->ops.activations = cpu->said;
}

static int open_threads(struct cpu *cpu, int threads) {
    int rc = cpu_team_open(threads, &cpu->team);
    if (rc) return rc;
    cpu->threads = cpu_team_threads(cpu->team);
    cpu->scratch = mem_try_alloc((size_t)cpu->threads, sizeof *cpu->scratch);
    return cpu->scratch ? 0 : ERR_NOMEM;
}

int cpu_open(const struct cpu_options *options, struct kern **out, struct fault *fault) {
    const struct comm *comm = options->comm ? options->comm : &comm_none;
    const struct cpu_kernels *kernels = rounding(cpu_choose(options->path, fault), options, fault);
    struct cpu *cpu = kernels ? mem_try_alloc(1, sizeof *cpu) : NULL;
    if (!cpu) {
        comm->ops->close(comm);
        if (!kernels) return ERR_UNSUPPORTED;
        return fault_set(fault, ERR_NOMEM, "", "no memory for the CPU backend");
    }
    cpu->ops = table;
    cpu->ops.name = kernels->name;
    cpu->base.ops = &cpu->ops;
    cpu->kernels = kernels;
    if (options->activations != CPU_F32 && !kernels->packs_blocks)
        cpu->block_kernels = cpu_block_kernels_of(kernels->name);
    cpu->activations = options->activations;
    describe_activations(cpu);
    cpu->comm = comm;
    cpu->leaves = CPU_LEAVES / comm->ranks;
    int rc = open_threads(cpu, options->threads);
    if (rc) {
        op_close(&cpu->base);
        return fault_set(fault, rc, "", "cannot start the CPU backend's threads");
    }
    *out = &cpu->base;
    return 0;
}
