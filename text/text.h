/* The tokenizer, the chat template and its strings, read from a model directory or a GGUF file.
 * Immutable after opening; any thread. */
#ifndef KEEPD_TEXT_TEXT_H
#define KEEPD_TEXT_TEXT_H

#include "picture/picture.h"
#include "text/chat.h"
#include "text/tok/tok.h"

struct text {
    struct tok *tok;
    struct chat *chat;          /* NULL: the model has no template and /chat is refused */
    struct chat *tool_chat;     /* for chats with tools; NULL: `chat` serves them */
    char *source, *tool_source; /* text of the templates; NULL without one */
    bool lists;      /* the template shows contents that are lists of parts, but no strings */
    char *bos, *eos; /* "" when the model names none */
    cJSON *tokens;   /* object: bos_token, eos_token, pad_token, image_token, ... as templates get
                        them */
};

/* In a directory it reads tokenizer.json (or what it replaced, see tok_open_dir),
 * tokenizer_config.json (optional) and the templates where transformers looks for them: the plain
 * one in chat_template.jinja, else tokenizer_config.json's chat_template (a string, or the list's
 * "default"); the one for tools in additional_chat_templates/tool_use.jinja, else the list's
 * "tool_use". If either file exists, the templates in tokenizer_config.json are ignored. A
 * `path` that is a file must be GGUF; its metadata are read. `given`, if neither NULL nor "", is a
 * file with a template, or TEXT_CHATML: it serves all chats, and the model's templates are not
 * read. Errors name the file, the key or "chat-template". On failure *text is empty. */
int text_open(const char *path, const char *given, struct text *text, struct fault *fault);
#define TEXT_CHATML "chatml"
void text_close(struct text *text);

/* A chat may have this many roles that are not OpenAI's: each costs one more rendering. */
#define TEXT_OWN_ROLES_MAX 4

/* A member of a message with pictures: for each of them, in order, how many bytes of the content
 * are behind it. The content is a string; the template gets a list of parts. */
#define TEXT_PICTURE_ENDS "picture_ends"

/* The pictures of a chat, in the order of its messages. */
struct text_pictures {
    enum picture_kind kind;
    const struct picture *const *pictures;
    int count;
    /* Where their tiles lie in the tokens, in the arena: filled by text_render_chat. */
    struct picture_rows *rows;
    int row_count;
};

/* Checks that the vocabulary has the token that stands for a picture: ERR_UNSUPPORTED. */
int text_check_pictures(const struct text *text, enum picture_kind kind, struct fault *fault);

/* Renders a chat and tokenises it; `pictures` NULL: it has none. In the rows of pictures the tokens
 * are the model's mark. ERR_INVALID with the field "messages[I].role": the template
 * leaves out the messages of this role, or does not name it; it is not one of OpenAI's. ERR_LIMIT
 * without a field: more than `max_ids` tokens. ERR_LIMIT with a field: the limit of the place that
 * the field names (the template's line, the tokenizer).
 */
int text_render_chat(const struct text *text, const cJSON *context, struct text_pictures *pictures,
                     size_t max_ids, struct arena *arena, struct tok_ids *out, struct fault *fault);

/* Returns how many of a rendered chat's tokens do not depend on what its user says: the tokens that
 * it has in common with a chat of the same system messages and tools and another question. Tokens
 * that a merge across the end of this text would change are not among them. 0: there are no such
 * messages and tools, they have fewer than `least` bytes, or they cannot be rendered alone. */
size_t text_chat_border(const struct text *text, const cJSON *context, const int32_t *ids,
                        size_t count, size_t least);

#define TEXT_ENDS_MAX 2
/* The tokens that end an answer by the model's texts, each once: eos_token, and the token that the
 * chat template writes behind the content of an assistant's message that is the last. Returns how
 * many. A template that writes no such token, or refuses a plain chat, adds none. */
size_t text_ends(const struct text *text, int32_t ends[TEXT_ENDS_MAX]);

#endif
