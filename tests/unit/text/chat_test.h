/* Shared by the chat tests: files, and one render from text to text. */
#ifndef KEEPD_TESTS_UNIT_TEXT_CHAT_TEST_H
#define KEEPD_TESTS_UNIT_TEXT_CHAT_TEST_H

#include "base/arena.h"
#include "base/json.h"
#include "text/chat.h"

struct rendered {
    int rc; /* result of chat_open or chat_render */
    struct arena arena;
    struct chat_text text;
    struct fault fault;
};

/* `context` may be NULL: an empty object. The caller closes. */
void chat_test_render(const char *template, const cJSON *context, int64_t now,
                      struct rendered *out);
void chat_test_render_json(const char *template, const char *context, struct rendered *out);
void chat_test_close(struct rendered *rendered);

/* "/tests/data/..." under the source folder, or a path as it is. NULL when it cannot be read. */
char *chat_test_read(const char *folder, const char *path, size_t *size);
cJSON *chat_test_json(const char *data, size_t size); /* NULL when it does not parse */
int64_t chat_test_time(const char *iso);              /* "2025-07-10T12:00:00" in UTC */

/* The text with ⟦ ⟧ around what is marked as the request's. malloc'd. */
char *chat_test_brackets(const struct chat_text *text);

#endif
