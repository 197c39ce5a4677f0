/* The quantization_config of config.json: which formats of weights are executed. */
#ifndef KEEPD_MODEL_CONFIG_QUANT_H
#define KEEPD_MODEL_CONFIG_QUANT_H

#include <cjson/cJSON.h>

#include "model/packed.h"

/* Reads which format the weights have. `mxfp4`: the family has matrices of MXFP4. *out stays
 * PACKING_NONE if the weights are F32, F16, BF16 or MXFP4. ERR_UNSUPPORTED names the field. */
int model_config_read_quantization(const cJSON *root, bool mxfp4, struct packing *out,
                                   struct fault *fault);

#endif
