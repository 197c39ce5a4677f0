/* How many prompt rows a step computes beside answers that are being generated, so that a long
 * prompt does not stall them: as many as lengthen the step to the given percentage of one without
 * prompts. The times are measured; the choice is a pure function of them.
 *
 * The choice changes when a token is computed, never which token: results do not depend on how
 * prompts are split (engine/sched.h).
 *
 * Thread: the engine thread. */
#ifndef KEEPD_ENGINE_PACE_H
#define KEEPD_ENGINE_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* At least this many rows: fewer read the weights again and again for little. */
#define PACE_LEAST 32
/* This many while times are unknown. */
#define PACE_FIRST 64
#define PACE_SIZES 12

struct pace {
    /* Nanoseconds of a step without prompt rows; [i] is that of more than 2^(i-1) and up to 2^i
     * streams, the last also that of more; 0 = not known. */
    double idle_ns[PACE_SIZES];
    bool measured[PACE_SIZES]; /* otherwise inferred from a step with prompt rows */
    double row_ns;             /* added by one prompt row; 0 = not known */
};

/* Prompt rows for a step with `streams` generating sequences. `percent`: 0 = no limit. */
int32_t pace_rows(const struct pace *pace, int streams, int percent, int32_t rows_max);

/* Notes that a step with these rows took so long, evictions not counted. */
void pace_note(struct pace *pace, int streams, int32_t prompt_rows, int64_t ns);

#endif
