/* Checkpoints: states that running sequences leave behind, for prompts that begin like theirs.
 *
 * A sequence leaves a checkpoint before the eviction or shift that follows its prompt. It
 * can be cut anywhere behind the eviction or shift before it, and serves the same prompt again,
 * templates that render it differently in the next turn, and edits.
 *
 * A sequence leaves a prefix where its prompt has a border: a number of tokens after which other
 * prompts go on differently. A border comes from one of three sources:
 * - the request: the end of its system message and tools, which its text alone fixes;
 * - a conversation that has more tokens in common with the prompt than could be used: two prompts
 *   parted there, so a third one may;
 * - a job that waits for the sequence, see below.
 * With recurrent states, which cannot be cut, the last token of the prompt is a border, too: a
 * retry and another answer continue from there.
 * Evictions up to a border follow from the tokens before it, so a sequence that continues a prefix
 * gives bitwise the answer that it gives alone. The step that reaches a border ends there.
 *
 * A job whose prompt begins like one that is being read waits until the running sequence has left a
 * prefix, instead of reading the same tokens beside it. It waits no longer than the other sequence
 * reads, and at most SCHED_PASS_STEPS steps in all. Until then it is not searched for again: the
 * job remembers the sequence and the border that it waits for.
 *
 * Checkpoints only take pages and places that are free or held by superseded conversations, so they
 * cost no other conversation its place. */
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/steps/sched_int.h"

/* Drops a superseded conversation, which costs at most a retry. Returns false if there is none. */
static bool drop_superseded(struct sched *sched, const uint8_t *client) {
    struct conversation *first =
        conversation_next_victim(&sched->keeper.table, NULL, client, false, CONVERSATION_PAGES);
    if (!first || !conversation_superseded(first)) return false;
    keeper_displace(&sched->keeper, first, "checkpoint");
    return true;
}

static bool reclaim_superseded(struct sched *sched, const struct engine_job *job, int64_t pages,
                               int32_t tokens) {
    struct keeper *keeper = &sched->keeper;
    const struct keeper_claim claim = sched_claim(sched, job);
    while (pages > keeper_quota_free(keeper, &claim))
        if (!drop_superseded(sched, claim.client)) return false;
    pages = keeper_pages_with(keeper, pages, tokens);
    while (keeper->table.count >= sched->keeper.options.conversations_max ||
           pages > keeper_pages_free(keeper))
        if (!drop_superseded(sched, NULL)) return false;
    return keeper->free_slot_count > 0;
}

/* Adds a fork of the sequence to the table; returns its id, 0 without free pages or memory. */
static uint64_t add_fork(struct sched *sched, const struct sequence *seq,
                         struct conversation *conv) {
    struct kern *kern = sched->options.kern;
    struct kern_report report = {0};
    if (kern->ops->report(kern, seq->slot, &report) != 0) return 0;
    if (!reclaim_superseded(sched, seq->job, report.rank_pages, conv->token_count)) return 0;
    int32_t *tokens = mem_try_alloc((size_t)conv->token_count, sizeof *tokens);
    if (!tokens) return 0;
    memcpy(tokens, conv->tokens, (size_t)conv->token_count * sizeof *tokens);
    conv->tokens = tokens;
    conv->slot = keeper_alloc_slot(&sched->keeper);
    keeper_measure(&sched->keeper, &report, conv);
    if (kern->ops->fork(kern, seq->slot, conv->slot) == 0)
        return conversation_add(&sched->keeper.table, conv, clock_ns())->id;
    keeper_release_slot(&sched->keeper, conv->slot);
    mem_free(tokens);
    return 0;
}

/* Describes a checkpoint of the sequence's present state; its tokens are still the sequence's. */
static struct conversation checkpoint_of(const struct sequence *seq) {
    const struct engine_request *request = &seq->job->request;
    struct conversation conv = {.kv = seq->kv,
                                .hint = request->hint,
                                .tokens = seq->tokens,
                                .token_count = seq->due.tokens,
                                .prompt_end = seq->due.tokens,
                                .evicted_at = seq->evicted_at,
                                .exact = seq->exact,
                                .began = seq->began,
                                .began_held = seq->began_held,
                                .checkpoint = true,
                                .turns = 1};
    memcpy(conv.space, request->space, sizeof conv.space);
    memcpy(conv.client, request->owner, sizeof conv.client);
    return conv;
}

/* Returns whether checkpoints of the sequence may be added at all. */
static bool may_checkpoint(const struct sched *sched, const struct sequence *seq) {
    const struct engine_request *request = &seq->job->request;
    return seq->index == 0 && sched->keeper.table.capacity > 0 && request->kv.retain &&
           !request->prompt_logprobs;
}

void sched_add_checkpoint(struct sched *sched, struct sequence *seq) {
    if (!may_checkpoint(sched, seq) || !conversation_can_cut(&seq->kv.rule)) return;
    struct conversation conv = checkpoint_of(seq);
    if (conversation_least_cut(&conv) >= seq->prompt_count) return;
    if (seq->prompt_count > seq->due.tokens) return;
    if (conversation_same(&sched->keeper.table, &conv)) return;
    uint64_t id = add_fork(sched, seq, &conv);
    if (id != 0) seq->left = id;
}

/* ---- Prefixes ---- */

/* Adds a border that lies ahead and not just behind another one; returns the border that serves
 * tokens up to `at`, 0: none. */
static int32_t add_border(struct sequence *seq, int32_t at) {
    int i = seq->border_count;
    if (at >= seq->prompt_count) at = seq->prompt_count - 1;
    if (at <= seq->due.tokens) return 0;
    while (i > 0 && seq->borders[i - 1] > at) i--;
    int32_t before = i > 0 ? seq->borders[i - 1] : 0;
    if (seq->border_count == SEQ_BORDERS || at - before < CONVERSATION_PREFIX_MIN) return before;
    memmove(&seq->borders[i + 1], &seq->borders[i],
            (size_t)(seq->border_count - i) * sizeof *seq->borders);
    seq->border_count++;
    return seq->borders[i] = at;
}

void sched_plan_borders(struct sched *sched, struct sequence *seq,
                        const struct sched_entry *entry) {
    int32_t found = entry->match.common + CONVERSATION_PREFIX_MIN;
    const int32_t end = seq->kv.whole ? seq->prompt_count - 1 : 0;
    const int32_t ahead[] = {end, entry->job->request.border, entry->match.shared};
    if (!may_checkpoint(sched, seq)) return;
    for (int i = 0; i < 3; i++)
        if (ahead[i] >= found) (void)add_border(seq, ahead[i]);
}

int32_t sched_rows_to_border(const struct sequence *seq) {
    return seq->border_count > 0 ? seq->borders[0] - seq->due.tokens : INT32_MAX;
}

void sched_add_prefixes(struct sched *sched) {
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (sched_rows_to_border(seq) > 0) continue;
        struct conversation conv = checkpoint_of(seq);
        conv.prefix = true;
        /* An eviction that only this sequence makes, at its prompt's end or in its answer, cannot
         * lie before a border; but a conversation that it continued may have made one. */
        if (seq->exact && !conversation_same(&sched->keeper.table, &conv) &&
            add_fork(sched, seq, &conv) != 0)
            sched->counters.prefixes++;
        seq->border_count--;
        memmove(seq->borders, seq->borders + 1, (size_t)seq->border_count * sizeof *seq->borders);
        keeper_note_change(&sched->keeper); /* jobs that wait for the prefix are tried again */
    }
}

/* ---- Waiting for a prefix ---- */

/* Returns whether the sequence reads the turn that the job would begin with this match. */
static bool reads_turn(const struct sequence *seq, const struct conversation_match *match) {
    const struct conversation *conv = match->conv;
    if (!conv || match->exact) return seq->began.tokens == 0 && (!conv || conv->began.tokens == 0);
    return seq->origin == conv->id && seq->began.tokens == match->common;
}

/* Returns the number of the job's first tokens that the sequence is going to read. */
static int32_t common_ahead(const struct sched *sched, const struct sequence *seq,
                            const struct sched_entry *entry) {
    const struct engine_request *request = &entry->job->request;
    if (!seq_prefilling(seq) || !may_checkpoint(sched, seq) || !seq->exact) return 0;
    if (memcmp(seq->job->request.space, request->space, sizeof request->space) != 0) return 0;
    if (!kv_params_equal(&seq->kv, entry->job->params) || !reads_turn(seq, &entry->match)) return 0;
    return conversation_common(seq->tokens, seq->prompt_count, request->prompt,
                               request->prompt_count - 1);
}

/* Returns whether the job has waited as long as it may. */
static bool has_waited(const struct sched *sched, const struct engine_job *job) {
    return job->prefix.since != 0 && sched->counters.steps + 1 >= sched_wait_end(job);
}

bool sched_still_awaits(const struct sched *sched, const struct engine_job *job) {
    const struct sequence *reader = &sched->sequences[job->prefix.sequence];
    return job->prefix.border > 0 && !has_waited(sched, job) && reader->job &&
           reader->job->arrival == job->prefix.reader && reader->finish == ENGINE_RUNNING &&
           reader->due.tokens < job->prefix.border;
}

bool sched_awaits_prefix(struct sched *sched, const struct sched_entry *entry) {
    struct engine_job *job = entry->job;
    struct sequence *best = NULL;
    int32_t most = entry->match.common + CONVERSATION_PREFIX_MIN - 1;
    job->prefix.border = 0;
    if (!entry->wants_conversation || has_waited(sched, job)) return false;
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        int32_t common = common_ahead(sched, seq, entry);
        if (common <= most || common <= seq->due.tokens) continue;
        best = seq;
        most = common;
    }
    int32_t border = best ? add_border(best, most) : 0;
    if (border < entry->match.common + CONVERSATION_PREFIX_MIN) return false;
    sched->counters.prefix_waits += job->prefix.since == 0;
    if (job->prefix.since == 0) job->prefix.since = sched->counters.steps + 1;
    job->prefix.reader = best->job->arrival;
    job->prefix.sequence = (int)(best - sched->sequences);
    job->prefix.border = border;
    if (sched_wait_end(job) < sched->admission.wait_ends)
        sched->admission.wait_ends = sched_wait_end(job);
    return true;
}
