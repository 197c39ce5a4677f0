/* All text of a model: the tokenizer, the templates and the special tokens, from a directory or a
 * GGUF file; and a chat's way from messages to tokens.
 *
 * Where transformers looks in several places, the order here is its order, so that a directory
 * means the same to both. The special tokens are the model's own words and may be recognised in a
 * prompt; every string of a request stays text. */
#include "text/text.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/gguf.h"
#include "base/json.h"
#include "base/mem.h"
#include "text/contents.h"

#define CONFIG_BYTES_MAX   ((size_t)8 << 20)
#define TEMPLATE_BYTES_MAX ((size_t)1 << 20)

static bool exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

static int text_join_path(char *path, size_t size, const char *dir, const char *name,
                          struct fault *fault) {
    int n = snprintf(path, size, "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= size) return fault_set(fault, ERR_LIMIT, name, "path too long");
    return 0;
}

/* Puts the name of a file, or of a key, in front of a fault found inside. */
static int in_file(int rc, const char *name, struct fault *fault) {
    if (rc == 0 || !fault) return rc;
    struct fault inside = *fault;
    return fault_set(fault, rc, name, "%s%s%s", inside.field, inside.field[0] ? ": " : "",
                     inside.text);
}

/* ---- Special tokens ---- */

static int text_no_memory(struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the model's texts");
}

/* "<s>" or {"content": "<s>", ...}; NULL for anything else. */
static const char *token_content(const cJSON *node) {
    if (cJSON_IsObject(node)) node = json_get(node, "content");
    return cJSON_IsString(node) ? node->valuestring : NULL;
}

/* Adds what `from` names and `tokens` has not yet: every member whose name ends in "_token". */
static int text_add_tokens(cJSON *tokens, const cJSON *from, struct fault *fault) {
    static const char suffix[] = "_token";
    const cJSON *node;
    cJSON_ArrayForEach(node, from) {
        const char *name = node->string ? node->string : "", *content = token_content(node);
        size_t size = strlen(name);
        if (!content || size < sizeof suffix || json_get(tokens, name) ||
            strcmp(name + size - (sizeof suffix - 1), suffix) != 0)
            continue;
        if (!cJSON_AddStringToObject(tokens, name, content)) return text_no_memory(fault);
    }
    return 0;
}

static char *text_copy_token(const cJSON *tokens, const char *name) {
    const cJSON *node = json_get(tokens, name);
    return mem_must_strdup(node ? node->valuestring : "");
}

/* As transformers: tokenizer_config.json with its extra_special_tokens goes before the older
 * special_tokens_map.json. */
static int text_read_tokens(struct text *text, const cJSON *config, const cJSON *map,
                            struct fault *fault) {
    text->tokens = cJSON_CreateObject();
    if (!text->tokens) return text_no_memory(fault);
    int rc = text_add_tokens(text->tokens, config, fault);
    if (rc == 0)
        rc = text_add_tokens(text->tokens, json_get(config, "extra_special_tokens"), fault);
    if (rc == 0) rc = text_add_tokens(text->tokens, map, fault);
    return rc;
}

/* ---- Directories ---- */

/* An object in a file of the model's directory; NULL without the file. */
static int open_object(const char *dir, const char *name, cJSON **out, struct fault *fault) {
    const struct json_limits limits = {.bytes = CONFIG_BYTES_MAX, .depth = 64, .file = true};
    char path[4096], *data = NULL;
    size_t size = 0;
    int rc = text_join_path(path, sizeof path, dir, name, fault);
    if (rc != 0 || !exists(path)) return rc;
    rc = file_read(path, CONFIG_BYTES_MAX, &data, &size, fault);
    if (rc != 0) return rc;
    rc = in_file(json_parse(data, size, &limits, out, fault), name, fault);
    mem_free(data);
    if (rc != 0 || cJSON_IsObject(*out)) return rc;
    return fault_set(fault, ERR_MALFORMED, name, "is not an object");
}

/* A file with templates under "chat_template"; json NULL = none. */
struct listed {
    const char *name;
    const cJSON *json;
};

/* A string is the default template. */
static const char *listed_template(const struct listed *listed, const char *wanted) {
    const cJSON *node = json_get(listed->json, "chat_template"), *item = NULL;
    if (cJSON_IsString(node)) return strcmp(wanted, "default") == 0 ? node->valuestring : NULL;
    cJSON_ArrayForEach(item, node) {
        const cJSON *name = json_get(item, "name"), *source = json_get(item, "template");
        if (cJSON_IsString(name) && strcmp(name->valuestring, wanted) == 0 &&
            cJSON_IsString(source))
            return source->valuestring;
    }
    return NULL;
}

static int open_template_file(const char *path, const char *name, struct chat **chat, char **source,
                              struct fault *fault) {
    char *data = NULL;
    size_t size = 0;
    int rc = file_read(path, TEMPLATE_BYTES_MAX, &data, &size, fault);
    if (rc != 0) return rc;
    *source = mem_must_alloc(size + 1, 1);
    memcpy(*source, data, size);
    mem_free(data);
    return in_file(chat_open(*source, size, chat, fault), name, fault);
}

/* ChatML, as in Qwen's and many other templates. */
static const char chatml[] =
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/* The template that takes the place of the model's. */
static int open_given(const char *given, struct text *text, struct fault *fault) {
    if (strcmp(given, TEXT_CHATML) == 0) {
        text->source = mem_must_strdup(chatml);
        return chat_open(chatml, sizeof chatml - 1, &text->chat, fault);
    }
    if (exists(given))
        return open_template_file(given, "chat-template", &text->chat, &text->source, fault);
    return fault_set(fault, ERR_NOTFOUND, "chat-template",
                     "there is no file '%.200s'; a name that may stand instead of one is %s", given,
                     TEXT_CHATML);
}

/* From the file, else from the list; with neither *chat stays NULL. */
static int open_template(const char *dir, const char *file, const struct listed *listed,
                         const char *wanted, struct chat **chat, char **source,
                         struct fault *fault) {
    const char *found = listed_template(listed, wanted);
    char path[4096];
    int rc = text_join_path(path, sizeof path, dir, file, fault);
    if (rc != 0) return rc;
    if (exists(path)) return open_template_file(path, file, chat, source, fault);
    if (!found) return 0;
    *source = mem_must_strdup(found);
    return in_file(chat_open(found, strlen(found), chat, fault), listed->name, fault);
}

static bool lists_any(const struct listed *listed) {
    return listed_template(listed, "default") || listed_template(listed, "tool_use");
}

/* chat_template.json is the older file of transformers' processors; tokenizers do not read it, so
 * it serves where they have no template. */
static int open_legacy(const char *dir, cJSON **json, struct listed *listed, struct fault *fault) {
    int rc = open_object(dir, "chat_template.json", json, fault);
    if (rc != 0 || !*json) return rc;
    *listed = (struct listed){"chat_template.json", *json};
    if (lists_any(listed)) return 0;
    return fault_set(fault, ERR_MALFORMED, listed->name, "has no template under 'chat_template'");
}

/* As in transformers, one template of its own file hides all of tokenizer_config.json. */
static int open_templates(const char *dir, const cJSON *config, struct text *text,
                          struct fault *fault) {
    const char *plain = "chat_template.jinja", *folder = "additional_chat_templates/tool_use.jinja";
    struct listed listed = {"tokenizer_config.json", config};
    char plain_path[4096], folder_path[4096];
    cJSON *legacy = NULL;
    int rc = text_join_path(plain_path, sizeof plain_path, dir, plain, fault);
    if (rc == 0) rc = text_join_path(folder_path, sizeof folder_path, dir, folder, fault);
    if (rc != 0) return rc;
    if (exists(plain_path) || exists(folder_path))
        listed.json = NULL;
    else if (!lists_any(&listed))
        rc = open_legacy(dir, &legacy, &listed, fault);
    if (rc == 0)
        rc = open_template(dir, plain, &listed, "default", &text->chat, &text->source, fault);
    if (rc == 0)
        rc = open_template(dir, folder, &listed, "tool_use", &text->tool_chat, &text->tool_source,
                           fault);
    json_free(legacy);
    return rc;
}

static int open_text_dir(const char *dir, const char *given, struct text *text,
                         struct fault *fault) {
    cJSON *config = NULL, *map = NULL;
    int rc = tok_open_dir(dir, &text->tok, fault);
    if (rc == 0) rc = open_object(dir, "tokenizer_config.json", &config, fault);
    if (rc == 0) rc = open_object(dir, "special_tokens_map.json", &map, fault);
    if (rc == 0) rc = text_read_tokens(text, config, map, fault);
    if (rc == 0 && !given) rc = open_templates(dir, config, text, fault);
    json_free(config);
    json_free(map);
    return rc;
}

/* ---- GGUF files ---- */

static int add_gguf_token(struct text *text, const struct gguf *gguf, const char *key,
                          const char *name, struct fault *fault) {
    int64_t id = -1;
    const char *bytes;
    char content[1024];
    int rc = gguf_token(gguf, key, &id, fault);
    if (rc != 0 || id < 0) return rc;
    size_t size = tok_bytes(text->tok, (int32_t)id, &bytes);
    if (size >= sizeof content || memchr(bytes, 0, size)) return 0;
    memcpy(content, bytes, size);
    content[size] = '\0';
    return cJSON_AddStringToObject(text->tokens, name, content) ? 0 : text_no_memory(fault);
}

static int read_gguf_tokens(struct text *text, const struct gguf *gguf, struct fault *fault) {
    static const char *const tokens[][2] = {{"tokenizer.ggml.bos_token_id", "bos_token"},
                                            {"tokenizer.ggml.eos_token_id", "eos_token"},
                                            {"tokenizer.ggml.unknown_token_id", "unk_token"},
                                            {"tokenizer.ggml.padding_token_id", "pad_token"},
                                            {"tokenizer.ggml.seperator_token_id", "sep_token"},
                                            {"tokenizer.ggml.mask_token_id", "mask_token"}};
    int rc = 0;
    text->tokens = cJSON_CreateObject();
    if (!text->tokens) return text_no_memory(fault);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens && rc == 0; i++)
        rc = add_gguf_token(text, gguf, tokens[i][0], tokens[i][1], fault);
    return rc;
}

static int open_gguf_template(const struct gguf *gguf, const char *key, struct chat **chat,
                              char **source, struct fault *fault) {
    struct gguf_string string = {0};
    int rc = gguf_str(gguf, key, &string, fault);
    if (rc != 0 || !string.data) return rc;
    if (string.size > TEMPLATE_BYTES_MAX)
        return fault_set(fault, ERR_LIMIT, key, "has more than %zu bytes", TEMPLATE_BYTES_MAX);
    *source = mem_must_alloc(string.size + 1, 1);
    memcpy(*source, string.data, string.size);
    return in_file(chat_open(*source, string.size, chat, fault), key, fault);
}

static int read_gguf(const struct gguf *gguf, const char *given, struct text *text,
                     struct fault *fault) {
    int rc = tok_open_gguf(gguf, &text->tok, fault);
    if (rc == 0) rc = read_gguf_tokens(text, gguf, fault);
    if (given) return rc;
    if (rc == 0)
        rc = open_gguf_template(gguf, "tokenizer.chat_template", &text->chat, &text->source, fault);
    if (rc == 0)
        rc = open_gguf_template(gguf, "tokenizer.chat_template.tool_use", &text->tool_chat,
                                &text->tool_source, fault);
    return rc;
}

static int open_text_gguf(const char *path, const char *given, struct text *text,
                          struct fault *fault) {
    const void *data = NULL;
    size_t size = 0;
    struct gguf gguf;
    int rc = file_map(path, &data, &size, fault);
    if (rc != 0) return rc;
    struct fault inner = {0};
    rc = gguf_parse(data, size, &gguf, &inner);
    if (rc != 0) {
        fault_set(fault, rc, inner.field, "%.160s: %.220s", path, inner.text);
    } else {
        rc = read_gguf(&gguf, given, text, fault);
        gguf_close(&gguf);
    }
    munmap((void *)(uintptr_t)data, size);
    return rc;
}

static void find_lists(struct text *text); /* below, with what renders chats */

static bool is_file(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

int text_open(const char *path, const char *given, struct text *text, struct fault *fault) {
    *text = (struct text){0};
    if (given && !given[0]) given = NULL;
    int rc = is_file(path) ? open_text_gguf(path, given, text, fault)
                           : open_text_dir(path, given, text, fault);
    if (rc == 0 && given) rc = open_given(given, text, fault);
    if (rc == 0) {
        text->bos = text_copy_token(text->tokens, "bos_token");
        text->eos = text_copy_token(text->tokens, "eos_token");
        find_lists(text);
    } else {
        text_close(text);
    }
    return rc;
}

void text_close(struct text *text) {
    tok_close(text->tok);
    chat_close(text->chat);
    chat_close(text->tool_chat);
    cJSON_Delete(text->tokens);
    mem_free(text->source);
    mem_free(text->tool_source);
    mem_free(text->bos);
    mem_free(text->eos);
    *text = (struct text){0};
}

/* ---- Chats ---- */

/* Names that transformers passes as None when the caller has none; templates ask "is not none". */
static bool add_absent(cJSON *full, const cJSON *context) {
    static const char *const names[] = {"tools", "documents"};
    bool ok = true;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!cJSON_GetObjectItemCaseSensitive(context, names[i]))
            ok = ok && cJSON_AddNullToObject(full, names[i]);
    return ok;
}

static bool is_model_string(const struct text *text, const char *name) {
    return strcmp(name, "bos_token") == 0 || strcmp(name, "eos_token") == 0 ||
           json_get(text->tokens, name);
}

/* The request's context with the model's own strings put in front; they win over the request's. A
 * template may print bos_token and eos_token of a model that has none. */
static cJSON *with_model_strings(const struct text *text, const cJSON *context) {
    cJSON *full = cJSON_CreateObject(), *item = NULL;
    if (!full) return NULL;
    const char *bos = cJSON_IsTrue(json_get(context, "begins_later")) ? "" : text->bos;
    bool ok = cJSON_AddStringToObject(full, "bos_token", bos) &&
              cJSON_AddStringToObject(full, "eos_token", text->eos) && add_absent(full, context);
    cJSON_ArrayForEach(item, text->tokens) {
        if (json_get(full, item->string)) continue;
        ok = ok && cJSON_AddStringToObject(full, item->string, item->valuestring);
    }
    cJSON_ArrayForEach(item, context) {
        if (is_model_string(text, item->string) ||
            strcmp(item->string, "continue_final_message") == 0 ||
            strcmp(item->string, "begins_later") == 0)
            continue;
        ok = ok && cJSON_AddItemReferenceToObject(full, item->string, (cJSON *)(uintptr_t)item);
    }
    if (ok && contents_divide(full, text->lists)) return full;
    cJSON_Delete(full);
    return NULL;
}

static bool is_untrusted(const struct chat_text *rendered, size_t at) {
    for (size_t i = 0; i < rendered->untrusted_count; i++)
        if (at >= rendered->untrusted[i].begin && at < rendered->untrusted[i].end) return true;
    return false;
}

/* border[k]: of the pattern's last k + 1 bytes, how many of the end are also their beginning, not
 * counting all of them (Knuth, Morris, Pratt 1977, from the right). */
static void fill_borders(const char *pattern, size_t size, size_t *border) {
    const char *end = pattern + size - 1;
    border[0] = 0;
    for (size_t i = 1, k = 0; i < size; i++) {
        while (k > 0 && end[-(ptrdiff_t)i] != end[-(ptrdiff_t)k]) k = border[k - 1];
        if (end[-(ptrdiff_t)i] == end[-(ptrdiff_t)k]) k++;
        border[i] = k;
    }
}

/* Last place where the template wrote these bytes of the request; rendered->size = none. Linear
 * also for texts that repeat themselves, which a client may choose. */
static size_t find_last(const struct chat_text *rendered, const char *content, size_t size,
                        const size_t *border) {
    const char *end = content + size - 1;
    for (size_t at = rendered->size, k = 0; at-- > 0;) {
        while (k > 0 && rendered->text[at] != end[-(ptrdiff_t)k]) k = border[k - 1];
        if (rendered->text[at] == end[-(ptrdiff_t)k]) k++;
        if (k < size) continue;
        if (is_untrusted(rendered, at) && is_untrusted(rendered, at + size - 1)) return at;
        k = border[k - 1];
    }
    return rendered->size;
}

/* Cuts the prompt off behind the final message, so that the model goes on with that message.
 * Templates may trim a message; its white space at the end stays where the template left it. */
static int cut_after_final(struct chat_text *rendered, const cJSON *context, struct arena *arena,
                           struct fault *fault) {
    static const char blank[] = " \t\r\n\v\f";
    const cJSON *messages = json_get(context, "messages"), *last = NULL, *node = NULL;
    cJSON_ArrayForEach(last, messages) node = json_get(last, "content");
    size_t whole, size;
    const char *content =
        json_arena_text(arena, cJSON_IsString(node) ? node->valuestring : "", &whole);
    if (!content) return fault_set(fault, ERR_NOMEM, NULL, "no memory to find the message");
    size_t begin = strspn(content, blank);
    content += begin;
    size = whole -= begin;
    while (size > 0 && memchr(blank, content[size - 1], sizeof blank - 1)) size--;
    if (size == 0) return fault_set(fault, ERR_INVALID, "messages", "there is no text to continue");
    size_t *border = arena_alloc(arena, size, sizeof *border);
    if (!border) return fault_set(fault, ERR_NOMEM, NULL, "no memory to find the message");
    fill_borders(content, size, border);
    size_t at = find_last(rendered, content, size, border);
    if (at == rendered->size)
        return fault_set(fault, ERR_INVALID, "messages",
                         "the chat template does not show the final message as it is, so it cannot "
                         "be continued");
    if (whole <= rendered->size - at && memcmp(rendered->text + at, content, whole) == 0 &&
        is_untrusted(rendered, at + whole - 1))
        size = whole;
    rendered->size = at + size;
    while (rendered->untrusted_count > 0 &&
           rendered->untrusted[rendered->untrusted_count - 1].begin >= rendered->size)
        rendered->untrusted_count--;
    if (rendered->untrusted[rendered->untrusted_count - 1].end > rendered->size)
        rendered->untrusted[rendered->untrusted_count - 1].end = rendered->size;
    return 0;
}

/* The names whose strings are the model's own. */
static int list_trusted(const struct text *text, struct arena *arena, struct chat_input *input,
                        struct fault *fault) {
    const cJSON *item = NULL;
    size_t count = (size_t)cJSON_GetArraySize(text->tokens) + 2;
    const char **names = arena_alloc(arena, count, sizeof *names);
    if (!names) return text_no_memory(fault);
    input->trusted = names;
    names[input->trusted_count++] = "bos_token";
    names[input->trusted_count++] = "eos_token";
    cJSON_ArrayForEach(item, text->tokens) names[input->trusted_count++] = item->string;
    return 0;
}

/* Selects the template that renders the chat; NULL: the model has none. */
static const struct chat *template_of(const struct text *text, const cJSON *context) {
    return text->tool_chat && json_get(context, "tools") ? text->tool_chat : text->chat;
}

/* ---- Roles of the template's own ---- */

#define AGAIN_BYTES_MAX ((size_t)64 << 20) /* a chat that is rendered a second time */

static const char *role_of(const cJSON *message) {
    const cJSON *role = json_get(message, "role");
    return cJSON_IsString(role) ? role->valuestring : "user";
}

/* OpenAI's `function` is an old role, which most templates lack. */
static bool is_own_role(const char *role) {
    return !chat_is_known_role(role) || strcmp(role, "function") == 0;
}

/* Replaces the messages by those that have another role. */
static bool leave_out(const struct text *text, cJSON *full, const cJSON *context,
                      const char *role) {
    cJSON *others = cJSON_CreateArray(), *message;
    bool ok = others != NULL;
    cJSON_ArrayForEach(message, json_get(context, "messages")) {
        if (strcmp(role_of(message), role) == 0) continue;
        ok = ok && cJSON_AddItemReferenceToArray(others, message);
    }
    if (ok && cJSON_ReplaceItemInObjectCaseSensitive(full, "messages", others))
        return contents_divide(full, text->lists);
    cJSON_Delete(others);
    return false;
}

/* Does the chat read the same without the messages of a role? A template that refuses the other
 * messages alone needs these. */
static bool is_left_out(const struct text *text, const cJSON *context, const struct chat_text *with,
                        struct chat_input input, const char *role) {
    struct chat_text without = {0};
    struct fault fault;
    struct arena arena;
    cJSON *full = with_model_strings(text, context);
    arena_open(&arena, AGAIN_BYTES_MAX);
    input.context = full;
    bool same = full && leave_out(text, full, context, role) &&
                chat_render(template_of(text, context), &input, &arena, &without, &fault) == 0 &&
                without.size == with->size && memcmp(without.text, with->text, with->size) == 0;
    cJSON_Delete(full);
    arena_close(&arena);
    return same;
}

#define TEXT_ROLES "roles are system, developer, user, assistant, tool"

/* Does a template's source have the role as a string? */
static bool names_role(const char *source, const char *role) {
    size_t size = strlen(role);
    for (const char *at = source; source && (at = strstr(at, role)) != NULL; at++)
        if (at > source && (at[-1] == '\'' || at[-1] == '"') && strchr("'\"\\", at[size]))
            return true;
    return false;
}

/* OpenAI's roles are understood everywhere, any other only by the template that names it. */
static bool is_unknown_role(const struct text *text, const char *role) {
    return !chat_is_known_role(role) && !names_role(text->source, role) &&
           !names_role(text->tool_source, role);
}

/* Many templates pass over a role that they do not know, or write it as it is: a typing error would
 * lose its message, or show the model a role that it never saw. */
static int check_roles(const struct text *text, const cJSON *context,
                       const struct chat_text *rendered, const struct chat_input *input,
                       struct fault *fault) {
    const char *seen[TEXT_OWN_ROLES_MAX];
    const cJSON *message;
    char field[64];
    int count = 0, at = -1;
    cJSON_ArrayForEach(message, json_get(context, "messages")) {
        const char *role = role_of(message);
        int i = 0;
        at++;
        if (!is_own_role(role)) continue;
        while (i < count && strcmp(seen[i], role) != 0) i++;
        if (i < count) continue;
        snprintf(field, sizeof field, "messages[%d].role", at);
        if (count == TEXT_OWN_ROLES_MAX)
            return fault_set(fault, ERR_INVALID, field,
                             "at most %d roles may be other than OpenAI's", TEXT_OWN_ROLES_MAX);
        if (is_left_out(text, context, rendered, *input, role))
            return fault_set(
                fault, ERR_INVALID, field,
                "this model's chat template leaves out messages of the role '%.32s'; " TEXT_ROLES,
                role);
        if (is_unknown_role(text, role))
            return fault_set(
                fault, ERR_INVALID, field,
                "this model's chat template does not know the role '%.32s'; " TEXT_ROLES
                ", and any that the template names",
                role);
        seen[count++] = role;
    }
    return 0;
}

/* ---- Chats ---- */

static int text_encode_rendered(const struct text *text, const struct chat_text *rendered,
                                size_t max_ids, struct arena *arena, struct tok_ids *out,
                                struct fault *fault) {
    return tok_encode(text->tok, rendered->text, rendered->size, TOK_SPECIALS, rendered->untrusted,
                      rendered->untrusted_count, max_ids, arena, out, fault);
}

int text_check_pictures(const struct text *text, enum picture_kind kind, struct fault *fault) {
    struct arena arena;
    int32_t id;
    arena_open(&arena, 1 << 16);
    int rc = contents_find_mark(text->tok, kind, &arena, &id, fault);
    arena_close(&arena);
    return rc;
}

int text_render_chat(const struct text *text, const cJSON *context, struct text_pictures *pictures,
                     size_t max_ids, struct arena *arena, struct tok_ids *out,
                     struct fault *fault) {
    const struct chat *chat = template_of(text, context);
    if (!chat)
        return fault_set(fault, ERR_UNSUPPORTED, "messages",
                         "this model has no chat template; use /v1/completions");
    cJSON *full = with_model_strings(text, context);
    if (!full) return fault_set(fault, ERR_NOMEM, NULL, "no memory for the template context");
    struct chat_input input = {.context = full, .now = clock_unix_seconds()};
    struct chat_text rendered = {0};
    *out = (struct tok_ids){0};
    int rc = list_trusted(text, arena, &input, fault);
    if (rc == 0) rc = chat_render(chat, &input, arena, &rendered, fault);
    if (rc == 0) rc = check_roles(text, context, &rendered, &input, fault);
    if (rc == 0 && cJSON_IsTrue(json_get(context, "continue_final_message")))
        rc = cut_after_final(&rendered, context, arena, fault);
    if (rc == 0 && pictures) rc = contents_expand(&rendered, pictures, arena, fault);
    if (rc == 0) rc = text_encode_rendered(text, &rendered, max_ids, arena, out, fault);
    if (rc == 0 && pictures) rc = contents_find_rows(text->tok, out, pictures, arena, fault);
    cJSON_Delete(full);
    return rc;
}

/* ---- Lists of parts ---- */

#define BORDER_BYTES_MAX ((size_t)64 << 20)

/* A question for trials: a character that no text has, and that no template trims. */
static const char other_question[] = "\xEE\x80\x80"; /* U+E000 */

/* Does the template show a user's message whose content has the form that text->lists says? */
static bool shows_question(const struct text *text, const cJSON *context) {
    struct chat_input input = {.now = clock_unix_seconds()};
    struct chat_text rendered = {0};
    struct fault fault = {0};
    struct arena arena;
    cJSON *full = with_model_strings(text, context);
    arena_open(&arena, BORDER_BYTES_MAX);
    input.context = full;
    bool shows = full && list_trusted(text, &arena, &input, &fault) == 0 &&
                 chat_render(text->chat, &input, &arena, &rendered, &fault) == 0 &&
                 memmem(rendered.text, rendered.size, other_question, sizeof other_question - 1);
    cJSON_Delete(full);
    arena_close(&arena);
    return shows;
}

/* Templates of models that see pictures may pass over contents that are strings. */
static void find_lists(struct text *text) {
    static const char source[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"\xEE\x80\x80\"}],"
        " \"add_generation_prompt\": true}";
    const struct json_limits limits = {.bytes = sizeof source, .depth = 8};
    cJSON *context = NULL;
    if (!text->chat || json_parse(source, sizeof source - 1, &limits, &context, NULL)) return;
    if (!shows_question(text, context)) {
        text->lists = true;
        text->lists = shows_question(text, context);
    }
    json_free(context);
}

/* ---- The border ---- */

static bool is_system(const cJSON *message) {
    const cJSON *role = json_get(message, "role");
    return cJSON_IsString(role) && (strcmp(role->valuestring, "system") == 0 ||
                                    strcmp(role->valuestring, "developer") == 0);
}

/* Are tools and system messages long enough? Contents that are no text count as long. */
static bool has_head(const cJSON *context, size_t least) {
    const cJSON *message, *content, *tools = json_get(context, "tools");
    size_t bytes = tools && cJSON_GetArraySize(tools) > 0 ? least : 0;
    cJSON_ArrayForEach(message, json_get(context, "messages")) {
        if (!is_system(message)) break;
        content = json_get(message, "content");
        bytes += cJSON_IsString(content) ? strlen(content->valuestring) : least;
    }
    return bytes > 0 && bytes >= least;
}

/* Puts the system messages and the other question in the place of the messages. */
static bool ask_otherwise(const struct text *text, cJSON *full, const cJSON *context) {
    cJSON *messages = cJSON_CreateArray(), *user = cJSON_CreateObject(), *message;
    bool ok = messages && user && cJSON_AddStringToObject(user, "role", "user") &&
              cJSON_AddStringToObject(user, "content", other_question);
    cJSON_ArrayForEach(message, json_get(context, "messages")) {
        if (!ok || !is_system(message)) break;
        ok = cJSON_AddItemReferenceToArray(messages, message);
    }
    if (!ok || !cJSON_AddItemToArray(messages, user)) {
        cJSON_Delete(user);
        cJSON_Delete(messages);
        return false;
    }
    if (cJSON_ReplaceItemInObjectCaseSensitive(full, "messages", messages))
        return contents_divide(full, text->lists);
    cJSON_Delete(messages);
    return false;
}

size_t text_chat_border(const struct text *text, const cJSON *context, const int32_t *ids,
                        size_t count, size_t least) {
    struct chat_input input = {.now = clock_unix_seconds()};
    struct chat_text rendered = {0};
    struct tok_ids other = {0};
    struct fault fault = {0};
    struct arena arena;
    size_t common = 0;
    const struct chat *chat = template_of(text, context);
    if (!chat || !has_head(context, least)) return 0;
    cJSON *full = with_model_strings(text, context);
    arena_open(&arena, BORDER_BYTES_MAX);
    input.context = full;
    int rc = full && ask_otherwise(text, full, context) ? 0 : ERR_NOMEM;
    if (rc == 0) rc = list_trusted(text, &arena, &input, &fault);
    if (rc == 0) rc = chat_render(chat, &input, &arena, &rendered, &fault);
    /* The other chat is longer than this one by a few tokens at most. */
    if (rc == 0 && rendered.size > least)
        rc = text_encode_rendered(text, &rendered, count + 256, &arena, &other, &fault);
    while (rc == 0 && common < count && common < other.count && ids[common] == other.ids[common])
        common++;
    cJSON_Delete(full);
    arena_close(&arena);
    return common;
}
