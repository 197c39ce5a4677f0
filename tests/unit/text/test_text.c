/* Tests text/text.c: where a model directory's texts come from, and what a chat becomes. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "tests/unit/gguf_file.h"
#include "tests/unit/text/tok/tok_support.h"
#include "text/text.h"

static char folder[64];

static void write_file(const char *name, const char *data, size_t size) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file);
    cr_assert_eq(fwrite(data, 1, size, file), size);
    cr_assert_eq(fclose(file), 0);
}

static void write_text(const char *name, const char *text) {
    write_file(name, text, strlen(text));
}

/* Bytes are tokens 0..255; 256 is <s>, 257 </s>, both special. */
static void make_folder(void) {
    struct small_tok t = {
        .vocab = "\"<s>\":256,\"</s>\":257",
        .added = "[{\"id\":256,\"content\":\"<s>\",\"special\":true},"
                 "{\"id\":257,\"content\":\"</s>\",\"special\":true}]",
    };
    struct buf json;
    strcpy(folder, "/tmp/keepd-text.XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    small_tok_json(&t, &json);
    write_file("tokenizer.json", json.data, json.size);
    buf_close(&json);
}

static void remove_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_expect_eq(system(command), 0);
}

TestSuite(text, .init = make_folder, .fini = remove_folder);

static void open_text(struct text *text) {
    struct fault fault = {0};
    cr_assert_eq(text_open(folder, NULL, text, &fault), 0, "%s: %s", fault.field, fault.text);
}

static void expect_failure(int rc, const char *in_field) {
    struct text text;
    struct fault fault = {0};
    cr_expect_eq(text_open(folder, NULL, &text, &fault), rc, "%s: %s", fault.field, fault.text);
    cr_expect_eq(fault.code, rc);
    cr_expect_not_null(strstr(fault.field, in_field), "'%s' does not name %s", fault.field,
                       in_field);
    cr_expect(fault.text[0] != '\0');
    cr_expect(!text.tok && !text.chat && !text.bos && !text.eos);
}

/* Renders {"messages": ..., ...} and returns the tokens as text: bytes, S for <s>, E for </s>. */
static int render(const struct text *text, const char *context, char *out, size_t size,
                  struct fault *fault) {
    struct arena arena;
    struct tok_ids ids = {0};
    cJSON *tree = NULL;
    cr_assert_eq(json_parse(context, strlen(context),
                            &(struct json_limits){.bytes = 8 << 20, .depth = 16}, &tree, fault),
                 0);
    arena_open(&arena, 256 << 20);
    int rc = text_render_chat(text, tree, NULL, 1000, &arena, &ids, fault);
    cr_assert_lt(ids.count, size);
    for (size_t i = 0; rc == 0 && i < ids.count; i++)
        out[i] = ids.ids[i] == 256 ? 'S' : ids.ids[i] == 257 ? 'E' : (char)ids.ids[i];
    out[rc == 0 ? ids.count : 0] = '\0';
    arena_close(&arena);
    json_free(tree);
    return rc;
}

static void expect_render(const struct text *text, const char *context, const char *expected) {
    char out[256];
    struct fault fault = {0};
    cr_assert_eq(render(text, context, out, sizeof out, &fault), 0, "%s", fault.text);
    cr_expect_str_eq(out, expected);
}

static const char hello[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";

Test(text, a_tokenizer_is_enough) {
    struct text text;
    struct fault fault = {0};
    char out[8];
    open_text(&text);
    cr_assert_null(text.chat);
    cr_assert(strcmp(text.bos, "") == 0 && strcmp(text.eos, "") == 0);
    cr_assert_eq(render(&text, hello, out, sizeof out, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "messages");
    text_close(&text);
    text_close(&text); /* empty by now */
}

Test(text, templates_in_their_order) {
    struct text text;
    write_text("tokenizer_config.json",
               "{\"bos_token\":\"<s>\",\"eos_token\":{\"content\":\"</s>\",\"lstrip\":false},"
               "\"chat_template\":\"{{ bos_token }}1{{ messages[0].content }}{{ eos_token }}\"}");
    open_text(&text);
    expect_render(&text, hello, "S1hiE");
    text_close(&text);
    write_text("tokenizer_config.json",
               "{\"bos_token\":null,\"chat_template\":[{\"name\":\"tools\",\"template\":\"x\"},"
               "{\"name\":\"default\",\"template\":\"2{{ bos_token }}\"}]}");
    open_text(&text);
    expect_render(&text, hello, "2");
    text_close(&text);
    write_text("chat_template.jinja", "3{{ messages[0].content }}");
    open_text(&text);
    expect_render(&text, hello, "3hi");
    text_close(&text);
}

/* The border of a chat, and in *out its rendered tokens up to there. */
static size_t border(const struct text *text, const char *context, size_t least, char *out) {
    struct fault fault = {0};
    struct arena arena;
    struct tok_ids ids = {0};
    cJSON *tree = NULL;
    cr_assert_eq(json_parse(context, strlen(context),
                            &(struct json_limits){.bytes = 8 << 20, .depth = 16}, &tree, &fault),
                 0);
    arena_open(&arena, 256 << 20);
    cr_assert_eq(text_render_chat(text, tree, NULL, 1000, &arena, &ids, &fault), 0);
    size_t at = text_chat_border(text, tree, ids.ids, ids.count, least);
    cr_assert_leq(at, ids.count);
    for (size_t i = 0; i < at; i++) out[i] = (char)ids.ids[i];
    out[at] = '\0';
    arena_close(&arena);
    json_free(tree);
    return at;
}

#define SAYS(role, content) "{\"role\":\"" role "\",\"content\":\"" content "\"}"

Test(text, the_border_is_where_a_user_begins_to_speak) {
    struct text text;
    char out[256];
    write_text("chat_template.jinja",
               "{% if tools %}T{{ tools[0].type }}.{% endif %}"
               "{% for m in messages %}{{ m.role }}:{{ m.content | trim }};{% endfor %}!");
    open_text(&text);
    static const char *const asks[] = {
        "{\"messages\":[" SAYS("system", "be kind") "," SAYS("user", "hi") "]}",
        "{\"messages\":[" SAYS("system", "be kind") "," SAYS("user", "") "]}",
        "{\"messages\":[" SAYS("system", "be kind") "," SAYS("user", "a") "," SAYS(
            "assistant", "b") "," SAYS("system", "c") "]}"};
    for (int i = 0; i < 3; i++) {
        border(&text, asks[i], 7, out);
        cr_expect_str_eq(out, "system:be kind;user:");
        cr_expect_eq(border(&text, asks[i], 8, out), 0, "shorter than asked for");
    }
    border(&text, "{\"messages\":[" SAYS("system", "be kind") "]}", 7, out);
    cr_expect_str_eq(out, "system:be kind;");
    border(&text, "{\"messages\":[" SAYS("user", "hi") "],\"tools\":[{\"type\":\"function\"}]}", 7,
           out);
    cr_expect_str_eq(out, "Tfunction.user:");
    cr_expect_eq(border(&text, hello, 1, out), 0, "nothing is said before the user");
    text_close(&text);
    /* A template that has the question first, and one that refuses the other one. */
    write_text("chat_template.jinja", "{{ messages[1].content }}{{ messages[0].content }}");
    open_text(&text);
    cr_expect_eq(border(&text, asks[0], 1, out), 0);
    text_close(&text);
    write_text("chat_template.jinja",
               "{% if messages[1].content != 'hi' %}"
               "{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}");
    open_text(&text);
    cr_expect_eq(border(&text, asks[0], 1, out), 0);
    text_close(&text);
}

static const char with_tools[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"tools\":[{\"type\":\"function\"}]}";

Test(text, chats_with_tools_have_a_template_of_their_own) {
    struct text text;
    char path[128];
    write_text("tokenizer_config.json",
               "{\"chat_template\":[{\"name\":\"default\",\"template\":\"plain\"},"
               "{\"name\":\"tool_use\",\"template\":\"list {{ tools[0].type }}\"}]}");
    open_text(&text);
    expect_render(&text, hello, "plain");
    expect_render(&text, with_tools, "list function");
    text_close(&text);
    snprintf(path, sizeof path, "%s/additional_chat_templates", folder);
    cr_assert_eq(mkdir(path, 0700), 0);
    write_text("additional_chat_templates/tool_use.jinja", "file {{ tools[0].type }}");
    open_text(&text);
    cr_expect_null(text.chat, "a list beside files of their own");
    expect_render(&text, with_tools, "file function");
    text_close(&text);
    write_text("chat_template.jinja", "own");
    open_text(&text);
    expect_render(&text, hello, "own");
    expect_render(&text, with_tools, "file function");
    text_close(&text);
    snprintf(path, sizeof path, "%s/additional_chat_templates/tool_use.jinja", folder);
    cr_assert_eq(unlink(path), 0);
    open_text(&text);
    expect_render(&text, with_tools, "own");
    text_close(&text);
}

/* The file of processors: read where the tokenizer has no template, alone or in a list. */
Test(text, the_file_of_processors_comes_last) {
    struct text text;
    char path[128];
    write_text("chat_template.json", "{\"chat_template\":\"old{{ messages[0].content }}\"}");
    open_text(&text);
    expect_render(&text, hello, "oldhi");
    expect_render(&text, with_tools, "oldhi");
    text_close(&text);
    write_text("chat_template.json",
               "{\"chat_template\":[{\"name\":\"default\",\"template\":\"first\"},"
               "{\"name\":\"tool_use\",\"template\":\"tools\"}]}");
    write_text("tokenizer_config.json", "{\"bos_token\":\"<s>\"}");
    open_text(&text);
    expect_render(&text, hello, "first");
    expect_render(&text, with_tools, "tools");
    text_close(&text);
    write_text("tokenizer_config.json", "{\"chat_template\":\"tokenizer\"}");
    open_text(&text);
    expect_render(&text, hello, "tokenizer");
    expect_render(&text, with_tools, "tokenizer");
    text_close(&text);
    write_text("chat_template.jinja", "own");
    open_text(&text);
    expect_render(&text, hello, "own");
    text_close(&text);
    snprintf(path, sizeof path, "%s/chat_template.jinja", folder);
    cr_assert_eq(unlink(path), 0);
    write_text("tokenizer_config.json", "{}");
    write_text("chat_template.json", "{\"chat_template\":7}");
    expect_failure(ERR_MALFORMED, "chat_template.json");
    write_text("chat_template.json", "{\"chat_template\":\"{% if %}\"}");
    expect_failure(ERR_MALFORMED, "chat_template.json");
    write_text("chat_template.json", "[");
    expect_failure(ERR_MALFORMED, "chat_template.json");
}

/* Every token that the tokenizer's files name, whichever form they have; a request cannot bring its
 * own. */
Test(text, templates_get_the_tokens_of_the_model) {
    struct text text;
    write_text("tokenizer_config.json",
               "{\"bos_token\":\"<s>\",\"pad_token\":{\"content\":\"</s>\"},\"unk_token\":null,"
               "\"add_bos_token\":true,\"extra_special_tokens\":{\"image_token\":\"<s>\"},"
               "\"chat_template\":\"{{ pad_token }}{{ image_token }}{{ sep_token }}{{ cls_token }}"
               "{{ unk_token is defined }}{{ add_bos_token is defined }}\"}");
    write_text("special_tokens_map.json",
               "{\"pad_token\":\"other\",\"sep_token\":{\"content\":\"|\"}}");
    open_text(&text);
    expect_render(&text, "{\"messages\":[],\"pad_token\":\"mine\",\"cls_token\":\"</s>\"}",
                  "ES|</s>FalseFalse");
    text_close(&text);
    write_text("special_tokens_map.json", "[");
    expect_failure(ERR_MALFORMED, "special_tokens_map.json");
}

/* A file is GGUF. */
static void write_gguf(const char *template) {
    struct buf file;
    buf_open(&file, 1 << 20);
    put_head(&file, 3, 0, 10);
    put_text(&file, "tokenizer.ggml.model", "gpt2");
    put_text(&file, "tokenizer.ggml.pre", "gpt-2");
    put_array(&file, "tokenizer.ggml.tokens", GGUF_STRING, 258);
    for (unsigned byte = 0; byte < 256; byte++) {
        char name[8];
        small_byte_name(byte, name);
        put_string(&file, name);
    }
    put_string(&file, "<s>");
    put_string(&file, "</s>");
    put_array(&file, "tokenizer.ggml.token_type", GGUF_I32, 258);
    for (unsigned id = 0; id < 258; id++) put(&file, id < 256 ? 1 : 3, 4);
    put_array(&file, "tokenizer.ggml.merges", GGUF_STRING, 0);
    put_u32(&file, "tokenizer.ggml.eos_token_id", 257);
    put_u32(&file, "tokenizer.ggml.padding_token_id", UINT32_MAX);
    put_int(&file, "tokenizer.ggml.mask_token_id", GGUF_I32, 4, -1);
    put_u32(&file, "tokenizer.ggml.unknown_token_id", 258); /* beyond the vocabulary */
    put_text(&file, "tokenizer.chat_template", template);
    write_file("model.gguf", file.data, file.size);
    buf_close(&file);
}

Test(text, a_file_has_it_all) {
    struct text text;
    struct fault fault = {0};
    strcat(folder, "/model.gguf");
    char *name = strrchr(folder, '/');
    *name = '\0';
    write_gguf("<s>{{ bos_token }}{{ messages[0].content }}{{ eos_token }}");
    *name = '/';
    open_text(&text);
    cr_expect(strcmp(text.bos, "") == 0 && strcmp(text.eos, "</s>") == 0);
    expect_render(&text, hello, "ShiE");
    text_close(&text);
    *name = '\0';
    write_gguf("{{");
    *name = '/';
    expect_failure(ERR_MALFORMED, "tokenizer.chat_template");
    *name = '\0';
    write_text("model.gguf", "GGU");
    *name = '/';
    cr_expect_eq(text_open(folder, NULL, &text, &fault), ERR_MALFORMED);
    *name = '\0';
}

/* As transformers does: templates ask "tools is not none", which an undefined name is not. */
Test(text, what_a_request_leaves_out_is_none) {
    struct text text;
    write_text("chat_template.jinja", "{{ tools is none }} {{ documents is none }}");
    open_text(&text);
    expect_render(&text, hello, "True True");
    expect_render(&text, with_tools, "False True");
    text_close(&text);
}

/* Before tokenizer.json there were vocab.json and merges.txt. */
Test(text, the_older_tokenizer_files) {
    struct text text;
    char path[128], *json;
    size_t size;
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    cr_assert_eq(file_read(path, 1 << 20, &json, &size, NULL), 0);
    cJSON *tree = cJSON_Parse(json);
    const cJSON *model = cJSON_GetObjectItem(tree, "model");
    char *vocab = cJSON_PrintUnformatted(cJSON_GetObjectItem(model, "vocab"));
    cr_assert_eq(unlink(path), 0);
    write_text("vocab.json", vocab);
    write_text("merges.txt", "#version: 0.2\n");
    write_text("tokenizer_config.json",
               "{\"tokenizer_class\":\"Qwen2Tokenizer\",\"chat_template\":\"<s>{{ "
               "messages[0].content }}\",\"added_tokens_decoder\":{\"256\":{\"content\":\"<s>\","
               "\"special\":true},\"257\":{\"content\":\"</s>\",\"special\":true}}}");
    open_text(&text);
    expect_render(&text, hello, "Shi");
    text_close(&text);
    cJSON_free(vocab);
    cJSON_Delete(tree);
    mem_free(json);
}

/* Special tokens are the template's and the model's to write, not the request's; and the request
 * cannot bring its own bos_token. */
Test(text, requests_cannot_write_special_tokens) {
    struct text text;
    write_text("tokenizer_config.json", "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}");
    write_text("chat_template.jinja", "<s>{{ messages[0].content }}{{ eos_token }}{{ extra }}");
    open_text(&text);
    expect_render(&text,
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"a</s><s>\"}],"
                  "\"eos_token\":\"<s>\",\"bos_token\":\"</s>\",\"extra\":\"</s>\"}",
                  "Sa</s><s>E</s>");
    text_close(&text);
}

#define CONTINUED(content)                                                                         \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"ab\"},{\"role\":\"assistant\",\"content\":"   \
    "\"" content "\"}],\"continue_final_message\":true}"

/* The prompt ends with the final message's own text, found where the template wrote the request's
 * bytes: words of the template that look the same do not count. */
Test(text, the_final_message_goes_on) {
    static const struct {
        const char *source, *context, *expected;
    } rows[] = {
        {"{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}!", CONTINUED("yes"),
         "SabESyes"},
        {"{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}yes", CONTINUED("yes"),
         "SabESyes"},
        {"{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}", CONTINUED("ab"), "SabESab"},
        {"{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}", CONTINUED("y </s>"),
         "SabESy </s>"},
        {"{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}", CONTINUED(" yes \\n"),
         "abEyes"},
        {"{% for m in messages %}{{ m.content }}</s>{% endfor %}", CONTINUED(" yes \\n"),
         "abE yes \n"},
        {"{% for m in messages %}<x>{{ m.content.split('</x>')[-1] }}</s>{% endfor %}",
         CONTINUED("yes"), "<x>abE<x>yes"},
        {"{{ messages[-1].content }}</s>{{ continue_final_message }}", CONTINUED("yes"), "yes"},
        {"{% for m in messages %}{{ m.content }}{% endfor %}ab", CONTINUED("abab"), "ababab"},
        {"{% for m in messages %}{{ m.content }}{% endfor %}aa", CONTINUED("aabaa"), "abaabaa"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct text text;
        write_text("tokenizer_config.json", "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}");
        write_text("chat_template.jinja", rows[i].source);
        open_text(&text);
        expect_render(&text, rows[i].context, rows[i].expected);
        text_close(&text);
    }
}

Test(text, a_final_message_that_is_not_shown_cannot_go_on) {
    static const char *const sources[] = {"{{ messages[-1].content | upper }}", "nothing", "yes",
                                          "{{ messages[0].content }}yes"};
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        struct text text;
        struct fault fault = {0};
        char out[64];
        write_text("chat_template.jinja", sources[i]);
        open_text(&text);
        cr_expect_eq(render(&text, CONTINUED("yes"), out, sizeof out, &fault), ERR_INVALID, "%s",
                     sources[i]);
        cr_expect_str_eq(fault.field, "messages");
        text_close(&text);
    }
}

/* Comparing at every place would take hours. */
Test(text, a_long_final_message_that_repeats_itself_is_not_searched_forever) {
    enum { SIZE = 2 << 20 };
    static char context[SIZE + 200];
    struct text text;
    struct fault fault = {0};
    char out[64];
    int head =
        snprintf(context, sizeof context, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
    memset(context + head, 'a', SIZE);
    snprintf(context + head + SIZE, sizeof context - (size_t)head - SIZE,
             "b\"}],\"continue_final_message\":true}");
    write_text("chat_template.jinja",
               "{{ messages[-1].content.split('b')[0] }}{{ messages[-1].content.split('b')[0] }}");
    open_text(&text);
    cr_assert_eq(render(&text, context, out, sizeof out, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "messages");
    text_close(&text);
}

/* Renders messages of the role `document` and, of a typing error, `asistant`. */
static int render_roles(const char *template, const char *messages, char *field) {
    struct text text;
    struct fault fault = {0};
    char context[1024], out[256];
    write_text("chat_template.jinja", template);
    open_text(&text);
    snprintf(context, sizeof context, "{\"messages\":[%s]}", messages);
    int rc = render(&text, context, out, sizeof out, &fault);
    snprintf(field, sizeof out, "%s", rc ? fault.field : out);
    text_close(&text);
    return rc;
}

/* A role that the API does not define belongs to the template; what a template leaves out is not
 * lost in silence. */
Test(text, roles_of_a_template) {
#define EACH "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    static const char verbatim[] = EACH;
    static const char any[] = "{% set own = ['document', \"a\", 'b', 'c', 'd', 'e'] %}" EACH;
    static const char some[] = "{% for m in messages if m.role in ['user', 'document'] %}"
                               "{{ m.role }}:{{ m.content }};{% endfor %}";
    static const char strict[] = "{% for m in messages %}{% if m.role == 'document' %}"
                                 "{{ raise_exception('no documents') }}{% endif %}{% endfor %}";
#define ONE SAYS("user", "a") "," SAYS("document", "b")
    char field[256];
    cr_expect_eq(render_roles(any, ONE, field), 0);
    cr_expect_str_eq(field, "user:a;document:b;");
    cr_expect_eq(render_roles(some, ONE, field), 0);
    cr_expect_str_eq(field, "user:a;document:b;");
    cr_expect_eq(render_roles(verbatim, SAYS("user", "a") "," SAYS("usr", "b"), field),
                 ERR_INVALID);
    cr_expect_str_eq(field, "messages[1].role", "a template that writes any role");
    cr_expect_eq(render_roles(any, ONE "," SAYS("own", "b"), field), ERR_INVALID,
                 "a name, no string");
    cr_expect_eq(render_roles(some, ONE "," SAYS("asistant", "c"), field), ERR_INVALID);
    cr_expect_str_eq(field, "messages[2].role");
    cr_expect_eq(render_roles(some, SAYS("function", "b"), field), ERR_INVALID);
    cr_expect_str_eq(field, "messages[0].role");
    cr_expect_eq(render_roles(some, ONE "," SAYS("tool", "c"), field), 0, "OpenAI's own");
    cr_expect_eq(render_roles(strict, ONE, field), ERR_INVALID);
    cr_expect_str_eq(field, "messages", "the template's own refusal");
#define FOUR                                                                                       \
    SAYS("a", "1") "," SAYS("b", "2") "," SAYS("a", "3") "," SAYS("c", "4") "," SAYS("d", "5")
    cr_expect_eq(render_roles(any, FOUR, field), 0, "%s", field);
    cr_expect_eq(render_roles(any, FOUR "," SAYS("e", "6"), field), ERR_INVALID);
    cr_expect_str_eq(field, "messages[5].role");
}

Test(text, errors_of_a_template_are_the_requests) {
    struct text text;
    struct fault fault = {0};
    char out[64];
    write_text("chat_template.jinja", "{{ raise_exception('roles must alternate') }}");
    open_text(&text);
    cr_assert_eq(render(&text, hello, out, sizeof out, &fault), ERR_INVALID);
    cr_assert_not_null(strstr(fault.text, "roles must alternate"), "%s", fault.text);
    text_close(&text);
}

/* A limit is the request's fault and says which it is; too many tokens are found without making
 * them all, and have no field: the server tells the context's length then. */
Test(text, limits_of_a_chat_are_named) {
    struct text text;
    struct fault fault = {0};
    struct arena arena;
    struct tok_ids ids;
    cJSON *tree = cJSON_Parse(hello);
    write_text("chat_template.jinja", "{{ 'x' * 8000000 }}");
    open_text(&text);
    arena_open(&arena, (size_t)1 << 30);
    cr_expect_eq(text_render_chat(&text, tree, NULL, 8192, &arena, &ids, &fault), ERR_LIMIT);
    cr_expect_str_eq(fault.field, "");
    cr_expect_str_eq(fault.text, "more than 8192 tokens");
    arena_close(&arena);
    arena_open(&arena, (size_t)32 << 20);
    cr_expect_eq(text_render_chat(&text, tree, NULL, 8000000, &arena, &ids, &fault), ERR_LIMIT);
    cr_expect_str_eq(fault.field, "tokenizer");
    cr_expect_str_eq(fault.text, "the text needs more than 32 MiB of memory");
    arena_close(&arena);
    text_close(&text);
    cJSON_Delete(tree);
}

/* ---- Ends of answers ---- */

/* Tokens of many families, from id 256 on; the last is no special one. */
static const char *const end_tokens[] = {
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|observation|>",
    "<|endoftext|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<\xEF\xBD\x9C"
    "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",
    "<\xEF\xBD\x9C"
    "User\xEF\xBD\x9C>",
    "<\xEF\xBD\x9C"
    "Assistant\xEF\xBD\x9C>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|return|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|im_middle|>",
    "<|im_assistant|>",
    "<|im_user|>",
    "<|im_system|>",
    "\n\n",
};
enum { END_TOKENS = sizeof end_tokens / sizeof end_tokens[0] };

static void write_end_tokens(const char *eos) {
    struct buf added, vocab, json, config;
    buf_open(&added, 1 << 16);
    buf_open(&vocab, 1 << 16);
    buf_open(&config, 1 << 10);
    for (int i = 0; i < END_TOKENS; i++) {
        buf_fmt(&vocab, "%s", i ? "," : "");
        json_write_str(&vocab, end_tokens[i], strlen(end_tokens[i]));
        buf_fmt(&vocab, ":%d", 256 + i);
        buf_fmt(&added, "%s{\"id\":%d,\"special\":%s,\"content\":", i ? "," : "[", 256 + i,
                i < END_TOKENS - 1 ? "true" : "false");
        json_write_str(&added, end_tokens[i], strlen(end_tokens[i]));
        buf_str(&added, "}");
    }
    buf_add(&added, "]", 2);
    buf_char(&vocab, '\0');
    const struct small_tok t = {.vocab = vocab.data, .added = added.data};
    small_tok_json(&t, &json);
    write_file("tokenizer.json", json.data, json.size);
    buf_fmt(&config, "{\"eos_token\": \"%s\", \"bos_token\": \"<|begin_of_text|>\"}", eos);
    write_file("tokenizer_config.json", config.data, config.size);
    buf_close(&json);
    buf_close(&config);
    buf_close(&vocab);
    buf_close(&added);
}

/* The ends as text, eos_token first. */
static void expect_ends(const char *what, const char *const expected[2]) {
    struct text text;
    int32_t ends[TEXT_ENDS_MAX];
    open_text(&text);
    const size_t count = text_ends(&text, ends);
    cr_expect_eq(count, (size_t)(expected[0] != NULL) + (expected[1] != NULL), "%s: %zu", what,
                 count);
    for (size_t i = 0; i < count; i++)
        cr_expect_str_eq(end_tokens[ends[i] - 256], expected[i] ? expected[i] : "", "%s", what);
    text_close(&text);
}

Test(text, an_answer_ends_as_the_template_ends_it) {
    static const struct {
        const char *name, *end; /* NULL: no other than eos_token */
    } templates[] = {
        {"GLM-4.6", NULL}, /* writes none behind the last message */
        {"HuggingFaceTB-SmolLM3-3B", "<|im_end|>"},
        {"Qwen-QwQ-32B", "<|im_end|>"},
        {"Qwen-Qwen2.5-7B-Instruct", "<|im_end|>"},
        {"Qwen-Qwen3-0.6B", "<|im_end|>"},
        {"Qwen3-Coder", "<|im_end|>"},
        {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
         "<\xEF\xBD\x9C"
         "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"},
        {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
         "<\xEF\xBD\x9C"
         "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"},
        {"ibm-granite-granite-3.3-2B-Instruct", "<|end_of_text|>"},
        {"microsoft-Phi-3.5-mini-instruct", "<|end|>"},
        {"mistralai-Mistral-Nemo-Instruct-2407", NULL}, /* eos_token */
    };
    write_end_tokens("<eos>");
    for (size_t i = 0; i < sizeof templates / sizeof templates[0]; i++) {
        char path[512], *source = NULL;
        size_t size = 0;
        snprintf(path, sizeof path, "%s/tests/data/jinja/templates/%s.jinja", KEEPD_SOURCE_DIR,
                 templates[i].name);
        cr_assert_eq(file_read(path, 1 << 20, &source, &size, NULL), 0, "%s", path);
        write_file("chat_template.jinja", source, size);
        mem_free(source);
        expect_ends(templates[i].name, (const char *const[2]){"<eos>", templates[i].end});
    }
}

Test(text, ends_of_odd_templates) {
    static const char loop[] = "{% for m in messages %}";
    static const struct {
        const char *body, *end;
    } cases[] = {
        {"{{ m.content }}<|im_end|>{% endfor %}", "<|im_end|>"},
        {"{{ m.content }} \n\n <|im_end|>{% endfor %}", "<|im_end|>"}, /* white space between */
        {"{{ m.content }}.<|im_end|>{% endfor %}", NULL},              /* a text between */
        {"{{ m.content }}###{% endfor %}", NULL},                      /* no token */
        {"{{ m.content }}{% endfor %}", NULL},                         /* nothing */
        {"<|im_start|>{{ m.role }}{% endfor %}", NULL}, /* the content is not shown */
        {"{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}", NULL},
        /* gpt-oss: the end of a message in the history is no end of an answer */
        {"{{ m.content }}{% if loop.last and not add_generation_prompt %}<|return|>{% else %}"
         "<|end|>{% endif %}{% endfor %}",
         "<|return|>"},
        {"{{ raise_exception('no') }}{% endfor %}", NULL},
    };
    write_end_tokens("<eos>");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char template[512];
        snprintf(template, sizeof template, "%s%s", loop, cases[i].body);
        write_text("chat_template.jinja", template);
        expect_ends(cases[i].body, (const char *const[2]){"<eos>", cases[i].end});
    }
    write_text("chat_template.jinja", "{{ messages[1].content }}<eos>");
    expect_ends("the same twice", (const char *const[2]){"<eos>", NULL});
    write_end_tokens("abc"); /* no token */
    expect_ends("no eos_token", (const char *const[2]){"<eos>", NULL});
    write_text("chat_template.jinja", "");
    expect_ends("none", (const char *const[2]){NULL, NULL});
}

Test(text, a_given_template_takes_the_place_of_the_models) {
    struct text text;
    struct fault fault = {0};
    char path[160];
    write_text("tokenizer_config.json", "{\"chat_template\":\"{% if %}\",\"eos_token\":\"</s>\"}");
    write_text("mine.jinja", "<{{ messages[0].content }}>");
    snprintf(path, sizeof path, "%s/mine.jinja", folder);
    cr_assert_eq(text_open(folder, path, &text, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect(text.chat && !text.tool_chat);
    cr_expect_str_eq(text.eos, "</s>");
    expect_render(&text, hello, "<hi>");
    text_close(&text);
    cr_assert_eq(text_open(folder, TEXT_CHATML, &text, &fault), 0, "%s", fault.text);
    expect_render(&text, hello, "<|im_start|>user\nhi<|im_end|>\n");
    text_close(&text);
    cr_expect_eq(text_open(folder, "chat-ml", &text, &fault), ERR_NOTFOUND);
    cr_expect_str_eq(fault.field, "chat-template");
    cr_expect_not_null(strstr(fault.text, "'chat-ml'"));
    write_text("mine.jinja", "{{");
    cr_expect_eq(text_open(folder, path, &text, &fault), ERR_MALFORMED);
    cr_expect_str_eq(fault.field, "chat-template");
    cr_expect(!text.tok && !text.chat);
}

Test(text, failures_name_the_file) {
    write_text("tokenizer_config.json", "{\"bos_token\":");
    expect_failure(ERR_MALFORMED, "tokenizer_config.json");
    write_text("tokenizer_config.json", "[]");
    expect_failure(ERR_MALFORMED, "tokenizer_config.json");
    write_text("tokenizer_config.json", "{\"chat_template\":\"{% if %}\"}");
    expect_failure(ERR_MALFORMED, "tokenizer_config.json");
    write_text("chat_template.jinja", "{{");
    expect_failure(ERR_MALFORMED, "chat_template.jinja");
    write_text("tokenizer.json", "{}");
    expect_failure(ERR_MALFORMED, "tokenizer.json");
    strcat(folder, "-gone");
    expect_failure(ERR_NOTFOUND, "tokenizer.json");
    folder[strlen(folder) - 5] = '\0';
}

Test(text, survives_failing_memory) {
    write_text("tokenizer_config.json", "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}");
    write_text("chat_template.json",
               "{\"chat_template\":\"{{ bos_token }}{{ messages[0].content }}\"}");
    int rc = ERR_NOMEM;
    long n = 0;
    for (; rc == ERR_NOMEM && n < 20000; n++) {
        struct text text;
        struct fault fault = {0};
        mem_fail_after(n);
        rc = text_open(folder, NULL, &text, &fault);
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %ld: %s", n, err_name(rc));
        cr_assert_eq(text.tok != NULL, rc == 0);
        text_close(&text);
    }
    cr_assert_eq(rc, 0);
    struct text text;
    open_text(&text);
    rc = ERR_NOMEM;
    for (n = 0; rc == ERR_NOMEM && n < 20000; n++) {
        struct fault fault = {0};
        struct arena arena;
        struct tok_ids ids;
        cJSON *tree = NULL;
        cr_assert_eq(json_parse(hello, strlen(hello),
                                &(struct json_limits){.bytes = 8 << 20, .depth = 16}, &tree,
                                &fault),
                     0);
        arena_open(&arena, 256 << 20);
        mem_fail_after(n);
        rc = text_render_chat(&text, tree, NULL, 1000, &arena, &ids, &fault);
        mem_fail_after(-1);
        cr_assert(rc == 0 || (rc == ERR_NOMEM && fault.code == rc), "allocation %ld: %s", n,
                  err_name(rc));
        arena_close(&arena);
        json_free(tree);
    }
    cr_assert_eq(rc, 0);
    text_close(&text);
}

/* ---- Contents in parts, and pictures ---- */

/* SmolVLM's template, shortened: it shows lists of parts alone. */
static const char parts_template[] =
    "{% for m in messages %}{{ m['role'] }}{% if m['content'][0]['type'] == 'image' %}{{ ':' }}"
    "{% else %}{{ ': ' }}{% endif %}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %};"
    "{% endfor %}";

/* Makes 258 to 261 the marks of pictures, as special tokens. */
static void add_picture_tokens(void) {
    struct small_tok t = {
        .vocab = "\"<s>\":256,\"</s>\":257,\"<image>\":258,\"<fake_token_around_image>\":259,"
                 "\"<global-img>\":260,\"<row_1_col_1>\":261",
        .added = "[{\"id\":256,\"content\":\"<s>\",\"special\":true},"
                 "{\"id\":257,\"content\":\"</s>\",\"special\":true},"
                 "{\"id\":258,\"content\":\"<image>\",\"special\":true},"
                 "{\"id\":259,\"content\":\"<fake_token_around_image>\",\"special\":true},"
                 "{\"id\":260,\"content\":\"<global-img>\",\"special\":true},"
                 "{\"id\":261,\"content\":\"<row_1_col_1>\",\"special\":true}]",
    };
    struct buf json;
    small_tok_json(&t, &json);
    write_file("tokenizer.json", json.data, json.size);
    buf_close(&json);
}

/* The first picture has one tile with two rows of embeddings, the second a grid of one tile. */
static struct picture one_tile = {.tiles = 1, .tile_tokens = 2, .counts = 1};
static struct picture two_tiles = {
    .tiles = 2, .rows = 1, .columns = 1, .tile_tokens = 1, .counts = 1};

/* Renders a chat with pictures: tokens as bytes, those from 256 on as '0' and what they exceed it
 * by, and behind '|' the rows: place, picture, tile. */
static int render_pictures(const struct text *text, const char *context, int count, char *out,
                           size_t size, struct fault *fault) {
    const struct picture *const pictures[] = {&one_tile, &two_tiles};
    struct text_pictures of = {PICTURE_IDEFICS3, pictures, count, NULL, 0};
    struct arena arena;
    struct tok_ids ids = {0};
    cJSON *tree = NULL;
    size_t at = 0;
    cr_assert_eq(json_parse(context, strlen(context),
                            &(struct json_limits){.bytes = 8 << 20, .depth = 16}, &tree, fault),
                 0);
    arena_open(&arena, 256 << 20);
    int rc = text_render_chat(text, tree, &of, 1000, &arena, &ids, fault);
    for (size_t i = 0; rc == 0 && i < ids.count && at + 1 < size; i++)
        out[at++] = ids.ids[i] >= 256 ? (char)('0' + ids.ids[i] - 256) : (char)ids.ids[i];
    for (int i = 0; rc == 0 && i < of.row_count; i++)
        at += (size_t)snprintf(out + at, size - at, "|%zu,%d,%d", of.rows[i].at, of.rows[i].picture,
                               of.rows[i].tile);
    out[at] = '\0';
    arena_close(&arena);
    json_free(tree);
    return rc;
}

static void expect_pictures(const struct text *text, const char *context, int count,
                            const char *expected) {
    char out[512];
    struct fault fault = {0};
    cr_assert_eq(render_pictures(text, context, count, out, sizeof out, &fault), 0, "%s: %s",
                 context, fault.text);
    cr_expect_str_eq(out, expected);
}

Test(text, a_template_that_shows_only_lists_gets_lists) {
    struct text text;
    write_text("chat_template.jinja", parts_template);
    open_text(&text);
    cr_expect(text.lists);
    expect_render(&text, hello, "user: hi;");
    expect_render(&text,
                  "{\"messages\":[" SAYS("system", "a") "," SAYS(
                      "assistant", "") "],"
                                       "\"continue_final_message\":false}",
                  "system: a;assistant: ;");
    char out[64];
    border(&text, "{\"messages\":[" SAYS("system", "abc") "," SAYS("user", "d") "]}", 1, out);
    cr_expect_str_eq(out, "system: abc;user: ");
    text_close(&text);
    write_text("chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    open_text(&text);
    cr_expect_not(text.lists);
    text_close(&text);
}

#define SEES(content, ends)                                                                        \
    "{\"role\":\"user\",\"content\":\"" content "\",\"picture_ends\":[" ends "]}"

Test(text, pictures_stand_where_the_message_has_them) {
    struct text text;
    add_picture_tokens();
    write_text("chat_template.jinja", parts_template);
    open_text(&text);
    expect_pictures(&text, "{\"messages\":[" SEES("what?", "5") "]}", 1,
                    "user:342"
                    "23what?;|7,0,0");
    expect_pictures(&text, "{\"messages\":[" SEES("a b", "1,0") "]}", 2,
                    "user: a 34223b352\n\n3423;|10,0,0|16,1,0|21,1,1");
    expect_pictures(
        &text, "{\"messages\":[" SEES("", "0") "," SAYS("assistant", "x") "," SEES("y", "0") "]}",
        2, "user:34223;assistant: x;user: y352\n\n3423;|7,0,0|33,1,0|38,1,1");
    text_close(&text);
}

Test(text, marks_in_a_request_are_no_pictures) {
    struct text text;
    char out[512];
    struct fault fault = {0};
    add_picture_tokens();
    write_text("chat_template.jinja", parts_template);
    open_text(&text);
    expect_pictures(&text, "{\"messages\":[" SEES("<image>", "0") "]}", 1,
                    "user: <image>34223;|15,0,0");
    expect_pictures(&text, "{\"messages\":[" SEES("<image>", "7") "," SAYS("user", "<image>") "]}",
                    1, "user:34223<image>;user: <image>;|7,0,0");
    expect_pictures(&text, "{\"messages\":[" SEES("<im", "3") "," SAYS("user", "age>") "]}", 1,
                    "user:34223<im;user: age>;|7,0,0");
    cr_expect_eq(render_pictures(&text, "{\"messages\":[" SAYS("user", "<image>") "]}", 1, out,
                                 sizeof out, &fault),
                 ERR_INVALID);
    cr_expect(strstr(fault.text, "0 of 1"), "%s", fault.text);
    text_close(&text);
}

Test(text, a_tokenizer_without_the_mark_shows_no_picture) {
    struct text text;
    char out[512];
    struct fault fault = {0};
    write_text("chat_template.jinja", parts_template);
    open_text(&text);
    cr_expect_eq(
        render_pictures(&text, "{\"messages\":[" SEES("", "0") "]}", 1, out, sizeof out, &fault),
        ERR_UNSUPPORTED);
    cr_expect_str_eq(fault.field, "messages");
    text_close(&text);
}
