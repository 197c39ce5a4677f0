/* Chats in OpenAI's form, for the fit: each line of FILE.jsonl is {"messages": [...], "tools":
 * [...]}. */
#ifndef KEEPD_DAEMON_FIT_CHATS_H
#define KEEPD_DAEMON_FIT_CHATS_H

#include "base/buf.h"
#include "base/err.h"

/* Appends, for each chat, one line of JSON with the context that a chat template takes (struct
 * engine_fit, chats). ERR_INVALID names the line. */
int fit_read_chats(const char *lines, size_t size, struct buf *out, struct fault *fault);

#endif
