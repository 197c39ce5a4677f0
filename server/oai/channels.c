/* Answers in channels, the Harmony format of gpt-oss: an answer is a list of messages, each with a
 * header that says what it is:
 *
 *   <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
 *   <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
 *
 * The channel `analysis` is reasoning, a message to one of the request's functions is a call, all
 * others are the answer. The recipient may also stand in front of the channel. Special tokens mark
 * all borders, so nothing is searched in the text, and a header is text that is not shown. */
#include <string.h>

#include "server/oai/fields.h"

#define CHANNEL_MARK   '\n' /* stands for <|channel|> in a header */
#define CONSTRAIN_MARK '\r'
#define WORD_ENDS      " \t\r\n"

struct oai_channels oai_find_channels(const struct engine *engine) {
    struct oai_channels channels = {
        .start = oai_find_token(engine, "<|start|>"),
        .channel = oai_find_token(engine, "<|channel|>"),
        .constrain = oai_find_token(engine, "<|constrain|>"),
        .message = oai_find_token(engine, "<|message|>"),
        .end = oai_find_token(engine, "<|end|>"),
        .called = oai_find_token(engine, "<|call|>"),
        .returned = oai_find_token(engine, "<|return|>"),
    };
    channels.known = channels.start >= 0 && channels.channel >= 0 && channels.message >= 0;
    return channels;
}

/* Returns whether the answer has channels. A constrained answer has none: all of it is text of its
 * language. */
bool oai_reads_channels(const struct oai_answer *answer) {
    const struct oai_request *request = answer->request;
    return answer->rules->channels.known && !request->sampling.constraint &&
           (oai_splits_reasoning(answer) || oai_reads_calls(answer));
}

/* --- headers --- */

static void begin_header(struct oai_voice *voice) {
    voice->hidden = true;
    voice->thinking = voice->calling = false;
    voice->header_size = 0;
}

static void add_to_header(struct oai_voice *voice, const char *text, size_t size) {
    size_t room = sizeof voice->header - voice->header_size;
    if (size > room) size = room; /* no header that is understood is longer */
    memcpy(voice->header + voice->header_size, text, size);
    voice->header_size = (uint16_t)(voice->header_size + size);
}

static bool is_channel(const struct oai_voice *voice, const char *name) {
    const char *end = voice->header + voice->header_size;
    const char *at = memchr(voice->header, CHANNEL_MARK, voice->header_size);
    size_t size = strlen(name);
    if (!at) return false;
    do at++;
    while (at < end && *at == ' ');
    return (size_t)(end - at) >= size && memcmp(at, name, size) == 0 &&
           ((size_t)(end - at) == size || strchr(WORD_ENDS, at[size]));
}

/* Returns the index of the function that the message goes to; -1: none of the request's. */
static int find_function(const struct oai_voice *voice, const struct tool_set *tools) {
    static const char mark[] = "to=functions.";
    const char *end = voice->header + voice->header_size;
    const char *at = memmem(voice->header, voice->header_size, mark, sizeof mark - 1);
    if (!at) return -1;
    at += sizeof mark - 1;
    size_t size = 0;
    while (at + size < end && !strchr(WORD_ENDS, at[size])) size++;
    for (int i = 0; i < tools->count; i++)
        if (strlen(tools->names[i]) == size && memcmp(tools->names[i], at, size) == 0) return i;
    return -1;
}

static void end_header(struct oai_voice *voice, const struct oai_answer *answer) {
    const struct oai_request *request = answer->request;
    const struct tool_form *form = request->tools.form;
    int tool =
        form && form->shape == TOOL_SHAPE_CHANNELS ? find_function(voice, &request->tools) : -1;
    voice->hidden = false;
    voice->calling = voice->bare = tool >= 0;
    voice->tool = tool;
    voice->thinking =
        !voice->calling && oai_splits_reasoning(answer) && is_channel(voice, "analysis");
}

/* --- steps --- */

bool oai_channels_step(struct oai_voice *voice, const struct oai_answer *answer, int32_t token) {
    const struct oai_channels *channels = &answer->rules->channels;
    const char *bytes = "";
    if (token == channels->start || token == channels->end || token == channels->called ||
        token == channels->returned || (token == channels->channel && !voice->hidden)) {
        begin_header(voice);
        if (token == channels->channel) add_to_header(voice, &(char){CHANNEL_MARK}, 1);
        return true;
    }
    voice->reasoning_tokens += voice->thinking;
    if (voice->hidden && token == channels->message) {
        end_header(voice, answer);
        return true;
    }
    if (voice->hidden && token == channels->channel) {
        add_to_header(voice, &(char){CHANNEL_MARK}, 1);
    } else if (voice->hidden && token == channels->constrain) {
        add_to_header(voice, &(char){CONSTRAIN_MARK}, 1);
    } else if (!engine_token_is_special(answer->engine, token)) {
        size_t size = engine_token_bytes(answer->engine, token, &bytes);
        if (voice->hidden) add_to_header(voice, bytes, size);
        if (size) voice->bare = false;
    }
    return false;
}

/* Returns the voice at the beginning of an answer. The prompt has begun the message, often with the
 * role only. A prompt without messages is not in this format, and its answer is text. */
struct oai_voice oai_channels_open(const struct oai_answer *answer,
                                   const struct engine_request *request) {
    struct oai_voice voice = {.channels = true, .tool = -1};
    int32_t at = request->prompt_count;
    while (at > 0 && request->prompt[at - 1] != answer->rules->channels.start) at--;
    if (at == 0) return voice;
    for (int32_t i = at - 1; i < request->prompt_count; i++)
        oai_channels_step(&voice, answer, request->prompt[i]);
    voice.reasoning_tokens = 0;
    if (voice.calling) voice.calling = voice.bare = false; /* the prompt has the call's name */
    return voice;
}
