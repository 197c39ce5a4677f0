#include "daemon/fit_chats.h"

#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"
#include "server/oai/oai.h"

#define CHAT_DEPTH 64

static int read_chat_line(const char *line, size_t size, struct buf *out, struct fault *fault) {
    const struct json_limits limits = {.bytes = size, .depth = CHAT_DEPTH, .unique_keys = true};
    struct oai_error error = {0};
    struct oai_request chat = {0};
    cJSON *body = NULL;
    int rc = json_parse(line, size, &limits, &body, fault);
    if (rc) return rc;
    if (!cJSON_IsObject(body)) {
        rc = fault_set(fault, ERR_INVALID, "", "an object with 'messages' is expected");
    } else {
        cJSON_DeleteItemFromObjectCaseSensitive(body, "add_generation_prompt");
        cJSON_AddFalseToObject(body, "add_generation_prompt");
        if (oai_build_context(&(struct oai_reader){.body = body, .out = &chat, .error = &error}))
            rc = fault_set(fault, ERR_INVALID, "", "%.300s", error.message);
    }
    if (!rc) json_write_node(out, chat.context);
    if (!rc) buf_char(out, '\n');
    oai_request_close(&chat);
    json_free(body);
    return rc;
}

int fit_read_chats(const char *lines, size_t size, struct buf *out, struct fault *fault) {
    struct fault inner = {0};
    int number = 1, rc = 0;
    for (size_t at = 0, end; at < size && !rc; at = end + 1, number++) {
        const char *newline = memchr(lines + at, '\n', size - at);
        end = newline ? (size_t)(newline - lines) : size;
        if (strspn(lines + at, " \t\r\n") < end - at)
            rc = read_chat_line(lines + at, end - at, out, &inner);
    }
    if (rc) return fault_set(fault, rc, "", "line %d: %.300s", number - 1, inner.text);
    if (out->size == 0) return fault_set(fault, ERR_INVALID, "", "has no chats");
    return out->failed ? fault_set(fault, ERR_NOMEM, "", "no memory for its chats") : 0;
}
