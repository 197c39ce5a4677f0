/* Constrained and free sequences in one batch, with every policy, evictions, several choices and
 * reasoning: each answer is bitwise the one that it is alone, and a constrained one belongs to its
 * language. */
#include <criterion/criterion.h>
#include <string.h>

#include "engine/constraint.h"
#include "paging/policy.h"
#include "tests/unit/engine/requests.h"

enum { JOBS = 5, PROMPT = 60, TOKENS = 90, THINK_BEGIN = 35, THINK_END = 36 };

/* As the world's: token 0 ends an answer, the others are a letter each. */
static size_t letter(const void *arg, int32_t id, const char **bytes) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    (void)arg;
    if (id == 0) return 0;
    *bytes = letters + id;
    return 1;
}

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
    const struct constrain_vocabulary v = {WORLD_VOCAB, letter, NULL};
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
