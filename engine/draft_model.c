#include "engine/draft_model.h"

#include <stdio.h>
#include <string.h>

#include "base/available.h"
#include "base/log.h"
#include "model/path.h"

/* All caches of draft models together may take 1/8 of the free memory. */
#define MEMORY_PART 8

/* ---- Tokens ---- */

static int refuse_tokens(struct fault *fault, const char *what, const char *a, size_t a_size,
                         const char *b, size_t b_size, int32_t id) {
    return fault_set(
        fault, ERR_INVALID, "draft-model",
        "has other tokens than the model: token %d is %s'%.*s' there and '%.*s' in the "
        "model. It needs the model's own tokenizer: a smaller model of the same family",
        id, what, (int)b_size, b, (int)a_size, a);
}

int draft_model_compare(const struct tok *tok, const struct tok *draft, struct fault *fault) {
    const int32_t a_count = tok_vocab_size(tok), b_count = tok_vocab_size(draft);
    const int32_t count = a_count < b_count ? a_count : b_count;
    for (int32_t id = 0; id < count; id++) {
        const char *a = "", *b = "";
        const size_t a_size = tok_name(tok, id, &a), b_size = tok_name(draft, id, &b);
        /* Some vocabularies are filled up to a round size: these numbers have no token. */
        if (a_size == 0 || b_size == 0) continue;
        if (a_size != b_size || memcmp(a, b, a_size) != 0)
            return refuse_tokens(fault, "", a, a_size, b, b_size, id);
        if (tok_is_special(tok, id) != tok_is_special(draft, id))
            return refuse_tokens(fault, tok_is_special(draft, id) ? "special " : "not special: ", a,
                                 a_size, b, b_size, id);
    }
    return 0;
}

static int check_tokens(const struct engine *e, struct fault *fault) {
    struct text text;
    struct fault why = {0};
    int rc = text_open(e->options.draft_model, TEXT_CHATML, &text, &why);
    if (rc != 0)
        return fault_set(fault, rc, "draft-model", "%s%s%s", why.field, why.field[0] ? ": " : "",
                         why.text);
    rc = draft_model_compare(e->text.tok, text.tok, fault);
    text_close(&text);
    return rc;
}

/* ---- Opening ---- */

static bool has_states(const struct model *model) {
    return model_config(model)->state_layers > 0;
}

static int check_place(const struct engine *e, struct fault *fault) {
    const struct replica *first = &e->replicas[0];
    if (e->options.drafts == 0)
        return fault_set(fault, ERR_INVALID, "draft-model",
                         "guesses nothing with --speculate 0: leave one of the two out");
    if (first->kern->ops->cache_fit)
        return fault_set(fault, ERR_UNSUPPORTED, "draft-model",
                         "runs on the CPU alone so far, and the model runs on a GPU");
    if (e->options.tensor_parallel_size > 1)
        return fault_set(fault, ERR_UNSUPPORTED, "draft-model",
                         "runs beside a model on one rank alone so far: --tensor-parallel-size 1");
    if (has_states(first->model) && !first->kern->ops->peeks)
        return fault_set(fault, ERR_UNSUPPORTED, "draft-model",
                         "can guess nothing for this model: its recurrent states cannot go back "
                         "when a guess was wrong");
    return model_path_check(e->options.draft_model, e->options.random_weights, fault);
}

static int load_draft_model(struct engine *e, struct replica *replica, struct fault *fault) {
    struct kern *kern = replica->draft_kern;
    struct model_options options = engine_model_options(&e->options);
    const bool block = e->draft.is_block;
    if (block) {
        options.block_of = replica->model;
        options.progress = NULL;
    } else {
        options.dir = e->options.draft_model;
        options.context = 0;
    }
    options.gates = "";
    options.rows_max = DRAFTER_ROWS;
    options.logits_max = DRAFTER_ASKED;
    options.owner = e->replicas[0].draft_model;
    if (kern->ops->bind) kern->ops->bind(kern);
    return model_open(kern, &options, &replica->draft_model, fault);
}

/* Chooses how many tokens of a text the draft model remembers, and how many texts it may have at
 * once: as many as sequences run, within a part of the free memory. */
static int plan_cache(struct engine *e, struct kern_cache_options *cache, struct fault *fault) {
    const struct replica *first = &e->replicas[0];
    const struct model_config *config = model_config(first->draft_model);
    struct draft_plan *plan = &e->draft;
    struct kern_cache_info info = {0};
    plan->places = e->options.draft_tokens;
    if (plan->places > config->max_positions) plan->places = config->max_positions;
    if (plan->places < DRAFTER_PLACES_LEAST)
        return fault_set(fault, ERR_INVALID, "draft-tokens", "must be at least %d",
                         DRAFTER_PLACES_LEAST);
    *cache = model_cache_options(config);
    cache->dtype = config->dtype == KERN_F32 ? KERN_F32 : KERN_BF16;
    first->draft_kern->ops->cache_info(cache, &info);
    plan->page_bytes = info.page_bytes;
    plan->text_pages = model_pages(config, &info, plan->places);
    const int64_t width = plan->is_block ? config->d_model : 0;
    int64_t text_bytes = plan->text_pages * plan->page_bytes + drafter_text_bytes(width);
    int64_t most = available_memory("") / MEMORY_PART / e->replica_count / text_bytes;
    plan->texts = e->options.max_num_seqs < most ? e->options.max_num_seqs : (int)most;
    if (plan->texts < 1)
        return fault_set(fault, ERR_INVALID, "draft-tokens",
                         "a text of %d tokens takes %.0f MB of the draft model's cache, more than "
                         "an %dth of the free memory",
                         plan->places, (double)text_bytes * 1e-6, MEMORY_PART);
    plan->bytes = plan->texts * text_bytes + drafter_input_bytes(width);
    cache->pages = plan->texts * plan->text_pages;
    cache->slots = plan->texts;
    cache->max_positions = plan->places;
    cache->rows_max = DRAFTER_ROWS;
    cache->logits_max = DRAFTER_ASKED;
    return 0;
}

/* Puts the option's name in front of a fault in the draft model's own files. */
static int name_draft_model(int rc, struct fault *fault) {
    struct fault why = *fault;
    if (rc == 0 || strncmp(why.field, "draft-", 6) == 0) return rc;
    return fault_set(fault, rc, "draft-model", "%s%s%s", why.field, why.field[0] ? ": " : "",
                     why.text);
}

static int open_kerns(struct engine *e, struct fault *fault) {
    struct kern *kerns[ENGINE_REPLICAS_MAX] = {0};
    struct backend_options backend = engine_backend(&e->options, e->replica_count);
    backend.device = "cpu";
    int rc = backend_open(&backend, kerns, fault);
    for (int i = 0; i < e->replica_count; i++) e->replicas[i].draft_kern = kerns[i];
    return rc;
}

static int open_rest(struct engine *e, const struct kern_cache_options *cache,
                     struct fault *fault) {
    int rc = 0;
    log_info("%s: %.1f GB of weights, %.2f GB of cache for %d texts of %d tokens",
             e->draft.is_block ? "block that predicts further tokens" : "draft model",
             (double)model_weight_bytes(e->replicas[0].draft_model) * 1e-9,
             (double)e->draft.bytes * 1e-9, e->draft.texts, e->draft.places);
    for (int i = 0; i < e->replica_count && rc == 0; i++) {
        struct kern *kern = e->replicas[i].draft_kern;
        if (i > 0) rc = load_draft_model(e, &e->replicas[i], fault);
        if (rc == 0) rc = kern->ops->cache_open(kern, cache, fault);
    }
    return rc;
}

static int open_all(struct engine *e, struct fault *fault) {
    struct kern_cache_options cache;
    int rc = check_place(e, fault);
    if (rc == 0) rc = check_tokens(e, fault);
    if (rc == 0) rc = open_kerns(e, fault);
    if (rc == 0) rc = load_draft_model(e, &e->replicas[0], fault);
    if (rc != 0) return rc;
    if (has_states(e->replicas[0].draft_model))
        return fault_set(fault, ERR_UNSUPPORTED, "draft-model",
                         "has recurrent states, which cannot go back when a guess was wrong");
    rc = plan_cache(e, &cache, fault);
    return rc != 0 || e->options.check_only ? rc : open_rest(e, &cache, fault);
}

/* ---- A block of the model's own files ---- */

static bool can_use_block(const struct engine *e) {
    const struct replica *first = &e->replicas[0];
    return e->options.drafts > 0 && model_has_block(first->model) && !first->kern->ops->cache_fit &&
           e->options.tensor_parallel_size <= 1 &&
           (!has_states(first->model) || first->kern->ops->peeks);
}

void draft_model_close(struct replica *replica) {
    model_close(replica->draft_model);
    if (replica->draft_kern) replica->draft_kern->ops->close(replica->draft_kern);
    replica->draft_model = NULL;
    replica->draft_kern = NULL;
}

/* A model is served without its block if that cannot be opened: it would only make answers faster.
 */
static void open_block(struct engine *e) {
    struct kern_cache_options cache;
    struct fault why = {0};
    e->draft.is_block = true;
    int rc = open_kerns(e, &why);
    if (rc == 0) rc = load_draft_model(e, &e->replicas[0], &why);
    if (rc == 0) rc = plan_cache(e, &cache, &why);
    if (rc == 0 && !e->options.check_only) rc = open_rest(e, &cache, &why);
    if (rc == 0) return;
    log_warn("the block of the model that predicts further tokens is not used: %s%s%s", why.field,
             why.field[0] ? ": " : "", why.text);
    for (int i = e->replica_count - 1; i >= 0; i--) draft_model_close(&e->replicas[i]);
    e->draft = (struct draft_plan){0};
}

int draft_model_open(struct engine *e, struct fault *fault) {
    const char *name = e->options.draft_model;
    if (name && strcmp(name, ENGINE_DRAFT_NONE) == 0) return 0;
    if (name && name[0]) return name_draft_model(open_all(e, fault), fault);
    if (can_use_block(e)) open_block(e);
    return 0;
}

static int step_draft_model(void *model, const struct kern_batch *batch, const float *hidden,
                            const int32_t *want, int want_count, const float **logits) {
    (void)hidden;
    return model_step(model, batch, want, want_count, logits);
}

static int step_block(void *model, const struct kern_batch *batch, const float *hidden,
                      const int32_t *want, int want_count, const float **logits) {
    return model_step_block(model, batch, hidden, want, want_count, logits);
}

static const float *wanted_block_hidden(void *model) {
    return model_wanted_hidden(model);
}

/* The numbers that a block reads, over those that the model reads. A head counts once for each:
 * where it is the embeddings' matrix, and where it is another, which a block's count has, too. */
static double block_weight(const struct model *block, const struct model *model) {
    return (double)model_count_numbers(model_config(block)).active /
           (double)model_count_numbers(model_config(model)).active;
}

struct drafter_options draft_model_options(const struct engine *e, const struct replica *replica) {
    if (!replica->draft_model) return (struct drafter_options){0};
    const struct model_config *config = model_config(replica->draft_model);
    const bool block = e->draft.is_block;
    return (struct drafter_options){
        .kern = replica->draft_kern,
        .model = replica->draft_model,
        .model_step = block ? step_block : step_draft_model,
        .wanted_hidden = wanted_block_hidden,
        .width = block ? config->d_model : 0,
        .vocab = config->vocab,
        .texts = e->draft.texts,
        .places = e->draft.places,
        .read_after = DRAFTER_READ_AFTER,
        .weight = block ? block_weight(replica->draft_model, replica->model)
                        : (double)model_weight_bytes(replica->draft_model) /
                              (double)model_weight_bytes(replica->model),
    };
}
