/* Second moments of a matrix's inputs, and rounding that makes up for its own errors with them.
 *
 * The error of a product is sum over c of e[c] x[c], with e the errors of one output's weights and
 * x the inputs; its mean square is e' H e, where H[c][d] is the mean of x[c] x[d]. With
 * H = (I + U) D (I + U)', U strictly upper triangular and D diagonal, that is the sum over c of
 * D[c] (e[c] + sum over d < c of e[d] U[d][c])^2. So weights are rounded in order, and each after
 * the errors so far, times U, were added to it (GPTQ, arXiv 2210.17323; in this form QuIP, arXiv
 * 2307.13304). H is taken as zero between windows of MOMENTS_WINDOW inputs, which bounds memory
 * and time for wide matrices.
 *
 * Moments are [cols][MOMENTS_WINDOW] floats: row c has H[c][d] for the inputs d of its window up to
 * c, itself included. Pure. */
#ifndef KEEPD_KERNELS_MOMENTS_H
#define KEEPD_KERNELS_MOMENTS_H

#include "base/err.h"
#include "kernels/blocks.h"

#define MOMENTS_WINDOW 512 /* a multiple of KERN_BLOCK */
#define MOMENTS_DAMP   0.01f

struct cpu_team; /* kernels/cpu/team.h */

static inline size_t moments_bytes(int64_t cols) {
    return (size_t)cols * MOMENTS_WINDOW * sizeof(float);
}

/* The place in row c of the moments that belongs to c itself: the number of inputs before it in its
 * window. */
static inline int64_t moments_place(int64_t c) {
    return c % MOMENTS_WINDOW;
}

/* Adds the products of `rows` inputs x, [rows][cols], to the moments. The team computes columns in
 * parallel; the result does not depend on it. */
void moments_add(float *moments, int64_t cols, const float *x, int rows, struct cpu_team *team);

/* Replaces the moments by their factors: U[d][c] for d < c, and D[c] in the place of c.
 * MOMENTS_DAMP times the mean of H[c][c] is added to the diagonal first, so that every D is above 0
 * although few inputs were seen; moments that are all zero become D = 1, U = 0. */
void moments_factor(float *moments, int64_t cols, struct cpu_team *team);

/* As quantize_blocks to KERN_Q4M, but each weight makes up for the errors of those before it.
 * `factors`: of moments_factor, for m->cols inputs, a multiple of KERN_BLOCK. */
int moments_quantize(const struct kern_matrix *from, const float *factors, struct block *to,
                     struct cpu_team *team, struct fault *fault);

#endif
