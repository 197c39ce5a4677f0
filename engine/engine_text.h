/* Text of an engine: its tokenizer, its chat template, and constraints that are compiled for its
 * vocabulary. All of it is immutable: any thread, between open and close. */
#ifndef KEEPD_ENGINE_ENGINE_TEXT_H
#define KEEPD_ENGINE_ENGINE_TEXT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/err.h"
#include "constrain/constrain.h"
#include "picture/picture.h"

struct engine;

struct engine_ids {
    int32_t *ids; /* in the caller's arena */
    size_t count;
    size_t second;                     /* the place of a pair's second text; else 0 */
    struct picture_rows *picture_rows; /* [picture_row_count] of a chat, in the caller's arena */
    int picture_row_count;
};

/* Tokenizes plain text as a completion prompt. Special tokens in the text are NOT recognised unless
 * `parse_special`; `add_special` runs the model's post-processor (BOS). */
int engine_tokenize(const struct engine *engine, const char *text, size_t size, bool add_special,
                    bool parse_special, struct arena *arena, struct engine_ids *out,
                    struct fault *fault);

/* A member of the context below, which the template does not see: true where the chat stands behind
 * other tokens, so that bos_token is "". */
#define ENGINE_CHAT_LATER "begins_later"

/* Tokenizes two texts as the model's tokenizer joins them. `most` above 0: the second text is
 * shortened at its end so that there are no more tokens, if the first one leaves room for it.
 * ERR_UNSUPPORTED: the tokenizer joins none. */
int engine_tokenize_pair(const struct engine *engine, const char *first, const char *second,
                         size_t most, struct arena *arena, struct engine_ids *out,
                         struct fault *fault);

/* A member of a message with pictures: for each of them, in order, how many bytes of the content
 * are behind it. */
#define ENGINE_CHAT_PICTURE_ENDS "picture_ends"

/* A chat. `context` holds messages, whose contents are strings, tools, chat_template_kwargs'
 * members and add_generation_prompt; the engine adds bos_token and eos_token. With
 * continue_final_message true the text ends with that of the last message, which must not be blank.
 */
struct engine_chat {
    const cJSON *context;
    const struct picture *const *pictures; /* all messages' pictures, in order */
    int picture_count;
    int longest; /* tokens */
};

/* Renders the chat template and tokenizes the result. ERR_LIMIT: it has more than `longest` tokens.
 */
int engine_render_chat(const struct engine *engine, const struct engine_chat *chat,
                       struct arena *arena, struct engine_ids *out, struct fault *fault);

/* Renders a template's source, without the model's strings. The text is in the arena. */
int engine_render_template(const char *source, const cJSON *context, struct arena *arena,
                           const char **out, struct fault *fault);

/* Returns how many tokens of the rendered chat its system messages and tools fix: the border of a
 * request (struct engine_request); 0: none worth keeping. */
int32_t engine_chat_border(const struct engine *engine, const cJSON *context,
                           const struct engine_ids *ids);

/* Returns the raw bytes of a token, possibly part of a character; 0: the id is not in the
 * vocabulary. */
size_t engine_token_bytes(const struct engine *engine, int32_t id, const char **bytes);
/* Returns the bytes of the first token of a text: SentencePiece's tokenizers put a space in front
 * of a text, and their decoders drop it again. */
size_t engine_first_bytes(const struct engine *engine, int32_t id, const char **bytes);
bool engine_token_is_special(const struct engine *engine, int32_t id);
/* Makes the special tokens of a text, such as the tags of calls, part of answers from now on: their
 * bytes are in the text, and constraints may allow them. Tokens that end answers stay special. Only
 * before the first request. */
void engine_show_tokens(struct engine *engine, const char *text, size_t size);
/* Returns whether no token of a text ends answers, so that all of it can be part of them. */
bool engine_can_show(const struct engine *engine, const char *text, size_t size);
/* Returns the vocabulary's own spelling of a token, which is valid UTF-8; 0 for ids outside the
 * vocabulary. */
size_t engine_token_name(const struct engine *engine, int32_t id, const char **name);
/* Returns how many special tokens engine_tokenize adds in front of a text. */
int engine_added_before(const struct engine *engine);
int engine_added_after(const struct engine *engine); /* and behind it */

/* ---- Constraints ---- */

/* A language that answers must belong to (constrain/constrain.h), compiled for this vocabulary. */
struct engine_constraint;

/* Compiles it, or finds it among those compiled before. Errors as constrain_open. Takes up to
 * seconds: not on the loop. The constraint stays valid until engine_constraint_close, which comes
 * after the last job that uses it is closed and before engine_close. ERR_BUSY, without a fault: as
 * many as may be are compiled now; ask again later, from a thread that others need meanwhile. */
int engine_constraint_open(struct engine *engine, const struct constrain_part *part,
                           struct engine_constraint **out, struct fault *fault);
void engine_constraint_close(struct engine *engine, struct engine_constraint *constraint);

#endif
