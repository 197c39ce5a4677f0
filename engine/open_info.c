/* The facts about an opened engine (struct engine_info), and those that a check of the options
 * finds (struct engine_found). */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "engine/open.h"
#include "model/gates.h"

/* Names of enum engine_pooling, as --pooling has them. */
static const char *const pooling_names[] = {
    [ENGINE_POOL_LAST] = "last", [ENGINE_POOL_MEAN] = "mean", [ENGINE_POOL_CLS] = "cls"};

static const char *gates_from(const struct engine *e) {
    static const char *const names[] = {[GATES_NONE] = "none",
                                        [GATES_GIVEN] = "given",
                                        [GATES_BESIDE] = "beside",
                                        [GATES_CACHED] = "cache",
                                        [GATES_RANDOM] = "random"};
    const enum gates_from from = model_gates_from(open_model_of(e));
    return e->options.gates_fitted && from != GATES_NONE ? "fitted" : names[from];
}

static int max_choices(const struct engine_options *options) {
    int most =
        options->max_num_seqs < ENGINE_CHOICES_MAX ? options->max_num_seqs : ENGINE_CHOICES_MAX;
    int wanted = options->max_choices;
    return wanted > 0 && wanted < most ? wanted : most;
}

/* The last token of a model that only writes has seen all others, so it stands for the text where
 * the files say nothing; of one that reads both ways, all tokens do. NONE: they ask for what is not
 * there. */
static enum engine_pooling find_pooling(const struct engine_options *options,
                                        const struct model_config *config) {
    static const enum engine_pooling own[] = {[MODEL_POOL_UNSAID] = ENGINE_POOL_LAST,
                                              [MODEL_POOL_LAST] = ENGINE_POOL_LAST,
                                              [MODEL_POOL_MEAN] = ENGINE_POOL_MEAN,
                                              [MODEL_POOL_CLS] = ENGINE_POOL_CLS};
    if (config->classifier.labels) return ENGINE_POOL_LABELS;
    for (int i = ENGINE_POOL_LAST; i <= ENGINE_POOL_CLS; i++)
        if (!engine_chooses(options->pooling) && strcmp(options->pooling, pooling_names[i]) == 0)
            return (enum engine_pooling)i;
    if (config->pooling.other[0]) return ENGINE_POOL_NONE;
    return config->both_ways && !config->pooling.how ? ENGINE_POOL_MEAN : own[config->pooling.how];
}

static void fill_draft_info(struct engine *e) {
    struct engine_info *info = &e->info;
    info->speculate = e->options.drafts;
    if (e->draft.texts == 0) return;
    info->draft_model = e->draft_path =
        mem_must_strdup(e->draft.is_block ? "mtp" : e->options.draft_model);
    info->draft_tokens = e->draft.places;
    info->draft_bytes = (int64_t)model_weight_bytes(e->replicas[0].draft_model) + e->draft.bytes;
}

static void fill_vectors(struct engine *e, const struct model_config *config,
                         struct engine_info *info) {
    const struct pooling *pooling = &config->pooling;
    const size_t prompts = (size_t)pooling->prompt_count;
    e->prompts = mem_must_alloc(prompts, sizeof *e->prompts);
    for (size_t i = 0; i < prompts; i++)
        e->prompts[i] = (struct engine_prompt){pooling->prompts[i].name, pooling->prompts[i].text};
    info->prompts = e->prompts;
    info->prompt_count = pooling->prompt_count;
    info->width = model_vector_width(config);
    info->labels = config->classifier.labels;
    info->label_sigmoid = config->classifier.sigmoid;
    info->whole_texts = config->both_ways;
    info->pooling = find_pooling(&e->options, config);
    info->pooling_other = pooling->other;
}

void open_fill_info(struct engine *e, const struct sched_options *so) {
    const struct model_config *config = model_config(open_model_of(e));
    struct engine_info *info = &e->info;
    info->model_dir = e->model_dir;
    snprintf(info->family, sizeof info->family, "%s", config->family);
    snprintf(info->backend, sizeof info->backend, "%s", open_ops_of(e)->name);
    info->activations = open_ops_of(e)->activations;
    snprintf(info->kv_policy, sizeof info->kv_policy, "%s", so->kv.defaults.policy->name);
    info->kv_budget = kv_params_shown_budget(&so->kv.defaults);
    info->kv_buffer = so->kv.defaults.buffer;
    info->kv_chunk = so->kv.defaults.chunk;
    info->kv_budget_max = so->kv.budget_max;
    fill_draft_info(e);
    info->has_gates = so->kv.has_gates;
    info->gates_from = gates_from(e);
    info->trained_budget = model_gates(open_model_of(e))->trained_budget;
    info->layers = config->cache_layers;
    info->heads_kv = config->heads_kv;
    if (config->heads) /* layers differ */
        e->layer_heads = mem_must_alloc((size_t)config->cache_layers, sizeof *e->layer_heads);
    for (int i = 0; config->heads && i < config->cache_layers; i++)
        e->layer_heads[i] = config->heads[i].kv;
    info->layer_heads = e->layer_heads;
    info->head_dim = config->head_dim;
    info->vocab = config->vocab;
    fill_vectors(e, config, info);
    info->loads_adapters = engine_may_load_adapters(&e->options);
    info->max_adapters = e->adapters.most;
    info->max_num_seqs = e->options.max_num_seqs;
    info->max_queue = e->options.max_queue;
    info->max_choices = max_choices(&e->options);
    info->max_logprobs = so->top_max;
    memcpy(info->space_key, e->space_key, sizeof info->space_key);
    info->replicas = e->replica_count;
    info->threads = backend_threads(e->options.threads);
    info->pages_total = so->pages_total;
    info->page_bytes = so->page_bytes;
    info->page_slots = so->shape.sliding_page_slots > so->shape.page_slots
                           ? so->shape.sliding_page_slots
                           : so->shape.page_slots;
    info->token_entries = reserve_token_entries(&so->shape);
    info->pool_ranks = so->shape.ranks;
    info->weight_bytes = model_weight_bytes(open_model_of(e));
    info->has_chat_template = e->text.chat != NULL;
    info->chat_template = e->text.source;
    info->tool_template = e->text.tool_source ? e->text.tool_source : e->text.source;
    const struct vision *encoder = e->replicas[0].encoder.vision;
    if (encoder) info->pictures = &vision_config(encoder)->form;
    info->bos_token = e->text.bos;
    info->eos_token = e->text.eos;
    info->eos = e->ends;
    info->eos_count = e->end_count;
    const struct engine_sampling own = {config->temperature, config->top_p, config->min_p,
                                        config->repetition, config->top_k};
    info->sampling = engine_choose_sampling(own, e->options.sampling);
}

/* Memory beside weights, activations and pages: threads, tables of pages, texts of answers; and of
 * each token of the vocabulary, in the tokenizer and in masks. */
#define MEMORY_BASE      ((int64_t)16 << 20)
#define MEMORY_TABLES    16 /* tables take 1/16 of the pool's size in addition */
#define MEMORY_PER_TOKEN 256

/* The most memory that the engine takes. Weights are shared by replicas, where the backend can.
 * Every rank has a pool of its own, and activations of full width. */
static int64_t memory_of(const struct engine *e, const struct sched_options *so) {
    const struct model *model = open_model_of(e), *draft = e->replicas[0].draft_model;
    const int64_t pool = so->pages_total * so->page_bytes, ranks = open_ranks(e);
    const int64_t copies = open_ops_of(e)->borrow ? 1 : e->replica_count;
    const int64_t weights = (int64_t)model_weight_bytes(model) +
                            (draft ? (int64_t)model_weight_bytes(draft) : 0) +
                            e->encoder.weight_bytes;
    const int64_t adapters =
        engine_may_load_adapters(&e->options) ? e->options.adapter_bytes : e->adapters.bytes;
    const int64_t each = (pool + pool / MEMORY_TABLES + (int64_t)model_step_bytes(model)) * ranks +
                         e->draft.bytes + (draft ? (int64_t)model_step_bytes(draft) : 0) +
                         e->encoder.bytes + adapters;
    return weights * copies + each * e->replica_count + MEMORY_BASE +
           model_config(model)->vocab * (int64_t)MEMORY_PER_TOKEN;
}

/* conversation_bytes spreads the entries evenly over the streams; reserve_pages bounds any spread
 * during a whole turn. */
void open_fill_found(struct engine *e, const struct sched_options *so, struct engine_found *found) {
    open_fill_info(e, so);
    *found = (struct engine_found){.kv_budget = e->info.kv_budget,
                                   .has_gates = e->info.has_gates,
                                   .gates_from = e->info.gates_from,
                                   .trained_budget = e->info.trained_budget,
                                   .whole_texts = e->info.whole_texts,
                                   .max_model_len = e->info.max_model_len,
                                   .eos_count = e->end_count};
    memcpy(found->kv_policy, e->info.kv_policy, sizeof found->kv_policy);
    memcpy(found->kv_dtype, e->info.kv_dtype, sizeof found->kv_dtype);
    memcpy(found->eos, e->ends, sizeof found->eos);
    snprintf(found->gates_cached, sizeof found->gates_cached, "%s",
             model_gates_cached(open_model_of(e)));
    found->pool_bytes = so->pages_total * so->page_bytes;
    found->memory_bytes = memory_of(e, so);
    if (e->info.pictures) found->pictures = *e->info.pictures;
    found->draft_places = e->draft.places;
    found->draft_text_bytes = e->draft.text_pages * e->draft.page_bytes;
    found->tool_template = e->info.tool_template ? mem_must_strdup(e->info.tool_template) : NULL;
    int64_t longest = found->max_model_len, held = found->kv_budget;
    const struct reserve_turn turn = {.added = longest};
    struct reserve_shape whole = so->shape;
    whole.ranks = 1;
    whole.state_pages *= open_ranks(e);
    found->conversation_bytes =
        so->page_bytes * (so->kv.defaults.policy->bounded
                              ? whole.state_pages + reserve_even_pages(&whole, held)
                              : reserve_turn_pages(&whole, &so->kv.defaults, &turn,
                                                   reserve_whole(&so->kv.defaults, longest)));
}
