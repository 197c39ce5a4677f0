/* Members of classes (kern.h, struct kern_classes) on the device; kernels/cpu/classes.c is the
 * reference. A member is 12 bytes in a page. Its key, the centre's key rotated to its position, is
 * computed in shared memory where it is multiplied, CLASS_KEYS at a time and for all queries of a
 * block: no such key is written to the pool, and tensor cores compute the products. A rotated key
 * cannot be represented in bf16, so it is split into two bf16, the rounded value and the remainder:
 * products are as accurate as in float32. */
#ifndef KEEPD_KERNELS_CUDA_CLASSES_CUH
#define KEEPD_KERNELS_CUDA_CLASSES_CUH

#include "kernels/cuda/keys.cuh"
#include "kernels/cuda/row8.cuh"

#define CLASS_KEYS (PRODUCT_KEYS / 2)

/* Number of members of a row whose centre is before `pos`. */
static __device__ __forceinline__ int members_before(const struct pages &p, const int32_t *table,
                                                     int count, int pos) {
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (members_at(p, table, middle)->centre < pos)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---- Pieces of keys ---- */

/* Eight dimensions of the first half of a key or value, and their partners in the second half. */
struct piece_pair {
    float a[CHUNK_DIMS], b[CHUNK_DIMS];
};

static __device__ __forceinline__ void piece_widen(float to[CHUNK_DIMS], uint4 from) {
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

/* Chunk `chunk` of the first half; side 0 is K, 1 is V. */
template <int D>
static __device__ __forceinline__ struct piece_pair
piece_load(const struct pages &p, const int32_t *table, int side, int entry, int chunk) {
    int32_t page = table[entry / p.page_slots];
    int row = entry % p.page_slots;
    struct piece_pair x;
    piece_widen(x.a, pages_read_piece(p, page, side, row, chunk));
    piece_widen(x.b, pages_read_piece(p, page, side, row, chunk + D / CHUNK_DIMS / 2));
    if (!p.scaled) return x;
    const float by = pages_scale(p, page, side, row);
    for (int i = 0; i < CHUNK_DIMS; i++) {
        x.a[i] = __fmul_rn(x.a[i], by);
        x.b[i] = __fmul_rn(x.b[i], by);
    }
    return x;
}

/* Rotates rows as the cache's rows are, there and back (kernels/row.h): neighbouring lanes have the
 * pieces of a row, and all lanes of the warp take part. No effect where rows are not rotated. */
template <int D>
static __device__ __forceinline__ void piece_rotate(struct piece_pair &x, const struct pages &p) {
    const int LANES = D / CHUNK_DIMS / 2;
    if (!p.scaled) return;
    const float by = row8_scale(D);
    row8_sums(x.a, LANES);
    row8_sums(x.b, LANES);
    for (int i = 0; i < CHUNK_DIMS; i++) {
        float a = x.a[i], b = x.b[i];
        x.a[i] = __fmul_rn(__fadd_rn(a, b), by);
        x.b[i] = __fmul_rn(__fadd_rn(a, -b), by);
    }
}

/* `count` pieces for the threads of a block: with lanes for whole warps, as piece_rotate needs. */
static __device__ __forceinline__ int piece_lanes(int count) {
    return (count + 31) / 32 * 32;
}

/* Rotates by a number of positions, forward or back. */
static __device__ __forceinline__ void piece_turn(struct piece_pair &x, const struct pages &p,
                                                  int positions, int chunk) {
    if (positions == 0) return;
    for (int i = 0; i < CHUNK_DIMS; i++) {
        float2 turn = pages_turn(p, positions < 0 ? -positions : positions, chunk * CHUNK_DIMS + i);
        float a = x.a[i], b = x.b[i], s = positions < 0 ? -turn.y : turn.y;
        x.a[i] = __fadd_rn(__fmul_rn(a, turn.x), -__fmul_rn(b, s));
        x.b[i] = __fadd_rn(__fmul_rn(b, turn.x), __fmul_rn(a, s));
    }
}

static __device__ __forceinline__ uint4 piece_narrow(const float x[CHUNK_DIMS]) {
    uint4 out = {ptx_pack_bf16(x[0], x[1]), ptx_pack_bf16(x[2], x[3]), ptx_pack_bf16(x[4], x[5]),
                 ptx_pack_bf16(x[6], x[7])};
    return out;
}

/* Splits x into the nearest bf16 numbers and the remainders. */
static __device__ __forceinline__ void piece_split(const float x[CHUNK_DIMS], char *high,
                                                   char *low) {
    uint4 rounded = piece_narrow(x);
    float wide[CHUNK_DIMS];
    piece_widen(wide, rounded);
    for (int i = 0; i < CHUNK_DIMS; i++) wide[i] = __fadd_rn(x[i], -wide[i]);
    *(uint4 *)high = rounded;
    *(uint4 *)low = piece_narrow(wide);
}

#endif
