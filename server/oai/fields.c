/* The fields of requests: one table of those that several kinds of request have, to which each kind
 * adds its own (kind.h). A field that keepd does not implement is accepted only with a value that
 * would not change the answer; every other value is an error that names the field. */
#include "server/oai/fields.h"

#include <stdio.h>
#include <string.h>

#include "base/json.h"

#define SHARED (sizeof shared / sizeof *shared)

static const struct {
    unsigned group;
    struct oai_field field;
} shared[] = {
    {OAI_FIELDS_ANY, {"model", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"frequency_penalty", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"logit_bias", OAI_ANY}},
    {OAI_FIELDS_COMPLETION, {"logprobs", OAI_ANY}},
    {OAI_FIELDS_COMPLETION, {"max_completion_tokens", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"max_thinking_tokens", OAI_ANY}},
    {OAI_FIELDS_COMPLETION, {"max_tokens", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"metadata", OAI_ANY}},
    {OAI_FIELDS_COMPLETION, {"n", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"presence_penalty", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"prompt_cache_key", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"prompt_cache_options", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"prompt_cache_retention", OAI_ANY}},
    {OAI_FIELDS_COMPLETION, {"response_format", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"safety_identifier", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"seed", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"service_tier", OAI_ANY}},
    {OAI_FIELDS_COMPLETION, {"stop", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"store", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"stream", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"stream_options", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"temperature", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"top_p", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"user", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"allowed_token_ids", OAI_NEVER}},
    {OAI_FIELDS_GENERATION, {"bad_words", OAI_NOLIST}},
    {OAI_FIELDS_GENERATION, {"cache_salt", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"guided_choice", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"guided_grammar", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"guided_json", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"guided_regex", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"ignore_eos", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"include_stop_str_in_output", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"length_penalty", OAI_ONE}},
    {OAI_FIELDS_GENERATION, {"logits_processors", OAI_NOLIST}},
    {OAI_FIELDS_GENERATION, {"min_p", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"min_tokens", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"priority", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"prompt_logprobs", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"repetition_penalty", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"repetition_detection", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"request_id", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"return_token_ids", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"return_tokens_as_token_ids", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"session_id", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"skip_special_tokens", OAI_TRUE}},
    {OAI_FIELDS_GENERATION, {"spaces_between_special_tokens", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"speculate", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"stop_token_ids", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"structured_outputs", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"top_k", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"truncate_prompt_tokens", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"use_beam_search", OAI_FALSE}},
    {OAI_FIELDS_GENERATION, {"dry_multiplier", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"dry_base", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"dry_allowed_length", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"dry_penalty_last_n", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"dry_sequence_breakers", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"ebnf", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"grammar", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"json_schema", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"kv", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"mirostat", OAI_ZERO}},
    {OAI_FIELDS_COMPLETION, {"n_predict", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"regex", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"repeat_penalty", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"samplers", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"structural_tag", OAI_NEVER}},
    {OAI_FIELDS_GENERATION, {"thinking_token_budget", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"return_progress", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"timings", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"timings_per_token", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"verbose", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"typical_p", OAI_ONE}},
    {OAI_FIELDS_GENERATION, {"xtc_probability", OAI_ANY}},
    {OAI_FIELDS_GENERATION, {"xtc_threshold", OAI_ANY}},
    {OAI_FIELDS_MESSAGES, {"messages", OAI_ANY}},
    {OAI_FIELDS_MESSAGES, {"reasoning", OAI_ANY}},
    {OAI_FIELDS_MESSAGES, {"reasoning_effort", OAI_ANY}},
    {OAI_FIELDS_MESSAGES, {"thinking", OAI_ANY}},
    {OAI_FIELDS_MESSAGES, {"tools", OAI_ANY}},
    {OAI_FIELDS_MESSAGES, {"add_generation_prompt", OAI_ANY}},
    {OAI_FIELDS_MESSAGES, {"chat_template", OAI_NEVER}},
    {OAI_FIELDS_MESSAGES, {"chat_template_kwargs", OAI_ANY}},
    {OAI_FIELDS_MESSAGES, {"continue_final_message", OAI_ANY}},
    {OAI_FIELDS_PROMPT, {"prompt", OAI_ANY}},
    {OAI_FIELDS_PROMPT, {"add_special_tokens", OAI_ANY}},
    {OAI_FIELDS_PROMPT, {"parse_special", OAI_ANY}},
    {OAI_FIELDS_NATIVE, {"n_probs", OAI_ANY}},
    {OAI_FIELDS_NATIVE, {"return_tokens", OAI_ANY}},
    {OAI_FIELDS_NATIVE, {"cache_prompt", OAI_ANY}},
    {OAI_FIELDS_NATIVE, {"response_fields", OAI_ANY}},
    {OAI_FIELDS_NATIVE, {"post_sampling_probs", OAI_FALSE}},
    {OAI_FIELDS_NATIVE, {"dynatemp_range", OAI_ZERO}},
    {OAI_FIELDS_NATIVE, {"n_indent", OAI_ZERO}},
    {OAI_FIELDS_NATIVE, {"lora", OAI_NOLIST}},
};

static bool is_text(const cJSON *node, const char *text) {
    return cJSON_IsString(node) && strcmp(node->valuestring, text) == 0;
}

static bool is_neutral(const cJSON *node, enum oai_neutral neutral) {
    switch (neutral) {
    case OAI_ANY:
        return true;
    case OAI_NEVER:
        return false;
    case OAI_FALSE:
        return cJSON_IsFalse(node);
    case OAI_TRUE:
        return cJSON_IsTrue(node);
    case OAI_ONE:
        return cJSON_IsNumber(node) && node->valuedouble == 1;
    case OAI_NONE:
        return is_text(node, "none");
    case OAI_NOLIST:
        return cJSON_IsArray(node) && !node->child;
    case OAI_ZERO:
        return cJSON_IsFalse(node) || (cJSON_IsNumber(node) && node->valuedouble == 0);
    case OAI_ONLYTEXT:
        return cJSON_IsArray(node) && node->child && !node->child->next &&
               is_text(node->child, "text");
    case OAI_TOOLS:
        return is_text(node, "none") || (cJSON_IsArray(node) && !node->child);
    }
    return false;
}

/* Returns the shared fields first, then the kind's own. A kind's own field may be a shared one with
 * other values. */
static const struct oai_field *field_at(const struct oai_kind *kind, int index) {
    for (size_t i = 0; i < SHARED; i++)
        if ((shared[i].group & kind->groups) && index-- == 0) return &shared[i].field;
    for (const struct oai_field *own = kind->fields; own && own->name; own++)
        if (index-- == 0) return own;
    return NULL;
}

static const struct oai_field *fields_find(const struct oai_kind *kind, const char *name) {
    const struct oai_field *field;
    for (const struct oai_field *own = kind->fields; own && own->name; own++)
        if (strcmp(own->name, name) == 0) return own;
    for (int i = 0; (field = field_at(kind, i)); i++)
        if (strcmp(field->name, name) == 0) return field;
    return NULL;
}

bool oai_is_shared(const struct oai_kind *kind, const char *name) {
    for (size_t i = 0; i < SHARED; i++)
        if ((shared[i].group & kind->groups) && strcmp(shared[i].field.name, name) == 0)
            return true;
    return false;
}

const char *oai_field_at(const struct oai_kind *kind, int index) {
    const struct oai_field *field = field_at(kind, index);
    return field ? field->name : NULL;
}

/* Returns the kind's own name of a field that others call `name`; NULL: it has none. */
static const char *name_here(const struct oai_kind *kind, const char *name) {
    for (const struct oai_alias *alias = kind->aliases; alias && alias->chat; alias++)
        if (strcmp(alias->chat, name) == 0 && strcmp(alias->own, name) != 0) return alias->own;
    return NULL;
}

int oai_check_fields(const struct oai_kind *kind, const cJSON *body, bool strict,
                     struct oai_error *error) {
    const cJSON *node;
    cJSON_ArrayForEach(node, body) {
        const struct oai_field *field = fields_find(kind, node->string);
        if (!field && strict)
            return oai_refuse(error, 400, "unknown_parameter", node->string,
                              "Unknown parameter: '%.128s'.", node->string);
        const char *instead = name_here(kind, node->string);
        if (field && !cJSON_IsNull(node) && !is_neutral(node, field->neutral) && instead)
            return oai_refuse(error, 400, "unsupported_parameter", node->string,
                              "Unsupported parameter: '%s' is '%s' in requests to %s.",
                              node->string, instead, kind->path);
        if (field && !cJSON_IsNull(node) && !is_neutral(node, field->neutral) &&
            field->neutral == OAI_TOOLS)
            return oai_refuse(error, 400, "unsupported_parameter", node->string,
                              "Unsupported parameter: '%s' is the old form of '%s'. Declare each "
                              "function in 'tools' as {\"type\": \"function\", \"function\": "
                              "{...}}; 'tool_choice' names one as {\"type\": \"function\", "
                              "\"function\": {\"name\": ...}}.",
                              node->string,
                              strcmp(node->string, "functions") == 0 ? "tools" : "tool_choice");
        if (field && !cJSON_IsNull(node) && !is_neutral(node, field->neutral))
            return oai_refuse(error, 400, "unsupported_parameter", node->string,
                              "Unsupported value for '%s': this server does not support it.",
                              node->string);
    }
    return 0;
}

const char *oai_left_out(const char *type) {
    if (strstr(type, "image")) return "[An image was left out: this server reads text only.]";
    if (strstr(type, "audio")) return "[A sound was left out: this server reads text only.]";
    if (strstr(type, "video")) return "[A video was left out: this server reads text only.]";
    if (strstr(type, "file") || strstr(type, "document"))
        return "[A file was left out: this server reads text only.]";
    return "[A part was left out: this server reads text only.]";
}

bool oai_has_role(const cJSON *message, const char *role) {
    const cJSON *node = json_get(message, "role");
    return cJSON_IsString(node) && strcmp(node->valuestring, role) == 0;
}
