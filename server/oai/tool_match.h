/* Matching of words at a place of growing text, for tool_calls.c and tool_tags.c. */
#ifndef KEEPD_SERVER_OAI_TOOL_MATCH_H
#define KEEPD_SERVER_OAI_TOOL_MATCH_H

#include <string.h>

#include "server/oai/tool_form.h"
#include "server/oai/tool_json.h"

enum match { MATCH_NO, MATCH_MORE /* the text may become it */, MATCH_YES };

struct cursor {
    const char *text;
    size_t at, end;
};

static inline void skip_blank(struct cursor *c) {
    while (c->at < c->end && tool_json_blank(c->text[c->at])) c->at++;
}

/* Matches bytes. On YES the cursor is after the word, otherwise it does not move. */
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

static inline bool is_word_byte(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
}

/* Matches a mark. TOOL_ANY in it takes all bytes of a word. */
static inline enum match match_mark_of(struct cursor *c, const struct tool_mark *mark) {
    struct cursor at = *c;
    for (size_t i = 0; i < mark->size; i++) {
        if (mark->text[i] == TOOL_ANY)
            while (at.at < at.end && is_word_byte(at.text[at.at])) at.at++;
        if (at.at == at.end) return MATCH_MORE;
        if (mark->text[i] != TOOL_ANY && at.text[at.at++] != mark->text[i]) return MATCH_NO;
    }
    *c = at;
    return MATCH_YES;
}

#endif
