/* State files: one conversation as bytes, for another process, or another machine with the same
 * model and gates.
 *
 *   head     256 bytes, see state.c: magic, version, sizes, model and gates by digest, shape, kv
 *            parameters, space, id, counts, hashes of the tokens
 *   tokens   int32 [token_count]
 *   sizes    uint64 [block_count]
 *   blocks   the backend's, one after the other (kern.h, "A piece of a snapshot")
 *   digest   SHA-256 of all before it: tells a torn file
 *   mac      HMAC-SHA256 over the digest, with the key of the state directory: tells a forged one
 *
 * All little-endian. Pure functions over (data, size): nothing is believed before it is checked,
 * no size or offset is used before it was compared with what there is. Any thread. */
#ifndef KEEPD_ENGINE_STATE_H
#define KEEPD_ENGINE_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/sha256.h"
#include "kernels/kern.h"
#include "paging/policy.h"

#define STATE_HEAD_BYTES 256
#define STATE_SEAL_BYTES ((size_t)2 * SHA256_BYTES)
#define STATE_TOKENS_MAX (1 << 30)
#define STATE_BLOCKS_MAX ((1 << 20) + 1)

/* The model that a state belongs to: files of another model, other gates or another shape are not
 * ours. */
struct state_identity {
    uint8_t weights[SHA256_BYTES], gates[SHA256_BYTES];
    int32_t dtype; /* enum kern_dtype of keys and values */
    int32_t layers, heads_kv, head_dim;
};

struct state_head {
    struct state_identity identity;
    uint64_t id;
    uint8_t space[16];
    uint64_t hint;
    int64_t saved_unix; /* seconds */
    struct kv_params kv;
    int32_t token_count, prompt_end;
    int32_t evicted_at; /* as in struct conversation */
    bool fresh;         /* exact, and its turn began from nothing */
    int32_t block_count;
    uint64_t file_size;
    uint64_t prompt_hash, token_hash; /* conversation_hash of prompt_end and of all tokens */
};

/* A checked file; points into its bytes, which must outlive it. */
struct state_view {
    struct state_head head;
    const char *tokens;        /* int32 [token_count], aligned to nothing */
    struct kern_block *blocks; /* [block_count], owned */
    struct kern_report report; /* entries and pages, of whoever checked what is in the blocks */
};

/* Can a file hold these parameters, so that they come back equal? Those of bounded policies. */
bool state_holds(const struct kv_params *kv);

/* The size of a file with these counts and `block_bytes` in all blocks together; 0 when the numbers
 * are out of range or overflow. */
size_t state_file_size(int32_t token_count, int32_t block_count, size_t block_bytes);

/* More bytes than a file with this head can have: what its policy keeps, in its dtype, and the
 * queries of its window. So a sparse file is refused before memory is taken for it. */
uint64_t state_size_limit(const struct state_head *head);

/* Writes head, tokens and sizes; returns where the blocks begin. `head->file_size` is the size of
 * the whole file, for which `out` has room. */
size_t state_write_head(const struct state_head *head, const int32_t *tokens, const uint64_t *sizes,
                        char *out);
/* Digest and mac in the last STATE_SEAL_BYTES of the file. */
void state_seal(char *data, size_t size, const uint8_t key[SHA256_BYTES]);

/* ERR_MALFORMED: torn; ERR_INVALID: sealed with another key. Always before the rest is used. */
int state_check_seal(const char *data, size_t size, const uint8_t key[SHA256_BYTES],
                     struct fault *fault);
/* The first STATE_HEAD_BYTES alone. ERR_MALFORMED, ERR_UNSUPPORTED (another version or an unknown
 * policy). */
int state_parse_head(const char *data, size_t size, struct state_head *out, struct fault *fault);
bool state_is_ours(const struct state_head *head, const struct state_identity *identity);
/* The whole file, but for what is inside the blocks. ERR_NOMEM besides. */
int state_parse(const char *data, size_t size, struct state_view *out, struct fault *fault);
void state_view_close(struct state_view *view);

#endif
