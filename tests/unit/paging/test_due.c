/* The rule is replayed token by token and compared with the formulas, over all small cases. */
#include <criterion/criterion.h>

#include "kernels/places.h"
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
    for (int32_t room; (room = due_prompt_limit(params, state)) > 0;) {
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

/* `full` evicts by the same rule where layers have sliding windows: of a window the next query sees
 * all but itself. */
static struct kv_params params_keeping(int kept, int buffer, int chunk, bool full) {
    struct kv_params params = params_of(full ? "full" : "global", full ? 1 : kept, buffer, chunk);
    params.sliding_window = full ? kept + 1 : 1;
    return params;
}

Test(due, peak_is_exact_for_every_small_request) {
    for (int budget = 1; budget <= 7; budget++)
        for (int buffer = 0; buffer <= 4; buffer++)
            for (int chunk = 1; chunk <= 12; chunk++) {
                struct kv_params params =
                    params_keeping(budget, buffer, (chunk + 1) / 2, chunk % 2 == 0);
                int most =
                    budget + (buffer > 0 ? buffer : 1); /* the most that a turn can leave behind */
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

/* Rows [at, at + together) come in one append. */
static int32_t play_together(const struct kv_params *params, struct due_state *state, int32_t at,
                             int32_t together, int32_t *late) {
    int32_t peak = state->held;
    for (int32_t room; (room = due_prompt_limit(params, state)) > 0;) {
        const int32_t done = state->prompt_done, end = done + room;
        const bool inside = done < at + together && end > at && end < at + together;
        if (inside) room = at > done ? at - done : at + together - done;
        due_append(state, room);
        if (state->held > peak) peak = state->held;
        if (!due_after_append(params, state)) continue;
        if (inside && at <= done) *late = state->prompt_done;
        due_evicted(params, state);
        cr_assert_leq(state->held, params->budget);
    }
    return peak;
}

Test(due, rows_that_stay_together_evict_behind_them) {
    int evictions = 0;
    for (int together = 2; together <= 9; together++)
        for (int at = 0; at + together < 30; at++)
            for (int chunk = 1; chunk <= 12; chunk++)
                for (int held = 0; held <= 9; held += 3) {
                    const struct kv_params params = params_of("global", 6, 3, chunk);
                    struct due_state state = start(held, 30), plain = state;
                    int32_t late = 0;
                    const int32_t peak = play_together(&params, &state, at, together, &late);
                    cr_assert_leq(peak, reserve_peak(&params, held, 30, 0) + together - 1);
                    cr_assert(late == 0 || late == at + together);
                    play(&params, &plain, 0, 1000);
                    cr_assert_eq(state.tokens, plain.tokens);
                    cr_assert_leq(state.held, params.budget + params.buffer);
                    evictions += late > 0;
                    const struct reserve_turn began = {.tokens = held, .held = held};
                    if (late > 0)
                        cr_assert_eq(due_next_while_reading(&params, &began, held, held + late),
                                     held + (late / chunk + 1) * chunk);
                }
    cr_assert_gt(evictions, 1000);
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
    cr_assert_eq(due_prompt_limit(&params, &state), 50);
    cr_assert_eq(play(&params, &state, 20, 7), 73);
    cr_assert_eq(due_generate_limit(&params, &state), INT32_MAX);
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
    cr_assert_eq(due_prompt_limit(&params, &state), 5);
    due_append(&state, 5);
    cr_assert(due_after_append(&params, &state)); /* the prompt's end: 15 > M + buffer */
    due_evicted(&params, &state);
    for (int i = 0; i < 4; i++) {
        cr_assert_not(due_before_generate(&params, &state));
        cr_assert_eq(due_generate_limit(&params, &state), 4 - i);
        due_append(&state, 1);
    }
    cr_assert(due_before_generate(&params, &state)); /* the next would be M + buffer + 1 */
    cr_assert_eq(due_generate_limit(&params, &state), 0);
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
                    struct reserve_shape shape = {
                        layers, heads, slots, 1, 1, 0, .sliding_layers = 0};
                    int streams = layers * heads;
                    int64_t pages = reserve_pages(&shape, &params, average, average);
                    cr_assert_eq(pages, most_pages(streams, streams * average, slots),
                                 "%d streams, %d slots, %d", streams, slots, average);
                    /* Dropped tokens leave the streams of trimkv unequal too. */
                    cr_assert_eq(reserve_pages(&shape, &trimkv, average, average), pages);
                }
}

Test(reserve, equal_streams_round_up_each) {
    struct reserve_shape shape = {3, 2, 16, 1, 1, 0, .sliding_layers = 0};
    struct kv_params full = params_of("full", 1, 0, 1), streaming = params_of("streaming", 8, 4, 8);
    static const struct {
        int average, pages;
    } cases[] = {{0, 0}, {1, 6}, {16, 6}, {17, 12}, {32, 12}, {33, 18}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(reserve_pages(&shape, &full, cases[i].average, cases[i].average),
                     cases[i].pages);
        cr_assert_eq(reserve_pages(&shape, &streaming, cases[i].average, cases[i].average),
                     cases[i].pages);
    }
}

/* Entries of layers with windows expire when a sequence evicts; without evictions none does. */
Test(reserve, streams_with_windows_are_unequal) {
    struct reserve_shape shape = {3, 2, 16, 1, 1, 0, .sliding_layers = 1};
    struct kv_params full = params_of("full", 1, 0, 1), streaming = params_of("streaming", 8, 4, 8);
    cr_assert_eq(reserve_pages(&shape, &full, 32, 32), 12);
    cr_assert_eq(reserve_pages(&shape, &streaming, 32, 32), 6 * (32 + 15) / 16);
    cr_assert_eq(reserve_pages(&shape, &streaming, 1, 1), 6);
}

/* Layers whose pages hold fewer entries may hold most of a sequence, up to a stream's tokens. */
Test(reserve, small_pages_may_hold_most_entries) {
    struct kv_params params = params_of("global", 8, 4, 8), full = params_of("full", 1, 0, 1);
    static const int slots[][2] = {{2, 4}, {4, 2}, {3, 5}, {4, 8}, {8, 3}};
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++)
        for (int layers = 2; layers <= 4; layers++)
            for (int average = 1; average <= 9; average++)
                for (int tokens = average; tokens <= 4 * average; tokens++) {
                    const struct reserve_shape shape = {.layers = layers,
                                                        .heads_kv = 1,
                                                        .page_slots = slots[i][0],
                                                        .sliding_layers = layers - 1,
                                                        .sliding_heads_kv = 2,
                                                        .sliding_page_slots = slots[i][1]};
                    const int sliding = 2 * (layers - 1), all = (1 + sliding) * average;
                    const int64_t pages = reserve_pages(&shape, &params, average, tokens);
                    int most = 0;
                    for (int few = 0; few <= tokens && few <= all; few++) {
                        if (all - few > sliding * tokens) continue;
                        const int here = most_pages(1, few, slots[i][0]) +
                                         most_pages(sliding, all - few, slots[i][1]);
                        most = here > most ? here : most;
                    }
                    cr_assert(pages >= most && pages <= most + 1, "%lld pages, at most %d",
                              (long long)pages, most);
                    cr_assert_eq(reserve_pages(&shape, &full, average, tokens),
                                 (average + slots[i][0] - 1) / slots[i][0] +
                                     sliding * ((average + slots[i][1] - 1) / slots[i][1]));
                }
}

/* The most entries per stream, on average, that the fullest of four ranks may have. */
Test(reserve, a_rank_may_need_more_than_its_share) {
    static const struct {
        enum kern_scope scope;
        enum kern_layers layers;
        float floor, cap;
        int64_t wanted; /* M = 100, peak 120, of a fresh sequence of 1000 tokens */
    } cases[] = {
        {KERN_SCOPE_STREAM, KERN_LAYERS_UNIFORM, 0, 0, 120},
        {KERN_SCOPE_STREAM, KERN_LAYERS_UNIFORM, 0, 1.5f, 120},
        {KERN_SCOPE_STREAM, KERN_LAYERS_PYRAMID, 0, 1.5f,
         420}, /* no cap where heads do not compete */
        {KERN_SCOPE_SEQUENCE, KERN_LAYERS_UNIFORM, 0, 0, 420},
        {KERN_SCOPE_SEQUENCE, KERN_LAYERS_UNIFORM, 0, 1, 120},
        {KERN_SCOPE_SEQUENCE, KERN_LAYERS_UNIFORM, 0, 1.25f, 145},
        {KERN_SCOPE_SEQUENCE, KERN_LAYERS_UNIFORM, 0, 8, 420}, /* a cap above all there is */
        {KERN_SCOPE_SEQUENCE, KERN_LAYERS_UNIFORM, 0.5f, 1.25f, 145},
        {KERN_SCOPE_SEQUENCE, KERN_LAYERS_UNIFORM, 0.75f, 1, 126}, /* 75 + 1 + 30 protected */
        {KERN_SCOPE_LAYER, KERN_LAYERS_UNIFORM, 0, 1.25f, 145},
        {KERN_SCOPE_LAYER, KERN_LAYERS_PYRAMID, 0, 1.25f, 175},
        {KERN_SCOPE_LAYER, KERN_LAYERS_UNIFORM, 0.2f, 1.25f, 420},
    };
    const struct reserve_turn fresh = {.added = 1000};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kv_params params = params_of("global", 100, 20, 64);
        struct reserve_shape shape = {3, 8, 16, 1, 4, cases[i].cap, .sliding_layers = 0};
        params.rule.scope = cases[i].scope;
        params.rule.layers = cases[i].layers;
        params.rule.floor = cases[i].floor;
        params.rule.sinks = 4;
        params.rule.recent = 26;
        cr_assert_eq(reserve_rank_peak(&shape, &params, &fresh, 120), cases[i].wanted, "case %zu",
                     i);
        shape.ranks = 1;
        cr_assert_eq(reserve_rank_peak(&shape, &params, &fresh, 120), 120);
    }
}

Test(reserve, what_was_not_evicted_is_even) {
    struct kv_params global = params_of("global", 100, 20, 64), full = params_of("full", 1, 0, 1);
    struct reserve_shape shape = {3, 8, 16, 1, 4, 0, .sliding_layers = 0};
    const struct reserve_turn fresh = {.added = 90}, brief = {.added = 250};
    cr_assert_eq(reserve_rank_peak(&shape, &global, &fresh, 90), 90);
    cr_assert_eq(reserve_rank_peak(&shape, &global, &brief, 120), 250); /* no more than there are */
    cr_assert_eq(reserve_rank_peak(&shape, &full, &brief, 250), 250);
    cr_assert_eq(reserve_pages(&shape, &full, 250, 250), 6 * 16); /* 24 streams in all */
    cr_assert_eq(reserve_pages(&shape, &global, 120, 120), 6 * (120 + 15) / 16);
}

/* 60 entries a stream, 130 on the fullest rank; M = 100, cap 1.25. */
Test(reserve, a_turn_begins_with_what_the_fullest_rank_has) {
    struct kv_params params = params_of("global", 100, 20, 64);
    struct reserve_shape shape = {3, 8, 16, 1, 4, 1.25f, .sliding_layers = 0};
    struct reserve_turn turn = {.held = 60, .fullest = 130, .tokens = 500, .added = 30};
    cr_assert_eq(reserve_rank_peak(&shape, &params, &turn, 90), 160); /* 30 more */
    turn.added = 900;
    cr_assert_eq(reserve_rank_peak(&shape, &params, &turn, 120),
                 190); /* before the first eviction */
    turn.drops = true; /* down to 32.5 a stream, all of it there: 88 more until it evicts */
    cr_assert_eq(reserve_rank_peak(&shape, &params, &turn, 120), 130 + 88);
    turn.added = 30;
    cr_assert_eq(reserve_rank_peak(&shape, &params, &turn, 120), 160);
}

/* A stream of a sequence that starts empty remembers each token as entry or member. */
Test(reserve, members_take_pages_of_their_own) {
    struct reserve_shape shape = {3, 2, 16, 10, 1, 0, .sliding_layers = 0};
    struct kv_params ems = params_of("ems", 20, 4, 8), d2o = params_of("d2o", 20, 4, 8);
    static const struct {
        int held, tokens, pages; /* for each stream */
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

/* ---- Sliding windows without a budget ---- */

static int64_t pages(int64_t entries, int64_t slots) {
    return (entries + slots - 1) / slots;
}

/* Plays a turn and follows the pages of both kinds of layers, which all are equally long. */
static int64_t play_pages(const struct kv_params *params, const struct reserve_shape *shape,
                          struct due_state state, int32_t generate) {
    int64_t most = 0, full = shape->layers - shape->sliding_layers;
    for (int32_t i = 0; i < state.prompt_new + generate; i++) {
        if (i >= state.prompt_new && due_before_generate(params, &state))
            due_evicted(params, &state);
        due_append(&state, 1);
        int64_t now =
            shape->heads_kv * (full * pages(state.tokens, shape->page_slots) +
                               shape->sliding_layers * pages(state.held, shape->page_slots));
        cr_assert_eq(due_entries(shape, params, &state),
                     shape->heads_kv * (full * state.tokens + shape->sliding_layers * state.held));
        if (now > most) most = now;
        if (due_after_append(params, &state)) due_evicted(params, &state);
    }
    return most;
}

/* The reservation of a turn of `full` suffices, and is more than it needs only by what a prompt's
 * peak exceeds the answer's. */
Test(due, pages_of_both_kinds_of_layers) {
    const struct reserve_shape shape = {6, 2, 4, .sliding_layers = 5};
    for (int window = 1; window <= 9; window++)
        for (int evicted_at = 0; evicted_at <= 20; evicted_at += 4)
            for (int prompt = 1; prompt <= 20; prompt++)
                for (int generate = 0; generate <= 24; generate += 3) {
                    struct kv_params params = params_of("full", 1, 2, 5);
                    params.sliding_window = window;
                    int32_t tokens = evicted_at + 3;
                    int32_t held = due_held_at(&params, 99, tokens, evicted_at);
                    struct due_state state = {.tokens = tokens, .held = held, .prompt_new = prompt};
                    struct reserve_turn turn = {
                        .held = held, .tokens = tokens, .added = prompt + generate};
                    int64_t peak = reserve_peak(&params, held, prompt, generate);
                    int64_t reserved = reserve_turn_pages(&shape, &params, &turn, peak);
                    int64_t used = play_pages(&params, &shape, state, generate);
                    cr_assert_leq(used, reserved);
                    cr_assert_leq(reserved - used,
                                  shape.heads_kv * (5 * pages(params.chunk, 4) + 1));
                    if (generate == 0) cr_assert_leq(reserved - used, shape.heads_kv * 5 * 2);
                    cr_assert_leq(peak, held + 5 > window + 6 ? held + 5 : window + 6);
                }
}

Test(due, what_a_window_leaves_at_a_cut) {
    struct kv_params full = params_of("full", 1, 2, 5), global = params_of("global", 8, 2, 5);
    full.sliding_window = global.sliding_window = 11;
    cr_assert_eq(due_held_at(&full, 40, 50, 45), 10 + 5);
    cr_assert_eq(due_held_at(&full, 40, 45, 45), 10);
    cr_assert_eq(due_held_at(&full, 40, 50, 0), 50);
    cr_assert_eq(due_held_at(&global, 40, 50, 45), 40);
    cr_assert_eq(due_held_at(&global, 40, 30, 30), 30);
    struct due_state state = {.tokens = 70, .held = 12};
    cr_assert_eq(due_budget(&full, &state), 70);
    cr_assert_eq(due_budget(&global, &state), 8);
    cr_assert_eq(reserve_whole(&full, 1000), 10 + 2 + 5);
    cr_assert_eq(reserve_whole(&full, 9), 9);
    full.sliding_window = 0;
    cr_assert_eq(reserve_whole(&full, 1000), 1000);
}

/* ---- Shifts ---- */

/* As play; checks that every token finds a place and that shifts come by the tokens alone. */
static int32_t play_shifted(const struct kv_params *params, struct due_state *state,
                            int32_t generate, int32_t step) {
    int32_t shifts = 0, end = state->tokens + state->prompt_new + generate;
    while (state->tokens < end) {
        bool in_prompt = state->prompt_done < state->prompt_new;
        if (!in_prompt && due_before_generate(params, state)) due_evicted(params, state);
        if (due_shift(params, state)) {
            cr_assert_eq(state->tokens, params->places + shifts * places_room(params->places));
            shifts++;
            due_shifted(params, state);
            cr_assert_not(due_shift(params, state)); /* a step without room appends nothing */
        }
        int32_t room =
            in_prompt ? due_prompt_limit(params, state) : due_generate_limit(params, state);
        cr_assert_gt(room, 0);
        if (room > step) room = step;
        if (room > end - state->tokens) room = end - state->tokens;
        int32_t behind = due_behind(params, state);
        cr_assert_eq(behind, shifts * places_room(params->places));
        due_append(state, room);
        cr_assert_leq(state->tokens - behind, params->places);
        if (due_after_append(params, state)) due_evicted(params, state);
    }
    return shifts;
}

Test(due, shifts_come_by_the_tokens_alone) {
    for (int places = 128; places <= 300; places += 43)
        for (int chunk = 1; chunk <= 60; chunk += 7)
            for (int prompt = 0; prompt <= 1000; prompt += 111)
                for (int step = 1; step <= 64; step *= 4) {
                    struct kv_params params = params_of("global", 30, 9, chunk);
                    params.places = places;
                    struct due_state state = start(0, prompt), other = start(0, prompt);
                    int32_t shifts = play_shifted(&params, &state, 1200 - prompt, 1000);
                    cr_assert_eq(play_shifted(&params, &other, 1200 - prompt, step), shifts);
                    cr_assert_eq(shifts, places_shifts(places, 1200));
                    cr_assert_eq(state.held, other.held);
                    params.places = 0; /* evictions come as without shifts */
                    struct due_state without = start(0, prompt);
                    cr_assert_leq(play(&params, &without, 1200 - prompt, 1000), 30 + 9 + chunk);
                    cr_assert_eq(state.held, without.held);
                }
}

Test(due, settings_that_cannot_be_shifted_are_named) {
    static const struct {
        const char *policy, *field;
        int budget, chunk, sinks, positions;
    } rows[] = {
        {"full", "kv.overflow", 30, 8, 0, 256},      {"ems", "kv.overflow", 64, 64, 4, 1024},
        {"streaming", "kv.overflow", 30, 8, 4, 127}, {"streaming", "kv.budget", 185, 8, 4, 256},
        {"streaming", "kv.sinks", 130, 8, 65, 256},  {"streaming", NULL, 184, 8, 64, 256},
        {"global", NULL, 1024, 512, 4, 8192},        {"h2o", NULL, 64, 8, 0, 128},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct kv_params params = params_of(rows[i].policy, rows[i].budget, 4, rows[i].chunk);
        struct fault fault = {0};
        params.rule.sinks = rows[i].sinks;
        int rc = kv_params_check_shift(&params, rows[i].positions, &fault);
        cr_assert_eq(rc == 0, rows[i].field == NULL, "row %zu: %s", i, fault.text);
        if (rows[i].field) cr_assert_str_eq(fault.field, rows[i].field);
    }
}
