/* The batch of a step: rows for every answer whose turn it is, one and those of its draft
 * (sched_draft.c), then prompt rows, and whose prompt is read first. Measured times decide only how
 * many drafted rows and prompt rows there are (pace.h) and whose turn it is (sched_turns.c). */
#include <string.h>

#include "base/check.h"
#include "engine/engine_pictures.h"
#include "engine/steps/sched_int.h"

/* Where places have three dimensions: sets those of the span's rows, and how far the first one is
 * behind. */
static void set_places(struct sched *sched, struct sched_step *step, struct sequence *seq,
                       struct kern_span *span) {
    if (!sched->places) return;
    struct kern_place *places = sched->places + span->row;
    grid_seek(&seq->grid, seq->tokens, span->pos);
    if (grid_places(seq->grid, seq->tokens, span->pos, span->count, places))
        step->batch.places = sched->places;
    for (int32_t i = 0; i < span->count; i++)
        for (int axis = 0; axis < KERN_AXES; axis++) places[i].axis[axis] -= span->behind;
    span->behind += seq->grid.behind;
}

static void add_rows(struct sched *sched, struct sched_step *step, struct sequence *seq,
                     int32_t count) {
    CHECK(count > 0 && !seq->leader && seq->due.tokens + count <= seq->token_count + seq->drafted);
    sched->span_sequences[step->batch.span_count] = seq;
    sched->spans[step->batch.span_count++] =
        (struct kern_span){.slot = seq->slot,
                           .row = step->batch.rows,
                           .count = count,
                           .pos = seq->due.tokens,
                           .behind = due_behind(&seq->kv, &seq->due),
                           .peeks = seq->drafted > 0 && sched->options.shape.states > 0,
                           .second = seq->job->request.second,
                           .adapter = seq->job->request.adapter,
                           .rule = &seq->kv.rule};
    memcpy(sched->rows + step->batch.rows, seq->tokens + seq->due.tokens,
           (size_t)count * sizeof *sched->rows);
    set_places(sched, step, seq, &sched->spans[step->batch.span_count - 1]);
    if (seq->job->request.picture_row_count > 0)
        sched_give_pictures(sched, step, seq, &sched->spans[step->batch.span_count - 1]);
    step->batch.rows += count;
}

static void add_want(struct sched *sched, struct sched_step *step, struct sequence *seq,
                     int32_t row, int32_t scored) {
    sched->want[step->want_count] = row;
    sched->wants[step->want_count++] = (struct sched_want){seq, scored};
}

/* The prompt's last row gives the first token of every choice. */
static void add_first_wants(struct sched *sched, struct sched_step *step, struct sequence *leader,
                            int32_t row) {
    add_want(sched, step, leader, row, -1);
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq->leader == leader) add_want(sched, step, seq, row, -1);
    }
}

/* Every row of a prompt that wants scores scores the token after it, but those before rows of
 * pictures and the last one. */
static bool scores_next(const struct sequence *seq, int32_t at) {
    return at + 1 < seq->prompt_count && !engine_is_picture_id(seq->tokens[at + 1]);
}

/* Returns how many of `count` rows a prompt that wants scores gets. */
static int32_t scored_rows(struct sched_step *step, const struct sequence *seq, int32_t count) {
    int32_t rows = 0;
    for (; rows < count; rows++) {
        if (!scores_next(seq, seq->due.tokens + rows)) continue;
        if (step->spare_logits == 0) break;
        step->spare_logits--;
    }
    const struct sched_together parted = sched_parted_at(seq, seq->due.tokens + rows);
    return rows < count && parted.end ? parted.first - seq->due.tokens : rows;
}

/* The tokens that a request judges take a row of logits each; one is the running sequence's. The
 * last row waits for a step that has them. */
static bool has_judged_logits(const struct sched_step *step, const struct engine_request *request) {
    return request->pooling != ENGINE_POOL_NEXT || request->judged_count - 1 <= step->spare_logits;
}

static void add_judged_wants(struct sched *sched, struct sched_step *step, struct sequence *seq,
                             int32_t row) {
    for (int32_t i = 0; i < seq->job->request.judged_count; i++)
        add_want(sched, step, seq, row, -2 - i);
    step->spare_logits -= seq->job->request.judged_count - 1;
}

static int32_t prompt_left(const struct sequence *seq) {
    return seq->prompt_count - seq->due.tokens;
}

/* Returns how many of `count` prompt rows the step takes, so that rows which stay together are not
 * parted: up to the first of them, or with all of them. Then there may be more than `count`, and
 * more than rows_most says, so that a step with few rows does not stop a prompt: in the prompt that
 * is read first. */
static int32_t keep_together(const struct sched *sched, const struct sched_step *step,
                             const struct sequence *seq, int32_t count) {
    const int32_t from = seq->due.tokens;
    const struct sched_together parted = sched_parted_at(seq, from + count);
    if (count <= 0 || !parted.end) return count;
    if (parted.first > from) return parted.first - from;
    const bool is_first = step->batch.rows == step->stream_rows;
    const int32_t most = is_first ? sched->options.rows_max : step->rows_most;
    const int32_t whole = parted.end - from;
    const bool evicts = whole >= sched_rows_to_eviction(seq) && sched_held_if_due(seq) > 0;
    return whole > most - step->batch.rows || (evicts && !seq->may_evict) ? 0 : whole;
}

/* Adds at most `most` rows of a prefilling sequence, and the logits that it wants. */
static void add_prompt(struct sched *sched, struct sched_step *step, struct sequence *seq,
                       int32_t most) {
    const struct engine_request *request = &seq->job->request;
    int32_t count = due_prompt_limit(&seq->kv, &seq->due);
    int32_t rest = prompt_left(seq);
    if (count > most) count = most;
    if (!seq->may_evict && sched_wants_shift(seq)) return;
    if (!seq->may_evict && sched_held_if_due(seq) > 0)
        count--; /* up to the eviction, not into it */
    int32_t left = step->rows_most - step->batch.rows;
    if (count > left) count = left;
    if (count > sched_rows_to_border(seq)) count = sched_rows_to_border(seq);
    if (request->picture_row_count > 0)
        count = keep_together(sched, step, seq, sched_rows_to_picture(sched, seq, count));
    if (count == rest && sched_first_waits(sched, seq)) count--;
    if (count == rest && !has_judged_logits(step, request)) count--;
    if (request->prompt_logprobs) count = scored_rows(step, seq, count);
    if (count <= 0 || (sched->options.whole_texts && count < rest)) return;
    int32_t row = step->batch.rows, pos = seq->due.tokens;
    add_rows(sched, step, seq, count);
    for (int32_t i = 0; request->prompt_logprobs && i < count; i++)
        if (scores_next(seq, pos + i)) add_want(sched, step, seq, row + i, pos + i + 1);
    if (pos + count == seq->prompt_count && request->max_tokens > 0)
        add_first_wants(sched, step, seq, row + count - 1);
    if (pos + count == seq->prompt_count && request->pooling == ENGINE_POOL_NEXT)
        add_judged_wants(sched, step, seq, row + count - 1);
}

/* Prompts are read in the order of their clients' service, rounded to SCHED_PROMPT_TURN tokens,
 * then oldest first. So one client's long prompts delay another client by at most one such
 * interval, and of prompts that are about equally long one is finished before the next begins. */
static int64_t service_turn(const struct sched *sched, const struct sequence *seq) {
    return queue_client_of(&sched->queue, seq->job)->served / SCHED_PROMPT_TURN;
}

static struct queue_client *reader_of(const struct sched *sched, int prompt) {
    return queue_client_of(&sched->queue, sched->sorted[prompt]->job);
}

/* Returns the shortest of the first `count` prompts that are of the same client as prompt `first`,
 * if it is at most half as long as that one; otherwise `first`. */
static int find_shorter(const struct sched *sched, int count, int first) {
    int best = first;
    for (int i = first + 1; i < count; i++)
        if (reader_of(sched, i) == reader_of(sched, first) &&
            prompt_left(sched->sorted[i]) < prompt_left(sched->sorted[best]))
            best = i;
    return 2 * prompt_left(sched->sorted[best]) <= prompt_left(sched->sorted[first]) ? best : first;
}

/* Returns which of the sorted prompts is read before older ones: of those whose clients were served
 * equally, the first one of the client that has the fewest prompt tokens ahead of it for its
 * weight, or a much shorter one of that client. 0: none is. */
static int find_favoured(const struct sched *sched, int prompts) {
    int best = 0, equals = 1;
    while (equals < prompts &&
           service_turn(sched, sched->sorted[equals]) == service_turn(sched, sched->sorted[0]))
        equals++;
    for (int i = 0; i < prompts; i++)
        reader_of(sched, i)->prompts_ahead = reader_of(sched, i)->prompts_waiting;
    for (int i = 0; i < prompts; i++)
        reader_of(sched, i)->prompts_ahead += prompt_left(sched->sorted[i]);
    for (int i = 1; i < equals; i++) {
        const struct queue_client *a = reader_of(sched, i), *b = reader_of(sched, best);
        if (a != b && a->prompts_ahead * b->weight < b->prompts_ahead * a->weight) best = i;
    }
    return find_shorter(sched, equals, best);
}

/* A client with little to read does not wait until one with much has read it, nor a short prompt
 * until a long one of its own client is read. The favoured prompt shares the rows of the step with
 * the one whose turn it is, in proportion to their clients' weights, and takes what the others
 * leave. So neither can be starved by the other. */
static void add_prompts(struct sched *sched, struct sched_step *step) {
    int prompts = 0;
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq_prefilling(seq) && !seq->sits_out)
            sched_sort_in(sched, prompts++, seq, service_turn(sched, seq));
    }
    /* Texts that are read whole have steps of their own: the first one always fits. */
    int favoured = sched->options.whole_texts ? 0 : find_favoured(sched, prompts);
    if (favoured > 0) {
        int64_t own = reader_of(sched, favoured)->weight,
                weights = own + reader_of(sched, 0)->weight;
        int64_t rows = step->rows_most - step->batch.rows, others = 0;
        for (int i = 0; i < prompts; i++)
            if (i != favoured) others += prompt_left(sched->sorted[i]);
        int64_t theirs = rows - (rows * own + weights - 1) / weights;
        if (theirs > others) theirs = others;
        add_prompt(sched, step, sched->sorted[favoured], (int32_t)(rows - theirs));
    }
    for (int i = 0; i < prompts; i++)
        if (i != favoured || favoured == 0) add_prompt(sched, step, sched->sorted[i], INT32_MAX);
}

/* Finds the answers that go on in this step, oldest first, and whether a prompt may be read. */
static int find_streams(struct sched *sched, bool *reads) {
    int streams = 0;
    *reads = false;
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        *reads = *reads || (seq_prefilling(seq) && !seq->sits_out);
        if (!seq_generating(seq) || seq_waits(seq)) continue;
        if (seq->sits_out || due_before_generate(&seq->kv, &seq->due)) continue;
        if (!seq->may_evict && sched_wants_shift(seq)) continue;
        sched->sorted[streams++] = seq;
    }
    return streams;
}

/* Adds the wants of the rows behind drafted tokens, by rounds. */
static void add_draft_wants(struct sched *sched, struct sched_step *step) {
    for (int round = 1; round <= DRAFT_MAX; round++) {
        step->rounds[round] = step->want_count;
        for (int i = 0; i < step->streams; i++)
            if (sched->span_sequences[i]->drafted >= round)
                add_want(sched, step, sched->span_sequences[i], sched->spans[i].row + round, -1);
    }
    step->rounds[DRAFT_MAX + 1] = step->want_count;
}

void sched_build_step(struct sched *sched, struct sched_step *step) {
    const struct sched_options *options = &sched->options;
    int logits = options->logits_max < options->rows_max ? options->logits_max : options->rows_max;
    *step = (struct sched_step){
        .batch = {.tokens = sched->rows, .spans = sched->spans, .given = sched->given},
        .spare_logits = logits - sched->running};
    bool reads;
    int streams = find_streams(sched, &reads);
    sched_plan_drafts(sched, streams, reads ? 0 : step->spare_logits);
    for (int i = 0; i < streams; i++) {
        add_want(sched, step, sched->sorted[i], step->batch.rows, -1);
        add_rows(sched, step, sched->sorted[i], 1 + sched->sorted[i]->drafted);
    }
    step->streams = streams;
    step->stream_rows = step->batch.rows;
    int32_t left = options->rows_max - step->stream_rows;
    int32_t most = options->whole_texts ? left : sched_prompt_rows(sched, streams);
    step->rows_most = step->stream_rows + (most < left ? most : left);
    add_prompts(sched, step);
    add_draft_wants(sched, step);
    CHECK(step->batch.rows <= options->rows_max);
    CHECK(step->want_count <= logits);
}
