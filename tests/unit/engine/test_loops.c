/* Tests engine/steps/loops.c beside its definition. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/mem.h"
#include "base/splitmix.h"
#include "engine/steps/loops.h"

/* Does the text end with one block of a size in the rule's range, `count` times? */
static bool defined_loop(const struct engine_loops *rule, const int32_t *tokens, int32_t count) {
    for (int32_t size = rule->shortest; size <= rule->longest; size++) {
        const int64_t needed = (int64_t)size * rule->count;
        bool same = needed <= count;
        for (int64_t i = size; same && i < needed; i++)
            same = tokens[count - 1 - i] == tokens[count - 1 - i + size];
        if (same) return true;
    }
    return false;
}

Test(loops, equal_the_definition) {
    enum { MOST = 120 };
    uint64_t state = 3;
    int found = 0;
    for (int trial = 0; trial < 3000; trial++) {
        int32_t tokens[MOST];
        const int32_t shortest = 1 + (int32_t)(splitmix_next(&state) % 4);
        const struct engine_loops rule = {.shortest = shortest,
                                          .longest =
                                              shortest + (int32_t)(splitmix_next(&state) % 40),
                                          .count = 2 + (int32_t)(splitmix_next(&state) % 4)};
        const int32_t room = 1 + (int32_t)(splitmix_next(&state) % MOST);
        const int32_t block = 1 + (int32_t)(splitmix_next(&state) % 20);
        struct loops loops;
        cr_assert_eq(loops_open(&loops, &rule, room), 0);
        for (int32_t i = 0; i < room; i++) {
            const bool anew = i < block || splitmix_next(&state) % 30 == 0;
            tokens[i] = anew ? (int32_t)(splitmix_next(&state) % 3) : tokens[i - block];
            const bool loop = loops_note(&loops, &rule, tokens, i + 1);
            cr_assert_eq(loop, defined_loop(&rule, tokens, i + 1), "trial %d token %d", trial, i);
            found += loop;
        }
        loops_close(&loops);
    }
    cr_assert_gt(found, 1000);
}

Test(loops, closed_finds_none) {
    static const int32_t tokens[] = {1, 1, 1, 1};
    struct loops loops;
    cr_assert_eq(loops_open(&loops, &(struct engine_loops){0}, 4), 0);
    for (int32_t i = 1; i <= 4; i++)
        cr_assert_not(loops_note(&loops, &(struct engine_loops){0}, tokens, i));
    loops_close(&loops);
}

Test(loops, tells_of_no_memory) {
    const struct engine_loops rule = {.shortest = 1, .longest = 8, .count = 2};
    struct loops loops;
    mem_fail_after(0);
    cr_assert_eq(loops_open(&loops, &rule, 100), ERR_NOMEM);
    mem_fail_after(-1);
    loops_close(&loops);
}
