/* The tokens that end a text, as a GGUF file says and names them. */
#include <string.h>

#include "model/translation.h"

enum { TOKEN_CONTROL = 3 };

/* Files name one end; a chat ends with others, too. */
static bool is_token(const struct gguf_string *token, const char *name) {
    return token->size == strlen(name) && memcmp(token->data, name, token->size) == 0;
}

/* In a vocabulary with channels (gpt-oss) <|end|> ends a message, and another follows. */
static bool ends_a_turn(const struct gguf_string *token, bool channels) {
    static const char *const names[] = {
        "<|im_end|>", "<|endoftext|>",   "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",
        "<|end|>",    "<end_of_turn>",   "<EOT>",      "<|EOT|>",    "<|return|>",
        "<|call|>",   "<|end_of_turn|>", "<turn|>",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (is_token(token, names[i])) return !channels || strcmp(names[i], "<|end|>") != 0;
    return false;
}

static int add_named_ends(const struct translation *t, cJSON *list) {
    const struct gguf_value *tokens, *types;
    const char *at = NULL;
    struct gguf_string token;
    bool channels = false;
    int rc = gguf_array(t->gguf, "tokenizer.ggml.tokens", GGUF_STRING, &tokens, t->fault);
    if (!rc) rc = gguf_array(t->gguf, "tokenizer.ggml.token_type", GGUF_I32, &types, t->fault);
    if (rc || !tokens || !types || types->count != tokens->count) return rc;
    while (!channels && gguf_next(tokens, &at, &token)) channels = is_token(&token, "<|channel|>");
    at = NULL;
    for (size_t i = 0; gguf_next(tokens, &at, &token); i++)
        if (gguf_element_int(types, i) == TOKEN_CONTROL && ends_a_turn(&token, channels) &&
            !translation_add_id(list, (int64_t)i))
            return translation_no_memory(t);
    return 0;
}

int translate_ends(const struct translation *t) {
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    cJSON *list = cJSON_AddArrayToObject(t->config, "eos_token_id");
    if (!list) return translation_no_memory(t);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        int64_t id = -1;
        int rc = gguf_token(t->gguf, keys[i], &id, t->fault);
        if (rc) return rc;
        if (id >= 0 && !translation_add_id(list, id)) return translation_no_memory(t);
    }
    return add_named_ends(t, list);
}
