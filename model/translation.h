/* The translation of a GGUF file's metadata to the words of config.json, in parts:
 *
 *   config_gguf.c       the table of architectures, and the whole
 *   translation.c       how a value is found, checked and set
 *   translate_layers.c  kinds of layers: widths, KV heads, windows
 *   translate_state.c   recurrent states; latent attention
 *   translate_rope.c    heads and the rotation
 *   translate_tokens.c  the tokens that end a text */
#ifndef KEEPD_MODEL_TRANSLATION_H
#define KEEPD_MODEL_TRANSLATION_H

#include <cjson/cJSON.h>

#include "base/gguf.h"
#include "model/config_family.h"
#include "model/tensors.h"
#include "model/weights.h"

#define ARCHITECTURE_MAX 32
#define TEXT_MAX         80 /* a digest in hex fits */
#define KEY_MAX          128
#define FACTORS_MAX      512 /* half of the largest head */

/* Keys that several parts read. */
#define KEY_KV_HEADS ".attention.head_count_kv"
#define KEY_WIDTH    ".feed_forward_length"
#define KEY_SHARED   ".attention.shared_kv_layers"
#define KEY_EACH     ".embedding_length_per_layer_input"

enum { GATING_SOFTMAX = 1, GATING_SIGMOID, GATING_SOFTMAX_OF_CHOSEN }; /* llama.cpp's numbers */

/* Architectures by the names that files and config.json (model_type) have for them. */
struct architecture {
    const char *name, *type;
    const char *mixture;  /* the model_type of a file with experts; NULL: the same */
    const char *windowed; /* the model_type of a file with windows; NULL: the same */
    bool permuted;        /* converters put the two numbers that a rotation turns side by side */
    bool rope_told;    /* config.json must state its rotation, a file with a plain one need not */
    bool windows_said; /* a file without a window has none, whatever its family's default */
    const char *logit_scale;   /* config.json's name of a factor on logits; NULL: it is refused */
    bool yarn_untruncated;     /* config.json says so ("truncate": false), files do not */
    bool norm_after_attention; /* see struct model_config */
    bool unnormalised;         /* the weights of the chosen experts are not divided by their sum */
    bool sections;             /* rotations have sections for pictures, alike in text */
    bool sigmoid;              /* sigmoids of a router's logits decide, not their softmax */
    bool qk_norm_told;         /* files may have norms of queries and keys */
    bool still_globals;        /* layers without a window do not rotate */
    const char *headless;      /* the type of layers without key/value heads, "layer_types" */
    bool delta;                /* files may list layers with a recurrent state */
    bool mamba;                /* layers of Mamba-2 */
    bool falcon;               /* Mamba-2 beside attention in every layer */
    bool nemotron;             /* layers have either a mixer or a network; none rotates */
    bool kinds;                /* heads and widths of networks differ by kind of layer */
    bool latent;               /* latent attention */
    bool encoder;
    bool both_ways;  /* a family that otherwise writes */
    int heads_scale; /* Gemma: with so many layers, queries are scaled by the mean size of a
                        head in the embeddings, else by the head's own (llama.cpp's rule) */
};

/* How a value is read. */
enum kind {
    KIND_INT,
    KIND_NUM,
    KIND_MORE, /* a count that means something where it is above 0 */
    KIND_TOKEN /* a token's id, or none */
};

struct row {
    const char *gguf; /* the key after the architecture; beginning with a letter: the whole key */
    const char *json;
    enum kind kind;
};

struct translation {
    const struct architecture *row;
    const struct weights *weights;
    const struct gguf *gguf;
    char architecture[ARCHITECTURE_MAX];
    cJSON *config, *generation;
    struct fault *fault;
};

/* Keys begin with a dot where the architecture's name is in front of it, which translation_key
 * writes. What a file does not have leaves *value as it is. */
const char *translation_key(const struct translation *t, const char *name, char out[KEY_MAX]);
bool translation_has(const struct translation *t, const char *name);
int translation_int(const struct translation *t, const char *name, int64_t *value);
int translation_more(const struct translation *t, const char *name, int64_t *value);
int translation_num(const struct translation *t, const char *name, double *value);
int translation_text(const struct translation *t, const char *name, char out[TEXT_MAX]);
int translation_list(const struct translation *t, const char *name, enum gguf_type type,
                     const struct gguf_value **list);
const struct tensor *translation_tensor(const struct translation *t, enum role role);
bool translation_has_tensor(const struct translation *t, const char *name);

int translation_set(const struct translation *t, cJSON *object, const char *name, double value);
bool translation_add_id(cJSON *list, int64_t id);
int translation_copy(const struct translation *t, const struct row *rows, size_t count,
                     cJSON *object);
#define COPY_ROWS(t, rows, object) translation_copy(t, rows, sizeof(rows) / sizeof(rows)[0], object)
int translation_no_memory(const struct translation *t);

/* Each adds fields to t->config. */
int translate_widths(const struct translation *t);
int translate_kv_heads(const struct translation *t);
int translate_windows(const struct translation *t);
int translate_kinds(const struct translation *t);
int translate_delta(const struct translation *t);
int translate_falcon(const struct translation *t);
int translate_granite(const struct translation *t);
int translate_nemotron(const struct translation *t);
int translate_latent(const struct translation *t);
bool translate_latent_sigmoid(const struct translation *t);
const char *translate_latent_type(const struct translation *t); /* a model_type */
int translate_head(const struct translation *t);
int translate_rope(const struct translation *t);
int translate_ends(const struct translation *t);

#endif
