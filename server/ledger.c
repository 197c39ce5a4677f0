#include "server/ledger.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

#define OWN_SHARE  4           /* the own parts together are at most 1/4 of the memory */
#define TIMES_FREE ((size_t)2) /* a client holds at most twice as much as remains free */

struct ledger_account {
    struct ledger_account *next; /* the next account in the hash bucket */
    uint8_t client[16];
    int entries;
    size_t shared; /* sum of the `shared` of its entries */
    int64_t items[LEDGER_ITEMS];
};

void ledger_open(struct ledger *ledger, size_t total, int requests) {
    CHECK(requests > 0);
    *ledger = (struct ledger){.total = total, .own = total / OWN_SHARE / (size_t)requests};
    if (ledger->own > LEDGER_OWN_MAX) ledger->own = LEDGER_OWN_MAX;
    ledger->shared = total - ledger->own * (size_t)requests;
}

void ledger_close(struct ledger *ledger) {
    CHECK(ledger->held == 0 && ledger->shared_held == 0);
    for (int i = 0; i < LEDGER_ITEMS; i++) CHECK(ledger->stock[i].held == 0);
    for (size_t i = 0; i < LEDGER_BUCKETS; i++) CHECK(!ledger->buckets[i]);
}

/* Finds the account of a client, whose 16 bytes serve as their own hash. */
static struct ledger_account **find_account(struct ledger *ledger, const uint8_t client[16]) {
    uint64_t number;
    memcpy(&number, client, sizeof number);
    struct ledger_account **link = &ledger->buckets[number % LEDGER_BUCKETS];
    while (*link && memcmp((*link)->client, client, sizeof(*link)->client) != 0)
        link = &(*link)->next;
    return link;
}

bool ledger_enter(struct ledger *ledger, struct ledger_entry *entry, const uint8_t client[16]) {
    struct ledger_account **link = find_account(ledger, client);
    CHECK(!entry->account);
    if (!*link) {
        *link = mem_try_alloc(1, sizeof **link);
        if (!*link) return false;
        memcpy((*link)->client, client, sizeof(*link)->client);
    }
    (*link)->entries++;
    entry->account = *link;
    return true;
}

void ledger_leave(struct ledger *ledger, struct ledger_entry *entry) {
    struct ledger_account *account = entry->account;
    if (!account) return;
    ledger_give_back(ledger, entry);
    for (int i = 0; i < LEDGER_ITEMS; i++) (void)ledger_set(ledger, entry, i, 0);
    entry->account = NULL;
    if (--account->entries > 0) return;
    *find_account(ledger, account->client) = account->next;
    mem_free(account);
}

/* Returns how much of `size` more bytes exceeds the entry's own part. */
static size_t beyond_own(const struct ledger *ledger, const struct ledger_entry *entry,
                         size_t size) {
    size_t left = entry->detached ? 0 : ledger->own - (entry->held - entry->shared);
    return size > left ? size - left : 0;
}

static size_t shared_left(const struct ledger *ledger) {
    return ledger->shared > ledger->shared_held ? ledger->shared - ledger->shared_held : 0;
}

static void take_shared(struct ledger *ledger, struct ledger_entry *entry, size_t size) {
    entry->shared += size;
    entry->account->shared += size;
    ledger->shared_held += size;
}

enum ledger_verdict ledger_hold(struct ledger *ledger, struct ledger_entry *entry, size_t size) {
    struct ledger_account *account = entry->account;
    size_t shared = beyond_own(ledger, entry, size), left = shared_left(ledger);
    CHECK(account);
    if (account->shared > TIMES_FREE * ledger->shared / (1 + TIMES_FREE)) return LEDGER_CLIENT_FULL;
    if (shared > 0 && (shared > left || account->shared + shared > TIMES_FREE * (left - shared)))
        return account->shared > entry->shared ? LEDGER_CLIENT_FULL : LEDGER_FULL;
    ledger_charge(ledger, entry, size);
    return LEDGER_HELD;
}

void ledger_charge(struct ledger *ledger, struct ledger_entry *entry, size_t size) {
    take_shared(ledger, entry, beyond_own(ledger, entry, size));
    entry->held += size;
    ledger->held += size;
}

void ledger_detach(struct ledger *ledger, struct ledger_entry *entry) {
    if (!entry->account) return;
    take_shared(ledger, entry, entry->held - entry->shared);
    entry->detached = true;
}

void ledger_give_back(struct ledger *ledger, struct ledger_entry *entry) {
    ledger->held -= entry->held;
    ledger->shared_held -= entry->shared;
    if (entry->account) entry->account->shared -= entry->shared;
    entry->held = entry->shared = 0;
}

/* Judges whether the client may hold `more` of the item. A client that holds nothing may have all
 * that is free, and if nobody holds anything a request always fits, because a total may be less
 * than one request. */
static enum ledger_verdict judge_share(const struct ledger *ledger,
                                       const struct ledger_entry *entry, enum ledger_item item,
                                       int64_t more) {
    const struct ledger_stock *stock = &ledger->stock[item];
    int64_t left = stock->total - stock->held - more;
    int64_t own = ledger_of_client(entry, item), others = own - entry->items[item];
    if (stock->total == 0 || stock->held == entry->items[item]) return LEDGER_HELD;
    if (left < 0) return LEDGER_FULL;
    bool divided = stock->times > 0 && others > 0;
    return divided && own + more > stock->times * left ? LEDGER_CLIENT_FULL : LEDGER_HELD;
}

enum ledger_verdict ledger_set(struct ledger *ledger, struct ledger_entry *entry,
                               enum ledger_item item, int64_t amount) {
    int64_t more = amount - entry->items[item];
    CHECK(entry->account && amount >= 0);
    enum ledger_verdict verdict = more > 0 ? judge_share(ledger, entry, item, more) : LEDGER_HELD;
    if (verdict != LEDGER_HELD) return verdict;
    entry->items[item] = amount;
    entry->account->items[item] += more;
    ledger->stock[item].held += more;
    return LEDGER_HELD;
}

int64_t ledger_of_client(const struct ledger_entry *entry, enum ledger_item item) {
    return entry->account ? entry->account->items[item] : 0;
}
