/* The scheduler under a seeded storm: many requests with their own policies and budgets, turns that
 * continue turns, clients that vanish, a pool far too small for all. The cache is the real one; the
 * model is small and fake, but its logits come from attention over what the cache really keeps, so
 * one wrongly kept or lost entry changes an answer.
 *
 * After every step: the cache's own check, pages used <= reserved + retained <= pool, no
 * preemption. At the end: everything submitted has finished, nothing is reserved, used = retained;
 * and every answer equals the same chain of turns run alone on a pool of its own, whatever the
 * step's row budget: what else runs must not change what is kept.
 *
 * Usage: sim_sched [first_seed] [seeds]. A failure prints its seed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "engine/sched.h"
#include "kernels/cpu/cpu.h"

enum { LAYERS = 2, HEADS_Q = 4, HEADS_KV = 2, DIM = 16, VOCAB = 40, CHAINS = 24, TURNS = 3 };
enum { PROMPT_MAX = 160, ANSWER_MAX = 40, QKV = (HEADS_Q + 2 * HEADS_KV) * DIM };
enum { POSITIONS_MAX = TURNS * (PROMPT_MAX + ANSWER_MAX) };

/* ---- Random numbers ------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

struct random {
    uint64_t state;
};

static int below(struct random *r, int n) {
    r->state = mix(r->state);
    return (int)(r->state % (uint64_t)n);
}

/* ---- The fake model ------------------------------------------------------------------------- */

struct fake_model {
    struct kern *kern;
    float *qkv, *log_beta, *out, *logits;
    int rows_max, logits_max;
};

static float unit(uint64_t x) {
    return (float)(mix(x) >> 40) * 0x1p-24f;
}

static void fill_rows(struct fake_model *m, const struct kern_batch *batch, int layer) {
    for (int s = 0; s < batch->span_count; s++)
        for (int i = 0; i < batch->spans[s].count; i++) {
            int row = batch->spans[s].row + i, pos = batch->spans[s].pos + i;
            uint64_t key = ((uint64_t)batch->tokens[row] << 32) ^ (uint64_t)(pos * 64 + layer);
            for (int d = 0; d < QKV; d++)
                m->qkv[row * QKV + d] = 2 * unit(key * 977 + (uint64_t)d) - 1;
            for (int h = 0; h < HEADS_KV; h++) {
                float u = unit(key * 31 + (uint64_t)h + 7);
                m->log_beta[row * HEADS_KV + h] = -u * u * u * 0.2f - 1e-6f;
            }
        }
}

static int fake_step(void *model, const struct kern_batch *batch, const int32_t *want,
                     int want_count, const float **logits) {
    struct fake_model *m = model;
    const struct kern_ops *ops = m->kern->ops;
    struct kern_attend_options attend = {.scale = 1.0f};
    CHECK(batch->rows <= m->rows_max && want_count <= m->logits_max);
    int code = ops->begin_step(m->kern, batch);
    if (code != 0) return code;
    memset(m->logits, 0, (size_t)want_count * VOCAB * sizeof(float));
    for (int layer = 0; layer < LAYERS; layer++) {
        fill_rows(m, batch, layer);
        ops->write_kv(m->kern, layer, m->qkv, m->log_beta, batch);
        ops->attend(m->kern, layer, m->out, m->qkv, batch, &attend);
        for (int i = 0; i < want_count; i++)
            for (int v = 0; v < VOCAB; v++) {
                const float *out = m->out + (size_t)want[i] * HEADS_Q * DIM;
                float sum = 0;
                for (int d = 0; d < HEADS_Q * DIM; d++)
                    sum += out[d] * (2 * unit((uint64_t)(v * 4096 + d * 4 + layer)) - 1);
                m->logits[i * VOCAB + v] += 3 * sum;
            }
    }
    *logits = m->logits;
    return 0;
}

/* ---- One world: a backend, a pool, a scheduler ----------------------------------------------- */

struct world {
    struct fake_model model;
    struct sched sched;
};

static size_t letter(const void *arg, int32_t id, const char **bytes) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    (void)arg;
    if (id == 0) return 0; /* EOS */
    *bytes = letters + id;
    return 1;
}

static void world_open(struct world *w, int64_t pages, int sequences, int conversations, int rows) {
    static const int32_t eos[] = {0};
    struct fault fault = {0};
    struct cpu_options cpu = {.path = "reference", .threads = 1};
    *w = (struct world){0};
    CHECK_MSG(cpu_open(&cpu, &w->model.kern, &fault) == 0, "%s", fault.text);
    const struct kern_ops *ops = w->model.kern->ops;
    struct kern_cache_info info;
    ops->cache_info(KERN_F32, DIM, &info);
    struct kern_cache_options cache = {.layers = LAYERS,
                                       .heads_q = HEADS_Q,
                                       .heads_kv = HEADS_KV,
                                       .head_dim = DIM,
                                       .dtype = KERN_F32,
                                       .pages = pages,
                                       .slots = sequences + conversations,
                                       .max_positions = POSITIONS_MAX};
    CHECK_MSG(ops->cache_open(w->model.kern, &cache, &fault) == 0, "%s", fault.text);
    struct sched_options options = {
        .kv = {.defaults = {.policy = policy_find("global"),
                            .budget = 32,
                            .buffer = 8,
                            .chunk = 32,
                            .sinks = 2,
                            .horizon = 16},
               .has_gates = true},
        .kern = w->model.kern,
        .model = &w->model,
        .model_step = fake_step,
        .text = {.token_bytes = letter, .token_bytes_max = 1, .eos = eos, .eos_count = 1},
        .shape = {LAYERS, HEADS_KV, info.page_slots},
        .vocab = VOCAB,
        .pages_total = pages,
        .page_bytes = info.page_bytes,
        .sequences_max = sequences,
        .conversations_max = conversations,
        .rows_max = rows,
        .logits_max = sequences + 4,
    };
    w->model.rows_max = rows;
    w->model.logits_max = options.logits_max;
    w->model.qkv = mem_must_alloc((size_t)rows * QKV, sizeof(float));
    w->model.log_beta = mem_must_alloc((size_t)rows * HEADS_KV, sizeof(float));
    w->model.out = mem_must_alloc((size_t)rows * HEADS_Q * DIM, sizeof(float));
    w->model.logits = mem_must_alloc((size_t)options.logits_max * VOCAB, sizeof(float));
    sched_open(&w->sched, &options);
}

static void world_close(struct world *w) {
    struct kern_cache_stats stats;
    sched_close(&w->sched);
    w->model.kern->ops->cache_stats(w->model.kern, &stats);
    CHECK_MSG(stats.pages_used == 0, "%lld pages leaked", (long long)stats.pages_used);
    w->model.kern->ops->close(w->model.kern);
    mem_free(w->model.qkv);
    mem_free(w->model.log_beta);
    mem_free(w->model.out);
    mem_free(w->model.logits);
}

static void check_invariants(const struct world *w) {
    const struct sched *s = &w->sched;
    struct kern_cache_stats stats;
    struct fault fault = {0};
    w->model.kern->ops->cache_stats(w->model.kern, &stats);
    CHECK_MSG(w->model.kern->ops->cache_check(w->model.kern, &fault) == 0, "%s", fault.text);
    CHECK(s->counters.preemptions == 0);
    CHECK(stats.pages_used <= s->pages_reserved + s->conversations.pages);
    CHECK(s->pages_reserved + s->conversations.pages <= s->options.pages_total);
    if (s->running == 0) {
        CHECK(s->pages_reserved == 0);
        CHECK(stats.pages_used == s->conversations.pages);
    }
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* A chain is one user's conversation: each turn's prompt is the last prompt, the answer (perhaps
 * edited), and something new. */
struct chain {
    struct engine_kv kv;
    uint64_t seed;
    int turn;
    int32_t prompt[POSITIONS_MAX];
    int prompt_count;
    int max_tokens[TURNS], extra[TURNS], edit[TURNS], cancel_after[TURNS];
    float temperature;
    bool broken; /* a turn was cancelled: later turns start from nothing known */
    struct engine_job job;
    bool submitted, over;
    int32_t answers[TURNS][ANSWER_MAX];
    int answer_count[TURNS], cached[TURNS], dropped[TURNS];
    int64_t kept[TURNS];
    bool done[TURNS];
};

static void plan_chain(struct chain *c, struct random *r, int index) {
    static const char *const names[] = {"full", "streaming", "trimkv", "global", "global"};
    *c = (struct chain){.seed = mix(r->state + (uint64_t)index)};
    c->kv = (struct engine_kv){.policy = names[below(r, 5)],
                               .budget = 6 + below(r, 60),
                               .buffer = below(r, 20),
                               .chunk = 1 + below(r, 64),
                               .sinks = below(r, 4),
                               .recent = below(r, 3),
                               .horizon = NAN,
                               .reuse = true,
                               .retain = true};
    c->temperature = below(r, 2) ? 1.0f : 0.0f;
    for (int t = 0; t < TURNS; t++) {
        c->max_tokens[t] = 1 + below(r, ANSWER_MAX);
        c->extra[t] = 1 + below(r, t == 0 ? PROMPT_MAX : 30);
        c->edit[t] = below(r, 4) == 0 ? 1 + below(r, 8) : 0;
        c->cancel_after[t] = below(r, 6) == 0 ? below(r, 12) : -1;
    }
    c->prompt_count = 0;
}

static void extend_prompt(struct chain *c) {
    int t = c->turn;
    if (t > 0) {
        int keep = c->answer_count[t - 1] - c->edit[t];
        for (int i = 0; i < keep; i++) c->prompt[c->prompt_count++] = c->answers[t - 1][i];
    }
    for (int i = 0; i < c->extra[t]; i++)
        c->prompt[c->prompt_count++] =
            1 + (int32_t)(mix(c->seed + (uint64_t)(t * 1000 + i)) % (VOCAB - 1));
}

static void submit(struct world *w, struct chain *c, int index) {
    extend_prompt(c);
    int t = c->turn;
    struct engine_job *job = &c->job;
    memset(job, 0, sizeof *job);
    job->request = (struct engine_request){.prompt = c->prompt,
                                           .prompt_count = c->prompt_count,
                                           .max_tokens = c->max_tokens[t],
                                           .temperature = c->temperature,
                                           .top_p = 1,
                                           .repetition = 1,
                                           .seed = c->seed + (uint64_t)t,
                                           .top_logprobs = -1,
                                           .kv = c->kv};
    memcpy(job->request.space, &index, sizeof index);
    CHECK(seq_job_alloc(job, 1) == 0);
    sched_submit(&w->sched, job);
    c->submitted = true;
}

/* Collects a finished turn; true when the chain can go on. */
static void collect(struct chain *c) {
    struct engine_job *job = &c->job;
    int t = c->turn, finish = atomic_load(&job->choice[0].finish);
    CHECK_MSG(finish != ENGINE_FINISH_ERROR, "%s", job->fault.text);
    c->answer_count[t] = (int)atomic_load(&job->choice[0].token_count);
    for (int i = 0; i < c->answer_count[t]; i++) c->answers[t][i] = job->choice[0].tokens[i].token;
    c->cached[t] = job->cached_tokens;
    c->dropped[t] = job->kv.dropped_tokens;
    c->kept[t] = job->kv.kept_entries;
    c->done[t] = finish == ENGINE_FINISH_STOP || finish == ENGINE_FINISH_LENGTH;
    if (!c->done[t]) c->over = true;
    engine_job_close(job);
    c->submitted = false;
    c->turn++;
    if (c->turn == TURNS) c->over = true;
}

static void step_world(struct world *w) {
    bool failed = false;
    sched_step(&w->sched, &failed);
    CHECK(!failed);
    sched_publish_finished(&w->sched);
    check_invariants(w);
}

/* ---- The storm, then each chain alone ---------------------------------------------------------
 */

static void storm(struct chain *chains, uint64_t seed) {
    struct random r = {mix(seed)};
    struct world w;
    int64_t streams = LAYERS * HEADS_KV;
    world_open(&w, streams * (8 + below(&r, 60)), 2 + below(&r, 6), 1 + below(&r, CHAINS),
               10 + below(&r, 60));
    for (int i = 0; i < CHAINS; i++) {
        plan_chain(&chains[i], &r, i);
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
            if (c->over) continue;
            if (!c->submitted) {
                if (below(&r, 8) == 0) submit(&w, c, i);
            } else if (atomic_load(&c->job.choice[0].finish) != ENGINE_RUNNING) {
                collect(c);
            } else if (c->cancel_after[c->turn] >= 0 && below(&r, 10) == 0 &&
                       (int)atomic_load(&c->job.choice[0].token_count) >=
                           c->cancel_after[c->turn]) {
                atomic_store(&c->job.cancel, 1);
            }
        }
        step_world(&w);
    }
    CHECK(sched_idle(&w.sched) && w.sched.pages_reserved == 0);
    world_close(&w);
}

static void replay_alone(const struct chain *seen, int index, uint64_t seed) {
    struct world w;
    struct chain *c = mem_must_alloc(1, sizeof *c);
    world_open(&w, 4000, 1, 2, 3 + (int)(seed % 200));
    *c = *seen;
    c->turn = c->prompt_count = 0;
    c->submitted = c->over = false;
    for (int t = 0; t < TURNS && seen->done[t]; t++) {
        submit(&w, c, index);
        for (int step = 0; atomic_load(&c->job.choice[0].finish) == ENGINE_RUNNING; step++) {
            CHECK(step < 10000);
            step_world(&w);
        }
        collect(c);
        /* Forgotten under pressure in the storm: a different starting state from here on. */
        if (c->cached[t] != seen->cached[t]) break;
        CHECK_MSG(c->answer_count[t] == seen->answer_count[t] &&
                      memcmp(c->answers[t], seen->answers[t],
                             (size_t)c->answer_count[t] * sizeof(int32_t)) == 0,
                  "seed %llu chain %d turn %d (%s): another answer than alone",
                  (unsigned long long)seed, index, t, seen->kv.policy);
        CHECK(c->kept[t] == seen->kept[t] && c->dropped[t] == seen->dropped[t]);
    }
    world_close(&w);
    mem_free(c);
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : 40;
    struct chain *chains = mem_must_alloc(CHAINS, sizeof *chains);
    long turns = 0, continued = 0, cancelled = 0;
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
        storm(chains, seed);
        for (int i = 0; i < CHAINS; i++) {
            replay_alone(&chains[i], i, seed);
            for (int t = 0; t < TURNS; t++) {
                turns += chains[i].done[t];
                continued += chains[i].done[t] && chains[i].cached[t] > 0;
                cancelled += t < chains[i].turn && !chains[i].done[t];
            }
        }
    }
    mem_free(chains);
    printf("%llu seeds: %ld turns, %ld continued, %ld cancelled\n", (unsigned long long)seeds,
           turns, continued, cancelled);
    CHECK(turns > 0 && continued > 0 && cancelled > 0); /* the storm tested what it is for */
    return 0;
}
