/* Layers that remember a state of constant size instead of entries: gated delta rules and
 * Mamba-2. */
#ifndef KEEPD_KERNELS_KERN_RECURRENT_H
#define KEEPD_KERNELS_KERN_RECURRENT_H

#define KERN_TAPS_MAX       16  /* largest width of a short convolution, from 2 */
#define KERN_STATE_ROWS_MAX 256 /* largest kern_delta.dim_k and kern_mamba.dim_state */
#define KERN_STATE_COLUMNS  16  /* columns of a state's matrix that lie side by side */

/* A gated delta rule (arXiv 2412.06464). Every key head has queries and keys for heads_v / heads_k
 * value heads, which follow each other. */
struct kern_delta {
    int heads_k, heads_v; /* heads of the model */
    int dim_k, dim_v;     /* dim_k: a multiple of 4 */
    int width;            /* tokens that a convolution sees */
    /* Backend memory, of the model. Channels: queries, keys, values of all heads. */
    const float *taps;  /* [channels, width] */
    const float *decay; /* [heads_v], negative */
    const float *bias;  /* [heads_v] */
    const float *norm;  /* [dim_v] */
    float eps;          /* the norm's */
};

/* Mamba-2 (arXiv 2405.21060). Heads of a group, which follow each other, have B and C together. */
struct kern_mamba {
    int heads, groups; /* the whole model has, on all ranks together */
    int dim;           /* numbers of a head */
    int dim_state;     /* numbers of B and of C; a multiple of 4 */
    int width;         /* tokens that a convolution sees */
    /* Backend memory, of the model. Channels: x of all heads, then B, then C of all groups. */
    const float *taps;      /* [channels, width] */
    const float *conv_bias; /* [channels], or NULL */
    const float *decay;     /* [heads], negative */
    const float *bias;      /* [heads] */
    const float *skip;      /* [heads] */
    const float *norm;      /* [heads * dim], or NULL: there is none */
    float eps;              /* the norm's */
};

/* Blocks of columns of a state's matrix that has `columns` of them, the last one padded. */
static inline int kern_state_blocks(int columns) {
    return (columns + KERN_STATE_COLUMNS - 1) / KERN_STATE_COLUMNS;
}

/* The numbers of a state that belong to a key head: its channels of width - 1 numbers, the oldest
 * first, then its value heads' matrices. */
static inline int kern_delta_head_floats(const struct kern_delta *delta) {
    const int shared = delta->heads_v / delta->heads_k;
    return (delta->width - 1) * (2 * delta->dim_k + shared * delta->dim_v) +
           shared * kern_state_blocks(delta->dim_v) * KERN_STATE_COLUMNS * delta->dim_k;
}

/* The numbers of a state that belong to B's and C's channels, width - 1 for each, the oldest first,
 * and to a head: those of its channels, then its matrix. */
static inline int kern_mamba_shared_floats(const struct kern_mamba *mamba) {
    return 2 * mamba->groups * mamba->dim_state * (mamba->width - 1);
}
static inline int kern_mamba_head_floats(const struct kern_mamba *mamba) {
    return (mamba->width - 1) * mamba->dim +
           kern_state_blocks(mamba->dim) * KERN_STATE_COLUMNS * mamba->dim_state;
}

#endif
