/* POST /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show, the requests: Ollama's
 * forms. Its chat becomes ours; a prompt becomes a chat, or a completion if it is raw or has a gap.
 */
#include "server/oai/ollama.h"

#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/rewrite.h"

/* --- fields --- */

/* Fields of all requests that generate. `keep_alive` has no effect, because the server decides how
 * long a model stays loaded; `shift` and `truncate` have none, because a chat that is too long is
 * refused instead of cut. */
#define OWN_FIELDS                                                                                 \
    {"format", OAI_ANY}, {"keep_alive", OAI_ANY}, {"logprobs", OAI_ANY}, {"options", OAI_ANY},     \
        {"shift", OAI_ANY}, {"think", OAI_ANY}, {"top_logprobs", OAI_ANY}, {"truncate", OAI_ANY},  \
        {"max_tokens", OAI_NEVER}, {"n", OAI_ONE}, {"stop", OAI_NEVER}, {                          \
        "verbose", OAI_FALSE                                                                       \
    }

static const struct oai_field chat_fields[] = {
    {"messages", OAI_ANY},
    {"tools", OAI_ANY},
    OWN_FIELDS,
    {NULL, OAI_ANY},
};

static const struct oai_field generate_fields[] = {
    {"prompt", OAI_ANY},   {"suffix", OAI_ANY},  {"system", OAI_ANY},
    {"template", OAI_ANY}, {"context", OAI_ANY}, {"raw", OAI_ANY},
    {"images", OAI_ANY},   OWN_FIELDS,           {NULL, OAI_ANY},
};

/* Members of `options` that are not fields of chats. Those about memory and threads are the
 * server's options here. */
static const struct oai_field option_fields[] = {
    {"num_predict", OAI_ANY},
    {"n", OAI_ONE},
    {"stop", OAI_ANY},
    {"num_ctx", OAI_ANY},
    {"num_keep", OAI_ANY},
    {"num_batch", OAI_ANY},
    {"num_gpu", OAI_ANY},
    {"main_gpu", OAI_ANY},
    {"num_thread", OAI_ANY},
    {"numa", OAI_ANY},
    {"low_vram", OAI_ANY},
    {"f16_kv", OAI_ANY},
    {"logits_all", OAI_ANY},
    {"vocab_only", OAI_ANY},
    {"use_mmap", OAI_ANY},
    {"use_mlock", OAI_ANY},
    {"repeat_last_n", OAI_ANY},
    {"mirostat_tau", OAI_ANY},
    {"mirostat_eta", OAI_ANY},
    {"tfs_z", OAI_ONE},
    {"stream", OAI_NEVER},
    {"penalize_newline", OAI_ANY},
    {NULL, OAI_ANY},
};

static const struct oai_kind options = {
    .path = "options", .groups = OAI_FIELDS_GENERATION, .fields = option_fields};

static const struct oai_alias aliases[] = {
    {"response_format.json_schema.schema", "format"},
    {"response_format", "format"},
    {"max_tokens", "options.num_predict"},
    {"stop", "options.stop"},
    {"temperature", "options.temperature"},
    {"top_k", "options.top_k"},
    {"top_p", "options.top_p"},
    {"min_p", "options.min_p"},
    {"seed", "options.seed"},
    {"repeat_penalty", "options.repeat_penalty"},
    {"presence_penalty", "options.presence_penalty"},
    {"frequency_penalty", "options.frequency_penalty"},
    {"reasoning_effort", "think"},
    {NULL, NULL},
};

/* A request being rewritten. Calls have no ids in Ollama's messages: the results answer them in
 * their order. */
struct dialogue {
    struct oai_rewrite w;
    int calls, results;
};

/* --- options --- */

/* Links an option under the name that it has in a chat. A field of the body itself comes first. */
static int read_option(struct oai_rewrite *w, const cJSON *option) {
    const char *name = option->string;
    if (strcmp(name, "num_predict") == 0) {
        if (cJSON_IsNumber(option) &&
            option->valuedouble < 0) /* -1 and -2: as the context leaves */
            return oai_rewrite_put(w, "max_tokens", cJSON_CreateNumber(-1));
        return oai_rewrite_link(w, "max_tokens", option);
    }
    if (strcmp(name, "seed") == 0 && cJSON_IsNumber(option) && option->valuedouble < 0)
        return 0; /* -1 is a random seed */
    if (strcmp(name, "stop") != 0 && !oai_is_shared(&options, name)) return 0;
    return json_get(w->chat, name) ? 0 : oai_rewrite_link(w, name, option);
}

static int ollama_read_options(struct oai_rewrite *w) {
    const cJSON *list = json_get(w->body, "options"), *option;
    struct oai_error *error = w->r->error;
    char path[OAI_PATH];
    if (!list) return 0;
    if (!cJSON_IsObject(list)) return oai_expected(error, "options", "an object", list);
    if (oai_check_fields(&options, list, w->r->rules->strict, error)) {
        oai_path(path, "options.%.100s", error->param);
        memcpy(error->param, path, sizeof error->param);
        return -1;
    }
    cJSON_ArrayForEach(option, list) {
        if (!cJSON_IsNull(option) && read_option(w, option)) return -1;
    }
    return 0;
}

/* Reads "json" or a schema. */
static int ollama_read_format(struct oai_rewrite *w) {
    const cJSON *format = json_get(w->body, "format");
    const char *word = cJSON_IsString(format) ? format->valuestring : NULL;
    if (!format || (word && !*word)) return 0;
    if (word ? strcmp(word, "json") != 0 : !cJSON_IsObject(format))
        return oai_invalid(w->r, "format", "expected \"json\" or a JSON schema");
    cJSON *own = cJSON_CreateObject();
    if (oai_rewrite_put(w, "response_format", own)) return -1;
    if (!cJSON_AddStringToObject(own, "type", word ? "json_object" : "json_schema"))
        return oai_no_memory(w->r);
    if (word) return 0;
    cJSON *inner = cJSON_AddObjectToObject(own, "json_schema");
    return inner ? oai_rewrite_member(w, inner, "schema", w->body, "format") : oai_no_memory(w->r);
}

/* Reads whether the model thinks: a boolean, or how much. */
static int read_think(struct oai_rewrite *w) {
    const cJSON *think = json_get(w->body, "think");
    if (!think) return 0;
    if (cJSON_IsString(think)) return oai_rewrite_link(w, "reasoning_effort", think);
    if (!cJSON_IsBool(think))
        return oai_expected(w->r->error, "think", "a boolean or a string", think);
    cJSON *own = cJSON_CreateObject();
    if (oai_rewrite_put(w, "thinking", own)) return -1;
    return cJSON_AddStringToObject(own, "type", cJSON_IsTrue(think) ? "enabled" : "disabled")
               ? 0
               : oai_no_memory(w->r);
}

/* Reads the fields that all requests have which generate. Answers are streamed unless the client
 * says otherwise. */
static int read_common(struct oai_rewrite *w) {
    static const char *const scores[] = {"logprobs", "top_logprobs"};
    if (!json_get(w->chat, "stream") && oai_rewrite_put(w, "stream", cJSON_CreateTrue())) return -1;
    for (size_t i = 0; i < sizeof scores / sizeof *scores; i++)
        if (oai_rewrite_link(w, scores[i], json_get(w->body, scores[i]))) return -1;
    w->r->out->split_reasoning = true;
    w->r->out->clamps = true;
    return ollama_read_options(w) || ollama_read_format(w) || read_think(w) ? -1 : 0;
}

/* --- messages --- */

/* Reads the pictures that stand in front of the next message's text. */
static int read_images(struct oai_rewrite *w, const cJSON *images, const char *path) {
    const cJSON *image;
    char field[OAI_PATH];
    int i = 0;
    cJSON_ArrayForEach(image, images) {
        oai_path(field, "%.110s[%d]", path, i++);
        if (oai_rewrite_base64(w, image, field)) return -1;
    }
    return 0;
}

/* Sets *images to the list in an object, or to NULL where it has none or an empty one. */
static int find_images(struct oai_rewrite *w, const cJSON *object, const char *path,
                       const cJSON **images) {
    const cJSON *list = json_get(object, "images");
    *images = NULL;
    if (!list) return 0;
    if (!cJSON_IsArray(list)) return oai_expected(w->r->error, path, "an array of strings", list);
    if (!list->child) return 0;
    if (!w->r->rules->info->pictures)
        return oai_rewrite_refuse(w, path, "this model sees no pictures");
    *images = list;
    return 0;
}

/* Writes the id of a call that has none: nine letters and digits, as Mistral's templates want. */
static const char *make_id(char id[16], int number) {
    snprintf(id, 16, "call%05d", number);
    return id;
}

static int add_dialogue_calls(struct dialogue *d, const cJSON *calls, const char *path) {
    const cJSON *call;
    const char *name;
    char field[OAI_PATH], place[OAI_PATH], made[16];
    int i = 0;
    if (!calls) return 0;
    if (!cJSON_IsArray(calls)) return oai_expected(d->w.r->error, path, "an array", calls);
    cJSON_ArrayForEach(call, calls) {
        const cJSON *function = json_get(call, "function");
        const char *id = make_id(made, d->calls++);
        oai_path(place, "%.90s[%d]", path, i++);
        oai_path(field, "%.110s.function", place);
        if (!cJSON_IsObject(function))
            return oai_expected(d->w.r->error, field, "an object", function);
        if (oai_get_str(d->w.r, place, call, "id", &id) ||
            oai_rewrite_string(&d->w, function, field, "name", &name) ||
            oai_rewrite_call(&d->w, id, name, json_get(function, "arguments")))
            return -1;
    }
    return 0;
}

static int add_dialogue_result(struct dialogue *d, const cJSON *message, const char *text,
                               const char *path) {
    const char *name = NULL;
    char made[16];
    const char *id = make_id(made, d->results++);
    if (oai_get_str(d->w.r, path, message, "tool_name", &name) ||
        oai_get_str(d->w.r, path, message, "tool_call_id", &id) ||
        oai_rewrite_result(&d->w, id, text))
        return -1;
    if (!name) return 0;
    return cJSON_AddStringToObject(d->w.messages->child->prev, "name", name)
               ? 0
               : oai_no_memory(d->w.r);
}

static int add_dialogue_answer(struct dialogue *d, const cJSON *message, const char *text,
                               const char *path) {
    const char *thought = "";
    char field[OAI_PATH];
    d->w.open = NULL;
    d->w.whole = true;
    oai_path(field, "%.100s.tool_calls", path);
    return oai_get_str(d->w.r, path, message, "thinking", &thought) ||
                   (*thought && oai_rewrite_thought(&d->w, thought)) ||
                   oai_rewrite_answer(&d->w, text) ||
                   add_dialogue_calls(d, json_get(message, "tool_calls"), field)
               ? -1
               : 0;
}

static int add_dialogue_message(struct dialogue *d, const cJSON *message, const char *path) {
    struct oai_rewrite *w = &d->w;
    const char *role, *text = "";
    const cJSON *images;
    char field[OAI_PATH];
    if (!cJSON_IsObject(message)) return oai_expected(w->r->error, path, "an object", message);
    oai_path(field, "%s.images", path);
    if (oai_rewrite_string(w, message, path, "role", &role) ||
        find_images(w, message, field, &images) ||
        oai_get_str(w->r, path, message, "content", &text))
        return -1;
    const bool result = strcmp(role, "tool") == 0, user = strcmp(role, "user") == 0;
    if (images && !result && !user)
        return oai_rewrite_refuse(w, field, "pictures are the user's or a tool's");
    if (read_images(w, images, field)) return -1;
    if (strcmp(role, "assistant") == 0) return add_dialogue_answer(d, message, text, path);
    if (result) return add_dialogue_result(d, message, text, path);
    if (user || strcmp(role, "system") == 0) return oai_rewrite_message(w, role, text);
    oai_path(field, "%s.role", path);
    return oai_invalid(w->r, field,
                       "expected 'system', 'user', 'assistant' or 'tool', found '%.32s'", role);
}

static int read_dialogue(struct dialogue *d) {
    const cJSON *messages = json_get(d->w.body, "messages"), *message;
    char path[OAI_PATH];
    int i = 0;
    if (!cJSON_IsArray(messages))
        return oai_expected(d->w.r->error, "messages", "an array", messages);
    if (cJSON_GetArraySize(messages) > OAI_MESSAGES_MAX)
        return oai_invalid(d->w.r, "messages", "expected at most %d messages, found %d",
                           OAI_MESSAGES_MAX, cJSON_GetArraySize(messages));
    cJSON_ArrayForEach(message, messages) {
        oai_path(path, "messages[%d]", i++);
        if (add_dialogue_message(d, message, path)) return -1;
    }
    return oai_rewrite_continue(&d->w);
}

/* --- chats --- */

static int parse_chat(struct oai_reader *r) {
    struct dialogue d = {0};
    return oai_rewrite_open(&d.w, r) || read_dialogue(&d) ||
                   oai_rewrite_link(&d.w, "tools", json_get(d.w.body, "tools")) ||
                   read_common(&d.w) || oai_read_messages(r) || oai_read_tools(r) ||
                   oai_read_chat_scores(r) || oai_read_generation(r)
               ? -1
               : 0;
}

/* --- prompts --- */

/* A text of a body, "" where there is none. */
struct texts {
    const char *prompt, *suffix, *system, *template;
    const cJSON *images; /* NULL: none */
    bool raw;
};

static int ollama_read_texts(struct oai_rewrite *w, struct texts *texts) {
    const struct oai_reader *r = w->r;
    *texts = (struct texts){"", "", "", "", NULL, false};
    if (oai_get_str(r, NULL, w->body, "prompt", &texts->prompt) ||
        oai_get_str(r, NULL, w->body, "suffix", &texts->suffix) ||
        oai_get_str(r, NULL, w->body, "system", &texts->system) ||
        oai_get_str(r, NULL, w->body, "template", &texts->template) ||
        oai_get_bool(r, NULL, w->body, "raw", &texts->raw))
        return -1;
    if (*texts->template) return oai_rewrite_refuse(w, "template", "a model's template is its own");
    return find_images(w, w->body, "images", &texts->images);
}

/* Reads `context`, the ids of an earlier prompt and its answer, behind which this prompt stands. */
static int read_earlier(struct oai_rewrite *w) {
    struct oai_request *out = w->r->out;
    const cJSON *context = json_get(w->body, "context");
    if (!context) return 0;
    if (!cJSON_IsArray(context))
        return oai_expected(w->r->error, "context", "an array of token ids", context);
    if (oai_get_ids(w->r, context, "context", &out->front, &out->front_count)) return -1;
    if (!out->front_count) return 0;
    return cJSON_AddTrueToObject(out->context, ENGINE_CHAT_LATER) ? 0 : oai_no_memory(w->r);
}

/* The prompt as the user's turn of a chat. */
static int read_turn(struct oai_rewrite *w, const struct texts *texts) {
    w->r->out->return_token_ids = true; /* a later request may send them as `context` */
    if ((*texts->system && oai_rewrite_message(w, "system", texts->system)) ||
        read_images(w, texts->images, "images") || oai_rewrite_message(w, "user", texts->prompt) ||
        read_common(w) || oai_read_messages(w->r) || read_earlier(w))
        return -1;
    w->r->out->prompt_field = "prompt";
    return 0;
}

static int refuse_beside_raw(struct oai_rewrite *w, const struct texts *texts) {
    const cJSON *context = json_get(w->body, "context");
    const char *field = *texts->system              ? "system"
                        : context && context->child ? "context"
                        : texts->images             ? "images"
                                                    : NULL;
    if (!field) return 0;
    return oai_invalid(w->r, field, "not together with '%s'", texts->raw ? "raw" : "suffix");
}

/* The prompt as it is. */
static int read_plain(struct oai_rewrite *w, const struct texts *texts) {
    w->r->out->parse_special = true;
    if (refuse_beside_raw(w, texts) || read_common(w) ||
        oai_rewrite_link(w, "prompt", json_get(w->body, "prompt")) ||
        oai_rewrite_link(w, "suffix", json_get(w->body, "suffix")))
        return -1;
    w->r->out->split_reasoning = false;
    return oai_read_prompts(w->r) || oai_read_suffix(w->r) ? -1 : 0;
}

static int parse_generate(struct oai_reader *r) {
    struct oai_rewrite w;
    struct texts texts;
    if (oai_rewrite_open(&w, r) || ollama_read_texts(&w, &texts)) return -1;
    const bool plain = texts.raw || *texts.suffix;
    return (plain ? read_plain(&w, &texts) : read_turn(&w, &texts)) || oai_read_chat_scores(r) ||
                   oai_read_generation(r)
               ? -1
               : 0;
}

/* --- requests without a prompt --- */

/* Gives a request whose answer needs no tokens a prompt without any. */
static int parse_nothing(struct oai_reader *r) {
    static const int32_t no_ids[1];
    r->out->prompts = arena_alloc(r->arena, 1, sizeof *r->out->prompts);
    if (!r->out->prompts) return oai_no_memory(r);
    r->out->prompt_field = "prompt";
    r->out->prompts[0] = (struct oai_prompt){.ids = no_ids};
    r->out->prompt_count = 1;
    return 0;
}

/* The members that the rows of all of Ollama's routes share, and those of routes that generate. */
#define OLLAMA_ROW .error = oai_ollama_error, .has_tags = true, .untyped = true
#define GENERATE_ROW                                                                               \
    OLLAMA_ROW, .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION, .aliases = aliases

static const struct oai_kind load_chat = {
    .path = "/api/chat",
    .schema = "OllamaChatRequest",
    .fields = chat_fields,
    .parse = parse_nothing,
    .answer = oai_ollama_loaded,
    GENERATE_ROW,
};

static const struct oai_kind load_generate = {
    .path = "/api/generate",
    .schema = "OllamaGenerateRequest",
    .fields = generate_fields,
    .parse = parse_nothing,
    .answer = oai_ollama_loaded,
    GENERATE_ROW,
};

static bool ollama_is_empty(const cJSON *body, const char *name) {
    const cJSON *node = json_get(body, name);
    return !node || (cJSON_IsArray(node) && !node->child) ||
           (cJSON_IsString(node) && !*node->valuestring);
}

/* A request without a prompt asks only that the model be loaded. It is by then, because a request
 * waits for its model before its body is parsed. */
static const struct oai_kind *choose_chat(const cJSON *body) {
    return ollama_is_empty(body, "messages") ? &load_chat : &oai_ollama_chat;
}

static const struct oai_kind *choose_generate(const cJSON *body) {
    return ollama_is_empty(body, "prompt") && ollama_is_empty(body, "suffix")
               ? &load_generate
               : &oai_ollama_generate;
}

/* --- vectors --- */

/* Reads the texts in `name`. Their ends are cut where they are too long, unless the client forbids
 * it. */
static int read_vectors(struct oai_reader *r, const char *name) {
    struct oai_request *out = r->out;
    bool cut = true;
    out->dimensions = r->rules->info->width;
    if (oai_read_pooling(r) || oai_read_texts(r, name, OAI_INPUTS_MAX) ||
        oai_get_int(r, NULL, r->body, "dimensions", 1, out->dimensions, &out->dimensions) ||
        oai_get_bool(r, NULL, r->body, "truncate", &cut))
        return -1;
    out->truncate = cut ? -1 : 0;
    out->sampling.dimensions = out->dimensions;
    return oai_check_numbers(r, name);
}

static int parse_embed(struct oai_reader *r) {
    return read_vectors(r, "input");
}

static int parse_embeddings(struct oai_reader *r) {
    const cJSON *prompt = json_get(r->body, "prompt");
    if (prompt && !cJSON_IsString(prompt))
        return oai_expected(r->error, "prompt", "a string", prompt);
    r->out->raw_vectors = true;
    return read_vectors(r, "prompt");
}

/* --- the rows --- */

const struct oai_kind oai_ollama_chat = {
    .path = "/api/chat",
    .schema = "OllamaChatRequest",
    .fields = chat_fields,
    .parse = parse_chat,
    .form = &oai_ollama_chat_form,
    .choose = choose_chat,
    GENERATE_ROW,
};

const struct oai_kind oai_ollama_generate = {
    .path = "/api/generate",
    .schema = "OllamaGenerateRequest",
    .fields = generate_fields,
    .parse = parse_generate,
    .form = &oai_ollama_text_form,
    .choose = choose_generate,
    GENERATE_ROW,
};

static const struct oai_field embed_fields[] = {
    {"input", OAI_ANY},      {"truncate", OAI_ANY}, {"dimensions", OAI_ANY},
    {"keep_alive", OAI_ANY}, {"options", OAI_ANY},  {NULL, OAI_ANY},
};

const struct oai_kind oai_ollama_embed = {
    .path = "/api/embed",
    .schema = "OllamaEmbedRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = embed_fields,
    .parse = parse_embed,
    .form = &oai_ollama_vectors_form,
    OLLAMA_ROW,
};

static const struct oai_field embeddings_fields[] = {
    {"prompt", OAI_ANY},
    {"keep_alive", OAI_ANY},
    {"options", OAI_ANY},
    {NULL, OAI_ANY},
};

const struct oai_kind oai_ollama_embeddings = {
    .path = "/api/embeddings",
    .schema = "OllamaEmbeddingsRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = embeddings_fields,
    .parse = parse_embeddings,
    .form = &oai_ollama_vector_form,
    OLLAMA_ROW,
};

static const struct oai_field show_fields[] = {
    {"name", OAI_ANY},
    {"verbose", OAI_ANY},
    {NULL, OAI_ANY},
};

/* Reads the model by its older name, too. */
static int parse_show(struct oai_reader *r) {
    return oai_read_model(r, "name") || parse_nothing(r) ? -1 : 0;
}

const struct oai_kind oai_ollama_show_kind = {
    .path = "/api/show",
    .schema = "OllamaShowRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = show_fields,
    .parse = parse_show,
    .answer = oai_ollama_show,
    OLLAMA_ROW,
};
