/* Opens the draft model (engine/steps/drafter.h): its tokens are compared with the model's, its
 * weights are loaded, and its caches are sized, before those of the model are. */
#ifndef KEEPD_ENGINE_DRAFT_MODEL_H
#define KEEPD_ENGINE_DRAFT_MODEL_H

#include "engine/engine_int.h"

/* Opens the draft model for every replica, or only checks it if the options say so; does nothing if
 * there is none. The model must be open. Faults in the draft model's files name the field
 * "draft-model". */
int draft_model_open(struct engine *engine, struct fault *fault);
void draft_model_close(struct replica *replica);
/* Returns what a replica's scheduler has to know about the draft model. */
struct drafter_options draft_model_options(const struct engine *engine,
                                           const struct replica *replica);

/* Compares the tokens of two tokenizers: ERR_INVALID names the first that differs. */
int draft_model_compare(const struct tok *tok, const struct tok *draft, struct fault *fault);

#endif
