/* Ranks at work, for ThreadSanitizer: prompts, answers, evictions with every scope, forks,
 * reports and snapshots of the bundled model over four ranks. What comes out is tested in
 * tests/unit/model/test_ranks.c; here nobody may race. */
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/mem.h"
#include "paging/policy.h"
#include "tests/golden/replay.h"

enum { CHUNK = 24, POSITIONS = 128, BUDGET = 12 };

static void copy(struct kern *kern, int from, int to, int blocks) {
    for (int b = 0; b < blocks; b++) {
        size_t size = kern->ops->snapshot_size(kern, from, b);
        char *data = mem_must_alloc(1, size);
        const struct kern_block block = {data, size};
        CHECK(kern->ops->snapshot_export(kern, from, b, data) == 0);
        CHECK(kern->ops->snapshot_import(kern, to, b, &block) == 0);
        mem_free(data);
    }
}

static void evict(struct kern *kern, int tokens, const struct kern_rule *rule) {
    int32_t lengths[64], positions[64 * POSITIONS];
    struct kern_trace trace = {
        .lengths = lengths, .positions = positions, .entries_max = 64 * POSITIONS};
    const struct kern_evict due = {
        .slot = 0, .tokens = tokens, .budget = BUDGET, .rule = rule, .trace = &trace};
    struct kern_report report = {.positions = positions, .entries_max = 64 * POSITIONS};
    CHECK(kern->ops->evict(kern, &due, 1) == 0);
    CHECK(trace.entries > 0);
    CHECK(kern->ops->report(kern, 0, &report) == 0);
}

static void live(struct replay *replay, const char *policy) {
    struct kern *kern = replay->kern;
    struct kv_params kv = {.budget = BUDGET, .buffer = 8, .chunk = CHUNK};
    int32_t ids[POSITIONS];
    kv_params_set_policy(&kv, policy_find(policy));
    kv_params_fit(&kv, 0);
    for (int i = 0; i < POSITIONS; i++) ids[i] = (i * 37 + 11) % replay->vocab;
    for (int pos = 0; pos < 3 * CHUNK; pos += CHUNK) {
        const struct replay_part part = {0, pos, CHUNK, ids + pos, &kv.rule};
        CHECK(replay_step(replay, &part, 1, NULL) == 0);
        evict(kern, pos + CHUNK, &kv.rule);
    }
    CHECK(kern->ops->fork(kern, 0, 1) == 0);
    const struct replay_part both[] = {{0, 3 * CHUNK, 1, ids, &kv.rule},
                                       {1, 3 * CHUNK, 2, ids + 9, &kv.rule}};
    float *logits = mem_must_alloc(3 * (size_t)replay->vocab, sizeof *logits);
    CHECK(replay_step(replay, both, 2, logits) == 0);
    mem_free(logits);
    copy(kern, 0, 2, 1 + replay->layers * replay->heads_kv);
    for (int slot = 0; slot < 3; slot++) kern->ops->release(kern, slot);
    CHECK(kern->ops->cache_check(kern, NULL) == 0);
}

int main(void) {
    static const char *const policies[] = {"global", "trimkv", "adakv", "cake", "h2o", "d2o"};
    struct fault fault = {0};
    struct replay replay;
    const struct replay_options options = {.dir = KEEPD_SOURCE_DIR "/bundled/keepd-nano",
                                           .path = "auto",
                                           .threads = 8,
                                           .ranks = 4,
                                           .kv_dtype = KERN_BF16,
                                           .rows_max = CHUNK,
                                           .positions_max = POSITIONS,
                                           .slots = 3};
    CHECK_MSG(replay_open(&options, &replay, &fault) == 0, "%s: %s", fault.field, fault.text);
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) live(&replay, policies[i]);
    replay_close(&replay);
    return 0;
}
