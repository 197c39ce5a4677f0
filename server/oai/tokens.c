/* Finds tokens in a model's vocabulary. */
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

/* A place in a text of tokens: `byte` bytes of token `at` lie before it. */
struct place {
    const int32_t *ids;
    size_t count, at, byte;
};

static size_t bytes_at(const struct engine *engine, const struct place *p, const char **bytes) {
    size_t size = p->at ? engine_token_bytes(engine, p->ids[p->at], bytes)
                        : engine_first_bytes(engine, p->ids[p->at], bytes);
    *bytes += p->byte;
    return size - p->byte;
}

static void tokens_move(struct place *p, size_t bytes, bool whole) {
    p->byte = whole ? 0 : p->byte + bytes;
    p->at += whole;
}

/* Moves both places past the bytes that their next tokens have in common. false: they have none in
 * common. */
static bool step(const struct engine *engine, struct place *a, struct place *b) {
    const char *left = "", *right = "";
    if (a->at == a->count || b->at == b->count) return false;
    bool special = engine_token_is_special(engine, a->ids[a->at]);
    if (special || engine_token_is_special(engine, b->ids[b->at])) {
        if (a->byte || b->byte || a->ids[a->at] != b->ids[b->at]) return false;
        tokens_move(a, 0, true);
        tokens_move(b, 0, true);
        return true;
    }
    size_t left_size = bytes_at(engine, a, &left), right_size = bytes_at(engine, b, &right);
    size_t size = left_size < right_size ? left_size : right_size;
    if (size && memcmp(left, right, size) != 0) return false;
    tokens_move(a, size, size == left_size);
    tokens_move(b, size, size == right_size);
    return true;
}

int oai_continue_ids(const struct engine *engine, const int32_t *earlier, size_t count,
                     struct arena *arena, struct engine_ids *ids) {
    struct place a = {.ids = earlier, .count = count}, b = {.ids = ids->ids, .count = ids->count};
    size_t taken = 0, replaced = 0;
    while (step(engine, &a, &b)) {
        if (a.byte || b.byte) continue;
        taken = a.at;
        replaced = b.at;
    }
    size_t rest = ids->count - replaced;
    int32_t *joined = arena_alloc(arena, taken + rest + 1, sizeof *joined);
    if (!joined) return ERR_NOMEM;
    if (taken) memcpy(joined, earlier, taken * sizeof *joined);
    if (rest) memcpy(joined + taken, ids->ids + replaced, rest * sizeof *joined);
    *ids = (struct engine_ids){.ids = joined, .count = taken + rest};
    return 0;
}
