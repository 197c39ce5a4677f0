#include <criterion/criterion.h>

#include "oai_case.h"

static struct oai_case c;

static void open_case(void) {
    case_open(&c);
}

static void close_case(void) {
    case_close(&c);
}

TestSuite(oai_parse, .init = open_case, .fini = close_case);

static void parse_ok(const struct oai_kind *kind, const char *body) {
    int rc = case_parse(&c, kind, body);
    cr_assert_eq(rc, 0, "%s: %s", body, c.error.message);
}

Test(oai_parse, defaults_of_openai) {
    parse_ok(&oai_chat, "{" MESSAGES "}");
    const struct engine_request *s = &c.request.sampling;
    cr_assert(s->temperature == 1 && s->top_p == 1 && s->min_p == 0 && s->repetition == 1);
    cr_assert(s->presence == 0 && s->frequency == 0 && s->top_k == 0 && s->top_logprobs == -1);
    cr_assert(!s->ignore_eos && !s->prompt_logprobs && s->stop_count == 0 && s->bias_count == 0);
    cr_assert(!c.request.stream && !c.request.seed_given && c.request.max_tokens == -1);
    cr_assert(!s->kv.policy && s->kv.budget == -1 && s->kv.buffer == -1 && s->kv.chunk == -1);
    cr_assert(s->kv.sinks == -1 && s->kv.recent == -1 && s->kv.option_count == 0);
    cr_assert(s->kv.reuse && s->kv.retain && s->kv.report == ENGINE_REPORT_NONE);
    cr_assert_str_eq(c.request.salt, "");
}

Test(oai_parse, defaults_of_the_model_and_the_request_above_them) {
    c.info.sampling.temperature = 0.6f;
    c.info.sampling.top_p = 0.95f;
    c.info.sampling.top_k = 20;
    c.info.sampling.repetition = 1.1f;
    parse_ok(&oai_chat, "{" MESSAGES ",\"top_p\":0.5,\"temperature\":null,\"top_k\":-1}");
    const struct engine_request *s = &c.request.sampling;
    cr_assert_float_eq(s->temperature, 0.6f, 1e-6);
    cr_assert_float_eq(s->top_p, 0.5f, 1e-6);
    cr_assert_float_eq(s->repetition, 1.1f, 1e-6);
    cr_assert_eq(s->top_k, 0);
}

Test(oai_parse, everything_at_once) {
    parse_ok(
        &oai_chat,
        "{\"model\":\"alias\"," MESSAGES
        ",\"temperature\":0,\"top_p\":0.25,\"top_k\":7,\"min_p\":0.125,"
        "\"repetition_penalty\":1.5,\"presence_penalty\":-2,\"frequency_penalty\":2,"
        "\"seed\":12345678901234567890,\"max_tokens\":11,\"max_completion_tokens\":11,"
        "\"min_tokens\":3,\"stop\":[\"a\",\"bc\"],\"stop_token_ids\":[5,999],\"ignore_eos\":true,"
        "\"logprobs\":true,\"top_logprobs\":4,\"logit_bias\":{\"10\":-100,\"20\":1.5},"
        "\"stream\":true,\"stream_options\":{\"include_usage\":true,"
        "\"continuous_usage_stats\":true},\"cache_salt\":\"s\",\"prompt_cache_key\":\"k\","
        "\"user\":\"u\",\"n\":3,\"separate_reasoning\":false}");
    const struct engine_request *s = &c.request.sampling;
    cr_assert(s->temperature == 0 && s->top_p == 0.25f && s->top_k == 7 && s->min_p == 0.125f);
    cr_assert(s->repetition == 1.5f && s->presence == -2 && s->frequency == 2);
    cr_assert(s->seed == 12345678901234567890u && c.request.seed_given);
    cr_assert(c.request.max_tokens == 11 && s->min_tokens == 3 && s->ignore_eos);
    cr_assert(s->stop_count == 2 && s->stops[1].size == 2 && !strcmp(s->stops[1].text, "bc"));
    cr_assert(s->stop_id_count == 2 && s->stop_ids[0] == 5 && s->stop_ids[1] == 999);
    cr_assert(s->bias_count == 2 && s->bias[0].token == 10 && s->bias[0].bias == -100);
    cr_assert(s->bias[1].token == 20 && s->bias[1].bias == 1.5f);
    cr_assert(c.request.logprobs == 4 && c.request.prompt_logprobs == -1 && s->top_logprobs == 4);
    cr_assert(!s->prompt_logprobs && c.request.n == 3 && !c.request.split_reasoning);
    cr_assert(c.request.stream && c.request.include_usage && c.request.continuous_usage);
    cr_assert_str_eq(c.request.salt, "s");
    cr_assert_str_eq(c.request.session, "k");
}

Test(oai_parse, xtc) {
    parse_ok(&oai_chat, "{" MESSAGES "}");
    cr_assert(c.request.sampling.xtc_probability == 0 && c.request.sampling.xtc_threshold == 0.1f);
    case_close(&c);
    parse_ok(&oai_chat, "{" MESSAGES ",\"xtc_probability\":0.5,\"xtc_threshold\":0.25}");
    cr_assert(c.request.sampling.xtc_probability == 0.5f);
    cr_assert(c.request.sampling.xtc_threshold == 0.25f);
    case_close(&c);
    parse_ok(&oai_chat, "{" MESSAGES ",\"xtc_probability\":0.5,\"samplers\":[\"top_k\"]}");
    cr_assert_eq(c.request.sampling.xtc_probability, 0);
}

Test(oai_parse, kv_object) {
    parse_ok(&oai_chat,
             "{" MESSAGES ",\"kv\":{\"policy\":\"global\",\"budget\":64,\"buffer\":0,\"chunk\":32,"
             "\"sinks\":2,\"recent\":5,\"horizon\":\"inf\",\"reuse\":false,"
             "\"retain\":false,\"report\":\"positions\"}}");
    const struct engine_kv *kv = &c.request.sampling.kv;
    cr_assert_str_eq(kv->policy, "global");
    cr_assert(kv->budget == 64 && kv->buffer == 0 && kv->chunk == 32 && kv->sinks == 2);
    cr_assert(kv->recent == 5 && !kv->reuse && !kv->retain);
    cr_assert(kv->option_count == 1 && isinf(kv->options[0].number));
    cr_assert_str_eq(kv->options[0].name, "horizon");
    cr_assert_eq(kv->report, ENGINE_REPORT_POSITIONS);
}

Test(oai_parse, kv_options_keep_their_kind) {
    parse_ok(&oai_chat,
             "{" MESSAGES
             ",\"kv\":{\"merge\":\"code\",\"parity\":true,\"window\":12,\"floor\":0.25}}");
    const struct engine_kv *kv = &c.request.sampling.kv;
    cr_assert_eq(kv->option_count, 4);
    for (int i = 0; i < 4; i++) {
        const struct engine_kv_option *option = &kv->options[i];
        double number = !strcmp(option->name, "parity")   ? 1
                        : !strcmp(option->name, "window") ? 12
                                                          : 0.25;
        if (!strcmp(option->name, "merge"))
            cr_assert_str_eq(option->text, "code");
        else
            cr_assert(!option->text && option->number == number, "%s", option->name);
    }
}

/* The policy checks the range of a number and names its bounds. */
Test(oai_parse, kv_numbers_out_of_range_reach_the_engine) {
    parse_ok(&oai_chat, "{" MESSAGES ",\"kv\":{\"floor\":-1,\"window\":0,\"tau\":1e300}}");
    cr_assert_eq(c.request.sampling.kv.option_count, 3);
}

Test(oai_parse, sampling_outlives_the_tree) {
    parse_ok(&oai_chat, "{" MESSAGES ",\"stop\":\"END\",\"kv\":{\"policy\":\"full\"}}");
    oai_request_close(&c.request);
    json_free(c.tree);
    c.tree = NULL;
    cr_assert_str_eq(c.request.sampling.stops[0].text, "END");
    cr_assert_str_eq(c.request.sampling.kv.policy, "full");
}

Test(oai_parse, seeds) {
    static const struct {
        const char *text;
        uint64_t seed;
    } rows[] = {{"0", 0},
                {"-1", UINT64_MAX},
                {"9007199254740993", 9007199254740993u},
                {"18446744073709551615", UINT64_MAX},
                {"-9223372036854775808", (uint64_t)INT64_MIN},
                {"1e3", 1000},
                {"7.0", 7}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char body[256];
        snprintf(body, sizeof body, "{" MESSAGES ",\"seed\":%s}", rows[i].text);
        parse_ok(&oai_chat, body);
        cr_assert_eq(c.request.sampling.seed, rows[i].seed, "%s", rows[i].text);
        oai_request_close(&c.request);
        json_free(c.tree);
    }
    c.tree = NULL;
    cr_assert_eq(case_parse(&c, &oai_chat, "{" MESSAGES ",\"seed\":18446744073709551616}"), -1);
    cr_assert_str_eq(c.error.param, "seed");
}

Test(oai_parse, completion_prompts) {
    static const char *const bodies[] = {"{\"prompt\":\"abc\"}", "{\"prompt\":[\"abc\"]}",
                                         "{\"prompt\":[1,2,999]}", "{\"prompt\":[[1,2,999]]}"};
    for (int i = 0; i < 4; i++) {
        parse_ok(&oai_completion, bodies[i]);
        const struct oai_prompt *prompt = &c.request.prompts[0];
        cr_assert(c.request.prompt_count == 1 && c.request.prompt_list == (i % 2 == 1));
        if (i < 2) {
            cr_assert_str_eq(prompt->text, "abc");
        } else {
            cr_assert(prompt->id_count == 3 && prompt->ids[2] == 999 && !prompt->text);
        }
        cr_assert(!c.request.context && c.request.add_special && c.request.parse_special);
        json_free(c.tree);
    }
    c.tree = NULL;
}

Test(oai_parse, several_prompts) {
    char field[OAI_PATH];
    parse_ok(&oai_completion, "{\"prompt\":[\"a\",\"bc\"],\"n\":2,\"best_of\":2}");
    cr_assert(c.request.prompt_count == 2 && c.request.n == 2);
    cr_assert_str_eq(c.request.prompts[1].text, "bc");
    oai_prompt_path(&c.request, 1, field);
    cr_assert_str_eq(field, "prompt[1]");
    json_free(c.tree);
    parse_ok(&oai_completion, "{\"prompt\":[[1],[2,3]]}");
    cr_assert(c.request.prompts[1].id_count == 2 && c.request.prompts[1].ids[1] == 3);
}

Test(oai_parse, prompt_scores) {
    parse_ok(&oai_chat, "{" MESSAGES ",\"prompt_logprobs\":7}");
    cr_assert(c.request.logprobs == -1 && c.request.prompt_logprobs == 7);
    cr_assert(c.request.sampling.prompt_logprobs && c.request.sampling.top_logprobs == -1);
    cr_assert_eq(c.request.sampling.prompt_top_logprobs, 7);
    oai_request_close(&c.request);
    json_free(c.tree);
    parse_ok(&oai_chat,
             "{" MESSAGES ",\"prompt_logprobs\":0,\"logprobs\":true,\"top_logprobs\":3}");
    cr_assert(c.request.sampling.prompt_logprobs && c.request.sampling.top_logprobs == 3);
    cr_assert_eq(c.request.sampling.prompt_top_logprobs, 0);
}

Test(oai_parse, echo_scores_only_with_logprobs) {
    parse_ok(&oai_completion, "{\"prompt\":\"a\",\"echo\":true,\"max_tokens\":0,\"logprobs\":0}");
    cr_assert(c.request.echo && c.request.sampling.prompt_logprobs && c.request.max_tokens == 0);
    json_free(c.tree);
    parse_ok(&oai_completion, "{\"prompt\":\"a\",\"echo\":true,\"max_tokens\":1}");
    cr_assert(c.request.echo && !c.request.sampling.prompt_logprobs);
}

/* Alternatives as far as the server allows; all of them by -1, where it allows so many. */
Test(oai_parse, alternatives) {
    c.info.max_logprobs = 999;
    cr_assert_eq(case_parse(&c, &oai_completion, "{\"prompt\":\"a\",\"logprobs\":-1}"), -1);
    cr_assert_str_eq(c.error.param, "logprobs");
    json_free(c.tree);
    c.info.max_logprobs = 1000;
    parse_ok(&oai_completion, "{\"prompt\":\"a\",\"echo\":true,\"logprobs\":-1}");
    cr_assert(c.request.logprobs == 1000 && c.request.sampling.top_logprobs == 1000);
    cr_assert(c.request.prompt_logprobs == -1 && c.request.sampling.prompt_top_logprobs == 1000);
    oai_request_close(&c.request);
    json_free(c.tree);
    parse_ok(&oai_chat, "{" MESSAGES ",\"logprobs\":\"true\",\"top_logprobs\":-1}");
    cr_assert(c.request.logprobs == 1000 && !c.request.sampling.prompt_logprobs);
}

/* Every kind of rejection: status, code, field. tests/http/test_errors.py has the table of all
 * fields. */
static const struct {
    const struct oai_kind *kind;
    const char *body, *code, *param;
    int status;
} refused[] = {
    {&oai_chat, "{\"model\":\"gpt\"," MESSAGES "}", "model_not_found", "model", 404},
    {&oai_chat, "{}", "missing_required_parameter", "messages", 400},
    {&oai_chat, "[]", NULL, "", 400},
    {&oai_chat, "{\"messages\":[]}", "invalid_value", "messages", 400},
    {&oai_chat, "{" MESSAGES ",\"max_tokens\":3,\"max_completion_tokens\":4}", "invalid_value",
     "max_tokens", 400},
    {&oai_chat, "{" MESSAGES ",\"stream\":true,\"prompt_logprobs\":1}", "unsupported_parameter",
     "prompt_logprobs", 400},
    {&oai_chat, "{" MESSAGES ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]}",
     "unsupported_parameter", "tools", 400},
    {&oai_chat, "{" MESSAGES ",\"tool_choice\":\"required\"}", "invalid_value", "tool_choice", 400},
    {&oai_chat, "{" MESSAGES ",\"temperature\":1e999}", NULL, "", 400},
    {&oai_chat, "{" MESSAGES ",\"top_k\":1e10}", "invalid_value", "top_k", 400},
    {&oai_chat, "{" MESSAGES ",\"stop\":[\"a\",1]}", "invalid_value", "stop[1]", 400},
    {&oai_chat, "{" MESSAGES ",\"logit_bias\":{\"1000\":1}}", "invalid_value", "logit_bias.1000",
     400},
    {&oai_chat, "{" MESSAGES ",\"logit_bias\":{\" 1\":1,\"+2\":1}}", "invalid_value",
     "logit_bias. 1", 400},
    {&oai_chat, "{" MESSAGES ",\"kv\":{\"horizon\":[1]}}", "invalid_value", "kv.horizon", 400},
    {&oai_chat, "{" MESSAGES ",\"kv\":{\"x\":1}}", "unknown_parameter", "kv.x", 400},
    {&oai_chat, "{" MESSAGES ",\"kv\":{\"window\":\"all\"}}", "invalid_value", "kv.window", 400},
    {&oai_chat, "{" MESSAGES ",\"kv\":{\"decay\":[1]}}", "invalid_value", "kv.decay", 400},
    {&oai_chat, "{" MESSAGES ",\"kv\":{\"lambda\":\"inf\"}}", "invalid_value", "kv.lambda", 400},
    {&oai_chat, "{" MESSAGES ",\"kv\":{\"history\":1}}", "invalid_value", "kv.history", 400},
    {&oai_chat, "{" MESSAGES ",\"kv\":{\"parity\":1}}", "invalid_value", "kv.parity", 400},
    {&oai_chat, "{" MESSAGES ",\"response_format\":{\"type\":\"json_schema\"}}",
     "missing_required_parameter", "response_format.json_schema", 400},
    {&oai_completion, "{\"prompt\":[1,1000]}", "invalid_value", "prompt[1]", 400},
    {&oai_completion, "{\"prompt\":[\"a\",true]}", "invalid_value", "prompt[1]", 400},
    {&oai_completion, "{\"prompt\":\"a\",\"best_of\":2}", "unsupported_parameter", "best_of", 400},
    {&oai_completion, "{\"prompt\":[\"a\",\"b\",\"c\"],\"n\":128}", "invalid_value", "n", 400},
    {&oai_completion, "{\"prompt\":[\"a\",\"b\"],\"kv\":{\"report\":\"lengths\"}}",
     "unsupported_parameter", "kv.report", 400},
    {&oai_completion, "{\"prompt\":\"a\",\"max_tokens\":0}", "invalid_value", "max_tokens", 400},
    {&oai_tokenize, "{}", "missing_required_parameter", "prompt", 400},
    {&oai_detokenize, "{\"tokens\":{}}", "invalid_value", "tokens", 400},
    {&oai_chat, "{" MESSAGES, NULL, "", 400},
};

Test(oai_parse, refusals) {
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        cr_assert_eq(case_parse(&c, refused[i].kind, refused[i].body), -1, "%s", refused[i].body);
        cr_assert_eq(c.error.status, refused[i].status, "%s", refused[i].body);
        cr_assert_str_eq(c.error.param, refused[i].param, "%s", refused[i].body);
        cr_assert((!c.error.code) == (!refused[i].code), "%s", refused[i].body);
        if (c.error.code) cr_assert_str_eq(c.error.code, refused[i].code, "%s", refused[i].body);
        cr_assert_str_not_empty(c.error.message);
        oai_request_close(&c.request);
        json_free(c.tree);
        c.tree = NULL;
    }
}

Test(oai_parse, strict) {
    c.rules.strict = true;
    cr_assert_eq(case_parse(&c, &oai_chat, "{" MESSAGES ",\"prompt\":\"x\"}"), -1);
    cr_assert_str_eq(c.error.code, "unknown_parameter");
    cr_assert_str_eq(c.error.param, "prompt");
}

Test(oai_parse, lengths) {
    static const struct {
        size_t count;
        int32_t wanted, expected; /* -1: refused */
    } rows[] = {{1, -1, 50},  {60, -1, 40}, {99, -1, 1}, {100, -1, -1}, {90, 10, 10},
                {90, 11, -1}, {100, 1, -1}, {100, 0, 0}, {101, 0, -1},  {0, -1, -1}};
    parse_ok(&oai_chat, "{" MESSAGES "}");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        c.request.max_tokens = rows[i].wanted;
        int32_t got = -1;
        int rc = oai_fit(&c.request, "messages", rows[i].count, &c.rules, &got, &c.error);
        cr_assert_eq(rc, rows[i].expected < 0 ? -1 : 0, "row %zu", i);
        if (rc == 0) cr_assert_eq(got, rows[i].expected, "row %zu", i);
        if (rc && rows[i].count) {
            cr_assert(strstr(c.error.message, "This model's maximum context length is 100 "));
            cr_assert_not(strchr(c.error.message, '"'), "Python prints the apostrophe as \\'");
        }
    }
}

Test(oai_parse, completions_default_to_sixteen) {
    parse_ok(&oai_completion, "{\"prompt\":\"a\"}");
    int32_t got = -1;
    cr_assert_eq(oai_fit(&c.request, "prompt", 1, &c.rules, &got, &c.error), 0);
    cr_assert_eq(got, 16);
}

/* Each allocation fails once: the answer is 503, with no leak and no invalid read. */
static void check_allocations(const struct oai_kind *kind, const char *body) {
    bool pending = false;
    int failures = 0;
    for (long n = 0; !pending; n++) {
        struct oai_case own;
        case_open(&own);
        own.rules.tools.form = &tool_forms[TOOL_FORMAT_HERMES];
        mem_fail_after(n);
        int rc = case_parse(&own, kind, body);
        pending = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert_eq(rc, pending ? 0 : -1, "%s: allocation %ld", kind->path, n);
        if (rc) cr_assert_eq(own.error.status, 503, "allocation %ld: %s", n, own.error.message);
        failures += rc != 0;
        case_close(&own);
    }
    cr_assert_gt(failures, 10);
}

Test(oai_parse, every_allocation_fails) {
    check_allocations(&oai_chat,
                      "{" MESSAGES ",\"stop\":[\"a\"],\"stop_token_ids\":[1],\"logit_bias\":"
                      "{\"1\":1},\"kv\":{\"policy\":\"full\"},\"thinking\":{\"type\":\"disabled\"},"
                      "\"reasoning_effort\":\"none\"}");
    check_allocations(
        &oai_responses,
        "{\"input\":[{\"role\":\"user\",\"content\":\"hi\"},{\"type\":"
        "\"custom_tool_call\",\"call_id\":\"c\",\"name\":\"p\",\"input\":\"x\"},"
        "{\"type\":\"custom_tool_call_output\",\"call_id\":\"c\",\"output\":[{\"type\":"
        "\"input_image\"}]}],\"tools\":[{\"type\":\"namespace\",\"name\":\"n\","
        "\"tools\":[{\"type\":\"function\",\"name\":\"f\"}]},{\"type\":\"custom\","
        "\"name\":\"p\",\"format\":{\"type\":\"grammar\",\"syntax\":\"regex\","
        "\"definition\":\"a+\"}}],\"reasoning\":{\"effort\":\"none\"}}");
    check_allocations(&oai_messages,
                      "{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":"
                      "\"tool_result\",\"tool_use_id\":\"c\",\"content\":[{\"type\":"
                      "\"tool_reference\",\"tool_name\":\"f\"},{\"type\":\"image\"}]}]},{\"role\":"
                      "\"system\",\"content\":[{\"type\":\"text\",\"text\":\"s\"}]}],\"tools\":["
                      "{\"name\":\"f\",\"defer_loading\":true},{\"name\":\"g\"}]}");
}
