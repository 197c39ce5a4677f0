/* Declarations shared by the files that read a request; for no others. */
#ifndef KEEPD_SERVER_OAI_FIELDS_H
#define KEEPD_SERVER_OAI_FIELDS_H

#include "server/oai/kind.h"

/* The values of a field that leave the answer unchanged; `null` always does. */
enum oai_neutral {
    OAI_ANY,   /* the field is read elsewhere, or does not influence the answer */
    OAI_NEVER, /* no value leaves the answer unchanged */
    OAI_FALSE,
    OAI_TRUE,
    OAI_ONE,
    OAI_NONE,     /* "none" */
    OAI_NOLIST,   /* [] */
    OAI_ZERO,     /* 0 or false */
    OAI_ONLYTEXT, /* ["text"] */
    OAI_TOOLS,    /* [] or "none": the old form of tools */
};

/* Groups of fields shared by several kinds (fields.c). */
#define OAI_FIELDS_ANY        1u  /* in every body */
#define OAI_FIELDS_GENERATION 2u  /* how an answer is generated */
#define OAI_FIELDS_MESSAGES   4u  /* a chat as the template sees it */
#define OAI_FIELDS_PROMPT     8u  /* text or ids */
#define OAI_FIELDS_NATIVE     16u /* llama.cpp's own, in the bodies of its routes */
#define OAI_FIELDS_COMPLETION 32u /* names that only chats and completions have */

struct oai_field {
    const char *name;
    enum oai_neutral neutral;
};

/* Returns whether the field is in one of the groups that the kind shares with others. */
bool oai_is_shared(const struct oai_kind *kind, const char *name);

/* A member that marks a tool of a chat which a message shows instead of the list of tools. */
#define OAI_DEFERRED "defer_loading"

void oai_path(char path[OAI_PATH], const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Refuses fields that keepd does not serve, unless they have their neutral value, and, when
 * `strict`, unknown fields. */
int oai_check_fields(const struct oai_kind *kind, const cJSON *body, bool strict,
                     struct oai_error *error);

/* Returns whether the message has this role. */
bool oai_has_role(const cJSON *message, const char *role);

/* Checks the types of fields that only chats have, in a body without messages. 0 or -1. */
int oai_check_unused(const cJSON *body, struct oai_error *error);

/* Returns the id of a text that is exactly one token, or -1 (tokens.c). */
int32_t oai_find_token(const struct engine *engine, const char *text);

/* Returns the text that replaces a part of this type, such as an image, in a tool's result. */
const char *oai_left_out(const char *type);

/* Answers 400: `field` is `found` where `text` ("a string") is expected. Returns -1. */
int oai_expected(struct oai_error *error, const char *field, const char *text, const cJSON *found);

/* Checks `tools`: an array of functions with valid names, not too many. 0 or -1. */
int oai_check_tools(const cJSON *tools, struct oai_error *error);

/* One request being read: what every step needs. Steps return 0, or -1 with *error filled. */
struct oai_reader {
    const cJSON *body;
    const struct oai_rules *rules;
    struct arena *arena;
    struct oai_request *out;
    struct oai_error *error;
};

/* Builds the chat template's context: messages with their content as one string, tools,
 * add_generation_prompt, continue_final_message and the members of chat_template_kwargs. Pictures
 * become those of the request, in order, and each message with pictures says where they stand
 * (ENGINE_CHAT_PICTURE_ENDS). Without rules there are no pictures, and no arena is needed. */
int oai_build_context(struct oai_reader *r);

/* Returns whether the part is a picture, and the model sees pictures. */
bool oai_is_picture(const struct oai_reader *r, const cJSON *part);
/* Reads such a part, which lies at `path`, and adds it to the request's pictures (pictures.c). */
int oai_add_picture(struct oai_reader *r, const cJSON *part, const char *path);
/* The same of a file in base64, a string, of a model that sees pictures. */
int oai_add_base64(struct oai_reader *r, const cJSON *node, const char *path);

int oai_no_memory(const struct oai_reader *r);
int oai_missing(const struct oai_reader *r, const char *field);
/* Refuses a body without `field`, or with the route's own name of it where that differs. */
int oai_missing_here(const struct oai_reader *r, const char *field);
int oai_invalid(const struct oai_reader *r, const char *field, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Read typed members of `object`, which lies at `path` (NULL: the body). If the member is absent or
 * null, *value does not change. */
int oai_get_float(const struct oai_reader *r, const char *path, const cJSON *object,
                  const char *key, double min, double max, float *value);
int oai_get_int(const struct oai_reader *r, const char *path, const cJSON *object, const char *key,
                int64_t min, int32_t max, int32_t *value);
/* Reads a number of alternatives for each token, at most engine_info.max_logprobs. -1 means the
 * whole vocabulary, if max_logprobs permits that many. */
int oai_get_alternatives(const struct oai_reader *r, const cJSON *object, const char *key,
                         int32_t *value);
int oai_get_bool(const struct oai_reader *r, const char *path, const cJSON *object, const char *key,
                 bool *value);
int oai_get_str(const struct oai_reader *r, const char *path, const cJSON *object, const char *key,
                const char **value);
int oai_get_object(const struct oai_reader *r, const char *key, const cJSON **value);
/* Reads an array of token ids at `node` into the arena. */
int oai_get_ids(const struct oai_reader *r, const cJSON *node, const char *field,
                const int32_t **ids, size_t *count);

/* A bound on the text of a message, below which the body is bounded long before. */
#define OAI_CONTENT_BYTES_MAX (256u << 20)

/* Returns a message's text: oai_build_context made each content a string. */
const char *oai_message_text(const cJSON *message);
/* Replaces the content by the text, and closes the text. false: no memory. */
bool oai_set_content(cJSON *message, struct buf *text);
/* Joins messages to turns of the user. With `results`: results of tools that follow each other, and
 * the user's text after them. Where turns alternate: also messages of the user that follow each
 * other, and those of the system, but for the first one and those in the place of an answer where
 * the template shows such. If it takes no turn behind a result, the result takes in the text.
 * false: no memory. */
bool oai_join_turns(cJSON *messages, const struct oai_turns *turns, bool results);
/* Rewrites the context that was built for the generic form of tools (oai_tool_style). */
int oai_write_tools(struct oai_reader *r);
/* Writes calls into the texts of the assistant's messages, in the model's form. */
int oai_write_calls(struct oai_reader *r);
/* Returns whether calls of this form can be written so. */
bool oai_can_write_calls(const struct tool_form *form);
/* Refuses a model that is not served, by the name in `field`. */
int oai_read_model(struct oai_reader *r, const char *field);
/* Read prompts: `messages`, or `prompt`, which is a string, a list of ids and strings, or a list of
 * such prompts (parse.c). */
int oai_read_messages(struct oai_reader *r);
/* Both steps of it: the context with the client's messages, which then become those that the
 * template takes. */
int oai_open_messages(struct oai_reader *r);
int oai_adapt_messages(struct oai_reader *r);
int oai_read_prompts(struct oai_reader *r);
/* The same from another field, of at most `most` prompts. */
int oai_read_texts(struct oai_reader *r, const char *name, int most);
/* Makes the request one for vectors, if the model has them: its prompts are read and nothing is
 * generated (embeddings.c). */
int oai_read_pooling(struct oai_reader *r);
/* Refuses more numbers in the vectors of an answer than are written at once; `field` has the texts.
 */
int oai_check_numbers(const struct oai_reader *r, const char *field);
/* Reads the text behind a gap: `suffix` (completion.c). */
int oai_read_suffix(struct oai_reader *r);
/* Reads a flag and a number, `logprobs` and `top_logprobs`, as chats have them (chat.c). */
int oai_read_chat_scores(struct oai_reader *r);
/* Reads all fields of the group GENERATION. The kind has read `echo` and `logprobs` before
 * (parse.c). */
int oai_read_generation(struct oai_reader *r);
/* Read how tokens are chosen, what ends an answer and what it shows (sampling.c). */
void oai_preset_sampling(struct oai_reader *r);
int oai_read_sampling(struct oai_reader *r);
/* Reads truncate_prompt_tokens; -1 keeps as many tokens as leave room for the answer (sampling.c).
 */
int oai_read_truncation(struct oai_reader *r);
/* Reads tools, tool_choice and parallel_tool_calls of a chat whose context is built (tools.c). */
int oai_read_tools(struct oai_reader *r);
/* Reads the language of answers: response_format and similar fields, and promised calls. Tools are
 * read before (constraint.c). */
int oai_read_constraint(struct oai_reader *r);
/* Reads the kv object (kv.c). */
int oai_read_kv(struct oai_reader *r);

#endif
