/* Tests engine/kept/conversation.c: which conversations a prompt may continue. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine_pictures.h"
#include "engine/kept/conversation.h"

static struct kv_params kv_of(const char *policy, int budget) {
    struct kv_params kv = {.budget = budget, .buffer = 8, .chunk = 16};
    kv_params_set_policy(&kv, policy_find(policy));
    return kv;
}

static void add(struct conversation_table *t, int space, struct kv_params kv, const int32_t *tokens,
                int count, int prompt_end, int slot) {
    struct conversation conv = {.kv = kv,
                                .tokens = mem_must_alloc((size_t)count, sizeof *tokens),
                                .token_count = count,
                                .prompt_end = prompt_end,
                                .slot = slot,
                                .pages = 10 + slot,
                                .entries = 100 + slot};
    memcpy(conv.tokens, tokens, (size_t)count * sizeof *tokens);
    conv.space[0] = (uint8_t)space;
    conversation_add(t, &conv, 0);
}

static uint64_t hint; /* hint of the queries below */

static struct conversation *find(struct conversation_table *t, int space, struct kv_params kv,
                                 const int32_t *prompt, int count, int32_t *common,
                                 enum engine_miss *miss) {
    uint8_t bytes[16] = {(uint8_t)space};
    struct conversation_query query = {
        .space = bytes, .kv = &kv, .prompt = prompt, .prompt_count = count, .hint = hint};
    struct conversation_match match = conversation_find(t, &query);
    *common = match.common;
    *miss = match.miss;
    return match.conv;
}

Test(conversation, longest_prefix_within_space_and_parameters) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    int32_t common;
    enum engine_miss miss;
    conversation_table_open(&t, 4, false);
    add(&t, 1, kv, (int32_t[]){1, 2, 3, 4}, 4, 2, 0);
    add(&t, 1, kv, (int32_t[]){1, 2, 3, 4, 5, 6}, 6, 3, 1);
    add(&t, 2, kv, (int32_t[]){1, 2, 3, 4, 5, 6, 7}, 7, 3, 2);
    int32_t prompt[] = {1, 2, 3, 4, 5, 6, 7, 8};
    struct conversation *conv = find(&t, 1, kv, prompt, 8, &common, &miss);
    cr_assert(conv && conv->slot == 1 && common == 6);
    conv = find(&t, 2, kv, prompt, 8, &common, &miss);
    cr_assert(conv && conv->slot == 2 && common == 7);
    cr_assert_null(find(&t, 3, kv, prompt, 8, &common, &miss));
    cr_assert_eq(miss, ENGINE_MISS_NEW);
    cr_assert_null(find(&t, 1, kv_of("streaming", 33), prompt, 8, &common, &miss));
    cr_assert_null(find(&t, 1, kv_of("full", 32), prompt, 8, &common, &miss));
    cr_assert_eq(miss, ENGINE_MISS_SETTINGS);
    conversation_table_close(&t);
}

Test(conversation, drops_only_after_the_previous_prompt) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    int32_t common;
    enum engine_miss miss;
    conversation_table_open(&t, 1, false);
    add(&t, 1, kv, (int32_t[]){1, 2, 3, 4, 5}, 5, 3, 0); /* prompt 1 2 3, answer 4 5 */
    cr_assert_not_null(find(&t, 1, kv, (int32_t[]){1, 2, 3, 9}, 4, &common, &miss));
    cr_assert_eq(common, 3);
    cr_assert_null(find(&t, 1, kv, (int32_t[]){1, 2, 9, 9}, 4, &common, &miss));
    cr_assert_eq(miss, ENGINE_MISS_DIVERGED);
    /* The same prompt again adds no token: the last one would have to be dropped to get logits. */
    cr_assert_null(find(&t, 1, kv, (int32_t[]){1, 2, 3}, 3, &common, &miss));
    cr_assert_eq(miss, ENGINE_MISS_WHOLE);
    /* A prompt that ends inside the old answer leaves its last token to compute. */
    cr_assert_not_null(find(&t, 1, kv, (int32_t[]){1, 2, 3, 4}, 4, &common, &miss));
    cr_assert_eq(common, 3);
    conversation_table_close(&t);
}

Test(conversation, take_and_oldest) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    conversation_table_open(&t, 3, false);
    for (int i = 0; i < 3; i++) add(&t, i, kv, (int32_t[]){i}, 1, 1, i);
    cr_assert_eq(t.pages, 33);
    struct conversation *first =
        conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PLACES);
    cr_assert_eq(first->slot, 0);
    cr_assert_eq(conversation_next_victim(&t, first, NULL, false, CONVERSATION_PLACES)->slot, 1);
    struct conversation taken = conversation_remove(&t, first);
    cr_assert(taken.slot == 0 && t.count == 2 && t.pages == 23);
    mem_free(taken.tokens);
    add(&t, 9, kv, (int32_t[]){9}, 1, 1,
        0); /* the row is free again; the conversation is now the newest */
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PLACES)->slot, 1);
    conversation_table_close(&t);
}

/* The table is filled by one client; the conversation of another stays, also when it is the oldest.
 * The pages count where pages are short. A conversation that nobody has used for long goes at last.
 */
Test(conversation, of_a_client_that_holds_more_goes_first) {
    enum { PLACES = 8 };
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    conversation_table_open(&t, PLACES, false);
    add(&t, 1, kv, (int32_t[]){1}, 1, 1, 0);
    for (int i = 1; i < PLACES; i++) add(&t, 1, kv, (int32_t[]){i}, 1, 1, i);
    for (int i = 1; i < PLACES; i++) {
        struct conversation conv = conversation_remove(&t, &t.all[i]);
        conv.client[0] = 1;
        (void)conversation_add(&t, &conv, 0);
    }
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PLACES)->slot, 1);
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PAGES)->slot, 1);
    uint8_t other[16] = {1};
    cr_assert_eq(conversation_pages_of(&t, other), t.pages - 10);
    struct conversation wide = conversation_remove(&t, &t.all[0]);
    wide.pages = 1000;
    (void)conversation_add(&t, &wide, 0);
    for (int i = 1; i < PLACES; i++) conversation_touch(&t, &t.all[i], 0, 0);
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PLACES)->slot, 1);
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PAGES)->slot, 0);
    for (int i = 0; i < PLACES * PLACES; i++)
        conversation_touch(&t, &t.all[1 + i % (PLACES - 1)], 0, 0);
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PLACES)->slot, 0,
                 "its client is away");
    conversation_table_close(&t);
}

Test(conversation, superseded_ones_go_first) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    conversation_table_open(&t, 3, false);
    for (int i = 0; i < 3; i++) add(&t, i, kv, (int32_t[]){i}, 1, 1, i);
    conversation_followed(&t, &t.all[2]);
    cr_assert(conversation_superseded(&t.all[2]));
    cr_assert(t.pages == 33 && t.superseded_pages == 12 && t.superseded_entries == 102);
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PLACES), &t.all[2]);
    conversation_followed(&t, &t.all[2]); /* a conversation with two successors is not superseded */
    cr_assert_not(conversation_superseded(&t.all[2]));
    cr_assert(t.superseded_pages == 0 && t.superseded_entries == 0 && t.entries == 303);
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PLACES), &t.all[0]);
    conversation_touch(&t, &t.all[0], 0, 0);
    cr_assert_eq(conversation_next_victim(&t, NULL, NULL, false, CONVERSATION_PLACES), &t.all[1]);
    conversation_followed(&t, &t.all[1]);
    mem_free(conversation_remove(&t, &t.all[1]).tokens);
    cr_assert(t.superseded_pages == 0 && t.superseded_entries == 0 && t.entries == 202);
    conversation_table_close(&t);
}

Test(conversation, a_hint_decides_among_equals_only) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    int32_t common;
    enum engine_miss miss;
    conversation_table_open(&t, 3, false);
    add(&t, 1, kv, (int32_t[]){1, 2, 3}, 3, 2, 0);
    add(&t, 1, kv, (int32_t[]){1, 2, 4}, 3, 2, 1);
    add(&t, 1, kv, (int32_t[]){1, 2, 5, 6}, 4, 2, 2);
    for (int i = 0; i < 3; i++) t.all[i].hint = 70 + (uint64_t)i;
    int32_t prompt[] = {1, 2, 9}, longer[] = {1, 2, 5, 9};
    hint = 0;
    cr_assert_eq(find(&t, 1, kv, prompt, 3, &common, &miss)->slot, 2); /* used last */
    hint = 70;
    cr_assert_eq(find(&t, 1, kv, prompt, 3, &common, &miss)->slot, 0);
    cr_assert_eq(find(&t, 1, kv, longer, 4, &common, &miss)->slot, 2); /* more tokens count more */
    hint = 99;
    cr_assert_eq(find(&t, 1, kv, prompt, 3, &common, &miss)->slot, 2);
    hint = 0;
    conversation_table_close(&t);
}

Test(conversation, what_was_forgotten_is_told) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    int32_t common, prompt[] = {1, 2, 3, 4};
    enum engine_miss miss;
    conversation_table_open(&t, 1, false);
    add(&t, 1, kv, (int32_t[]){1, 2, 3}, 3, 2, 0);
    conversation_note_gone(&t, t.all[0].space, t.all[0].prompt_end, t.all[0].prompt_hash);
    struct conversation taken = conversation_remove(&t, &t.all[0]);
    mem_free(taken.tokens);
    cr_assert_null(find(&t, 1, kv, prompt, 4, &common, &miss));
    cr_assert_eq(miss, ENGINE_MISS_FORGOTTEN);
    cr_assert_null(find(&t, 2, kv, prompt, 4, &common, &miss)); /* other spaces find nothing */
    cr_assert_eq(miss, ENGINE_MISS_NEW);
    cr_assert_null(find(&t, 1, kv, (int32_t[]){1, 9, 3}, 3, &common, &miss));
    cr_assert_eq(miss, ENGINE_MISS_NEW);
    conversation_table_close(&t);
}

Test(conversation, ids_are_random_and_found) {
    struct conversation_table a, b;
    struct kv_params kv = kv_of("streaming", 32);
    conversation_table_open(&a, 2, false);
    conversation_table_open(&b, 2, false);
    for (int i = 0; i < 2; i++) add(&a, 1, kv, (int32_t[]){1}, 1, 1, i);
    add(&b, 1, kv, (int32_t[]){1}, 1, 1, 0);
    cr_assert(a.all[0].id != 0 && a.all[0].id != a.all[1].id && a.all[0].id != b.all[0].id);
    cr_assert_eq(conversation_by_id(&a, a.all[1].id), &a.all[1]);
    cr_assert_null(conversation_by_id(&a, b.all[0].id));
    cr_assert_null(conversation_by_id(&a, 0));
    conversation_table_close(&a);
    conversation_table_close(&b);
}

/* ---- Known by hashes only ---- */

static int32_t usable(const struct conversation *conv, int space, const struct kv_params *kv,
                      const int32_t *prompt, int count) {
    const uint8_t bytes[16] = {(uint8_t)space};
    const struct conversation_query query = {
        .space = bytes, .kv = kv, .prompt = prompt, .prompt_count = count};
    struct conversation_search search = {.query = &query};
    int32_t found = conversation_usable_or_cut(&search, conv, NULL);
    conversation_search_close(&search);
    return found;
}

/* Hashes give the same result as tokens: a match of everything, of the prompt, or nothing. */
Test(conversation, hashes_find_what_tokens_find) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32), other = kv_of("streaming", 33);
    conversation_table_open(&t, 1, false);
    add(&t, 1, kv, (int32_t[]){1, 2, 3, 4}, 4, 2, 0);
    const struct conversation *conv = &t.all[0];
    cr_assert_eq(usable(conv, 1, &kv, (int32_t[]){1, 2, 3, 4, 5}, 5), 4);
    cr_assert_eq(usable(conv, 1, &kv, (int32_t[]){1, 2, 3, 9, 5}, 5), 2);
    cr_assert_eq(usable(conv, 1, &kv, (int32_t[]){1, 2, 3, 4}, 4), 2, "one is left to compute");
    cr_assert_eq(usable(conv, 1, &kv, (int32_t[]){1, 2}, 2), 0);
    cr_assert_eq(usable(conv, 1, &kv, (int32_t[]){1, 9, 3, 4, 5}, 5), 0);
    cr_assert_eq(usable(conv, 2, &kv, (int32_t[]){1, 2, 3, 4, 5}, 5), 0, "another space");
    cr_assert_eq(usable(conv, 1, &other, (int32_t[]){1, 2, 3, 4, 5}, 5), 0, "other settings");
    mem_fail_after(0);
    cr_assert_eq(usable(conv, 1, &kv, (int32_t[]){1, 2, 3, 4, 5}, 5), 0, "no memory: as if none");
    mem_fail_after(-1);
    conversation_table_close(&t);
}

/* With recurrent states nothing is continued but at its end: not where an answer differs, nor from
 * the middle, by tokens as by hashes. */
Test(conversation, states_are_continued_at_their_end_alone) {
    struct conversation_table t;
    struct kv_params kv = kv_of("streaming", 32);
    int32_t tokens[100], common;
    enum engine_miss miss;
    kv.whole = true;
    for (int i = 0; i < 100; i++) tokens[i] = i + 1;
    conversation_table_open(&t, 2, false);
    add(&t, 1, kv, tokens, 60, 40, 0);
    t.all[0].exact = true;
    const struct conversation *conv = &t.all[0];
    cr_assert_eq(find(&t, 1, kv, tokens, 100, &common, &miss), conv);
    cr_assert_eq(common, 60);
    cr_assert_eq(usable(conv, 1, &kv, tokens, 100), 60);
    cr_assert_null(find(&t, 1, kv, tokens, 60, &common, &miss), "one token is left to compute");
    cr_assert_eq(usable(conv, 1, &kv, tokens, 60), 0);
    tokens[50] = 0;
    cr_assert_null(find(&t, 1, kv, tokens, 100, &common, &miss));
    cr_assert_eq(miss, ENGINE_MISS_DIVERGED);
    cr_assert_eq(usable(conv, 1, &kv, tokens, 100), 0);
    tokens[20] = 0;
    cr_assert_null(find(&t, 1, kv, tokens, 100, &common, &miss));
    t.all[0].kv.whole = kv.whole = false;
    cr_assert_eq(find(&t, 1, kv, tokens, 100, &common, &miss), conv, "a cut");
    conversation_table_close(&t);
}

/* Opens a table with a turn of 56 tokens, which evicted at 48, and a checkpoint at its first 32.
 * `tokens`: 60 numbers, of which both have the first. */
static void open_with_checkpoint(struct conversation_table *t, bool windows, struct kv_params kv,
                                 int prompt_end, int32_t *tokens) {
    for (int i = 0; i < 60; i++) tokens[i] = i;
    conversation_table_open(t, 2, windows);
    add(t, 1, kv, tokens, 56, prompt_end, 0);
    t->all[0].evicted_at = 48;
    add(t, 1, kv, tokens, 32, prompt_end, 1);
    t->all[1].checkpoint = t->all[1].exact = true;
}

/* The whole answer is dropped, reasoning and all, after an eviction in it that took entries of the
 * prompt. The checkpoint at the prompt's end has them, and saves as many tokens. */
Test(conversation, a_checkpoint_goes_before_a_turn_that_made_room_for_what_is_dropped) {
    const struct kv_params kv = kv_of("streaming", 64);
    for (int dropped = 0; dropped < 2; dropped++) {
        struct conversation_table t;
        int32_t tokens[60], common;
        enum engine_miss miss;
        open_with_checkpoint(&t, false, kv, 32, tokens);
        tokens[dropped ? 32 : 33] = 99;
        struct conversation *conv = find(&t, 1, kv, tokens, 60, &common, &miss);
        cr_assert_not_null(conv);
        cr_expect_eq(conv->slot, dropped);
        cr_expect_eq(common, dropped ? 32 : 33);
        t.all[0].evicted_at = 32; /* nothing since then: the turn is what it would have been */
        t.all[0].exact = true;
        conv = find(&t, 1, kv, tokens, 60, &common, &miss);
        cr_expect(conv && conv->slot == 0 && common == (dropped ? 32 : 33));
        conversation_table_close(&t);
    }
}

/* The end of an answer is dropped after an eviction in it. Entries that had left a sliding window
 * by then are gone, although the next query would see them; a checkpoint from before has them. */
Test(conversation, a_checkpoint_goes_before_a_turn_that_lost_its_window) {
    const struct kv_params kv = kv_of("streaming", 64);
    for (int windows = 0; windows < 2; windows++) {
        struct conversation_table t;
        int32_t tokens[60], common;
        enum engine_miss miss;
        open_with_checkpoint(&t, windows, kv, 30, tokens);
        tokens[40] = 99; /* the prompt repeats 40 tokens */
        struct conversation *conv = find(&t, 1, kv, tokens, 60, &common, &miss);
        cr_assert_not_null(conv);
        cr_expect_eq(conv->slot, windows, "windows %d", windows);
        cr_expect_eq(common, windows ? 32 : 40);
        t.all[1].kv.policy = t.all[0].kv.policy = policy_find("full");
        struct kv_params full = t.all[0].kv;
        conv = find(&t, 1, full, tokens, 60, &common, &miss);
        cr_expect(conv && common == (windows ? 32 : 40));
        t.all[1].token_count = 0; /* without the checkpoint `full` does not serve what is lost */
        conv = find(&t, 1, full, tokens, 60, &common, &miss);
        cr_expect_eq(conv != NULL, !windows);
        t.all[1].token_count = 32;
        t.all[1].kv = t.all[0].kv = kv;
        t.all[0].evicted_at = 36; /* nothing since then: all that the 40 tokens need is there */
        conv = find(&t, 1, kv, tokens, 60, &common, &miss);
        cr_expect(conv && conv->slot == 0 && common == 40);
        conversation_table_close(&t);
    }
}

/* Rows of pictures have ids beyond the vocabulary. Pictures that differ have nothing in common,
 * also where their first ids are equal; one that both texts show can be shared in part. */
Test(conversation, pictures_that_differ_have_nothing_in_common) {
    enum { P = ENGINE_PICTURE_IDS, COUNT = 8 };
    const int32_t a[COUNT] = {1, 2, P + 1, P + 2, P + 3, 7, P + 4, P + 5};
    int32_t b[COUNT];
    for (int at = 0; at < COUNT; at++) {
        memcpy(b, a, sizeof b);
        b[at] += at == 1 ? P : 50;
        const int expected[COUNT] = {0, 1, 2, 2, 2, 5, 6, 6};
        cr_assert_eq(conversation_common(a, COUNT, b, COUNT), expected[at], "%d", at);
        cr_assert_eq(conversation_common(a, COUNT, a, at), at);
    }
}
