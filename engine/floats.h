/* Tensor elements as float32: for norms, biases and gates, which backends take in float32. */
#ifndef KEEPD_ENGINE_FLOATS_H
#define KEEPD_ENGINE_FLOATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/weights.h"

float float_from_f16(uint16_t bits);
float float_from_bf16(uint16_t bits);

bool floats_can_read(enum tensor_dtype dtype); /* F32, F16, BF16 */

/* Elements [first, first + count) of a tensor with a readable dtype; false (nothing written) when
 * they lie outside it. */
bool floats_read(const struct tensor *tensor, size_t first, size_t count, float *out);

#endif
