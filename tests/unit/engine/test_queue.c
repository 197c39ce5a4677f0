/* Tests engine/steps/queue.c: whose turn it is, and what the table of clients remembers and
 * forgets. */
#include <criterion/criterion.h>

#include "engine/steps/queue.h"

static struct engine_job job_for(uint8_t client) {
    return (struct engine_job){.request = {.client = {client}}};
}

static void join(struct queue *q, struct engine_job *job, uint8_t client) {
    *job = job_for(client);
    queue_join(q, job);
}

static void run(struct queue *q, struct engine_job *job, int64_t tokens) {
    queue_remove(q, job);
    queue_charge(q, job, tokens);
}

static int64_t served(const struct queue *q, const struct engine_job *job) {
    return queue_client_of(q, job)->served;
}

Test(queue, the_client_served_least_is_next_then_who_came_first) {
    struct queue q;
    struct engine_job a[3], b[2];
    queue_open(&q, 8, 8);
    for (int i = 0; i < 3; i++) join(&q, &a[i], 1);
    for (int i = 0; i < 2; i++) join(&q, &b[i], 2);
    cr_assert_eq(queue_next(&q, NULL, NULL), &a[0]);
    cr_assert_eq(queue_others(&q, &a[0]), 2);
    run(&q, &a[0], 10);
    cr_assert_eq(queue_next(&q, NULL, NULL), &b[0]);
    run(&q, &b[0], 10);
    cr_assert_eq(queue_next(&q, NULL, NULL), &a[1], "equal: who came first");
    run(&q, &a[1], 1);
    cr_assert_eq(queue_next(&q, NULL, NULL), &b[1]);
    run(&q, &b[1], 100);
    cr_assert_eq(queue_next(&q, NULL, NULL), &a[2], "no other waits");
    run(&q, &a[2], 0);
    cr_assert_null(queue_next(&q, NULL, NULL));
    for (int i = 0; i < 3; i++) queue_end(&q, &a[i]);
    for (int i = 0; i < 2; i++) queue_end(&q, &b[i]);
    queue_close(&q);
}

Test(queue, jobs_leave_from_any_place) {
    struct queue q;
    struct engine_job jobs[4];
    queue_open(&q, 8, 8);
    for (int i = 0; i < 4; i++) join(&q, &jobs[i], 1);
    static const int order[] = {1, 3, 0, 2}; /* the middle, the last, the first, the only one */
    for (int i = 0; i < 4; i++) {
        atomic_store(&jobs[order[i]].cancel, 1);
        cr_assert_eq(queue_cancelled(&q), &jobs[order[i]]);
        queue_remove(&q, &jobs[order[i]]);
        queue_end(&q, &jobs[order[i]]);
        cr_assert_eq(q.waiting, 3 - i);
    }
    join(&q, &jobs[0], 1);
    cr_assert_eq(queue_next(&q, NULL, NULL), &jobs[0]);
    queue_remove(&q, &jobs[0]);
    queue_end(&q, &jobs[0]);
    queue_close(&q);
}

/* Being new, or away, is no credit; having been served much is remembered. */
Test(queue, who_comes_starts_at_the_least_of_the_active) {
    struct queue q;
    struct engine_job a, b, c;
    queue_open(&q, 8, 8);
    join(&q, &a, 1);
    join(&q, &b, 2);
    run(&q, &a, 1000);
    run(&q, &b, 700);
    join(&q, &c, 3);
    cr_assert_eq(served(&q, &c), 700);
    queue_remove(&q, &c);
    queue_end(&q, &c);
    queue_end(&q, &a);
    queue_charge(&q, &b, 100);
    join(&q, &a, 1); /* the client left with more than the others have, and comes back */
    cr_assert_eq(served(&q, &a), 1000);
    join(&q, &c, 3);
    cr_assert_eq(served(&q, &c), 800);
    queue_remove(&q, &a);
    queue_remove(&q, &c);
    queue_end(&q, &a);
    queue_end(&q, &c);
    queue_charge(&q, &b, 50);
    queue_end(&q, &b);
    join(&q, &c, 4); /* nobody is active: it starts where the last one was */
    cr_assert_eq(served(&q, &c), 850);
    queue_remove(&q, &c);
    queue_end(&q, &c);
    queue_close(&q);
}

Test(queue, a_full_table_shares_rows_and_reuses_idle_ones) {
    struct queue q;
    struct engine_job jobs[5];
    queue_open(&q, 3, 8);
    for (int i = 0; i < 3; i++) join(&q, &jobs[i], (uint8_t)(i + 1));
    join(&q, &jobs[3], 4);
    join(&q, &jobs[4], 4);
    cr_assert_eq(q.record_count, 3);
    cr_assert_eq(jobs[3].client, jobs[4].client, "one client, two rows");
    cr_assert_eq(q.clients, 3);
    static const int costs[] = {30, 20, 10, 40, 50};
    for (int i = 0; i < 5; i++) run(&q, &jobs[i], costs[i]);
    int64_t shared = served(&q, &jobs[3]);
    for (int i = 0; i < 5; i++) queue_end(&q, &jobs[i]);
    cr_assert_eq(q.clients, 0);
    cr_assert_eq(shared, 20 + 40 + 50, "its own and that of the row's first client");
    int idle = jobs[2].client; /* the client with the least history goes first */
    cr_assert_eq(served(&q, &jobs[2]), 10);
    join(&q, &jobs[0], 9);
    cr_assert_eq(jobs[0].client, idle);
    queue_remove(&q, &jobs[0]);
    queue_end(&q, &jobs[0]);
    queue_close(&q);
}

/* `count` jobs of one place each that run. */
static void start(struct queue *q, struct engine_job *jobs, int count, uint8_t client) {
    for (int i = 0; i < count; i++) {
        jobs[i] = job_for(client);
        jobs[i].choice_count = 1;
        queue_join(q, &jobs[i]);
        queue_remove(q, &jobs[i]);
        queue_client_of(q, &jobs[i])->running++;
    }
}

static void stop(struct queue *q, struct engine_job *jobs, int count) {
    for (int i = 0; i < count; i++) {
        queue_client_of(q, &jobs[i])->running--;
        queue_end(q, &jobs[i]);
    }
}

/* Twelve places, two clients: six each, and at most three are kept. */
/* Wanting more than a share, and less than what is kept, is no reason to wait for ever. */
Test(queue, a_client_that_runs_nothing_has_its_turn) {
    struct queue q;
    struct engine_job others[12], pair = job_for(99);
    queue_open(&q, 16, 16);
    for (int i = 0; i < 12; i++) start(&q, &others[i], 1, i + 1);
    pair.choice_count = 2;
    queue_join(&q, &pair);
    queue_plan_places(&q, 1);
    cr_assert_eq(queue_share(&q, &pair), 1);
    cr_assert(queue_may_start(&q, &pair, 1, true));
    cr_assert_not(queue_may_start(&q, &pair, 1, false));
    queue_remove(&q, &pair);
    queue_end(&q, &pair);
    for (int i = 0; i < 12; i++) stop(&q, &others[i], 1);
    queue_close(&q);
}

Test(queue, places_are_kept_for_clients_below_their_share) {
    struct queue q;
    struct engine_job a[6], b[4], more = job_for(1), others = job_for(2), wide = job_for(1);
    queue_open(&q, 8, 12);
    start(&q, a, 6, 1);
    more.choice_count = others.choice_count = 1;
    wide.choice_count = 4;
    queue_plan_places(&q, 1);
    cr_assert(queue_may_start(&q, &more, 1, true), "nobody else is there");
    start(&q, b, 4, 2);
    cr_assert(queue_plan_places(&q, 2));
    cr_assert_eq(queue_share(&q, &a[0]), 6);
    cr_assert_eq(q.kept, 0, "they never wanted more than four");
    stop(&q, b + 1, 3);
    cr_assert(queue_plan_places(&q, 3));
    cr_assert_eq(q.kept, 3, "what has just ended may come again");
    cr_assert_not(queue_may_start(&q, &more, 3, true));
    cr_assert(queue_may_start(&q, &more, 4, true));
    more.client = a[0].client, others.client = b[0].client, wide.client = a[0].client;
    cr_assert(queue_may_start(&q, &others, 1, false), "below its share any place will do");
    cr_assert_not(queue_may_start(&q, &wide, 4, false));
    cr_assert(queue_may_start(&q, &wide, 4, true), "its turn is by service alone");
    stop(&q, a + 5, 1);
    start(&q, b + 1, 1, 2);
    queue_plan_places(&q, 4);
    more.choice_count = 2;
    cr_assert_eq(q.kept, 2 + 1);
    cr_assert(queue_may_start(&q, &more, 4, true),
              "what is kept for its own client is not held back");
    cr_assert_not(queue_may_start(&q, &more, 3, true));
    more.choice_count = 1;
    start(&q, a + 5, 1, 1);
    stop(&q, b, 2);
    queue_plan_places(&q, 4);
    cr_assert_eq(q.kept, 4);
    cr_assert(queue_may_start(&q, &more, 4, true), "at most a quarter is kept");
    cr_assert(queue_plan_places(&q, 2 + QUEUE_KEEP_STEPS));
    cr_assert_eq(q.kept, 0, "a client that stays away is forgotten");
    stop(&q, a, 6);
    queue_close(&q);
}

/* A job that no kept place can serve keeps none, and with few places none is kept. */
Test(queue, nothing_is_kept_in_vain) {
    struct queue q;
    struct engine_job a[2], wide = job_for(2), more = job_for(1);
    for (int places = 3; places <= 12; places += 9) {
        queue_open(&q, 8, places);
        start(&q, a, 2, 1);
        wide.choice_count = 4;
        queue_join(&q, &wide);
        queue_plan_places(&q, 1);
        cr_assert_eq(q.kept, 0);
        more.choice_count = 1;
        more.client = a[0].client;
        cr_assert(queue_may_start(&q, &more, 1, false));
        queue_remove(&q, &wide);
        queue_end(&q, &wide);
        stop(&q, a, 2);
        queue_close(&q);
    }
}

/* A client with three times the weight has its turn three times as often; no token is lost to
 * rounding. */
Test(queue, service_counts_in_proportion_to_weights) {
    struct queue q;
    struct engine_job heavy[8], light[8];
    int turns[2] = {0};
    queue_open(&q, 8, 16);
    for (int i = 0; i < 8; i++) {
        heavy[i] = job_for(1);
        light[i] = job_for(2);
        heavy[i].request.weight = 3;
        queue_join(&q, &heavy[i]);
        queue_join(&q, &light[i]);
    }
    for (int i = 0; i < 8; i++) {
        struct engine_job *next = queue_next(&q, NULL, NULL);
        turns[next >= light && next < light + 8]++;
        queue_remove(&q, next);
        for (int token = 0; token < 10; token++) queue_charge(&q, next, 1);
        queue_end(&q, next);
    }
    cr_assert_eq(turns[0], 6);
    cr_assert_eq(served(&q, &heavy[0]), 20);
    cr_assert_eq(served(&q, &light[0]), 20);
    for (int i = 0; i < 8; i++) {
        struct engine_job *next = queue_next(&q, NULL, NULL);
        queue_remove(&q, next);
        queue_end(&q, next);
    }
    queue_close(&q);
}

Test(queue, places_are_shared_in_proportion_to_weights) {
    struct queue q;
    struct engine_job heavy[3], light[2], lone = job_for(3);
    queue_open(&q, 8, 16);
    for (int i = 0; i < 3; i++) {
        heavy[i] = job_for(1);
        heavy[i].choice_count = 1;
        heavy[i].request.weight = 3;
        queue_join(&q, &heavy[i]);
    }
    cr_assert_eq(queue_share(&q, &heavy[0]), 16, "before the first plan nobody else is known");
    start(&q, light, 2, 2);
    queue_plan_places(&q, 1);
    cr_assert_eq(queue_share(&q, &heavy[0]), 12);
    cr_assert_eq(queue_share(&q, &light[0]), 4);
    cr_assert_eq(q.kept, 3, "as many as it wants of its share");
    lone.request.weight = 1000;
    queue_join(&q, &lone);
    queue_plan_places(&q, 2);
    cr_assert_eq(queue_share(&q, &light[0]), 1, "at least one");
    queue_remove(&q, &lone);
    queue_end(&q, &lone);
    for (int i = 0; i < 3; i++) {
        queue_remove(&q, &heavy[i]);
        queue_end(&q, &heavy[i]);
    }
    stop(&q, light, 2);
    queue_close(&q);
}

/* Clients beside each other: one's quota is not the other's. */
Test(queue, quotas_count_what_the_client_has) {
    struct queue q;
    struct engine_job bound = job_for(1), free = job_for(2);
    queue_open(&q, 8, 16);
    bound.request.pages_max = 10;
    queue_join(&q, &bound);
    queue_join(&q, &free);
    queue_client_of(&q, &bound)->pages = 7;
    cr_assert_eq(queue_pages_left(&q, &bound), 3);
    cr_assert_eq(queue_pages_left(&q, &free), INT64_MAX);
    queue_remove(&q, &bound);
    queue_remove(&q, &free);
    queue_end(&q, &bound);
    queue_end(&q, &free);
    queue_close(&q);
}

/* The client with more than its part of what runs crowds, if another was seen lately. */
Test(queue, who_runs_more_than_its_part_crowds) {
    struct queue q;
    struct engine_job a = job_for(1), b = job_for(2);
    queue_open(&q, 8, 8);
    queue_join(&q, &a);
    queue_remove(&q, &a);
    queue_client_of(&q, &a)->running = 6;
    queue_note_prompt(&q, &a, 100);
    cr_assert_eq(queue_find_crowd(&q), 0, "one client alone never crowds");
    cr_assert_not(queue_client_of(&q, &a)->crowds);
    queue_join(&q, &b);
    cr_assert_eq(queue_find_crowd(&q), 0, "nothing is known of the other's prompts yet");
    queue_remove(&q, &b);
    queue_client_of(&q, &b)->running = 1;
    queue_note_prompt(&q, &b, 40);
    queue_note_prompt(&q, &b, 80);
    cr_assert_eq(queue_find_crowd(&q), 50, "a mean in which the latest counts for a quarter");
    cr_assert(queue_client_of(&q, &a)->crowds && !queue_client_of(&q, &b)->crowds);
    queue_client_of(&q, &b)->waiting++;
    cr_assert_eq(queue_find_crowd(&q), 0, "the other waits for places, not for steps");
    queue_client_of(&q, &b)->waiting--;
    queue_client_of(&q, &b)->running = 6;
    cr_assert_eq(queue_find_crowd(&q), 0, "both run alike");
    queue_client_of(&q, &a)->weight = 2;
    cr_assert_eq(queue_find_crowd(&q), 100, "by their weights the second crowds");
    queue_client_of(&q, &a)->weight = 1;
    queue_client_of(&q, &b)->running = 0;
    queue_end(&q, &b);
    (void)queue_plan_places(&q, QUEUE_CROWD_STEPS - 1);
    cr_assert_eq(queue_find_crowd(&q), 50, "it may come back");
    queue_client_of(&q, &a)->running = 1;
    cr_assert_eq(queue_find_crowd(&q), 0, "a single sequence is no crowd");
    queue_client_of(&q, &a)->running = 6;
    (void)queue_plan_places(&q, QUEUE_CROWD_STEPS);
    cr_assert_eq(queue_find_crowd(&q), 0);
    queue_client_of(&q, &a)->running = 0;
    queue_end(&q, &a);
    queue_close(&q);
}

static void join_places(struct queue *q, struct engine_job *job, uint8_t client, int places) {
    *job = job_for(client);
    job->choice_count = places;
    queue_join(q, job);
}

static void start_places(struct queue *q, struct engine_job *job) {
    queue_remove(q, job);
    atomic_store(&job->admitted, 1);
    queue_client_of(q, job)->running += job->choice_count;
}

static void end_places(struct queue *q, struct engine_job *job) {
    queue_client_of(q, job)->running -= job->choice_count;
    queue_end(q, job);
}

static bool may_start(struct queue *q, const struct engine_job *job) {
    queue_plan_places(q, 1);
    return queue_may_start(q, job, q->places, true);
}

/* Two clients want every place. Between the two of them, jobs that came meanwhile go first, of each
 * client one share. */
Test(queue, small_jobs_go_between_wide_ones) {
    struct queue q;
    struct engine_job wide[2], small[4], late;
    queue_open(&q, 8, 8);
    join_places(&q, &wide[0], 1, 8);
    join_places(&q, &wide[1], 2, 8);
    cr_assert(may_start(&q, &wide[0]));
    start_places(&q, &wide[0]);
    for (int i = 0; i < 4; i++) join_places(&q, &small[i], 3, 1);
    cr_assert(may_start(&q, &wide[1]), "none has waited for a wide job yet");
    end_places(&q, &wide[0]);
    join_places(&q, &late, 1, 1);
    for (int i = 0; i < 2; i++) { /* the share of each of three clients, of 8 places */
        cr_assert_not(may_start(&q, &wide[1]));
        cr_assert(may_start(&q, &small[i]));
        start_places(&q, &small[i]);
    }
    cr_assert(may_start(&q, &wide[1]), "a share went first; what came later does not");
    end_places(&q, &small[0]);
    cr_assert(may_start(&q, &wide[1]), "once is enough");
    end_places(&q, &small[1]);
    start_places(&q, &wide[1]);
    end_places(&q, &wide[1]);
    cr_assert(may_start(&q, &late));
    for (int i = 2; i < 4; i++) {
        start_places(&q, &small[i]);
        end_places(&q, &small[i]);
    }
    start_places(&q, &late);
    end_places(&q, &late);
    queue_close(&q);
}

/* A wide job that never ran changes nothing; nor does a job behind its own client's quota wait for
 * places. */
Test(queue, what_does_not_wait_for_places_goes_first_before_nobody) {
    struct queue q;
    struct engine_job wide[3], small;
    queue_open(&q, 8, 8);
    join_places(&q, &wide[0], 1, 8);
    join_places(&q, &wide[1], 2, 8);
    join_places(&q, &small, 3, 1);
    queue_remove(&q, &wide[0]);
    queue_end(&q, &wide[0]); /* cancelled */
    cr_assert(may_start(&q, &wide[1]));
    join_places(&q, &wide[2], 1, 8);
    start_places(&q, &wide[2]);
    end_places(&q, &wide[2]);
    cr_assert_not(may_start(&q, &wide[1]));
    queue_client_of(&q, &small)->pages_max = 10;
    small.pages = 11;
    cr_assert(may_start(&q, &wide[1]));
    queue_remove(&q, &small);
    queue_end(&q, &small);
    start_places(&q, &wide[1]);
    end_places(&q, &wide[1]);
    queue_close(&q);
}
