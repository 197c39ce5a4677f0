#include "text/contents.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"

#define EXPANDED_BYTES_MAX ((size_t)64 << 20)

static int no_memory(struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the pictures of the chat");
}

/* --- parts --- */

static bool add_part(cJSON *parts, const char *type, const char *text, size_t size) {
    cJSON *part = cJSON_CreateObject(), *string = NULL;
    char *copy = NULL;
    bool ok = part && cJSON_AddStringToObject(part, "type", type);
    if (ok && text) {
        copy = strndup(text, size);
        string = copy ? cJSON_CreateString(copy) : NULL;
        ok = string && cJSON_AddItemToObject(part, "text", string);
        if (!ok) cJSON_Delete(string);
        free(copy);
    }
    if (ok && cJSON_AddItemToArray(parts, part)) return true;
    cJSON_Delete(part);
    return false;
}

/* Cuts the content at the places of its pictures. A content without pictures is one part, also if
 * it is empty: templates look at the first. */
static cJSON *divide_content(const char *content, const cJSON *ends) {
    const size_t size = strlen(content);
    size_t at = 0;
    const cJSON *end;
    cJSON *parts = cJSON_CreateArray();
    bool ok = parts != NULL;
    cJSON_ArrayForEach(end, ends) {
        const size_t behind = (size_t)end->valuedouble;
        const size_t place = behind < size - at ? size - behind : at;
        if (place > at) ok = ok && add_part(parts, "text", content + at, place - at);
        ok = ok && add_part(parts, "image", NULL, 0);
        at = place;
    }
    if (ok && (at < size || !parts->child)) ok = add_part(parts, "text", content + at, size - at);
    if (ok) return parts;
    cJSON_Delete(parts);
    return NULL;
}

static bool is_divided(const cJSON *message, bool lists) {
    return cJSON_IsObject(message) && cJSON_IsString(json_get(message, "content")) &&
           (lists || json_get(message, TEXT_PICTURE_ENDS));
}

/* A message with copies of the members of another and a content in parts. */
static cJSON *divide_message(const cJSON *message) {
    const cJSON *member;
    cJSON *copy = cJSON_CreateObject();
    bool ok = copy != NULL;
    cJSON_ArrayForEach(member, message) {
        if (strcmp(member->string, TEXT_PICTURE_ENDS) == 0) continue;
        if (strcmp(member->string, "content") == 0) {
            cJSON *parts =
                divide_content(member->valuestring, json_get(message, TEXT_PICTURE_ENDS));
            ok = ok && parts && cJSON_AddItemToObject(copy, "content", parts);
            if (!ok) cJSON_Delete(parts);
        } else {
            cJSON *own = cJSON_Duplicate(member, true);
            ok = ok && own && cJSON_AddItemToObject(copy, member->string, own);
            if (!ok) cJSON_Delete(own);
        }
        if (!ok) break;
    }
    if (ok) return copy;
    cJSON_Delete(copy);
    return NULL;
}

bool contents_divide(cJSON *context, bool lists) {
    const cJSON *messages = json_get(context, "messages"), *message;
    bool any = false;
    cJSON_ArrayForEach(message, messages) any = any || is_divided(message, lists);
    if (!any) return true;
    cJSON *list = cJSON_CreateArray();
    bool ok = list != NULL;
    cJSON_ArrayForEach(message, messages) {
        if (!ok) break;
        if (!is_divided(message, lists)) {
            ok = cJSON_AddItemReferenceToArray(list, (cJSON *)(uintptr_t)message);
            continue;
        }
        cJSON *copy = divide_message(message);
        ok = copy && cJSON_AddItemToArray(list, copy);
        if (!ok) cJSON_Delete(copy);
    }
    if (ok && cJSON_ReplaceItemInObjectCaseSensitive(context, "messages", list)) return true;
    cJSON_Delete(list);
    return false;
}

/* --- marks --- */

static bool overlaps(const struct tok_span *span, size_t begin, size_t end) {
    return span->begin < end && span->end > begin;
}

/* A place of the rendered text, and the first untrusted range that may lie behind it. */
struct contents_walk {
    const struct chat_text *rendered;
    size_t at, span;
};

/* Goes to the next mark that the template has written; false: there is none. */
static bool next_mark(struct contents_walk *walk, const char *mark, size_t size) {
    const struct chat_text *rendered = walk->rendered;
    for (;;) {
        const char *found =
            memmem(rendered->text + walk->at, rendered->size - walk->at, mark, size);
        if (!found) return false;
        walk->at = (size_t)(found - rendered->text);
        while (walk->span < rendered->untrusted_count &&
               rendered->untrusted[walk->span].end <= walk->at)
            walk->span++;
        if (walk->span == rendered->untrusted_count ||
            !overlaps(&rendered->untrusted[walk->span], walk->at, walk->at + size))
            return true;
        walk->at++;
    }
}

static int count_marks(const struct chat_text *rendered, const char *mark) {
    struct contents_walk walk = {.rendered = rendered};
    int count = 0;
    while (next_mark(&walk, mark, strlen(mark))) {
        walk.at += strlen(mark);
        count++;
    }
    return count;
}

/* Moves the untrusted ranges that end at or before `until` of the old text to their new places. */
static void move_spans(struct chat_text *rendered, struct contents_walk *moved, size_t until,
                       size_t by) {
    for (; moved->span < rendered->untrusted_count && rendered->untrusted[moved->span].end <= until;
         moved->span++) {
        rendered->untrusted[moved->span].begin += by;
        rendered->untrusted[moved->span].end += by;
    }
}

int contents_expand(struct chat_text *rendered, const struct text_pictures *pictures,
                    struct arena *arena, struct fault *fault) {
    const char *mark = picture_mark(pictures->kind);
    const size_t size = strlen(mark);
    const int shown = count_marks(rendered, mark);
    const struct chat_text old = *rendered;
    struct tok_span *spans = arena_alloc(arena, old.untrusted_count + 1, sizeof *spans);
    struct contents_walk walk = {.rendered = &old}, moved = {0};
    struct buf text;
    size_t from = 0;
    if (shown != pictures->count)
        return fault_set(fault, ERR_INVALID, "messages",
                         "the chat template shows %d of %d pictures", shown, pictures->count);
    if (!spans) return no_memory(fault);
    if (old.untrusted_count) memcpy(spans, old.untrusted, old.untrusted_count * sizeof *spans);
    rendered->untrusted = spans;
    buf_open(&text, EXPANDED_BYTES_MAX);
    for (int i = 0; i < shown && next_mark(&walk, mark, size); i++) {
        move_spans(rendered, &moved, walk.at, text.size - from);
        buf_add(&text, old.text + from, walk.at - from);
        picture_write_prompt(pictures->kind, pictures->pictures[i], &text);
        from = walk.at += size;
    }
    move_spans(rendered, &moved, old.size, text.size - from);
    buf_add(&text, old.text + from, old.size - from);
    rendered->text = text.failed ? NULL : arena_strndup(arena, text.data, text.size);
    rendered->size = text.size;
    buf_close(&text);
    return rendered->text ? 0 : no_memory(fault);
}

/* --- rows --- */

int contents_find_mark(const struct tok *tok, enum picture_kind kind, struct arena *arena,
                       int32_t *id, struct fault *fault) {
    const char *mark = picture_mark(kind);
    struct tok_ids ids = {0};
    int rc = tok_encode(tok, mark, strlen(mark), TOK_SPECIALS, NULL, 0, 16, arena, &ids, fault);
    if (rc) return rc;
    if (ids.count != 1)
        return fault_set(fault, ERR_UNSUPPORTED, "messages",
                         "the tokenizer has no token %s, so no picture can be shown", mark);
    *id = ids.ids[0];
    return 0;
}

static int wrong_rows(struct fault *fault, const char *mark) {
    return fault_set(fault, ERR_INVALID, "messages",
                     "with pictures, no text may have the model's mark of a picture, %s", mark);
}

int contents_find_rows(const struct tok *tok, const struct tok_ids *ids,
                       struct text_pictures *pictures, struct arena *arena, struct fault *fault) {
    const char *mark = picture_mark(pictures->kind);
    size_t at = 0;
    int32_t id = -1;
    size_t runs = 0;
    int rc = contents_find_mark(tok, pictures->kind, arena, &id, fault);
    for (int i = 0; i < pictures->count; i++) {
        const struct picture *picture = pictures->pictures[i];
        const int run = picture_run(pictures->kind, picture);
        runs += (size_t)picture->tiles * (size_t)(picture->tile_tokens / run);
    }
    if (rc) return rc;
    pictures->rows = arena_alloc(arena, runs + 1, sizeof *pictures->rows);
    if (!pictures->rows) return no_memory(fault);
    for (int i = 0; i < pictures->count; i++) {
        const struct picture *picture = pictures->pictures[i];
        const int run = picture_run(pictures->kind, picture);
        for (int row = 0; row < picture->tiles * picture->tile_tokens; row += run) {
            const int tile = row / picture->tile_tokens, first = row % picture->tile_tokens;
            while (at < ids->count && ids->ids[at] != id) at++;
            at += (size_t)picture_marks_before(pictures->kind);
            pictures->rows[pictures->row_count++] = (struct picture_rows){at, run, i, tile, first};
            for (int k = 0; k < run; k++, at++)
                if (at >= ids->count || ids->ids[at] != id) return wrong_rows(fault, mark);
        }
    }
    while (at < ids->count && ids->ids[at] != id) at++;
    return at == ids->count ? 0 : wrong_rows(fault, mark);
}
