/* Describes tools for chat templates that show none, or whose form of calls keepd does not read:
 * the system message describes them, a call is JSON between tags in the assistant's text
 * (tool_calls.h, hermes), and results are turns of the user. For templates that show tools but no
 * calls it writes the calls alone, in the model's form. */
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "server/oai/fields.h"

static const char before_tools[] =
    "You can use tools. Each line below is the JSON description of one tool:\n";
static const char after_tools[] =
    "To use a tool, answer with its name and its arguments as JSON between these tags:\n"
    "<tool_call>\n{\"name\": \"the tool's name\", \"arguments\": {\"the argument's name\": "
    "\"its value\"}}\n</tool_call>\n"
    "The user then sends the tool's result between <tool_response> and </tool_response>. "
    "Answer without a tool where none is needed.";

/* --- messages --- */

/* Writes a text that may hold U+0000 (base/json.h). */
static void write_raw_text(struct buf *out, const char *string) {
    size_t size = strlen(string);
    char *text = mem_try_alloc(size + 1, 1);
    if (text) json_text(string, text, &size);
    if (text) buf_add(out, text, size);
    out->failed |= !text;
    mem_free(text);
}

static void write_string(struct buf *out, const struct constrain_notation *notation,
                         const char *string) {
    if (!notation->mark) {
        json_write_str(out, string, strlen(string));
        return;
    }
    buf_str(out, notation->mark);
    write_raw_text(out, string);
    buf_str(out, notation->mark);
}

static void write_notation_value(struct buf *out, const struct constrain_notation *notation,
                                 const cJSON *value);

/* Writes the members of an object or the elements of an array. `assign`: what stands behind names;
 * `plain`: they have no quotes. */
static void write_children(struct buf *out, const struct constrain_notation *notation,
                           const cJSON *value, const char *assign, bool plain) {
    const cJSON *child;
    cJSON_ArrayForEach(child, value) {
        if (child != value->child) buf_fmt(out, ",%s", notation->space);
        if (child->string && plain)
            write_raw_text(out, child->string);
        else if (child->string)
            write_string(out, notation, child->string);
        if (child->string) buf_str(out, assign);
        write_notation_value(out, notation, child);
    }
}

static void write_notation_value(struct buf *out, const struct constrain_notation *notation,
                                 const cJSON *value) {
    const bool object = cJSON_IsObject(value);
    const char colon[] = {':', notation->space[0], '\0'};
    if (cJSON_IsString(value)) {
        write_string(out, notation, value->valuestring);
    } else if (cJSON_IsBool(value) || cJSON_IsNull(value)) {
        buf_str(out, notation->words[cJSON_IsNull(value) ? 0 : cJSON_IsTrue(value) ? 2 : 1]);
    } else if (object || cJSON_IsArray(value)) {
        buf_char(out, object ? '{' : '[');
        write_children(out, notation, value, colon, constrain_plain_names(notation, false));
        buf_char(out, object ? '}' : ']');
    } else {
        json_write_node(out, value);
    }
}

static void write_arguments(struct buf *out, const struct tool_form *form, const cJSON *arguments) {
    const struct constrain_notation *notation = form->notation;
    if (!notation) {
        json_write_node(out, arguments);
        return;
    }
    buf_char(out, notation->brackets[0]);
    if (cJSON_IsObject(arguments)) write_children(out, notation, arguments, notation->assign, true);
    buf_char(out, notation->brackets[1]);
}

/* Writes a call. A name in an object is a string of JSON, whose quotes end the texts around it. */
static void write_form_call(struct buf *out, const struct tool_form *form, const cJSON *function) {
    const cJSON *name = json_get(function, "name");
    const size_t before = strlen(form->before);
    const bool quoted = before > 0 && form->before[before - 1] == '"' && form->arguments[0] == '"';
    buf_add(out, form->before, before - quoted);
    if (quoted)
        json_write_node(out, name);
    else
        write_raw_text(out, name->valuestring);
    buf_str(out, form->arguments + quoted);
    write_arguments(out, form, json_get(function, "arguments"));
    buf_str(out, form->after);
}

bool oai_can_write_calls(const struct tool_form *form) {
    const char *const texts[] = {form->open,  form->before,  form->arguments,
                                 form->after, form->between, form->close};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (strchr(texts[i], TOOL_ANY)) return false;
    return !form->tags && form->shape != TOOL_SHAPE_CHANNELS;
}

/* Writes the calls of an answer after its text. */
static bool write_calls(cJSON *message, const struct tool_form *form) {
    cJSON *calls = cJSON_DetachItemFromObjectCaseSensitive(message, "tool_calls");
    const cJSON *call;
    struct buf text;
    if (!calls) return true;
    buf_open(&text, OAI_CONTENT_BYTES_MAX);
    buf_str(&text, oai_message_text(message));
    const bool section = tool_form_is_section(form);
    if (calls->child) buf_str(&text, form->open);
    cJSON_ArrayForEach(call, calls) {
        if (section ? call != calls->child : text.size > 0) buf_str(&text, form->between);
        write_form_call(&text, form, json_get(call, "function"));
    }
    if (calls->child) buf_str(&text, form->close);
    cJSON_Delete(calls);
    return oai_set_content(message, &text);
}

/* --- descriptions --- */

static void describe_tools(const cJSON *tools, struct buf *out) {
    const cJSON *tool;
    buf_str(out, before_tools);
    cJSON_ArrayForEach(tool, tools) {
        json_write_node(out, json_get(tool, "function"));
        buf_char(out, '\n');
    }
    buf_str(out, after_tools);
}

/* Adds a message of the system in front of all others. */
static cJSON *add_system(cJSON *messages) {
    cJSON *message = cJSON_CreateObject();
    if (message && cJSON_AddStringToObject(message, "role", "system") &&
        cJSON_AddStringToObject(message, "content", "") &&
        cJSON_InsertItemInArray(messages, 0, message))
        return message;
    cJSON_Delete(message);
    return NULL;
}

/* Describes the tools at the end of the system message or, where the template shows none, in front
 * of the text of the first other message. */
static bool write_tools(cJSON *messages, const cJSON *tools, bool has_system) {
    cJSON *message = messages->child;
    struct buf text;
    while (!has_system && oai_has_role(message, "system") && message->next) message = message->next;
    if (has_system && !oai_has_role(message, "system") && !(message = add_system(messages)))
        return false;
    buf_open(&text, OAI_CONTENT_BYTES_MAX);
    const char *content = oai_message_text(message);
    if (has_system && *content) {
        buf_str(&text, content);
        buf_str(&text, "\n\n");
    }
    describe_tools(tools, &text);
    if (!has_system) {
        buf_str(&text, "\n\n");
        buf_str(&text, content);
    }
    return oai_set_content(message, &text);
}

int oai_write_tools(struct oai_reader *r) {
    cJSON *tools = cJSON_DetachItemFromObjectCaseSensitive(r->out->context, "tools");
    cJSON *messages = cJSON_GetObjectItemCaseSensitive(r->out->context, "messages");
    bool written = true;
    cJSON *message;
    cJSON_ArrayForEach(message, messages) {
        written = written && write_calls(message, &tool_forms[TOOL_FORMAT_HERMES]);
    }
    written = written && oai_join_turns(messages, &r->rules->turns, true) &&
              (!tools || write_tools(messages, tools, r->rules->turns.has_system));
    cJSON_Delete(tools);
    return written ? 0 : oai_no_memory(r);
}

int oai_write_calls(struct oai_reader *r) {
    cJSON *messages = cJSON_GetObjectItemCaseSensitive(r->out->context, "messages"), *message;
    bool written = true;
    cJSON_ArrayForEach(message, messages) {
        written = written && write_calls(message, r->rules->tools.form);
    }
    return written ? 0 : oai_no_memory(r);
}
