#include "chat_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void chat_test_render(const char *template, const cJSON *context, int64_t now,
                      struct rendered *out) {
    static const char *const trusted[] = {"bos_token", "eos_token"};
    struct chat *chat;
    cJSON *empty = context ? NULL : cJSON_CreateObject();
    struct chat_input input = {context ? context : empty, trusted, 2, now};
    *out = (struct rendered){0};
    arena_open(&out->arena, 32ul << 20);
    out->rc = chat_open(template, strlen(template), &chat, &out->fault);
    if (!out->rc) out->rc = chat_render(chat, &input, &out->arena, &out->text, &out->fault);
    chat_close(chat);
    cJSON_Delete(empty);
}

void chat_test_render_json(const char *template, const char *context, struct rendered *out) {
    cJSON *tree = context ? chat_test_json(context, strlen(context)) : NULL;
    if (context && !tree) {
        fprintf(stderr, "the test's context is no JSON: %s\n", context);
        abort();
    }
    chat_test_render(template, tree, 0, out);
    /* Nothing of the result may point into the context. */
    json_free(tree);
}

void chat_test_close(struct rendered *rendered) {
    arena_close(&rendered->arena);
}

char *chat_test_read(const char *folder, const char *path, size_t *size) {
    char full[1024];
    snprintf(full, sizeof full, "%s/%s", folder, path);
    FILE *file = fopen(full, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    long length = ftell(file);
    rewind(file);
    char *data = malloc((size_t)length + 1);
    *size = fread(data, 1, (size_t)length, file);
    data[*size] = 0;
    fclose(file);
    return data;
}

cJSON *chat_test_json(const char *data, size_t size) {
    const struct json_limits limits = {.bytes = 16ul << 20, .depth = 400};
    cJSON *tree;
    return json_parse(data, size, &limits, &tree, NULL) ? NULL : tree;
}

int64_t chat_test_time(const char *iso) {
    struct tm tm = {0};
    strptime(iso, "%Y-%m-%dT%H:%M:%S", &tm);
    return timegm(&tm);
}

char *chat_test_brackets(const struct chat_text *text) {
    char *out = calloc(text->size + 8 * text->untrusted_count + 1, 1);
    size_t at = 0, n = 0;
    for (size_t i = 0; i < text->untrusted_count; i++) {
        const struct tok_span *span = &text->untrusted[i];
        memcpy(out + n, text->text + at, span->begin - at);
        n += span->begin - at;
        memcpy(out + n, "⟦", 3);
        memcpy(out + n + 3, text->text + span->begin, span->end - span->begin);
        n += 3 + span->end - span->begin;
        memcpy(out + n, "⟧", 3);
        n += 3;
        at = span->end;
    }
    memcpy(out + n, text->text + at, text->size - at);
    return out;
}
