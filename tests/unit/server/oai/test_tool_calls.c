/* Tests calls in texts, whole and cut at every place. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/buf.h"
#include "engine/engine_text.h"
#include "server/oai/tool_calls.h"
#include "server/oai/tool_json.h"

static const char *const names[] = {"f", "get_weather"};

static bool in_call(enum tool_piece_kind kind) {
    return kind == TOOL_CALL || kind == TOOL_ARGUMENTS || kind == TOOL_BARE;
}

/* Texts unchanged, calls as <name|arguments>; ends with ! if the last call is complete. */
static void add_pieces(struct tool_reader *r, const char *text, size_t end, bool last,
                       struct buf *out, enum tool_piece_kind *kind) {
    struct tool_piece piece;
    while ((piece = tool_reader_next(r, text, end, last)).kind != TOOL_MORE) {
        bool bare = piece.kind == TOOL_BARE, goes_on = bare || piece.kind == TOOL_ARGUMENTS;
        cr_assert((bare ? *kind == TOOL_CALL : piece.begin < piece.end) && piece.end <= end);
        if (in_call(*kind) && !goes_on) buf_char(out, '>');
        if (bare) buf_str(out, "{}");
        if (piece.kind == TOOL_CALL) buf_char(out, '<');
        size_t size;
        const char *at = tool_piece_text(&piece, text, &size);
        buf_add(out, at, size);
        if (piece.kind == TOOL_CALL) buf_char(out, '|');
        *kind = piece.kind;
    }
}

static void end_pieces(const struct tool_reader *r, struct buf *out, enum tool_piece_kind kind) {
    if (in_call(kind)) buf_char(out, '>');
    if (tool_reader_called(r)) buf_char(out, '!');
}

static void read_cut(const struct tool_set *tools, const char *text, const size_t *cuts,
                     int cut_count, struct buf *out) {
    struct tool_reader r = {.tools = tools};
    enum tool_piece_kind kind = TOOL_TEXT;
    buf_clear(out);
    buf_str(out, "");
    for (int i = 0; i < cut_count; i++) add_pieces(&r, text, cuts[i], false, out, &kind);
    add_pieces(&r, text, strlen(text), true, out, &kind);
    end_pieces(&r, out, kind);
}

static void check_cut(const struct tool_set *tools, const char *text, const char *expected,
                      const size_t *cuts, int cut_count) {
    struct buf out;
    buf_open(&out, 1 << 20);
    read_cut(tools, text, cuts, cut_count, &out);
    cr_expect_str_eq(out.data ? out.data : "", expected, "%s: cut %d times, at %zu", text,
                     cut_count, cut_count ? cuts[0] : 0);
    buf_close(&out);
}

static void check_set(const struct tool_set *tools, const char *text, const char *expected) {
    size_t size = strlen(text), *cuts = calloc(size + 2, sizeof *cuts);
    check_cut(tools, text, expected, NULL, 0);
    for (size_t i = 0; i <= size; i++)
        for (cuts[0] = i, cuts[1] = i; cuts[1] <= size; cuts[1] += size < 256 ? 1 : 32)
            check_cut(tools, text, expected, cuts, 2);
    for (size_t i = 0; i <= size; i++) cuts[i] = i;
    check_cut(tools, text, expected, cuts, (int)size + 1);
    free(cuts);
}

static void check(const struct tool_form *format, const char *text, const char *expected) {
    const struct tool_set tools = {format, names, 2, true, NULL};
    check_set(&tools, text, expected);
}

#define F "{\"name\": \"f\", \"arguments\": {\"a\": 1}}"

Test(tool_calls, hermes) {
    static const char *const cases[][2] = {
        {"", ""},
        {"hello", "hello"},
        {"<tool_call>\n" F "\n</tool_call>", "<f|{\"a\": 1}>!"},
        {"<tool_call>" F "</tool_call>", "<f|{\"a\": 1}>!"},
        {"\n\n <tool_call>\n" F "\n</tool_call>\n", "<f|{\"a\": 1}>!"},
        {"Let me look.\n<tool_call>\n" F "\n</tool_call>", "Let me look.<f|{\"a\": 1}>!"},
        {"Let me look.\n\n<tool_call>\n" F "\n</tool_call>", "Let me look.\n<f|{\"a\": 1}>!"},
        {"<tool_call>\n" F "\n</tool_call>\n<tool_call>\n{\"name\": \"get_weather\", "
         "\"arguments\": {\"city\": \"</tool_call> \\\" \\u00e9 {[\", \"x\": [1, {\"y\": []}]}}\n"
         "</tool_call>",
         "<f|{\"a\": 1}><get_weather|{\"city\": \"</tool_call> \\\" \\u00e9 {[\", \"x\": [1, "
         "{\"y\": []}]}>!"},
        {"<tool_call>\n" F "\n</tool_call>\n\nThere.", "<f|{\"a\": 1}>\n\nThere.!"},
        {"<tool_call>\n{\"name\": \"f\", \"parameters\": {}}\n</tool_call>", "<f|{}>!"},
        {"<tool_call>{\"type\": \"function\" , \"name\":\"f\",\n\"arguments\":{}}</tool_call>",
         "<f|{}>!"},
        {"<tool_call>\n{\"name\": \"f\"}\n</tool_call>", "<f|{}>!"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": null }</tool_call> b", "<f|{}> b!"},
        {"<tool_call>{\"name\": \"f\"}</tool_call>\n<tool_call>{\"name\": \"f\"}", "<f|{}><f|{}>!"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_HERMES], cases[i][0], cases[i][1]);
}

Test(tool_calls, hermes_that_is_none_is_text) {
    static const char *const cases[] = {
        "a < b\n<tool",
        "<tool_call>",
        "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": \"x\"}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": \"\"x}\n</tool_call>",
        "<tool_call>\n{\"arguments\": {}, \"name\": \"g\"}\n</tool_call>",
        "<tool_call>\n{\"arguments\": {}, \"name\": ",
        "<tool_call>\n{\"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{\"arguments\": {}, \"parameters\": {}, \"name\": \"f\"}\n</tool_call>",
        "<tool_call>\n{\"name\": \"g\"}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\"",
        "<tool_call>\n{\"type\": \"function\"}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": nil}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
        "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>",
        "<tool_call>\nf(1)\n</tool_call>",
        "<tool_call>{\"n\\u0061me\": \"f\", \"arguments\": {}}</tool_call>",
        " \n ",
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_HERMES], cases[i], cases[i]);
    check(&tool_forms[TOOL_FORMAT_HERMES], "<tool_call>\n<tool_call>\n" F "\n</tool_call>",
          "<tool_call><f|{\"a\": 1}>!");
}

/* Qwen2.5-Coder writes calls without tags. */
Test(tool_calls, hermes_without_tags) {
    static const char *const cases[][2] = {
        {F, "<f|{\"a\": 1}>!"},
        {" \n" F "\n", "<f|{\"a\": 1}>!"},
        {"```json\n" F "\n```", "<f|{\"a\": 1}>!"},
        {"```\n" F "\n```\n", "<f|{\"a\": 1}>!"},
        {"So:\n```tool_call\n" F "\n```\nDone.", "So:<f|{\"a\": 1}>\nDone.!"},
        {"So:\n" F "\n\nDone.", "So:<f|{\"a\": 1}>Done.!"},
        {F "\n" F, "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {"```json\n" F "\n" F "\n```", "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {"```json\n" F "\n```\n```json\n" F "\n```", "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {"[" F ", " F "]", "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {"```json\n[\n  " F ",\n  " F "\n]\n``` b", "<f|{\"a\": 1}><f|{\"a\": 1}> b!"},
        {F "\n</tool_call>", "<f|{\"a\": 1}>!"},
        {"```xml\n" F "\n</tool_call>\n```", "<f|{\"a\": 1}>\n</tool_call>\n```!"},
        {"{\"arguments\": {\"a\": 1}, \"name\": \"f\"}", "<f|{\"a\": 1}>!"},
        {"{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}", "<f|{\"a\": 1}>!"},
        {"{\"name\": \"f\", \"arguments\": {\"a\": \"```\"}}", "<f|{\"a\": \"```\"}>!"},
        {"```json\n" F "\n``", "<f|{\"a\": 1}>!"},
        {"```json\n{\"name\": \"f\", \"arguments\": {'a'}}\n``` b", "<f|{'a'}}\n> b!"},
        {"{\"name\": \"f\", \"arguments\": {\"a\": ", "<f|{\"a\": >"},
        {"<tools>\n" F "\n</tools>", "<tools><f|{\"a\": 1}></tools>!"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_HERMES], cases[i][0], cases[i][1]);
}

Test(tool_calls, objects_that_are_no_calls_stay_text) {
    static const char *const cases[] = {
        "{\"name\": \"g\", \"arguments\": {}}",
        "{\"name\": \"f\"}",
        "{\"name\": \"f\", \"arguments\": null}",
        "{\"name\": \"f\", \"arguments\": 1}",
        "{\"name\": \"f\", \"description\": \"x\", \"parameters\": {\"type\": \"object\"}}",
        "{\"name\": \"f\", \"age\": 7, \"arguments\": {}}",
        "{\"arguments\": {\"a\": 1}}",
        "{\"call\": " F "}",
        "{\n" F "\n}",
        "x = [\n" F "\n]",
        "[1, " F "]",
        "I call " F ".",
        "```json\n{\"name\": \"g\", \"arguments\": {}}\n```",
        "```json\n[{\"a\": 1}]\n```\n",
        "```c++\nint f;\n```",
        "```python\nprint(1)\n```",
        "a\n\n```",
        "{\"name\": \"f\", \"arguments\": ",
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_HERMES], cases[i], cases[i]);
}

Test(tool_calls, hermes_with_a_careless_end) {
    static const char *const cases[][2] = {
        {"<tool_call>\n" F, "<f|{\"a\": 1}>!"},
        {"<tool_call>\n" F "}\n</tool_call>", "<f|{\"a\": 1}>!"},
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {}\n</tool_call>", "<f|{}>!"},
        {"<tool_call>\n" F "\n</tool", "<f|{\"a\": 1}>!"},
        {"<tool_call>\n" F "\n<tool_call>\n" F, "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}, \"id\": 7x}</tool_call>",
         "<f|{}>, \"id\": 7x}</tool_call>!"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}, \"id\": ", "<f|{}>!"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_HERMES], cases[i][0], cases[i][1]);
}

#define S(value) "<tool_call>{\"name\": \"f\", \"arguments\": " value "}</tool_call>"

Test(tool_calls, members_around_the_arguments) {
    static const char *const cases[][2] = {
        {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": 7, \"x\": [{\"}\": "
         "\"</tool_call>\"}]\n}"
         "\n</tool_call> b",
         "<f|{\"a\": 1}> b!"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": null, \"id\": 7}</tool_call>", "<f|{}>!"},
        {"<tool_call>\n{\"arguments\": {\"a\": {}}, \"name\": \"f\"}\n</tool_call>",
         "<f|{\"a\": {}}>!"},
        {"<tool_call>\n{\"arguments\": null, \"name\": \"f\", \"x\": 1}\n</tool_call>", "<f|{}>!"},
        {"<tool_call>{\"id\": \"x\", \"arguments\": \"{\\\"a\\\": 2}\", \"y\": \"z\", \"name\": "
         "\"f\"}</tool_call>",
         "<f|{\"a\": 2}>!"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_HERMES], cases[i][0], cases[i][1]);
}

Test(tool_calls, arguments_as_a_string) {
    static const char *const cases[][2] = {
        {S("\"{\\\"a\\\": \\\"b\\\"}\""), "<f|{\"a\": \"b\"}>!"},
        {S("\"{}\", \"id\": 1"), "<f|{}>!"},
        {S("\"\""), "<f|{}>!"},
        {S("\" {\\n\\t\\\"a\\\": 1\\r}\""), "<f| {\n\t\"a\": 1\r}>!"},
        {S("\"{\\\"a\\\": \\\"\\\\n \\/ \\\\\\\"}\""), "<f|{\"a\": \"\\n / \\\"}>!"},
        {S("\"{\\u00e9\\ud83d\\ude00\\ud83dx\\ude00}\""),
         "<f|{\xC3\xA9\xF0\x9F\x98\x80\xEF\xBF\xBDx\xEF\xBF\xBD}>!"},
        {S("\"{\\q\\u12g4}\""), "<f|{\\q\\u12g4}>!"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a", "<f|{\"a>"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": \"{\\ud83d\\u", "<f|{\xEF\xBF\xBD\\u>"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": \"{\\", "<f|{\\>"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_HERMES], cases[i][0], cases[i][1]);
    check(&tool_forms[TOOL_FORMAT_LLAMA3],
          "{\"name\": \"f\", \"parameters\": \"{\\\"a\\\": 1}\"}; x", "<f|{\"a\": 1}>; x!");
}

/* A call that has begun is never taken back. */
Test(tool_calls, arguments_that_are_no_json) {
    static const char *const cases[][2] = {
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 'b'}}\n</tool_call> c",
         "<f|{\"a\": 'b'}}\n> c!"},
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 'b'}}\n</tool_cal",
         "<f|{\"a\": 'b'}}\n</tool_cal>"},
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b\nc\"}}\n</tool_call>",
         "<f|{\"a\": \"b\nc\"}}\n>!"},
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": tru", "<f|{\"a\": tru>"},
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": </tool_call>", "<f|{\"a\": >!"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_HERMES], cases[i][0], cases[i][1]);
    check(&tool_forms[TOOL_FORMAT_LLAMA3], "{\"name\": \"f\", \"parameters\": {\"a\": 'b'}}; x",
          "<f|{\"a\": 'b'}}; x>");
}

#define P "{\"name\": \"f\", \"parameters\": {\"a\": 1}}"

Test(tool_calls, llama3) {
    static const char *const cases[][2] = {
        {"", ""},
        {"hello " P " bye", "hello <f|{\"a\": 1}> bye!"},
        {"two:" P "; " P, "two:<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {"if (x) { y(); }} " P, "if (x) { y(); }} <f|{\"a\": 1}>!"},
        {"{\"a\": " P "}", "{\"a\": " P "}"},
        {"[" P "]", "[" P "]"},
        {"a {\"name\": \"f\"} b", "a {\"name\": \"f\"} b"},
        {"a {\"name\": \"g\", \"parameters\": {}} b", "a {\"name\": \"g\", \"parameters\": {}} b"},
        {"a {\"name\": \"f\", \"parameters\"", "a {\"name\": \"f\", \"parameters\""},
        {P, "<f|{\"a\": 1}>!"},
        {"\n\n<|python_tag|>" P, "<f|{\"a\": 1}>!"},
        {"{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", "<f|{}>!"},
        {P "; " P ";\n", "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {P P, "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {P "\nThat is it.", "<f|{\"a\": 1}>\nThat is it.!"},
        {P "; {", "<f|{\"a\": 1}>; {!"},
        {P " ;", "<f|{\"a\": 1}>!"},
        {P ";;", "<f|{\"a\": 1}>;;!"},
        {P "; \n; ", "<f|{\"a\": 1}>; \n; !"},
        {"{\"name\": \"f\", \"parameters\": {}", "<f|{}>!"},
        {"{\"name\": \"f\", \"parameters\": {}, \"x\": 1}", "<f|{}>!"},
        {"{\"parameters\": {\"a\": 1}, \"name\": \"f\"}; " P, "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {"{\"name\": \"g\", \"parameters\": {}}", "{\"name\": \"g\", \"parameters\": {}}"},
        {"{\"answer\": 42}", "{\"answer\": 42}"},
        {"<|python_tag|>print(1)", "<|python_tag|>print(1)"},
        {"<tool_call>\n" F "\n</tool_call>", "<tool_call>\n<f|{\"a\": 1}>\n</tool_call>!"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_LLAMA3], cases[i][0], cases[i][1]);
}

Test(tool_calls, only_the_first) {
    const struct tool_set hermes = {&tool_forms[TOOL_FORMAT_HERMES], names, 2, false, NULL};
    const struct tool_set llama = {&tool_forms[TOOL_FORMAT_LLAMA3], names, 2, false, NULL};
    check_set(&hermes,
              "<tool_call>\n" F "\n</tool_call>\n<tool_call>\n{\"name\": \"f\", \"arguments\": "
              "{\"b\": 2}}\n</tool_call> and",
              "<f|{\"a\": 1}> and!");
    check_set(&hermes,
              "<tool_call>" F "</tool_call><tool_call>{\"name\": \"f\", \"arguments\": {\"b\"",
              "<f|{\"a\": 1}>!");
    check_set(&llama, P "; " P, "<f|{\"a\": 1}>!");
}

/* Text is held back as long as it may begin a call, and no longer. */
Test(tool_calls, what_is_held_back) {
    const struct tool_set tools = {&tool_forms[TOOL_FORMAT_HERMES], names, 2, true, NULL};
    static const struct {
        const char *text;
        size_t given;
    } cases[] = {
        {"yes", 3},      {"yes\n", 3},  {"yes\n<tool_", 3},    {"yes\n<tool-", 10},
        {"yes <too", 4}, {" \n", 0},    {" \nx", 3},           {"<tool_call>\n{\"name\": \"", 0},
        {"a < b", 5},    {"a\n\nb", 4}, {"<tool_call> x", 13},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tool_reader r = {.tools = &tools};
        size_t end = strlen(cases[i].text), given = 0;
        struct tool_piece piece;
        while ((piece = tool_reader_next(&r, cases[i].text, end, false)).kind != TOOL_MORE)
            given = piece.end;
        cr_expect_eq(given, cases[i].given, "%s: %zu", cases[i].text, given);
    }
}

/* A word that is no tool's name begins no call of mistral. */
Test(tool_calls, mistral_holds_back_names_only) {
    const struct tool_set tools = {&tool_forms[TOOL_FORMAT_MISTRAL], names, 2, true, NULL};
    static const struct {
        const char *text;
        size_t given;
    } cases[] = {{"你好，很高兴", 18}, {"get_we", 0}, {"get_weather", 0}, {"get_weather[AR", 0},
                 {"get_weather!", 12}, {"g", 0},      {"fa", 2},          {" \nhello", 7}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tool_reader r = {.tools = &tools};
        struct tool_piece piece = tool_reader_next(&r, cases[i].text, strlen(cases[i].text), false);
        size_t given = piece.kind == TOOL_MORE ? 0 : piece.end;
        cr_expect_eq(given, cases[i].given, "%s: %zu", cases[i].text, given);
    }
}

/* The end of a list of calls is white space, braces and brackets; a NUL behind it is text. */
Test(tool_calls, mistral_keeps_nul) {
    const struct tool_set tools = {&tool_forms[TOOL_FORMAT_MISTRAL], names, 2, true, NULL};
    static const char text[] = "[" F "]\0x";
    struct tool_reader r = {.tools = &tools};
    struct tool_piece piece, last = {0};
    while ((piece = tool_reader_next(&r, text, sizeof text - 1, true)).kind != TOOL_MORE)
        last = piece;
    cr_assert_eq(last.kind, TOOL_TEXT);
    cr_assert_eq(last.begin, sizeof text - 3);
}

Test(tool_calls, what_is_held_back_is_short) {
    const struct tool_set tools = {&tool_forms[TOOL_FORMAT_HERMES], names, 2, true, NULL};
    struct buf text;
    buf_open(&text, 1 << 20);
    buf_str(&text, "<tool_call>{\"x\": \"");
    while (text.size < TOOL_HELD_MAX - 1) buf_char(&text, 'y');
    struct tool_reader r = {.tools = &tools};
    cr_assert_eq(tool_reader_next(&r, text.data, text.size, false).kind, TOOL_MORE);
    buf_str(&text, "y\", \"name\": \"f\", \"arguments\": {}}</tool_call>");
    check_set(&tools, text.data, text.data);
    buf_close(&text);
}

/* White space behind a call, too: text that was returned in pieces is text as a whole. */
Test(tool_calls, white_space_that_is_too_long_is_text) {
    const struct tool_set tools = {&tool_forms[TOOL_FORMAT_HERMES], names, 2, true, NULL};
    struct buf text, expected;
    buf_open(&text, 1 << 20);
    buf_open(&expected, 1 << 20);
    buf_str(&text, "<tool_call>" F "</tool_call>");
    for (int i = 0; i < TOOL_HELD_MAX - 1; i++) buf_char(&text, '\n');
    check_set(&tools, text.data, "<f|{\"a\": 1}>!");
    buf_char(&text, '\n');
    buf_str(&expected, "<f|{\"a\": 1}>");
    for (int i = 0; i < TOOL_HELD_MAX; i++) buf_char(&expected, '\n');
    buf_char(&expected, '!');
    check_set(&tools, text.data, expected.data);
    buf_close(&text);
    buf_close(&expected);
}

/* Text continues after reasoning that interrupts it. */
Test(tool_calls, text_in_two_parts) {
    const struct tool_set tools = {&tool_forms[TOOL_FORMAT_HERMES], names, 2, true, NULL};
    static const char text[] = "\n <tool<think>hm</think><tool_call>" F "</tool_call>";
    struct tool_reader r = {.tools = &tools};
    enum tool_piece_kind kind = TOOL_TEXT;
    struct buf out;
    buf_open(&out, 1 << 20);
    add_pieces(&r, text, 7, true, &out, &kind);
    tool_reader_resume(&r, 24);
    add_pieces(&r, text, sizeof text - 1, true, &out, &kind);
    end_pieces(&r, &out, kind);
    cr_assert_str_eq(out.data, "\n <tool<f|{\"a\": 1}>!");
    buf_close(&out);
}

/* --- JSON --- */

/* Bytes of the value, 0 for one that is cut off, -1 for none. */
static int json_end(const char *text) {
    struct tool_json json = {0};
    for (int i = 0; text[i]; i++) {
        enum tool_json_step step = tool_json_step(&json, text[i]);
        if (step == TOOL_JSON_BAD) return -1;
        if (step == TOOL_JSON_DONE) return i + 1;
    }
    return 0;
}

Test(tool_calls, json) {
    static const char *const whole[] = {
        "{}",
        "[]",
        " { } ",
        "{\"a\":1}",
        "{ \"a\" : [ 1 , -0 , 0.5 , 1e5 , 1.25E-3 , 10e+1 ] }",
        "[true,false,null]",
        "[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00eF\", \"\xc3\xa9\"]",
        "[[[[]]]]",
        "{\"a\":{\"b\":{}},\"c\":[{}]}",
    };
    static const char *const bad[] = {
        "1",
        "\"a\"",
        "}",
        "[}",
        "{]",
        "{a:1}",
        "{'a':1}",
        "{\"a\" 1}",
        "{\"a\":}",
        "{\"a\":1,}",
        "[1,]",
        "[,1]",
        "[01]",
        "[1.]",
        "[.5]",
        "[+1]",
        "[-]",
        "[1e]",
        "[1e+]",
        "[0x1]",
        "[tru]",
        "[truex]",
        "[\"\\x\"]",
        "[\"\\u12g4\"]",
        "[\"a\nb\"]",
        "[1 2]",
        "[\"a\"\"b\"]",
        "{1:2}",
        "[--1]",
        "[1e5.5]",
        "[True]",
        "{\"a\":1 \"b\"}",
        "[1.2.3]",
        "{,}",
    };
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        size_t size = strlen(whole[i]) - (whole[i][0] == ' ');
        cr_expect_eq(json_end(whole[i]), (int)size, "%s", whole[i]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_expect_eq(json_end(bad[i]), -1, "%s", bad[i]);
    cr_expect_eq(json_end("{\"a\": [1, \"\\u00"), 0);
}

Test(tool_calls, json_depth) {
    char text[131] = {0};
    memset(text, '[', 64);
    memset(text + 64, ']', 64);
    cr_assert_eq(json_end(text), 128);
    memset(text, '[', 65);
    cr_assert_eq(json_end(text), -1);
}

/* --- templates --- */

static const struct tool_form *form_of_file(const char *name) {
    static char source[1 << 16];
    char path[512];
    snprintf(path, sizeof path, KEEPD_SOURCE_DIR "/tests/data/jinja/templates/%s.jinja", name);
    FILE *file = fopen(path, "r");
    cr_assert(file, "%s", path);
    source[fread(source, 1, sizeof source - 1, file)] = '\0';
    fclose(file);
    return tool_form_of(source);
}

Test(tool_calls, mistral) {
    static const char *const cases[][2] = {
        {"hello [1, 2]", "hello [1, 2]"},
        {"[TOOL_CALLS][" F "]", "<f|{\"a\": 1}>!"},
        {"[TOOL_CALLS] [" F ", " F "]", "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {"[" F "]", "<f|{\"a\": 1}>!"},
        {" \n[" F ",\n" F "]\n", "<f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {F, "<f|{\"a\": 1}>!"},
        {"[{\"name\": \"f\", \"arguments\": {}, \"id\": \"abc012345\"}]", "<f|{}>!"},
        {"[{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}]", "<f|{\"a\": 1}>!"},
        {"[{\"name\": \"f\"}]", "<f|{}>!"},
        {"Look: [" F "]", "Look: <f|{\"a\": 1}>!"},
        {"Look.[TOOL_CALLS][" F "] So.", "Look.<f|{\"a\": 1}>So.!"},
        {"[TOOL_CALLS]get_weather[ARGS]{\"a\": [1]}", "<get_weather|{\"a\": [1]}>!"},
        {"get_weather{\"a\": [1]}", "<get_weather|{\"a\": [1]}>!"},
        {"[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{}", "<f|{}><get_weather|{}>!"},
        {"[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}"},
        {"f is a function", "f is a function"},
        {"[{\"name\": \"g\", \"arguments\": {}}]", "[{\"name\": \"g\", \"arguments\": {}}]"},
        {"[" F, "<f|{\"a\": 1}>!"},
        {"[{\"name\": \"f\", \"arguments\": {\"a\"", "<f|{\"a\">"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[TOOL_FORMAT_MISTRAL], cases[i][0], cases[i][1]);
}

#define TAG(name, value) "<parameter=" name ">\n" value "\n</parameter>\n"
#define CODER(arguments) "<tool_call>\n<function=f>\n" arguments "</function>\n</tool_call>"

static void check_coder(const char *text, const char *expected) {
    static const struct tool_parameter some[] = {
        {"s", CONSTRAIN_TYPE_STRING},
        {"t", CONSTRAIN_TYPE_STRING},
        {"z", CONSTRAIN_TYPE_STRING | CONSTRAIN_TYPE_NULL},
        {"u", CONSTRAIN_TYPE_STRING | CONSTRAIN_TYPE_NUMBER},
        {"v", CONSTRAIN_TYPE_STRING | CONSTRAIN_TYPE_OBJECT},
        {"i", CONSTRAIN_TYPE_NUMBER},
        {"l", CONSTRAIN_TYPE_ARRAY | CONSTRAIN_TYPE_NULL},
        {NULL, 0},
    };
    static const struct tool_parameter none[] = {{NULL, 0}};
    static const struct tool_parameter *const all[] = {some, none};
    const struct tool_set tools = {&tool_forms[TOOL_FORMAT_QWEN3_CODER], names, 2, true, all};
    check_set(&tools, text, expected);
}

Test(tool_calls, qwen3_coder) {
    static const char *const cases[][2] = {
        {"", ""},
        {CODER(""), "<f|{}>!"},
        {CODER(TAG("s", "Paris") TAG("n", "3")), "<f|{\"s\": \"Paris\", \"n\": 3}>!"},
        {"Let me look.\n" CODER(TAG("n", "-1.5e3")), "Let me look.<f|{\"n\": -1.5e3}>!"},
        {CODER(TAG("n", "1")) "\n" CODER(TAG("n", "2")), "<f|{\"n\": 1}><f|{\"n\": 2}>!"},
        {"<function=f>" TAG("s", "") "</function>", "<f|{\"s\": \"\"}>!"},
        {CODER(TAG("s", "a\n\tb \"q\" \\ \x01 <b>\n")),
         "<f|{\"s\": \"a\\n\\tb \\\"q\\\" \\\\ \\u0001 <b>\\n\"}>!"},
        {CODER("<parameter=s>x</parameter>"), "<f|{\"s\": \"x\"}>!"},
        {CODER(TAG("s", "3") TAG("t", "true") TAG("t", "{\"a\": 1}")),
         "<f|{\"s\": \"3\", \"t\": \"true\", \"t\": \"{\\\"a\\\": 1}\"}>!"},
        {CODER(TAG("n", "True") TAG("m", "None") TAG("o", " false ") TAG("p", "null")),
         "<f|{\"n\": true, \"m\": null, \"o\": false, \"p\": null}>!"},
        {CODER(TAG("n", "some words") TAG("m", "3 4") TAG("o", "007") TAG("p", "-")
                   TAG("q", "1,2")),
         "<f|{\"n\": \"some words\", \"m\": \"3 4\", \"o\": \"007\", \"p\": \"-\", \"q\": "
         "\"1,2\"}>!"},
        {CODER(TAG("n", "{\"a\": [1, \"</parameter>\"]}") TAG("m", "[]")),
         "<f|{\"n\": {\"a\": [1, \"</parameter>\"]}, \"m\": []}>!"},
        {CODER(TAG("n", "{a}") TAG("m", "1")), "<f|{\"n\": \"{a}\", \"m\": 1}>!"},
        {CODER(TAG("n", "{hello} world") TAG("m", "[draft] fix")),
         "<f|{\"n\": \"{hello} world\", \"m\": \"[draft] fix\"}>!"},
        {CODER(TAG("n", "{'a': 1, 'b': [True, None, (1, 2.5), ()], \"c\": 'it\\'s \"x\"',}")),
         "<f|{\"n\": {\"a\": 1, \"b\": [true, null, [1, 2.5], []], \"c\": \"it's \\\"x\\\"\"}}>!"},
        {CODER(TAG("n", "{1: 'a', None: {}, True: [[]]}")),
         "<f|{\"n\": {\"1\": \"a\", \"null\": {}, \"true\": [[]]}}>!"},
        {CODER(TAG("n", "('\\x41\\u00e9\\U0001F600\\101\\d\\n\\t\\\\', )")),
         "<f|{\"n\": [\"A\xC3\xA9\xF0\x9F\x98\x80"
         "A\\\\d\\u000a\\u0009\\\\\"]}>!"},
        {CODER(TAG("n", "{'a'}") TAG("m", "(1)") TAG("o", "[1, 2") TAG("p", "{'a': b}")),
         "<f|{\"n\": \"{'a'}\", \"m\": \"(1)\", \"o\": \"[1, 2\", \"p\": \"{'a': b}\"}>!"},
        {CODER(TAG("n", "\"a b\"") TAG("m", "'a b'") TAG("o", "\"a\" b") TAG("p", "'a'b'")),
         "<f|{\"n\": \"a b\", \"m\": \"a b\", \"o\": \"\\\"a\\\" b\", \"p\": \"'a'b'\"}>!"},
        {CODER(TAG("z", "123") TAG("z", "null") TAG("z", "None") TAG("z", "true") TAG("z", "[1]")
                   TAG("z", "\"x\"")),
         "<f|{\"z\": \"123\", \"z\": null, \"z\": null, \"z\": \"true\", \"z\": \"[1]\", \"z\": "
         "\"\\\"x\\\"\"}>!"},
        {CODER(TAG("u", "123") TAG("u", "null") TAG("u", "{}") TAG("v", "{'a': 1}") TAG("v", "[1]")
                   TAG("v", "1") TAG("v", "{x")),
         "<f|{\"u\": 123, \"u\": \"null\", \"u\": \"{}\", \"v\": {\"a\": 1}, \"v\": \"[1]\", "
         "\"v\": "
         "\"1\", \"v\": \"{x\"}>!"},
        {CODER(TAG("i", "5") TAG("i", "\"5\"") TAG("i", "[5]") TAG("i", "five") TAG("l", "('a',)")
                   TAG("l", "None")),
         "<f|{\"i\": 5, \"i\": \"5\", \"i\": [5], \"i\": \"five\", \"l\": [\"a\"], \"l\": null}>!"},
        {"<tool_call>\n<function=f>\n<parameter=n>\n{\"a\": [1", "<f|{\"n\": {\"a\": [1>"},
        {"<tool_call>\n<function=f>\n<parameter=n>\n{'a': [1", "<f|{\"n\": \"{'a': [1>"},
        {CODER(TAG("n\"", "1")), "<f|{\"n\\\"\": 1}>!"},
        {CODER("so " TAG("n", "1") "and " TAG("m", "[1] 2")), "<f|{\"n\": 1, \"m\": \"[1] 2\"}>!"},
        {"<tool_call><function=get_weather>" TAG("s", "3") "</tool_call> There.",
         "<get_weather|{\"s\": 3}> There.!"},
        {CODER(TAG("s", "1")) " There.", "<f|{\"s\": \"1\"}> There.!"},
        {"<tool_call>\n<function=f>\n<parameter=s>\nPar", "<f|{\"s\": \"Par>"},
        {"<tool_call>\n<function=f>\n<parameter=n>\n12", "<f|{\"n\": \"12>"},
        {"<tool_call>\n<function=f>\n", "<f|>"},
        {"<function=g>\n</function>", "<function=g>\n</function>"},
        {"a <tool_call> b", "a <tool_call> b"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_coder(cases[i][0], cases[i][1]);
}

/* Calls in tags of other families: the values are as between the tags. */
Test(tool_calls, other_tags) {
#define GLM(key, value)          "<arg_key>" key "</arg_key>\n<arg_value>" value "</arg_value>\n"
#define MINIMAX(name, arguments) "<invoke name=\"" name "\">\n" arguments "</invoke>\n"
#define MINIMAX_TAG(key, value)  "<parameter name=\"" key "\">" value "</parameter>\n"
    static const struct {
        enum tool_format format;
        const char *text, *expected;
    } cases[] = {
        {TOOL_FORMAT_GLM45, "<tool_call>f\n" GLM("a", "Paris") GLM("b", "3") "</tool_call>",
         "<f|{\"a\": \"Paris\", \"b\": 3}>!"},
        {TOOL_FORMAT_GLM45,
         "So.\n<tool_call>f\n</tool_call>\n<tool_call>get_weather\n" GLM(
             "a", "\n x\n") "</tool_call>\n\nThere.",
         "So.<f|{}><get_weather|{\"a\": \"\\n x\\n\"}>\n\nThere.!"},
        {TOOL_FORMAT_GLM45,
         "<tool_call>\nf<arg_key>a</arg_key> <arg_value>[1]</arg_value></tool_call>",
         "<f|{\"a\": [1]}>!"},
        {TOOL_FORMAT_GLM45, "<tool_call>f<arg_key>a</arg_key>x</arg_value></tool_call>",
         "<f|{\"a\": \"x\"}>!"},
        {TOOL_FORMAT_GLM45, "<tool_call>g\n</tool_call>", "<tool_call>g\n</tool_call>"},
        {TOOL_FORMAT_GLM45, "<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>"},
        {TOOL_FORMAT_GLM45, "<tool_call>f_\n</tool_call>", "<tool_call>f_\n</tool_call>"},
        {TOOL_FORMAT_GLM45, "<tool_call>f", "<tool_call>f"},
        {TOOL_FORMAT_GLM45, "<tool_call>f\n<arg_key>a</arg_k", "<f|{\"a</arg_k>"},
        {TOOL_FORMAT_GLM47,
         "<tool_call>f<arg_key>a</arg_key><arg_value>a</arg_value></tool_call>"
         "<tool_call>f</tool_call>",
         "<f|{\"a\": \"a\"}><f|{}>!"},
        {TOOL_FORMAT_SEED_OSS,
         "<seed:tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>1"
         "</parameter>\n</function>\n</seed:tool_call>",
         "<f|{\"a\": \"\\nx\\n\", \"b\": 1}>!"},
        {TOOL_FORMAT_MINIMAX_M2,
         "\n<minimax:tool_call>\n" MINIMAX("f",
                                           MINIMAX_TAG("a", "x > \"y\"") MINIMAX_TAG("b\"", "1"))
             MINIMAX("get_weather", "") "</minimax:tool_call>",
         "<f|{\"a\": \"x > \\\"y\\\"\", \"b\\\"\": 1}><get_weather|{}>!"},
        {TOOL_FORMAT_MINIMAX_M2, "a " MINIMAX("f", "") "b", "a <f|{}>b!"},
        {TOOL_FORMAT_MINIMAX_M2, "<minimax:tool_call>\n<invoke name=\"f\">\n</minimax:tool_call> b",
         "<f|{}> b!"},
        {TOOL_FORMAT_MINIMAX_M2, "<invoke name=\"f>", "<invoke name=\"f>"},
    };
#undef GLM
#undef MINIMAX
#undef MINIMAX_TAG
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[cases[i].format], cases[i].text, cases[i].expected);
}

/* JSON between marks, and lists of objects. */
Test(tool_calls, other_marks) {
#define DEEPSEEK(name, arguments)                                                                  \
    "<｜tool▁call▁begin｜>" name "<｜tool▁sep｜>" arguments "<｜tool▁call▁end｜>"
#define KIMI(name, at, arguments)                                                                  \
    "<|tool_call_begin|>functions." name ":" at "<|tool_call_argument_begin|>" arguments           \
    "<|tool_call_end|>"
#define DSML(name, string, value)                                                                  \
    "<｜DSML｜parameter name=\"" name "\" string=\"" string "\">" value "</｜DSML｜parameter>\n"
#define INVOKE(arguments) "<｜DSML｜invoke name=\"f\">\n" arguments "</｜DSML｜invoke>\n"
    static const struct {
        enum tool_format format;
        const char *text, *expected;
    } cases[] = {
        {TOOL_FORMAT_DEEPSEEK_V31,
         "So.<｜tool▁calls▁begin｜>" DEEPSEEK("f", "{\"a\": {\"b\": \"｜>\"}}")
             DEEPSEEK("get_weather", "{}") "<｜tool▁calls▁end｜>",
         "So.<f|{\"a\": {\"b\": \"｜>\"}}><get_weather|{}>!"},
        {TOOL_FORMAT_DEEPSEEK_V31, DEEPSEEK("g", "{}"), DEEPSEEK("g", "{}")},
        {TOOL_FORMAT_DEEPSEEK_V31, DEEPSEEK("f", "[1]"), DEEPSEEK("f", "[1]")},
        {TOOL_FORMAT_DEEPSEEK_V31, DEEPSEEK("f", "{\"a\" 1}") " x", "<f|{\"a\" 1}>x!"},
        {TOOL_FORMAT_DEEPSEEK_V3,
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": "
         "1}\n```"
         "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         "<f|{\"a\": 1}><f|{}>!"},
        {TOOL_FORMAT_KIMI_K2,
         "<|tool_calls_section_begin|>" KIMI("f", "0", "{\"a\": 1}")
             KIMI("get_weather", "12", "{}") "<|tool_calls_section_end|>\n\nSo.",
         "<f|{\"a\": 1}><get_weather|{}>\n\nSo.!"},
        {TOOL_FORMAT_DEEPSEEK_V32,
         "<｜DSML｜function_calls>\n" INVOKE(DSML("a", "true", "1") DSML("b", "false", "1") DSML(
             "c", "false", "{'x': True}") DSML("d", "true", "{\"x\": </｜DSML｜"))
             INVOKE("") "</｜DSML｜function_calls>",
         "<f|{\"a\": \"1\", \"b\": 1, \"c\": {\"x\": true}, \"d\": \"{\\\"x\\\": </｜DSML｜\"}>"
         "<f|{}>!"},
        {TOOL_FORMAT_GRANITE, "So. <|tool_call|>[" F ", " F "]",
         "So. <f|{\"a\": 1}><f|{\"a\": 1}>!"},
        {TOOL_FORMAT_GRANITE, "<|tool_call|>" F, "<f|{\"a\": 1}>!"},
        {TOOL_FORMAT_GRANITE, F, F},
        {TOOL_FORMAT_GRANITE, "[" F "]", "[" F "]"},
        {TOOL_FORMAT_GRANITE, "<|tool_call|>[{\"a\": 1}]", "<|tool_call|>[{\"a\": 1}]"},
        {TOOL_FORMAT_COMMAND,
         "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": "
         "{\"a\": 1}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"f\", \"parameters\": {}}\n"
         "]<|END_ACTION|> So.",
         "<f|{\"a\": 1}><f|{}> So.!"},
        {TOOL_FORMAT_FUNCTIONARY, "<function=f>{\"a\": 1}</function><function=f>{}</function>",
         "<f|{\"a\": 1}><f|{}>!"},
    };
#undef DEEPSEEK
#undef KIMI
#undef DSML
#undef INVOKE
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&tool_forms[cases[i].format], cases[i].text, cases[i].expected);
}

/* Arguments that are literals of Python, or of a notation of the model's own. */
Test(tool_calls, other_notations) {
#define LFM2(calls)  "<|tool_call_start|>[" calls "]<|tool_call_end|>"
#define GEMMA(calls) "<|tool_call>call:" calls "<tool_call|>"
#define Q            "<|\"|>"
    static const char *const lfm2[][2] = {
        {LFM2("f(s=\"Paris\", n=3)"), "<f|{\"s\": \"Paris\", \"n\": 3}>!"},
        {LFM2("f()"), "<f|{}>!"},
        {LFM2("f(a='x'), get_weather(b=True)") "Wait.",
         "<f|{\"a\": \"x\"}><get_weather|{\"b\": true}>Wait.!"},
        {"So. " LFM2("f(a=None)") LFM2("f(b=-1.5e3)"), "So. <f|{\"a\": null}><f|{\"b\": -1.5e3}>!"},
        {LFM2("f(a={'b': [1, (2,), {\"c\": false}], 'd': null}, e=[], )"),
         "<f|{\"a\": {\"b\": [1, [2], {\"c\": false}], \"d\": null}, \"e\": []}>!"},
        {LFM2("f( a = 'it\\'s \"x\"\n' , b=\"\\u00e9\\x41\\\\\")"),
         "<f|{ \"a\":  \"it's \\\"x\\\"\\u000a\" , \"b\": \"\xC3\xA9"
         "A\\\\\"}>!"},
        {LFM2("f(a=']<|tool_call_end|>')"), "<f|{\"a\": \"]<|tool_call_end|>\"}>!"},
        {LFM2("f(gr\xC3\xB6\xC3\x9F"
              "e=1, \xC3\xA9-x=2)"),
         "<f|{\"gr\xC3\xB6\xC3\x9F"
         "e\": 1, \"\xC3\xA9-x\": 2}>!"},
        /* no literal: up to the end of the call */
        {LFM2("f('x')") " So.", "<f|{'x')]> So.!"},
        {LFM2("f(a=b)"), "<f|{\"a\": b)]>!"},
        {LFM2("f(a=1 2)"), "<f|{\"a\": 1 2)]>!"},
        {LFM2("g(a=1)"), LFM2("g(a=1)")},
        {LFM2("f"), LFM2("f")},
        {"[f(a=1)]", "[f(a=1)]"},
        {"f(a=1)", "f(a=1)"},
        /* the end of the text */
        {"<|tool_call_start|>[f(a='x", "<f|{\"a\": \"x>"},
        {"<|tool_call_start|>[f(a=12", "<f|{\"a\": >"},
        {"<|tool_call_start|>[f(a=1,", "<f|{\"a\": 1>"},
        {"<|tool_call_start|>[f(a=1)", "<f|{\"a\": 1}>!"},
        {"<|tool_call_start|>[f(a=1), ", "<f|{\"a\": 1}>!"},
    };
    static const char *const gemma[][2] = {
        {GEMMA("f{s:" Q "Paris" Q ",n:3}"), "<f|{\"s\": \"Paris\",\"n\": 3}>!"},
        {GEMMA("f{}") GEMMA("get_weather{a:true}"), "<f|{}><get_weather|{\"a\": true}>!"},
        {"So." GEMMA("f{a:None,b:null}") "Wait.", "So.<f|{\"a\": null,\"b\": null}>Wait.!"},
        {GEMMA("f{a:{b:[1," Q "}<tool_call|>" Q "],c d:{}},e:[]}"),
         "<f|{\"a\": {\"b\": [1,\"}<tool_call|>\"],\"c d\": {}},\"e\": []}>!"},
        {GEMMA("f{a:" Q "a\n\"b\" \\ <|\" <" Q "," Q "x y" Q ":1}"),
         "<f|{\"a\": \"a\\u000a\\\"b\\\" \\\\ <|\\\" <\",\"x y\":1}>!"},
        {GEMMA("f{a:\"x\"}") "So.", "<f|{\"a\": \"x\"}>So.!"},
        {GEMMA("f{a:(1,)}"), "<f|{\"a\": (1,)}>!"},
        {GEMMA("g{}"), GEMMA("g{}")},
        {"<|tool_call>call:f{a:" Q "x<|", "<f|{\"a\": \"x>"},
    };
    for (size_t i = 0; i < sizeof lfm2 / sizeof *lfm2; i++)
        check(&tool_forms[TOOL_FORMAT_LFM2], lfm2[i][0], lfm2[i][1]);
    for (size_t i = 0; i < sizeof gemma / sizeof *gemma; i++)
        check(&tool_forms[TOOL_FORMAT_GEMMA4], gemma[i][0], gemma[i][1]);
#undef LFM2
#undef GEMMA
#undef Q
}

/* Values in tags that are tags again. */
Test(tool_calls, tags_that_nest) {
#define NS "]<]minimax[>["
#define CALL(arguments)                                                                            \
    NS "<tool_call>\n" NS "<invoke name=\"f\">" arguments NS "</invoke>\n" NS "</tool_call>"
#define IN(name, value) NS "<" name ">" value NS "</" name ">"
    static const char *const cases[][2] = {
        {CALL(""), "<f|{}>!"},
        {"So." CALL(IN("s", "12") IN("n", "12")) "There.",
         "So.<f|{\"s\": \"12\", \"n\": 12}>There.!"},
        {CALL(IN("a", IN("item", "1") IN("item", IN("b", "x ]<") IN("c", "true")))),
         "<f|{\"a\": [1, {\"b\": \"x ]<\", \"c\": true}]}>!"},
        {CALL(IN("a", IN("b", IN("item", IN("item", "<i>")))) IN("d", "null")),
         "<f|{\"a\": {\"b\": [[\"<i>\"]]}, \"d\": null}>!"},
        {CALL(IN("l", "") IN("i", "{\"x\": 1}") IN("s", "")),
         "<f|{\"l\": [], \"i\": {\"x\": 1}, \"s\": \"\"}>!"},
        {CALL(IN("s", "a") " ] " IN("n", "12") "]"), "<f|{\"s\": \"a\", \"n\": 12}>!"},
        {NS "<tool_call>\n" NS "<invoke name=\"f\">" NS "<a>" NS "<b>x", "<f|{\"a\": {\"b\": \"x>"},
    };
    static const struct tool_parameter some[] = {
        {"s", CONSTRAIN_TYPE_STRING}, {"l", CONSTRAIN_TYPE_ARRAY | CONSTRAIN_TYPE_NULL}, {NULL, 0}};
    static const struct tool_parameter *const all[] = {some, some};
    const struct tool_set tools = {&tool_forms[TOOL_FORMAT_MINIMAX_M3], names, 2, true, all};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_set(&tools, cases[i][0], cases[i][1]);
#undef NS
#undef CALL
#undef IN
}

/* A number, a word or blanks that never end are not held back for ever. */
Test(tool_calls, literals_hold_back_little) {
    static const char *const begins[] = {"f(a=", "f(a=1,", "f(a"}, *const bytes[] = {"1", " ", " "};
    for (size_t i = 0; i < 3; i++) {
        struct buf text;
        buf_open(&text, 1 << 16);
        buf_fmt(&text, "<|tool_call_start|>[%s", begins[i]);
        for (int k = 0; k < 2000; k++) buf_str(&text, bytes[i]);
        const struct tool_set tools = {&tool_forms[TOOL_FORMAT_LFM2], names, 2, true, NULL};
        struct tool_reader r = {.tools = &tools};
        while (tool_reader_next(&r, text.data, text.size, false).kind != TOOL_MORE) continue;
        cr_expect(text.size - r.at <= TOOL_LITERAL_HELD_MAX, "%s", begins[i]);
        buf_close(&text);
    }
}

/* The last mark ends a section, whoever has read it: an object behind it is no call. */
Test(tool_calls, sections_end_at_their_last_mark) {
    static const char broken[] =
        "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", "
        "\"parameters\": {\"a\" 1}}\n]<|END_ACTION|>{\"tool_call_id\": \"1\", \"tool_name\": "
        "\"f\", \"parameters\": {}}";
    check(&tool_forms[TOOL_FORMAT_COMMAND], broken,
          "<f|{\"a\" 1}}\n]>{\"tool_call_id\": \"1\", \"tool_name\": \"f\", \"parameters\": "
          "{}}!");
}

/* Tags of which one is empty are not read for ever. */
Test(tool_calls, empty_tags_come_to_an_end) {
    static const char *const texts[] = {"<xy>f>\n\"hi\"\n<z>", "<xy>f>\n<p=a>1</p>x<z>"};
    for (unsigned empty = 1; empty < 8; empty++) {
        const struct constrain_tags tags = {.open = empty & 1 ? "" : "<p=",
                                            .named = empty & 2 ? "" : ">",
                                            .gap = "",
                                            .value = "",
                                            .line = "",
                                            .close = empty & 4 ? "" : "</p>",
                                            .after = ""};
        const struct tool_form form = {.name = "empty",
                                       .shape = TOOL_SHAPE_NAMED,
                                       .open = "",
                                       .before = "<xy>",
                                       .arguments = ">\n",
                                       .after = "<z>",
                                       .between = "",
                                       .close = "",
                                       .tags = &tags};
        const struct tool_set tools = {&form, names, 2, true, NULL};
        for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
            struct tool_reader r = {.tools = &tools};
            size_t pieces = 0, size = strlen(texts[i]);
            while (tool_reader_next(&r, texts[i], size, true).kind != TOOL_MORE)
                cr_assert(++pieces < 100, "%s", texts[i]);
        }
    }
}

Test(tool_calls, templates_say_how) {
    static const char *const hermes[] = {"Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B",
                                         "Qwen-QwQ-32B"};
    static const char *const others[] = {"HuggingFaceTB-SmolLM3-3B",
                                         "microsoft-Phi-3.5-mini-instruct"};
    cr_expect_eq(form_of_file("deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
                 &tool_forms[TOOL_FORMAT_DEEPSEEK_V3]);
    cr_expect_eq(form_of_file("ibm-granite-granite-3.3-2B-Instruct"),
                 &tool_forms[TOOL_FORMAT_GRANITE]);
    cr_expect_eq(form_of_file("google-gemma-4-31B-it"), &tool_forms[TOOL_FORMAT_GEMMA4]);
    cr_expect_eq(tool_form_of("{{ 'List of tools: <|tool_list_start|>[' }}"),
                 &tool_forms[TOOL_FORMAT_LFM2]);
    cr_expect_eq(form_of_file("GLM-4.6"), &tool_forms[TOOL_FORMAT_GLM45]);
    cr_expect_eq(form_of_file("Qwen3-Coder"), &tool_forms[TOOL_FORMAT_QWEN3_CODER]);
    cr_expect_eq(form_of_file("mistralai-Mistral-Nemo-Instruct-2407"),
                 &tool_forms[TOOL_FORMAT_MISTRAL]);
    for (size_t i = 0; i < sizeof hermes / sizeof *hermes; i++)
        cr_expect_eq(form_of_file(hermes[i]), &tool_forms[TOOL_FORMAT_HERMES], "%s", hermes[i]);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_expect_eq(form_of_file(others[i]), NULL, "%s", others[i]);
    cr_expect_eq(tool_form_of(NULL), NULL);
    cr_expect_eq(tool_form_of("{{- \"<tool_call>\n\" }}\n{{- '{\"name\": <function-name>"),
                 &tool_forms[TOOL_FORMAT_HERMES]);
    cr_expect_eq(tool_form_of("<tool_call>"), NULL);
    cr_expect_eq(tool_form_of("<tool_call>{"), NULL);
    cr_expect_eq(tool_form_of("<tool_call>{\\"), NULL);
    cr_expect_eq(tool_form_of("{{- 'Respond in the format {\"name\": function name, "
                              "\"parameters\": dictionary of its arguments}.' }}"),
                 &tool_forms[TOOL_FORMAT_LLAMA3]);
    cr_expect_eq(tool_form_of("{{ \"{\\\"name\\\": function name, \\\"parameters\\\": x}\" }}"),
                 &tool_forms[TOOL_FORMAT_LLAMA3]);
}

/* White space that may go on is not read again with each byte. */
Test(tool_calls, long_white_space_takes_linear_time) {
    static const struct {
        enum tool_format format;
        const char *begin;
    } cases[] = {
        {TOOL_FORMAT_MINIMAX_M3, "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"f\">"
                                 "]<]minimax[>[<a>{}"},
        {TOOL_FORMAT_GLM45, "<tool_call>f\n<arg_key>a</arg_key>"},
        {TOOL_FORMAT_DEEPSEEK_V32, "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n"
                                   "<｜DSML｜parameter name=\"a\" string=\""},
    };
    static const char *const f[] = {"f"};
    enum { BYTES = 1 << 18 };
    char *text = malloc(BYTES);
    cr_assert(text);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct tool_set set = {&tool_forms[cases[i].format], f, 1, true, NULL};
        struct tool_reader reader = {.tools = &set};
        const clock_t begin = clock();
        memset(text, ' ', BYTES);
        memcpy(text, cases[i].begin, strlen(cases[i].begin));
        for (size_t end = 1; end <= BYTES; end++)
            while (tool_reader_next(&reader, text, end, end == BYTES).kind != TOOL_MORE)
                cr_assert(clock() - begin < 4 * CLOCKS_PER_SEC, "%s", cases[i].begin);
        cr_expect(clock() - begin < 4 * CLOCKS_PER_SEC, "%s", cases[i].begin);
        cr_expect_eq(reader.calls, 1, "%s", cases[i].begin);
    }
    free(text);
}
