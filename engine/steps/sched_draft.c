/* Drafts in a step (speculative decoding, arXiv 2211.17192): a sequence gets rows not only for its
 * last token but also for the tokens with which it probably goes on, found in its text
 * (engine/steps/draft.h), left by its language, or guessed by a draft model
 * (engine/steps/sched_drafter.c). The step then reads the weights once for all of them.
 *
 * Nothing else changes. A row's result does not depend on how a text is split over steps
 * (kernels/kern.h), and the token after it is drawn as it would be without drafts: with the same
 * number of the same random sequence, the same mask, the same penalties. Samples are taken in
 * rounds: in round r those of the rows behind r drafted tokens, of the sequences whose tokens of
 * the rounds before were the drafted ones. So a drafted token is confirmed by being drawn, and what
 * follows from a token (masks, stop strings, penalties) follows before the next one is drawn. The
 * entries of tokens that were not drawn are taken back before anything reads them. A draft reaches
 * no token before which the sequence evicts or is shifted, and none beyond the end of its answer,
 * so reservations cover it.
 *
 * Recurrent states cannot go back. In a step with drafts they stay those before it, and are brought
 * forward by the tokens that were drawn afterwards, from the same inputs, which costs no product of
 * matrices. Sequences whose policy observes attention get no drafts: their records of the last
 * queries cannot be taken back.
 *
 * How many: the draft rows that raise the number of tokens expected for the time of the step most,
 * by the confirmations that each sequence has seen and by the measured times of steps with so many
 * rows (engine/steps/pace.h). Steps that read prompts have none, and where clients generate side by
 * side, drafts lengthen a step by SCHED_DRAFT_STRETCH percent at most, because the others get no
 * more tokens from it. */
#include <math.h>

#include "engine/steps/sched_int.h"
#include "kernels/rule.h"

void sched_open_draft(const struct sched *sched, struct sequence *seq) {
    const struct engine_request *request = &seq->job->request;
    if (request->drafts == 0 || sched->options.drafts == 0) return;
    /* Records of the last queries cannot be restored to an earlier token. */
    if (sched->options.shape.states > 0 && !sched->options.bring_states)
        seq->choice->undrafted = ENGINE_UNDRAFTED_STATES;
    else if (rule_window(&seq->kv.rule) != 0 || rule_adds(&seq->kv.rule))
        seq->choice->undrafted = ENGINE_UNDRAFTED_POLICY;
    if (seq->choice->undrafted != ENGINE_UNDRAFTED_NOT) return;
    int32_t predicted = request->predicted_count;
    if (predicted > request->max_tokens) predicted = request->max_tokens;
    /* If there is no memory for drafts, the answer has the same tokens but takes longer. */
    if (draft_open(&seq->draft, request->predicted, predicted, request->prompt_count,
                   request->prompt_count + request->max_tokens) != 0)
        seq->choice->undrafted = ENGINE_UNDRAFTED_MEMORY;
}

/* Returns how many tokens of the sequence may be drafted now. */
static int32_t draft_limit(const struct sched *sched, const struct sequence *seq) {
    const struct engine_request *request = &seq->job->request;
    int32_t most = request->drafts;
    int32_t answer = request->max_tokens - seq_output_count(seq) - 1;
    int32_t room = due_generate_limit(&seq->kv, &seq->due) - 1;
    if (most < 0 || most > sched->options.drafts) most = sched->options.drafts;
    if (most > answer) most = answer;
    if (most > room) most = room;
    /* A live report follows an eviction by one token. */
    return seq->index == 0 && seq->changed && seq->job->live ? 0 : most;
}

/* Writes the tokens that the answer's language leaves to be written; returns how many. */
static int32_t foresee(const struct sched *sched, const struct sequence *seq, int32_t *ids,
                       int32_t most, struct constraint_work *work) {
    const struct seq_text *text = &sched->options.text;
    char bytes[DRAFT_MAX * 8];
    if (!text->encode) return 0;
    size_t size = constraint_foresee(&seq->constraint, &seq->job->request, seq->choice->text,
                                     seq->text_size, bytes, sizeof bytes, work);
    return size > 0 ? text->encode(text->arg, bytes, size, ids, most) : 0;
}

/* Returns how many tokens are found for all answers of the step. */
static int32_t find_drafts(struct sched *sched, int streams) {
    struct constraint_work work = {.left = CONSTRAINT_FORESEE_WORK};
    int32_t found = 0, ids[DRAFT_MAX];
    for (int i = 0; i < streams; i++) {
        struct sequence *seq = sched->sorted[i];
        int32_t most = seq->draft.heads ? draft_limit(sched, seq) : 0;
        seq->draft_chance = 1;
        seq->draft_found = 0;
        seq->draft_most = most;
        if (most <= 0) continue;
        int32_t foreseen = foresee(sched, seq, ids, most, &work);
        seq->draft_found =
            draft_find(&seq->draft, seq->tokens, seq->token_count, ids, foreseen, most);
        found += seq->draft_found;
    }
    return found;
}

/* Returns the sequence whose next drafted token is most likely to be confirmed, with the
 * probability; NULL: no sequence has another drafted token. */
static struct sequence *find_likeliest(const struct sched *sched, int streams, double *chance) {
    struct sequence *best = NULL;
    *chance = 0;
    for (int i = 0; i < streams; i++) {
        struct sequence *seq = sched->sorted[i];
        if (seq->drafted == seq->draft_found) continue;
        double own = seq->draft_chance * draft_rate(&seq->draft, seq->drafted);
        if (own <= *chance) continue;
        best = seq;
        *chance = own;
    }
    return best;
}

/* Returns whether other clients wait for this step, with answers that sit out or with prompts. */
static bool several_clients(const struct sched *sched) {
    bool several = false;
    for (int i = 1; i < sched->running && !several; i++)
        several = sched->sequences[sched->order[i]].job->client !=
                  sched->sequences[sched->order[0]].job->client;
    return several;
}

/* Gives the sequences draft rows in the order of their likelihood, and keeps as many as give most
 * tokens for the time of the step. `spent`: the time that finding the drafts took, divided by that
 * of a step without drafts. Returns the time of the step, divided by the same. */
static double choose_drafts(struct sched *sched, int streams, int32_t most, double spent) {
    static const struct pace unknown;
    const struct pace *pace = sched->options.step_stretch > 0 ? &sched->pace : &unknown;
    struct sequence *order[SCHED_DRAFT_ROWS];
    double tokens = streams, chance, best = tokens * SCHED_DRAFT_GAIN / (1 + spent);
    double longest = several_clients(sched) ? 1 + SCHED_DRAFT_STRETCH / 100.0 : INFINITY;
    int32_t count = 0, chosen = 0;
    while (count < most) {
        struct sequence *seq = find_likeliest(sched, streams, &chance);
        double growth = pace_growth(pace, streams, streams + count + 1);
        if (!seq || growth > longest) break;
        order[count++] = seq;
        seq->drafted++;
        seq->draft_chance = chance;
        tokens += chance;
        if (tokens / (growth + spent) <= best) continue;
        best = tokens / (growth + spent);
        chosen = count;
    }
    while (count > chosen) order[--count]->drafted--;
    return pace_growth(pace, streams, streams + chosen);
}

void sched_plan_drafts(struct sched *sched, int streams, int32_t most) {
    for (int i = 0; i < streams; i++) sched->sorted[i]->drafted = sched->sorted[i]->confirmed = 0;
    const int32_t rows = sched->options.shape.states > 0 ? SCHED_STATE_DRAFTS : SCHED_DRAFT_ROWS;
    if (most > rows) most = rows;
    if (most <= 0) return;
    int32_t found = find_drafts(sched, streams);
    double spent = 0;
    if (drafter_is_open(&sched->drafter) && !several_clients(sched))
        spent = sched_ask_drafter(sched, streams, most);
    else if (found == 0)
        return;
    for (int i = 0; i < streams; i++) sched->sorted[i]->draft_chance = 1;
    const double growth = choose_drafts(sched, streams, most, spent);
    for (int i = 0; i < streams; i++) {
        struct sequence *seq = sched->sorted[i];
        if (seq->draft_found > 0 && seq->drafted == 0) draft_learn(&seq->draft, 0, 0);
        if (seq->draft.modelled > 0) draft_charge_model(&seq->draft, growth - 1);
    }
}

int sched_end_drafts(struct sched *sched, const struct sched_step *step) {
    struct kern *kern = sched->options.kern;
    struct kern_span brought[SCHED_STATE_DRAFTS];
    int32_t peeked = 0;
    int rc = 0, count = 0;
    for (int i = 0; i < step->streams && rc == 0; i++) {
        struct sequence *seq = sched->span_sequences[i];
        const struct kern_span *span = &sched->spans[i];
        if (seq->drafted == 0) continue;
        /* If the answer has ended or waits, nothing is known about the next drafted token. */
        bool cut = seq->finish != ENGINE_RUNNING || seq_waits(seq);
        draft_learn(&seq->draft, cut ? seq->confirmed : seq->drafted, seq->confirmed);
        seq->choice->drafts_confirmed += seq->confirmed;
        seq->choice->drafts_rejected += seq->drafted - seq->confirmed;
        sched->counters.drafted_tokens += (uint64_t)seq->drafted;
        sched->counters.confirmed_tokens += (uint64_t)seq->confirmed;
        if (seq->draft.modelled > 0) {
            draft_charge_model(&seq->draft, -seq->confirmed);
            sched->counters.model_drafted_tokens += (uint64_t)seq->drafted;
            sched->counters.model_confirmed_tokens += (uint64_t)seq->confirmed;
        }
        if (span->peeks || seq->due.tokens < span->pos + span->count)
            rc = kern->ops->truncate(kern, seq->slot, seq->due.tokens);
        if (!span->peeks) continue;
        brought[count] = *span;
        brought[count].row = peeked;
        brought[count].count = seq->due.tokens - span->pos;
        brought[count++].peeks = false;
        peeked += span->count;
    }
    if (rc == 0 && count > 0) sched->options.bring_states(sched->options.model, brought, count);
    return rc;
}
