/* The normalizer Precompiled: SentencePiece's table of replacements, as huggingface/tokenizers runs
 * it.
 *
 * The table is a trie, which is a double array in the form of darts-clone, and the texts to which
 * its values point, each ended by a zero byte. If the trie contains a beginning of a cluster of
 * less than six bytes, the whole cluster is replaced by the text of the shortest such beginning.
 * Otherwise each character of the cluster is replaced by itself. */
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "text/tok/internal.h"
#include "text/unicode/unicode.h"

#define CHARSMAP_MAX ((size_t)16 << 20) /* bytes; published ones have about 300,000 */
#define CLUSTER_MAX  6                  /* longer clusters are not looked up whole */

/* ---- Loading ---- */

static int base64_digit(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Returns the bytes written; SIZE_MAX where the text is not base64. */
static size_t base64_decode(const char *s, size_t size, char *out) {
    size_t count = 0;
    uint32_t bits = 0;
    int have = 0;
    while (size > 0 && s[size - 1] == '=') size--;
    if (size % 4 == 1) return SIZE_MAX;
    for (size_t i = 0; i < size; i++) {
        int digit = base64_digit(s[i]);
        if (digit < 0) return SIZE_MAX;
        bits = bits << 6 | (uint32_t)digit;
        have += 6;
        if (have < 8) continue;
        have -= 8;
        out[count++] = (char)(bits >> have & 0xFF);
    }
    return count;
}

static uint32_t read_unit(const char *data, size_t index) {
    const unsigned char *p = (const unsigned char *)data + 4 * index;
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static int charsmap_add_table(struct tok *tok, const char *data, size_t size, struct tok_step *step,
                              const char *field, struct fault *fault) {
    size_t trie = size < 4 ? SIZE_MAX : read_unit(data, 0);
    if (size < 4 || trie > size - 4 || trie % 4 || trie == 0)
        return fault_set(fault, ERR_MALFORMED, field, "'precompiled_charsmap' is cut off");
    if (!utf8_valid(data + 4 + trie, size - 4 - trie))
        return fault_set(fault, ERR_MALFORMED, field, "'precompiled_charsmap' is not UTF-8");
    step->find_size = (uint32_t)trie;
    step->content_size = (uint32_t)(size - 4 - trie);
    int rc = tok_text_add(tok, data + 4, step->find_size, &step->find, fault);
    return rc ? rc : tok_text_add(tok, data + 4 + trie, step->content_size, &step->content, fault);
}

int tok_charsmap_load(struct tok *tok, const char *text, struct tok_step *step, const char *field,
                      struct fault *fault) {
    size_t size = strlen(text);
    if (size / 4 * 3 > CHARSMAP_MAX)
        return fault_set(fault, ERR_LIMIT, field, "'precompiled_charsmap' of more than %zu bytes",
                         CHARSMAP_MAX);
    char *data = mem_try_alloc(size + 1, 1);
    if (!data) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tokenizer");
    size = base64_decode(text, size, data);
    int rc = size == SIZE_MAX
                 ? fault_set(fault, ERR_MALFORMED, field, "'precompiled_charsmap' is not base64")
                 : charsmap_add_table(tok, data, size, step, field, fault);
    mem_free(data);
    return rc;
}

/* ---- Use ---- */

struct charsmap {
    const char *trie, *texts;
    size_t units, texts_size;
};

static bool charsmap_unit_at(const struct charsmap *map, uint32_t at, uint32_t *unit) {
    if (at >= map->units) return false;
    *unit = read_unit(map->trie, at);
    return true;
}

static uint32_t offset_of(uint32_t unit) {
    return unit >> 10 << ((unit & 1u << 9) >> 6);
}

/* Finds the value of the shortest key with which `s` begins. Returns false if there is none. Links
 * that are wrong in the file end the search. */
static bool charsmap_look_up(const struct charsmap *map, const char *s, size_t size,
                             uint32_t *value) {
    uint32_t at = 0, unit;
    if (!charsmap_unit_at(map, at, &unit)) return false;
    at ^= offset_of(unit);
    for (size_t i = 0; i < size && s[i]; i++) {
        uint32_t label = (unsigned char)s[i];
        at ^= label;
        if (!charsmap_unit_at(map, at, &unit) || (unit & (1u << 31 | 0xFF)) != label) return false;
        at ^= offset_of(unit);
        if (!(unit >> 8 & 1)) continue;
        if (!charsmap_unit_at(map, at, &unit)) return false;
        *value = unit & ~(1u << 31);
        return true;
    }
    return false;
}

/* Returns the text that replaces `s`; NULL: `s` stays. */
static const char *replacement(const struct charsmap *map, const char *s, size_t size,
                               size_t *out_size) {
    uint32_t value;
    if (!charsmap_look_up(map, s, size, &value) || value >= map->texts_size) return NULL;
    const char *text = map->texts + value;
    if (((unsigned char)*text & 0xC0) == 0x80) return NULL; /* within a character */
    *out_size = strnlen(text, map->texts_size - value);
    return text;
}

static bool replace_characters(struct tok_edit *edit, const struct charsmap *map, size_t begin,
                               size_t end) {
    uint32_t length;
    for (size_t at = begin; at < end; at += length) {
        size_t size = 0;
        unicode_decode(edit->in->s + at, end - at, &length);
        const char *text = replacement(map, edit->in->s + at, length, &size);
        if (text && !tok_edit(edit, at, at + length, text, size)) return false;
    }
    return true;
}

int tok_charsmap(struct arena *arena, const struct tok *tok, const struct tok_step *step,
                 const struct tok_text *in, struct tok_text *out) {
    struct tok_edit edit;
    struct charsmap map = {tok->text + step->find, tok->text + step->content, step->find_size / 4,
                           step->content_size};
    tok_edit_open(&edit, arena, in);
    for (size_t at = 0, end; at < in->size; at = end) {
        size_t size = 0;
        end = at + unicode_cluster(in->s + at, in->size - at);
        const char *text =
            end - at < CLUSTER_MAX ? replacement(&map, in->s + at, end - at, &size) : NULL;
        if (text ? !tok_edit(&edit, at, end, text, size)
                 : !replace_characters(&edit, &map, at, end))
            return ERR_NOMEM;
    }
    return tok_edit_close(&edit, out);
}
