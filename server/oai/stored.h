/* Items as stored responses keep them: with their id, their type and the members that are read
 * again, and nothing else of what a client sent. So what a chain of responses stores grows with
 * its prompt. */
#ifndef KEEPD_SERVER_OAI_STORED_H
#define KEEPD_SERVER_OAI_STORED_H

#include <cjson/cJSON.h>

#include "base/buf.h"

/* Appends the items of a list that has been read without error, as elements of an array. Items
 * without a usable id get one by their place, items without a type are messages. Reasoning without
 * content, which is not read, is left out. `*place` counts the items. */
void oai_store_items(struct buf *out, const cJSON *list, int *place);

#endif
