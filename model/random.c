/* Makes weights and gates from a seeded generator, for timing. */
#include <math.h>

#include "base/mem.h"
#include "base/splitmix.h"
#include "model/internal.h"

#define GATE_WIDTH 64
#define TAKEN      ((int64_t)1 << 12) /* words that a worker makes at a time */

/* Fills memory with bf16 numbers: a word of splitmix64 makes four, of random sign and mantissa,
 * with one of two exponents around 1/sqrt(cols). Speed matters, the distribution does not. */
struct filling {
    uint64_t seed, base;
    uint64_t *words;
    struct cpu_tickets tickets;
};

#define RANDOM_LANES 0x0001000100010001ull

static void fill_some(void *arg, int worker) {
    (void)worker;
    struct filling *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, TAKEN, &end)) >= 0;) {
        for (; i < end; i++) {
            uint64_t z = splitmix_mix(job->seed + ((uint64_t)i + 1) * SPLITMIX_STEP);
            job->words[i] = (z & (0x80ff * RANDOM_LANES)) + job->base * RANDOM_LANES;
        }
    }
}

void random_fill(struct cpu_team *team, uint64_t *random, uint64_t *words, size_t count,
                 int64_t cols) {
    const int exponent = 126 + (int)lrint(log2(1 / sqrt((double)cols)));
    struct filling job = {.seed = *random, .base = (uint64_t)exponent << 7, .words = words};
    cpu_tickets_set(&job.tickets, (int64_t)count);
    cpu_team_run(team, fill_some, &job);
    *random += count * SPLITMIX_STEP;
}

/* Returns a random number in [-1, 1). */
static float random_number(uint64_t *random) {
    *random = *random * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(*random >> 40) * 0x1p-23f - 1;
}

void random_vector(uint64_t *random, float *out, size_t count, float around) {
    for (size_t i = 0; i < count; i++) out[i] = around + random_number(random) / 4;
}

/* Returns how many numbers the matrices of a layer's latent attention have. */
static size_t latent_numbers(const struct model_config *c) {
    const struct kern_latent *latent = &c->latent;
    const size_t d = (size_t)c->d_model, heads = (size_t)c->heads_q, rank = (size_t)latent->rank;
    const size_t query = heads * (size_t)latent_query_dim(c), down = (size_t)c->q_rank;
    return (down ? down * (d + query) : d * query) + d * (rank + (size_t)latent->turned) +
           heads * rank * (size_t)(latent->still + latent->dim_v) +
           heads * (size_t)latent->dim_v * d;
}

size_t random_bytes(const struct model_config *c) {
    size_t d = (size_t)c->d_model, routed = (size_t)routed_layers(c);
    const size_t products = (size_t)network_products(c);
    size_t layers = 0;
    for (int l = 0; l < c->layers && c->latent.rank; l++) layers += latent_numbers(c);
    for (int l = 0; l < c->layers && !c->latent.rank; l++) {
        const bool gated = c->attn_gate && layer_attends(&c->per_layer[l]);
        layers += d * (size_t)(gated ? q_width(c, l) : 0);
        layers += d * (size_t)(attend_width(c, l) + heads_width(c, l));
        layers += d * (size_t)(state_width(c, l) + rates_width(c, l) + mixed_width(c, l));
    }
    for (int l = 0; l < c->layers; l++)
        layers += has_dense(&c->per_layer[l]) ? products * d * (size_t)ff_width(c, l) : 0;
    const size_t each = (size_t)c->layers * (size_t)c->each_embed;
    layers += each * ((size_t)c->vocab + 3 * d);
    const size_t wide = (size_t)experts_width(c);
    layers += routed * (size_t)c->experts * (products * wide * (size_t)c->expert_ff + d);
    layers += routed * 2 * d * (size_t)c->expert_latent;
    layers += routed * d * (products * (size_t)c->shared_ff + c->shared_gate);
    size_t ends = d * (size_t)c->vocab * (c->tied_embeddings ? 1 : 2);
    return 2 * (layers + ends);
}

int random_gates(struct model *model, struct fault *fault) {
    const struct model_config *c = &model->config;
    const size_t m = GATE_WIDTH, d = (size_t)c->d_model;
    size_t h = (size_t)c->heads_kv;
    uint64_t random = RANDOM_SEED + 1;
    int32_t *row = mem_must_alloc(h, sizeof *row);
    float *data = mem_must_alloc(m * d + m + h * m + h, sizeof *data);
    float *w1 = data, *b1 = w1 + m * d, *last = b1 + m, *bias = last + h * m;
    int rc = 0;
    for (size_t i = 0; i < h; i++) row[i] = (int32_t)i;
    for (int l = 0; l < c->layers && !rc; l++) {
        if (!holds_entries(&c->per_layer[l])) continue;
        h = (size_t)c->per_layer[l].heads_kv;
        for (size_t i = 0; i < m * d + m + h * m; i++) {
            float scale = i < m * d ? 1 / sqrtf((float)d) : 1 / sqrtf((float)m);
            data[i] = random_number(&random) * scale;
        }
        for (size_t i = 0; i < h; i++) bias[i] = 6;
        const struct kern_gate_spec spec = {.w1 = w1,
                                            .b1 = b1,
                                            .last = last,
                                            .bias = bias,
                                            .row = row,
                                            .width = GATE_WIDTH,
                                            .d_model = c->d_model,
                                            .heads_kv = (int)h,
                                            .row_count = (int)h,
                                            .embeddings = 1};
        rc = model->kern->ops->gate_load(model->kern, &spec, &model->layers[l].gate, fault);
    }
    mem_free(data);
    mem_free(row);
    if (!rc) model->gates_from = GATES_RANDOM;
    return rc;
}
