/* Matching of words at a place of growing text, for tool_calls.c and tool_tags.c. */
#ifndef KEEPD_SERVER_OAI_TOOL_MATCH_H
#define KEEPD_SERVER_OAI_TOOL_MATCH_H

#include <string.h>

#include "server/oai/tool_json.h"

enum match { MATCH_NO, MATCH_MORE /* the text may become it */, MATCH_YES };

struct cursor {
    const char *text;
    size_t at, end;
};

static inline void skip_blank(struct cursor *c) {
    while (c->at < c->end && tool_json_blank(c->text[c->at])) c->at++;
}

/* YES: the cursor stands behind the word. Otherwise it stays. */
static inline enum match match_bytes(struct cursor *c, const char *word, size_t size) {
    size_t left = c->end - c->at;
    size_t most = size < left ? size : left;
    if (memcmp(c->text + c->at, word, most) != 0) return MATCH_NO;
    if (most < size) return MATCH_MORE;
    c->at += size;
    return MATCH_YES;
}

static inline enum match match_word(struct cursor *c, const char *word) {
    return match_bytes(c, word, strlen(word));
}

#endif
