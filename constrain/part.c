/* The text form of parts, which is the key of compiled languages in a cache. Each piece is preceded
 * by its length, so two different parts never have the same text. */
#include "base/json.h"
#include "constrain/constrain.h"

#include <string.h>

static void write_tags(const struct constrain_tags *tags, struct buf *out) {
    const char *const texts[] = {tags->open,
                                 tags->named,
                                 tags->gap,
                                 tags->value,
                                 tags->line,
                                 tags->close,
                                 tags->after,
                                 tags->behind_close ? tags->behind_close : "",
                                 tags->item ? tags->item : "",
                                 tags->raw[0] ? tags->raw[0] : "",
                                 tags->raw[1] ? tags->raw[1] : ""};
    buf_char(out, tags->typed[0] ? 'T' : 't');
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        buf_fmt(out, "%zu:%s", strlen(texts[i]), texts[i]);
    for (size_t i = 0; tags->typed[0] && i < CONSTRAIN_TYPE_COUNT; i++)
        buf_fmt(out, "%zu:%s", strlen(tags->typed[i]), tags->typed[i]);
}

static void write_notation(const struct constrain_notation *notation, struct buf *out) {
    const char *const texts[] = {
        notation->brackets, notation->assign,   notation->mark ? notation->mark : "",
        notation->space,    notation->words[0], notation->words[1],
        notation->words[2]};
    buf_char(out, notation->mark ? 'M' : 'm');
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        buf_fmt(out, "%zu:%s", strlen(texts[i]), texts[i]);
}

void constrain_part_write(const struct constrain_part *part, struct buf *out) {
    buf_fmt(out, "%d,%d,%d,%d,", (int)part->kind, part->min, part->max, part->count);
    buf_fmt(out, "%zu:", part->text != NULL ? part->size : 0);
    if (part->text != NULL) buf_add(out, part->text, part->size);
    if (part->only_objects) buf_char(out, 'o');
    if (part->tags != NULL) write_tags(part->tags, out);
    if (part->notation != NULL) write_notation(part->notation, out);
    if (part->closed) buf_char(out, 'c');
    if (part->one_spacing) buf_char(out, 's');
    if (part->schema != NULL) json_write_node(out, part->schema);
    buf_char(out, ';');
    for (int i = 0; i < part->count; i++) constrain_part_write(&part->children[i], out);
}
