#include "server/oai/items.h"

#include "base/json.h"
#include "server/oai/kind.h"
#include "server/oai/tool_json.h"

#define BLANK_BYTES_MAX 256                 /* white space that is held back */
#define TEXT_BYTES_MAX  ((size_t)256 << 20) /* bound on one item */

void oai_items_open(struct oai_items *items, const struct oai_item_writer *writer, void *to) {
    *items = (struct oai_items){.writer = writer, .to = to};
    buf_open(&items->name, TEXT_BYTES_MAX);
    buf_open(&items->text, TEXT_BYTES_MAX);
    buf_open(&items->blank, TEXT_BYTES_MAX);
}

void oai_items_close(struct oai_items *items) {
    buf_close(&items->name);
    buf_close(&items->text);
    buf_close(&items->blank);
}

static void items_end_item(struct oai_items *items) {
    if (items->kind != OAI_ITEM_NONE && items->writer->end) items->writer->end(items->to, items);
    items->kind = OAI_ITEM_NONE;
}

static void items_begin_item(struct oai_items *items, enum oai_item_kind kind, uint32_t token) {
    items_end_item(items);
    items->kind = kind;
    items->count++;
    items->begin = items->end = token;
    buf_clear(&items->text);
    if (items->writer->begin) items->writer->begin(items->to, items);
}

static void grow(struct oai_items *items, const char *text, size_t size, uint32_t begin,
                 uint32_t end) {
    buf_add(&items->text, text, size);
    if (end > items->end) items->end = end;
    if (items->writer->more) items->writer->more(items->to, items, text, size, begin, end);
}

static bool items_is_blank(const char *text, size_t size) {
    size_t i = 0;
    while (i < size && tool_json_blank(text[i])) i++;
    return i == size;
}

/* Adds text to the open item. White space is held back until other text follows it. */
static void items_take_text(struct oai_items *items, enum oai_item_kind kind,
                            const struct oai_delta *delta) {
    struct buf *blank = &items->blank;
    if (items->kind == kind) {
        grow(items, delta->text, delta->size, delta->begin, delta->end);
        return;
    }
    if (!blank->size) items->blank_begin = delta->begin;
    buf_add(blank, delta->text, delta->size);
    items->text.failed |= blank->failed;
    if (items_is_blank(delta->text, delta->size) && blank->size < BLANK_BYTES_MAX) return;
    items_begin_item(items, kind, items->blank_begin);
    grow(items, blank->data ? blank->data : "", blank->size, items->blank_begin, delta->end);
    buf_clear(blank);
}

static void items_begin_call(struct oai_items *items, const struct oai_delta *delta) {
    items_end_item(items); /* before the next name is stored, because the end needs the old one */
    buf_clear(&items->blank);
    buf_clear(&items->name);
    buf_add(&items->name, delta->text, delta->size);
    items->call = delta->call;
    items_begin_item(items, OAI_ITEM_CALL, delta->begin);
    items->text.failed |= items->name.failed;
}

void oai_items_take(struct oai_items *items, const struct oai_delta *delta) {
    switch (delta->kind) {
    case TOOL_CALL:
        items_begin_call(items, delta);
        break;
    case TOOL_BARE:
        grow(items, "{}", 2, delta->begin, delta->end);
        break;
    case TOOL_ARGUMENTS:
        grow(items, delta->text, delta->size, delta->begin, delta->end);
        break;
    default:
        items_take_text(items, delta->thinking ? OAI_ITEM_THOUGHT : OAI_ITEM_TEXT, delta);
    }
}

void oai_items_end(struct oai_items *items) {
    if (!items->count) {
        items_begin_item(items, OAI_ITEM_TEXT, items->blank_begin);
        if (items->blank.size)
            grow(items, items->blank.data, items->blank.size, items->blank_begin,
                 items->blank_begin);
    }
    items->last = true;
    items_end_item(items);
}

/* --- whole answers, streamed answers --- */

struct whole {
    struct buf *out;
    const struct oai_answer *answer;
    void (*write)(struct buf *out, const struct oai_answer *answer, const struct oai_items *items);
    struct oai_items items;
};

static void items_take_part(void *to, const struct oai_delta *delta) {
    struct whole *whole = to;
    oai_items_take(&whole->items, delta);
}

static void end_whole(void *to, const struct oai_items *items) {
    struct whole *whole = to;
    if (items->count > 1) buf_char(whole->out, ',');
    whole->write(whole->out, whole->answer, items);
}

bool oai_items_write(struct buf *out, const struct oai_answer *answer,
                     void (*write)(struct buf *out, const struct oai_answer *answer,
                                   const struct oai_items *items)) {
    static const struct oai_item_writer writer = {.end = end_whole};
    struct whole whole = {.out = out, .answer = answer, .write = write};
    oai_items_open(&whole.items, &writer, &whole);
    bool called = oai_divide(answer, 0, (struct oai_sink){items_take_part, &whole});
    oai_items_end(&whole.items);
    buf_inherit(out, &whole.items.text);
    oai_items_close(&whole.items);
    return called;
}

void oai_write_text(struct buf *out, const struct buf *text) {
    json_write_str(out, text->data ? text->data : "", text->size);
}

void oai_write_object(struct buf *out, const struct buf *text) {
    const struct json_limits limits = {.bytes = text->size, .depth = OAI_JSON_DEPTH, .nuls = true};
    cJSON *tree = NULL;
    struct fault fault;
    bool whole = text->size && !json_parse(text->data, text->size, &limits, &tree, &fault) &&
                 cJSON_IsObject(tree);
    if (whole) {
        json_write_node(out, tree);
    } else {
        buf_str(out, "{\"INVALID_JSON\":");
        oai_write_text(out, text);
        buf_char(out, '}');
    }
    json_free(tree);
}

void oai_items_delta(struct oai_events *events, const struct oai_delta *delta) {
    oai_items_take(&events->items, delta);
    buf_inherit(&events->out, &events->items.text);
}
