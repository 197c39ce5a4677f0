#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "paging/names.h"
#include "paging/policy.h"

static struct kv_params defaults(const char *name) {
    const struct policy *policy = policy_find(name);
    cr_assert_not_null(policy);
    struct kv_params params = {.budget = 1024, .buffer = 128, .chunk = 512};
    kv_params_set_policy(&params, policy);
    return params;
}

/* Expects a refusal that names `field`; NULL expects acceptance. */
static void expect(const struct kv_params *params, const char *field) {
    struct fault fault = {0};
    int rc = kv_params_check(params, &fault);
    if (!field) {
        cr_assert_eq(rc, 0, "%s: %s", fault.field, fault.text);
        return;
    }
    cr_assert_eq(rc, ERR_INVALID, "%s was accepted", field);
    cr_assert_str_eq(fault.field, field);
    cr_assert_neq(fault.text[0], '\0');
}

Test(policy, rows_have_unique_names_and_valid_defaults) {
    int count = 0;
    for (const struct policy *policy; (policy = policy_at(count)); count++) {
        cr_assert_eq(policy_find(policy->name), policy, "%s", policy->name);
        cr_assert_not_null(policy->summary);
        struct kv_params params = defaults(policy->name);
        expect(&params, NULL);
    }
    cr_assert(count > 1);
    cr_assert_null(policy_at(-1));
    cr_assert_null(policy_find("nothing"));
    cr_assert_null(policy_find(""));
}

Test(policy, texts_list_every_row) {
    char all[512] = "";
    for (int i = 0; policy_at(i); i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "",
                 policy_at(i)->name);
    cr_assert_str_eq(POLICY_NAMES, all);
}

Test(policy, what_gates_were_trained_for_is_the_default_of_global_alone) {
    const struct kv_trained some = {
        .named = POLICY_HORIZON | POLICY_RECENT, .horizon = 1, .recent = 5};
    const struct kv_trained all = {.named = some.named | POLICY_SINKS | POLICY_PARITY,
                                   .horizon = INFINITY,
                                   .recent = 6,
                                   .sinks = 7,
                                   .parity = true};
    struct kv_params params = defaults("global");
    kv_params_set_trained(&params, &(struct kv_trained){.horizon = 9, .sinks = 9});
    cr_assert(params.rule.horizon == 128 && params.rule.sinks == 4 && params.rule.recent == 16);
    kv_params_set_trained(&params, &some);
    cr_assert(params.rule.horizon == 1 && params.rule.sinks == 4 && params.rule.recent == 5);
    cr_assert_not(params.rule.published);
    kv_params_set_trained(&params, &all);
    cr_assert(isinf(params.rule.horizon) && params.rule.sinks == 7 && params.rule.recent == 6);
    cr_assert(params.rule.published);
    expect(&params, NULL);
    /* Defaults of the gates give way like others: a small budget reduces them. */
    params.budget = 8;
    kv_params_fit(&params, 0);
    cr_assert(params.rule.sinks == 7 && params.rule.recent == 1);
    for (int i = 0; policy_at(i); i++) {
        if (policy_at(i) == policy_find("global")) continue;
        struct kv_params own = defaults(policy_at(i)->name), other = own;
        kv_params_set_trained(&other, &all);
        cr_assert(kv_params_equal(&own, &other), "%s", policy_at(i)->name);
    }
}

Test(policy, each_row_is_the_method_it_names) {
    const struct policy *full = policy_find("full"), *streaming = policy_find("streaming");
    const struct policy *trimkv = policy_find("trimkv"), *global = policy_find("global");
    cr_assert(!full->bounded && streaming->bounded && trimkv->bounded && global->bounded);
    cr_assert_eq(full->needs | streaming->needs, 0);
    cr_assert_eq(trimkv->needs & global->needs, POLICY_NEEDS_GATES);
    cr_assert_eq(streaming->rule.score, KERN_SCORE_RECENCY);
    cr_assert_eq(trimkv->rule.score, KERN_SCORE_RETENTION);
    cr_assert_eq(global->rule.score, KERN_SCORE_RETENTION);
    cr_assert_eq(trimkv->rule.scope, KERN_SCOPE_STREAM);
    cr_assert_eq(global->rule.scope, KERN_SCOPE_SEQUENCE);
    cr_assert_eq(streaming->rule.sinks, 4);
    cr_assert_eq(trimkv->rule.horizon, 1);
    cr_assert_eq(global->rule.horizon, 128);
    cr_assert(global->rule.sinks == 4 && global->rule.recent == 16);
}

Test(policy, wrong_parameters_name_their_field) {
    static const struct {
        const char *field;
        int32_t budget, buffer, chunk, sinks,
            recent; /* a value other than KEEP replaces the default */
        float horizon;
    } cases[] = {
#define KEEP INT32_MAX
        {"kv.budget", 0, KEEP, KEEP, KEEP, KEEP, 128},
        {"kv.budget", -1, KEEP, KEEP, KEEP, KEEP, 128},
        {"kv.buffer", KEEP, -1, KEEP, KEEP, KEEP, 128},
        {"kv.chunk", KEEP, KEEP, 0, KEEP, KEEP, 128},
        {"kv.sinks", KEEP, KEEP, KEEP, -1, KEEP, 128},
        {"kv.recent", KEEP, KEEP, KEEP, KEEP, -1, 128},
        {"kv.sinks", 3, KEEP, KEEP, KEEP, KEEP, 128},
        {"kv.recent", 8, KEEP, KEEP, 4, 5, 128},
        {"kv.recent", 8, KEEP, KEEP, 4, INT32_MAX - 1, 128},
        {"kv.horizon", KEEP, KEEP, KEEP, KEEP, KEEP, 0.5f},
        {"kv.horizon", KEEP, KEEP, KEEP, KEEP, KEEP, -INFINITY},
        {"kv.horizon", KEEP, KEEP, KEEP, KEEP, KEEP, NAN},
        {NULL, 8, KEEP, KEEP, 4, 4, 128},
        {NULL, 1, 0, 1, 0, 0, 1},
        {NULL, KEEP, KEEP, KEEP, KEEP, KEEP, INFINITY},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kv_params params = defaults("global");
        if (cases[i].budget != KEEP) params.budget = cases[i].budget;
        if (cases[i].buffer != KEEP) params.buffer = cases[i].buffer;
        if (cases[i].chunk != KEEP) params.chunk = cases[i].chunk;
        if (cases[i].sinks != KEEP) params.rule.sinks = cases[i].sinks;
        if (cases[i].recent != KEEP) params.rule.recent = cases[i].recent;
        params.rule.horizon = cases[i].horizon;
        expect(&params, cases[i].field);
    }
}

/* Expects `policy` to take or refuse one of its parameters, naming it. */
static void choose(const char *policy, const char *name, double number, const char *text,
                   bool taken) {
    struct kv_params params = defaults(policy);
    struct fault fault = {0};
    char field[32];
    int rc = kv_params_choose(&params, name, number, text, &fault);
    cr_assert_eq(rc, taken ? 0 : ERR_INVALID, "%s %s: %s", policy, name, fault.text);
    snprintf(field, sizeof field, "kv.%s", name);
    if (!taken) cr_assert_str_eq(fault.field, field);
    struct kv_params before = defaults(policy);
    cr_assert_eq(kv_params_equal(&params, &before), !taken, "%s %s", policy, name);
}

Test(policy, parameters_belong_to_policies) {
    choose("trimkv", "horizon", 2, NULL, false); /* defined with a horizon of one */
    choose("global", "horizon", 2, NULL, true);
    choose("global", "horizon", INFINITY, NULL, true);
    choose("global", "horizon", 0.5, NULL, false);
    choose("global", "horizon", NAN, NULL, false);
    choose("streaming", "horizon", 7, NULL, false); /* recency has none */
    choose("gkv", "window", 8, NULL, true);
    choose("gkv", "window", 8.5, NULL, false);
    choose("gkv", "window", 0, NULL, false);
    choose("gkv", "window", KERN_WINDOW_MAX + 1, NULL, false);
    choose("h2o", "window", 8, NULL, false);
    choose("gkv", "history", 0, "sum", true);
    choose("gkv", "history", 0, "all", false);
    choose("gkv", "history", 1, NULL, false);
    choose("gkv", "lambda", 1.5, NULL, false);
    choose("gkv", "lambda", 1, NULL, true);
    choose("gkv", "decay", 0.5, "half", false);
    choose("gkv", "decay", 0.5, NULL, true);
    choose("rkv", "parity", 1, NULL, true);
    choose("rkv", "variant", 0, "paper", true);
    choose("global", "parity", 1, NULL, true);
    choose("global", "floor", 0.25, NULL, true);
    choose("global", "threshold", 0.8, NULL, true);
    choose("d2o", "merge", 0, "code", true);
    choose("d2o", "merge", 0, "ems", false);
    choose("d2o", "nothing", 0, NULL, false);
    choose("d2o", "tau", 0.5, NULL, false); /* d2o computes its threshold from similarities */
    choose("ems", "tau", 0.5, NULL, true);
    choose("ems", "tau", 1.5, NULL, false);
    choose("ems", "gamma", 1, NULL, true);
    choose("ems", "gamma", 0.5, NULL, false);
    choose("cake", "tau1", 1.6, NULL, true);
    choose("cake", "tau2", 0.4, NULL, true);
    choose("cake", "tau2", 0, NULL, false);
    choose("snapkv", "tau1", 1, NULL, false);
    choose("lagkv", "lag", 64, NULL, true);
    choose("lagkv", "lag", 1, NULL, false);
    choose("lagkv", "lag", KERN_LAG_MAX + 1, NULL, false);
    choose("ems", "gamma", KERN_GAMMA_MAX + 1, NULL, false);
    choose("ems", "positions", 0, NULL, true);
    choose("ems", "window", 16, NULL, true);
    choose("ems", "merge", 0, "paper", false);
}

Test(policy, a_refused_word_names_those_there_are) {
    struct kv_params params = defaults("gkv");
    struct fault fault = {0};
    cr_assert_eq(kv_params_choose(&params, "history", 0, "all", &fault), ERR_INVALID);
    cr_assert_str_eq(fault.text, "must be 'none', 'max', 'mean' or 'sum'");
}

/* Recent entries that were not named follow the budget or the window, and give way first. */
Test(policy, recent_entries_fit) {
    static const struct {
        const char *policy;
        int32_t budget, window, sinks, recent;
        unsigned named;
    } cases[] = {
        {"h2o", 100, 0, 4, 50, 0},
        {"d2o", 100, 0, 4, 25, 0},
        {"gkv", 100, 16, 4, 16, 0},
        {"gkv", 100, 40, 4, 40, 0},
        {"gkv", 10, 16, 4, 6, 0},
        {"gkv", 3, 16, 3, 0, 0},
        {"morphkv", 100, 10, 4, 11, 0},
        {"global", 2, 0, 2, 0, 0},
        {"cake", 20, 32, 4, 16, 0},
        {"ems", 100, 32, 4, 32, 0},
        {"keydiff", 256, 0, 4, 32, 0},
        {"keydiff", 64, 0, 4, 16, 0},
        {"expected_attention", 36, 64, 4, 9, 0},
        {"ems", 100, 16, 4, 16, 0},
        {"gkv", 10, 16, 0, 16, POLICY_RECENT},
        {"gkv", 18, 16, 2, 16, POLICY_RECENT},
        {"gkv", 18, 16, 4, 16, POLICY_RECENT | POLICY_SINKS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kv_params params = defaults(cases[i].policy);
        params.budget = cases[i].budget;
        params.rule.observe.window = cases[i].window;
        kv_params_fit(&params, cases[i].named);
        cr_assert_eq(params.rule.sinks, cases[i].sinks, "case %zu", i);
        cr_assert_eq(params.rule.recent, cases[i].recent, "case %zu: %d", i, params.rule.recent);
    }
}

Test(policy, full_ignores_the_budget) {
    struct kv_params params = defaults("full"), other = params;
    params.budget = 0;
    params.rule.sinks = 100;
    expect(&params, NULL);
    cr_assert(kv_params_equal(&params, &other));
}

Test(policy, parameters_differ_where_the_kept_entries_could) {
    struct kv_params a = defaults("global");
    cr_assert(kv_params_equal(&a, &a));
#define DIFFERS(field, value)                                                                      \
    do {                                                                                           \
        struct kv_params b = a;                                                                    \
        b.field = (value);                                                                         \
        cr_assert_not(kv_params_equal(&a, &b), #field);                                            \
    } while (0)
    DIFFERS(policy, policy_find("trimkv"));
    DIFFERS(budget, 1023);
    DIFFERS(buffer, 127);
    DIFFERS(chunk, 511);
    DIFFERS(rule.sinks, 3);
    DIFFERS(rule.recent, 1);
    DIFFERS(rule.horizon, 127);
}

/* ---- Cost of evictions ---- */

/* The formula of policy.h, in twice as many rows, without rounding. */
static double half_rows(const struct kv_params *params, double held) {
    const struct kern_rule *rule = &params->rule;
    bool classes = rule->merge == KERN_MERGE_CLASSES;
    double goes = held - params->budget, window = rule->observe.window;
    double halves = 2 + window * (classes ? (double)rule->classes.gamma : 1);
    bool pairs =
        rule->redundancy.measure == KERN_MEASURE_LIKENESS && rule->redundancy.threshold < 1;
    bool lags = rule->redundancy.measure == KERN_MEASURE_LAG;
    if (rule->redundancy.on) halves += lags ? 4 : pairs ? held : 1;
    if (classes) halves += 2 * goes;
    if (rule->merge == KERN_MERGE_PAPER || rule->merge == KERN_MERGE_CODE) halves += goes;
    return halves * (held < KV_ROW_ENTRIES ? held / KV_ROW_ENTRIES : 1);
}

static bool is_cheap(const struct kv_params *params, int32_t between) {
    double tokens = between > 0 ? between : 1;
    double held = params->budget + tokens, queries = params->rule.observe.window;
    double rows = ceil(half_rows(params, held) / 2);
    if (params->rule.observe.expect > 0)
        rows += ceil(queries * KV_EXPECT_ENTRIES / (held > KV_ROW_ENTRIES ? held : KV_ROW_ENTRIES));
    return rows <= KV_EVICTION_ROWS_MAX * tokens;
}

/* For every policy, accepted parameters keep the bound, and only parameters beyond it are rejected.
 */
Test(policy, evictions_cost_no_more_than_stated) {
    static const int32_t budgets[] = {1, 64, 100, 1024, 4000, 4096, 16384, 1 << 20, INT32_MAX};
    static const int32_t tokens[] = {0, 1, 2, 16, 31, 32, 33, 128, 512, 8192, INT32_MAX};
    int refused = 0, count = sizeof tokens / sizeof *tokens;
    for (int index = 0; policy_at(index); index++)
        for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++)
            for (int i = 0; i < count * count; i++) {
                struct kv_params params = defaults(policy_at(index)->name);
                struct fault fault = {0};
                params.budget = budgets[b];
                params.buffer = tokens[i / count];
                params.chunk = tokens[i % count] > 0 ? tokens[i % count] : 1;
                params.rule.sinks = params.rule.recent = 0;
                bool buffer = is_cheap(&params, params.buffer),
                     chunk = is_cheap(&params, params.chunk);
                bool expected = !params.policy->bounded || (buffer && chunk);
                int rc = kv_params_check(&params, &fault);
                cr_assert_eq(rc, expected ? 0 : ERR_INVALID, "%s %d %d %d: %s", params.policy->name,
                             params.budget, params.buffer, params.chunk, fault.text);
                refused += !expected;
                if (expected) continue;
                cr_assert_str_eq(fault.field, buffer ? "kv.chunk" : "kv.buffer");
                cr_assert(strstr(fault.text, "kv.budget"), "%s", fault.text);
            }
    cr_assert_gt(refused, 0);
}

/* Queries are rotated ahead at every eviction, also where hardly anything is held: measured, 64
 * queries take as long as 30 rows. */
Test(policy, queries_to_come_cost_the_same_for_few_entries) {
    struct kv_params params = defaults("expected_attention");
    params.budget = 1;
    params.rule.sinks = params.rule.recent = 0;
    cr_assert_eq(kv_eviction_rows(&params, 2, KV_ROW_ENTRIES), 1 + 64 * 512 / 1024);
    cr_assert_eq(kv_eviction_rows(&params, 2, 1), 1 + 64 / 2 + 64 * 512 / 2);
    cr_assert_eq(kv_eviction_rows(&params, 4096, KV_ROW_ENTRIES), 1 + 64 / 2 + 64 * 512 / 4096);
    params.rule.observe.expect = 0;
    cr_assert_eq(kv_eviction_rows(&params, 2, KV_ROW_ENTRIES), 1);
    params = defaults("expected_attention");
    params.budget = 1024;
    params.rule.sinks = params.rule.recent = 0;
    params.chunk = 1;
    expect(&params, "kv.chunk");
}

/* Every token of the prompt and of the answer evicts 4,000 entries, each compared with all. */
Test(policy, an_eviction_for_every_token_is_refused_where_it_costs_much) {
    struct kv_params params = defaults("rkv");
    params.budget = 4000;
    params.chunk = 1;
    params.buffer = 0;
    expect(&params, "kv.buffer");
    params.buffer = 128;
    expect(&params, "kv.chunk");
    params.chunk = 512;
    expect(&params, NULL);
    cr_assert_eq(kv_eviction_rows(&params, 4128, KV_ROW_ENTRIES), 2069); /* 1 + 8/2 + 4128/2 */
    params = defaults("rkv");
    params.budget = 16; /* little to compare */
    params.rule.sinks = params.rule.recent = 0;
    params.chunk = 1;
    params.buffer = 0;
    expect(&params, NULL);
}
