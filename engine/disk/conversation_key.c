#include "engine/disk/conversation_key.h"

#include <string.h>

#include "base/mem.h"
#include "base/splitmix.h"

uint64_t conversation_hash(uint64_t hash, const int32_t *tokens, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        hash = splitmix_mix(hash + SPLITMIX_STEP + (uint32_t)tokens[i]);
    return hash;
}

const uint64_t *conversation_search_hashes(struct conversation_search *search) {
    const struct conversation_query *query = search->query;
    if (search->hashes) return search->hashes;
    uint64_t *hashes = mem_try_alloc((size_t)query->prompt_count + 1, sizeof *hashes);
    if (!hashes) return NULL;
    hashes[0] = CONVERSATION_HASH;
    for (int32_t i = 0; i < query->prompt_count; i++)
        hashes[i + 1] = conversation_hash(hashes[i], &query->prompt[i], 1);
    search->hashes = hashes;
    return hashes;
}

void conversation_search_close(struct conversation_search *search) {
    mem_free(search->hashes);
}

int32_t conversation_usable(struct conversation_search *search,
                            const struct conversation_key *key) {
    const struct conversation_query *query = search->query;
    int32_t most = query->prompt_count - 1; /* at least one token is left to compute */
    if (key->prompt_end > most || memcmp(key->space, query->space, 16) != 0) return 0;
    if (!kv_params_equal(key->kv, query->kv)) return 0;
    const uint64_t *hashes = conversation_search_hashes(search);
    if (!hashes || hashes[key->prompt_end] != key->prompt_hash) return 0;
    bool whole = key->token_count <= most && hashes[key->token_count] == key->token_hash;
    return whole ? key->token_count : query->kv->whole ? 0 : key->prompt_end;
}
