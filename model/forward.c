/* The layer loop: computes one step of the model. */
#include <math.h>

#include "base/check.h"
#include "model/internal.h"

/* `bias` NULL: none. */
static void norm_rows(struct model *model, float *y, const float *x, const float *weight,
                      const float *bias, int rows) {
    const struct model_config *c = &model->config;
    const struct kern_ops *ops = model->kern->ops;
    if (c->layer_norms)
        ops->layer_norm(model->kern, y, x, weight, bias, rows, c->d_model, c->rms_eps);
    else
        ops->rms_norm(model->kern, y, x, weight, rows, c->d_model, c->rms_eps);
}

/* Returns the norm of x if the family has one, else x itself. */
static const float *normed(struct model *model, const float *x, const float *weight, int rows) {
    float *out = model->scratch.norm;
    if (!weight) return x;
    norm_rows(model, out, x, weight, NULL, rows);
    return out;
}

static void show(const struct model *model, int layer, enum role role, const float *inputs,
                 int rows) {
    if (model->watch) model->watch(model->watch_arg, layer, role, inputs, rows);
}

/* A product of a layer, and where adapters add theirs; ADAPTER_SITES: nowhere. */
struct layer_product {
    const struct kern_weight *weight;
    const float *bias; /* NULL: none */
    int layer;
    enum adapter_site site;
};

static void multiply_adapted(struct model *model, float *y, const float *x,
                             struct layer_product product, int rows, enum kern_matmul_mode mode) {
    struct kern *kern = model->kern;
    kern->ops->matmul(kern, y, x, product.weight, product.bias, rows, mode);
    if (product.site != ADAPTER_SITES) model_adapt(model, product.layer, product.site, y, x);
}

static struct kern_rope rope_of(const struct model_config *c, int layer) {
    const float *rotation = c->rotations[c->per_layer[layer].index];
    const struct kern_query_scale none = {0};
    return (struct kern_rope){.inv_freq = rotation ? rotation : c->inv_freq_none,
                              .axes = rotation == c->inv_freq ? c->axes : NULL,
                              .scale = !rotation || c->per_layer[layer].local ? 1 : c->rope_scale,
                              .query_scale = rotation ? c->query_scale : none,
                              .layer = c->per_layer[layer].index,
                              .queries = c->per_layer[layer].reads};
}

static void norm_and_rotate(struct model *model, int index, const struct kern_batch *batch) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    struct kern_rope rope = rope_of(c, index);
    rope.v_norm = layer->v_norm;
    const bool wide = c->qk_norm_wide;
    const float *q_norm = wide ? NULL : layer->q_norm, *k_norm = wide ? NULL : layer->k_norm;
    struct kern *kern = model->kern;
    float *qkv = model->scratch.qkv;
    if (wide) kern->ops->qk_norm(kern, qkv, layer->q_norm, layer->k_norm, c->rms_eps, batch);
    if (c->per_layer[index].rotated || q_norm)
        kern->ops->qk_rope(kern, qkv, q_norm, k_norm, c->rms_eps, &rope, batch);
}

struct kern_attend_options model_attend_options(const struct model *model, int index) {
    const struct model_config *c = &model->config;
    return (struct kern_attend_options){.sliding_window = c->per_layer[index].sliding_window,
                                        .scale = c->attend_scale,
                                        .cap = c->attend_cap,
                                        .sinks = model->layers[index].sinks,
                                        .both_ways = c->both_ways,
                                        .queries = c->per_layer[index].reads};
}

struct kern_latent model_latent(const struct model *model, int index) {
    const struct layer *layer = &model->layers[index];
    struct kern_latent latent = model->config.latent;
    latent.norm = layer->entry_norm;
    latent.up_k = layer->up_k;
    latent.up_v = layer->up_v;
    return latent;
}

/* Computes the queries and entries of latent attention into scratch.qkv. */
static void project_latent(struct model *model, int index, const float *x, int rows) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    const struct kern_latent latent = model_latent(model, index);
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const float *in = x;
    show(model, index, ROLE_LATENT_ENTRY, x, rows);
    if (layer->q_down) {
        kern->ops->matmul(kern, s->gates, x, layer->q_down, NULL, rows, KERN_SET);
        kern->ops->rms_norm(kern, s->gates, s->gates, layer->q_down_norm, rows, c->q_rank,
                            latent.eps);
        in = s->gates;
        show(model, index, ROLE_LATENT_Q_UP, in, rows);
    }
    kern->ops->matmul(kern, s->latent, in, layer->q_up, NULL, rows, KERN_SET);
    kern->ops->matmul(kern, s->gates, x, layer->entry, NULL, rows, KERN_SET);
    kern->ops->latent_in(kern, s->qkv, s->latent, s->gates, &latent, rows);
}

/* Appends the batch's entries to the layer's streams and computes attention into scratch.heads. */
static void step_attention(struct model *model, int index, const struct kern_batch *batch) {
    const struct layer *layer = &model->layers[index];
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const struct kern_attend_options attend = model_attend_options(model, index);
    const int stored = model->config.per_layer[index].index;
    const float *log_beta = NULL, *x = normed(model, s->x, layer->attn_norm, batch->rows);
    const bool latent = model->config.latent.rank > 0;
    show(model, index, ROLE_Q, x, batch->rows);
    if (latent)
        project_latent(model, index, x, batch->rows);
    else
        multiply_adapted(model, s->qkv, x,
                         (struct layer_product){layer->qkv, layer->qkv_bias, index, ADAPTER_QKV},
                         batch->rows, KERN_SET);
    if (layer->gate) {
        kern->ops->gate(kern, s->log_beta, x, layer->gate, batch->rows);
        log_beta = s->log_beta;
    }
    norm_and_rotate(model, index, batch);
    if (!attend.queries) kern->ops->write_kv(kern, stored, s->qkv, log_beta, batch);
    kern->ops->attend(kern, stored, latent ? s->latent : s->heads, s->qkv, batch, &attend);
    if (latent) {
        const struct kern_latent its = model_latent(model, index);
        kern->ops->latent_out(kern, s->heads, s->latent, &its, batch->rows);
    }
    if (layer->attn_gate) {
        kern->ops->matmul(kern, s->gates, x, layer->attn_gate, NULL, batch->rows, KERN_SET);
        kern->ops->open_gates(kern, s->heads, s->gates, batch->rows, q_width(&model->config, index),
                              false);
    }
    show(model, index, ROLE_O, s->heads, batch->rows);
}

/* Computes the inputs of the layer's recurrent states into scratch.qkv and, if the layer has rates,
 * into scratch.gates. */
static void project_states(struct model *model, int index, enum role role,
                           const struct kern_batch *batch) {
    const struct layer *layer = &model->layers[index];
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const float *x = normed(model, s->x, layer->attn_norm, batch->rows);
    show(model, index, role, x, batch->rows);
    kern->ops->matmul(kern, s->qkv, x, layer->state_in, NULL, batch->rows, KERN_SET);
    if (layer->state_rates)
        kern->ops->matmul(kern, s->gates, x, layer->state_rates, NULL, batch->rows, KERN_SET);
}

/* Copies the inputs of rows that peek, because the functions of the states overwrite theirs. */
static void keep_inputs(struct model *model, int index) {
    const struct model_config *c = &model->config;
    const struct peeked *peeked = &model->peeked;
    const int state = c->per_layer[index].state;
    struct kern *kern = model->kern;
    if (peeked->count == 0) return;
    kern->ops->gather_rows(kern, peeked->in[state], model->scratch.qkv, peeked->rows, peeked->count,
                           state_width(c, index));
    if (peeked->rates[state])
        kern->ops->gather_rows(kern, peeked->rates[state], model->scratch.gates, peeked->rows,
                               peeked->count, rates_width(c, index));
}

static void mix_conv(struct model *model, int index, const float *in,
                     const struct kern_batch *batch) {
    const struct model_config *c = &model->config;
    model->kern->ops->short_conv(model->kern, c->per_layer[index].state, model->scratch.mixed, in,
                                 model->layers[index].taps, c->d_model, c->conv_width, batch);
}

static void mix_delta(struct model *model, int index, float *in, float *rates,
                      const struct kern_batch *batch) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    struct kern_delta delta = c->delta;
    delta.taps = layer->taps;
    delta.decay = layer->decay;
    delta.bias = layer->state_bias;
    delta.norm = layer->state_norm;
    delta.eps = c->rms_eps;
    model->kern->ops->delta(model->kern, c->per_layer[index].state, model->scratch.mixed, in, rates,
                            &delta, batch);
}

static void mix_mamba(struct model *model, int index, float *in, float *rates,
                      const struct kern_batch *batch) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    struct kern_mamba mamba = c->mamba;
    mamba.taps = layer->taps;
    mamba.conv_bias = layer->conv_bias;
    mamba.decay = layer->decay;
    mamba.bias = layer->state_bias;
    mamba.skip = layer->skip;
    mamba.norm = layer->state_norm;
    model->kern->ops->mamba(model->kern, c->per_layer[index].state, model->scratch.mixed, in, rates,
                            &mamba, batch);
}

/* Updates the layer's recurrent states and computes their outputs into scratch.mixed. */
static void mix_states(struct model *model, int index, float *in, float *rates,
                       const struct kern_batch *batch) {
    switch (model->config.per_layer[index].mixer) {
    case MIXER_ATTENTION:
    case MIXER_NONE:
        break;
    case MIXER_CONV:
        mix_conv(model, index, in, batch);
        break;
    case MIXER_DELTA:
        mix_delta(model, index, in, rates, batch);
        break;
    case MIXER_MAMBA:
        mix_mamba(model, index, in, rates, batch);
        break;
    }
}

static void step_states(struct model *model, int index, const struct kern_batch *batch) {
    const enum mixer mixer = model->config.per_layer[index].mixer;
    struct scratch *s = &model->scratch;
    const enum role in = mixer == MIXER_CONV    ? ROLE_CONV_B
                         : mixer == MIXER_DELTA ? ROLE_DELTA_Q
                                                : ROLE_MAMBA_Z;
    const enum role out = mixer == MIXER_CONV    ? ROLE_CONV_OUT
                          : mixer == MIXER_DELTA ? ROLE_DELTA_OUT
                                                 : ROLE_MAMBA_OUT;
    project_states(model, index, in, batch);
    keep_inputs(model, index);
    mix_states(model, index, s->qkv, s->gates, batch);
    show(model, index, out, s->mixed, batch->rows);
}

static void note_peeked(struct model *model, const struct kern_batch *batch) {
    struct peeked *peeked = &model->peeked;
    peeked->count = 0;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        if (!span->peeks) continue;
        CHECK(peeked->count + span->count <= model->peek_rows);
        for (int32_t row = 0; row < span->count; row++)
            peeked->rows[peeked->count++] = span->row + row;
    }
}

void model_bring_states(struct model *model, const struct kern_span *spans, int count) {
    const struct model_config *c = &model->config;
    const struct peeked *peeked = &model->peeked;
    const struct kern_batch batch = {.spans = spans, .rows = peeked->count, .span_count = count};
    for (int i = 0; i < c->layers; i++) {
        if (!layer_has_state(&c->per_layer[i])) continue;
        const int state = c->per_layer[i].state;
        mix_states(model, i, peeked->in[state], peeked->rates[state], &batch);
    }
}

/* The norm of a branch; weight NULL: the family has none. */
struct post_norm {
    const float *weight, *bias;
};

/* Adds a product to the residual stream, after a norm of the product if the family has one, or
 * before a norm of the sum. */
static void add_branch(struct model *model, float *x, const float *in, struct layer_product product,
                       struct post_norm post_norm, int rows) {
    const struct model_config *c = &model->config;
    struct kern *kern = model->kern;
    float *branch = model->scratch.norm;
    if (!post_norm.weight || c->norms_of_sums) {
        multiply_adapted(model, x, in, product, rows, KERN_ADD);
        if (post_norm.weight) norm_rows(model, x, x, post_norm.weight, post_norm.bias, rows);
        return;
    }
    multiply_adapted(model, branch, in, product, rows, KERN_SET);
    kern->ops->add_norm(kern, x, branch, post_norm.weight, rows, c->d_model, c->post_eps);
}

/* Adds rows of a table to the embeddings: model->scratch.rows says which. */
static void add_table(struct model *model, const struct kern_weight *table, int rows) {
    const struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    kern->ops->embed(kern, s->norm, table, 1, s->rows, rows);
    kern->ops->add(kern, s->x, s->norm, rows, model->config.d_model);
}

/* Copies vector number `which` of each of the given rows to the backend's memory `to`. */
static int upload_given(struct model *model, float *to, const struct kern_given *given, int which) {
    const ptrdiff_t width = model->config.d_model, stride = (1 + given->deep) * width;
    const float *from = given->rows + which * width;
    struct kern *kern = model->kern;
    int rc = 0;
    if (given->deep == 0)
        return kern->ops->upload(kern, to, from, (size_t)(given->count * width) * sizeof *from);
    for (int k = 0; k < given->count && rc == 0; k++)
        rc = kern->ops->upload(kern, to + k * width, from + k * stride,
                               (size_t)width * sizeof *from);
    return rc;
}

/* Puts given rows in the place of embeddings. */
static int take_given(struct model *model, const struct kern_batch *batch) {
    const ptrdiff_t width = model->config.d_model;
    int rc = 0;
    for (int i = 0; i < batch->given_count && rc == 0; i++) {
        const struct kern_given *given = &batch->given[i];
        CHECK(given->deep < model->config.layers);
        rc = upload_given(model, model->scratch.x + given->row * width, given, 0);
    }
    return rc;
}

/* Adds the given rows' further vectors behind a layer. */
static int add_given_vectors(struct model *model, int layer, const struct kern_batch *batch) {
    const ptrdiff_t width = model->config.d_model;
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    for (int i = 0; i < batch->given_count; i++) {
        const struct kern_given *given = &batch->given[i];
        if (layer >= given->deep) continue;
        int rc = upload_given(model, s->norm, given, 1 + layer);
        if (rc) return rc;
        kern->ops->add(kern, s->x + given->row * width, s->norm, given->count, (int)width);
    }
    return 0;
}

/* The inputs of the first layer. */
static int step_embed(struct model *model, const struct kern_batch *batch) {
    const struct model_config *c = &model->config;
    const struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    kern->ops->embed(kern, s->x, model->embed, c->embed_scale, batch->tokens, batch->rows);
    for (int i = 0; i < batch->span_count && model->positions; i++)
        for (int k = 0; k < batch->spans[i].count; k++)
            s->rows[batch->spans[i].row + k] = c->position_first + batch->spans[i].pos + k;
    if (model->positions) add_table(model, model->positions, batch->rows);
    for (int i = 0; i < batch->span_count && model->types; i++) {
        const struct kern_span *span = &batch->spans[i];
        for (int k = 0; k < span->count; k++)
            s->rows[span->row + k] =
                c->type_rows > 1 && span->second > 0 && span->pos + k >= span->second;
    }
    if (model->types) add_table(model, model->types, batch->rows);
    if (model->embed_norm)
        norm_rows(model, s->x, s->x, model->embed_norm, model->embed_norm_bias, batch->rows);
    return take_given(model, batch);
}

/* Computes each layer's embeddings for the step's tokens: from a table of their own, plus a product
 * of the model's embeddings. */
static void step_each(struct model *model, const struct kern_batch *batch) {
    const struct model_config *c = &model->config;
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const float scale = c->each_norm_scale * sqrtf((float)c->each_embed);
    kern->ops->embed(kern, s->each, model->each_embed, scale, batch->tokens, batch->rows);
    kern->ops->matmul(kern, s->each_in, s->x, model->each_in, NULL, batch->rows, KERN_SET);
    kern->ops->add_norm(kern, s->each, s->each_in, model->each_in_norm, batch->rows * c->layers,
                        c->each_embed, c->rms_eps * (float)c->d_model);
}

/* Adds the branch of the layer's own embeddings (`each`: rows of them), and scales the layer's
 * output. */
static void end_layer(struct model *model, int index, float *x, const float *each, int rows) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    if (layer->each_gate) {
        kern->ops->matmul(kern, s->gate_up, x, layer->each_gate, NULL, rows, KERN_SET);
        kern->ops->glu_apart(kern, s->ff, s->gate_up, each + (ptrdiff_t)index * c->each_embed,
                             (int64_t)c->layers * c->each_embed, rows, c->each_embed,
                             c->activation);
        add_branch(model, x, s->ff,
                   (struct layer_product){layer->each_out, NULL, index, ADAPTER_SITES},
                   (struct post_norm){layer->each_post_norm, NULL}, rows);
    }
    if (layer->out_scale) kern->ops->scale(kern, x, layer->out_scale, rows, c->d_model);
}

/* Returns the role of the first part of a network's first product. */
static enum role front_role(const struct model_config *c, bool shared) {
    if (shared) return c->ungated ? ROLE_SHARED_UP : ROLE_SHARED_GATE;
    return c->ungated ? ROLE_UP : ROLE_GATE;
}

/* Computes a network's first product and its activation. */
static void step_gate_up(struct model *model, int index, const float *in, int rows, int d_ff) {
    const struct model_config *c = &model->config;
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const struct layer *layer = &model->layers[index];
    multiply_adapted(model, s->gate_up, in,
                     (struct layer_product){layer->gate_up, layer->up_bias, index, ADAPTER_GATE_UP},
                     rows, KERN_SET);
    if (c->ungated)
        kern->ops->glu_apart(kern, s->ff, s->gate_up, s->gate_up, d_ff, rows, d_ff, c->activation);
    else
        kern->ops->glu(kern, s->ff, s->gate_up, rows, d_ff, c->activation);
}

/* Computes a network and experts side by side (transformers, Gemma4). Both have norms of their
 * inputs and outputs, and the router has a norm of its own. The norm of their sum is added to the
 * residual stream. */
static void step_beside(struct model *model, int index, float *x, int rows) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    float *sum = s->beside, *experts = sum + (ptrdiff_t)rows * c->d_model;
    const float *in = normed(model, x, layer->ffn_norm, rows);
    show(model, index, ROLE_SHARED_GATE, in, rows);
    step_gate_up(model, index, in, rows, c->shared_ff);
    show(model, index, ROLE_SHARED_DOWN, s->ff, rows);
    kern->ops->matmul(kern, sum, s->ff, layer->down, NULL, rows, KERN_SET);
    kern->ops->rms_norm(kern, sum, sum, layer->shared_post_norm, rows, c->d_model, c->post_eps);
    in = normed(model, x, layer->router_norm, rows);
    kern->ops->matmul(kern, s->router, in, layer->router, NULL, rows, KERN_SET);
    in = normed(model, x, layer->experts_norm, rows);
    kern->ops->experts(kern, experts, in, s->router, layer->experts, rows);
    kern->ops->add_norm(kern, sum, experts, layer->experts_post_norm, rows, c->d_model,
                        c->post_eps);
    kern->ops->add_norm(kern, x, sum, layer->ffn_post_norm, rows, c->d_model, c->post_eps);
}

/* Experts, whose output is added to x; transformers, NemotronHMoE: they may read and write a
 * narrower space. */
static void step_experts(struct model *model, const struct layer *layer, float *x, const float *in,
                         int rows) {
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    kern->ops->matmul(kern, s->router, in, layer->router, layer->router_bias, rows, KERN_SET);
    if (!layer->experts_in) {
        kern->ops->experts(kern, x, in, s->router, layer->experts, rows);
        return;
    }
    float *read = s->beside, *made = read + (ptrdiff_t)rows * model->config.expert_latent;
    kern->ops->matmul(kern, read, in, layer->experts_in, NULL, rows, KERN_SET);
    kern->ops->experts(kern, made, read, s->router, layer->experts, rows);
    kern->ops->matmul(kern, x, made, layer->experts_out, NULL, rows, KERN_ADD);
}

/* Computes a layer, in place in x, from the outputs of attention and of a recurrent state to its
 * end. */
static void step_feed_forward(struct model *model, int index, float *x, const float *heads,
                              const float *mixed, int rows) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const struct post_norm post_norm = {layer->attn_post_norm, layer->attn_post_bias};
    if (layer->o)
        add_branch(model, x, heads,
                   (struct layer_product){layer->o, layer->o_bias, index, ADAPTER_O}, post_norm,
                   rows);
    if (layer->state_out)
        add_branch(model, x, mixed,
                   (struct layer_product){layer->state_out, NULL, index, ADAPTER_SITES}, post_norm,
                   rows);
    if (c->per_layer[index].no_network) return;
    if (c->gemma4_experts) {
        step_beside(model, index, x, rows);
        return;
    }
    const float *in = normed(model, x, layer->ffn_norm, rows);
    if (layer->experts) step_experts(model, layer, x, in, rows);
    if (!layer->gate_up) return;
    const int d_ff = layer->experts ? c->shared_ff : ff_width(c, index);
    show(model, index, front_role(c, layer->experts != NULL), in, rows);
    step_gate_up(model, index, in, rows, d_ff);
    if (layer->shared_gate) {
        kern->ops->matmul(kern, s->gates, in, layer->shared_gate, NULL, rows, KERN_SET);
        kern->ops->open_gates(kern, s->ff, s->gates, rows, d_ff, true);
    }
    show(model, index, layer->experts ? ROLE_SHARED_DOWN : ROLE_DOWN, s->ff, rows);
    add_branch(model, x, s->ff,
               (struct layer_product){layer->down, layer->down_bias, index, ADAPTER_DOWN},
               (struct post_norm){layer->ffn_post_norm, layer->ffn_post_bias}, rows);
}

static bool wants_every_row(const int32_t *want, int want_count, int rows) {
    for (int i = 0; i < want_count; i++)
        if (want[i] != i) return false;
    return want_count == rows;
}

/* Computes the rest of the last layer, after attention, for the wanted rows only: once the layer's
 * entries or states are written, nothing reads the other rows. Returns the wanted rows. */
static const float *step_wanted(struct model *model, int rows, const int32_t *want,
                                int want_count) {
    const struct model_config *c = &model->config;
    const struct kern_ops *ops = model->kern->ops;
    struct scratch *s = &model->scratch;
    float *x = s->x, *heads = s->heads, *mixed = s->mixed, *each = s->each;
    const int last = c->layers - 1, of_heads = heads_width(c, last),
              of_state = mixed_width(c, last);
    if (!wants_every_row(want, want_count, rows)) {
        model_adapt_wanted(model, want, want_count);
        ops->gather_rows(model->kern, s->last_x, x, want, want_count, c->d_model);
        if (of_heads)
            ops->gather_rows(model->kern, s->last_heads, heads, want, want_count, of_heads);
        if (of_state)
            ops->gather_rows(model->kern, s->last_mixed, mixed, want, want_count, of_state);
        x = s->last_x;
        heads = s->last_heads;
        mixed = s->last_mixed;
        if (each) {
            each = s->last_each;
            ops->gather_rows(model->kern, each, s->each, want, want_count,
                             c->layers * c->each_embed);
        }
    }
    step_feed_forward(model, last, x, heads, mixed, want_count);
    end_layer(model, last, x, each, want_count);
    return x;
}

/* The last layer for every row, and the final norm: what a text's vector is made of. Logits of the
 * wanted rows have the same inputs as without it. */
static const float *step_hidden(struct model *model, int rows, const int32_t *want,
                                int want_count) {
    const struct model_config *c = &model->config;
    const struct kern_ops *ops = model->kern->ops;
    struct scratch *s = &model->scratch;
    const int last = c->layers - 1;
    step_feed_forward(model, last, s->x, s->heads, s->mixed, rows);
    end_layer(model, last, s->x, s->each, rows);
    if (model->final_norm) norm_rows(model, s->x, s->x, model->final_norm, NULL, rows);
    if (want_count) ops->gather_rows(model->kern, s->norm, s->x, want, want_count, c->d_model);
    return s->x;
}

int model_end_vector(struct model *model, const float *pooled, float *out) {
    const struct model_ending ending = model_ending(&model->config);
    const struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    size_t width = (size_t)model->config.d_model;
    for (int i = 0; i < ending.count; i++) {
        float *to = i == ending.count - 1 ? out : s->between;
        int rc = kern->ops->upload(kern, s->pooled, pooled, width * sizeof *pooled);
        if (rc) return rc;
        kern->ops->matmul(kern, s->ended, s->pooled, model->ending[i], model->ending_bias[i], 1,
                          KERN_SET);
        width = (size_t)ending.width[i];
        rc = kern->ops->download(kern, to, s->ended, width * sizeof *to);
        if (rc) return rc;
        for (size_t k = 0; k < width && ending.tanh[i]; k++) to[k] = tanhf(to[k]);
        pooled = to;
    }
    return 0;
}

int model_step(struct model *model, const struct kern_batch *batch, const int32_t *want,
               int want_count, const float **logits) {
    return model_step_hidden(model, batch, want, want_count, logits, NULL);
}

int model_step_hidden(struct model *model, const struct kern_batch *batch, const int32_t *want,
                      int want_count, const float **logits, const float **hidden) {
    CHECK(batch->rows > 0 && batch->rows <= model->rows_max);
    CHECK(want_count >= 0 && want_count <= model->logits_max && want_count <= model->rows_max);
    const struct model_config *c = &model->config;
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const float *wanted;
    *logits = s->logits;
    int rc = kern->ops->begin_step(kern, batch);
    if (rc) return rc;
    CHECK(!c->both_ways || want_count == 0);
    note_peeked(model, batch);
    model_adapt_batch(model, batch);
    rc = step_embed(model, batch);
    if (!rc && model->block_of) rc = model_enter_block(model, batch->rows);
    if (rc) return rc;
    if (c->embeds_each) step_each(model, batch);
    for (int i = 0; i < c->layers; i++) {
        if (layer_has_state(&c->per_layer[i])) step_states(model, i, batch);
        if (layer_attends(&c->per_layer[i])) step_attention(model, i, batch);
        if (i < c->layers - 1) {
            step_feed_forward(model, i, s->x, s->heads, s->mixed, batch->rows);
            end_layer(model, i, s->x, s->each, batch->rows);
            rc = add_given_vectors(model, i, batch);
            if (rc) return rc;
        } else if (hidden) {
            *hidden = step_hidden(model, batch->rows, want, want_count);
        } else if (want_count) {
            wanted = step_wanted(model, batch->rows, want, want_count);
            norm_rows(model, s->norm, wanted, model->final_norm, NULL, want_count);
        }
    }
    if (want_count) {
        kern->ops->matmul(kern, s->logits, s->norm, model->head, NULL, want_count, KERN_SET);
        if (c->logit_cap > 0)
            kern->ops->soft_cap(kern, s->logits, want_count, c->vocab, c->logit_cap);
    }
    return 0;
}
