#include "picture/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define SANITIZED 1
#elif defined __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

/* Room for the largest picture, a progressive one: 130 + 200 MB. */
#define SANDBOX_DATA_BYTES  ((rlim_t)768 << 20)
#define SANDBOX_CPU_SECONDS 20

/* With a machine that is short of memory this process ends first. */
static void offer_to_end(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, "1000", 4) < 0) { /* a habit, no promise */
    }
    close(fd);
}

static int set_limit(int resource, rlim_t value) {
    const struct rlimit limit = {value, value};
    return setrlimit((__rlimit_resource_t)resource, &limit);
}

static int set_limits(void) {
#ifndef SANITIZED /* a sanitizer's shadow memory is far larger */
    if (set_limit(RLIMIT_DATA, SANDBOX_DATA_BYTES)) return -1;
#endif
    if (set_limit(RLIMIT_CPU, SANDBOX_CPU_SECONDS) || set_limit(RLIMIT_CORE, 0)) return -1;
    return set_limit(RLIMIT_FSIZE, 0) || set_limit(RLIMIT_NOFILE, 0) ? -1 : 0;
}

#ifndef SANITIZED

#if defined __x86_64__
#define SANDBOX_ARCH AUDIT_ARCH_X86_64
#elif defined __aarch64__
#define SANDBOX_ARCH AUDIT_ARCH_AARCH64
#endif

#define LOAD(member)                                                                               \
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)offsetof(struct seccomp_data, member))
#define ANSWER(action) BPF_STMT(BPF_RET | BPF_K, (action))
/* Goes to the next instruction if the loaded value is `value`, otherwise skips it. */
#define IF(value)   BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)(value), 0, 1)
#define ALLOW(call) IF(__NR_##call), ANSWER(SECCOMP_RET_ALLOW)

static int filter_calls(void) {
    /* args[2] of mmap is the protection: memory never holds code. Its lower half comes first, as
     * both machines are little-endian. */
    static struct sock_filter rules[] = {
        LOAD(arch),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SANDBOX_ARCH, 1, 0),
        ANSWER(SECCOMP_RET_KILL_PROCESS),
        LOAD(nr),
        ALLOW(read),
        ALLOW(write),
        ALLOW(exit_group),
        ALLOW(brk),
        ALLOW(munmap),
        ALLOW(mremap),
        ALLOW(madvise),
        ALLOW(rt_sigreturn),
        ALLOW(getrandom), /* the first call of malloc */
        IF(__NR_openat),  /* libjpeg-turbo on ARM64 looks for /proc/cpuinfo, and does without */
        ANSWER(SECCOMP_RET_ERRNO | EACCES),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_mmap, 1, 0),
        ANSWER(SECCOMP_RET_KILL_PROCESS),
        LOAD(args[2]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 0, 1),
        ANSWER(SECCOMP_RET_KILL_PROCESS),
        ANSWER(SECCOMP_RET_ALLOW),
    };
    static const struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

bool sandbox_filters(void) {
    return true;
}

#else

static int filter_calls(void) {
    return 0;
}

bool sandbox_filters(void) {
    return false;
}

#endif

int sandbox_enter(void) {
    offer_to_end();
    if (close_range(1, ~0u, 0) || set_limits()) return -1;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) return -1;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return filter_calls();
}
