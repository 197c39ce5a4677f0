/* Pictures in the texts of a fit: tiles to rows of embeddings, for the measurement of one text at a
 * time.
 *
 * Thread: the one that fits. */
#ifndef KEEPD_ENGINE_FIT_PICTURES_H
#define KEEPD_ENGINE_FIT_PICTURES_H

#include "engine/encoder.h"
#include "engine/engine_fit.h"
#include "model/worth.h"

struct fit_pictures {
    struct encoder encoder;
    int width;       /* numbers of a row of the encoder */
    bool dimensions; /* places of tokens have three dimensions */
    /* The present text, which the last fit_pictures_encode has made. */
    int32_t *tokens;
    struct kern_place *places;
    struct kern_given *given;
    float *rows; /* [rows that show pictures, width] */
};

/* Opens the encoder of a model's pictures. On failure nothing is open. */
int fit_pictures_open(const struct encoder_side *side, struct fit_pictures *out,
                      struct fault *fault);
void fit_pictures_close(struct fit_pictures *pictures);

/* Replaces the ids of the text's rows that show pictures by those that an engine with this encoder
 * has (engine_picture_ids). */
void fit_pictures_write_ids(const struct fit_pictures *pictures, struct engine_fit_text *text);

/* Encodes the tiles of a text. The input is valid until the next call or fit_pictures_close.
 * Memory: the rows of one text's tiles, beside the encoder. ERR_NOMEM, or what the encoder says. */
int fit_pictures_encode(struct fit_pictures *pictures, const struct engine_fit_text *text,
                        struct worth_input *input);

#endif
