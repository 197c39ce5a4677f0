/* PCRE2 with memory that may run short: objects made with this context come from mem_try_alloc. */
#ifndef KEEPD_TEXT_PCRE_H
#define KEEPD_TEXT_PCRE_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/mem.h"

static inline void *text_pcre_alloc(size_t size, void *unused) {
    (void)unused;
    return mem_try_alloc(size, 1);
}

static inline void text_pcre_free(void *p, void *unused) {
    (void)unused;
    mem_free(p);
}

/* NULL: no memory. The caller frees it; objects made with it outlive it. */
static inline pcre2_general_context *text_pcre_memory(void) {
    return pcre2_general_context_create(text_pcre_alloc, text_pcre_free, NULL);
}

#endif
