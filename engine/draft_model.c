#include "engine/draft_model.h"

#include <stdio.h>
#include <string.h>

#include "base/available.h"
#include "base/log.h"
#include "model/path.h"

/* All caches of draft models together may take one of so many parts of the free memory. */
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
    options.dir = e->options.draft_model;
    options.context = 0;
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
    int64_t text_bytes = plan->text_pages * plan->page_bytes;
    int64_t most = available_memory("") / MEMORY_PART / e->replica_count / text_bytes;
    plan->texts = e->options.max_num_seqs < most ? e->options.max_num_seqs : (int)most;
    if (plan->texts < 1)
        return fault_set(fault, ERR_INVALID, "draft-tokens",
                         "a text of %d tokens takes %.0f MB of the draft model's cache, more than "
                         "an %dth of the free memory",
                         plan->places, (double)text_bytes * 1e-6, MEMORY_PART);
    plan->bytes = plan->texts * text_bytes;
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

static int open_all(struct engine *e, struct fault *fault) {
    const struct engine_options *o = &e->options;
    struct kern *kerns[ENGINE_REPLICAS_MAX] = {0};
    struct kern_cache_options cache;
    struct backend_options backend = engine_backend(o, e->replica_count);
    backend.device = "cpu";
    int rc = check_place(e, fault);
    if (rc == 0) rc = check_tokens(e, fault);
    if (rc == 0) rc = backend_open(&backend, kerns, fault);
    for (int i = 0; i < e->replica_count; i++) e->replicas[i].draft_kern = kerns[i];
    if (rc == 0) rc = load_draft_model(e, &e->replicas[0], fault);
    if (rc != 0) return rc;
    if (has_states(e->replicas[0].draft_model))
        return fault_set(fault, ERR_UNSUPPORTED, "draft-model",
                         "has recurrent states, which cannot go back when a guess was wrong");
    rc = plan_cache(e, &cache, fault);
    if (rc != 0 || o->check_only) return rc;
    log_info("draft model: %.1f GB of weights, %.2f GB of cache for %d texts of %d tokens",
             (double)model_weight_bytes(e->replicas[0].draft_model) * 1e-9,
             (double)e->draft.bytes * 1e-9, e->draft.texts, e->draft.places);
    for (int i = 0; i < e->replica_count && rc == 0; i++) {
        if (i > 0) rc = load_draft_model(e, &e->replicas[i], fault);
        if (rc == 0) rc = kerns[i]->ops->cache_open(kerns[i], &cache, fault);
    }
    return rc;
}

int draft_model_open(struct engine *e, struct fault *fault) {
    if (!e->options.draft_model || !e->options.draft_model[0]) return 0;
    return name_draft_model(open_all(e, fault), fault);
}

static int step_draft_model(void *model, const struct kern_batch *batch, const int32_t *want,
                            int want_count, const float **logits) {
    return model_step(model, batch, want, want_count, logits);
}

struct drafter_options draft_model_options(const struct engine *e, const struct replica *replica) {
    if (!replica->draft_model) return (struct drafter_options){0};
    return (struct drafter_options){
        .kern = replica->draft_kern,
        .model = replica->draft_model,
        .model_step = step_draft_model,
        .vocab = model_config(replica->draft_model)->vocab,
        .texts = e->draft.texts,
        .places = e->draft.places,
        .read_after = DRAFTER_READ_AFTER,
        .weight = (double)model_weight_bytes(replica->draft_model) /
                  (double)model_weight_bytes(replica->model),
    };
}
