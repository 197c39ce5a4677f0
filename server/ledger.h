/* The ledger of what clients hold of the things that all of them share, so that no client can stop
 * the others by holding everything: places in the queue, prompt tokens that wait, responses in the
 * background, connections, and the memory of requests (their bodies, large JSON trees, uploads in
 * progress and text answers that wait for their clients to read them).
 *
 *   share      A client may hold a few times as much as remains free: dynamic thresholds (Choudhury
 *              and Hahne, IEEE/ACM Transactions on Networking 1998). With twice as much, a client
 *              alone gets two thirds, two get two fifths each, and something is always left for a
 *              client that holds nothing. What a client that holds nothing asks for is not bounded
 *              by shares, so that small totals serve, too.
 *
 * Of the memory, shares are of what exceeds the own parts of requests:
 *
 *   own part   Each request with a connection has `own` bytes that nobody else can take. As the
 *              number of connections is bounded, small requests are never refused for want of
 *              memory, whatever others hold, also where every connection is a client.
 *   shared     What a request holds beyond its own part comes from the rest, `shared`, of which a
 *              client has a share; one that holds nothing has no more than that, either.
 *
 * A client is 16 bytes that the caller chooses. All calls belong to one thread, the server's loop.
 * Sizes are bytes. */
#ifndef KEEPD_SERVER_LEDGER_H
#define KEEPD_SERVER_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LEDGER_BUCKETS = 1024 };

struct ledger_account;

/* The things besides memory that are counted. */
enum ledger_item {
    LEDGER_PLACES,
    LEDGER_TOKENS,
    LEDGER_BACKGROUND, /* responses that are computed without a client */
    LEDGER_CONNECTIONS,
    LEDGER_ITEMS
};

struct ledger_stock {
    int64_t total; /* 0 = no limit */
    int64_t times; /* a client may hold at most so many times what remains free; 0 = any amount */
    int64_t held;
};

struct ledger {
    struct ledger_stock stock[LEDGER_ITEMS];
    size_t total;               /* bytes that requests may hold together */
    size_t own;                 /* each request's own part of it */
    size_t shared, shared_held; /* shared_held may be more than `shared`, see ledger_charge */
    size_t held;                /* bytes, own parts included */
    struct ledger_account *buckets[LEDGER_BUCKETS];
};

/* The holdings of one request or one connection. All zero: it holds nothing and is in no account.
 */
struct ledger_entry {
    struct ledger_account *account; /* belongs to the ledger */
    int64_t items[LEDGER_ITEMS];
    size_t held;
    size_t shared; /* the part of `held` beyond the own part */
    bool detached; /* the entry has lost its own part */
};

enum ledger_verdict {
    LEDGER_HELD,
    LEDGER_FULL,        /* others hold too much */
    LEDGER_CLIENT_FULL, /* the client's other entries hold too much */
};

/* `requests`: the most that are open at once. Their own parts together are a quarter of `total` at
 * most, and LEDGER_OWN_MAX bytes each. */
#define LEDGER_OWN_MAX ((size_t)64 << 10)
void ledger_open(struct ledger *ledger, size_t total, int requests);
void ledger_close(struct ledger *ledger); /* every entry has left */

/* Opens an entry in its client's account. false: no memory for an account. */
bool ledger_enter(struct ledger *ledger, struct ledger_entry *entry, const uint8_t client[16]);
/* Gives back everything that the entry holds, and frees the account with its last entry. For an
 * entry that is in no account, does nothing. */
void ledger_leave(struct ledger *ledger, struct ledger_entry *entry);

/* Takes `size` more bytes for an entry, which may be in an account or in none. */
enum ledger_verdict ledger_hold(struct ledger *ledger, struct ledger_entry *entry, size_t size);
/* Takes `size` more bytes for something that cannot be refused any more, such as a computed answer.
 * The shared part may then be overdrawn. A client that holds more than two thirds of it gets
 * nothing else until it holds less. */
void ledger_charge(struct ledger *ledger, struct ledger_entry *entry, size_t size);
/* Detaches a request from its connection, whose place another request may get: everything it holds
 * becomes shared. Nothing is refused here; until it is given back, others may get less. */
void ledger_detach(struct ledger *ledger, struct ledger_entry *entry);
/* Gives back the memory that the entry holds; the entry remains in its account. */
void ledger_give_back(struct ledger *ledger, struct ledger_entry *entry);

/* Sets how much of an item an entry holds; the entry must be in an account. Only a larger amount
 * can be refused; then nothing changes. */
enum ledger_verdict ledger_set(struct ledger *ledger, struct ledger_entry *entry,
                               enum ledger_item item, int64_t amount);
/* Returns how much of an item all entries of this entry's client hold together. */
int64_t ledger_of_client(const struct ledger_entry *entry, enum ledger_item item);

#endif
