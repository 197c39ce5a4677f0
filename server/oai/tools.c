/* Tools: which tools a request may declare, which answers are searched for calls, and how calls are
 * written. tool_calls.h says where a call begins and ends. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/oai/fields.h"
#include "server/oai/tool_derive.h"

/* --- declarations --- */

static bool is_name(const char *text) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                  "0123456789_-";
    size_t size = strlen(text);
    return size > 0 && size <= OAI_TOOL_NAME_BYTES && strspn(text, letters) == size;
}

static int check_function(const cJSON *function, const char *path, struct oai_error *error) {
    const cJSON *name = json_get(function, "name"), *text = json_get(function, "description");
    const cJSON *parameters = json_get(function, "parameters"), *strict;
    char field[OAI_PATH];
    oai_path(field, "%s.name", path);
    if (!name)
        return oai_refuse(error, 400, "missing_required_parameter", field,
                          "Missing required parameter: '%s'.", field);
    if (!cJSON_IsString(name)) return oai_expected(error, field, "a string", name);
    if (!is_name(name->valuestring))
        return oai_refuse(error, 400, "invalid_value", field,
                          "Invalid value for '%s': expected 1 to %d letters, digits, '_' or '-'.",
                          field, OAI_TOOL_NAME_BYTES);
    oai_path(field, "%s.description", path);
    if (text && !cJSON_IsString(text)) return oai_expected(error, field, "a string", text);
    oai_path(field, "%s.parameters", path);
    if (parameters && !cJSON_IsObject(parameters))
        return oai_expected(error, field, "an object", parameters);
    oai_path(field, "%s.strict", path);
    strict = json_get(function, "strict");
    if (strict && !cJSON_IsBool(strict)) return oai_expected(error, field, "a boolean", strict);
    return 0;
}

static int check_tool(const cJSON *tool, const char *path, struct oai_error *error) {
    const cJSON *type = json_get(tool, "type"), *function = json_get(tool, "function");
    char field[OAI_PATH];
    if (!cJSON_IsObject(tool)) return oai_expected(error, path, "an object", tool);
    oai_path(field, "%s.type", path);
    if (!type)
        return oai_refuse(error, 400, "missing_required_parameter", field,
                          "Missing required parameter: '%s'.", field);
    if (!cJSON_IsString(type)) return oai_expected(error, field, "a string", type);
    if (strcmp(type->valuestring, "function") != 0)
        return oai_refuse(error, 400, "unsupported_parameter", field,
                          "Unsupported value for '%s': only tools of type 'function' are served, "
                          "found '%.32s'.",
                          field, type->valuestring);
    oai_path(field, "%s.function", path);
    if (!function)
        return oai_refuse(error, 400, "missing_required_parameter", field,
                          "Missing required parameter: '%s'.%s", field,
                          json_get(tool, "name") ? " Put name, description, parameters and strict "
                                                   "into it: only /v1/responses has them here."
                                                 : "");
    if (!cJSON_IsObject(function)) return oai_expected(error, field, "an object", function);
    return check_function(function, field, error);
}

int oai_check_tools(const cJSON *tools, struct oai_error *error) {
    const cJSON *tool;
    char path[OAI_PATH];
    int i = 0;
    if (!cJSON_IsArray(tools)) return oai_expected(error, "tools", "an array", tools);
    if (cJSON_GetArraySize(tools) > OAI_TOOLS_MAX)
        return oai_refuse(error, 400, "invalid_value", "tools",
                          "Invalid value for 'tools': expected at most %d tools, found %d.",
                          OAI_TOOLS_MAX, cJSON_GetArraySize(tools));
    cJSON_ArrayForEach(tool, tools) {
        oai_path(path, "tools[%d]", i++);
        if (check_tool(tool, path, error)) return -1;
    }
    return 0;
}

/* --- answers that are searched --- */

#define FORM_TEXTS (17 + CONSTRAIN_TYPE_COUNT)

/* Lists the texts that a form may write besides names and arguments; "" if it has no such text. */
static void list_texts(const struct tool_form *form, const char *out[FORM_TEXTS]) {
    static const struct constrain_tags none = {0};
    const struct constrain_tags *tags = form->tags ? form->tags : &none;
    const char *mark = form->notation ? form->notation->mark : NULL;
    const char *const texts[FORM_TEXTS] = {
        form->open,     form->before,   form->arguments, form->after,        form->between,
        form->close,    tags->open,     tags->named,     tags->gap,          tags->value,
        tags->line,     tags->close,    tags->after,     tags->behind_close, tags->raw[0],
        tags->raw[1],   mark,           tags->typed[0],  tags->typed[1],     tags->typed[2],
        tags->typed[3], tags->typed[4], tags->typed[5]};
    for (int i = 0; i < FORM_TEXTS; i++) out[i] = texts[i] ? texts[i] : "";
}

/* Makes the marks of a form, which may be special tokens, part of answers. false: one of them ends
 * answers, so that no call could be found or bound; then nothing is changed. */
static bool show_form(struct engine *engine, const struct tool_form *form) {
    const char *texts[FORM_TEXTS];
    if (!form) return false;
    list_texts(form, texts);
    for (int i = 0; i < FORM_TEXTS; i++)
        if (tool_form_is_marked(form) && !engine_can_show(engine, texts[i], strlen(texts[i])))
            return false;
    for (int i = 0; i < FORM_TEXTS; i++) engine_show_tokens(engine, texts[i], strlen(texts[i]));
    return true;
}

static bool shows_tools(const char *source) {
    return source && strstr(source, "tools");
}

int oai_check_parser(const char *tool_template, const char *parser, struct fault *fault) {
    static const char field[] = "tool-call-parser";
    if (strcmp(parser, "auto") == 0 || strcmp(parser, tool_form_name(NULL)) == 0) return 0;
    if (!shows_tools(tool_template))
        return fault_set(fault, ERR_INVALID, field,
                         "the model's chat template shows no tools; without the option they are "
                         "described in a message (generic)");
    const struct tool_form *taught = tool_form_of(tool_template);
    if (taught && strcmp(parser, taught->name) != 0)
        log_warn("tool-call-parser: the model's chat template teaches the form '%s', not '%s'",
                 taught->name, parser);
    return 0;
}

struct template_source {
    const char *text;
    struct arena *arena;
};

static const char *render_source(void *arg, const cJSON *context) {
    const struct template_source *source = arg;
    struct fault fault;
    const char *text;
    return engine_render_template(source->text, context, source->arena, &text, &fault) ? NULL
                                                                                       : text;
}

#define DERIVE_BYTES_MAX ((size_t)16 << 20)

/* Finds the form of a template by its words, or by what it renders; then *own owns the form. NULL:
 * it has none. */
static const struct tool_form *form_of(const char *source, struct tool_derived **own) {
    struct arena arena;
    *own = NULL;
    if (!shows_tools(source)) return tool_form_of(source);
    struct tool_derived *derived = mem_must_alloc(1, sizeof *derived);
    arena_open(&arena, DERIVE_BYTES_MAX);
    const struct tool_form *form =
        tool_find(source, render_source, &(struct template_source){source, &arena}, derived);
    arena_close(&arena);
    if (form == &derived->form)
        *own = derived;
    else
        mem_free(derived);
    return form;
}

static bool hides_calls(const char *source) {
    struct arena arena;
    arena_open(&arena, DERIVE_BYTES_MAX);
    bool hidden = tool_hides_calls(render_source, &(struct template_source){source, &arena});
    arena_close(&arena);
    return hidden;
}

void oai_close_tools(struct oai_tool_style *style) {
    mem_free(style->own);
    *style = (struct oai_tool_style){0};
}

/* Finds the form that the template shows, or that the option names. */
static struct oai_tool_style find_shown(const struct engine *engine, const char *parser) {
    const struct engine_info *info = engine_info(engine);
    struct oai_tool_style style = {0};
    if (shows_tools(info->tool_template) && tool_form_named(parser))
        style.form = tool_form_named(parser);
    else
        style.form = form_of(info->tool_template, &style.own);
    style.hides_calls = style.form && !style.own && oai_can_write_calls(style.form) &&
                        hides_calls(info->tool_template);
    return style;
}

struct oai_tool_style oai_find_tools(struct engine *engine, const char *parser) {
    if (!engine_info(engine)->has_chat_template || !strcmp(parser, tool_form_name(NULL)))
        return (struct oai_tool_style){0};
    struct oai_tool_style style = find_shown(engine, parser);
    if (!show_form(engine, style.form)) {
        oai_close_tools(&style);
        style.form = &tool_forms[TOOL_FORMAT_HERMES];
        style.generic = true;
        if (!show_form(engine, style.form)) style = (struct oai_tool_style){0};
    }
    return style;
}

const char *oai_tool_style_name(const struct oai_tool_style *style) {
    return style->generic ? "generic" : tool_form_name(style->form);
}

const char *oai_tool_style_of(const char *chat_template) {
    struct tool_derived *own;
    const struct tool_form *form = chat_template ? form_of(chat_template, &own) : NULL;
    const char *name = form ? form->name : chat_template ? "generic" : tool_form_name(NULL);
    if (chat_template) mem_free(own);
    return name;
}

/* Reads {"type": "function", "function": {"name": ...}}. */
static int read_named(const struct oai_reader *r, const cJSON *choice) {
    const cJSON *type = json_get(choice, "type"), *tool;
    const cJSON *name = json_get(json_get(choice, "function"), "name");
    int index = 0;
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "function") != 0)
        return oai_refuse(r->error, 400, "unsupported_parameter", "tool_choice",
                          "Unsupported value for 'tool_choice': an object names a function: "
                          "{\"type\": \"function\", \"function\": {\"name\": ...}}.");
    if (!name) return oai_missing(r, "tool_choice.function.name");
    if (!cJSON_IsString(name))
        return oai_expected(r->error, "tool_choice.function.name", "a string", name);
    cJSON_ArrayForEach(tool, json_get(r->body, "tools")) {
        if (strcmp(json_get(json_get(tool, "function"), "name")->valuestring, name->valuestring) ==
            0) {
            r->out->named_tool = index;
            return 0;
        }
        index++;
    }
    return oai_invalid(r, "tool_choice", "no tool has the name '%.64s'", name->valuestring);
}

/* Reads tool_choice: "required" and named functions promise a call. */
static int read_choice(const struct oai_reader *r, bool *searches) {
    const cJSON *choice = json_get(r->body, "tool_choice");
    *searches = true;
    if (!choice) return 0;
    if (cJSON_IsObject(choice)) {
        r->out->call_promised = true;
        return read_named(r, choice);
    }
    if (!cJSON_IsString(choice))
        return oai_invalid(r, "tool_choice", "expected a string or an object, found %s",
                           json_type_name(choice));
    *searches = strcmp(choice->valuestring, "none") != 0;
    r->out->call_promised = strcmp(choice->valuestring, "required") == 0;
    if (!*searches || r->out->call_promised || strcmp(choice->valuestring, "auto") == 0) return 0;
    return oai_invalid(r, "tool_choice",
                       "expected \"none\", \"auto\", \"required\" or a function, found '%.32s'",
                       choice->valuestring);
}

static int refuse_format(const struct oai_reader *r) {
    return oai_refuse(r->error, 400, "unsupported_parameter", "tools",
                      "Unsupported value for 'tools': answers of this model are not searched for "
                      "calls, because the daemon runs with '--tool-call-parser none' or the tags "
                      "of calls end the model's answers. With 'tool_choice' \"none\" the "
                      "model sees the tools and answers in text.");
}

/* Copies the names, because the body's tree is freed before the answer begins. */
static int read_names(struct oai_reader *r, const cJSON *tools) {
    int count = cJSON_GetArraySize(tools), i = 0;
    const char **names = arena_alloc(r->arena, (size_t)count, sizeof *names);
    const cJSON *tool;
    if (!names) return oai_no_memory(r);
    cJSON_ArrayForEach(tool, tools) {
        const char *name = json_get(json_get(tool, "function"), "name")->valuestring;
        names[i] = arena_strndup(r->arena, name, strlen(name));
        if (!names[i++]) return oai_no_memory(r);
    }
    r->out->tools.names = names;
    r->out->tools.count = count;
    return 0;
}

/* Copies the names of a tool's parameters that do not allow all types. NULL: no memory. */
static const struct tool_parameter *read_parameters(const struct oai_reader *r, const cJSON *tool) {
    const cJSON *parameters = json_get(json_get(tool, "function"), "parameters"), *child;
    const cJSON *properties = json_get(parameters, "properties");
    size_t count = 0, room = (size_t)cJSON_GetArraySize(properties) + 1;
    struct tool_parameter *list = arena_alloc(r->arena, room, sizeof *list);
    if (!list) return NULL;
    if (cJSON_IsObject(properties)) cJSON_ArrayForEach(child, properties) {
            unsigned types = constrain_types(parameters, child);
            if (types == CONSTRAIN_TYPES_ALL) continue;
            const char *name = arena_strndup(r->arena, child->string, strlen(child->string));
            if (!name) return NULL;
            list[count++] = (struct tool_parameter){name, types};
        }
    list[count] = (struct tool_parameter){0};
    return list;
}

/* Reads the parameters of all tools. Tags do not say which type a value has; the schemas do. */
static int read_all_parameters(struct oai_reader *r, const cJSON *tools) {
    const cJSON *tool;
    const struct tool_parameter **lists =
        arena_alloc(r->arena, (size_t)cJSON_GetArraySize(tools), sizeof *lists);
    int i = 0;
    if (!lists) return oai_no_memory(r);
    cJSON_ArrayForEach(tool, tools) {
        lists[i] = read_parameters(r, tool);
        if (!lists[i++]) return oai_no_memory(r);
    }
    r->out->tools.parameters = lists;
    return 0;
}

int oai_read_tools(struct oai_reader *r) {
    const cJSON *tools = json_get(r->body, "tools");
    struct tool_set *out = &r->out->tools;
    bool searches;
    out->parallel = true;
    if (oai_get_bool(r, NULL, r->body, "parallel_tool_calls", &out->parallel) ||
        read_choice(r, &searches))
        return -1;
    if (!searches) return 0;
    if (!tools || !tools->child)
        return r->out->call_promised
                   ? oai_invalid(r, "tool_choice", "a call is promised, but there are no 'tools'")
                   : 0;
    if (!r->rules->tools.form) return refuse_format(r);
    out->form = r->rules->tools.form;
    /* A constrained answer has no channels (channels.c): its calls are objects. */
    if (out->form->shape == TOOL_SHAPE_CHANNELS && r->out->call_promised)
        out->form = &tool_forms[TOOL_FORMAT_LLAMA3];
    if (out->form->tags && read_all_parameters(r, tools)) return -1;
    return read_names(r, tools);
}

/* --- answers --- */

const struct oai_tool_origin *oai_origin_of(const struct oai_request *request, const char *name,
                                            size_t size) {
    for (int i = 0; i < request->origin_count; i++) {
        const struct oai_tool_origin *tool = &request->origins[i];
        if (strlen(tool->known) == size && memcmp(tool->known, name, size) == 0)
            return tool->space || tool->is_text ? tool : NULL;
    }
    return NULL;
}

bool oai_reads_calls(const struct oai_answer *answer) {
    return answer->request->tools.form != NULL;
}

/* Writes an id. It has 96 of the 128 random bits of the answer's id, and at most 40 bytes: a client
 * may continue the conversation with another API, and some accept no longer ids. */
void oai_render_part_id(struct buf *out, const struct oai_answer *answer, const char *prefix,
                        unsigned a, unsigned b) {
    const char *random = strpbrk(answer->id, "-_");
    buf_fmt(out, "\"%s%.24s%02x%02x\"", prefix, random ? random + 1 : answer->id, a, b);
}

void oai_render_call_id(struct buf *out, const struct oai_answer *answer, const char *prefix,
                        unsigned index, unsigned call) {
    const char *random = strpbrk(answer->id, "-_");
    const struct tool_form *form = answer->request->tools.form;
    if (form && form->short_ids)
        buf_fmt(out, "\"%.5s%02x%02x\"", random ? random + 1 : answer->id, index & 255, call & 255);
    else
        oai_render_part_id(out, answer, prefix, index, call);
}

static void write_id(struct buf *out, const struct oai_answer *answer, int index, uint32_t call) {
    buf_str(out, "\"id\":");
    oai_render_call_id(out, answer, "call_", (unsigned)index, call);
    buf_str(out, ",\"type\":\"function\"");
}

void oai_render_call_begin(struct buf *out, const struct oai_answer *answer, int index,
                           uint32_t call, const char *name, size_t size) {
    buf_fmt(out, "\"tool_calls\":[{\"index\":%" PRIu32 ",", call);
    write_id(out, answer, index, call);
    buf_str(out, ",\"function\":{\"name\":");
    json_write_str(out, name, size);
    buf_str(out, ",\"arguments\":\"\"}}]");
}

void oai_render_call_arguments(struct buf *out, uint32_t call, const char *text, size_t size) {
    buf_fmt(out, "\"tool_calls\":[{\"index\":%" PRIu32 ",\"function\":{\"arguments\":", call);
    json_write_str(out, text, size);
    buf_str(out, "}}]");
}

void oai_calls_open(struct oai_calls *calls, const struct oai_answer *answer, int index,
                    size_t limit) {
    *calls = (struct oai_calls){.answer = answer, .index = index};
    buf_open(&calls->content, limit);
    buf_open(&calls->list, limit);
    buf_open(&calls->arguments, limit);
}

void oai_calls_close(struct oai_calls *calls) {
    buf_close(&calls->content);
    buf_close(&calls->list);
    buf_close(&calls->arguments);
}

static void end_call(struct oai_calls *calls) {
    if (!calls->list.size) return;
    json_write_str(&calls->list, calls->arguments.data ? calls->arguments.data : "",
                   calls->arguments.size);
    buf_str(&calls->list, "}}");
    calls->list.failed |= calls->arguments.failed;
    buf_clear(&calls->arguments);
}

static void begin_call(struct oai_calls *calls, const struct oai_delta *delta) {
    end_call(calls);
    buf_str(&calls->list, calls->list.size ? ",{" : "{");
    write_id(&calls->list, calls->answer, calls->index, delta->call);
    buf_str(&calls->list, ",\"function\":{\"name\":");
    json_write_str(&calls->list, delta->text, delta->size);
    buf_str(&calls->list, ",\"arguments\":");
}

void oai_calls_take(struct oai_calls *calls, const struct oai_delta *delta) {
    switch (delta->kind) {
    case TOOL_CALL:
        begin_call(calls, delta);
        break;
    case TOOL_BARE:
        buf_str(&calls->arguments, "{}");
        break;
    case TOOL_ARGUMENTS:
        buf_add(&calls->arguments, delta->text, delta->size);
        break;
    default:
        buf_add(&calls->content, delta->text, delta->size);
    }
}

void oai_calls_end(struct oai_calls *calls) {
    end_call(calls);
}

bool oai_calls_failed(const struct oai_calls *calls) {
    return calls->content.failed || calls->list.failed || calls->arguments.failed;
}
