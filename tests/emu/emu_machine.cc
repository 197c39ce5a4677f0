/* The emulator itself: what it promises to do, and that every kind of wrong kernel is caught. A
 * plain program: each case says what it expects, the first one that fails ends it. */
#define KEEPD_EMU
#include "emu.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda/ptx.cuh"

extern "C" {
#include "base/check.h"
}

#define ALL 0xffffffffu

template <class Body> static const char *run(dim3 grid, int threads, size_t shared, Body body) {
    return emu_launch("kernel", grid, threads, shared, body);
}

/* The launch is refused and the report contains `part`. */
template <class Body> static void expect_error(const char *part, int threads, Body body) {
    const char *error = run(1, threads, 1024, body);
    if (!error || !strstr(error, part)) {
        fprintf(stderr, "expected \"%s\", got: %s\n", part, error ? error : "no error");
        exit(1);
    }
}

/* The process is ended by a fault whose report names the place. */
template <class Body> static void expect_fault(Body body, bool overlapped = false) {
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(9);
        emu_launch("kernel", 1, 32, 1024, body, overlapped);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(!(WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

/* ---- Right kernels ---- */

static void every_thread_runs_once() {
    for (uint64_t seed = 0; seed < 4; seed++) {
        int seen[6][70] = {};
        emu_seed(seed);
        CHECK(!run(dim3(3, 2), 70, 0, [&] {
            CHECK(gridDim.x == 3 && gridDim.y == 2 && blockDim.x == 70);
            seen[blockIdx.y * 3 + blockIdx.x][threadIdx.x]++;
        }));
        for (auto &block : seen)
            for (int count : block) CHECK(count == 1);
    }
}

static void barriers_order_shared_memory() {
    for (uint64_t seed = 0; seed < 4; seed++) {
        emu_seed(seed);
        CHECK(!run(2, 256, 1024, [] {
            SHARED_MEMORY(shared);
            int *room = reinterpret_cast<int *>(shared), me = static_cast<int>(threadIdx.x);
            for (int round = 0; round < 3; round++) {
                room[me] = me + round;
                __syncthreads();
                CHECK(room[255 - me] == 255 - me + round);
                __syncthreads();
            }
        }));
    }
}

static void shared_memory_starts_as_nan() {
    for (int times = 0; times < 2; times++)
        CHECK(!run(2, 32, 1024, [] {
            SHARED_MEMORY(shared);
            float *room = reinterpret_cast<float *>(shared);
            for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) {
                CHECK(isnan(room[i]));
                room[i] = 0;
            }
        }));
}

static void collectives() {
    emu_seed(9);
    CHECK(!run(1, 64, 0, [] {
        int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
        CHECK(__shfl_sync(ALL, lane + 100 * warp, 7) == 7 + 100 * warp);
        CHECK(__shfl_xor_sync(ALL, lane, 5) == (lane ^ 5));
        CHECK(__shfl_up_sync(ALL, lane, 4) == (lane < 4 ? lane : lane - 4));
        CHECK(__shfl_down_sync(ALL, lane, 4) == (lane > 27 ? lane : lane + 4));
        CHECK(__shfl_xor_sync(ALL, 1.5 * lane, 1) == 1.5 * (lane ^ 1));
        CHECK(__ballot_sync(ALL, lane % 3 == 0) == 0x49249249u);
        CHECK(__any_sync(ALL, lane == 31) && !__any_sync(ALL, false));
        CHECK(__all_sync(ALL, true) && !__all_sync(ALL, lane != 4));
    }));
}

static void named_barriers() {
    static int order;
    order = 0;
    emu_seed(2);
    CHECK(!run(1, 128, 0, [] {
        bool first = threadIdx.x < 64;
        ptx_named_barrier(first ? 1 : 2, 64);
        if (threadIdx.x == 0) order = 1;
        __syncthreads();
        CHECK(order == 1);
    }));
}

static void matrices() {
    static float a[16][16], b[16][8], c[16][8];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) a[i][j] = static_cast<float>((i * 7 + j * 3) % 11 - 5);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) b[i][j] = static_cast<float>((i * 5 + j) % 7 - 3);
    emu_seed(4);
    CHECK(!run(1, 32, 1024, [] {
        SHARED_MEMORY(shared);
        uint32_t *rows = reinterpret_cast<uint32_t *>(shared); /* b transposed: 8 rows of 16 */
        int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
        for (int i = lane; i < 64; i += 32)
            rows[i] = ptx_pack_bf16(b[i % 8 * 2][i / 8], b[i % 8 * 2 + 1][i / 8]);
        __syncwarp();
        uint32_t left[4], right[4], again[4], left_f16[4], right_f16[2];
        for (int i = 0; i < 4; i++) {
            const float *row = a[g + 8 * (i & 1)] + 2 * t + 8 * (i >> 1);
            left[i] = ptx_pack_bf16(row[0], row[1]);
            left_f16[i] = ptx_pack_f16(row[0], row[1]);
        }
        for (int i = 0; i < 2; i++)
            right_f16[i] = ptx_pack_f16(b[2 * t + 8 * i][g], b[2 * t + 8 * i + 1][g]);
        ptx_load_matrix(right, shared + lane % 8 * 32 + lane / 8 % 2 * 16);
        CHECK(right[0] == ptx_pack_bf16(b[2 * t][g], b[2 * t + 1][g]));
        CHECK(right[1] == ptx_pack_bf16(b[2 * t + 8][g], b[2 * t + 9][g]));
        ptx_load_matrix_transposed(again, shared + lane % 8 * 32);
        CHECK(again[0] == ptx_pack_bf16(b[g][2 * t], b[g][2 * t + 1]));
        float sum[4] = {1, 2, 3, 4}, same[4] = {1, 2, 3, 4};
        ptx_mma(sum, left, right[0], right[1]);
        ptx_mma_f16(same, left_f16, right_f16[0], right_f16[1]);
        for (int i = 0; i < 4; i++) CHECK(same[i] == sum[i]);
        for (int i = 0; i < 4; i++) c[g + 8 * (i >> 1)][2 * t + (i & 1)] = sum[i] - 1 - i;
    }));
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            float want = 0;
            for (int k = 0; k < 16; k++) want += a[i][k] * b[k][j];
            CHECK(c[i][j] == want);
        }
}

/* Products of bytes: the lowest number of each kind, the largest, and what lies between. */
static void matrices_of_bytes() {
    static int left[16][32], right[32][8];
    for (int i = 0; i < 32; i++) {
        for (int j = 0; j < 16; j++) left[j][i] = (i * 37 + j * 101) % 256;
        for (int j = 0; j < 8; j++) right[i][j] = (i * 53 + j * 29) % 256 - 128;
    }
    emu_seed(5);
    CHECK(!run(1, 32, 0, [] {
        int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
        uint32_t a[4] = {0}, b[2] = {0};
        for (int j = 0; j < 4; j++) {
            for (int i = 0; i < 4; i++)
                a[i] |= static_cast<uint32_t>(left[g + 8 * (i & 1)][4 * t + 16 * (i >> 1) + j])
                        << 8 * j;
            for (int i = 0; i < 2; i++)
                b[i] |= static_cast<uint32_t>(right[4 * t + 16 * i + j][g] & 255) << 8 * j;
        }
        int32_t whole[4] = {1, 2, 3, 4}, positive[4] = {1, 2, 3, 4};
        ptx_mma_s8(whole, a, b[0], b[1]);
        ptx_mma_u8(positive, a, b[0], b[1]);
        for (int i = 0; i < 4; i++) {
            int row = g + 8 * (i >> 1), col = 2 * t + (i & 1), with = 1 + i, without = 1 + i;
            for (int k = 0; k < 32; k++) {
                with += static_cast<int8_t>(left[row][k]) * right[k][col];
                without += left[row][k] * right[k][col];
            }
            CHECK(whole[i] == with && positive[i] == without);
        }
    }));
}

static void narrow_numbers() {
    for (uint32_t code = 0; code < 256; code++) {
        float2 x = ptx_unpack_f16(ptx_f16_of_e4m3(code | 0x38 << 8)); /* 0x38: 1 */
        int exponent = static_cast<int>(code >> 3 & 15), mantissa = static_cast<int>(code & 7);
        float want = exponent ? ldexpf(1 + static_cast<float>(mantissa) / 8, exponent - 7)
                              : ldexpf(static_cast<float>(mantissa), -9);
        bool nan = (code & 0x7f) == 0x7f;
        CHECK(x.y == 1 && (nan ? isnan(x.x) != 0 : x.x == (code & 0x80 ? -want : want)));
        CHECK(nan || ptx_pack_e4m3(x.x, 1) == (code | 0x38 << 8));
    }
    CHECK(ptx_pack_f16(65519, -1e30f) == 0xfbff7bff); /* the largest */
    CHECK(ptx_pack_f16(1 + 0x1p-11f, 1 + 0x3p-11f) == 0x3c023c00);
    CHECK(ptx_pack_f16(0x1p-25f, 0x3p-25f) == 0x00020000);
    CHECK(ptx_pack_f16(-0x1p-24f, NAN) == 0x7fff8001);
}

static void bulk_copies() {
    float *global = static_cast<float *>(emu_alloc(256));
    for (int i = 0; i < 64; i++) global[i] = static_cast<float>(i);
    for (uint64_t seed = 0; seed < 4; seed++) { /* odd: as late as possible */
        emu_seed(seed);
        CHECK(!run(2, 32, 1024, [=] {
            SHARED_MEMORY(shared);
            float *to = reinterpret_cast<float *>(shared);
            uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + 512);
            if (threadIdx.x == 0) {
                ptx_barrier_init(barrier, 1);
                ptx_barrier_init_fence();
            }
            __syncwarp();
            for (uint32_t round = 0; round < 3; round++) {
                if (threadIdx.x == 0) {
                    ptx_barrier_expect(barrier, 256);
                    ptx_bulk_copy(to, global, 128, barrier);
                    ptx_bulk_copy(to + 32, global + 32, 128, barrier);
                }
                ptx_barrier_wait(barrier, round & 1);
                CHECK(to[threadIdx.x] == static_cast<float>(threadIdx.x));
                CHECK(to[63 - threadIdx.x] == static_cast<float>(63 - threadIdx.x));
                __syncwarp();
                to[threadIdx.x] = 0;
                ptx_shared_fence();
                __syncwarp();
            }
        }));
    }
    emu_free(global);
}

/* E4M3 in software has the bits of the instructions: all pairs of codes; numbers between all codes.
 */
static void narrow_numbers_in_software() {
    for (uint32_t pair = 0; pair < 0x10000; pair++)
        CHECK(soft_f16_of_e4m3(pair) == ptx_f16_of_e4m3(pair));
    for (uint32_t i = 0; i < 1u << 22;
         i++) { /* 1,024 float32 around each of 4,096 exponents' steps */
        float x = __uint_as_float(i << 10 | (i * 0x9E3779B1u >> 22));
        CHECK(soft_e4m3(x) == ptx_pack_e4m3(x, 0));
    }
}

static void copies_by_threads() {
    float *global = static_cast<float *>(emu_alloc(512));
    for (int i = 0; i < 128; i++) global[i] = static_cast<float>(i);
    emu_bulk(false);
    for (uint64_t seed = 0; seed < 4; seed++) { /* odd: as late as possible */
        emu_seed(seed);
        CHECK(!run(2, 32, 1024, [=] {
            SHARED_MEMORY(shared);
            float *to = reinterpret_cast<float *>(shared);
            uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + 512);
            int me = static_cast<int>(threadIdx.x);
            if (me == 0) ptx_barrier_init(barrier, 32);
            __syncwarp();
            for (uint32_t round = 0; round < 3; round++) {
                ptx_async_copy(to + 4 * me, global + 4 * me);
                ptx_async_arrive(barrier);
                ptx_barrier_wait(barrier, round & 1);
                CHECK(to[127 - me] == static_cast<float>(127 - me));
                __syncwarp();
                to[me] = 0;
                __syncwarp();
            }
        }));
    }
    auto copy = [=](size_t to, bool arrives, bool during) {
        SHARED_MEMORY(shared);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + 512);
        ptx_barrier_init(barrier, 1);
        ptx_async_copy(shared + to, global);
        if (during) shared[to + 3] = 1;
        if (arrives) ptx_async_arrive(barrier);
        ptx_barrier_wait(barrier, 0);
    };
    emu_seed(1);
    CHECK(!run(1, 1, 1024, [=] { copy(0, true, false); }));
    expect_error("waits for bytes in mbarrier wait", 1, [=] { copy(0, false, false); });
    expect_error("not aligned to 16 bytes", 1, [=] { copy(8, true, false); });
    expect_error("outside shared memory", 1, [=] { copy(1024, true, false); });
    expect_error("threads wrote where the copies", 1, [=] { copy(0, true, true); });
    expect_error("was under way", 1, [=] {
        SHARED_MEMORY(shared);
        ptx_async_copy(shared, global);
    });
    expect_error("has no bulk copies", 1, [=] {
        SHARED_MEMORY(shared);
        ptx_bulk_copy(shared, global, 16, reinterpret_cast<uint64_t *>(shared + 512));
    });
    emu_bulk(true);
    emu_free(global);
}

/* ---- Wrong kernels ---- */

static void deadlocks_are_named() {
    expect_error("waits for bytes in mbarrier wait", 32, [] {
        SHARED_MEMORY(shared);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(shared);
        if (threadIdx.x == 0) ptx_barrier_init(barrier, 1);
        __syncwarp();
        ptx_barrier_wait(barrier, 0); /* nobody announces anything */
    });
    expect_error("waits at a named barrier", 64, [] {
        if (threadIdx.x < 32) ptx_named_barrier(1, 64);
    });
    expect_error("waits for the block in __syncthreads", 64, [] {
        if (threadIdx.x == 0) {
            ptx_named_barrier(3, 32);
            return;
        }
        __syncthreads();
    });
}

static void divergence_is_named() {
    expect_error("after a lane returned", 32, [] {
        if (threadIdx.x == 5) return;
        __syncwarp();
    });
    expect_error("while other lanes are in", 32, [] {
        if (threadIdx.x < 16)
            __syncwarp();
        else
            (void)__any_sync(ALL, true);
    });
    expect_error("other threads of the block wait at", 64, [] {
        if (threadIdx.x < 32)
            __syncthreads();
        else
            __syncthreads();
    });
    expect_error("mask", 32, [] { __syncwarp(0xffff); });
}

static void bad_copies_are_named() {
    static char *global;
    global = static_cast<char *>(emu_alloc(64));
    auto copy = [](size_t to, size_t from, uint32_t bytes, bool init) {
        SHARED_MEMORY(shared);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + 512);
        if (init) {
            ptx_barrier_init(barrier, 1);
            ptx_barrier_init_fence();
        }
        ptx_barrier_expect(barrier, bytes);
        ptx_bulk_copy(shared + to, global + from, bytes, barrier);
    };
    emu_seed(0);
    expect_error("never initialised", 1, [=] { copy(0, 0, 32, false); });
    expect_error("not aligned", 1, [=] { copy(8, 0, 32, true); });
    expect_error("not aligned", 1, [=] { copy(0, 0, 24, true); });
    expect_error("outside shared memory", 1, [=] { copy(1008, 0, 32, true); });
    emu_seed(1);
    expect_error("was under way", 1, [=] { copy(0, 0, 32, true); });
    expect_error("ldmatrix outside", 32, [] {
        SHARED_MEMORY(shared);
        uint32_t out[4];
        ptx_load_matrix(out, shared + 1024);
    });
    emu_free(global);
}

/* Correct for threads alone, but the copy engine needs a fence. */
static void what_the_copy_engine_is_not_told_is_named() {
    static char *global;
    global = static_cast<char *>(emu_alloc(64));
    memset(global, 1, 64);
    auto twice = [](bool shown, bool between, bool fenced, bool during) {
        SHARED_MEMORY(shared);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + 512);
        ptx_barrier_init(barrier, 1);
        if (shown) ptx_barrier_init_fence();
        for (uint32_t round = 0; round < 2; round++) {
            ptx_barrier_expect(barrier, 64);
            ptx_bulk_copy(shared, global, 64, barrier);
            if (during) shared[9] = 3;
            ptx_barrier_wait(barrier, round);
            if (between) shared[7] = 2;
            if (fenced) ptx_shared_fence();
        }
    };
    for (uint64_t seed = 0; seed < 2; seed++) {
        emu_seed(seed);
        CHECK(!run(1, 1, 1024, [=] { twice(true, false, false, false); }));
        CHECK(!run(1, 1, 1024, [=] { twice(true, true, true, false); }));
        expect_error("no fence has shown", 1, [=] { twice(false, false, false, false); });
        expect_error("no fence says so", 1, [=] { twice(true, true, false, false); });
    }
    expect_error("threads wrote where the bulk copy", 1, [=] { twice(true, false, true, true); });
    expect_error("off 8 bytes", 1, [] {
        SHARED_MEMORY(shared);
        ptx_barrier_init(reinterpret_cast<uint64_t *>(shared + 4), 1);
    });
    expect_error("than an mbarrier counts", 1, [] {
        SHARED_MEMORY(shared);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(shared);
        ptx_barrier_init(barrier, 1);
        ptx_barrier_expect(barrier, 1 << 20);
    });
    emu_free(global);
}

static void reading_before_the_copy_came_gives_nan() {
    static float *global;
    static bool was_nan;
    global = static_cast<float *>(emu_alloc(32));
    for (int i = 0; i < 8; i++) global[i] = 1;
    emu_seed(1);
    CHECK(!run(1, 1, 1024, [] {
        SHARED_MEMORY(shared);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + 512);
        memset(shared, 0, 64);
        ptx_barrier_init(barrier, 1);
        ptx_barrier_init_fence();
        ptx_barrier_expect(barrier, 32);
        ptx_bulk_copy(shared, global, 32, barrier);
        was_nan = isnan(reinterpret_cast<float *>(shared)[3]);
        ptx_barrier_wait(barrier, 0);
        CHECK(reinterpret_cast<float *>(shared)[3] == 1);
    }));
    CHECK(was_nan);
    emu_free(global);
}

static void out_of_bounds_stops() {
    static float *global;
    global = static_cast<float *>(emu_alloc(64));
    CHECK(isnan(global[3]) && emu_allocated() == 64);
    expect_fault([] { global[16] = 1; });
    expect_fault([] { (void)*static_cast<volatile float *>(global + 16); });
    expect_fault([] {
        SHARED_MEMORY(shared);
        *static_cast<volatile char *>(shared + 1024) = 1;
    });
    emu_free(global);
    CHECK(emu_allocated() == 0);
    CHECK(run(1, 1025, 0, [] {}) && run(1, 32, 300 << 10, [] {}));
}

/* ---- Launches that overlap ---- */

static void overlapped_launches_wait_before_they_look() {
    int *global = static_cast<int *>(emu_alloc(256 * sizeof *global));
    for (uint64_t seed = 0; seed < 4; seed++) {
        emu_seed(seed);
        for (int i = 0; i < 256; i++) global[i] = i;
        for (int launch = 0; launch < 5; launch++)
            CHECK(!emu_launch(
                "overlapped", 2, 128, 1024,
                [=] {
                    SHARED_MEMORY(shared);
                    int me = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
                    reinterpret_cast<int *>(shared)[threadIdx.x] = me;
                    __syncthreads();
                    ptx_overlap_grids();
                    global[me] += reinterpret_cast<int *>(shared)[threadIdx.x ^ 1] == (me ^ 1);
                },
                true));
        for (int i = 0; i < 256; i++) CHECK(global[i] == i + 5);
    }
    expect_fault(
        [=] {
            int early = *static_cast<volatile int *>(global);
            ptx_overlap_grids();
            global[1] = early;
        },
        true);
    expect_fault(
        [=] { /* one thread is enough */
              if (threadIdx.x == 31) global[2] = 1;
              ptx_overlap_grids();
        },
        true);
    const char *error = emu_launch(
        "leaves", 1, 64, 0,
        [=] {
            if (threadIdx.x == 40) return;
            ptx_overlap_grids();
        },
        true);
    CHECK(error && strstr(error, "thread 40") && strstr(error, "without ptx_overlap_grids"));
    CHECK(!run(1, 64, 0, [=] { global[threadIdx.x] = 1; })); /* seen again, and free to do so */
    emu_free(global);
}

int main() {
    every_thread_runs_once();
    barriers_order_shared_memory();
    shared_memory_starts_as_nan();
    collectives();
    named_barriers();
    matrices();
    matrices_of_bytes();
    narrow_numbers();
    narrow_numbers_in_software();
    bulk_copies();
    copies_by_threads();
    deadlocks_are_named();
    divergence_is_named();
    bad_copies_are_named();
    what_the_copy_engine_is_not_told_is_named();
    reading_before_the_copy_came_gives_nan();
    out_of_bounds_stops();
    overlapped_launches_wait_before_they_look();
    printf("emu_machine: fine\n");
    return 0;
}
