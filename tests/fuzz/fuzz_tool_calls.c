/* An answer's text, searched for calls. The first byte says in which form and whether there may be
 * several, the second how long the pieces are that the text comes in: whole or in pieces it must
 * mean the same. Arguments must be JSON exactly where the reader of requests says so. */
#include <string.h>

#include "base/check.h"
#include "base/json.h"
#include "engine/engine_text.h"
#include "server/oai/tool_calls.h"
#include "server/oai/tool_json.h"

#define TEXT_BYTES_MAX 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const names[] = {"f", "get_weather"};

/* The meaning of a text as bytes: each piece after its kind; pieces of one kind are joined. */
struct meaning {
    struct buf out;
    size_t arguments; /* where those of the last call begin in it */
    enum tool_piece_kind kind;
    size_t end;   /* end of the last piece */
    bool literal; /* the last piece ended a literal */
};

/* Arguments of a call that has ended are JSON where they are tags, or were read as literals to
 * their end. */
static void check_arguments(const struct meaning *m, const struct tool_reader *r) {
    if (m->kind == TOOL_ARGUMENTS &&
        (r->tools->form->tags || (r->tools->form->notation && m->literal)))
        CHECK(tool_json_is_value(m->out.data + m->arguments, m->out.size - m->arguments));
}

static void add_pieces(struct meaning *m, struct tool_reader *r, const char *text, size_t end,
                       bool last) {
    struct tool_piece piece;
    while ((piece = tool_reader_next(r, text, end, last)).kind != TOOL_MORE) {
        CHECK(piece.end <= end);
        CHECK(piece.begin >= m->end || piece.kind == TOOL_CALL || m->kind == TOOL_CALL);
        CHECK(piece.kind == TOOL_BARE ? m->kind == TOOL_CALL : piece.begin < piece.end);
        CHECK(piece.kind != TOOL_ARGUMENTS || m->kind == TOOL_CALL || m->kind == TOOL_ARGUMENTS);
        if (piece.kind == TOOL_CALL || piece.kind == TOOL_TEXT) check_arguments(m, r);
        if (piece.kind != m->kind || piece.kind == TOOL_CALL) buf_char(&m->out, (char)piece.kind);
        if (piece.kind != m->kind) m->arguments = m->out.size;
        size_t bytes;
        const char *at = tool_piece_text(&piece, text, &bytes);
        buf_add(&m->out, at, bytes);
        m->kind = piece.kind;
        m->literal = r->phase == TOOL_IN_LITERAL && r->literal.depth == 0;
        m->end = piece.end;
    }
    CHECK(last || r->phase != TOOL_IN_TEXT || end - r->at < TOOL_HELD_MAX);
}

static void read_pieces(struct meaning *m, const struct tool_set *tools, const char *text,
                        size_t size, size_t step) {
    struct tool_reader r = {.tools = tools};
    *m = (struct meaning){.kind = TOOL_MORE};
    buf_open(&m->out, 1 << 16);
    for (size_t end = step; step && end < size; end += step) add_pieces(m, &r, text, end, false);
    add_pieces(m, &r, text, size, true);
    if (tool_reader_called(&r)) check_arguments(m, &r);
    buf_char(&m->out, (char)tool_reader_called(&r));
    CHECK(!m->out.failed);
}

/* Bytes of the value that `text` begins with; 0 for none. */
static size_t json_end(const char *text, size_t size) {
    struct tool_json json = {0};
    for (size_t i = 0; i < size; i++) {
        enum tool_json_step step = tool_json_step(&json, text[i]);
        if (step == TOOL_JSON_BAD) return 0;
        if (step == TOOL_JSON_DONE) return i + 1;
    }
    return 0;
}

/* The other reader looks closer: at characters, and at numbers beyond a double. */
static bool is_plain(const char *text, size_t size) {
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)text[i] >= 0x80 || strchr("\\eE", text[i])) return false;
    return size < 300;
}

static void check_json(const char *text, size_t size) {
    const struct json_limits limits = {.bytes = TEXT_BYTES_MAX, .depth = 64};
    size_t end = json_end(text, size);
    cJSON *tree = NULL;
    if (end) {
        int rc = json_parse(text, end, &limits, &tree, NULL);
        CHECK(rc == 0 || !is_plain(text, end));
    } else if (size && strchr("{[", text[0])) {
        CHECK(json_parse(text, size, &limits, &tree, NULL) != 0);
    }
    json_free(tree);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2 || size > TEXT_BYTES_MAX) return 0;
    static const struct tool_parameter some[] = {
        {"s", CONSTRAIN_TYPE_STRING},
        {"city", CONSTRAIN_TYPE_STRING | CONSTRAIN_TYPE_NULL},
        {"i", CONSTRAIN_TYPE_NUMBER},
        {NULL, 0}};
    static const struct tool_parameter none[] = {{NULL, 0}};
    static const struct tool_parameter *const parameters[] = {some, none};
    /* Shapes that only templates show (tool_derive.h). */
    static const struct tool_form section = {.name = "section",
                                             .shape = TOOL_SHAPE_TAGGED,
                                             .open = "<TOOLCALL>[",
                                             .before = "{\"name\": \"",
                                             .arguments = "\", \"arguments\": ",
                                             .after = "}",
                                             .between = ", ",
                                             .close = "]</TOOLCALL>"};
    static const struct tool_form weak = {.name = "weak",
                                          .shape = TOOL_SHAPE_NAMED,
                                          .open = "<|tools|>[",
                                          .before = "{\"",
                                          .arguments = "\": ",
                                          .after = "}",
                                          .between = ", ",
                                          .close = "]<|end|>"};
    static const struct constrain_tags raw_tags = {.open = "<param name=\"",
                                                   .named = "\">",
                                                   .gap = "",
                                                   .value = "",
                                                   .line = "",
                                                   .close = "</param>",
                                                   .after = "",
                                                   .raw = {"<![CDATA[", "]]>"}};
    static const struct tool_form raw = {.name = "raw",
                                         .shape = TOOL_SHAPE_NAMED,
                                         .open = "",
                                         .before = "<function name=\"",
                                         .arguments = "\">",
                                         .after = "</function>",
                                         .between = "",
                                         .close = "",
                                         .tags = &raw_tags};
    static const struct tool_form *const forms[] = {&tool_forms[TOOL_FORMAT_HERMES],
                                                    &tool_forms[TOOL_FORMAT_LLAMA3],
                                                    &tool_forms[TOOL_FORMAT_MISTRAL],
                                                    &tool_forms[TOOL_FORMAT_QWEN3_CODER],
                                                    &tool_forms[TOOL_FORMAT_SEED_OSS],
                                                    &tool_forms[TOOL_FORMAT_GLM45],
                                                    &tool_forms[TOOL_FORMAT_MINIMAX_M2],
                                                    &tool_forms[TOOL_FORMAT_DEEPSEEK_V3],
                                                    &tool_forms[TOOL_FORMAT_DEEPSEEK_V31],
                                                    &tool_forms[TOOL_FORMAT_DEEPSEEK_V32],
                                                    &tool_forms[TOOL_FORMAT_KIMI_K2],
                                                    &tool_forms[TOOL_FORMAT_GRANITE],
                                                    &tool_forms[TOOL_FORMAT_COMMAND],
                                                    &tool_forms[TOOL_FORMAT_FUNCTIONARY],
                                                    &section,
                                                    &weak,
                                                    &tool_forms[TOOL_FORMAT_LFM2],
                                                    &tool_forms[TOOL_FORMAT_GEMMA4],
                                                    &raw,
                                                    &tool_forms[TOOL_FORMAT_MINIMAX_M3]};
    size_t form = (data[0] & 1) | (data[0] >> 1 & 30);
    if (form >= sizeof forms / sizeof *forms) form &= 15;
    const struct tool_set tools = {forms[form], names, 2, !(data[0] & 2), parameters};
    const char *text = (const char *)data + 2;
    const char *brace = memchr(text, '{', size - 2);
    struct meaning whole, cut;
    read_pieces(&whole, &tools, text, size - 2, 0);
    read_pieces(&cut, &tools, text, size - 2, 1 + data[1] % 32);
    CHECK(whole.out.size == cut.out.size);
    CHECK(memcmp(whole.out.data, cut.out.data, cut.out.size) == 0);
    buf_close(&whole.out);
    buf_close(&cut.out);
    if (brace) check_json(brace, size - 2 - (size_t)(brace - text));
    return 0;
}
