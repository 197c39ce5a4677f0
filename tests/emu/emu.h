/* CUDA kernels on the CPU: what a kernel body needs from nvcc and from kernels/cuda/ptx.cuh, for
 * the host compiler.
 *
 * Every CUDA thread is a fiber; the blocks of a launch run one after the other, the fibers of a
 * block take turns and change only where a real thread may wait: barriers, warp collectives,
 * mbarriers. So a kernel's own code runs unchanged, and what it may not rely on is made as bad as
 * the rules allow:
 *
 *   - the order of fibers and of blocks, and whether a bulk copy arrives at once or as late as
 *     possible, are drawn from a seed (emu_seed);
 *   - shared memory starts as NaN, so do new and scratch global memory; where a late copy will land
 *     is NaN until then;
 *   - shared memory and every global buffer end at an unmapped page: what reads or writes beyond
 *     them stops the program with kernel, block, thread and buffer;
 *   - warp collectives want all live lanes at the same line, __syncthreads all live threads;
 *   - fibers that wait for what can no longer come are named, each with its place;
 *   - kernels that may overlap the launches before them find global memory unmapped until they have
 *     waited for those, which every thread must;
 *   - bulk copies and matrix loads check alignment, range and that someone waits for the copy;
 *   - copies of 16 bytes by threads (cp.async) arrive, too, at once or late, and what nobody waits
 *     for, or threads write over meanwhile, is named;
 *   - the copy engine is no thread: an mbarrier is shown to it by a fence of whom initialised it,
 *     and it does not write where threads have written since the last fence, or write meanwhile.
 *
 * It does not model memory order, races between barriers beyond what other orders show, or time.
 * Threads take turns: a launch has the emulator for itself. */
#ifndef KEEPD_TESTS_EMU_H
#define KEEPD_TESTS_EMU_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- The language ---- */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

/* ---- Running kernels ---- */

struct emu_place {
    const char *file;
    int line;

    static constexpr emu_place here(const char *file = __builtin_FILE(),
                                    int line = __builtin_LINE()) {
        return {file, line};
    }
};

/* Where a call stands; as default argument of what kernels call. */
#define EMU_HERE emu_place::here()

/* The order of everything that has none, from now on. 0: threads and blocks ascend, copies are
 * immediate. */
void emu_seed(uint64_t seed);

/* Has the device bulk copies, as it has at first? Without them whoever uses them is named. */
void emu_bulk(bool has);

/* Runs body(arg) as every thread of the grid. NULL, or what went wrong (static text, valid until
 * the next launch); then the launch was abandoned in the middle. `shared` bytes of dynamic shared
 * memory. */
const char *emu_run(const char *name, dim3 grid, int threads, size_t shared, void (*body)(void *),
                    void *arg, bool overlapped);

/* `overlapped`: it may run while earlier launches do. So every thread calls ptx_overlap_grids, and
 * global memory cannot be touched before all of the block have (looked at in the first blocks of
 * the first launches of a kernel: what comes before does not depend on data). */
template <class Body>
const char *emu_launch(const char *name, dim3 grid, int threads, size_t shared, Body body,
                       bool overlapped = false) {
    return emu_run(
        name, grid, threads, shared, [](void *arg) { (*static_cast<Body *>(arg))(); }, &body,
        overlapped);
}

/* Does one thread alone use the emulator and all global memory, as at first? Memory can be taken
 * from a launch for a while only if nobody else reads it meanwhile. */
void emu_alone(bool alone);

/* Global memory: NaN (0xff) throughout, begins on 16 bytes, ends at an unmapped page. */
void *emu_alloc(size_t bytes);
void emu_free(void *mem); /* NULL is fine */
/* Bytes in use by emu_alloc. */
size_t emu_allocated(void);

/* ---- A thread's view ---- */

struct emu_thread {
    dim3 index, block;
};

extern emu_thread *emu_self;
extern dim3 emu_grid_dim, emu_block_dim;

#define threadIdx (emu_self->index)
#define blockIdx  (emu_self->block)
#define gridDim   emu_grid_dim
#define blockDim  emu_block_dim

void *emu_shared();
#define SHARED_MEMORY(name) char *name = static_cast<char *>(emu_shared())

/* A kernel found itself wrong: ends the launch. */
[[noreturn]] void emu_fail(emu_place place, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- Waiting ---- */

void emu_block_barrier(emu_place place);
void emu_named_barrier(int id, int threads, emu_place place);

/* All lanes of the warp deposit `in`; the last one computes everybody's `out`. At most
 * EMU_WARP_BYTES each. `work` sees the lanes' bytes one EMU_WARP_BYTES after the other. */
#define EMU_WARP_BYTES 64
typedef void emu_warp_work(const char *in, char *out, const void *common);
void emu_warp(const char *what, uint32_t mask, const void *in, size_t in_bytes, void *out,
              size_t out_bytes, emu_warp_work *work, const void *common, emu_place place);

static inline void __syncthreads(emu_place place = EMU_HERE) {
    emu_block_barrier(place);
}

static inline void __syncwarp(uint32_t mask = 0xffffffffu, emu_place place = EMU_HERE) {
    emu_warp("__syncwarp", mask, nullptr, 0, nullptr, 0, nullptr, nullptr, place);
}

/* ---- Warp collectives ---- */

struct emu_shuffle {
    int lane; /* where from, or what to change the own lane by */
    enum { INDEX, XOR, UP, DOWN } kind;
};

template <class T> void emu_shuffle_work(const char *in, char *out, const void *common) {
    const emu_shuffle *how = static_cast<const emu_shuffle *>(common);
    for (int lane = 0; lane < 32; lane++) {
        int from = how->kind == emu_shuffle::INDEX ? how->lane & 31
                   : how->kind == emu_shuffle::XOR ? lane ^ how->lane
                   : how->kind == emu_shuffle::UP  ? lane - how->lane
                                                   : lane + how->lane;
        if (from < 0 || from > 31) from = lane;
        memcpy(out + lane * EMU_WARP_BYTES, in + from * EMU_WARP_BYTES, sizeof(T));
    }
}

template <class T>
T emu_shuffle_by(const char *what, uint32_t mask, T value, emu_shuffle how, emu_place place) {
    T out;
    emu_warp(what, mask, &value, sizeof value, &out, sizeof out, emu_shuffle_work<T>, &how, place);
    return out;
}

/* The source lane must be the same for all lanes: kernels here need no other form. */
template <class T>
T __shfl_sync(uint32_t mask, T value, int lane, int = 32, emu_place place = EMU_HERE) {
    return emu_shuffle_by("__shfl_sync", mask, value, {lane, emu_shuffle::INDEX}, place);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int by, int = 32, emu_place place = EMU_HERE) {
    return emu_shuffle_by("__shfl_xor_sync", mask, value, {by, emu_shuffle::XOR}, place);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int by, int = 32, emu_place place = EMU_HERE) {
    return emu_shuffle_by("__shfl_up_sync", mask, value, {by, emu_shuffle::UP}, place);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, int by, int = 32, emu_place place = EMU_HERE) {
    return emu_shuffle_by("__shfl_down_sync", mask, value, {by, emu_shuffle::DOWN}, place);
}

uint32_t emu_ballot(const char *what, uint32_t mask, bool vote, emu_place place);

static inline uint32_t __ballot_sync(uint32_t mask, int vote, emu_place place = EMU_HERE) {
    return emu_ballot("__ballot_sync", mask, vote != 0, place);
}
static inline int __any_sync(uint32_t mask, int vote, emu_place place = EMU_HERE) {
    return emu_ballot("__any_sync", mask, vote != 0, place) != 0;
}
static inline int __all_sync(uint32_t mask, int vote, emu_place place = EMU_HERE) {
    return emu_ballot("__all_sync", mask, vote == 0, place) == 0;
}

/* For every lane, the lanes with the same value. */
static inline void emu_match_work(const char *in, char *out, const void *) {
    for (int lane = 0; lane < 32; lane++) {
        uint32_t same = 0;
        for (int other = 0; other < 32; other++)
            if (!memcmp(in + lane * EMU_WARP_BYTES, in + other * EMU_WARP_BYTES, sizeof(int)))
                same |= 1u << other;
        memcpy(out + lane * EMU_WARP_BYTES, &same, sizeof same);
    }
}
static inline uint32_t __match_any_sync(uint32_t mask, int value, emu_place place = EMU_HERE) {
    uint32_t out;
    emu_warp("__match_any_sync", mask, &value, sizeof value, &out, sizeof out, emu_match_work,
             nullptr, place);
    return out;
}

/* ---- Atomics: fibers change only where they wait ---- */

template <class T> T atomicAdd(T *at, T value) {
    T old = *at;
    *at = old + value;
    return old;
}
template <class T> T atomicSub(T *at, T value) {
    T old = *at;
    *at = old - value;
    return old;
}
template <class T> T atomicMax(T *at, T value) {
    T old = *at;
    if (value > old) *at = value;
    return old;
}
template <class T> T atomicMin(T *at, T value) {
    T old = *at;
    if (value < old) *at = value;
    return old;
}
template <class T> T atomicCAS(T *at, T expected, T value) {
    T old = *at;
    if (old == expected) *at = value;
    return old;
}
static inline void __threadfence() {}

/* ---- Numbers ---- */

static inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline float __fmul_rn(float a, float b) {
    return a * b;
}
static inline float __fadd_rn(float a, float b) {
    return a + b;
}
static inline float __fdiv_rn(float a, float b) {
    return a / b;
}
static inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}
static inline int __popc(uint32_t x) {
    return __builtin_popcount(x);
}
static inline int __clz(int x) {
    return x ? __builtin_clz(static_cast<unsigned>(x)) : 32;
}
static inline int __ffs(int x) {
    return __builtin_ffs(x);
}
static inline double __dmul_rn(double a, double b) {
    return a * b;
}
static inline double __dadd_rn(double a, double b) {
    return a + b;
}
static inline double __ddiv_rn(double a, double b) {
    return a / b;
}
static inline uint32_t __umulhi(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

/* ---- The twins of ptx.cuh ---- */

float ptx_exp2(float x);
void ptx_load_matrix(uint32_t out[4], const void *row, emu_place place = EMU_HERE);
void ptx_load_matrix_transposed(uint32_t out[4], const void *row, emu_place place = EMU_HERE);
void ptx_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, emu_place place = EMU_HERE);
void ptx_mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1,
                 emu_place place = EMU_HERE);
void ptx_mma_s8(int32_t c[4], const uint32_t a[4], uint32_t b0, uint32_t b1,
                emu_place place = EMU_HERE);
void ptx_mma_u8(int32_t c[4], const uint32_t a[4], uint32_t b0, uint32_t b1,
                emu_place place = EMU_HERE);
uint32_t ptx_pack_bf16(float low, float high);
uint32_t ptx_sub_bf16(uint32_t a, uint32_t b);
void ptx_overlap_grids(emu_place place = EMU_HERE);
uint32_t ptx_pack_e4m3(float low, float high);
uint32_t ptx_f16_of_e4m3(uint32_t pair);
uint32_t ptx_pack_f16(float low, float high);
float2 ptx_unpack_f16(uint32_t pair);
uint32_t ptx_sub_f16(uint32_t a, uint32_t b);
uint32_t ptx_mul_f16(uint32_t a, uint32_t b);
uint32_t ptx_f16_of_bytes(uint32_t word, bool high);

void ptx_barrier_init(uint64_t *barrier, int arrivals, emu_place place = EMU_HERE);
void ptx_barrier_init_fence(emu_place place = EMU_HERE);
void ptx_shared_fence();
void ptx_barrier_expect(uint64_t *barrier, uint32_t bytes, emu_place place = EMU_HERE);
void ptx_barrier_wait(uint64_t *barrier, uint32_t parity, emu_place place = EMU_HERE);
bool ptx_has_bulk();
void ptx_async_copy(void *shared, const void *global, emu_place place = EMU_HERE);
void ptx_async_arrive(uint64_t *barrier, emu_place place = EMU_HERE);
void ptx_bulk_copy(void *shared, const void *global, uint32_t bytes, uint64_t *barrier,
                   emu_place place = EMU_HERE);
static inline void ptx_named_barrier(int id, int threads, emu_place place = EMU_HERE) {
    emu_named_barrier(id, threads, place);
}

#endif
