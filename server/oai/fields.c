#include "server/oai/fields.h"

#include <stdio.h>
#include <string.h>

#include "base/json.h"

/* The only value of a field that leaves the answer as we give it. `null` always does. */
enum neutral {
    ANY,   /* read elsewhere, or without influence on the answer */
    NEVER, /* no value */
    FALSE,
    TRUE,
    ONE,
    NONE,     /* "none" */
    MEDIUM,   /* "medium" */
    EMPTY,    /* "", [] or {} */
    ZERO,     /* 0 or false */
    TEXT,     /* {"type": "text"} */
    ONLYTEXT, /* ["text"] */
};

#define CHAT       (1u << OAI_CHAT)
#define COMPLETION (1u << OAI_COMPLETION)
#define TOKENIZE   (1u << OAI_TOKENIZE)
#define DETOKENIZE (1u << OAI_DETOKENIZE)
#define BOTH       (CHAT | COMPLETION)
#define TEMPLATE   (1u << OAI_TEMPLATE)
#define RENDER     (CHAT | TOKENIZE | TEMPLATE)
#define ALL        (BOTH | TOKENIZE | DETOKENIZE | TEMPLATE)

static const struct field {
    const char *name;
    unsigned kinds;
    enum neutral neutral;
} fields[] = {
    /* OpenAI */
    {"model", ALL, ANY},
    {"messages", RENDER, ANY},
    {"prompt", COMPLETION | TOKENIZE, ANY},
    {"audio", CHAT, NEVER},
    {"best_of", COMPLETION, ANY},
    {"echo", COMPLETION, ANY},
    {"echo", CHAT, FALSE},
    {"frequency_penalty", BOTH, ANY},
    {"function_call", CHAT, NONE},
    {"functions", CHAT, EMPTY},
    {"logit_bias", BOTH, ANY},
    {"logprobs", BOTH, ANY},
    {"max_completion_tokens", BOTH, ANY},
    {"max_tokens", BOTH, ANY},
    {"metadata", BOTH, ANY},
    {"modalities", CHAT, ONLYTEXT},
    {"moderation", CHAT, NEVER},
    {"n", BOTH, ANY},
    {"parallel_tool_calls", CHAT, ANY},
    {"prediction", CHAT, ANY},
    {"presence_penalty", BOTH, ANY},
    {"prompt_cache_key", BOTH, ANY},
    {"prompt_cache_options", BOTH, ANY},
    {"prompt_cache_retention", BOTH, ANY},
    {"reasoning_effort", RENDER, ANY},
    {"response_format", BOTH, TEXT},
    {"safety_identifier", BOTH, ANY},
    {"seed", BOTH, ANY},
    {"service_tier", BOTH, ANY},
    {"stop", BOTH, ANY},
    {"store", BOTH, ANY},
    {"stream", BOTH, ANY},
    {"stream_options", BOTH, ANY},
    {"suffix", COMPLETION, EMPTY},
    {"temperature", BOTH, ANY},
    {"tool_choice", CHAT, ANY},
    {"tools", RENDER, ANY},
    {"top_logprobs", CHAT, ANY},
    {"top_logprobs", COMPLETION, ZERO},
    {"top_p", BOTH, ANY},
    {"user", BOTH, ANY},
    {"verbosity", CHAT, MEDIUM},
    {"web_search_options", CHAT, NEVER},
    /* vLLM */
    {"add_generation_prompt", RENDER, ANY},
    {"add_special_tokens", COMPLETION | TOKENIZE, ANY},
    {"add_special_tokens", CHAT, FALSE},
    {"allowed_token_ids", BOTH, NEVER},
    {"bad_words", BOTH, EMPTY},
    {"cache_salt", BOTH, ANY},
    {"chat_template", RENDER, NEVER},
    {"chat_template_kwargs", RENDER, ANY},
    {"continue_final_message", RENDER, ANY},
    {"documents", CHAT, EMPTY},
    {"guided_choice", BOTH, NEVER},
    {"guided_grammar", BOTH, NEVER},
    {"guided_json", BOTH, NEVER},
    {"guided_regex", BOTH, NEVER},
    {"ignore_eos", BOTH, ANY},
    {"include_reasoning", CHAT, TRUE},
    {"include_stop_str_in_output", BOTH, FALSE},
    {"length_penalty", BOTH, ONE},
    {"logits_processors", BOTH, EMPTY},
    {"min_p", BOTH, ANY},
    {"min_tokens", BOTH, ANY},
    {"priority", BOTH, ANY},
    {"prompt_embeds", COMPLETION, NEVER},
    {"prompt_logprobs", BOTH, ANY},
    {"repetition_penalty", BOTH, ANY},
    {"request_id", BOTH, ANY},
    {"return_token_ids", BOTH, ANY},
    {"return_token_strs", TOKENIZE, ANY},
    {"return_tokens_as_token_ids", BOTH, FALSE},
    {"separate_reasoning", CHAT, ANY},
    {"session_id", BOTH, ANY},
    {"skip_special_tokens", BOTH, TRUE},
    {"spaces_between_special_tokens", BOTH, ANY},
    {"stop_token_ids", BOTH, ANY},
    {"structured_outputs", BOTH, NEVER},
    {"tokens", DETOKENIZE, ANY},
    {"top_k", BOTH, ANY},
    {"truncate_prompt_tokens", BOTH, NEVER},
    {"use_beam_search", BOTH, FALSE},
    /* ours, llama.cpp's and SGLang's */
    {"dry_multiplier", BOTH, ZERO},
    {"ebnf", BOTH, NEVER},
    {"grammar", BOTH, EMPTY},
    {"json_schema", BOTH, NEVER},
    {"kv", BOTH, ANY},
    {"mirostat", BOTH, ZERO},
    {"n_predict", BOTH, NEVER},
    {"parse_special", COMPLETION | TOKENIZE, ANY},
    {"regex", BOTH, NEVER},
    {"repeat_penalty", BOTH, ONE},
    {"samplers", BOTH, EMPTY},
    {"structural_tag", BOTH, NEVER},
    {"thinking", CHAT, NEVER},
    {"thinking_token_budget", BOTH, NEVER},
    {"typical_p", BOTH, ONE},
    {"xtc_probability", BOTH, ZERO},
};

static bool is_text(const cJSON *node, const char *text) {
    return cJSON_IsString(node) && strcmp(node->valuestring, text) == 0;
}

static bool is_empty(const cJSON *node) {
    return is_text(node, "") || ((cJSON_IsArray(node) || cJSON_IsObject(node)) && !node->child);
}

static bool is_neutral(const cJSON *node, enum neutral neutral) {
    switch (neutral) {
    case ANY:
        return true;
    case NEVER:
        return false;
    case FALSE:
        return cJSON_IsFalse(node);
    case TRUE:
        return cJSON_IsTrue(node);
    case ONE:
        return cJSON_IsNumber(node) && node->valuedouble == 1;
    case NONE:
        return is_text(node, "none");
    case MEDIUM:
        return is_text(node, "medium");
    case EMPTY:
        return is_empty(node);
    case ZERO:
        return cJSON_IsFalse(node) || (cJSON_IsNumber(node) && node->valuedouble == 0);
    case TEXT:
        return cJSON_IsObject(node) && is_text(json_get(node, "type"), "text");
    case ONLYTEXT:
        return cJSON_IsArray(node) && node->child && !node->child->next &&
               is_text(node->child, "text");
    }
    return false;
}

static const struct field *find(const char *name, unsigned kind) {
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].kinds & kind) && strcmp(fields[i].name, name) == 0) return &fields[i];
    return NULL;
}

const char *oai_field_at(enum oai_kind kind, int index) {
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].kinds & (1u << kind)) && index-- == 0) return fields[i].name;
    return NULL;
}

int oai_check_fields(enum oai_kind kind, const cJSON *body, bool strict, struct oai_error *error) {
    const cJSON *node;
    cJSON_ArrayForEach(node, body) {
        const struct field *field = find(node->string, 1u << kind);
        if (!field && strict)
            return oai_refuse(error, 400, "unknown_parameter", node->string,
                              "Unknown parameter: '%.128s'.", node->string);
        if (field && !cJSON_IsNull(node) && !is_neutral(node, field->neutral))
            return oai_refuse(error, 400, "unsupported_parameter", node->string,
                              "Unsupported value for '%s': this server does not support it.",
                              node->string);
    }
    return 0;
}
