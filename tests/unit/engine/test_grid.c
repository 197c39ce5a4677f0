/* Places of tokens in three dimensions: engine/steps/grid.c. */
#include <criterion/criterion.h>

#include "engine/steps/grid.h"

enum { TOKENS = 100 };

static const struct engine_grid grids[] = {{3, 5}, {1, 4}, {1, 1}, {6, 1}, {2, 2}};
#define GRIDS (int)(sizeof grids / sizeof *grids)

/* Texts with all grids between them, two of them without a token between, and the places as
 * transformers counts them: get_rope_index of Qwen2.5-VL and Qwen3-VL. */
static void make(int32_t *tokens, struct kern_place *places) {
    int32_t at = 0, place = 0;
    for (int g = 0; g <= GRIDS; g++) {
        for (int i = 0; i < (g == 1 ? 0 : 7); i++, at++, place++) {
            tokens[at] = 5 + i;
            places[at] = (struct kern_place){{place, place, place}};
        }
        if (g == GRIDS) break;
        const struct engine_grid grid = grids[g];
        for (int i = 0; i < grid.rows * grid.columns; i++, at++) {
            tokens[at] = engine_picture_id(grid, i, 0x89abcdefu * (uint32_t)(i + 1));
            places[at] =
                (struct kern_place){{place, place + i / grid.columns, place + i % grid.columns}};
        }
        place += grid.rows > grid.columns ? grid.rows : grid.columns;
    }
    for (; at < TOKENS; at++, place++) {
        tokens[at] = 9;
        places[at] = (struct kern_place){{place, place, place}};
    }
}

static bool same_place(struct kern_place a, struct kern_place b) {
    return a.axis[0] == b.axis[0] && a.axis[1] == b.axis[1] && a.axis[2] == b.axis[2];
}

Test(grid, ids) {
    for (int g = 0; g < GRIDS; g++) {
        for (int row = 0; row < 2; row++) {
            const int32_t id = engine_picture_id(grids[g], row, 0xffffffffu);
            const struct engine_grid grid = engine_grid_of(id);
            const bool tells = row == 0 && grids[g].rows * grids[g].columns > 1;
            cr_assert(engine_is_picture_id(id));
            cr_assert_eq(grid.rows, tells ? grids[g].rows : 1);
            cr_assert_eq(grid.columns, tells ? grids[g].columns : 1);
        }
    }
    const struct engine_grid largest = {ENGINE_GRID_SIDE, ENGINE_GRID_SIDE};
    cr_assert_eq(engine_picture_id(largest, 0, 0xffffffffu), INT32_MAX);
    cr_assert_neq(engine_picture_id(largest, 0, 1), engine_picture_id(largest, 0, 2));
    cr_assert_eq(engine_grid_of(ENGINE_GRID_IDS).rows, 1); /* damaged files have such ids */
    cr_assert_eq(engine_grid_of(ENGINE_GRID_IDS).columns, 1);
    cr_assert_eq(engine_grid_of(7).rows, 1);
}

/* Steps of any lengths, with any steps before them. */
Test(grid, places_are_those_of_any_step) {
    int32_t tokens[TOKENS];
    struct kern_place places[TOKENS], found[TOKENS];
    make(tokens, places);
    for (int32_t from = 0; from < TOKENS; from++) {
        for (int32_t count = 1; count <= TOKENS - from; count++) {
            struct grid_cursor cursor = {0};
            bool differ = false;
            if (from > 3) grid_seek(&cursor, tokens, from - 3);
            grid_seek(&cursor, tokens, from);
            cr_assert(cursor.at <= from && cursor.behind >= 0 && cursor.behind <= cursor.at);
            const bool said = grid_places(cursor, tokens, from, count, found);
            for (int32_t i = 0; i < count; i++) {
                const struct kern_place *place = &places[from + i];
                cr_assert(same_place(found[i], *place), "%d of %d", i, from);
                differ =
                    differ || place->axis[1] != place->axis[0] || place->axis[2] != place->axis[0];
            }
            cr_assert_eq(said, differ);
            if (!engine_is_picture_id(tokens[from]))
                cr_assert_eq(from - cursor.behind, places[from].axis[0]);
        }
    }
}

/* Ids of a damaged file may say more rows than there are. */
Test(grid, more_rows_than_tokens) {
    const struct engine_grid grid = {ENGINE_GRID_SIDE, 3};
    int32_t tokens[8] = {1, engine_picture_id(grid, 0, 0), 2, 3, 4, 5, 6, 7};
    struct grid_cursor cursor = {0};
    struct kern_place found[8];
    grid_seek(&cursor, tokens, 8);
    cr_assert_eq(cursor.at, 1);
    cr_assert(grid_places((struct grid_cursor){0}, tokens, 0, 8, found));
    cr_assert(same_place(found[7], (struct kern_place){{1, 3, 1}}));
}
