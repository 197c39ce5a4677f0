/* State files hold one conversation as bytes, for another process, or another machine with the same
 * model and gates.
 *
 *   head     256 bytes, see state.c: magic, version, sizes, model and gates by digest, shape, kv
 *            parameters, space, id, counts, hashes of the tokens
 *   tokens   int32 [token_count]
 *   sizes    uint64 [block_count]
 *   blocks   the backend's, one after the other (kern_cache.h, "A piece of a snapshot")
 *   digest   SHA-256 of all before it: tells a torn file
 *   mac      HMAC-SHA256 over the digest, with the key of the state directory: tells a forged one
 *
 * All numbers are little-endian. The functions are pure, over (data, size), and may run on any
 * thread. They check all data before use and compare every size and offset with the bytes that
 * there are. */
#ifndef KEEPD_ENGINE_DISK_STATE_H
#define KEEPD_ENGINE_DISK_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/sha256.h"
#include "kernels/kern_cache.h"
#include "paging/policy.h"

#define STATE_HEAD_BYTES 256
#define STATE_SEAL_BYTES ((size_t)2 * SHA256_BYTES)
#define STATE_TOKENS_MAX (1 << 30)
#define STATE_BLOCKS_MAX ((1 << 20) + 1)

/* The model that a state belongs to. Files of another model, other gates or another shape are not
 * used. */
struct state_identity {
    uint8_t weights[SHA256_BYTES], gates[SHA256_BYTES];
    int32_t dtype; /* enum kern_dtype of keys and values */
    int32_t layers, heads_kv, head_dim;
};

struct state_head {
    struct state_identity identity;
    uint64_t id;
    uint8_t space[16];
    uint64_t client; /* the first bytes of that in struct conversation; 0: unknown */
    uint64_t hint;
    int64_t saved_unix; /* seconds, to the year 2106 */
    int32_t ttl;        /* as in struct conversation */
    struct kv_params kv;
    int32_t token_count, prompt_end;
    int32_t evicted_at; /* as in struct conversation */
    bool fresh;         /* as `exact` in struct conversation, and the turn began from nothing */
    int32_t block_count;
    uint64_t file_size;
    uint64_t prompt_hash, token_hash; /* conversation_hash of prompt_end and of all tokens */
};

/* A checked file; points into its bytes, which must outlive it. */
struct state_view {
    struct state_head head;
    const char *tokens;        /* int32 [token_count], aligned to nothing */
    struct kern_block *blocks; /* [block_count], owned */
    struct kern_report report; /* set by the caller that checks the blocks */
};

/* Returns the id that follows from what the conversation is: the head's identity, space, kv
 * parameters, and counts and hashes of the tokens. So every daemon gives the same conversation the
 * same name. Never 0. */
uint64_t state_name(const struct state_head *head);

/* Can a file hold these parameters and give them back equal? Only parameters of bounded policies
 * are written. */
bool state_holds(const struct kv_params *kv);

/* Returns the size of a file with these counts and `block_bytes` in all blocks together; 0 when the
 * numbers are out of range or overflow. */
size_t state_file_size(int32_t token_count, int32_t block_count, size_t block_bytes);

/* Returns an upper bound on the size of a file with this head: the entries that its policy keeps,
 * in its dtype, the queries of its window, and the recurrent states of this daemon's model. With
 * it, a sparse file is refused before memory is allocated for it. */
uint64_t state_size_limit(const struct state_head *head, uint64_t state_bytes);

/* Writes head, tokens and sizes; returns the offset of the blocks. `head->file_size` is the size of
 * the whole file, for which `out` has room. */
size_t state_write_head(const struct state_head *head, const int32_t *tokens, const uint64_t *sizes,
                        char *out);
/* Writes digest and mac to the last STATE_SEAL_BYTES of the file. */
void state_seal(char *data, size_t size, const uint8_t key[SHA256_BYTES]);

/* Checks a seal, the last STATE_SEAL_BYTES of a file, against the digest of all before it. Errors
 * as state_check_seal. */
int state_compare_seal(const uint8_t digest[SHA256_BYTES], const uint8_t seal[STATE_SEAL_BYTES],
                       const uint8_t key[SHA256_BYTES], struct fault *fault);
/* Checks digest and mac; always called before the rest of the file is used. ERR_MALFORMED: torn;
 * ERR_INVALID: sealed with another key. */
int state_check_seal(const char *data, size_t size, const uint8_t key[SHA256_BYTES],
                     struct fault *fault);
/* Parses the first STATE_HEAD_BYTES. ERR_MALFORMED, ERR_UNSUPPORTED (another version or an unknown
 * policy). */
int state_parse_head(const char *data, size_t size, struct state_head *out, struct fault *fault);
bool state_is_ours(const struct state_head *head, const struct state_identity *identity);
/* Parses the whole file except the contents of the blocks. Errors as of state_parse_head, and
 * ERR_NOMEM. */
int state_parse(const char *data, size_t size, struct state_view *out, struct fault *fault);
void state_view_close(struct state_view *view);

#endif
