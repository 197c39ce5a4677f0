/* The devices of communicators in tests on emulated devices: the parts of a comm_kind
 * (tests/unit/kernels/comm_cases.h) that emu_comm and emu_nccl share. */
#ifndef KEEPD_TESTS_EMU_COMM_DEVICES_H
#define KEEPD_TESTS_EMU_COMM_DEVICES_H

#include "kernels/cuda/device.h"
#include "tests/unit/kernels/comm_cases.h"

static inline struct device *device_of(void *device) {
    return static_cast<struct device *>(device);
}

/* As a backend does (cuda_open): all at once, each with a device of its own handle. */
static inline void *attach_to(const struct comm *comm, int index) {
    struct fault fault = {};
    struct device *device = nullptr;
    MUST(device_open(index, &device, &fault) == 0);
    MUST(comm->ops->agree(comm, 0) == 0);
    MUST(comm->ops->attach(comm, device, &fault) == 0);
    MUST(comm->ops->agree(comm, 0) == 0);
    return device;
}

static inline void end(const struct comm *comm, void *device) {
    comm->ops->close(comm);
    device_close(device_of(device));
}

static inline void *alloc(void *device, size_t bytes) {
    return device_alloc(device_of(device), bytes);
}

static inline void release(void *device, void *mem) {
    device_free(device_of(device), mem);
}

static inline void put(void *device, void *to, const void *from, size_t bytes) {
    device_upload(device_of(device), to, from, bytes);
}

static inline int take(void *device, void *to, const void *from, size_t bytes) {
    return device_download(device_of(device), to, from, bytes);
}

#endif
