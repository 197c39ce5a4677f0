/* A communicator of threads. A collective has two barriers: at the first, every rank has published
 * its array; at the second, every rank has finished with all arrays. Only the first can be aborted:
 * a rank that has passed it always reaches the second, because until then other ranks read and
 * write its array. */
#include "kernels/comm_host.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"

struct host;

struct host_rank {
    struct comm base; /* first: a struct comm * is a struct host_rank * */
    struct host *host;
    char *array; /* array of the current collective */
    int rc;
};

struct host {
    /* One word, so that a barrier cannot be both stopped and complete: bits 0-7 count arrivals, bit
     * 8 means stopped, the rest counts barriers. */
    _Atomic uint32_t state;
    _Atomic int handles;
    struct host_rank rank[COMM_RANKS_MAX];
};

enum { ARRIVED = 0xff, STOPPED = 0x100, BARRIER = 0x200 };

static struct host_rank *comm_host_rank_of(const struct comm *comm) {
    return (struct host_rank *)(uintptr_t)comm;
}

/* ---- The barrier ---- */

static void wake_all(struct host *host) {
    syscall(SYS_futex, (uint32_t *)&host->state, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void wait_change(struct host *host, uint32_t seen) {
    syscall(SYS_futex, (uint32_t *)&host->state, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

/* Blocks instead of spinning: the team that runs the ranks (kernels/cpu/team.h) spins for short
 * waits, and waits here last as long as other ranks' work. */
static int barrier(struct host *host, int ranks, bool may_stop) {
    uint32_t now = atomic_load(&host->state), next;
    do {
        if (may_stop && now & STOPPED) return ERR_STOPPED;
        next = now + 1;
        if ((next & ARRIVED) == (uint32_t)ranks) next = (now & ~(uint32_t)ARRIVED) + BARRIER;
    } while (!atomic_compare_exchange_weak(&host->state, &now, next));
    uint32_t mine = now & ~(uint32_t)(BARRIER - 1);
    if ((next & ~(uint32_t)(BARRIER - 1)) != mine) {
        wake_all(host);
        return 0;
    }
    for (;;) {
        now = atomic_load(&host->state);
        if ((now & ~(uint32_t)(BARRIER - 1)) != mine) return 0;
        if (may_stop && now & STOPPED) return ERR_STOPPED;
        wait_change(host, now);
    }
}

int comm_host_begin(const struct comm *comm, void *shown) {
    comm_host_rank_of(comm)->array = shown;
    return barrier(comm_host_rank_of(comm)->host, comm->ranks, true);
}

void *comm_host_shown(const struct comm *comm, int rank) {
    return comm_host_rank_of(comm)->host->rank[rank].array;
}

void comm_host_end(const struct comm *comm) {
    (void)barrier(comm_host_rank_of(comm)->host, comm->ranks, false);
}

bool comm_host_stopped(const struct comm *comm) {
    return atomic_load(&comm_host_rank_of(comm)->host->state) & STOPPED;
}

static void host_abort(const struct comm *comm) {
    struct host *host = comm_host_rank_of(comm)->host;
    atomic_fetch_or(&host->state, STOPPED);
    wake_all(host);
}

/* ---- Reductions ---- */

#define BLOCK                                                                                      \
    64 /* elements, so that the pairs of a level lie one after the other in a register             \
        */

#define SUM_OF(a, b) ((a) + (b))
#define MAX_OF(a, b) ((b) > (a) ? (b) : (a))
#define MIN_OF(a, b) ((b) < (a) ? (b) : (a))

/* Elements [from, from + count) of all arrays, added pair by pair up the tree and stored in all of
 * them. */
#define REDUCE(name, T, OF)                                                                        \
    static void name(const struct host *host, int ranks, size_t from, size_t count) {              \
        T level[COMM_RANKS_MAX][BLOCK];                                                            \
        for (int r = 0; r < ranks; r++)                                                            \
            memcpy(level[r], host->rank[r].array + from * sizeof(T), count * sizeof(T));           \
        for (int left = ranks / 2; left > 0; left /= 2)                                            \
            for (int r = 0; r < left; r++)                                                         \
                for (size_t i = 0; i < count; i++)                                                 \
                    level[r][i] = OF(level[r + r][i], level[r + r + 1][i]);                        \
        for (int r = 0; r < ranks; r++)                                                            \
            memcpy(host->rank[r].array + from * sizeof(T), level[0], count * sizeof(T));           \
    }

#define REDUCE_ALL(suffix, T)                                                                      \
    REDUCE(sum_##suffix, T, SUM_OF)                                                                \
    REDUCE(max_##suffix, T, MAX_OF)                                                                \
    REDUCE(min_##suffix, T, MIN_OF)

REDUCE_ALL(f32, float)
REDUCE_ALL(f64, double)
REDUCE_ALL(u32, uint32_t)
REDUCE_ALL(u64, uint64_t)
REDUCE_ALL(i64, int64_t)

typedef void reduce_block(const struct host *host, int ranks, size_t from, size_t count);

static reduce_block *const reductions[][3] = {
    [COMM_F32] = {sum_f32, max_f32, min_f32}, [COMM_F64] = {sum_f64, max_f64, min_f64},
    [COMM_U32] = {sum_u32, max_u32, min_u32}, [COMM_U64] = {sum_u64, max_u64, min_u64},
    [COMM_I64] = {sum_i64, max_i64, min_i64},
};

/* Each rank computes a part of the elements, in whole blocks, for all ranks. */
static int host_all_reduce(const struct comm *comm, void *x, size_t count, enum comm_type type,
                           enum comm_op op) {
    const struct host *host = comm_host_rank_of(comm)->host;
    size_t blocks = (count + BLOCK - 1) / BLOCK, ranks = (size_t)comm->ranks;
    size_t from = blocks * (size_t)comm->rank / ranks * BLOCK;
    size_t to = blocks * ((size_t)comm->rank + 1) / ranks * BLOCK;
    int rc = comm_host_begin(comm, x);
    if (rc) return rc;
    if (to > count) to = count;
    for (; from < to; from += BLOCK)
        reductions[type][op](host, comm->ranks, from, to - from < BLOCK ? to - from : BLOCK);
    comm_host_end(comm);
    return 0;
}

static int host_all_gather(const struct comm *comm, void *x, size_t bytes) {
    const struct host *host = comm_host_rank_of(comm)->host;
    int rc = comm_host_begin(comm, x);
    if (rc) return rc;
    for (int r = 0; r < comm->ranks; r++)
        if (r != comm->rank)
            memcpy((char *)x + (size_t)r * bytes, host->rank[r].array + (size_t)r * bytes, bytes);
    comm_host_end(comm);
    return 0;
}

static int host_agree(const struct comm *comm, int rc) {
    struct host_rank *own = comm_host_rank_of(comm);
    own->rc = rc;
    int broken = comm_host_begin(comm, NULL);
    if (broken) return rc ? rc : broken;
    for (int r = 0; r < comm->ranks; r++)
        if (own->host->rank[r].rc < rc) rc = own->host->rank[r].rc;
    comm_host_end(comm);
    return rc;
}

/* ---- Open and close ---- */

static void host_close(const struct comm *comm) {
    struct host *host = comm_host_rank_of(comm)->host;
    if (atomic_fetch_sub(&host->handles, 1) == 1) mem_free(host);
}

static const struct comm_ops host_ops = {.name = "host",
                                         .ordered = true,
                                         .all_reduce = host_all_reduce,
                                         .all_gather = host_all_gather,
                                         .agree = host_agree,
                                         .abort = host_abort,
                                         .close = host_close};

int comm_host_open(int ranks, const struct comm **out) {
    if (ranks < 1 || ranks > COMM_RANKS_MAX || ranks & (ranks - 1)) return ERR_INVALID;
    struct host *host = mem_try_alloc(1, sizeof *host);
    if (!host) return ERR_NOMEM;
    atomic_init(&host->state, 0);
    atomic_init(&host->handles, ranks);
    for (int r = 0; r < ranks; r++) {
        host->rank[r] =
            (struct host_rank){.base = {.ops = &host_ops, .rank = r, .ranks = ranks}, .host = host};
        out[r] = &host->rank[r].base;
    }
    return 0;
}
