/* block_logits: one step of a model's block that predicts further tokens (model_has_block).
 *
 *   block_logits MODEL HIDDEN 1,2,3
 *
 * HIDDEN is a file with a row of float32 numbers for each of the tokens: the hidden states that
 * belong to them. Writes the logits of all rows, then the block's own hidden states, as float32.
 * There are two steps; the last token of the first one is taken back, and computed again by the
 * second. Run by tests/python/test_block.py. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/file.h"
#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "tests/golden/replay.h"

#define TOKENS_MAX 256

static int fail(const struct fault *fault) {
    fprintf(stderr, "%s: %s\n", fault->field, fault->text);
    return 1;
}

static int open_block(const struct replay *whole, const char *dir, struct kern *kern,
                      struct model **block, struct fault *fault) {
    const struct model_options options = {.dir = dir,
                                          .gates = "",
                                          .block_of = whole->model,
                                          .rows_max = TOKENS_MAX,
                                          .logits_max = TOKENS_MAX,
                                          .threads = 1};
    int rc = model_open(kern, &options, block, fault);
    if (rc) return rc;
    struct kern_cache_info info;
    struct kern_cache_options cache = model_cache_options(model_config(*block));
    cache.dtype = KERN_F32;
    kern->ops->cache_info(&cache, &info);
    cache.pages = 2 * model_pages(model_config(*block), &info, TOKENS_MAX);
    cache.slots = 1;
    cache.max_positions = TOKENS_MAX;
    return kern->ops->cache_open(kern, &cache, fault);
}

/* Computes tokens [first, end); every row is wanted. */
static void step(struct model *block, const int32_t *tokens, const float *hidden, int first,
                 int end, float *out, float *states) {
    const struct model_config *c = model_config(block);
    const size_t width = (size_t)c->d_model, vocab = (size_t)c->vocab, at = (size_t)first;
    const struct kern_span span = {.count = end - first, .pos = first};
    const struct kern_batch batch = {
        .tokens = tokens + first, .spans = &span, .rows = end - first, .span_count = 1};
    const float *logits;
    int32_t want[TOKENS_MAX];
    for (int i = 0; i < end - first; i++) want[i] = i;
    CHECK(model_step_block(block, &batch, hidden + at * width, want, end - first, &logits) == 0);
    memcpy(out + at * vocab, logits, (size_t)(end - first) * vocab * sizeof *out);
    memcpy(states + at * width, model_wanted_hidden(block),
           (size_t)(end - first) * width * sizeof *states);
}

int main(int argc, char **argv) {
    struct fault fault = {0};
    struct replay whole;
    struct kern *kern = NULL;
    struct model *block = NULL;
    char *hidden = NULL;
    int32_t tokens[TOKENS_MAX];
    size_t size = 0;
    int count = 0;
    if (argc != 4) return 2;
    for (char *at = argv[3]; *at && count < TOKENS_MAX; at += *at == ',')
        tokens[count++] = (int32_t)strtol(at, &at, 10);
    const struct replay_options options = {.dir = argv[1],
                                           .gates = "",
                                           .path = "reference",
                                           .exact = true,
                                           .threads = 1,
                                           .rows_max = 8,
                                           .positions_max = 64,
                                           .slots = 1};
    const struct cpu_options cpu = {.path = "reference", .activations = CPU_F32, .threads = 1};
    if (replay_open(&options, &whole, &fault)) return fail(&fault);
    if (!model_has_block(whole.model)) {
        fprintf(stderr, "%s has no block\n", argv[1]);
        return 3;
    }
    if (cpu_open(&cpu, &kern, &fault) || open_block(&whole, argv[1], kern, &block, &fault))
        return fail(&fault);
    if (file_read(argv[2], (size_t)64 << 20, &hidden, &size, &fault)) return fail(&fault);
    const size_t width = (size_t)model_config(block)->d_model, rows = (size_t)count;
    const size_t vocab = (size_t)model_config(block)->vocab;
    CHECK(count > 3 && size == rows * width * sizeof(float));
    const float *given = (const float *)(const void *)hidden;
    float *out = mem_must_alloc(rows * vocab, sizeof *out);
    float *states = mem_must_alloc(rows * width, sizeof *states);
    step(block, tokens, given, 0, count / 2 + 1, out, states);
    CHECK(kern->ops->truncate(kern, 0, count / 2) == 0);
    step(block, tokens, given, count / 2, count, out, states);
    fwrite(out, sizeof *out, rows * vocab, stdout);
    fwrite(states, sizeof *states, rows * width, stdout);
    mem_free(out);
    mem_free(states);
    mem_free(hidden);
    kern->ops->release(kern, 0);
    model_close(block);
    kern->ops->close(kern);
    replay_close(&whole);
    return 0;
}
