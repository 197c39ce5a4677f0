/* Conversations of engine/sched.c on disk: written, restored, replaced, deleted, and every failure
 * on the way. */
#include <criterion/criterion.h>

#include "base/clock.h"
#include "base/mem.h"
#include "tests/unit/engine/requests.h"

/* A world with a state directory of its own. */
struct stored {
    struct world w;
    struct world_options options;
    char dir[64];
};

/* What `options` leaves at 0 gets a usual value. */
static void stored_open(struct stored *s, struct world_options options) {
    if (options.pages == 0) options.pages = 900;
    options.sequences = 3;
    options.rows = 64;
    options.state_dir = s->dir;
    s->options = options;
    world_make_dir(s->dir);
    world_open(&s->w, &s->options);
}

static void stored_restart(struct stored *s) {
    world_close(&s->w);
    world_open(&s->w, &s->options);
}

static void stored_close(struct stored *s) {
    world_close(&s->w);
    world_remove_dir(s->dir);
}

static struct store_stats stats_of(const struct stored *s) {
    struct store_stats stats;
    store_stats(s->w.store, &stats);
    return stats;
}

/* A turn after a restart equals the turn that needed none, bit for bit. */
Test(state, a_conversation_outlives_the_process) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 9, .state_eager = true});
    cr_assert_eq(turn(&s.w, 0, 0, 60, kv), 0);
    cr_assert_not(world_step(&s.w)); /* nothing else to do: it is written */
    cr_assert_eq(stats_of(&s).files, 1);
    struct engine_job before = ask(&s.w, 1, 60, 90, kv);
    stored_restart(&s);
    struct engine_job after = ask(&s.w, 1, 60, 90, kv);
    cr_assert(before.cached_tokens == 60 && after.cached_tokens == 60);
    expect_same_answer(&before, &after);
    cr_assert_eq(after.kv.kept_entries, before.kv.kept_entries);
    cr_assert_eq(s.w.sched.counters.state_restored, 1);
    engine_job_close(&before);
    engine_job_close(&after);
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 1, "the file of what was superseded stayed");
    stored_close(&s);
}

/* With one place and pages for hardly more, each of five conversations is there when asked. */
Test(state, what_makes_room_comes_back) {
    struct stored s;
    int page = slots_per_page();
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 2, .pages = 6 * WORLD_STREAMS});
    for (int i = 1; i <= 5; i++) cr_assert_eq(turn(&s.w, i, 0, page + i, kv), 0);
    cr_assert_geq(stats_of(&s).files, 3);
    for (int i = 1; i <= 5; i++) {
        struct engine_job job = job_of(i, page + i + 10, 2, kv);
        submit(&s.w, &job);
        run_until_idle(&s.w);
        cr_assert_geq(job.cached_tokens, page + i, "conversation %d was lost", i);
        engine_job_close(&job);
    }
    cr_assert_eq(s.w.sched.counters.conversation_lost[ENGINE_MISS_FORGOTTEN], 0);
    cr_assert_eq(s.w.sched.counters.preemptions, 0);
    stored_close(&s);
}

Test(state, unbounded_states_are_not_written) {
    struct stored s;
    stored_open(&s, (struct world_options){.conversations = 9, .state_eager = true});
    turn(&s.w, 0, 0, 60, full());
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 0);
    stored_close(&s);
}

Test(state, deleting_reaches_the_disk) {
    struct stored s;
    stored_open(&s, (struct world_options){.conversations = 9, .state_eager = true});
    turn(&s.w, 0, 0, 60, global(16, 4, 8));
    world_save_all(&s.w);
    turn(&s.w, 1, 60, 80, global(16, 4, 8));
    uint64_t last = 0, only_on_disk;
    for (int i = 0; i < 9; i++)
        if (s.w.sched.conversations.rows[i].token_count == 82)
            last = s.w.sched.conversations.rows[i].id;
    cr_assert_eq(sched_delete(&s.w.sched, last), 0);
    cr_assert(s.w.sched.conversations.count == 0 && stats_of(&s).files == 0);
    turn(&s.w, 2, 0, 60, global(16, 4, 8));
    world_save_all(&s.w);
    only_on_disk = s.w.sched.conversations.rows[0].id;
    stored_restart(&s);
    cr_assert_eq(sched_delete(&s.w.sched, only_on_disk), 0);
    cr_assert_eq(sched_delete(&s.w.sched, only_on_disk), ERR_NOTFOUND);
    cr_assert_eq(stats_of(&s).files, 0);
    stored_close(&s);
}

/* An export or an import fails: a conversation is read again, and nobody else notices. */
Test(state, failing_exports_and_imports_cost_only_the_state) {
    static const enum world_op ops[] = {WORLD_EXPORT, WORLD_IMPORT};
    for (int o = 0; o < 2; o++)
        for (long n = 0; n < (o == 0 ? 1 + WORLD_STREAMS : 1); n++) {
            struct stored s;
            struct engine_kv kv = global(16, 4, 8);
            stored_open(&s, (struct world_options){.conversations = 9, .state_eager = true});
            if (o == 0) world_fail(ops[o], n, ERR_DEVICE);
            turn(&s.w, 0, 0, 60, kv);
            world_save_all(&s.w);
            stored_restart(&s);
            if (o == 1) world_fail(ops[o], n, ERR_FULL);
            cr_assert_eq(turn(&s.w, 1, 60, 90, kv), 0);
            cr_assert_not(world_fail_pending());
            const uint64_t *lost = s.w.sched.counters.conversation_lost;
            cr_assert_eq(lost[o == 0 ? ENGINE_MISS_NEW : ENGINE_MISS_DAMAGED], 1);
            world_fail_never();
            stored_close(&s);
        }
}

/* The n-th allocation while a conversation goes out and comes back fails: the request is answered
 * all the same, from its state or from nothing. */
Test(state, saving_and_restoring_survive_missing_memory) {
    for (long n = 0, pending = 0; pending == 0; n++) {
        struct stored s;
        struct engine_kv kv = global(16, 4, 8);
        stored_open(&s, (struct world_options){.conversations = 9, .state_eager = true});
        turn(&s.w, 0, 0, 60, kv);
        mem_fail_after(n);
        world_save_all(&s.w);
        mem_fail_after(-1);
        world_save_all(&s.w);
        stored_restart(&s);
        /* The backend's step state grows to its size: that is configuration, not requests. */
        struct engine_job job = job_of(2, 90, 3, kv);
        job.request.kv.retain = false;
        submit(&s.w, &job);
        run_until_idle(&s.w);
        engine_job_close(&job);
        job = job_of(1, 90, 3, kv);
        job.request.prompt = prompt_of(1, 60);
        submit(&s.w, &job);
        bool failed;
        mem_fail_after(n);
        sched_step(&s.w.sched, &failed);
        pending = mem_fail_pending();
        mem_fail_after(-1);
        sched_publish_finished(&s.w.sched);
        world_check(&s.w);
        run_until_idle(&s.w);
        cr_assert(job.cached_tokens == 60 || job.cached_tokens == 0 || job.fault.code == ERR_NOMEM);
        engine_job_close(&job);
        stored_close(&s);
        cr_assert_lt(n, 60);
    }
}

/* A turn takes over a conversation of which a part has been copied out already. */
Test(state, using_up_a_conversation_ends_its_export) {
    struct stored s;
    struct engine_kv kv = global(60, 4, 64);
    /* the conversation has 4 of them, its next turn may need 7 */
    stored_open(&s, (struct world_options){
                        .conversations = 2, .state_eager = true, .pages = 10, .export_bytes = 1});
    int cached = turn(&s.w, 0, 0, 50, kv);
    cr_assert(cached == 0 && s.w.sched.conversations.count == 1);
    sched_save(&s.w.sched, clock_ns(), true);
    cr_assert(sched_exporting(&s.w.sched));
    cr_assert_eq(turn(&s.w, 1, 50, 54, kv), 50);
    cr_assert_eq(s.w.sched.conversations.count, 1, "both fit: the test tests nothing");
    world_save_all(&s.w);
    cr_assert(stats_of(&s).files == 1 && s.w.sched.counters.state_failed == 0);
    stored_close(&s);
}

/* What left memory while it was being written still replaces the file of what it superseded. */
Test(state, a_replaced_file_goes_though_its_successor_left_memory) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 2});
    turn(&s.w, 0, 0, 60, kv);
    world_save_all(&s.w);
    turn(&s.w, 1, 60, 80, kv);
    cr_assert(s.w.sched.conversations.count == 2 && stats_of(&s).files == 1);
    turn(&s.w, 2, 0, 40, kv); /* takes the place of the superseded one */
    turn(&s.w, 3, 0, 40, kv); /* and now of the one that went on from it */
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 3, "the superseded file stayed");
    stored_close(&s);
}

/* A conversation that cannot be written hands on whose file its successor replaces. */
Test(state, a_replaced_file_goes_though_one_between_was_never_written) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 9});
    turn(&s.w, 0, 0, 60, kv);
    world_save_all(&s.w);
    turn(&s.w, 1, 60, 80, kv);
    world_fail(WORLD_EXPORT, 0, ERR_DEVICE);
    world_save_all(&s.w);
    cr_assert(!world_fail_pending() && stats_of(&s).files == 1);
    struct engine_job job = job_of(2, 90, 3, kv);
    job.request.prompt = prompt_of(1, 60);
    submit(&s.w, &job);
    run_until_idle(&s.w);
    cr_assert_eq(job.cached_tokens, 80);
    engine_job_close(&job);
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 1, "the file of the one before stayed");
    stored_close(&s);
}
