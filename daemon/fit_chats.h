/* Chats in OpenAI's form, for the fit: each line of FILE.jsonl is {"messages": [...], "tools":
 * [...]}. */
#ifndef KEEPD_DAEMON_FIT_CHATS_H
#define KEEPD_DAEMON_FIT_CHATS_H

#include "base/buf.h"
#include "base/err.h"
#include "picture/decoder.h"
#include "server/oai/oai.h"

/* Chats as struct engine_fit_source has them: a line of JSON for each, with the context that a chat
 * template takes, and their pictures, in order. Owned by the caller: fit_chats_close. */
struct fit_chats {
    struct buf lines;
    struct picture **pictures;
    int picture_count, picture_room;
};

/* How a model takes chats. */
struct fit_form {
    struct picture_form pictures; /* kind NONE: a chat with pictures is refused */
    struct oai_turns turns;       /* messages are joined to turns as the server does */
};

/* Reads chats. Pictures are data: addresses and take at most PICTURE_MEMORY_MAX. ERR_INVALID names
 * the line. On failure nothing is kept. */
int fit_read_chats(const char *lines, size_t size, const struct fit_form *form,
                   struct fit_chats *out, struct fault *fault);
void fit_chats_close(struct fit_chats *chats);

#endif
