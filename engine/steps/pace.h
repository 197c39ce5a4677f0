/* How many prompt rows a step computes beside answers that are being generated, so that a long
 * prompt does not stall them: as many as lengthen the step to the given percentage of one without
 * prompts. The times are measured; the choice is a pure function of them. The same times say how
 * long a step would be, so that the scheduler can bound it (engine/steps/sched_turns.c).
 *
 * The choice changes when a token is computed, never which token: results do not depend on how
 * prompts are split (engine/steps/sched.h).
 *
 * Thread: the engine thread. */
#ifndef KEEPD_ENGINE_STEPS_PACE_H
#define KEEPD_ENGINE_STEPS_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* The fewest rows: the weights are read for each step, and fewer rows are not worth that. */
#define PACE_LEAST 32
/* Number of rows while times are unknown. */
#define PACE_FIRST 64
#define PACE_SIZES 12
/* The most turns that generating sequences take. */
#define PACE_TURNS 4

struct pace {
    /* Nanoseconds of a step without prompt rows; [i] is that of more than 2^(i-1) and up to 2^i
     * streams, the last also that of more; 0 = not known. */
    double idle_ns[PACE_SIZES];
    double idle_streams[PACE_SIZES]; /* mean number of streams in the steps of idle_ns */
    bool measured[PACE_SIZES];       /* otherwise inferred from a step with prompt rows */
    double row_ns;                   /* added by one prompt row; 0 = not known */
    /* Nanoseconds and rows of steps with prompt rows alone, [i] of more than 2^(i-1) and up to 2^i
     * rows, the last also of more; 0 = not known. */
    double prompt_ns[PACE_SIZES], prompt_rows[PACE_SIZES];
    /* Nanoseconds and rows of steps without prompt rows, drafts included, [i] of more than 2^(i-1)
     * and up to 2^i rows, the last also of more; 0 = not known. Doubted with every other step and
     * forgotten now and then, so that one slow step does not keep a number of rows from being tried
     * again. */
    double drafts_ns[PACE_SIZES], drafts_rows[PACE_SIZES];
    int drafts_noted; /* since they were forgotten last */
};

/* The part of a step of one row that a further row adds, while that was not measured. */
#define PACE_ROW_PART    0.12
#define PACE_DRAFT_STEPS 1024 /* steps after which the times of drafts are measured anew */
/* Part of the excess of drafts' times over the assumed ones that each step forgets */
#define PACE_DOUBT 0.04

/* The time that a step of prompts alone takes at most, about, and the least rows that it has. A
 * chat that arrives meanwhile is then read soon; fewer rows would cost more processor time for
 * each. */
#define PACE_ALONE_NS    4e8
#define PACE_ALONE_LEAST 256

/* Prompt rows for a step with `streams` generating sequences. `percent`: 0 = no limit. */
int32_t pace_rows(const struct pace *pace, int streams, int percent, int32_t rows_max);

/* Returns how long a step with `streams` generating sequences and no prompt rows takes, in
 * nanoseconds, by the nearest numbers that were measured. Where only larger or only smaller ones
 * were, the time is in proportion. 0: not known. */
double pace_streams_ns(const struct pace *pace, int streams);
/* Returns how long reading a prompt of `rows` rows takes alone, in nanoseconds; 0: not known. */
double pace_prompt_ns(const struct pace *pace, int32_t rows);
/* Returns whether these prompt rows are worth a step of their own, beside as many generating
 * sequences: whether their own time would grow by a quarter or more in a step with all. */
bool pace_apart(const struct pace *pace, int streams, int32_t rows);
/* Returns in how many turns, 1, 2 or 4, `many` of the generating sequences go on, so that a step
 * with one part of them and with all of the `few` others takes no longer than `bound_ns`. Only
 * while half of them take at most three quarters of the time: otherwise more turns gain little. */
int pace_turns(const struct pace *pace, int few, int many, double bound_ns);
/* Returns the prompt rows of a step without answers: as many as are read in the time by which those
 * of pace_rows would lengthen a step with them. */
int32_t pace_rows_apart(const struct pace *pace, int streams, int percent, int32_t rows_max);
/* Returns the prompt rows with which a step with `streams` generating sequences takes bound_ns. */
int32_t pace_rows_within(const struct pace *pace, int streams, double bound_ns, int32_t rows_max);

/* Returns the time of a step with `more` rows over that of one with `rows`, without prompts. */
double pace_growth(const struct pace *pace, int rows, int more);
/* Returns the time of a step with so many rows of one model over that of a step with `rows` rows of
 * another one, both without prompts. Where either was not measured yet, that of a step with one row
 * is supposed to be `part`. */
double pace_part(const struct pace *of, int more, const struct pace *pace, int rows, double part);
/* Notes that a step with so many rows, none of them a prompt's, took so long. */
void pace_note_drafts(struct pace *pace, int rows, int64_t ns);

/* Notes that a step with these rows and no drafts took so long, evictions not counted. */
void pace_note(struct pace *pace, int streams, int32_t prompt_rows, int64_t ns);

#endif
