/* The scheduler under a seeded storm: many requests with their own policies and budgets, turns that
 * continue turns, several choices, retries, deleted conversations, scores of prompts, stop strings,
 * clients that vanish, a pool far too small for all; every other seed with a state directory, and
 * now and then a new start from it.
 *
 * After every step world_check: the cache's own check, nobody above its reservation, pages used <=
 * reserved + retained <= pool, no preemption. At the end: everything submitted has finished,
 * nothing is reserved, used = retained; and every answer and score equals the same chain of turns
 * run alone on a pool of its own, whatever the step's row budget: what else runs must not change
 * what is kept.
 *
 * Answers that are computed a second time are predicted, with some tokens changed, so that drafted
 * tokens are confirmed and rejected; those computed for the first time are not. In every other
 * storm a draft model guesses, too, often wrongly, and its steps fail now and then; alone it never
 * fails.
 *
 * The CPU backend's path and thread count change with the seed; every fifth model has recurrent
 * states.
 *
 * Usage: sim_sched [first_seed] [seeds] [stride]. A failure prints its seed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "tests/sim/world.h"

enum { CHAINS = 24, TURNS = 3, PROMPT_MAX = 160, ANSWER_MAX = 40, CHOICES = 4, CLIENTS = 6 };
/* Chains in a space, and the most tokens that they begin with. */
enum { ALIKE = 4, ALIKE_MAX = 150 };
_Static_assert(TURNS *(PROMPT_MAX + ANSWER_MAX) <= WORLD_POSITIONS, "a chain fits the positions");

/* In every third storm the model has few positions, and texts are shifted. */
enum { POSITIONS_FEW = 170 };
static bool is_shifted(uint64_t seed) {
    return seed % 3 == 2;
}

static long shifted, cuts_compared, retries_compared, deleted, restarts, restored;
static long prefixes, prefix_hits, prefix_waits, apart, divided;
static long drafted, confirmed, drafted_alone, confirmed_alone;
static long modelled, model_confirmed, model_failures;

struct random {
    uint64_t state;
};

static int below(struct random *r, int n) {
    r->state = world_mix(r->state);
    return (int)(r->state % (uint64_t)n);
}

/* The reference path is the slowest, so it runs the fewest seeds. */
static struct world_options backend_of(uint64_t seed) {
    const char *path = seed % 16 == 0 ? "reference" : seed % 2 == 0 ? "portable" : "auto";
    return (struct world_options){.path = path,
                                  .threads = seed % 8 == 3 ? 2 : 1,
                                  .states = seed % 5 == 4 ? 1 + (int)(seed % 2) : 0,
                                  .positions = is_shifted(seed) ? POSITIONS_FEW : 0};
}

/* ---- Requests ---- */

/* A chain is one user's conversation: each turn's prompt is the last prompt, the answer (perhaps
 * edited), and something new. */
struct chain {
    struct engine_kv kv;
    uint64_t seed, alike_seed;
    int alike;  /* the first tokens, by alike_seed, which other chains of its space have, too */
    int border; /* as requests have it */
    int turn;
    int32_t prompt[WORLD_POSITIONS];
    int prompt_count;
    int max_tokens[TURNS], extra[TURNS], edit[TURNS], cancel_after[TURNS];
    bool scored[TURNS]; /* with prompt_logprobs */
    int choices[TURNS];
    bool retry[TURNS], retrying; /* the same turn repeated */
    float temperature;
    char stop[2];
    struct engine_stop stops[1];
    struct engine_job job;
    bool submitted, over;
    int32_t answers[TURNS][ANSWER_MAX];
    int32_t predicted[ANSWER_MAX];
    int answer_count[TURNS], cached[TURNS], dropped[TURNS], finish[TURNS], shown[TURNS];
    bool cut[TURNS];
    int64_t kept[TURNS];
    uint64_t others[TURNS]; /* a hash over the choices after the first */
    double scores[TURNS];   /* sum over the prompt */
    int strays; /* turns from this one on may go on from a retry that began elsewhere; 0: none */
    bool done[TURNS];
};

/* Some chains share a space, and many of these begin alike with equal settings. */
static void pair_chain(struct chain *c, struct random *r, int index) {
    const struct chain *other = c - 1;
    c->alike_seed = c->seed;
    c->alike = below(r, ALIKE_MAX);
    if (index % ALIKE > 0) {
        c->alike = other->alike;
        c->alike_seed = other->alike_seed;
        if (below(r, 3) > 0) c->kv = other->kv;
    }
    c->border = below(r, 2) * c->alike;
    if (c->extra[0] < c->alike + 8) c->extra[0] = c->alike + 8;
}

/* Policies that cannot be shifted give way to one that can. */
static void shift_chain(struct chain *c) {
    const struct policy *policy = policy_find(c->kv.policy);
    c->kv.overflow = ENGINE_OVERFLOW_SHIFT;
    if (!policy->bounded || policy->rule.merge == KERN_MERGE_CLASSES) c->kv.policy = "global";
    for (int t = 1; t < TURNS; t++) c->extra[t] += 60;
}

static void plan_chain(struct chain *c, struct random *r, int index, int sequences, bool few) {
    int policies = 0;
    while (policy_at(policies)) policies++;
    *c = (struct chain){.seed = world_mix(r->state + (uint64_t)index)};
    c->kv = (struct engine_kv){.policy = policy_at(below(r, policies))->name,
                               .budget = 6 + below(r, 60),
                               .buffer = below(r, 20),
                               .chunk = 1 + below(r, 64),
                               .sinks = below(r, 4),
                               .recent = below(r, 3),
                               .reuse = true,
                               .retain = true};
    c->temperature = below(r, 2) ? 1.0f : 0.0f;
    for (int t = 0; t < TURNS; t++) {
        c->max_tokens[t] = 1 + below(r, ANSWER_MAX);
        c->extra[t] = 1 + below(r, t == 0 ? PROMPT_MAX : 30);
        c->edit[t] = below(r, 4) == 0 ? 1 + below(r, 8) : 0;
        c->cancel_after[t] = below(r, 6) == 0 ? below(r, 12) : -1;
        c->scored[t] = below(r, 8) == 0;
        if (c->scored[t]) c->max_tokens[t] = below(r, 3); /* no tokens: scores only */
        c->choices[t] = below(r, 3) == 0 ? 1 + below(r, CHOICES) : 1;
        if (c->choices[t] > sequences) c->choices[t] = sequences;
        c->retry[t] = below(r, 5) == 0;
    }
    if (few) shift_chain(c);
    pair_chain(c, r, index);
    c->stop[0] = (char)('a' + 1 + below(r, 25));
    c->stop[1] = (char)('a' + 1 + below(r, 25));
    c->prompt_count = 0;
}

static void extend_prompt(struct chain *c) {
    int t = c->turn;
    if (t > 0) {
        int keep = c->answer_count[t - 1] - c->edit[t];
        for (int i = 0; i < keep; i++) c->prompt[c->prompt_count++] = c->answers[t - 1][i];
    }
    for (int i = 0; i < c->extra[t]; i++) {
        uint64_t seed = t == 0 && i < c->alike ? c->alike_seed : c->seed;
        c->prompt[c->prompt_count++] =
            1 + (int32_t)(world_mix(seed + (uint64_t)(t * 1000 + i)) % (WORLD_VOCAB - 1));
    }
}

/* Predicts the turn's answer as it was before, with some tokens changed and some left out. */
static void predict(struct chain *c, int t) {
    int from = (int)(world_mix(c->seed + (uint64_t)t) % 3), count = 0;
    for (int i = from; i < c->answer_count[t]; i++) {
        uint64_t chance = world_mix(c->seed + (uint64_t)(t * 64 + i)) % 16;
        if (chance == 0) continue;
        c->predicted[count++] = chance == 1 ? 1 + i % (WORLD_VOCAB - 1) : c->answers[t][i];
    }
    c->job.request.predicted = c->predicted;
    c->job.request.predicted_count = count;
}

/* `again`: the answer is known. */
static void submit(struct world *w, struct chain *c, int index, bool again) {
    int t = c->turn - c->retrying;
    if (!c->retrying) extend_prompt(c);
    struct engine_job *job = &c->job;
    memset(job, 0, sizeof *job);
    job->request = (struct engine_request){.prompt = c->prompt,
                                           .prompt_count = c->prompt_count,
                                           .border = c->border,
                                           .max_tokens = c->max_tokens[t],
                                           .temperature = c->temperature,
                                           .top_p = 1,
                                           .repetition = 1,
                                           .seed = c->seed + (uint64_t)t,
                                           .choices = c->choices[t],
                                           .hint = (uint64_t)index,
                                           .top_logprobs = c->scored[t] ? t : -1,
                                           .prompt_logprobs = c->scored[t],
                                           .prompt_top_logprobs = c->scored[t] ? t : 0,
                                           .stops = c->stops,
                                           .stop_count = 1,
                                           .drafts = -1,
                                           .kv = c->kv};
    if (again) predict(c, t);
    c->stops[0] = (struct engine_stop){c->stop, sizeof c->stop};
    int client = index % CLIENTS, space = index / ALIKE;
    memcpy(job->request.space, &space, sizeof space);
    memcpy(job->request.client, &client, sizeof client);
    memcpy(job->request.owner, &client, sizeof client);
    CHECK(world_submit(w, job) == 0);
    c->submitted = true;
}

/* 0: a cancel came when the first choice had ended and others had not. */
static uint64_t hash_choices(const struct engine_job *job) {
    uint64_t hash = 1;
    for (int i = 1; i < job->choice_count; i++) {
        const struct engine_choice *choice = &job->choice[i];
        if (atomic_load(&choice->finish) == ENGINE_FINISH_ABORT) return 0;
        int count = (int)atomic_load(&choice->token_count);
        hash = world_mix(hash + (uint64_t)atomic_load(&choice->finish) * 64 + (uint64_t)count);
        hash = world_mix(hash + (uint64_t)atomic_load(&choice->text_safe));
        for (int k = 0; k < count; k++)
            hash = world_mix(hash + (uint64_t)(uint32_t)choice->tokens[k].token);
    }
    return hash;
}

/* A retry from the state that the turn went on from gives the same answers. Other states of the
 * chain may have been forgotten, deleted or restored meanwhile; then it starts elsewhere. */
static void collect_retry(struct chain *c) {
    struct engine_job *job = &c->job;
    int t = c->turn - 1, finish = atomic_load(&job->choice[0].finish);
    CHECK_MSG(finish != ENGINE_FINISH_ERROR, "%s", job->fault.text);
    if (finish == c->finish[t] && job->cached_tokens == c->cached[t]) {
        CHECK((int)atomic_load(&job->choice[0].token_count) == c->answer_count[t]);
        for (int i = 0; i < c->answer_count[t]; i++)
            CHECK(job->choice[0].tokens[i].token == c->answers[t][i]);
        uint64_t others = hash_choices(job);
        CHECK(others == 0 || c->others[t] == 0 || others == c->others[t]);
        retries_compared++;
    }
    if (job->cached_tokens != c->cached[t] && c->strays == 0) c->strays = t + 1;
    engine_job_close(job);
    c->submitted = c->retrying = false;
}

/* Collects a finished turn; true when the chain can go on. */
static void collect(struct chain *c) {
    struct engine_job *job = &c->job;
    int t = c->turn, finish = atomic_load(&job->choice[0].finish);
    /* This many choices may exceed what the pool can ever hold. */
    CHECK_MSG(finish != ENGINE_FINISH_ERROR || job->fault.code == ERR_LIMIT, "%s", job->fault.text);
    c->finish[t] = finish;
    c->shown[t] = (int)atomic_load(&job->choice[0].text_safe);
    c->scores[t] = 0;
    for (int i = 1; c->scored[t] && i < c->prompt_count; i++) {
        const struct engine_token *token = &job->prompt_tokens[i];
        if (finish == ENGINE_FINISH_ABORT || finish == ENGINE_FINISH_ERROR) break;
        CHECK(token->token == c->prompt[i] && token->rank >= 1 && token->logprob <= 0);
        CHECK(t == 0 || job->prompt_top[i * t].logprob >= token->logprob);
        c->scores[t] += (double)token->logprob * i;
    }
    c->answer_count[t] = (int)atomic_load(&job->choice[0].token_count);
    for (int i = 0; i < c->answer_count[t]; i++) c->answers[t][i] = job->choice[0].tokens[i].token;
    c->cached[t] = job->cached_tokens;
    c->cut[t] = job->cut;
    c->dropped[t] = job->kv.dropped_tokens;
    c->kept[t] = job->kv.kept_entries;
    c->others[t] = hash_choices(job);
    c->done[t] = finish == ENGINE_FINISH_STOP || finish == ENGINE_FINISH_LENGTH;
    if (!c->done[t]) c->over = true;
    engine_job_close(job);
    c->submitted = false;
    c->turn++;
    if (c->turn == TURNS) c->over = true;
}

/* ---- The storm, then each chain alone ---- */

static void count_world(const struct world *w) {
    const struct engine_counters *counters = &w->sched.counters;
    restored += (long)counters->state_restored;
    shifted += (long)counters->shifts;
    prefixes += (long)counters->prefixes;
    prefix_hits += (long)counters->prefix_hits;
    prefix_waits += (long)counters->prefix_waits;
    drafted += (long)counters->drafted_tokens;
    confirmed += (long)counters->confirmed_tokens;
    modelled += (long)counters->model_drafted_tokens;
    model_confirmed += (long)counters->model_confirmed_tokens;
    model_failures += (long)counters->drafter_failures;
    apart += (long)w->sched.turns.apart_steps;
    divided += (long)w->sched.turns.divided_steps;
}

/* Operations of a service besides answering. */
static void disturb(struct world *w, const struct world_options *options, struct random *r) {
    struct conversation_table *table = &w->sched.keeper.table;
    if (below(r, 60) == 0) {
        uint64_t id = table->all[below(r, table->capacity)].id;
        if (id != 0) deleted += keeper_delete(&w->sched.keeper, id) == 0;
    }
    if (!options->state_dir || !sched_idle(&w->sched) || below(r, 2)) return;
    if (below(r, 2)) world_save_all(w);
    count_world(w);
    world_close(w);
    world_open(w, options);
    restarts++;
}

static bool wants_retry(const struct chain *c) {
    int t = c->turn - 1;
    return t >= 0 && !c->over && c->done[t] && c->retry[t];
}

static void go_on(struct world *w, struct chain *c, int index, struct random *r) {
    if (!c->submitted) {
        if (below(r, 8) == 0) submit(w, c, index, c->retrying);
    } else if (atomic_load(&c->job.finished) != 0) {
        bool was_retry = c->retrying;
        if (was_retry)
            collect_retry(c);
        else
            collect(c);
        /* With one turn counted as done, the same prompt is submitted once more. */
        if (!was_retry && wants_retry(c)) c->retrying = true;
    } else if (c->cancel_after[c->turn - c->retrying] >= 0 && below(r, 10) == 0 &&
               (int)atomic_load(&c->job.choice[0].token_count) >=
                   c->cancel_after[c->turn - c->retrying]) {
        atomic_store(&c->job.cancel, 1);
    }
}

static void storm(struct chain *chains, uint64_t seed) {
    struct random r = {world_mix(seed)};
    struct world w;
    struct world_options options = backend_of(seed);
    char dir[64];
    if (seed % 2 == 1) {
        world_make_dir(dir);
        options.state_dir = dir;
        options.state_eager = below(&r, 2);
        options.state_bytes = below(&r, 3) == 0 ? 100000 + below(&r, 200000) : 0;
        options.copy_bytes = seed % 4 == 1; /* a stream in each step, or all at once */
    }
    options.pages = WORLD_STREAMS * (8 + below(&r, 60)) + 16 * options.states;
    options.sequences = 2 + below(&r, 6);
    options.drafts = below(&r, 2) ? DRAFT_MAX : below(&r, 4);
    options.conversations = 1 + below(&r, CHAINS);
    options.rows = 10 + below(&r, 60);
    options.logits = options.sequences + 1 + below(&r, 8);
    options.row_entries = seed % 4 < 2; /* evictions are expensive and deferred, or cheap */
    options.clients = 1 + below(&r, CLIENTS);
    options.step_stretch = seed % 3 == 1 ? 200 : 0;
    if (below(&r, 2)) {
        options.draft_texts = 1 + below(&r, options.sequences);
        options.draft_places = DRAFTER_PLACES_LEAST + below(&r, 200);
        options.draft_after = 1; /* the answers are short */
        options.draft_wrong = below(&r, 40);
        options.draft_fails = below(&r, 4);
        options.draft_block = below(&r, 3) == 0;
    }
    world_open(&w, &options);
    for (int i = 0; i < CHAINS; i++) {
        plan_chain(&chains[i], &r, i, options.sequences, is_shifted(seed));
        struct kv_params kv;
        struct fault fault;
        CHECK_MSG(sched_resolve_kv(&chains[i].kv, &w.sched.options.kv, &kv, &fault) == 0, "%s: %s",
                  fault.field, fault.text);
    }
    for (int over = 0, step = 0; over < CHAINS; step++) {
        CHECK_MSG(step < 200000, "the storm does not end");
        over = 0;
        for (int i = 0; i < CHAINS; i++) {
            struct chain *c = &chains[i];
            over += c->over;
            if (!c->over) go_on(&w, c, i, &r);
        }
        CHECK(!world_step(&w));
        disturb(&w, &options, &r);
    }
    CHECK(sched_idle(&w.sched) && w.sched.keeper.pages_reserved == 0);
    count_world(&w);
    world_close(&w);
    if (options.state_dir) world_remove_dir(dir);
}

static void replay_alone(const struct chain *seen, int index, uint64_t seed) {
    struct world w;
    struct chain *c = mem_must_alloc(1, sizeof *c);
    struct world_options options = backend_of(seed);
    options.pages = 4000;
    options.sequences = CHOICES;
    options.drafts = DRAFT_MAX;
    options.conversations = 2;
    options.draft_texts = seed % 2 == 0 ? CHOICES : 0;
    options.draft_after = 1;
    options.draft_wrong = 20;
    options.rows = 3 + (int)(seed % 200);
    if (options.rows <= CHOICES) options.rows = CHOICES + 1;
    options.logits = CHOICES + 1 + (int)(seed % 7);
    world_open(&w, &options);
    *c = *seen;
    c->turn = c->prompt_count = 0;
    c->submitted = c->over = c->retrying = false;
    for (int t = 0; t < TURNS && seen->done[t]; t++) {
        if (seen->strays > 0 && t >= seen->strays) break;
        submit(&w, c, index, true);
        for (int step = 0; atomic_load(&c->job.finished) == 0; step++) {
            CHECK(step < 10000);
            CHECK(!world_step(&w));
        }
        collect(c);
        /* Forgotten under pressure in the storm: a different starting state from here on. But what
         * the first turn found of another chain is as if it had read it itself. */
        if (t > 0 && (c->cached[t] != seen->cached[t] || c->cut[t] != seen->cut[t])) break;
        cuts_compared += t == 0 && seen->cached[t] > 0;
        CHECK_MSG(c->answer_count[t] == seen->answer_count[t] &&
                      memcmp(c->answers[t], seen->answers[t],
                             (size_t)c->answer_count[t] * sizeof(int32_t)) == 0,
                  "seed %llu chain %d turn %d (%s): another answer than alone",
                  (unsigned long long)seed, index, t, seen->kv.policy);
        CHECK(c->kept[t] == seen->kept[t] && c->dropped[t] == seen->dropped[t]);
        CHECK(c->finish[t] == seen->finish[t] && c->shown[t] == seen->shown[t]);
        CHECK_MSG(c->scores[t] == seen->scores[t],
                  "seed %llu chain %d turn %d (%s): other scores than alone",
                  (unsigned long long)seed, index, t, seen->kv.policy);
        CHECK(seen->others[t] == 0 || c->others[t] == seen->others[t]);
    }
    drafted_alone += (long)w.sched.counters.drafted_tokens;
    confirmed_alone += (long)w.sched.counters.confirmed_tokens;
    world_close(&w);
    mem_free(c);
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : 40;
    uint64_t stride = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    struct chain *chains = mem_must_alloc(CHAINS, sizeof *chains);
    long turns = 0, continued = 0, cancelled = 0, scored = 0, stopped = 0;
    for (uint64_t n = 0, seed = first; n < seeds; n++, seed += stride) {
        fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
        storm(chains, seed);
        for (int i = 0; i < CHAINS; i++) {
            replay_alone(&chains[i], i, seed);
            for (int t = 0; t < TURNS; t++) {
                const struct chain *c = &chains[i];
                turns += c->done[t];
                continued += c->done[t] && c->cached[t] > 0;
                cancelled += t < c->turn && !c->done[t];
                scored += c->done[t] && c->scored[t];
                stopped += c->done[t] && c->finish[t] == ENGINE_FINISH_STOP;
            }
        }
    }
    mem_free(chains);
    printf("%ld cuts compared, %ld retries compared, %ld deleted, %ld restarts, %ld restored; ",
           cuts_compared, retries_compared, deleted, restarts, restored);
    printf("%ld shifts, %ld prefixes, %ld hits, %ld waits; ", shifted, prefixes, prefix_hits,
           prefix_waits);
    printf("%ld of %ld drafted tokens confirmed, alone %ld of %ld; ", confirmed, drafted,
           confirmed_alone, drafted_alone);
    printf("%ld of %ld by a draft model, which failed %ld times; ", model_confirmed, modelled,
           model_failures);
    printf("%ld prompts read apart, %ld divided steps; ", apart, divided);
    printf("%llu seeds: %ld turns, %ld continued, %ld cancelled, %ld scored, %ld stopped\n",
           (unsigned long long)seeds, turns, continued, cancelled, scored, stopped);
    /* All seeds together must have exercised every feature; a single seed may lack some. */
    CHECK(seeds < 10 ||
          (cuts_compared > 0 && retries_compared > 0 && deleted > 0 && restarts > 0 &&
           restored > 0 && shifted > 0 && prefixes > 0 && prefix_hits > 0 && prefix_waits > 0));
    CHECK(seeds < 10 || (apart > 0 && divided > 0));
    CHECK(seeds < 10 || (confirmed > 0 && drafted > confirmed));
    CHECK(seeds < 10 || (model_confirmed > 0 && modelled > model_confirmed && model_failures > 0));
    CHECK(seeds < 10 || (confirmed_alone > 0 && drafted_alone > confirmed_alone));
    CHECK(seeds < 10 || (turns > 0 && continued > 0 && cancelled > 0 && scored > 0 && stopped > 0));
    return 0;
}
