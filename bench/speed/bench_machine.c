/* Measures the limits of this machine, as JSON: the read bandwidth of all cores (2 GiB, one or four
 * prefetched streams per thread, best pass) and the rate of the widest matrix instruction with all
 * operands in registers. bench/speed compares keepd's tokens per second with these limits. */
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "kernels/cpu/isa.h"

enum { THREADS_MAX = 256, STREAMS = 4, PASSES = 16 };
#define READ_BYTES ((size_t)2 << 30)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct worker {
    pthread_t thread;
    pthread_barrier_t *barrier;
    const char *data;
    size_t bytes;
    double read_rate, matrix_rate; /* all threads together; filled by worker 0 */
    int count, index;
    struct cpu_isa isa;
};

typedef uint64_t words __attribute__((vector_size(32)));
static volatile uint64_t sink;

/* Reads with some of the STREAMS: how many are fastest depends on the processor. */
static inline __attribute__((always_inline)) void read_streams(const char *data, size_t bytes,
                                                               const int streams) {
    words sum[STREAMS] = {0};
    size_t step = bytes / (size_t)streams / 64 * 64;
    for (size_t at = 0; at < step; at += 64)
        for (int s = 0; s < streams; s++) {
            const char *p = data + (size_t)s * step + at;
            __builtin_prefetch(p + 2048);
            sum[s] += *(const words *)p + *(const words *)(p + 32);
        }
    words all = sum[0] + sum[1] + sum[2] + sum[3];
    sink = all[0] + all[1] + all[2] + all[3];
}

static void read_once(const char *data, size_t bytes, int pass) {
    if (pass % 2)
        read_streams(data, bytes, 1);
    else
        read_streams(data, bytes, STREAMS);
}

/* Each returns the operations it did. */
__attribute__((target("amx-tile,amx-bf16"))) static double amx_flops(int rounds) {
    /* Constant data: gcc 12 tells the optimiser of only the first bytes that ldtilecfg reads. */
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1,
                .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
    for (int i = 0; i < rounds; i++) { /* four independent sums hide the latency */
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return (double)rounds * 4 * 16 * 16 * 32 * 2;
}

__attribute__((target("avx512f"))) static double avx512_flops(int rounds) {
    __m512 acc[8];
    for (int k = 0; k < 8; k++) acc[k] = _mm512_set1_ps((float)k);
    __m512 x = _mm512_set1_ps(0.999f);
    for (int i = 0; i < rounds; i++)
        for (int k = 0; k < 8; k++) acc[k] = _mm512_fmadd_ps(acc[k], x, x);
    float out[16];
    for (int k = 1; k < 8; k++) acc[0] = _mm512_add_ps(acc[0], acc[k]);
    _mm512_storeu_ps(out, acc[0]);
    sink = (uint64_t)out[0];
    return (double)rounds * 8 * 16 * 2;
}

__attribute__((target("avx2,fma"))) static double avx2_flops(int rounds) {
    __m256 acc[8];
    for (int k = 0; k < 8; k++) acc[k] = _mm256_set1_ps((float)k);
    __m256 x = _mm256_set1_ps(0.999f);
    for (int i = 0; i < rounds; i++)
        for (int k = 0; k < 8; k++) acc[k] = _mm256_fmadd_ps(acc[k], x, x);
    float out[8];
    for (int k = 1; k < 8; k++) acc[0] = _mm256_add_ps(acc[0], acc[k]);
    _mm256_storeu_ps(out, acc[0]);
    sink = (uint64_t)out[0];
    return (double)rounds * 8 * 8 * 2;
}

static double matrix_flops(const struct cpu_isa *isa) {
    if (isa->amx) return amx_flops(1 << 20);
    if (isa->avx512) return avx512_flops(1 << 22);
    return isa->avx2 ? avx2_flops(1 << 22) : 0;
}

static void *work(void *arg) {
    struct worker *w = arg;
    w->isa =
        cpu_isa_detect(); /* leave to use the tiles is asked for by each process once, by thread */
    for (int pass = 0; pass < PASSES; pass++) {
        pthread_barrier_wait(w->barrier);
        double start = now();
        read_once(w->data, w->bytes, pass);
        pthread_barrier_wait(w->barrier);
        double rate = (double)w->bytes * w->count / (now() - start);
        if (rate > w->read_rate) w->read_rate = rate;
        pthread_barrier_wait(w->barrier);
        start = now();
        double flops = matrix_flops(&w->isa);
        pthread_barrier_wait(w->barrier);
        rate = flops * w->count / (now() - start);
        if (rate > w->matrix_rate) w->matrix_rate = rate;
    }
    return NULL;
}

int main(void) {
    static struct worker workers[THREADS_MAX];
    cpu_set_t set;
    pthread_barrier_t barrier;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    if (count > THREADS_MAX) count = THREADS_MAX;
    struct cpu_isa isa = cpu_isa_detect(); /* before the threads, which inherit the permission */
    char *data = mmap(NULL, READ_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        fprintf(stderr, "no memory for the 2 GiB read test\n");
        return 1;
    }
    madvise(data, READ_BYTES, MADV_HUGEPAGE);
    memset(data, 1, READ_BYTES);
    pthread_barrier_init(&barrier, NULL, (unsigned)count);
    size_t part = READ_BYTES / (size_t)count / 4096 * 4096;
    for (int i = 0; i < count; i++) {
        workers[i] = (struct worker){.barrier = &barrier,
                                     .data = data + (size_t)i * part,
                                     .bytes = part,
                                     .count = count,
                                     .index = i};
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0) return 1;
    }
    for (int i = 0; i < count; i++) pthread_join(workers[i].thread, NULL);
    printf("{\"threads\": %d, \"matrix_unit\": \"%s\", \"read_bytes_per_s\": %.0f, "
           "\"matrix_flop_per_s\": %.0f}\n",
           count,
           isa.amx      ? "amx-bf16"
           : isa.avx512 ? "avx512"
           : isa.avx2   ? "avx2"
                        : "none",
           workers[0].read_rate, workers[0].matrix_rate);
    return 0;
}
