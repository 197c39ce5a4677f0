/* Published chat templates: of each the form of calls is found, what it renders of calls is read as
 * these calls, whole and in pieces, and calls of its form are bound as tool_choice says. */
#include <dirent.h>

#include "server/oai/fields.h"
#include "tool_case.h"

/* Templates under other licences, shortened and written anew. */
#define EACH_CALL     "{% for c in m.tool_calls or [] %}"
#define EACH_ARGUMENT "{% for k, v in c.function.arguments.items() %}"
#define TURN(calls)                                                                                \
    "{% if tools %}List of tools: [{{ tools | tojson }}]{% endif %}{% for m in messages %}"        \
    "<|im_start|>{{ m.role }}\n{{ m.content }}" calls "<|im_end|>\n{% endfor %}"
static const char lfm2[] = "{# <|tool_list_start|> #}" TURN("");
static const char lfm25[] = TURN(
    "{% if m.tool_calls %}<|tool_call_start|>[" EACH_CALL "{{ c.function.name }}(" EACH_ARGUMENT
    "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}"
    "{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|tool_call_end|>{% endif %}");
static const char kimi_k3[] =
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|open|>message role=\""
    "{{ m.role }}\"<|sep|>{% if m.role == 'assistant' %}<|open|>response<|sep|>{{ m.content }}"
    "<|close|>response<|sep|>{% if m.tool_calls %}<|open|>tools<|sep|>" EACH_CALL
    "<|open|>call tool=\"{{ c.function.name }}\" index=\"{{ loop.index }}\"<|sep|>" EACH_ARGUMENT
    "<|open|>argument key=\"{{ k }}\" type=\"{% if v is boolean %}boolean{% elif v is number "
    "%}number"
    "{% elif v is string %}string{% else %}object{% endif %}\"<|sep|>"
    "{{ v if v is string else v | tojson }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>"
    "{% endfor %}<|close|>tools<|sep|>{% endif %}{% else %}{{ m.content }}{% endif %}"
    "<|close|>message<|sep|><|end_of_msg|>{% endfor %}";

static const char minimax_m3[] =
    "{% set ns = ']<]minimax[>[' %}{% macro xml(v) %}{% if v is mapping %}{% for k, w in v.items() "
    "%}"
    "{{ ns }}<{{ k }}>{{ xml(w) }}{{ ns }}</{{ k }}>{% endfor %}{% elif v is iterable and v is not "
    "string %}{% for w in v %}{{ ns }}<item>{{ xml(w) }}{{ ns }}</item>{% endfor %}{% elif v is "
    "boolean "
    "%}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro %}{% if tools %}{{ tools | tojson }}"
    "{% endif %}{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ ns "
    "}}"
    "<tool_call>\n" EACH_CALL "{{ ns }}<invoke name=\"{{ c.function.name }}\">" EACH_ARGUMENT
    "{{ ns }}<{{ k }}>{{ xml(v) }}{{ ns }}</{{ k }}>{% endfor %}{{ ns }}</invoke>\n{% endfor %}{{ "
    "ns }}"
    "</tool_call>{% endif %}[e~[\n{% endfor %}";

static const struct {
    const char *name, *form;
    const char *source; /* NULL: the file of this name */
    bool single;        /* only the first call is shown */
} templates[] = {
    {"LFM2", "lfm2", lfm2, false},
    {"LFM2.5", "lfm2", lfm25, false},
    {"Kimi K3", "template", kimi_k3, false},
    {"MiniMax M3", "minimax_m3", minimax_m3, false},
    {"Apertus-8B-Instruct", "template", NULL, false},
    {"Bielik-11B-v3.0-Instruct", "hermes", NULL, false},
    {"ByteDance-Seed-OSS", "seed_oss", NULL, false},
    {"GLM-4.6", "glm45", NULL, false},
    {"GLM-4.7-Flash", "glm47", NULL, false},
    {"GigaChat3-10B-A1.8B", "template", NULL, true},
    {"GigaChat3.1-10B-A1.8B", "template", NULL, true},
    {"HuggingFaceTB-SmolLM3-3B", "generic", NULL, false},
    {"MiMo-VL", "hermes", NULL, false},
    {"MiniMax-M1", "template", NULL, false},
    {"MiniMax-M2", "minimax_m2", NULL, false},
    {"Mistral-Small-3.2-24B-Instruct-2506", "template", NULL, false},
    {"Qwen-QwQ-32B", "hermes", NULL, false},
    {"Qwen-Qwen2.5-7B-Instruct", "hermes", NULL, false},
    {"Qwen-Qwen3-0.6B", "hermes", NULL, false},
    {"Qwen3-Coder", "qwen3_coder", NULL, false},
    {"Qwen3.5-4B", "qwen3_coder", NULL, false},
    {"StepFun3.5-Flash", "qwen3_coder", NULL, false},
    {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek_v3", NULL, false},
    {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3", NULL, false},
    {"deepseek-ai-DeepSeek-V3.1", "deepseek_v31", NULL, false},
    {"deepseek-ai-DeepSeek-V3.2", "deepseek_v32", NULL, false},
    {"deepseek-ai-DeepSeek-V4", "template", NULL, false},
    {"google-gemma-4-31B-it", "gemma4", NULL, false},
    {"ibm-granite-granite-3.3-2B-Instruct", "granite", NULL, false},
    {"ibm-granite-granite-4.0", "hermes", NULL, false},
    {"meetkai-functionary-medium-v3.1", "template", NULL, false},
    {"microsoft-Phi-3.5-mini-instruct", "generic", NULL, false},
    {"mistralai-Ministral-3-14B-Reasoning-2512", "template", NULL, false},
    {"mistralai-Mistral-Nemo-Instruct-2407", "mistral", NULL, false},
    {"openbmb-MiniCPM5-1B", "template", NULL, false},
    {"unsloth-mistral-Devstral-Small-2507", "template", NULL, false},
};

#define FIRST                                                                                      \
    "{\"city\":\"a \\\"b\\\" <c> {d}\\n'\xC3\xA9' \",\"days\":3,\"warm\":true,\"more\":{\"unit\":" \
    "\"C\",\"hours\":[1,2.5],\"deep\":{\"x\":[true]}}}"
#define SECOND "{\"city\":\"12\",\"days\":-1}"

static const char body[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"zqquestion\"},{\"role\":\"assistant\","
    "\"content\":"
    "\"\",\"tool_calls\":[{\"id\":\"aaaaaaaa1\",\"type\":\"function\",\"function\":{\"name\":"
    "\"get_weather\",\"arguments\":" FIRST
    "}},{\"id\":\"aaaaaaaa2\",\"type\":\"function\",\"function\":"
    "{\"name\":\"f\",\"arguments\":" SECOND
    "}}]},{\"role\":\"tool\",\"tool_call_id\":\"aaaaaaaa1\","
    "\"content\":\"cold\"},{\"role\":\"tool\",\"tool_call_id\":\"aaaaaaaa2\",\"content\":\"warm\"}]"
    ","
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"description\":"
    "\"d\","
    "\"parameters\":{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\","
    "\"description\":"
    "\"d\"},\"days\":{\"type\":\"integer\",\"description\":\"d\"},\"warm\":{\"type\":\"boolean\","
    "\"description\":\"d\"},\"more\":{\"type\":\"object\",\"description\":\"d\",\"properties\":{}}}"
    ","
    "\"required\":[\"city\"]}}},{\"type\":\"function\",\"function\":{\"name\":\"f\","
    "\"description\":\"d\","
    "\"parameters\":{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\","
    "\"description\":"
    "\"d\"},\"days\":{\"type\":\"integer\",\"description\":\"d\"}},\"required\":[\"city\"]}}}]}";

/* Reads a text that comes in pieces of `step` bytes; writes each call as a line: its name, a blank
 * and its arguments. */
static void read_in_steps(const struct tool_set *tools, const char *text, size_t step,
                          struct buf *out) {
    struct tool_reader reader = {.tools = tools};
    const size_t size = strlen(text);
    buf_clear(out);
    for (size_t end = step < size ? step : size;; end = end + step < size ? end + step : size) {
        struct tool_piece piece;
        while ((piece = tool_reader_next(&reader, text, end, end == size)).kind != TOOL_MORE) {
            size_t bytes;
            const char *at = tool_piece_text(&piece, text, &bytes);
            if (piece.kind == TOOL_CALL && out->size) buf_char(out, '\n');
            if (piece.kind == TOOL_CALL || piece.kind == TOOL_ARGUMENTS) buf_add(out, at, bytes);
            if (piece.kind == TOOL_CALL) buf_char(out, ' ');
            if (piece.kind == TOOL_BARE) buf_str(out, "{}");
        }
        if (end == size) break;
    }
    buf_str(out, "");
}

/* Returns whether a line has this name and these arguments, whatever their order and spacing. */
static bool is_call(const char *line, const char *name, const char *arguments) {
    const char *blank = line ? strchr(line, ' ') : NULL;
    if (!blank || strncmp(line, name, strlen(name)) != 0 || line + strlen(name) != blank)
        return false;
    cJSON *read = cJSON_Parse(blank), *wanted = cJSON_Parse(arguments);
    bool same = cJSON_Compare(read, wanted, true);
    cJSON_Delete(read);
    cJSON_Delete(wanted);
    return same;
}

/* Renders two calls and reads them. Returns whether they are the same calls, whole and in pieces.
 */
static bool is_round_trip(const char *name, const struct chat *chat,
                          const struct oai_tool_style *style, bool single) {
    struct oai_case c;
    struct arena arena;
    struct chat_text text;
    struct fault fault = {0};
    struct buf whole, cut;
    case_open(&c);
    arena_open(&arena, (size_t)32 << 20);
    buf_open(&whole, 1 << 16);
    buf_open(&cut, 1 << 16);
    c.rules.tools = *style;
    cr_assert_eq(case_parse(&c, &oai_chat, body), 0, "%s: %s", name, c.error.message);
    cJSON_AddStringToObject(c.request.context, "eos_token", "</s>");
    cJSON_AddStringToObject(c.request.context, "bos_token", "<s>");
    struct chat_input input = {.context = c.request.context};
    bool rendered = chat_render(chat, &input, &arena, &text, &fault) == 0;
    const char *answer = rendered ? strstr(text.text, "zqquestion") : NULL;
    if (answer) read_in_steps(&c.request.tools, answer, SIZE_MAX / 2, &whole);
    bool same = answer != NULL;
    for (size_t step = 1; answer && step < 40; step += 6) {
        read_in_steps(&c.request.tools, answer, step, &cut);
        same = same && strcmp(cut.data, whole.data) == 0;
    }
    char *second = answer ? strchr(whole.data, '\n') : NULL;
    if (second) *second++ = '\0';
    same = same && is_call(whole.data, "get_weather", FIRST) &&
           (single ? !second : is_call(second, "f", SECOND) && !strchr(second, '\n'));
    if (!same)
        fprintf(stderr, "%s: %s: %s; %s\n%s\n", name, fault.text, answer ? whole.data : "",
                second ? second : "", answer ? answer : "");
    buf_close(&whole);
    buf_close(&cut);
    arena_close(&arena);
    case_close(&c);
    return same;
}

/* `form`: its name; NULL: any. Returns whether calls are read as they were rendered. */
static bool check_template(const char *name, const char *form, const char *source, bool single) {
    struct fault fault = {0};
    struct rendering r;
    cr_assert_eq(chat_open(source, strlen(source), &r.chat, &fault), 0, "%s", fault.text);
    struct tool_derived *derived = calloc(1, sizeof *derived);
    struct oai_tool_style style = {0};
    arena_open(&r.arena, (size_t)16 << 20);
    style.form = strstr(source, "tools") ? tool_find(source, render_probe, &r, derived)
                                         : tool_form_of(source);
    style.hides_calls = style.form && style.form != &derived->form &&
                        oai_can_write_calls(style.form) && tool_hides_calls(render_probe, &r);
    if (!style.form) {
        style.form = &tool_forms[TOOL_FORMAT_HERMES];
        style.generic = true;
    }
    const char *found = style.generic ? "generic" : tool_form_name(style.form);
    printf("%s: %s\n", name, found);
    if (form) cr_expect_str_eq(found, form, "%s", name);
    /* messages in channels are read from tokens (test_parse.c) */
    const bool channels = style.form->shape == TOOL_SHAPE_CHANNELS;
    bool same = !channels && is_round_trip(name, r.chat, &style, single);
    if (!channels) {
        check_form(style.form, "", false);
        check_form(style.form, ",\"tool_choice\":\"required\"", true);
        check_form(style.form,
                   ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}", true);
    }
    arena_close(&r.arena);
    chat_close(r.chat);
    free(derived);
    return same;
}

Test(tool_templates, what_they_render_of_calls_is_read_and_bound) {
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        char *file =
            templates[i].source ? NULL : read_file(HERE "templates/", templates[i].name, ".jinja");
        const char *source = file ? file : templates[i].source;
        cr_expect(check_template(templates[i].name, templates[i].form, source, templates[i].single),
                  "%s", templates[i].name);
        free(file);
    }
}

/* Templates under other licences, where they lie: how many are read as they are rendered. */
Test(tool_templates, those_under_other_licences) {
    const char *data = getenv("KEEPD_TEST_DATA");
    char folder[512];
    int count = 0, same = 0;
    struct dirent *entry;
    snprintf(folder, sizeof folder, "%s/templates/", data ? data : "");
    DIR *dir = data ? opendir(folder) : NULL;
    if (!dir) {
        printf("skip: KEEPD_TEST_DATA has no templates\n");
        return;
    }
    while ((entry = readdir(dir)) != NULL) {
        if (!strstr(entry->d_name, ".jinja")) continue;
        char *source = read_file(folder, entry->d_name, "");
        count++;
        same += check_template(entry->d_name, NULL, source, false);
        free(source);
    }
    closedir(dir);
    printf("calls of templates of $KEEPD_TEST_DATA: %d of %d\n", same, count);
}
