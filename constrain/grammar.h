/* Grammars as text: GBNF (llama.cpp's; also XGrammar's EBNF) and Lark's form. A text with "::=" is
 * read as GBNF, any other as Lark.
 *
 * GBNF: rules `name ::= ...` from `root`; "literals", [classes] with ranges, ^ and escapes, '.',
 * groups, | * + ? {m,n}, comments with #.
 * Lark: rules `name: ...` from `start`; "strings" and "strings"i, /regular expressions/ with flags
 * i, s, m, u, "a".."z", (groups), [options], | * + ? ~n ~m..n, -> aliases, ?rule and !rule,
 * priorities, %ignore, %import of common terminals, %declare is refused. There is no lexer: texts
 * that Lark's lexer would cut elsewhere are read in every way that the rules allow. What is ignored
 * may stand before and after each terminal of a rule.
 *
 * Left recursion is read where a rule begins with itself; by way of other rules it is refused. */
#ifndef KEEPD_CONSTRAIN_GRAMMAR_H
#define KEEPD_CONSTRAIN_GRAMMAR_H

#include "constrain/node.h"

/* Faults have a text and no field. */
int grammar_compile(struct node_pool *pool, const char *text, size_t size, uint32_t *out,
                    struct fault *fault);

#endif
