/* The worth of a layer's entries to the queries of a step, for fitting gates (fit/fit.h). Without
 * entry i, a head's output at query t moves by r g_t (o_t - v_i), r = a / (1 - a), with a the
 * attention of t to i (window, cap and sinks included), o_t the mean of the values and g_t the
 * sigmoids that the model multiplies it by, number by number (1 where it has no such gates). The
 * worth of i to t is
 *
 *   factor_t  sum over the KV head's query heads of  r^2 |W_h g_t (o_t - v_i)|^2
 *
 * W_h: the columns of the output projection that belong to the query head. 1 - a is at least
 * KERN_WORTH_REST. With G = W_h' W_h and without gates the square is o'Go - 2 o'Gv + v'Gv; by
 * rounding it may be below 0 and then counts as 0. With gates every query has its own square form,
 * so G is multiplied with each difference. With latent attention v_i is the product of up_v of the
 * query head and what is cached; so every query head has values of its own, as many as it has
 * outputs.
 *
 * The operation is kern_ops.worth. It is called after attend of the layer, with the same qkv, batch
 * and options (also where the rows are queries alone, of a layer that reads another's entries);
 * `heads` is what W is multiplied with. The step has one span, of whole windows, whose sequence
 * evicted nothing and was not shifted: the index of an entry is its position. Rows that see each
 * other (kern_given.together) see what lies behind them as in attention. It waits for its result.
 * ERR_NOMEM changes nothing. Threads and promises are those of the other layer operations.
 */
#ifndef KEEPD_KERNELS_WORTH_H
#define KEEPD_KERNELS_WORTH_H

#include "kernels/kern.h"

#define KERN_WORTH_REST 0.01f

struct kern_worth {
    const struct kern_weight *o;      /* output projection [d_model, heads_q * D] */
    const struct kern_latent *latent; /* NULL: values are the cache's. D is dim_v with it */
    const float *gates;               /* [rows, heads_q * D] backend memory, before the sigmoid;
                                         NULL: there are none */
    const int32_t *entries;           /* [count] positions, ascending */
    int count;
    int window;           /* queries whose worths are added up */
    const float *factors; /* [rows] host memory */
    float *out; /* [rows / window][heads_kv][count] host memory. Entries that are not older
                   than the whole window get 0 */
};

#endif
