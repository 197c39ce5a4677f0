/* Tests engine/steps/dry.c beside its definition, in float64 and without any shortcut. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/splitmix.h"
#include "engine/steps/dry.h"

#define TOKENS 12

/* Token 9 holds two breakers, 10 and 11 are the halves of a long one. */
static size_t dry_test_bytes(const void *arg, int32_t id, const char **bytes) {
    static const char *const texts[TOKENS] = {"a", "b", "c", "d",    "ee",    "f",
                                              "g", "h", "i", ":x\n", "y<bre", "ak>z"};
    (void)arg;
    *bytes = texts[id];
    return strlen(texts[id]);
}

/* Only the first and the last two are in texts; there are more than the bits of a word. */
static const char *const breaker_texts[] = {
    "\n",  "<<",  "<a",  "<b<", "a:",  "aa:", "ab:", "ac:", "ad:", "ae:", "af:", "ag:",
    "ah:", "ai:", "aj:", "ak:", "al:", "b:",  "ba:", "bb:", "bc:", "bd:", "be:", "bf:",
    "bg:", "bh:", "bi:", "bj:", "bk:", "bl:", "c:",  "ca:", "cb:", "cc:", ":",   "<break>"};
enum { BREAKERS = sizeof breaker_texts / sizeof *breaker_texts };
static struct engine_stop breakers[BREAKERS];

static struct engine_request request_of(struct engine_dry dry) {
    for (int i = 0; i < BREAKERS; i++)
        breakers[i] = (struct engine_stop){breaker_texts[i], strlen(breaker_texts[i])};
    dry.breakers = breakers;
    dry.breaker_count = BREAKERS;
    return (struct engine_request){.dry = dry};
}

/* Where the text begins in which repetitions count: behind the token in which the last breaker
 * ends, of those that begin in the window. */
static int32_t begin_of(const int32_t *tokens, int32_t from, int32_t count) {
    int32_t begin = 0;
    for (int32_t i = from; i < count; i++) {
        bool ends = tokens[i] == 9 || (tokens[i] == 11 && i > from && tokens[i - 1] == 10);
        if (ends) begin = i + 1;
    }
    return begin;
}

/* The penalty of each token by the definition. */
static void reference(const struct engine_dry *r, const int32_t *tokens, int32_t count,
                      double penalty[TOKENS]) {
    int32_t n = r->last < 0 || count < r->last ? count : r->last;
    int32_t longest[TOKENS];
    for (int t = 0; t < TOKENS; t++) penalty[t] = 0, longest[t] = -1;
    int32_t most = count - begin_of(tokens, count - n, count);
    if (most > n) most = n;
    if (n <= r->allowed || most < r->allowed) return;
    for (int32_t place = count - n + 1; place < count; place++) {
        int32_t length = 0;
        while (place - 1 - length >= count - n &&
               tokens[place - 1 - length] == tokens[count - 1 - length])
            length++;
        if (length > most) length = most;
        if (length >= r->allowed && length > longest[tokens[place]])
            longest[tokens[place]] = length;
    }
    for (int t = 0; t < 9; t++) /* the others hold breakers, or halves of one */
        if (longest[t] >= 0) penalty[t] = r->multiplier * pow(r->base, longest[t] - r->allowed);
    for (int t = 10; t < TOKENS; t++)
        if (longest[t] >= 0) penalty[t] = r->multiplier * pow(r->base, longest[t] - r->allowed);
}

static void expect_penalties(struct dry *dry, const struct engine_dry *r, const int32_t *tokens,
                             int32_t count) {
    double wanted[TOKENS], found[TOKENS] = {0};
    int32_t bias_count;
    const struct kern_logit_bias *bias = dry_biases(dry, tokens, count, &bias_count);
    reference(r, tokens, count, wanted);
    for (int32_t i = 0; i < bias_count; i++) {
        cr_assert_eq(found[bias[i].token], 0, "token %d twice", bias[i].token);
        found[bias[i].token] = -(double)bias[i].bias;
    }
    for (int t = 0; t < TOKENS; t++)
        cr_assert(fabs(found[t] - wanted[t]) <= 1e-6 * fabs(wanted[t]),
                  "%d tokens: token %d has %.9g, expected %.9g", count, t, found[t], wanted[t]);
}

/* Texts that repeat themselves, token by token as they are generated, with windows shorter and
 * longer than the text. */
Test(dry, penalties_are_those_of_the_definition) {
    uint64_t seed = 1;
    for (int round = 0; round < 300; round++) {
        int32_t tokens[160], count = 0;
        struct engine_dry r = {.multiplier = 0.5f + (float)(round % 3),
                               .base = round % 4 ? 1.75f : 1,
                               .allowed = round % 5,
                               .last = round % 7 == 0 ? -1 : 8 + round % 90};
        struct engine_request request = request_of(r);
        struct dry dry;
        cr_assert_eq(dry_open(&dry, &request, dry_test_bytes, NULL, 160), 0);
        r = request.dry;
        const uint64_t words = 2 + (uint64_t)round % 10;
        while (count < 160) {
            if (count > 10 && splitmix_next(&seed) % 4 == 0) { /* something is said again */
                int32_t from = (int32_t)(splitmix_next(&seed) % (uint64_t)(count - 5));
                for (int i = 0; i < 8 && count < 160; i++) tokens[count++] = tokens[from + i % 5];
            } else {
                uint64_t token = splitmix_next(&seed) % words;
                tokens[count++] = round % 2 && splitmix_next(&seed) % 16 == 0
                                      ? (int32_t)(9 + splitmix_next(&seed) % 3)
                                      : (int32_t)token;
            }
            if (round % 3 == 1 && splitmix_next(&seed) % 3) continue; /* not every text is asked */
            expect_penalties(&dry, &r, tokens, count);
            if (round % 3 == 2) expect_penalties(&dry, &r, tokens, count);
        }
        dry_close(&dry);
    }
}

/* "a b c c b c y a b c": behind "a b c" came c, behind "b c" came y, behind "c" came c and b. */
Test(dry, the_example_of_the_sampler) {
    static const int32_t tokens[] = {0, 1, 2, 2, 1, 2, 8, 0, 1, 2};
    struct engine_bias own[] = {{7, 2.5f}};
    struct engine_request request = {.bias = own,
                                     .bias_count = 1,
                                     .dry = {.multiplier = 1, .base = 2, .allowed = 1, .last = 64}};
    struct dry dry;
    int32_t count;
    cr_assert_eq(dry_open(&dry, &request, dry_test_bytes, NULL, 10), 0);
    const struct kern_logit_bias *bias = dry_biases(&dry, tokens, 10, &count);
    cr_assert_eq(count, 4);
    static const float wanted[TOKENS] = {[1] = -1, [2] = -4, [7] = 2.5f, [8] = -2};
    cr_expect_eq(bias[0].token, 7, "the request's own are in front");
    for (int i = 0; i < 4; i++) cr_expect_eq(bias[i].bias, wanted[bias[i].token]);
    dry_close(&dry);
}

/* Texts, and the probabilities behind them of tokens that were equally likely, from llama.cpp's
 * tests of the sampler (test-sampling.cpp). */
static const struct {
    int32_t tokens[7], count, vocab;
    float multiplier;
    int32_t allowed;
    const char *breaker;
    double wanted[5];
} llama_cases[] = {
    {{0, 1}, 2, 4, 1, 2, NULL, {.25, .25, .25, .25}},
    {{0, 1, 2, 0, 1}, 5, 4, 1, 2, NULL, {.296923, .296923, .109232, .296923}},
    {{0, 1, 3, 4, 0, 1}, 6, 5, 1, 2, "d", {.2, .2, .2, .2, .2}},
    {{0, 1, 2, 0, 1}, 5, 5, 2, 2, NULL, {.241818, .241818, .032727, .241818, .241818}},
    {{0, 1, 2, 3, 4, 0, 1}, 7, 5, 1, 4, NULL, {.2, .2, .2, .2, .2}},
};

Test(dry, probabilities_are_those_of_llama_cpp) {
    for (size_t i = 0; i < sizeof llama_cases / sizeof *llama_cases; i++) {
        const struct engine_stop breaker = {llama_cases[i].breaker, 1};
        struct engine_request request = {.dry = {.multiplier = llama_cases[i].multiplier,
                                                 .base = 1.1f,
                                                 .allowed = llama_cases[i].allowed,
                                                 .last = llama_cases[i].count,
                                                 .breakers = &breaker,
                                                 .breaker_count = breaker.text ? 1 : 0}};
        struct dry dry;
        double weights[5], total = 0;
        int32_t count;
        cr_assert_eq(dry_open(&dry, &request, dry_test_bytes, NULL, llama_cases[i].count), 0);
        const struct kern_logit_bias *bias =
            dry_biases(&dry, llama_cases[i].tokens, llama_cases[i].count, &count);
        for (int t = 0; t < llama_cases[i].vocab; t++) weights[t] = 1;
        for (int32_t k = 0; k < count; k++) weights[bias[k].token] = exp((double)bias[k].bias);
        for (int t = 0; t < llama_cases[i].vocab; t++) total += weights[t];
        for (int t = 0; t < llama_cases[i].vocab; t++)
            cr_expect_float_eq(weights[t] / total, llama_cases[i].wanted[t], 1e-5);
        dry_close(&dry);
    }
}

Test(dry, numbers_stay_finite) {
    int32_t tokens[600] = {0};
    struct engine_request request = {
        .dry = {.multiplier = 100, .base = 100, .allowed = 0, .last = -1}};
    struct dry dry;
    int32_t count;
    cr_assert_eq(dry_open(&dry, &request, dry_test_bytes, NULL, 600), 0);
    const struct kern_logit_bias *bias = dry_biases(&dry, tokens, 600, &count);
    cr_assert_eq(count, 1);
    cr_expect(isfinite(bias[0].bias) && bias[0].bias < -1e30f);
    dry_close(&dry);
}

Test(dry, requests_without_it) {
    static const struct engine_dry none[] = {{.multiplier = 0, .base = 2, .last = 64},
                                             {.multiplier = 1, .base = 0.5f, .last = 64},
                                             {.multiplier = 1, .base = 2, .last = 0},
                                             {.multiplier = NAN, .base = 2, .last = 64}};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        struct engine_request request = request_of(none[i]);
        struct dry dry;
        cr_assert_eq(dry_open(&dry, &request, dry_test_bytes, NULL, 10), 0);
        cr_expect_null(dry.request);
        dry_close(&dry);
    }
}

Test(dry, short_memory) {
    struct engine_request request =
        request_of((struct engine_dry){.multiplier = 1, .base = 2, .last = 64});
    struct dry dry;
    for (long n = 0; n < 4; n++) {
        mem_fail_after(n);
        cr_expect_eq(dry_open(&dry, &request, dry_test_bytes, NULL, 10), ERR_NOMEM);
        cr_expect_null(dry.request);
    }
    mem_fail_after(-1);
}
