/* One device as the backend's host code sees it: memory, copies, launches, matrix products, one
 * stream. Two implementations: device.cu with device_blas.cu (CUDA runtime, cuBLASLt) and
 * tests/emu/device_emu.cc (the fiber emulator). C++, for the sources of this folder only.
 *
 * Everything is queued in order on one stream; repeated steps are launched as a graph
 * (kernels/cuda/graph.h), which changes only their duration. The first failure is kept until
 * device_sync reports it; a failure of the device itself (a poisoned context) is reported by every
 * sync from then on. Thread: the engine thread. */
#ifndef KEEPD_KERNELS_CUDA_DEVICE_H
#define KEEPD_KERNELS_CUDA_DEVICE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <tuple>

extern "C" {
#include "base/check.h"
#include "base/err.h"
#include "base/mem.h"
#include "kernels/comm.h"
#include "kernels/kern.h"
}

#include "kernels/cuda/graph.h"
#include "kernels/cuda/ptx.cuh"

struct device;
struct cuda_product;

/* Number of devices of this machine that the backend can use; if 0, `fault` says why. */
int device_count(struct fault *fault);
int device_open(int index, struct device **out, struct fault *fault);
struct graphs *device_graphs(struct device *device);
/* May a repeated region begin? Not while staged lists of the last one may still be in use. */
bool device_may_repeat(const struct device *device);
void device_bind(struct device *device);              /* the calling thread uses it from now on */
void device_close(struct device *device);             /* NULL allowed */
const char *device_name(const struct device *device); /* name of the backend: "cuda" */
int device_processors(
    const struct device *device); /* multiprocessors, to choose the number of blocks */
size_t
device_shared(const struct device *device); /* bytes of shared memory that a block can have */
int device_capability(const struct device *device); /* compute capability, 90 = 9.0 */
/* Has this build kernels for the compute capability? ERR_UNSUPPORTED says which ones it has. Both
 * implementations call it before they open a device (cuda.cu). */
int device_supported(int capability, struct fault *fault);

void *device_alloc(struct device *device, size_t bytes); /* not zeroed; NULL: out of memory */
void device_free(struct device *device, void *mem);
struct device_memory {
    size_t unused, total; /* bytes */
};
struct device_memory device_memory(const struct device *device);
void device_zero(struct device *device, void *mem, size_t bytes);
/* The contents of `mem` are no longer needed; the emulator overwrites them to detect later use. */
void device_forget(struct device *device, void *mem, size_t bytes);
void device_copy(struct device *device, void *to, const void *from, size_t bytes);

/* `from` may be reused on return. */
void device_upload(struct device *device, void *to, const void *from, size_t bytes);
#define DEVICE_REPEAT_BYTES ((size_t)1 << 20)
/* A device copy of `bytes` host bytes, valid for work queued until the next device_sync. NULL if
 * there is no memory (the failure is kept). Aligned to 16. In a repeated region the n-th copy of a
 * size has the same address as the last time, up to DEVICE_REPEAT_BYTES in total. */
const void *device_stage(struct device *device, const void *from, size_t bytes);
/* Waits for all queued work; the bytes are valid on return. */
int device_download(struct device *device, void *to, const void *from, size_t bytes);
/* Queues a read, so that one wait serves several: the bytes are valid when the next device_download
 * or device_sync returns, unless the device was lost. `to` must stay valid until then. */
void device_fetch(struct device *device, void *to, const void *from, size_t bytes);
/* Waits for the work queued since the last wait, if there is any. 0, ERR_NOMEM or ERR_DEVICE; logs
 * the device's message. */
int device_sync(struct device *device);
uint64_t
device_waits(const struct device *device);         /* number of times that the host waited for it */
void device_failed(struct device *device, int rc); /* keeps the first error */
void device_lose(
    struct device *device); /* makes the device fail permanently: ranks have diverged */

/* ---- Several devices ---- */

/* Positions in the queue for other devices to wait for; each is reused. */
enum { DEVICE_READY, DEVICE_DONE, DEVICE_MARKS };
void device_mark(struct device *device, int mark);
/* Makes work queued from now on wait until `other` has passed its last such mark. */
void device_await(struct device *device, const struct device *other, int mark);
/* Can every device's kernels read and write every other device's memory? True for a single
 * device. */
bool device_reaches_others(void);
/* The CUDA runtime's stream, for libraries that queue on it directly. */
void *device_stream(struct device *device);
/* Sets the communicator whose collectives are queued: it is aborted when the device is lost, and if
 * it has a `check`, waits continue only while that returns 0. NULL: none. */
void device_watch(struct device *device, const struct comm *comm);

/* A matrix product: y[rows][n] (+)= x[rows][k] w[n][k]^T (+ bias[n]), all row-major; x and w in
 * `dtype` (F32, BF16 or E4M3), sums and y float32. The order of sums depends on n and k only, never
 * on `rows`. x, w, y and bias are aligned to DEVICE_MATMUL_ALIGN bytes, as the GPU's fastest copies
 * require. E4M3: sum (r, o) is multiplied by x_scale[r] * w_scale[o], k and n are multiples of
 * DEVICE_E4M3_STEP, and there is no bias.
 *
 * With a stride, k are the first inputs of rows of x and w that have so many. With parts, every
 * part has k inputs, and y[parts][rows][n] has a sum for each: of the inputs part * k and on. Then
 * there is neither a bias nor add. */
struct matmul_args {
    float *y;
    const void *x, *w;
    const float *bias;              /* or NULL */
    const float *x_scale, *w_scale; /* E4M3, otherwise NULL */
    int64_t rows, n, k, dtype, add;
    int64_t stride, parts; /* 0: k; 0: one part */
};

#define DEVICE_E4M3_STEP    16
#define DEVICE_MATMUL_ALIGN 16

void device_matmul(struct device *device, const struct matmul_args *args);
/* Called when a weight has been loaded, with its w, w_scale, n, k and dtype: chooses how its
 * products are computed for few rows and for many (products.h). Waits for the device. */
void device_matmul_compare(struct device *device, const struct matmul_args *weight);
/* Has the library an algorithm for products of this shape? */
bool device_matmul_has(struct device *device, const struct matmul_args *args);
/* May these parts be multiplied one after the other, each added to y, with the bits of their
 * ordered sum? As device_matmul_compare has seen. */
bool device_matmul_in_turn(struct device *device, const struct matmul_args *args);
/* cuda_products of cuda.h. */
int device_products(struct device *device, struct cuda_product *list, int most);
/* Can the device, of compute capability 9.0, compute E4M3 products of this shape? ERR_UNSUPPORTED
 * says why not. */
int device_check_e4m3(struct device *device, int64_t n, int64_t k, struct fault *fault);

/* ---- Launching ---- */

/* A launch as data: this header, then every argument, aligned to 16 bytes. */
struct alignas(16) launch {
    const void *kernel;
    const char *name;
    size_t shared;
    uint32_t grid_x, grid_y;
    int32_t threads;
    int32_t overlaps; /* may start while the previous launch ends; see LAUNCH_OVERLAPPED */
};

/* Switches the overlap of launches on (the initial state) or off, for comparisons. */
void device_overlap(struct device *device, bool on);

template <class... P> constexpr size_t launch_bytes() {
    return sizeof(struct launch) + (((sizeof(P) + 15) / 16 * 16) + ... + 0);
}

#ifdef KEEPD_EMU
bool device_runs(struct device *device); /* false: the device is lost */
void device_ran(const char *error);

/* Returns the next argument and advances `at`. */
template <class P> const P &launch_argument(const char *&at) {
    const char *here = at;
    at += (sizeof(P) + 15) / 16 * 16;
    return *reinterpret_cast<const P *>(here);
}

template <class... P> struct launch_call { std::tuple<const P &...> args; };

template <class... P> void launch_run(struct device *device, const void *data) {
    const struct launch *l = static_cast<const struct launch *>(data);
    const char *at = reinterpret_cast<const char *>(l + 1);
    const launch_call<P...> call{{launch_argument<P>(at)...}}; /* braces: from left to right */
    auto kernel = reinterpret_cast<void (*)(P...)>(const_cast<void *>(l->kernel));
    if (!device_runs(device)) return;
    device_ran(l->shared > device_shared(device)
                   ? "a launch wants more shared memory than a block of the device has"
                   : emu_launch(
                         l->name, dim3(l->grid_x, l->grid_y), (int)l->threads, l->shared,
                         [=] { std::apply(kernel, call.args); }, l->overlaps != 0));
}
#else
/* `args`: a pointer to each. */
void device_run_launch(struct device *device, const struct launch *launch, void **args);

template <class... P> void launch_run(struct device *device, const void *data) {
    const struct launch *l = static_cast<const struct launch *>(data);
    const size_t sizes[] = {sizeof(P)..., 0};
    void *args[sizeof...(P) + 1];
    const char *at = reinterpret_cast<const char *>(l + 1);
    for (size_t i = 0; i < sizeof...(P); i++) {
        args[i] = const_cast<char *>(at);
        at += (sizes[i] + 15) / 16 * 16;
    }
    device_run_launch(device, l, args);
}
#endif

/* Padding between members is cleared, because it would make equal arguments differ. */
template <class P> static inline char *launch_put(char *to, P arg) {
    __builtin_clear_padding(&arg);
    memcpy(to, &arg, sizeof arg);
    return to + (sizeof arg + 15) / 16 * 16;
}

template <class... P, class... A>
void device_launch(struct device *device, const char *name, bool overlaps, void (*kernel)(P...),
                   dim3 grid, int threads, size_t shared, A... args) {
    alignas(16) char data[launch_bytes<P...>()];
    if (grid.x == 0 || grid.y == 0) return;
    memset(data, 0, sizeof data);
    const struct launch head = {
        reinterpret_cast<const void *>(kernel), name, shared, grid.x, grid.y, threads, overlaps};
    char *at = launch_put(data, head);
    ((at = launch_put<P>(at, static_cast<P>(args))), ...);
    graph_add(device_graphs(device), device, launch_run<P...>, data, sizeof data);
}

/* LAUNCH(device, (kernel<D>), grid, threads, shared, arguments...) */
#define LAUNCH(device, kernel, grid, threads, shared, ...)                                         \
    device_launch(device, #kernel, false, kernel, grid, threads, shared, __VA_ARGS__)
/* The same with programmatic dependent launch; the kernel begins with ptx_overlap_grids. Used for
 * all small kernels of a step, whose start-up is a large part of their time. */
#define LAUNCH_OVERLAPPED(device, kernel, grid, threads, shared, ...)                              \
    device_launch(device, #kernel, true, kernel, grid, threads, shared, __VA_ARGS__)

static inline unsigned blocks_for(int64_t items, int64_t each) {
    return (unsigned)((items + each - 1) / each);
}

#endif
