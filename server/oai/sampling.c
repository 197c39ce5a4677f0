/* How tokens are chosen, what ends an answer and what it shows. */
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

/* --- how tokens are chosen --- */

struct engine_sampling oai_default_sampling(const struct engine_info *info) {
    static const struct engine_sampling openai = {1, 1, 0, 1, 0};
    return engine_choose_sampling(openai, &info->sampling);
}

/* Presets the sampling: the server's options, else the model's files, else OpenAI's values. The
 * request's fields replace them later. */
void oai_preset_sampling(struct oai_reader *r) {
    const struct engine_sampling sampling = oai_default_sampling(r->rules->info);
    r->out->sampling = (struct engine_request){
        .temperature = sampling.temperature,
        .top_p = sampling.top_p,
        .min_p = sampling.min_p,
        .repetition = sampling.repetition,
        .top_k = sampling.top_k,
        .top_logprobs = -1,
        .drafts = -1,
        .xtc_threshold = 0.1f,
        .loops = {.shortest = 8, .longest = 512, .count = r->rules->repetition_count},
        .dry = {.base = 1.75f, .allowed = 2, .last = 64},
        .kv = {.budget = -1,
               .buffer = -1,
               .chunk = -1,
               .sinks = -1,
               .recent = -1,
               .reuse = true,
               .retain = true},
    };
}

/* Reads all 64 bits of a seed; a double would lose digits above 2^53. */
static int read_seed(struct oai_reader *r) {
    const cJSON *node = json_get(r->body, "seed");
    int64_t number;
    if (!node) return 0;
    if (json_node_int(node, INT64_MIN, INT64_MAX, &number) == 0) {
        r->out->sampling.seed = (uint64_t)number;
    } else {
        const char *text = cJSON_IsNumber(node) ? node->valuestring : NULL;
        char *end = NULL;
        errno = 0;
        if (text && text[0] != '-') r->out->sampling.seed = strtoull(text, &end, 10);
        if (!end || *end || errno) return oai_invalid(r, "seed", "expected a 64-bit integer");
    }
    r->out->seed_given = true;
    return 0;
}

static int read_choice_count(struct oai_reader *r) {
    struct oai_request *out = r->out;
    out->n = 1;
    if (oai_get_int(r, NULL, r->body, "n", 1, OAI_N_MAX, &out->n)) return -1;
    if (out->n > OAI_CHOICES_MAX / out->prompt_count)
        return oai_invalid(r, "n",
                           "at most %d choices per request, found %d for each of %d prompts",
                           OAI_CHOICES_MAX, out->n, out->prompt_count);
    return 0;
}

/* Refuses a second name of the same number with another value. */
static int refuse_other(const struct oai_reader *r, const char *field, const char *other) {
    return oai_invalid(r, field, "'%s' means the same and has another value", other);
}

/* Reads the repetition penalty by vLLM's name or llama.cpp's. */
static int read_repetition(struct oai_reader *r) {
    static const char *const names[] = {"repetition_penalty", "repeat_penalty"};
    float *value = &r->out->sampling.repetition, other;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        other = *value;
        if (oai_get_float(r, NULL, r->body, names[i], OAI_REPETITION_MIN, OAI_REPETITION_MAX,
                          &other))
            return -1;
        if (i && json_get(r->body, names[0]) && other != *value)
            return refuse_other(r, names[0], names[i]);
        *value = other;
    }
    return 0;
}

static int read_numbers(struct oai_reader *r) {
    struct engine_request *s = &r->out->sampling;
    const cJSON *body = r->body;
    int32_t top_k = s->top_k;
    if (oai_get_float(r, NULL, body, "temperature", 0, OAI_TEMPERATURE_MAX, &s->temperature) ||
        oai_get_float(r, NULL, body, "top_p", 0, 1, &s->top_p) ||
        oai_get_float(r, NULL, body, "min_p", 0, 1, &s->min_p) ||
        oai_get_float(r, NULL, body, "presence_penalty", -2, 2, &s->presence) ||
        oai_get_float(r, NULL, body, "frequency_penalty", -2, 2, &s->frequency) ||
        read_repetition(r) || oai_get_int(r, NULL, body, "top_k", -1, INT32_MAX, &top_k) ||
        oai_get_bool(r, NULL, body, "ignore_eos", &s->ignore_eos))
        return -1;
    s->top_k = top_k < 0 ? 0 : top_k;
    return 0;
}

/* Reads how many tokens may be guessed in a step: a number, "auto", "off", true or false. */
static int read_speculate(struct oai_reader *r) {
    const cJSON *node = json_get(r->body, "speculate");
    const char *word = cJSON_IsString(node) ? node->valuestring : "";
    int64_t number;
    if (!node) return 0;
    if (cJSON_IsTrue(node) || strcmp(word, "auto") == 0)
        number = -1;
    else if (cJSON_IsFalse(node) || strcmp(word, "off") == 0)
        number = 0;
    else if (json_node_int(node, 0, INT32_MAX, &number))
        return oai_invalid(r, "speculate",
                           "expected \"auto\", \"off\" or a number of tokens, 0 or more");
    r->out->sampling.drafts = (int32_t)number;
    return 0;
}

/* Reads how many tokens the model may spend on thoughts, by the names of vLLM, SDKs, OpenRouter and
 * Anthropic. The first one that is present counts. */
static int read_think_budget(struct oai_reader *r) {
    static const char *const names[][2] = {{NULL, "thinking_token_budget"},
                                           {NULL, "max_thinking_tokens"},
                                           {"reasoning", "max_tokens"},
                                           {"thinking", "budget_tokens"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const cJSON *object = names[i][0] ? json_get(r->body, names[i][0]) : r->body;
        int32_t budget = -1;
        if (!cJSON_IsObject(object)) continue;
        if (oai_get_int(r, names[i][0], object, names[i][1], 0, INT32_MAX, &budget)) return -1;
        if (budget < 0 || r->out->sampling.think_bounded) continue;
        r->out->sampling.think_bounded = true;
        r->out->sampling.think_budget = budget;
    }
    return 0;
}

/* Reads an effort as a share of the answer, in OpenRouter's numbers, where no field names tokens
 * and the template does not read the effort itself. The share becomes tokens in oai_bound_thought.
 */
static int read_think_share(struct oai_reader *r) {
    static const struct {
        const char *effort;
        double share;
    } shares[] = {{"minimal", 0.1}, {"low", 0.2}, {"medium", 0.5}, {"high", 0.8}, {"xhigh", 0.95}};
    const struct engine_info *info = r->rules->info;
    const cJSON *own = json_get(r->body, "reasoning_effort");
    if (!own) own = json_get(json_get(r->body, "reasoning"), "effort");
    if (!cJSON_IsString(own) || r->out->sampling.think_bounded) return 0;
    if (info->chat_template && strstr(info->chat_template, "reasoning_effort")) return 0;
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (strcmp(own->valuestring, shares[i].effort) == 0) r->out->think_share = shares[i].share;
    return 0;
}

void oai_bound_thought(const struct oai_request *request, struct engine_request *job) {
    if (!(request->think_share > 0) || job->think_bounded) return;
    job->think_bounded = true;
    job->think_budget = (int32_t)(request->think_share * (double)job->max_tokens);
}

/* Biases of a body, being read. */
struct biases {
    struct engine_bias *at; /* [OAI_BIAS_MAX] */
    int count;
};

static int sampling_add_bias(const struct oai_reader *r, struct biases *biases, int32_t token,
                             float bias) {
    if (biases->count == OAI_BIAS_MAX)
        return oai_invalid(r, "logit_bias", "expected at most %d entries", OAI_BIAS_MAX);
    biases->at[biases->count++] = (struct engine_bias){token, bias};
    return 0;
}

/* Adds a bias for each token of a text. */
static int add_text_bias(const struct oai_reader *r, struct biases *biases, const char *from,
                         float bias) {
    struct engine_ids ids;
    struct fault fault = {0};
    size_t size;
    const char *text = json_arena_text(r->arena, from, &size);
    if (!text) return oai_no_memory(r);
    if (engine_tokenize(r->rules->engine, text, size, false, true, r->arena, &ids, &fault))
        return oai_refuse_fault(r->error, &fault);
    for (size_t i = 0; i < ids.count; i++)
        if (sampling_add_bias(r, biases, ids.ids[i], bias)) return -1;
    return 0;
}

/* Reads a bias; false is llama.cpp's word for "never". */
static int read_bias_value(const struct oai_reader *r, const cJSON *node, const char *field,
                           float *bias) {
    *bias = -100;
    if (cJSON_IsFalse(node)) return 0;
    if (!cJSON_IsNumber(node) || !(fabs(node->valuedouble) <= 100))
        return oai_invalid(r, field, "expected a number from -100 to 100");
    *bias = (float)node->valuedouble;
    return 0;
}

/* Reads a member of OpenAI's form: the key is an id in digits. In bodies of llama.cpp's routes any
 * other key is a text. */
static int read_bias_member(const struct oai_reader *r, const cJSON *node, struct biases *biases) {
    bool may_be_text = r->out->kind->groups & OAI_FIELDS_NATIVE;
    char field[OAI_PATH], *end;
    float bias;
    errno = 0;
    long id = strtol(node->string, &end, 10);
    bool is_number = isdigit((unsigned char)node->string[0]) && !*end;
    oai_path(field, "logit_bias.%.64s", node->string);
    if (is_number ? errno || id >= r->rules->info->vocab : !may_be_text)
        return oai_invalid(r, field, "the key must be a token id below %d, the vocabulary's size",
                           r->rules->info->vocab);
    if (read_bias_value(r, node, field, &bias)) return -1;
    return is_number ? sampling_add_bias(r, biases, (int32_t)id, bias)
                     : add_text_bias(r, biases, node->string, bias);
}

/* Reads an element: [id or text, bias]. */
static int read_bias_pair(const struct oai_reader *r, const cJSON *node, int i,
                          struct biases *biases) {
    char field[OAI_PATH];
    float bias;
    int64_t id;
    oai_path(field, "logit_bias[%d]", i);
    if (!cJSON_IsArray(node) || cJSON_GetArraySize(node) != 2)
        return oai_invalid(r, field, "expected [token, bias]");
    if (read_bias_value(r, node->child->next, field, &bias)) return -1;
    if (cJSON_IsString(node->child))
        return add_text_bias(r, biases, node->child->valuestring, bias);
    if (json_node_int(node->child, 0, r->rules->info->vocab - 1, &id))
        return oai_invalid(r, field, "the token must be a text, or an id from 0 to %d",
                           r->rules->info->vocab - 1);
    return sampling_add_bias(r, biases, (int32_t)id, bias);
}

/* Reads OpenAI's object, or llama.cpp's list. */
static int read_bias(struct oai_reader *r) {
    const cJSON *field = json_get(r->body, "logit_bias"), *node;
    struct biases biases = {0};
    int i = 0;
    if (!field) return 0;
    if (!cJSON_IsObject(field) && !cJSON_IsArray(field))
        return oai_invalid(r, "logit_bias", "expected an object or an array, found %s",
                           json_type_name(field));
    if (cJSON_GetArraySize(field) > OAI_BIAS_MAX)
        return oai_invalid(r, "logit_bias", "expected at most %d entries, found %d", OAI_BIAS_MAX,
                           cJSON_GetArraySize(field));
    if (!field->child) return 0;
    biases.at = arena_alloc(r->arena, OAI_BIAS_MAX, sizeof *biases.at);
    if (!biases.at) return oai_no_memory(r);
    cJSON_ArrayForEach(node, field) {
        if (cJSON_IsObject(field) ? read_bias_member(r, node, &biases)
                                  : read_bias_pair(r, node, i++, &biases))
            return -1;
    }
    r->out->sampling.bias = biases.at;
    r->out->sampling.bias_count = biases.count;
    return 0;
}

/* Reads the texts from which on repetitions count anew; by default those of llama.cpp. As there,
 * empty ones are left out, and long ones are cut. */
static int read_breakers(struct oai_reader *r) {
    static const struct engine_stop usual[] = {{"\n", 1}, {":", 1}, {"\"", 1}, {"*", 1}};
    const char *name = "dry_sequence_breakers";
    const cJSON *list = json_get(r->body, name), *node;
    struct engine_dry *dry = &r->out->sampling.dry;
    int32_t count = 0;
    dry->breakers = usual;
    dry->breaker_count = (int32_t)(sizeof usual / sizeof *usual);
    if (!list) return 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > OAI_BREAKERS_MAX)
        return oai_invalid(r, name, "expected an array of at most %d strings", OAI_BREAKERS_MAX);
    struct engine_stop *own = arena_alloc(r->arena, OAI_BREAKERS_MAX, sizeof *own);
    if (!own) return oai_no_memory(r);
    cJSON_ArrayForEach(node, list) {
        size_t size;
        if (!cJSON_IsString(node))
            return oai_invalid(r, name, "expected strings, found %s", json_type_name(node));
        const char *text = json_arena_text(r->arena, node->valuestring, &size);
        if (!text) return oai_no_memory(r);
        if (size > ENGINE_BREAKER_MAX) size = ENGINE_BREAKER_MAX;
        if (size) own[count++] = (struct engine_stop){text, size};
    }
    dry->breakers = own;
    dry->breaker_count = count;
    return 0;
}

/* Reads llama.cpp's parameters of the DRY penalty. */
static int read_dry(struct oai_reader *r) {
    struct engine_dry *dry = &r->out->sampling.dry;
    return oai_get_float(r, NULL, r->body, "dry_multiplier", 0, 100, &dry->multiplier) ||
                   oai_get_float(r, NULL, r->body, "dry_base", 0, 100, &dry->base) ||
                   oai_get_int(r, NULL, r->body, "dry_allowed_length", 0, INT32_MAX,
                               &dry->allowed) ||
                   oai_get_int(r, NULL, r->body, "dry_penalty_last_n", -1, INT32_MAX, &dry->last) ||
                   read_breakers(r)
               ? -1
               : 0;
}

static int read_xtc(struct oai_reader *r) {
    struct engine_request *s = &r->out->sampling;
    return oai_get_float(r, NULL, r->body, "xtc_probability", 0, 1, &s->xtc_probability) ||
                   oai_get_float(r, NULL, r->body, "xtc_threshold", 0, 1, &s->xtc_threshold)
               ? -1
               : 0;
}

/* Reads vLLM's rule for loops, which end answers. */
static int read_loops(struct oai_reader *r) {
    static const char name[] = "repetition_detection";
    const cJSON *rule;
    struct engine_loops own = {0};
    if (oai_get_object(r, name, &rule)) return -1;
    if (!rule) return 0;
    if (oai_get_int(r, name, rule, "max_pattern_size", 0, OAI_LOOP_MAX, &own.longest) ||
        oai_get_int(r, name, rule, "min_pattern_size", 0, OAI_LOOP_MAX, &own.shortest) ||
        oai_get_int(r, name, rule, "min_count", 0, INT32_MAX, &own.count))
        return -1;
    if (own.shortest == 0) own.shortest = 1;
    if (own.longest == 0) own = (struct engine_loops){0};
    if (own.shortest > own.longest)
        return oai_invalid(r, "repetition_detection.min_pattern_size",
                           "expected at most max_pattern_size (%d), found %d", own.longest,
                           own.shortest);
    if (own.longest && own.count < 2)
        return oai_invalid(r, "repetition_detection.min_count", "expected at least 2, found %d",
                           own.count);
    r->out->sampling.loops = own;
    return 0;
}

/* Reads llama.cpp's list of samplers: those that it omits are off. The order is keepd's own.
 * Samplers that keepd lacks are refused by their parameters; "infill" is ignored. */
static int read_samplers(struct oai_reader *r) {
    static const char *const names[] = {"penalties", "top_k", "top_p", "min_p",       "temperature",
                                        "dry",       "typ_p", "xtc",   "top_n_sigma", "infill"};
    enum { COUNT = sizeof names / sizeof *names };
    const cJSON *list = json_get(r->body, "samplers"), *node;
    struct engine_request *s = &r->out->sampling;
    bool named[COUNT] = {false};
    char field[OAI_PATH];
    int i = 0;
    if (!list || (cJSON_IsArray(list) && !list->child)) return 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > OAI_SAMPLERS_MAX)
        return oai_invalid(r, "samplers", "expected an array of at most %d names",
                           OAI_SAMPLERS_MAX);
    cJSON_ArrayForEach(node, list) {
        size_t k = 0;
        while (k < COUNT && !(cJSON_IsString(node) && strcmp(node->valuestring, names[k]) == 0))
            k++;
        oai_path(field, "samplers[%d]", i++);
        if (k == COUNT) return oai_invalid(r, field, "no such sampler");
        named[k] = true;
    }
    if (!named[0]) s->repetition = 1, s->presence = s->frequency = 0;
    if (!named[1]) s->top_k = 0;
    if (!named[2]) s->top_p = 1;
    if (!named[3]) s->min_p = 0;
    if (!named[4] && s->temperature > 0) s->temperature = 1;
    if (!named[5]) s->dry.multiplier = 0;
    if (!named[7]) s->xtc_probability = 0;
    return 0;
}

/* --- ends of an answer --- */

/* Adds a stop string. `left`: 1 + the bytes that the strings may still have. */
static int add_stop(struct oai_reader *r, struct engine_stop *stops, const cJSON *node,
                    const char *field, size_t *left) {
    if (!cJSON_IsString(node))
        return oai_invalid(r, field, "expected a string, found %s", json_type_name(node));
    size_t size = strlen(node->valuestring);
    char *text = arena_strndup(r->arena, node->valuestring, size);
    if (!text) return oai_no_memory(r);
    json_text(text, text, &size);
    if (size == 0) return oai_invalid(r, field, "a stop string must not be empty");
    *left = size < *left ? *left - size : 0;
    if (*left == 0)
        return oai_invalid(r, "stop", "expected at most %d bytes in all stop strings together",
                           OAI_STOP_BYTES);
    stops[r->out->sampling.stop_count++] = (struct engine_stop){text, size};
    return 0;
}

static int read_stop(struct oai_reader *r) {
    const cJSON *stop = json_get(r->body, "stop"), *node;
    struct engine_stop *stops;
    size_t left = OAI_STOP_BYTES + 1;
    char field[OAI_PATH];
    if (!stop) return 0;
    if (!cJSON_IsString(stop) && !cJSON_IsArray(stop))
        return oai_invalid(r, "stop", "expected a string or an array of strings, found %s",
                           json_type_name(stop));
    if (cJSON_IsArray(stop) && cJSON_GetArraySize(stop) > OAI_STOPS_MAX)
        return oai_invalid(r, "stop", "expected at most %d stop strings, found %d", OAI_STOPS_MAX,
                           cJSON_GetArraySize(stop));
    stops = arena_alloc(r->arena, (size_t)cJSON_GetArraySize(stop) + 1, sizeof *stops);
    if (!stops) return oai_no_memory(r);
    r->out->sampling.stops = stops;
    if (cJSON_IsString(stop)) return add_stop(r, stops, stop, "stop", &left);
    cJSON_ArrayForEach(node, stop) {
        oai_path(field, "stop[%d]", r->out->sampling.stop_count);
        if (add_stop(r, stops, node, field, &left)) return -1;
    }
    return 0;
}

static int read_stop_ids(struct oai_reader *r) {
    const cJSON *node = json_get(r->body, "stop_token_ids");
    size_t count = 0;
    if (!node) return 0;
    if (!cJSON_IsArray(node))
        return oai_invalid(r, "stop_token_ids", "expected an array, found %s",
                           json_type_name(node));
    if (cJSON_GetArraySize(node) > OAI_STOP_IDS_MAX)
        return oai_invalid(r, "stop_token_ids", "expected at most %d ids, found %d",
                           OAI_STOP_IDS_MAX, cJSON_GetArraySize(node));
    if (oai_get_ids(r, node, "stop_token_ids", &r->out->sampling.stop_ids, &count)) return -1;
    r->out->sampling.stop_id_count = (int32_t)count;
    return 0;
}

/* Reads the limit by OpenAI's two names or llama.cpp's. 0 asks for the prompt's scores only, -1 for
 * as many tokens as the context leaves. */
static int read_max_tokens(struct oai_reader *r) {
    static const char *const names[] = {"max_tokens", "max_completion_tokens", "n_predict"};
    struct oai_request *out = r->out;
    bool scores = out->echo || out->prompt_logprobs >= 0 || out->kind->form->may_be_empty;
    const char *first = NULL;
    int32_t value, most = -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!json_get(r->body, names[i])) continue;
        value = 0;
        if (oai_get_int(r, NULL, r->body, names[i], -1, INT32_MAX, &value)) return -1;
        if (value == 0 && !scores)
            return oai_invalid(r, names[i],
                               "expected at least 1, or -1 for all that the context leaves, unless "
                               "'echo' or 'prompt_logprobs' is set");
        if (first && value != most) return refuse_other(r, first, names[i]);
        first = names[i];
        most = value;
    }
    out->max_tokens = most;
    out->endless = first && most < 0;
    if (oai_get_int(r, NULL, r->body, "min_tokens", 0, INT32_MAX, &out->sampling.min_tokens))
        return -1;
    if (out->max_tokens >= 0 && out->sampling.min_tokens > out->max_tokens)
        return oai_invalid(r, "min_tokens", "expected at most max_tokens (%d), found %d",
                           out->max_tokens, out->sampling.min_tokens);
    return 0;
}

/* --- contents of an answer --- */

/* Reads the number of alternatives. For an echoed prompt this is the answer's number or the
 * prompt's own; the engine keeps the larger one. */
static int read_logprobs(struct oai_reader *r) {
    struct oai_request *out = r->out;
    if (oai_get_alternatives(r, r->body, "prompt_logprobs", &out->prompt_logprobs)) return -1;
    int32_t echoed = out->echo ? out->logprobs : -1;
    int32_t most = echoed > out->prompt_logprobs ? echoed : out->prompt_logprobs;
    out->sampling.prompt_logprobs = most >= 0;
    out->sampling.prompt_top_logprobs = most > 0 ? most : 0;
    out->sampling.top_logprobs = out->logprobs;
    return 0;
}

int oai_read_truncation(struct oai_reader *r) {
    static const char name[] = "truncate_prompt_tokens";
    if (oai_get_int(r, NULL, r->body, name, -1, INT32_MAX, &r->out->truncate)) return -1;
    if (r->out->truncate || !json_get(r->body, name)) return 0;
    return oai_invalid(r, name, "expected -1 or at least 1");
}

/* Reads what the answer shows, and how a prompt that is too long is shortened. */
static int sampling_read_shape(struct oai_reader *r) {
    struct oai_request *out = r->out;
    return oai_read_truncation(r) ||
                   oai_get_bool(r, NULL, r->body, "return_token_ids", &out->return_token_ids) ||
                   oai_get_bool(r, NULL, r->body, "return_tokens_as_token_ids",
                                &out->tokens_as_ids) ||
                   oai_get_bool(r, NULL, r->body, "include_stop_str_in_output",
                                &out->include_stop) ||
                   oai_get_bool(r, NULL, r->body, "timings_per_token", &out->timings) ||
                   oai_get_bool(r, NULL, r->body, "timings", &out->timings) ||
                   oai_get_bool(r, NULL, r->body, "verbose", &out->verbose)
               ? -1
               : 0;
}

static int read_stream(struct oai_reader *r) {
    struct oai_request *out = r->out;
    const cJSON *options;
    if (oai_get_bool(r, NULL, r->body, "stream", &out->stream) ||
        oai_get_bool(r, NULL, r->body, "return_progress", &out->include_progress) ||
        oai_get_object(r, "stream_options", &options))
        return -1;
    if (out->stream && out->prompt_logprobs >= 0)
        return oai_refuse(r->error, 400, "unsupported_parameter", "prompt_logprobs",
                          "Unsupported value for 'prompt_logprobs': not available when 'stream' is "
                          "true.");
    if (options && !out->stream)
        return oai_invalid(r, "stream_options", "only allowed when 'stream' is true");
    if (options &&
        (oai_get_bool(r, "stream_options", options, "include_usage", &out->include_usage) ||
         oai_get_bool(r, "stream_options", options, "continuous_usage_stats",
                      &out->continuous_usage) ||
         oai_get_bool(r, "stream_options", options, "include_progress", &out->include_progress) ||
         oai_get_bool(r, "stream_options", options, "include_kv", &out->sampling.kv.live)))
        return -1;
    out->include_usage = out->include_usage || r->rules->include_usage;
    return 0;
}

int oai_read_sampling(struct oai_reader *r) {
    return read_choice_count(r) || read_numbers(r) || read_dry(r) || read_xtc(r) || read_loops(r) ||
                   read_samplers(r) || read_seed(r) || read_speculate(r) || read_think_budget(r) ||
                   read_think_share(r) || read_bias(r) || read_stop(r) || read_stop_ids(r) ||
                   read_logprobs(r) || read_max_tokens(r) || sampling_read_shape(r) ||
                   read_stream(r)
               ? -1
               : 0;
}
