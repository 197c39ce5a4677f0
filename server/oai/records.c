#include "server/oai/records.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "server/oai/stored.h"

/* A key that owns responses. */
struct holder {
    struct holder *next;
    uint8_t key[16];
    size_t bytes, count; /* sums over its rows; it is freed with the last one */
};

/* A stored response. Its parts follow this struct in the same allocation: tokens, id, salt, items,
 * answer, events. */
struct row {
    struct row *next, *prev; /* in the order of their last use, the newest first */
    int refs;                /* one reference for the table; the last one frees the row */
    size_t size;             /* size of the allocation */
    struct holder *holder;
    const char *id, *salt; /* NUL-terminated */
    struct oai_record texts;
};

struct oai_records {
    pthread_mutex_t lock;
    struct row *first, *last;
    struct holder *holders;
    size_t bytes, count; /* sums over all rows */
    size_t bytes_max, count_max;
};

struct oai_records *oai_records_open(size_t bytes, size_t count) {
    struct oai_records *records = mem_try_alloc(1, sizeof *records);
    if (!records) return NULL;
    pthread_mutex_init(&records->lock, NULL);
    records->bytes_max = bytes;
    records->count_max = count;
    return records;
}

static void take_out(struct oai_records *records, struct row *row) {
    *(row->prev ? &row->prev->next : &records->first) = row->next;
    *(row->next ? &row->next->prev : &records->last) = row->prev;
}

static void put_first(struct oai_records *records, struct row *row) {
    row->prev = NULL;
    row->next = records->first;
    *(row->next ? &row->next->prev : &records->last) = row;
    records->first = row;
}

/* --- holders --- */

/* Returns the holder of a key, which is created if there is none; NULL: no memory. */
static struct holder *hold(struct oai_records *records, const uint8_t key[16]) {
    struct holder *h = records->holders;
    while (h && memcmp(h->key, key, sizeof h->key) != 0) h = h->next;
    if (h) return h;
    h = mem_try_alloc(1, sizeof *h);
    if (!h) return NULL;
    memcpy(h->key, key, sizeof h->key);
    h->next = records->holders;
    records->holders = h;
    return h;
}

static void drop_holder(struct oai_records *records, struct holder *holder) {
    struct holder **at = &records->holders;
    while (*at != holder) at = &(*at)->next;
    *at = holder->next;
    mem_free(holder);
}

static void insert(struct oai_records *records, struct row *row, struct holder *holder) {
    row->holder = holder;
    holder->bytes += row->size;
    holder->count++;
    records->bytes += row->size;
    records->count++;
    put_first(records, row);
}

static void unref(struct row *row) {
    if (--row->refs == 0) mem_free(row);
}

static void drop(struct oai_records *records, struct row *row) {
    take_out(records, row);
    row->holder->bytes -= row->size;
    row->holder->count--;
    records->bytes -= row->size;
    records->count--;
    if (!row->holder->count) drop_holder(records, row->holder);
    unref(row);
}

/* Returns the holder with the most bytes, or the most rows. */
static const struct holder *largest(const struct oai_records *records, bool by_bytes) {
    const struct holder *most = records->holders;
    for (const struct holder *h = most; h; h = h->next)
        if (by_bytes ? h->bytes > most->bytes : h->count > most->count) most = h;
    return most;
}

/* Removes rows until the table fits its bounds, but never the first row, which has just been added.
 */
static void trim(struct oai_records *records) {
    while (records->first != records->last &&
           (records->bytes > records->bytes_max || records->count > records->count_max)) {
        const struct holder *most = largest(records, records->bytes > records->bytes_max);
        struct row *row = records->last;
        while (row->holder != most) row = row->prev;
        drop(records, row == records->first ? records->last : row);
    }
}

void oai_records_close(struct oai_records *records) {
    if (!records) return;
    while (records->first) drop(records, records->first);
    pthread_mutex_destroy(&records->lock);
    mem_free(records);
}

static bool is_owner(const struct row *row, const struct oai_owner *owner) {
    return memcmp(row->holder->key, owner->key, sizeof row->holder->key) == 0 &&
           strcmp(row->salt, owner->salt) == 0;
}

static struct row *records_find(const struct oai_records *records, const struct oai_owner *owner,
                                const char *id) {
    for (struct row *row = records->first; row; row = row->next)
        if (strcmp(row->id, id) == 0 && is_owner(row, owner)) return row;
    return NULL;
}

/* Copies a text to *to, and moves *to past it and its NUL. */
static const char *copy(char **to, const char *text, size_t size) {
    char *at = *to;
    if (size) memcpy(at, text, size);
    at[size] = '\0';
    *to += size + 1;
    return at;
}

int oai_records_put(struct oai_records *records, const struct oai_owner *owner, const char *id,
                    const struct oai_record *record) {
    size_t id_size = strlen(id), salt_size = strlen(owner->salt);
    size_t size = sizeof(struct row) + id_size + salt_size + record->items_size +
                  record->answer_size + record->events_size + 5 +
                  record->token_count * sizeof *record->tokens;
    if (size > records->bytes_max / OAI_RECORD_PART || !records->count_max) return ERR_LIMIT;
    struct row *row = mem_try_alloc(1, size);
    if (!row) return ERR_NOMEM;
    int32_t *tokens = (int32_t *)(row + 1);
    char *to = (char *)(tokens + record->token_count);
    if (record->token_count) memcpy(tokens, record->tokens, record->token_count * sizeof *tokens);
    row->refs = 1;
    row->size = size;
    row->id = copy(&to, id, id_size);
    row->salt = copy(&to, owner->salt, salt_size);
    row->texts = (struct oai_record){.items = copy(&to, record->items, record->items_size),
                                     .items_size = record->items_size,
                                     .input_size = record->input_size};
    row->texts.answer = copy(&to, record->answer, record->answer_size);
    row->texts.answer_size = record->answer_size;
    row->texts.events = copy(&to, record->events, record->events_size);
    row->texts.events_size = record->events_size;
    row->texts.tokens = tokens;
    row->texts.token_count = record->token_count;
    row->texts.background = record->background;
    row->texts.streamed = record->streamed;
    row->texts.model = record->model;
    pthread_mutex_lock(&records->lock);
    struct holder *holder = hold(records, owner->key);
    if (holder) {
        insert(records, row, holder);
        trim(records);
    }
    pthread_mutex_unlock(&records->lock);
    if (holder) return 0;
    mem_free(row);
    return ERR_NOMEM;
}

int oai_records_find(struct oai_records *records, const struct oai_owner *owner, const char *id,
                     struct oai_record_parts parts) {
    struct buf *const all[] = {parts.items, parts.input, parts.answer, parts.events, parts.tokens};
    bool failed = false;
    pthread_mutex_lock(&records->lock);
    struct row *row = records_find(records, owner, id);
    if (row) {
        take_out(records, row);
        put_first(records, row);
        const struct oai_record *t = &row->texts;
        if (parts.items) buf_add(parts.items, t->items, t->items_size);
        if (parts.input) buf_add(parts.input, t->items, t->input_size);
        if (parts.answer) buf_add(parts.answer, t->answer, t->answer_size);
        if (parts.events) buf_add(parts.events, t->events, t->events_size);
        if (parts.background) *parts.background = t->background;
        if (parts.streamed) *parts.streamed = t->streamed;
        if (parts.tokens && parts.model == t->model)
            buf_add(parts.tokens, t->tokens, t->token_count * sizeof *t->tokens);
    }
    pthread_mutex_unlock(&records->lock);
    if (!row) return ERR_NOTFOUND;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) failed |= all[i] && all[i]->failed;
    return failed ? ERR_NOMEM : 0;
}

/* Takes a reference to each of the owner's rows, the newest first, and appends it to `rows`. */
static void ref_rows(struct oai_records *records, const struct oai_owner *owner, struct buf *rows) {
    pthread_mutex_lock(&records->lock);
    for (struct row *row = records->first; row && !rows->failed; row = row->next) {
        if (!is_owner(row, owner)) continue;
        buf_add(rows, &row, sizeof(struct row *));
        if (!rows->failed) row->refs++;
    }
    pthread_mutex_unlock(&records->lock);
}

static void unref_rows(struct oai_records *records, struct row *const *rows, size_t count) {
    pthread_mutex_lock(&records->lock);
    for (size_t i = 0; i < count; i++) unref(rows[i]);
    pthread_mutex_unlock(&records->lock);
}

static int find_in_row(const struct row *row, const char *id, size_t *effort, struct buf *item) {
    const struct oai_record *texts = &row->texts;
    size_t at;
    if (texts->items_size > *effort) return ERR_LIMIT;
    *effort -= texts->items_size;
    size_t size = oai_find_stored_item(texts->items, texts->items_size, id, &at);
    if (!size) return ERR_NOTFOUND;
    buf_add(item, texts->items + at, size);
    return item->failed ? ERR_NOMEM : 0;
}

/* Finds a stored item. Items are parts of texts, so the texts are searched, the newest response's
 * first. This can take many megabytes, so it is done without the lock, while others use the table.
 */
int oai_records_find_item(struct oai_records *records, const struct oai_owner *owner,
                          const char *id, size_t *effort, struct buf *item) {
    struct buf list;
    buf_open(&list, (records->count_max + 1) * sizeof(struct row *) + 1);
    ref_rows(records, owner, &list);
    struct row *const *rows = (struct row *const *)(const void *)list.data;
    size_t count = list.size / sizeof *rows;
    int rc = list.failed ? ERR_NOMEM : ERR_NOTFOUND;
    for (size_t i = 0; i < count && rc == ERR_NOTFOUND; i++)
        rc = find_in_row(rows[i], id, effort, item);
    unref_rows(records, rows, count);
    buf_close(&list);
    return rc;
}

int oai_records_delete(struct oai_records *records, const struct oai_owner *owner, const char *id) {
    pthread_mutex_lock(&records->lock);
    struct row *row = records_find(records, owner, id);
    if (row) drop(records, row);
    pthread_mutex_unlock(&records->lock);
    return row ? 0 : ERR_NOTFOUND;
}
