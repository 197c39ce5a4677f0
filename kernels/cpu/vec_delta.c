/* Gated delta rules and Mamba-2 over simd.h: one token in 16 columns of a state. */
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* Sums that grow side by side, because one would wait for itself. */
#define CHAINS 4

static v16 sum_of(const v16 *chains) {
    return v16_add(v16_add(chains[0], chains[1]), v16_add(chains[2], chains[3]));
}

void VEC(delta)(float *state, int dim, const struct cpu_delta_token *token, float *out) {
    const float *k = token->k, *q = token->q;
    const v16 decay = v16_set(token->decay), zero = v16_set(0);
    v16 chains[CHAINS] = {zero, zero, zero, zero};
    for (int i = 0; i < dim && token->corrects; i += CHAINS)
        for (int c = 0; c < CHAINS; c++)
            chains[c] =
                v16_fma(v16_set(k[i + c]), v16_load(state + (ptrdiff_t)16 * (i + c)), chains[c]);
    const v16 known = v16_mul(decay, sum_of(chains));
    const v16 change = v16_mul(v16_sub(v16_load(token->v), known), v16_set(token->rate));
    for (int c = 0; c < CHAINS; c++) chains[c] = zero;
    for (int i = 0; i < dim; i += CHAINS)
        for (int c = 0; c < CHAINS; c++) {
            float *row = state + (ptrdiff_t)16 * (i + c);
            const v16 next = v16_fma(v16_set(k[i + c]), change, v16_mul(decay, v16_load(row)));
            v16_store(row, next);
            chains[c] = v16_fma(v16_set(q[i + c]), next, chains[c]);
        }
    v16_store(out, sum_of(chains));
}
