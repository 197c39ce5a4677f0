#include "server/oai/stored.h"

#include <string.h>

#include "base/json.h"
#include "server/limits.h"

#define MEMBERS_MAX 3

struct item_type {
    const char *type;
    const char *members[MEMBERS_MAX]; /* as far as there are any */
};

static const struct item_type types[] = {
    {"message", {"role", "content"}},
    {"reasoning", {"content"}},
    {"function_call", {"call_id", "name", "arguments"}},
    {"function_call_output", {"call_id", "output"}},
};

static const struct item_type *type_of(const cJSON *item) {
    const cJSON *type = json_get(item, "type");
    for (size_t i = 0; cJSON_IsString(type) && i < sizeof types / sizeof *types; i++)
        if (strcmp(type->valuestring, types[i].type) == 0) return &types[i];
    return &types[0];
}

static bool is_word(const cJSON *node, const char *word) {
    return cJSON_IsString(node) && strcmp(node->valuestring, word) == 0;
}

static void write_part(struct buf *out, const cJSON *part) {
    const char *member = is_word(json_get(part, "type"), "refusal") ? "refusal" : "text";
    buf_str(out, "{\"type\":");
    json_write_node(out, json_get(part, "type"));
    buf_fmt(out, ",\"%s\":", member);
    json_write_node(out, json_get(part, member));
    buf_char(out, '}');
}

/* Writes a string, or an array of parts. */
static void write_value(struct buf *out, const cJSON *value) {
    const cJSON *part;
    if (!cJSON_IsArray(value)) {
        json_write_node(out, value);
        return;
    }
    buf_char(out, '[');
    cJSON_ArrayForEach(part, value) {
        if (part != value->child) buf_char(out, ',');
        write_part(out, part);
    }
    buf_char(out, ']');
}

static void write_id(struct buf *out, const cJSON *item, int place) {
    const cJSON *id = json_get(item, "id");
    if (cJSON_IsString(id) && strlen(id->valuestring) <= OAI_ID_BYTES)
        json_write_node(out, id);
    else
        buf_fmt(out, "\"item_%d\"", place);
}

static void write_item(struct buf *out, const cJSON *item, const struct item_type *type,
                       int place) {
    bool cut = is_word(json_get(item, "status"), "incomplete");
    buf_str(out, "{\"id\":");
    write_id(out, item, place);
    buf_fmt(out, ",\"type\":\"%s\",\"status\":\"%s\"", type->type,
            cut ? "incomplete" : "completed");
    if (strcmp(type->type, "reasoning") == 0) buf_str(out, ",\"summary\":[]");
    for (int i = 0; i < MEMBERS_MAX && type->members[i]; i++) {
        buf_fmt(out, ",\"%s\":", type->members[i]);
        write_value(out, json_get(item, type->members[i]));
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
        if (is_empty_thought(item, type)) continue;
        if (out->size) buf_char(out, ',');
        write_item(out, item, type, (*place)++);
    }
}

/* ---- Pages ---- */

static const cJSON *next_item(const cJSON *list, const cJSON *item, bool descending) {
    if (!item) return descending && list->child ? list->child->prev : list->child;
    if (!descending) return item->next;
    return item != list->child ? item->prev : NULL;
}

static const cJSON *find_item(const cJSON *list, const char *id, bool descending) {
    const cJSON *found = NULL;
    for (const cJSON *item = NULL; (item = next_item(list, item, descending)) != NULL;)
        if (is_word(json_get(item, "id"), id)) found = item;
    return found;
}

static void write_page_end(struct buf *out, const char *name, const cJSON *item) {
    buf_fmt(out, ",\"%s\":", name);
    if (item)
        json_write_node(out, json_get(item, "id"));
    else
        buf_str(out, "null");
}

static void write_page(struct buf *out, const cJSON *list, const cJSON *item,
                       const struct oai_page *page) {
    const cJSON *first = next_item(list, item, page->descending), *last = NULL;
    int count = 0;
    buf_str(out, "{\"object\":\"list\",\"data\":[");
    for (item = first; item && (page->limit == 0 || count < page->limit); count++) {
        if (count > 0) buf_char(out, ',');
        json_write_node(out, item);
        last = item;
        item = next_item(list, item, page->descending);
    }
    buf_char(out, ']');
    write_page_end(out, "first_id", first);
    write_page_end(out, "last_id", last);
    buf_fmt(out, ",\"has_more\":%s}", item ? "true" : "false");
}

int oai_write_page(struct buf *out, const char *items, size_t size, const struct oai_page *page) {
    const struct json_limits limits = {.bytes = size + 2, .depth = JSON_MAX_DEPTH, .nuls = true};
    struct buf text;
    cJSON *list = NULL;
    buf_open(&text, size + 2);
    buf_char(&text, '[');
    buf_add(&text, items, size);
    buf_char(&text, ']');
    int rc = text.failed ? ERR_NOMEM : json_parse(text.data, text.size, &limits, &list, NULL);
    const cJSON *item = NULL;
    if (rc == 0 && page->after && !(item = find_item(list, page->after, page->descending)))
        rc = ERR_NOTFOUND;
    if (rc == 0) write_page(out, list, item, page);
    json_free(list);
    buf_close(&text);
    return rc;
}
