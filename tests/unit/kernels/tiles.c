/* Tiles as Intel's manual has them (LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS), and a processor
 * that says it has them. */
#include "tiles.h"

#include <string.h>

#include "base/check.h"
#include "kernels/cpu/amx.h"
#include "kernels/cpu/isa.h"
#include "kernels/number.h"

#define TILES 8

/* A thread's. */
static _Thread_local struct amx_config configured;
static _Thread_local char tiles[TILES][16][64];

struct cpu_isa cpu_isa_detect(void) {
    struct cpu_isa isa = {0};
    isa.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
    isa.avx512 = isa.avx2 && __builtin_cpu_supports("avx512f") &&
                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vl");
    isa.vnni = isa.avx512 && __builtin_cpu_supports("avx512vnni");
    isa.amx = isa.avx512 && __builtin_cpu_supports("avx512bf16");
    return isa;
}

void tile_config(const void *config) {
    memcpy(&configured, config, sizeof configured);
    CHECK(configured.palette == 1);
    memset(tiles, 0, sizeof tiles);
}

void tile_release(void) {
    memset(&configured, 0, sizeof configured);
}

/* Rows of a tile; in use it has been configured. */
static int rows_of(int tile) {
    CHECK(tile < TILES && configured.palette == 1 && configured.row_bytes[tile] == 64);
    return configured.rows[tile];
}

void tile_zero(int tile) {
    (void)rows_of(tile);
    memset(tiles[tile], 0, sizeof tiles[tile]);
}

void tile_load(int tile, const void *from, size_t stride) {
    tile_zero(tile); /* rows beyond those configured are zeros */
    for (int r = 0; r < rows_of(tile); r++)
        memcpy(tiles[tile][r], (const char *)from + (size_t)r * stride, 64);
}

void tile_store(int tile, void *to, size_t stride) {
    for (int r = 0; r < rows_of(tile); r++)
        memcpy((char *)to + (size_t)r * stride, tiles[tile][r], 64);
}

/* Subnormal inputs count as zero. */
static void read_pairs(const char *row, float first[16], float second[16]) {
    uint16_t half[32];
    memcpy(half, row, sizeof half);
    for (int i = 0; i < 32; i++) {
        if (!(half[i] & 0x7f80)) half[i] &= 0x8000;
        *(i % 2 ? &second[i / 2] : &first[i / 2]) = number_from_bf16(half[i]);
    }
}

/* Firsts and seconds of pairs are summed apart. */
void tile_multiply(int sums, int a, int b) {
    float b_first[16][16], b_second[16][16];
    for (int k = 0; k < rows_of(b); k++) read_pairs(tiles[b][k], b_first[k], b_second[k]);
    CHECK(rows_of(b) == 16 && rows_of(sums) <= rows_of(a));
    for (int m = 0; m < rows_of(sums); m++) {
        float a_first[16], a_second[16], first[16] = {0}, second[16] = {0}, sum[16];
        read_pairs(tiles[a][m], a_first, a_second);
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) {
                first[n] += a_first[k] * b_first[k][n];
                second[n] += a_second[k] * b_second[k][n];
            }
        memcpy(sum, tiles[sums][m], sizeof sum);
        for (int n = 0; n < 16; n++) sum[n] += first[n] + second[n];
        memcpy(tiles[sums][m], sum, sizeof sum);
    }
}
