#include "engine/conversation.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

void conversation_table_open(struct conversation_table *table, int capacity) {
    *table = (struct conversation_table){.capacity = capacity, .next_id = 1, .next_use = 1};
    table->rows = mem_must_alloc((size_t)(capacity > 0 ? capacity : 1), sizeof *table->rows);
}

void conversation_table_close(struct conversation_table *table) {
    for (int i = 0; i < table->capacity; i++) mem_free(table->rows[i].tokens);
    mem_free(table->rows);
    *table = (struct conversation_table){0};
}

void conversation_add(struct conversation_table *table, const struct conversation *row,
                      int64_t now_ns) {
    CHECK(table->count < table->capacity);
    struct conversation *to = table->rows;
    while (to->id != 0) to++;
    *to = *row;
    to->id = table->next_id++;
    to->use = table->next_use++;
    to->last_used_ns = now_ns;
    table->count++;
    table->changes++;
    table->pages += to->pages;
    table->entries += to->entries;
}

struct conversation conversation_take(struct conversation_table *table, struct conversation *row) {
    CHECK(row->id != 0);
    struct conversation taken = *row;
    *row = (struct conversation){0};
    table->count--;
    table->changes++;
    table->pages -= taken.pages;
    table->entries -= taken.entries;
    return taken;
}

struct conversation *conversation_oldest(struct conversation_table *table,
                                         const struct conversation *except) {
    struct conversation *oldest = NULL;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *row = &table->rows[i];
        if (row->id == 0 || row == except) continue;
        if (oldest == NULL || row->use < oldest->use) oldest = row;
    }
    return oldest;
}

/* Whole blocks by memcmp: a prompt may share thousands of tokens with hundreds of conversations. */
static int32_t common_prefix(const int32_t *a, int32_t a_count, const int32_t *b, int32_t b_count) {
    enum { BLOCK = 64 };
    int32_t n = a_count < b_count ? a_count : b_count, i = 0;
    while (n - i >= BLOCK && memcmp(a + i, b + i, BLOCK * sizeof *a) == 0) i += BLOCK;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

struct conversation *conversation_find(struct conversation_table *table, const uint8_t *space,
                                       const struct kv_params *kv, const int32_t *prompt,
                                       int32_t prompt_count, int32_t *common,
                                       enum conversation_miss *miss) {
    struct conversation *best = NULL;
    *common = 0;
    *miss = CONVERSATION_NONE;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *row = &table->rows[i];
        if (row->id == 0 || memcmp(row->space, space, sizeof row->space) != 0) continue;
        if (!kv_params_equal(&row->kv, kv)) continue;
        int32_t shared = common_prefix(row->tokens, row->token_count, prompt, prompt_count);
        int32_t usable = shared < prompt_count ? shared : prompt_count - 1;
        if (usable < row->prompt_end) {
            /* A shared template header is no loss worth reporting as one; it is still a miss. */
            if (shared > 0 && *miss == CONVERSATION_NONE)
                *miss = shared == prompt_count ? CONVERSATION_WHOLE : CONVERSATION_DIVERGED;
            continue;
        }
        if (best == NULL || usable > *common || (usable == *common && row->use > best->use)) {
            best = row;
            *common = usable;
        }
    }
    if (best != NULL) *miss = CONVERSATION_HIT;
    return best;
}
