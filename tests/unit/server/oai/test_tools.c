/* Tools between client and template: chats with tools render as transformers renders them, and a
 * model's own calls, given back by the client, to what the model wrote. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "server/oai/fields.h"
#include "tool_case.h"

/* A body as the daemon reads and renders it. */
static void render(const struct chat *chat, const char *body, struct buf *out) {
    struct oai_case c;
    struct arena arena;
    struct chat_text text;
    struct fault fault = {0};
    case_open(&c);
    arena_open(&arena, (size_t)32 << 20);
    cr_assert_eq(case_parse(&c, &oai_template, body), 0, "%s: %s", c.error.param, c.error.message);
    if (!cJSON_GetObjectItem(c.request.context, "eos_token")) /* the engine adds the model's */
        cJSON_AddStringToObject(c.request.context, "eos_token", "</s>");
    struct chat_input input = {.context = c.request.context};
    cr_assert_eq(chat_render(chat, &input, &arena, &text, &fault), 0, "%s", fault.text);
    buf_clear(out);
    buf_add(out, text.text, text.size);
    arena_close(&arena);
    case_close(&c);
}

static void check_line(const char *line) {
    const struct json_limits limits = {.bytes = 1 << 20, .depth = 64};
    struct buf body, out;
    cJSON *tree;
    cr_assert_eq(json_parse(line, strlen(line), &limits, &tree, NULL), 0);
    struct chat *chat = open_template(json_get(tree, "template")->valuestring);
    buf_open(&body, 1 << 20);
    buf_open(&out, 1 << 20);
    json_write_node(&body, json_get(tree, "request"));
    render(chat, body.data, &out);
    cr_expect_str_eq(out.data, json_get(tree, "expected")->valuestring, "%s", body.data);
    buf_close(&body);
    buf_close(&out);
    chat_close(chat);
    json_free(tree);
}

Test(oai_tools, chats_render_as_transformers_renders_them) {
    char *data = read_file(HERE, "tools.jsonl", ""), *rest = NULL;
    int lines = 0;
    for (char *line = strtok_r(data, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        check_line(line);
        lines++;
    }
    cr_assert_eq(lines, 72);
    free(data);
}

/* --- there and back --- */

#define USER  "{\"role\":\"user\",\"content\":\"How is it in Oslo?\"}"
#define TOOLS ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\"}}]"

static void take(void *to, const struct oai_delta *delta) {
    oai_calls_take(to, delta);
}

/* The message a client has of this text, and gives back with what the tool said. */
static void write_next(struct buf *out, const char *text, const char *reasoning) {
    static const char *const names[] = {"get_weather"};
    struct oai_request request = {.tools = {&tool_forms[TOOL_FORMAT_HERMES], names, 1, true, NULL}};
    struct oai_answer answer = {.id = "chatcmpl-0123456789abcdef", .request = &request};
    struct oai_calls calls;
    oai_calls_open(&calls, &answer, 0, 1 << 20);
    struct oai_divider divider = {.answer = &answer, .sink = {take, &calls}};
    oai_divide_text(&divider, &(struct oai_voice){0}, text, 0, strlen(text));
    oai_calls_end(&calls);
    cr_assert(tool_reader_called(&divider.calls) && !oai_calls_failed(&calls));
    buf_str(out, "{\"messages\":[" USER ",{\"role\":\"assistant\",\"content\":");
    if (calls.content.size)
        json_write_str(out, calls.content.data, calls.content.size);
    else
        buf_str(out, "null");
    buf_fmt(out, "%s,\"tool_calls\":[%s]}", reasoning, calls.list.data);
    buf_str(out, ",{\"role\":\"tool\",\"tool_call_id\":\"x\",\"content\":\"cold\"}]" TOOLS "}");
    oai_calls_close(&calls);
}

/* The next prompt begins with this one and all that the model wrote. */
static bool goes_on(const char *name, const char *thought, const char *text,
                    const char *reasoning) {
    struct chat *chat = open_template(name);
    struct buf body, first, second;
    buf_open(&body, 1 << 20);
    buf_open(&first, 1 << 20);
    buf_open(&second, 1 << 20);
    render(chat, "{\"messages\":[" USER "]" TOOLS "}", &first);
    buf_fmt(&first, "%s%s<|im_end|>", thought, text);
    write_next(&body, text, reasoning);
    render(chat, body.data, &second);
    bool same = first.size < second.size && memcmp(first.data, second.data, first.size) == 0;
    buf_close(&body);
    buf_close(&first);
    buf_close(&second);
    chat_close(chat);
    return same;
}

#define CALL(arguments)                                                                            \
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": " arguments "}\n</tool_call>"

Test(oai_tools, calls_given_back_are_what_the_model_wrote) {
    static const char *const templates[] = {"Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"};
    static const char *const texts[] = {
        CALL("{}"),
        CALL("{\"city\": \"S\xc3\xa3o Paulo\", \"days\": [1, 2.5, -3], \"x\": {\"y\": null}}"),
        CALL("{\"text\": \"a\\n\\\"b\\\" \\\\ </tool_call> {\"}"),
        "Let me look.\n" CALL("{\"a\": true}"),
        "Two lines.\n\n" CALL("{\"a\": 1}") "\n" CALL("{\"b\": 12345678901234567890}"),
    };
    for (size_t i = 0; i < 2; i++)
        for (size_t k = 0; k < sizeof texts / sizeof *texts; k++)
            cr_expect(goes_on(templates[i], "", texts[k], ""), "%s: %s", templates[i], texts[k]);
    for (size_t k = 0; k < sizeof texts / sizeof *texts; k++)
        cr_expect(goes_on(templates[1], "<think>\nHm,\nhm.\n</think>\n\n", texts[k],
                          ",\"reasoning_content\":\"Hm,\\nhm.\\n\""),
                  "%s", texts[k]);
}

/* documented in docs/API.md */
Test(oai_tools, other_words_for_the_same_arguments_are_read_again) {
    static const char name[] = "Qwen-Qwen3-0.6B";
    cr_expect(!goes_on(name, "", CALL("{\"a\":1}"), ""));
    cr_expect(!goes_on(name, "", CALL("{\"a\": \"\\u00e9\"}"), ""));
    cr_expect(!goes_on(name, "<think>\n\n</think>\n\n", CALL("{\"a\": 1}"), ""));
}

/* --- choice of the form --- */

Test(oai_tools, the_template_or_the_option_says_how_calls_are_written) {
    struct engine_options options = {
        .model_dir = "m", .kv_budget = 64, .max_num_seqs = 1, .max_queue = 1};
    static const struct {
        const char *model, *parser;
        const struct tool_form *form;
    } cases[] = {
        {NULL, "auto", &tool_forms[TOOL_FORMAT_HERMES]},
        {NULL, "none", NULL},
        {"hermes", "auto", &tool_forms[TOOL_FORMAT_HERMES]},
        {"llama3", "auto", &tool_forms[TOOL_FORMAT_LLAMA3]},
        {"hermes", "llama3", &tool_forms[TOOL_FORMAT_LLAMA3]},
        {"hermes", "none", NULL},
        {"llama3", "hermes", &tool_forms[TOOL_FORMAT_HERMES]},
        {"harmony", "auto", &tool_forms[TOOL_FORMAT_HARMONY]},
        {"qwen3_coder", "auto", &tool_forms[TOOL_FORMAT_QWEN3_CODER]},
        {"hermes", "qwen3_coder", &tool_forms[TOOL_FORMAT_QWEN3_CODER]},
        {"seed_oss", "auto", &tool_forms[TOOL_FORMAT_SEED_OSS]},
        {"glm45", "auto", &tool_forms[TOOL_FORMAT_GLM45]},
        {"glm47", "auto", &tool_forms[TOOL_FORMAT_GLM47]},
        {"minimax_m2", "auto", &tool_forms[TOOL_FORMAT_MINIMAX_M2]},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct engine *engine;
        struct fault fault;
        if (cases[i].model) setenv("KEEPD_FAKE_TOOLS", cases[i].model, 1);
        cr_assert_eq(engine_open(&options, &engine, &fault), 0);
        const struct oai_tool_style style = oai_find_tools(engine, cases[i].parser);
        cr_expect_eq(style.form, cases[i].form, "%zu", i);
        cr_expect(style.generic == (i == 0), "%zu", i);
        engine_close(engine);
    }
}

/* A form of which any mark ends the model's answers could be neither found nor bound. */
Test(oai_tools, forms_whose_marks_end_answers_are_not_used) {
    struct engine_options options = {
        .model_dir = "m", .kv_budget = 64, .max_num_seqs = 1, .max_queue = 1};
    static const struct {
        const char *model, *end;
        bool generic;
    } cases[] = {
        {"kimi_k2", "<|tool_calls_section_begin|>", true},
        {"kimi_k2", "<|tool_call_argument_begin|>", true},
        {"kimi_k2", "<|tool_call_end|>", true},
        {"kimi_k2", "<|tool_calls_section_end|>", true},
        {"kimi_k2", "<|end|>", false},
        {"glm45", "<arg_value>", true},
        {"glm45", "</arg_value>", true},
        {"deepseek_v32", "false\">", true},
        {"qwen3_coder", "</parameter>", true},
        {"qwen3_coder", "<arg_value>", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct engine *engine;
        struct fault fault;
        setenv("KEEPD_FAKE_TOOLS", cases[i].model, 1);
        setenv("KEEPD_FAKE_END", cases[i].end, 1);
        cr_assert_eq(engine_open(&options, &engine, &fault), 0);
        const struct oai_tool_style style = oai_find_tools(engine, "auto");
        cr_expect_eq(style.generic, cases[i].generic, "%s: %s", cases[i].model, cases[i].end);
        cr_expect(style.form);
        engine_close(engine);
    }
}

static struct engine *open_with_template(const char *path) {
    const struct engine_options options = {
        .model_dir = "fake", .kv_policy = "full", .chat_template = path};
    struct engine *engine;
    struct fault fault;
    cr_assert_eq(engine_open(&options, &engine, &fault), 0, "%s", fault.text);
    return engine;
}

Test(oai_tools, turns_that_a_template_takes) {
    static const struct {
        const char *template;
        struct oai_turns turns;
    } cases[] = {
        {"no_system", {.alternate = true}},
        {"templates/Mistral-Small-3.2-24B-Instruct-2506",
         {.has_system = true, .alternate = true, .system_between = true, .results_last = true}},
        {"templates/mistralai-Ministral-3-14B-Reasoning-2512",
         {.has_system = true, .alternate = true, .results_last = true}},
        {"templates/mistralai-Mistral-Nemo-Instruct-2407",
         {.has_system = true, .alternate = true, .results_last = true}},
        {"templates/Qwen-Qwen2.5-7B-Instruct", {.has_system = true}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[512];
        snprintf(path, sizeof path, HERE "%s.jinja", cases[i].template);
        struct engine *engine = open_with_template(path);
        const struct oai_turns turns = oai_find_turns(engine), *expected = &cases[i].turns;
        cr_expect_eq(turns.has_system, expected->has_system, "%s", path);
        cr_expect_eq(turns.alternate, expected->alternate, "%s", path);
        cr_expect_eq(turns.system_between, expected->system_between, "%s", path);
        cr_expect_eq(turns.results_last, expected->results_last, "%s", path);
        engine_close(engine);
    }
}

/* --- the generic form --- */

static void check_written(const char *body, bool has_system, const char *expected) {
    struct oai_case c;
    struct buf text;
    case_open(&c);
    c.rules.tools =
        (struct oai_tool_style){.form = &tool_forms[TOOL_FORMAT_HERMES], .generic = true};
    c.rules.turns.has_system = has_system;
    cr_assert_eq(case_parse(&c, &oai_chat, body), 0, "%s", c.error.message);
    cr_expect_null(cJSON_GetObjectItem(c.request.context, "tools"));
    buf_open(&text, 1 << 16);
    json_write_node(&text, cJSON_GetObjectItem(c.request.context, "messages"));
    /* ~ in the expected text: what describes the tools */
    const char *gap = strchr(expected, '~');
    const size_t before = gap ? (size_t)(gap - expected) : text.size;
    cr_expect(strlen(expected) <= text.size + 1 && !memcmp(text.data, expected, before), "%s",
              text.data);
    if (gap)
        cr_expect_str_eq(text.data + text.size - strlen(gap + 1), gap + 1);
    else
        cr_expect_str_eq(text.data, expected);
    if (gap) cr_expect(strstr(text.data, "{\\\"name\\\":\\\"f\\\"}\\nTo use"), "%s", text.data);
    buf_close(&text);
    case_close(&c);
}

Test(oai_tools, a_template_without_tools_gets_them_in_a_message) {
#define F  ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]}"
#define HI "{\"role\":\"user\",\"content\":\"hi\"}"
    check_written("{\"messages\":[" HI "]" F, true,
                  "[{\"role\":\"system\",\"content\":\"You can use~needed.\"}," HI "]");
    check_written("{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"}," HI "]" F, true,
                  "[{\"role\":\"system\",\"content\":\"Be brief.\\n\\nYou can~needed.\"}," HI "]");
    check_written("{\"messages\":[" HI "]" F, false,
                  "[{\"role\":\"user\",\"content\":\"You can use~needed.\\n\\nhi\"}]");
    check_written("{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"}," HI "]" F, false,
                  "[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\","
                  "\"content\":\"You can use~needed.\\n\\nhi\"}]");
    check_written("{\"messages\":[" HI "]}", true, "[" HI "]");
}

Test(oai_tools, calls_and_results_become_text) {
    check_written(
        "{\"messages\":[" HI
        ",{\"role\":\"assistant\",\"content\":\"So.\",\"tool_calls\":[{\"id\":\"1\","
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": "
        "12345678901234567890}\"}},{\"id\":\"2\",\"type\":\"function\",\"function\":{\"name\":"
        "\"g\","
        "\"arguments\":\"\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"7\"},"
        "{\"role\":\"tool\",\"tool_call_id\":\"2\",\"content\":\"8\"}," HI "," HI "]}",
        true,
        "[" HI
        ",{\"role\":\"assistant\",\"content\":\"So.\\n<tool_call>\\n{\\\"name\\\": \\\"f\\\", "
        "\\\"arguments\\\": {\\\"a\\\":12345678901234567890}}\\n</tool_call>\\n<tool_call>\\n"
        "{\\\"name\\\": \\\"g\\\", \\\"arguments\\\": {}}\\n</tool_call>\"},"
        "{\"role\":\"user\",\"content\":\"<tool_response>\\n7\\n</"
        "tool_response>"
        "\\n<tool_response>\\n8\\n</tool_response>\\nhi\",\"tool_call_id\":\"1\"}," HI "]");
}

/* A template that refuses two turns of the user in a row gets one. */
static void check_joined(const char *messages, struct oai_turns turns, const char *expected) {
    struct oai_case c;
    struct buf text;
    case_open(&c);
    c.rules.turns = turns;
    buf_open(&text, 1 << 16);
    buf_fmt(&text, "{\"messages\":[%s]}", messages);
    cr_assert_eq(case_parse(&c, &oai_chat, text.data), 0, "%s", c.error.message);
    buf_clear(&text);
    json_write_node(&text, cJSON_GetObjectItem(c.request.context, "messages"));
    cr_expect_str_eq(text.data, expected);
    buf_close(&text);
    case_close(&c);
}

#define BRIEF           "{\"role\":\"system\",\"content\":\"Be brief.\"}"
#define YES             "{\"role\":\"assistant\",\"content\":\"yes\"}"
#define USER_SAYS(text) "{\"role\":\"user\",\"content\":\"" text "\"}"

Test(oai_tools, turns_of_the_user_are_joined) {
#define ALL BRIEF "," HI "," HI "," YES "," BRIEF "," HI
    check_joined(ALL, (struct oai_turns){.has_system = true}, "[" ALL "]");
    check_joined(ALL, (struct oai_turns){.has_system = true, .alternate = true},
                 "[" BRIEF "," USER_SAYS("hi\\n\\nhi") "," YES
                                                       "," USER_SAYS("Be brief.\\n\\nhi") "]");
    check_joined(ALL, (struct oai_turns){.alternate = true},
                 "[" USER_SAYS("Be brief.\\n\\nhi\\n\\nhi") "," YES
                                                            "," USER_SAYS("Be brief.\\n\\nhi") "]");
#undef ALL
}

static bool takes(const struct engine *engine, const cJSON *context) {
    const struct engine_chat chat = {.context = context, .longest = 1 << 20};
    struct arena arena;
    struct engine_ids ids;
    struct fault fault;
    arena_open(&arena, 1 << 20);
    const bool taken = engine_render_chat(engine, &chat, &arena, &ids, &fault) == 0;
    arena_close(&arena);
    return taken;
}

/* A published template gets a chat with these messages, and takes it. */
static void check_taken(const char *template, const char *messages, const char *expected) {
    char path[512];
    struct buf body;
    snprintf(path, sizeof path, HERE "templates/%s.jinja", template);
    struct engine *engine = open_with_template(path);
    check_joined(messages, oai_find_turns(engine), expected);
    buf_open(&body, 1 << 16);
    buf_fmt(&body, "{\"messages\":%s}", expected);
    cJSON *context = cJSON_Parse(body.data);
    cr_expect(takes(engine, context), "%s: %s", template, expected);
    cJSON_Delete(context);
    buf_close(&body);
    engine_close(engine);
}

/* Mistral Small counts a later message of the system as an answer. */
Test(oai_tools, a_template_gets_the_messages_of_the_system_that_it_takes) {
    static const char small[] = "Mistral-Small-3.2-24B-Instruct-2506";
    static const char nemo[] = "mistralai-Mistral-Nemo-Instruct-2407";
    static const char folded[] = "[" USER_SAYS("hi\\n\\nBe brief.\\n\\nhi") "]";
#define LATER HI "," BRIEF "," HI
    check_taken(small, LATER, "[" LATER "]");
    check_taken(small, BRIEF "," LATER, "[" BRIEF "," LATER "]");
    check_taken(small, BRIEF "," HI "," BRIEF, "[" BRIEF "," HI "," BRIEF "]");
    check_taken(nemo, LATER, folded);
    check_taken(small, HI "," YES "," BRIEF "," HI,
                "[" HI "," YES "," USER_SAYS("Be brief.\\n\\nhi") "]");
    check_taken(small, HI "," BRIEF "," YES, "[" USER_SAYS("hi\\n\\nBe brief.") "," YES "]");
    check_taken(small, HI "," BRIEF "," BRIEF "," HI,
                "[" USER_SAYS("hi\\n\\nBe brief.") "," BRIEF "," HI "]");
#undef LATER
}

#define CALLS                                                                                      \
    "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"abcdefghi\",\"type\":"     \
    "\"function\",\"function\":{\"name\":\"f\",\"arguments\":{}}}]}"
#define RESULT(text) "{\"role\":\"tool\",\"content\":\"" text "\",\"tool_call_id\":\"abcdefghi\"}"

/* Templates that skip results where they count turns see text behind a result as a second turn. */
Test(oai_tools, text_behind_a_result_is_part_of_it) {
    static const char *const templates[] = {"Mistral-Small-3.2-24B-Instruct-2506",
                                            "mistralai-Ministral-3-14B-Reasoning-2512",
                                            "mistralai-Mistral-Nemo-Instruct-2407"};
#define BEFORE HI "," CALLS "," RESULT("7") ","
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        check_taken(templates[i], BEFORE RESULT("8") "," HI "," HI "," YES "," HI,
                    "[" BEFORE RESULT("8\\n\\nhi\\n\\nhi") "," YES "," HI "]");
        check_taken(templates[i], BEFORE YES "," HI, "[" BEFORE YES "," HI "]");
        check_taken(templates[i], HI "," CALLS "," RESULT("") "," HI,
                    "[" HI "," CALLS "," RESULT("hi") "]");
    }
    check_taken(templates[0], BEFORE BRIEF "," HI, "[" BEFORE BRIEF "," HI "]");
    check_taken(templates[1], BEFORE BRIEF "," HI,
                "[" HI "," CALLS "," RESULT("7\\n\\nBe brief.\\n\\nhi") "]");
    check_taken("Qwen-Qwen2.5-7B-Instruct", BEFORE HI, "[" BEFORE HI "]");
#undef BEFORE
}

/* Returns whether the template takes the chat, which then stays as it is. */
static bool check_untouched(const struct engine *engine, const struct oai_turns *turns,
                            const char *body) {
    cJSON *context = cJSON_Parse(body), *joined = cJSON_Duplicate(context, true);
    const bool taken = takes(engine, context);
    cr_assert(oai_join_turns(cJSON_GetObjectItem(joined, "messages"), turns, false));
    cr_expect(!taken || cJSON_Compare(context, joined, true), "%s", body);
    cJSON_Delete(context);
    cJSON_Delete(joined);
    return taken;
}

/* Chats of every order, up to four parts long. */
Test(oai_tools, a_chat_that_a_template_takes_stays_as_it_is) {
    static const char *const parts[] = {HI, YES, BRIEF, CALLS "," RESULT("7")};
    static const char *const templates[] = {"templates/Mistral-Small-3.2-24B-Instruct-2506",
                                            "templates/mistralai-Ministral-3-14B-Reasoning-2512",
                                            "templates/mistralai-Mistral-Nemo-Instruct-2407",
                                            "no_system"};
    for (size_t t = 0; t < sizeof templates / sizeof *templates; t++) {
        char path[512];
        int taken = 0;
        snprintf(path, sizeof path, HERE "%s.jinja", templates[t]);
        struct engine *engine = open_with_template(path);
        const struct oai_turns turns = oai_find_turns(engine);
        for (int code = 4; code < 4 * 4 * 4 * 4 * 4; code++) { /* a digit for each part */
            struct buf body;
            buf_open(&body, 1 << 16);
            buf_str(&body, "{\"messages\":[");
            for (int rest = code; rest >= 4; rest /= 4)
                buf_fmt(&body, "%s%s", rest == code ? "" : ",", parts[rest % 4]);
            buf_str(&body, "]}");
            taken += check_untouched(engine, &turns, body.data);
            buf_close(&body);
        }
        cr_expect_gt(taken, 0, "%s", path);
        engine_close(engine);
    }
}
#undef CALLS
#undef RESULT
#undef USER_SAYS
#undef BRIEF
#undef YES
#undef F
#undef HI

/* An echo has the client's own text, without what joins it to other messages. */
static void check_echo(const char *messages, const struct oai_rules *rules, const char *expected) {
    struct oai_case c;
    struct buf body;
    case_open(&c);
    c.rules.turns = rules->turns;
    c.rules.tools = rules->tools;
    buf_open(&body, 1 << 16);
    buf_fmt(&body,
            "{\"messages\":[%s],\"echo\":true,\"continue_final_message\":true,\"tools\":"
            "[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]}",
            messages);
    cr_assert_eq(case_parse(&c, &oai_chat, body.data), 0, "%s", c.error.message);
    cr_expect_eq(c.request.echo_size, strlen(expected));
    cr_expect_str_eq(c.request.echo_text, expected);
    buf_close(&body);
    case_close(&c);
}

Test(oai_tools, an_echo_is_the_last_message_alone) {
#define A "{\"role\":\"user\",\"content\":\"a\"}"
#define B "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"b\"}]}"
    struct oai_rules rules = {.turns = {.alternate = true},
                              .tools = {.form = &tool_forms[TOOL_FORMAT_HERMES]}};
    check_echo(A "," B, &rules, "b");
    rules.tools.generic = true;
    check_echo(B, &rules, "b");
#undef A
#undef B
}

/* Parses a chat whose model writes calls in a form, and compiles its constraint. The caller closes
 * both. */
static struct language open_body(struct oai_case *c, const struct tool_form *form,
                                 const char *body) {
    case_open(c);
    c->rules.tools.form = form;
    cr_assert_eq(case_parse(c, &oai_chat, body), 0, "%s", c->error.message);
    cr_assert(c->request.constraint);
    struct language l = language_of(c->request.constraint);
    cr_assert_eq(l.rc, 0, "%s", l.fault.text);
    return l;
}

/* The constraint of strict tools with "auto": texts that the reader of calls takes for calls are
 * not in its language, unless their arguments keep to the schema. */
static void check_free_text(const struct tool_form *format, const char *text, bool allowed) {
    static const char body[] =
        "{" MESSAGES ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f_g\",\"strict\":"
        "true,\"parameters\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},"
        "\"required\":[\"a\"],\"additionalProperties\":false}}}]}";
    struct oai_case c;
    struct language l = open_body(&c, format, body);
    cr_expect_eq(language_holds(&l, text), allowed, "%s: %s", tool_form_name(format), text);
    language_close(&l);
    struct tool_reader reader = {.tools = &c.request.tools};
    struct tool_piece piece;
    bool called = false;
    while ((piece = tool_reader_next(&reader, text, strlen(text), true)).kind != TOOL_MORE)
        called |= piece.kind == TOOL_CALL;
    if (!allowed) cr_expect(called, "%s: %s", tool_form_name(format), text);
    case_close(&c);
}

/* Does the same constraint allow a text, whatever is read in it? */
static void check_unbound(const struct tool_form *form, const char *text, bool allowed) {
    static const char body[] =
        "{" MESSAGES ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f_g\",\"strict\":"
        "true,\"parameters\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}}}}}]"
        "}";
    struct oai_case c;
    struct language l = open_body(&c, form, body);
    cr_expect_eq(language_holds(&l, text), allowed, "%s: %s", form->name, text);
    language_close(&l);
    case_close(&c);
}

Test(oai_tools, free_text_of_strict_tools_holds_no_call) {
    static const char *const mistral[] = {"f_g{\"b\":1}",
                                          " f_g[ARGS]{\"b\":1}",
                                          "f_g[ARGS] {}",
                                          "[TOOL_CALLS]f_g[ARGS]{}",
                                          "So: [TOOL_CALLS]f_g{}",
                                          "So: [TOOL_CALLS]{\"name\": \"f_g\", \"arguments\": {}}",
                                          "So: [{\"name\": \"f_g\", \"arguments\": {}}]",
                                          "[{\"name\": \"f_g\", \"arguments\": {\"b\": 1}}]"};
    static const char *const free_text[] = {
        "", "hello", "f_g is a function", "fxg{1}", "x = f_g{1}", "\\boxed{42}", "a[1] {2}"};
    static const char *const llama[] = {
        "{\"name\": \"f_g\", \"parameters\": {}}", "So: {\"name\": \"f_g\", \"parameters\": {}}",
        "So:\n{\"type\": \"function\", \"parameters\": {\"b\": 1}, \"name\" :\"f_g\"} is it",
        " <|python_tag|> {\"name\": \"f_g\", \"parameters\": {\"b\": 1}}"};
    for (size_t i = 0; i < sizeof mistral / sizeof *mistral; i++)
        check_free_text(&tool_forms[TOOL_FORMAT_MISTRAL], mistral[i], false);
    for (size_t i = 0; i < sizeof llama / sizeof *llama; i++)
        check_free_text(&tool_forms[TOOL_FORMAT_LLAMA3], llama[i], false);
    for (size_t i = 0; i < sizeof free_text / sizeof *free_text; i++) {
        check_free_text(&tool_forms[TOOL_FORMAT_MISTRAL], free_text[i], true);
        check_free_text(&tool_forms[TOOL_FORMAT_LLAMA3], free_text[i], true);
    }
    check_free_text(&tool_forms[TOOL_FORMAT_MISTRAL],
                    "[{\"name\": \"f_g\", \"arguments\": {\"a\": 1}}]", true);
    static const char *const hermes[] = {
        "{\"name\": \"f_g\", \"arguments\": {}}",
        "So:\n```json\n{\"name\" : \"f_g\", \"arguments\": {\"b\": 1}}\n```",
        "<tool_call>\n{\"name\": \"f_g\", \"arguments\": {}}\n</tool_call>"};
    for (size_t i = 0; i < sizeof hermes / sizeof *hermes; i++)
        check_free_text(&tool_forms[TOOL_FORMAT_HERMES], hermes[i], false);
    check_free_text(&tool_forms[TOOL_FORMAT_HERMES], "```json\n{\"name\": \"Ada\"}\n```", true);
    check_free_text(&tool_forms[TOOL_FORMAT_HERMES],
                    "So: <tool_call>\n{\"name\": \"f_g\", \"arguments\": {\"a\": 1}}\n</tool_call>",
                    true);
    static const char *const coder[] = {
        "<function=f_g>\n</function>",
        "So: "
        "<tool_call>\n<function=f_g>\n<parameter=b>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f_g>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"};
    for (size_t i = 0; i < sizeof coder / sizeof *coder; i++)
        check_free_text(&tool_forms[TOOL_FORMAT_QWEN3_CODER], coder[i], false);
    check_free_text(&tool_forms[TOOL_FORMAT_QWEN3_CODER], "a < b, {1}", true);
    check_free_text(&tool_forms[TOOL_FORMAT_QWEN3_CODER],
                    "So: <tool_call>\n<function=f_g>\n<parameter=a>\n1\n</parameter>\n</function>\n"
                    "</tool_call>\n",
                    true);
}

struct tags_case {
    const char *tags, *arguments; /* NULL: not allowed */
};

/* Checks which parameters of a promised call of `f` the body's constraint allows, and the arguments
 * that the reader makes of them. */
static void check_promised_tags(enum tool_format format, const char *body,
                                const struct tags_case *cases, size_t count) {
    const struct tool_form *form = &tool_forms[format];
    struct oai_case c;
    struct language l = open_body(&c, form, body);
    for (size_t i = 0; i < count; i++) {
        char text[512];
        struct buf out;
        buf_open(&out, 4096);
        snprintf(text, sizeof text, "%s%sf%s%s%s%s", form->open, form->before, form->arguments,
                 cases[i].tags, form->after, form->close);
        cr_expect_eq(language_holds(&l, text), cases[i].arguments != NULL, "%s", text);
        read_calls(&c.request.tools, text, &out);
        if (cases[i].arguments && *cases[i].tags)
            cr_expect_str_eq(out.data + 1, cases[i].arguments, "%s", text);
        buf_close(&out);
    }
    language_close(&l);
    case_close(&c);
}

/* Promised calls in tags keep to the schema, and the reader gives arguments as they were meant. */
Test(oai_tools, promised_tags_keep_to_the_schema) {
    static const char body[] =
        "{" MESSAGES ",\"tool_choice\":\"required\",\"parallel_tool_calls\":false,\"tools\":[{"
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\","
        "\"properties\":{\"s\":{\"type\":\"string\",\"minLength\":2},\"n\":{\"$ref\":\"#/$defs/"
        "n\"},"
        "\"o\":{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"null\"}]},\"e\":{\"enum\":[\"a b\","
        "\"2\",1]},\"v\":{\"$ref\":\"#/$defs/"
        "v\"},\"w\":{\"oneOf\":[{\"const\":\"null\"},{\"allOf\":[{"
        "\"$ref\":\"#/$defs/v\"}]}]},\"c\":{\"$ref\":\"#/$defs/"
        "c\"},\"l\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}},\"a\":{}},\"required\":["
        "\"s\"]"
        ","
        "\"$defs\":{\"n\":{\"type\":\"integer\",\"maximum\":5},\"v\":{\"type\":[\"string\"],"
        "\"enum\":[\"1\","
        "\"2\"]},\"c\":{\"anyOf\":[{\"$ref\":\"#/$defs/c\"},{\"type\":\"string\"}]}}}}}]}";
    static const struct tags_case cases[] = {
        {"<parameter=s>\nab\n</parameter>\n", "{\"s\": \"ab\"}"},
        {"<parameter=s>\n12\n</parameter>\n", "{\"s\": \"12\"}"},
        {"<parameter=s>\n{\n\n</parameter>\n", "{\"s\": \"{\\n\"}"},
        {"<parameter=s>\na\n</parameter>\n", NULL},
        {"<parameter=s>\nab</parameter>\n", NULL},
        {"<parameter=s>\nab</parameter>\n\n</parameter>\n", NULL},
        {"", NULL},
        {"<parameter=n>\n5\n</parameter>\n", NULL},
        {"<parameter=s>\nab\n</parameter>\n<parameter=n>\n5\n</parameter>\n",
         "{\"s\": \"ab\", \"n\": 5}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=n>\n6\n</parameter>\n", NULL},
        {"<parameter=s>\nab\n</parameter>\n<parameter=n>\n\"5\"\n</parameter>\n", NULL},
        {"<parameter=s>\nab\n</parameter>\n<parameter=o>\nnull\n</parameter>\n",
         "{\"s\": \"ab\", \"o\": null}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=o>\nsome words\n</parameter>\n",
         "{\"s\": \"ab\", \"o\": \"some words\"}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=o>\n3\n</parameter>\n",
         "{\"s\": \"ab\", \"o\": \"3\"}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=o>\n True\n</parameter>\n",
         "{\"s\": \"ab\", \"o\": \" True\"}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=o>\n [x\n</parameter>\n",
         "{\"s\": \"ab\", \"o\": \" [x\"}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=o>\n None\n</parameter>\n", NULL},
        {"<parameter=s>\nab\n</parameter>\n<parameter=a>\n(x\n</parameter>\n", NULL},
        {"<parameter=s>\nab\n</parameter>\n<parameter=a>\n'x'\n</parameter>\n", NULL},
        {"<parameter=s>\nab\n</parameter>\n<parameter=a>\nx 'y'\n</parameter>\n",
         "{\"s\": \"ab\", \"a\": \"x 'y'\"}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=e>\na b\n</parameter>\n",
         "{\"s\": \"ab\", \"e\": \"a b\"}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=e>\n1\n</parameter>\n",
         "{\"s\": \"ab\", \"e\": 1}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=e>\n2\n</parameter>\n", NULL},
        {"<parameter=s>\nab\n</parameter>\n<parameter=v>\n2\n</parameter>\n",
         "{\"s\": \"ab\", \"v\": \"2\"}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=v>\n3\n</parameter>\n", NULL},
        {"<parameter=s>\nab\n</parameter>\n<parameter=w>\nnull\n</parameter>\n",
         "{\"s\": \"ab\", \"w\": \"null\"}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=l>\n[\"a\", \"\"]\n</parameter>\n",
         "{\"s\": \"ab\", \"l\": [\"a\", \"\"]}"},
        {"<parameter=s>\nab\n</parameter>\n<parameter=x>\n1\n</parameter>\n", NULL},
    };
    check_promised_tags(TOOL_FORMAT_QWEN3_CODER, body, cases, sizeof cases / sizeof *cases);
}

/* Promised calls in other notations keep to the schema, and their arguments are read as JSON. */
Test(oai_tools, promised_literals_keep_to_the_schema) {
#define Q "<|\"|>"
    static const char body[] =
        "{" MESSAGES ",\"tool_choice\":\"required\",\"tools\":[{\"type\":\"function\",\"function\":"
        "{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{\"s\":{\"type\":"
        "\"string\",\"minLength\":2},\"n\":{\"type\":[\"integer\",\"null\"],\"maximum\":5},\"e\":"
        "{\"enum\":[\"a b\",2,true]},\"o\":{\"type\":\"object\",\"properties\":{\"x y\":{\"type\":"
        "\"boolean\"},\"l\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}}}},\"a\":{}},"
        "\"required\":[\"s\"]}}},{\"type\":\"function\",\"function\":{\"name\":\"g\"}}]}";
    static const struct {
        enum tool_format format;
        const char *call, *arguments; /* NULL: not allowed */
    } cases[] = {
        {TOOL_FORMAT_LFM2, "f(s=\"ab\")", "{\"s\": \"ab\"}"},
        {TOOL_FORMAT_LFM2, "f(s=\"a\\\"\\n\", n=5)", "{\"s\": \"a\\\"\\u000a\", \"n\": 5}"},
        {TOOL_FORMAT_LFM2, "f(s=\"ab\", n=None)", "{\"s\": \"ab\", \"n\": null}"},
        {TOOL_FORMAT_LFM2, "f(s=\"ab\", e=True)", "{\"s\": \"ab\", \"e\": true}"},
        {TOOL_FORMAT_LFM2, "f(s=\"ab\", e=\"a b\", o={\"x y\": False, \"l\": [\"\", \"]\"]})",
         "{\"s\": \"ab\", \"e\": \"a b\", \"o\": {\"x y\": false, \"l\": [\"\", \"]\"]}}"},
        {TOOL_FORMAT_LFM2, "f(s=\"ab\", a={\"b\": [None, 1.5]})",
         "{\"s\": \"ab\", \"a\": {\"b\": [null, 1.5]}}"},
        {TOOL_FORMAT_LFM2, "f(s=\"a\")", NULL},
        {TOOL_FORMAT_LFM2, "f(s='ab')", NULL},
        {TOOL_FORMAT_LFM2, "f(s=\"a\\/\")", NULL},
        {TOOL_FORMAT_LFM2, "f(s=\"ab\", n=6)", NULL},
        {TOOL_FORMAT_LFM2, "f(s=\"ab\", n=null)", NULL},
        {TOOL_FORMAT_LFM2, "f(s=\"ab\", x=1)", NULL},
        {TOOL_FORMAT_LFM2, "f()", NULL},
        {TOOL_FORMAT_GEMMA4, "f{s:" Q "ab" Q "}", "{\"s\": \"ab\"}"},
        {TOOL_FORMAT_GEMMA4, "f{s:" Q "a\"\n" Q ",n:5}", "{\"s\": \"a\\\"\\u000a\",\"n\": 5}"},
        {TOOL_FORMAT_GEMMA4, "f{s:" Q "ab" Q ",n:null,e:true}",
         "{\"s\": \"ab\",\"n\": null,\"e\": true}"},
        {TOOL_FORMAT_GEMMA4,
         "f{s:" Q "ab" Q ",e:" Q "a b" Q ",o:{" Q "x y" Q ":false,l:[" Q Q "," Q "}" Q "]}}",
         "{\"s\": \"ab\",\"e\": \"a b\",\"o\": {\"x y\":false,\"l\": [\"\",\"}\"]}}"},
        {TOOL_FORMAT_GEMMA4, "f{s:" Q "ab" Q ",a:{b:[null,1.5]}}",
         "{\"s\": \"ab\",\"a\": {\"b\": [null,1.5]}}"},
        {TOOL_FORMAT_GEMMA4, "f{s:" Q "a" Q "}", NULL},
        {TOOL_FORMAT_GEMMA4, "f{s:" Q "ab" Q Q "}", NULL},
        {TOOL_FORMAT_GEMMA4, "f{s:" Q "ab" Q ", n:5}", NULL},
        {TOOL_FORMAT_GEMMA4, "f{s:" Q "ab" Q ",n:6}", NULL},
        {TOOL_FORMAT_GEMMA4, "f{s:\"ab\"}", NULL},
        {TOOL_FORMAT_GEMMA4, "g{}", "{}"},
        {TOOL_FORMAT_LFM2, "g()", "{}"},
        {TOOL_FORMAT_LFM2, "g(a=1)", NULL},
    };
#undef Q
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct tool_form *form = &tool_forms[cases[i].format];
        char text[512];
        struct oai_case c;
        struct buf out;
        snprintf(text, sizeof text, "%s%s%s%s%s", form->open, form->before, cases[i].call,
                 form->after, form->close);
        buf_open(&out, 4096);
        struct language l = open_body(&c, form, body);
        cr_expect_eq(language_holds(&l, text), cases[i].arguments != NULL, "%s", text);
        read_calls(&c.request.tools, text, &out);
        if (cases[i].arguments) cr_expect_str_eq(out.data + 1, cases[i].arguments, "%s", text);
        language_close(&l);
        case_close(&c);
        buf_close(&out);
    }
}

/* Promised values in tags that nest keep to the schema, and are read as what they are. */
Test(oai_tools, promised_tags_nest) {
#define NS              "]<]minimax[>["
#define IN(name, value) NS "<" name ">" value NS "</" name ">"
    static const char body[] =
        "{" MESSAGES ",\"tool_choice\":\"required\",\"tools\":[{\"type\":\"function\",\"function\":"
        "{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{\"o\":{\"type\":"
        "\"object\",\"properties\":{\"s\":{\"type\":\"string\"},\"n\":{\"type\":\"integer\"}},"
        "\"required\":[\"s\"]},\"l\":{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"b\"]},"
        "\"maxItems\":2},\"a\":{},\"d\":{\"type\":\"object\",\"additionalProperties\":{\"type\":"
        "\"string\"}},\"i\":{\"type\":\"object\",\"properties\":{\"item\":{\"type\":\"string\"}}},"
        "\"q\":{\"type\":\"array\",\"items\":{\"enum\":[\"1\",\"b\"]}},"
        "\"u\":{\"type\":\"array\",\"items\":{\"type\":\"boolean\"},\"uniqueItems\":true},"
        "\"w\":{\"items\":{\"type\":\"boolean\"},\"uniqueItems\":true}}}}}]}";
    static const struct tags_case cases[] = {
        {"", "{}"},
        {IN("o", IN("s", "x y") IN("n", "3")), "{\"o\": {\"s\": \"x y\", \"n\": 3}}"},
        {IN("l", IN("item", "a") IN("item", "b")), "{\"l\": [\"a\", \"b\"]}"},
        {IN("a", IN("item", IN("item", "1"))), "{\"a\": [[1]]}"},
        {IN("a", "{\"x\": {\"y\": \"" IN("a", "1") "\"}}"),
         "{\"a\": {\"x\": {\"y\": \"" IN("a", "1") "\"}}}"},
        {IN("a", IN("item", "[]") IN("item", "{}")), "{\"a\": [[], {}]}"},
        {IN("l", "[]"), "{\"l\": []}"},
        {IN("d", "{\"k\": \"v\"}"), "{\"d\": {\"k\": \"v\"}}"},
        {IN("i", "{\"item\": \"v\"}"), "{\"i\": {\"item\": \"v\"}}"},
        {IN("q", IN("item", "\"1\"") IN("item", "b")), "{\"q\": [\"1\", \"b\"]}"},
        {IN("u", "[true, false]"), "{\"u\": [true, false]}"},
        {IN("u", "[true, true]"), NULL},
        {IN("w", "[true, false]"), "{\"w\": [true, false]}"},
        {IN("w", "{\"k\": 1}"), "{\"w\": {\"k\": 1}}"},
        {IN("o", "{}"), NULL},
        {IN("o", "{\"s\": \"x\"}"), NULL},
        {IN("d", "{\"k\": 1}"), NULL},
        {IN("i", IN("item", "v")), NULL},
        {IN("q", IN("item", "1")), NULL},
        {IN("a", "word"), "{\"a\": \"word\"}"},
        {IN("o", IN("n", "3")), NULL},
        {IN("o", IN("s", "12")), NULL},
        {IN("o", IN("s", "x") IN("m", "y")), NULL},
        {IN("o", ""), NULL},
        {IN("l", IN("item", "c")), NULL},
        {IN("l", IN("item", "a") IN("item", "a") IN("item", "a")), NULL},
    };
    check_promised_tags(TOOL_FORMAT_MINIMAX_M3, body, cases, sizeof cases / sizeof *cases);
#undef NS
#undef IN
}

Test(oai_tools, promised_tags_refuse_a_name_that_makes_them_an_end) {
    static const char body[] =
        "{" MESSAGES ",\"tool_choice\":\"required\",\"tools\":[{\"type\":\"function\",\"function\":"
        "{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{\"/s\":{\"type\":"
        "\"string\"}}}}}]}";
    struct oai_case c;
    case_open(&c);
    c.rules.tools.form = &tool_forms[TOOL_FORMAT_MINIMAX_M3];
    cr_assert_eq(case_parse(&c, &oai_chat, body), 0, "%s", c.error.message);
    struct language l = language_of(c.request.constraint);
    cr_expect_eq(l.rc, ERR_UNSUPPORTED);
    cr_expect(strstr(l.fault.text, "'/s'"), "%s", l.fault.text);
    language_close(&l);
    case_close(&c);
}

/* Promised calls have no members that the tool does not declare. */
Test(oai_tools, promised_arguments_have_no_undeclared_members) {
    static const struct {
        const char *parameters, *arguments;
        bool allowed;
    } cases[] = {
        {"{\"type\":\"object\",\"properties\":{}}", "{}", true},
        {"{\"type\":\"object\",\"properties\":{}}", "{\"x\": 1}", false},
        {"{\"type\":\"object\"}", "{}", true},
        {"{\"type\":\"object\"}", "{\"x\": 1}", false},
        {"{}", "{\"x\": 1}", false},
        {"{\"type\":\"object\",\"additionalProperties\":true}", "{\"x\": 1}", true},
        {"{\"type\":\"object\",\"properties\":{\"a\":{}}}", "{\"a\": 1}", true},
        {"{\"type\":\"object\",\"properties\":{\"a\":{}}}", "{\"a\": 1, \"x\": 1}", false},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"object\"}}}",
         "{\"a\": {\"x\": 1}}", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[512], text[512];
        struct oai_case c;
        snprintf(body, sizeof body,
                 "{" MESSAGES ",\"tool_choice\":\"required\",\"tools\":[{\"type\":\"function\","
                 "\"function\":{\"name\":\"f\",\"parameters\":%s}}]}",
                 cases[i].parameters);
        snprintf(text, sizeof text,
                 "<tool_call>\n{\"name\": \"f\", \"arguments\": %s}\n</tool_call>",
                 cases[i].arguments);
        struct language l = open_body(&c, &tool_forms[TOOL_FORMAT_HERMES], body);
        cr_expect_eq(language_holds(&l, text), cases[i].allowed, "%s: %s", cases[i].parameters,
                     cases[i].arguments);
        language_close(&l);
        case_close(&c);
    }
}

/* Every template that shows calls renders a call with any arguments. */
Test(oai_tools, every_template_renders_any_arguments) {
    static const char *const templates[] = {"GLM-4.6",
                                            "HuggingFaceTB-SmolLM3-3B",
                                            "Qwen-QwQ-32B",
                                            "Qwen-Qwen2.5-7B-Instruct",
                                            "Qwen-Qwen3-0.6B",
                                            "Qwen3-Coder",
                                            "ibm-granite-granite-3.3-2B-Instruct",
                                            "mistralai-Mistral-Nemo-Instruct-2407"};
    static const char *const arguments[] = {"{\"a\":1}",
                                            "null",
                                            "\"null\"",
                                            "\"\"",
                                            "\"{\\\"city\\\": \\\"Par\"",
                                            "\"{\\\"city\\\": [1,\"",
                                            "\"no json\"",
                                            "\"[1]\"",
                                            "\"{\\\"a\\\": 1, \\\"a\\\": 2}\""};
    struct buf body, out;
    buf_open(&body, 1 << 20);
    buf_open(&out, 1 << 20);
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        struct chat *chat = open_template(templates[i]);
        for (size_t k = 0; k < sizeof arguments / sizeof *arguments; k++) {
            buf_clear(&body);
            buf_fmt(
                &body,
                "{\"messages\":[" USER ",{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{"
                "\"id\":\"123456789\",\"type\":\"function\",\"function\":{\"name\":\"get_weather\","
                "\"arguments\":%s}}]},{\"role\":\"tool\",\"tool_call_id\":\"123456789\","
                "\"content\":"
                "\"cold\"}]" TOOLS "}",
                arguments[k]);
            render(chat, body.data, &out);
            cr_expect(out.size > 0, "%s", templates[i]);
        }
        chat_close(chat);
    }
    buf_close(&body);
    buf_close(&out);
}

/* --- every form --- */

/* Calls are bound as they are read; with "auto" beside text, with "required" alone. */
Test(oai_tools, every_form_binds_what_it_reads) {
    for (int i = 0; i < TOOL_FORMATS; i++) {
        if (tool_forms[i].shape == TOOL_SHAPE_CHANNELS) continue;
        check_form(&tool_forms[i], "", false);
        check_form(&tool_forms[i], ",\"tool_choice\":\"required\"", true);
    }
}

/* A mark in free text would be read as a call, and every character of a mark stands for itself. */
Test(oai_tools, free_text_holds_no_mark_of_its_form) {
    for (int i = 0; i < TOOL_FORMATS; i++) {
        struct tool_mark marks[TOOL_MARKS_MAX];
        if (tool_forms[i].shape != TOOL_SHAPE_NAMED) continue;
        int count = tool_form_opens(&tool_forms[i], marks), strong = 0;
        for (int k = 0; k < count; k++) {
            if (!tool_mark_is_strong(&marks[k])) continue; /* a weak mark begins no call */
            strong++;
            char text[128];
            snprintf(text, sizeof text, "So: %.*sf_g", (int)marks[k].size, marks[k].text);
            struct buf found;
            buf_open(&found, 4096);
            buf_str(&found, text);
            check_unbound(&tool_forms[i], found.data, false);
            found.data[5] ^= 1; /* another character */
            check_unbound(&tool_forms[i], found.data, true);
            buf_close(&found);
        }
        cr_expect(strong > 0, "%s", tool_forms[i].name);
    }
}

/* A call that is sent back in the history is written by the published template as the form says,
 * so that the next turn continues the cache. */
Test(oai_tools, templates_write_calls_as_their_form_says) {
    static const struct {
        const char *template;
        enum tool_format format;
    } cases[] = {
        {"Qwen-Qwen3-0.6B", TOOL_FORMAT_HERMES},      {"Qwen3-Coder", TOOL_FORMAT_QWEN3_CODER},
        {"ByteDance-Seed-OSS", TOOL_FORMAT_SEED_OSS}, {"GLM-4.6", TOOL_FORMAT_GLM45},
        {"GLM-4.7-Flash", TOOL_FORMAT_GLM47},         {"MiniMax-M2", TOOL_FORMAT_MINIMAX_M2}};
    static const char body[] =
        "{\"messages\":[" USER ",{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":"
        "\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"s\\\": "
        "\\\"<b>\\\\n\\\"}\"}},{\"id\":\"2\",\"type\":\"function\",\"function\":{\"name\":\"f\","
        "\"arguments\":{\"s\":\"de\"}}}]},{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":"
        "\"cold\"},{\"role\":\"tool\",\"tool_call_id\":\"2\",\"content\":\"warm\"}],\"tools\":[{"
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"\",\"parameters\":{"
        "\"type\":\"object\",\"properties\":{\"s\":{\"type\":\"string\"}},\"required\":[\"s\"]}}}]"
        "}";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct tool_form *form = &tool_forms[cases[i].format];
        struct chat *chat = open_template(cases[i].template);
        struct buf text, out;
        buf_open(&text, 1 << 20);
        buf_open(&out, 1 << 20);
        buf_str(&text, form->open);
        write_call(form, form->tags ? "<b>\n" : "<b>\\n", &text);
        buf_str(&text, form->between);
        write_call(form, "de", &text);
        buf_str(&text, form->close);
        render(chat, body, &out);
        cr_expect(strstr(out.data, text.data), "%s: %s\nin %s", cases[i].template, text.data,
                  out.data);
        char *source = read_file(HERE "templates/", cases[i].template, ".jinja");
        cr_expect_eq(tool_form_of(source), form, "%s", cases[i].template);
        free(source);
        buf_close(&text);
        buf_close(&out);
        chat_close(chat);
    }
}

/* --- forms that are found by rendering --- */

/* Templates of families whose calls no code knows: what is read from their rendering is bound, and
 * read again, with the texts of the template. Those that a row knows are found, too. */
Test(oai_tools, forms_are_found_in_what_templates_render) {
    static const struct {
        const char *template, *open, *before, *close;
        bool tags;
    } cases[] = {
        {"Apertus-8B-Instruct", "<|tools_prefix|>[", "{\"", "]<|tools_suffix|>", false},
        {"MiniMax-M1", "<tool_calls>", "\n{\"name\": \"", "\n</tool_calls>", false},
        {"GigaChat3.1-10B-A1.8B", "", "<|function_call|>{\"name\": \"", "", false},
        {"openbmb-MiniCPM5-1B", "", "<function name=\"", "", true},
        {"deepseek-ai-DeepSeek-V3.1", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁calls▁end｜>", false},
        {"deepseek-ai-DeepSeek-V4", "\n\n<｜DSML｜tool_calls>", "\n<｜DSML｜invoke name=\"",
         "\n</｜DSML｜tool_calls>", true},
        {"Mistral-Small-3.2-24B-Instruct-2506", "", "[TOOL_CALLS]", "", false},
        {"mistralai-Ministral-3-14B-Reasoning-2512", "", "[TOOL_CALLS]", "", false},
        {"meetkai-functionary-medium-v3.1", "", "<function=", "", false},
        {"Qwen-Qwen3-0.6B", "", "<tool_call>\n{\"name\": \"", "", false},
        {"Qwen3-Coder", "", "<tool_call>\n<function=", "", true},
        {"ByteDance-Seed-OSS", "", "<seed:tool_call>\n<function=", "", true},
        {"GLM-4.6", "", "<tool_call>", "", true},
        {"GLM-4.7-Flash", "", "<tool_call>", "", true},
        {"MiniMax-M2", "\n<minimax:tool_call>", "\n<invoke name=\"", "\n</minimax:tool_call>",
         true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct rendering r = {.chat = open_template(cases[i].template)};
        struct tool_derived *derived = calloc(1, sizeof *derived);
        arena_open(&r.arena, (size_t)16 << 20);
        bool found = tool_derive(render_probe, &r, derived);
        cr_expect(found, "%s", cases[i].template);
        if (found) {
            const struct tool_form *form = &derived->form;
            cr_expect_str_eq(form->open, cases[i].open, "%s", cases[i].template);
            cr_expect_str_eq(form->before, cases[i].before, "%s", cases[i].template);
            cr_expect_str_eq(form->close, cases[i].close, "%s", cases[i].template);
            cr_expect_eq(form->tags != NULL, cases[i].tags, "%s", cases[i].template);
            check_form(form, "", false);
            check_form(form, ",\"tool_choice\":\"required\"", true);
        }
        arena_close(&r.arena);
        chat_close(r.chat);
        free(derived);
    }
}

/* Where the template shows no calls, they are written into the text, as the form is read. */
static void check_hidden_calls(const struct tool_form *form, const char *expected) {
    static const char body[] =
        "{\"messages\":[" USER
        ",{\"role\":\"assistant\",\"content\":\"So.\",\"tool_calls\":[{\"id\":"
        "\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"s\\\": "
        "\\\"a'\\\\\\\"\\\\n\\\", \\\"l\\\": [true, null, 1.5, {\\\"x y\\\": {}}]}\"}},"
        "{\"id\":\"2\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]}"
        "]" TOOLS "}";
    struct oai_case c;
    case_open(&c);
    c.rules.tools = (struct oai_tool_style){.form = form, .hides_calls = true};
    cr_assert(oai_can_write_calls(form));
    cr_assert_eq(case_parse(&c, &oai_chat, body), 0, "%s", c.error.message);
    const cJSON *messages = cJSON_GetObjectItem(c.request.context, "messages");
    const cJSON *message = cJSON_GetArrayItem(messages, 1);
    cr_expect_null(cJSON_GetObjectItem(message, "tool_calls"));
    const char *text = cJSON_GetObjectItem(message, "content")->valuestring;
    cr_expect_str_eq(text, expected);
    static const char *const names[] = {"f"};
    const struct tool_set tools = {form, names, 1, true, NULL};
    struct buf out;
    buf_open(&out, 4096);
    read_calls(&tools, text, &out);
    cJSON *read = cJSON_Parse(strchr(out.data, '{'));
    cJSON *wanted = cJSON_Parse("{\"s\":\"a'\\\"\\n\",\"l\":[true,null,1.5,{\"x y\":{}}]}");
    cr_expect(cJSON_Compare(read, wanted, true), "%s", out.data);
    cJSON_Delete(read);
    cJSON_Delete(wanted);
    buf_close(&out);
    case_close(&c);
}

Test(oai_tools, calls_that_a_template_hides_are_written_into_the_text) {
    check_hidden_calls(
        &tool_forms[TOOL_FORMAT_LFM2],
        "So.<|tool_call_start|>[f(s=\"a'\\\"\\n\", l=[True, None, 1.5, {\"x y\": {}}]), f()]"
        "<|tool_call_end|>");
    check_hidden_calls(
        &tool_forms[TOOL_FORMAT_GEMMA4],
        "So.<|tool_call>call:f{s:<|\"|>a'\"\n<|\"|>,l:[true,null,1.5,{x y:{}}]}<tool_call|>"
        "<|tool_call>call:f{}<tool_call|>");
    check_hidden_calls(
        &tool_forms[TOOL_FORMAT_GRANITE],
        "So.<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\":\"a'\\\"\\n\",\"l\":"
        "[true,null,1.5,{\"x y\":{}}]}}, {\"name\": \"f\", \"arguments\": {}}]");
}

Test(oai_tools, templates_that_hide_calls_are_found) {
    static const struct {
        const char *template;
        bool hides;
    } cases[] = {
        {"HuggingFaceTB-SmolLM3-3B", true}, {"ibm-granite-granite-3.3-2B-Instruct", true},
        {"Qwen-Qwen3-0.6B", false},         {"GLM-4.6", false},
        {"google-gemma-4-31B-it", false},   {"mistralai-Mistral-Nemo-Instruct-2407", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct rendering r = {.chat = open_template(cases[i].template)};
        arena_open(&r.arena, (size_t)16 << 20);
        cr_expect_eq(tool_hides_calls(render_probe, &r), cases[i].hides, "%s", cases[i].template);
        arena_close(&r.arena);
        chat_close(r.chat);
    }
}

/* Reasoning that a template writes in front of calls only is no part of them. */
Test(oai_tools, forms_that_are_found_hold_no_reasoning) {
    static const char source[] =
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}<think>\n</think>\n"
        "{% for c in m.tool_calls %}<call>{{ c.function.name }}<args>{{ c.function.arguments | "
        "tojson }}</call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}";
    struct rendering r;
    struct fault fault;
    struct tool_derived *derived = calloc(1, sizeof *derived);
    cr_assert_eq(chat_open(source, sizeof source - 1, &r.chat, &fault), 0, "%s", fault.text);
    arena_open(&r.arena, (size_t)16 << 20);
    cr_assert(tool_derive(render_probe, &r, derived));
    cr_expect_str_eq(derived->form.open, "");
    cr_expect_str_eq(derived->form.before, "<call>");
    cr_expect_str_eq(derived->form.arguments, "<args>");
    cr_expect_str_eq(derived->form.after, "</call>");
    arena_close(&r.arena);
    chat_close(r.chat);
    free(derived);
}

#define TURNS(calls)                                                                               \
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}" calls                           \
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
#define EACH(call)     "{% for c in m.tool_calls %}" call "{% endfor %}"
#define ARGUMENTS_JSON "{{ c.function.arguments | tojson }}"
#define ARGUMENTS_TAGS                                                                             \
    "{% for k, v in c.function.arguments.items() %}<p={{ k }}>{{ v }}</p>{% endfor %}"

static bool derive_from(const char *source, struct tool_derived *derived) {
    struct rendering r;
    struct fault fault;
    cr_assert_eq(chat_open(source, strlen(source), &r.chat, &fault), 0, "%s", fault.text);
    arena_open(&r.arena, (size_t)16 << 20);
    bool found = tool_derive(render_probe, &r, derived);
    arena_close(&r.arena);
    chat_close(r.chat);
    return found;
}

/* A form is found only if the reader finds with it the calls that the template was given. */
Test(oai_tools, forms_that_are_not_read_are_none) {
    static const char *const sources[] = {
        /* tags for one call, JSON for two, and the other way round */
        TURNS(EACH("<xy>{{ c.function.name }}>{% if m.tool_calls | length > 1 %}" ARGUMENTS_JSON
                   "{% else %}" ARGUMENTS_TAGS "{% endif %}<z>")),
        TURNS(EACH("<xy>{{ c.function.name }}>{% if m.tool_calls | length < 2 %}" ARGUMENTS_JSON
                   "{% else %}" ARGUMENTS_TAGS "{% endif %}<z>")),
        /* members of other names */
        TURNS(EACH("<c>{\"name\": \"{{ c.function.name }}\", \"args\": " ARGUMENTS_JSON "}</c>")),
        TURNS(EACH("<c>{\"function_name\": \"{{ c.function.name }}\", \"arguments\": " //
                   ARGUMENTS_JSON "}</c>")),
        /* nothing between name and arguments */
        TURNS(EACH("[TOOL_CALLS]{{ c.function.name }}" ARGUMENTS_JSON)),
        /* more marks than a form has */
        TURNS("<a><b><c><d><e><f><g><h><i>" EACH("<j>{{ c.function.name }}<k>" ARGUMENTS_JSON
                                                 "</j>") "</a>"),
        /* blanks around values that the reader would leave in them */
        TURNS(EACH("<c>{{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
                   "<p={{ k }}> {{ v }} </p>{% endfor %}</c>")),
        TURNS(EACH("<c>{{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
                   "<p={{ k }}>\n\n{{ v }}\n\n</p>{% endfor %}</c>")),
        /* more text in front of one call than of two */
        TURNS("{% if m.tool_calls | length == 1 %}<aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
              "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa>"
              "{% endif %}" EACH("<c>{{ c.function.name }}<args>" ARGUMENTS_JSON "</c>")),
        /* a mark that is an id and nothing else */
        TURNS(EACH("{{ c.id }}\n<c>{{ c.function.name }}<args>" ARGUMENTS_JSON "</c>")),
        /* no mark behind the arguments */
        TURNS(EACH("<c>{{ c.function.name }}\n" ARGUMENTS_TAGS "\n")),
    };
    struct tool_derived *derived = calloc(1, sizeof *derived);
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++)
        cr_expect_not(derive_from(sources[i], derived), "%s", sources[i]);
    free(derived);
}

/* An id may stand behind the arguments. */
Test(oai_tools, ids_behind_arguments_are_any) {
    static const char *const sources[] = {
        TURNS("<tool_calls>[{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", "
              "\"arguments\": " ARGUMENTS_JSON ", \"id\": \"{{ c.id }}\"}{% if not loop.last %}, "
              "{% endif %}{% endfor %}]</tool_calls>"),
        TURNS(EACH("<c>{\"name\": \"{{ c.function.name }}\", \"arguments\": " ARGUMENTS_JSON
                   ", \"id\": \"{{ c.id }}\"}</c>"))};
    struct tool_derived *derived = calloc(1, sizeof *derived);
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        cr_assert(derive_from(sources[i], derived), "%s", sources[i]);
        check_form(&derived->form, "", false);
        check_form(&derived->form, ",\"tool_choice\":\"required\"", true);
    }
    free(derived);
}

/* Where a template refuses two calls, the end of the turn is no part of the one, either. */
Test(oai_tools, the_end_of_the_turn_is_no_part_of_a_single_call) {
    static const char source[] =
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% if m.tool_calls | length > "
        "1 %}{{ raise_exception('one call') }}{% endif %}" EACH(
            "<call>{{ c.function.name }}<args>" ARGUMENTS_JSON
            "</call>") "<|eom|>{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}";
    struct tool_derived *derived = calloc(1, sizeof *derived);
    cr_assert(derive_from(source, derived));
    cr_expect_str_eq(derived->form.before, "<call>");
    cr_expect_str_eq(derived->form.after, "</call>");
    free(derived);
}

/* Templates that show no calls, or write them in another way, have no form. */
Test(oai_tools, templates_without_calls_have_no_form) {
    static const char *const templates[] = {"HuggingFaceTB-SmolLM3-3B",
                                            "microsoft-Phi-3.5-mini-instruct",
                                            "ibm-granite-granite-3.3-2B-Instruct"};
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        struct rendering r = {.chat = open_template(templates[i])};
        struct tool_derived *derived = calloc(1, sizeof *derived);
        arena_open(&r.arena, (size_t)16 << 20);
        cr_expect_not(tool_derive(render_probe, &r, derived), "%s", templates[i]);
        arena_close(&r.arena);
        chat_close(r.chat);
        free(derived);
    }
}
