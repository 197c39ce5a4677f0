/* How many prompt rows a step has beside answers. Times are given, not measured. */
#include <criterion/criterion.h>

#include "engine/steps/pace.h"

Test(pace, no_limit_gives_all_rows) {
    const struct pace pace = {.idle_ns = {[4] = 20e6}, .row_ns = 1e6};
    cr_assert_eq(pace_rows(&pace, 0, 0, 2048), 2048);
    cr_assert_eq(pace_rows(&pace, 16, 0, 2048), 2048);
}

Test(pace, prompts_alone_take_a_moment) {
    struct pace pace = {0};
    cr_assert_eq(pace_rows(&pace, 0, 200, 2048), PACE_ALONE_LEAST, "their time is not known");
    pace_note(&pace, 0, 2048, 400000000);
    cr_assert_eq(pace_rows(&pace, 0, 200, 2048), 2048);
    pace = (struct pace){0};
    pace_note(&pace, 0, 2048, 1200000000);
    cr_assert_eq(pace_rows(&pace, 0, 200, 2048), 512, "whole passes of 256 rows");
    cr_assert_eq(pace_rows(&pace, 0, 0, 2048), 2048, "no limit was wanted");
    pace_note(&pace, 0, 2048, 60000000000);
    cr_assert_eq(pace_rows(&pace, 0, 200, 2048), 256);
    cr_assert_eq(pace_rows(&pace, 0, 200, 100), 100);
}

Test(pace, a_step_is_stretched_to_its_percentage) {
    const struct pace pace = {.idle_ns = {[4] = 100e6}, .row_ns = 1e6};
    cr_assert_eq(pace_rows(&pace, 16, 200, 2048), 100);
    cr_assert_eq(pace_rows(&pace, 16, 300, 2048), 200);
    cr_assert_eq(pace_rows(&pace, 16, 300, 150), 150);
    cr_assert_eq(pace_rows(&pace, 16, 110, 2048), PACE_LEAST, "prompts always go on");
    cr_assert_eq(pace_rows(&pace, 16, 50, 2048), PACE_LEAST);
    cr_assert_eq(pace_rows(&pace, 16, 110, 5), 5);
}

Test(pace, the_nearest_known_number_of_streams_serves) {
    const struct pace pace = {.idle_ns = {[2] = 50e6, [4] = 100e6}, .row_ns = 1e6};
    const struct {
        int streams;
        int32_t rows;
    } cases[] = {{1, 50},  {2, 50},   {3, 50},   {4, 50},     {5, 50},     {8, 50},
                 {9, 100}, {16, 100}, {17, 100}, {4096, 100}, {65536, 100}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_assert_eq(pace_rows(&pace, cases[i].streams, 200, 2048), cases[i].rows, "%d streams",
                     cases[i].streams);
    const struct pace unknown = {.row_ns = 1e6};
    cr_assert_eq(pace_rows(&unknown, 3, 200, 2048), PACE_FIRST);
}

/* Times of a machine whose steps last 30 ms and 0.5 ms more for each prompt row. */
static int64_t machine(int32_t prompt_rows) {
    return 30000000 + (int64_t)prompt_rows * 500000;
}

/* The choice settles where the step lasts twice as long as an idle one, whichever came first. */
Test(pace, the_choice_settles) {
    for (int first = 0; first < 3; first++) {
        struct pace pace = {0};
        if (first == 0) pace_note(&pace, 0, 512, 512 * (int64_t)300000);
        if (first == 1) pace_note(&pace, 16, 0, machine(0));
        int32_t rows = 0;
        for (int step = 0; step < 40; step++) {
            rows = pace_rows(&pace, 16, 200, 2048);
            cr_assert(rows >= PACE_LEAST && rows <= 300, "%d", rows);
            pace_note(&pace, 16, rows, machine(rows));
            if (step % 8 == 7) pace_note(&pace, 16, 0, machine(0));
        }
        cr_assert(rows >= 45 && rows <= 80, "start %d: %d rows", first, rows);
    }
}

/* A measured time that makes no sense leaves a choice that does. */
Test(pace, odd_times_do_no_harm) {
    struct pace pace = {0};
    pace_note(&pace, 16, 0, 0);
    pace_note(&pace, 16, 64, -5);
    cr_assert_eq(pace_rows(&pace, 16, 200, 2048), PACE_FIRST);
    pace_note(&pace, 16, 0, 90000000);
    pace_note(&pace, 16, 64, 1000000); /* quicker than without prompts */
    int32_t rows = pace_rows(&pace, 16, 200, 2048);
    cr_assert(rows >= PACE_LEAST && rows <= 2048);
    for (int i = 0; i < 60; i++) {
        pace_note(&pace, 16, 64, 90000000 + 64 * (int64_t)1000000);
        pace_note(&pace, 16, 0, 90000000);
    }
    rows = pace_rows(&pace, 16, 200, 2048);
    cr_assert(rows > 80 && rows < 100, "%d", rows);
}

/* The first step, without prompts, is measured as slow; all later steps have prompts, some short.
 */
Test(pace, one_slow_measurement_is_forgotten) {
    struct pace pace = {0};
    int32_t rows = 0;
    pace_note(&pace, 0, 512, machine(512));
    pace_note(&pace, 16, 0, 100 * machine(0));
    for (int step = 0; step < 40; step++) {
        rows = pace_rows(&pace, 16, 200, 2048);
        int32_t some = step % 5 == 4 && rows > 64 ? 64 : rows;
        pace_note(&pace, 16, some, machine(some));
    }
    cr_assert(rows <= 300, "%d rows", rows);
}

/* Steps of 4 ms, and 1 ms more for each answer; 0.5 ms for each row of a prompt. */
static struct pace measured(void) {
    struct pace pace = {0};
    for (int i = 0; i < 3; i++) {
        pace_note(&pace, 1, 0, 5000000);
        pace_note(&pace, 64, 0, 68000000);
        pace_note(&pace, 0, 32, 20000000);
        pace_note(&pace, 0, 256, 132000000);
    }
    return pace;
}

Test(pace, times_lie_between_those_that_were_measured) {
    struct pace pace = measured();
    cr_assert_float_eq(pace_streams_ns(&pace, 16), 20e6, 1e3);
    cr_assert_float_eq(pace_streams_ns(&pace, 128), 136e6, 1e3, "in proportion");
    cr_assert_float_eq(pace_prompt_ns(&pace, 16), 10e6, 1e3);
    cr_assert_float_eq(pace_prompt_ns(&pace, 64), 40e6, 1e3, "by the next smaller size");
    cr_assert_float_eq(pace_prompt_ns(&pace, 512), 264e6, 1e3);
    const struct pace unknown = {0};
    cr_assert_float_eq(pace_streams_ns(&unknown, 16), 0, 0);
    cr_assert_float_eq(pace_prompt_ns(&unknown, 16), 0, 0);
    cr_assert_eq(pace_rows_within(&unknown, 1, 1e9, 2048), PACE_FIRST);
    cr_assert_eq(pace_rows_apart(&unknown, 16, 200, 2048), PACE_FIRST);
}

Test(pace, answers_take_turns_until_a_step_is_short_enough) {
    struct pace pace = measured();
    const struct {
        double bound_ns;
        int turns;
    } cases[] = {{68e6, 1}, {67e6, 2}, {36e6, 2}, {35e6, 4}, {1, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_assert_eq(pace_turns(&pace, 0, 64, cases[i].bound_ns), cases[i].turns, "%zu", i);
    cr_assert_eq(pace_turns(&pace, 60, 4, 1), 1, "the few others take part in every step");
    cr_assert_eq(pace_turns(&pace, 0, 1, 1), 1);
    cr_assert_eq(pace_turns(&pace, 0, 3, 1), 4, "at most four");
}

/* Where a step with many answers takes no longer than one with few, nothing is divided. */
Test(pace, turns_that_gain_nothing_are_not_taken) {
    struct pace pace = {0};
    pace_note(&pace, 1, 0, 10000000);
    pace_note(&pace, 64, 0, 12000000);
    pace_note(&pace, 0, 32, 11000000);
    cr_assert_eq(pace_turns(&pace, 0, 64, 1), 1);
    cr_assert_not(pace_apart(&pace, 64, 32));
    pace = measured();
    cr_assert(pace_apart(&pace, 64, 32));
    cr_assert_not(pace_apart(&pace, 5, 32));
}

Test(pace, a_step_of_prompts_alone_takes_no_longer_than_one_is_stretched) {
    struct pace pace = measured();
    cr_assert_eq(pace_rows_apart(&pace, 64, 200, 2048), 108, "68 ms by the rows of 20 ms");
    cr_assert_eq(pace_rows_apart(&pace, 64, 200, 100), 100);
    cr_assert_eq(pace_rows_within(&pace, 1, 5e6 + 1, 2048), PACE_LEAST);
}

/* Rows of drafts, between the numbers that were measured and beyond them. */
Test(pace, the_growth_of_a_step_with_drafts) {
    struct pace pace = {0};
    double supposed = pace_growth(&pace, 1, 8);
    cr_assert_float_eq(supposed, 1 + 7 * PACE_ROW_PART, 1e-9, "nothing was measured");
    pace_note_drafts(&pace, 1, 10000000);
    cr_assert_float_eq(pace_growth(&pace, 1, 8), supposed, 1e-9);
    pace_note_drafts(&pace, 9, 30000000);
    cr_assert_float_eq(pace_growth(&pace, 1, 9), 3, 1e-9);
    cr_assert_float_eq(pace_growth(&pace, 1, 5), 2, 1e-9, "on the line between");
    cr_assert_gt(pace_growth(&pace, 9, 16), 1);
    cr_assert_lt(pace_growth(&pace, 9, 16), 16 / 9.0);
}

/* The time of a step is forgotten after a while, so that a single slow step does not keep the
 * scheduler from ever trying that number of rows again. */
Test(pace, times_of_drafts_are_measured_anew) {
    struct pace pace = {0};
    pace_note_drafts(&pace, 1, 10000000);
    pace_note_drafts(&pace, 2, 10000000000);
    cr_assert_gt(pace_growth(&pace, 1, 2), 100);
    for (int i = 0; i < PACE_DRAFT_STEPS; i++) pace_note_drafts(&pace, 1, 10000000);
    cr_assert_float_eq(pace_growth(&pace, 1, 2), 1 + PACE_ROW_PART, 1e-9);
}

Test(pace, slow_drafts_are_doubted) {
    struct pace pace = {0};
    pace_note_drafts(&pace, 1, 10000000);
    pace_note_drafts(&pace, 2, 30000000);
    cr_assert_gt(pace_growth(&pace, 1, 2), 2.9);
    for (int i = 0; i < 80; i++) pace_note_drafts(&pace, 1, 10000000);
    cr_assert_lt(pace_growth(&pace, 1, 2), 1.3);
    cr_assert_gt(pace_growth(&pace, 1, 2), 1 + PACE_ROW_PART);
    /* A measured growth below the supposed one stays. */
    pace = (struct pace){0};
    pace_note_drafts(&pace, 2, 10500000);
    for (int i = 0; i < 80; i++) pace_note_drafts(&pace, 1, 10000000);
    cr_assert_float_eq(pace_growth(&pace, 1, 2), 1.05, 1e-9);
}
