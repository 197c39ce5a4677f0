#include "server/oai/rewrite.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"

#define TEXT_BYTES_MAX (256u << 20) /* far above the bound on bodies */

/* --- fields --- */

int oai_rewrite_refuse(struct oai_rewrite *w, const char *field, const char *format, ...) {
    char text[384];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return oai_refuse(w->r->error, 400, "unsupported_parameter", field,
                      "Unsupported value for '%s': %s.", field, text);
}

static int put(struct oai_rewrite *w, cJSON *object, const char *name, cJSON *item) {
    if (item && cJSON_AddItemToObject(object, name, item)) return 0;
    cJSON_Delete(item);
    return oai_no_memory(w->r);
}

static int put_text(struct oai_rewrite *w, cJSON *object, const char *name, const char *text) {
    return put(w, object, name, cJSON_CreateString(text));
}

/* Links a node of another tree, which outlives this one. */
static int link_node(struct oai_rewrite *w, cJSON *object, const char *name, const cJSON *node) {
    if (!node) return 0;
    return cJSON_AddItemReferenceToObject(object, name, (cJSON *)(uintptr_t)node)
               ? 0
               : oai_no_memory(w->r);
}

int oai_rewrite_put(struct oai_rewrite *w, const char *name, cJSON *item) {
    return put(w, w->chat, name, item);
}

int oai_rewrite_link(struct oai_rewrite *w, const char *name, const cJSON *node) {
    return link_node(w, w->chat, name, node);
}

int oai_rewrite_member(struct oai_rewrite *w, cJSON *to, const char *as, const cJSON *from,
                       const char *name) {
    return link_node(w, to, as, json_get(from, name));
}

int oai_rewrite_schema(struct oai_rewrite *w, const cJSON *format) {
    cJSON *copy = cJSON_CreateObject();
    if (oai_rewrite_put(w, "response_format", copy) ||
        oai_rewrite_member(w, copy, "type", format, "type"))
        return -1;
    return cJSON_AddItemReferenceToObject(copy, "json_schema", (cJSON *)(uintptr_t)format)
               ? 0
               : oai_no_memory(w->r);
}

int oai_rewrite_open(struct oai_rewrite *w, struct oai_reader *r) {
    const cJSON *node;
    *w = (struct oai_rewrite){.r = r, .body = r->body};
    w->chat = r->out->chat = cJSON_CreateObject();
    w->messages = w->chat ? cJSON_AddArrayToObject(w->chat, "messages") : NULL;
    if (!w->messages) return oai_no_memory(r);
    cJSON_ArrayForEach(node, w->body) {
        if (oai_is_shared(r->out->kind, node->string) && oai_rewrite_link(w, node->string, node))
            return -1;
    }
    r->body = w->chat;
    return 0;
}

int oai_rewrite_tools(struct oai_rewrite *w, int (*add)(struct oai_rewrite *w, cJSON *list,
                                                        const cJSON *tool, const char *path)) {
    const cJSON *tools = json_get(w->body, "tools"), *tool;
    char path[OAI_PATH];
    int i = 0;
    if (!tools) return 0;
    if (!cJSON_IsArray(tools)) return oai_expected(w->r->error, "tools", "an array", tools);
    cJSON *list = cJSON_CreateArray();
    if (oai_rewrite_put(w, "tools", list)) return -1;
    cJSON_ArrayForEach(tool, tools) {
        oai_path(path, "tools[%d]", i++);
        if (add(w, list, tool, path)) return -1;
    }
    return 0;
}

int oai_rewrite_string(struct oai_rewrite *w, const cJSON *object, const char *path,
                       const char *key, const char **value) {
    const cJSON *node = json_get(object, key);
    char field[OAI_PATH];
    oai_path(field, "%s%s%s", path, path[0] ? "." : "", key);
    if (!node) return oai_missing(w->r, field);
    if (!cJSON_IsString(node)) return oai_expected(w->r->error, field, "a string", node);
    *value = node->valuestring;
    return 0;
}

/* --- texts --- */

int oai_rewrite_part(struct oai_rewrite *w, const cJSON *part, const char *path,
                     const struct oai_part_type *types, const char **text) {
    char field[OAI_PATH], known[128] = "";
    const char *type;
    size_t at = 0;
    if (!cJSON_IsObject(part)) return oai_expected(w->r->error, path, "an object", part);
    if (oai_rewrite_string(w, part, path, "type", &type)) return -1;
    for (const struct oai_part_type *t = types; t->type; t++) {
        if (strcmp(type, t->type) == 0) return oai_rewrite_string(w, part, path, t->member, text);
        if (at < sizeof known)
            at +=
                (size_t)snprintf(known + at, sizeof known - at, "%s'%s'", at ? ", " : "", t->type);
    }
    oai_path(field, "%s.type", path);
    return oai_rewrite_refuse(w, field, "only parts of type %s are served here, found '%.32s'",
                              known, type);
}

static int join(struct oai_rewrite *w, const cJSON *parts, const char *path,
                const struct oai_part_type *types, struct buf *out) {
    const cJSON *part;
    const char *text;
    char field[OAI_PATH];
    int i = 0;
    cJSON_ArrayForEach(part, parts) {
        oai_path(field, "%s[%d]", path, i);
        if (oai_rewrite_part(w, part, field, types, &text)) return -1;
        if (i++) buf_char(out, '\n');
        buf_str(out, text);
    }
    return out->failed ? oai_no_memory(w->r) : 0;
}

int oai_rewrite_join(struct oai_rewrite *w, const cJSON *node, const char *path,
                     const struct oai_part_type *types, const char **text) {
    struct buf joined;
    if (cJSON_IsString(node)) {
        *text = node->valuestring;
        return 0;
    }
    if (!cJSON_IsArray(node))
        return node ? oai_expected(w->r->error, path, "a string or an array of parts", node)
                    : oai_missing(w->r, path);
    buf_open(&joined, TEXT_BYTES_MAX);
    int rc = join(w, node, path, types, &joined);
    if (!rc) {
        *text = arena_strndup(w->r->arena, joined.data ? joined.data : "", joined.size);
        if (!*text) rc = oai_no_memory(w->r);
    }
    buf_close(&joined);
    return rc;
}

/* --- messages --- */

static cJSON *add_message(struct oai_rewrite *w, const char *role) {
    cJSON *message = cJSON_CreateObject();
    if (!message || !cJSON_AddItemToArray(w->messages, message)) {
        cJSON_Delete(message);
        oai_no_memory(w->r);
        return NULL;
    }
    w->open = NULL;
    w->thinks = w->speaks = w->calls = false;
    return put_text(w, message, "role", role) ? NULL : message;
}

int oai_rewrite_message(struct oai_rewrite *w, const char *role, const char *text) {
    cJSON *message = add_message(w, role);
    return message ? put_text(w, message, "content", text) : -1;
}

int oai_rewrite_result(struct oai_rewrite *w, const char *call, const char *text) {
    cJSON *message = add_message(w, "tool");
    if (!message || put_text(w, message, "tool_call_id", call)) return -1;
    return put_text(w, message, "content", text);
}

/* Opens a message to which only parts are added. */
static int open_answer(struct oai_rewrite *w) {
    cJSON *message = add_message(w, "assistant");
    w->open = message;
    return message ? put(w, message, "content", cJSON_CreateNull()) : -1;
}

/* Adds text to a member, behind the text that it has and `between`. */
static int add_text(struct oai_rewrite *w, const char *name, const char *between,
                    const char *text) {
    const cJSON *node = json_get(w->open, name);
    const char *parts[] = {node ? node->valuestring : "", node ? between : "", text};
    struct buf both;
    cJSON *joined = NULL;
    if (!node) cJSON_DeleteItemFromObjectCaseSensitive(w->open, name); /* null */
    buf_open(&both, TEXT_BYTES_MAX);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) buf_str(&both, parts[i]);
    if (!both.failed) joined = cJSON_CreateString(both.data ? both.data : "");
    buf_close(&both);
    if (joined && node && cJSON_ReplaceItemInObjectCaseSensitive(w->open, name, joined)) return 0;
    if (!node) return put(w, w->open, name, joined);
    cJSON_Delete(joined);
    return oai_no_memory(w->r);
}

int oai_rewrite_thought(struct oai_rewrite *w, const char *text) {
    bool joins = w->open && (w->whole || (!w->thinks && !w->speaks && !w->calls));
    if ((!joins && open_answer(w)) || add_text(w, "reasoning_content", "\n", text)) return -1;
    w->thinks = true;
    return 0;
}

/* Text behind calls joins the text before them, as in the messages of chats. */
int oai_rewrite_answer(struct oai_rewrite *w, const char *text) {
    bool joins = w->open && (w->whole || !w->speaks || w->calls);
    if ((!joins && open_answer(w)) || add_text(w, "content", w->calls ? "" : "\n", text)) return -1;
    w->speaks = true;
    return 0;
}

int oai_rewrite_call(struct oai_rewrite *w, const char *id, const char *name,
                     const cJSON *arguments) {
    cJSON *call = cJSON_CreateObject(), *function = NULL;
    int rc = call && (w->open || !open_answer(w)) ? 0 : oai_no_memory(w->r);
    if (!rc && !w->calls) rc = put(w, w->open, "tool_calls", cJSON_CreateArray());
    if (rc ||
        !cJSON_AddItemToArray(cJSON_GetObjectItemCaseSensitive(w->open, "tool_calls"), call)) {
        cJSON_Delete(call);
        return oai_no_memory(w->r);
    }
    w->calls = true;
    if (put_text(w, call, "id", id) || put_text(w, call, "type", "function")) return -1;
    function = cJSON_AddObjectToObject(call, "function");
    if (!function) return oai_no_memory(w->r);
    if (put_text(w, function, "name", name)) return -1;
    /* a copy: the tree of a stored response goes before the chat */
    return put(w, function, "arguments", cJSON_Duplicate(arguments, true));
}
