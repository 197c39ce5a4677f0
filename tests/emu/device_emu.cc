/* kernels/cuda/device.h over the emulator: everything happens at once, in order. A launch that
 * breaks a rule ends the program with the emulator's report.
 *
 * Environment, for keepd-emu: KEEPD_EMU_LOST, a path: once a file is there the device is lost, like
 * a GPU after an error: nothing happens on it any more, and every wait says ERR_DEVICE. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <vector>

#include "kernels/cuda/device.h"

struct device {
    std::vector<void *> staged;
    int failed;
    bool lost; /* for good */
};

/* Looked at where a GPU would be found lost: before work, and when waiting for it. */
static bool lost(struct device *device) {
    static const char *const path = getenv("KEEPD_EMU_LOST");
    if (path && !device->lost && access(path, F_OK) == 0) {
        device->lost = true;
        device_failed(device, ERR_DEVICE);
    }
    return device->lost;
}

int device_count(struct fault *) {
    return 1;
}

int device_open(int index, struct device **out, struct fault *fault) {
    if (index != 0) return fault_set(fault, ERR_NOTFOUND, "device", "there is one emulated device");
    *out = new device{};
    return 0;
}

static void drop_staged(struct device *device) {
    for (void *mem : device->staged) emu_free(mem);
    device->staged.clear();
}

void device_close(struct device *device) {
    if (!device) return;
    drop_staged(device);
    delete device;
}

const char *device_name(const struct device *) {
    return "cuda-emulated";
}

int device_processors(const struct device *) {
    return 3; /* so that workers have several items and several workers have none */
}

/* The n-th allocation from now on fails, once, where mem_try_* would. */
void *device_alloc(struct device *, size_t bytes) {
    void *probe = mem_try_alloc(1, 1);
    if (!probe) return nullptr;
    mem_free(probe);
    return emu_alloc(bytes);
}

void device_free(struct device *, void *mem) {
    emu_free(mem);
}

size_t device_memory_free(const struct device *) {
    return (size_t)1 << 30;
}

void device_zero(struct device *, void *mem, size_t bytes) {
    memset(mem, 0, bytes);
}

void device_forget(struct device *, void *mem, size_t bytes) {
    memset(mem, 0xff, bytes);
}

void device_copy(struct device *, void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

void device_upload(struct device *, void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

/* So many lists between two syncs mean that somebody waits without one. */
#define STAGED_MAX 400

const void *device_stage(struct device *device, const void *from, size_t bytes) {
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

int device_download(struct device *device, void *to, const void *from, size_t bytes) {
    if (!lost(device)) memcpy(to, from, bytes);
    return device->failed;
}

int device_sync(struct device *device) {
    bool gone = lost(device);
    int failed = device->failed;
    device->failed = gone ? ERR_DEVICE : 0;
    drop_staged(device);
    return failed;
}

void device_failed(struct device *device, int code) {
    if (!device->failed) device->failed = code;
}

bool device_runs(struct device *device) {
    return !lost(device);
}

void device_ran(const char *error) {
    if (!error) return;
    fprintf(stderr, "emu: %s\n", error);
    abort();
}

static float element(const void *at, int64_t i, enum kern_dtype dtype) {
    if (dtype == KERN_F32) return static_cast<const float *>(at)[i];
    return __uint_as_float((uint32_t) static_cast<const uint16_t *>(at)[i] << 16);
}

/* What cuBLASLt does on a GPU. */
void device_matmul(struct device *device, float *y, const void *x, const void *w, const float *bias,
                   int rows, int64_t n, int64_t k, enum kern_dtype dtype, bool add) {
    std::vector<float> row(static_cast<size_t>(k));
    if (!device_runs(device)) return;
    for (int64_t o = 0; o < n; o++) {
        for (int64_t i = 0; i < k; i++) row[static_cast<size_t>(i)] = element(w, o * k + i, dtype);
        for (int64_t r = 0; r < rows; r++) {
            float sum = 0;
            for (int64_t i = 0; i < k; i++)
                sum += element(x, r * k + i, dtype) * row[static_cast<size_t>(i)];
            if (bias) sum += bias[o];
            float *to = &y[r * n + o];
            *to = add ? *to + sum : sum;
        }
    }
}
