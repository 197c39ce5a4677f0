#include "server/oai/edits.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"

/* Limits for an edit that gives none. */
enum { TRIGGER_TOKENS = 100000, KEEP_USES = 3, KEEP_TURNS = 1 };

static const char uses_type[] = "clear_tool_uses_20250919",
                  turns_type[] = "clear_thinking_20251015";

#define EACH_BLOCK(w, message, block)                                                              \
    cJSON_ArrayForEach(message, json_get((w)->body, "messages"))                                   \
        cJSON_ArrayForEach(block, json_get(message, "content"))

static const char *edits_text_of(const cJSON *node, const char *key) {
    const cJSON *text = json_get(node, key);
    return cJSON_IsString(text) ? text->valuestring : "";
}

/* Returns the value of {"type": ..., "value": number}. */
static double limit_of(const cJSON *edit, const char *key, double otherwise) {
    const cJSON *value = json_get(json_get(edit, key), "value");
    return cJSON_IsNumber(value) && value->valuedouble >= 0 ? value->valuedouble : otherwise;
}

static bool has_name(const cJSON *names, const char *name) {
    const cJSON *child;
    bool found = false;
    cJSON_ArrayForEach(child, names) {
        found = found || (cJSON_IsString(child) && strcmp(child->valuestring, name) == 0);
    }
    return found;
}

/* Adds the tokens of a value's JSON text. Those of the template are not known yet. */
static int count_json_tokens(struct oai_rewrite *w, const cJSON *node, size_t *tokens) {
    struct engine_ids ids = {0};
    struct arena arena;
    struct fault fault;
    struct buf text;
    if (!node) return 0;
    arena_open(&arena, 64 * w->r->rules->body_bytes);
    buf_open(&text, 8 * w->r->rules->body_bytes);
    json_write_node(&text, node);
    bool failed = text.failed || engine_tokenize(w->r->rules->engine, text.data, text.size, false,
                                                 false, &arena, &ids, &fault);
    *tokens += ids.count;
    buf_close(&text);
    arena_close(&arena);
    return failed ? oai_no_memory(w->r) : 0;
}

/* ---- Results of tools ---- */

static int compare_drops(const void *a, const void *b) {
    return strcmp(((const struct oai_drop *)a)->id, ((const struct oai_drop *)b)->id);
}

const struct oai_drop *oai_edits_drop(const struct oai_rewrite *w, const char *id) {
    const struct oai_drop key = {.id = id};
    return w->drop_count ? bsearch(&key, w->drops, w->drop_count, sizeof key, compare_drops) : NULL;
}

/* Chooses the first `count` calls that are not of excluded tools, and counts their tokens. */
static int choose_drops(struct oai_rewrite *w, const cJSON *edit, size_t count) {
    const cJSON *inputs = json_get(edit, "clear_tool_inputs"), *message, *block;
    size_t *tokens = &w->r->out->edits.use_tokens;
    w->drops = arena_alloc(w->r->arena, count, sizeof *w->drops);
    if (!w->drops) return oai_no_memory(w->r);
    EACH_BLOCK(w, message, block) {
        const char *name = edits_text_of(block, "name");
        if (count == 0 || !oai_has_type(block, "tool_use")) continue;
        count--;
        if (has_name(json_get(edit, "exclude_tools"), name)) continue;
        w->drops[w->drop_count++] = (struct oai_drop){
            edits_text_of(block, "id"), cJSON_IsTrue(inputs) || has_name(inputs, name)};
    }
    qsort(w->drops, w->drop_count, sizeof *w->drops, compare_drops);
    EACH_BLOCK(w, message, block) {
        bool result = oai_has_type(block, "tool_result");
        const struct oai_drop *drop =
            oai_edits_drop(w, edits_text_of(block, result ? "tool_use_id" : "id"));
        if (drop && (result || drop->bare) &&
            count_json_tokens(w, json_get(block, result ? "content" : "input"), tokens))
            return -1;
    }
    return 0;
}

static int edit_uses(struct oai_rewrite *w, const cJSON *edit) {
    const cJSON *message, *block, *body = w->body;
    struct oai_edits *out = &w->r->out->edits;
    double keep = limit_of(edit, "keep", KEEP_USES);
    size_t uses = 0, size = 0;
    EACH_BLOCK(w, message, block) uses += oai_has_type(block, "tool_use");
    if ((double)uses <= keep) return 0;
    if (oai_has_type(json_get(edit, "trigger"), "tool_uses"))
        size = uses;
    else if (count_json_tokens(w, json_get(body, "system"), &size) ||
             count_json_tokens(w, json_get(body, "tools"), &size) ||
             count_json_tokens(w, json_get(body, "messages"), &size))
        return -1;
    if ((double)size <= limit_of(edit, "trigger", TRIGGER_TOKENS)) return 0;
    if (choose_drops(w, edit, uses - (size_t)keep)) return -1;
    if ((double)out->use_tokens < limit_of(edit, "clear_at_least", 0))
        w->drop_count = out->use_tokens = 0;
    out->uses = w->drop_count;
    return 0;
}

/* ---- Thoughts ---- */

/* Numbers the turns that have thoughts, from the last one on, and leaves out the thoughts beyond
 * the limit. A turn begins with a message of the user that has more than results. */
static int edit_turns(struct oai_rewrite *w, const cJSON *edit) {
    const cJSON *messages = json_get(w->body, "messages"), *message, *block;
    struct oai_edits *out = &w->r->out->edits;
    double keep = limit_of(edit, "keep", KEEP_TURNS);
    size_t seen = 0, at = cJSON_IsArray(messages) ? (size_t)cJSON_GetArraySize(messages) : 0;
    bool counted = false;
    if (cJSON_IsString(json_get(edit, "keep"))) return 0; /* "all" */
    for (message = at ? messages->child->prev : NULL; at > 0; at--, message = message->prev) {
        const cJSON *content = json_get(message, "content");
        bool user = strcmp(edits_text_of(message, "role"), "user") == 0;
        if (user && !cJSON_IsArray(content)) counted = false;
        cJSON_ArrayForEach(block, content) {
            if (user && !oai_has_type(block, "tool_result")) counted = false;
            if (user || !oai_has_type(block, "thinking")) continue;
            seen += !counted;
            counted = true;
            if ((double)seen <= keep) continue;
            if (!w->thoughts_from) w->thoughts_from = at;
            if (count_json_tokens(w, json_get(block, "thinking"), &out->turn_tokens)) return -1;
        }
    }
    out->turns = (double)seen > keep ? seen - (size_t)keep : 0;
    return 0;
}

/* ---- All ---- */

int oai_edits_read(struct oai_rewrite *w) {
    const cJSON *given = json_get(w->body, "context_management"), *edit;
    w->r->out->edits.asked = cJSON_IsObject(given);
    cJSON_ArrayForEach(edit, json_get(given, "edits")) {
        if ((oai_has_type(edit, uses_type) && !w->drops && edit_uses(w, edit)) ||
            (oai_has_type(edit, turns_type) && !w->thoughts_from && edit_turns(w, edit)))
            return -1;
    }
    return 0;
}

void oai_edits_write(struct buf *out, const struct oai_request *request, size_t tokens) {
    const struct oai_edits *edits = &request->edits;
    if (!edits->asked) return;
    buf_str(out, ",\"context_management\":{");
    if (tokens)
        buf_fmt(out, "\"original_input_tokens\":%zu",
                tokens + edits->use_tokens + edits->turn_tokens);
    else
        buf_str(out, "\"applied_edits\":[");
    if (!tokens && edits->turns)
        buf_fmt(out,
                "{\"type\":\"%s\",\"cleared_thinking_turns\":%zu,\"cleared_input_tokens\":%zu}%s",
                turns_type, edits->turns, edits->turn_tokens, edits->uses ? "," : "");
    if (!tokens && edits->uses)
        buf_fmt(out, "{\"type\":\"%s\",\"cleared_tool_uses\":%zu,\"cleared_input_tokens\":%zu}",
                uses_type, edits->uses, edits->use_tokens);
    buf_str(out, tokens ? "}" : "]}");
}
