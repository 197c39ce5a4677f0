/* Foresees how an answer goes on where its language leaves little open: the bytes that are the only
 * ones possible, and white space where the language allows it, as the text has had it behind the
 * same byte before. (The tokens drafted from it are confirmed or not as any others, so this is a
 * guess and changes no answer; published as jump-forward decoding, where the bytes are taken as
 * given: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
 * arXiv 2312.07104, section 4.) */
#ifndef KEEPD_CONSTRAIN_FORESEE_H
#define KEEPD_CONSTRAIN_FORESEE_H

#include "constrain/automaton.h"

/* Writes at most `most` bytes that probably follow `text`, which led to `state`; returns how many.
 * The automaton's pool may have an error afterwards. */
size_t foresee_write(struct automaton *automaton, uint32_t state, const char *text, size_t size,
                     char *out, size_t most);

#endif
