/* Items as stored responses keep them: their id, their type and the members that are read again,
 * and nothing else of what a client sent. So the memory of a chain of responses grows with its
 * prompt. */
#ifndef KEEPD_SERVER_OAI_STORED_H
#define KEEPD_SERVER_OAI_STORED_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

/* Appends the items of a list that was read without error, as elements of an array. An item without
 * a usable id gets one from its place; an item without a type is a message. Reasoning without
 * content and foreign items, which are not read, are left out. `*place` counts the items. */
void oai_store_items(struct buf *out, const cJSON *list, int *place);

/* Returns whether an item is read by other servers only: calls of tools that they run, their
 * results, and summaries in their own form. */
bool oai_item_is_foreign(const cJSON *item);

/* Finds the item with this id among `items`, elements of an array. Returns its size, and in *at
 * where it begins; 0: there is none. */
size_t oai_find_stored_item(const char *items, size_t size, const char *id, size_t *at);

/* Returns where the events behind the first `count` begin; `size`: there are no more. */
size_t oai_skip_stored_events(const char *events, size_t size, uint64_t count);

/* A part of a list of items. */
struct oai_page {
    const char *after; /* id of the item before the first one; NULL: from the beginning */
    int limit;         /* items, at most; 0 = all */
    bool descending;   /* the last item comes first */
};

/* Writes a page of `items`, elements of an array, as a list. ERR_NOTFOUND: no item has the id. If
 * several have it, the last one counts, so that a client that asks for page after page comes to an
 * end. */
int oai_write_page(struct buf *out, const char *items, size_t size, const struct oai_page *page);

#endif
