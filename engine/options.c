/* The engine's options on their own: checks that need no model, and the options of the backend and
 * of the model that follow from them. */
#include <stdio.h>
#include <string.h>

#include "engine/engine_int.h"
#include "kernels/comm.h"

bool engine_wants_gates(const struct engine_options *options) {
    if (engine_chooses(options->kv_policy)) return options->kv_budget_given;
    const struct policy *policy = policy_find(options->kv_policy);
    return policy && (policy->needs & POLICY_NEEDS_GATES) != 0;
}

static int refuse_policy(const char *name, struct fault *fault) {
    char known[256] = "auto";
    for (int i = 0; policy_at(i); i++)
        snprintf(known + strlen(known), sizeof known - strlen(known), ", %s", policy_at(i)->name);
    return fault_set(fault, ERR_INVALID, "kv-policy", "'%.40s' is not one of %s", name, known);
}

int engine_options_check(const struct engine_options *o, struct fault *fault) {
    if (o->max_num_seqs < 1)
        return fault_set(fault, ERR_INVALID, "max-num-seqs", "must be at least 1");
    if (o->max_num_batched_tokens <= o->max_num_seqs)
        return fault_set(fault, ERR_INVALID, "max-num-batched-tokens",
                         "must exceed max-num-seqs (%d), so that prompts progress beside answers",
                         o->max_num_seqs);
    if (o->max_queue < 1) return fault_set(fault, ERR_INVALID, "max-queue", "must be at least 1");
    if (o->max_conversations < 0)
        return fault_set(fault, ERR_INVALID, "max-conversations", "must be at least 0");
    if (o->max_logprobs < 0)
        return fault_set(fault, ERR_INVALID, "max-logprobs", "must be at least 0");
    if (o->max_choices < 0)
        return fault_set(fault, ERR_INVALID, "max-choices", "must be at least 0");
    if (o->data_parallel_size < 0 || o->data_parallel_size > ENGINE_REPLICAS_MAX)
        return fault_set(fault, ERR_INVALID, "data-parallel-size", "must be 1 to %d",
                         ENGINE_REPLICAS_MAX);
    if (o->tensor_parallel_size < 0 || o->tensor_parallel_size > COMM_RANKS_MAX ||
        (o->tensor_parallel_size & (o->tensor_parallel_size - 1)) != 0)
        return fault_set(fault, ERR_INVALID, "tensor-parallel-size", "must be 1, 2, 4 or 8");
    if (o->kv_rank_cap != 0 && o->kv_rank_cap < 100)
        return fault_set(fault, ERR_INVALID, "kv-rank-cap", "must be 0 or at least 100 percent");
    if (!engine_chooses(o->kv_policy) && !policy_find(o->kv_policy))
        return refuse_policy(o->kv_policy, fault);
    return 0;
}

enum quantization engine_quantization(const struct engine_options *o) {
    static const char *const names[] = {
        [QUANTIZE_FP8] = "fp8", [QUANTIZE_Q8] = "q8", [QUANTIZE_Q4] = "q4"};
    for (int i = QUANTIZE_FP8; o->quantization && i <= QUANTIZE_Q4; i++)
        if (!strcmp(o->quantization, names[i])) return (enum quantization)i;
    return QUANTIZE_NONE;
}

bool engine_may_load_adapters(const struct engine_options *o) {
    return o->adapter_dir && o->adapter_dir[0];
}

struct model_options engine_model_options(const struct engine_options *o) {
    return (struct model_options){.dir = o->model_dir,
                                  .context = o->max_model_len,
                                  .gates = o->gates,
                                  .gates_cache = o->gates_cache,
                                  .check_only = o->check_only,
                                  .quantization = engine_quantization(o),
                                  .calibrate = o->calibrate,
                                  .random_weights = o->random_weights,
                                  .threads = o->threads,
                                  .progress = o->progress,
                                  .progress_arg = o->arg};
}

static enum cpu_activations cpu_activations_of(const char *name) {
    if (name && !strcmp(name, "int16")) return CPU_INT16;
    if (name && !strcmp(name, "bf16")) return CPU_BF16;
    if (name && !strcmp(name, "int8")) return CPU_INT8;
    return name && !strcmp(name, "f32") ? CPU_F32 : CPU_BY_WEIGHT;
}

struct backend_options engine_backend(const struct engine_options *o, int replicas) {
    return (struct backend_options){.device = o->device,
                                    .cpu_path = o->cpu_path,
                                    .cpu_activations = cpu_activations_of(o->cpu_activations),
                                    .threads = o->threads,
                                    .replicas = replicas,
                                    .ranks = o->tensor_parallel_size};
}

int64_t engine_unused_memory(const struct engine_options *options) {
    const struct backend_options backend = engine_backend(options, options->data_parallel_size);
    return backend_unused_memory(&backend);
}
