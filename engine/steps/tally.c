#include "engine/steps/tally.h"

#include "base/check.h"
#include "base/err.h"
#include "base/mem.h"

int tally_open(struct tally *tally, int32_t tokens_max) {
    size_t size = 2;
    CHECK(tokens_max >= 0);
    while (size < 2 * (size_t)tokens_max) size *= 2;
    *tally = (struct tally){.mask = (uint32_t)(size - 1)};
    tally->list = mem_try_alloc((size_t)tokens_max + 1, sizeof *tally->list);
    tally->place = mem_try_alloc(size, sizeof *tally->place);
    if (tally->list && tally->place) return 0;
    tally_close(tally);
    return ERR_NOMEM;
}

void tally_close(struct tally *tally) {
    mem_free(tally->list);
    mem_free(tally->place);
    *tally = (struct tally){0};
}

/* Returns the entry of a token, which is added if there is none. The search ends, because the table
 * is at most half full. */
static struct kern_seen *find_or_add_seen(struct tally *tally, int32_t token) {
    uint32_t at = ((uint32_t)token * 0x9E3779B1u) >> 7 & tally->mask;
    for (; tally->place[at]; at = (at + 1) & tally->mask) {
        struct kern_seen *seen = &tally->list[tally->place[at] - 1];
        if (seen->token == token) return seen;
    }
    tally->list[tally->count] = (struct kern_seen){.token = token};
    tally->place[at] = ++tally->count;
    return &tally->list[tally->count - 1];
}

void tally_add(struct tally *tally, const int32_t *tokens, int32_t prompt_count,
               int32_t token_count) {
    for (; tally->added < token_count; tally->added++)
        find_or_add_seen(tally, tokens[tally->added])->outputs += tally->added >= prompt_count;
}
