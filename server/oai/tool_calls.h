/* Calls of tools in the text of an answer, in the forms that the families we serve are trained
 * on (their chat templates say so to the model):
 *
 *   hermes   <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>   Qwen2.5, Qwen3, Hermes
 *            {"name": "f", "arguments": {...}}, also in a ``` fence or a list  Qwen2.5-Coder
 *   llama3   {"name": "f", "parameters": {...}}, also behind text           Llama 3.1 to 3.3
 *   mistral  [TOOL_CALLS][{"name": "f", "arguments": {...}}]                Mistral, Ministral
 *            [TOOL_CALLS]f[ARGS]{...}                                       since 2025
 *   qwen3_coder  <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n
 *                </tool_call>                                               Qwen3-Coder
 *   lfm2     <|tool_call_start|>[f(a="x", b=1)]<|tool_call_end|>             LFM2
 *   gemma4   <|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>                Gemma 4
 *   harmony  a message to functions.f in a channel of its own              gpt-oss
 *
 * The marks of a form that are special tokens are made part of answers (engine_show_tokens), so
 * that they are in the text. Tags that are no marks of the form may leave none: calls of llama3 and
 * mistral are found without them, too. harmony is read from the tokens (channels.c), which say
 * where a call begins and ends; here its arguments are text up to that end.
 *
 * Members of the object may stand before and behind the arguments and are left out; the name may
 * stand behind them, too. Arguments may be a string that holds an object: its text is what the
 * string says.
 *
 * The reader is given the text as it grows and says what each part is. What it says does not depend
 * on how the text was cut into pieces, and what was said is never taken back. A call is reported
 * once its name is that of a given tool and its arguments have begun, or the call has ended without
 * any. Until then the text is held back, at most TOOL_HELD_MAX bytes; if it turns out to be no
 * call, it is passed on as text. Arguments are passed on up to their closing brace as the model
 * wrote them. If they stop being JSON, everything up to the call's end belongs to them, because
 * nothing shows where they should have ended. Arguments of qwen3_coder are tags, and those of lfm2
 * and gemma4 literals of another notation, which are given as the JSON object that they mean
 * (tool_tags.h, tool_literal.h).
 *
 * Pure; any thread. Nothing is copied: pieces are offsets into the caller's text, but for
 * characters that a string wrote as escapes. */
#ifndef KEEPD_SERVER_OAI_TOOL_CALLS_H
#define KEEPD_SERVER_OAI_TOOL_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/oai/tool_form.h"
#include "server/oai/tool_json.h"
#include "server/oai/tool_literal.h"
#include "server/oai/tool_piece.h"
#include "server/oai/tool_tags.h"

#define TOOL_HELD_MAX 512

/* Tools that a request lets the model call. */
struct tool_set {
    const struct tool_form *form; /* NULL: answers are not searched for calls */
    const char *const *names;
    int count;
    bool parallel; /* false: calls after the first are left out */
    /* forms with tags: for each tool its parameters that do not allow all types (tool_tags.h) */
    const struct tool_parameter *const *parameters;
};

/* All zero except `tools` before the first byte. */
struct tool_reader {
    const struct tool_set *tools; /* borrowed */
    size_t at;                    /* the text before this offset has been dealt with */
    uint32_t calls;               /* calls that have begun */
    bool spoken;                  /* there was text since the beginning, or since the last call */
    uint32_t depth;               /* open brackets in that text */
    bool fenced, listed;          /* hermes: calls without tags stand in a fence, in a list */
    enum {
        TOOL_IN_TEXT,
        TOOL_IN_ARGUMENTS, /* an object */
        TOOL_IN_STRING,    /* a string that holds an object */
        TOOL_IN_REST,      /* arguments that are not JSON */
        TOOL_IN_BARE,
        TOOL_IN_LITERAL, /* arguments in another notation: tool_literal.h */
        TOOL_IN_TAGS,    /* arguments in tags: tool_tags.h */
        TOOL_IN_MEMBERS, /* in the call's object, after the arguments */
        TOOL_IN_TAIL     /* after the call's object */
    } phase;
    struct tool_json json;
    struct tool_tags tags;
    struct tool_literal literal;
    bool inside; /* a section of calls has begun and has not ended */
    int closed;  /* marks after the arguments that were searched for */
};

/* Returns the next piece of text[at, end). Call it until it returns TOOL_MORE. `last`: the text
 * ends at `end`, so nothing is held back. `text` may move between calls, but its bytes before `end`
 * must not change. */
struct tool_piece tool_reader_next(struct tool_reader *reader, const char *text, size_t end,
                                   bool last);
/* Continues with the text from `at`, after a text whose end was passed as `last`. */
void tool_reader_resume(struct tool_reader *reader, size_t at);
/* Begins a call of harmony at `at`; tool_reader_resume ends it. false: calls after the first are
 * left out, and so is this one. */
bool tool_reader_call(struct tool_reader *reader, size_t at);
/* Returns whether there are calls and the last one is whole. */
bool tool_reader_called(const struct tool_reader *reader);

#endif
