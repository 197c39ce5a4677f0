/* The tile instructions of AMX in plain C, for the path's own sources compiled a second time with
 * this in front of them: so they are tested wherever there is AVX-512 with bf16. */
#ifndef KEEPD_TESTS_UNIT_KERNELS_TILES_H
#define KEEPD_TESTS_UNIT_KERNELS_TILES_H

#include <immintrin.h>
#include <stddef.h>

void tile_config(const void *config);
void tile_release(void);
void tile_zero(int tile);
void tile_load(int tile, const void *from, size_t stride);
void tile_store(int tile, void *to, size_t stride);
void tile_multiply(int sums, int a, int b);

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config)        tile_config(config)
#define _tile_release()                 tile_release()
#define _tile_zero(tile)                tile_zero(tile)
#define _tile_loadd(tile, from, stride) tile_load(tile, from, stride)
#define _tile_stored(tile, to, stride)  tile_store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b)      tile_multiply(sums, a, b)

#endif
