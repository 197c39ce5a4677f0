#include "daemon/fit_chats.h"

#include <string.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "server/oai/fields.h"
#include "server/oai/oai.h"

#define CHAT_DEPTH     64
#define CHATS_SIZE_MAX ((size_t)128 << 20)
#define CHAT_ARENA_MAX ((size_t)1 << 20) /* the list of a chat's pictures */

static int add_picture(struct fit_chats *out, struct picture *picture) {
    if (out->picture_count == out->picture_room) {
        const size_t had = (size_t)out->picture_room * sizeof *out->pictures;
        struct picture **more =
            mem_try_realloc(out->pictures, had, 2 * had + 16 * sizeof *out->pictures);
        if (!more) return ERR_NOMEM;
        out->pictures = more;
        out->picture_room = 2 * out->picture_room + 16;
    }
    out->pictures[out->picture_count++] = picture;
    return 0;
}

static int fit_read_picture(const struct oai_picture *from, const struct picture_form *form,
                            struct fit_chats *out, struct fault *fault) {
    const int64_t deadline = clock_ns() + (int64_t)PICTURES_DECODE_MS * 1000000;
    struct picture_rgb rgb = {0};
    struct picture *picture = NULL;
    struct fault why = {0};
    uint8_t *bytes = NULL;
    size_t size;
    int rc = oai_decode_base64(from, &bytes, &size, &why);
    if (!rc) rc = picture_read(bytes, size, deadline, &rgb, &why);
    mem_free(bytes);
    if (!rc) rc = picture_prepare(&rgb, form, from->low, &picture, &why);
    if (rc == ERR_BUSY)
        fault_set(&why, rc, NULL,
                  "the pictures of all chats may take %lld MiB once they are resized: give fewer",
                  (long long)(PICTURE_MEMORY_MAX >> 20));
    mem_free(rgb.pixels);
    if (!rc) {
        rc = add_picture(out, picture);
        if (rc) picture_drop(picture);
        if (rc) fault_set(&why, rc, NULL, "no memory for the pictures");
    }
    return rc ? fault_set(fault, rc, "", "'%s': %.250s", from->field, why.text) : 0;
}

/* Appends a chat whose body is parsed. */
static int add_chat(cJSON *body, const struct fit_form *form, struct fit_chats *out,
                    struct fault *fault) {
    const struct picture_form *pictures = &form->pictures;
    const struct engine_info info = {.pictures = pictures->kind ? pictures : NULL};
    const struct oai_rules rules = {.info = &info, .turns = form->turns};
    struct oai_error error = {0};
    struct oai_request chat = {0};
    struct arena arena;
    arena_open(&arena, CHAT_ARENA_MAX);
    struct oai_reader reader = {
        .body = body, .rules = &rules, .arena = &arena, .out = &chat, .error = &error};
    int rc = 0;
    cJSON_DeleteItemFromObjectCaseSensitive(body, "add_generation_prompt");
    cJSON_AddFalseToObject(body, "add_generation_prompt");
    if (oai_build_context(&reader) || oai_adapt_messages(&reader))
        rc = fault_set(fault, ERR_INVALID, "", "%.300s", error.message);
    for (int i = 0; i < chat.picture_count && !rc; i++)
        rc = fit_read_picture(&chat.pictures[i], pictures, out, fault);
    if (!rc) json_write_node(&out->lines, chat.context);
    if (!rc) buf_char(&out->lines, '\n');
    oai_request_close(&chat);
    arena_close(&arena);
    return rc;
}

static int read_chat_line(const char *line, size_t size, const struct fit_form *form,
                          struct fit_chats *out, struct fault *fault) {
    const struct json_limits limits = {.bytes = size, .depth = CHAT_DEPTH, .unique_keys = true};
    cJSON *body = NULL;
    int rc = json_parse(line, size, &limits, &body, fault);
    if (rc) return rc;
    rc = cJSON_IsObject(body)
             ? add_chat(body, form, out, fault)
             : fault_set(fault, ERR_INVALID, "", "an object with 'messages' is expected");
    json_free(body);
    return rc;
}

int fit_read_chats(const char *lines, size_t size, const struct fit_form *form,
                   struct fit_chats *out, struct fault *fault) {
    struct fault inner = {0};
    int number = 1, rc = 0;
    *out = (struct fit_chats){0};
    buf_open(&out->lines, CHATS_SIZE_MAX);
    for (size_t at = 0, end; at < size && !rc; at = end + 1, number++) {
        const char *newline = memchr(lines + at, '\n', size - at);
        end = newline ? (size_t)(newline - lines) : size;
        if (strspn(lines + at, " \t\r\n") < end - at)
            rc = read_chat_line(lines + at, end - at, form, out, &inner);
    }
    if (rc)
        fault_set(fault, rc, "", "line %d: %.300s", number - 1, inner.text);
    else if (out->lines.size == 0)
        rc = fault_set(fault, ERR_INVALID, "", "has no chats");
    else if (out->lines.failed)
        rc = fault_set(fault, ERR_NOMEM, "", "no memory for its chats");
    if (rc) fit_chats_close(out);
    return rc;
}

void fit_chats_close(struct fit_chats *chats) {
    for (int i = 0; i < chats->picture_count; i++) picture_drop(chats->pictures[i]);
    mem_free(chats->pictures);
    buf_close(&chats->lines);
    *chats = (struct fit_chats){0};
}
