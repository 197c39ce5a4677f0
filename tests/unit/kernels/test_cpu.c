/* Opening and closing, refusals, allocation failures, memory, sampling through the table. */
#include <criterion/criterion.h>

#include "base/mem.h"
#include "kernels/comm_host.h"
#include "kernels/cpu/alloc.h"
#include "kernels/cpu/built.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/sample.h"
#include "paths.h"

Test(cpu, auto_takes_the_best_path) {
    struct cpu_isa isa = cpu_isa_detect();
    struct cpu_options options = {.path = "auto", .threads = 1};
    struct kern *kern;
    cr_assert_eq(cpu_open(&options, &kern, NULL), 0);
    const char *want = isa.amx      ? "cpu-amx"
                       : isa.bf16   ? "cpu-avx512-bf16"
                       : isa.avx512 ? "cpu-avx512"
                       : isa.avx2   ? "cpu-avx2"
                       : isa.neon   ? "cpu-neon"
                                    : "cpu-portable";
    cr_assert_str_eq(kern->ops->name, want);
    kern->ops->close(kern);
    for (int path = 0; path < PATH_COUNT; path++) {
        kern = path_open(path, 1);
        if (!kern) continue;
        const bool bf16 = !strcmp(path_names[path], "avx512") && isa.bf16;
        cr_assert_str_eq(kern->ops->name + 4, bf16 ? "avx512-bf16" : path_names[path]);
        kern->ops->close(kern);
    }
}

/* On avx512 activations beside weights in bf16, and attention, are rounded to bf16 where those of
 * blocks may become 8 bits, or all bf16. */
Test(cpu, rounds_to_bf16_with_the_activations) {
    static const enum cpu_activations all[] = {CPU_INT8, CPU_BY_WEIGHT, CPU_BF16, CPU_INT16,
                                               CPU_F32};
    for (int i = 0; i < 5; i++) {
        struct cpu_options options = {.path = "avx512", .activations = all[i], .threads = 1};
        struct kern *kern;
        struct fault fault = {0};
        if (cpu_open(&options, &kern, &fault)) continue; /* this processor lacks it */
        const bool rounds = cpu_isa_detect().bf16 && i < 3;
        cr_assert_eq(cpu_of(kern)->kernels->attention != NULL, rounds);
        cr_assert_eq(strstr(kern->ops->activations, ", bf16 with bf16 and fp8") != NULL, rounds);
        cr_assert_eq(strstr(kern->ops->activations, "attention") != NULL,
                     cpu_of(kern)->kernels->attention != NULL);
        kern->ops->close(kern);
    }
}

Test(cpu, unknown_path_is_refused) {
    struct cpu_options options = {.path = "sse9"};
    struct kern *kern = NULL;
    struct fault fault = {0};
    cr_assert_eq(cpu_open(&options, &kern, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "sse9");
    cr_assert_null(kern);
}

/* A build with KEEPD_CPU_PATHS=native lacks some paths. */
Test(cpu, a_path_that_the_build_lacks_is_refused) {
    const struct cpu_isa isa = cpu_isa_detect();
    const struct {
        const char *name;
        bool usable, built;
    } paths[] = {
        {"portable", true, CPU_HAS_PORTABLE},
        {"neon", isa.neon, CPU_HAS_NEON && (!isa.i8mm || CPU_HAS_I8MM)},
        {"avx2", isa.avx2, CPU_HAS_AVX2},
        {"avx512", isa.avx512, CPU_HAS_AVX512 && (isa.vnni ? CPU_HAS_VNNI : CPU_HAS_AVX2)},
        {"amx", isa.amx, CPU_HAS_AMX},
    };
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        const struct cpu_options options = {
            .path = paths[i].name, .activations = CPU_INT16, .threads = 1};
        struct kern *kern = NULL;
        struct fault fault = {0};
        const int rc = cpu_open(&options, &kern, &fault);
        if (!rc) kern->ops->close(kern);
        cr_assert_eq(rc, paths[i].usable && paths[i].built ? 0 : ERR_UNSUPPORTED);
        if (!rc) continue;
        cr_assert_str_eq(fault.field, paths[i].name);
        cr_assert_not_null(
            strstr(fault.text, paths[i].usable ? "KEEPD_CPU_PATHS=all" : "this processor lacks"));
    }
}

Test(cpu, odd_head_is_refused) {
    struct kern *kern = path_open(1, 1);
    struct kern_cache_options options = {.layers = 1,
                                         .heads_q = 1,
                                         .heads_kv = 1,
                                         .head_dim = 63,
                                         .dtype = KERN_F32,
                                         .pages = 1,
                                         .slots = 1,
                                         .max_positions = 1};
    struct fault fault = {0};
    cr_assert_eq(kern->ops->cache_open(kern, &options, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "head_dim");
    kern->ops->close(kern);
}

/* Classes merge by the attention of all queries, so a rule that only looks at the last has none. */
Test(cpu, classes_need_what_is_added_up) {
    struct kern *kern = path_open(1, 1);
    struct kern_rule rule = {
        .score = KERN_SCORE_ATTENTION, .merge = KERN_MERGE_CLASSES, .observe = {.window = 8}};
    struct fault fault = {0};
    cr_assert_eq(kern->ops->rule_check(&rule, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "merge");
    rule.observe.global = true;
    cr_assert_eq(kern->ops->rule_check(&rule, &fault), 0);
    kern->ops->close(kern);
}

Test(cpu, memory_is_zeroed_and_aligned) {
    struct kern *kern = path_open(1, 1);
    static const size_t sizes[] = {1, 100, 5 << 20};
    for (int i = 0; i < 3; i++) {
        char *mem = kern->ops->mem_alloc(kern, sizes[i]);
        cr_assert_not_null(mem);
        cr_assert_eq((uintptr_t)mem % 64, 0u);
        for (size_t j = 0; j < sizes[i]; j++) cr_assert_eq(mem[j], 0);
        char text[] = "keepd", back[6];
        if (sizes[i] >= 6) {
            cr_assert_eq(kern->ops->upload(kern, mem, text, 6), 0);
            cr_assert_eq(kern->ops->download(kern, back, mem, 6), 0);
            cr_assert_str_eq(back, text);
        }
        kern->ops->mem_free(kern, mem);
    }
    cr_assert_null(kern->ops->mem_alloc(kern, SIZE_MAX - 8));
    kern->ops->mem_free(kern, NULL);
    kern->ops->close(kern);
}

Test(cpu, blocks_of_an_arena_share_chunks) {
    static const size_t sizes[] = {3 << 20, 100, 65 << 20, 3 << 20};
    struct cpu_arena arena = {0};
    char *block[4];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 4; i++) {
            block[i] = cpu_arena_alloc(&arena, sizes[i]);
            cr_assert_not_null(block[i]);
            cr_assert_eq((uintptr_t)block[i] % 64, 0u);
            cr_assert(!block[i][0] && !block[i][sizes[i] - 1]);
            memset(block[i], 1 + i, sizes[i]);
        }
        cr_assert_eq(block[3] - block[0], (3 << 20) + 64);
        for (int i = 0; i < 4; i++) {
            cr_assert(block[i][0] == 1 + i && block[i][sizes[i] - 1] == 1 + i);
            cpu_arena_free(&arena, block[i]);
        }
        cr_assert_null(arena.chunk);
    }
    cr_assert_null(cpu_arena_alloc(&arena, SIZE_MAX - 8));
    cpu_arena_free(&arena, NULL);
}

/* ---- The n-th allocation fails, for every n ---- */

static int load_things(struct kern *kern, struct kern_weight **w, struct kern_gate **gate) {
    struct test_matrix m = matrix_make(40, 70, KERN_BF16, 1);
    float *f = fresh(64 * 70, 2);
    int32_t row[2] = {0, 1};
    struct kern_gate_spec spec = {.w1 = f,
                                  .b1 = f,
                                  .w2 = f,
                                  .b2 = f,
                                  .last = f,
                                  .bias = f,
                                  .row = row,
                                  .width = 16,
                                  .d_model = 70,
                                  .heads_kv = 2,
                                  .row_count = 2,
                                  .embeddings = 1};
    struct kern_cache_options cache = {.layers = 1,
                                       .heads_q = 2,
                                       .heads_kv = 2,
                                       .head_dim = 16,
                                       .dtype = KERN_BF16,
                                       .pages = 8,
                                       .slots = 1,
                                       .max_positions = 64};
    struct fault fault = {0};
    int rc = kern->ops->weight_load(kern, &m.file, 1, KERN_SHARD_NONE, w, &fault);
    if (!rc) rc = kern->ops->gate_load(kern, &spec, gate, &fault);
    if (!rc) rc = kern->ops->cache_open(kern, &cache, &fault);
    cr_assert_eq(rc, fault.code);
    matrix_close(&m);
    free(f);
    return rc;
}

static int open_everything(int path) {
    struct cpu_options options = {.path = path_names[path], .threads = 3};
    struct kern *kern = NULL;
    struct kern_weight *w = NULL;
    struct kern_gate *gate = NULL;
    struct fault fault = {0};
    int rc = cpu_open(&options, &kern, &fault);
    cr_assert_eq(rc, fault.code);
    if (rc) return rc;
    rc = load_things(kern, &w, &gate);
    kern->ops->gate_free(kern, gate);
    kern->ops->weight_free(kern, w);
    kern->ops->close(kern);
    return rc;
}

Test(cpu, every_allocation_may_fail) {
    for (int path = 0; path < PATH_COUNT; path++) {
        int failures = 0;
        for (long n = 0;; n++) {
            mem_fail_after(n);
            int rc = open_everything(path);
            bool passed = mem_fail_pending();
            mem_fail_after(-1);
            if (rc == ERR_UNSUPPORTED) break;
            if (passed) {
                cr_assert_eq(rc, 0);
                cr_assert_gt(failures, 10);
                break;
            }
            cr_assert_eq(rc, ERR_NOMEM, "%s: allocation %ld: %d", path_names[path], n, rc);
            failures++;
        }
    }
}

static int step_failures(bool qk_norm_wide) {
    const struct kern_cache_options options = {.layers = 1,
                                               .heads_q = 2,
                                               .heads_kv = 1,
                                               .head_dim = 64,
                                               .dtype = KERN_F32,
                                               .pages = 8,
                                               .slots = 1,
                                               .max_positions = 64,
                                               .qk_norm_wide = qk_norm_wide};
    const struct kern_span span = {.count = 40};
    const struct kern_batch batch = {.spans = &span, .rows = 40, .span_count = 1};
    struct kern_cache_stats stats;
    int failures = 0;
    for (bool passed = false; !passed;) {
        struct kern *kern = path_open(1, 1);
        cr_assert_eq(kern->ops->cache_open(kern, &options, NULL), 0);
        mem_fail_after(failures);
        int rc = kern->ops->begin_step(kern, &batch);
        passed = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert_eq(rc, passed ? 0 : ERR_NOMEM);
        kern->ops->cache_stats(kern, &stats);
        cr_assert_eq(stats.pages_used, passed ? 3 : 0);
        if (!passed) cr_assert_eq(kern->ops->begin_step(kern, &batch), 0);
        failures += !passed;
        kern->ops->close(kern);
    }
    return failures;
}

/* A step's room is taken before anything of it is done: a failure leaves the cache as it was, and
 * the next attempt may succeed. Norms of whole queries and keys need one more. */
Test(cpu, a_step_without_memory_does_not_begin) {
    cr_assert_eq(step_failures(false), 4);
    cr_assert_eq(step_failures(true), 5);
}

/* ---- Sampling ---- */

/* A step that samples ends with the sample, so that says what sync would. */
Test(cpu, sample_tells_of_a_lost_rank) {
    enum { WIDTH = 32, ROWS = 8 };
    const struct comm *comms[2];
    struct kern *kern;
    struct kern_weight *table;
    static const float numbers[ROWS * WIDTH];
    const struct kern_matrix matrix = {
        .data = numbers, .dtype = KERN_F32, .rows = ROWS, .cols = WIDTH};
    const struct kern_sample params = {.top_p = 1, .repetition = 1, .forced = -1};
    const int32_t token = 3;
    struct kern_sampled out;
    cr_assert_eq(comm_host_open(2, comms), 0);
    const struct cpu_options options = {.path = "portable", .threads = 1, .comm = comms[0]};
    cr_assert_eq(cpu_open(&options, &kern, NULL), 0);
    const struct kern_ops *ops = kern->ops;
    cr_assert_eq(ops->weight_load(kern, &matrix, 1, KERN_SHARD_ROWS, &table, NULL), 0);
    float *x = ops->mem_alloc(kern, WIDTH * sizeof *x);
    cr_assert_eq(ops->sample(kern, x, 1, WIDTH, &params, &out), 0);
    comms[1]->ops->abort(comms[1]);
    ops->embed(kern, x, table, 1, &token, 1);
    cr_assert_neq(ops->sync(kern), 0);
    cr_assert_eq(ops->sample(kern, x, 1, WIDTH, &params, &out), ops->sync(kern));
    ops->mem_free(kern, x);
    ops->weight_free(kern, table);
    ops->close(kern);
    comms[1]->ops->close(comms[1]);
}

Test(cpu, sample_is_the_row_function) {
    enum { ROWS = 9, VOCAB = 5000 };
    struct kern *kern = path_open(1, 3);
    float *logits = fresh(ROWS * VOCAB, 81);
    struct kern_sample params[ROWS];
    struct kern_sampled out[ROWS], want;
    for (int r = 0; r < ROWS; r++)
        params[r] = (struct kern_sample){.temperature = (float)r / 4,
                                         .top_p = 1,
                                         .repetition = 1,
                                         .seed = (uint64_t)r,
                                         .position = r,
                                         .forced = -1,
                                         .top_count = 3};
    cr_assert_eq(kern->ops->sample(kern, logits, ROWS, VOCAB, params, out), 0);
    void *scratch = malloc(cpu_sample_scratch_bytes(VOCAB));
    for (int r = 0; r < ROWS; r++) {
        cpu_sample_row(logits + r * VOCAB, VOCAB, &params[r], scratch, &want);
        cr_assert_eq(out[r].token, want.token);
        cr_assert_eq(out[r].logprob, want.logprob);
        cr_assert_eq(out[r].top_token[2], want.top_token[2]);
    }
    free(scratch), free(logits);
    kern->ops->close(kern);
}
