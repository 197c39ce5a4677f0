#include "server/oai/stored.h"

#include <string.h>

#include "base/json.h"
#include "server/limits.h"
#include "server/oai/fields.h"

#define MEMBERS_MAX 4

struct item_type {
    const char *type;
    const char *members[MEMBERS_MAX]; /* as far as there are any */
};

static const struct item_type types[] = {
    {"message", {"role", "content"}},
    {"reasoning", {"content"}},
    {"function_call", {"call_id", "name", "namespace", "arguments"}},
    {"function_call_output", {"call_id", "output"}},
    {"custom_tool_call", {"call_id", "name", "namespace", "input"}},
    {"custom_tool_call_output", {"call_id", "output"}},
};

static bool stored_is_word(const cJSON *node, const char *word) {
    return cJSON_IsString(node) && strcmp(node->valuestring, word) == 0;
}

bool oai_item_is_foreign(const cJSON *item) {
    static const char *const foreign[] = {
        "apply_patch_call",        "apply_patch_call_output",
        "code_interpreter_call",   "compaction",
        "compaction_trigger",      "computer_call",
        "computer_call_output",    "file_search_call",
        "image_generation_call",   "local_shell_call",
        "local_shell_call_output", "mcp_approval_request",
        "mcp_approval_response",   "mcp_call",
        "mcp_list_tools",          "program",
        "program_output",          "shell_call",
        "shell_call_output",       "tool_search_call",
        "tool_search_output",      "web_search_call",
    };
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (stored_is_word(json_get(item, "type"), foreign[i])) return true;
    return false;
}

static const struct item_type *type_of(const cJSON *item) {
    const cJSON *type = json_get(item, "type");
    for (size_t i = 0; cJSON_IsString(type) && i < sizeof types / sizeof *types; i++)
        if (strcmp(type->valuestring, types[i].type) == 0) return &types[i];
    return &types[0];
}

/* Writes a part of text. */
static void write_text_part(struct buf *out, const char *type, const cJSON *text) {
    buf_fmt(out, "{\"type\":\"%s\",\"text\":", type);
    json_write_node(out, text);
    if (strcmp(type, "output_text") == 0) buf_str(out, ",\"annotations\":[]");
    buf_char(out, '}');
}

/* Writes a part as `type`. For a part that is not text, the text is stored that replaced it in the
 * prompt. */
static void stored_write_part(struct buf *out, const char *type, const cJSON *part) {
    const cJSON *own = json_get(part, "type"), *text = json_get(part, "text");
    if (stored_is_word(own, "refusal")) {
        buf_str(out, "{\"type\":\"refusal\",\"refusal\":");
        json_write_node(out, json_get(part, "refusal"));
        buf_char(out, '}');
    } else if (text) {
        write_text_part(out, type, text);
    } else {
        cJSON instead = {.type = cJSON_String,
                         .valuestring = (char *)(uintptr_t)oai_left_out(own->valuestring)};
        write_text_part(out, type, &instead);
    }
}

/* Returns the type of an item's parts. */
static const char *part_type(const cJSON *item, const struct item_type *type) {
    if (strcmp(type->type, "reasoning") == 0) return "reasoning_text";
    return stored_is_word(json_get(item, "role"), "assistant") ? "output_text" : "input_text";
}

/* Writes a string, or an array of parts of type `as`. Clients expect that the content of a stored
 * message or thought is always an array of parts. */
static void write_value(struct buf *out, const cJSON *value, const char *as) {
    const cJSON *part;
    bool content = strcmp(value->string, "content") == 0;
    if (!cJSON_IsArray(value) && !content) {
        json_write_node(out, value);
        return;
    }
    buf_char(out, '[');
    if (cJSON_IsString(value)) write_text_part(out, as, value);
    cJSON_ArrayForEach(part, value) {
        if (part != value->child) buf_char(out, ',');
        stored_write_part(out, as, part);
    }
    buf_char(out, ']');
}

static void stored_write_id(struct buf *out, const cJSON *item, int place) {
    const cJSON *id = json_get(item, "id");
    if (cJSON_IsString(id) && strlen(id->valuestring) <= OAI_ID_BYTES)
        json_write_node(out, id);
    else
        buf_fmt(out, "\"item_%d\"", place);
}

static void stored_write_item(struct buf *out, const cJSON *item, const struct item_type *type,
                              int place) {
    bool cut = stored_is_word(json_get(item, "status"), "incomplete");
    buf_str(out, "{\"id\":");
    stored_write_id(out, item, place);
    buf_fmt(out, ",\"type\":\"%s\",\"status\":\"%s\"", type->type,
            cut ? "incomplete" : "completed");
    if (strcmp(type->type, "reasoning") == 0) buf_str(out, ",\"summary\":[]");
    for (int i = 0; i < MEMBERS_MAX && type->members[i]; i++) {
        const cJSON *member = json_get(item, type->members[i]);
        if (!member) continue;
        buf_fmt(out, ",\"%s\":", type->members[i]);
        write_value(out, member, part_type(item, type));
    }
    buf_char(out, '}');
}

static bool is_empty_thought(const cJSON *item, const struct item_type *type) {
    const cJSON *content = json_get(item, "content");
    if (strcmp(type->type, "reasoning") != 0) return false;
    return !content || (cJSON_IsArray(content) && !content->child);
}

void oai_store_items(struct buf *out, const cJSON *list, int *place) {
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        const struct item_type *type = type_of(item);
        if (is_empty_thought(item, type) || oai_item_is_foreign(item)) continue;
        if (out->size) buf_char(out, ',');
        stored_write_item(out, item, type, (*place)++);
    }
}

/* ---- Pages ---- */

/* A list of items in its text. Pages are made on the loop thread, and a list may have megabytes; so
 * it is scanned for the ends of its items and not parsed. oai_store_items wrote it. */
struct span {
    size_t at, size;
};

struct item_list {
    const char *text;
    const struct span *items;
    int count;
};

enum { ID_AT = 6 }; /* an item begins with {"id": */

/* Returns the end of the value at `at`: the comma after it, or `end`. */
static size_t value_end(const char *text, size_t at, size_t end) {
    bool quoted = false;
    int depth = 0;
    for (; at < end && (text[at] != ',' || quoted || depth > 0); at++) {
        if (quoted && text[at] == '\\')
            at++;
        else if (text[at] == '"')
            quoted = !quoted;
        else if (!quoted && (text[at] == '{' || text[at] == '['))
            depth++;
        else if (!quoted && (text[at] == '}' || text[at] == ']'))
            depth--;
    }
    return at < end ? at : end;
}

static void find_items(struct buf *spans, const char *text, size_t size) {
    for (size_t at = 0; at < size;) {
        struct span item = {at, value_end(text, at, size) - at};
        buf_add(spans, &item, sizeof item);
        at += item.size + 1;
    }
}

/* Returns an item's id in quotes; it is the first member. */
static struct span id_of(const struct item_list *list, int i) {
    const struct span *item = &list->items[i];
    size_t at = item->at + ID_AT;
    return (struct span){at, value_end(list->text, at, item->at + item->size) - at};
}

/* Finds an item: only an item begins with an id, no object inside it does, and quotes in strings
 * are escaped. */
size_t oai_find_stored_item(const char *items, size_t size, const char *id, size_t *at) {
    struct buf begin;
    size_t found = 0;
    buf_open(&begin, 6 * strlen(id) + 16);
    buf_str(&begin, "{\"id\":");
    json_write_str(&begin, id, strlen(id));
    buf_char(&begin, ',');
    const char *item = begin.failed ? NULL : memmem(items, size, begin.data, begin.size);
    buf_close(&begin);
    if (!item) return 0;
    *at = (size_t)(item - items);
    found = value_end(items, *at, size) - *at;
    return found;
}

size_t oai_skip_stored_events(const char *events, size_t size, uint64_t count) {
    static const char end[] = {'\n', '\n'}; /* strings inside have escaped line breaks */
    size_t at = 0;
    for (uint64_t i = 0; i < count && at < size; i++) {
        const char *found = memmem(events + at, size - at, end, sizeof end);
        at = found ? (size_t)(found - events) + sizeof end : size;
    }
    return at;
}

static int nth(const struct item_list *list, int n, bool descending) {
    return descending ? list->count - 1 - n : n;
}

/* Returns how many items precede the page, or -1: there is no such item. */
static int find_after(const struct item_list *list, const char *id, bool descending) {
    int found = -1;
    struct buf quoted;
    buf_open(&quoted, 6 * strlen(id) + 3);
    json_write_str(&quoted, id, strlen(id));
    for (int n = 0; n < list->count; n++) {
        struct span one = id_of(list, nth(list, n, descending));
        if (one.size == quoted.size && memcmp(list->text + one.at, quoted.data, one.size) == 0)
            found = n + 1;
    }
    buf_close(&quoted);
    return found;
}

static void write_page_end(struct buf *out, const char *name, const struct item_list *list, int i) {
    buf_fmt(out, ",\"%s\":", name);
    if (i >= 0) {
        struct span id = id_of(list, i);
        buf_add(out, list->text + id.at, id.size);
    } else {
        buf_str(out, "null");
    }
}

static void write_page(struct buf *out, const struct item_list *list, int first,
                       const struct oai_page *page) {
    int end = list->count;
    bool down = page->descending;
    if (page->limit > 0 && page->limit < end - first) end = first + page->limit;
    buf_str(out, "{\"object\":\"list\",\"data\":[");
    for (int n = first; n < end; n++) {
        const struct span *item = &list->items[nth(list, n, down)];
        if (n > first) buf_char(out, ',');
        buf_add(out, list->text + item->at, item->size);
    }
    buf_char(out, ']');
    write_page_end(out, "first_id", list, first < end ? nth(list, first, down) : -1);
    write_page_end(out, "last_id", list, first < end ? nth(list, end - 1, down) : -1);
    buf_fmt(out, ",\"has_more\":%s}", end < list->count ? "true" : "false");
}

int oai_write_page(struct buf *out, const char *items, size_t size, const struct oai_page *page) {
    struct buf spans;
    int rc = 0, first = 0;
    buf_open(&spans, (size + 1) * sizeof(struct span));
    find_items(&spans, items, size);
    const struct item_list list = {items, (const struct span *)(const void *)spans.data,
                                   (int)(spans.size / sizeof(struct span))};
    if (spans.failed) rc = ERR_NOMEM;
    if (rc == 0 && page->after && (first = find_after(&list, page->after, page->descending)) < 0)
        rc = ERR_NOTFOUND;
    if (rc == 0) write_page(out, &list, first, page);
    buf_close(&spans);
    return rc;
}
