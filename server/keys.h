/* API keys: who may ask, and how often. Loop thread only.
 *
 * Kept as digests under a secret of this process: a lookup hashes the candidate and compares all
 * digests in full, so its time says nothing about the keys. */
#ifndef KEEPD_SERVER_KEYS_H
#define KEEPD_SERVER_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

#define KEYS_MAX      4096
#define KEY_BYTES_MAX 1024

struct key {
    uint8_t digest[16];
    double allowance;    /* requests that may start now, refilled by the rate */
    int64_t refilled_ns; /* 0: never asked, so all of them */
};

struct keys {
    uint8_t secret[16];
    struct key *items; /* by digest */
    size_t count;      /* 0 = open to everybody */
    struct key anyone;
};

/* `texts` are taken as they are; `file` (may be NULL) has one key per line, blank lines and those
 * that begin with # do not count. Keys that are in `before` (may be NULL) keep what they may spend.
 * On failure *keys is empty and fault->field is "api-key" or "api-key-file". A file without any key
 * is a failure: it would open the server to everybody. */
int keys_open(struct keys *keys, char *const *texts, size_t text_count, const char *file,
              const struct keys *before, struct fault *fault);
void keys_close(struct keys *keys);
/* Keys that are in `before`, of the same secret, get what they may spend; keys_open does this.
 * Returns how many pairs it compared: fewer than there are keys in both. */
size_t keys_inherit(struct keys *keys, const struct keys *before);

/* NULL: not one of the keys. Without keys everybody is one and the same. */
struct key *keys_find(struct keys *keys, const char *text);

/* Takes one request off the key's allowance: `per_minute` refill it evenly and as many may come at
 * once. 0, or the milliseconds until the next may start. */
int64_t key_spend(struct key *key, int64_t per_minute, int64_t now_ns);

#endif
