/* Seeded simulation of the paged cache under a scheduler that admits by reservation.
 *
 * Random requests with random kv parameters run side by side on a pool that is too small for all:
 * prompts split at random over steps, generation, cancels, conversations retained and continued
 * with some tokens dropped, forks. After every step:
 *   - every page is in exactly one place (cpu_cache_check) and no step ever lacked a page;
 *   - no sequence exceeds its reservation, in entries or pages, nor all together the pool;
 *   - a sequence holds as many entries as due_entries says (no more, once it has dropped tokens or
 *     where layers have sliding windows; with `full` no more where these differ in length);
 *   - every entry still is what was written at its position.
 * A turn that ends is replayed alone in a second cache, in whole chunks: it must hold exactly the
 * same positions, so neither neighbours nor splits nor shared pages have changed what is kept.
 *
 * sim_pages [FIRST [COUNT]]: the seeds; a failure prints its seed and step. */
#include <stdio.h>
#include <stdlib.h>

#include "base/err.h"
#include "paging/due.h"
#include "tests/sim/expect.h"

enum { SLOTS = 8, POSITIONS = 320, TURNS = 12, STREAMS = 9, STEPS = 220 };

/* The history of a sequence, enough to replay it alone. */
struct turn {
    bool is_fork;       /* continues generating where the previous turn stopped */
    int32_t first;      /* entries at or after this position are dropped first */
    int32_t prompt_new; /* then this many are appended */
    int32_t generated;  /* then these */
    uint32_t salt;      /* salt of everything written in this turn */
};

struct sequence {
    enum { FREE, RUNNING, RETAINED } state;
    struct kv_params kv;
    struct due_state due;
    bool exact;         /* held is exact, not only a bound */
    int32_t evicted_at; /* tokens at the last eviction before the end; 0: none */
    int32_t prompt_end; /* tokens before it may not be dropped */
    int32_t max_new;
    int64_t peak, pages; /* reserved on admission; for a retained one: pages it holds */
    struct turn turns[TURNS];
    int turn_count;
    uint32_t salts[POSITIONS]; /* the salt of the writer of each position */
};

struct counts {
    long steps, turns, evictions, continued, dropped, forks, cancels, waits;
};

struct sim {
    uint64_t seed, random;
    int step;
    struct cpu_cache cache, lone;
    struct reserve_shape shape;
    int sliding_window; /* the longest of the layers */
    bool equal_windows;
    struct sequence sequences[SLOTS];
    struct counts *counts;
};

static void print_where(const struct sim *sim) {
    fprintf(stderr, "step %d", sim->step);
}

static int32_t pick(struct sim *sim, int32_t low, int32_t high) {
    return pick_from(&sim->random, low, high);
}

/* ---- Playing one sequence ---- */

static struct turn *last_turn(struct sequence *seq) {
    return &seq->turns[seq->turn_count - 1];
}

static bool in_prompt(const struct sequence *seq) {
    return seq->due.prompt_done < seq->due.prompt_new;
}

static struct kern_evict evict_of(const struct sequence *seq, int slot) {
    return (struct kern_evict){.slot = slot,
                               .tokens = seq->due.tokens,
                               .budget = due_budget(&seq->kv, &seq->due),
                               .rule = &seq->kv.rule};
}

static void evicted(struct sequence *seq) {
    seq->evicted_at = seq->due.tokens;
    due_evicted(&seq->kv, &seq->due);
}

/* Is `held` exact for a new sequence? */
static bool starts_exact(const struct sim *sim, const struct kv_params *kv) {
    return sim->shape.sliding_layers == 0 || (kv_params_expires(kv) && sim->equal_windows);
}

static void evict(struct sim *sim, struct cpu_cache *cache, struct sequence *seq, int slot) {
    struct kern_evict due = evict_of(seq, slot);
    int rc = cpu_cache_evict(cache, &due, 1);
    EXPECT(sim, rc == 0, "%s", err_name(rc));
    evicted(seq);
}

static void appended(struct cpu_cache *cache, struct sequence *seq, int slot, int32_t count) {
    uint32_t salt = last_turn(seq)->salt;
    content_write(cache, slot, salt, count);
    for (int32_t i = 0; i < count; i++) seq->salts[seq->due.tokens + i] = salt;
    due_append(&seq->due, count);
}

/* Starts a turn: drops entries from position `first` on and sets the bookkeeping as the engine
 * does, from a report. */
static void begin_turn(struct sim *sim, struct cpu_cache *cache, struct sequence *seq, int slot,
                       int32_t first, int32_t prompt_new) {
    struct kern_report report = {0};
    int32_t streams = cache->streams;
    bool drops = first < seq->due.tokens;
    if (drops) EXPECT(sim, cpu_cache_truncate(cache, slot, first) == 0, "truncate");
    EXPECT(sim, cpu_cache_report(cache, slot, &report) == 0, "report");
    int64_t entries = due_entries(&sim->shape, &seq->kv, &seq->due);
    EXPECT(sim, drops || !seq->exact || report.entries == (size_t)entries, "%zu entries",
           report.entries);
    seq->exact = seq->exact && (!drops || kv_params_expires(&seq->kv));
    if (seq->evicted_at > first) seq->evicted_at = first;
    int32_t average = ((int32_t)report.entries + streams - 1) / streams;
    seq->due = (struct due_state){.tokens = first,
                                  .held = due_held_at(&seq->kv, average, first, seq->evicted_at),
                                  .prompt_new = prompt_new};
}

/* ---- Replay ---- */

static void lone_append(struct sim *sim, struct sequence *seq, int32_t count) {
    struct kern_span span = {.slot = 0, .count = count, .pos = seq->due.tokens};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    int rc = cpu_cache_begin_step(&sim->lone, &batch);
    EXPECT(sim, rc == 0, "alone: %s", err_name(rc));
    appended(&sim->lone, seq, 0, count);
}

static void lone_turn(struct sim *sim, struct sequence *seq, const struct turn *turn) {
    seq->turns[seq->turn_count++] = *turn;
    if (!turn->is_fork) begin_turn(sim, &sim->lone, seq, 0, turn->first, turn->prompt_new);
    while (in_prompt(seq)) {
        lone_append(sim, seq, due_prompt_limit(&seq->kv, &seq->due));
        if (due_after_append(&seq->kv, &seq->due)) evict(sim, &sim->lone, seq, 0);
    }
    for (int32_t i = 0; i < turn->generated; i++) {
        if (due_before_generate(&seq->kv, &seq->due)) evict(sim, &sim->lone, seq, 0);
        lone_append(sim, seq, 1);
    }
}

static size_t read_positions(struct sim *sim, const struct cpu_cache *cache, int slot,
                             int32_t *lengths, int32_t *positions) {
    struct kern_report report = {
        .lengths = lengths, .positions = positions, .entries_max = STREAMS * POSITIONS};
    EXPECT(sim, cpu_cache_report(cache, slot, &report) == 0, "report");
    return report.entries;
}

static void replay(struct sim *sim, const struct sequence *seq, int slot) {
    static int32_t lengths[2][STREAMS], positions[2][STREAMS * POSITIONS];
    static struct sequence alone;
    memset(&alone, 0, sizeof alone);
    alone.kv = seq->kv;
    alone.exact = starts_exact(sim, &seq->kv);
    for (int i = 0; i < seq->turn_count; i++) lone_turn(sim, &alone, &seq->turns[i]);
    size_t count = read_positions(sim, &sim->cache, slot, lengths[0], positions[0]);
    size_t other = read_positions(sim, &sim->lone, 0, lengths[1], positions[1]);
    size_t streams = (size_t)sim->cache.streams;
    EXPECT(sim, count == other && alone.due.held == seq->due.held, "%zu entries, alone %zu", count,
           other);
    EXPECT(sim, memcmp(lengths[0], lengths[1], streams * sizeof(int32_t)) == 0, "lengths");
    EXPECT(sim, memcmp(positions[0], positions[1], count * sizeof(int32_t)) == 0, "positions");
    cpu_cache_release(&sim->lone, 0);
}

/* ---- Admission ---- */

static int64_t promised(const struct sim *sim) {
    int64_t pages = 0;
    for (int i = 0; i < SLOTS; i++)
        if (sim->sequences[i].state != FREE) pages += sim->sequences[i].pages;
    return pages;
}

static int free_slot(const struct sim *sim) {
    for (int i = 0; i < SLOTS; i++)
        if (sim->sequences[i].state == FREE) return i;
    return -1;
}

/* A random sequence in this state, or -1. */
static int any(struct sim *sim, int state) {
    int first = pick(sim, 0, SLOTS - 1);
    for (int i = 0; i < SLOTS; i++)
        if ((int)sim->sequences[(first + i) % SLOTS].state == state) return (first + i) % SLOTS;
    return -1;
}

static void release(struct sim *sim, int slot) {
    cpu_cache_release(&sim->cache, slot);
    sim->sequences[slot] = (struct sequence){0};
}

/* Reserves pages for a turn that begins with `held` and `tokens`, or returns false if it must wait.
 * `own`: pages counted already. */
static bool reserve(struct sim *sim, struct sequence *seq, int64_t held, int32_t tokens,
                    int32_t prompt_new, int32_t max_new, int64_t own) {
    const struct reserve_turn turn = {
        .held = held, .tokens = tokens, .added = prompt_new + (int64_t)max_new};
    int64_t peak = reserve_peak(&seq->kv, held, prompt_new, max_new);
    int64_t pages = reserve_turn_pages(&sim->shape, &seq->kv, &turn, peak);
    if (promised(sim) - own + pages > sim->cache.options.pages) {
        sim->counts->waits++;
        return false;
    }
    seq->peak = peak;
    seq->pages = pages;
    seq->max_new = max_new;
    seq->state = RUNNING;
    return true;
}

static void add_turn(struct sim *sim, struct sequence *seq, bool is_fork, int32_t first,
                     int32_t prompt_new) {
    seq->turns[seq->turn_count++] = (struct turn){.is_fork = is_fork,
                                                  .first = first,
                                                  .prompt_new = prompt_new,
                                                  .salt = (uint32_t)pick(sim, 0, INT32_MAX - 1)};
}

static struct kv_params random_params(struct sim *sim) {
    static const float horizons[] = {1, 2, 128, INFINITY};
    static const char *const names[] = {"full",   "streaming", "trimkv",
                                        "global", "global",    "global"};
    struct kv_params kv = {.budget = pick(sim, 1, 24),
                           .buffer = pick(sim, 0, 8),
                           .chunk = pick(sim, 1, 16),
                           .sliding_window = sim->sliding_window};
    kv_params_set_policy(&kv, policy_find(names[pick(sim, 0, 5)]));
    kv.rule.sinks = pick(sim, 0, kv.budget < 4 ? kv.budget : 4);
    int32_t rest = kv.budget - kv.rule.sinks;
    kv.rule.recent = pick(sim, 0, rest < 4 ? rest : 4);
    if (kv.policy->fields & POLICY_HORIZON) kv.rule.horizon = horizons[pick(sim, 0, 3)];
    struct fault fault = {0};
    EXPECT(sim, kv_params_check(&kv, &fault) == 0, "%s", fault.text);
    return kv;
}

static void submit(struct sim *sim) {
    int slot = free_slot(sim);
    if (slot < 0) return;
    struct sequence *seq = &sim->sequences[slot];
    *seq = (struct sequence){.kv = random_params(sim)};
    seq->exact = starts_exact(sim, &seq->kv);
    int32_t prompt_new = pick(sim, 1, 40), max_new = pick(sim, 0, 30);
    if (!reserve(sim, seq, 0, 0, prompt_new, max_new, 0)) return;
    add_turn(sim, seq, false, 0, prompt_new);
    seq->due.prompt_new = seq->prompt_end = prompt_new;
}

static void continue_turn(struct sim *sim, int slot) {
    struct sequence *seq = &sim->sequences[slot];
    int32_t first = pick(sim, seq->prompt_end, seq->due.tokens);
    int32_t prompt_new = pick(sim, 1, 30), max_new = pick(sim, 0, 20);
    if (pick(sim, 0, 2) > 0) first = seq->due.tokens;
    /* Entries that had left a window are gone: such a conversation is not continued there. */
    if (kv_params_expires(&seq->kv) && first < seq->evicted_at) first = seq->due.tokens;
    if (seq->turn_count == TURNS || first + prompt_new + max_new > POSITIONS) return;
    int32_t held = due_held_at(&seq->kv, seq->due.held, first,
                               seq->evicted_at < first ? seq->evicted_at : first);
    if (!reserve(sim, seq, held, first, prompt_new, max_new, seq->pages)) return;
    sim->counts->continued++;
    sim->counts->dropped += first < seq->due.tokens;
    add_turn(sim, seq, false, first, prompt_new);
    begin_turn(sim, &sim->cache, seq, slot, first, prompt_new);
    seq->prompt_end = first + prompt_new;
}

/* Copies a retained conversation, or a sequence that generates, which goes on in two ways. */
static void fork_from(struct sim *sim, int from) {
    int to = free_slot(sim);
    struct sequence *seq = &sim->sequences[from];
    if (to < 0 || in_prompt(seq) || seq->turn_count == TURNS) return;
    struct sequence *copy = &sim->sequences[to];
    *copy = *seq;
    copy->state = FREE;
    int32_t rest = seq->state == RUNNING ? seq->max_new - last_turn(seq)->generated : 0;
    bool fits = reserve(sim, copy, seq->due.held, seq->due.tokens, 0, rest, 0);
    if (!fits) {
        *copy = (struct sequence){0};
        return;
    }
    EXPECT(sim, cpu_cache_fork(&sim->cache, from, to) == 0, "fork");
    sim->counts->forks++;
    copy->state = seq->state;
    add_turn(sim, copy, true, 0, 0);
}

/* ---- A step ---- */

static void end_turn(struct sim *sim, int slot) {
    struct sequence *seq = &sim->sequences[slot];
    struct kern_report report = {0};
    replay(sim, seq, slot);
    sim->counts->turns++;
    if (pick(sim, 0, 3) == 0) {
        release(sim, slot);
        return;
    }
    EXPECT(sim, cpu_cache_report(&sim->cache, slot, &report) == 0, "report");
    seq->state = RETAINED;
    seq->pages = report.pages;
}

static void leave(struct sim *sim) {
    for (int slot = 0; slot < SLOTS; slot++) {
        struct sequence *seq = &sim->sequences[slot];
        if (seq->state != RUNNING) continue;
        bool ends =
            !in_prompt(seq) && (last_turn(seq)->generated == seq->max_new || pick(sim, 0, 30) == 0);
        if (ends) {
            end_turn(sim, slot);
        } else if (pick(sim, 0, 60) == 0) {
            sim->counts->cancels++;
            release(sim, slot);
        }
    }
}

static void arrive(struct sim *sim) {
    int slot;
    switch (pick(sim, 0, 5)) {
    case 0:
    case 1:
        submit(sim);
        break;
    case 2:
        if ((slot = any(sim, RETAINED)) >= 0) continue_turn(sim, slot);
        break;
    case 3:
        if ((slot = any(sim, pick(sim, RUNNING, RETAINED))) >= 0) fork_from(sim, slot);
        break;
    case 4:
        if ((slot = any(sim, RETAINED)) >= 0 && pick(sim, 0, 1)) release(sim, slot);
        break;
    default:
        break;
    }
}

/* Evicts all sequences for which `is_due` returns true, in one call, as the engine does. */
static void evict_where(struct sim *sim,
                        bool (*is_due)(const struct kv_params *, const struct due_state *)) {
    struct kern_evict due[SLOTS];
    int who[SLOTS], count = 0;
    for (int slot = 0; slot < SLOTS; slot++) {
        struct sequence *seq = &sim->sequences[slot];
        if (seq->state != RUNNING || !is_due(&seq->kv, &seq->due)) continue;
        due[count] = evict_of(seq, slot);
        who[count++] = slot;
    }
    int rc = cpu_cache_evict(&sim->cache, due, count);
    EXPECT(sim, rc == 0, "%s", err_name(rc));
    for (int i = 0; i < count; i++) evicted(&sim->sequences[who[i]]);
    sim->counts->evictions += count;
}

static bool is_due_to_generate(const struct kv_params *kv, const struct due_state *state) {
    return state->prompt_done >= state->prompt_new && due_before_generate(kv, state);
}

static int32_t rows_for(struct sim *sim, const struct sequence *seq) {
    if (!in_prompt(seq)) return 1;
    int32_t room = due_prompt_limit(&seq->kv, &seq->due);
    if (room > 40) room = 40;
    return pick(sim, 0, 3) == 0 ? room : pick(sim, 0, room);
}

static void run(struct sim *sim) {
    struct kern_span spans[SLOTS];
    struct kern_batch batch = {.spans = spans};
    evict_where(sim, is_due_to_generate);
    for (int slot = 0; slot < SLOTS; slot++) {
        struct sequence *seq = &sim->sequences[slot];
        int32_t count = seq->state == RUNNING ? rows_for(sim, seq) : 0;
        if (count == 0) continue;
        spans[batch.span_count++] = (struct kern_span){
            .slot = slot, .row = batch.rows, .count = count, .pos = seq->due.tokens};
        batch.rows += count;
    }
    int64_t used = sim->cache.options.pages - sim->cache.free_count;
    int rc = cpu_cache_begin_step(&sim->cache, &batch);
    EXPECT(sim, rc == 0, "%s with %lld pages used", err_name(rc), (long long)used);
    for (int i = 0; i < batch.span_count; i++) {
        struct sequence *seq = &sim->sequences[spans[i].slot];
        if (!in_prompt(seq)) last_turn(seq)->generated++;
        appended(&sim->cache, seq, spans[i].slot, spans[i].count);
    }
    evict_where(sim, due_after_append);
}

/* ---- Invariants ---- */

static void check_sequence(struct sim *sim, int slot) {
    const struct sequence *seq = &sim->sequences[slot];
    const struct cpu_cache *cache = &sim->cache;
    struct kern_report report = {0};
    EXPECT(sim, cpu_cache_report(cache, slot, &report) == 0, "report");
    size_t bound = (size_t)due_entries(&sim->shape, &seq->kv, &seq->due);
    EXPECT(sim, seq->exact ? report.entries == bound : report.entries <= bound,
           "slot %d: %zu entries, held %d", slot, report.entries, seq->due.held);
    EXPECT(sim, report.pages <= seq->pages, "slot %d: %lld pages of %lld", slot,
           (long long)report.pages, (long long)seq->pages);
    EXPECT(sim, seq->state != RUNNING || seq->due.held <= seq->peak, "slot %d: held %d, peak %lld",
           slot, seq->due.held, (long long)seq->peak);
    for (int stream = 0; stream < cache->streams; stream++) {
        const struct cpu_stream view = cpu_cache_stream_at(cache, slot, stream);
        for (int32_t i = 0; i < view.length; i++) {
            int32_t pos = cpu_cache_entry_pos(cache, &view, i);
            EXPECT(sim, content_holds(cache, slot, stream, i, seq->salts[pos]),
                   "slot %d stream %d position %d", slot, stream, pos);
        }
    }
}

static void check(struct sim *sim) {
    struct fault fault = {0};
    struct kern_cache_stats stats;
    EXPECT(sim, cpu_cache_check(&sim->cache, &fault) == 0, "%s", fault.text);
    cpu_cache_stats(&sim->cache, &stats);
    EXPECT(sim, stats.pages_used <= promised(sim), "%lld used, %lld promised",
           (long long)stats.pages_used, (long long)promised(sim));
    EXPECT(sim, promised(sim) <= sim->cache.options.pages, "promised too much");
    for (int slot = 0; slot < SLOTS; slot++)
        if (sim->sequences[slot].state != FREE) check_sequence(sim, slot);
}

/* ---- Seeds ---- */

static struct kern_heads pick_heads(struct sim *sim) {
    static const int dims[] = {64, 128, 256, 512};
    return (struct kern_heads){pick(sim, 1, 3), dims[pick(sim, 0, 3)]};
}

static int slots_of(const struct kern_cache_options *options, struct kern_heads heads) {
    const struct kern_cache_options layer = {.dtype = options->dtype, .head_dim = heads.dim};
    struct kern_cache_info info;
    cpu_cache_info(&layer, &info);
    return info.page_slots;
}

static int larger(int a, int b) {
    return a > b ? a : b;
}

/* Layers `first`, first + 2, ... have a sliding window, and perhaps heads of their own. */
static void open_caches(struct sim *sim) {
    static const enum kern_dtype dtypes[] = {KERN_F32, KERN_BF16, KERN_E4M3, KERN_ROW8, KERN_ROW4};
    const bool windows = pick(sim, 0, 1), differ = windows && pick(sim, 0, 1);
    const int first = pick(sim, 0, 1);
    struct kern_heads heads[3], full = pick_heads(sim), sliding = differ ? pick_heads(sim) : full;
    for (int i = 0; i < 3; i++) heads[i] = i >= first && (i - first) % 2 == 0 ? sliding : full;
    struct kern_cache_options options = {.layers = pick(sim, 1, 3),
                                         .heads_q = 3,
                                         .heads_kv = larger(full.kv, sliding.kv),
                                         .head_dim = larger(full.dim, sliding.dim),
                                         .heads = differ ? heads : NULL,
                                         .dtype = dtypes[pick(sim, 0, 4)],
                                         .slots = SLOTS,
                                         .max_positions = POSITIONS};
    struct kern_cache_info info;
    cpu_cache_info(&options, &info);
    sim->shape = (struct reserve_shape){.layers = options.layers,
                                        .heads_kv = full.kv,
                                        .page_slots = slots_of(&options, full),
                                        .sliding_heads_kv = sliding.kv,
                                        .sliding_page_slots = slots_of(&options, sliding),
                                        .member_slots = info.member_slots};
    int64_t streams = kern_streams(&options);
    options.pages = streams * (2 + pick(sim, 70, 220) / info.page_slots_least);
    struct fault fault = {0};
    EXPECT(sim, cpu_cache_open(&sim->cache, &options, 1, &fault) == 0, "%s", fault.text);
    options.pages = streams * POSITIONS;
    EXPECT(sim, cpu_cache_open(&sim->lone, &options, 1, &fault) == 0, "%s", fault.text);
    if (!windows) return;
    sim->equal_windows = pick(sim, 0, 1);
    for (int layer = first; layer < options.layers; layer += 2) {
        int visible =
            sim->equal_windows && sim->sliding_window ? sim->sliding_window : pick(sim, 1, 90);
        if (visible > sim->sliding_window) sim->sliding_window = visible;
        sim->shape.sliding_layers++;
        sim->cache.attended[layer].sliding_window = sim->lone.attended[layer].sliding_window =
            visible;
    }
}

static void simulate(uint64_t seed, struct counts *counts) {
    static struct sim sim;
    memset(&sim, 0, sizeof sim);
    sim.seed = sim.random = seed;
    sim.counts = counts;
    open_caches(&sim);
    for (sim.step = 0; sim.step < STEPS; sim.step++) {
        leave(&sim);
        arrive(&sim);
        run(&sim);
        check(&sim);
    }
    for (int slot = 0; slot < SLOTS; slot++) release(&sim, slot);
    check(&sim);
    EXPECT(&sim, sim.cache.free_count == sim.cache.options.pages, "pages are missing at the end");
    counts->steps += STEPS;
    cpu_cache_close(&sim.cache);
    cpu_cache_close(&sim.lone);
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : argc > 1 ? 1 : 256;
    struct counts counts = {0};
    for (uint64_t seed = first; seed - first < count; seed++) simulate(seed, &counts);
    printf("%llu seeds, %ld steps, %ld turns, %ld evictions, %ld continued (%ld dropping), "
           "%ld forks, %ld cancels, %ld waits\n",
           (unsigned long long)count, counts.steps, counts.turns, counts.evictions,
           counts.continued, counts.dropped, counts.forks, counts.cancels, counts.waits);
    /* Fails if a kind of event never happened, because then it was not tested. */
    bool all = counts.turns && counts.evictions && counts.continued && counts.dropped &&
               counts.forks && counts.cancels && counts.waits;
    return count < 50 || all ? 0 : 1;
}
