#include "client/line.h"

#include <histedit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "base/mem.h"

#define HISTORY_LINES 200

struct line {
    EditLine *edit; /* NULL: plain */
    History *history;
    bool cleared;
    char *text; /* from getline, or a copy of libedit's line; from malloc */
    size_t capacity;
};

static char *line_prompt(EditLine *edit) {
    static char text[] = "> ";
    (void)edit;
    return text;
}

/* In the terminal's editing mode Ctrl-C is a character like any other (setty below): it discards
 * the line and ends the call, so that no signal can interrupt something else. */
static unsigned char clear_line(EditLine *edit, int character) {
    struct line *line = NULL;
    (void)character;
    el_get(edit, EL_CLIENTDATA, &line);
    line->cleared = true;
    fputs("^C\n", stdout);
    return CC_NEWLINE;
}

static void open_editor(struct line *line) {
    HistEvent event;
    line->edit = el_init("keepd-chat", stdin, stdout, stderr);
    if (!line->edit) return;
    line->history = history_init();
    el_set(line->edit, EL_CLIENTDATA, line);
    el_set(line->edit, EL_PROMPT, line_prompt);
    el_set(line->edit, EL_EDITOR, "emacs");
    el_set(line->edit, EL_SIGNAL, 1);
    el_set(line->edit, EL_SETTY, "-d", "-isig", NULL);
    el_set(line->edit, EL_ADDFN, "clear-line", "Throws the line away", clear_line);
    el_set(line->edit, EL_BIND, "^C", "clear-line", NULL);
    if (!line->history) return;
    history(line->history, &event, H_SETSIZE, HISTORY_LINES);
    history(line->history, &event, H_SETUNIQUE, 1);
    el_set(line->edit, EL_HIST, history, line->history);
}

struct line *line_open(bool terminal) {
    struct line *line = mem_must_alloc(1, sizeof *line);
    if (terminal) open_editor(line);
    return line;
}

void line_close(struct line *line) {
    if (line->edit) el_end(line->edit);
    if (line->history) history_end(line->history);
    free(line->text);
    mem_free(line);
}

static enum line_end line_read_plain(struct line *line, const char **text) {
    ssize_t size = getline(&line->text, &line->capacity, stdin);
    if (size < 0) return LINE_ENDED;
    while (size > 0 && strchr("\r\n", line->text[size - 1])) line->text[--size] = '\0';
    *text = line->text;
    return LINE_READ;
}

enum line_end line_read(struct line *line, const char **text) {
    HistEvent event;
    int count = 0;
    if (!line->edit) return line_read_plain(line, text);
    line->cleared = false;
    const char *read = el_gets(line->edit, &count);
    if (line->cleared) return LINE_CLEARED;
    if (!read || count <= 0) return LINE_ENDED;
    free(line->text);
    line->text = strdup(read);
    if (!line->text) return LINE_ENDED;
    line->text[strcspn(line->text, "\r\n")] = '\0';
    if (*line->text && line->history) history(line->history, &event, H_ENTER, line->text);
    *text = line->text;
    return LINE_READ;
}
