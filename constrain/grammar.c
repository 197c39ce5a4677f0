#include "constrain/grammar.h"
int grammar_compile(struct node_pool *pool, const char *text, size_t size, uint32_t *out,
                    struct fault *fault) {
    (void)pool;
    (void)text;
    (void)size;
    (void)out;
    (void)fault;
    return ERR_UNSUPPORTED;
}
