/* How `--quantization` rounds the matrices of a slot: the same whether a model is loaded so or
 * saved so (save.h). Pure. */
#ifndef KEEPD_MODEL_ROUNDING_H
#define KEEPD_MODEL_ROUNDING_H

#include "kernels/cpu/team.h"
#include "kernels/quantize.h"
#include "model/tensors.h"
#include "model/weights.h"

/* The format that the slot's matrices become in a layer. Routers, whose errors choose other
 * experts, keep their types; the vocabulary's matrices, whose errors are seen in every token,
 * become Q8 or stay. With Q4 the matrices `down` become Q8 in half of the layers: the first and the
 * last eighth, and every third between them. Their errors cost most, and there most of all;
 * llama.cpp's Q4_K_M gives them more bits in the same layers. */
enum quantization rounding_format(const struct model_config *config, const struct slot *slot,
                                  int layer, enum quantization wanted);

/* Do the files have all matrices of the slot in blocks? Those stay as they are. `expert`: the one
 * whose matrices are meant. */
bool rounding_is_done(const struct weights *weights, enum naming naming, const struct slot *slot,
                      int layer, int expert);

/* The part of a model that a slot's matrices are rounded with. */
struct rounding {
    const struct model_config *config;
    const struct weights *weights;
    enum naming naming;
    struct cpu_team *team;
};

/* Estimates from the weights alone how large the slot's inputs are: an error of a weight counts as
 * much as the mean square of its input. That is unknown without texts, but its ratios follow:
 *
 *   q, k, v; gate, up   inputs are normalised, then multiplied by the norm's factors: their squares
 *   o                   input i is a mean of the outputs i of v: the squared length of v's row i,
 * its columns weighted as those of q down                input i is a product of the outputs i of
 * gate and up: the product of the squared lengths of their rows i, weighted alike
 *
 * out: [cols of the slot], with the mean 1 and none below 1/1000. False, and `out` is of no use:
 * there is no estimate (the family has no norm there, or a type of numbers has scales apart). */
bool rounding_inputs(const struct rounding *r, const struct slot *slot, int layer, int expert,
                     float *out);

/* The scales of an E4M3 matrix, [rows]: one for all, or one per output, in the tensor that has its
 * name and "_scale". A scale that is no number, or that makes a number none, is refused here: no
 * backend looks for it. So are elements that are none, unless `check_only`, which reads no element.
 */
int rounding_read_scales(const struct weights *weights, const char *name,
                         const struct tensor *codes, bool check_only, float *out,
                         struct fault *fault);

#endif
