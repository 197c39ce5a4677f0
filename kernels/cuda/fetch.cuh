/* Copies of pages into shared memory, which an mbarrier announces. The kernels have one source for
 * two kinds of devices: from compute capability 9.0 on one thread starts a bulk copy of each page;
 * before it, all threads of the group copy 16 bytes at a time, without waiting (cp.async). */
#ifndef KEEPD_KERNELS_CUDA_FETCH_CUH
#define KEEPD_KERNELS_CUDA_FETCH_CUH

#include "kernels/cuda/pages.cuh"

/* Threads that copy together: a warp or a block. Every thread of the group makes the same calls. */
struct fetchers {
    int thread, count; /* the calling thread's number; at least 32 threads */
};

/* Initialises mbarriers that groups of `threads` threads fetch for; one thread calls it, and the
 * others see it after the next synchronisation. */
static __device__ __forceinline__ void fetch_open(uint64_t *barriers, int count, int threads) {
    for (int i = 0; i < count; i++) ptx_barrier_init(&barriers[i], ptx_has_bulk() ? 1 : threads);
    ptx_barrier_init_fence();
}

/* The part of a page that is copied: `bytes` bytes from byte `offset` on. The copy of each page
 * begins `apart` bytes behind that of the page before. */
struct page_part {
    int offset, bytes, apart;
};

/* Starts copying parts of each of the pages table[0 .. count) to `to`, one after the other; this
 * phase of the barrier ends when they have arrived. 1 to 32 pages. The group no longer uses what
 * was there, and has synchronised since. */
static __device__ __forceinline__ void fetch_pages(const struct fetchers &by, const struct pages &p,
                                                   const int32_t *table, int count,
                                                   const struct page_part &part, char *to,
                                                   uint64_t *barrier) {
    if (ptx_has_bulk()) {
        if (by.thread >= 32) return;
        int32_t page = by.thread < count ? table[by.thread] : 0;
        if (by.thread == 0) ptx_barrier_expect(barrier, (uint32_t)(count * part.bytes));
        __syncwarp();
        if (by.thread < count)
            ptx_bulk_copy(to + by.thread * part.apart, pages_at(p, page) + part.offset,
                          (uint32_t)part.bytes, barrier);
        return;
    }
    for (int i = 0; i < count; i++) {
        const char *from = pages_at(p, table[i]) + part.offset;
        for (int at = 16 * by.thread; at < part.bytes; at += 16 * by.count)
            ptx_async_copy(to + i * part.apart + at, from + at);
    }
    ptx_async_arrive(barrier);
}

#endif
