/* The CUDA backend: opening and closing, memory, collectives of ranks, the table of operations. A
 * rank that fails loses its device, so that the other ranks' waits end. */
#include "kernels/cuda/cuda.h"

#include <stdio.h>
#include <string.h>

#include "kernels/cuda/device_time.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/internal.h"

/* ---- Memory ---- */

static void *op_mem_alloc(struct kern *kern, size_t bytes) {
    struct device *device = cuda_of(kern)->device;
    void *mem = device_alloc(device, bytes);
    if (mem) device_zero(device, mem, bytes);
    return mem;
}

static void op_mem_free(struct kern *kern, void *mem) {
    device_free(cuda_of(kern)->device, mem);
}

static int op_upload(struct kern *kern, void *to, const void *from, size_t bytes) {
    device_upload(cuda_of(kern)->device, to, from, bytes);
    return 0;
}

static int op_download(struct kern *kern, void *to, const void *from, size_t bytes) {
    return device_download(cuda_of(kern)->device, to, from, bytes);
}

static void op_bind(struct kern *kern) {
    device_bind(cuda_of(kern)->device);
}

static int op_sync(struct kern *kern) {
    return cache_sync(cuda_of(kern));
}

/* ---- Several ranks ---- */

void join_reduce(struct cuda *cuda, void *x, size_t count, enum comm_type type, enum comm_op op) {
    if (cuda->comm->ops->all_reduce(cuda->comm, x, count, type, op)) device_lose(cuda->device);
}

void join_gather(struct cuda *cuda, void *x, size_t bytes) {
    if (cuda->comm->ops->all_gather(cuda->comm, x, bytes)) device_lose(cuda->device);
}

int join_agree(struct cuda *cuda, int rc) {
    int all = cuda->comm->ops->agree(cuda->comm, rc);
    if (all != ERR_STOPPED) return all;
    device_lose(cuda->device);
    return ERR_DEVICE;
}

/* ---- Opening ---- */

static void op_close(struct kern *kern) {
    struct cuda *cuda = cuda_of(kern);
    if (cuda->device) {
        (void)device_sync(cuda->device);
        (void)join_agree(cuda, 0); /* no rank uses the memory that is freed now */
        cache_close(cuda);
        struct room *rooms[] = {&cuda->narrow,  &cuda->partial, &cuda->parts,  &cuda->hidden,
                                &cuda->select,  &cuda->look,    &cuda->sample, &cuda->gather,
                                &cuda->squares, &cuda->sums,    &cuda->rotated};
        for (struct room *room : rooms) device_free(cuda->device, room->mem);
        device_free(cuda->device, cuda->rounded.room.mem);
        for (struct cuda_rope &rope : cuda->ropes) {
            device_free(cuda->device, rope.angles.mem);
            device_free(cuda->device, rope.freq);
            device_free(cuda->device, rope.axes);
        }
    }
    cuda->comm->ops->close(cuda->comm); /* queues work on the device */
    device_close(cuda->device);
    mem_free(cuda);
}

static struct kern_ops make_table(const char *name) {
    struct kern_ops t = {};
    t.name = name;
    t.blocks = true;
    t.close = op_close;
    t.bind = op_bind;
    t.mem_alloc = op_mem_alloc;
    t.mem_free = op_mem_free;
    t.upload = op_upload;
    t.download = op_download;
    t.weight_load = op_weight_load;
    t.weight_free = op_weight_free;
    t.gate_load = op_gate_load;
    t.gate_free = op_gate_free;
    t.embed = op_embed;
    t.rms_norm = op_rms_norm;
    t.matmul = op_matmul;
    t.add = op_add;
    t.add_norm = op_add_norm;
    t.soft_cap = op_soft_cap;
    t.qk_norm = op_qk_norm;
    t.glu = op_glu;
    t.glu_apart = op_glu_apart;
    t.scale = op_scale;
    t.open_gates = op_open_gates;
    t.gather_rows = op_gather_rows;
    t.gate = op_gate;
    t.experts_load = op_experts_load;
    t.experts_free = op_experts_free;
    t.experts = op_experts;
    t.cache_open = op_cache_open;
    t.cache_info = op_cache_info;
    t.cache_fit = op_cache_fit;
    t.rule_check = op_rule_check;
    t.prepare = op_prepare;
    t.begin_step = op_begin_step;
    t.qk_rope = op_qk_rope;
    t.write_kv = op_write_kv;
    t.attend = op_attend;
    t.latent_reserve = op_latent_reserve;
    t.latent_in = op_latent_in;
    t.latent_out = op_latent_out;
    t.short_conv = op_short_conv;
    t.delta = op_delta;
    t.mamba = op_mamba;
    t.evict = op_evict;
    t.truncate = op_truncate;
    t.fork = op_fork;
    t.release = op_release;
    t.report = op_report;
    t.snapshot_size = op_snapshot_size;
    t.snapshot_export = op_snapshot_export;
    t.snapshot_check = op_snapshot_check;
    t.snapshot_import = op_snapshot_import;
    t.cache_stats = op_cache_stats;
    t.cache_check = op_cache_check;
    t.sample = op_sample;
    t.sync = op_sync;
    return t;
}

#ifndef KEEPD_CUDA_LEAST
#define KEEPD_CUDA_LEAST 80 /* the lowest architecture in this build, from CMakeLists.txt */
#endif

int device_supported(int capability, struct fault *fault) {
    int major = capability / 10, minor = capability % 10;
    if (capability < 80)
        return fault_set(fault, ERR_UNSUPPORTED, "device",
                         "the device has compute capability %d.%d; 8.0 (Ampere) or later is needed",
                         major, minor);
    if (capability < KEEPD_CUDA_LEAST)
        return fault_set(
            fault, ERR_UNSUPPORTED, "device",
            "the device has compute capability %d.%d; this build has kernels for %d.%d "
            "and later (the preset cuda-all: for 8.0 and later)",
            major, minor, KEEPD_CUDA_LEAST / 10, KEEPD_CUDA_LEAST % 10);
    return 0;
}

int cuda_probe(struct fault *fault) {
    return device_count(fault) > 0 ? 0 : ERR_NOTFOUND;
}

uint64_t cuda_queued(struct kern *kern) {
    return device_graphs(cuda_of(kern)->device)->queued;
}

int cuda_products(struct kern *kern, struct cuda_product *list, int most) {
    return device_products(cuda_of(kern)->device, list, most);
}

int cuda_times(struct kern *kern, struct cuda_time *list, int most) {
    return device_times(cuda_of(kern)->device, list, most);
}

uint64_t cuda_waits(struct kern *kern) {
    return device_waits(cuda_of(kern)->device);
}

uint64_t cuda_replays(struct kern *kern) {
    return device_graphs(cuda_of(kern)->device)->replays;
}

int cuda_open(const struct cuda_options *options, struct kern **out, struct fault *fault) {
    const struct comm *comm = options->comm ? options->comm : &comm_none;
    struct cuda *cuda = static_cast<struct cuda *>(mem_try_alloc(1, sizeof *cuda));
    int rc = cuda ? device_open(options->device, &cuda->device, fault)
                  : fault_set(fault, ERR_NOMEM, "", "no memory for the CUDA backend");
    int all = comm->ops->agree(comm, rc);
    if (all == 0 && comm->ops->attach) {
        rc = comm->ops->attach(comm, cuda->device, fault);
        all = comm->ops->agree(comm, rc);
    }
    if (all) {
        comm->ops->close(comm);
        if (cuda) device_close(cuda->device);
        mem_free(cuda);
        return rc ? rc : all; /* error of another rank, which reports the reason */
    }
    cuda->comm = comm;
    cuda->ops = make_table(device_name(cuda->device));
    cuda->base.ops = &cuda->ops;
    cuda->step.rows = -1;
    cuda->layers_dtype = KERN_BF16;
    cuda->eager = options->eager || options->timed || comm->ranks > 1;
    device_overlap(cuda->device, !options->apart && !options->timed);
    if (options->timed) device_time_all(cuda->device);
    *out = &cuda->base;
    return 0;
}
