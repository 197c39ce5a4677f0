/* Edits of the context, which a request to /v1/messages may ask for (context_management): old
 * results of tools and old thoughts are left out of the prompt, while the client keeps its whole
 * dialogue. What is left out depends on the request alone. Edits of other types, and limits in
 * another form, are skipped. */
#ifndef KEEPD_SERVER_OAI_EDITS_H
#define KEEPD_SERVER_OAI_EDITS_H

#include "server/oai/rewrite.h"

/* Stands in the prompt for a result that was left out. */
#define OAI_EDITED "[This result was left out to save context.]"

/* A call whose result is left out. */
struct oai_drop {
    const char *id;
    bool bare; /* without its arguments, too */
};

/* Decides what is left out; w->r->out->edits tells the answer. 0, or -1 with the reader's error. */
int oai_edits_read(struct oai_rewrite *w);
/* Returns what is left out of the call with this id; NULL: the call and its result stay as they
 * are. */
const struct oai_drop *oai_edits_drop(const struct oai_rewrite *w, const char *id);

/* Writes a comma and "context_management", if the request has it: the edits that were applied or,
 * in an answer that counts tokens (`tokens` after the edits; 0: none), the number before the edits.
 */
void oai_edits_write(struct buf *out, const struct oai_request *request, size_t tokens);

#endif
