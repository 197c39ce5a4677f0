/* kernels/cuda/device.h over the CUDA runtime, which is linked into the program, and cuBLASLt,
 * which is loaded with the first device. Never links libcuda: on a machine without a driver or
 * without these libraries the program starts, device_count or device_open reports it, and the CPU
 * backend is used. */
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/products.h"

extern "C" {
#include "base/log.h"
}

#if CUDART_VERSION < 13000
#error "CUDA 13 is needed: cudaStreamGetCaptureInfo has another signature before"
#endif

#define UPLOAD_BYTES    ((size_t)16 << 20) /* pinned buffer of weight uploads */
#define STAGE_BYTES     ((size_t)4 << 20)  /* least size of a chunk of host lists */
#define CHUNKS_MAX      16
#define FETCH_BYTES     ((size_t)256 << 10) /* pinned; enough for 1,500 sampled tokens per wait */
#define FETCHES_MAX     8
#define WORKSPACE_BYTES ((size_t)32 << 20) /* recommended for cuBLASLt on Hopper */
#define DIVIDED_MAX     128
#define TRIAL_BYTES                                                                                \
    ((size_t)1 << 30) /* memory of a comparison of products; larger ones are left out */

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
    cublasLtHandle_t blas;
    void *workspace;
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
    bool capturing, capture_failed; /* while capturing, failures affect only the capture */
    bool serial;                    /* launches never overlap */
    bool joined;                    /* another stream has joined: the next launch waits for it */
    struct products products;
    const struct matmul_args *trial;  /* the weight for which algorithms are compared */
    const void *divided[DIVIDED_MAX]; /* kernels that prefer_shared has seen */
    int divided_count;
    int failed; /* first error since the last sync */
    bool lost;  /* the context is poisoned, permanently */
};

/* ---- cuBLASLt -------------------------------------------------------------------------------- */

#define BLAS_LIBRARY "libcublasLt.so.13"

#define BLAS_FUNCTIONS(X)                                                                          \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulAlgoCheck)                                                                     \
    X(cublasLtMatmulAlgoConfigGetAttribute)                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)

/* Loaded with the first device, so that the program starts, and its CPU computes, on machines
 * without the library. */
static struct {
#define MEMBER(name) decltype(&::name) name;
    BLAS_FUNCTIONS(MEMBER)
#undef MEMBER
    char missing[200]; /* why it is not loaded; "": it is */
} lt;

static void load_blas(void) {
    void *handle = dlopen(BLAS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    const char *missing = handle ? NULL : dlerror();
#define LOAD(name)                                                                                 \
    lt.name = reinterpret_cast<decltype(lt.name)>(handle ? dlsym(handle, #name) : NULL);           \
    if (!lt.name && !missing) missing = BLAS_LIBRARY " lacks " #name;
    BLAS_FUNCTIONS(LOAD)
#undef LOAD
    snprintf(lt.missing, sizeof lt.missing, "%s", missing ? missing : "");
}

/* ---- Errors ---------------------------------------------------------------------------------- */

void device_failed(struct device *device, int rc) {
    if (device->capturing)
        device->capture_failed = true;
    else if (!device->failed)
        device->failed = rc;
}

static bool asks(const struct device *device) {
    return device->watched && device->watched->ops->check;
}

void device_lose(struct device *device) {
    if (device->watched && !device->lost) device->watched->ops->abort(device->watched);
    device->lost = true;
    if (asks(device)) /* queued work ends, so that waiting for it ends */
        (void)device->watched->ops->check(device->watched);
    device_failed(device, ERR_DEVICE);
}

/* Errors that leave the context usable are those of requests that are too large. */
static bool ok(struct device *device, cudaError_t error, const char *what) {
    if (error == cudaSuccess) return true;
    log_error("cuda: %s: %s", what, cudaGetErrorString(error));
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        device_failed(device, ERR_NOMEM);
        return false;
    }
    if (device->capturing)
        device_failed(device, ERR_DEVICE);
    else
        device_lose(device);
    return false;
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Kernels are loaded when the context is made, not when they are first launched: loading one waits
 * for the device, and a rank that waits inside a collective of another one would wait for ever. */
static void load_eagerly(void) {
    (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

int device_count(struct fault *fault) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int count = 0;
    (void)pthread_once(&once, load_eagerly);
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        fault_set(fault, ERR_NOTFOUND, "device", "no CUDA device: %s",
                  error == cudaSuccess ? "none is visible" : cudaGetErrorString(error));
        (void)cudaGetLastError();
        return 0;
    }
    return count;
}

static int check_device(int index, struct device *device, struct fault *fault) {
    int count = device_count(fault), major = 0, minor = 0;
    if (count == 0) return ERR_NOTFOUND;
    if (index < 0 || index >= count)
        return fault_set(fault, ERR_NOTFOUND, "device", "device %d of %d", index, count);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    cudaDeviceGetAttribute(&device->processors, cudaDevAttrMultiProcessorCount, index);
    cudaDeviceGetAttribute(&device->shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    device->index = index;
    device->capability = 10 * major + minor;
    if (major < 9)
        return fault_set(fault, ERR_UNSUPPORTED, "device",
                         "the device has compute capability %d.%d; 9.0 (Hopper) or later is needed",
                         major, minor);
    return 0;
}

static void close_chunk(struct chunk *chunk) {
    cudaFree(chunk->device);
    cudaFreeHost(chunk->host);
    *chunk = {};
}

static bool open_chunk(struct chunk *chunk, size_t bytes) {
    chunk->bytes = bytes;
    if (cudaMalloc((void **)&chunk->device, bytes) == cudaSuccess &&
        cudaMallocHost((void **)&chunk->host, bytes) == cudaSuccess)
        return true;
    (void)cudaGetLastError();
    close_chunk(chunk);
    return false;
}

int device_open(int index, struct device **out, struct fault *fault) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, load_blas);
    if (lt.missing[0]) return fault_set(fault, ERR_NOTFOUND, "device", "%s", lt.missing);
    struct device *device = static_cast<struct device *>(mem_try_alloc(1, sizeof *device));
    if (!device) return fault_set(fault, ERR_NOMEM, "device", "no memory");
    int rc = check_device(index, device, fault);
    if (rc) {
        mem_free(device);
        return rc;
    }
    bool good = ok(device, cudaSetDevice(index), "cudaSetDevice") &&
                ok(device, cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking),
                   "cudaStreamCreate") &&
                ok(device, cudaMalloc(&device->workspace, WORKSPACE_BYTES), "workspace") &&
                ok(device, cudaEventCreate(&device->upload_done[0]), "cudaEventCreate") &&
                ok(device, cudaEventCreate(&device->upload_done[1]), "cudaEventCreate") &&
                ok(device, cudaMallocHost((void **)&device->upload, UPLOAD_BYTES), "staging") &&
                ok(device, cudaMallocHost((void **)&device->fetched, FETCH_BYTES), "staging") &&
                open_chunk(&device->repeat, DEVICE_REPEAT_BYTES);
    for (cudaEvent_t &mark : device->marks)
        good = good && ok(device, cudaEventCreateWithFlags(&mark, cudaEventDisableTiming),
                          "cudaEventCreate");
    if (good && lt.cublasLtCreate(&device->blas) != CUBLAS_STATUS_SUCCESS) good = false;
    if (!good) {
        device_close(device);
        return fault_set(fault, ERR_DEVICE, "device", "cannot open CUDA device %d", index);
    }
    *out = device;
    return 0;
}

void device_bind(struct device *device) {
    ok(device, cudaSetDevice(device->index), "cudaSetDevice");
}

void device_close(struct device *device) {
    if (!device) return;
    graph_close(&device->graphs, device);
    if (device->blas) lt.cublasLtDestroy(device->blas);
    if (device->stream) cudaStreamDestroy(device->stream);
    for (int i = 0; i < 2; i++)
        if (device->upload_done[i]) cudaEventDestroy(device->upload_done[i]);
    for (cudaEvent_t mark : device->marks)
        if (mark) cudaEventDestroy(mark);
    for (int i = 0; i < device->chunk_count; i++) close_chunk(&device->chunks[i]);
    close_chunk(&device->repeat);
    cudaFree(device->workspace);
    cudaFreeHost(device->upload);
    cudaFreeHost(device->fetched);
    mem_free(device);
}

const char *device_name(const struct device *) {
    return "cuda";
}

int device_processors(const struct device *device) {
    return device->processors;
}

size_t device_shared(const struct device *device) {
    return (size_t)device->shared;
}

/* ---- Memory ---------------------------------------------------------------------------------- */

void *device_alloc(struct device *device, size_t bytes) {
    void *mem = NULL;
    if (cudaMalloc(&mem, bytes ? bytes : 1) == cudaSuccess) return mem;
    (void)cudaGetLastError(); /* a failed allocation does no harm; the caller reports it */
    (void)device;
    return NULL;
}

/* Waits for `event`, or for all queued work. A collective that another rank has left never ends, so
 * the communicator is checked meanwhile; every wait of the host begins here. */
static void wait_for(struct device *device, cudaEvent_t event) {
    cudaError_t error;
    device->waits++;
    if (!asks(device) || device->lost) {
        ok(device, event ? cudaEventSynchronize(event) : cudaStreamSynchronize(device->stream),
           "waiting for the device");
        return;
    }
    while ((error = event ? cudaEventQuery(event) : cudaStreamQuery(device->stream)) ==
           cudaErrorNotReady)
        if (device->watched->ops->check(device->watched)) {
            device_lose(device);
            return;
        }
    ok(device, error, "waiting for the device");
}

/* cudaFree waits for the device: no queued work still uses the memory. That wait does not check the
 * communicator. */
void device_free(struct device *device, void *mem) {
    graph_settle(&device->graphs, device);
    if (!mem) return;
    if (asks(device))
        wait_for(device, NULL);
    else
        device->waits++;
    ok(device, cudaFree(mem), "cudaFree");
}

struct device_memory device_memory(const struct device *) {
    struct device_memory memory = {};
    if (cudaMemGetInfo(&memory.unused, &memory.total) != cudaSuccess) memory = {};
    return memory;
}

struct copy_args {
    void *to;
    const void *from; /* NULL: zeros */
    size_t bytes;
    int64_t kind; /* enum cudaMemcpyKind */
};

static void run_copy(struct device *device, const void *data) {
    const struct copy_args *a = static_cast<const struct copy_args *>(data);
    if (device->lost) return;
    if (a->from)
        ok(device,
           cudaMemcpyAsync(a->to, a->from, a->bytes, static_cast<cudaMemcpyKind>(a->kind),
                           device->stream),
           "copy");
    else
        ok(device, cudaMemsetAsync(a->to, 0, a->bytes, device->stream), "memset");
}

static void add_copy(struct device *device, void *to, const void *from, size_t bytes,
                     cudaMemcpyKind kind) {
    const struct copy_args args = {to, from, bytes, kind};
    graph_add(&device->graphs, device, run_copy, &args, sizeof args);
}

void device_zero(struct device *device, void *mem, size_t bytes) {
    add_copy(device, mem, NULL, bytes, cudaMemcpyDeviceToDevice);
}

void device_forget(struct device *, void *, size_t) {}

void device_copy(struct device *device, void *to, const void *from, size_t bytes) {
    add_copy(device, to, from, bytes, cudaMemcpyDeviceToDevice);
}

/* ---- Between host and device ------------------------------------------------------------------
 */

/* Uploads through pinned memory by halves: while the host fills one, the other is being copied. */
void device_upload(struct device *device, void *to, const void *from, size_t bytes) {
    const size_t half = UPLOAD_BYTES / 2;
    char *target = static_cast<char *>(to);
    const char *source = static_cast<const char *>(from);
    graph_settle(&device->graphs, device);
    while (bytes > 0 && !device->lost) {
        size_t slice = bytes < half ? bytes : half;
        int turn = device->upload_half ^= 1;
        char *pinned = device->upload + (turn ? half : 0);
        wait_for(device, device->upload_done[turn]);
        if (device->lost) return;
        memcpy(pinned, source, slice);
        ok(device, cudaMemcpyAsync(target, pinned, slice, cudaMemcpyHostToDevice, device->stream),
           "upload");
        ok(device, cudaEventRecord(device->upload_done[turn], device->stream), "upload");
        target += slice;
        source += slice;
        bytes -= slice;
    }
}

static struct chunk *add_chunk(struct device *device, size_t bytes) {
    struct chunk fresh = {};
    if (device->chunk_count == CHUNKS_MAX) return NULL;
    if (!open_chunk(&fresh, bytes < STAGE_BYTES ? STAGE_BYTES : bytes)) return NULL;
    device->chunks[device->chunk_count] = fresh;
    return &device->chunks[device->chunk_count++];
}

/* Copies into a chunk that has room. */
static const void *stage_in(struct device *device, struct chunk *chunk, const void *from,
                            size_t bytes) {
    size_t at = chunk->used;
    chunk->used += (bytes + 255) / 256 * 256;
    memcpy(chunk->host + at, from, bytes);
    add_copy(device, chunk->device + at, chunk->host + at, bytes, cudaMemcpyHostToDevice);
    return chunk->device + at;
}

const void *device_stage(struct device *device, const void *from, size_t bytes) {
    size_t room = (bytes + 255) / 256 * 256;
    if (device->graphs.open && device->repeat.used + room <= device->repeat.bytes)
        return stage_in(device, &device->repeat, from, bytes);
    struct chunk *chunk = device->chunk_count ? &device->chunks[device->chunk_count - 1] : NULL;
    if (!chunk || chunk->used + room > chunk->bytes) chunk = add_chunk(device, room);
    if (!chunk) {
        log_error("cuda: no memory for a list of %zu bytes", bytes);
        device_failed(device, ERR_NOMEM);
        return NULL;
    }
    return stage_in(device, chunk, from, bytes);
}

/* Called while no copy is in progress: replaces several chunks by one that would have held
 * everything. */
static void reset_chunks(struct device *device) {
    size_t bytes = 0;
    device->repeat.used = 0;
    for (int i = 0; i < device->chunk_count; i++) {
        bytes += device->chunks[i].bytes;
        device->chunks[i].used = 0;
    }
    if (device->chunk_count < 2) return;
    for (int i = 0; i < device->chunk_count; i++) close_chunk(&device->chunks[i]);
    device->chunk_count = 0;
    (void)add_chunk(device, bytes); /* otherwise the next list allocates it */
}

/* Waits for all queued work; fetched bytes are then valid. */
static void wait(struct device *device) {
    wait_for(device, NULL);
    device->waited = device->graphs.queued;
    for (int i = 0; i < device->fetch_count && !device->lost; i++)
        memcpy(device->fetches[i].to, device->fetches[i].host, device->fetches[i].bytes);
    device->fetch_count = 0;
    device->fetched_used = 0;
}

void device_fetch(struct device *device, void *to, const void *from, size_t bytes) {
    size_t room = (bytes + 15) / 16 * 16;
    graph_settle(&device->graphs, device);
    if (device->lost) return;
    if (device->fetch_count == FETCHES_MAX || device->fetched_used + room > FETCH_BYTES)
        wait(device);
    char *host = static_cast<char *>(to);
    if (room <= FETCH_BYTES) {
        host = device->fetched + device->fetched_used;
        device->fetches[device->fetch_count++] = {to, host, bytes};
        device->fetched_used += room;
    } /* otherwise: a copy to pageable memory waits without checks, and nothing is in progress any
         more */
    if (!device->lost)
        ok(device, cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, device->stream),
           "download");
}

int device_download(struct device *device, void *to, const void *from, size_t bytes) {
    device_fetch(device, to, from, bytes);
    if (!device->lost) wait(device);
    return device->failed ? device->failed : device->lost ? ERR_DEVICE : 0;
}

uint64_t device_waits(const struct device *device) {
    return device->waits;
}

int device_sync(struct device *device) {
    graph_end(&device->graphs, device);
    if (device->waited != device->graphs.queued) wait(device);
    int failed = device->failed;
    device->failed = device->lost ? ERR_DEVICE : 0;
    reset_chunks(device);
    return failed;
}

/* ---- Several devices -------------------------------------------------------------------------
 */

void device_mark(struct device *device, int mark) {
    graph_settle(&device->graphs, device);
    if (!device->lost) ok(device, cudaEventRecord(device->marks[mark], device->stream), "mark");
}

void device_await(struct device *device, const struct device *other, int mark) {
    if (device == other || device->lost) return;
    ok(device, cudaStreamWaitEvent(device->stream, other->marks[mark], 0), "mark");
    device->joined = true;
}

bool device_reaches_others() {
    return false;
}

void *device_stream(struct device *device) {
    graph_settle(&device->graphs, device);
    device->joined = true; /* conservative assumption */
    return device->stream;
}

void device_watch(struct device *device, const struct comm *comm) {
    device->watched = comm;
}

/* ---- Launching ------------------------------------------------------------------------------- */

void device_overlap(struct device *device, bool on) {
    device->serial = !on;
}

/* In a stream, a launch may overlap only work of this stream (no document says that a launch which
 * overlaps also waits for other streams); in a graph, an edge can be programmatic only between two
 * kernels. */
static bool may_overlap(struct device *device) {
    bool joined = device->joined;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t *before = NULL;
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    size_t count = 0;
    device->joined = false;
    if (device->serial || joined) return false;
    if (!device->capturing) return true;
    return cudaStreamGetCaptureInfo(device->stream, &status, NULL, NULL, &before, NULL, &count) ==
               cudaSuccess &&
           status == cudaStreamCaptureStatusActive && count == 1 &&
           cudaGraphNodeGetType(before[0], &type) == cudaSuccess && type == cudaGraphNodeTypeKernel;
}

/* Overlapping kernels want one division of a multiprocessor's memory into shared memory and cache,
 * attention's, which has most shared memory: the division only changes while nothing runs there. A
 * hint, so failures are ignored. */
static void prefer_shared(struct device *device, const void *kernel) {
    for (int i = 0; i < device->divided_count; i++)
        if (device->divided[i] == kernel) return;
    if (device->divided_count == DIVIDED_MAX) return;
    device->divided[device->divided_count++] = kernel;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared) != cudaSuccess)
        (void)cudaGetLastError();
}

void device_run_launch(struct device *device, const struct launch *l, void **args) {
    if (device->lost) return;
    if (l->overlaps) prefer_shared(device, l->kernel);
    if (l->shared > (size_t)48 << 10 &&
        !ok(device,
            cudaFuncSetAttribute(l->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(l->shared)),
            "shared memory of a kernel"))
        return;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(l->grid_x, l->grid_y);
    config.blockDim = dim3((unsigned)l->threads);
    config.dynamicSmemBytes = l->shared;
    config.stream = device->stream;
    config.attrs = &attribute;
    config.numAttrs = may_overlap(device) && l->overlaps ? 1 : 0;
    ok(device, cudaLaunchKernelExC(&config, l->kernel, args), l->name);
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

struct graphs *device_graphs(struct device *device) {
    return &device->graphs;
}

bool device_may_repeat(const struct device *device) {
    return device->repeat.used == 0 && !device->lost;
}

/* Capturing queues nothing: after an error the stream is unchanged, and the list is played. */
void *device_capture(struct device *device, const struct graph_list *list) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t captured = NULL;
    if (device->lost ||
        cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess)
        return NULL;
    device->capturing = true;
    device->capture_failed = false;
    graph_play(device, list);
    device->capturing = false;
    cudaError_t error = cudaStreamEndCapture(device->stream, &graph);
    if (error == cudaSuccess && device->capture_failed) error = cudaErrorStreamCaptureInvalidated;
    if (error == cudaSuccess) error = cudaGraphInstantiate(&captured, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (error == cudaSuccess) return captured;
    log_warn("cuda: a step cannot be captured: %s", cudaGetErrorString(error));
    (void)cudaGetLastError();
    return NULL;
}

void device_replay(struct device *device, void *captured) {
    if (device->lost) return;
    ok(device, cudaGraphLaunch(static_cast<cudaGraphExec_t>(captured), device->stream), "graph");
}

void device_forget_graph(struct device *, void *captured) {
    (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(captured));
}

/* ---- Products -------------------------------------------------------------------------------- */

/* Row-major y = x w^T is, column by column, y' = w'^T x' of the same bytes: m = n, n = rows. */
struct matmul_plan {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t w, x, y;
};

static void close_plan(struct matmul_plan *p) {
    if (p->operation) lt.cublasLtMatmulDescDestroy(p->operation);
    if (p->w) lt.cublasLtMatrixLayoutDestroy(p->w);
    if (p->x) lt.cublasLtMatrixLayoutDestroy(p->x);
    if (p->y) lt.cublasLtMatrixLayoutDestroy(p->y);
}

static bool set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                const void *value, size_t size) {
    return lt.cublasLtMatmulDescSetAttribute(operation, attribute, value, size) ==
           CUBLAS_STATUS_SUCCESS;
}

/* A scale per row of x and of w; on compute capability 9.0 only. */
static bool set_scales(cublasLtMatmulDesc_t operation, const struct matmul_args *a) {
    cublasLtMatmulMatrixScale_t vector = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    return set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &vector, sizeof vector) &&
           set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &vector, sizeof vector) &&
           set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a->w_scale, sizeof a->w_scale) &&
           set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a->x_scale, sizeof a->x_scale);
}

static bool open_plan(struct matmul_plan *p, const struct matmul_args *a) {
    static const cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF, CUDA_R_8F_E4M3};
    cudaDataType_t type = types[a->dtype];
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    memset(p, 0, sizeof *p);
    int64_t n = a->n, k = a->k;
    uint64_t rows_u = static_cast<uint64_t>(a->rows), n_u = static_cast<uint64_t>(n),
             k_u = static_cast<uint64_t>(k);
    bool good =
        lt.cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
            CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->w, type, k_u, n_u, k) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->x, type, k_u, rows_u, k) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->y, CUDA_R_32F, n_u, rows_u, n) == CUBLAS_STATUS_SUCCESS &&
        set(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (good && a->dtype == KERN_E4M3) good = set_scales(p->operation, a);
    if (good && a->bias)
        good = set(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue) &&
               set(p->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a->bias, sizeof a->bias);
    return good;
}

/* Without a split of k, sums of one output have one order for any number of rows, as far as the
 * kernel is the same: see products.h. */
static bool one_sum(const cublasLtMatmulAlgo_t *algorithm) {
    int32_t split = 1;
    uint32_t reduction = 0;
    size_t written;
    lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split,
                                            sizeof split, &written);
    lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                            &reduction, sizeof reduction, &written);
    return split <= 1 && reduction == CUBLASLT_REDUCTION_SCHEME_NONE;
}

static bool prefer(cublasLtMatmulPreference_t preference,
                   cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size) {
    return lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size) ==
           CUBLAS_STATUS_SUCCESS;
}

/* Finds algorithms with the reduction schemes of `mask` and none: for few rows, many faster ones
 * split k and would fill the list. Returns their number. */
static int find_algorithms(struct device *device, const struct matmul_plan *plan, uint32_t mask,
                           cublasLtMatmulHeuristicResult_t found[PRODUCT_FOUND]) {
    static const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasLtMatmulPreference_t preference = NULL;
    const uint64_t workspace = WORKSPACE_BYTES;
    const uint32_t align = DEVICE_MATMUL_ALIGN;
    int count = 0;
    if (lt.cublasLtMatmulPreferenceCreate(&preference) != CUBLAS_STATUS_SUCCESS) return 0;
    bool good = prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                       sizeof workspace) &&
                prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &mask, sizeof mask);
    for (cublasLtMatmulPreferenceAttributes_t attribute : aligned)
        good = good && prefer(preference, attribute, &align, sizeof align);
    if (!good || lt.cublasLtMatmulAlgoGetHeuristic(device->blas, plan->operation, plan->w, plan->x,
                                                   plan->y, plan->y, preference, PRODUCT_FOUND,
                                                   found, &count) != CUBLAS_STATUS_SUCCESS)
        count = 0;
    lt.cublasLtMatmulPreferenceDestroy(preference);
    return count;
}

static_assert(sizeof(struct product_algorithm) == sizeof(cublasLtMatmulAlgo_t),
              "products.h keeps the library's algorithms as they are");

/* Adds the algorithms with one order of sums: first those without a workspace, where parts of sums
 * could wait for each other. */
static int add_algorithms(const cublasLtMatmulHeuristicResult_t *list, int listed,
                          struct product_algorithm found[PRODUCT_FOUND]) {
    int count = 0;
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < listed; i++)
            if (list[i].state == CUBLAS_STATUS_SUCCESS && (list[i].workspaceSize > 0) == turn &&
                one_sum(&list[i].algo))
                memcpy(&found[count++], &list[i].algo, sizeof *found);
    return count;
}

static int propose(void *arg, const struct product_shape *shape, int64_t rows,
                   struct product_algorithm found[PRODUCT_FOUND]) {
    static const uint32_t masks[] = {CUBLASLT_REDUCTION_SCHEME_NONE,
                                     CUBLASLT_REDUCTION_SCHEME_MASK};
    struct device *device = static_cast<struct device *>(arg);
    const float *any = static_cast<const float *>(device->workspace); /* for the query, not read */
    const struct matmul_args wanted = {NULL,     NULL,         NULL, shape->bias ? any : NULL,
                                       any,      any,          rows, shape->n,
                                       shape->k, shape->dtype, 0};
    cublasLtMatmulHeuristicResult_t list[PRODUCT_FOUND];
    struct matmul_plan plan;
    int count = 0;
    bool good = open_plan(&plan, &wanted);
    for (int i = 0; good && count == 0 && i < 2; i++)
        count = add_algorithms(list, find_algorithms(device, &plan, masks[i], list), found);
    close_plan(&plan);
    return count;
}

static bool multiply_with(struct device *device, const struct matmul_args *a,
                          const struct product_algorithm *algorithm) {
    const float one = 1, beta = a->add ? 1 : 0;
    cublasLtMatmulAlgo_t algo;
    struct matmul_plan plan = {};
    memcpy(&algo, algorithm, sizeof algo);
    bool good = open_plan(&plan, a) &&
                lt.cublasLtMatmul(device->blas, plan.operation, &one, a->w, plan.w, a->x, plan.x,
                                  &beta, a->y, plan.y, a->y, plan.y, &algo, device->workspace,
                                  WORKSPACE_BYTES, device->stream) == CUBLAS_STATUS_SUCCESS;
    close_plan(&plan);
    return good;
}

/* Numbers between 2^-7 and 1 with random signs, the same for each index. */
static __global__ void k_random(void *to, int64_t count, enum kern_dtype dtype) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint32_t h = (uint32_t)i * 0x9E3779B1u + 0x85EBCA6Bu;
    h = (h ^ h >> 15) * 0x2C1B3C6Du;
    h ^= h >> 13;
    if (dtype == KERN_F32)
        static_cast<uint32_t *>(to)[i] = (h & 0x80000000u) | (0x3C000000u + (h & 0x03FFFFFFu));
    else if (dtype == KERN_BF16)
        static_cast<uint16_t *>(to)[i] = (uint16_t)((h & 0x8000u) | (0x3C00u + (h & 0x03FFu)));
    else if (dtype == KERN_F16)
        static_cast<uint16_t *>(to)[i] = (uint16_t)((h & 0x8000u) | (0x2000u + (h & 0x1BFFu)));
    else
        static_cast<uint8_t *>(to)[i] = (uint8_t)((h & 0x80u) | (0x08u + (h & 0x2Fu)));
}

static __global__ void k_differ(const uint32_t *a, const uint32_t *b, int64_t count,
                                uint32_t *differ) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && a[i] != b[i]) *differ = 1;
}

/* Fills the rows and their scales, multiplies twice and compares, in `memory`. */
static bool trial_equal(struct device *device, char *memory, struct matmul_args a,
                        const struct product_algorithm *first,
                        const struct product_algorithm *second) {
    const int threads = 256;
    int64_t outputs = a.rows * a.n, inputs = a.rows * a.k;
    size_t bytes = (size_t)outputs * sizeof(float);
    uint32_t differ = 1, *flag = reinterpret_cast<uint32_t *>(memory + 2 * bytes);
    float *scale = reinterpret_cast<float *>(flag) + DEVICE_MATMUL_ALIGN;
    void *x =
        scale + (a.rows + DEVICE_MATMUL_ALIGN - 1) / DEVICE_MATMUL_ALIGN * DEVICE_MATMUL_ALIGN;
    a.x = x;
    if (a.dtype == KERN_E4M3) a.x_scale = scale;
    k_random<<<blocks_for(inputs, threads), threads, 0, device->stream>>>(
        x, inputs, static_cast<enum kern_dtype>(a.dtype));
    k_random<<<blocks_for(a.rows, threads), threads, 0, device->stream>>>(scale, a.rows, KERN_F32);
    a.y = reinterpret_cast<float *>(memory);
    bool good = multiply_with(device, &a, first);
    a.y = reinterpret_cast<float *>(memory + bytes);
    good = good && multiply_with(device, &a, second) &&
           ok(device, cudaMemsetAsync(flag, 0, sizeof *flag, device->stream), "memset");
    k_differ<<<blocks_for(outputs, threads), threads, 0, device->stream>>>(
        reinterpret_cast<const uint32_t *>(memory),
        reinterpret_cast<const uint32_t *>(memory + bytes), outputs, flag);
    return good &&
           ok(device,
              cudaMemcpyAsync(&differ, flag, sizeof differ, cudaMemcpyDefault, device->stream),
              "copy") &&
           ok(device, cudaStreamSynchronize(device->stream), "a product") && !differ;
}

/* Without memory for a comparison, nothing is known. */
static bool same_bits(void *arg, const struct product_shape *shape, int64_t rows,
                      const struct product_algorithm *first,
                      const struct product_algorithm *second) {
    struct device *device = static_cast<struct device *>(arg);
    struct matmul_args a = *device->trial;
    a.rows = rows;
    size_t bytes = 2 * (size_t)(rows * shape->n) * sizeof(float) +
                   (size_t)(rows + 3 * DEVICE_MATMUL_ALIGN) * sizeof(float) +
                   (size_t)(rows * shape->k) * kern_dtype_bytes(shape->dtype);
    char *memory = bytes <= TRIAL_BYTES ? static_cast<char *>(device_alloc(device, bytes)) : NULL;
    bool same = memory && !device->lost && trial_equal(device, memory, a, first, second);
    if (memory) ok(device, cudaFree(memory), "cudaFree");
    return same;
}

static struct product_shape shape_of(const struct matmul_args *a) {
    return {a->n, a->k, static_cast<enum kern_dtype>(a->dtype), a->bias != NULL};
}

void device_matmul_compare(struct device *device, const struct matmul_args *weight) {
    const struct product_library library = {device, propose, same_bits};
    const struct product_shape shape = shape_of(weight);
    device->trial = weight;
    if (!device->lost) products_compare(&device->products, &library, &shape);
    device->trial = NULL;
}

static int attribute(const cublasLtMatmulAlgo_t *algorithm,
                     cublasLtMatmulAlgoConfigAttributes_t which) {
    int32_t value = 0;
    size_t written;
    lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, which, &value, sizeof value, &written);
    return value;
}

static struct cuda_product describe(struct device *device, const struct product *product,
                                    int bucket) {
    const struct product_shape *shape = &product->shape;
    const float *any = static_cast<const float *>(device->workspace); /* not read */
    int64_t rows = product_bucket_rows(bucket);
    const struct matmul_args args = {NULL,     NULL,         NULL, shape->bias ? any : NULL,
                                     any,      any,          rows, shape->n,
                                     shape->k, shape->dtype, 0};
    const struct product_choice *choice = &product->choices[bucket];
    const struct product_choice *own = &product->choices[product_bucket(PRODUCT_ROWS)];
    cublasLtMatmulHeuristicResult_t result = {};
    cublasLtMatmulAlgo_t algo;
    struct matmul_plan plan;
    memcpy(&algo, &choice->algorithm, sizeof algo);
    if (open_plan(&plan, &args))
        (void)lt.cublasLtMatmulAlgoCheck(device->blas, plan.operation, plan.w, plan.x, plan.y,
                                         plan.y, &algo, &result);
    close_plan(&plan);
    return {shape->n,
            shape->k,
            rows,
            attribute(&algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
            attribute(&algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
            attribute(&algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
            result.wavesCount,
            memcmp(&choice->algorithm, &own->algorithm, sizeof algo) == 0};
}

int device_products(struct device *device, struct cuda_product *list, int most) {
    const struct products *products = &device->products;
    int count = 0;
    for (int i = 0; i < products->count; i++)
        for (int b = 0; b < PRODUCT_BUCKETS && count < most; b++)
            if (!products->list[i].choices[b].refuses)
                list[count++] = describe(device, &products->list[i], b);
    return count;
}

/* If the shape's algorithm rejects so many rows, which no document excludes, another one is used
 * for these: then a row's result may depend on the other rows, which is logged once. */
static void run_matmul(struct device *device, const void *data) {
    const struct matmul_args *a = static_cast<const struct matmul_args *>(data);
    const struct product_library library = {device, propose, same_bits};
    const struct product_shape shape = shape_of(a);
    const struct product_algorithm *algorithm;
    if (device->lost) return;
    while ((algorithm = products_find(&device->products, &library, &shape, a->rows))) {
        if (multiply_with(device, a, algorithm)) return;
        if (products_refused(&device->products, &library, &shape, a->rows))
            log_warn("cuda: products of %lld x %lld have another algorithm for %lld rows: the last "
                     "bits of their sums depend on how many rows are computed together",
                     (long long)a->n, (long long)a->k, (long long)a->rows);
    }
    log_error("cuda: cuBLASLt refuses a product of %lld x %lld x %lld", (long long)a->rows,
              (long long)a->n, (long long)a->k);
    device_failed(device, ERR_DEVICE);
}

void device_matmul(struct device *device, const struct matmul_args *args) {
    CHECK(args->dtype != KERN_E4M3 || (args->x_scale && args->w_scale && !args->bias));
    graph_add(&device->graphs, device, run_matmul, args, sizeof *args);
}

int device_check_e4m3(struct device *device, int64_t n, int64_t k, struct fault *fault) {
    const struct product_library library = {device, propose, same_bits};
    const struct product_shape shape = {n, k, KERN_E4M3, false};
    if (device->capability != 90)
        return fault_set(fault, ERR_UNSUPPORTED, "quantization",
                         "fp8 products with a scale per row need compute capability 9.0 (Hopper); "
                         "the device has %d.%d",
                         device->capability / 10, device->capability % 10);
    if (products_find(&device->products, &library, &shape, PRODUCT_ROWS)) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "quantization",
                     "cuBLASLt has no fp8 product of %lld inputs and %lld outputs", (long long)k,
                     (long long)n);
}
