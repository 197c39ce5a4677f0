/* Tokens that keepd looks for in a model's vocabulary. */
#include <string.h>

#include "server/oai/fields.h"

int32_t oai_find_token(const struct engine *engine, const char *text) {
    struct engine_ids ids;
    struct arena arena;
    struct fault fault;
    const char *bytes = "";
    int32_t id = -1;
    arena_open(&arena, (size_t)1 << 20);
    if (engine_tokenize(engine, text, strlen(text), false, true, &arena, &ids, &fault) == 0 &&
        ids.count == 1 && engine_token_bytes(engine, ids.ids[0], &bytes) == strlen(text) &&
        memcmp(bytes, text, strlen(text)) == 0)
        id = ids.ids[0];
    arena_close(&arena);
    return id;
}

/* Finds the tokens by the names that families give them: Qwen2.5 and its successors; StarCoder. */
struct oai_fim oai_find_fim(const struct engine *engine) {
    static const char *const names[][4] = {
        {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"},
        {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct oai_fim fim = {
            true, oai_find_token(engine, names[i][0]), oai_find_token(engine, names[i][1]),
            oai_find_token(engine, names[i][2]), oai_find_token(engine, names[i][3])};
        if (fim.prefix >= 0 && fim.suffix >= 0 && fim.middle >= 0) return fim;
    }
    return (struct oai_fim){0};
}
