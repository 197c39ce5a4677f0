/* Tests kernels/cpu/sample.c. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    struct kern_seen seen[] = {{0, 0}, {1, 2}, {3, 1}}; /* prompt 0 0, output 1 1 3 */
    struct kern_sample p = plain();
    p.temperature = 0;
    p.seen = seen;
    p.seen_count = 3;
    p.presence = 0.5f;
    cr_assert_eq(run(logits, 4, &p).token, 0); /* 0 is only in the prompt */
    p.repetition = 2;                          /* 4/2 = 2, (3)/2 - .5 = 1, 2.9 untouched */
    cr_assert_eq(run(logits, 4, &p).token, 2);
    p.repetition = 1;
    p.presence = 0;
    p.frequency = -1; /* negative: favours repeats; 3 + 2 = 5 beats 4 */
    cr_assert_eq(run(logits, 4, &p).token, 1);
}

/* A repeated token becomes less likely also where its logit is negative. */
Test(sample, repetition_lowers_negative_logits) {
    float logits[] = {-2, -3};
    struct kern_seen seen[] = {{0, 0}};
    struct kern_sample p = plain();
    p.temperature = 0;
    p.seen = seen;
    p.seen_count = 1;
    p.repetition = 2;
    cr_assert_eq(run(logits, 2, &p).token, 1);
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

/* Frequencies of many draws against the distribution that XTC's definition gives: with probability
 * 0.4 the tokens .4 and .3 are left out, because .15 is the last that reaches .12. */
Test(sample, xtc_has_its_distribution) {
    static const double whole[] = {.4, .1, .3, .15, .05};
    enum { DRAWS = 40000 };
    float logits[5];
    double chi = 0;
    int counts[5] = {0};
    struct kern_sample p = plain();
    for (int i = 0; i < 5; i++) logits[i] = (float)log(whole[i]);
    p.seed = 42;
    p.xtc_probability = 0.4f;
    p.xtc_threshold = 0.12f;
    for (p.position = 0; p.position < DRAWS; p.position++) counts[run(logits, 5, &p).token]++;
    for (int i = 0; i < 5; i++) {
        double rest = i == 0 || i == 2 ? 0 : whole[i] / (.1 + .15 + .05);
        double wanted = DRAWS * (0.6 * whole[i] + 0.4 * rest);
        chi += pow(counts[i] - wanted, 2) / wanted;
    }
    cr_assert_lt(chi, 18.5, "chi-square %f (4 degrees, 0.1%%)", chi);
}

/* The threshold is about what the cuts before have left, and one token alone is never left out. */
Test(sample, xtc_cuts_the_support) {
    float logits[] = {logf(.4f), logf(.1f), logf(.3f), logf(.15f), logf(.05f)};
    struct kern_sample p = plain();
    p.xtc_probability = 1;
    p.xtc_threshold = 0.12f;
    expect_support(logits, 5, p, 1u << 3 | 1u << 1 | 1u << 4);
    p.xtc_threshold = 0.35f;
    expect_support(logits, 5, p, 0x1f);
    p.top_k = 2; /* .57 and .43 */
    expect_support(logits, 5, p, 1u << 2);
    p.top_k = 0;
    p.min_p = 0.7f;
    expect_support(logits, 5, p, 1u << 2);
    p.min_p = 0;
    p.xtc_threshold = 0.6f;
    expect_support(logits, 5, p, 0x1f);
    p.xtc_threshold = 0; /* all but the least likely one */
    expect_support(logits, 5, p, 1u << 4);
    p.temperature = 0;
    expect_support(logits, 5, p, 1u << 0);
}

/* llama.cpp's tests of the sampler (test-sampling.cpp) name these supports. */
Test(sample, xtc_leaves_what_llama_cpp_leaves) {
    static const float thresholds[] = {0.09f, 0.19f, 0.29f, 0.39f};
    static const uint32_t supports[] = {0x8, 0xc, 0xe, 0xf};
    const float logits[] = {logf(.4f), logf(.3f), logf(.2f), logf(.1f)};
    for (int i = 0; i < 4; i++) {
        struct kern_sample p = plain();
        p.xtc_probability = 1;
        p.xtc_threshold = thresholds[i];
        expect_support(logits, 4, p, supports[i]);
    }
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

/* ---- Against the plain definition: sort everything, no shortcut ---- */

struct candidate {
    float logit;
    int32_t id;
};

static int by_rank(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id - y->id;
}

/* XTC as its definition says: sorted tokens whose probability reaches the threshold, less the last
 * of them, are left out. Returns the first that is not. */
static int defined_first(const struct candidate *all, int count, const struct kern_sample *p) {
    double drawn = (cpu_philox(p->seed, (uint32_t)p->position, UINT32_MAX) + 0.5) * 0x1p-32;
    double total = 0;
    int reach = 0;
    if (!(p->xtc_probability > 0) || drawn >= (double)p->xtc_probability) return 0;
    for (int i = 0; i < count; i++) total += exp((double)all[i].logit - (double)all[0].logit);
    for (int i = 0; i < count && all[i].logit > -INFINITY; i++)
        if (exp((double)all[i].logit - (double)all[0].logit) / total >= (double)p->xtc_threshold)
            reach = i + 1;
    return reach > 0 ? reach - 1 : 0;
}

static int32_t defined_token(const float *logits, int vocab, const struct kern_sample *p) {
    struct candidate *all = malloc((size_t)vocab * sizeof *all);
    int count = vocab;
    for (int i = 0; i < vocab; i++) {
        float x = logits[i];
        for (int b = 0; b < p->bias_count; b++)
            if (p->bias[b].token == i) x += p->bias[b].bias;
        for (int b = 0; b < p->banned_count; b++)
            if (p->banned[b] == i) x = -INFINITY;
        all[i] = (struct candidate){p->temperature > 0 ? x / p->temperature : x, i};
    }
    qsort(all, (size_t)vocab, sizeof *all, by_rank);
    int32_t best = all[0].id;
    if (p->temperature > 0) {
        if (p->top_k > 0 && p->top_k < count) count = p->top_k;
        double total = 0, mass = 0, top = -INFINITY;
        best = INT32_MAX;
        for (int i = 0; i < count; i++) total += exp((double)all[i].logit - (double)all[0].logit);
        for (int i = 0; p->top_p < 1 && i < count; i++) {
            mass += exp((double)all[i].logit - (double)all[0].logit);
            if (mass >= (double)p->top_p * total) count = i + 1;
        }
        for (int i = 0; i < count; i++)
            if (p->min_p > 0 && all[i].logit < all[0].logit + logf(p->min_p)) count = i;
        for (int i = defined_first(all, count, p); i < count; i++) {
            uint32_t noise = cpu_philox(p->seed, (uint32_t)p->position, (uint32_t)all[i].id);
            double value = (double)all[i].logit - log(-log(((double)noise + 0.5) * 0x1p-32));
            if (value < top || (value == top && all[i].id > best)) continue;
            top = value;
            best = all[i].id;
        }
    }
    free(all);
    return best;
}

static float random_unit(uint32_t stream, int i) {
    return (float)(cpu_philox(99, stream, (uint32_t)i) >> 8) * 0x1p-24f;
}

/* Fills logits of a given shape: flat, peaked, many equal, huge, with impossible tokens. */
static void fill_logits(float *logits, int vocab, int shape, uint32_t stream) {
    for (int i = 0; i < vocab; i++) {
        float u = random_unit(stream, i);
        logits[i] = shape == 0   ? u
                    : shape == 1 ? 30 * u * u * u - 5
                    : shape == 2 ? floorf(4 * u)
                    : shape == 3 ? 2e4f * u
                                 : (u < 0.5f ? -INFINITY : 8 * u);
    }
}

Test(sample, every_setting_equals_the_definition) {
    static const int vocabs[] = {1, 2, 15, 16, 17, 100, 1000, 5003};
    static const float temperatures[] = {0, 1, 0.3f, 1.7f, 1e-3f};
    static const float top_ps[] = {1, 0.95f, 0.5f, 0.999999f, 0};
    static const int top_ks[] = {0, 1, 3, 20, 4000};
    static const float min_ps[] = {0, 0.05f, 1};
    static const float xtc_probabilities[] = {0, 1, 0.5f};
    static const float xtc_thresholds[] = {0.1f, 0, 0.02f, 0.6f};
    struct kern_logit_bias bias[] = {{0, 3}, {7, -2.5f}};
    int32_t banned[] = {1, 5};
    float *logits = malloc(5003 * sizeof *logits);
    for (uint32_t trial = 0; trial < 3000; trial++) {
        int vocab = vocabs[trial % 8];
        struct kern_sample p = plain();
        uint32_t pick = cpu_philox(5, trial, 0);
        p.temperature = temperatures[pick % 5];
        p.top_p = top_ps[pick / 5 % 5];
        p.top_k = top_ks[pick / 25 % 5];
        p.min_p = min_ps[pick / 125 % 3];
        p.xtc_probability = xtc_probabilities[pick / 7500 % 3];
        p.xtc_threshold = xtc_thresholds[pick / 22500 % 4];
        p.seed = trial * 0x123456789ull;
        p.position = (int32_t)trial;
        if (pick / 375 % 2) {
            p.bias = bias;
            p.bias_count = 2;
        }
        if (pick / 750 % 2 && vocab > 2) {
            p.banned = banned;
            p.banned_count = 2;
        }
        fill_logits(logits, vocab, (int)(pick / 1500 % 5), trial);
        cr_assert_eq(run(logits, vocab, &p).token, defined_token(logits, vocab, &p),
                     "trial %u vocab %d: T %g top_k %d top_p %g min_p %g xtc %g %g", trial, vocab,
                     (double)p.temperature, p.top_k, (double)p.top_p, (double)p.min_p,
                     (double)p.xtc_probability, (double)p.xtc_threshold);
    }
    free(logits);
}

/* A temperature so low that logit / temperature overflows is greedy, not the lowest id. */
Test(sample, vanishing_temperature_is_greedy) {
    float logits[] = {1, 2, 3, -4}, low[] = {-3, -1, -2, -4};
    struct kern_sample p = plain();
    p.temperature = 1e-42f;
    cr_assert_eq(run(logits, 4, &p).token, 2);
    cr_assert_eq(run(low, 4, &p).token, 1);
}

/* Broken models give NaN: a token comes out all the same, and numbers win. */
Test(sample, survives_nan) {
    float none[20], one[20];
    for (int i = 0; i < 20; i++) none[i] = one[i] = NAN;
    one[17] = -5;
    for (int setting = 0; setting < 8; setting++) {
        struct kern_sample p = plain();
        p.temperature = setting & 1 ? 0.7f : 0;
        p.top_k = setting & 2 ? 5 : 0;
        p.top_p = setting & 4 ? 0.9f : 1;
        p.top_count = 3;
        cr_assert_eq(run(none, 20, &p).token, 0);
        struct kern_sampled out = run(one, 20, &p);
        cr_assert_eq(out.token, 17);
        cr_assert(out.rank == 1 && out.top_token[0] == 17 && out.top_token[1] == 0);
    }
}

Test(sample, scores_equal_the_definition) {
    enum { VOCAB = 3001 };
    static float logits[VOCAB];
    static struct candidate sorted[VOCAB];
    for (uint32_t trial = 0; trial < 40; trial++) {
        double sum = 0;
        fill_logits(logits, VOCAB, (int)(trial % 3), trial);
        for (int i = 0; i < VOCAB; i++) {
            sorted[i] = (struct candidate){logits[i], i};
            sum += exp((double)logits[i]);
        }
        qsort(sorted, VOCAB, sizeof *sorted, by_rank);
        struct kern_sample p = plain();
        p.top_count = (int32_t)(trial % (KERN_TOP_MAX + 1));
        int rank = (int)(trial * 71 % VOCAB);
        p.forced = sorted[rank].id;
        struct kern_sampled out = run(logits, VOCAB, &p);
        cr_assert_eq(out.token, p.forced);
        cr_assert_eq(out.rank, rank + 1);
        cr_assert_float_eq(out.logprob, (double)logits[p.forced] - log(sum), 1e-5);
        for (int i = 0; i < p.top_count; i++) {
            cr_assert_eq(out.top_token[i], sorted[i].id);
            cr_assert_float_eq(out.top_logprob[i], (double)sorted[i].logit - log(sum), 1e-5);
        }
    }
}

/* Logits stay as they are: other rows and the scores read them. */
Test(sample, leaves_logits_alone) {
    float logits[40], copy[40];
    struct kern_logit_bias bias[] = {{3, 9}};
    struct kern_seen seen[] = {{1, 1}, {2, 1}, {3, 1}};
    fill_logits(logits, 40, 1, 1);
    memcpy(copy, logits, sizeof copy);
    struct kern_sample p = plain();
    p.temperature = 0.5f;
    p.repetition = 1.5f;
    p.seen = seen;
    p.seen_count = 3;
    p.bias = bias;
    p.bias_count = 1;
    p.top_p = 0.9f;
    p.top_count = 2;
    run(logits, 40, &p);
    cr_assert_eq(memcmp(copy, logits, sizeof copy), 0);
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
