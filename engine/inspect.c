/* engine_inspect: what was understood of a model, part by part. */
#include <stdio.h>

#include "base/json.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "model/model.h"
#include "model/path.h"
#include "text/text.h"

static void describe_text(const struct text *text, bool writes, struct buf *out) {
    buf_fmt(out, "tokenizer    %d tokens\n", tok_vocab_size(text->tok));
    if (!writes) return;
    if (!text->source)
        buf_str(out, "template     none: chats are refused, completions are served\n");
    else
        buf_fmt(out, "template     %zu bytes%s\n", strlen(text->source),
                text->tool_source ? ", and one of its own for tools" : "");
}

static void describe_ends(const struct engine_found *found, const struct text *text,
                          struct buf *out) {
    buf_str(out, "stop tokens ");
    for (int i = 0; i < found->eos_count; i++) {
        const char *bytes = "";
        size_t size = tok_bytes(text->tok, found->eos[i], &bytes);
        buf_fmt(out, "%s %d ", i ? "," : "", found->eos[i]);
        json_write_str(out, bytes, size);
    }
    buf_str(out, found->eos_count ? "\n" : " none\n");
}

static void describe_cache(const struct engine_found *found, struct buf *out) {
    if (!found->has_gates)
        buf_str(out, "gates        none\n");
    else if (found->trained_budget)
        buf_fmt(out, "gates        trained with a budget of %d\n", found->trained_budget);
    else
        buf_str(out, "gates        yes\n");
    buf_fmt(out, "cache        policy %s, %s; one conversation takes %.1f MB", found->kv_policy,
            found->kv_dtype, (double)found->conversation_bytes * 1e-6);
    if (found->kv_budget > 0)
        buf_fmt(out, " at the budget of %d entries per head\n", found->kv_budget);
    else
        buf_fmt(out, " with %d tokens\n", found->max_model_len);
    buf_fmt(out, "serving      %.1f MB at most, %.1f MB of them the cache's pool\n",
            (double)found->memory_bytes * 1e-6, (double)found->pool_bytes * 1e-6);
    if (found->pictures.kind)
        buf_fmt(out, "pictures     %d tokens at most for each tile\n",
                found->pictures.tile_tokens_max);
    if (found->draft_places > 0)
        buf_fmt(out, "draft model  %d tokens of a text take %.1f MB of its cache\n",
                found->draft_places, (double)found->draft_text_bytes * 1e-6);
}

static int refused(const char *part, const struct fault *fault, struct buf *out) {
    buf_fmt(out, "%s%s%s%s\n", part, fault->field, fault->field[0] ? ": " : "", fault->text);
    return fault->code;
}

int engine_inspect(const struct engine_options *options, struct buf *out, char **tool_template,
                   struct fault *fault) {
    struct engine_options check = *options;
    struct engine_found found = {0};
    struct engine *engine;
    struct text text = {0};
    *tool_template = NULL;
    struct fault own = {0}, words = {0};
    int rc = model_path_check(options->model_dir, options->random_weights, fault);
    if (rc) {
        (void)refused("refused      ", fault, out);
        return rc;
    }
    (void)model_inspect(options->model_dir, options->max_model_len, options->random_weights, out,
                        &own);
    check.check_only = true;
    check.progress = NULL;
    check.found = &found;
    rc = engine_open(&check, &engine, fault);
    if (text_open(options->model_dir, options->chat_template, &text, &words))
        (void)refused("tokenizer    refused: ", &words, out);
    else
        describe_text(&text, !found.whole_texts, out);
    if (rc == 0) {
        describe_ends(&found, &text, out);
        describe_cache(&found, out);
        *tool_template = found.tool_template;
    }
    /* The files of the model and the text may both be at fault; start names one. */
    if (own.code) (void)refused("model        refused: ", &own, out);
    if (rc != 0 && strcmp(own.text, fault->text) != 0 && strcmp(words.text, fault->text) != 0)
        (void)refused("refused      ", fault, out);
    text_close(&text);
    return rc;
}
