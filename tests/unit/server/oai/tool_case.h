/* Chat templates and forms of calls for the tests of tools. */
#ifndef KEEPD_TESTS_UNIT_SERVER_OAI_TOOL_CASE_H
#define KEEPD_TESTS_UNIT_SERVER_OAI_TOOL_CASE_H

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "oai_case.h"
#include "server/oai/tool_derive.h"
#include "tests/unit/constrain/language.h"
#include "text/chat.h"

#define HERE KEEPD_SOURCE_DIR "/tests/data/jinja/"

static inline char *read_file(const char *folder, const char *name, const char *end) {
    char path[512], *data = NULL;
    size_t room = 0;
    snprintf(path, sizeof path, "%s%s%s", folder, name, end);
    FILE *file = fopen(path, "r");
    cr_assert(file, "%s", path);
    ssize_t size = getdelim(&data, &room, '\0', file);
    cr_assert(size > 0, "%s", path);
    fclose(file);
    return data;
}

static inline struct chat *open_template(const char *name) {
    char *source = read_file(HERE "templates/", name, ".jinja");
    struct fault fault = {0};
    struct chat *chat;
    cr_assert_eq(chat_open(source, strlen(source), &chat, &fault), 0, "%s", fault.text);
    free(source);
    return chat;
}

struct rendering {
    struct chat *chat;
    struct arena arena;
};

static inline const char *render_probe(void *arg, const cJSON *context) {
    struct rendering *r = arg;
    struct chat_input input = {.context = context};
    struct chat_text text;
    struct fault fault;
    return chat_render(r->chat, &input, &r->arena, &text, &fault) ? NULL : text.text;
}

/* Returns the arguments of all calls, with a ';' behind each, in `out`. */
static inline void read_calls(const struct tool_set *tools, const char *text, struct buf *out) {
    struct tool_reader reader = {.tools = tools};
    struct tool_piece piece;
    buf_clear(out);
    while ((piece = tool_reader_next(&reader, text, strlen(text), true)).kind != TOOL_MORE) {
        size_t size;
        const char *at = tool_piece_text(&piece, text, &size);
        if (piece.kind == TOOL_CALL) buf_char(out, ';');
        if (piece.kind == TOOL_ARGUMENTS) buf_add(out, at, size);
        if (piece.kind == TOOL_TEXT) buf_str(out, "TEXT");
    }
    buf_str(out, "");
}

/* Writes an id in the place of each TOOL_ANY. */
static inline void write_ids(struct buf *text) {
    for (size_t i = 0; i < text->size; i++)
        if (text->data[i] == TOOL_ANY) text->data[i] = '0';
}

/* Writes a call of f as its form says, with a text in the argument s. */
static inline void write_call(const struct tool_form *form, const char *text, struct buf *out) {
    const struct constrain_tags *tags = form->tags;
    buf_fmt(out, "%sf%s", form->before, form->arguments);
    const struct constrain_notation *notation = form->notation;
    if (notation)
        buf_fmt(out, "%cs%s%s%s%s%c", notation->brackets[0], notation->assign,
                notation->mark ? notation->mark : "\"", text,
                notation->mark ? notation->mark : "\"", notation->brackets[1]);
    else if (tags)
        buf_fmt(out, "%ss%s%s%s%s%s%s%s%s%s%s", tags->open, tags->named, tags->gap,
                tags->typed[0] ? tags->typed[3] : tags->value, tags->line, text, tags->line,
                tags->close, tags->behind_close ? "s" : "",
                tags->behind_close ? tags->behind_close : "", tags->after);
    else
        buf_fmt(out, "{\"s\": \"%s\"}", text);
    buf_str(out, form->after);
    write_ids(out);
}

static inline void check_form(const struct tool_form *form, const char *choice, bool promised) {
    char body[512];
    struct oai_case c;
    struct buf text, out;
    snprintf(body, sizeof body,
             "{" MESSAGES "%s,\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\","
             "\"strict\":true,\"parameters\":{\"type\":\"object\",\"properties\":{\"s\":{\"type\":"
             "\"string\",\"maxLength\":3}},\"required\":[\"s\"]}}}]}",
             choice);
    buf_open(&text, 4096);
    buf_open(&out, 4096);
    case_open(&c);
    c.rules.tools.form = form;
    cr_assert_eq(case_parse(&c, &oai_chat, body), 0, "%s: %s", form->name, c.error.message);
    cr_assert(c.request.constraint);
    struct language l = language_of(c.request.constraint);
    cr_assert_eq(l.rc, 0, "%s", l.fault.text);
    cr_expect_eq(language_holds(&l, "So."), !promised, "%s", form->name);
    buf_str(&text, form->open);
    write_call(form, "abc", &text);
    const bool several = strchr(choice, '{') == NULL; /* a named tool is called once */
    if (several) buf_str(&text, form->between);
    if (several) write_call(form, "de", &text);
    buf_str(&text, form->close);
    write_ids(&text);
    cr_expect(language_holds(&l, text.data), "%s: %s", form->name, text.data);
    read_calls(&c.request.tools, text.data, &out);
    cr_expect_str_eq(out.data, several ? ";{\"s\": \"abc\"};{\"s\": \"de\"}" : ";{\"s\": \"abc\"}",
                     "%s", form->name);
    buf_clear(&text);
    buf_str(&text, form->open);
    write_call(form, "abcd", &text);
    buf_str(&text, form->close);
    cr_expect_not(language_holds(&l, text.data), "%s: %s", form->name, text.data);
    language_close(&l);
    case_close(&c);
    buf_close(&text);
    buf_close(&out);
}

#endif
