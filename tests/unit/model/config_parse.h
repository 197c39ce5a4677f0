/* Parses configurations of tests: whole ones, or a small one with fields of the test. */
#ifndef KEEPD_TESTS_UNIT_MODEL_CONFIG_PARSE_H
#define KEEPD_TESTS_UNIT_MODEL_CONFIG_PARSE_H

#include <stdio.h>
#include <string.h>

#include "model/model.h"

/* The last of two equal keys wins, so overrides come behind the members they replace. */
static inline int parse_with(const char *overrides, const char *architecture, const char *type,
                             const char *generation, struct model_config *out,
                             struct fault *fault) {
    char text[4096];
    snprintf(text, sizeof text,
             "{\"architectures\": [\"%s\"], \"model_type\": \"%s\", \"hidden_size\": 64,"
             "\"intermediate_size\": 96, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
             "\"num_hidden_layers\": 3, \"vocab_size\": 128, \"rms_norm_eps\": 1e-5,"
             "\"max_position_embeddings\": 4096, \"hidden_act\": \"silu\", %s"
             "\"transformers_version\": \"5\"}",
             architecture, type, overrides);
    *fault = (struct fault){0};
    return model_config_parse(text, strlen(text), generation, generation ? strlen(generation) : 0,
                              0, out, fault);
}

static inline int parse_llama(const char *overrides, struct model_config *out,
                              struct fault *fault) {
    return parse_with(overrides, "LlamaForCausalLM", "llama", NULL, out, fault);
}

static inline int parse(const char *text, struct model_config *out, struct fault *fault) {
    *fault = (struct fault){0};
    return model_config_parse(text, strlen(text), NULL, 0, 0, out, fault);
}

#endif
