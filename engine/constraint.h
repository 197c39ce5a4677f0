/* Constraints of requests: compiled languages, kept for later requests, and the state of one answer
 * in its language.
 *
 * The table belongs to the engine and is used by any thread, under its lock; compilation runs
 * outside of the lock. A language in use stays; of the others the CONSTRAINTS_KEPT used last stay.
 * The vocabulary's trie is built by the first request that needs it. */
#ifndef KEEPD_ENGINE_CONSTRAINT_H
#define KEEPD_ENGINE_CONSTRAINT_H

#include <pthread.h>

#include "base/sha256.h"
#include "constrain/constrain.h"
#include "constrain/limits.h"
#include "engine/engine.h"

#define CONSTRAINTS_KEPT 16
#define CONSTRAINT_TEXT_BYTES                                                                      \
    ((size_t)64 << 20)              /* the text of a constraint, from which its hash is made */
#define CONSTRAINT_NEWLINES      16 /* tokens that are line breaks only */
#define CONSTRAINT_NEWLINE_BYTES 2  /* line breaks of each, at most */

struct constraint_table {
    pthread_mutex_t lock;
    struct constrain_vocabulary vocabulary;
    struct constrain_tokens *tokens; /* NULL until needed */
    int32_t newlines[CONSTRAINT_NEWLINES];
    int newline_count;
    struct engine_constraint *first; /* the list begins with the one used last */
    int idle;                        /* constraints without users */
    struct constrain_budget budget;  /* memory of all of them */
};

struct engine_constraint {
    uint8_t key[SHA256_BYTES];
    struct constrain *language;
    const struct constraint_table *table;
    int users;
    struct engine_constraint *next;
};

void constraint_table_open(struct constraint_table *table,
                           const struct constrain_vocabulary *vocabulary);
void constraint_table_close(struct constraint_table *table); /* nothing is in use any more */
int constraint_open(struct constraint_table *table, const struct constrain_part *part,
                    struct engine_constraint **out, struct fault *fault);
void constraint_close(struct constraint_table *table, struct engine_constraint *constraint);

/* ---- One answer ------------------------------------------------------------------------------ */

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
    uint32_t begin; /* offset in the text of what the language describes */
    int skipped;    /* tokens of line breaks behind the reasoning */
    uint32_t *mask; /* owned */
};

/* Prepares an answer to `request`; ERR_NOMEM. */
int constraint_run_open(struct constraint_run *run, const struct engine_request *request);
void constraint_run_close(struct constraint_run *run);

/* Fills run->mask for the token after `text`. `ends`: tokens that end the answer, allowed where the
 * text is whole; `hold`: only where nothing else may follow. Errors as constrain_next; ERR_INVALID:
 * no token may follow. Phases NONE and THINKING have no mask. */
struct constraint_ends {
    const int32_t *ids;
    int count;
    bool hold;
};
int constraint_fill(struct constraint_run *run, const struct engine_request *request,
                    const char *text, size_t size, const struct constraint_ends *ends);

static inline bool constraint_masks(const struct constraint_run *run) {
    return run->phase != CONSTRAINT_NONE && run->phase != CONSTRAINT_THINKING;
}

/* Notes a token that does not end the answer, after which the text has `size` bytes, `old_size`
 * before. *whole: nothing may follow. Errors as constrain_read. */
int constraint_note(struct constraint_run *run, const struct engine_request *request, int32_t token,
                    const char *text, size_t old_size, size_t size, bool *whole);

#endif
