/* How `--quantization` rounds the matrices of a slot. The result is the same whether a model is
 * rounded while it loads or when it is saved (save.h). Pure. */
#ifndef KEEPD_MODEL_ROUNDING_H
#define KEEPD_MODEL_ROUNDING_H

#include "kernels/cpu/team.h"
#include "kernels/quantize.h"
#include "model/tensors.h"
#include "model/weights.h"

/* Returns the format that the slot's matrices get in a layer. Routers keep their types, because
 * their errors choose other experts. The vocabulary's matrices become Q8 or stay, because every
 * token sees their errors. With Q4 the matrices `down` become Q8 in half of the layers: the first
 * and the last eighth, and every third between them. Their errors cost most, and there most of all;
 * llama.cpp's Q4_K_M gives them more bits in the same layers. */
enum quantization rounding_format(const struct model_config *config, const struct slot *slot,
                                  int layer, enum quantization wanted);

/* Returns whether the files have all matrices of the slot in blocks; such matrices stay as they
 * are. `expert`: whose matrices are meant. */
bool rounding_is_done(const struct weights *weights, enum naming naming, const struct slot *slot,
                      int layer, int expert);

/* The parts of a model that are needed to round a slot's matrices. */
struct rounding {
    const struct model_config *config;
    const struct weights *weights;
    enum naming naming;
    struct cpu_team *team;
};

/* Estimates from the weights alone how large the slot's inputs are, because an error of a weight
 * counts as much as the mean square of its input. That mean is unknown without texts, but ratios
 * between inputs follow from the weights:
 *
 *   q, k, v; gate, up   the inputs are normalised, then multiplied by the norm's factors: the
 *                       factors' squares
 *   o                   input i is a mean of the outputs i of v: the squared length of v's row i,
 *                       its columns weighted like the inputs of q
 *   down                input i is a product of the outputs i of gate and up: the product of the
 *                       squared lengths of their rows i, weighted in the same way
 *
 * out: [cols of the slot], with the mean 1 and none below 1/1000. false, and `out` is not valid:
 * there is no estimate (the family has no norm there, or the scales of a type are stored in another
 * tensor). */
bool rounding_inputs(const struct rounding *r, const struct slot *slot, int layer, int expert,
                     float *out);

/* Reads the scales of an E4M3 matrix into [rows]: one for all or one per output, from the tensor
 * with the matrix's name and "_scale". Refuses a scale that is not a number, or that makes a number
 * of the matrix NaN or infinite, because no backend checks it; also elements that are not numbers,
 * unless `check_only`, which reads no element. */
int rounding_read_scales(const struct weights *weights, const char *name,
                         const struct tensor *codes, bool check_only, float *out,
                         struct fault *fault);

#endif
