#include "engine/backend.h"

#include <string.h>

#include "base/available.h"
#include "base/log.h"
#include "kernels/ranks.h"

#ifdef KEEPD_CUDA
#include "kernels/cuda/cuda.h"
#endif

static int replica_count(const struct backend_options *options) {
    return options->replicas > 0 ? options->replicas : 1;
}

static int rank_count(const struct backend_options *options) {
    return options->ranks > 0 ? options->ranks : 1;
}

#ifdef KEEPD_CUDA
static const bool with_cuda = true;

static int open_cuda(const struct backend_options *options, int replica, struct kern **out,
                     struct fault *fault) {
    int devices[COMM_RANKS_MAX], ranks = rank_count(options);
    const struct cuda_options cuda = {0};
    int rc = cuda_place_ranks(replica_count(options), ranks, replica, devices, fault);
    return rc ? rc : cuda_open_ranks(&cuda, devices, ranks, out, fault);
}

static int64_t device_bytes(const struct backend_options *options) {
    return cuda_unused_memory(replica_count(options), rank_count(options));
}
#else
static const bool with_cuda = false;

static int open_cuda(const struct backend_options *options, int replica, struct kern **out,
                     struct fault *fault) {
    (void)options, (void)replica, (void)out;
    return fault_set(fault, ERR_UNSUPPORTED, "device",
                     "this build has no CUDA backend (cmake --preset cuda makes one)");
}

static int64_t device_bytes(const struct backend_options *options) {
    (void)options;
    return 0;
}
#endif

int backend_threads(int wanted) {
    return wanted > 0 ? wanted : available_cores("");
}

/* Every replica gets the same number of threads: sums must not depend on the replica that computes
 * them. A single one without a number uses fewer threads while other programs compute (team.h). */
static int open_cpu(const struct backend_options *options, int replica, struct kern **out,
                    struct fault *fault) {
    int threads = backend_threads(options->threads), replicas = replica_count(options);
    const struct cpu_options cpu = {.path = options->cpu_path,
                                    .activations = options->cpu_activations,
                                    .threads =
                                        replicas == 1 ? options->threads : threads / replicas};
    (void)replica;
    if (threads >= replicas) return ranks_open_cpu(&cpu, rank_count(options), out, fault);
    return fault_set(fault, ERR_INVALID, "data-parallel-size",
                     "each of %d replicas needs a compute thread; there are %d", replicas, threads);
}

typedef int open_replica(const struct backend_options *options, int replica, struct kern **out,
                         struct fault *fault);

/* A failure of the first replica means that the backend is not available; a failure of a later one,
 * that there are too many replicas for it. */
static int open_each(const struct backend_options *options, open_replica *open, struct kern **out,
                     struct fault *fault) {
    struct fault why = {0};
    for (int i = 0; i < replica_count(options); i++) {
        int rc = open(options, i, &out[i], &why);
        if (rc == 0) continue;
        for (int k = 0; k < i; k++) out[k]->ops->close(out[k]);
        for (int k = 0; k <= i; k++) out[k] = NULL;
        if (i == 0) return fault_set(fault, rc, why.field, "%s", why.text);
        return fault_set(fault, rc, "data-parallel-size", "replica %d cannot open its device: %s",
                         i, why.text);
    }
    return 0;
}

int backend_open(const struct backend_options *options, struct kern **out, struct fault *fault) {
    const char *device = options->device ? options->device : "auto";
    struct fault why = {0};
    if (strcmp(device, "cpu") == 0) return open_each(options, open_cpu, out, fault);
    int rc = open_each(options, open_cuda, out, &why);
    if (rc == 0) return 0;
    if (strcmp(why.field, "data-parallel-size") == 0 ||
        strcmp(why.field, "tensor-parallel-size") == 0)
        return fault_set(fault, rc, why.field, "%s", why.text);
    if (strcmp(device, "cuda") == 0) return fault_set(fault, rc, "device", "%s", why.text);
    if (with_cuda) log_info("device: %s; the CPU computes", why.text);
    return open_each(options, open_cpu, out, fault);
}

int64_t backend_unused_memory(const struct backend_options *options) {
    const bool on_cpu = options->device && strcmp(options->device, "cpu") == 0;
    const int64_t bytes = on_cpu ? 0 : device_bytes(options);
    return bytes > 0 ? bytes : available_memory("");
}
