#include "kernels/cuda/device_time.h"

#include <stdio.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_int.h"

#define TIMED_MAX 4096

struct timed {
    char name[sizeof(((struct cuda_time *)0)->name)];
    cudaEvent_t begin, end; /* made when first used, then reused */
};

struct timings {
    struct timed list[TIMED_MAX];
    int count;
};

void device_time_all(struct device *device) {
    if (!device->timings)
        device->timings = static_cast<struct timings *>(mem_try_alloc(1, sizeof(struct timings)));
}

static bool make_events(struct timed *t) {
    if (!t->begin && cudaEventCreate(&t->begin) != cudaSuccess) return false;
    return t->end || cudaEventCreate(&t->end) == cudaSuccess;
}

struct timed *device_time_begin(struct device *device, const char *name) {
    struct timings *timings = device->timings;
    if (!timings || device->capturing || timings->count == TIMED_MAX) return NULL;
    struct timed *t = &timings->list[timings->count];
    if (!make_events(t)) return NULL;
    timings->count++;
    snprintf(t->name, sizeof t->name, "%s", name);
    cudaEventRecord(t->begin, device->stream);
    return t;
}

void device_time_end(struct device *device, struct timed *t) {
    if (t) cudaEventRecord(t->end, device->stream);
}

/* Adds the operation to its kind; the number of kinds then. */
static int add_time(struct cuda_time *list, int count, int most, const char *name, double us) {
    int i = 0;
    while (i < count && strcmp(list[i].name, name) != 0) i++;
    if (i == most) return count;
    if (i == count) {
        list[i] = {};
        snprintf(list[i].name, sizeof list[i].name, "%s", name);
    }
    list[i].count++;
    list[i].us += us;
    return i == count ? count + 1 : count;
}

int device_times(struct device *device, struct cuda_time *list, int most) {
    struct timings *timings = device->timings;
    int count = 0;
    if (!timings || device_sync(device)) return 0;
    for (int i = 0; i < timings->count; i++) {
        float ms = 0;
        const struct timed *t = &timings->list[i];
        if (cudaEventElapsedTime(&ms, t->begin, t->end) == cudaSuccess)
            count = add_time(list, count, most, t->name, 1e3 * ms);
    }
    timings->count = 0;
    return count;
}

void device_time_close(struct device *device) {
    if (!device->timings) return;
    for (struct timed &t : device->timings->list) {
        if (t.begin) cudaEventDestroy(t.begin);
        if (t.end) cudaEventDestroy(t.end);
    }
    mem_free(device->timings);
    device->timings = NULL;
}
