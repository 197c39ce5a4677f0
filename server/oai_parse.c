#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "server/oai_fields.h"

/* One request being read: what every step needs. Steps return 0, or -1 with *error filled. */
struct parse {
    const cJSON *body;
    const struct oai_rules *rules;
    struct arena *arena;
    struct oai_request *out;
    struct oai_error *error;
};

static int no_memory(const struct parse *p) {
    struct fault fault;
    fault_set(&fault, ERR_NOMEM, NULL, "the request needs too much memory");
    return oai_refuse_fault(p->error, &fault);
}

static int missing(const struct parse *p, const char *field) {
    return oai_refuse(p->error, 400, "missing_required_parameter", field,
                      "Missing required parameter: '%s'.", field);
}

__attribute__((format(printf, 3, 4))) static int invalid(const struct parse *p, const char *field,
                                                         const char *format, ...) {
    struct fault fault;
    char text[sizeof fault.text];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fault_set(&fault, ERR_INVALID, field, "%s", text);
    return oai_refuse_fault(p->error, &fault);
}

/* --- typed members --- */

static int get_float(const struct parse *p, const char *path, const cJSON *object, const char *key,
                     double min, double max, float *value) {
    struct fault fault;
    double number = *value;
    if (json_num(object, path, key, min, max, &number, &fault))
        return oai_refuse_fault(p->error, &fault);
    *value = (float)number;
    return 0;
}

static int get_int(const struct parse *p, const char *path, const cJSON *object, const char *key,
                   int64_t min, int32_t max, int32_t *value) {
    struct fault fault;
    int64_t number = *value;
    if (json_int(object, path, key, min, max, &number, &fault))
        return oai_refuse_fault(p->error, &fault);
    *value = (int32_t)number;
    return 0;
}

static int get_bool(const struct parse *p, const char *path, const cJSON *object, const char *key,
                    bool *value) {
    struct fault fault;
    if (json_bool(object, path, key, value, &fault)) return oai_refuse_fault(p->error, &fault);
    return 0;
}

static int get_str(const struct parse *p, const char *path, const cJSON *object, const char *key,
                   const char **value) {
    struct fault fault;
    if (json_str(object, path, key, value, &fault)) return oai_refuse_fault(p->error, &fault);
    return 0;
}

static int get_object(const struct parse *p, const char *key, const cJSON **value) {
    *value = json_get(p->body, key);
    if (!*value || cJSON_IsObject(*value)) return 0;
    return invalid(p, key, "expected an object, found %s", json_type_name(*value));
}

/* --- model --- */

static int parse_model(struct parse *p) {
    const char *name = NULL;
    if (get_str(p, NULL, p->body, "model", &name)) return -1;
    if (!name) return 0;
    for (int i = 0; i < p->rules->name_count; i++)
        if (strcmp(name, p->rules->names[i]) == 0) return 0;
    return oai_refuse(p->error, 404, "model_not_found", "model",
                      "The model `%.128s` does not exist or you do not have access to it.", name);
}

/* --- sampling --- */

/* request > the model's generation_config > OpenAI */
static void preset_sampling(struct parse *p) {
    const struct engine_info *info = p->rules->info;
    p->out->sampling = (struct engine_request){
        .temperature = isnan(info->temperature) ? 1 : info->temperature,
        .top_p = isnan(info->top_p) ? 1 : info->top_p,
        .min_p = isnan(info->min_p) ? 0 : info->min_p,
        .repetition = isnan(info->repetition) ? 1 : info->repetition,
        .top_k = info->top_k > 0 ? info->top_k : 0,
        .top_logprobs = -1,
        .kv = {.budget = -1,
               .buffer = -1,
               .chunk = -1,
               .sinks = -1,
               .recent = -1,
               .horizon = NAN,
               .reuse = true,
               .retain = true},
    };
}

/* All 64 bits of the digits; a double would lose those above 2^53. */
static int parse_seed(struct parse *p) {
    const cJSON *node = json_get(p->body, "seed");
    int64_t number;
    if (!node) return 0;
    if (json_node_int(node, INT64_MIN, INT64_MAX, &number) == 0) {
        p->out->sampling.seed = (uint64_t)number;
    } else {
        const char *text = cJSON_IsNumber(node) ? node->valuestring : NULL;
        char *end = NULL;
        errno = 0;
        if (text && text[0] != '-') p->out->sampling.seed = strtoull(text, &end, 10);
        if (!end || *end || errno) return invalid(p, "seed", "expected a 64-bit integer");
    }
    p->out->seed_given = true;
    return 0;
}

static int parse_sampling(struct parse *p) {
    struct engine_request *s = &p->out->sampling;
    const cJSON *body = p->body;
    int32_t n = 1, top_k = s->top_k;
    if (get_float(p, NULL, body, "temperature", 0, 2, &s->temperature) ||
        get_float(p, NULL, body, "top_p", 0, 1, &s->top_p) ||
        get_float(p, NULL, body, "min_p", 0, 1, &s->min_p) ||
        get_float(p, NULL, body, "presence_penalty", -2, 2, &s->presence) ||
        get_float(p, NULL, body, "frequency_penalty", -2, 2, &s->frequency) ||
        get_float(p, NULL, body, "repetition_penalty", 0, OAI_REPETITION_MAX, &s->repetition) ||
        get_int(p, NULL, body, "top_k", -1, INT32_MAX, &top_k) ||
        get_bool(p, NULL, body, "ignore_eos", &s->ignore_eos) ||
        get_int(p, NULL, body, "n", 1, 128, &n) || parse_seed(p))
        return -1;
    s->top_k = top_k < 0 ? 0 : top_k;
    if (s->repetition <= 0) return invalid(p, "repetition_penalty", "expected a number above 0");
    if (n != 1)
        return oai_refuse(p->error, 400, "unsupported_parameter", "n",
                          "Unsupported value for 'n': only one choice per request is served.");
    return 0;
}

static int parse_bias(struct parse *p) {
    const cJSON *object, *node;
    struct engine_bias *bias;
    int count = 0;
    char field[OAI_PATH];
    if (get_object(p, "logit_bias", &object)) return -1;
    int size = cJSON_GetArraySize(object);
    if (!object || !size) return 0;
    if (size > OAI_BIAS_MAX)
        return invalid(p, "logit_bias", "expected at most %d entries, found %d", OAI_BIAS_MAX,
                       size);
    bias = arena_alloc(p->arena, (size_t)size, sizeof *bias);
    if (!bias) return no_memory(p);
    cJSON_ArrayForEach(node, object) {
        char *end;
        errno = 0;
        long id = strtol(node->string, &end, 10);
        oai_path(field, "logit_bias.%.64s", node->string);
        if (!isdigit((unsigned char)node->string[0]) || errno || *end ||
            id >= p->rules->info->vocab)
            return invalid(p, field, "the key must be a token id from 0 to %d",
                           p->rules->info->vocab - 1);
        if (!cJSON_IsNumber(node) || !(fabs(node->valuedouble) <= 100))
            return invalid(p, field, "expected a number from -100 to 100");
        bias[count++] = (struct engine_bias){(int32_t)id, (float)node->valuedouble};
    }
    p->out->sampling.bias = bias;
    p->out->sampling.bias_count = count;
    return 0;
}

/* --- what ends an answer --- */

static int add_stop(struct parse *p, struct engine_stop *stops, const cJSON *node,
                    const char *field) {
    if (!cJSON_IsString(node))
        return invalid(p, field, "expected a string, found %s", json_type_name(node));
    size_t size = strlen(node->valuestring);
    if (size == 0) return invalid(p, field, "a stop string must not be empty");
    if (size > OAI_STOP_BYTES)
        return invalid(p, field, "expected at most %d bytes, found %zu", OAI_STOP_BYTES, size);
    const char *text = arena_strndup(p->arena, node->valuestring, size);
    if (!text) return no_memory(p);
    stops[p->out->sampling.stop_count++] = (struct engine_stop){text, size};
    return 0;
}

static int parse_stop(struct parse *p) {
    const cJSON *stop = json_get(p->body, "stop"), *node;
    struct engine_stop *stops;
    char field[OAI_PATH];
    if (!stop) return 0;
    if (!cJSON_IsString(stop) && !cJSON_IsArray(stop))
        return invalid(p, "stop", "expected a string or an array of strings, found %s",
                       json_type_name(stop));
    if (cJSON_IsArray(stop) && cJSON_GetArraySize(stop) > OAI_STOPS_MAX)
        return invalid(p, "stop", "expected at most %d stop strings", OAI_STOPS_MAX);
    stops = arena_alloc(p->arena, OAI_STOPS_MAX, sizeof *stops);
    if (!stops) return no_memory(p);
    p->out->sampling.stops = stops;
    if (cJSON_IsString(stop)) return add_stop(p, stops, stop, "stop");
    cJSON_ArrayForEach(node, stop) {
        oai_path(field, "stop[%d]", p->out->sampling.stop_count);
        if (add_stop(p, stops, node, field)) return -1;
    }
    return 0;
}

/* An array of token ids at `node` into the arena. */
static int parse_ids(struct parse *p, const cJSON *node, const char *field, const int32_t **ids,
                     size_t *count) {
    int size = cJSON_GetArraySize(node);
    int32_t *out = arena_alloc(p->arena, size > 0 ? (size_t)size : 1, sizeof *out);
    const cJSON *item;
    char path[OAI_PATH];
    size_t i = 0;
    if (!out) return no_memory(p);
    cJSON_ArrayForEach(item, node) {
        int64_t id;
        if (json_node_int(item, 0, p->rules->info->vocab - 1, &id)) {
            oai_path(path, "%s[%zu]", field, i);
            return invalid(p, path, "expected a token id from 0 to %d", p->rules->info->vocab - 1);
        }
        out[i++] = (int32_t)id;
    }
    *ids = out;
    *count = i;
    return 0;
}

static int parse_stop_ids(struct parse *p) {
    const cJSON *node = json_get(p->body, "stop_token_ids");
    size_t count = 0;
    if (!node) return 0;
    if (!cJSON_IsArray(node))
        return invalid(p, "stop_token_ids", "expected an array, found %s", json_type_name(node));
    if (cJSON_GetArraySize(node) > OAI_STOP_IDS_MAX)
        return invalid(p, "stop_token_ids", "expected at most %d ids", OAI_STOP_IDS_MAX);
    if (parse_ids(p, node, "stop_token_ids", &p->out->sampling.stop_ids, &count)) return -1;
    p->out->sampling.stop_id_count = (int32_t)count;
    return 0;
}

/* max_tokens 0 asks for nothing but the prompt's scores, which only `echo` shows. */
static int parse_max_tokens(struct parse *p) {
    struct oai_request *out = p->out;
    bool chat = out->kind == OAI_CHAT;
    out->max_tokens = -1;
    if (get_int(p, NULL, p->body, "max_tokens", chat ? 1 : 0, INT32_MAX, &out->max_tokens))
        return -1;
    if (chat && get_int(p, NULL, p->body, "max_completion_tokens", 1, INT32_MAX, &out->max_tokens))
        return -1;
    if (out->max_tokens == 0 && !out->echo)
        return invalid(p, "max_tokens", "expected at least 1 unless 'echo' is set");
    if (get_int(p, NULL, p->body, "min_tokens", 0, INT32_MAX, &out->sampling.min_tokens)) return -1;
    if (out->max_tokens >= 0 && out->sampling.min_tokens > out->max_tokens)
        return invalid(p, "min_tokens", "expected at most max_tokens (%d), found %d",
                       out->max_tokens, out->sampling.min_tokens);
    return 0;
}

/* --- what the answer shows --- */

static int parse_logprobs(struct parse *p) {
    struct engine_request *s = &p->out->sampling;
    bool wanted = false;
    int32_t top = -1;
    if (p->out->kind == OAI_COMPLETION)
        return get_int(p, NULL, p->body, "logprobs", 0, OAI_LOGPROBS_MAX, &s->top_logprobs);
    if (get_bool(p, NULL, p->body, "logprobs", &wanted) ||
        get_int(p, NULL, p->body, "top_logprobs", 0, OAI_LOGPROBS_MAX, &top))
        return -1;
    if (top > 0 && !wanted)
        return invalid(p, "top_logprobs", "'logprobs' must be true when 'top_logprobs' is used");
    s->top_logprobs = wanted ? (top > 0 ? top : 0) : -1;
    return 0;
}

static int parse_stream(struct parse *p) {
    struct oai_request *out = p->out;
    const cJSON *options;
    if (get_bool(p, NULL, p->body, "stream", &out->stream) ||
        get_object(p, "stream_options", &options))
        return -1;
    if (!options) return 0;
    if (!out->stream) return invalid(p, "stream_options", "only allowed when 'stream' is true");
    return get_bool(p, "stream_options", options, "include_usage", &out->include_usage) ||
                   get_bool(p, "stream_options", options, "continuous_usage_stats",
                            &out->continuous_usage)
               ? -1
               : 0;
}

/* --- kv --- */

static int parse_horizon(struct parse *p, const cJSON *kv) {
    const cJSON *node = json_get(kv, "horizon");
    float *horizon = &p->out->sampling.kv.horizon;
    if (!node) return 0;
    if (cJSON_IsString(node) && strcmp(node->valuestring, "inf") == 0) {
        *horizon = INFINITY;
        return 0;
    }
    if (!cJSON_IsNumber(node) || !(node->valuedouble >= 1 && node->valuedouble <= 1e9))
        return invalid(p, "kv.horizon", "expected a number from 1 to 1e9 or \"inf\"");
    *horizon = (float)node->valuedouble;
    return 0;
}

static int parse_report(struct parse *p, const cJSON *kv) {
    static const char *const names[] = {[ENGINE_REPORT_NONE] = "none",
                                        [ENGINE_REPORT_LENGTHS] = "lengths",
                                        [ENGINE_REPORT_POSITIONS] = "positions"};
    const char *report = names[ENGINE_REPORT_NONE];
    if (get_str(p, "kv", kv, "report", &report)) return -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(report, names[i])) continue;
        p->out->sampling.kv.report = (enum engine_report)i;
        return 0;
    }
    return invalid(p, "kv.report", "expected \"none\", \"lengths\" or \"positions\"");
}

/* The kv object is ours alone, so a misspelt member is an error even where unknown fields of the
 * body are forgiven: it would silently change what is kept. */
static int parse_kv_names(struct parse *p, const cJSON *kv) {
    static const char *const names[] = {"policy", "budget",  "buffer", "chunk",  "sinks",
                                        "recent", "horizon", "reuse",  "retain", "report"};
    const cJSON *node;
    cJSON_ArrayForEach(node, kv) {
        bool known = false;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            known |= strcmp(node->string, names[i]) == 0;
        if (!known) {
            char field[OAI_PATH];
            oai_path(field, "kv.%.64s", node->string);
            return oai_refuse(p->error, 400, "unknown_parameter", field, "Unknown parameter: '%s'.",
                              field);
        }
    }
    return 0;
}

static int parse_kv(struct parse *p) {
    struct engine_kv *kv = &p->out->sampling.kv;
    const cJSON *object;
    if (get_object(p, "kv", &object)) return -1;
    if (!object) return 0;
    if (parse_kv_names(p, object) || get_str(p, "kv", object, "policy", &kv->policy) ||
        get_int(p, "kv", object, "budget", 1, INT32_MAX, &kv->budget) ||
        get_int(p, "kv", object, "buffer", 0, INT32_MAX, &kv->buffer) ||
        get_int(p, "kv", object, "chunk", 1, INT32_MAX, &kv->chunk) ||
        get_int(p, "kv", object, "sinks", 0, INT32_MAX, &kv->sinks) ||
        get_int(p, "kv", object, "recent", 0, INT32_MAX, &kv->recent) ||
        get_bool(p, "kv", object, "reuse", &kv->reuse) ||
        get_bool(p, "kv", object, "retain", &kv->retain) || parse_horizon(p, object) ||
        parse_report(p, object))
        return -1;
    if (kv->policy) kv->policy = arena_strndup(p->arena, kv->policy, strlen(kv->policy));
    return kv->policy || !json_get(object, "policy") ? 0 : no_memory(p);
}

static int parse_salt(struct parse *p) {
    static const char *const names[] = {"cache_salt", "prompt_cache_key"};
    p->out->salt = "";
    for (int i = 0; i < 2; i++) {
        const char *salt = NULL;
        if (get_str(p, NULL, p->body, names[i], &salt)) return -1;
        if (!salt) continue;
        if (strlen(salt) > OAI_SALT_BYTES)
            return invalid(p, names[i], "expected at most %d bytes", OAI_SALT_BYTES);
        if (!p->out->salt[0]) p->out->salt = salt;
    }
    return 0;
}

/* --- prompts --- */

static int parse_messages(struct parse *p) {
    p->out->prompt_field = "messages";
    if (!json_get(p->body, "messages")) return missing(p, "messages");
    return oai_build_context(p->body, &p->out->context, p->error);
}

/* A string, a list of ids, or a list with one of either. */
static int parse_prompt(struct parse *p) {
    const cJSON *prompt = json_get(p->body, "prompt");
    const char *field = p->out->prompt_field = "prompt";
    if (!prompt) return missing(p, "prompt");
    if (cJSON_IsArray(prompt) && (cJSON_IsString(prompt->child) || cJSON_IsArray(prompt->child))) {
        if (prompt->child->next)
            return oai_refuse(p->error, 400, "unsupported_parameter", "prompt",
                              "Unsupported value for 'prompt': one prompt per request is served.");
        prompt = prompt->child;
        field = "prompt[0]";
    }
    if (cJSON_IsString(prompt)) {
        p->out->text = prompt->valuestring;
        return 0;
    }
    if (!cJSON_IsArray(prompt))
        return invalid(p, field, "expected a string or an array of token ids, found %s",
                       json_type_name(prompt));
    if (!prompt->child) return invalid(p, field, "expected at least one token id");
    return parse_ids(p, prompt, field, &p->out->ids, &p->out->id_count);
}

/* --- whole bodies --- */

static int parse_generation(struct parse *p) {
    struct oai_request *out = p->out;
    if (out->kind == OAI_COMPLETION && get_bool(p, NULL, p->body, "echo", &out->echo)) return -1;
    if (parse_sampling(p) || parse_max_tokens(p) || parse_bias(p) || parse_stop(p) ||
        parse_stop_ids(p) || parse_logprobs(p) || parse_stream(p) || parse_kv(p) || parse_salt(p))
        return -1;
    out->sampling.prompt_logprobs = out->echo && out->sampling.top_logprobs >= 0;
    return 0;
}

static int parse_tokenize(struct parse *p) {
    if (get_bool(p, NULL, p->body, "return_token_strs", &p->out->return_token_strs)) return -1;
    if (json_get(p->body, "messages")) return parse_messages(p);
    if (parse_prompt(p)) return -1;
    if (p->out->text) return 0;
    return invalid(p, "prompt", "expected a string");
}

static int parse_detokenize(struct parse *p) {
    const cJSON *tokens = json_get(p->body, "tokens");
    if (!tokens) return missing(p, "tokens");
    if (!cJSON_IsArray(tokens))
        return invalid(p, "tokens", "expected an array of token ids, found %s",
                       json_type_name(tokens));
    return parse_ids(p, tokens, "tokens", &p->out->ids, &p->out->id_count);
}

static int parse_flags(struct parse *p) {
    p->out->add_special = true;
    return get_bool(p, NULL, p->body, "add_special_tokens", &p->out->add_special) ||
                   get_bool(p, NULL, p->body, "parse_special", &p->out->parse_special)
               ? -1
               : 0;
}

int oai_parse(enum oai_kind kind, const cJSON *body, const struct oai_rules *rules,
              struct arena *arena, struct oai_request *out, struct oai_error *error) {
    struct parse p = {body, rules, arena, out, error};
    *out = (struct oai_request){.kind = kind, .max_tokens = -1, .salt = ""};
    *error = (struct oai_error){0};
    if (!cJSON_IsObject(body))
        return oai_refuse(error, 400, NULL, NULL, "The body must be a JSON object, found %s.",
                          json_type_name(body));
    preset_sampling(&p);
    if (parse_model(&p) || oai_check_fields(kind, body, rules->strict, error) || parse_flags(&p))
        return -1;
    switch (kind) {
    case OAI_CHAT:
        return parse_messages(&p) || parse_generation(&p) ? -1 : 0;
    case OAI_COMPLETION:
        return parse_prompt(&p) || parse_generation(&p) ? -1 : 0;
    case OAI_TOKENIZE:
        return parse_tokenize(&p);
    case OAI_DETOKENIZE:
        return parse_detokenize(&p);
    }
    return oai_refuse(error, 500, NULL, NULL, "unknown kind of request");
}

void oai_request_close(struct oai_request *request) {
    cJSON_Delete(request->context);
    request->context = NULL;
}

int oai_parse_json(const char *data, size_t size, const struct oai_rules *rules, cJSON **tree,
                   struct oai_error *error) {
    struct fault fault;
    /* room for every token id of a full context, and the rest of a large chat */
    struct json_limits limits = {.bytes = rules->body_bytes,
                                 .depth = OAI_JSON_DEPTH,
                                 .unique_keys = true,
                                 .nodes = 100000 + 2 * (size_t)rules->info->max_model_len};
    int rc = json_parse(data, size, &limits, tree, &fault);
    if (rc == 0) return 0;
    if (rc == ERR_NOMEM) return oai_refuse_fault(error, &fault);
    return oai_refuse(error, 400, NULL, NULL,
                      "We could not parse the JSON body of your request: %s. (HINT: This likely "
                      "means you aren't using your HTTP library correctly. The API expects a JSON "
                      "payload, but what was sent was not valid JSON.)",
                      fault.text);
}

/* --- lengths --- */

int oai_fit(struct oai_request *request, size_t count, const struct oai_rules *rules,
            struct oai_error *error) {
    const char *field = request->prompt_field;
    size_t longest = (size_t)rules->info->max_model_len;
    size_t wanted = request->max_tokens < 0 ? 1 : (size_t)request->max_tokens;
    if (count == 0)
        return oai_refuse(error, 400, "invalid_value", field,
                          "Invalid value for '%s': the prompt has no tokens.", field);
    if (count > longest || (count == longest && wanted > 0))
        return oai_refuse(error, 400, "context_length_exceeded", field,
                          "This model's maximum context length is %zu tokens. However, your %s "
                          "resulted in %zu tokens. Please reduce the length of the %s.",
                          longest, field, count, field);
    if (wanted > longest - count)
        return oai_refuse(error, 400, "context_length_exceeded", field,
                          "This model's maximum context length is %zu tokens. However, you "
                          "requested %zu tokens (%zu in the %s, %zu in the completion). Please "
                          "reduce the length of the %s or completion.",
                          longest, count + wanted, count, field, wanted, field);
    if (request->max_tokens < 0) {
        int preset =
            request->kind == OAI_COMPLETION ? OAI_COMPLETION_TOKENS : rules->default_max_tokens;
        wanted = longest - count;
        if (preset > 0 && wanted > (size_t)preset) wanted = (size_t)preset;
    }
    request->sampling.max_tokens = (int32_t)wanted;
    if (request->sampling.min_tokens > request->sampling.max_tokens)
        return oai_refuse(error, 400, "invalid_value", "min_tokens",
                          "Invalid value for 'min_tokens': the answer may have at most %d tokens.",
                          request->sampling.max_tokens);
    return 0;
}
