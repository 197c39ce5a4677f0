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
 * A block of the model's own files that predicts further tokens (model_has_block) is used as a
 * draft model, too. Beside each token it reads the hidden state from which that was drawn. These
 * are not kept: the scheduler hands over those of an answer's tokens as they are drawn
 * (drafter_hold), so the block remembers nothing of a prompt or of an earlier turn, and where too
 * many wait, its text begins anew. Behind a guess it reads its own hidden state; afterwards what it
 * read of guesses is dropped, also if they were right.
 *
 * Thread: the engine thread. */
#ifndef KEEPD_ENGINE_STEPS_DRAFTER_H
#define KEEPD_ENGINE_STEPS_DRAFTER_H

#include "engine/steps/draft.h"
#include "engine/steps/pace.h"
#include "kernels/kern.h"

#define DRAFTER_COLD         2   /* first steps, whose times are not typical */
#define DRAFTER_SKIPPED      256 /* steps without use after which its times are forgotten */
#define DRAFTER_SINKS        4
#define DRAFTER_ROWS         256 /* the most rows in one of its steps */
#define DRAFTER_ASKED        32  /* the most texts in one of its steps */
#define DRAFTER_PLACES_LEAST 128 /* room for the sinks, a reading, and two drafts */

#define DRAFTER_HELD       64 /* most hidden states of a text that wait to be read */
#define DRAFTER_READ_AFTER 20 /* many answers are shorter, and would only pay for the reading */

struct drafter_options {
    struct kern *kern; /* with an open cache of `texts` slots; NULL: there is no draft model */
    void *model;
    /* `hidden`: [batch->rows, width], NULL without a width */
    int (*model_step)(void *model, const struct kern_batch *batch, const float *hidden,
                      const int32_t *want, int want_count, const float **logits);
    /* A block's hidden states of the rows that its last step wanted, its backend's memory. */
    const float *(*wanted_hidden)(void *model);
    int width;      /* numbers of the hidden states that a block reads; 0: it is no block */
    int vocab;      /* numbers of a row of its logits */
    int texts;      /* most texts at once */
    int places;     /* tokens of a text, at least DRAFTER_PLACES_LEAST */
    int read_after; /* tokens that an answer has before its text is read, such as DRAFTER_READ_AFTER
                     */
    double weight;  /* bytes of its weights over those of the model whose answers it guesses: the
                       supposed cost of a step while none was measured */
};

/* The part of a sequence's tokens that the draft model remembers. */
struct drafter_text {
    bool taken;
    int32_t sinks;   /* tokens in front, if `from` is not 0 */
    int32_t held;    /* hidden states of the tokens from `read` on that wait to be read */
    int32_t from;    /* tokens from here on follow the sinks; 0: no token is left out */
    int32_t read;    /* tokens up to here are in the cache */
    int32_t guessed; /* how many guesses follow those; it was not known that they are right */
    int32_t guesses[DRAFT_MAX];
};

/* A text that takes part in a step. Afterwards its cache has tokens[..end); those from `known` on
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
    int steps;        /* steps so far, counted up to DRAFTER_COLD */
    int skipped;      /* steps of the scheduler since the draft model was last asked */
    struct drafter_text *texts;
    struct kern_sampled *sampled; /* [DRAFTER_ASKED] tokens that the last step drew; the i-th is
                                     that of the i-th text that wanted one */
    int32_t *rows;
    /* [texts][DRAFTER_HELD + 1][width] that wait; the last one is of the last guess */
    float *hidden;
    float *inputs; /* [DRAFTER_ROWS][width] of the step */
    int choices;   /* the first tokens of the draft model's, of which a guess is one */
};

/* Memory of drafter_options.width, beside the cache: of a text's hidden states, and of a step's. */
static inline int64_t drafter_text_bytes(int64_t width) {
    return (DRAFTER_HELD + 1) * width * (int64_t)sizeof(float);
}
static inline int64_t drafter_input_bytes(int64_t width) {
    return DRAFTER_ROWS * width * (int64_t)sizeof(float);
}

/* answer_vocab: tokens of the model whose answers are guessed. */
void drafter_open(struct drafter *drafter, const struct drafter_options *options, int answer_vocab);
void drafter_close(struct drafter *drafter);

static inline bool drafter_is_open(const struct drafter *drafter) {
    return drafter->options.kern != NULL;
}

/* Returns an empty text for use; NULL: all are in use. */
struct drafter_text *drafter_take(struct drafter *drafter);
void drafter_drop(struct drafter *drafter, struct drafter_text *text); /* NULL is allowed */
void drafter_empty(struct drafter *drafter, struct drafter_text *text);

/* Returns where the hidden state is to be written from which the sequence's token number `token`
 * was drawn. Tokens follow each other; otherwise the text begins anew with this one. */
float *drafter_hold(struct drafter *drafter, struct drafter_text *text, int32_t token);

/* Removes from the cache what is not part of a sequence with `count` tokens: guesses that were
 * wrong, and everything if `count` and DRAFT_MAX more tokens have no places. The last token stays
 * unread. After an error the text can only be dropped. */
int drafter_settle(struct drafter *drafter, struct drafter_text *text, const int32_t *tokens,
                   int32_t count);
/* Returns how many tokens must be read before the next guess. */
static inline int32_t drafter_behind(const struct drafter_text *text, int32_t count) {
    return count - text->read + (text->from > 0 && text->read == text->from ? text->sinks : 0);
}
/* Makes an empty text begin with the sinks and the last `rows` of `count` tokens. */
void drafter_begin(struct drafter_text *text, int32_t count, int32_t rows);

/* Computes one step, of DRAFTER_ROWS rows at most. After an error the texts can only be dropped. */
int drafter_step(struct drafter *drafter, const struct drafter_ask *asks, int count);

#endif
