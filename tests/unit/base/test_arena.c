#include <criterion/criterion.h>
#include <stdint.h>
#include <string.h>

#include "base/arena.h"
#include "base/mem.h"

Test(arena, pieces_are_zeroed_aligned_and_apart) {
    struct arena arena;
    unsigned char *pieces[200];
    arena_open(&arena, 1 << 20);
    for (size_t i = 0; i < 200; i++) {
        pieces[i] = arena_alloc(&arena, i + 1, 7);
        cr_assert_not_null(pieces[i]);
        cr_assert_eq((uintptr_t)pieces[i] % 16, 0);
        for (size_t j = 0; j < (i + 1) * 7; j++) cr_assert_eq(pieces[i][j], 0);
        memset(pieces[i], (int)i, (i + 1) * 7);
    }
    for (size_t i = 0; i < 200; i++)
        for (size_t j = 0; j < (i + 1) * 7; j++) cr_assert_eq(pieces[i][j], (unsigned char)i);
    arena_close(&arena);
}

Test(arena, large_pieces_among_small_ones) {
    struct arena arena;
    arena_open(&arena, 1 << 22);
    char *small = arena_alloc(&arena, 1, 10);
    char *large = arena_alloc(&arena, 1, 1 << 20);
    char *after = arena_alloc(&arena, 1, 10);
    cr_assert(small && large && after);
    memset(small, 1, 10);
    memset(large, 2, 1 << 20);
    memset(after, 3, 10);
    cr_assert(small[9] == 1 && large[0] == 2 && large[(1 << 20) - 1] == 2);
    arena_close(&arena);
}

Test(arena, the_ceiling_holds) {
    struct arena arena;
    arena_open(&arena, 64);
    cr_assert_not_null(arena_alloc(&arena, 1, 32));
    cr_assert_null(arena_alloc(&arena, 1, 33));
    cr_assert_not_null(arena_alloc(&arena, 2, 16));
    cr_assert_null(arena_alloc(&arena, 1, 1));
    cr_assert_eq(arena.used, 64);
    arena_reset(&arena);
    cr_assert_eq(arena.used, 0);
    cr_assert_not_null(arena_alloc(&arena, 1, 64));
    arena_close(&arena);
}

Test(arena, sizes_that_overflow) {
    struct arena arena;
    arena_open(&arena, SIZE_MAX);
    cr_assert_null(arena_alloc(&arena, SIZE_MAX / 2, 3));
    cr_assert_null(arena_alloc(&arena, SIZE_MAX, 1));
    cr_assert_null(arena_alloc(&arena, SIZE_MAX - 15, 1));
    cr_assert_null(arena_strndup(&arena, "x", SIZE_MAX));
    cr_assert_eq(arena.used, 0);
    arena_close(&arena);
}

Test(arena, strndup_ends_with_nul) {
    struct arena arena;
    arena_open(&arena, 1000);
    cr_assert_str_eq(arena_strndup(&arena, "hello", 3), "hel");
    cr_assert_str_eq(arena_strndup(&arena, NULL, 0), "");
    arena_close(&arena);
    arena_close(&arena);
}

Test(arena, failed_memory_leaves_it_usable) {
    struct arena arena;
    arena_open(&arena, 1 << 20);
    mem_fail_after(0);
    cr_assert_null(arena_alloc(&arena, 1, 100000));
    cr_assert_eq(arena.used, 0);
    cr_assert_not_null(arena_alloc(&arena, 1, 100000));
    arena_close(&arena);
}
