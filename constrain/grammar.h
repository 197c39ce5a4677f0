/* Grammars as text, in GBNF or Lark's form. No form is read yet: every grammar is refused. */
#ifndef KEEPD_CONSTRAIN_GRAMMAR_H
#define KEEPD_CONSTRAIN_GRAMMAR_H

#include "constrain/node.h"

/* ERR_UNSUPPORTED. */
int grammar_compile(struct node_pool *pool, const char *text, size_t size, uint32_t *out,
                    struct fault *fault);

#endif
