/* A job's writer (engine/steps/publish.h) and its readers (engine/engine_job.h) against each other,
 * in every execution that the C memory model allows. Deterministic: one thread, no timing.
 *
 * The atomics of both headers are replaced. A store appends a message to its place's history, with
 * what a release store carries: all that its writer had written before. A load may return any
 * message that is not older than what the reader knows; which one is a choice, and all sequences of
 * choices are tried. An acquire load of a release store makes known what the store carried. The
 * writer never reads what the reader writes, so one run of it makes all the messages. This is the
 * release-acquire fragment as model checkers such as GenMC enumerate it.
 *
 * Checked: what a reader believes final is final, no token is believed before its contents are
 * there, and a reader's mistakes are found: the same readers with their loads the other way round
 * must fail, and so must a writer without release. */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdint.h>

enum { PLACES = 7, MESSAGES = 12, CONTENTS = 2, LOADS = 16, TOKENS = 3, CHOICES = 2 };

/* How much is known: of each place the newest message, then of each choice's contents the tokens.
 */
struct view {
    int of[PLACES + CONTENTS];
};

struct message {
    uint64_t value;
    bool carries;
    struct view view;
};

static struct {
    const volatile void *address;
    struct message messages[MESSAGES];
    int count;
} places[PLACES];
static int place_count;
static struct view writer, reader;
static int choices[LOADS], options[LOADS], loads; /* steps of the reader in this execution */
static bool weak_writer;

static int place_of(const volatile void *address) {
    for (int i = 0; i < place_count; i++)
        if (places[i].address == address) return i;
    cr_assert_lt(place_count, PLACES);
    places[place_count].address = address;
    places[place_count].count = 1; /* message 0: zero, from before */
    return place_count++;
}

static void model_store(const volatile void *address, uint64_t value, memory_order order) {
    int place = place_of(address);
    int at = places[place].count++;
    cr_assert_lt(at, MESSAGES);
    writer.of[place] = at;
    places[place].messages[at] =
        (struct message){value, order >= memory_order_release && !weak_writer, writer};
}

static uint64_t model_load(const volatile void *address, memory_order order) {
    int place = place_of(address), oldest = reader.of[place];
    cr_assert_lt(loads, LOADS);
    options[loads] = places[place].count - oldest;
    const struct message *message = &places[place].messages[oldest + choices[loads++]];
    reader.of[place] = (int)(message - places[place].messages);
    if (order != memory_order_acquire || !message->carries) return message->value;
    for (int i = 0; i < PLACES + CONTENTS; i++)
        if (message->view.of[i] > reader.of[i]) reader.of[i] = message->view.of[i];
    return message->value;
}

#undef atomic_store_explicit
#undef atomic_load_explicit
#define atomic_store_explicit(place, value, order) model_store(place, (uint64_t)(value), order)
#define atomic_load_explicit(place, order)         model_load(place, order)
#include "engine/steps/publish.h"

static struct engine_choice choice[CHOICES];
static struct engine_job job;

/* Two choices, three tokens each of two bytes; the second ends by a stop string that was being
 * held back. */
static void write_all(void) {
    memset(places, 0, sizeof places);
    memset(choice, 0, sizeof choice);
    place_count = 0;
    writer = (struct view){0};
    job = (struct engine_job){.choice = choice, .choice_count = CHOICES};
    for (uint32_t token = 1; token <= TOKENS; token++)
        for (int c = 0; c < CHOICES; c++) {
            writer.of[PLACES + c] = (int)token; /* the contents, with plain stores */
            publish_token(&choice[c], token, c == 0 ? 2 * token : 1);
        }
    for (int c = 0; c < CHOICES; c++) {
        choice[c].ending = c == 0 ? ENGINE_FINISH_LENGTH : ENGINE_FINISH_STOP;
        publish_choice_end(&choice[c]);
    }
    publish_job_end(&job);
}

/* The next sequence of choices; false: all have been tried. */
static bool next_execution(void) {
    while (loads > 0 && choices[loads - 1] + 1 >= options[loads - 1]) choices[--loads] = 0;
    if (loads == 0) return false;
    choices[loads - 1]++;
    return true;
}

/* How many of all executions `is_right` finds wrong. */
static long run_all(bool (*is_right)(void), long *executions) {
    long wrong = 0;
    write_all();
    memset(choices, 0, sizeof choices);
    *executions = 0;
    do {
        reader = (struct view){0};
        loads = 0;
        wrong += !is_right();
        ++*executions;
    } while (next_execution());
    return wrong;
}

/* ---- Readers ---- */

static bool is_final(int c, uint32_t tokens, size_t text) {
    return tokens == TOKENS && text == (c == 0 ? 2 * TOKENS : 1);
}

static bool contents_are_there(int c, uint32_t tokens) {
    return (uint32_t)reader.of[PLACES + c] >= tokens;
}

static bool sees_choice(void) {
    struct engine_seen seen = engine_see_choice(&choice[0]);
    return contents_are_there(0, seen.tokens) &&
           (seen.finish == ENGINE_RUNNING || is_final(0, seen.tokens, seen.text)) &&
           seen.text >= 2 * seen.tokens; /* a token's text is there with it */
}

static bool sees_choice_counts_first(void) {
    struct engine_seen seen;
    seen.tokens = (uint32_t)atomic_load_explicit(&choice[0].token_count, memory_order_acquire);
    seen.text = (size_t)atomic_load_explicit(&choice[0].text_safe, memory_order_acquire);
    seen.finish = atomic_load_explicit(&choice[0].finish, memory_order_acquire) != 0;
    return seen.finish == ENGINE_RUNNING || is_final(0, seen.tokens, seen.text);
}

/* Once the job is seen as finished, every choice may be read without looking again. */
static bool sees_job(void) {
    uint32_t tokens;
    if (!engine_see_job(&job, &tokens)) return true;
    if (tokens != CHOICES * TOKENS) return false;
    for (int c = 0; c < CHOICES; c++) {
        struct engine_seen seen = engine_see_choice(&choice[c]);
        if (seen.finish == ENGINE_RUNNING || !is_final(c, seen.tokens, seen.text)) return false;
        if (!contents_are_there(c, seen.tokens)) return false;
    }
    return true;
}

static bool sees_job_counts_first(void) {
    uint32_t tokens = 0;
    for (int c = 0; c < CHOICES; c++)
        tokens += (uint32_t)atomic_load_explicit(&choice[c].token_count, memory_order_acquire);
    bool finished = atomic_load_explicit(&job.finished, memory_order_acquire) != 0;
    return !finished || tokens == CHOICES * TOKENS;
}

static bool never_ends_early(void) {
    return engine_see_choice(&choice[0]).finish == ENGINE_RUNNING;
}

Test(publish, what_is_seen_as_final_is_final) {
    long executions, all;
    cr_assert_eq(run_all(sees_choice, &executions), 0);
    cr_assert_gt(executions, TOKENS * 2);
    cr_assert_eq(run_all(sees_job, &all), 0);
    cr_assert_gt(all, executions);
    cr_assert_gt(run_all(never_ends_early, &all), 0, "no execution sees the end");
}

Test(publish, loads_the_other_way_round_are_found) {
    long executions;
    cr_assert_gt(run_all(sees_choice_counts_first, &executions), 0);
    cr_assert_gt(run_all(sees_job_counts_first, &executions), 0);
}

Test(publish, stores_without_release_are_found) {
    long executions;
    weak_writer = true;
    cr_assert_gt(run_all(sees_choice, &executions), 0);
    cr_assert_gt(run_all(sees_job, &executions), 0);
    weak_writer = false;
}
