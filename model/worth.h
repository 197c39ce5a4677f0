/* Measures what the cache entries of a text are worth to later queries, in one pass of the model
 * and without gradients: the square of the relative change of the residual stream when the entry is
 * missing (kernels/worth.h), so that entries of different layers and heads can be compared.
 * Relative to the stream behind attention: before the first layer it has the embeddings alone,
 * which can be so small that all entries outside this layer appear to be worth nothing. A layer
 * with a norm after attention (Gemma) divides the change by the norm of that norm's input and
 * multiplies it by that of its output; to first order this is what the norm does. Where layers read
 * the entries of another layer, an entry is worth the sum of what it is worth to each of them,
 * because it goes for all at once.
 *
 * The measurement watches the layer loop (struct model, watch), so it works for every family,
 * format of weights and format of the cache. Memory beside the model: the cache of one text, the
 * backend's (kernels/cpu/worth.c), a step's rows of activations, and the result. Nothing grows
 * with the square of the text.
 *
 * Thread: the one that uses the model. Results have the same bits for any number of threads. */
#ifndef KEEPD_MODEL_WORTH_H
#define KEEPD_MODEL_WORTH_H

#include "model/model.h"

#define WORTH_WINDOW 64  /* queries whose worths are added up */
#define WORTH_ROWS   512 /* rows of a step, where no more must stay together: whole windows */

/* The measurement of one text. A window c > 0 is that of the queries [64 c, 64 (c + 1)), to which
 * all entries before it were measured; window 0 has none. Owned by the caller: worth_text_close. */
struct worth_text {
    int layers, heads, d_model; /* the model's; layers with entries of their own, KV heads */
    int32_t *layer_heads;       /* [layers] KV heads of each, at most `heads`; NULL: equally many */
    int tokens;                 /* the text's, whole windows */
    int windows;
    int entries;   /* measured, of every stream: the same positions */
    int32_t *at;   /* [entries] positions, ascending */
    uint16_t *x;   /* [layers][entries][d_model] bf16: what a gate reads */
    float *worths; /* [windows][streams][entries]; the streams of a layer are its KV heads */
};
/* The first stream of a layer; of layer `layers`, which is none, the number of all streams. */
int worth_text_stream(const struct worth_text *text, int layer);
/* The KV heads of the layers of a text, for layer_heads, owned by the caller; NULL: equally many.
 * `out` unchanged: ERR_NOMEM. */
int worth_layer_heads(const struct model_config *config, int32_t **out);
/* Allocates the arrays for the sizes of *text; after ERR_NOMEM some may be there. */
int worth_text_alloc(struct worth_text *text);
void worth_text_free(struct worth_text *text); /* the arrays alone */
void worth_text_close(struct worth_text *text);
/* Bytes of a text's result. */
size_t worth_text_bytes(const struct model_config *config, int tokens, int entries);

struct worth_options {
    int tokens;              /* most tokens of a text */
    int entries;             /* to measure in a text, at most */
    int rows;                /* most rows of a step: whole windows */
    enum kern_dtype kv_type; /* the cache's */
};

struct worth;

/* Opens the cache of the model's backend `kern`, which must not have one. `model`, opened for steps
 * of `rows` rows or more and without gates, outlives the result. ERR_UNSUPPORTED: the backend
 * does not measure. */
int worth_open(struct kern *kern, struct model *model, const struct worth_options *options,
               struct worth **out, struct fault *fault);
void worth_close(struct worth *worth);

/* A text. The members but `tokens` and `count` are those of struct kern_batch, with the text's
 * tokens as rows: what pictures need. */
struct worth_input {
    const int32_t *tokens; /* [count] below the vocabulary's size, also in rows that are given */
    int count;
    const struct kern_place *places; /* [count], or NULL */
    const struct kern_given *given;  /* [given_count] ascending */
    int given_count;
};

/* Returns how many tokens of a text are measured: whole windows from the first one on, which part
 * no rows that see each other. */
int worth_tokens(const struct worth_input *input);

/* Measures worth_tokens of a text, at least two windows of them. Entries are drawn evenly by
 * `seed`. *out is closed by the caller after success only. ERR_NOMEM, ERR_INVALID (a text that is
 * too short, or rows that see each other and do not fit a step) or what the backend says. */
int worth_measure(struct worth *worth, const struct worth_input *input, uint64_t seed,
                  struct worth_text *out, struct fault *fault);

#endif
