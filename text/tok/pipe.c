/* tokenizer.json: normalizer, pre_tokenizer, post_processor and decoder.
 *
 * The four are chains of components with names; what each does is in the sources of
 * huggingface/tokenizers. A component that is not known here is refused by its name: leaving a step
 * out would give the model other tokens than it was trained with. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"
#include "text/tok/internal.h"

#define PATH_MAX_BYTES 120

struct pipe {
    struct tok *tok;
    struct fault *fault;
    bool template_seen;
    bool decoder_seen;
};

typedef int load_function(struct pipe *p, const cJSON *node, const char *type, const char *path);

/* Calls `load` for the component or, if it is a Sequence, for each of its members. The recursion is
 * no deeper than the JSON. */
static int pipe_walk(struct pipe *p, const cJSON *node, const char *path, const char *members,
                     load_function *load) {
    const char *type = NULL;
    if (!cJSON_IsObject(node))
        return fault_set(p->fault, ERR_MALFORMED, path, "expected an object, found %s",
                         json_type_name(node));
    int rc = json_str(node, path, "type", &type, p->fault);
    if (rc) return rc;
    if (!type) return fault_set(p->fault, ERR_MALFORMED, path, "has no type");
    if (strcmp(type, "Sequence") != 0) return load(p, node, type, path);
    const cJSON *list = json_get(node, members), *member;
    if (!cJSON_IsArray(list))
        return fault_set(p->fault, ERR_MALFORMED, path, "expected an array '%s'", members);
    int i = 0;
    cJSON_ArrayForEach(member, list) {
        char inner[PATH_MAX_BYTES];
        snprintf(inner, sizeof inner, "%.60s.%s[%d]", path, members, i++);
        if ((rc = pipe_walk(p, member, inner, members, load))) return rc;
    }
    return 0;
}

static int refuse_type(struct pipe *p, const char *path, const char *type) {
    return fault_set(p->fault, ERR_UNSUPPORTED, path, "'%.64s' is not supported", type);
}

/* ---- Normalizer, decoder ---- */

/* {"Regex": "..."} or {"String": "..."}. */
int tok_load_pattern(const cJSON *node, const char *path, const char **text, bool *literal,
                     struct fault *fault) {
    const cJSON *pattern = json_get(node, "pattern");
    *text = NULL;
    if (!cJSON_IsObject(pattern))
        return fault_set(fault, ERR_MALFORMED, path, "expected a pattern");
    int rc = json_str(pattern, path, "Regex", text, fault);
    if (rc) return rc;
    *literal = !*text;
    if (*literal) rc = json_str(pattern, path, "String", text, fault);
    if (!rc && !*text) rc = fault_set(fault, ERR_MALFORMED, path, "expected a pattern");
    return rc;
}

static int add_step(struct tok *tok, const struct tok_step *step, const char *field,
                    struct fault *fault) {
    if (tok->step_count == TOK_STEPS_MAX)
        return fault_set(fault, ERR_LIMIT, field, "more than %d steps", TOK_STEPS_MAX);
    tok->steps[tok->step_count++] = *step;
    return 0;
}

int tok_add_step(struct tok *tok, const struct tok_step *step, const char *find, bool literal,
                 const char *content, const char *field, struct fault *fault) {
    struct tok_step added = *step;
    added.content_size = (uint32_t)strlen(content);
    int rc = tok_text_add(tok, content, added.content_size, &added.content, fault);
    if (!rc && literal) {
        added.find_size = (uint32_t)strlen(find);
        rc = tok_text_add(tok, find, added.find_size, &added.find, fault);
    } else if (!rc && find) {
        rc = tok_regex_open(find, false, field, &added.regex, fault);
    }
    if (!rc) rc = add_step(tok, &added, field, fault);
    if (rc) tok_regex_close(added.regex);
    return rc;
}

static int load_charsmap(struct pipe *p, const cJSON *node, const char *path) {
    struct tok_step step = {.kind = TOK_STEP_CHARSMAP};
    const char *text = "";
    int rc = json_str(node, path, "precompiled_charsmap", &text, p->fault);
    if (!rc) rc = tok_charsmap_load(p->tok, text, &step, path, p->fault);
    return rc ? rc : add_step(p->tok, &step, path, p->fault);
}

/* Reads steps that have only a name, and Strip, which has two switches. */
static int load_plain(struct pipe *p, const cJSON *node, const char *type, const char *path) {
    static const struct {
        const char *type;
        struct tok_step step;
    } steps[] = {{"NFC", {.kind = TOK_STEP_FORM, .form = TOK_NFC}},
                 {"NFD", {.kind = TOK_STEP_FORM, .form = TOK_NFD}},
                 {"NFKC", {.kind = TOK_STEP_FORM, .form = TOK_NFKC}},
                 {"NFKD", {.kind = TOK_STEP_FORM, .form = TOK_NFKD}},
                 {"Lowercase", {.kind = TOK_STEP_LOWERCASE}},
                 {"StripAccents", {.kind = TOK_STEP_STRIP_ACCENTS}},
                 {"Nmt", {.kind = TOK_STEP_NMT}},
                 {"Strip", {.kind = TOK_STEP_STRIP}}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        struct tok_step step = steps[i].step;
        if (strcmp(type, steps[i].type) != 0) continue;
        int rc = 0;
        if (step.kind == TOK_STEP_STRIP) {
            rc = json_bool(node, path, "strip_left", &step.left, p->fault);
            if (!rc) rc = json_bool(node, path, "strip_right", &step.right, p->fault);
        }
        return rc ? rc : add_step(p->tok, &step, path, p->fault);
    }
    return refuse_type(p, path, type);
}

/* BertNormalizer: each of its switches is a step of its own. If strip_accents is absent, it has the
 * value of lowercase. */
static int load_bert(struct pipe *p, const cJSON *node, const char *path) {
    bool clean = true, chinese = true, lower = true;
    int rc = json_bool(node, path, "clean_text", &clean, p->fault);
    if (!rc) rc = json_bool(node, path, "handle_chinese_chars", &chinese, p->fault);
    if (!rc) rc = json_bool(node, path, "lowercase", &lower, p->fault);
    bool accents = lower;
    if (!rc) rc = json_bool(node, path, "strip_accents", &accents, p->fault);
    const struct {
        bool on;
        struct tok_step step;
    } steps[] = {{clean, {.kind = TOK_STEP_CLEAN}},
                 {chinese, {.kind = TOK_STEP_CHINESE}},
                 {accents, {.kind = TOK_STEP_FORM, .form = TOK_NFD}},
                 {accents, {.kind = TOK_STEP_STRIP_MARKS}},
                 {lower, {.kind = TOK_STEP_LOWERCASE}}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps && !rc; i++)
        if (steps[i].on) rc = add_step(p->tok, &steps[i].step, path, p->fault);
    return rc;
}

static int load_normalizer(struct pipe *p, const cJSON *node, const char *type, const char *path) {
    struct tok_step step = {.kind = TOK_STEP_PREPEND};
    const char *content = "", *find = NULL;
    bool literal = false;
    int rc = 0;
    if (strcmp(type, "Prepend") == 0) {
        rc = json_str(node, path, "prepend", &content, p->fault);
    } else if (strcmp(type, "Replace") == 0) {
        step.kind = TOK_STEP_REPLACE;
        rc = tok_load_pattern(node, path, &find, &literal, p->fault);
        if (!rc) rc = json_str(node, path, "content", &content, p->fault);
        if (!rc && literal && !*find)
            rc = fault_set(p->fault, ERR_MALFORMED, path, "replaces an empty string");
    } else if (strcmp(type, "Precompiled") == 0) {
        return load_charsmap(p, node, path);
    } else if (strcmp(type, "BertNormalizer") == 0) {
        return load_bert(p, node, path);
    } else {
        return load_plain(p, node, type, path);
    }
    return rc ? rc : tok_add_step(p->tok, &step, find, literal, content, path, p->fault);
}

static int load_decoder(struct pipe *p, const cJSON *node, const char *type, const char *path) {
    p->decoder_seen = true;
    return tok_load_decoder(p->tok, node, type, path, p->fault);
}

/* ---- Pre-tokenizer ---- */

int tok_add_stage(struct tok *tok, const struct tok_stage *stage, const char *pattern, bool literal,
                  const char *field, struct fault *fault) {
    struct tok_stage *place = &tok->stages[tok->stage_count];
    if (tok->stage_count == TOK_STAGES_MAX)
        return fault_set(fault, ERR_LIMIT, field, "more than %d steps", TOK_STAGES_MAX);
    *place = *stage;
    if (pattern) {
        int rc = tok_regex_open(pattern, literal, field, &place->regex, fault);
        if (rc) return rc;
    }
    tok->stage_count++;
    return 0;
}

static int read_behavior(struct pipe *p, const cJSON *node, const char *path,
                         enum tok_behavior *behavior) {
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *name = NULL;
    int rc = json_str(node, path, "behavior", &name, p->fault);
    if (rc) return rc;
    for (int i = 0; name && i < (int)(sizeof names / sizeof *names); i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *behavior = (enum tok_behavior)i;
        return 0;
    }
    return fault_set(p->fault, ERR_UNSUPPORTED, path, "behavior '%.64s' is not supported",
                     name ? name : "");
}

static int load_split(struct pipe *p, const cJSON *node, const char *path) {
    struct tok_stage stage = {.kind = TOK_STAGE_SPLIT};
    const char *pattern;
    bool literal = false;
    int rc = tok_load_pattern(node, path, &pattern, &literal, p->fault);
    if (!rc) rc = read_behavior(p, node, path, &stage.behavior);
    if (!rc) rc = json_bool(node, path, "invert", &stage.invert, p->fault);
    return rc ? rc : tok_add_stage(p->tok, &stage, pattern, literal, path, p->fault);
}

static int load_digits(struct pipe *p, const cJSON *node, const char *path) {
    bool individual = false;
    int rc = json_bool(node, path, "individual_digits", &individual, p->fault);
    struct tok_stage stage = {.kind = TOK_STAGE_DIGITS,
                              .behavior = individual ? TOK_ISOLATED : TOK_CONTIGUOUS};
    return rc ? rc : tok_add_stage(p->tok, &stage, NULL, false, path, p->fault);
}

static int load_byte_level(struct pipe *p, const cJSON *node, const char *path) {
    bool space = true, regex = true;
    int rc = json_bool(node, path, "add_prefix_space", &space, p->fault);
    if (!rc) rc = json_bool(node, path, "use_regex", &regex, p->fault);
    if (!rc && space)
        rc = tok_add_stage(p->tok, &(struct tok_stage){.kind = TOK_STAGE_PREFIX_SPACE}, NULL, false,
                           path, p->fault);
    if (!rc && regex)
        rc = tok_add_stage(p->tok,
                           &(struct tok_stage){.kind = TOK_STAGE_SPLIT, .behavior = TOK_ISOLATED},
                           tok_regex_gpt2, false, path, p->fault);
    p->tok->bytes_at = p->tok->stage_count;
    return rc;
}

/* Makes a stage that splits at characters of category P and at the ASCII punctuation that Unicode
 * counts as symbols. */
static int load_punctuation(struct pipe *p, const cJSON *node, const char *path) {
    struct tok_stage stage = {.kind = TOK_STAGE_SPLIT, .behavior = TOK_ISOLATED};
    int rc = json_get(node, "behavior") ? read_behavior(p, node, path, &stage.behavior) : 0;
    return rc ? rc : tok_add_stage(p->tok, &stage, "[\\p{P}$+<=>^`|~]", false, path, p->fault);
}

/* \w as Rust's regex crate defines it; regex.c has Oniguruma's, which differs. */
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200c}\\x{200d}"

static int load_whitespace(struct pipe *p, bool words, const char *path) {
    static const char pattern[] = "[" WORD "]+|[^" WORD "\\s]+";
    struct tok_stage stage = {.kind = TOK_STAGE_SPLIT, .behavior = TOK_REMOVED, .invert = words};
    return tok_add_stage(p->tok, &stage, words ? pattern : "\\s", false, path, p->fault);
}

/* White space is left out, and each character of punctuation is a piece. */
static int load_bert_words(struct pipe *p, const cJSON *node, const char *path) {
    int rc = load_whitespace(p, false, path);
    return rc ? rc : load_punctuation(p, node, path);
}

static int read_prepend(struct pipe *p, const cJSON *node, const char *path,
                        enum tok_prepend *prepend) {
    static const char *const names[] = {"always", "first", "never"};
    const char *name = names[0];
    bool prefix = true;
    int rc = json_str(node, path, "prepend_scheme", &name, p->fault);
    if (!rc) rc = json_bool(node, path, "add_prefix_space", &prefix, p->fault);
    if (rc) return rc;
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *prepend = prefix ? (enum tok_prepend)i : TOK_PREPEND_NEVER;
        return 0;
    }
    return fault_set(p->fault, ERR_UNSUPPORTED, path, "prepend_scheme '%.64s' is not supported",
                     name);
}

static int pipe_load_metaspace(struct pipe *p, const cJSON *node, const char *path) {
    struct tok_stage stage = {.kind = TOK_STAGE_METASPACE};
    struct tok_stage cut = {.kind = TOK_STAGE_SPLIT, .behavior = TOK_MERGED_WITH_NEXT};
    const char *mark = "";
    bool split = true;
    int rc = json_str(node, path, "replacement", &mark, p->fault);
    if (!rc) rc = json_bool(node, path, "split", &split, p->fault);
    if (!rc) rc = read_prepend(p, node, path, &stage.prepend);
    if (rc) return rc;
    size_t size = strlen(mark), length = 0;
    if (size == 0 || utf8_step(mark, size, &length) != UTF8_CHAR || length != size)
        return fault_set(p->fault, ERR_MALFORMED, path, "'replacement' is not one character");
    memcpy(stage.mark, mark, size);
    stage.mark_size = (uint32_t)size;
    rc = tok_add_stage(p->tok, &stage, NULL, false, path, p->fault);
    return rc || !split ? rc : tok_add_stage(p->tok, &cut, mark, true, path, p->fault);
}

static int load_pre_tokenizer(struct pipe *p, const cJSON *node, const char *type,
                              const char *path) {
    if (strcmp(type, "Split") == 0) return load_split(p, node, path);
    if (strcmp(type, "Digits") == 0) return load_digits(p, node, path);
    if (strcmp(type, "Punctuation") == 0) return load_punctuation(p, node, path);
    if (strcmp(type, "Whitespace") == 0) return load_whitespace(p, true, path);
    if (strcmp(type, "WhitespaceSplit") == 0) return load_whitespace(p, false, path);
    if (strcmp(type, "Metaspace") == 0) return pipe_load_metaspace(p, node, path);
    if (strcmp(type, "BertPreTokenizer") == 0) return load_bert_words(p, node, path);
    if (strcmp(type, "ByteLevel") != 0) return refuse_type(p, path, type);
    if (p->tok->bytes_at >= 0)
        return fault_set(p->fault, ERR_UNSUPPORTED, path, "a second ByteLevel is not supported");
    return load_byte_level(p, node, path);
}

/* ---- Post-processor ---- */

static int add_template_ids(struct pipe *p, const cJSON *special, const char *path, int32_t *to,
                            int *count) {
    const cJSON *ids = special ? json_get(special, "ids") : NULL, *node;
    int64_t id;
    if (!cJSON_IsArray(ids))
        return fault_set(p->fault, ERR_MALFORMED, path, "special token without ids");
    cJSON_ArrayForEach(node, ids) {
        if (json_node_int(node, 0, p->tok->vocab_size - 1, &id))
            return fault_set(p->fault, ERR_MALFORMED, path, "id outside the vocabulary");
        if (*count == TOK_TEMPLATE_MAX)
            return fault_set(p->fault, ERR_LIMIT, path, "more than %d special tokens",
                             TOK_TEMPLATE_MAX);
        to[(*count)++] = (int32_t)id;
    }
    return 0;
}

/* One item of "single": {"SpecialToken": {"id": ...}} or {"Sequence": {"id": "A"}}. */
static int load_template_item(struct pipe *p, const cJSON *item, const cJSON *specials,
                              const char *path, bool *text_seen) {
    struct tok *tok = p->tok;
    const char *name = NULL;
    const cJSON *special = json_get(item, "SpecialToken"), *text = json_get(item, "Sequence");
    int rc = json_str(special ? special : text, path, "id", &name, p->fault);
    if (rc) return rc;
    if (!name) return fault_set(p->fault, ERR_MALFORMED, path, "template item without id");
    if (special)
        return *text_seen ? add_template_ids(p, json_get(specials, name), path, tok->template_after,
                                             &tok->after_count)
                          : add_template_ids(p, json_get(specials, name), path,
                                             tok->template_before, &tok->before_count);
    if (*text_seen || strcmp(name, "A") != 0)
        return fault_set(p->fault, ERR_UNSUPPORTED, path, "a template must hold the text A once");
    *text_seen = true;
    return 0;
}

/* The template of two texts: the tokens between A and B. Where it is of another form, texts are not
 * joined. */
static int load_pair(struct pipe *p, const cJSON *node, const char *path) {
    struct tok *tok = p->tok;
    const cJSON *item;
    int seen = 0, before = 0, after = 0, rc = 0;
    int32_t around[2][TOK_TEMPLATE_MAX];
    bool known = true;
    cJSON_ArrayForEach(item, json_get(node, "pair")) {
        const cJSON *special = json_get(item, "SpecialToken"), *text = json_get(item, "Sequence");
        const cJSON *id = json_get(special ? special : text, "id");
        if (!cJSON_IsString(id) || rc || !known || seen > 2) return rc;
        const cJSON *ids = json_get(json_get(node, "special_tokens"), id->valuestring);
        if (!special)
            known = known && strcmp(id->valuestring, seen++ ? "B" : "A") == 0;
        else
            rc =
                add_template_ids(p, ids, path, seen == 1 ? tok->template_between : around[seen / 2],
                                 seen == 0   ? &before
                                 : seen == 1 ? &tok->between_count
                                             : &after);
    }
    tok->joins = rc == 0 && known && seen == 2 && before == tok->before_count &&
                 after == tok->after_count &&
                 !memcmp(around[0], tok->template_before, (size_t)before * sizeof **around) &&
                 !memcmp(around[1], tok->template_after, (size_t)after * sizeof **around);
    return rc;
}

static int load_template(struct pipe *p, const cJSON *node, const char *path) {
    const cJSON *single = json_get(node, "single"), *item;
    bool text_seen = false;
    if (p->template_seen)
        return fault_set(p->fault, ERR_UNSUPPORTED, path, "a second template is not supported");
    p->template_seen = true;
    if (!cJSON_IsArray(single))
        return fault_set(p->fault, ERR_MALFORMED, path, "expected an array 'single'");
    cJSON_ArrayForEach(item, single) {
        int rc = load_template_item(p, item, json_get(node, "special_tokens"), path, &text_seen);
        if (rc) return rc;
    }
    if (!text_seen) return fault_set(p->fault, ERR_MALFORMED, path, "the template lacks the text");
    return load_pair(p, node, path);
}

/* ["<s>", 0] */
static int add_pair(struct pipe *p, const cJSON *node, const char *key, const char *path,
                    int32_t *to, int *count) {
    const cJSON *pair = json_get(node, key), *name = cJSON_IsArray(pair) ? pair->child : NULL;
    int64_t id;
    if (!cJSON_IsString(name) || json_node_int(name->next, 0, p->tok->vocab_size - 1, &id))
        return fault_set(p->fault, ERR_MALFORMED, path, "'%s' is not a token string and its id",
                         key);
    to[(*count)++] = (int32_t)id;
    return 0;
}

/* RobertaProcessing, BertProcessing: a token before the text and one after it. */
static int load_around(struct pipe *p, const cJSON *node, const char *type, const char *path) {
    struct tok *tok = p->tok;
    const int times = strcmp(type, "RobertaProcessing") == 0 ? 2 : 1;
    if (p->template_seen)
        return fault_set(p->fault, ERR_UNSUPPORTED, path, "a second template is not supported");
    p->template_seen = true;
    int rc = add_pair(p, node, "cls", path, tok->template_before, &tok->before_count);
    if (!rc) rc = add_pair(p, node, "sep", path, tok->template_after, &tok->after_count);
    for (int i = 0; i < times && !rc; i++)
        rc = add_pair(p, node, "sep", path, tok->template_between, &tok->between_count);
    tok->joins = rc == 0;
    return rc;
}

static int load_post_processor(struct pipe *p, const cJSON *node, const char *type,
                               const char *path) {
    if (strcmp(type, "ByteLevel") == 0) return 0; /* only trims offsets */
    if (strcmp(type, "TemplateProcessing") == 0) return load_template(p, node, path);
    if (strcmp(type, "RobertaProcessing") == 0 || strcmp(type, "BertProcessing") == 0)
        return load_around(p, node, type, path);
    return refuse_type(p, path, type);
}

int tok_load_pipeline(struct tok *tok, const cJSON *root, struct fault *fault) {
    static const struct {
        const char *name, *members;
        load_function *load;
    } parts[] = {{"normalizer", "normalizers", load_normalizer},
                 {"pre_tokenizer", "pretokenizers", load_pre_tokenizer},
                 {"post_processor", "processors", load_post_processor},
                 {"decoder", "decoders", load_decoder}};
    struct pipe p = {.tok = tok, .fault = fault};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const cJSON *node = json_get(root, parts[i].name);
        int rc = node ? pipe_walk(&p, node, parts[i].name, parts[i].members, parts[i].load) : 0;
        if (rc) return rc;
    }
    if (p.decoder_seen) return 0;
    if (tok->bytes_at < 0)
        return fault_set(fault, ERR_UNSUPPORTED, "decoder",
                         "is absent: it is not known how tokens become text");
    tok->decoder.byte_level = true;
    return 0;
}
