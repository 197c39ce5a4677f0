/* Conversations of engine/steps/sched.c on disk: written, restored, replaced, deleted, and every
 * failure on the way. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "engine/steps/sched_int.h"
#include "tests/unit/engine/requests.h"

/* Searches on disk: the linker's --wrap. */
static int searches;

uint64_t __real_store_find(struct store *store, const struct conversation_query *query,
                           int32_t least);
uint64_t __wrap_store_find(struct store *store, const struct conversation_query *query,
                           int32_t least);

uint64_t __wrap_store_find(struct store *store, const struct conversation_query *query,
                           int32_t least) {
    searches++;
    return __real_store_find(store, query, least);
}

/* The time of the last listing: the linker's --wrap. */
static int64_t listed_ns = INT64_MAX;

bool __wrap_store_fresh(struct store *store, int64_t since_ns);

bool __wrap_store_fresh(struct store *store, int64_t since_ns) {
    (void)store;
    return since_ns <= listed_ns;
}

/* A disk that is busy with another file: the linker's --wrap. */
static bool disk_busy;

bool __real_store_can_save(struct store *store);
bool __wrap_store_can_save(struct store *store);

bool __wrap_store_can_save(struct store *store) {
    return !disk_busy && __real_store_can_save(store);
}

/* A world with a state directory of its own. */
struct stored {
    struct world w;
    struct world_options options;
    char dir[64];
};

/* Options that are 0 get a default value. */
static void stored_open(struct stored *s, struct world_options options) {
    if (options.pages == 0) options.pages = 900;
    options.sequences = 3;
    options.rows = 64;
    options.state_dir = s->dir;
    s->options = options;
    world_make_dir(s->dir);
    world_open(&s->w, &s->options);
}

/* With a conversation of 60 tokens, in memory and on disk. */
static void stored_open_with_file(struct stored *s, struct world_options options,
                                  struct engine_kv kv) {
    stored_open(s, options);
    turn(&s->w, 0, 0, 60, kv);
    world_save_all(&s->w);
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
    cr_assert_not(world_step(&s.w)); /* written because nothing else is to be done */
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

/* With one slot and pages for little more, each of five conversations is found when requested. */
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

/* Beside other daemons, a job is tried when the directory was listed after it came. Jobs that come
 * later, one after each listing, do not make it wait for theirs. */
Test(state, a_job_waits_for_a_listing_of_its_own) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 9});
    struct engine_job jobs[] = {job_of(1, 20, 2, kv), job_of(2, 20, 2, kv), job_of(3, 20, 2, kv)};
    listed_ns = 5;
    s.w.now_ns = 1000; /* a clock that stands still: no wait is too long */
    for (int i = 0; i < 3; i++) {
        jobs[i].queued_ns = 10 * (i + 1);
        submit(&s.w, &jobs[i]);
    }
    for (int i = 0; i < 9; i++) (void)world_step(&s.w);
    cr_assert_eq(s.w.sched.running, 0);
    for (int i = 0; i < 3; i++) {
        listed_ns = 10 * (i + 1) + 5;
        for (int k = 0; k < 9; k++) (void)world_step(&s.w);
        for (int k = 0; k < 3; k++)
            cr_assert_eq(atomic_load(&jobs[k].finished), k <= i, "job %d at listing %d", k, i);
    }
    listed_ns = INT64_MAX;
    for (int i = 0; i < 3; i++) engine_job_close(&jobs[i]);
    stored_close(&s);
}

/* A directory's thread that hangs keeps no job waiting: neither while others run, for the steps in
 * which they may pass, nor when nothing runs. */
Test(state, a_listing_that_does_not_come_is_forgone) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 9});
    struct engine_job running = job_of(1, 20, 400, kv), jobs[2];
    submit(&s.w, &running);
    s.w.now_ns = 1000;
    while (s.w.sched.running == 0) (void)world_step(&s.w);
    listed_ns = 5;
    for (int i = 0; i < 2; i++) {
        jobs[i] = job_of(2 + i, 20, 2, kv);
        jobs[i].queued_ns = ++s.w.now_ns; /* after the first wait was given up */
        submit(&s.w, &jobs[i]);
        for (int k = 0; k < SCHED_PASS_STEPS - 4; k++) (void)world_step(&s.w);
        cr_assert_not(atomic_load(&jobs[i].finished), "it waits for a while");
        if (i == 1) s.w.now_ns += 1000000000; /* time decides where no step passes */
        for (int k = 0; k < 12; k++) (void)world_step(&s.w);
        cr_assert(atomic_load(&jobs[i].finished), "job %d", i);
        if (i == 0) run_until_idle(&s.w);
    }
    listed_ns = INT64_MAX;
    for (int i = 0; i < 2; i++) engine_job_close(&jobs[i]);
    engine_job_close(&running);
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
        if (s.w.sched.keeper.table.all[i].token_count == 82)
            last = s.w.sched.keeper.table.all[i].id;
    cr_assert_eq(keeper_delete(&s.w.sched.keeper, last), 0);
    cr_assert(s.w.sched.keeper.table.count == 0 && stats_of(&s).files == 0);
    turn(&s.w, 2, 0, 60, global(16, 4, 8));
    world_save_all(&s.w);
    only_on_disk = 0;
    for (int i = 0; i < 9; i++)
        if (!s.w.sched.keeper.table.all[i].checkpoint && s.w.sched.keeper.table.all[i].id != 0)
            only_on_disk = s.w.sched.keeper.table.all[i].id;
    stored_restart(&s);
    cr_assert_eq(keeper_delete(&s.w.sched.keeper, only_on_disk), 0);
    cr_assert_eq(keeper_delete(&s.w.sched.keeper, only_on_disk), ERR_NOTFOUND);
    cr_assert_eq(stats_of(&s).files, 0);
    stored_close(&s);
}

/* An export fails: nobody notices, and what failed is tried again when another could be written. */
Test(state, failing_exports_are_tried_again) {
    for (long n = 0; n < 1 + WORLD_STREAMS; n++) {
        struct stored s;
        struct engine_kv kv = global(16, 4, 8);
        stored_open(&s, (struct world_options){.conversations = 9, .state_eager = true});
        world_fail(WORLD_EXPORT, n, ERR_DEVICE);
        turn(&s.w, 0, 0, 60, kv);
        world_step(&s.w);
        cr_assert_not(world_fail_pending());
        cr_assert(stats_of(&s).files == 0 && s.w.sched.counters.state_failed == 1);
        turn(&s.w, 3, 0, 40, kv);
        for (int i = 0; i < 3; i++) world_step(&s.w);
        cr_assert_eq(stats_of(&s).files, 2, "the first is not tried again");
        stored_restart(&s);
        cr_assert_eq(turn(&s.w, 1, 60, 90, kv), 60);
        world_fail_never();
        stored_close(&s);
    }
}

/* If a block cannot be copied in, the request starts from nothing and the file stays. */
Test(state, trouble_while_restoring_is_no_damage) {
    for (long n = 0; n < 1 + WORLD_STREAMS; n++) {
        struct stored s;
        struct engine_kv kv = global(16, 4, 8);
        stored_open(&s, (struct world_options){
                            .conversations = 9, .state_eager = true, .copy_bytes = n % 2 == 1});
        turn(&s.w, 0, 0, 60, kv);
        world_save_all(&s.w);
        stored_restart(&s);
        world_fail(WORLD_IMPORT, n, n % 2 == 1 ? ERR_FULL : ERR_DEVICE);
        cr_assert_eq(turn(&s.w, 1, 60, 90, kv), 0);
        cr_assert_not(world_fail_pending());
        cr_assert_eq(s.w.sched.counters.conversation_lost[ENGINE_MISS_UNREADABLE], 1);
        cr_assert(stats_of(&s).refused == 0 && s.w.sched.counters.state_restored == 0);
        cr_assert_eq(turn(&s.w, 2, 60, 100, kv), 60, "the file is not used any more");
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
        cr_assert_eq(stats_of(&s).refused, 0, "no memory is no damage");
        engine_job_close(&job);
        stored_close(&s);
        cr_assert_lt(n, 60);
    }
}

/* A turn takes over a conversation that has been copied out in part. */
Test(state, using_up_a_conversation_ends_its_export) {
    struct stored s;
    struct engine_kv kv = global(60, 4, 64);
    /* the conversation has 4 of them, its next turn may need 7 */
    stored_open(&s, (struct world_options){
                        .conversations = 2, .state_eager = true, .pages = 10, .copy_bytes = 1});
    int cached = turn(&s.w, 0, 0, 50, kv);
    cr_assert(cached == 0 && s.w.sched.keeper.table.count == 1);
    keeper_save(&s.w.sched.keeper, clock_ns(), true);
    cr_assert(keeper_copying(&s.w.sched.keeper));
    cr_assert_eq(turn(&s.w, 1, 50, 54, kv), 50);
    cr_assert_eq(s.w.sched.keeper.table.count, 1, "both fit: the test tests nothing");
    world_save_all(&s.w);
    cr_assert(stats_of(&s).files == 1 && s.w.sched.counters.state_failed == 0);
    stored_close(&s);
}

/* A conversation on disk that its next turn takes over leaves no file behind. */
Test(state, a_used_up_conversation_gives_its_file_back) {
    struct stored s;
    struct engine_kv kv = global(60, 4, 64);
    stored_open(&s, (struct world_options){.conversations = 2, .state_eager = true, .pages = 10});
    turn(&s.w, 0, 0, 50, kv);
    world_save_all(&s.w);
    cr_assert_eq(turn(&s.w, 1, 50, 54, kv), 50);
    cr_assert_eq(s.w.sched.keeper.table.count, 1, "both fit: the test tests nothing");
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 1, "the file of the one before stayed");
    stored_close(&s);
}

/* A conversation that leaves memory while it is being written still replaces its predecessor's
 * file. */
Test(state, a_replaced_file_goes_though_its_successor_left_memory) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_with_file(&s, (struct world_options){.conversations = 2}, kv);
    turn(&s.w, 1, 60, 80, kv);
    cr_assert(s.w.sched.keeper.table.count == 2 && stats_of(&s).files == 1);
    turn(&s.w, 2, 0, 40, kv); /* takes the place of the superseded one */
    turn(&s.w, 3, 0, 40, kv); /* and now of the one that went on from it */
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 3, "the superseded file stayed");
    stored_close(&s);
}

/* A superseded conversation whose file went is written again once somebody else goes on from it. */
Test(state, what_stays_after_all_is_written_again) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_with_file(&s, (struct world_options){.conversations = 9}, kv);
    cr_assert_eq(turn(&s.w, 1, 60, 80, kv), 60);
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 1, "nothing was replaced: the test tests nothing");
    cr_assert_eq(turn(&s.w, 2, 60, 90, kv), 60);
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 3, "what both went on from is in memory only");
    stored_close(&s);
}

/* Two went on from it, so it stays: also when it has left memory before the first is on disk. */
Test(state, a_file_several_went_on_from_stays) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_with_file(&s, (struct world_options){.conversations = 9}, kv);
    cr_assert_eq(turn(&s.w, 1, 60, 80, kv), 60);
    cr_assert_eq(turn(&s.w, 2, 60, 90, kv), 60);
    cr_assert(turns_kept(&s.w) == 3 && stats_of(&s).files == 1);
    s.w.sched.keeper.options.conversations_max = 1;
    keeper_save(&s.w.sched.keeper, clock_ns(),
                false); /* the first turn is copied out, then both go */
    cr_assert_eq(s.w.sched.keeper.table.count, 1);
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 3, "the only copy was deleted");
    stored_close(&s);
}

/* A conversation that cannot be written hands on whose file its successor replaces. */
Test(state, a_replaced_file_goes_though_one_between_was_never_written) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_with_file(&s, (struct world_options){.conversations = 9}, kv);
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

/* A failed write is retried at shutdown. */
Test(state, what_failed_is_tried_again_at_the_end) {
    struct stored s;
    stored_open(&s, (struct world_options){.conversations = 9, .state_eager = true});
    world_fail(WORLD_EXPORT, 0, ERR_DEVICE);
    turn(&s.w, 0, 0, 60, global(16, 4, 8));
    world_step(&s.w);
    cr_assert(!world_fail_pending() && stats_of(&s).files == 0);
    world_save_all(&s.w);
    cr_assert_eq(stats_of(&s).files, 1);
    stored_close(&s);
}

static uint64_t newest_id(const struct world *w) {
    const struct conversation *newest = NULL;
    for (int i = 0; i < w->sched.keeper.table.capacity; i++) {
        const struct conversation *conv = &w->sched.keeper.table.all[i];
        if (conv->id != 0 && (!newest || conv->use > newest->use)) newest = conv;
    }
    return newest->id;
}

/* A file that made room for others is written again when the engine drains, if there is room by
 * then, and only then: it displaces nothing. */
Test(state, a_file_that_made_room_returns_at_the_end) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_with_file(&s, (struct world_options){.conversations = 4}, kv);
    int64_t bytes = stats_of(&s).bytes;
    stored_close(&s);
    stored_open_with_file(
        &s, (struct world_options){.conversations = 4, .state_bytes = bytes * 3 / 2}, kv);
    uint64_t first = newest_id(&s.w);
    turn(&s.w, 3, 0, 60, kv);
    world_save_all(&s.w);
    uint64_t second = newest_id(&s.w);
    cr_assert(stats_of(&s).files == 1 && !store_has(s.w.store, first));
    keeper_save(&s.w.sched.keeper, clock_ns(), false); /* drains anew */
    world_save_all(&s.w);
    cr_assert(store_has(s.w.store, second), "it was displaced");
    cr_assert_eq(keeper_delete(&s.w.sched.keeper, second), 0);
    keeper_save(&s.w.sched.keeper, clock_ns(), false);
    for (int i = 0; i < 1000 && stats_of(&s).files > 0; i++) usleep(1000);
    world_save_all(&s.w);
    cr_assert(store_has(s.w.store, first), "it was not written again");
    stored_close(&s);
}

/* A conversation that cannot be written and must leave memory is lost: it is counted, and its next
 * turn reports the reason. */
Test(state, what_could_not_be_written_is_counted_when_it_goes) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 1, .state_bytes = 1000});
    turn(&s.w, 0, 0, 60, kv);
    world_save_all(&s.w); /* larger than --state-bytes */
    cr_assert(stats_of(&s).failed == 1 && s.w.sched.counters.state_lost == 0);
    turn(&s.w, 3, 0, 40, kv);
    cr_assert_eq(s.w.sched.counters.state_lost, 1);
    turn(&s.w, 4, 0, 40, kv); /* gets room as soon as the previous one is copied out */
    cr_assert_eq(s.w.sched.keeper.table.count, 1);
    world_save_all(&s.w);
    cr_assert_eq(s.w.sched.counters.state_lost, 2, "lost while it was written");
    cr_assert_eq(turn(&s.w, 1, 60, 90, kv), 0);
    cr_assert_eq(s.w.sched.counters.conversation_lost[ENGINE_MISS_FORGOTTEN], 1);
    stored_close(&s);
}

/* The table is full when turns end: they stay all the same, and the others' answers go on while
 * what has to go is copied out, one stream in each step. */
Test(state, a_full_table_is_written_in_parts) {
    struct stored s;
    struct engine_job other, one, two;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 1, .copy_bytes = 1});
    turn(&s.w, 0, 0, 60, kv);
    other = job_of(3, 20, 100, kv);
    one = job_of(4, 20, 3, kv);
    two = job_of(5, 20, 3, kv);
    submit(&s.w, &other);
    submit(&s.w, &one);
    submit(&s.w, &two);
    for (int i = 0; !atomic_load(&two.finished); i++) {
        cr_assert_lt(i, 20);
        world_step(&s.w);
    }
    cr_assert(atomic_load(&one.finished) && s.w.sched.keeper.table.count == 3);
    cr_assert(stats_of(&s).files == 0 && s.w.sched.keeper.export.block > 0);
    cr_assert_lt(s.w.sched.keeper.export.block, 1 + WORLD_STREAMS, "written in one step");
    for (int before = count_of(&other); s.w.sched.keeper.table.count > 1; before++) {
        cr_assert_eq(count_of(&other), before, "somebody's answer stands still");
        world_step(&s.w);
    }
    cr_assert_eq(stats_of(&s).files, 2);
    run_until_idle(&s.w);
    cr_assert(s.w.sched.counters.state_failed == 0 && s.w.sched.counters.state_lost == 0);
    cr_assert_eq(turn(&s.w, 1, 60, 90, kv), 60);
    engine_job_close(&other);
    engine_job_close(&one);
    engine_job_close(&two);
    stored_close(&s);
}

/* Conversations being written never outnumber the slots: a new request waits for a slot. */
Test(state, a_request_waits_for_the_slot_of_what_is_written) {
    struct stored s;
    struct engine_job job;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 1, .copy_bytes = 1});
    for (int i = 0; i < 12; i++) {
        job = job_of(i, 20, 1, kv);
        submit(&s.w, &job);
        while (!atomic_load(&job.finished)) world_step(&s.w); /* checks the cache */
        engine_job_close(&job);
    }
    world_save_all(&s.w);
    cr_assert(stats_of(&s).files == 12 && s.w.sched.counters.state_lost == 0);
    stored_close(&s);
}

/* A superseded state is evicted at once, without being written. */
Test(state, superseded_states_go_unwritten) {
    struct stored s;
    struct engine_kv kv = global(60, 4, 64);
    stored_open(&s, (struct world_options){.conversations = 9, .pages = 12, .copy_bytes = 1});
    turn(&s.w, 0, 0, 50, kv);
    cr_assert_eq(turn(&s.w, 1, 50, 54, kv), 50);
    cr_assert(s.w.sched.keeper.table.count == 2 && stats_of(&s).files == 0);
    struct engine_job job = job_of(2, 20, 2, kv);
    submit(&s.w, &job);
    world_step(&s.w);
    cr_assert(s.w.sched.running == 1, "it waits");
    cr_assert_eq(s.w.sched.keeper.table.superseded_pages, 0,
                 "there was room: the test tests nothing");
    run_until_idle(&s.w);
    cr_assert_eq(stats_of(&s).files, 0);
    engine_job_close(&job);
    stored_close(&s);
}

/* ---- Restoring takes steps ---- */

/* Submits the turn that goes on from a state file, and runs until its streams begin to arrive. */
static void begin_restoring(struct stored *s, struct engine_job *job, struct engine_kv kv) {
    *job = job_of(1, 90, 3, kv);
    job->request.prompt = prompt_of(1, 60);
    submit(&s->w, job);
    for (int i = 0; s->w.sched.keeper.import.id == 0; i++) {
        cr_assert_lt(i, 10, "nothing is restored");
        world_step(&s->w);
    }
}

/* On disk only, and copied in a stream at a time. */
static void stored_open_slowly(struct stored *s, int conversations, struct engine_kv kv) {
    stored_open_with_file(s,
                          (struct world_options){
                              .conversations = conversations, .state_eager = true, .copy_bytes = 1},
                          kv);
    stored_restart(s);
}

/* One stream in each step: somebody else's answer grows meanwhile, and the request that waits is
 * not tried again before its conversation is there. */
Test(state, others_go_on_while_one_is_restored) {
    struct stored s;
    struct engine_job other, job;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_slowly(&s, 9, kv);
    other = job_of(3, 20, 100, kv);
    other.request.ignore_eos = true;
    submit(&s.w, &other);
    while (count_of(&other) == 0) world_step(&s.w);
    begin_restoring(&s, &job, kv);
    int steps = 0, before = count_of(&other);
    for (; s.w.sched.keeper.import.id != 0; steps++) {
        cr_assert(sched_head_waits(&s.w.sched) && job.cached_tokens == 0);
        world_step(&s.w);
    }
    cr_assert_geq(steps, WORLD_STREAMS);
    cr_assert_eq(count_of(&other), before + steps);
    run_until_idle(&s.w);
    cr_assert_eq(job.cached_tokens, 60);
    engine_job_close(&other);
    engine_job_close(&job);
    stored_close(&s);
}

/* If no request waits for a restored state any more, it still becomes a conversation. */
Test(state, restoring_ends_though_its_client_left) {
    struct stored s;
    struct engine_job job;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_slowly(&s, 9, kv);
    begin_restoring(&s, &job, kv);
    atomic_store(&job.cancel, 1);
    world_step(&s.w);
    cr_assert(sched_idle(&s.w.sched) && keeper_copying(&s.w.sched.keeper));
    for (int i = 0; keeper_copying(&s.w.sched.keeper); i++) {
        cr_assert_lt(i, 100);
        keeper_save(&s.w.sched.keeper, clock_ns(), false);
    }
    cr_assert_eq(s.w.sched.counters.state_restored, 1);
    engine_job_close(&job);
    cr_assert_eq(turn(&s.w, 2, 60, 90, kv), 60);
    stored_close(&s);
}

Test(state, deleting_ends_a_restoring) {
    struct stored s;
    struct engine_job job;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_slowly(&s, 9, kv);
    begin_restoring(&s, &job, kv);
    cr_assert_eq(keeper_delete(&s.w.sched.keeper, s.w.sched.keeper.import.id), 0);
    world_check(&s.w);
    run_until_idle(&s.w);
    cr_assert(finish_of(&job) > 0 && job.cached_tokens == 0);
    engine_job_close(&job);
    stored_close(&s);
}

/* The one place there is goes to a turn that ends meanwhile; then the restoring begins again. */
Test(state, restoring_gives_way_and_begins_again) {
    struct stored s;
    struct engine_job other, job;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_slowly(&s, 1, kv);
    other = job_of(3, 20, 3, kv);
    other.request.ignore_eos = true;
    submit(&s.w, &other);
    world_step(&s.w);
    begin_restoring(&s, &job, kv);
    cr_assert(atomic_load(&other.finished) == 0);
    run_until_idle(&s.w);
    cr_assert_eq(job.cached_tokens, 60);
    engine_job_close(&other);
    engine_job_close(&job);
    stored_close(&s);
}

/* If the waiting request has ended, a file that was read for it is not kept. */
Test(state, a_read_file_goes_with_who_asked_for_it) {
    struct stored s;
    struct engine_job other, job;
    const struct state_view *view;
    struct engine_kv kv = global(60, 4, 64);
    int slots = slots_per_page(), prompt = 90, answer = 100;
    int pages =
        WORLD_STREAMS * (prompt + answer - 1 + slots - 1) / slots; /* pages of the other sequence */
    stored_open(
        &s, (struct world_options){.conversations = 2, .state_eager = true, .pages = pages + 3});
    turn(&s.w, 0, 0, 50, kv); /* holds 4 pages */
    world_save_all(&s.w);
    uint64_t id = s.w.sched.keeper.table.all[0].id;
    stored_restart(&s);
    other = job_of(3, prompt, answer, full());
    submit(&s.w, &other);
    world_step(&s.w);
    cr_assert_eq(s.w.sched.running, 1);
    job = job_of(1, 54, 3, kv);
    job.request.prompt = prompt_of(1, 50);
    submit(&s.w, &job);
    world_step(&s.w);
    cr_assert(stats_of(&s).read == 1 && s.w.sched.keeper.import.id == 0,
              "there was room: the test tests nothing");
    atomic_store(&job.cancel, 1);
    world_step(&s.w);
    cr_assert_eq(store_load(s.w.store, id, &view), 0);
    cr_assert_eq(stats_of(&s).read, 2, "it was kept");
    store_unload(s.w.store);
    atomic_store(&other.cancel, 1);
    run_until_idle(&s.w);
    engine_job_close(&other);
    engine_job_close(&job);
    stored_close(&s);
}

/* A request that waits for pages is retried when a sequence ends; the disk is searched only once.
 */
Test(state, the_head_searches_the_disk_once) {
    struct stored s;
    struct engine_job others[2], job;
    struct engine_kv kv = global(16, 4, 8);
    int slots = slots_per_page(), prompt = 400, answer = 100; /* a request that needs every page */
    int pages = WORLD_STREAMS * (prompt + answer - 1 + slots - 1) / slots;
    stored_open(&s, (struct world_options){.conversations = 1, .pages = pages});
    for (int i = 0; i < 2; i++) {
        others[i] = job_of(3 + i, 20, 10 + 10 * i, kv);
        others[i].request.kv.retain = false;
        submit(&s.w, &others[i]);
    }
    world_step(&s.w);
    job = job_of(1, prompt, answer, full());
    submit(&s.w, &job);
    searches = 0;
    world_step(&s.w);
    cr_assert(searches == 1 && sched_head_waits(&s.w.sched),
              "it does not wait: the test tests nothing");
    while (!atomic_load(&others[0].finished)) world_step(&s.w);
    world_step(&s.w);
    cr_assert(s.w.sched.queue.waiting == 1 && searches == 1);
    run_until_idle(&s.w);
    cr_assert(finish_of(&job) == ENGINE_FINISH_LENGTH && searches == 1);
    for (int i = 0; i < 2; i++) engine_job_close(&others[i]);
    engine_job_close(&job);
    stored_close(&s);
}

/* ---- A disk that hangs ---- */

/* Answers continue but no request is admitted: this is no progress, until the disk answers again.
 */
Test(state, a_hanging_disk_is_no_progress) {
    struct stored s;
    struct engine_job other, job;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_with_file(&s, (struct world_options){.conversations = 9, .state_eager = true}, kv);
    s.options.state_hangs = true;
    stored_restart(&s);
    other = job_of(3, 20, 200, kv);
    submit(&s.w, &other);
    world_step(&s.w);
    uint64_t moving = sched_progress(&s.w.sched);
    world_step(&s.w);
    cr_assert_gt(sched_progress(&s.w.sched), moving);
    job = job_of(1, 90, 3, kv);
    job.request.prompt = prompt_of(1, 60);
    submit(&s.w, &job);
    world_step(&s.w);
    world_await_hang();
    uint64_t hanging = sched_progress(&s.w.sched);
    int before = count_of(&other);
    for (int i = 0; i < 20; i++) world_step(&s.w);
    cr_assert(count_of(&other) == before + 20 && sched_progress(&s.w.sched) == hanging);
    world_end_hang();
    run_until_idle(&s.w);
    cr_assert(job.cached_tokens == 60 && sched_progress(&s.w.sched) > hanging);
    engine_job_close(&other);
    engine_job_close(&job);
    stored_close(&s);
}

/* A client whose own conversation must be written before there is room in its quota waits for the
 * disk alone. */
Test(state, a_quota_that_needs_the_disk_delays_no_other_client) {
    struct stored s;
    struct engine_job bound, other, later;
    struct engine_kv kv = global(16, 4, 8);
    stored_open(&s, (struct world_options){.conversations = 9});
    cr_assert_eq(turn(&s.w, 1, 0, 60, kv), 0);
    disk_busy = true;
    other = job_of(2, 20, 400, kv);
    other.request.client[0] = other.request.owner[0] = 2;
    submit(&s.w, &other);
    bound = job_of(3, 60, 3, kv);
    bound.request.kv.reuse = false;
    submit(&s.w, &bound);
    queue_client_of(&s.w.sched.queue, &bound)->pages_max = bound.pages;
    for (int i = 0; i < 3 * SCHED_PASS_STEPS; i++) world_step(&s.w);
    cr_assert_eq(atomic_load(&bound.admitted), 0, "its conversation is not written yet");
    cr_assert_neq(s.w.sched.head, &bound);
    later = job_of(4, 20, 3, kv);
    later.request.client[0] = later.request.owner[0] = 4;
    submit(&s.w, &later);
    world_step(&s.w);
    cr_assert_eq(atomic_load(&later.admitted), 1);
    while (s.w.sched.running > 0) world_step(&s.w);
    world_step(&s.w);
    cr_assert(sched_stalled(&s.w.sched), "nothing is to be done before the disk is free");
    disk_busy = false;
    run_until_idle(&s.w);
    cr_assert_eq(finish_of(&bound), ENGINE_FINISH_LENGTH);
    cr_assert_eq(stats_of(&s).files, 1, "what gave way is on disk");
    engine_job_close(&bound);
    engine_job_close(&other);
    engine_job_close(&later);
    stored_close(&s);
}

/* An order to write holds for one write: when its file has made room for others, the conversation
 * is written when it has been idle, like any other. */
Test(state, an_order_to_write_holds_once) {
    struct stored s;
    stored_open(&s, (struct world_options){.conversations = 9});
    cr_assert_eq(turn(&s.w, 1, 0, 60, global(16, 4, 8)), 0);
    struct conversation *conv = NULL;
    const int64_t second = 1000000000;
    int64_t now = clock_ns();
    for (int i = 0; i < s.w.sched.keeper.table.capacity && !conv; i++)
        if (keeper_wants_saving(&s.w.sched.keeper, &s.w.sched.keeper.table.all[i]))
            conv = &s.w.sched.keeper.table.all[i];
    cr_assert_eq(keeper_write(&s.w.sched.keeper, conv->id), ERR_BUSY);
    for (int i = 0; i < 4; i++) keeper_save(&s.w.sched.keeper, now += second, false);
    cr_assert_eq(keeper_write(&s.w.sched.keeper, conv->id), 0);
    conv->saved = CONVERSATION_UNSAVED; /* as when the file is gone */
    cr_assert_eq(store_remove(s.w.store, conv->id), 0);
    for (int i = 0; i < 4; i++) keeper_save(&s.w.sched.keeper, now += second, false);
    cr_assert_eq(stats_of(&s).files, 0);
    stored_close(&s);
}

/* ---- Files that lie ---- */

static char *read_all(const char *dir, const char *suffix, char path[256], size_t *size) {
    char *data = NULL;
    DIR *list = opendir(dir);
    for (const struct dirent *entry; (entry = readdir(list)) != NULL;)
        if (strstr(entry->d_name, suffix))
            cr_assert_lt(snprintf(path, 256, "%s/%s", dir, entry->d_name), 256);
    closedir(list);
    FILE *file = fopen(path, "rb");
    cr_assert_not_null(file);
    cr_assert_eq(fseek(file, 0, SEEK_END), 0);
    *size = (size_t)ftell(file);
    rewind(file);
    data = mem_must_alloc(*size, 1);
    cr_assert_eq(fread(data, 1, *size, file), *size);
    fclose(file);
    return data;
}

/* The same blocks for one token less, sealed with the directory's own key: whoever made it had the
 * key, and yet its streams and its tokens do not agree. */
static void shorten_file(const char *dir) {
    char path[256] = "", key_path[256] = "";
    size_t size, key_size;
    struct state_view view;
    struct fault fault = {0};
    char *data = read_all(dir, ".state", path, &size),
         *key = read_all(dir, "key", key_path, &key_size);
    cr_assert_eq(state_parse(data, size, &view, &fault), 0, "%s", fault.text);
    struct state_head head = view.head;
    uint64_t sizes[1 + WORLD_STREAMS];
    size_t bytes = 0;
    for (int i = 0; i <= WORLD_STREAMS; i++) bytes += sizes[i] = view.blocks[i].size;
    int32_t *tokens = mem_must_alloc((size_t)head.token_count, sizeof *tokens);
    memcpy(tokens, view.tokens, (size_t)head.token_count * sizeof *tokens);
    head.token_count--;
    head.token_hash = conversation_hash(CONVERSATION_HASH, tokens, head.token_count);
    head.file_size = state_file_size(head.token_count, head.block_count, bytes);
    char *lie = mem_must_alloc(head.file_size, 1);
    size_t at = state_write_head(&head, tokens, sizes, lie);
    memcpy(lie + at, view.blocks[0].data, bytes);
    state_seal(lie, head.file_size, (const uint8_t *)key);
    FILE *file = fopen(path, "wb");
    cr_assert_eq(fwrite(lie, 1, head.file_size, file), head.file_size);
    fclose(file);
    state_view_close(&view);
    mem_free(tokens);
    mem_free(data);
    mem_free(key);
    mem_free(lie);
}

Test(state, a_sealed_file_whose_parts_disagree_is_refused) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_with_file(&s, (struct world_options){.conversations = 9, .state_eager = true}, kv);
    world_close(&s.w);
    shorten_file(s.dir);
    world_open(&s.w, &s.options);
    cr_assert_eq(stats_of(&s).files, 1);
    cr_assert_eq(turn(&s.w, 1, 60, 90, kv), 0);
    cr_assert_eq(s.w.sched.counters.conversation_lost[ENGINE_MISS_DAMAGED], 1);
    cr_assert_eq(stats_of(&s).refused, 1);
    stored_close(&s);
}

/* A conversation left memory because it had a file, and then the file was deleted to make room. */
Test(state, a_lost_file_makes_a_forgotten_conversation) {
    struct stored s;
    struct engine_kv kv = global(16, 4, 8);
    stored_open_with_file(&s, (struct world_options){.conversations = 1, .state_eager = true}, kv);
    cr_assert_eq(store_remove(s.w.store, s.w.sched.keeper.table.all[0].id), 0);
    turn(&s.w, 3, 0, 40, kv);
    cr_assert_eq(turn(&s.w, 1, 60, 90, kv), 0);
    cr_assert_eq(s.w.sched.counters.conversation_lost[ENGINE_MISS_FORGOTTEN], 1);
    stored_close(&s);
}
