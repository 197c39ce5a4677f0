/* When a sequence evicts, and how many pages it may need: pure functions of the request, never of
 * what else runs. `held` is the average number of entries per stream; it is exact, because each
 * appended token adds one entry to every stream and an eviction leaves min(held, M). Only when a
 * continued conversation drops tokens can streams lose unequally, and only a rule with a threshold
 * or a floor may leave fewer than M; `held`, rounded up from a report or from M, is an upper bound
 * from there on, and so is everything computed from it.
 *
 * The rule (architecture: "when a sequence evicts is fixed by the request alone"):
 *   - after every C-th new prompt token, down to M;
 *   - after the last prompt token, if held > M + buffer;
 *   - while generating, before the append that would make held exceed M + buffer. */
#ifndef KEEPD_PAGING_DUE_H
#define KEEPD_PAGING_DUE_H

#include "paging/policy.h"

/* A sequence's place in its life, kept by the scheduler. */
struct due_state {
    int32_t tokens;      /* T: tokens appended to the streams (dropped ones not counted) */
    int32_t held;        /* entries per stream, on average */
    int32_t prompt_done; /* new tokens appended in this request; past prompt_new: generated */
    int32_t prompt_new;  /* new prompt tokens this request must append in all */
};

/* How many prompt tokens may be appended before the next eviction point: 1..C, never past the
 * prompt's end; 0 when the prompt is done. Without a bound the whole rest. Splitting this further
 * over steps is the scheduler's freedom. */
int32_t due_prompt_room(const struct kv_params *params, const struct due_state *state);

/* Appends `count` tokens (prompt or generated) to the bookkeeping. */
void due_append(struct due_state *state, int32_t count);

/* After appending: must the sequence evict now? */
bool due_after_append(const struct kv_params *params, const struct due_state *state);
/* Before appending one generated token: must it evict first? */
bool due_before_generate(const struct kv_params *params, const struct due_state *state);
/* Bookkeeping of an eviction. */
void due_evicted(const struct kv_params *params, struct due_state *state);

struct reserve_shape {
    int layers, heads_kv, page_slots;
    int member_slots; /* as in kern_cache_info */
};

/* Pages that a sequence can occupy at most while it holds `average` entries per stream, however
 * they are spread. A stream of n entries takes ceil(n/P) <= (n + P - 1)/P pages, so all together
 * take at most floor(L*H*(average + P - 1)/P); and that is reached, when every stream but one is a
 * multiple of P plus 1. Where all streams are equally long (full, streaming) it is
 * L*H*ceil(average/P). */
int64_t reserve_pages(const struct reserve_shape *shape, const struct kv_params *params,
                      int64_t average);

/* Pages that the members of classes take besides, for a sequence that ends with `tokens` in all.
 * One that starts empty remembers each token as entry or member, and M as entries once it evicts;
 * what a continued one brings is not known, nor how many entries it lost when tokens were dropped.
 */
int64_t reserve_members(const struct reserve_shape *shape, const struct kv_params *params,
                        int64_t start_held, int64_t tokens);

/* The most entries per stream (average) a request ever holds: exactly the peak of the rule above,
 * prompt phase and generation. `start_held`: what a continued conversation brings; `prompt_new`,
 * `max_new`: tokens to come. It never falls when start_held or max_new rises, so that estimates
 * from above are safe; a longer prompt can need less, because its end may fall on an eviction. */
int64_t reserve_peak(const struct kv_params *params, int64_t start_held, int64_t prompt_new,
                     int64_t max_new);

#endif
