/* Drafts: tokens with which a sequence probably goes on, found in its own text, and behind those
 * that its language leaves to be written (constrain/foresee.h); or those that a draft model guesses
 * (engine/steps/sched_drafter.c).
 *
 * The last DRAFT_KEY tokens are looked for in the text so far: the prompt and the answer, and in
 * front of them a text that the request predicts. What followed there is the draft. Places with the
 * same key are chained, the newest first, as in deflate (RFC 1951, section 4); of DRAFT_CHAIN of
 * them, and of the place where the last draft went on, the one is taken that has the longest text
 * in common (prompt lookup, as in arXiv 2304.04487).
 *
 * How many drafted tokens the model confirms depends on the length of that common text, so
 * confirmations are counted for classes of it, for foreseen tokens, and for classes of how sure the
 * draft model was. Drafts change what a step
 * computes, never which tokens an answer has: see engine/steps/sched_draft.c.
 *
 * Memory: two int32 for every token. Owned by its sequence; the engine thread alone uses it. */
#ifndef KEEPD_ENGINE_STEPS_DRAFT_H
#define KEEPD_ENGINE_STEPS_DRAFT_H

#include <stdint.h>

#define DRAFT_KEY      3    /* tokens that two places must have in common */
#define DRAFT_CHAIN    16   /* places that one search compares */
#define DRAFT_LONGEST  32   /* common tokens that are counted */
#define DRAFT_MAX      15   /* drafted tokens of a sequence in one step */
#define DRAFT_NOTED    8192 /* places that one search adds to the chains */
#define DRAFT_SURENESS 5    /* classes of how sure a draft model is */
/* Bounds of what is remembered of a draft model's costs and gains, so that neither long luck nor
 * one slow step decides for long. */
#define DRAFT_LOST_LEAST (-8.0f)
#define DRAFT_LOST_MOST  8.0f
/* Classes of drafted tokens: those found in the text, by the number of common tokens, up to 4, 8,
 * 16, and more; foreseen ones; and those of a draft model, by the probability that it gave them. */
enum { DRAFT_FORESEEN = 4, DRAFT_MODEL, DRAFT_CLASSES = DRAFT_MODEL + DRAFT_SURENESS };

struct draft {
    const int32_t *predicted; /* [predicted_count] text that the request predicts; its places come
                                 before those of the text */
    int32_t predicted_count;
    /* Places are numbered from the first predicted token on. */
    int32_t *heads; /* [1 << bits] newest place of each key, plus 1; 0: none. Owned; NULL: closed */
    int32_t *older; /* [room] the next older place with the same key, plus 1; 0: none. Owned */
    int bits;
    int32_t noted;    /* places that are in the chains */
    int32_t from;     /* place at which the last draft began; -1: none */
    int32_t begun;    /* how many tokens the text had before that draft */
    int32_t foreseen; /* how many tokens at the beginning of the last draft were foreseen; `from` is
                         behind them */
    int length_class; /* class of the tokens behind the foreseen ones */
    int32_t modelled; /* tokens of the last draft if a draft model guessed them; else 0 */
    uint8_t sureness[DRAFT_MAX]; /* classes of these tokens */
    float model_rate;            /* mean rate of a draft model's tokens, as far as it is known */
    /* Costs of a draft model, in steps without it, less the tokens that it has gained and what it
     * may cost in each step: DRAFT_LOST_LEAST..DRAFT_LOST_MOST. */
    float model_lost;
    float tried[DRAFT_CLASSES], confirmed[DRAFT_CLASSES]; /* counts of recent drafted tokens */
};

/* `room`: tokens that prompt and answer can have. The predicted text, which is borrowed, is
 * expected right behind the `prompt_count` tokens of the prompt. ERR_NOMEM leaves it closed. */
int draft_open(struct draft *draft, const int32_t *predicted, int32_t predicted_count,
               int32_t prompt_count, int32_t room);
void draft_close(struct draft *draft);

/* Writes at most `most` tokens behind the text, and returns how many; 0: nothing was found, or not
 * all of a long text is in the chains yet. `count`: tokens of the text, never fewer than at the
 * last call; `tokens` has room for `most` more. `foreseen`: [foreseen_count] tokens that the
 * language leaves to be written; the draft begins with them, unless those found in the text are
 * confirmed more often. */
int32_t draft_find(struct draft *draft, int32_t *tokens, int32_t count, const int32_t *foreseen,
                   int32_t foreseen_count, int32_t most);
/* Returns the part of drafted tokens like the i-th of the last draft that are confirmed if the one
 * before is: 0..1. */
double draft_rate(const struct draft *draft, int32_t i);
/* Records that so far the draft consists of tokens that a draft model guessed, the last one with
 * this probability. */
void draft_add_model(struct draft *draft, double probability);
/* Records that the draft model took the time of `steps` steps without it. Negative: it gained as
 * many tokens, or may take as much more time. */
void draft_charge_model(struct draft *draft, double steps);
/* Records a step in which the draft model was not asked because too few of its tokens are
 * confirmed. */
void draft_skip_model(struct draft *draft);
/* Records that of `tried` tokens of the last draft the first `confirmed` were right; tried 0: the
 * draft was found but not used. */
void draft_learn(struct draft *draft, int32_t tried, int32_t confirmed);

#endif
