/* Which backend computes: the one place that knows them all. */
#ifndef KEEPD_ENGINE_BACKEND_H
#define KEEPD_ENGINE_BACKEND_H

#include "kernels/kern.h"

struct backend_options {
    const char *device;   /* "auto", "cpu", "cuda"; NULL = auto: CUDA where there is a device */
    const char *cpu_path; /* see kernels/cpu/cpu.h */
    int threads;
};

/* ERR_UNSUPPORTED: CUDA was asked for in a build without it. ERR_NOTFOUND: there is no device, or
 * none that can be used. With "auto" both mean the CPU, which the log says in one line. */
int backend_open(const struct backend_options *options, struct kern **out, struct fault *fault);

#endif
