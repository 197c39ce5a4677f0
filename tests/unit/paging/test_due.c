/* The rule is replayed token by token and compared with the formulas, over all small cases. */
#include <criterion/criterion.h>

#include "paging/due.h"

static struct kv_params params_of(const char *policy, int budget, int buffer, int chunk) {
    struct kv_params params = {.budget = budget, .buffer = buffer, .chunk = chunk};
    kv_params_set_policy(&params, policy_find(policy));
    return params;
}

/* Plays one request, taking at most `step` prompt tokens at a time; returns the peak of `held`. */
static int32_t play(const struct kv_params *params, struct due_state *state, int32_t generate,
                    int32_t step) {
    int32_t peak = state->held;
    for (int32_t room; (room = due_prompt_room(params, state)) > 0;) {
        due_append(state, room < step ? room : step);
        if (state->held > peak) peak = state->held;
        if (due_after_append(params, state)) due_evicted(params, state);
    }
    for (int32_t i = 0; i < generate; i++) {
        if (due_before_generate(params, state)) due_evicted(params, state);
        due_append(state, 1);
        if (state->held > peak) peak = state->held;
        cr_assert_not(due_after_append(params, state));
    }
    return peak;
}

static struct due_state start(int32_t held, int32_t prompt_new) {
    return (struct due_state){.tokens = held, .held = held, .prompt_new = prompt_new};
}

Test(due, peak_is_exact_for_every_small_request) {
    for (int budget = 1; budget <= 7; budget++)
        for (int buffer = 0; buffer <= 4; buffer++)
            for (int chunk = 1; chunk <= 6; chunk++) {
                struct kv_params params = params_of("global", budget, buffer, chunk);
                int most = budget + (buffer > 0 ? buffer : 1); /* what a turn can leave behind */
                for (int held = 0; held <= most; held++)
                    for (int prompt = 0; prompt <= 20; prompt++)
                        for (int generate = 0; generate <= 14; generate++) {
                            struct due_state state = start(held, prompt);
                            int32_t peak = play(&params, &state, generate, 1);
                            int64_t formula = reserve_peak(&params, held, prompt, generate);
                            cr_assert_eq(peak, formula,
                                         "M %d buffer %d C %d held %d prompt %d generate %d: "
                                         "peak %d, formula %lld",
                                         budget, buffer, chunk, held, prompt, generate, peak,
                                         (long long)formula);
                            cr_assert_leq(state.held, most);
                            cr_assert_eq(state.tokens, held + prompt + generate);
                        }
            }
}

Test(due, splitting_a_prompt_changes_nothing) {
    for (int step = 1; step <= 9; step++)
        for (int prompt = 1; prompt <= 40; prompt++) {
            struct kv_params params = params_of("trimkv", 6, 3, 8);
            struct due_state whole = start(7, prompt), split = whole;
            int32_t peak = play(&params, &whole, 5, 1000);
            cr_assert_eq(play(&params, &split, 5, step), peak);
            cr_assert_eq(whole.held, split.held);
        }
}

Test(due, peak_never_falls_with_more_held_or_more_to_generate) {
    for (int chunk = 1; chunk <= 6; chunk++)
        for (int held = 0; held <= 12; held++)
            for (int prompt = 0; prompt <= 20; prompt++)
                for (int generate = 0; generate <= 12; generate++) {
                    struct kv_params params = params_of("global", 5, 3, chunk);
                    int64_t peak = reserve_peak(&params, held, prompt, generate);
                    cr_assert_leq(peak, reserve_peak(&params, held + 1, prompt, generate));
                    cr_assert_leq(peak, reserve_peak(&params, held, prompt, generate + 1));
                }
}

Test(due, without_a_bound_nothing_is_evicted) {
    struct kv_params params = params_of("full", 1, 0, 4);
    struct due_state state = start(3, 50);
    cr_assert_eq(due_prompt_room(&params, &state), 50);
    cr_assert_eq(play(&params, &state, 20, 7), 73);
    cr_assert_eq(reserve_peak(&params, 3, 50, 20), 73);
}

Test(due, eviction_points_of_the_rule) {
    struct kv_params params = params_of("global", 10, 4, 8);
    struct due_state state = start(0, 21);
    due_append(&state, 8);
    cr_assert_not(due_after_append(&params, &state)); /* 8 <= M: nothing to drop */
    due_append(&state, 7);
    cr_assert_not(due_after_append(&params, &state)); /* inside a chunk */
    due_append(&state, 1);
    cr_assert(due_after_append(&params, &state)); /* the second chunk: 16 > M */
    due_evicted(&params, &state);
    cr_assert_eq(state.held, 10);
    cr_assert_eq(due_prompt_room(&params, &state), 5);
    due_append(&state, 5);
    cr_assert(due_after_append(&params, &state)); /* the prompt's end: 15 > M + buffer */
    due_evicted(&params, &state);
    for (int i = 0; i < 4; i++) {
        cr_assert_not(due_before_generate(&params, &state));
        due_append(&state, 1);
    }
    cr_assert(due_before_generate(&params, &state)); /* the next would be M + buffer + 1 */
}

Test(due, large_numbers_do_not_overflow) {
    struct kv_params params = params_of("global", INT32_MAX, INT32_MAX, INT32_MAX);
    struct due_state state = start(1 << 20, 100);
    due_append(&state, 100);
    cr_assert_not(due_after_append(&params, &state));
    cr_assert_not(due_before_generate(&params, &state));
    cr_assert_eq(reserve_peak(&params, 0, INT32_MAX, INT32_MAX), 2 * (int64_t)INT32_MAX);
}

/* The most pages over all ways to spread `total` entries over streams, by dynamic programming. */
static int most_pages(int streams, int total, int slots) {
    int best[64], next[64];
    cr_assert_lt(total, 64);
    for (int n = 0; n <= total; n++) best[n] = n == 0 ? 0 : -1000;
    for (int stream = 0; stream < streams; stream++) {
        for (int n = 0; n <= total; n++) {
            next[n] = -1000;
            for (int own = 0; own <= n; own++) {
                int pages = best[n - own] + (own + slots - 1) / slots;
                if (pages > next[n]) next[n] = pages;
            }
        }
        for (int n = 0; n <= total; n++) best[n] = next[n];
    }
    return best[total];
}

Test(reserve, pages_are_the_worst_spread) {
    struct kv_params params = params_of("global", 8, 4, 8), trimkv = params_of("trimkv", 8, 4, 8);
    for (int layers = 1; layers <= 2; layers++)
        for (int heads = 1; heads <= 3; heads++)
            for (int slots = 1; slots <= 7; slots++)
                for (int average = 1; average <= 10; average++) {
                    struct reserve_shape shape = {layers, heads, slots, 1};
                    int streams = layers * heads;
                    int64_t pages = reserve_pages(&shape, &params, average);
                    cr_assert_eq(pages, most_pages(streams, streams * average, slots),
                                 "%d streams, %d slots, %d", streams, slots, average);
                    /* Dropped tokens leave the streams of trimkv unequal too. */
                    cr_assert_eq(reserve_pages(&shape, &trimkv, average), pages);
                }
}

Test(reserve, equal_streams_round_up_each) {
    struct reserve_shape shape = {3, 2, 16, 1};
    struct kv_params full = params_of("full", 1, 0, 1), streaming = params_of("streaming", 8, 4, 8);
    static const struct {
        int average, pages;
    } cases[] = {{0, 0}, {1, 6}, {16, 6}, {17, 12}, {32, 12}, {33, 18}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(reserve_pages(&shape, &full, cases[i].average), cases[i].pages);
        cr_assert_eq(reserve_pages(&shape, &streaming, cases[i].average), cases[i].pages);
    }
}

/* A stream of a sequence that starts empty remembers each token as entry or member. */
Test(reserve, members_take_pages_of_their_own) {
    struct reserve_shape shape = {3, 2, 16, 10};
    struct kv_params ems = params_of("ems", 20, 4, 8), d2o = params_of("d2o", 20, 4, 8);
    static const struct {
        int held, tokens, pages; /* of each stream */
        float gamma;
    } cases[] = {{0, 19, 0, 4},  {0, 20, 0, 4},  {0, 21, 1, 4},      {0, 30, 1, 4},
                 {0, 31, 2, 4},  {0, 80, 6, 4},  {0, 900, 6, 4},     {1, 2, 6, 4},
                 {0, 900, 0, 1}, {5, 900, 0, 1}, {0, 900, 1, 1.25f}, {20, 900, 3, 2.5f},
                 {0, 45, 3, 16}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ems.rule.classes.gamma = cases[i].gamma;
        cr_assert_eq(reserve_members(&shape, &ems, cases[i].held, cases[i].tokens),
                     6 * cases[i].pages, "case %zu", i);
        cr_assert_eq(reserve_members(&shape, &d2o, cases[i].held, cases[i].tokens), 0);
    }
}
