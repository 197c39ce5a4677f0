/* Which backend computes: the one place that knows them all. */
#ifndef KEEPD_ENGINE_BACKEND_H
#define KEEPD_ENGINE_BACKEND_H

#include "kernels/kern.h"

struct backend_options {
    const char *device;   /* "auto", "cpu", "cuda"; NULL = auto: CUDA where there is a device */
    const char *cpu_path; /* see kernels/cpu/cpu.h */
    int threads;          /* of all replicas together; 0 = the cores */
    int replicas;         /* instances to open, 0 = 1: each has devices of its own, or an equal
                             share of the threads */
    int ranks;            /* of each instance (kernels/ranks.h), 0 = 1: a device for each, which
                             cuda_place_ranks (kernels/cuda/cuda.h) gives out */
};

/* Compute threads that the option's value means: itself, or the cores this process may use. */
int backend_threads(int wanted);

/* Opens all of them, of one kind, or none. ERR_UNSUPPORTED: CUDA was asked for in a build without
 * it. ERR_NOTFOUND: there is no device, or none that can be used. With "auto" both mean the CPU,
 * which the log says in one line. More replicas than devices or threads are refused by name. */
int backend_open(const struct backend_options *options, struct kern **out /* [replicas] */,
                 struct fault *fault);

#endif
