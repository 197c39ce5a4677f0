/* Pins and times to live of conversations: who makes room for whom, and when one is deleted. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "tests/unit/engine/requests.h"

#define SECOND INT64_C(1000000000)

enum { PAGES = 20 }; /* The pool has so many for each stream. */
static const struct world_options options = {
    .pages = PAGES * WORLD_STREAMS, .sequences = 2, .conversations = 8, .rows = 64};

/* Entries of a page. It is asked for before a test's world is open. */
static int page;

static void measure(void) {
    page = slots_per_page();
}

TestSuite(pins, .init = measure);
TestSuite(ttl, .init = measure);

/* A turn of a client with pins; prompt `number`, of so many pages for each stream with its answer.
 * Returns what its job reports. */
static struct engine_kv_details keep(struct world *w, int client, int number, int pages,
                                     struct engine_kv kv, int64_t pins_max) {
    struct engine_job job = job_of(number, pages * page - 8, 3, kv);
    job.request.client[0] = job.request.owner[0] = (uint8_t)client;
    job.request.pins_max = pins_max * WORLD_STREAMS;
    submit(w, &job);
    run_until_idle(w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    struct engine_kv_details details = job.kv;
    engine_job_close(&job);
    return details;
}

static struct engine_kv pinned(void) {
    struct engine_kv kv = full();
    kv.pin = true;
    return kv;
}

/* A world in which client 1 has pinned the turn of prompt 1. */
static void open_pinned(struct world *w, int pages, int64_t pins_max) {
    world_open(w, &options);
    cr_assert(keep(w, 1, 1, pages, pinned(), pins_max).pinned);
}

static struct conversation *of_prompt(struct world *w, int number) {
    struct conversation_table *table = &w->sched.keeper.table;
    const int32_t *prompt = prompt_of(number, 0);
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv->id != 0 && !conv->checkpoint && memcmp(conv->tokens, prompt, 32) == 0)
            return conv;
    }
    return NULL;
}

Test(pins, make_no_room_for_others) {
    struct world w;
    open_pinned(&w, 4, 10);
    for (int i = 2; i < 8; i++) cr_assert_not(keep(&w, 2, i, 4, full(), 0).pinned);
    cr_assert_not_null(of_prompt(&w, 1));
    cr_assert_null(of_prompt(&w, 2));
    cr_assert_eq(conversation_pins_of(&w.sched.keeper.table, NULL).pages, 4 * WORLD_STREAMS);
    cr_assert_eq(w.sched.counters.pins_refused, 0);
    world_close(&w);
}

/* Not beyond the client's own bound, nor beyond half of the pool or of the places in all. */
Test(pins, are_bounded) {
    struct world w;
    open_pinned(&w, 4, 7);
    cr_assert_not(keep(&w, 1, 2, 4, pinned(), 7).pinned);
    cr_assert(keep(&w, 2, 3, 4, pinned(), 7).pinned);
    cr_assert_not(keep(&w, 3, 4, 4, pinned(), 7).pinned, "more than half of the pool");
    cr_assert_not(keep(&w, 4, 5, 1, pinned(), 0).pinned);
    cr_assert_eq(w.sched.counters.pins_refused, 3);
    cr_assert_not_null(of_prompt(&w, 2)); /* kept, without a pin */
    world_close(&w);
    struct world_options few = options;
    few.conversations = 4;
    world_open(&w, &few);
    for (int i = 1; i <= 3; i++) cr_assert_eq(keep(&w, i, i, 1, pinned(), 7).pinned, i <= 2);
    world_close(&w);
}

/* A request that could not fit beside the pins takes them, whoever it comes from. */
Test(pins, give_way_to_who_could_not_fit_beside_them) {
    struct world_options small = options;
    small.pages = 10 * WORLD_STREAMS;
    for (int client = 1; client <= 2; client++)
        for (int pages = 6; pages <= 9; pages += 3) {
            struct world w;
            world_open(&w, &small);
            cr_assert(keep(&w, 1, 1, 2, pinned(), 10).pinned);
            cr_assert(keep(&w, 1, 2, 2, pinned(), 10).pinned);
            (void)keep(&w, client, 3, pages, full(), 0);
            int left = (of_prompt(&w, 1) != NULL) + (of_prompt(&w, 2) != NULL);
            cr_assert_eq(left == 2, pages == 6, "client %d, %d pages: %d", client, pages, left);
            world_close(&w);
        }
}

Test(pins, own_ones_go_where_others_are_pinned) {
    struct world w;
    open_pinned(&w, 5, 10);
    cr_assert(keep(&w, 2, 2, 5, pinned(), 10).pinned);
    struct engine_job running = job_of(3, 2 * page, 5 * page, full());
    running.request.client[0] = running.request.owner[0] = 3;
    submit(&w, &running);
    cr_assert_not(world_step(&w));
    struct engine_job job = job_of(4, 4 * page, 3, full());
    job.request.client[0] = job.request.owner[0] = 2;
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    cr_assert(atomic_load(&job.admitted) && of_prompt(&w, 1) && !of_prompt(&w, 2));
    run_until_idle(&w);
    engine_job_close(&running);
    engine_job_close(&job);
    world_close(&w);
}

/* A follow-up that does not fit beside its conversation and another client's pins uses the
 * conversation up: its own, or one that another client of its space keeps. */
Test(pins, leave_room_for_follow_ups) {
    for (int owner = 2; owner <= 3; owner++) {
        struct world w;
        open_pinned(&w, 9, 10);
        (void)keep(&w, owner, 2, 6, full(), 0);
        struct engine_job job = job_of(2, 10 * page - 8, 3, full());
        job.request.client[0] = job.request.owner[0] = 2;
        submit(&w, &job);
        for (int i = 0; i < 1000 && !atomic_load(&job.admitted); i++) (void)world_step(&w);
        cr_assert(atomic_load(&job.admitted), "owner %d", owner);
        cr_assert_gt(job.cached_tokens, 0);
        run_until_idle(&w);
        cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
        cr_assert_eq(conversation_pins_of(&w.sched.keeper.table, NULL).pages, 9 * WORLD_STREAMS);
        engine_job_close(&job);
        world_close(&w);
    }
}

/* A pinned conversation is used up for its own client; another client's follow-up waits until it
 * fits beside the pin. */
Test(pins, are_used_up_by_their_own_client_alone) {
    for (int client = 1; client <= 2; client++) {
        struct world w;
        open_pinned(&w, 9, 10);
        struct engine_job running = job_of(2, 2 * page, 2 * page, full());
        running.request.client[0] = running.request.owner[0] = 3;
        submit(&w, &running);
        cr_assert_not(world_step(&w));
        struct engine_job job = job_of(1, 10 * page - 8, 3, full());
        job.request.client[0] = job.request.owner[0] = (uint8_t)client;
        submit(&w, &job);
        for (int i = 0; i < 3; i++) (void)world_step(&w);
        cr_assert_eq(atomic_load(&job.admitted), client == 1);
        run_until_idle(&w);
        cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
        cr_assert_gt(job.cached_tokens, 0);
        cr_assert_eq(conversation_pins_of(&w.sched.keeper.table, NULL).count, client - 1);
        engine_job_close(&running);
        engine_job_close(&job);
        world_close(&w);
    }
}

/* The next turn of the dialogue takes the pin over, if it asks for one; otherwise it stays. */
Test(pins, move_along_a_dialogue) {
    for (int asks = 0; asks < 2; asks++) {
        struct world w;
        open_pinned(&w, 3, 6);
        cr_assert_eq(keep(&w, 1, 1, 5, asks ? pinned() : full(), 6).pinned, asks);
        const struct conversation_table *table = &w.sched.keeper.table;
        cr_assert_eq(table->superseded_pages, 3 * WORLD_STREAMS);
        struct conversation_pins pins = conversation_pins_of(table, NULL);
        cr_assert_eq(pins.count, 1);
        cr_assert_eq(pins.pages, (asks ? 5 : 3) * WORLD_STREAMS);
        world_close(&w);
    }
}

/* Neither a repetition without a pin, whoever sends it, nor a pin that is refused takes a pin away.
 */
Test(pins, end_only_where_one_takes_over) {
    for (int client = 1; client <= 2; client++) {
        struct world w;
        open_pinned(&w, 3, 3);
        (void)keep(&w, client, 1, 3, full(), client == 1 ? 3 : 0);
        uint8_t owner[16] = {1};
        cr_assert_eq(conversation_pins_of(&w.sched.keeper.table, owner).count, 1);
        cr_assert_eq(turns_kept(&w), 1);
        cr_assert_not(keep(&w, 1, 1, 5, pinned(), 3).pinned);
        cr_assert_eq(conversation_pins_of(&w.sched.keeper.table, NULL).pages, 3 * WORLD_STREAMS);
        cr_assert_eq(w.sched.counters.pins_refused, 1);
        world_close(&w);
    }
}

/* The pin that moves leaves its pages to the bound. */
Test(pins, move_within_their_bound) {
    struct world w;
    open_pinned(&w, 3, 5);
    cr_assert(keep(&w, 1, 1, 5, pinned(), 5).pinned);
    cr_assert_eq(conversation_pins_of(&w.sched.keeper.table, NULL).pages, 5 * WORLD_STREAMS);
    world_close(&w);
}

Test(pins, a_delete_releases_them) {
    struct world w;
    world_open(&w, &options);
    (void)keep(&w, 1, 1, 4, pinned(), 10);
    cr_assert_eq(keeper_delete(&w.sched.keeper, of_prompt(&w, 1)->id), 0);
    cr_assert_eq(conversation_pins_of(&w.sched.keeper.table, NULL).pages, 0);
    cr_assert_eq(w.sched.keeper.table.pages, 0);
    world_close(&w);
}

static struct engine_kv living(int32_t seconds) {
    struct engine_kv kv = full();
    kv.ttl = seconds;
    return kv;
}

Test(ttl, ends_after_the_last_use) {
    struct world w;
    world_open(&w, &options);
    (void)keep(&w, 1, 1, 2, living(100), 0);
    (void)keep(&w, 1, 2, 2, living(200), 0);
    (void)keep(&w, 1, 3, 2, full(), 0);
    int64_t used = of_prompt(&w, 1)->last_used_ns;
    keeper_expire(&w.sched.keeper, used + 100 * SECOND - 1);
    cr_assert_eq(w.sched.counters.conversations_expired, 0);
    keeper_expire(&w.sched.keeper, used + 100 * SECOND);
    cr_assert(!of_prompt(&w, 1) && of_prompt(&w, 2) && of_prompt(&w, 3));
    conversation_touch(&w.sched.keeper.table, of_prompt(&w, 2), 0, used + 150 * SECOND);
    keeper_expire(&w.sched.keeper, used + 349 * SECOND);
    cr_assert_not_null(of_prompt(&w, 2));
    keeper_expire(&w.sched.keeper, used + 351 * SECOND);
    cr_assert(!of_prompt(&w, 2) && of_prompt(&w, 3));
    cr_assert_eq(w.sched.counters.conversations_expired, 2);
    cr_assert_eq(w.sched.keeper.table.expires_ns, INT64_MAX);
    world_close(&w);
}

/* The file goes, too, and a request that continues the conversation keeps its fork. */
Test(ttl, ends_on_disk_and_spares_who_runs) {
    struct world w;
    char dir[64];
    world_make_dir(dir);
    struct world_options stored = options;
    stored.state_dir = dir;
    world_open(&w, &stored);
    struct engine_kv kv = global(40, 8, 32);
    kv.ttl = 100;
    (void)keep(&w, 1, 1, 2, kv, 0);
    world_save_all(&w);
    struct engine_job job = job_of(1, 2 * page + 20, 4, kv);
    job.request.client[0] = job.request.owner[0] = 1;
    submit(&w, &job);
    cr_assert_not(world_step(&w));
    cr_assert_gt(job.cached_tokens, 0);
    struct store_stats stats;
    store_stats(w.store, &stats);
    cr_assert_eq(stats.files, 1);
    keeper_expire(&w.sched.keeper, clock_ns() + 101 * SECOND);
    cr_assert_eq(turns_kept(&w), 0);
    store_stats(w.store, &stats);
    cr_assert_eq(stats.files, 0);
    run_until_idle(&w);
    cr_assert_eq(finish_of(&job), ENGINE_FINISH_LENGTH);
    engine_job_close(&job);
    world_close(&w);
    world_remove_dir(dir);
}

/* The turn before stays, with its pin, and is written again. */
Test(ttl, ends_without_the_turn_before) {
    for (int pin = 0; pin < 2; pin++) {
        struct world w;
        char dir[64];
        world_make_dir(dir);
        struct world_options stored = options;
        stored.state_dir = dir;
        world_open(&w, &stored);
        struct engine_kv kv = global(40, 8, 32);
        kv.pin = pin;
        cr_assert_eq(keep(&w, 1, 1, 2, kv, 8).pinned, pin);
        world_save_all(&w);
        kv.pin = false;
        kv.ttl = 100;
        (void)keep(&w, 1, 1, 4, kv, 8);
        world_save_all(&w);
        const struct conversation_table *table = &w.sched.keeper.table;
        cr_assert_gt(table->superseded_pages, 0);
        keeper_expire(&w.sched.keeper, clock_ns() + 101 * SECOND);
        cr_assert_eq(w.sched.counters.conversations_expired, 1);
        cr_assert_not_null(of_prompt(&w, 1));
        cr_assert_eq(table->superseded_pages, 0);
        cr_assert_eq(conversation_pins_of(table, NULL).count, pin);
        world_save_all(&w);
        struct store_stats stats;
        store_stats(w.store, &stats);
        cr_assert_eq(stats.files, 1);
        world_close(&w);
        world_remove_dir(dir);
    }
}

/* A use in memory counts for the file, too, whether or not the turn after it is kept. */
Test(ttl, counts_for_the_file_from_uses_in_memory) {
    struct world w;
    char dir[64], path[128];
    world_make_dir(dir);
    struct world_options stored = options;
    stored.state_dir = dir;
    world_open(&w, &stored);
    struct engine_kv kv = global(40, 8, 32);
    kv.ttl = 100;
    (void)keep(&w, 1, 1, 2, kv, 0);
    world_save_all(&w);
    snprintf(path, sizeof path, "%s/%016llx.state", dir, (unsigned long long)of_prompt(&w, 1)->id);
    const struct timespec old[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    cr_assert_eq(utimensat(AT_FDCWD, path, old, 0), 0);
    kv.retain = false;
    (void)keep(&w, 1, 1, 3, kv, 0);
    struct stat st;
    cr_assert_eq(stat(path, &st), 0);
    cr_assert_gt(st.st_mtime, 1000);
    world_close(&w);
    world_remove_dir(dir);
}
