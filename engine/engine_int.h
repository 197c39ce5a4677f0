/* The engine's own state, for the files that implement engine/engine.h: open.c fills it in, and
 * engine.c uses it. Everything but `entered` is constant from the end of engine_open to
 * engine_close; what changes has its own lock or is atomic (replica.h, constraint.h). */
#ifndef KEEPD_ENGINE_ENGINE_INT_H
#define KEEPD_ENGINE_ENGINE_INT_H

#include "engine/adapters.h"
#include "engine/backend.h"
#include "engine/engine_options.h"
#include "engine/replica.h"
#include "engine/steps/constraint.h"
#include "text/text.h"

/* The caches of the draft model; all 0: there is none. */
struct draft_plan {
    bool is_block;     /* a block of the model's own files (model_has_block) */
    int texts, places; /* texts that a replica's one has at once, tokens of each */
    int64_t text_pages, page_bytes;
    int64_t bytes; /* memory of one replica's cache */
};

/* The encoder of pictures; all 0: there is none. */
struct encoder_plan {
    int64_t kept_bytes;   /* encoded tiles that a replica keeps, at most */
    int64_t bytes;        /* memory of one replica's tiles and activations */
    int64_t weight_bytes; /* all replicas' together */
};

struct engine {
    struct engine_options options;
    struct engine_info info;
    char *model_dir, *draft_path; /* info.model_dir, info.draft_model; owned */
    uint8_t space_key[16];
    struct text text;
    int32_t ends[ENGINE_ENDS_MAX]; /* the tokens that end an answer */
    int end_count;
    int *layer_heads;              /* info.layer_heads; owned */
    struct engine_prompt *prompts; /* info.prompts; owned, without their texts */
    struct draft_plan draft;
    struct encoder_plan encoder;
    struct constraint_table constraints;
    struct adapter_table adapters;
    struct replica_common common;
    int entered;              /* places taken by jobs that are not submitted yet; loop thread */
    struct replica *replicas; /* [replica_count] */
    int replica_count;
};

/* ---- options.c ---- */

/* Checks what needs no model; a fault names its option. */
int engine_options_check(const struct engine_options *options, struct fault *fault);
enum quantization engine_quantization(const struct engine_options *options);
/* Returns whether adapters may be loaded after the start. */
bool engine_may_load_adapters(const struct engine_options *options);
/* Returns the backend that the options ask for. */
struct backend_options engine_backend(const struct engine_options *options, int replicas);
/* Returns the model that the options ask for, without the sizes of a step. */
struct model_options engine_model_options(const struct engine_options *options);

#endif
