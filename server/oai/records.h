/* Stored responses: what a later request with previous_response_id continues, and what GET
 * /v1/responses/{id} shows. They lie in a bounded table in memory. When it is full, the key that
 * has the most loses the responses that it used least recently. When the process ends, all are
 * lost. A response is found only by its owner.
 *
 * Any thread; each function holds a lock for as long as it looks for a response and copies it.
 * Items are searched without the lock. */
#ifndef KEEPD_SERVER_OAI_RECORDS_H
#define KEEPD_SERVER_OAI_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

struct oai_records;

/* The owner of a response: an API key and a salt. */
struct oai_owner {
    uint8_t key[16];  /* hash of the key */
    const char *salt; /* "" = none */
};

/* The JSON texts of one response. */
struct oai_record {
    const char *items; /* elements of an array (stored.h): all that the model was given, without
                          instructions, and behind a comma the items of its answer */
    size_t items_size, input_size; /* input: without the answer and its comma */
    const char *answer;            /* the response object */
    size_t answer_size;
    const int32_t *tokens; /* ids of prompt and answer, as the model had them */
    size_t token_count;
    bool background;    /* computed in the background */
    bool streamed;      /* with events */
    const char *events; /* the events of its stream; "" = not kept */
    size_t events_size;
    /* The model whose tokens these are: its name, which outlives the table. Models are told apart
     * by the address. */
    const char *model;
};

/* A record may take at most this part of the table's bytes. */
#define OAI_RECORD_PART 16

/* Opens a table of at most `count` responses with `bytes` bytes together. NULL: no memory. */
struct oai_records *oai_records_open(size_t bytes, size_t count);
void oai_records_close(struct oai_records *records);

/* Stores a copy of the texts. To make room, the key with the most bytes, or the most responses,
 * loses those it used least recently. ERR_LIMIT: the record is larger than OAI_RECORD_PART allows;
 * ERR_NOMEM. */
int oai_records_put(struct oai_records *records, const struct oai_owner *owner, const char *id,
                    const struct oai_record *record);
/* The buffers that get a record's parts; each may be NULL. ERR_NOTFOUND, ERR_NOMEM. */
struct oai_record_parts {
    struct buf *items, *input, *answer, *events, *tokens; /* tokens: an int32_t each */
    bool *background, *streamed;
    const char *model; /* gets `tokens`; another model has other ids, and gets none */
};
int oai_records_find(struct oai_records *records, const struct oai_owner *owner, const char *id,
                     struct oai_record_parts parts);
/* Appends to `item` this owner's stored item with the id, the newest of several. *effort: bytes of
 * items that may be searched; the searched bytes are subtracted. ERR_NOTFOUND, ERR_NOMEM,
 * ERR_LIMIT: the bytes were not enough. */
int oai_records_find_item(struct oai_records *records, const struct oai_owner *owner,
                          const char *id, size_t *effort, struct buf *item);
/* Deletes a response. ERR_NOTFOUND. */
int oai_records_delete(struct oai_records *records, const struct oai_owner *owner, const char *id);

#endif
