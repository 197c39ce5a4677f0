/* Tests the messages that the chat template receives. */
#include <criterion/criterion.h>

#include "oai_case.h"

static void check_context(const char *body, const char *expected) {
    struct oai_case c;
    struct buf text;
    case_open(&c);
    cr_assert_eq(case_parse(&c, &oai_chat, body), 0, "%s: %s", body, c.error.message);
    buf_open(&text, 1 << 16);
    json_write_node(&text, c.request.context);
    cr_assert_str_eq(text.data, expected);
    buf_close(&text);
    case_close(&c);
}

static void check_refused(const char *body, const char *code, const char *param) {
    struct oai_case c;
    case_open(&c);
    cr_assert_eq(case_parse(&c, &oai_chat, body), -1, "%s", body);
    cr_assert(strcmp(c.error.code, code) == 0 && strcmp(c.error.param, param) == 0, "%s: %s", body,
              c.error.message);
    case_close(&c);
}

Test(oai_messages, plain) {
    check_context("{" MESSAGES "}", "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
                                    "\"add_generation_prompt\":true}");
}

Test(oai_messages, parts_are_joined) {
    check_context("{\"messages\":[{\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
                  "{\"type\":\"text\",\"text\":\"b\"}],\"role\":\"developer\",\"name\":\"x\","
                  "\"refusal\":null}],\"add_generation_prompt\":false}",
                  "{\"messages\":[{\"role\":\"system\",\"content\":\"a\\nb\",\"name\":\"x\"}],"
                  "\"add_generation_prompt\":false}");
    check_context("{\"messages\":[{\"role\":\"user\",\"content\":[]}]}",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"\"}],"
                  "\"add_generation_prompt\":true}");
}

Test(oai_messages, arguments_of_tool_calls_become_objects) {
    check_context(
        "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\",\"function\":"
        "{\"name\":\"f\",\"arguments\":\"{\\\"seed\\\":12345678901234567890}\"}},"
        "{\"function\":{\"name\":\"g\",\"arguments\":\"not json\"}},{\"function\":{\"name\":\"h\","
        "\"arguments\":\"[1]\"}},{\"function\":{\"name\":\"i\",\"arguments\":\"\"}},{\"function\":{"
        "\"name\":\"j\"}},"
        "{\"function\":{\"name\":\"k\",\"arguments\":\" "
        "null\"}},{\"function\":{\"name\":\"l\",\"arguments\":null}}]}]}",
        "{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":"
        "\"1\",\"function\":{\"name\":\"f\",\"arguments\":{\"seed\":12345678901234567890}}},"
        "{\"function\":{\"name\":\"g\",\"arguments\":{\"INVALID_JSON\":\"not "
        "json\"}}},{\"function\":{"
        "\"name\":\"h\",\"arguments\":{\"INVALID_JSON\":\"[1]\"}}},{\"function\":{\"name\":\"i\","
        "\"arguments\":{}}},{\"function\":{\"name\":\"j\",\"arguments\":{}}},{\"function\":{"
        "\"name\":\"k\","
        "\"arguments\":{}}},{\"function\":{\"name\":\"l\",\"arguments\":{}}}]}],\"add_"
        "generation_prompt\":true}");
}

/* Arguments that max_tokens cut are those that are whole. */
Test(oai_messages, cut_arguments_become_objects) {
    static const char *const cases[][2] = {
        {"{", "{}"},
        {"{\"city\": \"Par", "{\"city\":\"Par\"}"},
        {"{\"city\": \"", "{\"city\":\"\"}"},
        {"{\"city\": \"a\\", "{\"city\":\"a\"}"},
        {"{\"city\": \"a\\u00e", "{\"city\":\"a\"}"},
        {"{\"city\": \"a\", \"da", "{\"city\":\"a\"}"},
        {"{\"city\": \"a\", ", "{\"city\":\"a\"}"},
        {"{\"a\": [1, {\"b\": tr", "{\"a\":[1,{}]}"},
        {"{\"a\": [1, 25", "{\"a\":[1,25]}"},
        {"{\"a\": [1, -", "{\"a\":[1]}"},
        {"{\"a\": {\"b\":", "{\"a\":{}}"},
        {"{\"a\": 1}}\n", "{\"a\":1}"},
        {"{\"a\": 1, \"a\": 2}", "{\"a\":1,\"a\":2}"},
        {"{'a': 1}", "{\"INVALID_JSON\":\"{'a': 1}\"}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf body, context;
        buf_open(&body, 4096);
        buf_open(&context, 4096);
        buf_str(&body, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{"
                       "\"name\":\"f\",\"arguments\":");
        json_write_str(&body, cases[i][0], strlen(cases[i][0]));
        buf_str(&body, "}}]}]}");
        buf_fmt(
            &context,
            "{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"function\":"
            "{\"name\":\"f\",\"arguments\":%s}}]}],\"add_generation_prompt\":true}",
            cases[i][1]);
        check_context(body.data, context.data);
        buf_close(&body);
        buf_close(&context);
    }
}

#define ALONE(message) "{\"messages\":[{" message "}],\"add_generation_prompt\":true}"

/* keepd itself answers with null content: beside calls, and beside truncated reasoning. */
Test(oai_messages, content_may_be_null_where_something_else_was_said) {
    static const char *const cases[][2] = {
        {"\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"hm\"",
         "\"role\":\"assistant\",\"content\":\"\",\"reasoning_content\":\"hm\",\"thinking\":"
         "\"hm\""},
        {"\"role\":\"assistant\",\"reasoning\":\"hm\"",
         "\"role\":\"assistant\",\"content\":\"\",\"reasoning\":\"hm\",\"reasoning_content\":"
         "\"hm\",\"thinking\":\"hm\""},
        {"\"role\":\"assistant\",\"content\":null,\"thinking\":\"hm\",\"reasoning_content\":null",
         "\"role\":\"assistant\",\"content\":\"\",\"thinking\":\"hm\",\"reasoning_content\":"
         "\"hm\""},
        {"\"role\":\"assistant\",\"content\":null,\"thinking\":[1]",
         "\"role\":\"assistant\",\"content\":\"\",\"thinking\":[1]"},
        {"\"role\":\"assistant\",\"content\":null,\"refusal\":\"no\"",
         "\"role\":\"assistant\",\"content\":\"no\",\"refusal\":\"no\""},
        {"\"role\":\"assistant\",\"content\":null,\"function_call\":{\"name\":\"f\"}",
         "\"role\":\"assistant\",\"content\":\"\",\"function_call\":{\"name\":\"f\"}"},
        {"\"role\":\"assistant\",\"content\":null", "\"role\":\"assistant\",\"content\":\"\""},
        {"\"role\":\"tool\",\"content\":null,\"tool_call_id\":\"1\"",
         "\"role\":\"tool\",\"content\":\"\",\"tool_call_id\":\"1\""},
    };
    static const char *const refused[] = {
        "\"role\":\"assistant\"", "\"role\":\"tool\"", "\"role\":\"user\",\"content\":null",
        "\"role\":\"user\",\"content\":null,\"reasoning_content\":\"hm\""};
    char body[512], expected[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(body, sizeof body, "{\"messages\":[{%s}]}", cases[i][0]);
        snprintf(expected, sizeof expected, ALONE("%s"), cases[i][1]);
        check_context(body, expected);
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        snprintf(body, sizeof body, "{\"messages\":[{%s}]}", refused[i]);
        check_refused(body, "missing_required_parameter", "messages[0].content");
    }
}

Test(oai_messages, a_thought_has_two_names_for_templates) {
    check_context("{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"x\","
                  "\"reasoning_content\":\"y\"}]}",
                  ALONE("\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"x\","
                        "\"reasoning_content\":\"y\",\"thinking\":\"y\""));
}

Test(oai_messages, a_thought_beside_text_and_calls_has_one_name) {
    static const char calls[] = "\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{}}}]";
    char body[512], expected[512];
    for (int i = 0; i < 2; i++) {
        snprintf(body, sizeof body,
                 "{\"messages\":[{\"role\":\"assistant\",\"content\":\"%s\","
                 "\"reasoning_content\":\"hm\",%s}]}",
                 i ? "Look:" : "", calls);
        snprintf(expected, sizeof expected,
                 ALONE("\"role\":\"assistant\",\"content\":\"%s\","
                       "\"reasoning_content\":\"hm\",%s%s"),
                 i ? "Look:" : "", calls, i ? "" : ",\"thinking\":\"hm\"");
        check_context(body, expected);
    }
}

Test(oai_messages, nuls_stay) {
    check_context("{\"messages\":[{\"role\":\"tool\",\"content\":\"a\\u0000b\"},{\"role\":\"user\","
                  "\"content\":[{\"type\":\"text\",\"text\":\"\\u0000\"}],\"n\\u0000\":1}]}",
                  "{\"messages\":[{\"role\":\"tool\",\"content\":\"a\\u0000b\"},{\"role\":\"user\","
                  "\"content\":\"\\u0000\",\"n\\u0000\":1}],\"add_generation_prompt\":true}");
}

Test(oai_messages, tools_and_kwargs) {
    check_context("{" MESSAGES ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],"
                  "\"tool_choice\":\"none\","
                  "\"reasoning_effort\":\"low\","
                  "\"chat_template_kwargs\":{\"enable_thinking\":false}}",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"tools\":[{\"type\":"
                  "\"function\",\"function\":{\"name\":\"f\"}}],\"enable_thinking\":false,\"add_"
                  "generation_prompt\":true,"
                  "\"reasoning_effort\":\"low\"}");
    check_context("{" MESSAGES ",\"tools\":[]}",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
                  "\"add_generation_prompt\":true}");
}

Test(oai_messages, the_final_message_goes_on) {
    check_context("{" MESSAGES ",\"continue_final_message\":true}",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
                  "\"continue_final_message\":true,\"add_generation_prompt\":false}");
    check_context("{" MESSAGES ",\"continue_final_message\":false}",
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
                  "\"add_generation_prompt\":true}");
}

Test(oai_messages, long_field_names_are_cut) {
    char body[1024] = "{" MESSAGES ",\"chat_template_kwargs\":{\"messages\":1,\"";
    struct oai_case c;
    memset(body + strlen(body), 'k', 500);
    strcat(body, "\":1}}");
    case_open(&c);
    cr_assert_eq(case_parse(&c, &oai_chat, body), -1);
    cr_assert_str_eq(c.error.param, "chat_template_kwargs.messages");
    case_close(&c);
}

/* Returns the member of the template's context as JSON text, or "absent". */
static const char *context_member(struct oai_case *c, const char *name, char text[64]) {
    const cJSON *node = cJSON_GetObjectItemCaseSensitive(c->request.context, name);
    if (!node) return "absent";
    cr_assert(cJSON_PrintPreallocated((cJSON *)(uintptr_t)node, text, 64, false));
    return text;
}

/* Every API's way to say that the model thinks or does not sets the switches of templates. */
Test(oai_messages, whether_the_model_thinks) {
    static const struct {
        const char *fields, *on, *effort, *budget;
    } cases[] = {
        {"\"n\":1", "absent", "absent", "absent"},
        {"\"reasoning_effort\":\"none\"", "false", "\"none\"", "0"},
        {"\"reasoning_effort\":\"high\"", "true", "\"high\"", "absent"},
        {"\"reasoning\":{\"effort\":\"none\"}", "false", "\"none\"", "0"},
        {"\"reasoning\":{\"effort\":\"low\",\"summary\":\"auto\"}", "true", "\"low\"", "absent"},
        {"\"reasoning\":{\"summary\":\"auto\"}", "absent", "absent", "absent"},
        {"\"thinking\":{\"type\":\"disabled\"}", "false", "absent", "0"},
        {"\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024}", "true", "absent", "absent"},
        {"\"thinking\":{\"type\":\"adaptive\"}", "true", "absent", "absent"},
        {"\"thinking\":{\"type\":\"disabled\"},\"reasoning_effort\":\"high\"", "false", "\"high\"",
         "0"},
        {"\"reasoning_effort\":\"none\",\"chat_template_kwargs\":{\"enable_thinking\":true,"
         "\"thinking\":true,\"thinking_budget\":9}",
         "true", "\"none\"", "9"},
    };
    static const struct {
        const struct oai_kind *kind;
        const char *body;
    } forms[] = {{&oai_chat, MESSAGES},
                 {&oai_responses, "\"input\":\"hi\""},
                 {&oai_messages, "\"max_tokens\":9," MESSAGES}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
            struct oai_case c;
            char body[512], text[64];
            snprintf(body, sizeof body, "{%s,%s}", forms[f].body, cases[i].fields);
            case_open(&c);
            cr_assert_eq(case_parse(&c, forms[f].kind, body), 0, "%s: %s", body, c.error.message);
            cr_assert_str_eq(context_member(&c, "enable_thinking", text), cases[i].on, "%s", body);
            cr_assert_str_eq(context_member(&c, "thinking", text), cases[i].on, "%s", body);
            cr_assert_str_eq(context_member(&c, "reasoning_effort", text), cases[i].effort, "%s",
                             body);
            cr_assert_str_eq(context_member(&c, "thinking_budget", text), cases[i].budget, "%s",
                             body);
            case_close(&c);
        }
}

Test(oai_messages, refusals_of_thoughts) {
    static const char *const cases[][2] = {{"\"reasoning\":5", "reasoning"},
                                           {"\"reasoning\":{\"effort\":5}", "reasoning.effort"},
                                           {"\"reasoning_effort\":5", "reasoning_effort"},
                                           {"\"thinking\":true", "thinking"},
                                           {"\"thinking\":{\"type\":1}", "thinking.type"}};
    char body[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(body, sizeof body, "{" MESSAGES ",%s}", cases[i][0]);
        check_refused(body, "invalid_value", cases[i][1]);
    }
}
