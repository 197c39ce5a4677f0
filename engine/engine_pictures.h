/* The ids of the rows of a prompt that show pictures. */
#ifndef KEEPD_ENGINE_ENGINE_PICTURES_H
#define KEEPD_ENGINE_ENGINE_PICTURES_H

#include <stdbool.h>
#include <stdint.h>

#include "picture/picture.h"

struct engine;

/* The ids of a prompt's rows that show pictures, from this one on, lie beyond every vocabulary. */
#define ENGINE_PICTURE_IDS (1 << 30)

static inline bool engine_is_picture_id(int32_t id) {
    return id >= ENGINE_PICTURE_IDS;
}

/* A tile's rows of embeddings stand in rows and columns. The first one's id says in how many,
 * unless it is the only one: 10 bits for each below the flag, above ENGINE_GRID_DIGEST bits of the
 * digest. */
#define ENGINE_GRID_IDS    (3 << 29) /* with the flag, which other ids do not have */
#define ENGINE_GRID_SIDE   1023
#define ENGINE_GRID_DIGEST 9

struct engine_grid {
    int32_t rows, columns; /* 1 to ENGINE_GRID_SIDE; any other token stands alone */
};

static inline struct engine_grid engine_grid_of(int32_t id) {
    struct engine_grid grid = {1, 1};
    if (id < ENGINE_GRID_IDS) return grid;
    grid.rows = id >> (ENGINE_GRID_DIGEST + 10) & ENGINE_GRID_SIDE;
    grid.columns = id >> ENGINE_GRID_DIGEST & ENGINE_GRID_SIDE;
    if (grid.rows == 0) grid.rows = 1; /* no tile's: a damaged file's */
    if (grid.columns == 0) grid.columns = 1;
    return grid;
}

/* Returns the id of row number `row` of a tile; `digest`: bits of its identity. */
static inline int32_t engine_picture_id(struct engine_grid grid, int row, uint32_t digest) {
    const uint32_t sides = (uint32_t)grid.rows << 10 | (uint32_t)grid.columns;
    if (row > 0 || grid.rows * grid.columns == 1)
        return (int32_t)(ENGINE_PICTURE_IDS |
                         (digest & (ENGINE_GRID_IDS - ENGINE_PICTURE_IDS - 1)));
    return (int32_t)(ENGINE_GRID_IDS | sides << ENGINE_GRID_DIGEST |
                     (digest & ((1 << ENGINE_GRID_DIGEST) - 1)));
}

/* Writes the ids of rows that show a part of a tile, [rows->count]. Each holds 29 bits
 * of SHA-256 sums of the encoder's weights, the picture's digest, and the tile and its row; the
 * first one's mostly say how the rows stand (engine_grid_of). So equal ids mean equal entries, in
 * any process with this model: prompts, conversations and their files are compared by ids alone.
 * Needs engine_info.pictures. Any thread. */
void engine_picture_ids(const struct engine *engine, const struct picture *picture,
                        const struct picture_rows *rows, int32_t *ids);

#endif
