/* Turns chat messages as OpenAI's clients send them into the form that chat templates expect:
 * content is one string, and arguments of tool calls are objects. */
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"
#include "server/oai/tool_json.h"

static int no_memory(struct oai_error *error) {
    struct fault fault;
    fault_set(&fault, ERR_NOMEM, NULL, "the messages need too much memory");
    return oai_refuse_fault(error, &fault);
}

/* Adds a member and takes over `item`, also on failure. */
static int put(cJSON *object, const char *key, cJSON *item, struct oai_error *error) {
    if (item && cJSON_AddItemToObject(object, key, item)) return 0;
    cJSON_Delete(item);
    return no_memory(error);
}

static int put_copy(cJSON *object, const cJSON *member, struct oai_error *error) {
    return put(object, member->string, cJSON_Duplicate(member, true), error);
}

/* --- content --- */

/* Returns the text of one part that is no picture, or NULL with *error. `result`: of a tool's
 * result parts that are not text are left out, because the client could not take the result back
 * and the dialogue would end. */
static const char *part_text(const cJSON *part, bool result, const char *path,
                             struct oai_error *error) {
    char field[OAI_PATH];
    const cJSON *type = json_get(part, "type"), *text = json_get(part, "text");
    if (!cJSON_IsObject(part)) {
        oai_expected(error, path, "an object", part);
        return NULL;
    }
    oai_path(field, "%s.type", path);
    if (!cJSON_IsString(type)) {
        oai_expected(error, field, "a string", type);
        return NULL;
    }
    if (strcmp(type->valuestring, "text") != 0 && result) return oai_left_out(type->valuestring);
    if (strcmp(type->valuestring, "text") != 0) {
        oai_refuse(error, 400, "unsupported_parameter", field,
                   "Unsupported value for '%s': %sonly parts of type 'text' are served, found "
                   "'%.32s'.",
                   field, strstr(type->valuestring, "image") ? "this model sees no pictures; " : "",
                   type->valuestring);
        return NULL;
    }
    if (cJSON_IsString(text)) return text->valuestring;
    oai_path(field, "%s.text", path);
    oai_expected(error, field, "a string", text);
    return NULL;
}

/* A content being joined: texts that stand one behind the other by line breaks, as other servers
 * do. The places of pictures are those in the text so far. */
struct content {
    struct buf text;
    cJSON *places; /* an array; NULL: no picture yet */
    bool after_text;
};

static int add_picture_place(struct oai_reader *r, struct content *content, const cJSON *part,
                             const char *path) {
    if (oai_add_picture(r, part, path)) return -1;
    if (!content->places) content->places = cJSON_CreateArray();
    cJSON *place = content->places ? cJSON_CreateNumber((double)content->text.size) : NULL;
    if (!place || !cJSON_AddItemToArray(content->places, place)) {
        cJSON_Delete(place);
        return no_memory(r->error);
    }
    content->after_text = false;
    return 0;
}

static int join_parts(struct oai_reader *r, const cJSON *parts, const cJSON *message,
                      const char *path, struct content *content) {
    const bool result = oai_has_role(message, "tool");
    const bool shows = result || oai_has_role(message, "user");
    char field[OAI_PATH], type[OAI_PATH];
    const cJSON *part;
    int i = 0;
    cJSON_ArrayForEach(part, parts) {
        oai_path(field, "%s[%d]", path, i++);
        if (shows && oai_is_picture(r, part)) {
            if (add_picture_place(r, content, part, field)) return -1;
            continue;
        }
        oai_path(type, "%s.type", field);
        if (oai_is_picture(r, part))
            return oai_refuse(r->error, 400, "unsupported_parameter", type,
                              "Unsupported value for '%s': pictures are the user's or a tool's. "
                              "Send this one in a message of the user.",
                              type);
        const char *text = part_text(part, result, field, r->error);
        if (!text) return -1;
        if (content->after_text) buf_char(&content->text, '\n');
        buf_str(&content->text, text);
        content->after_text = true;
    }
    return content->text.failed ? no_memory(r->error) : 0;
}

/* Puts the content into the message. A text that is put in front of it later moves no picture,
 * because the places are counted from the end. */
static int put_joined(cJSON *copy, struct content *content, struct oai_error *error) {
    cJSON *place;
    cJSON_ArrayForEach(place, content->places)
        cJSON_SetNumberValue(place, (double)content->text.size - place->valuedouble);
    const char *text = content->text.data ? content->text.data : "";
    if (put(copy, "content", cJSON_CreateString(text), error)) return -1;
    if (!content->places) return 0;
    cJSON *places = content->places;
    content->places = NULL;
    return put(copy, ENGINE_CHAT_PICTURE_ENDS, places, error);
}

/* Returns the content for a message of the assistant or of a tool that has none. keepd's own
 * answers have a content of null beside calls, and beside a thought that was cut. A refusal is text
 * of the model, so it becomes the content. */
static const char *content_instead(const cJSON *message) {
    static const char *const others[] = {"tool_calls", "function_call", "reasoning_content",
                                         "reasoning", "thinking"};
    const cJSON *refusal = json_get(message, "refusal");
    bool assistant = oai_has_role(message, "assistant");
    if (!assistant && !oai_has_role(message, "tool")) return NULL;
    if (cJSON_IsString(refusal)) return refusal->valuestring;
    if (cJSON_GetObjectItemCaseSensitive(message, "content")) return ""; /* present, but null */
    for (size_t i = 0; assistant && i < sizeof others / sizeof *others; i++)
        if (json_get(message, others[i])) return "";
    return NULL;
}

static int put_content(struct oai_reader *r, cJSON *copy, const cJSON *message, const char *path) {
    struct oai_error *error = r->error;
    char field[OAI_PATH];
    const cJSON *content = json_get(message, "content");
    const char *instead = content ? NULL : content_instead(message);
    struct content joined = {.places = NULL};
    oai_path(field, "%s.content", path);
    if (cJSON_IsString(content))
        return put(copy, "content", cJSON_CreateString(content->valuestring), error);
    if (instead) return put(copy, "content", cJSON_CreateString(instead), error);
    if (!content)
        return oai_refuse(error, 400, "missing_required_parameter", field,
                          "Missing required parameter: '%s'.", field);
    if (!cJSON_IsArray(content))
        return oai_expected(error, field, "a string or an array of parts", content);
    buf_open(&joined.text, OAI_CONTENT_BYTES_MAX);
    int rc = join_parts(r, content, message, field, &joined);
    if (!rc) rc = put_joined(copy, &joined, error);
    cJSON_Delete(joined.places);
    buf_close(&joined.text);
    return rc;
}

/* --- tool calls --- */

/* Reads arguments as an object. *tree is NULL if they are not one. */
static int read_arguments(const char *text, size_t size, cJSON **tree, struct oai_error *error) {
    /* The model may have written members with equal names, and templates show what it wrote. */
    struct json_limits limits = {
        .bytes = OAI_CONTENT_BYTES_MAX, .depth = OAI_JSON_DEPTH, .nuls = true, .nodes = 100000};
    *tree = NULL;
    int rc = json_parse(text, size, &limits, tree, NULL);
    if (rc == ERR_NOMEM) return no_memory(error);
    if (rc) *tree = NULL;
    if (cJSON_IsObject(*tree)) return 0;
    json_free(*tree);
    *tree = NULL;
    return 0;
}

/* Reads arguments that were cut, such as {"city": "Par, and closes what is open in them. */
static int read_cut_arguments(const char *text, cJSON **tree, struct oai_error *error) {
    struct buf whole;
    int rc = 0;
    *tree = NULL;
    buf_open(&whole, OAI_CONTENT_BYTES_MAX);
    if (tool_json_close(text, strlen(text), &whole) && !whole.failed)
        rc = read_arguments(whole.data, whole.size, tree, error);
    if (whole.failed) rc = no_memory(error);
    buf_close(&whole);
    return rc;
}

/* Returns whether there are no arguments: none, null, or an empty text. */
static bool are_none(const cJSON *arguments) {
    static const char blank[] = " \t\r\n";
    if (!cJSON_IsString(arguments)) return !arguments;
    const char *text = arguments->valuestring + strspn(arguments->valuestring, blank);
    size_t size = strlen(text);
    while (size && strchr(blank, text[size - 1])) size--;
    return size == 0 || (size == 4 && memcmp(text, "null", 4) == 0);
}

/* Parses arguments: "{\"a\":1}" -> {"a":1}. Templates print them by `tojson` or member by member,
 * so they get an object whatever a model wrote. Missing arguments become {}; arguments that were
 * cut are closed; any other text becomes the one member of Anthropic's form of invalid arguments.
 */
static int open_arguments(cJSON *function, struct oai_error *error) {
    const cJSON *arguments = json_get(function, "arguments");
    cJSON *tree = NULL;
    if (cJSON_IsObject(arguments)) return 0;
    if (are_none(arguments)) {
        tree = cJSON_CreateObject();
    } else {
        const char *text = arguments->valuestring;
        if (read_arguments(text, strlen(text), &tree, error)) return -1;
        if (!tree && read_cut_arguments(text, &tree, error)) return -1;
        if (!tree && (tree = cJSON_CreateObject()) != NULL &&
            !cJSON_AddStringToObject(tree, "INVALID_JSON", text)) {
            cJSON_Delete(tree);
            tree = NULL;
        }
    }
    if (tree && cJSON_GetObjectItemCaseSensitive(function, "arguments")
            ? cJSON_ReplaceItemInObjectCaseSensitive(function, "arguments", tree)
            : tree && cJSON_AddItemToObject(function, "arguments", tree))
        return 0;
    json_free(tree);
    return no_memory(error);
}

static int check_call(const cJSON *function, const char *path, struct oai_error *error) {
    const cJSON *name = json_get(function, "name"), *arguments = json_get(function, "arguments");
    char field[OAI_PATH];
    if (!cJSON_IsObject(function)) return oai_expected(error, path, "an object", function);
    oai_path(field, "%s.name", path);
    if (!cJSON_IsString(name)) return oai_expected(error, field, "a string", name);
    oai_path(field, "%s.arguments", path);
    if (!arguments || cJSON_IsString(arguments) || cJSON_IsObject(arguments)) return 0;
    return oai_expected(error, field, "a string or an object", arguments);
}

static int put_tool_calls(cJSON *copy, const cJSON *calls, const char *path,
                          struct oai_error *error) {
    char field[OAI_PATH];
    cJSON *call;
    oai_path(field, "%s.tool_calls", path);
    if (!cJSON_IsArray(calls)) return oai_expected(error, field, "an array", calls);
    if (put_copy(copy, calls, error)) return -1;
    cJSON *own = cJSON_GetObjectItemCaseSensitive(copy, "tool_calls");
    int i = 0;
    cJSON_ArrayForEach(call, own) {
        cJSON *function = cJSON_GetObjectItemCaseSensitive(call, "function");
        oai_path(field, "%s.tool_calls[%d].function", path, i++);
        if (check_call(function, field, error)) return -1;
        if (open_arguments(function, error)) return -1;
    }
    return 0;
}

/* --- messages --- */

/* Copies the role. Every template shows OpenAI's roles. Others are the template's own, such as
 * `document` or `critic`; whether it has them shows when it renders the chat. */
static int put_role(cJSON *copy, const cJSON *message, const char *path, struct oai_error *error) {
    const cJSON *role = json_get(message, "role");
    char field[OAI_PATH];
    oai_path(field, "%s.role", path);
    if (!role)
        return oai_refuse(error, 400, "missing_required_parameter", field,
                          "Missing required parameter: '%s'.", field);
    if (!cJSON_IsString(role)) return oai_expected(error, field, "a string", role);
    const char *name = role->valuestring;
    size_t size = strlen(name);
    if (size == 0 || size > OAI_ROLE_MAX)
        return oai_refuse(error, 400, "invalid_value", field,
                          "Invalid value for '%s': expected 1 to %d bytes, found %zu.", field,
                          OAI_ROLE_MAX, size);
    /* "developer" is OpenAI's newer name for "system"; templates know the older one. */
    if (strcmp(name, "developer") == 0) name = "system";
    return put(copy, "role", cJSON_CreateString(name), error);
}

/* Copies the thought. Most templates read it from the first of these members, that of gpt-oss from
 * the second. A client sends back the member from which it read the thought. The template of
 * gpt-oss refuses a thought beside text and calls, so such a message gets no second name. */
static int put_reasoning(cJSON *copy, const cJSON *message, struct oai_error *error) {
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    const cJSON *text = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !cJSON_IsString(text); i++)
        text = json_get(message, names[i]);
    if (!cJSON_IsString(text)) return 0;
    bool speaks = json_get(copy, "tool_calls") && json_get(copy, "content")->valuestring[0];
    for (size_t i = 0; i < (speaks ? 1 : 2); i++)
        if (!json_get(copy, names[i]) &&
            put(copy, names[i], cJSON_CreateString(text->valuestring), error))
            return -1;
    return 0;
}

static int fill_message(struct oai_reader *r, cJSON *copy, const cJSON *message, const char *path) {
    struct oai_error *error = r->error;
    const cJSON *member;
    const cJSON *answers = json_get(message, "tool_call_id");
    char field[OAI_PATH];
    oai_path(field, "%s.tool_call_id", path);
    if (answers && !cJSON_IsString(answers)) return oai_expected(error, field, "a string", answers);
    if (put_role(copy, message, path, error) || put_content(r, copy, message, path)) return -1;
    cJSON_ArrayForEach(member, message) {
        const char *key = member->string;
        if (cJSON_IsNull(member) || !strcmp(key, "role") || !strcmp(key, "content") ||
            (!strcmp(key, ENGINE_CHAT_PICTURE_ENDS) && r->body != r->out->chat))
            continue; /* the places are the server's own word */
        if (!strcmp(key, "tool_calls") ? put_tool_calls(copy, member, path, error)
                                       : put_copy(copy, member, error))
            return -1;
    }
    return put_reasoning(copy, message, error);
}

static int put_messages(struct oai_reader *r, cJSON *context, const cJSON *messages) {
    struct oai_error *error = r->error;
    cJSON *list = cJSON_CreateArray();
    const cJSON *message;
    char path[OAI_PATH];
    int i = 0;
    if (put(context, "messages", list, error)) return -1;
    cJSON_ArrayForEach(message, messages) {
        oai_path(path, "messages[%d]", i++);
        if (!cJSON_IsObject(message)) return oai_expected(error, path, "an object", message);
        cJSON *copy = cJSON_CreateObject();
        if (!copy || !cJSON_AddItemToArray(list, copy)) {
            cJSON_Delete(copy);
            return no_memory(error);
        }
        if (fill_message(r, copy, message, path)) return -1;
    }
    return 0;
}

/* --- the rest of the context --- */

/* Copies the tools. Deferred ones are shown where a message refers to them (anthropic.c). */
static int put_tools(cJSON *context, const cJSON *body, struct oai_error *error) {
    const cJSON *tools = json_get(body, "tools"), *tool;
    if (!tools) return 0;
    if (oai_check_tools(tools, error)) return -1;
    cJSON *list = cJSON_CreateArray();
    bool failed = !list;
    cJSON_ArrayForEach(tool, tools) {
        if (failed || cJSON_IsTrue(json_get(tool, OAI_DEFERRED))) continue;
        cJSON *copy = cJSON_Duplicate(tool, true);
        failed = !copy || !cJSON_AddItemToArray(list, copy);
        if (failed) cJSON_Delete(copy);
    }
    if (!failed && list->child) return put(context, "tools", list, error);
    cJSON_Delete(list);
    return failed ? no_memory(error) : 0;
}

/* Returns whether the server or the model sets this name, so that a request must not. */
static bool is_reserved(const char *name) {
    static const char *const names[] = {"messages",
                                        "tools",
                                        "bos_token",
                                        "eos_token",
                                        "add_generation_prompt",
                                        "continue_final_message",
                                        ENGINE_CHAT_LATER};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

static int put_kwargs(cJSON *context, const cJSON *body, struct oai_error *error) {
    const cJSON *kwargs = json_get(body, "chat_template_kwargs"), *member;
    char path[OAI_PATH];
    if (!kwargs) return 0;
    if (!cJSON_IsObject(kwargs))
        return oai_expected(error, "chat_template_kwargs", "an object", kwargs);
    cJSON_ArrayForEach(member, kwargs) {
        oai_path(path, "chat_template_kwargs.%.64s", member->string);
        if (is_reserved(member->string))
            return oai_refuse(error, 400, "invalid_value", path,
                              "Invalid value for '%s': the name is reserved.", path);
        if (put_copy(context, member, error)) return -1;
    }
    return 0;
}

/* --- whether the model thinks --- */

/* The request's wishes for the model's thoughts. */
struct thought_wish {
    const char *effort; /* NULL: it says nothing */
    bool said, on;      /* said: it says whether the model thinks; on: the model does */
};

/* Reads reasoning_effort, reasoning.effort and thinking.type, whichever API they belong to.
 * thinking.type decides whether the model thinks; without it an effort of "none" says that it does
 * not. */
static int read_thought_wish(const cJSON *body, struct thought_wish *wish,
                             struct oai_error *error) {
    const cJSON *reasoning = json_get(body, "reasoning"), *thinking = json_get(body, "thinking");
    const cJSON *type = json_get(thinking, "type");
    struct fault fault;
    *wish = (struct thought_wish){0};
    if (reasoning && !cJSON_IsObject(reasoning))
        return oai_expected(error, "reasoning", "an object", reasoning);
    if (thinking && !cJSON_IsObject(thinking))
        return oai_expected(error, "thinking", "an object", thinking);
    if (json_str(reasoning, "reasoning", "effort", &wish->effort, &fault) ||
        json_str(body, NULL, "reasoning_effort", &wish->effort, &fault))
        return oai_refuse_fault(error, &fault);
    if (thinking && !type)
        return oai_refuse(error, 400, "missing_required_parameter", "thinking.type",
                          "Missing required parameter: 'thinking.type'.");
    if (type && !cJSON_IsString(type))
        return oai_expected(error, "thinking.type", "a string", type);
    wish->said = type || wish->effort;
    wish->on = type ? strcmp(type->valuestring, "disabled") != 0
                    : wish->said && strcmp(wish->effort, "none") != 0;
    return 0;
}

/* Sets the variables that templates read: the switch of Qwen3, GLM and others, that of DeepSeek and
 * Granite, and Seed-OSS's number of tokens. Sets none if chat_template_kwargs has one of them. */
static int put_thought_wish(cJSON *context, const struct thought_wish *wish,
                            struct oai_error *error) {
    static const char *const switches[] = {"enable_thinking", "thinking", "thinking_budget"};
    if (wish->effort && !cJSON_GetObjectItemCaseSensitive(context, "reasoning_effort") &&
        put(context, "reasoning_effort", cJSON_CreateString(wish->effort), error))
        return -1;
    for (size_t i = 0; i < sizeof switches / sizeof *switches; i++)
        if (!wish->said || cJSON_GetObjectItemCaseSensitive(context, switches[i])) return 0;
    if (put(context, switches[0], cJSON_CreateBool(wish->on), error) ||
        put(context, switches[1], cJSON_CreateBool(wish->on), error))
        return -1;
    return wish->on ? 0 : put(context, switches[2], cJSON_CreateNumber(0), error);
}

/* Checks continue_final_message: the last message is written without its end, and the model
 * continues it. */
static int check_continue(const cJSON *context, const cJSON *body, struct oai_error *error) {
    const cJSON *messages = cJSON_GetObjectItemCaseSensitive(context, "messages"), *last = NULL;
    const char *content;
    char field[OAI_PATH];
    if (cJSON_IsTrue(json_get(body, "add_generation_prompt")))
        return oai_refuse(error, 400, "invalid_value", "continue_final_message",
                          "Invalid value for 'continue_final_message': it cannot be true together "
                          "with 'add_generation_prompt'.");
    cJSON_ArrayForEach(last, messages) {
        if (!last->next) break;
    }
    content = json_get(last, "content")->valuestring;
    if (content[strspn(content, " \t\r\n")] != '\0') return 0;
    oai_path(field, "messages[%d].content", cJSON_GetArraySize(messages) - 1);
    return oai_refuse(error, 400, "invalid_value", field,
                      "Invalid value for '%s': there is no text to continue.", field);
}

static int put_flags(cJSON *context, const cJSON *body, struct oai_error *error) {
    struct fault fault;
    bool prompt = true, resume = false;
    struct thought_wish wish;
    if (json_bool(body, NULL, "continue_final_message", &resume, &fault))
        return oai_refuse_fault(error, &fault);
    prompt = !resume;
    if (json_bool(body, NULL, "add_generation_prompt", &prompt, &fault))
        return oai_refuse_fault(error, &fault);
    if (read_thought_wish(body, &wish, error)) return -1;
    if (resume && (check_continue(context, body, error) ||
                   put(context, "continue_final_message", cJSON_CreateBool(true), error)))
        return -1;
    if (put(context, "add_generation_prompt", cJSON_CreateBool(prompt), error)) return -1;
    return put_thought_wish(context, &wish, error);
}

int oai_check_unused(const cJSON *body, struct oai_error *error) {
    static const char *const flags[] = {"continue_final_message", "add_generation_prompt"};
    const cJSON *tools = json_get(body, "tools"), *kwargs = json_get(body, "chat_template_kwargs");
    struct thought_wish wish;
    struct fault fault;
    bool flag = false;
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (json_bool(body, NULL, flags[i], &flag, &fault)) return oai_refuse_fault(error, &fault);
    if (read_thought_wish(body, &wish, error)) return -1;
    if (kwargs && !cJSON_IsObject(kwargs))
        return oai_expected(error, "chat_template_kwargs", "an object", kwargs);
    return tools ? oai_check_tools(tools, error) : 0;
}

int oai_build_context(struct oai_reader *r) {
    const cJSON *body = r->body;
    cJSON **context = &r->out->context;
    struct oai_error *error = r->error;
    const cJSON *messages = json_get(body, "messages");
    if (!cJSON_IsArray(messages)) return oai_expected(error, "messages", "an array", messages);
    if (!messages->child)
        return oai_refuse(error, 400, "invalid_value", "messages",
                          "Invalid value for 'messages': expected at least one message.");
    if (cJSON_GetArraySize(messages) > OAI_MESSAGES_MAX)
        return oai_refuse(error, 400, "invalid_value", "messages",
                          "Invalid value for 'messages': expected at most %d messages, found %d.",
                          OAI_MESSAGES_MAX, cJSON_GetArraySize(messages));
    *context = cJSON_CreateObject();
    if (!*context) return no_memory(error);
    if (put_messages(r, *context, messages) || put_tools(*context, body, error) ||
        put_kwargs(*context, body, error) || put_flags(*context, body, error))
        return -1; /* oai_request_close frees what there is */
    return 0;
}
