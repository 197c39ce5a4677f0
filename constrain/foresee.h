/* Foresees how an answer goes on where its language leaves little choice: bytes that are the only
 * possible ones, and white space where the language allows it, as the text had it after the same
 * byte before.
 *
 * This is a guess and changes no answer: tokens are drafted from these bytes, and drafted tokens
 * are confirmed or dropped. The method is published as jump-forward decoding, where the bytes are
 * taken as given: Zheng et al., "SGLang: Efficient Execution of Structured Language Model
 * Programs", arXiv 2312.07104, section 4. */
#ifndef KEEPD_CONSTRAIN_FORESEE_H
#define KEEPD_CONSTRAIN_FORESEE_H

#include "constrain/automaton.h"

/* Writes at most `most` bytes that probably follow `text`, which led to `state`; returns how many.
 * The automaton's pool may have an error afterwards. */
size_t foresee_write(struct automaton *automaton, uint32_t state, const char *text, size_t size,
                     char *out, size_t most);

#endif
