/* One device as the backend's host code sees it: memory, copies, launches, matrix products, one
 * stream. Two implementations: kernels/cuda/device.cu (CUDA runtime and cuBLASLt) and
 * tests/emu/device_emu.cc (the fiber emulator). C++, for the sources of this folder only.
 *
 * Everything is queued in order on one stream. The first failure sticks until device_sync reports
 * it; a failure of the device itself (a poisoned context) is reported by every sync from then on.
 * Thread: the engine thread. */
#ifndef KEEPD_KERNELS_CUDA_DEVICE_H
#define KEEPD_KERNELS_CUDA_DEVICE_H

#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "base/check.h"
#include "base/err.h"
#include "base/mem.h"
#include "kernels/kern.h"
}

#include "kernels/cuda/ptx.cuh"

struct device;

/* Devices of this machine that the backend can use; 0 with the reason in `fault`. */
int device_count(struct fault *fault);
int device_open(int index, struct device **out, struct fault *fault);
void device_close(struct device *device);             /* NULL is fine */
const char *device_name(const struct device *device); /* of the backend: "cuda" */
int device_processors(
    const struct device *device); /* multiprocessors: blocks to fill the machine */

void *device_alloc(struct device *device, size_t bytes); /* not zeroed; NULL: out of memory */
void device_free(struct device *device, void *mem);
size_t device_memory_free(const struct device *device);
void device_zero(struct device *device, void *mem, size_t bytes);
/* What `mem` holds need not survive: an emulator may spoil it to catch who relies on it. */
void device_forget(struct device *device, void *mem, size_t bytes);
void device_copy(struct device *device, void *to, const void *from, size_t bytes);

/* `from` may be reused on return. */
void device_upload(struct device *device, void *to, const void *from, size_t bytes);
/* A device copy of `bytes` host bytes, valid for what is queued until the next device_sync. NULL
 * when there is no memory (the failure sticks). Aligned to 16. */
const void *device_stage(struct device *device, const void *from, size_t bytes);
/* Waits for all that was queued; the bytes are there on return. */
int device_download(struct device *device, void *to, const void *from, size_t bytes);
int device_sync(struct device *device); /* 0, ERR_NOMEM or ERR_DEVICE; logs what the device says */
void device_failed(struct device *device, int code); /* sticks, if it is the first */

/* y[rows][n] (+)= x[rows][k] w[n][k]^T (+ bias[n]), all row-major; x and w in `dtype` (F32 or
 * BF16), sums and y float32. The order of sums depends on n and k only, never on `rows`. */
void device_matmul(struct device *device, float *y, const void *x, const void *w, const float *bias,
                   int rows, int64_t n, int64_t k, enum kern_dtype dtype, bool add);

/* ---- Launching ---------------------------------------------------------------------------- */

#ifdef KEEPD_EMU
bool device_runs(struct device *device); /* false: it is lost */
void device_ran(const char *error);

template <class... P, class... A>
void device_launch(struct device *device, const char *name, void (*kernel)(P...), dim3 grid,
                   int threads, size_t shared, A... args) {
    if (grid.x == 0 || grid.y == 0 || !device_runs(device)) return;
    device_ran(emu_launch(name, grid, threads, shared, [=] { kernel(static_cast<P>(args)...); }));
}
#else
/* Lets the kernel have `shared` bytes; false when that failed. */
bool device_prepare(struct device *device, const void *kernel, size_t shared);
cudaStream_t device_stream(struct device *device);
void device_launched(struct device *device, const char *name);

template <class... P, class... A>
void device_launch(struct device *device, const char *name, void (*kernel)(P...), dim3 grid,
                   int threads, size_t shared, A... args) {
    if (grid.x == 0 || grid.y == 0) return;
    if (!device_prepare(device, reinterpret_cast<const void *>(kernel), shared)) return;
    kernel<<<grid, threads, shared, device_stream(device)>>>(static_cast<P>(args)...);
    device_launched(device, name);
}
#endif

/* LAUNCH(device, (kernel<D>), grid, threads, shared, arguments...) */
#define LAUNCH(device, kernel, grid, threads, shared, ...)                                         \
    device_launch(device, #kernel, kernel, grid, threads, shared, __VA_ARGS__)

static inline unsigned blocks_for(int64_t items, int64_t each) {
    return (unsigned)((items + each - 1) / each);
}

#endif
