/* The parts of request reading that oai_parse.c calls; not for others. */
#ifndef KEEPD_SERVER_OAI_FIELDS_H
#define KEEPD_SERVER_OAI_FIELDS_H

#include "server/oai.h"

#define OAI_PATH 128 /* of struct oai_error.param; longer ones are cut */
void oai_path(char path[OAI_PATH], const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Refuses fields that would change the answer in a way we do not serve, unless they hold their
 * neutral value, and, when `strict`, fields nobody knows. */
int oai_check_fields(enum oai_kind kind, const cJSON *body, bool strict, struct oai_error *error);

/* What the chat template sees: messages with their content as one string, tools,
 * add_generation_prompt and the members of chat_template_kwargs. */
int oai_build_context(const cJSON *body, cJSON **context, struct oai_error *error);

#endif
