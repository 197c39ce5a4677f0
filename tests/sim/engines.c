#include "tests/sim/engines.h"

#include <unistd.h>

#include "engine/engine.h"
#include "kernels/cpu/cpu.h"

atomic_bool engines_failing, engines_holding;
atomic_int engines_samples, engines_turns, engines_wakes;

/* Copies: a backend's own table ends with it, and several engines may be open. Each form is written
 * once, before the first engine that uses it has a thread. */
static struct kern_ops wrapped[2];
static const struct kern_ops *form = &wrapped[0];
static int spared;
static int (*real_sample)(struct kern *, const float *, int, int, const struct kern_sample *,
                          struct kern_sampled *);
static void (*real_cache_stats)(struct kern *, struct kern_cache_stats *);

int __real_cpu_open(const struct cpu_options *options, struct kern **out, struct fault *fault);
int __wrap_cpu_open(const struct cpu_options *options, struct kern **out, struct fault *fault);

void engines_spare(int n) {
    spared = n;
}

void engines_lesser(bool lesser) {
    form = &wrapped[lesser];
}

void engines_wake(void *arg) {
    (void)arg;
    atomic_fetch_add(&engines_wakes, 1);
}

static int sample_or_fail(struct kern *kern, const float *logits, int rows, int vocab,
                          const struct kern_sample *params, struct kern_sampled *out) {
    atomic_fetch_add(&engines_samples, 1);
    while (atomic_load(&engines_holding)) usleep(500);
    if (atomic_load(&engines_failing)) return ERR_DEVICE;
    return real_sample(kern, logits, rows, vocab, params, out);
}

static void count_turn(struct kern *kern, struct kern_cache_stats *stats) {
    atomic_fetch_add(&engines_turns, 1);
    real_cache_stats(kern, stats);
}

static int without_attention(const struct kern_rule *rule, struct fault *fault) {
    if (rule->score != KERN_SCORE_ATTENTION) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "observe", "no 'observe' in this backend");
}

static void wrap(const struct kern_ops *real) {
    if (wrapped[0].sample) return;
    real_sample = real->sample;
    real_cache_stats = real->cache_stats;
    wrapped[0] = *real;
    wrapped[0].activations = NULL; /* the instance's, and this table outlives it */
    wrapped[0].sample = sample_or_fail;
    wrapped[0].cache_stats = count_turn;
    wrapped[1] = wrapped[0];
    wrapped[1].rule_check = without_attention;
}

int __wrap_cpu_open(const struct cpu_options *options, struct kern **out, struct fault *fault) {
    int rc = __real_cpu_open(options, out, fault);
    if (rc != 0 || spared-- > 0) return rc;
    wrap((*out)->ops);
    (*out)->ops = form;
    return 0;
}

int engines_submit(struct engine *engine, struct engine_job *job) {
    struct fault fault = {0};
    int rc = engine_check(engine, job, &fault);
    return rc == 0 ? engine_submit(engine, job) : rc;
}
