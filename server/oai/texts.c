/* POST /tokenize, /detokenize and /apply-template: text and chats as the model reads them. */
#include <inttypes.h>

#include "base/json.h"
#include "server/oai/edits.h"

/* --- requests --- */

/* Reads the prompt under llama.cpp's name; special tokens are added only on request. */
static int read_content(struct oai_reader *r) {
    struct oai_request *out = r->out;
    struct oai_prompt *prompt = arena_alloc(r->arena, 1, sizeof *prompt);
    if (!prompt) return oai_no_memory(r);
    out->prompt_field = "content";
    out->prompts = prompt;
    out->prompt_count = 1;
    out->parse_special = true;
    return oai_get_str(r, NULL, r->body, "content", &prompt->text) ||
                   oai_get_bool(r, NULL, r->body, "parse_special", &out->parse_special) ||
                   oai_get_bool(r, NULL, r->body, "add_special_tokens", &out->add_special) ||
                   oai_get_bool(r, NULL, r->body, "add_special", &out->add_special)
               ? -1
               : 0;
}

static int read_tokenize(struct oai_reader *r) {
    if (oai_get_bool(r, NULL, r->body, "return_token_strs", &r->out->return_token_strs) ||
        oai_get_bool(r, NULL, r->body, "with_pieces", &r->out->with_pieces))
        return -1;
    if (json_get(r->body, "messages")) return oai_read_messages(r);
    if (json_get(r->body, "content") && !json_get(r->body, "prompt"))
        return oai_check_unused(r->body, r->error) ? -1 : read_content(r);
    const cJSON *prompt = json_get(r->body, "prompt");
    if (!prompt) return oai_missing(r, "prompt");
    if (oai_check_unused(r->body, r->error)) return -1;
    r->out->parse_special = true;
    if (cJSON_IsString(prompt)) return oai_read_prompts(r);
    return oai_invalid(r, "prompt", "expected a string, found %s", json_type_name(prompt));
}

static int read_detokenize(struct oai_reader *r) {
    struct oai_request *out = r->out;
    const cJSON *tokens = json_get(r->body, "tokens");
    out->prompt_field = "tokens";
    if (!tokens) return oai_missing(r, "tokens");
    if (!cJSON_IsArray(tokens))
        return oai_invalid(r, "tokens", "expected an array of token ids, found %s",
                           json_type_name(tokens));
    out->prompts = arena_alloc(r->arena, 1, sizeof *out->prompts);
    if (!out->prompts) return oai_no_memory(r);
    out->prompt_count = 1;
    return oai_get_ids(r, tokens, "tokens", &out->prompts[0].ids, &out->prompts[0].id_count);
}

/* --- answers --- */

/* Writes a token's text; a part of a character is written as its bytes. */
static void texts_write_piece(struct buf *out, const struct engine *engine, int32_t id) {
    const char *bytes = "";
    size_t size = engine_token_bytes(engine, id, &bytes);
    buf_fmt(out, "{\"id\":%" PRId32 ",\"piece\":", id);
    if (utf8_valid(bytes, size)) {
        json_write_str(out, bytes, size);
    } else {
        for (size_t i = 0; i < size; i++)
            buf_fmt(out, "%c%d", i ? ',' : '[', (unsigned char)bytes[i]);
        buf_char(out, ']');
    }
    buf_char(out, '}');
}

/* Writes which part of its picture a tile shows: left, top, right and bottom, in widths and heights
 * of the picture. */
static void write_area(struct buf *out, const struct picture *picture, int tile) {
    const bool whole = tile >= picture->rows * picture->columns;
    const int rows = whole ? 1 : picture->rows, columns = whole ? 1 : picture->columns;
    const int row = whole ? 0 : tile / columns, column = whole ? 0 : tile % columns;
    buf_fmt(out, "\"area\":[%.9g,%.9g,%.9g,%.9g]", (double)column / columns, (double)row / rows,
            (double)(column + 1) / columns, (double)(row + 1) / rows);
}

/* Writes which tokens show which part of which picture. */
static void write_pictures(struct buf *out, const struct oai_request *request,
                           const struct engine_ids *ids) {
    int i = 0;
    for (int p = 0; p < request->picture_count; p++) {
        const struct picture *picture = request->pictures[p].prepared;
        buf_fmt(out, "%s{\"width\":%d,\"height\":%d,\"parts\":[", p ? "," : "\"pictures\":[",
                picture->width, picture->height);
        for (int begin = i; i < ids->picture_row_count; i++) {
            const struct picture_rows *rows = &ids->picture_rows[i];
            if (rows->picture != p) break;
            buf_fmt(out, "%s{\"at\":%zu,\"count\":%d,\"first\":%d,\"rows\":%d,\"columns\":%d,",
                    i > begin ? "," : "", rows->at, rows->count, rows->first, picture->tile_rows,
                    picture->tile_columns);
            write_area(out, picture, rows->tile);
            buf_char(out, '}');
        }
        buf_str(out, "]}");
    }
    if (request->picture_count) buf_str(out, "],");
}

static void write_tokens(struct buf *out, const struct oai_rules *rules,
                         const struct oai_request *request, const struct engine_ids *ids) {
    const struct engine *engine = rules->engine;
    buf_fmt(out, "{\"count\":%zu,\"max_model_len\":%d,\"tokens\":[", ids->count,
            rules->info->max_model_len);
    for (size_t i = 0; i < ids->count; i++) {
        if (i) buf_char(out, ',');
        if (request->with_pieces)
            texts_write_piece(out, engine, ids->ids[i]);
        else
            buf_int(out, ids->ids[i]);
    }
    buf_str(out, "],");
    write_pictures(out, request, ids);
    buf_str(out, "\"token_strs\":");
    buf_str(out, request->return_token_strs ? "[" : "null}");
    if (!request->return_token_strs) return;
    for (size_t i = 0; i < ids->count; i++) {
        const char *name = "";
        size_t size = engine_token_name(engine, ids->ids[i], &name);
        if (i) buf_char(out, ',');
        json_write_str(out, name, size);
    }
    buf_str(out, "]}");
}

/* Writes {name: text}, and the text again under a second name if there is one. */
static void texts_write_text(struct buf *out, const struct engine *engine,
                             const struct engine_ids *ids, const char *name, const char *second) {
    struct buf text;
    buf_open(&text, out->limit);
    oai_render_token_texts(&text, engine, ids->ids, ids->count);
    buf_inherit(out, &text);
    for (int i = 0; i < (second ? 2 : 1); i++) {
        buf_fmt(out, "%s\"%s\":", i ? "," : "{", i ? second : name);
        json_write_str(out, text.data ? text.data : "", text.size);
    }
    buf_char(out, '}');
    buf_close(&text);
}

/* Writes the text under vLLM's name and llama.cpp's. */
static void write_detokenized(struct buf *out, const struct oai_rules *rules,
                              const struct oai_request *request, const struct engine_ids *ids) {
    (void)request;
    texts_write_text(out, rules->engine, ids, "prompt", "content");
}

void oai_count_answer(struct buf *out, const struct oai_rules *rules,
                      const struct oai_request *request, const struct engine_ids *ids) {
    (void)rules;
    buf_fmt(out, "{\"input_tokens\":%zu", ids->count);
    oai_edits_write(out, request, ids->count);
    buf_char(out, '}');
}

static void write_rendered(struct buf *out, const struct oai_rules *rules,
                           const struct oai_request *request, const struct engine_ids *ids) {
    (void)request;
    texts_write_text(out, rules->engine, ids, "prompt", NULL);
}

/* --- the rows --- */

static const struct oai_field tokenize_fields[] = {
    {"return_token_strs", OAI_ANY}, {"content", OAI_ANY}, {"with_pieces", OAI_ANY},
    {"add_special", OAI_ANY},       {NULL, OAI_ANY},
};

const struct oai_kind oai_tokenize = {
    .path = "/tokenize",
    .schema = "TokenizeRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_MESSAGES | OAI_FIELDS_PROMPT,
    .fields = tokenize_fields,
    .parse = read_tokenize,
    .answer = write_tokens,
};

static const struct oai_field detokenize_fields[] = {
    {"tokens", OAI_ANY},
    {NULL, OAI_ANY},
};

const struct oai_kind oai_detokenize = {
    .path = "/detokenize",
    .schema = "DetokenizeRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = detokenize_fields,
    .parse = read_detokenize,
    .answer = write_detokenized,
};

const struct oai_kind oai_template = {
    .path = "/apply-template",
    .schema = "TemplateRequest",
    .groups = OAI_FIELDS_ANY | OAI_FIELDS_MESSAGES,
    .parse = oai_read_messages,
    .answer = write_rendered,
};
