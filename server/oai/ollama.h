/* The forms of Ollama's API, for its rows only. */
#ifndef KEEPD_SERVER_OAI_OLLAMA_H
#define KEEPD_SERVER_OAI_OLLAMA_H

#include "server/oai/kind.h"

/* in ollama_answer.c */
extern const struct oai_form oai_ollama_chat_form, oai_ollama_text_form;
extern const struct oai_form oai_ollama_vectors_form, oai_ollama_vector_form;
void oai_ollama_error(struct buf *out, const struct oai_error *error, const char *request_id);

/* in ollama_models.c: the answers to /api/show, and to requests that only load the model. They have
 * the signature of a kind's `answer`. */
void oai_ollama_show(struct buf *out, const struct oai_rules *rules,
                     const struct oai_request *request, const struct engine_ids *ids);
void oai_ollama_loaded(struct buf *out, const struct oai_rules *rules,
                       const struct oai_request *request, const struct engine_ids *ids);

#endif
