/* The loader of weights, for its files: load.c (what is loaded, and vectors), load_matrix.c
 * (matrices), loader.c (what both need). No other file includes this. */
#ifndef KEEPD_MODEL_LOADER_H
#define KEEPD_MODEL_LOADER_H

#include "model/internal.h"
#include "model/rows.h"
#include "model/tensors.h"
#include "model/weights.h"

/* Memory that is kept from one matrix to the next and only grows: touching fresh memory takes as
 * long as computing its content. */
struct room {
    char *data;
    size_t bytes;
};

/* The source of tensors: mapped files or, without any, a seeded generator. */
struct loader {
    struct model *model;
    const struct model_options *options;
    const struct weights *weights; /* NULL: random */
    enum naming naming;            /* how the files name tensors */
    uint64_t random;
    struct cpu_team *team; /* computes what the files do not have; NULL: nothing is computed */
    struct room codes;     /* a matrix that was rounded, until the backend has it */
    struct room rows;      /* rows that must be changed before the backend takes them */
    struct rows_reader readers[SLOT_PARTS_MAX]; /* for a slot's matrices that become blocks */
    bool *used; /* [tensors] GGUF: which tensors were read; else NULL */
    int *order; /* [head_dim] for each row of a head of q or k, its row in the file; NULL: the same
                   row */
    int expert; /* the expert whose matrices are being loaded */
    size_t read, total; /* bytes of the files, for progress */
    struct fault *fault;
};

/* ---- loader.c ---- */

/* Writes the name that the files have for the tensor. */
void load_name(const struct loader *loader, enum role role, int layer, char out[TENSOR_NAME_MAX]);
/* Returns memory for count * size bytes; NULL: there is none. */
char *load_room(struct room *room, size_t count, size_t size);
void load_room_free(struct room *room);
/* Finds a tensor and checks its shape. `cols` 0: it is a vector of `rows` numbers. `experts` above
 * 0: it holds so many matrices. `matrix`: any type that matrices have is allowed. */
int load_find_tensor(struct loader *loader, const char *name, int experts, int64_t rows,
                     int64_t cols, bool matrix, const struct tensor **out);
/* Notes that a tensor of a GGUF file is used. NULL is allowed. */
void load_note_used(struct loader *loader, const struct tensor *tensor);
/* Reports progress; the backend received `bytes` more. ERR_STOPPED: nobody wants the rest. */
int load_report(struct loader *loader, size_t bytes);
/* Returns the order of the rows of a head of this role; NULL: that of the files. */
const int *load_order(const struct loader *loader, enum role role);
/* Refuses a tensor because this element is no finite number. */
int load_refuse_element(struct loader *loader, const char *name, int64_t element);

/* ---- load_matrix.c ---- */

/* Loads a slot's tensors as one matrix: they have the same columns, and their rows are joined. */
int load_matrix(struct loader *loader, int layer, const struct slot *slot,
                struct kern_weight **out);
/* Loads a matrix for each expert. */
int load_experts(struct loader *loader, int layer, const struct slot *slot,
                 struct kern_weight ***out);
/* Loads a matrix for each head of a layer. */
int load_head_matrices(struct loader *loader, int layer, const struct slot *slot,
                       struct kern_weight ***out);

#endif
