/* Answers, byte for byte. The fake engine's tokens are bytes and three special ones. */
#include <criterion/criterion.h>

#include "oai_case.h"

static struct engine *engine;
static struct engine_job job;
static struct oai_request request;
static struct oai_rules rules;
static struct oai_answer answer;
static struct buf out;

static const int32_t prompt[] = {'a', 256, 0xC3, 0xA9};
static struct engine_token tokens[] = {
    {'h', -0.5f, 1, 1}, {0xC3, -INFINITY, 7, 2}, {257, -2, 1, 2}};
static struct engine_top top[] = {{'h', -0.5f}, {'i', -1}, {'q', -0.25f},
                                  {'r', -3},    {257, -2}, {'"', -2.5f}};
static struct engine_choice choices[1];
static struct engine_token prompt_tokens[] = {
    {'a', 0, 0, 0}, {256, -1, 1, 0}, {0xC3, -1.5f, 2, 0}, {0xA9, -0.125f, 1, 0}};
static char text[] = "h\xC3";

static void open_answer(void) {
    struct engine_options options = {
        .model_dir = "m", .kv_budget = 64, .max_num_seqs = 1, .max_queue = 1};
    struct fault fault;
    cr_assert_eq(engine_open(&options, &engine, &fault), 0);
    job = (struct engine_job){.request = {.prompt = prompt, .prompt_count = 4, .top_logprobs = -1},
                              .choice = choices,
                              .choice_count = 1,
                              .prompt_tokens = prompt_tokens,
                              .admitted = 1,
                              .cached_tokens = 3,
                              .kv = {.policy = "global",
                                     .budget = 64,
                                     .seen_tokens = 7,
                                     .kept_entries = 28,
                                     .evicted_entries = 0,
                                     .dropped_tokens = 1,
                                     .bytes = 32768}};
    struct engine_choice *choice = &job.choice[0];
    choice->tokens = tokens;
    choice->top = top;
    choice->text = text;
    choice->stop_index = choice->stop_token = -1;
    atomic_store(&choice->token_count, 3);
    atomic_store(&choice->text_safe, 2);
    atomic_store(&choice->finish, ENGINE_FINISH_STOP);
    request = (struct oai_request){
        .kind = &oai_chat, .n = 1, .logprobs = -1, .prompt_logprobs = -1, .split_reasoning = true};
    rules = (struct oai_rules){.info = engine_info(engine), .engine = engine, .think = {-1, -1}};
    answer = (struct oai_answer){.engine = engine,
                                 .rules = &rules,
                                 .request = &request,
                                 .jobs = &job,
                                 .job_count = 1,
                                 .id = "chatcmpl-1",
                                 .model = "m\"x",
                                 .created = 1700000000};
    buf_open(&out, 1 << 20);
}

static void close_answer(void) {
    buf_close(&out);
    engine_close(engine);
}

TestSuite(oai_render, .init = open_answer, .fini = close_answer);

#define USAGE                                                                                      \
    ",\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":3,\"total_tokens\":7,"                  \
    "\"prompt_tokens_details\":{\"cached_tokens\":3},\"completion_tokens_details\":"               \
    "{\"reasoning_tokens\":0,\"accepted_prediction_tokens\":0,"                                    \
    "\"rejected_prediction_tokens\":0},\"kv_details\":{\"policy\":\"global\",\"budget\":64,"       \
    "\"seen_tokens\":7,\"kept_entries\":28,\"evicted_entries\":0,\"dropped_tokens\":1,\"shifts\":" \
    "0,"                                                                                           \
    "\"bytes\":32768}}"
#define END ",\"system_fingerprint\":\"keepd-" KEEPD_VERSION "\"}"

Test(oai_render, chat) {
    request.kind->form->answer(&out, &answer);
    cr_assert_str_eq(
        out.data, "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,"
                  "\"model\":\"m\\\"x\",\"choices\":[{\"index\":0,\"message\":{\"role\":"
                  "\"assistant\",\"content\":\"h\xEF\xBF\xBD\",\"refusal\":null},\"logprobs\":null,"
                  "\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":null}],"
                  "\"service_tier\":\"default\"" USAGE
                  ",\"prompt_logprobs\":null,\"prompt_token_ids\":null" END);
}

Test(oai_render, completion_with_echo) {
    request.kind = &oai_completion;
    request.echo = true;
    request.kind->form->answer(&out, &answer);
    cr_assert_str_eq(
        out.data,
        "{\"id\":\"chatcmpl-1\",\"object\":\"text_completion\",\"created\":1700000000,"
        "\"model\":\"m\\\"x\",\"choices\":[{\"index\":0,\"text\":\"a<|im_start|>"
        "\xC3\xA9h\xEF\xBF\xBD\","
        "\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null,\"prompt_logprobs\":"
        "null,\"token_ids\":null,\"prompt_token_ids\":null}]" USAGE END);
}

Test(oai_render, chat_logprobs) {
    job.request.top_logprobs = request.logprobs = 2;
    oai_render_chat_logprobs(&out, &answer, 0, 0, 2);
    cr_assert_str_eq(
        out.data,
        "{\"content\":[{\"token\":\"h\",\"logprob\":-0.5,\"bytes\":[104],\"top_logprobs\":[{"
        "\"token\":"
        "\"h\",\"logprob\":-0.5,\"bytes\":[104]},{\"token\":\"i\",\"logprob\":-1,\"bytes\":[105]}]}"
        ","
        "{\"token\":\"\\\\xc3\",\"logprob\":-9999.0,\"bytes\":[195],\"top_logprobs\":[{\"token\":"
        "\"q\","
        "\"logprob\":-0.25,\"bytes\":[113]},{\"token\":\"r\",\"logprob\":-3,\"bytes\":[114]}]}],"
        "\"refusal\":null}");
}

Test(oai_render, completion_logprobs_with_echo) {
    struct oai_offset offset = {0};
    request.kind = &oai_completion;
    job.request.top_logprobs = request.logprobs = 0;
    oai_render_text_logprobs(&out, &answer, 0, 0, 1, true, &offset);
    cr_assert_str_eq(
        out.data, "{\"tokens\":[\"a\",\"<|im_start|>\",\"bytes:\\\\xc3\",\"bytes:\\\\xa9\",\"h\"],"
                  "\"token_logprobs\":[null,-1,-1.5,-0.125,-0.5],\"top_logprobs\":[null,{\"<|im_"
                  "start|>\":-1},"
                  "{\"bytes:\\\\xc3\":-1.5},{\"bytes:\\\\xa9\":-0.125},{\"h\":-0.5}],"
                  "\"text_offset\":[0,1,13,13,14]}");
    cr_assert(offset.characters == 15 && offset.part_size == 0);
}

Test(oai_render, an_echo_leaves_out_what_the_tokenizer_added) {
    struct oai_offset offset = {0};
    int32_t added[] = {1};
    request.kind = &oai_completion;
    request.added = added;
    request.tokens_as_ids = true;
    job.request.top_logprobs = request.logprobs = 0;
    oai_render_prompt_text(&out, &answer, 0);
    cr_assert_str_eq(out.data, "<|im_start|>\xC3\xA9");
    buf_clear(&out);
    oai_render_text_logprobs(&out, &answer, 0, 0, 1, true, &offset);
    cr_assert(strstr(out.data, "{\"tokens\":[\"token_id:97\",\"token_id:256\","));
    cr_assert(strstr(out.data, "\"text_offset\":[0,0,12,12,13]}"), "%s", out.data);
}

Test(oai_render, the_chosen_token_is_always_among_the_alternatives) {
    struct oai_offset offset = {.characters = 5};
    request.kind = &oai_completion;
    job.request.top_logprobs = request.logprobs = 2;
    oai_render_text_logprobs(&out, &answer, 0, 1, 3, false, &offset);
    cr_assert_str_eq(
        out.data, "{\"tokens\":[\"bytes:\\\\xc3\",\"<|im_end|>\"],\"token_logprobs\":[-9999.0,-2],"
                  "\"top_logprobs\":[{\"bytes:\\\\xc3\":-9999.0,\"q\":-0.25,\"r\":-3},"
                  "{\"<|im_end|>\":-2,\"\\\"\":-2.5}],\"text_offset\":[5,5]}");
}

Test(oai_render, stop_reasons) {
    static const struct engine_stop stops[] = {{"END", 3}};
    static const int32_t ids[] = {42};
    job.request.stops = stops;
    job.request.stop_count = 1;
    job.request.stop_ids = ids;
    job.request.stop_id_count = 1;
    job.choice[0].stop_index = 0;
    oai_render_finish(&out, &answer, 0, false);
    job.choice[0].stop_index = -1;
    job.choice[0].stop_token = 42;
    oai_render_finish(&out, &answer, 0, false);
    job.choice[0].stop_token = 257;
    atomic_store(&job.choice[0].finish, ENGINE_FINISH_LENGTH);
    oai_render_finish(&out, &answer, 0, true);
    atomic_store(&job.choice[0].finish, ENGINE_FINISH_STOP);
    oai_render_finish(&out, &answer, 0, true);
    cr_assert_str_eq(out.data, ",\"finish_reason\":\"stop\",\"stop_reason\":\"END\""
                               ",\"finish_reason\":\"stop\",\"stop_reason\":42"
                               ",\"finish_reason\":\"length\",\"stop_reason\":null"
                               ",\"finish_reason\":\"tool_calls\",\"stop_reason\":null");
}

/* Scores end where the text ends; usage counts all generated tokens. */
Test(oai_render, scores_are_cut_with_the_text) {
    static struct engine_token said[] = {{'a', -1, 1, 1}, {'b', -1, 1, 2}, {'c', -1, 1, 3}};
    static char abc[] = "abc";
    struct engine_choice *choice = &job.choice[0];
    choice->tokens = said;
    choice->text = abc;
    static const struct {
        size_t safe;
        int32_t stop_index;
        uint32_t shown;
    } rows[] = {{0, 0, 0}, {1, 0, 1}, {2, 0, 2}, {3, 0, 3}, {3, -1, 3}, {2, -1, 3}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        atomic_store(&choice->text_safe, rows[i].safe);
        choice->stop_index = rows[i].stop_index;
        cr_assert_eq(oai_shown_count(&answer, 0), rows[i].shown, "row %zu", i);
    }
}

Test(oai_render, offsets_inside_characters) {
    static const int32_t ids[] = {'a', 0xE4, 0xB8, 0xAD, 0xC3, 'b', 258, 0xFF, 'c'};
    static const uint64_t offsets[] = {0, 1, 1, 1, 2, 3, 4, 4, 5};
    struct engine_token said[9] = {{0}};
    struct oai_offset offset = {0};
    char expected[128] = "";
    for (int i = 0; i < 9; i++) {
        said[i].token = ids[i];
        snprintf(expected + strlen(expected), 16, "%s%d", i ? "," : "", (int)offsets[i]);
    }
    job.choice[0].tokens = said;
    request.kind = &oai_completion;
    request.logprobs = 0;
    oai_render_text_logprobs(&out, &answer, 0, 0, 9, false, &offset);
    cr_assert(strstr(out.data, expected), "%s not in %s", expected, out.data);
    cr_assert_eq(offset.characters, 6);
}

Test(oai_render, prompt_scores) {
    static struct engine_top prompt_top[] = {{0, 0},    {0, 0},        {256, -1},       {'x', -2},
                                             {'y', -1}, {'z', -1.25f}, {0xA9, -0.125f}, {'q', -3}};
    job.prompt_top = prompt_top;
    job.request.prompt_top_logprobs = 2;
    request.prompt_logprobs = 1;
    oai_render_prompt_logprobs(&out, &answer, 0);
    cr_assert_str_eq(
        out.data, "[null,{\"256\":{\"logprob\":-1,\"rank\":1,\"decoded_token\":\"<|im_start|>\"}},"
                  "{\"195\":{\"logprob\":-1.5,\"rank\":2,\"decoded_token\":\"\xEF\xBF\xBD\"},"
                  "\"121\":{\"logprob\":-1,\"rank\":1,\"decoded_token\":\"y\"}},"
                  "{\"169\":{\"logprob\":-0.125,\"rank\":1,\"decoded_token\":\"\xEF\xBF\xBD\"}}]");
}

Test(oai_render, conversations) {
    struct engine_conversation_row rows[] = {
        {.id = 1, .replica = -1, .tokens = 9, .held = 8, .policy = "full", .budget = -1},
        {.id = 2,
         .replica = 1,
         .idle_ns = 500000000,
         .ttl = 3,
         .pinned = true,
         .policy = "global",
         .budget = 7}};
    oai_render_conversations(&out, rows, 2);
    cr_assert_str_eq(out.data,
                     "{\"object\":\"list\",\"data\":[{\"id\":\"0000000000000001\",\"object\":"
                     "\"conversation\",\"tokens\":9,\"held\":8,\"pages\":0,\"disk_bytes\":0,"
                     "\"idle_seconds\":0.000,\"superseded\":false,\"pinned\":false,\"ttl\":null,"
                     "\"engine\":null,\"policy\":\"full\","
                     "\"budget\":null},{\"id\":\"0000000000000002\",\"object\":"
                     "\"conversation\",\"tokens\":0,\"held\":0,\"pages\":0,\"disk_bytes\":0,"
                     "\"idle_seconds\":0.500,\"superseded\":false,\"pinned\":true,\"ttl\":2.500,"
                     "\"engine\":1,\"policy\":\"global\","
                     "\"budget\":7}]}");
}

Test(oai_render, conversation_ids) {
    static const char *const bad[] = {
        "", "1", "000000000000000g", "00000000000000001", "000000000000000A", " 00000000000000f"};
    uint64_t id;
    cr_assert(oai_conversation_id("fe000000000000a1", &id) && id == 0xfe000000000000a1);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_not(oai_conversation_id(bad[i], &id), "%s", bad[i]);
}

Test(oai_render, reports) {
    static int32_t lengths[] = {1, 0, 2, 1}, positions[] = {6, 0, 6, 5};
    job.kv.lengths = lengths;
    job.kv.positions = positions;
    job.kv.budget = -1;
    oai_render_usage(&out, &answer, 3, true);
    cr_assert(strstr(out.data, "\"budget\":null,"));
    cr_assert(strstr(out.data, "\"lengths\":[[1,0],[2,1]],\"positions\":[[[6],[]],[[0,6],[5]]]}}"));
}

Test(oai_render, trace) {
    static int32_t gone[] = {4, 5, 9};
    struct engine_eviction *first = calloc(1, sizeof *first + 4 * sizeof *first->lengths);
    struct engine_eviction *second = calloc(1, sizeof *second + 4 * sizeof *second->lengths);
    *first = (struct engine_eviction){.next = second, .tokens = 8, .positions = gone};
    *second = (struct engine_eviction){.tokens = 11, .positions = gone + 2};
    first->lengths[1] = 2;
    second->lengths[3] = 1;
    job.request.kv.report = ENGINE_REPORT_TRACE;
    job.kv.evictions = first;
    job.kv.evictions_lost = 1;
    oai_render_usage(&out, &answer, 3, true);
    cr_assert(strstr(out.data,
                     "\"trace\":[{\"tokens\":8,\"evicted\":[[[],[4,5]],[[],[]]]},"
                     "{\"tokens\":11,\"evicted\":[[[],[]],[[],[9]]]}],\"trace_lost\":1}"));
    job.kv.evictions = NULL;
    free(first), free(second);
}

Test(oai_render, usage_of_a_running_job) {
    oai_render_usage(&out, &answer, 2, false);
    cr_assert_str_eq(out.data, "{\"prompt_tokens\":4,\"completion_tokens\":2,\"total_tokens\":6}");
}

Test(oai_render, errors) {
    struct oai_error error;
    struct fault fault;
    oai_refuse(&error, 404, "model_not_found", "model", "no `%s`\n", "x");
    oai_render_error(&out, &error);
    cr_assert_str_eq(out.data, "{\"error\":{\"message\":\"no `x`\\n\",\"type\":\"not_found_error\","
                               "\"param\":\"model\",\"code\":\"model_not_found\"}}");
    buf_clear(&out);
    fault_set(&fault, ERR_INVALID, "top_p", "expected less");
    cr_assert_eq(oai_refuse_fault(&error, &fault), -1);
    oai_render_error(&out, &error);
    cr_assert_str_eq(
        out.data, "{\"error\":{\"message\":\"Invalid value for 'top_p': expected less.\",\"type\":"
                  "\"invalid_request_error\",\"param\":\"top_p\",\"code\":\"invalid_value\"}}");
}

Test(oai_render, faults_have_a_status) {
    static const int rows[][2] = {{ERR_NOMEM, 503},     {ERR_IO, 500},          {ERR_INVALID, 400},
                                  {ERR_MALFORMED, 400}, {ERR_UNSUPPORTED, 400}, {ERR_LIMIT, 400},
                                  {ERR_FULL, 503},      {ERR_STOPPED, 503},     {ERR_CONTEXT, 400},
                                  {ERR_DEVICE, 500},    {ERR_INTERNAL, 500}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct oai_error error;
        struct fault fault;
        fault_set(&fault, rows[i][0], "f", "text");
        oai_refuse_fault(&error, &fault);
        cr_assert_eq(error.status, rows[i][1], "%s", err_name(rows[i][0]));
    }
}

Test(oai_render, models) {
    static const char *const names[] = {"m", "alias"};
    const struct fault fault = {.code = ERR_IO, .text = "no file"};
    struct oai_listed models[] = {{.names = names,
                                   .name_count = 2,
                                   .max_model_len = 100,
                                   .state = "loaded",
                                   .memory_bytes = 5}};
    oai_render_models(&out, models, 1, 7);
#define MODEL_ROW(id)                                                                              \
    "{\"id\":\"" id "\",\"object\":\"model\",\"created\":7,\"owned_by\":\"keepd\",\"root\":\"m\"," \
    "\"parent\":null,\"max_model_len\":100,\"type\":\"model\",\"display_name\":\"" id "\","        \
    "\"created_at\":\"1970-01-01T00:00:07Z\",\"lifecycle\":\"active\",\"max_input_tokens\":100,"   \
    "\"status\":{\"value\":\"loaded\"},\"requests_waiting\":0,\"pinned\":false,\"memory_bytes\":"  \
    "5}"
    cr_assert_str_eq(out.data, "{\"object\":\"list\",\"data\":[" MODEL_ROW("m") "," MODEL_ROW(
                                   "alias") "],\"has_more\":false,\"first_id\":\"m\","
                                            "\"last_id\":\"alias\"}");
    buf_clear(&out);
    cr_assert(oai_render_model(&out, models, 1, "alias", 7) && out.size > 0);
    cr_assert_not(oai_render_model(&out, models, 1, "other", 7));
    models[0].state = "loading";
    models[0].loading = true;
    models[0].progress = 0.5;
    cr_assert(oai_render_model(&out, models, 1, "m", 7));
    cr_assert(strstr(out.data, "{\"value\":\"loading\",\"progress\":0.500}"));
    models[0].state = "failed";
    models[0].loading = false;
    models[0].fault = &fault;
    cr_assert(oai_render_model(&out, models, 1, "m", 7));
    cr_assert(strstr(out.data, "{\"value\":\"failed\",\"failed\":true,\"error\":\"no file\"}"));
}

/* An encoder writes nothing, and one that judges texts makes no vectors. */
Test(oai_render, capabilities_are_those_of_the_model) {
    struct engine_info info = *rules.info;
    rules.info = &info;
    oai_ollama_show_kind.answer(&out, &rules, &request, &(struct engine_ids){0});
    cr_assert(strstr(out.data, "\"capabilities\":[\"completion\",\"embedding\"]"), "%s", out.data);
    buf_clear(&out);
    info.whole_texts = true;
    oai_ollama_show_kind.answer(&out, &rules, &request, &(struct engine_ids){0});
    cr_assert(strstr(out.data, "\"capabilities\":[\"embedding\"]"), "%s", out.data);
    buf_clear(&out);
    info.labels = 1;
    oai_ollama_show_kind.answer(&out, &rules, &request, &(struct engine_ids){0});
    cr_assert(strstr(out.data, "\"capabilities\":[]"), "%s", out.data);
}

Test(oai_render, tokens_and_text) {
    int32_t ids[] = {'a', 258, 0xC3};
    request.return_token_strs = true;
    oai_tokenize.answer(&out, &rules, &request, &(struct engine_ids){.ids = ids, .count = 3});
    cr_assert_str_eq(out.data, "{\"count\":3,\"max_model_len\":8192,\"tokens\":[97,258,195],"
                               "\"token_strs\":[\"a\",\"<|endoftext|>\",\"<0xC3>\"]}");
    buf_clear(&out);
    request.return_token_strs = false;
    oai_tokenize.answer(&out, &rules, &request, &(struct engine_ids){.ids = ids, .count = 0});
    cr_assert_str_eq(out.data,
                     "{\"count\":0,\"max_model_len\":8192,\"tokens\":[],\"token_strs\":null}");
    buf_clear(&out);
    oai_detokenize.answer(&out, &rules, &request, &(struct engine_ids){.ids = ids, .count = 2});
    cr_assert_str_eq(out.data, "{\"prompt\":\"a<|endoftext|>\",\"content\":\"a<|endoftext|>\"}");
}

Test(oai_render, kv) {
    struct engine_status status = {.running = 1,
                                   .conversations = 1,
                                   .pages_total = 10,
                                   .pages_used = 3,
                                   .pages_reserved = 2,
                                   .pages_retained = 1};
    struct engine_sequence_row row = {.replica = 1,
                                      .tokens = 9,
                                      .held = 8,
                                      .prompt_count = 5,
                                      .output_count = 4,
                                      .policy = "full",
                                      .budget = -1,
                                      .pages_reserved = 2};
    struct engine_conversation_row old = {.id = 0xfeull << 56,
                                          .tokens = 3,
                                          .held = 3,
                                          .policy = "global",
                                          .budget = 64,
                                          .pages = 1,
                                          .idle_ns = 1500000000};
    oai_render_kv(&out, engine_info(engine), &status, &row, 1, &old, 1);
    cr_assert_str_eq(
        out.data,
        "{\"pool\":{\"pages_total\":10,\"pages_used\":3,\"pages_reserved\":2,"
        "\"pages_retained\":1,\"page_bytes\":8192,\"page_slots\":16},\"policy\":\"global\","
        "\"budget\":64,\"layers\":2,\"heads_kv\":2,\"running_count\":1,"
        "\"waiting_count\":0,\"conversation_count\":1,\"preemptions\":0,\"running\":[{"
        "\"engine\":1,\"state\":\"decode\",\"tokens\":9,\"held\":8,\"prompt_tokens\":5,"
        "\"completion_tokens\":4,\"pages_reserved\":2,\"policy\":\"full\",\"budget\":null}],"
        "\"conversations\":[{\"id\":\"fe00000000000000\",\"object\":\"conversation\",\"tokens\":3,"
        "\"held\":3,\"pages\":1,\"disk_bytes\":0,\"idle_seconds\":1.500,\"superseded\":false,"
        "\"pinned\":false,\"ttl\":null,\"engine\":0,\"policy\":\"global\",\"budget\":64}]}");
}
