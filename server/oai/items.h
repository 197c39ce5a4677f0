/* An answer as a list of items: thoughts, texts and calls, one after another, as /v1/responses and
 * /v1/messages have it. The parts of an answer, streamed or whole, go in; a writer is told where an
 * item begins, grows and ends. White space alone begins no item, and between two items it is left
 * out. All members are zero before oai_items_open; `text.failed` means that memory was short. */
#ifndef KEEPD_SERVER_OAI_ITEMS_H
#define KEEPD_SERVER_OAI_ITEMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

struct oai_answer;
struct oai_delta;
struct oai_events;
struct oai_items;

enum oai_item_kind { OAI_ITEM_NONE, OAI_ITEM_THOUGHT, OAI_ITEM_TEXT, OAI_ITEM_CALL };

/* Functions that write the open item of `items`. Each may be NULL. */
struct oai_item_writer {
    void (*begin)(void *to, const struct oai_items *items);
    /* text[0, size) is the newest piece of the text; the scores of tokens [begin, end) belong to it
     */
    void (*more)(void *to, const struct oai_items *items, const char *text, size_t size,
                 uint32_t begin, uint32_t end);
    void (*end)(void *to, const struct oai_items *items);
};

struct oai_items {
    const struct oai_item_writer *writer;
    void *to;
    enum oai_item_kind kind; /* kind of the open item; NONE: no item is open */
    int count;               /* items begun; the open one is the last of them */
    bool last;               /* the open item is the last of the answer */
    uint32_t call;           /* number of the call, from 0 */
    struct buf name;         /* name of the call */
    struct buf text;         /* the open item's so far: text, or arguments */
    uint32_t begin, end;     /* the tokens whose text the open item has */
    bool unscored;           /* the writer leaves scores out */
    struct buf blank;        /* white space that has begun no item */
    uint32_t blank_begin;
};

void oai_items_open(struct oai_items *items, const struct oai_item_writer *writer, void *to);
void oai_items_close(struct oai_items *items);
void oai_items_take(struct oai_items *items, const struct oai_delta *delta);
/* Ends the answer. If it has no item, it gets an empty text. */
void oai_items_end(struct oai_items *items);

/* Writes the items of a finished answer with commas between them. Returns true if it ends with a
 * call. */
bool oai_items_write(struct buf *out, const struct oai_answer *answer,
                     void (*write)(struct buf *out, const struct oai_answer *answer,
                                   const struct oai_items *items));
/* Writes a text of an item as a JSON string. */
void oai_write_text(struct buf *out, const struct buf *text);
/* Writes the arguments of a call if they are an object, otherwise in Anthropic's form for invalid
 * ones. */
void oai_write_object(struct buf *out, const struct buf *text);

/* Adds a part of a streamed answer to the items of the events. It has the signature of a form's
 * `delta`. */
void oai_items_delta(struct oai_events *events, const struct oai_delta *delta);

#endif
