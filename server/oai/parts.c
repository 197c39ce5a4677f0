/* The parts of a finished answer in order: reasoning, text, and calls with their arguments. */
#include <string.h>

#include "server/oai/kind.h"

/* Passes a part to the sink. The first part of a text has the scores of all its tokens. */
static void parts_give(struct oai_divider *d, struct oai_delta *delta) {
    delta->index = d->index;
    delta->begin = d->tokens_begin;
    delta->end = d->tokens_end;
    d->tokens_begin = d->tokens_end;
    d->sink.take(d->sink.to, delta);
}

/* Begins a call whose name and end are said by tokens. */
static void parts_begin_call(struct oai_divider *d, const struct oai_voice *voice, size_t at) {
    const char *name = d->answer->request->tools.names[voice->tool];
    d->calls.tools = &d->answer->request->tools;
    if (tool_reader_call(&d->calls, at))
        parts_give(d, &(struct oai_delta){.kind = TOOL_CALL,
                                          .call = d->calls.calls - 1,
                                          .text = name,
                                          .size = strlen(name)});
}

static void parts_end_call(struct oai_divider *d, const struct oai_voice *voice, size_t at) {
    bool given = d->calls.tools->parallel || d->calls.calls == 1;
    if (voice->bare && given)
        parts_give(d,
                   &(struct oai_delta){.kind = TOOL_BARE, .call = d->calls.calls - 1, .text = ""});
    tool_reader_resume(&d->calls, at);
}

void oai_divide_text(struct oai_divider *d, const struct oai_voice *voice, const char *text,
                     size_t begin, size_t end) {
    struct tool_piece piece;
    bool thinking = voice->thinking;
    if (begin == end || voice->hidden) return;
    if (thinking || !oai_reads_calls(d->answer)) {
        parts_give(d, &(struct oai_delta){.kind = TOOL_TEXT,
                                          .thinking = thinking,
                                          .text = text + begin,
                                          .size = end - begin});
        return;
    }
    d->calls.tools = &d->answer->request->tools;
    if (!voice->calling) tool_reader_resume(&d->calls, begin);
    while ((piece = tool_reader_next(&d->calls, text, end, true)).kind != TOOL_MORE) {
        struct oai_delta delta = {.kind = piece.kind, .call = d->calls.calls - 1};
        delta.text = tool_piece_text(&piece, text, &delta.size);
        parts_give(d, &delta);
    }
}

/* Divides a choice into its parts. A tag's score belongs to the text after it, as in a stream. */
bool oai_divide(const struct oai_answer *answer, int index, struct oai_sink sink) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    struct oai_divider d = {.answer = answer, .index = index, .sink = sink};
    d.calls.tools = &answer->request->tools;
    size_t safe = oai_shown_size(answer, index);
    size_t at = 0, said = 0; /* text[said, at) is of one voice and was not passed on yet */
    struct oai_voice voice = oai_voice_open(answer, index);
    uint32_t count = oai_token_count(choice);
    for (uint32_t i = 0; i < count; i++) {
        size_t end = choice->tokens[i].text_end < safe ? choice->tokens[i].text_end : safe;
        struct oai_voice last = voice;
        d.tokens_end = i;
        if (oai_voice_step(&voice, answer, choice->tokens[i].token)) {
            oai_divide_text(&d, &last, choice->text, said, at);
            if (last.calling) parts_end_call(&d, &last, at);
            if (voice.calling) parts_begin_call(&d, &voice, end);
            said = end;
        } else {
            said += oai_voice_skip(&voice, choice->text + at, end - at);
        }
        at = end;
    }
    d.tokens_end = oai_shown_count(answer, index);
    oai_divide_text(&d, &voice, choice->text, said, at);
    return tool_reader_called(&d.calls);
}
