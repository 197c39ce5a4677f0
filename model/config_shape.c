/* Consequences of a configuration: for the cache, for scratch memory, for descriptions of the
 * model. */
#include "base/mem.h"
#include "model/internal.h"

void model_config_close(struct model_config *config) {
    mem_free(config->inv_freq);
    mem_free(config->axes);
    mem_free(config->inv_freq_local);
    mem_free(config->inv_freq_none);
    mem_free(config->per_layer);
    mem_free(config->rotations);
    mem_free(config->heads);
    pooling_close(&config->pooling);
    config->heads = NULL;
    config->axes = NULL;
    config->inv_freq = config->inv_freq_local = config->inv_freq_none = NULL;
    config->per_layer = NULL;
    config->rotations = NULL;
}

int routed_layers(const struct model_config *config) {
    int count = 0;
    for (int i = 0; i < config->layers; i++) count += config->per_layer[i].routed;
    return count;
}

int dense_width(const struct model_config *config) {
    int widest = 0;
    for (int i = 0; i < config->layers; i++)
        if (has_dense(&config->per_layer[i]) && ff_width(config, i) > widest)
            widest = ff_width(config, i);
    return widest;
}

struct model_ending model_ending(const struct model_config *config) {
    const struct pooling_dense *dense = config->pooling.dense;
    if (config->classifies)
        return (struct model_ending){
            2, {config->d_model, config->classifier.labels}, {true, false}};
    return (struct model_ending){dense[0].there + dense[1].there,
                                 {dense[0].width, dense[1].width},
                                 {dense[0].tanh, dense[1].tanh}};
}

int model_vector_width(const struct model_config *config) {
    const struct model_ending ending = model_ending(config);
    return ending.count ? ending.width[ending.count - 1] : config->d_model;
}

bool model_config_rotates_alike(const struct model_config *config) {
    for (int i = 0; i < config->layers; i++) {
        const struct model_layer_config *layer = &config->per_layer[i];
        if (layer_attends(layer) && (!layer->rotated || layer->local)) return false;
    }
    return true;
}

int model_config_sliding_layers(const struct model_config *config) {
    int count = 0;
    for (int i = 0; i < config->layers; i++)
        count += config->per_layer[i].sliding_window > 0 && !config->per_layer[i].reads;
    return count;
}

int model_config_sliding_window(const struct model_config *config) {
    int longest = 0;
    for (int i = 0; i < config->layers; i++)
        if (config->per_layer[i].sliding_window > longest)
            longest = config->per_layer[i].sliding_window;
    return longest;
}

/* The numbers of a layer's recurrent state. */
static int state_floats(const struct model_config *config) {
    if (!config->state_layers) return 0;
    if (config->mamba.heads)
        return kern_mamba_shared_floats(&config->mamba) +
               config->mamba.heads * kern_mamba_head_floats(&config->mamba);
    return config->delta.heads_k ? config->delta.heads_k * kern_delta_head_floats(&config->delta)
                                 : config->d_model * (config->conv_width - 1);
}

struct kern_cache_options model_cache_options(const struct model_config *config) {
    return (struct kern_cache_options){
        .layers = config->cache_layers,
        .heads_q = config->heads_q,
        .heads_kv = config->heads_kv,
        .head_dim = config->head_dim,
        .heads = config->heads,
        .latent = config->latent.rank,
        .states = config->state_layers,
        .state_floats = state_floats(config),
        .state_shared = config->mamba.heads ? kern_mamba_shared_floats(&config->mamba) : 0,
        .state_heads = config->mamba.heads,
        .inv_freq = config->inv_freq,
        .rotations = config->rotations,
        .vocab = config->vocab,
        .qk_norm_wide = config->qk_norm_wide};
}

int64_t model_state_pages(const struct model_config *config, const struct kern_cache_info *info,
                          int ranks) {
    if (!config->state_layers) return 0;
    const struct kern_cache_options options = model_cache_options(config);
    const int64_t floats = kern_state_part(&options, ranks), slots = info->state_slots;
    return config->state_layers * ((floats + slots - 1) / slots);
}

uint64_t model_state_bytes(const struct model_config *config) {
    return (uint64_t)config->state_layers * (uint64_t)state_floats(config) * sizeof(float);
}

int64_t model_pages(const struct model_config *config, const struct kern_cache_info *info,
                    int64_t entries) {
    const struct kern_cache_options cache = model_cache_options(config);
    const int64_t slots = info->page_slots_least;
    return kern_streams(&cache) * ((entries + slots - 1) / slots) +
           model_state_pages(config, info, 1);
}
