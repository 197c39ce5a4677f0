#include "server/oai/rewrite.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"

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

bool oai_has_type(const cJSON *node, const char *type) {
    const cJSON *own = json_get(node, "type");
    return cJSON_IsString(own) && strcmp(own->valuestring, type) == 0;
}

static int put(struct oai_rewrite *w, cJSON *object, const char *name, cJSON *item) {
    if (item && cJSON_AddItemToObject(object, name, item)) return 0;
    cJSON_Delete(item);
    return oai_no_memory(w->r);
}

static int put_text(struct oai_rewrite *w, cJSON *object, const char *name, const char *text) {
    return put(w, object, name, cJSON_CreateString(text));
}

/* Adds a reference to a node of another tree, which outlives this one. */
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

/* --- tools --- */

/* Returns the number of tools, including those inside of other tools. */
static int count_tools(const cJSON *tools) {
    const cJSON *tool;
    int count = 0;
    cJSON_ArrayForEach(tool, tools) {
        const cJSON *inner = json_get(tool, "tools");
        count += 1 + (cJSON_IsArray(inner) ? cJSON_GetArraySize(inner) : 0);
    }
    return count;
}

int oai_rewrite_tools(struct oai_rewrite *w,
                      int (*add)(struct oai_rewrite *w, const cJSON *tool, const char *path)) {
    const cJSON *tools = json_get(w->body, "tools"), *tool;
    char path[OAI_PATH];
    int i = 0;
    if (!tools) return 0;
    if (!cJSON_IsArray(tools)) return oai_expected(w->r->error, "tools", "an array", tools);
    w->tool_places = count_tools(tools);
    if (w->tool_places > OAI_TOOLS_MAX)
        return oai_invalid(w->r, "tools", "expected at most %d tools, found %d", OAI_TOOLS_MAX,
                           w->tool_places);
    w->origins = arena_alloc(w->r->arena, (size_t)w->tool_places + 1, sizeof *w->origins);
    if (!w->origins || oai_rewrite_put(w, "tools", cJSON_CreateArray())) return oai_no_memory(w->r);
    cJSON_ArrayForEach(tool, tools) {
        oai_path(path, "tools[%d]", i++);
        if (!cJSON_IsObject(tool)) return oai_expected(w->r->error, path, "an object", tool);
        if (add(w, tool, path)) return -1;
    }
    w->r->out->origins = w->origins;
    w->r->out->origin_count = w->tool_count;
    return 0;
}

static bool is_known(const struct oai_rewrite *w, const char *name) {
    for (int i = 0; i < w->tool_count; i++)
        if (strcmp(w->origins[i].known, name) == 0) return true;
    return false;
}

/* Chooses the name by which the model knows a tool: the client's name, with the namespace in front
 * if another tool has that name. */
static const char *choose_name(const struct oai_rewrite *w, const struct oai_tool_origin *tool) {
    if (!tool->space || !is_known(w, tool->name)) return tool->name;
    size_t size = strlen(tool->space) + strlen(tool->name) + 3;
    char *both = arena_alloc(w->r->arena, size, 1);
    if (both) snprintf(both, size, "%s__%s", tool->space, tool->name);
    return both;
}

static bool copy_text(struct oai_rewrite *w, const char **text) {
    if (*text) *text = arena_strndup(w->r->arena, *text, strlen(*text));
    return *text != NULL;
}

int oai_rewrite_tool(struct oai_rewrite *w, const struct oai_tool_origin *origin, const char *path,
                     cJSON **function) {
    cJSON *list = cJSON_GetObjectItemCaseSensitive(w->chat, "tools"), *copy = cJSON_CreateObject();
    struct oai_tool_origin *own = &w->origins[w->tool_count];
    *own = *origin;
    own->path = path;
    if (!copy || !cJSON_AddItemToArray(list, copy)) {
        cJSON_Delete(copy);
        return oai_no_memory(w->r);
    }
    if (!copy_text(w, &own->path) || !copy_text(w, &own->name) ||
        (own->space && !copy_text(w, &own->space)))
        return oai_no_memory(w->r);
    own->known = choose_name(w, own);
    *function = own->known && !put_text(w, copy, "type", "function")
                    ? cJSON_AddObjectToObject(copy, "function")
                    : NULL;
    if (!*function || put_text(w, *function, "name", own->known)) return oai_no_memory(w->r);
    w->tool_count++;
    return 0;
}

int oai_rewrite_defer(struct oai_rewrite *w) {
    const cJSON *list = json_get(w->chat, "tools");
    return put(w, list->child->prev, OAI_DEFERRED, cJSON_CreateBool(true));
}

static bool is_same(const char *a, const char *b) {
    return a && b ? strcmp(a, b) == 0 : a == b;
}

const char *oai_rewrite_name(const struct oai_rewrite *w, const char *space, const char *name) {
    for (int i = 0; i < w->tool_count; i++)
        if (is_same(w->origins[i].space, space) && strcmp(w->origins[i].name, name) == 0)
            return w->origins[i].known;
    return name;
}

#define LEFT_OUT_MAX 64 /* types of tools that are logged; later ones are not */

void oai_rewrite_leave_out(const char *type) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char noted[LEFT_OUT_MAX][33];
    static int count;
    char name[sizeof noted[0]];
    bool fresh = true;
    snprintf(name, sizeof name, "%s", type);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++) fresh &= strcmp(noted[i], name) != 0;
    fresh &= count < LEFT_OUT_MAX;
    if (fresh) memcpy(noted[count++], name, sizeof name);
    pthread_mutex_unlock(&lock);
    if (fresh)
        log_warn("a request has tools of type '%s', which keepd does not run: they are left out of "
                 "prompts (said once)",
                 name);
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
    const struct oai_part_type *t = types;
    for (; t->type; t++) {
        if (!t->member) continue;
        if (strcmp(type, t->type) == 0) return oai_rewrite_string(w, part, path, t->member, text);
        if (at < sizeof known)
            at +=
                (size_t)snprintf(known + at, sizeof known - at, "%s'%s'", at ? ", " : "", t->type);
    }
    if (t->member) {
        *text = oai_left_out(type);
        return 0;
    }
    oai_path(field, "%s.type", path);
    return oai_rewrite_refuse(w, field, "only parts of type %s are served here, found '%.32s'",
                              known, type);
}

static int add_rewrite_place(struct oai_rewrite *w, size_t at) {
    if (!w->places) w->places = cJSON_AddArrayToObject(w->chat, ENGINE_CHAT_PICTURE_ENDS);
    cJSON *place = cJSON_CreateNumber((double)at);
    if (place && cJSON_AddItemToArray(w->places, place)) return 0;
    cJSON_Delete(place);
    return oai_no_memory(w->r);
}

int oai_rewrite_picture(struct oai_rewrite *w, const cJSON *part, const char *path, size_t at) {
    if (oai_add_picture(w->r, part, path)) return -1;
    struct oai_picture *picture = &w->r->out->pictures[w->r->out->picture_count - 1];
    /* a copy, because the tree of a stored response is freed before the chat */
    picture->base64 = arena_strndup(w->r->arena, picture->base64, picture->size);
    return picture->base64 ? add_rewrite_place(w, at) : oai_no_memory(w->r);
}

int oai_rewrite_base64(struct oai_rewrite *w, const cJSON *node, const char *path) {
    return oai_add_base64(w->r, node, path) ? -1 : add_rewrite_place(w, 0);
}

/* Moves the places of pictures into the message, counted from the end of its text. */
static int put_places(struct oai_rewrite *w, cJSON *message, const char *text) {
    const double size = (double)strlen(text);
    cJSON *place, *places = w->places;
    w->places = NULL;
    if (!places) return 0;
    cJSON_ArrayForEach(place, places) cJSON_SetNumberValue(place, size - place->valuedouble);
    cJSON_DetachItemViaPointer(w->chat, places);
    return put(w, message, ENGINE_CHAT_PICTURE_ENDS, places);
}

static bool lists_picture(const struct oai_rewrite *w, const struct oai_part_type *types,
                          const cJSON *part) {
    for (const struct oai_part_type *t = types; t->type; t++)
        if (!t->member && oai_has_type(part, t->type)) return oai_is_picture(w->r, part);
    return false;
}

static int join(struct oai_rewrite *w, const cJSON *parts, const char *path,
                const struct oai_part_type *types, struct buf *out) {
    const cJSON *part;
    const char *text;
    char field[OAI_PATH];
    bool after_text = false;
    int i = 0;
    cJSON_ArrayForEach(part, parts) {
        oai_path(field, "%s[%d]", path, i++);
        const bool picture = lists_picture(w, types, part);
        if (picture ? oai_rewrite_picture(w, part, field, out->size)
                    : oai_rewrite_part(w, part, field, types, &text))
            return -1;
        if (after_text && !picture) buf_char(out, '\n');
        if (!picture) buf_str(out, text);
        after_text = !picture;
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
    w->answer = w->thought = (struct oai_joined){0};
    w->thinks = w->speaks = w->calls = false;
    return put_text(w, message, "role", role) ? NULL : message;
}

int oai_rewrite_message(struct oai_rewrite *w, const char *role, const char *text) {
    cJSON *message = add_message(w, role);
    if (!message || put_text(w, message, "content", text)) return -1;
    return put_places(w, message, text);
}

int oai_rewrite_result(struct oai_rewrite *w, const char *call, const char *text) {
    cJSON *message = add_message(w, "tool");
    if (!message || put_text(w, message, "tool_call_id", call)) return -1;
    return put_text(w, message, "content", text) || put_places(w, message, text) ? -1 : 0;
}

/* Opens a message of the assistant, to which parts are added. */
static int open_answer(struct oai_rewrite *w) {
    cJSON *message = add_message(w, "assistant");
    w->open = message;
    return message ? put(w, message, "content", cJSON_CreateNull()) : -1;
}

static int begin_text(struct oai_rewrite *w, struct oai_joined *joined, const char *name) {
    cJSON_DeleteItemFromObjectCaseSensitive(w->open, name); /* null */
    if (put_text(w, w->open, name, "")) return -1;
    *joined =
        (struct oai_joined){.node = cJSON_GetObjectItemCaseSensitive(w->open, name), .room = 1};
    return 0;
}

/* Makes room for more text. The memory doubles, so joining n bytes takes time in proportion to n,
 * however many parts there are. */
static bool reserve_text(struct oai_joined *joined, size_t more) {
    size_t needed = joined->size + more + 1, room = joined->room;
    if (needed > TEXT_BYTES_MAX) return false;
    while (room < needed) room *= 2;
    if (room == joined->room) return true;
    char *text = mem_try_realloc(joined->node->valuestring, joined->room, room);
    if (!text) return false;
    joined->node->valuestring = text;
    joined->room = room;
    return true;
}

static void append_text(struct oai_joined *joined, const char *text, size_t size) {
    memcpy(joined->node->valuestring + joined->size, text, size);
    joined->size += size;
    joined->node->valuestring[joined->size] = '\0';
}

/* Adds text to a member, after the text that it has and `between`. */
static int add_text(struct oai_rewrite *w, struct oai_joined *joined, const char *name,
                    const char *between, const char *text) {
    size_t gap = joined->node ? strlen(between) : 0, size = strlen(text);
    if (!joined->node && begin_text(w, joined, name)) return -1;
    if (!reserve_text(joined, gap + size)) return oai_no_memory(w->r);
    append_text(joined, between, gap);
    append_text(joined, text, size);
    return 0;
}

int oai_rewrite_thought(struct oai_rewrite *w, const char *text) {
    bool joins = w->open && (w->whole || (!w->thinks && !w->speaks && !w->calls));
    if ((!joins && open_answer(w)) || add_text(w, &w->thought, "reasoning_content", "\n", text))
        return -1;
    w->thinks = true;
    return 0;
}

/* Adds text to the assistant's message. Text after calls joins the text before them, as in the
 * messages of chats. */
int oai_rewrite_answer(struct oai_rewrite *w, const char *text) {
    bool joins = w->open && (w->whole || !w->speaks || w->calls);
    if ((!joins && open_answer(w)) ||
        add_text(w, &w->answer, "content", w->calls ? "" : "\n", text))
        return -1;
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
    /* a copy, because the tree of a stored response is freed before the chat */
    cJSON *copy = arguments ? cJSON_Duplicate(arguments, true) : cJSON_CreateObject();
    return put(w, function, "arguments", copy);
}

int oai_rewrite_continue(struct oai_rewrite *w) {
    const cJSON *content = w->open ? json_get(w->open, "content") : NULL;
    const char *text = cJSON_IsString(content) ? content->valuestring : "";
    if (w->calls || !text[strspn(text, " \t\r\n")]) return 0;
    return oai_rewrite_put(w, "continue_final_message", cJSON_CreateBool(true));
}
