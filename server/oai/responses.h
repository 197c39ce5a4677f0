/* The form of a response, for the row of /v1/responses only. */
#ifndef KEEPD_SERVER_OAI_RESPONSES_H
#define KEEPD_SERVER_OAI_RESPONSES_H

#include "server/oai/kind.h"

/* The argument of a custom tool, as the model sees it. */
#define OAI_CUSTOM_INPUT "input"

extern const struct oai_form oai_response_form; /* responses_answer.c */

#endif
