/* Chooses and opens the compute backend. Only this file knows all backends. */
#ifndef KEEPD_ENGINE_BACKEND_H
#define KEEPD_ENGINE_BACKEND_H

#include "kernels/cpu/cpu.h"
#include "kernels/kern.h"

struct backend_options {
    const char *device;   /* "auto", "cpu", "cuda"; NULL = auto: CUDA where there is a device */
    const char *cpu_path; /* see kernels/cpu/cpu.h */
    enum cpu_activations cpu_activations;
    int threads;  /* compute threads of all replicas together; 0 = one per core */
    int replicas; /* instances to open, 0 counts as 1: each has its own devices, or an equal share
                     of the threads */
    int ranks;    /* ranks of each instance (kernels/ranks.h), 0 counts as 1: one device per rank,
                     assigned by    cuda_place_ranks (kernels/cuda/cuda.h) */
};

/* Returns the number of compute threads: `wanted` if positive, or the cores that this process may
 * use. */
int backend_threads(int wanted);

/* Returns the bytes that are free where the instances would hold weights and caches: on their
 * devices together, or in the host's memory. */
int64_t backend_unused_memory(const struct backend_options *options);

/* Opens all instances, of one kind, or none. ERR_UNSUPPORTED: CUDA was asked for in a build without
 * it. ERR_NOTFOUND: there is no usable device. With "auto" both lead to the CPU, and a build with
 * CUDA logs the reason in one line. More replicas or ranks than there are devices, or more replicas
 * than threads, are refused with the option as fault->field. */
int backend_open(const struct backend_options *options, struct kern **out /* [replicas] */,
                 struct fault *fault);

#endif
