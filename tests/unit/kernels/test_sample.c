/* Tests kernels/cpu/sample.c. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/cpu/sample.h"

static struct kern_sample plain(void) {
    return (struct kern_sample){
        .temperature = 1, .top_p = 1, .repetition = 1, .top_count = -1, .forced = -1};
}

static struct kern_sampled run(const float *logits, int vocab, const struct kern_sample *params) {
    struct kern_sampled out;
    void *scratch = malloc(cpu_sample_scratch_bytes(vocab));
    cpu_sample_row(logits, vocab, params, scratch, &out);
    free(scratch);
    return out;
}

/* Known answers of Random123's kat_vectors for philox4x32-10: counter and key zero, then pi digits
 * do not fit our counter layout, so the zero vector is the external anchor. */
Test(sample, philox_known_answer) {
    cr_assert_eq(cpu_philox(0, 0, 0), 0x6627e8d5u);
}

Test(sample, philox_counts_every_input) {
    uint32_t base = cpu_philox(1, 2, 3);
    cr_assert_neq(base, cpu_philox(2, 2, 3));
    cr_assert_neq(base, cpu_philox(1ull << 32 | 1, 2, 3));
    cr_assert_neq(base, cpu_philox(1, 3, 3));
    cr_assert_neq(base, cpu_philox(1, 2, 4));
}

Test(sample, greedy_takes_lowest_id_of_ties) {
    float logits[] = {1, 5, 5, NAN, 2};
    struct kern_sample p = plain();
    p.temperature = 0;
    cr_assert_eq(run(logits, 5, &p).token, 1);
}

Test(sample, bias_and_ban) {
    float logits[] = {0, 1, 2};
    struct kern_sample p = plain();
    struct kern_logit_bias bias[] = {{0, 10}, {99, 1}, {-1, 1}};
    int32_t banned[] = {0, 77};
    p.temperature = 0;
    p.bias = bias;
    p.bias_count = 3;
    cr_assert_eq(run(logits, 3, &p).token, 0);
    p.banned = banned;
    p.banned_count = 2;
    cr_assert_eq(run(logits, 3, &p).token, 2);
}

/* Repetition counts prompt and output; presence and frequency the output only. */
Test(sample, penalties) {
    float logits[] = {4, 3, 2.9f, -1};
    int32_t history[] = {0, 0, 1, 1, 3}; /* prompt 0 0, output 1 1 3 */
    struct kern_sample p = plain();
    p.temperature = 0;
    p.history = history;
    p.prompt_count = 2;
    p.output_count = 3;
    p.presence = 0.5f;
    cr_assert_eq(run(logits, 4, &p).token, 0); /* 0 is only in the prompt */
    p.repetition = 2;                          /* 4/2 = 2, (3)/2 - .5 = 1, 2.9 untouched */
    cr_assert_eq(run(logits, 4, &p).token, 2);
    p.repetition = 1;
    p.presence = 0;
    p.frequency = -1; /* negative: favours repeats; 3 + 2 = 5 beats 4 */
    cr_assert_eq(run(logits, 4, &p).token, 1);
}

/* Frequencies of many draws against softmax, chi-square with a fixed seed list: deterministic. */
Test(sample, follows_softmax) {
    float logits[] = {0, 1, 2, -1, 0.5f};
    double p_true[5], sum = 0;
    int counts[5] = {0}, draws = 20000;
    for (int i = 0; i < 5; i++) sum += exp((double)logits[i]);
    for (int i = 0; i < 5; i++) p_true[i] = exp((double)logits[i]) / sum;
    struct kern_sample p = plain();
    for (int i = 0; i < draws; i++) {
        p.seed = 42;
        p.position = i;
        counts[run(logits, 5, &p).token]++;
    }
    double chi = 0;
    for (int i = 0; i < 5; i++) chi += pow(counts[i] - draws * p_true[i], 2) / (draws * p_true[i]);
    cr_assert_lt(chi, 18.5, "chi-square %f (4 degrees, 0.1%%)", chi);
}

static void expect_support(const float *logits, int vocab, struct kern_sample p, unsigned mask) {
    unsigned seen = 0;
    for (int i = 0; i < 3000; i++) {
        p.position = i;
        seen |= 1u << run(logits, vocab, &p).token;
    }
    cr_assert_eq(seen, mask, "seen %x, expected %x", seen, mask);
}

Test(sample, top_k_top_p_min_p_cut_the_support) {
    float logits[] = {logf(.4f), logf(.1f), logf(.3f), logf(.15f), logf(.05f)};
    struct kern_sample p = plain();
    expect_support(logits, 5, p, 0x1f);
    p.top_k = 2;
    expect_support(logits, 5, p, 1u << 0 | 1u << 2);
    p.top_k = 0;
    p.top_p = 0.69f; /* .4 + .3 crosses */
    expect_support(logits, 5, p, 1u << 0 | 1u << 2);
    p.top_p = 0.71f;
    expect_support(logits, 5, p, 1u << 0 | 1u << 2 | 1u << 3);
    p.top_k = 3; /* .4 .3 .15 of .85: .47 + .35 = .82 crosses .8 */
    p.top_p = 0.8f;
    expect_support(logits, 5, p, 1u << 0 | 1u << 2);
    p = plain();
    p.min_p = 0.3f; /* at least .12 */
    expect_support(logits, 5, p, 1u << 0 | 1u << 2 | 1u << 3);
}

/* Skipping noise that cannot win must not change who wins: compare with the plain definition. */
Test(sample, equals_the_definition) {
    enum { VOCAB = 500 };
    float logits[VOCAB];
    for (int trial = 0; trial < 200; trial++) {
        for (int i = 0; i < VOCAB; i++)
            logits[i] = (float)(cpu_philox(7, (uint32_t)trial, (uint32_t)i) % 4000) / 100.0f;
        struct kern_sample p = plain();
        p.seed = (uint64_t)trial * 77 + 1;
        p.position = trial;
        int best = -1;
        double top = -INFINITY;
        for (int i = 0; i < VOCAB; i++) {
            double u = (cpu_philox(p.seed, (uint32_t)trial, (uint32_t)i) + 0.5) * 0x1p-32;
            double value = (double)logits[i] - log(-log(u));
            if (value > top) {
                top = value;
                best = i;
            }
        }
        cr_assert_eq(run(logits, VOCAB, &p).token, best);
    }
}

Test(sample, logprobs_are_raw) {
    float logits[] = {1, 3, 2, 3};
    struct kern_logit_bias bias[] = {{0, 100}};
    struct kern_sample p = plain();
    p.bias = bias;
    p.bias_count = 1;
    p.top_count = 3;
    struct kern_sampled out = run(logits, 4, &p);
    double norm = log(exp(1) + exp(3) + exp(2) + exp(3));
    cr_assert_eq(out.token, 0);
    cr_assert_float_eq(out.logprob, 1 - norm, 1e-6);
    cr_assert_eq(out.rank, 4);
    cr_assert_eq(out.top_token[0], 1);
    cr_assert_eq(out.top_token[1], 3);
    cr_assert_eq(out.top_token[2], 2);
    cr_assert_float_eq(out.top_logprob[2], 2 - norm, 1e-6);
    p.forced = 2;
    out = run(logits, 4, &p);
    cr_assert_eq(out.token, 2);
    cr_assert_eq(out.rank, 3);
    p.top_count = 10; /* more than there are */
    out = run(logits, 4, &p);
    cr_assert_eq(out.top_token[4], -1);
}
