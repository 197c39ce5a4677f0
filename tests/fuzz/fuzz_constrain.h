/* The common part of the fuzzers of constrain/: a text is compiled, and where it is a language, a
 * walk through its masks must find every state alive, and the masks and the reader must agree.
 * Masks are made in parts that depend on the input, and once more in one piece. */
#ifndef KEEPD_TESTS_FUZZ_FUZZ_CONSTRAIN_H
#define KEEPD_TESTS_FUZZ_FUZZ_CONSTRAIN_H

#include <string.h>

#include "base/check.h"
#include "constrain/constrain.h"

enum { FUZZ_TOKENS = 256 + 14, FUZZ_STEPS = 12, FUZZ_TEXT = 256, FUZZ_LONGEST = 40 };

static inline size_t fuzz_token(const void *arg, int32_t id, const char **bytes) {
    static const char *const words[] = {"ab",
                                        "\"a",
                                        "\":",
                                        "{\"",
                                        "12",
                                        "é",
                                        "]}",
                                        ", ",
                                        "\": [{\"a\": \"",
                                        "aaaaaaaaaaaaaaaaaaaa",
                                        "0123456789",
                                        "ab ab ab ab é",
                                        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                                        "0123456789012345678901234567890123456789"};
    static char single[256];
    (void)arg;
    if (id >= 256) {
        *bytes = words[id - 256];
        return strlen(*bytes);
    }
    single[id] = (char)id;
    *bytes = &single[id];
    return 1;
}

static inline const struct constrain_tokens *fuzz_tokens(void) {
    static struct constrain_tokens *tokens;
    const struct constrain_vocabulary v = {FUZZ_TOKENS, fuzz_token, NULL};
    if (tokens == NULL) CHECK(constrain_tokens_open(&v, &tokens) == 0);
    return tokens;
}

/* The first allowed token behind a place that depends on the input; -1: there is none. */
static inline int32_t fuzz_choose(const uint32_t *mask, uint32_t seed) {
    for (uint32_t i = 0; i < FUZZ_TOKENS; i++) {
        uint32_t id = (seed + i) % FUZZ_TOKENS;
        if (mask[id / 32] >> (id % 32) & 1) return (int32_t)id;
    }
    return -1;
}

static inline int fuzz_in_parts(struct constrain *language, struct constrain_at *at,
                                const char *text, size_t size, uint32_t *mask,
                                struct constrain_next *next, uint64_t part) {
    int rc = ERR_BUSY;
    for (; rc == ERR_BUSY; part *= 2) {
        struct constrain_effort effort = {part, true};
        rc = constrain_next_within(language, at, text, size, mask, next, &effort);
    }
    return rc;
}

/* Checks that a token, which depends on the input, is allowed exactly if the reader goes on with
 * it. */
static inline void fuzz_check(struct constrain *language, const char *text, size_t size,
                              const uint32_t *mask, uint32_t seed) {
    char longer[FUZZ_TEXT + FUZZ_LONGEST];
    struct constrain_at at = {0};
    const char *bytes;
    uint32_t id = seed / 7 % FUZZ_TOKENS;
    size_t more = fuzz_token(NULL, (int32_t)id, &bytes);
    memcpy(longer, text, size);
    memcpy(longer + size, bytes, more);
    int rc = constrain_read(language, &at, longer, size + more);
    if (rc == ERR_LIMIT || rc == ERR_NOMEM) return;
    CHECK((mask[id / 32] >> (id % 32) & 1) == (rc == 0));
}

static inline void fuzz_walk(struct constrain *language, uint32_t seed) {
    uint32_t mask[(FUZZ_TOKENS + 31) / 32], again[(FUZZ_TOKENS + 31) / 32];
    struct constrain_at at = {0};
    char text[FUZZ_TEXT];
    size_t size = 0;
    for (int step = 0; step < FUZZ_STEPS && size + FUZZ_LONGEST < sizeof text; step++) {
        struct constrain_next next = {0}, same = {0};
        int rc = fuzz_in_parts(language, &at, text, size, mask, &next, 1 + seed % 64);
        if (rc == ERR_LIMIT || rc == ERR_NOMEM) return;
        CHECK(rc == 0);
        rc = constrain_next(language, &at, text, size, again, &same);
        CHECK(rc == 0 && memcmp(mask, again, sizeof mask) == 0);
        CHECK(same.accepts == next.accepts && same.continues == next.continues);
        fuzz_check(language, text, size, mask, seed);
        int32_t id = fuzz_choose(mask, seed);
        CHECK(next.accepts || next.continues); /* no state is a dead end */
        CHECK(next.continues || id < 0);
        if (id < 0) return;
        const char *bytes;
        size_t more = fuzz_token(NULL, id, &bytes);
        memcpy(text + size, bytes, more);
        size += more;
        seed = seed * 1664525u + 1013904223u;
        struct constrain_at fresh = {0};
        rc = constrain_read(language, &fresh, text, size);
        CHECK(rc == 0 || rc == ERR_LIMIT || rc == ERR_NOMEM);
    }
}

static inline void fuzz_part(const struct constrain_part *part, uint32_t seed) {
    struct constrain *language;
    struct fault fault = {0};
    int rc = constrain_open(part, fuzz_tokens(), NULL, &language, &fault);
    CHECK((rc == 0) == (language != NULL));
    CHECK(rc == 0 || (rc == fault.code && fault.text[0] != '\0'));
    if (language != NULL) fuzz_walk(language, seed);
    constrain_close(language);
}

#endif
