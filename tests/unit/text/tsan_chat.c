/* One compiled template, 32 threads, each with its own arena: the template must not change. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "chat_test.h"

#define THREADS 32
#define RENDERS 20

static const char source[] =
    "{% macro show(m) %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endmacro %}"
    "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{{ show(m) }}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ 'n=' ~ ns.n ~ ' ' + messages | map(attribute='role') | join(',') }}"
    "{{ {'a': [1, 2.5, none]} | tojson }}{{ 'x' + bos_token }}";

static const char context_text[] =
    "{\"bos_token\": \"<s>\", \"messages\": [{\"role\": \"user\", \"content\": \" hi <|end|> \"},"
    "{\"role\": \"assistant\", \"content\": \"Grüße\"}]}";

static struct chat *chat;
static cJSON *context;
static const char *expected;

static void render_once(struct arena *arena, struct chat_text *text) {
    static const char *const trusted[] = {"bos_token"};
    struct chat_input input = {context, trusted, 1, 0};
    struct fault fault = {0};
    int rc = chat_render(chat, &input, arena, text, &fault);
    CHECK_MSG(rc == 0, "%s", fault.text);
}

static void *render_many(void *unused) {
    (void)unused;
    for (int i = 0; i < RENDERS; i++) {
        struct arena arena;
        struct chat_text text;
        arena_open(&arena, 8ul << 20);
        render_once(&arena, &text);
        CHECK(strcmp(text.text, expected) == 0);
        CHECK(text.untrusted_count == 2);
        arena_close(&arena);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    struct fault fault = {0};
    struct arena arena;
    struct chat_text first;
    context = chat_test_json(context_text, strlen(context_text));
    CHECK(context);
    int rc = chat_open(source, strlen(source), &chat, &fault);
    CHECK_MSG(rc == 0, "%s", fault.text);
    arena_open(&arena, 8ul << 20);
    render_once(&arena, &first);
    expected = first.text;
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, render_many, NULL) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    printf("%d renders of\n%s\n", THREADS * RENDERS, expected);
    arena_close(&arena);
    chat_close(chat);
    json_free(context);
    return 0;
}
