/* Opens the draft model (engine/steps/drafter.h): its tokens are compared with the model's, its
 * weights are loaded, and its caches are sized, before those of the model are. */
#ifndef KEEPD_ENGINE_DRAFT_MODEL_H
#define KEEPD_ENGINE_DRAFT_MODEL_H

#include "engine/engine_int.h"

/* Opens it for every replica, or checks it where the options say so; does nothing where there is
 * none. The model is open. Faults of its files are in the field "draft-model". */
int draft_model_open(struct engine *engine, struct fault *fault);
/* Fills in what the scheduler of the replica has to know of it. */
struct drafter_options draft_model_options(const struct engine *engine,
                                           const struct replica *replica);

/* Compares the tokens of two tokenizers: ERR_INVALID names the first that differs. */
int draft_model_compare(const struct tok *tok, const struct tok *draft, struct fault *fault);

#endif
