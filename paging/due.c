#include "paging/due.h"

#include <math.h>

#include "kernels/places.h"

static int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static bool evicts(const struct kv_params *params) {
    return params->policy->bounded || kv_params_expires(params);
}

/* M: how many entries per stream an eviction leaves. For a sliding window this is one less than the
 * window, because the next query also sees its own token. */
static int64_t kept(const struct kv_params *params) {
    return kv_params_expires(params) ? params->sliding_window - 1 : params->budget;
}

/* Returns how many entries per stream a sequence may hold between evictions. Even without a buffer
 * these are M + 1: an eviction leaves M, and a token is appended next. */
static int64_t ceiling(const struct kv_params *params) {
    return kept(params) + max64(params->buffer, 1);
}

int32_t due_shifts(const struct kv_params *params, int32_t tokens) {
    return params->places > 0 ? places_shifts(params->places, tokens + 1) : 0;
}

bool due_shift(const struct kv_params *params, const struct due_state *state) {
    return state->shifts < due_shifts(params, state->tokens);
}

void due_shifted(const struct kv_params *params, struct due_state *state) {
    state->shifts = due_shifts(params, state->tokens);
}

int32_t due_behind(const struct kv_params *params, const struct due_state *state) {
    return due_shifts(params, state->tokens) * places_room(params->places);
}

/* Returns how many tokens find places before the next shift. The state is one after a shift that
 * was due, so there is at least one. */
static int64_t places_left(const struct kv_params *params, const struct due_state *state) {
    if (params->places == 0) return INT64_MAX;
    return (int64_t)params->places + due_behind(params, state) - state->tokens;
}

int32_t due_prompt_limit(const struct kv_params *params, const struct due_state *state) {
    int32_t rest = state->prompt_new - state->prompt_done;
    if (rest <= 0) return 0;
    if (!evicts(params)) return rest;
    int64_t to_chunk = params->chunk - state->prompt_done % params->chunk;
    return (int32_t)min64(min64(rest, to_chunk), places_left(params, state));
}

void due_append(struct due_state *state, int32_t count) {
    state->tokens += count;
    state->held += count;
    state->prompt_done += count;
    state->last = count;
}

bool due_ends_chunk(const struct kv_params *params, const struct due_state *state) {
    const int32_t before = state->prompt_done - state->last, chunk = params->chunk;
    return state->prompt_done <= state->prompt_new && state->prompt_done / chunk > before / chunk;
}

bool due_after_append(const struct kv_params *params, const struct due_state *state) {
    bool in_prompt = state->prompt_done > 0 && state->prompt_done <= state->prompt_new;
    if (!evicts(params) || !in_prompt) return false;
    if (due_ends_chunk(params, state)) return state->held > kept(params);
    return state->prompt_done == state->prompt_new && state->held > kept(params) + params->buffer;
}

bool due_before_generate(const struct kv_params *params, const struct due_state *state) {
    return evicts(params) && state->held >= ceiling(params);
}

int32_t due_generate_limit(const struct kv_params *params, const struct due_state *state) {
    int64_t room = evicts(params) ? ceiling(params) - state->held : INT32_MAX;
    if (due_shift(params, state)) return 0;
    return (int32_t)max64(min64(min64(room, places_left(params, state)), INT32_MAX), 0);
}

void due_evicted(const struct kv_params *params, struct due_state *state) {
    state->held = (int32_t)min64(state->held, kept(params));
}

/* An eviction that only follows sliding windows keeps all other entries. */
int32_t due_budget(const struct kv_params *params, const struct due_state *state) {
    return kv_params_expires(params) ? state->tokens : params->budget;
}

int32_t due_held_at(const struct kv_params *params, int32_t held, int32_t tokens,
                    int32_t evicted_at) {
    if (!kv_params_expires(params)) return (int32_t)min64(held, tokens);
    return (int32_t)min64(evicted_at, kept(params)) + tokens - evicted_at;
}

/* An eviction leaves M. What is appended up to the end of the next chunk makes that more than M
 * again, so an eviction follows after each chunk. */
int64_t due_next_while_reading(const struct kv_params *params, const struct reserve_turn *began,
                               int32_t held, int32_t evicted_at) {
    int64_t chunk = params->chunk, budget = kept(params);
    if (!evicts(params)) return INT64_MAX;
    if (evicted_at > began->tokens)
        return began->tokens + ((evicted_at - began->tokens) / chunk + 1) * chunk;
    int64_t chunks = held > budget ? 1 : (budget - held) / chunk + 1;
    return began->tokens + chunks * chunk;
}

struct due_state due_while_reading(const struct kv_params *params, const struct reserve_turn *began,
                                   int32_t held, int32_t evicted_at, int32_t tokens,
                                   int32_t prompt_count) {
    int32_t first = (int32_t)began->tokens;
    if (evicted_at > first) held = (int32_t)kept(params);
    return (struct due_state){.tokens = tokens,
                              .held = held + tokens - (evicted_at > first ? evicted_at : first),
                              .prompt_done = tokens - first,
                              .prompt_new = prompt_count - first};
}

/* ---- Ranks ---- */

static int64_t shape_ranks(const struct reserve_shape *shape) {
    return shape->ranks > 1 ? shape->ranks : 1;
}

/* Streams whose pages hold the same number of entries. */
struct kind {
    int64_t streams, slots;
};

/* Returns the streams of the layers without a sliding window on each of `ranks` ranks; sliding_kind
 * returns those of the layers with one. */
static struct kind full_kind(const struct reserve_shape *shape, int64_t ranks) {
    const int64_t layers = shape->layers - shape->sliding_layers;
    return (struct kind){layers * shape->heads_kv / ranks, shape->page_slots};
}

static struct kind sliding_kind(const struct reserve_shape *shape, int64_t ranks) {
    const int64_t heads = shape->sliding_heads_kv ? shape->sliding_heads_kv : shape->heads_kv;
    const int slots = shape->sliding_page_slots ? shape->sliding_page_slots : shape->page_slots;
    return (struct kind){shape->sliding_layers * heads / ranks, slots};
}

/* All streams of a rank: `small` with pages of fewer entries, and `large` with pages of more. If
 * all pages hold the same number, `large` is empty. */
struct kinds {
    struct kind small, large;
};

static struct kinds kinds_of(const struct reserve_shape *shape) {
    const struct kind full = full_kind(shape, shape_ranks(shape));
    const struct kind sliding = sliding_kind(shape, shape_ranks(shape));
    if (full.slots == sliding.slots)
        return (struct kinds){{full.streams + sliding.streams, full.slots}, {0, full.slots}};
    return full.slots < sliding.slots ? (struct kinds){full, sliding}
                                      : (struct kinds){sliding, full};
}

int64_t reserve_streams(const struct reserve_shape *shape) {
    const struct kinds kinds = kinds_of(shape);
    return kinds.small.streams + kinds.large.streams;
}

int64_t reserve_all_streams(const struct reserve_shape *shape) {
    return full_kind(shape, 1).streams + sliding_kind(shape, 1).streams;
}

int64_t reserve_even_pages(const struct reserve_shape *shape, int64_t entries) {
    const struct kind a = kinds_of(shape).small, b = kinds_of(shape).large;
    return a.streams * (entries + a.slots - 1) / a.slots +
           b.streams * (entries + b.slots - 1) / b.slots;
}

int64_t reserve_token_entries(const struct reserve_shape *shape) {
    const struct kinds kinds = kinds_of(shape);
    return (kinds.small.streams * kinds.large.slots + kinds.small.slots - 1) / kinds.small.slots +
           kinds.large.streams;
}

static bool streams_are_equal(const struct kern_rule *rule) {
    return rule->score == KERN_SCORE_RECENCY && rule->scope == KERN_SCOPE_STREAM &&
           rule->layers == KERN_LAYERS_UNIFORM;
}

/* Returns X (due.h). The floor's allotment is a product of floats that is rounded down, so one
 * entry more is enough. */
static int64_t rank_kept(const struct reserve_shape *shape, const struct kv_params *params) {
    const struct kern_rule *rule = &params->rule;
    int64_t budget = params->budget, fixed = (int64_t)rule->sinks + rule->recent;
    int64_t most = shape_ranks(shape) * budget;
    bool even = rule->layers == KERN_LAYERS_UNIFORM, floors = rule->floor > 0;
    if (rule->scope == KERN_SCOPE_STREAM) return even ? budget : most;
    if (shape->rank_cap <= 0 || (rule->scope == KERN_SCOPE_LAYER && floors)) return most;
    int64_t kept = (int64_t)ceil((double)shape->rank_cap * (double)budget);
    if (rule->scope == KERN_SCOPE_LAYER && !even) kept += fixed;
    if (rule->scope == KERN_SCOPE_SEQUENCE && floors)
        kept = max64(kept, (int64_t)((double)rule->floor * (double)budget) + 1 + fixed);
    return min64(kept, most);
}

int64_t reserve_rank_peak(const struct reserve_shape *shape, const struct kv_params *params,
                          const struct reserve_turn *turn, int64_t peak) {
    int64_t ranks = shape_ranks(shape), budget = params->budget;
    if (ranks == 1 || !params->policy->bounded || streams_are_equal(&params->rule)) return peak;
    int64_t first = turn->fullest + peak - turn->held;
    if (turn->drops)
        first = turn->fullest + min64(turn->added, peak - min64(turn->fullest / ranks, turn->held));
    int64_t later = peak > budget ? rank_kept(shape, params) + peak - budget : 0;
    int64_t most = min64(ranks * peak, turn->tokens + turn->added);
    return min64(max64(first, later), most);
}

static int64_t pages_of(struct kind kind, int64_t entries) {
    return kind.streams * ((entries + kind.slots - 1) / kind.slots);
}

/* The sum of both quotients (n + S*(P - 1))/P is rounded down once. */
int64_t reserve_pages(const struct reserve_shape *shape, const struct kv_params *params,
                      int64_t average, int64_t tokens) {
    const struct kind small = kinds_of(shape).small, large = kinds_of(shape).large;
    const int64_t entries = (small.streams + large.streams) * average;
    const bool expires = shape->sliding_layers > 0 && params->policy->bounded;
    if (streams_are_equal(&params->rule) && !expires)
        return pages_of(small, average) + pages_of(large, average);
    if (!large.streams) return small.streams * (average + small.slots - 1) / small.slots;
    const int64_t crowded = min64(entries, small.streams * tokens);
    return ((crowded + small.streams * (small.slots - 1)) * large.slots +
            (entries - crowded + large.streams * (large.slots - 1)) * small.slots) /
           (small.slots * large.slots);
}

int64_t reserve_members(const struct reserve_shape *shape, const struct kv_params *params,
                        int64_t start_held, int64_t tokens) {
    int64_t streams = reserve_streams(shape), slots = shape->member_slots;
    int64_t most = params->policy->bounded ? kern_members_max(&params->rule, params->budget) : 0;
    if (start_held == 0) most = min64(most, max64(tokens - params->budget, 0));
    return most > 0 ? streams * ((most + slots - 1) / slots) : 0;
}

/* Follows the rule, except that it takes all whole chunks in the middle at once: after the first
 * chunk a sequence holds at most M when a chunk begins, so the last whole chunk has the highest
 * peak of them. */
int64_t reserve_peak(const struct kv_params *params, int64_t start_held, int64_t prompt_new,
                     int64_t max_new) {
    if (!evicts(params)) return start_held + prompt_new + max_new;
    int64_t budget = kept(params), chunk = params->chunk;
    int64_t whole = prompt_new / chunk, rest = prompt_new % chunk;
    int64_t held = start_held, peak = held;
    if (whole > 0) {
        peak = held + chunk;
        if (whole > 1) peak = max64(peak, min64(held + (whole - 1) * chunk, budget) + chunk);
        held = min64(held + whole * chunk, budget);
    }
    held += rest;
    peak = max64(peak, held);
    if (rest > 0 && held > budget + params->buffer) held = budget;
    return max64(peak, min64(held + max_new, max64(ceiling(params), held)));
}

int64_t reserve_whole(const struct kv_params *params, int64_t tokens) {
    int64_t most = kept(params) + params->buffer + params->chunk;
    return evicts(params) ? min64(most, tokens) : tokens;
}

/* ---- Both kinds of layers ---- */

int64_t reserve_turn_pages(const struct reserve_shape *shape, const struct kv_params *params,
                           const struct reserve_turn *turn, int64_t peak) {
    int64_t tokens = turn->tokens + turn->added;
    if (!kv_params_expires(params))
        return shape->state_pages +
               reserve_pages(shape, params, reserve_rank_peak(shape, params, turn, peak), tokens) +
               reserve_members(shape, params, turn->held, tokens);
    return shape->state_pages + pages_of(full_kind(shape, shape_ranks(shape)), tokens) +
           pages_of(sliding_kind(shape, shape_ranks(shape)), peak);
}

int64_t due_entries(const struct reserve_shape *shape, const struct kv_params *params,
                    const struct due_state *state) {
    if (!kv_params_expires(params)) return reserve_all_streams(shape) * state->held;
    return sliding_kind(shape, 1).streams * state->held +
           full_kind(shape, 1).streams * state->tokens;
}
