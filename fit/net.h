/* The gates while they are fitted: one network for each layer, in the form of model/gates.h (type
 * rg, every head its own row of w_last).
 *
 *   h = silu(W1 s x + b1)     s: one number for each layer, so that inputs are about 1 in size;
 *   z = last[head] . h + c[head]    saving multiplies W1 by it
 *   rate = log(-log_beta) = log(log(1 + exp(-z)))
 *
 * With horizon 1 an entry's score in `global` is age * log_beta (kernels/score.h), so entries rank
 * by log(age) + rate, the lowest first: the logarithm makes it a sum.
 *
 * Owner: fit/fit.c. Threads: functions of different layers may run at once; each has its own part
 * of every array. Sums are made in one order, so results do not depend on threads. */
#ifndef KEEPD_FIT_NET_H
#define KEEPD_FIT_NET_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

#define FIT_WIDTH 64 /* width of the hidden layer, a multiple of 16 */

struct fit_net {
    int layers, heads, d_model;
    const int32_t *layer_heads; /* [layers] heads that are computed, borrowed; NULL: all */
    int inputs;                 /* d_model, rounded up to a multiple of 16: the last ones are 0 */
    size_t each; /* numbers of a layer: W1 [inputs][WIDTH], b1 [WIDTH], last [heads][WIDTH], c */
    float *values, *slopes; /* [layers][each] the numbers, and the gradient of the loss */
    float *mean, *square;   /* [layers][each] Adam's moments */
    float *scale;           /* [layers] s */
};

/* Random W1 and last, every rate near -`bias`; `scale` is 1. ERR_NOMEM leaves nothing behind. */
int fit_net_open(struct fit_net *net, int layers, int heads, int d_model, float bias,
                 uint64_t seed);
void fit_net_close(struct fit_net *net);

/* Entries rounded up: rows of the arrays below. */
static inline int fit_net_rows(int entries) {
    return (entries + 15) / 16 * 16;
}
/* Floats of scratch memory for the two functions below. */
size_t fit_net_scratch(const struct fit_net *net, int entries);

/* The rates of a layer's entries. x: [entries][d_model] bf16; hidden: [rows][WIDTH], W1 s x + b1,
 * for fit_net_learn; rates: [heads][entries]. */
void fit_net_rates(const struct fit_net *net, int layer, const uint16_t *x, int entries,
                   float *scratch, float *hidden, float *rates);
/* Adds to the layer's slopes; rate_slopes: [heads][entries], of the loss by the rates. */
void fit_net_learn(struct fit_net *net, int layer, const uint16_t *x, int entries, float *scratch,
                   const float *hidden, const float *rate_slopes);
/* One step of Adam (arXiv 1412.6980) with betas 0.9 and 0.98; step counts from 1. Clears slopes. */
void fit_net_step(struct fit_net *net, int layer, float speed, int step);

/* A layer's numbers for a file (model/save_gates.h): W1, [WIDTH][d_model], is multiplied by s. */
void fit_net_numbers(const struct fit_net *net, int layer, float *w1, float *b1, float *last,
                     float *c);

#endif
