/* One tokenizer, many threads: nothing in it may be written while encoding. */
#include <pthread.h>

#include "base/check.h"
#include "base/file.h"
#include "tests/unit/text/tok/tok_support.h"

#define THREADS 4
#define ROUNDS  50

static struct tok *tok;
static char *text;
static size_t text_size;
static struct tok_ids expected;

static void encode(struct arena *arena, struct tok_ids *ids) {
    struct fault fault = {0};
    int rc = tok_encode(tok, text, text_size, TOK_SPECIALS, NULL, 0, 1 << 20, arena, ids, &fault);
    CHECK_MSG(rc == 0, "%s", fault.text);
}

static void *work(void *unused) {
    struct arena arena;
    (void)unused;
    arena_open(&arena, (size_t)1 << 26);
    for (int i = 0; i < ROUNDS; i++) {
        struct tok_ids ids;
        encode(&arena, &ids);
        CHECK(ids.count == expected.count);
        CHECK(memcmp(ids.ids, expected.ids, ids.count * sizeof *ids.ids) == 0);
        arena_reset(&arena);
    }
    arena_close(&arena);
    return NULL;
}

int main(void) {
    static const char path[] = KEEPD_SOURCE_DIR "/tests/data/tokenizers/qwen-style.json";
    struct fault fault = {0};
    struct arena arena;
    pthread_t threads[THREADS];
    char *data;
    size_t size;
    CHECK(file_read(path, 1 << 24, &data, &size, &fault) == 0);
    CHECK_MSG(tok_open(data, size, &tok, &fault) == 0, "%s: %s", fault.field, fault.text);
    /* The tokenizer's own JSON is text in many scripts, ASCII and not. */
    text = data;
    text_size = size;
    arena_open(&arena, (size_t)1 << 26);
    encode(&arena, &expected);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, NULL) == 0);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    arena_close(&arena);
    tok_close(tok);
    mem_free(data);
    return 0;
}
