/* A sequence: one choice of an admitted job, from its first prompt token to its last answer token.
 * Choice 0 reads the prompt; the others follow it until their streams are forked from its.
 *
 * It owns the token list (which a retained conversation inherits) and writes the job's output. The
 * engine thread alone touches it; readers on the loop see only the job's atomics. */
#ifndef KEEPD_ENGINE_STEPS_SEQ_H
#define KEEPD_ENGINE_STEPS_SEQ_H

#include "engine/engine_job.h"
#include "engine/kept/conversation.h"
#include "engine/steps/constraint.h"
#include "engine/steps/draft.h"
#include "engine/steps/drafter.h"
#include "engine/steps/dry.h"
#include "engine/steps/grid.h"
#include "engine/steps/loops.h"
#include "engine/steps/tally.h"
#include "paging/due.h"

/* Facts about the model's text that a sequence needs. */
struct seq_text {
    size_t (*token_bytes)(const void *arg, int32_t id, const char **bytes);
    /* Writes at most `most` tokens of a text, without special ones; returns how many; 0 also
     * where the text is not UTF-8 or there is no memory. NULL: nothing is known of texts. */
    int32_t (*encode)(const void *arg, const char *text, size_t size, int32_t *ids, int32_t most);
    const void *arg;
    size_t token_bytes_max;
    const int32_t *eos; /* ends an answer unless ignore_eos */
    int eos_count;
};

#define SEQ_BORDERS 4

struct sequence {
    struct engine_job *job; /* NULL = free */
    int index;              /* number of the choice */
    struct engine_choice *choice;
    struct sequence *leader; /* reads the prompt for this one, which has no streams yet; or NULL */
    int32_t slot;
    struct kv_params kv;
    struct due_state due;
    bool may_evict; /* whether it may in this step, see engine/steps/sched_evict.c */
    bool changed;   /* the streams changed otherwise than by an append since the last live report */
    int64_t sort_key;    /* set by sched_sort_in */
    uint64_t due_since;  /* counters.steps when it was first refused; 0: it was not */
    bool sits_out;       /* takes no part in this step: see engine/steps/sched_turns.c */
    uint64_t last_turn;  /* number of the turn in which its answer went on */
    int32_t *tokens;     /* [prompt_count + max_tokens]; owned. Behind token_count: drafted ones */
    int32_t token_count; /* known: prompt and sampled; the last sampled one is not appended yet */
    int32_t prompt_count;
    struct grid_cursor grid; /* the token that is appended next; zeros where places are plain */
    int64_t pages_reserved;
    int32_t dropped;
    int32_t evicted_at; /* as in struct conversation, like those that follow */
    bool exact;
    struct reserve_turn began;
    int32_t began_held;
    uint64_t left;
    int32_t borders[SEQ_BORDERS]; /* ascending: tokens after which it leaves a prefix, see
                                     engine/steps/sched_checkpoint.c */
    int border_count;
    uint64_t origin;      /* the conversation it continues; 0 = none */
    uint64_t origin_file; /* conversation whose file is superseded if `origin` has left memory */
    int32_t *ends;        /* EOS and stop ids, for min_tokens and constraints; owned or NULL */
    int32_t end_count;
    struct tally tally;              /* for penalties; closed without */
    struct dry dry;                  /* the same */
    struct loops loops;              /* closed without a rule */
    struct drafter_text *model_text; /* the part that the draft model remembers; NULL: none */
    bool model_failed;               /* the draft model is not asked again */
    struct draft draft; /* closed: the sequence has none. What follows is that of the step: */
    int32_t draft_most; /* tokens that may be drafted */
    int32_t draft_found, drafted,
        confirmed;       /* numbers of drafted tokens: found, given a row, and drawn */
    double draft_chance; /* likelihood that all its drafted tokens with a row are drawn */
    struct constraint_run constraint;
    bool thinks;     /* with think_bounded: the answer is between think_begin and think_end */
    int32_t thought; /* tokens of it since think_begin */
    struct kern_logit_bias think_ends;
    bool deferred;                    /* the mask thread makes its mask */
    uint32_t text_size;               /* bytes of choice->text written */
    enum engine_finish finish;        /* decided, not yet published */
    struct kern_trace trace;          /* the present eviction's, engine/steps/trace.h */
    struct engine_eviction *eviction; /* record of that eviction; NULL = none */
};

int seq_job_choices(const struct engine_request *request); /* at least 1 */

/* Bookkeeping of an eviction. */
void seq_evicted(struct sequence *seq);

/* Numbers of the job's vector, of a model whose vectors have `width`. */
int seq_pooled_count(const struct engine_request *request, int width);
/* Output arrays of a job, sized for the whole answer; `streams`: those of one sequence; `width`:
 * numbers of a vector, 0 where there are none; `summed`: those of a hidden state, where a vector
 * needs all of them, else 0. ERR_NOMEM frees what was taken. */
int seq_job_alloc(struct engine_job *job, size_t token_bytes_max, int64_t streams, int width,
                  int summed);

/* Prepares a free sequence for choice `index` of `job`, with nothing cached, no slot and no leader.
 * ERR_NOMEM leaves it free. */
int seq_open(struct sequence *seq, struct engine_job *job, int index, const struct kv_params *kv,
             const struct seq_text *text);
void seq_close(struct sequence *seq); /* frees; the job is not touched */

static inline bool seq_prefilling(const struct sequence *seq) {
    return !seq->leader && seq->due.tokens < seq->prompt_count;
}
static inline bool seq_generating(const struct sequence *seq) {
    return !seq->leader && seq->due.tokens >= seq->prompt_count;
}
int32_t seq_output_count(const struct sequence *seq);

/* A constrained answer waits for the mask of its next token, or for the decision that it has ended.
 * It takes part in no step until then. */
static inline bool seq_waits(const struct sequence *seq) {
    return seq->constraint.waits && seq->finish == ENGINE_RUNNING;
}
/* Ends the waiting, and sets seq->finish where the answer is whole. ERR_BUSY: not yet; `wake` is
 * called in time. Another error is the request's: its constraint ran into a limit. */
int seq_settle(struct sequence *seq, struct constraint_work *work, struct mask_wake wake);

/* The sampling parameters of the sequence's next token. */
void seq_sample_params(struct sequence *seq, struct kern_sample *params);
/* How likely token number `index` of those that the request judges is. */
void seq_judge_params(const struct sequence *seq, int32_t index, struct kern_sample *params);
/* The same for the score of prompt token `index`. */
void seq_score_params(const struct sequence *seq, int32_t index, struct kern_sample *params);

/* Returns where the alternatives of the token that is sampled next, or of the prompt's token
 * `scored` (-1: none), are written, and their number, before it is recorded; NULL: the backend
 * reports them. */
struct engine_top *seq_wide_top(const struct sequence *seq, int32_t scored, int32_t *count);

/* Records a sampled token: output arrays, text, stop conditions. Sets seq->finish when it ends. A
 * constrained answer may wait afterwards: seq_settle. */
void seq_add_token(struct sequence *seq, const struct seq_text *text,
                   const struct kern_sampled *sampled);

/* Records the score of prompt token `index` (echo). */
void seq_add_prompt_score(struct sequence *seq, int32_t index, const struct kern_sampled *sampled);

/* Length of the longest suffix of text that could still become a stop string. For tests too. */
size_t seq_stop_tail(const struct engine_stop *stops, int32_t count, const char *text, size_t size);

#endif
