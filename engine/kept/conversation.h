/* Conversations outlive requests. When a turn ends, its streams stay in their cache slot, and later
 * requests continue copy-on-write forks of them.
 *
 * Match: the longest common token prefix within one space (key, salt, model) and equal kv
 * parameters. At least one prompt token is always left to compute. A conversation serves a prompt
 * in one of two ways:
 *
 * - The prompt extends it: the prompt repeats all tokens up to the end of the last prompt. Tokens
 *   of the answer may be dropped (templates strip reasoning, text does not always re-tokenise
 *   alike, users edit the last answer). A new turn begins there. If every eviction so far was one
 *   that a request started from nothing would have made, the request continues as that request: see
 *   below.
 * - It is cut: the prompt repeats only its first tokens. Nothing was evicted after the conversation
 *   had `evicted_at` tokens, and it has as many shifts (kernels/places.h) as the cut, so no
 *   decision depends on the tokens behind a cut from there on, and the streams cut there are
 *   bitwise those of a sequence that never had these tokens. The request then continues the turn
 *   that made the conversation, as if it had read the tokens up to the cut itself. Its answer is
 *   bitwise the one that it would give if it had continued where that turn began; if that turn
 *   began from nothing, the one without reuse. Four things limit where a cut can be:
 *     - that turn evicted as every prompt with these tokens does (`exact`);
 *     - the cut lies before the next eviction of such a prompt;
 *     - rules that add up the attention of every query cannot subtract that of later tokens: they
 *       are not cut;
 *     - rules with an observation window need it full again at the next eviction.
 *   A model with recurrent states has no cut but the end (kv_params.whole): a state cannot go back.
 *   Then a prompt is read again from the longest conversation or checkpoint whose tokens it repeats
 *   all; for this each sequence leaves a prefix just before its prompt's last token.
 *   A prompt that differs earlier is computed again, because the evictions chose among the earlier
 *   tokens with later tokens in view.
 *
 * Checkpoints are conversations that a running sequence leaves behind
 * (engine/steps/sched_checkpoint.c). One that it leaves just before it evicts serves where the
 * conversation itself can no longer be cut. It goes before the conversation where a prompt drops
 * the whole answer, as templates do whose answers begin with reasoning: with a budget the answer
 * has pushed out entries of the prompt, and the checkpoint has them. A prefix is a checkpoint that
 * it leaves in the middle of its prompt, where other prompts may part from it. A prefix belongs to
 * no dialogue, and because it ends where the common tokens end, it serves rules that cannot be cut,
 * too. Checkpoints are never written to disk.
 *
 * Removal: when places or pages are needed, superseded conversations are removed first, the least
 * recently used one before others. Each other conversation has a product: how often conversations
 * were used since its own last use, times what its client holds. The one with the largest product
 * is removed. So of one client's conversations the least recently used one is removed first, and of
 * two clients the one that holds more loses first, unless it used its conversations much later. A
 * client that fills the table removes its own conversations, and those of a client that is away do
 * not stay for ever. A conversation is superseded while exactly one kept turn continued it: that
 * turn holds all of it, and only a retry or another last turn would ask for it. When two or more
 * turns continued it, it is a history that branches, and is kept like any other. A checkpoint
 * begins as superseded, by the sequence that left it: a prefix that no second prompt used goes
 * before any conversation, one that was used is kept like a history that branches. The list of a
 * conversation's tokens counts as pages (keeper_pages_with).
 *
 * Pins: a pinned conversation is removed only for its own client, or for a request that could not
 * fit beside the pins at all. Pins have less than half of the pool and of the places, so all others
 * find some. When a turn that asks for a pin continues a pinned one of its client, the pin moves to
 * it. A pin holds in memory; a conversation read back from disk has none.
 *
 * Time to live: a conversation with one is deleted, in memory and on disk, when it was not used for
 * so long. Only this and the writing of idle conversations look at the clock; both happen between
 * steps and only add to or take from the states that a request may start from.
 *
 * Owner: the keeper (engine/kept/keeper.h), on the engine thread. The slots are the keeper's, too;
 * this table only remembers them. */
#ifndef KEEPD_ENGINE_KEPT_CONVERSATION_H
#define KEEPD_ENGINE_KEPT_CONVERSATION_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/disk/conversation_key.h"
#include "engine/engine_stats.h"
#include "paging/due.h"

/* State of a conversation's copy on disk. */
enum conversation_saved {
    CONVERSATION_UNSAVED,
    CONVERSATION_WRITING, /* copied out: its pages may be freed */
    CONVERSATION_SAVED,
    CONVERSATION_FAILED,     /* writing failed; tried again when another write succeeds */
    CONVERSATION_NOT_SAVABLE /* the file would be larger than state-bytes */
};

/* Cuts of fewer tokens are not worth a fork: all prompts of a template begin with the same few. */
#define CONVERSATION_CUT_MIN 16

/* Prefixes of fewer tokens, or with fewer than this many tokens more than a prompt finds anyway,
 * are not worth a slot or a wait. */
#define CONVERSATION_PREFIX_MIN 64

struct conversation {
    uint64_t id; /* follows from the content, see state_name; or random; 0 = free entry */
    uint8_t space[16];
    uint8_t client[16]; /* the client whose quota its pages count for; see engine_request.owner */
    int holder;         /* index of its client among the table's */
    uint64_t hint;      /* session of the last request that used it */
    struct kv_params kv;
    int32_t *tokens;     /* appended so far, owned; [token_count] */
    int32_t token_count; /* T */
    int32_t prompt_end;  /* tokens of the last prompt: a prompt that repeats these extends it */
    int32_t evicted_at;  /* tokens it had when something was evicted last; 0 = never */
    bool exact; /* in its last turn it evicted only where every sequence with these tokens that
                   began at the same place evicts: neither at its prompt's end nor in its answer */
    struct reserve_turn began; /* where its last turn began; all 0: from nothing */
    int32_t began_held;        /* due_state.held there */
    bool checkpoint;           /* left behind by a running sequence */
    bool prefix;               /* a checkpoint in the middle of a prompt, of no dialogue */
    uint64_t left;             /* id of the checkpoint at the end of its last prompt; 0 = none */
    uint64_t prompt_hash, token_hash; /* conversation_hash of prompt_end and of all tokens */
    int32_t held;                     /* entries per stream on average, rounded up */
    int32_t fullest;                  /* the same average on the rank that has most */
    int64_t entries;                  /* exact, over all streams */
    int64_t pages;                    /* exact, of the rank that has most, shared pages included */
    int32_t slot;
    int64_t last_used_ns;
    int32_t ttl; /* seconds after its last use at which it is deleted; 0 = none */
    bool pinned;
    uint64_t use;    /* order of last use; the smallest is removed first */
    uint64_t origin; /* id of the conversation that its turn continued; 0 = none */
    int32_t turns;   /* number of kept turns that continued this one */
    enum conversation_saved saved;
    bool asked;    /* somebody waits for its file: it is written although it was used just now */
    bool arriving; /* still being copied in from disk: no request continues it yet */
    uint64_t replaces; /* id of the superseded conversation whose file is deleted when this one is
                          on disk; 0 = none */
    uint64_t change;   /* table->changes at the last change of this one */
};

/* A conversation that was removed, so that a miss can tell "forgotten" from "never seen". */
struct conversation_gone {
    uint8_t space[16];
    uint64_t hash; /* hash of the first prompt_end tokens */
    int32_t prompt_end;
};

#define CONVERSATION_GONE_MAX 256

/* The sums of one client's conversations. */
struct conversation_holder {
    uint8_t client[16];
    int count; /* 0: unused */
    int64_t pages;
};

/* Reasons to remove a conversation: places or pages are short. How much a client holds is counted
 * in the same unit. */
enum conversation_shortage { CONVERSATION_PLACES, CONVERSATION_PAGES };

struct conversation_table {
    struct conversation *all;            /* [capacity]; id 0 = unused */
    struct conversation_holder *holders; /* [capacity] */
    int capacity, count;
    bool sliding_windows;                         /* the model has them in some layers */
    int64_t pages, entries, tokens;               /* sums over all */
    int64_t superseded_pages, superseded_entries; /* the part of superseded ones */
    int64_t expires_ns; /* no time to live ends earlier than this; INT64_MAX: none will end */
    uint64_t next_use;
    uint64_t id_seed, id_count;
    uint64_t changes; /* grows with every change of a conversation */
    struct conversation_gone gone[CONVERSATION_GONE_MAX];
    uint32_t gone_count; /* total so far; the newest overwrite the oldest */
};

void conversation_table_open(struct conversation_table *table, int capacity, bool sliding_windows);
void conversation_table_close(struct conversation_table *table);

/* Adds a copy of *conv and takes over conv->tokens. A conversation without an id gets one, and each
 * gets its hashes. The table must not be full. */
struct conversation *conversation_add(struct conversation_table *table,
                                      const struct conversation *conv, int64_t now_ns);

/* Removes a conversation from the table. The caller then owns its tokens and its slot. */
struct conversation conversation_remove(struct conversation_table *table,
                                        struct conversation *conv);

/* Marks the conversation as used last. */
void conversation_touch(struct conversation_table *table, struct conversation *conv, uint64_t hint,
                        int64_t now_ns);

/* Notes that a kept turn continued the conversation. */
void conversation_followed(struct conversation_table *table, struct conversation *conv);
/* Notes that a kept turn that continued the conversation is no longer kept. */
void conversation_unfollowed(struct conversation_table *table, struct conversation *conv);

/* Returns the file to delete when a successor of the conversation is on disk: its own, or the one
 * that it replaces; 0: none. */
uint64_t conversation_file(const struct conversation *conv);

static inline bool conversation_superseded(const struct conversation *conv) {
    return conv->turns == 1;
}

struct conversation *conversation_by_id(struct conversation_table *table, uint64_t id);
/* Returns the conversation that is removed next, of this client unless it is NULL; NULL when there
 * is none but `except`. `pinned`: pinned ones count, too, and go last. */
struct conversation *conversation_next_victim(struct conversation_table *table,
                                              const struct conversation *except,
                                              const uint8_t *client, bool pinned,
                                              enum conversation_shortage shortage);
struct conversation_pins {
    int count;
    int64_t pages, tokens;
};
/* Adds up the pinned conversations, of this client unless it is NULL. */
struct conversation_pins conversation_pins_of(const struct conversation_table *table,
                                              const uint8_t *client);
void conversation_unpin(struct conversation_table *table, struct conversation *conv);
/* Returns a conversation whose time to live has ended, or NULL. */
struct conversation *conversation_expired(struct conversation_table *table, int64_t now_ns);
/* Returns the sum of the pages of this client's conversations. */
int64_t conversation_pages_of(const struct conversation_table *table, const uint8_t client[16]);
/* Returns the conversation with the same tokens and prompt end in the same space with equal
 * parameters, a checkpoint if `as` is one, or NULL. */
struct conversation *conversation_same(struct conversation_table *table,
                                       const struct conversation *as);

/* Can a conversation with such a rule be cut before its end at all? */
bool conversation_can_cut(const struct kern_rule *rule);

struct conversation_match {
    struct conversation *conv; /* NULL: none serves */
    int32_t common;            /* number of its tokens that the request uses */
    int32_t shared; /* the most tokens that any conversation with the request's settings has in
                       common with its prompt, even if they cannot be used */
    bool exact;     /* the request continues the turn that read them */
    bool lost; /* the next query would see entries that are gone: they had left the sliding window
                  at an eviction after these tokens; not with an unbounded policy, which promises
                  to lose nothing */
    bool cut;  /* the request continues a checkpoint, or a conversation cut before the end of its
                  turn */
    uint64_t from; /* id of the last turn of the same dialogue: the prompt extends that turn or
                      repeats its answer; 0: none, the two only begin alike */
    enum engine_miss miss; /* why no conversation served, or served less than the prompt repeats;
                              NEW: nothing was lost */
};

/* Finds the conversation that saves the prompt most tokens. Conversations that lost nothing come
 * first. Among equals, the order is: one whose evictions chose without tokens that are dropped now,
 * one that the prompt extends, one that is not a checkpoint, one with the query's hint, the one
 * used last. */
struct conversation_match conversation_find(struct conversation_table *table,
                                            const struct conversation_query *query);

/* Returns the least number of tokens after which nothing has been evicted or shifted. */
int32_t conversation_least_cut(const struct conversation *conv);

/* Returns the last place, at most `most` tokens, where the conversation can be cut for a prompt of
 * prompt_count tokens; 0: there is none. */
int32_t conversation_cut(const struct conversation *conv, int32_t most, int32_t prompt_count);

/* Returns the number of first tokens that a and b have in common. */
int32_t conversation_common(const int32_t *a, int32_t a_count, const int32_t *b, int32_t b_count);

/* Remembers that a conversation whose prompt has this hash was displaced. */
void conversation_note_gone(struct conversation_table *table, const uint8_t space[16],
                            int32_t prompt_end, uint64_t prompt_hash);

/* Hashes of a conversation's beginnings, for threads that must not read its tokens: marks[i] is the
 * hash of the first (i + 1) * CONVERSATION_MARK tokens. */
#define CONVERSATION_MARK 32
static inline int32_t conversation_mark_count(int32_t token_count) {
    return token_count / CONVERSATION_MARK;
}
void conversation_make_marks(const struct conversation *conv, uint64_t *marks);

/* The same for a conversation in memory, which can also be cut: `conv` without its tokens, and its
 * marks (NULL: it is not cut). A common prefix that ends between two marks counts to the first. */
int32_t conversation_usable_or_cut(struct conversation_search *search,
                                   const struct conversation *conv, const uint64_t *marks);

#endif
