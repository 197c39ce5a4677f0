/* A draft model: a smaller model with the same tokens that guesses how answers go on, asked by
 * engine/steps/sched_drafter.c. Its guesses are a draft like any other
 * (engine/steps/sched_draft.c): they change what a step computes, never which tokens an answer has,
 * and neither does its failure.
 *
 * It has a backend and a cache of its own, with a slot for each of its texts. Of a text it
 * remembers at most `places` tokens: where one outgrows them, its slot is emptied and its last
 * tokens are read again. So no place lies beyond the model's positions, nothing is evicted, and a
 * text takes a fixed number of pages, which the cache has for all texts at once: no step can run
 * out of them. The first DRAFTER_SINKS tokens of a sequence are in front of each text, because
 * models attend to whatever comes first (arXiv 2309.17453).
 *
 * Thread: the engine thread. */
#ifndef KEEPD_ENGINE_STEPS_DRAFTER_H
#define KEEPD_ENGINE_STEPS_DRAFTER_H

#include "engine/steps/draft.h"
#include "engine/steps/pace.h"
#include "kernels/kern.h"

#define DRAFTER_COLD         2   /* its first steps, whose times say nothing of later ones */
#define DRAFTER_SKIPPED      256 /* steps without it after which its times are forgotten */
#define DRAFTER_SINKS        4
#define DRAFTER_ROWS         256 /* in one of its steps, at most */
#define DRAFTER_ASKED        32  /* texts in one of its steps, at most */
#define DRAFTER_PLACES_LEAST 128 /* room for the sinks, a reading, and two drafts */

struct drafter_options {
    struct kern *kern; /* with an open cache of `texts` slots; NULL: there is no draft model */
    void *model;
    int (*model_step)(void *model, const struct kern_batch *batch, const int32_t *want,
                      int want_count, const float **logits);
    int vocab;
    int texts;     /* most texts at once */
    int places;    /* tokens of a text, at least DRAFTER_PLACES_LEAST */
    double weight; /* bytes of its weights over those of the model that it guesses for: what a step
                      costs while that was not measured */
};

/* The part of a sequence's tokens that the draft model remembers. */
struct drafter_text {
    bool taken;
    int32_t from;    /* tokens from here on are behind the sinks; 0: none is left out */
    int32_t read;    /* tokens up to here are in the cache */
    int32_t guessed; /* behind them: guesses that were not known to be right */
    int32_t guesses[DRAFT_MAX];
};

/* A text that takes part in a step. Its cache has tokens[..end) afterwards; those from `known` on
 * are guesses. */
struct drafter_ask {
    struct drafter_text *text;
    const int32_t *tokens;
    int32_t known, end;
    struct kern_sample sample; /* how the next token is drawn, with `wants` */
    bool wants;
};

struct drafter {
    struct drafter_options options;
    struct pace pace; /* times of the draft model's steps: pace_note_drafts */
    int steps;        /* up to DRAFTER_COLD: further ones are not counted */
    int skipped;      /* steps of the scheduler since it was asked last */
    struct drafter_text *texts;
    struct kern_sampled *sampled; /* [DRAFTER_ASKED] the tokens that the last step drew: of the i-th
                                     text that wanted one */
    int32_t *rows;
};

void drafter_open(struct drafter *drafter, const struct drafter_options *options);
void drafter_close(struct drafter *drafter);

static inline bool drafter_is_open(const struct drafter *drafter) {
    return drafter->options.kern != NULL;
}

/* Takes an empty text; NULL: all are taken. */
struct drafter_text *drafter_take(struct drafter *drafter);
void drafter_drop(struct drafter *drafter, struct drafter_text *text); /* NULL is allowed */
void drafter_empty(struct drafter *drafter, struct drafter_text *text);

/* Brings the text to what is known of a sequence with `count` tokens: guesses that were wrong leave
 * the cache, as does everything where `count` and DRAFT_MAX more tokens have no place. The last
 * token stays unread. An error leaves a text that can only be dropped. */
int drafter_settle(struct drafter *drafter, struct drafter_text *text, const int32_t *tokens,
                   int32_t count);
/* Tokens that are to be read before the next guess. */
static inline int32_t drafter_behind(const struct drafter_text *text, int32_t count) {
    return count - text->read + (text->from > 0 && text->read == text->from ? DRAFTER_SINKS : 0);
}
/* Lets an empty text begin with the last `rows` tokens of `count`, and the first ones. */
void drafter_begin(struct drafter_text *text, int32_t count, int32_t rows);

/* Takes one step, with DRAFTER_ROWS rows at most. After an error the texts can only be dropped. */
int drafter_step(struct drafter *drafter, const struct drafter_ask *asks, int count);

#endif
