/* The normalizer: a chain of steps, each of which makes the next text of the one before.
 *
 * Untrusted spans follow the text through every step. A step that changes a part of the text makes
 * all of the new part untrusted where the old part touched an untrusted span: special tokens that
 * are matched after normalising must not be assembled from a request's bytes. */
#include <string.h>

#include "base/utf8.h"
#include "text/tok/internal.h"
#include "text/unicode/unicode.h"

/* ---- The text in the making ---- */

bool tok_writer_reserve(struct tok_writer *w, size_t more) {
    if (more <= w->capacity - w->size) return true;
    size_t capacity = w->capacity * 2 + more;
    char *data = arena_alloc(w->arena, capacity, 1);
    if (!data) return false;
    if (w->size) memcpy(data, w->data, w->size);
    w->data = data;
    w->capacity = capacity;
    return true;
}

bool tok_writer_add(struct tok_writer *w, const char *s, size_t size) {
    if (!tok_writer_reserve(w, size)) return false;
    if (size) memcpy(w->data + w->size, s, size);
    w->size += size;
    return true;
}

/* ---- Spans ---- */

/* Parts are mapped in order, and parts of one span that touch are joined again, so there are never
 * more spans after a step than before it. */
bool tok_span_map_open(struct tok_span_map *map, struct arena *arena, const struct tok_text *in) {
    *map = (struct tok_span_map){.in = in->spans, .in_count = in->span_count};
    if (in->span_count) map->out = arena_alloc(arena, in->span_count, sizeof *map->out);
    return in->span_count == 0 || map->out;
}

/* Maps the part of the spans inside in[begin, end), which became out[at, at + size). */
void tok_span_map_add(struct tok_span_map *map, size_t begin, size_t end, size_t at, size_t size,
                      bool changed) {
    while (map->next < map->in_count && map->in[map->next].end <= begin) map->next++;
    for (size_t i = map->next; i < map->in_count && map->in[i].begin < end; i++) {
        size_t from = map->in[i].begin > begin ? map->in[i].begin - begin : 0;
        size_t to = map->in[i].end < end ? map->in[i].end - begin : end - begin;
        if (from >= to) continue;
        struct tok_span span = {at + (changed ? 0 : from), at + (changed ? size : to)};
        struct tok_span *last = map->out_count ? &map->out[map->out_count - 1] : NULL;
        if (last && last->end >= span.begin)
            last->end = span.end > last->end ? span.end : last->end;
        else
            map->out[map->out_count++] = span;
    }
}

/* ---- Parts that are replaced ---- */

void tok_edit_open(struct tok_edit *edit, struct arena *arena, const struct tok_text *in) {
    *edit = (struct tok_edit){.w = {.arena = arena}, .in = in};
}

/* Writes `s` for the old text up to `end`. */
static bool norm_put(struct tok_edit *edit, size_t end, const char *s, size_t size, bool changed) {
    size_t at = edit->w.size;
    if (!tok_writer_add(&edit->w, s, size)) return false;
    tok_span_map_add(&edit->map, edit->taken, end, at, size, changed);
    edit->taken = end;
    return edit->w.size <= TOK_TEXT_MAX;
}

bool tok_edit(struct tok_edit *edit, size_t begin, size_t end, const char *s, size_t size) {
    const struct tok_text *in = edit->in;
    if (!edit->w.data && (!tok_span_map_open(&edit->map, edit->w.arena, in) ||
                          !tok_writer_reserve(&edit->w, in->size + in->size / 2 + 16)))
        return false;
    return norm_put(edit, begin, in->s + edit->taken, begin - edit->taken, false) &&
           norm_put(edit, end, s, size, true);
}

int tok_edit_close(struct tok_edit *edit, struct tok_text *out) {
    const struct tok_text *in = edit->in;
    *out = *in;
    if (!edit->w.data) return 0;
    if (!norm_put(edit, in->size, in->s + edit->taken, in->size - edit->taken, false))
        return ERR_NOMEM;
    *out = (struct tok_text){edit->w.data, edit->w.size, edit->map.out, edit->map.out_count};
    return 0;
}

/* ---- Prepend, Replace ---- */

static int prepend(struct arena *arena, const struct tok *tok, const struct tok_step *step,
                   const struct tok_text *in, struct tok_text *out) {
    struct tok_writer w = {.arena = arena};
    struct tok_span_map map;
    *out = *in;
    if (in->size == 0) return 0;
    if (!tok_span_map_open(&map, arena, in) ||
        !tok_writer_reserve(&w, step->content_size + in->size))
        return ERR_NOMEM;
    tok_writer_add(&w, tok->text + step->content, step->content_size);
    tok_writer_add(&w, in->s, in->size);
    tok_span_map_add(&map, 0, in->size, step->content_size, in->size, false);
    *out = (struct tok_text){w.data, w.size, map.out, map.out_count};
    return 0;
}

/* The next match at or after `from`: 1 found, 0 none, negative enum err. */
static int norm_find(const struct tok_step *step, const struct tok *tok,
                     struct tok_scratch *scratch, const struct tok_text *in, size_t from,
                     size_t *begin, size_t *end) {
    if (step->regex) return tok_regex_find(step->regex, scratch, in->s, in->size, from, begin, end);
    const char *found =
        memmem(in->s + from, in->size - from, tok->text + step->find, step->find_size);
    if (!found) return 0;
    *begin = (size_t)(found - in->s);
    *end = *begin + step->find_size;
    return 1;
}

/* An empty match right behind a match does not count: the search goes on one character later. */
static int norm_replace(struct arena *arena, const struct tok *tok, struct tok_scratch *scratch,
                        const struct tok_step *step, const struct tok_text *in,
                        struct tok_text *out) {
    struct tok_edit edit;
    size_t from = 0, begin, end, last = SIZE_MAX;
    tok_edit_open(&edit, arena, in);
    while (from <= in->size) {
        int rc = norm_find(step, tok, scratch, in, from, &begin, &end);
        if (rc < 0) return rc;
        if (rc == 0) break;
        if (begin == end && end == last) {
            do from++;
            while (from < in->size && ((unsigned char)in->s[from] & 0xC0) == 0x80);
            continue;
        }
        if (!tok_edit(&edit, begin, end, tok->text + step->content, step->content_size))
            return ERR_NOMEM;
        from = last = end;
    }
    return tok_edit_close(&edit, out);
}

/* ---- Steps that look at each character ---- */

/* Says what takes the place of a character, up to 3 code points. Returns how many; -1: it stays. */
typedef int char_function(uint32_t code, uint32_t out[3]);

static int lower_char(uint32_t code, uint32_t out[3]) {
    int n = unicode_to_lower(code, out);
    return n == 1 && out[0] == code ? -1 : n;
}

static int drop_mark(uint32_t code, uint32_t out[3]) {
    (void)out;
    return unicode_is_mark(code) ? 0 : -1;
}

/* The next three are the parts of BertNormalizer. */
static int drop_narrow_mark(uint32_t code, uint32_t out[3]) {
    (void)out;
    return unicode_category(code) == UNICODE_MN ? 0 : -1;
}

static int bert_clean_char(uint32_t code, uint32_t out[3]) {
    const enum unicode_category category = unicode_category(code);
    const bool line = code == '\t' || code == '\n' || code == '\r';
    const bool control = category >= UNICODE_CC && !line;
    if (control || code == 0xFFFD) return 0;
    out[0] = ' ';
    return code != ' ' && (line || unicode_is_space(code)) ? 1 : -1;
}

/* The blocks of ideographs that BERT knows, with the gap that `tokenizers` has before U+2B920. */
static int bert_apart(uint32_t code, uint32_t out[3]) {
    static const uint32_t blocks[][2] = {{0x3400, 0x4DBF},   {0x4E00, 0x9FFF},   {0xF900, 0xFAFF},
                                         {0x20000, 0x2A6DF}, {0x2A700, 0x2B81F}, {0x2B920, 0x2CEAF},
                                         {0x2F800, 0x2FA1F}};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        if (code < blocks[i][0] || code > blocks[i][1]) continue;
        out[0] = out[2] = ' ';
        out[1] = code;
        return 3;
    }
    return -1;
}

/* As SentencePiece's rules for machine translation: some controls go, others become spaces. */
static int clean_char(uint32_t code, uint32_t out[3]) {
    bool control = (code >= 0x01 && code <= 0x08) || code == 0x0B ||
                   (code >= 0x0E && code <= 0x1F) || code == 0x7F || code == 0x8F || code == 0x9F;
    bool space = code == 0x09 || code == 0x0A || code == 0x0C || code == 0x0D || code == 0x1680 ||
                 (code >= 0x200B && code <= 0x200F) || code == 0x2028 || code == 0x2029 ||
                 code == 0x2581 || code == 0xFEFF || code == 0xFFFD;
    if (control) return 0;
    out[0] = ' ';
    return space ? 1 : -1;
}

static int change_chars(struct arena *arena, char_function *change, const struct tok_text *in,
                        struct tok_text *out) {
    struct tok_edit edit;
    uint32_t length;
    tok_edit_open(&edit, arena, in);
    for (size_t at = 0; at < in->size; at += length) {
        uint32_t codes[3];
        char text[12];
        size_t size = 0;
        int n = change(unicode_decode(in->s + at, in->size - at, &length), codes);
        for (int i = 0; i < n; i++) size += utf8_encode(codes[i], text + size);
        if (n >= 0 && !tok_edit(&edit, at, at + length, text, size)) return ERR_NOMEM;
    }
    return tok_edit_close(&edit, out);
}

static int norm_strip(struct arena *arena, const struct tok_step *step, const struct tok_text *in,
                      struct tok_text *out) {
    struct tok_edit edit;
    uint32_t length = 0;
    size_t begin = 0, end = in->size;
    while (step->left && begin < end &&
           unicode_is_space(unicode_decode(in->s + begin, end - begin, &length)))
        begin += length;
    for (size_t at = end; step->right && at > begin; end = at) {
        do at--;
        while (at > begin && ((unsigned char)in->s[at] & 0xC0) == 0x80);
        if (!unicode_is_space(unicode_decode(in->s + at, end - at, &length))) break;
    }
    tok_edit_open(&edit, arena, in);
    if ((begin > 0 && !tok_edit(&edit, 0, begin, "", 0)) ||
        (end < in->size && !tok_edit(&edit, end, in->size, "", 0)))
        return ERR_NOMEM;
    return tok_edit_close(&edit, out);
}

static int run_step(const struct tok *tok, struct arena *arena, struct tok_scratch *scratch,
                    const struct tok_step *step, const struct tok_text *in, struct tok_text *out) {
    switch (step->kind) {
    case TOK_STEP_FORM:
        return tok_form(arena, step->form, in, out);
    case TOK_STEP_PREPEND:
        return prepend(arena, tok, step, in, out);
    case TOK_STEP_REPLACE:
        return norm_replace(arena, tok, scratch, step, in, out);
    case TOK_STEP_LOWERCASE:
        return change_chars(arena, lower_char, in, out);
    case TOK_STEP_STRIP:
        return norm_strip(arena, step, in, out);
    case TOK_STEP_STRIP_ACCENTS:
        return change_chars(arena, drop_mark, in, out);
    case TOK_STEP_STRIP_MARKS:
        return change_chars(arena, drop_narrow_mark, in, out);
    case TOK_STEP_CLEAN:
        return change_chars(arena, bert_clean_char, in, out);
    case TOK_STEP_CHINESE:
        return change_chars(arena, bert_apart, in, out);
    case TOK_STEP_NMT:
        return change_chars(arena, clean_char, in, out);
    case TOK_STEP_CHARSMAP:
        break;
    }
    return tok_charsmap(arena, tok, step, in, out);
}

int tok_normalize(const struct tok *tok, struct arena *arena, struct tok_scratch *scratch,
                  const struct tok_text *in, struct tok_text *out) {
    struct tok_text text = *in;
    int rc = 0;
    for (int i = 0; i < tok->step_count && !rc; i++) {
        struct tok_text next = text;
        rc = run_step(tok, arena, scratch, &tok->steps[i], &text, &next);
        text = next;
    }
    *out = text;
    return rc;
}
