/* The worth of a layer's entries to the queries of a step, for fitting gates (fit/fit.h). Without
 * entry i, a head's output at query t moves by r (o_t - v_i), r = a / (1 - a), with a the attention
 * of t to i (window, cap and sinks included) and o_t the head's output. The worth of i to t is
 *
 *   factor_t  sum over the KV head's query heads of  r^2 |W_h (o_t - v_i)|^2
 *
 * W_h: the columns of the output projection that belong to the query head. 1 - a is at least
 * KERN_WORTH_REST. With G = W_h' W_h the square is o'Go - 2 o'Gv + v'Gv; by rounding it may be
 * below 0 and then counts as 0.
 *
 * The operation is kern_ops.worth. It is called after attend of the layer, with the same qkv, batch
 * and options; `heads` is its output. The step has one span, of whole windows, whose sequence
 * evicted nothing and was not shifted: the index of an entry is its position. It waits for its
 * result. ERR_NOMEM changes nothing. Threads and promises are those of the other layer operations.
 */
#ifndef KEEPD_KERNELS_WORTH_H
#define KEEPD_KERNELS_WORTH_H

#include "kernels/kern.h"

#define KERN_WORTH_REST 0.01f

struct kern_worth {
    const struct kern_weight *o; /* output projection [d_model, heads_q * D] */
    const int32_t *entries;      /* [count] positions, ascending */
    int count;
    int window;           /* queries whose worths are added up */
    const float *factors; /* [rows] host memory */
    float *out; /* [rows / window][heads_kv][count] host memory. Entries that are not older
                   than the whole window get 0 */
};

#endif
