#include "server/oai/tool_form.h"

#include <string.h>

/* ---- The table ---- */

static const struct constrain_tags coder_tags = {"<parameter=",  ">", "", "", "\n",
                                                 "</parameter>", "\n"};
static const struct constrain_tags seed_tags = {"<parameter=",  ">", "", "", "",
                                                "</parameter>", "\n"};
static const struct constrain_tags glm45_tags = {"<arg_key>", "</arg_key>",   "\n", "<arg_value>",
                                                 "",          "</arg_value>", "\n"};
static const struct constrain_tags glm47_tags = {"<arg_key>", "</arg_key>",   "", "<arg_value>",
                                                 "",          "</arg_value>", ""};
static const struct constrain_tags minimax_tags = {"<parameter name=\"", "\">", "", "", "",
                                                   "</parameter>",       "\n"};

const struct tool_form tool_forms[TOOL_FORMATS] = {
    [TOOL_FORMAT_HERMES] = {.name = "hermes",
                            .shape = TOOL_SHAPE_TAGGED,
                            .open = "",
                            .before = "<tool_call>\n{\"name\": \"",
                            .arguments = "\", \"arguments\": ",
                            .after = "}\n</tool_call>",
                            .between = "\n",
                            .close = ""},
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

/* {"name behind the tag. In a template's source a quote may be written \", a line break \n, and the
 * text may go on in another expression: " }} {{- '. */
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

/* Words that a source has to hold, tried in this order. */
static const struct tool_trace {
    enum tool_format format;
    bool (*is)(const char *source); /* NULL: the words decide */
    const char *words[3];
} tool_traces[] = {
    {TOOL_FORMAT_HERMES, is_hermes, {0}},
    {TOOL_FORMAT_HARMONY, NULL, {"<|channel|>commentary", "functions."}},
    {TOOL_FORMAT_SEED_OSS, NULL, {"<seed:tool_call>", "<function=", "<parameter="}},
    {TOOL_FORMAT_QWEN3_CODER, NULL, {"<function=", "<parameter="}},
    {TOOL_FORMAT_MINIMAX_M2, NULL, {"<minimax:tool_call>", "<invoke name="}},
    {TOOL_FORMAT_GLM47, NULL, {"<tool_call>", "</arg_key><arg_value>"}},
    {TOOL_FORMAT_GLM45, NULL, {"<tool_call>", "<arg_key>", "<arg_value>"}},
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

/* Finds the next mark of *text and moves *text behind it. false: there is none. */
static bool next_mark(const char **text, struct tool_mark *mark) {
    const char *at = *text;
    while (is_blank_mark(*at)) at++;
    mark->text = at;
    while (*at && *at != '\n' && !(at > mark->text && at[-1] == '>' && *at == '<')) at++;
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
