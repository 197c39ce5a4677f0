/* Opens the encoder of pictures beside the model: its backend, its weights, and the place for what
 * it has encoded. It computes on the CPU, in one rank, on its replica's thread and with threads of
 * its own, so what it gives depends neither on the model's ranks nor on its device, a GPU, which
 * gets the encoded rows. */
#ifndef KEEPD_ENGINE_ENCODER_H
#define KEEPD_ENGINE_ENCODER_H

#include "engine/engine_int.h"
#include "engine/steps/pictures.h"

/* Opens those of all replicas, if the model has one, and fills in e->encoder. With check_only
 * nothing can be encoded. Faults are of the option "mmproj". A directory whose encoder cannot be
 * used is served without it, with a warning: its texts do not need it. */
int encoder_open(struct engine *e, struct fault *fault);
void encoder_close(struct encoder *encoder);

/* The text model beside which an encoder is opened, and what both are asked for. */
struct encoder_side {
    const struct engine_options *options;
    const struct model *model;
};
/* Opens an encoder without an engine. On failure *out is empty, and the fault names a file, a field
 * or the option "mmproj". */
int encoder_open_alone(const struct encoder_side *side, struct encoder *out, struct fault *fault);

/* Returns what the replica's scheduler needs; all 0: there is none. */
struct pictures_options encoder_options(const struct engine *e, const struct replica *replica);
/* Writes the ids of rows of a tile: engine_picture_ids. */
void encoder_write_ids(const struct vision *encoder, const struct picture *picture,
                       const struct picture_rows *rows, int32_t *ids);

#endif
