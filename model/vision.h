/* Encoders of pictures: from a tile's pixels to the rows of embeddings that stand in a prompt in
 * place of tokens'.
 *
 * An encoder is a transformer over the square patches of one tile (Dosovitskiy et al., "An image is
 * worth 16x16 words", arXiv 2010.11929; SigLIP, arXiv 2303.15343): a product of each patch's
 * pixels, learned positions or rotations by rows and columns, layers with norms in which every
 * patch sees all others, or those of its window. A merger joins squares of patches and multiplies
 * them into the width of the text model (Idefics3, arXiv 2408.12637, section 3; SmolVLM, arXiv
 * 2504.05299; Qwen2.5-VL, arXiv 2502.13923, section 2.1; Mistral Small 3.1), or their means (Gemma
 * 3, arXiv 2503.19786, section 2.1), or each patch is a row (Pixtral, arXiv 2410.07073). Further
 * mergers may give rows for the text model's first layers (DeepStack, arXiv 2406.04334; Qwen3-VL).
 * Families are data: struct vision_config.
 *
 * A tile's rows depend on that tile alone, so they are the same bits whenever and beside whatever
 * they are computed. The work of a tile is divided into parts of about equal cost, so that steps of
 * the text model can go on between them.
 *
 * Thread: that of its backend, which is another instance than the text model's: one rank, with a
 * cache of its own for one layer of one tile. */
#ifndef KEEPD_MODEL_VISION_H
#define KEEPD_MODEL_VISION_H

#include <stdbool.h>

#include "base/err.h"
#include "base/gguf.h"
#include "base/sha256.h"
#include "kernels/kern.h"
#include "model/model.h"
#include "picture/picture.h"

#define VISION_LAYERS_MAX 512
#define VISION_DEEP_MAX   8

/* Families by the names of their tensors. */
enum vision_naming {
    VISION_GGUF,
    VISION_IDEFICS3,
    VISION_GEMMA3,
    VISION_PIXTRAL,
    VISION_QWEN2_5,
    VISION_QWEN3,
    VISION_NAMINGS
};

#define VISION_WINDOW_MAX 1024 /* patches of a window */

struct vision_config {
    struct picture_form form;
    bool gguf; /* names of tensors are those of a GGUF file of type mmproj */
    enum vision_naming naming;
    bool permuted; /* GGUF files have rows of queries and keys in the order of pairs */
    int layers, width, ff, heads;
    int patch;  /* pixels of a patch's side */
    int frames; /* a patch has weights for so many frames of a video: a picture is all of them */
    bool patch_bias;
    bool patch_norm; /* a norm is in front of the first layer */
    int table_side;  /* positions of a side in the table of positions; 0: there is none */
    bool blends;     /* positions are blended from the table's four nearest */
    float theta;     /* rotations by a patch's row and column: base of the frequencies; 0: none */
    bool between;    /* frequencies of columns lie between those of rows; else they are the same */
    int window;      /* rows of embeddings of a window's side; 0: patches see all others */
    bool full[VISION_LAYERS_MAX]; /* layers in which patches see all others nevertheless */
    bool rms;                     /* norms are RMSNorm; else LayerNorm */
    bool gated;                   /* feed-forward networks have gates */
    bool layer_bias;              /* products of layers have biases */
    enum kern_activation activation;
    int merge;            /* patches of a side that one row of embeddings joins */
    bool pools;           /* the row is their mean with an RMSNorm; else they stand side by side */
    bool merger_products; /* mergers are two products with GELU in between; else one, without bias
                           */
    bool projects;        /* the two products have the text model's width in between. In front of
                             them is another one, from all patches of a row to the width of one;
                             without it `merge` is 1 */
    float norm_eps;       /* with `projects`: added in the norm in front of these */
    int text_width;       /* numbers of an embedding of the text model */
    int deep; /* further embeddings of a row, for the text model's first layers; see kern_given */
    int deep_layers[VISION_DEEP_MAX]; /* [deep] layers behind which these are made, ascending */
    enum model_axes axes;             /* the text model has these */
    float eps;                        /* added in norms */
};

/* Reads what a directory says about pictures (config.json, preprocessor_config.json or
 * processor_config.json). form.kind is PICTURE_NONE where the model is of a family without pictures
 * here. text_width is left to the caller. Faults name the field, behind its file. */
int vision_config_of_directory(const char *dir, struct vision_config *out, struct fault *fault);
/* The same of a file of type mmproj; faults name the key. */
int vision_config_of_gguf(const struct gguf *gguf, struct vision_config *out, struct fault *fault);
/* Returns which row of the table of positions the patch number `at` of `side` has: transformers,
 * Idefics3VisionEmbeddings, in float32. With `pools` its own. */
int vision_position(const struct vision_config *config, int at, int side);

/* Numbers of a row of embeddings. */
static inline int vision_row_width(const struct vision_config *config) {
    return config->text_width * (1 + config->deep);
}

struct vision;

struct vision_options {
    const char *dir;    /* the model, a directory or a GGUF file */
    const char *mmproj; /* GGUF file with the encoder; NULL or "" = the directory has it */
    int text_width;
    int threads;                /* threads that load; 0 = the cores this process may use */
    int64_t part_cost;          /* about so many multiplications are one part; 0 = the default */
    bool check_only;            /* names, shapes and types; nothing can be encoded */
    const struct vision *owner; /* an open one, which outlives this: its weights are shared. NULL:
                                   they are loaded */
};

/* *out is NULL without a fault if the directory's model sees no pictures here. Loads the weights
 * into the backend and opens the backend's cache. Errors name field, tensor or file. */
int vision_open(struct kern *kern, const struct vision_options *options, struct vision **out,
                struct fault *fault);
void vision_close(struct vision *vision); /* NULL allowed */
const struct vision_config *vision_config(const struct vision *vision);
/* SHA-256 of the weights and of the numbers that they are used with. */
const uint8_t *vision_identity(const struct vision *vision);
size_t vision_weight_bytes(const struct vision *vision);
size_t vision_step_bytes(const struct vision *vision); /* activations and cache of a tile */

/* Begins a tile, whatever was encoded of another one. */
int vision_begin(struct vision *vision, const struct picture *picture, int tile);
/* Does the next part. *done: it was the last one, and `out`, host memory, has the tile's rows,
 * [picture->tile_tokens, vision_row_width]. An error is the backend's. */
int vision_advance(struct vision *vision, float *out, bool *done);

#endif
