/* Shared by the tokenizer's tests: files, and small tokenizers written as JSON text. */
#ifndef KEEPD_TESTS_UNIT_TEXT_TOK_TOK_SUPPORT_H
#define KEEPD_TESTS_UNIT_TEXT_TOK_TOK_SUPPORT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "model/weights.h"
#include "text/tok/internal.h"
#include "text/tok/tok.h"

/* The id of an exact token string, -1 if there is none. */
static inline int32_t id_of(const struct tok *tok, const char *content) {
    return tok_vocab_find(tok, content, strlen(content));
}

/* Parts of a tokenizer.json as JSON text; NULL takes the default: 256 bytes with id = byte, no
 * merges, no added tokens, ByteLevel without a regex. `vocab` and `merges` are lists without the
 * brackets; vocab follows the bytes. */
struct small_tok {
    const char *vocab, *merges, *added, *normalizer, *pre_tokenizer, *post_processor, *decoder;
    const char *model; /* further members of model */
};

static inline void small_byte_name(unsigned byte, char name[8]) {
    unsigned scalar = byte;
    if (byte <= 32) scalar = 256 + byte;
    if (byte >= 127 && byte <= 160) scalar = 289 + byte - 127;
    if (byte == 173) scalar = 323;
    name[utf8_encode(scalar, name)] = '\0';
}

static inline void small_tok_json(const struct small_tok *t, struct buf *json) {
    buf_open(json, 1 << 20);
    buf_str(json, "{\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (unsigned byte = 0; byte < 256; byte++) {
        char name[8];
        small_byte_name(byte, name);
        buf_str(json, byte ? "," : "");
        json_write_str(json, name, strlen(name));
        buf_fmt(json, ":%u", byte);
    }
    if (t->vocab) buf_fmt(json, ",%s", t->vocab);
    buf_fmt(json, "},\"merges\":[%s]%s%s}", t->merges ? t->merges : "", t->model ? "," : "",
            t->model ? t->model : "");
    buf_fmt(json, ",\"added_tokens\":%s", t->added ? t->added : "[]");
    buf_fmt(json, ",\"normalizer\":%s", t->normalizer ? t->normalizer : "null");
    buf_fmt(json, ",\"pre_tokenizer\":%s",
            t->pre_tokenizer
                ? t->pre_tokenizer
                : "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}");
    buf_fmt(json, ",\"post_processor\":%s", t->post_processor ? t->post_processor : "null");
    buf_fmt(json, ",\"decoder\":%s}", t->decoder ? t->decoder : "{\"type\":\"ByteLevel\"}");
}

static inline int small_tok_open(const struct small_tok *t, struct tok **tok, struct fault *fault) {
    struct buf json;
    small_tok_json(t, &json);
    int rc = tok_open(json.data, json.size, tok, fault);
    buf_close(&json);
    return rc;
}

#endif
