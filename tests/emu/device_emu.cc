/* kernels/cuda/device.h over the emulator: everything happens at once, in order. A launch that
 * breaks a rule ends the program with the emulator's report.
 *
 * Environment, for keepd-emu: KEEPD_EMU_LOST, a path: once a file is there the device is lost, like
 * a GPU after an error: nothing happens on it any more, and every wait says ERR_DEVICE.
 * KEEPD_EMU_MEMORY: see device_memory. KEEPD_EMU_DEVICES: how many there are, 1.
 * KEEPD_EMU_CAPABILITY: compute capability, 90 = 9.0. KEEPD_EMU_BATCHES: "none": products of
 * several parts at once are refused; "only": parts are not multiplied one after the other. As with
 * CUDA a thread has a current device; who works on another one has forgotten device_bind. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/device_time.h"
#include "kernels/number.h"

/* Memory of a list in a region that repeats: it stays where it is. */
struct place {
    void *mem;
    size_t bytes;
};

/* A copy that the next wait delivers. */
struct fetch {
    void *to;
    std::vector<char> bytes;
};

struct device {
    int index, capability;
    bool batches, turns; /* KEEPD_EMU_BATCHES */
    std::vector<struct fetch> fetches;
    uint64_t waits, waited; /* times; graphs.queued at the last one */
    size_t placed_bytes;    /* bytes of this region, as they lie on a GPU */
    std::vector<void *> staged;
    std::vector<struct place> places;
    size_t placed; /* places of this region */
    struct graphs graphs;
    const struct comm *watched;
    int failed;
    bool lost; /* for good */
};

static thread_local int current = 0;

/* Each may have a thread of its own. */
static std::atomic<int> devices_open;

static void expect_bound(const struct device *device) {
    if (current == device->index) return;
    fprintf(stderr, "emu: device %d is used by a thread whose device is %d\n", device->index,
            current);
    abort();
}

void device_lose(struct device *device) {
    if (device->watched && !device->lost) device->watched->ops->abort(device->watched);
    device->lost = true;
    device_failed(device, ERR_DEVICE);
}

/* Looked at where a GPU would be found lost: before work, and when waiting for it. */
static bool lost(struct device *device) {
    expect_bound(device);
    static const char *const path = getenv("KEEPD_EMU_LOST");
    if (path && !device->lost && access(path, F_OK) == 0) device_lose(device);
    return device->lost;
}

int device_count(struct fault *fault) {
    const char *named = getenv("KEEPD_EMU_DEVICES");
    int count = named ? atoi(named) : 1;
    if (count == 0) fault_set(fault, ERR_NOTFOUND, "device", "no CUDA device: none is visible");
    return count;
}

int device_open(int index, struct device **out, struct fault *fault) {
    int count = device_count(fault);
    if (index < 0 || index >= count)
        return fault_set(fault, ERR_NOTFOUND, "device", "device %d of %d", index, count);
    const char *named = getenv("KEEPD_EMU_CAPABILITY");
    int capability = named ? atoi(named) : 90, rc = device_supported(capability, fault);
    if (rc) return rc;
    *out = new device{};
    (*out)->index = index;
    (*out)->capability = capability;
    const char *batches = getenv("KEEPD_EMU_BATCHES");
    (*out)->batches = !batches || strcmp(batches, "none");
    (*out)->turns = !batches || strcmp(batches, "only");
    emu_bulk(capability >= 90);
    if (++devices_open > 1) emu_alone(false);
    device_bind(*out);
    return 0;
}

static void drop_staged(struct device *device) {
    for (void *mem : device->staged) emu_free(mem);
    device->staged.clear();
}

void device_bind(struct device *device) {
    current = device->index;
}

void device_close(struct device *device) {
    if (!device) return;
    graph_close(&device->graphs, device);
    drop_staged(device);
    for (const struct place &place : device->places) emu_free(place.mem);
    if (--devices_open == 0) emu_alone(true);
    delete device;
}

const char *device_name(const struct device *) {
    return "cuda-emulated";
}

int device_processors(const struct device *) {
    return 3; /* so that workers have several items and several workers have none */
}

int device_capability(const struct device *device) {
    return device->capability;
}

/* CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". */
size_t device_shared(const struct device *device) {
    switch (device->capability) {
    case 80:
    case 87:
        return (size_t)163 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
        return (size_t)99 << 10;
    default:
        return (size_t)227 << 10;
    }
}

/* The n-th allocation from now on fails, once, where mem_try_* would. */
void *device_alloc(struct device *device, size_t bytes) {
    expect_bound(device);
    void *probe = mem_try_alloc(1, 1);
    if (!probe) return nullptr;
    mem_free(probe);
    return emu_alloc(bytes);
}

void device_free(struct device *device, void *mem) {
    expect_bound(device);
    graph_settle(&device->graphs, device);
    device->waits += mem != nullptr; /* as cudaFree does */
    emu_free(mem);
}

/* Told, not enforced; KEEPD_EMU_MEMORY: another number of MiB. */
struct device_memory device_memory(const struct device *) {
    const char *mib = getenv("KEEPD_EMU_MEMORY");
    size_t total = (size_t)(mib ? atoi(mib) : 96) << 20, used = emu_allocated();
    return {total > used ? total - used : 0, total};
}

struct fill_args {
    void *mem;
    size_t bytes;
    int64_t value;
};

static void run_fill(struct device *device, const void *data) {
    const struct fill_args *a = static_cast<const struct fill_args *>(data);
    if (device_runs(device)) memset(a->mem, (int)a->value, a->bytes);
}

static void fill(struct device *device, void *mem, size_t bytes, int value) {
    const struct fill_args args = {mem, bytes, value};
    graph_add(&device->graphs, device, run_fill, &args, sizeof args);
}

void device_zero(struct device *device, void *mem, size_t bytes) {
    fill(device, mem, bytes, 0);
}

void device_forget(struct device *device, void *mem, size_t bytes) {
    fill(device, mem, bytes, 0xff);
    device->graphs.queued--; /* a GPU has no such operation */
}

struct copy_args {
    void *to;
    const void *from;
    size_t bytes;
};

static void run_copy(struct device *device, const void *data) {
    const struct copy_args *a = static_cast<const struct copy_args *>(data);
    if (device_runs(device)) memcpy(a->to, a->from, a->bytes);
}

void device_copy(struct device *device, void *to, const void *from, size_t bytes) {
    const struct copy_args args = {to, from, bytes};
    graph_add(&device->graphs, device, run_copy, &args, sizeof args);
}

void device_upload(struct device *device, void *to, const void *from, size_t bytes) {
    expect_bound(device);
    graph_settle(&device->graphs, device);
    device->waits++; /* for the half that is under way */
    memcpy(to, from, bytes);
}

/* So many lists between two syncs mean that somebody waits without one. */
#define STAGED_MAX 400

/* The place of the region's next list, of the size it had the last time. */
static void *next_place(struct device *device, size_t bytes) {
    size_t at = device->placed++;
    if (at == device->places.size()) device->places.push_back({nullptr, 0});
    struct place *place = &device->places[at];
    if (place->bytes == bytes) return place->mem;
    device_free(device, place->mem);
    *place = {device_alloc(device, bytes), bytes};
    if (!place->mem) place->bytes = 0;
    return place->mem;
}

/* In a region: what is copied later reads the host's memory as a graph does, when it is launched.
 */
const void *device_stage(struct device *device, const void *from, size_t bytes) {
    size_t room = (bytes + 255) / 256 * 256;
    device->graphs.queued++; /* a copy on a GPU */
    if (device->graphs.open && device->placed_bytes + room <= DEVICE_REPEAT_BYTES) {
        device->placed_bytes += room;
        void *to = next_place(device, bytes);
        if (!to) device_failed(device, ERR_NOMEM);
        if (to) memcpy(to, from, bytes);
        return to;
    }
    if (device->staged.size() == STAGED_MAX) {
        fprintf(stderr, "emu: %d staged lists since the last sync\n", STAGED_MAX);
        abort();
    }
    void *mem = device_alloc(device, bytes);
    if (!mem) {
        device_failed(device, ERR_NOMEM);
        return nullptr;
    }
    memcpy(mem, from, bytes);
    device->staged.push_back(mem);
    return mem;
}

static void wait(struct device *device) {
    device->waits++;
    device->waited = device->graphs.queued;
    bool gone = lost(device);
    for (const struct fetch &fetch : device->fetches)
        if (!gone) memcpy(fetch.to, fetch.bytes.data(), fetch.bytes.size());
    device->fetches.clear();
}

void device_fetch(struct device *device, void *to, const void *from, size_t bytes) {
    const char *data = static_cast<const char *>(from);
    graph_settle(&device->graphs, device);
    if (!lost(device)) device->fetches.push_back({to, std::vector<char>(data, data + bytes)});
}

int device_download(struct device *device, void *to, const void *from, size_t bytes) {
    device_fetch(device, to, from, bytes);
    wait(device);
    return device->failed;
}

uint64_t device_waits(const struct device *device) {
    return device->waits;
}

int device_sync(struct device *device) {
    graph_end(&device->graphs, device);
    if (device->waited != device->graphs.queued) wait(device);
    bool gone = device->lost;
    device->placed = device->placed_bytes = 0;
    int failed = device->failed;
    device->failed = gone ? ERR_DEVICE : 0;
    drop_staged(device);
    return failed;
}

void device_failed(struct device *device, int rc) {
    if (!device->failed) device->failed = rc;
}

bool device_runs(struct device *device) {
    return !lost(device);
}

/* Everything has happened when it was queued. */
void device_mark(struct device *device, int) {
    graph_settle(&device->graphs, device);
    expect_bound(device);
}

void device_await(struct device *device, const struct device *, int) {
    expect_bound(device);
}

bool device_reaches_others() {
    return true;
}

void *device_stream(struct device *) {
    return nullptr;
}

void device_watch(struct device *device, const struct comm *comm) {
    device->watched = comm;
}

void device_overlap(struct device *, bool) {} /* kernels are held to its rules all the same */

void device_ran(const char *error) {
    if (!error) return;
    fprintf(stderr, "emu: %s\n", error);
    abort();
}

static float element(const void *at, int64_t i, enum kern_dtype dtype) {
    return number_element(static_cast<const char *>(at) + i * (int64_t)kern_dtype_bytes(dtype),
                          dtype);
}

/* One part of a product. */
static void multiply_part(const struct matmul_args &a, int64_t part) {
    enum kern_dtype dtype = static_cast<enum kern_dtype>(a.dtype);
    std::vector<float> row(static_cast<size_t>(a.k));
    const int64_t stride = a.stride ? a.stride : a.k, first = part * a.k;
    for (int64_t o = 0; o < a.n; o++) {
        for (int64_t i = 0; i < a.k; i++)
            row[static_cast<size_t>(i)] = element(a.w, o * stride + first + i, dtype);
        for (int64_t r = 0; r < a.rows; r++) {
            float sum = 0;
            for (int64_t i = 0; i < a.k; i++)
                sum += element(a.x, r * stride + first + i, dtype) * row[static_cast<size_t>(i)];
            if (dtype == KERN_E4M3) sum *= a.x_scale[r] * a.w_scale[o];
            if (a.bias) sum += a.bias[o];
            float *to = &a.y[(part * a.rows + r) * a.n + o];
            *to = a.add ? *to + sum : sum;
        }
    }
}

/* Multiplies as cuBLASLt does on a GPU. */
static void run_matmul(struct device *device, const void *data) {
    const struct matmul_args &a = *static_cast<const struct matmul_args *>(data);
    if (!device_runs(device)) return;
    for (int64_t part = 0; part == 0 || part < a.parts; part++) multiply_part(a, part);
}

/* Enforces the requirements of cuBLASLt. */
void device_matmul(struct device *device, const struct matmul_args *args) {
    const struct matmul_args *a = args;
    const void *const arrays[] = {a->x, a->w, a->y, a->bias};
    CHECK(a->dtype != KERN_E4M3 || (a->x_scale && a->w_scale && !a->bias));
    CHECK(a->dtype != KERN_E4M3 || (a->n | a->k) % DEVICE_E4M3_STEP == 0);
    CHECK(device->batches || a->parts <= 1);
    CHECK(a->parts <= 1 || (!a->bias && !a->add && a->parts * a->k == a->stride));
    for (const void *array : arrays)
        CHECK(reinterpret_cast<uintptr_t>(array) % DEVICE_MATMUL_ALIGN == 0);
    graph_add(&device->graphs, device, run_matmul, args, sizeof *args);
}

void device_matmul_compare(struct device *, const struct matmul_args *) {}

bool device_matmul_has(struct device *device, const struct matmul_args *args) {
    return device->batches || args->parts <= 1;
}

bool device_matmul_in_turn(struct device *device, const struct matmul_args *) {
    return device->turns;
}

int device_products(struct device *, struct cuda_product *, int) {
    return 0;
}

void device_time_all(struct device *) {}

int device_times(struct device *, struct cuda_time *, int) {
    return 0;
}

int device_check_e4m3(struct device *, int64_t, int64_t, struct fault *) {
    return 0;
}

/* ---- Graphs ---- */

struct graphs *device_graphs(struct device *device) {
    return &device->graphs;
}

bool device_may_repeat(const struct device *device) {
    return device->placed == 0 && !device->lost;
}

/* A copy of its own, as a captured graph has: nothing that happens to the list later reaches it. */
void *device_capture(struct device *, const struct graph_list *list) {
    char *data = static_cast<char *>(mem_try_alloc(list->bytes, 1));
    struct graph_list *captured =
        static_cast<struct graph_list *>(mem_try_alloc(1, sizeof *captured));
    if (!data || !captured) {
        mem_free(data);
        mem_free(captured);
        return nullptr;
    }
    memcpy(data, list->data, list->bytes);
    *captured = {data, list->bytes, list->bytes};
    return captured;
}

void device_replay(struct device *device, void *captured) {
    graph_play(device, static_cast<const struct graph_list *>(captured));
}

void device_forget_graph(struct device *, void *captured) {
    struct graph_list *list = static_cast<struct graph_list *>(captured);
    mem_free(list->data);
    mem_free(list);
}
