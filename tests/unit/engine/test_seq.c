/* Tests engine/steps/seq.c: output, stop conditions, text that may be shown. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "engine/steps/seq.h"

/* Token 0 is EOS, 1..25 are letters, 26 and 27 the two bytes of e-acute, 28 the three letters
 * "abc". */
static size_t bytes_of(const void *arg, int32_t id, const char **bytes) {
    static const char letters[] = "?abcdefghijklmnopqrstuvwxy";
    (void)arg;
    if (id == 0) return 0;
    if (id == 26)
        *bytes = "\xc3";
    else if (id == 27)
        *bytes = "\xa9";
    else if (id == 28)
        *bytes = "abc";
    else
        *bytes = letters + id;
    return id == 28 ? 3 : 1;
}

static const int32_t eos[] = {0};
static const struct seq_text text = {
    .token_bytes = bytes_of, .token_bytes_max = 3, .eos = eos, .eos_count = 1};
static const int32_t prompt[] = {5, 6};

struct fixture {
    struct engine_job job;
    struct sequence seq;
};

static void open_with(struct fixture *f, struct engine_request request) {
    *f = (struct fixture){0};
    request.prompt = prompt;
    request.prompt_count = 2;
    if (request.max_tokens == 0) request.max_tokens = 8;
    if (request.repetition == 0) request.repetition = 1;
    f->job.request = request;
    struct kv_params kv = {.policy = policy_find("full")};
    cr_assert_eq(seq_job_alloc(&f->job, 3, 4, 0, 0), 0);
    cr_assert_eq(seq_open(&f->seq, &f->job, 0, &kv, &text), 0);
}

static void feed(struct fixture *f, const char *word) {
    for (; *word != '\0' && f->seq.finish == ENGINE_RUNNING; word++) {
        int32_t id = *word == '.'   ? 0
                     : *word == '<' ? 26
                     : *word == '>' ? 27
                     : *word == '3' ? 28
                                    : *word - 'a' + 1;
        seq_add_token(&f->seq, &text, &(struct kern_sampled){.token = id});
    }
}

static void expect(struct fixture *f, const char *safe, enum engine_finish finish) {
    struct engine_choice *c = &f->job.choice[0];
    size_t n = atomic_load(&c->text_safe);
    cr_assert_eq(f->seq.finish, finish);
    cr_assert(n == strlen(safe) && memcmp(c->text, safe, n) == 0, "shown '%.*s', expected '%s'",
              (int)n, c->text, safe);
}

static void shut(struct fixture *f) {
    seq_close(&f->seq);
    engine_job_close(&f->job);
}

Test(seq, eos_ends_and_is_not_shown) {
    struct fixture f;
    open_with(&f, (struct engine_request){0});
    feed(&f, "ab.");
    expect(&f, "ab", ENGINE_FINISH_STOP);
    cr_assert_eq(f.job.choice[0].stop_token, 0);
    cr_assert_eq(atomic_load(&f.job.choice[0].token_count), 3);
    shut(&f);
}

Test(seq, ignore_eos_goes_on_to_length) {
    struct fixture f;
    open_with(&f, (struct engine_request){.ignore_eos = true, .max_tokens = 4});
    feed(&f, "a.b.c");
    expect(&f, "ab", ENGINE_FINISH_LENGTH);
    shut(&f);
}

Test(seq, stop_string_is_held_back_and_cut) {
    struct fixture f;
    struct engine_stop stops[] = {{"bcd", 3}, {"zz", 2}};
    open_with(&f, (struct engine_request){.stops = stops, .stop_count = 2});
    feed(&f, "ab");
    expect(&f, "a", ENGINE_RUNNING);
    feed(&f, "c");
    expect(&f, "a", ENGINE_RUNNING);
    feed(&f, "b"); /* "abcb": the first partial match failed, a new one began */
    expect(&f, "abc", ENGINE_RUNNING);
    feed(&f, "cd");
    expect(&f, "abc", ENGINE_FINISH_STOP);
    cr_assert_eq(f.job.choice[0].stop_index, 0);
    shut(&f);
}

Test(seq, stop_inside_one_token) {
    struct fixture f;
    struct engine_stop stops[] = {{"b", 1}};
    open_with(&f, (struct engine_request){.stops = stops, .stop_count = 1});
    feed(&f, "x3");
    expect(&f, "xa", ENGINE_FINISH_STOP);
    shut(&f);
}

Test(seq, the_stop_string_that_begins_first_counts) {
    struct fixture f;
    struct engine_stop stops[] = {{"c", 1}, {"bc", 2}, {"b", 1}};
    open_with(&f, (struct engine_request){.stops = stops, .stop_count = 3});
    feed(&f, "x3");
    expect(&f, "xa", ENGINE_FINISH_STOP);
    cr_assert_eq(f.job.choice[0].stop_index, 1,
                 "of two with one beginning the first in the request");
    shut(&f);
}

static size_t shorter(size_t a, size_t b) {
    return a < b ? a : b;
}

/* The text may be shown up to the stop string that begins first, or up to the longest end of the
 * text that a stop string begins with. */
static size_t naive_safe(const struct engine_stop *stops, int count, const char *shown,
                         enum engine_finish *finish) {
    size_t size = strlen(shown), safe = size, held = size;
    *finish = ENGINE_RUNNING;
    for (int i = 0; i < count; i++)
        for (size_t at = 0; at < size; at++) {
            size_t same = shorter(stops[i].size, size - at);
            if (memcmp(shown + at, stops[i].text, same) != 0) continue;
            if (same == stops[i].size) *finish = ENGINE_FINISH_STOP, safe = shorter(safe, at);
            held = shorter(held, at);
        }
    return *finish == ENGINE_FINISH_STOP ? safe : held;
}

Test(seq, stop_strings_equal_a_naive_search) {
    unsigned random = 1;
    for (int round = 0; round < 4000; round++) {
        char words[3][5], shown[32] = "";
        struct engine_stop stops[3];
        struct fixture f;
        enum engine_finish finish = ENGINE_RUNNING;
        for (int i = 0; i < 3; i++) {
            random = random * 1664525u + 1013904223u;
            stops[i] = (struct engine_stop){words[i], 1 + (random >> 20) % 4};
            for (int k = 0; k < 4; k++) words[i][k] = (char)('a' + (random >> (8 + 2 * k)) % 3);
        }
        open_with(&f, (struct engine_request){.stops = stops, .stop_count = 3});
        for (int i = 0; i < 7 && finish == ENGINE_RUNNING; i++) {
            random = random * 1664525u + 1013904223u;
            const char *word = &"a\0b\0c\0"
                                "3"[(random >> 16) % 4 * 2];
            strcat(shown, *word == '3' ? "abc" : word);
            feed(&f, word);
            char safe[32] = "";
            memcpy(safe, shown, naive_safe(stops, 3, shown, &finish));
            expect(&f, safe, finish);
        }
        shut(&f);
    }
}

Test(seq, characters_are_shown_whole) {
    struct fixture f;
    open_with(&f, (struct engine_request){0});
    feed(&f, "a<");
    expect(&f, "a", ENGINE_RUNNING);
    feed(&f, ">");
    expect(&f, "a\xc3\xa9", ENGINE_RUNNING);
    feed(&f, "<.");
    expect(&f, "a\xc3\xa9\xc3", ENGINE_FINISH_STOP); /* at the end all text is shown */
    shut(&f);
}

/* Returns whether the next token must be the one that ends reasoning. */
static bool must_end(struct fixture *f) {
    struct kern_sample params;
    seq_sample_params(&f->seq, &params);
    return params.bias_count == 1 && params.bias[0].token == 25;
}

Test(seq, reasoning_ends_behind_a_whole_character) {
    const struct engine_request request = {
        .think_begin = 6, .think_end = 25, .think_bounded = true, .think_budget = 2};
    struct fixture f;
    open_with(&f, request);
    feed(&f, "a<");
    cr_expect(!must_end(&f));
    feed(&f, ">");
    cr_expect(must_end(&f));
    shut(&f);
    open_with(&f, request); /* a model that never completes one */
    feed(&f, "<<<<");
    cr_expect(!must_end(&f));
    feed(&f, "<");
    cr_expect(must_end(&f));
    shut(&f);
}

Test(seq, stop_token_ids) {
    struct fixture f;
    int32_t ids[] = {3};
    open_with(&f, (struct engine_request){.stop_ids = ids, .stop_id_count = 1});
    feed(&f, "abc");
    expect(&f, "ab", ENGINE_FINISH_STOP);
    cr_assert_eq(f.job.choice[0].stop_token, 3);
    shut(&f);
}

Test(seq, min_tokens_bans_and_waits) {
    struct fixture f;
    int32_t ids[] = {3};
    struct engine_stop stops[] = {{"ab", 2}};
    struct kern_sample params;
    open_with(
        &f,
        (struct engine_request){
            .min_tokens = 3, .stops = stops, .stop_count = 1, .stop_ids = ids, .stop_id_count = 1});
    seq_sample_params(&f.seq, &params);
    cr_assert_eq(params.banned_count, 2);
    cr_assert(params.banned[0] == 0 && params.banned[1] == 3);
    feed(&f, "ab"); /* too early to stop */
    cr_assert_eq(f.seq.finish, ENGINE_RUNNING);
    feed(&f, "x");
    seq_sample_params(&f.seq, &params);
    cr_assert_eq(params.banned_count, 0);
    cr_assert_eq(params.position, 5);
    cr_assert_eq(params.seen_count, 0); /* no penalties */
    shut(&f);
}

/* The list for penalties grows with the answer: each token once, prompt tokens counted 0 times. */
Test(seq, penalties_count_the_answer_as_it_comes) {
    struct fixture f;
    struct kern_sample params;
    open_with(&f, (struct engine_request){.presence = 0.5f});
    seq_sample_params(&f.seq, &params);
    cr_assert_eq(params.seen_count, prompt[0] == prompt[1] ? 1 : 2);
    for (int i = 0; i < params.seen_count; i++) cr_assert_eq(params.seen[i].outputs, 0);
    feed(&f, "a");
    feed(&f, "b");
    feed(&f, "a");
    int32_t before = params.seen_count;
    for (int again = 0; again < 2; again++) {
        seq_sample_params(&f.seq, &params);
        cr_assert_eq(params.seen_count, before + 2);
        cr_assert_eq(params.seen[before].outputs, 2);
        cr_assert_eq(params.seen[before + 1].outputs, 1);
        cr_assert_eq(params.seen[before].token, f.seq.tokens[2]);
    }
    shut(&f);
}

/* Against counting the whole text anew, with tokens whose hashes collide. */
Test(seq, a_tally_equals_counting) {
    enum { TOKENS = 400, PROMPT = 130, VOCAB = 1 << 20 };
    static int32_t counts[VOCAB], tokens[TOKENS];
    struct tally tally;
    cr_assert_eq(tally_open(&tally, TOKENS), 0);
    for (int i = 0; i < TOKENS; i++) tokens[i] = (i * i % 97) * (i % 3 ? 1 : 8192);
    for (int end = 1; end <= TOKENS; end += 1 + end % 7) {
        tally_add(&tally, tokens, PROMPT, end);
        memset(counts, 0, sizeof counts);
        int distinct = 0;
        for (int i = 0; i < end; i++) {
            distinct += counts[tokens[i]] == 0;
            counts[tokens[i]] |= 1 << 30;
            counts[tokens[i]] += i >= PROMPT;
        }
        cr_assert_eq(tally.count, distinct);
        for (int i = 0; i < tally.count; i++)
            cr_assert_eq(tally.list[i].outputs, counts[tally.list[i].token] & ((1 << 30) - 1));
    }
    tally_close(&tally);
}

Test(seq, stop_tail) {
    struct engine_stop stops[] = {{"abab", 4}, {"b", 1}};
    cr_assert_eq(seq_stop_tail(stops, 2, "xxaba", 5), 3);
    cr_assert_eq(seq_stop_tail(stops, 2, "a", 1), 1);
    cr_assert_eq(seq_stop_tail(stops, 2, "x", 1), 0);
    cr_assert_eq(seq_stop_tail(stops, 0, "x", 1), 0);
}

Test(seq, every_failed_allocation_leaves_nothing) {
    struct kv_params kv = {.policy = policy_find("full")};
    struct engine_request request = {.prompt = prompt,
                                     .prompt_count = 2,
                                     .max_tokens = 4,
                                     .min_tokens = 1,
                                     .prompt_logprobs = true,
                                     .prompt_top_logprobs = 2,
                                     .top_logprobs = 2};
    for (long n = 0;; n++) {
        struct engine_job job = {.request = request};
        struct sequence seq = {0};
        mem_fail_after(n);
        int rc = seq_job_alloc(&job, 3, 4, 0, 0);
        if (rc == 0) rc = seq_open(&seq, &job, 0, &kv, &text);
        bool failed = !mem_fail_pending();
        mem_fail_after(-1);
        cr_assert_eq(rc, failed ? ERR_NOMEM : 0);
        seq_close(&seq);
        engine_job_close(&job);
        if (!failed) break;
        cr_assert_lt(n, 20);
    }
}
