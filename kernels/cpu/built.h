/* Paths that this build contains, as 0 or 1. With KEEPD_CPU_PATHS=all it contains every path of the
 * architecture. With KEEPD_CPU_PATHS=native it contains only what the processor that compiled it
 * needs: CMake then defines KEEPD_CPU_NATIVE and, with the value 1, CPU_HAS_ and the path's name.
 */
#ifndef KEEPD_KERNELS_CPU_BUILT_H
#define KEEPD_KERNELS_CPU_BUILT_H

#ifndef KEEPD_CPU_NATIVE
#define CPU_HAS_PORTABLE 1
#if defined(__x86_64__)
#define CPU_HAS_AVX2   1
#define CPU_HAS_AVX512 1
#define CPU_HAS_VNNI   1 /* products of blocks only */
#define CPU_HAS_BF16   1 /* avx512 that rounds to bf16 */
#define CPU_HAS_AMX    1
#elif defined(__aarch64__)
#define CPU_HAS_NEON 1
#define CPU_HAS_I8MM 1 /* products of blocks only */
#endif
#endif

#ifndef CPU_HAS_PORTABLE
#define CPU_HAS_PORTABLE 0
#endif
#ifndef CPU_HAS_AVX2
#define CPU_HAS_AVX2 0
#endif
#ifndef CPU_HAS_AVX512
#define CPU_HAS_AVX512 0
#endif
#ifndef CPU_HAS_VNNI
#define CPU_HAS_VNNI 0
#endif
#ifndef CPU_HAS_BF16
#define CPU_HAS_BF16 0
#endif
#ifndef CPU_HAS_AMX
#define CPU_HAS_AMX 0
#endif
#ifndef CPU_HAS_NEON
#define CPU_HAS_NEON 0
#endif
#ifndef CPU_HAS_I8MM
#define CPU_HAS_I8MM 0
#endif

/* The address of what a path defines, or NULL if the build does not contain the path. The condition
 * is a constant, so that the compiler refers to no symbol that is missing. */
#define CPU_IF_BUILT(path, address) ((path) ? (address) : NULL)

#endif
