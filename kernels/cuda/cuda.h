/* The CUDA backend: one NVIDIA GPU (compute capability 8.0 or later), the vtable of kern.h.
 *
 * Activations are float32 between operations; matrix products round them to bf16 (weights in bf16;
 * float32 weights multiply in float32), attention rounds queries, keys, values and probabilities to
 * bf16 and sums in float32. Pages hold bf16, fp8 or q8; head_dim is 64, 128 or 256, at most 16
 * query heads share a KV head. Latent vectors (kern_cache_options.latent) are in bf16, of up to 512
 * numbers and 640 with those that rotate, for any number of heads; rules that read keys do not run.
 *
 * Everything is queued on one stream: `sync` returns the errors of a step, or `sample` if the step
 * samples, and a step waits only there. ERR_FULL and ERR_INTERNAL mean that a kernel refused (a
 * broken reservation): the step's slots must be released. ERR_DEVICE is permanent: the context is
 * lost, and only a new process gets another one. */
#ifndef KEEPD_KERNELS_CUDA_CUDA_H
#define KEEPD_KERNELS_CUDA_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/comm.h"
#include "kernels/kern.h"

struct cuda_options {
    int device; /* index, 0 = the first */
    bool eager; /* launch operations one by one, never as a graph; for comparisons */
    bool apart; /* no launch starts before the previous one has ended; for comparisons */
    bool timed; /* every operation is timed by itself (cuda_times); `eager` and `apart` are set with
                   it. For measurements: the events take time, too */
    /* Communicator with the ranks of the same model, whose options are equal except for the device;
     * NULL: a single rank. The backend owns it, also when opening fails. */
    const struct comm *comm;
};

/* Is there a device to open? ERR_NOTFOUND says why not; the caller then uses the CPU backend. */
int cuda_probe(struct fault *fault);
/* Operations queued so far: launches, copies, products. */
uint64_t cuda_queued(struct kern *kern);
/* Times that the host waited for the device. */
uint64_t cuda_waits(struct kern *kern);
/* Steps that were launched as a graph. */
uint64_t cuda_replays(struct kern *kern);
/* How a matrix library computes the products of one shape for up to `rows` rows. */
struct cuda_product {
    int64_t n, k, rows; /* outputs, inputs */
    int tile, stages;   /* the library's numbers of them */
    int split;          /* parts of the inner dimension */
    float waves;        /* waves of blocks on the multiprocessors */
    bool own;           /* the shape's own algorithm, chosen for 64 rows */
};
/* The products of all weights that are loaded, as many as `most`; returns their number. A device
 * without such a library has none. */
int cuda_products(struct kern *kern, struct cuda_product *list, int most);
/* Operations of one kind, since the last call of cuda_times. */
struct cuda_time {
    char name[80]; /* the kernel's, or the product with its outputs and inputs */
    int count;
    double us; /* the sum over all of them */
};
/* Fills in the operations of a backend that was opened `timed`, as many kinds as `most`, in the
 * order of their first appearance; returns their number. Waits for the device. At most 4,096
 * operations are timed between two calls, those after them are left out. The emulated device times
 * nothing and has no kinds. */
int cuda_times(struct kern *kern, struct cuda_time *list, int most);
int cuda_open(const struct cuda_options *options, struct kern **out, struct fault *fault);

/* Assigns devices to the ranks of a replica -> devices[ranks]; the only place that does. Replica i
 * of n ranks gets n consecutive devices, rank r number i * n + r, as CUDA numbers them
 * (CUDA_VISIBLE_DEVICES selects and orders them); no two ranks share one. ERR_INVALID: not 1, 2, 4
 * or 8 ranks. ERR_NOTFOUND: no device, or too few for all `replicas`; names the option that asks
 * for too many. */
int cuda_place_ranks(int replicas, int ranks, int replica, int devices[COMM_RANKS_MAX],
                     struct fault *fault);

/* Bytes that nothing uses on the devices of all replicas' ranks together; 0: they cannot be placed,
 * or one of them cannot be opened. */
int64_t cuda_unused_memory(int replicas, int ranks);

/* Opens backends as the ranks of one (kernels/ranks.h), each on its device; options->device is
 * ignored. All may be on the same device, to test several ranks. ERR_UNSUPPORTED: several devices
 * in a build without NCCL. A single rank is an ordinary backend. */
int cuda_open_ranks(const struct cuda_options *options, const int *devices, int ranks,
                    struct kern **out, struct fault *fault);

#ifdef __cplusplus
}
#endif

#endif
