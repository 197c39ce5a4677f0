/* Chats in the form of OpenAI's API for the fit: FILE.jsonl has {"messages": [...], "tools": [...]}
 * on each line. */
#ifndef KEEPD_DAEMON_FIT_CHATS_H
#define KEEPD_DAEMON_FIT_CHATS_H

#include "base/buf.h"
#include "base/err.h"

/* Appends what a chat template gets, JSON on a line for each chat (struct engine_fit, chats).
 * ERR_INVALID names the line. */
int fit_read_chats(const char *lines, size_t size, struct buf *out, struct fault *fault);

#endif
