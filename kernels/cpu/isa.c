#include "kernels/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Register states the system saves on a context switch, as bits of XCR0. */
#define STATE_AVX    0x6u
#define STATE_AVX512 0xe6u
#define STATE_TILES  0x60000u

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA  18

static uint64_t saved_states(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool has(uint32_t word, int bit) {
    return word >> bit & 1;
}

/* Linux enables the 8 KiB of tile data per process, on request; threads started later inherit. */
static bool tiles_permitted(void) {
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

struct cpu_isa cpu_isa_detect(void) {
    struct cpu_isa isa = {0};
    uint32_t a, b, c, d, b7, c7, d7, a71 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return isa; /* OSXSAVE */
    uint64_t states = saved_states();
    bool fma = has(c, 12), f16c = has(c, 29);
    uint32_t top = 0;
    if (!__get_cpuid_count(7, 0, &top, &b7, &c7, &d7)) return isa;
    if (top >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    isa.avx2 = (states & STATE_AVX) == STATE_AVX && has(b7, 5) && fma && f16c;
    isa.avx512 = isa.avx2 && (states & STATE_AVX512) == STATE_AVX512 && has(b7, 16) &&
                 has(b7, 17) && has(b7, 30) && has(b7, 31);
    isa.vnni = isa.avx512 && has(c7, 11);
    isa.bf16 = isa.vnni && has(a71, 5); /* the kernels use both */
    isa.amx = isa.bf16 && (states & STATE_TILES) == STATE_TILES && has(d7, 24) && has(d7, 22) &&
              tiles_permitted();
    return isa;
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

struct cpu_isa cpu_isa_detect(void) {
    struct cpu_isa isa = {0};
    isa.neon = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    isa.i8mm = isa.neon && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
    return isa;
}

#else

struct cpu_isa cpu_isa_detect(void) {
    return (struct cpu_isa){0};
}

#endif
