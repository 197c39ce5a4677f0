/* The ends of a sequence's life: a request continues the conversation that saves it most tokens,
 * and an answered sequence becomes one. */
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "engine/steps/sched_int.h"

struct keeper_claim sched_claim(const struct sched *sched, const struct engine_job *job) {
    return (struct keeper_claim){.client = job->request.owner,
                                 .quota = queue_pages_left(&sched->queue, job)};
}

bool sched_query(const struct engine_job *job, struct conversation_query *out) {
    const struct engine_request *request = &job->request;
    *out = (struct conversation_query){.space = request->space,
                                       .kv = job->params,
                                       .prompt = request->prompt,
                                       .prompt_count = request->prompt_count,
                                       .hint = request->hint};
    return request->kv.reuse && !request->prompt_logprobs;
}

enum engine_wait sched_find(struct sched *sched, struct sched_entry *entry) {
    struct engine_job *job = entry->job;
    struct conversation_query query;
    entry->wants_conversation = sched_query(job, &query);
    if (!entry->wants_conversation) return ENGINE_WAIT_NOTHING;
    struct keeper_find find = {.claim = sched_claim(sched, job),
                               .query = &query,
                               .queued_ns = job->queued_ns,
                               .is_head = !entry->passing};
    enum engine_wait wait = keeper_find(&sched->keeper, &find);
    if (find.claim.saves != 0) job->saves = find.claim.saves;
    entry->match = find.match;
    return wait;
}

/* Sets the eviction state of a sequence that continues a conversation: that of the turn it
 * continues, or that of a new turn. */
static int begin_due(struct sched *sched, struct sequence *seq,
                     const struct conversation_match *match) {
    struct kern *kern = sched->options.kern;
    struct kern_report report = {0};
    int64_t streams = keeper_streams(&sched->keeper);
    if (match->exact) {
        seq->due = due_while_reading(&seq->kv, &seq->began, seq->began_held, seq->evicted_at,
                                     match->common, seq->prompt_count);
        return 0;
    }
    int rc = kern->ops->report(kern, seq->slot, &report);
    seq->due.tokens = match->common;
    seq->due.held =
        due_held_at(&seq->kv, (int32_t)(((int64_t)report.entries + streams - 1) / streams),
                    match->common, seq->evicted_at);
    seq->due.prompt_new = seq->prompt_count - match->common;
    seq->began_held = seq->due.held;
    return rc;
}

int sched_continue(struct sched *sched, struct sequence *seq, const struct sched_entry *entry,
                   bool consumed) {
    struct kern *kern = sched->options.kern;
    const struct conversation_match *match = &entry->match;
    int32_t count = match->conv->token_count, dropped = count - match->common;
    bool own = match->from == match->conv->id;
    CHECK(match->common > 0 && dropped >= 0);
    CHECK(match->common < seq->prompt_count); /* a token is left to compute */
    int rc = 0;
    /* An eviction behind the common tokens belongs to what is dropped. */
    seq->evicted_at = match->conv->evicted_at;
    if (!match->exact && seq->evicted_at > match->common) seq->evicted_at = match->common;
    seq->began = entry->began;
    seq->began_held = match->conv->began_held;
    if (match->conv->ttl > 0 && match->conv->saved == CONVERSATION_SAVED)
        store_touch(sched->options.store, match->conv->id);
    if (consumed)
        seq->slot = keeper_consume(&sched->keeper, match->conv);
    else
        rc = keeper_fork(&sched->keeper, match, seq->job->request.hint, &seq->slot);
    /* Dropped tokens may have used up places, which come back. */
    const struct kern_shift shift = {.slot = seq->slot,
                                     .rule = &seq->kv.rule,
                                     .tokens = match->common,
                                     .from = keeper_shifts(&sched->keeper, count),
                                     .to = keeper_shifts(&sched->keeper, match->common)};
    if (rc == 0 && dropped > 0) rc = kern->ops->truncate(kern, seq->slot, match->common);
    if (rc == 0 && shift.from != shift.to) rc = kern->ops->shift(kern, &shift);
    if (rc == 0) rc = begin_due(sched, seq, match);
    if (rc != 0) return rc;
    seq->due.shifts = keeper_shifts(&sched->keeper, match->common);
    seq->dropped = own ? dropped : 0;
    seq->job->cached_tokens = match->common;
    atomic_store_explicit(&seq->job->prompt_read, (uint_fast32_t)match->common,
                          memory_order_relaxed);
    seq->job->cut = match->cut;
    return 0;
}

void sched_retain(struct sched *sched, struct sequence *seq, const struct kern_report *report) {
    const struct engine_request *request = &seq->job->request;
    /* The list had room for the longest answer. If it cannot be shrunk, that only costs memory. */
    size_t used = (size_t)seq->due.tokens * sizeof *seq->tokens;
    int32_t *shrunk = mem_try_realloc(seq->tokens, used, used);
    struct conversation conv = {.kv = seq->kv,
                                .hint = request->hint,
                                .ttl = request->kv.ttl,
                                .tokens = shrunk ? shrunk : seq->tokens,
                                .token_count = seq->due.tokens,
                                .prompt_end = seq->prompt_count,
                                .evicted_at = seq->evicted_at,
                                .exact = seq->exact,
                                .began = seq->began,
                                .began_held = seq->began_held,
                                .slot = seq->slot,
                                .left = seq->left,
                                .origin = seq->origin};
    seq->tokens = NULL;
    keeper_measure(&sched->keeper, report, &conv);
    memcpy(conv.space, request->space, sizeof conv.space);
    memcpy(conv.client, request->owner, sizeof conv.client);
    seq->job->kv.pinned = keeper_retain(&sched->keeper, &conv, seq->origin_file, request);
}
