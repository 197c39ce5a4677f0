/* Constraints of requests: compiled languages, kept for later requests, and the state of one answer
 * in its language.
 *
 * The table belongs to the engine and is used by any thread, under its lock; compilation runs
 * outside of the lock, in a thread of its own with a lower priority: a costly language takes little
 * from the threads that compute. A language in use stays; of the others the CONSTRAINTS_KEPT used
 * last stay. The vocabulary's trie is built by the first request that needs it.
 *
 * The engine's thread makes the masks that cost little. In one step it spends at most
 * CONSTRAINT_STEP_WORK on all of them, and CONSTRAINT_ANSWER_WORK on one. A mask that costs more is
 * made by engine/steps/mask_thread.h, and its answer waits, so a costly language slows its own
 * answers and no others. Where an answer's last mask was costly, the next one is left to the thread
 * at once, unless it is known. */
#ifndef KEEPD_ENGINE_STEPS_CONSTRAINT_H
#define KEEPD_ENGINE_STEPS_CONSTRAINT_H

#include <pthread.h>

#include "base/sha256.h"
#include "constrain/constrain.h"
#include "constrain/limits.h"
#include "engine/engine_request.h"
#include "engine/steps/mask_thread.h"

#define CONSTRAINTS_KEPT 16
/* Compiled at the same time; more threads stay free to read requests */
#define CONSTRAINTS_AT_ONCE 2
/* The text of a constraint, from which its hash is made */
#define CONSTRAINT_TEXT_BYTES    ((size_t)64 << 20)
#define CONSTRAINT_STEP_WORK     24000 /* units of constrain_effort: a few milliseconds */
#define CONSTRAINT_ANSWER_WORK   8000
#define CONSTRAINT_KNOWN_WORK    64   /* is enough for a mask that is known */
#define CONSTRAINT_FORESEE_WORK  4000 /* in one step, on bytes that are drafted */
#define CONSTRAINT_NICE          5    /* a quarter of a processor that others want to use, too */
#define CONSTRAINT_NEWLINES      16   /* tokens that are line breaks only */
#define CONSTRAINT_NEWLINE_BYTES 2    /* line breaks of each, at most */

struct constraint_table {
    pthread_mutex_t lock;
    struct constrain_vocabulary vocabulary;
    struct constrain_tokens *tokens; /* NULL until needed */
    int32_t newlines[CONSTRAINT_NEWLINES];
    int newline_count;
    struct engine_constraint *first; /* the list begins with the one used last */
    int idle;                        /* constraints without users */
    int compiling;                   /* languages */
    struct constrain_budget budget;  /* memory of all of them */
    struct mask_thread masks;
};

struct engine_constraint {
    uint8_t key[SHA256_BYTES];
    struct constrain *language;
    struct constraint_table *table;
    int users;
    struct engine_constraint *next;
};

void constraint_table_open(struct constraint_table *table,
                           const struct constrain_vocabulary *vocabulary);
/* Called when masks must no longer wake a replica. */
void constraint_table_stop(struct constraint_table *table);
void constraint_table_close(struct constraint_table *table); /* no constraint is in use any more */
int constraint_open(struct constraint_table *table, const struct constrain_part *part,
                    struct engine_constraint **out, struct fault *fault);
void constraint_close(struct constraint_table *table, struct engine_constraint *constraint);

/* ---- One answer ---- */

enum constraint_phase {
    CONSTRAINT_NONE,     /* the answer is free */
    CONSTRAINT_BEGIN,    /* reasoning may come first */
    CONSTRAINT_THINKING, /* reasoning: free, but the answer may not end in it */
    CONSTRAINT_AFTER,    /* behind reasoning: line breaks may come first */
    CONSTRAINT_ON
};

struct constraint_run {
    enum constraint_phase phase;
    struct constrain_at at;
    uint32_t begin;         /* offset in the text of what the language describes */
    int skipped;            /* tokens of line breaks behind the reasoning */
    uint32_t *mask;         /* owned */
    bool waits;             /* the mask for the present text is not made yet */
    bool grown;             /* the present text has a token of the language */
    bool costly;            /* the last mask needed more than one slice of the thread */
    struct mask_task *task; /* owned; NULL: none */
};

/* Returns the last token of the prompt that is not white space alone: a template may have written a
 * tag, and line breaks behind it. */
int32_t constraint_last_word(const struct engine_request *request,
                             size_t (*token_bytes)(const void *arg, int32_t id, const char **bytes),
                             const void *arg);

/* Prepares an answer to `request`; ERR_NOMEM. */
int constraint_run_open(struct constraint_run *run, const struct engine_request *request);
void constraint_run_close(struct constraint_run *run, const struct engine_request *request);

static inline bool constraint_masks(const struct constraint_run *run) {
    return run->phase != CONSTRAINT_NONE && run->phase != CONSTRAINT_THINKING;
}

/* Notes a token that does not end the answer, after which the text has `size` bytes, `old_size`
 * before. */
void constraint_note(struct constraint_run *run, const struct engine_request *request,
                     int32_t token, const char *text, size_t old_size, size_t size);

/* The text that a mask follows. */
struct constraint_text {
    const char *text;
    size_t size;
    bool last;           /* no token follows: no mask is made, only `whole` is decided */
    const int32_t *ends; /* tokens that end the answer, allowed where the text is whole */
    int end_count;
    bool hold; /* ends are allowed only if nothing else may follow */
    struct mask_wake wake;
};

/* Work of one step on masks. */
struct constraint_work {
    uint64_t left; /* units that the step may still spend */
    uint64_t spent;
};

/* Fills run->mask for the token after the text. *whole: the last token belonged to the language,
 * and nothing may follow it. ERR_BUSY: not yet; `wake` is called when the result is there. Other
 * errors are those of constrain_next; ERR_INVALID: no token may follow. */
int constraint_fill(struct constraint_run *run, const struct engine_request *request,
                    const struct constraint_text *text, struct constraint_work *work, bool *whole);
/* Writes at most `most` bytes that probably follow the text of the last mask (constrain_foresee);
 * returns how many. */
size_t constraint_foresee(const struct constraint_run *run, const struct engine_request *request,
                          const char *text, size_t size, char *out, size_t most,
                          struct constraint_work *work);

#endif
