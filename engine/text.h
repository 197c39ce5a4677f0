/* Text of a model directory: tokenizer, chat template and the strings templates ask for. Immutable
 * after opening; any thread. */
#ifndef KEEPD_ENGINE_TEXT_H
#define KEEPD_ENGINE_TEXT_H

#include "engine/chat.h"
#include "engine/engine.h"
#include "engine/tok.h"

struct text {
    struct tok *tok;
    struct chat *chat; /* NULL: the model has no template and /chat is refused */
    char *source;      /* of the template; NULL without one */
    char *bos, *eos;   /* "" when the model names none */
};

/* Reads tokenizer.json, tokenizer_config.json (optional) and the template, in this order:
 * chat_template.jinja, tokenizer_config.json's chat_template (string, or the list's "default").
 * Errors name the file. On failure *text is empty. */
int text_open(const char *dir, struct text *text, struct fault *fault);
void text_close(struct text *text);

int text_render_chat(const struct text *text, const cJSON *context, size_t max_ids,
                     struct arena *arena, struct engine_ids *out, struct fault *fault);

#endif
