/* The form of a message in Anthropic's API, for its rows only. */
#ifndef KEEPD_SERVER_OAI_ANTHROPIC_H
#define KEEPD_SERVER_OAI_ANTHROPIC_H

#include "server/oai/kind.h"

/* in anthropic_answer.c */
extern const struct oai_form oai_message_form;
void oai_message_error(struct buf *out, const struct oai_error *error, const char *request_id);

#endif
