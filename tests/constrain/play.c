/* Answers questions about languages for the Python tests of constrain/. One JSON object per line:
 * {"schema": ..} or {"regex": ".."} or {"grammar": ".."} or {"object": true}, and any of
 * "texts": [..] (which of them belong to the language), "generate": n (texts from random masks),
 * "seed": s, "paths": [..] (the mask after each text, as the list of allowed ids), "walks": [[id,
 * ..],
 * ..] (how many tokens of each the masks allow, and whether the text is then whole; and "times",
 * the nanoseconds of each mask). Answers one object per line. The argument is a file with the bytes
 * of token i in hexadecimal in line i; without one, tokens are the 256 bytes and some words. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/json.h"
#include "base/mem.h"
#include "constrain/constrain.h"

#define LINE_MAX_BYTES ((size_t)64 << 20)
#define ANSWER_MAX     4000

struct vocabulary {
    char **bytes;
    size_t *sizes;
    int32_t count;
};

static size_t token_bytes(const void *arg, int32_t id, const char **bytes) {
    const struct vocabulary *v = arg;
    *bytes = v->bytes[id];
    return v->sizes[id];
}

static void add_token(struct vocabulary *v, const char *bytes, size_t size) {
    v->bytes = mem_try_realloc(v->bytes, (size_t)v->count * sizeof *v->bytes,
                               (size_t)(v->count + 1) * sizeof *v->bytes);
    v->sizes = mem_try_realloc(v->sizes, (size_t)v->count * sizeof *v->sizes,
                               (size_t)(v->count + 1) * sizeof *v->sizes);
    CHECK(v->bytes != NULL && v->sizes != NULL);
    v->bytes[v->count] = mem_must_alloc(size + 1, 1);
    memcpy(v->bytes[v->count], bytes, size);
    v->sizes[v->count++] = size;
}

static void small_vocabulary(struct vocabulary *v) {
    static const char *const words[] = {
        "true", "null",  "{\"", "\":",  "\": \"", "\",",  "},",       "[[", "12",    "0.5", "abc",
        "ab",   "hello", "  ",  "\n  ", "é",      "日本", "\xE6\x97", "-1", "\\u00", "}}",  "]]"};
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        add_token(v, &byte, 1);
    }
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        add_token(v, words[i], strlen(words[i]));
}

static void read_vocabulary(struct vocabulary *v, const char *path) {
    char line[65536], bytes[32768];
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        size_t size = strcspn(line, "\n") / 2;
        for (size_t i = 0; i < size; i++) {
            unsigned value;
            CHECK(sscanf(line + 2 * i, "%2x", &value) == 1);
            bytes[i] = (char)value;
        }
        add_token(v, bytes, size);
    }
    fclose(file);
}

/* ---- Questions ---- */

struct player {
    struct vocabulary vocabulary;
    struct constrain_tokens *tokens;
    struct constrain *language;
    uint32_t *mask;
    uint64_t random;
    int64_t mask_ns, mask_ns_max;
    int masks;
};

static uint32_t draw(struct player *p, uint32_t below) {
    p->random = p->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((p->random >> 33) % below);
}

/* Time of this thread on a processor, so that a busy machine changes little. */
static int64_t spent_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int next_mask(struct player *p, struct constrain_at *at, const char *text, size_t size,
                     struct constrain_next *next) {
    int64_t begin = spent_ns();
    int rc = constrain_next(p->language, at, text, size, p->mask, next);
    int64_t spent = spent_ns() - begin;
    p->mask_ns += spent;
    if (spent > p->mask_ns_max) p->mask_ns_max = spent;
    p->masks++;
    return rc;
}

static bool is_allowed(const struct player *p, int32_t id) {
    return p->mask[id / 32] >> (id % 32) & 1;
}

static bool belongs(struct player *p, const char *text, size_t size) {
    struct constrain_at at = {0};
    struct constrain_next next = {0};
    return constrain_next(p->language, &at, text, size, NULL, &next) == 0 && next.accepts;
}

static void write_texts(struct player *p, const cJSON *texts, struct buf *out) {
    const cJSON *child;
    buf_str(out, ",\"texts\":[");
    cJSON_ArrayForEach(child, texts) {
        if (child != texts->child) buf_char(out, ',');
        buf_str(out, belongs(p, child->valuestring, strlen(child->valuestring)) ? "true" : "false");
    }
    buf_char(out, ']');
}

static void write_paths(struct player *p, const cJSON *paths, struct buf *out) {
    const cJSON *child;
    buf_str(out, ",\"paths\":[");
    cJSON_ArrayForEach(child, paths) {
        struct constrain_at at = {0};
        struct constrain_next next = {0};
        int rc = next_mask(p, &at, child->valuestring, strlen(child->valuestring), &next);
        if (child != paths->child) buf_char(out, ',');
        if (rc != 0) {
            buf_str(out, "null");
            continue;
        }
        buf_fmt(out, "{\"accepts\":%s,\"ids\":[", next.accepts ? "true" : "false");
        bool first = true;
        for (int32_t id = 0; id < p->vocabulary.count; id++) {
            if (!is_allowed(p, id)) continue;
            buf_fmt(out, first ? "%d" : ",%d", id);
            first = false;
        }
        buf_str(out, "]}");
    }
    buf_char(out, ']');
}

static void write_walk(struct player *p, const cJSON *ids, struct buf *out, struct buf *times) {
    struct constrain_at at = {0};
    struct constrain_next next = {0};
    struct buf text;
    const cJSON *child;
    int done = 0, rc = 0;
    buf_open(&text, LINE_MAX_BYTES);
    buf_str(&text, "");
    cJSON_ArrayForEach(child, ids) {
        int64_t before = p->mask_ns;
        rc = next_mask(p, &at, text.size > 0 ? text.data : "", text.size, &next);
        buf_fmt(times, times->size > 0 ? ",%lld" : "%lld", (long long)(p->mask_ns - before));
        if (rc != 0 || !is_allowed(p, child->valueint)) break;
        buf_add(&text, p->vocabulary.bytes[child->valueint], p->vocabulary.sizes[child->valueint]);
        done++;
    }
    buf_fmt(out, "[%d,%s,%d]", done, belongs(p, text.data, text.size) ? "true" : "false", rc);
    buf_close(&text);
}

static void write_walks(struct player *p, const cJSON *walks, struct buf *out) {
    const cJSON *child;
    struct buf times;
    buf_open(&times, LINE_MAX_BYTES);
    buf_str(out, ",\"walks\":[");
    cJSON_ArrayForEach(child, walks) {
        if (child != walks->child) buf_char(out, ',');
        write_walk(p, child, out, &times);
    }
    buf_str(out, "],\"times\":[");
    if (times.size > 0) buf_add(out, times.data, times.size);
    buf_char(out, ']');
    buf_close(&times);
}

/* A token of the mask: mostly one that closes something, so that texts end. */
static int32_t draw_token(struct player *p) {
    static const char ends[] = "\"}],:0123456789";
    for (int i = 0; i < 3; i++) {
        int32_t id = (unsigned char)ends[draw(p, sizeof ends - 1)];
        if (is_allowed(p, id) && draw(p, 4) > 0) return id;
    }
    for (int i = 0; i < 300; i++) {
        int32_t id = (int32_t)draw(p, (uint32_t)p->vocabulary.count);
        if (is_allowed(p, id)) return id;
    }
    for (int32_t id = 0; id < p->vocabulary.count; id++)
        if (is_allowed(p, id)) return id;
    return -1;
}

/* A text that ended by itself; false: it became too long. */
static bool generate(struct player *p, struct buf *text, int *rc) {
    struct constrain_at at = {0};
    while (text->size < ANSWER_MAX) {
        struct constrain_next next = {0};
        *rc = next_mask(p, &at, text->data != NULL ? text->data : "", text->size, &next);
        if (*rc != 0) return false;
        if (next.accepts && (!next.continues || draw(p, 4) == 0)) return true;
        int32_t id = draw_token(p);
        CHECK(id >= 0);
        buf_add(text, p->vocabulary.bytes[id], p->vocabulary.sizes[id]);
    }
    return false;
}

static void write_generated(struct player *p, int count, struct buf *out) {
    bool first = true;
    int failed = 0, code = 0;
    buf_str(out, ",\"generated\":[");
    for (int i = 0; i < count; i++) {
        struct buf text;
        int rc = 0;
        buf_open(&text, LINE_MAX_BYTES);
        if (generate(p, &text, &rc)) {
            if (!first) buf_char(out, ',');
            first = false;
            json_write_str(out, text.data != NULL ? text.data : "", text.size);
        }
        failed += rc != 0;
        if (rc != 0) code = rc;
        buf_close(&text);
    }
    buf_fmt(out, "],\"failed\":%d,\"code\":%d", failed, code);
}

static int open_language(struct player *p, const cJSON *order, struct fault *fault) {
    static const struct {
        const char *name;
        enum constrain_kind kind;
    } kinds[] = {{"schema", CONSTRAIN_SCHEMA},
                 {"regex", CONSTRAIN_REGEX},
                 {"grammar", CONSTRAIN_GRAMMAR},
                 {"without", CONSTRAIN_WITHOUT},
                 {"object", CONSTRAIN_OBJECT}};
    struct constrain_part part = {.field = "f"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const cJSON *node = json_get(order, kinds[i].name);
        if (node == NULL) continue;
        part.kind = kinds[i].kind;
        part.schema = node;
        if (cJSON_IsString(node)) part.text = node->valuestring;
        if (part.text != NULL) part.size = strlen(part.text);
    }
    return constrain_open(&part, p->tokens, NULL, &p->language, fault);
}

static void answer(struct player *p, const cJSON *order, struct buf *out) {
    struct fault fault = {0};
    int64_t begin = spent_ns();
    int rc = open_language(p, order, &fault);
    buf_fmt(out, "{\"rc\":\"%s\",\"compile_us\":%lld", rc == 0 ? "" : err_name(rc),
            (long long)(spent_ns() - begin) / 1000);
    if (rc != 0) {
        buf_str(out, ",\"field\":");
        json_write_str(out, fault.field, strlen(fault.field));
        buf_str(out, ",\"text\":");
        json_write_str(out, fault.text, strlen(fault.text));
    } else {
        const cJSON *seed = json_get(order, "seed"), *count = json_get(order, "generate");
        p->random = seed != NULL ? (uint64_t)seed->valuedouble : 1;
        p->masks = 0;
        p->mask_ns = p->mask_ns_max = 0;
        if (json_get(order, "texts") != NULL) write_texts(p, json_get(order, "texts"), out);
        if (json_get(order, "paths") != NULL) write_paths(p, json_get(order, "paths"), out);
        if (json_get(order, "walks") != NULL) write_walks(p, json_get(order, "walks"), out);
        if (count != NULL) write_generated(p, count->valueint, out);
        buf_fmt(out, ",\"masks\":%d,\"mask_ns\":%lld,\"mask_ns_max\":%lld", p->masks,
                (long long)p->mask_ns, (long long)p->mask_ns_max);
    }
    buf_char(out, '}');
    constrain_close(p->language);
    p->language = NULL;
}

int main(int argc, char **argv) {
    struct player p = {0};
    char *line = NULL;
    size_t room = 0;
    if (argc > 1)
        read_vocabulary(&p.vocabulary, argv[1]);
    else
        small_vocabulary(&p.vocabulary);
    struct constrain_vocabulary v = {p.vocabulary.count, token_bytes, &p.vocabulary};
    CHECK(constrain_tokens_open(&v, &p.tokens) == 0);
    p.mask = mem_must_alloc(constrain_mask_words(p.vocabulary.count), sizeof *p.mask);
    for (ssize_t size; (size = getline(&line, &room, stdin)) > 0;) {
        struct json_limits limits = {
            .bytes = LINE_MAX_BYTES, .depth = JSON_MAX_DEPTH, .nuls = true};
        cJSON *order;
        struct fault fault = {0};
        struct buf out;
        buf_open(&out, LINE_MAX_BYTES);
        if (json_parse(line, (size_t)size, &limits, &order, &fault) != 0)
            buf_fmt(&out, "{\"rc\":\"order\",\"text\":\"%s\"}", fault.text);
        else
            answer(&p, order, &out);
        json_free(order);
        printf("%s\n", out.failed ? "{\"rc\":\"long\"}" : out.data);
        fflush(stdout);
        buf_close(&out);
    }
    free(line);
    mem_free(p.mask);
    constrain_tokens_close(p.tokens);
    for (int32_t i = 0; i < p.vocabulary.count; i++) mem_free(p.vocabulary.bytes[i]);
    mem_free(p.vocabulary.bytes);
    mem_free(p.vocabulary.sizes);
    return 0;
}
