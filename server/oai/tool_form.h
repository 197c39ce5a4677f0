/* The forms in which models write calls of tools: a row for each. The row has everything that
 * differs between forms; code that reads, writes or describes calls asks the row. Code for one kind
 * of form depends on the row's shape.
 *
 * A call is written as
 *   open  before NAME arguments ARGUMENTS after  (between before NAME ... after)*  close
 *
 * TOOL_ANY in these texts stands for an identifier or a number. The marks of a form are the parts
 * of these texts between line breaks, and between brackets that follow each other, such as '>' and
 * '<'. A reader accepts any white space between marks. Pure; any thread. */
#ifndef KEEPD_SERVER_OAI_TOOL_FORM_H
#define KEEPD_SERVER_OAI_TOOL_FORM_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/engine_text.h"

enum tool_shape {
    TOOL_SHAPE_TAGGED,  /* an object {"name": ..., "arguments": ...} between tags */
    TOOL_SHAPE_BARE,    /* such an object without tags */
    TOOL_SHAPE_LISTED,  /* [TOOL_CALLS] and a list of such objects, or NAME[ARGS]{...} */
    TOOL_SHAPE_NAMED,   /* the name stands between marks */
    TOOL_SHAPE_CHANNELS /* a message to the function (channels.c) */
};

struct tool_form {
    const char *name; /* the name in --tool-call-parser */
    enum tool_shape shape;
    const char *open, *before, *arguments, *after, *between, *close;
    const struct constrain_tags *tags;
    const struct constrain_notation *notation; /* the brackets of the arguments are part of them;
                                                  both NULL: arguments are JSON */
    bool bare;      /* TAGGED: the object is a call without its tag, too, where it begins a line */
    bool short_ids; /* the templates accept only ids of 9 letters and digits */
};

enum tool_format {
    TOOL_FORMAT_HERMES,
    TOOL_FORMAT_LLAMA3,
    TOOL_FORMAT_MISTRAL,
    TOOL_FORMAT_QWEN3_CODER,
    TOOL_FORMAT_SEED_OSS,
    TOOL_FORMAT_GLM45,
    TOOL_FORMAT_GLM47,
    TOOL_FORMAT_MINIMAX_M2,
    TOOL_FORMAT_MINIMAX_M3,
    TOOL_FORMAT_DEEPSEEK_V3,
    TOOL_FORMAT_DEEPSEEK_V31,
    TOOL_FORMAT_DEEPSEEK_V32,
    TOOL_FORMAT_KIMI_K2,
    TOOL_FORMAT_GRANITE,
    TOOL_FORMAT_COMMAND,
    TOOL_FORMAT_FUNCTIONARY,
    TOOL_FORMAT_LFM2,
    TOOL_FORMAT_GEMMA4,
    TOOL_FORMAT_HARMONY,
    TOOL_FORMATS
};
extern const struct tool_form tool_forms[TOOL_FORMATS];

/* Returns the form of this name; NULL: there is none. */
const struct tool_form *tool_form_named(const char *name);
/* Returns the name for people; "none" for NULL. */
const char *tool_form_name(const struct tool_form *form);
/* Returns the form of calls that a chat template (its source; NULL = none) uses; NULL: none of
 * these. */
const struct tool_form *tool_form_of(const char *chat_template);

/* Returns whether several calls stand between one pair of tags. */
static inline bool tool_form_is_section(const struct tool_form *form) {
    return form->open[0] != '\0';
}

/* Returns whether calls are marked, so that text may stand before, between and after them. */
static inline bool tool_form_is_marked(const struct tool_form *form) {
    return form->shape == TOOL_SHAPE_TAGGED || form->shape == TOOL_SHAPE_NAMED;
}

#define TOOL_ANY '\1'

struct tool_mark {
    const char *text;
    size_t size;
};
/* Returns whether text would hardly contain this mark by chance. */
static inline bool tool_mark_is_strong(const struct tool_mark *mark) {
    for (size_t i = 0; i < mark->size; i++)
        if (mark->text[i] == '<' || mark->text[i] == '|' ||
            (mark->text[i] == '[' && mark->size > 1))
            return true;
    return false;
}

#define TOOL_MARKS_MAX 8
/* Writes the marks of two texts that follow each other; returns how many. */
int tool_form_marks(const char *first, const char *second, struct tool_mark out[TOOL_MARKS_MAX]);
/* Writes the marks in front of a name: the last one begins it, the others may be missing. */
static inline int tool_form_opens(const struct tool_form *form, struct tool_mark *out) {
    return tool_form_marks(form->open, form->before, out);
}
/* Writes the marks after arguments. */
static inline int tool_form_closes(const struct tool_form *form, struct tool_mark *out) {
    return tool_form_marks(form->after, form->close, out);
}

#endif
