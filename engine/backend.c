#include "engine/backend.h"

#include <string.h>

#include "base/log.h"
#include "kernels/cpu/cpu.h"

#ifdef KEEPD_CUDA
#include "kernels/cuda/cuda.h"

static const bool with_cuda = true;

static int open_cuda(struct kern **out, struct fault *fault) {
    const struct cuda_options cuda = {.device = 0};
    int code = cuda_probe(fault);
    return code ? code : cuda_open(&cuda, out, fault);
}
#else
static const bool with_cuda = false;

static int open_cuda(struct kern **out, struct fault *fault) {
    (void)out;
    return fault_set(fault, ERR_UNSUPPORTED, "device",
                     "this build has no CUDA backend (cmake --preset cuda makes one)");
}
#endif

int backend_open(const struct backend_options *options, struct kern **out, struct fault *fault) {
    const struct cpu_options cpu = {.path = options->cpu_path, .threads = options->threads};
    const char *device = options->device ? options->device : "auto";
    struct fault why = {0};
    if (strcmp(device, "cpu") == 0) return cpu_open(&cpu, out, fault);
    int code = open_cuda(out, &why);
    if (code == 0) return 0;
    if (strcmp(device, "cuda") == 0) return fault_set(fault, code, "device", "%s", why.text);
    if (with_cuda) log_info("device: %s; the CPU computes", why.text);
    return cpu_open(&cpu, out, fault);
}
