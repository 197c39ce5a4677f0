/* A dialogue: its messages and settings as the body of a request, and a stream's events as text and
 * numbers. No sockets and no terminal.
 *
 * Thread: one. */
#ifndef KEEPD_CLIENT_DIALOGUE_H
#define KEEPD_CLIENT_DIALOGUE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"

#define DIALOGUE_MESSAGES_MAX 4096
#define DIALOGUE_PICTURE_MAX  ((size_t)20 << 20) /* bytes of a picture's file */

/* Settings of the user; "" or -1 is the server's own choice. */
struct dialogue_settings {
    char policy[64];
    int64_t budget, max_tokens, seed;
    double temperature; /* below 0: the server's */
    char *system;       /* the system message; NULL = none */
};

struct dialogue_message {
    bool assistant;
    char *pictures; /* parts of a request, with a comma behind each; NULL: none */
    char *text;
};

struct dialogue {
    char session[40]; /* X-Session-ID: a new one for each new or forked dialogue */
    struct dialogue_message *messages;
    int count;
    struct buf shown; /* pictures of the next message, as in a message */
    int shown_count;
};

void dialogue_open(struct dialogue *dialogue);
void dialogue_close(struct dialogue *dialogue);
/* Copies the messages into a dialogue with a session of its own. */
void dialogue_fork(const struct dialogue *from, struct dialogue *to);
/* Adds a picture's file to the next message. Returns false if that would be too long. */
bool dialogue_show(struct dialogue *dialogue, const char *file, size_t size);
void dialogue_hide(struct dialogue *dialogue); /* removes the pictures of the next message */
/* A message of the user gets the pictures that were added. Returns false if the dialogue already
 * has as many messages as it may. */
bool dialogue_say(struct dialogue *dialogue, bool assistant, const char *text);
void dialogue_take_back(struct dialogue *dialogue, int count); /* the last messages */
void dialogue_write(const struct dialogue *dialogue, const struct dialogue_settings *settings,
                    const char *model, struct buf *body);

/* The content of a stream so far. */
struct dialogue_answer {
    struct buf line, text; /* an unfinished line of the stream; the answer */
    void (*show)(void *arg, const char *text, bool reasoning); /* a piece of the answer */
    void (*progress)(void *arg, int64_t read, int64_t total);  /* while the prompt is read */
    void *arg;
    bool ended;       /* finish_reason was received */
    bool cut;         /* the answer ended at the limit of tokens */
    char error[512];  /* the message of an error event; "" = none */
    bool has_details; /* the numbers below were received */
    int64_t seen, kept, evicted, shifts, bytes, cached, answer_tokens; /* at most 2^53 each */
    char policy[64];
    int64_t budget;    /* 0: none */
    char warning[400]; /* the server's warning about settings; "" = none */
    double per_second;
};

void dialogue_answer_open(struct dialogue_answer *answer);
void dialogue_answer_close(struct dialogue_answer *answer);
/* Reads the next bytes of a stream. false: they are not a stream of events. */
bool dialogue_answer_take(struct dialogue_answer *answer, const char *data, size_t size);

/* Writes the message of an error's body, or the beginning of the body itself if it has none. */
void dialogue_error_text(const struct buf *body, char *out, size_t size);

#endif
