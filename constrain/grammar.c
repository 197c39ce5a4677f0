#include "constrain/grammar.h"

int grammar_compile(struct node_pool *pool, const char *text, size_t size, uint32_t *out,
                    struct fault *fault) {
    (void)pool;
    (void)text;
    (void)size;
    *out = NODE_NONE;
    return fault_set(fault, ERR_UNSUPPORTED, NULL, "grammars are not supported");
}
