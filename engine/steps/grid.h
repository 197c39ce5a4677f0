/* Places of tokens in models whose places have three dimensions (struct kern_place): M-RoPE of
 * Qwen2-VL (arXiv 2409.12191, section 2.1) and of Qwen3-VL.
 *
 * A tile of R x C rows that begins at place p has the places (p, p + r, p + c), and what stands
 * behind it goes on at p + max(R, C). So R C - max(R, C) places are saved, by which all later
 * tokens' places lie behind their positions. The id of a tile's first row holds R and C
 * (engine_picture_ids), so places are a function of the tokens' ids alone: the same in forks, cuts,
 * prefixes, and in conversations from files and other machines, and no record of them is kept.
 * Evictions change neither ids nor places. */
#ifndef KEEPD_ENGINE_STEPS_GRID_H
#define KEEPD_ENGINE_STEPS_GRID_H

#include "engine/engine_pictures.h"
#include "kernels/kern_step.h"

/* How far a sequence's tokens have been looked at. Zeros: not at all. */
struct grid_cursor {
    int32_t at;     /* a token, none of a tile's but its first */
    int32_t behind; /* how far its place lies behind its position */
};

/* Moves to token `pos`, or to the first token of the tile that it is part of. `pos` is not before
 * the last one, and there are `pos` tokens at least. */
void grid_seek(struct grid_cursor *cursor, const int32_t *tokens, int32_t pos);

/* Writes the places of the tokens [pos, pos + count), to which the cursor has been moved. Returns
 * whether any token's three places differ. */
bool grid_places(struct grid_cursor cursor, const int32_t *tokens, int32_t pos, int32_t count,
                 struct kern_place *out);

#endif
