/* The table of conversations: adding, removing and the order of removal; the search for the
 * conversation that saves a prompt most tokens; and the places where a conversation can be cut. The
 * rules are in conversation.h. */
#include "engine/kept/conversation.h"

#include <string.h>
#include <sys/random.h>

#include "base/check.h"
#include "base/mem.h"
#include "base/splitmix.h"
#include "engine/engine_pictures.h"
#include "kernels/places.h"
#include "kernels/rule.h"

/* ---- The table ---- */

void conversation_table_open(struct conversation_table *table, int capacity, bool sliding_windows) {
    *table = (struct conversation_table){.capacity = capacity,
                                         .sliding_windows = sliding_windows,
                                         .expires_ns = INT64_MAX,
                                         .next_use = 1};
    size_t places = (size_t)(capacity > 0 ? capacity : 1);
    table->all = mem_must_alloc(places, sizeof *table->all);
    table->holders = mem_must_alloc(places, sizeof *table->holders);
    /* Ids are also file names, so they must differ from those of other processes. */
    CHECK(getrandom(&table->id_seed, sizeof table->id_seed, 0) == (ssize_t)sizeof table->id_seed);
}

void conversation_table_close(struct conversation_table *table) {
    for (int i = 0; i < table->capacity; i++) mem_free(table->all[i].tokens);
    mem_free(table->all);
    mem_free(table->holders);
    *table = (struct conversation_table){0};
}

static void changed(struct conversation_table *table, struct conversation *conv) {
    conv->change = ++table->changes;
}

/* Adds a conversation to the sums (sign 1), or subtracts it (-1). */
static void count(struct conversation_table *table, const struct conversation *conv, int sign) {
    bool old = conversation_superseded(conv);
    struct conversation_holder *holder = &table->holders[conv->holder];
    holder->count += sign;
    holder->pages += sign * conv->pages;
    table->count += sign;
    table->pages += sign * conv->pages;
    table->entries += sign * conv->entries;
    table->tokens += (int64_t)sign * conv->token_count;
    table->superseded_pages += old ? sign * conv->pages : 0;
    table->superseded_entries += old ? sign * conv->entries : 0;
}

/* Returns the client's sums, or unused ones, where there are as many as conversations. NULL: the
 * client has none, and none are unused. */
static struct conversation_holder *find_client_holder(const struct conversation_table *table,
                                                      const uint8_t client[16]) {
    struct conversation_holder *unused = NULL;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation_holder *holder = &table->holders[i];
        if (holder->count == 0)
            unused = holder;
        else if (memcmp(holder->client, client, sizeof holder->client) == 0)
            return holder;
    }
    return unused;
}

struct conversation *conversation_add(struct conversation_table *table,
                                      const struct conversation *conv, int64_t now_ns) {
    CHECK(table->count < table->capacity && conv->tokens && conv->slot >= 0);
    CHECK(conv->prompt_end <= conv->token_count);
    struct conversation *to = table->all;
    while (to->id != 0) to++;
    *to = *conv;
    while (to->id == 0) to->id = splitmix_mix(table->id_seed + ++table->id_count * SPLITMIX_STEP);
    to->prompt_hash = conversation_hash(CONVERSATION_HASH, to->tokens, to->prompt_end);
    to->token_hash = conversation_hash(to->prompt_hash, to->tokens + to->prompt_end,
                                       to->token_count - to->prompt_end);
    struct conversation_holder *holder = find_client_holder(table, to->client);
    memcpy(holder->client, to->client, sizeof holder->client);
    to->holder = (int)(holder - table->holders);
    count(table, to, 1);
    conversation_touch(table, to, conv->hint, now_ns);
    return to;
}

struct conversation conversation_remove(struct conversation_table *table,
                                        struct conversation *conv) {
    CHECK(conv->id != 0);
    struct conversation taken = *conv;
    count(table, conv, -1);
    *conv = (struct conversation){0};
    changed(table, conv);
    return taken;
}

static int64_t expires_ns(const struct conversation *conv) {
    return conv->ttl > 0 ? conv->last_used_ns + (int64_t)conv->ttl * 1000000000 : INT64_MAX;
}

void conversation_touch(struct conversation_table *table, struct conversation *conv, uint64_t hint,
                        int64_t now_ns) {
    conv->use = table->next_use++;
    conv->last_used_ns = now_ns;
    conv->hint = hint;
    if (expires_ns(conv) < table->expires_ns) table->expires_ns = expires_ns(conv);
    changed(table, conv);
}

void conversation_followed(struct conversation_table *table, struct conversation *conv) {
    count(table, conv, -1);
    if (conv->turns < INT32_MAX) conv->turns++;
    count(table, conv, 1);
    changed(table, conv);
}

void conversation_unfollowed(struct conversation_table *table, struct conversation *conv) {
    CHECK(conv->turns > 0);
    count(table, conv, -1);
    conv->turns--;
    count(table, conv, 1);
    changed(table, conv);
}

uint64_t conversation_file(const struct conversation *conv) {
    bool has_one = conv->saved == CONVERSATION_SAVED || conv->saved == CONVERSATION_WRITING;
    return has_one ? conv->id : conv->replaces;
}

struct conversation *conversation_by_id(struct conversation_table *table, uint64_t id) {
    for (int i = 0; id != 0 && i < table->capacity; i++)
        if (table->all[i].id == id) return &table->all[i];
    return NULL;
}

static double held_by_client(const struct conversation_table *table,
                             const struct conversation *conv, enum conversation_shortage shortage) {
    const struct conversation_holder *holder = &table->holders[conv->holder];
    return shortage == CONVERSATION_PLACES ? holder->count : (double)holder->pages;
}

static bool is_removed_before(const struct conversation_table *table, const struct conversation *a,
                              const struct conversation *b, enum conversation_shortage shortage) {
    if (a->pinned != b->pinned) return b->pinned;
    bool old = conversation_superseded(a);
    if (old != conversation_superseded(b)) return old;
    if (old || a->holder == b->holder) return a->use < b->use;
    double of_a = (double)(table->next_use - a->use) * held_by_client(table, a, shortage);
    double of_b = (double)(table->next_use - b->use) * held_by_client(table, b, shortage);
    return of_a != of_b ? of_a > of_b : a->use < b->use;
}

static bool is_of(const struct conversation *conv, const uint8_t *client) {
    return conv->id != 0 && (!client || memcmp(conv->client, client, sizeof conv->client) == 0);
}

struct conversation *conversation_next_victim(struct conversation_table *table,
                                              const struct conversation *except,
                                              const uint8_t *client, bool pinned,
                                              enum conversation_shortage shortage) {
    struct conversation *next = NULL;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv == except) continue;
        if (!is_of(conv, client) || (conv->pinned && !pinned)) continue;
        if (!next || is_removed_before(table, conv, next, shortage)) next = conv;
    }
    return next;
}

int64_t conversation_pages_of(const struct conversation_table *table, const uint8_t client[16]) {
    const struct conversation_holder *holder = find_client_holder(table, client);
    return holder ? holder->pages : 0;
}

struct conversation_pins conversation_pins_of(const struct conversation_table *table,
                                              const uint8_t *client) {
    struct conversation_pins pins = {0};
    for (int i = 0; i < table->capacity; i++) {
        const struct conversation *conv = &table->all[i];
        if (!conv->pinned || !is_of(conv, client)) continue;
        pins.count++;
        pins.pages += conv->pages;
        pins.tokens += conv->token_count;
    }
    return pins;
}

void conversation_unpin(struct conversation_table *table, struct conversation *conv) {
    conv->pinned = false;
    changed(table, conv);
}

/* Returns an expired conversation. A use delays the end of a conversation without updating the
 * table's time, so that time may be too early; it is made exact here. */
struct conversation *conversation_expired(struct conversation_table *table, int64_t now_ns) {
    struct conversation *expired = NULL;
    if (now_ns < table->expires_ns) return NULL;
    table->expires_ns = INT64_MAX;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv->id == 0) continue;
        if (expires_ns(conv) < table->expires_ns) table->expires_ns = expires_ns(conv);
        if (expires_ns(conv) <= now_ns) expired = conv;
    }
    return expired;
}

/* ---- Search ---- */

/* Compares whole blocks by memcmp, because a prompt may share thousands of tokens with hundreds of
 * conversations. */
int32_t conversation_common(const int32_t *a, int32_t a_count, const int32_t *b, int32_t b_count) {
    enum { BLOCK = 64 };
    int32_t n = a_count < b_count ? a_count : b_count, i = 0;
    while (n - i >= BLOCK && memcmp(a + i, b + i, BLOCK * sizeof *a) == 0) i += BLOCK;
    while (i < n && a[i] == b[i]) i++;
    /* The first ids of two pictures may be equal by chance: their entries are not. */
    if (i < n && engine_is_picture_id(a[i]) && engine_is_picture_id(b[i]))
        while (i > 0 && engine_is_picture_id(a[i - 1])) i--;
    return i;
}

struct conversation *conversation_same(struct conversation_table *table,
                                       const struct conversation *as) {
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv->id == 0 || conv->token_count != as->token_count ||
            conv->prompt_end != as->prompt_end || conv->checkpoint != as->checkpoint)
            continue;
        if (memcmp(conv->space, as->space, sizeof conv->space) != 0) continue;
        if (!kv_params_equal(&conv->kv, &as->kv)) continue;
        if (conversation_common(conv->tokens, conv->token_count, as->tokens, as->token_count) ==
            conv->token_count)
            return conv;
    }
    return NULL;
}

void conversation_note_gone(struct conversation_table *table, const uint8_t space[16],
                            int32_t prompt_end, uint64_t prompt_hash) {
    struct conversation_gone *gone = &table->gone[table->gone_count++ % CONVERSATION_GONE_MAX];
    memcpy(gone->space, space, sizeof gone->space);
    gone->prompt_end = prompt_end;
    gone->hash = prompt_hash;
}

static bool extends_gone(const struct conversation_table *table,
                         const struct conversation_query *query) {
    uint32_t count = table->gone_count;
    if (count > CONVERSATION_GONE_MAX) count = CONVERSATION_GONE_MAX;
    for (uint32_t i = 0; i < count; i++) {
        const struct conversation_gone *gone = &table->gone[i];
        if (gone->prompt_end >= query->prompt_count) continue;
        if (memcmp(gone->space, query->space, sizeof gone->space) != 0) continue;
        if (conversation_hash(CONVERSATION_HASH, query->prompt, gone->prompt_end) == gone->hash)
            return true;
    }
    return false;
}

/* ---- Cuts ---- */

bool conversation_can_cut(const struct kern_rule *rule) {
    return !rule_adds(rule);
}

int32_t conversation_least_cut(const struct conversation *conv) {
    int32_t places = conv->kv.places;
    if (places == 0) return conv->evicted_at;
    int32_t shifted = places_shifted_at(places, places_shifts(places, conv->token_count));
    return conv->evicted_at > shifted ? conv->evicted_at : shifted;
}

int32_t conversation_cut(const struct conversation *conv, int32_t most, int32_t prompt_count) {
    const struct kv_params *kv = &conv->kv;
    int64_t began = conv->began.tokens, least = conversation_least_cut(conv);
    if (least < began) least = began;
    int64_t next = due_next_while_reading(kv, &conv->began, conv->began_held, conv->evicted_at);
    int64_t cut = most < next ? most : next - 1;
    if (!conv->exact || cut < least || (kv->whole && cut < conv->token_count)) return 0;
    bool observes = kv->policy->bounded && kv->rule.score == KERN_SCORE_ATTENTION;
    if (!observes || cut == conv->token_count) return (int32_t)cut;
    if (!conversation_can_cut(&kv->rule)) return 0;
    /* The next eviction needs a full window of queries. The conversation stores only the window
     * before its own end; an eviction before that end needs all queries of its window computed
     * again, so the cut lies a window before it. */
    if (next > prompt_count) next = prompt_count;
    int64_t window = kv->rule.observe.window;
    if (next < conv->token_count && cut > next - window) cut = next - window;
    return cut >= least && cut > 0 ? (int32_t)cut : 0;
}

/* ---- Match ---- */

/* Returns whether the prompt repeats the end of the conversation's last answer somewhere after the
 * common tokens: then both are of one dialogue, and the template rendered something before the
 * answer differently. */
static bool repeats_answer(const struct conversation *conv, const struct conversation_query *query,
                           int32_t common) {
    enum { LEAST = 4, MOST = 8 };
    int32_t count = conv->token_count - conv->prompt_end;
    if (count > MOST) count = MOST;
    if (count < LEAST || conv->checkpoint) return false;
    const int32_t *end = conv->tokens + conv->token_count - count;
    for (int32_t at = common; at + count <= query->prompt_count; at++)
        if (memcmp(query->prompt + at, end, (size_t)count * sizeof *end) == 0) return true;
    return false;
}

static bool extends(const struct conversation_match *match) {
    return match->conv && match->common >= match->conv->prompt_end;
}

/* Returns how the conversation serves the query; conv NULL: not at all. */
static struct conversation_match match_row(struct conversation *conv,
                                           const struct conversation_query *query, int32_t shared) {
    int32_t most = shared < query->prompt_count ? shared : query->prompt_count - 1;
    int32_t cut = conversation_cut(conv, most, query->prompt_count);
    const bool whole = most == conv->token_count || !conv->kv.whole;
    if (most >= conv->prompt_end && !conv->checkpoint && whole) {
        bool exact = cut == most && conv->began.tokens == 0; /* also true of a restored one */
        return (struct conversation_match){.conv = conv, .common = most, .exact = exact};
    }
    if (cut < CONVERSATION_CUT_MIN || conv->arriving) return (struct conversation_match){0};
    return (struct conversation_match){.conv = conv, .common = cut, .exact = true};
}

/* Returns why a conversation does not serve as far as it could. Prompts that differ early share
 * only a template's header, which is no loss worth reporting. */
static enum engine_miss row_miss(const struct conversation *conv,
                                 const struct conversation_query *query, int32_t shared) {
    if (conv->checkpoint) return ENGINE_MISS_NEW;
    if (!kv_params_equal(&conv->kv, query->kv) && shared >= conv->prompt_end &&
        query->prompt_count > conv->prompt_end)
        return ENGINE_MISS_SETTINGS;
    if (shared == query->prompt_count) return ENGINE_MISS_WHOLE;
    return shared > conv->prompt_end / 2 ? ENGINE_MISS_DIVERGED : ENGINE_MISS_NEW;
}

/* Keeps the most informative reason: the one with the largest weight. */
static void note_miss(struct conversation_match *worst, enum engine_miss reason, int32_t shared) {
    static const int weight[ENGINE_MISS_COUNT] = {
        [ENGINE_MISS_DIVERGED] = 1, [ENGINE_MISS_SETTINGS] = 2, [ENGINE_MISS_WHOLE] = 3};
    if (weight[reason] == 0) return;
    if (shared > worst->common) worst->common = shared;
    if (weight[reason] > weight[worst->miss]) worst->miss = reason;
}

/* Did evictions choose with tokens in view that are dropped now, such as reasoning? What they took
 * to make room for these is missing. */
static bool has_gaps(const struct conversation_match *match) {
    return !match->exact && match->common < match->conv->evicted_at;
}

static bool is_better(const struct conversation_match *a, const struct conversation_match *b,
                      uint64_t hint) {
    if (!b->conv || a->lost != b->lost) return !b->conv || b->lost;
    if (a->common != b->common) return a->common > b->common;
    if (has_gaps(a) != has_gaps(b)) return has_gaps(b);
    if (extends(a) != extends(b)) return extends(a);
    if (a->conv->checkpoint != b->conv->checkpoint) return b->conv->checkpoint;
    bool hinted = hint != 0 && a->conv->hint == hint, was = hint != 0 && b->conv->hint == hint;
    return hinted == was ? a->conv->use > b->conv->use : hinted;
}

/* Returns the id of the last turn of the dialogue that the query continues, although no turn can be
 * extended; 0: none. */
static uint64_t find_dialogue(struct conversation_table *table,
                              const struct conversation_query *query, int32_t common) {
    struct conversation *last = NULL;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv->id == 0 || memcmp(conv->space, query->space, sizeof conv->space) != 0) continue;
        if (!kv_params_equal(&conv->kv, query->kv)) continue;
        int32_t shared = conversation_common(conv->tokens, conv->token_count, query->prompt,
                                             query->prompt_count);
        if (shared < common || shared < CONVERSATION_CUT_MIN) continue;
        if (last && conv->use < last->use) continue;
        if (repeats_answer(conv, query, shared)) last = conv;
    }
    return last ? last->id : 0;
}

struct conversation_match conversation_find(struct conversation_table *table,
                                            const struct conversation_query *query) {
    struct conversation_match best = {0}, lost = {0};
    int32_t most = 0;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv->id == 0 || memcmp(conv->space, query->space, sizeof conv->space) != 0) continue;
        int32_t shared = conversation_common(conv->tokens, conv->token_count, query->prompt,
                                             query->prompt_count);
        struct conversation_match match = {0};
        if (kv_params_equal(&conv->kv, query->kv)) {
            match = match_row(conv, query, shared);
            if (shared > most) most = shared;
        }
        match.lost = match.conv && table->sliding_windows && match.common < match.conv->evicted_at;
        if (match.lost && !query->kv->policy->bounded) match = (struct conversation_match){0};
        if (!extends(&match)) note_miss(&lost, row_miss(conv, query, shared), shared);
        if (match.conv && is_better(&match, &best, query->hint)) best = match;
    }
    /* One token of a prompt is always computed, so it does not count as lost. */
    if (!best.conv || lost.common > best.common + 1) best.miss = lost.miss;
    if (!best.conv && best.miss <= ENGINE_MISS_DIVERGED && extends_gone(table, query))
        best.miss = ENGINE_MISS_FORGOTTEN;
    best.shared = most;
    best.cut = best.conv && (!extends(&best) || best.conv->checkpoint);
    best.from = best.conv && !best.cut ? best.conv->id : find_dialogue(table, query, best.common);
    return best;
}

/* ---- Marks ---- */

void conversation_make_marks(const struct conversation *conv, uint64_t *marks) {
    uint64_t hash = CONVERSATION_HASH;
    for (int32_t i = 0; i < conversation_mark_count(conv->token_count); i++)
        marks[i] = hash = conversation_hash(hash, conv->tokens + (size_t)i * CONVERSATION_MARK,
                                            CONVERSATION_MARK);
}

/* Beginnings are equal up to some mark and differ from there on. */
static int32_t common_marks(const uint64_t *hashes, int32_t prompt_count, const uint64_t *marks,
                            int32_t mark_count) {
    int32_t low = 0, high = conversation_mark_count(prompt_count);
    if (high > mark_count) high = mark_count;
    while (low < high) {
        int32_t middle = low + (high - low + 1) / 2;
        if (hashes[(size_t)middle * CONVERSATION_MARK] == marks[middle - 1])
            low = middle;
        else
            high = middle - 1;
    }
    return low * CONVERSATION_MARK;
}

int32_t conversation_usable_or_cut(struct conversation_search *search,
                                   const struct conversation *conv, const uint64_t *marks) {
    const struct conversation_query *query = search->query;
    const struct conversation_key key = {.space = conv->space,
                                         .kv = &conv->kv,
                                         .prompt_end = conv->prompt_end,
                                         .token_count = conv->token_count,
                                         .prompt_hash = conv->prompt_hash,
                                         .token_hash = conv->token_hash};
    int32_t usable = conv->checkpoint ? 0 : conversation_usable(search, &key);
    if (!conv->kv.policy->bounded && usable < conv->evicted_at) usable = 0; /* a lost window */
    if (usable > 0 || !marks || conv->arriving) return usable;
    if (memcmp(conv->space, query->space, sizeof conv->space) != 0) return 0;
    if (!kv_params_equal(&conv->kv, query->kv)) return 0;
    const uint64_t *hashes = conversation_search_hashes(search);
    if (!hashes) return 0;
    int32_t most = common_marks(hashes, query->prompt_count, marks,
                                conversation_mark_count(conv->token_count));
    if (conv->token_count <= query->prompt_count && hashes[conv->token_count] == conv->token_hash)
        most = conv->token_count;
    if (most > query->prompt_count - 1) most = query->prompt_count - 1;
    int32_t cut = conversation_cut(conv, most, query->prompt_count);
    return cut < CONVERSATION_CUT_MIN ? 0 : cut;
}
