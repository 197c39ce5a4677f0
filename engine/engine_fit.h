/* Fits retention gates to a model: what `keepd fit` does, and a start that needs gates. */
#ifndef KEEPD_ENGINE_ENGINE_FIT_H
#define KEEPD_ENGINE_ENGINE_FIT_H

#include "base/err.h"
#include "engine/engine_options.h"

#define ENGINE_FIT_TOKENS 1024 /* most tokens of a text */

enum engine_fit_work { ENGINE_FIT_WAITING, ENGINE_FIT_MEASURING, ENGINE_FIT_FITTING };

/* The file that is written: a new one, under a name that is not taken; one that takes the place of
 * an older one; or one that is fitted once for all: the file that another process has written in
 * the meantime will do. */
enum engine_fit_out { ENGINE_FIT_NEW, ENGINE_FIT_REPLACE, ENGINE_FIT_ONCE };

/* Text that the model reads: UTF-8, divided into texts of ENGINE_FIT_TOKENS tokens. */
struct engine_fit_source {
    const char *text;
    size_t size;
    bool chats; /* the text is chats: what a template gets, JSON on a line for each, with line
                   ends */
    struct picture *const *pictures; /* [picture_count] all chats' pictures, in order */
    int picture_count;
};

struct engine_fit {
    const struct engine_fit_source *sources; /* [source_count] */
    int source_count;
    const char *out; /* the gates' file */
    enum engine_fit_out how;
    /* File of measurements (engine/fit_work.h), with which a later fit of this model goes on; NULL:
     * none. While another process uses it, a fit with ENGINE_FIT_NEW goes without it, and others
     * wait. */
    const char *work;
    int minutes; /* 0: as long as it takes; otherwise measuring ends after three quarters */
    int steps;   /* most steps of the fit; 0: FIT_STEPS (fit/fit.h) */
    uint64_t seed;
    /* Called once where it waits, when measuring and fitting begin, and after every text that it
     * measures and every step: then false ends the work with what there is. `lost`: the part of
     * what entries of texts held out are worth that soft evictions lose, INFINITY: unknown. May be
     * NULL. */
    bool (*progress)(void *arg, enum engine_fit_work work, int done, int total, double lost);
    void *arg;
};

/* A text that the fit has not learnt from. */
struct engine_fit_text {
    int32_t *ids;
    int count;
    struct picture **pictures; /* [picture_count] each with a count that the text holds */
    struct picture_rows *picture_rows;
    int picture_count, picture_row_count; /* as in struct engine_request */
};

struct engine_fitted {
    bool found;         /* another process has written the file, ENGINE_FIT_ONCE; the rest is 0 */
    int texts, entries; /* measured, and entries of each */
    int resumed;        /* texts that an earlier fit had measured */
    int steps, best;    /* as in struct fit_result (fit/fit.h), also the next two */
    double before, lost;
    struct engine_fit_text *held_out; /* [held_out_count] freed by engine_fitted_close */
    int held_out_count;
};

/* Fits retention gates to the model (fit/fit.h), as it is served with these options, and writes
 * them. Memory: that of the model, one text's cache, and the measurement of one text. Without a
 * work file, or where its disk is full, ENGINE_FIT_BYTES of measurements, and up to two texts more.
 * Texts with pictures also take the encoder, and the rows of one text's tiles.
 * On failure fault->field is as in engine_open, or "text" or "out", and nothing is written. */
#define ENGINE_FIT_BYTES ((size_t)160 << 20)
int engine_fit_gates(const struct engine_options *options, const struct engine_fit *fit,
                     struct engine_fitted *out, struct fault *fault);
void engine_fitted_close(struct engine_fitted *fitted);
/* Checks what engine_fit_gates would refuse, and says what a start would find: found->gates_from
 * and gates_cached. The caller frees found->tool_template. */
int engine_find_gates(const struct engine_options *options, struct engine_found *found,
                      struct fault *fault);
/* Takes out of the options what bounds the requests of a server and would refuse those of a fit:
 * the cap on budgets, and what happens beyond the model's positions. */
static inline void engine_fit_options(struct engine_options *own) {
    own->kv_budget_max = 0;
    own->kv_budget_given = false;
    own->kv_overflow = ENGINE_OVERFLOW_DEFAULT;
}

#endif
