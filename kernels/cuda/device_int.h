/* The struct that the files behind kernels/cuda/device.h share on a GPU: device.cu (memory, copies,
 * launches) and device_blas.cu (products). Thread: the engine thread. */
#ifndef KEEPD_KERNELS_CUDA_DEVICE_INT_H
#define KEEPD_KERNELS_CUDA_DEVICE_INT_H

#include <cublasLt.h>
#include <cuda_runtime.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/products.h"

enum {
    CHUNKS_MAX = 16,
    FETCHES_MAX = 8,
    DIVIDED_MAX = 128,
};

/* The products of a device. */
struct blas {
    cublasLtHandle_t handle;
    void *workspace;
    struct products products;
    const struct matmul_args *trial; /* the weight for which algorithms are compared */
};

/* Host lists of a step: pinned memory and its copy on the device. */
struct chunk {
    char *host, *device;
    size_t bytes, used;
};

/* A read into pinned memory; the next wait copies it to its destination. */
struct fetch {
    void *to;
    const char *host;
    size_t bytes;
};

struct device {
    int index, processors, capability; /* compute capability, 90 = 9.0 */
    int shared;                        /* bytes of shared memory that a block can have */
    cudaStream_t stream;
    cudaEvent_t marks[DEVICE_MARKS];
    const struct comm *watched;
    struct blas blas;
    char *upload; /* pinned, UPLOAD_BYTES: two halves, used alternately */
    cudaEvent_t upload_done[2];
    int upload_half;
    struct chunk chunks[CHUNKS_MAX]; /* the last one is being filled; all are in use until sync */
    int chunk_count;
    struct chunk
        repeat; /* lists of the open region; no copy from it is in progress when a region begins */
    char *fetched; /* pinned, FETCH_BYTES */
    size_t fetched_used;
    struct fetch fetches[FETCHES_MAX];
    int fetch_count;
    uint64_t waits,
        waited; /* number of waits; graphs.queued when the last one covered everything */
    struct graphs graphs;
    bool capturing, capture_failed;   /* while capturing, failures affect only the capture */
    bool serial;                      /* launches never overlap */
    bool joined;                      /* another stream has joined: the next launch waits for it */
    const void *divided[DIVIDED_MAX]; /* kernels that prefer_shared has seen */
    int divided_count;
    int failed;              /* first error since the last sync */
    bool lost;               /* the context is poisoned, permanently */
    struct timings *timings; /* device_time.cu; NULL: nothing is timed */
};

/* Around an operation that is queued. device_time_begin returns NULL where it is not timed. */
struct timed *device_time_begin(struct device *device, const char *name);
void device_time_end(struct device *device, struct timed *timed);
void device_time_close(struct device *device);

/* Is `error` none? Otherwise logs it and keeps it. An error that leaves the context usable is that
 * of a request that is too large. */
bool device_ok(struct device *device, cudaError_t error, const char *what);

/* Loads cuBLASLt, once for the process. ERR_NOTFOUND if this machine does not have it. */
int blas_load(struct fault *fault);
/* False: logged; blas_close frees what there is. */
bool blas_open(struct device *device);
void blas_close(struct device *device);

#endif
