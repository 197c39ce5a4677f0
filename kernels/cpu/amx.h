/* AMX tiles: eight registers of 16 rows by 64 bytes. C[m][n] += A[m][2k..] . B[k][2n..] over pairs
 * of bf16, float32 sums, pairs in ascending order; a row of C depends on its row of A alone. GCC's
 * tile intrinsics require literal register numbers. */
#ifndef KEEPD_KERNELS_CPU_AMX_H
#define KEEPD_KERNELS_CPU_AMX_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define TILE_BYTES 1024
#define TILE_DEPTH 32 /* bf16 per row of A: inputs one tile product consumes */

struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16]; /* row bytes of tiles 0 to 7 */
    uint8_t rows[16];
};

/* Configures tiles 0-3 and 4-5 (sums and A) with `rows` rows, and tiles 6-7 (B) and from
 * `first_full` on with sixteen. */
static inline void amx_configure(int rows, int first_full) {
    struct amx_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = (uint8_t)(i < first_full ? rows : 16);
    }
    /* gcc 12's intrinsic tells the optimiser about the first bytes only */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

#endif
