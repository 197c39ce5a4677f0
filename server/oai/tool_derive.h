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

/* Renders a template for a context. The returned text stays valid during the next three calls.
 * NULL: the template refuses the context. */
typedef const char *tool_render(void *arg, const cJSON *context);

/* Returns whether a form was found. */
bool tool_derive(tool_render *render, void *arg, struct tool_derived *out);

/* Returns the form of a template: the row that the words of its source name, or the form that it
 * renders, which is then in *out. NULL: it has none. */
const struct tool_form *tool_find(const char *source, tool_render *render, void *arg,
                                  struct tool_derived *out);

/* Returns whether the template shows an answer's text but not its calls. */
bool tool_hides_calls(tool_render *render, void *arg);

#endif
