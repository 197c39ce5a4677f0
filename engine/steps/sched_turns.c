/* Turns: the sequences that take part in a step, while some client runs more than its part
 * (engine/steps/queue.h, crowding).
 *
 * A prompt that arrives waits for the step that has begun, and then for its own. Beside a client
 * with many answers both are long: their length is that of all answers, which have nothing to do
 * with the prompt. So while a client crowds, two things change.
 *
 * Prompts of the other clients are read in steps of their own, apart from all answers. Such a step
 * takes no longer than --step-stretch lets prompt rows lengthen a step, and the next one belongs to
 * the answers. A rest of up to half as many rows is read with it.
 *
 * The crowding clients' answers go on in two or four turns if a step with all of them would take
 * longer than half of what the others' usual prompts take alone, and in two while such a prompt is
 * being read. Their prompts are read in turns with their answers, by as many rows as fill that
 * time. So a first token of another client waits for about half the time of its own prompt, and
 * then takes that time. Answers of clients that do not crowd take part in every step with answers.
 *
 * Which of these is worth its cost follows from measured step times (engine/steps/pace.h): on a
 * device on which a step with many answers takes no longer than one with few, nothing is divided.
 * Without options.step_stretch everybody takes part in every step.
 */
#include "engine/steps/sched_int.h"

static bool crowds(const struct sched *sched, const struct sequence *seq) {
    return queue_client_of(&sched->queue, seq->job)->crowds;
}

/* Answers that sat out longer than they ever should are alike. */
enum { AGES = 2 * PACE_TURNS };

/* The work that there is, of crowding clients and of the others. */
struct work {
    int streams[2];    /* answers; [1]: of crowding clients */
    int prompts[2];    /* prompts that are being read */
    int32_t rest;      /* tokens to be read of all prompts of the others */
    int64_t served[2]; /* the least that a client was served whose prompt is being read */
};

static struct work find_work(struct sched *sched) {
    struct work work = {.served = {INT64_MAX, INT64_MAX}};
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        int64_t served = queue_client_of(&sched->queue, seq->job)->served;
        int crowd = crowds(sched, seq);
        work.streams[crowd] += seq_generating(seq) && !seq_waits(seq);
        work.prompts[crowd] += seq_prefilling(seq);
        if (!seq_prefilling(seq)) continue;
        if (!crowd) work.rest += seq->prompt_count - seq->due.tokens;
        if (served < work.served[crowd]) work.served[crowd] = served;
    }
    return work;
}

/* Returns how many turns ago the answer went on, or AGES - 1 for more. */
static int age_of(const struct sched *sched, const struct sequence *seq) {
    uint64_t age = sched->turns.number - seq->last_turn;
    return age < AGES ? (int)age : AGES - 1;
}

/* Lets one part of the crowding clients' answers go on: those that have waited longest. */
static void rotate_answers(struct sched *sched, const struct work *work, int parts) {
    int of_age[AGES] = {0}, left = (work->streams[1] + parts - 1) / parts;
    sched->turns.number++;
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        seq->sits_out = crowds(sched, seq) && seq_generating(seq) && !seq_waits(seq);
        of_age[age_of(sched, seq)] += seq->sits_out;
    }
    for (int age = AGES - 1; age >= 0; age--) { /* now: how many of each age go on */
        if (of_age[age] > left) of_age[age] = left;
        left -= of_age[age];
    }
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (!seq->sits_out || of_age[age_of(sched, seq)]-- <= 0) continue;
        seq->sits_out = false;
        seq->last_turn = sched->turns.number;
    }
}

/* Lets sequences sit out: those of crowding clients (`crowd`) or of the others that read their
 * prompts (`prompts`) or that generate. */
static void set_aside(struct sched *sched, bool crowd, bool prompts) {
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (crowds(sched, seq) == crowd && seq_prefilling(seq) == prompts) seq->sits_out = true;
    }
}

/* Returns whether the others' prompts are worth a step without answers now. */
static bool is_apart(const struct sched *sched, const struct work *work, bool was_apart) {
    int streams = work->streams[0] + work->streams[1];
    int32_t rows = pace_rows_apart(&sched->pace, streams, sched->options.step_stretch,
                                   sched->options.rows_max);
    if (was_apart || work->prompts[0] == 0 || streams + work->prompts[1] == 0) return false;
    if (rows > work->rest) rows = work->rest;
    return work->prompts[1] > 0 || pace_apart(&sched->pace, streams, rows);
}

/* A step of the crowding clients and of all answers. Their prompts and their answers alternate if
 * that makes steps shorter. Returns whether somebody sits out. */
static bool plan_crowd(struct sched *sched, const struct work *work, double bound_ns, bool waits) {
    struct sched_turns *turns = &sched->turns;
    int parts = pace_turns(&sched->pace, work->streams[0], work->streams[1], bound_ns);
    bool first =
        waits && work->served[0] / SCHED_PROMPT_TURN <= work->served[1] / SCHED_PROMPT_TURN;
    bool alternate = parts > 1 && work->prompts[1] > 0 && !first;
    if (waits && parts == 1) parts = 2;
    turns->reads = alternate && !turns->reads;
    if (turns->reads)
        set_aside(sched, true, false);
    else
        rotate_answers(sched, work, parts);
    if (waits) set_aside(sched, false, true);
    if (turns->reads) return true;
    if (alternate || (first && turns->streams > 0)) set_aside(sched, true, true);
    return waits || parts > 1;
}

static bool plan_step_turns(struct sched *sched) {
    struct sched_turns *turns = &sched->turns;
    bool was_apart = turns->apart;
    int32_t reads = sched->options.step_stretch > 0 ? queue_find_crowd(&sched->queue) : 0;
    sched_skip_turns(sched);
    if (reads == 0) return false;
    struct work work = find_work(sched);
    turns->streams = work.streams[0] + work.streams[1];
    turns->rest = work.rest;
    turns->apart = is_apart(sched, &work, was_apart);
    if (turns->apart) {
        set_aside(sched, false, false);
        set_aside(sched, true, false);
        set_aside(sched, true, true);
        return true;
    }
    double bound_ns = pace_prompt_ns(&sched->pace, reads) / 2;
    bool waits = was_apart && work.prompts[0] > 0 && turns->streams + work.prompts[1] > 0;
    if (bound_ns <= 0) return false;
    if (waits || work.prompts[0] == 0) turns->bound_ns = bound_ns;
    return plan_crowd(sched, &work, bound_ns, waits);
}

bool sched_plan_turns(struct sched *sched) {
    bool some_sit_out = plan_step_turns(sched);
    sched->turns.apart_steps += sched->turns.apart;
    sched->turns.divided_steps += some_sit_out && !sched->turns.apart;
    return some_sit_out;
}

void sched_skip_turns(struct sched *sched) {
    sched->turns.apart = false;
    sched->turns.bound_ns = 0;
    for (int i = 0; i < sched->running; i++) sched->sequences[sched->order[i]].sits_out = false;
}

int32_t sched_prompt_rows(const struct sched *sched, int streams) {
    const struct sched_options *options = &sched->options;
    const struct sched_turns *turns = &sched->turns;
    if (turns->apart) {
        int32_t most =
            pace_rows_apart(&sched->pace, turns->streams, options->step_stretch, options->rows_max);
        return turns->rest - most <= most / 2 ? turns->rest : most; /* no short piece is left */
    }
    int32_t rows = pace_rows(&sched->pace, streams, options->step_stretch, options->rows_max);
    if (turns->bound_ns <= 0) return rows;
    return pace_rows_within(&sched->pace, streams, turns->bound_ns, rows);
}
