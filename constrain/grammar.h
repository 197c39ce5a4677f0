/* Grammars as text: GBNF (llama.cpp, SGLang, XGrammar) and Lark's form (vLLM, llguidance). A text
 * in which a line begins with "name ::=" is GBNF, every other is Lark's.
 *
 * GBNF: rules `name ::= alternatives`; the language is that of `root`. Read are "text", [classes],
 * '.', groups, * + ? {m} {m,} {m,n}, and comments with '#'. A rule goes on until the next one
 * begins. Tokens (<...>) are refused by name.
 *
 * Lark: rules and TERMINALS `name: alternatives`; the language is that of `start`. Read are "text"
 * and "text"i, /expression/ and /expression/i (constrain/regex.h), "a".."z", groups, [optional], *
 * + ? ~n ~n..m, `-> alias`, priorities (they do not change the language), %ignore, and %import of
 * the terminals of `common`. Templates, other imports, %declare, %override, %extend and
 * llguidance's % forms are refused by name. There is no lexer: a text belongs to the language if it
 * can be divided into terminals in any way, and what %ignore names may stand before, between and
 * after terminals.
 *
 * Rules may be recursive. A rule that begins with itself is rewritten; one that begins with itself
 * by way of others is refused by its name. */
#ifndef KEEPD_CONSTRAIN_GRAMMAR_H
#define KEEPD_CONSTRAIN_GRAMMAR_H

#include "constrain/node.h"

/* On failure the fault has a text, which begins with line and column, and no field. NODE_NONE with
 * 0: no text belongs to the language. The pool's own error is returned, too, without a text. */
int grammar_compile(struct node_pool *pool, const char *text, size_t size, uint32_t *out,
                    struct fault *fault);

#endif
