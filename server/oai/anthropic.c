/* POST /v1/messages and /v1/messages/count_tokens, the requests: Anthropic's form. Blocks of
 * content become the messages of a chat. */
#include "server/oai/anthropic.h"

#include <string.h>

#include "base/json.h"
#include "server/oai/edits.h"

/* Fields that Anthropic's API has. Those about servers, containers, prices and places change
 * nothing here. `compaction` asks for a summary instead of an answer, and `thread` for state that
 * keepd does not keep. */
#define OWN_FIELDS                                                                                 \
    {"cache_control", OAI_ANY}, {"chat_template_kwargs", OAI_ANY}, {"compaction", OAI_NEVER},      \
        {"container", OAI_ANY}, {"context_management", OAI_ANY}, {"diagnostics", OAI_ANY},         \
        {"fallbacks", OAI_ANY}, {"inference_geo", OAI_ANY}, {"max_tokens", OAI_ANY},               \
        {"mcp_servers", OAI_ANY}, {"messages", OAI_ANY}, {"output_config", OAI_ANY},               \
        {"output_format", OAI_ANY}, {"reasoning", OAI_ANY}, {"reasoning_effort", OAI_ANY},         \
        {"speed", OAI_ANY}, {"system", OAI_ANY}, {"thinking", OAI_ANY}, {"thread", OAI_NEVER},     \
        {"tool_choice", OAI_ANY}, {                                                                \
        "tools", OAI_ANY                                                                           \
    }

static const struct oai_field message_fields[] = {
    OWN_FIELDS,
    {"logprobs", OAI_NEVER},
    {"n", OAI_ONE},
    {"prompt_logprobs", OAI_NEVER},
    {"response_format", OAI_NEVER},
    {"return_token_ids", OAI_FALSE},
    {"stop", OAI_NEVER},
    {"stop_sequences", OAI_ANY},
    {"timings", OAI_FALSE},
    {"timings_per_token", OAI_FALSE},
    {"verbose", OAI_FALSE},
    {NULL, OAI_ANY},
};

static const struct oai_field count_fields[] = {
    OWN_FIELDS,
    {NULL, OAI_ANY},
};

static const struct oai_alias aliases[] = {
    {"tools[].function.parameters", "tools[].input_schema"},
    {"tools[].function", "tools[]"},
    {"tool_choice.function", "tool_choice"},
    {"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"},
    {"stop", "stop_sequences"},
    {"response_format.json_schema", "output_config.format"},
    {"response_format", "output_config.format"},
    {"reasoning_effort", "output_config.effort"},
    {NULL, NULL},
};

/* --- content --- */

static const struct oai_part_type texts[] = {{"text", "text"}, {NULL, NULL}};
static const struct oai_part_type results[] = {{"text", "text"}, OAI_PARTS_ELSE};

static int read_system(struct oai_rewrite *w) {
    const cJSON *system = json_get(w->body, "system");
    const char *text;
    if (!system) return 0;
    if (oai_rewrite_join(w, system, "system", texts, &text)) return -1;
    return text[0] ? oai_rewrite_message(w, "system", text) : 0;
}

/* Returns the name in a reference to a tool, which the result of a search for tools contains; NULL:
 * the part is no reference. */
static const char *name_in_reference(const cJSON *part) {
    const cJSON *name = json_get(part, "tool_name");
    return oai_has_type(part, "tool_reference") && cJSON_IsString(name) ? name->valuestring : NULL;
}

static void write_tool(struct buf *out, const cJSON *tool) {
    static const char *const members[][2] = {
        {"name", "name"}, {"description", "description"}, {"parameters", "input_schema"}};
    const char *before = "This tool can be called from now on: {\"type\": \"function\", "
                         "\"function\": {";
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        const cJSON *member = json_get(tool, members[i][1]);
        if (!member) continue;
        buf_fmt(out, "%s\"%s\": ", before, members[i][0]);
        json_write_node(out, member);
        before = ", ";
    }
    buf_str(out, "}}");
}

/* Writes a deferred tool at the first reference to it, so that the prompt before it stays the same.
 */
static void show_tool(struct oai_rewrite *w, const char *name, struct buf *out) {
    const cJSON *tool = NULL;
    bool counts = w->shown_count++ < w->referred_count; /* further names were not searched */
    for (int i = 0; counts && i < w->tool_count && !tool; i++) {
        if (strcmp(w->origins[i].name, name) != 0) continue;
        tool = w->origins[i].deferred;
        w->origins[i].deferred = NULL;
    }
    if (tool)
        write_tool(out, tool);
    else
        buf_fmt(out, "The tool %.128s can be called.", name);
}

/* Appends the text of one part of a result. `after`: behind a picture, which ends a line. */
static int join_result(struct oai_rewrite *w, const cJSON *part, const char *path, bool after,
                       struct buf *out) {
    const char *name = name_in_reference(part), *text;
    if (oai_is_picture(w->r, part)) return oai_rewrite_picture(w, part, path, out->size);
    if (out->size && !after) buf_char(out, '\n');
    if (name) {
        show_tool(w, name, out);
        return 0;
    }
    if (oai_rewrite_part(w, part, path, results, &text)) return -1;
    buf_str(out, text);
    return 0;
}

/* Joins the parts of a result. It refuses none, because the client could not take the result back.
 */
static int read_result(struct oai_rewrite *w, const cJSON *parts, const char *path,
                       const char **text) {
    const cJSON *part;
    char field[OAI_PATH];
    struct buf out;
    int i = 0, rc = 0;
    if (!cJSON_IsArray(parts)) return oai_rewrite_join(w, parts, path, results, text);
    buf_open(&out, w->r->rules->body_bytes * 2);
    bool after_picture = false;
    cJSON_ArrayForEach(part, parts) {
        oai_path(field, "%s[%d]", path, i++);
        if (!rc) rc = join_result(w, part, field, after_picture, &out);
        after_picture = oai_is_picture(w->r, part);
    }
    *text = out.failed ? NULL : arena_strndup(w->r->arena, out.data ? out.data : "", out.size);
    buf_close(&out);
    return rc || *text ? rc : oai_no_memory(w->r);
}

/* Returns whether a result shows a tool. Such a result is never left out, because the tool could
 * not be called without it. */
static bool shows_tool(const cJSON *content) {
    const cJSON *part;
    bool shows = false;
    cJSON_ArrayForEach(part, content) shows = shows || name_in_reference(part);
    return shows;
}

static int add_result(struct oai_rewrite *w, const cJSON *block, const char *path) {
    const cJSON *content = json_get(block, "content");
    const char *id, *text = "";
    char field[OAI_PATH];
    oai_path(field, "%s.content", path);
    if (oai_rewrite_string(w, block, path, "tool_use_id", &id)) return -1;
    if (content && oai_edits_drop(w, id) && !shows_tool(content))
        text = OAI_EDITED;
    else if (content && read_result(w, content, field, &text))
        return -1;
    return oai_rewrite_result(w, id, text);
}

/* Returns the arguments of a call: its input or, in the form that anthropic_answer.c gives to
 * arguments that were cut or are not JSON, their text. */
static const cJSON *arguments_of(const cJSON *input) {
    const cJSON *raw = json_get(input, "INVALID_JSON");
    return cJSON_IsString(raw) && !raw->next && input->child == raw ? raw : input;
}

static int add_use(struct oai_rewrite *w, const cJSON *block, const char *path) {
    const cJSON *input = json_get(block, "input");
    const char *id, *name;
    char field[OAI_PATH];
    oai_path(field, "%s.input", path);
    if (oai_rewrite_string(w, block, path, "id", &id) ||
        oai_rewrite_string(w, block, path, "name", &name))
        return -1;
    if (input && !cJSON_IsObject(input))
        return oai_expected(w->r->error, field, "an object", input);
    const struct oai_drop *drop = oai_edits_drop(w, id);
    return oai_rewrite_call(w, id, name, drop && drop->bare ? NULL : arguments_of(input));
}

static int add_thinking(struct oai_rewrite *w, const cJSON *block, const char *path) {
    const char *text;
    if (oai_rewrite_string(w, block, path, "thinking", &text)) return -1;
    return text[0] && !w->thoughtless ? oai_rewrite_thought(w, text) : 0;
}

/* Returns the text of a user's document or search result; NULL: it has none. */
static const cJSON *text_of_block(const cJSON *block, const char *type) {
    const cJSON *source = json_get(block, "source");
    if (strcmp(type, "search_result") == 0) return json_get(block, "content");
    if (strcmp(type, "document") != 0) return NULL;
    return json_get(source, oai_has_type(source, "content") ? "content"
                            : oai_has_type(source, "text")  ? "data"
                                                            : "");
}

static int read_user_block(struct oai_rewrite *w, const cJSON *block, const char *path,
                           const char *type, const char **text) {
    const cJSON *content = text_of_block(block, type);
    char field[OAI_PATH];
    if (strcmp(type, "text") == 0) return oai_rewrite_string(w, block, path, "text", text);
    oai_path(field, "%s.type", path);
    if (content) return oai_rewrite_join(w, content, path, texts, text);
    return oai_rewrite_refuse(
        w, field,
        "only blocks of type 'text' and 'tool_result', and documents of text, "
        "are served here, found '%.32s'",
        type);
}

static int add_answer_block(struct oai_rewrite *w, const cJSON *block, const char *path) {
    const char *type, *text;
    if (!cJSON_IsObject(block)) return oai_expected(w->r->error, path, "an object", block);
    if (oai_rewrite_string(w, block, path, "type", &type)) return -1;
    if (strcmp(type, "tool_use") == 0) return add_use(w, block, path);
    if (strcmp(type, "thinking") == 0) return add_thinking(w, block, path);
    if (strcmp(type, "image") == 0) {
        char field[OAI_PATH];
        oai_path(field, "%s.type", path);
        return oai_rewrite_refuse(w, field, "pictures are the user's or a tool's");
    }
    /* keepd cannot read what another server thought or did */
    if (strcmp(type, "text") != 0) return 0;
    return oai_rewrite_string(w, block, path, "text", &text) || oai_rewrite_answer(w, text) ? -1
                                                                                            : 0;
}

static int add_answer(struct oai_rewrite *w, const cJSON *content, const char *path) {
    const cJSON *block;
    char field[OAI_PATH];
    int i = 0;
    w->open = NULL;
    w->whole = true;
    if (cJSON_IsString(content)) return oai_rewrite_answer(w, content->valuestring);
    cJSON_ArrayForEach(block, content) {
        oai_path(field, "%s[%d]", path, i++);
        if (add_answer_block(w, block, field)) return -1;
    }
    return i ? 0 : oai_rewrite_answer(w, "");
}

/* Adds a user's blocks: consecutive texts are one message, each result is a message of its own. */
static int add_user_blocks(struct oai_rewrite *w, const cJSON *content, const char *path,
                           struct buf *text) {
    const cJSON *block;
    const char *type, *part;
    char field[OAI_PATH];
    bool said = false, after_text = false;
    int i = 0;
    cJSON_ArrayForEach(block, content) {
        oai_path(field, "%s[%d]", path, i++);
        if (!cJSON_IsObject(block)) return oai_expected(w->r->error, field, "an object", block);
        if (oai_rewrite_string(w, block, field, "type", &type)) return -1;
        bool result = strcmp(type, "tool_result") == 0;
        if (result) {
            if (said && oai_rewrite_message(w, "user", text->data ? text->data : "")) return -1;
            said = after_text = false;
            buf_clear(text);
            if (add_result(w, block, field)) return -1;
            continue;
        }
        said = true;
        if (oai_is_picture(w->r, block)) {
            if (oai_rewrite_picture(w, block, field, text->size)) return -1;
            after_text = false;
            continue;
        }
        if (read_user_block(w, block, field, type, &part)) return -1;
        if (after_text) buf_char(text, '\n');
        buf_str(text, part);
        after_text = true;
    }
    if (text->failed) return oai_no_memory(w->r);
    return said || !i ? oai_rewrite_message(w, "user", text->data ? text->data : "") : 0;
}

static int add_user(struct oai_rewrite *w, const cJSON *content, const char *path) {
    struct buf text;
    if (cJSON_IsString(content)) return oai_rewrite_message(w, "user", content->valuestring);
    buf_open(&text, w->r->rules->body_bytes);
    int rc = add_user_blocks(w, content, path, &text);
    buf_close(&text);
    return rc;
}

/* Adds a message of the system. If it says that tools come or go, this has no effect: all declared
 * tools may be called. */
static int add_system(struct oai_rewrite *w, const cJSON *content, const char *path) {
    const cJSON *block;
    char field[OAI_PATH];
    struct buf text;
    const char *part;
    int i = 0, rc = 0;
    if (cJSON_IsString(content)) return oai_rewrite_message(w, "system", content->valuestring);
    buf_open(&text, w->r->rules->body_bytes);
    cJSON_ArrayForEach(block, content) {
        oai_path(field, "%s[%d]", path, i++);
        if (rc || oai_has_type(block, "tool_addition") || oai_has_type(block, "tool_removal"))
            continue;
        rc = oai_rewrite_part(w, block, field, texts, &part);
        if (!rc && text.size) buf_char(&text, '\n');
        if (!rc) buf_str(&text, part);
    }
    if (!rc && text.failed) rc = oai_no_memory(w->r);
    if (!rc && text.size) rc = oai_rewrite_message(w, "system", text.data);
    buf_close(&text);
    return rc;
}

static bool has_role(const cJSON *message, const char *name) {
    const cJSON *role = json_get(message, "role");
    return cJSON_IsString(role) && strcmp(role->valuestring, name) == 0;
}

static const cJSON *last_of_user(const cJSON *messages) {
    const cJSON *message, *last = NULL;
    cJSON_ArrayForEach(message, messages) if (has_role(message, "user")) last = message;
    return last;
}

/* Returns whether a message of the system was meant only for the user's turn before it, and a later
 * turn has come. */
static bool is_cleared(const cJSON *message, bool user_follows) {
    const cJSON *until = json_get(message, "clear_at");
    return user_follows && cJSON_IsString(until) &&
           strcmp(until->valuestring, "next_user_message") == 0;
}

static int add_message(struct oai_rewrite *w, const cJSON *message, const char *path,
                       bool user_follows) {
    const cJSON *content = json_get(message, "content");
    const char *role;
    char field[OAI_PATH];
    if (!cJSON_IsObject(message)) return oai_expected(w->r->error, path, "an object", message);
    if (oai_rewrite_string(w, message, path, "role", &role)) return -1;
    oai_path(field, "%s.content", path);
    if (!content) return oai_missing(w->r, field);
    if (!cJSON_IsString(content) && !cJSON_IsArray(content))
        return oai_expected(w->r->error, field, "a string or an array of blocks", content);
    if (strcmp(role, "user") == 0) return add_user(w, content, field);
    if (strcmp(role, "assistant") == 0) return add_answer(w, content, field);
    if (strcmp(role, "system") == 0)
        return is_cleared(message, user_follows) ? 0 : add_system(w, content, field);
    oai_path(field, "%s.role", path);
    return oai_invalid(w->r, field, "expected 'user', 'assistant' or 'system', found '%.32s'",
                       role);
}

static int read_messages(struct oai_rewrite *w) {
    const cJSON *messages = json_get(w->body, "messages"), *message;
    char path[OAI_PATH];
    int i = 0;
    if (!messages) return oai_missing(w->r, "messages");
    if (!cJSON_IsArray(messages))
        return oai_expected(w->r->error, "messages", "an array", messages);
    if (cJSON_GetArraySize(messages) > OAI_MESSAGES_MAX)
        return oai_invalid(w->r, "messages", "expected at most %d messages, found %d",
                           OAI_MESSAGES_MAX, cJSON_GetArraySize(messages));
    const cJSON *last = last_of_user(messages);
    bool user_follows = last != NULL;
    cJSON_ArrayForEach(message, messages) {
        user_follows = user_follows && message != last;
        w->thoughtless = (size_t)i < w->thoughts_from;
        oai_path(path, "messages[%d]", i++);
        if (add_message(w, message, path, user_follows)) return -1;
    }
    return i ? oai_rewrite_continue(w)
             : oai_invalid(w->r, "messages", "expected at least one message");
}

/* --- tools --- */

/* Finds the names in references to tools, in all results of the dialogue. */
static int find_references(struct oai_rewrite *w) {
    const cJSON *message, *block, *part;
    w->referred = arena_alloc(w->r->arena, OAI_TOOLS_MAX, sizeof *w->referred);
    if (!w->referred) return oai_no_memory(w->r);
    cJSON_ArrayForEach(message, json_get(w->body, "messages")) {
        cJSON_ArrayForEach(block, json_get(message, "content")) {
            if (!oai_has_type(block, "tool_result")) continue;
            cJSON_ArrayForEach(part, json_get(block, "content")) {
                const char *name = name_in_reference(part);
                if (name && w->referred_count < OAI_TOOLS_MAX)
                    w->referred[w->referred_count++] = name;
            }
        }
    }
    return 0;
}

static bool is_referred_to(const struct oai_rewrite *w, const char *name) {
    for (int i = 0; i < w->referred_count; i++)
        if (strcmp(w->referred[i], name) == 0) return true;
    return false;
}

/* Adds a tool that the client runs. Those that Anthropic's servers run, or whose form only its
 * models know, are left out, and so is a deferred tool before a result refers to it. */
static int add_tool(struct oai_rewrite *w, const cJSON *tool, const char *path) {
    static const char *const members[][2] = {
        {"description", "description"}, {"parameters", "input_schema"}, {"strict", "strict"}};
    bool deferred = cJSON_IsTrue(json_get(tool, "defer_loading"));
    struct oai_tool_origin origin = {0};
    const char *type = "custom";
    cJSON *function;
    if (json_get(tool, "type") && oai_rewrite_string(w, tool, path, "type", &type)) return -1;
    if (strcmp(type, "function") == 0) {
        char field[OAI_PATH];
        oai_path(field, "%s.type", path);
        return oai_refuse(w->r->error, 400, "invalid_value", field,
                          "'function' is a tool in the form of chat completions. Here a tool has "
                          "the members name, description and input_schema, without 'function'.");
    }
    if (strcmp(type, "custom") != 0) {
        oai_rewrite_leave_out(type);
        return 0;
    }
    if (oai_rewrite_string(w, tool, path, "name", &origin.name)) return -1;
    if (deferred && !is_referred_to(w, origin.name)) return 0;
    if (deferred) origin.deferred = tool;
    if (oai_rewrite_tool(w, &origin, path, &function)) return -1;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        if (oai_rewrite_member(w, function, members[i][0], tool, members[i][1])) return -1;
    return deferred ? oai_rewrite_defer(w) : 0;
}

static int name_tool(struct oai_rewrite *w, const cJSON *choice) {
    const char *name;
    if (oai_rewrite_string(w, choice, "tool_choice", "name", &name)) return -1;
    cJSON *copy = cJSON_CreateObject();
    if (oai_rewrite_put(w, "tool_choice", copy)) return -1;
    cJSON *function = cJSON_AddStringToObject(copy, "type", "function")
                          ? cJSON_AddObjectToObject(copy, "function")
                          : NULL;
    return function ? oai_rewrite_member(w, function, "name", choice, "name") : oai_no_memory(w->r);
}

static int read_choice(struct oai_rewrite *w) {
    static const char *const words[][2] = {{"auto", "auto"}, {"any", "required"}, {"none", "none"}};
    const cJSON *choice = json_get(w->body, "tool_choice");
    const char *type;
    bool one = false;
    if (!choice) return 0;
    if (!cJSON_IsObject(choice))
        return oai_expected(w->r->error, "tool_choice", "an object", choice);
    if (oai_get_bool(w->r, "tool_choice", choice, "disable_parallel_tool_use", &one) ||
        oai_rewrite_string(w, choice, "tool_choice", "type", &type) ||
        oai_rewrite_put(w, "parallel_tool_calls", cJSON_CreateBool(!one)))
        return -1;
    if (strcmp(type, "tool") == 0) return name_tool(w, choice);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(type, words[i][0]) == 0)
            return oai_rewrite_put(w, "tool_choice", cJSON_CreateString(words[i][1]));
    return oai_invalid(w->r, "tool_choice.type",
                       "expected 'auto', 'any', 'tool' or 'none', found '%.32s'", type);
}

/* --- the rest --- */

/* Links the fields that say how the model thinks. An effort of the output is one of reasoning. */
static int read_thinking(struct oai_rewrite *w) {
    static const char *const same[] = {"chat_template_kwargs", "reasoning", "reasoning_effort",
                                       "thinking"};
    const cJSON *config = json_get(w->body, "output_config");
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (oai_rewrite_link(w, same[i], json_get(w->body, same[i]))) return -1;
    if (json_get(w->body, "reasoning_effort")) return 0;
    return oai_rewrite_link(w, "reasoning_effort", json_get(config, "effort"));
}

/* Reads {"type": "json_schema", "schema": ...}. */
static int read_format(struct oai_rewrite *w, const cJSON *format, const char *path) {
    const char *type;
    char field[OAI_PATH];
    if (!format) return 0;
    if (!cJSON_IsObject(format)) return oai_expected(w->r->error, path, "an object", format);
    if (oai_rewrite_string(w, format, path, "type", &type)) return -1;
    oai_path(field, "%s.type", path);
    if (strcmp(type, "json_schema") != 0)
        return oai_rewrite_refuse(w, field, "only 'json_schema' is served, found '%.32s'", type);
    oai_path(field, "%s.schema", path);
    if (!json_get(format, "schema")) return oai_missing(w->r, field);
    return oai_rewrite_schema(w, format);
}

static int read_output(struct oai_rewrite *w) {
    const cJSON *config = json_get(w->body, "output_config");
    const cJSON *inner = json_get(config, "format"), *older = json_get(w->body, "output_format");
    if (config && !cJSON_IsObject(config))
        return oai_expected(w->r->error, "output_config", "an object", config);
    if (inner) return read_format(w, inner, "output_config.format");
    return read_format(w, older, "output_format");
}

/* Reads the user's id, which is a hint to a conversation, as `user` is in a chat. */
static int read_user(struct oai_rewrite *w) {
    const cJSON *metadata = json_get(w->body, "metadata");
    if (metadata && !cJSON_IsObject(metadata))
        return oai_expected(w->r->error, "metadata", "an object", metadata);
    if (json_get(w->body, "user")) return 0;
    const cJSON *user = json_get(metadata, "user_id");
    if (user && !cJSON_IsString(user))
        return oai_expected(w->r->error, "metadata.user_id", "a string", user);
    return oai_rewrite_link(w, "user", user);
}

/* Reads all fields on which the prompt depends. */
static int read_chat(struct oai_rewrite *w, struct oai_reader *r) {
    return oai_rewrite_open(w, r) || find_references(w) || oai_rewrite_tools(w, add_tool) ||
                   read_system(w) || oai_edits_read(w) || read_messages(w) || read_choice(w) ||
                   read_output(w) || read_thinking(w) || oai_read_messages(r)
               ? -1
               : 0;
}

static int parse(struct oai_reader *r) {
    const cJSON *most = json_get(r->body, "max_tokens");
    struct oai_rewrite w;
    if (!most) return oai_missing(r, "max_tokens");
    if (read_chat(&w, r) || oai_rewrite_link(&w, "max_tokens", most) ||
        oai_rewrite_link(&w, "stop", json_get(w.body, "stop_sequences")) || read_user(&w))
        return -1;
    r->out->split_reasoning = true;
    r->out->clamps = true;
    return oai_read_tools(r) || oai_read_generation(r) ? -1 : 0;
}

static int parse_count(struct oai_reader *r) {
    struct oai_rewrite w;
    return read_chat(&w, r);
}

const struct oai_kind oai_messages = {
    .path = "/v1/messages",
    .schema = "MessageRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION,
    .fields = message_fields,
    .parse = parse,
    .form = &oai_message_form,
    .aliases = aliases,
    .error = oai_message_error,
};

const struct oai_kind oai_count_tokens = {
    .path = "/v1/messages/count_tokens",
    .schema = "CountRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = count_fields,
    .parse = parse_count,
    .answer = oai_count_answer,
    .aliases = aliases,
    .error = oai_message_error,
};
