#include "engine/fit_chats.h"

#include <string.h>

#include "base/json.h"

#define CHAT_DEPTH     64
#define CHAT_BYTES_MAX ((size_t)64 << 20)
#define CHAT_IDS_MAX   (CHAT_BYTES_MAX / sizeof(int32_t))

static void write_plain(struct buf *out, const cJSON *context) {
    const cJSON *message;
    cJSON_ArrayForEach(message, json_get(context, "messages")) {
        const cJSON *role = json_get(message, "role"), *content = json_get(message, "content");
        const cJSON *calls = json_get(message, "tool_calls");
        buf_fmt(out, "%s: ", cJSON_IsString(role) ? role->valuestring : "user");
        if (cJSON_IsString(content)) buf_str(out, content->valuestring);
        if (calls) json_write_node(out, calls);
        buf_str(out, "\n\n");
    }
}

static int plain_ids(const struct text *text, const cJSON *context, struct arena *arena,
                     struct tok_ids *out, struct fault *fault) {
    struct buf buf;
    buf_open(&buf, CHAT_BYTES_MAX);
    write_plain(&buf, context);
    int rc = buf.failed ? fault_set(fault, ERR_NOMEM, "text", "no memory for a chat")
                        : tok_encode(text->tok, buf.data, buf.size, TOK_TEMPLATE, NULL, 0,
                                     CHAT_IDS_MAX, arena, out, fault);
    buf_close(&buf);
    return rc;
}

static int count_pictures(const cJSON *context) {
    const cJSON *message;
    int count = 0;
    cJSON_ArrayForEach(message, json_get(context, "messages")) count +=
        cJSON_GetArraySize(json_get(message, TEXT_PICTURE_ENDS));
    return count;
}

int fit_chat_ids(const struct text *text, const char *context, size_t size,
                 struct text_pictures *pictures, struct arena *arena, struct tok_ids *out,
                 bool *plain, struct fault *fault) {
    const struct json_limits limits = {.bytes = CHAT_BYTES_MAX, .depth = CHAT_DEPTH};
    struct fault refused = {0};
    cJSON *tree = NULL;
    int rc = json_parse(context, size, &limits, &tree, fault);
    if (rc) return rc;
    const int left = pictures->count;
    pictures->count = count_pictures(tree);
    if (pictures->count > left) {
        json_free(tree);
        return fault_set(fault, ERR_INVALID, "text", "pictures are missing");
    }
    rc = text_render_chat(text, tree, pictures->count ? pictures : NULL, CHAT_IDS_MAX, arena, out,
                          &refused);
    *plain = rc && !pictures->count;
    if (*plain)
        rc = plain_ids(text, tree, arena, out, fault);
    else if (rc)
        fault_set(fault, rc, "text", "a chat with pictures: %.300s", refused.text);
    json_free(tree);
    return rc;
}
