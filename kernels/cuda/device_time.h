/* Times the operations of a device one by one, with events before and after each; for measurements
 * alone. Two implementations, as of device.h. Thread: the engine thread. */
#ifndef KEEPD_KERNELS_CUDA_DEVICE_TIME_H
#define KEEPD_KERNELS_CUDA_DEVICE_TIME_H

struct cuda_time;
struct device;

/* From now on every launch and every product is timed; without memory for it, none. */
void device_time_all(struct device *device);
/* cuda_times of cuda.h. */
int device_times(struct device *device, struct cuda_time *list, int most);

#endif
