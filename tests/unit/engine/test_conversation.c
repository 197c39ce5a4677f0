/* Tests engine/conversation.c: what a prompt may continue. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/mem.h"
#include "engine/conversation.h"

static struct kv_params kv_of(const char *policy, int budget) {
    struct kv_params kv = {.budget = budget, .buffer = 8, .chunk = 16};
    kv_params_set_policy(&kv, policy_find(policy));
    return kv;
}

static void add(struct conversation_table *t, int space, struct kv_params kv, const int32_t *tokens,
                int count, int prompt_end, int slot) {
    struct conversation row = {.kv = kv,
                               .tokens = mem_must_alloc((size_t)count, sizeof *tokens),
                               .token_count = count,
                               .prompt_end = prompt_end,
                               .slot = slot,
                               .pages = 10 + slot};
    memcpy(row.tokens, tokens, (size_t)count * sizeof *tokens);
    row.space[0] = (uint8_t)space;
    conversation_add(t, &row, 0);
}

static struct conversation *find(struct conversation_table *t, int space, struct kv_params kv,
                                 const int32_t *prompt, int count, int32_t *common,
                                 enum conversation_miss *miss) {
    uint8_t bytes[16] = {(uint8_t)space};
    return conversation_find(t, bytes, &kv, prompt, count, common, miss);
}

Test(conversation, longest_prefix_within_space_and_parameters) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    int32_t common;
    enum conversation_miss miss;
    conversation_table_open(&t, 4);
    add(&t, 1, kv, (int32_t[]){1, 2, 3, 4}, 4, 2, 0);
    add(&t, 1, kv, (int32_t[]){1, 2, 3, 4, 5, 6}, 6, 3, 1);
    add(&t, 2, kv, (int32_t[]){1, 2, 3, 4, 5, 6, 7}, 7, 3, 2);
    int32_t prompt[] = {1, 2, 3, 4, 5, 6, 7, 8};
    struct conversation *row = find(&t, 1, kv, prompt, 8, &common, &miss);
    cr_assert(row != NULL && row->slot == 1 && common == 6 && miss == CONVERSATION_HIT);
    row = find(&t, 2, kv, prompt, 8, &common, &miss);
    cr_assert(row != NULL && row->slot == 2 && common == 7);
    cr_assert_null(find(&t, 3, kv, prompt, 8, &common, &miss));
    cr_assert_eq(miss, CONVERSATION_NONE);
    cr_assert_null(find(&t, 1, kv_of("streaming", 33), prompt, 8, &common, &miss));
    cr_assert_null(find(&t, 1, kv_of("full", 32), prompt, 8, &common, &miss));
    conversation_table_close(&t);
}

Test(conversation, drops_only_after_the_previous_prompt) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    int32_t common;
    enum conversation_miss miss;
    conversation_table_open(&t, 1);
    add(&t, 1, kv, (int32_t[]){1, 2, 3, 4, 5}, 5, 3, 0); /* prompt 1 2 3, answer 4 5 */
    cr_assert_not_null(find(&t, 1, kv, (int32_t[]){1, 2, 3, 9}, 4, &common, &miss));
    cr_assert_eq(common, 3);
    cr_assert_null(find(&t, 1, kv, (int32_t[]){1, 2, 9, 9}, 4, &common, &miss));
    cr_assert_eq(miss, CONVERSATION_DIVERGED);
    /* The same prompt again adds no token: the last one would have to be dropped to get logits. */
    cr_assert_null(find(&t, 1, kv, (int32_t[]){1, 2, 3}, 3, &common, &miss));
    cr_assert_eq(miss, CONVERSATION_WHOLE);
    /* A prompt that ends inside the old answer leaves its last token to compute. */
    cr_assert_not_null(find(&t, 1, kv, (int32_t[]){1, 2, 3, 4}, 4, &common, &miss));
    cr_assert_eq(common, 3);
    conversation_table_close(&t);
}

Test(conversation, take_and_oldest) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    conversation_table_open(&t, 3);
    for (int i = 0; i < 3; i++) add(&t, i, kv, (int32_t[]){i}, 1, 1, i);
    cr_assert_eq(t.pages, 33);
    struct conversation *first = conversation_oldest(&t, NULL);
    cr_assert_eq(first->slot, 0);
    cr_assert_eq(conversation_oldest(&t, first)->slot, 1);
    struct conversation taken = conversation_take(&t, first);
    cr_assert(taken.slot == 0 && t.count == 2 && t.pages == 23);
    mem_free(taken.tokens);
    add(&t, 9, kv, (int32_t[]){9}, 1, 1, 0); /* its entry is free again; it is now the newest */
    cr_assert_eq(conversation_oldest(&t, NULL)->slot, 1);
    conversation_table_close(&t);
}
