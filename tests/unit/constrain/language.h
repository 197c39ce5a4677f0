/* A vocabulary and languages for the tests of constrain/. */
#ifndef KEEPD_TESTS_UNIT_CONSTRAIN_LANGUAGE_H
#define KEEPD_TESTS_UNIT_CONSTRAIN_LANGUAGE_H

#include <criterion/criterion.h>
#include <string.h>

#include "base/json.h"
#include "constrain/constrain.h"
#include "constrain/limits.h"

/* The 256 bytes, words, and a special token. Two tokens have the same bytes. */
static const char *const language_words[] = {"ab",
                                             "abc",
                                             "aab",
                                             "ba",
                                             "true",
                                             "nul",
                                             "{\"",
                                             "\":",
                                             "\", \"",
                                             "12",
                                             "0.5",
                                             "-1",
                                             "  ",
                                             "\n ",
                                             "hello",
                                             "é",
                                             "日本",
                                             "\xE6\x97",
                                             "\"}",
                                             "[[",
                                             "]]",
                                             "x y",
                                             "abc",
                                             "zzzzzzzzzzzzzzzzzzzzzzzzzz",
                                             "abcabcabcab",
                                             "ääää-ääää",
                                             "aaaaaaaaaaaaaaaaaaaaaa",
                                             "\"}, {\"name\": \""};
enum {
    LANGUAGE_WORDS = sizeof language_words / sizeof *language_words,
    LANGUAGE_TOKENS = 256 + LANGUAGE_WORDS + 1
};

static inline size_t language_bytes(const void *arg, int32_t id, const char **bytes) {
    static char single[256];
    (void)arg;
    if (id < 256) {
        single[id] = (char)id;
        *bytes = &single[id];
        return 1;
    }
    if (id >= 256 + LANGUAGE_WORDS) return 0;
    *bytes = language_words[id - 256];
    return strlen(*bytes);
}

struct language {
    struct constrain_tokens *tokens;
    struct constrain *constrain;
    cJSON *schema;
    struct fault fault;
    int rc;
    uint32_t mask[(LANGUAGE_TOKENS + 31) / 32];
};

static inline struct language language_of(const struct constrain_part *part) {
    struct language l = {0};
    const struct constrain_vocabulary v = {LANGUAGE_TOKENS, language_bytes, NULL};
    cr_assert_eq(constrain_tokens_open(&v, &l.tokens), 0);
    l.rc = constrain_open(part, l.tokens, NULL, &l.constrain, &l.fault);
    cr_assert_eq(l.rc == 0, l.constrain != NULL);
    return l;
}

static inline struct language language_text(enum constrain_kind kind, const char *text) {
    return language_of(
        &(struct constrain_part){.kind = kind, .field = "f", .text = text, .size = strlen(text)});
}

static inline struct language language_part(const char *schema, struct constrain_part part) {
    struct json_limits limits = {.bytes = 1 << 24, .depth = JSON_MAX_DEPTH, .nuls = true};
    cJSON *tree;
    cr_assert_eq(json_parse(schema, strlen(schema), &limits, &tree, NULL), 0, "%s", schema);
    part.kind = CONSTRAIN_SCHEMA;
    part.field = "f";
    part.schema = tree;
    struct language l = language_of(&part);
    l.schema = tree;
    return l;
}

static inline struct language language_schema(const char *schema) {
    return language_part(schema, (struct constrain_part){0});
}

/* Arguments of a tool. */
static inline struct language language_arguments(const char *schema) {
    return language_part(schema, (struct constrain_part){.only_objects = true, .closed = true});
}

static inline void language_close(struct language *l) {
    constrain_close(l->constrain);
    constrain_tokens_close(l->tokens);
    json_free(l->schema);
}

static inline bool language_holds(struct language *l, const char *text) {
    struct constrain_at at = {0};
    struct constrain_next next = {0};
    int rc = constrain_next(l->constrain, &at, text, strlen(text), NULL, &next);
    cr_assert(rc == 0 || rc == ERR_INVALID, "%s: %d", text, rc);
    return rc == 0 && next.accepts;
}

static inline bool language_allows(const struct language *l, int32_t id) {
    return l->mask[id / 32] >> (id % 32) & 1;
}

#endif
