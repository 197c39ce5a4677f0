/* POST /v1/responses, the request. Its items become the messages of a chat; those of the response
 * that previous_response_id names come first. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/responses.h"
#include "server/oai/rewrite.h"
#include "server/oai/stored.h"

#define ITEMS_BYTES_MAX (256u << 20)
/* Bytes of stored items that one request searches */
#define REFERENCE_BYTES_MAX ((size_t)256 << 20)

static const struct oai_field fields[] = {
    {"background", OAI_ANY},
    {"background_options", OAI_ANY},
    {"chat_template_kwargs", OAI_ANY},
    {"context_management", OAI_ANY},
    {"client_metadata", OAI_ANY},
    {"conversation", OAI_NEVER},
    {"include", OAI_ANY},
    {"input", OAI_ANY},
    {"instructions", OAI_ANY},
    {"logprobs", OAI_NEVER},
    {"max_output_tokens", OAI_ANY},
    {"max_tokens", OAI_NEVER},
    {"max_tool_calls", OAI_ANY},
    {"messages", OAI_NEVER},
    {"moderation", OAI_NEVER},
    {"n", OAI_ONE},
    {"parallel_tool_calls", OAI_ANY},
    {"previous_response_id", OAI_ANY},
    {"prompt", OAI_NEVER},
    {"prompt_logprobs", OAI_NEVER},
    {"reasoning", OAI_ANY},
    {"reasoning_effort", OAI_ANY},
    {"response_format", OAI_NEVER},
    {"return_token_ids", OAI_FALSE},
    {"stop", OAI_ANY},
    {"text", OAI_ANY},
    {"thinking", OAI_ANY},
    {"tool_choice", OAI_ANY},
    {"tools", OAI_ANY},
    {"top_logprobs", OAI_ANY},
    {"truncation", OAI_ANY},
    {"verbose", OAI_FALSE},
    {NULL, OAI_ANY},
};

static const struct oai_alias aliases[] = {
    {"messages", "input"},
    {"tools[].function", "tools[]"},
    {"tool_choice.function", "tool_choice"},
    {"response_format.json_schema", "text.format"},
    {"response_format", "text.format"},
    {"max_tokens", "max_output_tokens"},
    {"truncate_prompt_tokens", "truncation"},
    {NULL, NULL},
};

/* --- items --- */

static const struct oai_part_type input_parts[] = {
    {"input_text", "text"}, {"text", "text"}, {"input_image", NULL}, {NULL, NULL}};
static const struct oai_part_type output_parts[] = {{"output_text", "text"},
                                                    {"refusal", "refusal"},
                                                    {"input_text", "text"},
                                                    {"text", "text"},
                                                    {NULL, NULL}};
static const struct oai_part_type result_parts[] = {{"input_text", "text"},
                                                    {"output_text", "text"},
                                                    {"text", "text"},
                                                    {"input_image", NULL},
                                                    OAI_PARTS_ELSE};
static const struct oai_part_type thought_parts[] = {
    {"reasoning_text", "text"}, {"text", "text"}, {NULL, NULL}};

static int add_message(struct oai_rewrite *w, const cJSON *item, const char *path) {
    static const char *const roles[] = {"user", "system", "developer"};
    const char *role, *text;
    char field[OAI_PATH];
    if (oai_rewrite_string(w, item, path, "role", &role)) return -1;
    bool assistant = strcmp(role, "assistant") == 0;
    oai_path(field, "%s.content", path);
    if (oai_rewrite_join(w, json_get(item, "content"), field,
                         assistant ? output_parts : input_parts, &text))
        return -1;
    if (assistant) return oai_rewrite_answer(w, text);
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strcmp(role, roles[i]) == 0) return oai_rewrite_message(w, role, text);
    oai_path(field, "%s.role", path);
    return oai_invalid(
        w->r, field, "expected 'user', 'assistant', 'system' or 'developer', found '%.32s'", role);
}

/* Adds a thought. Summaries and encrypted thoughts are skipped: the model did not write a summary,
 * and keepd cannot read an encrypted thought. */
static int add_thought(struct oai_rewrite *w, const cJSON *item, const char *path) {
    const cJSON *content = json_get(item, "content");
    const char *text;
    char field[OAI_PATH];
    oai_path(field, "%s.content", path);
    if (!content || (cJSON_IsArray(content) && !content->child)) return 0;
    if (oai_rewrite_join(w, content, field, thought_parts, &text)) return -1;
    return oai_rewrite_thought(w, text);
}

static int read_call_id(struct oai_rewrite *w, const cJSON *item, const char *path,
                        const char **id) {
    char field[OAI_PATH];
    if (oai_rewrite_string(w, item, path, "call_id", id)) return -1;
    if (strlen(*id) <= OAI_ID_BYTES) return 0;
    oai_path(field, "%s.call_id", path);
    return oai_invalid(w->r, field, "expected at most %d bytes, found %zu", OAI_ID_BYTES,
                       strlen(*id));
}

/* Reads the name by which the model knows a call's tool. */
static int read_call_name(struct oai_rewrite *w, const cJSON *item, const char *path,
                          const char **name) {
    const char *space = NULL;
    if (oai_rewrite_string(w, item, path, "name", name) ||
        (json_get(item, "namespace") && oai_rewrite_string(w, item, path, "namespace", &space)))
        return -1;
    *name = oai_rewrite_name(w, space, *name);
    return 0;
}

/* Adds a call. Arguments may be missing, as in those of some agents for tools without any. */
static int add_call(struct oai_rewrite *w, const cJSON *item, const char *path) {
    const cJSON *arguments = json_get(item, "arguments");
    const char *id, *name;
    char field[OAI_PATH];
    if (read_call_id(w, item, path, &id) || read_call_name(w, item, path, &name)) return -1;
    oai_path(field, "%s.arguments", path);
    if (arguments && !cJSON_IsString(arguments))
        return oai_expected(w->r->error, field, "a string", arguments);
    return oai_rewrite_call(w, id, name, arguments);
}

/* Adds a call of a custom tool, in the form in which the model wrote it. */
static int add_custom_call(struct oai_rewrite *w, const cJSON *item, const char *path) {
    const char *id, *name, *input;
    if (read_call_id(w, item, path, &id) || read_call_name(w, item, path, &name) ||
        oai_rewrite_string(w, item, path, "input", &input))
        return -1;
    cJSON *arguments = cJSON_CreateObject();
    bool put = arguments && cJSON_AddStringToObject(arguments, OAI_CUSTOM_INPUT, input);
    int rc = put ? oai_rewrite_call(w, id, name, arguments) : oai_no_memory(w->r);
    cJSON_Delete(arguments);
    return rc;
}

static int add_output(struct oai_rewrite *w, const cJSON *item, const char *path) {
    const char *id, *text;
    char field[OAI_PATH];
    oai_path(field, "%s.output", path);
    if (read_call_id(w, item, path, &id) ||
        oai_rewrite_join(w, json_get(item, "output"), field, result_parts, &text))
        return -1;
    return oai_rewrite_result(w, id, text);
}

static int add_item(struct oai_rewrite *w, const cJSON *item, const char *path) {
    static const struct {
        const char *type;
        int (*add)(struct oai_rewrite *w, const cJSON *item, const char *path);
    } types[] = {
        {"message", add_message},
        {"reasoning", add_thought},
        {"function_call", add_call},
        {"function_call_output", add_output},
        {"custom_tool_call", add_custom_call},
        {"custom_tool_call_output", add_output},
    };
    const char *type = "message";
    char field[OAI_PATH];
    if (!cJSON_IsObject(item)) return oai_expected(w->r->error, path, "an object", item);
    if (json_get(item, "type") && oai_rewrite_string(w, item, path, "type", &type)) return -1;
    if (oai_item_is_foreign(item)) return 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(type, types[i].type) == 0) return types[i].add(w, item, path);
    oai_path(field, "%s.type", path);
    return oai_rewrite_refuse(w, field,
                              "only items of type 'message', 'reasoning', 'function_call', "
                              "'custom_tool_call', their outputs and 'item_reference' are served, "
                              "found '%.32s'",
                              type);
}

static int add_items(struct oai_rewrite *w, const cJSON *items, const char *field) {
    const cJSON *item;
    char path[OAI_PATH];
    int i = 0;
    cJSON_ArrayForEach(item, items) {
        oai_path(path, "%s[%d]", field, i++);
        if (add_item(w, item, path)) return -1;
    }
    return 0;
}

/* --- the response that is continued --- */

/* The items of the chat, in the form that a stored response keeps. */
struct items {
    struct buf text;
    int count;
};

/* Parses stored items (stored.h). */
static int parse_stored(struct oai_rewrite *w, const struct buf *text, cJSON **tree) {
    const struct json_limits limits = {
        .bytes = text->size, .depth = OAI_JSON_DEPTH, .nuls = true, .nodes = OAI_JSON_VALUES};
    struct fault fault;
    int rc = json_parse(text->data, text->size, &limits, tree, &fault);
    if (rc == ERR_LIMIT)
        return oai_invalid(w->r, "previous_response_id",
                           "the stored response is beyond a limit of this server: %s", fault.text);
    return rc ? oai_refuse_fault(w->r->error, &fault) : 0;
}

static int continue_stored(struct oai_rewrite *w, const struct buf *before, struct items *items) {
    cJSON *list = NULL;
    if (before->failed) return oai_no_memory(w->r);
    if (parse_stored(w, before, &list)) return -1;
    int rc = add_items(w, list, "previous_response_id");
    if (!rc) oai_store_items(&items->text, list, &items->count);
    json_free(list);
    return rc;
}

static int keep_earlier(struct oai_rewrite *w, const struct buf *tokens) {
    struct oai_request *out = w->r->out;
    size_t count = tokens->size / sizeof(int32_t);
    int32_t *ids = arena_alloc(w->r->arena, count + 1, sizeof *ids);
    if (tokens->failed || !ids) return oai_no_memory(w->r);
    if (count) memcpy(ids, tokens->data, tokens->size);
    out->earlier = ids;
    out->earlier_count = count;
    return 0;
}

/* Reads previous_response_id; errors use OpenAI's words. */
static int read_previous(struct oai_rewrite *w, struct items *items) {
    const struct oai_rules *rules = w->r->rules;
    const char *id = NULL;
    struct buf before, tokens;
    int rc = ERR_NOTFOUND;
    if (oai_get_str(w->r, NULL, w->body, "previous_response_id", &id)) return -1;
    if (!id) return 0;
    buf_open(&before, ITEMS_BYTES_MAX);
    buf_open(&tokens, ITEMS_BYTES_MAX);
    buf_char(&before, '[');
    if (rules->records)
        rc = oai_records_find(rules->records, &w->r->out->owner, id,
                              (struct oai_record_parts){
                                  .items = &before, .tokens = &tokens, .model = rules->names[0]});
    buf_char(&before, ']');
    if (rc == ERR_NOTFOUND)
        rc = oai_refuse(w->r->error, 400, "previous_response_not_found", "previous_response_id",
                        "Previous response with id '%.64s' not found.", id);
    else
        rc = continue_stored(w, &before, items) || keep_earlier(w, &tokens) ? -1 : 0;
    buf_close(&before);
    buf_close(&tokens);
    return rc;
}

/* --- input --- */

static int read_instructions(struct oai_rewrite *w) {
    const char *text = NULL;
    if (oai_get_str(w->r, NULL, w->body, "instructions", &text)) return -1;
    return text ? oai_rewrite_message(w, "system", text) : 0;
}

static int add_text(struct oai_rewrite *w, const char *text, struct items *items) {
    struct buf *out = &items->text;
    buf_fmt(out,
            "%s{\"id\":\"item_%d\",\"type\":\"message\",\"status\":\"completed\","
            "\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":",
            out->size ? "," : "", items->count++);
    json_write_node(out, json_get(w->body, "input"));
    buf_str(out, "}]}");
    return oai_rewrite_message(w, "user", text);
}

static bool is_reference(const cJSON *item) {
    const cJSON *type = json_get(item, "type");
    if (!type) return json_get(item, "id") && !json_get(item, "role");
    return cJSON_IsString(type) && strcmp(type->valuestring, "item_reference") == 0;
}

/* Finds a stored item and parses it into `tree`. */
static int find_item(struct oai_rewrite *w, const cJSON *item, const char *path, size_t *effort,
                     cJSON **tree) {
    const struct oai_rules *rules = w->r->rules;
    char field[OAI_PATH];
    struct buf text;
    const char *id;
    int rc = ERR_NOTFOUND;
    oai_path(field, "%s.id", path);
    if (oai_rewrite_string(w, item, path, "id", &id)) return -1;
    buf_open(&text, ITEMS_BYTES_MAX);
    if (rules->records)
        rc = oai_records_find_item(rules->records, &w->r->out->owner, id, effort, &text);
    if (rc == ERR_LIMIT)
        rc = oai_invalid(w->r, field, "too many references: send the items themselves");
    else if (rc == ERR_NOTFOUND)
        rc = oai_refuse(w->r->error, 404, "item_not_found", field,
                        "Item with id '%.64s' not found. Items are not persisted when `store` is "
                        "set to false.",
                        id);
    else
        rc = rc || text.failed ? oai_no_memory(w->r) : parse_stored(w, &text, tree);
    buf_close(&text);
    return rc;
}

/* Copies the list, with stored items in place of the references to them. */
static int resolve(struct oai_rewrite *w, const cJSON *input, cJSON *list) {
    size_t effort = REFERENCE_BYTES_MAX;
    char path[OAI_PATH];
    const cJSON *item;
    int i = 0;
    cJSON_ArrayForEach(item, input) {
        cJSON *tree = NULL;
        oai_path(path, "input[%d]", i++);
        if (!is_reference(item)) {
            if (!cJSON_AddItemReferenceToArray(list, (cJSON *)(uintptr_t)item))
                return oai_no_memory(w->r);
        } else if (find_item(w, item, path, &effort, &tree)) {
            return -1;
        } else if (!cJSON_AddItemToArray(list, tree)) {
            json_free(tree);
            return oai_no_memory(w->r);
        }
    }
    return 0;
}

static int add_list(struct oai_rewrite *w, const cJSON *input, struct items *items) {
    cJSON *list = cJSON_CreateArray();
    if (!list) return oai_no_memory(w->r);
    int rc = resolve(w, input, list) || add_items(w, list, "input") ? -1 : 0;
    if (!rc) oai_store_items(&items->text, list, &items->count);
    cJSON_Delete(list);
    return rc;
}

static int read_input(struct oai_rewrite *w, struct items *items) {
    const cJSON *input = json_get(w->body, "input");
    if (!input && items->count) return 0;
    if (!input) return oai_missing_here(w->r, "input");
    if (cJSON_IsString(input)) return add_text(w, input->valuestring, items);
    if (!cJSON_IsArray(input))
        return oai_expected(w->r->error, "input", "a string or an array of items", input);
    if (cJSON_GetArraySize(input) > OAI_MESSAGES_MAX)
        return oai_invalid(w->r, "input", "expected at most %d items, found %d", OAI_MESSAGES_MAX,
                           cJSON_GetArraySize(input));
    if (add_list(w, input, items)) return -1;
    return items->count ? 0 : oai_invalid(w->r, "input", "expected at least one item");
}

/* Reads messages, and the items to be stored. */
static int read_items(struct oai_rewrite *w) {
    struct items items = {.count = 0};
    bool store = true;
    if (oai_get_bool(w->r, NULL, w->body, "store", &store)) return -1;
    buf_open(&items.text, ITEMS_BYTES_MAX);
    int rc = read_instructions(w) || read_previous(w, &items) || read_input(w, &items) ? -1 : 0;
    if (!rc && items.text.failed) rc = oai_no_memory(w->r);
    if (!rc && store && w->r->rules->records) {
        w->r->out->own_items = arena_strndup(w->r->arena, items.text.data, items.text.size);
        if (!w->r->out->own_items) rc = oai_no_memory(w->r);
    }
    buf_close(&items.text);
    return rc;
}

/* --- tools --- */

static int add_function(struct oai_rewrite *w, const cJSON *tool, const char *space,
                        const char *path) {
    static const char *const members[] = {"description", "parameters", "strict"};
    struct oai_tool_origin origin = {.space = space};
    cJSON *function;
    if (oai_rewrite_string(w, tool, path, "name", &origin.name) ||
        oai_rewrite_tool(w, &origin, path, &function))
        return -1;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        if (oai_rewrite_member(w, function, members[i], tool, members[i])) return -1;
    return 0;
}

/* Adds a custom tool's grammar to its description, because no schema expresses it. */
static int put_description(struct oai_rewrite *w, cJSON *function, const cJSON *tool,
                           const char *path, const char *grammar) {
    const char *text = "";
    char field[OAI_PATH];
    struct buf out;
    oai_path(field, "%s.description", path);
    if (json_get(tool, "description") && oai_rewrite_string(w, tool, path, "description", &text))
        return -1;
    buf_open(&out, w->r->rules->body_bytes);
    buf_str(&out, text);
    if (grammar) buf_fmt(&out, "%sThe input must match this grammar:\n", text[0] ? "\n\n" : "");
    if (grammar) buf_str(&out, grammar);
    bool put =
        !out.failed && cJSON_AddStringToObject(function, "description", out.data ? out.data : "");
    buf_close(&out);
    return put ? 0 : oai_no_memory(w->r);
}

/* Gives a custom tool the parameters {"input": a string}. A regular expression binds the string. */
static int put_input(struct oai_rewrite *w, cJSON *function, const char *regex) {
    static const char *const input[] = {OAI_CUSTOM_INPUT};
    cJSON *schema = cJSON_AddObjectToObject(function, "parameters");
    cJSON *members = schema && cJSON_AddStringToObject(schema, "type", "object")
                         ? cJSON_AddObjectToObject(schema, "properties")
                         : NULL;
    cJSON *member = members ? cJSON_AddObjectToObject(members, input[0]) : NULL;
    cJSON *required = cJSON_CreateStringArray(input, 1);
    if (!member || !required || !cJSON_AddItemToObject(schema, "required", required)) {
        cJSON_Delete(required);
        return oai_no_memory(w->r);
    }
    bool put = cJSON_AddStringToObject(member, "type", "string") &&
               cJSON_AddFalseToObject(schema, "additionalProperties");
    if (put && regex) {
        size_t size = strlen(regex) + sizeof "^(?:)$";
        char *whole = arena_alloc(w->r->arena, size, 1);
        if (whole) snprintf(whole, size, "^(?:%s)$", regex);
        put = whole && cJSON_AddStringToObject(member, "pattern", whole) &&
              cJSON_AddTrueToObject(function, "strict");
    }
    return put ? 0 : oai_no_memory(w->r);
}

/* Reads {"type": "text"} or {"type": "grammar", "syntax": "lark" or "regex", "definition"}. */
static int read_custom_format(struct oai_rewrite *w, const cJSON *tool, const char *path,
                              const char **grammar, const char **regex) {
    const cJSON *format = json_get(tool, "format");
    const char *type = "text", *syntax, *definition;
    char field[OAI_PATH], part[OAI_PATH];
    oai_path(field, "%s.format", path);
    if (!format) return 0;
    if (!cJSON_IsObject(format)) return oai_expected(w->r->error, field, "an object", format);
    if (oai_rewrite_string(w, format, field, "type", &type)) return -1;
    if (strcmp(type, "text") == 0) return 0;
    oai_path(part, "%s.type", field);
    if (strcmp(type, "grammar") != 0)
        return oai_invalid(w->r, part, "expected 'text' or 'grammar', found '%.32s'", type);
    if (oai_rewrite_string(w, format, field, "syntax", &syntax) ||
        oai_rewrite_string(w, format, field, "definition", &definition))
        return -1;
    oai_path(part, "%s.syntax", field);
    if (strcmp(syntax, "lark") != 0 && strcmp(syntax, "regex") != 0)
        return oai_invalid(w->r, part, "expected 'lark' or 'regex', found '%.32s'", syntax);
    *grammar = definition;
    if (strcmp(syntax, "regex") == 0) *regex = definition;
    return 0;
}

/* Adds a custom tool: the model sees a function whose only argument is the text. */
static int add_custom(struct oai_rewrite *w, const cJSON *tool, const char *space,
                      const char *path) {
    struct oai_tool_origin origin = {.space = space, .is_text = true};
    const char *grammar = NULL, *regex = NULL;
    cJSON *function;
    return oai_rewrite_string(w, tool, path, "name", &origin.name) ||
                   read_custom_format(w, tool, path, &grammar, &regex) ||
                   oai_rewrite_tool(w, &origin, path, &function) ||
                   put_description(w, function, tool, path, grammar) ||
                   put_input(w, function, regex)
               ? -1
               : 0;
}

/* Adds a tool that the client runs. Those that OpenAI's servers run, or whose form only its models
 * know, are left out. */
static int add_own_tool(struct oai_rewrite *w, const cJSON *tool, const char *space,
                        const char *path) {
    const char *type;
    if (oai_rewrite_string(w, tool, path, "type", &type)) return -1;
    if (strcmp(type, "function") == 0) return add_function(w, tool, space, path);
    if (strcmp(type, "custom") == 0) return add_custom(w, tool, space, path);
    oai_rewrite_leave_out(type);
    return 0;
}

static int add_tool(struct oai_rewrite *w, const cJSON *tool, const char *path) {
    const cJSON *tools = json_get(tool, "tools"), *inner;
    const char *type, *space;
    char field[OAI_PATH];
    int i = 0;
    if (oai_rewrite_string(w, tool, path, "type", &type)) return -1;
    if (strcmp(type, "namespace") != 0) return add_own_tool(w, tool, NULL, path);
    if (oai_rewrite_string(w, tool, path, "name", &space)) return -1;
    oai_path(field, "%s.tools", path);
    if (!cJSON_IsArray(tools))
        return tools ? oai_expected(w->r->error, field, "an array", tools)
                     : oai_missing(w->r, field);
    cJSON_ArrayForEach(inner, tools) {
        oai_path(field, "%s.tools[%d]", path, i++);
        if (!cJSON_IsObject(inner)) return oai_expected(w->r->error, field, "an object", inner);
        if (add_own_tool(w, inner, space, field)) return -1;
    }
    return 0;
}

/* Reads tool_choice: a word, or {"type": "function" or "custom", "name": ...}. */
static int read_choice(struct oai_rewrite *w) {
    const cJSON *choice = json_get(w->body, "tool_choice");
    const char *type, *name, *space = NULL;
    if (!cJSON_IsObject(choice)) return oai_rewrite_link(w, "tool_choice", choice);
    if (oai_rewrite_string(w, choice, "tool_choice", "type", &type)) return -1;
    if (strcmp(type, "function") != 0 && strcmp(type, "custom") != 0)
        return oai_rewrite_refuse(w, "tool_choice.type",
                                  "only 'function' and 'custom' are served, found '%.32s'", type);
    if (oai_rewrite_string(w, choice, "tool_choice", "name", &name) ||
        (json_get(choice, "namespace") &&
         oai_rewrite_string(w, choice, "tool_choice", "namespace", &space)))
        return -1;
    cJSON *copy = cJSON_CreateObject();
    if (oai_rewrite_put(w, "tool_choice", copy)) return -1;
    cJSON *function = cJSON_AddStringToObject(copy, "type", "function")
                          ? cJSON_AddObjectToObject(copy, "function")
                          : NULL;
    bool put =
        function && cJSON_AddStringToObject(function, "name", oai_rewrite_name(w, space, name));
    return put ? 0 : oai_no_memory(w->r);
}

/* --- the shape of the answer --- */

/* Reads a format {"type": "json_schema", "name", "schema", "strict"}, whose members are those of a
 * chat's response_format.json_schema. */
static int read_format(struct oai_rewrite *w, const cJSON *format) {
    const cJSON *type = json_get(format, "type");
    bool schema = cJSON_IsString(type) && strcmp(type->valuestring, "json_schema") == 0;
    if (!schema) return oai_rewrite_link(w, "response_format", format);
    if (!json_get(format, "schema")) return oai_missing(w->r, "text.format.schema");
    return oai_rewrite_schema(w, format);
}

/* Reads `text`. No template knows its verbosity, so that has no effect. */
static int read_text(struct oai_rewrite *w) {
    const cJSON *text = json_get(w->body, "text"), *verbosity = json_get(text, "verbosity");
    if (!text) return 0;
    if (!cJSON_IsObject(text)) return oai_expected(w->r->error, "text", "an object", text);
    if (verbosity && !cJSON_IsString(verbosity))
        return oai_expected(w->r->error, "text.verbosity", "a string", verbosity);
    return read_format(w, json_get(text, "format"));
}

/* Reads `include`: log-probabilities. Encrypted reasoning, and parts of the results of tools that
 * keepd does not run, never exist. */
static int read_include(struct oai_rewrite *w) {
    static const char scores[] = "message.output_text.logprobs";
    const cJSON *list = json_get(w->body, "include"), *node;
    struct oai_request *out = w->r->out;
    char field[OAI_PATH];
    int32_t top = 0;
    int i = 0;
    if (oai_get_alternatives(w->r, w->body, "top_logprobs", &top)) return -1;
    if (list && !cJSON_IsArray(list)) return oai_expected(w->r->error, "include", "an array", list);
    cJSON_ArrayForEach(node, list) {
        oai_path(field, "include[%d]", i++);
        if (!cJSON_IsString(node)) return oai_expected(w->r->error, field, "a string", node);
        if (strcmp(node->valuestring, scores) == 0) out->logprobs = top;
    }
    if (top > 0 && out->logprobs < 0)
        return oai_invalid(w->r, "top_logprobs", "'include' must have '%s'", scores);
    return 0;
}

static int read_truncation(struct oai_rewrite *w) {
    const char *word = "disabled";
    if (oai_get_str(w->r, NULL, w->body, "truncation", &word)) return -1;
    if (strcmp(word, "disabled") == 0) return 0;
    if (strcmp(word, "auto") == 0)
        return oai_rewrite_put(w, "truncate_prompt_tokens", cJSON_CreateNumber(-1));
    return oai_invalid(w->r, "truncation", "expected 'auto' or 'disabled', found '%.32s'", word);
}

static int read_shape(struct oai_rewrite *w) {
    static const char *const same[] = {"chat_template_kwargs",
                                       "parallel_tool_calls",
                                       "reasoning",
                                       "reasoning_effort",
                                       "stop",
                                       "thinking"};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (oai_rewrite_link(w, same[i], json_get(w->body, same[i]))) return -1;
    if (oai_rewrite_link(w, "max_tokens", json_get(w->body, "max_output_tokens")) || read_text(w) ||
        read_include(w) || read_truncation(w))
        return -1;
    return 0;
}

/* --- members that the answer repeats --- */

static size_t count_characters(const char *text) {
    size_t count = 0;
    for (; *text; text++) count += ((unsigned char)*text & 0xC0) != 0x80;
    return count;
}

/* Writes a member of an object, or its default. */
static void repeat_inner(struct buf *out, const cJSON *object, const char *name,
                         const char *preset) {
    const cJSON *node = json_get(object, name);
    buf_fmt(out, "\"%s\":", name);
    if (node)
        json_write_node(out, node);
    else
        buf_str(out, preset);
}

static void repeat(struct buf *out, const cJSON *body, const char *name, const char *preset) {
    buf_char(out, ',');
    repeat_inner(out, body, name, preset);
}

static void repeat_number(struct buf *out, const cJSON *body, const char *name, float preset) {
    char text[32];
    snprintf(text, sizeof text, "%.7g", (double)preset);
    repeat(out, body, name, text);
}

/* Reads metadata, with OpenAI's limits: strings by names. */
static int read_metadata(struct oai_rewrite *w) {
    const cJSON *metadata = json_get(w->body, "metadata"), *pair;
    if (!metadata) return 0;
    if (!cJSON_IsObject(metadata))
        return oai_expected(w->r->error, "metadata", "an object", metadata);
    if (cJSON_GetArraySize(metadata) > OAI_METADATA_MAX)
        return oai_invalid(w->r, "metadata", "expected at most %d pairs, found %d",
                           OAI_METADATA_MAX, cJSON_GetArraySize(metadata));
    cJSON_ArrayForEach(pair, metadata) {
        char field[OAI_PATH];
        oai_path(field, "metadata.%.64s", pair->string);
        if (count_characters(pair->string) > OAI_METADATA_KEY)
            return oai_invalid(w->r, "metadata", "expected keys of at most %d characters",
                               OAI_METADATA_KEY);
        if (!cJSON_IsString(pair)) return oai_expected(w->r->error, field, "a string", pair);
        if (count_characters(pair->valuestring) > OAI_METADATA_VALUE)
            return oai_invalid(w->r, field, "expected at most %d characters", OAI_METADATA_VALUE);
    }
    return 0;
}

/* Checks the members that have no other bound, because the answer repeats them. */
static int check_repeated(struct oai_rewrite *w) {
    static const char *const ids[] = {"safety_identifier", "user", "prompt_cache_key"};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        const cJSON *id = json_get(w->body, ids[i]);
        bool ignored = cJSON_IsObject(id) && strcmp(ids[i], "user") == 0;
        if (ignored) continue;
        if (id && !cJSON_IsString(id)) return oai_expected(w->r->error, ids[i], "a string", id);
        if (id && strlen(id->valuestring) > OAI_ID_BYTES)
            return oai_invalid(w->r, ids[i], "expected at most %d bytes, found %zu", OAI_ID_BYTES,
                               strlen(id->valuestring));
    }
    return read_metadata(w);
}

static void write_repeated(struct buf *out, const struct oai_rewrite *w) {
    static const char *const as_given[][2] = {
        {"instructions", "null"},
        {"max_output_tokens", "null"},
        {"max_tool_calls", "null"},
        {"metadata", "{}"},
        {"parallel_tool_calls", "true"},
        {"previous_response_id", "null"},
        {"prompt_cache_key", "null"},
        {"safety_identifier", "null"},
        {"tool_choice", "\"auto\""},
        {"tools", "[]"},
        {"top_logprobs", "0"},
        {"truncation", "\"disabled\""},
        {"user", "null"},
    };
    const struct engine_request *s = &w->r->out->sampling;
    for (size_t i = 0; i < sizeof as_given / sizeof *as_given; i++)
        repeat(out, w->body, as_given[i][0], as_given[i][1]);
    buf_str(out, ",\"reasoning\":{");
    repeat_inner(out, json_get(w->body, "reasoning"), "effort", "null");
    buf_str(out, ",\"summary\":null},\"text\":{");
    repeat_inner(out, json_get(w->body, "text"), "format", "{\"type\":\"text\"}");
    repeat(out, json_get(w->body, "text"), "verbosity", "\"medium\"");
    buf_fmt(out, "},\"service_tier\":\"default\",\"store\":%s",
            w->r->out->own_items ? "true" : "false");
    repeat_number(out, w->body, "temperature", s->temperature);
    repeat_number(out, w->body, "top_p", s->top_p);
}

static int keep_repeated(struct oai_rewrite *w) {
    struct buf out;
    buf_open(&out, ITEMS_BYTES_MAX);
    write_repeated(&out, w);
    if (!out.failed) w->r->out->repeated = arena_strndup(w->r->arena, out.data, out.size);
    buf_close(&out);
    return w->r->out->repeated ? 0 : oai_no_memory(w->r);
}

/* --- whole requests --- */

static int read_owner(struct oai_rewrite *w) {
    const char *salt = "";
    if (oai_get_str(w->r, NULL, w->body, "cache_salt", &salt)) return -1;
    w->r->out->owner.salt = arena_strndup(w->r->arena, salt, strlen(salt));
    return w->r->out->owner.salt ? 0 : oai_no_memory(w->r);
}

/* Reads `background`. The client asks for the response later, so it must be stored. */
static int read_background(struct oai_rewrite *w) {
    struct oai_request *out = w->r->out;
    if (oai_get_bool(w->r, NULL, w->body, "background", &out->background)) return -1;
    if (!out->background) return 0;
    if (!out->own_items)
        return oai_invalid(w->r, "background",
                           "background can only be used when `store` is true and the server "
                           "stores responses");
    if (out->stream && (out->include_progress || out->sampling.kv.live))
        return oai_rewrite_refuse(w, "background",
                                  "its stream has no events about progress or the cache, which "
                                  "would differ when it is read again");
    return 0;
}

/* Reads what makes the prompt. */
static int read_prompt_of(struct oai_rewrite *w, struct oai_reader *r) {
    if (oai_rewrite_open(w, r) || read_owner(w) || check_repeated(w) ||
        oai_rewrite_tools(w, add_tool) || read_items(w) || read_choice(w) || read_shape(w) ||
        oai_read_messages(r))
        return -1;
    r->out->prompt_field = "input";
    return 0;
}

static int parse(struct oai_reader *r) {
    struct oai_rewrite w;
    if (read_prompt_of(&w, r)) return -1;
    r->out->split_reasoning = true;
    if (oai_read_tools(r) || oai_read_generation(r) || read_background(&w)) return -1;
    return keep_repeated(&w);
}

static int parse_input_count(struct oai_reader *r) {
    struct oai_rewrite w;
    return read_prompt_of(&w, r);
}

static void answer_input_count(struct buf *out, const struct oai_rules *rules,
                               const struct oai_request *request, const struct engine_ids *ids) {
    (void)rules, (void)request;
    buf_fmt(out, "{\"object\":\"response.input_tokens\",\"input_tokens\":%zu}", ids->count);
}

const struct oai_kind oai_responses = {
    .path = "/v1/responses",
    .schema = "ResponseRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION,
    .fields = fields,
    .parse = parse,
    .form = &oai_response_form,
    .aliases = aliases,
};

const struct oai_kind oai_response_count = {
    .path = "/v1/responses/input_tokens",
    .schema = "ResponseRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_GENERATION,
    .fields = fields,
    .parse = parse_input_count,
    .answer = answer_input_count,
    .aliases = aliases,
};
