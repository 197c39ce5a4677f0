/* Writes what eviction was given and what it kept, as JSON lines, for the reference in
 * tests/python/policy_reference.py. One line per eviction; the entries of a stream in cache order.
 * Sequences go through several evictions, so that later ones begin with unequal streams. */
#include <stdio.h>

#include "base/check.h"
#include "paging/policy.h"
#include "tests/unit/kernels/cache_content.h"

enum { LAYERS = 4, HEADS = 3, STREAMS = LAYERS * HEADS, POSITIONS = 600, ROUNDS = 4 };

static struct held {
    int32_t lengths[STREAMS], positions[STREAMS * POSITIONS];
    float log_beta[STREAMS * POSITIONS];
} held;

static void read_held(const struct cpu_cache *cache) {
    struct kern_report report = {.lengths = held.lengths,
                                 .positions = held.positions,
                                 .log_beta = held.log_beta,
                                 .entries_max = STREAMS * POSITIONS};
    CHECK(cpu_cache_report(cache, 0, &report) == 0);
}

static void print_streams(const char *name, const float *floats, const int32_t *ints) {
    printf(", \"%s\": [", name);
    for (int stream = 0, at = 0; stream < STREAMS; stream++) {
        printf("%s[", stream > 0 ? ", " : "");
        for (int32_t i = 0; i < held.lengths[stream]; i++, at++) {
            if (i > 0) printf(", ");
            if (floats)
                printf("%.9g", (double)floats[at]); /* nine digits give the same float back */
            else
                printf("%d", ints[at]);
        }
        printf("]");
    }
    printf("]");
}

static void print_params(const struct kern_evict *due, const char *policy) {
    printf("{\"policy\": \"%s\", \"layers\": %d, \"heads\": %d, \"tokens\": %d, \"budget\": %d, "
           "\"sinks\": %d, \"recent\": %d, \"horizon\": ",
           policy, LAYERS, HEADS, due->tokens, due->keep, due->rule->sinks, due->rule->recent);
    printf(isinf(due->rule->horizon) ? "null" : "%.9g", (double)due->rule->horizon);
}

static void dump_round(struct cpu_cache *cache, const struct policy *policy, uint64_t *random,
                       int32_t *tokens, uint32_t salt) {
    static const float horizons[] = {1, 2, 16, 128, INFINITY};
    struct kern_span span = {.count = 40 + (int32_t)content_random(random, 100), .pos = *tokens};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = span.count};
    CHECK(cpu_cache_begin_step(cache, &batch) == 0);
    content_write(cache, 0, salt, span.count);
    *tokens += span.count;
    struct kern_rule rule = policy->rule;
    struct kern_evict due = {.tokens = *tokens, .rule = &rule};
    due.keep = 10 + (int32_t)content_random(random, 60);
    rule.sinks = (int32_t)content_random(random, 5);
    rule.recent = (int32_t)content_random(random, 6);
    uint32_t horizon = content_random(random, 5);
    if (policy->fields & POLICY_HORIZON) rule.horizon = horizons[horizon];
    print_params(&due, policy->name);
    read_held(cache);
    print_streams("positions", NULL, held.positions);
    print_streams("log_beta", held.log_beta, NULL);
    CHECK(cpu_cache_evict(cache, &due, 1) == 0);
    read_held(cache);
    print_streams("kept", NULL, held.positions);
    printf("}\n");
}

int main(void) {
    const struct kern_cache_options options = {.layers = LAYERS,
                                               .heads_q = HEADS,
                                               .heads_kv = HEADS,
                                               .head_dim = 64,
                                               .dtype = KERN_BF16,
                                               .pages = STREAMS * POSITIONS / 8,
                                               .slots = 1,
                                               .max_positions = POSITIONS};
    struct cpu_cache cache;
    uint64_t random = 1;
    CHECK(cpu_cache_open(&cache, &options, NULL) == 0);
    for (int index = 1; index < 4; index++) /* the bounded policies */
        for (uint32_t salt = 0; salt < 12; salt++) {
            int32_t tokens = 0;
            if ((salt & 3) == CONTENT_BROKEN) continue;
            for (int round = 0; round < ROUNDS; round++)
                dump_round(&cache, policy_at(index), &random, &tokens, salt);
            cpu_cache_release(&cache, 0);
        }
    cpu_cache_close(&cache);
    return 0;
}
