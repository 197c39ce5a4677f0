/* Whole bodies: which model, which prompts, and how long they may be. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

bool oai_cut_tag(char *name) {
    static const char tag[] = ":latest";
    const size_t size = strlen(name), end = sizeof tag - 1;
    if (size <= end || strcmp(name + size - end, tag) != 0) return false;
    name[size - end] = '\0';
    return true;
}

bool oai_other_tag(char name[OAI_NAME_BYTES]) {
    const size_t size = strlen(name);
    if (oai_cut_tag(name)) return true;
    if (strchr(name, ':') || size + sizeof ":latest" > OAI_NAME_BYTES) return false;
    memcpy(name + size, ":latest", sizeof ":latest");
    return true;
}

/* Returns whether `name` is a served model's; for Ollama's routes, with or without the usual tag.
 */
static bool is_served(const struct oai_reader *r, const char *name) {
    char other[OAI_NAME_BYTES];
    snprintf(other, sizeof other, "%s", name);
    const bool tagged = r->out->kind->has_tags && oai_other_tag(other);
    for (int i = 0; i < r->rules->name_count; i++)
        if (strcmp(name, r->rules->names[i]) == 0 ||
            (tagged && strcmp(other, r->rules->names[i]) == 0))
            return true;
    return false;
}

const char *oai_adapter_part(const char *const *names, int count, const char *name) {
    for (int i = 0; i < count; i++) {
        const size_t size = strlen(names[i]);
        if (strncmp(name, names[i], size) == 0 && name[size] == ':') return name + size + 1;
    }
    return NULL;
}

/* Returns the adapter that the name stands for: base:adapter, or the adapter's own. NULL: none. */
static const char *find_named_adapter(const struct oai_reader *r, const char *name) {
    const char *part = oai_adapter_part(r->rules->names, r->rules->name_count, name);
    if (!r->rules->info->max_adapters) return NULL;
    if (part && engine_adapter_take(r->rules->engine, part, NULL)) return part;
    return engine_adapter_take(r->rules->engine, name, NULL) ? name : NULL;
}

int oai_read_model(struct oai_reader *r, const char *field) {
    const char *name = NULL;
    if (oai_get_str(r, NULL, r->body, field, &name)) return -1;
    if (!name || is_served(r, name)) return 0;
    r->out->adapter = find_named_adapter(r, name);
    if (!r->out->adapter && r->out->kind->has_tags) {
        char *plain = arena_alloc(r->arena, strlen(name) + 1, 1);
        if (!plain) return oai_no_memory(r);
        memcpy(plain, name, strlen(name) + 1);
        if (oai_cut_tag(plain)) r->out->adapter = find_named_adapter(r, plain);
    }
    if (r->out->adapter) return 0;
    char served[256] = "";
    size_t used = 0;
    for (int i = 0; i < r->rules->name_count && used < sizeof served; i++)
        used += (size_t)snprintf(served + used, sizeof served - used, "%s`%.64s`", i ? ", " : "",
                                 r->rules->names[i]);
    return oai_refuse(r->error, 404, "model_not_found", field,
                      "The model `%.128s` does not exist or you do not have access to it. Served "
                      "here: %s.",
                      name, served);
}

/* Returns what follows the string that begins at `at`; `end`: it does not end. */
static const char *skip_string(const char *at, const char *end) {
    for (at++; at < end && *at != '"'; at++)
        if (*at == '\\') at++;
    return at < end ? at + 1 : end;
}

static const char *skip_blanks(const char *at, const char *end) {
    while (at < end && strchr(" \t\r\n", *at) && *at) at++;
    return at;
}

/* Copies a name from a JSON string; one that is too long is no model's name, and is cut. */
static void copy_model_name(const char *from, const char *end, char name[OAI_NAME_BYTES]) {
    const struct json_limits limits = {.bytes = (size_t)OAI_NAME_BYTES * 6, .depth = 1, .nodes = 1};
    struct fault ignored;
    cJSON *node = NULL;
    if (json_parse(from, (size_t)(end - from), &limits, &node, &ignored)) return;
    if (cJSON_IsString(node)) snprintf(name, OAI_NAME_BYTES, "%s", node->valuestring);
    json_free(node);
}

/* Only the brackets and strings of the text are looked at: what is no JSON is refused later. */
void oai_find_model(const char *data, size_t size, char name[OAI_NAME_BYTES]) {
    static const char key[] = "\"model\"";
    const char *end = data + size;
    int depth = 0;
    name[0] = '\0';
    for (const char *at = data; at < end;) {
        if (*at != '"') {
            depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
            at++;
            continue;
        }
        const char *next = skip_string(at, end), *value = skip_blanks(next, end);
        bool found = depth == 1 && next - at == sizeof key - 1 &&
                     memcmp(at, key, sizeof key - 1) == 0 && value < end && *value == ':';
        at = next;
        if (!found) continue;
        value = skip_blanks(value + 1, end);
        if (value < end && *value == '"') copy_model_name(value, skip_string(value, end), name);
        return;
    }
}

static int read_key(struct oai_reader *r, const char *name, size_t most, const char **key) {
    const char *text = NULL;
    if (oai_get_str(r, NULL, r->body, name, &text)) return -1;
    if (!text) return 0;
    if (strlen(text) > most)
        return oai_invalid(r, name, "expected at most %zu bytes, found %zu", most, strlen(text));
    if (!(*key)[0]) *key = text;
    return 0;
}

/* Reads `user`. Open WebUI sends an object there, which is ignored. */
static int read_user(struct oai_reader *r) {
    if (cJSON_IsObject(json_get(r->body, "user"))) return 0;
    return read_key(r, "user", SIZE_MAX, &r->out->session);
}

/* Reads the keys of conversations. The salt separates them; the other keys are only hints. `user`
 * is OpenAI's and may have any length. */
static int read_keys(struct oai_reader *r) {
    return read_key(r, "cache_salt", OAI_KEY_BYTES, &r->out->salt) ||
                   read_key(r, "session_id", OAI_KEY_BYTES, &r->out->session) ||
                   read_key(r, "prompt_cache_key", OAI_KEY_BYTES, &r->out->session) || read_user(r)
               ? -1
               : 0;
}

/* --- prompts --- */

void oai_prompt_path(const struct oai_request *request, int i, char path[OAI_PATH]) {
    const int query = i - (request->prompt_count - request->query_count);
    const bool is_query = request->query_count && query >= 0;
    const char *field = is_query ? request->query_field : request->prompt_field;
    if (is_query ? request->query_list : request->prompt_list)
        oai_path(path, "%s[%d]", field, is_query ? query : i);
    else
        oai_path(path, "%s", field);
}

int oai_open_messages(struct oai_reader *r) {
    r->out->prompt_field = "messages";
    r->out->prompt_count = 1;
    if (!json_get(r->body, "messages")) return oai_missing_here(r, "messages");
    return oai_build_context(r);
}

int oai_adapt_messages(struct oai_reader *r) {
    if (r->rules->tools.generic) return oai_write_tools(r);
    cJSON *messages = cJSON_GetObjectItemCaseSensitive(r->out->context, "messages");
    if (!oai_join_turns(messages, &r->rules->turns, false)) return oai_no_memory(r);
    return r->rules->tools.hides_calls ? oai_write_calls(r) : 0;
}

int oai_read_messages(struct oai_reader *r) {
    return oai_open_messages(r) || oai_adapt_messages(r) ? -1 : 0;
}

/* Returns the text of a prompt: a string, or llama.cpp's object of a text and of images, if it has
 * no images. */
static const char *text_of(const cJSON *node) {
    const cJSON *text = cJSON_IsObject(node) ? json_get(node, "prompt_string") : node;
    const cJSON *media = cJSON_IsObject(node) ? json_get(node, "multimodal_data") : NULL;
    bool alone = !media || (cJSON_IsArray(media) && !media->child);
    return cJSON_IsString(text) && alone ? text->valuestring : NULL;
}

/* Returns whether the list is llama.cpp's prompt of texts and ids in turns. */
static bool is_mixed(const cJSON *list) {
    bool texts = false, numbers = false;
    const cJSON *node;
    cJSON_ArrayForEach(node, list) {
        texts |= cJSON_IsString(node);
        numbers |= cJSON_IsNumber(node);
        if (!cJSON_IsString(node) && !cJSON_IsNumber(node)) return false;
    }
    return texts && numbers;
}

static int read_mixed(struct oai_reader *r, const cJSON *list, const char *field,
                      struct oai_prompt *prompt) {
    int vocab = r->rules->info->vocab, i = 0;
    char path[OAI_PATH];
    const cJSON *node;
    int64_t id;
    cJSON_ArrayForEach(node, list) {
        if (cJSON_IsNumber(node) && json_node_int(node, 0, vocab - 1, &id)) {
            oai_path(path, "%.100s[%d]", field, i);
            return oai_invalid(r, path,
                               "expected a token id from 0 to %d, others are out of vocabulary",
                               vocab - 1);
        }
        i++;
    }
    prompt->mixed = list;
    return 0;
}

static int read_prompt(struct oai_reader *r, const cJSON *node, const char *field,
                       struct oai_prompt *prompt) {
    prompt->text = text_of(node);
    if (prompt->text) return 0;
    if (!cJSON_IsArray(node))
        return oai_invalid(r, field, "expected a string or an array of token ids, found %s",
                           json_type_name(node));
    if (!node->child) return oai_invalid(r, field, "expected at least one token id");
    if (is_mixed(node)) return read_mixed(r, node, field, prompt);
    if (cJSON_IsObject(node->child))
        return oai_invalid(
            r, field,
            "expected text or token ids, found messages; a chat is sent as 'messages' "
            "to /v1/chat/completions, or rendered first by /apply-template");
    return oai_get_ids(r, node, field, &prompt->ids, &prompt->id_count);
}

int oai_read_prompts(struct oai_reader *r) {
    if (oai_get_bool(r, NULL, r->body, "parse_special", &r->out->parse_special)) return -1;
    return oai_read_texts(r, "prompt", OAI_PROMPTS_MAX);
}

/* Reads a string, a list of ids or of ids and strings, or a list of such prompts. */
int oai_read_texts(struct oai_reader *r, const char *name, int most) {
    struct oai_request *out = r->out;
    const cJSON *prompt = json_get(r->body, name), *node;
    char field[OAI_PATH];
    out->prompt_field = name;
    out->add_special = true;
    if (!prompt) return oai_missing_here(r, name);
    if (oai_get_bool(r, NULL, r->body, "add_special_tokens", &out->add_special)) return -1;
    out->prompt_list = cJSON_IsArray(prompt) && !is_mixed(prompt) &&
                       (text_of(prompt->child) || cJSON_IsArray(prompt->child));
    int count = out->prompt_list ? cJSON_GetArraySize(prompt) : 1;
    if (count > most)
        return oai_invalid(r, name, "expected at most %d %ss, found %d", most, name, count);
    out->prompts = arena_alloc(r->arena, (size_t)count, sizeof *out->prompts);
    if (!out->prompts) return oai_no_memory(r);
    node = out->prompt_list ? prompt->child : prompt;
    for (; out->prompt_count < count; out->prompt_count++, node = node->next) {
        oai_prompt_path(out, out->prompt_count, field);
        if (read_prompt(r, node, field, &out->prompts[out->prompt_count])) return -1;
    }
    return 0;
}

/* --- whole bodies --- */

/* A report per head is a long text, so it is given for one prompt only. */
static int check_report(const struct oai_reader *r) {
    if (r->out->sampling.kv.report == ENGINE_REPORT_NONE || r->out->prompt_count == 1) return 0;
    return oai_refuse(r->error, 400, "unsupported_parameter", "kv.report",
                      "Unsupported value for 'kv.report': only for a single prompt.");
}

int oai_read_generation(struct oai_reader *r) {
    return oai_read_sampling(r) || oai_read_kv(r) || check_report(r) || read_keys(r) ||
                   oai_read_constraint(r)
               ? -1
               : 0;
}

static int refuse_writing(const struct engine_info *info, struct oai_error *error) {
    return oai_refuse(error, 400, "unsupported_model", "model",
                      "This model makes %s of texts and does not write: it serves %s.",
                      info->labels ? "scores" : "vectors",
                      info->labels ? "/v1/rerank and /v1/score" : "/v1/embeddings");
}

int oai_parse(const struct oai_kind *kind, const cJSON *body, const struct oai_rules *rules,
              const uint8_t key[16], struct arena *arena, struct oai_request *out,
              struct oai_error *error) {
    struct oai_reader r = {body, rules, arena, out, error};
    if (kind->choose) kind = kind->choose(body);
    *out = (struct oai_request){.kind = kind,
                                .n = 1,
                                .longest = rules->info->max_model_len,
                                .max_tokens = -1,
                                .named_tool = -1,
                                .logprobs = -1,
                                .prompt_logprobs = -1,
                                .salt = "",
                                .session = "",
                                .owner = {.salt = ""}};
    *error = (struct oai_error){0};
    memcpy(out->owner.key, key, sizeof out->owner.key);
    if (!cJSON_IsObject(body))
        return oai_refuse(error, 400, NULL, NULL, "The body must be a JSON object, found %s.",
                          json_type_name(body));
    oai_preset_sampling(&r);
    if (oai_read_model(&r, "model") || oai_check_fields(kind, body, rules->strict, error))
        return -1;
    int rc = kind->parse(&r);
    if (rc) oai_rename_field(out, error);
    return rc || !rules->info->whole_texts || !kind->form || out->sampling.pooling
               ? rc
               : refuse_writing(rules->info, error);
}

void oai_request_close(struct oai_request *request) {
    cJSON_Delete(request->context);
    request->context = NULL;
    cJSON_Delete(request->schema);
    request->schema = NULL;
    cJSON_Delete(request->chat);
    request->chat = NULL;
}

/* There is room for every token id of the longest text, and the rest of a large chat. */
size_t oai_json_nodes(const struct oai_rules *rules) {
    size_t context = 2 * (size_t)rules->info->max_model_len;
    return OAI_JSON_VALUES + (context > ENGINE_SHIFTED_TOKENS ? context : ENGINE_SHIFTED_TOKENS);
}

int oai_parse_json(const char *data, size_t size, const struct oai_rules *rules, cJSON **tree,
                   struct oai_error *error) {
    struct fault fault;
    struct json_limits limits = {.bytes = rules->body_bytes,
                                 .depth = OAI_JSON_DEPTH,
                                 .unique_keys = true,
                                 .nuls = true,
                                 .nodes = oai_json_nodes(rules)};
    int rc = json_parse(data, size, &limits, tree, &fault);
    if (rc == 0) return 0;
    if (rc == ERR_NOMEM) return oai_refuse_fault(error, &fault);
    if (rc == ERR_LIMIT)
        return oai_refuse(error, 400, NULL, NULL,
                          "The JSON body of your request is beyond a limit of this server: %s.",
                          fault.text);
    if (fault.field[0])
        return oai_refuse(error, 400, "invalid_value", fault.field,
                          "The JSON body of your request is not clear: %s.", fault.text);
    return oai_refuse(error, 400, NULL, NULL,
                      "We could not parse the JSON body of your request: %s. (HINT: This likely "
                      "means you aren't using your HTTP library correctly. The API expects a JSON "
                      "payload, but what was sent was not valid JSON.)",
                      fault.text);
}

/* --- lengths --- */

/* Programs look for "model's maximum context length" in an error that Python has printed, where the
 * apostrophe is only unchanged if the text has no double quotes. */
const char *oai_overflow_hint(const struct oai_request *request, const struct oai_rules *rules) {
    const struct engine_kv *kv = &request->sampling.kv;
    const char *policy = kv->policy ? kv->policy : rules->info->kv_policy;
    if (request->sampling.pooling) return ""; /* a vector is of the whole text */
    if (request->longest > rules->info->max_model_len) return ""; /* the text may go on */
    if (strcmp(policy, "full") == 0)
        return " A text may go on in bounded memory with kv.overflow 'shift' and a kv.policy that "
               "has a budget, or the server's options --kv-overflow and --kv-policy.";
    return " A text may go on in the same memory with kv.overflow 'shift', or the server's option "
           "--kv-overflow shift.";
}

static int refuse_length(const struct oai_request *request, const struct oai_rules *rules,
                         const char *field, size_t longest, size_t count, size_t wanted,
                         struct oai_error *error) {
    const char *hint = oai_overflow_hint(request, rules);
    const char *what = request->prompt_field;
    if (count > longest || (count == longest && wanted > 0))
        oai_refuse(error, 400, "context_length_exceeded", field,
                   "This model's maximum context length is %zu tokens. However, your %s resulted "
                   "in %zu tokens, which exceeds the available context size. Please reduce the "
                   "length of the %s.%s",
                   longest, what, count, what, hint);
    else
        oai_refuse(error, 400, "context_length_exceeded", "max_tokens",
                   "This model's maximum context length is %zu tokens. However, you requested %zu "
                   "tokens (%zu in the %s, %zu in the completion). Please reduce the length of the "
                   "%s or completion: 'max_tokens' may be up to %zu here.%s",
                   longest, count + wanted, count, what, wanted, what, longest - count, hint);
    return oai_refuse_context(error, count, longest);
}

/* Returns how many tokens an answer without max_tokens may have; 0: what the context leaves. */
static size_t preset_tokens(const struct oai_request *request, const struct oai_rules *rules) {
    int preset = request->kind->form->preset_tokens;
    if (!preset) preset = rules->default_max_tokens;
    return !request->endless && preset > 0 ? (size_t)preset : 0;
}

/* Returns the room for an answer that a prompt of any length leaves: max_tokens, or its default
 * where it is absent, but at most half of the context. */
static size_t reserved(const struct oai_request *request, const struct oai_rules *rules) {
    size_t half = (size_t)rules->info->max_model_len / 2;
    size_t preset = preset_tokens(request, rules);
    if (request->max_tokens >= 0) return (size_t)request->max_tokens;
    return preset && preset < half ? preset : half;
}

/* Keeps the first tokens of a text, and those that the tokenizer has put behind it. */
static void shorten_text(const struct oai_rules *rules, size_t most, bool added,
                         struct engine_ids *ids) {
    size_t after = added ? (size_t)engine_added_after(rules->engine) : 0;
    if (ids->count <= most) return;
    if (after > most) after = most;
    memmove(ids->ids + (most - after), ids->ids + (ids->count - after), after * sizeof *ids->ids);
    ids->count = most;
}

void oai_truncate(const struct oai_request *request, const struct oai_rules *rules, int i,
                  struct engine_ids *ids) {
    size_t longest = (size_t)request->longest, most = (size_t)request->truncate;
    if (request->truncate == 0) return;
    if (request->sampling.pooling) {
        const struct oai_prompt *prompt = &request->prompts[i];
        most = request->truncate < 0 || most > longest ? longest : most;
        shorten_text(rules, most, prompt->text && request->add_special, ids);
        return;
    }
    if (request->truncate < 0) {
        size_t wanted = reserved(request, rules);
        most = wanted < longest ? longest - wanted : 1;
    }
    if (ids->count <= most) return;
    ids->ids += ids->count - most;
    ids->count = most;
}

int oai_fit(const struct oai_request *request, const char *field, size_t count,
            const struct oai_rules *rules, int32_t *max_tokens, struct oai_error *error) {
    size_t longest = (size_t)request->longest, answer = (size_t)rules->info->max_model_len;
    size_t wanted = request->max_tokens < 0 ? 1 : (size_t)request->max_tokens;
    if (request->clamps && count < longest) {
        size_t most = longest - count < answer ? longest - count : answer;
        if (wanted > most) wanted = most;
    }
    if (count == 0)
        return oai_refuse(error, 400, "invalid_value", field,
                          "Invalid value for '%s': the prompt has no tokens.", field);
    if (count > longest || wanted > longest - count)
        return refuse_length(request, rules, field, longest, count, wanted, error);
    if (wanted > answer)
        return oai_refuse(error, 400, "invalid_value", "max_tokens",
                          "Invalid value for 'max_tokens': an answer may have at most %zu tokens, "
                          "also where the text is shifted; found %zu.",
                          answer, wanted);
    if (request->max_tokens < 0) {
        size_t preset = preset_tokens(request, rules);
        wanted = longest - count < answer ? longest - count : answer;
        if (preset && wanted > preset) wanted = preset;
    }
    *max_tokens = (int32_t)wanted;
    if (request->sampling.min_tokens > *max_tokens)
        return oai_refuse(error, 400, "invalid_value", "min_tokens",
                          "Invalid value for 'min_tokens': the answer may have at most %d tokens.",
                          *max_tokens);
    return 0;
}
