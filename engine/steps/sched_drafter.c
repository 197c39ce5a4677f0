/* When the draft model is asked (engine/steps/drafter.h).
 *
 * What a text itself tells costs nothing, so the draft model guesses where that is not likelier to
 * be right: for sequences whose text and language tell nothing, or only something that is seldom
 * confirmed. It guesses one token after the other, each in a step of its own for all sequences that
 * take part, and goes on as long as the next one gives more tokens for its time than the step has
 * without it: by the confirmations that each sequence has seen, by how sure the model is of each
 * token, and by the measured times of both models' steps. A token is drawn as the sequence itself
 * draws it, with the same number of the same random sequence, so that models that agree draw alike.
 *
 * Before its first guess it reads the text, once the answer has `read_after` tokens. That
 * costs no prompt any time; it is worth about DRAFTER_READ_STEPS steps of an answer that has just
 * begun, and more of a longer one, which will probably go on for longer. So of a long text the last
 * tokens are read alone, in parts, one part before a step.
 *
 * The draft model may cost an answer DRAFTER_LOST_STEPS steps and DRAFTER_LOST_PART of the answer's
 * own steps more than it gains: its steps, its guesses' rows and its readings are charged, and
 * confirmed guesses are paid back. When it has spent that, it rests until the answer is longer.
 *
 * Beside other clients' answers the draft model rests, because they get no more tokens from the
 * time that it takes. A text that it fails in is dropped, and its sequence goes on without it. */
#include <math.h>

#include "base/log.h"
#include "engine/steps/sched_int.h"

#define DRAFTER_READ_STEPS 2    /* steps whose time a reading may take at first */
#define DRAFTER_READ_PART  0.06 /* later: part of the steps of the answer so far */
#define DRAFTER_READ_LEAST 24   /* least tokens to read, and least that an answer may still have */
#define DRAFTER_READ_ROWS  64   /* most tokens that are read in one step */
#define DRAFTER_REREAD     4    /* a text so many times as long as the known one is read anew */
#define DRAFTER_CATCH_UP   16   /* most tokens that are read together with the first guess */
#define DRAFTER_LIKELY     0.25 /* guesses less likely than this are not continued */
#define DRAFTER_LOST_STEPS 2    /* steps that it may cost an answer more than it gains, at first */
#define DRAFTER_LOST_PART  0.01 /* and in each step of the answer */

void sched_leave_drafter(struct sched *sched, struct sequence *seq) {
    drafter_drop(&sched->drafter, seq->model_text);
    seq->model_text = NULL;
}

/* Drops the texts of the sequences, for which the draft model guesses no more. */
static void note_drafter_failure(struct sched *sched, struct sequence **asked, int count, int rc) {
    if (sched->counters.drafter_failures++ == 0)
        log_warn("the draft model failed: %s; answers go on without it", err_text(rc));
    for (int i = 0; i < count; i++) {
        sched_leave_drafter(sched, asked[i]);
        asked[i]->model_failed = true;
    }
}

void sched_hold_hidden(struct sched *sched, struct sequence *seq, int want) {
    struct kern *kern = sched->options.kern;
    const ptrdiff_t width = sched->drafter.options.width;
    if (width == 0 || !seq->draft.heads || seq->model_failed) return;
    if (!seq->model_text) seq->model_text = drafter_take(&sched->drafter);
    if (!seq->model_text) return;
    const float *hidden = sched->options.wanted_hidden(sched->options.model) + want * width;
    float *to = drafter_hold(&sched->drafter, seq->model_text, seq->token_count);
    int rc = kern->ops->download(kern, to, hidden, (size_t)width * sizeof *to);
    if (rc != 0) note_drafter_failure(sched, &seq, 1, rc);
}

/* Returns the time of a step of the draft model, divided by that of a step with `streams` answers.
 */
static double drafter_cost(const struct sched *sched, int rows, int streams) {
    static const struct pace unknown;
    bool timed = sched->options.step_stretch > 0;
    return pace_part(timed ? &sched->drafter.pace : &unknown, rows, timed ? &sched->pace : &unknown,
                     streams, sched->drafter.options.weight);
}

static double rows_growth(const struct sched *sched, int streams, int rows) {
    static const struct pace unknown;
    return pace_growth(sched->options.step_stretch > 0 ? &sched->pace : &unknown, streams, rows);
}

/* Returns whether guesses for these sequences are worth a step, if each guess is as good as earlier
 * ones. */
static bool is_worth_asking(const struct sched *sched, struct sequence **asked, int count,
                            int streams) {
    double gain = 0;
    for (int i = 0; i < count; i++) gain += (double)asked[i]->draft.model_rate;
    double time =
        rows_growth(sched, streams, streams + count) + drafter_cost(sched, count, streams);
    return (streams + gain) / time > streams * SCHED_DRAFT_GAIN;
}

/* Returns whether the sequence gains as much as reading so many tokens costs. */
static bool is_worth_reading(const struct sched *sched, const struct sequence *seq, int32_t rows,
                             int streams) {
    int32_t outputs = seq_output_count(seq);
    int32_t part = rows < DRAFTER_READ_ROWS ? rows : DRAFTER_READ_ROWS;
    double most = outputs * DRAFTER_READ_PART;
    if (most < DRAFTER_READ_STEPS) most = DRAFTER_READ_STEPS;
    return outputs >= sched->drafter.options.read_after &&
           seq->job->request.max_tokens - outputs >= DRAFTER_READ_LEAST &&
           drafter_cost(sched, part, streams) * rows / part <= most;
}

/* Returns how many of the text's last tokens are to be read; 0: not yet. */
static int32_t choose_reading(const struct sched *sched, const struct sequence *seq, int streams) {
    int32_t rows = sched->drafter.options.places / 4;
    if (rows > seq->token_count) rows = seq->token_count;
    while (rows > 0 && !is_worth_reading(sched, seq, rows, streams))
        rows = rows > DRAFTER_READ_LEAST ? rows / 2 : 0;
    return rows;
}

/* Prepares the sequence's text. Returns whether it has a text that is ready for a guess or must be
 * read first. */
static bool settle_text(struct sched *sched, struct sequence *seq, int streams) {
    struct drafter *drafter = &sched->drafter;
    const bool block = drafter->options.width > 0;
    if (!seq->model_text && !block) seq->model_text = drafter_take(drafter);
    struct drafter_text *text = seq->model_text;
    if (!text) return false;
    int rc = drafter_settle(drafter, text, seq->tokens, seq->token_count);
    if (rc != 0) {
        note_drafter_failure(sched, &seq, 1, rc);
        return false;
    }
    if (block) return text->held > 0 && text->read + text->held == seq->token_count;
    int32_t rows = choose_reading(sched, seq, streams);
    if (text->from > 0 && rows > DRAFTER_REREAD * (seq->token_count - text->from))
        drafter_empty(drafter, text);
    if (text->read > 0) {
        int32_t behind = drafter_behind(text, seq->token_count) - DRAFTER_CATCH_UP;
        return behind <= 0 || is_worth_reading(sched, seq, behind, streams);
    }
    if (rows > 0) drafter_begin(text, seq->token_count, rows);
    return rows > 0;
}

/* Takes a step of the draft model and notes its time. Returns whether the texts are still there. */
static bool step_drafter(struct sched *sched, struct sequence **asked,
                         const struct drafter_ask *asks, int count, int32_t rows) {
    int64_t begin = sched_clock(sched);
    int rc = drafter_step(&sched->drafter, asks, count);
    if (rc != 0) note_drafter_failure(sched, asked, count, rc);
    if (sched->drafter.steps < DRAFTER_COLD)
        sched->drafter.steps++;
    else if (rc == 0)
        pace_note_drafts(&sched->drafter.pace, rows, sched_clock(sched) - begin);
    sched->drafter.skipped = 0;
    sched->counters.drafter_steps++;
    return rc == 0;
}

/* Reads a part of the first text that is too far behind, and leaves those that are ready in
 * `asked`. Returns how many. */
static int sched_read_texts(struct sched *sched, struct sequence **asked, int count, int streams) {
    int ready = 0;
    int32_t room = DRAFTER_READ_ROWS;
    for (int i = 0; i < count; i++) {
        struct sequence *seq = asked[i];
        struct drafter_text *text = seq->model_text;
        int32_t behind = drafter_behind(text, seq->token_count);
        if (behind > DRAFTER_CATCH_UP && room > 0) {
            int32_t rows = behind - 1 < room ? behind - 1 : room;
            const struct drafter_ask ask = {text, seq->tokens, seq->token_count,
                                            seq->token_count - behind + rows, .wants = false};
            room = 0;
            draft_charge_model(&seq->draft, drafter_cost(sched, rows, streams));
            if (!step_drafter(sched, &seq, &ask, 1, rows)) continue;
            behind -= rows;
        }
        if (behind <= DRAFTER_CATCH_UP) asked[ready++] = seq;
    }
    return ready;
}

/* Guesses the next token of each sequence with the draft model. Returns for how many sequences
 * guessing continues. */
static int guess_tokens(struct sched *sched, struct sequence **asked, int count, int32_t rows) {
    struct drafter_ask asks[DRAFTER_ASKED] = {0};
    int going = 0;
    for (int i = 0; i < count; i++) {
        struct sequence *seq = asked[i];
        int32_t guesses = seq->draft.modelled;
        asks[i] = (struct drafter_ask){seq->model_text, seq->tokens, seq->token_count,
                                       seq->token_count + guesses, .wants = true};
        seq_sample_params(seq, &asks[i].sample);
        asks[i].sample.position += guesses;
        asks[i].sample.top_count = 0;
        if (guesses > 0) asks[i].sample.allowed = NULL; /* the mask is the first token's */
    }
    if (!step_drafter(sched, asked, asks, count, rows)) return 0;
    for (int i = 0; i < count; i++) {
        const struct kern_sampled *sampled = &sched->drafter.sampled[i];
        struct sequence *seq = asked[i];
        int32_t guesses = seq->draft.modelled;
        if (sampled->token >= sched->options.vocab || !isfinite(sampled->logprob)) continue;
        seq->tokens[seq->token_count + guesses] = sampled->token;
        draft_add_model(&seq->draft, exp((double)sampled->logprob));
        seq->draft_found = guesses + 1;
        seq->draft_chance *= draft_rate(&seq->draft, guesses);
        if (seq->draft_found < seq->draft_most && seq->draft_chance >= DRAFTER_LIKELY)
            asked[going++] = seq;
    }
    return going;
}

/* Guesses token after token, as long as a further step gives more tokens for its time. Returns the
 * time of all these steps, divided by that of a step without guesses. */
static double guess_for(struct sched *sched, struct sequence **asked, int count, int streams) {
    double tokens = streams, spent = 0;
    int given = 0;
    while (count > 0) {
        int32_t rows = 0;
        double gain = 0;
        for (int i = 0; i < count; i++) {
            const struct sequence *seq = asked[i];
            gain += seq->draft_chance * (double)seq->draft.model_rate;
            rows += seq->draft.modelled ? 1 : drafter_behind(seq->model_text, seq->token_count);
        }
        while (rows > DRAFTER_ROWS) {
            const struct sequence *seq = asked[--count];
            rows -= drafter_behind(seq->model_text, seq->token_count);
            gain -= (double)seq->draft.model_rate;
        }
        double cost = drafter_cost(sched, rows, streams);
        double now = rows_growth(sched, streams, streams + given) + spent;
        double then = rows_growth(sched, streams, streams + given + count) + spent + cost;
        if ((tokens + gain) / then <= tokens / now * (given ? 1 : SCHED_DRAFT_GAIN)) break;
        int asking = count;
        struct sequence *all[DRAFTER_ASKED];
        for (int i = 0; i < asking; i++) {
            all[i] = asked[i];
            draft_charge_model(&asked[i]->draft, cost);
        }
        count = guess_tokens(sched, asked, count, rows);
        spent += cost;
        for (int i = 0; i < asking; i++) {
            if (all[i]->draft.modelled == 0) continue;
            tokens += all[i]->draft_chance;
            given++;
        }
    }
    return spent;
}

/* Returns whether the draft model may take more time of this answer: its costs stay a small part of
 * the answer, even if nothing that it guesses is right. */
static bool has_credit(const struct sequence *seq) {
    return seq->draft.model_lost < DRAFTER_LOST_STEPS;
}

/* When the draft model was not asked for long, it is tried again, so that one slow step or an
 * unlikely beginning of an answer does not decide for ever. */
static void skip_drafter(struct sched *sched, struct sequence **asked, int count) {
    struct drafter *drafter = &sched->drafter;
    for (int i = 0; i < count; i++) draft_skip_model(&asked[i]->draft);
    if (++drafter->skipped < DRAFTER_SKIPPED) return;
    drafter->skipped = 0;
    drafter->pace = (struct pace){0};
}

/* Does the sequence show pictures to a draft model, which has no encoder? A block of the model's
 * files reads the answer alone. */
static bool shows_pictures(const struct sched *sched, const struct sequence *seq) {
    return sched->drafter.options.width == 0 && seq->job->request.picture_row_count > 0;
}

double sched_ask_drafter(struct sched *sched, int streams, int32_t most) {
    struct sequence *asked[DRAFTER_ASKED];
    int count = 0;
    for (int i = 0; i < streams && count < DRAFTER_ASKED && count < most; i++) {
        struct sequence *seq = sched->sorted[i];
        draft_charge_model(&seq->draft, -DRAFTER_LOST_PART);
        if (seq->draft_most <= 0 || seq->model_failed || !has_credit(seq)) continue;
        if (shows_pictures(sched, seq)) continue;
        if (seq->draft_found > 0 && draft_rate(&seq->draft, 0) >= (double)seq->draft.model_rate)
            continue;
        asked[count++] = seq;
    }
    if (count == 0) return 0;
    if (!is_worth_asking(sched, asked, count, streams)) {
        skip_drafter(sched, asked, count);
        return 0;
    }
    int settled = 0;
    for (int i = 0; i < count; i++)
        if (settle_text(sched, asked[i], streams)) asked[settled++] = asked[i];
    return guess_for(sched, asked, sched_read_texts(sched, asked, settled, streams), streams);
}
