#include "emu.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "kernels/number.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define WITH_ASAN 1
#else
#define WITH_ASAN 0
#endif

#define MEMORY_PAGE  ((size_t)4096)
#define STACK_BYTES  ((size_t)(WITH_ASAN ? 256 : 64) << 10)
#define STACK_COLOUR ((size_t)448) /* 64 times an odd number: all lines of a page take turns */
#define NAMED_MAX    16
#define REPORT_BYTES 4096
#define POISON       0xff
#define SHARED_MAX   ((size_t)227 << 10) /* the limit of a block on an H100 */
#define THREADS_MAX  1024
#define EXPECT_MAX   ((1 << 20) - 1) /* PTX ISA, "Valid range of tx-count" */
#define LOOKS        3 /* launches of a kernel in which global memory is hidden at first */

/* ---- Switching ---- */

enum fiber_state { READY, IN_WARP, AT_BLOCK, AT_NAMED, AT_MBARRIER, AT_GRIDS, DONE };

struct context {
#if defined(__x86_64__)
    void *sp;
#else
    ucontext_t uc;
#endif
    void *fake_stack; /* ASan's */
};

struct fiber {
    emu_thread view; /* first: emu_self points here */
    context ctx;
    char *stack;
    fiber_state state;
    emu_place place;
    const char *what;
    int warp, lane, named;
    uint64_t *mbarrier;
    uint32_t parity;
    bool overlapped; /* has called ptx_overlap_grids */
};

#if defined(__x86_64__)
/* Saves what the System V ABI lets a callee keep, then takes the other side's. */
extern "C" void emu_switch(void **save, void *load);
__asm__(".text\n"
        ".globl emu_switch\n"
        ".type emu_switch,@function\n"
        "emu_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  popq %rcx\n  jmpq *%rcx\n" /* the processor predicts a return to the caller of before */
        ".size emu_switch,.-emu_switch\n");
#endif

/* Threads take turns, launch by launch. */
static std::mutex one;
typedef std::lock_guard<std::mutex> guard;

emu_thread *emu_self;
dim3 emu_grid_dim, emu_block_dim;

namespace {

struct named_barrier {
    int waiting, threads;
};

struct warp {
    int arrived, alive;
    const char *what;
    emu_place place;
    alignas(16) char in[32 * EMU_WARP_BYTES], out[32 * EMU_WARP_BYTES];
};

/* An mbarrier that the copy engine has not been shown. */
struct fresh_mbarrier {
    uint64_t *at;
    const struct fiber *by;
};

struct copy {
    void *to;
    const void *from;
    uint32_t bytes;
    uint64_t *mbarrier;
    emu_place place;
};

/* Copies of 16 bytes that one thread has started, and where it arrives once they are there. */
struct arrival {
    std::vector<copy> pieces;
    uint64_t *mbarrier;
    emu_place place;
};

struct machine {
    const char *kernel;
    void (*body)(void *);
    void *arg;
    context scheduler;
    fiber *running;
    std::vector<fiber> fibers;
    std::vector<warp> warps;
    std::vector<int> order;
    int turn;      /* place in `order` */
    bool progress; /* some fiber has run in this round */
    int threads, alive, at_block;
    emu_place block_place;
    named_barrier named[NAMED_MAX];
    std::vector<copy> copies;
    std::vector<arrival> started, arrivals; /* by thread, without an mbarrier; with one */
    std::vector<fresh_mbarrier> fresh;
    char fenced[SHARED_MAX];       /* shared memory as the copy engine knows it, */
    size_t copied_from, copied_to; /* between these bytes; else it has not written there */
    char *shared_map, *shared;
    size_t shared_bytes;
    uint64_t seed, random;
    bool slow;               /* no bulk copies */
    bool late;               /* copies arrive when nobody can go on */
    bool overlapped, hidden; /* the launch; global memory, until all have waited */
    bool crowded;            /* not emu_alone */
    int at_grids;
    std::map<std::string, int> looked; /* at so many overlapped launches of a kernel */
    bool failed;
    char report[REPORT_BYTES];
    char *stacks;
    size_t stack_count;
#if WITH_ASAN
    const void *main_stack;
    size_t main_stack_bytes;
    bool left_main; /* for a fiber, which has not noted the main stack yet */
    bool torn;      /* a launch has failed, and left its fibers in the middle of their work */
#endif
} m;

#if WITH_ASAN
/* Tells ASan which stack this is; of the one that was left it says where it lies, and the first
 * fiber of a block keeps that of the main one. */
void arrive_on_stack(void *fake_stack) {
    const bool note = m.left_main;
    m.left_main = false;
    __sanitizer_finish_switch_fiber(fake_stack, note ? &m.main_stack : nullptr,
                                    note ? &m.main_stack_bytes : nullptr);
}
#endif

uint64_t draw(uint64_t below) {
    return splitmix_next(&m.random) % below;
}

/* `to`: NULL is the scheduler. */
void switch_to(context *from, fiber *to, bool leaving_for_good) {
    context *const target = to ? &to->ctx : &m.scheduler;
    if (to) {
        m.running = to;
        emu_self = &to->view;
    }
#if WITH_ASAN
    if (from == &m.scheduler) m.left_main = true;
    __sanitizer_start_switch_fiber(leaving_for_good ? nullptr : &from->fake_stack,
                                   to ? to->stack : m.main_stack,
                                   to ? STACK_BYTES : m.main_stack_bytes);
#endif
    (void)leaving_for_good;
#if defined(__x86_64__)
    emu_switch(&from->sp, target->sp);
#else
    swapcontext(&from->uc, &target->uc);
#endif
#if WITH_ASAN
    arrive_on_stack(from->fake_stack);
#endif
}

/* ---- Failing ---- */

const char *state_name(const fiber &f) {
    switch (f.state) {
    case READY:
        return "can run";
    case IN_WARP:
        return "waits for its warp in";
    case AT_BLOCK:
        return "waits for the block in";
    case AT_NAMED:
        return "waits at a named barrier in";
    case AT_MBARRIER:
        return "waits for bytes in";
    case AT_GRIDS:
        return "waits for earlier launches in";
    case DONE:
        return "has returned";
    }
    return "?";
}

size_t describe(char *to, size_t room, const fiber &f) {
    bool waits = f.state != READY && f.state != DONE;
    int n = snprintf(to, room, "\n  block %u,%u thread %u %s %s%s%s:%d", f.view.block.x,
                     f.view.block.y, f.view.index.x, state_name(f), waits ? f.what : "",
                     waits ? " at " : "", waits ? f.place.file : "", waits ? f.place.line : 0);
    return n > 0 && static_cast<size_t>(n) < room ? static_cast<size_t>(n) : 0;
}

/* Everybody waits: the first few that do, and whoever left already, are the story. */
void report_deadlock() {
    m.failed = true;
    size_t at = static_cast<size_t>(snprintf(m.report, sizeof m.report, "%s: deadlock", m.kernel));
    int told[DONE + 1] = {0};
    for (const fiber &f : m.fibers) {
        if (told[f.state]++ >= 4) continue;
        at += describe(m.report + at, sizeof m.report - at, f);
    }
    for (int s = 0; s <= DONE; s++)
        if (told[s] > 4 && at < sizeof m.report) {
            int n = snprintf(m.report + at, sizeof m.report - at, "\n  (%d in all in state %d)",
                             told[s], s);
            at += n > 0 ? static_cast<size_t>(n) : 0;
        }
}

[[noreturn]] void fail_text(emu_place place, const char *format, va_list args) {
    char text[512];
    vsnprintf(text, sizeof text, format, args);
    const fiber *f = m.running;
    m.failed = true;
    snprintf(m.report, sizeof m.report, "%s: block %u,%u thread %u at %s:%d: %s", m.kernel,
             f->view.block.x, f->view.block.y, f->view.index.x, place.file, place.line, text);
    switch_to(&m.running->ctx, nullptr, true);
    abort(); /* nobody resumes a failed launch */
}

/* ---- Waiting ---- */

fiber *next_fiber();

void wait_as(fiber_state state, const char *what, emu_place place) {
    fiber *f = m.running;
    f->state = state;
    f->what = what;
    f->place = place;
    fiber *next = next_fiber();
    if (next != f) switch_to(&f->ctx, next, false);
}

/* Equal literals of one file usually have one address; those of a header may have several. */
bool same_text(const char *a, const char *b) {
    return a == b || strcmp(a, b) == 0;
}

bool same_place(emu_place a, emu_place b) {
    return a.line == b.line && same_text(a.file, b.file);
}

void release_block() {
    m.at_block = 0;
    for (fiber &f : m.fibers)
        if (f.state == AT_BLOCK) f.state = READY;
}

void fiber_main() {
#if WITH_ASAN
    arrive_on_stack(nullptr);
#endif
    m.body(m.arg);
    fiber *f = m.running;
    if (m.overlapped && !f->overlapped)
        emu_fail(f->place.file ? f->place : EMU_HERE,
                 "returned without ptx_overlap_grids, though it was launched to overlap");
    f->state = DONE;
    m.alive--;
    m.warps[static_cast<size_t>(f->warp)].alive--;
    if (m.at_block > 0 && m.at_block == m.alive) release_block();
    switch_to(&f->ctx, next_fiber(), true);
    abort();
}

/* ---- mbarriers and bulk copies ---- */

/* Our own layout of the 64 bits; kernels treat them as opaque. */
struct mbarrier {
    uint64_t magic : 11, phase : 1, count : 10, pending : 10;
    int64_t bytes : 32; /* may go below zero: a copy can land before it is announced */
};
static_assert(sizeof(mbarrier) == sizeof(uint64_t), "one word");
const unsigned MAGIC = 0x35c;
const int ARRIVALS_MAX = 1023;

mbarrier get_mbarrier(uint64_t *at, emu_place place) {
    mbarrier b;
    memcpy(&b, at, sizeof b);
    if (b.magic != MAGIC) emu_fail(place, "this mbarrier was never initialised");
    return b;
}

void put_mbarrier(uint64_t *at, mbarrier b) {
    if (b.pending == 0 && b.bytes == 0) {
        b.phase ^= 1;
        b.pending = b.count;
    }
    memcpy(at, &b, sizeof b);
}

/* The copy engine has a range of shared memory from now on, as it is. */
void engine_takes(size_t from, size_t to) {
    if (m.copied_to == 0) m.copied_from = m.copied_to = from;
    if (from < m.copied_from) {
        memcpy(m.fenced + from, m.shared + from, m.copied_from - from);
        m.copied_from = from;
    }
    if (to > m.copied_to) {
        memcpy(m.fenced + m.copied_to, m.shared + m.copied_to, to - m.copied_to);
        m.copied_to = to;
    }
}

/* Writes as the engine, `from` or NaN; false: threads have written there and not told it. */
bool engine_writes(const copy &c, const void *from) {
    size_t at = static_cast<size_t>(static_cast<char *>(c.to) - m.shared);
    engine_takes(at, at + c.bytes);
    if (memcmp(m.fenced + at, c.to, c.bytes) != 0) return false;
    if (from)
        memcpy(c.to, from, c.bytes);
    else
        memset(c.to, POISON, c.bytes);
    memcpy(m.fenced + at, c.to, c.bytes);
    return true;
}

void arrive(const copy &c) {
    mbarrier b = get_mbarrier(c.mbarrier, c.place);
    b.bytes -= c.bytes;
    put_mbarrier(c.mbarrier, b);
}

/* Arrives after the thread's pieces, which threads may not have written over; false: they have. */
bool arrive_with(const arrival &a) {
    for (const copy &c : a.pieces) {
        for (uint32_t i = 0; i < c.bytes; i++)
            if (static_cast<unsigned char *>(c.to)[i] != POISON) return false;
        memcpy(c.to, c.from, c.bytes);
    }
    mbarrier b = get_mbarrier(a.mbarrier, a.place);
    b.pending--;
    put_mbarrier(a.mbarrier, b);
    return true;
}

bool in_shared(const void *at, size_t bytes) {
    const char *p = static_cast<const char *>(at);
    return p >= m.shared && p + bytes <= m.shared + m.shared_bytes;
}

/* ---- Scheduling ---- */

bool can_run(fiber &f) {
    if (f.state == AT_MBARRIER) {
        mbarrier b = get_mbarrier(f.mbarrier, f.place);
        if (b.phase != f.parity) f.state = READY; /* the phase waited for has ended */
    }
    return f.state == READY;
}

void shuffle_order() {
    for (int i = 0; i < m.threads; i++) m.order[static_cast<size_t>(i)] = i;
    if (m.seed == 0) return;
    for (int i = m.threads - 1; i > 0; i--)
        std::swap(m.order[static_cast<size_t>(i)],
                  m.order[static_cast<size_t>(draw(static_cast<uint64_t>(i) + 1))]);
}

bool deliver_pieces() {
    size_t pick = static_cast<size_t>(draw(m.arrivals.size()));
    const arrival a = m.arrivals[pick];
    m.arrivals.erase(m.arrivals.begin() + static_cast<long>(pick));
    if (arrive_with(a)) return true;
    m.failed = true;
    snprintf(m.report, sizeof m.report, "%s: threads wrote where the copies of %s:%d arrive",
             m.kernel, a.place.file, a.place.line);
    return true;
}

bool deliver_late() {
    if (!m.arrivals.empty()) return deliver_pieces();
    if (m.copies.empty()) return false;
    size_t pick = static_cast<size_t>(draw(m.copies.size()));
    copy c = m.copies[pick];
    m.copies.erase(m.copies.begin() + static_cast<long>(pick));
    if (engine_writes(c, c.from)) {
        arrive(c);
        return true;
    }
    m.failed = true;
    snprintf(m.report, sizeof m.report, "%s: threads wrote where the bulk copy of %s:%d writes",
             m.kernel, c.place.file, c.place.line);
    return true;
}

/* Returns the fiber whose turn is next, from one round of `order` to the next; NULL: all are done,
 * or the launch has failed. Whoever waits calls it and goes there directly. */
fiber *next_fiber() {
    while (!m.failed) {
        while (m.turn < m.threads) {
            fiber &f = m.fibers[static_cast<size_t>(m.order[static_cast<size_t>(m.turn++)])];
            if (f.state == DONE || !can_run(f)) continue;
            m.progress = true;
            return &f;
        }
        if (m.alive == 0) return nullptr;
        if (!m.progress && !deliver_late()) report_deadlock();
        m.turn = 0;
        m.progress = false;
    }
    return nullptr;
}

void run_fibers() {
    m.turn = 0;
    m.progress = false;
    switch_to(&m.scheduler, next_fiber(), false);
}

void make_stack(fiber &f, size_t index) {
    f.stack = m.stacks + index * (STACK_BYTES + MEMORY_PAGE) + MEMORY_PAGE;
#if WITH_ASAN
    /* Frames that were left, not unwound: that of fiber_main or, in a launch that failed, any. Each
     * block makes its stacks anew, so clearing them whole would take longer than most blocks. */
    const size_t left = m.torn ? STACK_BYTES : 2 * MEMORY_PAGE;
    __asan_unpoison_memory_region(f.stack + STACK_BYTES - left, left);
#endif
#if defined(__x86_64__)
    /* Stacks that all began at one offset of a page would compete for the same lines of a cache. */
    size_t colour = index * STACK_COLOUR % MEMORY_PAGE;
    void **top = reinterpret_cast<void **>(f.stack + STACK_BYTES - colour);
    *--top = nullptr; /* fiber_main never returns; keeps the stack aligned as after a call */
    *--top = reinterpret_cast<void *>(fiber_main);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.ctx.sp = top;
#else
    getcontext(&f.ctx.uc);
    f.ctx.uc.uc_stack.ss_sp = f.stack;
    f.ctx.uc.uc_stack.ss_size = STACK_BYTES;
    f.ctx.uc.uc_link = nullptr;
    makecontext(&f.ctx.uc, fiber_main, 0);
#endif
    f.ctx.fake_stack = nullptr;
}

void *map_or_die(size_t bytes, int protection) {
    void *map =
        mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        fprintf(stderr, "emu: no memory for %zu bytes\n", bytes);
        abort();
    }
    return map;
}

void open_stacks() {
    if (m.stacks) return;
    size_t each = STACK_BYTES + MEMORY_PAGE;
    m.stacks = static_cast<char *>(map_or_die(each * THREADS_MAX, PROT_READ | PROT_WRITE));
    for (size_t i = 0; i < THREADS_MAX; i++) /* below each stack: unmapped */
        mprotect(m.stacks + i * each, MEMORY_PAGE, PROT_NONE);
}

/* Ends at an unmapped page; begins, to a page, at one too. */
void open_shared(size_t bytes) {
    size_t most = (SHARED_MAX + MEMORY_PAGE - 1) / MEMORY_PAGE * MEMORY_PAGE;
    size_t room = (bytes + 127) / 128 * 128;
    size_t used = (room + MEMORY_PAGE - 1) / MEMORY_PAGE * MEMORY_PAGE;
    if (!m.shared_map)
        m.shared_map = static_cast<char *>(map_or_die(most + 2 * MEMORY_PAGE, PROT_NONE));
    char *end = m.shared_map + MEMORY_PAGE + most;
    mprotect(m.shared_map, static_cast<size_t>(end - m.shared_map) - used, PROT_NONE);
    mprotect(end - used, used, PROT_READ | PROT_WRITE);
    m.shared_bytes = bytes;
    m.shared = end - room;
}

/* A copy that is under way at a block's end is an error. */
void check_copies(dim3 block) {
    const copy *left = m.copies.empty() ? nullptr : &m.copies[0];
    for (const arrival &a : m.arrivals)
        if (!a.pieces.empty()) left = &a.pieces[0];
    for (const arrival &a : m.started)
        if (!a.pieces.empty()) left = &a.pieces[0];
    if (m.failed || !left) return;
    m.failed = true;
    snprintf(m.report, sizeof m.report, "%s: block %u,%u ended while a copy of %s:%d was under way",
             m.kernel, block.x, block.y, left->place.file, left->place.line);
}

void run_block(dim3 block) {
    memset(m.shared, POISON, (m.shared_bytes + 127) / 128 * 128);
    m.alive = m.threads;
    m.at_block = 0;
    m.at_grids = 0;
    m.copies.clear();
    m.arrivals.clear();
    m.started.assign(static_cast<size_t>(m.threads), {});
    m.fresh.clear();
    m.copied_from = m.copied_to = 0;
    memset(m.named, 0, sizeof m.named);
    m.late = m.seed % 2 == 1;
    for (warp &w : m.warps) w.arrived = w.alive = 0;
    for (int i = 0; i < m.threads; i++) {
        fiber &f = m.fibers[static_cast<size_t>(i)];
        f.view.index = dim3(static_cast<unsigned>(i), 0, 0);
        f.view.block = block;
        f.state = READY;
        f.place = {};
        f.overlapped = false;
        f.warp = i / 32;
        f.lane = i % 32;
        m.warps[static_cast<size_t>(f.warp)].alive++;
        make_stack(f, static_cast<size_t>(i));
    }
    shuffle_order();
    run_fibers();
    check_copies(block);
}

/* ---- Guarded memory ---- */

struct buffer {
    char *map;
    size_t map_bytes, bytes;
};

std::map<char *, buffer> buffers;

void hide_buffers(bool hide) {
    m.hidden = hide;
    for (const auto &item : buffers)
        mprotect(item.second.map + MEMORY_PAGE, item.second.map_bytes - 2 * MEMORY_PAGE,
                 hide ? PROT_NONE : PROT_READ | PROT_WRITE);
}

void on_fault(int number, siginfo_t *info, void *) {
    char text[512];
    const char *at = static_cast<const char *>(info->si_addr);
    int n = snprintf(text, sizeof text, "emu: signal %d at %p", number, info->si_addr);
    if (m.running && emu_self)
        n +=
            snprintf(text + n, sizeof text - static_cast<size_t>(n),
                     " in %s, block %u,%u thread %u (last wait %s:%d)", m.kernel, emu_self->block.x,
                     emu_self->block.y, emu_self->index.x,
                     m.running->place.file ? m.running->place.file : "none", m.running->place.line);
    for (const auto &item : buffers)
        if (at >= item.second.map && at < item.second.map + item.second.map_bytes)
            n += snprintf(text + n, sizeof text - static_cast<size_t>(n),
                          ", byte %td of a buffer of %zu", at - item.first, item.second.bytes);
    if (m.shared && at >= m.shared_map && at < m.shared_map + SHARED_MAX + 3 * MEMORY_PAGE)
        n += snprintf(text + n, sizeof text - static_cast<size_t>(n),
                      ", byte %td of %zu of shared memory", at - m.shared, m.shared_bytes);
    if (m.hidden)
        n += snprintf(text + n, sizeof text - static_cast<size_t>(n),
                      ", before ptx_overlap_grids in every thread of the block");
    text[n] = '\n';
    if (write(2, text, static_cast<size_t>(n) + 1) < 0) _exit(3);
    signal(number, SIG_DFL);
    raise(number);
}

/* Fibers have small stacks: the handler has its own. ASan reports by itself. */
void catch_faults() {
    static bool done;
    static char stack[64 << 10];
    if (done || WITH_ASAN) return;
    done = true;
    stack_t other = {};
    other.ss_sp = stack;
    other.ss_size = sizeof stack;
    sigaltstack(&other, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

} // namespace

/* ---- Entry points ---- */

void emu_fail(emu_place place, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fail_text(place, format, args);
}

void emu_seed(uint64_t seed) {
    m.seed = m.random = seed;
}

void emu_bulk(bool has) {
    const guard now(one);
    m.slow = !has;
}

void emu_alone(bool alone) {
    const guard now(one);
    m.crowded = !alone;
}

void *emu_shared() {
    return m.shared;
}

void ptx_overlap_grids(emu_place place) {
    m.running->overlapped = true;
    if (!m.hidden) return;
    if (++m.at_grids < m.alive) {
        wait_as(AT_GRIDS, "ptx_overlap_grids", place);
        return;
    }
    hide_buffers(false);
    for (fiber &f : m.fibers)
        if (f.state == AT_GRIDS) f.state = READY;
}

const char *emu_run(const char *name, dim3 grid, int threads, size_t shared, void (*body)(void *),
                    void *arg, bool overlapped) {
    const guard alone(one);
    m.kernel = name;
    m.overlapped = overlapped;
    m.body = body;
    m.arg = arg;
    m.threads = threads;
    m.failed = false;
    if (threads < 1 || threads > THREADS_MAX || shared > SHARED_MAX || grid.y > 65535 ||
        grid.z != 1 || grid.x < 1 || grid.y < 1) {
        snprintf(m.report, sizeof m.report, "%s: a grid of %u x %u, %d threads, %zu shared bytes",
                 name, grid.x, grid.y, threads, shared);
        return m.report;
    }
    catch_faults();
    open_stacks();
    open_shared(shared);
    emu_grid_dim = grid;
    emu_block_dim = dim3(static_cast<unsigned>(threads));
    m.fibers.resize(static_cast<size_t>(threads));
    m.order.resize(static_cast<size_t>(threads));
    m.warps.resize(static_cast<size_t>(threads + 31) / 32);
    uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y;
    uint64_t first = m.seed ? draw(blocks) : 0; /* and around */
    bool back = m.seed && draw(2) == 1;
    for (uint64_t i = 0; i < blocks && !m.failed; i++) {
        uint64_t b = (first + (back ? blocks - i : i)) % blocks;
        if (overlapped && !m.crowded && i == 0 && m.looked[name]++ < LOOKS) hide_buffers(true);
        run_block(dim3(static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x), 0));
    }
    if (m.hidden) hide_buffers(false);
    m.running = nullptr;
    emu_self = nullptr;
#if WITH_ASAN
    m.torn |= m.failed;
#endif
    return m.failed ? m.report : nullptr;
}

void *emu_alloc(size_t bytes) {
    const guard alone(one);
    size_t room = (bytes + 15) / 16 * 16, pages = (room + MEMORY_PAGE - 1) / MEMORY_PAGE;
    if (pages == 0) pages = 1;
    buffer b = {nullptr, (pages + 2) * MEMORY_PAGE, bytes};
    b.map = static_cast<char *>(
        mmap(nullptr, b.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (b.map == MAP_FAILED) return nullptr;
    mprotect(b.map + MEMORY_PAGE, pages * MEMORY_PAGE, PROT_READ | PROT_WRITE);
    memset(b.map + MEMORY_PAGE, POISON, pages * MEMORY_PAGE);
    char *mem = b.map + MEMORY_PAGE + pages * MEMORY_PAGE - room;
    buffers[mem] = b;
    return mem;
}

/* The bytes that rounding to 16 adds, and those before the buffer, must be as they were. */
static void check_edges(const char *mem, const buffer &b) {
    const char *end = b.map + b.map_bytes - MEMORY_PAGE;
    for (const char *p = b.map + MEMORY_PAGE; p < end; p++) {
        if (p == mem) p += b.bytes;
        if (p < end && static_cast<unsigned char>(*p) != POISON) {
            fprintf(stderr, "emu: byte %td of a buffer of %zu was written\n", p - mem, b.bytes);
            abort();
        }
    }
}

void emu_free(void *mem) {
    if (!mem) return;
    const guard alone(one);
    auto at = buffers.find(static_cast<char *>(mem));
    if (at == buffers.end()) {
        fprintf(stderr, "emu: %p was not allocated here\n", mem);
        abort();
    }
    check_edges(at->first, at->second);
    munmap(at->second.map, at->second.map_bytes);
    buffers.erase(at);
}

size_t emu_allocated() {
    const guard alone(one);
    size_t sum = 0;
    for (const auto &item : buffers) sum += item.second.bytes;
    return sum;
}

void emu_block_barrier(emu_place place) {
    if (m.at_block > 0 && !same_place(m.block_place, place))
        emu_fail(place, "other threads of the block wait at %s:%d", m.block_place.file,
                 m.block_place.line);
    m.block_place = place;
    if (++m.at_block == m.alive)
        release_block();
    else
        wait_as(AT_BLOCK, "__syncthreads", place);
}

void emu_named_barrier(int id, int threads, emu_place place) {
    if (id < 1 || id >= NAMED_MAX || threads % 32 || threads < 32)
        emu_fail(place, "named barrier %d of %d threads", id, threads);
    named_barrier *b = &m.named[id];
    if (b->waiting > 0 && b->threads != threads)
        emu_fail(place, "barrier %d waits for %d threads, not %d", id, b->threads, threads);
    b->threads = threads;
    if (++b->waiting < threads) {
        m.running->named = id;
        wait_as(AT_NAMED, "a named barrier", place);
        return;
    }
    b->waiting = 0;
    for (fiber &f : m.fibers)
        if (f.state == AT_NAMED && f.named == id) f.state = READY;
}

/* The sizes of most collectives, without a call. */
static inline void copy_lane(void *to, const void *from, size_t bytes) {
    if (bytes == 4)
        memcpy(to, from, 4);
    else if (bytes == 16)
        memcpy(to, from, 16);
    else
        memcpy(to, from, bytes);
}

void emu_warp(const char *what, uint32_t mask, const void *in, size_t in_bytes, void *out,
              size_t out_bytes, emu_warp_work *work, const void *common, emu_place place) {
    fiber *f = m.running;
    warp *w = &m.warps[static_cast<size_t>(f->warp)];
    int lanes = m.threads - 32 * f->warp < 32 ? m.threads - 32 * f->warp : 32;
    uint32_t full = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    if (mask != full) emu_fail(place, "%s with mask %08x in a warp of %d lanes", what, mask, lanes);
    if (w->alive != lanes) emu_fail(place, "%s after a lane returned", what);
    if (w->arrived > 0 && (!same_text(w->what, what) || !same_place(w->place, place)))
        emu_fail(place, "%s, while other lanes are in %s at %s:%d", what, w->what, w->place.file,
                 w->place.line);
    w->what = what;
    w->place = place;
    if (in_bytes) copy_lane(w->in + f->lane * EMU_WARP_BYTES, in, in_bytes);
    if (++w->arrived == lanes) {
        w->arrived = 0;
        if (work) work(w->in, w->out, common);
        for (int lane = 0; lane < lanes; lane++)
            m.fibers[static_cast<size_t>(32 * f->warp + lane)].state = READY;
    } else {
        wait_as(IN_WARP, what, place);
    }
    if (out_bytes) copy_lane(out, w->out + f->lane * EMU_WARP_BYTES, out_bytes);
}

static void ballot_work(const char *in, char *out, const void *) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; lane++)
        if (in[lane * EMU_WARP_BYTES]) votes |= 1u << lane;
    for (int lane = 0; lane < 32; lane++) memcpy(out + lane * EMU_WARP_BYTES, &votes, sizeof votes);
}

uint32_t emu_ballot(const char *what, uint32_t mask, bool vote, emu_place place) {
    char mine = vote;
    uint32_t votes;
    emu_warp(what, mask, &mine, 1, &votes, sizeof votes, ballot_work, nullptr, place);
    return votes & mask;
}

/* ---- Matrices ---- */

float ptx_exp2(float x) {
    return exp2f(x);
}

static uint16_t to_bf16(float x) {
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff; /* cvt gives the one canonical NaN */
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint32_t ptx_pack_bf16(float low, float high) {
    return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
}

uint32_t ptx_pack_e4m3(float low, float high) {
    return number_to_e4m3(low) | static_cast<uint32_t>(number_to_e4m3(high)) << 8;
}

/* Nearest even, at most 65504 (satfinite), NaN 0x7fff; below 2^-14 in steps of 2^-24. */
static uint16_t to_f16(float x) {
    uint32_t bits = __float_as_uint(x), size = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000, half;
    if (size > 0x7f800000u) return 0x7fff;
    if (size < 113u << 23) /* at 1/2 a float32 counts in steps of 2^-24 */
        half = __float_as_uint(__uint_as_float(size) + 0.5f) - __float_as_uint(0.5f);
    else
        half = ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112u << 10);
    return static_cast<uint16_t>(sign | (half < 0x7bff ? half : 0x7bff));
}

uint32_t ptx_pack_f16(float low, float high) {
    return to_f16(low) | static_cast<uint32_t>(to_f16(high)) << 16;
}

float2 ptx_unpack_f16(uint32_t pair) {
    return {number_from_f16(static_cast<uint16_t>(pair)),
            number_from_f16(static_cast<uint16_t>(pair >> 16))};
}

uint32_t ptx_sub_f16(uint32_t a, uint32_t b) {
    float2 x = ptx_unpack_f16(a), y = ptx_unpack_f16(b);
    return ptx_pack_f16(x.x - y.x, x.y - y.y);
}

uint32_t ptx_mul_f16(uint32_t a, uint32_t b) {
    float2 x = ptx_unpack_f16(a), y = ptx_unpack_f16(b);
    return ptx_pack_f16(x.x * y.x, x.y * y.y);
}

uint32_t ptx_f16_of_bytes(uint32_t word, bool high) {
    if (high) word >>= 16;
    return 0x64006400u | (word & 255) | (word >> 8 & 255) << 16;
}

uint32_t ptx_f16_of_e4m3(uint32_t pair) {
    return ptx_pack_f16(number_from_e4m3(static_cast<uint8_t>(pair)),
                        number_from_e4m3(static_cast<uint8_t>(pair >> 8)));
}

static float from_bf16(uint32_t bits) {
    return __uint_as_float(bits << 16);
}

uint32_t ptx_sub_bf16(uint32_t a, uint32_t b) {
    return ptx_pack_bf16(from_bf16(a & 0xffff) - from_bf16(b & 0xffff),
                         from_bf16(a >> 16) - from_bf16(b >> 16));
}

static float from_f16(uint32_t bits) {
    return number_from_f16(static_cast<uint16_t>(bits));
}

/* Lane 8 i + r names row r of matrix i; a row is eight 16-bit numbers. Lane l gets of every matrix
 * numbers 2 (l % 4), + 1 of row l / 4; transposed: number l / 4 of rows 2 (l % 4), + 1. */
template <bool transposed> static void load_matrix_work(const char *in, char *out, const void *) {
    const uint16_t *rows[32];
    for (int lane = 0; lane < 32; lane++)
        memcpy(&rows[lane], in + lane * EMU_WARP_BYTES, sizeof rows[lane]);
    for (int i = 0; i < 4; i++)
        for (int lane = 0; lane < 32; lane++) {
            const uint16_t *const *row = rows + 8 * i;
            const int a = lane / 4, b = 2 * (lane % 4);
            const uint16_t pair[2] = {transposed ? row[b][a] : row[a][b],
                                      transposed ? row[b + 1][a] : row[a][b + 1]};
            memcpy(out + lane * EMU_WARP_BYTES + 4 * i, pair, sizeof pair);
        }
}

static void load_matrix(uint32_t out[4], const void *row, bool transposed, emu_place place) {
    if (reinterpret_cast<uintptr_t>(row) % 16) emu_fail(place, "ldmatrix of an unaligned row");
    if (!in_shared(row, 16)) emu_fail(place, "ldmatrix outside shared memory");
    emu_warp("ldmatrix", 0xffffffffu, &row, sizeof row, out, 16,
             transposed ? load_matrix_work<true> : load_matrix_work<false>, nullptr, place);
}

void ptx_load_matrix(uint32_t out[4], const void *row, emu_place place) {
    load_matrix(out, row, false, place);
}

void ptx_load_matrix_transposed(uint32_t out[4], const void *row, emu_place place) {
    load_matrix(out, row, true, place);
}

struct mma_in {
    float c[4];
    uint32_t a[4], b[2];
};

typedef double mma_row __attribute__((vector_size(8 * sizeof(double))));

/* Adds a b to c: each sum is made in ascending order and in double precision, then rounded once. */
static inline __attribute__((always_inline)) void
mma_add_products(const float a[16][16], const float b[16][8], float c[16][8]) {
    mma_row rows[16];
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < 8; n++) rows[k][n] = static_cast<double>(b[k][n]);
    for (int r = 0; r < 16; r++) {
        mma_row sum = {};
        for (int k = 0; k < 16; k++) sum += static_cast<double>(a[r][k]) * rows[k];
        for (int n = 0; n < 8; n++) c[r][n] = static_cast<float>(c[r][n] + sum[n]);
    }
}

/* The same numbers with any instructions: nothing is fused (-ffp-contract=off). */
static void mma_products_plain(const float a[16][16], const float b[16][8], float c[16][8]) {
    mma_add_products(a, b, c);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void
mma_products_avx512(const float a[16][16], const float b[16][8], float c[16][8]) {
    mma_add_products(a, b, c);
}

__attribute__((target("avx2"))) static void
mma_products_avx2(const float a[16][16], const float b[16][8], float c[16][8]) {
    mma_add_products(a, b, c);
}

static void (*const mma_products)(const float a[16][16], const float b[16][8],
                                  float c[16][8]) = __builtin_cpu_supports("avx512f")
                                                        ? mma_products_avx512
                                                    : __builtin_cpu_supports("avx2")
                                                        ? mma_products_avx2
                                                        : mma_products_plain;
#else
static void (*const mma_products)(const float a[16][16], const float b[16][8],
                                  float c[16][8]) = mma_products_plain;
#endif

/* PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". */
template <float number(uint32_t)> static void mma_work(const char *in, char *out, const void *) {
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const int row = lane / 4, col = 2 * (lane % 4);
        float *const halves[2] = {&a[row][col], &a[row + 8][col]};
        mma_in x;
        memcpy(&x, in + lane * EMU_WARP_BYTES, sizeof x);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            halves[i & 1][8 * (i >> 1)] = number(x.a[i] & 0xffff);
            halves[i & 1][8 * (i >> 1) + 1] = number(x.a[i] >> 16);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            b[col + 8 * i][row] = number(x.b[i] & 0xffff);
            b[col + 8 * i + 1][row] = number(x.b[i] >> 16);
            memcpy(&c[row + 8 * i][col], &x.c[2 * i], 2 * sizeof(float));
        }
    }
    mma_products(a, b, c);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 2; i++)
            memcpy(out + lane * EMU_WARP_BYTES + 8 * i, &c[lane / 4 + 8 * i][2 * (lane % 4)],
                   2 * sizeof(float));
}

/* PTX ISA, "Matrix Fragments for mma.m16n8k32": four bytes in a register; `A` is int8_t or uint8_t.
 */
template <class A> static void byte_mma_work(const char *in, char *out, const void *) {
    int32_t a[16][32], b[32][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        mma_in x;
        memcpy(&x, in + lane * EMU_WARP_BYTES, sizeof x);
        int row = lane / 4, col = lane % 4;
        for (int i = 0; i < 4; i++) {
            memcpy(&c[row + 8 * (i >> 1)][2 * col + (i & 1)], &x.c[i], 4);
            for (int j = 0; j < 4; j++)
                a[row + 8 * (i & 1)][4 * col + 16 * (i >> 1) + j] = static_cast<A>(x.a[i] >> 8 * j);
        }
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 4; j++)
                b[4 * col + 16 * i + j][row] = static_cast<int8_t>(x.b[i] >> 8 * j);
    }
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 32; k++)
            for (int n = 0; n < 8; n++) c[r][n] += a[r][k] * b[k][n];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            memcpy(out + lane * EMU_WARP_BYTES + 4 * i,
                   &c[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)], 4);
}

/* `c`: four numbers of 32 bits. */
static void run_mma(void *c, const uint32_t a[4], uint32_t b0, uint32_t b1, emu_warp_work *work,
                    emu_place place) {
    mma_in x;
    static_assert(sizeof x <= EMU_WARP_BYTES, "fits a lane's place");
    memcpy(x.c, c, sizeof x.c);
    memcpy(x.a, a, sizeof x.a);
    x.b[0] = b0;
    x.b[1] = b1;
    emu_warp("mma", 0xffffffffu, &x, sizeof x, c, 16, work, nullptr, place);
}

void ptx_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, emu_place place) {
    run_mma(c, a, b0, b1, mma_work<from_bf16>, place);
}

void ptx_mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, emu_place place) {
    run_mma(c, a, b0, b1, mma_work<from_f16>, place);
}

void ptx_mma_s8(int32_t c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, emu_place place) {
    run_mma(c, a, b0, b1, byte_mma_work<int8_t>, place);
}

void ptx_mma_u8(int32_t c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, emu_place place) {
    run_mma(c, a, b0, b1, byte_mma_work<uint8_t>, place);
}

/* ---- mbarriers ---- */

void ptx_barrier_init(uint64_t *barrier, int arrivals, emu_place place) {
    if (!in_shared(barrier, 8)) emu_fail(place, "an mbarrier outside shared memory");
    if (reinterpret_cast<uintptr_t>(barrier) % 8) emu_fail(place, "an mbarrier off 8 bytes");
    if (arrivals < 1 || arrivals > ARRIVALS_MAX)
        emu_fail(place, "an mbarrier of %d arrivals", arrivals);
    mbarrier b = {};
    b.magic = MAGIC;
    b.count = b.pending = static_cast<unsigned>(arrivals) & ARRIVALS_MAX;
    memcpy(barrier, &b, sizeof b);
    m.fresh.push_back({barrier, m.running});
}

void ptx_barrier_init_fence(emu_place place) {
    size_t mine = m.fresh.size();
    for (size_t i = m.fresh.size(); i-- > 0;)
        if (m.fresh[i].by == m.running) m.fresh.erase(m.fresh.begin() + static_cast<long>(i));
    if (m.fresh.size() == mine) emu_fail(place, "this thread has initialised no mbarrier");
    ptx_shared_fence();
}

/* The writer of each byte is not recorded, so one thread's fence counts for all. */
void ptx_shared_fence() {
    memcpy(m.fenced + m.copied_from, m.shared + m.copied_from, m.copied_to - m.copied_from);
}

void ptx_barrier_expect(uint64_t *barrier, uint32_t bytes, emu_place place) {
    if (m.slow) emu_fail(place, "the device has no mbarriers that count bytes");
    mbarrier b = get_mbarrier(barrier, place);
    if (b.pending == 0) emu_fail(place, "more arrivals than the mbarrier counts");
    if (b.bytes + static_cast<int64_t>(bytes) > EXPECT_MAX)
        emu_fail(place, "%u more bytes are more than an mbarrier counts", bytes);
    b.pending--;
    b.bytes += bytes;
    put_mbarrier(barrier, b);
}

void ptx_barrier_wait(uint64_t *barrier, uint32_t parity, emu_place place) {
    mbarrier b = get_mbarrier(barrier, place);
    if (b.phase != parity) return;
    m.running->mbarrier = barrier;
    m.running->parity = parity;
    wait_as(AT_MBARRIER, "mbarrier wait", place);
}

bool ptx_has_bulk() {
    return !m.slow;
}

void ptx_async_copy(void *shared, const void *global, emu_place place) {
    const uint32_t bytes = 16;
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % bytes)
        emu_fail(place, "a copy that is not aligned to 16 bytes");
    if (!in_shared(shared, bytes)) emu_fail(place, "a copy outside shared memory");
    arrival *mine = &m.started[m.running->view.index.x];
    memcpy(shared, global, bytes); /* faults here, not later */
    if (m.late) memset(shared, POISON, bytes);
    mine->pieces.push_back({shared, global, bytes, nullptr, place});
}

void ptx_async_arrive(uint64_t *barrier, emu_place place) {
    arrival *mine = &m.started[m.running->view.index.x];
    if (get_mbarrier(barrier, place).pending == 0)
        emu_fail(place, "more arrivals than the mbarrier counts");
    mine->mbarrier = barrier;
    mine->place = place;
    if (m.late) {
        m.arrivals.push_back(*mine);
        mine->pieces.clear();
    } else {
        mine->pieces.clear(); /* the copies have arrived */
        (void)arrive_with(*mine);
    }
}

void ptx_bulk_copy(void *shared, const void *global, uint32_t bytes, uint64_t *barrier,
                   emu_place place) {
    if (m.slow) emu_fail(place, "the device has no bulk copies");
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % 16)
        emu_fail(place, "a bulk copy that is not aligned to 16 bytes");
    if (!in_shared(shared, bytes)) emu_fail(place, "a bulk copy outside shared memory");
    for (const fresh_mbarrier &fresh : m.fresh)
        if (fresh.at == barrier)
            emu_fail(place, "no fence has shown this mbarrier to the copy engine");
    copy c = {shared, global, bytes, barrier, place};
    if (!engine_writes(c, m.late ? nullptr : global))
        emu_fail(place, "threads have written where this bulk copy writes, and no fence says so");
    if (!m.late) {
        arrive(c);
        return;
    }
    volatile char probe = static_cast<const char *>(global)[bytes - 1]; /* faults here, not later */
    (void)probe;
    m.copies.push_back(c);
}

extern "C" void emu_set_seed(uint64_t seed) {
    emu_seed(seed);
}
