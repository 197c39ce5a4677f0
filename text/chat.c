#include "text/chat.h"

#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "text/jinja/builtins.h"
#include "text/jinja/eval.h"
#include "text/jinja/json.h"
#include "text/jinja/parse.h"

struct chat {
    struct jinja_template template;
};

int chat_open(const char *source, size_t size, struct chat **out, struct fault *fault) {
    *out = NULL;
    struct chat *chat = mem_try_alloc(1, sizeof *chat);
    if (!chat) return fault_set(fault, ERR_NOMEM, "chat template", "%s", err_text(ERR_NOMEM));
    arena_open(&chat->template.arena, JINJA_TEMPLATE_MAX);
    int rc = jinja_parse(source, size, &chat->template, fault);
    if (rc) {
        chat_close(chat);
        return rc;
    }
    *out = chat;
    return 0;
}

void chat_close(struct chat *chat) {
    if (!chat) return;
    arena_close(&chat->template.arena);
    mem_free(chat);
}

static bool is_trusted(const struct chat_input *input, const char *name) {
    for (int i = 0; i < input->trusted_count; i++)
        if (strcmp(input->trusted[i], name) == 0) return true;
    return false;
}

bool chat_is_known_role(const char *role) {
    static const char *const roles[] = {"system",    "developer", "user",
                                        "assistant", "tool",      "function"};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strcmp(role, roles[i]) == 0) return true;
    return false;
}

/* Templates build special tokens around roles: '<|' + message.role + '|>'. A role that is one of
 * the known words is as good as the template's own text; any other is the request's text. */
static int add_role(struct jinja_run *run, const cJSON *message, struct jinja_value *value) {
    const cJSON *role;
    struct jinja_value key, text;
    int rc = 0;
    cJSON_ArrayForEach(role, message) {
        if (!cJSON_IsString(role) || !role->string || strcmp(role->string, "role") != 0) continue;
        if (!role->valuestring || !chat_is_known_role(role->valuestring)) continue;
        rc = jinja_str_c(run, "role", &key);
        if (!rc) rc = jinja_json_string(run, role->valuestring, false, false, &text);
        if (!rc) rc = jinja_dict_set(run, value->dict, &key, &text);
        if (rc) break;
    }
    return rc;
}

static int add_messages(struct jinja_run *run, const cJSON *messages, struct jinja_value *out) {
    const cJSON *message;
    struct jinja_value value;
    int rc = jinja_list_open(run, JINJA_LIST, 0, out);
    cJSON_ArrayForEach(message, messages) {
        if (!rc) rc = jinja_from_json(run, message, true, false, &value);
        if (!rc && value.kind == JINJA_DICT) rc = add_role(run, message, &value);
        if (!rc) rc = jinja_list_add(run, out->list, &value);
        if (rc) break;
    }
    return rc;
}

static int add_variable(struct jinja_run *run, const struct chat_input *input,
                        const cJSON *variable, struct jinja_value *out) {
    bool marked = !is_trusted(input, variable->string);
    if (marked && cJSON_IsArray(variable) && strcmp(variable->string, "messages") == 0)
        return add_messages(run, variable, out);
    return jinja_from_json(run, variable, marked, false, out);
}

static int chat_add_function(struct jinja_run *run, const struct jinja_builtin *builtin,
                             struct jinja_value *out) {
    struct jinja_function *function = jinja_alloc(run, 1, sizeof *function);
    if (!function) return jinja_fail_memory(run);
    *function = (struct jinja_function){builtin, jinja_none()};
    *out = (struct jinja_value){.kind = JINJA_FUNCTION, .function = function};
    return 0;
}

/* Only names the template uses get a value; what it never reads costs nothing. */
static int bind_globals(struct jinja_run *run, const struct chat_input *input) {
    const struct jinja_template *template = run->template;
    const cJSON *variable;
    int rc = 0;
    run->globals = jinja_alloc(run, template->name_count, sizeof *run->globals);
    if (!run->globals) return jinja_fail_memory(run);
    for (uint32_t i = 0; i < template->name_count && !rc; i++) {
        const struct jinja_name *name = template->names[i];
        const struct jinja_builtin *builtin = jinja_find_global(&name->string);
        if (builtin) rc = chat_add_function(run, builtin, &run->globals[i]);
        cJSON_ArrayForEach(variable, input->context) {
            if (rc || !variable->string || strcmp(variable->string, name->text) != 0) continue;
            rc = add_variable(run, input, variable, &run->globals[i]);
        }
        if (!rc) rc = jinja_charge(run, 1);
    }
    return rc;
}

static int report(struct jinja_run *run, struct chat_text *out) {
    const struct jinja_text *text = run->out;
    struct tok_span *spans = NULL;
    if (text->mark_count) {
        spans = jinja_alloc(run, text->mark_count, sizeof *spans);
        if (!spans) return jinja_fail_memory(run);
    }
    for (uint32_t i = 0; i < text->mark_count; i++)
        spans[i] = (struct tok_span){text->marks[i].begin, text->marks[i].end};
    text->data[text->used] = 0; /* the capacity leaves room */
    *out = (struct chat_text){text->data, text->used, spans, text->mark_count};
    return 0;
}

int chat_render(const struct chat *chat, const struct chat_input *input, struct arena *arena,
                struct chat_text *out, struct fault *fault) {
    struct fault unread;
    struct jinja_run run = {
        .arena = arena,
        .fault = fault ? fault : &unread,
        .template = &chat->template,
        .steps = JINJA_STEPS_MAX,
        .now = input->now,
        .line = 1,
    };
    *out = (struct chat_text){0};
    if (!cJSON_IsObject(input->context))
        return fault_set(fault, ERR_INVALID, "chat template", "the context is not an object");
    int rc = jinja_text_open(&run, 1024, &run.out);
    if (!rc) rc = bind_globals(&run, input);
    if (!rc) rc = jinja_execute(&run);
    return rc ? rc : report(&run, out);
}
