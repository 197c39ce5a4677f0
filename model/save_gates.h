/* Writes a gates file (model/gates.h) of type rg, in which every head has its own row of w_last. */
#ifndef KEEPD_MODEL_SAVE_GATES_H
#define KEEPD_MODEL_SAVE_GATES_H

#include "model/gates.h"
#include "model/save_files.h"

struct save_gates {
    /* type rg, width, layers and heads; the other members if they are known */
    struct gates_header header;
    int d_model;
    /* Writes the numbers of one layer: w1 [width][d_model], b1 [width], last [heads][width], bias
     * [heads]. */
    void (*layer)(void *arg, int layer, float *w1, float *b1, float *last, float *bias);
    void *arg;
};

/* Writes the new file: w1 in bf16, the rest in float32. ERR_NOMEM, ERR_IO. */
int save_gates(const struct save_files *files, const struct save_gates *gates, struct fault *fault);

#endif
