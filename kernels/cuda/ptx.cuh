/* The machine instructions of kernels: all inline PTX of the backend is in this file.
 *
 * Kernel sources are compiled twice: by nvcc, and by the host compiler for the fiber emulator of
 * tests/emu, with KEEPD_EMU and a header that the compiler is told to include first; that header
 * defines what this file then leaves out. So a kernel uses these functions, the CUDA built-ins that
 * the emulator knows (warp shuffles and votes with a full mask, __syncthreads, atomics), and no
 * CUB.
 *
 * Fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): with g = lane / 4 and t
 * = lane % 4, a[i] holds row g + 8 (i & 1), columns 2t + 8 (i >> 1), +1; b[i] rows 2t + 8 i, +1 of
 * column g; c[i] row g + 8 (i >> 1), column 2t + (i & 1). mma.m16n8k32 of bytes: a[i] holds row g +
 * 8 (i & 1), columns 4t + 16 (i >> 1) to + 3; b[i] rows 4t + 16 i to + 3 of column g; c the same.
 */
#ifndef KEEPD_KERNELS_CUDA_PTX_CUH
#define KEEPD_KERNELS_CUDA_PTX_CUH

#include <stdint.h>

#define WARP_ALL 0xffffffffu

#ifndef KEEPD_EMU

/* Before compute capability 9.0 there are no bulk copies, no waits that sleep and no launches that
 * overlap; before 8.9, no conversions of E4M3. This file has what takes their place. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define PTX_90 1
#else
#define PTX_90 0
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
#define PTX_E4M3 1
#else
#define PTX_E4M3 0
#endif

#define SHARED_MEMORY(name) extern __shared__ __align__(128) char name[]

static __device__ __forceinline__ uint32_t ptx_shared(const void *at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

static __device__ __forceinline__ float ptx_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* a b of two float16 each, nearest even. */
static __device__ __forceinline__ uint32_t ptx_mul_f16(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

#endif

/* ---- E4M3 in software: the bits of the instructions ---- */

static __device__ __forceinline__ uint32_t soft_e4m3(float x) {
    uint32_t bits = __float_as_uint(x), size = bits & 0x7fffffffu, code;
    if (size > 0x7f800000u) return 0x7f;
    if (size < 121u << 23) /* below 2^-6 in steps of 2^-9, as float32 has from 2^14 on */
        code =
            __float_as_uint(__fadd_rn(__uint_as_float(size), 0x1p14f)) - __float_as_uint(0x1p14f);
    else
        code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3);
    return (bits >> 24 & 0x80) | (code < 0x7e ? code : 0x7e);
}

/* A float16 with the fields of an E4M3 number is 2^-8 of it, normal or not; NaN has its own code.
 */
static __device__ __forceinline__ uint32_t soft_f16_of_e4m3(uint32_t pair) {
    uint32_t high = (pair & 0xff) << 8 | (pair & 0xff00) << 16;
    uint32_t nan = ((high & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    uint32_t wide =
        ptx_mul_f16((high & 0x80008000u) | (high & 0x7f007f00u) >> 1, 0x5c005c00u /* 256 */);
    return (wide | (nan - (nan >> 15))) & ~nan;
}

#ifndef KEEPD_EMU

/* Two bf16, nearest even; `low` in the low half. */
static __device__ __forceinline__ uint32_t ptx_pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Two E4M3 numbers, nearest even, at most 448 in magnitude; `low` in the low byte. */
static __device__ __forceinline__ uint32_t ptx_pack_e4m3(float low, float high) {
#if PTX_E4M3
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return soft_e4m3(low) | soft_e4m3(high) << 8;
#endif
}

/* Two E4M3 numbers, in the low bytes, converted exactly to float16. */
static __device__ __forceinline__ uint32_t ptx_f16_of_e4m3(uint32_t pair) {
#if PTX_E4M3
    uint32_t wide;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"((uint16_t)pair));
    return wide;
#else
    return soft_f16_of_e4m3(pair);
#endif
}

/* Two float16, nearest even, at most 65504 in magnitude; `low` in the low half. And back. */
static __device__ __forceinline__ uint32_t ptx_pack_f16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* a - b of two float16 each, nearest even. */
static __device__ __forceinline__ uint32_t ptx_sub_f16(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

/* Bytes 0 and 1 (high: 2 and 3) of the word, each plus 1024, in float16. */
static __device__ __forceinline__ uint32_t ptx_f16_of_bytes(uint32_t word, bool high) {
    uint32_t pair;
    asm("prmt.b32 %0, %1, %2, %3;"
        : "=r"(pair)
        : "r"(word), "r"(0x64646464u), "r"(high ? 0x7372u : 0x7170u));
    return pair;
}

/* a - b of two bf16 each, nearest even. */
static __device__ __forceinline__ uint32_t ptx_sub_bf16(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return pair;
}

static __device__ __forceinline__ float2 ptx_unpack_f16(uint32_t pair) {
    float2 wide;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}\n"
        : "=f"(wide.x), "=f"(wide.y)
        : "r"(pair));
    return wide;
}

/* First statement of a kernel that LAUNCH_OVERLAPPED launches, by every thread: the next launch may
 * start, and nothing after this runs before all earlier launches have ended and their writes are
 * visible. No effect without the overlap, which devices before 9.0 do not have. */
static __device__ __forceinline__ void ptx_overlap_grids() {
#if PTX_90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Four 8 x 8 matrices of 16-bit numbers from shared memory: lane 8 i + r names row r of matrix i;
 * out[i] is this lane's pair of matrix i, row lane / 4. */
static __device__ __forceinline__ void ptx_load_matrix(uint32_t out[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(ptx_shared(row))
                 : "memory");
}

/* The same, each matrix transposed. */
static __device__ __forceinline__ void ptx_load_matrix_transposed(uint32_t out[4],
                                                                  const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(ptx_shared(row))
                 : "memory");
}

/* c += a b, bf16 in, float32 sums. */
static __device__ __forceinline__ void ptx_mma(float c[4], const uint32_t a[4], uint32_t b0,
                                               uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same, float16 in. */
static __device__ __forceinline__ void ptx_mma_f16(float c[4], const uint32_t a[4], uint32_t b0,
                                                   uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c += a b, signed bytes in, sums of 32 bits; the same with unsigned bytes in a. */
static __device__ __forceinline__ void ptx_mma_s8(int32_t c[4], const uint32_t a[4], uint32_t b0,
                                                  uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void ptx_mma_u8(int32_t c[4], const uint32_t a[4], uint32_t b0,
                                                  uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Initialises an mbarrier in shared memory: a phase ends when `arrivals` threads have arrived and
 * all announced bytes have been copied. */
static __device__ __forceinline__ void ptx_barrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx_shared(barrier)), "r"(arrivals)
                 : "memory");
}

/* Required between initialisation and the first use by the copy engine. */
static __device__ __forceinline__ void ptx_barrier_init_fence() {
#if PTX_90
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Required after threads have written where the copy engine will write next. */
static __device__ __forceinline__ void ptx_shared_fence() {
#if PTX_90
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Waits until the phase of this parity (0 for the first) has ended. */
static __device__ __forceinline__ void ptx_barrier_wait(uint64_t *barrier, uint32_t parity) {
#if PTX_90
#define PTX_WAIT "mbarrier.try_wait.parity"
#else
#define PTX_WAIT "mbarrier.test_wait.parity"
#endif
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n" PTX_WAIT ".shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n" ::"r"(ptx_shared(barrier)),
                 "r"(parity)
                 : "memory");
#undef PTX_WAIT
}

/* Has the device bulk copies? If not, ptx_barrier_expect and ptx_bulk_copy must not be called. */
static __device__ __forceinline__ bool ptx_has_bulk() {
    return PTX_90;
}

/* Arrives once and announces `bytes`. */
static __device__ __forceinline__ void ptx_barrier_expect(uint64_t *barrier, uint32_t bytes) {
#if PTX_90
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx_shared(barrier)),
        "r"(bytes)
        : "memory");
#endif
}

/* A bulk copy by one instruction of one thread; both addresses and `bytes` are multiples of 16. */
static __device__ __forceinline__ void ptx_bulk_copy(void *shared, const void *global,
                                                     uint32_t bytes, uint64_t *barrier) {
#if PTX_90
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(ptx_shared(shared)),
                 "l"(global), "r"(bytes), "r"(ptx_shared(barrier))
                 : "memory");
#endif
}

/* Starts a copy of 16 bytes, both addresses multiples of 16. */
static __device__ __forceinline__ void ptx_async_copy(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(ptx_shared(shared)),
                 "l"(global)
                 : "memory");
}

/* Arrives once, as soon as all copies that this thread has started have arrived. */
static __device__ __forceinline__ void ptx_async_arrive(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ptx_shared(barrier))
                 : "memory");
}

static __device__ __forceinline__ void ptx_named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif
#endif
