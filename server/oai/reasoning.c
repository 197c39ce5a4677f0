/* Separates reasoning from the answer. The tags are single tokens, so the text is not searched, and
 * text that looks like a tag is only text.
 */
#include <string.h>

#include "server/oai/fields.h"

struct oai_think oai_find_think(const struct engine *engine) {
    struct oai_think think = {oai_find_token(engine, "<think>"),
                              oai_find_token(engine, "</think>")};
    if (think.begin < 0 || think.end < 0) think = (struct oai_think){-1, -1};
    return think;
}

bool oai_splits_reasoning(const struct oai_answer *answer) {
    const struct oai_rules *rules = answer->rules;
    return (rules->think.begin >= 0 || (rules->channels.known && rules->channels.split)) &&
           answer->request->split_reasoning;
}

static bool reasoning_is_blank(const struct engine *engine, int32_t id) {
    const char *bytes = "";
    size_t size = engine_token_bytes(engine, id, &bytes);
    for (size_t i = 0; i < size; i++)
        if (bytes[i] == '\0' || !strchr(" \t\r\n", bytes[i])) return false;
    return true;
}

struct oai_voice oai_voice_open(const struct oai_answer *answer, int index) {
    const struct engine_request *request = &oai_job_of(answer, index)->request;
    struct oai_voice voice = {0};
    int32_t last = request->prompt_count - 1;
    if (oai_reads_channels(answer)) return oai_channels_open(answer, request);
    if (!oai_splits_reasoning(answer) || answer->rules->think.begin < 0) return voice;
    while (last > 0 && reasoning_is_blank(answer->engine, request->prompt[last])) last--;
    voice.thinking = voice.fresh = request->prompt[last] == answer->rules->think.begin;
    voice.may_begin = true; /* some models repeat the tag that the template has opened */
    return voice;
}

bool oai_voice_step(struct oai_voice *voice, const struct oai_answer *answer, int32_t token) {
    const struct oai_think *think = &answer->rules->think;
    if (voice->channels) return oai_channels_step(voice, answer, token);
    bool begins = voice->may_begin && token == think->begin;
    bool ends = voice->thinking && token == think->end;
    if (begins || ends) {
        *voice = (struct oai_voice){
            .thinking = begins, .fresh = true, .reasoning_tokens = voice->reasoning_tokens};
        return true;
    }
    voice->reasoning_tokens += voice->thinking;
    if (voice->may_begin) voice->may_begin = reasoning_is_blank(answer->engine, token);
    return false;
}

bool oai_voice_may_think(const struct oai_voice *voice) {
    return voice->thinking || voice->may_begin || voice->channels;
}

bool oai_has_thought(const struct oai_answer *answer, int index) {
    const struct engine_choice *choice = oai_choice_of(answer, index);
    if (!oai_splits_reasoning(answer)) return false;
    struct oai_voice voice = oai_voice_open(answer, index);
    uint32_t count = oai_token_count(choice);
    for (uint32_t i = 0; i < count && !voice.thinking && oai_voice_may_think(&voice); i++)
        oai_voice_step(&voice, answer, choice->tokens[i].token);
    return voice.thinking;
}

size_t oai_voice_skip(struct oai_voice *voice, const char *text, size_t size) {
    size_t skip = 0;
    if (!voice->fresh) return 0;
    while (skip < size && text[skip] == '\n') skip++;
    if (skip < size) voice->fresh = false;
    return skip;
}
