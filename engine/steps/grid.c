#include "engine/steps/grid.h"

static int32_t longer_side(struct engine_grid grid) {
    return grid.rows > grid.columns ? grid.rows : grid.columns;
}

void grid_seek(struct grid_cursor *cursor, const int32_t *tokens, int32_t pos) {
    while (cursor->at < pos) {
        const struct engine_grid grid = engine_grid_of(tokens[cursor->at]);
        const int32_t count = grid.rows * grid.columns;
        if (count > pos - cursor->at) return;
        cursor->at += count;
        cursor->behind += count - longer_side(grid);
    }
}

bool grid_places(struct grid_cursor cursor, const int32_t *tokens, int32_t pos, int32_t count,
                 struct kern_place *out) {
    bool differ = false;
    for (int32_t i = 0; i < count; i++) {
        grid_seek(&cursor, tokens, pos + i);
        const struct engine_grid grid = engine_grid_of(tokens[cursor.at]);
        const int32_t start = cursor.at - cursor.behind, inside = pos + i - cursor.at;
        out[i] = (struct kern_place){
            {start, start + inside / grid.columns, start + inside % grid.columns}};
        differ = differ || inside > 0;
    }
    return differ;
}
