/* Tokens with which a text probably goes on, found in the text itself: engine/steps/draft.h. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "engine/steps/draft.h"

enum { ROOM = 4096 };

/* A text that begins with `count` tokens, the prompt. */
struct bed {
    int32_t tokens[ROOM];
    int32_t count;
    struct draft draft;
};

static void open_bed(struct bed *bed, const int32_t *prompt, int32_t count,
                     const int32_t *predicted, int32_t predicted_count) {
    *bed = (struct bed){.count = count};
    memcpy(bed->tokens, prompt, (size_t)count * sizeof *prompt);
    cr_assert_eq(draft_open(&bed->draft, predicted, predicted_count, count, ROOM), 0);
}

static int32_t find(struct bed *bed, int32_t most) {
    return draft_find(&bed->draft, bed->tokens, bed->count, NULL, 0, most);
}

static void add(struct bed *bed, int32_t token) {
    bed->tokens[bed->count++] = token;
}

#define COUNT(a) ((int32_t)(sizeof(a) / sizeof *(a)))

Test(draft, goes_on_as_the_text_did_before) {
    static const int32_t prompt[] = {9, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), NULL, 0);
    cr_assert_eq(find(&bed, 3), 3);
    cr_assert_eq(memcmp(bed.tokens + bed.count, prompt + 4, 3 * sizeof *prompt), 0);
    draft_close(&bed.draft);
}

Test(draft, needs_three_tokens_in_common) {
    static const int32_t prompt[] = {9, 1, 2, 4, 5, 6, 7, 1, 2};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), NULL, 0);
    cr_assert_eq(find(&bed, 8), 0);
    add(&bed, 4);
    cr_assert_eq(find(&bed, 8), 8, "a text that repeats itself goes on like that");
    cr_assert_eq(bed.tokens[bed.count], 5);
    cr_assert_eq(bed.tokens[bed.count + 3], 1, "behind its end the draft follows");
    draft_close(&bed.draft);
    open_bed(&bed, prompt, 2, NULL, 0);
    cr_assert_eq(find(&bed, 8), 0, "a text shorter than that");
    draft_close(&bed.draft);
}

Test(draft, the_longest_common_text_wins) {
    /* 1 2 3 was followed by 4 behind 8 and, later, by 5 behind 7. */
    static const int32_t prompt[] = {8, 1, 2, 3, 4, 7, 1, 2, 3, 5, 8, 1, 2, 3};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), NULL, 0);
    cr_assert_eq(find(&bed, 1), 1);
    cr_assert_eq(bed.tokens[bed.count], 4);
    draft_close(&bed.draft);
}

Test(draft, of_equal_ones_the_newest_wins) {
    static const int32_t prompt[] = {8, 1, 2, 3, 4, 7, 1, 2, 3, 5, 6, 1, 2, 3};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), NULL, 0);
    cr_assert_eq(find(&bed, 1), 1);
    cr_assert_eq(bed.tokens[bed.count], 5);
    draft_close(&bed.draft);
}

Test(draft, a_source_is_followed_beyond_the_chain) {
    struct bed bed;
    int32_t prompt[600], count = 0, long_ago[40];
    for (int i = 0; i < 40; i++) long_ago[i] = i % 8 < 3 ? i % 8 : 100 + i; /* 0 1 2 often */
    memcpy(prompt, long_ago, sizeof long_ago);
    count = 40;
    for (int i = 0; i < 100; i++) { /* since then, 0 1 2 many times in other company */
        prompt[count++] = 200 + i;
        for (int k = 0; k < 3; k++) prompt[count++] = k;
    }
    memcpy(prompt + count, long_ago, 6 * sizeof *prompt);
    open_bed(&bed, prompt, count + 6, NULL, 0);
    for (int i = 6; i < 36; i++) { /* found once by a rare key, it goes on over the common ones */
        cr_assert_eq(find(&bed, 4), 4);
        cr_assert_eq(bed.tokens[bed.count], long_ago[i], "token %d", i);
        add(&bed, long_ago[i]);
    }
    draft_close(&bed.draft);
}

Test(draft, an_answer_begins_as_predicted) {
    static const int32_t prompt[] = {1, 2, 3};
    static const int32_t predicted[] = {11, 12, 13, 14, 15, 16, 17};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), predicted, COUNT(predicted));
    cr_assert_eq(find(&bed, 2), 2);
    cr_assert_eq(bed.tokens[3], 11);
    add(&bed, 11);
    cr_assert_eq(find(&bed, 15), 6, "the prompt does not follow the predicted text");
    cr_assert_eq(bed.tokens[4], 12);
    add(&bed, 99); /* another token than predicted: found again by what follows */
    cr_assert_eq(find(&bed, 15), 0);
    add(&bed, 13), add(&bed, 14), add(&bed, 15);
    cr_assert_eq(find(&bed, 15), 2);
    cr_assert_eq(bed.tokens[bed.count], 16);
    add(&bed, 16), add(&bed, 17);
    cr_assert_eq(find(&bed, 15), 0, "nothing follows the end of the predicted text");
    draft_close(&bed.draft);
}

Test(draft, a_predicted_text_that_is_wrong_from_the_start) {
    static const int32_t prompt[] = {1, 2, 3};
    static const int32_t predicted[] = {11, 12};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), predicted, COUNT(predicted));
    add(&bed, 77);
    cr_assert_eq(find(&bed, 15), 0);
    add(&bed, 11), add(&bed, 12), add(&bed, 13);
    cr_assert_eq(find(&bed, 15), 0);
    draft_close(&bed.draft);
}

/* Every draft of a random text over few tokens is what followed some place with the same key. */
Test(draft, random_texts) {
    struct bed bed;
    uint32_t state = 1;
    int32_t prompt[] = {0}, found = 0;
    open_bed(&bed, prompt, 1, NULL, 0);
    while (bed.count < 3000) {
        state = state * 1664525u + 1013904223u;
        add(&bed, (int32_t)(state >> 24) % 5);
        int32_t most = (int32_t)(state >> 8) % (DRAFT_MAX + 1), count = find(&bed, most);
        cr_assert(count == 0 || count == most);
        if (count == 0) continue;
        found++;
        bool seen = false;
        for (int32_t i = DRAFT_KEY; i < bed.count && !seen; i++)
            seen = memcmp(bed.tokens + i - DRAFT_KEY, bed.tokens + bed.count - DRAFT_KEY,
                          (size_t)(DRAFT_KEY + count) * sizeof(int32_t)) == 0;
        cr_assert(seen, "at %d", bed.count);
    }
    cr_assert_gt(found, 1000);
    draft_close(&bed.draft);
}

Test(draft, the_rate_follows_what_was_confirmed) {
    static const int32_t prompt[] = {9, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), NULL, 0);
    find(&bed, 3);
    double before = draft_rate(&bed.draft, 0);
    cr_assert(before > 0.2 && before < 0.6, "%f", before);
    for (int i = 0; i < 30; i++) draft_learn(&bed.draft, 3, 3);
    cr_assert_gt(draft_rate(&bed.draft, 0), 0.95);
    for (int i = 0; i < 200; i++) draft_learn(&bed.draft, 3, 0);
    double low = draft_rate(&bed.draft, 0);
    cr_assert_lt(low, 0.05);
    for (int i = 0; i < 300; i++) draft_learn(&bed.draft, 0, 0);
    cr_assert_gt(draft_rate(&bed.draft, 0), 0.3, "what is not used is forgotten, and tried again");
    draft_close(&bed.draft);
}

/* Foreseen tokens come first, and those that followed them elsewhere behind them. */
Test(draft, foreseen_tokens) {
    static const int32_t prompt[] = {9, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3};
    static const int32_t foreseen[] = {21, 1, 2, 3}, as_found[] = {21, 1, 2, 3, 4, 5};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), NULL, 0);
    int32_t found = draft_find(&bed.draft, bed.tokens, bed.count, foreseen, 4, 6);
    cr_assert_eq(found, 6);
    cr_assert_eq(memcmp(bed.tokens + bed.count, as_found, sizeof as_found), 0);
    cr_assert_gt(draft_rate(&bed.draft, 3), draft_rate(&bed.draft, 4));
    draft_learn(&bed.draft, 6, 2); /* others were drawn than the third */
    add(&bed, 21), add(&bed, 1), add(&bed, 5);
    cr_assert_eq(find(&bed, 6), 0);
    cr_assert_eq(draft_find(&bed.draft, bed.tokens, bed.count, foreseen, 4, 2), 2);
    cr_assert_eq(bed.tokens[bed.count + 1], 1, "no more than there is room for");
    draft_close(&bed.draft);
}

/* Where they are hardly ever confirmed, what the text did before is drafted instead. */
Test(draft, foreseen_tokens_that_never_come) {
    static const int32_t prompt[] = {9, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3};
    static const int32_t foreseen[] = {21};
    struct bed bed;
    open_bed(&bed, prompt, COUNT(prompt), NULL, 0);
    for (int i = 0; i < 30; i++) {
        cr_assert_gt(draft_find(&bed.draft, bed.tokens, bed.count, foreseen, 1, 1), 0);
        draft_learn(&bed.draft, 1, 0);
    }
    double low = draft_rate(&bed.draft, 0);
    for (int i = 0; i < 30 && bed.tokens[bed.count] == 21; i++)
        draft_find(&bed.draft, bed.tokens, bed.count, foreseen, 1, 1),
            draft_learn(&bed.draft, 1, 0);
    cr_assert_lt(low, 0.4);
    cr_assert_eq(bed.tokens[bed.count], 4);
    draft_close(&bed.draft);
}

/* A long prompt is added to the chains in parts, so that no step waits for all of it. */
Test(draft, a_long_text_is_noted_in_parts) {
    static int32_t tokens[3 * DRAFT_NOTED + 20];
    struct draft draft;
    int32_t count = 3 * DRAFT_NOTED, steps = 0;
    for (int32_t i = 0; i < count; i++) tokens[i] = i % 1000;
    cr_assert_eq(draft_open(&draft, NULL, 0, count, count + 20), 0);
    while (draft_find(&draft, tokens, count, NULL, 0, 5) == 0) steps++;
    cr_assert_eq(steps, 2);
    for (int i = 0; i < 5; i++) cr_assert_eq(tokens[count + i], (count + i) % 1000);
    draft_close(&draft);
}

Test(draft, no_memory) {
    for (long n = 0; n < 2; n++) {
        struct draft draft;
        mem_fail_after(n);
        cr_assert_eq(draft_open(&draft, NULL, 0, 1, 100), ERR_NOMEM);
        mem_fail_after(-1);
        cr_assert_null(draft.heads);
        draft_close(&draft);
    }
}
