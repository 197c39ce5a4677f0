/* Edits of the context, which a request to /v1/messages may ask for (context_management): results
 * of tools and thoughts that are old are left out of the prompt, while the client keeps its
 * dialogue whole. What is left out follows from the request alone. Edits of other types, and limits
 * in another form, are skipped. */
#ifndef KEEPD_SERVER_OAI_EDITS_H
#define KEEPD_SERVER_OAI_EDITS_H

#include "server/oai/rewrite.h"

/* Stands in the prompt for a result that was left out. */
#define OAI_EDITED "[This result was left out to save context.]"

/* A call whose result is left out. */
struct oai_drop {
    const char *id;
    bool bare; /* so are its arguments */
};

/* Decides what is left out; w->r->out->edits tells the answer. 0, or -1 with the reader's error. */
int oai_edits_read(struct oai_rewrite *w);
/* NULL: the call and its result stay as they are. */
const struct oai_drop *oai_edits_drop(const struct oai_rewrite *w, const char *id);

/* Writes "context_management" behind a comma, if the request has it: the edits that were applied,
 * or, for a count of `tokens` (0: none) after the edits, the number before them. */
void oai_edits_write(struct buf *out, const struct oai_request *request, size_t tokens);

#endif
