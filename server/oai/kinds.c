/* The table of kinds. */
#include "server/oai/kind.h"

#include <string.h>

/* Seeds of tests/fuzz/fuzz_request.c have the places: new kinds come last. */
static const struct oai_kind *const kinds[] = {
    &oai_chat,
    &oai_completion,
    &oai_native,
    &oai_infill,
    &oai_tokenize,
    &oai_detokenize,
    &oai_template,
    &oai_responses,
    &oai_messages,
    &oai_count_tokens,
    &oai_chat_count,
    &oai_invocation,
    &oai_embeddings,
    &oai_rerank,
    &oai_rerank_v2,
    &oai_score,
    &oai_ollama_chat,
    &oai_ollama_generate,
    &oai_ollama_embed,
    &oai_ollama_embeddings,
    &oai_ollama_show_kind,
    &oai_load_adapter,
    &oai_unload_adapter,
    &oai_response_count,
};

const struct oai_kind *oai_kind_at(int index) {
    return index >= 0 && (size_t)index < sizeof kinds / sizeof *kinds ? kinds[index] : NULL;
}

oai_error_fn *oai_error_of_path(const char *path) {
    static const char ollama[] = "/api/", misled[] = "/api/v1/"; /* misled: OpenAI's clients */
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(kinds[i]->path, path) == 0) return kinds[i]->error;
    if (strncmp(path, misled, sizeof misled - 1) == 0) return NULL;
    return strncmp(path, ollama, sizeof ollama - 1) == 0 ? oai_ollama_chat.error : NULL;
}
