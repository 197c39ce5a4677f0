/* Finds the form of calls of a chat template from what the template renders: a chat with one call,
 * one with two, and one with an answer. The texts around the names and the arguments are those of
 * the form (tool_form.h).
 *
 * It finds objects with "name" between tags, and names between marks whose arguments are JSON or
 * tags. It finds nothing if a template shows no calls, or writes them in another way. */
#ifndef KEEPD_SERVER_OAI_TOOL_DERIVE_H
#define KEEPD_SERVER_OAI_TOOL_DERIVE_H

#include "server/oai/tool_form.h"

#define TOOL_DERIVED_BYTES 4096

struct tool_derived {
    struct tool_form form; /* name "template"; its texts are in `texts` */
    struct constrain_tags tags;
    char texts[TOOL_DERIVED_BYTES];
    size_t used;
};

/* Renders a template for a context. The returned text stays valid during the next two calls. NULL:
 * the template refuses the context. */
typedef const char *tool_render(void *arg, const cJSON *context);

/* Returns whether a form was found. */
bool tool_derive(tool_render *render, void *arg, struct tool_derived *out);

#endif
