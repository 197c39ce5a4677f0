/* API keys: authentication, rate limits, and the settings of tenants. Loop thread only.
 *
 * Keys are kept as digests keyed with a secret of this process. A lookup hashes the candidate and
 * compares all digests in full, so its time reveals nothing about the keys. */
#ifndef KEEPD_SERVER_KEYS_H
#define KEEPD_SERVER_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

#define KEYS_MAX      4096
#define KEY_BYTES_MAX 1024

/* The most keys that may have names, because each name is a label of several metrics. */
#define KEY_NAMES_MAX  256
#define KEY_NAME_MAX   32
#define KEY_WEIGHT_MAX 1000

/* The settings of a key in the key file. */
struct key_settings {
    char name[KEY_NAME_MAX + 1]; /* label in metrics; "" = none. Not always unique */
    int32_t weight;              /* share in proportion to others' */
    int64_t pages_max;           /* see struct engine_request; 0 = any */
    int64_t pins_max;            /* see struct engine_request; 0 = no pins */
    int64_t requests_max;        /* requests at once; 0 = any */
};

struct key {
    uint8_t digest[16];
    uint32_t listed; /* place in the list of all keys; used by keys_open alone */
    uint32_t line;   /* number of its line in the file, from 1 on; 0: not from the file */
    struct key_settings settings;
    double allowance;    /* requests that may start now, refilled by the rate */
    int64_t refilled_ns; /* 0: never used, so the allowance is full */
    uint64_t added; /* keys.reading when it was added, so a key that was removed and added again has
                       another number */
    uint64_t active; /* requests that wait or run */
    uint64_t requests, rejected, prompt_tokens,
        generation_tokens; /* since the key was first read */
};

struct keys {
    uint8_t secret[16];
    struct key *items; /* sorted by digest */
    size_t count;      /* 0 = no key needed */
    size_t named;      /* keys with a name */
    uint64_t reading;  /* how often the keys have been read, the last time included */
    struct key anyone;
};

/* Reads the keys. Each of `texts` is one; `file` (may be NULL) has one on each line; blank lines
 * and lines that begin with # are ignored. Settings may follow a key in the file: name=TEXT,
 * weight=N, pages=N, pins=N and requests=N. A key that is in the texts and in the file is one key
 * with the settings of the file; lines of the file for one key must have the same settings. A key
 * that is in `before` (may be NULL) keeps its allowance and its counts, and takes the new settings.
 * On failure *keys is empty and fault->field is "api-key" or "api-key-file". A file without any key
 * is a failure: it would open the server to everybody. */
int keys_open(struct keys *keys, char *const *texts, size_t text_count, const char *file,
              const struct keys *before, struct fault *fault);
void keys_close(struct keys *keys);
/* Copies all but the settings from the keys in `before` to the same keys in `keys`; both have the
 * same secret. keys_open calls it. Returns how many pairs it compared: fewer than there are keys in
 * both. */
size_t keys_inherit(struct keys *keys, const struct keys *before);

/* Finds a key by its text. NULL: unknown. If there are no keys, all clients share `anyone`. */
struct key *keys_find(struct keys *keys, const char *text);
/* Finds a key by the digest of one that was found before; NULL: a reload has removed it. */
struct key *keys_by_digest(struct keys *keys, const uint8_t digest[16]);

/* Token bucket: subtracts a request from the key's allowance, which is at most `per_minute`
 * requests and is refilled at that rate. Returns 0, or the milliseconds until the next request may
 * start. */
int64_t key_spend(struct key *key, int64_t per_minute, int64_t now_ns);

#endif
