/* Conversations in engine/steps/sched.c: what a turn continues, what makes room, forks, deletes. */
#include <criterion/criterion.h>

#include "tests/unit/engine/requests.h"

/* ---- Conversations ---- */

Test(conversations, a_turn_continues_where_the_last_one_ended) {
    struct world w;
    struct engine_kv kv = global(16, 4, 8);
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 64});
    cr_assert_eq(turn(&w, 0, 0, 30, kv), 0);
    cr_assert_eq(turns_kept(&w), 1);
    cr_assert_eq(turn(&w, 1, 30, 50, kv), 30);
    cr_assert_eq(turns_kept(&w), 2); /* the conversation and its superseded predecessor */
    cr_assert(w.sched.counters.conversation_hits == 1 && w.sched.counters.cached_tokens == 30);
    cr_assert_eq(w.sched.counters.computed_tokens, 50);
    world_close(&w);
}

Test(conversations, reuse_and_retain_can_be_refused) {
    struct world w;
    struct engine_kv kv = full(), fresh = full(), forgetful = full();
    fresh.reuse = false;
    forgetful.retain = false;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 64});
    cr_assert_eq(turn(&w, 0, 0, 30, forgetful), 0);
    cr_assert(w.sched.keeper.table.count == 0 && pages_used(&w) == 0);
    cr_assert_eq(turn(&w, 0, 0, 30, kv), 0);
    cr_assert_eq(turn(&w, 1, 30, 50, fresh), 0);
    cr_assert_eq(w.sched.keeper.table.count, 2);
    world_close(&w);
}

Test(conversations, scoring_neither_reuses_nor_retains) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 64});
    cr_assert_eq(turn(&w, 0, 0, 30, full()), 0);
    struct engine_job job = job_of(1, 50, 3, full());
    job.request.prompt = prompt_of(1, 30);
    job.request.prompt_logprobs = true;
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert(finish_of(&job) == ENGINE_FINISH_LENGTH && job.cached_tokens == 0);
    cr_assert_eq(w.sched.keeper.table.count, 1);
    cr_assert_eq(turn(&w, 2, 30, 50, full()), 30); /* the conversation is still there */
    engine_job_close(&job);
    world_close(&w);
}

/* Three conversations; a fourth needs pages: only the least recently used one is evicted. */
Test(conversations, the_oldest_conversation_makes_room) {
    struct world w;
    int page = slots_per_page();
    world_open(&w, &(struct world_options){
                       .pages = 5 * WORLD_STREAMS, .sequences = 2, .conversations = 8, .rows = 64});
    for (int i = 0; i < 3; i++) turn(&w, i, 0, page - 8, full());    /* a page each per stream */
    cr_assert_eq(turn(&w, 4, page - 8, page - 4, full()), page - 8); /* uses 0 again */
    cr_assert_eq(w.sched.keeper.table.count, 4);
    struct engine_job big = job_of(5, 2 * page + 1, 3, full());
    submit(&w, &big);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&big), ENGINE_FINISH_LENGTH);
    engine_job_close(&big);
    cr_assert_eq(w.sched.keeper.table.count, 3); /* 2, 4 and the big one */
    struct engine_job again = job_of(2, page - 2, 2, full());
    submit(&w, &again);
    run_until_idle(&w);
    cr_assert_eq(again.cached_tokens, page - 8);
    engine_job_close(&again);
    again = job_of(1, page - 2, 2, full());
    submit(&w, &again);
    run_until_idle(&w);
    cr_assert_eq(again.cached_tokens, 0);
    engine_job_close(&again);
    world_close(&w);
}

/* No conversation is evicted if that frees no pages. */
Test(conversations, waiting_forgets_nothing) {
    struct world w;
    int page = slots_per_page();
    struct engine_job runs = job_of(1, page + 1, 20, full());
    struct engine_job waits = job_of(2, 2 * page + 1, 2, full());
    world_open(
        &w, &(struct world_options){
                .pages = 4 * WORLD_STREAMS, .sequences = 2, .conversations = 8, .rows = 2 * page});
    turn(&w, 0, 0, 10, full());
    submit(&w, &runs);
    submit(&w, &waits);
    for (int i = 0; i < 3; i++) {
        cr_assert_not(world_step(&w));
        cr_assert(atomic_load(&waits.admitted) == 0 && w.sched.keeper.table.count == 1);
    }
    run_until_idle(&w);
    cr_assert_eq(finish_of(&waits), ENGINE_FINISH_LENGTH);
    engine_job_close(&runs);
    engine_job_close(&waits);
    world_close(&w);
}

Test(conversations, no_more_conversations_than_the_table_holds) {
    for (int most = 0; most < 3; most++) {
        struct world w;
        world_open(&w, &(struct world_options){
                           .pages = 400, .sequences = 2, .conversations = most, .rows = 64});
        for (int i = 0; i < 5; i++) turn(&w, i, 0, 10, full());
        cr_assert_eq(w.sched.keeper.table.count, most);
        world_close(&w);
    }
}

/* A conversation that could only go on with more pages than there are starts afresh: with chunk and
 * buffer of a page, two pages at its end and a chunk on top are one more than a fresh start needs.
 */
Test(conversations, a_conversation_too_large_to_go_on_starts_afresh) {
    struct world w;
    int page = slots_per_page();
    struct engine_job job = job_of(0, page, page + 1, global(page, page, page)), next;
    int32_t *prompt = prompt_of(1, 0), *first = prompt_of(0, 0);
    world_open(&w, &(struct world_options){
                       .pages = 3 * WORLD_STREAMS, .sequences = 1, .conversations = 2, .rows = 64});
    submit(&w, &job);
    run_until_idle(&w);
    cr_assert(finish_of(&job) == ENGINE_FINISH_LENGTH && w.sched.keeper.table.count == 1);
    next = job_of(1, 3 * page, 2, global(page, page, page));
    for (int i = 0; i < 2 * page; i++)
        prompt[i] = i < page ? first[i] : job.choice[0].tokens[i - page].token;
    submit(&w, &next);
    run_until_idle(&w);
    cr_assert(finish_of(&next) == ENGINE_FINISH_LENGTH && next.cached_tokens == 0);
    engine_job_close(&job);
    engine_job_close(&next);
    world_close(&w);
}

/* A dropped answer needs no pages: of a conversation no more can stay than the tokens both share.
 */
Test(conversations, what_a_prompt_drops_is_not_reserved) {
    struct world w;
    int page = slots_per_page();
    struct engine_job job = job_of(0, page / 2, 2 * page, full());
    world_open(&w, &(struct world_options){
                       .pages = 3 * WORLD_STREAMS, .sequences = 1, .conversations = 2, .rows = 64});
    submit(&w, &job);
    run_until_idle(&w);
    engine_job_close(&job);
    job = job_of(1, 2 * page, 1, full());
    job.request.prompt = prompt_of(1, page / 2);
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    cr_assert_eq(job.cached_tokens, page / 2);
    cr_assert_eq(w.sched.keeper.pages_reserved, 2 * WORLD_STREAMS);
    run_until_idle(&w);
    engine_job_close(&job);
    world_close(&w);
}

/* ---- Forks of conversations ---- */

/* A history, a turn on it, the same turn again, another last turn, and one more: each reads only
 * what is new, and the same turn from the same state gives the same answer. */
Test(conversations, retries_edits_and_questions_go_on_from_one_history) {
    struct world w;
    struct engine_kv kv = global(16, 4, 8);
    world_open(
        &w, &(struct world_options){.pages = 900, .sequences = 2, .conversations = 9, .rows = 64});
    cr_assert_eq(turn(&w, 0, 0, 30, kv), 0);
    struct engine_job first = ask(&w, 1, 30, 50, kv), again = ask(&w, 1, 30, 50, kv);
    cr_assert(first.cached_tokens == 30 && again.cached_tokens == 49, "a checkpoint of the first");
    expect_same_answer(&first, &again);
    cr_assert_eq(turns_kept(&w), 2, "the retry's equal answer replaced the first");
    struct engine_job edited = ask(&w, 2, 30, 45, kv), third = ask(&w, 3, 30, 31, kv);
    cr_assert(edited.cached_tokens == 30 && third.cached_tokens == 30);
    cr_assert_eq(turns_kept(&w), 4);
    cr_assert_eq(w.sched.counters.conversation_hits, 4);
    cr_assert_eq(w.sched.counters.conversation_cuts, 1);
    engine_job_close(&first);
    engine_job_close(&again);
    engine_job_close(&edited);
    engine_job_close(&third);
    world_close(&w);
}

/* However long a dialogue runs, its last state stays, the one before it, and two checkpoints. */
Test(conversations, a_linear_dialogue_keeps_two_states) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 900, .sequences = 2, .conversations = 9, .rows = 64});
    const struct conversation *convs = w.sched.keeper.table.all;
    const int32_t *prompt = prompt_of(0, 0);
    int same = 0; /* tokens of the last answer that the next prompt happens to repeat */
    for (int i = 0; i < 8; i++) {
        /* Each prompt is 30 tokens longer and drops the answer before it. */
        struct engine_job job = job_of(0, (i + 1) * 30, 3, global(16, 4, 8));
        submit(&w, &job);
        run_until_idle(&w);
        cr_assert_eq(job.cached_tokens, i * 30 + same);
        for (same = 0; same < 2; same++) /* the third was never appended */
            if (job.choice[0].tokens[same].token != prompt[(i + 1) * 30 + same]) break;
        engine_job_close(&job);
        int superseded = 0, count = turns_kept(&w), all = w.sched.keeper.table.count;
        for (int r = 0; r < 9; r++)
            superseded += convs[r].id != 0 && conversation_superseded(&convs[r]);
        cr_assert(count == (i == 0 ? 1 : 2) && all <= count + 2 && superseded == all - 1);
    }
    world_close(&w);
}

/* Superseded states are evicted before the last state of any dialogue. */
Test(conversations, superseded_states_make_room_first) {
    struct world w;
    int page = slots_per_page();
    world_open(&w, &(struct world_options){
                       .pages = 5 * WORLD_STREAMS, .sequences = 2, .conversations = 8, .rows = 64});
    turn(&w, 1, 0, page - 8, full());
    turn(&w, 0, 0, page - 12, full());
    cr_assert_eq(turn(&w, 2, page - 12, page - 8, full()), page - 12); /* 0 is superseded now */
    turn(&w, 3, 0, 2 * page - 8, full());
    cr_assert_eq(w.sched.keeper.table.count, 4);
    turn(&w, 4, 0, page - 8, full());
    cr_assert_eq(w.sched.keeper.table.count, 4);
    struct engine_job one = job_of(1, page - 2, 2, full());
    submit(&w, &one);
    run_until_idle(&w);
    cr_assert_eq(one.cached_tokens, page - 8, "the oldest last state went before a superseded one");
    engine_job_close(&one);
    world_close(&w);
}

/* A superseded state also gives up its slot before the last state of any dialogue. */
Test(conversations, superseded_states_give_up_their_place_first) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 3, .rows = 64});
    turn(&w, 1, 0, 20, full()); /* used longest ago */
    turn(&w, 0, 0, 20, full());
    cr_assert_eq(turn(&w, 2, 20, 30, full()), 20); /* 0 is superseded now: three are kept */
    const struct conversation_table *table = &w.sched.keeper.table;
    cr_assert(table->count == 3 && table->superseded_entries > 0);
    turn(&w, 3, 0, 20, full());
    cr_assert(table->count == 3 && table->superseded_entries == 0);
    struct engine_job one = job_of(1, 26, 2, full());
    submit(&w, &one);
    run_until_idle(&w);
    cr_assert_geq(one.cached_tokens, 20, "a last state went before a superseded one");
    engine_job_close(&one);
    world_close(&w);
}

/* Without room for both, a prompt that only begins like a conversation does not take it over: it is
 * read as a whole, and the least recently used makes room. */
Test(conversations, another_dialogue_does_not_use_a_conversation_up) {
    struct world w;
    int page = slots_per_page();
    for (int pages = 3; pages <= 8; pages += 5) {
        world_open(&w, &(struct world_options){.pages = (int64_t)pages * WORLD_STREAMS,
                                               .sequences = 1,
                                               .conversations = 2,
                                               .rows = 64});
        turn(&w, 0, 0, 2 * page - 8, full());
        cr_assert_eq(turn(&w, 1, page, 2 * page - 4, full()), pages == 3 ? 0 : page);
        world_close(&w);
    }
}

/* Without room for both a conversation and its next turn, the turn takes the conversation over. */
Test(conversations, a_conversation_is_used_up_when_both_do_not_fit) {
    struct world w;
    int page = slots_per_page();
    world_open(&w, &(struct world_options){
                       .pages = 3 * WORLD_STREAMS, .sequences = 1, .conversations = 2, .rows = 64});
    turn(&w, 0, 0, 2 * page - 8, full());
    cr_assert_eq(turn(&w, 1, 2 * page - 8, 2 * page - 4, full()), 2 * page - 8);
    cr_assert_eq(w.sched.keeper.table.count, 1);
    cr_assert_eq(w.sched.keeper.table.pages, 2 * WORLD_STREAMS);
    world_close(&w);
}

static int64_t token_pages(const struct world *w) {
    return w->sched.keeper.table.tokens * (int64_t)sizeof(int32_t) /
           w->sched.keeper.options.page_bytes;
}

/* The numbers of retained tokens share the pool's bound with the pages. Here a page is as large as
 * 16 of them, so that a prompt of 500 tokens takes 31 pages. */
Test(conversations, the_tokens_of_conversations_are_counted_as_pages) {
    struct world w;
    const struct conversation_table *table = &w.sched.keeper.table;
    world_open(
        &w, &(struct world_options){.pages = 100, .sequences = 2, .conversations = 8, .rows = 64});
    w.sched.keeper.options.page_bytes = 64;
    for (int i = 0; i < 6; i++) {
        cr_assert_eq(turn(&w, i, 0, 500, global(16, 4, 16)), 0);
        cr_assert_leq(table->pages + token_pages(&w), 100);
        cr_assert_leq(turns_kept(&w), 2);
        cr_assert_geq(turns_kept(&w), i < 1 ? 1 : 2);
    }
    cr_assert_geq(turn(&w, 5, 0, 520, global(16, 4, 16)), 500, "the last one was kept");
    for (int i = 6; i < 14; i++) turn(&w, i, 0, 20, global(16, 4, 16));
    cr_assert_eq(table->count, 8, "short ones have room");
    world_close(&w);
}

/* A conversation whose tokens alone are too many is answered, but not kept. */
Test(conversations, a_conversation_with_too_many_tokens_is_not_kept) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 30, .sequences = 2, .conversations = 8, .rows = 64});
    w.sched.keeper.options.page_bytes = 64;
    turn(&w, 0, 0, 500, global(16, 4, 16));
    cr_assert_eq(turns_kept(&w), 0);
    cr_assert_eq(pages_used(&w), 0);
    turn(&w, 1, 0, 50, global(16, 4, 16));
    cr_assert_eq(turns_kept(&w), 1);
    world_close(&w);
}

Test(conversations, why_a_prefix_was_lost_is_counted) {
    struct world w;
    const uint64_t *lost = w.sched.counters.conversation_lost;
    struct engine_kv fresh = full(), kv = global(100, 4, 8);
    fresh.reuse = false;
    kv.policy = "h2o"; /* adds attention up, so it cannot be cut */
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 1, .rows = 64});
    turn(&w, 0, 0, 30, kv);
    cr_assert_eq(lost[ENGINE_MISS_NEW], 1);
    turn(&w, 1, 20, 40, kv);
    cr_assert_eq(lost[ENGINE_MISS_DIVERGED], 1); /* and took the only slot */
    turn(&w, 0, 0, 50, kv);
    cr_assert_eq(lost[ENGINE_MISS_FORGOTTEN], 1);
    turn(&w, 0, 0, 50, kv);
    cr_assert_eq(lost[ENGINE_MISS_WHOLE], 1);
    turn(&w, 0, 0, 60, global(16, 4, 8));
    cr_assert_eq(lost[ENGINE_MISS_SETTINGS], 1);
    turn(&w, 4, 0, 10, fresh);
    cr_assert_eq(lost[ENGINE_MISS_NEW], 1, "who wants none has lost none");
    world_close(&w);
}

Test(conversations, deleting) {
    struct world w;
    world_open(
        &w, &(struct world_options){.pages = 400, .sequences = 2, .conversations = 4, .rows = 64});
    struct conversation_table *table = &w.sched.keeper.table;
    turn(&w, 0, 0, 30, full());
    turn(&w, 1, 30, 50, full());
    turn(&w, 2, 0, 20, full());
    uint64_t last = 0, other = 0;
    for (int i = 0; i < 4; i++) {
        const struct conversation *conv = &table->all[i];
        if (conv->id != 0 && conv->origin != 0) last = conv->id;
        if (conv->id != 0 && conv->token_count == 22) other = conv->id;
    }
    cr_assert_eq(keeper_delete(&w.sched.keeper, last + 1), ERR_NOTFOUND);
    cr_assert_eq(keeper_delete(&w.sched.keeper, last), 0); /* with its predecessor */
    world_check(&w);
    cr_assert(table->count == 1 && conversation_by_id(table, other));
    cr_assert_eq(keeper_delete(&w.sched.keeper, last), ERR_NOTFOUND);
    cr_assert_eq(turn(&w, 1, 30, 50, full()), 0);
    /* A request that already continues the conversation keeps its fork. */
    struct engine_job job = job_of(3, 40, 9, full());
    memcpy(prompt_of(3, 0), prompt_of(2, 0), 20 * sizeof(int32_t));
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    cr_assert_eq(job.cached_tokens, 20);
    cr_assert_eq(keeper_delete(&w.sched.keeper, other), 0);
    world_check(&w);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    engine_job_close(&job);
    world_close(&w);
}
