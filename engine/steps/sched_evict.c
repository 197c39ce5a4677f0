/* Evictions and shifts: which sequences have theirs in a step, and what they pay for them.
 *
 * An eviction can cost as much as thousands of tokens, and all who run wait for it. So each step
 * has room for options.rows_max rows of it (paging/policy.h), or one eviction that costs more. And
 * while several clients run, each may spend SCHED_EVICT_ROWS rows a step for each of its sequences:
 * what goes beyond is paid by steps in which the client's sequences that are due sit out. A
 * sequence that may not evict gets no rows that would need it; so it evicts later in time, never at
 * another token, and its results stay what they are alone. Those that wait longest go first. */
#include "base/check.h"
#include "base/clock.h"
#include "engine/steps/sched_int.h"
#include "engine/steps/trace.h"

static int64_t eviction_rows(const struct sched *sched, const struct sequence *seq, int64_t held) {
    return kv_eviction_rows(&seq->kv, held, sched->options.row_entries);
}

bool sched_wants_shift(const struct sequence *seq) {
    return !seq->leader && due_shift(&seq->kv, &seq->due);
}

static void charge_rows(struct sched *sched, const struct sequence *seq, int64_t rows) {
    queue_charge(&sched->queue, seq->job, rows);
    queue_client_of(&sched->queue, seq->job)->evict_rows += rows;
}

/* Sequences that the backend evicts in one call. */
enum { EVICTIONS_MAX = 64 };
struct evictions {
    struct kern_evict of[EVICTIONS_MAX];
    struct sequence *sequences[EVICTIONS_MAX];
    int count;
};

static void add_eviction(struct sched *sched, struct evictions *all, struct sequence *seq) {
    all->sequences[all->count] = seq;
    all->of[all->count++] = (struct kern_evict){.slot = seq->slot,
                                                .tokens = seq->due.tokens,
                                                .budget = due_budget(&seq->kv, &seq->due),
                                                .rule = &seq->kv.rule,
                                                .trace = trace_begin(seq, &sched->options.shape)};
}

static int run_evictions(struct sched *sched, struct evictions *all) {
    struct kern *kern = sched->options.kern;
    if (all->count == 0) return 0;
    int64_t start = clock_ns();
    int rc = kern->ops->evict(kern, all->of, all->count);
    if (rc == 0) rc = kern->ops->sync(kern);
    int64_t spent = clock_ns() - start;
    if (rc != 0) return rc;
    hist_add(&sched->counters.eviction_seconds, (double)spent * 1e-9);
    sched->counters.evictions += (uint64_t)all->count;
    for (int i = 0; i < all->count; i++) {
        struct sequence *seq = all->sequences[i];
        CHECK(seq->may_evict);
        trace_end(seq);
        charge_rows(sched, seq, eviction_rows(sched, seq, seq->due.held));
        seq_evicted(seq);
        seq->job->evict_ns += spent / all->count;
    }
    all->count = 0;
    return 0;
}

/* Evicts the sequences for which `is_due` holds, in running order. */
static int evict_where(struct sched *sched, bool (*is_due)(const struct sequence *)) {
    struct evictions all;
    int rc = 0;
    all.count = 0;
    for (int i = 0; i < sched->running && rc == 0; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (!is_due(seq)) continue;
        sched_add_checkpoint(sched, seq);
        add_eviction(sched, &all, seq);
        if (all.count == EVICTIONS_MAX) rc = run_evictions(sched, &all);
    }
    return rc == 0 ? run_evictions(sched, &all) : rc;
}

/* Shifts the sequences whose next token has no position, after the evictions due before it. */
static int shift_due(struct sched *sched) {
    struct kern *kern = sched->options.kern;
    int rc = 0;
    for (int i = 0; i < sched->running && rc == 0; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (!seq->may_evict || !sched_wants_shift(seq)) continue;
        const struct kern_shift shift = {.slot = seq->slot,
                                         .rule = &seq->kv.rule,
                                         .tokens = seq->due.tokens,
                                         .from = seq->due.shifts,
                                         .to = due_shifts(&seq->kv, seq->due.tokens)};
        sched_add_checkpoint(sched, seq);
        rc = kern->ops->shift(kern, &shift);
        due_shifted(&seq->kv, &seq->due);
        seq->changed = true;
        charge_rows(sched, seq, kv_shift_rows(seq->due.held, sched->options.row_entries));
        sched->counters.shifts++;
    }
    return rc;
}

int32_t sched_rows_to_eviction(const struct sequence *seq) {
    const int32_t limit = due_prompt_limit(&seq->kv, &seq->due);
    const struct sched_together parted = sched_parted_at(seq, seq->due.tokens + limit);
    return parted.end ? parted.end - seq->due.tokens : limit;
}

int64_t sched_held_if_due(const struct sequence *seq) {
    struct due_state state = seq->due;
    if (seq->leader) return 0;
    if (seq_generating(seq)) return due_before_generate(&seq->kv, &state) ? state.held : 0;
    due_append(&state, sched_rows_to_eviction(seq));
    return due_after_append(&seq->kv, &state) ? state.held : 0;
}

/* Returns the rows of the eviction and of the shift that can come in this step; 0: neither can. */
static int64_t rows_if_due(const struct sched *sched, const struct sequence *seq) {
    int64_t held = sched_held_if_due(seq), rows = held > 0 ? eviction_rows(sched, seq, held) : 0;
    if (sched_wants_shift(seq)) rows += kv_shift_rows(seq->due.held, sched->options.row_entries);
    return rows;
}

/* Returns whether the sequence can run without evicting: it has prompt rows before its next
 * eviction. */
static bool can_defer_eviction(const struct sequence *seq) {
    if (!seq_prefilling(seq) || sched_wants_shift(seq)) return false;
    const int32_t end = seq->due.tokens + due_prompt_limit(&seq->kv, &seq->due) - 1;
    const struct sched_together parted = sched_parted_at(seq, end);
    return (parted.end ? parted.first : end) > seq->due.tokens;
}

static bool is_paid(const struct sched *sched, const struct sequence *seq) {
    const struct queue_client *client = queue_client_of(&sched->queue, seq->job);
    return client->running == sched->running ||
           client->evict_rows < (int64_t)SCHED_EVICT_ROWS * client->running;
}

void sched_pay_evictions(struct sched *sched) {
    for (int i = 0; i < sched->running; i++) {
        const struct sequence *seq = &sched->sequences[sched->order[i]];
        struct queue_client *client = queue_client_of(&sched->queue, seq->job);
        client->evict_rows -= SCHED_EVICT_ROWS;
        if (client->evict_rows < 0 || client->running == sched->running) client->evict_rows = 0;
    }
}

bool sched_first_waits(const struct sched *sched, const struct sequence *leader) {
    bool waits = seq_waits(leader);
    for (int i = 0; i < sched->running && !waits; i++) {
        const struct sequence *seq = &sched->sequences[sched->order[i]];
        waits = seq->leader == leader && seq_waits(seq);
    }
    return waits;
}

/* Returns whether the sequence gets no row before a mask is made. */
static bool waits_for_mask(const struct sched *sched, const struct sequence *seq) {
    if (!seq_prefilling(seq)) return seq_generating(seq) && seq_waits(seq);
    return seq->prompt_count - seq->due.tokens == 1 && sched_first_waits(sched, seq);
}

/* Sorts the running sequences that may be due in this step, the one that has waited longest first,
 * and returns how many they are. *others is set if some other sequence has work. */
static int find_due(struct sched *sched, bool *others) {
    uint64_t now = sched->counters.steps + 1;
    int count = 0;
    *others = false;
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        bool is_due = rows_if_due(sched, seq) > 0;
        seq->may_evict = false;
        if (seq->sits_out || waits_for_mask(sched, seq)) continue;
        *others = *others || (!seq->leader && (!is_due || can_defer_eviction(seq)));
        if (!is_due) continue;
        if (seq->due_since == 0) seq->due_since = now;
        sched_sort_in(sched, count++, seq, (int64_t)seq->due_since);
    }
    return count;
}

/* Grants evictions for this step. At least one sequence can always run: if no other, the first due
 * one. */
static void plan_evictions(struct sched *sched) {
    bool others;
    int count = find_due(sched, &others);
    int64_t left = sched->options.rows_max;
    for (int i = 0; i < count; i++) {
        struct sequence *seq = sched->sorted[i];
        int64_t rows = rows_if_due(sched, seq);
        bool fits = rows <= left || left == sched->options.rows_max;
        bool is_needed = !others && i == 0;
        if (!is_needed && (!fits || !is_paid(sched, seq))) continue;
        left -= rows;
        seq->may_evict = true;
        seq->due_since = 0;
    }
}

static bool due_to_generate(const struct sequence *seq) {
    return seq->may_evict && seq_generating(seq) && due_before_generate(&seq->kv, &seq->due);
}

static bool due_in_prompt(const struct sequence *seq) {
    return due_after_append(&seq->kv, &seq->due);
}

int sched_evict_before_rows(struct sched *sched) {
    plan_evictions(sched);
    int rc = evict_where(sched, due_to_generate);
    return rc == 0 ? shift_due(sched) : rc;
}

bool sched_evicts_after_rows(const struct sched *sched) {
    bool due = false;
    for (int i = 0; i < sched->running && !due; i++)
        due = due_in_prompt(&sched->sequences[sched->order[i]]);
    return due;
}

int sched_evict_after_rows(struct sched *sched) {
    return evict_where(sched, due_in_prompt);
}
