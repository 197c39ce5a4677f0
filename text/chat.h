/* Chat templates: the Jinja dialect of published models as Hugging Face runs it (trim_blocks,
 * lstrip_blocks, loop controls), with output identical to Python's, and bounds on steps, depth,
 * memory and output (text/jinja/value.h). A compiled template is immutable; any thread may render
 * it.
 *
 * Rendering remembers which output bytes came from the request (string values of `messages` and
 * `tools`, their keys too) so that the tokenizer recognises special tokens only in what the
 * template itself wrote: "<|im_end|>" typed by a user cannot end a turn. A message's `role` is
 * trusted if it is one of OpenAI's (system, developer, user, assistant, tool, function), because
 * templates write '<|' + message.role + '|>'. */
#ifndef KEEPD_TEXT_CHAT_H
#define KEEPD_TEXT_CHAT_H

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "base/arena.h"
#include "base/err.h"
#include "text/tok/tok.h"

struct chat;

/* Pure: parses a template's source. ERR_MALFORMED names line and token. */
int chat_open(const char *source, size_t size, struct chat **out, struct fault *fault);
void chat_close(struct chat *chat);

struct chat_input {
    const cJSON *context;       /* object: messages, tools, add_generation_prompt, bos_token, ... */
    const char *const *trusted; /* top-level names whose strings are the model's own (bos_token,
                                   eos_token, ...); everything else counts as request text */
    int trusted_count;
    int64_t now; /* unix seconds for strftime_now (UTC) */
};

/* Is this one of OpenAI's roles? Any other belongs to the template. */
bool chat_is_known_role(const char *role);

struct chat_text {
    char *text; /* UTF-8, in the arena, NUL-terminated */
    size_t size;
    struct tok_span *untrusted; /* ascending, disjoint, in the arena */
    size_t untrusted_count;
};

/* Errors are the request's (400): raise_exception's message, undefined access, limits. */
int chat_render(const struct chat *chat, const struct chat_input *input, struct arena *arena,
                struct chat_text *out, struct fault *fault);

#endif
