/* The rotary embedding of a configuration. */
#ifndef KEEPD_MODEL_CONFIG_ROPE_H
#define KEEPD_MODEL_CONFIG_ROPE_H

#include <cjson/cJSON.h>

#include "model/model.h"

#define MODEL_POSITIONS_MAX (1 << 24)

/* How pairs are divided among the three places of a token. */
struct model_sections {
    enum model_axes axes;
    int pairs[3]; /* when the file does not say */
};

/* A family's rotation, for members that the file does not have. */
struct model_rope {
    double theta;       /* 0 = 10000 */
    bool local;         /* layers with windows rotate without scaling, by inv_freq_local */
    double local_theta; /* theta of those layers; 0 = theta of the others */
    double rotary;      /* partial_rotary_factor; 0 = 1 */
    bool query_scale;   /* the file may have llama_4_scaling_beta */
    const char *kind;   /* rope_type */
    struct model_sections sections;
};

/* Reads rope_theta, rope_scaling or rope_parameters and partial_rotary_factor of config.json's tree
 * `root`. Fills in rotary_dims, rope_scale, query_scale, inv_freq, axes and inv_freq_local, which
 * `out` owns then, also after a failure, and raises max_positions to what a scaling was made for;
 * head_dim, max_positions and qk_norm are set before. `context`: as for model_config_parse. Faults
 * name the field. */
int model_config_read_rope(const cJSON *root, const struct model_rope *defaults, int context,
                           struct model_config *out, struct fault *fault);

#endif
