/* kernels/cuda/device.h over the CUDA runtime, which is linked into the program; device_blas.cu has
 * its products. Never links libcuda: on a machine without a driver or without cuBLASLt the program
 * starts, device_count or device_open reports it, and the CPU backend is used. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/device_int.h"

extern "C" {
#include "base/log.h"
}

#if CUDART_VERSION < 13000
#error "CUDA 13 is needed: cudaStreamGetCaptureInfo has another signature before"
#endif

#define UPLOAD_BYTES ((size_t)16 << 20)  /* pinned buffer of weight uploads */
#define STAGE_BYTES  ((size_t)4 << 20)   /* least size of a chunk of host lists */
#define FETCH_BYTES  ((size_t)256 << 10) /* pinned; enough for 1,500 sampled tokens per wait */

/* ---- Errors ---- */

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

bool device_ok(struct device *device, cudaError_t error, const char *what) {
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

/* ---- Opening ---- */

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
    return device_supported(device->capability, fault);
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
    int rc = blas_load(fault);
    if (rc) return rc;
    struct device *device = static_cast<struct device *>(mem_try_alloc(1, sizeof *device));
    if (!device) return fault_set(fault, ERR_NOMEM, "device", "no memory");
    rc = check_device(index, device, fault);
    if (rc) {
        mem_free(device);
        return rc;
    }
    bool good =
        device_ok(device, cudaSetDevice(index), "cudaSetDevice") &&
        device_ok(device, cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking),
                  "cudaStreamCreate") &&
        device_ok(device, cudaEventCreate(&device->upload_done[0]), "cudaEventCreate") &&
        device_ok(device, cudaEventCreate(&device->upload_done[1]), "cudaEventCreate") &&
        device_ok(device, cudaMallocHost((void **)&device->upload, UPLOAD_BYTES), "staging") &&
        device_ok(device, cudaMallocHost((void **)&device->fetched, FETCH_BYTES), "staging") &&
        open_chunk(&device->repeat, DEVICE_REPEAT_BYTES);
    for (cudaEvent_t &mark : device->marks)
        good = good && device_ok(device, cudaEventCreateWithFlags(&mark, cudaEventDisableTiming),
                                 "cudaEventCreate");
    good = good && blas_open(device);
    if (!good) {
        device_close(device);
        return fault_set(fault, ERR_DEVICE, "device", "cannot open CUDA device %d", index);
    }
    *out = device;
    return 0;
}

void device_bind(struct device *device) {
    device_ok(device, cudaSetDevice(device->index), "cudaSetDevice");
}

void device_close(struct device *device) {
    if (!device) return;
    graph_close(&device->graphs, device);
    device_time_close(device);
    blas_close(device);
    if (device->stream) cudaStreamDestroy(device->stream);
    for (int i = 0; i < 2; i++)
        if (device->upload_done[i]) cudaEventDestroy(device->upload_done[i]);
    for (cudaEvent_t mark : device->marks)
        if (mark) cudaEventDestroy(mark);
    for (int i = 0; i < device->chunk_count; i++) close_chunk(&device->chunks[i]);
    close_chunk(&device->repeat);
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

int device_capability(const struct device *device) {
    return device->capability;
}

size_t device_shared(const struct device *device) {
    return (size_t)device->shared;
}

/* ---- Memory ---- */

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
        device_ok(device,
                  event ? cudaEventSynchronize(event) : cudaStreamSynchronize(device->stream),
                  "waiting for the device");
        return;
    }
    while ((error = event ? cudaEventQuery(event) : cudaStreamQuery(device->stream)) ==
           cudaErrorNotReady)
        if (device->watched->ops->check(device->watched)) {
            device_lose(device);
            return;
        }
    device_ok(device, error, "waiting for the device");
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
    device_ok(device, cudaFree(mem), "cudaFree");
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
        device_ok(device,
                  cudaMemcpyAsync(a->to, a->from, a->bytes, static_cast<cudaMemcpyKind>(a->kind),
                                  device->stream),
                  "copy");
    else
        device_ok(device, cudaMemsetAsync(a->to, 0, a->bytes, device->stream), "memset");
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

/* ---- Between host and device ---- */

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
        device_ok(device,
                  cudaMemcpyAsync(target, pinned, slice, cudaMemcpyHostToDevice, device->stream),
                  "upload");
        device_ok(device, cudaEventRecord(device->upload_done[turn], device->stream), "upload");
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
        device_ok(device,
                  cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, device->stream),
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

/* ---- Several devices ---- */

void device_mark(struct device *device, int mark) {
    graph_settle(&device->graphs, device);
    if (!device->lost)
        device_ok(device, cudaEventRecord(device->marks[mark], device->stream), "mark");
}

void device_await(struct device *device, const struct device *other, int mark) {
    if (device == other || device->lost) return;
    device_ok(device, cudaStreamWaitEvent(device->stream, other->marks[mark], 0), "mark");
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

/* ---- Launching ---- */

/* Launches overlap from compute capability 9.0 on. */
void device_overlap(struct device *device, bool on) {
    device->serial = !on || device->capability < 90;
}

/* In a stream, a launch may overlap only work of this stream (no document says that a launch which
 * overlaps also waits for other streams); in a graph, an edge can be programmatic only between two
 * kernels. */
static bool may_overlap(struct device *device) {
    bool joined = device->joined;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t *before = NULL;
    const cudaGraphEdgeData *edges = NULL; /* without a place for them, the query may fail */
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    size_t count = 0;
    device->joined = false;
    if (device->serial || joined) return false;
    if (!device->capturing) return true;
    return cudaStreamGetCaptureInfo(device->stream, &status, NULL, NULL, &before, &edges, &count) ==
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
        !device_ok(device,
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
    struct timed *timed = device_time_begin(device, l->name);
    device_ok(device, cudaLaunchKernelExC(&config, l->kernel, args), l->name);
    device_time_end(device, timed);
}

/* ---- Graphs ---- */

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
    device_ok(device, cudaGraphLaunch(static_cast<cudaGraphExec_t>(captured), device->stream),
              "graph");
}

void device_forget_graph(struct device *, void *captured) {
    (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(captured));
}
