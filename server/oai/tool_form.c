#include "server/oai/tool_form.h"

#include <string.h>

/* ---- The table ---- */

static const struct constrain_tags coder_tags = {.open = "<parameter=",
                                                 .named = ">",
                                                 .gap = "",
                                                 .value = "",
                                                 .line = "\n",
                                                 .close = "</parameter>",
                                                 .after = "\n"};
static const struct constrain_tags seed_tags = {.open = "<parameter=",
                                                .named = ">",
                                                .gap = "",
                                                .value = "",
                                                .line = "",
                                                .close = "</parameter>",
                                                .after = "\n"};
static const struct constrain_tags glm45_tags = {.open = "<arg_key>",
                                                 .named = "</arg_key>",
                                                 .gap = "\n",
                                                 .value = "<arg_value>",
                                                 .line = "",
                                                 .close = "</arg_value>",
                                                 .after = "\n"};
static const struct constrain_tags glm47_tags = {.open = "<arg_key>",
                                                 .named = "</arg_key>",
                                                 .gap = "",
                                                 .value = "<arg_value>",
                                                 .line = "",
                                                 .close = "</arg_value>",
                                                 .after = ""};
static const struct constrain_tags minimax_tags = {.open = "<parameter name=\"",
                                                   .named = "\">",
                                                   .gap = "",
                                                   .value = "",
                                                   .line = "",
                                                   .close = "</parameter>",
                                                   .after = "\n"};
#define M3 "]<]minimax[>["
static const struct constrain_tags minimax_m3_tags = {.open = M3 "<",
                                                      .named = ">",
                                                      .gap = "",
                                                      .value = "",
                                                      .line = "",
                                                      .close = M3 "</",
                                                      .after = "",
                                                      .behind_close = ">",
                                                      .item = "item"};
static const struct constrain_tags dsml_tags = {
    .open = "<｜DSML｜parameter name=\"",
    .named = "\" string=\"",
    .gap = "",
    .value = "",
    .typed = {"false\">", "false\">", "false\">", "true\">", "false\">", "false\">"},
    .line = "",
    .close = "</｜DSML｜parameter>",
    .after = "\n"};

static const struct constrain_notation python = {
    .brackets = "()", .assign = "=", .space = " ", .words = {"None", "False", "True"}};
static const struct constrain_notation gemma = {.brackets = "{}",
                                                .assign = ":",
                                                .mark = "<|\"|>",
                                                .space = "",
                                                .words = {"null", "false", "true"}};

const struct tool_form tool_forms[TOOL_FORMATS] = {
    [TOOL_FORMAT_HERMES] = {.name = "hermes",
                            .shape = TOOL_SHAPE_TAGGED,
                            .open = "",
                            .before = "<tool_call>\n{\"name\": \"",
                            .arguments = "\", \"arguments\": ",
                            .after = "}\n</tool_call>",
                            .between = "\n",
                            .close = "",
                            .bare = true},
    [TOOL_FORMAT_LLAMA3] = {.name = "llama3",
                            .shape = TOOL_SHAPE_BARE,
                            .open = "",
                            .before = "{\"name\": \"",
                            .arguments = "\", \"parameters\": ",
                            .after = "}",
                            .between = "; ",
                            .close = ""},
    [TOOL_FORMAT_MISTRAL] = {.name = "mistral",
                             .shape = TOOL_SHAPE_LISTED,
                             .open = "[",
                             .before = "{\"name\": \"",
                             .arguments = "\", \"arguments\": ",
                             .after = "}",
                             .between = ", ",
                             .close = "]",
                             .short_ids = true},
    [TOOL_FORMAT_QWEN3_CODER] = {.name = "qwen3_coder",
                                 .shape = TOOL_SHAPE_NAMED,
                                 .open = "",
                                 .before = "<tool_call>\n<function=",
                                 .arguments = ">\n",
                                 .after = "</function>\n</tool_call>",
                                 .between = "\n",
                                 .close = "",
                                 .tags = &coder_tags},
    [TOOL_FORMAT_SEED_OSS] = {.name = "seed_oss",
                              .shape = TOOL_SHAPE_NAMED,
                              .open = "",
                              .before = "<seed:tool_call>\n<function=",
                              .arguments = ">\n",
                              .after = "</function>\n</seed:tool_call>",
                              .between = "\n",
                              .close = "",
                              .tags = &seed_tags},
    [TOOL_FORMAT_GLM45] = {.name = "glm45",
                           .shape = TOOL_SHAPE_NAMED,
                           .open = "",
                           .before = "<tool_call>",
                           .arguments = "\n",
                           .after = "</tool_call>",
                           .between = "\n",
                           .close = "",
                           .tags = &glm45_tags},
    [TOOL_FORMAT_GLM47] = {.name = "glm47",
                           .shape = TOOL_SHAPE_NAMED,
                           .open = "",
                           .before = "<tool_call>",
                           .arguments = "",
                           .after = "</tool_call>",
                           .between = "",
                           .close = "",
                           .tags = &glm47_tags},
    [TOOL_FORMAT_MINIMAX_M2] = {.name = "minimax_m2",
                                .shape = TOOL_SHAPE_NAMED,
                                .open = "<minimax:tool_call>\n",
                                .before = "<invoke name=\"",
                                .arguments = "\">\n",
                                .after = "</invoke>",
                                .between = "\n",
                                .close = "\n</minimax:tool_call>",
                                .tags = &minimax_tags},
    [TOOL_FORMAT_MINIMAX_M3] = {.name = "minimax_m3",
                                .shape = TOOL_SHAPE_NAMED,
                                .open = M3 "<tool_call>\n",
                                .before = M3 "<invoke name=\"",
                                .arguments = "\">",
                                .after = M3 "</invoke>\n",
                                .between = "",
                                .close = M3 "</tool_call>",
                                .tags = &minimax_m3_tags},
    [TOOL_FORMAT_DEEPSEEK_V3] = {.name = "deepseek_v3",
                                 .shape = TOOL_SHAPE_NAMED,
                                 .open = "<｜tool▁calls▁begin｜>",
                                 .before = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                                 .arguments = "\n```json\n",
                                 .after = "\n```<｜tool▁call▁end｜>",
                                 .between = "\n",
                                 .close = "<｜tool▁calls▁end｜>"},
    [TOOL_FORMAT_DEEPSEEK_V31] = {.name = "deepseek_v31",
                                  .shape = TOOL_SHAPE_NAMED,
                                  .open = "<｜tool▁calls▁begin｜>",
                                  .before = "<｜tool▁call▁begin｜>",
                                  .arguments = "<｜tool▁sep｜>",
                                  .after = "<｜tool▁call▁end｜>",
                                  .between = "",
                                  .close = "<｜tool▁calls▁end｜>"},
    [TOOL_FORMAT_DEEPSEEK_V32] = {.name = "deepseek_v32",
                                  .shape = TOOL_SHAPE_NAMED,
                                  .open = "<｜DSML｜function_calls>\n",
                                  .before = "<｜DSML｜invoke name=\"",
                                  .arguments = "\">\n",
                                  .after = "</｜DSML｜invoke>",
                                  .between = "\n",
                                  .close = "\n</｜DSML｜function_calls>",
                                  .tags = &dsml_tags},
    [TOOL_FORMAT_KIMI_K2] = {.name = "kimi_k2",
                             .shape = TOOL_SHAPE_NAMED,
                             .open = "<|tool_calls_section_begin|>",
                             .before = "<|tool_call_begin|>functions.",
                             .arguments = ":\1<|tool_call_argument_begin|>",
                             .after = "<|tool_call_end|>",
                             .between = "",
                             .close = "<|tool_calls_section_end|>"},
    [TOOL_FORMAT_GRANITE] = {.name = "granite",
                             .shape = TOOL_SHAPE_TAGGED,
                             .open = "<|tool_call|>[",
                             .before = "{\"name\": \"",
                             .arguments = "\", \"arguments\": ",
                             .after = "}",
                             .between = ", ",
                             .close = "]"},
    [TOOL_FORMAT_COMMAND] = {.name = "command",
                             .shape = TOOL_SHAPE_TAGGED,
                             .open = "<|START_ACTION|>[\n    ",
                             .before = "{\"tool_call_id\": \"\1\", \"tool_name\": \"",
                             .arguments = "\", \"parameters\": ",
                             .after = "}",
                             .between = ",\n    ",
                             .close = "\n]<|END_ACTION|>"},
    [TOOL_FORMAT_FUNCTIONARY] = {.name = "functionary",
                                 .shape = TOOL_SHAPE_NAMED,
                                 .open = "",
                                 .before = "<function=",
                                 .arguments = ">",
                                 .after = "</function>",
                                 .between = "",
                                 .close = ""},
    [TOOL_FORMAT_LFM2] = {.name = "lfm2",
                          .shape = TOOL_SHAPE_NAMED,
                          .open = "<|tool_call_start|>[",
                          .before = "",
                          .arguments = "",
                          .after = "",
                          .between = ", ",
                          .close = "]<|tool_call_end|>",
                          .notation = &python},
    [TOOL_FORMAT_GEMMA4] = {.name = "gemma4",
                            .shape = TOOL_SHAPE_NAMED,
                            .open = "",
                            .before = "<|tool_call>call:",
                            .arguments = "",
                            .after = "<tool_call|>",
                            .between = "",
                            .close = "",
                            .notation = &gemma},
    [TOOL_FORMAT_HARMONY] = {.name = "harmony",
                             .shape = TOOL_SHAPE_CHANNELS,
                             .open = "",
                             .before = "",
                             .arguments = "",
                             .after = "",
                             .between = "",
                             .close = ""},
};

const struct tool_form *tool_form_named(const char *name) {
    for (int i = 0; i < TOOL_FORMATS; i++)
        if (strcmp(tool_forms[i].name, name) == 0) return &tool_forms[i];
    return NULL;
}

const char *tool_form_name(const struct tool_form *form) {
    return form ? form->name : "none";
}

/* ---- Templates ---- */

/* Returns whether {"name follows the tag. In a template's source a quote may be written \", a line
 * break \n, and the text may go on in another expression: " }} {{- '. */
static bool is_object_with_name(const char *at) {
    for (;; at++) {
        if (at[0] == '{' && strncmp(at + (at[1] == '\\' ? 2 : 1), "\"name", 5) == 0) return true;
        if (strncmp(at, "\\n", 2) == 0)
            at++;
        else if (!*at || !strchr(" \t\r\n\"'{}-", *at))
            return false;
    }
}

static bool is_hermes(const char *source) {
    static const char tag[] = "<tool_call>";
    for (const char *at = source; (at = strstr(at, tag)) != NULL;) {
        at += sizeof tag - 1;
        if (is_object_with_name(at)) return true;
    }
    return false;
}

static bool is_llama3(const char *source) {
    return strstr(source, "{\"name\": function name, \"parameters\": ") ||
           strstr(source, "{\\\"name\\\": function name, \\\"parameters\\\": ");
}

/* Words that the source must contain, tried in this order. */
static const struct tool_trace {
    enum tool_format format;
    bool (*is)(const char *source); /* NULL: the words decide */
    const char *words[3];
} tool_traces[] = {
    {TOOL_FORMAT_HERMES, is_hermes, {0}},
    {TOOL_FORMAT_HARMONY, NULL, {"<|channel|>commentary", "functions."}},
    {TOOL_FORMAT_SEED_OSS, NULL, {"<seed:tool_call>", "<function=", "<parameter="}},
    {TOOL_FORMAT_QWEN3_CODER, NULL, {"<function=", "<parameter="}},
    {TOOL_FORMAT_MINIMAX_M3, NULL, {M3, "<invoke name="}},
    {TOOL_FORMAT_MINIMAX_M2, NULL, {"<minimax:tool_call>", "<invoke name="}},
    {TOOL_FORMAT_GLM47, NULL, {"<tool_call>", "</arg_key><arg_value>"}},
    {TOOL_FORMAT_GLM45, NULL, {"<tool_call>", "<arg_key>", "<arg_value>"}},
    {TOOL_FORMAT_DEEPSEEK_V32, NULL, {"DSML", "function_calls", "parameter"}},
    {TOOL_FORMAT_DEEPSEEK_V3, NULL, {"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"}},
    {TOOL_FORMAT_DEEPSEEK_V31, NULL, {"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"}},
    {TOOL_FORMAT_KIMI_K2, NULL, {"<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"}},
    {TOOL_FORMAT_COMMAND, NULL, {"<|START_ACTION|>", "tool_name"}},
    {TOOL_FORMAT_GEMMA4, NULL, {"<|tool_call>call:", "<tool_call|>"}},
    {TOOL_FORMAT_LFM2, NULL, {"<|tool_list_start|>"}},
    {TOOL_FORMAT_LFM2, NULL, {"<|tool_call_start|>["}},
    {TOOL_FORMAT_LFM2, NULL, {"List of tools: [", "keep_past_thinking"}},
    {TOOL_FORMAT_GRANITE, NULL, {"<|tool_call|>", "<|start_of_role|>"}},
    {TOOL_FORMAT_MISTRAL, NULL, {"[TOOL_CALLS]"}},
    {TOOL_FORMAT_LLAMA3, is_llama3, {0}},
};

const struct tool_form *tool_form_of(const char *chat_template) {
    if (!chat_template) return NULL;
    for (size_t i = 0; i < sizeof tool_traces / sizeof *tool_traces; i++) {
        const struct tool_trace *trace = &tool_traces[i];
        bool found = !trace->is || trace->is(chat_template);
        for (int k = 0; k < 3 && trace->words[k]; k++)
            found = found && strstr(chat_template, trace->words[k]);
        if (found) return &tool_forms[trace->format];
    }
    return NULL;
}

/* ---- Marks ---- */

static bool is_blank_mark(char c) {
    return c == ' ' || c == '\n';
}

/* Returns whether a mark that began earlier ends in front of `at`. MiniMax M3's ]<]minimax[>[ is a
 * part of one, not three. */
static bool ends_mark(const char *begin, const char *at) {
    const char before = at[-1], c = *at;
    if (c == '<' && at[1] == ']') return false;
    if (c == '[' && at - begin > 1 && at[-2] == '[') return false;
    return (before == '>' && (c == '<' || c == '[' || c == '{')) ||
           ((before == ']' || before == '}') && c == '<');
}

/* Finds the next mark of *text and moves *text past it. false: there is none. */
static bool next_mark(const char **text, struct tool_mark *mark) {
    const char *at = *text;
    while (is_blank_mark(*at)) at++;
    mark->text = at;
    while (*at && *at != '\n' && !(at > mark->text && ends_mark(mark->text, at))) at++;
    *text = at;
    while (at > mark->text && is_blank_mark(at[-1])) at--;
    mark->size = (size_t)(at - mark->text);
    return mark->size > 0;
}

int tool_form_marks(const char *first, const char *second, struct tool_mark out[TOOL_MARKS_MAX]) {
    int count = 0;
    while (count < TOOL_MARKS_MAX &&
           (next_mark(&first, &out[count]) || next_mark(&second, &out[count])))
        count++;
    return count;
}
