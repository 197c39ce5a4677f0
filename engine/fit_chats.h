/* Chats as texts for the fit. A model without a template, or whose template refuses a chat (roles
 * that do not alternate, tools), reads it as plain text: "role: content" and an empty line, calls
 * and results of tools included. A chat with pictures that the template refuses is an error. */
#ifndef KEEPD_ENGINE_FIT_CHATS_H
#define KEEPD_ENGINE_FIT_CHATS_H

#include "text/text.h"

/* Tokenises a chat, which is given as a template's context in JSON (struct chat_input). `pictures`:
 * those of this chat and of later ones, `count` of them; then `count` is that of this chat, and the
 * rows lie in the arena. *plain: it was read as plain text. ERR_MALFORMED, or the tokenizer's
 * errors. */
int fit_chat_ids(const struct text *text, const char *context, size_t size,
                 struct text_pictures *pictures, struct arena *arena, struct tok_ids *out,
                 bool *plain, struct fault *fault);

#endif
