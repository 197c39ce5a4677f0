/* Kernels written once over simd.h and compiled once per path. VEC(name) adds the path
 * to a kernel's name; the AMX path uses the AVX-512 ones for everything but tile products. */
#ifndef KEEPD_KERNELS_CPU_VEC_H
#define KEEPD_KERNELS_CPU_VEC_H

#include "kernels/cpu/internal.h"

#define VEC_DECLARE(path)                                                                          \
    void cpu_rms_norm_##path(float *y, const float *x, const float *weight, int dim, float eps);   \
    void cpu_glu_##path(float *y, const float *gate, const float *up, int count,                   \
                        enum kern_activation activation);                                          \
    void cpu_rope_##path(float *x, int half, const float *cosine, const float *sine,               \
                         const float *norm, float eps);                                            \
    void cpu_write_row_##path(void *row, const float *from, int count, enum kern_dtype dtype);     \
    void cpu_delta_##path(float *state, int dim, const struct cpu_delta_token *token, float *out); \
    /* Returns the row's scale, see kernels/quantize.h; if it is not finite, no codes are written  \
     */                                                                                            \
    float cpu_quantize_row_##path(uint8_t *codes, const void *row, int64_t cols,                   \
                                  enum kern_dtype dtype);                                          \
    /* A tile of 4 by 16: row i of `to` += the sum over rows of of[i] times x[0..16) */            \
    void cpu_moments_tile_##path(float *to, int64_t to_stride, const float *x, const float *of,    \
                                 int64_t stride, int rows);                                        \
    /* Four sums over `count` numbers, a multiple of 16: of u times row i of e */                  \
    void cpu_moments_dots_##path(const float *u, const float *e, int64_t stride, int64_t count,    \
                                 float *to);                                                       \
    void cpu_moments_subtract_##path(float *to, const float *from, float times, int64_t count);    \
    void cpu_matmul_##path(const struct cpu_matmul_job *job, int64_t first, int64_t count,         \
                           int64_t next, void *scratch);                                           \
    size_t cpu_matmul_scratch_##path(const struct kern_weight *weight);                            \
    size_t cpu_attend_scratch_##path(const struct kern_cache_options *options);                    \
    int cpu_attend_lanes_##path(const struct kern_cache_options *options);                         \
    void cpu_attend_##path(const struct cpu_attend_job *job, const struct cpu_attend_item *item,   \
                           void *scratch);                                                         \
    void cpu_row_rotate_##path(float *x, int dim); /* kernels/row.c */                             \
    void cpu_row_write_##path(void *codes, uint16_t *factor, const float *from, int dim,           \
                              enum kern_dtype dtype);                                              \
    extern const struct cpu_math cpu_math_##path;

VEC_DECLARE(portable)
VEC_DECLARE(avx2)
VEC_DECLARE(avx512)
VEC_DECLARE(neon)
VEC_DECLARE(bf16) /* only its matmul and attend: products of pairs of bf16 */

size_t cpu_packed_bytes_amx(int64_t depth);
size_t cpu_matmul_scratch_amx(const struct kern_weight *weight);
void cpu_pack_x_amx(const struct cpu_matmul_job *job, int row, char *packed);
void cpu_matmul_amx(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                    void *scratch);

size_t cpu_attend_scratch_amx(const struct kern_cache_options *options);
int cpu_attend_lanes_amx(const struct kern_cache_options *options);
void cpu_attend_amx(const struct cpu_attend_job *job, const struct cpu_attend_item *item,
                    void *scratch);

#define VEC_JOIN_(name, path) cpu_##name##_##path
#define VEC_JOIN(name, path)  VEC_JOIN_(name, path)
#define VEC(name)             VEC_JOIN(name, CPU_PATH) /* CPU_PATH: defined by the build, per path */

#endif
