/* The language of answers: response_format, and the fields of vLLM, SGLang and llama.cpp that mean
 * the same; and the calls that tool_choice and strict tools promise, in the model's form of calls.
 * All become parts of constrain/constrain.h; what they describe is compiled by the engine. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/json.h"
#include "server/oai/fields.h"

static struct constrain_part *new_parts(const struct oai_reader *r, int count) {
    struct constrain_part *parts = arena_alloc(r->arena, (size_t)count, sizeof *parts);
    if (!parts) oai_no_memory(r);
    return parts;
}

static const char *new_path(const struct oai_reader *r, const char *path) {
    const char *copy = arena_strndup(r->arena, path, strlen(path));
    if (!copy) oai_no_memory(r);
    return copy;
}

static struct constrain_part text_part(const char *text) {
    return (struct constrain_part){.kind = CONSTRAIN_TEXT, .text = text, .size = strlen(text)};
}

/* --- fields --- */

/* The reader, the constraint that it fills in, and the field that gave it. */
struct source {
    struct oai_reader *r;
    struct constrain_part *part; /* has a kind if there is a constraint */
    const char *field;           /* name of the field that gave it; NULL: none yet */
};

/* Claims the constraint for `field`; fails if another field has given one, because two have no
 * common meaning. */
static int claim(struct source *s, const char *field) {
    if (s->field)
        return oai_invalid(s->r, field, "an answer has one constraint, and '%s' has given it",
                           s->field);
    s->field = s->part->field = new_path(s->r, field);
    return s->field ? 0 : -1;
}

static int constraint_take_text(struct source *s, const char *field, const cJSON *node,
                                enum constrain_kind kind) {
    if (!node) return 0;
    if (!cJSON_IsString(node)) return oai_expected(s->r->error, field, "a string", node);
    if (claim(s, field)) return -1;
    s->part->kind = kind;
    s->part->text = json_arena_text(s->r->arena, node->valuestring, &s->part->size);
    return s->part->text ? 0 : oai_no_memory(s->r);
}

/* The most values of a schema that is given as a string. A schema in the body counts as part of the
 * body. */
#define SCHEMA_NODES_MAX 200000

/* Reads a schema that is given as a string. */
static int parse_schema(struct source *s, const char *field, const cJSON **node) {
    struct json_limits limits = {.bytes = s->r->rules->body_bytes,
                                 .depth = OAI_JSON_DEPTH,
                                 .unique_keys = true,
                                 .nuls = true,
                                 .nodes = SCHEMA_NODES_MAX};
    struct fault fault = {0};
    const char *text = (*node)->valuestring;
    cJSON *tree;
    if (json_parse(text, strlen(text), &limits, &tree, &fault))
        return oai_invalid(s->r, field, "expected a JSON schema, %s", fault.text);
    cJSON_Delete(s->r->out->schema);
    *node = s->r->out->schema = tree;
    return 0;
}

static int take_schema(struct source *s, const char *field, const cJSON *node) {
    if (!node) return 0;
    if (claim(s, field)) return -1;
    if (cJSON_IsString(node) && parse_schema(s, field, &node)) return -1;
    if (!cJSON_IsObject(node) && !cJSON_IsBool(node))
        return oai_expected(s->r->error, field, "a JSON schema", node);
    s->part->kind = CONSTRAIN_SCHEMA;
    s->part->schema = node;
    return 0;
}

static int take_choice(struct source *s, const char *field, const cJSON *node) {
    const cJSON *child;
    char path[OAI_PATH];
    int count = cJSON_GetArraySize(node), i = 0;
    if (!node) return 0;
    if (!cJSON_IsArray(node) || count < 1 || count > OAI_CHOICES_LISTED_MAX)
        return oai_invalid(s->r, field, "expected an array of 1 to %d strings",
                           OAI_CHOICES_LISTED_MAX);
    struct constrain_part *parts = new_parts(s->r, count);
    if (!parts || claim(s, field)) return -1;
    cJSON_ArrayForEach(child, node) {
        oai_path(path, "%s[%d]", field, i);
        if (!cJSON_IsString(child)) return oai_expected(s->r->error, path, "a string", child);
        parts[i].kind = CONSTRAIN_TEXT;
        parts[i].text = json_arena_text(s->r->arena, child->valuestring, &parts[i].size);
        if (!parts[i++].text) return oai_no_memory(s->r);
    }
    s->part->kind = CONSTRAIN_ALT;
    s->part->children = parts;
    s->part->count = count;
    return 0;
}

static int take_object(struct source *s, const char *field) {
    if (claim(s, field)) return -1;
    s->part->kind = CONSTRAIN_OBJECT;
    return 0;
}

/* Reads {"type": "json_schema", "json_schema": {"name", "schema", "strict"}}. Schemas are enforced
 * with and without `strict`. llama.cpp puts the schema beside the type. */
static int read_format_schema(struct source *s, const cJSON *format) {
    static const char field[] = "response_format.json_schema";
    const cJSON *inner = json_get(format, "json_schema"), *own = json_get(format, "schema");
    bool strict = false;
    if (!inner && own) return take_schema(s, "response_format.schema", own);
    if (!inner) return oai_missing(s->r, field);
    if (!cJSON_IsObject(inner)) return oai_expected(s->r->error, field, "an object", inner);
    if (oai_get_bool(s->r, field, inner, "strict", &strict)) return -1;
    own = json_get(inner, "schema");
    if (!own) return take_object(s, field); /* OpenAI's default: any object */
    return take_schema(s, "response_format.json_schema.schema", own);
}

static int constraint_read_format(struct source *s) {
    const cJSON *format = json_get(s->r->body, "response_format");
    const cJSON *type = json_get(format, "type");
    if (!format) return 0;
    if (!cJSON_IsObject(format))
        return oai_expected(s->r->error, "response_format", "an object", format);
    if (!type) return oai_missing(s->r, "response_format.type");
    if (!cJSON_IsString(type))
        return oai_expected(s->r->error, "response_format.type", "a string", type);
    if (strcmp(type->valuestring, "text") == 0) return 0;
    if (strcmp(type->valuestring, "json_schema") == 0) return read_format_schema(s, format);
    if (strcmp(type->valuestring, "json_object") == 0) {
        const cJSON *own = json_get(format, "schema");
        return own ? take_schema(s, "response_format.schema", own)
                   : take_object(s, "response_format");
    }
    return oai_refuse(s->r->error, 400, "unsupported_parameter", "response_format.type",
                      "Unsupported value for 'response_format.type': '%.64s' is not 'text', "
                      "'json_object' or 'json_schema'.",
                      type->valuestring);
}

/* Reads vLLM's object. Its other members choose a backend or its options, not the language. */
static int read_structured(struct source *s) {
    const cJSON *node = json_get(s->r->body, "structured_outputs");
    bool object = false;
    if (!node) return 0;
    if (!cJSON_IsObject(node))
        return oai_expected(s->r->error, "structured_outputs", "an object", node);
    if (json_get(node, "structural_tag"))
        return oai_refuse(s->r->error, 400, "unsupported_parameter",
                          "structured_outputs.structural_tag",
                          "Unsupported value for 'structured_outputs.structural_tag': this server "
                          "does not support it.");
    if (oai_get_bool(s->r, "structured_outputs", node, "json_object", &object) ||
        take_schema(s, "structured_outputs.json", json_get(node, "json")) ||
        constraint_take_text(s, "structured_outputs.regex", json_get(node, "regex"),
                             CONSTRAIN_REGEX) ||
        take_choice(s, "structured_outputs.choice", json_get(node, "choice")) ||
        constraint_take_text(s, "structured_outputs.grammar", json_get(node, "grammar"),
                             CONSTRAIN_GRAMMAR))
        return -1;
    return object ? take_object(s, "structured_outputs.json_object") : 0;
}

/* Reads llama.cpp's field, in which the empty text is no grammar. */
static int read_grammar(struct source *s) {
    const cJSON *node = json_get(s->r->body, "grammar");
    if (cJSON_IsString(node) && !node->valuestring[0]) return 0;
    return constraint_take_text(s, "grammar", node, CONSTRAIN_GRAMMAR);
}

static int read_fields(struct source *s) {
    const cJSON *body = s->r->body;
    return constraint_read_format(s) || read_structured(s) ||
                   take_schema(s, "guided_json", json_get(body, "guided_json")) ||
                   take_schema(s, "json_schema", json_get(body, "json_schema")) ||
                   take_choice(s, "guided_choice", json_get(body, "guided_choice")) ||
                   constraint_take_text(s, "guided_regex", json_get(body, "guided_regex"),
                                        CONSTRAIN_REGEX) ||
                   constraint_take_text(s, "regex", json_get(body, "regex"), CONSTRAIN_REGEX) ||
                   constraint_take_text(s, "guided_grammar", json_get(body, "guided_grammar"),
                                        CONSTRAIN_GRAMMAR) ||
                   read_grammar(s) ||
                   constraint_take_text(s, "ebnf", json_get(body, "ebnf"), CONSTRAIN_GRAMMAR)
               ? -1
               : 0;
}

/* --- calls --- */

/* Returns whether a schema says no more than that its instances are objects. */
static bool says_nothing(const cJSON *schema) {
    static const char *const words[] = {"type",     "title",  "description", "$schema", "$id",
                                        "$comment", "strict", "default",     "examples"};
    const cJSON *child;
    cJSON_ArrayForEach(child, schema) {
        bool known = cJSON_IsNull(child);
        for (size_t i = 0; i < sizeof words / sizeof *words; i++)
            known = known || strcmp(words[i], child->string) == 0;
        if (!known) return false;
    }
    return true;
}

/* Builds text that does not contain the mark after arguments. */
static void without_end(const struct tool_form *form, struct constrain_part *part) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    int count = tool_form_closes(form, marks);
    CHECK(count > 0); /* tool_derive.c requires it */
    const struct tool_mark end = tool_mark_is_strong(&marks[0])
                                     ? marks[0]
                                     : (struct tool_mark){form->after, strcspn(form->after, "\n")};
    *part = (struct constrain_part){.kind = CONSTRAIN_WITHOUT, .text = end.text, .size = end.size};
}

/* Builds arguments by the tool's schema, which declares all of them: a tool without a schema, or
 * whose schema declares nothing, takes no arguments. `free`: any object. */
static int arguments_part(struct oai_reader *r, const cJSON *function, int index, bool free,
                          struct constrain_part *part) {
    const cJSON *schema = json_get(function, "parameters");
    const struct constrain_tags *tags = r->out->tools.form->tags;
    const struct constrain_notation *notation = r->out->tools.form->notation;
    char path[OAI_PATH];
    oai_path(path, "tools[%d].function.parameters", index);
    if (free) {
        *part = text_part("");
        part->kind = CONSTRAIN_OBJECT;
        part->notation = notation;
        if (tags) without_end(r->out->tools.form, part);
        return 0;
    }
    if (says_nothing(schema)) {
        *part = text_part(tags ? "" : notation ? notation->brackets : "{}");
        return 0;
    }
    *part = (struct constrain_part){.kind = CONSTRAIN_SCHEMA,
                                    .schema = schema,
                                    .only_objects = true,
                                    .tags = tags,
                                    .notation = notation,
                                    .closed = true};
    part->field = new_path(r, path);
    return part->field ? 0 : -1;
}

/* Builds a text of the form; TOOL_ANY in it is an identifier or a number. */
static int mark_part(struct oai_reader *r, const char *text, struct constrain_part *part) {
    const char *any = strchr(text, TOOL_ANY);
    *part = text_part(text);
    if (!any) return 0;
    struct constrain_part *pieces = new_parts(r, 3);
    if (!pieces) return -1;
    pieces[0] = text_part(text);
    pieces[0].size = (size_t)(any - text);
    pieces[1] = text_part("[A-Za-z0-9_-]{1,64}");
    pieces[1].kind = CONSTRAIN_REGEX;
    *part = (struct constrain_part){.kind = CONSTRAIN_SEQ, .children = pieces, .count = 3};
    return mark_part(r, any + 1, &pieces[2]);
}

static int call_part(struct oai_reader *r, const cJSON *tool, int index, bool free,
                     struct constrain_part *part) {
    const struct tool_form *form = r->out->tools.form;
    struct constrain_part *pieces = new_parts(r, 5);
    if (!pieces) return -1;
    if (mark_part(r, form->before, &pieces[0]) || mark_part(r, form->arguments, &pieces[2]) ||
        mark_part(r, form->after, &pieces[4]))
        return -1;
    pieces[1] = text_part(r->out->tools.names[index]);
    *part = (struct constrain_part){.kind = CONSTRAIN_SEQ, .children = pieces, .count = 5};
    return arguments_part(r, json_get(tool, "function"), index, free, &pieces[3]);
}

/* Builds one call of any tool that may be called. `only_strict`: schemas of tools without `strict`
 * do not bind. */
static int any_call(struct oai_reader *r, bool only_strict, struct constrain_part *part) {
    const cJSON *tools = json_get(r->body, "tools"), *tool;
    int index = 0, count = 0;
    struct constrain_part *calls = new_parts(r, r->out->tools.count);
    if (!calls) return -1;
    cJSON_ArrayForEach(tool, tools) {
        bool strict = cJSON_IsTrue(json_get(json_get(tool, "function"), "strict"));
        int at = index++;
        if (r->out->named_tool >= 0 && r->out->named_tool != at) continue;
        if (call_part(r, tool, at, only_strict && !strict, &calls[count++])) return -1;
    }
    *part = (struct constrain_part){.kind = CONSTRAIN_ALT, .children = calls, .count = count};
    return 0;
}

/* Builds a list of calls: open first (between next)* close, or only the first call. */
static int call_list(struct oai_reader *r, const struct constrain_part *call,
                     struct constrain_part *part) {
    struct constrain_part *pieces = new_parts(r, 4), *more = new_parts(r, 1);
    struct constrain_part *next = new_parts(r, 2);
    const struct tool_form *form = r->out->tools.form;
    if (!pieces || !more || !next) return -1;
    bool several = r->out->tools.parallel && r->out->named_tool < 0;
    if (mark_part(r, form->between, &next[0]) || mark_part(r, form->open, &pieces[0]) ||
        mark_part(r, form->close, &pieces[3]))
        return -1;
    next[1] = *call;
    *more = (struct constrain_part){.kind = CONSTRAIN_SEQ, .children = next, .count = 2};
    pieces[1] = *call;
    pieces[2] = (struct constrain_part){
        .kind = CONSTRAIN_REPEAT, .children = more, .count = 1, .max = several ? -1 : 0};
    *part = (struct constrain_part){.kind = CONSTRAIN_SEQ, .children = pieces, .count = 4};
    return 0;
}

#define BLANK      "[ \\t\\r\\n]*"
#define NOT_BEGIN  "(?!" BLANK
#define NOT_INSIDE "(?![\\s\\S]*"

/* Writes the names as alternatives of a regular expression; they are letters, digits, _ and -.
 * Returns NULL without memory. */
static const char *name_pattern(const struct oai_reader *r) {
    const struct tool_set *tools = &r->out->tools;
    size_t size = 0;
    for (int i = 0; i < tools->count; i++) size += strlen(tools->names[i]) + 1;
    char *pattern = arena_alloc(r->arena, size, 1), *at = pattern;
    if (!pattern) return NULL;
    for (int i = 0; i < tools->count; i++) {
        if (i > 0) *at++ = '|';
        at = stpcpy(at, tools->names[i]);
    }
    return pattern;
}

static void write_mark(const struct tool_mark *mark, struct buf *out) {
    for (size_t i = 0; i < mark->size; i++) {
        const char c = mark->text[i];
        if (c == TOOL_ANY) {
            buf_str(out, "[A-Za-z0-9_-]*");
            continue;
        }
        if (strchr("\\^$.|?*+()[]{}/", c)) buf_char(out, '\\');
        buf_char(out, c);
    }
}

/* Writes the marks that begin a call as alternatives of a regular expression. */
static void write_marks(const struct tool_form *form, struct buf *out) {
    struct tool_mark marks[TOOL_MARKS_MAX];
    const char *between = "";
    for (int i = 0, count = tool_form_opens(form, marks); i < count; i++) {
        if (!tool_mark_is_strong(&marks[i])) continue;
        buf_str(out, between);
        write_mark(&marks[i], out);
        between = "|";
    }
}

/* Texts that tool_calls.c would read as the beginning of a call, as pairs of patterns around a
 * name; plain text must not contain them. A call of llama3 begins the text or has the name of a
 * tool. One of hermes has a tag, or the name. One of mistral without a tag or a bracket begins the
 * text; there a name and a brace are enough. */
static const char *const no_calls[][2] = {
    [TOOL_SHAPE_TAGGED] = {")" NOT_INSIDE "\"name\"" BLANK ":" BLANK "\"(", ")\")[\\s\\S]*"},
    [TOOL_SHAPE_BARE] = {NOT_BEGIN "(<\\|python_tag\\|>" BLANK ")?\\{)" NOT_INSIDE "\"name\"" BLANK
                                   ":" BLANK "\"(",
                         ")\")[\\s\\S]*"},
    [TOOL_SHAPE_LISTED] = {NOT_BEGIN "\\{)" NOT_INSIDE "\\[TOOL_CALLS\\])" NOT_INSIDE "\\[" BLANK
                                     "\\{)" NOT_BEGIN "(",
                           ")(\\[ARGS\\]" BLANK ")?\\{)[\\s\\S]*"},
};

#define PATTERN_BYTES_MAX ((size_t)OAI_TOOLS_MAX * (OAI_TOOL_NAME_BYTES + 1) + 1024)

/* Builds text that tool_calls.c does not read as a call. */
static int plain_text(struct oai_reader *r, struct constrain_part *part) {
    const struct tool_form *form = r->out->tools.form;
    struct buf pattern;
    buf_open(&pattern, PATTERN_BYTES_MAX);
    if (tool_form_is_marked(form)) {
        buf_str(&pattern, NOT_INSIDE "(");
        write_marks(form, &pattern);
        buf_str(&pattern, ")");
    }
    if (tool_form_is_marked(form) && !form->bare) {
        buf_str(&pattern, ")[\\s\\S]*");
    } else {
        const char *names = name_pattern(r);
        buf_str(&pattern, no_calls[form->shape][0]);
        buf_str(&pattern, names ? names : "");
        buf_str(&pattern, no_calls[form->shape][1]);
        pattern.failed |= names == NULL;
    }
    const char *text = pattern.failed ? NULL : arena_strndup(r->arena, pattern.data, pattern.size);
    buf_close(&pattern);
    if (!text) return oai_no_memory(r);
    *part = text_part(text);
    part->kind = CONSTRAIN_REGEX;
    return 0;
}

/* Builds calls, or text in which no call begins. */
static int free_calls(struct oai_reader *r, const struct constrain_part *call,
                      struct constrain_part *part) {
    struct constrain_part *pieces = new_parts(r, 2), *more = new_parts(r, 1);
    struct constrain_part *next = new_parts(r, 2);
    if (!pieces || !more || !next || plain_text(r, &pieces[0])) return -1;
    if (tool_form_is_marked(r->out->tools.form)) {
        if (call_list(r, call, &next[0])) return -1;
        next[1] = pieces[0];
        *more = (struct constrain_part){.kind = CONSTRAIN_SEQ, .children = next, .count = 2};
        pieces[1] = (struct constrain_part){
            .kind = CONSTRAIN_REPEAT, .children = more, .count = 1, .max = -1};
        *part = (struct constrain_part){.kind = CONSTRAIN_SEQ, .children = pieces, .count = 2};
        return 0;
    }
    *part = (struct constrain_part){.kind = CONSTRAIN_ALT, .children = pieces, .count = 2};
    return call_list(r, call, &pieces[1]);
}

static bool any_strict(const cJSON *tools) {
    const cJSON *tool;
    cJSON_ArrayForEach(tool, tools) {
        if (cJSON_IsTrue(json_get(json_get(tool, "function"), "strict"))) return true;
    }
    return false;
}

/* Adds calls. Promised calls replace a format; with "auto" the answer has either the format or
 * calls.
 */
static int add_calls(struct oai_reader *r, struct constrain_part *answer, bool given) {
    bool promised = r->out->call_promised;
    struct constrain_part call, *either;
    if (!r->out->tools.form || r->out->tools.form->shape == TOOL_SHAPE_CHANNELS) return 0;
    if (!promised && !given && !any_strict(json_get(r->body, "tools"))) return 0;
    if (any_call(r, !promised, &call)) return -1;
    r->out->constraint = answer;
    r->out->constraint_field = given && !promised ? answer->field : "tools";
    if (promised || !given) {
        /* spelled as the template will write them, so that the next turn continues this
         * conversation */
        int rc = promised ? call_list(r, &call, answer) : free_calls(r, &call, answer);
        answer->one_spacing = true;
        return rc;
    }
    either = new_parts(r, 2);
    if (!either) return -1;
    either[0] = *answer;
    *answer = (struct constrain_part){
        .kind = CONSTRAIN_ALT, .field = either[0].field, .children = either, .count = 2};
    return call_list(r, &call, &either[1]);
}

int oai_read_constraint(struct oai_reader *r) {
    struct constrain_part *part = new_parts(r, 1);
    struct source source = {.r = r, .part = part};
    if (!part || read_fields(&source)) return -1;
    if (source.field) r->out->constraint = part;
    r->out->constraint_field = source.field;
    return add_calls(r, part, source.field != NULL);
}
