/* Constrained and free sequences in one batch, with every policy, evictions, several choices and
 * reasoning: each answer is bitwise the one that it is alone, and a constrained one belongs to its
 * language. */
#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "engine/steps/constraint.h"
#include "paging/policy.h"
#include "tests/unit/engine/requests.h"

enum { JOBS = 5, PROMPT = 60, TOKENS = 90, THINK_BEGIN = 35, THINK_END = 36 };

struct languages {
    struct constraint_table table;
    struct engine_constraint *list[3];
};

/* The first goes on until max_tokens, the second ends by itself, the third needs a stack. */
static void open_languages(struct languages *l) {
    static const struct {
        enum constrain_kind kind;
        const char *text;
    } texts[] = {{CONSTRAIN_REGEX, "(bc|d[e-h]{2}|i)*"},
                 {CONSTRAIN_REGEX, "[b-z]{5}(bb|cc)[b-z]{3,20}"},
                 {CONSTRAIN_GRAMMAR, "root ::= \"b\" root \"c\" | [d-k]{2,9}"}};
    const struct constrain_vocabulary v = {WORLD_VOCAB, world_token_bytes, NULL};
    struct fault fault = {0};
    constraint_table_open(&l->table, &v);
    for (int i = 0; i < 3; i++) {
        const struct constrain_part part = {.kind = texts[i].kind,
                                            .field = "f",
                                            .text = texts[i].text,
                                            .size = strlen(texts[i].text)};
        cr_assert_eq(constraint_open(&l->table, &part, &l->list[i], &fault), 0, "%s", fault.text);
    }
}

static void close_languages(struct languages *l) {
    for (int i = 0; i < 3; i++) constraint_close(&l->table, l->list[i]);
    constraint_table_close(&l->table);
}

/* Free with one and with two choices; constrained with one and two; reasoning before the language.
 */
static struct engine_job make_job(int number, const char *policy, const struct languages *l) {
    static int32_t thinking[PROMPT];
    struct engine_job job = job_of(number, PROMPT, TOKENS, global(24, 8, 16));
    struct engine_request *request = &job.request;
    request->kv.policy = policy;
    request->kv.retain = false;
    request->top_logprobs = 0;
    request->think_begin = request->think_end = -1;
    request->ignore_eos = number < 2;
    if (number == 1 || number == 3) request->choices = 2;
    if (number >= 2) request->constraint = l->list[number - 2];
    if (number == 4) {
        memcpy(thinking, request->prompt, sizeof thinking);
        thinking[PROMPT - 1] = THINK_BEGIN;
        request->prompt = thinking;
        request->think_begin = THINK_BEGIN;
        request->think_end = THINK_END;
    }
    return job;
}

static void run_jobs(struct engine_job *jobs, int count) {
    struct world w;
    struct fault fault = {0};
    world_open(
        &w, &(struct world_options){.pages = 4000, .sequences = 8, .conversations = 0, .rows = 70});
    for (int i = 0; i < count; i++) {
        cr_assert_eq(sched_resolve_job(&w.sched.options.kv, &jobs[i], &fault), 0, "%s: %s",
                     fault.field, fault.text);
        submit(&w, &jobs[i]);
    }
    run_until_idle(&w);
    world_close(&w);
}

static int choices_of(const struct engine_job *job) {
    return job->request.choices > 0 ? job->request.choices : 1;
}

static uint32_t bits(float value) {
    uint32_t result;
    memcpy(&result, &value, sizeof result);
    return result;
}

static void expect_same(const struct engine_job *a, const struct engine_job *b, int number) {
    for (int i = 0; i < choices_of(a); i++) {
        const struct engine_choice *x = &a->choice[i], *y = &b->choice[i];
        size_t count = atomic_load(&x->token_count);
        cr_assert_eq(atomic_load(&x->finish), atomic_load(&y->finish), "job %d", number);
        cr_assert_eq(count, atomic_load(&y->token_count), "job %d", number);
        for (size_t k = 0; k < count; k++)
            cr_assert(x->tokens[k].token == y->tokens[k].token &&
                          bits(x->tokens[k].logprob) == bits(y->tokens[k].logprob),
                      "job %d, choice %d, token %zu of %s", number, i, k, a->request.kv.policy);
    }
}

/* Returns whether the language was reached: behind the reasoning, where there is one. */
static bool check_language(const struct engine_job *job, int number) {
    bool reached = false;
    for (int i = 0; i < choices_of(job); i++) {
        const struct engine_choice *choice = &job->choice[i];
        size_t count = atomic_load(&choice->token_count), begin = 0;
        int finish = atomic_load(&choice->finish);
        cr_assert(finish == ENGINE_FINISH_STOP || finish == ENGINE_FINISH_LENGTH, "job %d: %s",
                  number, job->fault.text);
        if (job->request.think_end >= 0) {
            while (begin < count && choice->tokens[begin].token != THINK_END) begin++;
            if (begin == count) continue; /* cut while it reasoned */
            begin++;
        }
        size_t from = begin > 0 ? choice->tokens[begin - 1].text_end : 0;
        size_t to = count > 0 ? choice->tokens[count - 1].text_end : 0;
        struct constrain_at at = {0};
        struct constrain_next next;
        cr_assert_eq(constrain_next(job->request.constraint->language, &at, choice->text + from,
                                    to - from, NULL, &next),
                     0, "job %d: '%.*s'", number, (int)(to - from), choice->text + from);
        if (finish == ENGINE_FINISH_STOP) cr_assert(next.accepts, "job %d ended too soon", number);
        reached = true;
    }
    return reached;
}

Test(constrained, free_sequences_beside_are_bitwise_the_same) {
    struct languages l;
    int reached = 0;
    open_languages(&l);
    for (int p = 0; policy_at(p) != NULL; p++) {
        struct engine_job jobs[JOBS], alone[JOBS];
        for (int i = 0; i < JOBS; i++) {
            jobs[i] = make_job(i, policy_at(p)->name, &l);
            alone[i] = make_job(i, policy_at(p)->name, &l);
        }
        run_jobs(jobs, JOBS);
        for (int i = 0; i < JOBS; i++) {
            run_jobs(&alone[i], 1);
            expect_same(&jobs[i], &alone[i], i);
            if (i >= 2) reached += check_language(&jobs[i], i);
            engine_job_close(&jobs[i]);
            engine_job_close(&alone[i]);
        }
    }
    cr_assert_gt(reached, 30, "only %d answers reached their language", reached);
    close_languages(&l);
}

/* ---- Costly languages ---- */

enum { HOSTILE = 6, STEP_WORK_MAX = 32000, STALLS_MAX = 600000 };

/* Nested repetitions, recursion without a bound, and expressions whose states multiply. */
static const struct {
    enum constrain_kind kind;
    const char *text; /* NULL: 10,000 words */
} hostile[HOSTILE] = {
    {CONSTRAIN_REGEX, "(([a-z]{0,30}.?){0,30}[c-z]{2,9}){0,30}x"},
    {CONSTRAIN_REGEX,
     "((((((((a{0,9}b?){0,9}b?){0,9}b?){0,9}b?){0,9}b?){0,9}b?){0,9}b?){0,9}b?){0,9}z"},
    {CONSTRAIN_GRAMMAR, "root ::= s{0,100}\ns ::= \"b\" s{0,100} \"c\" | \"d\" s{0,100} | [d-z] | "
                        "\"b\" s s{0,50} s{0,30} \"c\""},
    {CONSTRAIN_GRAMMAR, "root ::= x{1,100}\nx ::= [b-z] x{0,30} [A-F]? | [b-m] [b-z] x{0,20}"},
    {CONSTRAIN_REGEX, "(.*[b-z].{20}|.*[c-m].{30}|.*[d-k].{25})+Z"},
    {CONSTRAIN_REGEX, NULL},
};

static void write_words(struct buf *out) {
    buf_open(out, 1 << 20);
    for (uint32_t i = 0; i < 10000; i++) {
        uint64_t rest = world_mix(i);
        if (i > 0) buf_char(out, '|');
        for (int k = 0; k < 12; k++, rest /= 25) buf_char(out, (char)('b' + rest % 25));
    }
}

static struct engine_constraint *open_hostile(struct constraint_table *table, int i) {
    struct engine_constraint *constraint = NULL;
    struct fault fault = {0};
    struct buf words;
    write_words(&words);
    const char *text = hostile[i].text ? hostile[i].text : words.data;
    const struct constrain_part part = {
        .kind = hostile[i].kind, .field = "f", .text = text, .size = strlen(text)};
    cr_assert_eq(constraint_open(table, &part, &constraint, &fault), 0, "%s", fault.text);
    buf_close(&words);
    return constraint;
}

static struct engine_job hostile_job(int number, const struct engine_constraint *constraint) {
    struct engine_job job = job_of(number, 9, TOKENS, global(24, 8, 16));
    job.request.constraint = constraint;
    job.request.constraint_field = "f";
    job.request.think_begin = job.request.think_end = -1;
    job.request.ignore_eos = constraint == NULL;
    return job;
}

/* Runs jobs of which the first is free, if there are several. In no step do masks cost more than
 * the bound, and the free answer gets a token in every step from its first one to its last. */
static void run_beside(struct engine_job *jobs, int count) {
    struct world w;
    struct fault fault = {0};
    int stalls = 0;
    world_open(
        &w, &(struct world_options){.pages = 4000, .sequences = 8, .conversations = 0, .rows = 90});
    for (int i = 0; i < count; i++) {
        cr_assert_eq(sched_resolve_job(&w.sched.options.kv, &jobs[i], &fault), 0, "%s", fault.text);
        submit(&w, &jobs[i]);
    }
    while (!sched_idle(&w.sched)) {
        uint64_t before = w.sched.counters.mask_work;
        int tokens = count_of(&jobs[0]);
        cr_assert_not(world_step(&w));
        uint64_t spent = w.sched.counters.mask_work - before;
        cr_assert_leq(spent, STEP_WORK_MAX, "a step that spent %llu", (unsigned long long)spent);
        if (count > 1 && tokens > 0 && tokens < TOKENS)
            cr_assert_eq(count_of(&jobs[0]), tokens + 1, "a step without a free token");
        if (!sched_stalled(&w.sched)) continue;
        cr_assert_lt(++stalls, STALLS_MAX, "does not end");
        usleep(100);
    }
    if (count > 1) cr_assert_gt(w.sched.counters.masks_deferred, 0);
    world_close(&w);
}

/* Runs the chosen jobs with languages that nothing was learned of yet. */
static void run_hostile(struct engine_job *jobs, int first, int count) {
    const struct constrain_vocabulary v = {WORLD_VOCAB, world_token_bytes, NULL};
    struct engine_constraint *list[HOSTILE];
    struct constraint_table table;
    constraint_table_open(&table, &v);
    for (int i = 0; i < HOSTILE; i++) list[i] = open_hostile(&table, i);
    for (int i = first; i < first + count; i++)
        jobs[i] = hostile_job(i, i > 0 ? list[i - 1] : NULL);
    run_beside(jobs + first, count);
    for (int i = 0; i < HOSTILE; i++) constraint_close(&table, list[i]);
    constraint_table_close(&table);
}

Test(constrained, costly_masks_cost_no_step_more_than_its_bound) {
    struct engine_job jobs[1 + HOSTILE], alone[1 + HOSTILE];
    int ended = 0;
    run_hostile(jobs, 0, 1 + HOSTILE);
    for (int i = 0; i < 1 + HOSTILE; i++) {
        run_hostile(alone, i, 1);
        expect_same(&jobs[i], &alone[i], i);
        if (finish_of(&jobs[i]) == ENGINE_FINISH_ERROR) {
            ended++;
            cr_assert_eq(jobs[i].fault.code, ERR_LIMIT);
            cr_assert_str_eq(jobs[i].fault.field, "f");
            cr_assert_not_null(strstr(jobs[i].fault.text, "too complex: "), "%s",
                               jobs[i].fault.text);
        }
        engine_job_close(&jobs[i]);
        engine_job_close(&alone[i]);
    }
    cr_assert(ended > 0 && ended < HOSTILE, "%d answers ended by a limit", ended);
}

/* A prompt whose last row waits for a mask gets no row, so it is no reason for the evictions of
 * another client to be put off. */
Test(constrained, evictions_do_not_wait_for_another_clients_mask) {
    static struct mask_task never; /* is not done */
    struct languages l;
    struct world w;
    struct fault fault = {0};
    open_languages(&l);
    world_open(
        &w, &(struct world_options){
                .pages = 4000, .sequences = 2, .conversations = 0, .rows = 20, .row_entries = 1});
    struct engine_job jobs[2] = {job_of(0, 100, 60, global(80, 0, 4)), make_job(2, "full", &l)};
    jobs[0].request.kv.policy = "rkv"; /* an eviction costs more than a step pays */
    for (int i = 0; i < 2; i++) {
        jobs[i].request.client[0] = (uint8_t)i;
        cr_assert_eq(sched_resolve_job(&w.sched.options.kv, &jobs[i], &fault), 0, "%s", fault.text);
    }
    submit(&w, &jobs[0]);
    while (count_of(&jobs[0]) < 3) cr_assert_not(world_step(&w));
    submit(&w, &jobs[1]);
    cr_assert_not(world_step(&w));
    struct sequence *seq = &w.sched.sequences[w.sched.order[1]];
    cr_assert(seq->job == &jobs[1] && seq_prefilling(seq));
    seq->constraint.waits = true;
    seq->constraint.task = &never;
    for (int i = 0; seq->prompt_count - seq->due.tokens > 1; i++) {
        cr_assert_lt(i, 100);
        cr_assert_not(world_step(&w));
    }
    for (int i = 0; i < 10; i++) {
        int tokens = count_of(&jobs[0]);
        cr_assert_not(world_step(&w));
        cr_assert_eq(count_of(&jobs[0]), tokens + 1, "step %d", i);
    }
    seq->constraint.task = NULL;
    run_until_idle(&w);
    for (int i = 0; i < 2; i++) engine_job_close(&jobs[i]);
    world_close(&w);
    close_languages(&l);
}
