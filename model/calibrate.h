/* Second moments of the inputs of a model's matrices, for rounding that makes up for its own errors
 * (kernels/moments.h). No texts are read: the model writes some by itself, sampled at temperature
 * 1, and computes them and as many tokens that are drawn evenly from its vocabulary. The former
 * resemble what it will read; the latter reach what it does not write. */
#ifndef KEEPD_MODEL_CALIBRATE_H
#define KEEPD_MODEL_CALIBRATE_H

#include "kernels/cpu/team.h"
#include "model/model.h"
#include "model/tensors.h"

struct calibration;

/* Loads the model of the options as its files have it, computes whole texts of at least `tokens`
 * tokens of either kind, and closes it again. What was measured stays: MOMENTS_WINDOW floats for
 * each input of a layer's matrices that options->quantization makes Q4. Experts are not measured.
 * Errors are those of model_open. */
int calibration_open(const struct model_options *options, int tokens, struct cpu_team *team,
                     struct calibration **out, struct fault *fault);
void calibration_close(struct calibration *calibration); /* NULL allowed */

/* For moments_quantize. NULL: not measured; so it is where `calibration` is NULL. */
const float *calibration_factors(const struct calibration *calibration, const struct slot *slot,
                                 int layer);

#endif
