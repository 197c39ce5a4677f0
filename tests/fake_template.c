/* Published chat templates in the fake engine: with --chat-template FILE chats are rendered by it,
 * and all of their text becomes bytes. */
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "tests/fake_engine.h"
#include "text/chat.h"

#define SOURCE_BYTES_MAX ((size_t)1 << 20)

int fake_template_open(const char *path, struct fake_template *out, struct fault *fault) {
    size_t size = 0;
    *out = (struct fake_template){0};
    if (!path || !*path) return 0;
    int rc = file_read(path, SOURCE_BYTES_MAX, &out->source, &size, fault);
    if (rc == 0) rc = chat_open(out->source, size, &out->chat, fault);
    if (rc != 0) fake_template_close(out);
    return rc;
}

void fake_template_close(struct fake_template *published) {
    chat_close(published->chat);
    mem_free(published->source);
    *published = (struct fake_template){0};
}

int fake_template_render(const struct fake_template *published, const cJSON *context,
                         struct arena *arena, const char **out, struct fault *fault) {
    cJSON *full = cJSON_Duplicate(context, true);
    const char *const strings[] = {"bos_token", "eos_token"};
    for (int i = 0; i < 2; i++)
        if (!cJSON_GetObjectItem(full, strings[i])) cJSON_AddStringToObject(full, strings[i], "");
    const struct chat_input input = {.context = full, .now = clock_unix_seconds()};
    struct chat_text text;
    int rc = chat_render(published->chat, &input, arena, &text, fault);
    cJSON_Delete(full);
    *out = rc == 0 ? text.text : NULL;
    return rc;
}
