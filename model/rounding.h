/* How `--quantization` rounds the matrices of a slot: the same whether a model is loaded so or
 * saved so (save.h). Pure. */
#ifndef KEEPD_MODEL_ROUNDING_H
#define KEEPD_MODEL_ROUNDING_H

#include "kernels/quantize.h"
#include "model/tensors.h"
#include "model/weights.h"

/* The format that the slot's matrices become. Routers, whose errors choose other experts, keep
 * their types; the vocabulary's matrices, whose errors are seen in every token, become Q8 or stay.
 */
enum quantization rounding_format(const struct slot *slot, enum quantization wanted);

/* Do the files have all matrices of the slot in blocks? Those stay as they are. `expert`: the one
 * whose matrices are meant. */
bool rounding_is_done(const struct weights *weights, enum naming naming, const struct slot *slot,
                      int layer, int expert);

/* The scales of an E4M3 matrix, [rows]: one for all, or one per output, in the tensor that has its
 * name and "_scale". A scale that is no number, or that makes a number none, is refused here: no
 * backend looks for it. So are elements that are none, unless `check_only`, which reads no element.
 */
int rounding_read_scales(const struct weights *weights, const char *name,
                         const struct tensor *codes, bool check_only, float *out,
                         struct fault *fault);

#endif
