/* When a sequence evicts, and how many pages it may need: pure functions of the request, never of
 * what else runs. `held` is the average number of entries per stream; it is exact, because each
 * appended token adds one entry to every stream and an eviction leaves min(held, M). Only when a
 * continued conversation drops tokens can streams lose unequally, and only a rule with a threshold
 * or a floor may leave fewer than M; `held`, rounded up from a report or from M, is an upper bound
 * from there on, and so is everything computed from it.
 *
 * A policy without a budget evicts where layers have sliding windows (kv_params_expires): then
 * `held` counts the entries of a stream of such a layer, with the longest window, and M is that
 * window less one. The streams of the other layers hold all tokens.
 *
 * The rule (architecture: "when a sequence evicts is fixed by the request alone"):
 *   - after every C-th new prompt token, down to M; where rows of a picture that see each other are
 *     around that border (struct picture), they are appended together, and it follows behind them;
 *   - after the last prompt token, if held > M + buffer;
 *   - while generating, before the append that would make held exceed M + buffer. */
#ifndef KEEPD_PAGING_DUE_H
#define KEEPD_PAGING_DUE_H

#include "paging/policy.h"

/* How far a sequence has come; the scheduler keeps it. */
struct due_state {
    int32_t tokens; /* T: tokens appended to the streams (dropped ones not counted) */
    int32_t held;   /* entries per stream on average, or per stream of a sliding layer: see above */
    int32_t prompt_done; /* new tokens appended in this request; past prompt_new: generated */
    int32_t prompt_new;  /* new prompt tokens that this request must append in all */
    int32_t last;        /* tokens that were appended last, together */
    int32_t shifts;      /* how often the sequence was shifted */
};

/* Returns how many prompt tokens may be appended before the next eviction or the next shift: 1..C,
 * never more than the prompt has; 0 when the prompt is complete. Without a bound this is the whole
 * rest. The scheduler may split it further over steps, and may append more where rows stay
 * together. If a shift is due, it comes first. */
int32_t due_prompt_limit(const struct kv_params *params, const struct due_state *state);

/* Returns how many generated tokens may be appended before the next eviction or the next shift; 0:
 * one of them is due now. */
int32_t due_generate_limit(const struct kv_params *params, const struct due_state *state);

/* Appends `count` tokens (prompt or generated) to the bookkeeping. */
void due_append(struct due_state *state, int32_t count);
/* Returns whether the tokens that were appended last reach the end of a chunk of the prompt. */
bool due_ends_chunk(const struct kv_params *params, const struct due_state *state);

/* Returns whether the sequence must evict after what was appended. */
bool due_after_append(const struct kv_params *params, const struct due_state *state);
/* Returns whether the sequence must evict before one generated token is appended. */
bool due_before_generate(const struct kv_params *params, const struct due_state *state);
/* Returns whether the sequence must be shifted before the next token is appended; an eviction that
 * is due comes first. With kv_params.places, a shift is due each time that all places are used up
 * (kernels/places.h). The result depends on `tokens` alone. */
bool due_shift(const struct kv_params *params, const struct due_state *state);
/* Returns how often a text of `tokens` tokens has been shifted when its next token is appended. */
int32_t due_shifts(const struct kv_params *params, int32_t tokens);
/* Returns how far the places of the next tokens lie behind their positions (kern_span.behind). */
int32_t due_behind(const struct kv_params *params, const struct due_state *state);
/* Records a shift. */
void due_shifted(const struct kv_params *params, struct due_state *state);
/* Records an eviction. */
void due_evicted(const struct kv_params *params, struct due_state *state);
/* Returns the budget of an eviction (kern_evict.budget). */
int32_t due_budget(const struct kv_params *params, const struct due_state *state);

/* Returns `held` of a turn that continues a conversation of `tokens` tokens. Its last eviction so
 * far was at evicted_at tokens (0: none). The parameter `held` is the average in a report, rounded
 * up. */
int32_t due_held_at(const struct kv_params *params, int32_t held, int32_t tokens,
                    int32_t evicted_at);

struct reserve_shape {
    int layers, heads_kv, page_slots;
    int member_slots; /* as in kern_cache_info */
    int ranks;        /* ranks with different heads, a divisor of heads_kv; 0 = 1: one holds all */
    float rank_cap;   /* as in kern_cache_options */
    int states;       /* recurrent states of a sequence */
    int64_t state_pages; /* pages of the states on each rank */
    int sliding_layers; /* layers with a sliding window: their entries expire (struct kern_evict) */
    /* Heads and page slots of sliding layers; 0: the same as in the other layers. */
    int sliding_heads_kv, sliding_page_slots;
};

/* Returns the number of streams of a sequence, of all ranks. */
int64_t reserve_all_streams(const struct reserve_shape *shape);
/* Estimates for messages how many pages `entries` in each stream take on a rank. A reservation
 * needs more, because streams do not share pages. */
int64_t reserve_even_pages(const struct reserve_shape *shape, int64_t entries);
/* Returns how much memory one entry in each stream takes on a rank, counted in entries of the pages
 * that hold most entries. This is the number of streams if all pages hold the same number. */
int64_t reserve_token_entries(const struct reserve_shape *shape);

/* Returns how many entries a sequence holds in all, by formula. */
int64_t due_entries(const struct reserve_shape *shape, const struct kv_params *params,
                    const struct due_state *state);

/* Returns the number of streams of one rank: S below. */
int64_t reserve_streams(const struct reserve_shape *shape);

/* Each rank has a pool of its own, and all pools are equally large: a sequence
 * reserves on every rank what any one rank may need for it, because it is not known at admission
 * which rank that will be. So no rank's pool can run out.
 *
 * What one rank may need. Of g ranks each has S = L*H/g streams. Let b be the entries per stream of
 * the fullest one while the sequence holds a per stream on average; with one rank b = a. Every
 * appended token adds one to both, and an eviction adds nothing to b.
 *
 * Before the first eviction of a turn b <= b0 + (a - a0), from what it began with. After one
 * b <= X + (a - M), where X is what an eviction leaves, per stream, on one rank at most:
 *
 * - M where every stream has an allotment of its own (STREAM scopes of uniform layers: trimkv,
 *   snapkv, ...);
 * - g*M where heads or layers compete and no cap holds: all kept entries may be on one rank;
 * - cap*M where heads compete and kern_cache_options.rank_cap holds: cap >= 1, and protected
 *   entries, r in a stream, are no more than M. Floors of a SEQUENCE scope are added to the capped
 *   part, so there it is floor*M + r if that is more;
 * - cap*M + r where layers compete, too: in a layer the limit is at least what one rank protects.
 *
 * The cap bounds nothing in a LAYER scope with a floor (Ada-KV), which is split again after the
 * cap, nor where only layers compete: there g*M holds once tokens were dropped (the ranks of a new
 * sequence are about even, so it reserves more than it needs). Always b <= g*a, and no
 * stream has more entries than there are tokens. Streams that keep everything, or the newest, are
 * equally long: b = a.
 *
 * When tokens of a conversation are dropped, a0 and b0 fall by numbers not known before; b0 <= g*a0
 * still, so at worst a0 = b0/g. */

/* A turn: what it starts with, and the tokens to come. */
struct reserve_turn {
    int64_t held;    /* upper bound of the entries per stream on average */
    int64_t fullest; /* the same of the rank that has most entries */
    bool drops;      /* the turn first drops tokens, which lowers both by an unknown number */
    int64_t tokens;  /* tokens of the conversation that stay */
    int64_t added;   /* tokens to come: prompt_new and max_new */
};

/* A turn that began like `began` is still reading and now holds `held` entries per stream. Its last
 * eviction was at `evicted_at` tokens, in this turn or earlier (0: never). Returns how many tokens
 * it has at its next eviction; INT64_MAX if it has no bound. */
int64_t due_next_while_reading(const struct kv_params *params, const struct reserve_turn *began,
                               int32_t held, int32_t evicted_at);
/* Returns the state of that turn when `tokens` of its `prompt_count` tokens are read and no
 * eviction has followed that at evicted_at. */
struct due_state due_while_reading(const struct kv_params *params, const struct reserve_turn *began,
                                   int32_t held, int32_t evicted_at, int32_t tokens,
                                   int32_t prompt_count);

/* Returns the most entries per stream, on average, that a single rank ever has of a sequence whose
 * peak is `peak` (reserve_peak). */
int64_t reserve_rank_peak(const struct reserve_shape *shape, const struct kv_params *params,
                          const struct reserve_turn *turn, int64_t peak);

/* Returns how many pages a sequence can occupy at most on a rank while it holds `average` entries
 * per stream there, however they are spread. A stream of n entries takes ceil(n/P) <= (n + P - 1)/P
 * pages, so S streams together take at most floor(S*(average + P - 1)/P). That many are needed if
 * every stream but one has a multiple of P entries plus 1. If all streams are equally long (full;
 * streaming without sliding windows, whose layers lose more), the result is S*ceil(average/P). If
 * pages of some streams hold fewer entries, these streams may hold all entries of the sequence, but
 * each no more than `tokens`, and the other streams the rest. */
int64_t reserve_pages(const struct reserve_shape *shape, const struct kv_params *params,
                      int64_t average, int64_t tokens);

/* Returns how many more pages the members of classes take on a rank, for a sequence that ends with
 * `tokens` tokens in all. A sequence that starts empty remembers each token as an entry or a
 * member, M of them as entries once it evicts. Of a continued one it is not known how many members
 * it has, nor how many entries it lost with dropped tokens. */
int64_t reserve_members(const struct reserve_shape *shape, const struct kv_params *params,
                        int64_t start_held, int64_t tokens);

/* Returns the peak of a text of `tokens` tokens, however it is divided into turns: no turn holds
 * more. */
int64_t reserve_whole(const struct kv_params *params, int64_t tokens);

/* Returns the pages of a turn on a rank, members included, if `held` is at most `peak`
 * (reserve_peak). With kv_params_expires all streams of layers of one kind are equally long, so no
 * other distribution needs to be considered: sliding layers need the peak, the others what they
 * hold at the end of the turn. */
int64_t reserve_turn_pages(const struct reserve_shape *shape, const struct kv_params *params,
                           const struct reserve_turn *turn, int64_t peak);

/* Returns the most entries per stream, on average, that a request ever holds: exactly the peak of
 * the rule above, in its prompt and its answer. `start_held`: the entries of the conversation that
 * it continues; `prompt_new`, `max_new`: tokens to come. The result never falls when start_held or
 * max_new rises, so upper bounds of these are safe. A longer prompt can need less, because its end
 * may coincide with an eviction. Where n rows stay together a request may hold n - 1 more, because
 * an eviction may come so many tokens later. */
int64_t reserve_peak(const struct kv_params *params, int64_t start_held, int64_t prompt_new,
                     int64_t max_new);

#endif
