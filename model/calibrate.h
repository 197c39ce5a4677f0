/* Measures second moments of the inputs of a model's matrices, for rounding that makes up for its
 * own errors (kernels/moments.h). No texts are read: half of the tokens are texts that the model
 * writes, sampled at temperature 1, and half are drawn evenly from its vocabulary. The texts
 * resemble what the model will read; the random tokens reach inputs that the model's texts do not.
 */
#ifndef KEEPD_MODEL_CALIBRATE_H
#define KEEPD_MODEL_CALIBRATE_H

#include "kernels/cpu/team.h"
#include "model/model.h"
#include "model/tensors.h"

struct calibration;

/* Loads the model of the options as its files have it, computes at least `tokens` tokens of either
 * kind in whole texts, and closes the model. The measurements stay: MOMENTS_WINDOW floats for each
 * input of a layer's matrices that options->quantization makes Q4. Experts are not measured. Errors
 * are those of model_open. */
int calibration_open(const struct model_options *options, int tokens, struct cpu_team *team,
                     struct calibration **out, struct fault *fault);
void calibration_close(struct calibration *calibration); /* NULL allowed */

/* Returns the factors for moments_quantize. NULL: not measured, or `calibration` is NULL. */
const float *calibration_factors(const struct calibration *calibration, const struct slot *slot,
                                 int layer);

#endif
