/* The ledger of the memory that requests hold: their bodies, large JSON trees, uploads in progress
 * and text answers that wait for their clients to read them. It says how much each client holds, so
 * that no client can stop the others by holding all of it.
 *
 *   own part   Each request with a connection has `own` bytes that nobody else can take. As the
 *              number of connections is bounded, small requests are never refused for want of
 *              memory, whatever others hold, also where every connection is a client.
 *   shared     What a request holds beyond its own part comes from the rest, `shared`. A client
 *              may hold there twice as much as remains free: dynamic thresholds (Choudhury and
 *              Hahne, IEEE/ACM Transactions on Networking 1998). So a client alone gets two thirds
 *              of it, two get two fifths each, and something is always left for a client that
 *              holds nothing.
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

struct ledger {
    size_t total;               /* bytes that requests may hold together */
    size_t own;                 /* each request's own part of it */
    size_t shared, shared_held; /* the latter may be more, see ledger_charge */
    size_t held;                /* bytes, own parts included */
    struct ledger_account *buckets[LEDGER_BUCKETS];
};

/* The memory of one request. Zeroed: nothing, and it is in no account. */
struct ledger_entry {
    struct ledger_account *account; /* belongs to the ledger */
    size_t held;
    size_t shared; /* the part of `held` beyond the own part */
    bool detached; /* has no own part any more */
};

enum ledger_verdict {
    LEDGER_HELD,
    LEDGER_FULL,        /* others hold too much */
    LEDGER_CLIENT_FULL, /* the client's other requests hold too much */
};

/* `requests`: the most that are open at once. Their own parts together are a quarter of `total` at
 * most, and LEDGER_OWN_MAX bytes each. */
#define LEDGER_OWN_MAX ((size_t)64 << 10)
void ledger_open(struct ledger *ledger, size_t total, int requests);
void ledger_close(struct ledger *ledger); /* every entry has left */

/* Opens the request's entry in its client's account. False: there is no memory for an account. */
bool ledger_enter(struct ledger *ledger, struct ledger_entry *entry, const uint8_t client[16]);
/* Gives back what the entry holds, and the account with its last entry. An entry that is in no
 * account does nothing. */
void ledger_leave(struct ledger *ledger, struct ledger_entry *entry);

/* Takes `size` bytes more for an entry that is in an account, or none. */
enum ledger_verdict ledger_hold(struct ledger *ledger, struct ledger_entry *entry, size_t size);
/* The same for what cannot be refused any more, an answer that is computed. Then the shared part
 * may be overdrawn. A client that holds more than two thirds of it gets nothing else until it
 * has less.
 */
void ledger_charge(struct ledger *ledger, struct ledger_entry *entry, size_t size);
/* The request goes on without its connection, whose place another may take: what it holds becomes
 * shared. Nothing is refused here; until it is given back, others may get less. */
void ledger_detach(struct ledger *ledger, struct ledger_entry *entry);
/* Gives back all that the entry holds; it stays in its account. */
void ledger_give_back(struct ledger *ledger, struct ledger_entry *entry);

#endif
