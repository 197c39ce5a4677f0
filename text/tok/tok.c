/* Text to tokens and back: the order of the parts.
 *
 * Added tokens that are matched raw are cut out first; each gap is normalised, the other added
 * tokens are cut out of it, and each gap of those goes through the stages to the model. All of it
 * works in the caller's arena and stops as soon as there are more tokens than the caller takes. */
#include "text/tok/tok.h"

#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "text/tok/internal.h"

void tok_close(struct tok *tok) {
    if (!tok) return;
    for (int i = 0; i < TOK_STEPS_MAX; i++) tok_regex_close(tok->steps[i].regex);
    for (int i = 0; i <= TOK_STAGES_MAX; i++) tok_regex_close(tok->stages[i].regex);
    mem_free(tok->scores);
    mem_free(tok->sorted);
    mem_free(tok->raw.tokens);
    mem_free(tok->normal.tokens);
    mem_free(tok->names.slots);
    mem_free(tok->whole.slots);
    mem_free(tok->merges.slots);
    mem_free(tok->tokens);
    mem_free(tok->text);
    mem_free(tok);
}

int32_t tok_vocab_size(const struct tok *tok) {
    return tok->vocab_size;
}

size_t tok_bytes(const struct tok *tok, int32_t id, const char **bytes) {
    *bytes = "";
    if (id < 0 || id >= tok->vocab_size) return 0;
    *bytes = tok->text + tok->tokens[id].bytes;
    return tok->tokens[id].bytes_size;
}

size_t tok_bytes_first(const struct tok *tok, int32_t id, const char **bytes) {
    *bytes = "";
    if (id < 0 || id >= tok->vocab_size) return 0;
    *bytes = tok->text + tok->tokens[id].first;
    return tok->tokens[id].first_size;
}

size_t tok_name(const struct tok *tok, int32_t id, const char **name) {
    *name = "";
    if (id < 0 || id >= tok->vocab_size) return 0;
    *name = tok->text + tok->tokens[id].name;
    return tok->tokens[id].name_size;
}

int tok_added_before(const struct tok *tok) {
    return tok->before_count;
}

int tok_added_after(const struct tok *tok) {
    return tok->after_count;
}

size_t tok_bytes_max(const struct tok *tok) {
    return tok->bytes_max;
}

bool tok_is_special(const struct tok *tok, int32_t id) {
    return id >= 0 && id < tok->vocab_size &&
           (tok->tokens[id].flags & (TOK_SPECIAL | TOK_SHOWN)) == TOK_SPECIAL;
}

void tok_show(struct tok *tok, int32_t id) {
    if (id >= 0 && id < tok->vocab_size) tok->tokens[id].flags |= TOK_SHOWN;
}

static bool matcher_has(const struct tok_matcher *matcher, int32_t id) {
    for (size_t i = 0; i < matcher->count; i++)
        if (matcher->tokens[i].id == id) return true;
    return false;
}

bool tok_is_added(const struct tok *tok, int32_t id) {
    return matcher_has(&tok->raw, id) || matcher_has(&tok->normal, id);
}

/* ---- Encoding ---- */

static int emit_all(struct tok_encoder *e, const int32_t *ids, int count) {
    int rc = 0;
    for (int i = 0; i < count && !rc; i++) rc = tok_emit(e, ids[i]);
    return rc;
}

typedef int gap_function(struct tok_encoder *e, const struct tok_text *text, size_t begin,
                         size_t end);

/* Added tokens of `matcher` become ids, what is between them goes to `gap`. As in
 * huggingface/tokenizers, a token whose text a neighbour has swallowed as white space gives no id,
 * and a token that begins in swallowed text gives the end of what it swallows back. */
static int cut_added(struct tok_encoder *e, const struct tok_matcher *matcher,
                     const struct tok_text *text, gap_function *gap) {
    struct tok_match match = {0};
    size_t taken = 0;
    int rc;
    while (tok_added_find(e->tok, matcher, e->specials, text, taken, &match)) {
        if (match.begin > taken && (rc = gap(e, text, taken, match.begin))) return rc;
        if (match.begin >= match.end) continue;
        if ((rc = tok_emit(e, match.id))) return rc;
        taken = match.end;
    }
    return taken < text->size ? gap(e, text, taken, text->size) : 0;
}

static int encode_words(struct tok_encoder *e, const struct tok_text *text, size_t begin,
                        size_t end) {
    return tok_split(e, 0, text->s + begin, end - begin);
}

/* Finds the untrusted spans of a part of the text, counted from the part's beginning. Parts come in
 * order, so the search begins where the last one ended. */
static int part_spans(struct tok_encoder *e, const struct tok_text *text, size_t begin, size_t end,
                      struct tok_text *part) {
    size_t first = e->next_span, count = 0;
    while (first < text->span_count && text->spans[first].end <= begin) first++;
    e->next_span = first;
    while (first + count < text->span_count && text->spans[first + count].begin < end) count++;
    struct tok_span *spans = arena_alloc(e->arena, count, sizeof *spans);
    if (!spans) return tok_no_memory(e);
    for (size_t i = 0; i < count; i++) {
        const struct tok_span *span = &text->spans[first + i];
        spans[i].begin = span->begin > begin ? span->begin - begin : 0;
        spans[i].end = (span->end < end ? span->end : end) - begin;
    }
    part->spans = spans;
    part->span_count = count;
    return 0;
}

static int encode_part(struct tok_encoder *e, const struct tok_text *text, size_t begin,
                       size_t end) {
    const struct tok *tok = e->tok;
    struct tok_text part = {.s = text->s + begin, .size = end - begin}, normal;
    int rc = tok->normal_specials && text->span_count ? part_spans(e, text, begin, end, &part) : 0;
    if (rc) return rc;
    rc = tok_normalize(tok, e->arena, e->scratch, &part, &normal);
    if (rc == ERR_NOMEM) return tok_no_memory(e);
    if (rc) return fault_set(e->fault, rc, NULL, "the text needs too many steps to normalise");
    e->first = begin == 0 ? normal.s : NULL;
    return cut_added(e, &tok->normal, &normal, encode_words);
}

/* Short texts repeat too little to pay for a cache. */
static int tok_open_cache(struct tok_encoder *e, size_t size) {
    size_t places = 64;
    if (size < 256) return 0;
    while (places < 4096 && places < size / 16) places *= 2;
    e->cache = arena_alloc(e->arena, places, sizeof *e->cache);
    e->cache_mask = places - 1;
    return e->cache ? 0 : tok_no_memory(e);
}

static int check_text(const char *text, size_t size, const struct tok_span *spans, size_t count,
                      struct fault *fault) {
    size_t last = 0;
    if (size > TOK_TEXT_MAX)
        return fault_set(fault, ERR_LIMIT, NULL, "text of more than %zu bytes", TOK_TEXT_MAX);
    if (!utf8_valid(text, size)) return fault_set(fault, ERR_INVALID, NULL, "not valid UTF-8");
    for (size_t i = 0; i < count; i++) {
        if (spans[i].begin < last || spans[i].end < spans[i].begin || spans[i].end > size)
            return fault_set(fault, ERR_INVALID, NULL, "spans of the text out of order");
        last = spans[i].end;
    }
    return 0;
}

static int tok_encode_pieces(struct tok_encoder *e, const struct tok_text *text, bool template) {
    const struct tok *tok = e->tok;
    int rc = tok_open_cache(e, text->size);
    if (!rc && template) rc = emit_all(e, tok->template_before, tok->before_count);
    if (!rc) rc = cut_added(e, &tok->raw, text, encode_part);
    if (!rc && template) rc = emit_all(e, tok->template_after, tok->after_count);
    return rc;
}

static int encode_pair(struct tok_encoder *e, const struct tok_text *texts, size_t *second) {
    const struct tok *tok = e->tok;
    int rc = tok_open_cache(e, texts[0].size + texts[1].size);
    if (!rc) rc = emit_all(e, tok->template_before, tok->before_count);
    if (!rc) rc = cut_added(e, &tok->raw, &texts[0], encode_part);
    if (!rc) rc = emit_all(e, tok->template_between, tok->between_count);
    *second = e->count;
    e->next_span = 0;
    if (!rc) rc = cut_added(e, &tok->raw, &texts[1], encode_part);
    if (!rc) rc = emit_all(e, tok->template_after, tok->after_count);
    return rc;
}

int tok_encode_pair(const struct tok *tok, const struct tok_pair *pair, size_t max_ids,
                    struct arena *arena, struct tok_ids *out, size_t *second, struct fault *fault) {
    *out = (struct tok_ids){0};
    if (!tok->joins)
        return fault_set(fault, ERR_UNSUPPORTED, "tokenizer.json",
                         "the model's tokenizer does not say how two texts are joined");
    const struct tok_span all[2] = {{0, pair->size[0]}, {0, pair->size[1]}};
    struct tok_text texts[2];
    int rc = 0;
    for (int i = 0; i < 2 && !rc; i++) {
        texts[i] = (struct tok_text){pair->text[i], pair->size[i], &all[i], 1};
        rc = check_text(pair->text[i], pair->size[i], &all[i], 1, fault);
    }
    if (rc) return rc;
    struct tok_encoder e = {.tok = tok, .arena = arena, .fault = fault, .max = max_ids};
    e.scratch = tok_scratch_open();
    rc = e.scratch ? encode_pair(&e, texts, second) : tok_no_memory(&e);
    tok_scratch_close(e.scratch);
    if (rc == 0) *out = (struct tok_ids){e.ids, e.count};
    return rc;
}

int tok_encode(const struct tok *tok, const char *text, size_t size, unsigned flags,
               const struct tok_span *untrusted, size_t untrusted_count, size_t max_ids,
               struct arena *arena, struct tok_ids *out, struct fault *fault) {
    *out = (struct tok_ids){0};
    int rc = check_text(text, size, untrusted, untrusted_count, fault);
    if (rc) return rc;
    struct tok_encoder e = {.tok = tok,
                            .arena = arena,
                            .fault = fault,
                            .specials = flags & TOK_SPECIALS,
                            .max = max_ids};
    struct tok_text all = {text, size, untrusted, untrusted_count};
    e.scratch = tok_scratch_open();
    rc = e.scratch ? tok_encode_pieces(&e, &all, flags & TOK_TEMPLATE) : tok_no_memory(&e);
    tok_scratch_close(e.scratch);
    if (rc == 0) *out = (struct tok_ids){e.ids, e.count};
    return rc;
}
