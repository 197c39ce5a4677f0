/* The CUDA backend: one NVIDIA GPU (compute capability 9.0 or later), the vtable of kern.h.
 *
 * Activations are float32 between operations; matrix products round them to bf16 (weights in bf16;
 * float32 weights multiply in float32), attention rounds queries, keys, values and probabilities
 * to bf16 and sums in float32. Pages hold bf16; head_dim is 64, 128 or 256, at most 16 query heads
 * share a KV head.
 *
 * Everything is queued on one stream: errors of a step come with `sync`, of one that samples with
 * `sample`, and a step waits only there. ERR_FULL and ERR_INTERNAL there mean that a kernel refused
 * (a broken reservation): the step's slots are to be released. ERR_DEVICE stays for good: the
 * context is lost, and only a new process gets another one. */
#ifndef KEEPD_KERNELS_CUDA_CUDA_H
#define KEEPD_KERNELS_CUDA_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/comm.h"
#include "kernels/kern.h"

struct cuda_options {
    int device; /* index, 0 = the first */
    bool eager; /* launch one by one, never a graph: to compare */
    bool apart; /* no launch comes up while the one before it ends: to compare */
    /* Among the ranks of the same model, which have all the same options but for their device;
     * NULL: the only one. The backend owns it, also when it does not open. */
    const struct comm *comm;
};

/* Is there a device to open? ERR_NOTFOUND: none, and why; the CPU backend is to be used then. */
int cuda_probe(struct fault *fault);
/* Operations queued so far: launches, copies, products. */
uint64_t cuda_queued(struct kern *kern);
/* Times that the host waited for the device. */
uint64_t cuda_waits(struct kern *kern);
/* Steps that were launched as a graph. */
uint64_t cuda_replays(struct kern *kern);
int cuda_open(const struct cuda_options *options, struct kern **out, struct fault *fault);

/* Which devices the ranks of a replica have -> devices[ranks]: the one place where they are given
 * out. Replica i of n ranks has n in a row, rank r number i * n + r, as CUDA numbers them
 * (CUDA_VISIBLE_DEVICES chooses and orders); no two ranks share one. ERR_INVALID: not 1, 2, 4 or 8
 * ranks. ERR_NOTFOUND: none, or too few for all `replicas`, which names the option that asks for
 * more than there are. */
int cuda_place_ranks(int replicas, int ranks, int replica, int devices[COMM_RANKS_MAX],
                     struct fault *fault);

/* Backends as ranks of one (kernels/ranks.h), each on its device; the options' own is not read. All
 * may be on the same one, to test what else takes several. ERR_UNSUPPORTED: several devices in a
 * build without NCCL. One rank is a backend like any other. */
int cuda_open_ranks(const struct cuda_options *options, const int *devices, int ranks,
                    struct kern **out, struct fault *fault);

#ifdef __cplusplus
}
#endif

#endif
