/* Writes and parses state files. A file comes from outside the process, so every number in it is
 * checked before it is used; the seal shows torn and forged files. */
#include "engine/disk/state.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "engine/disk/conversation_key.h"
#include "kernels/row.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "state files are little-endian");

/* Files of VERSION_BEFORE have 0 for `history`. */
enum { VERSION = 3, VERSION_BEFORE = 2, POLICY_BYTES = 24 };

static const char magic[8] = {'k', 'e', 'e', 'p', 'd', 'k', 'v', '\n'};

/* The bytes of this struct are the head: fixed widths, ordered so that there is no padding. The
 * version covers the meaning of all fields and everything else that a policy's row computes; a
 * changed meaning needs a new version. */
struct head_bytes {
    char magic[8];
    uint32_t version, block_count;
    uint64_t file_size;
    uint64_t id;
    uint8_t space[16];
    uint64_t hint;
    uint32_t saved_unix, ttl; /* ttl: 0 in older files, whose saved_unix had 64 bits */
    uint8_t weights[SHA256_BYTES];
    uint8_t gates[SHA256_BYTES];
    int32_t dtype, layers, heads_kv, head_dim;
    char policy[POLICY_BYTES]; /* padded with NUL, and with one at least */
    uint64_t client;           /* earlier files have NUL here, too, and their readers ignore it */
    int32_t budget, buffer, chunk, sinks, recent;
    uint32_t chosen; /* struct kv_choices */
    int32_t token_count, prompt_end;
    uint64_t prompt_hash, token_hash;
    float values[KV_CHOICES_MAX];
    uint32_t history; /* 2 * evicted_at + fresh */
};
_Static_assert(sizeof(struct head_bytes) == STATE_HEAD_BYTES, "no padding");

/* ---- Sizes ---- */

static bool counts_fit(int64_t token_count, int64_t block_count) {
    return token_count >= 1 && token_count <= STATE_TOKENS_MAX && block_count >= 1 &&
           block_count <= STATE_BLOCKS_MAX;
}

/* Returns the offset of the blocks. The counts were checked by counts_fit, so nothing overflows. */
static size_t state_blocks_at(int32_t token_count, int32_t block_count) {
    return STATE_HEAD_BYTES + (size_t)token_count * sizeof(int32_t) +
           (size_t)block_count * sizeof(uint64_t);
}

size_t state_file_size(int32_t token_count, int32_t block_count, size_t block_bytes) {
    size_t size;
    if (!counts_fit(token_count, block_count)) return 0;
    if (__builtin_add_overflow(state_blocks_at(token_count, block_count), block_bytes, &size))
        return 0;
    if (__builtin_add_overflow(size, STATE_SEAL_BYTES, &size)) return 0;
    return size;
}

/* Allows twice the entries of budget, buffer and chunk, and 128 query heads for each KV head. Both
 * exceed any cache, so the limit refuses no file that a cache wrote. Each number is below 2^31, so
 * products of three are computed in double. */
uint64_t state_size_limit(const struct state_head *head, uint64_t state_bytes) {
    const struct state_identity *its = &head->identity;
    const struct kv_params *kv = &head->kv;
    double streams = (double)its->layers * its->heads_kv, tokens = head->token_count;
    double held = 2 * ((double)kv->budget + kv->buffer + kv->chunk + 1);
    if (held > tokens || !kv->policy->bounded) held = tokens;
    double row = (double)row_code_bytes((enum kern_dtype)its->dtype, its->head_dim) +
                 (double)row_factor_bytes((enum kern_dtype)its->dtype);
    double window = kv->rule.score == KERN_SCORE_ATTENTION ? kv->rule.observe.window : 0;
    double members = (double)kern_members_max(&kv->rule, kv->budget);
    double queries = window * streams * 128 * (double)its->head_dim * sizeof(float);
    double most = (double)state_blocks_at(head->token_count, head->block_count) + (1 << 20) +
                  streams * (64 + held * (2 * row + 32) + members * 32) + queries +
                  (double)state_bytes;
    return most < 0x1p62 ? (uint64_t)most : UINT64_MAX;
}

/* ---- Out ---- */

static void pack_kv(const struct kv_params *kv, struct head_bytes *out) {
    struct kv_choices choices;
    CHECK(strlen(kv->policy->name) < sizeof out->policy);
    memcpy(out->policy, kv->policy->name, strlen(kv->policy->name));
    out->budget = kv->budget;
    out->buffer = kv->buffer;
    out->chunk = kv->chunk;
    out->sinks = kv->rule.sinks;
    out->recent = kv->rule.recent;
    kv_params_write(kv, &choices);
    out->chosen = choices.fields;
    memcpy(out->values, choices.values, sizeof out->values);
}

static void pack_head(const struct state_head *head, struct head_bytes *bytes) {
    const struct state_identity *identity = &head->identity;
    *bytes = (struct head_bytes){.version = VERSION,
                                 .block_count = (uint32_t)head->block_count,
                                 .file_size = head->file_size,
                                 .id = head->id,
                                 .client = head->client,
                                 .hint = head->hint,
                                 .saved_unix = (uint32_t)head->saved_unix,
                                 .ttl = (uint32_t)head->ttl,
                                 .dtype = identity->dtype,
                                 .layers = identity->layers,
                                 .heads_kv = identity->heads_kv,
                                 .head_dim = identity->head_dim,
                                 .token_count = head->token_count,
                                 .prompt_end = head->prompt_end,
                                 .prompt_hash = head->prompt_hash,
                                 .token_hash = head->token_hash,
                                 .history = 2 * (uint32_t)head->evicted_at + head->fresh};
    pack_kv(&head->kv, bytes);
    memcpy(bytes->magic, magic, sizeof magic);
    memcpy(bytes->space, head->space, sizeof bytes->space);
    memcpy(bytes->weights, identity->weights, sizeof bytes->weights);
    memcpy(bytes->gates, identity->gates, sizeof bytes->gates);
}

size_t state_write_head(const struct state_head *head, const int32_t *tokens, const uint64_t *sizes,
                        char *out) {
    struct head_bytes bytes;
    size_t tokens_size = (size_t)head->token_count * sizeof *tokens;
    CHECK(counts_fit(head->token_count, head->block_count));
    pack_head(head, &bytes);
    memcpy(out, &bytes, sizeof bytes);
    memcpy(out + sizeof bytes, tokens, tokens_size);
    memcpy(out + sizeof bytes + tokens_size, sizes, (size_t)head->block_count * sizeof *sizes);
    return state_blocks_at(head->token_count, head->block_count);
}

/* Hashes the head without the members that copies of one conversation may not share. The space is
 * secret, so the name tells nobody else what the conversation is. */
uint64_t state_name(const struct state_head *head) {
    struct head_bytes bytes;
    uint8_t digest[SHA256_BYTES];
    uint64_t name;
    pack_head(head, &bytes);
    bytes.block_count = bytes.history = 0;
    bytes.file_size = bytes.id = bytes.hint = bytes.client = 0;
    bytes.saved_unix = bytes.ttl = 0;
    sha256(&bytes, sizeof bytes, digest);
    memcpy(&name, digest, sizeof name);
    return name != 0 ? name : 1;
}

/* Signs the digest. The magic bytes are part of the signed text, so that this use of the key
 * differs from every other use. */
static void sign(const uint8_t *digest, const uint8_t *key, uint8_t *mac) {
    uint8_t text[sizeof magic + SHA256_BYTES];
    memcpy(text, magic, sizeof magic);
    memcpy(text + sizeof magic, digest, SHA256_BYTES);
    sha256_hmac(key, text, sizeof text, mac);
}

void state_seal(char *data, size_t size, const uint8_t key[SHA256_BYTES]) {
    CHECK(size >= STATE_SEAL_BYTES);
    uint8_t *digest = (uint8_t *)data + size - STATE_SEAL_BYTES;
    sha256(data, size - STATE_SEAL_BYTES, digest);
    sign(digest, key, digest + SHA256_BYTES);
}

/* ---- In ---- */

static bool equal_in_constant_time(const uint8_t *a, const uint8_t *b, size_t size) {
    unsigned different = 0;
    for (size_t i = 0; i < size; i++) different |= a[i] ^ b[i];
    return different == 0;
}

int state_compare_seal(const uint8_t digest[SHA256_BYTES], const uint8_t seal[STATE_SEAL_BYTES],
                       const uint8_t key[SHA256_BYTES], struct fault *fault) {
    uint8_t mac[SHA256_BYTES];
    if (!equal_in_constant_time(digest, seal, SHA256_BYTES))
        return fault_set(fault, ERR_MALFORMED, "state", "torn or changed: its checksum is another");
    sign(digest, key, mac);
    if (!equal_in_constant_time(mac, seal + SHA256_BYTES, sizeof mac))
        return fault_set(fault, ERR_INVALID, "state",
                         "forged, or written with another key than this directory's");
    return 0;
}

int state_check_seal(const char *data, size_t size, const uint8_t key[SHA256_BYTES],
                     struct fault *fault) {
    uint8_t digest[SHA256_BYTES];
    if (size < STATE_HEAD_BYTES + STATE_SEAL_BYTES)
        return fault_set(fault, ERR_MALFORMED, "state", "torn: it has only %zu bytes", size);
    sha256(data, size - STATE_SEAL_BYTES, digest);
    return state_compare_seal(digest, (const uint8_t *)data + size - STATE_SEAL_BYTES, key, fault);
}

static int refuse_state(struct fault *fault, const char *what) {
    return fault_set(fault, ERR_MALFORMED, "state", "%s", what);
}

static int parse_kv(const struct head_bytes *bytes, struct kv_params *kv, struct fault *fault) {
    char name[POLICY_BYTES + 1] = {0};
    memcpy(name, bytes->policy, POLICY_BYTES);
    const struct policy *policy = policy_find(name);
    if (!policy || strlen(policy->name) >= POLICY_BYTES)
        return fault_set(fault, ERR_UNSUPPORTED, "state", "unknown policy '%s'", name);
    *kv =
        (struct kv_params){.budget = bytes->budget, .buffer = bytes->buffer, .chunk = bytes->chunk};
    kv_params_set_policy(kv, policy);
    kv->rule.sinks = bytes->sinks;
    kv->rule.recent = bytes->recent;
    struct kv_choices choices = {.fields = bytes->chosen};
    memcpy(choices.values, bytes->values, sizeof choices.values);
    int rc = kv_params_read(kv, &choices, fault);
    return rc != 0 ? rc : kv_params_check(kv, fault);
}

static int check_numbers(const struct head_bytes *bytes, struct fault *fault) {
    if (memcmp(bytes->magic, magic, sizeof magic) != 0) return refuse_state(fault, "no state file");
    if (bytes->version != VERSION && bytes->version != VERSION_BEFORE)
        return fault_set(fault, ERR_UNSUPPORTED, "state", "version %u, this is version %d",
                         bytes->version, VERSION);
    if (bytes->version == VERSION_BEFORE && bytes->history != 0)
        return refuse_state(fault, "reserved bytes are not zero");
    if (!counts_fit(bytes->token_count, bytes->block_count))
        return refuse_state(fault, "token or block count out of range");
    if (bytes->prompt_end < 1 || bytes->prompt_end > bytes->token_count)
        return refuse_state(fault, "the prompt's end is not among the tokens");
    if (bytes->history / 2 > (uint32_t)bytes->token_count)
        return refuse_state(fault, "its last eviction is not among the tokens");
    if (bytes->ttl > INT32_MAX) return refuse_state(fault, "its time to live is out of range");
    if (bytes->id == 0) return refuse_state(fault, "it has no id");
    return 0;
}

int state_parse_head(const char *data, size_t size, struct state_head *out, struct fault *fault) {
    struct head_bytes bytes;
    if (size < sizeof bytes) return refuse_state(fault, "torn: shorter than its head");
    memcpy(&bytes, data, sizeof bytes);
    int rc = check_numbers(&bytes, fault);
    if (rc == 0) rc = parse_kv(&bytes, &out->kv, fault);
    if (rc != 0) return rc;
    out->identity = (struct state_identity){.dtype = bytes.dtype,
                                            .layers = bytes.layers,
                                            .heads_kv = bytes.heads_kv,
                                            .head_dim = bytes.head_dim};
    memcpy(out->identity.weights, bytes.weights, sizeof bytes.weights);
    memcpy(out->identity.gates, bytes.gates, sizeof bytes.gates);
    memcpy(out->space, bytes.space, sizeof out->space);
    out->id = bytes.id;
    out->client = bytes.client;
    out->hint = bytes.hint;
    out->saved_unix = bytes.saved_unix;
    out->ttl = (int32_t)bytes.ttl;
    out->token_count = bytes.token_count;
    out->prompt_end = bytes.prompt_end;
    bool known = bytes.version == VERSION; /* an old file may have evicted with its last token */
    out->evicted_at = known ? (int32_t)(bytes.history / 2) : bytes.token_count;
    out->fresh = known && bytes.history % 2 != 0;
    out->block_count = (int32_t)bytes.block_count;
    out->file_size = bytes.file_size;
    out->prompt_hash = bytes.prompt_hash;
    out->token_hash = bytes.token_hash;
    return 0;
}

bool state_holds(const struct kv_params *kv) {
    struct head_bytes bytes = {.version = VERSION};
    struct kv_params back;
    struct fault fault;
    if (!kv->policy->bounded || strlen(kv->policy->name) >= sizeof bytes.policy) return false;
    pack_kv(kv, &bytes);
    return parse_kv(&bytes, &back, &fault) == 0 && kv_params_equal(kv, &back);
}

bool state_is_ours(const struct state_head *head, const struct state_identity *identity) {
    const struct state_identity *its = &head->identity;
    return memcmp(its->weights, identity->weights, sizeof its->weights) == 0 &&
           memcmp(its->gates, identity->gates, sizeof its->gates) == 0 &&
           its->dtype == identity->dtype && its->layers == identity->layers &&
           its->heads_kv == identity->heads_kv && its->head_dim == identity->head_dim;
}

static int parse_blocks(const char *data, size_t size, struct state_view *out,
                        struct fault *fault) {
    size_t at = state_blocks_at(out->head.token_count, out->head.block_count);
    size_t end = size - STATE_SEAL_BYTES;
    const char *sizes = data + at - (size_t)out->head.block_count * sizeof(uint64_t);
    out->blocks = mem_try_alloc((size_t)out->head.block_count, sizeof *out->blocks);
    if (!out->blocks) return fault_set(fault, ERR_NOMEM, "state", "no memory");
    for (int32_t i = 0; i < out->head.block_count; i++) {
        uint64_t block;
        memcpy(&block, sizes + (size_t)i * sizeof block, sizeof block);
        if (block > end - at) return refuse_state(fault, "a block reaches past the end");
        out->blocks[i] = (struct kern_block){data + at, (size_t)block};
        at += (size_t)block;
    }
    return at == end ? 0 : refuse_state(fault, "bytes are left after the blocks");
}

static int check_token_hashes(const struct state_view *view, struct fault *fault) {
    const struct state_head *head = &view->head;
    uint64_t hash = CONVERSATION_HASH;
    for (int32_t i = 0; i < head->token_count; i++) {
        int32_t token;
        memcpy(&token, view->tokens + (size_t)i * sizeof token, sizeof token);
        if (token < 0) return refuse_state(fault, "a negative token id");
        hash = conversation_hash(hash, &token, 1);
        if (i + 1 == head->prompt_end && hash != head->prompt_hash)
            return refuse_state(fault, "the prompt's hash is another");
    }
    return hash == head->token_hash ? 0 : refuse_state(fault, "the tokens' hash is another");
}

int state_parse(const char *data, size_t size, struct state_view *out, struct fault *fault) {
    *out = (struct state_view){0};
    int rc = state_parse_head(data, size, &out->head, fault);
    if (rc != 0) return rc;
    if (out->head.file_size != size)
        return refuse_state(fault, "torn: not as long as its head says");
    if (size - STATE_HEAD_BYTES < STATE_SEAL_BYTES ||
        state_blocks_at(out->head.token_count, out->head.block_count) > size - STATE_SEAL_BYTES)
        return refuse_state(fault, "torn: no room for what its head counts");
    out->tokens = data + STATE_HEAD_BYTES;
    rc = check_token_hashes(out, fault);
    if (rc == 0) rc = parse_blocks(data, size, out, fault);
    if (rc != 0) state_view_close(out);
    return rc;
}

void state_view_close(struct state_view *view) {
    mem_free(view->blocks);
    view->blocks = NULL;
}
