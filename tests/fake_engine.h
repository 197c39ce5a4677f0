/* The interface between the parts of the fake engine: fake_engine.c has the thread, queues
 * and conversations, fake_answer.c the answers, fake_text.c the tokens and the fake's own chat
 * template, fake_template.c published ones, fake_adapters.c the LoRA adapters. */
#ifndef KEEPD_TESTS_FAKE_ENGINE_H
#define KEEPD_TESTS_FAKE_ENGINE_H

#include <pthread.h>
#include <stdbool.h>

#include "engine/engine.h"
#include "text/chat.h"

/* Tokens below IM_START are bytes. */
enum { IM_START = 256, IM_END, END_OF_TEXT, VOCAB, THINK = VOCAB, END_THINK, VOCAB_THINK };
/* FIM_PREFIX, FIM_SUFFIX and FIM_MIDDLE are the last of a vocabulary with them. */
enum { FIM_PREFIX = VOCAB_THINK, VOCAB_FIM = FIM_PREFIX + 3 };
/* START to RETURN are the last of a vocabulary with channels. */
enum { START = VOCAB_FIM, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN, VOCAB_CHANNELS };

extern const char *const fake_special_names[]; /* from IM_START on */
const char *fake_tool_template(void);          /* as KEEPD_FAKE_TOOLS says */
void fake_wait_at_gate(void);                  /* until the file of KEEPD_FAKE_GATE is there */
bool fake_has_channels(const struct engine *e);
bool fake_opens_thought(const struct engine *e);

/* A published chat template, of --chat-template; both NULL: the fake's own. */
struct fake_template {
    char *source;
    struct chat *chat;
};

/* `path` NULL or "": the fake's own. Errors as file_read and chat_open have them. */
int fake_template_open(const char *path, struct fake_template *out, struct fault *fault);
void fake_template_close(struct fake_template *published);
/* Renders a chat; the text is in the arena. */
int fake_template_render(const struct fake_template *published, const cJSON *context,
                         struct arena *arena, const char **out, struct fault *fault);
const struct fake_template *fake_template(const struct engine *e);

struct fake_adapters {
    int max;
    pthread_mutex_t mutex;                               /* all below */
    struct engine_adapter_row rows[ENGINE_ADAPTERS_MAX]; /* "" = none */
};

/* Places those of the options, "NAME=PATH". */
int fake_adapters_open(struct fake_adapters *adapters, const struct engine_options *options,
                       struct fault *fault);
struct fake_adapters *fake_adapters(struct engine *e);

#endif
