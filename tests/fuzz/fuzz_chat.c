/* A chat template, then after a NUL its context as JSON ({} when that does not parse). What renders
 * must be whole UTF-8 with ascending, disjoint, non-empty spans inside it, twice the same. */
#include <string.h>

#include "base/check.h"
#include "base/json.h"
#include "text/chat.h"

#define ARENA_BYTES ((size_t)24 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_text(const struct chat_text *text) {
    CHECK(utf8_valid(text->text, text->size) && text->text[text->size] == 0);
    size_t end = 0;
    for (size_t i = 0; i < text->untrusted_count; i++) {
        const struct tok_span *span = &text->untrusted[i];
        CHECK(span->begin < span->end && span->end <= text->size);
        CHECK(i == 0 || span->begin > end);
        end = span->end;
    }
}

static void check_fault(int rc, const struct fault *fault) {
    CHECK(rc < 0 && fault->code == rc && fault->text[0]);
    CHECK_MSG(rc != ERR_INTERNAL, "%s", fault->text);
    CHECK(utf8_valid(fault->text, strlen(fault->text)));
}

static void render(const struct chat *chat, const cJSON *context) {
    static const char *const trusted[] = {"bos_token"};
    struct chat_input input = {context, trusted, 1, 1752148800};
    struct arena first, second;
    struct chat_text text, again;
    struct fault fault = {0};
    arena_open(&first, ARENA_BYTES);
    arena_open(&second, ARENA_BYTES);
    int rc = chat_render(chat, &input, &first, &text, &fault);
    if (rc) {
        /* raise_exception('') has nothing to say */
        if (strcmp(fault.field, "messages") != 0) check_fault(rc, &fault);
    } else {
        check_text(&text);
        CHECK(chat_render(chat, &input, &second, &again, &fault) == 0);
        CHECK(again.size == text.size && memcmp(again.text, text.text, text.size) == 0);
        CHECK(again.untrusted_count == text.untrusted_count);
    }
    arena_close(&first);
    arena_close(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const struct json_limits limits = {.bytes = 1 << 20, .depth = 200};
    const char *source = (const char *)data;
    const char *end = size ? memchr(data, 0, size) : NULL;
    size_t source_size = end ? (size_t)(end - source) : size;
    struct chat *chat;
    struct fault fault = {0};
    int rc = chat_open(source, source_size, &chat, &fault);
    if (rc) {
        check_fault(rc, &fault);
        CHECK(!chat);
        return 0;
    }
    cJSON *context = NULL;
    if (end) json_parse(end + 1, size - source_size - 1, &limits, &context, NULL);
    if (!context) context = cJSON_CreateObject();
    if (cJSON_IsObject(context)) render(chat, context);
    json_free(context);
    chat_close(chat);
    return 0;
}
